/* Threads of the CPU rows. See threads.h.  @flags -fopenmp
 *
 * OpenMP says how many threads, but its teams do not run them: a team's end spins until each of its threads has come,
 * also those that the system has not let run yet. Where two threads of a team meet on one core, that takes until the
 * system interrupts the one that spins: on 2 shared cores, calls of 50 to 850 us took 4 to 9 ms (medians). Here a
 * loop's end waits only for helpers that are at one of its steps.
 */
#include "cpu/threads.h"

#include <fenv.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

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

/* ---- loops and helpers ---- */

/* A loop on its caller's stack. What changes is written under the lock, but for `taken`. */
typedef struct loop {
    struct loop *next;
    fa_cpu_step step;
    const void *context;
    int64_t count;
    fenv_t arithmetic; /* the caller's rounding and flushing, so that helpers give its bits */
    _Atomic int64_t taken;
    int room;           /* helpers that may still join */
    int joined;         /* ever */
    _Atomic int inside; /* now */
    pthread_cond_t left;
} loop;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER;
static loop *loops;             /* that helpers may join, the oldest first */
static int helpers, idle, busy; /* all, those that sleep, those in a loop */

static void take_steps(loop *l, int worker) {
    for (int64_t n; (n = atomic_fetch_add_explicit(&l->taken, 1, memory_order_relaxed)) < l->count;)
        l->step(l->context, n, worker);
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        loop *l = loops;
        while (l && l->room == 0) l = l->next;
        if (!l) {
            idle++;
            pthread_cond_wait(&posted, &lock);
            idle--;
            continue;
        }
        l->room--;
        l->inside++;
        busy++;
        const int worker = ++l->joined;
        pthread_mutex_unlock(&lock);
        fesetenv(&l->arithmetic);
        take_steps(l, worker);
        pthread_mutex_lock(&lock);
        busy--;
        l->room = 0; /* no step is left */
        if (--l->inside == 0) pthread_cond_signal(&l->left);
    }
    return NULL;
}

/* Helpers may run where OpenMP's threads may: the caller can be bound to one core (OMP_PROC_BIND). */
static void unbind(pthread_attr_t *attributes) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int place = 0; place < omp_get_num_places(); place++) {
        const int count = omp_get_place_num_procs(place);
        int *ids = malloc((size_t)count * sizeof *ids);
        if (ids) omp_get_place_proc_ids(place, ids);
        for (int n = 0; ids && n < count; n++)
            if (ids[n] < CPU_SETSIZE) CPU_SET(ids[n], &cores);
        free(ids);
    }
    if (CPU_COUNT(&cores)) pthread_attr_setaffinity_np(attributes, sizeof cores, &cores);
}

/* Makes helpers until there are `wanted`, or as many as the system grants. Signals stay with the program's threads. */
static void hire(int wanted) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (helpers >= wanted || pthread_attr_init(&attributes) != 0) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    unbind(&attributes);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; helpers < wanted && pthread_create(&thread, &attributes, help, NULL) == 0;) helpers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void post(loop *l) {
    pthread_mutex_lock(&lock);
    int wanted = busy + l->room, most = omp_get_num_procs() - 1;
    loop **end = &loops;
    for (; *end; end = &(*end)->next) wanted += (*end)->room;
    *end = l;
    if (most < l->room) most = l->room; /* several callers share the cores, one may ask for more */
    hire(wanted < most ? wanted : most);
    const int woken = idle < l->room ? idle : l->room;
    pthread_mutex_unlock(&lock);
    for (int n = 0; n < woken; n++) pthread_cond_signal(&posted);
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* Microseconds for which the end of a loop looks out for helpers before it sleeps. With 20 or 50 calls of 37 to 350 us
 * take up to 7 us less than with none on 2 idle cores, and no longer on busy ones. Helpers that looked out for the next
 * loop as well would save another 4 us on idle cores and disturb on busy ones: a tenth of calls of 47 us took 99 us. */
#define LOOK_OUT 50.0

static void withdraw(loop *l) {
    pthread_mutex_lock(&lock);
    loop **at = &loops;
    while (*at != l) at = &(*at)->next;
    *at = l->next;
    if (l->inside) {
        pthread_mutex_unlock(&lock);
        for (const double end = microseconds() + LOOK_OUT; l->inside && microseconds() < end;) continue;
        pthread_mutex_lock(&lock); /* a helper that has just left still holds it */
    }
    while (l->inside) pthread_cond_wait(&l->left, &lock);
    pthread_mutex_unlock(&lock);
}

void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context) {
    loop l = {.step = step, .context = context, .count = count, .room = threads - 1};
    if (threads > 1) {
        fegetenv(&l.arithmetic);
        pthread_cond_init(&l.left, NULL);
        post(&l);
    }
    take_steps(&l, 0);
    if (threads > 1) {
        withdraw(&l);
        pthread_cond_destroy(&l.left);
    }
}
