"""The memory of timed calls, on the judge's side: every call gets inputs that it has never seen, and is looked at.

A sample of n calls uses slots 0 to n - 1 once each. Before it, while nobody runs, another window of random numbers, whose
place in a store that only the judge holds is drawn anew, is dealt to Q, K and V of all of them, and the outputs become
NaN, another large byte pattern, or stay as they are: drawn too. A few drawn heads get inputs on which shortcuts of the
softmax fail. On the CPU a slot's inputs are written right before its call (``reveal``), and a few words of each result are
noted right after it. After the sample, while nobody runs, drawn queries of drawn slots and of every hard head meet
float64, computed from the judge's own copy of the inputs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.machine.device import Cpu, Cuda
from bench.problems import Case, dense
from bench.problems.gradients import Gradients
from bench.problems.memory import ALIGNMENT, LARGE_BYTE, NAN_BYTE, Block, empty_bytes, numpy_dtype
from bench.problems.operands import Operands, fill_normal, to_values
from bench.trial.dice import Dice
from bench.trial.extras import Drawn, Extra
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
# Heads of a sample at most that get hard inputs, and the kinds of these.
HARD_HEADS = 4
HARD_KINDS = ("sorted", "large", "outliers", "dominant")
# Words of each result that are noted when its call has returned.
NOTED = 16


class Shared(Operands):
    """The operands of a trial in memory that a worker can attach, and "result_...", where it copies what came back."""

    def __init__(self, case: Case, home: Cpu | Cuda, guard_byte: int, shared_on_device: bool):
        self.regions: dict[str, HostRegion | DeviceRegion] = {}
        if case.max_logit:
            raise ValueError(f"max_logit is {case.max_logit!r}; accepted in trials: none, since a candidate gives one result")

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
        """(regions, slot, file descriptors) for ``calls.trial``."""
        slot = {name: [i, self.blocks[name].begin, self.blocks[name].nbytes, *self.shapes[name]] for i, name in enumerate(self.regions)}
        return [r.description() for r in self.regions.values()], slot, [r.fd for r in self.regions.values() if r.fd >= 0]

    def results(self, library: str) -> Any:
        """The results that came back, as an implementation returns them."""
        found = tuple(self.array(f"result_{name}", library) for name in self.outputs)
        return found if len(found) > 1 else found[0]

    def close(self) -> None:
        """Gives up the descriptors. The memory goes with the last array of it: nothing here refers back to this object then, which
        would keep the memory, and a descriptor with each, until Python looks for circles."""
        self._allocate = None
        for region in self.regions.values():
            region.close()


class SharedOperands(Shared):
    """Of attention."""


class SharedGradients(Shared, Gradients):
    """Of its backward pass."""


@dataclasses.dataclass
class HardHead:
    """A kv head of a batch entry of a slot, and the query heads that belong to it, with inputs of a hard kind."""

    batch: int
    head_kv: int
    kind: str
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # (1, heads, S, D), once they are written


class Pool:
    """`slots` copies of the operands of `case` in memory that workers can attach; one output region for the candidate.

    A slot's inputs are a window of random numbers; what follows from them (``_complete``) the judge adds."""

    def __init__(self, case: Case, home: Cpu | Cuda, dice: Dice, shared_on_device: bool, cold: bool = False, kinds: Sequence[str] = HARD_KINDS):
        """`kinds`: of the values that the trials have; the hard ones among them are dealt to timed calls."""
        self.case, self.home, self.dice = case, home, dice
        self.kinds = [kind for kind in HARD_KINDS if kind in kinds]
        self.rng = dice.rng("pool")
        self.extras = {name: Extra(case, name, home, dice) for name in case.arrays()}
        self.shapes, self.results = self._operands()
        self.size = numpy_dtype(case.dtype).itemsize
        self.places, self.step = places_of(self.shapes, 0)
        self.out_places, self.out_step = places_of(self.results, FENCE)
        most = MOST_BYTES["cuda" if shared_on_device else "cpu"] // max(1, self.step + self.out_step)
        self.slots = int(max(1, min(most, MOST_SLOTS["cuda" if shared_on_device else "cpu"])))
        allocate = (lambda n, writable: DeviceRegion(n, home)) if shared_on_device else HostRegion
        self.inputs = allocate(self.slots * self.step, False)
        self.out = allocate(self.slots * self.out_step + FENCE, True)
        self.dealt: list[dict[str, Drawn]] = []
        self.hard: dict[int, list[HardHead]] = {}
        self.noted: dict[int, dict[str, Any]] = {}
        self.store = self._store()
        self.cold = cold
        self.sweep = empty_bytes(5 * home.cache_bytes, home) if cold else None
        self.window = 0
        self.filled = 0
        self.pattern: int | None = None
        self.out.raw[:] = NAN_BYTE

    # ---- for the workers ----

    def description(self, with_out: bool) -> tuple[list[dict], list[dict[str, list]], list[int]]:
        """(regions, slots, file descriptors) for ``calls.prepare``; baselines fill outputs of their own."""
        regions = [self.inputs] + ([self.out] if with_out else [])
        slots = []
        for i in range(self.slots):
            slot = {name: [0, i * self.step + self.places[name], nbytes_of(shape, dtype), list(shape), dtype]
                    for name, (shape, dtype) in self.shapes.items()}  # fmt: skip
            for name, (shape, dtype) in self.results.items():
                begin = FENCE + i * self.out_step + self.out_places[name]
                place = [1, begin] if with_out else [None, 0]
                slot[name] = [*place, nbytes_of(shape, dtype), list(shape), dtype]
            slots.append(slot)
        return [r.description() for r in regions], slots, [r.fd for r in regions if r.fd >= 0]

    # ---- before a sample ----

    def deal(self, calls: int) -> None:
        """Draws new inputs for slots 0 to `calls` - 1."""
        self.rng = rng = self.dice.rng("pool")
        self.filled, self.noted = calls, {}
        self._renew_store()
        # Odd places: rows of one window are never rows of another.
        self.window = (2 * int(rng.integers(PLACES // 2)) + 1) * self.size
        for extra in self.extras.values():
            extra.renew(rng)
        self.dealt = [{name: extra.draw(rng) for name, extra in self.extras.items()} for _ in range(calls)]
        self.hard = self._deal_hard(calls) if self.kinds else {}

    def reveal(self, first: int, count: int = 1) -> None:
        """Writes the inputs that were dealt to slots from `first` on."""
        begin, end = first * self.step, (first + count) * self.step
        self.inputs.raw[begin:end] = self.store[self.window + begin : self.window + end]
        for i in range(first, first + count):
            for name, extra in self.extras.items():
                extra.put(self.dealt[i][name], self._raw_input(i, name))
            for head in self.hard.get(i, ()):
                self._harden(i, head)
        self._complete(first, count)

    def refill(self, calls: int) -> None:
        """New inputs for slots 0 to `calls` - 1, in place."""
        self.deal(calls)
        self.reveal(0, calls)

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

    # ---- after a call ----

    def note(self, i: int) -> None:
        """Keeps a few words of the results of slot i, whose call has returned."""
        self.noted[i] = {}
        for name, (shape, dtype) in self.results.items():
            places = self.rng.integers(0, max(1, math.prod(shape)), NOTED)
            self.noted[i][name] = (places, self._words(i, name)[places])

    def _words(self, i: int, name: str) -> np.ndarray:
        """A result of a slot on the host, as whole numbers."""
        begin, nbytes = FENCE + i * self.out_step + self.out_places[name], nbytes_of(*self.results[name])
        return on_host(self.out.raw[begin : begin + nbytes]).view(f"u{self.size}")

    # ---- after a sample ----

    def look(self, max_abs: float, frobenius: float, hard_bounds: Mapping[str, float] | None = None) -> str | None:
        """The first fault of the results; None where nothing that was drawn has one. The bounds are those of the trials;
        `hard_bounds`: the largest errors that passed there, by kind of values."""
        if self.pattern is not None:
            for name in self.results:
                counts = self._unwritten(name)
                if counts.any():
                    i = int(counts.argmax())
                    return f"call {i + 1} of {self.filled}: {int(counts[i])} elements{self._of(name)} unwritten"
        for i, noted in self.noted.items():
            for name, (places, words) in noted.items():
                if (self._words(i, name)[places] != words).any():
                    return f"call {i + 1} of {self.filled}: the result{self._of(name)} changed after the call had returned"
        for i, heads in self.hard.items():
            for head in heads:
                if wrong := self._wrong_at(i, head, hard_bounds or {}):
                    return f"call {i + 1} of {self.filled}: {wrong} ({head.kind} inputs in a head)"
        count = LOOKS if self.step <= 1 << 24 else 1
        for i in self.rng.choice(self.filled, size=min(count, self.filled), replace=False).tolist():
            batch, head_kv = int(self.rng.integers(self.case.batch)), int(self.rng.integers(self.case.heads_kv))
            if self._hard_head(i, batch, head_kv):
                continue
            for name, (error, norm, largest, finite) in self._compare(i, batch, head_kv).items():
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
        self.inputs.close()
        self.out.close()

    # ---- inside ----

    def _operands(self) -> tuple[dict[str, tuple], dict[str, tuple]]:
        """({input that each call has anew: (shape, dtype)}, {output: (shape, dtype)})."""
        case = self.case
        shapes = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape, "out": case.out_shape}
        every = {name: (shape, case.dtype) for name, shape in shapes.items()}
        extras = {name: (extra.shape, extra.dtype) for name, extra in self.extras.items()}
        return {name: every[name] for name in TIMED} | extras, {"out": every["out"]}

    def _complete(self, first: int, count: int) -> None:
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

    def _deal_hard(self, calls: int) -> dict[int, list[HardHead]]:
        """Draws the heads of a sample that are hard: at most half of all; of a single one in every other sample."""
        every = calls * self.case.batch * self.case.heads_kv
        count = min(HARD_HEADS, every // 2) if every > 1 else int(self.rng.integers(2))
        found: dict[int, list[HardHead]] = {}
        for place in self.rng.choice(every, count, replace=False).tolist():
            rest, head_kv = divmod(place, self.case.heads_kv)
            i, batch = divmod(rest, self.case.batch)
            found.setdefault(i, []).append(HardHead(batch, head_kv, self.kinds[int(self.rng.integers(len(self.kinds)))]))
        return found

    def _hard_head(self, i: int, batch: int, head_kv: int) -> HardHead | None:
        return next((x for x in self.hard.get(i, ()) if (x.batch, x.head_kv) == (batch, head_kv)), None)

    def _harden(self, i: int, head: HardHead) -> None:
        """Makes the random numbers of a head what its kind of values wants, in the slot and in the judge's copy."""
        case = self.case
        group = case.heads // case.heads_kv
        queries = range(head.head_kv * group, (head.head_kv + 1) * group)
        drawn = {"q": [self._input(i, "q", head.batch, h) for h in queries]}
        drawn |= {name: [self._input(i, name, head.batch, head.head_kv)] for name in "kv"}
        whole = {name: np.concatenate(heads, axis=1).astype(np.float32) for name, heads in drawn.items()}
        one = dataclasses.replace(case, batch=1, heads=group, heads_kv=1, values=head.kind, dtype="float32")  # small enough to judge
        for name, array in zip("qkv", dense.bent(one, *whole.values(), self.rng), strict=True):
            bent = np.ascontiguousarray(array.astype(numpy_dtype(case.dtype)))
            for n, h in enumerate(queries if name == "q" else [head.head_kv]):
                self._put_head(i, name, head.batch, h, bent[0, n])
            head.arrays[name] = bent

    def _put_head(self, i: int, name: str, batch: int, head: int, values: np.ndarray) -> None:
        """Writes one head (S, D) of an input of a slot."""
        shape = self.shapes[name][0]
        raw = self._raw_input(i, name).reshape(*shape[:-1], shape[-1] * self.size)
        place = raw[batch, :, head] if self.case.layout == "bshd" else raw[batch, head]
        data: Any = values.view(np.uint8)
        if self.home.kind == "cuda":
            data = self.home.torch.from_numpy(data).cuda() if self.home.torch else self.home.cupy.asarray(data)
        place[...] = data

    def _raw_input(self, i: int, name: str) -> Any:
        """The bytes of an input of a slot, as workers see it."""
        begin = i * self.step + self.places[name]
        return self.inputs.raw[begin : begin + nbytes_of(*self.shapes[name])]

    def _drawn_rows(self) -> np.ndarray:
        """A few queries, the last one among them."""
        return np.unique([*self.rng.integers(0, self.case.seq_q, ROWS), self.case.seq_q - 1])

    def _compare(self, i: int, batch: int, head_kv: int) -> dict[str, tuple[float, float, float, bool]]:
        """{output: (norm of the error, norm of the reference, largest error, all finite)} of drawn queries of a head that
        belongs to that kv head."""
        got, truth, _ = self._rows_of(i, batch, head_kv, with_plain=False)
        return {"out": errors_of(got[0, 0].astype(np.float64), truth[0][0, 0])}

    def _wrong_at(self, i: int, head: HardHead, bounds: Mapping[str, float]) -> str | None:
        """The fault of drawn queries of a hard head, by the rule of the trials."""
        from fa_ext.judge import OTHER_ORDER, judge

        report = judge(*self._rows_of(i, head.batch, head.head_kv), self.case.dtype, slack=OTHER_ORDER)
        return None if report.passed else f"off by {report.max_abs:.3g} from float64 of its new inputs: {report.failures[0]}"

    def _rows_of(self, i: int, batch: int, head_kv: int, with_plain: bool = True) -> tuple[Any, ...]:
        """Drawn queries of a drawn head of a kv head, each (1, 1, rows, D): (result, None, (reference, its LSE), plain)."""
        from fa_ext import reference

        case, group = self.case, self.case.heads // self.case.heads_kv
        head, rows = head_kv * group + int(self.rng.integers(group)), self._drawn_rows()
        inputs = [self._input(i, name, batch, h) for name, h in (("q", head), ("k", head_kv), ("v", head_kv))]
        extras = {name: extra.of_head(self.dealt[i][name], batch, head) for name, extra in self.extras.items()}
        options: dict[str, Any] = {name: value for name, value in case.options().items() if name != "layout"}
        options |= {**extras, "rows": rows}
        truth = reference.attention(*inputs, **options)
        got = head_of(self._result(i, "out"), case.layout, batch, head)[:, :, rows]
        if not with_plain:
            return got, truth, None
        return got, None, truth, reference.plain(*inputs, **options, dtype=case.dtype)

    def _input(self, i: int, name: str, batch: int, head: int) -> np.ndarray:
        """One head of an input of a slot as (1, 1, S, D), from the judge's own copy."""
        group = self.case.heads // self.case.heads_kv if name == "q" else 1
        if (hard := self._hard_head(i, batch, head // group)) and name in hard.arrays:
            return hard.arrays[name][:, head % group : head % group + 1]
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
        fill_normal(raw, self.case.dtype, self.home, self.dice.number("store"))


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
    return (float(np.linalg.norm(error)), float(np.linalg.norm(truth)), float(error.max()) if error.size else 0.0, bool(np.isfinite(got).all()))


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
