"""ALiBi: slopes of every shape and stride, what they mean beside a bias, what is refused, and who takes them."""

import dataclasses

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.dense import ALIBIS
from bench.problems.placement import dtype_of
from fa_ext import _core, reference
from tests.contract import gradients, runner
from tests.contract.devices import DEVICES

B, H, HK, SQ, SK, D = 2, 4, 2, 5, 7, 16
SIMPLE = dict.fromkeys("qkv", np.zeros((1, 4, 3, 8), np.float16))
FORWARD = [k for k in fa_ext.kernels() if runner.takes(k, **SIMPLE, alibi=np.zeros(4, np.float32))]


@pytest.fixture(params=FORWARD)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def takes_bias(kernel):
    return runner.takes(kernel, **SIMPLE, bias=np.zeros((3, 3), np.float32))


@pytest.fixture
def kernel_with_bias(kernel):
    if not takes_bias(kernel):
        pytest.skip(f"{kernel} takes no bias")
    return kernel


def with_bias(kernel, q, k, v, **options):
    """(out, lse), in float64 where the kernel takes no bias."""
    if takes_bias(kernel):
        return runner.attention(kernel, q, k, v, return_lse=True, **options)
    return reference.attention(q, k, v, **options)


def assert_same(kernel, found, wanted):
    """Bit for bit; where a bias has another tile than slopes, to rounding."""
    if runner.has_float64(kernel):
        np.testing.assert_array_equal(found, wanted)
    elif runner.has_dtype(kernel, "float32"):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    else:
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-3)


def arrays(dtype=np.float32, seq_q=SQ, seq_k=SK, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, H, seq_q, D), (B, HK, seq_k, D), (B, HK, seq_k, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays_for(kernel, **shape):
    """Float32, or what the kernel takes."""
    return arrays(dtype_of(runner.narrowest(kernel)), **shape)


def exact_slopes(shape, seed=1):
    """Powers of two, whose products with small distances every float32 holds."""
    return (2.0 ** np.random.default_rng(seed).integers(-6, 2, shape)).astype(np.float32)


def as_bias(slopes, seq_q, seq_k, offset):
    """-slope |j - (i + offset)| as (B, H, Sq, Sk)."""
    distance = np.abs(np.arange(seq_k) - (np.arange(seq_q)[:, None] + offset))
    return (-np.broadcast_to(slopes, (B, H))[..., None, None] * distance).astype(np.float32)


@pytest.mark.parametrize("shape", [(H,), (B, H)], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (1, 113), (3, 239), (113, 3), (113, 113), (67, 511)])
def test_slopes_are_the_bias_that_they_stand_for(kernel, shape, seq_q, seq_k):
    q, k, v = arrays_for(kernel, seq_q=seq_q, seq_k=seq_k)
    slopes = exact_slopes(shape)
    for causal, offset in ((False, seq_k - seq_q), ("bottom_right", seq_k - seq_q), ("top_left", 0)):
        capped = {} if runner.listed_name(kernel) == "wgmma_sm90" else {"softcap": 2.0}  # which takes no softcap beside slopes
        for options in ({}, {"window": (40, 9), **capped}):
            options = options | {"causal": causal}
            found = runner.attention(kernel, q, k, v, alibi=slopes, return_lse=True, **options)
            wanted = with_bias(kernel, q, k, v, bias=as_bias(slopes, seq_q, seq_k, offset), **options)
            for a, b in zip(found, wanted, strict=True):
                assert_same(kernel, a, b)


def test_slopes_join_a_bias_and_respect_what_it_excludes(kernel_with_bias):
    kernel = kernel_with_bias
    q, k, v = arrays_for(kernel)
    slopes, rng = exact_slopes((B, H)), np.random.default_rng(2)
    bias = rng.integers(-8, 8, (B, H, SQ, SK)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    both = bias + as_bias(slopes, SQ, SK, SK - SQ)
    assert_same(kernel, runner.attention(kernel, q, k, v, alibi=slopes, bias=bias), runner.attention(kernel, q, k, v, bias=both))


@pytest.mark.parametrize("value", [0.0, 2.3e38, -2.3e38, np.finfo(np.float32).max, np.finfo(np.float32).min])
@pytest.mark.parametrize("slope", [1e37, -1e37, 1e38])
def test_what_is_beyond_the_limit_of_a_bias(kernel_with_bias, value, slope):
    """A bias and what slopes take count as FA_LIMIT there, and so does their sum: it neither excludes nor is infinite."""
    kernel = kernel_with_bias
    q, k, v = arrays_for(kernel)
    bias = np.full((SQ, SK), value, np.float32)
    bias[1, 2] = bias[2] = -np.inf
    slopes = np.array([slope, -slope, 0, 1], np.float32)
    report = fa_ext.verify(**runner.on(kernel, {"q": q, "k": k, "v": v, "alibi": slopes, "bias": bias}), kernel=kernel)
    assert report, report


def test_any_strides(kernel):
    q, k, v = arrays_for(kernel)
    slopes = exact_slopes((B, H))
    wanted = runner.attention(kernel, q, k, v, alibi=slopes)
    memory = np.full((3 * H, 2 * B), np.nan, np.float32)
    odd = memory[::-3, ::2].T
    odd[...] = slopes
    if runner.library_of(kernel) != "torch":  # which has no negative strides
        np.testing.assert_array_equal(runner.attention(kernel, q, k, v, alibi=odd), wanted)
    one = np.broadcast_to(np.float32(0.25), (B, H))
    np.testing.assert_array_equal(
        runner.attention(kernel, q, k, v, alibi=one),
        runner.attention(kernel, q, k, v, alibi=np.full(H, 0.25, np.float32)),
    )


@pytest.mark.parametrize("slope", [np.nan, np.inf, -np.inf])
def test_a_slope_that_is_not_finite_reaches_its_own_head(kernel, slope):
    q, k, v = arrays_for(kernel)
    slopes = exact_slopes((B, H))
    wanted, wanted_lse = runner.attention(kernel, q, k, v, alibi=slopes, return_lse=True)
    slopes[1, 2] = slope
    out, lse = runner.attention(kernel, q, k, v, alibi=slopes, return_lse=True)
    truth, truth_lse = reference.attention(q, k, v, alibi=slopes)
    assert np.isnan(out[1, 2]).all() and np.isnan(lse[1, 2]).all() and np.isnan(truth[1, 2]).all() and np.isnan(truth_lse[1, 2]).all()
    wanted[1, 2] = wanted_lse[1, 2] = np.nan
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    if not takes_bias(kernel):
        return
    nothing = np.full((SQ, SK), -np.inf, np.float32)  # excludes whatever the slope is
    out, lse = runner.attention(kernel, q, k, v, alibi=slopes, bias=nothing, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_random_calls(kernel):
    for n, case in enumerate(cases.random_cases(29, 60, 2e7)):
        sloped = dataclasses.replace(case, alibi=ALIBIS[n % len(ALIBIS)])
        if case.values.startswith("nan") or not runner.has_dtype(kernel, case.dtype):
            continue
        try:
            assert (report := runner.verdict(kernel, sloped)), f"{report}\n{sloped}"
        except fa_ext.UnsupportedError as error:
            assert not cases.must_accept(runner.listed_name(kernel), sloped), f"{error}\n{sloped}"


# ---- gradients ----


def test_gradients_are_those_of_the_bias():
    q, k, v = arrays()
    slopes = exact_slopes((H,))
    bias = as_bias(slopes, SQ, SK, SK - SQ)
    out, lse = fa_ext.attention(q, k, v, alibi=slopes, return_lse=True)
    zero = np.zeros((SQ, SK), np.float32)
    found = fa_ext.attention_backward(out, q, k, v, out, lse, alibi=slopes, bias=zero, wrt=("q", "k", "v", "bias"))
    wanted = fa_ext.attention_backward(out, q, k, v, out, lse, bias=bias, wrt=("q", "k", "v", "bias"))
    for a, b in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(found[3], wanted[3].sum(axis=(0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_verify_backward(dtype):
    for kind in ("heads", "batch", "strided"):
        case = Case(2, 4, 2, 31, 47, 40, dtype=dtype, alibi=kind, causal="top_left", sinks="same", softcap=3.0, bias="full")
        problem = gradients.make(case)
        report = fa_ext.verify_backward(**problem.inputs, wrt=problem.wrt)
        assert report, str(report)


def test_the_judges_see_forgotten_slopes(monkeypatch):
    case = Case(2, 4, 2, 31, 47, 40, dtype="float32", alibi="heads")
    inputs = case.host_inputs()
    problem = gradients.make(case)

    def without(call):
        return lambda *args, alibi=None, **options: call(*args, **options)

    monkeypatch.setattr(fa_ext, "attention", without(_core.attention))
    monkeypatch.setattr(fa_ext, "attention_backward", without(_core.attention_backward))
    assert not fa_ext.verify(**inputs)
    assert not fa_ext.verify_backward(**problem.inputs, wrt=problem.wrt)


# ---- what is refused ----

REFUSED = [
    (np.zeros(H - 1, np.float32), ValueError, r"alibi has shape \(3,\); accepted: \(heads,\) = \(4,\) or \(batch, heads\) = \(2, 4\)"),
    (np.zeros((1, H), np.float32), ValueError, r"alibi has shape \(1, 4\)"),
    (np.zeros((H, B), np.float32), ValueError, r"alibi has shape \(4, 2\)"),
    (np.zeros((B, H, 1), np.float32), ValueError, r"alibi has shape \(2, 4, 1\)"),
    (np.zeros((), np.float32), ValueError, r"alibi has shape \(\)"),
    (np.zeros(H, np.float16), TypeError, "alibi has dtype float16; accepted: float32"),
    (np.zeros(H, np.float64), TypeError, "alibi has dtype float64; accepted: float32"),
    (np.zeros(H, bool), TypeError, "alibi has dtype bool; accepted: float32"),
    (np.zeros(H, np.int32), TypeError, "alibi has dtype int32; accepted.*: float32"),
    ([0.5] * H, TypeError, "alibi has type list; accepted: an array"),
    (0.5, TypeError, "alibi has type float; accepted: an array"),
]


@pytest.mark.parametrize(("slopes", "error", "match"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_refused(slopes, error, match):
    q, k, v = arrays()
    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    into, grad = np.full_like(out, 7), np.full_like(q, 7)
    for call in (
        lambda: fa_ext.attention(q, k, v, alibi=slopes, out=into),
        lambda: fa_ext.explain(q, k, v, alibi=slopes),
        lambda: fa_ext.attention_backward(out, q, k, v, out, lse, alibi=slopes, wrt=("q",), grads=(grad,)),
        lambda: fa_ext.explain_backward(out, q, k, v, out, lse, alibi=slopes),
        lambda: fa_ext.verify(q, k, v, alibi=slopes),
    ):
        with pytest.raises(error, match=match):
            call()
    assert (into == 7).all() and (grad == 7).all()


def test_results_may_not_meet_the_slopes():
    q, k, v = arrays()
    memory = np.zeros(B * H * SQ * D, np.float32)
    with pytest.raises(ValueError, match="out overlaps alibi in memory"):
        fa_ext.attention(q, k, v, alibi=memory[:H], out=memory.reshape(B, H, SQ, D))
    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r'grads\["q"\] overlaps alibi in memory'):
        fa_ext.attention_backward(out, q, k, v, out, lse, alibi=memory[:H], wrt=("q",), grads=(memory.reshape(q.shape),))
    with pytest.raises(ValueError, match='wrt names "alibi"; accepted: "q", "k", "v", "bias", "sinks"'):
        fa_ext.attention_backward(out, q, k, v, out, lse, alibi=memory[:H], wrt=("alibi",))


def test_empty_calls_take_slopes_for_nobody():
    for batch, heads in ((0, 4), (2, 0)):
        q = np.zeros((batch, heads, 3, 8), np.float32)
        for slopes in (np.zeros(heads, np.float32), np.zeros((batch, heads), np.float32)):
            assert fa_ext.attention(q, q, q, alibi=slopes).shape == q.shape


def test_a_thread_does_not_remember_slopes():
    q, k, v = arrays()
    slopes = exact_slopes((H,))
    plain, sloped = fa_ext.attention(q, k, v), fa_ext.attention(q, k, v, alibi=slopes)
    assert not np.array_equal(plain, sloped)
    for given in (None, slopes, None, None, slopes, 2 * slopes, slopes):
        found = fa_ext.attention(q, k, v, alibi=given)
        if given is None or given is slopes:
            np.testing.assert_array_equal(found, plain if given is None else sloped)
        else:
            assert not np.array_equal(found, sloped)


@runner.needs_every_instance
def test_kernels_that_do_not_take_slopes_say_so():
    """CUDA kernels, too, on devices that need not be here."""
    q, k, v = arrays(np.float16)
    slopes = np.zeros(H, np.float32)
    for device in (None, *DEVICES.values()):
        for kernel, (answer, reason, _) in _core.answers(q, k, v, alibi=slopes, device=device).items():
            if (runner.device_of(kernel) == "cpu") != (device is None) or answer == "not here":
                continue
            if kernel in cases.OF_PACKED_QUERIES:
                assert answer == "refuses" and reason.startswith("takes packed queries alone"), reason
            elif kernel in cases.WITH_ALIBI:
                assert answer in ("takes", "declines"), (kernel, reason)
            else:
                assert (answer, reason) == ("refuses", "takes no ALiBi slopes"), kernel
    lse = np.zeros((B, H, SQ), np.float32)
    for kernel in fa_ext.kernels("backward"):
        device = None if runner.device_of(kernel) == "cpu" else DEVICES["h200"]
        chosen, reasons = fa_ext.explain_backward(q, q, k, v, q, lse, alibi=slopes, device=device, kernel=kernel, **gradients.order(kernel))
        assert chosen == kernel if kernel in gradients.WITH_ALIBI else "takes no ALiBi slopes" in reasons[kernel]
