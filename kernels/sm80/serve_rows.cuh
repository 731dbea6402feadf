/* mma_sm80 serving: what the rows of one warp make of a tile's products. The products themselves, the softmax and where
 * what lies in registers are those of the dense kernel (sm80/warp.cuh, sm80/scores.cuh). */
#pragma once

#include <math.h> // INFINITY

#include "common/alibi.cuh"   // less_taken, taken_by
#include "common/convert.cuh" // from_float, load_as_float
#include "common/fold.cuh"    // fold_state, fold_value
#include "common/partial.cuh" // finish_joined, partial_states
#include "common/rows.cuh"    // bias_row, mask_row, row_of, store_lse
#include "common/score.cuh"   // add_bias, bounded
#include "philox.h"           // fa_philox, fa_dropout_head, fa_dropout_keeps, fa_dropout_scale
#include "sm80/serve_job.cuh" // Job, ServeShared
#include "sm80/warp.cuh"      // MmaWarp

namespace fa::sm80 {

__device__ __forceinline__ float serve_sink(const AttentionParams &p, int head) {
    if (!p.sinks.data) return -INFINITY;
    return bounded(load_as_float(p.sinks.data, p.sinks_dtype, head * p.sinks.stride[0]));
}

/* One element of out. */
template <typename T>
__device__ __forceinline__ void store_element(const AttentionParams &p, int64_t offset, int column, float x) {
    if (column >= p.head_dim_v) return;
    const int64_t at = offset + column * p.out.stride[3];
    if (p.out_dtype == FA_F32)
        static_cast<float *>(p.out.data)[at] = x;
    else
        static_cast<T *>(p.out.data)[at] = from_float<T>(x);
}

/* Where a part of the keys leaves its states: as partial.cuh says. */
struct Slots {
    const ServeArgs &args;
    int64_t first; // of the rows of a tile, where they are not rows of out

    __device__ __forceinline__ Slots(const ServeArgs &args, const Job &job)
        : args(args),
          first((args.whole ? int64_t(blockIdx.x) : job.batch * args.packed_heads + job.packed_head) * kServeRows) {}
    /* Row `row` of the tile, among the slots of all parts. */
    __device__ __forceinline__ int64_t at(const Job &job, int row, int part) const {
        if (!args.slots_by_query) return part * args.slots + first + row;
        const RowPlace place = job.at(args, row);
        const AttentionParams &p = args.call.p;
        return part * args.slots + (job.out_batch(args) * p.seq_q + job.entry.first_q + place.query) * p.heads +
               place.head;
    }
    template <int kHeadDim> __device__ __forceinline__ float *values(int64_t slot) const {
        return args.workspace + slot * kHeadDim;
    }
    template <int kHeadDim> __device__ __forceinline__ float2 *state(int64_t slot) const {
        return partial_states<kHeadDim>(args.workspace, args.whole ? 2 : args.parts, args.slots) + slot;
    }
};

/* The largest scaled products of a lane's rows so far; of dressed instances. */
template <bool kDressed> struct RowLogits {};
template <> struct RowLogits<true> { float logit[2] = {-INFINITY, -INFINITY}; };

template <class C> struct ServeRows : MmaWarp<C>, RowLogits<C::kDressed> {
    using Base = MmaWarp<C>;
    using T = typename C::T;
    using Tile = typename Base::Tile;
    using Layout = typename Base::Layout;
    using Base::Base, Base::out, Base::shift, Base::sum;
    static_assert(C::kRowTiles == 1 && C::kWarpsN == 1);

    /* Calls body(x, i, column) for each of this lane's scores: row l / 4 + 8 i, key `column` beyond the lane's first.
     */
    template <class Body> __device__ static __forceinline__ void each(Tile &s, Body &&body) {
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) body(s[0][j][e], e / 2, 8 * j + e % 2);
    }

    /* The amount that ALiBi takes from this lane's scores: slope times distance, within the limit of a bias. `row` is
     * the lane's first row of the tile, `key` the lane's first key. */
    struct Slopes {
        ServeRow mine[2];
        int key;

        __device__ __forceinline__ Slopes(const ServeShared<C> &shared, int row, int key)
            : mine{shared.row[row], shared.row[row + 8]}, key(key) {}
        __device__ __forceinline__ float taken(int i, int column) const {
            if (mine[i].slope == 0.0f) return 0.0f;
            const uint32_t a = uint32_t(mine[i].position), b = uint32_t(key + column);
            return taken_by(mine[i].slope, static_cast<float>(mine[i].position >= key + column ? a - b : b - a));
        }
        __device__ __forceinline__ bool sees(int i, int column) const {
            return key + column >= mine[i].begin && key + column < mine[i].end;
        }
    };
    __device__ static __forceinline__ void add_slopes(Tile &s, const ServeShared<C> &shared, int row, int key) {
        const Slopes slopes(shared, row, key);
        each(s, [&](float &x, int i, int column) { x = add_bias(x, -slopes.taken(i, column)); });
    }

    /* Adds the bias, less what ALiBi takes; a bias of -inf excludes whatever that is. */
    __device__ static __forceinline__ void add_biases(Tile &s, const ServeArgs &args, const Job &job,
                                                      const ServeShared<C> &shared, int row, int key) {
        const AttentionParams &p = args.call.p;
        const Slopes slopes(shared, row, key);
        int64_t from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const RowPlace at = job.at(args, row + 8 * i);
            from[i] = bias_row(p, job.batch, at.head, at.query) + key * p.bias.stride[3];
        }
        const auto add = [&](const auto *bias) {
            each(s, [&](float &x, int i, int column) {
                if (!slopes.sees(i, column)) return;
                const float b = to_float(bias[from[i] + column * p.bias.stride[3]]);
                x = b == -INFINITY ? b : add_bias(x, less_taken(bounded(b), slopes.taken(i, column)));
            });
        };
        if (p.bias_dtype == FA_F32)
            add(static_cast<const float *>(p.bias.data));
        else
            add(static_cast<const T *>(p.bias.data));
    }

    /* -inf for every key that its row does not see. `held`: which of the tile's keys have a place, from the lane's
     * first on. */
    __device__ static __forceinline__ void mask(Tile &s, const ServeArgs &args, const Job &job,
                                                const ServeShared<C> &shared, int row, int key, uint64_t held) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int begin = shared.row[row + 8 * i].begin - key, end = shared.row[row + 8 * i].end - key;
#pragma unroll
            for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e < begin || 8 * j + e >= end || !(held >> (8 * j + e) & 1))
                        s[0][j][2 * i + e] = -INFINITY;
        }
        if constexpr (C::kDressed) {
            const AttentionParams &p = args.call.p;
            if (args.segments.q) hide_others(s, args, job, row, key);
            if (args.intervals.count > 1) hide_between(s, args, job, row, key);
            if (!p.mask.data) return;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const RowPlace at = job.at(args, row + 8 * i);
                const uint8_t *attend = mask_row(p, job.batch, at.head, at.query) + key * p.mask.stride[3];
#pragma unroll
                for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float &x = s[0][j][2 * i + e];
                        if (x != -INFINITY && !attend[(8 * j + e) * p.mask.stride[3]]) x = -INFINITY;
                    }
            }
        }
    }

    /* Raises this lane's largest products by those of a tile that are not hidden by -inf, nor by a bias of -inf. */
    __device__ __forceinline__ void note_logits(Tile &s, const ServeArgs &args, const Job &job,
                                                const ServeShared<C> &shared, int row, int key) {
        const AttentionParams &p = args.call.p;
        if (p.bias.data) hide_biased(s, args, job, shared, row, key);
        each(s, [&](float &x, int i, int) {
            if (x != -INFINITY) this->logit[i] = fmaxf(this->logit[i], x * args.max_logit.scale);
        });
    }

    /* Raises the maxima of the heads to those of the rows. `row`: the lane's first of the tile. Whole warps. */
    __device__ __forceinline__ void raise_logits(const ServeArgs &args, const Job &job, int row) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = this->logit[i];
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (threadIdx.x % 4 == 0 && row + 8 * i < job.count)
                args.max_logit.raise(job.batch, job.at(args, row + 8 * i).head, top);
        }
    }

    /* -inf for every key whose bias is that, of those that its row sees. */
    __device__ static __forceinline__ void hide_biased(Tile &s, const ServeArgs &args, const Job &job,
                                                       const ServeShared<C> &shared, int row, int key) {
        const AttentionParams &p = args.call.p;
        each(s, [&](float &x, int i, int column) {
            if (x == -INFINITY || row + 8 * i >= job.count) return;
            const RowPlace at = job.at(args, row + 8 * i);
            const int64_t element = bias_row(p, job.batch, at.head, at.query) + (key + column) * p.bias.stride[3];
            const float b = p.bias_dtype == FA_F32 ? static_cast<const float *>(p.bias.data)[element]
                                                   : to_float(static_cast<const T *>(p.bias.data)[element]);
            if (b == -INFINITY) x = b;
        });
    }

    /* -inf for every key of another id, of those that are not there yet. */
    __device__ static __forceinline__ void hide_others(Tile &s, const ServeArgs &args, const Job &job, int row,
                                                       int key) {
        int32_t mine[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            mine[i] = row + 8 * i < job.count ? args.segments.of_query(job.batch, job.at(args, row + 8 * i).query) : 0;
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float &low = s[0][j][e], &high = s[0][j][2 + e];
                if (low == -INFINITY && high == -INFINITY) continue;
                const int32_t id = args.segments.of_key(job.batch, key + 8 * j + e);
                if (id != mine[0]) low = -INFINITY;
                if (id != mine[1]) high = -INFINITY;
            }
    }

    /* -inf for every key between the two intervals of its row. */
    __device__ static __forceinline__ void hide_between(Tile &s, const ServeArgs &args, const Job &job, int row,
                                                        int key) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i >= job.count) continue;
            const RowPlace at = job.at(args, row + 8 * i);
            const Span<int> gap = args.intervals.of_query(job.batch, at.head, at.query).gap();
            const int begin = gap.begin - key, end = gap.end - key;
#pragma unroll
            for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e >= begin && 8 * j + e < end) s[0][j][2 * i + e] = -INFINITY;
        }
    }

    /* Scores in base 2 to weights 2^(score - shift), which join the sums. As in the dense kernel the shift of a row is
     * its maximum of some earlier moment, raised when a score exceeds it by more than 8; but each row for itself, so
     * that its bits do not depend on the rows beside it. */
    __device__ __forceinline__ void weigh(Tile &s) {
        float highest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            highest[i] = fmaxf(s[0][0][2 * i], s[0][0][2 * i + 1]);
#pragma unroll
            for (int j = 1; j < C::kKeys / 8; ++j)
                highest[i] = fmaxf(highest[i], fmaxf(s[0][j][2 * i], s[0][j][2 * i + 1]));
        }
        const bool outgrown = highest[0] - shift[0][0] > 8.0f || highest[1] - shift[0][1] > 8.0f;
        if (__any_sync(~0u, outgrown)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float top = highest[i];
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float raised = top - shift[0][i] > 8.0f ? top : shift[0][i];
                const float factor = exp2_fast(shift[0][i] - raised);
                shift[0][i] = raised;
                sum[0][i] *= factor;
#pragma unroll
                for (int j = 0; j < C::kHeadDim / 8; ++j) out[0][j][2 * i] *= factor, out[0][j][2 * i + 1] *= factor;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; ++e) s[0][j][e] = exp2_fast(s[0][j][e] - shift[0][i]);
                sum[0][i] += s[0][j][2 * i] + s[0][j][2 * i + 1];
            }
    }

    /* Zeroes the weights that dropout takes; rows are queries of one head. `query`, `key`: the lane's first. */
    __device__ static __forceinline__ void drop(Tile &s, const fa_dropout &d, int64_t batch, int head, int64_t query,
                                                int key) {
        if (d.origin[2] % 16 || d.origin[3] % 16) { // of shards alone: weight by weight
            uint32_t kept = 0;
#pragma unroll 1
            for (int n = 0; n < C::kKeys / 2; ++n)
                kept |= uint32_t(fa_dropout_keeps(&d, batch, head, query + n / 2 % 2 * 8, key + n / 4 * 8 + n % 2))
                        << n;
#pragma unroll
            for (int n = 0; n < C::kKeys / 2; ++n)
                if (!(kept >> n & 1)) s[0][n / 4][n % 4] = 0.0f;
            return;
        }
        const uint32_t i = uint32_t(query) + d.origin[2];
#pragma unroll
        for (int n = 0; n < C::kKeys / 16; ++n) { // a call serves what a lane has of 16 x 16 weights
            const uint32_t j = uint32_t(key) + 16 * n + d.origin[3];
            uint32_t word[4] = {j >> 4 << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, fa_dropout_head(&d, batch, head),
                                d.offset};
            fa_philox(word, d.seed[0], d.seed[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t two = word[2 * (e % 2) + e / 2], bits = half ? two >> 16 : two & 0xffff;
                    if (bits < d.threshold) s[0][2 * n + half][e] = 0.0f;
                }
        }
    }

    /* ---- states ---- */

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2; ++i) shift[0][i] = kNoShift, sum[0][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < C::kHeadDim / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[0][j][e] = 0.0f;
    }

    /* The states of this lane's rows: of what the warp has gone through, with whole sums. */
    struct States {
        RowState row[2];
    };
    __device__ __forceinline__ States states() const {
        States x;
#pragma unroll
        for (int i = 0; i < 2; ++i) x.row[i].maximum = shift[0][i], x.row[i].sum = this->row_sum(0, i);
        return x;
    }

    /* Leaves states and output in slots; a lane reads of `out` what it wrote. `row`: the lane's first of the tile. */
    __device__ __forceinline__ void leave(const States &x, const Job &job, const Slots &slots, int row,
                                          int part) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i >= job.count) continue;
            const int64_t slot = slots.at(job, row + 8 * i, part);
            if (lane % 4 == 0) *slots.template state<C::kHeadDim>(slot) = make_float2(x.row[i].maximum, x.row[i].sum);
            float *to = slots.template values<C::kHeadDim>(slot) + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j)
                *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(out[0][j][2 * i], out[0][j][2 * i + 1]);
        }
        __syncwarp();
    }

    /* This = fold(what lies in the slots, this). */
    __device__ __forceinline__ void fold(States &x, const Job &job, const Slots &slots, int row, int part) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i >= job.count) continue;
            const int64_t slot = slots.at(job, row + 8 * i, part);
            const float2 before = *slots.template state<C::kHeadDim>(slot);
            RowState state;
            state.maximum = before.x, state.sum = before.y;
            const Factors f = fold_state(state, x.row[i].maximum, x.row[i].sum);
            x.row[i] = state;
            const float *from = slots.template values<C::kHeadDim>(slot) + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j) {
                const float2 old = *reinterpret_cast<const float2 *>(from + 8 * j);
                out[0][j][2 * i] = fold_value(old.x, out[0][j][2 * i], f);
                out[0][j][2 * i + 1] = fold_value(old.y, out[0][j][2 * i + 1], f);
            }
        }
        __syncwarp();
    }

    /* Normalises and writes this warp's rows and their LSE, those of the tile from `begin` on; rows of no query get 0
     * and -inf. `rows`: the warp's own rows of the query tile, which it alone reads. */
    __device__ __forceinline__ void finish(const States &x, const ServeArgs &args, const Job &job, int warp_row,
                                           int begin, uint32_t rows) {
        const AttentionParams &p = args.call.p;
        const int lane = threadIdx.x % 32;
        const fa_dropout &dropout = args.call.dropout;
        const float kept = C::kDressed && dropout.threshold ? static_cast<float>(fa_dropout_scale(&dropout)) : 1.0f;
        const int64_t batch = job.out_batch(args);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int of_warp = 8 * i + lane / 4, row = warp_row + of_warp;
            const RowPlace at = job.at(args, row);
            const bool query = row < job.count;
            RowResult result = {0.0f, -INFINITY};
            if (query) result = finish_joined(x.row[i].maximum, x.row[i].sum, serve_sink(p, at.head));
            const bool writes = row >= begin && row < job.rows_out;
            if (lane % 4 == 0 && writes) store_lse(p, batch, at.head, job.first_out + at.query, result.lse);
            const bool seen = query && x.row[i].sum != 0.0f;
            const float factor = result.factor * kept;
            const int64_t to = row_offset(p.out, batch, at.head, job.first_out + at.query);
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j) {
                const float low = seen ? out[0][j][2 * i] * factor : 0.0f;
                const float high = seen ? out[0][j][2 * i + 1] * factor : 0.0f;
                if (p.out_dtype != FA_F32) {
                    store_shared(rows + Layout::offset(of_warp, j) + lane % 4 * 4, pack<T>(low, high));
                } else if (writes) {
                    store_element<T>(p, to, 8 * j + lane % 4 * 2, low);
                    store_element<T>(p, to, 8 * j + lane % 4 * 2 + 1, high);
                }
            }
        }
        __syncwarp();
        if (p.out_dtype != FA_F32) write(args, job, warp_row, begin, rows);
        __syncwarp();
    }

  private:
    /* The rows of 16-bit elements, from shared memory to out. */
    __device__ static __forceinline__ void write(const ServeArgs &args, const Job &job, int warp_row, int begin,
                                                 uint32_t rows) {
        const AttentionParams &p = args.call.p;
        const int lane = threadIdx.x % 32;
        const int64_t batch = job.out_batch(args);
        constexpr int kChunks = Layout::kPeriod, kGroups = C::kHeadDim / 8 / kChunks;
#pragma unroll 1
        for (int n = lane / kChunks; n < C::kWarpRows; n += 32 / kChunks) {
            if (warp_row + n >= job.rows_out) break;
            if (warp_row + n < begin) continue;
            const RowPlace at = job.at(args, warp_row + n);
            T *to = row_of<T>(p.out, batch, at.head, job.first_out + at.query);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const int chunk = g * kChunks + lane % kChunks;
                if (chunk * 8 >= p.head_dim_v) break;
                const uint4 x = load_shared_16(rows + Layout::offset(n, chunk));
                if (args.chunks_o) {
                    reinterpret_cast<uint4 *>(to)[chunk] = x;
                    continue;
                }
                const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (chunk * 8 + e < p.head_dim_v)
                        reinterpret_cast<uint16_t *>(to)[(chunk * 8 + e) * p.out.stride[3]] =
                            uint16_t(word[e / 2] >> e % 2 * 16);
            }
        }
    }
};

} // namespace fa::sm80
