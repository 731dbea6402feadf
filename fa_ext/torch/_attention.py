"""attention(): the differentiable call, and the way each call takes."""

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.utils.checkpoint import checkpoint

from .._operands import AXES, DIFFERENTIABLE, OPERANDS, OPTIONS, STATE, given_options, takes_options
from . import _ops
from ._eager import _transformed, differentiable
from ._options import ARRAYS, OTHERS, Options, bounds, forward, index_arrays, refuse_layout, refuse_layouts
from ._serving import attend, refuse_others, traced

_HALVES = (torch.float16, torch.bfloat16)
_any_autocast = torch._C._is_any_autocast_enabled
_OPTIONS, _DIFFERENTIABLE = frozenset(OPTIONS), frozenset(DIFFERENTIABLE)
#: The options with axes that may have extent 1, and those of q's dtype or float32.
_BROADCAST = frozenset(name for name in OPTIONS if any(axis.one for axis in AXES[name]))
#: How many of their last axes keep their extent.
_KEPT = {name: sum(not axis.one for axis in AXES[name]) for name in _BROADCAST}
_FLOATING = frozenset(name for name in OPTIONS if OPERANDS[name].dtypes == "q's dtype or float32")
#: The options of most calls, by layout, causal and deterministic: what makes them takes a tenth of such a call's way to the core.
_PLAIN = {
    (layout, causal): tuple(Options(causal, None, None, 0.0, layout, 0.0, None, False, deterministic) for deterministic in (False, True))
    for layout in ("bhsd", "bshd")
    for causal in (False, True, "bottom_right")
}


@takes_options
def attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, cu_seqlens_q=None, seqlens_q=None, max_seqlen_q=None,
    cu_seqlens_k=None, seqlens_k=None, page_table=None, k_range=None, positions=None, segments=None, layout=None, out=None,
    return_lse=False, return_max_logit=False, check=None, dropout_p=0.0, deterministic=None, kernel=None, batch_invariant=False, **arrays,
):  # fmt: skip
    """Attention with gradients in q, k, v, bias and sinks, also through the LSE.

    Parameters
    ----------
    q, k, v : Tensor
        (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv), or with axes 1 and 2 swapped for ``layout="bshd"``; float16,
        bfloat16, float32, or float64 on the CPU. H is a multiple of Hk.
        Packed sequences have three axes, (T, H, D), as in ``fa_ext.attention``.
    causal, scale, window, softcap, bias, mask, sinks, alibi, intervals, layout, check, kernel, batch_invariant
        As in ``fa_ext.attention``. ``kernel`` names the forward kernel; FA_EXT_KERNEL_BACKWARD that of the backward pass.
        alibi has no gradient.
    cu_seqlens_q, seqlens_q, cu_seqlens_k, seqlens_k, k_range, positions : Tensor of int32
        Sequences of any length, as in ``fa_ext.attention``. int64 is converted. A write into one of them before the backward pass
        is an error of torch's. Gradients of rows of no sequence are 0.
    segments : (Tensor, Tensor) of int32
        Ids of documents, as in ``fa_ext.attention``; ``documents`` is faster for those that lie one behind the other.
    max_seqlen_q : int
        With cu_seqlens_q, a promise that no sequence has more queries, as in ``fa_ext.attention``. No gradient, and no dropout.
    page_table : Tensor of int32
        Paged keys, as in ``fa_ext.attention``. No gradient, and no dropout.
    out : Tensor or (Tensor, Tensor)
        Where the result goes, or the result and the LSE. No gradient, and no dropout.
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials, (B, H, Sq), for packed q (H, T), float32 (float64 for float64).
    return_max_logit : bool
        Also return, as the last, the largest scale * (q . k) of each head over the pairs that see each other, (H,), float32: -inf
        where there are none. It has no gradient, and the gradients of such a call have no derivative. Not with page_table, out or
        max_seqlen_q.
    dropout_p : float
        Probability that a weight is dropped, 0 to 1. What is dropped is drawn from torch's generator of q's device: anew at
        each call and at each replay of a CUDA graph. What a checkpoint or a compiler computes again drops the same. Pairs count
        within their sequence: packed and padded sequences drop the same.
    deterministic : bool or None
        Whether gradients have the same bits from run to run; None follows ``torch.are_deterministic_algorithms_enabled()``.

    Returns
    -------
    Tensor, or a tuple of Tensors with ``return_lse`` or ``return_max_logit``
        (B, H, Sq, Dv), (B, Sq, H, Dv) or (T, H, Dv), q's dtype, without gaps. (B, H, Sq, Dv) has its axes in memory in the
        order of q's, head_dim innermost, so that after q = x.transpose(1, 2) its own transpose(1, 2) is contiguous; results of
        ``layout="bshd"``, of packed q and with ``page_table`` are contiguous. Gradients have the order of what they are gradients of.

    Raises
    ------
    ValueError, TypeError, BufferError
        As ``fa_ext.attention``: for arguments that do not fit, before anything is computed. ValueError where a gradient is
        wanted that there is not.
    fa_ext.UnsupportedError
        Where no kernel takes the call.
    NotImplementedError
        For forward-mode derivatives (jvp).

    Under autocast q, k and v are cast to its dtype; bias and sinks stay. The backward pass runs without autocast. A second
    derivative, and gradients for several cotangents at once (``is_grads_batched``), are composed of torch's operations and
    take memory for every pair of query and key; over sequences they wait for the device. ``torch.func.vmap`` of sequences is a
    call an element. Under torch.compile the call is the operator ``torch.ops.fa_ext.attention``, over sequences
    ``torch.ops.fa_ext.varlen``; ``return_max_logit`` makes it ``torch.ops.fa_ext.logits``, compiled or not. With ``page_table``,
    ``out`` or ``max_seqlen_q`` it is ``torch.ops.fa_ext.attention_out``, and autocast
    leaves its arguments as they are, so that no cache is copied.
    """
    through_op = traced(q, k, v, others=arrays.values()) if arrays else traced(q, k, v)
    if type(return_max_logit) is not bool:
        raise TypeError(f"return_max_logit has type {type(return_max_logit).__name__}; accepted: True or False")
    through_op = through_op or return_max_logit
    if through_op:
        refuse_others(q=q, k=k, v=v)
        refuse_others(optional=True, **arrays)
    if type(return_lse) is not bool:
        raise TypeError(f"return_lse has type {type(return_lse).__name__}; accepted: True or False")
    serves = (
        q.dim() == 3 or k.dim() == 3 or page_table is not None or seqlens_k is not None or seqlens_q is not None
        or cu_seqlens_q is not None or cu_seqlens_k is not None or k_range is not None or positions is not None
        or segments is not None
    )  # fmt: skip
    if serves or out is not None or max_seqlen_q is not None:
        indices = index_arrays(k_range, segments, {
            "cu_seqlens_q": cu_seqlens_q, "seqlens_q": seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqlens_k": seqlens_k,
            "page_table": page_table, "positions": positions,
        }, through_op)  # fmt: skip
        if page_table is not None or out is not None or max_seqlen_q is not None:
            if dropout_p:
                raise ValueError(f"dropout_p is {dropout_p}; accepted with page_table, out or max_seqlen_q: 0.0")
            if return_max_logit:
                raise ValueError("return_max_logit is True; accepted with page_table, out or max_seqlen_q: False")
            return attend(
                q, k, v, given_options(arrays), indices, causal=causal, window=window, scale=scale, softcap=softcap,
                max_seqlen_q=max_seqlen_q, layout=layout, check=check, kernel=kernel, batch_invariant=batch_invariant, out=out,
                return_lse=return_lse, through_op=through_op,
            )  # fmt: skip
        serves = len(indices) > 0 or q.dim() == 3 or k.dim() == 3  # not for (None, None) as k_range
    layout = layout or "bhsd"
    differentiated = False
    if arrays:
        arrays, differentiated = _prepare(arrays, through_op)
    if through_op or _any_autocast():
        q, k, v, arrays = _autocast(q, k, v, arrays)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif type(deterministic) is not bool:
        raise TypeError(f"deterministic has type {type(deterministic).__name__}; accepted: True, False or None")
    if type(dropout_p) is not float or dropout_p:
        state = _dropout_state(dropout_p, (q, k, v, *arrays.values()), through_op)
        if state is not None:
            arrays[STATE] = state
    if serves:
        arrays = {**arrays, **indices} if arrays else indices
    if through_op:
        queries = 1 if layout == "bshd" else 2
        left, right, diagonal = bounds(causal, window, None if serves else (q.shape[queries], k.shape[queries]))
        options = left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic
        if return_max_logit:
            out, lse, max_logit = _ops.logits(q, k, v, *options, check, *[arrays.get(name) for name in ARRAYS])
            return (out, lse, max_logit) if return_lse else (out, max_logit)
        if serves:
            out, lse = _ops.varlen(q, k, v, *options, check, *[arrays.get(name) for name in ARRAYS])
        else:
            out, lse = _ops.attention(q, k, v, *options, *[arrays.get(name) for name in OTHERS])
        return (out, lse) if return_lse else out
    if (type(causal) is bool or type(causal) is str and causal == "bottom_right") and scale is window is kernel is check is None and (
        softcap == 0.0 and (layout == "bhsd" or layout == "bshd") and batch_invariant is False and not dropout_p
    ):
        options = _PLAIN[layout, causal][deterministic]
    else:
        options = Options(causal, scale, window, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check)
    wanted = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or differentiated
    )
    try:
        if wanted or _transformed() or forward_ad._current_level >= 0:
            return differentiable(q, k, v, options, arrays, return_lse)
        return forward(q, k, v, options, arrays, return_lse)
    except (BufferError, RuntimeError):
        refuse_layouts(q=q, k=k, v=v, **arrays)
        raise


def _prepare(arrays, through_op):
    """Options as the operator and the core take them, without those that are None; and whether one requires a gradient."""
    differentiated, known = False, True
    for name, x in arrays.items():
        if x is None or name not in _OPTIONS:
            known = False
            continue
        if x.requires_grad:
            differentiated = True
            if name not in _DIFFERENTIABLE and torch.is_grad_enabled():
                raise ValueError(f"{name} requires grad, but has no gradient; pass {name}.detach()")
        if name in _BROADCAST:
            refuse_layout(name, x)
            arrays[name] = _narrowed(x, _KEPT[name]) if through_op or name not in _DIFFERENTIABLE else _reduced(x)
    return arrays if known else given_options(arrays), differentiated


def _autocast(q, k, v, arrays):
    """Where autocast is on for the device: q, k, v in its dtype; a bias or sinks of another half type in float32, which
    holds them exactly. Most calls find q, k and v in that dtype, where ``to`` would take longer than all of this."""
    kind = "cuda" if q.is_cuda else "cpu" if q.is_cpu else None
    if kind is None or not torch.is_autocast_enabled(kind):
        return q, k, v, arrays
    dtype = torch.get_autocast_dtype(kind)
    if not (q.dtype is k.dtype is v.dtype is dtype):
        q, k, v = (x.to(dtype) if x.dtype == torch.float32 or x.dtype in _HALVES else x for x in (q, k, v))
    wide = {n: x.float() for n, x in arrays.items() if n in _FLOATING and x.dtype in _HALVES and x.dtype != q.dtype}
    return q, k, v, arrays | wide


def _dropout_state(p, inputs, through_op):
    """The result of ``_ops.drawn``; None where nothing is dropped. ``inputs``: q and all else that can have a gradient.
    ``through_op``: by an operator."""
    if isinstance(p, bool) or not isinstance(p, (int, float, np.number, torch.SymFloat)):
        raise TypeError(f"dropout_p has type {type(p).__name__}; accepted: a number from 0 to 1")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p is {p}; accepted: 0 to 1")
    if not p:
        return None
    device, mapped = inputs[0].device, _transformed()
    draw = _drawn_by_torch if mapped else _ops.draw if through_op else _ops.drawn
    if not is_dynamo_compiling() or is_exporting() or not torch.is_grad_enabled():
        return draw(device=device)
    differentiated = mapped or any(x.requires_grad for x in inputs)  # vmap hides whether it is
    if not differentiated or not _computed_again():
        return draw(device=device)
    return checkpoint(draw, device=device, use_reentrant=False)  # computed again, it draws the same again


@torch.compiler.assume_constant_result
def _computed_again():
    """Whether the compiler's backward graph may draw again, which it would otherwise do from the generator's state of then.
    A function that takes gradients itself, by torch.func, takes no checkpoint."""
    functorch = torch._C._functorch
    if any(level.key() != functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ()):
        return False
    config, region = torch._functorch.config, torch.fx.traceback.current_meta.get("custom") or {}
    budget = region.get("_region_activation_memory_budget", config.activation_memory_budget)
    return budget < 1 or config.aggressive_recomputation or not config.ban_recompute_not_in_allowlist


def _drawn_by_torch(device):
    """``_ops.drawn`` by functions of torch, which know the randomness that vmap asks for."""
    return torch.nn.functional.pad(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device), (0, 3))


def _narrowed(x, kept=0):
    """Axes of stride 0, but for the last ``kept``, as axes of size 1, so that a gradient is summed over them in the kernel."""
    for axis, stride in enumerate(x.stride()[: x.dim() - kept]):
        if stride == 0 and x.size(axis) > 1:
            x = x.narrow(axis, 0, 1)
    return x


def _reduced(bias):
    """``_narrowed`` for a bias that may have a gradient, whose size would come back in the gradient of ``narrow``: the
    narrow view is taken of the tensor that was expanded. Where the gradient of the expanded tensor itself is wanted, or
    it is not that tensor's view at once, so that another gradient may be wanted on the way, it has its full size."""
    strides = bias.stride()
    if 0 not in strides:
        return bias
    shape = [1 if stride == 0 else size for size, stride in zip(bias.shape, strides, strict=True)]
    if shape == list(bias.shape):
        return bias
    if not (bias.requires_grad and torch.is_grad_enabled()) and not _transformed():
        return _narrowed(bias)
    base = bias._base
    plain = base is not None and base.requires_grad and base.dtype == bias.dtype and not _transformed()
    if not plain or bias.is_leaf or bias.retains_grad or bias._backward_hooks:
        return bias
    edge = torch.autograd.graph.get_gradient_edge(base)
    if bias.grad_fn.name() != "ExpandBackward0" or bias.grad_fn.next_functions[0] != (edge.node, edge.output_nr):
        return bias
    return base.as_strided(shape, bias.stride(), bias.storage_offset())
