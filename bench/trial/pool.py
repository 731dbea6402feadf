"""The memory of timed calls, on the judge's side: every call gets inputs that it has never seen, and is looked at.

A sample of n calls uses slots 0 to n - 1 once each. Before it, while nobody runs, Q, K and V of all of them become
another window of random numbers, whose place in a store that only the judge holds is drawn anew, and the outputs become
NaN, another large byte pattern, or stay as they are: drawn too. After it, while nobody runs, drawn queries of drawn
slots meet float64, computed from the judge's own copy of the inputs.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.memory import ALIGNMENT, LARGE_BYTE, NAN_BYTE, Block, empty_bytes, numpy_dtype
from bench.problems.gradients import Gradients
from bench.problems.operands import Operands, fill_normal, host_arrays, to_values
from bench.trial.shared import DeviceRegion, HostRegion

# Bytes of inputs and outputs, and slots, of one pool at most. A single slot may be larger.
MOST_BYTES = {"cpu": 48 << 20, "cuda": 2 << 30}
MOST_SLOTS = {"cpu": 256, "cuda": 1024}
# Where windows of the store may begin: that many elements behind its first, and what of it is drawn anew each time.
PLACES = 1 << 20
RENEWED_SHARE = 64
# Bytes between the outputs of two slots, which nobody may write.
FENCE = 4096
# Slots that are looked at after a sample, and queries of one head in each.
LOOKS = 4
ROWS = 8
# Drawn queries vary more than whole results, of which the bounds are.
TOLERANCE = 1.5
TIMED = ("q", "k", "v")


class Shared(Operands):
    """The operands of a trial in memory that a worker can attach, and "result_...", where it copies what came back."""

    def __init__(self, case: Case, home: Cpu | Cuda, guard_byte: int, shared_on_device: bool):
        self.regions: dict[str, HostRegion | DeviceRegion] = {}

        def allocate(name: str, nbytes: int) -> Any:
            region = DeviceRegion(nbytes, home) if shared_on_device else HostRegion(nbytes, name in self.outputs or name.startswith("result_"))
            self.regions[name] = region
            return region.raw[:nbytes]

        super().__init__(case, home, guard_byte, allocate=allocate)
        for name in self.outputs:
            self._new(f"result_{name}", *self.shapes[name], guard_byte)
            self.blocks[f"result_{name}"].poison()
        home.synchronize()  # a poison that comes late would fall on what the worker has written

    def description(self) -> tuple[list[dict], dict[str, list], list[int]]:
        """(regions, slot, file descriptors) for ``contestant.trial``."""
        slot = {name: [i, self.blocks[name].begin, self.blocks[name].nbytes, *self.shapes[name]]
                for i, name in enumerate(self.regions)}  # fmt: skip
        return [r.description() for r in self.regions.values()], slot, [r.fd for r in self.regions.values() if r.fd >= 0]

    def results(self, library: str) -> Any:
        """What came back, as a contender returns it."""
        found = tuple(self.array(f"result_{name}", library) for name in self.outputs)
        return found if len(found) > 1 else found[0]

    def close(self) -> None:
        for region in self.regions.values():
            region.close()


class SharedOperands(Shared):
    """Of attention."""


class SharedGradients(Shared, Gradients):
    """Of its backward pass."""


class Pool:
    """`slots` copies of the operands of `case` in memory that workers can attach; one output region for the candidate.

    A slot's inputs are a window of random numbers; what follows from them (``_complete``) the judge adds."""

    def __init__(self, case: Case, home: Cpu | Cuda, seed: int, shared_on_device: bool, cold: bool = False):
        self.case, self.home = case, home
        self.rng = np.random.default_rng([seed, 5])
        self.shapes, self.results = self._operands()
        self.size = numpy_dtype(case.dtype).itemsize
        self.places, self.step = places_of(self.shapes, 0)
        self.out_places, self.out_step = places_of(self.results, FENCE)
        most = MOST_BYTES["cuda" if shared_on_device else "cpu"] // max(1, self.step + self.out_step)
        self.slots = int(max(1, min(most, MOST_SLOTS["cuda" if shared_on_device else "cpu"])))
        allocate = (lambda n, writable: DeviceRegion(n, home)) if shared_on_device else HostRegion
        self.inputs = allocate(self.slots * self.step, False)
        self.out = allocate(self.slots * self.out_step + FENCE, True)
        self.extras = {}
        if case.arrays():
            for name, array in host_arrays(case).items():
                if name not in TIMED:
                    region = allocate(array.nbytes, False)
                    Block.over(region.raw, 0, array.nbytes, home).fill(array)
                    self.extras[name] = (region, array)
        self.store = self._store()
        self.sweep = empty_bytes(5 * home.cache_bytes, home) if cold else None
        self.window = 0
        self.filled = 0
        self.pattern: int | None = None
        self.out.raw[:] = NAN_BYTE

    # ---- for the workers ----

    def description(self, with_out: bool) -> tuple[list[dict], list[dict[str, list]], list[int]]:
        """(regions, slots, file descriptors) for ``contestant.prepare``; baselines fill outputs of their own."""
        regions = [self.inputs, *(region for region, _ in self.extras.values())] + ([self.out] if with_out else [])
        slots = []
        for i in range(self.slots):
            slot = {name: [0, i * self.step + self.places[name], nbytes_of(shape, dtype), list(shape), dtype]
                    for name, (shape, dtype) in self.shapes.items()}  # fmt: skip
            for j, (name, (_, array)) in enumerate(self.extras.items()):
                slot[name] = [1 + j, 0, array.nbytes, list(array.shape), array.dtype.name]
            for name, (shape, dtype) in self.results.items():
                begin = FENCE + i * self.out_step + self.out_places[name]
                place = [len(regions) - 1, begin] if with_out else [None, 0]
                slot[name] = [*place, nbytes_of(shape, dtype), list(shape), dtype]
            slots.append(slot)
        return [r.description() for r in regions], slots, [r.fd for r in regions if r.fd >= 0]

    # ---- before a sample ----

    def refill(self, calls: int) -> None:
        """New inputs for slots 0 to `calls` - 1."""
        self.filled, nbytes = calls, calls * self.step
        self._renew_store()
        # Odd places: rows of one window are never rows of another.
        self.window = (2 * int(self.rng.integers(PLACES // 2)) + 1) * self.size
        self.inputs.raw[:nbytes] = self.store[self.window : self.window + nbytes]
        self._complete(calls)

    def poison(self) -> None:
        """Outputs of the slots that were refilled: NaN, 0x7B7B..., or what they hold."""
        drawn = self.rng.random()
        self.pattern = NAN_BYTE if drawn < 0.5 else LARGE_BYTE if drawn < 0.75 else None
        for name in self.results if self.pattern is not None else ():
            self._outputs(name, self.out.raw, 1)[:] = self.pattern

    def settle(self) -> None:
        """Ends the preparation: what was written has arrived; for a cold sample the caches hold something else."""
        if self.sweep is not None:
            self.sweep[:] = int(self.rng.integers(256))
        self.home.synchronize()

    def answer_seconds(self) -> float:
        """How long the device takes for next to nothing: much, while somebody's work still runs there."""
        began = time.perf_counter()
        self.out.raw[:1] = NAN_BYTE
        self.home.synchronize()
        return time.perf_counter() - began

    # ---- after a sample ----

    def look(self, max_abs: float, frobenius: float) -> str | None:
        """What is wrong with the results; None when nothing that was drawn is. The bounds are those of the trials."""
        if self.pattern is not None:
            for name in self.results:
                counts = self._unwritten(name)
                if counts.any():
                    i = int(counts.argmax())
                    return f"call {i + 1} of {self.filled}: {int(counts[i])} elements{self._of(name)} unwritten"
        count = LOOKS if self.step <= 1 << 24 else 1
        for i in self.rng.choice(self.filled, size=min(count, self.filled), replace=False).tolist():
            for name, (error, norm, largest, finite) in self._compare(i).items():
                if not finite:
                    return f"call {i + 1} of {self.filled}: NaN or Inf in the result{self._of(name)}"
                if largest > TOLERANCE * max_abs or error > TOLERANCE * frobenius * norm:
                    return (f"call {i + 1} of {self.filled}:{self._of(name)} off by {largest:.3g} ({error / max(norm, 1e-300):.3g} of "
                            "the norm) from float64 of its new inputs")  # fmt: skip
        return None

    def _of(self, name: str) -> str:
        """A result's name, where there are several."""
        return f" of {name}" if len(self.results) > 1 else ""

    def broken_fences(self) -> bool:
        """Whether somebody wrote between outputs."""
        raw, ends = self.out.raw, [0]
        for i in range(self.slots):
            for name, (shape, dtype) in self.results.items():
                begin = FENCE + i * self.out_step + self.out_places[name]
                ends += [begin, begin + nbytes_of(shape, dtype)]
        fences = zip(ends[::2], [*ends[1::2], len(raw)], strict=True)
        return not all(bool((raw[begin:end] == NAN_BYTE).all()) for begin, end in fences)

    def close(self) -> None:
        """Gives the memory back; workers have let go of it."""
        for region in (self.inputs, self.out, *(region for region, _ in self.extras.values())):
            region.close()

    # ---- inside ----

    def _operands(self) -> tuple[dict[str, tuple], dict[str, tuple]]:
        """({input that each call has anew: (shape, dtype)}, {output: (shape, dtype)})."""
        case = self.case
        shapes = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape, "out": case.out_shape}
        every = {name: (shape, case.dtype) for name, shape in shapes.items()}
        return {name: every[name] for name in TIMED}, {"out": every["out"]}

    def _complete(self, calls: int) -> None:
        """Adds to the slots' new inputs what follows from them."""

    def _result(self, i: int, name: str) -> np.ndarray:
        """A result of a slot, on the host."""
        shape, dtype = self.results[name]
        begin = FENCE + i * self.out_step + self.out_places[name]
        return to_values(on_host(self.out.raw[begin : begin + nbytes_of(shape, dtype)]), shape, dtype)

    def _outputs(self, name: str, raw: Any, size: int) -> Any:
        """One output of the slots that were refilled as rows of a matrix, from all outputs in words of `size` bytes."""
        words = raw[FENCE // size : (FENCE + self.filled * self.out_step) // size]
        begin, end = self.out_places[name], self.out_places[name] + nbytes_of(*self.results[name])
        return words.reshape(self.filled, self.out_step // size)[:, begin // size : end // size]

    def _unwritten(self, name: str) -> np.ndarray:
        """Elements of an output of each slot that still hold the pattern."""
        word = {2: np.int16, 4: np.int32, 8: np.int64}[self.size]
        pattern = int(np.frombuffer(bytes([self.pattern or 0] * self.size), word)[0])
        torch = self.home.torch
        found = self._outputs(name, self.out.raw.view(getattr(torch, np.dtype(word).name) if torch else word), self.size) == pattern
        return on_host(found.sum(1))

    def _compare(self, i: int) -> dict[str, tuple[float, float, float, bool]]:
        """{output: (norm of the error, norm of the reference, largest error, all finite)} of drawn queries of a drawn head."""
        from fa_ext import reference

        case, rng = self.case, self.rng
        batch, head = int(rng.integers(case.batch)), int(rng.integers(case.heads))
        head_kv = head // (case.heads // case.heads_kv)
        rows = np.unique(rng.integers(0, case.seq_q, ROWS))
        q, k, v = (self._input(i, name, batch, h) for name, h in (("q", head), ("k", head_kv), ("v", head_kv)))
        extras = {}
        for name, (_, array) in self.extras.items():
            if name in ("sinks", "alibi"):
                extras[name] = np.broadcast_to(array, (case.batch, case.heads))[batch, head : head + 1]
            else:
                whole = np.broadcast_to(array, (case.batch, case.heads, case.seq_q, case.seq_k))
                extras[name] = whole[batch : batch + 1, head : head + 1]
        options = {name: value for name, value in case.options().items() if name != "layout"}
        truth = reference.attention(q, k, v, **extras, **options, rows=rows)[0][0, 0]
        got = head_of(self._result(i, "out"), case.layout, batch, head)[0, 0, rows].astype(np.float64)
        return {"out": errors_of(got, truth)}

    def _input(self, i: int, name: str, batch: int, head: int) -> np.ndarray:
        """One head of an input of a slot as (1, 1, S, D), from the judge's own copy."""
        shape, dtype = self.shapes[name]
        begin = self.window + i * self.step + self.places[name]
        raw = on_host(self.store[begin : begin + nbytes_of(shape, dtype)])
        return head_of(to_values(raw, shape, dtype), self.case.layout, batch, head)

    def _store(self) -> Any:
        """Random normal numbers in the case's dtype, as bytes: what windows are cut from."""
        raw = empty_bytes((self.slots * self.step // self.size + PLACES) * self.size, self.home)
        self._draw(raw)
        return raw

    def _renew_store(self) -> None:
        count = max(1, len(self.store) // self.size // RENEWED_SHARE)
        begin = int(self.rng.integers(len(self.store) // self.size - count + 1)) * self.size
        self._draw(self.store[begin : begin + count * self.size])

    def _draw(self, raw: Any) -> None:
        fill_normal(raw, self.case.dtype, self.home, int(self.rng.integers(2**31)))


def places_of(shapes: dict[str, tuple], gap: int) -> tuple[dict[str, int], int]:
    """({name: its first byte in a slot}, bytes of a slot), each array aligned and followed by `gap` bytes."""
    places, step = {}, 0
    for name, (shape, dtype) in shapes.items():
        places[name] = step
        step += aligned(nbytes_of(shape, dtype)) + gap
    return places, step


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * numpy_dtype(dtype).itemsize


def errors_of(got: np.ndarray, truth: np.ndarray) -> tuple[float, float, float, bool]:
    """(norm of the error, norm of the reference, largest error, all finite)."""
    error = np.abs(got - truth)
    return (float(np.linalg.norm(error)), float(np.linalg.norm(truth)), float(error.max()) if error.size else 0.0,
            bool(np.isfinite(got).all()))  # fmt: skip


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def on_host(raw: Any) -> np.ndarray:
    """Bytes of any library on the host."""
    if isinstance(raw, np.ndarray):
        return raw
    return raw.cpu().numpy() if hasattr(raw, "cpu") else raw.get()


def head_of(array: np.ndarray, layout: str, batch: int, head: int) -> np.ndarray:
    """(1, 1, S, D) of a tensor in its layout."""
    if layout == "bshd":
        return array[batch : batch + 1, :, head : head + 1].swapaxes(1, 2)
    return array[batch : batch + 1, head : head + 1]
