/* Where threads are: return addresses of their stacks as lines of source, by addr2line. */
#include "machine.h"

#include <dlfcn.h>
#include <map>
#include <stdio.h>
#include <string.h>

namespace emu {

constexpr int DEPTH = 12;

/* Return addresses of a stack of frames, innermost first. */
static std::vector<uintptr_t> frames_of(const Fiber &fiber, uintptr_t instruction, const void *frame) {
    std::vector<uintptr_t> found;
    if (instruction) found.push_back(instruction);
    const char *low = fiber.stack, *high = fiber.stack + STACK_BYTES - 2 * sizeof(void *);
    const char *at = static_cast<const char *>(frame);
    while (found.size() < DEPTH && at > low && at < high && reinterpret_cast<uintptr_t>(at) % 8 == 0) {
        const uintptr_t *pair = reinterpret_cast<const uintptr_t *>(at);
        if (!pair[1]) break;
        found.push_back(pair[1] - 1);
        const char *above = reinterpret_cast<const char *>(pair[0]);
        if (above <= at) break;
        at = above;
    }
    return found;
}

static std::vector<uintptr_t> frames_of(const Fiber &fiber) {
    if (&fiber == self) return frames_of(fiber, 0, __builtin_frame_address(0));
    void *const *saved = static_cast<void *const *>(fiber.stack_pointer);
    return frames_of(fiber, reinterpret_cast<uintptr_t>(saved[6]) - 1, saved[5]); // as emu_switch() pushes them
}

/* "file:line < file:line ..." of the kernel's own files, by address of the first frame. */
static std::string lines_of(const std::vector<uintptr_t> &frames) {
    std::string own = __FILE__; // this folder, and include/ beside it
    own.erase(own.rfind('/'));
    const std::string shims = own.substr(0, own.rfind('/')) + "/include/";
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&lines_of), &info)) return "?";
    std::string command = "addr2line -i -e '" + std::string(info.dli_fname) + "'";
    char text[1024];
    for (const uintptr_t frame : frames) {
        snprintf(text, sizeof text, " %#lx",
                 static_cast<unsigned long>(frame - reinterpret_cast<uintptr_t>(info.dli_fbase)));
        command += text;
    }
    FILE *pipe = popen((command + " 2>/dev/null").c_str(), "r");
    if (!pipe) return "?";
    std::string all;
    while (fgets(text, sizeof text, pipe)) {
        const char *slash = strrchr(text, '/');
        const bool ours = strstr(text, own.c_str()) || strstr(text, shims.c_str());
        if (ours || strstr(text, "/usr/include/") || text[0] == '?' || text[0] == '<') continue;
        while (slash && slash > text && slash[-1] != '/') --slash; // with its folder: families have files of one name
        std::string line = slash ? slash : text;
        line = line.substr(0, line.find_first_of(" \n"));
        all += (all.empty() ? "" : " < ") + line;
    }
    pclose(pipe);
    return all.empty() ? "?" : all;
}

std::string line_of(const void *code) { return lines_of({reinterpret_cast<uintptr_t>(code) - 1}); }

static std::string wait_of(const Fiber &fiber) {
    if (fiber.state == Fiber::DONE) return "ended";
    if (fiber.state == Fiber::READY) return "could run";
    char text[200];
    if (!strcmp(fiber.waits_for, "barrier")) {
        const Barrier &barrier = machine.blocks[fiber.rank]->barrier[fiber.waits_detail[0]];
        snprintf(text, sizeof text, "barrier %d, %u of %d threads there", int(fiber.waits_detail[0]), barrier.arrived,
                 int(fiber.waits_detail[1]));
    } else if (!strcmp(fiber.waits_for, "mbarrier")) {
        const Mbarrier &barrier = machine.mbarriers[uint32_t(fiber.waits_detail[0])];
        snprintf(text, sizeof text, "mbarrier %#x, parity %d: it is in phase %u, lacks %d arrivals and %d bytes",
                 unsigned(fiber.waits_detail[0]), int(fiber.waits_detail[1]), barrier.phase, int(barrier.pending),
                 int(barrier.bytes));
    } else {
        snprintf(text, sizeof text, "%s", fiber.waits_for);
    }
    return text;
}

std::string place_of(const Fiber &fiber, const void *instruction) {
    char text[120];
    snprintf(text, sizeof text, "block (%u, %u, %u) thread %u at ", fiber.block.x, fiber.block.y, fiber.block.z,
             fiber.linear);
    std::vector<uintptr_t> frames = frames_of(fiber);
    if (instruction) frames.insert(frames.begin(), reinterpret_cast<uintptr_t>(instruction));
    return text + lines_of(frames);
}

std::string places() {
    struct Group {
        std::string wait;
        std::vector<uintptr_t> frames;
        std::vector<const Fiber *> fibers;
    };
    std::vector<Group> groups;
    for (unsigned n = 0; n < machine.count; ++n) {
        const Fiber &fiber = *machine.fibers[n];
        const std::string wait = wait_of(fiber);
        std::vector<uintptr_t> frames;
        if (fiber.state != Fiber::DONE) frames = frames_of(fiber);
        size_t at = 0;
        while (at < groups.size() &&
               !(groups[at].wait == wait && groups[at].frames == frames && groups[at].fibers[0]->rank == fiber.rank))
            ++at;
        if (at == groups.size()) groups.push_back({wait, frames, {}});
        groups[at].fibers.push_back(&fiber);
    }
    std::string all;
    for (const Group &group : groups) {
        char text[120];
        const Fiber &first = *group.fibers[0];
        snprintf(text, sizeof text, "block (%u, %u, %u) threads", first.block.x, first.block.y, first.block.z);
        all += text;
        for (size_t n = 0; n < group.fibers.size();) {
            size_t end = n + 1;
            while (end < group.fibers.size() && group.fibers[end]->linear == group.fibers[end - 1]->linear + 1) ++end;
            const unsigned from = group.fibers[n]->linear, to = group.fibers[end - 1]->linear;
            snprintf(text, sizeof text, from == to ? " %u" : " %u-%u", from, to);
            all += text;
            n = end;
        }
        all += ": " + group.wait;
        if (!group.frames.empty()) all += " at " + lines_of(group.frames);
        all += "\n";
    }
    return all;
}

} // namespace emu
