"""``fa_ext.verify``: same arguments as the call, outputs poisoned first, a report that names the kernel that ran."""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from fa_ext.judge import Report, judge


def arguments(**changes):
    return Case(**{**dict(batch=2, heads=4, heads_kv=2, seq_q=33, seq_k=47, head_dim=24), **changes}).make_inputs()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_and_layout(layout, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    report = fa_ext.verify(**arguments(dtype=dtype, layout=layout, causal="bottom_right", sinks="same", bias="full"))
    assert isinstance(report, Report) and report, str(report)
    assert report.kernel in fa_ext.kernels() and report.dtype == dtype
    assert report.shape == ((2, 33, 4, 24) if layout == "bshd" else (2, 4, 33, 24))
    assert report.max_abs <= report.max_abs_bound and report.lse_max_abs <= report.lse_bound


def test_a_forced_kernel_is_named_and_refusals_are_raised():
    kernel = fa_ext.kernels()[-1]
    assert fa_ext.verify(**arguments(), kernel=kernel).kernel == kernel
    with pytest.raises(ValueError, match="nothing_like_it"):
        fa_ext.verify(**arguments(), kernel="nothing_like_it")
    with pytest.raises(ValueError, match="causal"):
        fa_ext.verify(**arguments(), causal="sideways")


def test_without_lse():
    report = fa_ext.verify(**arguments(), return_lse=False)
    assert report and report.lse_max_abs is None and "LSE" not in str(report)


@pytest.mark.parametrize("options", [{"mask": False}, {"mask": np.True_}, {"bias": 0.5}, {"bias": np.float32(-2), "mask": True}])
def test_scalars(options):
    report = fa_ext.verify(**arguments(sinks="same"), **options)
    assert report, str(report)


def test_given_outputs_are_used_and_overwritten():
    out, lse = np.full((2, 4, 33, 24), 3, np.float16), np.full((2, 4, 33), 3, np.float32)
    assert fa_ext.verify(**arguments(), out=(out, lse))
    np.testing.assert_array_equal(out, fa_ext.attention(**arguments()))
    assert np.isfinite(lse).all() and (lse != 3).all()
    assert fa_ext.verify(**arguments(), out=out, return_lse=False)


class Opaque:
    """An array of the CPU without item assignment, as ``fa_ext.DeviceArray`` is one of a device."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_outputs_without_item_assignment(monkeypatch, layout):
    shape = (2, 33, 4, 24) if layout == "bshd" else (2, 4, 33, 24)
    out, lse = np.full(shape, 3, np.float16), np.full((2, 4, 33), 3, np.float32)
    inputs = arguments(layout=layout)
    assert fa_ext.verify(**inputs, out=(Opaque(out), Opaque(lse)))
    np.testing.assert_array_equal(out, fa_ext.attention(**inputs))

    calls = []

    def idle(*arrays, **options):
        """Writes what poisons the outputs, and nothing in the call that is judged."""
        calls.append(options)
        return fa_ext._core.attention(*arrays, **options) if options["kernel"] else options["out"]

    monkeypatch.setattr(fa_ext, "attention", idle)
    report = fa_ext.verify(**inputs, out=(Opaque(out), Opaque(lse)))
    assert not report and report.max_abs == np.inf and len(calls) == 2
    assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.gpu
def test_a_device_array_as_output():
    q, k, v, out = (fa_ext.to_device(np.ones((1, 2, 16, 64), np.float16)) for _ in range(4))
    assert fa_ext.verify(q, k, v, out=out)
    np.testing.assert_array_equal(fa_ext.to_numpy(out), np.ones((1, 2, 16, 64), np.float16))


def test_a_pair_of_outputs_says_that_the_lse_is_wanted():
    out, lse = np.empty((2, 4, 33, 24), np.float16), np.empty((2, 4, 33), np.float32)
    report = fa_ext.verify(**arguments(), out=(out, lse), return_lse=False)
    assert report and report.lse_max_abs is not None


def plain(shape=(1, 2, 4, 8)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda q, k, v: dict(q=q, k=k, v=v, out=q), ValueError, "out overlaps q"),
        (lambda q, k, v: dict(q=q, k=k, v=v, out=(np.empty_like(q), v)), ValueError, "lse has shape"),
        (lambda q, k, v: dict(q=q, k=k, v=v, out=[q, k]), TypeError, "out has type list"),
        (lambda q, k, v: dict(q=q, k=k, v=v[0], out=np.zeros_like(q)), ValueError, "v has shape .*, but k has shape"),
        (lambda q, k, v: dict(q=q.tolist(), k=k, v=v, out=np.zeros_like(q)), TypeError, "q has type list"),
        (lambda q, k, v: dict(q=q.astype(np.int64), k=k, v=v, out=np.zeros_like(q)), TypeError, "q has dtype int64"),
        (lambda q, k, v: dict(q=q, k=k, v=v, mask=[True], out=np.zeros_like(q)), TypeError, "mask has type list"),
        (lambda q, k, v: dict(q=q, k=k, v=v, stream=0, out=np.zeros_like(q)), ValueError, "stream is given"),
    ],
)
def test_a_refused_call_raises_what_attention_raises_and_writes_nothing(change, error, match):
    given = change(*plain())
    before = {name: x.copy() for name, x in given.items() if isinstance(x, np.ndarray)}
    for call in (fa_ext.attention, fa_ext.verify):
        with pytest.raises(error, match=match):
            call(**given)
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x)


def test_outputs_survive_a_forced_kernel_that_refuses():
    cuda = [kernel for kernel in fa_ext.kernels() if fa_ext._core.build_info()["kernels"][kernel][0] == "cuda"]
    if not cuda:
        pytest.skip("no CUDA kernel is built")
    q, k, v = plain()
    out = np.full_like(q, 3)
    with pytest.raises(fa_ext.UnsupportedError, match=cuda[0]):
        fa_ext.verify(q, k, v, out=out, kernel=cuda[0])
    assert (out == 3).all()


def test_elements_that_are_not_written_are_noticed(monkeypatch):
    def forgetful(q, k, v, **options):
        out, lse = options["out"]
        kept = out[1, 2, 5].copy()
        fa_ext._core.attention(q, k, v, **options)
        out[1, 2, 5] = kept
        return out, lse

    monkeypatch.setattr(fa_ext, "attention", forgetful)
    report = fa_ext.verify(**arguments())
    assert not report and report.max_abs == np.inf and report.worst[:3] == (1, 2, 5)


def test_inputs_are_left_alone():
    inputs = arguments(mask="rows", bias="full32")
    before = {n: x.copy() for n, x in inputs.items()}
    fa_ext.verify(**inputs)
    for name, x in inputs.items():
        np.testing.assert_array_equal(x, before[name])


def test_nan_at_hidden_keys_and_at_visible_ones():
    assert fa_ext.verify(**arguments(values="nan_outside", causal="top_left"))
    for kernel in fa_ext.kernels():
        try:
            report = fa_ext.verify(**arguments(values="nan_tail", causal="bottom_right"), kernel=kernel)
        except (fa_ext.UnsupportedError, fa_ext.CudaError):
            continue
        assert report, str(report)


def test_a_wrong_number_is_noticed_where_nan_may_spread():
    want, exempt = np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 1), bool)
    out = np.ones((1, 1, 2, 4), np.float32)
    out[0, 0, 1] = np.nan
    assert judge(out, None, (want, np.zeros((1, 1, 2))), want, "float32", exempt=exempt)
    assert not judge(out, None, (want, np.zeros((1, 1, 2))), want, "float32")
    out[0, 0, 0, 2] = 1.5
    assert not judge(out, None, (want, np.zeros((1, 1, 2))), want, "float32", exempt=exempt)


def test_an_empty_result():
    report = fa_ext.verify(**arguments(batch=0))
    assert report and report.worst is None and str(report)


@pytest.mark.parametrize("broken", [False, True])
def test_the_table_says_of_the_lse_what_the_verdict_says(broken):
    """The largest LSE error belongs to an entry with a wide bound; another one, or none, leaves its own."""
    want, lse = np.zeros((1, 1, 3, 4)), np.array([[[0.0, 5000.0, -np.inf]]])
    got = lse + [[[1e-3 if not broken else 3e-3, 2e-2, 0.0]]]
    report = judge(want.astype(np.float32), got, (want, lse), want, "float32")
    assert report.passed is not broken and report.lse_max_abs == pytest.approx(2e-2)
    assert report.lse_bound == pytest.approx(2e-3) and report.worst_lse == (0, 0, 0)
    assert ("FAILED" in str(report)) is broken
    (line,) = [line for line in str(report).splitlines() if line.startswith("  LSE max abs")]
    assert "0.02 " in line and ("FAILED" in line) is broken and "0.002, at (0, 0, 0)" in line


@pytest.mark.parametrize("true, given, right", [
    (4e39, np.inf, True), (-4e39, -np.inf, True), (3.4028235e38, 3.4028235e38, True), (2.5e38, 2.5e38, True),
    (4e39, 3.4e38, False), (4e39, np.nan, False), (4e39, -np.inf, False), (-4e39, np.inf, False),
    (3.3e38, np.inf, False), (5.0, np.inf, False), (np.inf, 3.4e38, False),
])  # fmt: skip
def test_an_lse_that_float32_cannot_hold_is_what_float32_makes_of_it(true, given, right):
    want, lse = np.ones((1, 1, 1, 4)), np.array([[[true]]])
    report = judge(want.astype(np.float32), np.array([[[given]]], np.float32), (want, lse), want, "float32")
    assert report.passed is right, str(report)
    if right and np.isinf(given):  # float64 holds it
        assert not judge(want, np.array([[[np.inf]]]), (want, lse), want, "float64")


def test_logits_beyond_float32():
    q, k, v = (np.ones((1, 1, n, 8), np.float32) for n in (4, 5, 5))
    for sign in (1, -1):
        report = fa_ext.verify(sign * q * np.float32(1e19), k * np.float32(4e19), v, scale=1.25, kernel="cpu_ref")
        assert report and report.lse_max_abs == 0.0, str(report)
