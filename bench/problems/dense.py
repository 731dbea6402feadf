"""The inputs of a case without sequences: q, k and v of its kind of values, and the arrays that it adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.problems import lengths, magnitudes
from bench.problems.placement import LAYOUTS, dtype_of, strided

if TYPE_CHECKING:
    from bench.problems.case import Case

STRIDES = (*LAYOUTS, "packed", "mixed")
VALUES = ("normal", "large", "outliers", "tiny", "sorted", "descending", "dominant", "equal", "zeros", "negative", "offset",
          "nan_outside", "nan_tail")  # fmt: skip
MASKS = ("full", "rows", "none", "one", "keys", "batch", "heads", "broadcast", "strided")
#: Those that only the laboratory's presets have: a half of the pairs for all heads, what causal leaves, key padding that hides a
#: quarter, causal documents behind one another, whose lengths the number draws and no seed.
MEASURED_MASKS = ("pairs", "causal", "padding", *(f"documents{n}" for n in range(5)))
BIASES = ("full", "full32", "keys", "alibi", "queries", "holes", "strided", "finfo_min", "finfo_max",
          "low", "lowest", "high")  # fmt: skip
#: Those that only the laboratory's presets have: the same for the whole batch, in the dtype of q, or in float32.
MEASURED_BIASES = ("shared", "shared32")
#: Those that leave float32 little of the scores, so that an LSE does not say how many keys it is of.
FLAT_BIASES = ("finfo_min", "finfo_max", "low", "lowest", "high")
SINKS = ("same", "float32", "large", "small", "strided", "huge")
ALIBIS = ("heads", "batch", "strided", "steep")
INTERVALS = ("full", "two", "wild", "causal", "documents", "first", "keys", "heads", "none", "strided")
#: Maxima of the heads of the call, or of those of each entry of the batch.
MAX_LOGITS = ("heads", "batch")
#: The arrays that a case may add to q, k and v: each is a field that names a kind.
ARRAYS = ("bias", "mask", "sinks", "alibi", "intervals")


def host_inputs(case: Case) -> dict:
    """The inputs as NumPy arrays with the case's strides; memory around them is poisoned with NaN."""
    dtype = dtype_of(case.dtype)
    arrays = dict(zip("qkv", values(case)))
    kinds = dict.fromkeys("qkv", case.strides)
    if case.strides == "mixed":
        kinds = {"q": "swapped", "k": "negative", "v": "column"}
    packed = None
    if case.strides == "packed":
        if not case.q_shape == case.k_shape == case.v_shape:
            raise ValueError("packed needs q, k and v of one shape")
        packed = np.full((*case.q_shape[:2], 3, *case.q_shape[2:]), np.nan, dtype)
    inputs = {}
    for i, (name, x) in enumerate(arrays.items()):
        x = (x.swapaxes(1, 2) if case.layout == "bshd" else x).astype(dtype)
        if packed is not None:
            packed[:, :, i] = x
            inputs[name] = packed[:, :, i]
        else:
            inputs[name] = strided(x, kinds[name], shared=name != "q")
    rng = np.random.default_rng([case.seed, 7])
    for name in ARRAYS:
        value = extra(case, name, rng)
        if value is not None:
            inputs[name] = value
    return inputs | case.options()


def extra(case: Case, name: str, rng):
    """One of ARRAYS by its kind, drawn by a generator; None where the case adds none."""
    return _MADE[name](case, rng)


def values(case: Case):
    """q, k, v as float32 (B, H, S, D)."""
    rng = np.random.default_rng([case.seed, 3])
    q = rng.standard_normal((case.batch, case.heads, case.seq_q, case.head_dim), np.float32)
    k = rng.standard_normal((case.batch, case.heads_kv, case.seq_k, case.head_dim), np.float32)
    v = rng.standard_normal((case.batch, case.heads_kv, case.seq_k, case.head_dim_v), np.float32)
    return bent(case, q, k, v, rng)


def bent(case: Case, q, k, v, rng):
    """Random normal q, k, v, float32 (B, H, S, D), as the kind of values has them. v may change in place."""
    dim = case.head_dim
    # A direction that every query shares, so that a key's score can be set through its component along it.
    toward = np.full(dim, dim**-0.5, np.float32)
    ramp = np.linspace(-12, 12, case.seq_k, dtype=np.float32)[:, None]
    # Heads whose largest keys come last, by far: the last one, and every other before it.
    last = slice((case.heads_kv - 1) % 2, None, 2)
    if case.values in ("sorted", "descending", "dominant", "negative"):
        q = toward * dim**0.5 + q / 8
    # Scores beyond the range of exp(); in float32 no larger than it resolves to the bound that it is held to.
    factor = 8 if case.dtype == "float32" else 20
    if case.values == "large":
        q, k = q * factor, k * factor
        k[:, last] *= np.linspace(1 / 8, 1, case.seq_k, dtype=np.float32)[:, None]
    elif case.values == "outliers":  # a few keys anywhere, which a look at some does not find
        sizes = np.where(rng.random((*k.shape[:3], 1)) < 1 / 16, np.float32(factor**2), np.float32(1))
        sizes[:, :, rng.integers(max(1, case.seq_k)) :][:, :, :1] = factor**2
        k = k * sizes
    elif case.values == "tiny":
        q, k, v = q * 2e-3, k * 2e-3, v * 2e-3
    elif case.values in ("sorted", "descending"):
        k = k / 8 + toward * (ramp if case.values == "sorted" else -ramp)
        steep = case.seq_k // 8 if case.values == "sorted" else 0
        k[:, last, case.seq_k - steep :] += toward * np.linspace(0, 100, steep, dtype=np.float32)[:, None]
    elif case.values == "dominant" and case.seq_k:
        k[:, :, -1] = toward * 30
    elif case.values == "equal":
        k[:] = k[:, :, :1]
    elif case.values == "zeros":
        q[:] = 0
    elif case.values == "negative":
        k = k / 8 - toward * (110 if case.dtype == "float32" else 700)
    elif case.values == "offset":
        v += 40
    elif case.values == "nan_outside":
        outside = np.ones(case.seq_k, bool)
        left, right, diagonal = case.band()
        begin, end = max(0, diagonal - left), min(case.seq_k, case.seq_q + diagonal + right)
        outside[int(min(begin, case.seq_k)) : int(max(end, 0))] = False
        k[:, :, outside], v[:, :, outside] = np.inf, np.nan
    elif case.values == "nan_tail":
        k[:, :, -1:], v[:, :, -1:, 0], v[:, :, -1:, 1:] = np.nan, np.inf, np.nan
    if case.logits:
        scale = case.options().get("scale", dim**-0.5)
        q, k = magnitudes.operands(*case.logits, q.shape, k.shape, case.dtype, scale, case.seed)
    return q, k, v


def _mask(case: Case, rng):
    b, h, sq, sk = case.batch, case.heads, case.seq_q, case.seq_k
    if case.mask is None:
        return None
    if case.mask == "full":
        return rng.random((b, h, sq, sk)) < 0.7
    if case.mask == "rows":  # some queries see nothing
        return (rng.random((b, h, sq, sk)) < 0.7) & (rng.random((b, h, sq, 1)) < 0.6)
    if case.mask == "none":
        return np.zeros((sq, sk), bool)
    if case.mask == "one":  # all masked but one key a query
        return np.arange(sk) == rng.integers(0, max(sk, 1), (sq, 1))
    if case.mask == "keys":
        return rng.random(sk) < 0.5
    if case.mask == "batch":  # key padding: a length for each batch entry, the last one full
        return np.arange(sk) < (np.arange(1, b + 1) * sk // max(b, 1))[:, None, None, None]
    if case.mask == "heads":
        return rng.random((h, 1, sk)) < 0.5
    if case.mask == "broadcast":  # full shape, strides 0 on batch and queries
        return np.broadcast_to(rng.random((1, h, 1, sk)) < 0.6, (b, h, sq, sk))
    if case.mask == "strided":
        return (rng.random((b, sk, sq, 2 * h)) < 0.6)[..., ::2].transpose(0, 3, 2, 1)
    if case.mask == "pairs":
        return rng.random((b, 1, sq, sk), np.float32) < 0.5
    if case.mask == "causal":
        return np.tri(sq, sk, sk - sq, bool)[None, None]
    if case.mask == "padding":
        return np.arange(sk) < padded_lengths(case)[:, None, None, None]
    if case.mask.startswith("documents"):
        documents = document_ids(case)
        return (np.tri(sk, dtype=bool) & (documents == documents[:, None]))[None, None, sk - sq :]
    raise ValueError(f"mask is {case.mask!r}; accepted: {', '.join((*MASKS, *MEASURED_MASKS))}")


def padded_lengths(case: Case) -> np.ndarray:
    """How many keys each batch entry sees of the mask "padding"."""
    return np.resize((4, 3, 3, 2), case.batch) * case.seq_k // 4


def document_lengths(number: int, tokens: int) -> list[int]:
    """Of the mask "documents" of that number; 1k tokens in the mean at 16k tokens."""
    return lengths.lognormal(number, min(600, max(1, tokens // 16)), tokens)


def document_ids(case: Case) -> np.ndarray:
    """The document of each key of the mask "documents"."""
    found = document_lengths(int(case.mask.removeprefix("documents")), case.seq_k)
    return np.repeat(np.arange(len(found), dtype=np.int32), found)


def _bias(case: Case, rng):
    b, h, sq, sk = case.batch, case.heads, case.seq_q, case.seq_k
    dtype = dtype_of(case.dtype)
    if case.bias is None:
        return None
    if case.bias == "full":
        return rng.standard_normal((b, h, sq, sk)).astype(dtype)
    if case.bias in MEASURED_BIASES:
        return rng.standard_normal((1, h, sq, sk), np.float32).astype(np.float32 if case.bias == "shared32" else dtype)
    if case.bias == "full32":
        return rng.standard_normal((b, h, sq, sk), np.float32).astype(np.float64 if dtype == "f8" else np.float32)
    if case.bias == "keys":
        return rng.standard_normal(sk).astype(dtype)
    if case.bias == "queries":
        return rng.standard_normal((sq, 1)).astype(dtype)
    if case.bias == "alibi":
        return (-np.arange(1, h + 1)[:, None, None] / 64 * np.abs(np.arange(sk) - sk + 1)).astype(dtype)
    if case.bias == "holes":  # -inf excludes like a mask, whole rows included
        bias = rng.standard_normal((h, sq, sk))
        bias[(rng.random((h, sq, sk)) < 0.3) | (rng.random((h, sq, 1)) < 0.2)] = -np.inf
        return bias.astype(dtype)
    if case.bias in ("finfo_min", "finfo_max"):  # padding: a number instead of -inf, in some columns and whole rows
        wide = np.dtype(np.float32) if case.dtype == "float16" else dtype  # which holds what base 2 does not
        largest = 3.3895313892515355e38 if case.dtype == "bfloat16" else np.finfo(wide).max
        bias = rng.standard_normal((b, 1, sq, sk))
        kind = rng.random((b, 1, sq, 1))
        bias = np.where(rng.random((b, 1, 1, sk)) < 0.3, -largest, bias)
        bias = np.where(kind < 0.2, -largest, np.where(kind < 0.4, -1e30, bias))
        if case.bias == "finfo_max":  # some keys take all
            bias = np.where(rng.random((b, 1, 1, sk)) < 0.05, largest, bias)
        return bias.astype(wide)
    if case.bias in ("low", "lowest", "high"):  # at all keys: the scores beside it count no more, or what float32 leaves of them
        if case.bias == "lowest" and case.dtype != "bfloat16":
            return np.full((sq, 1), np.finfo(dtype).min, dtype)
        value = {"low": -1e30, "lowest": -3.3895313892515355e38, "high": 1e30}[case.bias]
        return np.full((sq, 1), value, np.float32 if case.dtype == "float16" else dtype)
    if case.bias == "strided":
        return rng.standard_normal((sk, 1, h, sq)).transpose(1, 2, 3, 0).astype(dtype, order="K")[:, :, ::-1]
    raise ValueError(f"bias is {case.bias!r}; accepted: {', '.join((*BIASES, *MEASURED_BIASES))}")


def _sinks(case: Case, rng):
    if case.sinks is None:
        return None
    sinks = rng.standard_normal(case.heads)
    if case.sinks == "level" and case.logits:  # of the scores' magnitude
        kind, exponent = case.logits
        return np.resize(np.ldexp((1, 2, -1, 0.5), abs(exponent)) * np.sign(exponent), case.heads).astype(np.float32)
    if case.sinks in ("large", "small"):
        sinks = sinks + (40 if case.sinks == "large" else -80)
    wide = np.float64 if case.dtype == "float64" else np.float32
    if case.sinks == "huge":  # takes all, or nothing; no tie with the bias, which rounding would decide
        largest = np.finfo(wide).max * (0.6 if (case.bias or "").startswith("finfo") else 1)
        return np.where(np.arange(case.heads) % 2, -largest, largest).astype(wide)
    if case.sinks == "strided":
        memory = np.full(2 * case.heads, np.nan, wide)
        memory[::2] = sinks
        return memory[::2]
    return sinks.astype(dtype_of(case.dtype) if case.sinks == "same" else wide)


def _alibi(case: Case, rng):
    """Slopes of the paper, 2^(-8 n / heads), in float32 whatever the dtype; steep: some beyond what float32 holds once
    they are multiplied, some negative."""
    if case.alibi is None:
        return None
    slopes = 2.0 ** (-8 * np.arange(1, case.heads + 1) / max(case.heads, 1))
    if case.alibi == "batch":
        slopes = slopes * rng.uniform(0.5, 1.5, (case.batch, 1))
    elif case.alibi == "strided":
        memory = np.full((2 * case.heads, 3), np.nan, np.float32)
        memory[::-2, 1] = slopes
        return memory[::-2, 1]
    elif case.alibi == "level" and case.logits:
        slopes = magnitudes.slopes(case.logits[1], (case.heads,))
    elif case.alibi == "steep":
        slopes = slopes * np.resize((1e37, -0.01, 3.0), case.heads)
    return slopes.astype(np.float32)


def _intervals(case: Case, rng):
    """Begins and ends of any order; wild: as far away as int32 goes, too."""
    b, h, sq, sk = case.batch, case.heads, case.seq_q, case.seq_k
    kind, rows = case.intervals, np.arange(sq)
    if kind is None:
        return None

    def ends(*shape):
        return rng.integers(-2, sk + 3, (*shape, 2)).astype(np.int32)

    if kind == "full":
        return ends(b, h, sq)
    if kind == "two":  # that overlap, touch, lie in each other or are empty, in any order; the first of some queries are alike
        found = ends(b, h, sq, 2)
        touching = rng.random((b, h, sq)) < 0.3
        found[..., 1, 0] = np.where(touching, found[..., 0, 1], found[..., 1, 0])
        found[:, :, : sq // 4, 0] = np.sort(found[:, :, :1, 0], axis=-1)
        return found
    if kind == "wild":
        far = np.array([-(2**31), -(2**31) + 1, -1, 0, 1, sk, 2**30, 2**31 - 1], np.int32)
        return np.where(rng.random((b, h, sq, 2, 2)) < 0.7, rng.choice(far, (b, h, sq, 2, 2)), ends(b, h, sq, 2)).astype(np.int32)
    if kind == "causal":  # with the last query at the last key
        return np.stack((np.zeros(sq), rows + sk - sq + 1), -1).astype(np.int32)[None, None]
    if kind == "documents":  # of some twenty keys, queries in step with them
        starts = np.unique(np.append(rng.integers(0, max(sk, 1), sk // 20), 0))
        own = np.searchsorted(starts, rows * sk // max(sq, 1), "right") - 1
        found = np.stack((starts[own], np.append(starts, sk)[own + 1]), -1)
        return found.astype(np.int32)[None, None]
    if kind == "first":  # four keys and a window that a length of each batch entry ends
        window = np.stack((rows + sk - sq - 9, rows + sk - sq + 1), -1)
        found = np.stack((np.broadcast_to((0, 4), window.shape), window), -2)
        return np.minimum(found, rng.integers(0, sk + 1, (b, 1, 1, 1, 1))).astype(np.int32)
    if kind == "keys":  # key padding to the right, and to the left in every other entry
        lengths = np.arange(1, b + 1) * sk // max(b, 1)
        left = np.arange(b) % 2 * (sk - lengths)
        return np.stack((left, left + lengths), -1).astype(np.int32)[:, None, None]
    if kind == "heads":
        return ends(1, h, 1, 1)
    if kind == "none":
        return np.full((1, 1, 1, 2), sk // 2, np.int32)
    if kind == "strided":  # backwards along each axis, apart in memory, and one for all of the batch
        return np.broadcast_to(ends(1, h, 2, 3 * sq)[:, ::-1, ::-1, ::-3, ::-1].transpose(0, 1, 3, 2, 4), (b, h, sq, 2, 2))
    raise ValueError(f"intervals is {case.intervals!r}; accepted: {', '.join(INTERVALS)}")


_MADE = {"bias": _bias, "mask": _mask, "sinks": _sinks, "alibi": _alibi, "intervals": _intervals}
