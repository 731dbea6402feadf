/* Fibers, the order in which they run, and what they wait for together. */
#include "machine.h"

#include <algorithm>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#error "the emulator's switch between fibers is written for x86-64"
#endif

namespace emu {

Thread *self;
Index block_dim, grid_dim, cluster_dim;
Machine machine;

constexpr size_t PAGE = 4096;

/* Saves what a call must keep, then continues where `to` was saved. */
extern "C" void emu_switch(void **from, void *to);
__asm__(".text\n"
        ".globl emu_switch\n"
        ".hidden emu_switch\n"
        ".type emu_switch, @function\n"
        "emu_switch:\n"
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
        "ret\n"
        ".size emu_switch, . - emu_switch\n");

/* ---- random numbers ---- */

uint64_t draw() {
    uint64_t &x = machine.random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return x * UINT64_C(0x2545F4914F6CDD1D) >> 16;
}
bool one_in(unsigned n) { return machine.seed && draw() % n == 0; }
When draw_when() { return machine.seed ? static_cast<When>(draw() % 3) : When::LATE; }

/* ---- the order of fibers ---- */

/* With seed 0 warps take turns, each as long as one of its lanes can run, lowest lane first. With another seed the warp
 * of the highest priority runs, and priorities change now and then: one warp is held up for long while the others go
 * on, which is what shows most races (as in probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010). */
static Fiber *pick() {
    std::vector<Warp> &warps = machine.warps;
    if (!machine.seed) {
        for (unsigned n = 0; n < warps.size(); ++n) {
            const unsigned w = (machine.last_warp + n) % warps.size();
            if (!warps[w].ready) continue;
            machine.last_warp = w;
            return warps[w].fiber[__builtin_ctz(warps[w].ready)];
        }
        return nullptr;
    }
    if (one_in(64)) warps[draw() % warps.size()].priority = static_cast<int>(draw() % 1024);
    Warp *best = nullptr;
    for (Warp &warp : warps)
        if (warp.ready && (!best || warp.priority > best->priority)) best = &warp;
    if (!best) return nullptr;
    uint32_t ready = best->ready;
    for (unsigned skip = draw() % __builtin_popcount(ready); skip; --skip) ready &= ready - 1;
    return best->fiber[__builtin_ctz(ready)];
}

/* Runs something that the hardware does by itself; false: nothing was found. */
static bool run_pending(bool early_only) {
    std::deque<Pending> &pending = machine.pending;
    if (pending.empty()) return false;
    const size_t n = machine.seed ? draw() % pending.size() : 0;
    if (early_only && !pending[n].early) return false;
    std::swap(pending[n], pending.front());
    const Pending chosen = std::move(pending.front());
    pending.pop_front();
    ++machine.progress;
    chosen.run();
    return true;
}

/* Waits in mbarrier_wait end with "not yet" when nothing else can go on; twice without progress between is a deadlock.
 */
static bool time_out() {
    if (machine.starved_at == machine.progress) return false;
    machine.starved_at = machine.progress;
    bool any = false;
    for (unsigned n = 0; n < machine.count; ++n) {
        Fiber *fiber = machine.fibers[n];
        if (fiber->state == Fiber::WAITING && fiber->timed) wake(fiber), any = true;
    }
    return any;
}

static Fiber *next() {
    if (one_in(8)) run_pending(true);
    for (;;) {
        if (Fiber *fiber = pick()) return fiber;
        if (!machine.live) return nullptr;
        if (!run_pending(false) && !time_out()) fail("deadlock: no thread can go on\n%s", places().c_str());
    }
}

static void switch_to(Fiber *fiber) {
    if (fiber == self) return;
    Fiber &from = current();
    self = fiber;
    emu_switch(&from.stack_pointer, fiber->stack_pointer);
}

void wait_for(const char *what, int64_t a, int64_t b) {
    Fiber &fiber = current();
    fiber.state = Fiber::WAITING;
    fiber.waits_for = what, fiber.waits_detail[0] = a, fiber.waits_detail[1] = b;
    machine.warps[fiber.warp].ready &= ~(1u << fiber.lane);
    switch_to(next());
}

void wake(Fiber *fiber) {
    if (fiber->state != Fiber::WAITING) return;
    fiber->state = Fiber::READY;
    fiber->timed = false;
    machine.warps[fiber->warp].ready |= 1u << fiber->lane;
}
void wake_all(std::vector<Fiber *> &fibers) {
    for (Fiber *fiber : fibers) wake(fiber);
    fibers.clear();
}

void perhaps_yield() {
    if (one_in(4)) switch_to(next());
}

void spin() {
    if (machine.seed) return perhaps_yield();
    if (++machine.spins % 16) return;
    machine.last_warp = (current().warp + 1) % machine.warps.size();
    switch_to(next());
}

/* The hardware's own work goes on while a thread polls. */
void poll() {
    if (++machine.polls % 16 == 0) run_pending(false);
    spin();
}

/* ---- the life of a fiber ---- */

void Fiber::clear() {
    state = READY;
    waits_for = nullptr;
    timed = false;
    copies.assign(1, {});
    bulk_group = cluster_phase = wgmma_issued = 0;
    wgmma_groups.clear();
    acquired.clear();
}

static void fiber_main() {
    machine.body(machine.context);
    Fiber &fiber = current();
    flush_copies(fiber);
    fiber.state = Fiber::DONE;
    machine.warps[fiber.warp].ready &= ~(1u << fiber.lane);
    --machine.live;
    --current_block().live;
    Fiber *after = next();
    void *unused;
    if (after) self = after;
    emu_switch(&unused, after ? after->stack_pointer : machine.main_stack_pointer);
    __builtin_unreachable();
}

/* A fiber that begins in fiber_main(). */
static void prepare(Fiber &fiber) {
    if (!fiber.stack) {
        void *memory =
            mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stack of a thread");
        mprotect(memory, PAGE, PROT_NONE);
        fiber.stack = static_cast<char *>(memory);
    }
    void **top = reinterpret_cast<void **>(fiber.stack + STACK_BYTES);
    *--top = nullptr; // where fiber_main() would return to: its stack is aligned as after a call
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int n = 0; n < 6; ++n) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.clear();
}

/* Block `index` and its threads become the next of the cluster. */
static void add_block(unsigned rank, Index index) {
    const Index dim = machine.grid.block;
    const unsigned threads = dim.x * dim.y * dim.z, warps = (threads + WARP - 1) / WARP;
    if (machine.blocks.size() <= rank) machine.blocks.push_back(new Block);
    Block &block = *machine.blocks[rank];
    block.rank = rank, block.index = index, block.live = threads;
    for (Barrier &barrier : block.barrier) barrier = Barrier();
    block.warpgroups.assign((threads + 127) / 128, Warpgroup());
    open_shared(block, machine.grid.shared);
    for (unsigned n = 0; n < threads; ++n) {
        if (machine.fibers.size() <= machine.count) machine.fibers.push_back(new Fiber());
        Fiber &fiber = *machine.fibers[machine.count++];
        prepare(fiber);
        fiber.thread = {n % dim.x, n / dim.x % dim.y, n / dim.x / dim.y};
        fiber.block = index;
        fiber.rank = rank, fiber.linear = n, fiber.lane = n % WARP, fiber.warp = rank * warps + n / WARP;
        if (machine.warps.size() <= fiber.warp) machine.warps.resize(fiber.warp + 1);
        machine.warps[fiber.warp].fiber[fiber.lane] = &fiber;
        machine.warps[fiber.warp].ready |= 1u << fiber.lane;
    }
    machine.live += threads;
}

/* Runs the cluster whose first block is `first`. False: something failed. */
static bool run_cluster(Index first) {
    machine.count = machine.live = machine.last_warp = machine.cluster_arrived = 0;
    machine.cluster_phase = machine.progress = 0, machine.starved_at = ~UINT64_C(0);
    machine.warps.clear();
    machine.mbarriers.clear();
    machine.pending.clear();
    machine.cluster_waiting.clear();
    machine.cluster_clock.clear();
    const Index size = machine.grid.cluster;
    if (sigsetjmp(machine.main, 1)) return false; // fail()
    for (unsigned z = 0; z < size.z; ++z)
        for (unsigned y = 0; y < size.y; ++y)
            for (unsigned x = 0; x < size.x; ++x)
                add_block((z * size.y + y) * size.x + x, {first.x + x, first.y + y, first.z + z});
    race_begin();
    for (Warp &warp : machine.warps) warp.priority = machine.seed ? static_cast<int>(draw() % 1024) : 0;
    Fiber *fiber = next();
    self = fiber;
    emu_switch(&machine.main_stack_pointer, fiber->stack_pointer);
    self = nullptr;
    if (!machine.pending.empty()) fail("a block ended before its %s was done", machine.pending[0].what);
    for (unsigned rank = 0; rank < size.x * size.y * size.z; ++rank) check_shared(*machine.blocks[rank]);
    return true;
}

/* Gives stacks back, but for a block's: each is two mappings, of which a process may have some 65,000, and each
 * emulated kernel has a machine of its own. */
static void release_stacks() {
    constexpr size_t kKept = 128;
    for (size_t n = kKept; n < machine.fibers.size() && machine.fibers[n]->stack; ++n) {
        munmap(machine.fibers[n]->stack, STACK_BYTES);
        machine.fibers[n]->stack = nullptr;
    }
}

/* Blocks of a kernel without clusters that run at a time, as one cluster of them would. */
static unsigned blocks_together(const Grid &grid) {
    const char *given = getenv("FA_EMULATOR_TOGETHER");
    const bool alone = !given || grid.grid.y * grid.grid.z * grid.cluster.x * grid.cluster.y * grid.cluster.z > 1;
    return alone ? 1 : std::clamp(atoi(given), 1, 16);
}

void run(const Grid &grid, void (*body)(void *), void *context) {
    machine.grid = grid, machine.body = body, machine.context = context;
    machine.random = machine.seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    block_dim = grid.block, grid_dim = grid.grid, cluster_dim = grid.cluster;
    const unsigned together = blocks_together(grid);
    const Index clusters = {(grid.grid.x / grid.cluster.x + together - 1) / together, grid.grid.y / grid.cluster.y,
                            grid.grid.z / grid.cluster.z};
    const uint64_t count = uint64_t(clusters.x) * clusters.y * clusters.z;
    std::vector<uint64_t> order(machine.seed ? count : 0);
    for (uint64_t n = 0; n < order.size(); ++n) order[n] = n;
    for (uint64_t n = order.size(); n > 1; --n) std::swap(order[n - 1], order[draw() % n]);
    for (uint64_t n = 0; n < count; ++n) {
        const uint64_t at = machine.seed ? order[n] : n;
        const Index first = {unsigned(at % clusters.x) * grid.cluster.x * together,
                             unsigned(at / clusters.x % clusters.y) * grid.cluster.y,
                             unsigned(at / clusters.x / clusters.y) * grid.cluster.z};
        if (together > 1) machine.grid.cluster.x = cluster_dim.x = std::min(together, grid.grid.x - first.x);
        if (!run_cluster(first)) break;
    }
    self = nullptr;
    release_stacks();
}

void fail(const char *format, ...) {
    char text[6000];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    machine.error = text;
    siglongjmp(machine.main, 1);
}

/* ---- meetings of lanes ---- */

void collective(const char *operation, uint32_t mask, void *mine, Joint *run, void *context) {
    Fiber &fiber = current();
    Warp &warp = machine.warps[fiber.warp];
    if (!(mask >> fiber.lane & 1))
        fail("%s: the mask %08x lacks the lane itself\n%s", operation, mask, places().c_str());
    size_t at = 0;
    while (at < warp.meetings.size() && warp.meetings[at].mask != mask) ++at;
    if (at == warp.meetings.size()) {
        warp.meetings.emplace_back();
        warp.meetings[at].mask = mask;
        warp.meetings[at].operation = operation;
        for (void *&lane : warp.meetings[at].lane) lane = nullptr;
    }
    Meeting &meeting = warp.meetings[at];
    if (meeting.operation != operation)
        fail("lanes of a warp meet in %s and %s\n%s", meeting.operation, operation, places().c_str());
    meeting.lane[fiber.lane] = mine;
    meeting.there |= 1u << fiber.lane;
    if (meeting.there != mask) {
        wait_for(operation, mask);
        return;
    }
    const Meeting met = meeting;
    warp.meetings.erase(warp.meetings.begin() + at);
    run(context, met.lane);
    if (!strcmp(operation, "__syncwarp")) race_meet(warp, mask);
    ++machine.progress;
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1 && lane != fiber.lane) wake(warp.fiber[lane]);
    perhaps_yield();
}

/* ---- barriers ---- */

unsigned block_threads() { return block_dim.x * block_dim.y * block_dim.z; }

static Barrier &arrive(unsigned id, unsigned threads, int mine) {
    if (id >= BARRIERS) fail("barrier %u: there are 16", id);
    if (threads % WARP && threads != block_threads()) fail("barrier %u of %u threads: not whole warps", id, threads);
    Barrier &barrier = current_block().barrier[id];
    if (barrier.arrived && barrier.expected != threads)
        fail("barrier %u: some wait for %u threads, others for %u\n%s", id, barrier.expected, threads,
             places().c_str());
    barrier.expected = threads;
    barrier.sum += mine;
    race_release(barrier.clock);
    if (++barrier.arrived == threads) {
        barrier.result = barrier.sum;
        barrier.arrived = 0, barrier.sum = 0;
        barrier.ended.swap(barrier.clock);
        barrier.clock.clear();
        ++barrier.phase;
        ++machine.progress;
        wake_all(barrier.waiting);
    }
    return barrier;
}

static int sync(unsigned id, unsigned threads, int mine) {
    perhaps_yield();
    Barrier &barrier = current_block().barrier[id < BARRIERS ? id : 0];
    const uint64_t phase = barrier.phase;
    arrive(id, threads, mine);
    while (barrier.phase == phase) {
        barrier.waiting.push_back(&current());
        wait_for("barrier", id, threads);
    }
    const int result = barrier.result;
    race_acquire(barrier.ended);
    perhaps_yield();
    return result;
}

void barrier_sync(unsigned id, unsigned threads) { sync(id, threads, 0); }
int barrier_sum(int mine) { return sync(0, block_threads(), mine); }
void barrier_arrive(unsigned id, unsigned threads) {
    perhaps_yield();
    arrive(id, threads, 0);
    perhaps_yield();
}

void cluster_arrive() {
    current().cluster_phase = machine.cluster_phase;
    race_release(machine.cluster_clock);
    if (++machine.cluster_arrived < machine.count) return;
    machine.cluster_arrived = 0;
    ++machine.cluster_phase;
    ++machine.progress;
    wake_all(machine.cluster_waiting);
}
void cluster_wait() {
    while (machine.cluster_phase == current().cluster_phase) {
        machine.cluster_waiting.push_back(&current());
        wait_for("the cluster's barrier");
    }
    race_acquire(machine.cluster_clock);
    perhaps_yield();
}

} // namespace emu
