"""Online softmax in NumPy, tile by tile as a kernel does it: once right, and once for each mistake that was made before.

Every function takes scores (B, H, Sq, Sk) with -inf at excluded keys and values (B, H, Sk, Dv), both float32, and
returns (out, lse). Tiles are TILE keys wide; WARPS warps share a tile where that matters.
"""

import numpy as np

TILE = 32
WARPS = 4
FACTOR = np.float32(np.log2(np.e))


def tiles(s, v):
    for begin in range(0, s.shape[-1], TILE):
        yield s[..., begin : begin + TILE], v[:, :, begin : begin + TILE]


def state(s, v):
    """Running maximum, sum and unnormalised output before the first tile."""
    rows = (*s.shape[:-1], 1)
    return np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32), np.zeros((*s.shape[:-1], v.shape[-1]), np.float32)


def finish(peak, total, out):
    empty = total == 0
    with np.errstate(divide="ignore", over="ignore"):
        lse = np.where(empty, -np.inf, peak + np.log(np.where(empty, 1, total)))
        return np.where(empty, 0, out / np.where(empty, 1, total)), lse[..., 0]


def safe(peak):
    """The maximum that is subtracted: 0 while no key was visible, so that -inf minus -inf never happens."""
    return np.where(peak == -np.inf, np.float32(0), peak)


def exact(s, v):
    """m' = max(m, max s); l' = l e^(m - m') + sum e^(s - m'); O' = O e^(m - m') + e^(s - m') V. One state a row."""
    peak, total, out = state(s, v)
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        p = np.exp(s_tile - safe(new))
        alpha = np.exp(peak - safe(new))
        total = total * alpha + p.sum(-1, keepdims=True)
        out = out * alpha + p @ v_tile
        peak = new
    return finish(peak, total, out)


def clamped_exponentials(s, v):
    """exp(max(x, -10)) "against underflow": what should vanish, excluded keys too, keeps a weight of e^-10, and the
    rescaling of a state whose maximum rises by more than 10 is short."""
    peak, total, out = state(s, v)
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        p = np.exp(np.maximum(s_tile - safe(new), -10))
        alpha = np.exp(np.maximum(peak - safe(new), -10))
        total = total * alpha + p.sum(-1, keepdims=True)
        out = out * alpha + p @ v_tile
        peak = new
    return finish(peak, total, out)


def isfinite_fallback(s, v):
    """No maximum is subtracted; where a sum is not finite or 0, "1" is used in its place."""
    total, out = state(s, v)[1:]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for s_tile, v_tile in tiles(s, v):
            p = np.exp(s_tile)
            p = np.where(np.isfinite(p), p, 1)
            total = total + p.sum(-1, keepdims=True)
            out = out + p @ v_tile
        total = np.where(np.isfinite(total) & (total > 0), total, 1)
        out = np.where(np.isfinite(out), out, 0)
        return out / total, np.log(total)[..., 0]


def skipped_rescale(s, v):
    """Where e^(m - m') is not in (0, 1) - underflow at a rising maximum included - the old state is kept as it is."""
    peak, total, out = state(s, v)
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        p = np.exp(s_tile - safe(new))
        alpha = np.exp(peak - safe(new))
        alpha = np.where((alpha > 1e-10) & np.isfinite(alpha), alpha, 1)
        total = total * alpha + p.sum(-1, keepdims=True)
        out = out * alpha + p @ v_tile
        peak = new
    return finish(peak, total, out)


def state_of_each_warp(s, v):
    """Each warp keeps a maximum of its own columns, but all add into one output, rescaled by whichever warp came last;
    the sum is that of warp 0 in its own scale, times the number of warps."""
    rows = (*s.shape[:-1], 1)
    peaks = [np.full(rows, -np.inf, np.float32) for _ in range(WARPS)]
    totals = [np.zeros(rows, np.float32) for _ in range(WARPS)]
    out = state(s, v)[2]
    for s_tile, v_tile in tiles(s, v):
        for w in range(WARPS):
            mine = slice(w * TILE // WARPS, (w + 1) * TILE // WARPS)
            if s_tile[..., mine].shape[-1] == 0:
                continue
            new = np.maximum(peaks[w], s_tile[..., mine].max(-1, keepdims=True))
            p = np.exp(s_tile[..., mine] - safe(new))
            alpha = np.exp(peaks[w] - safe(new))
            totals[w] = totals[w] * alpha + p.sum(-1, keepdims=True)
            out = (out * alpha if w == WARPS - 1 else out) + p @ v_tile[:, :, mine]
            peaks[w] = new
    return finish(peaks[0], totals[0] * WARPS, out)


def stale_sum(s, v):
    """The output is divided by the sum as it was before the last tile."""
    peak, total, out = state(s, v)
    before = total
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        p = np.exp(s_tile - safe(new))
        alpha = np.exp(peak - safe(new))
        before = total * alpha
        total = before + p.sum(-1, keepdims=True)
        out = out * alpha + p @ v_tile
        peak = new
    return finish(peak, np.where(before > 0, before, total), out)


def sum_without_rescale(s, v):
    """The output is rescaled when the maximum rises, the sum is not."""
    peak, total, out = state(s, v)
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        p = np.exp(s_tile - safe(new))
        total = total + p.sum(-1, keepdims=True)
        out = out * np.exp(peak - safe(new)) + p @ v_tile
        peak = new
    return finish(peak, total, out)


def masked_as_zero(s, v):
    """Excluded keys score 0 instead of -inf: harmless while the visible scores are large, wrong when they are not."""
    return exact(np.where(s == -np.inf, np.float32(0), s), v)


def forgotten_rounding(s, v):
    """In base 2, weights are 2^(s f - c) by a fused multiply-add, with c the rounded product of the maximum and the factor f; what
    came before is rescaled by 2^(m f - c'), which forgets the rounding of the c before, and a large c is off by more than an exponent
    holds."""

    def power(x, c):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp2((x.astype(np.float64) * FACTOR - c).astype(np.float32))

    peak, total, out = state(s, v)
    for s_tile, v_tile in tiles(s, v):
        new = np.maximum(peak, s_tile.max(-1, keepdims=True))
        c = safe(new) * FACTOR
        p, alpha = power(s_tile, c), power(peak, c)
        with np.errstate(over="ignore", invalid="ignore"):
            total = total * alpha + p.sum(-1, keepdims=True)
            out = out * alpha + p @ v_tile
        peak = new
    return finish(peak, total, out)


MISTAKES = (clamped_exponentials, isfinite_fallback, skipped_rescale, state_of_each_warp, stale_sum, sum_without_rescale,
            masked_as_zero, forgotten_rounding)  # fmt: skip
