"""Rotary embedding in torch's operations: computed in float32 or wider, rounded once, differentiable."""

import torch


def turned(x, cos, sin, interleaved):
    """The first R columns of x, (..., D), rotated. ``cos`` and ``sin``: (..., R / 2), which broadcast to x's axes. Columns i and
    i + R / 2 are a pair, or 2 i and 2 i + 1 if ``interleaved``."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"cos has {half} columns; accepted: 1 to {x.shape[-1] // 2}, half of x's {x.shape[-1]}")
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin, columns = cos.to(wide), sin.to(wide), x[..., : 2 * half].to(wide)
    a, b = (columns[..., 0::2], columns[..., 1::2]) if interleaved else columns.chunk(2, -1)
    pair = a * cos - b * sin, a * sin + b * cos
    return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)


def joined(x, columns):
    """x with ``columns`` in the place of its first ones, as a new tensor."""
    return columns if columns.shape == x.shape else torch.cat((columns, x[..., columns.shape[-1] :]), -1)


def at(cos, sin, positions):
    """The rows of both tables at ``positions``, with an axis for heads; positions outside of the tables do not rotate."""
    inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None, None]
    rows = positions.clamp(0, cos.shape[0] - 1)
    return torch.where(inside, cos[rows].unsqueeze(-2), 1), torch.where(inside, sin[rows].unsqueeze(-2), 0)


def packed_positions(cu_seqlens, tokens, offsets, count_tokens=True):
    """Positions of packed tokens: the sequence's offset, plus the token's place in the sequence if ``count_tokens``; -1 for
    tokens of no sequence. ``offsets``: (B,), or one number for all."""
    starts, token = cu_seqlens.long(), torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    known = (sequence >= 0) & (sequence < len(starts) - 1)
    sequence = sequence.clamp(0, max(len(starts) - 2, 0))
    found = offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets
    return torch.where(known, found + (token - starts[sequence] if count_tokens else 0), -1)
