"""The judge itself: float64 attention against a key-by-key loop, and `plain` against NumPy's own half precision."""

import math

import numpy as np
import pytest

from fa_ext import reference
from fa_ext.reference import dense


def naive(q, k, v, causal=False, scale=None, window=None, softcap=0.0, bias=None, mask=None, sinks=None):
    """(B, H, S, D) attention, one Python number at a time; only visible keys are ever touched."""
    (batch, heads, seq_q, head_dim), (heads_kv, seq_k), head_dim_v = q.shape, k.shape[1:3], v.shape[3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    left, right = (None, None) if window is None else window
    diagonal = 0 if causal == "top_left" else seq_k - seq_q
    full = (batch, heads, seq_q, seq_k)
    bias = None if bias is None else np.broadcast_to(bias, full)
    mask = None if mask is None else np.broadcast_to(mask, full)
    out, lse = np.zeros((batch, heads, seq_q, head_dim_v)), np.full((batch, heads, seq_q), -np.inf)
    for b, h, i in np.ndindex(batch, heads, seq_q):
        kv = h // (heads // heads_kv)
        scores = {}
        for j in range(seq_k):
            offset = j - (i + diagonal)
            if causal and offset > 0:
                continue
            if (left is not None and offset < -left) or (right is not None and offset > right):
                continue
            if mask is not None and not mask[b, h, i, j]:
                continue
            s = scale * math.fsum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, kv, j]))
            s = softcap * math.tanh(s / softcap) if softcap else s
            s += 0.0 if bias is None else float(bias[b, h, i, j])
            if s != -math.inf:
                scores[j] = s
        sink = -math.inf if sinks is None else float(sinks[h])
        peak = max([*scores.values(), sink])
        if peak == -math.inf:
            continue
        total = sum(math.exp(s - peak) for s in scores.values()) + math.exp(sink - peak)
        lse[b, h, i] = peak + math.log(total)
        for j, s in scores.items():
            out[b, h, i] += math.exp(s - peak) / total * v[b, kv, j].astype(np.float64)
    return out, lse


def inputs(batch=1, heads=2, heads_kv=1, seq_q=5, seq_k=7, head_dim=4, head_dim_v=3, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, seq_q, head_dim), (batch, heads_kv, seq_k, head_dim), (batch, heads_kv, seq_k, head_dim_v)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def options():
    rng = np.random.default_rng(1)
    holes = rng.standard_normal((2, 5, 7))
    holes[holes < -1] = -np.inf
    yield {}
    yield {"causal": "top_left"}
    yield {"causal": "bottom_right"}
    yield {"window": (2, 1)}
    yield {"window": (None, 0)}
    yield {"window": (1, None), "causal": "top_left"}
    yield {"window": (0, 0), "causal": "bottom_right"}
    yield {"softcap": 0.7, "scale": 3.0}
    yield {"scale": -0.5}
    yield {"scale": 0.0}
    yield {"bias": rng.standard_normal((5, 7))}
    yield {"bias": holes}
    yield {"mask": rng.random((1, 2, 5, 7)) < 0.3}
    yield {"mask": np.zeros((7,), bool)}
    yield {"sinks": np.array([0.3, -50.0])}
    yield {"sinks": np.array([0.3, 2.0]), "mask": np.zeros((7,), bool)}
    yield {"sinks": np.array([0.3, 2.0]), "window": (0, 1), "softcap": 2.0, "bias": holes, "causal": "top_left"}


@pytest.mark.parametrize("option", list(options()), ids=lambda o: "-".join(o) or "dense")
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_against_a_loop(option, chunk, monkeypatch):
    monkeypatch.setattr(dense, "CHUNK_SCORES_CPU", chunk)
    q, k, v = inputs()
    out, lse = reference.attention(q, k, v, **option)
    want_out, want_lse = naive(q, k, v, **option)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 3), (3, 7), (1, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_alignment(seq_q, seq_k, causal):
    q, k, v = inputs(batch=2, heads=4, heads_kv=2, seq_q=seq_q, seq_k=seq_k)
    for window in (None, (1, 2), (0, None)):
        out, lse = reference.attention(q, k, v, causal=causal, window=window)
        want_out, want_lse = naive(q, k, v, causal=causal, window=window)
        np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12)


def test_causal_true_is_both_alignments_when_square():
    q, k, v = inputs(seq_q=6, seq_k=6)
    results = [reference.attention(q, k, v, causal=causal)[0] for causal in (True, "top_left", "bottom_right")]
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()
    with pytest.raises(ValueError, match="top_left or bottom_right"):
        reference.attention(*inputs(), causal=True)


def test_visible_keys_by_hand():
    seen = reference.visible_keys([0, 1, 2], 3, 5, causal="bottom_right", window=(1, None))
    assert seen.astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_layouts_agree():
    q, k, v = inputs(batch=2, heads=4, heads_kv=2)
    out, lse = reference.attention(q, k, v)
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    out_bshd, lse_bshd = reference.attention(*swapped, layout="bshd")
    assert (out_bshd.swapaxes(1, 2) == out).all() and (lse_bshd == lse).all()


def test_rows_are_positions_of_the_whole_sequence():
    q, k, v = inputs(seq_q=9, seq_k=11)
    bias = np.random.default_rng(2).standard_normal((9, 11))
    whole = reference.attention(q, k, v, causal="bottom_right", bias=bias)
    some = reference.attention(q, k, v, causal="bottom_right", bias=bias, rows=[8, 0, 5])
    np.testing.assert_allclose(some[0], whole[0][:, :, [8, 0, 5]], rtol=1e-13)
    np.testing.assert_allclose(some[1], whole[1][:, :, [8, 0, 5]], rtol=1e-13)


def test_zero_sizes():
    for batch, heads, heads_kv, seq_q, seq_k in [(0, 2, 1, 3, 3), (1, 0, 0, 3, 3), (1, 2, 1, 0, 3), (1, 2, 1, 3, 0)]:
        q, k, v = inputs(batch, heads, heads_kv, seq_q, seq_k)
        out, lse = reference.attention(q, k, v)
        assert out.shape == (batch, heads, seq_q, 3) and lse.shape == (batch, heads, seq_q)
        assert (out == 0).all() and (lse == -np.inf).all()
    q, k, v = inputs(seq_k=0)
    out, lse = reference.attention(q, k, v, sinks=np.array([1.5, -2.0]))
    assert (out == 0).all() and (lse == np.array([1.5, -2.0])[None, :, None]).all()


def test_nan_and_inf_reach_only_the_queries_that_see_them():
    q, k, v = inputs(seq_q=6, seq_k=6)
    clean_out, clean_lse = reference.attention(q, k, v, causal=True)
    v[:, :, 3] = np.nan
    k[:, :, 4] = np.inf
    v[:, :, 5, 0] = -np.inf
    out, lse = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :, :3], clean_out[:, :, :3])
    np.testing.assert_array_equal(lse[:, :, :4], clean_lse[:, :, :4])
    assert np.isnan(out[:, :, 3:]).all()
    hidden = np.where(np.arange(6) >= 3, -np.inf, 0)
    for option in ({"bias": hidden}, {"mask": hidden == 0}):
        assert np.isfinite(reference.attention(q, k, v, **option)[0]).all()
    q, k, v = inputs(seq_q=6, seq_k=6)
    v[:, :, 5, 0] = -np.inf
    out, _ = reference.attention(q, k, v)
    assert (out[..., 0] == -np.inf).all() and np.isfinite(out[..., 1:]).all()


def test_a_query_without_keys_is_zero_whatever_its_sink():
    q, kv = np.ones((1, 5, 7, 8)), np.ones((1, 5, 3, 8))
    sinks = np.array([-np.inf, np.inf, np.nan, 2, -3])
    out, lse = reference.attention(q, kv, kv, causal="bottom_right", sinks=sinks)
    assert (out[:, :, :4] == 0).all()
    np.testing.assert_array_equal(lse[0, :, :4], np.broadcast_to(sinks[:, None], (5, 4)))
    assert (out[0, [0, 3, 4], 4:] > 0).all()


def test_extreme_logits_stay_finite():
    q, k, v = inputs(seq_q=8, seq_k=8)
    out, lse = reference.attention(q * 1e5, k * 1e5, v)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    winners = (q[:, :, :, None] * k[:, :, None]).sum(-1).argmax(-1)
    np.testing.assert_allclose(out, np.take_along_axis(v, winners[..., None], 2).repeat(1, 1), rtol=1e-12)


def test_rounding_matches_the_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65520])])
    with np.errstate(all="ignore"):
        for name, kind in [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)]:
            np.testing.assert_array_equal(reference.round_to(x, name), x.astype(kind).astype(np.float32))
    with pytest.raises(ValueError, match="float8"):
        reference.round_to(x, "float8")


def test_plain_is_close_and_costs_what_the_dtype_costs():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for kind, low, high in [(np.float16, 5e-5, 1e-3), (ml_dtypes.bfloat16, 5e-4, 1e-2), (np.float32, 0, 1e-6)]:
        q, k, v = (x.astype(kind) for x in inputs(heads=4, seq_q=64, seq_k=96, head_dim=32, head_dim_v=16))
        want, want_lse = reference.attention(q, k, v, causal="bottom_right")
        out, lse = reference.plain(q, k, v, causal="bottom_right")
        error = np.linalg.norm(out - want) / np.linalg.norm(want)
        assert low < error < high
        assert (out == out.astype(kind).astype(np.float64)).all()
        assert np.abs(lse - want_lse).max() < 1e-2
        named = reference.plain(*(x.astype(np.float32) for x in (q, k, v)), causal="bottom_right", dtype=np.dtype(kind).name)
        assert (named[0] == out).all()


def in_order(a, b, fused):
    """One element of a @ b: float32 sums of eight, fused or not, each added to the total of those before."""
    total = np.float32(0)
    for first in range(0, len(a), 8):
        part = np.float32(0)
        for x, y in zip(a[first : first + 8], b[first : first + 8]):
            part = np.float32(np.float64(x) * np.float64(y) + np.float64(part)) if fused else part + x * y
        total = total + part
    return total


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("rows", "terms", "columns"),
    [(3, 128, 5), (5, 13, 3), (1, 8, 9), (9, 7, 1), (2, 1, 2), (1, 250, 1), (4, 16, 4), (2, 0, 3), (0, 5, 3)],
)
@pytest.mark.parametrize("block", [1, 40, 1 << 16])
def test_sums_have_an_order_of_our_own(rows, terms, columns, block, fused, monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK_CPU", block)
    rng = np.random.default_rng(rows * 1000 + terms)
    a = rng.standard_normal((2, 3, rows, terms)).astype(np.float32)
    b = rng.standard_normal((2, 1, terms, columns)).astype(np.float32)
    got = dense.by_eights(np, a, b, fused)
    assert got.shape == (2, 3, rows, columns) and got.dtype == np.float32
    for n, g, i, j in np.ndindex(got.shape):
        assert got[n, g, i, j] == in_order(a[n, g, i], b[n, 0, :, j], fused)


def test_the_order_of_sums_shows():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((50, 128), (128, 50)))
    sums = [dense.by_eights(np, a, b, fused) for fused in (False, True)]
    assert (sums[0] != sums[1]).any() and np.abs(sums[0] - sums[1]).max() < 1e-4
    halves = a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(*(dense.by_eights(np, *halves, fused) for fused in (False, True)))


def test_plain_in_float64_is_the_reference():
    q, k, v = inputs()
    for a, b in zip(reference.plain(q, k, v, softcap=2.0), reference.attention(q, k, v, softcap=2.0)):
        np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_sums_alike_on_every_machine(dtype):
    """The products and sums themselves: the same bits from CuPy, whose exponentials may differ in the last place."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(s).astype(dtype).astype(np.float32) for s in ((2, 3, 65, 77), (2, 1, 77, 130)))
    for fused in (False, True):
        there = dense.by_eights(cupy, cupy.asarray(a), cupy.asarray(b), fused)
        np.testing.assert_array_equal(there.get(), dense.by_eights(np, a, b, fused))


@pytest.mark.gpu
def test_cupy_agrees_with_numpy():
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs(batch=2, heads=4, heads_kv=2, seq_q=65, seq_k=97, head_dim=24, head_dim_v=40)
    rng = np.random.default_rng(3)
    bias, mask = rng.standard_normal((4, 65, 97)), rng.random((2, 1, 65, 97)) < 0.8
    for option in ({}, {"bias": bias, "causal": "top_left"}, {"mask": mask, "sinks": bias[:, 0, 0], "window": (9, 3)}):
        on_device = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in option.items()}
        for a, b in zip(
            reference.attention(*map(cupy.asarray, (q, k, v)), **on_device), reference.attention(q, k, v, **option)
        ):
            np.testing.assert_allclose(a.get(), b, rtol=1e-12, atol=1e-12)
