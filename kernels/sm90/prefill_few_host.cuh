/* prefill_sm90, on the host: which calls may have sequences of few rows, the room that these get, their launch. */
#pragma once
#include <algorithm> // std::max, std::min

#include "common/launch.cuh"
#include "sm90/prefill_few_config.cuh"
#include "sm90/serve_boxes.cuh"

namespace fa::sm90::prefill {

/* Rows that a sequence of few has at most, 0 where the shapes say that no sequence has so few. Of a dense call none is:
 * it promises no bits. */
inline int few_rows(const fa_problem *problem) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int64_t group = p.heads_kv > 0 ? p.heads / p.heads_kv : 1, most = few_rows_at_most(few_columns(p.head_dim));
    const bool known = !s.q.starts && !s.q.used; // how many queries each has
    const int64_t least = known && !s.packed_q ? p.seq_q : 1;
    return s.given && p.heads_kv > 0 && least * group <= most ? static_cast<int>(most) : 0;
}

/* What is planned of them, without a place. */
inline Few plan_few(const fa_problem *problem, int64_t sms, int64_t limit) {
    constexpr int64_t kMostSlots = 16384, kShort = kGroup * kChunkKeys; // keys of one group, at least
    const fa_forward &p = problem->forward;
    Few few = {};
    few.rows = few_rows(problem);
    if (few.rows == 0) return few;
    const int columns = few_columns(p.head_dim);
    few.batch = p.batch;
    few.state_bytes = few_state_bytes(columns);
    few.blocks = static_cast<int>(sms), few.warps = few_warps(columns);
    if (p.seq_k <= kShort) return few;
    const int64_t queries = problem->sequences.packed_q ? p.seq_q : p.seq_q * p.batch;
    const int64_t groups = std::min<int64_t>((p.seq_k + kShort - 1) / kShort + 1, kMaxChunks / kGroup + 1);
    const int64_t states = groups * kGroup * (few.rows / 8); // of a job, at most
    few.slots =
        static_cast<int>(std::min(kMostSlots, std::max<int64_t>(std::min(p.batch, queries), 1) * p.heads_kv * states));
    while (few.slots > 1 && few_bytes(few) > limit) few.slots /= 2;
    return few;
}

using FewLaunch = fa_code(const FewParams &, const fa_launch &);

/* `call` is whole. */
inline fa_code launch_few(const fa_problem *problem, const Call &call, FewLaunch *start, const fa_launch &launch) {
    const fa_forward &p = problem->forward;
    FewParams params = {
        .serve =
            {
                .call = {p, call.s, problem->extra, problem->faults},
                .score = score_params(p),
                .heads_kv = Divider::of(p.heads_kv),
                .group = Divider::of(call.group),
                .page = Divider::of(std::max<int64_t>(1, std::min<int64_t>(call.s.pages.size, INT32_MAX))),
            },
        .call = call,
    };
    FA_TRY(serve::encode_boxes(params.serve, launch));
    return start(params, launch);
}

} // namespace fa::sm90::prefill
