/* packed_sm90: attention of packed queries on Hopper, by the kernels of serve_sm90 and prefill_sm90.
 *
 * A sequence is serve_sm90's if its queries and the heads of a kv head make few rows (common/few_rows.cuh), else
 * prefill_sm90's: by its own length alone, so that its bits are its own. Which kernels are launched follows from shapes
 * and from max_seqlen_q, and changes no bit. Where no sequence can have more rows, since all queries together have no
 * more or the caller's promise says so, in small batches:
 *
 *   serve_sm90_kernel      takes sequences by their number
 *   serve_fold_kernel      where blocks share a job
 *
 * and otherwise
 *
 *   prefill_list_kernel    reads lengths and lists the sequences of both
 *   prefill_sm90_kernel    where a sequence can have more rows; waits for the list, and then releases
 *   serve_listed_kernel    starts behind that release, so behind the list, and runs beside; its first block ends last
 *
 * where there are few queries a sequence serve_listed_kernel comes before prefill_sm90_kernel, and each waits for the
 * one before: as a rule the latter finds nothing then.
 *
 * @arch sm_90a
 * @beside ../serve/serve_sm90.cu ../prefill/prefill_sm90.cu
 */
#include <algorithm> // std::max, std::min

#include "common/launch.cuh"
#include "sm90/prefill/launch.cuh"
#include "sm90/serve/plan.cuh"

namespace fa::sm90::packed {

/* The plan's own part; that of prefill_sm90 comes first, where its launch looks for it. */
struct Own {
    prefill::Own tiles;
    serve::Own few;
    int64_t tiles_bytes; // of workspace, before that of serve_sm90
    bool by_number;      // serve_sm90's kernels find their sequences so, and there are no others; else by a list
    bool alone;          // serve_sm90's kernels have all sequences
};

static fa_answer packed_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    constexpr int64_t kByNumber = 128; // sequences: a block reads the starts up to its own
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int64_t group = p.heads_kv > 0 ? p.heads / p.heads_kv : 1, rows = sequence_rows(p.head_dim);
    if (!s.q.starts || group > rows) return fa_because(why, FA_REFUSES, FA_WHY_PACKED_QUERIES, rows, 0, 0);
    const int64_t queries = rows / group;
    const bool promised = s.most_q <= queries;                  // so that no sequence is prefill_sm90's
    const bool beyond = p.alibi.data || p.out_dtype != p.dtype; // what prefill_sm90 takes
    if (beyond && !promised) return fa_because(why, FA_REFUSES, FA_WHY_PROMISE, rows, 0, 0);

    Own own = {};
    own.alone = p.batch > 0 && std::min(p.seq_q, s.most_q) <= queries;
    own.by_number = (own.alone && p.batch <= kByNumber) || beyond;
    fa_plan tiles = *plan, few = *plan;
    fa_device_info left = *device, half = *device; // of the workspace
    half.workspace_limit /= 2;
    if (!beyond) { // asked even where it is not needed: no kernel is chosen by the number of tokens
        const fa_answer answer = prefill::plan_call(problem, &half, &tiles, why);
        if (answer != FA_TAKES) return answer;
    }
    if (own.by_number) {
        const fa_answer answer = serve::plan_call(problem, device, &few, serve::Jobs::by_number, why);
        if (answer != FA_TAKES && beyond) return answer;
        // A list does with less workspace, and is faster than several launches, one after the other.
        const serve::Own &found = fa_own<serve::Own>(&few);
        own.by_number = beyond || (answer == FA_TAKES && found.at_once == found.jobs);
    }
    if (!own.by_number) {
        own.tiles = fa_own<prefill::Own>(&tiles);
        own.tiles_bytes = (static_cast<int64_t>(tiles.workspace_bytes) + 255) / 256 * 256;
        left.workspace_limit -= std::min(left.workspace_limit, static_cast<size_t>(own.tiles_bytes));
        few = *plan;
        const fa_answer answer = serve::plan_call(problem, &left, &few, serve::Jobs::listed, why);
        if (answer != FA_TAKES) return answer;
    }
    own.few = fa_own<serve::Own>(&few);
    if (own.by_number) {
        *plan = few;
    } else {
        *plan = own.alone ? few : tiles;
        plan->workspace_bytes = own.tiles_bytes + few.workspace_bytes;
    }
    fa_own<Own>(plan) = own;
    return FA_TAKES;
}

static fa_code packed_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const Own &own = fa_own<Own>(plan);
    fa_plan few = *plan;
    fa_own<serve::Own>(&few) = own.few;
    if (own.by_number) return serve::launch_call(problem, &few, launch);
    fa_launch behind = *launch;
    behind.workspace = static_cast<char *>(launch->workspace) + own.tiles_bytes;
    const FewRows rows = {sequence_rows(problem->forward.head_dim),
                          serve::columns_of(own.few),
                          own.few.blocks,
                          own.few.shared_jobs,
                          own.alone,
                          reinterpret_cast<uint32_t *>(static_cast<char *>(behind.workspace) + own.few.arrivals_at())};
    constexpr int64_t kFewQueries = 4; // a sequence
    const bool first = problem->forward.seq_q <= kFewQueries * problem->forward.batch;
    FA_TRY(prefill::launch_list(problem, plan, launch, rows));
    if (!own.alone && !first) FA_TRY(prefill::launch_tiles(problem, plan, launch, rows));
    FA_TRY(serve::launch_listed(problem, &few, &behind, launch->workspace, own.alone, first));
    return own.alone || !first ? FA_OK : prefill::launch_tiles(problem, plan, launch, rows);
}

} // namespace fa::sm90::packed

FA_DEFINE_KERNEL(packed_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "packed_sm90",
    .summary =
        "Hopper, packed queries: each sequence by serve_sm90's kernels or by prefill_sm90's, as its own length says",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_ALIBI | FA_WITH_LENGTHS | FA_WITH_PAGES |
             FA_WITH_RANGES | FA_WITH_POSITIONS | FA_WITH_OUT_FLOAT32,
    .plan = fa::sm90::packed::packed_plan,
    .launch = fa::sm90::packed::packed_launch,
};
