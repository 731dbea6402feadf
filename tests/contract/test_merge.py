"""``merge``: results over parts of the keys -> the result over all of them, held against float64, and what it refuses."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import magnitudes
from bench.problems.placement import dtype_of, place
from fa_ext import reference
from fa_ext.judge.merge import half_ulp, judge_merge
from tests.contract import runner

KERNELS = fa_ext.kernels("merge")
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def library(kernel, dtype="float16"):
    if runner.device_of(kernel) == "cpu":
        return "numpy"
    return "torch" if runner.has("torch") else "cupy" if dtype != "bfloat16" else pytest.skip("bfloat16 needs torch")


def parts(count, shape=(2, 3, 5, 40), dtype="float16", layout="bhsd", seed=0, spread=3.0):
    """(outs, lses) of random parts; shape is (B, H, S, D), or (H, T, D) for packed ones."""
    rng = np.random.default_rng([seed, count])
    packed = len(shape) == 3
    outs = [rng.standard_normal(shape).astype(dtype_of(dtype)) for _ in range(count)]
    if packed or layout == "bshd":
        outs = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in outs]
    wide = np.float64 if dtype == "float64" else np.float32
    return outs, [(spread * rng.standard_normal(shape[:-1])).astype(wide) for _ in range(count)]


def run(kernel, outs, lses, *, sinks=None, dtype=None, **options):
    """The result on the kernel's device, on the host; poisoned before, and judged."""
    name = library(kernel, outs[0].dtype.name)
    dtype = dtype or outs[0].dtype.name
    out = place(np.full(outs[0].shape, np.nan, dtype_of(dtype)), name)
    lse = place(np.full(lses[0].shape, np.nan, lses[0].dtype), name)
    given = [[place(x, name) for x in xs] for xs in (outs, lses)]
    on_device = None if sinks is None else place(sinks, name)
    returned = fa_ext.merge(*given, sinks=on_device, out=(out, lse), kernel=kernel, **options)
    assert returned[0] is out and returned[1] is lse
    got, got_lse = runner.to_host(out), runner.to_host(lse)
    report = judge_merge(got, got_lse, outs, lses, sinks=sinks, layout=options.get("layout"), kernel=kernel)
    assert report, report
    return got, got_lse


# ---- what it computes ----


@pytest.mark.parametrize("count", (1, 2, 3, 7, 31, 32, 33, 64, 65))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_parts(kernel, dtype, count):
    run(kernel, *parts(count, dtype=dtype))


@pytest.mark.parametrize("dim", (1, 3, 8, 64, 96, 113, 128, 200, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(kernel, dtype, dim):
    for seq in (1, 3, 113):
        run(kernel, *parts(3, (2, 2, seq, dim), dtype, seed=dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", DTYPES)
def test_the_result_has_any_dtype(kernel, dtype, into):
    for shape in ((2, 3, 5, 64), (2, 3, 5, 37)):
        run(kernel, *parts(3, shape, dtype), dtype=into)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_packed_results(kernel, dtype):
    run(kernel, *parts(3, (2, 3, 70, 64), dtype, layout="bshd"), layout="bshd")
    run(kernel, *parts(4, (6, 113, 64), dtype))
    run(kernel, *parts(4, (6, 113, 64), dtype), layout="bshd")  # packed results have one order


def test_strides(kernel):
    outs, lses = parts(2, (2, 4, 6, 32), "float32")
    if library(kernel) != "numpy":
        pytest.skip("views are made by NumPy here")
    wide = np.full((2, 4, 6, 64), np.nan, np.float32)
    wide[..., ::2] = outs[0]
    turned = np.ascontiguousarray(lses[1].T).T
    columns = outs[0].transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0)
    backwards = outs[1][:, :, ::-1].copy()[:, :, ::-1]
    for given in ([wide[..., ::2], backwards], [columns, outs[1]]):
        run(kernel, given, [lses[0], turned])
    everywhere = np.broadcast_to(outs[0][:1, :, :1], outs[0].shape)
    run(kernel, [outs[1], everywhere], [lses[0], np.broadcast_to(lses[0][:, :1], lses[0].shape)])
    memory = np.full((2, 6, 4, 33), 7, np.float32)
    into = memory[..., :32].swapaxes(1, 2)
    into_lse = np.full((4, 6, 2), np.nan, np.float32).transpose(2, 0, 1)
    fa_ext.merge(outs, lses, out=(into, into_lse), kernel=kernel)
    assert judge_merge(into, into_lse, outs, lses)
    assert (memory[..., 32] == 7).all()


@pytest.mark.parametrize("kind", ("same", "float32"))
def test_sinks_join_once(kernel, kind):
    for count, dtype in itertools.product((1, 2, 40), DTYPES):
        outs, lses = parts(count, (2, 5, 7, 64), dtype)
        sinks = np.array([0.3, -50, 60, 4, -4]).astype(dtype_of(dtype if kind == "same" else "float32"))
        run(kernel, outs, lses, sinks=sinks)
        run(kernel, *parts(count, (5, 9, 64), dtype), sinks=sinks)


def test_sinks_that_are_not_finite(kernel):
    outs, lses = parts(3, (1, 4, 6, 64), "float32")
    lses[0][:] = lses[1][:] = -np.inf
    lses[2][:, :, ::2] = -np.inf
    sinks = np.array([-np.inf, np.inf, 3e38, np.nan], np.float32)
    out, lse = run(kernel, outs, lses, sinks=sinks)
    assert (out[:, 0, 1::2] == outs[2][:, 0, 1::2]).all() and (lse[:, 0, ::2] == -np.inf).all()
    assert (out[:, 1] == 0).all() and (lse[:, 1] == np.inf).all()
    assert np.isnan(out[:, 3, 1::2]).all() and (out[:, 3, ::2] == 0).all() and np.isnan(lse[:, 3]).all()


# ---- parts that see nothing, and numbers at the edge ----


@pytest.mark.parametrize("empty", (-np.inf, np.inf))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sanitize
def test_an_empty_part_is_not_read(kernel, dtype, empty):
    outs, lses = parts(4, (2, 2, 9, 64), dtype)
    rng = np.random.default_rng(1)
    for out, lse in zip(outs, lses, strict=True):
        hidden = rng.random(lse.shape) < 0.5
        lse[hidden] = empty
        out[hidden] = np.nan if dtype != "float16" else np.inf
    for lse in lses:
        lse[:, 0, 3] = empty  # empty in every part
    out, lse = run(kernel, outs, lses)
    assert (out[:, 0, 3] == 0).all() and (lse[:, 0, 3] == -np.inf).all()
    sinks = np.array([1.5, -2.0], np.float32)
    out, lse = run(kernel, outs, lses, sinks=sinks)
    assert (out[:, 0, 3] == 0).all() and (lse[:, 0, 3] == 1.5).all()


def test_nan_spreads_in_its_row_alone(kernel):
    outs, lses = parts(3, (1, 2, 8, 64), "float32")
    lses[1][0, 0, 2] = np.nan
    outs[2][0, 1, 5, 7] = np.nan
    out, lse = run(kernel, outs, lses)
    assert np.isnan(out[0, 0, 2]).all() and np.isnan(lse[0, 0, 2])
    assert np.isnan(out[0, 1, 5, 7]) and np.isnan(out).sum() == 65 and np.isnan(lse).sum() == 1


@pytest.mark.parametrize("shift", (-3e38, -1e4, -104.0, 88.0, 1e4, 3e38))
def test_huge_and_tiny_lses(kernel, shift):
    outs, lses = parts(3, (1, 2, 8, 64), "float32")
    run(kernel, outs, [(x + np.float32(shift)).astype(np.float32) for x in lses])
    run(kernel, outs, [lses[0], (lses[1] + np.float32(shift)).astype(np.float32), lses[2]])


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("exponent", magnitudes.EXPONENTS)
def test_lses_of_every_magnitude(kernel, exponent, sign):
    """Ties, and neighbours in float32: the difference of two LSEs is exact, and their product with log2(e) is not."""
    for dtype, seed in itertools.product(DTYPES, range(3)):
        outs, lses = parts(5, (1, 2, 37, 40), dtype, seed=seed)
        steps = np.random.default_rng(seed).integers(0, 3 if exponent > 20 else 1 << max(0, 22 - exponent), (5, *lses[0].shape))
        level = np.float32(sign * 1.3 * 2.0**exponent)
        lses = [(level + step * np.spacing(level)).astype(np.float32) for step in steps]
        run(kernel, outs, lses)
        sinks = np.array([level, -level], np.float32)
        run(kernel, outs, lses, sinks=sinks)


def test_the_order_of_parts_changes_little(kernel):
    outs, lses = parts(64, (1, 2, 8, 64), "float32", spread=8)
    first, _ = run(kernel, outs, lses)
    second, _ = run(kernel, outs[::-1], lses[::-1])
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_parts_of_one_weight(kernel):
    outs, lses = parts(2, (1, 1, 4, 64), "float32")
    out, lse = run(kernel, outs, [lses[0], lses[0]])
    np.testing.assert_allclose(out, (outs[0] + outs[1]) / 2, atol=1e-6)
    np.testing.assert_allclose(lse, lses[0] + np.log(2), atol=1e-6)


@pytest.mark.parametrize("dtype", (*DTYPES, "float64"))
def test_one_part_comes_back_bit_for_bit(kernel, dtype):
    if dtype == "float64" and library(kernel) != "numpy":
        pytest.skip("float64 runs on the CPU")
    outs, lses = parts(1, (2, 3, 5, 37), dtype)
    outs[0][0, 0, 0] = -0.0
    outs[0][0, 0, 1] = np.nan
    out, lse = run(kernel, outs, lses)
    assert runner.bits(out).tobytes() == runner.bits(outs[0]).tobytes() and lse.tobytes() == lses[0].tobytes()


def test_zero_sizes(kernel):
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (3, 0, 8), (0, 4, 8)):
        out, lse = run(kernel, *parts(2, shape, "float32"))
        assert out.size == lse.size == 0


def test_float64_on_the_cpu():
    outs, lses = parts(3, dtype="float64")
    out, lse = run("cpu_merge", outs, lses)
    want, want_lse = reference.merge(outs, lses)
    np.testing.assert_allclose(out, want, rtol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13)


# ---- beside attention ----


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_the_parts_of_a_call_make_the_call(kernel, dtype):
    """Keys in parts, then merged, against all keys at once: sinks count once, whether there is one part or several."""
    name = library(kernel)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 4, n, 64)).astype(dtype) for n in (33, 130, 130))
    sinks = np.array([0.5, -3, 8, 1], np.float32)
    want, want_lse = reference.attention(q, k, v, sinks=sinks)
    for cuts in ((0, 130), (0, 64, 130), (0, 1, 100, 101, 130)):
        found = [fa_ext.attention(*(place(x, name) for x in (q, k[:, :, a:b], v[:, :, a:b])), return_lse=True)
                 for a, b in itertools.pairwise(cuts)]  # fmt: skip
        outs, lses = zip(*found, strict=True)
        out, lse = fa_ext.merge(outs, list(lses), sinks=place(sinks, name), kernel=kernel)
        np.testing.assert_allclose(runner.to_host(out).astype(float), want, atol=4e-3 if dtype == "float16" else 1e-5)
        np.testing.assert_allclose(runner.to_host(lse), want_lse, atol=2e-3)


# ---- the result's memory ----


def test_the_result_may_be_the_first_part(kernel):
    for dtype in DTYPES:
        outs, lses = parts(3, (2, 3, 40, 64), dtype)
        name = library(kernel, dtype)
        given = [[place(x.copy(), name) for x in xs] for xs in (outs, lses)]
        out, lse = fa_ext.merge(*given, out=(given[0][0], given[1][0]), kernel=kernel)
        assert out is given[0][0] and lse is given[1][0]
        assert judge_merge(runner.to_host(out), runner.to_host(lse), outs, lses)
        given = [[place(x.copy(), name) for x in xs] for xs in (outs, lses)]
        out, lse = fa_ext.merge(*given, out=given[0][0], kernel=kernel)
        assert out is given[0][0] and judge_merge(runner.to_host(out), runner.to_host(lse), outs, lses)


def test_new_results():
    outs, lses = parts(2)
    out, lse = fa_ext.merge(outs, lses)
    assert type(out) is type(lse) is np.ndarray and out.dtype == outs[0].dtype and lse.dtype == np.float32
    assert out.shape == outs[0].shape and lse.shape == lses[0].shape and out.flags.c_contiguous


def test_the_same_bits_each_time(kernel):
    outs, lses = parts(40, (2, 3, 113, 64), "float16")
    first = run(kernel, outs, lses)
    for _ in range(5):
        assert all((runner.bits(a) == runner.bits(b)).all() for a, b in zip(first, run(kernel, outs, lses), strict=True))


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(kernel):
    """Parts whose rows are one row; a result of 4.3 GB."""
    if library(kernel) == "numpy":
        pytest.skip("an hour on two cores")
    torch = pytest.importorskip("torch")
    if runner.free_bytes("torch") < 12 << 30:
        pytest.skip("needs 12 GiB of device memory")
    tokens, heads, dim = (1 << 31) // (32 * 128) + 513, 32, 128
    outs = [torch.randn(1, heads, dim, dtype=torch.float16, device="cuda").expand(tokens, -1, -1) for _ in range(2)]
    lses = [torch.randn(heads, 1, device="cuda").expand(-1, tokens) for _ in range(2)]
    out, lse = fa_ext.merge(outs, lses, kernel=kernel)
    want, want_lse = fa_ext.merge([x[:1].contiguous() for x in outs], [x[:, :1].contiguous() for x in lses])
    assert bool((out == want).all()) and bool((lse == want_lse).all())


@pytest.mark.gpu
def test_under_capture():
    """Parts are kept by the graph: replay gives the same for any number of them."""
    torch = pytest.importorskip("torch")
    for count in (2, 70):
        outs, lses = parts(count, (2, 3, 113, 64), "float16")
        outs, lses = ([torch.from_numpy(x).cuda() for x in xs] for xs in (outs, lses))
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        fa_ext.merge(outs, lses, out=(out, lse))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fa_ext.merge(outs, lses, out=(out, lse))
        want, want_lse = fa_ext.merge(list(outs), list(lses))
        for _ in range(3):
            out.fill_(float("nan")), lse.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want) and torch.equal(lse, want_lse)


# ---- what it refuses ----


def changed(xs, index, x):
    return [x if n == index else y for n, y in enumerate(xs)]


def test_bad_input():
    outs, lses = parts(3)
    good = np.full_like(outs[0], 5), np.full_like(lses[0], 5)
    flat = np.zeros((2, 3), np.float16)
    f32 = outs[1].astype(np.float32)
    readonly = np.zeros_like(outs[0])
    readonly.flags.writeable = False
    bad = [
        (([], []), {}, ValueError, "outs is empty"),
        ((outs, []), {}, ValueError, "lses is empty"),
        ((outs, lses[:2]), {}, ValueError, "lses has 2 arrays, but outs has 3"),
        ((outs,), {}, TypeError, "lses is missing"),
        ((outs[0], lses), {}, TypeError, "outs has type ndarray; accepted: a list"),
        ((changed(outs, 1, outs[1][:1]), lses), {}, ValueError, r"outs\[1\] has shape \(1, 3, 5, 40\)"),
        ((changed(outs, 2, f32), lses), {}, TypeError, r"outs\[2\] has dtype float32, but outs\[0\] has float16"),
        (([flat] * 3, lses), {}, ValueError, r"outs\[0\] has 2 dimensions"),
        ((outs, changed(lses, 1, lses[1][:, :, :4])), {}, ValueError, r"lses\[1\] has shape \(2, 3, 4\); accepted: \(batch"),
        ((outs, changed(lses, 2, lses[2].astype(np.float64))), {}, TypeError, r"lses\[2\] has dtype float64; accepted: float32"),
        (([x > 0 for x in outs], lses), {}, TypeError, r"outs\[0\] has dtype bool"),
        ((outs, lses), {"sinks": np.zeros(4, np.float32)}, ValueError, r"sinks has shape \(4,\)"),
        ((outs, lses), {"sinks": np.zeros(3, np.float64)}, TypeError, "sinks has dtype float64"),
        ((outs, lses), {"layout": "hbsd"}, ValueError, "layout"),
        ((outs, lses), {"out": good[0][:1]}, ValueError, "out has shape"),
        ((outs, lses), {"out": good[0].astype(np.float64)}, TypeError, "out has dtype float64; accepted: float16, bfloat16"),
        ((outs, lses), {"out": (good[0], good[1].astype(np.float16))}, TypeError, "lse has dtype float16"),
        ((outs, lses), {"out": readonly}, ValueError, "out is read-only"),
        ((outs, lses), {"out": (good[0],)}, ValueError, "out has 1 items"),
        ((outs, lses), {"out": outs[1]}, ValueError, r"out overlaps outs\[1\]"),
        ((outs, lses), {"out": outs[0][::-1]}, ValueError, r"out overlaps outs\[0\]"),
        ((outs, lses), {"out": (good[0], lses[2])}, ValueError, r"lse overlaps lses\[2\]"),
        ((outs, lses), {"kernel": "cpu_ref"}, ValueError, "accepted: .*cpu_merge"),
        ((outs, lses), {"stream": 1}, ValueError, r"stream is given, but outs\[0\] is on the CPU"),
        ((outs, lses), {"scale": 1}, TypeError, "unknown argument scale; accepted: outs, lses"),
    ]
    before = [x.copy() for x in (*outs, *lses, *good)]
    for args, options, error, match in bad:
        for call in (fa_ext.merge, fa_ext.explain_merge):
            with pytest.raises(error, match=match):
                call(*args, **options)
    for x, y in zip(before, (*outs, *lses, *good), strict=True):
        np.testing.assert_array_equal(x, y)


def test_kinds_are_not_mixed():
    torch = pytest.importorskip("torch")
    outs, lses = parts(2, dtype="float32")
    with pytest.raises(TypeError, match=r"outs\[1\] is a Tensor, but outs\[0\] is a ndarray"):
        fa_ext.merge([outs[0], torch.from_numpy(outs[1])], lses)


def test_float64_does_not_run_on_a_device():
    if runner.no_device():
        pytest.skip(runner.no_device())
    outs, lses = ([fa_ext.to_device(x) for x in xs] for xs in parts(2, dtype="float64"))
    with pytest.raises(fa_ext.UnsupportedError, match="float64 runs on the CPU"):
        fa_ext.merge(outs, lses)


# ---- the functions around it ----


def test_names_and_explanations(monkeypatch):
    outs, lses = parts(2)
    assert "cpu_merge" in KERNELS and not set(KERNELS) & set(fa_ext.kernels())
    chosen, reasons = fa_ext.explain_merge(outs, lses)
    assert chosen == "cpu_merge" and set(reasons) == set(KERNELS) - {"cpu_merge"}
    monkeypatch.setenv("FA_EXT_KERNEL", "cpu_ref")  # of attention alone
    fa_ext.merge(outs, lses)
    monkeypatch.setenv("FA_EXT_KERNEL_MERGE", "cpu_ref")
    with pytest.raises(ValueError, match='FA_EXT_KERNEL_MERGE is "cpu_ref".*accepted: .*cpu_merge'):
        fa_ext.merge(outs, lses)
    monkeypatch.setenv("FA_EXT_KERNEL_MERGE", "cpu_merge")
    assert fa_ext.explain_merge(outs, lses)[0] == "cpu_merge"
    with pytest.raises(ValueError, match="cpu_merge"):
        fa_ext.attention(outs[0], outs[0], outs[0], kernel="cpu_merge")
    with pytest.raises(ValueError, match="operation"):
        fa_ext.kernels("sort")
    for wrong in ((3,), ("merge", "merge")):
        with pytest.raises(TypeError):
            fa_ext.kernels(*wrong)
    assert fa_ext.kernels(operation="merge") == KERNELS and fa_ext.kernels("attention") == fa_ext.kernels()


def test_verify_merge():
    outs, lses = parts(3)
    report = fa_ext.verify_merge(outs, lses, sinks=np.zeros(3, np.float32))
    assert report and report.kernel == "cpu_merge" and "passed" in str(report)
    into = outs[0].copy(), lses[0].copy()
    assert fa_ext.verify_merge([into[0], *outs[1:]], [into[1], *lses[1:]], out=into)


@pytest.mark.parametrize("how", ("mean", "no sink", "lse", "empty", "scale"))
def test_the_judge_sees_what_is_wrong(how):
    outs, lses = parts(2, dtype="float32")
    lses[0][0, 0, 0] = lses[1][0, 0, 0] = -np.inf
    sinks = np.ones(3, np.float32)
    out, lse = (x.astype(np.float32) for x in reference.merge(outs, lses, sinks=sinks))
    assert judge_merge(out, lse, outs, lses, sinks=sinks)
    if how == "mean":
        out = np.where(np.isinf(lses[0])[..., None], 0, (outs[0] + outs[1]) / 2)
    elif how == "no sink":
        out, lse = (x.astype(np.float32) for x in reference.merge(outs, lses))
    elif how == "lse":
        lse = lse + np.float32(0.01)
    elif how == "empty":
        out[0, 0, 0, 3] = 1e-30
    else:
        out = out * np.float32(1 + 1e-5)
    assert not judge_merge(out, lse, outs, lses, sinks=sinks)


def test_half_an_ulp():
    for dtype, spacing in (("float16", np.spacing(np.float16(1.5))), ("float32", np.spacing(np.float32(1.5)))):
        assert half_ulp(np.array([1.5]), dtype)[0] == float(spacing) / 2
    assert half_ulp(np.array([1.0, 3.0]), "bfloat16").tolist() == [2.0**-8, 2.0**-7]
    assert half_ulp(np.array([0.0]), "float16")[0] == 2.0**-25


def test_the_reference_by_hand():
    """Two parts of one key each: their scores are their LSEs."""
    scores, values = [0.3, -1.2], [[2.0, -1.0], [0.5, 4.0]]
    outs = [np.array(v).reshape(1, 1, 1, 2) for v in values]
    lses = [np.array(s).reshape(1, 1, 1) for s in scores]
    out, lse = reference.merge(outs, lses, sinks=np.array([0.7]))
    total = sum(np.exp(scores)) + np.exp(0.7)
    np.testing.assert_allclose(out.ravel(), sum(np.exp(s) * np.array(v) for s, v in zip(scores, values, strict=True)) / total)
    np.testing.assert_allclose(lse.ravel(), np.log(total))
