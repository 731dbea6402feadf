/* Threads of the CPU kernels, those of OpenMP. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

#include "fa.h"

/* How many threads a CPU kernel may use now: what OpenMP would take (OMP_NUM_THREADS or omp_set_num_threads(), at most
 * OMP_THREAD_LIMIT, else the cores this process may run on); 1 inside a parallel region, and 1 in a forked child, where
 * a team of the parent would be waited for in vain. */
int fa_cpu_threads(void);

/* fa_host's loop; one thread does not touch OpenMP. */
void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context);

#endif
