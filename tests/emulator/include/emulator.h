/* The functions that emulated device code calls: the running thread, collectives, barriers, shared memory. machine.cpp
 * and its neighbours do it.
 *
 * A thread of a block is a fiber. Fibers run one at a time and change only inside the calls below, so that none of this
 * needs an atomic or a lock. */
#pragma once
#include <array>
#include <stddef.h>
#include <stdint.h>
#include <type_traits>
#include <utility>

namespace emu {

struct Index {
    unsigned x, y, z;
};

/* The thread that runs. */
struct Thread {
    Index thread, block; // threadIdx, blockIdx
    unsigned lane, rank; // rank: of the block in its cluster
};
extern Thread *self;
extern Index block_dim, grid_dim, cluster_dim;

/* Ends the launch with an error whose text says where each thread is. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Lets other threads run, if the seed says so. */
void perhaps_yield();
/* The same where a thread may wait for another in a loop: without a seed, every 16th time. */
void spin();
void poll();

/* ---- shared memory ---- */

/* Addresses of the shared window: the block's rank in its cluster from bit 24 on, below it the offset in the block. */
uint32_t shared_address(const void *pointer);
/* `bytes` bytes at an address, a multiple of `alignment`; fails where the block has no such memory. */
void *shared_pointer(uint32_t address, size_t bytes, size_t alignment);

/* Reads or writes as lane `lane` of this warp; `bytes` is also the alignment. */
void read_shared(unsigned lane, void *to, uint32_t from, size_t bytes);
void write_shared(unsigned lane, uint32_t to, const void *from, size_t bytes);

void *dynamic_shared(size_t alignment);
void *static_shared(const void *key, size_t bytes, size_t alignment);
template <class T> T &static_shared(const void *key) {
    return *static_cast<T *>(static_shared(key, sizeof(T), alignof(T)));
}

/* ---- what threads do together ---- */

/* All lanes of `mask` meet: each gives `mine`, the last one calls run(context, lanes' pointers) for all. Lanes that
 * meet in different operations are an error. */
using Joint = void(void *context, void *const (&lane)[32]);
void collective(const char *operation, uint32_t mask, void *mine, Joint *run, void *context);

/* The same with a callable, run([](T *const (&lane)[32]) {...}). */
template <class T, class Run> void together(const char *operation, uint32_t mask, T &mine, Run run) {
    collective(
        operation, mask, &mine,
        [](void *context, void *const(&lane)[32]) {
            T *typed[32];
            for (int l = 0; l < 32; ++l) typed[l] = static_cast<T *>(lane[l]);
            (*static_cast<Run *>(context))(typed);
        },
        &run);
}

/* The same without anything to do. */
inline void meet(const char *operation, uint32_t mask) {
    char nothing = 0;
    collective(
        operation, mask, &nothing, [](void *, void *const(&)[32]) {}, nullptr);
}

void barrier_sync(unsigned id, unsigned threads);
void barrier_arrive(unsigned id, unsigned threads);
void cluster_arrive();
void cluster_wait();
/* The sum of `mine` over the block, as __syncthreads_count and its like need it. */
int barrier_sum(int mine);
unsigned block_threads();

/* ---- mbarriers ---- */

void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_invalidate(uint32_t address);
void mbarrier_arrive(uint32_t address);
void mbarrier_expect(uint32_t address, uint32_t bytes); // without arriving
bool mbarrier_wait(uint32_t address, uint32_t parity);
void mbarrier_complete(uint32_t address, uint32_t bytes);

/* ---- what happens later ---- */

/* A copy of this thread by cp.async: the first `given` of `bytes` bytes come from `from`, the rest is 0. */
void copy_async(uint32_t to, const void *from, uint32_t bytes, uint32_t given);
void copy_commit();
void copy_wait(unsigned pending);
void copy_wait_all();
void copy_arrive(uint32_t barrier);

/* Maps that the device makes: changed in shared memory, published in global memory by a warp, acquired by each thread
 * before it uses them. `bytes` is 128. */
void tensor_map_replace_address(uint32_t map, const void *address);
void tensor_map_replace_extent(uint32_t map, uint32_t axis, uint32_t extent);
void tensor_map_publish(void *to, uint32_t from, unsigned bytes);
void tensor_map_acquire(const void *map, unsigned bytes);

struct TensorMap;
void tensor_load(uint32_t to, const void *map, const int *at, int rank, uint32_t barrier);
void tensor_store(const void *map, const int *at, int rank, uint32_t from);
void tensor_prefetch(const void *map, int rank); // a fault where the map is none
void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier);
void bulk_add(void *to, uint32_t from, uint32_t bytes);
void bulk_store(void *to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait(unsigned pending);
void send_async(uint32_t to, uint32_t barrier, const void *data, uint32_t bytes);

/* One instruction of a warpgroup, as one of its threads issues it. */
struct Wgmma {
    int n; // columns
    bool bf16, a_in_registers, accumulate;
    int scale_a, scale_b;
    bool a_mn_major, b_mn_major;
    uint64_t a, b;    // descriptors
    uint32_t word[4]; // A in registers
    float *d;         // n / 2 consecutive accumulators
};
void wgmma_issue(const Wgmma &mine);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);

/* ---- launch ---- */

struct Grid {
    Index grid, block, cluster;
    size_t shared;
};
void run(const Grid &grid, void (*body)(void *), void *context);

} // namespace emu
