/* Tensor maps that the device makes (sm_90a): the map of one sequence of a packed operand, from a map that the host
 * encoded for the whole operand.
 *
 * A sequence's map begins at its first row and ends after its last one, so that TMA reads zeros on both sides of it
 * whatever the neighbours hold, and a head or batch coordinate means what it means in the host's map. A kernel makes
 * the maps in global memory; each thread that uses one acquires it first, in the same kernel or a later one. */
#pragma once
#include <cuda.h>   // CUtensorMap
#include <stdint.h> // uint32_t

#include "common/chaos.cuh"
#include "common/ptx.cuh" // shared_address

namespace fa::sm90 {

/* Writes to `to` the map `origin` with `address` as its first row and `rows` rows. A whole warp of a block of one
 * dimension calls this. `origin` has the axes of sm90/common/tensor_map.h and is a __grid_constant__ parameter; `to` is
 * global memory and `scratch` shared memory of this warp, both 128-byte aligned; `address` is a multiple of 16 bytes
 * and `rows` at least 1. A sequence without rows gets one row at row 0 of the operand, and nobody loads by its map. */
__device__ __forceinline__ void make_sequence_map(CUtensorMap *to, CUtensorMap *scratch, const CUtensorMap &origin,
                                                  const void *address, uint32_t rows, int site = __builtin_LINE()) {
    constexpr uint32_t kWords = sizeof origin.opaque / sizeof origin.opaque[0];
    const uint32_t lane = threadIdx.x % 32;
    FA_CHAOS_POINT(site);
    if (lane < kWords) scratch->opaque[lane] = origin.opaque[lane];
    __syncwarp();
    if (lane == 0) {
        const uint32_t map = shared_address(scratch);
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map), "l"(address)
                     : "memory");
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(map), "r"(rows)
                     : "memory");
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                 "[%0], [%1], 128;" ::"l"(to),
                 "r"(shared_address(scratch))
                 : "memory");
    // The copy is an ordinary access of the warp, not an asynchronous one: past this barrier `scratch` has been read.
    __syncwarp();
}

/* Lets this thread use the map as the device last published it, by TMA and prefetches that it issues from here on. One
 * thread, the one that issues them. Barriers or the end of a kernel (dependency_wait) order it after make_sequence_map;
 * neither replaces it. */
__device__ __forceinline__ void acquire_sequence_map(const CUtensorMap *map, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

} // namespace fa::sm90
