/* The attention kernel on mma.sync: one block takes TILE_M query rows of one head and walks over the keys they see.
 *
 *     S = Q K^T        a = query fragments (registers or ldmatrix), b = ldmatrix of the key rows as they lie
 *     P = 2^(c S - m)  in the registers of S; rounded to T, two neighbouring 8-key columns of S are operand a again
 *     O = O 2^(..) + P V   b = ldmatrix.trans of the value rows
 *
 * Warps: WARPS_M groups of 16 ROW_TILES query rows; WARPS_N warps share a group's rows and split each key tile, each
 * with its own maximum, sum and output, merged in shared memory at the end (small grids: more warps a row). Key tiles
 * are walked from the last to the first, so that the masked ones of a causal call come first, in the shadow of the
 * first loads. K and V: a ring of STAGES tiles filled by cp.async, one barrier a tile; with STAGES 1 the next K is
 * fetched while P V runs and V while Q K^T runs, two barriers a tile. */
#ifndef FA_MMA_ATTENTION_CUH
#define FA_MMA_ATTENTION_CUH

#include "convert.cuh"    // row_of
#include "fa.h"           // fa_problem
#include "mma_scores.cuh" // Scores, mask_scores, transform_scores
#include "mma_tile.cuh"   // BlockAddress, RowLoader
#include "sm80_ptx.cuh"   // mma_16x8x16, pack
#include "softmax.cuh"    // exp2_fast, RowResult

namespace fa {

/* Tile shape of one instance. */
struct MmaShape {
    int row_tiles;           // of 16 query rows, a warp
    int warps_m, warps_n;    // groups of rows; warps that share a group's rows and split its keys
    int keys;                // of a tile, a warp
    int stages;              // tiles of K and of V in shared memory
    bool query_in_registers; // else read from shared memory for each tile
    int blocks_per_sm;       // that registers are to allow
};

/* GENERAL: scores pass through scale, softcap, bias and boolean mask one by one, and operands may have any alignment;
 * otherwise the scale (> 0) is folded into the exponent and rows are 16-byte chunks. HEAD_DIM: of Q, K and V, padded.
 */
template <typename T_, int HEAD_DIM_, MmaShape SHAPE, bool GENERAL_> struct MmaConfig {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, ROW_TILES = SHAPE.row_tiles, KEYS = SHAPE.keys, STAGES = SHAPE.stages;
    static constexpr int WARPS_M = SHAPE.warps_m, WARPS_N = SHAPE.warps_n, BLOCKS_PER_SM = SHAPE.blocks_per_sm;
    static constexpr bool QUERY_IN_REGISTERS = SHAPE.query_in_registers, GENERAL = GENERAL_;

    static constexpr bool KEEP_ADDRESSES = ROW_TILES * HEAD_DIM < 256; // else the output takes the registers

    static constexpr int THREADS = WARPS_M * WARPS_N * 32;
    static constexpr int WARP_ROWS = 16 * ROW_TILES;
    static constexpr int TILE_M = WARPS_M * WARP_ROWS;
    static constexpr int TILE_N = WARPS_N * KEYS;
    static constexpr int ROW_BYTES = HEAD_DIM * 2;
    static constexpr int QUERY_BYTES = TILE_M * ROW_BYTES;
    static constexpr int TILE_BYTES = TILE_N * ROW_BYTES; // one tile of K or of V
    static constexpr int SHARED_BYTES = QUERY_BYTES + 2 * STAGES * TILE_BYTES;

    /* What a warp with key part > 0 hands over: output, maxima and sums, a column of 32 floats each. */
    static constexpr int MERGE_VALUES = ROW_TILES * (HEAD_DIM / 2 + 4);
    static_assert((WARPS_N - 1) * WARPS_M * MERGE_VALUES * 32 * 4 <= 2 * STAGES * TILE_BYTES,
                  "the merge reuses the K and V tiles");
    static_assert(KEYS % 16 == 0 && HEAD_DIM % 32 == 0, "mma.sync tiles of 16");
};

/* Division of numbers below 2^31 by one multiplication: the start of a block has five of them in a row. */
struct Divider {
    uint32_t divisor, multiplier, shift;

    static Divider of(int64_t divisor) {
        uint32_t shift = 0;
        while ((int64_t(1) << shift) < divisor) ++shift;
        return {uint32_t(divisor), uint32_t((((uint64_t(1) << shift) - divisor) << 32) / divisor + 1), shift};
    }
    __device__ int quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

/* A launch. The sequence lengths, and so every row and key index, fit in 28 bits. */
struct MmaArgs {
    fa_problem problem;
    ScoreParams score;
    Visibility visible;
    Divider heads, group;                   // query heads a batch entry, a K/V head
    Divider per_section, width, last_width; // blocks of a section; heads of one, of the last one
    int row_blocks;                         // tiles of TILE_M queries a head
    int sections;
    bool chunks_q, chunks_k, chunks_v, chunks_o; // whether 16-byte chunks are aligned
};

/* The work of this block. It is made anew from the block's index where the output is written, so that it takes no
 * registers while the keys are walked. */
struct BlockPlace {
    int batch, head, row_block;

    /* Sections of heads whose K and V fit the L2 cache together; in a section the last row blocks, the longest ones of
     * a causal call, come first, so that no long block starts late. */
    __device__ explicit BlockPlace(const MmaArgs &args) {
        int index;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
        const int section = args.per_section.quotient(index), rest = index - section * args.per_section.divisor;
        const Divider &width = section < args.sections - 1 ? args.width : args.last_width;
        const int reversed = width.quotient(rest);
        const int pair = section * args.width.divisor + rest - reversed * width.divisor;
        row_block = args.row_blocks - 1 - reversed;
        batch = args.heads.quotient(pair);
        head = pair - batch * args.heads.divisor;
    }
};

/* The shift of a row that has seen no key: below every score, yet finite, so that 2^(-inf - shift) is 0, not NaN. */
constexpr float NO_SHIFT = -1.7e38f;

/* finish_row() of softmax.cuh with the approximate logarithm and reciprocal (2 ulp): a block of few tiles notices. */
__device__ __forceinline__ RowResult finish_fast(float shift, float sum, float sink) {
    const float raised = fmaxf(shift, sink * LOG2_E), factor = exp2_fast(shift - raised);
    const float total = sum * factor + exp2_fast(sink * LOG2_E - raised);
    const float lse = sum == 0.0f ? sink : (raised + __log2f(total)) * LN_2;
    return {sum == 0.0f ? 0.0f : __fdividef(factor, total), lse};
}

/* What one warp keeps from tile to tile, and its part of the work. */
template <class C> struct MmaWarp {
    using T = typename C::T;
    static constexpr int ROW_TILES = C::ROW_TILES, KEYS = C::KEYS, STEPS = C::HEAD_DIM / 16;
    using Tile = Scores<ROW_TILES, KEYS>;
    using Layout = TileLayout<C::HEAD_DIM>;
    using RowsAddress = BlockAddress<C::HEAD_DIM, BlockOrder::ROWS_FIRST>;
    using KeysAddress = BlockAddress<C::HEAD_DIM, BlockOrder::COLUMNS_FIRST>;

    float out[ROW_TILES][C::HEAD_DIM / 8][4]; // as Scores, head_dim in place of keys
    float shift[ROW_TILES][2];                // `out` and `sum` are of weights 2^(score - shift); see weigh()
    float sum[ROW_TILES][2];                  // this lane's share
    float highest[ROW_TILES][2];              // this lane's highest product of the tile
    uint32_t query[C::QUERY_IN_REGISTERS ? ROW_TILES : 1][C::QUERY_IN_REGISTERS ? STEPS : 1][4];
    RowsAddress query_address;

    __device__ explicit MmaWarp(uint32_t query_rows, int lane) : query_address(query_rows, lane) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) shift[r][i] = NO_SHIFT, sum[r][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < C::HEAD_DIM / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[r][j][e] = 0.0f;
        }
    }

    __device__ __forceinline__ void load_query_block(uint32_t (&a)[4], int row_tile, int step) const {
        ldmatrix_x4(a, query_address.at(step) + row_tile * 16 * C::ROW_BYTES);
    }

    __device__ __forceinline__ void load_query() {
        if constexpr (C::QUERY_IN_REGISTERS) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) load_query_block(query[r][step], r, step);
        }
    }

    /* s = Q K^T for this warp's KEYS key rows. MAXIMA: sets `highest` too, in two passes over the keys, so that the
     * maxima of the first are found while the second multiplies. Without the query in registers each pass would read it
     * anew. */
    static constexpr bool TWO_PASSES = C::QUERY_IN_REGISTERS && ROW_TILES > 1 && KEYS % 32 == 0 && !C::GENERAL;
    template <bool MAXIMA> __device__ __forceinline__ void multiply_keys(Tile &s, const KeysAddress &keys) {
        constexpr int PASS = MAXIMA ? KEYS / 2 : KEYS;
#pragma unroll
        for (int first = 0; first < KEYS; first += PASS) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint32_t a[ROW_TILES][4];
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    if constexpr (C::QUERY_IN_REGISTERS) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) a[r][e] = query[r][step][e];
                    } else {
                        load_query_block(a[r], r, step);
                    }
                }
#pragma unroll
                for (int n = first / 16; n < (first + PASS) / 16; ++n) {
                    uint32_t b[4];
                    ldmatrix_x4(b, keys.at(step) + n * 16 * C::ROW_BYTES);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (step == 0) s[r][2 * n][e] = s[r][2 * n + 1][e] = 0.0f;
                        mma_16x8x16<T>(s[r][2 * n], a[r], b[0], b[1]);
                        mma_16x8x16<T>(s[r][2 * n + 1], a[r], b[2], b[3]);
                    }
                }
            }
            if constexpr (MAXIMA) find_highest(s, first, first + PASS);
        }
    }

    /* Takes the keys [begin, end) of the tile into `highest`. */
    __device__ __forceinline__ void find_highest(const Tile &s, int begin, int end) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float m = begin == 0 ? fmaxf(s[r][0][2 * i], s[r][0][2 * i + 1]) : highest[r][i];
#pragma unroll
                for (int j = begin == 0 ? 1 : begin / 8; j < end / 8; ++j)
                    m = fmaxf(m, fmaxf(s[r][j][2 * i], s[r][j][2 * i + 1]));
                highest[r][i] = m;
            }
    }

    /* Turns products (times `scale`: scores in base 2) into weights 2^(score - shift) and joins them to the sums. The
     * shift of a row is its maximum of some earlier moment. It is raised to the present one, and the output rescaled,
     * when some score of the warp exceeds its row's by more than 8; until then no lane needs to know the others'
     * maxima, and weights up to 2^8 are held by float32 sums and 16-bit operands as precisely as weights up to 1. */
    __device__ __forceinline__ void weigh(Tile &s, float scale) {
        bool outgrown = false;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) outgrown |= highest[r][i] * scale - shift[r][i] > 8.0f;
        if (__any_sync(~0u, outgrown)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float m = highest[r][i];
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                    const float raised = fmaxf(shift[r][i], __fmul_rn(m, scale));
                    const float factor = exp2_fast(shift[r][i] - raised);
                    shift[r][i] = raised;
                    sum[r][i] *= factor;
#pragma unroll
                    for (int j = 0; j < C::HEAD_DIM / 8; ++j)
                        out[r][j][2 * i] *= factor, out[r][j][2 * i + 1] *= factor;
                }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; ++e) s[r][j][e] = exp2_fast(s[r][j][e] * scale - shift[r][i]);
                    sum[r][i] += s[r][j][2 * i] + s[r][j][2 * i + 1];
                }
    }

    /* out += P V for this warp's KEYS value rows. */
    __device__ __forceinline__ void multiply_values(const Tile &s, const RowsAddress &values) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            uint32_t a[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    a[r][e] = pack<T>(s[r][2 * n + e / 2][e % 2 * 2], s[r][2 * n + e / 2][e % 2 * 2 + 1]);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, values.at(step) + n * 16 * C::ROW_BYTES);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    mma_16x8x16<T>(out[r][2 * step], a[r], b[0], b[1]);
                    mma_16x8x16<T>(out[r][2 * step + 1], a[r], b[2], b[3]);
                }
            }
        }
    }

    /* The warps of key parts > 0 put what they have at `slot` (MERGE_VALUES columns of 32 floats); the warp of part 0
     * takes it in, part by part in a fixed order. */
    __device__ __forceinline__ void give(float *slot, int lane) const {
        slot += lane;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) *slot = shift[r][i], slot[32] = sum[r][i], slot += 64;
#pragma unroll
            for (int j = 0; j < C::HEAD_DIM / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) *slot = out[r][j][e], slot += 32;
        }
    }
    __device__ __forceinline__ void take(const float *slot, int lane) {
        slot += lane;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            float mine[2], theirs[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float other = *slot, raised = fmaxf(shift[r][i], other);
                mine[i] = exp2_fast(shift[r][i] - raised);
                theirs[i] = exp2_fast(other - raised);
                shift[r][i] = raised;
                sum[r][i] = sum[r][i] * mine[i] + slot[32] * theirs[i];
                slot += 64;
            }
#pragma unroll
            for (int j = 0; j < C::HEAD_DIM / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    out[r][j][e] = out[r][j][e] * mine[e / 2] + *slot * theirs[e / 2], slot += 32;
        }
    }

    /* Normalises, writes the LSE, and the output through this warp's own rows of the query tile, which it alone reads.
     */
    __device__ __forceinline__ void finish(const MmaArgs &args, int warp_m, uint32_t rows, int lane) {
        const fa_problem &p = args.problem;
        const BlockPlace place(args);
        const int first_query = place.row_block * C::TILE_M + warp_m * C::WARP_ROWS;
        const int queries = min(C::WARP_ROWS, int(p.seq_q) - first_query);
        const float sink =
            p.sinks.data ? load_as_float(p.sinks.data, p.sinks_dtype, place.head * p.sinks.stride[0]) : -INFINITY;
        float *lse =
            static_cast<float *>(p.lse) + (int64_t(place.batch) * p.heads + place.head) * p.seq_q + first_query;
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float total = sum[r][i];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                const RowResult result = finish_fast(shift[r][i], total, sink);
                const int row = r * 16 + i * 8 + lane / 4;
                if (p.lse && lane % 4 == 0 && row < queries) lse[row] = result.lse;
#pragma unroll
                for (int j = 0; j < C::HEAD_DIM / 8; ++j)
                    store_shared(rows + Layout::offset(row, j) + lane % 4 * 4,
                                 pack<T>(out[r][j][2 * i] * result.factor, out[r][j][2 * i + 1] * result.factor));
            }
        __syncwarp();
        T *to = row_of<T>(p.out, place.batch, place.head, first_query);
        constexpr int CHUNKS = Layout::PERIOD, GROUPS = C::HEAD_DIM / 8 / CHUNKS; // of a row; as RowLoader splits them
        if (args.chunks_o) {
#pragma unroll
            for (int n = 0; n < C::WARP_ROWS * CHUNKS / 32; ++n)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const int row = n * (32 / CHUNKS) + lane / CHUNKS, chunk = g * CHUNKS + lane % CHUNKS;
                    const uint4 x = load_shared_16(rows + Layout::offset(row, chunk));
                    if (row < queries && chunk * 8 < p.head_dim_v)
                        reinterpret_cast<uint4 *>(to + row * p.out.stride[2])[chunk] = x;
                }
        } else {
#pragma unroll 1
            for (int n = lane; n < queries * (C::HEAD_DIM / 2); n += 32) {
                const int row = n / (C::HEAD_DIM / 2), column = n % (C::HEAD_DIM / 2) * 2;
                const uint32_t x = load_shared_4(rows + Layout::offset(row, column / 8) + column % 8 * 2);
                uint16_t *at = reinterpret_cast<uint16_t *>(to + row * p.out.stride[2] + column * p.out.stride[3]);
                if (column < p.head_dim_v) *at = uint16_t(x);
                if (column + 1 < p.head_dim_v) at[p.out.stride[3]] = uint16_t(x >> 16);
            }
        }
    }
};

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS_PER_SM) mma_kernel(const __grid_constant__ MmaArgs args) {
    extern __shared__ __align__(128) unsigned char shared[];
    using T = typename C::T;
    const fa_problem &p = args.problem;
    const Visibility &visible = args.visible;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp % C::WARPS_M, warp_n = warp / C::WARPS_M;

    const BlockPlace block(args);
    // Keys that the block's rows see, as tiles [tile_begin, tile_end); the warp's own: all of its rows, some of its
    // rows.
    const int block_query = block.row_block * C::TILE_M, block_last = min(block_query + C::TILE_M, int(p.seq_q)) - 1;
    const int keys_begin = visible.begin(block_query), keys_end = visible.end(block_last);
    const int tile_begin = keys_begin / C::TILE_N;
    const int tile_end = keys_begin < keys_end ? (keys_end + C::TILE_N - 1) / C::TILE_N : tile_begin;
    const int warp_query = block_query + warp_m * C::WARP_ROWS,
              warp_last = min(warp_query + C::WARP_ROWS - 1, block_last);
    const int warp_begin = visible.begin(warp_query), warp_end = warp_query <= warp_last ? visible.end(warp_last) : 0;
    const int whole_begin = visible.begin(warp_last), whole_end = visible.end(warp_query);

    const uint32_t query_tile = shared_address(shared), key_tiles = query_tile + C::QUERY_BYTES;
    const uint32_t value_tiles = key_tiles + C::STAGES * C::TILE_BYTES;
    const uint32_t warp_query_rows = query_tile + warp_m * C::WARP_ROWS * C::ROW_BYTES;
    const uint32_t warp_key_rows = warp_n * C::KEYS * C::ROW_BYTES; // in each tile

    using Loader = RowLoader<C::HEAD_DIM, C::THREADS, C::TILE_N>;
    const int last_tile = (tile_end - 1) * C::TILE_N;
    const int head_kv = args.group.quotient(block.head);
    Loader key_loader(row_of<T>(p.k, block.batch, head_kv, 0), p.k.stride, p.head_dim, visible.key_begin,
                      visible.key_end, last_tile);
    Loader value_loader(row_of<T>(p.v, block.batch, head_kv, 0), p.v.stride, p.head_dim_v, visible.key_begin,
                        visible.key_end, last_tile);
    auto load_keys = [&](int tile, int stage) {
        key_loader.copy(key_tiles + stage * C::TILE_BYTES, tile * C::TILE_N, !C::GENERAL || args.chunks_k);
    };
    auto load_values = [&](int tile, int stage) {
        value_loader.copy(value_tiles + stage * C::TILE_BYTES, tile * C::TILE_N, !C::GENERAL || args.chunks_v);
    };

    MmaWarp<C> mine(warp_query_rows, lane);
    const float scale = C::GENERAL ? 1.0f : args.score.scale_log2;
    ScorePlace place{block.batch, block.head, warp_query + lane / 4, 0};
    typename MmaWarp<C>::Tile s;

    typename MmaWarp<C>::KeysAddress key_address(key_tiles + warp_key_rows, lane);
    typename MmaWarp<C>::RowsAddress value_address(value_tiles + warp_key_rows, lane);
    if (C::KEEP_ADDRESSES) key_address.keep(), value_address.keep();
    auto second_product = [&](int stage) { mine.multiply_values(s, value_address.shifted(stage * C::TILE_BYTES)); };
    auto scores = [&](int key, bool masked, int stage) {
        const auto keys = key_address.shifted(stage * C::TILE_BYTES);
        if (MmaWarp<C>::TWO_PASSES && !masked) {
            mine.template multiply_keys<true>(s, keys);
            return;
        }
        mine.template multiply_keys<false>(s, keys);
        place.key = key + lane % 4 * 2;
        if constexpr (C::GENERAL) transform_scores<C::ROW_TILES, C::KEYS>(s, p, args.score, visible, place);
        if (masked) mask_scores<C::ROW_TILES, C::KEYS>(s, visible, place);
        mine.find_highest(s, 0, C::KEYS);
    };

    if (tile_begin < tile_end) {
        RowLoader<C::HEAD_DIM, C::THREADS, C::TILE_M> query_loader(
            row_of<T>(p.q, block.batch, block.head, 0), p.q.stride, p.head_dim, 0, int(p.seq_q), block_query);
        query_loader.copy(query_tile, block_query, !C::GENERAL || args.chunks_q);
        cp_async_commit();
    }

    if constexpr (C::STAGES == 1) {
        if (tile_begin < tile_end) {
            load_keys(tile_end - 1, 0);
            cp_async_commit();
            cp_async_wait<1>();
            __syncthreads();
            mine.load_query();
        }
        for (int tile = tile_end - 1; tile >= tile_begin; --tile) {
            const int key = tile * C::TILE_N + warp_n * C::KEYS;
            const bool some = key < warp_end && key + C::KEYS > warp_begin;
            const bool masked = key < whole_begin || key + C::KEYS > whole_end;
            cp_async_wait<0>();
            __syncthreads();
            load_values(tile, 0);
            cp_async_commit();
            auto next_keys = [&] {
                cp_async_wait<0>();
                __syncthreads();
                if (tile > tile_begin) load_keys(tile - 1, 0);
                cp_async_commit();
            };
            // The earlier the better, but addresses beside the scores and output of two row tiles are too many
            // registers.
            constexpr bool EARLY = C::ROW_TILES == 1;
            if (some) scores(key, masked, 0);
            if (EARLY) next_keys();
            if (some) mine.weigh(s, scale);
            if (!EARLY) next_keys();
            if (some) second_product(0);
        }
    } else {
        if (tile_begin < tile_end) {
#pragma unroll
            for (int n = 0; n < C::STAGES - 1; ++n) {
                if (tile_end - 1 - n >= tile_begin) load_keys(tile_end - 1 - n, n), load_values(tile_end - 1 - n, n);
                cp_async_commit();
            }
            cp_async_wait<C::STAGES - 1>();
            __syncthreads();
            mine.load_query();
        }
        int stage = 0;
        for (int tile = tile_end - 1; tile >= tile_begin; --tile) {
            const int key = tile * C::TILE_N + warp_n * C::KEYS;
            const bool some = key < warp_end && key + C::KEYS > warp_begin;
            const bool masked = key < whole_begin || key + C::KEYS > whole_end;
            cp_async_wait<C::STAGES - 2>();
            __syncthreads();
            const int next = tile - (C::STAGES - 1), free = stage == 0 ? C::STAGES - 1 : stage - 1;
            if (next >= tile_begin) load_keys(next, free), load_values(next, free);
            cp_async_commit();
            if (some) {
                scores(key, masked, stage);
                mine.weigh(s, scale);
                second_product(stage);
            }
            stage = stage == C::STAGES - 1 ? 0 : stage + 1;
        }
    }

    if constexpr (C::WARPS_N > 1) {
        float *slots = reinterpret_cast<float *>(shared + C::QUERY_BYTES);
        auto slot = [&](int part) { return slots + ((part - 1) * C::WARPS_M + warp_m) * C::MERGE_VALUES * 32; };
        __syncthreads();
        if (warp_n > 0) mine.give(slot(warp_n), lane);
        __syncthreads();
        if (warp_n > 0) return;
        for (int part = 1; part < C::WARPS_N; ++part) mine.take(slot(part), lane);
    }
    mine.finish(args, warp_m, warp_query_rows, lane);
}

} // namespace fa

#endif
