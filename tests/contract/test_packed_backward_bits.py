"""Bits of gradients of sequences: a sequence has the same in every storage and batch, and in the dense call of its rows."""

import ctypes
import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16
from tests.contract import gradients, runner
from tests.contract.gradients import Problem, run
from tests.contract.sequence_gradients import arguments_of, parts_of, values_of

KERNELS = [kernel for kernel in fa_ext.kernels("backward") if gradients.takes_sequences(kernel)]
#: Those that take the rows of a dense call in the tiles of a sequence's, or in others of the same bits.
AS_DENSE = ("cpu_ref_backward", "cpu_simd_backward", "simt_backward", "mma_backward_sm80")
HALF = "bfloat16" if BFLOAT16 else "float16"
EITHER = ("padded", "packed")
STORES = [dict(q=q, k=k, layout=layout, slack=slack)
          for (q, k, layout), slack in zip(itertools.product(EITHER, EITHER, ("bshd", "bhsd")), (0, 1, 40, 3, 64, 7, 0, 2))]  # fmt: skip
WRT = ("q", "k", "v")


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = gradients.absent(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def fitted(case, kernel):
    """The case, in 16 bits where the kernel has no float32, and with the head_dim that it has."""
    return case if gradients.takes_sequences(kernel, case) else case.changed(dtype=HALF, head_dim=64, head_dim_v=64)


def gradients_of(kernel, case, values, **options):
    """[{name: rows}] of each sequence."""
    inputs = arguments_of(case, values)
    problem = Problem(case, inputs, WRT)
    return parts_of(case, inputs, run(kernel, problem, **options))


def same(a, b):
    return all(a[name].tobytes() == b[name].tobytes() for name in WRT)


def dense(case, x, b=0):
    """The arguments of a dense call of one sequence's values, (1, H, S, D)."""
    found = {name: np.ascontiguousarray(getattr(x, name).swapaxes(0, 1))[None] for name in ("dout", "q", "k", "v", "out")}
    found |= {name: np.ascontiguousarray(getattr(x, name).T)[None] for name in ("lse", "dlse")}
    options = {name: getattr(case, name) for name in ("causal", "window", "softcap")}
    return found | options | ({"dropout": (*case.dropout, 0, (b, 0, 0, 0), case.heads)} if case.dropout else {})


@pytest.mark.parametrize("dropout", [None, (0.3, 4)])
@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_a_sequence_has_the_same_bits_in_every_storage(kernel, dtype, dropout):
    base = fitted(Case.sequences((1, 3, 0, 70, 17), (5, 33, 4, 97, 60), 4, 2, 16, dtype=dtype, k="packed", causal="bottom_right", softcap=5.0, dropout=dropout,
                                 seed=3), kernel)
    values, want = values_of(base), None
    for store in STORES:
        got = gradients_of(kernel, base.changed(**store), values)
        want = want or got
        assert all(map(same, got, want)), store


@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_a_sequence_has_the_same_bits_in_every_batch(kernel, dtype):
    rng = np.random.default_rng(5)
    base = fitted(Case.sequences((2, 9, 1, 40), (50, 9, 70, 33), 4, 1, 16, dtype=dtype, k="packed", causal="bottom_right", window=(30, None)), kernel)
    values = values_of(base)
    alone = [gradients_of(kernel, base.changed(n_q=(base.n_q[b],), n_k=(base.n_k[b],)), values[b : b + 1])[0] for b in range(4)]
    for _ in range(20):
        order = rng.integers(0, 4, rng.integers(1, 9))
        case = base.changed(n_q=[base.n_q[b] for b in order], n_k=[base.n_k[b] for b in order], **STORES[rng.integers(8)])
        got = gradients_of(kernel, case, [values[b] for b in order])
        assert all(same(got[n], alone[b]) for n, b in enumerate(order)), case


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_a_sequence_has_the_bits_of_the_dense_call_of_its_rows(kernel, dtype, causal):
    if runner.listed_name(kernel) not in AS_DENSE:
        pytest.skip(f"{kernel} may take a dense call in other tiles")
    for heads_kv, options in ((4, {}), (2, {"window": (20, 3)}), (1, {"dropout": (0.2, 9)})):
        n_q, n_k = (1, 9, 0, 65, 40), (5, 9, 4, 70, 33)
        case = fitted(Case.sequences(n_q, n_k, 4, heads_kv, 16, dtype=dtype, k="packed", causal=causal, **options), kernel)
        values = values_of(case)
        got = gradients_of(kernel, case, values)
        for b, x in enumerate(values):
            want = run(kernel, Problem(case, dense(case, x, b), WRT))
            assert all(got[b][name].swapaxes(0, 1).tobytes() == want[name][0].tobytes() for name in WRT), (case, b)


def test_repeats_and_batch_invariance_change_nothing(kernel):
    case = fitted(Case.sequences((3, 40, 0, 65), (30, 40, 5, 70), 4, 2, 32, k="packed", causal="bottom_right"), kernel)
    values = values_of(case)
    want = gradients_of(kernel, case, values, deterministic=True)
    for _ in range(3):
        assert all(map(same, gradients_of(kernel, case, values, deterministic=True), want))
    assert all(map(same, gradients_of(kernel, case, values, deterministic=True, batch_invariant=True), want))


def test_bits_do_not_depend_on_the_threads(kernel):
    if runner.device_of(kernel) != "cpu":
        pytest.skip("threads are the CPU's")
    n_q, n_k = (3, 90, 0, 65, 1, 20), (30, 90, 5, 70, 1, 9)
    case = Case.sequences(n_q, n_k, 4, 2, 32, k="packed", causal="bottom_right", sinks=True, operation="backward", dlse=True)
    problem, omp, found = gradients.make(case), ctypes.CDLL("libgomp.so.1"), []
    before = omp.omp_get_max_threads()
    for threads in (1, 2, 5):
        omp.omp_set_num_threads(threads)
        try:
            found.append(run(kernel, problem))
        finally:
            omp.omp_set_num_threads(before)
    for name in problem.wrt:
        assert len({x[name].tobytes() for x in found}) == 1
