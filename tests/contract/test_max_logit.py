"""``max_logit``: the largest scaled product of each head. Every kernel that takes it is held to float64, and to the bits that its other
results have without it; the others refuse it by name."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16
from fa_ext import reference
from fa_ext.judge.max_logit import failures
from tests.contract import intervals, max_logit, runner

FORWARD = fa_ext.kernels()
TAKING = [kernel for kernel in FORWARD if runner.listed_name(kernel) in max_logit.TAKES]


@pytest.fixture(params=TAKING)
def taking(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


# ---- what the reference says ----


@pytest.mark.parametrize("name", max_logit.OPTIONS)
def test_the_reference_is_the_largest_of_all_pairs(name):
    """Score by score, from a mask of all that hides."""
    case = max_logit.case_of("reference", name, 9, 14, 8, dtype="float64")
    inputs = case.host_inputs()
    q, k = (x.swapaxes(1, 2) if case.layout == "bshd" else x for x in (inputs["q"], inputs["k"]))
    seen = np.broadcast_to(reference.visible_keys(range(9), 9, 14, case.causal, case.window), (2, 4, 9, 14)).copy()
    if "mask" in inputs:
        seen &= inputs["mask"]
    if "intervals" in inputs:
        seen &= intervals.as_mask(inputs["intervals"], 2, 4, 9, 14)
    if "bias" in inputs:
        seen &= inputs["bias"] != -np.inf
    scale = inputs.get("scale", 8**-0.5)
    wanted = np.full((2, 4), -np.inf)
    for b, h, i, j in np.argwhere(seen):
        wanted[b, h] = max(wanted[b, h], scale * (q[b, h, i] @ k[b, h // 2, j]))
    found = reference.max_logit(**{n: x for n, x in inputs.items() if n != "v"})
    np.testing.assert_allclose(found, wanted, atol=1e-12)


# ---- every kernel ----


@pytest.mark.parametrize("name", max_logit.OPTIONS)
def test_against_float64(taking, name):
    for size in max_logit.SIZES:
        max_logit.check(taking, max_logit.case_of(taking, name, *size))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_dtypes(taking, dtype):
    if not runner.has_dtype(taking, dtype):
        pytest.skip(f"no {dtype}")
    for dim, dim_v in ((64, None), (33, 20), (128, 128), (250, 8)):
        max_logit.check(taking, Case(1, 4, 1, 40, 75, dim, dim_v, dtype=dtype, causal="bottom_right"))


@pytest.mark.parametrize("check", max_logit.CHECKS, ids=lambda check: check.__name__)
def test_signs_nan_hidden_keys_and_empty_arrays(taking, check):
    check(taking)


@pytest.mark.parametrize("name", max_logit.OPTIONS)
def test_the_bits_of_a_call_without_it(taking, name):
    """Of the same instance: on a device, that of a call with lengths."""
    case = max_logit.case_of(taking, name, 70, 133, 40)
    inputs = case.host_inputs()
    more = {}
    if runner.device_of(taking) == "cuda" and not {"intervals", "dropout", "alibi"} & set(inputs):
        more = {"seqlens_q": np.full(2, 70, np.int32)}
    wanted = runner.attention(taking, **inputs, **more, return_lse=True)
    found = max_logit.run(taking, inputs, np.zeros(4, np.float32))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(runner.bits(x), runner.bits(y))


@pytest.mark.parametrize(("q", "k"), [*itertools.product(("packed", "padded"), ("packed", "padded", "paged"))])
def test_sequences(taking, q, k):
    """(B, H) is a row a sequence, also of one without queries or keys."""
    dtype = "float16" if "mma" in taking else "float32"
    for causal, scale in ((False, None), ("bottom_right", -0.4)):
        case = Case.sequences((5, 0, 70, 1), (33, 4, 90, 0), q=q, k=k, dtype=dtype, causal=causal, scale=scale)
        inputs = case.host_inputs()
        for shape in ((4, 4), (4,)):
            found = np.full(shape, -np.inf, np.float32)
            wanted = runner.attention(taking, **inputs, return_lse=True)
            for x, y in zip(max_logit.run(taking, inputs, found), wanted, strict=True):
                np.testing.assert_array_equal(runner.bits(x), runner.bits(y))
            wrong = failures(found, np.full(shape, -np.inf, np.float32), **{n: x for n, x in inputs.items() if n != "v"})
            assert not wrong, wrong
            assert shape == (4,) or (np.isinf(found) == np.array([[False], [True], [False], [True]])).all()


def test_segments():
    """Of kernels that take them."""
    case = Case.sequences((30, 20), (30, 20), q="padded", k="padded", segments=True)
    inputs, found = case.host_inputs(), np.full((2, 4), -np.inf, np.float32)
    fa_ext.attention(**inputs, max_logit=found)
    wrong = failures(found, np.full((2, 4), -np.inf, np.float32), **{n: x for n, x in inputs.items() if n != "v"})
    assert not wrong, wrong


def test_calls_in_a_row_go_on(taking):
    """The maximum of what calls see, whichever comes first; kept plans take other memory."""
    case = max_logit.case_of(taking, "causal", 30, 50, 16)
    several = [Case(2, 4, 2, 30, 50, 16, dtype=case.dtype, seed=seed).host_inputs() for seed in range(3)]
    alone = []
    for inputs in several:
        alone.append(np.full(4, -np.inf, np.float32))
        max_logit.run(taking, inputs, alone[-1])
    for order in itertools.permutations(range(3)):
        found = np.full(4, -np.inf, np.float32)
        for n in order:
            max_logit.run(taking, several[n], found)
        np.testing.assert_array_equal(found, np.max(alone, axis=0))


def test_verify_judges_it(taking):
    case = max_logit.case_of(taking, "causal", 30, 50, 40)
    placed = runner.on(taking, case.host_inputs() | {"max_logit": np.full((2, 4), -np.inf, np.float32)})
    assert fa_ext.verify(**placed, kernel=taking)


def test_what_is_wrong_is_seen():
    inputs = max_logit.case_of("cpu_ref", "causal", 30, 50, 40).host_inputs()
    given = {n: x for n, x in inputs.items() if n != "v"}
    before = np.array([-np.inf, 0, 9, np.nan], np.float32)
    right = np.where(reference.max_logit(**given).max(axis=0) > before, reference.max_logit(**given).max(axis=0), before).astype(np.float32)
    assert not failures(right, before, **given)
    for n, wrong in enumerate((np.inf, right[1] * np.float32(1.0001), 9.1, 1.0)):
        bad = right.copy()
        bad[n] = wrong
        assert len(failures(bad, before, **given)) == 1
    assert not failures(right, right, **given)


# ---- refusals ----


@pytest.mark.parametrize("kernel", [k for k in FORWARD if runner.listed_name(k) not in max_logit.TAKES])
def test_others_refuse_it(kernel):
    if reason := runner.absent(kernel):
        pytest.skip(reason)
    placed = runner.on(kernel, Case(1, 2, 2, 64, 64, 64).host_inputs() | {"max_logit": np.zeros(2, np.float32)})
    with pytest.raises(fa_ext.UnsupportedError, match="takes no .*max_logit"):
        fa_ext.attention(**placed, kernel=kernel)


def test_explain():
    inputs = max_logit.case_of("cpu", "none", 5, 6, 16).host_inputs()
    assert fa_ext.explain(**inputs, max_logit=np.zeros(4, np.float32))[0] == "cpu_simd"


Q, K = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 2, 6, 8), np.float32)
ACCEPTED = r"accepted: \(heads,\) = \(4,\) or \(batch, heads\) = \(2, 4\)"
READ_ONLY = np.zeros(4, np.float32)
READ_ONLY.flags.writeable = False
MEMORY = np.zeros(4 * Q.size, np.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_logit": np.zeros(4)}, TypeError, "^max_logit has dtype float64; accepted: float32$"),
        ({"max_logit": np.zeros(4, np.float16)}, TypeError, "^max_logit has dtype float16; accepted: float32$"),
        ({"max_logit": np.zeros((2, 4), np.int32)}, TypeError, "^max_logit has dtype int32; accepted: float32$"),
        ({"max_logit": np.zeros((2, 4, 1))}, TypeError, "^max_logit has dtype float64; accepted: float32$"),
        ({"max_logit": np.zeros(2, np.float32)}, ValueError, r"max_logit has shape \(2,\); " + ACCEPTED),
        ({"max_logit": np.zeros((4, 2), np.float32)}, ValueError, r"max_logit has shape \(4, 2\); " + ACCEPTED),
        ({"max_logit": np.zeros((1, 4), np.float32)}, ValueError, r"max_logit has shape \(1, 4\); " + ACCEPTED),
        ({"max_logit": np.zeros((2, 4, 1), np.float32)}, ValueError, r"max_logit has shape \(2, 4, 1\); " + ACCEPTED),
        ({"max_logit": np.zeros((), np.float32)}, ValueError, r"max_logit has shape \(\); " + ACCEPTED),
        ({"max_logit": np.broadcast_to(np.zeros(1, np.float32), 4)}, ValueError, "max_logit is read-only; accepted: a writable array"),
        ({"max_logit": np.lib.stride_tricks.as_strided(MEMORY, (4,), (0,))}, ValueError,
         r"max_logit has strides \(0,\); its elements must be distinct"),
        ({"max_logit": np.lib.stride_tricks.as_strided(MEMORY, (2, 4), (0, 4))}, ValueError, "its elements must be distinct"),
        ({"max_logit": READ_ONLY}, ValueError, "max_logit is read-only; accepted: a writable array"),
        ({"q": MEMORY[: Q.size].reshape(Q.shape), "max_logit": MEMORY[8:12]}, ValueError, "max_logit overlaps q in memory"),
        ({"alibi": MEMORY[:4], "max_logit": MEMORY[3:7]}, ValueError, "max_logit overlaps alibi in memory"),
        ({"out": MEMORY[: Q.size].reshape(Q.shape), "max_logit": MEMORY[8:12]}, ValueError, "max_logit overlaps out in memory"),
        ({"out": (MEMORY[: Q.size].reshape(Q.shape), MEMORY[320:360].reshape(2, 4, 5)), "max_logit": MEMORY[321:325]}, ValueError,
         "max_logit overlaps lse in memory"),
        ({"workspace": MEMORY.view(np.uint8), "max_logit": MEMORY[8:12]}, ValueError, "workspace overlaps max_logit in memory"),
        ({"max_logit": [0.0] * 4}, TypeError, "max_logit has type list"),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, words):
    MEMORY[...] = 5
    with pytest.raises(error, match=words):
        fa_ext.attention(**{"q": Q, "k": K, "v": K} | change)
    assert (MEMORY == 5).all()


def test_the_backward_pass_has_none():
    lse = np.zeros((2, 4, 5), np.float32)
    with pytest.raises(TypeError, match="max_logit"):
        fa_ext.attention_backward(Q, Q, K, K, Q, lse, max_logit=np.zeros(4, np.float32))


@pytest.mark.skipif(BFLOAT16 is None, reason="ml_dtypes is not installed")
def test_few_rows_of_bfloat16():
    """A decode step, whose rows cpu_simd reads along."""
    inputs = Case(2, 8, 2, 1, 300, 64, dtype="bfloat16").host_inputs()
    max_logit.check("cpu_simd", Case(2, 8, 2, 1, 300, 64, dtype="bfloat16"), inputs)
