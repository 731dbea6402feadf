/* CUDA's vector types and what makes them. */
#pragma once

#define EMU_VECTOR(type, name, bytes)                                                                                  \
    struct alignas(bytes / 2) name##2 {                                                                                \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    struct name##3 {                                                                                                   \
        type x, y, z;                                                                                                  \
    };                                                                                                                 \
    struct alignas(bytes > 16 ? 16 : bytes) name##4 {                                                                  \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                   \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                        \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTOR(float, float, 16)
EMU_VECTOR(int, int, 16)
EMU_VECTOR(unsigned, uint, 16)
EMU_VECTOR(short, short, 8)
EMU_VECTOR(unsigned short, ushort, 8)
EMU_VECTOR(unsigned char, uchar, 4)
EMU_VECTOR(double, double, 32)
EMU_VECTOR(long long, longlong, 32)
#undef EMU_VECTOR
