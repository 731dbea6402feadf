/* A bias on the scores of a main loop whose accumulators have queries as rows, straight from memory to registers.
 *
 * A lane reads 8 neighbouring keys of one of its rows in one access, so that the four lanes of a row read 64 bytes, and
 * the four exchange them for the columns that each has in an accumulator (quad_transpose). Loads are asked for before
 * the products that they are added to, and wait for nothing but their use. Shared memory has no part in it. */
#pragma once
#include "common/ptx.cuh"           // unpack
#include "sm90/common/epilogue.cuh" // quad_transpose
#include "sm90/common/schedule.cuh" // Tile

namespace fa::sm90 {

/* A bias whose rows of keys, counted from the call's first visible one, are 16-byte aligned and multiples of 16 bytes.
 */
struct BiasParams {
    const void *data;  // NULL: none
    int64_t stride[3]; // of B, H, Sq; 0 along an axis of extent 1
};

/* Of a block of kKeys keys, a thread's two rows. */
template <class T, int kKeys> struct BiasBlock {
    static_assert(kKeys % 32 == 0);
    uint32_t words[kKeys / 32][2]
                  [4]; // of 32 keys and a row: as read, 8 keys; in order, two keys of each of four eights

    /* Asks for the keys from first_key on of rows `row` and row + 8, those past the last row as those of the last. */
    __device__ __forceinline__ void load(const BiasParams &p, const Tile &tile, int row, int rows, int first_key,
                                         int keys, int lane) {
        const T *const head = static_cast<const T *>(p.data) + tile.batch * p.stride[0] + tile.head * p.stride[1];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const T *const from = head + min(row + 8 * r, rows - 1) * p.stride[2];
#pragma unroll
            for (int n = 0; n < kKeys / 32; ++n) {
                const int key = first_key + 32 * n + lane % 4 * 8;
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (key >= 0 && key < keys) eight = __ldg(reinterpret_cast<const uint4 *>(from + key));
                words[n][r][0] = eight.x, words[n][r][1] = eight.y, words[n][r][2] = eight.z, words[n][r][3] = eight.w;
            }
        }
    }
    /* From the order of memory to that of accumulators. The warp calls it. */
    __device__ __forceinline__ void order(int lane) {
#pragma unroll
        for (int n = 0; n < kKeys / 32; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) quad_transpose(words[n][r], lane % 4);
    }
    /* Of score i. */
    __device__ __forceinline__ float of(int i) const {
        const uint32_t word = words[i / 16][(i >> 1) & 1][i / 4 % 4];
        const float2 pair = unpack<T>(word);
        return i % 2 ? pair.y : pair.x;
    }
};

} // namespace fa::sm90
