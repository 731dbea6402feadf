"""Which keys each query sees, read off the result: every band at small sizes, the edges of bands at sizes of tiles; and
what becomes of the queries that do not see a NaN."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import DTYPES, Case
from bench.problems.placement import Unplaceable, place
from fa_ext import reference
from tests.contract import runner

SMALL = ((1, 1), (1, 5), (2, 2), (3, 5), (5, 3), (5, 1), (4, 4))
TILES = ((70, 120), (120, 70), (65, 128), (128, 128))
CAUSAL = (False, True, "top_left", "bottom_right")


def sees(seq_q, seq_k, causal, window):
    """(seq_q, seq_k): the definition, written as it is."""
    i, j = np.arange(seq_q)[:, None], np.arange(seq_k)[None, :]
    diagonal = 0 if causal == "top_left" else seq_k - seq_q
    left, right = window
    seen = np.ones((seq_q, seq_k), bool)
    if left is not None:
        seen &= -left <= j - (i + diagonal)
    if right is not None:
        seen &= j - (i + diagonal) <= right
    return seen & (j <= i + diagonal) if causal else seen


def bands(seq_q, seq_k):
    """(causal, window): at small sizes all there are, else those that leave out a single corner, one key or none."""
    if seq_q <= 5:
        sides = (None, *range(6))
    else:
        far = [extent + shift for extent in {seq_q, seq_k, abs(seq_k - seq_q)} for shift in (-2, -1, 0)]
        sides = (None, 0, 1, *sorted({n for n in far if n >= 0}))
    for causal, window in itertools.product(CAUSAL, itertools.product(sides, sides)):
        if causal is not True or seq_q == seq_k:
            yield causal, window


@pytest.mark.parametrize(("seq_q", "seq_k"), SMALL + TILES)
def test_every_query_sees_the_keys_of_its_band(forward, seq_q, seq_k):
    """All scores are 0 and the values a unit matrix, so that a weight is 1 / (keys seen), or 0."""
    dim = 16 if seq_q <= 5 else 128
    q, k = np.zeros((1, 1, seq_q, dim), np.float16), np.zeros((1, 1, seq_k, dim), np.float16)
    v = np.eye(seq_k, dim, dtype=np.float16)[None, None]
    library = runner.library_for(forward, runner.SIMPLEST)
    q, k, v = (place(x, library) for x in (q, k, v))
    taken = 0
    for causal, window in bands(seq_q, seq_k):
        try:
            out, lse = fa_ext.attention(q, k, v, causal=causal, window=window, return_lse=True, kernel=forward)
        except fa_ext.UnsupportedError:
            continue
        taken += 1
        seen = sees(seq_q, seq_k, causal, window)
        message = f"seq_q {seq_q}, seq_k {seq_k}, causal={causal!r}, window={window}"
        np.testing.assert_array_equal(runner.to_host(out)[0, 0, :, :seq_k] > 0, seen, message)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(runner.to_host(lse)[0, 0], np.log(seen.sum(axis=1)), atol=1e-3, err_msg=message)
    assert taken or runner.listed_name(forward) == "wgmma_split_sm90"


@pytest.mark.parametrize("option", ["causal", "window", "mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_makes_nan_of_its_tile_or_nothing(forward, dtype, option):
    """A key of NaN and a value of infinity are seen by some queries. The others get the right result or, in the same
    tile, NaN; never a wrong number. Queries hundreds of rows away are in another tile."""
    case = Case(1, 2, 1, 700, 700, 64, dtype=dtype)
    try:
        library = runner.library_for(forward, case)
    except Unplaceable as error:
        pytest.skip(str(error))
    inputs = case.host_inputs()
    inputs["k"][0, 0, 600, 5], inputs["v"][0, 0, 650, 7] = np.nan, np.inf
    seen = np.ones((700, 700), bool)
    if option == "mask":
        seen[:, [600, 650]] = np.arange(700)[:, None] % 3 == 0
        seen[:200, [600, 650]] = False
    inputs |= {"causal": {"causal": True}, "window": {"window": (None, 3)}, "mask": {"mask": seen}}[option]
    truth = reference.attention(**inputs)[0]
    placed = {n: place(x, library) if isinstance(x, np.ndarray) else x for n, x in inputs.items()}
    try:
        out = runner.to_host(fa_ext.attention(**placed, kernel=forward)).astype(np.float64)
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    finite = np.isfinite(truth)
    assert finite[:, :, :200].all() and not finite.all()
    assert not np.isfinite(out[~finite]).any(), "a visible NaN or infinity is lost"
    right = np.abs(np.where(finite, out - truth, 0)) < (3e-2 if dtype == "bfloat16" else 4e-3)
    assert (right | np.isnan(out))[finite].all(), "a NaN that a query does not see makes a wrong number of its result"
    # A mask's tiles all hold queries that see the keys; cublas multiplies whole rows of weights; serve_sm90, which is for
    # few queries, goes over what any query of a sequence sees.
    if option != "mask" and runner.listed_name(forward) not in ("cublas", "serve_sm90"):
        assert right[:, :, :80].all(), "a NaN spreads beyond its tile"


def test_any_byte_but_zero_is_a_true_mask(forward):
    """A boolean array may be a view of bytes that are neither 0 nor 1."""
    case = Case(1, 2, 1, 130, 140, 64, mask="full")
    inputs = case.host_inputs()
    some = np.random.default_rng(0).choice(np.array([1, 2, 4, 128, 255], np.uint8), inputs["mask"].shape)
    library = runner.library_for(forward, case)
    placed = {n: place(x, library) for n, x in inputs.items()}
    odd = place((inputs["mask"] * some).view(bool), library)
    try:
        wanted = fa_ext.attention(**placed, kernel=forward)
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    given = fa_ext.attention(**placed | {"mask": odd}, kernel=forward)
    np.testing.assert_array_equal(runner.bits(given), runner.bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3e4, 1e-4])
def test_a_scale_far_from_one(forward, dtype, scale):
    """Large and small scales with inputs that make up for them; what a kernel must accept reaches up to 1e30."""
    case = Case(1, 2, 1, 130, 140, 64, dtype=dtype, scale=scale, values="tiny" if scale > 1 else "large")
    try:
        report = runner.verdict(forward, case)
    except Unplaceable as error:
        pytest.skip(str(error))
    except fa_ext.UnsupportedError as error:
        assert not cases.must_accept(runner.listed_name(forward), case), error
        pytest.skip(str(error))
    assert report, str(report)
