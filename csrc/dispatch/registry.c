/* The kernel table. See registry.h. */
#include "dispatch/registry.h"

#include <stdio.h>
#include <string.h>

#include "device/device.h"
#include "device/library.h"
#include "device/threads.h"
#include "dispatch/why.h"
#include "faults/faults.h"
#include "faults/index_arrays.h"

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)
#define FA_KERNEL_0(kernel)
#define FA_KERNEL(op, name) FA_JOIN(FA_KERNEL_, FA_JOIN(FA_HAVE_, name))(fa_kernel_##name)

#define FA_KERNEL_1(kernel) extern const fa_kernel kernel;
#include "kernels.def"
#undef FA_KERNEL_1

#define FA_KERNEL_1(kernel) &kernel,
static const fa_kernel *const kernels[] = {
#include "kernels.def"
    NULL,
};

static fa_code open_library(fa_context *context, fa_library_name library, void **handle, fa_status *status) {
    return fa_library_open(fa_context_libraries(context), library, handle, status);
}

static const fa_host host = {
    .fail = fa_fail,
    .slot = fa_context_slot,
    .lock = fa_context_lock,
    .unlock = fa_context_unlock,
    .open_library = open_library,
    .loop = fa_cpu_loop,
};

const fa_kernel *fa_kernel_at(int index) { return kernels[index]; }

const fa_kernel *fa_kernel_find(fa_op op, const char *name) {
    for (int n = 0; kernels[n]; n++)
        if (kernels[n]->op == op && strcmp(kernels[n]->name, name) == 0) return kernels[n];
    return NULL;
}

static fa_dtype dtype_of(const fa_problem *problem) {
    if (problem->op == FA_MERGE) return problem->merge.dtype;
    if (problem->op == FA_DOCUMENTS) return problem->documents.dtype;
    return problem->op == FA_APPEND ? problem->append.dtype : problem->forward.dtype;
}

/* The answer to one batch entry by itself, of a kernel that takes or declines a batch_invariant call: kernels differ in
 * their bits, so the number of entries must not choose among them. */
static fa_answer answer_of_one(const fa_kernel *kernel, const fa_problem *problem, const fa_device_info *device,
                               fa_answer answer, fa_why *why) {
    const bool batched = problem->op == FA_FORWARD || problem->op == FA_BACKWARD;
    if (!problem->batch_invariant || !batched || problem->features & FA_WITH_LENGTHS || problem->forward.batch < 2)
        return answer;
    fa_problem one = *problem;
    one.forward.batch = 1;
    fa_plan plan = {.kernel = kernel};
    fa_why alone;
    fa_because(&alone, FA_TAKES, FA_WHY_NONE, 0, 0, 0);
    const fa_answer said = kernel->plan(&one, device, &plan, &alone);
    if (said != FA_TAKES && said != FA_DECLINES) return answer;
    *why = alone;
    return said;
}

fa_answer fa_kernel_ask(const fa_kernel *kernel, const fa_problem *problem, const fa_device_info *device, fa_plan *plan,
                        fa_why *why) {
    const fa_dtype dtype = dtype_of(problem);
    if (kernel->device != problem->device.kind)
        return fa_because(why, FA_REFUSES, FA_WHY_DEVICE, kernel->device, problem->device.kind, 0);
    if (!(kernel->dtypes >> dtype & 1)) return fa_because(why, FA_REFUSES, FA_WHY_DTYPE, kernel->dtypes, dtype, 0);
    if (problem->features & ~kernel->takes)
        return fa_because(why, FA_REFUSES, FA_WHY_FEATURES, problem->features & ~kernel->takes, 0, 0);
    if (device->cc < kernel->cc_from || (kernel->cc_to && device->cc > kernel->cc_to))
        return fa_because(why, FA_NOT_HERE, FA_WHY_CAPABILITY, kernel->cc_from, kernel->cc_to, device->cc);
    memset(plan, 0, sizeof *plan);
    plan->kernel = kernel;
    fa_because(why, FA_TAKES, FA_WHY_NONE, 0, 0, 0);
    const fa_answer answer = kernel->plan(problem, device, plan, why);
    return answer == FA_TAKES || answer == FA_DECLINES ? answer_of_one(kernel, problem, device, answer, why) : answer;
}

static bool is_candidate(const fa_kernel *kernel, const fa_problem *problem) {
    return kernel->op == problem->op && kernel->device == problem->device.kind;
}

static fa_code fail_because(const fa_why *why, const fa_device_info *device, fa_status *status) {
    char text[512];
    return fa_fail(status, FA_EVALUE, "%s", fa_why_text(why, device, text, sizeof text));
}

/* "no kernel takes this call: simt: needs ...; minimal: ..." */
static fa_code fail_unsupported(const fa_problem *problem, const fa_device_info *device, fa_status *status) {
    char reasons[1800] = "", text[512];
    size_t used = 0;
    fa_plan plan;
    fa_why why;
    for (int n = 0; kernels[n] && used < sizeof reasons; n++) {
        if (!is_candidate(kernels[n], problem)) continue;
        fa_kernel_ask(kernels[n], problem, device, &plan, &why);
        used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "", kernels[n]->name,
                                 fa_why_text(&why, device, text, sizeof text));
    }
    if (!used)
        return fa_fail(status, FA_EUNSUPPORTED, "this build has no kernel for arrays on %s",
                       problem->device.kind == FA_CPU ? "the CPU" : "a CUDA device (it was built without CUDA)");
    return fa_fail(status, FA_EUNSUPPORTED, "no kernel takes this call: %s", reasons);
}

static fa_code force(const fa_kernel *kernel, const fa_problem *problem, const fa_device_info *device, fa_plan *plan,
                     fa_status *status) {
    char text[512];
    fa_why why;
    const fa_answer answer = fa_kernel_ask(kernel, problem, device, plan, &why);
    if (answer == FA_TAKES || answer == FA_DECLINES) return FA_OK;
    if (answer == FA_FAILS) return fail_because(&why, device, status);
    return fa_fail(status, FA_EUNSUPPORTED, "kernel \"%s\" cannot take this call: %s", kernel->name,
                   fa_why_text(&why, device, text, sizeof text));
}

fa_code fa_plan_make(const fa_problem *problem, const fa_device_info *device, const fa_kernel *forced, fa_plan *plan,
                     fa_status *status) {
    if (forced) return force(forced, problem, device, plan, status);
    const fa_kernel *declined = NULL; /* the first: it beats none */
    for (int n = 0; kernels[n]; n++) {
        if (!is_candidate(kernels[n], problem)) continue;
        fa_why why;
        const fa_answer answer = fa_kernel_ask(kernels[n], problem, device, plan, &why);
        if (answer == FA_TAKES) return FA_OK;
        if (answer == FA_FAILS) return fail_because(&why, device, status);
        if (answer == FA_DECLINES && !declined) declined = kernels[n];
    }
    return declined ? force(declined, problem, device, plan, status) : fail_unsupported(problem, device, status);
}

fa_code fa_plan_launch(const fa_problem *problem, const fa_plan *plan, fa_context *context,
                       const fa_device_info *device, void *stream, void *workspace, fa_status *status) {
    if (problem->empty) return FA_OK;
    const fa_launch launch = {
        .host = &host,
        .context = context,
        .device = device,
        .workspace = workspace,
        .stream = stream,
        .encode_tensor_map = fa_device_tensor_maps(context, problem->device),
        .status = status,
    };
    if (plan->kernel->device == FA_CPU || !fa_contents_given(problem))
        return plan->kernel->launch(problem, plan, &launch);
    fa_problem counted = *problem;
    FA_TRY(fa_fault_board_get(context, problem->device, &counted.faults, status));
    return plan->kernel->launch(&counted, plan, &launch);
}

fa_code fa_plan_run(const fa_problem *problem, const fa_plan *plan, fa_context *context, const fa_device_info *device,
                    void *stream, fa_status *status) {
    void *workspace = plan->workspace_bytes ? problem->workspace : NULL;
    const bool allocates = plan->workspace_bytes && !workspace && !problem->empty;
    if (allocates) FA_TRY(fa_memory_alloc(context, device->device, plan->workspace_bytes, stream, &workspace, status));
    fa_code code = fa_plan_launch(problem, plan, context, device, stream, workspace, status);
    if (allocates) {
        fa_status ignored;
        fa_code freed = fa_memory_free(device->device, workspace, stream, code == FA_OK ? status : &ignored);
        if (code == FA_OK) code = freed;
    }
    return code;
}
