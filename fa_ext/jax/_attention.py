"""The functions of ``fa_ext.jax`` and their first derivatives."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from .. import kernels
from ._calls import BACKWARD, FORWARD, Call, Options, check, varying
from ._rules import operation

_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, bias=None, mask=None, sinks=None, alibi=None,
    dropout=None, layout="bhsd", return_lse=False, deterministic=True, kernel=None, kernel_backward=None, batch_invariant=False,
):  # fmt: skip
    """Softmax attention: ``fa_ext.attention`` for JAX arrays and tracers, with gradients.

    Parameters
    ----------
    q : array, (B, H, Sq, D), or (B, Sq, H, D) with layout="bshd"
        Queries: float16, bfloat16, float32, or float64 (on the CPU, with ``jax_enable_x64``); D is 1 to 256.
    k, v : arrays, (B, Hk, Sk, D) and (B, Hk, Sk, Dv), or as ``layout`` says
        Keys and values, of q's dtype; H is a multiple of Hk.
    causal, scale, window, softcap, layout, batch_invariant
        As for ``fa_ext.attention``. They are Python values, no arrays: a new value is a new compilation.
    bias : array that broadcasts to (B, H, Sq, Sk), or None
        Added to the scores; q's dtype or float32.
    mask : bool array that broadcasts to (B, H, Sq, Sk), or None
        True: attend. It has no gradient.
    sinks : array, (H,), or None
        Logits that join the softmax's denominator alone; q's dtype or float32.
    alibi : array, (H,) or (B, H), float32, or None
        Slopes of ALiBi, as for ``fa_ext.attention``. They have no gradient.
    dropout : (p, key), (p, state) or None
        Weights become 0 with probability p, a number, as for ``fa_ext.attention``. What is dropped follows from a PRNG key of
        JAX, or from the eight words of ``fa_ext.attention``'s state, uint32 (8,). The backward pass drops the same, shards of
        sharded ``jit`` their parts of one mask, and elements that vmap maps with one key the same weights; inside shard_map
        each shard needs a key of its own.
    return_lse : bool
        Also return the LSE, through which gradients flow too.
    deterministic : bool
        As for ``fa_ext.attention_backward``.
    kernel, kernel_backward : str or None
        Names of ``fa_ext.kernels()`` and ``fa_ext.kernels("backward")`` force these kernels.

    Returns
    -------
    out : array, (B, H, Sq, Dv) or (B, Sq, H, Dv), q's dtype
        0 where a query sees no key.
    lse : array, (B, H, Sq), float32 (float64 for float64)
        With return_lse.

    Raises
    ------
    ValueError, TypeError
        While tracing: an argument is not accepted, in the words of ``fa_ext.attention``.
    jax.errors.JaxRuntimeError
        While running: no kernel of the device takes the call.
    NotImplementedError
        Second derivatives. Forward-mode differentiation raises JAX's TypeError.

    Under sharded ``jit`` the call runs on shards of the batch and of the heads (where the mesh axis divides Hk);
    arrays that are sharded otherwise are gathered first. Where ``jax.set_mesh`` makes mesh axes explicit, results are sharded
    over them as q is, head_dim apart, and gradients as what they are of. ``jax.export`` needs
    ``DisabledSafetyCheck.custom_call("fa_ext_attention")`` and that of ``"fa_ext_attention_backward"``.
    """
    _check_values(causal, window, softcap, layout, scale)
    for name, given, operation_name in (("kernel", kernel, "attention"), ("kernel_backward", kernel_backward, "backward")):
        names = kernels(operation_name)
        if given is not None and given not in names:
            raise ValueError(f"{name} is {given!r}, which names no kernel of this build; accepted: {', '.join(names)}")
    options = Options(
        causal, None if scale is None else float(scale), None if window is None else _window(window), float(softcap), layout,
        bool(deterministic), kernel, kernel_backward, bool(batch_invariant), *_probability(dropout),
    )  # fmt: skip
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks, "alibi": alibi}
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    _check_dtypes(arrays)
    check(options, arrays, arrays.values())
    for name in ("bias", "mask"):
        if name in arrays:
            arrays[name] = arrays[name].reshape((1,) * (4 - arrays[name].ndim) + arrays[name].shape)
    if options.dropout:
        arrays["dropout"] = _state(dropout[1])
    function = _differentiable(options, tuple(arrays), bool(return_lse))
    made = _beside_explicit_axes(function, options, bool(return_lse))(*_vary_alike(list(arrays.values())))
    return made if return_lse else made[0]


def _check_values(causal, window, softcap, layout, scale):
    """What the C interface gets as numbers."""
    if not (isinstance(causal, (bool, np.bool_)) or causal in ("top_left", "bottom_right")):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'top_left', 'bottom_right'")
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; accepted: 'bhsd', 'bshd'")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name} is traced; accepted: a number that is known while tracing")
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise TypeError(f"window is {window!r}; accepted: None, or (left, right), each an int >= 0 or None for unbounded")


def _check_dtypes(arrays):
    """What the library has no name for."""
    for name, x in arrays.items():
        if x.dtype.name not in ("float16", "bfloat16", "float32", "float64", "bool"):
            accepted = {"mask": "bool (True: attend)", "bias": "q's dtype or float32", "sinks": "q's dtype or float32", "alibi": "float32"}
            known = accepted.get(name, "float16, bfloat16, float32, and float64 on the CPU")
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {known}")
        if name in "qkv" and x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions, shape {x.shape}; accepted: 4, since JAX's calls are dense")


def _probability(dropout):
    """() or (p,) of dropout="""
    if dropout is None:
        return ()
    if not isinstance(dropout, (tuple, list)) or len(dropout) != 2:
        raise TypeError(f"dropout is {type(dropout).__name__}; accepted: None, (p, key) or (p, state)")
    if isinstance(dropout[0], jax.core.Tracer):
        raise TypeError("dropout's p is traced; accepted: a number that is known while tracing")
    if not 0 <= float(dropout[0]) <= 1:
        raise ValueError(f"dropout's p is {dropout[0]}; accepted: 0 to 1")
    return (float(dropout[0]),)


def _state(given):
    """The eight words {seed low, seed high, offset, b0, h0, i0, j0, heads} that dropout is drawn from."""
    given = jnp.asarray(given)
    if given.shape == (8,) and given.dtype in (jnp.uint32, jnp.int32):
        return given.astype(jnp.uint32)
    if not (jnp.issubdtype(given.dtype, jax.dtypes.prng_key) and given.shape == ()) and given.shape not in ((2,), (4,)):
        raise ValueError(f"dropout's key has shape {given.shape}; accepted: one PRNG key, or a state of shape (8,), uint32")
    return jnp.concatenate([jax.random.bits(given, (2,), jnp.uint32), jnp.zeros(6, jnp.uint32)])


def _window(window):
    return tuple(None if side is None else operator.index(side) for side in window)


def _vary_alike(arrays):
    """Inside shard_map with checked types: arrays that vary over the same mesh axes, so that JAX sums the gradients of those
    that all shards share."""
    every = frozenset().union(*map(varying, arrays))

    def vary(x):
        missing = tuple(sorted(every - varying(x)))
        if not missing:
            return x
        return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)

    return [vary(x) for x in arrays]


def _beside_explicit_axes(function, options, wants_lse):
    """The function where XLA's partitioner has the mesh axes that are explicit around it; results are sharded over them as q
    is, head_dim apart."""
    mesh = jax.sharding.get_abstract_mesh() if hasattr(jax.sharding, "auto_axes") else None
    explicit = getattr(mesh, "explicit_axes", ())
    if not explicit:
        return function

    def call(*operands):
        spec = jax.typeof(operands[0]).sharding.spec
        rows = PartitionSpec(spec[0], *(spec[1:3] if options.layout == "bhsd" else spec[2:0:-1]))
        results = (PartitionSpec(*spec[:3], None), rows)[: 1 + wants_lse]
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=results)(*operands)

    return call


@functools.cache
def _differentiable(options: Options, names: tuple[str, ...], wants_lse: bool):
    """The forward call of these operands with its derivative: (out,) or (out, lse)."""
    forward = operation(Call(options, names, ("out", "lse")))
    outputs = 1 + wants_lse

    @jax.custom_vjp
    def attend(*operands):
        return operation(Call(options, names, ("out", "lse")[:outputs]))(*operands)

    def ahead(*primals):
        # Which gradients are wanted is no array: it travels in the structure, as () or None.
        wanted = tuple(() if primal.perturbed else None for primal in primals)
        operands = tuple(primal.value for primal in primals)
        out, lse = forward(*operands)
        return (out, lse)[:outputs], (operands, out, lse, wanted)

    def back(saved, cotangents):
        operands, out, lse, wanted = saved
        known = {**dict(zip(names, operands, strict=True)), "out": out, "lse": lse}
        known |= {n: x for n, x in zip(("dout", "dlse"), cotangents) if not isinstance(x, SymbolicZero)}
        wrt = [n for n, x in zip(names, wanted, strict=True) if x is not None and n in _DIFFERENTIABLE]
        if not wrt or not ("dout" in known or "dlse" in known):
            return (None,) * len(names)
        used = tuple(name for name in BACKWARD if name in known)
        results = tuple(f"d{name}" for name in FORWARD if name in wrt)
        made = operation(Call(options, used, results))(*(known[name] for name in used))
        gradients = dict(zip(results, made, strict=True))
        return tuple(gradients.get(f"d{name}") for name in names)

    attend.defvjp(ahead, back, symbolic_zeros=True)
    return attend


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, implementation=None, return_residual=False,
):  # fmt: skip
    """``jax.nn.dot_product_attention`` on the kernels of ``fa_ext``.

    Parameters
    ----------
    query : array, (B, T, N, H), or (T, N, H)
    key, value : arrays, (B, S, K, H), or (S, K, H)
        K divides N.
    bias : array of up to 4 axes that broadcasts to (B, N, T, S), or None
        Added to the scaled scores; other dtypes than query's and float32 become one of them.
    mask : bool array, likewise, or None
        True: attend.
    scale, is_causal, local_window_size, return_residual
        As for ``jax.nn``: query i is at key i whatever T and S are.
    query_seq_lengths, key_value_seq_lengths : int32 arrays, (B,), or None
        What lies beyond is neither read nor attended, and results of such queries are 0.
    implementation : None or "fa_ext"
        There is one; the argument is there to be passed on.

    Returns
    -------
    array, query's shape (with value's last axis) and dtype; with return_residual also the LSE, (B, T, N), without gradient

    A query that sees no key gets 0, where ``jax.nn`` returns the mean of the values.
    """
    if implementation not in (None, "fa_ext"):
        raise ValueError(f"implementation is {implementation!r}; accepted: None or 'fa_ext'")
    q, k, v = map(jnp.asarray, (query, key, value))
    if not (q.ndim == k.ndim == v.ndim and q.ndim in (3, 4)):
        raise ValueError(f"query, key and value have {q.ndim}, {k.ndim} and {v.ndim} axes; accepted: 4 each, or 3 each")
    single = q.ndim == 3
    q, k, v = (x[None] if single else x for x in (q, k, v))
    size = (q.shape[0], q.shape[1], k.shape[1])
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    causal = "top_left" if is_causal else False
    masks = [] if mask is None else [jnp.asarray(mask)]
    masks += _lengths(query_seq_lengths, "query_seq_lengths", size[0], size[1], 3)
    masks += _lengths(key_value_seq_lengths, "key_value_seq_lengths", size[0], size[2], 2)
    if window is not None and not is_causal and size[1] != size[2]:  # the diagonal of the kernels ends at the last key
        masks.append(_window_mask(size[1], size[2], *window))
        window = None
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.dtype not in (q.dtype, jnp.float32):
            bias = bias.astype(q.dtype if q.dtype == jnp.float64 else jnp.float32)
    made = attention(
        q, k, v, causal=causal, scale=scale, window=window, bias=bias, layout="bshd",
        mask=functools.reduce(jnp.logical_and, masks) if masks else None, return_lse=return_residual,
    )  # fmt: skip
    out, lse = made if return_residual else (made, None)
    if not return_residual:
        return out[0] if single else out
    lse = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))
    return (out[0], lse[0]) if single else (out, lse)


def _lengths(lengths, name, batch, extent, axis):
    """A mask of the positions below each length, along an axis of (B, 1, T, S) counted from 1 at its end."""
    if lengths is None:
        return []
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"{name} has shape {lengths.shape} and dtype {lengths.dtype}; accepted: ({batch},), int32")
    seen = jnp.arange(extent) < lengths[:, None]
    return [seen[:, None, :, None] if axis == 3 else seen[:, None, None, :]]


def _window_mask(queries, keys, left, right):
    ahead = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    return (ahead >= -left) & (ahead <= right)
