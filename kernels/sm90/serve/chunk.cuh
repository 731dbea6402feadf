/* serve_sm90: one warp's rows against tiles of keys. mma.sync with rows as columns:
 *
 *     S^T (keys x rows) = K Q^T         P = 2^(S - shift)         O^T (columns x rows) += V^T P^T
 *
 * A lane holds the rows 2 (l % 4) + {0, 1} of each eight, of S^T the keys l / 4 + 8 i, of O^T the columns l / 4 + 8 i.
 *
 * Why not wgmma, as thin.cuh: its 64 rows are 8 times those of a decode step, and four warps that go in step wait for
 * each tile together, where here each warp has its own tiles in flight and waits for no other warp.
 */
#pragma once
#include <float.h> // FLT_MAX

#include "common/ptx.cuh"
#include "common/rows.cuh" // row_of
#include "common/softmax.cuh"
#include "sm90/serve/job.cuh"

namespace fa::sm90::serve {

/* The shift of a row that has seen no key: no score is lower, yet finite, so that 2^(-inf - shift) is 0, not NaN. */
constexpr float kNoShift = -FLT_MAX;

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The keys that a row sees. */
struct LaneRow {
    int begin, end; // keys that it sees
    int position;
    float slope; // NaN where it is not finite
};

/* The keys that row `index` of a job sees. */
__device__ __forceinline__ LaneRow sight_of(const Params &params, const Job &job, int index) {
    const AttentionParams &p = params.call.p;
    LaneRow mine = {0, 0, 0, 0.0f};
    const RowPlace at = row_place(params, job, index);
    const int64_t position = fa_position(&job.entry, at.query);
    const fa_span seen = fa_row_keys(&job.entry, p.left, p.right, position);
    mine.begin = static_cast<int>(fa_clamp(seen.begin, 0, job.entry.seq_k));
    mine.end = static_cast<int>(fa_clamp(seen.end, 0, job.entry.seq_k));
    mine.position = static_cast<int>(position);
    const fa_operand &alibi = params.call.alibi;
    if (alibi.data) {
        const float slope = static_cast<const float *>(alibi.data)[job.b * alibi.stride[0] + at.head * alibi.stride[1]];
        mine.slope = fabsf(slope) < INFINITY ? slope : NAN;
    }
    return mine;
}

/* A score with what ALiBi takes of it. */
__device__ __forceinline__ float add_alibi(float x, const LaneRow &row, int key) {
    const uint32_t distance =
        row.position >= key ? uint32_t(row.position) - uint32_t(key) : uint32_t(key) - uint32_t(row.position);
    const float taken = __fmul_rn(row.slope, static_cast<float>(distance));
    const float bounded = fminf(fmaxf(taken, -FA_LIMIT), FA_LIMIT);
    return add_bias(x, taken == taken ? -bounded : taken);
}

template <class C> struct Rows {
    using T = typename C::T;
    static constexpr int kSteps = C::kColumns / 16;

    /* A lane's part of 16 columns of Q^T, operand b. */
    struct Query {
        uint32_t part[2];
    };

    LaneRow *row; // of the warp, in shared memory
    Query query[kSteps];
    int common_begin, common_end; // keys that every row of the warp sees

    /* The lane's row r. */
    __device__ __forceinline__ const LaneRow &own(int r) const { return row[2 * (threadIdx.x % 4) + r]; }

    /* By the warp. */
    __device__ __forceinline__ void load_queries(const Params &params, const Job &job) {
        const AttentionParams &p = params.call.p;
        const int lane = threadIdx.x % 32, index = lane / 4;
        const bool exists = index < job.count;
        const RowPlace at = row_place(params, job, exists ? index : 0);
        const T *from = row_of<T>(p.q, at.batch, at.head, job.first_out + at.query) + 2 * (lane % 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 16 * step + 8 * half;
                query[step].part[half] =
                    exists && column < p.head_dim ? *reinterpret_cast<const uint32_t *>(from + column) : 0;
            }
    }

    /* Loads the keys that the rows see. By the whole warp. */
    __device__ __forceinline__ void load_sight(const Params &params, const Job &job) {
        const int lane = threadIdx.x % 32; // takes row `lane`
        LaneRow mine = {0, 0, 0, 0.0f};
        common_begin = 0, common_end = INT32_MAX;
        if (lane < job.count) {
            mine = sight_of(params, job, lane);
            common_begin = mine.begin, common_end = mine.end;
        }
        __syncwarp();
        if (lane < kFewRows) row[lane] = mine;
        __syncwarp();
        common_begin = __reduce_max_sync(~0u, common_begin), common_end = __reduce_min_sync(~0u, common_end);
    }
};

/* A chunk that is worked out tile by tile. */
template <class C> struct Chunk {
    using T = typename C::T;
    static constexpr int kKeyTiles = kTileKeys / 16, kColumnTiles = C::kColumns / 16;
    float out[kColumnTiles][4];
    RowState state[kLaneRows]; // `maximum`: the shift of the weights; `sum`: this lane's share until close()
    using Scores = float[kKeyTiles][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[m][e] = 0.0f;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) state[r].maximum = kNoShift, state[r].sum = 0.0f;
    }

    /* S^T of a tile. */
    static __device__ __forceinline__ void multiply_keys(Scores &s, const Rows<C> &rows, const char *keys) {
        const int lane = threadIdx.x % 32;
        const uint32_t address =
            shared_address(keys) + (lane % 8 + (lane >> 3 & 1) * 8) * 128 + ((lane >> 4) ^ (lane % 8)) * 16;
        Scores odd; // two sums, so that half as many products wait for each other
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][e] = odd[m][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < C::kColumns / 16; ++step) {
            const typename Rows<C>::Query &query = rows.query[step];
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) {
                uint32_t a[4];
                ldmatrix_x4<false>(a, (address ^ step % 4 * 32) + step / 4 * C::kSlabBytes + m * 2048);
                mma_16x8x16<T>(step % 2 ? odd[m] : s[m], a, query.part[0], query.part[1]);
            }
        }
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][e] = __fadd_rn(s[m][e], odd[m][e]);
    }

    /* Products to scores in base 2, those that a row does not see to -inf. `first`: the tile's first key. */
    static __device__ __forceinline__ void score(Scores &s, const Params &params, const Rows<C> &rows, int first,
                                                 uint32_t valid) {
        const int key = first + threadIdx.x % 32 / 4;
        const auto each = [&](auto &&change) {
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) change(s[m][e], 16 * m + e / 2 * 8, e % 2);
        };
        if (!C::kPlain && params.score.cap_log2 > 0)
            each([&](float &x, int, int) {
                x = __fmul_rn(params.score.cap_log2, tanhf(__fmul_rn(x, params.score.scale_cap)));
            });
        else
            each([&](float &x, int, int) { x = round_score(x, params.score.scale_log2); });
        if (!C::kPlain && params.call.alibi.data)
            each([&](float &x, int at, int r) { x = add_alibi(x, rows.own(r), key + at); });
        if (~valid || first < rows.common_begin || first + kTileKeys > rows.common_end) {
            const uint32_t mine = valid >> threadIdx.x % 32 / 4;
            each([&](float &x, int at, int r) {
                const bool seen = key + at >= rows.own(r).begin && key + at < rows.own(r).end && (mine >> at & 1);
                x = seen ? x : -INFINITY;
            });
        }
    }

    /* Scores to weights 2^(score - shift), which join the sums. The shift of a row is its maximum of some earlier
     * moment, raised when a score exceeds it by more than 8: until then no lane needs to know the others' maxima, and
     * weights up to 2^8 are held as precisely as weights up to 1. Each row is raised for itself, so that its bits do
     * not depend on the rows beside it. */
    __device__ __forceinline__ void soften(Scores &s) {
        float highest[kLaneRows];
        bool outgrown = false;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            highest[r] = fmaxf(s[0][r], s[0][r + 2]);
#pragma unroll
            for (int m = 1; m < kKeyTiles; ++m) highest[r] = fmaxf(highest[r], fmaxf(s[m][r], s[m][r + 2]));
            outgrown |= __fsub_rn(highest[r], state[r].maximum) > 8.0f;
        }
        if (__any_sync(~0u, outgrown)) {
            float factor[kLaneRows];
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                float top = highest[r];
#pragma unroll
                for (int by = 4; by < 32; by *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
                const float old = state[r].maximum, raised = __fsub_rn(top, old) > 8.0f ? top : old;
                factor[r] = exp2_fast(__fsub_rn(old, raised));
                state[r].maximum = raised, state[r].sum = __fmul_rn(state[r].sum, factor[r]);
            }
#pragma unroll
            for (int m = 0; m < kColumnTiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][e] = __fmul_rn(out[m][e], factor[e % 2]);
        }
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
                for (int e = r; e < 4; e += 2) {
                    s[m][e] = exp2_fast(__fsub_rn(s[m][e], state[r].maximum));
                    sum = __fadd_rn(sum, s[m][e]);
                }
            state[r].sum = __fadd_rn(state[r].sum, sum);
        }
    }

    /* O^T += V^T P^T. */
    __device__ __forceinline__ void multiply_values(const Scores &s, const char *values) {
        const int lane = threadIdx.x % 32;
        const uint32_t address =
            shared_address(values) + (lane % 8 + (lane >> 4) * 8) * 128 + ((lane >> 3 & 1) ^ (lane % 8)) * 16;
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
            uint32_t weights[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                weights[half] = transpose_8x8(pack<T>(s[k][2 * half], s[k][2 * half + 1]));
#pragma unroll
            for (int m = 0; m < kColumnTiles; ++m) {
                uint32_t a[4];
                ldmatrix_x4<true>(a, (address ^ m % 4 * 32) + m / 4 * C::kSlabBytes + k * 2048);
                mma_16x8x16<T>(out[m], a, weights[0], weights[1]);
            }
        }
    }

    /* The sums of whole rows, in every lane that holds the row. */
    __device__ __forceinline__ void close() {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
            for (int by = 4; by < 32; by *= 2)
                state[r].sum = __fadd_rn(state[r].sum, __shfl_xor_sync(~0u, state[r].sum, by));
    }

    /* this = fold(this, other), or other. */
    __device__ __forceinline__ void take(const Chunk &other, bool first) {
        Factors f[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            if (first)
                state[r] = other.state[r];
            else
                f[r] = fold_state(state[r], other.state[r].maximum, other.state[r].sum);
        }
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                out[m][e] = first ? other.out[m][e] : fold_value(out[m][e], other.out[m][e], f[e % 2]);
    }
};

} // namespace fa::sm90::serve
