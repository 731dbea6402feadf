/* mbarriers, and copies that land at a moment of the seed's choice. */
#include "machine.h"

#include <algorithm>
#include <string.h>

namespace emu {

/* ---- mbarriers; the eight bytes themselves hold nothing ---- */

static Mbarrier &mbarrier_at(uint32_t address) {
    shared_pointer(address, 8, 8);
    const auto found = machine.mbarriers.find(address);
    if (found == machine.mbarriers.end())
        fail("the mbarrier at %#x was not initialised\n%s", address, places().c_str());
    return found->second;
}

void mbarrier_init(uint32_t address, uint32_t arrivals) {
    shared_pointer(address, 8, 8);
    if (machine.mbarriers.count(address)) fail("the mbarrier at %#x is initialised again\n%s", address, places().c_str());
    Mbarrier &barrier = machine.mbarriers[address] = Mbarrier();
    barrier.count = barrier.pending = arrivals;
}

void mbarrier_invalidate(uint32_t address) {
    const Mbarrier &barrier = mbarrier_at(address);
    if (!barrier.waiting.empty() || barrier.bytes)
        fail("the mbarrier at %#x is invalidated while it is in use\n%s", address, places().c_str());
    machine.mbarriers.erase(address);
}

static void settle(Mbarrier &barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
    ++machine.progress;
    wake_all(barrier.waiting);
}

void mbarrier_arrive(uint32_t address) {
    perhaps_yield();
    Mbarrier &barrier = mbarrier_at(address);
    if (!barrier.pending)
        fail("the mbarrier at %#x gets more than its %d arrivals\n%s", address, int(barrier.count), places().c_str());
    --barrier.pending;
    race_release(barrier.clock);
    settle(barrier);
    perhaps_yield();
}

void mbarrier_expect(uint32_t address, uint32_t bytes) { mbarrier_at(address).bytes += bytes; }

void mbarrier_complete(uint32_t address, uint32_t bytes) {
    Mbarrier &barrier = mbarrier_at(address);
    barrier.bytes -= bytes;
    settle(barrier);
}

static void complete(uint32_t address, uint32_t bytes, const std::vector<uint32_t> &launched) {
    race_land(mbarrier_at(address).clock, launched);
    mbarrier_complete(address, bytes);
}

/* Whether the phase of this parity has ended. Waits for some end of a phase if not, and then looks again: by then the
 * barrier may be two phases on. */
bool mbarrier_wait(uint32_t address, uint32_t parity) {
    perhaps_yield();
    Mbarrier &barrier = mbarrier_at(address);
    if (barrier.phase != (parity & 1)) {
        race_acquire(barrier.clock);
        return true;
    }
    Fiber &fiber = current();
    barrier.waiting.push_back(&fiber);
    fiber.timed = true;
    wait_for("mbarrier", address, parity);
    auto &waiting = barrier.waiting;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), &fiber), waiting.end());
    const bool ended = barrier.phase != (parity & 1);
    if (ended) race_acquire(barrier.clock);
    return ended;
}

/* ---- cp.async ---- */

static void perform(const Copy &copy) {
    char *to = static_cast<char *>(shared_pointer(copy.to, copy.bytes, copy.bytes));
    memcpy(to, copy.from, copy.given);
    memset(to + copy.given, 0, copy.bytes - copy.given);
}

static void land(std::vector<Copy> &group) {
    for (const Copy &copy : group) perform(copy);
    group.clear();
}

void copy_async(uint32_t to, const void *from, uint32_t bytes, uint32_t given) {
    if (given > bytes) fail("cp.async: %u of %u bytes", given, bytes);
    shared_pointer(to, bytes, bytes);
    if (given && reinterpret_cast<uintptr_t>(from) % bytes)
        fail("cp.async of %u bytes from %p: not aligned", bytes, from);
    race_access(current(), to, bytes, true, __builtin_return_address(0));
    const Copy copy = {to, from, bytes, given};
    if (draw_when() == When::NOW)
        perform(copy);
    else
        current().copies.back().push_back(copy);
}

void copy_commit() {
    if (one_in(4)) land(current().copies.back());
    current().copies.emplace_back();
}

void copy_wait(unsigned pending) {
    auto &copies = current().copies;
    const size_t closed = copies.size() - 1, keep = std::min<size_t>(pending, closed);
    for (size_t n = 0; n < closed - keep; ++n) land(copies[n]);
    copies.erase(copies.begin(), copies.begin() + (closed - keep));
    perhaps_yield();
}

void copy_wait_all() {
    flush_copies(current());
    perhaps_yield();
}

void flush_copies(Fiber &fiber) {
    for (auto &group : fiber.copies) land(group);
    fiber.copies.resize(1);
}

/* The arrival, without raising what the barrier expects, once this thread's copies so far have landed. */
void copy_arrive(uint32_t barrier) {
    race_release(mbarrier_at(barrier).clock);
    const When when = draw_when();
    Fiber *owner = &current();
    std::vector<Copy> all;
    for (auto &group : owner->copies) {
        all.insert(all.end(), group.begin(), group.end());
        group.clear();
    }
    const auto arrive = [=] {
        for (const Copy &copy : all) perform(copy);
        Mbarrier &at = mbarrier_at(barrier);
        if (!at.pending) fail("the mbarrier at %#x gets more than its %d arrivals", barrier, int(at.count));
        --at.pending;
        settle(at);
    };
    if (when == When::NOW)
        arrive();
    else
        machine.pending.push_back({arrive, when == When::EARLY, nullptr, 0, "cp.async"});
}

/* ---- bulk copies and stores to other blocks ---- */

static void defer(std::function<void()> action, Fiber *owner, uint64_t group, const char *what,
                  const void *map = nullptr) {
    const When when = draw_when();
    if (when == When::NOW)
        action();
    else
        machine.pending.push_back({std::move(action), when == When::EARLY, owner, group, what, map});
}

void tensor_move(const TensorMap &map, const int *at, uint32_t shared, bool store);
const TensorMap &tensor_map(const void *map, int rank);
uint32_t tensor_bytes(const TensorMap &map);

void tensor_load(uint32_t to, const void *opaque, const int *at, int rank, uint32_t barrier) {
    const TensorMap &map = tensor_map(opaque, rank);
    mbarrier_at(barrier);
    shared_pointer(to, tensor_bytes(map), 128);
    race_access(current(), to, tensor_bytes(map), true, __builtin_return_address(0));
    const std::vector<uint32_t> launched = race_launch();
    const std::array<int, 5> place = {at[0], rank > 1 ? at[1] : 0, rank > 2 ? at[2] : 0, rank > 3 ? at[3] : 0,
                                      rank > 4 ? at[4] : 0};
    struct alignas(64) Kept {
        char bytes[128];
    } kept; // a map is a parameter of the thread, which may end before the copy lands
    __builtin_memcpy(&kept, opaque, sizeof kept);
    defer(
        [kept, place, to, barrier, launched] {
            const TensorMap &map = *reinterpret_cast<const TensorMap *>(&kept);
            tensor_move(map, place.data(), to, false);
            complete(barrier, tensor_bytes(map), launched);
        },
        nullptr, 0, "bulk load", opaque);
    perhaps_yield();
}

void tensor_prefetch(const void *opaque, int rank) { tensor_map(opaque, rank); }

void tensor_store(const void *opaque, const int *at, int rank, uint32_t from) {
    const TensorMap &map = tensor_map(opaque, rank);
    shared_pointer(from, tensor_bytes(map), 128);
    race_access(current(), from, tensor_bytes(map), false, __builtin_return_address(0));
    const std::array<int, 5> place = {at[0], rank > 1 ? at[1] : 0, rank > 2 ? at[2] : 0, rank > 3 ? at[3] : 0,
                                      rank > 4 ? at[4] : 0};
    defer([&map, place, from] { tensor_move(map, place.data(), from, true); }, &current(), current().bulk_group,
          "bulk store", opaque);
}

void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    mbarrier_at(barrier);
    void *const target = shared_pointer(to, bytes, 16);
    if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a bulk copy of %u bytes is not aligned", bytes);
    race_access(current(), to, bytes, true, __builtin_return_address(0));
    const std::vector<uint32_t> launched = race_launch();
    defer(
        [=] {
            __builtin_memcpy(target, from, bytes);
            complete(barrier, bytes, launched);
        },
        nullptr, 0, "bulk load");
    perhaps_yield();
}

/* Adds float32 from shared to global memory, when the machine likes. */
void bulk_add(void *to, uint32_t from, uint32_t bytes) {
    auto *const source = static_cast<const float *>(shared_pointer(from, bytes, 16));
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) fail("a bulk addition of %u bytes is not aligned", bytes);
    race_access(current(), from, bytes, false, __builtin_return_address(0));
    defer(
        [=] {
            for (uint32_t n = 0; n < bytes / sizeof(float); ++n) static_cast<float *>(to)[n] += source[n];
        },
        &current(), current().bulk_group, "bulk addition");
}

/* The same, in place of what is there. */
void bulk_store(void *to, uint32_t from, uint32_t bytes) {
    const void *const source = shared_pointer(from, bytes, 16);
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16) fail("a bulk copy of %u bytes is not aligned", bytes);
    race_access(current(), from, bytes, false, __builtin_return_address(0));
    defer([=] { __builtin_memcpy(to, source, bytes); }, &current(), current().bulk_group, "bulk store");
}

void bulk_commit() { ++current().bulk_group; }

void bulk_wait(unsigned keep) {
    const Fiber &fiber = current();
    auto &pending = machine.pending;
    for (size_t n = 0; n < pending.size();) {
        if (pending[n].owner != &fiber || pending[n].group + keep >= fiber.bulk_group) {
            ++n;
            continue;
        }
        const Pending chosen = std::move(pending[n]);
        pending.erase(pending.begin() + n);
        chosen.run();
    }
    perhaps_yield();
}

void send_async(uint32_t to, uint32_t barrier, const void *data, uint32_t bytes) {
    shared_pointer(to, bytes, bytes);
    mbarrier_at(barrier);
    if (to >> 24 != barrier >> 24) fail("st.async: the data goes to another block than its mbarrier's");
    if (!machine.blocks[to >> 24]->live) fail("st.async to a block that has ended");
    race_access(current(), to, bytes, true, __builtin_return_address(0));
    const std::vector<uint32_t> launched = race_launch();
    std::array<char, 16> copy;
    memcpy(copy.data(), data, bytes);
    defer(
        [=] {
            memcpy(shared_pointer(to, bytes, bytes), copy.data(), bytes);
            complete(barrier, bytes, launched);
        },
        nullptr, 0, "st.async");
}

} // namespace emu
