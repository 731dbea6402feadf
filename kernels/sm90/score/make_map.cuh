/* Makes the pair maps (pair_map.cuh) of a call with a boolean mask: one launch before that of the kernels that read
 * them.
 *
 * A block of threads takes 64 queries x 512 keys, a warp 16 queries of it. A lane reads 16 neighbouring keys of two
 * rows, in one access where they lie so, and the four lanes of a row exchange them for the columns that each has in an
 * accumulator. For keys as rows the bits of 64 x 64 pairs go through shared memory. */
#pragma once
#include "common/launch.cuh" // fa_start
#include "common/limits.cuh" // divide_up
#include "sm90/score/pair_map.cuh"
#include <algorithm> // max, min

namespace fa::sm90 {

inline constexpr int kMapBlock = 64, kMapChunk = 8; // rows or columns of a block; blocks of keys that a CTA takes

/* A map that a launch writes. */
struct MadeMap {
    uint32_t *words; // NULL: not wanted
    uint8_t *seen, *whole;
};

struct MapParams {
    const uint8_t *mask; // of the call's first visible key; (B, H, Sq, Sk), an axis of extent 1 has stride 0
    int64_t stride[4];
    int heads, rows, columns; // extents of the mask; a block's where it is the same along the axis
    int row_blocks, column_blocks, bit_words;
    bool vectors;      // 16 keys lie side by side, 16-byte aligned
    MadeMap queries;   // with queries as rows; `seen` and `whole` are always made
    uint32_t *by_keys; // words with keys as rows; NULL: not wanted
    uint32_t *counter; // set to 0; NULL: none
};

/* Bits 0 to 3: which bytes of a word are not 0. */
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
    const uint32_t tops = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) >> 7 & 0x01010101;
    return tops * 0x01020408 >> 24;
}

/* Which of 16 keys from `column` on the mask leaves to query `row`; none beyond the mask's extents. */
__device__ __forceinline__ uint32_t mask_bits(const MapParams &p, const uint8_t *plane, int row, int column) {
    if (row >= p.rows) return 0;
    const uint8_t *const from = plane + row * p.stride[2] + column * p.stride[3];
    if (p.vectors && column + 16 <= p.columns) {
        const uint4 x = *reinterpret_cast<const uint4 *>(from);
        return nonzero_bytes(x.x) | nonzero_bytes(x.y) << 4 | nonzero_bytes(x.z) << 8 | nonzero_bytes(x.w) << 12;
    }
    uint32_t bits = 0;
    for (int i = 0; i < min(16, p.columns - column); ++i) bits |= uint32_t(from[i * p.stride[3]] != 0) << i;
    return bits;
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

static __global__ void __launch_bounds__(128) make_map(const __grid_constant__ MapParams p) {
    __shared__ alignas(8) uint16_t bits[2][kMapBlock][4]; // of two blocks in turn
    __shared__ uint32_t flags[4][2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = p.bit_words * (32 / kMapChunk); // those past the last block of keys write bits alone
    const int chunk = blockIdx.x % chunks, tile = blockIdx.x / chunks;
    const int row_block = tile % p.row_blocks, plane = tile / p.row_blocks;
    const uint8_t *const mask = p.mask + plane / p.heads * p.stride[0] + plane % p.heads * p.stride[1];
    const int row = row_block * kMapBlock + warp * 16 + lane / 4;
    if (p.counter && blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;

    uint32_t seen = 0, partial = 0; // of the chunk's blocks, by this lane's pairs
    const int count = min(kMapChunk, p.column_blocks - chunk * kMapChunk);
    for (int n = 0; n < count; ++n) {
        const int block = chunk * kMapChunk + n, column = block * kMapBlock + lane % 4 * 16;
        const uint32_t low = mask_bits(p, mask, row, column), high = mask_bits(p, mask, row + 8, column);
        const uint32_t there = bits_there(p, column);
        seen |= uint32_t((low | high) != 0) << n;
        partial |= uint32_t((row < p.rows && low != there) || (row + 8 < p.rows && high != there)) << n;
        if (p.queries.words) {
            const int64_t group = (int64_t(plane) * p.row_blocks + row_block) * 4 + warp;
            p.queries.words[(group * p.column_blocks + block) * 32 + lane] = accumulator_order(low | high << 16, lane);
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
    if (threadIdx.x == 0) {
        for (int n = 1; n < 4; ++n) seen |= flags[n][0], partial |= flags[n][1];
        const int64_t at = (int64_t(plane) * p.row_blocks + row_block) * chunks + chunk;
        p.queries.seen[at] = uint8_t(seen), p.queries.whole[at] = uint8_t(~partial);
    }
}

/* ---- host ---- */

/* The maps of a call in a workspace: their extents and places. */
struct MapPlan {
    int batch, heads, row_blocks, column_blocks, bit_words; // extents
    int64_t words, by_keys, bits, bytes;                    // places in bytes of each part; -1: not wanted

    int64_t planes() const { return int64_t(batch) * heads; }
};

/* Of a mask over `rows` queries and `keys` keys of a call; `first` is the place in the workspace. */
inline MapPlan map_plan(const fa_forward &p, int64_t keys, bool words, bool by_keys, int64_t first) {
    const auto blocks = [](int64_t stride, int64_t extent) {
        return int(stride ? divide_up(extent, kMapBlock) : std::min<int64_t>(extent, 1));
    };
    MapPlan m = {};
    m.batch = p.mask.stride[0] ? int(p.batch) : 1, m.heads = p.mask.stride[1] ? int(p.heads) : 1;
    m.row_blocks = blocks(p.mask.stride[2], p.seq_q), m.column_blocks = blocks(p.mask.stride[3], keys);
    m.bit_words = int(divide_up(m.column_blocks, 32));
    const int64_t pairs = m.planes() * m.row_blocks * m.column_blocks * (4 * 32 * sizeof(uint32_t));
    m.bits = first, first += 2 * divide_up(m.planes() * m.row_blocks * m.bit_words * 4, 256) * 256;
    m.words = words ? first : -1, first += words ? pairs : 0;
    m.by_keys = by_keys ? first : -1, first += by_keys ? pairs : 0;
    m.bytes = first;
    return m;
}

inline uint32_t *map_part(const fa_launch &launch, int64_t at) {
    return at < 0 ? nullptr : reinterpret_cast<uint32_t *>(static_cast<char *>(launch.workspace) + at);
}

/* The map as a main loop with queries as rows takes it. */
inline PairMap pair_map(const MapPlan &m, const fa_forward &p, const fa_launch &launch) {
    uint32_t *const seen = map_part(launch, m.bits);
    const int64_t whole = divide_up(m.planes() * m.row_blocks * m.bit_words * 4, 256) * 64;
    return {map_part(launch, m.words),
            seen,
            seen + whole,
            m.heads,
            m.row_blocks,
            m.column_blocks,
            m.bit_words,
            p.mask.stride[0] != 0,
            p.mask.stride[1] != 0,
            p.mask.stride[2] != 0,
            p.mask.stride[3] != 0};
}

/* The map as one with keys as rows takes it, in words alone. */
inline PairMap pair_map_of_keys(const MapPlan &m, const fa_forward &p, const fa_launch &launch) {
    PairMap map = {};
    map.words = map_part(launch, m.by_keys);
    map.heads = m.heads, map.row_blocks = m.column_blocks, map.column_blocks = m.row_blocks;
    map.batch_step = p.mask.stride[0] != 0, map.head_step = p.mask.stride[1] != 0;
    map.row_step = p.mask.stride[3] != 0, map.column_step = p.mask.stride[2] != 0;
    return map;
}

/* Makes them. `counter`, or NULL, becomes 0. */
inline fa_code launch_map(const MapPlan &m, const fa_forward &p, int64_t keys, uint32_t *counter,
                          const fa_launch &launch) {
    const PairMap made = pair_map(m, p, launch);
    MapParams params = {};
    params.mask = static_cast<const uint8_t *>(p.mask.data) + p.key_begin * p.mask.stride[3];
    for (int axis = 0; axis < 4; ++axis) params.stride[axis] = p.mask.stride[axis];
    params.heads = m.heads;
    params.rows = p.mask.stride[2] ? int(p.seq_q) : kMapBlock;
    params.columns = p.mask.stride[3] ? int(keys) : kMapBlock;
    params.row_blocks = m.row_blocks, params.column_blocks = m.column_blocks, params.bit_words = m.bit_words;
    int64_t places = reinterpret_cast<uintptr_t>(params.mask);
    for (int axis = 0; axis < 3; ++axis) places |= p.mask.stride[axis];
    params.vectors = p.mask.stride[3] == 1 && places % 16 == 0;
    params.queries = {const_cast<uint32_t *>(made.words),
                      reinterpret_cast<uint8_t *>(const_cast<uint32_t *>(made.seen)),
                      reinterpret_cast<uint8_t *>(const_cast<uint32_t *>(made.whole))};
    params.by_keys = map_part(launch, m.by_keys);
    params.counter = counter;
    const int64_t blocks = m.planes() * m.row_blocks * m.bit_words * (32 / kMapChunk);
    return fa_start(make_map, blocks, 128, 0, launch, params);
}

} // namespace fa::sm90
