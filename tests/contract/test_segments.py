"""``segments``: a query sees the keys of its own id alone. Every kernel that takes it, forward and backward, is held to float64, and
to the bits of the same call with a mask of all pairs; the others refuse it by name."""

import numpy as np
import pytest

import fa_ext
from bench.problems.placement import dtype_of
from tests.contract import runner

FORWARD, BACKWARD = fa_ext.kernels(), fa_ext.kernels("backward")
TAKES = {"cpu_ref", "simt", "cpu_ref_backward", "simt_backward"}
BATCH, HEADS, HEADS_KV = 2, 4, 2
#: More options of a call, made from its batch, queries and keys.
OPTIONS = {
    "none": lambda rng, b, n, m: {},
    "causal": lambda rng, b, n, m: {"causal": "bottom_right"},
    "top left, sinks": lambda rng, b, n, m: {"causal": "top_left", "sinks": rng.standard_normal(HEADS).astype(np.float32)},
    "window, bias": lambda rng, b, n, m: {"window": (20, 9), "bias": rng.standard_normal((1, HEADS, n, m)).astype(np.float32)},
    "mask, softcap": lambda rng, b, n, m: {"mask": rng.random((b, 1, n, m)) < 0.7, "softcap": 3.0},
    "slopes": lambda rng, b, n, m: {"alibi": rng.random(HEADS).astype(np.float32), "causal": "bottom_right"},
    "dropout": lambda rng, b, n, m: {"dropout": (0.4, 7)},
    "lengths": lambda rng, b, n, m: {"seqlens_q": np.array([n, n // 2], np.int32), "seqlens_k": np.array([m // 3, m], np.int32), "causal": "bottom_right"},
    "range": lambda rng, b, n, m: {"k_range": (np.array([2, 0], np.int32), np.array([m, m // 2], np.int32))},
    "positions": lambda rng, b, n, m: {"positions": rng.integers(0, m, (b, n)).astype(np.int32), "causal": "bottom_right"},
}  # fmt: skip


def skip_absent(kernel):
    if runner.device_of(kernel) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return kernel


@pytest.fixture(params=[kernel for kernel in FORWARD if runner.listed_name(kernel) in TAKES])
def taking(request):
    return skip_absent(request.param)


@pytest.fixture(params=[kernel for kernel in BACKWARD if runner.listed_name(kernel) in TAKES])
def taking_backward(request):
    return skip_absent(request.param)


def width(kernel):
    return dtype_of(runner.narrowest(kernel)) if runner.device_of(kernel) == "cuda" else np.dtype(np.float32)


def drawn(name, queries, keys, dim=16, dim_v=None, dtype=np.float32, seed=0):
    """The arguments of a call with ids in no order, the same arguments but a mask that says what they say."""
    rng = np.random.default_rng([seed, queries, keys, dim])
    shapes = {"q": (HEADS, queries, dim), "k": (HEADS_KV, keys, dim), "v": (HEADS_KV, keys, dim_v or dim)}
    given = {x: rng.standard_normal((BATCH, *shape)).astype(dtype) for x, shape in shapes.items()}
    given |= OPTIONS[name](rng, BATCH, queries, keys)
    names = np.array([-(2**31), -1, 0, 2**31 - 1], np.int32)
    q_ids, k_ids = (names[rng.integers(0, 4, (BATCH, n))] for n in (queries, keys))
    q_ids[:, -1] = 12345  # a document without keys
    same = q_ids[:, None, :, None] == k_ids[:, None, None, :]
    masked = given | {"mask": same & given["mask"] if "mask" in given else same}
    if not {"seqlens_q", "k_range", "positions"} & set(given):
        masked["seqlens_q"] = np.full(BATCH, queries, np.int32)  # a call over sequences, as one with segments is
    return given | {"segments": (q_ids, k_ids)}, masked


def same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(runner.bits(runner.to_host(x)), runner.bits(runner.to_host(y)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(13, 17, 16), (70, 133, 40), (1, 90, 64)])
def test_against_float64_and_a_mask(taking, name, queries, keys, dim):
    given, masked = drawn(name, queries, keys, dim, dtype=width(taking))
    report = fa_ext.verify(**runner.on(taking, given), kernel=taking)
    assert report, report
    same_bits(runner.attention(taking, **given, return_lse=True), runner.attention(taking, **masked, return_lse=True))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(13, 17, 16), (70, 133, 40), (1, 90, 64)])
def test_gradients_against_float64_and_a_mask(taking_backward, name, queries, keys, dim):
    given, masked = drawn(name, queries, keys, dim, dtype=width(taking_backward))
    out, lse = fa_ext.reference.attention(**given)
    rng = np.random.default_rng(1)
    made = {"dout": rng.standard_normal(out.shape).astype(given["q"].dtype), "dlse": rng.standard_normal(lse.shape).astype(np.float32)}
    made |= {"out": out.astype(given["q"].dtype), "lse": lse.astype(np.float32)}
    wrt = ("q", "k", "v", *(x for x in ("bias", "sinks") if x in given))
    placed, masked = runner.on(taking_backward, given | made), runner.on(taking_backward, masked | made)
    report = fa_ext.verify_backward(**placed, wrt=wrt, kernel=taking_backward)
    assert report, report
    same_bits(fa_ext.attention_backward(**placed, wrt=wrt, kernel=taking_backward), fa_ext.attention_backward(**masked, wrt=wrt, kernel=taking_backward))


def test_layouts_and_strides(taking):
    """Ids whose rows lie apart, ids of one row for all of the batch, and arrays in the other layout."""
    given, _ = drawn("causal", 30, 44, dtype=width(taking))
    wanted = runner.attention(taking, **given)
    q_ids, k_ids = given["segments"]
    apart = tuple(np.concatenate([x, x[:, ::-1]], axis=1)[:, : x.shape[1]] for x in (q_ids, k_ids))
    same_bits([runner.attention(taking, **given | {"segments": apart})], [wanted])
    other = given | {x: np.ascontiguousarray(given[x].swapaxes(1, 2)) for x in "qkv"} | {"layout": "bshd"}
    same_bits([runner.attention(taking, **other).swapaxes(1, 2)], [wanted])
    shared = tuple(np.broadcast_to(x[:1], x.shape) for x in (q_ids, k_ids))
    same_bits([runner.attention(taking, **given | {"segments": shared})], [runner.attention(taking, **given | {"segments": tuple(map(np.ascontiguousarray, shared))})])


def test_causal_needs_no_side_where_lengths_are_equal(taking):
    given, _ = drawn("none", 30, 30, dtype=width(taking))
    same_bits([runner.attention(taking, **given, causal=True)], [runner.attention(taking, **given, causal="top_left")])


def test_runs_of_ids_are_documents(taking):
    """Where each id is one run, a row's documents are the sequences that documents() makes of it."""
    rng, dtype = np.random.default_rng(4), width(taking)
    q, k, v = (rng.standard_normal((2, heads, 60, 32)).astype(dtype) for heads in (4, 2, 2))
    ids = np.sort(rng.integers(0, 6, (2, 60)), axis=1).astype(np.int32)
    out, lse = runner.attention(taking, q, k, v, segments=(ids, ids), causal="bottom_right", return_lse=True)
    packed = {x: np.ascontiguousarray(a.swapaxes(1, 2)).reshape(120, -1, 32) for x, a in (("q", q), ("k", k), ("v", v))}
    starts = fa_ext.documents(ids, count=20)
    wanted, wanted_lse = fa_ext.reference.attention(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right")
    bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype.name] * 4
    np.testing.assert_allclose(out.swapaxes(1, 2).reshape(wanted.shape).astype(np.float64), wanted, atol=bound, rtol=bound)
    np.testing.assert_allclose(lse.swapaxes(0, 1).reshape(4, 120), wanted_lse, atol=1e-5, rtol=1e-5)


def test_empty_arrays(taking):
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        given, _ = drawn("none", queries or 1, keys or 1, dtype=width(taking))
        given = {x: a[:, :, : queries if x == "q" else keys] for x, a in given.items() if x in "qkv"}
        ids = np.zeros((BATCH, queries), np.int32), np.zeros((BATCH, keys), np.int32)
        assert not runner.attention(taking, **given, segments=ids).any()


@pytest.mark.parametrize("kernel", [kernel for kernel in (*FORWARD, *BACKWARD) if runner.listed_name(kernel) not in TAKES])
def test_others_refuse_it(kernel):
    skip_absent(kernel)
    given, _ = drawn("none", 5, 6, 64, dtype=width(kernel))
    placed = runner.on(kernel, given)
    if kernel in BACKWARD:
        out, lse = (x.astype(y) for x, y in zip(fa_ext.reference.attention(**given), (given["q"].dtype, np.float32)))
        placed |= runner.on(kernel, {"dout": out, "out": out, "lse": lse})
    with pytest.raises(fa_ext.UnsupportedError, match="takes no segments"):
        (fa_ext.attention_backward if kernel in BACKWARD else fa_ext.attention)(**placed, kernel=kernel)


def test_explain():
    given, _ = drawn("none", 5, 6)
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
