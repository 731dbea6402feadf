"""The promise ``max_seqlen_q``: that no sequence of packed queries has more queries than that."""

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from fa_ext import _core, reference
from fa_ext.reference import serving
from tests.contract import runner
from tests.contract.runner import on
from tests.contract.serving_calls import adapted, assert_keeps_a_promise, attend, same_bits, verify

SHARED = dict(heads=4, heads_kv=2, head_dim=64, dtype="float16")
CASES = [
    Case.sequences((1, 3, 0, 7), (5, 333, 4, 90), causal="bottom_right", sinks=True, **SHARED),
    Case.sequences((2, 70, 1, 17), (9, 133, 40, 200), k="packed", slack=2, causal="top_left", window=(50, 3), **SHARED),
    Case.sequences((9, 1, 2), (300, 1, 64), page_size=3, alibi="heads", positions="random", k_range=True, **SHARED),
    # more queries than any one sequence of few may have
    Case.sequences(tuple(n % 5 for n in range(40)), tuple(4 + n * 7 % 90 for n in range(40)), causal="bottom_right", **SHARED),
    Case.sequences((1,) * 70, tuple(1 + n * 11 % 130 for n in range(70)), page_size=8, window=(40, None), **SHARED),
]
PACKED = Case.sequences((2, 3, 1), (5, 9, 4), slack=0).host_inputs()
KERNELS = [kernel for kernel in fa_ext.kernels() if runner.takes(kernel, **CASES[0].host_inputs())]


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


@pytest.mark.parametrize("case", CASES, ids=serving_cases.short)
def test_a_promise_changes_no_bit_while_it_is_kept(case, kernel):
    device = None if runner.device_of(kernel) == "cpu" else 0
    try:
        assert_keeps_a_promise(kernel, adapted(kernel, case), lambda: fa_ext.faults(device))
    except Unplaceable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_against_float64(most, kernel):
    report = verify(kernel, adapted(kernel, CASES[0]).host_inputs() | {"max_seqlen_q": most}, check=False)
    assert report, report
    fa_ext.faults(None)


def test_it_goes_with_lengths(kernel):
    """A length may be less than the rows there are, and it is the length that the promise speaks of."""
    arguments = adapted(kernel, CASES[0]).host_inputs() | {"seqlens_q": np.array([1, 2, 0, 4], np.int32)}
    assert same_bits(attend(kernel, arguments, max_seqlen_q=4, check=True), attend(kernel, arguments))
    with pytest.raises(ValueError, match=r"seqlens_q of sequence 3 leads to 4, .* max_seqlen_q has room for \(1 such"):
        fa_ext.attention(**on(kernel, arguments), max_seqlen_q=3, check=True, kernel=kernel)


def test_a_broken_promise_is_an_error_where_it_is_checked():
    out = np.full(PACKED["q"].shape, 7, PACKED["q"].dtype)
    with pytest.raises(ValueError, match=r"seqlens_q of sequence 1 leads to 3, .*more than its storage or max_seqlen_q has room for \(1 such"):
        fa_ext.attention(**PACKED, max_seqlen_q=2, out=out)
    assert (out == 7).all() and fa_ext.faults(None) == []


def test_the_reference_takes_it_by_itself():
    sequences, faults = serving.resolve(3, 6, 0, cu_seqlens_q=[0, 2, 5, 6], max_seqlen_q=1)
    assert [s.seq_q for s in sequences] == [1, 1, 1]
    assert [(f.kind, f.sequence, f.index, f.value) for f in faults] == [("length", 0, 0, 2), ("length", 1, 0, 3)]
    out, lse = reference.attention(**PACKED, max_seqlen_q=2)
    assert not out[4].any() and (lse[:, 4] == -np.inf).all() and np.isfinite(lse[:, [0, 1, 2, 3, 5]]).all()


def test_what_is_refused():
    out = np.full(PACKED["q"].shape, 7, PACKED["q"].dtype)
    for error, value, match in (
        (ValueError, -1, "max_seqlen_q is -1; accepted: an int >= 0"),
        (ValueError, -(10**30), f"max_seqlen_q is -{10**30}; accepted: an int >= 0"),
        (ValueError, np.int8(-3), "max_seqlen_q is -3; accepted: an int >= 0"),
        (TypeError, True, "max_seqlen_q has type bool; accepted: an int >= 0, or None"),
        (TypeError, np.bool_(True), "max_seqlen_q has type .*bool.*; accepted: an int >= 0, or None"),
        (TypeError, 2.0, "max_seqlen_q has type float; accepted: an int >= 0, or None"),
        (TypeError, np.array([3]), "max_seqlen_q has type ndarray; accepted: an int >= 0, or None"),
    ):
        for call in (fa_ext.attention, fa_ext.explain, fa_ext.workspace_size):
            with pytest.raises(error, match=match):
                call(**PACKED, max_seqlen_q=value, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "case",
    [Case(), Case.sequences(q="padded", k="padded"), Case.sequences((1, 1, 1), (4, 5, 6), q="one"), Case.sequences((2, 3), (4, 5), q="padded")],
    ids=str,
)
def test_it_is_of_packed_queries_alone(case):
    arguments = case.host_inputs()
    for call in (fa_ext.attention, fa_ext.explain, fa_ext.workspace_size):
        with pytest.raises(ValueError, match=r"max_seqlen_q is 900, but q has shape \(.*\) and there is no cu_seqlens_q; accepted .* packed q"):
            call(**arguments, max_seqlen_q=900)
    assert fa_ext.attention(**arguments, max_seqlen_q=None).tobytes() == fa_ext.attention(**arguments).tobytes()


def test_the_backward_pass_knows_none():
    arguments = {name: PACKED[name] for name in ("q", "k", "v", "cu_seqlens_q")}
    with pytest.raises(TypeError, match="unknown argument max_seqlen_q; accepted: dout"):
        _core.attention_backward(None, **arguments, out=arguments["q"], lse=arguments["q"], max_seqlen_q=3)


def test_cases_have_it():
    case = CASES[0].changed(max_seqlen_q=9)
    assert str(case).endswith("max_seqlen_q=9") and Case.parse(str(case)) == case
    assert case.host_inputs()["max_seqlen_q"] == 9 and "max_seqlen_q" not in CASES[0].host_inputs()
    with pytest.raises(ValueError, match="max_seqlen_q is 6; accepted: the longest sequence's 7 queries or more"):
        CASES[0].changed(max_seqlen_q=6)
    with pytest.raises(ValueError, match="max_seqlen_q is of q=packed and operation=serving"):
        Case.sequences(q="padded", max_seqlen_q=9)
    with pytest.raises(ValueError, match="'max_seqlen_q' is no option without sequences"):
        Case(max_seqlen_q=99)
    with pytest.raises(ValueError, match="max_seqlen_q is 'few'; accepted: a whole number"):
        Case.parse(str(case).replace("max_seqlen_q=9", "max_seqlen_q=few"))
