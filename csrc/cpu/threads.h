/* Threads of the CPU rows. */
#ifndef FA_CPU_THREADS_H
#define FA_CPU_THREADS_H

/* How many OpenMP threads a CPU row may use now: OMP_NUM_THREADS, else the cores this process may run on; 1 inside a
 * parallel region, and 1 in a forked child, where an OpenMP team of the parent would be waited for in vain. */
int fa_cpu_threads(void);

#endif
