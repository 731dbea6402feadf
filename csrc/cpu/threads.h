/* Threads of the CPU kernels: as many as OpenMP would take, out of a pool of this process. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

#include "fa.h"

/* How many threads a CPU kernel may use now: what OpenMP would take (OMP_NUM_THREADS or omp_set_num_threads(), at most
 * OMP_THREAD_LIMIT, else the cores this process may run on); 1 inside a parallel region, and 1 in a forked child, which
 * has none of its parent's threads. */
int fa_cpu_threads(void);

/* fa_host's loop. The calling thread is number 0, does what nobody else has begun, and waits for no thread that has
 * begun nothing. Several threads may call it at once. */
void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context);

#endif
