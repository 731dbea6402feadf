/* Signatures as data: which functions bind their arguments by signature.def, and what a bound call is. */
#ifndef FA_SIGNATURE_H
#define FA_SIGNATURE_H

#include "fa.h"

/* Functions with named parameters: FA_FN_<name>, FN_<name>. */
#define FA_FUNCTIONS(X)                                                                                                \
    X(attention)                                                                                                       \
    X(explain)                                                                                                         \
    X(answers)                                                                                                         \
    X(attention_backward)                                                                                              \
    X(explain_backward)                                                                                                \
    X(merge)                                                                                                           \
    X(explain_merge)                                                                                                   \
    X(append)                                                                                                          \
    X(explain_append)                                                                                                  \
    X(documents)                                                                                                       \
    X(explain_documents)                                                                                               \
    X(workspace_size)                                                                                                  \
    X(faults)                                                                                                          \
    X(kernels)                                                                                                         \
    X(to_device)                                                                                                       \
    X(load)

typedef enum fa_function {
#define FA_ENUM(name) FA_FN_##name,
    FA_FUNCTIONS(FA_ENUM)
#undef FA_ENUM
        FA_FN_COUNT
} fa_function;

/* The functions that have a parameter. */
enum {
    IN_ANSWERS = 1 << FA_FN_answers,
    IN_EXPLAIN = 1 << FA_FN_explain | IN_ANSWERS,
    IN_FORWARD = 1 << FA_FN_attention | 1 << FA_FN_workspace_size | IN_EXPLAIN,
    IN_EXPLAIN_BACKWARD = 1 << FA_FN_explain_backward,
    IN_BACKWARD = 1 << FA_FN_attention_backward | IN_EXPLAIN_BACKWARD,
    IN_MERGE = 1 << FA_FN_merge | 1 << FA_FN_explain_merge,
    IN_APPEND = 1 << FA_FN_append | 1 << FA_FN_explain_append,
    IN_DOCUMENTS = 1 << FA_FN_documents | 1 << FA_FN_explain_documents,
    IN_FAULTS = 1 << FA_FN_faults,
    IN_KERNELS = 1 << FA_FN_kernels,
    IN_TO_DEVICE = 1 << FA_FN_to_device,
    IN_LOAD = 1 << FA_FN_load,
};

typedef enum fa_argument {
#define FA_PARAMETER(argument, ...) FA_ARG_##argument,
#include "signature.def"
#undef FA_PARAMETER
    FA_ARG_COUNT
} fa_argument;
_Static_assert(FA_ARG_COUNT <= 128, "sets of arguments are 128 bits");
/* A set of arguments, 1 << fa_argument. */
__extension__ typedef unsigned __int128 fa_arguments;
#define FA_ARGUMENT(n) ((fa_arguments)1 << (n))

typedef enum fa_passing { FA_POSITIONAL, FA_OR_NONE, FA_KEYWORD } fa_passing;

/* How a parameter is read; from FA_KIND_OPTIONS on by one of args.c's readers. */
typedef enum fa_kind {
    FA_KIND_own,
    FA_KIND_array,
    FA_KIND_OPTIONS,
    FA_KIND_causal = FA_KIND_OPTIONS,
    FA_KIND_scale,
    FA_KIND_window,
    FA_KIND_number,
    FA_KIND_count,
    FA_KIND_layout,
    FA_KIND_boolean,
    FA_KIND_COUNT
} fa_kind;

/* A line of signature.def. */
typedef struct fa_parameter {
    const char *name;
    fa_passing passing;
    uint32_t functions; /* 1 << fa_function */
    fa_kind kind;
    size_t field;         /* offset in the function's request */
    const char *standard; /* its default as Python writes it; NULL: none */
    const char *doc;
} fa_parameter;

extern const fa_parameter fa_parameters[FA_ARG_COUNT];
/* The arguments that are read as arrays, or as options. */
extern const fa_arguments fa_array_arguments, fa_option_arguments;

/* A function's parameters in order, with interned names. */
typedef struct fa_signature {
    int count, positional;
    fa_arguments required, absent_by_none;
    unsigned char argument[FA_ARG_COUNT];
    PyObject *name[FA_ARG_COUNT];
} fa_signature;

/* Arguments of a call by what they are called in C. */
typedef struct fa_bound {
    fa_arguments given;            /* None where it stands for absence is not given */
    PyObject *value[FA_ARG_COUNT]; /* borrowed; set where given */
} fa_bound;

static inline PyObject *fa_given(const fa_bound *bound, fa_argument argument) {
    return bound->given & FA_ARGUMENT(argument) ? bound->value[argument] : NULL;
}

/* The argument of a set that comes first; the set is not empty. */
static inline fa_argument fa_first_of(fa_arguments arguments) {
    const uint64_t low = (uint64_t)arguments;
    return (fa_argument)(low ? __builtin_ctzll(low) : 64 + __builtin_ctzll((uint64_t)(arguments >> 64)));
}

/* Fills the signatures of all functions. False with an exception. */
bool fa_signatures_make(fa_signature signatures[FA_FN_COUNT]);
void fa_signatures_clear(fa_signature signatures[FA_FN_COUNT]);

/* Binds the arguments of a METH_FASTCALL | METH_KEYWORDS function. */
fa_code fa_bind(const fa_signature *signature, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                fa_bound *bound, fa_status *status);
/* Reads the options that are given into the function's request, whose other fields hold the defaults. */
fa_code fa_read_options(const fa_bound *bound, void *request, fa_status *status);

#endif
