"""segment_ids of fa_ext.jax.attention: documents in rows, against a mask in float64 and against packed sequences."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import fa_ext.jax  # noqa: E402
from tests.frameworks.support.jax_support import alone, arrays_of, close, exact, loss, wide  # noqa: E402

#: Rows of ids: sorted, with one that comes back, all the same, all different.
IDS = np.array([[1, 1, 1, 2, 2, 3, 3], [5, 0, 0, 5, 5, 5, 0], [4] * 7, [-3, -2, -1, 0, 1, 2, 3]], np.int32)
OPTIONS = [
    dict(layout="bshd", causal=True),
    dict(layout="bhsd", causal=True, window=(2, None)),
    dict(layout="bshd", causal="top_left", scale=0.4),
    dict(layout="bhsd", softcap=0.7),
]


def runs(ids):
    """(B, S): the number of each row's document."""
    first = np.ones(ids.shape, bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.cumsum(first).reshape(ids.shape)


def same(ids):
    """The mask that ids stand for."""
    number = runs(ids)
    return (number[:, :, None] == number[:, None, :])[:, None]


def drawn(*lead, batch=4, **given):
    return arrays_of(*lead, batch=batch, queries=7, keys=7, **given)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_documents_are_a_mask(options):
    arrays = drawn(sinks=True, alibi=(4,), layout=options["layout"])
    value, found = jax.jit(jax.value_and_grad(lambda a: loss(a, segment_ids=IDS, **options)))(arrays)
    wanted = exact(arrays | {"mask": same(IDS)}, **options)
    close(found, wanted[1])
    np.testing.assert_allclose(float(value), wanted[0], rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 7), (28,), (0, 5), (3, 0)], ids=str)
def test_starts_are_those_of_the_core(shape):
    ids = np.resize(IDS, shape) if 0 not in shape else np.zeros(shape, np.int32)
    for count in (None, 3, 50):
        wanted = fa_ext.documents(ids, count=count, check=False)
        found = jax.jit(lambda x: fa_ext.jax.documents(x, count=count))(ids)  # noqa: B023
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("ids", "count", "error", "text"), [
    (np.zeros(3, "f4"), None, TypeError, "ids has dtype float32; accepted: integers"),
    (np.zeros((1, 2, 3), "i4"), None, ValueError, "ids has shape (1, 2, 3); accepted: (batch, sequence) or (sequence,)"),
    (np.zeros(3, "i4"), 0, ValueError, "count is 0, out of range"),
    (np.zeros(3, "i4"), 2.0, TypeError, "count has type float"),
    (np.zeros(3, "i4"), True, TypeError, "count has type bool"),
])  # fmt: skip
def test_bad_documents(ids, count, error, text):
    with pytest.raises(error) as raised:
        fa_ext.jax.documents(ids, count=count)
    assert text in str(raised.value)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_segments_are_a_mask(options):
    """Ids that come back are one document there, and queries have ids of their own."""
    arrays, q_ids = drawn(sinks=True, alibi=(4,), layout=options["layout"]), IDS[::-1] % 4
    call = jax.jit(jax.value_and_grad(lambda a, ids: loss(a, segments=ids, **options)))
    value, found = call(arrays, (q_ids, IDS))
    wanted = exact(arrays | {"mask": (q_ids[:, :, None] == IDS[:, None, :])[:, None]}, **options)
    close(found, wanted[1])
    np.testing.assert_allclose(float(value), wanted[0], rtol=1e-5)


def test_segments_under_vmap():
    arrays = drawn(2)
    ids = np.stack([IDS, IDS[::-1]])
    found = jax.vmap(lambda a, x: fa_ext.jax.attention(**a, segments=(x, x)))(arrays, ids)
    for n in range(2):
        alone = fa_ext.jax.attention(**{name: x[n] for name, x in arrays.items()}, segments=(ids[n], ids[n]))
        np.testing.assert_array_equal(found[n], alone)


@pytest.mark.parametrize("ids", [(IDS, IDS), IDS.astype(np.int64), IDS.astype(np.uint8), IDS.tolist()], ids=["pair", "int64", "uint8", "list"])
def test_ids_of_any_kind(ids):
    arrays = drawn()
    np.testing.assert_array_equal(fa_ext.jax.attention(**arrays, segment_ids=ids), fa_ext.jax.attention(**arrays, segment_ids=IDS))


def test_in_64_bits():
    with wide():
        arrays = {n: x.astype(np.float64) for n, x in drawn().items()}
        found = jax.grad(lambda a: loss(a, segment_ids=IDS, causal=True))(arrays)
    close(found, exact(arrays | {"mask": same(IDS)}, causal=True)[1], 1e-11)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_documents_are_packed_sequences(p):
    """The same bits; dropout counts documents, in the order of rows."""
    state = np.array([1, 2, 3, 0, 0, 0, 0, 0], np.uint32)
    more = {"dropout": (p, state)} if p else {}
    arrays = drawn(layout="bshd")
    starts = np.append(np.flatnonzero(np.diff(runs(IDS).reshape(-1), prepend=0)), IDS.size).astype(np.int32)
    packed = {n: x.reshape(-1, *x.shape[2:]) for n, x in arrays.items()}
    sequences = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right", **more)
    out, lse = fa_ext.jax.attention(**arrays, segment_ids=IDS, causal=True, layout="bshd", return_lse=True, **more)
    wanted, wanted_lse = fa_ext.jax.attention(**packed, return_lse=True, **sequences)
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)
    np.testing.assert_array_equal(lse.swapaxes(0, 1).reshape(wanted_lse.shape), wanted_lse)
    found = jax.grad(lambda a: loss(a, segment_ids=IDS, causal=True, layout="bshd", **more))(arrays)
    for n, x in jax.grad(lambda a: loss(a, **sequences))(packed).items():
        np.testing.assert_array_equal(found[n].reshape(x.shape), x, err_msg=n)


def test_promotes_no_ranks():
    with jax.numpy_rank_promotion("raise"):
        arrays = drawn(layout="bshd", sinks=True)
        found = jax.jit(jax.grad(lambda a: loss(a, segment_ids=IDS, layout="bshd")))(arrays)
    close(found, exact(arrays | {"mask": same(IDS)}, layout="bshd")[1])


def test_ids_that_change_compile_once():
    arrays, traced = drawn(), []

    @jax.jit
    def step(arrays, ids):
        traced.append(ids)
        return jax.grad(lambda a: loss(a, segment_ids=ids, causal=True))(arrays)

    for ids in (IDS, IDS[::-1].copy(), np.zeros_like(IDS)):
        close(step(arrays, ids), exact(arrays | {"mask": same(ids)}, causal=True)[1])
    assert len(traced) == 1


@pytest.mark.parametrize("of_ids", [0, None])
def test_vmap(of_ids):
    """One call, whose batch is the mapped axis and the batch."""
    arrays = drawn(3)
    ids = np.stack([IDS, IDS[::-1], IDS * 0]) if of_ids == 0 else IDS
    call = jax.jit(jax.vmap(jax.grad(lambda a, ids: loss(a, segment_ids=ids, causal=True)), in_axes=(0, of_ids)))
    found = call(arrays, ids)
    for n in range(3):
        mine = {m: x[n] for m, x in arrays.items()} | {"mask": same(ids[n] if of_ids == 0 else ids)}
        close({m: x[n] for m, x in found.items()}, exact(mine, causal=True)[1])
    assert call.lower(arrays, ids).as_text().count("@fa_ext_attention_backward(") == 1


def test_scan_and_checkpoint():
    arrays = drawn(3)

    def total(arrays, wrap):
        def step(carry, one):
            return carry + wrap(lambda a: loss(a, segment_ids=IDS, causal=True))(one), None

        return jax.lax.scan(step, 0.0, arrays)[0]

    for wrap in (lambda f: f, jax.checkpoint):
        found = jax.jit(jax.grad(lambda a: total(a, wrap)))(arrays)  # noqa: B023
        for n in range(3):
            wanted = exact({m: x[n] for m, x in arrays.items()} | {"mask": same(IDS)}, causal=True)[1]
            close({m: x[n] for m, x in found.items()}, wanted)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0), (1, 1)])
def test_sizes_of_little(shape):
    q = np.ones((*shape, 4, 8), np.float32)
    out, lse = fa_ext.jax.attention(q, q, q, segment_ids=np.zeros(shape, np.int32), layout="bshd", return_lse=True)
    assert out.shape == q.shape and lse.shape == (shape[0], 4, shape[1])
    np.testing.assert_array_equal(out, q)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(segment_ids=None, segments=IDS), TypeError, "segments has type ndarray; accepted: None or a pair of arrays"),
        (dict(segment_ids=None, segments=(IDS, None)), TypeError, "segments has an item of None"),
        (dict(segment_ids=None, segments=(IDS, IDS * 1.0)), TypeError, "segments' k_ids has dtype float"),
        (dict(segment_ids=None, segments=(IDS, IDS[:, 1:])), ValueError, "segments' k_ids has shape (4, 6)"),
        (dict(segment_ids=(IDS, IDS.copy())), ValueError, "segment_ids is a tuple; accepted: an array, (batch, sequence), or a pair"),
        (dict(segment_ids=IDS * 1.0), TypeError, "segment_ids has dtype float"),
        (dict(segment_ids=IDS[:2]), ValueError, "segment_ids has shape (2, 7), and q (4, 4, 7, 8); accepted: (batch, sequence)"),
        (dict(layout="bshd"), ValueError, "segment_ids has shape (4, 7), and q (4, 4, 7, 8)"),
        (dict(k=np.zeros((4, 2, 9, 8), "f4"), v=np.zeros((4, 2, 9, 8), "f4")), ValueError, "and k (4, 2, 9, 8)"),
        (dict(mask=np.ones((7, 7), bool)), ValueError, "mask is given beside segment_ids; accepted with segment_ids: sinks"),
        (dict(bias=np.ones((7, 7), "f4")), ValueError, "bias is given beside segment_ids"),
        (dict(seqlens_k=np.ones(4, "i4")), ValueError, "seqlens_k is given beside segment_ids"),
        (dict(k_range=(None, np.ones(4, "i4"))), ValueError, "k_range is given beside segment_ids"),
        (dict(alibi=np.ones((4, 4), "f4")), ValueError, "alibi has shape (4, 4); accepted with segment_ids: (heads,)"),
    ],
)
def test_bad_arguments_are_refused_while_tracing(change, error, text):
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda: fa_ext.jax.attention(**drawn() | {"segment_ids": IDS} | change))
    assert text in str(raised.value)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import fa_ext.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.frameworks.support.jax_support import close, exact, loss
from tests.frameworks.test_jax_documents import IDS, drawn, same

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
options = dict(causal=True, layout="bshd")
arrays = drawn(layout="bshd", sinks=True)
wanted = exact(arrays | {"mask": same(IDS)}, **options)[1]
specs = dict.fromkeys("qkv", P("x", None, "y")) | {"sinks": P("y")}

def placed(mesh):
    return {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}, jax.device_put(IDS, NamedSharding(mesh, P("x")))

gradient = jax.grad(lambda a, ids: loss(a, segment_ids=ids, **options))
"""


@pytest.mark.parametrize(
    "script",
    [
        """
compiled = jax.jit(gradient).lower(*placed(MESH)).compile()
close(compiled(*placed(MESH)), wanted, 5e-5)
assert "all-gather" not in compiled.as_text()
""",
        """
state = np.array([1, 2, 3, 0, 0, 0, 0, 0], np.uint32)
drop = jax.jit(jax.grad(lambda a, ids: loss(a, segment_ids=ids, dropout=(0.4, state), **options)))
close(drop(*placed(MESH)), {n: np.asarray(x) for n, x in drop(arrays, IDS).items()}, 1e-5)
""",
        """
if hasattr(jax, "shard_map"):
    total = jax.shard_map(lambda a, ids: jax.lax.psum(loss(a, segment_ids=ids, **options), ("x", "y")), mesh=MESH, in_specs=(specs, P("x")), out_specs=P())
    close(jax.jit(jax.grad(total))(*placed(MESH)), wanted, 5e-5)
""",
        """
if hasattr(jax, "set_mesh") and hasattr(jax.sharding, "auto_axes"):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        given = placed(mesh)
        for found in (gradient(*given), jax.jit(gradient)(*given)):
            close(found, wanted, 5e-5)
            assert all(x.sharding.is_equivalent_to(given[0][n].sharding, x.ndim) for n, x in found.items())
        assert "all-gather" not in jax.jit(gradient).lower(*given).compile().as_text()
""",
    ],
    ids=["sharded jit", "dropout", "shard_map", "explicit axes"],
)
def test_batch_and_heads_run_on_their_shards(script):
    """Documents end with their row, so that devices share none."""
    alone(SHARDED + script)
