/* Shared memory: its window, its guards, and what it holds before anybody writes. */
#include "machine.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

namespace emu {

/* The window of a block: 1 KB that CUDA keeps, dynamic memory up to 227 KB, static memory. */
constexpr uint32_t DYNAMIC_AT = 0x400, STATIC_AT = 0x3A000, STATIC_BYTES = 0x6000, RANK_BIT = 24;
constexpr size_t PAGE = 4096, MAX_DYNAMIC = 227 * 1024, ALIGNMENT = 1024;
constexpr size_t WINDOW = 58 * PAGE;   // pages of dynamic memory, and one that nobody may touch
constexpr unsigned char POISON = 0xff; // NaN in every floating-point type

static size_t pages_of(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Dynamic memory begins at a multiple of 1024 bytes, and an inaccessible page follows within 1023. */
void open_shared(Block &block, size_t bytes) {
    if (bytes > MAX_DYNAMIC) fail("%zu bytes of dynamic shared memory: a block has at most %zu", bytes, MAX_DYNAMIC);
    if (!block.window) {
        void *memory =
            mmap(nullptr, WINDOW + STATIC_BYTES + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for shared memory");
        block.window = static_cast<char *>(memory);
        block.statics = block.window + WINDOW;
        mprotect(block.statics + STATIC_BYTES, PAGE, PROT_NONE);
        block.dynamic_pages = 0;
    }
    const size_t pages = pages_of(bytes);
    if (pages != block.dynamic_pages) {
        mprotect(block.window, WINDOW, PROT_NONE);
        if (pages) mprotect(block.window, pages, PROT_READ | PROT_WRITE);
        block.dynamic_pages = pages;
    }
    memset(block.window, POISON, pages);
    memset(block.statics, POISON, STATIC_BYTES);
    block.dynamic_bytes = bytes;
    block.dynamic = block.window + pages - (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    block.static_bytes = 0;
    block.static_at.clear();
}

void check_shared(const Block &block) {
    for (const char *at = block.window; at < block.window + block.dynamic_pages; ++at) {
        if (at == block.dynamic) at += block.dynamic_bytes;
        if (at == block.window + block.dynamic_pages) break;
        if (static_cast<unsigned char>(*at) != POISON)
            fail("block (%u, %u, %u) wrote %td bytes from the begin of its %zu bytes of dynamic shared memory",
                 block.index.x, block.index.y, block.index.z, at - block.dynamic, block.dynamic_bytes);
    }
    for (const char *at = block.statics + block.static_bytes; at < block.statics + STATIC_BYTES; ++at)
        if (static_cast<unsigned char>(*at) != POISON)
            fail("block (%u, %u, %u) wrote beside its static shared memory", block.index.x, block.index.y,
                 block.index.z);
}

void *dynamic_shared(size_t alignment) {
    if (alignment > ALIGNMENT) fail("dynamic shared memory is aligned to %zu bytes, not %zu", ALIGNMENT, alignment);
    return current_block().dynamic;
}

void *static_shared(const void *key, size_t bytes, size_t alignment) {
    Block &block = current_block();
    const auto found = block.static_at.find(key);
    if (found != block.static_at.end()) return block.statics + found->second;
    const size_t at = (block.static_bytes + alignment - 1) / alignment * alignment;
    if (at + bytes > STATIC_BYTES) fail("more than %u bytes of static shared memory", STATIC_BYTES);
    block.static_at[key] = at;
    block.static_bytes = at + bytes;
    return block.statics + at;
}

uint32_t shared_address(const void *pointer) {
    const char *at = static_cast<const char *>(pointer);
    const unsigned blocks = machine.grid.cluster.x * machine.grid.cluster.y * machine.grid.cluster.z;
    for (unsigned n = 0; n < blocks; ++n) {
        const unsigned rank = (self->rank + n) % blocks;
        const Block &block = *machine.blocks[rank];
        if (at >= block.dynamic && at <= block.dynamic + block.dynamic_bytes)
            return rank << RANK_BIT | uint32_t(DYNAMIC_AT + (at - block.dynamic));
        if (at >= block.statics && at <= block.statics + STATIC_BYTES)
            return rank << RANK_BIT | uint32_t(STATIC_AT + (at - block.statics));
    }
    fail("%p is no address of shared memory\n%s", pointer, place_of(current(), __builtin_return_address(0)).c_str());
}

void *shared_pointer(uint32_t address, size_t bytes, size_t alignment) {
    const unsigned rank = address >> RANK_BIT;
    const uint32_t offset = address & ((1u << RANK_BIT) - 1);
    const char *why = nullptr;
    char *at = nullptr;
    if (rank >= machine.grid.cluster.x * machine.grid.cluster.y * machine.grid.cluster.z)
        why = "the cluster has no such block";
    else if (offset >= DYNAMIC_AT && offset + bytes <= DYNAMIC_AT + machine.blocks[rank]->dynamic_bytes)
        at = machine.blocks[rank]->dynamic + (offset - DYNAMIC_AT);
    else if (offset >= STATIC_AT && offset + bytes <= STATIC_AT + machine.blocks[rank]->static_bytes)
        at = machine.blocks[rank]->statics + (offset - STATIC_AT);
    else
        why = "outside the block's shared memory";
    if (at && reinterpret_cast<uintptr_t>(at) % alignment) why = "not aligned";
    if (why)
        fail("shared address %#x, dynamic byte %d, %zu bytes aligned to %zu: %s\n%s", address, int(offset - DYNAMIC_AT),
             bytes, alignment, why, self ? place_of(current(), __builtin_return_address(0)).c_str() : "");
    return at;
}

void read_shared(unsigned lane, void *to, uint32_t from, size_t bytes) {
    const void *at = shared_pointer(from, bytes, bytes);
    race_access(*machine.warps[current().warp].fiber[lane], from, bytes, false, __builtin_return_address(0));
    memcpy(to, at, bytes);
}
void write_shared(unsigned lane, uint32_t to, const void *from, size_t bytes) {
    void *at = shared_pointer(to, bytes, bytes);
    race_access(*machine.warps[current().warp].fiber[lane], to, bytes, true, __builtin_return_address(0));
    memcpy(at, from, bytes);
}

bool inside_shared(const Block &block, const void *pointer, size_t bytes) {
    const char *at = static_cast<const char *>(pointer);
    return (at >= block.dynamic && at + bytes <= block.dynamic + block.dynamic_bytes) ||
           (at >= block.statics && at + bytes <= block.statics + block.static_bytes);
}

std::string describe_address(const void *address) {
    char text[200];
    const char *at = static_cast<const char *>(address);
    for (const Block *block : machine.blocks)
        if (at >= block->statics && at < block->statics + block->static_bytes) {
            snprintf(text, sizeof text, "byte %td of the static shared memory of block (%u, %u, %u)",
                     at - block->statics, block->index.x, block->index.y, block->index.z);
            return text;
        } else if (at >= block->window && at < block->statics + STATIC_BYTES + PAGE) {
            snprintf(text, sizeof text, "byte %td of the %zu bytes of dynamic shared memory of block (%u, %u, %u)",
                     at - block->dynamic, block->dynamic_bytes, block->index.x, block->index.y, block->index.z);
            return text;
        }
    for (unsigned n = 0; n < machine.count; ++n)
        if (at >= machine.fibers[n]->stack && at < machine.fibers[n]->stack + PAGE)
            return "the end of a thread's stack";
    snprintf(text, sizeof text, "address %p", address);
    return text;
}

} // namespace emu
