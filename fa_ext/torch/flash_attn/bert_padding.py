"""Padded batches to packed rows and back: ``flash_attn.bert_padding``'s functions."""

import torch

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def __getattr__(name):
    if name in ("rearrange", "repeat"):  # of einops: what projects import from FlashAttention's module besides
        import einops  # noqa: PLC0415

        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(input, indices):
    """The rows ``indices`` of ``input`` (rows, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """(first_axis_dim, ...): ``values`` at the rows ``indices``, 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input, indices):
    """``index_first_axis``, and ``input`` as it is."""
    return index_first_axis(input, indices), input


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The rows of ``hidden_states`` (B, S, ...) that ``attention_mask`` or ``unused_mask``, (B, S), select.

    Returns
    -------
    rows, indices, cu_seqlens, max_seqlen, seqused
        The rows, packed; their places in the (B * S) rows; where each sequence begins, (B + 1,) of int32; the longest sequence,
        an int; how many rows of each sequence ``attention_mask`` selects, (B,) of int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    used = lengths if unused_mask is None else attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_starts(lengths), used


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """``unpad_input`` of rows that hold several sequences, without ``seqused``. ``attention_mask_in_length`` (B, S): the lengths of a
    row's sequences in order, then zeros; the sequences lie behind one another from the row's first place on."""
    used = attention_mask_in_length.sum(-1, keepdim=True)
    indices = (torch.arange(attention_mask_in_length.shape[1], device=used.device) < used).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_starts(lengths)


def pad_input(hidden_states, indices, batch, seqlen):
    """(batch, seqlen, ...) of packed rows: what ``unpad_input`` took them from, 0 where it took none."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _starts(lengths):
    """Where each sequence begins, and the longest of them."""
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return starts, lengths.max().item() if len(lengths) else 0
