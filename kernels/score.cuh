/* From the product q . k to the score in base 2, in the order that a call defines: scale, softcap, bias.
 *
 * Scores are kept multiplied by log2(e), so that the exponential is one ex2 instruction: exp(s) = 2^(s log2 e). */
#ifndef FA_SCORE_CUH
#define FA_SCORE_CUH

#include <stdint.h> // int64_t

#include "convert.cuh" // load_as_float
#include "fa.h"        // fa_problem

namespace fa {

inline constexpr float LOG2_E = 1.4426950408889634f;
inline constexpr float LN_2 = 0.6931471805599453f;

/* What turns a product into a score; made on the host in float64, once a launch. */
struct ScoreParams {
    float scale_log2; // scale * log2(e): the whole transformation where there is neither softcap nor bias
    float scale_cap;  // scale / softcap
    float cap_log2;   // softcap * log2(e); 0: no softcap
};

inline ScoreParams score_params(const fa_problem &p) {
    constexpr double log2_e = 1.4426950408889634;
    bool capped = p.softcap > 0;
    return {static_cast<float>(p.scale * log2_e), capped ? static_cast<float>(p.scale / p.softcap) : 0.0f,
            static_cast<float>(p.softcap * log2_e)};
}

/* Score in base 2 of one product, before bias. tanhf, not tanh.approx: the latter's 2^-11 times a softcap of 50 would
 * be an error of 0.02 in the exponent. */
__device__ __forceinline__ float score_of(const ScoreParams &s, float product) {
    return s.cap_log2 > 0 ? s.cap_log2 * tanhf(product * s.scale_cap) : product * s.scale_log2;
}

/* Where the bias of one query starts: element `key` lies `key * p.bias.stride[3]` further on. */
__device__ __forceinline__ int64_t bias_row(const fa_problem &p, int64_t batch, int64_t head, int64_t row) {
    return batch * p.bias.stride[0] + head * p.bias.stride[1] + row * p.bias.stride[2];
}

/* Bias in base 2; -inf excludes the key, NaN propagates. `row` is bias_row(); p.bias.data is not NULL. */
__device__ __forceinline__ float bias_of(const fa_problem &p, int64_t row, int64_t key) {
    return load_as_float(p.bias.data, p.bias_dtype, row + key * p.bias.stride[3]) * LOG2_E;
}

} // namespace fa

#endif
