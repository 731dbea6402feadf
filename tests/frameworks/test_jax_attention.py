"""fa_ext.jax.attention against float64: results, LSE and every gradient, with every option, on the kernels of this machine."""

import inspect
import random

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax.experimental.sparse import BCOO  # noqa: E402

import fa_ext.jax  # noqa: E402
from bench.problems.case import Case  # noqa: E402
from bench.problems.placement import Unplaceable  # noqa: E402
from fa_ext import reference  # noqa: E402
from fa_ext._operands import OPTIONS  # noqa: E402
from fa_ext.judge import judge, spread  # noqa: E402
from fa_ext.reference.backward import gradients as exact_gradients  # noqa: E402
from tests.contract import (
    gradients,  # noqa: E402
    runner,  # noqa: E402
)
from tests.frameworks.support.jax_support import backward_kernel, cotangents, needs, on_cpu, split, wide  # noqa: E402


def compared(problem):
    """The verdicts on out, and on the gradients, of one call under jit."""
    arrays, rest = split(problem)

    def call(arrays):
        return fa_ext.jax.attention(**arrays, **rest, return_lse=True)

    with needs(problem.case):
        results, pull = jax.vjp(jax.jit(call), arrays)
        (grads,) = pull(cotangents(problem, results))
        forward = [np.asarray(x) for x in results]
        assert grads["q"].dtype == results[0].dtype == problem.case.dtype
        got = {name: np.asarray(grads[name]) for name in problem.wrt}
    options = {n: rest[n] for n in ("causal", "window", "layout") if n in rest}
    inputs = {**arrays, **rest}
    exempt = spread(inputs["k"], inputs["v"], reference.attention(**inputs)[0], **{"layout": "bhsd", "causal": False, "window": None, **options})
    report = judge(*forward, reference.attention(**inputs), reference.plain(**inputs), problem.case.dtype, layout=problem.case.layout, exempt=exempt)
    return report, gradients.judged(backward_kernel(problem.case), problem, got)


def chosen():
    """Cases of the backward contract, and one for each option whatever the draw."""
    options = [
        Case(2, 6, 2, 33, 47, 24, 40, dtype="float32", causal="bottom_right"),
        Case(1, 4, 1, 31, 31, 64, dtype="bfloat16", causal=True, softcap=20.0, sinks="same"),
        Case(2, 2, 2, 17, 40, 16, dtype="float16", window=(5, 3), mask="full"),
        Case(3, 2, 1, 20, 23, 8, dtype="float64", bias="full", sinks="wide", scale=0.3),
        Case(2, 4, 2, 9, 12, 16, dtype="float32", bias="keys", mask="rows", layout="bshd"),
        Case(2, 4, 2, 9, 12, 16, dtype="float32", bias="queries", mask="batch"),
        Case(1, 3, 3, 1, 1, 1, dtype="float32", bias="alibi"),
        Case(2, 4, 2, 9, 12, 16, dtype="float32", alibi="heads", causal="bottom_right"),
        Case(2, 4, 2, 9, 12, 16, dtype="bfloat16", alibi="batch", sinks="same"),
        Case(2, 4, 2, 9, 12, 16, dtype="float32", intervals="two", sinks="same", layout="bshd"),
        Case(2, 4, 2, 9, 12, 16, dtype="float32", intervals="keys", causal="bottom_right"),
        Case(2, 4, 2, 9, 12, 16, dtype="float16", intervals="heads", mask="rows"),
        Case(2, 2, 2, 5, 0, 8, dtype="float32", sinks="same"),
        Case(0, 2, 2, 5, 6, 8, dtype="float32"),
        Case(2, 2, 1, 0, 6, 8, dtype="float32"),
    ]
    return options + random.Random(8).sample(gradients.contract("cpu_ref_backward"), 25)


@pytest.mark.parametrize("case", chosen(), ids=str)
def test_results_and_gradients(case):
    try:
        problem = gradients.make(case)
    except Unplaceable as error:
        pytest.skip(str(error))
    forward, backward = compared(problem)
    assert forward.passed, forward
    assert backward.passed, backward


@pytest.mark.parametrize("dout, dlse", [("none", True), ("normal", False), ("ones", False)])
def test_cotangents_that_are_zero(dout, dlse):
    """A result that the loss does not use makes no gradient: its cotangent is a symbolic zero."""
    case = Case(1, 2, 1, 9, 11, 8, dtype="float32", causal="bottom_right", sinks="same")
    problem = gradients.make(case, dout=dout, dlse=dlse)
    arrays, rest = split(problem)
    weights = problem.inputs["dout"], problem.inputs.get("dlse")

    def loss(arrays):
        results = fa_ext.jax.attention(**arrays, **rest, return_lse=True)
        return sum((x * w).sum() for x, w in zip(results, weights) if w is not None)

    got = jax.jit(jax.grad(loss))(arrays)
    report = gradients.judged(backward_kernel(problem.case), problem, {n: np.asarray(x) for n, x in got.items()})
    assert report.passed, report


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("bias",), ("sinks",), ("v", "bias"), ("q", "sinks")])
def test_only_what_is_asked_for_is_computed(wrt):
    problem = gradients.make(Case(2, 4, 2, 7, 9, 8, dtype="float32", bias="full", sinks="same"), dlse=False, wrt=wrt)
    arrays, rest = split(problem)
    inner, outer = {n: x for n, x in arrays.items() if n in wrt}, {n: x for n, x in arrays.items() if n not in wrt}

    def loss(inner):
        return (fa_ext.jax.attention(**inner, **outer, **rest) * problem.inputs["dout"]).sum()

    text = jax.jit(jax.grad(loss)).lower(inner).as_text()
    line = next(line for line in text.splitlines() if "@fa_ext_attention_backward" in line)
    results = line.rsplit("->", 1)[1]
    assert results.count("tensor<") == len(wrt) + 1  # and the workspace
    got = jax.jit(jax.grad(loss))(inner)
    report = gradients.judged(backward_kernel(problem.case), problem, {n: np.asarray(x) for n, x in got.items()})
    assert report.passed, report


@pytest.mark.parametrize("kernel", [None, *(k for k in fa_ext.kernels() if runner.device_of(k) == "cpu")])
def test_the_bits_are_those_of_numpy(kernel):
    inputs = Case(2, 4, 2, 50, 61, 64, dtype="float32", causal="bottom_right", sinks="same").host_inputs()
    arrays = {n: inputs[n] for n in ("q", "k", "v", "sinks")}
    with on_cpu():
        got = jax.jit(lambda a: fa_ext.jax.attention(**a, causal="bottom_right", kernel=kernel))(arrays)
    np.testing.assert_array_equal(np.asarray(got), fa_ext.attention(**inputs, kernel=kernel))


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_is_an_option_of_the_gradient(deterministic):
    inputs = Case(1, 2, 1, 20, 20, 16, dtype="float32", causal=True).host_inputs()
    arrays = {n: inputs[n] for n in "qkv"}

    def loss(arrays):
        return (fa_ext.jax.attention(**arrays, causal=True, deterministic=deterministic) ** 2).sum()

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    assert f"unordered = {int(not deterministic)} : i32" in text
    out, lse = fa_ext.attention(**inputs, return_lse=True)
    with on_cpu():
        got = jax.jit(jax.grad(loss))(arrays)
    wanted = fa_ext.attention_backward(2 * out, **inputs, out=out, lse=lse, deterministic=deterministic)
    for name, x in zip("qkv", wanted):
        np.testing.assert_array_equal(np.asarray(got[name]), x)


def test_programs_are_exported():
    """jax.export wants to be told that the custom calls are known where the program runs."""
    if jax.__version_info__ < (0, 6):
        pytest.importorskip("absl")  # which jax.export imports there
    from jax import export

    arrays = {n: x for n, x in Case(1, 2, 1, 9, 9, 16, dtype="float32").host_inputs().items()}
    function = jax.jit(jax.grad(lambda a: (fa_ext.jax.attention(**a) ** 2).sum()))
    checks = [export.DisabledSafetyCheck.custom_call(f"fa_ext_attention{kind}") for kind in ("", "_backward")]
    with on_cpu():
        with pytest.raises(ValueError, match="fa_ext_attention"):
            export.export(function, platforms=["cpu"])(arrays)
        found = export.export(function, platforms=["cpu"], disabled_checks=checks)(arrays).call(arrays)
        for name, x in function(arrays).items():
            np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize("x64", [False, True])
def test_with_and_without_64_bits(x64):
    """Python's numbers and NumPy's float64 arrays are float32 without jax_enable_x64; the LSE is float64 for float64 alone."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 5, 8)) for _ in range(3))
    with wide(x64):
        out, lse = jax.jit(lambda *a: fa_ext.jax.attention(*a, scale=0.5, softcap=3, return_lse=True, window=(2, None)))(q, k, v)
        assert out.dtype == lse.dtype == (np.float64 if x64 else np.float32)
        half, half_lse = fa_ext.jax.attention(*(x.astype(np.float16) for x in (q, k, v)), return_lse=True)
        assert half.dtype == np.float16 and half_lse.dtype == np.float32
    exact = reference.attention(q, k, v, scale=0.5, softcap=3, window=(2, None))
    for found, wanted in zip((out, lse), exact):
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-12 if x64 else 1e-5)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(k=np.zeros((1, 2, 11, 8), "f4")), ValueError, "k has batch size 1"),
        (dict(v=np.zeros((2, 2, 11, 300), "f4")), ValueError, "v has head_dim 300"),
        (dict(v=np.zeros((2, 2, 11, 8), "f2")), TypeError, "v has dtype float16, but q has float32"),
        (dict(q=np.zeros((9, 8), "f4")), ValueError, "q has 2 dimensions, shape (9, 8); accepted: 4, the first of them batch, of 1 "),
        (dict(mask=BCOO.fromdense(np.ones((9, 11), bool))), TypeError, "mask has type BCOO; accepted: an array"),
        (dict(q=np.zeros((2, 4, 9, 8), "i4")), TypeError, "int32"),
        (dict(mask=np.zeros((9, 11), "f4")), TypeError, "mask has dtype float32"),
        (dict(mask=np.zeros((8, 11), bool)), ValueError, "mask has shape (8, 11)"),
        (dict(bias=np.zeros((9, 11), "f2")), TypeError, "bias has dtype float16"),
        (dict(sinks=np.zeros(3, "f4")), ValueError, "sinks has shape (3,)"),
        (dict(alibi=np.zeros((3, 4), "f4")), ValueError, "alibi has shape (3, 4)"),
        (dict(alibi=np.zeros(4, "f2")), TypeError, "alibi has dtype float16; accepted: float32"),
        (dict(intervals=np.zeros((2, 4, 9, 2), "f4")), TypeError, "intervals has dtype float32; accepted: int32"),
        (dict(intervals=np.zeros((2, 4, 9, 3, 2), "i4")), ValueError, "at most two intervals a query; use mask"),
        (dict(causal=True), ValueError, "causal=True with seq_q 9 and seq_k 11 is ambiguous"),
        (dict(causal="both"), ValueError, "causal is 'both'"),
        (dict(layout="sbhd"), ValueError, "layout is 'sbhd'"),
        (dict(window=(-1, 0)), ValueError, "window is (-1"),
        (dict(window=3), TypeError, "window is 3"),
        (dict(scale=float("nan")), ValueError, "scale is nan"),
        (dict(softcap=-1), ValueError, "softcap is -1"),
        (dict(kernel="none"), ValueError, "kernel is 'none', which names no kernel of this build; accepted: "),
        (dict(kernel_backward="cpu_ref"), ValueError, "kernel_backward is 'cpu_ref'"),
        (dict(kernel=3), ValueError, "kernel is 3, which names no kernel of this build"),
        (dict(q=None), TypeError, "q is None; accepted: an array"),
        (dict(v=None), TypeError, "v is None; accepted: an array"),
        (dict(k="abc"), TypeError, "k has type str; accepted: an array"),
        (dict(bias="abc"), TypeError, "bias has type str; accepted: an array"),
        (dict(window=(-1, None)), ValueError, "window is (-1, None); accepted: None, or (left, right), each an int >= 0"),
        (dict(window=("a", 1)), TypeError, "window's left is 'a'; accepted: an int >= 0 or None for unbounded"),
        (dict(window=(1, 2.5)), TypeError, "window's right is 2.5; accepted: an int >= 0"),
        (dict(window=(True, 1)), TypeError, "window's left is True; accepted: an int >= 0"),
        (dict(scale="a"), TypeError, "scale is 'a'; accepted: a finite number, or None for 1/sqrt(D)"),
        (dict(softcap=None), TypeError, "softcap is None; accepted: a finite number >= 0 (0: none)"),
        (dict(deterministic="yes"), TypeError, "deterministic is 'yes'; accepted: True or False"),
        (dict(batch_invariant=None), TypeError, "batch_invariant is None; accepted: True or False"),
        (dict(return_lse=2), TypeError, "return_lse is 2; accepted: True or False"),
        (dict(layout=3), ValueError, "layout is 3; accepted: 'bhsd', 'bshd'"),
        (dict(causal=np.zeros(2, bool)), TypeError, "causal is traced"),
        (dict(softcap=np.zeros((), "f4")), TypeError, "softcap is traced; accepted: a number that is known while tracing"),
        (dict(deterministic=np.zeros((), bool)), TypeError, "deterministic is traced; accepted: True or False that is known"),
        (dict(batch_invariant=np.zeros((), bool)), TypeError, "batch_invariant is traced"),
        (dict(return_lse=np.zeros((), bool)), TypeError, "return_lse is traced"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(change, error, text):
    given = {"q": np.zeros((2, 4, 9, 8), "f4"), "k": np.zeros((2, 2, 11, 8), "f4"), "v": np.zeros((2, 2, 11, 8), "f4")} | change
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    rest = {n: x for n, x in given.items() if n not in arrays}
    with pytest.raises(error) as raised:
        jax.jit(lambda arrays: fa_ext.jax.attention(**arrays, **rest)).lower(arrays)
    assert text in str(raised.value)


def test_options_are_no_arrays():
    q = np.zeros((1, 1, 4, 8), "f4")
    with pytest.raises(TypeError, match="scale is traced; accepted: a number"):
        jax.jit(lambda scale: fa_ext.jax.attention(q, q, q, scale=scale))(0.5)


@pytest.mark.skipif(not fa_ext._core.build_info()["cuda"], reason="this build has no CUDA kernel to name")
def test_a_kernel_of_another_device_says_so():
    q = np.zeros((1, 1, 4, 64), "f4")
    other = next(k for k in fa_ext.kernels() if runner.device_of(k) != ("cpu" if jax.default_backend() == "cpu" else "cuda"))
    with pytest.raises(Exception, match=f'fa_ext: kernel "{other}" cannot take this call'):
        jax.block_until_ready(jax.jit(lambda q: fa_ext.jax.attention(q, q, q, kernel=other))(q))


def test_float64_of_a_device_is_refused_when_it_runs():
    """The words of the library reach the user as the error of the run."""
    from fa_ext.jax import _calls

    q = np.zeros((1, 1, 4, 8), "f4")
    call = _calls.Call(_calls.Options(causal=True), ("q", "k", "v"), ("out",))
    with pytest.raises(Exception, match="causal=True with seq_q 4 and seq_k 3 is ambiguous"):
        jax.block_until_ready(jax.jit(lambda *a: _calls.run(call, *a))(q, q[:, :, :3], q[:, :, :3]))


def test_causal_of_two_values_is_refused_by_name():
    q = np.zeros((1, 1, 4, 8), "f4")
    with pytest.raises(ValueError, match=r"causal is array\(\[ True, False\]\); accepted: False, True, 'top_left'"):
        fa_ext.jax.attention(q, q, q, causal=np.array([True, False]))


def test_sides_of_the_window_are_known_while_tracing():
    q = np.zeros((1, 1, 4, 8), "f4")
    with pytest.raises(TypeError, match="window's right is traced; accepted: an int that is known while tracing"):
        jax.jit(lambda side: fa_ext.jax.attention(q, q, q, window=(1, side)))(2)
    far, all_keys = (fa_ext.jax.attention(q, q + 1, q + 2, window=window) for window in ((2**70, np.int64(9)), None))
    np.testing.assert_array_equal(far, all_keys)


def test_symbolic_shapes_are_refused():
    if jax.__version_info__ < (0, 6):
        pytest.importorskip("absl")  # which jax.export imports there
    from jax import export

    (b,) = export.symbolic_shape("b")
    array = jax.ShapeDtypeStruct((b, 2, 4, 8), np.float32)
    for call in (fa_ext.jax.attention, fa_ext.jax.dot_product_attention):
        with pytest.raises(TypeError, match=r"q(uery)? has shape \(b, 2, 4, 8\), which is symbolic; accepted: sizes"):
            export.export(jax.jit(call), platforms=["cpu"])(array, array, array)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("x64", [False, True])
def test_python_numbers_are_added_in_a_dtype_that_is_taken(dtype, x64):
    """As JAX has it of what is weakly typed."""
    if dtype == "float64" and not x64:
        pytest.skip("JAX has no float64 there")
    rng = np.random.default_rng(3)
    with wide(x64):
        q, k, v = (jax.numpy.asarray(rng.standard_normal((1, 2, 5, 8)), dtype) for _ in range(3))
        for bias in (0.5, 1, jax.numpy.arange(5) * 0.1):
            found = fa_ext.jax.attention(q, k, v, bias=bias)
            wanted = fa_ext.jax.attention(q, k, v, bias=jax.numpy.asarray(bias, dtype if dtype == "float64" else "float32"))
            np.testing.assert_array_equal(found, wanted)
            each = jax.jit(jax.vmap(lambda q, bias: fa_ext.jax.attention(q, k, v, bias=bias), in_axes=(0, None)))(q[None], bias)
            np.testing.assert_array_equal(each[0], wanted)
        with pytest.raises(TypeError, match="bias has dtype complex"):
            fa_ext.jax.attention(q, k, v, bias=1j)


# ---- jax.nn's signature ----


def nn_arguments():
    lengths = dict(query_seq_lengths=np.array([5, 12], "i4"), key_value_seq_lengths=np.array([7, 1], "i4"))
    return [
        dict(),
        dict(is_causal=True),
        dict(scale=0.2, local_window_size=3),
        dict(local_window_size=(4, 1)),
        dict(local_window_size=(4, 1), is_causal=True),
        dict(local_window_size=(2, 0), queries=9),
        dict(local_window_size=(-1, 2)),
        dict(local_window_size=(3, -1), queries=9),
        dict(local_window_size=(-1, 4), is_causal=True),
        dict(local_window_size=np.int64(3)),
        dict(local_window_size=(None, 2)),
        dict(local_window_size=(None, 2), queries=9),
        dict(local_window_size=[2, 2**70], queries=9),
        dict(local_window_size=2, queries=9, mask=True, bias=True),
        dict(is_causal=True, queries=15),
        dict(is_causal=True, local_window_size=(3, 5), queries=9),
        lengths,
        lengths | dict(is_causal=True),
        lengths | dict(mask=True, local_window_size=(4, 1), queries=9),
        lengths | dict(local_window_size=(2, 1)),
        lengths | dict(is_causal=True, local_window_size=(2, 0), bias=True),
        dict(query_seq_lengths=np.array([-3, 99], "i4"), key_value_seq_lengths=np.array([99, 3], "i4")),
        dict(bias=True),
        dict(bias=True, mask=True, dtype="bfloat16"),
        dict(single=True, is_causal=True),
        dict(return_residual=True, is_causal=True),
    ]


def nn_mask(queries, keys, mask, given):
    """(B, N, T, S) of what a query may see, as jax.nn documents it."""
    ahead = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    seen = np.ones((2, 1, queries, keys), bool) if mask is None else mask.copy()
    if given.get("is_causal"):
        seen &= ahead <= 0
    if (window := given.get("local_window_size")) is not None:
        window = window if isinstance(window, (tuple, list)) else (window, window)
        left, right = (99 if side is None else min(int(side), 99) for side in window)
        seen &= (ahead >= -left) & (ahead <= right)
    if (lengths := given.get("query_seq_lengths")) is not None:
        seen &= (np.arange(queries) < lengths[:, None])[:, None, :, None]
    if (lengths := given.get("key_value_seq_lengths")) is not None:
        seen &= (np.arange(keys) < lengths[:, None])[:, None, None, :]
    return seen


@pytest.mark.parametrize("given", nn_arguments(), ids=str)
def test_dot_product_attention(given):
    """Against float64, and without options against jax.nn itself."""
    given = dict(given)
    rng = np.random.default_rng(4)
    queries, dtype, single = given.pop("queries", 12), given.pop("dtype", "float32"), given.pop("single", False)
    q = rng.standard_normal((2, queries, 4, 16)).astype("f4")
    k, v = (rng.standard_normal((2, 12, 2, 16)).astype("f4") for _ in range(2))
    q, k, v = (x.astype(jax.numpy.dtype(dtype)) for x in (q, k, v))
    bias = rng.standard_normal((1, 4, queries, 12)).astype(q.dtype) if given.pop("bias", None) else None
    mask = rng.random((2, 1, queries, 12)) < 0.8 if given.pop("mask", None) else None
    seen = nn_mask(queries, 12, mask, given)
    options = dict(mask=seen, bias=bias, layout="bshd", scale=given.get("scale"))
    out, lse = reference.attention(q, k, v, **options)
    target = rng.standard_normal(out.shape).astype(q.dtype)
    truth = exact_gradients(target, q, k, v, **options)
    tolerance = dict(atol=2e-2, rtol=2e-2) if dtype == "bfloat16" else dict(atol=2e-5, rtol=1e-5)

    def call(q, k, v):
        arrays = (q[0], k[0], v[0]) if single else (q, k, v)
        return fa_ext.jax.dot_product_attention(*arrays, bias, mask, **given)

    def close(found, wanted, factor=1):
        np.testing.assert_allclose(np.asarray(found, "f8"), wanted, tolerance["rtol"] * factor, tolerance["atol"] * factor)

    found = jax.jit(call)(q, k, v)
    if given.get("return_residual"):
        found, residual = found
        assert residual.shape == (2, queries, 4) and residual.dtype == q.dtype
        close(residual, lse.swapaxes(1, 2))
    assert found.shape == (out[0] if single else out).shape and found.dtype == q.dtype
    close(found, out[0] if single else out)
    if not single:
        loss = lambda *arrays: (jax.tree.leaves(call(*arrays))[0] * target).sum()  # noqa: E731
        for name, x in zip("qkv", jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)):
            close(x, truth[name], 5)
    if not given:
        with jax.default_matmul_precision("highest"):  # a GPU's products of float32 are of fewer bits else
            theirs = jax.nn.dot_product_attention(q, k, v, bias, mask) if not single else None
        if theirs is not None:
            assert theirs.dtype == found.dtype
            close(found, np.asarray(theirs, "f8"))


@pytest.mark.parametrize("given", [g for g in nn_arguments() if "queries" in g or "query_seq_lengths" in g], ids=str)
def test_dot_product_attention_promotes_no_ranks(given):
    with jax.numpy_rank_promotion("raise"):
        test_dot_product_attention(given)


LENGTHS = dict(key_value_seq_lengths=np.array([4, 2], "i4"))


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(implementation="cudnn"), ValueError, "implementation is 'cudnn'; accepted"),
        (dict(key=np.zeros((4, 2, 8), "f4")), ValueError, "query, key and value have 4, 3 and 4 axes"),
        (dict(value=np.zeros((2, 5, 2, 8), "f4")), ValueError, "have shapes (2, 6, 4, 8), (2, 4, 2, 8) and (2, 5, 2, 8)"),
        (dict(query=np.zeros((2, 6, 3, 8), "f4")), ValueError, "have shapes (2, 6, 3, 8), (2, 4, 2, 8) and"),
        (dict(key=np.zeros((2, 4, 2, 8), "f2")), TypeError, "query, key and value have dtypes float32, float16 and float32"),
        (dict(value=None), TypeError, "value is None; accepted: an array"),
        (dict(query_seq_lengths=np.zeros(3, "i4")), ValueError, "query_seq_lengths has shape (3,)"),
        (dict(mask=np.zeros((6, 4), "f4")), TypeError, "mask has dtype float32; accepted: bool (True: attend)"),
        (LENGTHS | dict(mask=np.zeros((6, 4), "f4")), TypeError, "mask has dtype float32; accepted: bool (True: attend)"),
        (LENGTHS | dict(mask=np.ones((6, 4), "i4")), TypeError, "mask has dtype int32; accepted: bool (True: attend)"),
        (dict(mask=np.ones((6, 4), "f4"), local_window_size=1), TypeError, "mask has dtype float32; accepted: bool (True: attend)"),
        (LENGTHS | dict(mask=np.ones((3, 6, 4), bool)), ValueError, "to (B, N, T, S), here (2, 4, 6, 4)"),
        (LENGTHS | dict(mask=np.ones((3, 6, 4), bool)), ValueError, "mask has shape (3, 6, 4); accepted: what broadcasts"),
        (LENGTHS | dict(mask=np.ones((1, 2, 4, 6, 4), bool)), ValueError, "mask has shape (1, 2, 4, 6, 4); accepted"),
        (dict(local_window_size=(3,)), TypeError, "local_window_size is (3,); accepted: None, an int, or (left, right), each"),
        (dict(local_window_size=(2.5, 1)), TypeError, "local_window_size's left is 2.5; accepted: None, an int, or (left, right)"),
        (dict(local_window_size="ab"), TypeError, "local_window_size's left is 'ab'"),
        (dict(is_causal="yes"), TypeError, "is_causal is 'yes'; accepted: True or False"),
    ],
)  # fmt: skip
def test_dot_product_attention_refuses(change, error, text):
    arrays = {n: np.zeros((2, extent, heads, 8), "f4") for n, extent, heads in (("query", 6, 4), ("key", 4, 2), ("value", 4, 2))}
    with pytest.raises(error) as raised:
        fa_ext.jax.dot_product_attention(**arrays | change)
    assert text in str(raised.value)


def test_a_query_that_sees_no_key_gets_zeros():
    q = np.zeros((2, 4, 2, 8), "f4")
    np.testing.assert_array_equal(fa_ext.jax.dot_product_attention(q, q, q + 1, key_value_seq_lengths=np.zeros(2, "i4")), 0)


def test_options_are_those_of_the_core():
    assert [*inspect.signature(fa_ext.jax.attention).parameters][-len(OPTIONS) :] == list(OPTIONS)
    q = np.zeros((1, 2, 3, 8), "f4")
    with pytest.raises(TypeError, match="unknown argument slopes; accepted"):
        fa_ext.jax.attention(q, q, q, slopes=q)
