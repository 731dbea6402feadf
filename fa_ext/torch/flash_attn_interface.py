"""FlashAttention 3's functions: its names, order of arguments and defaults; behind them, by keyword, FlashAttention 4's.

Arguments that all of them share: ``softmax_scale``, 1 / sqrt(head_dim) unless given; ``causal``, aligned to the last query and the
last key of each sequence; ``window_size``, (left, right) keys around a query's place, -1 or None for no bound; ``softcap``, 0 for
none; ``deterministic``, gradients in one order whatever torch's switch says; ``learnable_sink``, (H,), with a gradient. With
``return_attn_probs``, or ``return_lse``, they return (out, lse): the LSE is natural, -inf in rows without keys, and has a gradient.
``max_seqlen_*``, ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are not read. What there is no such thing as
here (``qv``, ``*_descale``, ``attention_chunk``, ``score_mod`` and the like) raises NotImplementedError.
"""

import torch

from . import _flash_calls as calls
from ._kvcache import with_kvcache
from ._serving import merge

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, *,
    learnable_sink=None, return_lse=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None,
    block_sparse_tensors=None, block_sparse_tensors_bwd=None, gather_kv_indices=None,
):  # fmt: skip
    """Attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): (B, Sq, H, Dv), and the LSE (B, H, Sq)."""
    calls.refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_kv_indices=gather_kv_indices,
    )  # fmt: skip
    calls.refuse_chunk(attention_chunk)
    given = calls.options(causal, window_size, softmax_scale, softcap, sinks=learnable_sink)
    return calls.run(q, k, v, given, deterministic=deterministic, return_lse=bool(return_attn_probs or return_lse))


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hk, D)."""
    if isinstance(qkv, torch.Tensor) and qkv.dim() == 4:
        q, k, v = qkv.split(calls.heads_of(qkv, num_heads_q), 2)
    else:
        q, k, v = calls.unpacked("qkv", qkv, 2, 3)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, *,
    page_table=None, learnable_sink=None, return_lse=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, gather_kv_indices=None, min_seqlen_k=None,
):  # fmt: skip
    """Attention of sequences of any length.

    q is packed, (T, H, D) with ``cu_seqlens_q``, or padded, (B, Sq, H, D); k and v are packed with ``cu_seqlens_k``, padded, or with
    ``page_table`` caches (pages, page_size, Hk, D). ``seqused_q`` and ``seqused_k``, (B,), say how many rows of each sequence
    count; a page table needs seqused_k, and has no gradient. Rows that do not count are 0, and so are their gradients. The LSE
    is (H, T), or (B, H, Sq).
    """
    calls.refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_kv_indices=gather_kv_indices,
    )  # fmt: skip
    calls.refuse_chunk(attention_chunk)
    given = calls.options(
        causal, window_size, softmax_scale, softcap, sinks=learnable_sink,
        cu_seqlens_q=calls.indices("cu_seqlens_q", cu_seqlens_q), cu_seqlens_k=calls.indices("cu_seqlens_k", cu_seqlens_k),
        seqlens_q=calls.indices("seqused_q", seqused_q), seqlens_k=calls.indices("seqused_k", seqused_k),
        page_table=calls.indices("page_table", page_table),
    )  # fmt: skip
    return calls.run(q, k, v, given, deterministic=deterministic, return_lse=bool(return_attn_probs or return_lse))


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Attention of q, (B, Sq, H, D) or packed with ``cu_seqlens_q``, over caches, without gradients; with k and v, it first writes
    them there in place.

    ``fa_ext.torch.flash_attn.flash_attn_with_kvcache`` says what the arguments mean that both have. k and v are packed with
    ``cu_seqlens_k_new``; ``rotary_seqlens``, (B,), are the first positions of rotary in the place of ``cache_seqlens``.
    """
    calls.refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    calls.refuse_chunk(attention_chunk)
    given = calls.options(causal, window_size, softmax_scale, softcap)
    return with_kvcache(
        q, k_cache, v_cache, k, v, given, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, table=page_table,
        table_name="page_table", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
        return_lse=bool(return_softmax_lse),
    )  # fmt: skip


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out, lse) over all keys, of results over parts of them: ``merge`` of out_partial (parts, B, S, H, D) and lse_partial
    (parts, B, S, H), of any D. ``out`` is written where given; lse is (B, S, H)."""
    parts = [lse.transpose(1, 2) for lse in lse_partial.unbind(0)]
    columns = [merge(list(x.unbind(0)), parts, layout="bshd") for x in out_partial.split(256, -1)]  # the core takes 256 columns
    found, lse = columns[0] if len(columns) == 1 else (torch.cat([x for x, _ in columns], -1), columns[0][1])
    if out is not None:
        found = out.copy_(found)
    elif out_dtype is not None:
        found = found.to(out_dtype)
    return found, lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
    window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """None: calls plan themselves from what their index tensors hold on the device."""
