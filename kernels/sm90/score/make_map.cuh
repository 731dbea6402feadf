/* Makes the pair maps (pair_map.cuh) of a call with a boolean mask or intervals: one launch before that of the kernels
 * that read them.
 *
 * A block of threads takes 64 queries x 512 keys. Of a mask a warp takes 16 queries: a lane reads 16 neighbouring keys
 * of two rows, in one access where they lie so, and the four lanes of a row exchange them for the columns that each has
 * in an accumulator. For keys as rows the bits of 64 x 64 pairs go through shared memory. Of intervals only the bits of
 * blocks are made: a block is seen where it meets the hull of its rows' intervals, and whole where all of them hold it.
 */
#pragma once
#include "common/intervals.cuh" // Intervals, intervals_of
#include "common/launch.cuh"    // fa_start
#include "common/limits.cuh"    // divide_up
#include "sm90/score/pair_map.cuh"
#include <algorithm> // max, min
#include <climits>   // INT_MAX

namespace fa::sm90 {

inline constexpr int kMapBlock = 64, kMapChunk = 8; // rows or columns of a block; blocks of keys that a CTA takes

/* A map that a launch writes. */
struct MadeMap {
    uint32_t *words; // NULL: not wanted
    uint8_t *seen, *whole;
};

struct MapParams {
    const uint8_t
        *mask; // of the call's first visible key; (B, H, Sq, Sk), an axis of extent 1 has stride 0; NULL: none
    int64_t stride[4];
    Intervals intervals;
    int key_begin;            // the call's first visible key
    int heads, rows, columns; // extents of the map; a block's where it is the same along the axis
    int row_blocks, column_blocks, bit_words;
    bool vectors;      // 16 keys lie side by side, 16-byte aligned
    MadeMap queries;   // with queries as rows; `seen` and `whole` are always made
    uint32_t *by_keys; // words with keys as rows; NULL: not wanted
    uint32_t *zeros;   // numbers that are set to 0
    int zero_count;
};

/* Bits 0 to 3: which bytes of a word are not 0. */
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
    const uint32_t tops = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) >> 7 & 0x01010101;
    return tops * 0x01020408 >> 24;
}

__device__ __forceinline__ uint32_t nonzero_bytes(const uint4 &x) {
    return nonzero_bytes(x.x) | nonzero_bytes(x.y) << 4 | nonzero_bytes(x.z) << 8 | nonzero_bytes(x.w) << 12;
}

/* Which of 16 keys from `column` on the mask leaves to query `row`; none beyond the mask's extents. */
__device__ __forceinline__ uint32_t mask_bits(const MapParams &p, const uint8_t *plane, int row, int column) {
    if (row >= p.rows) return 0;
    const uint8_t *const from = plane + row * p.stride[2] + column * p.stride[3];
    if (p.vectors && column + 16 <= p.columns) return nonzero_bytes(*reinterpret_cast<const uint4 *>(from));
    uint32_t bits = 0;
    for (int i = 0; i < min(16, p.columns - column); ++i) bits |= uint32_t(from[i * p.stride[3]] != 0) << i;
    return bits;
}

/* The same of queries `row` and row + 8 and `count` blocks of keys, of each the 16 keys from `column` on, as halves of
 * a word: of a whole chunk that is there all loads are on their way before the first is used. */
__device__ __forceinline__ void mask_pairs(uint32_t (&pairs)[kMapChunk], const MapParams &p, const uint8_t *plane,
                                           int row, int column, int count, bool whole) {
    if (p.vectors && whole) {
        const uint8_t *const from = plane + row * p.stride[2] + column;
        uint4 low[kMapChunk], high[kMapChunk];
#pragma unroll
        for (int n = 0; n < kMapChunk; ++n) {
            low[n] = *reinterpret_cast<const uint4 *>(from + n * kMapBlock);
            high[n] = *reinterpret_cast<const uint4 *>(from + 8 * p.stride[2] + n * kMapBlock);
        }
#pragma unroll
        for (int n = 0; n < kMapChunk; ++n) pairs[n] = nonzero_bytes(low[n]) | nonzero_bytes(high[n]) << 16;
        return;
    }
#pragma unroll
    for (int n = 0; n < kMapChunk; ++n) {
        pairs[n] = 0;
        if (n >= count) continue;
        const int first = column + n * kMapBlock;
        pairs[n] = mask_bits(p, plane, row, first) | mask_bits(p, plane, row + 8, first) << 16;
    }
}

/* Bits of 16 keys that are there, from `column` on. */
__device__ __forceinline__ uint32_t bits_there(const MapParams &p, int column) {
    return (1u << max(0, min(16, p.columns - column))) - 1;
}

/* From 16 neighbouring keys of rows l / 4 (low half) and l / 4 + 8 to a lane's word of a map. The warp calls it. */
__device__ __forceinline__ uint32_t accumulator_order(uint32_t keys, int lane) {
    uint32_t word = 0;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const uint32_t x = __shfl_sync(0xffffffff, keys, (lane & ~3) + quarter) >> 2 * (lane % 4);
        word |= ((x & 0x00030003) | (x >> 6 & 0x000c000c)) << 4 * quarter;
    }
    return word;
}

/* The keys that intervals n of a block of rows hold: some row's (least begin to most end), and all rows'. */
struct RowsHeld {
    int begin_least, begin_most, end_least, end_most;

    __device__ __forceinline__ bool meets(int first, int end) const { return first < end_most && end > begin_least; }
    __device__ __forceinline__ bool holds(int first, int end) const {
        return begin_most <= first && end <= end_least && begin_most < end_least;
    }
};

/* Of the block of rows from `row`. The warp calls it. */
__device__ __forceinline__ RowsHeld rows_held(const MapParams &p, int batch, int head, int row, int lane, int n) {
    RowsHeld held = {INT_MAX, INT_MIN, INT_MAX, INT_MIN};
    for (int i = row + lane; i < min(row + kMapBlock, p.rows); i += 32) {
        const Span<int> range = p.intervals.of_query(batch, head, i).of[n];
        const int begin = range.begin - p.key_begin, end = range.end - p.key_begin;
        if (begin < end) held.begin_least = min(held.begin_least, begin), held.end_most = max(held.end_most, end);
        held.begin_most = max(held.begin_most, begin), held.end_least = min(held.end_least, end);
    }
    return {__reduce_min_sync(0xffffffff, held.begin_least), __reduce_max_sync(0xffffffff, held.begin_most),
            __reduce_min_sync(0xffffffff, held.end_least), __reduce_max_sync(0xffffffff, held.end_most)};
}

static __global__ void __launch_bounds__(128) make_map(const __grid_constant__ MapParams p) {
    __shared__ alignas(8) uint16_t bits[2][kMapBlock][4]; // of two blocks in turn
    __shared__ uint32_t flags[4][2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = p.bit_words * (32 / kMapChunk); // those past the last block of keys write bits alone
    const int chunk = blockIdx.x % chunks, tile = blockIdx.x / chunks;
    const int row_block = tile % p.row_blocks, plane = tile / p.row_blocks;
    const int batch = plane / p.heads, head = plane % p.heads;
    const uint8_t *const mask = p.mask + batch * p.stride[0] + head * p.stride[1];
    const int row = row_block * kMapBlock + warp * 16 + lane / 4;
    if (blockIdx.x == 0)
        for (int n = threadIdx.x; n < p.zero_count; n += 128) p.zeros[n] = 0;

    uint32_t seen = 0, partial = 0; // of the chunk's blocks, by this lane's pairs
    const int count = p.mask ? min(kMapChunk, p.column_blocks - chunk * kMapChunk) : 0;
    if (!p.mask) seen = ~0u;
    uint32_t pairs[kMapChunk];
    if (p.mask)
        mask_pairs(pairs, p, mask, row, chunk * kMapChunk * kMapBlock + lane % 4 * 16, count,
                   (chunk + 1) * kMapChunk * kMapBlock <= p.columns && (row_block + 1) * kMapBlock <= p.rows);
#pragma unroll
    for (int n = 0; n < kMapChunk; ++n) {
        if (n >= count) break;
        const int block = chunk * kMapChunk + n, column = block * kMapBlock + lane % 4 * 16;
        const uint32_t low = pairs[n] & 0xffff, high = pairs[n] >> 16, there = bits_there(p, column);
        seen |= uint32_t((low | high) != 0) << n;
        partial |= uint32_t((row < p.rows && low != there) || (row + 8 < p.rows && high != there)) << n;
        if (p.queries.words) {
            const int64_t group = (int64_t(plane) * p.row_blocks + row_block) * 4 + warp;
            p.queries.words[(group * p.column_blocks + block) * 32 + lane] = accumulator_order(pairs[n], lane);
        }
        if (p.by_keys) {
            auto &square = bits[n % 2];
            square[warp * 16 + lane / 4][lane % 4] = low, square[warp * 16 + lane / 4 + 8][lane % 4] = high;
            // A thread that is a block ahead writes the other square; to write this one again it passes the next
            // barrier.
            __syncthreads();
            uint32_t word = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int query = i / 2 * 8 + lane % 4 * 2 + i % 2;
                const uint32_t keys = square[query][warp] >> lane / 4;
                word |= (keys & 1) << i | (keys >> 8 & 1) << (16 + i);
            }
            const int64_t group = (int64_t(plane) * p.column_blocks + block) * 4 + warp;
            p.by_keys[(group * p.row_blocks + row_block) * 32 + lane] = word;
        }
    }
    seen = __reduce_or_sync(0xffffffff, seen), partial = __reduce_or_sync(0xffffffff, partial);
    if (lane == 0) flags[warp][0] = seen, flags[warp][1] = partial;
    __syncthreads();
    if (warp != 0) return;
    for (int n = 1; n < 4; ++n) seen |= flags[n][0], partial |= flags[n][1];
    if (p.intervals.begins) { // a lane a block
        const int first = (chunk * kMapChunk + lane) * kMapBlock, end = min(first + kMapBlock, p.columns);
        bool meets = false, holds = false;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (n == p.intervals.count) break;
            const RowsHeld held = rows_held(p, batch, head, row_block * kMapBlock, lane, n);
            meets = meets || held.meets(first, end), holds = holds || held.holds(first, end);
        }
        seen &= __ballot_sync(0xffffffff, meets), partial |= __ballot_sync(0xffffffff, !holds);
    }
    const int64_t at = (int64_t(plane) * p.row_blocks + row_block) * chunks + chunk;
    if (lane == 0) p.queries.seen[at] = uint8_t(seen), p.queries.whole[at] = uint8_t(~partial);
}

/* ---- host ---- */

/* Whether a call has a map. */
inline bool has_map(const fa_forward &p) { return p.mask.data || p.intervals.data; }

/* The maps of a call in a workspace: their extents and places. */
struct MapPlan {
    int batch, heads, row_blocks, column_blocks, bit_words; // extents
    int64_t words, by_keys, bits, bytes;                    // places in bytes of each part; -1: not wanted
    bool step[4];                                           // whether it differs along B, H, Sq, Sk

    int64_t planes() const { return int64_t(batch) * heads; }
    int64_t bit_bytes() const { return divide_up(planes() * row_blocks * bit_words * 4, 256) * 256; }
};

/* Of a call's mask and intervals, over `keys` keys; `first` is the place in the workspace. A mask has words with
 * queries as rows and, where `by_keys`, with keys as rows. */
inline MapPlan map_plan(const fa_forward &p, int64_t keys, bool words, bool by_keys, int64_t first) {
    MapPlan m = {};
    for (int axis = 0; axis < 4; ++axis)
        m.step[axis] =
            (p.mask.data && p.mask.stride[axis]) || (p.intervals.data && (axis == 3 || p.intervals.stride[axis]));
    const auto blocks = [&](int axis, int64_t extent) {
        return int(m.step[axis] ? divide_up(extent, kMapBlock) : std::min<int64_t>(extent, 1));
    };
    m.batch = m.step[0] ? int(p.batch) : 1, m.heads = m.step[1] ? int(p.heads) : 1;
    m.row_blocks = blocks(2, p.seq_q), m.column_blocks = blocks(3, keys);
    m.bit_words = int(divide_up(m.column_blocks, 32));
    words = words && p.mask.data, by_keys = by_keys && p.mask.data;
    const int64_t pairs = m.planes() * m.row_blocks * m.column_blocks * (4 * 32 * sizeof(uint32_t));
    m.bits = first, first += 2 * m.bit_bytes();
    m.words = words ? first : -1, first += words ? pairs : 0;
    m.by_keys = by_keys ? first : -1, first += by_keys ? pairs : 0;
    m.bytes = first;
    return m;
}

inline uint32_t *map_part(const fa_launch &launch, int64_t at) {
    return at < 0 ? nullptr : reinterpret_cast<uint32_t *>(static_cast<char *>(launch.workspace) + at);
}

/* The map as a main loop with queries as rows takes it. */
inline PairMap pair_map(const MapPlan &m, const fa_launch &launch) {
    return {.words = map_part(launch, m.words),
            .seen = map_part(launch, m.bits),
            .whole = map_part(launch, m.bits + m.bit_bytes()),
            .heads = m.heads,
            .row_blocks = m.row_blocks,
            .column_blocks = m.column_blocks,
            .bit_words = m.bit_words,
            .batch_step = m.step[0],
            .head_step = m.step[1],
            .row_step = m.step[2],
            .column_step = m.step[3]};
}

/* The same with keys as rows, in words alone. */
inline PairMap pair_map_of_keys(const MapPlan &m, const fa_launch &launch) {
    return {.words = map_part(launch, m.by_keys),
            .heads = m.heads,
            .row_blocks = m.column_blocks,
            .column_blocks = m.row_blocks,
            .batch_step = m.step[0],
            .head_step = m.step[1],
            .row_step = m.step[3],
            .column_step = m.step[2]};
}

/* Makes them, and zeros of some numbers of the workspace. */
inline fa_code launch_map(const MapPlan &m, const fa_forward &p, int64_t keys, uint32_t *zeros, int zero_count,
                          const fa_launch &launch) {
    MapParams params = {};
    if (p.mask.data) params.mask = static_cast<const uint8_t *>(p.mask.data) + p.key_begin * p.mask.stride[3];
    for (int axis = 0; axis < 4; ++axis) params.stride[axis] = p.mask.data ? p.mask.stride[axis] : 0;
    params.intervals = intervals_of(p);
    params.key_begin = static_cast<int>(p.key_begin);
    params.heads = m.heads;
    params.rows = m.step[2] ? static_cast<int>(p.seq_q) : kMapBlock;
    params.columns = m.step[3] ? static_cast<int>(keys) : kMapBlock;
    params.row_blocks = m.row_blocks, params.column_blocks = m.column_blocks, params.bit_words = m.bit_words;
    int64_t places = reinterpret_cast<uintptr_t>(params.mask);
    for (int axis = 0; axis < 3; ++axis) places |= params.stride[axis];
    params.vectors = params.stride[3] == 1 && places % 16 == 0;
    params.queries = {map_part(launch, m.words), reinterpret_cast<uint8_t *>(map_part(launch, m.bits)),
                      reinterpret_cast<uint8_t *>(map_part(launch, m.bits + m.bit_bytes()))};
    params.by_keys = map_part(launch, m.by_keys);
    params.zeros = zeros, params.zero_count = zero_count;
    const int64_t blocks = m.planes() * m.row_blocks * m.bit_words * (32 / kMapChunk);
    return fa_start(make_map, blocks, 128, 0, launch, params);
}

} // namespace fa::sm90
