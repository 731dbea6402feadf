/* The contents of a context, for the files that are its own: context.c, device.c, device_none.c. */
#ifndef FA_CONTEXT_H
#define FA_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "device/library.h"

#define FA_MAX_DEVICES 64

/* A place that fa_context_slot() gave. */
typedef struct slot {
    const void *key;
    void *state;
    void (*free_state)(void *state);
    struct slot *next;
} slot;

struct fa_context {
    unsigned long serial;
    atomic_int holders;
    pthread_mutex_t lock;
    fa_device_info cpu;
    fa_device_info *cuda[FA_MAX_DEVICES]; /* filled once each, under the lock, then only read; from calloc() */
    void *pools[FA_MAX_DEVICES];          /* cudaMemPool_t */
    void *primary[FA_MAX_DEVICES];        /* the primary contexts, CUcontext; NULL while unknown */
    struct {
        int (*context)(void **);                /* cuCtxGetCurrent */
        int (*push)(void *);                    /* cuCtxPushCurrent */
        int (*pop)(void **);                    /* cuCtxPopCurrent */
        int (*device)(int *);                   /* cuCtxGetDevice */
        int (*stream_context)(void *, void **); /* cuStreamGetCtx */
        void *encode_tensor_map;                /* cuTensorMapEncodeTiled */
    } driver;                                   /* set before the first of `cuda`; NULL where the driver has none */
    char workspace_error[192];                  /* what is wrong with FA_EXT_WORKSPACE_MB, or empty */
    slot *slots;
    fa_libraries libraries;
};

/* FA_EVALUE where FA_EXT_WORKSPACE_MB was not a number of megabytes. */
fa_code fa_context_check_limit(const fa_context *context, fa_status *status);

/* Memory of the CPU, 256-byte aligned. */
fa_code fa_cpu_alloc(size_t bytes, void **pointer, fa_status *status);

#endif
