/* The table of operands. See operands.h. */
#include "problem/operands.h"

#include "problem/check.h"

#define FLOATS                 "float16, bfloat16 (ml_dtypes), float32, and float64 on the CPU"
#define GRADIENT(number, name) FA_GRAD_##number
#define NO_GRADIENT            FA_GRAD_COUNT

const fa_operand_line fa_operands[FA_OPERAND_COUNT] = {
#define FA_OPERAND(name, words, role, forward, backward, merge, append, gradient, feature, dtypes, axes)               \
    {#name,                                                                                                            \
     words,                                                                                                            \
     dtypes,                                                                                                           \
     axes,                                                                                                             \
     FA_ROLE_##role,                                                                                                   \
     {[FA_FORWARD] = FA_USE_##forward,                                                                                 \
      [FA_BACKWARD] = FA_USE_##backward,                                                                               \
      [FA_MERGE] = FA_USE_##merge,                                                                                     \
      [FA_APPEND] = FA_USE_##append},                                                                                  \
     gradient},
#include "operands.def"
#undef FA_OPERAND
};

_Static_assert(offsetof(fa_request, options) == FA_OPERAND_COUNT * sizeof(fa_view *),
               "a request begins with its operands");

fa_code fa_check_apart(fa_op op, const char *name, const fa_view *view, const fa_request *request,
                       const fa_view *itself, fa_status *status) {
    for (int n = 0; n < FA_OPERAND_COUNT; n++) {
        const fa_view *read = fa_request_view(request, (fa_operand_number)n);
        if (read && read != itself && fa_operand_is_read((fa_operand_number)n, op))
            FA_TRY(fa_check_disjoint(name, view, fa_operands[n].words, read, status));
    }
    return FA_OK;
}

bool fa_request_has(const fa_request *request, fa_role role) {
    for (int n = 0; n < FA_OPERAND_COUNT; n++)
        if (fa_operands[n].role == role && fa_request_view(request, (fa_operand_number)n)) return true;
    return false;
}
