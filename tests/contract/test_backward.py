"""Every backward kernel held against float64: options, sizes, dtypes, strides, memory; what it must do bit for bit."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import cases, serving_cases
from bench.problems.case import Case
from bench.problems.dense import FLAT_BIASES
from bench.problems.placement import Unplaceable, dtype_of, place
from tests.contract import gradients, runner
from tests.contract.__main__ import main as judge_cases
from tests.contract.gradients import KERNELS, fit, judged, make, placed, run, verdict
from tests.contract.shares import some_of

DTYPES = ("float16", "bfloat16", "float32")
# Small cases that reach the memory paths of a kernel, for compute-sanitizer.
SANITIZED = [
    Case(1, 2, 1, 70, 133, 64, dtype="bfloat16"),
    Case(2, 2, 2, 133, 133, 64, dtype="float16", causal="bottom_right", sinks="same"),
    Case(1, 4, 2, 40, 300, 128, dtype="bfloat16", window=(30, None), layout="bshd"),
    Case(1, 2, 2, 201, 190, 96, dtype="float16", softcap=5.0, causal="top_left"),
    Case(1, 2, 1, 33, 71, 60, 44, dtype="bfloat16", bias="full", mask="rows", softcap=5.0, sinks="float32"),
    Case(1, 2, 1, 65, 90, 256, dtype="float16", bias="keys"),
    Case(1, 2, 1, 35, 66, 40, dtype="float32", causal="bottom_right", bias="full", mask="rows"),
    Case(2, 3, 3, 1, 1, 8, dtype="float16"),
    Case(1, 4, 2, 150, 201, 256, dtype="bfloat16", causal="bottom_right", sinks="same"),
    Case(1, 2, 1, 201, 150, 184, dtype="float16", softcap=5.0, window=(90, 30), layout="bshd"),
]


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = gradients.absent(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def failures(kernel, problems):
    """The verdicts that are not as they should be, one line each."""
    wrong, ran = [], 0
    for problem in problems:
        try:
            report = verdict(kernel, problem)
        except Unplaceable:
            continue
        ran += 1
        if not report:
            wrong.append(f"{problem.case}: {report}")
    if not ran and runner.listed_name(kernel) not in gradients.TAKES_EVERYTHING:
        pytest.skip(f"{kernel} takes none of them")
    assert ran
    return wrong


@pytest.mark.parametrize("part", some_of(range(8)))
def test_the_contract(kernel, part):
    chosen = gradients.contract(kernel)[part::8]
    wrong = failures(kernel, (make(case, dlse=n % 2 == 0) for n, case in enumerate(chosen)))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.sanitize
@pytest.mark.parametrize("case", SANITIZED, ids=str)
def test_sanitizer_case(kernel, case):
    report = verdict(kernel, make(case))
    assert report, report


def test_float64(kernel):
    if runner.device_of(kernel) != "cpu":
        pytest.skip("float64 runs on the CPU only")
    chosen = [case for case in cases.float64() if case.bias not in FLAT_BIASES]
    wrong = failures(kernel, (make(gradients.shrunk(case, 3)) for case in chosen))
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems(kernel, dtype):
    found = [case for case in cases.random_cases(11, 60) if case.dtype == dtype and case.bias not in FLAT_BIASES]
    found = [case for case in found if not cases.beyond_backward(case)]
    wrong = failures(kernel, [make(gradients.shrunk(case, 6), dlse=n % 2 == 0) for n, case in enumerate(found)])
    assert not wrong, "\n".join(wrong[:5])


# ---- which gradients ----


@pytest.mark.parametrize("bias", list(itertools.product((0, 1), repeat=4)), ids=lambda p: "".join(map(str, p)))
def test_dbias_of_every_broadcast_pattern(kernel, bias):
    """1: the axis is there; 0: it has extent 1 and is summed over."""
    sizes = (2, 4, 29, 43)
    rng = np.random.default_rng(bias)
    for dtype, kind in (("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")):
        problem = make(Case(2, 4, 2, 29, 43, 24, dtype=dtype, causal="bottom_right", mask="rows"), wrt=("bias",))
        shape = tuple(n if there else 1 for n, there in zip(sizes, bias, strict=True))
        problem = rebiased(problem, rng.standard_normal(shape).astype(dtype_of(kind)))
        assert verdict(kernel, problem)


def rebiased(problem, bias):
    """The problem with another bias, and out and LSE that belong to it."""
    from fa_ext import reference

    inputs = problem.inputs | {"bias": bias}
    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    inputs |= {"out": out.astype(inputs["out"].dtype), "lse": lse.astype(inputs["lse"].dtype)}
    return gradients.Problem(problem.case, inputs, problem.wrt)


def test_dbias_of_fewer_axes_and_of_views(kernel):
    rng = np.random.default_rng(3)
    base = make(Case(2, 4, 2, 19, 361, 16, dtype="float32"), wrt=("bias",))
    wide = rng.standard_normal((2, 4, 19, 361)).astype(np.float32)
    views = [wide[0, 0], wide[0, 0, 0], np.array(0.5, np.float32), wide[:, :, :, ::-1],
             np.broadcast_to(wide[:1, :, :1], wide.shape), wide.transpose(1, 0, 3, 2).copy().transpose(1, 0, 3, 2)]  # fmt: skip
    for bias in views:
        problem = rebiased(base, bias)
        try:
            assert verdict(kernel, problem), bias.shape
        except Unplaceable:
            continue


@pytest.mark.parametrize("wrt", [("v",), ("k",), ("q",), ("sinks",), ("bias",), ("v", "q"), ("sinks", "k", "bias"), ("bias", "q")])
def test_wrt_alone_and_in_any_order(kernel, wrt):
    case = fit(Case(2, 4, 2, 31, 37, 24, 40, dtype="float32", bias="full", sinks="same", causal="top_left"), kernel)
    problem = make(case)
    wrt = tuple(name for name in wrt if name in problem.wrt)
    if not wrt:
        pytest.skip(f"{kernel} takes no bias")
    whole, some = run(kernel, problem), run(kernel, gradients.Problem(case, problem.inputs, wrt))
    for name in wrt:
        np.testing.assert_array_equal(runner.bits(some[name]), runner.bits(whole[name]), name)


def test_new_results_have_the_kind_shape_and_dtype_of_their_arguments(kernel):
    case = fit(Case(2, 4, 2, 9, 13, 24, 8, dtype="float16", layout="bshd", bias="full32", sinks="float32"), kernel)
    problem = make(case)
    arrays = placed(problem, kernel)
    made = fa_ext.attention_backward(**arrays, wrt=problem.wrt, kernel=kernel, **gradients.order(kernel))
    assert isinstance(made, tuple) and len(made) == len(problem.wrt) >= 4
    for name, gradient in zip(problem.wrt, made, strict=True):
        assert type(gradient) is type(arrays["q"]) and gradient.shape == arrays[name].shape
        assert str(gradient.dtype) == str(arrays[name].dtype)
        assert runner.to_host(gradient).flags.c_contiguous
    assert judged(kernel, problem, dict(zip(problem.wrt, map(runner.to_host, made), strict=True)))
    assert len(fa_ext.attention_backward(**arrays, kernel=kernel, **gradients.order(kernel))) == 3


# ---- LSE ----


def test_dlse_alone_and_with_dout(kernel):
    for sinks, mask in itertools.product((None, "same"), (None, "rows")):
        case = fit(Case(2, 4, 2, 29, 41, 32, dtype="float32", sinks=sinks, mask=mask, causal="bottom_right"), kernel)
        for dout, dlse in (("none", True), ("normal", True), ("normal", False), ("ones", True)):
            assert verdict(kernel, make(case, dout=dout, dlse=dlse))


def test_strided_lse_and_dlse(kernel):
    problem = make(fit(Case(2, 3, 3, 17, 19, 16, dtype="float32"), kernel))
    want = run(kernel, problem)
    for name in ("lse", "dlse", "out", "dout"):
        x = problem.inputs[name]
        problem.inputs[name] = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)[..., ::2]
        problem.inputs[name][...] = x
    problem.inputs["dlse"] = problem.inputs["dlse"].copy(order="F")
    got = run(kernel, problem)
    for name in want:
        np.testing.assert_array_equal(runner.bits(got[name]), runner.bits(want[name]))


def test_float32_out_of_half_inputs(kernel):
    problem = make(Case(1, 2, 1, 33, 47, 32, dtype="float16"))
    problem.inputs["out"] = problem.inputs["out"].astype(np.float32)
    assert verdict(kernel, problem)


# ---- zero sizes, small sizes ----


def test_zero_sizes(kernel):
    wrong = failures(kernel, (make(case) for case in cases.zero_sizes()))
    biased = [Case(b, h, h, sq, sk, 16, dtype="float32", sinks="same") for b, h, sq, sk in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0))]  # fmt: skip
    for case in biased:
        for shape in ((case.batch, case.heads, case.seq_q, case.seq_k), (1, 1, case.seq_q, case.seq_k), (case.seq_k,), (1, 1, 1, 1)):
            problem = make(case)
            problem = gradients.Problem(case, problem.inputs, ("q", "k", "v", "bias", "sinks"))
            problem.inputs["bias"] = np.ones(shape, np.float32)
            report = verdict(kernel, problem)
            if not report:
                wrong.append(f"{case}, bias {shape}: {report}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_queries_than_keys(kernel, dtype):
    sizes = [(76, 1), (34, 1), (146, 1), (1, 1), (1, 9), (9, 1), (2, 1), (130, 3)]
    for (sq, sk), causal in itertools.product(sizes, (False, "top_left", "bottom_right")):
        assert verdict(kernel, make(fit(Case(1, 2, 1, sq, sk, 32, dtype=dtype, causal=causal), kernel)))
    for window in ((0, 0), (3, 2), (None, 0)):
        assert verdict(kernel, make(fit(Case(1, 2, 1, 40, 9, 32, dtype=dtype, causal="top_left", window=window, sinks="same"), kernel)))


# ---- grads, accumulate ----


def test_gradients_with_any_strides(kernel):
    problem = make(fit(Case(2, 4, 2, 21, 18, 24, dtype="float32", bias="full", sinks="same"), kernel))
    want = run(kernel, problem)
    library = runner.library_for(kernel, problem.case)
    given = []
    for name in problem.wrt:
        shape = problem.inputs[name].shape
        wide = np.full([2 * n for n in shape[::-1]], np.nan, problem.inputs[name].dtype).transpose()
        given.append(wide[tuple(slice(None, None, -2) for _ in shape)] if library != "torch" else wide[tuple(slice(None, None, 2) for _ in shape)])
    grads = tuple(place(x, library) for x in given)
    fa_ext.attention_backward(**placed(problem, kernel), wrt=problem.wrt, grads=grads, kernel=kernel, **gradients.order(kernel))
    for name, gradient in zip(problem.wrt, grads, strict=True):
        np.testing.assert_array_equal(runner.to_host(gradient), want[name], name)


def test_some_grads_given(kernel):
    problem = make(fit(Case(1, 2, 2, 9, 11, 16, dtype="float32"), kernel))
    library = runner.library_for(kernel, problem.case)
    dk = place(np.full(problem.inputs["k"].shape, np.nan, problem.inputs["k"].dtype), library)
    dq, same, dv = fa_ext.attention_backward(**placed(problem, kernel), grads=(None, dk, None), kernel=kernel, **gradients.order(kernel))
    assert same is dk
    assert judged(kernel, problem, {"q": runner.to_host(dq), "k": runner.to_host(dk), "v": runner.to_host(dv)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_of_the_keys_with_the_global_lse_are_one_call(kernel, dtype):
    """Ring attention: float32 gradients take the halves without rounding between."""
    case = fit(Case(2, 4, 2, 37, 256, 32, dtype=dtype, bias="full", mask="rows", sinks="same"), kernel)
    problem = make(case, wrt=("q", "k", "v", "bias") if case.bias else ("q", "k", "v"))
    _, grads = gradients.results(problem, kernel, "float32")
    sums = {n: runner.filled(runner.library_for(kernel, case), int(np.prod(g.shape)), "float32", 0).reshape(g.shape) for n, g in zip(problem.wrt, grads)}
    arrays = placed(problem, kernel)
    for half in (slice(0, 128), slice(128, 256)):
        parts = {"k": (..., half, slice(None)), "v": (..., half, slice(None)), "bias": (..., half), "mask": (..., half)}
        part = {n: x[parts[n]] if n in parts else x for n, x in arrays.items()}
        grads = tuple(x[parts[n]] if n in parts else x for n, x in sums.items())
        fa_ext.attention_backward(**part, wrt=problem.wrt, grads=grads, accumulate=True, kernel=kernel, **gradients.order(kernel))
    assert judged(kernel, problem, {n: runner.to_host(x) for n, x in sums.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds_before_it_rounds(kernel, dtype):
    case = fit(Case(1, 4, 2, 23, 31, 16, dtype=dtype, bias="full", sinks="same", causal="bottom_right"), kernel)
    problem = make(case)
    arrays, wrt = placed(problem, kernel), problem.wrt
    rng = np.random.default_rng(1)
    for kind in {case.dtype, "float32"}:
        old = [rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt]
        grads = tuple(place(x, runner.library_for(kernel, case)) for x in old)
        report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=True, kernel=kernel, **gradients.order(kernel))
        assert report, report


# ---- bits ----


def test_repeats_give_the_same_bits(kernel, request):
    repeats = request.config.getoption("--repeats") if runner.device_of(kernel) == "cuda" else 3
    for dtype, dim in itertools.product(DTYPES, (64, 256)):
        problem = make(fit(Case(2, 4, 2, 61, 77, dim, dtype=dtype, bias="keys", sinks="same", window=(20, 3), causal="bottom_right"), kernel))
        first = run(kernel, problem, deterministic=True)
        for _ in range(repeats):
            again = run(kernel, problem, deterministic=True)
            for name in first:
                np.testing.assert_array_equal(runner.bits(first[name]), runner.bits(again[name]), name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twice_dout_is_twice_the_gradient(kernel, dtype):
    problem = make(fit(Case(2, 4, 2, 33, 45, 32, dtype=dtype, bias="full", sinks="same", softcap=3.0, mask="rows"), kernel))
    once = run(kernel, problem)
    twice = run(kernel, gradients.Problem(problem.case, problem.inputs | {n: 2 * problem.inputs[n] for n in ("dout", "dlse")}, problem.wrt))
    nothing = run(kernel, gradients.Problem(problem.case, problem.inputs | {n: 0 * problem.inputs[n] for n in ("dout", "dlse")}, problem.wrt))
    for name in once:
        np.testing.assert_array_equal(2 * once[name], twice[name], name)
        assert (nothing[name] == 0).all()


def test_permuted_batch_and_heads_give_permuted_gradients(kernel):
    problem = make(fit(Case(3, 6, 3, 21, 34, 16, dtype="float32", causal="bottom_right"), kernel))
    want = run(kernel, problem)
    order, heads_kv = [2, 0, 1], [1, 2, 0]
    heads = [2 * h + n for h in heads_kv for n in (0, 1)]
    moved = {}
    for name, x in problem.inputs.items():
        if isinstance(x, np.ndarray):
            moved[name] = np.ascontiguousarray(x[order][:, heads_kv if name in "kv" else heads])
    got = run(kernel, gradients.Problem(problem.case, problem.inputs | moved, problem.wrt))
    for name in "qkv":
        np.testing.assert_array_equal(got[name], want[name][order][:, heads if name == "q" else heads_kv])


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_grouped_heads_are_repeated_heads_summed(kernel, group):
    case = Case(1, 2 * group, 2, 19, 23, 16, dtype="float32")
    assert verdict(kernel, make(fit(case, kernel)))


def test_batch_invariance(kernel):
    problem = make(fit(Case(3, 4, 2, 33, 29, 32, dtype="float32"), kernel))
    whole = run(kernel, problem, batch_invariant=True)
    alone = {n: x[1:2] if isinstance(x, np.ndarray) else x for n, x in problem.inputs.items()}
    one = run(kernel, gradients.Problem(problem.case, alone, problem.wrt), batch_invariant=True)
    for name in "qkv":
        np.testing.assert_array_equal(whole[name][1:2], one[name])


def test_sums_in_any_order_are_within_the_bound_too(kernel):
    case = Case(2, 4, 2, 33, 47, 32, dtype="bfloat16", causal="bottom_right")
    assert verdict(kernel, make(case), deterministic=False)


def test_inputs_are_left_alone(kernel):
    problem = make(fit(Case(1, 4, 2, 19, 23, 16, dtype="float32", bias="full", mask="rows", sinks="same"), kernel))
    arrays = placed(problem, kernel)
    before = {n: runner.bits(x).copy() for n, x in arrays.items() if hasattr(x, "shape")}
    fa_ext.attention_backward(**arrays, wrt=problem.wrt, kernel=kernel, **gradients.order(kernel))
    for name, bits in before.items():
        np.testing.assert_array_equal(runner.bits(arrays[name]), bits, name)


def test_a_sweep_and_a_line_judge_gradients(capsys):
    line = ["--kernel", "cpu_ref_backward"]
    assert judge_cases(["--sweep", "8", "--seed", "2", "--limit", "1e6", *line]) == 0
    assert "cpu_ref_backward: 8 judged, 0 failed, 0 not taken" in capsys.readouterr().out
    drawn = {(case.operation, case.deterministic, case.dlse) for case in cases.random_gradients(2, 40, 1e6)}
    assert drawn == {("backward", ordered, dlse) for ordered in (True, False) for dlse in (True, False)}
    assert judge_cases([str(next(cases.random_gradients(2, 1, 1e6))), *line]) == 0
    assert judge_cases(["--sweep", "8", "--seed", "2", "--sequences", *line]) == 0
    assert "cpu_ref_backward: 8 judged, 0 failed, 0 not taken" in capsys.readouterr().out
    assert judge_cases([str(next(serving_cases.random_gradients(1, 2))), *line]) == 0
