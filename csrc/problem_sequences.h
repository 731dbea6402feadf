/* The part of a forward problem that says what its sequences are: validation of what the host can see, and what bad
 * contents of the index arrays are found on the CPU. */
#ifndef FA_PROBLEM_SEQUENCES_H
#define FA_PROBLEM_SEQUENCES_H

#include "fa.h"

/* Whether a request says more than dense arrays do. */
bool fa_sequences_given(const fa_request *request);

/* Refuses arguments that contradict each other, or the axes of q, k and v. */
fa_code fa_sequences_check(const fa_request *request, fa_status *status);

/* Validates what else concerns sequences and fills problem->sequences, and of its forward batch and seq_k. q, k and v
 * have been held against each other. */
fa_code fa_sequences_build(const fa_request *request, fa_problem *problem, fa_status *status);

/* FA_WITH_... of them. */
uint32_t fa_sequences_features(const fa_sequences *sequences);

/* Kinds of bad contents, by which the part of the array that they make meaningless is replaced or hidden. */
#define FA_FAULTS(X) X(length) X(cu_seqlens) X(page) X(slot) X(position)

typedef enum fa_fault_kind {
#define FA_ENUM(name) FA_FAULT_##name,
    FA_FAULTS(FA_ENUM)
#undef FA_ENUM
        FA_FAULT_COUNT
} fa_fault_kind;

/* How many of a kind, and the first: its sequence, where in the array it stands, and what it is. For lengths and starts
 * `index` is 0 for the array of q and 1 for that of k; for pages the column of the table; else the row of k. */
typedef struct fa_fault {
    int64_t count;
    int64_t sequence, index, value;
} fa_fault;

typedef struct fa_faults {
    fa_fault of[FA_FAULT_COUNT];
} fa_faults;

const char *fa_fault_name(fa_fault_kind kind);

static inline void fa_fault_add(fa_faults *faults, fa_fault_kind kind, int64_t sequence, int64_t index, int64_t value) {
    fa_fault *fault = &faults->of[kind];
    if (fault->count++) return;
    fault->sequence = sequence, fault->index = index, fault->value = value;
}

/* Adds what is bad in the lengths and starts of sequence b, whose rows fa_rows_of() has; `index` as in fa_fault. */
void fa_length_faults(const fa_lengths *lengths, int64_t b, fa_span rows, int64_t index, fa_faults *faults);

/* Adds what is bad in a forward problem on the CPU. Reads lengths, starts, and the entries of the table for keys that
 * somebody may see. */
void fa_forward_faults(const fa_problem *problem, fa_faults *faults);

/* A ValueError for the first kind that was met; FA_OK when there is none. */
fa_code fa_faults_check(const fa_faults *faults, fa_status *status);

#endif
