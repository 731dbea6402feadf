"""Attention in float64, written to be read: what every kernel is judged by.

``attention`` is the truth, ``plain`` is the same formula in the arithmetic of a straightforward unfused computation,
whose error says how much a dtype costs by itself. Both cover the whole surface of ``fa_ext.attention``, take NumPy or
CuPy arrays and share no code with the library: dense calls are ``dense``'s, those with sequences
``serving``'s.
"""

import math
import sys

from . import serving
from .dense import Options, attend, band, merge, round_to, visible_keys

__all__ = ["Options", "attention", "band", "max_logit", "merge", "plain", "round_to", "visible_keys"]


def attention(q, k, v, *, rows=None, xp=None, **options):
    """Softmax attention in float64.

    Arguments as in ``fa_ext.attention`` (``Options``), as NumPy or CuPy arrays of any real dtype. ``rows`` restricts the
    result to these query indices (their positions still count from the start of the sequence). ``xp`` is the array module,
    NumPy or CuPy; inferred from q.

    Returns (out, lse), both float64: out (B, H, Sq, Dv) or (B, Sq, H, Dv) as ``layout`` says, lse (B, H, Sq); for q of three
    axes (T, H, Dv) and (H, T). What the arguments of sequences mean stands in ``serving``, which this calls.
    NaN and Inf at a key reach only the queries that see the key; a bias of -inf hides a key like the mask does.
    """
    asked = Options(**options)
    if asked.sequences(q, k):
        return serving.attention(q, k, v, xp=xp, **options)
    return attend(q, k, v, asked, rows=rows, xp=xp)


def max_logit(q, k, *, rows=None, xp=None, **options):
    """The largest scale * (q . k) of each head in float64, over the pairs that see each other: what ``max_logit`` is raised to.

    Arguments as for ``attention``. Softcap and what is added to scores count only where -inf hides a key; NaN is passed over.

    Returns (B, H), B the number of sequences where there are some: -inf where no query of a head sees a key.
    """
    xp = xp or sys.modules[type(q).__module__.partition(".")[0]]
    asked = Options(**options)
    heads = q.shape[2 if q.ndim == 4 and asked.layout == "bshd" else 1]
    sequences = asked.sequences(q, k)
    logits = xp.full((serving.problems_of(xp, q, k, k, asked)[0] if sequences else q.shape[0], heads), -math.inf)
    if sequences:
        serving.attention(q, k, k, xp=xp, logits=logits, **options)
    else:
        attend(q, k, k, asked, rows=rows, xp=xp, logits=logits)
    return logits


def plain(q, k, v, *, rows=None, xp=None, dtype=None, out_dtype=None, exact=False, **options):
    """The same formula as an unfused computation in ``dtype`` (default: q's) would evaluate it.

    S = Q K^T is accumulated in float32 and the final scores are rounded to as many bits as the dtype has (those beyond float16's
    largest number too), the softmax runs in float32, P and the result are rounded to the dtype. For float64 everything is float64.
    ``dtype`` is a name ("bfloat16"), for arrays that hold values of a dtype their module does not know.

    ``exact`` is for q and k whose products and partial sums float32 holds exactly, in any order: S is then rounded once, in float32
    and to base 2, as an exponential needs it. Scores of 2^12 and more have a bound that says something by this alone: rounded to
    a dtype, those that lie some units apart become equal.

    The sums of float32 have an order of their own, ``dense.by_eights``, so that the error, and with it the bound that is made
    of it, does not depend on a BLAS. In S each product joins its sum by a fused multiply-add, as in the kernels: with large
    scores few keys decide a row, and what rounding does to these is a matter of luck that only the same roundings share.
    For 16-bit dtypes both products are summed in float64 and rounded once to float32, which no order shows in: what is
    rounded to 16 bits then errs a thousand times as much, and a BLAS sums a hundred times as fast.

    Returns (out, lse) like ``attention``; out holds values of ``out_dtype`` (default: ``dtype``) as float64.
    """
    asked, dtype = Options(**options), dtype or q.dtype.name
    if asked.sequences(q, k):
        return serving.plain(q, k, v, xp=xp, dtype=dtype, out_dtype=out_dtype, exact=exact, **options)
    return attend(q, k, v, asked, rows=rows, xp=xp, dtype=dtype, out_dtype=out_dtype or dtype, exact=exact)
