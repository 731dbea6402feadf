"""Attention of one sequence at a time in torch's float64, with FlashAttention's options and axes."""

import torch

LENGTHS_Q, LENGTHS_K = (5, 0, 1, 8), (7, 3, 0, 2)
H, HK, D, DV = 4, 2, 8, 6


def draw(*shapes, dtype=torch.float64, grad=False, seed=0):
    """A tensor of each shape."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in found] if grad else found


def packed(**options):
    """q, k and v of sequences of ``LENGTHS_Q`` and ``LENGTHS_K``."""
    return draw((sum(LENGTHS_Q), H, D), (sum(LENGTHS_K), HK, D), (sum(LENGTHS_K), HK, DV), **options)


def padded(**options):
    return draw((2, 5, H, D), (2, 7, HK, D), (2, 7, HK, DV), **options)


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def attend(q, k, v, *, causal=False, window_size=(-1, -1), softcap=0.0, slopes=None, scale=None, keep=None, p=0.0, begin=0, sinks=None):
    """(out (Sq, H, Dv), lse (H, Sq)) of q (Sq, H, D), k (Sk, Hk, D), v (Sk, Hk, Dv). ``slopes``: (H,); ``keep``: (H, Sq, Sk), the
    weights that dropout at rate ``p`` keeps; ``begin``: the first key that counts."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    away = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * away.abs()
    left, right = window_size
    seen = torch.ones_like(away, dtype=torch.bool)
    if causal or right >= 0:
        seen &= away <= (0 if causal else right)
    if left >= 0:
        seen &= away >= -left
    seen &= torch.arange(k.shape[0])[None] >= begin
    s = torch.where(seen, s, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)), -1)
    found = torch.isfinite(s).any(-1)
    rows = torch.where(found[..., None], s, 0.0)
    lse = torch.where(found, rows.logsumexp(-1), -torch.inf) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    weights = torch.where(found[..., None], rows.softmax(-1), 0.0)[..., : k.shape[0]]
    if keep is not None:
        weights = weights * keep / (1 - p)
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def each(q, k, v, lengths_q, lengths_k, slopes=None, keep=None, **options):
    """``attend`` of packed sequences: (out (T, H, Dv), lse (H, T)). ``slopes``: (H,) or (B, H); ``keep``: one for each sequence."""
    outs, lses = [], []
    for b, (rows, keys, values) in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)):
        of_b = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse = attend(rows, keys, values, slopes=of_b, keep=None if keep is None else keep[b], **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def batch(q, k, v, slopes=None, keep=None, **options):
    """``attend`` of a batch: (out (B, Sq, H, Dv), lse (B, H, Sq))."""
    found = [
        attend(*row, slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
               keep=None if keep is None else keep[b], **options)
        for b, row in enumerate(zip(q, k, v, strict=True))
    ]  # fmt: skip
    return tuple(torch.stack(x) for x in zip(*found, strict=True))


def close(got, wanted):
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    tolerance = 1e-9 if got.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def rotate(x, cos, sin, position, interleaved):
    """x (H, D), rotated at one position, a pair of columns at a time."""
    x, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x
