"""fa_ext as an attention implementation of Hugging Face transformers: the attention function and its mask function."""

import types

import torch

from ._attention import attention


def register_transformers():
    """Registers fa_ext with transformers under the name "fa_ext".

    After it ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa_ext")`` and
    ``model.set_attn_implementation("fa_ext")`` run attention in fa_ext, with gradients: grouped heads as they are, sliding
    windows, softcap (Gemma 2) and sinks (gpt-oss) without a mask in memory. Padding is a mask of a key; packed sequences,
    static caches and overlays have transformers' own mask. Calling it again changes nothing.

    A sliding window reaches attention from the module, as transformers' flash implementations have it.

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
    AttentionMaskInterface.register("fa_ext", _mask)


def _attend(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, s_aux=None,
    is_causal=None, position_bias=None, cache=None, **unused,
):  # fmt: skip
    """query (B, H, Sq, D), key and value (B, Hk, Sk, D) -> ((B, Sq, H, D), None).

    ``attention_mask``: None, or (B, Sk) that says which keys are no padding, beside what the module says of causality and
    window; or (B, 1 or H, Sq, Sk), which says everything.
    """
    if cache is not None:
        raise NotImplementedError("attn_implementation='fa_ext' has no paged cache; accepted: cache=None")
    options = {}
    mask, bias = None, position_bias
    if attention_mask is None or attention_mask.dim() == 2:
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :].to(torch.bool)
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            options["causal"] = "bottom_right"
        if sliding_window is not None:
            options["window"] = (sliding_window - 1, None if "causal" in options else sliding_window - 1)
    else:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.float()
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.float()
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, softcap=softcap or 0.0, bias=bias,
        mask=mask, sinks=s_aux, dropout_p=dropout, layout="bshd", **options,
    )  # fmt: skip
    return out, None


def _mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, local_size=None,
    allow_is_causal_skip=True, allow_is_bidirectional_skip=False, **rest,
):  # fmt: skip
    """What ``_attend`` needs for a pattern: None or the (B, Sk) mask of padding where causality, window and bounds say the
    rest, else the mask of all pairs (B, 1, Sq, Sk)."""
    # From the module itself: torch 2.11's compiler takes no import out of `transformers`, whose modules are made on demand.
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        is_tracing,
        prepare_padding_mask,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    mask_function = mask_function or causal_mask_function
    bidirectional = mask_function is bidirectional_mask_function
    causal = mask_function is causal_mask_function or (
        local_size is not None and _is_same(mask_function, sliding_window_causal_mask_function(local_size))
    )
    # A static cache has a tensor as its offset, and keys beyond the last query.
    ends_together = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    if (causal and allow_is_causal_skip and ends_together) or (bidirectional and allow_is_bidirectional_skip):
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None:
            return None
        padding = padding[:, kv_offset : kv_offset + kv_length]
        return None if not is_tracing(padding) and bool(padding.all()) else padding
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **rest,
    )  # fmt: skip


def _is_same(one, other):
    """Whether two values are the same: functions by their code and what they have closed over, tuples by their items."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        held = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
        return one.__code__ is other.__code__ and _is_same(*held)
    return type(one) is type(other) is int and one == other
