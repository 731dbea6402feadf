/* Races in shared memory, by happens-before: a build with -fsanitize=thread calls what stands at the end for every
 * access of the kernel, and each is held against the last accesses of the same byte.
 *
 * Vector clocks as in FastTrack (Flanagan and Freund, PLDI 2009). What orders accesses: barriers, __syncwarp,
 * mbarriers, the cluster's barrier; no other collective of a warp. Of several readers that no order connects, one is
 * kept, by chance: a race with the others shows at another byte or seed. Asynchronous copies read and write as they
 * are issued, and who acquires their mbarrier acquires them. The products of a warpgroup are an actor of their own:
 * they read after what their four warps had acquired, and who waits for them acquires their reads. */
#include "machine.h"

#include <algorithm>
#include <dlfcn.h>

namespace emu {

constexpr size_t WINDOW_BYTES = 0x40000;

/* The last accesses of a byte; epoch 0: none. */
struct Shadow {
    uint32_t write_epoch, read_epoch;
    uint16_t writer, reader;
    uint32_t write_at, read_at; // code, from the library's begin
};
static std::vector<Shadow> shadow; // by rank and offset in the window
static bool instrumented;
static const char *library;

static void join(std::vector<uint32_t> &to, const std::vector<uint32_t> &from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}

void race_begin() {
    if (!instrumented) return;
    shadow.assign(machine.blocks.size() * WINDOW_BYTES, Shadow());
    unsigned actors = machine.count;
    for (unsigned rank = 0; rank < cluster_dim.x * cluster_dim.y * cluster_dim.z; ++rank)
        for (Warpgroup &group : machine.blocks[rank]->warpgroups) group.number = actors++;
    for (unsigned n = 0; n < machine.count; ++n) {
        Fiber &fiber = *machine.fibers[n];
        fiber.number = static_cast<uint16_t>(n);
        fiber.clock.assign(actors, 0);
        fiber.clock[n] = 1;
    }
}

void race_release(std::vector<uint32_t> &clock) {
    if (!instrumented) return;
    Fiber &fiber = current();
    join(clock, fiber.clock);
    ++fiber.clock[fiber.number];
}
void race_acquire(const std::vector<uint32_t> &clock) {
    if (instrumented) join(current().clock, clock);
}
std::vector<uint32_t> race_launch() {
    std::vector<uint32_t> clock;
    race_release(clock);
    return clock;
}
void race_land(std::vector<uint32_t> &clock, const std::vector<uint32_t> &launched) {
    if (instrumented) join(clock, launched);
}

void race_meet(const Warp &warp, uint32_t mask) {
    if (!instrumented) return;
    std::vector<uint32_t> all;
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) join(all, warp.fiber[lane]->clock);
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) {
            Fiber &fiber = *warp.fiber[lane];
            fiber.clock = all;
            ++fiber.clock[fiber.number];
        }
}

[[noreturn]] static void report(uint32_t address, const char *mine, const char *theirs, const Fiber &fiber,
                                unsigned other, uint32_t at, const void *here) {
    if (other >= machine.count)
        fail("race: %s is read by a product of a warpgroup and written by a thread that nobody told of its end\n%s",
             describe_address(shared_pointer(address, 1, 1)).c_str(), place_of(fiber, here).c_str());
    const Fiber &their = *machine.fibers[other];
    fail("race: %s is %s by one thread and %s by another, with no barrier "
         "between\n"
         "%s\nblock (%u, %u, %u) thread %u at %s",
         describe_address(shared_pointer(address, 1, 1)).c_str(), theirs, mine, place_of(fiber, here).c_str(),
         their.block.x, their.block.y, their.block.z, their.linear, line_of(library + at).c_str());
}

void race_access(const Fiber &fiber, uint32_t address, size_t bytes, bool write, const void *code) {
    if (!instrumented) return;
    const uint32_t at = static_cast<uint32_t>(static_cast<const char *>(code) - library);
    for (size_t n = 0; n < bytes; ++n) {
        Shadow &s = shadow[(address >> 24) * WINDOW_BYTES + (address & 0xffffff) + n];
        if (s.write_epoch && s.writer != fiber.number && fiber.clock[s.writer] < s.write_epoch)
            report(uint32_t(address + n), write ? "written" : "read", "written", fiber, s.writer, s.write_at, code);
        const bool after_reader = !s.read_epoch || s.reader == fiber.number || fiber.clock[s.reader] >= s.read_epoch;
        if (write) {
            if (!after_reader) report(uint32_t(address + n), "written", "read", fiber, s.reader, s.read_at, code);
            s.write_epoch = fiber.clock[fiber.number], s.writer = fiber.number, s.write_at = at;
        } else if (after_reader || draw() % 2) {
            s.read_epoch = fiber.clock[fiber.number], s.reader = fiber.number, s.read_at = at;
        }
    }
}

void race_product(const WarpgroupOp &op, const Warpgroup &group, uint32_t address, size_t bytes) {
    if (!instrumented) return;
    for (size_t n = 0; n < bytes; ++n) {
        Shadow &s = shadow[(address >> 24) * WINDOW_BYTES + (address & 0xffffff) + n];
        for (const std::vector<uint32_t> &clock : op.clock)
            if (s.write_epoch && clock[s.writer] < s.write_epoch)
                fail("race: %s is read by a product of a warpgroup whose warps did not all wait for who writes it\n%s",
                     describe_address(shared_pointer(address, 1, 1)).c_str(), line_of(op.code).c_str());
        s.read_epoch = static_cast<uint32_t>(group.executed + 1), s.reader = static_cast<uint16_t>(group.number);
        s.read_at = static_cast<uint32_t>(static_cast<const char *>(op.code) - library);
    }
}
void race_acquire_products(const Warpgroup &group, uint64_t count) {
    if (!instrumented) return;
    uint32_t &mine = current().clock[group.number];
    mine = std::max(mine, static_cast<uint32_t>(count));
}

static void access(const void *pointer, size_t bytes, bool write, const void *code) {
    if (!self || !machine.active) return;
    for (unsigned rank = 0; rank < machine.blocks.size(); ++rank) {
        const char *begin = machine.blocks[rank]->window;
        if (pointer < begin || pointer >= begin + WINDOW_BYTES) continue;
        if (inside_shared(*machine.blocks[rank], pointer, bytes))
            race_access(current(), shared_address(pointer), bytes, write, code);
    }
}

} // namespace emu

/* The functions that GCC calls in instrumented code. */
extern "C" {
void __tsan_init() {
    Dl_info info;
    emu::instrumented = true;
    if (dladdr(reinterpret_cast<void *>(&__tsan_init), &info)) emu::library = static_cast<const char *>(info.dli_fbase);
}
#define EMU_ACCESS(bytes)                                                                                              \
    void __tsan_read##bytes(void *at) { emu::access(at, bytes, false, __builtin_return_address(0)); }                  \
    void __tsan_write##bytes(void *at) { emu::access(at, bytes, true, __builtin_return_address(0)); }                  \
    void __tsan_unaligned_read##bytes(void *at) { emu::access(at, bytes, false, __builtin_return_address(0)); }        \
    void __tsan_unaligned_write##bytes(void *at) { emu::access(at, bytes, true, __builtin_return_address(0)); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void *at, size_t bytes) { emu::access(at, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void *at, size_t bytes) { emu::access(at, bytes, true, __builtin_return_address(0)); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
/* Of host code: the table of launch.cuh. */
uint64_t __tsan_atomic64_load(const volatile uint64_t *at, int) { return *at; }
void __tsan_atomic64_store(volatile uint64_t *at, uint64_t x, int) { *at = x; }
uint32_t __tsan_atomic32_load(const volatile uint32_t *at, int) { return *at; }
void __tsan_atomic32_store(volatile uint32_t *at, uint32_t x, int) { *at = x; }
}
