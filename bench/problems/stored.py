"""The inputs of a case of sequences, in any storage.

The values of each sequence stand apart from how they are stored, so that the same values can be had in another storage. All
memory that belongs to no sequence is NaN, and so is what lies around the arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.problems import magnitudes
from bench.problems.placement import dtype_of

if TYPE_CHECKING:
    from bench.problems.case import Case

POSITIONS = ("same", "shifted", "random")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def values_of(case: Case) -> list[tuple]:
    """[(q, k, v)] of each sequence: (n_q, H, D), (n_k, Hk, D), (n_k, Hk, Dv)."""
    rng = np.random.default_rng([case.seed, 11])
    dtype = dtype_of(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    drawn = [(normal(a, case.heads, case.head_dim), normal(b, case.heads_kv, case.head_dim),
              normal(b, case.heads_kv, case.head_dim_v)) for a, b in zip(case.n_q, case.n_k)]  # fmt: skip
    if not case.logits:
        return drawn
    scale = case.options().get("scale", case.head_dim**-0.5)
    shapes = [[x.swapaxes(0, 1).shape for x in (q, k)] for q, k, _ in drawn]
    large = [magnitudes.operands(*case.logits, *pair, case.dtype, scale, case.seed + b) for b, pair in enumerate(shapes)]
    return [(*(x.swapaxes(0, 1).astype(dtype) for x in pair), v) for pair, (_, _, v) in zip(large, drawn)]


def extras(case: Case) -> dict:
    """The arguments beside q, k and v that are arrays, or pairs of them, and do not depend on the storage."""
    rng = np.random.default_rng([case.seed, 12])
    batch, found = len(case.n_q), {}
    if case.sinks:
        found["sinks"] = rng.standard_normal(case.heads).astype(np.float32)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "heads" else (batch, case.heads)
        slopes = magnitudes.slopes(case.logits[1], shape) if case.logits else rng.random(shape) / 4
        found["alibi"] = slopes.astype(np.float32)
    if case.k_range:
        begin = np.array([rng.integers(-2, n + 2) for n in case.n_k], np.int32)
        end = np.array([rng.integers(-1, n + 4) for n in case.n_k], np.int32)
        found["k_range"] = [(begin, end), (begin, None), (None, end)][case.seed % 3]
    return found


def query_positions(case: Case):
    """Positions of each sequence's queries, or None."""
    rng = np.random.default_rng([case.seed, 13])
    if case.positions is None:
        return None
    found = []
    for a, b in zip(case.n_q, case.n_k):
        at = np.arange(a) + (0 if case.causal == "top_left" else b - a)
        if case.positions == "shifted":
            at = at + rng.integers(-9, 9)
        elif case.positions == "random":
            at = rng.integers(-3, b + 4, a)
        found.append(at.astype(np.int32))
    return found


# ---- the storage ----


def host_inputs(case: Case, values=None) -> dict:
    """The arguments of the call, as NumPy arrays. values: those of each sequence, where they are not the case's own."""
    values = values_of(case) if values is None else values
    rng = np.random.default_rng([case.seed, 14])
    queries, keys = _store_queries(case, [x[0] for x in values]), _store_keys(case, values, rng)
    if case.segments:
        rows, drawn = 1 if case.layout == "bshd" else 2, np.array([INT_MIN, -1, 0, INT_MAX], np.int32)
        shapes = [(x.shape[0], x.shape[rows]) for x in (queries["q"], keys["k"])]
        keys["segments"] = tuple(drawn[np.random.default_rng([case.seed, 15, n]).integers(0, 4, shape)] for n, shape in enumerate(shapes))
    return queries | keys | case.options() | extras(case) | {"layout": case.layout}


def _store_queries(case: Case, sequences):
    positions = query_positions(case)
    dtype = dtype_of(case.dtype)
    batch, tail = len(sequences), (case.heads, case.head_dim)
    if case.storage.q == "one":
        q = np.full((batch, *tail), np.nan, dtype)
        at = np.full(batch, 7, np.int32)
        for b, x in enumerate(sequences):
            q[b : b + len(x)] = x
            if positions and len(x):
                at[b] = positions[b][0]
        found = {"q": q} | ({"positions": at} if positions else {})
        return found | ({} if all(n == 1 for n in case.n_q) else {"seqlens_q": np.array(case.n_q, np.int32)})
    if case.storage.q == "packed":
        starts = np.concatenate([[0], np.cumsum(case.n_q)]).astype(np.int32) + case.storage.slack // 2
        rows = int(starts[-1]) + case.storage.slack
        q, at = np.full((rows, *tail), np.nan, dtype), np.full(rows, INT_MIN, np.int32)
        for b, x in enumerate(sequences):
            q[starts[b] : starts[b + 1]] = x
            if positions:
                at[starts[b] : starts[b + 1]] = positions[b]
        return {"q": q, "cu_seqlens_q": starts} | ({"positions": at} if positions else {})
    rows = max(case.n_q, default=0) + case.storage.slack
    q, at = np.full((batch, rows, *tail), np.nan, dtype), np.full((batch, rows), INT_MAX, np.int32)
    for b, x in enumerate(sequences):
        q[b, : len(x)] = x
        if positions:
            at[b, : len(x)] = positions[b]
    found = {"q": q if case.layout == "bshd" else np.ascontiguousarray(q.swapaxes(1, 2))}
    return found | {"seqlens_q": np.array(case.n_q, np.int32)} | ({"positions": at} if positions else {})


def _store_keys(case: Case, values, rng):
    dtype, batch = dtype_of(case.dtype), len(values)
    lengths = np.array(case.n_k, np.int32)
    dims = case.head_dim, case.head_dim_v
    if case.storage.k == "packed":
        room = lengths + rng.integers(0, case.storage.slack + 1, batch).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(room)]).astype(np.int32) + case.storage.slack
        k, v = (np.full((int(starts[-1]) + case.storage.slack, case.heads_kv, d), np.nan, dtype) for d in dims)
        for b, (_, some_k, some_v) in enumerate(values):
            k[starts[b] : starts[b] + lengths[b]], v[starts[b] : starts[b] + lengths[b]] = some_k, some_v
        return {"k": k, "v": v, "cu_seqlens_k": starts, "seqlens_k": lengths}
    if case.storage.k == "padded":
        k, v = (np.full((batch, max(case.n_k, default=0) + case.storage.slack, case.heads_kv, d), np.nan, dtype) for d in dims)
        for b, (_, some_k, some_v) in enumerate(values):
            k[b, : lengths[b]], v[b, : lengths[b]] = some_k, some_v
        if case.layout == "bhsd":
            k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
        return {"k": k, "v": v, "seqlens_k": lengths}
    size = case.storage.page_size
    needed = -(-lengths // size)
    pages = int(needed.sum()) + case.storage.slack
    table = rng.choice(np.array([-1, INT_MIN, INT_MAX, pages, 0], np.int32), (batch, int(needed.max(initial=0)) + case.storage.slack))
    k, v = empty_cache(case, pages)
    order = iter(rng.permutation(pages))
    heads_first = case.layout == "bhsd"
    for b, (_, some_k, some_v) in enumerate(values):
        for column in range(needed[b]):
            page = table[b, column] = next(order)
            rows = slice(column * size, min((column + 1) * size, int(lengths[b])))
            for x, some in ((k, some_k), (v, some_v)):
                to = x[page].swapaxes(0, 1) if heads_first else x[page]
                to[: rows.stop - rows.start] = some[rows]
    return {"k": k, "v": v, "page_table": np.ascontiguousarray(table), "seqlens_k": lengths}


def empty_cache(case: Case, pages):
    """k and v of NaN: (pages, page_size, Hk, D) or (pages, Hk, page_size, D), lying in memory as ``cache`` says."""
    dtype, h, size = dtype_of(case.dtype), case.heads_kv, case.storage.page_size
    shared = case.storage.cache in ("pair", "first", "heads") and case.head_dim == case.head_dim_v

    def new(*shape):
        return np.full(shape, np.nan, dtype)

    def page(d, heads=h):
        return (size, heads, d) if case.layout == "bshd" else (heads, size, d)

    if shared and case.storage.cache == "pair":
        kv = new(pages, 2, *page(case.head_dim))
        return kv[:, 0], kv[:, 1]
    if shared and case.storage.cache == "first":
        kv = new(2, pages, *page(case.head_dim))
        return kv[0], kv[1]
    if shared and case.storage.cache == "heads":
        kv = new(pages, *page(case.head_dim, 2 * h))
        return (kv[..., 0::2, :], kv[..., 1::2, :]) if case.layout == "bshd" else (kv[:, 0::2], kv[:, 1::2])
    if case.storage.cache == "twice":
        return tuple(new(2 * pages, *page(d))[::2] for d in (case.head_dim, case.head_dim_v))
    if case.storage.cache == "swapped":
        return tuple(new(pages, *(page(d)[n] for n in (1, 0, 2))).swapaxes(1, 2) for d in (case.head_dim, case.head_dim_v))
    return tuple(new(pages, *page(d)) for d in (case.head_dim, case.head_dim_v))
