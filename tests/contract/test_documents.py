"""``documents``: ids of documents -> starts of packed sequences, held to a count in Python, and what it refuses."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.placement import place
from tests.contract import runner

KERNELS = fa_ext.kernels("documents")
SHAPES = ((1,), (0,), (0, 5), (3, 0), (33,), (1, 1025), (4, 63), (70, 1), (2000, 3), (2, 4096), (3, 9001))
DTYPES = (np.int32, np.int64)


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def wanted(ids, count=None):
    """The starts, by a loop; and how many documents there are."""
    rows = ids.reshape(-1, ids.shape[-1]) if ids.size else np.zeros((0, 0), ids.dtype)
    found = [b * rows.shape[1] + n for b, row in enumerate(rows.tolist()) for n, x in enumerate(row) if n == 0 or x != row[n - 1]]
    count = ids.size if count is None else count
    return np.array((found + [ids.size] * (count + 1))[: count + 1], np.int32), len(found)


def drawn(shape, dtype, mean, seed=0):
    """Ids in no order, of documents of `mean` tokens."""
    rng = np.random.default_rng([seed, *shape])
    names = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 5, dtype)
    return names[np.cumsum(rng.random(shape) < 1 / mean, axis=-1) % 5]


def run(kernel, ids, **options):
    """The starts, on the host; poisoned before."""
    name = runner.library_of(kernel)
    count = options.get("count") or ids.size
    out = place(np.full(count + 1, -7, np.int32), name)
    assert fa_ext.documents(place(ids, name), out=out, kernel=kernel, **options) is out
    return runner.to_host(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(kernel, shape, dtype):
    for mean in (1, 4, 300):
        ids = drawn(shape, dtype, mean)
        np.testing.assert_array_equal(run(kernel, ids), wanted(ids)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_ids(kernel, dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    for ids in ([low, low, high, high, low], [0, -1, -1, 0], [7] * 40, list(range(90, 0, -1)), [0, 1 << 31, 0] if dtype == np.int64 else [0]):
        ids = np.array(ids, dtype)
        np.testing.assert_array_equal(run(kernel, ids), wanted(ids)[0])


def test_ids_that_differ_in_their_high_halves_alone(kernel):
    ids = np.array([1, 1 + (1 << 32), 1 + (1 << 32), 1], np.int64)
    np.testing.assert_array_equal(run(kernel, ids), [0, 1, 3, 4, 4])


@pytest.mark.parametrize("count", (1, 2, 31, 5000, 100_000))
def test_any_count(kernel, count):
    for ids in (drawn((2, 3000), np.int32, 200), np.zeros((0,), np.int32)):
        starts, found = wanted(ids, count)
        device = 0 if runner.device_of(kernel) == "cuda" else None
        fa_ext.faults(device)
        np.testing.assert_array_equal(run(kernel, ids, count=count, check=False), starts)
        met = fa_ext.faults(device)
        assert met == ([("documents", 1, -1, count, found)] if found > count else [])


def test_any_strides(kernel):
    base = drawn((6, 700), np.int64, 9)
    for ids in (base[:, ::-1], base[::2, 3:], base.T, base[1], base[::-1, 5], np.broadcast_to(base[0], (4, 700)), np.broadcast_to(base[:, :1], (6, 50))):
        np.testing.assert_array_equal(run(kernel, ids), wanted(ids)[0])


def test_a_result_with_a_stride(kernel):
    ids, name = drawn((300,), np.int32, 5), runner.library_of(kernel)
    memory = place(np.full(602, -7, np.int32), name)
    fa_ext.documents(place(ids, name), out=memory[::2], kernel=kernel)
    got = runner.to_host(memory)
    np.testing.assert_array_equal(got[::2], wanted(ids)[0])
    assert (got[1::2] == -7).all()


def test_too_many_documents_raise_and_write_nothing(kernel):
    name = runner.library_of(kernel)
    out = place(np.full(4, -7, np.int32), name)
    for ids in (np.arange(9), np.arange(18)[::-2].reshape(3, 3)):
        with pytest.raises(ValueError, match="ids hold 9 documents, but count is 3; accepted: at most as many"):
            fa_ext.documents(place(ids, name), out=out, check=True, kernel=kernel)
    assert (runner.to_host(out) == -7).all()


def test_attention_over_its_documents(kernel):
    """The starts are those of the packed view: each document alone has the same bits."""
    name = runner.library_of(kernel)
    ids = drawn((2, 50), np.int32, 12)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 50, 2, 16), np.float32) for _ in "qkv")
    packed = [place(x.reshape(100, 2, 16), name) for x in (q, k, v)]
    starts = fa_ext.documents(place(ids, name), count=60, kernel=kernel)
    on = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right")
    reference = "cpu_ref" if name == "numpy" else "simt"
    got = runner.to_host(fa_ext.attention(*packed, **on, kernel=reference))
    for begin, end in itertools.pairwise(runner.to_host(starts)):
        if begin < end:
            one = place(np.array([0, end - begin], np.int32), name)
            on = dict(cu_seqlens_q=one, cu_seqlens_k=one, causal="bottom_right")
            alone = fa_ext.attention(*(x[begin:end] for x in packed), **on, kernel=reference)
            np.testing.assert_array_equal(got[begin:end], runner.to_host(alone))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_under_capture(dtype):
    """One graph serves any ids, and the count of its calls."""
    torch = pytest.importorskip("torch")
    ids = torch.zeros((4, 16384), dtype=getattr(torch, np.dtype(dtype).name), device="cuda")
    out = torch.zeros(301, dtype=torch.int32, device="cuda")
    fa_ext.documents(ids, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa_ext.documents(ids, out=out)
    for mean in (1000, 5000, 7, 16384):
        given = drawn((4, 16384), dtype, mean)
        starts, found = wanted(given, 300)
        ids.copy_(torch.from_numpy(given))
        fa_ext.faults(0)
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(out.cpu().numpy(), starts)
        assert fa_ext.faults(0) == ([("documents", 1, -1, 300, found)] if found > 300 else [])


@pytest.mark.gpu
def test_many_ids_on_a_gpu():
    torch = pytest.importorskip("torch")
    for shape in ((1, 5_000_000), (3, 1_234_567), (2_000_000, 1)):
        ids = drawn(shape, np.int64, 700)
        flags = np.ones(shape, bool)
        flags[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = np.flatnonzero(flags)
        got = fa_ext.documents(torch.from_numpy(ids).cuda()).cpu().numpy()
        np.testing.assert_array_equal(got[: len(starts)], starts)
        assert (got[len(starts) :] == ids.size).all()


def test_the_result_is_of_the_kind_of_the_ids():
    torch = pytest.importorskip("torch")
    starts = fa_ext.documents(torch.tensor([[1, 1, 2], [2, 2, 2]]), count=4)
    assert isinstance(starts, torch.Tensor) and starts.dtype == torch.int32 and starts.tolist() == [0, 2, 3, 6, 6]


def test_choice(monkeypatch):
    ids = np.zeros(4, np.int32)
    assert "cpu_documents" in KERNELS
    assert fa_ext.explain_documents(ids)[0] == "cpu_documents"
    monkeypatch.setenv("FA_EXT_KERNEL_DOCUMENTS", "nothing")
    with pytest.raises(ValueError, match="FA_EXT_KERNEL_DOCUMENTS"):
        fa_ext.documents(ids)


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        (np.zeros(4), {}, TypeError, "ids has dtype float64; accepted: int32, int64"),
        (np.zeros(4, np.int16), {}, TypeError, "int32, int64"),
        (np.zeros(4, bool), {}, TypeError, "ids has dtype bool; accepted: int32, int64"),
        (np.zeros((), np.int32), {}, ValueError, r"ids has shape \(\); accepted: \(batch, sequence\) or \(sequence,\)"),
        (np.zeros((1, 2, 3), np.int32), {}, ValueError, r"ids has shape \(1, 2, 3\)"),
        (np.broadcast_to(np.int32(0), (1 << 16, 1 << 15)), {}, ValueError, r"accepted: fewer than 2\^31 ids"),
        ([1, 2], {}, TypeError, "ids has type list"),
        (None, {}, TypeError, "ids has type NoneType"),
        (np.zeros(4, np.int32), {"count": 0}, ValueError, r"count is 0, out of range; accepted: None, or an int from 1 to 2\^31 - 2"),
        (np.zeros(4, np.int32), {"count": -3}, ValueError, "count is -3, out of range"),
        (np.zeros(4, np.int32), {"count": True}, TypeError, "count has type bool"),
        (np.zeros(4, np.int32), {"count": 2.0}, TypeError, "count has type float"),
        (np.zeros(4, np.int32), {"out": np.zeros(5, np.int64)}, TypeError, "out has dtype int64; accepted: int32"),
        (np.zeros(4, np.int32), {"out": np.zeros((5, 1), np.int32)}, ValueError, r"out has shape \(5, 1\); accepted: \(count \+ 1,\)"),
        (np.zeros(4, np.int32), {"out": np.zeros(0, np.int32)}, ValueError, r"out has shape \(0,\); accepted: \(count \+ 1,\)"),
        (np.zeros(4, np.int32), {"out": np.zeros(5, np.int32), "count": 3}, ValueError, r"out has shape \(5,\)"),
        (np.zeros(4, np.int32), {"stream": 7}, ValueError, "stream"),
        (np.zeros(4, np.int32), {"kernel": "cpu_ref"}, ValueError, "kernel"),
    ],
)  # fmt: skip
def test_what_it_refuses(ids, options, error, words):
    with pytest.raises(error, match=words):
        fa_ext.documents(ids, **options)


def test_out_meets_no_ids():
    memory = np.zeros(10, np.int32)
    with pytest.raises(ValueError, match="out overlaps ids"):
        fa_ext.documents(memory[:6], out=memory[5:])
