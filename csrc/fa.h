/* Every type that the stages of a call share: view -> problem -> plan -> launch -> status.
 *
 * Valid C11 and C++20; includes neither Python.h nor a CUDA header, so that a kernel, the front end and a test harness
 * can all include it. Each struct is filled by one stage and const for the stages after it.
 */
#ifndef FA_H
#define FA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

typedef enum fa_dtype { FA_F16, FA_BF16, FA_F32, FA_F64, FA_BOOL, FA_DTYPE_COUNT } fa_dtype;

const char *fa_dtype_name(fa_dtype dtype); /* "float16", ... */
size_t fa_dtype_size(fa_dtype dtype);      /* bytes */

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

typedef struct fa_request {
    const fa_view *q, *k, *v;
    const fa_view *bias, *mask, *sinks; /* NULL when absent */
    const fa_view *out, *lse;           /* NULL when the front end allocates them */
    fa_layout layout;
    fa_causal causal;
    bool has_scale;
    double scale;
    double softcap;
    int64_t window_left, window_right; /* FA_UNBOUNDED for None */
    bool return_lse;
    bool batch_invariant;
} fa_request;

/* ---- problem: the validated call ---- */

/* A window bound that excludes nothing. Small enough that i + d + right never overflows. */
#define FA_UNBOUNDED    (INT64_C(1) << 60)

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

/* Strides are in elements and in the axis order shown, whatever the user's layout; a size-1 or broadcast axis has
 * stride 0. Key j is visible to query i iff key_begin <= j < key_end, -left <= j - (i + diagonal) <= right and, where
 * there is a mask, mask[b,h,i,j] != 0. Causal is folded into `right`; a bound that excludes nothing is FA_UNBOUNDED.
 * [key_begin, key_end) is the union of what the queries see through causal and window; it is (0, 0) when that is empty.
 */
typedef struct fa_problem {
    fa_operand q;     /* (B, H, Sq, D) */
    fa_operand k;     /* (B, Hk, Sk, D) */
    fa_operand v;     /* (B, Hk, Sk, Dv) */
    fa_operand out;   /* (B, H, Sq, Dv); data may be NULL while only planning */
    fa_operand bias;  /* (B, H, Sq, Sk); data NULL: none */
    fa_operand mask;  /* (B, H, Sq, Sk), bytes; data NULL: none */
    fa_operand sinks; /* (H) in stride[0]; data NULL: none */
    void *lse;        /* (B, H, Sq) contiguous, float32 (float64 for float64 input); NULL: not wanted */
    int64_t batch, heads, heads_kv, seq_q, seq_k;
    int64_t left, right, diagonal;
    int64_t key_begin, key_end;
    double scale;   /* finite; of any sign */
    double softcap; /* 0: none */
    int head_dim, head_dim_v;
    fa_dtype dtype; /* of q, k, v and out */
    fa_dtype bias_dtype, sinks_dtype;
    fa_device device;
    bool wants_lse; /* the caller wants the LSE (lse itself may still be NULL while planning) */
    bool batch_invariant;
} fa_problem;

/* ---- device, plan, kernel row ---- */

typedef struct fa_context fa_context; /* device.h */

/* What a row may ask about the device of the call. */
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
    void *encode_tensor_map;  /* cuTensorMapEncodeTiled, or NULL where the driver has none */
    const char *cublas_error; /* NULL when cuBLAS can be loaded, else why not */
} fa_device_info;

typedef struct fa_kernel fa_kernel;

/* How a call is done. The row's own `plan` fills what its `launch` reads; nothing here points into the problem. */
typedef struct fa_plan {
    const fa_kernel *kernel;
    int config;         /* index into the row's table of instances */
    int tile_m, tile_n; /* query and key rows a tile */
    int splits;         /* parts that the keys are split into, >= 1 */
    int stages;
    int threads;            /* a block */
    int64_t blocks;         /* grid size */
    size_t smem_bytes;      /* dynamic shared memory a block */
    size_t workspace_bytes; /* allocated in stream order before launch, contents undefined */
    int64_t extra[4];       /* the row's own */
} fa_plan;

/* What a launch gets beside the problem and the plan. */
typedef struct fa_launch {
    fa_context *context;
    const fa_device_info *device;
    void *workspace; /* plan->workspace_bytes, 256-byte aligned; NULL when 0 */
    void *stream;    /* cudaStream_t; NULL on the CPU. The device is already current. */
} fa_launch;

/* Grows whenever fa_problem, fa_plan, fa_launch, fa_device_info or fa_kernel change their layout. */
#define FA_ROW_ABI 1

/* One row of the kernel table. `rejects` and `declines` return NULL or a reason in words a user understands, of static
 * storage. A row that rejects cannot run the problem; a row that declines could, but another row is faster there: it is
 * passed over when the library chooses, and runs when it is forced by name. */
struct fa_kernel {
    int abi; /* FA_ROW_ABI */
    fa_device_kind device;
    const char *name;
    const char *summary; /* one line */
    const char *(*rejects)(const fa_problem *problem, const fa_device_info *device);
    const char *(*declines)(const fa_problem *problem, const fa_device_info *device); /* may be NULL */
    fa_code (*plan)(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_status *status);
    fa_code (*launch)(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, fa_status *status);
};

/* A row defined in a kernel file is `FA_EXPORT const fa_kernel fa_row_<name> = {...};` after including this header. */
#if defined(__GNUC__)
#define FA_EXPORT __attribute__((visibility("default")))
#else
#define FA_EXPORT
#endif

#ifdef __cplusplus
}
#endif
#endif
