/* serve_sm90: states of chunks in workspace, and how a job's are folded in the end: as common/fold.cuh says.
 *
 * A job has a slot for each of its chunks. The order is fixed by the sequence's keys alone, so that neither the number
 * of blocks nor the batch changes a bit. */
#pragma once
#include "common/convert.cuh"
#include "common/rows.cuh" // store_lse
#include "common/softmax.cuh"
#include "sm90/serve/chunk.cuh"

namespace fa::sm90::serve {

/* A state: float2 [units of 8 columns][pairs of rows][8], then maximum and sum of the rows of each pair (row_of_pair).
 */
template <class C> struct Slots {
    char *base; // of the job
    int pairs;

    /* Of a slot. */
    __host__ __device__ static constexpr size_t bytes(int pairs) { return size_t(pairs) * (C::kUnits * 64 + 16); }
    __device__ __forceinline__ Slots(char *base, const Job &job) : base(base), pairs(job.pairs()) {}
    __device__ __forceinline__ Slots(const Params &params, const Job &job, int64_t n)
        : Slots(params.workspace + n * params.job_bytes, job) {}
    __device__ __forceinline__ float2 *value(int slot, int unit, int pair) const {
        return reinterpret_cast<float2 *>(base + slot * bytes(pairs)) + (unit * pairs + pair) * 8;
    }
    __device__ __forceinline__ float4 *state(int slot, int pair) const {
        return reinterpret_cast<float4 *>(base + slot * bytes(pairs) + pairs * (C::kUnits * 64)) + pair;
    }
};

/* The first column of a row of out. */
template <class T> __device__ __forceinline__ char *row_out(const Params &params, const Job &job, const RowPlace &row) {
    const AttentionParams &p = params.call.p;
    const int64_t at =
        row.batch * p.out.stride[0] + row.head * p.out.stride[1] + (job.first_out + row.query) * p.out.stride[2];
    return static_cast<char *>(p.out.data) + at * (p.out_dtype == FA_F32 ? sizeof(float) : sizeof(T));
}

template <class T> __device__ __forceinline__ void store_out(const Params &params, char *row, int column, float x) {
    const AttentionParams &p = params.call.p;
    if (column >= p.head_dim_v) return;
    const int64_t at = column * p.out.stride[3];
    if (p.out_dtype == FA_F32)
        reinterpret_cast<float *>(row)[at] = x;
    else
        reinterpret_cast<T *>(row)[at] = from_float<T>(x);
}

/* Of columns `column`, which is even, and the next. */
template <class T>
__device__ __forceinline__ void store_two(const Params &params, char *row, int column, float x, float y) {
    if (params.in_pairs) {
        if (column < params.call.p.head_dim_v) reinterpret_cast<uint32_t *>(row)[column / 2] = pack<T>(x, y);
    } else {
        store_out<T>(params, row, column, x);
        store_out<T>(params, row, column + 1, y);
    }
}

/* Rows of no query: 0 and -inf. By `threads`. */
template <class C>
__device__ __forceinline__ void write_nothing(const Params &params, const Job &job, int thread, int threads) {
#pragma unroll 1
    for (int n = thread; n < (job.rows_out - job.count) * C::kColumns; n += threads) {
        const RowPlace row = row_place(params, job, job.count + n / C::kColumns);
        if (n % C::kColumns == 0) store_lse(params.call.p, row.batch, row.head, job.first_out + row.query, -INFINITY);
        store_out<typename C::T>(params, row_out<typename C::T>(params, job, row), n % C::kColumns, 0.0f);
    }
}

/* Rows of packed queries before the first sequence, and behind the last one. By the block. */
template <class C> __device__ __forceinline__ void write_around(const Params &params, const Job &job) {
    const int64_t ends[2] = {job.b == 0 ? job.rows.begin : 0,
                             job.b + 1 == params.call.p.batch ? params.call.p.seq_q - job.rows.end : 0};
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        Job around = job;
        around.row = around.count = 0, around.first_out = side ? job.rows.end : 0;
        around.rows_out = static_cast<int>(ends[side] * params.group.divisor);
        write_nothing<C>(params, around, threadIdx.x, C::kThreads);
    }
}

__device__ __forceinline__ RowResult finish(const Params &params, const RowPlace &row, const RowState &state) {
    return params.call.p.sinks.data ? finish_row(params.call.p, row.head, state) : finish_fast(state);
}

__device__ __forceinline__ float scaled(float value, const RowResult &result) {
    return result.factor == 0.0f ? 0.0f : __fmul_rn(value, result.factor);
}

/* Writes a job of which `x` is all. By the warp. */
template <class C>
__device__ __forceinline__ void write_chunk(const Params &params, const Job &job, const Chunk<C> &x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        const int index = 2 * (lane % 4) + r;
        if (index >= job.count) continue;
        const RowPlace row = row_place(params, job, index);
        const RowResult result = finish(params, row, x.state[r]);
        char *const to = row_out<typename C::T>(params, job, row);
        if (lane < 4) store_lse(params.call.p, row.batch, row.head, job.first_out + row.query, result.lse);
#pragma unroll
        for (int unit = 0; unit < C::kUnits; ++unit)
            store_out<typename C::T>(params, to, unit * 8 + lane / 4,
                                     scaled(x.out[unit / 2][unit % 2 * 2 + r], result));
    }
}

/* States of two rows, and two columns of what was accumulated: each of both rows. */
struct Part {
    float4 value;
    float4 state; // maximum, sum of each row
};

struct PartPlace {
    const float4 *value;
    const float4 *state;

    __device__ __forceinline__ Part read() const { return {*value, *state}; }
};

__device__ __forceinline__ Part fold_parts(const Part &to, const Part &x) {
    RowState a, b;
    a.maximum = to.state.x, a.sum = to.state.y, b.maximum = to.state.z, b.sum = to.state.w;
    const Factors f = fold_state(a, x.state.x, x.state.y), g = fold_state(b, x.state.z, x.state.w);
    return {make_float4(fold_value(to.value.x, x.value.x, f), fold_value(to.value.y, x.value.y, g),
                        fold_value(to.value.z, x.value.z, f), fold_value(to.value.w, x.value.w, g)),
            make_float4(a.maximum, a.sum, b.maximum, b.sum)};
}

constexpr int kAtOnce = 8;      // states that a thread reads before it folds them
constexpr int kFoldParts = 512; // groups of two columns that are folded side by side
constexpr int kFoldItems = 4;   // pairs of columns of a unit

/* The states of a job in their order: twice the slot, plus 1 if the state begins a group. */
struct StateList {
    int count;
    int16_t state[kMaxChunks], group[kMaxChunks / kGroup + 2]; // where a group begins in it
};

/* One warp. */
__device__ __forceinline__ void list_states(StateList &list, const Shares &shares) {
    const int lane = threadIdx.x % 32;
    int count = 0;
#pragma unroll 1
    for (int base = shares.first; base < shares.last; base += 32) {
        const int chunk = base + lane, opening = max(chunk / kGroup * kGroup, shares.first);
        const bool opens = chunk == opening, is = chunk < shares.last && (opens || chunk >= shares.opened_end(opening));
        const uint32_t all = __ballot_sync(~0u, is);
        const int at = count + __popc(all & ((1u << lane) - 1));
        if (is) list.state[at] = static_cast<int16_t>(2 * (chunk - shares.first) + opens);
        if (is && opens) list.group[chunk / kGroup - shares.first / kGroup] = static_cast<int16_t>(at);
        count += __popc(all);
    }
    if (lane) return;
    list.count = count;
    list.group[shares.groups()] = static_cast<int16_t>(count);
}

/* Folds the states [from, to) of a list, which are one group. All is ready for the reads when wait() returns. */
template <class Find, class Wait>
__device__ __forceinline__ Part fold_group(const StateList &list, int from, int to, Find &&find, Wait &&wait) {
    static_assert(kAtOnce == kGroup);
    PartPlace at[kAtOnce];
    Part x[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) at[n] = find(list.state[min(from + n, to - 1)] >> 1);
    wait();
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) x[n] = at[n].read();
#pragma unroll
    for (int n = 1; n < kAtOnce; ++n) {
        const Part both = fold_parts(x[0], x[n]);
        if (from + n < to) x[0] = both;
    }
    return x[0];
}

/* Folds all the states of a list. */
template <class Find> __device__ __forceinline__ Part fold_list(const StateList &list, Find &&find) {
    Part total, group;
    total.value = make_float4(0.0f, 0.0f, 0.0f, 0.0f), total.state = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
    group = total;
    bool has_total = false;
#pragma unroll 1
    for (int at = 0; at < list.count; at += kAtOnce) {
        Part x[kAtOnce];
        bool opens[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const int state = list.state[min(at + n, list.count - 1)]; // one too many costs no branch
            opens[n] = state & 1, x[n] = find(state >> 1).read();
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            if (at + n >= list.count) break;
            if (!opens[n]) {
                group = fold_parts(group, x[n]);
            } else {
                if (at + n > 0) total = has_total ? fold_parts(total, group) : group, has_total = true;
                group = x[n];
            }
        }
    }
    return has_total ? fold_parts(total, group) : group;
}

/* Folds a job's states and writes the columns [8 first_unit, 8 last_unit) of its rows. `parts` has room for kFoldParts.
 * By the block, all of whose threads see the list; states can be read once wait() returns, which is called more than
 * once. */
template <class C, class Wait>
__device__ __forceinline__ void fold_job(const Params &params, const Job &job, const Slots<C> &slots,
                                         const Shares &shares, const StateList &list, int first_unit, int last_unit,
                                         Part *parts, Wait &&wait) {
    const int pairs = slots.pairs, groups = shares.groups();
    const int items = (last_unit - first_unit) * pairs * kFoldItems;
    const auto find_at = [&](int item) {
        const int unit = first_unit + item / kFoldItems / pairs, pair = item / kFoldItems % pairs;
        return [&slots, unit, pair, columns = item % kFoldItems](int slot) {
            return PartPlace{reinterpret_cast<const float4 *>(slots.value(slot, unit, pair)) + columns,
                             slots.state(slot, pair)};
        };
    };
    // Where threads are left over, groups side by side, then what they make.
    const bool apart = items < C::kThreads && items * groups <= kFoldParts && groups > 1;
    if (apart) {
        for (int n = threadIdx.x; n < items * groups; n += C::kThreads) {
            const int group = n / items;
            parts[n] = fold_group(list, list.group[group], list.group[group + 1], find_at(n - group * items), wait);
        }
    }
    wait();
    if (apart) __syncthreads();
    for (int item = threadIdx.x; item < items; item += C::kThreads) {
        Part part;
        if (apart) {
            part = parts[item];
            for (int group = 1; group < groups; ++group) part = fold_parts(part, parts[group * items + item]);
        } else {
            part = fold_list(list, find_at(item));
        }
        const int unit = first_unit + item / kFoldItems / pairs, pair = item / kFoldItems % pairs,
                  column = unit * 8 + item % kFoldItems * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int index = job.row_of_pair(pair, r);
            if (index >= job.count) continue;
            const RowPlace row = row_place(params, job, index);
            RowState state;
            state.maximum = r ? part.state.z : part.state.x, state.sum = r ? part.state.w : part.state.y;
            const RowResult result = finish(params, row, state);
            if (column == 0) store_lse(params.call.p, row.batch, row.head, job.first_out + row.query, result.lse);
            store_two<typename C::T>(params, row_out<typename C::T>(params, job, row), column,
                                     scaled(r ? part.value.y : part.value.x, result),
                                     scaled(r ? part.value.w : part.value.z, result));
        }
    }
}

} // namespace fa::sm90::serve
