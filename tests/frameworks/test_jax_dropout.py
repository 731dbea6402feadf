"""Dropout through the C interface and in fa_ext.jax: the mask that dropout_keep() shows, whatever is mapped or sharded."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import fa_ext.jax  # noqa: E402
from fa_ext.reference.backward import gradients as exact_gradients  # noqa: E402
from tests.frameworks.support.jax_support import alone, arrays_of, on_cpu  # noqa: E402

STATE = np.array([0x9ABCDEF0, 0x12345678, 7, 0, 0, 0, 0, 0], np.uint32)


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_the_bits_are_those_of_numpy(p):
    arrays = arrays_of(sinks=True)
    found, pull = jax.vjp(jax.jit(lambda a: fa_ext.jax.attention(**a, dropout=(p, STATE), return_lse=True)), arrays)
    wanted = fa_ext.attention(**arrays, dropout=(p, STATE), return_lse=True)
    for a, b in zip(found, wanted):
        np.testing.assert_array_equal(a, b)
    dout, dlse = np.ones_like(wanted[0]), np.full_like(wanted[1], 0.5)
    (grads,) = pull((dout, dlse))
    names = tuple(arrays)
    backward = fa_ext.attention_backward(
        dout, arrays["q"], arrays["k"], arrays["v"], *wanted, dlse=dlse, sinks=arrays["sinks"], wrt=names, dropout=(p, STATE)
    )
    for name, x in zip(names, backward):
        np.testing.assert_array_equal(grads[name], x, err_msg=name)
    exact = exact_gradients(dout, **arrays, dlse=dlse, wrt=names, dropout=(p, STATE))
    for name in names:
        np.testing.assert_allclose(grads[name], exact[name], atol=1e-4)


def test_a_key_draws_and_the_same_key_draws_the_same():
    arrays = arrays_of()
    function = jax.jit(lambda key: fa_ext.jax.attention(**arrays, dropout=(0.3, key)))
    first, second = (function(jax.random.key(n)) for n in (1, 2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, function(jax.random.key(1)))
    np.testing.assert_array_equal(first, function(jax.random.PRNGKey(1)))  # the key's raw form


def test_checkpoint_and_scan_drop_the_same():
    arrays = arrays_of()

    def loss(a, key):
        return (fa_ext.jax.attention(**a, dropout=(0.4, key)) ** 2).sum()

    key = jax.random.key(3)
    plain, again = jax.jit(jax.grad(loss))(arrays, key), jax.jit(jax.grad(jax.checkpoint(loss)))(arrays, key)
    keys = jax.random.split(key, 2)
    total = jax.jit(jax.grad(lambda a: jax.lax.scan(lambda c, k: (c + loss(a, k), None), 0.0, keys)[0]))(arrays)
    each = [jax.grad(loss)(arrays, k) for k in keys]
    for name in arrays:
        np.testing.assert_array_equal(plain[name], again[name])
        np.testing.assert_allclose(total[name], each[0][name] + each[1][name], atol=1e-4)


def test_vmap_maps_keys_or_shares_one():
    arrays = arrays_of(3)
    keys = jax.random.split(jax.random.key(5), 3)

    def one(a, key):
        return fa_ext.jax.attention(**a, dropout=(0.4, key))

    mapped, shared = jax.vmap(one)(arrays, keys), jax.vmap(one, in_axes=(0, None))(arrays, keys[0])
    for n in range(3):
        element = {name: x[n] for name, x in arrays.items()}
        np.testing.assert_array_equal(mapped[n], one(element, keys[n]))
        np.testing.assert_array_equal(shared[n], one(element, keys[0]))


def test_shards_have_their_part_of_one_mask():
    alone(
        """
import jax, numpy as np, fa_ext, fa_ext.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.frameworks.support.jax_support import arrays_of
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
state = np.array([1, 2, 3, 0, 0, 0, 0, 0], np.uint32)
arrays = arrays_of(batch=4, heads=8, heads_kv=4)
def loss(a):
    return (fa_ext.jax.attention(**a, dropout=(0.4, state)) ** 2).sum()
function = jax.jit(jax.value_and_grad(loss))
value, found = function(arrays)
for spec in (P("x", "y"), P("y"), P(None, "x"), P(("x", "y")), P(None, ("x", "y")), P(None, None, None, "x")):
    placed = {n: jax.device_put(a, NamedSharding(mesh, spec)) for n, a in arrays.items()}
    again, parts = function(placed)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    for n in arrays:
        np.testing.assert_allclose(parts[n], found[n], atol=1e-5, err_msg=str(spec))
"""
    )


@pytest.mark.parametrize(
    "dropout, error, text",
    [
        (0.5, TypeError, "dropout is float; accepted: None, (p, key) or (p, state)"),
        ((1.5, STATE), ValueError, "dropout's p is 1.5; accepted: 0 to 1"),
        ((None, STATE), TypeError, "dropout's p is None; accepted: 0 to 1"),
        ((0.5, STATE[:3]), ValueError, "dropout's key has shape (3,) and dtype uint32; accepted: one PRNG key, or a state"),
        ((0.5, STATE.astype(np.int64)), ValueError, "dropout's key has shape (8,) and dtype int64"),
        ((0.5, STATE.astype(np.float32)), ValueError, "dropout's key has shape (8,) and dtype float32"),
        ((0.5, STATE.view(np.int64)), ValueError, "dropout's key has shape (4,) and dtype int64"),
        ((0.5, STATE[:4]), ValueError, "dropout's key has shape (4,) and dtype uint32"),
        ((0.5, STATE[:2].view(np.int32)), ValueError, "dropout's key has shape (2,) and dtype int32"),
        ((0.5, None), TypeError, "dropout's key has type NoneType; accepted: one PRNG key"),
        ((0.5, 7), TypeError, "dropout's key has type int; accepted: one PRNG key"),
    ],
)
def test_bad_dropout(dropout, error, text):
    with pytest.raises(error) as raised:
        fa_ext.jax.attention(**arrays_of(), dropout=dropout)
    assert text in str(raised.value)


def test_one_typed_key_is_taken():
    for count in (2, 4, 8):
        with pytest.raises(ValueError, match=rf"dropout's key has shape \({count},\) and dtype key<fry>; accepted: one PRNG key"):
            fa_ext.jax.attention(**arrays_of(), dropout=(0.5, jax.random.split(jax.random.key(0), count)))


def test_keys_of_another_generator():
    arrays = arrays_of()
    with jax.default_prng_impl("rbg"):
        raw, typed = (fa_ext.jax.attention(**arrays, dropout=(0.3, make(1))) for make in (jax.random.PRNGKey, jax.random.key))
    np.testing.assert_array_equal(raw, typed)


def test_a_state_of_int32_is_the_same():
    found = [fa_ext.jax.attention(**arrays_of(), dropout=(0.3, state)) for state in (STATE, STATE.view(np.int32))]
    np.testing.assert_array_equal(*found)


# ---- the C interface ----


def test_the_c_interface_drops_the_same(tmp_path):
    from tests.library.support import c_interface

    if c_interface.missing_compiler():
        pytest.skip(c_interface.missing_compiler())
    client = c_interface.Client(c_interface.compiled(tmp_path, "c"))
    inputs = arrays_of()
    dropout = (0.4, 0x123456789ABCDEF0, 7, (1, 2, 3, 4), 9)
    wanted = fa_ext.attention(**inputs, dropout=dropout)
    out = np.full_like(wanted, np.nan)
    held = {**inputs, "out": out}
    arrays = [c_interface.array_of(held[n]) if n in held else None for n in c_interface.FORWARD]
    assert client.call("forward", arrays, options={"dropout": dropout}) == 0, client.said()
    np.testing.assert_array_equal(out, wanted)
    for bad, text in (((1.5, 0, 0, (0,) * 4, 0), "options.dropout is 1.5"), ((0.5, 0, 0, (0,) * 4, 1 << 31), "dropout_heads is 2147483648"),
                      ((0.5, 0, 0, (0, 9, 0, 0), 4), "dropout's heads is 4")):  # fmt: skip
        assert client.call("forward", arrays, options={"dropout": bad}) == 1
        assert text in client.said()
