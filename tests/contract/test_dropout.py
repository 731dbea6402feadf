"""Dropout: one mask, known in advance, on every kernel, shard and pass; what its argument may be."""

import ctypes
import dataclasses
import itertools
import os

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.placement import dtype_of
from fa_ext import _core, dropout_keep, reference
from fa_ext.dropout import philox
from tests.contract import gradients, runner
from tests.contract.devices import DEVICES
from tests.contract.gradients import make, run, verdict
from tests.contract.shares import some_of

FORWARD = tuple(k for k in fa_ext.kernels() if runner.takes(k, **runner.SIMPLEST.host_inputs(), dropout=(0.1, 1)))
BACKWARD = tuple(k for k in gradients.WITH_DROPOUT if k in fa_ext.kernels("backward"))
SEED = 0x123456789ABCDEF0


# ---- the mask ----


def test_philox_known_answer():
    zero = np.zeros(1, np.uint64)
    assert [int(w[0]) for w in philox(np, (zero,) * 4, (0, 0))] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("i, j, bits", [(0, 0, 44887), (0, 1, 2565), (8, 0, 45181), (1, 9, 3382), (17, 33, 14866), (1000, 100_000, 33447)])
def test_mask_known_answers(i, j, bits):
    """16 random bits of a pair are kept by the threshold that they are, and not by the next."""
    for origin, heads in (((0, 3, i, j), 4), ((1, 1, i, j), 2), ((3, 0, i, j), 1)):  # b * heads + h = 3 in each
        assert dropout_keep(1, 1, 1, 1, (bits / 65536, SEED, 7, origin, heads)).item()
        assert not dropout_keep(1, 1, 1, 1, ((bits + 1) / 65536, SEED, 7, origin, heads)).item()


def test_the_share_that_is_kept():
    for p in (0.1, 0.5, 0.9):
        kept = dropout_keep(2, 3, 200, 300, (p, 5))
        assert kept.shape == (2, 3, 200, 300) and kept.dtype == bool
        assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size)
    assert dropout_keep(1, 2, 9, 9, (0, 5)).all() and not dropout_keep(1, 2, 9, 9, (1, 5)).any()


def test_seeds_offsets_and_heads_differ():
    one = dropout_keep(2, 2, 64, 64, (0.5, 5))
    for other in (dropout_keep(2, 2, 64, 64, d) for d in ((0.5, 6), (0.5, 5 + (1 << 32)), (0.5, 5, 1))):
        assert 0.4 < (one == other).mean() < 0.6
    flat = one.reshape(4, -1)
    assert all(0.4 < (flat[a] == flat[b]).mean() < 0.6 for a, b in itertools.combinations(range(4), 2))


def test_a_shard_has_its_part_of_the_mask():
    whole = dropout_keep(4, 6, 50, 70, (0.3, SEED, 2))
    part = dropout_keep(2, 3, 20, 31, (0.3, SEED, 2, (1, 2, 17, 25), 6))
    np.testing.assert_array_equal(part, whole[1:3, 2:5, 17:37, 25:56])


def test_out_of_the_mask():
    out = np.zeros((1, 2, 5, 7), bool)
    assert dropout_keep(1, 2, 5, 7, (0.4, 1), out=out) is out
    np.testing.assert_array_equal(out, dropout_keep(1, 2, 5, 7, (0.4, 1)))
    fixed = np.broadcast_to(np.False_, out.shape)
    for other, given in ((out.view(np.int8), r"array of shape \(1, 2, 5, 7\) and dtype int8"), (fixed, "read-only array"), ([], "list")):
        with pytest.raises(ValueError, match=rf"out is a {given}.*; accepted: a writable boolean NumPy array of shape \(1, 2, 5, 7\)"):
            dropout_keep(1, 2, 5, 7, (0.4, 1), out=other)


# ---- the kernels use it ----


def there(kernel, dtype="float32"):
    """Skips where a kernel cannot run, or has no such dtype."""
    if runner.device_of(kernel) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    if not runner.has_dtype(kernel, dtype):
        pytest.skip(f"the kernel takes no {dtype}")


@pytest.fixture(params=["", "amxbf16", "avx512bf16", "avx512", "avx2", "generic"])
def isa(request):
    """Vector kernels take that instance, "": the best; skips where this CPU lacks it."""
    if request.param and not str(request.node.callspec.params.get("kernel", "cpu")).startswith("cpu"):
        pytest.skip("no kernel of vectors")
    if request.param and "cpu_simd" not in fa_ext.kernels():
        pytest.skip("this build has no cpu_simd")
    library = ctypes.CDLL(_core.__file__)
    if request.param:
        library.fa_cpu_simd_apply.restype, x = ctypes.c_bool, (ctypes.c_float * 16)()
        if not library.fa_cpu_simd_apply(request.param.encode(), b"exp2", False, x, x, ctypes.c_size_t(16)):
            pytest.skip(f"this CPU has no {request.param}")
        library.fa_cpu_simd_force(request.param.encode())
    yield request.param
    if request.param:
        library.fa_cpu_simd_force((os.environ.get("FA_EXT_CPU_ISA") or "").encode())


#: Kernels whose head_dim_v is head_dim, and what it may be at most.
WIDEST = {"wgmma_dropout_sm90": 128}
DRAWS = [(0.1, 3), (0.5, SEED, 9), (0.3, 1 << 63, 2**32 - 1, (5, 3, 77, 1001), 9)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kernel", FORWARD)
def test_identity_values_show_the_mask_of_the_forward(kernel, dtype, isa):
    """out = P w where V is the identity."""
    there(kernel, dtype)
    for drawn, (heads, heads_kv, sq, sk) in itertools.product(DRAWS, ((4, 2, 39, 113), (2, 2, 1, 239), (3, 1, 65, 17))):
        widest, width, head_dim, rng = WIDEST.get(runner.listed_name(kernel)), sk, 16, np.random.default_rng(sk)
        if widest:
            sk = min(sk, widest)
            width = head_dim = -(-sk // 8) * 8
        q, k = (rng.standard_normal((2, h, s, head_dim)).astype(dtype_of(dtype)) / 4 for h, s in ((heads, sq), (heads_kv, sk)))
        v = np.ascontiguousarray(np.broadcast_to(np.eye(sk, width, dtype=dtype_of(dtype)), (2, heads_kv, sk, width)))
        out = runner.attention(kernel, q.astype(v.dtype), k.astype(v.dtype), v, dropout=drawn)
        np.testing.assert_array_equal(out[..., :sk] != 0, dropout_keep(2, heads, sq, sk, drawn))


def runs(kernel, dtype):
    """Skips where a backward kernel cannot run, or has no such dtype."""
    if reason := gradients.absent(kernel):
        pytest.skip(reason)
    if dtype not in gradients.dtypes(kernel):
        pytest.skip(f"{kernel} does not take {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernel", BACKWARD)
def test_identity_dout_shows_the_mask_of_the_backward(kernel, dtype, isa):
    """dv = (P w)^T where dout is the identity."""
    runs(kernel, dtype)
    aligned = (0.3, 1 << 63, 2**32 - 1, (5, 3, 80, 4096), 9)  # with the 16 x 16 pairs that calls of the generator serve
    for drawn, (sq, sk) in itertools.product((*DRAWS, aligned), ((39, 140), (1, 17), (130, 3))):
        rng = np.random.default_rng(sk)
        q, k, v = (rng.standard_normal((2, 3, s, d)).astype(dtype) / 4 for s, d in ((sq, 16), (sk, 16), (sk, sq)))
        out, lse = reference.attention(q, k, v, dropout=drawn)
        dout = np.broadcast_to(np.eye(sq, dtype=dtype), out.shape)
        inputs = dict(dout=dout, q=q, k=k, v=v, out=out.astype(dtype), lse=lse.astype(np.float32), dropout=drawn)
        case = Case(2, 3, 3, sq, sk, 16, sq, dtype=dtype)
        dv = run(kernel, gradients.Problem(case, inputs, ("v",)))["v"]
        np.testing.assert_array_equal(dv != 0, dropout_keep(2, 3, sq, sk, drawn).swapaxes(2, 3))


CASES = [
    Case(2, 4, 2, 61, 113, 32, dtype="float32", causal="bottom_right", sinks="same"),
    Case(1, 2, 2, 130, 239, 24, 40, dtype="float16", mask="rows", bias="full", layout="bshd"),
    Case(1, 8, 1, 17, 511, 64, dtype="bfloat16", window=(40, 9), softcap=5.0, causal="bottom_right", alibi="heads"),
    Case(2, 3, 3, 37, 41, 16, dtype="float64", bias="holes", sinks="same"),
    Case(1, 2, 1, 1, 799, 64, dtype="float32"),
    Case(2, 4, 2, 161, 313, 64, dtype="bfloat16", causal="bottom_right", sinks="same"),
    Case(1, 2, 2, 230, 239, 56, dtype="float16", window=(90, 20), layout="bshd"),
    Case(1, 2, 1, 140, 300, 104, dtype="bfloat16"),
]
PROBABILITIES = (0, 1 / 65536, 0.1, 0.5, 1)


@pytest.mark.parametrize("case", some_of(CASES, 2), ids=str)
@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(kernel, case, isa):
    there(kernel, case.dtype)
    if not cases.must_accept(runner.listed_name(kernel), case):
        pytest.skip("the kernel may refuse it")
    for p in PROBABILITIES:
        report = fa_ext.verify(**runner.on(kernel, case.host_inputs()), dropout=(p, SEED, 3), kernel=kernel)
        assert report, f"p = {p}: {report}"


def dropped(case, dropout, **extra):
    """A problem of the backward pass with dropout, and out and LSE that belong to it."""
    problem = make(case, **extra)
    inputs = problem.inputs | {"dropout": dropout}
    out, lse = reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    inputs |= {"out": out.astype(inputs["out"].dtype), "lse": lse.astype(inputs["lse"].dtype)}
    return gradients.Problem(case, inputs, problem.wrt)


@pytest.mark.parametrize("case", some_of(CASES), ids=str)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward(kernel, case, isa):
    runs(kernel, case.dtype)
    for p in PROBABILITIES:
        report = verdict(kernel, dropped(case, (p, SEED, 3)))
        assert report, f"p = {p}: {report}"


def test_all_weights_dropped():
    """p = 1: out is 0, the LSE as ever, and gradients are those of dlse alone."""
    case = Case(1, 2, 1, 33, 47, 16, dtype="float32", sinks="same")
    half = Case(1, 2, 1, 33, 47, 16, dtype="float16", sinks="same")
    for kernel in FORWARD:
        if runner.device_of(kernel) == "cuda" and runner.no_device():
            continue
        inputs = dataclasses.replace(case, dtype=runner.narrowest(kernel)).host_inputs()
        out, lse = runner.attention(kernel, **inputs, dropout=(1, 3), return_lse=True)
        assert (out == 0).all()
        rtol = 1e-6 if runner.has_dtype(kernel, "float32") else 1e-4  # where another instance has no dropout
        np.testing.assert_allclose(lse, runner.attention(kernel, **inputs, return_lse=True)[1], rtol=rtol)
    for kernel, of in itertools.product(BACKWARD, (case, half)):
        if gradients.absent(kernel) or of.dtype not in gradients.dtypes(kernel):
            continue
        problem, alone = dropped(of, (1, 3)), make(of, dout="none")
        got, want = run(kernel, problem), run(kernel, alone)
        for name in want:
            rtol, atol = (2e-5, 1e-6) if of is case else (2e-3, 1e-6)
            np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol)


def test_finite_differences():
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal(s) for n, s in (("q", (1, 2, 4, 3)), ("k", (1, 1, 6, 3)), ("v", (1, 1, 6, 2)), ("sinks", (2,)))}
    options = dict(causal="bottom_right", softcap=2.0, dropout=(0.4, 11))
    dout = rng.standard_normal((1, 2, 4, 2))

    def loss():
        return float((reference.attention(**x, **options)[0] * dout).sum())

    out, lse = fa_ext.attention(**x, **options, return_lse=True)
    for kernel in BACKWARD:
        if "float64" not in gradients.dtypes(kernel):
            continue
        found = fa_ext.attention_backward(dout, **x, out=out, lse=lse, **options, wrt=tuple(x), kernel=kernel)
        for gradient, (name, values) in zip(found, x.items(), strict=True):
            for index in np.ndindex(values.shape):
                kept = values[index]
                values[index] = kept + 1e-5
                above = loss()
                values[index] = kept - 1e-5
                assert gradient[index] == pytest.approx((above - loss()) / 2e-5, abs=1e-8), name
                values[index] = kept


@pytest.mark.parametrize("kernel", FORWARD)
def test_shards_of_a_call(kernel):
    """Batch entries, heads and queries apart give the bits of the whole."""
    there(kernel, runner.narrowest(kernel))
    case = Case(3, 4, 2, 75, 90, 32, dtype=runner.narrowest(kernel))
    x = case.host_inputs()
    whole = runner.attention(kernel, **x, dropout=(0.2, 8, 1))
    for b, hk, i in ((0, 1, 0), (2, 0, 33)):
        q, k, v = x["q"][b : b + 1, 2 * hk : 2 * hk + 2, i : i + 40], x["k"][b : b + 1, hk : hk + 1], x["v"][b : b + 1, hk : hk + 1]
        part = runner.attention(kernel, q, k, v, dropout=(0.2, 8, 1, (b, 2 * hk, i, 0), 4))
        np.testing.assert_array_equal(runner.bits(part), runner.bits(whole[b : b + 1, 2 * hk : 2 * hk + 2, i : i + 40]))


@pytest.mark.parametrize("form", ["uint32", "int32", "int64", "strided"])
def test_a_state_array_is_read_at_each_call(form):
    x = Case(1, 2, 2, 19, 23, 16, dtype="float32").host_inputs()
    words = np.array([SEED & 0xFFFFFFFF, SEED >> 32, 7, 0, 1, 2, 3, 5], np.uint32)
    state = words if form == "strided" else words.view(form)
    if form == "strided":
        state = np.zeros(16, np.uint32)[::2]
        state[:] = words
    same = (0.3, SEED, 7, (0, 1, 2, 3), 5)
    for _ in range(2):
        np.testing.assert_array_equal(fa_ext.attention(**x, dropout=(0.3, state)), fa_ext.attention(**x, dropout=same))
        assert fa_ext.verify(**x, dropout=(0.3, state))
    state[0 if form != "int64" else 1] += 1
    assert (fa_ext.attention(**x, dropout=(0.3, state)) != fa_ext.attention(**x, dropout=same)).any()
    words = np.zeros(8, np.uint32)  # heads 0: those of the call
    np.testing.assert_array_equal(fa_ext.attention(**x, dropout=(0.3, words)), fa_ext.attention(**x, dropout=(0.3, 0)))


def test_an_int_in_an_array_without_axes_is_a_seed():
    x = Case(1, 2, 2, 19, 23, 16, dtype="float32").host_inputs()
    for seed in (np.array(5), np.int64(5), np.uint8(5)):
        assert fa_ext.verify(**x, dropout=(0.3, seed))
        np.testing.assert_array_equal(fa_ext.attention(**x, dropout=(0.3, seed)), fa_ext.attention(**x, dropout=[0.3, 5]))


@pytest.mark.gpu
def test_a_state_on_another_device_than_q():
    x = Case(1, 2, 2, 9, 11, 8, dtype="float32").host_inputs()
    out = np.full(x["q"].shape, np.nan, np.float32)
    state, lse = fa_ext.to_device(np.zeros(8, np.uint32)), np.zeros((1, 2, 9), np.float32)
    for call in (lambda: fa_ext.attention(**x, dropout=(0.1, state), out=out),
                 lambda: fa_ext.explain(**x, dropout=(0.1, state)),
                 lambda: fa_ext.explain_backward(x["q"], **x, out=x["q"], lse=lse, dropout=(0.1, state)),
                 lambda: fa_ext.attention_backward(x["q"], **x, out=x["q"], lse=lse, dropout=(0.1, state))):  # fmt: skip
        with pytest.raises(ValueError, match="dropout's state is on CUDA device 0, but q is on the CPU"):
            call()
    assert np.isnan(out).all()
    q, k, v = (fa_ext.to_device(x[n]) for n in "qkv")  # a state on the host is read there
    np.testing.assert_array_equal(*(fa_ext.to_numpy(fa_ext.attention(q, k, v, dropout=(0.1, d))) for d in (0, np.zeros(8, np.uint32))))


@pytest.mark.parametrize("form", ["uint32", "int32", "int64"])
def test_explain_with_a_state_on_the_device(form):
    """Kernels answer as for a seed."""
    case = dataclasses.replace(runner.SIMPLEST, dtype="float16")
    x, h200 = case.host_inputs(), DEVICES["h200"]
    state = np.zeros(8, np.uint32).view(form)
    asked = [fa_ext.explain(**x, dropout=(0.1, drawn), device=h200) for drawn in (3, state)]
    assert asked[0] == asked[1] and asked[0][0] == ("wgmma_dropout_sm90" if "wgmma_dropout_sm90" in FORWARD else None)
    problem = make(case).inputs
    asked = [fa_ext.explain_backward(**problem, dropout=(0.1, drawn), device=h200) for drawn in (3, state)]
    assert asked[0] == asked[1] and asked[0][0] == ("wgmma_dropout_backward_sm90" if "wgmma_dropout_backward_sm90" in BACKWARD else None)
    with pytest.raises(ValueError, match=r"dropout's state has strides \(2,\); accepted on a device: contiguous words"):
        fa_ext.explain(**x, dropout=(0.1, np.zeros(16, np.uint32)[::2]), device=h200)


def test_nothing_is_written_over_the_state():
    x = Case(1, 2, 2, 9, 11, 8, dtype="float32").host_inputs()
    out = np.zeros(x["q"].shape, np.float32)
    state = out.reshape(-1)[8:16].view(np.int32)
    with pytest.raises(ValueError, match="out overlaps dropout's state in memory"):
        fa_ext.attention(**x, dropout=(0.1, state), out=out)
    with pytest.raises(ValueError, match=r'grads\["q"\] overlaps dropout\'s state in memory'):
        fa_ext.attention_backward(x["q"], **x, out=x["q"], lse=np.zeros((1, 2, 9), np.float32), dropout=(0.1, state), grads=(out, None, None))
    assert not out.any()


def test_the_items_outlive_a_list_that_the_caller_drops():
    x = Case(1, 2, 2, 19, 23, 16, dtype="float32").host_inputs()

    class Drops(float):
        def __float__(self):
            given.clear()
            return 0.3

    given = [Drops(0.3), np.array([5, 0, 0, 0, 0, 0, 0, 0], np.uint32)]
    np.testing.assert_array_equal(fa_ext.attention(**x, dropout=given), fa_ext.attention(**x, dropout=(0.3, 5)))


def on_gpu(kernel):
    if runner.device_of(kernel) == "cpu":
        pytest.skip("no kernel of a device")
    there(kernel, runner.narrowest(kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["uint32", "int32", "int64"])
@pytest.mark.parametrize("kernel", FORWARD)
def test_a_state_on_the_gpu(kernel, form):
    """Kernels find there what they get as seed, offset, origin and heads; 0 for heads is the call's."""
    on_gpu(kernel)
    x = runner.on(kernel, Case(2, 4, 2, 75, 90, 40, dtype=runner.narrowest(kernel)).host_inputs())
    for origin, heads in (((1, 2, 16, 32), 9), ((0, 1, 3, 5), 5), ((0, 0, 0, 0), 0)):
        words = np.array([SEED & 0xFFFFFFFF, SEED >> 32, 7, *origin, heads], np.uint32)
        state = fa_ext.to_device(words.view(form))
        want = runner.attention(kernel, **x, dropout=(0.3, SEED, 7, origin, heads or 4))
        np.testing.assert_array_equal(runner.bits(runner.attention(kernel, **x, dropout=(0.3, state))), runner.bits(want))
        assert fa_ext.verify(**x, dropout=(0.3, state), kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", BACKWARD)
def test_a_state_on_the_gpu_in_the_backward(kernel):
    if kernel.startswith("cpu"):
        pytest.skip("no kernel of a device")
    runs(kernel, "float16")
    case = Case(2, 4, 2, 70, 133, 64, dtype="float16", causal="bottom_right", bias="keys", sinks="same")
    for origin, heads in (((1, 2, 16, 32), 9), ((0, 1, 3, 5), 5)):
        problem = dropped(case, (0.3, SEED, 7, origin, heads))
        words = np.array([SEED & 0xFFFFFFFF, SEED >> 32, 7, *origin, heads], np.uint32)
        want = run(kernel, problem)
        problem.inputs["dropout"] = (0.3, fa_ext.to_device(words))
        for name, found in run(kernel, problem).items():
            np.testing.assert_array_equal(runner.bits(found), runner.bits(want[name]), err_msg=name)


def test_calls_in_a_row_do_not_share_a_mask():
    """A thread's memory of its last call includes the dropout."""
    x = Case(1, 2, 2, 19, 23, 16, dtype="float32").host_inputs()
    found = [fa_ext.attention(**x, dropout=d) for d in (None, (0.5, 1), (0.5, 2), (0.5, 1), (0.25, 1), None)]
    np.testing.assert_array_equal(found[0], found[5])
    np.testing.assert_array_equal(found[1], found[3])
    assert all((found[a] != found[b]).any() for a, b in ((0, 1), (1, 2), (1, 4)))


# ---- what it may be ----


BAD = [
    (0.1, TypeError, "accepted: None, (p, seed)"), ((0.1,), ValueError, "accepted: None, (p, seed)"),
    ((0.1, 1, 2, 3), ValueError, "accepted: None, (p, seed)"), ((-0.1, 1), ValueError, "dropout's p is"),
    ((1.5, 1), ValueError, "dropout's p is"), ((float("nan"), 1), ValueError, "dropout's p is"), (("x", 1), TypeError, "dropout's p"),
    ((True, 1), TypeError, "dropout's p"), ((0.1, -1), ValueError, "dropout's seed is -1"), ((0.1, 1 << 64), ValueError, "dropout's seed"),
    ((0.1, 1.5), TypeError, "dropout's seed"), ((0.1, True), TypeError, "dropout's seed"), ((0.1, 1, -1), ValueError, "dropout's offset"),
    ((0.1, 1, 1 << 32), ValueError, "dropout's offset"), ((0.1, 1, 2, (0, 0, 0), 4), ValueError, "dropout's origin"),
    ((0.1, 1, 2, (0, 0, -1, 0), 4), ValueError, "dropout's origin[2]"), ((0.1, 1, 2, (0, 3, 0, 0), 4), ValueError, "dropout's heads is 4"),
    ((0.1, 1, 2, (0, 0, 0, 0), 0), ValueError, "dropout's heads is 0"), ((0.1, 1, 2, (0, 0, 2**31 - 1, 0), 4), ValueError, "dropout's origin[2]"),
    ((0.1, np.zeros(7, np.uint32)), ValueError, "dropout's state"), ((0.1, np.zeros(8, np.float32)), ValueError, "dropout's state"),
    ((0.1, np.zeros(8, np.int64)), ValueError, "dropout's state"), ((0.1, np.zeros((2, 4), np.int32)), ValueError, "dropout's state"),
]  # fmt: skip


@pytest.mark.parametrize("dropout, error, words", BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_values_name_the_field(dropout, error, words):
    x = Case(1, 2, 2, 9, 11, 8, dtype="float32").host_inputs()
    out = np.full(x["q"].shape, np.nan, np.float32)
    calls = [lambda: fa_ext.attention(**x, dropout=dropout, out=out), lambda: dropout_keep(1, 2, 9, 11, dropout),
             lambda: reference.attention(**x, dropout=dropout),
             lambda: fa_ext.attention_backward(x["q"], **x, out=x["q"], lse=np.zeros((1, 2, 9), np.float32), dropout=dropout)]  # fmt: skip
    for call in calls:
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)
    assert np.isnan(out).all()


def test_bad_values_of_the_mask():
    for arguments, error, words in (
        (dict(dropout=None), TypeError, "dropout is None"), (dict(seq_q=-1), ValueError, "seq_q"), (dict(batch=1.5), TypeError, "batch"),
        (dict(out=np.zeros((1, 1, 1, 1), bool)), ValueError, "out"), (dict(device=0), fa_ext.UnsupportedError, "device"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            dropout_keep(**{**dict(batch=1, heads=2, seq_q=3, seq_k=4, dropout=(0.1, 1)), **arguments})


@runner.needs_every_instance
def test_which_kernels_on_a_device_take_it():
    found = _core.answers(**dataclasses.replace(runner.SIMPLEST, dtype="float16").host_inputs(), dropout=(0.1, 1), device=DEVICES["h200"])
    of_device = {kernel: answer[:2] for kernel, answer in found.items() if runner.device_of(kernel) == "cuda"}
    for kernel, answer in of_device.items():
        assert answer == (("takes", "") if kernel in ("wgmma_dropout_sm90", "mma_sm80", "simt") else ("refuses", "takes no dropout")), kernel
