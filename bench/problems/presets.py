"""The problems of the benchmarks: PRESETS, cases by name. Some consist of CELLS, which have names of their own."""

from __future__ import annotations

import dataclasses
import math
import random

from bench.problems import packed_training, score_options
from bench.problems.case import Case


def _paper():
    """16k tokens, hidden size 2048, storage (B, S, H, D): the FlashAttention paper's grid."""
    return [
        Case(16384 // s, 2048 // d, 2048 // d, s, s, d, dtype="bfloat16", causal=causal, layout="bshd")
        for d in (64, 128, 256) for causal in (False, True) for s in (512, 1024, 2048, 4096, 8192, 16384)
    ]  # fmt: skip


def _small():
    sizes = ((1, 8, 512, 64), (1, 8, 128, 64), (1, 8, 1024, 64), (2, 8, 512, 64), (1, 16, 512, 128), (8, 16, 512, 64),
             (1, 32, 2048, 128))  # fmt: skip
    return [Case(b, h, h, s, s, d, causal=causal, layout="bshd") for b, h, s, d in sizes for causal in (False, True)]


def _gqa():
    return [
        Case(b, h, hk, s, s, 128, dtype=t, causal=causal, layout="bshd")
        for causal in (False, True)
        for b, h, hk, s, t in ((8, 32, 8, 2048, "bfloat16"), (2, 32, 8, 8192, "bfloat16"), (4, 16, 16, 4096, "float16"),
                               (4, 16, 16, 4000, "bfloat16"))
    ]  # fmt: skip


def _decode():
    sizes = ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 8192), (128, 2048))
    return [Case(b, 32, hk, 1, s, 128, dtype="bfloat16", layout="bshd") for b, s in sizes for hk in (32, 8)]


def _options():
    """The costs of softcap, sinks and windows at 4096 keys, and the head dims between those of the paper's grid."""
    plain = [Case(4, 2048 // d, 2048 // d, 4096, 4096, d, dtype="bfloat16") for d in (64, 96, 128, 192, 256)]
    kinds = ({}, {"causal": True}, {"softcap": 30.0}, {"sinks": "same"}, {"causal": True, "sinks": "same"},
             {"window": (1024, 0)}, {"window": (512, 512)})  # fmt: skip
    return [dataclasses.replace(case, **kind) for case in plain for kind in kinds]


def _extras():
    """Additive bias and boolean mask."""
    return [
        dataclasses.replace(Case(4, 16, 16, s, s, d, dtype="bfloat16"), **kind)
        for d, s in ((64, 2048), (128, 2048), (128, 4096)) for kind in ({"bias": "full"}, {"mask": "full"})
    ]  # fmt: skip


def _backward(batch, heads, heads_kv, seq, head_dim, **options):
    return Case(batch, heads, heads_kv, seq, head_dim=head_dim, operation="backward",
                **{"dtype": "bfloat16", "layout": "bshd"} | options)  # fmt: skip


def _paper_backward():
    """The paper's grid, with sums in order and, to head_dim 128, in any; head dims between at one length, and a call that leaves
    most of the GPU idle."""
    masks = (False, True)
    paper = [dataclasses.replace(case, operation="backward") for case in _paper()]
    paper += [dataclasses.replace(case, deterministic=False) for case in paper if case.head_dim <= 128]
    between = [_backward(4, h, h, 4096, d, causal=causal) for d, h in ((96, 20), (192, 10)) for causal in masks]
    return paper + between + [_backward(1, 8, 8, 512, 64, dtype="float16", causal=causal) for causal in masks]


def _options_backward():
    """The costs of the other options of the backward pass, and of heads and lengths that differ."""
    masks = (False, True)
    grouped = [_backward(b, h, hk, s, 128, causal=causal)
               for b, h, s in ((4, 32, 4096), (1, 64, 8192)) for hk in (8, h) for causal in masks]  # fmt: skip
    windows = [_backward(max(1, 16384 // s), 64, 8, s, 64, causal=True, window=(1024, 0), **sinks)
               for s in (2048, 8192, 32768) for sinks in ({}, {"sinks": "float32"})]  # fmt: skip
    latent = [_backward(1, 128, 128, s, 192, head_dim_v=128, causal=True) for s in (4096, 16384)]
    ragged = [_backward(4, 16, 16, 4000, 128, causal=causal) for causal in masks] + [_backward(8, 16, 16, 256, 128, seq_k=8192)]
    bias = [_backward(4, 16, 16, 2048, 64, bias="shared")]
    kinds = ({}, {"sinks": "float32"}, {"dlse": True}, {"accumulate": True}, {"dropout": (0.1, 1)}, {"softcap": 30.0})
    return grouped + windows + latent + ragged + bias + [_backward(4, 16, 16, 4096, 128, **kind) for kind in kinds]


def _dropout():
    """Calls with dropout and without, both passes. No size is one of the paper's, which are measured beside peers."""
    sizes = ((8, 12, 1024, 64), (2, 32, 4096, 64), (2, 16, 4096, 128))
    plain = [_backward(b, h, h, s, d, causal=causal) for b, h, s, d in sizes for causal in (False, True)]
    plain += [dataclasses.replace(case, operation="attention") for case in plain]
    return [dataclasses.replace(case, dropout=dropout) for case in plain for dropout in (None, (0.1, 1))]


def _cpu_backward():
    sizes = ((8, 512, 64), (8, 2048, 64), (16, 1024, 128))
    return [_backward(1, h, h, s, d, dtype="float32", layout="bhsd", causal=causal) for h, s, d in sizes for causal in (False, True)]


def _cpu():
    """Whole sequences; causal calls so short that what a mask costs shows; decoding steps."""
    kinds = (("float32", False), ("float32", True), ("bfloat16", False))
    whole = [
        Case(1, h, h, s, s, d, dtype=t, causal=causal)
        for h, s, d in ((8, 512, 64), (8, 2048, 64), (16, 2048, 128)) for t, causal in kinds
    ]  # fmt: skip
    short = [Case(1, 8, 8, s, s, 64, dtype="float32", causal=causal) for s in (32, 64, 128) for causal in (False, True)]
    decode = [Case(1, 32, hk, 1, 8192, 128, dtype=t) for hk, t in ((32, "float32"), (8, "float32"), (32, "bfloat16"))]
    return [*whole, Case(1, 8, 8, 16384, 16384, 64, dtype="float32"), *short, *decode]


def _sequences(lengths, heads=32, heads_kv=8, head_dim=128, **options):
    """Of [(queries, keys)], or of [keys] of one query each, in pages of 16 unless said otherwise."""
    lengths = [n if isinstance(n, tuple) else (1, n) for n in lengths]
    n_q, n_k = zip(*lengths)
    common = {"dtype": "bfloat16", "q": "one" if set(n_q) == {1} else "packed", "k": "paged", "slack": 0}
    return Case.sequences(n_q, n_k, heads, heads_kv, head_dim, **common | options)


def _cells():
    """{cell: cases}: decode dense (D) and paged (P1; P2 pages of 1 and 3 keys), of lengths that differ (R), few queries (S1) and options
    (S2); these also as an engine calls, with cu_seqlens_q ("packed"), and with packed keys ("packed dense"); head_dim 256 (H1); few
    queries and many keys (Q1), packed prefill (V1 to V3) and paged (V4), pieces of a prompt (C1), a prompt beside decoding (X1),
    other keys than the queries' own (E1)."""
    decode = {"D1": (1, 8, 4096), "D2": (1, 8, 32768), "D3": (1, 8, 131072), "D4": (1, 32, 4096), "D5": (16, 8, 4096),
              "D6a": (64, 8, 8192), "D6b": (128, 32, 2048)}  # fmt: skip
    cells: dict[str, list] = {}
    for name, (b, hk, s) in decode.items():
        cells[name] = [Case(b, 32, hk, 1, s, 128, dtype="bfloat16", layout="bshd")]
    for name, (b, hk, s) in decode.items():
        cells[f"P1 {name}"] = [_sequences([s] * b, heads_kv=hk, page_size=page, layout=layout)
                               for layout in ("bshd", "bhsd") for page in (16, 64, 256)]  # fmt: skip
    for name, (b, hk, s) in list(decode.items())[4:]:
        cells[f"P2 {name}"] = [_sequences([s] * b, heads_kv=hk, page_size=page) for page in (1, 3)]
    cells["R1"] = [_sequences([512 << i for i in range(8) for _ in range(8)])]
    cells["R2"] = [_sequences([131072] + [512] * 63)]
    cells["R3"] = [_sequences([128] * 4096), _sequences([4096, 0] * 8), _sequences([4096] * 8)]
    for name, (b, hk, s) in decode.items():
        cells[f"{name} packed"] = [_sequences([s] * b, heads_kv=hk, q="packed", page_size=page) for page in (16, 1, 3, 256)]
        cells[f"{name} packed dense"] = [_sequences([s] * b, heads_kv=hk, q="packed", k="packed")]
    for name in ("R1", "R2", "R3"):
        cells[f"{name} packed"] = [case.changed(q="packed") for case in cells[name]]
    cells["S1"] = [_sequences([(n, 8192)] * 32, causal="bottom_right" if n > 1 else False) for n in (1, 4, 8)]
    cells["S2"] = [_sequences([32768] * 16, window=(1024, 0)), _sequences([1025] * 16),
                   *(_sequences([4096] * 16, **option) for option in ({"sinks": True}, {"softcap": 30.0}, {"alibi": "heads"}))]  # fmt: skip
    cells["S2 packed"] = [_sequences([32768] * 16, window=(1024, 0), q="packed"), _sequences([1025] * 16, q="packed")]
    cells["H1"] = [_sequences([(n, 4096)] * 16, h, hk, 256, q="packed", causal="bottom_right" if n > 1 else False)
                   for h, hk in ((16, 8), (32, 4), (16, 1)) for n in (1, 4)]  # fmt: skip
    cells["E1"] = [_sequences([(256, 4096)] * 16, k="packed")]
    cells["Q1"] = [Case(b, h, hk, sq, sk, 128, dtype="bfloat16", layout="bshd")
                   for b, h, hk, sq, sk in ((1, 32, 8, 64, 8192), (4, 32, 8, 16, 4096), (2, 16, 16, 200, 5000))]  # fmt: skip
    prefill = {"k": "packed", "causal": "bottom_right"}
    equal = ((16, 1024), (8, 2048), (2, 8192))
    cells["V1"] = [_sequences([(s, s)] * b, **prefill) for b, s in equal]
    cells["V1 dense"] = [Case(b, 32, 8, s, s, 128, dtype="bfloat16", causal=True, layout="bshd") for b, s in equal]
    draws = [[int(draw(math.log(1024), 1)) for _ in range(32)] for draw in (random.Random(seed).lognormvariate for seed in range(5))]
    cells["V2"] = [_sequences([(n, n) for n in drawn], **prefill) for drawn in (*draws, [16384] + [128] * 64)]
    cells["V3"] = [_sequences([(34, 34)] * 8192, **prefill), _sequences([(512, 512), (0, 0)] * 32, **prefill),
                   _sequences([(512, 512)] * 32, **prefill)]  # fmt: skip
    cells["V4"] = [_sequences([(s, s)] * b, page_size=page, causal="bottom_right") for b, s in equal for page in (16, 128)]
    cells["C1"] = [_sequences([lengths], causal="bottom_right") for lengths in ((512, 33280), (64, 131072))]
    cells["X1"] = [_sequences([(2048, 2048)] + [(1, 2048)] * 128, 28, 4, causal="bottom_right")]
    return cells


def _cpu_serving():
    common = {"heads": 8, "heads_kv": 2, "dtype": "float32"}
    return [_sequences([4096], **common), _sequences([(512, 512)] * 4, k="packed", causal="bottom_right", **common)]


def _cache_ops():
    """Merging two results, and appending: beside a copy of as many bytes."""
    merged = Case(1, 32, 32, 4096, 4096, 128, dtype="bfloat16", layout="bshd", operation="merge")
    tokens = ([(1, 512)], [(1, 512)] * 128, [(8192, 8192)])
    return [merged, *(_sequences(lengths, q="packed", operation="append") for lengths in tokens)]


# preset: {cell: cases}
CELLS: dict[str, dict[str, list[Case]]] = {
    "serving": _cells(),
    "sequences-backward": packed_training.CELLS,
    "options": {"costs": _options()} | score_options.FORWARD,
    "options-backward": {"costs": _options_backward()} | score_options.BACKWARD,
}
PRESETS = {
    "history": [Case(1, 8, 8, 512, 512, 64)],
    "paper": _paper(),
    "small": _small(),
    "gqa": _gqa(),
    "decode": _decode(),
    "extras": _extras(),
    "cpu": _cpu(),
    "paper-backward": _paper_backward(),
    "dropout": _dropout(),
    "cpu-backward": _cpu_backward(),
    "cache_ops": _cache_ops(),
    "cpu-serving": _cpu_serving(),
} | {name: list(dict.fromkeys(case for cases in cells.values() for case in cases)) for name, cells in CELLS.items()}
