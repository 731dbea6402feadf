/* CUDA devices, streams and memory. See device.h; device_none.c stands in where there is no CUDA. */
#include "device/context.h"

#if FA_HAVE_CUDA

#include <cuda.h>             /* codes of the driver */
#include <cuda_runtime_api.h> /* the static CUDA runtime; libcuda is found by it at run time */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Set in a forked child once the parent has used CUDA: CUDA does not survive a fork. */
static volatile bool cuda_used, cuda_lost_by_fork;

static void after_fork_in_child(void) { cuda_lost_by_fork = cuda_used; }

static pthread_once_t fork_watch = PTHREAD_ONCE_INIT;
static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

static fa_code check_fork(fa_status *status) {
    if (!cuda_lost_by_fork) return FA_OK;
    return fa_fail(status, FA_ECUDA,
                   "CUDA was used before this process was forked and cannot be used in the child; start processes with "
                   "multiprocessing's \"spawn\" method");
}

static fa_code cuda_fail(fa_status *status, cudaError_t error, const char *what) {
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation)
        return fa_fail(status, FA_EMEMORY, "%s: out of memory on the CUDA device", what);
    return fa_fail(status, FA_ECUDA, "%s: %s (%s)", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

#define TRY_CUDA(status, call)                                                                                         \
    do {                                                                                                               \
        cudaError_t try_error = (call);                                                                                \
        if (try_error != cudaSuccess) return cuda_fail((status), try_error, #call);                                    \
    } while (0)

int fa_cuda_toolkit(void) { return CUDART_VERSION; }

fa_code fa_device_count(fa_context *context, int *count, fa_status *status) {
    (void)context;
    *count = 0;
    FA_TRY(check_fork(status));
    pthread_once(&fork_watch, watch_forks);
    cudaError_t error = cudaGetDeviceCount(count);
    if (error == cudaSuccess && *count > 0) {
        cuda_used = true;
        return FA_OK;
    }
    cudaGetLastError();
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) return fa_fail(status, FA_ECUDA, "no NVIDIA driver was found on this machine");
    if (error == cudaErrorInsufficientDriver)
        return fa_fail(status, FA_ECUDA, "the NVIDIA driver is too old: needs R%d or newer, found one for CUDA %d.%d",
                       CUDART_VERSION >= 13000 ? 580 : 525, driver / 1000, driver % 1000 / 10);
    if (error == cudaSuccess || error == cudaErrorNoDevice)
        return fa_fail(status, FA_ECUDA, "no CUDA device is visible to this process");
    return cuda_fail(status, error, "cudaGetDeviceCount");
}

static fa_code create_pool(fa_context *context, int id, fa_status *status) {
    struct cudaMemPoolProps properties = {.allocType = cudaMemAllocationTypePinned,
                                          .location = {.type = cudaMemLocationTypeDevice, .id = id}};
    cudaMemPool_t made;
    TRY_CUDA(status, cudaMemPoolCreate(&made, &properties));
    uint64_t keep = context->cpu.workspace_limit; /* what stays cached between calls */
    TRY_CUDA(status, cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep));
    context->pools[id] = made;
    return FA_OK;
}

/* A function of the driver, or NULL where it has none of that name. */
static void *driver_function(const char *name) {
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : NULL;
}

static fa_code describe_cuda(fa_context *context, int id, fa_device_info *info, fa_status *status) {
    struct cudaDeviceProp properties;
    TRY_CUDA(status, cudaGetDeviceProperties(&properties, id));
    info->device = (fa_device){FA_CUDA, id};
    snprintf(info->name, sizeof info->name, "%.127s", properties.name);
    info->cc = properties.major * 10 + properties.minor;
    info->sm_count = properties.multiProcessorCount;
    info->smem_per_block = properties.sharedMemPerBlockOptin;
    info->smem_per_sm = properties.sharedMemPerMultiprocessor;
    info->l2_bytes = (size_t)properties.l2CacheSize;
    info->memory_bytes = properties.totalGlobalMem;
    info->workspace_limit = context->cpu.workspace_limit;
    TRY_CUDA(status, cudaDriverGetVersion(&info->driver_version));
    TRY_CUDA(status, cudaRuntimeGetVersion(&info->runtime_version));
    if (!context->driver.encode_tensor_map)
        context->driver.encode_tensor_map = driver_function("cuTensorMapEncodeTiled");
    info->tensor_maps = context->driver.encode_tensor_map != NULL;
    for (int n = 0; n < FA_LIBRARY_COUNT; n++)
        info->library_error[n] = fa_library_error(&context->libraries, (fa_library_name)n);
    return FA_OK;
}

/* With the device current. */
static void find_primary(fa_context *context, int id) {
    if (!context->driver.context) {
        context->driver.push = (int (*)(void *))driver_function("cuCtxPushCurrent");
        context->driver.pop = (int (*)(void **))driver_function("cuCtxPopCurrent");
        context->driver.device = (int (*)(int *))driver_function("cuCtxGetDevice");
        context->driver.stream_context = (int (*)(void *, void **))driver_function("cuStreamGetCtx");
        context->driver.context = (int (*)(void **))driver_function("cuCtxGetCurrent");
    }
    void *primary = NULL;
    if (context->driver.context && context->driver.context(&primary) == CUDA_SUCCESS)
        __atomic_store_n(&context->primary[id], primary, __ATOMIC_RELEASE);
}

static fa_code info_create(fa_context *context, int id, fa_status *status) {
    int previous = 0;
    fa_device device = {FA_CUDA, id};
    fa_device_info *info = calloc(1, sizeof *info);
    if (!info) return fa_fail(status, FA_EMEMORY, "out of memory");
    fa_code code = fa_device_enter(context, device, &previous, status);
    if (code == FA_OK) {
        code = describe_cuda(context, id, info, status);
        if (code == FA_OK) code = create_pool(context, id, status);
        if (code == FA_OK) find_primary(context, id);
        fa_device_leave(device, previous);
    }
    if (code == FA_OK)
        __atomic_store_n(&context->cuda[id], info, __ATOMIC_RELEASE);
    else
        free(info);
    return code;
}

fa_code fa_device_info_get(fa_context *context, fa_device device, const fa_device_info **info, fa_status *status) {
    *info = &context->cpu;
    if (device.kind == FA_CPU) return fa_context_check_limit(context, status);
    if (device.id >= 0 && device.id < FA_MAX_DEVICES) {
        *info = __atomic_load_n(&context->cuda[device.id], __ATOMIC_ACQUIRE);
        if (*info) return FA_OK;
    }
    FA_TRY(fa_context_check_limit(context, status));
    int count = 0;
    FA_TRY(fa_device_count(context, &count, status));
    if (device.id < 0 || device.id >= count || device.id >= FA_MAX_DEVICES)
        return fa_fail(status, FA_EVALUE, "device is %d; accepted: 0 to %d", device.id, count - 1);
    pthread_mutex_lock(&context->lock);
    fa_code code = context->cuda[device.id] ? FA_OK : info_create(context, device.id, status);
    pthread_mutex_unlock(&context->lock);
    *info = context->cuda[device.id];
    return code;
}

void *fa_device_tensor_maps(const fa_context *context, fa_device device) {
    return device.kind == FA_CUDA ? context->driver.encode_tensor_map : NULL;
}

fa_code fa_device_enter(fa_context *context, fa_device device, int *previous, fa_status *status) {
    *previous = device.id;
    if (device.kind == FA_CPU) return FA_OK;
    FA_TRY(check_fork(status));
    /* The usual case, in a third of the time of cudaGetDevice(): the device's primary context is current. */
    if (device.id >= 0 && device.id < FA_MAX_DEVICES) {
        void *primary = __atomic_load_n(&context->primary[device.id], __ATOMIC_ACQUIRE), *current;
        if (primary && context->driver.context(&current) == CUDA_SUCCESS && current == primary) return FA_OK;
    }
    TRY_CUDA(status, cudaGetDevice(previous));
    /* Also where it is that device already: a thread that has made no CUDA call has a device, but no context. */
    TRY_CUDA(status, cudaSetDevice(device.id));
    return FA_OK;
}

void fa_device_leave(fa_device device, int previous) {
    if (device.kind == FA_CUDA && previous != device.id) cudaSetDevice(previous);
}

fa_code fa_pointer_device(fa_context *context, const void *pointer, bool must_be_cuda, fa_device *device,
                          fa_status *status) {
    int count = 0;
    if (must_be_cuda) FA_TRY(cuda_used ? check_fork(status) : fa_device_count(context, &count, status));
    struct cudaPointerAttributes attributes;
    cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
    cudaGetLastError();
    bool known = error == cudaSuccess && attributes.type != cudaMemoryTypeUnregistered;
    bool on_device = known && (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged);
    if (must_be_cuda && !known)
        return fa_fail(status, FA_EBUFFER, "CUDA does not know the pointer %p that the array gives", pointer);
    *device = on_device ? (fa_device){FA_CUDA, attributes.device} : (fa_device){FA_CPU, 0};
    return FA_OK;
}

fa_code fa_memory_alloc(fa_context *context, fa_device device, size_t bytes, void *stream, void **pointer,
                        fa_status *status) {
    if (device.kind == FA_CPU) return fa_cpu_alloc(bytes, pointer, status);
    const fa_device_info *info;
    FA_TRY(fa_device_info_get(context, device, &info, status)); /* creates the pool */
    cudaError_t error = cudaMallocFromPoolAsync(pointer, bytes ? bytes : 1, context->pools[device.id], stream);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return fa_fail(status, FA_EMEMORY, "out of memory: %zu bytes on CUDA device %d", bytes, device.id);
    }
    return error == cudaSuccess ? FA_OK : cuda_fail(status, error, "cudaMallocFromPoolAsync");
}

fa_code fa_memory_free(fa_device device, void *pointer, void *stream, fa_status *status) {
    if (device.kind == FA_CPU)
        free(pointer);
    else
        TRY_CUDA(status, cudaFreeAsync(pointer, stream));
    return FA_OK;
}

fa_code fa_memory_copy(void *to, const void *from, size_t bytes, void *stream, fa_status *status) {
    TRY_CUDA(status, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    TRY_CUDA(status, cudaStreamSynchronize(stream));
    return FA_OK;
}

/* The device of a CUcontext; `otherwise` where the driver does not say. */
static int context_device(const fa_context *context, void *owner, int otherwise) {
    int id = otherwise;
    void *popped;
    if (!context->driver.push || !context->driver.pop || !context->driver.device) return otherwise;
    if (context->driver.push(owner) != CUDA_SUCCESS) return otherwise;
    if (context->driver.device(&id) != CUDA_SUCCESS) id = otherwise;
    context->driver.pop(&popped);
    return id;
}

fa_code fa_stream_check(fa_context *context, fa_device device, const char *name, void *stream, fa_status *status) {
    if (stream == FA_STREAM_LEGACY || stream == FA_STREAM_PER_THREAD || !context->driver.stream_context) return FA_OK;
    void *owner = NULL;
    const int error = context->driver.stream_context(stream, &owner);
    if (error == CUDA_ERROR_INVALID_HANDLE)
        return fa_fail(status, FA_EVALUE, "%s is %p, which is no stream of this process; accepted: a CUDA stream", name,
                       stream);
    if (error != CUDA_SUCCESS || owner == __atomic_load_n(&context->primary[device.id], __ATOMIC_ACQUIRE)) return FA_OK;
    const int id = context_device(context, owner, device.id);
    if (id == device.id) return FA_OK;
    return fa_fail(status, FA_EVALUE, "%s belongs to CUDA device %d, but q is on CUDA device %d", name, id, device.id);
}

bool fa_stream_device(const fa_context *context, void *stream, fa_device *device) {
    void *owner = NULL;
    int (*ask)(void *, void **) = NULL;
    for (int id = 0; id < FA_MAX_DEVICES; id++) { /* a primary context is set after the driver's functions */
        const void *primary = __atomic_load_n(&context->primary[id], __ATOMIC_ACQUIRE);
        if (!primary) continue;
        if (!ask && (!(ask = context->driver.stream_context) || ask(stream, &owner) != CUDA_SUCCESS)) return false;
        *device = (fa_device){FA_CUDA, id};
        if (primary == owner) return true;
    }
    return false;
}

fa_code fa_stream_wait(void *waiter, void *producer, fa_status *status) {
    if (waiter == producer) return FA_OK;
    cudaEvent_t event;
    TRY_CUDA(status, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t error = cudaEventRecord(event, producer);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(waiter, event, 0);
    if (error == cudaErrorInvalidResourceHandle) { /* the producer is of another device, whose events are not these */
        cudaGetLastError();
        error = cudaStreamSynchronize(producer);
    }
    cudaEventDestroy(event);
    return error == cudaSuccess ? FA_OK : cuda_fail(status, error, "ordering two streams");
}

fa_code fa_stream_synchronize(void *stream, fa_status *status) {
    TRY_CUDA(status, cudaStreamSynchronize(stream));
    return FA_OK;
}

fa_code fa_device_synchronize(fa_device device, fa_status *status) {
    if (device.kind == FA_CUDA) TRY_CUDA(status, cudaDeviceSynchronize());
    return FA_OK;
}

#endif
