"""The arrays of one call of the backward pass, and the judge of its gradients.

dout and dlse are drawn; out and the LSE are those of fa_ext's forward on the same inputs. An implementation returns its gradients
in the order of the case's ``wrt``. Where all of them would take float64 too long, those of some heads that are drawn meet
it, and all others must at least have been written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import report
from bench.problems.operands import CHECK_FLOPS_CPU, CHECK_FLOPS_GPU, INPUTS, Arrays, Judged, Operands, WrongResult, dtype_name, fill_normal

if TYPE_CHECKING:
    from fa_ext.judge.backward import BackwardReport

# Of a case's options those of the call that its result does not depend on.
OF_THE_CALL = ("deterministic", "accumulate")
# Results of the forward.
FOUND = ("out", "lse")


class GradientArrays(Arrays):
    """The arrays that an implementation is given for ``fa_ext.attention_backward``."""

    inputs = ("dout", *INPUTS, *FOUND, "dlse")

    @property
    def wrt(self) -> tuple[str, ...]:
        return self.case.wrt()

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"d{name}" for name in self.wrt)

    def grads(self, library: str) -> tuple[Any, ...]:
        """Where gradients go, in the order of wrt."""
        return tuple(self.array(name, library) for name in self.outputs)

    def bound(self, kernel: str | None, library: str) -> Callable[[], Any]:
        import fa_ext

        arguments = self.arguments(library)
        return functools.partial(fa_ext.attention_backward, **arguments, wrt=self.wrt, grads=self.grads(library), kernel=kernel)


class Gradients(GradientArrays, Operands):
    """Inputs and gradients of one call. Gradients that are added to begin at zero."""

    def _make(self, guard_byte: int) -> None:
        case = self.case
        self._make_qkv(guard_byte)
        wide = "float64" if case.dtype == "float64" else "float32"
        rows = (case.batch, case.heads, case.seq_q)
        drawn = {"dout": (case.out_shape, case.dtype)} | ({"dlse": (rows, wide)} if case.dlse else {})
        for i, (name, (shape, dtype)) in enumerate(drawn.items()):
            self._new(name, shape, dtype, guard_byte)
            fill_normal(self.blocks[name].inside, dtype, self.device, case.seed * 3 + 100 + i)
        self._new("out", case.out_shape, case.dtype, guard_byte)
        self._new("lse", rows, wide, guard_byte)
        for name in self.wrt:
            shape, dtype = self.shapes[name]
            self._new(f"d{name}", shape, wide if case.accumulate else dtype, guard_byte)
        self._run_forward()

    def _run_forward(self) -> None:
        try:
            import fa_ext
        except ImportError as error:
            raise report.UsageError(f"the backward pass starts from fa_ext's own forward: {error}") from error
        library = self.device.default_arrays
        given = {name: x for name, x in self.arguments(library).items() if name not in (*OF_THE_CALL, *FOUND, "dout", "dlse")}
        fa_ext.attention(**given, out=(self.array("out", library), self.array("lse", library)))
        self.device.synchronize()

    def poison(self) -> None:
        if self.case.accumulate:
            for name in self.outputs:
                self.blocks[name].inside[:] = 0
        else:
            super().poison()

    def picked(self) -> str | None:
        import fa_ext

        library = self.device.default_arrays
        return fa_ext.explain_backward(**self.arguments(library), wrt=self.wrt, grads=self.grads(library))[0]

    # ---- the judge ----

    def judge(self, result: Any) -> Judged:
        """`result`, arrays of any library in the order of wrt, against float64 on the current inputs."""
        from fa_ext.judge import OTHER_ORDER
        from fa_ext.judge.backward import judge_backward

        got = self._received(result)
        drawn, truth, plain, zero, exempt = self._truth()
        if drawn is not None:
            self._check_written(got)
            got = {name: self._part(name, values, drawn) for name, values in got.items()}
        slack = OTHER_ORDER if self.case.dtype == "float32" else 1.0  # nobody is bound to the order of plain's sums
        return verdict(judge_backward(got, truth, plain, self.case.dtype, zero=zero, exempt=exempt, slack=slack))

    def _received(self, result: Any) -> dict[str, Any]:
        """{name: gradient} as arrays of the module in which the reference is computed; WrongResult says what is no gradient."""
        got = {}
        if len(result) != len(self.wrt):
            raise WrongResult(f"{len(result)} gradients were returned, the problem asks for {', '.join(self.outputs)}")
        for name, array in zip(self.wrt, result, strict=True):
            shape, dtype = self.shapes[f"d{name}"]
            if (tuple(array.shape), dtype_name(array)) != (shape, dtype):
                raise WrongResult(f"d{name} is {dtype_name(array)} {tuple(array.shape)}, the problem asks for {dtype} {shape}")
            got[name] = self.values_of(array)
        return got

    def _check_written(self, got: dict[str, Any]) -> None:
        xp = self._xp()
        for name, values in got.items():
            if not bool(xp.isfinite(values.astype(xp.float32)).all()):
                raise WrongResult(f"d{name} holds NaN or Inf (unwritten?)")

    def _truth(self) -> tuple[Any, ...]:
        """((batch entries, kv heads) drawn or None for all, reference, plain, zero, exempt), computed once."""
        if self._judged_by is None:
            from fa_ext.judge.backward import spread_backward, zeros_of
            from fa_ext.reference.backward import gradients

            case, xp = self.case, self._xp()
            drawn, inputs = self._drawn_heads(), self.input_values()
            if drawn is not None:
                inputs = {name: self._part(name, array, drawn) for name, array in inputs.items()}
            out, lse = inputs.pop("out"), inputs.pop("lse")
            options = {name: value for name, value in case.options().items() if name not in OF_THE_CALL} | self._dropping
            truth = gradients(**inputs, **options, wrt=self.wrt, xp=xp)
            plain = gradients(**inputs, **options, wrt=self.wrt, xp=xp, dtype=case.dtype)
            band = {"layout": case.layout, "causal": case.causal, "window": case.window}
            zero, exempt = zeros_of(truth, inputs["q"], inputs["k"], **band), None
            if drawn is None and case.values in ("nan_tail", "nan_outside"):
                arrays = [inputs[name] for name in ("dout", "q", "k", "v")]
                exempt = spread_backward(truth, *arrays, out, lse, inputs.get("dlse"), **band)
            self._judged_by = (drawn, truth, plain, zero, exempt)
        return self._judged_by

    def _drawn_heads(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(batch entries, kv heads) that are few enough for the reference; whole sums over the batch, and all heads where
        something is summed over them or counts them."""
        case = self.case
        pairs = case.batch * case.heads_kv
        budget = CHECK_FLOPS_CPU if self._xp() is np else CHECK_FLOPS_GPU
        count = int(budget / max(case.flops() / max(pairs, 1), 1.0))
        bias = self.shapes.get("bias", ((1, 1, 1, 1),))[0]
        over_heads = "bias" in self.wrt and (len(bias) < 3 or bias[-3] == 1)
        if count >= pairs or case.dropout or over_heads:
            return None
        entries = case.batch
        if len(self.wrt) == 3:
            entries = min(max(1, count // case.heads_kv), case.batch)
        heads = min(max(1, count // entries), case.heads_kv)
        rng = np.random.default_rng([case.seed, 11])
        return np.sort(rng.permutation(case.batch)[:entries]), np.sort(rng.permutation(case.heads_kv)[:heads])

    def _part(self, name: str, array: Any, drawn: tuple[np.ndarray, np.ndarray]) -> Any:
        """An operand's batch entries and heads of those that were drawn."""
        entries, kv_heads = drawn
        group = self.case.heads // self.case.heads_kv
        heads = (kv_heads[:, None] * group + np.arange(group)).ravel()
        if name in ("bias", "mask"):
            axes = {array.ndim - 4: entries, array.ndim - 3: heads}
        elif name in ("sinks", "alibi"):
            axes = {array.ndim - 2: entries, array.ndim - 1: heads}
        elif name == "intervals":
            axes = {0: entries, 1: heads}
        else:
            of_rows = 2 if self.case.layout == "bshd" and name not in ("lse", "dlse") else 1
            axes = {0: entries, of_rows: kv_heads if name in ("k", "v") else heads}
        xp = self._xp()
        for axis, chosen in axes.items():
            if axis >= 0 and array.shape[axis] > 1:
                array = xp.take(array, xp.asarray(chosen), axis=axis)
        return array


def verdict(judged: BackwardReport) -> Judged:
    """The report of ``fa_ext.judge`` on all gradients."""
    failures = tuple(f"d{g.name}: {why}" for g in judged.gradients for why in g.failures)
    figures = ("frobenius", "max_abs", "frobenius_bound", "max_abs_bound")
    worst = [max((getattr(g, figure) for g in judged.gradients), default=0.0) for figure in figures]
    return Judged(judged.passed, failures, *worst)
