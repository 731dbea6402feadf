"""Why the earlier "stable" kernels failed: the exact recurrence is accepted, each known mistake is rejected.

And the verifier itself: what it must notice in an otherwise right result.
"""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import cases, magnitudes
from bench.problems.case import Case
from fa_ext import reference
from fa_ext.judge import judge
from tests.contract import emulations, large_logits, runner
from tests.contract.shares import some_of

SIZE = dict(batch=1, heads=2, seq_q=40, seq_k=150, head_dim=32, head_dim_v=24, dtype="float32")
ADVERSARIAL = {
    "normal": Case(**SIZE),
    "causal": Case(**SIZE, causal="bottom_right"),
    "huge logits": Case(**SIZE, values="large"),
    "tiny logits": Case(**SIZE, values="tiny"),
    "keys in rising order": Case(**SIZE, values="sorted"),
    "keys in falling order": Case(**SIZE, values="descending"),
    "one dominant key in the last tile": Case(**SIZE, values="dominant"),
    "equal keys": Case(**SIZE, values="equal"),
    "all masked but one": Case(**SIZE, mask="one"),
    "some rows masked": Case(**SIZE, mask="rows"),
    "very negative logits": Case(**SIZE, values="negative", mask="full"),
    "rows without a key": Case(**SIZE, window=(0, 0), causal="top_left", mask="rows"),
    "a maximum that rises at 2^16": Case(**SIZE, logits=("rising", 16)),
    "alike at 2^30": Case(**SIZE, logits=("constant", 30)),
}
# Inputs on which each mistake must show. Elsewhere it may hide: that is why the grid holds all of them.
SHOWS = {
    "clamped_exponentials": {"huge logits", "keys in falling order", "all masked but one", "causal", "some rows masked"},
    "isfinite_fallback": {"huge logits", "very negative logits", "some rows masked", "rows without a key"},
    "skipped_rescale": {"huge logits", "one dominant key in the last tile"},
    "state_of_each_warp": {"normal", "huge logits", "keys in rising order", "all masked but one"},
    "stale_sum": {"normal", "keys in rising order", "equal keys", "tiny logits"},
    "sum_without_rescale": {"keys in rising order", "huge logits", "one dominant key in the last tile", "normal"},
    "masked_as_zero": {"causal", "very negative logits", "all masked but one", "rows without a key"},
    "forgotten_rounding": {"a maximum that rises at 2^16", "alike at 2^30"},
}


def scores(case, inputs):
    """(scores with -inf at excluded keys, v), float32."""
    s = inputs["q"] @ inputs["k"].swapaxes(-1, -2) * np.float32(inputs.get("scale", case.head_dim**-0.5))
    seen = reference.visible_keys(np.arange(case.seq_q), case.seq_q, case.seq_k, case.causal, case.window)
    seen = seen & inputs.get("mask", True)
    return np.where(seen, s, np.float32(-np.inf)), inputs["v"]


def emulated(emulation, case):
    inputs = case.host_inputs()
    out, lse = emulation(*scores(case, inputs))
    plain = reference.plain(**inputs, exact=case.exact)
    return judge(out, lse, reference.attention(**inputs), plain, "float32", kernel=emulation.__name__)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_exact_recurrence_is_accepted(name):
    report = emulated(emulations.exact, ADVERSARIAL[name])
    assert report, str(report)


@pytest.mark.parametrize(("mistake", "name"), [(m, n) for m in emulations.MISTAKES for n in sorted(SHOWS[m.__name__])])
def test_each_mistake_is_rejected(mistake, name):
    report = emulated(mistake, ADVERSARIAL[name])
    assert not report and report.failures, str(report)


def test_every_mistake_and_input_takes_part():
    assert set(SHOWS) == {mistake.__name__ for mistake in emulations.MISTAKES}
    assert set().union(*SHOWS.values()) <= set(ADVERSARIAL)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_some_mistake_would_pass_if_only_one_input_were_tried(name):
    """No input catches all by itself, except by the output: the grid needs each kind of input."""
    caught = [mistake.__name__ for mistake in emulations.MISTAKES if not emulated(mistake, ADVERSARIAL[name])]
    assert len(caught) < len(emulations.MISTAKES), caught


# ---- large scores ----

@pytest.mark.parametrize("amplitude", large_logits.AMPLITUDES)
@pytest.mark.parametrize("head_dim", large_logits.HEAD_DIMS)
def test_large_scores_stay_within_the_bounds(forward, head_dim, amplitude):
    if forward in runner.LIBRARY_SUMS:
        pytest.skip("the order of its sums is not ours")
    try:
        counted = large_logits.count([forward], range(8), head_dim, amplitude)[forward]
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    assert counted.seeds == 8 and not counted.over, counted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_scores_of_halves_stay_within_the_bounds(forward, dtype):
    amplitude = 40 if dtype == "float16" else 90  # scores of some 8,000
    for head_dim in large_logits.HEAD_DIMS:
        try:
            counted = large_logits.count([forward], range(8), head_dim, amplitude, dtype)[forward]
        except fa_ext.UnsupportedError as error:
            pytest.skip(str(error))
        assert counted.seeds == 8 and not counted.over, (head_dim, counted)


@pytest.mark.parametrize("kind, dtype", some_of(itertools.product(magnitudes.KINDS, cases.DTYPES)))
def test_scores_of_every_magnitude(forward, kind, dtype):
    """q . k is finite in float32, so the result is, and right."""
    wrong, judged = [], 0
    for case in cases.magnitude(kind, dtype):
        if runner.listed_name(forward) == "cpu_ref" and case.flops() > 1e7:
            continue
        try:
            report = runner.verdict(forward, case)
        except fa_ext.UnsupportedError as error:
            assert not cases.must_accept(runner.listed_name(forward), case) or runner.is_left_out(error), f"{case}: {error}"
            continue
        judged += 1
        wrong += [] if report else [f"{case}: {'; '.join(report.failures)}"]
    assert not wrong, f"{len(wrong)} of {judged}\n" + "\n".join(wrong[:12])
    if not judged:
        pytest.skip("takes none of these calls")


@pytest.mark.parametrize("exponent", (10, 20, 26, 28, 40, 99))
@pytest.mark.parametrize("sign", (1, -1))
def test_a_sink_that_ties_with_the_scores(forward, exponent, sign):
    """It weighs as much as a key, whatever the magnitude."""
    for dtype in cases.DTYPES:
        if not runner.has_dtype(forward, dtype) or not magnitudes.holds("constant", exponent, 64, dtype, 1 / 8):
            continue
        inputs = Case(1, 2, 1, 5, 7, 64, dtype=dtype, logits=("constant", sign * exponent)).host_inputs()
        score = reference.attention(inputs["q"], inputs["k"][:, :, :1], inputs["v"][:, :, :1])[1][0, :, 0].astype(np.float32)
        try:
            out, lse = runner.attention(forward, **inputs, sinks=score, return_lse=True)
        except fa_ext.UnsupportedError as error:
            pytest.skip(str(error))
        truth = reference.attention(**inputs, sinks=score)
        report = judge(out, lse, truth, reference.plain(**inputs, sinks=score, exact=True), dtype, kernel=forward)
        assert report, f"{dtype}\n{report}"


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_no_bound_of_large_scores_is_empty(kind, dtype):
    """Zeros, NaN, the last value and, but where it is the result, the mean of the values are wrong at every magnitude."""
    for case in cases.magnitude(kind, dtype):
        if not case.exact or case.bias or case.seq_q == 1 and case.causal or case.flops() > 1e7:
            continue
        inputs, truth, plain, _ = runner.known(case)
        if np.abs(truth[0]).max() < 0.01:  # the sinks take all
            continue
        mean = np.repeat(inputs["v"].astype(np.float64).mean(2, keepdims=True), case.heads // case.heads_kv, 1)
        answers = [np.zeros_like(truth[0]), np.full_like(truth[0], np.nan), np.broadcast_to(mean * 0 + inputs["v"][:, :1, -1:], truth[0].shape)]
        answers += [np.broadcast_to(mean, truth[0].shape)] if kind not in ("constant", "rising", "falling", "outgrown") else []
        for answer in answers:
            assert not judge(answer, None, truth, plain, dtype), case


@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_large_scores_are_exact_in_float32(kind):
    """In any order of the sums, and as large as their name says."""
    for dtype, exponent, sign in itertools.product(cases.DTYPES, magnitudes.EXPONENTS, (1, -1)):
        case = Case(1, 2, 1, 9, 333, 64, dtype=dtype, logits=(kind, sign * exponent))
        if not magnitudes.holds(kind, exponent, 64, dtype, 1 / 8):
            continue
        inputs = case.host_inputs()
        q, k = (inputs[name].astype(np.float32) for name in "qk")
        truth = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
        for order in (np.arange(64), np.arange(64)[::-1], np.random.default_rng(0).permutation(64)):
            s = np.zeros(truth.shape, np.float32)
            for d in order:
                s += q[..., d, None] * k[..., None, :, d]
            assert (s == truth).all(), case
        largest = np.abs(truth).max() * inputs.get("scale", 1 / 8)
        assert 2.0 ** (exponent - 1) <= largest < 2.0 ** (exponent + 1)


def test_sums_in_another_order_would_not():
    """The counter notices what it is there for: the scale in the operand, and one sum over head_dim."""
    over = 0
    for seed in range(40):
        q, k, v = large_logits.problem(seed, 128, 10)
        s = np.zeros((1, 4, 16, 16), np.float32)
        folded = q * np.float32(128**-0.5 * np.log2(np.e))
        for d in range(128):
            s += folded[..., d, None] * k[..., None, :, d]
        p = np.exp2(s - s.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True)) @ v
        over += not judge(out, None, reference.attention(q, k, v), reference.plain(q, k, v), "float32")
    assert over > 4, over


# ---- the verifier ----


@pytest.fixture(params=["float16", "bfloat16", "float32"])
def judged(request):
    """(judge of a changed result, the right result): plain's output with the exact LSE is what a change starts from."""
    case = Case(2, 4, 2, 50, 70, 32, dtype=request.param, causal="bottom_right", layout="bshd")
    try:
        inputs = case.host_inputs()
    except Exception as error:
        pytest.skip(str(error))
    truth, plain = reference.attention(**inputs), reference.plain(**inputs)
    return (lambda out, lse: judge(out, lse, truth, plain, request.param, layout="bshd")), (plain[0], truth[1])


def test_the_plain_result_passes_and_the_report_is_readable(judged):
    verdict, (out, lse) = judged
    report = verdict(out, lse)
    assert report and report.passed and not report.failures
    assert "passed" in str(report) and "frobenius" in str(report)
    assert report.max_abs <= report.plain_max_abs * (1 + 1e-12) and report.as_dict()["passed"]


def changes():
    def unwritten(out, lse):
        out[1, 3, 2, 5] = np.nan

    def zeros(out, lse):
        out[...] = 0

    def one_element(out, lse):
        out[1, 49, 3, 31] += 0.05

    def one_row(out, lse):
        out[0, 7, 1] = out[0, 8, 1]

    def two_heads(out, lse):
        out[:, :, [0, 3]] = out[:, :, [3, 0]]

    def scale(out, lse):
        out *= 1.03

    def noise(out, lse):
        out += np.random.default_rng(0).standard_normal(out.shape) * 0.02

    def lse_of_one_row(out, lse):
        lse[1, 2, 40] += 0.01

    def lse_in_base_2(out, lse):
        lse *= 1.4427

    def lse_unwritten(out, lse):
        lse[0, 0, 0] = np.nan

    def lse_infinite(out, lse):
        lse[0, 0, 0] = -np.inf

    return [unwritten, zeros, one_element, one_row, two_heads, scale, noise, lse_of_one_row, lse_in_base_2, lse_unwritten,
            lse_infinite]  # fmt: skip


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_wrong_result_is_rejected(judged, change):
    verdict, (out, lse) = judged
    out, lse = out.copy(), lse.copy()
    change(out, lse)
    report = verdict(out, lse)
    assert not report and "FAILED" in str(report)


def test_the_worst_index_is_where_the_error_is(judged):
    verdict, (out, lse) = judged
    out, lse = out.copy(), lse.copy()
    out[1, 49, 3, 31] += 1
    lse[1, 2, 40] += 1
    report = verdict(out, lse)
    assert report.worst == (1, 49, 3, 31) and report.worst_lse == (1, 2, 40)


def test_rows_without_a_key_must_be_exactly_zero():
    case = Case(1, 1, 1, 8, 4, 16, dtype="float32", causal="bottom_right")
    inputs = case.host_inputs()
    truth, plain = reference.attention(**inputs), reference.plain(**inputs)
    out, lse = plain[0].copy(), plain[1].copy()
    assert judge(out, lse, truth, plain, "float32")
    out[0, 0, 1, 3] = 1e-9
    assert not judge(out, lse, truth, plain, "float32")
    out[0, 0, 1, 3] = 0
    lse[0, 0, 1] = np.inf
    assert not judge(out, lse, truth, plain, "float32")


def test_nan_must_stay_where_it_is_visible():
    case = Case(1, 1, 1, 8, 8, 16, dtype="float32", causal=True, values="nan_tail")
    inputs = case.host_inputs()
    truth, plain = reference.attention(**inputs), reference.plain(**inputs)
    assert np.isnan(truth[0][0, 0, -1]).all() and np.isfinite(truth[0][0, 0, :-1]).all()
    out, lse = truth[0].copy(), truth[1].copy()
    assert judge(out, lse, truth, plain, "float32")
    spread = np.full_like(out, np.nan)
    assert not judge(spread, lse, truth, plain, "float32")
    assert judge(spread, lse, truth, plain, "float32", exempt=np.isfinite(truth[0]))
    hidden = np.where(np.isnan(out), 0, out)
    assert not judge(hidden, lse, truth, plain, "float32", exempt=np.isfinite(truth[0]))


def test_a_report_says_what_it_was_given():
    with pytest.raises(ValueError, match="shape"):
        judge(np.zeros((1, 1, 2, 3)), None, (np.zeros((1, 1, 2, 4)), None), np.zeros((1, 1, 2, 4)), "float32")
    with pytest.raises(ValueError, match="float8"):
        judge(np.zeros((1, 1, 2, 3)), None, (np.zeros((1, 1, 2, 3)), None), np.zeros((1, 1, 2, 3)), "float8")
