"""``intervals``: the keys of each query as one or two ranges. Every kernel that takes them, forward and backward, is held to float64, and
to the bits of the same call with a mask of all pairs; the others refuse them by name."""

import dataclasses
import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.dense import INTERVALS
from fa_ext import reference
from fa_ext.reference.backward import attention_backward
from tests.contract import gradients, intervals, runner
from tests.contract.shares import some_of

FORWARD, BACKWARD = fa_ext.kernels(), fa_ext.kernels("backward")
TAKING = [kernel for kernel in (*FORWARD, *BACKWARD) if runner.listed_name(kernel) in intervals.TAKES]
SIZES = [(13, 17, 16), (70, 133, 40), (1, 90, 64), (3, 1500, 64)]


def skip_absent(kernel):
    if runner.device_of(kernel) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return kernel


@pytest.fixture(params=TAKING)
def taking(request):
    return skip_absent(request.param)


@pytest.fixture(params=[kernel for kernel in TAKING if kernel in FORWARD])
def attending(request):
    return skip_absent(request.param)


# ---- what the reference says ----


@pytest.mark.parametrize("name", intervals.OPTIONS)
@pytest.mark.parametrize("kind", INTERVALS)
def test_the_reference_is_a_mask_of_all_pairs(kind, name):
    case = intervals.case_of("reference", kind, name, 23, 41, 8, 5, dtype="float64")
    inputs = case.host_inputs()
    other = intervals.masked(case, inputs)
    for found, wanted in zip(reference.attention(**inputs), reference.attention(**other), strict=True):
        np.testing.assert_array_equal(found, wanted)
    wrt, dout = case.wrt(), np.random.default_rng(1).standard_normal(case.out_shape)
    found, wanted = (attention_backward(dout, wrt=wrt, **given) for given in (inputs, other))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradients_of_the_reference_are_differences():
    """By central differences, with all other options beside intervals."""
    case = Case(2, 2, 1, 5, 7, 4, 3, dtype="float64", intervals="two", causal="bottom_right", window=(5, None), softcap=1.5, bias="full",
                mask="full", sinks="same", alibi="heads", dropout=(0.3, 5), seed=3)  # fmt: skip
    inputs, rng = case.host_inputs(), np.random.default_rng(2)
    weights, of_lse = rng.standard_normal(case.out_shape), rng.standard_normal((2, 2, 5))

    def loss():
        out, lse = reference.attention(**inputs)
        return float((out * weights).sum() + (np.where(np.isfinite(lse), lse, 0) * of_lse).sum())

    found = attention_backward(weights, dlse=of_lse, wrt=case.wrt(), **inputs)
    wanted = gradients.differences(loss, {name: inputs[name] for name in case.wrt()})
    for name, x in zip(case.wrt(), found, strict=True):
        np.testing.assert_allclose(x, wanted[name], atol=1e-8, err_msg=name)


# ---- every kernel ----


@pytest.mark.parametrize("kind, name", some_of(itertools.product(INTERVALS, intervals.OPTIONS)))
def test_against_float64(taking, kind, name):
    for size in SIZES:
        case = intervals.case_of(taking, kind, name, *size)
        intervals.check(taking, dataclasses.replace(case, seq_k=300) if "ref" in taking and size[1] > 300 else case)


@pytest.mark.parametrize("name", intervals.OPTIONS)
def test_the_bits_of_a_mask(attending, name):
    """Tiles, and parts of the keys, that intervals leave out change no bit."""
    served = {} if runner.device_of(attending) == "cpu" else {"seqlens_q": np.full(2, 70, np.int32)}
    for kind in INTERVALS:
        intervals.as_one_mask(attending, intervals.case_of(attending, kind, name, 70, 333, 40), served)


@pytest.mark.parametrize("check", intervals.CHECKS, ids=lambda check: check.__name__)
def test_broadcasts_strides_documents_and_empty_arrays(attending, check):
    check(attending)


def test_hidden_rows_of_gradients_reach_nothing(taking):
    """NaN in q, dout and out of queries that see no key reaches no gradient, and their own gradients are 0."""
    if taking in FORWARD:
        pytest.skip("of the backward pass")
    case = intervals.case_of(taking, "full", "none", 70, 133, 40)
    problem = gradients.make(case, dlse=False)
    given = problem.inputs["intervals"].copy()
    given[:, :, ::3] = (5, 5)  # nothing
    out, lse = reference.attention(**{n: problem.inputs[n] for n in ("q", "k", "v")}, intervals=given)
    clean = problem.inputs | {"intervals": given, "out": out.astype(problem.inputs["q"].dtype), "lse": lse.astype(np.float32)}
    dirty = clean | {name: clean[name].copy() for name in ("q", "dout", "out")}
    for name in ("q", "dout", "out"):
        dirty[name][:, :, ::3] = np.nan
    found, wanted = (gradients.run(taking, gradients.Problem(case, inputs, ("q", "k", "v"))) for inputs in (dirty, clean))
    for name in ("q", "k", "v"):
        assert found[name].tobytes() == wanted[name].tobytes(), name
    assert not found["q"][:, :, ::3].any()


def test_other_contents_of_the_same_array(attending):
    """A call that differs from the last one in what the array holds, or in the array alone, is read anew."""
    case = intervals.case_of(attending, "full", "causal", 30, 50, 16)
    inputs = case.host_inputs()
    other = inputs | {"intervals": np.roll(inputs["intervals"], 1, axis=2)}
    wanted = [runner.attention(attending, **x) for x in (inputs, other)]
    assert (wanted[0] != wanted[1]).any()
    placed = runner.on(attending, inputs | {"intervals": inputs["intervals"].copy()})
    for x, y in zip((inputs, other, inputs), (*wanted, wanted[0]), strict=True):
        if runner.device_of(attending) == "cpu":
            placed["intervals"][...] = x["intervals"]
            np.testing.assert_array_equal(runner.to_host(fa_ext.attention(**placed, kernel=attending)), y)
        np.testing.assert_array_equal(runner.attention(attending, **x), y)


# ---- refusals ----


REFUSING = [k for k in (*FORWARD, *BACKWARD) if runner.listed_name(k) not in intervals.TAKES | intervals.TAKES_SOME]


@pytest.mark.parametrize("kernel", REFUSING)
def test_others_refuse_them(kernel):
    skip_absent(kernel)
    case = Case(1, 2, 2, 64, 64, 64, dtype="float16", intervals="full")
    placed = runner.on(kernel, case.host_inputs())
    if kernel in BACKWARD:
        placed = gradients.placed(gradients.make(case), kernel)
    with pytest.raises(fa_ext.UnsupportedError, match="takes no .*intervals"):
        (fa_ext.attention_backward if kernel in BACKWARD else fa_ext.attention)(**placed, kernel=kernel)


def test_explain():
    given = intervals.case_of("cpu", "two", "none", 5, 6, 16).host_inputs()
    assert fa_ext.explain(**given)[0] == "cpu_simd"


Q, K = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 2, 6, 8), np.float32)
GIVEN, PACKED = np.zeros((2, 4, 5, 2), np.int32), {"q": Q[:, 0], "k": K[:, 0], "v": K[:, 0]}
ACCEPTED = r"accepted: \(batch, heads, seq_q, 2\) or \(batch, heads, seq_q, n, 2\), n 1 or 2, where \(batch, heads, seq_q\) is \(2, 4, 5\), or 1 in place"
DENSE = "intervals belong to dense arrays; view a packed batch as B = 1 and give them for its rows"
LENGTHS = np.ones(2, np.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"intervals": GIVEN.astype(np.int64)}, TypeError, "^intervals has dtype int64; accepted: int32$"),
        ({"intervals": GIVEN.astype(np.float32)}, TypeError, "^intervals has dtype float32; accepted: int32$"),
        ({"intervals": GIVEN[0]}, ValueError, r"intervals has shape \(4, 5, 2\); " + ACCEPTED),
        ({"intervals": GIVEN[:, :, :4]}, ValueError, r"intervals has shape \(2, 4, 4, 2\); " + ACCEPTED),
        ({"intervals": GIVEN[:, :2]}, ValueError, r"intervals has shape \(2, 2, 5, 2\); " + ACCEPTED),
        ({"intervals": GIVEN[..., :1]}, ValueError, r"intervals has shape \(2, 4, 5, 1\); " + ACCEPTED),
        ({"intervals": GIVEN[:, :, :, None, :1]}, ValueError, r"intervals has shape \(2, 4, 5, 1, 1\); " + ACCEPTED),
        ({"intervals": GIVEN[:, :, :, None][:, :, :, :0]}, ValueError, r"intervals has shape \(2, 4, 5, 0, 2\); " + ACCEPTED),
        ({"intervals": np.zeros((2, 4, 5, 3, 2), np.int32)}, ValueError, r"shape \(2, 4, 5, 3, 2\), .*at most two intervals a query; use mask"),
        ({"intervals": GIVEN, "seqlens_k": LENGTHS}, ValueError, f"intervals and seqlens_k are both given; {DENSE}"),
        ({"intervals": GIVEN, "seqlens_q": LENGTHS}, ValueError, f"intervals and seqlens_q are both given; {DENSE}"),
        ({"intervals": GIVEN, "k_range": (LENGTHS, None)}, ValueError, f"intervals and k_range's begin are both given; {DENSE}"),
        ({"intervals": GIVEN, "positions": np.zeros((2, 5), np.int32)}, ValueError, f"intervals and positions are both given; {DENSE}"),
        ({"intervals": GIVEN, "page_table": np.zeros((2, 1), np.int32), "seqlens_k": LENGTHS, "layout": "bhsd"}, ValueError, DENSE),
        ({"intervals": GIVEN, "segments": (np.zeros((2, 5), np.int32), np.zeros((2, 6), np.int32))}, ValueError,
         "intervals and segments are both given"),
        ({"intervals": GIVEN, "cu_seqlens_q": np.zeros(3, np.int32), "cu_seqlens_k": np.zeros(3, np.int32)} | PACKED, ValueError,
         f"intervals and cu_seqlens_q are both given; {DENSE}"),
        ({"intervals": GIVEN} | PACKED, ValueError, f"intervals is given, but q is packed, shape .*; {DENSE}"),
        ({"intervals": GIVEN, "max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3"),
        ({"intervals": [0, 1]}, TypeError, "intervals has type list"),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, words):
    given = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=words):
        fa_ext.attention(**given)
    if "page_table" not in given and "max_seqlen_q" not in given:
        out = given["q"]
        with pytest.raises(error, match=words):
            fa_ext.attention_backward(out, given.pop("q"), given.pop("k"), given.pop("v"), out, np.zeros((2, 4, 5), np.float32), **given)


def test_a_result_that_meets_them_is_refused():
    memory = np.zeros(2 * Q.size, np.float32)
    held = memory.view(np.int32)[: GIVEN.size].reshape(GIVEN.shape)
    with pytest.raises(ValueError, match="out overlaps intervals in memory"):
        fa_ext.attention(Q, K, K, intervals=held, out=memory[: Q.size].reshape(Q.shape))
    with pytest.raises(ValueError, match=r'grads\["q"\] overlaps intervals in memory'):
        lse = np.zeros((2, 4, 5), np.float32)
        fa_ext.attention_backward(Q, Q, K, K, Q, lse, intervals=held, wrt=("q",), grads=(memory[: Q.size].reshape(Q.shape),))
