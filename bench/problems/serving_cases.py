"""The problem grid of the serving keywords: sequences of any length, in padded, packed and paged storage.

A ``ServingCase`` holds the values of each sequence apart from how they are stored, so that the same values can be had in
another storage. All memory that belongs to no sequence is NaN, and so is what lies around the arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from dataclasses import dataclass

import numpy as np

from bench.problems import magnitudes
from bench.problems.case import Case, itemsize, numbers, pair, split, written
from bench.problems.placement import dtype_of

Q_STORAGE, K_STORAGE = ("padded", "packed", "one"), ("padded", "packed", "paged")
CACHES = ("two", "pair", "first", "heads", "twice", "swapped")
POSITIONS = (None, "same", "shifted", "random")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class ServingCase:
    """One call of ``fa_ext.attention`` over sequences.

    n_q, n_k: lengths of the sequences. q, k: how queries and keys are stored (Q_STORAGE, K_STORAGE). cache: how paged k and
    v lie in memory (CACHES). slack: rows, pages and columns beyond those used. alibi: None, "heads" or "batch". positions:
    None, the default ones ("same"), moved by a constant, or random. logits: (kind, exponent) as of a ``Case``. operation: what a benchmark of it measures, the call
    ("serving"), or that the last n_q of n_k keys are written into caches ("append").
    """

    n_q: tuple[int, ...] = (1, 3, 0, 7)
    n_k: tuple[int, ...] = (5, 33, 4, 7)
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    dtype: str = "float32"
    q: str = "packed"
    k: str = "paged"
    layout: str = "bshd"
    page_size: int = 16
    cache: str = "two"
    slack: int = 3
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    scale: float | None = None
    sinks: bool = False
    alibi: str | None = None
    k_range: bool = False
    positions: str | None = None
    logits: tuple[str, int] | None = None
    seed: int = 0
    operation: str = "serving"

    def __post_init__(self):
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    # ---- the name ----

    def __str__(self):
        """As a ``Case`` names itself, with q and k said, and lengths as runs: S1x512*8+1x64*2 where B10 are not all alike."""
        runs = [(lengths, len(list(same))) for lengths, same in itertools.groupby(zip(self.n_q, self.n_k))]
        alike = len(runs) == 1
        lengths = "+".join(pair(*x, "x") + (f"*{n}" if n > 1 and not alike else "") for x, n in runs)
        words = [f"B{len(self.n_q)}", "H" + pair(self.heads, self.heads_kv, "/"), f"S{lengths}",
                 "D" + pair(self.head_dim, self.head_dim_v, "/"), self.dtype, f"q={self.q}", f"k={self.k}"]  # fmt: skip
        for field in dataclasses.fields(self)[9:]:
            if getattr(self, field.name) != field.default:
                words.append(f"{field.name}={written(getattr(self, field.name))}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> ServingCase:
        """The case that ``str`` named. ValueError says which word is none of its."""
        words = split(text)
        (batch,) = numbers(words[0], "B", None)
        lengths = []
        for run in words[2].removeprefix("S").split("+") if words[2] != "S" else ():
            one, _, count = run.partition("*")
            found = numbers(f"S{one}", "S", "x")
            lengths += [(found[0], found[-1])] * (int(count) if count else 1)
        if len(lengths) == 1:
            lengths *= batch
        if len(lengths) != batch:
            raise ValueError(f"{words[2]!r} names {len(lengths)} sequences, {words[0]} says {batch}")
        heads, dims = numbers(words[1], "H", "/"), numbers(words[3], "D", "/")
        values = {"n_q": tuple(n for n, _ in lengths), "n_k": tuple(n for _, n in lengths), "heads": heads[0], "heads_kv": heads[-1],
                  "head_dim": dims[0], "head_dim_v": dims[-1], "dtype": words[4]}  # fmt: skip
        return cls(**values, **dict(cls._option(*word.partition("=")[::2]) for word in words[5:]))

    @classmethod
    def _option(cls, name: str, value: str):
        """(name, value) of a field that is written as name=value."""
        accepted = {"q": Q_STORAGE, "k": K_STORAGE, "layout": ("bshd", "bhsd"), "cache": CACHES, "alibi": ("heads", "batch"),
                    "positions": POSITIONS[1:], "causal": ("False", "True", "top_left", "bottom_right"), "sinks": ("True", "False"),
                    "k_range": ("True", "False"), "operation": ("serving", "append")}.get(name)  # fmt: skip
        if name not in [field.name for field in dataclasses.fields(cls)[7:]]:
            raise ValueError(f"{name!r} is no option of sequences")
        if accepted and value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")
        if name == "window":
            left, right = (None if x == "none" else int(x) for x in value.split(":"))
            return name, (left, right)
        if name == "logits":
            first, exponent = value.split(":")
            return name, (magnitudes.known(first), int(exponent))
        kind = {"page_size": int, "slack": int, "seed": int, "softcap": float, "scale": float}.get(name, str)
        return name, {"True": True, "False": False}.get(value, kind(value))

    # ---- the size ----

    def _each(self):
        """(a dense case of one sequence, how many there are) for every kind of sequence."""
        for (a, b), count in collections.Counter(zip(self.n_q, self.n_k)).items():
            yield Case(1, self.heads, self.heads_kv, a, b, self.head_dim, self.head_dim_v, self.dtype, self.causal, self.window), count

    def flops(self) -> float:
        """Of the sequences as dense calls (``Case.flops``); of rotary embedding, 3 a rotated element."""
        if self.operation == "append":
            return 3.0 * sum(self.n_q) * (self.heads + self.heads_kv) * self.head_dim
        return sum(case.flops() * count for case, count in self._each())

    def key_bytes(self) -> int:
        """Of the keys and values that some query sees."""
        total = 0
        for case, count in self._each():
            left, right, diagonal = case.band()
            begin, end = max(0, diagonal - left), min(case.seq_k, case.seq_q + diagonal + right)
            total += count * int(max(0, end - begin)) * (case.seq_q > 0)
        return total * self.heads_kv * (self.head_dim + self.head_dim_v) * itemsize(self.dtype)

    def bytes(self) -> int:
        """Of these, the queries and the result, each moved once; of new keys, values and rotated queries, from and to."""
        if self.operation == "append":
            row = (self.heads + self.heads_kv) * self.head_dim + self.heads_kv * self.head_dim_v
            return 2 * sum(self.n_q) * row * itemsize(self.dtype)
        return self.key_bytes() + sum(self.n_q) * self.heads * (self.head_dim + self.head_dim_v) * itemsize(self.dtype)

    # ---- the values ----

    def values(self):
        """[(q, k, v)] of each sequence: (n_q, H, D), (n_k, Hk, D), (n_k, Hk, Dv)."""
        rng = np.random.default_rng([self.seed, 11])
        dtype = dtype_of(self.dtype)

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype)

        drawn = [(normal(a, self.heads, self.head_dim), normal(b, self.heads_kv, self.head_dim),
                  normal(b, self.heads_kv, self.head_dim_v)) for a, b in zip(self.n_q, self.n_k)]  # fmt: skip
        if not self.logits:
            return drawn
        scale = self.options().get("scale", self.head_dim**-0.5)
        shapes = [[x.swapaxes(0, 1).shape for x in (q, k)] for q, k, _ in drawn]
        large = [magnitudes.operands(*self.logits, *pair, self.dtype, scale, self.seed + b) for b, pair in enumerate(shapes)]
        return [(*(x.swapaxes(0, 1).astype(dtype) for x in pair), v) for pair, (_, _, v) in zip(large, drawn)]

    def options(self):
        """The arguments that do not depend on the storage."""
        rng = np.random.default_rng([self.seed, 12])
        batch, options = len(self.n_q), {}
        for name in ("causal", "window", "softcap", "scale"):
            if getattr(self, name) != next(f.default for f in dataclasses.fields(self) if f.name == name):
                options[name] = getattr(self, name)
        if self.logits:
            options |= magnitudes.scaled(self.logits[0], self.head_dim, self.scale)
        if self.sinks:
            options["sinks"] = rng.standard_normal(self.heads).astype(np.float32)
        if self.alibi:
            shape = (self.heads,) if self.alibi == "heads" else (batch, self.heads)
            slopes = magnitudes.slopes(self.logits[1], shape) if self.logits else rng.random(shape) / 4
            options["alibi"] = slopes.astype(np.float32)
        if self.k_range:
            begin = np.array([rng.integers(-2, n + 2) for n in self.n_k], np.int32)
            end = np.array([rng.integers(-1, n + 4) for n in self.n_k], np.int32)
            options["k_range"] = [(begin, end), (begin, None), (None, end)][self.seed % 3]
        return options

    def query_positions(self):
        """Positions of each sequence's queries, or None."""
        rng = np.random.default_rng([self.seed, 13])
        if self.positions is None:
            return None
        found = []
        for a, b in zip(self.n_q, self.n_k):
            at = np.arange(a) + (0 if self.causal == "top_left" else b - a)
            if self.positions == "shifted":
                at = at + rng.integers(-9, 9)
            elif self.positions == "random":
                at = rng.integers(-3, b + 4, a)
            found.append(at.astype(np.int32))
        return found

    def arrays(self) -> list[str]:
        """The arrays that the case adds beside those of its storage."""
        return [name for name in ("sinks", "alibi") if getattr(self, name)]

    # ---- the storage ----

    def arguments(self, values=None):
        """The arguments of the call, as NumPy arrays."""
        values = self.values() if values is None else values
        rng = np.random.default_rng([self.seed, 14])
        queries, keys = self._store_queries([x[0] for x in values]), self._store_keys(values, rng)
        return queries | keys | self.options() | {"layout": self.layout}

    def _store_queries(self, sequences):
        positions = self.query_positions()
        dtype = dtype_of(self.dtype)
        batch, tail = len(sequences), (self.heads, self.head_dim)
        if self.q == "one":
            q = np.full((batch, *tail), np.nan, dtype)
            at = np.full(batch, 7, np.int32)
            for b, x in enumerate(sequences):
                q[b : b + len(x)] = x
                if positions and len(x):
                    at[b] = positions[b][0]
            found = {"q": q} | ({"positions": at} if positions else {})
            return found | ({} if all(n == 1 for n in self.n_q) else {"seqlens_q": np.array(self.n_q, np.int32)})
        if self.q == "packed":
            starts = np.concatenate([[0], np.cumsum(self.n_q)]).astype(np.int32) + self.slack // 2
            rows = int(starts[-1]) + self.slack
            q, at = np.full((rows, *tail), np.nan, dtype), np.full(rows, INT_MIN, np.int32)
            for b, x in enumerate(sequences):
                q[starts[b] : starts[b + 1]] = x
                if positions:
                    at[starts[b] : starts[b + 1]] = positions[b]
            return {"q": q, "cu_seqlens_q": starts} | ({"positions": at} if positions else {})
        rows = max(self.n_q, default=0) + self.slack
        q, at = np.full((batch, rows, *tail), np.nan, dtype), np.full((batch, rows), INT_MAX, np.int32)
        for b, x in enumerate(sequences):
            q[b, : len(x)] = x
            if positions:
                at[b, : len(x)] = positions[b]
        found = {"q": q if self.layout == "bshd" else np.ascontiguousarray(q.swapaxes(1, 2))}
        return found | {"seqlens_q": np.array(self.n_q, np.int32)} | ({"positions": at} if positions else {})

    def _store_keys(self, values, rng):
        dtype, batch = dtype_of(self.dtype), len(values)
        lengths = np.array(self.n_k, np.int32)
        dims = self.head_dim, self.head_dim_v
        if self.k == "packed":
            room = lengths + rng.integers(0, self.slack + 1, batch).astype(np.int32)
            starts = np.concatenate([[0], np.cumsum(room)]).astype(np.int32) + self.slack
            k, v = (np.full((int(starts[-1]) + self.slack, self.heads_kv, d), np.nan, dtype) for d in dims)
            for b, (_, some_k, some_v) in enumerate(values):
                k[starts[b] : starts[b] + lengths[b]], v[starts[b] : starts[b] + lengths[b]] = some_k, some_v
            return {"k": k, "v": v, "cu_seqlens_k": starts, "seqlens_k": lengths}
        if self.k == "padded":
            k, v = (np.full((batch, max(self.n_k, default=0) + self.slack, self.heads_kv, d), np.nan, dtype) for d in dims)
            for b, (_, some_k, some_v) in enumerate(values):
                k[b, : lengths[b]], v[b, : lengths[b]] = some_k, some_v
            if self.layout == "bhsd":
                k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
            return {"k": k, "v": v, "seqlens_k": lengths}
        size = self.page_size
        needed = -(-lengths // size)
        pages = int(needed.sum()) + self.slack
        table = rng.choice(np.array([-1, INT_MIN, INT_MAX, pages, 0], np.int32), (batch, int(needed.max(initial=0)) + self.slack))
        k, v = self.empty_cache(pages)
        order = iter(rng.permutation(pages))
        heads_first = self.layout == "bhsd"
        for b, (_, some_k, some_v) in enumerate(values):
            for column in range(needed[b]):
                page = table[b, column] = next(order)
                rows = slice(column * size, min((column + 1) * size, int(lengths[b])))
                for x, some in ((k, some_k), (v, some_v)):
                    to = x[page].swapaxes(0, 1) if heads_first else x[page]
                    to[: rows.stop - rows.start] = some[rows]
        return {"k": k, "v": v, "page_table": np.ascontiguousarray(table), "seqlens_k": lengths}

    def empty_cache(self, pages):
        """k and v of NaN: (pages, page_size, Hk, D) or (pages, Hk, page_size, D), lying in memory as ``cache`` says."""
        dtype, h, size = dtype_of(self.dtype), self.heads_kv, self.page_size
        shared = self.cache in ("pair", "first", "heads") and self.head_dim == self.head_dim_v

        def new(*shape):
            return np.full(shape, np.nan, dtype)

        def page(d, heads=h):
            return (size, heads, d) if self.layout == "bshd" else (heads, size, d)

        if shared and self.cache == "pair":
            kv = new(pages, 2, *page(self.head_dim))
            return kv[:, 0], kv[:, 1]
        if shared and self.cache == "first":
            kv = new(2, pages, *page(self.head_dim))
            return kv[0], kv[1]
        if shared and self.cache == "heads":
            kv = new(pages, *page(self.head_dim, 2 * h))
            return (kv[..., 0::2, :], kv[..., 1::2, :]) if self.layout == "bshd" else (kv[:, 0::2], kv[:, 1::2])
        if self.cache == "twice":
            return tuple(new(2 * pages, *page(d))[::2] for d in (self.head_dim, self.head_dim_v))
        if self.cache == "swapped":
            return tuple(new(pages, *(page(d)[n] for n in (1, 0, 2))).swapaxes(1, 2) for d in (self.head_dim, self.head_dim_v))
        return tuple(new(pages, *page(d)) for d in (self.head_dim, self.head_dim_v))


def short(case) -> str:
    """The name of a case, or the beginning of a long one, for a test."""
    name = str(case)
    return name if len(name) < 100 else f"{name[:90]}..."


def grid():
    """Storage kinds x what a query sees x what scores are, each with another geometry."""
    dtype = itertools.cycle(("float32", "float16", "bfloat16", "float64")).__next__
    heads = itertools.cycle([(4, 4), (4, 2), (3, 1), (8, 2), (8, 1), (16, 1)]).__next__
    dims = itertools.cycle([(1, 1), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]).__next__
    size = itertools.cycle([1, 2, 3, 5, 7, 8, 16, 24, 64, 100, 128, 256, 544]).__next__
    cache, layout = itertools.cycle(CACHES).__next__, itertools.cycle(("bshd", "bhsd")).__next__
    option = itertools.cycle(({}, {"softcap": 3.0}, {"sinks": True}, {"alibi": "heads"}, {"scale": -0.3},
                              {"alibi": "batch", "sinks": True, "softcap": 8.0})).__next__  # fmt: skip
    seed = itertools.count().__next__
    window = itertools.cycle([None, (5, None), (3, 2), (0, 0), (None, 4)]).__next__
    cases = []
    for q, k, causal, k_range, positions in itertools.product(
        Q_STORAGE, K_STORAGE, (False, "bottom_right", "top_left"), (False, True), POSITIONS
    ):
        if causal == "top_left" and positions:
            continue
        (h, hk), (d, dv) = heads(), dims()
        n_q = (1, 1, 0, 1) if q == "one" else (1, 7, 0, 17)
        cases.append(ServingCase(
            n_q, (5, 33, 4, 9), h, hk, d, dv, dtype(), q, k, layout(), size(), cache(), causal=causal, k_range=k_range,
            positions=positions, window=window(), seed=seed(), **option(),
        ))  # fmt: skip
    return cases


def lengths():
    """Lengths at the edges of pages, tiles, chunks and batches."""
    cases = []
    for size in (1, 3, 16, 64, 100):
        n_k = (0, 1, size - 1, size, size + 1, 2 * size + 1)
        cases.append(ServingCase((2,) * 6, n_k, page_size=size, slack=0, causal="bottom_right", seed=size))
    edges = (31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023)
    cases.append(ServingCase((1,) * len(edges), edges, q="one", causal="bottom_right", dtype="bfloat16"))
    n_q = (0, 1, 2, 7, 8, 9, 16, 17, 64, 65, 127, 128, 129)
    for k in K_STORAGE:
        cases.append(ServingCase(n_q, (130,) * len(n_q), k=k, causal="bottom_right", dtype="float16"))
        cases.append(ServingCase(n_q, (60,) * len(n_q), k=k, causal="bottom_right", window=(20, 0)))  # n_q > n_k
    for empty in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 3, 3, 3), (3, 3, 3, 0)):
        for q, k in itertools.product(("padded", "packed"), K_STORAGE):
            cases.append(ServingCase(empty, tuple(9 * (n > 0) for n in empty), q=q, k=k, sinks=True))
            cases.append(ServingCase((2, 2, 2, 2), tuple(9 * (n > 0) for n in empty), q=q, k=k, sinks=sum(empty) > 2))
    for batch in (0, 1, 2, 31, 32, 33, 255, 256, 257, 993):
        n_k = tuple(n * 7 % 23 for n in range(batch))
        cases.append(ServingCase((1,) * batch, n_k, 2, 1, 16, q="one", page_size=4))
        cases.append(ServingCase(tuple(n % 3 for n in range(batch)), n_k, 2, 1, 16, page_size=3, causal="bottom_right"))
    for k in K_STORAGE:
        cases.append(ServingCase((0, 0), (0, 0), k=k, slack=0))  # T = 0, W = 0
    return cases


def magnitude(kind):
    """Scores of one kind of ``magnitudes`` and of every magnitude, in every storage, each with another option."""
    dtype = itertools.cycle(("float32", "float16", "bfloat16")).__next__
    storage = itertools.cycle(itertools.product(Q_STORAGE, K_STORAGE)).__next__
    option = itertools.cycle(({}, {"sinks": True}, {"alibi": "heads"}, {"window": (60, None)}, {"softcap": 8.0}, {"k_range": True},
                              {"positions": "random", "alibi": "batch"})).__next__  # fmt: skip
    cases = []
    for exponent, sign in itertools.product(magnitudes.EXPONENTS, (1, -1)):
        q, k = storage()
        n_q = (1, 1, 0, 1) if q == "one" else (1, 7, 0, 17)
        for n_k in ((5, 333, 4, 90), (1500, 70, 3, 40)):
            cases.append(ServingCase(
                n_q, n_k, 4, 2, 64, None, dtype(), q, k, causal="bottom_right", page_size=48, logits=(kind, sign * exponent),
                seed=exponent, **option(),
            ))  # fmt: skip
    return cases


def random_cases(count, seed=0, batch=6, longest=200):
    """``count`` cases of any kind."""
    rng = random.Random(seed)
    for n in range(count):
        size = rng.randint(0, batch)
        q, k, causal = rng.choice(Q_STORAGE), rng.choice(K_STORAGE), rng.choice((False, "bottom_right", "top_left"))
        n_q = [rng.randint(0, 1) if q == "one" else rng.choice((0, 1, 2, rng.randint(0, 70))) for _ in range(size)]
        n_k = [rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, longest))) for _ in range(size)]
        kv = rng.choice((1, 2, 3))
        sides = rng.choice((None, (rng.randint(0, 50), None), (None, rng.randint(0, 9)), (rng.randint(0, 9), 3)))
        case = ServingCase(
            tuple(n_q), tuple(n_k), kv * rng.choice((1, 2, 3, 4)), kv, rng.choice((1, 16, 40, 64, 128)), None,
            rng.choice(("float32", "float16", "bfloat16", "float64")), q, k, rng.choice(("bshd", "bhsd")),
            rng.choice((1, 2, 3, 7, 16, 24, 100)), rng.choice(CACHES), rng.randint(0, 4), causal, sides,
            rng.choice((0.0, 0.0, 2.0)), rng.choice((None, 1.0, -0.2)), rng.random() < 0.3,
            rng.choice((None, None, "heads", "batch")), rng.random() < 0.3,
            None if causal == "top_left" else rng.choice(POSITIONS), None, seed * 1000 + n,
        )  # fmt: skip
        if rng.random() < 0.2:  # what float16 holds too, since tests replace dtypes; scores that are alike, or far apart
            logits = rng.choice(("constant", "doubling")), rng.choice((1, -1)) * rng.randint(10, 27)
            case = dataclasses.replace(case, logits=logits)
        yield case


def angles(count, half, dtype=np.float32, seed=0):
    """(cos, sin) of a table of positions."""
    speed = 10000.0 ** (-np.arange(half) / half)
    turned = np.arange(count)[:, None] * speed
    return np.cos(turned).astype(dtype), np.sin(turned).astype(dtype)


def append_call(case, *, rotary=0, q=False, positions=False, interleaved=False, values=True, dense=False, seed=0):
    """Arguments of ``append`` that go with a case of attention; rotary: half of R."""
    rng = np.random.default_rng([seed, 21])
    given, dtype = case.arguments(), dtype_of(case.dtype)
    padded = case.q == "padded"
    shape = given["q"].shape
    heads_axis = 1 if not padded or case.layout == "bhsd" else 2

    def fresh(heads, d):
        wanted = list(shape)
        wanted[heads_axis], wanted[-1] = heads, d
        return rng.standard_normal(wanted).astype(dtype)

    call = {"k_cache": given["k"], "v_cache": given["v"] if values else None, "k": fresh(case.heads_kv, case.head_dim),
            "v": fresh(case.heads_kv, case.head_dim_v) if values else None, "layout": case.layout}  # fmt: skip
    names = ("cu_seqlens_q", "seqlens_q", "seqlens_k", *(() if dense else ("page_table",)))
    call |= {name: given[name] for name in names if name in given}
    if rotary:
        call |= {"rotary": angles(2048, rotary), "interleaved": interleaved}
        if q:
            call["q"] = fresh(case.heads, case.head_dim)
        if positions:
            call["positions"] = rng.integers(0, 2048, shape[:1] if not padded else (shape[0], shape[1 if case.layout == "bshd" else 2])).astype(np.int32)
    return call
