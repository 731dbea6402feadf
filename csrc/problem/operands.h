/* The lines of operands.def as a table, and the arrays of a request by it. */
#ifndef FA_PROBLEM_OPERANDS_H
#define FA_PROBLEM_OPERANDS_H

#include "fa.h"

typedef enum fa_role { FA_ROLE_DATA, FA_ROLE_OPTION, FA_ROLE_STATE, FA_ROLE_INDEX, FA_ROLE_MEMORY } fa_role;

/* The use that an operation makes of an operand. */
typedef enum fa_use { FA_USE_NO, FA_USE_IN, FA_USE_IN_OPT, FA_USE_OUT, FA_USE_OUT_OPT } fa_use;

typedef struct fa_operand_line {
    const char *name, *words, *dtypes, *axes;
    fa_role role;
    fa_use use[FA_OP_COUNT];
    fa_grad grad; /* FA_GRAD_COUNT: none */
} fa_operand_line;

extern const fa_operand_line fa_operands[FA_OPERAND_COUNT];

/* Where a request has an operand. */
static inline const fa_view **fa_request_place(fa_request *request, fa_operand_number operand) {
    return (const fa_view **)((char *)request + (size_t)operand * sizeof(fa_view *));
}

/* An operand of a request; NULL when absent. */
static inline const fa_view *fa_request_view(const fa_request *request, fa_operand_number operand) {
    return *(const fa_view *const *)((const char *)request + (size_t)operand * sizeof(fa_view *));
}

static inline bool fa_operand_is_read(fa_operand_number operand, fa_op op) {
    return fa_operands[operand].use[op] == FA_USE_IN || fa_operands[operand].use[op] == FA_USE_IN_OPT;
}

/* Refuses memory that is written and meets an array that the operation reads. `itself`: an array that it may be in
 * place, or NULL. */
fa_code fa_check_apart(fa_op op, const char *name, const fa_view *view, const fa_request *request,
                       const fa_view *itself, fa_status *status);

/* Whether a request has an array of a role. */
bool fa_request_has(const fa_request *request, fa_role role);

#endif
