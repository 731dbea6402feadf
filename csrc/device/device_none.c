/* Devices of a build without CUDA: every CUDA call fails with a status that says so. See device.h. */
#include "device/context.h"

#if !FA_HAVE_CUDA

#include <stdlib.h>

static fa_code no_cuda(fa_status *status) {
    return fa_fail(status, FA_ECUDA, "this build of fa_ext has no CUDA kernels; rebuild it where nvcc is installed");
}

int fa_cuda_toolkit(void) { return 0; }

fa_code fa_device_count(fa_context *context, int *count, fa_status *status) {
    (void)context;
    *count = 0;
    return no_cuda(status);
}

fa_code fa_device_info_get(fa_context *context, fa_device device, const fa_device_info **info, fa_status *status) {
    *info = &context->cpu;
    return device.kind == FA_CPU ? fa_context_check_limit(context, status) : no_cuda(status);
}

void *fa_device_tensor_maps(const fa_context *context, fa_device device) {
    (void)context, (void)device;
    return NULL;
}

fa_code fa_device_enter(fa_context *context, fa_device device, int *previous, fa_status *status) {
    (void)context;
    *previous = device.id;
    return device.kind == FA_CPU ? FA_OK : no_cuda(status);
}

void fa_device_leave(fa_device device, int previous) { (void)device, (void)previous; }

fa_code fa_pointer_device(fa_context *context, const void *pointer, bool must_be_cuda, fa_device *device,
                          fa_status *status) {
    (void)context, (void)pointer;
    *device = (fa_device){FA_CPU, 0};
    return must_be_cuda ? no_cuda(status) : FA_OK;
}

fa_code fa_memory_alloc(fa_context *context, fa_device device, size_t bytes, void *stream, void **pointer,
                        fa_status *status) {
    (void)context, (void)stream;
    return device.kind == FA_CPU ? fa_cpu_alloc(bytes, pointer, status) : no_cuda(status);
}

fa_code fa_memory_free(fa_device device, void *pointer, void *stream, fa_status *status) {
    (void)device, (void)stream, (void)status;
    free(pointer);
    return FA_OK;
}

fa_code fa_memory_copy(void *to, const void *from, size_t bytes, void *stream, fa_status *status) {
    (void)to, (void)from, (void)bytes, (void)stream;
    return no_cuda(status);
}

fa_code fa_stream_wait(void *waiter, void *producer, fa_status *status) {
    (void)waiter, (void)producer;
    return no_cuda(status);
}

fa_code fa_stream_check(fa_context *context, fa_device device, const char *name, void *stream, fa_status *status) {
    (void)context, (void)device, (void)name, (void)stream;
    return no_cuda(status);
}

bool fa_stream_device(const fa_context *c, void *s, fa_device *d) { return (void)c, (void)s, (void)d, false; }

fa_code fa_stream_synchronize(void *stream, fa_status *status) {
    (void)stream;
    return no_cuda(status);
}

fa_code fa_device_synchronize(fa_device device, fa_status *status) {
    return device.kind == FA_CPU ? FA_OK : no_cuda(status);
}

#endif
