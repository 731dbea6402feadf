"""The arrays of one call over sequences of any length, in padded, packed and paged storage, and the judge of its result.

Queries, keys and values are normal numbers, drawn where the device is, and pages lie in random order. The judge gathers the
keys of some sequences, the longest and the shortest among them, and holds as many of their queries against float64, as dense
problems of one sequence, as it has time for; all other results must at least have been written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.problems import stored
from bench.problems.case import Case
from bench.problems.memory import numpy_dtype
from bench.problems.operands import CHECK_FLOPS_CPU, CHECK_FLOPS_GPU, Judged, Operands, WrongResult, fill_normal

INDICES = ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table")
# Sequences that are judged.
JUDGED = 8


def index_arrays(case: Case) -> list[str]:
    """Names of the index arrays of a call: lengths of padded rows are given where they differ."""
    storage, n_q, n_k = case.storage, set(case.n_q), set(case.n_k)
    given = {
        "cu_seqlens_q": storage.q == "packed",
        "seqlens_q": storage.q == "padded" and len(n_q) > 1 or storage.q == "one" and n_q != {1},
        "cu_seqlens_k": storage.k == "packed",
        "seqlens_k": storage.k == "paged" or storage.k == "padded" and len(n_k) > 1,
        "page_table": storage.k == "paged",
    }
    return [name for name in INDICES if given[name]]


def result_shapes(case: Case) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of the output and of the LSE, which has the heads first, or after the batch of padded queries."""
    rows = query_rows(case)
    lse = (rows[0], case.heads, rows[1]) if len(rows) == 2 else (case.heads, *rows)
    return [(operand_shapes(case)["out"], case.dtype), (lse, "float32")]


def query_rows(case: Case) -> tuple[int, ...]:
    batch = len(case.n_q)
    return {"packed": (sum(case.n_q) + case.storage.slack,), "one": (batch,), "padded": (batch, max(case.n_q, default=0))}[case.storage.q]


def operand_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Of q, out, k and v, as the case stores them."""
    size, rows = case.storage.page_size, query_rows(case)
    keys = {"packed": lambda: (sum(case.n_k),), "padded": lambda: (len(case.n_k), max(case.n_k, default=0)),
            "paged": lambda: (sum(-(-n // size) for n in case.n_k), size)}[case.storage.k]()  # fmt: skip
    found = {"q": (rows, case.heads, case.head_dim), "out": (rows, case.heads, case.head_dim_v),
             "k": (keys, case.heads_kv, case.head_dim), "v": (keys, case.heads_kv, case.head_dim_v)}  # fmt: skip
    return {name: (outer[0], heads, outer[1], dim) if len(outer) == 2 and case.layout == "bhsd" else (*outer, heads, dim)
            for name, (outer, heads, dim) in found.items()}  # fmt: skip


class Sequences(Operands):
    """Inputs and output of ``fa_ext.attention`` over the sequences of a case, which stand close together; slack is of packed queries
    and of the page table's columns."""

    inputs = ("q", "k", "v", "sinks", "alibi", *INDICES)

    def _make(self, guard_byte: int) -> None:
        case, rng = self.case, np.random.default_rng([self.case.seed, 17])
        small: dict[str, np.ndarray] = stored.extras(case)
        n_q, n_k = np.array(case.n_q, np.int32), np.array(case.n_k, np.int32)
        made = {"cu_seqlens_q": lambda: starts(n_q), "seqlens_q": lambda: n_q, "cu_seqlens_k": lambda: starts(n_k), "seqlens_k": lambda: n_k,
                "page_table": lambda: table_of(n_k, case.storage.page_size, rng, case.storage.slack)}  # fmt: skip
        small |= {name: made[name]() for name in index_arrays(case)}
        for i, (name, shape) in enumerate(operand_shapes(case).items()):
            self._new(name, shape, case.dtype, guard_byte)
            if name != "out":
                fill_normal(self.blocks[name].inside, case.dtype, self.device, case.seed * 4 + 200 + i)
        for name, array in small.items():
            self._new(name, array.shape, array.dtype.name, guard_byte)
            self.blocks[name].fill(array)

    def arguments(self, library: str) -> dict[str, Any]:
        return super().arguments(library) | {"layout": self.case.layout}

    # ---- the judge ----

    def judge(self, result: Any) -> Judged:  # type: ignore[override]
        """`result`, an array of any library stored as q is, against float64 on the current inputs."""
        from fa_ext.judge import OTHER_ORDER, judge

        xp, case = self._xp(), self.case
        got = self.values_of(result)
        if tuple(got.shape) != self.shapes["out"][0]:
            raise WrongResult(f"the result has shape {tuple(got.shape)}, the problem asks for {self.shapes['out'][0]}")
        whole = case.storage.q == "packed" or "seqlens_q" not in self.blocks  # every row is one of a query
        if whole and not bool(xp.isfinite(got.astype(xp.float32)).all()):
            raise WrongResult("the result holds NaN or Inf (unwritten?)")
        failures, frobenius, max_abs = [], 0.0, 0.0
        slack = OTHER_ORDER if case.dtype == "float32" else 1.0
        for b, rows, truth, plain in self._truth():
            mine = self._queries(got, b)
            mine = mine if rows is None else xp.take(mine, xp.asarray(rows), axis=1)
            judged = judge(mine, None, truth, plain, case.dtype, layout="bshd", slack=slack)
            failures += [f"sequence {b}: {why}" for why in judged.failures]
            frobenius, max_abs = max(frobenius, judged.frobenius), max(max_abs, judged.max_abs)
        return Judged(not failures, tuple(failures), frobenius, max_abs)

    def _truth(self) -> list[tuple]:  # type: ignore[override]
        """[(sequence, queries drawn or None for all, reference, plain)], computed once."""
        if self._judged_by is None:
            from fa_ext import reference

            case, xp, self._judged_by = self.case, self._xp(), []
            chosen = self._drawn_sequences()
            budget = (CHECK_FLOPS_CPU if xp is np else CHECK_FLOPS_GPU) / max(len(chosen), 1)
            options = case.options() | {"layout": "bshd"}
            for b in chosen:
                q = self._queries(self._raw("q"), b)
                arrays = [self._valued(x) for x in (q, *self._keys(b))]
                if case.sinks:
                    options["sinks"] = self._valued(self._raw("sinks"), "float32")
                if case.alibi:
                    slopes = self._valued(self._raw("alibi"), "float32")
                    options["alibi"] = slopes if slopes.ndim == 1 else slopes[b : b + 1]
                rows = self._drawn_queries(b, budget)
                truth = reference.attention(*arrays, **options, rows=rows, xp=xp)
                plain = reference.plain(*arrays, **options, rows=rows, xp=xp, dtype=case.dtype)
                self._judged_by.append((b, rows, truth, plain))
        return self._judged_by

    def _drawn_sequences(self) -> list[int]:
        """Those of most and of least work, and others that are drawn."""
        work = {b: (n * m, m, n) for b, (n, m) in enumerate(zip(self.case.n_q, self.case.n_k, strict=True)) if n}
        if len(work) <= JUDGED:
            return list(work)
        ends = [max(work, key=work.__getitem__), min(work, key=work.__getitem__)]
        others = np.random.default_rng([self.case.seed, 12]).permutation([b for b in work if b not in ends])
        return sorted({*ends, *others[: JUDGED - len(set(ends))].tolist()})

    def _drawn_queries(self, b: int, budget: float) -> np.ndarray | None:
        case, n = self.case, self.case.n_q[b]
        per_query = 4.0 * case.heads * max(case.n_k[b], 1) * (case.head_dim + case.head_dim_v)
        count = max(16, int(budget / per_query))
        if count >= n:
            return None
        drawn = np.random.default_rng([case.seed, 11, b]).choice(n, count, replace=False)
        return np.unique(np.concatenate((drawn, [0, n - 1])))

    def _raw(self, name: str) -> Any:
        """The operand as an array of the reference's module, of its bits where that does not know bfloat16."""
        shape, dtype = self.shapes[name]
        xp, inside = self._xp(), self.blocks[name].inside
        if xp is np:
            raw = inside if self.device.kind == "cpu" else self.blocks[name].host_bytes()
            return raw.view(numpy_dtype(dtype)).reshape(shape)
        return xp.asarray(inside).view(xp.uint16 if dtype == "bfloat16" else numpy_dtype(dtype)).reshape(shape)

    def _valued(self, raw: Any, dtype: str | None = None) -> Any:
        """Values of such an array."""
        xp = self._xp()
        if xp is np or (dtype or self.case.dtype) != "bfloat16":
            return raw
        return (raw.astype(xp.uint32) << 16).view(xp.float32)

    def _queries(self, array: Any, b: int) -> Any:
        """The rows of one sequence out of an array stored as q is, (1, n, H, D)."""
        case, n = self.case, self.case.n_q[b]
        if case.storage.q == "padded":
            return array[b : b + 1, :, :n].swapaxes(1, 2) if case.layout == "bhsd" else array[b : b + 1, :n]
        first = b if case.storage.q == "one" else sum(case.n_q[:b])
        return array[None, first : first + n]

    def _keys(self, b: int) -> tuple[Any, Any]:
        """k and v of one sequence, (1, n, Hk, D)."""
        case, n, found = self.case, self.case.n_k[b], []
        for raw in (self._raw("k"), self._raw("v")):
            if case.storage.k == "paged":
                mine = raw[self._raw("page_table")[b, : -(-n // case.storage.page_size)]]
                mine = mine.swapaxes(1, 2) if case.layout == "bhsd" else mine
                found.append(mine.reshape(1, -1, *mine.shape[2:])[:, :n])
            else:
                found.append(self._stored_keys(raw, b))
        return found[0], found[1]

    def _stored_keys(self, array: Any, b: int) -> Any:
        """The rows of one sequence out of an array stored as packed or padded k is, (1, n, Hk, D), a view."""
        case, n = self.case, self.case.n_k[b]
        if case.storage.k == "packed":
            first = sum(case.n_k[:b])
            return array[None, first : first + n]
        return array[b : b + 1, :, :n].swapaxes(1, 2) if case.layout == "bhsd" else array[b : b + 1, :n]


def starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def table_of(n_k: np.ndarray, page_size: int, rng: np.random.Generator, slack: int = 0) -> np.ndarray:
    """Page numbers in random order, a row a sequence; 0 beyond its pages, in `slack` columns at least."""
    needed = -(-n_k // page_size)
    order, first = rng.permutation(int(needed.sum())).astype(np.int32), starts(needed)
    table = np.zeros((len(n_k), int(needed.max(initial=0)) + slack), np.int32)
    for b, count in enumerate(needed):
        table[b, :count] = order[first[b] : first[b] + count]
    return table
