"""Honest candidates of each array library, for the tests of the laboratory, and the same made slower.

``numpy_``, ``torch_``, ``jax_`` and ``cupy_`` compute attention; ``twice_...`` do it two times and ``tenth_...`` spend 15%
more. Whoever names its library in `arrays` needs no ``--arrays``.
"""

import functools
import math
import time


def numpy_(q, k, v, *, causal=False, scale=None):
    import numpy as np

    return _attend(np, q, k, v, causal, scale).astype(q.dtype)


def cupy_(q, k, v, *, causal=False, scale=None):
    import cupy

    return _attend(cupy, q, k, v, causal, scale).astype(q.dtype)


def _attend(xp, q, k, v, causal, scale):
    k, v = (xp.repeat(x.astype(xp.float32), q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q.astype(xp.float32) @ k.swapaxes(-1, -2) * xp.float32(scale or 1 / math.sqrt(q.shape[3]))
    if causal:
        s = xp.where(xp.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -xp.inf)
    p = xp.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


def torch_(q, k, v, *, causal=False, scale=None):
    import torch

    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~seen, -math.inf)
    return (torch.softmax(s, -1) @ v).to(q.dtype)


def jax_(q, k, v, *, causal=False, scale=None):
    """Returns before the work is done, as JAX does."""
    return _compiled()(q, k, v, causal=bool(causal), scale=scale or 1 / math.sqrt(q.shape[-1]))


@functools.cache
def _compiled():
    import jax

    def attend(q, k, v, causal, scale):
        xp = jax.numpy
        k, v = (xp.repeat(x.astype(xp.float32), q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        s = xp.einsum("bhid,bhjd->bhij", q.astype(xp.float32), k, precision="highest") * scale
        if causal:
            s = xp.where(xp.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -xp.inf)
        p = jax.nn.softmax(s, axis=-1)
        return xp.einsum("bhij,bhjd->bhid", p, v, precision="highest").astype(q.dtype)

    return jax.jit(attend, static_argnames=("causal", "scale"))


def _real(result):
    """Waits until the work is done."""
    if hasattr(result, "block_until_ready"):
        return result.block_until_ready()
    if type(result).__module__.partition(".")[0] == "torch" and result.is_cuda:
        import torch

        torch.cuda.current_stream().synchronize()
    elif type(result).__module__.partition(".")[0] == "cupy":
        import cupy

        cupy.cuda.get_current_stream().synchronize()
    return result


def _twice(attend):
    def attention(q, k, v, *, causal=False, scale=None):
        first = attend(q, k, v, causal=causal, scale=scale)
        if hasattr(first, "block_until_ready"):  # else both run at once
            first.block_until_ready()
        return attend(q, k, v, causal=causal, scale=scale)

    return attention


def _tenth(attend):
    def attention(q, k, v, *, causal=False, scale=None):
        began = time.perf_counter()
        result = _real(attend(q, k, v, causal=causal, scale=scale))
        until = time.perf_counter() + 0.15 * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return result

    return attention


twice_numpy, twice_torch, twice_jax, twice_cupy = map(_twice, (numpy_, torch_, jax_, cupy_))
tenth_numpy, tenth_torch, tenth_jax, tenth_cupy = map(_tenth, (numpy_, torch_, jax_, cupy_))
for _library in ("numpy", "torch", "jax", "cupy"):
    for _name in (f"{_library}_", f"twice_{_library}", f"tenth_{_library}"):
        globals()[_name].arrays = _library
