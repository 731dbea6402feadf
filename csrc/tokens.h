/* Where each new token of an append goes. C11, C++20 and device code; index arrays may hold anything. */
#ifndef FA_TOKENS_H
#define FA_TOKENS_H

#include "fa.h"

/* A new key: row `row` of batch entry `batch` of k (0 for packed k) to row `place` of page `page`. Not written where
 * `skipped`; `fault` says why, FA_FAULT_COUNT where it is no fault. */
typedef struct fa_token {
    int64_t sequence, batch, row;
    int64_t page, place, position;
    bool skipped;
    fa_fault_kind fault;
    int64_t index, value; /* of the fault */
} fa_token;

FA_INLINE fa_token fa_token_fault(fa_token token, fa_fault_kind kind, int64_t index, int64_t value) {
    token.skipped = true;
    token.fault = kind;
    token.index = index;
    token.value = value;
    return token;
}

/* A token that has a place, with the rotation of its position. */
FA_INLINE fa_token fa_token_rotated(const fa_slots *slots, fa_token token) {
    if (slots->positions >= 0 && (token.position < 0 || token.position >= slots->positions))
        return fa_token_fault(token, FA_FAULT_position, token.row, token.position);
    return token;
}

/* Where token t of a call with slots goes, negative: nowhere. */
FA_INLINE int64_t fa_slot(const fa_slots *slots, int64_t t) {
    return slots->dtype == FA_I64 ? fa_index_64((const int64_t *)slots->data, t)
                                  : fa_index((const int32_t *)slots->data, t);
}

/* Token t of a call with slots. */
FA_INLINE fa_token fa_token_of_slot(const fa_slots *slots, const fa_sequences *s, int64_t t) {
    fa_token token = {.sequence = -1, .row = t, .skipped = t >= slots->count, .fault = FA_FAULT_COUNT};
    if (token.skipped) return token;
    const int64_t slot = fa_slot(slots, t);
    token.skipped = slot < 0;
    if (token.skipped) return token;
    if (slots->page_size == 0 || slot / slots->page_size >= slots->pages)
        return fa_token_fault(token, FA_FAULT_slot, t, slot);
    token.page = slot / slots->page_size;
    token.place = slot % slots->page_size;
    token.position = s->positions ? fa_index(s->positions, t) : 0;
    return fa_token_rotated(slots, token);
}

/* Token t of the `count` that sequence b has from row `first` on. */
FA_INLINE fa_token fa_token_of_sequence(const fa_slots *slots, const fa_sequences *s, int64_t b, int64_t first,
                                        int64_t count, int64_t t) {
    const int64_t key = (int64_t)fa_index(s->k.used, b) - count + t;
    fa_token token = {.sequence = b, .batch = s->packed_q ? 0 : b, .row = first + t, .fault = FA_FAULT_COUNT};
    if (key < 0 || key >= s->k.rows) return fa_token_fault(token, FA_FAULT_length, 1, key);
    token.page = b;
    token.place = key;
    if (s->pages.table) {
        const int64_t column = key / s->pages.size;
        const int32_t entry = fa_page_entry(&s->pages, b, column);
        token.page = fa_page_of(&s->pages, entry);
        token.place = key % s->pages.size;
        if (token.page < 0) return fa_token_fault(token, FA_FAULT_page, column, entry);
    }
    token.position = s->positions ? fa_index(s->positions, b * s->positions_stride + token.row) : key;
    return fa_token_rotated(slots, token);
}

#endif
