/* The functions of cuBLAS that kernels/cublas calls, on the CPU and at once: products of column-major matrices, summed
 * in float32. */
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

enum Type { kReal32F = 0, kReal16F = 2, kRealBf16 = 14 }; // cudaDataType_t

float load(const void *data, int type, int64_t at) {
    if (type == kReal32F) return static_cast<const float *>(data)[at];
    if (type == kReal16F) return static_cast<float>(static_cast<const _Float16 *>(data)[at]);
    const uint32_t bits = uint32_t(static_cast<const uint16_t *>(data)[at]) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

void store(void *data, int type, int64_t at, float x) {
    if (type == kReal32F) {
        static_cast<float *>(data)[at] = x;
    } else if (type == kReal16F) {
        static_cast<_Float16 *>(data)[at] = static_cast<_Float16>(x);
    } else {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (x == x) bits += 0x7fff + (bits >> 16 & 1); // to nearest, ties to even
        static_cast<uint16_t *>(data)[at] = uint16_t(bits >> 16);
    }
}

/* A matrix, or its transpose. */
struct Matrix {
    const void *data;
    int type, op, ld;
    int64_t stride; // of the batch

    float operator()(int64_t n, int64_t i, int64_t j) const {
        return load(data, type, n * stride + (op ? i * ld + j : j * ld + i));
    }
};

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cublasCreate_v2(void **handle) {
    static char made;
    *handle = &made;
    return 0;
}
EXPORT int cublasDestroy_v2(void *) { return 0; }
EXPORT int cublasSetStream_v2(void *, void *) { return 0; }
EXPORT int cublasSetWorkspace_v2(void *, void *, size_t) { return 0; }
EXPORT int cublasSetMathMode(void *, int) { return 0; }
EXPORT const char *cublasGetStatusName(int) { return "CUBLAS_STATUS_SUCCESS"; }

/* beta is 0. Eight partial sums, as the order of a library's is not that of the plain formula. */
EXPORT int cublasGemmStridedBatchedEx(void *, int op_a, int op_b, int m, int n, int k, const float *alpha,
                                      const void *a_data, int a_type, int a_ld, long long a_stride, const void *b_data,
                                      int b_type, int b_ld, long long b_stride, const float *, void *c, int c_type,
                                      int c_ld, long long c_stride, int count, int, int) {
    const Matrix a = {a_data, a_type, op_a, a_ld, a_stride}, b = {b_data, b_type, op_b, b_ld, b_stride};
    for (int x = 0; x < count; ++x)
        for (int j = 0; j < n; ++j)
            for (int i = 0; i < m; ++i) {
                float parts[8] = {}, sum = 0;
                for (int d = 0; d < k; ++d) parts[d % 8] += a(x, i, d) * b(x, d, j);
                for (float part : parts) sum += part;
                store(c, c_type, x * c_stride + int64_t(j) * c_ld + i, *alpha * sum);
            }
    return 0;
}
