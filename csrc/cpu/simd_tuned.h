/* Written by `python -m bench tune cpu_simd --write`, not by hand; the run: bench/evidence/tune-cpu_simd.json.
 * B1,H8,S512,D64,float32 on AMD EPYC, 2026-11-21 02:11 UTC: 2210 us,
 * 0.959 [0.900, 1.032] of the time of the configuration set by hand, which stands;
 * error against float64 3.43e-07; 48 of 504 configurations tried; sources 94f16a4596cb814c. */
#ifndef FA_SIMD_TUNED_H
#define FA_SIMD_TUNED_H

/* Nothing differs from the configuration set by hand, in cpu_simd.c. */

#endif
