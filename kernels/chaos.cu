/* The host's side of a chaos build (chaos.cuh): one seed and one report a process. Empty in any other build. */
#include "common/chaos.cuh"

#ifdef FA_CHAOS
#include "fa.h" // FA_EXPORT
#include <cstdlib>
#include <mutex>

static fa_chaos_report_t *report;

extern "C" cudaError_t fa_chaos_settings(uint32_t *seed, fa_chaos_report_t **device_report) {
    static std::mutex lock;
    const std::lock_guard<std::mutex> guard(lock);
    static uint32_t given = 0;
    if (!report) {
        void *memory;
        if (cudaError_t error = cudaHostAlloc(&memory, sizeof *report, cudaHostAllocPortable | cudaHostAllocMapped))
            return error;
        report = new (memory) fa_chaos_report_t{};
        const char *text = std::getenv("FA_CHAOS_SEED");
        given = text ? uint32_t(std::strtoul(text, nullptr, 0)) : 1;
    }
    *seed = given;
    *device_report = report; // unified addressing: the device's address too
    return cudaSuccess;
}

/* The report of this process: NULL before the first launch; `hung` says whether a wait ended. Also after the context is
 * lost. */
extern "C" FA_EXPORT const fa_chaos_report_t *fa_chaos_report(void);
extern "C" const fa_chaos_report_t *fa_chaos_report(void) { return report; }
#endif
