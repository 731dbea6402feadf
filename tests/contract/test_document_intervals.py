"""``document_intervals``: ids of documents, and spans -> the intervals of their tokens, held to a loop in Python, and what it refuses."""

import numpy as np
import pytest

import fa_ext
from bench.problems.placement import place
from fa_ext import reference
from tests.contract import runner

KERNELS = fa_ext.kernels("documents")
SHAPES = ((1, 1), (0, 5), (3, 0), (1, 33), (4, 63), (70, 3), (1, 1024), (2, 1025), (3, 4097))
OPTIONS = ({}, {"window": 1}, {"window": 40}, {"causal": False}, {"causal": False, "window": 7})


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    monkeypatch.setenv("FA_EXT_KERNEL_DOCUMENTS", request.param)
    return request.param


def runs(row):
    """(begin, end) of the maximal run that each element is in."""
    edges = [0, *(n for n in range(1, len(row)) if row[n] != row[n - 1]), len(row)]
    return [run for run in zip(edges, edges[1:]) for _ in range(*run)]


def wanted(ids, spans=None, causal=True, window=None):
    """The intervals, token by token."""
    shape = (ids if ids is not None else spans).shape
    found = np.zeros((shape[0], 1, shape[1], 2), np.int32)
    for b in range(shape[0]):
        documents = [(0, shape[1])] * shape[1] if ids is None else runs(ids[b].tolist())
        of_spans = runs(spans[b].tolist()) if spans is not None else None
        for i, (start, end) in enumerate(documents):
            begin = start if window is None else max(start, i - window + 1)
            last = end
            if causal:
                last = i + 1
                if of_spans and spans[b, i] > 0:
                    last = max(last, min(of_spans[i][1], end))
            found[b, 0, i] = begin, last
    return found


def drawn(shape, dtype, mean, values, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return np.array(values, dtype)[np.cumsum(rng.random(shape) < 1 / mean, axis=-1) % len(values)]


def run(kernel, ids, spans=None, **options):
    """The intervals, on the host; poisoned before."""
    name = runner.library_of(kernel)
    ids, spans = (None if x is None else place(x, name) for x in (ids, spans))
    shape = (ids if ids is not None else spans).shape
    out = place(np.full((shape[0], 1, shape[1], 2), -7, np.int32), name)
    assert fa_ext.document_intervals(ids, spans=spans, out=out, **options) is out
    return runner.to_host(out)


@pytest.mark.parametrize("dtype", (np.int32, np.int64))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(kernel, shape, dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    for mean in (1, 5, 300):
        ids = drawn(shape, dtype, mean, (low, -1, 0, high), 1)
        for options in OPTIONS:
            np.testing.assert_array_equal(run(kernel, ids, **options), wanted(ids, **options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spans(kernel, shape):
    """They are cut at the ends of documents, and to the left by the window."""
    for mean, of_ids in ((3, 20), (40, 30), (900, 2000)):
        ids, spans = drawn(shape, np.int64, of_ids, (1, 2)), drawn(shape, np.int32, mean, (0, 7, 0, 8, 7, -3), 2)
        for given in (ids, None):
            for window in (None, 1, 13):
                np.testing.assert_array_equal(run(kernel, given, spans, window=window), wanted(given, spans, window=window))


def test_any_strides(kernel):
    name = runner.library_of(kernel)
    ids = drawn((5, 90), np.int64, 7, (3, 1, 2))
    expected = wanted(ids[:, ::-1][::2], window=9)
    if name in ("numpy", "cupy"):
        memory = place(np.full((6, 3, 100, 5), -7, np.int32), name)
        out = memory[1:4, :1, 95:5:-1, ::-3]
        fa_ext.document_intervals(place(ids, name)[::2, ::-1], window=9, out=out)
        np.testing.assert_array_equal(runner.to_host(out), expected)
        assert (runner.to_host(memory)[:, 1:] == -7).all() and (runner.to_host(memory)[0] == -7).all()
    np.testing.assert_array_equal(runner.to_host(fa_ext.document_intervals(place(ids[:, ::-1][::2], name), window=9)), expected)
    shared = np.broadcast_to(ids[:1], ids.shape)
    np.testing.assert_array_equal(run(kernel, shared), wanted(shared))


def test_what_attention_makes_of_them():
    """Documents and spans against a mask that says the same; causal documents against sequences of their own."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 2, 50, 16)) for _ in range(3))
    ids, spans = drawn((2, 50), np.int64, 12, (1, 2, 3)), drawn((2, 50), np.int64, 5, (0, 1, 0, 2))
    i, j = np.arange(50)[:, None], np.arange(50)
    of_ids, of_spans = (np.array([[begin for begin, _ in runs(row)] for row in x.tolist()]) for x in (ids, spans))
    one = of_ids[:, :, None] == of_ids[:, None, :]
    both = (of_spans[:, :, None] == of_spans[:, None, :]) & (spans > 0)[:, :, None]
    mask = one & ((j <= i) | both) & (j > i - 9)
    for found, seen in ((fa_ext.document_intervals(ids, spans=spans, window=9), mask), (fa_ext.document_intervals(ids), one & (j <= i)),
                        (fa_ext.document_intervals(ids, causal=False), one)):  # fmt: skip
        for x, y in zip(reference.attention(q, k, v, intervals=found), reference.attention(q, k, v, mask=seen[:, None]), strict=True):
            np.testing.assert_array_equal(x, y)
        assert fa_ext.verify(q, k, v, intervals=found)


IDS = np.zeros((2, 5), np.int32)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, r"ids and spans are None; accepted: one at least, \(batch, sequence\)"),
        ({"ids": IDS.astype(np.float32)}, TypeError, "ids has dtype float32; accepted: int32, int64"),
        ({"ids": IDS, "spans": IDS > 0}, TypeError, "spans has dtype bool; accepted: int32, int64"),
        ({"ids": IDS[0]}, ValueError, r"ids has shape \(5,\); accepted: \(batch, sequence\)"),
        ({"ids": IDS, "spans": IDS[:, :4]}, ValueError, r"spans has shape \(2, 4\), but ids has shape \(2, 5\)"),
        ({"ids": IDS, "window": 0}, ValueError, "window is 0, out of range; accepted: None, or an int from 1"),
        ({"ids": IDS, "window": -3}, ValueError, "window is -3, out of range"),
        ({"ids": IDS, "window": 2.0}, TypeError, "window has type float"),
        ({"ids": IDS, "window": (2, 0)}, TypeError, "window has type tuple"),
        ({"ids": IDS, "causal": "top_left"}, TypeError, "causal has type str; accepted: True or False"),
        ({"ids": IDS, "spans": IDS, "causal": False}, ValueError, "spans is given with causal=False"),
        ({"ids": IDS, "out": np.zeros((2, 5, 2), np.int32)}, ValueError, r"out has shape \(2, 5, 2\); accepted: \(2, 1, 5, 2\)"),
        ({"ids": IDS, "out": np.zeros((2, 1, 5, 2), np.int64)}, TypeError, "out has dtype int64; accepted: int32"),
        ({"ids": IDS, "stream": 3}, ValueError, "stream is given, but ids is on the CPU"),
        ({"spans": IDS, "stream": 3}, ValueError, "stream is given, but spans is on the CPU"),
        ({"ids": IDS, "width": 3}, TypeError, "width"),
    ],
)  # fmt: skip
def test_what_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        fa_ext.document_intervals(**given)


def test_a_result_that_meets_the_ids_is_refused():
    memory = np.zeros(20, np.int32)
    with pytest.raises(ValueError, match="out overlaps ids in memory"):
        fa_ext.document_intervals(memory[:10].reshape(2, 5), out=memory.reshape(2, 1, 5, 2))
