"""Dropout with sequences, on every kernel that takes it: pairs count within the sequence, so that packed, padded and dense calls draw
one mask."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases, stored
from bench.problems.case import Case
from bench.problems.lengths import K_STORAGE, Q_STORAGE
from bench.problems.placement import Unplaceable
from tests.contract import runner
from tests.contract.serving_calls import adapted, attend, parts_of, same_bits, verify

DROPPED = Case.sequences((3, 0, 5), (7, 4, 9), dtype="float16", head_dim=64, dropout=(0.3, 5))
KERNELS = [kernel for kernel in fa_ext.kernels() if runner.takes(kernel, **DROPPED.host_inputs())]


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def test_some_kernels_are_looked_at():
    assert {"cpu_ref", "cpu_simd"} <= set(KERNELS)


def test_against_float64(kernel):
    seed = itertools.count().__next__
    grid = [case.changed(dropout=((0.1, 0.5, 1.0, 1 / 65536)[seed() % 4], seed())) for case in serving_cases.grid()[::3]]
    judged = 0
    for case in [*grid, *(case.changed(dropout=(0.4, n), logits=None) for n, case in enumerate(serving_cases.random_cases(30, 3, longest=60)))]:
        case = adapted(kernel, case)
        if case.dtype == "float64" and not runner.has_float64(kernel):
            continue
        try:
            report = verify(kernel, case.host_inputs())
        except Unplaceable:
            continue
        judged += 1
        assert report, f"{case}\n{report}"
    assert judged


def test_a_sequence_drops_the_same_in_every_storage(kernel):
    base = adapted(kernel, Case.sequences((1, 3, 0, 20, 9), (5, 33, 4, 47, 60), 4, 2, 64, dtype="float16", causal="bottom_right", dropout=(0.3, 8)))
    values, wanted = stored.values_of(base), None
    for q, k, layout in itertools.product(("padded", "packed"), K_STORAGE, ("bshd", "bhsd")):
        case = base.changed(q=q, k=k, layout=layout)
        arguments = case.host_inputs(values)
        parts = [x for pair in parts_of(case, arguments, *attend(kernel, arguments)) for x in pair]
        wanted = wanted or parts
        assert same_bits(parts, wanted), case


@pytest.mark.parametrize("q", Q_STORAGE)
def test_what_is_dropped_is_what_dropout_keep_says(kernel, q):
    """With values that are an identity out holds the weights; sequence, head, query and key are shifted by the origin."""
    n_q, n_k = ((1, 0, 1, 1), (5, 2, 30, 16)) if q == "one" else ((3, 0, 17, 8), (5, 2, 30, 16))
    drawn = (0.5, 11, 2, (1, 0, 5, 9), 7)
    keep = fa_ext.dropout_keep(4, 2, 17, 30, drawn)
    for k in K_STORAGE:
        case = adapted(kernel, Case.sequences(n_q, n_k, 2, 2, 64, 64, "float16", q, k, "bshd", page_size=8))
        values = stored.values_of(case)
        for _, _, v in values:
            v[...] = np.eye(len(v), 64)[:, None, :]
        arguments = case.host_inputs(values) | {"dropout": drawn}
        for b, (out, _) in enumerate(parts_of(case, arguments, *attend(kernel, arguments))):
            kept = np.swapaxes(keep[b, :, : n_q[b], : n_k[b]], 0, 1)
            np.testing.assert_array_equal(out[:, :, : n_k[b]] != 0, kept)


def test_a_state_is_read_by_the_call(kernel):
    arguments = adapted(kernel, DROPPED).host_inputs()
    state = np.zeros(8, np.uint32)
    found = []
    for seed in (3, 4, 3):
        state[0] = seed
        found.append(attend(kernel, arguments | {"dropout": (0.3, state.copy())}))
        assert same_bits(found[-1], attend(kernel, arguments | {"dropout": (0.3, seed)}))
    assert same_bits(found[0], found[2]) and not same_bits(found[0], found[1])
