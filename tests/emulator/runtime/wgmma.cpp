/* wgmma: an instruction of a warpgroup runs once all its threads have issued it, at a moment of the seed's choice: as
 * the last one issues it, or not before a thread waits for it. Until then nothing is read of shared memory and nothing
 * is written to the accumulators. */
#include "machine.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace emu {

constexpr int M = 64, K = 16, THREADS = 128;

static Warpgroup &warpgroup() { return current_block().warpgroups[current().linear / THREADS]; }

static void execute_first(Warpgroup &group) {
    execute_wgmma(group.ops.front(), group, current_block());
    group.ops.pop_front();
    ++group.executed;
    ++machine.progress;
}

void wgmma_fence() {}

void wgmma_issue(const Wgmma &mine) {
    Fiber &fiber = current();
    Warpgroup &group = warpgroup();
    const uint64_t index = fiber.wgmma_issued++ - group.executed; // nothing runs before this thread has issued it
    while (group.ops.size() <= index) group.ops.emplace_back();
    WarpgroupOp &op = group.ops[index];
    op.thread[fiber.linear % THREADS] = mine;
    op.code = __builtin_return_address(0);
    if (fiber.lane == 0) op.clock[fiber.linear % THREADS / WARP] = fiber.clock;
    if (++op.arrivals < THREADS) return;
    if (draw_when() == When::NOW)
        while (!group.ops.empty() && group.ops.front().arrivals == THREADS) execute_first(group);
    wake_all(group.waiting);
}

void wgmma_commit() { current().wgmma_groups.push_back(current().wgmma_issued); }

void wgmma_wait(unsigned pending) {
    const Fiber &fiber = current();
    Warpgroup &group = warpgroup();
    const auto &groups = fiber.wgmma_groups;
    const uint64_t target = groups.size() > pending ? groups[groups.size() - 1 - pending] : 0;
    while (group.executed < target) {
        if (group.ops.front().arrivals == THREADS) {
            execute_first(group);
        } else {
            group.waiting.push_back(&current());
            wait_for("wgmma.wait_group", pending);
        }
    }
    race_acquire_products(group, target);
    perhaps_yield();
}

/* ---- operands ---- */

/* A descriptor's fields; addresses and distances in bytes. */
struct Descriptor {
    uint32_t start, leading, stride, span; // span: of the swizzle, 16 for none

    explicit Descriptor(uint64_t bits)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4),
          span(bits >> 62 == 1   ? 128
               : bits >> 62 == 2 ? 64
               : bits >> 62 == 3 ? 32
                                 : 16) {
        if (bits >> 49 & 7) fail("a matrix descriptor with a base offset, which the emulator does not know");
    }

    /* Where element (n, k) of an operand lies, n along M or N. The swizzle goes by bits of the address itself. */
    uint32_t at(int n, int k, bool mn_major) const {
        uint32_t address = start;
        if (!mn_major && span > 16)
            address += n / 8 * stride + n % 8 * span + 2 * k;
        else if (!mn_major)
            address += n / 8 * stride + n % 8 * 16 + k / 8 * leading + k % 8 * 2;
        else
            address += n / int(span / 2) * leading + k / 8 * stride + k % 8 * span + n % int(span / 2) * 2;
        return address ^ ((address >> 7 & (span / 16 - 1)) << 4);
    }
};

static float element(uint16_t bits, bool bf16) { return bf16 ? __bfloat162float({bits}) : __half2float(__half{bits}); }

/* Rows [0, count) of an operand, K columns each, as float32. */
static void read_operand(float *to, uint64_t bits, int count, bool mn_major, int scale, const WarpgroupOp &op,
                         const Warpgroup &group, unsigned rank) {
    const Descriptor descriptor(bits);
    if (mn_major && descriptor.span == 16) fail("wgmma: an MN-major operand without swizzle, which the emulator lacks");
    for (int n = 0; n < count; ++n)
        for (int k = 0; k < K; ++k) {
            const uint32_t address = descriptor.at(n, k, mn_major) | rank << 24;
            const auto *at = static_cast<const uint16_t *>(shared_pointer(address, 2, 2));
            race_product(op, group, address, 2);
            to[n * K + k] = element(*at, op.thread[0].bf16) * float(scale);
        }
}

void execute_wgmma(const WarpgroupOp &op, const Warpgroup &group, const Block &block) {
    const Wgmma &first = op.thread[0];
    for (const Wgmma &mine : op.thread)
        if (mine.n != first.n || mine.bf16 != first.bf16 || mine.a_in_registers != first.a_in_registers ||
            mine.accumulate != first.accumulate || mine.b != first.b || (!mine.a_in_registers && mine.a != first.a))
            fail("the threads of a warpgroup issue different wgmma instructions\n%s", places().c_str());
    static float a[M * K], b[256 * K], bt[K * 256], row[256];
    const int n = first.n;
    if (first.a_in_registers) {
        for (int thread = 0; thread < THREADS; ++thread)
            for (int i = 0; i < 8; ++i) {
                const int r = thread / 32 * 16 + thread % 32 / 4 + (i >> 1 & 1) * 8,
                          c = thread % 4 * 2 + (i & 1) + (i >> 2) * 8;
                const uint32_t word = op.thread[thread].word[i / 2];
                a[r * K + c] = element(uint16_t(i & 1 ? word >> 16 : word), first.bf16) * float(first.scale_a);
            }
    } else {
        read_operand(a, first.a, M, first.a_mn_major, first.scale_a, op, group, block.rank);
    }
    read_operand(b, first.b, n, first.b_mn_major, first.scale_b, op, group, block.rank);
    for (int c = 0; c < n; ++c)
        for (int k = 0; k < K; ++k) bt[k * n + c] = b[c * K + k];
    for (int r = 0; r < M; ++r) {
        for (int c = 0; c < n; ++c) row[c] = 0.0f;
        for (int k = 0; k < K; ++k) {
            const float x = a[r * K + k];
            for (int c = 0; c < n; ++c) row[c] += x * bt[k * n + c];
        }
        for (int c = 0; c < n; ++c) {
            const int thread = r / 16 * 32 + r % 8 * 4 + c % 8 / 2, i = c / 8 * 4 + (r % 16 / 8) * 2 + c % 2;
            float &d = op.thread[thread].d[i];
            d = first.accumulate ? d + row[c] : row[c];
        }
    }
}

} // namespace emu
