"""What a call costs on the host: ``fa_ext.attention`` on tiny arrays, beside torch's SDPA and a bare launch.

Bursts of calls from an empty queue at B1 H8 S64 D64 float16; the time until the last call of a burst has returned,
divided by the calls; the median of the bursts. ``measure()`` returns microseconds by subject, for those libraries that
are installed. ``python -m bench.overhead`` prints them.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable

SHAPE = (1, 8, 64, 64)  # (B, H, S, D), float16
CALLS = 500
BURSTS = 20

#: subject -> bar in microseconds
BARS = {"torch out=": 3.0, "torch": 4.0, "cupy out=": 6.0, "cupy": 8.0}
#: or, for torch with out=, this much above a bare launch
ABOVE_BARE = 1.0


def _burst(call: Callable[[], object], synchronize: Callable[[], None], calls: int) -> float:
    """Host microseconds a call."""
    repeats = [None] * calls
    synchronize()
    begun = time.perf_counter_ns()
    for _ in repeats:
        call()
    ended = time.perf_counter_ns()
    synchronize()
    return (ended - begun) / calls / 1000


def _median(call: Callable[[], object], synchronize: Callable[[], None], calls: int, bursts: int) -> float:
    for _ in range(3):
        _burst(call, synchronize, calls)
    return statistics.median(_burst(call, synchronize, calls) for _ in range(bursts))


def _torch(calls: int, bursts: int, kernel: str | None) -> dict[str, float]:
    import torch

    import fa_ext

    attention, core = fa_ext.attention, fa_ext._core
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wait = torch.cuda.synchronize
    options = {"kernel": kernel} if kernel else {}
    figures = {
        "torch out=": _median(lambda: attention(q, k, v, out=out, **options), wait, calls, bursts),
        "torch": _median(lambda: attention(q, k, v, **options), wait, calls, bursts),
    }
    with torch.no_grad():
        figures["torch SDPA"] = _median(lambda: sdpa(q, k, v), wait, calls, bursts)
    figures["bare launch"] = statistics.median(
        1e6 * core.time_launches(calls, q, k, v, out=out, **options) for _ in range(bursts)
    )
    figures["empty Python call"] = _median(lambda: None, wait, calls, bursts)
    return figures


def _cupy(calls: int, bursts: int, kernel: str | None) -> dict[str, float]:
    import cupy

    import fa_ext

    attention = fa_ext.attention
    random = cupy.random.default_rng(0)
    q, k, v = (random.standard_normal(SHAPE, dtype="float32").astype("float16") for _ in range(3))
    out = cupy.empty_like(q)
    wait = cupy.cuda.get_current_stream().synchronize
    options = {"kernel": kernel} if kernel else {}
    return {
        "cupy out=": _median(lambda: attention(q, k, v, out=out, **options), wait, calls, bursts),
        "cupy": _median(lambda: attention(q, k, v, **options), wait, calls, bursts),
    }


def measure(calls: int = CALLS, bursts: int = BURSTS, kernel: str | None = None) -> dict[str, object]:
    """Microseconds a call by subject, the bars, and whether each holds. The garbage collector rests meanwhile."""
    figures: dict[str, float] = {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for name, subject in (("torch", _torch), ("cupy", _cupy)):
            if importlib.util.find_spec(name):
                figures |= subject(calls, bursts, kernel)
    finally:
        if collecting:
            gc.enable()
    held = {name: figures[name] < bar for name, bar in BARS.items() if name in figures}
    if "torch out=" in held and figures["torch out="] < figures["bare launch"] + ABOVE_BARE:
        held["torch out="] = True
    return {
        "shape": SHAPE,
        "dtype": "float16",
        "calls": calls,
        "bursts": bursts,
        "kernel": kernel,
        "microseconds": figures,
        "bars": BARS,
        "held": held,
    }


def main(arguments: list[str]) -> int:
    """Prints the figures as JSON; an argument forces a kernel."""
    result = measure(kernel=arguments[0] if arguments else None)
    print(json.dumps(result, indent=2))
    return 0 if all(result["held"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
