"""Calls of the backward pass over sequences: their arrays in any storage, and what of them is a sequence's.

The values of a sequence (``Values``) stand apart from the storage, so that a sequence has the same bits in each. out and LSE are
the reference's, rounded. All memory that belongs to no sequence is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from bench.problems import stored
from bench.problems.case import Case
from bench.problems.placement import dtype_of
from fa_ext import reference

#: The storages that have a backward pass.
Q_STORAGE, K_STORAGE = ("padded", "packed", "one"), ("padded", "packed")


@dataclass
class Values:
    """Of one sequence, rows first: q, dout and out (n_q, H, D), k and v (n_k, Hk, D), lse and dlse (n_q, H)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray


def forward(case: Case) -> Case:
    return case.changed(operation="serving", deterministic=True, accumulate=False, dlse=False)


def values_of(case: Case, seed=5) -> list[Values]:
    """The values of each sequence; out and lse come from the same call over packed arrays, whatever the storage, but with segments."""
    case = forward(case)
    drawn, like = stored.values_of(case), case.changed(layout="bshd") if case.segments else case.changed(q="packed", k="packed", layout="bshd")
    arguments = like.host_inputs(drawn)
    out, lse = reference.attention(**arguments)
    wide = np.float64 if case.dtype == "float64" else np.float32
    found = []
    for b, (q, k, v) in enumerate(drawn):
        rng = np.random.default_rng([case.seed, seed, b])
        some_out, some_lse = (rows_of(like, arguments, name, x, b) for name, x in (("out", out), ("lse", lse)))
        with np.errstate(over="ignore"):
            narrow, some_lse = some_out.astype(q.dtype), some_lse.astype(wide)
        dout, dlse = rng.standard_normal(some_out.shape).astype(q.dtype), rng.standard_normal(some_lse.shape).astype(wide)
        found.append(Values(q, k, v, dout, narrow, some_lse, dlse))
    return found


def arguments_of(case: Case, values: list[Values] | None = None, *, dlse=True) -> dict:
    """The arguments of the call of fa_ext.attention_backward, on the host."""
    values = values_of(case) if values is None else values
    made = forward(case).host_inputs([(x.q, x.k, x.v) for x in values])
    q, dim = made["q"], case.head_dim_v
    found = {name: np.full((*q.shape[:-1], dim), np.nan, q.dtype) for name in ("dout", "out")}
    rows = q.shape[1::-1] if q.ndim == 3 else (len(q), case.heads, q.shape[1 if case.layout == "bshd" else 2])
    wide = np.float64 if case.dtype == "float64" else np.float32
    found |= {name: np.full(rows, np.nan, wide) for name in ("lse", "dlse")}
    if case.sinks:
        made["sinks"] = made["sinks"].astype(wide)
    for b, x in enumerate(values):
        for name in ("dout", "out", "lse", "dlse"):
            rows_of(case, made, name, found[name], b)[...] = getattr(x, name)
    if not dlse:
        del found["dlse"]
    return found | made | {name: x for name, x in case.options().items() if name in ("deterministic", "accumulate")}


def rows_of(case: Case, arguments: dict, name: str, array, b: int):
    """Sequence b's part of an array, as a view with its rows first. name: that of an argument, which says how it is stored."""
    if name in ("k", "v"):
        if array.ndim == 3:
            first = int(arguments["cu_seqlens_k"][b])
            return array[first : first + case.n_k[b]]
        return (array[b] if case.layout == "bshd" else array[b].swapaxes(0, 1))[: case.n_k[b]]
    n = case.n_q[b]
    if name in ("lse", "dlse"):
        array = array.T if arguments["q"].ndim == 3 else array[b].T
        first = 0 if arguments["q"].ndim == 4 else b if case.storage.q == "one" else int(arguments["cu_seqlens_q"][b])
        return array[first : first + n]
    if array.ndim == 3:
        first = b if case.storage.q == "one" else int(arguments["cu_seqlens_q"][b])
        return array[first : first + n]
    return (array[b] if case.layout == "bshd" else array[b].swapaxes(0, 1))[:n]


def parts_of(case: Case, arguments: dict, got: dict) -> list[dict]:
    """[{name: rows}] of each sequence, out of the gradients of q, k and v."""
    return [{name: rows_of(case, arguments, name, x, b) for name, x in got.items() if name in "qkv"} for b in range(len(case.n_q))]


def elsewhere(case: Case, arguments: dict, name: str, array) -> np.ndarray:
    """The elements of an array that are no sequence's."""
    mine = np.ones(array.shape, bool)
    for b in range(len(case.n_q)):
        rows_of(case, arguments, name, mine, b)[...] = False
    return array[mine]


def alone(case: Case, values: list[Values], b: int) -> dict:
    """The arguments of sequence b as a dense call of one entry, (1, H, S, D), with what it sees as a mask and ALiBi as a bias."""
    x, options = values[b], forward(case).options() | stored.extras(case)
    n_q, n_k = case.n_q[b], case.n_k[b]
    given = stored.query_positions(case)
    at = given[b] if given else np.arange(n_q) + (0 if case.causal == "top_left" else n_k - n_q)
    offset = np.arange(n_k)[None, :] - at[:, None].astype(np.int64)
    left, right = (np.inf if side is None else side for side in case.window or (None, None))
    begin, end = options.get("k_range", (None, None))
    keys = np.arange(n_k)[None, :]
    seen = (offset >= -left) & (offset <= (min(right, 0) if case.causal else right))
    seen &= (keys >= (0 if begin is None else begin[b])) & (keys < (n_k if end is None else end[b]))
    found = {name: getattr(x, name).swapaxes(0, 1)[None] for name in ("dout", "q", "k", "v", "out")}
    found |= {name: getattr(x, name).T[None] for name in ("lse", "dlse")} | {"mask": seen[None, None]}
    found |= {name: options[name] for name in ("scale", "softcap", "sinks") if name in options}
    if case.alibi:
        slopes = np.broadcast_to(options["alibi"], (len(values), case.heads))[b].astype(np.float64)
        found["bias"] = -slopes[None, :, None, None] * abs(offset)
    if case.dropout:
        found["dropout"] = (*case.dropout, 0, (b, 0, 0, 0), case.heads)
    return found


def as_dense(case: Case, x: Values, b: int) -> dict:
    """The arguments of sequence b, whose values are x, as a dense call of one entry, (1, H, S, D), with its own options."""
    found = {name: getattr(x, name).swapaxes(0, 1)[None] for name in ("dout", "q", "k", "v", "out")}
    found |= {name: getattr(x, name).T[None] for name in ("lse", "dlse")}
    options = arguments_of(case)
    found |= {name: options[name] for name in ("causal", "window", "softcap", "scale", "alibi") if name in options}
    return found | ({"dropout": (*case.dropout, 0, (b, 0, 0, 0), case.heads)} if case.dropout else {})


@functools.lru_cache(maxsize=2)
def known(case: Case) -> tuple[list[Values], dict]:
    """(values, arguments) of a case: the kernels that it runs on share them."""
    values = values_of(case)
    return values, arguments_of(case, values)


def dense_case(case: Case, b: int) -> Case:
    """Sequence b as a case without sequences."""
    like = {f.name: getattr(case, f.name) for f in dataclasses.fields(Case)}
    for name in ("lengths", "storage", "batch", "operation", "layout", "sinks", "k_range", "positions", "segments"):
        del like[name]
    return Case(**like | {"seq_q": case.n_q[b], "seq_k": case.n_k[b]})
