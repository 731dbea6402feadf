"""Times of prefill_sm90 on a Hopper GPU, beside wgmma_sm90 on dense calls of the same lengths and, where it is installed,
FlashAttention-3 (``flash_attn_interface``): replays of a CUDA graph, the lengths in the call's arrays.

    python kernels/trial/prefill_cells.py prefill_sm90.so [--cell V1 ...] [--rounds 20]

``prefill_sm90.so`` is what ``fa_ext/_build.py kernels/trial/prefill_sm90.cu -o`` makes. Each contender runs in turns; the
median of the rounds is printed in microseconds, with TFLOP/s of the products that the lengths ask for.
"""

import argparse
import statistics

import numpy as np
import torch

import fa_ext

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128


def lognormal(seed):
    return [max(1, int(n)) for n in np.random.default_rng(seed).lognormal(np.log(1024), 1, 32)]


def same(lengths):
    return [(n, n) for n in lengths]


#: cell: ([(queries, keys) of each sequence], page size or None)
CELLS = {
    "V1 16x1024": (same([1024] * 16), None),
    "V1 8x2048": (same([2048] * 8), None),
    "V1 2x8192": (same([8192] * 2), None),
    **{f"V2 seed {seed}": (same(lognormal(seed)), None) for seed in range(5)},
    "V2 1x16384 + 64x128": (same([16384] + [128] * 64), None),
    "V3 8192x34": (same([34] * 8192), None),
    "V3 64x512, half empty": (same([512, 0] * 32), None),
    "V3 32x512": (same([512] * 32), None),
    "V4 16x1024 page 16": (same([1024] * 16), 16),
    "V4 16x1024 page 128": (same([1024] * 16), 128),
    "V4 8x2048 page 16": (same([2048] * 8), 16),
    "V4 8x2048 page 128": (same([2048] * 8), 128),
    "C1 512 on 32k page 16": ([(512, 32768)], 16),
    "C1 64 on 128k page 16": ([(64, 131072)], 16),
}


def starts(lengths):
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def call_of(pairs, page_size, kernel):
    """The arguments of fa_ext.attention."""
    n_q, n_k = zip(*pairs)
    call = dict(q=normal(sum(n_q), HEADS, HEAD_DIM), cu_seqlens_q=starts(n_q), causal="bottom_right", kernel=kernel)
    if page_size is None:
        return call | dict(k=normal(sum(n_k), HEADS_KV, HEAD_DIM), v=normal(sum(n_k), HEADS_KV, HEAD_DIM), cu_seqlens_k=starts(n_k))
    columns = [-(-n // page_size) for n in n_k]
    order, table = torch.randperm(sum(columns)).to(torch.int32), torch.zeros(len(n_k), max(columns), dtype=torch.int32)
    for row, count, first in zip(table, columns, np.cumsum([0, *columns])):
        row[:count] = order[first : first + count]
    pages = [normal(sum(columns), page_size, HEADS_KV, HEAD_DIM) for _ in "kv"]
    lengths = torch.tensor(n_k, dtype=torch.int32, device="cuda")
    return call | dict(k=pages[0], v=pages[1], page_table=table.cuda(), seqlens_k=lengths, layout="bshd")


def contenders(pairs, page_size, kernel):
    """{name: a function that runs once}."""
    call = call_of(pairs, page_size, kernel)
    out = torch.empty_like(call["q"])
    found = {"prefill_sm90": lambda: fa_ext.attention(**call, out=out, check=False)}
    if len(set(pairs)) == 1 and pairs[0][0] == pairs[0][1] and pairs[0][0] >= 128:
        dense = [normal(len(pairs), pairs[0][0], h, HEAD_DIM) for h in (HEADS, HEADS_KV, HEADS_KV)]
        to = torch.empty_like(dense[0])
        found["wgmma_sm90, dense"] = lambda: fa_ext.attention(*dense, causal=True, layout="bshd", out=to, kernel="wgmma_sm90")
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return found
    most = [max(n) for n in zip(*pairs)]
    if page_size is None:
        found["FlashAttention-3"] = lambda: flash_attn_varlen_func(
            call["q"], call["k"], call["v"], call["cu_seqlens_q"], call["cu_seqlens_k"], *most, causal=True
        )
    return found


def graph_of(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph, repeats=5):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats


def flops(pairs):
    """Of a causal call, positions at the ends of the keys."""
    seen = sum(sum(min(max(k - q + i + 1, 0), k) for i in range(q)) for q, k in pairs)
    return 4 * seen * HEADS * HEAD_DIM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="prefill_sm90.so")
    parser.add_argument("--cell", action="append", default=[], help="repeatable: how a cell's name begins (default: all)")
    parser.add_argument("--rounds", type=int, default=20)
    parsed = parser.parse_args()
    kernel = fa_ext._core.load(parsed.library)
    torch.manual_seed(0)
    for name, (pairs, page_size) in CELLS.items():
        if parsed.cell and not name.startswith(tuple(parsed.cell)):
            continue
        graphs = {who: graph_of(run) for who, run in contenders(pairs, page_size, kernel).items()}
        times = {who: [] for who in graphs}
        for _ in range(parsed.rounds):
            for who, graph in graphs.items():
                times[who].append(microseconds(graph))
        of = flops(pairs)
        words = [f"{who} {statistics.median(x):.1f} us ({of / statistics.median(x) / 1e6:.0f})" for who, x in times.items()]
        print(f"{name:24} " + ", ".join(words), flush=True)


if __name__ == "__main__":
    main()
