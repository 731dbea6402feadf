/* Threads of the CPU rows. See threads.h.  @flags -fopenmp */
#include "cpu/threads.h"

#include <omp.h>
#include <pthread.h>
#include <stdbool.h>

/* Written once, in the child, before fork() returns there: nothing else runs then. */
static volatile bool forked;

static void after_fork_in_child(void) { forked = true; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

int fa_cpu_threads(void) {
    if (forked || omp_in_parallel()) return 1;
    const int threads = omp_get_max_threads();
    return threads > 1 ? threads : 1;
}
