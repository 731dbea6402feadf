/* The table of parameters, and the binding of arguments by it. See signature.def. */
#include "call.h"

#include <stdio.h>
#include <string.h>

#include "problem/append.h"
#include "problem/backward.h"
#include "problem/merge.h"

_Static_assert(offsetof(fa_append_request, forward) == 0, "arrays and options have one offset in all requests");
_Static_assert(offsetof(fa_backward_request, forward) == 0, "arrays and options have one offset in all requests");
_Static_assert(offsetof(fa_merge_request, forward) == 0, "arrays and options have one offset in all requests");

#define REQUIRED        NULL
#define NONE            0
#define REQUEST(field)  offsetof(fa_request, field)
#define OPTION(field)   offsetof(fa_request, options.field)
#define BACKWARD(field) offsetof(fa_backward_request, field)
#define APPEND(field)   offsetof(fa_append_request, field)

const fa_parameter fa_parameters[FA_ARG_COUNT] = {
#define FA_PARAMETER(argument, name, passing, functions, kind, field, standard, type, doc)                             \
    {name, FA_##passing, functions, FA_KIND_##kind, field, standard, doc},
#include "signature.def"
#undef FA_PARAMETER
};

#define FA_PARAMETER(argument, name, passing, functions, kind, ...)                                                    \
    | (fa_arguments)(FA_KIND_##kind == FA_KIND_array) << FA_ARG_##argument
const fa_arguments fa_array_arguments = 0
#include "signature.def"
    ;
#undef FA_PARAMETER

#define FA_PARAMETER(argument, name, passing, functions, kind, ...)                                                    \
    | (fa_arguments)(FA_KIND_##kind >= FA_KIND_OPTIONS) << FA_ARG_##argument
const fa_arguments fa_option_arguments = 0
#include "signature.def"
    ;
#undef FA_PARAMETER

static bool none_is_absence(const fa_parameter *parameter) {
    return parameter->passing == FA_OR_NONE || (parameter->standard && strcmp(parameter->standard, "None") == 0);
}

bool fa_signatures_make(fa_signature signatures[FA_FN_COUNT]) {
    for (int function = 0; function < FA_FN_COUNT; function++) {
        fa_signature *s = &signatures[function];
        for (int n = 0; n < FA_ARG_COUNT; n++) {
            const fa_parameter *parameter = &fa_parameters[n];
            if (!(parameter->functions >> function & 1)) continue;
            PyObject *name = PyUnicode_InternFromString(parameter->name);
            if (!name) return false;
            s->argument[s->count] = (unsigned char)n;
            s->name[s->count++] = name;
            if (parameter->passing != FA_KEYWORD) s->positional = s->count;
            if (!parameter->standard) s->required |= FA_ARGUMENT(n);
            if (none_is_absence(parameter)) s->absent_by_none |= FA_ARGUMENT(n);
        }
    }
    return true;
}

void fa_signatures_clear(fa_signature signatures[FA_FN_COUNT]) {
    for (int function = 0; function < FA_FN_COUNT; function++)
        for (int n = 0; n < signatures[function].count; n++) Py_CLEAR(signatures[function].name[n]);
}

/* ---- binding ---- */

/* "q, k, v": the first `count` names of a signature. */
static void list_names(const fa_signature *s, int count, char text[512]) {
    size_t used = 0;
    text[0] = 0;
    for (int n = 0; n < count; n++)
        used += (size_t)snprintf(text + used, 512 - used, "%s%s", n ? ", " : "", fa_parameters[s->argument[n]].name);
}

static fa_code refuse_count(const fa_signature *s, Py_ssize_t count, fa_status *status) {
    char names[512];
    list_names(s, s->positional, names);
    return fa_fail(status, FA_ETYPE, "%zd positional arguments given; accepted: %s%s", (ssize_t)count, names,
                   s->count > s->positional ? "; the rest by keyword" : "");
}

static fa_code refuse_keyword(const fa_signature *s, PyObject *keyword, fa_status *status) {
    char names[512], shown[160];
    list_names(s, s->count, names);
    return fa_fail(status, FA_ETYPE, "unknown argument %.80s; accepted: %s", fa_shown(keyword, shown), names);
}

static fa_code refuse_missing(fa_argument argument, fa_status *status) {
    const char *doc = fa_parameters[argument].doc;
    return fa_fail(status, FA_ETYPE, "argument %s is missing; accepted: %.*s", fa_parameters[argument].name,
                   (int)strcspn(doc, "\n"), doc);
}

/* Place of a keyword in the signature, or -1. */
static int place_of(const fa_signature *s, PyObject *keyword) {
    int place = -1;
    for (int n = 0; n < s->count; n++) /* keywords in source code are interned; no exit to mispredict */
        place = s->name[n] == keyword ? n : place;
    for (int n = 0; n < s->count && place < 0; n++)
        if (PyUnicode_Compare(s->name[n], keyword) == 0) place = n;
    return place;
}

fa_code fa_bind(const fa_signature *s, PyObject *const *args, Py_ssize_t count, PyObject *keywords, fa_bound *bound,
                fa_status *status) {
    if (count > s->positional) return refuse_count(s, count, status);
    const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    fa_arguments seen = 0, absent = 0;
    for (Py_ssize_t n = 0; n < count + named; n++) {
        PyObject *keyword = n < count ? NULL : PyTuple_GetItem(keywords, n - count);
        const int place = keyword ? place_of(s, keyword) : (int)n;
        if (place < 0) return refuse_keyword(s, keyword, status);
        const int argument = s->argument[place];
        const fa_arguments bit = FA_ARGUMENT(argument);
        if (seen & bit) return fa_fail(status, FA_ETYPE, "argument %s was given twice", fa_parameters[argument].name);
        seen |= bit;
        absent |= args[n] == Py_None ? bit : 0;
        bound->value[argument] = args[n];
    }
    if (s->required & ~seen) return refuse_missing(fa_first_of(s->required & ~seen), status);
    bound->given = seen & ~(absent & s->absent_by_none);
    return FA_OK;
}

fa_code fa_read_options(const fa_bound *bound, void *request, fa_status *status) {
    static fa_code (*const readers[FA_KIND_COUNT])(const char *name, PyObject *value, void *field,
                                                   fa_status *status) = {
        [FA_KIND_causal] = fa_read_causal,   [FA_KIND_scale] = fa_read_scale, [FA_KIND_window] = fa_read_window,
        [FA_KIND_number] = fa_read_number,   [FA_KIND_count] = fa_read_count, [FA_KIND_layout] = fa_read_layout,
        [FA_KIND_boolean] = fa_read_boolean,
    };
    for (fa_arguments left = bound->given & fa_option_arguments; left; left &= left - 1) {
        const fa_argument argument = fa_first_of(left);
        const fa_parameter *p = &fa_parameters[argument];
        FA_TRY(readers[p->kind](p->name, bound->value[argument], (char *)request + p->field, status));
    }
    return FA_OK;
}
