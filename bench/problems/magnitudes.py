"""q and k whose scores have a given magnitude, and whose float64 answer no rounding of float32 decides.

Every product and every partial sum of q . k is exact in float32, whatever the order: a score is ``2^unit * n`` with a whole
``|n| < 2^24``, and each column adds an 8-bit digit of n, which float16 and bfloat16 hold too. So the scores of keys are
alike, or they differ by what float32 resolves. ``reference.plain(..., exact=True)`` says what is lost by rounding such a
score once, in float32 to base 2.

The products of these scores with the factor to base 2 are not exact: float32 loses a quarter of a unit in the last place of
each, or more, and all of them are rounded to one side. So what a kernel forgets of such a rounding does not cancel.
"""

from __future__ import annotations

import math

import numpy as np

#: ``constant``: all keys alike, so that the result is the mean of the values. ``rising``: scores that grow from level to level by a
#: few natural units in all, so that each rescale of a running maximum counts; ``falling``: from the last level to the first.
#: ``outgrown``: all alike but one in the middle, as heavy as a thousand others: a maximum that is looked for only when weights
#: have outgrown it is looked for there. ``doubling``: each level twice the one before, or half of it where scores are negative, so
#: that rows cross the borders between ways of computing. ``normal``: small whole numbers in all columns.
KINDS = ("constant", "rising", "falling", "outgrown", "doubling", "normal")

#: log2 of the scores that tests draw: where the rounding of a rescale shows, where float32 resolves no unit, and beyond.
EXPONENTS = (10, 12, 14, 16, 18, 20, 22, 24, 25, 26, 28, 31, 40, 64, 99)
LEVEL = 16  # keys: tiles of any size end at a level's end
_DOUBLINGS = 31
_RISE, _OUTGROWN = 4.0, 7.25  # natural units, where float32 resolves them
_DIGITS, _DIGIT = 3, 8  # of n, and bits of one
#: The largest and smallest exponents of two that q's entries may have, and those of k as the factors of a digit.
_EXPONENTS = {"float16": ((-14, 15), (-14, 8))}
_WIDE = ((-60, 60), (-60, 60))
#: The factors of queries, one after the other: rows of other magnitudes lie in the same tile.
_ROWS = (1.0, 0.5, 1.0, 0.0)


class Beyond(ValueError):
    """The dtype, or head_dim, cannot hold the operands of such scores."""


def known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    return kind


def scaled(kind: str, dim: int, scale: float | None) -> dict:
    """The option of a call's scale, where scores of this kind need one: a power of two near the given or default scale, which rounds no
    score, so that a kernel may round it before or after the factor to base 2."""
    if kind in ("constant", "doubling"):
        return {}
    scale = dim**-0.5 if scale is None else scale
    return {"scale": math.copysign(2.0 ** round(math.log2(abs(scale))), scale)}


def slopes(exponent: int, shape) -> np.ndarray:
    """Of ALiBi, beside such scores: some 100 of the units that float32 resolves, and 64 at least: the distance decides."""
    return np.resize((1, -1), shape) * 2.0 ** max(6, abs(exponent) - 16)


def holds(kind: str, exponent: int, dim: int, dtype: str, scale: float) -> bool:
    """Whether ``operands`` of this head_dim and dtype can be made."""
    try:
        operands(kind, exponent, (1, dim), (2, dim), dtype, scale, 0)
    except Beyond:
        return False
    return True


def operands(kind: str, exponent: int, q_shape, k_shape, dtype: str, scale: float, seed: int):
    """(q, k), float32 of (..., Sq, D) and (..., Sk, D), whose largest scores lie from 2^exponent to 2^(exponent + 1), or with a
    negative exponent from -2^-exponent down; ``normal`` has scores of both signs and around 2^|exponent|. Raises Beyond."""
    rng = np.random.default_rng([seed, 17])
    sign = (1 if exponent > 0 else -1) * (1 if scale > 0 else -1)
    raw = abs(exponent) - math.frexp(abs(scale))[1] + 1  # of q . k
    if kind == "normal":
        return _normal(rng, raw, q_shape, k_shape, dtype)
    keys = k_shape[-2]
    level = np.arange(keys) // LEVEL
    levels = -(-keys // LEVEL)
    unit, natural = raw - 23, math.ldexp(abs(scale), raw - 23)
    if kind == "outgrown":
        level = (np.arange(keys) == keys // 2).astype(int)
        n = _whole(2, max(1, round(_OUTGROWN / natural)), sign, scale)
    elif kind in ("rising", "falling"):
        n = _whole(levels, max(1, int(_RISE / max(1, levels) / natural)), sign, scale)[:: 1 if kind == "rising" else -1]
    else:
        n = np.resize(_whole(1, 0, sign, scale), levels)
    if kind == "doubling":
        unit = unit - np.minimum(level[:: -1 if sign > 0 else 1], _DOUBLINGS)
    return _digits(rng, n[level], np.broadcast_to(unit, level.shape), q_shape, k_shape, dtype)


def _normal(rng, raw, q_shape, k_shape, dtype):
    q, k = rng.integers(-4, 5, q_shape), rng.integers(-4, 5, k_shape)
    x, y = _split(raw - math.ceil(math.log2(20 * math.sqrt(q_shape[-1]))), dtype, 2, 3)
    return np.ldexp(q, x).astype(np.float32), np.ldexp(k, y).astype(np.float32)


def _whole(count, step, sign, scale):
    """``count`` whole numbers that rise by ``step`` or a little more, from 2^23 to 2^24, or their negatives."""
    factor = float(np.float32(abs(scale) * math.log2(math.e)))
    step = min(step, (1 << 22) // max(1, count))
    found, n = [], (1 << 23) if sign > 0 else -(3 << 22)
    for _ in range(count):
        n += step
        while not _forgotten(n * factor) >= 0.25:
            n += 1
        found.append(n)
    return np.array(found)


def _forgotten(x):
    """The loss of x by rounding to float32, in units in the last place."""
    rounded = np.float32(x)
    return (x - float(rounded)) / abs(float(np.spacing(rounded)))


def _split(exponent, dtype, above, bits=_DIGIT):
    """exponent as the sum of one of q, whose entries are up to 2^above times as large, and one of k, whose have ``bits`` bits."""
    (low_q, high_q), (low_k, high_k) = _EXPONENTS.get(dtype, _WIDE)
    x = min(max(exponent // 2, low_q), high_q - above)
    y = min(max(exponent - x, low_k), high_k + _DIGIT - bits)
    x = exponent - y
    if not low_q <= x <= high_q - above:
        raise Beyond(f"{dtype} holds no products of 2^{exponent}")
    return x, y


def _digits(rng, n, unit, q_shape, k_shape, dtype):
    """The scores n times 2^unit of all keys, as sums of digits' products in columns that are drawn."""
    dim, top = q_shape[-1], int(unit.max()) if unit.size else 0
    digits = [np.abs(n) >> _DIGIT * c & 255 for c in range(_DIGITS)]
    used = [c for c in reversed(range(_DIGITS)) if digits[c].any()][:dim]
    columns = list(rng.permutation(dim))
    q, k = np.zeros(q_shape, np.float32), rng.standard_normal(k_shape, dtype=np.float32)
    for c in used:
        spread, x = _spread(top + _DIGIT * c, dtype, dim // len(used))
        for column in [columns.pop() for _ in range(1 << spread)]:
            q[..., column] = math.ldexp(1.0, x)
            k[..., column] = np.sign(n) * np.ldexp(digits[c].astype(float), unit + _DIGIT * c - spread - x)
    return q * np.resize(_ROWS, q_shape[-2]).astype(np.float32)[:, None], k


def _spread(exponent, dtype, most):
    """(log2 of the columns, at most ``most``, that share products of 2^exponent, q's exponent in each)."""
    for spread in range(most.bit_length()):
        try:
            return spread, _split(exponent - spread, dtype, 0)[0]
        except Beyond:
            pass
    raise Beyond(f"{dtype} holds no sums of {most} products of 2^{exponent}")
