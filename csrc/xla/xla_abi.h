/* XLA's typed FFI (API major 0), as far as fa_ext uses it: what a handler is given and what it may ask for.
 *
 * Declared here, so that neither a build nor an import needs XLA. XLA appends fields and functions, and each struct
 * says how long it is; those below have had their places since minor 1 (jaxlib 0.5.0), and minor 5 (0.12.0.1) has them
 * too. */
#ifndef FA_XLA_ABI_H
#define FA_XLA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef struct xla_extension {
    size_t size;
    int type; /* XLA_EXTENSION_... */
    struct xla_extension *next;
} xla_extension;

enum { XLA_EXTENSION_METADATA = 1 };

typedef struct xla_version {
    size_t size;
    xla_extension *extension;
    int major, minor;
} xla_version;

#define XLA_MAJOR 0
/* The newest minor known to keep the places below. */
#define XLA_MINOR 5

/* The description that a handler registers with. */
typedef struct xla_metadata {
    size_t size;
    xla_version version;
    uint32_t traits; /* XLA_TRAIT_... */
} xla_metadata;

enum { XLA_TRAIT_COMMAND_BUFFER = 1 }; /* its launches may be recorded in a CUDA graph */

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

enum {
    XLA_PRED = 1,
    XLA_S32 = 4,
    XLA_S64 = 5,
    XLA_U32 = 8,
    XLA_F16 = 10,
    XLA_F32 = 11,
    XLA_F64 = 12,
    XLA_BF16 = 16,
};

typedef struct xla_buffer {
    size_t size;
    xla_extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

/* Arguments, and in the same form results. */
typedef struct xla_buffers {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int *types; /* XLA_BUFFER */
    void **items;
} xla_buffers;

enum { XLA_BUFFER = 1 };

typedef struct xla_span {
    const char *text; /* not ended by 0 */
    size_t length;
} xla_span;

typedef struct xla_scalar {
    int dtype;
    void *value;
} xla_scalar;

/* Sorted by name. */
typedef struct xla_attributes {
    size_t size;
    xla_extension *extension;
    int64_t count;
    int *types; /* XLA_SCALAR: an xla_scalar; XLA_STRING: an xla_span */
    xla_span **names;
    void **items;
} xla_attributes;

enum { XLA_SCALAR = 3, XLA_STRING = 4 };

typedef struct xla_error xla_error; /* NULL: none. Made by the API, freed by its receiver. */

typedef struct xla_error_create {
    size_t size;
    xla_extension *extension;
    const char *message; /* copied */
    int code;            /* XLA_INVALID_ARGUMENT, ... */
} xla_error_create;

enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_UNIMPLEMENTED = 12, XLA_INTERNAL = 13 };

typedef struct xla_context xla_context;

typedef struct xla_stream_get {
    size_t size;
    xla_extension *extension;
    xla_context *context;
    void *stream; /* out: cudaStream_t */
} xla_stream_get;

typedef struct xla_api {
    size_t size;
    xla_extension *extension;
    xla_version version;
    const void *internal;
    xla_error *(*error_create)(xla_error_create *arguments);
    void (*error_get_message)(void);
    void (*error_destroy)(void);
    void (*handler_register)(void);
    xla_error *(*stream_get)(xla_stream_get *arguments);
} xla_api;

typedef struct xla_frame {
    size_t size;
    xla_extension *extension; /* the metadata extension while the handler is registered */
    const xla_api *api;
    xla_context *context;
    int stage; /* XLA_EXECUTE */
    xla_buffers arguments, results;
    xla_attributes attributes;
    void *future;
} xla_frame;

enum { XLA_EXECUTE = 3 };

typedef xla_error *xla_handler(xla_frame *frame);

_Static_assert(sizeof(void *) == 8 && sizeof(int) == 4, "a 64-bit machine");
_Static_assert(sizeof(xla_extension) == 24 && sizeof(xla_version) == 24, "XLA's layout");
_Static_assert(offsetof(xla_metadata, version) == 8 && offsetof(xla_metadata, traits) == 32, "XLA's layout");
_Static_assert(offsetof(xla_metadata_extension, metadata) == 24, "XLA's layout");
_Static_assert(sizeof(xla_buffer) == 48 && offsetof(xla_buffer, data) == 24, "XLA's layout");
_Static_assert(sizeof(xla_buffers) == 40 && sizeof(xla_attributes) == 48, "XLA's layout");
_Static_assert(sizeof(xla_span) == 16 && sizeof(xla_scalar) == 16, "XLA's layout");
_Static_assert(sizeof(xla_error_create) == 32 && sizeof(xla_stream_get) == 32, "XLA's layout");
_Static_assert(offsetof(xla_api, version) == 16 && offsetof(xla_api, error_create) == 48, "XLA's layout");
_Static_assert(offsetof(xla_api, stream_get) == 48 + 4 * sizeof(void *), "XLA's layout");
_Static_assert(sizeof(xla_frame) == 176 && offsetof(xla_frame, arguments) == 40, "XLA's layout");
_Static_assert(offsetof(xla_frame, attributes) == 120 && offsetof(xla_frame, future) == 168, "XLA's layout");

#endif
