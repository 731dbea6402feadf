"""The functions of vLLM's copy of FlashAttention, ``vllm.vllm_flash_attn``: its names, order of arguments and defaults."""

import torch

from . import _flash_calls as calls

__all__ = ["fa_version_unsupported_reason", "flash_attn_varlen_func", "get_scheduler_metadata", "is_fa_version_supported"]


def is_fa_version_supported(fa_version, device=None):
    """True for 2, 3 and 4: one function answers to all of them."""
    calls.refuse_version("fa_version", fa_version)
    return True


def fa_version_unsupported_reason(fa_version, device=None):
    """None."""
    calls.refuse_version("fa_version", fa_version)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
    window_size=(-1, -1), has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """None: calls plan themselves from what their index tensors hold on the device."""


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None,
    k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0,
    cp_tot_seqused_k=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None,
    dynamic_causal=None,
):  # fmt: skip
    """Attention of packed queries (T, H, D) over packed keys, with ``cu_seqlens_k``, or over caches (blocks, block_size, Hk, D), with
    ``block_table`` and ``seqused_k``: (T, H, Dv), written into ``out`` where given, and with ``return_softmax_lse`` the LSE (H, T).

    ``s_aux``: sinks (H,). ``max_seqlen_*``, ``scheduler_metadata``, ``num_splits`` and the number ``fa_version`` are not read, nor are
    ``q_descale``, ``k_descale`` and ``v_descale``, which mean something for 8-bit tensors alone; those are refused.
    """
    calls.refuse(
        q_v=q_v, cp_tot_seqused_k=cp_tot_seqused_k, output_scale=output_scale, mask_mod=mask_mod, aux_tensors=aux_tensors,
        block_sparse_tensors=block_sparse_tensors, aux_tensor_leading_dims=aux_tensor_leading_dims, dynamic_causal=dynamic_causal,
    )  # fmt: skip
    if cp_world_size != 1:
        raise NotImplementedError(f"cp_world_size is {cp_world_size}, which fa_ext does not implement; accepted: 1")
    if return_attn_probs:
        raise NotImplementedError("return_attn_probs is True, which fa_ext does not implement; return_softmax_lse returns the LSE")
    calls.refuse_8_bits(q=q, k=k, v=v)
    calls.refuse_version("fa_version", fa_version)
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ValueError("cu_seqlens_k and seqused_k: accepted is one of them")
    if block_table is not None and seqused_k is None:
        raise ValueError("block_table needs seqused_k")
    given = calls.options(
        causal, window_size, softmax_scale, softcap, alibi=alibi_slopes, sinks=s_aux, out=out,
        cu_seqlens_q=calls.indices("cu_seqlens_q", cu_seqlens_q), cu_seqlens_k=calls.indices("cu_seqlens_k", cu_seqlens_k),
        seqlens_k=calls.indices("seqused_k", seqused_k), page_table=calls.indices("block_table", block_table),
    )  # fmt: skip
    return calls.run(q, k, v, given, dropout_p=dropout_p, deterministic=deterministic, return_lse=bool(return_softmax_lse))
