/* Switches the instruction set of an instance on: included before its body. FA_CPU_TARGET_END, after it, ends that. */

/* Vectors of rows in a register block, unless the tuner or the kernel says otherwise. */
#ifndef FA_CPU_MR
#if FA_CPU_VECTOR_BYTES == 64 || defined(__aarch64__)
#define FA_CPU_MR 4
#else
#define FA_CPU_MR 2
#endif
#endif
_Static_assert(FA_CPU_MR >= 1 && FA_CPU_MR <= 4, "FA_CPU_MR is 1 to 4 vectors");

/* Whether operands are pairs of bfloat16, for AVX512-BF16, in an instance of bfloat16 alone. */
#ifndef FA_CPU_BF16
#define FA_CPU_BF16 0
#endif
/* Whether AMX makes them. */
#ifndef FA_CPU_AMX
#define FA_CPU_AMX 0
#endif

/* Whether this platform has the instance at all. */
#if FA_CPU_VECTOR_BYTES == 16 || defined(__x86_64__)
#define FA_CPU_HAS_INSTANCE 1
#else
#define FA_CPU_HAS_INSTANCE 0
#endif

#if FA_CPU_HAS_INSTANCE && FA_CPU_AMX
#define FA_CPU_TARGET "amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#elif FA_CPU_HAS_INSTANCE && FA_CPU_BF16
#define FA_CPU_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#elif FA_CPU_HAS_INSTANCE && FA_CPU_VECTOR_BYTES == 64
#define FA_CPU_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#elif FA_CPU_HAS_INSTANCE && FA_CPU_VECTOR_BYTES == 32
#define FA_CPU_TARGET "avx2,fma,f16c"
#endif
#ifdef FA_CPU_TARGET
#define FA_CPU_PRAGMA_(text) _Pragma(#text)
#define FA_CPU_PRAGMA(text)  FA_CPU_PRAGMA_(text)
#ifdef __clang__
FA_CPU_PRAGMA(clang attribute push(__attribute__((target(FA_CPU_TARGET))), apply_to = function))
#define FA_CPU_TARGET_END _Pragma("clang attribute pop")
#else
FA_CPU_PRAGMA(GCC target(FA_CPU_TARGET))
#endif
#endif
#ifndef FA_CPU_TARGET_END
#define FA_CPU_TARGET_END
#endif
