/* Request -> problem and plan. See plan_cache.h.
 *
 * Calls come in loops that differ in their pointers alone, so each thread keeps the last calls of each operation: the
 * request, and the problem and plan that it became. A call that is the same in all that validation, choice and plan
 * look at takes both over and sets its own pointers. Compared are the options, as bytes; the forced kernel; of each
 * array shape, strides, dtype, device, writability, whether it has memory and how that is aligned; and whether what is
 * written meets another array. What index arrays hold is no part of it: kernels read it when they run, and check=
 * before each launch. A state of dropout on the host is read by validation, so that such a call is never kept. Plans
 * that do not ask to be kept, such as those that depend on the threads of the moment, are made anew. */
#include "dispatch/plan_cache.h"

#include <string.h>

#include "device/threads.h"
#include "dispatch/registry.h"
#include "problem/check.h"
#include "problem/forward.h"
#include "problem/operands.h"

enum {
    KEPT_CALLS = 2 /* layers alternate */,
    MAX_AXES = 5 /* of intervals */,
    ARRAYS = FA_OPERAND_COUNT + FA_GRAD_COUNT
};

/* Inlined once for each operation, whose tables are then constants: that takes 30 ns off a call. */
#define ALWAYS_INLINE        static inline __attribute__((always_inline))

/* Kernels look at the alignment of a pointer up to this many bytes. */
#define ALIGNMENT            256

/* Where a problem has the data of an operand: an offset by operand. A call with one that has no place here is not kept;
 * its workspace, which is held against the plan later, is no part of it. */
#define DATA(operand, where) [FA_OPERAND_##operand] = offsetof(fa_problem, where)
#define DATA_OF_INPUTS(of)                                                                                             \
    DATA(q, of.q.data), DATA(k, of.k.data), DATA(v, of.v.data), DATA(out, of.out.data), DATA(bias, of.bias.data),      \
        DATA(mask, of.mask.data), DATA(sinks, of.sinks.data), DATA(alibi, of.alibi.data),                              \
        DATA(dropout_state, of.dropout.state), DATA(intervals, of.intervals.data),                                     \
        DATA(q_segments, of.q_segments.data), DATA(k_segments, of.k_segments.data)

typedef unsigned short offset;

static const offset forward_data[FA_OPERAND_COUNT] = {
    DATA_OF_INPUTS(forward),
    DATA(lse, forward.lse.data),
    DATA(max_logit, forward.max_logit.data),
    DATA(cu_seqlens_q, sequences.q.starts),
    DATA(seqlens_q, sequences.q.used),
    DATA(cu_seqlens_k, sequences.k.starts),
    DATA(seqlens_k, sequences.k.used),
    DATA(page_table, sequences.pages.table),
    DATA(k_range_begin, sequences.begin),
    DATA(k_range_end, sequences.end),
    DATA(positions, sequences.positions),
};

static const offset backward_data[FA_OPERAND_COUNT] = {
    DATA_OF_INPUTS(backward.forward),       DATA(lse, backward.lse.data),
    DATA(dout, backward.dout.data),         DATA(dlse, backward.dlse.data),
    DATA(cu_seqlens_q, sequences.q.starts), DATA(seqlens_q, sequences.q.used),
    DATA(cu_seqlens_k, sequences.k.starts), DATA(seqlens_k, sequences.k.used),
    DATA(k_range_begin, sequences.begin),   DATA(k_range_end, sequences.end),
    DATA(positions, sequences.positions),
};

static const offset append_data[FA_OPERAND_COUNT] = {
    DATA(k_cache, append.k_cache.data),
    DATA(v_cache, append.v_cache.data),
    DATA(k, append.k.data),
    DATA(v, append.v.data),
    DATA(q, append.q.data),
    DATA(out, append.out.data),
    DATA(rotary_cos, append.cos.data),
    DATA(rotary_sin, append.sin.data),
    DATA(slots, append.slots.data),
    DATA(cu_seqlens_q, sequences.q.starts),
    DATA(seqlens_q, sequences.q.used),
    DATA(seqlens_k, sequences.k.used),
    DATA(page_table, sequences.pages.table),
    DATA(positions, sequences.positions),
};

/* A bit for each array: the operands of a request, then given gradients. */
typedef uint64_t arrays;
_Static_assert(ARRAYS <= 64, "a bit each");
#define BIT(n)  (UINT64_C(1) << (n))

/* The operands that an operation writes. */
#define NO      UINT64_C(0)
#define IN      UINT64_C(0)
#define IN_OPT  UINT64_C(0)
#define OUT     UINT64_C(1)
#define OUT_OPT UINT64_C(1)
static const arrays forward_writes =
#define FA_OPERAND(name, words, role, forward, backward, merge, append, ...) forward << FA_OPERAND_##name |
#include "operands.def"
#undef FA_OPERAND
    0;
static const arrays append_writes =
#define FA_OPERAND(name, words, role, forward, backward, merge, append, ...) append << FA_OPERAND_##name |
#include "operands.def"
#undef FA_OPERAND
    0;
static const arrays backward_writes = (BIT(FA_GRAD_COUNT) - 1) << FA_OPERAND_COUNT;
#undef NO
#undef IN
#undef IN_OPT
#undef OUT
#undef OUT_OPT

typedef struct operation {
    fa_op op;
    const offset *data;
    arrays writes;
    size_t bytes; /* of a problem, up to the end of the operation's own part */
    fa_code (*build)(const fa_request *request, fa_problem *problem, fa_status *status);
} operation;

/* The fields of every operation in a problem, behind the largest own part. */
#define SHARED_BEGIN (offsetof(fa_problem, backward) + sizeof(fa_backward))
_Static_assert(sizeof(fa_append) <= sizeof(fa_backward), "an own part ends before what is shared");

/* An array of a kept call. */
typedef struct array {
    const void *data;
    int64_t low, high; /* bytes from `data` on that it covers; equal when it is empty */
    int64_t shape[MAX_AXES], strides[MAX_AXES];
    fa_device device;
    fa_dtype dtype;
    int ndim;
    bool readonly;
} array;

typedef struct call {
    unsigned long serial; /* 0: none */
    const fa_kernel *forced;
    fa_options options;
    uint64_t more;
    arrays given;
    array of[ARRAYS]; /* the given ones */
    fa_problem problem;
    const fa_device_info *info;
    fa_plan plan;
} call;

/* The last calls of an operation. */
typedef struct calls {
    call of[KEPT_CALLS];
    int latest;
} calls;

static _Thread_local calls recent[FA_OP_COUNT];

/* A request of any operation. */
typedef struct question {
    const operation *of;
    const fa_request *request;
    const fa_view *const *gradients; /* FA_GRAD_COUNT of them; NULL: none */
    const fa_kernel *forced;
    unsigned long serial; /* of the context */
    uint64_t more;        /* options that the operation has beside those of fa_request */
    arrays given;
} question;

static inline const fa_view *view_at(const question *asked, int n) {
    return n < FA_OPERAND_COUNT ? fa_request_view(asked->request, (fa_operand_number)n)
                                : asked->gradients[n - FA_OPERAND_COUNT];
}

ALWAYS_INLINE arrays given_arrays(const question *asked) {
    arrays given = 0;
    for (int n = 0; n < FA_OPERAND_COUNT; n++)
        given |= (arrays)(fa_request_view(asked->request, (fa_operand_number)n) != NULL) << n;
    for (int n = 0; asked->gradients && n < FA_GRAD_COUNT; n++)
        given |= (arrays)(asked->gradients[n] != NULL) << (FA_OPERAND_COUNT + n);
    return given & ~BIT(FA_OPERAND_workspace);
}

/* Where a problem has the data of array n; 0: nowhere. */
static inline size_t data_at(const operation *of, int n) {
    const size_t gradients = offsetof(fa_problem, backward.grad) + offsetof(fa_operand, data);
    return n < FA_OPERAND_COUNT ? of->data[n] : gradients + (size_t)(n - FA_OPERAND_COUNT) * sizeof(fa_operand);
}

static inline int first_of(arrays some) { return __builtin_ctzll(some); }

static inline bool is_like(const fa_view *view, const array *kept) {
    if (view->ndim != kept->ndim || view->dtype != kept->dtype || view->device.kind != kept->device.kind ||
        view->device.id != kept->device.id || view->readonly != kept->readonly || !view->data != !kept->data)
        return false;
    uint64_t differ = ((uintptr_t)view->data ^ (uintptr_t)kept->data) % ALIGNMENT;
    for (int axis = 0; axis < kept->ndim; axis++)
        differ |=
            (uint64_t)(view->shape[axis] ^ kept->shape[axis]) | (uint64_t)(view->strides[axis] ^ kept->strides[axis]);
    return differ == 0;
}

/* Addresses that an array covers; empty ones meet nothing. */
typedef struct range {
    uintptr_t begin, end;
} range;

static inline range range_of(const fa_view *view, const array *kept) {
    const uintptr_t at = (uintptr_t)view->data;
    return kept->low == kept->high ? (range){UINTPTR_MAX, 0}
                                   : (range){at + (uintptr_t)kept->low, at + (uintptr_t)kept->high};
}

/* Whether two arrays lie to each other as in the kept call, where validation took it that they meet. */
static bool lie_alike(const question *asked, const call *kept, int a, int b) {
    return (uintptr_t)view_at(asked, a)->data - (uintptr_t)view_at(asked, b)->data ==
           (uintptr_t)kept->of[a].data - (uintptr_t)kept->of[b].data;
}

ALWAYS_INLINE bool is_kept(const question *asked, const call *kept) {
    range ranges[ARRAYS];
    if (kept->serial != asked->serial || kept->forced != asked->forced || kept->given != asked->given ||
        kept->more != asked->more || memcmp(&kept->options, &asked->request->options, sizeof kept->options) != 0)
        return false;
    for (arrays left = asked->given; left; left &= left - 1) {
        const int n = first_of(left);
        const fa_view *view = view_at(asked, n);
        if (!is_like(view, &kept->of[n])) return false;
        ranges[n] = range_of(view, &kept->of[n]);
    }
    arrays others = asked->given;
    for (arrays written = asked->given & asked->of->writes; written; written &= written - 1) {
        const int n = first_of(written);
        others &= ~BIT(n);
        for (arrays left = others; left; left &= left - 1) {
            const int other = first_of(left);
            if (ranges[n].begin < ranges[other].end && ranges[other].begin < ranges[n].end &&
                !lie_alike(asked, kept, n, other))
                return false;
        }
    }
    return true;
}

ALWAYS_INLINE void copy_problem(const operation *of, fa_problem *to, const fa_problem *from) {
    memcpy(to, from, of->bytes);
    memcpy((char *)to + SHARED_BEGIN, (const char *)from + SHARED_BEGIN, sizeof *to - SHARED_BEGIN);
}

static bool may_be_kept(const question *asked) {
    const fa_view *state = asked->request->dropout_state;
    for (arrays left = asked->given; left; left &= left - 1)
        if (!data_at(asked->of, first_of(left))) return false;
    return !state || state->device.kind != FA_CPU;
}

static void keep(const question *asked, const fa_problem *problem, const fa_device_info *info, const fa_plan *plan) {
    calls *of = &recent[asked->of->op];
    call *kept = &of->of[of->latest = (of->latest + 1) % KEPT_CALLS];
    for (arrays left = asked->given; left; left &= left - 1) {
        const fa_view *view = view_at(asked, first_of(left));
        array *a = &kept->of[first_of(left)];
        a->data = view->data;
        a->device = view->device, a->dtype = view->dtype, a->ndim = view->ndim, a->readonly = view->readonly;
        memcpy(a->shape, view->shape, sizeof a->shape); /* validation has refused more axes */
        memcpy(a->strides, view->strides, sizeof a->strides);
        fa_view_range(view, &a->low, &a->high);
    }
    copy_problem(asked->of, &kept->problem, problem);
    kept->serial = asked->serial;
    kept->forced = asked->forced;
    kept->options = asked->request->options;
    kept->more = asked->more;
    kept->given = asked->given;
    kept->info = info;
    kept->plan = *plan;
}

/* A kept call with the pointers of another. */
ALWAYS_INLINE void take_over(const question *asked, const call *kept, fa_problem *problem) {
    copy_problem(asked->of, problem, &kept->problem);
    for (arrays left = asked->given; left; left &= left - 1) {
        const fa_view *view =
            view_at(asked, first_of(left)); /* NULL in an empty one: what validation put there stays */
        if (view->data) *(void **)((char *)problem + data_at(asked->of, first_of(left))) = view->data;
    }
}

ALWAYS_INLINE fa_code dispatch(fa_context *context, question *asked, fa_problem *problem, const fa_device_info **info,
                               fa_plan *plan, fa_status *status) {
    calls *of = &recent[asked->of->op];
    asked->serial = fa_context_serial(context);
    asked->given = given_arrays(asked);
    for (int n = 0; n < KEPT_CALLS; n++) {
        const int index = (of->latest + n) % KEPT_CALLS;
        const call *kept = &of->of[index];
        if (!is_kept(asked, kept)) continue;
        of->latest = index;
        take_over(asked, kept, problem);
        *info = kept->info;
        if (kept->plan.keep) {
            *plan = kept->plan;
            return FA_OK;
        }
        if (problem->device.kind == FA_CPU) problem->threads = fa_cpu_threads();
        return fa_plan_make(problem, *info, asked->forced, plan, status);
    }
    FA_TRY(asked->of->build(asked->request, problem, status));
    FA_TRY(fa_device_info_get(context, problem->device, info, status));
    FA_TRY(fa_plan_make(problem, *info, asked->forced, plan, status));
    if (may_be_kept(asked)) keep(asked, problem, *info, plan);
    return FA_OK;
}

#define BYTES(name) (offsetof(fa_problem, name) + sizeof(fa_##name))

fa_code fa_dispatch(fa_context *context, const fa_request *request, const fa_kernel *forced, fa_problem *problem,
                    const fa_device_info **info, fa_plan *plan, fa_status *status) {
    static const operation of = {FA_FORWARD, forward_data, forward_writes, BYTES(forward), fa_forward_build};
    question asked = {.of = &of, .request = request, .forced = forced};
    return dispatch(context, &asked, problem, info, plan, status);
}

static fa_code build_backward(const fa_request *request, fa_problem *problem, fa_status *status) {
    return fa_backward_build((const fa_backward_request *)request, problem, status);
}

fa_code fa_dispatch_backward(fa_context *context, const fa_backward_request *request, const fa_kernel *forced,
                             fa_problem *problem, const fa_device_info **info, fa_plan *plan, fa_status *status) {
    static const operation of = {FA_BACKWARD, backward_data, backward_writes, BYTES(backward), build_backward};
    question asked = {.of = &of, .request = &request->forward, .gradients = request->grad, .forced = forced};
    asked.more = request->wants | (uint64_t)request->accumulate << 32 | (uint64_t)request->deterministic << 33;
    return dispatch(context, &asked, problem, info, plan, status);
}

static fa_code build_append(const fa_request *request, fa_problem *problem, fa_status *status) {
    return fa_append_build((const fa_append_request *)request, problem, status);
}

fa_code fa_dispatch_append(fa_context *context, const fa_append_request *request, const fa_kernel *forced,
                           fa_problem *problem, const fa_device_info **info, fa_plan *plan, fa_status *status) {
    static const operation of = {FA_APPEND, append_data, append_writes, BYTES(append), build_append};
    question asked = {.of = &of, .request = &request->forward, .forced = forced, .more = request->interleaved};
    return dispatch(context, &asked, problem, info, plan, status);
}
