/* The state of an emulated launch, shared by the files of this folder. */
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <setjmp.h>
#include <string>
#include <vector>

#include "emulator.h"

namespace emu {

constexpr unsigned WARP = 32, BARRIERS = 16;
constexpr size_t STACK_BYTES = 256 << 10;

struct Copy { // cp.async
    uint32_t to;
    const void *from;
    uint32_t bytes, given;
};

/* One thread of a block. */
struct Fiber : Thread {
    enum State { READY, WAITING, DONE } state;
    unsigned linear, warp; // of the block; warp counts over the cluster
    void *stack_pointer;
    char *stack; // its lowest byte
    const char *waits_for;
    int64_t waits_detail[2];
    bool timed;                            // waits in mbarrier_wait: may be told "not yet"
    std::vector<std::vector<Copy>> copies; // groups; the last one is open
    uint64_t bulk_group, cluster_phase;
    uint64_t wgmma_issued;
    std::map<const void *, uint64_t> acquired; // tensor maps in global memory, by the number of their publication
    std::vector<uint32_t> clock;               // race.cpp
    uint16_t number;
    std::vector<uint64_t> wgmma_groups; // instructions issued when each was committed
    void clear();
};

/* Lanes of a warp on their way to one operation. */
struct Meeting {
    uint32_t mask = 0, there = 0;
    const char *operation = nullptr;
    void *lane[WARP];
};

struct Warp {
    uint32_t ready = 0;
    int priority = 0;
    Fiber *fiber[WARP] = {};
    std::vector<Meeting> meetings;
};

struct Barrier {
    unsigned expected = 0, arrived = 0;
    uint64_t phase = 0;
    int sum = 0, result = 0;
    std::vector<uint32_t> clock, ended; // of who arrives, of the phase that has ended
    std::vector<Fiber *> waiting;
};

struct Mbarrier {
    int64_t count = 0, pending = 0, bytes = 0;
    uint32_t phase = 0;
    std::vector<uint32_t> clock;
    std::vector<Fiber *> waiting;
};

struct WarpgroupOp {
    int arrivals = 0;
    Wgmma thread[128];
    std::vector<uint32_t> clock[4]; // of each warp's first lane as it issued this
    const void *code;
};
struct Warpgroup {
    unsigned number;             // among the actors of a race: after the threads
    std::deque<WarpgroupOp> ops; // from `executed` on
    uint64_t executed = 0;
    std::vector<Fiber *> waiting;
};

struct Block {
    unsigned rank;
    Index index;
    unsigned live;
    Barrier barrier[BARRIERS];
    std::vector<Warpgroup> warpgroups;
    // Shared memory; the dynamic part ends at an inaccessible page, up to alignment.
    char *window = nullptr; // begin of the pages
    char *dynamic = nullptr;
    size_t dynamic_bytes = 0, dynamic_pages = 0;
    char *statics = nullptr;
    size_t static_bytes = 0;
    std::map<const void *, size_t> static_at;
};

/* Work that the hardware does by itself at some moment. */
struct Pending {
    std::function<void()> run;
    bool early;   // may run before a wait asks for it
    Fiber *owner; // of a bulk store, with its group
    uint64_t group;
    const char *what;
    const void *map = nullptr; // of a tensor copy
};

struct Machine {
    Grid grid;
    void (*body)(void *);
    void *context;
    uint64_t seed, random;
    bool active = false;
    unsigned spins = 0, polls = 0;

    std::vector<Fiber *> fibers; // of the cluster that runs
    std::vector<Warp> warps;
    std::vector<Block *> blocks; // by rank
    unsigned count = 0, live = 0, last_warp = 0;
    uint64_t progress = 0, starved_at = 0; // what has come about so far

    std::map<uint32_t, Mbarrier> mbarriers;
    std::deque<Pending> pending;
    unsigned cluster_arrived = 0;
    uint64_t cluster_phase = 0;
    std::vector<Fiber *> cluster_waiting;
    std::vector<uint32_t> cluster_clock;

    void *main_stack_pointer = nullptr;
    sigjmp_buf main;
    std::string error;
};
extern Machine machine;

inline Fiber &current() { return *static_cast<Fiber *>(self); }
inline Block &current_block() { return *machine.blocks[self->rank]; }

uint64_t draw();         // random bits of the seed
bool one_in(unsigned n); // never with seed 0
enum class When { NOW, EARLY, LATE };
When draw_when(); // LATE with seed 0

void wait_for(const char *what, int64_t a = 0, int64_t b = 0); // until somebody wakes this thread
void wake(Fiber *fiber);
void wake_all(std::vector<Fiber *> &fibers);

void open_shared(Block &block, size_t dynamic_bytes);
void check_shared(const Block &block); // that nobody wrote beside it
bool inside_shared(const Block &block, const void *pointer, size_t bytes);
std::string describe_address(const void *address);

void flush_copies(Fiber &fiber);
void execute_wgmma(const WarpgroupOp &op, const Warpgroup &group, const Block &block);

/* Races: nothing is done unless the kernel is built to be checked. */
void race_begin();
void race_release(std::vector<uint32_t> &clock);
void race_acquire(const std::vector<uint32_t> &clock);
void race_meet(const Warp &warp, uint32_t mask);
/* Work that a thread releases here and others acquire later, from the mbarrier that counts it. */
std::vector<uint32_t> race_launch();
void race_land(std::vector<uint32_t> &clock, const std::vector<uint32_t> &launched);
/* A product reads, after all that its four warps had acquired when they issued it. */
void race_product(const WarpgroupOp &op, const Warpgroup &group, uint32_t address, size_t bytes);
void race_acquire_products(const Warpgroup &group, uint64_t count);
void race_access(const Fiber &fiber, uint32_t address, size_t bytes, bool write, const void *code);

std::string line_of(const void *code);
std::string places(); // where every thread of the cluster is
std::string place_of(const Fiber &fiber, const void *instruction);

} // namespace emu
