"""An LSE that the caller gives may have any strides, as `out` may: each kernel writes its elements and nothing between them."""

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests.contract import lse_views, runner

CASES = [
    Case(2, 4, 2, 70, 90, 64, dtype="float16", causal="bottom_right"),
    Case(2, 2, 1, 3, 1500, 128, dtype="bfloat16"),  # shared by many blocks, each with some of the keys
    Case(3, 2, 2, 90, 40, 64, dtype="float16", causal="bottom_right", sinks="float32"),  # queries without a key
    Case(2, 3, 1, 33, 50, 24, dtype="float32", bias="full", mask="rows", layout="bshd"),
    Case(1, 1, 1, 5, 5, 8, dtype="float64", causal=True),
]


@pytest.mark.parametrize("kind", lse_views.KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_lse_has_any_strides(forward, case, kind):
    if case.dtype == "float64" and not runner.has_float64(forward):
        pytest.skip("float64 runs on the CPU")
    try:
        library = runner.library_for(forward, case)
        inputs = runner.prepared(case, library).inputs
        out, lse = lse_views.assert_written(forward, inputs, kind, library)
    except Unplaceable as error:
        pytest.skip(str(error))
    except fa_ext.UnsupportedError as error:
        if cases.must_accept(runner.listed_name(forward), case):
            raise
        pytest.skip(str(error))
    report = runner.judged(forward, case, out, lse)
    assert report, report


def test_an_lse_beside_out_in_one_memory(forward):
    """Elements of the LSE between the rows of out would be refused; behind them they are apart."""
    case = Case(1, 2, 2, 6, 7, 8, dtype=runner.narrowest(forward))
    if runner.device_of(forward) == "cuda":
        pytest.skip("the check is the same on a device")
    inputs = runner.prepared(case, "numpy").inputs
    memory = np.full(2 * 6 * 8 * 4 + 2 * 6 * 4, 0xFF, np.uint8)
    out = memory[: inputs["q"].nbytes].view(inputs["q"].dtype).reshape(case.out_shape)
    lse = memory[out.nbytes :][: 2 * 6 * 4].view(np.float32).reshape(1, 6, 2).swapaxes(1, 2)
    try:
        wanted, wanted_lse = fa_ext.attention(**inputs, kernel=forward, return_lse=True)
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    fa_ext.attention(**inputs, out=(out, lse), kernel=forward)
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()


REFUSED = [
    (lambda memory: np.lib.stride_tricks.as_strided(memory, (1, 2, 4), (0, 0, 4)), "its elements must be distinct"),
    (lambda memory: np.lib.stride_tricks.as_strided(memory, (1, 2, 4), (32, 4, 4)), "its elements must be distinct"),
    (lambda memory: np.lib.stride_tricks.as_strided(memory, (1, 2, 4), (32, 16, 0)), "its elements must be distinct"),
    (lambda memory: np.broadcast_to(memory[:4], (1, 2, 4)), "read-only"),
]


@pytest.mark.parametrize(("view", "words"), REFUSED)
def test_an_lse_that_overlaps_itself_is_refused(view, words):
    q, out, memory = np.zeros((1, 2, 4, 8), np.float32), np.full((1, 2, 4, 8), 7, np.float32), np.full(64, 7, np.float32)
    with pytest.raises(ValueError, match=f"lse (has strides|is).*{words}"):
        fa_ext.attention(q, q, q, out=(out, view(memory)))
    assert (out == 7).all() and (memory == 7).all()


@pytest.mark.parametrize("name", ["q", "out", "bias"])
def test_a_strided_lse_that_overlaps_another_array_is_refused(name):
    arrays = {n: np.zeros((1, 2, 4, 8), np.float32) for n in ("q", "out")} | {"bias": np.zeros((8, 8), np.float32)[:4, :4]}
    memory = arrays[name].base if name == "bias" else arrays[name]
    lse = memory.reshape(-1)[1::4][:8].reshape(1, 4, 2).swapaxes(1, 2)
    k = np.zeros((1, 2, 4, 8), np.float32)
    with pytest.raises(ValueError, match=f"lse overlaps {name} in memory"):
        fa_ext.attention(arrays["q"], k, k, bias=arrays["bias"], out=(arrays["out"], lse))
