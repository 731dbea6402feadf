"""Index arrays that change while calls read them, in memory that nothing else adjoins.

``python -m tests.contract.changing KERNEL SECONDS [LIBRARY]`` calls a kernel on the CPU, or a build of the emulator, on every case of
`cases`, each for so many seconds. What reaches outside an array ends the process: each array lies at the end of memory of its
own, between pages that nobody may touch. `run_on_a_device` does the same on a GPU, where copies of another stream change them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from pathlib import Path

import numpy as np

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16
from bench.problems.serving_cases import append_call
from bench.problems.stored import INT_MAX, INT_MIN
from tests import emulator
from tests.contract import gradients, runner, segments
from tests.emulator.emulated import on_the_cpu

#: Arguments whose contents say where something lies.
INDICES = ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "positions", "slots", "k_range",
           "segments", "ids")  # fmt: skip

_LONG = dict(n_q=(1, 40, 0, 17, 3), n_k=(200, 97, 40, 64, 130), head_dim=64, causal="bottom_right")
FORWARD = {
    "packed and paged": Case.sequences(**_LONG, page_size=16, k_range=True),
    "positions": Case.sequences(**_LONG, page_size=1, positions="shifted", window=(50, 0)),
    "padded": Case.sequences(**_LONG, q="padded", k="padded", layout="bhsd", k_range=True),
    "padded and paged": Case.sequences(**_LONG, q="padded", page_size=64, positions="random"),
    "packed": Case.sequences(**_LONG, k="packed", window=(30, 5)),
    "one query each": Case.sequences((1,) * 8, (320, 33, 1, 129, 64, 300, 0, 250), heads=8, head_dim=64, q="one", page_size=16),
    "one with a position": Case.sequences((1,) * 8, (320, 33, 1, 129, 64, 300, 0, 250), heads=8, head_dim=64, q="one", page_size=24,
                                       positions="shifted", window=(90, 0), causal="bottom_right"),
    "many keys": Case.sequences((4, 1), (1500, 1100), head_dim=64, causal="bottom_right"),
    "many sequences": Case.sequences((1, 3) * 300, (5, 20) * 300, 2, 1, 64, k="packed", causal="bottom_right"),
}  # fmt: skip
_TRAINED = dict(n_q=(1, 40, 0, 17, 3), n_k=(70, 97, 40, 64, 30), head_dim=64, causal="bottom_right", operation="backward", dlse=True)
BACKWARD = {
    "packed": Case.sequences(**_TRAINED, k="packed", window=(30, 5), sinks=True),
    "padded": Case.sequences(**_TRAINED, q="padded", k="padded", layout="bhsd", k_range=True),
    "positions": Case.sequences(**_TRAINED, k="packed", positions="shifted", window=(50, 0)),
}


def append_calls(dtype: str) -> dict[str, dict]:
    """Calls of append by every way to say where tokens go."""
    case = Case.sequences((2, 3, 1, 40), (20, 40, 9, 70), head_dim=64, dtype=dtype)
    turned = dict(rotary=8, q=True, positions=True)
    padded = Case.sequences((2, 3, 1, 7), (20, 40, 9, 17), head_dim=64, dtype=dtype, q="padded", k="padded")
    found = {"paged": append_call(case, **turned), "padded": append_call(padded, **turned, dense=True)}
    for kind in (np.int32, np.int64):
        call = append_call(case, **turned)
        pages, size = call["k_cache"].shape[:2]
        slots = np.random.default_rng(0).permutation(pages * size)[: len(call["k"]) - 2].astype(kind)
        kept = {name: x for name, x in call.items() if name not in ("page_table", "seqlens_k", "cu_seqlens_q")}
        found[f"slots of {kind.__name__}"] = kept | {"slots": slots}
    return found


def with_segments(arguments):
    """The arguments of a call of padded arrays, and ids of their queries and keys."""
    rng, axis = np.random.default_rng(3), 1 if arguments["layout"] == "bshd" else 2
    return arguments | {"segments": tuple(rng.integers(0, 3, (arguments[x].shape[0], arguments[x].shape[axis])).astype(np.int32) for x in "qk")}


def cases(kernel: str, dtypes=("float16", *(["bfloat16"] if BFLOAT16 else []))):
    """(name, function of fa_ext, arguments) of every call that the kernel takes."""
    if runner.listed_name(kernel).endswith("documents"):
        ids = np.random.default_rng(2).integers(0, 2, (3, 5000))
        yield from ((f"{kind.__name__}", fa_ext.documents, {"ids": ids.astype(kind), "count": ids.size}) for kind in (np.int32, np.int64))
        return
    for dtype in dtypes:
        if runner.listed_name(kernel).endswith("append"):
            yield from ((f"{name}, {dtype}", fa_ext.append, call) for name, call in append_calls(dtype).items())
            continue
        if "backward" in runner.listed_name(kernel):
            for name, case in BACKWARD.items():
                if gradients.takes_sequences(kernel, case.changed(dtype=dtype)):
                    arguments = gradients.make(case.changed(dtype=dtype)).inputs
                    yield f"{name}, {dtype}", fa_ext.attention_backward, arguments
                    if name == "padded" and runner.listed_name(kernel) in segments.TAKES:
                        yield f"segments, {dtype}", fa_ext.attention_backward, with_segments(arguments)
            continue
        for name, case in FORWARD.items():
            arguments = case.changed(dtype=dtype).host_inputs()
            if runner.takes(kernel, **arguments):
                yield f"{name}, {dtype}", fa_ext.attention, arguments
                if name == "padded" and runner.listed_name(kernel) in segments.TAKES:
                    yield f"segments, {dtype}", fa_ext.attention, with_segments(arguments)


def mapped_over(function, arguments):
    """The arguments with ``function(name, array)`` in place of every array."""

    def placed(name, x):
        if isinstance(x, tuple):
            return tuple(placed(name, part) for part in x)
        return function(name, x) if hasattr(x, "dtype") else x

    return {name: placed(name, x) for name, x in arguments.items()}


class Changer(threading.Thread):
    """Writes valid and wild contents into arrays, over and over, until it is stopped; then they are what they were."""

    def __init__(self, arrays):
        super().__init__(daemon=True)
        self.turns = [(x, self.contents(x)) for x in arrays]
        self.stopping = threading.Event()

    @staticmethod
    def contents(x):
        rng = np.random.default_rng(5)
        wild = np.array([INT_MIN, INT_MAX, -1, -7, 0, 1 << 20, 1 << 30, *range(1, 60)], x.dtype)
        found = [x.copy(), np.full_like(x, -1), x.copy(), np.zeros_like(x), x.copy(), np.full_like(x, INT_MAX)]
        for share in (0.05, 0.3, 1.0):
            for _ in range(4):
                found += [np.where(rng.random(x.shape) < share, rng.choice(wild, x.shape), x).astype(x.dtype), x.copy()]
        return found

    def write(self, turn):
        for n, (x, contents) in enumerate(self.turns):
            np.copyto(x, contents[turn * (2 * n + 1) % len(contents)])

    def run(self):
        turn = 0
        while not self.stopping.is_set():
            self.write(turn := turn + 1)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.join()
        self.write(0)


class DeviceChanger(Changer):
    """The same of tensors on a device, by copies of a stream of its own."""

    def __init__(self, tensors):
        import torch

        super().__init__([])
        self.stream = torch.cuda.Stream()
        self.turns = [(x, [torch.from_numpy(y).pin_memory() for y in self.contents(x.cpu().numpy())]) for x in tensors]

    def write(self, turn):
        import torch

        with torch.cuda.stream(self.stream):
            for n, (x, contents) in enumerate(self.turns):
                x.copy_(contents[turn * (2 * n + 1) % len(contents)], non_blocking=True)
        self.stream.synchronize()


class Fenced:
    """Arrays at the end of memory of their own, between pages that nobody may touch."""

    def __init__(self, room=1 << 20):
        self.room, self.kept = room, []
        self.protect = ctypes.CDLL(None, use_errno=True).mprotect
        self.protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def array(self, x):
        pages = -(-max(x.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, pages + 2 * self.room)
        whole = np.frombuffer(memory, np.uint8)
        for at in (0, self.room + pages):
            if self.protect(whole.ctypes.data + at, self.room, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        end = self.room + pages
        made = whole[end - x.nbytes : end].view(x.dtype).reshape(x.shape)
        made[...] = x
        self.kept.append(memory)
        return made


def outputs(arguments):
    """out, and lse where there is one, of a call; or its gradients."""
    q, v = arguments.get("q"), arguments.get("v")
    if "ids" in arguments:
        return {"out": np.zeros(arguments["count"] + 1, np.int32)}
    if "dout" in arguments:
        return {"grads": tuple(np.zeros_like(arguments[name]) for name in "qkv")}
    if "k_cache" in arguments:
        return {"out": np.zeros_like(q)}
    heads_first = q.ndim == 4 and arguments["layout"] != "bshd"
    shape = q.shape[1::-1] if q.ndim == 3 else q.shape[:3] if heads_first else (q.shape[0], q.shape[2], q.shape[1])
    return {"out": (np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), np.zeros(shape, np.float32))}


def index_arrays(arguments):
    """The arrays of indices among arguments."""
    found = []
    mapped_over(lambda name, x: found.append(x) if name in INDICES else None, arguments)
    return found


def run(kernel: str, seconds: float, **chosen) -> None:
    for name, function, arguments in cases(kernel, **chosen):
        fenced = Fenced()
        call = mapped_over(lambda _, x: fenced.array(x), arguments | outputs(arguments))
        keep_calling(name, lambda **options: function(**call, **options, kernel=kernel), Changer(index_arrays(call)), seconds)


def run_on_a_device(kernel: str, seconds: float) -> None:
    import torch

    for name, function, arguments in cases(kernel):
        call = mapped_over(lambda _, x: torch.from_numpy(x.view("i2") if x.dtype == BFLOAT16 else x.copy()).cuda(), arguments)
        if "bfloat16" in name:
            call = {key: x.view(torch.bfloat16) if getattr(x, "dtype", None) == torch.int16 else x for key, x in call.items()}
        keep_calling(name, lambda **options: function(**call, **options, kernel=kernel), DeviceChanger(index_arrays(call)), seconds)


def keep_calling(name, call, changer, seconds):
    """Calls while a changer is at work, without and with a check; after that a call has the bits of one before."""

    def result(**options):
        found = call(**options)
        return [runner.to_host(x).tobytes() for x in (found if isinstance(found, tuple) else (found,))]

    before = result()
    with changer:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call(check=False)
            try:
                result(check=True)
            except ValueError as error:
                assert "such in all" in str(error) or "documents" in str(error), error
    assert result() == before, f"{name}: another result after the changes"


if __name__ == "__main__":
    if len(sys.argv) > 3:
        emulated = emulator.load(Path(sys.argv[3]), sys.argv[1])
        with on_the_cpu(lambda: [emulated]):
            run(emulated, float(sys.argv[2]), dtypes=("float16",))
    else:
        run(sys.argv[1], float(sys.argv[2]))
