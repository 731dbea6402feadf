"""The problem grids: what each kernel is judged on, and sweeps of random calls.

``contract`` is what each kernel is judged on, ``sanitize`` the subset for compute-sanitizer; ``random_cases`` and
``random_gradients`` are sweeps of any length. ``must_accept`` says which cases a kernel may not reject.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from bench.problems import magnitudes
from bench.problems.case import DTYPES, HALVES, Case
from bench.problems.dense import ALIBIS, BIASES, FLAT_BIASES, INTERVALS, MASKS, SINKS, STRIDES, VALUES

#: log2 of the scores up to which gradients are judged: their LSE is 2^16 at most.
LARGEST_BACKWARD = 15

__all__ = ["Case", "contract", "float64", "must_accept", "random_cases", "sanitize", "zero_sizes"]


def _cycle(*names):
    return itertools.cycle(names).__next__


def contract() -> list[Case]:
    """The cases that each kernel is judged on: each option by itself at awkward sizes, then in combination."""
    cases: list[Case] = []
    dtype, half = _cycle(*DTYPES), _cycle(*HALVES)
    layout = _cycle("bhsd", "bshd")

    # Sizes around every tile size, ragged, with both alignments.
    pairs = [(1, 1), (1, 3), (2, 1), (511, 1), (239, 1), (799, 3), (3, 513), (113, 203), (108, 256), (128, 217),
             (307, 256), (640, 128), (1023, 1024), (1024, 1023)]  # fmt: skip
    dim = _cycle(64, 128, 32, 96)
    for (seq_q, seq_k), causal in itertools.product(pairs, (False, "top_left", "bottom_right")):
        heads = 1 if seq_q * seq_k > 1 << 19 else 2
        cases.append(Case(1, heads, 1, seq_q, seq_k, dim(), dtype=dtype(), causal=causal, layout=layout()))
    for seq, d in itertools.product((1, 3, 113, 239, 511, 799, 1023), (64, 128)):
        cases.append(Case(1, 1, 1, seq, seq, d, dtype=half(), causal=seq % 3 != 0))
    # Whole tiles, where kernels take their paths without bounds checks.
    for seq, d, causal in itertools.product((128, 256, 384), (64, 128, 256), (False, True)):
        cases.append(Case(2, 2, 2, seq, seq, d, dtype=half(), causal=causal, layout=layout()))

    # Head dims.
    for d in (1, 2, 8, 16, 32, 40, 59, 64, 72, 80, 96, 104, 111, 128, 160, 192, 224, 256):
        cases += [Case(1, 2, 1, 113, 239, d, dtype=t, causal=d % 3 == 1 and "bottom_right") for t in DTYPES]
    for d, dv in (
        (64, 128),
        (128, 64),
        (192, 128),
        (40, 56),
        (40, 59),
        (256, 1),
        (1, 256),
        (96, 32),
        (16, 256),
        (256, 64),
    ):
        cases += [Case(1, 2, 2, 113, 129, d, dv, dtype=t, causal="top_left", layout=layout()) for t in DTYPES]

    # Heads, batches.
    for batch, heads, kv in ((1, 4, 4), (2, 4, 2), (3, 4, 1), (1, 8, 2), (2, 6, 3), (5, 1, 1), (1, 16, 1)):
        for causal in (False, "bottom_right"):
            cases.append(Case(batch, heads, kv, 77, 131, 64, dtype=dtype(), causal=causal, layout=layout()))
    # Decoding: few queries, many keys.
    for seq_q, seq_k, heads, kv in ((1, 1024, 8, 2), (1, 777, 4, 4), (4, 2048, 8, 1), (2, 515, 4, 2)):
        for t, d in itertools.product(HALVES, (64, 128)):
            cases.append(Case(2, heads, kv, seq_q, seq_k, d, dtype=t, causal="bottom_right" if d == 64 else False))
    # So many keys that they are split over blocks, with what the merge of the parts has to respect.
    for t in HALVES:
        for option in ({}, {"sinks": "large"}, {"window": (3000, None)}, {"softcap": 8.0, "values": "large"}, {"mask": "one"},
                       {"values": "sorted"}, {"values": "dominant", "sinks": "small"}):  # fmt: skip
            cases.append(Case(1, 8, 2, 1, 8200, 128, dtype=t, **option))
            cases.append(Case(1, 6, 1, 3, 5001, 64, dtype=t, causal="bottom_right", layout="bshd", **option))

    # Options one by one.
    small = dict(batch=2, heads=4, heads_kv=2, seq_q=113, seq_k=203)
    aligns = _cycle(False, "top_left", "bottom_right")
    dims = _cycle(64, 128, 40)
    for window in ((0, 0), (5, 0), (0, 7), (64, 64), (127, None), (None, 31), (3, 200), (None, None), (1000, 1000)):
        for t in DTYPES:
            cases.append(Case(**small, head_dim=dims(), dtype=t, window=window, causal=aligns()))
    for kind, t in itertools.product(MASKS, DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, mask=kind, causal=aligns(), layout=layout()))
    for kind, t in itertools.product(BIASES, DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, bias=kind, causal=aligns(), layout=layout()))
    for kind, t in itertools.product(SINKS, DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, sinks=kind, causal=aligns(), layout=layout()))
    for softcap, t in itertools.product((0.5, 20.0), DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, softcap=softcap, causal=aligns()))
    for scale, t in itertools.product((0.02, 1.0, 0.0, -0.3), DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, scale=scale, causal=aligns()))

    # Memory.
    for kind, where, t in itertools.product(STRIDES, ("bhsd", "bshd"), DTYPES):
        same = kind == "packed"
        d = 64 if kind != "odd" else 61
        cases.append(Case(2, 4, 4 if same else 2, 96, 96 if same else 130, d, dtype=t, layout=where, strides=kind,
                          causal="top_left"))  # fmt: skip
    for t in DTYPES:
        cases.append(Case(1, 1, 1, 1, 70, 64, dtype=t, strides="absurd"))
        cases.append(Case(1, 1, 1, 70, 1, 1, dtype=t, strides="absurd"))

    # Logits.
    for kind, t in itertools.product(VALUES, DTYPES):
        causal = "bottom_right" if kind in ("nan_tail", "normal") else False
        window = (20, 10) if kind == "nan_outside" else None
        sizes = (60, 300) if kind in ("nan_outside", "nan_tail") else (130, 300)
        for d in (64, 128):
            cases.append(Case(1, 2, 1, *sizes, d, dtype=t, values=kind, causal=causal, window=window))
    for t in DTYPES:
        cases.append(Case(1, 2, 1, 70, 300, 64, dtype=t, values="nan_outside", causal="top_left"))
        cases.append(Case(1, 2, 1, 70, 300, 64, dtype=t, values="large", softcap=30.0))
        # Factors that float32 cannot hold.
        cases += [Case(1, 2, 1, 70, 300, 64, dtype=t, softcap=cap) for cap in (1e-40, 1e39, 1e300)]
        cases.append(Case(1, 2, 1, 70, 300, 64, dtype=t, values="zeros", scale=1e300, sinks="same"))
    # Scores in the thousands: rows that one key decides, whose weight must not be rounded in one place only. The seeds are
    # some that failed where it was.
    for t, (seq_q, seq_k, d, scale, seed) in itertools.product(
        HALVES, ((3, 700, 64, 1.0, 5), (3, 300, 128, 0.5, 2), (40, 300, 128, 0.5, 1), (3, 1341, 256, 0.5, 5))
    ):
        cases.append(Case(1, 2, 1, seq_q, seq_k, d, dtype=t, scale=scale, values="large", seed=seed))

    # Thousands of keys in float32: one running sum would lose the bound.
    for shape in ((2, 1, 1, 7, 7904, 128), (3, 2, 2, 3, 8448, 16)):
        cases.append(Case(*shape, dtype="float32", causal="bottom_right", values="descending", seed=540))

    # Rows that see nothing.
    for t in DTYPES:
        cases.append(Case(1, 2, 1, 200, 70, 64, dtype=t, causal="bottom_right"))
        cases.append(Case(1, 2, 2, 200, 70, 64, dtype=t, causal="bottom_right", sinks="float32"))
        cases.append(Case(1, 2, 2, 150, 70, 64, dtype=t, causal="top_left", window=(3, None)))
        cases.append(Case(2, 2, 1, 33, 70, 64, dtype=t, mask="none", sinks="same"))
        cases.append(Case(2, 2, 1, 300, 40, 64, dtype=t, window=(0, 2), sinks="large"))
    cases += zero_sizes()

    # Everything at once.
    for i, (t, d) in enumerate(itertools.product(DTYPES, (64, 128, 59, 256))):
        cases.append(Case(2, 4, 2, 130, 203, d, 64 if i % 2 else d, dtype=t, causal=aligns(), window=(90, 20), softcap=5.0,
                          bias=BIASES[i % 7], mask=MASKS[i % 2], sinks=SINKS[i % 4], scale=0.3, layout=layout(),
                          strides=STRIDES[i % 9], seed=i))  # fmt: skip
    # Slopes.
    for kind, t in itertools.product(ALIBIS, DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, alibi=kind, causal=aligns(), layout=layout()))
        cases.append(Case(1, 4, 1, 3, 1023, 64, dtype=t, alibi=kind, causal=aligns(), window=(700, None), softcap=9.0,
                          bias="holes", sinks="same", mask="rows"))  # fmt: skip
    # Intervals.
    for kind, t in itertools.product(INTERVALS, DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, intervals=kind, causal=aligns(), layout=layout()))
        cases.append(Case(1, 4, 1, 3, 1023, 64, dtype=t, intervals=kind, causal=aligns(), window=(700, None), softcap=9.0,
                          sinks="same", mask="rows"))  # fmt: skip
    # Dropout.
    for p, t in itertools.product((0.1, 0.5), DTYPES):
        cases.append(Case(**small, head_dim=dims(), dtype=t, dropout=(p, 7), causal=aligns(), layout=layout()))
        cases.append(Case(1, 4, 1, 3, 1023, 64, dtype=t, dropout=(p, 1 << 40), causal=aligns(), window=(700, None), softcap=9.0,
                          bias="holes", sinks="same", mask="rows"))  # fmt: skip
    return _unique(cases) + float64()


def magnitude(kind: str, dtype: str) -> list[Case]:
    """Cases of scores of one kind of ``magnitudes`` and of every magnitude that the dtype's q and k have, each with another option."""
    shapes = _cycle((1, 2, 1, 20, 1101, 64), (1, 2, 2, 3, 700, 128), (2, 4, 2, 65, 150, 40), (1, 2, 1, 150, 333, 256),
                    (1, 4, 1, 1, 1500, 64))  # fmt: skip
    cases = []
    for exponent, sign in itertools.product(magnitudes.EXPONENTS, (1, -1)):
        base = Case(*shapes(), dtype=dtype, logits=(kind, sign * exponent), seed=exponent)
        options = [{}, {"causal": "bottom_right"}, {"window": (50, 30)}, {"mask": "rows"}, {"sinks": "float32"}, {"sinks": "level"},
                   {"softcap": 20.0}, {"alibi": "level", "causal": "bottom_right"}, {"dropout": (0.3, 7)}]  # fmt: skip
        options += [{"bias": bias} for bias in ("low", "lowest", "high")] if exponent < 40 else []
        if not magnitudes.holds(kind, exponent, base.head_dim, dtype, base.head_dim**-0.5 / 2):
            continue
        some = {frozenset(options[(len(cases) * 5 + n) % len(options)].items()) for n in range(3)} | {frozenset()}
        cases += [dataclasses.replace(base, **dict(one)) for one in sorted(some, key=str)]
    return cases


def zero_sizes() -> list[Case]:
    """Empty batches, heads, queries and keys."""
    return [
        case
        for t in DTYPES
        for case in (Case(0, 2, 1, 5, 7, 32, dtype=t), Case(2, 0, 0, 5, 7, 32, dtype=t), Case(1, 2, 2, 0, 7, 32, dtype=t),
                     Case(1, 2, 1, 5, 0, 32, dtype=t), Case(1, 2, 1, 5, 0, 32, dtype=t, sinks="same"),
                     Case(1, 2, 1, 0, 0, 64, dtype=t, causal=True), Case(1, 4, 2, 0, 200, 128, dtype=t))  # fmt: skip
    ]


def float64() -> list[Case]:
    """float64 runs on the CPU alone."""
    small = dict(batch=2, heads=4, heads_kv=2, seq_q=61, seq_k=83, dtype="float64")
    return [
        Case(**small, causal=c, layout=l) for c in (False, "top_left", "bottom_right") for l in ("bhsd", "bshd")
    ] + [
        Case(**small, head_dim=40, head_dim_v=59, window=(9, 4), softcap=2.0, bias="full32", mask="rows", sinks="same"),
        Case(**small, bias="holes", strides="negative"),
        Case(**small, bias="finfo_min", causal="top_left"),
        Case(**small, bias="finfo_max", sinks="huge", softcap=1e-300),
        *(Case(**small, alibi=kind, causal="bottom_right") for kind in ALIBIS),
        Case(**small, alibi="steep", bias="finfo_min", softcap=3.0),
        *(Case(**small, intervals=kind, causal="top_left", sinks="same") for kind in INTERVALS),
        Case(**small, dropout=(0.3, 5), causal="top_left", sinks="same"),
        Case(**small, values="large"),
        Case(**small, values="nan_outside", causal="top_left", window=(5, 5)),
        Case(1, 2, 1, 5, 0, 32, dtype="float64", sinks="same"),
    ]


def sanitize() -> list[Case]:
    """At most 40 small cases that reach the memory paths of a kernel, for compute-sanitizer."""
    cases = []
    for t, (d, dv) in itertools.product(DTYPES, ((64, 64), (128, 128), (40, 56), (256, 256))):
        cases.append(Case(1, 2, 1, 113, 203, d, dv, dtype=t, causal="bottom_right"))
    for t in HALVES:
        cases += [
            Case(1, 2, 2, 256, 256, 64, dtype=t, causal=True),
            Case(1, 2, 2, 256, 256, 128, dtype=t),
            Case(1, 4, 1, 1, 320, 128, dtype=t),
            Case(2, 2, 1, 65, 129, 64, dtype=t, window=(31, 7), softcap=9.0, sinks="float32"),
            Case(2, 2, 1, 65, 129, 64, dtype=t, bias="full", mask="rows"),
            Case(1, 2, 1, 65, 129, 59, dtype=t, strides="odd"),
            Case(1, 2, 1, 65, 129, 64, dtype=t, strides="negative"),
            Case(1, 2, 1, 65, 129, 64, dtype=t, strides="sliced", layout="bshd"),
            Case(1, 1, 1, 200, 40, 64, dtype=t, causal="bottom_right"),
            Case(1, 2, 1, 5, 0, 32, dtype=t),
            Case(1, 2, 1, 70, 300, 64, dtype=t, values="nan_outside", causal="top_left"),
        ]
    cases += [
        Case(2, 2, 1, 65, 129, 64, bias="alibi", dtype="float32", mask="batch"),
        Case(1, 1, 1, 1, 1, 1, dtype="float32"),
    ]
    return _unique(cases)


def random_cases(seed: int, n: int, limit: float = 2e8):
    """Yields ``n`` cases of at most ``limit`` FLOPs. Case i depends on (seed, i) alone, so sweeps can be split."""
    for i in range(n):
        rng = random.Random(f"{seed}:{i}")
        case = _random_case(rng, i)
        while case.flops() > limit:
            case = _random_case(rng, i)
        yield case


def random_gradients(seed: int, n: int, limit: float = 2e8):
    """The same of the backward pass, but for biases, and scores, whose LSE no longer tells in float32 how many keys it is of."""
    for i, case in enumerate(random_cases(seed, n, limit / 2.5)):
        rng = random.Random(f"{seed}:{i}:backward")
        bias = None if case.bias in FLAT_BIASES else case.bias
        logits = None if beyond_backward(case) else case.logits
        case = dataclasses.replace(case, operation="backward", bias=bias, logits=logits)
        yield dataclasses.replace(case, deterministic=rng.random() < 0.5, dlse=rng.random() < 0.5)


def beyond_backward(case: Case) -> bool:
    """Whether scores are so large that gradients are not judged."""
    return bool(case.logits) and abs(case.logits[1]) > LARGEST_BACKWARD


def _random_case(rng: random.Random, seed: int) -> Case:
    def sometimes(probability, draw, default=None):
        return draw() if rng.random() < probability else default

    def length():
        return rng.choice((rng.randint(1, 8), rng.randint(1, 130), rng.randint(1, 300), rng.choice((64, 128, 192, 256)),
                           rng.randint(1, 1100)))  # fmt: skip

    def width():
        return rng.choice((64, 64, 128, 128, rng.choice((16, 32, 80, 96, 160, 192, 224, 256)), rng.randint(1, 256)))

    heads_kv = rng.choice((1, 1, 2, 3))
    seq_q = sometimes(0.01, lambda: 0, length())
    seq_k = sometimes(0.3, lambda: seq_q, sometimes(0.01, lambda: 0, length()))
    if seq_q <= 8 and rng.random() < 0.4:
        seq_k = rng.randint(1, 9000)
    d = width()
    dv = sometimes(0.15, width, d)
    causal = rng.choice((False, "top_left", "bottom_right", True if seq_q == seq_k else False))
    heads = heads_kv * rng.choice((1, 1, 2, 3, 4))
    strides = rng.choice(STRIDES) if rng.random() < 0.5 else "contiguous"
    if strides == "packed" and not (heads == heads_kv and seq_q == seq_k and d == dv):
        strides = "swapped"
    values = rng.choice(VALUES) if rng.random() < 0.3 else "normal"
    dtype = rng.choice(DTYPES)
    if dtype == "float32" and values == "negative":  # at -110 float32 sums differ by as much as the bound allows
        values = "descending"

    def side():
        return sometimes(0.8, lambda: rng.choice((0, rng.randint(0, 20), rng.randint(0, 400))))

    case = Case(
        batch=rng.choice((1, 1, 2, 3)), heads=heads, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, head_dim=d,
        head_dim_v=dv, dtype=dtype, causal=causal, window=sometimes(0.25, lambda: (side(), side())),
        softcap=sometimes(0.2, lambda: rng.choice((0.5, 10.0, 50.0)), 0.0), bias=sometimes(0.2, lambda: rng.choice(BIASES)),
        mask=sometimes(0.2, lambda: rng.choice(MASKS)), sinks=sometimes(0.2, lambda: rng.choice(SINKS)),
        scale=sometimes(0.1, lambda: rng.choice((0.05, 0.5, -0.2))), layout=rng.choice(("bhsd", "bshd")),
        strides=strides, values=values, seed=seed,
        dropout=sometimes(0.15, lambda: (rng.choice((0.1, 0.5, 1 / 65536)), rng.randint(0, 1 << 40))),
        intervals=sometimes(0.15, lambda: rng.choice(INTERVALS)),
    )  # fmt: skip
    return sometimes(0.2, lambda: _of_any_magnitude(rng, case), case)


def _of_any_magnitude(rng: random.Random, case: Case) -> Case:
    """The case with large scores, and with what leaves such scores an answer: no bias or slopes that float32 loses beside them."""
    kind = rng.choice(magnitudes.KINDS)
    exponents = [e for e in range(10, 101) if magnitudes.holds(kind, e, case.head_dim, case.dtype, (case.scale or case.head_dim**-0.5) / 2)]
    exponent = rng.choice([e for e in exponents if e <= rng.choice((16, 30, 100))])
    bias = rng.choice(("low", "lowest", "high")) if case.bias and exponent < 40 else None
    sinks = "level" if case.sinks and rng.random() < 0.5 else case.sinks
    return dataclasses.replace(case, values="normal", logits=(kind, rng.choice((1, -1)) * exponent), bias=bias, sinks=sinks)


def _unique(cases):
    return list(dict.fromkeys(cases))


# ---- what a kernel may not reject ----

# Memory in which each row of head_dim elements starts at a multiple of 16 bytes, head_dim fastest.
_ALIGNED = ("contiguous", "swapped", "sliced", "packed", "absurd")


def _is_device_case(case):
    return case.dtype in DTYPES


def _is_fast_case(case, largest):
    """A dense half-precision call that a tensor-core kernel is made for."""
    dims = (case.head_dim, case.head_dim_v)
    return (
        case.dtype in HALVES
        and all(d % 8 == 0 and 16 <= d <= largest for d in dims)
        and case.strides in _ALIGNED
        and (case.scale is None or 0 < case.scale < 1e30)
        and min(case.batch, case.heads, case.seq_q, case.seq_k) > 0
    )


def _minimal(case):
    plain = not (case.bias or case.mask or case.sinks or case.softcap or case.window)
    return _is_device_case(case) and plain and (case.scale is None or case.scale > 0)


def _hopper(case):
    return _is_fast_case(case, 256) and case.head_dim == case.head_dim_v and not (case.bias or case.mask)


def _hopper_dense(case):
    dressed = case.mask or case.alibi or case.intervals
    return _is_fast_case(case, 256) and case.head_dim == case.head_dim_v and not case.bias and not (case.softcap and dressed)


def _hopper_split(case):
    return _hopper(case) and case.head_dim <= 128 and case.visible_pairs() > 0


_MUST_ACCEPT = {
    "cpu_ref": lambda case: True,
    "cpu_simd": lambda case: abs(case.scale or 1) / (case.softcap or 1) <= 1e30,
    "simt": _is_device_case,
    "minimal": _minimal,
    "cublas": lambda case: _is_device_case(case) and case.strides in (*_ALIGNED, "odd"),
    "wmma": lambda case: case.dtype in HALVES and max(case.head_dim, case.head_dim_v) <= 128,
    "mma_sm80": lambda case: case.dtype in HALVES,
    "wgmma_sm90": _hopper_dense,
    "wgmma_dropout_sm90": lambda case: _hopper(case) and case.head_dim <= 128 and not case.softcap,
    "serve_sm90": _hopper,
    "prefill_sm90": _hopper,
    "wgmma_split_sm90": _hopper_split,
}
#: Kernels of packed queries alone, which take no dense call.
OF_PACKED_QUERIES = ("packed_sm90",)
WITH_BOTH = ("cpu_ref", "cpu_simd", "mma_sm80", "simt")
WITH_INTERVALS = (*WITH_BOTH, "wgmma_sm90")
WITH_DROPOUT = (*WITH_BOTH, "wgmma_dropout_sm90")
WITH_ALIBI = (*WITH_BOTH, "wmma", "cublas", "serve_sm90", "packed_sm90", "wgmma_sm90")


def must_accept(kernel: str, case: Case) -> bool:
    """Whether ``kernel`` fails the tests by rejecting ``case`` (on a device it runs on). A kernel that is not listed above is
    held to what ``minimal`` takes."""
    taken = (not case.alibi or kernel in WITH_ALIBI) and (not case.dropout or kernel in WITH_DROPOUT)
    taken = taken and (not case.intervals or kernel in WITH_INTERVALS) and (not case.max_logit or kernel in WITH_BOTH)
    return kernel not in OF_PACKED_QUERIES and _MUST_ACCEPT.get(kernel, _minimal)(case) and taken

