"""Arguments that attention_backward refuses: each message names the argument, and nothing is written."""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from tests.contract.gradients import make

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6


def arguments(**changes):
    case = Case(B, H, HK, SQ, SK, D, DV, dtype="float32", bias="full", sinks="same", mask="rows")
    return make(case).inputs | changes


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def three_arrays():
    return [zeros(B, H, SQ, D), zeros(B, HK, SK, D), zeros(B, HK, SK, DV)]


CASES = [
    # wrt
    (dict(wrt=()), ValueError, "wrt is empty"),
    (dict(wrt=("q", "x")), ValueError, 'wrt names "x"; accepted: "q", "k", "v", "bias", "sinks"'),
    (dict(wrt=("q", "q")), ValueError, 'wrt names "q" twice'),
    (dict(wrt="q"), TypeError, "wrt has type str"),
    (dict(wrt=None), TypeError, "wrt has type NoneType"),
    (dict(wrt=("q", 3)), TypeError, "an item of wrt has type int"),
    (dict(wrt=("bias",), bias=None), ValueError, 'wrt names "bias", but no bias is given'),
    (dict(wrt=("q", "sinks"), sinks=None), ValueError, 'wrt names "sinks", but no sinks is given'),
    # dout, out, lse, dlse
    (dict(dout=None, dlse=None), ValueError, "dout is None and dlse is not given"),
    (dict(dout=zeros(B, H, SQ, D)), ValueError, r"dout has shape \(2, 4, 5, 8\); accepted: \(2, 4, 5, 6\)"),
    (dict(dout=zeros(B, H, SQ, DV, dtype=np.float16)), TypeError, "dout has dtype float16; accepted: float32"),
    (dict(out=zeros(B, H, SQ)), ValueError, r"out has shape \(2, 4, 5\)"),
    (dict(out=zeros(B, H, SQ, DV, dtype=np.float16)), TypeError, "out has dtype float16; accepted: float32"),
    (dict(out=None), TypeError, "out has type NoneType"),
    (dict(lse=None), TypeError, "lse has type NoneType"),
    (dict(lse=zeros(B, SQ, H)), ValueError, r"lse has shape \(2, 5, 4\); accepted: \(2, 4, 5\)"),
    (dict(lse=zeros(B, H, SQ, dtype=np.float64)), TypeError, "lse has dtype float64; accepted: float32"),
    (dict(dlse=zeros(B, H, SQ, 1)), ValueError, "dlse has shape"),
    (dict(dlse=zeros(B, H, SQ, dtype=np.float16)), TypeError, "dlse has dtype float16"),
    (dict(dout=[1.0]), TypeError, "dout has type list"),
    # grads
    (dict(grads=3), TypeError, "grads has type int"),
    (dict(grads=(None,)), ValueError, "grads has 1 items, but wrt has 3"),
    (dict(grads=(None, zeros(B, HK, SK, DV), None)), ValueError, r'grads\["k"\] has shape \(2, 2, 7, 6\); accepted: \(2, 2, 7, 8\)'),
    (dict(grads=(zeros(B, H, SQ, D, dtype=np.float16), None, None)), TypeError, r'grads\["q"\] has dtype float16'),
    (dict(grads=(zeros(B, H, SQ, D, dtype=np.float64), None, None)), TypeError, r'grads\["q"\] has dtype float64'),
    (dict(grads=(np.broadcast_to(zeros(D), (B, H, SQ, D)), None, None)), BufferError, r'grads\["q"\].*overlaps itself'),
    (dict(grads=([1], None, None)), TypeError, r'grads\["q"\] has type list'),
    (dict(accumulate=True), ValueError, 'accumulate=True, but grads has no array for "q"'),
    (dict(accumulate=True, grads=(*three_arrays()[:2], None)), ValueError, 'no array for "v"'),
    (dict(accumulate=1), TypeError, "accumulate has type int"),
    (dict(deterministic="yes"), TypeError, "deterministic has type str"),
    # as in the forward
    (dict(v=zeros(B, HK, SK, 300)), ValueError, "v has head_dim 300"),
    (dict(causal=True), ValueError, "causal=True with seq_q 5 and seq_k 7"),
    (dict(scale=float("nan")), ValueError, "scale is nan"),
    (dict(softcap=-1.0), ValueError, "softcap is -1"),
    (dict(window=(-1, 0)), ValueError, "window's left bound is -1"),
    (dict(layout="sbhd"), ValueError, 'layout is "sbhd"'),
    (dict(stream=7), ValueError, "stream is given, but q is on the CPU"),
    (dict(kernel="simt"), ValueError, 'kernel is "simt", which names no kernel.*cpu_ref_backward'),
    (dict(dropped=0.1), TypeError, "unknown argument dropped; accepted: dout, q,"),
    (dict(device={}), TypeError, "unknown argument device"),
    (dict(return_lse=True), TypeError, "unknown argument return_lse"),
]


@pytest.mark.parametrize(("changes", "error", "match"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_what_is_refused(changes, error, match):
    given = arguments(**changes)
    if "grads" not in given:
        given["grads"] = None
    arrays = [x for x in (*given.values(), *(given["grads"] if isinstance(given["grads"], tuple) else ())) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in arrays]
    with pytest.raises(error, match=match):
        fa_ext.attention_backward(**given)
    for x, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "dout", "dlse", "bias", "mask", "sinks"])
def test_a_gradient_may_not_meet_an_input(name):
    given = arguments()
    memory = np.zeros(4096, np.uint8)
    x = given[name]
    view = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    given[name] = view
    grad = memory[x.nbytes - 4 :][: 4 * B * H * SQ * D].view(np.float32).reshape(B, H, SQ, D)
    before = memory.copy()
    with pytest.raises(ValueError, match=rf'grads\["q"\] overlaps {name} in memory'):
        fa_ext.attention_backward(**given, grads=(grad, None, None))
    np.testing.assert_array_equal(memory, before)


def test_gradients_may_not_meet_each_other():
    memory = np.zeros(B * HK * SK * (D + DV), np.float32)
    dk = memory[: B * HK * SK * D].reshape(B, HK, SK, D)
    dv = memory[B * HK * SK * D - 1 : -1].reshape(B, HK, SK, DV)
    with pytest.raises(ValueError, match=r'grads\["v"\] overlaps grads\["k"\]'):
        fa_ext.attention_backward(**arguments(), grads=(None, dk, dv))
    assert (memory == 0).all()


def test_read_only_gradients_are_refused():
    dq = zeros(B, H, SQ, D)
    dq.flags.writeable = False
    with pytest.raises(ValueError, match=r'grads\["q"\] is read-only'):
        fa_ext.attention_backward(**arguments(), grads=(dq, None, None))


def test_positional_arguments():
    given = arguments()
    first = [given.pop(n) for n in ("dout", "q", "k", "v", "out", "lse")]
    assert len(fa_ext.attention_backward(*first, **given)) == 3
    with pytest.raises(TypeError, match="7 positional arguments given"):
        fa_ext.attention_backward(*first, None, **given)
    with pytest.raises(TypeError, match="argument lse is missing"):
        fa_ext.attention_backward(*first[:5], **given)
    with pytest.raises(TypeError, match="argument q was given twice"):
        fa_ext.attention_backward(*first, q=first[1], **given)


def test_inputs_may_overlap_each_other():
    x = np.random.default_rng(0).standard_normal((1, 2, 6, 8)).astype(np.float32)
    out, lse = fa_ext.attention(x, x, x, return_lse=True)
    assert fa_ext.verify_backward(x, x, x, x, out, lse, dlse=lse)


# ---- which kernel ----


def test_explain_and_kernels(monkeypatch):
    given = arguments()
    assert "cpu_ref_backward" in fa_ext.kernels("backward")
    assert set(fa_ext.kernels("backward")).isdisjoint(fa_ext.kernels())
    chosen, reasons = fa_ext.explain_backward(**given)
    assert chosen in fa_ext.kernels("backward") and chosen not in reasons
    assert set(reasons) | {chosen} == set(fa_ext.kernels("backward"))
    chosen, _ = fa_ext.explain_backward(**given, kernel="cpu_ref_backward")
    assert chosen == "cpu_ref_backward"
    monkeypatch.setenv("FA_EXT_KERNEL_BACKWARD", "cpu_ref")
    with pytest.raises(ValueError, match='FA_EXT_KERNEL_BACKWARD is "cpu_ref".*accepted: .*cpu_ref_backward'):
        fa_ext.attention_backward(**given)
    monkeypatch.setenv("FA_EXT_KERNEL_BACKWARD", "cpu_ref_backward")
    assert fa_ext.explain_backward(**given)[0] == "cpu_ref_backward"
    monkeypatch.setenv("FA_EXT_KERNEL", "cpu_ref_backward")  # concerns attention() alone
    assert fa_ext.explain_backward(**given)[0] == "cpu_ref_backward"
    with pytest.raises(ValueError, match="FA_EXT_KERNEL is"):
        fa_ext.attention(given["q"], given["k"], given["v"])


def test_explain_raises_what_the_call_raises():
    with pytest.raises(ValueError, match="wrt is empty"):
        fa_ext.explain_backward(**arguments(wrt=()))


# ---- verify_backward ----


def test_verify_backward_reports():
    report = fa_ext.verify_backward(**arguments(), wrt=("q", "k", "v", "bias", "sinks"))
    assert report and report.kernel in fa_ext.kernels("backward") and report.dtype == "float32"
    assert [g.name for g in report.gradients] == ["q", "k", "v", "bias", "sinks"]
    assert "dsinks" in str(report) and report.as_dict()["passed"] is True


def test_verify_backward_overwrites_what_it_is_given():
    grads = three_arrays()
    assert fa_ext.verify_backward(**arguments(), grads=tuple(grads))
    assert all((g != 0).any() for g in grads)


def test_elements_that_are_not_written_are_noticed(monkeypatch):
    def forgetful(*args, grads, **options):
        kept = grads[1][1, 1, 3].copy()
        fa_ext._core.attention_backward(*args, grads=grads, **options)
        grads[1][1, 1, 3] = kept
        return grads

    monkeypatch.setattr(fa_ext, "attention_backward", forgetful)
    report = fa_ext.verify_backward(**arguments())
    assert not report and report.gradients[1].worst[:3] == (1, 1, 3)


def test_scaling_dout_does_not_change_the_verdict():
    from fa_ext.judge.backward import judge_backward
    from fa_ext.reference.backward import gradients

    given = {n: x for n, x in arguments().items() if n not in ("out", "lse")}
    for wrong in (1.0, 1 + 3e-5):
        verdicts = set()
        for k in (-8, 0, 8):
            scaled = given | {n: given[n] * np.float32(2.0**k) for n in ("dout", "dlse")}
            truth, plain = gradients(**scaled), gradients(**scaled, dtype="float32")
            got = {n: (wrong * g).astype(np.float32) for n, g in truth.items()}
            verdicts.add(bool(judge_backward(got, truth, plain, "float32")))
        assert verdicts == {wrong == 1.0}
