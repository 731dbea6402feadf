"""Gradients of sequences of any length in padded and packed storage, on every kernel that takes them: against float64, what
of them is asked for, and with garbage and bad contents in every place."""

import contextlib
import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases, stored
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16, Unplaceable, place
from bench.problems.stored import INT_MAX, INT_MIN
from tests.contract import gradients, runner
from tests.contract.gradients import Problem, make, placed, run, verdict
from tests.contract.sequence_gradients import arguments_of, elsewhere, parts_of, values_of

KERNELS = [kernel for kernel in fa_ext.kernels("backward") if gradients.takes_sequences(kernel)]
BACKWARD = {"operation": "backward", "dlse": True}
SMALL = Case.sequences((3, 0, 5, 1), (7, 4, 5, 0), 4, 2, 16, k="packed", causal="bottom_right", sinks=True, **BACKWARD)


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = gradients.absent(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def fitted(case, kernel):
    """The case, in a dtype and with head_dims that the kernel takes, and without positions where it takes none."""
    if case.positions and not gradients.takes_sequences(kernel, gradients.SEQUENCES.changed(positions="same")):
        case = case.changed(positions=None)
    if runner.listed_name(kernel) in gradients.TAKES_EVERYTHING:
        return case if case.dtype in gradients.dtypes(kernel) else case.changed(dtype="float32")
    case = case.changed(dtype=case.dtype if case.dtype in gradients.dtypes(kernel) else "bfloat16")
    return case if gradients.takes_sequences(kernel, case) else case.changed(head_dim=64, head_dim_v=64)


def failures(kernel, some):
    """The verdicts of float64 against the kernel's gradients of cases; those that it need not take are left out."""
    wrong, ran = [], 0
    for case in some:
        case = fitted(case, kernel)
        if case.dtype == "bfloat16" and BFLOAT16 is None:
            continue
        with contextlib.suppress(Unplaceable):
            report = verdict(kernel, make(case))
            ran += 1
            wrong += [] if report else [f"{case}: {report}"]
    assert ran or runner.listed_name(kernel) not in gradients.TAKES_EVERYTHING
    if not ran:
        pytest.skip(f"{kernel} takes none of them")
    return wrong


# ---- what is computed ----


@pytest.mark.parametrize("part", range(4))
def test_against_float64(kernel, part):
    wrong = failures(kernel, serving_cases.gradient_grid()[part::4])
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize("part", range(4))
def test_lengths(kernel, part):
    wrong = failures(kernel, serving_cases.gradient_lengths()[part::4])
    assert not wrong, "\n".join(wrong[:3])


def test_random_sequences(kernel):
    wrong = failures(kernel, serving_cases.random_gradients(40, 7, longest=70))
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_more_random_sequences(kernel, seed):
    wrong = failures(kernel, serving_cases.random_gradients(60, 100 + seed))
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_bias_and_mask_of_padded_arrays(kernel, layout):
    """dbias sums over the pairs that exist, and is 0 where none does."""
    stored_as = {"q": "padded", "k": "padded", "layout": layout}
    case = fitted(Case.sequences((3, 0, 9, 1), (7, 4, 12, 5), 4, 2, 16, causal="bottom_right", window=(8, None), **stored_as, **BACKWARD), kernel)
    rng = np.random.default_rng(0)
    for shape in ((4, 4, 12, 15), (1, 1, 12, 15), (4, 1, 1, 15), (12, 1), (1,)):
        for mask in (None, rng.random((4, 1, 12, 15)) < 0.7):
            inputs = arguments_of(case) | {"bias": rng.standard_normal(shape).astype(np.float32)} | ({} if mask is None else {"mask": mask})
            try:
                report = fa_ext.verify_backward(**placed(Problem(case, rounded_forward(inputs), ()), kernel), wrt=("q", "k", "v", "bias"), kernel=kernel)
            except fa_ext.UnsupportedError as error:
                if runner.listed_name(kernel) in gradients.TAKES_EVERYTHING:
                    raise
                pytest.skip(str(error))
            assert report, report


def rounded_forward(inputs):
    """The arguments with out and LSE that belong to them."""
    from fa_ext import reference

    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    return inputs | {"out": out.astype(inputs["out"].dtype), "lse": lse.astype(inputs["lse"].dtype)}


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("sinks",), ("v", "q"), ("sinks", "k")])
def test_wrt_alone_and_in_any_order(kernel, wrt):
    problem = make(fitted(SMALL, kernel))
    whole, some = run(kernel, problem), run(kernel, Problem(problem.case, problem.inputs, wrt))
    for name in wrt:
        np.testing.assert_array_equal(runner.bits(some[name]), runner.bits(whole[name]), name)


def test_new_results_have_the_kind_shape_and_dtype_of_their_arguments(kernel):
    for q, k, layout in itertools.product(("padded", "packed"), ("padded", "packed"), ("bhsd", "bshd")):
        problem = make(fitted(SMALL.changed(q=q, k=k, layout=layout), kernel))
        arrays = placed(problem, kernel)
        made = fa_ext.attention_backward(**arrays, wrt=problem.wrt, kernel=kernel, **gradients.order(kernel))
        for name, gradient in zip(problem.wrt, made, strict=True):
            assert type(gradient) is type(arrays["q"]) and gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
        assert gradients.judged(kernel, problem, dict(zip(problem.wrt, map(runner.to_host, made), strict=True)))


def test_float32_gradients_and_any_strides(kernel):
    for dtype in ("float16", "float32"):
        problem = make(fitted(SMALL.changed(dtype=dtype, q="padded"), kernel))
        want, library = run(kernel, problem), runner.library_for(kernel, problem.case)
        memory = [np.full([2 * n for n in problem.inputs[name].shape], np.nan, np.float32) for name in problem.wrt]
        grads = tuple(place(x, library)[tuple(slice(None, None, 2) for _ in x.shape)] for x in memory)
        fa_ext.attention_backward(**placed(problem, kernel), wrt=problem.wrt, grads=grads, kernel=kernel, **gradients.order(kernel))
        got = {name: runner.to_host(g) for name, g in zip(problem.wrt, grads, strict=True)}
        assert gradients.judged(kernel, problem, got)
        for name in problem.wrt:
            np.testing.assert_array_equal(got[name].astype(want[name].dtype), want[name])


def test_strided_inputs(kernel):
    problem = make(fitted(SMALL, kernel))
    want = run(kernel, problem)
    for name in ("q", "k", "v", "dout", "out", "lse", "dlse"):
        x = problem.inputs[name]
        problem.inputs[name] = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)[..., ::2]
        problem.inputs[name][...] = x
    got = run(kernel, problem)
    for name in want:
        np.testing.assert_array_equal(runner.bits(got[name]), runner.bits(want[name]))


@pytest.mark.parametrize("k", ["padded", "packed"])
def test_parts_of_the_keys_under_the_global_lse_are_one_call(kernel, k):
    """k_range cuts every sequence in two; float32 gradients take both parts without rounding between."""
    case = fitted(Case.sequences((3, 9, 0, 17), (12, 9, 5, 40), 4, 2, 16, k=k, causal="bottom_right", window=(20, None), **BACKWARD), kernel)
    problem = make(case)
    cut, library = np.array([5, 0, 2, 31], np.int32), runner.library_for(kernel, case)
    wide = "float64" if case.dtype == "float64" else "float32"
    sums = tuple(place(np.zeros(problem.inputs[n].shape, wide), library) for n in problem.wrt)
    for k_range in ((None, cut), (cut, None)):
        part = Problem(case, problem.inputs | {"k_range": k_range}, problem.wrt)
        fa_ext.attention_backward(**placed(part, kernel), grads=sums, accumulate=True, kernel=kernel, **gradients.order(kernel))
    assert gradients.judged(kernel, problem, {n: runner.to_host(x) for n, x in zip(problem.wrt, sums, strict=True)})


# ---- accumulate ----


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_accumulate_adds_before_it_rounds_and_leaves_other_rows_alone(kernel, dtype):
    case = fitted(SMALL.changed(dtype=dtype), kernel)
    problem = make(case)
    rng, library = np.random.default_rng(1), runner.library_for(kernel, case)
    for wide in (False, True):
        old = {n: rng.standard_normal(problem.inputs[n].shape).astype(np.float32 if wide else problem.inputs[n].dtype) for n in problem.wrt}
        grads = tuple(place(old[n], library) for n in problem.wrt)
        report = fa_ext.verify_backward(**placed(problem, kernel), wrt=problem.wrt, grads=grads, accumulate=True, kernel=kernel, **gradients.order(kernel))
        assert report, report
        for name, value in (("q", np.nan), ("k", np.inf), ("v", -np.inf)):
            mine = elsewhere(case, problem.inputs, name, np.arange(old[name].size).reshape(old[name].shape))
            old[name].reshape(-1)[mine] = value
        grads = tuple(place(old[n], library) for n in problem.wrt)
        fa_ext.attention_backward(**placed(problem, kernel), wrt=problem.wrt, grads=grads, accumulate=True, kernel=kernel, **gradients.order(kernel))
        for name, g in zip(problem.wrt[:3], grads, strict=False):
            left, given = (elsewhere(case, problem.inputs, name, x) for x in (runner.to_host(g), old[name]))
            assert left.size and left.tobytes() == given.tobytes()


# ---- bad contents ----


def broken():
    """(name, case, what is changed: (argument, index, value))"""
    packed = SMALL.changed(slack=0, n_q=(2, 3, 1, 4), n_k=(20, 40, 9, 17))
    padded = packed.changed(q="padded", k="padded", slack=2)
    yield "length of keys below", padded, ("seqlens_k", 1, -5)
    yield "length of keys above", padded, ("seqlens_k", 0, INT_MAX)
    yield "length of queries above", padded, ("seqlens_q", 3, 99)
    yield "length of queries below", padded, ("seqlens_q", 0, INT_MIN)
    yield "starts fall", packed, ("cu_seqlens_q", 2, 1)
    yield "starts below 0", packed, ("cu_seqlens_q", 0, -1)
    yield "starts of keys above", packed, ("cu_seqlens_k", 4, INT_MAX)


BROKEN = list(broken())


@pytest.mark.sanitize
@pytest.mark.parametrize(("name", "case", "change"), BROKEN, ids=[x[0] for x in BROKEN])
def test_bad_contents_raise_before_anything_is_written_or_count_as_in_the_forward(name, case, change, kernel):
    case = fitted(case, kernel)
    problem = make(case)
    argument, index, value = change
    inputs = {n: np.nan_to_num(x, nan=0.5) if isinstance(x, np.ndarray) else x for n, x in problem.inputs.items()}
    inputs[argument] = inputs[argument].copy()
    inputs[argument][index] = value
    problem = Problem(case, rounded_forward(inputs), problem.wrt)
    arrays, device = placed(problem, kernel), None if runner.device_of(kernel) == "cpu" else 0
    memory, grads = gradients.results(problem, kernel)
    before = {n: runner.bits(x).copy() for n, x in memory.items()}
    options = {"kernel": kernel} | gradients.order(kernel)
    for check in (True, None) if device is None else (True,):
        with pytest.raises(ValueError, match="such in all"):
            fa_ext.attention_backward(**arrays, wrt=problem.wrt, grads=grads, check=check, **options)
    for n, x in memory.items():
        np.testing.assert_array_equal(runner.bits(x), before[n])
    fa_ext.faults(device)
    fa_ext.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")}, check=False, kernel="cpu_ref")
    wanted = fa_ext.faults(None)
    report = fa_ext.verify_backward(**arrays, wrt=problem.wrt, check=False, **options)
    met = fa_ext.faults(device)
    assert report, report
    assert [x[:2] for x in met] == [x[:2] for x in wanted] and met


@pytest.mark.parametrize("seed", range(2))
def test_any_contents_at_all(seed, kernel):
    """Index arrays of noise: what the reference makes of them, and never a crash."""
    rng, device = np.random.default_rng(seed), None if runner.device_of(kernel) == "cpu" else 0
    for case in serving_cases.random_gradients(25, seed + 50, longest=40):
        problem = make(fitted(case.changed(dtype="float32", accumulate=False, positions=None), kernel))
        inputs = {n: np.nan_to_num(x, nan=0.5) if isinstance(x, np.ndarray) else x for n, x in problem.inputs.items()}
        for name in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k"):
            if name in inputs:
                x = inputs[name] = inputs[name].copy()
                bad = rng.random(x.shape) < 0.4
                x[bad] = rng.choice([-1, 0, 1, 5, 17, 60, INT_MAX, INT_MIN], bad.sum())
        with contextlib.suppress(fa_ext.UnsupportedError):
            arrays = placed(Problem(problem.case, rounded_forward(inputs), problem.wrt), kernel)
            report = fa_ext.verify_backward(**arrays, wrt=problem.wrt, check=False, kernel=kernel, **gradients.order(kernel) | problem.call)
            assert report, f"{case}\n{report}"
    fa_ext.faults(device)


# ---- dropout ----


@pytest.mark.parametrize("p", [0.0, 1 / 65536, 0.5, 1.0])
def test_dropout_draws_one_mask_for_packed_padded_and_dense(kernel, p):
    """With values that are an identity out holds the weights that were kept, and with dout so does dv."""
    n_q, n_k = (3, 0, 17, 8), (5, 2, 30, 16)
    drawn = (p, 11, 2, (1, 0, 5, 9), 7)
    keep = fa_ext.dropout_keep(4, 2, 17, 30, drawn)
    near = [name for name in fa_ext.kernels() if runner.device_of(name) == runner.device_of(kernel)]
    for q, k in itertools.product(("packed", "padded"), ("packed", "padded")):
        case = fitted(Case.sequences(n_q, n_k, 2, 2, 32, 32, "float32", q, k, "bshd", causal="bottom_right", window=(25, None), **BACKWARD), kernel)
        values = values_of(case)
        for x in values:
            x.v[...] = np.eye(len(x.v), case.head_dim_v)[:, None, :]
            x.dout[...] = np.eye(len(x.q), case.head_dim_v)[:, None, :]
        inputs = arguments_of(case, values, dlse=False) | {"dropout": drawn}
        given = {n: x for n, x in inputs.items() if n not in ("dout", "out", "lse")}
        with contextlib.suppress(Unplaceable):
            got = run(kernel, Problem(case, inputs, ("v",)))
            out = runner.attention(next(name for name in near if runner.takes(name, **given)), **given)
            for b, (part, weights) in enumerate(zip(parts_of(case, inputs, got), parts_of(case, inputs, {"q": out}), strict=True)):
                j, i = np.arange(n_k[b])[:, None], np.arange(n_q[b]) + n_k[b] - n_q[b]
                seen = (j <= i) & (i - j <= 25)
                for h in range(2):
                    kept = seen & keep[b, h, : n_q[b], : n_k[b]].T
                    np.testing.assert_array_equal(part["v"][:, h, : n_q[b]] != 0, kept)
                    np.testing.assert_array_equal(weights["q"][:, h, : n_k[b]].T != 0, kept)


# ---- NaN ----


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse", "dlse"])
def test_nan_stays_in_its_sequence(kernel, name):
    case = fitted(Case.sequences((3, 4, 5), (13, 10, 15), 4, 2, 16, k="packed", causal="bottom_right", **BACKWARD), kernel)
    values = values_of(case)
    inputs = arguments_of(case, values)
    want = parts_of(case, inputs, run(kernel, Problem(case, inputs, ("q", "k", "v"))))
    for bad in (np.nan, np.inf):
        broken_values = values_of(case)
        getattr(broken_values[1], name)[...] = bad
        inputs = arguments_of(case, broken_values)
        got = parts_of(case, inputs, run(kernel, Problem(case, inputs, ("q", "k", "v"))))
        for b, gradient in itertools.product((0, 2), "qkv"):
            assert got[b][gradient].tobytes() == want[b][gradient].tobytes()
        if np.isnan(bad):
            assert any(not np.isfinite(x.astype(np.float32)).all() for x in got[1].values())


def test_garbage_around_the_sequences_changes_no_bit(kernel):
    for q, k in itertools.product(("padded", "packed"), ("padded", "packed")):
        case = fitted(SMALL.changed(q=q, k=k, slack=5), kernel)
        problem = make(case)
        want = run(kernel, problem)
        for fill in (0.0, np.inf, -np.inf, 6e4):
            inputs = {n: x if n == "sinks" or not isinstance(x, np.ndarray) else np.where(np.isnan(x), x.dtype.type(fill), x) if x.dtype.kind == "f" else x
                      for n, x in problem.inputs.items()}  # fmt: skip
            got = run(kernel, Problem(case, inputs, problem.wrt))
            for name in want:
                assert got[name].tobytes() == want[name].tobytes(), (q, k, fill, name)
        for name in "qkv":
            outside = elsewhere(case, problem.inputs, name, want[name])
            assert outside.size and (outside == 0).all()


def test_starts_may_begin_late_and_end_early(kernel):
    """cu[0] > 0 and T > cu[B]: the rows outside are of no sequence."""
    case = fitted(SMALL.changed(slack=64), kernel)
    problem = make(case)
    starts = problem.inputs["cu_seqlens_q"], problem.inputs["cu_seqlens_k"]
    assert all(s[0] > 0 for s in starts) and problem.inputs["q"].shape[0] > starts[0][-1] and stored.query_positions(case) is None
    assert verdict(kernel, problem)
