/* The structs of arguments of fa_ext/include/fa_ext.h -> views -> request -> problem and plan. */
#ifndef FA_ARGUMENTS_H
#define FA_ARGUMENTS_H

#include "device/device.h"
#include "fa_ext.h"

/* One call through the table. */
typedef struct fa_capi_call {
    fa_context *context;
    fa_ext_run run;
    fa_op op;
    const fa_kernel *forced;
    uintptr_t alignment; /* of made-up addresses while only planning; 0: the arrays' own count */
    fa_problem problem;
    const fa_device_info *info;
    fa_plan plan;
    bool stream_known;          /* the stream is one of the arrays' device for sure */
    bool checks, checks_device; /* bad contents of index arrays are an error: on the CPU, on a device */
    int cancel;                 /* whether the thread may be cancelled outside the call: as pthread.h says */
    void *kept;                 /* what the problem points into; freed at the end */
} fa_capi_call;

/* Copies a struct that begins with its size; the fields that a caller of an older header lacks are 0. `least`: its
 * first size. */
fa_code fa_capi_struct(const char *name, const void *given, size_t least, void *read, size_t known, fa_status *status);

#define FA_CAPI_STRUCT(type, given, read, status) fa_capi_struct(#type, given, sizeof(type), read, sizeof(type), status)

/* The operands in the structs of arguments, an operation each, in the order of operands.def, and the gradients. */
typedef struct fa_capi_field {
    fa_operand_number operand;
    size_t offset;
} fa_capi_field;

typedef struct fa_capi_fields {
    const fa_capi_field *field;
    int count;
} fa_capi_fields;

extern const fa_capi_fields fa_capi_operands[FA_OP_COUNT];
extern const size_t fa_capi_gradients[FA_GRAD_COUNT];

/* The dtype of a value of fa_ext_dtype; FA_DTYPE_COUNT: it is none. */
fa_dtype fa_capi_dtype(int number);

static inline const fa_ext_array **fa_capi_array(void *arguments, size_t offset) {
    return (const fa_ext_array **)((char *)arguments + offset);
}

/* Fills all of the call but what is there before: context, run, op, forced, alignment. */
fa_code fa_capi_prepare(const void *arguments, fa_capi_call *c, fa_status *status);

/* The mask of dropout: a view of (B, H, Sq, Sk) bytes on the CPU, and the dropout that it shows. */
fa_code fa_capi_read_keep(const void *arguments, fa_view *out, fa_dropout *dropout, fa_status *status);

#endif
