"""The device of ``bench.load.streams`` through torch: memory, streams, events, graphs, and the loads beside a kernel."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import fa_ext
from bench import report
from bench.machine import device as devices
from bench.problems import Case
from bench.problems.gradients import OF_THE_CALL
from bench.problems.memory import ALIGNMENT
from bench.problems.operands import Operands
from bench.problems.operations import operands_of
from bench.problems.sequences import operand_shapes, result_shapes

GIB = 1 << 30
# Of the device's memory: what must be free, and what torch may take of it. The rest is CUDA's and the kernels' workspaces.
NEEDED_BYTES = 20 * GIB
TORCH_BYTES = 16 * GIB
# Seconds between two times that torch gives its cached memory back: cudaFree waits for the whole device.
EMPTYING = 1.0


class Tally:
    """Counts arrays with other bits than expected, on whatever stream is current; read on the host once that is idle.

    `near`: of how many results, the first ones, the elements may differ as sums in another order do.
    """

    def __init__(self, torch: Any, near: int = 0):
        self.torch, self.near = torch, near
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")
        self.host = torch.zeros((), dtype=torch.int64, pin_memory=True)

    def add(self, results: list[Any], expected: list[Any]) -> None:
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            wrong = beyond_order(self.torch, result, wanted) if number < self.near else self.torch.ne(words(self.torch, result), wanted)
            self.count.add_(wrong.any())

    def send(self) -> None:
        self.host.copy_(self.count, non_blocking=True)

    def value(self) -> int:
        return int(self.host)


def words(torch: Any, array: Any) -> Any:
    """The bits of a contiguous array as a 1-D one of integers, eight bytes each where they are whole."""
    flat = array.reshape(-1)
    return flat.view(torch.int64 if flat.numel() * flat.element_size() % 8 == 0 else torch.uint8)


def beyond_order(torch: Any, result: Any, bits: Any) -> Any:
    """Which elements differ from those with these bits by more than two roundings of the result and, where they cancel,
    2^-12 of the largest: float32 sums in another order are far below that."""
    wanted = bits.view(result.dtype).view(result.shape).float()
    within = 2 * torch.finfo(result.dtype).eps * wanted.abs() + wanted.nan_to_num(0.0).abs().amax() * 2.0**-12
    got = result.float()
    return ~((got - wanted).abs().le(within) | (got.isnan() & wanted.isnan()))


class Torch:
    """GPU 0."""

    REFUSALS = (fa_ext.UnsupportedError, ValueError)

    def __init__(self):
        self.device = devices.open_device("cuda")
        self.torch = torch = self.device.torch
        if torch is None:
            raise report.UsageError("needs torch that sees the GPU: it holds the streams, events and graphs of the load")
        free, total = torch.cuda.mem_get_info()
        if free < NEEDED_BYTES:
            raise report.UsageError(f"needs {NEEDED_BYTES // GIB} GiB of free device memory; {free / GIB:.1f} are free")
        torch.cuda.set_per_process_memory_fraction(TORCH_BYTES / total)
        self.graphs: list[Any] = []
        self.allocations: list[Any] = []  #: that the load of this name holds

    # ---- one call ----

    def problem(self, case: Case) -> tuple[Operands, dict[str, Any]]:
        operands = operands_of(case, self.device)
        return operands, operands.arguments("torch")

    def space(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def results(self, case: Case) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of what a call gives, the LSE last."""
        if case.lengths:
            return [(shape, getattr(self.torch, dtype)) for shape, dtype in result_shapes(case)]
        return [(case.out_shape, getattr(self.torch, case.dtype)), ((case.batch, case.heads, case.seq_q), self.torch.float32)]

    def bytes_of(self, case: Case) -> int:
        """Of all results, each from a multiple of ALIGNMENT on."""
        return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in self.results(case))

    def outputs(self, case: Case, lse: bool, space: Any) -> list[Any]:
        """[out] or [out, lse] in `space`."""
        begin, made = 0, []
        for shape, dtype in self.results(case)[: None if lse else 1]:
            nbytes = math.prod(shape) * dtype.itemsize
            made.append(space[begin : begin + nbytes].view(dtype).view(shape))
            begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return made

    def attend(self, kernel: str, problem: tuple, outputs: list[Any] | None, lse: bool) -> list[Any]:
        _, arguments = problem
        if outputs is None:
            result = fa_ext.attention(**arguments, return_lse=lse, kernel=kernel)
            return list(result) if lse else [result]
        fa_ext.attention(**arguments, out=tuple(outputs) if lse else outputs[0], kernel=kernel)
        return outputs

    def poison(self, arrays: list[Any]) -> None:
        for array in arrays:
            array.fill_(math.nan)

    def kept(self, results: list[Any]) -> list[Any]:
        """Copies of the bits of results, to be compared with."""
        return [words(self.torch, result).clone() for result in results]

    def written(self, results: list[Any]) -> bool:
        """Whether no NaN is left in the output; waits."""
        return not bool(self.torch.isnan(results[0]).any())

    def tally(self) -> Tally:
        return Tally(self.torch)

    def damage(self, problem: tuple) -> list[str]:
        """Inputs that have changed, and arrays that somebody wrote beside; waits."""
        operands, _ = problem
        changed, broken = operands.changed_inputs(), operands.broken_guards()
        return [f"{name} changed" for name in changed] + [f"written beside {name}" for name in broken]

    # ---- streams ----

    def stream(self) -> Any:
        return self.torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        return self.torch.cuda.stream(stream)

    def event(self) -> Any:
        return self.torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def done(self, event: Any) -> bool:
        return event.query()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def memory(self) -> int:
        """Bytes of the device that are taken once it is idle and torch has given back what it only caches."""
        self.synchronize()
        self.allocations.clear()
        self.torch.cuda.empty_cache()
        free, total = self.torch.cuda.mem_get_info()
        return total - free

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """`work` captured into a graph; returns what launches it on the current stream."""
        graph = self.torch.cuda.CUDAGraph()
        self.synchronize()
        with self.torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        self.graphs.append(graph)
        return graph.replay

    # ---- loads ----

    def load(self, name: str) -> tuple[Callable[[], Any], int]:
        """(what queues the load once on the current stream, how often in a row at most)."""
        torch = self.torch
        if name == "copies":
            source = torch.empty(1 << 28, device="cuda")
            target = torch.empty_like(source)
            return lambda: target.copy_(source), 2
        if name == "elementwise":
            small = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
            return lambda: small.mul_(1.0), 20
        if name == "products":
            a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            product = torch.empty_like(a)
            return lambda: torch.mm(a, b, out=product), 4
        if name == "allocations":
            return Allocations(torch, self.allocations), 8
        raise ValueError(f"load is {name!r}; accepted: copies, elementwise, products, allocations")


class Backward(Torch):
    """GPU 0, calls of the backward pass: dq, dk and dv of what a forward call has left, of sequences too."""

    any_order = False  #: dq is added up in any order

    def problem(self, case: Case) -> tuple[Operands, dict[str, Any]]:
        operands, arguments = super().problem(case)
        if case.operation == "backward":
            return operands, {name: x for name, x in arguments.items() if name not in OF_THE_CALL}
        out, lse = fa_ext.attention(**arguments, return_lse=True)
        dout = self.torch.randn_like(out)
        return operands, arguments | {"dout": dout, "out": out, "lse": lse}

    def results(self, case: Case) -> list[tuple[tuple[int, ...], Any]]:
        shapes = operand_shapes(case) if case.lengths else {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape}
        return [(shapes[name], getattr(self.torch, case.dtype)) for name in "qkv"]

    def outputs(self, case: Case, lse: bool, space: Any) -> list[Any]:
        """[dq, dk, dv] in `space`."""
        return super().outputs(case, True, space)

    def attend(self, kernel: str, problem: tuple, outputs: list[Any] | None, lse: bool) -> list[Any]:
        _, arguments = problem
        if outputs is None:
            self.in_order(kernel, arguments)
        return list(fa_ext.attention_backward(**arguments, grads=outputs and tuple(outputs), kernel=kernel, deterministic=not self.any_order))

    def in_order(self, kernel: str, arguments: dict[str, Any]) -> None:
        """Finds out whether the kernel takes such a call with sums in any order alone. Then dq may differ as those do."""
        if not self.any_order and not fa_ext.explain_backward(**arguments, kernel=kernel)[0]:
            self.any_order = bool(fa_ext.explain_backward(**arguments, kernel=kernel, deterministic=False)[0])

    def tally(self) -> Tally:
        return Tally(self.torch, near=int(self.any_order))


class Allocations:
    """Allocates, fills and frees arrays of 1 KiB to 64 MiB, and gives torch's cached memory back once a second."""

    def __init__(self, torch: Any, held: list[Any]):
        self.torch, self.held, self.random = torch, held, random.Random(0)
        self.emptied = time.monotonic()

    def __call__(self) -> None:
        size = int(2 ** self.random.uniform(10, 26))
        self.held.append(self.torch.full((size,), 1, dtype=self.torch.uint8, device="cuda"))
        if len(self.held) > 4:
            self.held.pop(self.random.randrange(len(self.held)))
        if time.monotonic() - self.emptied > EMPTYING:
            self.torch.cuda.empty_cache()
            self.emptied = time.monotonic()
