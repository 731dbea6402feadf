/* The interface between cpu_simd_backward.c and its instances (one for each instruction set and arithmetic type). */
#ifndef FA_CPU_SIMD_BACKWARD_H
#define FA_CPU_SIMD_BACKWARD_H

#include "fa.h"

/* Chunk `chunk` of the keys of a kv head, against all queries of its heads. */
typedef struct fa_gradient_task {
    int64_t batch, head_kv, chunk;
    void *dq; /* the share of dq of this chunk is added to these rows, or written to them; NULL: dq is not wanted */
    bool add;
} fa_gradient_task;

typedef struct fa_gradient_instance {
    int chunk; /* keys: dq is the sum over chunks, in their order, of sums over the keys of each */
    int tile;  /* queries that are worked on at a time */
    /* Bytes of scratch one thread needs; a multiple of 256. */
    size_t (*scratch_bytes)(const fa_problem *problem);
    /* Bytes of the rows of dq of a kv head: those of query i of its head h begin at row h * seq_q + i. */
    size_t (*dq_bytes)(const fa_backward *problem);
    /* Queries [begin, end), whole tiles but for the last, whose rows of dq a chunk has a share of. */
    void (*queries)(const fa_backward *problem, int64_t chunk, int64_t *begin, int64_t *end);
    /* Writes dk and dv of the task's keys. */
    void (*chunk_gradients)(const fa_problem *problem, const fa_gradient_task *task, void *scratch);
    /* to += from for the rows [begin, end). */
    void (*add_dq)(const fa_backward *problem, void *to, const void *from, int64_t begin, int64_t end);
    /* Writes rows [begin, end) of dq of a kv head. */
    void (*write_dq)(const fa_backward *problem, int64_t batch, int64_t head_kv, const void *dq, int64_t begin,
                     int64_t end, void *scratch);
    /* dbias in parts that have nothing in common. */
    int64_t (*bias_parts)(const fa_backward *problem);
    void (*bias_gradient)(const fa_problem *problem, int64_t part, void *scratch);
} fa_gradient_instance;

#if defined(__x86_64__)
extern const fa_gradient_instance fa_gradient_avx512_f32, fa_gradient_avx512_f64, fa_gradient_avx2_f32,
    fa_gradient_avx2_f64;
#endif
extern const fa_gradient_instance fa_gradient_generic_f32, fa_gradient_generic_f64;

#endif
