/* Contexts, and what the CPU is. See context.h and device.h. */
#include "device/context.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORKSPACE_VARIABLE   "FA_EXT_WORKSPACE_MB"
#define DEFAULT_WORKSPACE_MB 512
#define MAX_WORKSPACE_MB     (1 << 24)
#define ALIGNMENT            256

/* Reads FA_EXT_WORKSPACE_MB, once a context. */
static void read_workspace_limit(fa_context *context) {
    const char *text = getenv(WORKSPACE_VARIABLE);
    unsigned long long megabytes = DEFAULT_WORKSPACE_MB;
    if (text && *text) {
        char *end = NULL;
        megabytes = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : 0; /* which takes blanks and signs too */
        if (megabytes < 1 || megabytes > MAX_WORKSPACE_MB || *end)
            snprintf(context->workspace_error, sizeof context->workspace_error,
                     WORKSPACE_VARIABLE " was \"%.80s\" when fa_ext was imported; accepted: megabytes, 1 to %d", text,
                     MAX_WORKSPACE_MB);
    }
    context->cpu.workspace_limit = (size_t)megabytes << 20;
}

fa_code fa_context_check_limit(const fa_context *context, fa_status *status) {
    if (!*context->workspace_error) return FA_OK;
    return fa_fail(status, FA_EVALUE, "%s", context->workspace_error);
}

static void describe_cpu(fa_device_info *info) {
    info->device = (fa_device){FA_CPU, 0};
    snprintf(info->name, sizeof info->name, "CPU");
    long threads = sysconf(_SC_NPROCESSORS_ONLN), pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    info->sm_count = threads > 0 ? (int)threads : 1;
    info->memory_bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    const char *isa = getenv("FA_EXT_CPU_ISA"); /* once: in a call it would race with another thread's setenv() */
    snprintf(info->cpu_isa, sizeof info->cpu_isa, "%s", isa ? isa : "");
}

fa_context *fa_context_new(void) {
    static atomic_ulong contexts;
    fa_context *context = calloc(1, sizeof *context);
    if (!context) return NULL;
    context->serial = atomic_fetch_add(&contexts, 1) + 1;
    atomic_init(&context->holders, 1);
    pthread_mutex_init(&context->lock, NULL);
    fa_libraries_begin(&context->libraries);
    describe_cpu(&context->cpu);
    read_workspace_limit(context);
    return context;
}

unsigned long fa_context_serial(const fa_context *context) { return context->serial; }

fa_libraries *fa_context_libraries(fa_context *context) { return &context->libraries; }

void **fa_context_slot(fa_context *context, const void *key, void (*free_slot)(void *state)) {
    slot *found = context->slots;
    while (found && found->key != key) found = found->next;
    if (found) return &found->state;
    found = calloc(1, sizeof *found);
    if (!found) return NULL;
    *found = (slot){.key = key, .free_state = free_slot, .next = context->slots};
    context->slots = found;
    return &found->state;
}

void fa_context_lock(fa_context *context) { pthread_mutex_lock(&context->lock); }

void fa_context_unlock(fa_context *context) { pthread_mutex_unlock(&context->lock); }

fa_code fa_cpu_alloc(size_t bytes, void **pointer, fa_status *status) {
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    *pointer = rounded >= bytes ? aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT) : NULL;
    if (*pointer) return FA_OK;
    return fa_fail(status, FA_EMEMORY, "out of memory: the call needs %zu bytes of workspace", bytes);
}

void fa_context_hold(fa_context *context) { atomic_fetch_add(&context->holders, 1); }

void fa_context_free(fa_context *context) {
    if (!context || atomic_fetch_sub(&context->holders, 1) > 1) return;
    while (context->slots) {
        slot *first = context->slots;
        context->slots = first->next;
        if (first->state) first->free_state(first->state);
        free(first);
    }
    for (int id = 0; id < FA_MAX_DEVICES; id++)
        free(context->cuda[id]); /* pools are left to the driver: at exit the runtime may be gone */
    fa_libraries_end(&context->libraries);
    pthread_mutex_destroy(&context->lock);
    free(context);
}
