/* Threads of the CPU kernels. See threads.h.  @flags -fopenmp */
#include "cpu/threads.h"

#include <fenv.h>
#include <omp.h>
#include <pthread.h>
#include <stdbool.h>

/* Written once, in the child, before fork() returns there: nothing else runs then. */
static volatile bool forked;

static void after_fork_in_child(void) { forked = true; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

int fa_cpu_threads(void) {
    if (forked || omp_in_parallel()) return 1;
    const int wanted = omp_get_max_threads(), limit = omp_get_thread_limit();
    const int threads = wanted < limit ? wanted : limit;
    return threads > 1 ? threads : 1;
}

static void run_team(int threads, int64_t count, fa_cpu_step step, const void *context) {
    fenv_t callers; /* rounding and flushing: each thread of the team takes them over and gives them back */
    fegetenv(&callers);
#pragma omp parallel num_threads(threads)
    {
        fenv_t own;
        fegetenv(&own);
        fesetenv(&callers);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t n = 0; n < count; n++) step(context, n, omp_get_thread_num());
        fesetenv(&own);
    }
}

void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context) {
    if (threads > 1)
        run_team(threads, count, step, context);
    else
        for (int64_t n = 0; n < count; n++) step(context, n, 0);
}
