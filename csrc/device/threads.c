/* Threads of the CPU kernels. See threads.h.  @flags -fopenmp
 *
 * OpenMP says how many threads there are; the loops run on a pool of this process, since a parallel region of OpenMP
 * ends only when each of its threads has run, and on a busy machine one of them may not get a core for milliseconds.
 * Here the caller does all steps that no other thread has begun, and waits only for those that were begun.
 *
 * A loop lies on its caller's stack, in a list as long as others may join. Workers sleep on one condition; before that
 * they look for a new loop for kSpins turns, since calls often follow each other closely. The pool grows to the most
 * that a loop has asked for, and never shrinks; its workers take no signals.
 *
 * A scheduler may let a worker that wakes queue behind the caller while another core idles (seen in a virtual machine
 * of two). So where few have joined when the caller has done its first step, those that have not run yet are sent away
 * from its core.
 *
 * The question whether to stop a call is asked on the caller's thread alone: between its steps, within them where the
 * kernel calls fa_cpu_stopped(), and while it waits. */
#include "device/threads.h"

#include <fenv.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { kSpins = 4000, kAskNanoseconds = 50000000 };
enum { kLooks = 16 }; /* at a watch until the clock is read: a short call never does */

typedef struct loop {
    struct loop *next;
    fa_cpu_step step;
    const void *context;
    int64_t count;
    _Atomic int64_t begun; /* steps, and more once there are none left */
    _Atomic int running;   /* workers that have joined and not left; falls under the lock */
    int joined, most;      /* under the lock: workers that have joined, and that may */
    fa_cpu_watch *watch;   /* the caller's, or NULL */
    fenv_t callers;        /* rounding and flushing: each worker takes them over and gives its own back */
} loop;

/* A worker that sleeps, or has been woken and has not run since; on its stack. */
typedef struct sleeper {
    struct sleeper *next;
    pid_t thread;
    bool sent; /* away from a core; what it is to have again: */
    cpu_set_t own;
} sleeper;

/* The pool. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER; /* a loop was listed */
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;   /* a worker has left one */
static loop *loops;                                      /* that workers may join */
static sleeper *sleepers;
static int workers;
static _Atomic unsigned news; /* loops that were listed */

static _Thread_local fa_cpu_watch *watched; /* the thread's own, or that of the loop it helps with */
static _Thread_local bool helps;            /* with a loop of another thread */

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

static void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* ---- calls that are to stop ---- */

static void ask_when_due(fa_cpu_watch *watch) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    const int64_t now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    if (now < watch->due) return;
    if (watch->due && watch->stops(watch->context)) atomic_store_explicit(&watch->stopped, true, memory_order_relaxed);
    watch->due = now + kAskNanoseconds;
}

void fa_cpu_watch_begin(fa_cpu_watch *watch) {
    watch->place = &watched;
    watch->outer = watched;
    watched = watch;
}

void fa_cpu_watch_end(fa_cpu_watch *watch) { *watch->place = watch->outer; }

bool fa_cpu_stopped(void) {
    fa_cpu_watch *const watch = watched;
    if (!watch) return false;
    if (!helps && ++watch->looks % kLooks == 0) ask_when_due(watch);
    return atomic_load_explicit(&watch->stopped, memory_order_relaxed);
}

/* ---- loops ---- */

/* False where no step was left, or the call was stopped. */
static bool do_step(loop *of, int thread) {
    if (fa_cpu_stopped()) atomic_store_explicit(&of->begun, of->count, memory_order_relaxed);
    const int64_t n = atomic_fetch_add_explicit(&of->begun, 1, memory_order_relaxed);
    if (n < of->count) of->step(of->context, n, thread);
    return n < of->count;
}

static void do_steps(loop *of, int thread) {
    while (do_step(of, thread)) continue;
}

/* A loop that has room and steps left, or NULL. Under the lock. */
static loop *joinable(void) {
    for (loop *of = loops; of; of = of->next)
        if (of->joined < of->most && atomic_load_explicit(&of->begun, memory_order_relaxed) < of->count) return of;
    return NULL;
}

static void help(loop *of) { /* under the lock, which it gives up while it works */
    const int thread = ++of->joined;
    atomic_fetch_add_explicit(&of->running, 1, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
    fenv_t own;
    fegetenv(&own);
    fesetenv(&of->callers);
    watched = of->watch, helps = true;
    do_steps(of, thread);
    watched = NULL;
    fesetenv(&own);
    pthread_mutex_lock(&lock);
    /* From here on the loop may be gone. */
    if (atomic_fetch_sub_explicit(&of->running, 1, memory_order_release) == 1) pthread_cond_broadcast(&left);
}

/* Until a loop is listed after `seen`. Under the lock. */
static void sleep_until_news(unsigned seen) {
    sleeper own = {.next = sleepers, .thread = (pid_t)syscall(SYS_gettid)};
    sleepers = &own;
    while (!joinable() && atomic_load_explicit(&news, memory_order_relaxed) == seen) pthread_cond_wait(&posted, &lock);
    sleeper **at = &sleepers;
    while (*at != &own) at = &(*at)->next;
    *at = own.next;
    if (own.sent) sched_setaffinity(0, sizeof own.own, &own.own);
}

/* Sends those that have not run yet away from the caller's core, where less than half of `wanted` have joined. */
static void send_on(const loop *of, int64_t wanted) {
    pthread_mutex_lock(&lock);
    const int core = sched_getcpu();
    for (sleeper *at = of->joined * 2 < wanted ? sleepers : NULL; at; at = at->next) {
        if (at->sent || sched_getaffinity(at->thread, sizeof at->own, &at->own)) continue;
        cpu_set_t others = at->own;
        CPU_CLR(core, &others);
        at->sent = CPU_COUNT(&others) > 0 && !sched_setaffinity(at->thread, sizeof others, &others);
    }
    pthread_mutex_unlock(&lock);
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        loop *const of = joinable();
        if (of) {
            help(of);
            continue;
        }
        const unsigned seen = atomic_load_explicit(&news, memory_order_relaxed);
        pthread_mutex_unlock(&lock);
        for (int spin = 0; spin < kSpins && atomic_load_explicit(&news, memory_order_relaxed) == seen; spin++)
            pause_briefly();
        pthread_mutex_lock(&lock);
        if (!joinable()) sleep_until_news(seen);
    }
    return NULL;
}

/* Until there are as many workers, or the system gives no more. Under the lock. */
static void grow(int wanted) {
    sigset_t all, callers;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers);
    for (pthread_t thread; workers < wanted && !pthread_create(&thread, NULL, work, NULL); workers++)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &callers, NULL);
}

/* Waits until no thread works on a loop that is no longer listed. Under the lock. */
static void wait_for_helpers(loop *of) {
    struct timespec until;
    while (atomic_load_explicit(&of->running, memory_order_acquire) > 0) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += kAskNanoseconds;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        if (!of->watch) {
            pthread_cond_wait(&left, &lock);
        } else if (pthread_cond_timedwait(&left, &lock, &until)) {
            pthread_mutex_unlock(&lock);
            ask_when_due(of->watch);
            pthread_mutex_lock(&lock);
        }
    }
}

static void run_together(int threads, int64_t count, fa_cpu_step step, const void *context) {
    loop own = {.step = step, .context = context, .count = count, .watch = watched, .most = threads - 1};
    fegetenv(&own.callers);
    pthread_mutex_lock(&lock);
    if (workers < own.most) grow(own.most);
    own.next = loops;
    loops = &own;
    atomic_fetch_add_explicit(&news, 1, memory_order_relaxed);
    const int64_t wanted = own.most < count - 1 ? own.most : count - 1;
    for (int64_t n = 0; n < wanted; n++) pthread_cond_signal(&posted);
    pthread_mutex_unlock(&lock);
    if (do_step(&own, 0)) send_on(&own, wanted);
    do_steps(&own, 0);
    for (int spin = 0; spin < kSpins && atomic_load_explicit(&own.running, memory_order_relaxed) > 0; spin++)
        pause_briefly();
    pthread_mutex_lock(&lock);
    loop **at = &loops;
    while (*at != &own) at = &(*at)->next;
    *at = own.next;
    wait_for_helpers(&own);
    pthread_mutex_unlock(&lock);
}

void fa_cpu_loop(int threads, int64_t count, fa_cpu_step step, const void *context) {
    if (threads > 1 && count > 1)
        run_together(threads, count, step, context);
    else
        for (int64_t n = 0; n < count && (n == 0 || !fa_cpu_stopped()); n++) step(context, n, 0);
}
