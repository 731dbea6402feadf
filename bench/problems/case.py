"""One frozen ``Case`` is the inputs, the FLOPs, the bytes and the name of one call; ``cases.py`` holds the grids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from bench.problems import magnitudes
from bench.problems.placement import LAYOUTS, dtype_of, place, strided

HALVES = ("float16", "bfloat16")
DTYPES = (*HALVES, "float32")
STRIDES = (*LAYOUTS, "packed", "mixed")
VALUES = ("normal", "large", "outliers", "tiny", "sorted", "descending", "dominant", "equal", "zeros", "negative", "offset",
          "nan_outside", "nan_tail")  # fmt: skip
MASKS = ("full", "rows", "none", "one", "keys", "batch", "heads", "broadcast", "strided")
BIASES = ("full", "full32", "keys", "alibi", "queries", "holes", "strided", "finfo_min", "finfo_max",
          "low", "lowest", "high")  # fmt: skip
#: Those that leave float32 little of the scores, so that an LSE does not say how many keys it is of.
FLAT_BIASES = ("finfo_min", "finfo_max", "low", "lowest", "high")
OPERATIONS = ("attention", "backward", "merge")
SINKS = ("same", "float32", "large", "small", "strided", "huge")
ALIBIS = ("heads", "batch", "strided", "steep")
#: What a case may add to q, k and v: a field that names a kind, and a method _<name> that makes it.
ARRAYS = ("bias", "mask", "sinks", "alibi")
#: The words that an option of a case's name may be.
ACCEPTED = {
    "causal": ("True", "False", "top_left", "bottom_right"), "mask": MASKS, "bias": (*BIASES, "shared"), "sinks": (*SINKS, "level"),
    "alibi": (*ALIBIS, "level"), "layout": ("bhsd", "bshd"), "strides": STRIDES, "values": VALUES, "operation": OPERATIONS,
    "deterministic": ("True", "False"), "accumulate": ("True", "False"), "dlse": ("True", "False"),
}  # fmt: skip


def split(text: str) -> list[str]:
    """The words of a case's name."""
    words = text.strip().split(",")
    if len(words) < 5:
        raise ValueError("batch, heads, sequence, head_dim and dtype are needed")
    return words


def numbers(word: str, letter: str, mark: str | None) -> list[int]:
    """Of a word such as H8, or H8/2 where a second number may follow a mark."""
    found = word[1:].split(mark)
    if word[:1] != letter or len(found) > (2 if mark else 1) or not all(x.isdecimal() and x.isascii() for x in found):
        raise ValueError(f"{word!r} is not {letter} and a number{f', or two with {mark} between them' if mark else ''}")
    return [int(x) for x in found]


def itemsize(dtype: str) -> int:
    return 2 if dtype in HALVES else np.dtype(dtype).itemsize


def pair(a, b, mark: str) -> str:
    return f"{a}" if a == b else f"{a}{mark}{b}"


def written(value) -> str:
    """An option's value as a name has it."""
    return ":".join("none" if x is None else str(x) for x in value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Case:
    """One call of ``fa_ext.attention``, or (``operation``) of ``fa_ext.attention_backward`` with its outcome, or of
    ``fa_ext.merge`` with results like it (``parts``); heads_kv, seq_k and head_dim_v default to heads, seq_q and head_dim.

    mask, bias, sinks and alibi name kinds (MASKS, BIASES, SINKS, ALIBIS); dropout is (p, seed); strides and values name how
    q, k and v lie in memory and what they hold (STRIDES, VALUES); logits is (kind, exponent) of ``magnitudes``, such as
    ("rising", 20), or ("rising", -20) for scores of about -2^20, and takes the place of q's and k's values. Of the backward
    pass alone: deterministic, accumulate (into float32), and dlse, whether it is given one; all gradients that there are, are
    asked for.
    """

    batch: int = 1
    heads: int = 2
    heads_kv: int | None = None
    seq_q: int = 64
    seq_k: int | None = None
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "float16"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    bias: str | None = None
    mask: str | None = None
    sinks: str | None = None
    alibi: str | None = None
    dropout: tuple[float, int] | None = None
    scale: float | None = None
    layout: str = "bhsd"
    strides: str = "contiguous"
    values: str = "normal"
    logits: tuple[str, int] | None = None
    seed: int = 0
    operation: str = "attention"
    deterministic: bool = True
    accumulate: bool = False
    dlse: bool = False
    parts: int = 2

    def __post_init__(self):
        for name, default in (("heads_kv", self.heads), ("seq_k", self.seq_q), ("head_dim_v", self.head_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.operation != "backward" and (not self.deterministic or self.accumulate or self.dlse):
            raise ValueError("deterministic, accumulate and dlse are of operation=backward")
        if self.parts != 2 and self.operation != "merge":
            raise ValueError("parts are of operation=merge")

    # ---- the name ----

    def __str__(self) -> str:
        words = [f"B{self.batch}", "H" + pair(self.heads, self.heads_kv, "/"), "S" + pair(self.seq_q, self.seq_k, "x"),
                 "D" + pair(self.head_dim, self.head_dim_v, "/"), self.dtype]  # fmt: skip
        for field in dataclasses.fields(self)[8:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={written(value)}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``str`` named. ValueError says which word is none of its."""
        words = split(text)
        values: dict = {"dtype": words[4]}
        for word, letter, mark, names in ((words[0], "B", None, ("batch",)), (words[1], "H", "/", ("heads", "heads_kv")),
                                          (words[2], "S", "x", ("seq_q", "seq_k")),
                                          (words[3], "D", "/", ("head_dim", "head_dim_v"))):  # fmt: skip
            values.update(zip(names, numbers(word, letter, mark)))
        for option in words[5:]:
            name, _, value = option.partition("=")
            values[name] = cls._option(name, value)
        return cls(**values)

    @classmethod
    def _option(cls, name: str, value: str):
        """The value of a field that is written as name=value."""
        names = [field.name for field in dataclasses.fields(cls)[8:]]
        if name not in names:
            raise ValueError(f"{name!r} is no option; accepted: {', '.join(names)}")
        accepted = ACCEPTED.get(name)
        if accepted and value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")
        try:
            if name == "window":
                left, right = (None if x == "none" else int(x) for x in value.split(":"))
                return left, right
            if name in ("dropout", "logits"):
                first, second = value.split(":")
                return (float(first) if name == "dropout" else magnitudes.known(first)), int(second)
            if name in ("causal", "deterministic", "accumulate", "dlse"):
                return {"True": True, "False": False}.get(value, value)
            return {"seed": int, "parts": int, "softcap": float, "scale": float}.get(name, str)(value)
        except ValueError:
            kind = {"window": "left:right, each a number or none", "seed": "a whole number",
                    "dropout": "p:seed, a number and a whole number",
                    "logits": f"kind:exponent, one of {', '.join(magnitudes.KINDS)} and a whole number"}.get(name, "a number")  # fmt: skip
            raise ValueError(f"{name} is {value!r}; accepted: {kind}") from None

    # ---- the size ----

    @property
    def q_shape(self):
        return self._in_layout(self.batch, self.heads, self.seq_q, self.head_dim)

    @property
    def k_shape(self):
        return self._in_layout(self.batch, self.heads_kv, self.seq_k, self.head_dim)

    @property
    def v_shape(self):
        return self._in_layout(self.batch, self.heads_kv, self.seq_k, self.head_dim_v)

    @property
    def out_shape(self):
        return self._in_layout(self.batch, self.heads, self.seq_q, self.head_dim_v)

    def _in_layout(self, b, h, s, d):
        return (b, s, h, d) if self.layout == "bshd" else (b, h, s, d)

    def band(self) -> tuple[float, float, int]:
        """(left, right, diagonal): query i may see key j iff -left <= j - (i + diagonal) <= right."""
        left, right = (float("inf") if w is None else w for w in self.window or (None, None))
        diagonal = 0 if self.causal == "top_left" else self.seq_k - self.seq_q
        return left, min(right, 0) if self.causal else right, diagonal

    def visible_pairs(self) -> int:
        """(query, key) pairs that causal and window leave, for one head."""
        left, right, diagonal = self.band()
        center = np.arange(self.seq_q, dtype=np.float64) + diagonal
        first, last = np.maximum(center - left, 0), np.minimum(center + right, self.seq_k - 1)
        return int(np.maximum(last - first + 1, 0).sum())

    def flops(self) -> float:
        """Of both products: 2 (D + Dv) a visible pair; of the five of the backward pass: 2 (3 D + 2 Dv). A square causal
        call without a window counts as half of full, as everybody counts it. Of a merge: a product and a sum for each
        element of each part."""
        if self.operation == "merge":
            return 2.0 * self.parts * self.batch * self.heads * self.seq_q * self.head_dim_v
        pairs = self.visible_pairs()
        if self.causal and self.window is None and self.seq_q == self.seq_k:
            pairs = self.seq_q * self.seq_k / 2
        d, dv = self.head_dim, self.head_dim_v
        return 2.0 * self.batch * self.heads * pairs * (d + dv if self.operation == "attention" else 3 * d + 2 * dv)

    def bytes(self) -> int:
        """Of q, k, v and the result, and of their gradients, or of the parts, their LSE and the merged ones, each moved once."""
        if self.operation == "merge":
            return (self.parts + 1) * self.batch * self.heads * self.seq_q * (self.head_dim_v * itemsize(self.dtype) + 4)
        size = itemsize(self.dtype)
        rows_q, rows_k = self.batch * self.heads * self.seq_q, self.batch * self.heads_kv * self.seq_k
        arrays = 1 if self.operation == "attention" else 2
        return arrays * size * (rows_q + rows_k) * (self.head_dim + self.head_dim_v)

    def key_bytes(self) -> int:
        """Of k and v."""
        return self.batch * self.heads_kv * self.seq_k * (self.head_dim + self.head_dim_v) * itemsize(self.dtype)

    # ---- the inputs ----

    @property
    def exact(self) -> bool:
        """Whether every sum of q . k is exact in float32, and scores are as large (``reference.plain``)."""
        return bool(self.logits) and not self.softcap

    def options(self) -> dict:
        """The arguments of the call that are not arrays, defaults left out."""
        own = (*ARRAYS, "strides", "values", "logits", "seed", "operation", "dlse", "parts")
        options = [f for f in dataclasses.fields(self)[8:] if f.name not in own]
        found = {f.name: getattr(self, f.name) for f in options if getattr(self, f.name) != f.default}
        if self.logits:
            found |= magnitudes.scaled(self.logits[0], self.head_dim, self.scale)
        return found

    def arrays(self) -> list[str]:
        """The arrays that the case adds to q, k and v."""
        return [name for name in ARRAYS if getattr(self, name)]

    def wrt(self) -> tuple[str, ...]:
        """What the backward pass differentiates with respect to."""
        return ("q", "k", "v", *(name for name in ("bias", "sinks") if getattr(self, name)))

    def make_inputs(self, xp="numpy") -> dict:
        """Arguments for ``fa_ext.attention``: q, k, v, what the case adds, and ``options()``.

        ``xp`` is "numpy", "cupy" or "torch" (on the current CUDA device), or the module NumPy or CuPy. The same case
        gives the same numbers everywhere.
        """
        name = xp if isinstance(xp, str) else xp.__name__
        return {n: place(x, name) if isinstance(x, np.ndarray) else x for n, x in self.host_inputs().items()}

    def host_inputs(self) -> dict:
        """The inputs as NumPy arrays with the case's strides; memory around them is poisoned with NaN."""
        dtype = dtype_of(self.dtype)
        arrays = dict(zip("qkv", self._values()))
        kinds = dict.fromkeys("qkv", self.strides)
        if self.strides == "mixed":
            kinds = {"q": "swapped", "k": "negative", "v": "column"}
        packed = None
        if self.strides == "packed":
            if not self.q_shape == self.k_shape == self.v_shape:
                raise ValueError("packed needs q, k and v of one shape")
            packed = np.full((*self.q_shape[:2], 3, *self.q_shape[2:]), np.nan, dtype)
        inputs = {}
        for i, (name, x) in enumerate(arrays.items()):
            x = self._in_layout_array(x).astype(dtype)
            if packed is not None:
                packed[:, :, i] = x
                inputs[name] = packed[:, :, i]
            else:
                inputs[name] = strided(x, kinds[name], shared=name != "q")
        rng = np.random.default_rng([self.seed, 7])
        for name in ARRAYS:
            value = self.extra(name, rng)
            if value is not None:
                inputs[name] = value
        return inputs | self.options()

    def extra(self, name: str, rng):
        """One of ARRAYS by its kind, drawn by a generator; None where the case adds none."""
        return getattr(self, f"_{name}")(rng)

    def _in_layout_array(self, x):
        return x.swapaxes(1, 2) if self.layout == "bshd" else x

    def _values(self):
        """q, k, v as float32 (B, H, S, D)."""
        rng = np.random.default_rng([self.seed, 3])
        q = rng.standard_normal((self.batch, self.heads, self.seq_q, self.head_dim), np.float32)
        k = rng.standard_normal((self.batch, self.heads_kv, self.seq_k, self.head_dim), np.float32)
        v = rng.standard_normal((self.batch, self.heads_kv, self.seq_k, self.head_dim_v), np.float32)
        return self.bent(q, k, v, rng)

    def bent(self, q, k, v, rng):
        """Random normal q, k, v, float32 (B, H, S, D), as the kind of values has them. v may change in place."""
        dim = self.head_dim
        # A direction that every query shares, so that a key's score can be set through its component along it.
        toward = np.full(dim, dim**-0.5, np.float32)
        ramp = np.linspace(-12, 12, self.seq_k, dtype=np.float32)[:, None]
        # Heads whose largest keys come last, by far: the last one, and every other before it.
        last = slice((self.heads_kv - 1) % 2, None, 2)
        if self.values in ("sorted", "descending", "dominant", "negative"):
            q = toward * dim**0.5 + q / 8
        # Scores beyond the range of exp(); in float32 no larger than it resolves to the bound that it is held to.
        factor = 8 if self.dtype == "float32" else 20
        if self.values == "large":
            q, k = q * factor, k * factor
            k[:, last] *= np.linspace(1 / 8, 1, self.seq_k, dtype=np.float32)[:, None]
        elif self.values == "outliers":  # a few keys anywhere, which a look at some does not find
            sizes = np.where(rng.random((*k.shape[:3], 1)) < 1 / 16, np.float32(factor**2), np.float32(1))
            sizes[:, :, rng.integers(max(1, self.seq_k)) :][:, :, :1] = factor**2
            k = k * sizes
        elif self.values == "tiny":
            q, k, v = q * 2e-3, k * 2e-3, v * 2e-3
        elif self.values in ("sorted", "descending"):
            k = k / 8 + toward * (ramp if self.values == "sorted" else -ramp)
            steep = self.seq_k // 8 if self.values == "sorted" else 0
            k[:, last, self.seq_k - steep :] += toward * np.linspace(0, 100, steep, dtype=np.float32)[:, None]
        elif self.values == "dominant" and self.seq_k:
            k[:, :, -1] = toward * 30
        elif self.values == "equal":
            k[:] = k[:, :, :1]
        elif self.values == "zeros":
            q[:] = 0
        elif self.values == "negative":
            k = k / 8 - toward * (110 if self.dtype == "float32" else 700)
        elif self.values == "offset":
            v += 40
        elif self.values == "nan_outside":
            outside = np.ones(self.seq_k, bool)
            left, right, diagonal = self.band()
            begin, end = max(0, diagonal - left), min(self.seq_k, self.seq_q + diagonal + right)
            outside[int(min(begin, self.seq_k)) : int(max(end, 0))] = False
            k[:, :, outside], v[:, :, outside] = np.inf, np.nan
        elif self.values == "nan_tail":
            k[:, :, -1:], v[:, :, -1:, 0], v[:, :, -1:, 1:] = np.nan, np.inf, np.nan
        if self.logits:
            scale = self.options().get("scale", dim**-0.5)
            q, k = magnitudes.operands(*self.logits, q.shape, k.shape, self.dtype, scale, self.seed)
        return q, k, v

    def _mask(self, rng):
        b, h, sq, sk = self.batch, self.heads, self.seq_q, self.seq_k
        if self.mask is None:
            return None
        if self.mask == "full":
            return rng.random((b, h, sq, sk)) < 0.7
        if self.mask == "rows":  # some queries see nothing
            return (rng.random((b, h, sq, sk)) < 0.7) & (rng.random((b, h, sq, 1)) < 0.6)
        if self.mask == "none":
            return np.zeros((sq, sk), bool)
        if self.mask == "one":  # all masked but one key a query
            return np.arange(sk) == rng.integers(0, max(sk, 1), (sq, 1))
        if self.mask == "keys":
            return rng.random(sk) < 0.5
        if self.mask == "batch":  # key padding: a length for each batch entry, the last one full
            return np.arange(sk) < (np.arange(1, b + 1) * sk // max(b, 1))[:, None, None, None]
        if self.mask == "heads":
            return rng.random((h, 1, sk)) < 0.5
        if self.mask == "broadcast":  # full shape, strides 0 on batch and queries
            return np.broadcast_to(rng.random((1, h, 1, sk)) < 0.6, (b, h, sq, sk))
        if self.mask == "strided":
            return (rng.random((b, sk, sq, 2 * h)) < 0.6)[..., ::2].transpose(0, 3, 2, 1)
        raise ValueError(f"mask is {self.mask!r}; accepted: {', '.join(MASKS)}")

    def _bias(self, rng):
        b, h, sq, sk = self.batch, self.heads, self.seq_q, self.seq_k
        dtype = dtype_of(self.dtype)
        if self.bias is None:
            return None
        if self.bias == "full":
            return rng.standard_normal((b, h, sq, sk)).astype(dtype)
        if self.bias == "shared":  # by the batch
            return rng.standard_normal((1, h, sq, sk)).astype(dtype)
        if self.bias == "full32":
            return rng.standard_normal((b, h, sq, sk), np.float32).astype(np.float64 if dtype == "f8" else np.float32)
        if self.bias == "keys":
            return rng.standard_normal(sk).astype(dtype)
        if self.bias == "queries":
            return rng.standard_normal((sq, 1)).astype(dtype)
        if self.bias == "alibi":
            return (-np.arange(1, h + 1)[:, None, None] / 64 * np.abs(np.arange(sk) - sk + 1)).astype(dtype)
        if self.bias == "holes":  # -inf excludes like a mask, whole rows included
            bias = rng.standard_normal((h, sq, sk))
            bias[(rng.random((h, sq, sk)) < 0.3) | (rng.random((h, sq, 1)) < 0.2)] = -np.inf
            return bias.astype(dtype)
        if self.bias in ("finfo_min", "finfo_max"):  # padding: a number instead of -inf, in some columns and whole rows
            wide = np.dtype(np.float32) if self.dtype == "float16" else dtype  # which holds what base 2 does not
            largest = 3.3895313892515355e38 if self.dtype == "bfloat16" else np.finfo(wide).max
            bias = rng.standard_normal((b, 1, sq, sk))
            kind = rng.random((b, 1, sq, 1))
            bias = np.where(rng.random((b, 1, 1, sk)) < 0.3, -largest, bias)
            bias = np.where(kind < 0.2, -largest, np.where(kind < 0.4, -1e30, bias))
            if self.bias == "finfo_max":  # some keys take all
                bias = np.where(rng.random((b, 1, 1, sk)) < 0.05, largest, bias)
            return bias.astype(wide)
        if self.bias in ("low", "lowest", "high"):  # at all keys: the scores beside it count no more, or what float32 leaves of them
            if self.bias == "lowest" and self.dtype != "bfloat16":
                return np.full((sq, 1), np.finfo(dtype).min, dtype)
            value = {"low": -1e30, "lowest": -3.3895313892515355e38, "high": 1e30}[self.bias]
            return np.full((sq, 1), value, np.float32 if self.dtype == "float16" else dtype)
        if self.bias == "strided":
            return rng.standard_normal((sk, 1, h, sq)).transpose(1, 2, 3, 0).astype(dtype, order="K")[:, :, ::-1]
        raise ValueError(f"bias is {self.bias!r}; accepted: {', '.join(BIASES)}")

    def _sinks(self, rng):
        if self.sinks is None:
            return None
        sinks = rng.standard_normal(self.heads)
        if self.sinks == "level" and self.logits:  # of the scores' magnitude
            kind, exponent = self.logits
            return np.resize(np.ldexp((1, 2, -1, 0.5), abs(exponent)) * np.sign(exponent), self.heads).astype(np.float32)
        if self.sinks in ("large", "small"):
            sinks = sinks + (40 if self.sinks == "large" else -80)
        wide = np.float64 if self.dtype == "float64" else np.float32
        if self.sinks == "huge":  # takes all, or nothing; no tie with the bias, which rounding would decide
            largest = np.finfo(wide).max * (0.6 if (self.bias or "").startswith("finfo") else 1)
            return np.where(np.arange(self.heads) % 2, -largest, largest).astype(wide)
        if self.sinks == "strided":
            memory = np.full(2 * self.heads, np.nan, wide)
            memory[::2] = sinks
            return memory[::2]
        return sinks.astype(dtype_of(self.dtype) if self.sinks == "same" else wide)

    def _alibi(self, rng):
        """Slopes of the paper, 2^(-8 n / heads), in float32 whatever the dtype; steep: some beyond what float32 holds once
        they are multiplied, some negative."""
        if self.alibi is None:
            return None
        slopes = 2.0 ** (-8 * np.arange(1, self.heads + 1) / max(self.heads, 1))
        if self.alibi == "batch":
            slopes = slopes * rng.uniform(0.5, 1.5, (self.batch, 1))
        elif self.alibi == "strided":
            memory = np.full((2 * self.heads, 3), np.nan, np.float32)
            memory[::-2, 1] = slopes
            return memory[::-2, 1]
        elif self.alibi == "level" and self.logits:
            slopes = magnitudes.slopes(self.logits[1], (self.heads,))
        elif self.alibi == "steep":
            slopes = slopes * np.resize((1e37, -0.01, 3.0), self.heads)
        return slopes.astype(np.float32)
