"""The problems of packed training: backward passes over sequences, in cells that are named; the preset "sequences-backward"."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from bench.problems import lengths
from bench.problems.case import Case

# Tokens of a step, and the heads by head_dim that make up a hidden size of 2048.
TOKENS = 65536
HEADS = {64: 32, 96: 20, 128: 16, 256: 8}
GROUPED = (32, 8, 128)


def lognormal(seed: int, median: float = 600, tokens: int = TOKENS) -> list[int]:
    """Lengths of the documents of a step; the last one is cut."""
    return lengths.lognormal(seed, median, tokens)


def _backward(n_q: Iterable[int], heads: int, heads_kv: int, head_dim: int, n_k: Iterable[int] | None = None, **options) -> Case:
    n_q = list(n_q)
    common = {"dtype": "bfloat16", "q": "packed", "k": "packed", "slack": 0, "causal": "bottom_right", "operation": "backward"}
    return Case.sequences(n_q, n_q if n_k is None else list(n_k), heads, heads_kv, head_dim, **common | options)


def _alike(n_q: Iterable[int], head_dim: int, **options) -> Case:
    """With as many heads of k as of q."""
    return _backward(n_q, HEADS[head_dim], HEADS[head_dim], head_dim, **options)


def _partly_used(batch: int, seq: int) -> list[int]:
    """Lengths of a padded batch, 7 of 10 rows in the mean."""
    return [seq * (4 * (batch - 1) + 6 * i) // (10 * (batch - 1)) for i in range(batch)]


def _small_cells() -> dict[str, list[Case]]:
    """Equal lengths (U1), the same padded, with lengths that say so and with rows unused (U2); a very long document among short ones
    (V2, V2long), very short ones (T1), every other one empty beside none (T2); images (I1), cross attention (X1)."""
    equal = ((16, 1024), (8, 2048), (2, 8192))
    cells = {"U1": [_alike([s] * b, d, causal=causal) for b, s in equal for d in (64, 128, 256) for causal in ("bottom_right", False)]}
    # A row less makes the call one of sequences.
    full = [[s] * (b - 1) + [s - 1] for b, s in equal]
    cells["U2"] = [_alike(n, d, q="padded", k="padded") for n in [*full, *(_partly_used(b, s) for b, s in equal)] for d in (64, 128)]
    cells |= {"V2": [_backward([16384] + [128] * 64, *GROUPED)], "V2long": [_backward([65536] + [128] * 512, *GROUPED)]}
    cells["T1"] = [_backward([34] * 8192, *GROUPED)]
    cells["T2"] = [_backward(n, *GROUPED) for n in ([512, 0] * 32, [512] * 32)]
    images = [([576] * 128, d) for d in (64, 72, 80)] + [([64] * 1024, d) for d in (64, 80)]
    cells["I1"] = [_backward(n, 16, 16, d, causal=False) for n, d in images]
    draws = random.Random(0)
    n_q = [draws.randint(128, 512) for _ in range(64)]
    n_k = [max(1, int(draws.lognormvariate(math.log(2048), 1))) for _ in n_q]
    cells["X1"] = [_backward(n_q, 16, 16, 128, n_k, causal=False)]
    return cells


def _drawn_cells() -> dict[str, list[Case]]:
    """Documents of drawn lengths: sums in order (V1) and in any (V1f); a window, with sinks and without (W1); wide keys beside as many
    equal ones (M1); as many heads of k as of q, which all kernels take (S1)."""
    drawn = [lognormal(seed) for seed in range(5)]
    cells = {"V1": [_backward(n, *how) for how in (GROUPED, (32, 32, 64)) for n in drawn]}
    cells["V1f"] = [case.changed(deterministic=False) for case in cells["V1"]]
    cells["W1"] = [_backward(drawn[0], 64, 8, 64, window=(127, 0), sinks=sinks) for sinks in (True, None)]
    cells["M1"] = [_backward(n, 16, 16, 192, head_dim_v=128) for n in ([1024] * 16, drawn[0])]
    cells["S1"] = _both_orders([_alike(drawn[0], 128)])
    return cells


def _step_cells() -> dict[str, list[Case]]:
    """The 64k tokens of a step, sums in order and in any: equal lengths, documents, documents of which one is long, grouped heads and a
    quarter of the tokens, very short ones, images, cross attention."""
    cells: dict[str, list[Case]] = {}

    def add(name: str, of: Callable[[int], Case], dims: tuple[int, ...] = (128, 64)) -> None:
        cells[name] = _both_orders([of(d) for d in dims])

    for s in (512, 1024, 4096):
        add(f"equal{s}", lambda d, s=s: _alike([s] * (TOKENS // s), d), (128, 64, 256))
    for seed in range(2):
        add(f"documents{seed}", lambda d, seed=seed: _alike(lognormal(seed), d), (128, 64, 96, 256))
    add("long", lambda d: _alike([16384] + [128] * 384, d))
    add("grouped", lambda d: _backward(lognormal(0), *GROUPED), (128,))
    add("quarter", lambda d: _alike(lognormal(0, tokens=TOKENS // 4), d), (128,))
    add("tiny", lambda d: _alike([34] * (TOKENS // 34), d, causal=False))
    add("images", lambda d: _alike([576] * (TOKENS // 576), d, causal=False))
    add("cross", lambda d: _alike([256] * 16, d, n_k=[4096] * 16, causal=False))
    return cells


def _both_orders(cases: list[Case]) -> list[Case]:
    return [case.changed(deterministic=ordered) for case in cases for ordered in (True, False)]


CELLS = _small_cells() | _drawn_cells() | _step_cells()
