"""The gradients of attention over sequences in float64: each sequence is a dense problem of its own.

Its rows are cut out as ``serving`` does, ``dense_backward`` finds its gradients under a mask that says what each of its
queries sees, and these go to the rows they belong to. Rows of no sequence have gradient 0. What is summed over sequences,
dsinks and dbias, is summed before it is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import dense, serving
from .dense_backward import Backward, Gradients, as_given

__all__ = ["Part", "gradients"]

_PAGED = "page_table has no backward: gradients would go into pages that sequences share; gather the keys"


@dataclass(frozen=True)
class Part:
    """A sequence that has queries: its rows in arrays of four axes, (B, H, rows, D), and its gradients, (1, H, n, D).

    unseen: boolean (n_k), True at the keys that causal, window and range hide from all of its queries. bias: what of the
    bias, as an array of four axes, it has; None without one.
    """

    b: int
    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    unseen: Any
    bias: tuple[slice, ...] | None
    found: Gradients

    def of(self, xp, name, x, layout):
        """Its rows of an array that is stored as q ("q"), k or v is, (1, H, n, D)."""
        return serving.four_axes(xp, x, layout)[self.queries if name == "q" else self.keys]


def gradients(dout, q, k, v, *, dlse, wrt, xp, dtype, options: dense.Options) -> Gradients:
    """``backward.gradients`` of a call over sequences; ``parts`` of what it returns are those of single sequences."""
    if options.page_table is not None:
        raise ValueError(_PAGED)
    batch, problems = serving.problems_of(xp, q, k, v, options)
    total = _Total(xp, q, k, v, options, wrt, dtype, batch)
    four_q = serving.four_axes(xp, q, options.layout)
    four_dout = None if dout is None else serving.four_axes(xp, dout, options.layout)
    four_dlse = None if dlse is None else dlse[None] if q.ndim == 3 else dlse
    for p in problems:
        rows = slice(p.at, p.at + 1), slice(None), p.rows
        some = (None if x is None else x[rows] for x in (four_dout, four_dlse))
        total.add(p, four_q[rows], *some)
    return total.results()


class _Total:
    """The gradients of a call, to which those of its sequences are added one after the other."""

    def __init__(self, xp, q, k, v, options: dense.Options, wrt, dtype, batch):
        self.xp, self.options, self.wrt, self.dtype = xp, options, wrt, dtype
        self.alone = serving.Alone(xp, q, k, options, batch)
        self.packed = {"q": q.ndim == 3, "k": k.ndim == 3, "v": k.ndim == 3}
        four = {name: serving.four_axes(xp, x, options.layout) for name, x in (("q", q), ("k", k), ("v", v))}
        heads = four["q"].shape[1]
        work = xp.float64 if dtype in (None, "float64") else xp.float32
        self.found = Gradients({name: xp.zeros(four[name].shape, xp.float64) for name in wrt if name in four})
        self.of_out = {name: xp.zeros(four[name].shape, xp.float64) for name in four} if dtype is None else {}
        self.empty = xp.ones(four["q"].shape[:3], bool)
        self.bias: Any = options.bias
        self.dbias: Any = None
        if self.bias is not None:
            self.bias = xp.asarray(self.bias).reshape((1,) * (4 - self.bias.ndim) + self.bias.shape)
            self.dbias, self.squares = (xp.zeros(self.bias.shape, work) for _ in range(2))
        self.dsinks, self.sink_terms, self.faint, self.sink_products = (xp.zeros(heads, work) for _ in range(4))
        self.parts: list[Part] = []

    def add(self, p, q, dout, dlse):
        xp, s = self.xp, p.sequence
        where = self._of_bias(p)
        bias = None if where is None else self.bias[where]
        call = Backward(xp, q, p.k, p.v, dout, dlse, self.alone.options(p), self.wrt, self.dtype, bias=bias, of_rows=True)
        call.run()
        found = call.results()
        self.empty[p.at : p.at + 1, :, p.rows] = found.empty
        at = 0 if self.packed["k"] else p.b
        place = slice(at, at + 1), slice(None)
        keys = *place, slice(s.first_k, s.first_k + s.seq_k)
        seen = *place, slice(s.first_k + s.seen_begin, s.first_k + s.seen_end)
        queries = slice(p.at, p.at + 1), slice(None), p.rows
        for name, rows in (("q", queries), ("k", seen), ("v", seen)):
            for total, part in ((self.found, found), (self.of_out, found.out_terms)):
                if name in total:
                    total[name][rows] = part[name]
                    part[name] = total[name][queries if name == "q" else keys]
        if call.dbias is not None:
            self.dbias[where] += call.dbias
            if call.bias_squares is not None:
                self.squares[where] += call.bias_squares
        self.dsinks += call.dsinks
        self.sink_terms += call.sink_terms
        self.faint += call.faint
        self.sink_products += call.sink_products
        unseen = xp.ones(s.seq_k, bool)
        unseen[s.seen_begin : s.seen_end] = ~self.alone.seen(p).any(axis=0)
        self.parts.append(Part(p.b, queries, keys, unseen, where, found))

    def _of_bias(self, p):
        """A sequence's part of the bias; its axes of size 1 stay."""
        if self.bias is None:
            return None
        s = p.sequence
        spans = slice(p.b, p.b + 1), slice(None), slice(0, s.seq_q), slice(s.seen_begin, s.seen_end)
        return tuple(slice(0, 1) if n == 1 else span for n, span in zip(self.bias.shape, spans, strict=True))

    def results(self) -> Gradients:
        xp, found, layout = self.xp, self.found, self.options.layout
        for name, packed in self.packed.items():
            if name in found:
                found[name] = serving.as_stored(xp, found[name], packed, layout)
        for name, total in (("bias", self.dbias), ("sinks", self.dsinks)):
            if name in self.wrt:
                found[name] = as_given(xp, total, getattr(self.options, name), self.dtype)
        found.empty = self.empty[0] if self.packed["q"] else self.empty
        found.parts = self.parts
        each = [part.found for part in self.parts]
        found.largest_score = max((x.largest_score for x in each), default=0.0)
        found.terms = {name: max((x.terms[name] for x in each), default=0.0) for name in ("q", "k", "v", "bias")}
        found.terms["sinks"] = self.sink_terms.astype(xp.float64)
        found.faint = self.faint.astype(xp.float64)
        found.out_terms = {name: serving.as_stored(xp, x, self.packed[name], layout) for name, x in self.of_out.items()}
        found.out_terms["sinks"] = self.sink_products.astype(xp.float64)
        if self.bias is not None and "bias" in self.wrt and self.dtype is None:
            found.out_terms["bias"] = xp.sqrt(self.squares).reshape(self.options.bias.shape)
        return found
