"""``fa_ext.verify``: same arguments as the call, outputs poisoned first, a report that names the row that ran."""

import numpy as np
import pytest

import fa_ext
from case import Case
from fa_ext.verify import Report


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


def test_a_forced_row_is_named_and_refusals_are_raised():
    row = fa_ext.kernels()[-1]
    assert fa_ext.verify(**arguments(), kernel=row).kernel == row
    with pytest.raises(ValueError, match="nothing_like_it"):
        fa_ext.verify(**arguments(), kernel="nothing_like_it")
    with pytest.raises(ValueError, match="causal"):
        fa_ext.verify(**arguments(), causal="sideways")


def test_without_lse():
    report = fa_ext.verify(**arguments(), return_lse=False)
    assert report and report.lse_max_abs is None and "LSE" not in str(report)


def test_given_outputs_are_used_and_overwritten():
    out, lse = np.full((2, 4, 33, 24), 3, np.float16), np.full((2, 4, 33), 3, np.float32)
    assert fa_ext.verify(**arguments(), out=(out, lse))
    np.testing.assert_array_equal(out, fa_ext.attention(**arguments()))
    assert np.isfinite(lse).all() and (lse != 3).all()
    assert fa_ext.verify(**arguments(), out=out, return_lse=False)


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
    for row in fa_ext.kernels():
        try:
            report = fa_ext.verify(**arguments(values="nan_tail", causal="bottom_right"), kernel=row)
        except (fa_ext.UnsupportedError, fa_ext.CudaError):
            continue
        assert report, str(report)


def test_an_empty_result():
    report = fa_ext.verify(**arguments(batch=0))
    assert report and report.worst is None and str(report)
