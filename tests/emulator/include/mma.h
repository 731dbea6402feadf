/* nvcuda::wmma for 16x16x16 products of 16-bit elements. Which lane holds which element is the emulator's own: lane l
 * has row l / 2, columns 8 (l % 2) to 8 (l % 2) + 7. */
#pragma once
#include <string.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"
#include "ptx.h"

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "the emulator knows 16x16x16");
    static constexpr int num_elements = 8;
    T x[8];
};

inline int first_row() { return int(emu::self->lane / 2); }
inline int first_column() { return int(emu::self->lane % 2 * 8); }

/* Element i of this lane lies at (row, column + i) of the matrix, or where COLUMNS at its transpose. */
template <bool COLUMNS, class Fragment, class T> void read(Fragment &f, const T *from, unsigned pitch) {
    for (int i = 0; i < 8; ++i) {
        const int r = first_row(), c = first_column() + i;
        f.x[i] = from[COLUMNS ? c * pitch + r : r * pitch + c];
    }
    emu::meet("wmma::load_matrix_sync", ~0u);
}
template <class Use, class T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, row_major> &f, const T *from, unsigned pitch) {
    read<false>(f, from, pitch);
}
template <class Use, class T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, col_major> &f, const T *from, unsigned pitch) {
    read<true>(f, from, pitch);
}
template <class T>
void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &f, const T *from, unsigned pitch, layout_t layout) {
    layout == mem_col_major ? read<true>(f, from, pitch) : read<false>(f, from, pitch);
}

template <class T>
void store_matrix_sync(T *to, const fragment<accumulator, 16, 16, 16, T> &f, unsigned pitch, layout_t layout) {
    for (int i = 0; i < 8; ++i) {
        const int r = first_row(), c = first_column() + i;
        to[layout == mem_col_major ? c * pitch + r : r * pitch + c] = f.x[i];
    }
    emu::meet("wmma::store_matrix_sync", ~0u);
}

template <class Use, class T, class Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout> &f, std::type_identity_t<T> value) {
    for (T &x : f.x) x = value;
}

inline float as_float(__half x) { return __half2float(x); }
inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, class LayoutA, class LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float> &d, const fragment<matrix_a, 16, 16, 16, T, LayoutA> &a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB> &b, const fragment<accumulator, 16, 16, 16, float> &c) {
    struct Slot {
        float a[8], b[8], d[8];
    } slot;
    for (int i = 0; i < 8; ++i) slot.a[i] = as_float(a.x[i]), slot.b[i] = as_float(b.x[i]), slot.d[i] = c.x[i];
    emu::together("wmma::mma_sync", ~0u, slot, [](Slot *const(&lane)[32]) {
        for (int l = 0; l < 32; ++l) {
            float sum[8] = {};
            for (int k = 0; k < 16; ++k) {
                const float x = lane[l / 2 * 2 + k / 8]->a[k % 8];
                const float *y = lane[2 * k + l % 2]->b;
                for (int i = 0; i < 8; ++i) sum[i] += x * y[i];
            }
            for (int i = 0; i < 8; ++i) lane[l]->d[i] += sum[i];
        }
    });
    memcpy(d.x, slot.d, sizeof slot.d);
}

} // namespace nvcuda::wmma

namespace emu::ptx {

/* wmma.load of a 16x16 matrix of 16-bit elements in shared memory to four words: eight elements as above. */
template <bool COLUMNS> void wmma_load(const std::array<uint32_t *, 4> &to, uint32_t from, unsigned pitch) {
    for (int i = 0; i < 8; ++i) {
        const int r = nvcuda::wmma::first_row(), c = nvcuda::wmma::first_column() + i;
        uint16_t x;
        read_shared(self->lane, &x, from + 2 * (COLUMNS ? c * pitch + r : r * pitch + c), 2);
        *to[i / 2] = i % 2 ? *to[i / 2] | uint32_t(x) << 16 : x;
    }
    meet("wmma.load", ~0u);
}

} // namespace emu::ptx
