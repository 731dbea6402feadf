"""The gradients of attention of dense arrays in float64, in chunks of heads and queries.

The formulas are those of FlashAttention-2's backward pass (Dao, 2023), with the gradients through softcap
(c = softcap tanh(t / softcap)), bias, sinks and LSE:

    P = exp(s - LSE)    delta = dout . out - dlse    dS = P (dout . v - delta)    dT = dS (1 - (c / softcap)^2)
    dv = P^T dout       dk = scale dT^T q            dq = scale dT k              dbias = dS    dsink = -exp(sink - LSE) delta
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from . import dense

__all__ = ["Backward", "Gradients", "as_given"]

# Twice the smallest normal float32.
_FAINT = 2.0**-125


class Gradients(dict):
    """{name: float64 array} for the names of ``wrt``.

    ``empty``: boolean (B, H, Sq), True where a query sees no key. ``terms``, of the exact evaluation: {name: magnitude}
    of what the gradient adds up, that is its formula with every product and difference replaced by the sum of the
    magnitudes; the largest over the elements (an array (H,) for "sinks", where the differences stay as they are).
    ``largest_score``: the largest |LSE| of a query that sees a key, or sum of the magnitudes of the products of a score
    that is seen, of the exact evaluation. ``faint``: (H,), the part of ``terms["sinks"]`` whose weight exp(sink - LSE)
    lies below twice the smallest normal float32: hardware may take such a weight for 0. ``out_terms``, what
    the rounding of out, which a kernel is given, is relative to: of "sinks", (H,), the sum of the magnitudes of the products of
    dout and out, each times its row's weight of the sink; of "bias", in its shape and of the exact evaluation, the root of the
    sum of the squares of these products, each times what of its row's weights dS sums; of "q", "k" and "v" of sequences the same
    of what the gradient makes of them, with the squares of the products of dS, or of P, that it adds up. ``parts``, of a call over sequences:
    the ``serving_backward.Part`` of each that has queries; ``empty`` is (H, T) there for packed q.
    """

    empty: Any
    terms: dict
    largest_score: float
    faint: Any
    out_terms: dict[str, Any]
    parts: list | None = None


class Backward(dense.Call):
    """One evaluation; axis 0 of its arrays is (batch, kv head), axis 1 the query heads that share the kv head.

    bias: what dbias is the gradient of, where the bias of ``options`` has more added to it. of_rows: whether ``out_terms`` has
    "q", "k" and "v" too.
    """

    given: dict[str, Any]
    dbias: Any

    def __init__(self, xp, q, k, v, dout, dlse, options: dense.Options, wrt, dtype, *, bias=None, of_rows=False):
        work = xp.float64 if dtype in (None, "float64") else xp.float32
        super().__init__(xp, work, dtype, options, q, k)
        self.batch, self.heads, self.seq_q, self.head_dim = q.shape
        self.seq_k, self.head_dim_v = k.shape[2], v.shape[3]
        self.group = self.heads // self.heads_kv if self.heads_kv else 1
        self.wrt = wrt
        pairs = self.batch * self.heads_kv
        self.q = self._pairs(q, pairs, self.group)
        self.k, self.v = self._pairs(k, pairs, 1), self._pairs(v, pairs, 1)
        zeros = xp.zeros((self.batch, self.heads, self.seq_q, 1), work)
        self.dout = self._pairs(xp.broadcast_to(zeros, (*q.shape[:3], v.shape[3])) if dout is None else dout, pairs, self.group)
        self.dlse = self._pairs(zeros if dlse is None else dlse[..., None], pairs, self.group)
        bias = options.bias if bias is None else bias
        self.given = {"bias": bias, "sinks": options.sinks}

        self.dq, self.dk, self.dv = (xp.zeros(x.shape, work) for x in (self.q, self.k, self.v))
        self.bias_shape: tuple[int, ...] = (1,) * (4 - bias.ndim) + bias.shape if bias is not None else ()
        self.dbias = xp.zeros(self.bias_shape, work) if "bias" in wrt else None
        self.dsinks, self.sink_terms, self.faint = (xp.zeros(self.heads, work) for _ in range(3))
        self.sink_products = xp.zeros(self.heads, work)
        self.bias_squares = xp.zeros(self.bias_shape, work) if "bias" in wrt and dtype is None else None
        self.squares = {name: xp.zeros(x.shape, work) for name, x in (("q", self.q), ("k", self.k), ("v", self.v)) if of_rows and dtype is None}
        self.terms, self.largest_score = dict.fromkeys(("q", "bias"), 0.0), 0.0
        self.terms_k, self.terms_v = (xp.zeros(x.shape if dtype is None else (), work) for x in (self.k, self.v))
        self.empty = xp.ones((pairs, self.group, self.seq_q), bool)

    def _pairs(self, x, pairs, heads):
        """(B, H, S, D) -> (B * Hk, H / Hk, S, D) in the dtype of the evaluation."""
        return self.xp.ascontiguousarray(x.astype(self.work)).reshape(pairs, heads, *x.shape[2:])

    def run(self):
        xp = self.xp
        budget = dense.CHUNK_SCORES_CPU if xp is numpy else dense.CHUNK_SCORES_GPU
        per_query = max(1, self.group * self.seq_k)
        step_q = max(1, min(self.seq_q, budget // per_query))
        step_n = max(1, budget // (per_query * step_q))
        with numpy.errstate(all="ignore"):
            for n in range(0, len(self.q), step_n):
                for i in range(0, self.seq_q, step_q):
                    self.chunk(slice(n, n + step_n), slice(i, min(i + step_q, self.seq_q)), xp.arange(i, min(i + step_q, self.seq_q)))

    def chunk(self, pairs, queries, positions):
        """Adds what the queries of some heads contribute to every gradient."""
        xp = self.xp
        pair = xp.arange(*pairs.indices(len(self.q)))
        left, right, diagonal = self.band
        first, last = queries.start + diagonal, queries.stop - 1 + diagonal
        begin = int(min(max(0, first - left), self.seq_k))
        keys = slice(begin, int(max(min(self.seq_k, last + right + 1), begin)))
        dout, dlse = self.dout[pairs, :, queries], self.dlse[pairs, :, queries]
        sink = None if self.sinks is None else self.sinks[pair % self.heads_kv][:, :, None, None]
        if keys.start == keys.stop:
            if sink is not None:
                self._add_sinks(pair, xp.ones_like(dlse), sink, -dlse, xp.zeros_like(dlse))
            return
        b = (pair // self.heads_kv)[:, None]
        h = (pair % self.heads_kv)[:, None] * self.group + xp.arange(self.group)[None, :]
        seen = self._visible(b, h, positions, keys, diagonal)
        s = xp.where(seen, self._scores(pairs, b, h, positions, keys), -math.inf)
        seen = seen & (s != -math.inf)
        empty = ~seen.any(axis=-1, keepdims=True)
        self.empty[pairs, :, queries] = empty[..., 0]

        p, of_sink, lse = self._probabilities(s, seen, empty, sink)
        k, v = self.k[pairs, :, keys], self.v[pairs, :, keys]
        kept = self._rounded(self.dropped(p, b, h, positions, keys))
        out = self._rounded(self._selected_product(kept, seen, v))
        dp = self._rounded(self.dropped(self._product(dout, xp.swapaxes(v, -1, -2)), b, h, positions, keys))
        delta = xp.where(empty, self.work(0), (dout * out).sum(axis=-1, keepdims=True)) - dlse
        ds = xp.where(seen, self._rounded(p * (dp - delta)), self.work(0))
        if sink is not None:
            products = xp.where(empty, self.work(0), xp.abs(dout * out).sum(axis=-1, keepdims=True))
            self._add_sinks(pair, of_sink, sink, delta, products)
        if self.dbias is not None:
            self._add_to_bias(self.dbias, pair, queries, keys, ds)
        slope = self._slope(pairs, queries, keys)
        dt = xp.where(seen, ds * slope, self.work(0))
        if self.dtype is None:
            squares = xp.where(empty, self.work(0), ((dout * out) ** 2).sum(axis=-1, keepdims=True))
            self._add_to_bias_squares(pair, queries, keys, squares, p)
            if self.squares:
                self._add_squares(pairs, queries, keys, squares, xp.where(seen, p * slope, self.work(0)), dt, kept)
        self.dq[pairs, :, queries] = self._selected_product(dt, seen, k)
        self.dk[pairs, 0, keys] += self._over_queries(dt, seen, self.q[pairs, :, queries])
        self.dv[pairs, 0, keys] += self._over_queries(kept, seen, dout)

        if self.dtype is None:
            sizes = xp.where(empty | ~xp.isfinite(lse), self.work(0), xp.abs(lse))
            self.largest_score = max(self.largest_score, float(sizes.max()) if sizes.size else 0.0)
            products = xp.matmul(xp.abs(dout), xp.swapaxes(xp.abs(v), -1, -2))
            self._add_terms(pairs, queries, keys, seen, p, kept, self.dropped(products, b, h, positions, keys))

    def _add_to_bias_squares(self, pair, queries, keys, squares, p):
        """``squares``: of the products that delta sums, a number a query."""
        if self.bias_squares is not None:
            weights = p.sum(axis=-1, keepdims=True) if self.bias_shape[3] == 1 else p  # the keys of a query have one delta
            self._add_to_bias(self.bias_squares, pair, queries, keys, weights**2 * squares)

    def _add_squares(self, pairs, queries, keys, squares, sloped, dt, kept):
        """Squares of what one rounding of each element of out, dS and P changes in the gradients, in units of its relative size;
        ``sloped``: P times the slope of softcap. The pairs of a query have one delta."""
        xp = self.xp

        def finite(x):
            return xp.where(xp.isfinite(x), x, self.work(0))

        q, k, dout = (finite(x) for x in (self.q[pairs, :, queries], self.k[pairs, :, keys], self.dout[pairs, :, queries]))
        dt, kept = finite(dt) ** 2, finite(kept) ** 2
        self.squares["q"][pairs, :, queries] = xp.matmul(sloped, k) ** 2 * squares + xp.matmul(dt, k**2)
        for name, weights, x in (("k", sloped**2 * squares + dt, q), ("v", kept, dout)):
            self.squares[name][pairs, :, keys] += xp.matmul(xp.swapaxes(weights, -1, -2), x**2).sum(axis=1, keepdims=True)

    def _add_terms(self, pairs, queries, keys, seen, p, kept, dp):
        """Magnitudes of what each gradient adds up. ``dp``: |dout| . |v|, with dropout's factor as ``kept`` has it. What is
        not finite has no say."""
        xp = self.xp

        def finite(x):
            return xp.where(xp.isfinite(x), xp.abs(x), self.work(0))

        dp = xp.where(seen, finite(dp), self.work(0))
        p, kept = finite(p), finite(kept)
        ds = p * (dp + (p * dp).sum(axis=-1, keepdims=True) + finite(self.dlse[pairs, :, queries]))
        q, k = finite(self.q[pairs, :, queries]), finite(self.k[pairs, :, keys])
        dout = finite(self.dout[pairs, :, queries])
        scores = xp.where(seen, xp.matmul(q, xp.swapaxes(k, -1, -2)), self.work(0))
        self.largest_score = max(self.largest_score, abs(float(self.scale)) * float(scores.max()) if scores.size else 0.0)
        largest = xp.matmul(ds, k)
        self.terms["q"] = max(self.terms["q"], float(largest.max()) if largest.size else 0.0)
        self.terms["bias"] = max(self.terms["bias"], float(ds.max()) if ds.size else 0.0)
        self.terms_k[pairs, 0, keys] += self._over_queries(ds, seen, q)
        self.terms_v[pairs, 0, keys] += self._over_queries(kept, seen, dout)

    def _rounded(self, x):
        return dense.round_to(x, self.dtype, self.xp) if self.dtype else x

    def _probabilities(self, s, seen, empty, sink):
        """P (0 where nothing is seen), the weight of the sink, and the LSE; plain's through its rounded LSE."""
        xp = self.xp
        peak = xp.max(s, axis=-1, keepdims=True)
        if sink is not None:
            peak = xp.maximum(peak, sink)
        shift = xp.where(peak == -math.inf, self.work(0), peak)
        p = xp.exp(s - shift)
        total = p.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + xp.exp(sink - shift)
        of_sink = None if sink is None else xp.exp(sink - shift) / total
        lse = shift + xp.log(total)
        if self.dtype and self.dtype != "float64":
            p = self._rounded(xp.exp(s - lse))
            of_sink = None if sink is None else xp.exp(sink - lse)
        else:
            p = p / xp.where(total == 0, self.work(1), total)
        if sink is not None:
            of_sink = xp.where(sink == -math.inf, self.work(0), xp.where(empty, self.work(1), of_sink))
        return xp.where(seen, p, self.work(0)), of_sink, lse

    def _slope(self, pairs, queries, keys):
        """d c / d t = 1 - tanh^2, or 1 without a softcap."""
        xp = self.xp
        if self.softcap == 0:
            return self.work(1)
        t = self._product(self.q[pairs, :, queries], xp.swapaxes(self.k[pairs, :, keys], -1, -2), fused=True) * self.scale
        return 1 - xp.tanh(t / self.softcap) ** 2

    def _selected_product(self, w, seen, x):
        """w @ x, where a NaN or Inf in x reaches only what sees its row: 0 * NaN is no longer 0."""
        xp = self.xp
        finite = xp.isfinite(x)
        if bool(finite.all()):
            return self._product(w, x)
        result = self._product(w, xp.where(finite, x, self.work(0)))
        broken = xp.where(finite, self.work(0), x)
        seen = xp.broadcast_to(seen, w.shape)
        somewhere = (~finite).any(axis=(0, 1, 3)) & seen.any(axis=(0, 1, 2))
        for j in xp.nonzero(somewhere)[0].tolist():
            result = result + xp.where(seen[..., j, None], w[..., j, None] * broken[:, :, j, None, :], self.work(0))
        return result

    def _over_queries(self, w, seen, x):
        """Sum over heads and queries of w (n, g, i, j) times x (n, g, i, d): (n, j, d)."""
        xp = self.xp
        n, g, i, j = w.shape

        def turned(a):
            return xp.swapaxes(xp.broadcast_to(a, w.shape).reshape(n, 1, g * i, j), -1, -2)

        return self._selected_product(turned(w), turned(seen), x.reshape(n, 1, g * i, -1))[:, 0]

    def _add_sinks(self, pair, weight, sink, delta, products):
        """dsinks of the query heads of some pairs; a sink of -inf adds nothing, even where delta is NaN. products: the sum
        of the magnitudes of what delta sums of dout and out."""
        xp = self.xp
        terms = xp.where(sink == -math.inf, self.work(0), -weight * delta)[..., 0]
        products = xp.where(sink == -math.inf, self.work(0), weight * products)[..., 0]
        for n, g in enumerate((pair % self.heads_kv).tolist()):
            heads = slice(g * self.group, (g + 1) * self.group)
            self.dsinks[heads] += terms[n].sum(axis=-1)
            self.sink_terms[heads] += xp.abs(terms[n]).sum(axis=-1)
            self.faint[heads] += xp.where(weight[n, ..., 0] < _FAINT, xp.abs(terms[n]), 0).sum(axis=-1)
            self.sink_products[heads] += products[n].sum(axis=-1)

    def _add_to_bias(self, total, pair, queries, keys, terms):
        """terms (n, g, i, j) summed over the axes of size 1 of the bias."""
        for n, index in enumerate(pair.tolist()):
            b, g = divmod(index, self.heads_kv)
            where, part = [], terms[n][None]
            spans = (slice(b, b + 1), slice(g * self.group, (g + 1) * self.group), queries, keys)
            for axis, span in enumerate(spans):
                if self.bias_shape[axis] == 1:
                    part = part.sum(axis=axis, keepdims=True)
                where.append(slice(0, 1) if self.bias_shape[axis] == 1 else span)
            total[tuple(where)] += part

    def results(self) -> Gradients:
        xp = self.xp
        shapes = {"q": (self.batch, self.heads, self.seq_q, self.head_dim),
                  "k": (self.batch, self.heads_kv, self.seq_k, self.head_dim),
                  "v": (self.batch, self.heads_kv, self.seq_k, self.head_dim_v)}  # fmt: skip
        sums = {"q": self.dq * self.scale, "k": self.dk * self.scale, "v": self.dv}
        found = Gradients()
        for name in self.wrt:
            if name in sums:
                found[name] = self._rounded(sums[name]).reshape(shapes[name]).astype(xp.float64)
            else:
                given = self.given[name]
                total = self.dbias if name == "bias" else self.dsinks
                found[name] = as_given(xp, total, given, self.dtype)
        found.empty = self.empty.reshape(self.batch, self.heads, self.seq_q)
        found.largest_score = self.largest_score
        found.faint = self.faint.astype(xp.float64)
        found.out_terms = {"sinks": self.sink_products.astype(xp.float64)}
        if self.bias_squares is not None:
            found.out_terms["bias"] = xp.sqrt(self.bias_squares).reshape(self.given["bias"].shape)
        scale = abs(float(self.scale))
        for name, squares in self.squares.items():
            found.out_terms[name] = (1 if name == "v" else scale) * xp.sqrt(squares).reshape(shapes[name])
        found.terms = {"q": scale * self.terms["q"], "bias": self.terms["bias"], "sinks": self.sink_terms.astype(xp.float64)}
        for name, terms in (("k", scale * self.terms_k), ("v", self.terms_v)):
            found.terms[name] = float(terms.max()) if terms.size else 0.0
        return found


def as_given(xp, total, given, dtype):
    """The gradient of a bias or of sinks, in the shape of what was given and rounded to its dtype where there is a ``dtype``."""
    total = total.reshape(given.shape)
    if dtype and dtype != "float64":
        # An array of a library without bfloat16 holds its values in float32: the call's dtype says more.
        total = dense.round_to(total, "float32" if given.dtype == xp.float32 else dtype, xp)
    return total.astype(xp.float64)
