"""The functions of SGLang's copies of FlashAttention, ``sglang.jit_kernel.flash_attention`` and before it ``sgl_kernel.flash_attn``: their
names, order of arguments and defaults."""

from . import _flash_calls as calls
from ._kvcache import with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "is_fa3_supported"]


def is_fa3_supported(device=None):
    """True."""
    return True


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, *, max_seqlen_k=None, out=None,
):  # fmt: skip
    """Attention of q, (B, Sq, H, D) or packed with ``cu_seqlens_q``, over caches, without gradients; with k and v, it first writes
    them there in place. ``sinks``: (H,); the result is written into ``out`` where given.

    The other arguments are those of ``fa_ext.torch.flash_attn_interface.flash_attn_with_kvcache``. ``cu_seqlens_k_new`` without k,
    ``max_seqlen_*``, ``scheduler_metadata``, ``num_splits``, ``pack_gqa``, ``sm_margin`` and the number ``ver`` are not read.
    """
    calls.refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, score_mod=score_mod, aux_tensors=aux_tensors
    )  # fmt: skip
    calls.refuse_chunk(attention_chunk)
    calls.refuse_8_bits(q=q, k_cache=k_cache, v_cache=v_cache)
    calls.refuse_version("ver", ver)
    given = calls.options(causal, window_size, softmax_scale, softcap, sinks=sinks, out=out)
    return with_kvcache(
        q, k_cache, v_cache, k, v, given, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, table=page_table,
        table_name="page_table", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=None if k is None else cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, return_lse=bool(return_softmax_lse),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None, page_table=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0, return_softmax_lse=False, sinks=None, score_mod=None,
    aux_tensors=None, ver=3, *, out=None,
):  # fmt: skip
    """Attention of packed sequences: (T, H, Dv), written into ``out`` where given, which has no gradient then, and with
    ``return_softmax_lse`` the LSE (H, T). ``sinks``: (H,), with a gradient.

    The other arguments are those of ``fa_ext.torch.flash_attn_interface.flash_attn_varlen_func``.
    """
    calls.refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, score_mod=score_mod, aux_tensors=aux_tensors
    )  # fmt: skip
    calls.refuse_chunk(attention_chunk)
    calls.refuse_8_bits(q=q, k=k, v=v)
    calls.refuse_version("ver", ver)
    given = calls.options(
        causal, window_size, softmax_scale, softcap, sinks=sinks, out=out,
        cu_seqlens_q=calls.indices("cu_seqlens_q", cu_seqlens_q), cu_seqlens_k=calls.indices("cu_seqlens_k", cu_seqlens_k),
        seqlens_q=calls.indices("seqused_q", seqused_q), seqlens_k=calls.indices("seqused_k", seqused_k),
        page_table=calls.indices("page_table", page_table),
    )  # fmt: skip
    return calls.run(q, k, v, given, return_lse=bool(return_softmax_lse))
