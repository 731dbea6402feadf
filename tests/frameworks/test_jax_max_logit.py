"""``return_max_logit`` of ``fa_ext.jax.attention``: the largest scaled product of each head beside the other results."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fa_ext.jax  # noqa: E402
from fa_ext import reference  # noqa: E402


def dense(batch=2):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal((batch, heads, rows, 32), np.float32)) for heads, rows in ((4, 33), (2, 40), (2, 40))]


def wanted(q, k, **options):
    return reference.max_logit(np.asarray(q), np.asarray(k), **options).max(axis=0)


@pytest.mark.parametrize("lse", (False, True))
def test_results_and_gradients_are_those_of_the_call_without(lse):
    arrays = dense()

    def call(*arrays, **more):
        return fa_ext.jax.attention(*arrays, causal="bottom_right", return_lse=lse, **more)

    *made, largest = jax.jit(lambda *x: call(*x, return_max_logit=True))(*arrays)
    plain = call(*arrays)
    assert largest.shape == (4,) and largest.dtype == jnp.float32
    np.testing.assert_allclose(largest, wanted(*arrays[:2], causal="bottom_right"), rtol=1e-5)
    for x, y in zip(made, plain if lse else (plain,), strict=True):
        np.testing.assert_array_equal(x, y)

    def loss(*x, **more):
        found = call(*x, **more)
        found = found if isinstance(found, tuple) else (found,)
        return sum((y**2).sum() for y in found[: 1 + lse]) + (found[-1].sum() if more else 0)

    found = jax.jit(jax.grad(lambda *x: loss(*x, return_max_logit=True), (0, 1, 2)))(*arrays)
    for x, y in zip(found, jax.grad(loss, (0, 1, 2))(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


def test_sequences():
    rng = np.random.default_rng(4)
    q, k = (jnp.asarray(rng.standard_normal((20, heads, 32), np.float32)) for heads in (4, 2))
    starts = jnp.asarray([0, 5, 5, 20], jnp.int32)
    _, largest = fa_ext.jax.attention(q, k, k, cu_seqlens_q=starts, cu_seqlens_k=starts, return_max_logit=True)
    of = np.asarray(starts)
    np.testing.assert_allclose(largest, wanted(q, k, cu_seqlens_q=of, cu_seqlens_k=of), rtol=1e-5)
    q, k, v = dense()
    used = jnp.asarray([30, 7], jnp.int32)
    _, largest = fa_ext.jax.attention(q, k, v, seqlens_k=used, return_max_logit=True)
    np.testing.assert_allclose(largest, wanted(q, k, seqlens_k=np.asarray(used)), rtol=1e-5)


def test_vmap():
    arrays = [jnp.stack((x, 2 * x)) for x in dense()]
    _, found = jax.vmap(lambda *x: fa_ext.jax.attention(*x, return_max_logit=True))(*arrays)
    for n in range(2):
        np.testing.assert_array_equal(found[n], fa_ext.jax.attention(*(x[n] for x in arrays), return_max_logit=True)[1])


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="one device")
def test_shards_of_batch_and_heads():
    arrays = dense()
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    split = [jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))) for x in arrays]
    call = jax.jit(lambda *x: fa_ext.jax.attention(*x, return_max_logit=True))
    for x, y in zip(call(*split), call(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


def test_dropout_and_heads_without_a_pair():
    arrays = dense()
    _, found = fa_ext.jax.attention(*arrays, dropout=(0.4, jax.random.key(1)), return_max_logit=True)
    np.testing.assert_allclose(found, wanted(*arrays[:2]), rtol=1e-5)
    _, found = fa_ext.jax.attention(*arrays, mask=jnp.zeros((33, 40), bool), return_max_logit=True)
    assert (found == -jnp.inf).all()


def test_what_is_refused():
    q, k, v = dense()
    with pytest.raises(TypeError, match="return_max_logit"):
        fa_ext.jax.attention(q, k, v, return_max_logit=1)
    ids = jnp.zeros((2, 33), jnp.int32)
    with pytest.raises(ValueError, match="return_max_logit is True, but segment_ids is given"):
        fa_ext.jax.attention(q, k[:, :, :33], v[:, :, :33], segment_ids=ids, return_max_logit=True)
