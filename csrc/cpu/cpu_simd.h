/* The interface between cpu_simd.c and its instances (one for each instruction set and arithmetic type). */
#ifndef FA_CPU_SIMD_H
#define FA_CPU_SIMD_H

#include "cpu/entries.h"
#include "fa.h"

/* A query tile of an entry. Its rows are (query, head) pairs that share a key/value head, the head running fastest: row
 * r is query r / group of query head head_kv * group + r % group, with group = heads / heads_kv. So a decoding step
 * with grouped heads fills vector lanes, and a block of rows spans few queries, which keeps what causal and window skip
 * exact. */
typedef struct fa_simd_task {
    const fa_cpu_entry *entry;
    int64_t head_kv;
    int64_t first_row;
    int rows; /* at most the tile_m that the scratch was sized for */
} fa_simd_task;

typedef struct fa_simd_instance {
    int block_rows; /* rows of one register-blocked block: the step in which tile_m shrinks */
    int tile_m;     /* largest tile worth having, in rows */
    int tile_n;     /* keys a tile */
    /* Bytes of scratch one thread needs for tiles of tile_m rows; a multiple of 256. */
    size_t (*scratch_bytes)(const fa_problem *problem, int tile_m);
    /* Computes and writes the rows of one task. A row's bits depend on neither tile_m nor the other rows. */
    void (*attend)(const fa_problem *problem, const fa_simd_task *task, void *scratch);
    /* The vector functions, for tests: y = 2^x for x <= 127 (float) or 1023 (double), y = tanh(x). */
    void (*exp2)(const void *x, void *y, size_t count);
    void (*tanh)(const void *x, void *y, size_t count);
} fa_simd_instance;

/* Name of the instruction set that calls take; NULL: the environment asks for one that is not there. */
const char *fa_cpu_simd_isa(const fa_device_info *cpu);

#if defined(__x86_64__)
extern const fa_simd_instance fa_simd_amxbf16_f32, fa_simd_avx512bf16_f32; /* of bfloat16 alone */
extern const fa_simd_instance fa_simd_avx512_f32, fa_simd_avx512_f64, fa_simd_avx2_f32, fa_simd_avx2_f64;
#endif
extern const fa_simd_instance fa_simd_generic_f32, fa_simd_generic_f64;

#endif
