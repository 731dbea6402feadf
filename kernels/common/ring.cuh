/* A ring of stages between warps that fill them and warps that read them. */
#pragma once

#include <stdint.h> // uint32_t

namespace fa {

/* Position in a ring of kStages stages and the parity of the phase it is in. Consumers start at parity 0, the producer
 * at 1: a fresh barrier reads as if the phase before had ended. */
template <int kStages> struct RingState {
    int stage = 0;
    uint32_t parity;

    __device__ __forceinline__ explicit RingState(uint32_t first_parity) : parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

} // namespace fa
