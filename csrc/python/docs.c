/* Docstrings: what a function does, its signature and its parameters as signature.def has them, and what comes back. */
#include "call.h"

#include <stdlib.h>
#include <string.h>

/* A function's text around its parameters. */
typedef struct doc {
    const char *head, *tail;
    uint32_t there;   /* parameters of these functions are documented there, and only named here */
    const char *rest; /* of the others, after their names; NULL: no list of parameters */
} doc;

#define RAISES "\nRaises\n------\nValueError, TypeError, BufferError, UnsupportedError, CudaError, MemoryError\n"

static const doc docs[FA_FN_COUNT] = {
#define FA_DOC(function, there, head, rest, tail) [FA_FN_##function] = {head, tail, there, rest},
#include "docs.def"
#undef FA_DOC
};

/* Text that grows; NULL once memory is out. */
typedef struct text {
    char *bytes;
    size_t used, room;
} text;

static void append(text *t, const char *piece, size_t length) {
    if (t->bytes && t->used + length + 1 > t->room) {
        char *grown = realloc(t->bytes, t->room = 2 * (t->used + length + 1));
        if (!grown) free(t->bytes);
        t->bytes = grown;
    }
    if (!t->bytes) return;
    memcpy(t->bytes + t->used, piece, length);
    t->bytes[t->used += length] = 0;
}

static void add(text *t, const char *piece) { append(t, piece, strlen(piece)); }

/* Lines that are indented, each with its end. */
static void add_lines(text *t, const char *lines) {
    while (*lines) {
        const size_t length = strcspn(lines, "\n");
        add(t, "    ");
        append(t, lines, length);
        add(t, "\n");
        lines += length + (lines[length] == '\n');
    }
}

static bool has(fa_function function, int n) { return fa_parameters[n].functions >> function & 1; }

/* "attention(q, k, v, *, causal=False, ...)" */
static void add_signature(text *t, fa_function function, const char *name) {
    bool first = true, keywords = false;
    add(t, name);
    add(t, "(");
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const fa_parameter *p = &fa_parameters[n];
        if (!has(function, n)) continue;
        if (!first) add(t, ", ");
        if (p->passing == FA_KEYWORD && !keywords) add(t, "*, ");
        keywords |= p->passing == FA_KEYWORD;
        first = false;
        add(t, p->name);
        if (p->standard) add(t, "="), add(t, p->standard);
    }
    add(t, ")\n--\n\n");
}

static void add_parameters(text *t, fa_function function) {
    enum { WIDTH = 120 };
    const doc *d = &docs[function];
    bool others = false;
    add(t, "\nParameters\n----------\n");
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const fa_parameter *p = &fa_parameters[n];
        if (!has(function, n) || (p->functions & d->there)) continue;
        const size_t length = strcspn(p->doc, "\n");
        add(t, p->name);
        add(t, " : ");
        append(t, p->doc, length);
        add(t, "\n");
        add_lines(t, p->doc + length + (p->doc[length] == '\n'));
    }
    size_t line = t->used;
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const char *name = fa_parameters[n].name;
        if (!has(function, n) || !(fa_parameters[n].functions & d->there)) continue;
        if (others) add(t, ",");
        if (t->used - line + strlen(name) + 2 > WIDTH) {
            add(t, "\n");
            line = t->used;
        } else if (others) {
            add(t, " ");
        }
        add(t, name);
        others = true;
    }
    if (others) add(t, "\n");
    add_lines(t, d->rest);
}

char *fa_doc_new(fa_function function) {
    static const char *const names[FA_FN_COUNT] = {
#define NAME(name) #name,
        FA_FUNCTIONS(NAME)
#undef NAME
    };
    text t = {.bytes = malloc(4096), .room = 4096};
    add_signature(&t, function, names[function]);
    add(&t, docs[function].head);
    if (docs[function].rest) add_parameters(&t, function);
    if (docs[function].tail) add(&t, docs[function].tail);
    return t.bytes;
}
