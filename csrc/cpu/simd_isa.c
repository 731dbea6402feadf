/* Instruction sets of the vector kernels. See simd_isa.h. */
#include "cpu/simd_isa.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *fa_isa_name(fa_isa isa) {
    static const char *const names[FA_ISA_COUNT] = {
#if defined(__x86_64__)
        "avx512bf16",
        "avx512",
        "avx2",
#endif
        "generic",
    };
    return names[isa];
}

bool fa_isa_here(fa_isa isa) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    switch (isa) {
    case FA_ISA_AVX512_BF16: return avx512 && __builtin_cpu_supports("avx512bf16");
    case FA_ISA_AVX512: return avx512;
    case FA_ISA_AVX2: return avx2;
    default: return true;
    }
#else
    return isa == FA_ISA_GENERIC;
#endif
}

/* What a test forces instead of FA_EXT_CPU_ISA. */
static char forced[64];

fa_answer fa_isa_choose(const fa_device_info *device, int *isa, fa_why *why) {
    const char *wanted = *forced ? forced : device->cpu_isa;
    for (*isa = 0; *isa < FA_ISA_COUNT; ++*isa)
        if (*wanted ? strcmp(wanted, fa_isa_name((fa_isa)*isa)) == 0 : fa_isa_here((fa_isa)*isa)) break;
    if (*isa == FA_ISA_COUNT) return fa_because(why, FA_FAILS, FA_WHY_UNKNOWN_ISA, 0, 0, 0);
    if (!fa_isa_here((fa_isa)*isa)) return fa_because(why, FA_FAILS, FA_WHY_LACKING_ISA, 0, 0, 0);
    return FA_TAKES;
}

fa_answer fa_simd_takes_scale(const fa_forward *p, fa_why *why) {
    const double factor = fabs(p->softcap > 0 ? p->scale / p->softcap : p->scale);
    const int limit = p->dtype == FA_F64 ? 300 : 30;
    if (factor > (p->dtype == FA_F64 ? 1e300 : 1e30))
        return fa_because(why, FA_REFUSES, FA_WHY_SCALE_LIMIT, limit, 0, 0);
    return FA_TAKES;
}

/* ---- for tests ---- */

/* What FA_EXT_CPU_ISA does, for the calls from now on; "" or NULL: nothing. No other call may run meanwhile. */
FA_EXPORT void fa_cpu_simd_force(const char *isa_name);
void fa_cpu_simd_force(const char *isa_name) { snprintf(forced, sizeof forced, "%s", isa_name ? isa_name : ""); }
