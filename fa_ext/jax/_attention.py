"""The functions of ``fa_ext.jax`` and their first derivatives."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from .._operands import DIFFERENTIABLE, IDS, OPTIONS, STATE, broadcasts, filled, given_options, takes_options
from . import _arguments as accept
from ._calls import BACKWARD, FORWARD, LOGITS, Call, Options, check, varying
from ._rules import operation


@takes_options
def attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, cu_seqlens_q=None, seqlens_q=None, max_seqlen_q=None,
    cu_seqlens_k=None, seqlens_k=None, k_range=None, positions=None, segments=None, segment_ids=None, dropout=None,
    layout="bhsd", return_lse=False, return_max_logit=False, deterministic=True, kernel=None, kernel_backward=None, batch_invariant=False, **arrays,
):  # fmt: skip
    """Softmax attention: ``fa_ext.attention`` for JAX arrays and tracers, with gradients.

    Parameters
    ----------
    q : array, (B, H, Sq, D), or (B, Sq, H, D) with layout="bshd"; packed sequences: (T, H, D)
        Queries: float16, bfloat16, float32, or float64 (on the CPU, with ``jax_enable_x64``); D is 1 to 256.
    k, v : arrays, (B, Hk, Sk, D) and (B, Hk, Sk, Dv), or as ``layout`` says; packed sequences: (Tk, Hk, D) and (Tk, Hk, Dv)
        Keys and values, of q's dtype; H is a multiple of Hk.
    causal, scale, window, softcap, layout, batch_invariant
        As for ``fa_ext.attention``. They are Python values, no arrays: a new value is a new compilation.
    cu_seqlens_q, seqlens_q, cu_seqlens_k, seqlens_k, positions : int32 arrays, or None
        Sequences of any length, as for ``fa_ext.attention``: q, k and v are packed with ``cu_seqlens_*`` and padded with
        ``seqlens_*`` alone. They may be traced, so other lengths are no new compilation; int64 is converted. They have no gradient.
        In rows of no sequence, results and gradients of q, k and v are 0, and the LSE is -inf.
    max_seqlen_q : int, or None
        With cu_seqlens_q, a promise that no sequence has more queries, as for ``fa_ext.attention``. It is a Python value, so a
        new one is a new compilation, and goes without gradients and segment_ids.
    k_range : (begin, end), int32 arrays, (B,), or None
        Only these keys of each sequence take part; None is no bound.
    segments : (q_ids, k_ids), int32 arrays, (B, Sq) and (B, Sk), or None
        Queries see the keys of their own id alone, as for ``fa_ext.attention``: any ids, in any order. For documents that lie one
        behind the other segment_ids is faster.
    segment_ids : integer array, (B, S), or a pair of one and the same array, or None
        Documents in the rows of q and k, which have equally many: queries see the keys of their own document. Each run of equal
        ids in a row is one, so that an id that comes back begins another; ends of rows end documents. They are sequences, and of
        other arrays only sinks and alibi, (H,), go with them. Dropout counts documents and pairs within them, for which a sharded
        batch is gathered. With layout="bshd" q, k and v are not copied.
    bias : array that broadcasts to (B, H, Sq, Sk), or None
        Added to the scores; q's dtype or float32.
    mask : bool array that broadcasts to (B, H, Sq, Sk), or None
        True: attend. It has no gradient.
    sinks : array, (H,), or None
        Logits that join the softmax's denominator alone; q's dtype or float32.
    alibi : array, (H,) or (B, H), float32, or None
        Slopes of ALiBi, as for ``fa_ext.attention``. They have no gradient.
    intervals : int32 array, (B, H, Sq, 2) or (B, H, Sq, n, 2), or None
        Queries see keys begin <= j < end of one of their n pairs alone, as for ``fa_ext.attention``. They have no gradient.
    dropout : (p, key), (p, state) or None
        Weights become 0 with probability p, a number, as for ``fa_ext.attention``. What is dropped follows from a PRNG key of
        JAX, or from the eight words of ``fa_ext.attention``'s state, uint32 (8,), and counts within each sequence. The backward
        pass drops the same, shards of sharded ``jit`` their parts of one mask, and elements that vmap maps with one key the same
        weights; inside shard_map each shard needs a key of its own.
    return_lse : bool
        Also return the LSE, through which gradients flow too.
    return_max_logit : bool
        Also return, as the last, the largest scale * (q . k) of each head over the pairs that see each other, (H,), float32: -inf
        where there are none. It has no gradient. Not with segment_ids.
    deterministic : bool
        As for ``fa_ext.attention_backward``.
    kernel, kernel_backward : str or None
        Names of ``fa_ext.kernels()`` and ``fa_ext.kernels("backward")`` force these kernels.

    Returns
    -------
    out : array, (B, H, Sq, Dv), (B, Sq, H, Dv) or (T, H, Dv), q's dtype
        0 where a query sees no key.
    lse : array, (B, H, Sq), for packed q (H, T), float32 (float64 for float64)
        With return_lse.

    Raises
    ------
    ValueError, TypeError
        While tracing: an argument is not accepted, in the words of ``fa_ext.attention``.
    jax.errors.JaxRuntimeError
        While running: no kernel of the device takes the call; on the CPU also bad contents of index arrays.
    NotImplementedError
        Second derivatives. Forward-mode differentiation raises JAX's TypeError.

    Bad contents of index arrays, such as a length beyond the rows there are, are an error on the CPU, as everywhere in ``fa_ext``:
    training on wrong lengths should not go on unseen, and a failed computation says which entry is wrong. Where it fails on one of
    several devices, the others wait for it, until XLA ends the process. On a CUDA device, whose host does not wait, bad contents
    hide what they speak of, and ``fa_ext.faults`` tells of them.

    Under sharded ``jit`` the call runs on shards of the batch and of the heads (where the mesh axis divides Hk);
    arrays that are sharded otherwise, and the rows of packed sequences, are gathered first. ``vmap`` of packed sequences is a call
    an element. Where ``jax.set_mesh`` makes mesh axes explicit, results are sharded over them as q is, head_dim apart, and
    gradients as what they are of. ``jax.export`` needs ``DisabledSafetyCheck.custom_call("fa_ext_attention")`` and that of
    ``"fa_ext_attention_backward"``; it does not take a ``jit`` that is sharded over several devices, whose
    ``custom_partitioning`` JAX does not serialise. Symbolic shapes are refused. On JAX 0.5 ``shard_map`` needs ``check_rep=False``.
    """
    options = Options(
        accept.causal(causal),
        None if scale is None else accept.number("scale", scale, "a finite number, or None for 1/sqrt(D)"),
        accept.window(window), accept.number("softcap", softcap, "a finite number >= 0 (0: none)"), accept.layout(layout),
        accept.flag("deterministic", deterministic), accept.kernel("kernel", kernel, "attention"),
        accept.kernel("kernel_backward", kernel_backward, "backward"), accept.flag("batch_invariant", batch_invariant),
        *accept.probability(dropout), max_seqlen_q=accept.count("max_seqlen_q", max_seqlen_q),
    )  # fmt: skip
    return_lse, return_max_logit = accept.flag("return_lse", return_lse), accept.flag("return_max_logit", return_max_logit)
    given = given_options(arrays)
    arrays = accept.arrays({"q": q, "k": k, "v": v} | {name: given[name] for name in OPTIONS if name in given})
    arrays |= accept.indices({"k_range": k_range, "segments": segments}, {
        "cu_seqlens_q": cu_seqlens_q, "seqlens_q": seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqlens_k": seqlens_k,
        "positions": positions,
    })  # fmt: skip
    if segment_ids is not None and return_max_logit:
        raise ValueError("return_max_logit is True, but segment_ids is given; accepted with return_max_logit: cu_seqlens_q")
    if segment_ids is not None:
        if options.max_seqlen_q is not None:
            raise ValueError(f"max_seqlen_q is {max_seqlen_q}, but segment_ids is given; accepted with max_seqlen_q: cu_seqlens_q")
        arrays[IDS] = accept.documents(segment_ids, arrays, options.layout)
        if options.causal is True:
            options = replace(options, causal="bottom_right")
    check(options, arrays, arrays.values())
    arrays = {name: x.reshape(filled(name, x.shape)) if name in OPTIONS and broadcasts(name) else x for name, x in arrays.items()}
    if return_max_logit:  # of each entry, so that shards and mapped calls have their own; of packed queries of all at once
        q = arrays["q"]
        heads = q.shape[1 if q.ndim == 3 or options.layout == "bhsd" else 2]
        arrays[LOGITS] = jnp.full((heads,) if q.ndim == 3 else (q.shape[0], heads), -jnp.inf, jnp.float32)
        arrays = {name: arrays[name] for name in FORWARD if name in arrays}
    if options.dropout:
        arrays[STATE] = accept.state(dropout[1])
    made = _differentiable(options, tuple(arrays), return_lse)(*_vary_alike(list(arrays.values())))
    if return_max_logit:
        *made, logits = made
        logits = jax.lax.stop_gradient(logits if logits.ndim == 1 else jnp.max(logits, axis=0, initial=-jnp.inf))
        return *made, logits
    return made if return_lse else made[0]


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


def _run(call, operands):
    """The results of a call. Where mesh axes are explicit around it XLA's partitioner has them inside; results are sharded over
    them as q is, head_dim apart, and gradients as what they are of."""
    mesh = jax.sharding.get_abstract_mesh() if hasattr(jax.sharding, "auto_axes") else None
    explicit = getattr(mesh, "explicit_axes", ())
    if not explicit:
        return operation(call)(*operands)
    specs = {f"d{name}": jax.typeof(x).sharding.spec for name, x in zip(call.names, operands, strict=True)}
    of_q = tuple(specs["dq"])
    specs["out"] = PartitionSpec(*of_q[:-1], None)
    specs["lse"] = PartitionSpec(*call.of_rows(of_q))
    heads = of_q[call.heads_axis(len(of_q))]
    specs[LOGITS] = PartitionSpec(heads) if len(of_q) == 3 else PartitionSpec(of_q[0], heads)
    results = tuple(specs[name] for name in call.results)
    return jax.sharding.auto_axes(operation(call), axes=explicit, out_sharding=results)(*operands)


@functools.cache
def _differentiable(options: Options, names: tuple[str, ...], wants_lse: bool):
    """The forward call of these operands with its derivative: (out,) or (out, lse), and the maxima where they are an
    operand."""
    outputs, more = 1 + wants_lse, (LOGITS,) * (LOGITS in names)

    @jax.custom_vjp
    def attend(*operands):
        return _run(Call(options, names, (*("out", "lse")[:outputs], *more)), operands)

    def ahead(*primals):
        # Which gradients are wanted is no array: it travels in the structure, as () or None.
        wanted = tuple(() if primal.perturbed else None for primal in primals)
        if options.max_seqlen_q is not None and any(x is not None for x in wanted):
            raise ValueError(f"max_seqlen_q is {options.max_seqlen_q}; accepted where a gradient is wanted: None")
        operands = tuple(primal.value for primal in primals)
        out, lse, *logits = _run(Call(options, names, ("out", "lse", *more)), operands)
        return (*(out, lse)[:outputs], *logits), (operands, out, lse, wanted)

    def back(saved, cotangents):
        operands, out, lse, wanted = saved
        known = {**dict(zip(names, operands, strict=True)), "out": out, "lse": lse}
        known |= {n: x for n, x in zip(("dout", "dlse")[:outputs], cotangents) if not isinstance(x, SymbolicZero)}
        wrt = [n for n, x in zip(names, wanted, strict=True) if x is not None and n in DIFFERENTIABLE]
        if not wrt or not ("dout" in known or "dlse" in known):
            return (None,) * len(names)
        used = tuple(name for name in BACKWARD if name in known)
        results = tuple(f"d{name}" for name in FORWARD if name in wrt)
        made = _run(Call(options, used, results), tuple(known[name] for name in used))
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
        As for ``jax.nn``: query i is at key i whatever T and S are. A side of the window may be None for unbounded, too.
    query_seq_lengths, key_value_seq_lengths : int32 arrays, (B,), or None
        What lies beyond is neither read nor attended, and results of such queries are 0. Lengths beyond T or S count as these.
    implementation : None or "fa_ext"
        There is one; the argument is there to be passed on.

    Returns
    -------
    array, query's shape (with value's last axis) and dtype; with return_residual also the LSE, (B, T, N), without gradient

    A query that sees no key gets 0, where ``jax.nn`` returns the mean of the values.
    """
    if implementation not in (None, "fa_ext"):
        raise ValueError(f"implementation is {implementation!r}; accepted: None or 'fa_ext'")
    is_causal, return_residual = accept.flag("is_causal", is_causal), accept.flag("return_residual", return_residual)
    q, k, v = accept.alike(query, key, value)
    single = q.ndim == 3
    q, k, v = (x[None] if single else x for x in (q, k, v))
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    masks = [] if mask is None else [accept.mask(mask, (batch, heads, queries, keys))]
    lengths = {}
    if query_seq_lengths is not None:
        lengths["seqlens_q"] = jnp.clip(accept.lengths("query_seq_lengths", query_seq_lengths, batch), 0, queries)
    if key_value_seq_lengths is not None:
        lengths["seqlens_k"] = jnp.clip(accept.lengths("key_value_seq_lengths", key_value_seq_lengths, batch), 0, keys)
    window = accept.local_window(local_window_size)
    if window is not None and (any((side or 0) < 0 for side in window) or (not is_causal and (lengths or queries != keys))):
        # The kernels' windows have no negative sides, and without causal= their diagonal ends at the last key of each entry.
        masks.append(_within(*window, queries, keys))
        window = None
    if bias is not None:
        bias = accept.beside(accept.array("bias", bias), q.dtype)
    made = attention(
        q, k, v, causal="top_left" if is_causal else False, scale=scale, window=window, bias=bias, layout="bshd",
        mask=functools.reduce(jnp.logical_and, masks) if masks else None, return_lse=return_residual, **lengths,
    )  # fmt: skip
    out, lse = made if return_residual else (made, None)
    if not return_residual:
        return out[0] if single else out
    lse = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))
    return (out[0], lse[0]) if single else (out, lse)


def _within(left, right, queries, keys):
    """(1, 1, T, S): the keys of a window around key i of query i, whose sides are None where it is unbounded."""
    ahead = (jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None])[None, None]
    farthest = queries + keys
    left, right = (farthest if side is None else max(-farthest, min(side, farthest)) for side in (left, right))
    return (ahead >= -left) & (ahead <= right)
