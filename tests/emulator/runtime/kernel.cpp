/* The emulated kernel as a kernel of the table: one for arrays of the CPU, whose plan is asked for the device that
 * FA_EMULATED_... describe and whose launches the emulator runs. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include "fa.h"
#include "faults/faults.h"

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)
#define FA_PUBLIC      FA_JOIN(fa_kernel_, FA_EMULATED_NAME)
#define FA_INNER       FA_JOIN(fa_emulated_, FA_EMULATED_NAME)

extern "C" const fa_kernel FA_INNER;

namespace emu {
CUresult encode_tensor_map(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
}

/* The faults that the device would count in mapped memory. */
extern "C" FA_EXPORT fa_fault_board emulated_faults;
fa_fault_board emulated_faults = {.epoch = 1};

static fa_device_info emulated(const fa_device_info *host) {
    fa_device_info info = *host;
    const char *sms = getenv("FA_EMULATOR_SMS");
    info.device = {FA_CUDA, 0};
    strcpy(info.name, "emulated device");
    info.cc = FA_EMULATED_CC;
    info.sm_count = sms ? atoi(sms) : FA_EMULATED_SM_COUNT;
    info.smem_per_block = FA_EMULATED_SMEM_PER_BLOCK;
    info.smem_per_sm = FA_EMULATED_SMEM_PER_SM;
    info.l2_bytes = FA_EMULATED_L2_BYTES;
    info.tensor_maps = FA_EMULATED_TENSOR_MAPS;
    return info;
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *host, fa_plan *plan, fa_why *why) {
    const fa_device_info info = emulated(host);
    fa_problem on_device = *problem;
    on_device.device = info.device;
    const fa_answer answer = FA_INNER.plan(&on_device, &info, plan, why);
    plan->keep = false; // the environment may change
    return answer;
}

/* Moves the words of dropout to a state, where the kernel reads them; with "0" that has 0 for heads. */
static void give_state(fa_dropout *dropout, uint32_t words[8]) {
    const uint32_t poison = 0xdeadbeef, heads = getenv("FA_EMULATOR_STATE")[0] == '0' ? 0 : dropout->heads;
    if (!dropout->threshold) return;
    words[0] = dropout->seed[0], words[1] = dropout->seed[1], words[2] = dropout->offset;
    for (int n = 0; n < 4; ++n) words[3 + n] = dropout->origin[n], dropout->origin[n] = poison;
    words[7] = heads;
    dropout->seed[0] = dropout->seed[1] = dropout->offset = poison;
    if (heads) dropout->heads = poison;
    dropout->state = words;
}

/* The workspace is filled with NaN, and nothing of it lies beside what the plan asked for. */
static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_device_info info = emulated(launch->device);
    fa_problem on_device = *problem;
    on_device.device = info.device;
    on_device.faults = &emulated_faults;
    uint32_t words[8];
    if (getenv("FA_EMULATOR_STATE")) give_state(&on_device.forward.dropout, words);
    fa_launch here = *launch;
    here.device = &info;
    here.encode_tensor_map = reinterpret_cast<void *>(&emu::encode_tensor_map);
    if (plan->workspace_bytes) memset(here.workspace, 0xff, plan->workspace_bytes);
    launch->status->message[0] = 0;
    const fa_code code = FA_INNER.launch(&on_device, plan, &here);
    if (code == FA_EUNSUPPORTED && !launch->status->message[0])
        return launch->host->fail(launch->status, code, "this build of the emulated kernel lacks the instance");
    return code;
}

extern "C" FA_EXPORT const fa_kernel FA_PUBLIC;
const fa_kernel FA_PUBLIC = {
    .abi = FA_KERNEL_ABI,
    .op = FA_INNER.op,
    .device = FA_CPU,
    .name = FA_INNER.name,
    .summary = "an emulated CUDA kernel",
    .cc_from = 0,
    .cc_to = 0,
    .dtypes = FA_INNER.dtypes,
    .takes = FA_INNER.takes,
    .plan = plan,
    .launch = launch,
};
