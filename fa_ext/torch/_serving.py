"""Serving: attention over sequences of any length and caches, ``append`` and ``merge``.

Eager calls go straight to the core. What a compiled graph holds are ``torch.ops.fa_ext.attention_out``, ``.append`` and
``.merge``: the first two return nothing and write arguments that they declare, so that a graph keeps caches in place. None
has a derivative.
"""

from typing import List, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor

from .. import _core
from ._library import operator, wrote

PLAIN = (torch.Tensor, torch.nn.Parameter)
is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def traced(*tensors):
    """Whether something looks at the operators of a call: the compiler, a dispatch mode (fake tensors, selective
    checkpointing, counters), a subclass of Tensor, or the meta device."""
    if is_compiling() or _dispatch_modes() > 0 or tensors[0].is_meta:
        return True
    for x in tensors:  # noqa: SIM110, a generator takes longer
        if type(x) not in PLAIN:
            return True
    return False


def refuse_gradients(what, **tensors):
    """Raises a ValueError for an argument that wants a gradient."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                raise ValueError(f"{name} requires grad, but {what} has no derivative; call it under torch.no_grad(), or pass {name}.detach()")


def _given(**options):
    return {name: x for name, x in options.items() if x is not None}


# ---- attention ----


def _nothing(*args):
    """Results of an operator that only writes."""


@operator("attention_out", _nothing, mutates=("out", "lse"))
def attention_out(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Optional[Tensor], bias: Optional[Tensor], mask: Optional[Tensor],
    sinks: Optional[Tensor], alibi: Optional[Tensor], cu_seqlens_q: Optional[Tensor], seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor], seqlens_k: Optional[Tensor], page_table: Optional[Tensor], k_begin: Optional[Tensor],
    k_end: Optional[Tensor], positions: Optional[Tensor], causal: str, left: Optional[int], right: Optional[int],
    scale: Optional[float], softcap: float, layout: Optional[str], check: Optional[bool], kernel: Optional[str],
    batch_invariant: bool,
) -> None:  # fmt: skip
    given = _given(
        bias=bias, mask=mask, sinks=sinks, alibi=alibi, cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q,
        cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k, page_table=page_table, positions=positions, scale=scale,
        layout=layout, check=check, kernel=kernel,
    )  # fmt: skip
    if k_begin is not None or k_end is not None:
        given["k_range"] = (k_begin, k_end)
    if left is not None or right is not None:
        given["window"] = (left, right)
    _core.attention(
        q, k, v, out=out if lse is None else (out, lse), causal=_CAUSAL.get(causal, causal), softcap=softcap,
        batch_invariant=batch_invariant, **given,
    )  # fmt: skip


#: ``causal`` of the operator, where it is not the call's own.
_CAUSAL: dict[str, bool | str] = {"no": False, "equal": True}


def attend(
    q, k, v, *, bias, mask, sinks, alibi, cu_seqlens_q, seqlens_q, cu_seqlens_k, seqlens_k, page_table, k_range, positions,
    causal, window, scale, softcap, layout, check, kernel, batch_invariant, out, return_lse,
):  # fmt: skip
    """``attention`` of sequences, or into ``out``."""
    refuse_gradients("attention over sequences, or into out=,", q=q, k=k, v=v, bias=bias, sinks=sinks, alibi=alibi)
    pair = isinstance(out, (tuple, list))
    if not traced(q, k, v):
        given = _given(
            bias=bias, mask=mask, sinks=sinks, alibi=alibi, cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q,
            cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k, page_table=page_table, k_range=k_range, positions=positions,
            scale=scale, window=window, layout=layout, check=check, kernel=kernel, out=out,
        )  # fmt: skip
        found = _core.attention(
            q, k, v, causal=causal, softcap=softcap, batch_invariant=batch_invariant, return_lse=return_lse, **given
        )
        if out is not None:
            wrote(*(out if pair else (out,)))
        return found
    out, lse = out if pair else (out, None)
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if lse is None and return_lse:
        lse = q.new_empty(_lse_shape(q, layout), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    begin, end = k_range or (None, None)
    left, right = window or (None, None)
    said = causal if isinstance(causal, str) else "equal" if causal else "no"
    attention_out(
        q, k, v, out, lse, bias, mask, sinks, alibi, cu_seqlens_q, seqlens_q, cu_seqlens_k, seqlens_k, page_table, begin, end,
        positions, said, left, right, scale, softcap, layout, check, kernel, batch_invariant,
    )  # fmt: skip
    return (out, lse) if pair or return_lse else out


def _lse_shape(q, layout):
    if q.dim() == 3:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else q.shape[:3]


# ---- append ----


@operator("append", _nothing, mutates=("k_cache", "v_cache", "out"))
def append_op(
    k_cache: Tensor, v_cache: Optional[Tensor], k: Tensor, v: Optional[Tensor], q: Optional[Tensor], out: Optional[Tensor],
    cos: Optional[Tensor], sin: Optional[Tensor], page_table: Optional[Tensor], seqlens_k: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor], seqlens_q: Optional[Tensor], slots: Optional[Tensor], positions: Optional[Tensor],
    layout: str, interleaved: bool, check: Optional[bool], kernel: Optional[str],
) -> None:  # fmt: skip
    given = _given(
        q=q, out=out, rotary=None if cos is None else (cos, sin), page_table=page_table, seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q, slots=slots, positions=positions, check=check, kernel=kernel,
    )  # fmt: skip
    _core.append(k_cache, v_cache, k, v, layout=layout, interleaved=interleaved, **given)


def append(
    k_cache, v_cache, k, v, *, layout, page_table=None, seqlens_k=None, cu_seqlens_q=None, seqlens_q=None, slots=None, q=None,
    rotary=None, interleaved=False, positions=None, out=None, check=None, kernel=None,
):  # fmt: skip
    """Writes keys and values into caches in place; returns the rotated q where q is given, else None.

    All arguments, shapes and errors are those of ``fa_ext.append``. Under torch.compile the call is the operator
    ``torch.ops.fa_ext.append``, which declares what it writes.

    Raises
    ------
    ValueError
        Also for a tensor that requires grad while grad mode is on: there is no derivative.
    """
    refuse_gradients("append", k_cache=k_cache, v_cache=v_cache, k=k, v=v, q=q, out=out)
    if not traced(k_cache, k):
        given = _given(
            q=q, rotary=rotary, page_table=page_table, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q,
            slots=slots, positions=positions, out=out, check=check, kernel=kernel,
        )  # fmt: skip
        found = _core.append(k_cache, v_cache, k, v, layout=layout, interleaved=interleaved, **given)
        wrote(k_cache, v_cache, out)
        return found
    if out is None and q is not None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cos, sin = rotary or (None, None)
    append_op(
        k_cache, v_cache, k, v, q, out, cos, sin, page_table, seqlens_k, cu_seqlens_q, seqlens_q, slots, positions, layout,
        interleaved, check, kernel,
    )  # fmt: skip
    return out


# ---- merge ----


def _fake_merge(outs, lses, *rest):
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


@operator("merge", _fake_merge)
def merge_op(
    outs: List[Tensor], lses: List[Tensor], sinks: Optional[Tensor], layout: Optional[str], kernel: Optional[str]
) -> Tuple[Tensor, Tensor]:
    return _core.merge(outs, lses, **_given(sinks=sinks, layout=layout, kernel=kernel))


def merge(outs, lses, *, sinks=None, layout=None, kernel=None):
    """(out, lse) over all keys, of results over parts of the keys: ``fa_ext.merge``, whose arguments, shapes and errors these
    are. Under torch.compile the call is the operator ``torch.ops.fa_ext.merge``.

    Raises
    ------
    ValueError
        Also for a tensor that requires grad while grad mode is on: there is no derivative.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(parts):
            refuse_gradients("merge", **{f"{name}[{n}]": x})
    refuse_gradients("merge", sinks=sinks)
    if outs and traced(*outs):
        return merge_op(list(outs), list(lses), sinks, layout, kernel)
    return _core.merge(outs, lses, **_given(sinks=sinks, layout=layout, kernel=kernel))
