/* Host side of gradients on Hopper: what a call is to its kernels, gradients, the order of tiles; and the kernel of
 * dsinks, which adds up what others leave. For the host's compilation of a kernel alone. */
#pragma once
#include "common/launch.cuh"
#include "common/limits.cuh" // divide_up, lengths_fit, shifted_band_of
#include "sm90/backward/kernel.cuh"
#include "sm90/common/instance.cuh"
#include "sm90/common/tensor_map.h"
#include <algorithm> // min, max

namespace fa::sm90 {

/* ---- dsinks: a head a thread block ---- */

constexpr int kSinkThreads = 256;

/* Adds up the parts of head h, (B, H, parts), in float64 and in an order that depends on their number alone. */
static __global__ void __launch_bounds__(kSinkThreads)
    backward_sinks(const float *parts, int64_t count, int64_t batch, int64_t heads, Gradient dsinks) {
    FA_CHAOS_BEGIN();
    __shared__ double sums[kSinkThreads];
    const int64_t h = blockIdx.x;
    double sum = 0;
    for (int64_t n = threadIdx.x; n < batch * count; n += kSinkThreads)
        sum += parts[(n / count * heads + h) * count + n % count];
    sums[threadIdx.x] = sum;
    for (int half = kSinkThreads / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x != 0) return;
    write_gradient(dsinks.data, dsinks.dtype, dsinks.accumulate, h * dsinks.stride[0], static_cast<float>(sums[0]));
}

/* ---- calls ---- */

/* MiB of streamed operands that a section of the longest-first order holds, given those of one head in bytes: as for
 * the forward, not measured here. */
[[maybe_unused]] static __host__ __device__ int64_t section_heads(int64_t head_bytes, int64_t sharing) {
    const int64_t bytes = (head_bytes <= 256 << 10 ? 16 : head_bytes <= 1 << 20 ? 32 : 64) << 20;
    const int64_t heads = head_bytes > 0 ? bytes / head_bytes : 1;
    return (heads > 1 ? heads : 1) * sharing;
}

[[maybe_unused]] static int backward_kind(const fa_forward &f) {
    if (f.softcap > 0) return kCapped;
    return f.left >= FA_UNBOUNDED && f.right >= FA_UNBOUNDED ? kFull : kMasked;
}

/* Rows [begin, end) of an operand alone. */
[[maybe_unused]] static fa_operand rows_of(const fa_operand &x, int64_t begin) {
    fa_operand part = x;
    part.data = static_cast<char *>(x.data) + begin * x.stride[2] * 2;
    return part;
}

[[maybe_unused]] static Gradient gradient(const fa_backward &p, fa_grad grad) {
    Gradient g = {};
    if (!(p.wants >> grad & 1)) return g;
    const fa_operand &x = p.grad[grad];
    g.data = x.data;
    g.dtype = p.grad_dtype[grad];
    g.accumulate = p.accumulate;
    const int size = int(fa_dtype_size(g.dtype));
    bool vectors = x.stride[3] == 1, pairs = vectors; // head_dim is at least 8
    for (int axis = 0; axis < 4; ++axis) {
        g.stride[axis] = x.stride[axis];
        if (axis < 3) vectors = vectors && x.stride[axis] % 8 == 0, pairs = pairs && x.stride[axis] % 2 == 0;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(x.data);
    g.vectors = vectors && g.dtype == p.forward.dtype && !p.accumulate && address % 16 == 0;
    g.pairs = pairs && address % (2 * size) == 0;
    return g;
}

[[maybe_unused]] static BackwardCall backward_call(const fa_backward &p) {
    const fa_forward &f = p.forward;
    const int64_t keys = f.key_end - f.key_begin;
    BackwardCall call = {};
    call.visible = shifted_band_of(f);
    call.score = score_params(f);
    call.seq_q = int(f.seq_q), call.seq_k = int(f.seq_k), call.key_begin = int(f.key_begin);
    if (keys > 0) {
        call.row_begin = std::max(0, 1 - call.visible.upper);
        call.row_end = int(std::min<int64_t>(f.seq_q, keys - call.visible.lower));
    }
    call.dout_row = p.dout.data ? 0 : 1 << 30;
    call.heads = int(f.heads), call.heads_kv = int(f.heads_kv), call.group = int(f.heads / f.heads_kv);
    call.head_dim = f.head_dim, call.head_dim_v = f.head_dim_v;
    return call;
}

/* Tiles of unequal length go longest first, dealt by a counter; others in the order of heads. Returns the grid. */
[[maybe_unused]] static int64_t order(Schedule *s, bool unequal, int64_t tiles, int64_t heads, int64_t section,
                                      uint32_t *counter, const fa_launch &launch) {
    const int64_t count = tiles * heads, blocks = std::min<int64_t>(count, launch.device->sm_count);
    *s = {};
    s->tiles = uint32_t(count);
    s->query_tiles = uint32_t(tiles);
    s->heads = UINT32_MAX; // of one "batch entry": all
    if (unequal && count > blocks) {
        s->section_heads = uint32_t(std::min(heads, section));
        s->counter = counter;
    }
    return blocks;
}

} // namespace fa::sm90
