"""The arrays of one call of one problem: filled, guarded, hashed, and judged by float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.machine.device import Cpu, Cuda
from bench.problems import ARRAYS, Case
from bench.problems.memory import GUARD_BYTES, NAN_BYTE, Block, address_of, numpy_dtype, to_host

if TYPE_CHECKING:
    from fa_ext.dropout import Dropout
    from fa_ext.judge import Report

INPUTS = ("q", "k", "v", *ARRAYS)
# Work that one float64 check may cost; larger problems are checked on randomly drawn queries.
CHECK_FLOPS_CPU = 3e9
CHECK_FLOPS_GPU = 2e11


class Arrays:
    """The arrays of one call in memory that somebody else fills and judges: all that an implementation is given."""

    inputs: tuple[str, ...] = INPUTS
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, case: Case, device: Cpu | Cuda, blocks: dict[str, Block] | None = None,
                 shapes: dict[str, tuple[tuple[int, ...], str]] | None = None):  # fmt: skip
        self.case, self.device = case, device
        self.blocks: dict[str, Block] = blocks or {}
        self.shapes: dict[str, tuple[tuple[int, ...], str]] = shapes or {}
        self._views: dict[tuple[str, str], Any] = {}

    def array(self, name: str, library: str) -> Any:
        """The operand as an array of `library`; the same object each time."""
        key = (name, library)
        if key not in self._views:
            shape, dtype = self.shapes[name]
            self._views[key] = self.blocks[name].view(shape, dtype, library)
        return self._views[key]

    def arguments(self, library: str) -> dict[str, Any]:
        """The inputs and the options, as the function of fa_ext takes them (without what it writes)."""
        arrays = {name: self.array(name, library) for name in self.blocks if name in (*self.inputs, "max_logit")}
        return arrays | self.case.options()

    def bound(self, kernel: str | None, library: str) -> Callable[[], Any]:
        """The call of fa_ext by a kernel, or by its choice, that returns the result."""
        import fa_ext

        arguments = self.arguments(library)
        q, k, v = (arguments.pop(name) for name in "qkv")
        out, attention = self.array("out", library), fa_ext.attention

        def call():
            attention(q, k, v, out=out, kernel=kernel, **arguments)
            return out

        return call

    def copied(self, library: str) -> bool:
        """Whether `library` copied an input instead of sharing its memory: what is written there later is not seen."""
        return any(address_of(self.array(name, library)) != address_of(block.inside)
                   for name, block in self.blocks.items() if name in self.inputs)  # fmt: skip

    def renew(self) -> None:
        """Makes the next arrays anew, from what the memory holds then."""
        self._views.clear()


class Operands(Arrays):
    """Inputs and output of one call, each in guarded memory of its own, C-contiguous in the case's layout.

    Ordinary inputs (normal values, no arrays besides) of a GPU are drawn there. Without guard zones inputs are not
    hashed either. `allocate(name, bytes)` gives the memory of each; default: the device's library.
    """

    def __init__(self, case: Case, device: Cpu | Cuda, guard_byte: int = NAN_BYTE, guard: int = GUARD_BYTES,
                 allocate: Callable[[str, int], Any] | None = None):  # fmt: skip
        super().__init__(case, device)
        self.guard, self._allocate = guard, allocate
        self._judged_by: Any = None
        self._dropping: dict[str, Any] = {}
        self._make(guard_byte)
        self.poison()
        self.digests = {name: block.digest() for name, block in self._inputs()} if guard else {}

    def _make(self, guard_byte: int) -> None:
        """Every operand, the inputs filled."""
        self._new("out", self.case.out_shape, self.case.dtype, guard_byte)
        if self.case.max_logit:
            self._new("max_logit", self.case.max_logit_shape(), "float32", guard_byte)
        self._make_qkv(guard_byte)

    def _make_qkv(self, guard_byte: int) -> None:
        """q, k, v, and what the case adds to them."""
        case, device = self.case, self.device
        if device.kind == "cuda" and not case.arrays() and case.values == "normal" and not case.logits:
            for name, shape in (("q", case.q_shape), ("k", case.k_shape), ("v", case.v_shape)):
                self._new(name, shape, case.dtype, guard_byte)
            for i, name in enumerate("qkv"):
                fill_normal(self.blocks[name].inside, case.dtype, device, case.seed * 3 + i)
        else:
            for name, array in host_arrays(case).items():
                self._new(name, array.shape, array.dtype.name, guard_byte)
                self.blocks[name].fill(array)

    def _new(self, name: str, shape: tuple[int, ...], dtype: str, guard_byte: int) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * numpy_dtype(dtype).itemsize
        allocate = functools.partial(self._allocate, name) if self._allocate else None
        self.blocks[name] = Block(nbytes, self.device, guard_byte, self.guard, allocate)
        self.shapes[name] = (tuple(shape), dtype)

    # ---- contents ----

    def _inputs(self):
        return ((name, block) for name, block in self.blocks.items() if name in self.inputs)

    def poison(self) -> None:
        """Fills the outputs with NaN, and maxima, which go on from what is there, with -inf."""
        for name in self.outputs:
            self.blocks[name].poison()
        if self.case.max_logit:
            self.blocks["max_logit"].fill(np.full(self.case.max_logit_shape(), -np.inf, np.float32))

    def picked(self) -> str | None:
        """The kernel that fa_ext takes by itself; None where it is not compiled, or has none."""
        try:
            import fa_ext
        except ImportError:
            return None
        return fa_ext.explain(**self.arguments(self.device.default_arrays))[0]

    # ---- checks of memory ----

    def changed_inputs(self) -> list[str]:
        """Names of inputs that somebody wrote to."""
        return [name for name, block in self._inputs() if self.digests and block.digest() != self.digests[name]]

    def broken_guards(self) -> list[str]:
        """Names of operands around which somebody wrote."""
        return [name for name, block in self.blocks.items() if not block.guards_intact()]

    # ---- the judge ----

    def judge(self, result: Any) -> Report:
        """`result`, an array of any library in the case's layout, against float64 on the current inputs."""
        from fa_ext.judge import OTHER_ORDER, judge

        case, xp = self.case, self._xp()
        got = self.values_of(result)
        if tuple(got.shape) != tuple(case.out_shape):
            raise WrongResult(f"the result has shape {tuple(got.shape)}, the problem asks for {tuple(case.out_shape)}")
        rows, truth, plain, exempt = self._truth()
        if rows is not None:
            # Only drawn rows meet the reference; all others must at least have been written.
            if case.values == "normal" and not bool(xp.isfinite(got.astype(xp.float32)).all()):
                raise WrongResult("the result holds NaN or Inf (unwritten?)")
            got = xp.take(got, xp.asarray(rows), axis=1 if case.layout == "bshd" else 2)
        slack = OTHER_ORDER if case.dtype == "float32" else 1.0  # nobody is bound to the order of plain's sums
        report = judge(got, None, truth, plain, case.dtype, layout=case.layout, exempt=exempt, slack=slack)
        wrong = self._wrong_maxima() if case.max_logit else ()
        return replace(report, passed=report.passed and not wrong, failures=report.failures + wrong)

    def _wrong_maxima(self) -> tuple[str, ...]:
        """The faults of max_logit, of calls since it was poisoned."""
        from fa_ext.judge.max_logit import failures

        found, inputs, options = self._as_numpy("max_logit"), self.input_values(), self.case.options()
        found = self._xp().asarray(found)
        inputs.pop("v")
        return failures(found, self._xp().full_like(found, -np.inf), **inputs, **options, rows=self._truth()[0])

    def values_of(self, result: Any) -> Any:
        """`result` as an array of the module in which the reference is computed; bfloat16 becomes float32 on a GPU."""
        return to_host(result) if self._xp() is np else _values_on_gpu(result, dtype_name(result), self._xp())

    def _xp(self) -> Any:
        """The module in which the reference is computed."""
        return self.device.cupy if self.device.kind == "cuda" and self.device.cupy else np

    def _truth(self) -> tuple[Any, Any, Any, Any]:
        """(queries drawn or None for all, reference, plain, exempt) of the current inputs, computed once."""
        if self._judged_by is None:
            from fa_ext import reference
            from fa_ext.judge import spread

            case, xp = self.case, self._xp()
            inputs = self.input_values()
            rows = self._drawn_rows(CHECK_FLOPS_CPU if xp is np else CHECK_FLOPS_GPU)
            options = case.options() | self._dropping
            truth = reference.attention(**inputs, **options, rows=rows, xp=xp)
            plain = reference.plain(**inputs, **options, rows=rows, xp=xp, dtype=case.dtype, exact=case.exact)
            exempt = None
            if rows is None and case.values in ("nan_tail", "nan_outside"):
                k, v = (inputs[name].astype(xp.float32) for name in "kv")
                exempt = spread(k, v, truth[0], case.layout, case.causal, case.window)
            self._judged_by = (rows, truth, plain, exempt)
        return self._judged_by

    @contextlib.contextmanager
    def dropping(self, dropout: Dropout) -> Iterator[None]:
        """Judges results that dropped the weights that `dropout` says instead of those that the case's does."""
        held = self._judged_by, self._dropping
        self._judged_by, self._dropping = None, {"dropout": dropout}
        try:
            yield
        finally:
            self._judged_by, self._dropping = held

    def input_values(self) -> dict[str, Any]:
        """The inputs as arrays of the module in which the reference is computed."""
        as_array = self._as_numpy if self._xp() is np else self._as_cupy
        return {name: as_array(name) for name, _ in self._inputs()}

    def _drawn_rows(self, budget: float) -> np.ndarray | None:
        case = self.case
        per_row = 4.0 * case.batch * case.heads * max(case.seq_k, 1) * (case.head_dim + case.head_dim_v)
        count = int(budget / max(per_row, 1.0))
        if count >= case.seq_q:
            return None
        rng = np.random.default_rng([case.seed, 11])
        drawn = rng.choice(case.seq_q, size=max(16, min(count, case.seq_q)), replace=False)
        return np.unique(np.concatenate((drawn, [0, case.seq_q - 1])))

    def _as_numpy(self, name: str) -> np.ndarray:
        shape, dtype = self.shapes[name]
        return self.blocks[name].host_bytes().view(numpy_dtype(dtype)).reshape(shape)

    def _as_cupy(self, name: str) -> Any:
        shape, dtype = self.shapes[name]
        xp = self.device.cupy
        return _widen(xp.asarray(self.blocks[name].inside), shape, dtype, xp)


def dtype_name(array: Any) -> str:
    """Of an array of any library."""
    return str(array.dtype).rpartition(".")[2]


@dataclass(frozen=True)
class Judged:
    """The verdict on a result of several parts; errors of the one that is furthest off."""

    passed: bool
    failures: tuple[str, ...]
    frobenius: float
    max_abs: float
    frobenius_bound: float = 0.0
    max_abs_bound: float = 0.0


class WrongResult(Exception):
    """A result that needs no reference to be refused: wrong shape, unwritten, outside its memory."""


def trivial_answers(operands: Operands) -> dict[str, np.ndarray]:
    """Answers that need no attention: a problem whose judge accepts one of them measures nothing."""
    case = operands.case
    v = operands._as_numpy("v").astype(np.float64)
    axis = 1 if case.layout == "bshd" else 2
    heads_axis = 3 - axis
    mean = np.broadcast_to(v.mean(axis=axis, keepdims=True), (*v.shape[:axis], case.seq_q, *v.shape[axis + 1 :]))
    mean = np.repeat(mean, case.heads // case.heads_kv, axis=heads_axis)
    dtype = numpy_dtype(case.dtype)
    return {"zeros": np.zeros(case.out_shape, dtype), "the mean of V": mean.astype(dtype)}


def host_arrays(case: Case) -> dict[str, np.ndarray]:
    """The case's arrays by name, C-contiguous."""
    made = case.host_inputs()
    return {name: np.ascontiguousarray(made[name]) for name in INPUTS if name in made}


def fill_normal(raw: Any, dtype: str, device: Cpu | Cuda, seed: int) -> None:
    """Fills bytes of the device's library with random normal numbers of a dtype."""
    if device.kind == "cpu":
        wide = np.float64 if dtype == "float64" else np.float32
        numbers = raw.view(numpy_dtype(dtype))
        piece = 1 << 20  # numbers drawn at once
        rng = np.random.Generator(np.random.SFC64(seed))
        for i in range(0, len(numbers), piece):
            numbers[i : i + piece] = rng.standard_normal(len(numbers[i : i + piece]), wide)
    elif device.torch:
        generator = device.torch.Generator(device="cuda").manual_seed(seed)
        raw.view(getattr(device.torch, dtype)).normal_(generator=generator)
    else:
        xp = device.cupy
        rng = xp.random.RandomState((seed ^ seed >> 32) % 2**32)  # it takes no larger seed
        piece = 1 << 27  # bytes filled at once
        for i in range(0, len(raw), piece):
            part = raw[i : i + piece]
            normal = rng.standard_normal(len(part) // numpy_dtype(dtype).itemsize, dtype=xp.float32)
            part[:] = _narrow(normal, dtype, xp).view(xp.uint8).ravel()


def to_values(raw: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Host bytes as an array."""
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def _widen(raw: Any, shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    """Device bytes as values that CuPy can compute with; bfloat16 becomes float32."""
    if dtype == "bfloat16":
        bits = raw.view(xp.uint16).astype(xp.uint32) << 16
        return bits.view(xp.float32).reshape(shape)
    return raw.view(xp.dtype(numpy_dtype(dtype))).reshape(shape)


def _narrow(values: Any, dtype: str, xp: Any) -> Any:
    from fa_ext import reference

    if dtype == "bfloat16":
        rounded = reference.round_to(values, "bfloat16", xp)
        return (rounded.view(xp.uint32) >> 16).astype(xp.uint16)
    return values.astype(dtype)


def _values_on_gpu(result: Any, dtype: str, xp: Any) -> Any:
    if type(result).__module__.partition(".")[0] == "torch":
        import torch

        flat = result.detach().contiguous().view(torch.uint8).flatten()
        return _widen(xp.from_dlpack(flat), tuple(result.shape), dtype, xp)
    if dtype == "bfloat16":
        raw = xp.ascontiguousarray(xp.asarray(result)).view(xp.uint8).ravel()
        return _widen(raw, tuple(result.shape), dtype, xp)
    return xp.asarray(result)
