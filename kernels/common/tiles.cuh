/* Which tile or row of which head an index is: plain order, and longest first in sections of heads. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

namespace fa {

/* A row, or a tile of rows, of one head. */
template <class Int> struct Place { Int batch, head, row; };

/* Plain order: the `rows` of one head follow each other, then those of the next of `heads`. */
template <class Int>
__device__ __forceinline__ Place<Int> place_of(const Int &index, const Int &rows, const Int &heads) {
    const Int head = index / rows, row = index % rows;
    return {head / heads, head % heads, row};
}

/* Longest first: sections of heads whose keys and values fit in L2 together; within a section the last tiles of all its
 * heads, the longest ones of a causal call, then those before them. */
struct SectionPlace {
    uint32_t tile;
    uint32_t head; // of all heads of all batch entries
};
/* `count` tiles in all, `tiles` of a head. */
__device__ __forceinline__ SectionPlace longest_first(uint32_t index, const uint32_t &count, const uint32_t &tiles,
                                                      const uint32_t &section_heads) {
    const uint32_t section_tiles = section_heads * tiles;
    const uint32_t section = index / section_tiles, inside = index - section * section_tiles;
    const uint32_t left = count / tiles - section * section_heads;
    const uint32_t width = left < section_heads ? left : section_heads;
    const uint32_t step = inside / width;
    return {tiles - 1 - step, section * section_heads + inside - step * width};
}

/* Division of numbers below 2^31 by one multiplication: the start of a block has four of them in a row. */
struct Divider {
    uint32_t divisor, multiplier, shift;

    static Divider of(int64_t divisor) {
        uint32_t shift = 0;
        while ((int64_t(1) << shift) < divisor) ++shift;
        return {uint32_t(divisor), uint32_t((((uint64_t(1) << shift) - divisor) << 32) / divisor + 1), shift};
    }
    __device__ int quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

} // namespace fa
