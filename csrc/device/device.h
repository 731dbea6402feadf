/* Devices: capabilities, streams, memory. The one place in csrc/ that knows CUDA; without it every CUDA call fails with
 * a status that says so, and the CPU keeps working. Valid C11 and C++20; CUDA handles travel as void pointers. */
#ifndef FA_DEVICE_H
#define FA_DEVICE_H

#include "fa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One context per module: capabilities, slots; behind a lock. */
fa_context *fa_context_new(void); /* NULL: out of memory */
/* Frees it once each of its holders has called this: its maker, and each fa_context_hold(). */
void fa_context_free(fa_context *context);
void fa_context_hold(fa_context *context);
/* A number > 0 that no other context of the process has or had. */
unsigned long fa_context_serial(const fa_context *context);

/* CUDA toolkit of this build, as CUDA counts (13000 is 13.0); 0 for a build without CUDA. */
int fa_cuda_toolkit(void);

/* Number of CUDA devices. FA_ECUDA with the reason ("no NVIDIA driver", "needs R580 or newer, found ...", "built
 * without CUDA") when there is none to use. */
fa_code fa_device_count(fa_context *context, int *count, fa_status *status);

/* Capabilities of a device, cached; *info stays valid as long as the context. On the CPU it fails only for a bad
 * FA_EXT_WORKSPACE_MB, which is read when the context is made. */
fa_code fa_device_info_get(fa_context *context, fa_device device, const fa_device_info **info, fa_status *status);

/* cuTensorMapEncodeTiled, once the device has been described, or NULL where the driver has none. */
void *fa_device_tensor_maps(const fa_context *context, fa_device device);

/* Makes `device` current on this thread and says which was; leave with the value it gave. Both are no-ops on the CPU.
 * In a forked child of a process that used CUDA, entering fails saying to use the spawn start method. */
fa_code fa_device_enter(fa_context *context, fa_device device, int *previous, fa_status *status);
void fa_device_leave(fa_device device, int previous);

/* Device of a pointer: CUDA device or managed memory -> FA_CUDA, pinned or pageable host memory -> FA_CPU.
 * FA_EBUFFER when `must_be_cuda` and CUDA does not know the pointer. */
fa_code fa_pointer_device(fa_context *context, const void *pointer, bool must_be_cuda, fa_device *device,
                          fa_status *status);

/* Memory of `device`, which is current, 256-byte aligned: stream-ordered on CUDA, plain on the CPU (stream unused). */
fa_code fa_memory_alloc(fa_context *context, fa_device device, size_t bytes, void *stream, void **pointer,
                        fa_status *status);
fa_code fa_memory_free(fa_device device, void *pointer, void *stream, fa_status *status);
/* Blocking copy between host and the current device in either direction, ordered after the work on `stream`. */
fa_code fa_memory_copy(void *to, const void *from, size_t bytes, void *stream, fa_status *status);

/* FA_EVALUE where a stream that somebody else names as `name` is no stream, or one of another device than `device`,
 * which q is on: CUDA may take it for a launch, whose first access over there ends the process's use of CUDA. Needs
 * fa_device_info_get(). */
fa_code fa_stream_check(fa_context *context, fa_device device, const char *name, void *stream, fa_status *status);
/* The device of a stream; false where it is a default one, or of no device that fa_device_info_get() has described. */
bool fa_stream_device(const fa_context *context, void *stream, fa_device *device);
/* Makes work queued on `waiter` from now on wait for what is queued on `producer` until now; nothing if they are equal.
 * A producer of another device than the current one is waited for on the host. */
fa_code fa_stream_wait(void *waiter, void *producer, fa_status *status);
fa_code fa_stream_synchronize(void *stream, fa_status *status);
/* Waits for all work on the current device, which is `device`; nothing on the CPU. */
fa_code fa_device_synchronize(fa_device device, fa_status *status);

/* A place in the context for somebody's own state, by an address of theirs as key: NULL at first; `free_slot` runs on
 * what is there when the context goes. NULL: out of memory. Call it, and use what is there, with the lock held. */
void **fa_context_slot(fa_context *context, const void *key, void (*free_slot)(void *state));
void fa_context_lock(fa_context *context);
void fa_context_unlock(fa_context *context);

/* The libraries of library.h that are opened for this context. */
struct fa_libraries *fa_context_libraries(fa_context *context);

#define FA_STREAM_LEGACY     ((void *)(uintptr_t)1)
#define FA_STREAM_PER_THREAD ((void *)(uintptr_t)2)

#ifdef __cplusplus
}
#endif
#endif
