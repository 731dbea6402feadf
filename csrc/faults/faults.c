/* Bad contents of index arrays. See faults.h. */
#include "faults/faults.h"

#include <stdlib.h>

#include "device/device.h"
#include "device/host_mapped.h"

#define MAX_DEVICES 64

/* The host's side of a device's board. */
typedef struct counted {
    fa_fault_board *board, *on_device;
    uint64_t before[FA_FAULT_COUNT]; /* counts when it was last cleared */
} counted;

typedef struct state {
    counted device[MAX_DEVICES];
} state;

/* NULL: out of memory. With the context locked. */
static counted *counted_of(fa_context *context, fa_device device) {
    static const char key;
    void **slot = fa_context_slot(context, &key, free); /* boards stay: kernels may still hold them */
    if (slot && !*slot) *slot = calloc(1, sizeof(state));
    return slot && *slot ? &((state *)*slot)->device[device.id] : NULL;
}

static fa_code make_board(counted *of, fa_status *status) {
    void *host, *device;
    FA_TRY(fa_mapped_alloc(sizeof(fa_fault_board), &host, &device, status));
    of->board = host;
    of->on_device = device;
    of->board->epoch = 1;
    return FA_OK;
}

fa_code fa_fault_board_get(fa_context *context, fa_device device, fa_fault_board **board, fa_status *status) {
    fa_context_lock(context);
    counted *of = counted_of(context, device);
    fa_code code = FA_OK;
    if (!of)
        code = fa_fail(status, FA_EMEMORY, "out of memory");
    else if (!of->board)
        code = make_board(of, status);
    if (code == FA_OK) *board = of->on_device;
    fa_context_unlock(context);
    return code;
}

void fa_fault_board_read(fa_context *context, fa_device device, bool clear, fa_faults *faults) {
    fa_context_lock(context);
    counted *of = counted_of(context, device);
    fa_fault_board *board = of ? of->board : NULL;
    for (int kind = 0; board && kind < FA_FAULT_COUNT; kind++) {
        fa_fault *fault = &faults->of[kind];
        const uint64_t count = __atomic_load_n(&board->of[kind].count, __ATOMIC_ACQUIRE);
        *fault = (fa_fault){(int64_t)(count - of->before[kind]), board->of[kind].sequence, board->of[kind].index,
                            board->of[kind].value};
        if (clear) of->before[kind] = count;
    }
    if (board && clear) __atomic_store_n(&board->epoch, board->epoch + 1, __ATOMIC_RELEASE);
    fa_context_unlock(context);
}

/* ---- in words ---- */

const char *fa_fault_name(fa_fault_kind kind) {
    static const char *const names[FA_FAULT_COUNT] = {
#define FA_NAME(name) #name,
        FA_FAULTS(FA_NAME)
#undef FA_NAME
    };
    return names[kind];
}

fa_code fa_faults_check(const fa_faults *faults, fa_status *status) {
    for (int kind = 0; kind < FA_FAULT_COUNT; kind++) {
        const fa_fault *f = &faults->of[kind];
        const long long sequence = f->sequence, index = f->index, value = f->value, count = f->count;
        const char of = f->index ? 'k' : 'q';
        if (!count) continue;
        switch ((fa_fault_kind)kind) {
        case FA_FAULT_length:
            return fa_fail(status, FA_EVALUE,
                           "seqlens_%c of sequence %lld leads to %lld, which is negative or more than its storage%s "
                           "(%lld such in all)",
                           of, sequence, value, f->index ? " holds" : " or max_seqlen_q has room for", count);
        case FA_FAULT_cu_seqlens:
            return fa_fail(status, FA_EVALUE,
                           "cu_seqlens_%c[%lld] is %lld, which is below an earlier one, or outside the rows there are "
                           "(%lld such in all)",
                           of, sequence, value, count);
        case FA_FAULT_page:
            return fa_fail(status, FA_EVALUE, "page_table[%lld, %lld] is %lld, which is no page (%lld such in all)",
                           sequence, index, value, count);
        case FA_FAULT_slot:
            return fa_fail(status, FA_EVALUE, "slots[%lld] is %lld, which is beyond the caches (%lld such in all)",
                           index, value, count);
        case FA_FAULT_position:
            return fa_fail(status, FA_EVALUE,
                           "row %lld of k has position %lld, which is outside rotary's tables (%lld such in all)",
                           index, value, count);
        default:
            return fa_fail(status, FA_EVALUE, "ids hold %lld documents, but count is %lld; accepted: at most as many",
                           value, index);
        }
    }
    return FA_OK;
}
