/* PTX instructions as functions: what ptx.py makes of inline assembly. Operands come in the order of the instruction;
 * lists {a, b} are arrays of pointers, addresses are of the shared window unless the name says otherwise. */
#pragma once
#include <array>
#include <string.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_math.h"
#include "emulator.h"

namespace emu::ptx {

template <class T, class... Rest> auto list(T &&first, Rest &&...rest) {
    return std::array<std::remove_reference_t<T> *, 1 + sizeof...(Rest)>{&first, &rest...};
}

inline float from_bits(uint16_t bits, bool bf16) {
    return bf16 ? __bfloat162float({bits}) : __half2float(__half{bits});
}
inline uint16_t to_bits(float x, bool bf16) { return bf16 ? __float2bfloat16_rn(x).bits : __float2half_rn(x).bits; }

inline struct Ignored {
} ignored; // the operand _
template <class... Operand> void nothing(Operand &&...) {}
template <class To, class From> void mov(To &to, const From &from) { to = static_cast<To>(from); }

/* ---- loads and stores ---- */

template <class Unit, size_t N, class T> void st_shared(uint32_t to, const std::array<T *, N> &x) {
    static_assert(sizeof(T) == sizeof(Unit));
    char data[N * sizeof(T)];
    for (size_t n = 0; n < N; ++n) memcpy(data + n * sizeof(T), x[n], sizeof(T));
    write_shared(self->lane, to, data, sizeof data);
}
template <class Unit, class T> void st_shared(uint32_t to, const T &x) { st_shared<Unit>(to, std::array{&x}); }

template <class Unit, size_t N, class T> void ld_shared(const std::array<T *, N> &x, uint32_t from) {
    static_assert(sizeof(T) == sizeof(Unit));
    char data[N * sizeof(T)];
    read_shared(self->lane, data, from, sizeof data);
    for (size_t n = 0; n < N; ++n) memcpy(x[n], data + n * sizeof(T), sizeof(T));
}
template <class Unit, class T> void ld_shared(T &x, uint32_t from) { ld_shared<Unit>(std::array{&x}, from); }

/* Adds to float32 in global memory: fibers do not interrupt each other. */
template <size_t N> void red_global(float *to, const std::array<const float *, N> &x) {
    for (size_t n = 0; n < N; ++n) to[n] += *x[n];
}

template <class T> void ld_global(T &x, const T *from) { x = *from; }

/* Loads of values that another block writes: polls first, since this block waits for them. */
template <class T> void ld_awaited(T &x, const T *from) {
    poll();
    x = *from;
}
template <class T> void st_awaited(T *to, std::type_identity_t<T> x) {
    *to = x;
    perhaps_yield();
}

/* cp.async of 16, 8 or 4 bytes; `given`: how many of them are read; a predicate instead ignores the source. */
inline void cp_async(uint32_t to, const void *from, uint32_t bytes) { copy_async(to, from, bytes, bytes); }
inline void cp_async(uint32_t to, const void *from, uint32_t bytes, bool ignores) {
    copy_async(to, from, bytes, ignores ? 0 : bytes);
}
template <class Size>
requires(!std::is_same_v<Size, bool>) void cp_async(uint32_t to, const void *from, uint32_t bytes, Size given) {
    copy_async(to, from, bytes, static_cast<uint32_t>(given));
}

/* ---- matrices of a warp ---- */

/* 8x8 matrices of 16-bit elements: lane 8 m + r gives the address of row r of matrix m. */
template <size_t N, bool TRANSPOSED> void ldmatrix(const std::array<uint32_t *, N> &to, uint32_t row) {
    struct Slot {
        std::array<uint32_t *, N> to;
        uint32_t row;
    } slot = {to, row};
    together("ldmatrix", ~0u, slot, [](Slot *const(&lane)[32]) {
        uint16_t x[N][8][8];
        for (size_t m = 0; m < N; ++m)
            for (int r = 0; r < 8; ++r) read_shared(8 * m + r, x[m][r], lane[8 * m + r]->row, 16);
        for (int l = 0; l < 32; ++l)
            for (size_t m = 0; m < N; ++m) {
                const int r = l / 4, c = l % 4 * 2;
                const uint32_t low = TRANSPOSED ? x[m][c][r] : x[m][r][c],
                               high = TRANSPOSED ? x[m][c + 1][r] : x[m][r][c + 1];
                *lane[l]->to[m] = low | high << 16;
            }
    });
}
template <size_t N, bool TRANSPOSED> void stmatrix(uint32_t row, const std::array<uint32_t *, N> &from) {
    struct Slot {
        std::array<uint32_t *, N> from;
        uint32_t row;
    } slot = {from, row};
    together("stmatrix", ~0u, slot, [](Slot *const(&lane)[32]) {
        for (size_t m = 0; m < N; ++m)
            for (int r = 0; r < 8; ++r) {
                uint16_t x[8];
                for (int c = 0; c < 8; ++c) {
                    const uint32_t word = TRANSPOSED ? *lane[c * 4 + r / 2]->from[m] : *lane[r * 4 + c / 2]->from[m];
                    x[c] = static_cast<uint16_t>((TRANSPOSED ? r : c) % 2 ? word >> 16 : word);
                }
                write_shared(8 * m + r, lane[8 * m + r]->row, x, 16);
            }
    });
}
template <class Word> void movmatrix_trans(Word &to, uint32_t from) {
    struct Slot {
        uint32_t word;
    } slot = {from};
    together("movmatrix", ~0u, slot, [](Slot *const(&lane)[32]) {
        uint32_t old[32];
        for (int l = 0; l < 32; ++l) old[l] = lane[l]->word;
        const auto at = [&](int r, int c) { return old[r * 4 + c / 2] >> c % 2 * 16 & 0xffff; };
        for (int l = 0; l < 32; ++l) lane[l]->word = at(l % 4 * 2, l / 4) | at(l % 4 * 2 + 1, l / 4) << 16;
    });
    to = slot.word;
}

/* D = A B + C for a 16x8 tile of float32, K 8 or 16 columns of 16-bit elements. */
template <int K, bool BF16>
void mma_m16n8(const std::array<float *, 4> &d, const std::array<const uint32_t *, K / 4> &a,
               const std::array<const uint32_t *, K / 8> &b, const std::array<const float *, 4> &c) {
    struct Slot {
        float d[4];
        uint32_t a[K / 4], b[K / 8];
    } slot;
    for (int i = 0; i < 4; ++i) slot.d[i] = *c[i];
    for (int i = 0; i < K / 4; ++i) slot.a[i] = *a[i];
    for (int i = 0; i < K / 8; ++i) slot.b[i] = *b[i];
    together("mma.sync", ~0u, slot, [](Slot *const(&lane)[32]) {
        float x[16][K], y[K][8];
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < K / 4; ++i)
                for (int h = 0; h < 2; ++h)
                    x[l / 4 + i % 2 * 8][i / 2 * 8 + l % 4 * 2 + h] =
                        from_bits(uint16_t(lane[l]->a[i] >> 16 * h), BF16);
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < K / 8; ++i)
                for (int h = 0; h < 2; ++h)
                    y[i * 8 + l % 4 * 2 + h][l / 4] = from_bits(uint16_t(lane[l]->b[i] >> 16 * h), BF16);
        for (int r = 0; r < 16; ++r) {
            float sum[8] = {};
            for (int k = 0; k < K; ++k)
                for (int n = 0; n < 8; ++n) sum[n] += x[r][k] * y[k][n];
            for (int n = 0; n < 8; ++n) lane[r % 8 * 4 + n / 2]->d[r / 8 * 2 + n % 2] += sum[n];
        }
    });
    for (int i = 0; i < 4; ++i) *d[i] = slot.d[i];
}
template <int K, bool BF16, class A, class B, class C>
void mma(const std::array<float *, 4> &d, const std::array<A *, K / 4> &a, const B &b, const std::array<C *, 4> &c) {
    std::array<const uint32_t *, K / 4> x;
    std::array<const uint32_t *, K / 8> y;
    for (int i = 0; i < K / 4; ++i) x[i] = a[i];
    if constexpr (K == 8 && std::is_integral_v<B>)
        y[0] = &b;
    else
        for (int i = 0; i < K / 8; ++i) y[i] = b[i];
    mma_m16n8<K, BF16>(d, x, y, {c[0], c[1], c[2], c[3]});
}

/* ---- conversions ---- */

template <bool BF16, class Word> void cvt_x2(Word &to, float high, float low) {
    to = static_cast<uint32_t>(to_bits(high, BF16)) << 16 | to_bits(low, BF16);
}

template <bool BF16, class Word> void mul_x2(Word &to, uint32_t a, uint32_t b) {
    const auto half = [&](int shift) {
        return to_bits(from_bits(uint16_t(a >> shift), BF16) * from_bits(uint16_t(b >> shift), BF16), BF16);
    };
    to = static_cast<uint32_t>(half(16)) << 16 | half(0);
}

/* ---- mbarriers, elections ---- */

template <class State> void mbarrier_arrive(State &&, uint32_t address) { emu::mbarrier_arrive(address); }
inline void mbarrier_arrive(uint32_t address) { emu::mbarrier_arrive(address); }
template <class State> void mbarrier_arrive_expect(State &&, uint32_t address, uint32_t bytes) {
    mbarrier_expect(address, bytes);
    emu::mbarrier_arrive(address);
}
inline void mbarrier_try_wait(bool &done, uint32_t address, uint32_t parity) { done = mbarrier_wait(address, parity); }

template <class Lane, class Elected> void elect(Lane &&, Elected &elected, uint32_t mask) {
    bool mine = false;
    together("elect.sync", mask, mine, [](bool *const(&lane)[32]) {
        for (bool *each : lane)
            if (each) return void(*each = true);
    });
    elected = mine;
}

/* ---- clusters ---- */

inline unsigned cluster_rank() { return self->rank; }
inline unsigned cluster_index_x() { return self->block.x / cluster_dim.x; }
template <class To> void mapa(To &to, uint32_t address, uint32_t rank) { to = (address & 0xffffff) | rank << 24; }
template <size_t N, class T> void st_async(uint32_t to, const std::array<T *, N> &x, uint32_t barrier) {
    char data[16];
    static_assert(N * sizeof(T) <= sizeof data);
    for (size_t n = 0; n < N; ++n) memcpy(data + n * sizeof(T), x[n], sizeof(T));
    send_async(to, barrier, data, N * sizeof(T));
}

/* ---- tensor copies ---- */

template <size_t N> struct Box { // [map, {coordinates}]
    const void *map;
    int at[N];
};
template <class T, size_t N> Box<N> box(const void *map, const std::array<T *, N> &at) {
    Box<N> x = {map, {}};
    for (size_t n = 0; n < N; ++n) x.at[n] = static_cast<int>(*at[n]);
    return x;
}
template <size_t N, class... Hint> void tensor_load(uint32_t to, const Box<N> &from, uint32_t barrier, Hint...) {
    emu::tensor_load(to, from.map, from.at, N, barrier);
}
template <size_t N> void tensor_prefetch(const Box<N> &from) { emu::tensor_prefetch(from.map, N); }
template <size_t N, class... Hint> void tensor_store(const Box<N> &to, uint32_t from, Hint...) {
    emu::tensor_store(to.map, to.at, N, from);
}

/* ---- wgmma ---- */

template <int N, bool BF16, class A>
void wgmma(const std::array<float *, N / 2> &d, const A &a, uint64_t b, bool accumulate, int scale_a, int scale_b,
           int transposed_a_or_b, int transposed_b = -1) {
    Wgmma mine = {};
    mine.n = N, mine.bf16 = BF16, mine.accumulate = accumulate, mine.scale_a = scale_a, mine.scale_b = scale_b;
    mine.b = b;
    if constexpr (std::is_integral_v<A>) {
        mine.a = a, mine.a_mn_major = transposed_a_or_b == 1, mine.b_mn_major = transposed_b == 1;
    } else {
        mine.a_in_registers = true, mine.b_mn_major = transposed_a_or_b == 1;
        for (int i = 0; i < 4; ++i) mine.word[i] = *a[i];
    }
    for (int i = 0; i < N / 2; ++i)
        if (d[i] != d[0] + i) fail("wgmma: the emulator needs accumulators that are one array in its order");
    mine.d = d[0];
    wgmma_issue(mine);
}

} // namespace emu::ptx
