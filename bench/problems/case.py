"""One frozen ``Case`` is the inputs, the FLOPs, the bytes and the name of one call."""

from __future__ import annotations

import collections
import dataclasses
from dataclasses import dataclass

import numpy as np

from bench.problems import dense, magnitudes, stored
from bench.problems.dense import (
    ALIBIS,
    ARRAYS,
    BIASES,
    INTERVALS,
    MAX_LOGITS,
    MASKS,
    MEASURED_BIASES,
    MEASURED_MASKS,
    SINKS,
    STRIDES,
    VALUES,
)
from bench.problems.lengths import Lengths, Storage, numbers, pair
from bench.problems.placement import place
from bench.problems.stored import POSITIONS

HALVES = ("float16", "bfloat16")
DTYPES = (*HALVES, "float32")
#: Of calls without sequences, and of calls with them; the first of each is the default.
OPERATIONS = ("attention", "backward", "merge")
OPERATIONS_OF_SEQUENCES = ("serving", "backward", "append")
#: The words that an option of a case's name may be.
ACCEPTED = {
    "causal": ("True", "False", "top_left", "bottom_right"), "mask": (*MASKS, *MEASURED_MASKS), "bias": (*BIASES, *MEASURED_BIASES),
    "sinks": (*SINKS, "level", "True", "False"), "alibi": (*ALIBIS, "level"), "intervals": INTERVALS, "max_logit": MAX_LOGITS,
    "layout": ("bhsd", "bshd"),
    "strides": STRIDES,
    "values": VALUES, "k_range": ("True", "False"), "positions": POSITIONS, "segments": ("True", "False"),
    "operation": tuple(dict.fromkeys((*OPERATIONS, *OPERATIONS_OF_SEQUENCES))),
    "deterministic": ("True", "False"), "accumulate": ("True", "False"), "dlse": ("True", "False"),
}  # fmt: skip
#: Options that cases of sequences cannot have, and those that they alone have.
NOT_OF_SEQUENCES = ("bias", "mask", "intervals", "max_logit", "strides", "values")
OF_SEQUENCES = ("k_range", "positions", "segments", "max_seqlen_q")


def itemsize(dtype: str) -> int:
    return 2 if dtype in HALVES else np.dtype(dtype).itemsize


def written(value) -> str:
    """An option's value as a name has it."""
    return ":".join("none" if x is None else str(x) for x in value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Case:
    """One call of ``fa_ext.attention``, or (``operation``) of ``fa_ext.attention_backward`` with its outcome, of ``fa_ext.merge``
    with results like it (``parts``), or of ``fa_ext.append``, which writes the last queries of each sequence into its cache.
    heads_kv, seq_k and head_dim_v default to heads, seq_q and head_dim.

    mask, bias, sinks, alibi and intervals name kinds (MASKS, BIASES, SINKS, ALIBIS, INTERVALS); max_logit says of what a
    call of attention gives the largest products (MAX_LOGITS); dropout is (p, seed); strides and values name how
    q, k and v lie in memory and what they hold (STRIDES, VALUES); logits is (kind, exponent) of ``magnitudes``, such as
    ("rising", 20), or ("rising", -20) for scores of about -2^20, and takes the place of q's and k's values. Of the backward
    pass alone: deterministic, accumulate (into float32), and dlse, whether it is given one; all gradients that there are, are
    asked for.

    lengths and storage are those of sequences; batch, seq_q and seq_k follow from them: how many there are, and the longest.
    Sequences have sinks of one kind (True), alibi "heads" or "batch", k_range, positions: the default ones ("same"), moved
    by a constant, or random, and padded ones segments: few ids in no order. Packed queries may have max_seqlen_q, which no
    sequence is longer than.
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
    sinks: str | bool | None = None
    alibi: str | None = None
    intervals: str | None = None
    max_logit: str | None = None
    dropout: tuple[float, int] | None = None
    scale: float | None = None
    layout: str | None = None  #: bhsd, of sequences bshd
    strides: str = "contiguous"
    values: str = "normal"
    k_range: bool = False
    positions: str | None = None
    segments: bool = False
    max_seqlen_q: int | None = None
    logits: tuple[str, int] | None = None
    seed: int = 0
    operation: str | None = None  #: attention, of sequences serving
    deterministic: bool = True
    accumulate: bool = False
    dlse: bool = False
    parts: int = 2
    lengths: Lengths | None = None
    storage: Storage | None = None

    def __post_init__(self):
        if (self.lengths is None) != (self.storage is None):
            raise ValueError("lengths and storage go together")
        if self.lengths:
            longest = max(self.lengths.q, default=0), max(self.lengths.k, default=0)
            for name, value in zip(("batch", "seq_q", "seq_k"), (len(self.lengths.q), *longest)):
                object.__setattr__(self, name, value)
        object.__setattr__(self, "sinks", self.sinks or None)
        defaults = {"heads_kv": self.heads, "seq_k": self.seq_q, "head_dim_v": self.head_dim}
        for name, default in (defaults | self._defaults()).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check()

    def _defaults(self) -> dict:
        """The defaults that depend on whether there are sequences."""
        return {"layout": "bshd", "operation": "serving"} if self.lengths else {"layout": "bhsd", "operation": "attention"}

    def _check(self):
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        no = NOT_OF_SEQUENCES if self.lengths else OF_SEQUENCES
        if wrong := [name for name in changed if name in no]:
            raise ValueError(f"{wrong[0]!r} is no option {'of' if self.lengths else 'without'} sequences")
        if self.sinks and bool(self.lengths) != (self.sinks is True):
            raise ValueError(f"sinks is {self.sinks!r}; accepted: {'True' if self.lengths else ', '.join(SINKS)}")
        if self.lengths and self.alibi not in (None, "heads", "batch"):
            raise ValueError(f"alibi is {self.alibi!r}; accepted: heads, batch")
        if self.segments and (self.storage.q, self.storage.k) != ("padded", "padded"):
            raise ValueError("segments are of q=padded and k=padded")
        if self.max_seqlen_q is not None:
            if self.storage.q != "packed" or self.operation != "serving":
                raise ValueError("max_seqlen_q is of q=packed and operation=serving")
            if self.max_seqlen_q < self.seq_q:
                raise ValueError(f"max_seqlen_q is {self.max_seqlen_q}; accepted: the longest sequence's {self.seq_q} queries or more")
        accepted = OPERATIONS_OF_SEQUENCES if self.lengths else OPERATIONS
        if self.operation not in accepted:
            raise ValueError(f"operation is {self.operation!r}; accepted here: {', '.join(accepted)}")
        if self.operation != "backward" and (not self.deterministic or self.accumulate or self.dlse):
            raise ValueError("deterministic, accumulate and dlse are of operation=backward")
        if self.operation != "attention" and self.max_logit:
            raise ValueError("max_logit is of operation=attention")
        if self.parts != 2 and self.operation != "merge":
            raise ValueError("parts are of operation=merge")

    @classmethod
    def sequences(
        cls, n_q=(1, 3, 0, 7), n_k=(5, 33, 4, 7), heads=4, heads_kv=2, head_dim=32, head_dim_v=None, dtype="float32",
        q="packed", k="paged", layout=None, page_size=16, cache="two", slack=3, causal=False, window=None, softcap=0.0,
        scale=None, sinks=None, alibi=None, k_range=False, positions=None, logits=None, seed=0, **options,
    ) -> Case:  # fmt: skip
        """A case of sequences of n_q queries and n_k keys, stored as q, k, page_size, cache and slack say (``Storage``)."""
        return cls(
            heads=heads, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window,
            softcap=softcap, sinks=sinks, alibi=alibi, scale=scale, layout=layout, k_range=k_range, positions=positions,
            logits=logits, seed=seed, lengths=Lengths(tuple(n_q), tuple(n_k)), storage=Storage(q, k, page_size, cache, slack), **options,
        )  # fmt: skip

    def changed(self, **changes) -> Case:
        """The case with other fields; one of sequences with n_q and n_k in place of lengths, or fields of its storage."""
        if not self.lengths:
            return dataclasses.replace(self, **changes)
        lengths = Lengths(tuple(changes.pop("n_q", self.n_q)), tuple(changes.pop("n_k", self.n_k)))
        fields = [f.name for f in dataclasses.fields(Storage) if f.name in changes]
        storage = dataclasses.replace(self.storage, **{name: changes.pop(name) for name in fields})
        return dataclasses.replace(self, lengths=lengths, storage=storage, **changes)

    @property
    def n_q(self) -> tuple[int, ...]:
        """How many queries each sequence, or each entry of the batch, has."""
        return self.lengths.q if self.lengths else (self.seq_q,) * self.batch

    @property
    def n_k(self) -> tuple[int, ...]:
        return self.lengths.k if self.lengths else (self.seq_k,) * self.batch

    # ---- the name ----

    def __str__(self) -> str:
        """Batch, heads, lengths, head_dims and dtype, then the options that are not their defaults; those of the storage first."""
        lengths = str(self.lengths) if self.lengths else "S" + pair(self.seq_q, self.seq_k, "x")
        words = [f"B{self.batch}", "H" + pair(self.heads, self.heads_kv, "/"), lengths,
                 "D" + pair(self.head_dim, self.head_dim_v, "/"), self.dtype]  # fmt: skip
        defaults = {f.name: f.default for f in dataclasses.fields(self)} | self._defaults()
        options = {name: f"{name}={written(value)}" for name in _OPTIONS if (value := getattr(self, name)) != defaults[name]}
        if self.storage:
            q, k, *rest = self.storage.words()
            words += [q, k, *([options.pop("layout")] if "layout" in options else []), *rest]
        return ",".join((*words, *options.values()))

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``str`` named. ValueError says which word is none of its."""
        words = text.strip().split(",")
        if len(words) < 5:
            raise ValueError("batch, heads, sequence, head_dim and dtype are needed")
        options = dict(option.partition("=")[::2] for option in words[5:])
        storage = Storage.parse(options)
        (batch,) = numbers(words[0], "B", None)
        if storage is None and "+" in words[2]:
            raise ValueError(f"{words[2]!r} names sequences, and needs q= and k=, which say how they are stored")
        seq: dict = {"lengths": Lengths.parse(words[2], batch), "storage": storage} if storage else (
            {"batch": batch} | dict(zip(("seq_q", "seq_k"), numbers(words[2], "S", "x"))))  # fmt: skip
        values = {"dtype": words[4]} | seq
        for word, letter, names in ((words[1], "H", ("heads", "heads_kv")), (words[3], "D", ("head_dim", "head_dim_v"))):
            values.update(zip(names, numbers(word, letter, "/")))
        return cls(**values, **{name: _option(name, value) for name, value in options.items()})

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

    def _each(self):
        """(a dense case of one sequence, how many there are) for every kind of sequence."""
        like = {name: getattr(self, name) for name in ("heads", "heads_kv", "head_dim", "head_dim_v", "dtype", "causal", "window")}
        operation = "backward" if self.operation == "backward" else "attention"
        for (a, b), count in collections.Counter(zip(self.n_q, self.n_k)).items():
            yield Case(seq_q=a, seq_k=b, operation=operation, **like), count

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
        element of each part. Of sequences: as dense calls; of the rotary embedding of new keys and queries, 3 a rotated element."""
        if self.operation == "merge":
            return 2.0 * self.parts * self.batch * self.heads * self.seq_q * self.head_dim_v
        if self.operation == "append":
            return 3.0 * sum(self.n_q) * (self.heads + self.heads_kv) * self.head_dim
        if self.lengths:
            return sum(case.flops() * count for case, count in self._each())
        pairs = self.visible_pairs()
        if self.causal and self.window is None and self.seq_q == self.seq_k:
            pairs = self.seq_q * self.seq_k / 2
        d, dv = self.head_dim, self.head_dim_v
        return 2.0 * self.batch * self.heads * pairs * (d + dv if self.operation == "attention" else 3 * d + 2 * dv)

    def bytes(self) -> int:
        """Of q, k, v and the result, and of their gradients, or of the parts, their LSE and the merged ones, each moved once; of
        sequences, of the keys that are seen; of new keys, values and rotated queries, from and to."""
        size = itemsize(self.dtype)
        queries, dims = sum(self.n_q), self.head_dim + self.head_dim_v
        if self.operation == "merge":
            return (self.parts + 1) * queries * self.heads * (self.head_dim_v * size + 4)
        if self.operation == "append":
            return 2 * queries * ((self.heads + self.heads_kv) * self.head_dim + self.heads_kv * self.head_dim_v) * size
        arrays = 2 if self.operation == "backward" else 1
        return arrays * (self.key_bytes() + queries * self.heads * dims * size)

    def key_bytes(self) -> int:
        """Of k and v; of sequences, of the keys and values that some query sees."""
        keys = self.batch * self.seq_k
        if self.lengths:
            keys = sum(case.seen_keys() * count for case, count in self._each())
        return keys * self.heads_kv * (self.head_dim + self.head_dim_v) * itemsize(self.dtype)

    def seen_keys(self) -> int:
        """Keys that causal and window leave to some query."""
        left, right, diagonal = self.band()
        begin, end = max(0, diagonal - left), min(self.seq_k, self.seq_q + diagonal + right)
        return int(max(0, end - begin)) * (self.seq_q > 0)

    # ---- the inputs ----

    @property
    def exact(self) -> bool:
        """Whether every sum of q . k is exact in float32, and scores are as large (``reference.plain``)."""
        return bool(self.logits) and not self.softcap

    def options(self) -> dict:
        """The arguments of the call that are not arrays, defaults left out."""
        names = ("causal", "window", "softcap", "dropout", "scale", "max_seqlen_q", "deterministic", "accumulate")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        found = {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
        if self.layout != "bhsd":
            found["layout"] = self.layout
        if self.logits:
            found |= magnitudes.scaled(self.logits[0], self.head_dim, self.scale)
        return found

    def arrays(self) -> list[str]:
        """The arrays that the case adds to q, k and v."""
        return [name for name in ARRAYS if getattr(self, name)]

    def max_logit_shape(self) -> tuple[int, ...]:
        return (self.batch, self.heads) if self.max_logit == "batch" else (self.heads,)

    def wrt(self) -> tuple[str, ...]:
        """The inputs that the backward pass differentiates with respect to."""
        return ("q", "k", "v", *(name for name in ("bias", "sinks") if getattr(self, name)))

    def make_inputs(self, xp="numpy") -> dict:
        """Arguments for ``fa_ext.attention``: q, k, v, what the case adds, and ``options()``.

        ``xp`` is "numpy", "cupy" or "torch" (on the current CUDA device), or the module NumPy or CuPy. The same case
        gives the same numbers everywhere.
        """
        name = xp if isinstance(xp, str) else xp.__name__

        def placed(x):
            if isinstance(x, tuple):
                return tuple(map(placed, x))
            return place(x, name) if isinstance(x, np.ndarray) else x

        return {n: placed(x) for n, x in self.host_inputs().items()}

    def host_inputs(self, values=None) -> dict:
        """The inputs as NumPy arrays with the case's strides, or in its storage; memory around them is poisoned with NaN.

        values: of sequences, those of each (``stored.values_of``), to have the same ones in another storage.
        """
        return stored.host_inputs(self, values) if self.lengths else dense.host_inputs(self)


#: The fields that a name has as options, in its order.
_OPTIONS = tuple(f.name for f in dataclasses.fields(Case)[8:] if f.name not in ("lengths", "storage"))


def _option(name: str, value: str):
    """The value of a field that is written as name=value."""
    if name not in _OPTIONS:
        raise ValueError(f"{name!r} is no option; accepted: {', '.join(_OPTIONS)}")
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
        if accepted:
            return {"True": True, "False": False}.get(value, value)
        return {"seed": int, "parts": int, "max_seqlen_q": int, "softcap": float, "scale": float}.get(name, str)(value)
    except ValueError:
        kind = {"window": "left:right, each a number or none", "seed": "a whole number", "max_seqlen_q": "a whole number",
                "dropout": "p:seed, a number and a whole number",
                "logits": f"kind:exponent, one of {', '.join(magnitudes.KINDS)} and a whole number"}.get(name, "a number")  # fmt: skip
        raise ValueError(f"{name} is {value!r}; accepted: {kind}") from None
