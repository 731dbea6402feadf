"""fa_ext.jax.attention under JAX's transformations: each is held against what it stands for, computed call by call or by float64."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import fa_ext.jax  # noqa: E402
from fa_ext import reference  # noqa: E402
from tests.frameworks.support.jax_support import arrays_of, close, exact, loss, wide  # noqa: E402


def sliced(arrays, axes, n):
    return {name: x if axes[name] is None else np.moveaxis(x, axes[name], 0)[n] for name, x in arrays.items()}


# ---- vmap ----

# The bias that is unmapped below has a batch axis of 1 or of the batch; `mapped` names what has the mapped axis.
MAPPED = [
    dict(mapped="qkv", options={}),
    dict(mapped="q", options={}),
    dict(mapped="kv", options=dict(causal="bottom_right")),
    dict(mapped=("q", "bias"), bias=(2, 4, 5, 7)),
    dict(mapped=("q", "bias"), bias=(1, 4, 1, 7)),
    dict(mapped=("q", "k", "v"), bias=(1, 1, 5, 7)),
    dict(mapped=("q",), bias=(2, 1, 5, 1)),
    dict(mapped=("bias",), bias=(4, 5, 7)),
    dict(mapped=("q", "k", "v"), sinks=True),
    dict(mapped=("sinks",), sinks=True),
    dict(mapped=("q", "sinks"), sinks=True, bias=(1, 1, 1, 7)),
    dict(mapped=("q", "k", "v", "bias"), bias=(7,), batch=1),
    dict(mapped=("k", "v"), bias=(1, 4, 5, 7), batch=1),
    dict(mapped="qkv", options=dict(layout="bshd", window=(2, 1))),
    dict(mapped=("q", "k"), alibi=(4,)),
    dict(mapped=("alibi",), alibi=(4,)),
    dict(mapped=("q", "alibi"), alibi=(2, 4), sinks=True),
    dict(mapped=("k", "v"), alibi=(2, 4), bias=(1, 4, 1, 7)),
]


def prepared(given):
    given = dict(given)
    mapped, options = tuple(given.pop("mapped")), given.pop("options", {})
    full, single = arrays_of(3, layout=options.get("layout", "bhsd"), **given), arrays_of(layout=options.get("layout", "bhsd"), **given)
    arrays = {n: full[n] if n in mapped else single[n] for n in full}
    return arrays, {n: 0 if n in mapped else None for n in arrays}, options


@pytest.mark.parametrize("given", MAPPED, ids=str)
def test_vmap_is_one_call_for_each(given):
    arrays, axes, options = prepared(given)
    found = jax.jit(jax.vmap(lambda a: fa_ext.jax.attention(**a, **options), in_axes=(axes,)))(arrays)
    for n in range(3):
        wanted, _ = reference.attention(**sliced(arrays, axes, n), **options)
        np.testing.assert_allclose(found[n], wanted, atol=2e-5)


@pytest.mark.parametrize("given", MAPPED, ids=str)
def test_vmap_of_grad(given):
    """A gradient for each element, of what is not mapped too."""
    arrays, axes, options = prepared(given)
    found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, **options)), in_axes=(axes,)))(arrays)
    for n in range(3):
        close({name: x[n] for name, x in found.items()}, exact(sliced(arrays, axes, n), **options)[1])


@pytest.mark.parametrize("mapped", [("intervals",), ("q", "intervals"), ("q", "k", "v")])
@pytest.mark.parametrize("shape", [(2, 4, 5, 2), (1, 4, 5, 2, 2), (2, 1, 1, 2), (1, 1, 1, 1, 2)])
def test_vmap_of_intervals(shape, mapped):
    """Values, and gradients for each element."""
    full, single = arrays_of(3, sinks=True), arrays_of(sinks=True)
    rng = np.random.default_rng(4)
    full["intervals"], single["intervals"] = (rng.integers(-1, 9, (*lead, *shape)).astype(np.int32) for lead in ((3,), ()))
    arrays = {n: full[n] if n in mapped else single[n] for n in full}
    axes = {n: 0 if n in mapped else None for n in arrays}

    def gradients(a):
        rest = {"intervals": a["intervals"]}
        return jax.grad(lambda some: loss(some | rest, causal="bottom_right"))({n: x for n, x in a.items() if n != "intervals"})

    found = jax.jit(jax.vmap(lambda a: (fa_ext.jax.attention(**a, causal="bottom_right"), gradients(a)), in_axes=(axes,)))(arrays)
    for n in range(3):
        one = sliced(arrays, axes, n)
        np.testing.assert_allclose(found[0][n], reference.attention(**one, causal="bottom_right")[0], atol=2e-5)
        close({name: x[n] for name, x in found[1].items()}, exact(one, causal="bottom_right")[1])


@pytest.mark.parametrize("given", MAPPED, ids=str)
def test_grad_of_vmap(given):
    """Gradients of what is not mapped are sums."""
    arrays, axes, options = prepared(given)
    mapped = jax.vmap(functools.partial(loss, **options), in_axes=(axes,))
    found = jax.jit(jax.grad(lambda a: mapped(a).sum()))(arrays)
    each = [exact(sliced(arrays, axes, n), **options)[1] for n in range(3)]
    wanted = {name: np.stack([g[name] for g in each]) for name in each[0]}
    close(found, {n: x if axes[n] is not None else x.sum(0) for n, x in wanted.items()}, 5e-5)


def test_vmap_along_other_axes():
    arrays = arrays_of(3, sinks=True)
    moved = {"q": np.moveaxis(arrays["q"], 0, 2), "k": np.moveaxis(arrays["k"], 0, 4), "v": arrays["v"], "sinks": arrays["sinks"].T}
    axes = {"q": 2, "k": 4, "v": 0, "sinks": 1}
    found = jax.vmap(jax.grad(loss), in_axes=(axes,))(moved)
    for n in range(3):
        close({name: x[n] for name, x in found.items()}, exact(sliced(moved, axes, n))[1])


def test_nested_vmap():
    arrays = arrays_of(3, 2, bias=(1, 4, 5, 7))
    single = arrays_of(3, seed=9)["k"]
    arrays["k"] = single  # mapped by the outer vmap alone
    inner = jax.vmap(jax.grad(loss), in_axes=({"q": 0, "k": None, "v": 0, "bias": 0},))
    found = jax.jit(jax.vmap(inner))(arrays)
    for i in range(3):
        for j in range(2):
            one = {n: x[i] if n == "k" else x[i, j] for n, x in arrays.items()}
            close({n: x[i, j] for n, x in found.items()}, exact(one)[1])


def test_vmap_over_masks():
    arrays = arrays_of()
    masks = np.random.default_rng(2).random((3, 1, 1, 5, 7)) < 0.6
    found = jax.vmap(lambda mask: fa_ext.jax.attention(**arrays, mask=mask))(masks)
    for n in range(3):
        np.testing.assert_allclose(found[n], reference.attention(**arrays, mask=masks[n])[0], atol=2e-5)


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize("mapped", ["sinks", "dsinks", "dropout"])
def test_vmap_without_jit_compiles_once(mapped):
    """Elements that have calls of their own too, forward and backward."""
    arrays = arrays_of(3, sinks=True, dim={"sinks": 3, "dsinks": 5, "dropout": 6}[mapped])  # shapes of no other test
    state = np.array([1, 2, 3, 0, 0, 0, 0, 0], np.uint32)
    if mapped != "sinks":
        arrays["sinks"] = arrays["sinks"][0]
    axes = {n: None if n == "sinks" and mapped != "sinks" else 0 for n in arrays}
    options = dict(dropout=(0.3, state)) if mapped == "dropout" else {}
    call = jax.vmap(jax.grad(functools.partial(loss, **options)), in_axes=(axes,))
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **_: events.append(event))
    try:
        call(arrays)
        assert COMPILED in events
        events.clear()
        call(arrays)
    finally:
        jax.monitoring.clear_event_listeners()
    assert COMPILED not in events


# ---- control flow, recomputation, compilation ----


def test_jit_is_no_other_call():
    arrays = arrays_of(sinks=True, bias=(1, 4, 5, 7))
    eager, compiled = jax.grad(loss)(arrays), jax.jit(jax.grad(loss))(arrays)
    for name in arrays:
        np.testing.assert_array_equal(eager[name], compiled[name])
    close(eager, exact(arrays)[1])


def test_value_and_grad():
    arrays = arrays_of()
    value, found = jax.jit(jax.value_and_grad(loss))(arrays)
    wanted, gradients = exact(arrays)
    np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
    close(found, gradients)


def layers(weights, x, *, step=lambda f: f, by_scan=True):
    """Attention after attention, each with keys and values of its own."""

    def layer(x, kv):
        return x + fa_ext.jax.attention(x, kv[0], kv[1], causal="bottom_right"), x.sum()

    layer = step(layer)
    if by_scan:
        x, sums = jax.lax.scan(layer, x, weights)
        return (x * x).sum() + sums.sum()
    total = 0.0
    for n in range(len(weights[0])):
        x, one = layer(x, (weights[0][n], weights[1][n]))
        total += one
    return (x * x).sum() + total


@pytest.mark.parametrize("step", ["plain", "checkpoint"])
def test_grad_of_scan(step):
    weights = tuple(arrays_of(4, heads_kv=4)[n] for n in "kv")
    x = arrays_of(seed=3)["q"]
    wrap = jax.checkpoint if step == "checkpoint" else lambda f: f
    value, found = jax.jit(jax.value_and_grad(functools.partial(layers, step=wrap), argnums=(0, 1)))(weights, x)
    wanted, unrolled = jax.value_and_grad(functools.partial(layers, by_scan=False), argnums=(0, 1))(weights, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(unrolled), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def test_checkpoint_computes_the_forward_again():
    arrays = arrays_of(sinks=True)
    plain, again = jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.checkpoint(loss)))
    for name, x in plain(arrays).items():
        np.testing.assert_array_equal(x, again(arrays)[name])
    counts = [f.lower(arrays).as_text().count("@fa_ext_attention(") for f in (plain, again)]
    assert counts[1] >= counts[0] >= 1


def test_checkpoint_of_a_policy():
    arrays = arrays_of()
    again = jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable)
    close(jax.jit(jax.grad(again))(arrays), exact(arrays)[1])


def test_cond_and_while():
    arrays = arrays_of(heads_kv=4)

    def function(x, flag):
        x = jax.lax.cond(flag, lambda x: fa_ext.jax.attention(x, arrays["k"], arrays["v"]), lambda x: x * 2, x)
        return jax.lax.fori_loop(0, 2, lambda _, x: fa_ext.jax.attention(x, arrays["k"], arrays["v"]), x)

    found = jax.jit(function)(arrays["q"], True)
    wanted = arrays["q"]
    for _ in range(3):
        wanted = reference.attention(wanted, arrays["k"], arrays["v"])[0]
    np.testing.assert_allclose(found, wanted, atol=3e-5)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donated_arguments():
    """XLA may lay the result over an operand; the call's own operands stay apart."""
    arrays = arrays_of(heads_kv=4, keys=5)
    wanted, _ = reference.attention(**arrays)
    function = jax.jit(lambda q, k, v: fa_ext.jax.attention(q, k, v), donate_argnums=(0, 1, 2))
    found = function(*(jax.numpy.asarray(arrays[n]) for n in "qkv"))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    step = jax.jit(lambda a: {n: x - 0.1 * g for (n, x), g in zip(a.items(), jax.grad(loss)(a).values())}, donate_argnums=0)
    found = step({n: jax.numpy.asarray(x) for n, x in arrays.items()})
    close(found, {n: arrays[n] - 0.1 * g for n, g in exact(arrays)[1].items()})


def test_a_training_step_learns():
    """Gradient descent on everything that has a gradient lowers the loss in float64 by what the gradient says."""
    with wide():
        arrays = {n: x.astype(np.float64) for n, x in arrays_of(sinks=True, bias=(1, 4, 5, 7)).items()}
        value, found = jax.jit(jax.value_and_grad(loss))(arrays)
        step = 1e-6
        after = float(loss({n: x - step * np.asarray(found[n]) for n, x in arrays.items()}))
        slope = sum(float((np.asarray(g) ** 2).sum()) for g in found.values())
        assert abs((float(value) - after) / (step * slope) - 1) < 1e-4
        wanted = exact(arrays)[1]
    close(found, wanted, 1e-11)


# ---- what there is not ----


@pytest.mark.parametrize("jit", [False, True])
def test_second_derivatives_are_refused(jit):
    arrays = arrays_of()

    def first(q):
        return jax.grad(lambda q: loss(arrays | {"q": q}))(q).sum()

    for second in (jax.grad(first), jax.hessian(lambda q: loss(arrays | {"q": q})), jax.jacfwd(jax.grad(first))):
        with pytest.raises(NotImplementedError, match="fa_ext.jax.attention has no second derivatives"):
            (jax.jit(second) if jit else second)(arrays["q"])


def test_forward_mode_is_refused():
    arrays = arrays_of()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: fa_ext.jax.attention(**arrays | {"q": q}), (arrays["q"],), (arrays["q"],))


def test_threads_at_once():
    """XLA may run calls from several threads of its own."""
    from concurrent.futures import ThreadPoolExecutor

    arrays = arrays_of()
    function = jax.jit(jax.grad(loss))
    wanted = function(arrays)

    def one(_):
        for _ in range(10):
            for name, x in function(arrays).items():
                np.testing.assert_array_equal(x, wanted[name])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
