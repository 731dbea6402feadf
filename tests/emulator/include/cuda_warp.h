/* Barriers, shuffles, votes and atomics. */
#pragma once
#include <type_traits>

#include "emulator.h"

inline void __syncthreads() { emu::barrier_sync(0, emu::block_threads()); }
inline int __syncthreads_count(int predicate) { return emu::barrier_sum(predicate != 0); }
inline int __syncthreads_or(int predicate) { return emu::barrier_sum(predicate != 0) != 0; }
inline int __syncthreads_and(int predicate) { return emu::barrier_sum(predicate == 0) == 0; }

inline void __syncwarp(unsigned mask = ~0u) { emu::meet("__syncwarp", mask); }

namespace emu {

/* Each lane gives `value` and receives what the lane source(lane) gave, its own where that is not below 32. */
template <class T, class Source> T shuffle(const char *name, unsigned mask, T value, Source source) {
    struct Slot {
        T given, received;
        int from;
    } slot = {value, value, source(static_cast<int>(self->lane))};
    together(name, mask, slot, [&](Slot *const(&lane)[32]) {
        for (Slot *s : lane) {
            if (!s || s->from < 0 || s->from > 31) continue;
            if (!lane[s->from]) fail("%s reads lane %d, which is not in its mask", name, s->from);
            s->received = lane[s->from]->given;
        }
    });
    return slot.received;
}

template <class T, class Join> T reduce(const char *name, unsigned mask, T value, Join join) {
    together(name, mask, value, [&](T *const(&lane)[32]) {
        T all = {};
        bool first = true;
        for (T *x : lane)
            if (x) all = first ? *x : join(all, *x), first = false;
        for (T *x : lane)
            if (x) *x = all;
    });
    return value;
}

} // namespace emu

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return emu::shuffle("__shfl_sync", mask, value, [=](int lane) { return (lane & -width) + (from & (width - 1)); });
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    return emu::shuffle("__shfl_xor_sync", mask, value, [=](int lane) {
        const int from = lane ^ bits;
        return from < (lane & -width) + width ? from : lane;
    });
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    return emu::shuffle("__shfl_up_sync", mask, value,
                        [=](int lane) { return lane - int(by) < (lane & -width) ? lane : lane - int(by); });
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    return emu::shuffle("__shfl_down_sync", mask, value,
                        [=](int lane) { return lane + int(by) >= (lane & -width) + width ? lane : lane + int(by); });
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emu::reduce("__ballot_sync", mask, predicate ? 1u << emu::self->lane : 0u,
                       [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) {
    return emu::reduce("__any_sync", mask, predicate != 0, [](bool a, bool b) { return a || b; });
}
inline int __all_sync(unsigned mask, int predicate) {
    return emu::reduce("__all_sync", mask, predicate != 0, [](bool a, bool b) { return a && b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
    return emu::reduce("__reduce_or_sync", mask, x, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned x) {
    return emu::reduce("__reduce_and_sync", mask, x, [](unsigned a, unsigned b) { return a & b; });
}
template <class T> T __reduce_add_sync(unsigned mask, T x) {
    return emu::reduce("__reduce_add_sync", mask, x, [](T a, T b) { return a + b; });
}
template <class T> T __reduce_max_sync(unsigned mask, T x) {
    return emu::reduce("__reduce_max_sync", mask, x, [](T a, T b) { return a < b ? b : a; });
}
template <class T> T __reduce_min_sync(unsigned mask, T x) {
    return emu::reduce("__reduce_min_sync", mask, x, [](T a, T b) { return b < a ? b : a; });
}

/* Fibers change only where they say so: an ordinary access is atomic, and no race. */
#define EMU_UNSEEN __attribute__((no_sanitize("thread"), noinline))
template <class T> EMU_UNSEEN T atomicAdd(T *at, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    return *at = old + x, old;
}
template <class T> EMU_UNSEEN T atomicMax(T *at, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    return *at = old < x ? x : old, old;
}
template <class T> EMU_UNSEEN T atomicMin(T *at, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    return *at = x < old ? x : old, old;
}
template <class T> EMU_UNSEEN T atomicOr(T *at, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    return *at = old | x, old;
}
template <class T> EMU_UNSEEN T atomicExch(T *at, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    return *at = x, old;
}
template <class T> EMU_UNSEEN T atomicCAS(T *at, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
    emu::spin();
    const T old = *at;
    if (old == expected) *at = x;
    return old;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::spin(); }
[[noreturn]] inline void __trap() { emu::fail("__trap()"); }
template <class T> T __ldg(const T *from) { return *from; }
template <class T> T __ldcg(const T *from) { return *from; }
template <class T> size_t __cvta_generic_to_shared(T *pointer) { return emu::shared_address(pointer); }
