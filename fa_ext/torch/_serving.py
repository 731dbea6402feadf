"""Serving: attention over pages, into memory of the caller's or with ``max_seqlen_q``, ``append``, ``merge``, ``documents`` and
``document_intervals``.

Eager calls go straight to the core. What a compiled graph holds are ``torch.ops.fa_ext.attention_out``, ``.append``, ``.merge``,
``.documents`` and ``.document_intervals``: the first two return nothing and write arguments that they declare, so that a graph keeps caches in place. None
has a derivative.
"""

from typing import List, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _core
from .._operands import INDICES, OPTIONS
from ._eager import _transformed
from ._library import operator, wrote
from ._options import checked_causal, count_of, ends_of, lse_shape, named, refuse_layout, refuse_layouts, with_pairs

PLAIN = (torch.Tensor, torch.nn.Parameter)
is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._is_tracing
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def traced(*tensors, others=()):
    """Whether something looks at the operators of a call: the compiler, torch.jit's tracer, a dispatch mode (fake tensors,
    selective checkpointing, counters), a subclass of Tensor (which what is no tensor counts as), or the meta device. ``others``:
    tensors or None."""
    if is_compiling() or _dispatch_modes() > 0 or _jit_tracing():
        return True
    for x in tensors:
        if type(x) not in PLAIN:
            return True
    for x in others:
        if x is not None and type(x) not in PLAIN:
            return True
    return tensors[0].is_meta


def refuse_others(optional=False, **given):
    """Raises a TypeError for an argument that is no strided tensor, nor None if those are ``optional``."""
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            refuse_layout(name, x)
        elif not (optional and x is None):
            raise TypeError(f"{name} has type {type(x).__name__}; accepted: torch.Tensor{' or None' if optional else ''}")


def refuse_derivatives(what, **tensors):
    """Raises a ValueError for an argument that wants a gradient, and a NotImplementedError for one that torch.func's transforms
    wrap or that carries a tangent."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and getattr(x, "requires_grad", False):
                raise ValueError(f"{name} requires grad, but {what} has no derivative; call it under torch.no_grad(), or pass {name}.detach()")
    if not (_transformed() or forward_ad._current_level >= 0) or is_compiling():
        return
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and (_wrapped(x) or forward_ad.unpack_dual(x).tangent is not None):
            raise NotImplementedError(f"{name} is a transform's (vmap, grad, jvp), which {what} does not have; accepted: plain tensors")


def _plainly(function):
    """The core's function; inside a transform of torch.func, which would wrap the results that the core has torch make, outside of it."""
    if not _transformed():
        return function

    def call(*args, **options):
        with torch._C._DisableFuncTorch():
            return function(*args, **options)

    return call


def _numbered(name, tensors):
    """The tensors of one argument by names for messages."""
    return {f"{name}[{n}]": x for n, x in enumerate(tensors)}


def _given(**options):
    return {name: x for name, x in options.items() if x is not None}


# ---- attention ----


def _nothing(*args):
    """Results of an operator that only writes."""


#: The tensors of attention besides q, k, v and its results.
_OTHERS = (*INDICES, *OPTIONS)


@operator("attention_out", _nothing, mutates=("out", "lse"), others=_OTHERS)
def attention_out(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Optional[Tensor], causal: str, left: Optional[int], right: Optional[int],
    scale: Optional[float], softcap: float, layout: Optional[str], check: Optional[bool], kernel: Optional[str],
    batch_invariant: bool, max_seqlen_q: Optional[int], *others: Optional[Tensor],
) -> None:  # fmt: skip
    given = _given(scale=scale, layout=layout, check=check, kernel=kernel, max_seqlen_q=max_seqlen_q)
    given = with_pairs(given | named(_OTHERS, others))
    if left is not None or right is not None:
        given["window"] = (left, right)
    _core.attention(
        q, k, v, out=out if lse is None else (out, lse), causal=_CAUSAL.get(causal, causal), softcap=softcap,
        batch_invariant=batch_invariant, **given,
    )  # fmt: skip


#: ``causal`` of the operator, where it is not the call's own.
_CAUSAL: dict[str, bool | str] = {"no": False, "equal": True}

_INTO = "attention with page_table, out= or max_seqlen_q"


def attend(
    q, k, v, options, indices, *, causal, window, scale, softcap, max_seqlen_q, layout, check, kernel, batch_invariant, out, return_lse,
    through_op,
):  # fmt: skip
    """``attention`` over pages, into ``out``, or with ``max_seqlen_q``. ``options`` and ``indices``: arrays that are given, by name; ``through_op``: by
    the operator."""
    refuse_derivatives(_INTO, q=q, k=k, v=v, out=out, **options)
    pair = isinstance(out, (tuple, list))
    if pair:
        refuse_derivatives(_INTO, **_numbered("out", out))
    if not through_op:
        given = _given(scale=scale, window=window, max_seqlen_q=max_seqlen_q, layout=layout, check=check, kernel=kernel, out=out)
        given = with_pairs(given | options | indices)
        try:
            found = _plainly(_core.attention)(
                q, k, v, causal=causal, softcap=softcap, batch_invariant=batch_invariant, return_lse=return_lse, **given
            )
        except BufferError:
            refuse_layouts(q=q, k=k, v=v, **given)
            raise
        if out is not None:
            wrote(*(out if pair else (out,)))
        return found
    left, right = ends_of(window)
    said = checked_causal(causal)
    said = said if isinstance(said, str) else "equal" if said else "no"
    if pair and len(out) != 2:
        raise ValueError(f"out has {len(out)} items; accepted: a tensor, or two for the result and the LSE")
    out, lse = out if pair else (out, None)
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if lse is None and return_lse:
        lse = q.new_empty(lse_shape(q, layout), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    arrays = options | indices
    attention_out(
        q, k, v, out, lse, said, left, right, scale, softcap, layout, check, kernel, batch_invariant,
        count_of("max_seqlen_q", max_seqlen_q), *[arrays.get(name) for name in _OTHERS],
    )  # fmt: skip
    return (out, lse) if pair or return_lse else out


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
    refuse_derivatives("append", k_cache=k_cache, v_cache=v_cache, k=k, v=v, q=q, out=out)
    if isinstance(rotary, (tuple, list)):
        refuse_derivatives("append", **_numbered("rotary", rotary))
    if not traced(k_cache, k):
        given = _given(
            q=q, rotary=rotary, page_table=page_table, seqlens_k=seqlens_k, cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q,
            slots=slots, positions=positions, out=out, check=check, kernel=kernel,
        )  # fmt: skip
        found = _plainly(_core.append)(k_cache, v_cache, k, v, layout=layout, interleaved=interleaved, **given)
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
    refuse_derivatives("merge", sinks=sinks, **_numbered("outs", outs), **_numbered("lses", lses))
    if outs and traced(*outs):
        return merge_op(list(outs), list(lses), sinks, layout, kernel)
    return _plainly(_core.merge)(outs, lses, **_given(sinks=sinks, layout=layout, kernel=kernel))


# ---- documents ----


def _fake_documents(ids, count, *rest):
    return ids.new_empty(count + 1, dtype=torch.int32)


@operator("documents", _fake_documents)
def documents_op(ids: Tensor, count: int, check: Optional[bool], kernel: Optional[str]) -> Tensor:
    if ids.numel() == count == 0:  # which the core's count cannot say
        return ids.new_zeros(1, dtype=torch.int32)
    return _core.documents(ids, count=count, **_given(check=check, kernel=kernel))


def documents(ids, *, count=None, check=None, kernel=None):
    """``cu_seqlens`` of documents from the id of each token: ``fa_ext.documents``, whose arguments, shapes and errors these are. Under
    torch.compile the call is the operator ``torch.ops.fa_ext.documents``."""
    if traced(ids):
        return documents_op(ids, ids.numel() if count is None else count, check, kernel)
    return _plainly(_core.documents)(ids, **_given(count=count, check=check, kernel=kernel))


def _fake_intervals(ids, spans, *rest):
    first = spans if ids is None else ids
    if first.dim() != 2:
        raise ValueError(f"{'spans' if ids is None else 'ids'} has {first.dim()} axes; accepted: 2")
    return first.new_empty((first.shape[0], 1, first.shape[1], 2), dtype=torch.int32)


@operator("document_intervals", _fake_intervals)
def intervals_op(ids: Optional[Tensor], spans: Optional[Tensor], causal: bool, window: Optional[int]) -> Tensor:
    return _core.document_intervals(ids, spans=spans, causal=causal, window=window)


def document_intervals(ids=None, *, spans=None, causal=True, window=None):
    """``intervals`` of ``attention`` from the document and the span of each token: ``fa_ext.document_intervals``, whose arguments, shapes and errors
    these are. Under torch.compile the call is the operator ``torch.ops.fa_ext.document_intervals``."""
    given = [x for x in (ids, spans) if x is not None]
    if given and traced(*given):
        refuse_others(optional=True, ids=ids, spans=spans)
        return intervals_op(ids, spans, causal, window)
    return _plainly(_core.document_intervals)(ids, spans=spans, causal=causal, window=window)
