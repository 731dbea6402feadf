/* prefill_sm90: how prefill_list_kernel lists sequences of few rows: in units of about equal keys, the longest first.
 */
#pragma once
#include "sm90/prefill_few_config.cuh"

namespace fa::sm90::prefill {

constexpr int kEnoughSlots = 1 << 20; // more than there are, and no sum of 1024 of them overflows
__device__ __forceinline__ int sum_slots(int a, int b) { return min(a + b, kEnoughSlots); }

/* Of a sequence's rows only lengths count, so that it is one of few in every batch. */
__device__ __forceinline__ bool is_few(const Call &call, const Record &r) {
    return r.seq_q > 0 && r.seq_q <= call.few.rows / call.group;
}

__device__ __forceinline__ int few_keys(const FewJob &job) { return max(job.sight.high - job.sight.low, 0); }

/* Keys of a unit at most, given those of all sequences and kv heads: half as many units as there are warps keep memory
 * busy, and a state a chunk costs more than that leaves to win. */
__device__ __forceinline__ int few_keys_of_unit(const Call &call, unsigned long long keys) {
    const unsigned long long warps = call.few.blocks * call.few.warps;
    return static_cast<int>(min(max(2 * keys / warps, static_cast<unsigned long long>(kChunkKeys)), 1ull << 30));
}

/* Cuts a sequence into units of at most `most` keys. What is short beside the share of a warp stays whole. */
__device__ __forceinline__ void cut_few(FewJob &job, int most) {
    job.cut = job.slots = 0;
    const int keys = few_keys(job), chunk = serve::kTileKeys << job.sight.shift;
    if (keys <= most / 4) return;
    job.cut = kGroup;
    while (job.cut > 1 && job.cut * chunk > most) job.cut /= 2;
    if (job.parts() <= 1)
        job.cut = 0;
    else
        job.slots = job.groups() * job.group_slots();
}

__device__ __forceinline__ int few_slots(const Call &call, const FewJob &job) {
    return job.slots * static_cast<int>(call.p.heads_kv) * job.eights(call.group);
}
/* The same before it is known what there is room for. */
__device__ __forceinline__ int few_slots_wanted(const Call &call, FewJob job, int most) {
    cut_few(job, most);
    return few_slots(call, job);
}
/* Cuts it and gives it slots from `slot` on, or leaves it whole where there is no room. Returns the next slot. */
__device__ __forceinline__ int place_few(const Call &call, FewJob &job, int most, int slot) {
    cut_few(job, most);
    job.of.slot = slot;
    slot = sum_slots(slot, few_slots(call, job));
    if (slot > call.few.slots) job.cut = job.slots = 0;
    return slot;
}

__device__ __forceinline__ int few_units(const Call &call, const FewJob &job) {
    return job.parts() * static_cast<int>(call.p.heads_kv);
}

/* Those of pairs first; by the keys of its units, the most first. */
__device__ __forceinline__ int few_class(const Call &call, const FewJob &job) {
    const int keys = job.cut ? job.cut * (serve::kTileKeys << job.sight.shift) : few_keys(job);
    return min(__clz(keys), kFewClasses / 2 - 1) + (job.eights(call.group) > 2 ? 0 : kFewClasses / 2);
}

/* From how much each class holds to where it begins; returns jobs and, in the low half, units. One warp. */
__device__ __forceinline__ unsigned long long begin_few(unsigned long long (&place)[kFewClasses]) {
    static_assert(kFewClasses == 64, "two a lane");
    const int lane = threadIdx.x;
    const unsigned long long first = place[2 * lane], mine = first + place[2 * lane + 1];
    unsigned long long all = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const unsigned long long other = __shfl_up_sync(~0u, all, by);
        if (lane >= by) all += other;
    }
    place[2 * lane] = all - mine, place[2 * lane + 1] = all - mine + first;
    __syncwarp();
    return __shfl_sync(~0u, all, 31);
}

/* The place of a job in the list, of all of whose fields but that is known. */
__device__ __forceinline__ void list_few(const Call &call, FewJob job, unsigned long long (&place)[kFewClasses]) {
    const int units = few_units(call, job);
    const unsigned long long at = atomicAdd(&place[few_class(call, job)], 1ull << 32 | static_cast<uint32_t>(units));
    job.of.unit = static_cast<int>(at & 0xffffffff);
    *few_job(call.few, static_cast<int>(at >> 32)) = job;
    if (!job.cut) return;
    const int eights = job.eights(call.group), step = job.group_slots() * eights, groups = job.groups();
    for (int head = 0, slot = job.of.slot; head < static_cast<int>(call.p.heads_kv); ++head, slot += job.slots * eights)
        for (int group = 0; group < groups; ++group)
            for (int warp = 0; warp < max(eights / 2, 1); ++warp)
                *few_left(call.few, slot + group * step + 2 * warp) = {};
}

} // namespace fa::sm90::prefill
