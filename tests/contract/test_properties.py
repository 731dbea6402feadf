"""Random shapes, strides, dtypes and options against float64, on the CPU kernels, with counterexamples that shrink."""

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import DTYPES, Case
from bench.problems.dense import BIASES, MASKS, SINKS, STRIDES, VALUES
from tests.contract import runner

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

CPU_KERNELS = [kernel for kernel in fa_ext.kernels() if runner.device_of(kernel) == "cpu"]
LONGEST = {"cpu_ref": 60}


@st.composite
def problems(draw, longest):
    length = st.one_of(st.integers(0, 9), st.integers(1, longest))
    width = st.one_of(st.sampled_from([1, 8, 16, 32, 64, 128]), st.integers(1, 256))
    heads_kv = draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    seq_q, d = draw(length), draw(width)
    seq_k = draw(st.one_of(st.just(seq_q), length))
    dv = draw(st.one_of(st.just(d), width))
    strides = draw(st.sampled_from(STRIDES))
    if strides == "packed" and not (heads == heads_kv and seq_q == seq_k and d == dv):
        strides = "swapped"
    side = st.one_of(st.none(), st.integers(0, longest))
    return Case(
        batch=draw(st.integers(0, 2)), heads=heads, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, head_dim=d,
        head_dim_v=dv, dtype=draw(st.sampled_from((*DTYPES, "float64"))),
        causal=draw(st.sampled_from((False, "top_left", "bottom_right", *([True] if seq_q == seq_k else [])))),
        window=draw(st.one_of(st.none(), st.tuples(side, side))), softcap=draw(st.sampled_from((0.0, 0.5, 20.0))),
        bias=draw(st.sampled_from((None, *BIASES))), mask=draw(st.sampled_from((None, *MASKS))),
        sinks=draw(st.sampled_from((None, *SINKS))), scale=draw(st.sampled_from((None, 0.3, 0.0, -0.5, 2.0))),
        layout=draw(st.sampled_from(("bhsd", "bshd"))), strides=strides, values=draw(st.sampled_from(VALUES)),
        seed=draw(st.integers(0, 5)),
    )  # fmt: skip


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_any_problem_agrees_with_float64(name):
    @hypothesis.given(problems(LONGEST.get(name, 200)))
    def check(case):
        if case.dtype == "bfloat16":
            pytest.importorskip("ml_dtypes")
        report = runner.verdict(name, case)
        assert report, f'{report}\npython -m tests.contract "{case}" --kernel {name}'

    check()


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_permuting_the_keys_changes_little(name):
    @hypothesis.given(problems(60).filter(lambda c: c.seq_k > 1 and c.dtype == "float32"), st.randoms())
    def check(case, random):
        case = Case(**{**case.__dict__, "causal": False, "window": None, "bias": None, "mask": None, "values": "normal",
                       "strides": "contiguous", "scale": 0.3})  # fmt: skip
        inputs = case.host_inputs()
        order = list(range(case.seq_k))
        random.shuffle(order)
        axis = 1 if case.layout == "bshd" else 2
        first = fa_ext.attention(**inputs, kernel=name)
        inputs["k"], inputs["v"] = (np.take(inputs[n], order, axis=axis) for n in "kv")
        second = fa_ext.attention(**inputs, kernel=name)
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)

    check()


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_splitting_the_queries_changes_nothing_but_rounding(name):
    @hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 64), st.booleans())
    def check(seq_q, seq_k, head_dim, masked):
        case = Case(1, 2, 1, seq_q, seq_k, head_dim, dtype="float32", mask="rows" if masked else None)
        inputs = case.host_inputs()
        whole = fa_ext.attention(**inputs, kernel=name)
        for i in {0, seq_q // 2, seq_q - 1}:
            part = dict(inputs, q=inputs["q"][:, :, i : i + 1])
            if masked:
                part["mask"] = inputs["mask"][:, :, i : i + 1]
            np.testing.assert_allclose(fa_ext.attention(**part, kernel=name), whole[:, :, i : i + 1], rtol=1e-5, atol=1e-6)

    check()


def test_random_cases_are_reproducible():
    first = [str(case) for case in cases.random_cases(3, 50)]
    assert first == [str(case) for case in cases.random_cases(3, 50)]
    assert first[:20] == [str(case) for case in cases.random_cases(3, 20)] and len(set(first)) == 50
