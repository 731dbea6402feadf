"""fa_ext.jax.attention over several devices: sharded jit, whatever axes are sharded, and shard_map. The CPU counts as four
devices, in processes of their own."""

import pytest

pytest.importorskip("jax")

from jax_support import alone  # noqa: E402

COMMON = """
import itertools, re, sys
import jax, jax.numpy as jnp, numpy as np
import fa_ext.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_support import arrays_of, close, exact, loss

assert len(jax.devices()) == 4
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))

def placed(arrays, specs, mesh=MESH):
    return {n: jax.device_put(a, NamedSharding(mesh, specs.get(n, P()))) for n, a in arrays.items()}

def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()

def shapes_of(text, target):
    "The shapes of the operands of each custom call."
    lines = [line for line in text.splitlines() if f'custom_call_target="{target}"' in line]
    assert lines, text
    return [re.findall(r"(?:f32|f64|f16|bf16)\\[([\\d,]*)\\]", line.split("=", 1)[1]) for line in lines]
"""

BATCH_AND_HEADS = """
arrays = arrays_of(batch=2, heads=4, heads_kv=2, bias={bias}, sinks={sinks}, alibi={alibi}, layout={layout!r})
b, h = ("x", "y")
whole = P(b, h) if {layout!r} == "bhsd" else P(b, None, h)
specs = dict.fromkeys("qkv", whole)
if "bias" in arrays:
    full = (1,) * (4 - arrays["bias"].ndim) + arrays["bias"].shape
    entries = [b if full[0] > 1 else None, h if full[1] > 1 else None, None, None]
    specs["bias"] = P(*entries[4 - arrays["bias"].ndim:])
if "sinks" in arrays:
    specs["sinks"] = P(h)
if "alibi" in arrays:
    specs["alibi"] = P(h) if arrays["alibi"].ndim == 1 else P(b, h)
given = placed(arrays, specs)
function = jax.value_and_grad(lambda a: loss(a, layout={layout!r}))
run = compiled(function, given)
value, found = run(given)
wanted, gradients = exact(arrays, layout={layout!r})
np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
close(found, gradients, 5e-5)
text = run.as_text()
part = "1,2,5,8" if {layout!r} == "bhsd" else "1,5,2,8"
for shapes in shapes_of(text, "fa_ext_attention") + shapes_of(text, "fa_ext_attention_backward"):
    assert part in shapes and "2,4,5,8" not in shapes and "2,5,4,8" not in shapes, shapes
assert "all-gather" not in text, text
"""


SHARDED = [
    (None, False, None, "bhsd"),
    (None, True, (2, 4), "bshd"),
    ((2, 4, 5, 7), True, (4,), "bhsd"),
    ((1, 4, 1, 7), False, None, "bshd"),
    ((2, 1, 5, 1), True, None, "bhsd"),
    ((5, 7), False, (2, 4), "bhsd"),
]


@pytest.mark.parametrize("bias, sinks, alibi, layout", SHARDED)
def test_batch_and_heads_run_on_their_shards(bias, sinks, alibi, layout):
    """No operand is gathered, and gradients that all shards share are summed."""
    alone(COMMON + BATCH_AND_HEADS.format(bias=bias, sinks=sinks, alibi=alibi, layout=layout))


ANY_AXIS = """
arrays = arrays_of(batch=2, heads=4, heads_kv=2, queries=6, keys=8, bias=(2, 4, 6, 8), sinks=True)
wanted, gradients = exact(arrays, causal="bottom_right")
options = [None, "x", "y", ("x", "y")]
def fits(shape, spec):
    used = [n for e in spec if e for n in ((e,) if isinstance(e, str) else e)]
    sizes = {"x": 2, "y": 2}
    parts = [int(np.prod([sizes[n] for n in ((e,) if isinstance(e, str) else e or ())])) for e in spec]
    return len(used) == len(set(used)) and all(n % p == 0 for n, p in zip(shape, parts))
rng = np.random.default_rng(SEED)
choices = {n: [s for s in itertools.product(options, repeat=a.ndim) if fits(a.shape, s)] for n, a in arrays.items()}
function = jax.jit(jax.value_and_grad(lambda a: loss(a, causal="bottom_right")))
for _ in range(8):
    specs = {n: P(*c[rng.integers(len(c))]) for n, c in choices.items()}
    value, found = function(placed(arrays, specs))
    np.testing.assert_allclose(float(value), wanted, rtol=1e-5, err_msg=str(specs))
    try:
        close(found, gradients, 5e-5)
    except AssertionError:
        print(specs)
        raise
"""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_sharded(seed):
    """Sequences and head_dims too, each operand in its own way: XLA brings them together, and the numbers are right."""
    alone(COMMON + ANY_AXIS.replace("SEED", str(seed)))


def test_heads_that_do_not_divide_are_brought_together():
    """Three kv heads over two devices, and grouped heads whose kv heads are fewer than the devices."""
    alone(
        COMMON
        + """
for heads, heads_kv in ((6, 3), (4, 1), (2, 1)):
    arrays = arrays_of(batch=2, heads=heads, heads_kv=heads_kv)
    given = placed(arrays, {"q": P("x", "y"), "k": P("x"), "v": P("x")})
    value, found = jax.jit(jax.value_and_grad(loss))(given)
    np.testing.assert_allclose(float(value), exact(arrays)[0], rtol=1e-5)
    close(found, exact(arrays)[1], 5e-5)
"""
    )


def test_results_keep_the_sharding_of_the_batch():
    alone(
        COMMON
        + """
arrays = arrays_of(batch=4)
given = placed(arrays, dict.fromkeys("qkv", P(("x", "y"))))
out = jax.jit(lambda a: fa_ext.jax.attention(**a))(given)
assert {s.data.shape for s in out.addressable_shards} == {(1, 4, 5, 8)}
out = jax.jit(lambda a: fa_ext.jax.attention(**a), out_shardings=NamedSharding(MESH, P(None, None, None, "y")))(given)
assert {s.data.shape for s in out.addressable_shards} == {(4, 4, 5, 4)}
import fa_ext
np.testing.assert_allclose(np.asarray(out), fa_ext.attention(**arrays), atol=1e-5)
"""
    )


def test_vmap_scan_and_checkpoint_under_sharded_jit():
    alone(
        COMMON
        + """
arrays = arrays_of(3, batch=2, sinks=True, bias=(1, 4, 5, 7))
given = placed(arrays, {"q": P(None, "x", "y"), "k": P(None, "x"), "v": P(None, "x", "y")})
found = jax.jit(jax.vmap(jax.grad(loss)))(given)
for n in range(3):
    close({m: x[n] for m, x in found.items()}, exact({m: x[n] for m, x in arrays.items()})[1], 5e-5)

def total(a):
    def step(carry, one):
        return carry + jax.checkpoint(loss)(one), None
    return jax.lax.scan(step, 0.0, a)[0]

found = jax.jit(jax.grad(total))(given)
for n in range(3):
    close({m: x[n] for m, x in found.items()}, exact({m: x[n] for m, x in arrays.items()})[1], 5e-5)
"""
    )


SHARD_MAP = """
shard_map = jax.shard_map if hasattr(jax, "shard_map") else __import__("jax.experimental.shard_map").experimental.shard_map.shard_map
check = {check}
names = dict(check_vma=check) if hasattr(jax, "shard_map") else dict(check_rep=check)
arrays = arrays_of(batch=2, heads=4, heads_kv=2, bias=(1, 4, 5, 7), sinks=True)
specs = {{"q": P("x", "y"), "k": P("x", "y"), "v": P("x", "y"), "bias": P(None, "y"), "sinks": P("y")}}

def local(a):
    return jax.lax.psum(loss(a), ("x", "y"))

total = shard_map(local, mesh=MESH, in_specs=(specs,), out_specs=P(), **names)
value, found = jax.jit(jax.value_and_grad(total))(placed(arrays, specs))
wanted, gradients = exact(arrays)
np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
close(found, gradients, 5e-5)

mapped = shard_map(lambda a: fa_ext.jax.attention(**a), mesh=MESH, in_specs=(specs,), out_specs=P("x", "y"), **names)
out = jax.jit(mapped)(placed(arrays, specs))
from fa_ext import reference
np.testing.assert_allclose(np.asarray(out), reference.attention(**arrays)[0], atol=2e-5)
"""


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check):
    """Operands are shards already; the gradient of what all shards share is the sum of theirs."""
    if check:
        import jax

        if not hasattr(jax, "shard_map"):
            pytest.skip("this JAX checks replication by rules that a custom call has none of")
    alone(COMMON + SHARD_MAP.format(check=check))


def test_a_ring_over_the_keys_by_shard_map():
    """Keys are sharded: each device's part of the result and its LSE make the whole, and gradients flow through the LSE."""
    import jax

    if not hasattr(jax, "shard_map"):
        pytest.skip("written for jax.shard_map")
    alone(
        COMMON
        + """
arrays = arrays_of(batch=1, heads=2, heads_kv=2, keys=8)
mesh = Mesh(np.array(jax.devices()), ("k",))

def attend(q, k, v):
    out, lse = fa_ext.jax.attention(q, k, v, return_lse=True)
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), "k")
    weight = jnp.exp(lse - top)[..., None]
    return jax.lax.psum(out * weight, "k") / jax.lax.psum(weight, "k")

mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P(), P(None, None, "k"), P(None, None, "k")), out_specs=P())
def total(q, k, v):
    return (mapped(q, k, v) ** 2).sum()
found = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*(arrays[n] for n in "qkv"))
from fa_ext import reference
from fa_ext.reference.backward import gradients
out, lse = reference.attention(**arrays)
wanted = gradients(2 * out, **arrays)
close(dict(zip("qkv", found)), {n: wanted[n] for n in "qkv"}, 5e-5)
"""
    )
