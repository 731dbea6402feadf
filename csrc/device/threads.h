/* Threads of the CPU kernels: as many as OpenMP would take, out of a pool of this process. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

#include <stdatomic.h>

#include "fa.h"

/* How many threads a CPU kernel may use now: what OpenMP would take (OMP_NUM_THREADS or omp_set_num_threads(), at most
 * OMP_THREAD_LIMIT, else the cores this process may run on); 1 inside a parallel region, and 1 in a forked child, which
 * has none of its parent's threads. */
int fa_cpu_threads(void);

/* Asks the caller on its own thread, every 50 ms, whether the call is to stop. After a yes loops begin no further step,
 * and fa_cpu_stopped() is true in those that were begun. All fields but the first two are zeroed. */
typedef struct fa_cpu_watch {
    bool (*stops)(void *context);
    void *context;
    _Atomic bool stopped;
    int64_t due;                         /* the next time, in nanoseconds; 0 before the clock was read */
    unsigned looks;                      /* at this watch */
    struct fa_cpu_watch *outer, **place; /* the thread's watch before, and where it keeps it */
} fa_cpu_watch;

/* From one to the other the calling thread is asked; between them it may ask to be asked again, within. */
void fa_cpu_watch_begin(fa_cpu_watch *watch);
void fa_cpu_watch_end(fa_cpu_watch *watch);
/* Of the calling thread's watch, or that of the loop it helps with. For fa_problem's `stopped`. */
bool fa_cpu_stopped(void);

/* fa_host's loop. The calling thread is number 0, does the steps that no other thread has begun, and waits for no
 * thread that has begun nothing. Several threads may call it at once. */
void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context);

#endif
