/* Reasons in words: the marks of why.def. See why.h. */
#include "dispatch/why.h"

#include <stdio.h>
#include <string.h>

#include "problem/operands.h"

#if defined(__x86_64__)
#define FA_CPU_ISAS "amxbf16, avx512bf16, avx512, avx2, generic"
#else
#define FA_CPU_ISAS "generic"
#endif

static const char *const words[] = {
#define FA_WHY(name, text) text,
#include "why.def"
#undef FA_WHY
};

typedef struct writer {
    char *text;
    size_t used, size;
} writer;

static void add(writer *w, const char *text) {
    const size_t left = w->size - w->used, length = strlen(text), taken = length < left ? length : left - 1;
    memcpy(w->text + w->used, text, taken);
    w->used += taken;
    w->text[w->used] = 0;
}

static void add_number(writer *w, int64_t number) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)number);
    add(w, text);
}

/* A compute capability: "8.9" */
static void add_capability(writer *w, int64_t cc) {
    add_number(w, cc / 10);
    add(w, ".");
    add_number(w, cc % 10);
}

/* "a", "a and b", "a, b and c": the names of the bits that are set. */
static void add_set(writer *w, uint32_t bits, const char *(*name)(int), const char *between, const char *last) {
    bool begun = false;
    for (int n = 0; bits; n++, bits >>= 1) {
        if (!(bits & 1)) continue;
        if (begun) add(w, bits >> 1 ? between : last);
        add(w, name(n));
        begun = true;
    }
}

static const char *dtype_name(int n) { return fa_dtype_name((fa_dtype)n); }

static const char *feature_name(int n) {
    static const char *const names[] = {
#define FA_FEATURE(name, words) words,
#include "features.def"
#undef FA_FEATURE
    };
    return n < FA_FEATURE_COUNT ? names[n] : "feature that this build does not know";
}

static void add_mark(writer *w, char mark, const int64_t **value, const fa_device_info *device) {
    const int64_t v = mark == 'i' ? 0 : *(*value)++;
    switch (mark) {
    case 'n': add_number(w, v); break;
    case 'k': add_number(w, (v + 1023) / 1024); break;
    case 'c': add_capability(w, v); break;
    case 'r': {
        const int64_t to = *(*value)++;
        add_capability(w, v);
        if (to > v) add(w, " to ");
        if (to > v) add_capability(w, to);
        if (!to) add(w, " or newer");
        break;
    }
    case 'd': add(w, dtype_name((int)v)); break;
    case 'D': add_set(w, (uint32_t)v, dtype_name, ", ", " and "); break;
    case 'f': add_set(w, (uint32_t)v, feature_name, ", no ", " and no "); break;
    case 'o': add(w, fa_operands[v].words); break;
    case 'v': add(w, v == FA_CPU ? "the CPU" : "a CUDA device"); break;
    case 'l': add(w, device->library_error[v] ? device->library_error[v] : "a library cannot be opened"); break;
    case 'i': add(w, device->cpu_isa); break;
    default: break;
    }
}

const char *fa_why_text(const fa_why *why, const fa_device_info *device, char *text, size_t size) {
    writer w = {text, 0, size};
    const int64_t *value = why->value;
    const char *format = words[why->reason];
    text[0] = 0;
    for (; *format; format++) {
        if (*format == '%') {
            add_mark(&w, *++format, &value, device);
        } else {
            const char plain[2] = {*format, 0};
            add(&w, plain);
        }
    }
    return text;
}
