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
    bool by_class, alone;  // see Params
};

/* For packed_sm90: the plan of those sequences of a packed call that have up to sequence_rows() rows a kv head;
 * `alone`: it has no others. */
fa_answer plan_by_class(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, bool alone,
                        fa_why *why);
fa_code launch_call(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch);

using Launch = fa_code(const Params &, const Own &, const fa_launch &);

} // namespace fa::sm90::serve
