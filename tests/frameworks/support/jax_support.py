"""The common part of the tests of fa_ext.jax: problems of the backward tests as JAX calls, and float64 switched on and off."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.problems.case import Case
from fa_ext import reference
from fa_ext.reference.backward import gradients as exact_gradients
from tests.contract import gradients

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def wide(on=True):
    """A context in which JAX has 64-bit types, on the CPU, or has none."""
    import jax

    with jax.enable_x64(on) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(on), on_cpu() if on else unchanged():
        yield


def on_cpu():
    """A context in which JAX computes on the CPU."""
    import jax

    return jax.default_device(jax.local_devices(backend="cpu")[0])


def unchanged():
    return contextlib.nullcontext()


def needs(case: Case):
    """The context in which JAX holds the arrays of a case."""
    return wide() if case.dtype == "float64" else unchanged()


def backward_kernel(case: Case) -> str:
    """The kernel that computes its gradients, for the places where NaN may spread to."""
    import jax

    return "cpu_ref_backward" if case.dtype == "float64" or jax.default_backend() == "cpu" else "simt_backward"


OPTIONS = ("causal", "scale", "window", "softcap", "layout")


def split(problem: gradients.Problem):
    """({name: array that JAX differentiates by}, {other keyword arguments}) of fa_ext.jax.attention"""
    inputs = problem.inputs
    arrays = {name: inputs[name] for name in gradients.NAMES if name in inputs}
    rest = {name: inputs[name] for name in ("mask", "alibi", "intervals", *OPTIONS) if name in inputs}
    if inputs.get("dropout"):
        p, seed, *more = inputs["dropout"]
        offset, origin, heads = (*more, *(0, (0, 0, 0, 0), 0)[len(more) :])
        rest["dropout"] = p, np.array([seed % 2**32, seed >> 32, offset, *origin, heads], np.uint32)
    return arrays, rest


def cotangents(problem: gradients.Problem, results):
    """(dout, dlse), zeros where the problem has none."""
    made = (problem.inputs.get("dout"), problem.inputs.get("dlse"))
    return tuple(np.zeros(x.shape, x.dtype) if d is None else d for x, d in zip(results, made))


def alone(script: str, *, devices=4, **environment):
    """Runs a script in a process of its own, where the CPU counts as several devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=known, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- small problems under transformations ----

NAMES = ("q", "k", "v", "bias", "sinks")


def arrays_of(
    *lead, batch=2, heads=4, heads_kv=2, queries=5, keys=7, dim=8, bias=None, sinks=False, alibi=None, seed=0, layout="bhsd"
):
    """{name: float32 array} with leading axes for vmap."""
    rng = np.random.default_rng(seed)
    shape = {"q": (batch, heads, queries, dim), "k": (batch, heads_kv, keys, dim), "v": (batch, heads_kv, keys, dim)}
    if layout == "bshd":
        shape = {n: (s[0], s[2], s[1], s[3]) for n, s in shape.items()}
    if bias:
        shape["bias"] = bias
    if sinks:
        shape["sinks"] = (heads,)
    if alibi:
        shape["alibi"] = alibi
    return {n: rng.standard_normal((*lead, *s)).astype(np.float32) for n, s in shape.items()}


def loss(arrays, **options):
    """A scalar that depends on out and on the LSE."""
    import fa_ext.jax

    out, lse = fa_ext.jax.attention(**arrays, return_lse=True, **options)
    return (out * out).sum() + (lse * 0.3).sum()


def exact(arrays, **options):
    """(loss, {name: gradient}) in float64."""
    out, lse = reference.attention(**arrays, **options)
    found = exact_gradients(
        2 * out, **arrays, dlse=np.full_like(lse, 0.3), wrt=tuple(n for n in NAMES if n in arrays), dtype=None, **options
    )
    return (out * out).sum() + 0.3 * lse.sum(), {n: found[n] for n in arrays if n in NAMES}


def close(found, wanted, tolerance=2e-5):
    for name, x in wanted.items():
        scale = max(1.0, np.abs(x).max(initial=0))
        np.testing.assert_allclose(np.asarray(found[name], np.float64), x, atol=tolerance * scale, err_msg=name)
