"""fa_ext.jax.attention over sequences: values and gradients, bits of each sequence alone, transformations, sharding."""

import contextlib

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import fa_ext.jax  # noqa: E402
from fa_ext import reference  # noqa: E402
from tests.frameworks.support.jax_sequences import exact, free, index, make, own, own_arrays, own_rows, sequences  # noqa: E402
from tests.frameworks.support.jax_support import NAMES, close, on_cpu, wide  # noqa: E402
from tests.frameworks.support.sequence_calls import CALLS, DENSE, DV, HK, D, H  # noqa: E402


def attend(arrays, indices=None, options=None, **more):
    return fa_ext.jax.attention(**arrays, **(indices or {}), **(options or {}), **more, return_lse=True)


def parted(arrays):
    """(what JAX differentiates by, the others)"""
    return {n: x for n, x in arrays.items() if n in NAMES}, {n: x for n, x in arrays.items() if n not in NAMES}


def cotangents(results, seed=5):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in results)


def pulled(arrays, indices, options, **more):
    """(out, lse), their cotangents, {name: gradient}, compiled."""
    subjects, rest = parted(arrays)

    @jax.jit
    def both(subjects, rest, indices, dout, dlse):
        results, pull = jax.vjp(lambda subjects: attend(subjects | rest, indices, options, **more), subjects)
        return results, pull((dout, dlse))[0]

    given = cotangents(jax.eval_shape(lambda: attend(arrays, indices, options, **more)))
    results, found = both(subjects, rest, indices, *given)
    return results, given, found


def loss(arrays, indices=None, options=None, **more):
    """A scalar that depends on out and on the LSE of rows that see a key."""
    out, lse = attend(arrays, indices, options, **more)
    return (out * out).sum() + jax.numpy.where(jax.numpy.isfinite(lse), lse * 0.3, 0).sum()


def exact_gradients(arrays, indices, options):
    """Of ``loss``, in float64."""
    out, lse = reference.attention(**arrays, **indices, **options)
    return exact(2 * out, np.full_like(lse, 0.3), arrays, indices, options)[2]


# ---- values and gradients ----


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype, bound", [("float64", 1e-11), ("float32", 2e-5)])
def test_values_and_gradients(name, dtype, bound):
    arrays, indices, options = make(name, dtype)
    with wide() if dtype == "float64" else contextlib.nullcontext():
        (out, lse), (dout, dlse), found = pulled(arrays, indices, options)
        assert out.dtype == lse.dtype == dtype and all(found[n].shape == arrays[n].shape for n in found)
    wanted, wanted_lse, gradients = exact(dout, dlse, arrays, indices, options)
    np.testing.assert_allclose(out, wanted, atol=bound)
    np.testing.assert_allclose(lse, wanted_lse, atol=bound)
    close(found, {n: gradients[n] for n in found}, bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DENSE)
def test_the_bits_are_those_of_each_sequence_alone(name, dtype):
    """Results and gradients; bias, mask and sinks are the call's own, so their gradients are sums over sequences."""
    arrays, indices, options = make(name)
    layout = options.get("layout", "bhsd")
    alone = {n: x for n, x in options.items() if n != "layout"}
    with on_cpu():
        arrays = {n: np.asarray(jax.numpy.asarray(x, dtype)) if n in "qkv" else x for n, x in arrays.items()}
        results, (dout, dlse), found = pulled(arrays, indices, options)
        for b, of_q, of_k in sequences(name):
            mine = own_arrays(arrays, b, of_q, of_k, layout)
            subjects, rest = parted(mine)
            wanted, pull = jax.vjp(lambda s: attend(s | rest, {}, alone), subjects)  # noqa: B023
            packed = arrays["q"].ndim == 3
            (gradients,) = pull((own(dout, b, of_q, layout), own_rows(dlse, b, of_q, packed)))
            np.testing.assert_array_equal(own(results[0], b, of_q, layout), wanted[0])
            np.testing.assert_array_equal(own_rows(results[1], b, of_q, packed), wanted[1])
            for n, rows in (("q", of_q), ("k", of_k), ("v", of_k)):
                np.testing.assert_array_equal(own(found[n], b, rows, layout), gradients[n], err_msg=n)


@pytest.mark.parametrize("name", ["gaps", "padded", "bshd", "packed queries"])
def test_rows_of_no_sequence_get_zeros_whatever_they_hold(name):
    arrays, indices, options = make(name)
    empty = {"q": free(name, 0), "k": free(name, 1), "v": free(name, 1)}
    assert all(x.any() for x in empty.values())
    spoiled = {n: np.where(empty[n][..., None], np.float32(np.nan), x) if n in empty else x for n, x in arrays.items()}
    results, given, wanted = pulled(arrays, indices, options)
    again, _, found = pulled(spoiled, indices, options)
    for a, b in zip(again, results):
        np.testing.assert_array_equal(a, b)
    for n in found:
        np.testing.assert_array_equal(found[n], wanted[n], err_msg=n)
    for n, x in (("q", found["q"]), ("k", found["k"]), ("v", found["v"]), ("q", again[0])):
        assert not np.asarray(x)[empty[n]].any() and np.asarray(x).any()


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_lengths_that_change_compile_once(name):
    arrays, indices, options = make(name)
    traced = []

    @jax.jit
    def step(arrays, indices):
        traced.append(name)
        return jax.value_and_grad(loss)(arrays, indices, options)

    for others in ({}, {"cu_seqlens_q": index(0, 0, 2, 9), "cu_seqlens_k": index(1, 5, 5, 9)}, {"seqlens_q": index(1, 4, 0), "seqlens_k": index(0, 3, 6)}):
        now = {n: others.get(n, x) for n, x in indices.items()}
        close(step(arrays, now)[1], exact_gradients(arrays, now, options))
    assert len(traced) == 1


def test_gradients_through_the_lse_alone():
    arrays, indices, options = make("packed queries")
    found = jax.grad(lambda a: attend(a, indices, options)[1].sum())(arrays)
    out, lse = reference.attention(**arrays, **indices, **options)
    wanted = exact(np.zeros_like(out), np.ones_like(lse), arrays, indices, options)[2]
    close(found, {n: wanted[n] for n in arrays})
    assert not np.asarray(found["v"]).any()


def test_index_arrays_have_no_gradient():
    arrays, indices, options = make("range")
    found = jax.grad(lambda i: loss(arrays, i, options), allow_int=True)(indices)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jax.dtypes.float0}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", ["gaps", "range", "positions"])
def test_wider_indices_and_lists(name, x64):
    arrays, indices, options = make(name)
    with wide(x64):
        wanted = attend(arrays, indices, options)[0]
        for change in (lambda x: x.astype(np.int64), lambda x: x.tolist()):
            changed = {n: tuple(map(change, x)) if isinstance(x, tuple) else change(x) for n, x in indices.items()}
            np.testing.assert_array_equal(attend(arrays, changed, options)[0], wanted)


# ---- dropout ----

STATE = np.array([0x9ABCDEF0, 0x12345678, 7, 0, 0, 0, 0, 0], np.uint32)


def test_dropout_counts_within_the_sequence():
    """Each sequence draws its own part of one mask, in both passes."""
    p = 0.4
    arrays, indices, options = make("cross")
    (out, _), (dout, dlse), found = pulled(arrays, indices, options, dropout=(p, STATE))
    wanted, _, gradients = exact(dout, dlse, arrays, indices, options | {"dropout": (p, STATE)})
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    close(found, {n: gradients[n] for n in found}, 5e-5)
    keep = fa_ext.dropout_keep(4, H, 5, 5, (p, STATE))
    for b, of_q, of_k in sequences("cross"):
        unit = np.zeros((*arrays["v"].shape[:2], 5), np.float32)  # the weights themselves
        unit[of_k] = np.eye(of_k.stop - of_k.start, 5)[:, None]
        weights = own(attend(arrays | {"v": unit}, indices, options, dropout=(p, STATE))[0], b, of_q)[0]
        np.testing.assert_array_equal(weights[..., : of_k.stop - of_k.start] != 0, keep[b, :, : weights.shape[1], : of_k.stop - of_k.start])


def test_packed_is_padded():
    """The same bits, also of what a key of JAX drops."""
    lengths, room, key = (3, 0, 5, 1), 6, jax.random.key(5)
    rng = np.random.default_rng(2)
    padded = {n: rng.standard_normal((4, room, heads, 16)).astype("f4") for n, heads in zip("qkv", (4, 2, 2))}
    rows = np.concatenate([b * room + np.arange(n) for b, n in enumerate(lengths)])
    packed = {n: x.reshape(-1, *x.shape[2:])[rows] for n, x in padded.items()}
    starts, used = index(0, 3, 3, 8, 9), index(*lengths)
    for more in ({}, {"dropout": (0.4, key)}):
        one, two = (
            jax.jit(jax.value_and_grad(lambda a, i, o=o, more=more: loss(a, i, o, **more)))(a, i)
            for a, i, o in (
                (packed, {"cu_seqlens_q": starts, "cu_seqlens_k": starts}, {"causal": "bottom_right"}),
                (padded, {"seqlens_q": used, "seqlens_k": used}, {"causal": "bottom_right", "layout": "bshd"}),
            )
        )
        for n, x in two[1].items():
            np.testing.assert_array_equal(one[1][n], np.asarray(x).reshape(-1, *x.shape[2:])[rows])


# ---- transformations ----

MAPPED = [
    ("packed", ("q", "k", "v"), ()),
    ("packed", ("q",), ("cu_seqlens_q", "cu_seqlens_k")),
    ("gaps", ("k", "v"), ("seqlens_k",)),
    ("single", ("q", "k", "v", "sinks"), ("seqlens_k",)),
    ("padded", ("q", "k", "v"), ()),
    ("padded", (), ("seqlens_q", "seqlens_k")),
    ("bshd", ("q",), ("seqlens_k",)),
    ("bias", ("q", "bias"), ("seqlens_q",)),
    ("packed keys", ("q", "alibi"), ("seqlens_q",)),
]


def stacked(name, arrays_mapped, indices_mapped):
    """Three calls that differ in what is mapped."""
    arrays, indices, options = make(name)
    others = [make(name, seed=n)[0] for n in range(3)]
    changes = {"cu_seqlens_q": [[0, 3, 4, 9], [0, 0, 5, 9], [1, 2, 3, 4]], "cu_seqlens_k": [[0, 3, 4, 9], [0, 1, 1, 9], [0, 9, 9, 9]]}
    rng = np.random.default_rng(8)
    many = {n: np.stack([other[n] for other in others]) if n in arrays_mapped else x for n, x in arrays.items()}
    drawn = {n: np.array(changes[n], np.int32) if n in changes else rng.integers(0, 3, (3, *np.shape(indices[n])), np.int32) for n in indices_mapped}
    axes = {n: 0 if n in arrays_mapped else None for n in arrays}, {n: 0 if n in indices_mapped else None for n in indices}
    return many, indices | drawn, options, axes


@pytest.mark.parametrize("given", MAPPED, ids=str)
def test_vmap_of_grad_and_grad_of_vmap(given):
    arrays, indices, options, (of_arrays, of_indices) = stacked(*given)
    one = jax.grad(lambda s, rest, i: loss(s | rest, i, options))
    subjects, rest = parted(arrays)
    axes = {n: of_arrays[n] for n in subjects}, {n: of_arrays[n] for n in rest}, of_indices
    found = jax.jit(jax.vmap(one, in_axes=axes))(subjects, rest, indices)
    mapped = jax.vmap(lambda s, rest, i: loss(s | rest, i, options), in_axes=axes)
    total = jax.jit(jax.grad(lambda *a: mapped(*a).sum()))(subjects, rest, indices)
    wanted = []
    for n in range(3):
        mine = {m: x[n] if of_arrays[m] == 0 else x for m, x in arrays.items()}
        wanted.append(exact_gradients(mine, {m: x[n] if of_indices[m] == 0 else x for m, x in indices.items()}, options))
        close({m: x[n] for m, x in found.items()}, {m: wanted[n][m] for m in subjects})
    sums = {m: np.stack([x[m] for x in wanted]) for m in subjects}
    close(total, {m: x if of_arrays[m] == 0 else x.sum(0) for m, x in sums.items()}, 5e-5)


def test_padded_calls_are_mapped_by_one_call():
    arrays, indices, options, axes = stacked("padded", ("q", "k", "v"), ("seqlens_k",))
    text = jax.jit(jax.vmap(lambda a, i: loss(a, i, options), in_axes=axes)).lower(arrays, indices).as_text()
    assert text.count("@fa_ext_attention(") == 1 and "while" not in text
    assert f"tensor<9x{H}x5x{D}xf32>" in text  # three batches of three


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_scan_and_checkpoint(wrap):
    """Layer after layer over the same sequences."""
    arrays, indices, options = make("gaps")
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal((3, 10, HK, D)).astype("f4") for n in "kv"}
    x = rng.standard_normal((10, H, D)).astype("f4")

    def layer(x, kv):
        return x + attend({"q": x} | kv, indices, options)[0], None

    def total(weights, by_scan):
        if by_scan:
            return (jax.lax.scan(wrap(layer), x, weights)[0] ** 2).sum()
        y = x
        for n in range(3):
            y, _ = layer(y, {m: w[n] for m, w in weights.items()})
        return (y**2).sum()

    indices |= {"cu_seqlens_k": index(1, 5, 9), "seqlens_k": index(4, 3)}
    found, wanted = (jax.jit(jax.grad(total), static_argnums=1)(weights, by_scan) for by_scan in (True, False))
    close(found, {n: np.asarray(x) for n, x in wanted.items()}, 1e-5)


# ---- what is refused ----

PACKED = {"cu_seqlens_q": index(0, 2, 5), "cu_seqlens_k": index(0, 2, 5)}


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"cu_seqlens_q": PACKED["cu_seqlens_q"].astype("f4")}, TypeError, "cu_seqlens_q has dtype float32; accepted: int32, or int64"),
        ({"cu_seqlens_k": "abc"}, TypeError, "cu_seqlens_k has type str; accepted: an array"),
        ({"cu_seqlens_q": index(0, 5)}, ValueError, "cu_seqlens_k has 2 sequences, but cu_seqlens_q has 1"),
        ({"cu_seqlens_q": None}, ValueError, "there is no cu_seqlens_q"),
        ({"cu_seqlens_k": None}, ValueError, "k has shape (5, 2, 8) and there is no cu_seqlens_k"),
        ({"cu_seqlens_q": None, "cu_seqlens_k": None}, ValueError, "q has shape (5, 2, 8) and there is no cu_seqlens_k; accepted: 4 axes"),
        ({"seqlens_q": index(1)}, ValueError, "seqlens_q has shape (1,); accepted: (batch,) = (2,)"),
        ({"positions": index(1, 2)}, ValueError, "positions has shape (2,); accepted: (tokens,) = (5,)"),
        ({"k_range": index(0, 1)}, TypeError, "k_range has type ndarray; accepted: None or a pair (begin, end)"),
        ({"k_range": (None,)}, ValueError, "k_range has 1 items; accepted: None or a pair"),
        ({"k_range": (index(0, 0, 0), None)}, ValueError, "k_range's begin has shape (3,); accepted: (batch,) = (2,)"),
        ({"k_range": (None, index(0, 0).astype(bool))}, TypeError, "k_range's end has dtype bool; accepted: int32"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; accepted: an int >= 0"),
        ({"max_seqlen_q": True}, TypeError, "max_seqlen_q is True; accepted: an int >= 0"),
        ({"max_seqlen_q": 2.0}, TypeError, "max_seqlen_q is 2.0; accepted: an int >= 0"),
        ({"max_seqlen_q": 3, "cu_seqlens_q": None}, ValueError, "max_seqlen_q is 3, but q has shape (5, 2, 8) and there is no cu_seqlens_q"),
        ({"causal": True}, ValueError, "causal=True needs seq_q == seq_k, which the host cannot see in sequences"),
        ({"bias": np.zeros((5, 5), "f4")}, ValueError, "bias is given, but q is packed"),
        ({"page_table": index(0)}, TypeError, "unknown argument page_table"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(change, error, text):
    q = np.zeros((5, 2, 8), "f4")
    with pytest.raises(error) as raised:
        jax.jit(lambda q: fa_ext.jax.attention(q, q, q, **PACKED | change)).lower(q)
    assert text in str(raised.value)


def test_a_promise_of_the_longest_sequence():
    """It is a constant of the compiled call, which changes no bit while it is kept; there is no gradient with it."""
    q = np.random.default_rng(0).standard_normal((5, 2, 8)).astype("f4")

    def call(q, starts, most=None):
        return fa_ext.jax.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, return_lse=True)

    compiled = jax.jit(call, static_argnames="most")
    wanted = [np.asarray(x) for x in compiled(q, PACKED["cu_seqlens_q"])]
    for most in (3, np.int64(3), 4, 10**30):
        assert [np.asarray(x).tobytes() for x in compiled(q, PACKED["cu_seqlens_q"], most=most)] == [x.tobytes() for x in wanted]
    with on_cpu(), pytest.raises(Exception, match="seqlens_q of sequence 1 leads to 3"):
        jax.block_until_ready(compiled(q, PACKED["cu_seqlens_q"], most=2))
    mapped = jax.vmap(lambda q: call(q, PACKED["cu_seqlens_q"], 3)[0])(np.stack([q, 2 * q]))
    assert np.asarray(mapped[0]).tobytes() == wanted[0].tobytes()
    with pytest.raises(TypeError, match="max_seqlen_q is traced; accepted: an int that is known while tracing"):
        jax.jit(call)(q, PACKED["cu_seqlens_q"], 3)
    with pytest.raises(ValueError, match="max_seqlen_q is 3; accepted where a gradient is wanted: None"):
        jax.grad(lambda q: call(q, PACKED["cu_seqlens_q"], 3)[0].sum())(q)
    with pytest.raises(ValueError, match="max_seqlen_q is 3, but segment_ids is given"):
        x = q[None]
        fa_ext.jax.attention(x, x, x, layout="bshd", segment_ids=np.zeros((1, 5), "i4"), max_seqlen_q=3)


def test_bad_contents_are_an_error_of_the_run_on_the_cpu():
    """In the words of fa_ext.attention; the words of a compiled call reach the user."""
    with on_cpu():
        q = np.ones((5, 2, 8), "f4")
        call = jax.jit(lambda q, starts: fa_ext.jax.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts))
        with pytest.raises(Exception, match=r"fa_ext: cu_seqlens_q\[2\] is 7, which is below an earlier one, or outside the rows"):
            jax.block_until_ready(call(q, index(0, 2, 7)))
        np.testing.assert_allclose(call(q, index(0, 2, 5)), q, atol=1e-6)


def test_no_range_is_a_dense_call():
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype("f4")
    wanted = fa_ext.jax.attention(q, q, q, causal=True)
    np.testing.assert_array_equal(fa_ext.jax.attention(q, q, q, causal=True, k_range=(None, None)), wanted)


def test_kernels_that_are_named():
    arrays, indices, options = make("packed")
    with on_cpu():
        found = [jax.grad(loss)(arrays, indices, options, kernel=f, kernel_backward=b) for f, b in (("cpu_ref", "cpu_ref_backward"), (None, None))]
    close(found[0], {n: np.asarray(x) for n, x in found[1].items()})
    assert arrays["v"].shape[2] == DV
