/* Threads of the CPU rows: a pool of helpers that join a caller's loop when they get a core in time. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

#include <stdint.h>

/* How many threads a CPU row may use now: what OpenMP would take (OMP_NUM_THREADS or omp_set_num_threads(), at most
 * OMP_THREAD_LIMIT, else the cores this process may run on); 1 inside a parallel region and in a forked child. */
int fa_cpu_threads(void);

/* One step of a loop; `worker` is below the loop's `threads`, and no two steps run at a time under one number. */
typedef void (*fa_cpu_step)(const void *context, int64_t index, int worker);

/* Calls step(context, index, worker) once for each index below `count`, in no order, on the caller (worker 0) and up to
 * `threads` - 1 helpers, and returns when all have ended. With fewer helpers than asked for, or none, it only takes
 * longer. One thread: neither a lock nor a helper is touched. */
void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context);

#endif
