/* Every type that the stages of a call share: view -> request -> problem -> plan -> launch -> status.
 *
 * Valid C11 and C++20; includes neither Python.h nor a CUDA header, so that a kernel, the front end and a test harness
 * can all include it. Each struct is filled by one stage and const for the stages after it.
 */
#ifndef FA_H
#define FA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status: errors are values until the Python boundary ---- */

typedef enum fa_code {
    FA_OK = 0,
    FA_EVALUE,       /* ValueError */
    FA_ETYPE,        /* TypeError */
    FA_EBUFFER,      /* BufferError */
    FA_EMEMORY,      /* MemoryError */
    FA_EUNSUPPORTED, /* fa_ext.UnsupportedError */
    FA_ECUDA,        /* fa_ext.CudaError */
    FA_EPYTHON,      /* a Python exception is already set; `message` is unused */
} fa_code;

typedef struct fa_status {
    fa_code code;
    char message[2048];
} fa_status;

/* Formats the message into `status`, sets its code and returns it: `return fa_fail(st, FA_EVALUE, "...", ...);` */
fa_code fa_fail(fa_status *status, fa_code code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* Evaluates a call that returns fa_code; leaves the enclosing function with that code unless it is FA_OK. */
#define FA_TRY(call)                                                                                                   \
    do {                                                                                                               \
        fa_code fa_try_code = (call);                                                                                  \
        if (fa_try_code != FA_OK) return fa_try_code;                                                                  \
    } while (0)

/* The same with clean-up: stores the code in `code` and jumps to `label`. */
#define FA_TRY_GOTO(code, call, label)                                                                                 \
    do {                                                                                                               \
        (code) = (call);                                                                                               \
        if ((code) != FA_OK) goto label;                                                                               \
    } while (0)

/* ---- arrays ---- */

/* The dtypes of arrays: name, its word, bytes of an element. Integers are indices and words of dropout's state, and
 * bytes a workspace. */
#define FA_DTYPES(X)                                                                                                   \
    X(F16, "float16", 2)                                                                                               \
    X(BF16, "bfloat16", 2)                                                                                             \
    X(F32, "float32", 4)                                                                                               \
    X(F64, "float64", 8)                                                                                               \
    X(BOOL, "bool", 1)                                                                                                 \
    X(I32, "int32", 4)                                                                                                 \
    X(I64, "int64", 8)                                                                                                 \
    X(U8, "uint8", 1)                                                                                                  \
    X(U32, "uint32", 4)

typedef enum fa_dtype {
#define FA_DTYPE(name, word, bytes) FA_##name,
    FA_DTYPES(FA_DTYPE)
#undef FA_DTYPE
        FA_DTYPE_COUNT
} fa_dtype;

const char *fa_dtype_name(fa_dtype dtype); /* "float16", ... */

/* Bytes of an element. */
static inline size_t fa_dtype_size(fa_dtype dtype) {
    static const unsigned char sizes[] = {
#define FA_BYTES(name, word, bytes) bytes,
        FA_DTYPES(FA_BYTES)
#undef FA_BYTES
    };
    return sizes[dtype];
}

/* Whether q, k and v may be of it. */
static inline bool fa_is_float(fa_dtype dtype) {
    return dtype == FA_F16 || dtype == FA_BF16 || dtype == FA_F32 || dtype == FA_F64;
}

typedef enum fa_device_kind { FA_CPU, FA_CUDA } fa_device_kind;

typedef struct fa_device {
    fa_device_kind kind;
    int id; /* CUDA ordinal; 0 on the CPU */
} fa_device;

#define FA_MAX_NDIM 16

/* One array as its library describes it. Strides count elements; strides of size-1 axes carry no meaning. */
typedef struct fa_view {
    void *data;
    int ndim;
    fa_dtype dtype;
    fa_device device;
    bool readonly;
    int64_t shape[FA_MAX_NDIM];
    int64_t strides[FA_MAX_NDIM];
} fa_view;

/* ---- request: what the user passed, before any of it is validated against the rest ---- */

typedef enum fa_layout { FA_BHSD, FA_BSHD } fa_layout;
typedef enum fa_causal { FA_CAUSAL_NONE, FA_CAUSAL_TRUE, FA_CAUSAL_TOP_LEFT, FA_CAUSAL_BOTTOM_RIGHT } fa_causal;

/* Dropout of weights: philox.h says which are kept. */
typedef struct fa_dropout {
    uint32_t threshold; /* of 65536: a weight is kept if its 16 random bits are at least that; 0: no dropout */
    uint32_t seed[2];   /* low, high */
    uint32_t offset;
    uint32_t origin[4]; /* batch entry, head, query and key that the call's first ones are within the whole */
    uint32_t heads;     /* of the whole; 0 in a request: those of the call */
    /* On a device: where the words {seed, offset, origin, heads} lie that count in place of those above, read by the
     * kernel when it runs; a 0 for heads leaves those above. NULL: there are none. */
    const uint32_t *state;
} fa_dropout;

/* The options that are not arrays. Zeroed before it is filled: two calls have the same options if the bytes are equal.
 */
typedef struct fa_options {
    double scale;
    double softcap;
    int64_t window_left, window_right; /* FA_UNBOUNDED for None */
    int64_t max_seqlen_q;              /* the same */
    fa_dropout dropout;
    fa_layout layout;
    fa_causal causal;
    bool has_layout; /* `layout` was given */
    bool has_scale;
    bool return_lse;
    bool batch_invariant;
} fa_options;

/* The lines of operands.def. */
typedef enum fa_operand_number {
#define FA_OPERAND(name, ...) FA_OPERAND_##name,
#include "operands.def"
#undef FA_OPERAND
    FA_OPERAND_COUNT
} fa_operand_number;

/* Each array NULL when absent; so are results that the front end allocates. */
typedef struct fa_request {
#define FA_OPERAND(name, ...) const fa_view *name;
#include "operands.def"
#undef FA_OPERAND
    fa_options options;
} fa_request;

/* ---- problem: the validated call ---- */

#define FA_MAX_HEAD_DIM 256

/* A scale, and finite bias and sinks, beyond +-this count as +-this (the latter if q is float64). Times log2(e) it is
 * just below the largest number of the arithmetic: in base 2 the usual bias of a padding mask, the lowest finite
 * float32, would become -inf. */
#define FA_LIMIT        2.35865e38f
#define FA_LIMIT_F64    1.24606e308

/* Data and element strides of one operand, its axes in the order named where it is used. */
typedef struct fa_operand {
    void *data;
    int64_t stride[4];
} fa_operand;

/* Attention. Strides are in elements and in the axis order shown, whatever the user's layout; a size-1 or broadcast
 * axis has stride 0. Key j is visible to query i iff key_begin <= j < key_end, -left <= j - (i + diagonal) <= right,
 * where there is a mask mask[b,h,i,j] != 0, and where there are intervals one of [b,h,i] holds j, whose ends may be
 * anything (geometry.h). Causal is folded into `right`; a bound that excludes nothing is FA_UNBOUNDED. [key_begin,
 * key_end) is the union of what the queries see through causal and window; it is (0, 0) when that is empty.
 *
 * Where the problem has sequences, seq_q and seq_k are the rows of q, packed ones all together, and the keys that an
 * entry has room for; diagonal, key_begin and key_end are each entry's own (geometry.h). Packed operands have batch
 * stride 0, as has their lse, an (H, T); axis 0 of paged k and v is the page. */
typedef struct fa_forward {
    fa_operand q;         /* (B, H, Sq, D) */
    fa_operand k;         /* (B, Hk, Sk, D) */
    fa_operand v;         /* (B, Hk, Sk, Dv) */
    fa_operand out;       /* (B, H, Sq, Dv); data may be NULL while only planning */
    fa_operand lse;       /* (B, H, Sq); data NULL: not wanted, or not there while only planning */
    fa_operand bias;      /* (B, H, Sq, Sk); data NULL: none */
    fa_operand mask;      /* (B, H, Sq, Sk), bytes; data NULL: none */
    fa_operand sinks;     /* (H) in stride[0]; data NULL: none */
    fa_operand alibi;     /* (B, H) slopes, float32; data NULL: none */
    fa_operand intervals; /* (B, H, Sq, n), begins of ranges of keys, int32; data NULL: none */
    int64_t batch, heads, heads_kv, seq_q, seq_k;
    int64_t left, right, diagonal;
    int64_t key_begin, key_end;
    double scale;   /* finite; of any sign */
    double softcap; /* 0: none */
    fa_dropout dropout;
    int head_dim, head_dim_v;
    fa_dtype dtype; /* of q, k and v */
    fa_dtype bias_dtype, sinks_dtype;
    fa_dtype out_dtype, lse_dtype;
    bool wants_lse; /* the caller wants the LSE */
    /* (B, Sq) and (B, Sk) in stride[0], int32, each row contiguous; data NULL: none. Queries see keys of their id. */
    fa_operand q_segments, k_segments;
    int64_t intervals_end; /* elements from the begin of an interval to its end */
    int intervals_count;   /* n: 1 or 2 */
    fa_operand max_logit;  /* (B, H), float32, raised to the largest scale * (q . k) that is seen; data NULL: none */
} fa_forward;

/* One result of attention over a part of the keys. */
typedef struct fa_part {
    fa_operand out; /* (B, H, S, D), normalised */
    fa_operand lse; /* (B, H, S); -inf or +inf: the row saw no key of the part, and its out is not read */
} fa_part;

/* Parts -> the result over all their keys. Strides as in fa_forward; a packed result is one batch entry. */
typedef struct fa_merge {
    const fa_part *parts; /* `count` >= 1 of them, on the host, there until the launch returns */
    fa_operand out;       /* (B, H, S, D); data may be NULL while only planning; may be that of the first part */
    fa_operand lse;       /* (B, H, S); the same */
    fa_operand sinks;     /* (H) in stride[0]; data NULL: none */
    int64_t batch, heads, seq;
    int count;
    int head_dim;
    fa_dtype dtype; /* of the parts' out */
    fa_dtype out_dtype, lse_dtype, sinks_dtype;
} fa_merge;

/* The operands that have gradients. */
typedef enum fa_grad {
#define GRADIENT(number, name) FA_GRAD_##number,
#define NO_GRADIENT
#define FA_OPERAND(name, words, role, forward, backward, merge, append, gradient, ...) gradient
#include "operands.def"
#undef FA_OPERAND
#undef NO_GRADIENT
#undef GRADIENT
    FA_GRAD_COUNT
} fa_grad;

/* Gradients of attention. P = exp(s - lse) is never renormalised: with the lse and out of all keys, a call over some of
 * the keys gives their share. A gradient that is not wanted has no operand; one that is wanted is written in whole,
 * also where it is 0, or added to what is there. */
typedef struct fa_backward {
    fa_forward forward; /* the call that made `out`, which is an input here, as is `lse` below; its own has no data */
    fa_operand dout;    /* (B, H, Sq, Dv), forward.dtype; data NULL: zeros */
    fa_operand lse;     /* (B, H, Sq), forward.lse_dtype */
    fa_operand dlse;    /* the same; data NULL: zeros */
    fa_operand
        grad[FA_GRAD_COUNT]; /* as q, k, v, (B, H, Sq, Sk) and (H) in stride[0]; data may be NULL while planning */
    fa_dtype grad_dtype[FA_GRAD_COUNT];
    uint32_t wants;     /* 1 << fa_grad */
    uint32_t bias_sums; /* 1 << axis of (B, H, Sq, Sk): the bias has extent 1 there, and its gradient sums over it */
    bool accumulate;    /* grad = round(grad + g), g in float32 (float64) */
    bool ordered;       /* the same bits from run to run */
} fa_backward;

/* The places that new tokens may have. */
typedef struct fa_slots {
    const void *data; /* (count), int32 or int64; NULL: sequences say where tokens go */
    fa_dtype dtype;
    int64_t count;
    int64_t pages, page_size; /* extents of the caches, paged or not */
    int64_t positions;        /* rows of cos and sin, beyond which no position lies; -1 without them */
} fa_slots;

/* New keys and values into caches. Token t of sequence b, one of the problem's sequences.q, becomes key
 * sequences.k.used[b] - (tokens of b) + t, which is not clamped; with slots, token t becomes row slot % page_size of
 * page slot / page_size. A token without a place is not written (geometry.h). */
typedef struct fa_append {
    fa_operand k_cache,
        v_cache;         /* (pages, Hk, page_size, D) and Dv, or without pages (B, Hk, Sk, D); v data NULL: none */
    fa_operand k, v;     /* (B, Hk, S, D) and Dv; packed: batch stride 0, S is T */
    fa_operand q, out;   /* (B, H, S, D): rotated into out, 0 where the token is not written; data NULL: none */
    fa_operand cos, sin; /* (positions, R / 2) in stride[0] and stride[1]; data NULL: k as it is */
    fa_slots slots;
    int64_t batch, heads, heads_kv, rows; /* heads of q; rows of k on its own axis */
    int head_dim, head_dim_v;
    int half; /* R / 2: pairs of columns that are rotated */
    fa_dtype dtype, rotary_dtype;
    bool interleaved; /* pairs are neighbours, not half of R apart */
} fa_append;

/* Ids of documents -> where documents begin, as starts of packed sequences, or intervals of what their tokens see
 * (documents.h). The result is int32; its data may be NULL while only planning. */
typedef struct fa_documents {
    fa_operand ids, spans; /* (B, S) in stride[0] and stride[1], FA_I32 or FA_I64; of intervals data NULL: none */
    fa_operand starts;     /* (count + 1) in stride[0]; or intervals (B, S, 2) in stride[0] to stride[2] */
    int64_t batch, seq, count, window; /* 0: none */
    fa_dtype dtype, spans_dtype;
    bool intervals, causal;
} fa_documents;

/* Operations. A kernel is of one; the order of kernels.def counts within an operation. */
typedef enum fa_op { FA_FORWARD, FA_BACKWARD, FA_MERGE, FA_APPEND, FA_DOCUMENTS, FA_OP_COUNT } fa_op;

/* Features that a problem may ask for and a kernel may lack, a bit each: features.def. */
enum fa_feature_number {
#define FA_FEATURE(name, words) FA_NUMBER_##name,
#include "features.def"
#undef FA_FEATURE
    FA_FEATURE_COUNT
};
enum fa_feature {
#define FA_FEATURE(name, words) FA_WITH_##name = 1 << FA_NUMBER_##name,
#include "features.def"
#undef FA_FEATURE
};

/* Kinds of bad contents, by which the part of the array that they make meaningless is replaced or hidden. */
#define FA_FAULTS(X) X(length) X(cu_seqlens) X(page) X(slot) X(position) X(documents)

typedef enum fa_fault_kind {
#define FA_ENUM(name) FA_FAULT_##name,
    FA_FAULTS(FA_ENUM)
#undef FA_ENUM
        FA_FAULT_COUNT
} fa_fault_kind;

typedef struct fa_fault_board fa_fault_board; /* faults.h */

/* The fields of every operation, then those of each. */
typedef struct fa_problem {
    fa_op op;
    fa_device device;
    uint32_t features;    /* FA_WITH_... */
    int threads;          /* that a kernel on the CPU may use at this moment; 0 on a device */
    bool batch_invariant; /* the bits of a batch entry do not depend on the others */
    bool empty;           /* the result has no elements: there is nothing to launch */
    union {
        fa_forward forward; /* also the beginning of `backward` */
        fa_backward backward;
        fa_merge merge;
        fa_append append;
        fa_documents documents;
    };
    fa_sequences sequences; /* what the batch entries are, but of a merge and of documents */
    void *workspace;        /* the caller's, for the plan's workspace_bytes; NULL: allocated at the launch */
    fa_fault_board *faults; /* where a kernel on a device counts bad contents of index arrays; NULL: nowhere */
    bool (*stopped)(void);  /* see fa_stopped(); NULL: the call is not stopped */
} fa_problem;

/* On the CPU: whether the caller has given the call up, so that what is left of it may be left out: nobody reads the
 * results. A kernel asks every few milliseconds at least; it takes some nanoseconds. */
static inline bool fa_stopped(const fa_problem *problem) { return problem->stopped && problem->stopped(); }

/* ---- device ---- */

typedef struct fa_context fa_context; /* device.h */

/* Libraries that are opened at run time, where they are installed. */
typedef enum fa_library_name { FA_CUBLAS, FA_LIBRARY_COUNT } fa_library_name;

/* The properties of a device that a plan may use. Plain values: the description of a device that is not here serves as
 * well. */
typedef struct fa_device_info {
    fa_device device;
    char name[128];
    int cc;                 /* CUDA compute capability, 10 * major + minor; 0 on the CPU */
    int sm_count;           /* multiprocessors, or hardware threads on the CPU */
    size_t smem_per_block;  /* opt-in shared memory a block, bytes */
    size_t smem_per_sm;     /* bytes */
    size_t l2_bytes;        /* bytes */
    size_t memory_bytes;    /* bytes */
    size_t workspace_limit; /* bytes a plan may ask for: FA_EXT_WORKSPACE_MB */
    int driver_version;     /* as CUDA counts: 13000 is 13.0 */
    int runtime_version;
    bool tensor_maps;                            /* the driver encodes tensor maps (TMA) */
    const char *library_error[FA_LIBRARY_COUNT]; /* NULL when it can be opened, else why not */
    char cpu_isa[64];                            /* FA_EXT_CPU_ISA when the library was loaded, or empty */
} fa_device_info;

/* ---- plan: the one decision ---- */

typedef struct fa_kernel fa_kernel;

typedef enum fa_answer {
    FA_TAKES,    /* may be chosen */
    FA_DECLINES, /* could, but another kernel is faster there: runs when it is forced, or when no other takes the call
                  */
    FA_REFUSES,  /* cannot, on any machine */
    FA_NOT_HERE, /* this machine lacks what the kernel needs: another could */
    FA_FAILS,    /* the environment names something that is absent: an error of the call once the kernel is asked */
} fa_answer;

/* Why a kernel does not take a problem: why.def has the words, made only when somebody asks. */
typedef enum fa_reason {
#define FA_WHY(name, words) FA_WHY_##name,
#include "why.def"
#undef FA_WHY
} fa_reason;

typedef struct fa_why {
    fa_reason reason;
    int64_t value[3]; /* what the words name */
} fa_why;

#define FA_PLAN_OWN 128 /* bytes */

#ifdef __cplusplus
#define FA_ALIGNED(bytes) alignas(bytes)
#else
#define FA_ALIGNED(bytes) _Alignas(bytes)
#endif

/* How a call is done. Nothing here points into the problem. */
typedef struct fa_plan {
    const fa_kernel *kernel;
    size_t workspace_bytes;              /* allocated in stream order before launch, contents undefined */
    size_t smem_bytes;                   /* dynamic shared memory a block */
    int64_t blocks;                      /* grid size, or tasks on the CPU */
    int threads;                         /* a block, or at work on the CPU */
    bool keep;                           /* good for a call that differs in pointers alone (not in their alignment) */
    FA_ALIGNED(8) char own[FA_PLAN_OWN]; /* a struct of the kernel's own */
} fa_plan;

/* ---- launch ---- */

typedef void (*fa_cpu_step)(const void *context, int64_t index, int worker);

/* Functions of the library for kernels, which so link nothing of ours. */
typedef struct fa_host {
    /* Formats the message into `status`, sets its code and returns it. */
    fa_code (*fail)(fa_status *status, fa_code code, const char *format, ...)
#if defined(__GNUC__)
        __attribute__((format(printf, 3, 4)))
#endif
        ;
    /* A place in the context for a kernel's own state, by an address of the kernel's own as key: NULL at first;
     * `free_slot` runs on what is there when the context goes. Call it, and use what is there, with the lock held.
     * Returns NULL when memory is out. */
    void **(*slot)(fa_context *context, const void *key, void (*free_slot)(void *state));
    void (*lock)(fa_context *context);
    void (*unlock)(fa_context *context);
    /* A handle for dlsym() that stays open. */
    fa_code (*open_library)(fa_context *context, fa_library_name library, void **handle, fa_status *status);
    /* CPU: calls step(context, index, worker) once for each index below `count`, in no order, on at most `threads`
     * threads with the caller's rounding, and returns when all have ended. `worker` is below `threads`, and no two
     * steps run at a time under one number. */
    void (*loop)(int threads, int64_t count, fa_cpu_step step, const void *context);
} fa_host;

/* Given to a launch beside the problem and the plan. */
typedef struct fa_launch {
    const fa_host *host;
    fa_context *context;
    const fa_device_info *device;
    void *workspace;         /* plan->workspace_bytes, 256-byte aligned; NULL when 0 */
    void *stream;            /* cudaStream_t; NULL on the CPU. The device is already current. */
    void *encode_tensor_map; /* cuTensorMapEncodeTiled where the device has tensor maps */
    fa_status *status;       /* filled by host->fail */
} fa_launch;

/* Grows whenever a struct that a kernel sees changes its layout. */
#define FA_KERNEL_ABI 9

/* One kernel of the table. The registry compares `device`, `dtypes`, `takes` and compute capabilities; `plan` is asked
 * only where they fit. It answers; fills `plan`, zeroed before, if it takes or declines, and `why` unless it takes.
 * `launch` runs a plan that it filled, on a problem whose result has elements, and decides nothing again. */
struct fa_kernel {
    int abi; /* FA_KERNEL_ABI */
    fa_op op;
    fa_device_kind device;
    const char *name;
    const char *summary; /* one line */
    int cc_from, cc_to;  /* compute capabilities of the device, both included; cc_to 0: no bound; 0, 0 on the CPU */
    uint32_t dtypes;     /* 1 << fa_dtype */
    uint32_t takes;      /* FA_WITH_... */
    fa_answer (*plan)(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why);
    fa_code (*launch)(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch);
};

/* `return fa_because(why, FA_REFUSES, FA_WHY_..., value, ...);` */
static inline fa_answer fa_because(fa_why *why, fa_answer answer, fa_reason reason, int64_t a, int64_t b, int64_t c) {
    why->reason = reason;
    why->value[0] = a, why->value[1] = b, why->value[2] = c;
    return answer;
}

/* A kernel file ends in `FA_EXPORT const fa_kernel fa_kernel_<name> = {...};`. */
#if defined(__GNUC__)
#define FA_EXPORT __attribute__((visibility("default")))
#else
#define FA_EXPORT
#endif

#ifdef __cplusplus
}
#endif
#endif
