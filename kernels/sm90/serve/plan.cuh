/* serve_sm90: the plan of a launch, as the host's file makes it and instances read it. */
#pragma once
#include "common/launch.cuh"
#include "sm90/serve/config.cuh"

namespace fa::sm90::serve {

/* The plan's own part. */
struct Own {
    int instance; // of kForms
    int64_t jobs, tiles_m;
    int64_t at_once;       // jobs of a launch
    int parts, fold_parts; // blocks of a job
    int slots, pairs;      // of states in workspace, at most
    int64_t job_bytes;     // of them
    bool clustered;        // the parts of a job
    bool brief;            // a job a warp
    bool by_number;        // see Params
    bool thin;             // jobs may be
    // Of a list:
    int blocks, shared_jobs; // that work; jobs that blocks may share
    int64_t own_bytes;       // of states of a block's own job, behind those of shared ones

    int64_t own_at() const { return shared_jobs * job_bytes; }
    int64_t arrivals_at() const { return own_at() + blocks * own_bytes; }
};

/* How the rows of a call become jobs: tiles of a sequence; of packed queries all rows of a sequence, which has up to
 * sequence_rows() a kv head, by its number; those of such sequences as prefill_list_kernel lists them. */
enum class Jobs { tiles, by_number, listed };

/* For packed_sm90. */
fa_answer plan_call(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, Jobs jobs, fa_why *why);
int columns_of(const Own &own);
fa_code launch_call(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch);
fa_code launch_listed(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, void *list, bool alone,
                      bool first);

using Launch = fa_code(const Params &, const Own &, const fa_launch &);

} // namespace fa::sm90::serve
