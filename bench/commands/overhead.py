"""What a call costs on the host: ``fa_ext.attention`` on tiny arrays, beside torch's SDPA and floors.

Bursts of calls from an empty queue at B1 H8 S64 D64 float16; the time until the last call of a burst has returned,
divided by the calls; the median of the bursts. The floors: "bare launch" is the same call prepared once and launched
again and again from C; "torch empty" is torch making (and dropping) an array like the result; "autograd forward" and
"autograd backward" are an ``autograd.Function`` that takes, keeps and returns as many tensors as that of ``fa_ext.torch``
and computes nothing; "jax nothing" is a jitted custom call of the same operands and results whose handler does nothing.
``measure()`` returns microseconds by subject, for those libraries that are installed. ``python -m bench overhead`` prints them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

SHAPE = (1, 8, 64, 64)  # (B, H, S, D), float16
CALLS = 500
BURSTS = 20

#: subject -> bar in microseconds
BARS = {"torch out=": 3.0, "torch": 4.0, "cupy out=": 6.0, "cupy": 8.0}
#: subject -> (floor, bar in microseconds above it); where a subject has both bars, one of them is enough
ABOVE = {
    "torch out=": ("bare launch", 1.0),
    "torch forward": ("autograd forward", 8.0),
    "torch backward": ("autograd backward", 10.0),
    "jax jit": ("jax nothing", 3.0),
}


def _timed(burst: Callable[[list[None]], None]) -> Callable[[int], float]:
    """Host microseconds a call, of a function that makes one call for each item of a list."""

    def time_burst(calls: int) -> float:
        repeats = [None] * calls
        begun = time.perf_counter_ns()
        burst(repeats)
        return (time.perf_counter_ns() - begun) / calls / 1000

    return time_burst


def _medians(
    subjects: dict[str, Callable[[int], float]], synchronize: Callable[[], None], calls: int, bursts: int
) -> dict[str, float]:
    """Medians over bursts, each from an empty queue. The subjects take turns, so that drift meets all of them alike."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(bursts + 3):
        for name, subject in subjects.items():
            synchronize()
            figures[name].append(subject(calls))
    synchronize()
    return {name: statistics.median(values[3:]) for name, values in figures.items()}


def _attention(library: str, q, k, v, out) -> dict[str, Callable[[int], float]]:
    """Calls with and without ``out``, spelt out in their loops: passing arguments on would be timed too."""
    import fa_ext

    attention = fa_ext.attention

    def into(repeats):
        for _ in repeats:
            attention(q, k, v, out=out)

    def new(repeats):
        for _ in repeats:
            attention(q, k, v)

    return {f"{library} out=": _timed(into), library: _timed(new)}


def _torch(calls: int, bursts: int) -> dict[str, float]:
    import torch

    import fa_ext

    time_launches, empty_like = fa_ext._core.time_launches, torch.empty_like
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)

    def peer(repeats):
        for _ in repeats:
            sdpa(q, k, v)

    def empty(repeats):
        for _ in repeats:
            empty_like(q)

    subjects = _attention("torch", q, k, v, out) | {
        "torch SDPA": _timed(peer),
        "torch empty": _timed(empty),
        "bare launch": lambda count: 1e6 * time_launches(count, q, k, v, out=out),
    }
    with torch.no_grad():
        return _medians(subjects, torch.cuda.synchronize, calls, bursts)


def _torch_gradients(calls: int, bursts: int) -> dict[str, float]:
    import torch

    import fa_ext.torch

    class Nothing(torch.autograd.Function):
        """Takes q, k, v and six more arguments, keeps five tensors, returns two: as ``fa_ext.torch`` does."""

        @staticmethod
        def forward(ctx, q, k, v, *others):
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), *(None,) * 6

    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    forwards = {"torch": lambda: fa_ext.torch.attention(q, k, v), "autograd": lambda: Nothing.apply(q, k, v, *(None,) * 6)[0]}
    gradients = torch.autograd.grad

    def forward(call):
        return _timed(lambda repeats: [call() for _ in repeats])

    def backward(call):
        def time_burst(count: int) -> float:
            made = [call() for _ in range(count)]
            torch.cuda.synchronize()
            return _timed(lambda repeats: [gradients(out, (q, k, v), dout) for out in made])(count)

        return time_burst

    subjects = {f"{name} forward": forward(call) for name, call in forwards.items()}
    subjects |= {f"{name} backward": backward(call) for name, call in forwards.items()}
    return _medians(subjects, torch.cuda.synchronize, calls // 5, bursts)


def _jax(calls: int, bursts: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    import fa_ext.jax

    if jax.default_backend() != "gpu":
        return {}
    jax.ffi.register_ffi_target("fa_ext_nothing", fa_ext._core.xla_nothing, platform="CUDA")
    q, k, v = (jax.random.normal(key, SHAPE, jnp.float16) for key in jax.random.split(jax.random.key(0), 3))
    types = [jax.ShapeDtypeStruct(SHAPE, jnp.float16), jax.ShapeDtypeStruct((0,), jnp.uint8)]
    nothing = jax.jit(lambda q, k, v: jax.ffi.ffi_call("fa_ext_nothing", types)(q, k, v)[0])
    attention = jax.jit(lambda q, k, v: fa_ext.jax.attention(q, k, v))

    def burst(call):
        return _timed(lambda repeats: [call(q, k, v) for _ in repeats])

    subjects = {"jax jit": burst(attention), "jax nothing": burst(nothing)}
    return _medians(subjects, lambda: (attention(q, k, v).block_until_ready(), nothing(q, k, v).block_until_ready()), calls // 5, bursts)


def _cupy(calls: int, bursts: int) -> dict[str, float]:
    import cupy

    random = cupy.random.default_rng(0)
    q, k, v = (random.standard_normal(SHAPE, dtype="float32").astype("float16") for _ in range(3))
    wait = cupy.cuda.get_current_stream().synchronize
    return _medians(_attention("cupy", q, k, v, cupy.empty_like(q)), wait, calls, bursts)


@contextlib.contextmanager
def _forced(kernel: str | None) -> Iterator[None]:
    before = os.environ.get("FA_EXT_KERNEL")
    if kernel:
        os.environ["FA_EXT_KERNEL"] = kernel
    try:
        yield
    finally:
        if kernel:
            os.environ.pop("FA_EXT_KERNEL")
            if before is not None:
                os.environ["FA_EXT_KERNEL"] = before


def measure(calls: int = CALLS, bursts: int = BURSTS, kernel: str | None = None) -> dict[str, object]:
    """Microseconds a call by subject, the bars, and whether each holds. The garbage collector rests meanwhile.

    ``kernel`` is the one to force; None leaves the choice to the library.
    """
    figures: dict[str, float] = {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _forced(kernel):
            for name, subject in (("torch", _torch), ("cupy", _cupy), ("torch", _torch_gradients), ("jax", _jax)):
                if importlib.util.find_spec(name):
                    figures |= subject(calls, bursts)
    finally:
        if collecting:
            gc.enable()
    held = {name: figures[name] < bar for name, bar in BARS.items() if name in figures}
    for name, (floor, bar) in ABOVE.items():
        if name in figures:
            held[name] = held.get(name, False) or figures[name] <= figures[floor] + bar
    return {
        "shape": SHAPE,
        "dtype": "float16",
        "calls": calls,
        "bursts": bursts,
        "kernel": kernel,
        "microseconds": figures,
        "bars": BARS,
        "above": ABOVE,
        "held": held,
    }


SUMMARY = "host time of a call on tiny arrays, beside torch's"


def add_arguments(parser) -> None:
    parser.add_argument("--kernel", help="the kernel to force (default: the library's choice)")


def run(args) -> int:
    """``python -m bench overhead``: exit status 1 when a bar is missed."""
    from bench import report
    from bench.machine import device

    if not device.has_gpu():
        raise report.UsageError("needs a GPU: the figures are those of device arrays")
    result = measure(kernel=args.kernel)
    if args.json:
        report.print_json(result)
    else:
        held = result["held"]
        above = {name: f"{floor} + {bar:g}" for name, (floor, bar) in ABOVE.items()}
        rows = [[name, us, BARS.get(name), above.get(name), {True: "yes", False: "NO"}.get(held.get(name))]
                for name, us in result["microseconds"].items()]  # fmt: skip
        report.table(f"microseconds a call, {SHAPE} float16", ("call", "us", "bar", "or", "held"), rows)
    return 0 if all(result["held"].values()) else 1


def main(arguments: list[str]) -> int:
    """Prints the figures as JSON; an argument forces a kernel."""
    result = measure(kernel=arguments[0] if arguments else None)
    print(json.dumps(result, indent=2))
    return 0 if all(result["held"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
