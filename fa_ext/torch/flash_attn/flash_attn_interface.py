"""FlashAttention 2's functions: its names, order of arguments and defaults.

Arguments that all of them share: ``dropout_p``, the probability that a weight is dropped, from torch's generator;
``softmax_scale``, 1 / sqrt(head_dim) unless given; ``causal``, aligned to the last query and the last key of each sequence;
``window_size``, (left, right) keys around a query's place, -1 for no bound; ``softcap``, 0 for none; ``alibi_slopes``, (H,) or
(B, H) of float32, without a gradient; ``deterministic``, gradients in one order whatever torch's switch says. With
``return_attn_probs`` they return (out, lse, None): the LSE is natural, -inf in rows without keys, and has a gradient.
``max_seqlen_*`` and ``num_splits`` are not read.
"""

from .. import _flash_calls as calls
from .._kvcache import with_kvcache

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


def _run(q, k, v, given, dropout_p, deterministic, return_attn_probs):
    if return_attn_probs and dropout_p:
        raise NotImplementedError(
            "return_attn_probs is True with dropout_p > 0, whose weights fa_ext does not return; fa_ext.dropout_keep shows what a "
            "call drops"
        )
    found = calls.run(q, k, v, given, dropout_p=dropout_p, deterministic=deterministic, return_lse=bool(return_attn_probs))
    return (*found, None) if return_attn_probs else found


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention of q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): (B, Sq, H, Dv), and the LSE (B, H, Sq)."""
    given = calls.options(causal, window_size, softmax_scale, softcap, alibi=alibi_slopes)
    return _run(q, k, v, given, dropout_p, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of kv (B, Sk, 2, Hk, D)."""
    k, v = calls.unpacked("kv", kv, 2, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of qkv (B, S, 3, H, D)."""
    q, k, v = calls.unpacked("qkv", qkv, 2, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Attention of packed sequences, q (T, H, D), k (Tk, Hk, D) and v (Tk, Hk, Dv): (T, H, Dv), and the LSE (H, T).

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and of k and v those that cu_seqlens_k says. Rows of
    no sequence are 0, and so are their gradients. With ``block_table``, (B, blocks), k and v are caches
    (blocks, block_size, Hk, D), of which cu_seqlens_k says the lengths; there is no gradient then.
    """
    cu_seqlens_q, cu_seqlens_k = calls.indices("cu_seqlens_q", cu_seqlens_q), calls.indices("cu_seqlens_k", cu_seqlens_k)
    if block_table is None:
        keys = {"cu_seqlens_k": cu_seqlens_k}
    else:
        keys = {"seqlens_k": cu_seqlens_k.diff(), "page_table": calls.indices("block_table", block_table)}
    given = calls.options(causal, window_size, softmax_scale, softcap, alibi=alibi_slopes, cu_seqlens_q=cu_seqlens_q, **keys)
    return _run(q, k, v, given, dropout_p, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` of kv (Tk, 2, Hk, D)."""
    k, v = calls.unpacked("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` of qkv (T, 3, H, D)."""
    q, k, v = calls.unpacked("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention of q (B, Sq, H, D) over caches, without gradients; with k and v, it first writes them there in place.

    Parameters
    ----------
    k_cache, v_cache : Tensor
        (batch of the cache, capacity, Hk, D), or with ``block_table`` (blocks, block_size, Hk, D).
    k, v : Tensor
        (B, new, Hk, D), written behind the first ``cache_seqlens`` keys.
    rotary_cos, rotary_sin : Tensor
        (positions, R / 2): new keys are rotated at cache_seqlens, cache_seqlens + 1 and so on, and so are queries if the call
        is causal or has a window; else all of them at cache_seqlens.
    cache_seqlens : int or Tensor of (B,)
        Keys in the cache before the call.
    cache_batch_idx, cache_leftpad : Tensor of (B,)
        Which row of the cache a sequence has, and its first key. ``cache_leftpad`` with rotary_cos is refused.
    block_table : Tensor of (B, blocks)
        Blocks of each sequence in order; with ``cache_batch_idx`` those of each row of the cache.

    Returns
    -------
    (B, Sq, H, Dv), and with ``return_softmax_lse`` the LSE (B, H, Sq).
    """
    given = calls.options(causal, window_size, softmax_scale, softcap, alibi=alibi_slopes)
    return with_kvcache(
        q, k_cache, v_cache, k, v, given, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, table=block_table,
        table_name="block_table", return_lse=bool(return_softmax_lse),
    )  # fmt: skip
