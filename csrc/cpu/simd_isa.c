/* Instruction sets of the vector kernels. See simd_isa.h. */
#include "cpu/simd_isa.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

const char *fa_isa_name(fa_isa isa) {
    static const char *const names[FA_ISA_COUNT] = {
#if defined(__x86_64__)
        "amxbf16",
        "avx512bf16",
        "avx512",
        "avx2",
#endif
        "generic",
    };
    return names[isa];
}

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports() knows the name. */
static bool has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    static atomic_int f16c; /* 1: no, 2: yes. CPUID may leave a virtual machine, for microseconds */
    int answer = atomic_load_explicit(&f16c, memory_order_relaxed);
    if (!answer) {
        answer = 1 + (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C);
        atomic_store_explicit(&f16c, answer, memory_order_relaxed);
    }
    return answer == 2;
}

/* AMX with bfloat16, if the process may use its registers: Linux (5.16 and later) grants that to a process that asks,
 * once for all its threads, present and future. */
static bool has_amx(void) {
#if defined(__linux__)
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned eax, ebx, ecx, edx;
    static atomic_int amx; /* as f16c */
    int answer = atomic_load_explicit(&amx, memory_order_relaxed);
    if (!answer) {
        const bool has = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & AMX_BF16 && edx & AMX_TILE;
        answer = 1 + (has && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0);
        atomic_store_explicit(&amx, answer, memory_order_relaxed);
    }
    return answer == 2;
#else
    return false;
#endif
}
#endif

bool fa_isa_here(fa_isa isa) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    switch (isa) {
    case FA_ISA_AMX_BF16: return bf16 && has_amx();
    case FA_ISA_AVX512_BF16: return bf16;
    case FA_ISA_AVX512: return avx512;
    case FA_ISA_AVX2: return avx2;
    default: return true;
    }
#else
    return isa == FA_ISA_GENERIC;
#endif
}

/* The instruction set that a test forces instead of FA_EXT_CPU_ISA. */
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

/* Does for later calls what FA_EXT_CPU_ISA does; "" or NULL forces nothing. No other call may run meanwhile. */
FA_EXPORT void fa_cpu_simd_force(const char *isa_name);
void fa_cpu_simd_force(const char *isa_name) { snprintf(forced, sizeof forced, "%s", isa_name ? isa_name : ""); }
