"""A small decoder with a paged cache: generates tokens with random weights, and checks itself against a dense float64 run.

    python -m bench.examples.serving --requests 8 --new 32

Requests of different lengths share one pool of pages. Each step packs what the running sequences bring, a piece of a prompt
or one token, writes their keys by ``append`` and attends by one call of ``attention``; a sequence that is done gives its
pages back, and the next request takes its place in the batch, without any other call. NumPy, CuPy and torch arrays do alike
(``--on``); on a GPU it needs a kernel that takes paged keys, and says so where there is none.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from dataclasses import dataclass, field

import numpy as np

import fa_ext


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder: pre-normalised attention with rotary embedding, then a gated layer, ``layers`` times."""

    layers: int = 2
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    vocabulary: int = 101
    positions: int = 4096

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def weights(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)

        def matrix(*shape):
            return (rng.standard_normal(shape) / math.sqrt(shape[-2])).astype(np.float32)

        found = {"embedding": matrix(self.vocabulary, self.width) * 8}
        for n in range(self.layers):
            heads = self.heads + 2 * self.heads_kv
            found |= {f"{n}.qkv": matrix(self.width, heads * self.head_dim), f"{n}.out": matrix(self.width, self.width),
                      f"{n}.gate": matrix(self.width, 4 * self.width), f"{n}.down": matrix(2 * self.width, self.width)}  # fmt: skip
        return found

    def rotary(self) -> tuple[np.ndarray, np.ndarray]:
        half = self.head_dim // 2
        angle = np.arange(self.positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def forward(model, weights, x, attend, exp):
    """(T, vocabulary) logits of embeddings x; ``attend(layer, q, k, v)`` knows the keys. Arrays of any library."""

    def normal(x):
        return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5

    for n in range(model.layers):
        qkv = (normal(x) @ weights[f"{n}.qkv"]).reshape(len(x), -1, model.head_dim)
        q, k, v = qkv[:, : model.heads], qkv[:, model.heads : -model.heads_kv], qkv[:, -model.heads_kv :]
        x = x + attend(n, q, k, v).reshape(len(x), -1) @ weights[f"{n}.out"]
        gate = normal(x) @ weights[f"{n}.gate"]
        a, b = gate[:, : 2 * model.width], gate[:, 2 * model.width :]
        x = x + (a / (1 + exp(-a)) * b) @ weights[f"{n}.down"]
    return normal(x) @ weights["embedding"].T


@dataclass
class Request:
    tokens: list[int]
    new: int
    cached: int = 0  # tokens whose keys lie in the cache
    pages: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # from which each new token was chosen


class Engine:
    """Runs requests, at most ``batch`` at a time, on ``pages`` pages of ``page_size`` keys a layer."""

    def __init__(self, model, weights, *, batch, pages, page_size, chunk, library):
        self.model, self.batch, self.page_size, self.chunk = model, batch, page_size, chunk
        self.xp = importlib.import_module(library)
        self.put = {"numpy": np.asarray, "torch": getattr(self.xp, "from_numpy", None)}.get(library, self.xp.asarray)
        self.weights = {name: self.put(x) for name, x in weights.items()}
        self.rotary = tuple(self.put(x) for x in model.rotary())
        shape = (model.layers, 2, pages, page_size, model.heads_kv, model.head_dim)
        self.cache = self.put(np.zeros(shape, np.float32))
        self.free = list(range(pages))
        self.table = np.zeros((batch, pages), np.int32)
        self.rows: list[Request | None] = [None] * batch

    def admit(self, waiting: list[Request]) -> None:
        """Gives free rows of the batch to requests whose pages are there."""
        for b, running in enumerate(self.rows):
            needed = -(-(len(waiting[0].tokens) + waiting[0].new) // self.page_size) if waiting else 0
            if running is None and waiting and needed <= len(self.free):
                self.rows[b] = request = waiting.pop(0)
                request.pages, self.free = self.free[:needed], self.free[needed:]
                self.table[b, :needed] = request.pages

    def step(self) -> int:
        """One forward pass of what every running sequence brings next; how many tokens that were."""
        brought = [r.tokens[r.cached : r.cached + self.chunk] if r else [] for r in self.rows]
        counts = [len(x) for x in brought]
        lengths = [r.cached + n if r else 0 for r, n in zip(self.rows, counts)]
        common = {"layout": "bshd", "page_table": self.put(self.table), "seqlens_k": self.put(np.array(lengths, np.int32)),
                  "cu_seqlens_q": self.put(np.cumsum([0, *counts]).astype(np.int32))}  # fmt: skip

        def attend(layer, q, k, v):
            keys, values = self.cache[layer, 0], self.cache[layer, 1]
            q = fa_ext.append(keys, values, k, v, q=q, rotary=self.rotary, **common)
            return fa_ext.attention(q, keys, values, causal="bottom_right", **common)

        tokens = self.put(np.array([t for x in brought for t in x], np.int64))
        logits = forward(self.model, self.weights, self.weights["embedding"][tokens], attend, self.xp.exp)
        for b, (request, end) in enumerate(zip(self.rows, np.cumsum(counts))):
            if request is None:
                continue
            request.cached += counts[b]
            if request.cached == len(request.tokens):
                request.logits.append(fa_ext.to_numpy(logits[int(end) - 1]))
                request.tokens.append(int(request.logits[-1].argmax()))
            if len(request.logits) == request.new:
                self.free += request.pages
                self.rows[b] = None
        return sum(counts)

    def run(self, requests: list[Request]) -> int:
        waiting, passed = list(requests), 0
        while waiting or any(self.rows):
            self.admit(waiting)
            if not any(self.rows):
                raise MemoryError("a request needs more pages than there are")
            passed += self.step()
        return passed


def deviation(model, weights, request, prompt) -> float:
    """Largest difference between a request's logits and those of one dense float64 run over all its tokens."""
    wide = {name: x.astype(np.float64) for name, x in weights.items()}
    cos, sin = (x.astype(np.float64)[: len(request.tokens), None] for x in model.rotary())

    def turned(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(_, q, k, v):
        out, _ = fa_ext.reference.attention(turned(q)[None], turned(k)[None], v[None], causal=True, layout="bshd")
        return out[0]

    logits = forward(model, wide, wide["embedding"][request.tokens], attend, np.exp)
    return float(np.abs(logits[prompt - 1 : -1] - np.stack(request.logits)).max())


def main(argv=None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 8), ("new", 32), ("batch", 4), ("page-size", 16), ("pages", 48), ("chunk", 24), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--on", choices=("numpy", "torch", "cupy"), default="numpy", help="whose arrays")
    args = parser.parse_args(argv)
    model = Model()
    weights, rng = model.weights(args.seed), np.random.default_rng(args.seed)
    prompts = [int(n) for n in rng.integers(1, 80, args.requests)]
    requests = [Request(rng.integers(0, model.vocabulary, n).tolist(), args.new) for n in prompts]
    engine = Engine(model, weights, batch=args.batch, pages=args.pages, page_size=args.page_size, chunk=args.chunk, library=args.on)
    begun = time.perf_counter()
    passed = engine.run(requests)
    seconds = time.perf_counter() - begun
    worst = max(deviation(model, weights, r, n) for r, n in zip(requests, prompts))
    made = args.requests * args.new
    print(f"{args.requests} requests, prompts of {min(prompts)} to {max(prompts)} tokens, {args.new} new ones each, "
          f"{args.batch} at a time on {args.pages} pages of {args.page_size}")  # fmt: skip
    print(f"{made / seconds:.0f} new tokens a second, {passed / seconds:.0f} with the prompts")
    print(f"logits are within {worst:.2g} of a dense float64 run")
    if worst > 1e-3:
        raise SystemExit("that is too much")
    return {"deviation": worst, "tokens": made, "seconds": seconds, "free_pages": len(engine.free)}


if __name__ == "__main__":
    main()
