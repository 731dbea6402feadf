"""Calls of fa_ext.jax over sequences for its tests, and each of their sequences by itself."""

from __future__ import annotations

import numpy as np

from fa_ext import reference
from fa_ext.reference.backward import gradients
from tests.frameworks.support.jax_support import NAMES
from tests.frameworks.support.sequence_calls import CALLS, DV, HK, D, H


def index(*values):
    return np.array(values, np.int32)


def make(name, dtype="float32", seed=0):
    """(arrays, index arrays, options) of a call, by name."""
    rows_q, rows_k, storage_q, storage_k, options, extras = CALLS[name]
    rng, batch = np.random.default_rng(seed), len(rows_q)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    def stored(rows, storage, heads, width):
        if storage != "padded":
            return draw(batch if storage == "single" else rows[-1][1] + 2, heads, width)
        room = max(end for _, end in rows) + 1
        return draw(batch, room, heads, width) if options.get("layout") == "bshd" else draw(batch, heads, room, width)

    arrays = {"q": stored(rows_q, storage_q, H, D), "k": stored(rows_k, storage_k, HK, D), "v": stored(rows_k, storage_k, HK, DV)}
    indices = {}
    for side, rows, storage in (("q", rows_q, storage_q), ("k", rows_k, storage_k)):
        if storage.startswith("packed"):  # rooms touch; of those of "packed used" the last rows are not used
            indices[f"cu_seqlens_{side}"] = index(*(begin for begin, _ in rows), rows[-1][1] + storage.count("used"))
        if storage in ("padded", "packed used"):
            indices[f"seqlens_{side}"] = index(*(end - begin for begin, end in rows))
    sq, sk = (arrays[n].shape[1 if options.get("layout") == "bshd" else 2] for n in "qk")
    made = {"bias": lambda: draw(batch, H, sq, sk), "bias of a head": lambda: draw(H, 1, 1), "sinks": lambda: draw(H),
            "mask": lambda: rng.random((batch, 1, sq, sk)) < 0.7, "alibi": lambda: rng.random(H, np.float32),
            "alibi of each": lambda: rng.random((batch, H), np.float32)}  # fmt: skip
    arrays |= {n.split(" ")[0]: make() for n, make in made.items() if n in extras}
    if "k_range" in extras:
        indices["k_range"] = index(1, 0), index(4, 2)
    if "positions" in extras:
        indices["positions"] = np.resize(index(3, 0, 4, 4, 1, 9, -1, 0, 0), len(arrays["q"]))
    return arrays, indices, dict(options)


def exact(dout, dlse, arrays, indices, options):
    """(out, lse, {name: gradient}) in float64."""
    given = arrays | indices | options
    wrt = tuple(n for n in NAMES if n in arrays)
    return *reference.attention(**given), gradients(dout, **given, dlse=dlse, wrt=wrt, dtype=None)


def sequences(name):
    """(number, rows of q, rows of k) of each sequence that has queries."""
    rows_q, rows_k = CALLS[name][:2]
    return [(b, slice(*of_q), slice(*of_k)) for b, (of_q, of_k) in enumerate(zip(rows_q, rows_k, strict=True)) if of_q[0] < of_q[1]]


def own(x, b, rows, layout="bhsd"):
    """(1, heads, rows, width) of a sequence."""
    if x.ndim == 3:
        return x[rows].swapaxes(0, 1)[None]
    return (x.swapaxes(1, 2) if layout == "bshd" else x)[b : b + 1, :, rows]


def own_rows(lse, b, rows, packed):
    """(1, heads, rows) of a sequence."""
    return lse[None, :, rows] if packed else lse[b : b + 1, :, rows]


def own_arrays(arrays, b, of_q, of_k, layout="bhsd"):
    """The arrays of the dense call that a sequence is."""
    mine = {n: own(arrays[n], b, of_q if n == "q" else of_k, layout) for n in "qkv"}
    for n, x in arrays.items():
        if n in ("bias", "mask") and x.ndim == 4:
            x = x[b : b + 1, :, : of_q.stop - of_q.start, : of_k.stop - of_k.start]
        if n == "alibi" and x.ndim == 2:
            x = x[b : b + 1]
        mine.setdefault(n, x)
    return mine


def free(name, side):
    """Boolean, of the axes of q (side 0) or k (side 1) but the last: the rows of no sequence."""
    arrays, _, options = make(name)
    taken = np.zeros(arrays["qk"[side]].shape[:-1], bool)
    for b, rows in enumerate(slice(*pair) for pair in CALLS[name][side]):
        if taken.ndim == 2:
            taken[rows] = True
        else:
            (taken.swapaxes(1, 2) if options.get("layout") == "bshd" else taken)[b, :, rows] = True
    return ~taken
