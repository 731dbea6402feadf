"""Rotary embedding: ``flash_attn.layers.rotary``'s functions and its module.

They are composed of torch's operations, which compute in float32, round once and have gradients of every order. ``cos`` and ``sin``
are (positions, R / 2) and rotate the first R columns; columns i and i + R / 2 are a pair, or 2 i and 2 i + 1 if ``interleaved``.
"""

import torch

from ..._flash_calls import heads_of
from ..._rotary import at, joined, packed_positions, turned

__all__ = [
    "RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch", "rotate_half",
]  # fmt: skip


def rotate_half(x, interleaved=False):
    """(-b, a) of each pair (a, b) of columns."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (B, S, H, D), rotated by ``cos`` and ``sin`` (S, R / 2) or (B, S, R / 2)."""
    return joined(x, turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved))


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x (B, S, H, D), or packed (T, H, D) with ``cu_seqlens``, rotated at its tokens' places in their sequences.

    ``seqlen_offsets``, an int or (B,), is added to the places. Packed tokens beyond the tables, or of no sequence, stay as
    they are.
    ``inplace`` writes into x, where autograd lets it, and returns x; ``max_seqlen`` is not read.
    """
    columns = turned(x, *_rows(x, cos, sin, seqlen_offsets, cu_seqlens), interleaved)
    return _write(x, columns) if inplace else joined(x, columns)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Rotates q and k of qkv in place: (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hk, D). ``cos_k``, ``sin_k``: for k."""
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; accepted: (batch, seqlen, 3, heads, head_dim)")
        parts = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads_q, heads_k, _ = heads_of(qkv, num_heads_q)
        parts = qkv[:, :, :heads_q], qkv[:, :, heads_q : heads_q + heads_k]  # not by split, whose views autograd lets nobody write
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    for x, table in zip(parts, tables, strict=True):
        _write(x, turned(x, *_rows(x, *table, seqlen_offsets), interleaved))
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k of kv (B, S, 2, H, D) in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}; accepted: (batch, seqlen, 2, heads, head_dim)")
    k = kv[:, :, 0]
    _write(k, turned(k, *_rows(k, cos, sin, seqlen_offsets), interleaved))
    return kv


def _write(x, columns):
    x[..., : columns.shape[-1]].copy_(columns)
    return x


def _rows(x, cos, sin, offsets, cu_seqlens=None):
    """Both tables' rows for the tokens of x, with an axis for its heads."""
    if cu_seqlens is not None:
        return at(cos, sin, packed_positions(cu_seqlens, x.shape[0], offsets))
    if isinstance(offsets, torch.Tensor):
        return at(cos, sin, offsets[:, None] + torch.arange(x.shape[1], device=x.device))
    if not 0 <= offsets <= cos.shape[0] - x.shape[1]:
        raise ValueError(
            f"cos has {cos.shape[0]} rows for {x.shape[1]} tokens and seqlen_offsets {offsets}; accepted: a row for each place"
        )
    return (table[offsets : offsets + x.shape[1]].unsqueeze(-2) for table in (cos, sin))


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of q and k in place, at the angles place / base ** (2 i / dim); with ``scale_base``, xPos.

    Tables of cosines and sines are kept and made anew for longer sequences, other devices and other dtypes; positions and angles
    are float32 whatever ``pos_idx_in_fp32``.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None, *, pos_idx_in_fp32=True):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _steps(self, device):
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device=None):
        return 1.0 / self.base ** (self._steps(device) / self.dim)

    def _compute_scale(self, device=None):
        return (self._steps(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        kept = self._cos_cached
        if kept is not None and seqlen <= self._seq_len_cached and (kept.device, kept.dtype) == (device, dtype):
            if not (self.training and kept.is_inference()):
                return
        self._seq_len_cached = seqlen
        places = torch.arange(seqlen, device=device, dtype=torch.float32)
        rounded = self.inv_freq.dtype != torch.float32  # the module was cast; the angles of far places need all bits
        angles = torch.outer(places, self._compute_inv_freq(device) if rounded else self.inv_freq.to(device))
        tables = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = (x.to(dtype) for x in tables)
            return
        scale = self._compute_scale(device) if self.scale.dtype != torch.float32 else self.scale.to(device)
        scale = scale ** ((places - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = ((x * scale).to(dtype) for x in tables)
        self._cos_k_cached, self._sin_k_cached = ((x / scale).to(dtype) for x in tables)

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotates qkv, as ``apply_rotary_emb_qkv_`` takes it, or q (B, S, H, D) and kv (B, S, 2, H, D), and returns it or both.
        ``seqlen_offset``: an int, or (B,), which needs ``max_seqlen``, the number of positions that the tables shall have."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        elif self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor, and there are no tables yet; accepted: with max_seqlen")
        of_q = self._cos_cached, self._sin_cached
        of_k = of_q if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *of_q, *of_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, *of_q, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, *of_k, self.interleaved, seqlen_offset)
