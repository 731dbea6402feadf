/* Threads of the CPU rows, those of OpenMP. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

#include <stdint.h>

/* How many threads a CPU row may use now: what OpenMP would take (OMP_NUM_THREADS or omp_set_num_threads(), at most
 * OMP_THREAD_LIMIT, else the cores this process may run on); 1 inside a parallel region, and 1 in a forked child, where
 * a team of the parent would be waited for in vain. */
int fa_cpu_threads(void);

/* One step of a loop; `worker` is below the loop's `threads`, and no two steps run at a time under one number. */
typedef void (*fa_cpu_step)(const void *context, int64_t index, int worker);

/* Calls step(context, index, worker) once for each index below `count`, in no order, on at most `threads` threads with
 * the caller's rounding, and returns when all have ended. One thread: OpenMP is not touched. */
void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context);

#endif
