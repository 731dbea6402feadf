"""The arrays of calls that compute little beside what they move: merging results over parts of the keys, and appending new keys
and values to paged caches, with rotary embedding of all columns of k and q."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.problems.memory import to_host
from bench.problems.operands import Judged, Operands, fill_normal
from bench.problems.sequences import starts, table_of


class Parts(Operands):
    """Of ``fa_ext.merge``: the results of a case's parts, whose LSE are normal numbers."""

    outputs = ("out", "lse")

    def _make(self, guard_byte: int) -> None:
        case, rows = self.case, (self.case.batch, self.case.heads, self.case.seq_q)
        self.inputs = tuple(f"{name}{part}" for name in ("out", "lse") for part in range(case.parts))
        for i, name in enumerate((*self.inputs, *self.outputs)):
            shape, dtype = (case.out_shape, case.dtype) if name.startswith("out") else (rows, "float32")
            self._new(name, shape, dtype, guard_byte)
            fill_normal(self.blocks[name].inside, dtype, self.device, case.seed * 16 + 300 + i)

    def arguments(self, library: str) -> dict[str, Any]:
        outs, lses = ([self.array(f"{name}{part}", library) for part in range(self.case.parts)] for name in ("out", "lse"))
        return {"outs": outs, "lses": lses, "layout": self.case.layout}

    def bound(self, kernel: str | None, library: str) -> Callable[[], Any]:
        import fa_ext

        out = (self.array("out", library), self.array("lse", library))
        return functools.partial(fa_ext.merge, **self.arguments(library), out=out, kernel=kernel)

    def picked(self) -> str | None:
        import fa_ext

        return fa_ext.explain_merge(**self.arguments(self.device.default_arrays))[0]

    def judge(self, result: Any) -> Judged:  # type: ignore[override]
        """`result`, (out, lse), against float64."""
        from fa_ext.judge.merge import judge_merge

        outs, lses = ([self._as_numpy(f"{name}{part}") for part in range(self.case.parts)] for name in ("out", "lse"))
        judged = judge_merge(*(to_host(x) for x in result), outs, lses, layout=self.case.layout)
        return Judged(judged.passed, judged.failures, judged.frobenius, judged.max_abs)


class NewTokens(Operands):
    """Of ``fa_ext.append``: the last ``n_q`` of the ``n_k`` keys of each sequence are new."""

    inputs = ("k", "v", "q", "cos", "sin", "cu_seqlens_q", "seqlens_k", "page_table")
    outputs = ("k_cache", "v_cache", "out")

    def _make(self, guard_byte: int) -> None:
        case, rng = self.case, np.random.default_rng([self.case.seed, 19])
        n_q, n_k, size = np.array(case.n_q, np.int32), np.array(case.n_k, np.int32), case.storage.page_size
        tokens, pages = int(n_q.sum()), int((-(-n_k // size)).sum())

        def page(dim: int) -> tuple[int, ...]:
            return (pages, case.heads_kv, size, dim) if case.layout == "bhsd" else (pages, size, case.heads_kv, dim)

        shapes = {
            "k": (tokens, case.heads_kv, case.head_dim), "v": (tokens, case.heads_kv, case.head_dim_v),
            "q": (tokens, case.heads, case.head_dim), "out": (tokens, case.heads, case.head_dim),
            "k_cache": page(case.head_dim), "v_cache": page(case.head_dim_v),
        }  # fmt: skip
        for i, (name, shape) in enumerate(shapes.items()):
            self._new(name, shape, case.dtype, guard_byte)
            if name in self.inputs:
                fill_normal(self.blocks[name].inside, case.dtype, self.device, case.seed * 8 + 400 + i)
        half = case.head_dim // 2
        angle = np.arange(int(n_k.max(initial=1)))[:, None] * 10000.0 ** (-np.arange(half) / half)
        small = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32), "cu_seqlens_q": starts(n_q),
                 "seqlens_k": n_k, "page_table": table_of(n_k, size, rng)}  # fmt: skip
        for name, array in small.items():
            self._new(name, array.shape, array.dtype.name, guard_byte)
            self.blocks[name].fill(array)

    def arguments(self, library: str) -> dict[str, Any]:
        given = {name: self.array(name, library) for name in (*self.inputs, "k_cache", "v_cache")}
        return given | {"rotary": (given.pop("cos"), given.pop("sin")), "layout": self.case.layout}

    def bound(self, kernel: str | None, library: str) -> Callable[[], Any]:
        import fa_ext

        return functools.partial(fa_ext.append, **self.arguments(library), out=self.array("out", library), kernel=kernel)

    def picked(self) -> str | None:
        import fa_ext

        return fa_ext.explain_append(**self.arguments(self.device.default_arrays))[0]

    def judge(self, result: Any) -> Judged:  # type: ignore[override]
        """The caches, which were poisoned before, and `result`, the rotated q, against float64."""
        from fa_ext.judge.append import judge_append

        after = [self._as_numpy(name) for name in ("k_cache", "v_cache")]
        before = [np.full(x.nbytes, 0xFF, np.uint8).view(x.dtype).reshape(x.shape) for x in after]
        host = {name: self._as_numpy(name) for name in self.inputs}
        rotary = (host.pop("cos"), host.pop("sin"))
        judged = judge_append(before, after, host.pop("k"), host.pop("v"), rotated=to_host(result), layout=self.case.layout,
                              rotary=rotary, **host)  # fmt: skip
        return Judged(judged.passed, judged.failures, judged.frobenius, judged.max_abs)
