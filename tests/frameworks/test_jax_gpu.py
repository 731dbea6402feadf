"""fa_ext.jax on CUDA devices: the handlers for "CUDA", their workspace, command buffers, several devices."""

import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import fa_ext.jax  # noqa: E402
from bench.problems.case import Case  # noqa: E402
from fa_ext.jax import _calls  # noqa: E402
from tests.contract import gradients  # noqa: E402
from tests.frameworks.support.jax_support import ROOT, cotangents, split  # noqa: E402


def cuda_devices():
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_devices(), reason="JAX has no CUDA device here"),
]

CASES = [
    Case(2, 8, 2, 300, 300, 64, dtype="bfloat16", causal=True),
    Case(1, 4, 4, 513, 511, 128, dtype="float16", causal="bottom_right", window=(100, None)),
    Case(2, 4, 1, 129, 257, 96, dtype="bfloat16", sinks="wide", softcap=20.0),
    Case(1, 2, 2, 100, 90, 40, dtype="float32", bias="full", mask="rows"),
    Case(1, 16, 2, 1, 2000, 128, dtype="bfloat16"),  # split over the keys: with a workspace
    Case(2, 4, 2, 65, 33, 64, dtype="float16", layout="bshd"),
    Case(1, 2, 1, 64, 0, 64, dtype="float16"),
]


def vjp(problem):
    arrays, rest = split(problem)
    call = jax.jit(lambda a: fa_ext.jax.attention(**a, **rest, return_lse=True))
    results, pull = jax.vjp(call, arrays)
    return results, pull(cotangents(problem, results))[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_the_same_kernels(case):
    """Bit for bit what fa_ext.attention makes of the same arrays, and gradients within the contract."""
    problem = gradients.make(case)
    arrays, rest = split(problem)
    results, found = vjp(problem)
    assert all(x.devices() == {cuda_devices()[0]} for x in results)
    held = {n: jax.device_put(x, cuda_devices()[0]) for n, x in arrays.items()}
    if "mask" in rest:
        rest["mask"] = jax.device_put(np.ascontiguousarray(rest["mask"]), cuda_devices()[0])
    wanted = fa_ext.attention(**held, **rest, return_lse=True)
    for a, b in zip(results, wanted):
        assert np.asarray(a).tobytes() == fa_ext.to_numpy(b).tobytes()
    report = gradients.judged("simt_backward", problem, {n: np.asarray(found[n]) for n in problem.wrt})
    assert report.passed, report


def test_workspace_is_a_result():
    """XLA allocates what a plan needs; too little is an error in words, not an allocation of ours."""
    case = Case(1, 16, 2, 1, 4000, 128, dtype="bfloat16")
    inputs = {n: jax.numpy.asarray(x) for n, x in case.host_inputs().items()}
    call = _calls.Call(_calls.Options(), ("q", "k", "v"), ("out",))
    operands = [inputs[n] for n in "qkv"]
    needed = _calls._workspace(call, operands)
    assert needed > 0
    text = jax.jit(lambda a: fa_ext.jax.attention(**a)).lower(inputs).as_text()
    assert f"tensor<{needed}xui8>" in text


def test_too_little_workspace_is_refused(monkeypatch):
    monkeypatch.setattr(_calls, "_workspace", lambda call, operands: 0)
    inputs = {n: jax.numpy.asarray(x) for n, x in Case(1, 16, 2, 1, 4001, 128, dtype="bfloat16").host_inputs().items()}
    with pytest.raises(Exception, match="fa_ext: workspace_bytes is 0, but kernel"):
        jax.block_until_ready(jax.jit(lambda a: fa_ext.jax.attention(**a))(inputs))


def test_float64_names_itself():
    from tests.frameworks.support.jax_support import wide

    with wide(), jax.default_device(cuda_devices()[0]):
        q = np.zeros((1, 1, 4, 8))
        with pytest.raises(Exception, match="float64 runs on the CPU only"):
            jax.block_until_ready(jax.jit(lambda q: fa_ext.jax.attention(q, q, q))(q))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dropout_reads_its_state_on_the_device(dtype):
    """A jitted call on a key, and its gradients, have the bits of the core's calls on the same words; NumPy's CPU the mask."""
    arrays = {n: jax.device_put(x, cuda_devices()[0]) for n, x in Case(2, 4, 2, 75, 90, 40, dtype=dtype).host_inputs().items()}
    attend = jax.jit(lambda a, drawn: fa_ext.jax.attention(**a, dropout=(0.4, drawn), return_lse=True))
    for key in (jax.random.key(1), jax.random.key(2)):
        words = np.concatenate([np.asarray(jax.random.bits(key, (2,), "uint32")), np.zeros(6, np.uint32)])
        results, pull = jax.vjp(lambda a: attend(a, key), arrays)
        drawn = (0.4, int(words[0]) | int(words[1]) << 32)
        for state in (drawn, (0.4, jax.device_put(words, cuda_devices()[0])), (0.4, words)):
            wanted = fa_ext.attention(**arrays, dropout=state, return_lse=True)
            for a, b in zip(results, wanted):
                assert np.asarray(a).tobytes() == fa_ext.to_numpy(b).tobytes()
        dout, dlse = (jax.numpy.ones_like(x) for x in results)
        (found,) = pull((dout, dlse))
        out, lse = results
        backward = fa_ext.attention_backward(dout, **arrays, out=out, lse=lse, dlse=dlse, dropout=drawn)
        for name, x in zip("qkv", backward, strict=True):
            assert np.asarray(found[name]).tobytes() == fa_ext.to_numpy(x).tobytes(), name
    again = attend(arrays, jax.random.key(1))[0]
    assert not np.array_equal(np.asarray(again), np.asarray(attend(arrays, jax.random.key(2))[0]))
    eye = jax.numpy.broadcast_to(jax.numpy.eye(90, dtype=dtype), (2, 2, 90, 90))
    weights = attend(arrays | {"v": eye}, jax.random.key(2))[0]
    np.testing.assert_array_equal(np.asarray(weights) != 0, fa_ext.dropout_keep(2, 4, 75, 90, drawn))


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_are_those_of_the_same_kernels(packed):
    """Bit for bit what the core makes of the same arrays, for lengths that change under one compiled call."""
    rng = np.random.default_rng(0)
    place = cuda_devices()[0]
    shape = (lambda heads: (300, heads, 64)) if packed else (lambda heads: (3, 100, heads, 64))
    arrays = {n: jax.device_put(rng.standard_normal(shape(heads)), place).astype("bfloat16") for n, heads in zip("qkv", (8, 2, 2))}
    options = dict(causal="bottom_right", layout="bshd")

    @jax.jit
    def both(arrays, indices):
        results, pull = jax.vjp(lambda a: fa_ext.jax.attention(**a, **indices, **options, return_lse=True), arrays)
        return results, pull(tuple(map(jax.numpy.ones_like, results)))[0]

    for values in ([0, 100, 100, 270], [17, 80, 299, 300]) if packed else ([100, 0, 33], [1, 100, 64]):
        index = jax.device_put(np.array(values, np.int32), place)
        indices = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k") if packed else ("seqlens_q", "seqlens_k"), index)
        results, found = both(arrays, indices)
        wanted = fa_ext.attention(**arrays, **indices, **options, return_lse=True)
        ones = tuple(map(jax.numpy.ones_like, results))
        gradients = fa_ext.attention_backward(ones[0], **arrays, out=results[0], lse=results[1], dlse=ones[1], **indices, **options)
        for a, b in zip((*results, *(found[n] for n in "qkv")), (*wanted, *gradients), strict=True):
            assert np.asarray(a).tobytes() == fa_ext.to_numpy(b).tobytes()


def test_bad_contents_are_counted_on_a_device():
    q = jax.device_put(np.ones((5, 2, 64), np.float16), cuda_devices()[0])
    fa_ext.faults(0)
    out = jax.jit(lambda q, starts: fa_ext.jax.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts))(q, np.array([0, 2, 7], np.int32))
    assert np.isfinite(np.asarray(out)).all()
    assert "cu_seqlens" in {kind for kind, *_ in fa_ext.faults(0)}


def test_dropout_under_checkpoint_and_scan():
    arrays = {n: jax.numpy.asarray(x) for n, x in Case(1, 2, 2, 64, 64, 32, dtype="bfloat16").host_inputs().items()}

    def loss(a, key):
        return (fa_ext.jax.attention(**a, dropout=(0.4, key)).astype("float32") ** 2).sum()

    key = jax.random.key(3)
    plain, again = jax.jit(jax.grad(loss))(arrays, key), jax.jit(jax.grad(jax.checkpoint(loss)))(arrays, key)
    for name in arrays:
        assert np.asarray(plain[name]).tobytes() == np.asarray(again[name]).tobytes()


@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_command_buffer= ", "--xla_gpu_graph_min_graph_size=1"])
def test_many_calls_in_one_program(flags):
    """Layers after layers, again and again: launched one by one and recorded in a CUDA graph, with the same bits."""
    script = """
import jax, numpy as np, fa_ext.jax
from bench.problems.case import Case
inputs = {n: jax.numpy.asarray(x) for n, x in Case(2, 4, 4, 256, 256, 64, dtype="bfloat16").host_inputs().items()}
def loss(a):
    x = a["q"]
    for n in range(4):
        x = x + fa_ext.jax.attention(x, a["k"] * (n + 1), a["v"], causal=True)
    return (x.astype("float32") ** 2).sum()
step = jax.jit(jax.grad(loss))
first = jax.tree.map(np.asarray, step(inputs))
for n in range(20):
    for name, x in step(inputs).items():
        assert np.asarray(x).tobytes() == first[name].tobytes(), (n, name)
    inputs = {n: x + 0 for n, x in inputs.items()}  # other addresses
one = jax.grad(loss)(inputs)  # call by call
for name, x in one.items():
    np.testing.assert_allclose(np.asarray(x, "f4"), first[name].astype("f4"), rtol=0.1, atol=0.1 * np.abs(first[name].astype("f4")).max())
"""
    import os

    known = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=known, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(len(cuda_devices()) < 2, reason="needs two CUDA devices")
def test_two_devices():
    """Sharded jit: each device works on its own part, on its own stream."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(cuda_devices()[:2]), ("x",))
    inputs = Case(2, 4, 2, 200, 200, 64, dtype="bfloat16").host_inputs()
    place = NamedSharding(mesh, PartitionSpec(None, "x"))
    split_up = {n: jax.device_put(x, place) for n, x in inputs.items()}
    whole = {n: jax.numpy.asarray(x) for n, x in inputs.items()}
    function = jax.jit(jax.grad(lambda a: (fa_ext.jax.attention(**a, causal=True).astype("float32") ** 2).sum()))
    for name, x in function(split_up).items():
        assert np.asarray(x).tobytes() == np.asarray(function(whole)[name]).tobytes(), name
