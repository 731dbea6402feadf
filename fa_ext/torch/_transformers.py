"""fa_ext as an attention implementation of Hugging Face transformers: the attention function."""

import functools
import sys
import warnings

import torch

from ._attention import attention
from ._documents import Packed, documents_of
from ._masks import Pattern, both, make_mask

#: Keywords of transformers that say nothing to attention, and why.
_HARMLESS = {
    # The mask says it: a model makes it by the same module and configuration.
    "sliding_window", "cache_position", "token_type_ids", "mm_token_type_ids",
    # The lengths of documents are in cu_seq_lens_q and cu_seq_lens_k, which bound them.
    "max_length_q", "max_length_k",
    # Values that a model returns beside its result, keeps, or computes from it.
    "use_cache", "return_dict", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep",
    # Embeddings have taken it.
    "grid_thw",
    # fa_ext.torch's gradients follow torch.use_deterministic_algorithms().
    "deterministic",
}  # fmt: skip


def register_transformers():
    """Registers fa_ext with transformers under the name "fa_ext".

    After it ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_ext")`` and
    ``model.set_attn_implementation("fa_ext")`` run attention in fa_ext, with gradients: grouped heads as they are, causal and
    sliding windows, softcap (Gemma 2) and sinks (gpt-oss) without a mask in memory. Padding is a mask of a key, and in a
    static cache each query has an interval of keys; overlays have a mask of all pairs. Calling it again changes nothing.

    The mask alone says who sees whom, as in eager attention: ``module.is_causal`` and ``sliding_window`` are not looked at.

    Packed documents see only themselves. ``cu_seq_lens_q`` and ``cu_seq_lens_k`` tell them, or ``seq_idx``, or, in causal
    attention over a batch of 1 without padding, ``position_ids`` that begin again: as transformers' flash implementations have
    it, with and without a cache. They are packed sequences, without a mask in memory. Only ``seq_idx`` is a mask of all pairs,
    and so are positions that begin again under ``use_cache=False``, of which transformers makes a mask itself.

    ``output_attentions=True`` raises, since there are no weights to return, and so does every keyword that attention is given
    and does not know. Above a head_dim of 256 transformers' sdpa runs, or with softcap or sinks the model's eager attention; a
    warning says so once.

    Raises
    ------
    ImportError
        Without transformers 5.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise ImportError(
            "register_transformers() needs transformers 5 or newer; run: pip install 'transformers>=5'", name="transformers"
        ) from None
    AttentionInterface.register("fa_ext", _attend)
    AttentionMaskInterface.register("fa_ext", make_mask)


def _attend(
    module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, softcap=None, s_aux=None, position_bias=None,
    is_causal=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, seq_idx=None, indices=None, **others,
):  # fmt: skip
    """query (B, H, Sq, D), key and value (B, Hk, Sk, D) -> ((B, Sq, H, D), None).

    ``attention_mask`` is None, ``make_mask``'s, or of axes that broadcast to (B, H, Sq, Sk): boolean, or added to the scores.
    It says everything of who sees whom, as in eager; documents and ``indices`` (B, Sq, n), the keys a query sees of them all,
    narrow it. ``is_causal`` counts where a caller sets it and there is no mask.
    """
    for name, given in others.items():
        if name not in _HARMLESS and given is not None and given is not False:
            said = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            raise ValueError(
                f"attn_implementation='fa_ext' does not know {name}={said}; accepted: None, or attn_implementation='eager'"
            )
    queries, keys = query.shape[2], key.shape[2]
    pattern, bias = _pattern_and_bias(attention_mask, queries, keys, is_causal)
    documents = documents_of(attention_mask, pattern, query, keys, cu_seq_lens_q, cu_seq_lens_k, seq_idx, position_ids)
    plain = indices is None and position_bias is None and bias is None and pattern.seen is None and pattern.intervals is None
    sequences = isinstance(documents, Packed) and plain and max(query.shape[3], value.shape[3]) <= 256
    if documents is not None and not sequences:
        seen = both(pattern.seen, documents.seen(pattern.left, pattern.right))
        pattern = pattern._replace(seen=seen, left=None, right=None)
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=query.device).scatter(2, indices.long(), True)
        pattern = pattern._replace(seen=both(pattern.seen, chosen[:, None]))
    if max(query.shape[3], value.shape[3]) > 256:
        return _attend_elsewhere(
            module, query, key, value, pattern, bias, dropout=dropout, scaling=scaling, softcap=softcap, s_aux=s_aux,
            position_bias=position_bias,
        )  # fmt: skip
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.float()
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.float()
    options = {"causal": "bottom_right"} if pattern.right == 0 else {}
    if pattern.left is not None or pattern.right:
        options["window"] = (pattern.left, pattern.right)
    options |= {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "dropout_p": dropout}
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if sequences:
        starts = {"cu_seqlens_q": documents.starts_q, "cu_seqlens_k": documents.starts_k}
        return attention(query[0], key[0], value[0], **starts, **options)[None], None
    return attention(query, key, value, bias=bias, mask=pattern.seen, intervals=pattern.intervals, layout="bshd", **options), None


def _pattern_and_bias(mask, queries, keys, is_causal):
    """The pairs that a mask allows, and the bias that it adds to the scores."""
    if mask is None:
        if not is_causal or queries == 1:
            return Pattern(None, None, None), None
        if queries != keys:
            raise ValueError(
                f"is_causal is True without attention_mask, for {queries} queries and {keys} keys; accepted: as many, or a mask"
            )
        return Pattern(None, None, 0), None
    if mask.dim() < 3:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; accepted: what broadcasts to (batch, heads, queries, keys)"
        )
    pattern = getattr(mask, "fa_ext_pattern", None)
    if pattern is not None and mask.shape[2] == queries and mask.shape[3] == keys:
        return pattern, None
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return Pattern(mask, None, None), None
    return Pattern(None, None, None), mask


def _attend_elsewhere(module, query, key, value, pattern, bias, softcap, s_aux, **arguments):
    """The call by transformers' sdpa, or by the model's own eager attention where sdpa lacks what the call has."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    name = "transformers' sdpa" if not softcap and s_aux is None else "the model's eager attention"
    if (softcap or s_aux is not None) and eager is None:
        raise NotImplementedError(
            f"head_dim is {query.shape[3]} and that of value {value.shape[3]}, with softcap or sinks, in a {type(module).__name__} "
            "without eager attention of its own; accepted: 1 to 256"
        )
    _say(query.shape[3], value.shape[3], name)
    mask = pattern.added_to(bias, query, key)
    if name == "transformers' sdpa":
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **arguments)
    arguments = {name: x for name, x in arguments.items() if x is not None}
    return eager(module, query, key, value, mask, softcap=softcap, s_aux=s_aux, **arguments)


@torch.compiler.assume_constant_result
def _say(dim, dim_v, name):
    """`_say_once`, which a compiler calls while it compiles, since a graph has no warnings."""
    _say_once(dim, dim_v, name)


@functools.cache
def _say_once(dim, dim_v, name):
    warnings.warn(
        f"attn_implementation='fa_ext': head_dim is {dim} and that of value {dim_v}; accepted: 1 to 256. {name} runs in fa_ext's "
        "place (this is said once)",
        stacklevel=4,
    )
