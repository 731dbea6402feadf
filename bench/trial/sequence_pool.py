"""Gradients of packed sequences in trials and in timed calls: every call has lengths of its own.

A trial has lengths that are drawn from those of the problem, and so has each timed call, in arrays of one shape: rows that are left
over belong to no sequence, hold NaN, and have gradients of 0. No length exceeds the longest of the problem, from which an
implementation may take its bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench import report
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.memory import NAN_BYTE
from bench.problems.sequence_gradients import SequenceGradients
from bench.problems.sequences import starts
from bench.trial.dice import Dice
from bench.trial.gradient_pool import GradientPool
from bench.trial.pool import LOOKS, ROWS, TIMED, Shared, nbytes_of, on_host, to_values

# Of a trial, and of a timed call, the share of sequences that are shorter than the problem's.
SHORTER_TRIED, SHORTER_TIMED = 0.75, 0.25
# The gradients of a query that sees a single key cancel: errors are held against a norm of at least this an element.
LEAST = 0.1
# No length of a first trial exceeds this share of the problem's, so that a bound that is kept from it is too small later.
FIRST = 0.75


class SharedSequenceGradients(Shared, SequenceGradients):
    """The operands of a trial."""


def trial(case: Case, first: bool) -> Case:
    """The problem with lengths that its seed draws; for a `first` trial short ones."""
    rng = np.random.default_rng([case.seed, 18])
    n_q, n_k = drawn(case, rng, SHORTER_TRIED)
    if first:
        n_q, n_k = (np.floor(FIRST * n).astype(int) for n in (n_q, n_k))
    return case.changed(n_q=n_q.tolist(), n_k=n_k.tolist())


def drawn(case: Case, rng: np.random.Generator, shorter: float) -> tuple[np.ndarray, np.ndarray]:
    """The problem's lengths in another order, a share of them shorter. As many queries as keys stay as many."""
    order = rng.permutation(len(case.n_q))
    n_q, n_k = np.array(case.n_q)[order], np.array(case.n_k)[order]
    q, k = (np.where(rng.random(len(order)) < shorter, rng.random(len(order)), 1.0) for _ in range(2))
    k = np.where(n_q == n_k, q, k)
    return np.floor(q * n_q).astype(int), np.floor(k * n_k).astype(int)


class SequencePool(GradientPool):
    """Of packed queries and packed keys."""

    def __init__(self, case: Case, home: Cpu | Cuda, dice: Dice, shared_on_device: bool, cold: bool = False, kinds: Sequence[str] = ()):
        if (case.storage.q, case.storage.k) != ("packed", "packed") or not sum(case.n_q) or not sum(case.n_k):  # type: ignore[union-attr]
            raise report.UsageError(f"case is {case}; sequences are judged with q=packed, k=packed, and with queries and keys")
        self.starts: list[dict[str, np.ndarray]] = []
        super().__init__(case, home, dice, shared_on_device, cold, kinds)

    # ---- the inputs ----

    def _operands(self) -> tuple[dict[str, tuple], dict[str, tuple]]:
        case = self.case
        rows = {"q": (sum(case.n_q), case.heads), "k": (sum(case.n_k), case.heads_kv), "v": (sum(case.n_k), case.heads_kv)}
        shapes: dict[str, tuple] = {name: ((*rows[name], case.head_dim_v if name == "v" else case.head_dim), case.dtype) for name in TIMED}
        out = ((*rows["q"], case.head_dim_v), case.dtype)
        indices = {name: ((len(case.n_q) + 1,), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
        lse = ((case.heads, sum(case.n_q)), "float32")
        return shapes | indices | {"dout": out, "out": out, "lse": lse}, {f"d{name}": shapes[name] for name in TIMED}

    def deal(self, calls: int) -> None:
        super().deal(calls)
        self.starts = [self._starts() for _ in range(calls)]

    def _starts(self) -> dict[str, np.ndarray]:
        """Those of queries and of keys; rows that are left over lie before the first and behind the last sequence."""
        found = {}
        for name, lengths, rows in zip("qk", drawn(self.case, self.rng, SHORTER_TIMED), (sum(self.case.n_q), sum(self.case.n_k)), strict=True):
            found[name] = starts(lengths) + np.int32(self.rng.integers(rows - lengths.sum() + 1))
        return found

    def _complete(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            for name, at in self.starts[i].items():
                raw: Any = at.view(np.uint8)
                if self.home.kind == "cuda":
                    raw = self.home.torch.from_numpy(raw).cuda() if self.home.torch else self.home.cupy.asarray(raw)
                self._raw_input(i, f"cu_seqlens_{name}")[:] = raw
            for name in (*TIMED, "dout"):
                at = self._starts_of(i, name)
                rows = self._raw_input(i, name).reshape(self.shapes[name][0][0], -1)
                rows[: at[0]] = NAN_BYTE
                rows[at[-1] :] = NAN_BYTE
        super()._complete(first, count)

    # ---- the judge ----

    def look(self, max_abs: float, frobenius: float, hard_bounds: Mapping[str, float] | None = None) -> str | None:
        if wrong := super().look(max_abs, frobenius, hard_bounds):
            return wrong
        for i in self.rng.choice(self.filled, size=min(LOOKS, self.filled), replace=False).tolist():
            for name in self.results:
                at, gradient = self._starts_of(i, name[1:]), self._result(i, name)
                if gradient[: at[0]].any() or gradient[at[-1] :].any():
                    return f"call {i + 1} of {self.filled}: {name} is not 0 in rows of no sequence"
        return None

    def _compare(self, i: int, batch: int, head_kv: int) -> dict[str, tuple[float, float, float, bool]]:
        found, (n_q, n_k) = {}, self._lengths(i, batch)
        for name, (error, norm, largest, finite) in super()._compare(i, batch, head_kv).items():
            count = min(n_q if name == "dq" else n_k, ROWS) * self.shapes[name[1:]][0][-1]
            found[name] = (error, max(norm, LEAST * count**0.5), largest, finite)
        return found

    def _lengths(self, i: int, batch: int) -> tuple[int, int]:
        q, k = (int(np.diff(self.starts[i][name])[batch]) for name in "qk")
        return q, k

    def _starts_of(self, i: int, name: str) -> np.ndarray:
        return self.starts[i]["k" if name in ("k", "v") else "q"]

    def _one(self, i: int, batch: int) -> Case:
        return _dense(self.case, *self._lengths(i, batch))

    def _head(self, i: int, name: str, array: np.ndarray, batch: int, head: int) -> np.ndarray:
        at = self._starts_of(i, name)
        return array[None, None, at[batch] : at[batch + 1], head]

    def _lse(self, i: int, batch: int, head: int) -> np.ndarray:
        at = self.starts[i]["q"]
        return self.kept_of(i, "lse")[head, at[batch] : at[batch + 1]]

    def _input(self, i: int, name: str, batch: int, head: int) -> np.ndarray:
        shape, dtype = self.shapes[name]
        begin = self.window + i * self.step + self.places[name]
        return self._head(i, name, to_values(on_host(self.store[begin : begin + nbytes_of(shape, dtype)]), shape, dtype), batch, head)


@functools.lru_cache(maxsize=1024)
def _dense(case: Case, n_q: int, n_k: int) -> Case:
    """A sequence as a problem of its own."""
    same = {f.name: getattr(case, f.name) for f in dataclasses.fields(Case) if f.name not in ("lengths", "storage", "batch", "seq_q", "seq_k")}
    return Case(batch=1, seq_q=n_q, seq_k=n_k, **same)

