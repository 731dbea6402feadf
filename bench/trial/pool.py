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


class SharedOperands(Operands):
    """The operands of a trial in memory that a worker can attach, and "result", where it copies what came back."""

    def __init__(self, case: Case, home: Cpu | Cuda, guard_byte: int, shared_on_device: bool):
        self.regions: dict[str, HostRegion | DeviceRegion] = {}

        def allocate(name: str, nbytes: int) -> Any:
            region = DeviceRegion(nbytes, home) if shared_on_device else HostRegion(nbytes, name in ("out", "result"))
            self.regions[name] = region
            return region.raw[:nbytes]

        super().__init__(case, home, guard_byte, allocate=allocate)
        self._new("result", case.out_shape, case.dtype, guard_byte)
        self.blocks["result"].poison()
        home.synchronize()  # a poison that comes late would fall on what the worker has written

    def description(self) -> tuple[list[dict], dict[str, list], list[int]]:
        """(regions, slot, file descriptors) for ``contestant.trial``."""
        slot = {name: [i, self.blocks[name].begin, self.blocks[name].nbytes, *self.shapes[name]]
                for i, name in enumerate(self.regions)}  # fmt: skip
        return [r.description() for r in self.regions.values()], slot, [r.fd for r in self.regions.values() if r.fd >= 0]

    def close(self) -> None:
        for region in self.regions.values():
            region.close()


class Pool:
    """`slots` copies of the operands of `case` in memory that workers can attach; one output region for the candidate."""

    def __init__(self, case: Case, home: Cpu | Cuda, seed: int, shared_on_device: bool, cold: bool = False):
        self.case, self.home = case, home
        self.rng = np.random.default_rng([seed, 5])
        self.shapes = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape}
        self.size = numpy_dtype(case.dtype).itemsize
        self.places, step = {}, 0
        for name, shape in self.shapes.items():
            self.places[name] = step
            step += _aligned(math.prod(shape) * self.size)
        self.step, self.out_bytes = step, math.prod(case.out_shape) * self.size
        self.out_step = _aligned(self.out_bytes) + FENCE
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
        out_shape, dtype = list(self.case.out_shape), self.case.dtype
        slots = []
        for i in range(self.slots):
            slot = {name: [0, i * self.step + self.places[name], math.prod(shape) * self.size, list(shape), dtype]
                    for name, shape in self.shapes.items()}  # fmt: skip
            for j, (name, (_, array)) in enumerate(self.extras.items()):
                slot[name] = [1 + j, 0, array.nbytes, list(array.shape), array.dtype.name]
            place = [len(regions) - 1, FENCE + i * self.out_step] if with_out else [None, 0]
            slot["out"] = [*place, self.out_bytes, out_shape, dtype]
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

    def poison(self) -> None:
        """Outputs of the slots that were refilled: NaN, 0x7B7B..., or what they hold."""
        drawn = self.rng.random()
        self.pattern = NAN_BYTE if drawn < 0.5 else LARGE_BYTE if drawn < 0.75 else None
        if self.pattern is not None:
            self._outputs(self.out.raw, 1)[:] = self.pattern

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
            counts = self._unwritten()
            if counts.any():
                i = int(counts.argmax())
                return f"call {i + 1} of {self.filled}: {int(counts[i])} elements unwritten"
        count = LOOKS if self.step <= 1 << 24 else 1
        for i in self.rng.choice(self.filled, size=min(count, self.filled), replace=False).tolist():
            error, norm, largest, finite = self._compare(i)
            if not finite:
                return f"call {i + 1} of {self.filled}: NaN or Inf in the result"
            if largest > TOLERANCE * max_abs or error > TOLERANCE * frobenius * norm:
                return (f"call {i + 1} of {self.filled}: off by {largest:.3g} ({error / max(norm, 1e-300):.3g} of the "
                        "norm) from float64 of its new inputs")  # fmt: skip
        return None

    def broken_fences(self) -> bool:
        """Whether somebody wrote between outputs."""
        raw = self.out.raw
        fences = [raw[:FENCE]] + [raw[FENCE + i * self.out_step + self.out_bytes : (i + 1) * self.out_step + FENCE]
                                  for i in range(self.slots)]  # fmt: skip
        return not all(bool((fence == NAN_BYTE).all()) for fence in fences)

    def close(self) -> None:
        """Gives the memory back; workers have let go of it."""
        for region in (self.inputs, self.out, *(region for region, _ in self.extras.values())):
            region.close()

    # ---- inside ----

    def _out(self, i: int) -> Any:
        begin = FENCE + i * self.out_step
        return self.out.raw[begin : begin + self.out_bytes]

    def _outputs(self, raw: Any, size: int) -> Any:
        """Outputs of the slots that were refilled as rows of a matrix, from all outputs in words of `size` bytes."""
        words = raw[FENCE // size : (FENCE + self.filled * self.out_step) // size]
        return words.reshape(self.filled, self.out_step // size)[:, : self.out_bytes // size]

    def _unwritten(self) -> np.ndarray:
        """Elements of each output that still hold the pattern."""
        word = {2: np.int16, 4: np.int32, 8: np.int64}[self.size]
        pattern = int(np.frombuffer(bytes([self.pattern or 0] * self.size), word)[0])
        torch = self.home.torch
        found = self._outputs(self.out.raw.view(getattr(torch, np.dtype(word).name) if torch else word), self.size) == pattern
        return _host(found.sum(1))

    def _compare(self, i: int) -> tuple[float, float, float, bool]:
        """(norm of the error, norm of the reference, largest error, all finite) of drawn queries of a drawn head."""
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
        got = to_values(_host(self._out(i)), case.out_shape, case.dtype)
        got = _head(got, case.layout, batch, head)[0, 0, rows].astype(np.float64)
        error = np.abs(got - truth)
        return (float(np.linalg.norm(error)), float(np.linalg.norm(truth)), float(error.max()) if error.size else 0.0,
                bool(np.isfinite(got).all()))  # fmt: skip

    def _input(self, i: int, name: str, batch: int, head: int) -> np.ndarray:
        """One head of an input of a slot as (1, 1, S, D), from the judge's own copy."""
        shape = self.shapes[name]
        begin = self.window + i * self.step + self.places[name]
        raw = _host(self.store[begin : begin + math.prod(shape) * self.size])
        return _head(to_values(raw, shape, self.case.dtype), self.case.layout, batch, head)

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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _host(raw: Any) -> np.ndarray:
    """Bytes of any library on the host."""
    if isinstance(raw, np.ndarray):
        return raw
    return raw.cpu().numpy() if hasattr(raw, "cpu") else raw.get()


def _head(array: np.ndarray, layout: str, batch: int, head: int) -> np.ndarray:
    """(1, 1, S, D) of a tensor in its layout."""
    if layout == "bshd":
        return array[batch : batch + 1, :, head : head + 1].swapaxes(1, 2)
    return array[batch : batch + 1, head : head + 1]
