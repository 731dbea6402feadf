"""This machine's rates on plain work: the fastest of some large matrix products by dtype, a large copy and the fastest of some reads. Measured,
not looked up: a yardstick, not a bound: under the power limit long calls of attention may pass the product."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.timing.timer import Stopwatch

# Samples of one product or stream at most, and seconds after which no further one begins once there are three.
SAMPLES = 12
SECONDS = 0.3


def sizes(device: str, dtype: str) -> tuple[int, ...]:
    """Square sizes of the product, of which the fastest counts: the largest is not the fastest everywhere."""
    if device == "cpu":
        return (512, 1024, 2048)
    return (4096, 6144, 8192) if dtype in ("float16", "bfloat16") else (4096, 8192)


def measure(device: str, dtypes: list[str], tell: Callable[[Any], None] = print) -> dict[str, Any]:
    """{"gemm_tflops": {dtype: the best sample of any size}, "gemm_size": {dtype: at which}, "copy_gbs": read plus
    written, "read_gbs": the best of some reductions and a product with a vector, "read_by": which}."""
    target = devices.open_device(device)
    found: dict[str, Any] = {"gemm_tflops": {}, "gemm_size": {}}
    with target.working():
        for dtype in dtypes:
            rates = {}
            for size in sizes(device, dtype):
                product = _product(target, dtype, size)
                if product:
                    rates[size] = 2 * size**3 / _best(product, target) / 1e12
            if rates:
                fastest = max(rates, key=rates.__getitem__)
                found["gemm_tflops"][dtype], found["gemm_size"][dtype] = rates[fastest], fastest
        nbytes = (1 << 30) if device == "cuda" else (1 << 27)
        copy, reads = _streams(target, nbytes)
        found["copy_gbs"] = 2 * nbytes / _best(copy, target) / 1e9
        rates = {name: nbytes / _best(read, target) / 1e9 for name, read in reads.items()}
        found["read_by"] = max(rates, key=rates.__getitem__)
        found["read_gbs"] = rates[found["read_by"]]
    return found


def _best(work: Callable[[], Any], device: Cpu | Cuda) -> float:
    watch = Stopwatch([work], device)
    best, began = watch.sample(), time.perf_counter()
    for taken in range(1, SAMPLES):
        if taken >= 3 and time.perf_counter() - began > SECONDS:
            break
        best = min(best, watch.sample())
    return best


def _product(device: Cpu | Cuda, dtype: str, size: int) -> Callable[[], Any] | None:
    if device.kind == "cpu":
        if dtype not in ("float32", "float64"):
            return None
        a, b = (np.random.default_rng(i).standard_normal((size, size)).astype(dtype) for i in range(2))
        c = np.empty_like(a)
        return lambda: np.matmul(a, b, out=c)
    if device.torch:
        torch = device.torch
        x, y = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
        z = torch.empty_like(x)
        return lambda: torch.matmul(x, y, out=z)
    if dtype == "bfloat16":
        return None
    xp = device.cupy
    p, q = (xp.random.standard_normal((size, size), dtype=xp.float32).astype(dtype) for _ in range(2))
    r = xp.empty_like(p)
    return lambda: xp.matmul(p, q, out=r)


def _streams(device: Cpu | Cuda, nbytes: int) -> tuple[Callable[[], Any], dict[str, Callable[[], Any]]]:
    """(a copy, {name: what only reads}) of so many bytes."""
    count = nbytes // 4
    if device.kind == "cpu":
        source = np.ones(count, np.float32)
        target = np.empty_like(source)
        return lambda: np.copyto(target, source), {"sum": source.sum, "max": source.max}
    if device.torch:
        torch = device.torch
        held = torch.ones(count, device="cuda")
        copied = torch.empty_like(held)
        matrix = held.view(torch.bfloat16).view(-1, 8192)
        vector = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
        reads = {"sum": held.sum, "max": held.amax, "matrix times vector": lambda: torch.mv(matrix, vector),
                 "float32 matrix times vector": lambda: torch.mv(held.view(-1, 4096), copied[:4096])}  # fmt: skip
        return lambda: copied.copy_(held), reads
    xp = device.cupy
    held = xp.ones(count, np.float32)
    copied = xp.empty_like(held)
    return lambda: xp.copyto(copied, held), {"sum": held.sum, "max": held.max}


def share(case: Any, seconds: float, ceilings: dict[str, Any]) -> tuple[float, str] | None:
    """(share of the ceiling that binds, "gemm" or "copy"): the larger of the two. None where nothing was measured."""
    shares = []
    gemm = ceilings.get("gemm_tflops", {}).get(case.dtype)
    if gemm:
        shares.append((case.flops() / seconds / 1e12 / gemm, "gemm"))
    bandwidth = max(ceilings.get("copy_gbs") or 0, ceilings.get("read_gbs") or 0)
    if bandwidth:
        shares.append((case.bytes() / seconds / 1e9 / bandwidth, "bandwidth"))
    return max(shares, default=None)
