"""Gradients where arithmetic is delicate: finite differences, extreme logits, NaN that must not spread, and mistakes that the
verifier must notice."""

import ctypes
import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import magnitudes
from bench.problems.case import Case
from fa_ext import reference
from fa_ext.judge.backward import judge_backward
from fa_ext.reference.backward import gradients as reference_gradients
from tests.contract import gradients, runner
from tests.contract.gradients import KERNELS, Problem, differences, fit, judged, make, placed, run, verdict

HALVES = ("float16", "bfloat16")


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = gradients.absent(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


# ---- finite differences ----


def everything(seed=0):
    """Arguments of a small float64 call with every option at once, and loss weights."""
    rng = np.random.default_rng(seed)
    b, h, hk, sq, sk, d, dv = 2, 4, 2, 4, 6, 3, 2
    arrays = dict(q=rng.standard_normal((b, h, sq, d)), k=rng.standard_normal((b, hk, sk, d)), v=rng.standard_normal((b, hk, sk, dv)),
                  bias=rng.standard_normal((1, h, sq, 1)), sinks=rng.standard_normal(h))  # fmt: skip
    mask = rng.random((b, 1, sq, sk)) < 0.7
    mask[0, 0, 1] = False
    options = dict(softcap=2.0, mask=mask, causal="bottom_right", window=(4, None), scale=0.7)
    return arrays, options, rng.standard_normal((b, h, sq, dv)), rng.standard_normal((b, h, sq))


@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_those_of_finite_differences(seed):
    arrays, options, dout, dlse = everything(seed)

    def loss():
        out, lse = reference.attention(**arrays, **options)
        return float((out * dout).sum() + (lse * dlse).sum())

    want = differences(loss, arrays)
    out, lse = fa_ext.attention(**arrays, **options, return_lse=True, kernel="cpu_ref")
    inputs = {n: arrays[n] for n in "qkv"}
    extra = dict(bias=arrays["bias"], sinks=arrays["sinks"], dlse=dlse, wrt=tuple(arrays), **options)
    by_reference = reference_gradients(dout, **inputs, **extra)
    by_kernel = fa_ext.attention_backward(dout, **inputs, out=out, lse=lse, **extra, kernel="cpu_ref_backward")
    for n, name in enumerate(arrays):
        np.testing.assert_allclose(by_reference[name], want[name], atol=1e-8, rtol=0)
        np.testing.assert_allclose(by_kernel[n], want[name], atol=1e-8, rtol=0)


def test_the_gradient_of_the_scale():
    """sum(dq * q) / scale, under softcap too."""
    arrays, options, dout, dlse = everything()
    scale = np.array([options.pop("scale")])

    def loss():
        out, lse = reference.attention(**arrays, **options, scale=float(scale[0]))
        return float((out * dout).sum() + (lse * dlse).sum())

    want = differences(loss, {"scale": scale})["scale"][0]
    found = reference_gradients(dout, **arrays, **options, dlse=dlse, scale=float(scale[0]), wrt=("q",))
    assert (found["q"] * arrays["q"]).sum() / scale[0] == pytest.approx(want, abs=1e-7)


def test_row_sums_of_ds():
    """Over all keys they are the sink's weight times delta, plus dlse; 0 without both."""
    arrays, options, dout, dlse = everything()
    exact = reference_gradients(dout, **arrays, **options, dlse=dlse, wrt=("bias",))
    out, lse = reference.attention(**arrays, **options)
    weight = np.exp(arrays["sinks"][:, None] - lse)
    delta = np.where(exact.empty, 0, (dout * out).sum(-1)) - dlse
    want = (weight * delta + dlse).sum(axis=0)[None, :, :, None]
    np.testing.assert_allclose(exact["bias"], want, atol=1e-12)


# ---- extreme logits, tiles that are not full ----


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("logit", [-120.0, -1000.0, 1000.0])
def test_padded_tiles_of_rows_with_far_logits(kernel, dim, logit):
    """exp2(0 - lse) of a padded column overflows from lse < -88.7 on, and infinity times 0 is NaN."""
    quick = kernel != "cpu_ref_backward"
    sizes = itertools.product((1, 63, 65, 127), (1, 64, 65, 100, 129)) if quick else [(1, 9), (9, 1), (11, 17), (16, 16)]
    for (sq, sk), masked, dtype in itertools.product(sizes, (False, True), ("float32", "bfloat16")):
        case = Case(1, 1, 1, sq, sk, dim, dtype=dtype, scale=1.0, mask="strided" if masked else None)
        if fit(case, kernel) != case:
            continue
        problem = make(case)
        rng = np.random.default_rng(sq * sk)
        inputs = case.host_inputs()
        inputs["q"][...] = 0.5 * rng.standard_normal(inputs["q"].shape)
        inputs["q"][..., 0] = 16
        inputs["k"][...] = rng.standard_normal(inputs["k"].shape) / 8
        inputs["k"][..., 0] = logit / 16
        if masked:
            inputs["mask"] = np.ones((1, 1, case.seq_q, case.seq_k), bool)
        out, lse = reference.attention(**inputs)
        inputs |= {"dout": problem.inputs["dout"], "dlse": problem.inputs["dlse"], "lse": lse.astype(np.float32)}
        problem = Problem(case, inputs | {"out": out.astype(inputs["q"].dtype)}, ("q", "k", "v"))
        got = run(kernel, problem)
        assert all(np.isfinite(x.astype(np.float32)).all() for x in got.values())
        if dtype == "bfloat16" and runner.listed_name(kernel) in gradients.TAKES_EVERYTHING:
            report = judged(kernel, problem, got)
            assert report, f"{case}: {report}"
            continue
        # The large column makes of each rounding of a score, or of dS where a kernel multiplies it in 16 bits, a rounding of
        # dq and dk: no bound on their largest element holds.
        tolerance = 2e-3 if dtype == "float32" else 1.6e-2
        for name in "qkv":
            truth = problem.truth[name]
            error, plain = (np.linalg.norm(x[name].astype(np.float64) - truth) for x in (got, problem.plain))
            assert error <= max(tolerance * np.linalg.norm(truth), 2 * plain) + 1e-3, f"{case}: d{name}"


@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_large_scores(kernel, kind):
    """Up to an LSE of 2^16, whose rounding the bounds know."""
    for problem in gradients.large(kernel, kind, gradients.WITHIN):
        report = verdict(kernel, problem)
        assert report, f"{problem.case}\n{report}"


@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_gradients_are_finite_at_every_magnitude(kernel, kind):
    """An LSE of float32 does not say there how many keys it is of, so that gradients are not those of the reference."""
    wrong = []
    for problem in gradients.large(kernel, kind, gradients.BEYOND):
        got = run(kernel, problem)
        wrong += [f"{problem.case}: d{name}" for name, x in got.items() if not np.isfinite(x.astype(np.float64)).all()]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:12])


@pytest.mark.parametrize("values", ["large", "dominant", "equal", "zeros", "sorted"])
def test_values_that_saturate(kernel, values):
    for dtype, causal in itertools.product((*HALVES, "float32"), (False, "bottom_right")):
        assert verdict(kernel, make(fit(Case(1, 2, 1, 37, 41, 64, dtype=dtype, values=values, causal=causal), kernel)))


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_softcap_near_saturation(kernel, dtype):
    """Scores 30 times the cap: 1 - tanh^2 is 0 there, not negative."""
    problem = make(fit(Case(1, 2, 1, 33, 49, 32, dtype=dtype, softcap=0.25, scale=1.5), kernel))
    assert verdict(kernel, problem)
    assert verdict(kernel, make(fit(Case(1, 2, 1, 33, 49, 32, dtype=dtype, softcap=8.0, values="large"), kernel)))


def test_padding_by_the_lowest_number_and_by_infinity(kernel):
    for dtype in ("bfloat16", "float32"):
        case = Case(2, 2, 2, 21, 34, 16, dtype=dtype, bias="full")
        if fit(case, kernel) != case:
            continue
        base = make(case)
        lowest = -3.3895313892515355e38 if dtype == "bfloat16" else np.finfo(np.float32).min
        for padding, shape in itertools.product((lowest, -np.inf), ((2, 1, 1, 34), (2, 2, 21, 34))):
            bias = np.random.default_rng(1).standard_normal(shape)
            bias[..., 20:] = padding
            bias[0, :, :, :5] = padding
            inputs = base.inputs | {"bias": bias.astype(base.inputs["q"].dtype)}
            out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
            inputs |= {"out": out.astype(inputs["q"].dtype), "lse": lse.astype(np.float32)}
            got = run(kernel, Problem(base.case, inputs, ("q", "k", "v", "bias")))
            assert judged(kernel, Problem(base.case, inputs, ("q", "k", "v", "bias")), got)
            assert (got["k"][:, :, 20:] == 0).all() and (got["v"][:, :, 20:] == 0).all()


def test_a_scale_of_zero_and_below(kernel):
    for scale in (0.0, -0.3):
        assert verdict(kernel, make(fit(Case(1, 2, 1, 19, 27, 16, dtype="float32", scale=scale), kernel)))


# ---- NaN that must not spread ----


def reached(kernel, problem, name, index, value=np.nan):
    """Where gradients are not finite when one element of an input is ``value``: {name: set of (b, h, position)}."""
    x = problem.inputs[name].copy()
    x[index] = value
    got = run(kernel, Problem(problem.case, problem.inputs | {name: x}, problem.wrt))
    return {n: {tuple(int(i) for i in at[:3]) for at in np.argwhere(~np.isfinite(g.astype(np.float32)))} for n, g in got.items() if n in "qkv"}


PLACES = {
    "q": (0, 1, 3, 0), "dout": (0, 1, 3, 1), "out": (0, 1, 3, 0), "lse": (0, 1, 3), "dlse": (0, 1, 3), "k": (0, 0, 4, 0),
    "v": (0, 0, 4, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_nan_of_a_pair_stays_with_what_sees_it(kernel, name):
    """On the CPU pair by pair; elsewhere it may spread within the head of k and v, and never further."""
    case = fit(Case(2, 4, 2, 9, 9, 8, dtype="float32", causal=True), kernel)
    got = reached(kernel, make(case), name, PLACES[name])
    b, head, i = (*PLACES[name][:3],)
    if name in "kv":
        seen = {"q": {(b, h, r) for h in (0, 1) for r in range(4, case.seq_q)}}
        of_head = {"q": {(b, h, r) for h in (0, 1) for r in range(case.seq_q)}, "k": {(b, 0, 4)}, "v": set()}
        if name == "k":
            of_head["v"] = {(b, 0, 4)}
        # P of the key is NaN where its k is, hence dv and dk there; NaN of v reaches dk alone.
        exact = {"q": seen["q"], "k": {(b, 0, 4)}, "v": {(b, 0, 4)} if name == "k" else set()}
    else:
        keys = {(b, head // 2, j) for j in range(i + 1)}
        exact = {"q": {(b, head, i)}, "k": keys, "v": keys}
        of_head = {"q": {(b, head, i)}} | {n: {(b, head // 2, j) for j in range(case.seq_k)} for n in "kv"}
        if name in ("out", "dlse"):  # not in P
            exact["v"], of_head["v"] = set(), set()
    if runner.device_of(kernel) == "cpu":
        assert got == exact
    else:
        for n in "qkv":
            assert exact[n] <= got[n] <= of_head[n], n


@pytest.mark.parametrize("sinks", [None, "same"])
def test_rows_without_a_key_neither_give_nor_get(kernel, sinks):
    for extra in (dict(mask="rows"), dict(causal="bottom_right"), dict(causal="top_left", window=(2, None)), dict(bias="holes")):
        case = fit(Case(2, 4, 2, 41, 17, 32, dtype="float32", sinks=sinks, **extra), kernel)
        if extra.keys() & {"mask", "bias"} and not (case.mask or case.bias):
            continue
        problem = make(case)
        empty = problem.truth.empty
        assert empty.any() and not empty.all()
        want = run(kernel, problem)
        broken = {}
        for name in ("q", "dout", "out"):
            broken[name] = problem.inputs[name].copy()
            broken[name][empty] = np.nan
        if sinks is None:
            broken["dlse"] = np.where(empty, np.float32(np.nan), problem.inputs["dlse"])
        got = run(kernel, Problem(case, problem.inputs | broken, problem.wrt))
        for name in want:
            np.testing.assert_array_equal(runner.bits(got[name]), runner.bits(want[name]), name)
        assert (got["q"][empty] == 0).all()


def test_hidden_keys_get_zeros_and_give_nothing(kernel):
    for extra in (dict(causal="top_left"), dict(window=(3, 2)), dict(causal="top_left", window=(2, None))):
        case = fit(Case(2, 4, 2, 12, 90, 16, dtype="float32", **extra), kernel)
        problem = make(case)
        want = run(kernel, problem)
        left, right, diagonal = case.band()
        keys = np.arange(case.seq_k)
        hidden = (keys < diagonal - left) | (keys >= case.seq_q + diagonal + right)
        assert hidden.any()
        broken = {n: problem.inputs[n].copy() for n in "kv"}
        for x in broken.values():
            x[:, :, hidden] = np.nan
        got = run(kernel, Problem(case, problem.inputs | broken, problem.wrt))
        for name in want:
            np.testing.assert_array_equal(runner.bits(got[name]), runner.bits(want[name]), name)
        assert (got["k"][:, :, hidden] == 0).all() and (got["v"][:, :, hidden] == 0).all()


def test_hidden_pairs_may_score_anything(kernel):
    """A masked pair whose score is infinite or NaN, with a bias of NaN under the mask."""
    case = fit(Case(1, 2, 2, 9, 13, 8, dtype="float32", mask="full", bias="full"), kernel)
    if not case.mask:
        pytest.skip(f"{kernel} takes no mask")
    problem = make(case)
    want = run(kernel, problem)
    for value in (np.nan, np.inf, 3e38 if case.dtype == "float32" else 6e4):
        bias = np.where(problem.inputs["mask"], problem.inputs["bias"], problem.inputs["bias"].dtype.type(value))
        got = run(kernel, Problem(case, problem.inputs | {"bias": bias}, problem.wrt))
        for name in want:
            np.testing.assert_array_equal(runner.bits(got[name]), runner.bits(want[name]), name)


def test_a_sink_of_minus_infinity_gives_nothing(kernel):
    case = fit(Case(2, 4, 2, 11, 13, 8, dtype="float32", sinks="same", mask="rows"), kernel)
    problem = make(case)
    inputs = problem.inputs | {"sinks": np.array([-np.inf, 0.5, -np.inf, 1.0], problem.inputs["sinks"].dtype)}
    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    inputs |= {"out": out.astype(problem.inputs["out"].dtype), "lse": lse.astype(np.float32)}
    got = run(kernel, Problem(case, inputs, problem.wrt))
    assert (got["sinks"][::2] == 0).all() and (got["sinks"][1::2] != 0).all()
    assert judged(kernel, Problem(case, inputs, problem.wrt), got)


# ---- threads ----


@pytest.mark.parametrize(
    "case, dlse",
    [
        (Case(1, 2, 1, 65, 80, 61, 58, dtype="bfloat16", bias="keys", causal="top_left", sinks="same"), True),
        (Case(1, 2, 2, 133, 133, 96, dtype="float16", causal="top_left", sinks="same", scale=0.3, seed=741954), False),
    ],
    ids=("bfloat16", "float16"),
)
def test_the_rounding_of_out_is_no_mistake_of_a_kernel(case, dlse):
    """A kernel's inputs are rounded: exact arithmetic on them is off by more than twice what plain happened to be."""
    report = verdict("cpu_ref_backward", make(case, dlse=dlse))
    assert report.passed, report


def test_bits_do_not_depend_on_the_threads(kernel):
    if runner.device_of(kernel) != "cpu":
        pytest.skip("a kernel of a device")
    problem = make(Case(2, 4, 2, 61, 83, 32, dtype="float32", bias="keys", sinks="same"))
    omp = ctypes.CDLL("libgomp.so.1")
    before = omp.omp_get_max_threads()
    found = []
    for threads in (1, 2, 5):
        omp.omp_set_num_threads(threads)
        try:
            found.append(run(kernel, problem))
        finally:
            omp.omp_set_num_threads(before)
    for name in found[0]:
        for other in found[1:]:
            np.testing.assert_array_equal(runner.bits(found[0][name]), runner.bits(other[name]), name)


# ---- mistakes that the verifier must notice ----


def emulated(problem, mistake=None):
    """Gradients in float64 from the rounded out and LSE, as a kernel finds them; or with one mistake."""
    x = {n: a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype != bool else a for n, a in problem.inputs.items()}
    q, k, v, dout, out, lse, dlse, bias = (x[n] for n in ("q", "k", "v", "dout", "out", "lse", "dlse", "bias"))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    kk, vv = (np.repeat(a, group, axis=1) for a in (k, v))
    seen = reference.visible_keys(np.arange(q.shape[2]), q.shape[2], k.shape[2], problem.case.causal)
    s = scale * np.einsum("bhid,bhjd->bhij", q, kk) + bias
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(s - lse[..., None])
        if mistake != "mask after exp":
            p = np.where(seen, p, 0)
        if mistake == "P renormalised":
            p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
        if mistake == "tail keys scored 0":
            p[..., -1] = np.exp(0 - lse)
    delta = (dout * out).sum(-1, keepdims=True)
    if mistake != "dlse left out":
        delta = delta - dlse[..., None]
    ds = p * (np.einsum("bhid,bhjd->bhij", dout, vv) - delta)
    if mistake == "dS not zeroed":
        ds = np.where(seen, ds, -delta * 1e-2)
    once = scale * (scale if mistake == "scale applied twice" else 1)
    heads = (slice(None), slice(None), slice(None))
    dk = once * np.einsum("bhij,bhid->bhjd", ds, q).reshape(q.shape[0], k.shape[1], group, *k.shape[2:])
    dv = np.einsum("bhij,bhid->bhjd", p, dout).reshape(q.shape[0], k.shape[1], group, *v.shape[2:])
    dk = dk[:, :, 0] if mistake == "dk of one head of the group" else dk.sum(2)
    dbias = ds[heads][:1].sum((0, 1), keepdims=True) if mistake == "dbias of one batch entry" else ds.sum((0, 1), keepdims=True)
    return {"q": once * np.einsum("bhij,bhjd->bhid", ds, kk), "k": dk, "v": dv.sum(2), "bias": dbias}


def mutated_problem():
    """Half of the keys under a causal bound, the global LSE of them all: nothing that is renormalised agrees."""
    case = Case(2, 4, 2, 40, 40, 16, dtype="float32", causal=True)
    problem = make(case, wrt=("q", "k", "v", "bias"))
    inputs = problem.inputs | {"bias": np.random.default_rng(4).standard_normal((1, 1, 40, 40)).astype(np.float32)}
    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    return Problem(case, inputs | {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}, problem.wrt)


MISTAKES = ("dlse left out", "scale applied twice", "dk of one head of the group", "mask after exp", "tail keys scored 0",
            "dS not zeroed", "dbias of one batch entry")  # fmt: skip


def test_the_emulation_without_a_mistake_passes():
    problem = mutated_problem()
    assert judge_backward(emulated(problem), problem.truth, problem.plain, "float32")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_verifier_notices(mistake):
    problem = mutated_problem()
    assert not judge_backward(emulated(problem, mistake), problem.truth, problem.plain, "float32")


def test_renormalised_weights_are_noticed():
    """Where a sink takes a part of each row, its keys do not sum to 1."""
    problem = mutated_problem()
    inputs = problem.inputs | {"sinks": np.full(4, 1.0, np.float32)}
    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    problem = Problem(problem.case, inputs | {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}, problem.wrt)
    assert judge_backward(emulated(problem), problem.truth, problem.plain, "float32")
    assert not judge_backward(emulated(problem, "P renormalised"), problem.truth, problem.plain, "float32")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_one_wrong_element_is_noticed(name):
    problem = mutated_problem()
    for value in (np.nan, None):
        got = emulated(problem)
        at = tuple(n // 3 for n in got[name].shape)
        got[name][at] = got[name][at] + np.abs(got[name]).max() * 1e-3 if value is None else value
        report = judge_backward(got, problem.truth, problem.plain, "float32")
        assert [g.name for g in report.gradients if g.failures] == [name]


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_of_dq():
    """Each head of dq holds what the first does: strides beyond 32 bits reach the right memory."""
    kernel = "simt_backward"
    if kernel not in KERNELS or gradients.absent(kernel) or runner.free_bytes("cupy" if runner.has("cupy") else "torch") < 30 << 30:
        pytest.skip("needs 30 GB of device memory")
    import cupy

    length, dim = (1 << 23) + 1, 256
    problem = make(Case(1, 1, 1, 64, 64, dim, dtype="float16"))
    small = placed(problem, kernel)
    want = fa_ext.attention_backward(**small, kernel=kernel, **gradients.order(kernel))[0]
    index = cupy.arange(length) % 64
    wide = {n: cupy.take(small[n], index, axis=2) for n in ("dout", "q", "out", "lse", "dlse")}
    got = fa_ext.attention_backward(**(small | wide), wrt=("q",), kernel=kernel, **gradients.order(kernel))[0]
    assert got.size > 1 << 31
    assert bool((got[:, :, -65:-1] == cupy.take(want, index[-65:-1], axis=2)).all())
    assert bool((got[:, :, :64] == want).all())
