"""The problem grids of the serving keywords: sequences of any length, in padded, packed and paged storage."""

from __future__ import annotations

import itertools
import random

import numpy as np

from bench.problems import magnitudes
from bench.problems.case import Case
from bench.problems.lengths import CACHES, K_STORAGE, Q_STORAGE
from bench.problems.placement import dtype_of
from bench.problems.stored import POSITIONS


def short(case) -> str:
    """The name of a case, or the beginning of a long one, for a test."""
    name = str(case)
    return name if len(name) < 100 else f"{name[:90]}..."


def grid():
    """Storage kinds x what a query sees x what scores are, each with another geometry."""
    dtype = itertools.cycle(("float32", "float16", "bfloat16", "float64")).__next__
    heads = itertools.cycle([(4, 4), (4, 2), (3, 1), (8, 2), (8, 1), (16, 1)]).__next__
    dims = itertools.cycle([(1, 1), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]).__next__
    size = itertools.cycle([1, 2, 3, 5, 7, 8, 16, 24, 64, 100, 128, 256, 544]).__next__
    cache, layout = itertools.cycle(CACHES).__next__, itertools.cycle(("bshd", "bhsd")).__next__
    option = itertools.cycle(({}, {"softcap": 3.0}, {"sinks": True}, {"alibi": "heads"}, {"scale": -0.3},
                              {"alibi": "batch", "sinks": True, "softcap": 8.0})).__next__  # fmt: skip
    seed = itertools.count().__next__
    window = itertools.cycle([None, (5, None), (3, 2), (0, 0), (None, 4)]).__next__
    cases = []
    for q, k, causal, k_range, positions in itertools.product(
        Q_STORAGE, K_STORAGE, (False, "bottom_right", "top_left"), (False, True), (None, *POSITIONS)
    ):
        if causal == "top_left" and positions:
            continue
        (h, hk), (d, dv) = heads(), dims()
        n_q = (1, 1, 0, 1) if q == "one" else (1, 7, 0, 17)
        cases.append(Case.sequences(
            n_q, (5, 33, 4, 9), h, hk, d, dv, dtype(), q, k, layout(), size(), cache(), causal=causal, k_range=k_range,
            positions=positions, window=window(), seed=seed(), **option(),
        ))  # fmt: skip
    return cases


def lengths():
    """Lengths at the edges of pages, tiles, chunks and batches."""
    cases = []
    for size in (1, 3, 16, 64, 100):
        n_k = (0, 1, size - 1, size, size + 1, 2 * size + 1)
        cases.append(Case.sequences((2,) * 6, n_k, page_size=size, slack=0, causal="bottom_right", seed=size))
    edges = (31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023)
    cases.append(Case.sequences((1,) * len(edges), edges, q="one", causal="bottom_right", dtype="bfloat16"))
    n_q = (0, 1, 2, 7, 8, 9, 16, 17, 64, 65, 127, 128, 129)
    for k in K_STORAGE:
        cases.append(Case.sequences(n_q, (130,) * len(n_q), k=k, causal="bottom_right", dtype="float16"))
        cases.append(Case.sequences(n_q, (60,) * len(n_q), k=k, causal="bottom_right", window=(20, 0)))  # n_q > n_k
    for empty in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 3, 3, 3), (3, 3, 3, 0)):
        for q, k in itertools.product(("padded", "packed"), K_STORAGE):
            cases.append(Case.sequences(empty, tuple(9 * (n > 0) for n in empty), q=q, k=k, sinks=True))
            cases.append(Case.sequences((2, 2, 2, 2), tuple(9 * (n > 0) for n in empty), q=q, k=k, sinks=sum(empty) > 2))
    for batch in (0, 1, 2, 31, 32, 33, 255, 256, 257, 993):
        n_k = tuple(n * 7 % 23 for n in range(batch))
        cases.append(Case.sequences((1,) * batch, n_k, 2, 1, 16, q="one", page_size=4))
        cases.append(Case.sequences(tuple(n % 3 for n in range(batch)), n_k, 2, 1, 16, page_size=3, causal="bottom_right"))
    for k in K_STORAGE:
        cases.append(Case.sequences((0, 0), (0, 0), k=k, slack=0))  # T = 0, W = 0
    return cases


def gradient_grid():
    """The grid of the backward pass: storage kinds that have one x what a query sees, each with other sizes and options."""
    dtype = itertools.cycle(("float32", "float16", "bfloat16", "float64")).__next__
    heads = itertools.cycle([(4, 4), (4, 2), (4, 1), (3, 1), (8, 2)]).__next__
    dims = itertools.cycle([(1, 1), (40, 40), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256)]).__next__
    layout = itertools.cycle(("bshd", "bhsd", "bshd")).__next__
    option = itertools.cycle(({}, {"softcap": 3.0}, {"sinks": True}, {"alibi": "heads"}, {"scale": -0.3}, {"dropout": (0.3, 5)}, {"accumulate": True},
                              {"alibi": "batch", "sinks": True, "softcap": 8.0, "dropout": (0.1, 6)}, {"deterministic": False},
                              {"sinks": True, "accumulate": True}, {"dropout": (1.0, 7)})).__next__  # fmt: skip
    window = itertools.cycle([None, (5, None), (3, 2), (0, 0), (None, 4)]).__next__
    cases = []
    for n, (q, k, causal, k_range, positions) in enumerate(itertools.product(
        Q_STORAGE, ("padded", "packed"), (False, "bottom_right", "top_left"), (False, True), (None, *POSITIONS)
    )):  # fmt: skip
        if causal == "top_left" and positions:
            continue
        (h, hk), (d, dv) = heads(), dims()
        n_q = (1, 1, 0, 1) if q == "one" else (1, 7, 0, 17)
        cases.append(Case.sequences(
            n_q, (5, 33, 4, 9), h, hk, d, dv, dtype(), q, k, layout(), causal=causal, k_range=k_range, positions=positions,
            window=window(), seed=n, operation="backward", dlse=n % 3 != 0, **option(),
        ))  # fmt: skip
    return cases


def gradient_lengths():
    """Lengths at the edges of tiles and batches, in queries and in keys, and empty sequences anywhere."""
    common: dict = {"heads": 2, "heads_kv": 1, "head_dim": 16, "operation": "backward", "dlse": True}
    edges = (0, 1, 2, 34, 63, 64, 65)
    cases = [Case.sequences(edges, edges, dtype=dtype, k="packed", causal=causal, **common)
             for dtype, causal in (("float32", "bottom_right"), ("float16", False))]  # fmt: skip
    beyond = (127, 128, 129)
    cases += [Case.sequences(n_q, n_k, k="packed", dtype=dtype, causal="bottom_right", seed=n, **common | {"heads": 1}) for n, (n_q, n_k, dtype) in enumerate((
        (beyond, beyond, "float16"), (beyond, (1, 34, 60), "float32"), ((1, 34, 60), beyond, "bfloat16"), ((76, 34, 146), (1, 1, 1), "float32")))]  # fmt: skip
    for empty in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 3, 3, 3), (3, 3, 3, 0), (0, 0, 5, 0)):
        some = tuple(9 * (n > 0) for n in empty)
        for n_q, n_k in ((empty, some), ((2,) * 4, some), (empty, (4,) * 4)):
            for q, k in itertools.product(("padded", "packed"), ("padded", "packed")):
                cases.append(Case.sequences(n_q, n_k, q=q, k=k, sinks=True, **common))
    for batch in (0, 1, 31, 257):
        n_q, n_k = tuple(n % 3 for n in range(batch)), tuple(n * 7 % 11 for n in range(batch))
        cases.append(Case.sequences(n_q, n_k, k="packed", causal="bottom_right", **common))
        cases.append(Case.sequences(tuple(n % 2 for n in range(batch)), n_k, q="one", k="padded", **common))
    cases += [Case.sequences((3, 2), (5, 7), q=q, k=k, slack=slack, **common)
              for q, k, slack in itertools.product(("padded", "packed"), ("padded", "packed"), (0, 1, 64))]  # fmt: skip
    return cases


def random_gradients(count, seed=0, **sizes):
    """``random_cases`` of the backward pass."""
    for n, case in enumerate(random_cases(count, seed, **sizes)):
        rng = random.Random(f"{seed}:{n}:backward")
        k = rng.choice(("padded", "packed")) if case.storage.k == "paged" else case.storage.k
        dropout = rng.choice((None, None, (rng.random(), n)))
        yield case.changed(k=k, logits=None, operation="backward", dlse=rng.random() < 0.5, deterministic=rng.random() < 0.7,
                           accumulate=rng.random() < 0.2, dropout=dropout)  # fmt: skip


def magnitude(kind):
    """Scores of one kind of ``magnitudes`` and of every magnitude, in every storage, each with another option."""
    dtype = itertools.cycle(("float32", "float16", "bfloat16")).__next__
    storage = itertools.cycle(itertools.product(Q_STORAGE, K_STORAGE)).__next__
    option = itertools.cycle(({}, {"sinks": True}, {"alibi": "heads"}, {"window": (60, None)}, {"softcap": 8.0}, {"k_range": True},
                              {"positions": "random", "alibi": "batch"})).__next__  # fmt: skip
    cases = []
    for exponent, sign in itertools.product(magnitudes.EXPONENTS, (1, -1)):
        q, k = storage()
        n_q = (1, 1, 0, 1) if q == "one" else (1, 7, 0, 17)
        for n_k in ((5, 333, 4, 90), (1500, 70, 3, 40)):
            cases.append(Case.sequences(
                n_q, n_k, 4, 2, 64, None, dtype(), q, k, causal="bottom_right", page_size=48, logits=(kind, sign * exponent),
                seed=exponent, **option(),
            ))  # fmt: skip
    return cases


def random_cases(count, seed=0, batch=6, longest=200):
    """``count`` cases of any kind."""
    rng = random.Random(seed)
    for n in range(count):
        size = rng.randint(0, batch)
        q, k, causal = rng.choice(Q_STORAGE), rng.choice(K_STORAGE), rng.choice((False, "bottom_right", "top_left"))
        n_q = [rng.randint(0, 1) if q == "one" else rng.choice((0, 1, 2, rng.randint(0, 70))) for _ in range(size)]
        n_k = [rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, longest))) for _ in range(size)]
        kv = rng.choice((1, 2, 3))
        sides = rng.choice((None, (rng.randint(0, 50), None), (None, rng.randint(0, 9)), (rng.randint(0, 9), 3)))
        case = Case.sequences(
            tuple(n_q), tuple(n_k), kv * rng.choice((1, 2, 3, 4)), kv, rng.choice((1, 16, 40, 64, 128)), None,
            rng.choice(("float32", "float16", "bfloat16", "float64")), q, k, rng.choice(("bshd", "bhsd")),
            rng.choice((1, 2, 3, 7, 16, 24, 100)), rng.choice(CACHES), rng.randint(0, 4), causal, sides,
            rng.choice((0.0, 0.0, 2.0)), rng.choice((None, 1.0, -0.2)), rng.random() < 0.3,
            rng.choice((None, None, "heads", "batch")), rng.random() < 0.3,
            None if causal == "top_left" else rng.choice((None, *POSITIONS)), None, seed * 1000 + n,
        )  # fmt: skip
        if rng.random() < 0.2:  # what float16 holds too, since tests replace dtypes; scores that are alike, or far apart
            logits = rng.choice(("constant", "doubling")), rng.choice((1, -1)) * rng.randint(10, 27)
            case = case.changed(logits=logits)
        yield case


def random_segments(count, seed=0, backward=False, **sizes):
    """Those of ``random_cases``, or ``random_gradients``, padded and with segments."""
    for case in (random_gradients if backward else random_cases)(count, seed, **sizes):
        yield case.changed(q="padded", k="padded", cache="two", segments=True)


def angles(count, half, dtype=np.float32, seed=0):
    """(cos, sin) of a table of positions."""
    speed = 10000.0 ** (-np.arange(half) / half)
    turned = np.arange(count)[:, None] * speed
    return np.cos(turned).astype(dtype), np.sin(turned).astype(dtype)


def append_call(case: Case, *, rotary=0, q=False, positions=False, interleaved=False, values=True, dense=False, seed=0):
    """Arguments of ``append`` that go with a case of attention; rotary: half of R."""
    rng = np.random.default_rng([seed, 21])
    given, dtype = case.host_inputs(), dtype_of(case.dtype)
    padded = case.storage.q == "padded"
    shape = given["q"].shape
    heads_axis = 1 if not padded or case.layout == "bhsd" else 2

    def fresh(heads, d):
        wanted = list(shape)
        wanted[heads_axis], wanted[-1] = heads, d
        return rng.standard_normal(wanted).astype(dtype)

    call = {"k_cache": given["k"], "v_cache": given["v"] if values else None, "k": fresh(case.heads_kv, case.head_dim),
            "v": fresh(case.heads_kv, case.head_dim_v) if values else None, "layout": case.layout}  # fmt: skip
    names = ("cu_seqlens_q", "seqlens_q", "seqlens_k", *(() if dense else ("page_table",)))
    call |= {name: given[name] for name in names if name in given}
    if rotary:
        call |= {"rotary": angles(2048, rotary), "interleaved": interleaved}
        if q:
            call["q"] = fresh(case.heads, case.head_dim)
        if positions:
            call["positions"] = rng.integers(0, 2048, shape[:1] if not padded else (shape[0], shape[1 if case.layout == "bshd" else 2])).astype(np.int32)
    return call
