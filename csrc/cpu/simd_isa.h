/* Instruction sets of the vector kernels, and which of them calls take. */
#ifndef FA_CPU_SIMD_ISA_H
#define FA_CPU_SIMD_ISA_H

#include "fa.h"

/* Best first. A kernel has an instance for each, and for float and double arithmetic; AMX and AVX512-BF16 are AVX-512
 * but for what a kernel does with bfloat16. */
typedef enum fa_isa {
#if defined(__x86_64__)
    FA_ISA_AMX_BF16,
    FA_ISA_AVX512_BF16,
    FA_ISA_AVX512,
    FA_ISA_AVX2,
#endif
    FA_ISA_GENERIC,
    FA_ISA_COUNT
} fa_isa;

/* One line of a kernel's table of instances: {[FA_ISA_AVX2] = {&single, &twice}}. */
#if defined(__x86_64__)
#define FA_ISA_TABLE(PREFIX)                                                                                           \
    {                                                                                                                  \
        {&PREFIX##_avx512_f32, &PREFIX##_avx512_f64}, {&PREFIX##_avx512_f32, &PREFIX##_avx512_f64},                    \
            {&PREFIX##_avx512_f32, &PREFIX##_avx512_f64}, {&PREFIX##_avx2_f32, &PREFIX##_avx2_f64}, {                  \
            &PREFIX##_generic_f32, &PREFIX##_generic_f64                                                               \
        }                                                                                                              \
    }
#else
#define FA_ISA_TABLE(PREFIX)                                                                                           \
    {                                                                                                                  \
        { &PREFIX##_generic_f32, &PREFIX##_generic_f64 }                                                               \
    }
#endif

const char *fa_isa_name(fa_isa isa);

/* Whether this CPU has it. */
bool fa_isa_here(fa_isa isa);

/* The instruction set that calls take: the best one here, or the one that FA_EXT_CPU_ISA, or a test, names. */
fa_answer fa_isa_choose(const fa_device_info *device, int *isa, fa_why *why);

/* FA_TAKES, or why not: |scale / softcap| can be so large that its product with q overflows. */
fa_answer fa_simd_takes_scale(const fa_forward *problem, fa_why *why);

#endif
