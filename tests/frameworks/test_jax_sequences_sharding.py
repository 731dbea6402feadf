"""fa_ext.jax.attention over sequences on several devices: sharded jit, explicit axes and shard_map. The CPU counts as four devices,
in processes of their own."""

import pytest

pytest.importorskip("jax")

from tests.frameworks.support.jax_support import alone  # noqa: E402

COMMON = """
import itertools
import jax, jax.numpy as jnp, numpy as np
import fa_ext.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.frameworks.support.jax_sequences import exact, make
from tests.frameworks.support.jax_support import NAMES, close
from fa_ext import reference

assert len(jax.devices()) == 4
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
STATE = np.array([0x9ABCDEF0, 0x12345678, 7, 0, 0, 0, 0, 0], np.uint32)

def placed(arrays, specs, mesh=MESH):
    return {n: jax.device_put(a, NamedSharding(mesh, specs.get(n, P()))) for n, a in arrays.items()}

def loss(arrays, indices, options):
    out, lse = fa_ext.jax.attention(**arrays, **indices, **options, return_lse=True)
    return (out * out).sum() + jnp.where(jnp.isfinite(lse), lse * 0.3, 0).sum()

def wanted(arrays, indices, options):
    out, lse = reference.attention(**arrays, **indices, **options)
    return exact(2 * out, np.full_like(lse, 0.3), arrays, indices, options)[2]

def grad(options):
    def total(subjects, rest, indices):
        return loss(subjects | rest, indices, options)
    return jax.grad(total)

def parted(arrays):
    return {n: x for n, x in arrays.items() if n in NAMES}, {n: x for n, x in arrays.items() if n not in NAMES}

def held(name, specs, gathers, mesh=MESH, batch=None, **more):
    "Gradients are those of float64, and nothing is gathered in vain."
    arrays, indices, options = make(name)
    if batch:  # twice the sequences, that devices divide
        arrays = {n: np.concatenate([x, x[::-1]]) if x.ndim > 1 and x.shape[0] == batch else x for n, x in arrays.items()}
        indices = {n: np.concatenate([x, x[::-1]]) for n, x in indices.items()}
    options |= more
    given = (*(placed(a, specs, mesh) for a in parted(arrays)), placed(indices, specs, mesh))
    compiled = jax.jit(grad(options)).lower(*given).compile()
    found = compiled(*given)
    right = wanted(arrays, indices, options)
    close(found, {n: right[n] for n in found}, 5e-5)
    assert gathers or "all-gather" not in compiled.as_text(), compiled.as_text()
    return given, found
"""

HEADS = 'of_heads = {"q": P(None, "y"), "k": P(None, "y"), "v": P(None, "y"), "sinks": P("y"), "alibi": P("y")}\n'


def test_heads_of_packed_sequences_run_on_their_shards():
    alone(
        COMMON
        + HEADS
        + """
for name in ("packed", "all", "positions", "range"):
    _, found = held(name, of_heads, gathers=False)
    assert {s.data.shape[1] for s in found["q"].addressable_shards} == {2}
held("cross", of_heads, gathers=False, dropout=(0.4, STATE))
"""
    )


def test_batch_and_heads_of_padded_sequences_run_on_their_shards():
    alone(
        COMMON
        + """
rows = {"seqlens_q": P("x"), "seqlens_k": P("x")}
held("padded", rows | dict.fromkeys("qkv", P("x", "y")), gathers=False, batch=3)
held("bshd", rows | dict.fromkeys("qkv", P("x", None, "y")), gathers=False, batch=3)
held("bias", rows | dict.fromkeys(("q", "k", "v", "bias"), P("x", "y")) | {"mask": P("x")}, gathers=False, batch=2)
held("padded", rows | dict.fromkeys("qkv", P("x", "y")), gathers=False, batch=3, dropout=(0.4, STATE))
"""
    )


def test_whatever_is_sharded():
    """Rows of packed sequences, index arrays, the batch where keys are packed: XLA brings them together."""
    alone(
        COMMON
        + """
every = {"q": P("x", "y"), "k": P("y"), "v": P(None, None, "x"), "cu_seqlens_q": P("x"), "positions": P("y")}
arrays, indices, options = make("positions")
arrays = {n: np.concatenate([x, x[:1]]) if n in "qkv" and len(x) % 2 else x for n, x in arrays.items()}
indices |= {"cu_seqlens_q": np.array([0, 4, 7, 7], "i4"), "cu_seqlens_k": np.array([0, 5, 9, 9], "i4"),
            "positions": np.resize(indices["positions"], len(arrays["q"]))}
given = (*(placed(a, every) for a in parted(arrays)), placed(indices, every))
found = jax.jit(grad(options))(*given)
right = wanted(arrays, indices, options)
close(found, {n: right[n] for n in found}, 5e-5)
held("packed keys", {"q": P("x", "y"), "alibi": P("x", "y"), "seqlens_q": P("x")}, gathers=True)
held("packed queries", {"k": P("x"), "v": P("x", None, "y"), "seqlens_k": P("x"), "sinks": P("y")}, gathers=True)
held("single", {"k": P(None, "y"), "v": P(None, "y"), "q": P(None, ("x", "y")), "sinks": P("x")}, gathers=True)
"""
    )


def test_explicit_axes():
    """Under jax.set_mesh: results are sharded as q is, gradients as what they are of."""
    import jax

    if not (hasattr(jax, "set_mesh") and hasattr(jax.sharding, "auto_axes")):
        pytest.skip("this JAX has no jax.set_mesh, or no jax.sharding.auto_axes")
    alone(
        COMMON
        + HEADS
        + """
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
def as_given(found, given):
    for n, x in found.items():
        assert x.sharding.is_equivalent_to(given[n].sharding, x.ndim), (n, x.sharding, given[n].sharding)
rows = {"seqlens_q": P("x"), "seqlens_k": P("x")} | dict.fromkeys("qkv", P("x", None, "y"))
with jax.set_mesh(mesh):
    for name, specs, of_lse, batch in (
        ("all", of_heads, P("y", None), None), ("all", of_heads | {"q": P("x", "y")}, P("y", "x"), None), ("bshd", rows, P("x", "y", None), 3)):
        given, found = held(name, specs, specs["q"][0] == "x" and not batch, mesh, batch)
        options = make(name)[2]
        for gradients in (found, grad(options)(*given)):
            as_given(gradients, given[0])
        out, lse = jax.jit(lambda s, r, i: fa_ext.jax.attention(**s, **r, **i, **options, return_lse=True))(*given)
        as_given({"q": out}, given[0])
        assert jax.typeof(lse).sharding.spec == of_lse
"""
    )


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check):
    """Over heads of packed sequences, whose index arrays all shards share; over the batch of padded ones."""
    if check:
        import jax

        if not hasattr(jax, "shard_map"):
            pytest.skip("this JAX checks replication by rules that a custom call has none of")
    alone(
        COMMON
        + HEADS
        + f"""
shard_map = jax.shard_map if hasattr(jax, "shard_map") else __import__("jax.experimental.shard_map").experimental.shard_map.shard_map
names = dict(check_vma={check}) if hasattr(jax, "shard_map") else dict(check_rep={check})
"""
        + """
def mapped(name, specs, axis):
    arrays, indices, options = make(name)
    if axis == "x":
        arrays, indices = ({n: np.concatenate([x, x[::-1]]) for n, x in a.items()} for a in (arrays, indices))
    subjects, rest = parted(arrays)
    parts = tuple({n: specs.get(n, P()) for n in a} for a in (subjects, rest, indices))
    total = shard_map(lambda s, r, i: jax.lax.psum(loss(s | r, i, options), axis), mesh=MESH, in_specs=parts, out_specs=P(), **names)
    found = jax.jit(jax.grad(total))(subjects, rest, indices)
    right = wanted(arrays, indices, options)
    close(found, {n: right[n] for n in found}, 5e-5)

mapped("all", of_heads, "y")
mapped("padded", dict.fromkeys(("q", "k", "v", "seqlens_q", "seqlens_k"), P("x")), "x")
"""
    )
