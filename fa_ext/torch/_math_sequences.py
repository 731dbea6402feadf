"""Attention over sequences, composed of torch's operations: one sequence after the other."""

import math
from typing import NamedTuple

import torch

from . import _math


class Sequence(NamedTuple):
    """The rows of q and the keys that a sequence uses, those of its keys that take part, where its queries stand among the keys
    (None: by the diagonal), and which pairs have one id (None: all)."""

    queries: range
    keys: range
    seen: range
    positions: torch.Tensor | None
    same: torch.Tensor | None


def sequences_of(q, k, indices, options):
    """The sequences of a call. ``indices``: index arrays by name; their contents are read as ``csrc/geometry.h`` reads them."""
    known = {name: _contents(name, x) for name, x in indices.items() if name not in ("positions", "q_segments", "k_segments")}
    places, q_ids, k_ids = (indices.get(name) for name in ("positions", "q_segments", "k_segments"))
    axis = 1 if options["layout"] == "bshd" else 2
    starts_q, starts_k = known.get("cu_seqlens_q"), known.get("cu_seqlens_k")
    batch = q.shape[0] if starts_q is None else len(starts_q) - 1
    found, end_q, end_k = [], 0, 0
    for b in range(batch):
        rows, end_q = _rows(starts_q, known.get("seqlens_q"), q.shape[0 if q.dim() == 3 else axis], q.dim() == 3, b, end_q)
        keys, end_k = _rows(starts_k, known.get("seqlens_k"), k.shape[0 if k.dim() == 3 else axis], False, b, end_k)
        begin = _clamp(known["k_range_begin"][b], 0, len(keys)) if "k_range_begin" in known else 0
        end = _clamp(known["k_range_end"][b], 0, len(keys)) if "k_range_end" in known else len(keys)
        standing = None if places is None else (places if q.dim() == 3 else places[b])[rows.start : rows.stop]
        same = None if q_ids is None else q_ids[b, : len(rows), None] == k_ids[b, None, : len(keys)]
        found.append(Sequence(rows, keys, range(begin, end), standing, same))
    return found


def _contents(name, x):
    try:
        return x.tolist()
    except RuntimeError as error:
        raise NotImplementedError(
            f"{name} is mapped by vmap, over which attention has no second derivative; accepted: one {name} for all"
        ) from error


def _rows(starts, used, room, single, b, before):
    """The rows of sequence b that are used, and where its rows end; ``before``: where those of the sequence before end."""
    begin, end = (b, b + 1) if single else (0, room)
    if starts is not None:
        begin = max(_clamp(starts[b], 0, room), before)
        end = max(_clamp(starts[b + 1], 0, room), begin)
    count = end - begin if used is None else _clamp(used[b], 0, end - begin)
    return range(begin, begin + count), end


def _clamp(x, low, high):
    return min(max(x, low), high)


def pairs_of(q, sequences, options):
    """(B, H, Sq, Sk) that hold the pairs of each sequence."""
    heads = q.shape[2 if q.dim() == 4 and options["layout"] == "bshd" else 1]
    longest_q = max((len(sequence.queries) for sequence in sequences), default=0)
    return len(sequences), heads, longest_q, max((len(sequence.keys) for sequence in sequences), default=0)


def attention(q, k, v, others, sequences, keep, options):
    """(out, lse), as ``_math.attention``. ``keep``: boolean, of ``pairs_of``, or None."""
    packed_q, packed_k, swapped = q.dim() == 3, k.dim() == 3, options["layout"] == "bshd"
    q, k, v = (x.transpose(0, 1)[None] if x.dim() == 3 else x.transpose(1, 2) if swapped else x for x in (q, k, v))
    size = len(sequences), q.shape[1], q.shape[2], k.shape[2]
    results = []
    for b, sequence in enumerate(sequences):
        mine = _slice(q, packed_q, b, sequence.queries), *(_slice(x, packed_k, b, sequence.keys) for x in (k, v))
        options_of_it = _of(others, b, sequence, size)
        results.append((sequence.queries, _attend(*mine, options_of_it, sequence, _pairs(keep, b, sequence), options)))
    groups = [results] if packed_q else [[result] for result in results]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _rejoined(groups, 0, q.new_zeros(*q.shape[1:3], v.shape[3]))
    lse = _rejoined(groups, 1, q.new_full(q.shape[1:3], -math.inf, dtype=wide))
    if packed_q:
        return out[0].transpose(0, 1), lse[0]
    return out.transpose(1, 2) if swapped else out, lse


def _attend(q, k, v, others, sequence, keep, options):
    keys = torch.arange(k.shape[2], device=q.device)
    if sequence.positions is None:
        far = _math.distance(q.shape[2], k.shape[2], options["causal"], q.device)
    else:
        far = keys - sequence.positions[:, None].long()
    seen = (keys >= sequence.seen.start) & (keys < sequence.seen.stop)
    seen = seen if sequence.same is None else seen & sequence.same
    return _math.over_pairs(q, k, v, others, far, _math.band(far, options["causal"], options["window"]) & seen, keep, options)


def _of(others, b, sequence, size):
    """The options of one sequence. ``size``: (B, H, Sq, Sk) of the arrays."""
    mine = dict(others)
    for name in ("bias", "mask"):
        if name in mine:
            mine[name] = _pairs(mine[name].expand(size), b, sequence)
    if "alibi" in mine and mine["alibi"].dim() == 2:
        mine["alibi"] = mine["alibi"][b : b + 1]
    return mine


def _slice(x, packed, b, rows):
    return x[0 if packed else b, :, rows.start : rows.stop][None]


def _pairs(x, b, sequence):
    return None if x is None else x[b : b + 1, :, : len(sequence.queries), : len(sequence.keys)]


def _rejoined(groups, place, blank):
    """The results of sequences, ``place`` of each, at their rows of ``blank`` (H, S, ...), whose values stay elsewhere: one such
    tensor a group."""
    joined = []
    for group in groups:
        parts, filled = [], 0
        for rows, result in group:
            parts += [blank[:, filled : rows.start], result[place][0]]
            filled = rows.stop
        joined.append(torch.cat([*parts, blank[:, filled:]], 1))
    return torch.stack(joined) if joined else blank[None][:0]
