"""The memory of timed calls of the backward pass: dout, q, k and v are new each time, out and the LSE follow from them.

The judge's own forward writes out and the LSE, while nobody else runs, and keeps a copy of them. After a sample dq of drawn
queries, and dk and dv of drawn keys, of drawn kv heads and of every hard one meet float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench import report
from bench.problems import Case
from bench.problems.memory import Block, empty_bytes
from bench.trial.pool import ROWS, TIMED, TOLERANCE, HardHead, Pool, errors_of, head_of, nbytes_of, on_host, places_of, to_values


class GradientPool(Pool):
    """Of problems without arrays beside q, k and v, whose gradients one row at a time can be told."""

    def __init__(self, case: Case, *arguments: Any, **options: Any):
        if case.arrays() or case.dropout or case.dlse or case.accumulate:
            raise report.UsageError(f"case is {case}; gradients are judged without bias, mask, sinks, alibi, dropout, dlse and accumulate")
        super().__init__(case, *arguments, **options)
        self.kept_places, self.kept_step = places_of({name: self.shapes[name] for name in ("out", "lse")}, 0)
        self.kept = empty_bytes(self.slots * self.kept_step, self.home)

    def _operands(self) -> tuple[dict[str, tuple], dict[str, tuple]]:
        shapes, out = super()._operands()
        lse = ((self.case.batch, self.case.heads, self.case.seq_q), "float64" if self.case.dtype == "float64" else "float32")
        return {**shapes, "dout": out["out"], **out, "lse": lse}, {f"d{name}": shapes[name] for name in TIMED}

    def _complete(self, first: int, count: int) -> None:
        import fa_ext

        library = self.home.default_arrays
        given = [name for name in self.shapes if name in (*TIMED, "cu_seqlens_q", "cu_seqlens_k")]
        options = {name: x for name, x in self.case.options().items() if name not in ("deterministic", "accumulate")}

        def array(raw: Any, begin: int, name: str) -> Any:
            shape, dtype = self.shapes[name]
            return Block.over(raw, begin, nbytes_of(shape, dtype), self.home).view(shape, dtype, library)

        for i in range(first, first + count):
            inputs = {name: array(self.inputs.raw, i * self.step + self.places[name], name) for name in given}
            own = {name: array(self.kept, i * self.kept_step + self.kept_places[name], name) for name in ("out", "lse")}
            fa_ext.attention(**inputs, **options, out=(own["out"], own["lse"]))
            for name, computed in own.items():
                array(self.inputs.raw, i * self.step + self.places[name], name)[...] = computed

    def _wrong_at(self, i: int, head: HardHead, bounds: Mapping[str, float]) -> str | None:
        """Errors of single gradients vary: the largest of those that passed in the trials is what counts."""
        bound = TOLERANCE * bounds.get(head.kind, math.inf)
        for name, (_, _, largest, finite) in self._compare(i, head.batch, head.head_kv).items():
            if not finite or largest > bound:
                return f"{name} off by {largest:.3g} from float64 of its new inputs" if finite else f"NaN or Inf in {name}"
        return None

    def _compare(self, i: int, batch: int, head_kv: int) -> dict[str, tuple[float, float, float, bool]]:
        case, rng = self._one(i, batch), self.rng
        group = case.heads // case.heads_kv
        heads = range(head_kv * group, (head_kv + 1) * group)
        k, v = (self._input(i, name, batch, head_kv)[0, 0].astype(np.float64) for name in "kv")
        rows, keys = (np.unique(rng.integers(0, max(n, 1), min(n, ROWS))) for n in (case.seq_q, case.seq_k))
        of_head = int(rng.integers(group))
        dk, dv, dq = np.zeros((len(keys), case.head_dim)), np.zeros((len(keys), case.head_dim_v)), None
        for n, head in enumerate(heads):
            row = _Row(self, i, batch, head)
            p, dt = row.weights(slice(None), keys, k, v)
            dk += dt.T @ row.q
            dv += p.T @ row.dout
            if n == of_head:
                dq = row.weights(rows, slice(None), k, v)[1] @ k
        got = [self._head(i, name[1:], self._result(i, name), batch, h)[0, 0].astype(np.float64)
               for name, h in (("dq", heads[of_head]), ("dk", head_kv), ("dv", head_kv))]  # fmt: skip
        return {"dq": errors_of(got[0][rows], dq), "dk": errors_of(got[1][keys], dk), "dv": errors_of(got[2][keys], dv)}

    def _one(self, i: int, batch: int) -> Case:
        """The problem of a batch entry of a slot, as far as queries, keys and what they see of each other go."""
        return self.case

    def _head(self, i: int, name: str, array: np.ndarray, batch: int, head: int) -> np.ndarray:
        """(1, 1, S, D) of an array of a slot that is stored as the input of that name is."""
        return head_of(array, self.case.layout, batch, head)

    def _lse(self, i: int, batch: int, head: int) -> np.ndarray:
        return self.kept_of(i, "lse")[batch, head]

    def kept_of(self, i: int, name: str) -> np.ndarray:
        """out or the LSE of a slot, from the judge's own copy."""
        shape, dtype = self.shapes[name]
        begin = i * self.kept_step + self.kept_places[name]
        return to_values(on_host(self.kept[begin : begin + nbytes_of(shape, dtype)]), shape, dtype)


class _Row:
    """One query head of a slot in float64."""

    def __init__(self, pool: GradientPool, i: int, batch: int, head: int):
        self.case = pool._one(i, batch)
        self.q, self.dout = (pool._input(i, name, batch, head)[0, 0].astype(np.float64) for name in ("q", "dout"))
        out = pool._head(i, "out", pool.kept_of(i, "out"), batch, head)[0, 0].astype(np.float64)
        self.lse = pool._lse(i, batch, head).astype(np.float64)
        self.delta = (self.dout * out).sum(axis=-1)

    def weights(self, rows: Any, keys: Any, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P and scale times dS of some queries and some keys."""
        case = self.case
        scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
        left, right, diagonal = case.band()
        offset = np.arange(case.seq_k)[None, keys] - (np.arange(case.seq_q)[rows, None] + diagonal)
        seen = (offset >= -left) & (offset <= right)
        t = scale * (self.q[rows] @ k[keys].T)
        slope: Any = 1.0
        if case.softcap:
            bent = np.tanh(t / case.softcap)
            t, slope = case.softcap * bent, 1 - bent**2
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.where(seen, np.exp(t - self.lse[rows, None]), 0.0)
        return p, scale * slope * p * (self.dout[rows] @ v[keys].T - self.delta[rows, None])
