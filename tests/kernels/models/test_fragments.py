"""The index arithmetic of mma_backward_sm80, lane by lane, held against the float64 reference."""

import numpy as np
import pytest

from fa_ext import reference
from fa_ext.reference.backward import gradients
from tests.kernels.models import fragments


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("threads", [128, 256])
def test_every_chunk_is_copied_once_without_bank_conflicts(columns, threads):
    for rows in (16, 32, 64, 128):
        if columns % 64 and rows < 32:
            continue  # no instance
        copies = list(fragments.copied(columns, rows, threads))
        assert len({(row, chunk) for _, row, chunk, _ in copies}) == len(copies) == rows * columns // 8
        assert sorted(at for *_, at in copies) == list(range(0, rows * columns, 8))
        for _, row, chunk, at in copies:
            assert at == fragments.Layout(columns).offset(row, chunk)
        at_once = {}  # the first copy of each thread
        for thread, _, _, at in copies:
            at_once.setdefault(thread, at * 2 % 128 // 16)
        assert len({at_once[thread] for thread in range(8)}) == 8


@pytest.mark.parametrize("columns", [32, 64, 96, 128])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_gradients_from_lanes(columns, causal):
    rng = np.random.default_rng(columns)
    sq, sk, step, softcap = 32, 64, 32, 3.0
    q, dout = (rng.standard_normal((1, 1, sq, columns)) for _ in range(2))
    k, v = (rng.standard_normal((1, 1, sk, columns)) for _ in range(2))
    scale = columns**-0.5
    options = dict(causal=causal, softcap=softcap)
    out, lse = reference.attention(q, k, v, **options)
    want = gradients(dout, q, k, v, **options)
    delta, lse = (dout * out).sum(-1)[0, 0], lse[0, 0]
    seen = reference.visible_keys(np.arange(sq), sq, sk, causal)

    def weigh(score, dp, query, key):
        capped = np.tanh(score * scale / softcap)
        p = np.where(seen[query, key], np.exp(softcap * capped - lse[query]), 0)
        return p, np.where(seen[query, key], p * (dp - delta[query]) * (1 - capped**2), 0)

    queries, douts, keys, values = (fragments.tile(x[0, 0], 128) for x in (q, dout, k, v))
    conflicts = []
    for first in range(0, sq, 16):
        warp = fragments.Warp(columns, step, queries, douts, first)
        for key in range(0, sk, step):
            warp.step(keys, values, key, weigh)
        np.testing.assert_allclose(scale * warp.rows(warp.first), want["q"][0, 0, first : first + 16], atol=1e-12)
        conflicts += warp.conflicts
    for first in range(0, sk, 16):
        warp = fragments.Warp(columns, step, keys, values, first)
        for query in range(0, sq, step):
            warp.step(queries, douts, query, lambda score, dp, key, query: weigh(score, dp, query, key))
        np.testing.assert_allclose(scale * warp.rows(warp.first), want["k"][0, 0, first : first + 16], atol=1e-12)
        np.testing.assert_allclose(warp.rows(warp.second), want["v"][0, 0, first : first + 16], atol=1e-12)
        conflicts += warp.conflicts
    assert set(conflicts) == {8}
