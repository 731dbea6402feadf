/* Bad contents of index arrays: the report of each kind, and where kernels on a device count them. Valid C11,
 * C++20 and device code. */
#ifndef FA_FAULTS_H
#define FA_FAULTS_H

#include "fa.h"

/* How many of a kind, and the first: its sequence, where in the array it stands, and what it is. For lengths and starts
 * `index` is 0 for the array of q and 1 for that of k; for pages the column of the table; for documents, which are
 * counted once a call, how many there may be; else the row of k. */
typedef struct fa_fault {
    int64_t count;
    int64_t sequence, index, value;
} fa_fault;

typedef struct fa_faults {
    fa_fault of[FA_FAULT_COUNT];
} fa_faults;

static inline void fa_fault_add(fa_faults *faults, fa_fault_kind kind, int64_t sequence, int64_t index, int64_t value) {
    fa_fault *fault = &faults->of[kind];
    if (fault->count++) return;
    fault->sequence = sequence, fault->index = index, fault->value = value;
}

/* Where kernels on a device count, in host memory that is mapped for it: kernels/common/faults.cuh adds, the host reads
 * while they run. Counts only grow. The first thread of a kind that finds an epoch other than its `owner` owns that
 * epoch, which the host ends when it clears, and says what it met. */
struct fa_fault_board {
    uint32_t epoch; /* of the host, from 1 on */
    struct {
        uint64_t count;
        int64_t sequence, index, value; /* of the first in the epoch `owner` */
        uint32_t owner;
    } of[FA_FAULT_COUNT];
};

#ifdef __cplusplus
extern "C" {
#endif

const char *fa_fault_name(fa_fault_kind kind);

/* A ValueError for the first kind that was met; FA_OK when there is none. */
fa_code fa_faults_check(const fa_faults *faults, fa_status *status);

/* The board of a CUDA device, which is current, as kernels on it see it; made at the first call. */
fa_code fa_fault_board_get(fa_context *context, fa_device device, fa_fault_board **board, fa_status *status);

/* The faults that kernels on a CUDA device have met since the last call that cleared. Waits for no kernel. */
void fa_fault_board_read(fa_context *context, fa_device device, bool clear, fa_faults *faults);

#ifdef __cplusplus
}
#endif
#endif
