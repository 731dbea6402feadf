/* The part of DLPack 1.3's binary interface that the front end uses, declared from its specification: tensors, their
 * two capsules and the table of C functions that a type offers as `__dlpack_c_exchange_api__`.
 *
 * Capsules are named "dltensor" or "dltensor_versioned"; whoever consumes one renames it to "used_..." and calls the
 * deleter (which may be NULL) when done. Strides count elements; NULL strides mean C-contiguous.
 */
#ifndef FA_DLPACK_ABI_H
#define FA_DLPACK_ABI_H

#include <stdint.h>

#define DLPACK_MAJOR 1
#define DLPACK_MINOR 3

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_CUDA_HOST = 3, DLPACK_CUDA_MANAGED = 13 };
enum { DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_COMPLEX = 5, DLPACK_BOOL = 6 };
enum { DLPACK_READ_ONLY = 1, DLPACK_IS_COPIED = 2 };

typedef struct DLVersion {
    uint32_t major, minor;
} DLVersion;

typedef struct DLDevice {
    int32_t type, id;
} DLDevice;

typedef struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManaged {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManaged *self);
} DLManaged;

typedef struct DLManagedVersioned {
    DLVersion version;
    void *context;
    void (*deleter)(struct DLManagedVersioned *self);
    uint64_t flags;
    DLTensor tensor;
} DLManagedVersioned;

/* The table behind `__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api". Functions return 0, or -1 with a
 * Python exception set (the allocator: after calling set_error). None of them synchronises. */
typedef struct DLExchangeHeader {
    DLVersion version;
    struct DLExchangeHeader *previous; /* an older table of the same type, or NULL */
} DLExchangeHeader;

typedef void (*DLSetError)(void *context, const char *kind, const char *message);

typedef struct DLExchange {
    DLExchangeHeader header;
    int (*allocate)(DLTensor *prototype, DLManagedVersioned **out, void *error_context, DLSetError set_error);
    int (*managed_from_object)(void *object, DLManagedVersioned **out);
    int (*managed_to_object)(DLManagedVersioned *stolen, void **out_object);
    int (*tensor_from_object)(void *object, DLTensor *out); /* may be NULL; borrowed, valid while the object lives */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} DLExchange;

_Static_assert(sizeof(DLTensor) == 48, "DLTensor is 48 bytes");
_Static_assert(sizeof(DLManaged) == 64, "DLManagedTensor is 64 bytes");
_Static_assert(sizeof(DLManagedVersioned) == 80, "DLManagedTensorVersioned is 80 bytes");
_Static_assert(sizeof(DLExchange) == 56, "DLPackExchangeAPI is 56 bytes");

#endif
