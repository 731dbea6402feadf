"""The arrays of one call of the backward pass over sequences, and the judge of its gradients.

dout and dlse are drawn; out and the LSE are those of fa_ext's forward. Where float64 would take too long for all sequences,
those that are drawn meet it, the longest and the shortest among them, in as many heads as there is time for. All other gradients
must at least have been written, and rows of no sequence must be 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.problems.gradients import FOUND, OF_THE_CALL, GradientArrays, Gradients, verdict
from bench.problems.operands import CHECK_FLOPS_CPU, CHECK_FLOPS_GPU, Judged, fill_normal
from bench.problems.sequences import INDICES, Sequences, result_shapes

# Sequences of which all may be judged.
FEW = 500


class SequenceGradientArrays(GradientArrays):
    """The arrays that an implementation is given for ``fa_ext.attention_backward`` over the sequences of a case."""

    inputs = ("dout", "q", "k", "v", "sinks", "alibi", *INDICES, *FOUND, "dlse")

    def arguments(self, library: str) -> dict[str, Any]:
        return super().arguments(library) | {"layout": self.case.layout}


class SequenceGradients(SequenceGradientArrays, Gradients, Sequences):
    """Inputs and gradients of one call."""

    def _make(self, guard_byte: int) -> None:
        case, wide = self.case, "float64" if self.case.dtype == "float64" else "float32"
        Sequences._make(self, guard_byte)
        (rows, _), (of_lse, _) = result_shapes(case)
        drawn = {"dout": (rows, case.dtype)} | ({"dlse": (of_lse, wide)} if case.dlse else {})
        for i, (name, (shape, dtype)) in enumerate(drawn.items()):
            self._new(name, shape, dtype, guard_byte)
            fill_normal(self.blocks[name].inside, dtype, self.device, case.seed * 3 + 300 + i)
        self._new("lse", of_lse, wide, guard_byte)
        for name in self.wrt:
            shape, dtype = self.shapes[name]
            self._new(f"d{name}", shape, wide if case.accumulate else dtype, guard_byte)
        self._run_forward()

    # ---- the judge ----

    def judge(self, result: Any) -> Judged:
        """`result`, arrays of any library in the order of wrt, against float64 on the current inputs."""
        from fa_ext.judge import OTHER_ORDER
        from fa_ext.judge.backward import judge_sequences

        got = self._received(result)
        self._check_written(got)
        chosen, heads, truth, plain = self._truth()
        if len(chosen) < len(self.case.n_q):
            got.pop("sinks", None)  # sums over all sequences
            got = {name: self._of_chosen(name, values, chosen) for name, values in got.items()}
        got = {name: self._of_heads(name, values, heads) for name, values in got.items()}
        slack = OTHER_ORDER if self.case.dtype == "float32" else 1.0  # nobody is bound to the order of plain's sums
        return verdict(judge_sequences(got, truth, plain, self.case.dtype, self.case.layout, slack=slack))

    def _truth(self) -> tuple[Any, ...]:
        """(sequences and kv heads that are judged, reference, plain), computed once. A sequence that is not drawn has no queries
        in it."""
        if self._judged_by is None:
            from fa_ext.reference.backward import gradients

            case, xp = self.case, self._xp()
            chosen, heads = self._drawn()
            inputs = {name: self._of_heads(name, x, heads) for name, x in self.input_values().items() if name not in FOUND}
            options = {name: value for name, value in case.options().items() if name not in OF_THE_CALL} | {"layout": case.layout}
            if len(chosen) < len(case.n_q):
                n_q = np.array(case.n_q, np.int32)
                inputs["seqlens_q"] = np.where(np.isin(np.arange(len(n_q)), chosen), n_q, 0)
            wrt = self.wrt if len(chosen) == len(case.n_q) else ("q", "k", "v")
            found = (gradients(**inputs, **options, wrt=wrt, xp=xp, dtype=dtype) for dtype in (None, case.dtype))
            self._judged_by = (chosen, heads, *found)
        return self._judged_by

    def _drawn(self) -> tuple[list[int], np.ndarray]:
        """Sequences, and kv heads, that are few enough for the reference; all heads where something counts them."""
        case, budget = self.case, CHECK_FLOPS_CPU if self._xp() is np else CHECK_FLOPS_GPU
        every = np.arange(case.heads_kv)
        if case.flops() <= budget and len(case.n_q) <= FEW:
            return list(range(len(case.n_q))), every
        chosen = sorted({*self._drawn_sequences(), *(b for b, n in enumerate(case.n_q) if not n)})
        some = case.changed(n_q=[case.n_q[b] for b in chosen], n_k=[case.n_k[b] for b in chosen])
        count = max(1, int(budget / max(some.flops() / max(case.heads_kv, 1), 1.0)))
        if count >= case.heads_kv or case.dropout:
            return chosen, every
        return chosen, np.sort(np.random.default_rng([case.seed, 11]).permutation(every)[:count])

    def _of_chosen(self, name: str, array: Any, chosen: list[int]) -> Any:
        """A gradient with 0 in the rows of the other sequences."""
        array, rows = array.copy(), self._queries if name == "q" else self._stored_keys
        for b in set(range(len(self.case.n_q))) - set(chosen):
            rows(array, b)[...] = 0
        return array

    def _of_heads(self, name: str, array: Any, heads: np.ndarray) -> Any:
        """An operand's heads of those that were drawn."""
        case, xp = self.case, self._xp()
        if len(heads) == case.heads_kv or name in INDICES:
            return array
        group = case.heads // case.heads_kv
        chosen = heads if name in ("k", "v") else (heads[:, None] * group + np.arange(group)).ravel()
        if name in ("sinks", "alibi"):
            axis = array.ndim - 1
        elif name in ("lse", "dlse"):
            axis = array.ndim - 2
        else:
            axis = 1 if array.ndim == 3 or case.layout == "bhsd" else 2
        return xp.take(array, xp.asarray(chosen), axis=axis)
