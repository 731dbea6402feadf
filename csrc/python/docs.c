/* Docstrings: what a function does, its signature and its parameters as signature.def has them, and what comes back. */
#include "call.h"

#include <stdlib.h>
#include <string.h>

/* A function's text around its parameters. */
typedef struct doc {
    const char *head, *tail;
    uint32_t there;   /* parameters of these functions are documented there, and only named here */
    const char *rest; /* of the others, after their names; NULL: no list of parameters */
} doc;

#define RAISES "\nRaises\n------\nValueError, TypeError, BufferError, UnsupportedError, CudaError, MemoryError\n"

static const doc docs[FA_FN_COUNT] = {
    [FA_FN_attention] =
        {
            .head = "softmax(scale * q k^T + bias, over the visible keys) v, for any array library.\n",
            .rest = "",
            .tail = "\n"
                    "Returns\n"
                    "-------\n"
                    "out : array of q's kind, (B, H, Sq, Dv) or (B, Sq, H, Dv), q's dtype, C-contiguous\n"
                    "    0 where a query sees no key.\n"
                    "lse : array, (B, H, Sq), float32 (float64 for float64)\n"
                    "    With return_lse, or with a pair as `out`: natural logarithm of the softmax's denominator,\n"
                    "    sinks included; -inf where a query sees no key and there are no sinks.\n"
                    "\n"
                    "Raises\n"
                    "------\n"
                    "ValueError, TypeError, BufferError\n"
                    "    An argument is not accepted; the message names it, what was given and what is accepted.\n"
                    "UnsupportedError\n"
                    "    No kernel takes the call, or the forced one refuses it, with its reason.\n"
                    "CudaError, MemoryError\n"
                    "    CUDA is missing or failed; memory ran out.",
        },
    [FA_FN_explain] =
        {
            .head = "Which kernel attention() would run for these arguments, and why not each other.\n"
                    "\n"
                    "Runs nothing. Returns (name, {other name: reason}); name is None when no kernel takes the call. "
                    "Raises\n"
                    "what attention() raises for arguments that are not accepted. With a description of a CUDA device, "
                    "a dict\n"
                    "such as _core.device_info() returns, it says what would run there: the arrays may be NumPy's, and "
                    "no\n"
                    "GPU is needed.",
        },
    [FA_FN_answers] =
        {
            .head = "What each kernel says to a call: {name: (answer, reason, plan)}; a loaded kernel that is forced "
                    "included.\n"
                    "\n"
                    "`answer` is 'takes', 'declines' (could, but another kernel is faster), 'refuses' (cannot), 'not "
                    "here'\n"
                    "(this machine lacks what it needs) or 'fails' (the environment asks for what is not there). "
                    "`plan` is\n"
                    "None unless the kernel takes or declines: blocks, threads, smem_bytes, workspace_bytes, keep, own "
                    "(bytes).\n"
                    "`device` as for explain(); `features` are bits that the problem shall have besides its own.",
        },
    [FA_FN_attention_backward] =
        {
            .head =
                "Gradients of attention().\n"
                "\n"
                "P = exp(s - lse), delta = dout . out - dlse, dS = P (dout . v - delta), dT = dS (1 - (c / "
                "softcap)^2):\n"
                "dv = P^T dout, dk = scale dT^T q, dq = scale dT k, dbias = dS, dsinks = -sum exp(sink - lse) delta\n"
                "(FlashAttention-2's formulas, Dao 2023, with softcap, bias, sinks and LSE). P is never renormalised:\n"
                "a call over a block of the keys, with the out and lse of all of them, gives the block's exact "
                "share.\n",
            .there = IN_FORWARD,
            .rest = "As for attention(): those of the call that made out and lse. kernel is a name of\n"
                    "kernels('backward'), FA_EXT_KERNEL_BACKWARD the variable. Gradients of bias and sinks that sum\n"
                    "over the batch depend on all of it.",
            .tail =
                "\n"
                "Returns\n"
                "-------\n"
                "tuple of arrays of q's kind, in the order of wrt\n"
                "    dq, dk, dv: shape of q, k, v, q's dtype. dbias, dsinks: shape and dtype of bias and sinks; dbias "
                "sums\n"
                "    over axes of size 1. C-contiguous where they are new. A query that sees no key gets and gives 0.\n"
                "    Where |lse| is so large that float32 does not resolve it to a part of 1, P is as coarse.\n" RAISES
                "    As attention(). Nothing is written then.",
        },
    [FA_FN_explain_backward] =
        {
            .head = "Which kernel attention_backward() would run for these arguments, and why not each other; see "
                    "explain().",
        },
    [FA_FN_merge] =
        {
            .head = "Results of attention over parts of the keys -> the result over all of them.\n"
                    "\n"
                    "m = max(lse_i, sink), w_i = exp(lse_i - m), W = sum w_i + exp(sink - m): out = sum w_i out_i / W "
                    "and\n"
                    "lse = m + log W, in float32 in the order of the lists (float64 for float64). A part whose LSE is "
                    "-inf or\n"
                    "+inf at a row is empty there, and its out is not read; where all are, out is 0 and lse the sink "
                    "or -inf.\n",
            .there = IN_FORWARD,
            .rest = "As for attention(); kernel is a name of kernels('merge'), FA_EXT_KERNEL_MERGE the variable.",
            .tail = "\n"
                    "Returns\n"
                    "-------\n"
                    "out, lse : arrays of outs' kind\n"
                    "    One part without sinks comes back bit for bit.\n" RAISES
                    "    As attention(). Nothing is written then.",
        },
    [FA_FN_explain_merge] =
        {
            .head = "Which kernel merge() would run for these arguments, and why not each other; see explain().",
        },
    [FA_FN_append] =
        {
            .head =
                "Writes new keys and values into caches, in place, before attention() over the same arrays.\n"
                "\n"
                "k and v, (T, Hk, D) and (T, Hk, Dv) or of four axes in `layout`, hold the new tokens of sequences as "
                "q does in\n"
                "attention(). seqlens_k counts them: token t of the n of sequence b becomes key seqlens_k[b] - n + t. "
                "Bytes of the\n"
                "caches that belong to no new key stay as they are. Of two tokens with one place one is there, "
                "whole.\n",
            .there = IN_FORWARD,
            .rest =
                "As for attention(), about k in place of q; layout must be said, and one of seqlens_k and slots.\n"
                "kernel is a name of kernels('append'), FA_EXT_KERNEL_APPEND the variable. A token without a place,\n"
                "or with a position outside rotary's tables, is a fault where it is none of slots < 0: not written.",
            .tail = "\n"
                    "Returns\n"
                    "-------\n"
                    "array of q's kind, or None without q\n"
                    "    The rotated q; 0 where the token is not written.\n" RAISES
                    "    As attention(). Nothing is written then.",
        },
    [FA_FN_explain_append] =
        {
            .head = "Which kernel append() would run for these arguments, and why not each other; see explain().",
        },
    [FA_FN_workspace_size] =
        {
            .head = "Bytes that attention() needs as `workspace` for these arguments; 0 on the CPU.\n"
                    "\n"
                    "From shapes, dtypes, options and the device: it is enough for any contents of the index arrays.",
        },
    [FA_FN_faults] =
        {
            .head =
                "Bad contents of index arrays that calls with check=False have met, as they were counted so far.\n"
                "\n"
                "'length': a length is negative or more than its storage holds; it is clamped. 'cu_seqlens': a "
                "start falls, or is\n"
                "outside the rows there are; it counts as the running maximum. 'page': an entry of the table is no "
                "page; its keys\n"
                "are hidden, and append() writes none there. 'slot', 'position': append() has no place, or no row of "
                "rotary's\n"
                "tables, for a token, which it does not write. Does not wait for the device; calls that have ended "
                "are counted.\n",
            .rest = "",
            .tail = "\n"
                    "Returns\n"
                    "-------\n"
                    "list of (kind, count, sequence, index, value)\n"
                    "    Each kind that was met, with the first of its kind: for lengths and starts `index` is 0 for "
                    "q and 1 for k, for\n"
                    "    pages the column of the table, else the row of k; `value` is what stood there. A device may "
                    "count a page "
                    "more than\n"
                    "    once where `positions` are given, and of several at a time any may be the first.",
        },
    [FA_FN_kernels] =
        {
            .head = "Names of an operation's kernels compiled into this build, in order of preference.\n",
            .rest = "",
            .tail = "",
        },
    [FA_FN_to_device] =
        {
            .head = "Copies a NumPy array to a CUDA device.\n",
            .rest = "",
            .tail = "\nReturns a DeviceArray, C-contiguous, of the same shape and dtype. Blocks until it is there.",
        },
    [FA_FN_load] =
        {
            .head = "Loads a shared library that exports one kernel, for kernel=<name>.\n",
            .rest = "",
            .tail = "\n"
                    "Returns the name to force it by: the kernel's own, or <kernel>@<n> where that is taken. Loaded\n"
                    "kernels are never chosen by themselves. A path is loaded once; a rebuilt library needs a new "
                    "path.",
        },
};

/* Text that grows; NULL once memory is out. */
typedef struct text {
    char *bytes;
    size_t used, room;
} text;

static void append(text *t, const char *piece, size_t length) {
    if (t->bytes && t->used + length + 1 > t->room) {
        char *grown = realloc(t->bytes, t->room = 2 * (t->used + length + 1));
        if (!grown) free(t->bytes);
        t->bytes = grown;
    }
    if (!t->bytes) return;
    memcpy(t->bytes + t->used, piece, length);
    t->bytes[t->used += length] = 0;
}

static void add(text *t, const char *piece) { append(t, piece, strlen(piece)); }

/* Lines that are indented, each with its end. */
static void add_lines(text *t, const char *lines) {
    while (*lines) {
        const size_t length = strcspn(lines, "\n");
        add(t, "    ");
        append(t, lines, length);
        add(t, "\n");
        lines += length + (lines[length] == '\n');
    }
}

static bool has(fa_function function, int n) { return fa_parameters[n].functions >> function & 1; }

/* "attention(q, k, v, *, causal=False, ...)" */
static void add_signature(text *t, fa_function function, const char *name) {
    bool first = true, keywords = false;
    add(t, name);
    add(t, "(");
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const fa_parameter *p = &fa_parameters[n];
        if (!has(function, n)) continue;
        if (!first) add(t, ", ");
        if (p->passing == FA_KEYWORD && !keywords) add(t, "*, ");
        keywords |= p->passing == FA_KEYWORD;
        first = false;
        add(t, p->name);
        if (p->standard) add(t, "="), add(t, p->standard);
    }
    add(t, ")\n--\n\n");
}

static void add_parameters(text *t, fa_function function) {
    enum { WIDTH = 120 };
    const doc *d = &docs[function];
    bool others = false;
    add(t, "\nParameters\n----------\n");
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const fa_parameter *p = &fa_parameters[n];
        if (!has(function, n) || (p->functions & d->there)) continue;
        const size_t length = strcspn(p->doc, "\n");
        add(t, p->name);
        add(t, " : ");
        append(t, p->doc, length);
        add(t, "\n");
        add_lines(t, p->doc + length + (p->doc[length] == '\n'));
    }
    size_t line = t->used;
    for (int n = 0; n < FA_ARG_COUNT; n++) {
        const char *name = fa_parameters[n].name;
        if (!has(function, n) || !(fa_parameters[n].functions & d->there)) continue;
        if (others) add(t, ",");
        if (t->used - line + strlen(name) + 2 > WIDTH) {
            add(t, "\n");
            line = t->used;
        } else if (others) {
            add(t, " ");
        }
        add(t, name);
        others = true;
    }
    if (others) add(t, "\n");
    add_lines(t, d->rest);
}

char *fa_doc_new(fa_function function) {
    static const char *const names[FA_FN_COUNT] = {
#define NAME(name) #name,
        FA_FUNCTIONS(NAME)
#undef NAME
    };
    text t = {.bytes = malloc(4096), .room = 4096};
    add_signature(&t, function, names[function]);
    add(&t, docs[function].head);
    if (docs[function].rest) add_parameters(&t, function);
    if (docs[function].tail) add(&t, docs[function].tail);
    return t.bytes;
}
