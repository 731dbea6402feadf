/* Threads that are cancelled while they call fa_ext: see test_c_api.py. */
#define _GNU_SOURCE
#include "fa_ext.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 6, CALLS = 12, HEADS = 3, ROWS = 700, DIM = 64 };

static const fa_ext_api *api;
static float q[HEADS * ROWS * DIM], out[THREADS + 1][HEADS * ROWS * DIM];
static unsigned char kept[THREADS + 1][HEADS * ROWS * ROWS];
static int done[THREADS + 1]; /* calls of a thread that have returned FA_EXT_OK */

static int call(int thread) {
    static const int64_t shape[4] = {1, HEADS, ROWS, DIM}, square[4] = {1, HEADS, ROWS, ROWS};
    const fa_ext_array x = {q, FA_EXT_FLOAT32, FA_EXT_CPU, 4, 0, shape, NULL};
    const fa_ext_array y = {out[thread], FA_EXT_FLOAT32, FA_EXT_CPU, 4, 0, shape, NULL};
    const fa_ext_array mask = {kept[thread], FA_EXT_BOOL, FA_EXT_CPU, 4, 0, square, NULL};
    fa_ext_options options;
    fa_ext_forward forward;
    fa_ext_dropout_keep keep;
    fa_ext_faults faults;
    memset(&options, 0, sizeof options);
    memset(&forward, 0, sizeof forward);
    memset(&keep, 0, sizeof keep);
    memset(&faults, 0, sizeof faults);
    options.size = sizeof options, options.dropout = 0.5;
    forward.size = sizeof forward, forward.q = forward.k = forward.v = &x, forward.out = &y;
    keep.size = sizeof keep, keep.out = &mask, keep.options = &options;
    faults.size = sizeof faults, faults.device = FA_EXT_CPU;
    return api->forward(&forward, NULL) || api->dropout_keep(&keep, NULL) || api->faults(&faults, NULL);
}

static void *work(void *given) {
    const int thread = *(const int *)given;
    for (int n = 0; n < CALLS; n++) done[thread] += call(thread) == FA_EXT_OK;
    pause();
    return NULL;
}

/* How many threads did not come to the end of their calls, of those that were cancelled as they began; or -1. */
__attribute__((visibility("default"))) int cancelled(const fa_ext_api *given) {
    pthread_t threads[THREADS];
    int numbers[THREADS], cut = 0;
    api = given;
    for (int n = 0; n < THREADS; n++) {
        numbers[n] = n;
        if (pthread_create(&threads[n], NULL, work, &numbers[n])) return -1;
        pthread_cancel(threads[n]);
    }
    for (int n = 0; n < THREADS; n++) {
        void *ended;
        if (pthread_join(threads[n], &ended) || ended != PTHREAD_CANCELED) return -1;
        cut += done[n] < CALLS;
    }
    return call(THREADS) == FA_EXT_OK ? cut : -1;
}
