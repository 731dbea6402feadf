"""The cost of a call on the host: ``fa_ext.attention`` on tiny arrays, beside torch's SDPA and floors.

Bursts of calls from an empty queue at B1 H8 S64 D64 float16; the time until the last call of a burst has returned,
divided by the calls; the median of the bursts. The floors: "bare launch" is the same call prepared once and launched
again and again from C; "torch empty" is torch making (and dropping) an array like the result; "autograd forward" and
"autograd backward" are an ``autograd.Function`` that takes, keeps and returns as many tensors as that of ``fa_ext.torch``
and computes nothing; "jax nothing" is a jitted custom call of the same operands and results whose handler does nothing.
"gradients" and "gradients grads=" are ``fa_ext.attention_backward`` by itself: what of "torch backward" is not autograd's.
"torch paged out=" and "torch append" are what a decoder calls for each token, of 64 keys in pages of 16. "torch step" is forward and
backward together, causal, and "torch packed step" the same of one packed sequence.
``measure()`` returns microseconds by subject, for those libraries that are installed, and beside the median the least of
the bursts and the load of the machine before them: on one that does other work the two differ, and neither says what a call
costs on an idle one. ``python -m bench overhead`` prints them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

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
    "torch packed step": ("torch step", 3.0),
    "jax jit": ("jax nothing", 3.0),
}
#: subject -> (peer, bar as a share of the peer's time)
SHARES = {"torch paged out=": ("torch SDPA", 0.27), "torch append": ("torch SDPA", 0.27)}


def _timed(burst: Callable[[list[None]], object]) -> Callable[[int], float]:
    """Host microseconds a call, of a function that makes one call for each item of a list. What it returns, such as graphs of
    autograd, is taken apart when the clock has been read."""

    def time_burst(calls: int) -> float:
        repeats = [None] * calls
        begun = time.perf_counter_ns()
        made = burst(repeats)
        ended = time.perf_counter_ns()
        del made
        return (ended - begun) / calls / 1000

    return time_burst


def _bursts(subjects: dict[str, Callable[[int], float]], synchronize: Callable[[], None], calls: int, bursts: int) -> dict[str, list[float]]:
    """Bursts of each subject, each from an empty queue. Each round has one of every subject, so that drift meets all of them alike."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(bursts + 3):
        for name, subject in subjects.items():
            synchronize()
            figures[name].append(subject(calls))
    synchronize()
    return {name: values[3:] for name, values in figures.items()}


def _each(statement: str, **names: Any) -> Callable[[int], float]:
    """Bursts of a statement, spelt out in their loop, with what it names as local variables: passing arguments on would be timed too."""
    exec(f"def burst(repeats, {', '.join(f'{name}={name}' for name in names)}):\n    for _ in repeats:\n        {statement}", names)
    return _timed(names["burst"])


def _attention(library: str, q, k, v, out) -> dict[str, Callable[[int], float]]:
    """Calls with and without ``out``."""
    import fa_ext

    given = {"attention": fa_ext.attention, "q": q, "k": k, "v": v}
    return {f"{library} out=": _each("attention(q, k, v, out=out)", **given, out=out), library: _each("attention(q, k, v)", **given)}


def _torch(calls: int, bursts: int) -> dict[str, list[float]]:
    import torch

    import fa_ext

    time_launches, sdpa = fa_ext._core.time_launches, torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    subjects = _attention("torch", q, k, v, out) | ({} if os.environ.get("FA_EXT_KERNEL") else _decoding()) | {
        "torch SDPA": _each("sdpa(q, k, v)", sdpa=sdpa, q=q, k=k, v=v),
        "torch empty": _each("empty_like(q)", empty_like=torch.empty_like, q=q),
        "bare launch": lambda count: 1e6 * time_launches(count, q, k, v, out=out),
    }
    with torch.no_grad():
        return _bursts(subjects, torch.cuda.synchronize, calls, bursts)


def _decoding() -> dict[str, Callable[[int], float]]:
    """A decoder's two calls of a layer: one token appended to a paged cache, and one query on what is there."""
    import torch

    import fa_ext

    _, heads, keys, head_dim = SHAPE
    caches = [torch.randn((keys // 16, 16, heads, head_dim), device="cuda", dtype=torch.float16) for _ in range(2)]
    q, k, v, out = (torch.randn((1, heads, head_dim), device="cuda", dtype=torch.float16) for _ in range(4))
    given = {"caches": caches, "table": torch.arange(keys // 16, device="cuda", dtype=torch.int32)[None],
             "lengths": torch.full((1,), keys, device="cuda", dtype=torch.int32)}  # fmt: skip
    stored = 'layout="bshd", page_table=table, seqlens_k=lengths'
    return {
        "torch paged out=": _each(f'attention(q, *caches, causal="bottom_right", {stored}, out=out)', attention=fa_ext.attention, q=q, out=out, **given),
        "torch append": _each(f"append(*caches, k, v, {stored})", append=fa_ext.append, k=k, v=v, **given),
    }


def _gradients(q, k, v, dout) -> dict[str, Callable[[int], float]]:
    """``attention_backward`` by itself, with new results and into old ones."""
    import fa_ext

    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    given = {"backward": fa_ext.attention_backward, "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    grads = fa_ext.attention_backward(dout, q, k, v, out, lse)
    return {"gradients grads=": _each("backward(dout, q, k, v, out, lse, deterministic=False, grads=grads)", **given, grads=grads),
            "gradients": _each("backward(dout, q, k, v, out, lse, deterministic=False)", **given)}  # fmt: skip


def _torch_gradients(calls: int, bursts: int) -> dict[str, list[float]]:
    import torch

    import fa_ext.torch

    class Nothing(torch.autograd.Function):
        """Takes q, k, v and one more argument, keeps five tensors, returns one: as ``fa_ext.torch`` does."""

        @staticmethod
        def forward(ctx, q, k, v, options):
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    forwards = {"torch": lambda: fa_ext.torch.attention(q, k, v), "autograd": lambda: Nothing.apply(q, k, v, None)}
    gradients = torch.autograd.grad

    def forward(call):
        return _timed(lambda repeats: [call() for _ in repeats])

    def backward(call):
        def time_burst(count: int) -> float:
            made = [call() for _ in range(count)]
            torch.cuda.synchronize()
            return _timed(lambda repeats: [gradients(out, (q, k, v), dout) for out in made])(count)

        return time_burst

    def step(call, inputs, dout):
        return _timed(lambda repeats: [gradients(call(), inputs, dout) for _ in repeats])

    packed = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    starts = torch.tensor([0, SHAPE[2]], device="cuda", dtype=torch.int32)
    where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": "bottom_right"}
    subjects = {f"{name} forward": forward(call) for name, call in forwards.items()}
    subjects |= {f"{name} backward": backward(call) for name, call in forwards.items()}
    subjects |= _gradients(q.detach(), k.detach(), v.detach(), dout)
    subjects["torch step"] = step(lambda: fa_ext.torch.attention(q, k, v, causal=True), (q, k, v), dout)
    subjects["torch packed step"] = step(lambda: fa_ext.torch.attention(*packed, **where), packed, dout[0].transpose(0, 1).contiguous())
    return _bursts(subjects, torch.cuda.synchronize, calls // 5, bursts)


def _jax(calls: int, bursts: int) -> dict[str, list[float]]:
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
    return _bursts(subjects, lambda: (attention(q, k, v).block_until_ready(), nothing(q, k, v).block_until_ready()), calls // 5, bursts)


def _cupy(calls: int, bursts: int) -> dict[str, list[float]]:
    import cupy

    random = cupy.random.default_rng(0)
    q, k, v = (random.standard_normal(SHAPE, dtype="float32").astype("float16") for _ in range(3))
    wait = cupy.cuda.get_current_stream().synchronize
    return _bursts(_attention("cupy", q, k, v, cupy.empty_like(q)), wait, calls, bursts)


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
    taken: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _forced(kernel):
            for name, subject in (("torch", _torch), ("cupy", _cupy), ("torch", _torch_gradients), ("jax", _jax)):
                if importlib.util.find_spec(name):
                    taken |= subject(calls, bursts)
    finally:
        if collecting:
            gc.enable()
    figures = {name: statistics.median(values) for name, values in taken.items()}
    held = {name: figures[name] < bar for name, bar in BARS.items() if name in figures}
    for name, (floor, bar) in ABOVE.items():
        if name in figures:
            held[name] = held.get(name, False) or figures[name] <= figures[floor] + bar
    for name, (peer, bar) in SHARES.items():
        if name in figures:
            held[name] = figures[name] <= bar * figures[peer]
    return {
        "shape": SHAPE, "dtype": "float16", "calls": calls, "bursts": bursts, "kernel": kernel, "load": load,
        "microseconds": figures, "least": {name: min(values) for name, values in taken.items()}, "bars": BARS, "above": ABOVE,
        "shares": SHARES, "held": held,
    }  # fmt: skip


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
        above |= {name: f"{bar:g} of {peer}" for name, (peer, bar) in SHARES.items()}
        rows = [[name, us, result["least"][name], BARS.get(name), above.get(name), {True: "yes", False: "NO"}.get(held.get(name))]
                for name, us in result["microseconds"].items()]  # fmt: skip
        report.table(f"microseconds a call, {SHAPE} float16", ("call", "us", "least", "bar", "or", "held"), rows)
    return 0 if all(result["held"].values()) else 1
