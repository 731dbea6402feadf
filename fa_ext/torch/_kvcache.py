"""flash_attn_with_kvcache of FlashAttention 2 and 3: ``append``, then ``attention``."""

import torch

from . import _flash_calls as calls
from ._rotary import at, joined, packed_positions, turned
from ._serving import append, refuse_derivatives


def with_kvcache(
    q, k_cache, v_cache, k, v, given, *, cos, sin, interleaved, cache_seqlens, cache_batch_idx, cache_leftpad, table, table_name,
    cu_seqlens_q=None, cu_seqlens_k_new=None, rotary_seqlens=None, return_lse=False,
):  # fmt: skip
    """Writes k and v, where given, behind the first ``cache_seqlens`` keys of each sequence, and attends to all keys.
    ``given``: by ``_flash_calls.options``; ``table_name``: what the caller names ``table``."""
    refuse_derivatives("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    _refuse_mixtures(k, v, cos, sin, cache_seqlens, cache_leftpad)
    of_q, of_new = calls.indices("cu_seqlens_q", cu_seqlens_q), calls.indices("cu_seqlens_k_new", cu_seqlens_k_new)
    batch = q.shape[0] if of_q is None else of_q.shape[0] - 1
    table, of_cache = calls.indices(table_name, table), calls.indices("cache_batch_idx", cache_batch_idx)
    if of_cache is not None:
        table = of_cache[:, None] if table is None else table.index_select(0, of_cache)  # a row without a table is one page
    elif table is None and k_cache.shape[0] > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    pages = {} if table is None else {"page_table": table}
    lengths = _lengths(cache_seqlens, batch, k_cache, table)
    if k is not None:
        before, lengths = lengths, lengths + (k.shape[1] if of_new is None else of_new.diff())
        written = {"layout": "bshd", "seqlens_k": lengths, "cu_seqlens_q": of_new} | pages
        if cos is None:
            append(k_cache, v_cache, k, v, **written)
        else:
            counted = bool(given["causal"]) or given["window"] is not None
            first = before
            if rotary_seqlens is not None:
                first = calls.indices("rotary_seqlens", rotary_seqlens)
                written["positions"] = _positions(k, of_new, first).int()
            written |= {"rotary": (cos, sin), "interleaved": bool(interleaved)}
            one_each = of_q is None and q.shape[1] == 1
            if (counted or one_each) and cu_seqlens_q is cu_seqlens_k_new and q.shape[:-2] == k.shape[:-2]:
                q = append(k_cache, v_cache, k, v, q=q, **written)
            else:
                append(k_cache, v_cache, k, v, **written)
                q = joined(q, turned(q, *at(cos, sin, _positions(q, of_q, first, counted)), interleaved))
    given = given | pages
    if lengths is not None:
        given["seqlens_k"] = lengths
    if of_q is not None:
        given["cu_seqlens_q"] = of_q
    if cache_leftpad is not None:
        given["k_range"] = (calls.indices("cache_leftpad", cache_leftpad), None)
    return calls.run(q, k_cache, v_cache, given, return_lse=return_lse)


def _refuse_mixtures(k, v, cos, sin, cache_seqlens, cache_leftpad):
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if k is None else 'k'} is given without {'k' if k is None else 'v'}; accepted: both, or neither")
    if k is not None and cache_seqlens is None:
        raise ValueError("k is given without cache_seqlens, which says where it goes")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together; accepted: both, or neither")
    if cos is not None and k is None:
        raise ValueError("rotary_cos is given without k; accepted: new keys, which are rotated with q")
    if cos is not None and cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad is given with rotary_cos, which fa_ext does not implement; accepted: one of them")


def _lengths(cache_seqlens, batch, k_cache, table):
    """Keys of each sequence before the call; None for the whole of a cache without a table."""
    if cache_seqlens is None and table is None:
        return None
    if cache_seqlens is None:
        cache_seqlens = table.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, (int, torch.SymInt)) and not isinstance(cache_seqlens, bool):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    return calls.indices("cache_seqlens", cache_seqlens)


def _positions(x, starts, first, counted=True):
    """Position of each token: ``first`` of its sequence, plus its place there if ``counted``."""
    if starts is not None:
        return packed_positions(starts, x.shape[0], first, counted)
    places = torch.arange(x.shape[1], device=x.device)
    return first[:, None] + (places if counted else torch.zeros_like(places))
