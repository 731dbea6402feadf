"""``segments``: a query sees the keys of its own id alone. Every kernel that takes it, forward and backward, is held to float64, and
to the bits of the same call with a mask of all pairs; the others refuse it by name."""

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases
from tests.contract import runner, segments

FORWARD, BACKWARD = fa_ext.kernels(), fa_ext.kernels("backward")
SIZES = [(13, 17, 16), (70, 133, 40), (1, 90, 64)]


def skip_absent(kernel):
    if runner.device_of(kernel) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return kernel


@pytest.fixture(params=[kernel for kernel in FORWARD if runner.listed_name(kernel) in segments.TAKES])
def taking(request):
    return skip_absent(request.param)


@pytest.fixture(params=[kernel for kernel in BACKWARD if runner.listed_name(kernel) in segments.TAKES])
def taking_backward(request):
    return skip_absent(request.param)


@pytest.mark.parametrize("name", segments.OPTIONS)
@pytest.mark.parametrize(("queries", "keys", "dim"), SIZES)
def test_against_float64_and_a_mask(taking, name, queries, keys, dim):
    segments.forward(taking, name, queries, keys, dim)


@pytest.mark.parametrize("name", segments.OPTIONS)
@pytest.mark.parametrize(("queries", "keys", "dim"), SIZES)
def test_gradients_against_float64_and_a_mask(taking_backward, name, queries, keys, dim):
    if name == "positions" and "mma" in taking_backward:
        pytest.skip("takes no positions")
    segments.backward(taking_backward, name, queries, keys, dim)


@pytest.mark.parametrize("name", ("none", "causal", "window, bias", "dropout", "lengths"))
def test_documents_in_order(taking, name):
    """Tiles of documents that do not meet are left out, and no bit shows it."""
    segments.forward(taking, name, 300, 420, 40, ordered=True)


@pytest.mark.parametrize("name", ("none", "causal", "window, bias", "dropout", "lengths"))
def test_gradients_of_documents_in_order(taking_backward, name):
    segments.backward(taking_backward, name, 300, 420, 40, ordered=True)


def test_random_calls(taking):
    wrong = segments.failures(taking, serving_cases.random_segments(25, 5))
    assert not wrong, "\n".join(wrong[:3])


def test_random_gradients(taking_backward):
    wrong = segments.failures(taking_backward, serving_cases.random_segments(25, 6, backward=True, longest=70))
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize("check", segments.CHECKS, ids=lambda check: check.__name__)
def test_layouts_documents_and_empty_arrays(taking, check):
    check(taking)


@pytest.mark.parametrize("kernel", [kernel for kernel in (*FORWARD, *BACKWARD) if runner.listed_name(kernel) not in segments.TAKES])
def test_others_refuse_it(kernel):
    skip_absent(kernel)
    given, _ = segments.drawn("none", 5, 6, 64, dtype=np.float16)
    placed = runner.on(kernel, given)
    if kernel in BACKWARD:
        out, lse = (x.astype(y) for x, y in zip(fa_ext.reference.attention(**given), (given["q"].dtype, np.float32)))
        placed |= runner.on(kernel, {"dout": out, "out": out, "lse": lse})
    with pytest.raises(fa_ext.UnsupportedError, match="takes no segments"):
        (fa_ext.attention_backward if kernel in BACKWARD else fa_ext.attention)(**placed, kernel=kernel)


def test_explain():
    given, _ = segments.drawn("none", 5, 6)
    chosen, reasons = fa_ext.explain(**given)
    assert chosen == "cpu_ref" and reasons["cpu_simd"] == "takes no segments"


Q, K = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 2, 6, 8), np.float32)
Q_IDS, K_IDS = np.zeros((2, 5), np.int32), np.zeros((2, 6), np.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"segments": Q_IDS}, TypeError, r"segments has type ndarray; accepted: None or a pair of arrays \(q_ids, k_ids\)"),
        ({"segments": (Q_IDS,)}, ValueError, "segments has 1 items"),
        ({"segments": (Q_IDS, None)}, TypeError, "segments' k_ids has type NoneType"),
        ({"segments": (Q_IDS, K_IDS[:, :5])}, ValueError, r"segments' k_ids has shape \(2, 5\); accepted: \(batch, seq_k\) = \(2, 6\)"),
        ({"segments": (Q_IDS[0], K_IDS)}, ValueError, r"segments' q_ids has shape \(5,\); accepted: \(batch, seq_q\) = \(2, 5\)"),
        ({"segments": (Q_IDS.astype(np.int64), K_IDS)}, TypeError, "segments' q_ids has dtype int64; accepted: int32"),
        ({"segments": (Q_IDS, K_IDS.astype(np.float32))}, TypeError, "segments' k_ids has dtype float32; accepted: int32"),
        ({"segments": (Q_IDS, K_IDS[:, ::-1])}, ValueError, "segments' k_ids has strides"),
        ({"q": Q[:, :, 0], "segments": (Q_IDS[:, :1], K_IDS)}, ValueError, "segments is given, but q is packed, .*; packed sequences are documents already"),
        ({"segments": (Q_IDS, K_IDS), "page_table": np.zeros((2, 1), np.int32), "seqlens_k": np.ones(2, np.int32), "layout": "bhsd"}, ValueError,
         "segments and page_table are both given"),
        ({"segments": (Q_IDS, K_IDS), "causal": True}, ValueError, "causal=True with seq_q 5 and seq_k 6 is ambiguous"),
    ],
)  # fmt: skip
def test_what_it_refuses(change, error, words):
    with pytest.raises(error, match=words):
        fa_ext.attention(**{"q": Q, "k": K, "v": K} | change)
