"""Whatever computes attention and can be judged and timed: kernels of fa_ext, other libraries, a candidate of yours.

An implementation takes the arrays of one library and binds a problem's operands into a thunk, a call without arguments that
queues (or, on the CPU, does) the work and returns the output array; of the backward pass, the gradients in the order of the
case's ``wrt``. ``operations`` lists what an implementation does at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench import report
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.operands import Arrays, Judged, Operands
from bench.problems.sequences import index_arrays

Thunk = Callable[[], Any]
# operation: whose kernels do it (an argument of ``fa_ext.kernels``)
TABLES = {"attention": "attention", "serving": "attention", "backward": "backward", "merge": "merge", "append": "append",
          "documents": "documents"}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Implementation:
    """`timing`: "graph" (try to capture), "events" (do not), or "wall" (streams of its own: the host's clock)."""

    name: str
    library: str
    timing: str = "graph"
    operations: ClassVar[frozenset[str]] = frozenset({"attention"})
    judged: ClassVar[bool] = True  #: False: a yardstick, which computes nothing

    def refuses(self, case: Case) -> str | None:
        """Why it cannot do the problem, before anything runs; None when it can try."""
        raise NotImplementedError

    def refuses_trials(self, case: Case) -> str | None:
        """Why ``bench gate``, whose arrays change between calls and whose judge knows the case alone, cannot have it."""
        return None

    def timing_of(self, case: Case) -> str:
        """How it is timed on a problem."""
        return self.timing

    def rearranges(self, case: Case) -> bool:
        """Whether binding views the operands in another order of axes: JAX copies then."""
        return True

    def bind(self, operands: Arrays) -> Thunk:
        raise NotImplementedError

    def judged_on(self, operands: Operands) -> Judged:
        """The verdict of float64 on its result, whose memory was poisoned before."""
        operands.poison()
        operands.device.synchronize()
        result = self.bind(operands)()
        operands.device.synchronize()
        return operands.judge(result)


# ---- kernels of fa_ext ----


class Kernel(Implementation):
    """One kernel of the table through the function of fa_ext for its operation, with ``kernel=name`` and results where the
    operands have them; None: the library's choice."""

    def __init__(self, name: str | None, library: str, shown: str | None = None):
        super().__init__(shown or name or "fa_ext", library)
        self.kernel = name
        self.operations = frozenset(op for op, table in TABLES.items() if name is None or table == table_of(name))

    def refuses(self, case: Case) -> str | None:
        return None if case.operation in self.operations else f"no {case.operation}"

    def rearranges(self, case: Case) -> bool:
        return False

    def bind(self, operands: Arrays) -> Thunk:
        return operands.bound(self.kernel, self.library)


def compiled_kernels(device: Cpu | Cuda, operation: str = "attention") -> tuple[str, ...]:
    """Names of an operation's kernels for this device in order of preference; empty with a message when nothing is
    compiled."""
    try:
        import fa_ext

        return tuple(name for name in fa_ext.kernels(TABLES[operation]) if name.startswith("cpu_") == (device.kind == "cpu"))
    except ImportError as error:
        print(f"bench: no kernel of fa_ext to measure: {error}", file=sys.stderr)
        return ()


def table_of(kernel: str) -> str:
    """The kernel table that a kernel, also one that was loaded, is of."""
    import fa_ext

    for table in dict.fromkeys(TABLES.values()):
        if kernel in fa_ext.kernels(table):
            return table
    x, lse = np.zeros((1, 1, 1, 16), np.float16), np.zeros((1, 1, 1), np.float32)
    rows, slots = x[0, 0], np.zeros(1, np.int32)
    asked: dict[str, Callable[[], Any]] = {
        "attention": lambda: fa_ext.explain(x, x, x, kernel=kernel),
        "backward": lambda: fa_ext.explain_backward(x, x, x, x, x, lse, kernel=kernel),
        "merge": lambda: fa_ext.explain_merge([x], [lse], kernel=kernel),
        "append": lambda: fa_ext.explain_append(x, x, rows[:, None], rows[:, None], slots=slots, layout="bshd", kernel=kernel),
    }
    for table, ask in asked.items():
        with contextlib.suppress(ValueError):  # it names no kernel of that table
            ask()
            return table
    raise report.UsageError(f"kernel {kernel} is of an operation that is not measured; accepted: {', '.join(asked)}")


# ---- a callable of yours ----


class Function(Implementation):
    """A Python callable ``f(q, k, v, *, causal=False, scale=None, layout="bhsd", out=None, ...)``, or one of the backward
    pass, ``f(dout, q, k, v, *, out, lse, causal=False, ..., grads=None)``, which names `dout`.

    It gets only the arguments it names (or all, if it takes ``**kwargs``). What the problem needs and it does not name
    is a refusal, except `layout` (it then gets (B, H, S, D) views), what the forward found, and where results go (`out`,
    `grads`; it then returns new arrays).
    """

    def __init__(self, function: Callable, name: str, library: str):
        library = getattr(function, "arrays", None) or library
        super().__init__(name, library, "wall" if library == "jax" else "graph")  # JAX has streams of its own
        self.function = function
        parameters = inspect.signature(function).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.named = set(parameters)
        self.operations = frozenset({"backward" if "dout" in parameters else "attention"})

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.named

    def refuses(self, case: Case) -> str | None:
        if case.operation not in self.operations:
            return f"no {case.operation}"
        needed = [n for n in case.options() if n not in ("layout", "deterministic")] + case.arrays() + ["dlse"] * case.dlse
        if case.storage:
            needed += index_arrays(case) + ["layout"] * ("padded" in (case.storage.q, case.storage.k))
        missing = [n for n in needed if not self.takes(n)]
        return f"{self.name} takes no argument {', '.join(missing)}" if missing else None

    def rearranges(self, case: Case) -> bool:
        return case.layout == "bshd" and not case.lengths and not self.takes("layout")

    def bind(self, operands: Arrays) -> Thunk:
        function, backward, swap = self.function, operands.case.operation == "backward", self.rearranges(operands.case)
        arguments = operands.arguments(self.library)
        results = tuple(operands.array(name, self.library) for name in (operands.outputs if backward else ("out",)))
        if swap:
            views = ("dout", "q", "k", "v", "out") if backward else ("q", "k", "v")
            arguments |= {name: arguments[name].swapaxes(1, 2) for name in views}
            results = tuple(x.swapaxes(1, 2) for x in results)
        into = results if backward else results[0]
        leading = [arguments.pop(name) for name in (("dout", "q", "k", "v") if backward else ("q", "k", "v"))]
        arguments["grads" if backward else "out"] = into
        given = {name: x for name, x in arguments.items() if self.takes(name) and not (swap and name == "layout")}

        def call():
            result = function(*leading, **given)
            result = into if result is None else result
            if not swap:
                return result
            return tuple(g.swapaxes(1, 2) for g in result) if backward else result.swapaxes(1, 2)

        return call


# ---- kernels built and loaded here ----


def build_kernel(source: Path, flags: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """Compiles one kernel's source file into a shared library of its own (default: under build/bench); reuses what is up
    to date. ``flags`` such as ``-DBLOCK_M=32`` make another variant, in a folder of its own."""
    from bench.machine.build import rules

    options = rules.options_from_environment()
    if source.suffix == ".cu" and options.nvcc is None:
        raise report.UsageError(f"{source} needs nvcc: set CUDA_HOME or put nvcc on PATH")
    key = hashlib.sha256(repr((str(source.resolve()), sorted(flags), options.archs)).encode()).hexdigest()[:12]
    target = (folder or ROOT / "build" / "bench") / f"{source.stem}-{key}" / f"{source.stem}.so"
    return rules.build_kernel(source.resolve(), target.resolve(), options, flags)


def load_kernel(shared: Path) -> str:
    """Loads a kernel from a shared library into fa_ext and returns the name it goes by there."""
    try:
        from fa_ext import _core
    except ImportError as error:
        raise report.UsageError(f"loading {shared} needs the compiled module: {error}") from error
    return _core.load(os.fspath(shared.resolve()))
