"""fa_ext.jax.attention over several devices: sharded jit, whatever axes are sharded, and shard_map. The CPU counts as four
devices, in processes of their own."""

import pytest

pytest.importorskip("jax")

from tests.frameworks.support.jax_support import alone  # noqa: E402

COMMON = """
import itertools, re, sys
import jax, jax.numpy as jnp, numpy as np
import fa_ext.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.frameworks.support.jax_support import arrays_of, close, exact, loss

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


EXPLICIT = """
from fa_ext import attention, reference
MESH = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
before = {n: jnp.asarray(x) for n, x in arrays_of().items()}

def as_given(found, given):
    for n, x in found.items():
        assert x.sharding.is_equivalent_to(given[n].sharding, x.ndim), (n, x.sharding, given[n].sharding)

def held(given, specs, gathers=False, **options):
    "The loss and its gradients, whose shardings are those of what they are of, eager and compiled."
    layout = options.get("layout", "bhsd")
    arrays = arrays_of(**given, layout=layout)
    given = placed(arrays, specs, MESH)
    function = jax.value_and_grad(lambda a: loss(a, **options))
    wanted, gradients = exact(arrays, **options)
    for value, found in (function(given), jax.jit(function)(given)):
        np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
        close(found, gradients, 5e-5)
        as_given(found, given)
    assert gathers or "all-gather" not in compiled(function, given).as_text()
    out, lse = jax.jit(lambda a: fa_ext.jax.attention(**a, **options, return_lse=True))(given)
    as_given({"q": out}, given)
    b, *middle = jax.typeof(given["q"]).sharding.spec[:3]
    assert jax.typeof(lse).sharding.spec == P(b, *(middle if layout == "bhsd" else middle[::-1]))

whole = P("x", "y")
qkv = dict.fromkeys("qkv", whole)
"""


@pytest.mark.parametrize(
    "script",
    [
        """
held({}, qkv)
held(dict(bias=(2, 4, 5, 7), sinks=True, alibi=(2, 4)), qkv | {"bias": whole, "sinks": P("y"), "alibi": whole})
held(dict(bias=(4, 5, 7), alibi=(4,)), qkv | {"bias": P("y"), "alibi": P("y")})
held({}, dict.fromkeys("qkv", P("x", None, "y")), layout="bshd")
""",
        """
held(dict(heads_kv=1), {"q": whole, "k": P("x"), "v": P("x")}, gathers=True)
held(dict(queries=8, keys=8), {"q": P(None, None, ("x", "y")), "k": P("x", None, "y"), "v": P()}, gathers=True)
held(dict(queries=6), {"q": P("x", "y"), "k": P("x"), "v": P("x")}, gathers=True, layout="bshd")
held({}, {"k": whole}, gathers=True)
""",
        """
arrays = arrays_of()
given = placed(arrays, qkv, MESH)
mask, state = np.random.default_rng(0).random((5, 7)) < 0.7, np.array([1, 2, 3, 0, 0, 0, 0, 0], np.uint32)
for wrap in (jax.jit, lambda f: f):
    for options in (dict(mask=mask), dict(dropout=(0.3, state))):
        out = wrap(lambda a: fa_ext.jax.attention(**a, **options))(given)
        np.testing.assert_allclose(out, attention(**arrays, **options), atol=1e-5)
        as_given({"q": out}, given)
    for x in (before, arrays):
        np.testing.assert_allclose(wrap(lambda a: fa_ext.jax.attention(**a))(x), attention(**arrays), atol=1e-5)
assert fa_ext.jax.attention(**given, dropout=(0.3, jax.random.key(1))).shape == (2, 4, 5, 8)
""",
        """
arrays = arrays_of(4, sinks=True)
for spec in (P("x"), P(None, "x", "y"), P("x", None, "y")):
    if spec[0] and jax.__version_info__ < (0, 8):  # whose reshard has no gradients where vmap maps over a mesh axis
        continue
    given = placed(arrays, dict.fromkeys("qkv", spec) | {"sinks": P(*spec[:1])}, MESH)
    for wrap in (jax.jit, lambda f: f):
        found = wrap(jax.vmap(jax.grad(loss)))(given)
        if jax.__version_info__ >= (0, 9):  # before, gradients of jax.sharding.auto_axes lose what vmap maps over a mesh axis
            as_given(found, given)
        found = {n: np.asarray(x) for n, x in found.items()}
        for i in range(4):
            close({n: x[i] for n, x in found.items()}, exact({n: x[i] for n, x in arrays.items()})[1], 5e-5)
""",
        """
rng = np.random.default_rng(0)
arrays = {n: rng.standard_normal((2, 6, heads, 8), "f4") for n, heads in zip("qkv", (4, 2, 2))}
given = placed(arrays, dict.fromkeys("qkv", P("x", None, "y")), MESH)
lengths = jnp.array([3, 6], jnp.int32)
seen = (np.arange(6) < np.array(lengths)[:, None])[:, None, None, :]
for wrap in (jax.jit, lambda f: f):
    for options in (dict(key_value_seq_lengths=lengths), dict(mask=jnp.asarray(seen), bias=jnp.zeros((4, 1, 6)))):
        call = lambda a: fa_ext.jax.dot_product_attention(a["q"], a["k"], a["v"], return_residual=True, **options)
        out, lse = wrap(call)(given)
        np.testing.assert_allclose(out, attention(**arrays, mask=seen, layout="bshd"), atol=1e-5)
        as_given({"q": out}, given)
        assert jax.typeof(lse).sharding.spec == P("x", None, "y")
        as_given(wrap(jax.grad(lambda a: call(a)[0].sum()))(given), given)
    single = placed({n: x[0] for n, x in arrays.items()}, dict.fromkeys("qkv", P(None, "y")), MESH)
    as_given({"q": wrap(lambda a: fa_ext.jax.dot_product_attention(*(a[n] for n in "qkv")))(single)}, single)
""",
        """
given = placed(arrays_of(), qkv, MESH)
whole = lambda a: fa_ext.jax.attention(**a)
parts = jax.shard_map(whole, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
for wrap in (lambda f: f, jax.checkpoint):
    found, wanted = (jax.jit(jax.grad(lambda a: jnp.sum(wrap(call)(a) ** 2)))(given) for call in (parts, whole))
    close(found, wanted, 5e-5)
""",
    ],
    ids=["batch and heads", "other axes", "options", "vmap", "dot_product_attention", "shard_map over one axis"],
)
def test_explicit_axes(script):
    """Under jax.set_mesh: results are sharded as q is, gradients as what they are of, and nothing is gathered in vain."""
    import jax

    if not (hasattr(jax, "set_mesh") and hasattr(jax.sharding, "auto_axes")):
        pytest.skip("this JAX has no jax.set_mesh, or no jax.sharding.auto_axes")
    alone(COMMON + EXPLICIT + "with jax.set_mesh(MESH):" + script.replace("\n", "\n    "))


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
