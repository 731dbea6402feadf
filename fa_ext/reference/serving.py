"""Attention over sequences of any length and paged caches in float64: what the serving keywords are judged by.

``attention`` and ``plain`` resolve each sequence of a call to a dense problem for ``dense``: they gather its
keys, say in a mask what each query sees, and scatter the result. ``append`` writes new keys and values into caches, with
rotary position embedding. Index arrays with bad contents mean what the contract says: they hide keys or skip writes, and
are listed as faults. NumPy or CuPy arrays; index arrays are read on the host.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy

from ..dropout import Dropout
from . import dense

__all__ = [
    "Alone", "Fault", "Sequence", "append", "as_stored", "attention", "four_axes", "plain", "problems_of", "resolve", "rotate", "spread",
    "targets",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One bad content of an index array.

    kind: "length", "cu_seqlens", "page", "slot" or "position". sequence: batch entry, -1 where there is none. index: 0 for
    the lengths of q and 1 for those of k ("length", "cu_seqlens"), the column of the table ("page"), the row of k ("slot",
    "position"). value: what was there; for a token of ``append`` that has no place, its key.
    """

    kind: str
    sequence: int
    index: int
    value: int


@dataclass(frozen=True)
class Sequence:
    """One batch entry: the rows of its queries and keys, and the keys that take part.

    first_q, first_k: its first row in a packed array, 0 in a padded one. positions: of its queries among the keys, (seq_q).
    key_begin, key_end: ``k_range``, clipped. seen_begin, seen_end: the keys somebody may see through causal, window and
    range; both 0 when nobody sees one. pages: the entries of its row of the table for these keys, by column.
    """

    seq_q: int
    seq_k: int
    first_q: int
    first_k: int
    positions: numpy.ndarray
    key_begin: int
    key_end: int
    seen_begin: int
    seen_end: int
    pages: dict[int, int]


def resolve(
    batch, rows_q, rows_k, *, causal=False, window=None, cu_seqlens_q=None, seqlens_q=None, cu_seqlens_k=None,
    seqlens_k=None, page_table=None, page_size=0, pages=0, k_range=None, positions=None, one_each=False, max_seqlen_q=None,
):  # fmt: skip
    """(sequences, faults) of a call.

    batch: sequences; rows_q, rows_k: rows of the arrays, T or Sq and Tk or Sk (of paged keys unused); one_each: q is
    (B, H, D) without cu_seqlens_q. The index arrays as in ``fa_ext.attention``, on the host.
    """
    faults = []
    starts_q = _starts(cu_seqlens_q, rows_q, 0, faults)
    starts_k = _starts(cu_seqlens_k, rows_k, 1, faults)
    left, right, _ = dense.band(0, 0, causal, window)
    begins, ends = (None, None) if k_range is None else k_range
    sequences = []
    for b in range(batch):
        first_q, room_q = _span(starts_q, b, 1 if one_each else rows_q)
        first_k, room_k = _span(starts_k, b, rows_k)
        if one_each:
            first_q = b
        if page_table is not None:
            room_k = page_table.shape[1] * page_size
        seq_q = _used(seqlens_q, b, room_q, 0, faults, max_seqlen_q)
        seq_k = _used(seqlens_k, b, room_k, 1, faults)
        begin = 0 if begins is None else min(max(int(begins[b]), 0), seq_k)
        end = seq_k if ends is None else min(max(int(ends[b]), begin), seq_k)
        if positions is None:
            at = numpy.arange(seq_q) + (0 if causal == "top_left" else seq_k - seq_q)
        else:
            row = positions if positions.ndim == 1 else positions[b]
            first = first_q if positions.ndim == 1 else 0
            at = row[first : first + seq_q].astype(numpy.int64)
        seen = (0, 0)
        if seq_q:
            low, high = max(begin, int(at.min()) - left), min(end, int(at.max()) + right + 1)
            seen = (int(low), int(high)) if low < high else (0, 0)
        entries = {}
        if page_table is not None and seen[0] < seen[1]:
            for column in range(seen[0] // page_size, (seen[1] - 1) // page_size + 1):
                entries[column] = int(page_table[b, column])
                if not 0 <= entries[column] < pages:
                    faults.append(Fault("page", b, column, entries[column]))
        sequences.append(Sequence(seq_q, seq_k, first_q, first_k, at, begin, end, *seen, entries))
    return sequences, faults


def attention(q, k, v, **arguments):
    """Softmax attention in float64 over sequences.

    Arguments as in ``fa_ext.attention``: the options of ``reference.attention`` and alibi, cu_seqlens_q, seqlens_q,
    max_seqlen_q, cu_seqlens_k, seqlens_k, page_table, k_range, positions, segments. Dropout's batch entry is the number of the sequence, its query and
    key the indices within the sequence.

    Returns (out, lse), both float64: shaped as q with v's head_dim, and (B, H, Sq), or (H, T) for q of three axes. Rows
    of no sequence are 0 and -inf.
    """
    return _run(q, k, v, **arguments)


def plain(q, k, v, *, dtype=None, out_dtype=None, exact=False, **arguments):
    """The same formula in the arithmetic of ``reference.plain``."""
    dtype = dtype or q.dtype.name
    return _run(q, k, v, dtype=dtype, out_dtype=out_dtype or dtype, exact=exact, **arguments)


def spread(q, k, v, truth, **options):
    """Where NaN and Inf in K and V may spread: to every query of a sequence and kv head that has one at a key somebody may see
    through causal, window and k_range. A boolean array like ``truth``; elements that are not finite there stay judged."""
    xp = sys.modules[type(truth).__module__.partition(".")[0]]
    o = dense.Options(**options)
    broken = xp.zeros(truth.shape, bool)
    where = four_axes(xp, broken, o.layout)  # a view
    for p in problems_of(xp, q, k, v, o)[1]:
        bad = ~(xp.isfinite(p.k).all(axis=(0, 2, 3)) & xp.isfinite(p.v).all(axis=(0, 2, 3)))
        where[p.at, :, p.rows] = xp.repeat(bad, where.shape[1] // bad.shape[0])[:, None, None]
    return broken & xp.isfinite(truth)


def append(
    k_cache, v_cache, k, v, *, layout, page_table=None, seqlens_k=None, cu_seqlens_q=None, seqlens_q=None, slots=None,
    q=None, rotary=None, interleaved=False, positions=None,
):  # fmt: skip
    """The caches as ``fa_ext.append`` writes them, in float64.

    Arguments as there, all of them NumPy arrays. Returns (k_cache, v_cache, q, written, faults): float64 copies with the
    new rows in place (of two tokens with one place the last), the rotated q or None, a boolean (pages, page_size), or
    (B, Sk) without a table, that says which rows are new, and the list of faults.
    """
    tokens, faults = targets(
        k_cache, k, layout=layout, page_table=page_table, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q,
        seqlens_q=seqlens_q, slots=slots, rotary=rotary, positions=positions,
    )  # fmt: skip
    swapped = layout == "bhsd"
    caches = [_rows_first(None if x is None else x.astype(numpy.float64), swapped) for x in (k_cache, v_cache)]
    new = [_rows_first(x, swapped) for x in (k, v, q)]
    rotated = None if q is None else numpy.zeros(new[2].shape, numpy.float64)
    written = numpy.zeros(caches[0].shape[:2], bool)
    for token in tokens:
        value = new[0][token.row]
        caches[0][token.place] = value if rotary is None else rotate(value, rotary, token.position, interleaved)[0]
        if caches[1] is not None:
            caches[1][token.place] = new[1][token.row]
        if rotated is not None:
            rotated[token.row] = rotate(new[2][token.row], rotary, token.position, interleaved)[0]
        written[token.place] = True
    return *(_rows_first(x, swapped) for x in (*caches, rotated)), written, faults


@dataclass(frozen=True)
class Token:
    """A new key that is written: row, its index in k ((b, t), or (t,) in a packed array); place, (page, row) in the cache;
    position, its row of the rotary table."""

    row: tuple[int, ...]
    place: tuple[int, int]
    position: int


def targets(
    k_cache, k, *, layout, page_table: Any = None, seqlens_k: Any = None, cu_seqlens_q=None, seqlens_q=None, slots=None, rotary=None,
    positions=None,
):  # fmt: skip
    """(tokens, faults): where each new key of ``append`` goes. Keys with a fault, or without a place, are left out."""
    pages, page_size = k_cache.shape[0], k_cache.shape[2 if layout == "bhsd" else 1]
    tokens = []
    faults = []

    def add(sequence, row, place, position):
        if rotary is not None and not 0 <= position < rotary[0].shape[0]:
            faults.append(Fault("position", sequence, row[-1], position))
        else:
            tokens.append(Token(row, place, position))

    if slots is not None:
        for t, slot in enumerate(int(x) for x in slots):
            if slot >= pages * page_size:
                faults.append(Fault("slot", -1, t, slot))
            elif slot >= 0:
                add(-1, (t,), divmod(slot, page_size), 0 if positions is None else int(positions[t]))
        return tokens, faults

    packed = k.ndim == 3
    one_each = packed and cu_seqlens_q is None
    rows = k.shape[0] if packed else k.shape[2 if layout == "bhsd" else 1]
    starts = _starts(cu_seqlens_q, rows, 0, faults)
    for b in range(len(seqlens_k)):
        first, room = _span(starts, b, 1 if one_each else rows)
        first = b if one_each else first
        count = _used(seqlens_q, b, room, 0, faults)
        capacity = page_size if page_table is None else page_table.shape[1] * page_size
        for t in range(count):
            key = int(seqlens_k[b]) - count + t
            row = (first + t,) if packed else (b, t)
            if not 0 <= key < capacity:
                faults.append(Fault("length", b, 1, key))
                continue
            place = b, key
            if page_table is not None:
                column = key // page_size
                page = int(page_table[b, column])
                if not 0 <= page < pages:
                    if Fault("page", b, column, page) not in faults:
                        faults.append(Fault("page", b, column, page))
                    continue
                place = page, key % page_size
            add(b, row, place, key if positions is None else int(positions[row]))
    return tokens, faults


def rotate(x, rotary, position, interleaved=False):
    """Rotary position embedding (Su et al. 2021) of the first R columns of x, (..., D), at one position.

    rotary: (cos, sin), each (positions, R / 2). Column pairs are (n, n + R / 2), or (2 n, 2 n + 1) if ``interleaved``.
    Returns (value, size), both float64: size is |x0 cos| + |x1 sin|, which float32's rounding is relative to, and 0 in the
    columns that are not rotated.
    """
    cos, sin = (table[position].astype(numpy.float64) for table in rotary)
    half = cos.shape[0]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    value = x.astype(numpy.float64)
    size = numpy.zeros_like(value)
    a, b = value[..., first].copy(), value[..., second].copy()
    with numpy.errstate(invalid="ignore", over="ignore"):
        value[..., first], value[..., second] = a * cos - b * sin, b * cos + a * sin
        size[..., first], size[..., second] = abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin)
    return value, size


def _rows_first(x, swapped) -> Any:
    """(batch, rows, heads, D) of (batch, heads, rows, D), and back; packed arrays and None as they are."""
    return x.swapaxes(1, 2) if swapped and x is not None and x.ndim == 4 else x


def _starts(cu_seqlens, rows, which, faults):
    """The running maximum, clipped to [0, rows]; None where there is no array."""
    if cu_seqlens is None:
        return None
    repaired, highest = [], 0
    for n, value in enumerate(int(x) for x in cu_seqlens):
        highest = max(highest, min(max(value, 0), rows))
        if value != highest:
            faults.append(Fault("cu_seqlens", n, which, value))
        repaired.append(highest)
    return repaired


def _span(starts, b, rows):
    """(first row, rows) of sequence b."""
    return (0, rows) if starts is None else (starts[b], starts[b + 1] - starts[b])


def _used(seqlens, b, room, which, faults, most=None):
    length = room if seqlens is None else int(seqlens[b])
    if most is not None:
        room = min(room, most)
    if not 0 <= length <= room:
        faults.append(Fault("length", b, which, length))
    return min(max(length, 0), room)


@dataclass(frozen=True)
class _Problem:
    """A sequence as a dense problem: b, its rows of q, (1, Hk, n, D) of the keys somebody may see, and which have a page."""

    b: int
    at: int  # of q, out and lse on the batch axis
    rows: slice
    sequence: Sequence
    k: object
    v: object
    held: numpy.ndarray


def four_axes(xp, x, layout):
    """(B, H, rows, D); of packed arrays B is 1."""
    if x.ndim == 3:
        return xp.swapaxes(x[None], 1, 2)
    return xp.swapaxes(x, 1, 2) if layout == "bshd" else x


def problems_of(xp, q, k, v, o):
    """The batch size, and the sequences that have queries."""
    packed_q, packed_k = q.ndim == 3, k.ndim == 3
    q, k, v = (four_axes(xp, x, o.layout) for x in (q, k, v))
    index = {name: _host(getattr(o, name)) for name in o.INDICES}
    table = index["page_table"]
    batch = k.shape[0]
    if table is not None:
        batch = table.shape[0]
    elif packed_k:
        batch = len(index["cu_seqlens_k"]) - 1
    sequences, _ = resolve(
        batch, q.shape[2], k.shape[2], causal=o.causal, window=o.window, page_size=k.shape[2], pages=k.shape[0],
        k_range=None if o.k_range is None else tuple(_host(x) for x in o.k_range),
        one_each=packed_q and index["cu_seqlens_q"] is None, max_seqlen_q=o.max_seqlen_q, **index,
    )  # fmt: skip

    def each():
        for b, s in enumerate(sequences):
            if s.seq_q:
                keys = _gather(xp, k, v, s, b, packed_k, table is not None, k.shape[2])
                yield _Problem(b, 0 if packed_q else b, slice(s.first_q, s.first_q + s.seq_q), s, *keys)

    return batch, each()


def _run(q, k, v, *, xp=None, dtype=None, out_dtype=None, exact=False, logits=None, **options):
    xp = xp or sys.modules[type(q).__module__.partition(".")[0]]
    o = dense.Options(**options)
    batch, problems = problems_of(xp, q, k, v, o)
    alone, dim_v, layout = Alone(xp, q, k, o, batch), v.shape[-1], o.layout
    packed_q, q = q.ndim == 3, four_axes(xp, q, layout)
    out = xp.zeros((*q.shape[:3], dim_v), xp.float64)
    lse = xp.full(q.shape[:3], -math.inf, xp.float64)
    for p in problems:
        queries, options = q[p.at : p.at + 1, :, p.rows], alone.options(p)
        raised = None if logits is None else logits[p.b : p.b + 1]
        some_out, some_lse = dense.attend(
            queries, p.k, p.v, options, xp=xp, dtype=dtype, out_dtype=out_dtype, exact=exact, logits=raised
        )
        out[p.at, :, p.rows], lse[p.at, :, p.rows] = some_out[0], some_lse[0]
    return as_stored(xp, out, packed_q, layout), lse[0] if packed_q else lse


class Alone:
    """The options of a call over sequences as those of dense calls of one sequence each."""

    def __init__(self, xp, q, k, o, batch):
        keys = k.shape[1 if o.layout == "bshd" else 2] * (1 if o.page_table is None else o.page_table.shape[1])
        heads, rows_q = four_axes(xp, q, o.layout).shape[1:3]
        self.xp, self.given = xp, o
        self.limit = dense.LIMIT_F64 if q.dtype == xp.float64 else dense.LIMIT
        self.left, self.right, _ = dense.band(0, 0, o.causal, o.window)
        shape = (batch, heads, rows_q, keys)
        self.bias, self.mask = (None if x is None else xp.broadcast_to(xp.asarray(x), shape) for x in (o.bias, o.mask))
        self.segments = None if o.segments is None else [_host(x) for x in o.segments]
        self.slopes = None if o.alibi is None else xp.broadcast_to(xp.asarray(o.alibi), (batch, heads))
        self.dropout = Dropout.read(o.dropout, batch, heads, rows_q, k.shape[0] if k.ndim == 3 else keys)

    def seen(self, p):
        """(n_q, n_k): what causal, window, range and segments let a sequence's queries see of the keys that were cut out."""
        xp, s = self.xp, p.sequence
        at, j = xp.asarray(s.positions, xp.int64)[:, None], xp.arange(s.seen_begin, s.seen_end)[None, :]
        seen = (j >= at - self.left) & (j <= at + self.right) & xp.asarray(p.held)[None, :]
        if self.segments is None:
            return seen
        q_ids, k_ids = (x[p.b] for x in self.segments)
        return seen & xp.asarray(q_ids[: s.seq_q, None] == k_ids[None, s.seen_begin : s.seen_end])

    def _offset(self, p):
        xp, s = self.xp, p.sequence
        return xp.arange(s.seen_begin, s.seen_end)[None, :] - xp.asarray(s.positions)[:, None]

    def options(self, p) -> dense.Options:
        xp, o, s = self.xp, self.given, p.sequence
        span, seen = slice(s.seen_begin, s.seen_end), self.seen(p)[None, None]
        if self.mask is not None:
            seen = seen & (self.mask[p.b : p.b + 1, :, : s.seq_q, span] != 0)
        added = None if self.bias is None else self.bias[p.b : p.b + 1, :, : s.seq_q, span]
        if self.slopes is not None:
            slope = xp.where(xp.isfinite(self.slopes[p.b]), self.slopes[p.b], math.nan).astype(xp.float64)
            taken = xp.clip(slope[None, :, None, None] * xp.abs(self._offset(p))[None, None], -self.limit, self.limit)
            added = -taken if added is None else xp.where(added == -math.inf, -math.inf, added.astype(xp.float64) - taken)
        dropout = self.dropout and self.dropout.moved(p.b, s.seen_begin)
        return dense.Options(scale=o.scale, softcap=o.softcap, bias=added, mask=seen, sinks=o.sinks, dropout=dropout)


def as_stored(xp, x, packed, layout):
    """``four_axes`` undone."""
    if packed:
        return xp.swapaxes(x, 1, 2)[0]
    return xp.swapaxes(x, 1, 2) if layout == "bshd" else x


def _gather(xp, k, v, sequence, b, packed, paged, page_size):
    """(k, v, held): the keys somebody may see, (1, Hk, n, D), and which of them have a page; the others are 0."""
    begin, end = sequence.seen_begin, sequence.seen_end
    if not paged:
        at, rows = (0 if packed else b), slice(sequence.first_k + begin, sequence.first_k + end)
        return k[at : at + 1, :, rows], v[at : at + 1, :, rows], numpy.ones(end - begin, bool)
    j = numpy.arange(begin, end)
    page = numpy.array([sequence.pages[column] for column in (j // page_size).tolist()], numpy.int64)
    held = (page >= 0) & (page < k.shape[0])
    pieces = []
    for x in (k, v):
        rows = xp.zeros((end - begin, x.shape[1], x.shape[3]), x.dtype)
        rows[xp.asarray(held)] = x[xp.asarray(page[held]), :, xp.asarray((j % page_size)[held])]
        pieces.append(xp.swapaxes(rows, 0, 1)[None])
    return *pieces, held


def _host(x) -> Any:
    return x if x is None else x.get() if hasattr(x, "get") else numpy.asarray(x)
