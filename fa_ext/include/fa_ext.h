/* The C interface of fa_ext: attention, its gradients, merging and caches, for programs in C11 or C++17.
 *
 * The functions are in a table that the extension exports as the capsule "fa_ext._core._C_API"; nothing is linked. A
 * program that includes Python.h defines FA_EXT_IMPORT before this header and gets the table from fa_ext_import(), with
 * the GIL held. Any other is handed the table's address. fa_ext.get_include() is the directory of this file.
 *
 *     fa_ext_forward call = {.size = sizeof call, .q = &q, .k = &k, .v = &v, .out = &out};
 *     char message[512];
 *     fa_ext_run run = {.size = sizeof run, .message = message, .message_bytes = sizeof message};
 *     if (api->forward(&call, &run) != FA_EXT_OK) puts(message);
 *
 * What a call means (shapes, dtypes, options, results) is what fa_ext.attention(), attention_backward(), merge(),
 * append(), dropout_keep() and faults() say in Python, with these differences: the caller owns all memory, results too;
 * the environment variables that force a kernel are not read; kernels that fa_ext._core.load() added are not known.
 *
 * Every function may be called from any thread, and none needs or takes the GIL. On a CUDA device a call queues work on
 * a stream and returns. A function returns FA_EXT_OK or the code of the error, with words in the caller's buffer;
 * nothing is written then unless the launch itself failed. A thread that is cancelled within a call ends behind it. The
 * table lives as long as the process.
 *
 * Versions: a struct of arguments begins with its size and only ever grows at its end, where 0 is the default, so clear
 * it before filling it. The table grows at its end alone: FA_EXT_HAS(api, append) says whether the running version has
 * an entry. FA_EXT_ABI changes when the meaning of an entry does. */
#ifndef FA_EXT_H
#define FA_EXT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FA_EXT_ABI 1

/* The results of functions, and the exception of Python that stands for each. */
enum fa_ext_code {
    FA_EXT_OK = 0,
    FA_EXT_EVALUE = 1,       /* ValueError: an argument is not accepted */
    FA_EXT_ETYPE = 2,        /* TypeError: a dtype is not accepted */
    FA_EXT_EBUFFER = 3,      /* BufferError: memory is not aligned or NULL; a gradient overlaps itself */
    FA_EXT_EMEMORY = 4,      /* MemoryError */
    FA_EXT_EUNSUPPORTED = 5, /* fa_ext.UnsupportedError: no kernel takes the call, or the one asked for refuses it */
    FA_EXT_ECUDA = 6         /* fa_ext.CudaError */
};

enum fa_ext_dtype {
    FA_EXT_FLOAT16 = 1,
    FA_EXT_BFLOAT16 = 2,
    FA_EXT_FLOAT32 = 3,
    FA_EXT_FLOAT64 = 4, /* on the CPU */
    FA_EXT_BOOL = 5,    /* a byte */
    FA_EXT_INT32 = 6,   /* of index arrays */
    FA_EXT_INT64 = 7    /* of slots, where it is not FA_EXT_INT32 */
};

#define FA_EXT_CPU           0
#define FA_EXT_CUDA(ordinal) ((int32_t)(ordinal) + 1)

#define FA_EXT_MAX_NDIM      16

typedef struct fa_ext_array {
    void *data;             /* aligned to the item; may be NULL where there are no elements */
    int32_t dtype;          /* fa_ext_dtype */
    int32_t device;         /* FA_EXT_CPU or FA_EXT_CUDA(ordinal) */
    int32_t ndim;           /* 0 to FA_EXT_MAX_NDIM */
    int32_t reserved;       /* 0 */
    const int64_t *shape;   /* `ndim` extents */
    const int64_t *strides; /* `ndim` steps in elements; NULL: C-contiguous */
} fa_ext_array;

enum fa_ext_layout {
    FA_EXT_BHSD = 0, /* (batch, heads, sequence, head_dim) */
    FA_EXT_BSHD = 1  /* (batch, sequence, heads, head_dim) */
};

enum fa_ext_causal {
    FA_EXT_CAUSAL_NONE = 0,
    FA_EXT_CAUSAL = 1, /* needs as many queries as keys */
    FA_EXT_CAUSAL_TOP_LEFT = 2,
    FA_EXT_CAUSAL_BOTTOM_RIGHT = 3
};

/* Fields that 0 does not leave out: they count where their bit is set in `given`. */
enum fa_ext_given {
    FA_EXT_SCALE = 1,       /* else 1 / sqrt(head_dim) */
    FA_EXT_WINDOW_LEFT = 2, /* else unbounded */
    FA_EXT_WINDOW_RIGHT = 4,
    FA_EXT_MAX_SEQLEN_Q = 8 /* else there is no promise */
};

typedef struct fa_ext_options {
    size_t size;             /* sizeof(fa_ext_options) */
    uint32_t given;          /* fa_ext_given */
    int32_t causal;          /* fa_ext_causal */
    int32_t layout;          /* fa_ext_layout, of all arrays of four axes but bias and mask */
    int32_t batch_invariant; /* not 0: the bits of a batch entry do not depend on the others */
    double scale;
    double softcap; /* 0: none */
    int64_t window_left, window_right;
    double dropout; /* probability that a weight becomes 0. The mask follows from: */
    uint64_t dropout_seed;
    uint32_t dropout_offset;
    uint32_t dropout_heads;     /* heads of the whole that the call is a part of; 0: the call's own */
    uint32_t dropout_origin[4]; /* batch entry, head, query and key of the whole that are the call's first */
    /* In place of these, NULL: none: eight words of 32 bits, aligned to 4 bytes, {seed low, seed high, offset,
     * origin[0], origin[1], origin[2], origin[3], heads (0: the call's own)}. Memory of the arrays' device: on the CPU
     * read and checked at the call, on a CUDA device read by the kernel when it runs, so that a graph draws anew when
     * the words change, and not checked: what they count wraps. dropout_keep() reads host memory; workspace() reads
     * none. */
    const void *dropout_state;
    /* Of a forward call with cu_seqlens_q: no sequence has more queries. Rows beyond it are of no query, and count as a
     * bad length. */
    int64_t max_seqlen_q;
} fa_ext_options;

/* Bad contents of index arrays, such as an entry of a page table that is no page. */
enum fa_ext_check {
    FA_EXT_CHECK_DEFAULT = 0, /* on the CPU an error; on a device the same as never */
    FA_EXT_CHECK_NEVER = 1,   /* they hide what they speak of, or it is not written, and faults() tells of them */
    FA_EXT_CHECK_ALWAYS = 2   /* an error on a device too: the call copies the arrays to the host and waits first */
};

/* Arrays that are NULL are absent; `out` is needed, and an `lse` is written where it is given.
 *
 * Sequences of any length: q (T, H, D) packed with cu_seqlens_q, or (B, H, D) with one query each; k and v (Tk, Hk, D)
 * packed with cu_seqlens_k, or pages, (pages, page_size, Hk, D) or as `layout` says, with page_table and seqlens_k. out
 * is then as q, and lse (H, T). */
typedef struct fa_ext_forward {
    size_t size;                     /* sizeof(fa_ext_forward) */
    const fa_ext_array *q, *k, *v;   /* (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv), or as `layout` says */
    const fa_ext_array *bias, *mask; /* what broadcasts to (B, H, Sq, Sk); bool the latter: not 0 attends */
    const fa_ext_array *sinks;       /* (H,) */
    const fa_ext_array *alibi;       /* (H,) or (B, H), float32: slopes of ALiBi */
    const fa_ext_array *out;         /* result: (B, H, Sq, Dv), or as `layout` says */
    const fa_ext_array *lse;         /* result: (B, H, Sq) */
    const fa_ext_options *options;   /* NULL: the defaults */
    /* int32, as all that follow: where the rows of sequences begin, (B + 1,), and how many of them are used, (B,) */
    const fa_ext_array *cu_seqlens_q, *seqlens_q, *cu_seqlens_k, *seqlens_k;
    const fa_ext_array *page_table;                  /* (B, columns) */
    const fa_ext_array *k_range_begin, *k_range_end; /* (B,): only these keys take part */
    const fa_ext_array *positions;                   /* (T,) or (B, Sq): where queries stand among the keys */
    int32_t check;                                   /* fa_ext_check */
    int32_t reserved;                                /* 0 */
    /* (B, Sq) and (B, Sk), int32: a query sees the keys of its own id alone; both or neither, with q and k of four axes
     */
    const fa_ext_array *q_segments, *k_segments;
    /* (B, H, Sq, 2) or (B, H, Sq, n, 2) with n 1 or 2, int32, the first three extents or 1: a query sees key j only if
     * begin <= j < end for one of its pairs (begin, end), which may hold anything; not with sequences */
    const fa_ext_array *intervals;
    /* (H) or (B, H), float32, or NULL: raised to the largest scale * (q . k) over the pairs of each head that see each
     * other; what is there and is larger stays. Apart from all other arrays */
    const fa_ext_array *max_logit;
} fa_ext_forward;

/* Gradients that are NULL are not computed; one at least is needed, and so is `dout` or `dlse`. */
typedef struct fa_ext_backward {
    size_t size;                                       /* sizeof(fa_ext_backward) */
    const fa_ext_array *dout;                          /* NULL: zeros */
    const fa_ext_array *q, *k, *v, *out, *lse;         /* the arguments and results of the forward call */
    const fa_ext_array *dlse;                          /* NULL: zeros */
    const fa_ext_array *bias, *mask, *sinks, *alibi;   /* those of the forward call */
    const fa_ext_array *dq, *dk, *dv, *dbias, *dsinks; /* results: of the shape and dtype of q, ..., or float32 */
    const fa_ext_options *options;                     /* those of the forward call */
    int32_t accumulate;                                /* not 0: add to what the results hold */
    int32_t unordered;                                 /* not 0: the order of sums is free, and so are the bits */
    /* as in fa_ext_forward, and as they were there; out, dout, lse, dlse and the results follow q, k and v */
    const fa_ext_array *cu_seqlens_q, *seqlens_q, *cu_seqlens_k, *seqlens_k;
    const fa_ext_array *k_range_begin, *k_range_end, *positions;
    int32_t check;                               /* fa_ext_check */
    int32_t reserved;                            /* 0 */
    const fa_ext_array *q_segments, *k_segments; /* as in fa_ext_forward */
    const fa_ext_array *intervals;               /* the same */
} fa_ext_backward;

typedef struct fa_ext_merge {
    size_t size;                     /* sizeof(fa_ext_merge) */
    const fa_ext_array *outs, *lses; /* `count` of each: the results over parts of the keys */
    size_t count;                    /* at least 1 */
    const fa_ext_array *sinks;       /* NULL: none */
    const fa_ext_array *out, *lse;   /* results, both needed */
    int32_t layout;                  /* fa_ext_layout, of results of four axes */
    int32_t reserved;                /* 0 */
} fa_ext_merge;

/* New keys and values into caches, in place; with `slots` each token to its own, else behind the keys of its sequence,
 * which seqlens_k counts with the new ones. */
typedef struct fa_ext_append {
    size_t size;                                  /* sizeof(fa_ext_append) */
    const fa_ext_array *k_cache, *v_cache;        /* (pages, page_size, Hk, D), ... or as `layout` says; v NULL: none */
    const fa_ext_array *k, *v;                    /* (T, Hk, D), ... packed, or as `layout` says; v NULL: none */
    const fa_ext_array *q;                        /* NULL, or what is to be rotated as k is, with its own heads */
    const fa_ext_array *out;                      /* result, needed with q, which it may be itself: q rotated */
    const fa_ext_array *rotary_cos, *rotary_sin;  /* (positions, n), float32 or the caches' dtype; NULL: k as it is */
    const fa_ext_array *page_table, *seqlens_k;   /* as in fa_ext_forward */
    const fa_ext_array *cu_seqlens_q, *seqlens_q; /* of the new tokens */
    const fa_ext_array *slots;                    /* (n,), int32 or int64: page * page_size + row; negative: skip */
    const fa_ext_array *positions;                /* of the tokens, for the rotation; NULL: where each key stands */
    int32_t layout;                               /* fa_ext_layout, of arrays of four axes */
    int32_t interleaved;                          /* not 0: pairs of columns are neighbours, not half of them apart */
    int32_t check;                                /* fa_ext_check */
    int32_t reserved;                             /* 0 */
} fa_ext_append;

/* Ids of documents -> the starts of packed sequences: a document is a run of equal ids in a row, and rows end
 * documents. What is left of the starts is B * S. More documents than `out` has room for are bad contents of `ids`. */
typedef struct fa_ext_documents {
    size_t size;             /* sizeof(fa_ext_documents) */
    const fa_ext_array *ids; /* (B, S) or (S,), int32 or int64 */
    const fa_ext_array *out; /* result: (count + 1,), int32, for `count` documents at most */
    int32_t check;           /* fa_ext_check */
    int32_t reserved;        /* 0 */
} fa_ext_documents;

/* The mask of dropout for a call of this shape. */
typedef struct fa_ext_dropout_keep {
    size_t size;                   /* sizeof(fa_ext_dropout_keep) */
    const fa_ext_array *out;       /* result: (B, H, Sq, Sk), bool, on the CPU: not 0 where a weight is kept */
    const fa_ext_options *options; /* whose fields of dropout count; NULL: all are kept */
} fa_ext_dropout_keep;

enum fa_ext_fault_kind {
    FA_EXT_FAULT_LENGTH = 0,
    FA_EXT_FAULT_CU_SEQLENS = 1,
    FA_EXT_FAULT_PAGE = 2,
    FA_EXT_FAULT_SLOT = 3,
    FA_EXT_FAULT_POSITION = 4,
    FA_EXT_FAULT_DOCUMENTS = 5 /* of documents(): counted once a call */
};

/* How many of a kind were met, and the first of them: its sequence (-1: none), where in the array it stands (lengths
 * and starts: 0 for the array of q, 1 for that of k; pages: the column; documents: how many there may be; else the row
 * of k), and what it is (documents: how many there are). */
typedef struct fa_ext_fault {
    int64_t count;
    int64_t sequence, index, value;
} fa_ext_fault;

/* Faults that calls on a device met which did not make an error of them. Waits for nothing. */
typedef struct fa_ext_faults {
    size_t size;         /* sizeof(fa_ext_faults) */
    int32_t device;      /* FA_EXT_CPU or FA_EXT_CUDA(ordinal) */
    int32_t keep;        /* not 0: goes on counting; else begins again at 0 */
    fa_ext_fault *found; /* result: found[kind] for each fa_ext_fault_kind below `count` */
    size_t count;
} fa_ext_faults;

/* How a call runs; NULL stands for one that is all defaults. */
typedef struct fa_ext_run {
    size_t size;        /* sizeof(fa_ext_run) */
    void *stream;       /* cudaStream_t of the arrays' device; NULL: its legacy default stream. On the CPU: NULL */
    const char *kernel; /* a name of fa_ext.kernels() forces that kernel; NULL: the first that takes the call */
    void *workspace;    /* memory of the arrays' device, of any alignment, in use until the work is done; NULL: the */
    size_t workspace_bytes; /* library's own. Too little is an error. */
    char *message;          /* where an error's words go, cut to fit and ended by 0; NULL: nowhere */
    size_t message_bytes;
} fa_ext_run;

enum fa_ext_operation {
    FA_EXT_FORWARD = 0,
    FA_EXT_BACKWARD = 1,
    FA_EXT_MERGE = 2,
    FA_EXT_APPEND = 3,
    FA_EXT_DOCUMENTS = 4
};

/* Entries come in this order for ever. */
typedef struct fa_ext_api {
    uint32_t abi;        /* FA_EXT_ABI of the running version */
    uint32_t size;       /* bytes of its table */
    const char *version; /* fa_ext.__version__ */
    int (*forward)(const fa_ext_forward *arguments, const fa_ext_run *run);
    int (*backward)(const fa_ext_backward *arguments, const fa_ext_run *run);
    /* Bytes that `run->workspace` needs for a call with these arguments: a fa_ext_forward, fa_ext_backward,
     * fa_ext_merge, fa_ext_append or fa_ext_documents. Validates them as the call does, but reads no pointer to data:
     * any may be NULL. The answer is the largest for data at multiples of 256 bytes, of the item's size and of what is
     * between; for the kernel, the machine and (on the CPU) the number of threads of this moment. 0: none is needed. */
    int (*workspace)(int operation, const void *arguments, const fa_ext_run *run, size_t *bytes);
    int (*merge)(const fa_ext_merge *arguments, const fa_ext_run *run);
    int (*append)(const fa_ext_append *arguments, const fa_ext_run *run);
    /* These two have no kernel, no stream and no workspace: of `run` the message counts. */
    int (*dropout_keep)(const fa_ext_dropout_keep *arguments, const fa_ext_run *run);
    int (*faults)(const fa_ext_faults *arguments, const fa_ext_run *run);
    int (*documents)(const fa_ext_documents *arguments, const fa_ext_run *run);
} fa_ext_api;

/* Whether the running version's table has an entry. */
#define FA_EXT_HAS(api, entry) ((api)->size >= offsetof(fa_ext_api, entry) + sizeof((api)->entry))

#ifdef __cplusplus
}
#endif

#ifdef FA_EXT_IMPORT
#include <Python.h>

/* The table, or NULL with an exception. Once a program is enough; with the GIL held. */
static inline const fa_ext_api *fa_ext_import(void) {
    const fa_ext_api *api = (const fa_ext_api *)PyCapsule_Import("fa_ext._core._C_API", 0);
    if (api && (api->abi != FA_EXT_ABI || !FA_EXT_HAS(api, faults))) {
        PyErr_Format(
            PyExc_ImportError,
            "this program was compiled for ABI %d of fa_ext's C interface, but fa_ext %s has ABI %u; compile it "
            "again with the header that fa_ext.get_include() names",
            FA_EXT_ABI, api->version, (unsigned)api->abi);
        return NULL;
    }
    return api;
}
#endif

#endif
