"""The decoder that ``bench.examples.serving`` runs: layers of attention with random weights, and its dense run in float64.

A layer is one product that makes q, k and v, rotary attention, and one product behind it; there is no feed-forward part, so that
most of the time is attention's. Arrays are those of NumPy on the CPU, or of torch or CuPy.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import machine
from bench.problems.placement import dtype_of
from fa_ext import reference


class Library:
    """The arrays of numpy, torch or cupy; on a GPU in 16 bits, else in float32. torch takes a GPU where it sees one."""

    def __init__(self, name: str):
        self.name = name
        self.xp: Any = importlib.import_module(name)
        self.cuda = name == "cupy" or name == "torch" and self.xp.cuda.is_available()
        self.dtype = {"torch": "bfloat16", "cupy": "float16"}[name] if self.cuda else "float32"
        self.device = "cuda" if self.cuda else "cpu"

    def place(self) -> str:
        """The name of the processor that computes."""
        if not self.cuda:
            return machine.processor()
        if self.name == "torch":
            return self.xp.cuda.get_device_name()
        return self.xp.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def put(self, x: np.ndarray) -> Any:
        """An array with the values of x and its dtype, on the device."""
        return self.xp.from_numpy(x).to(self.device) if self.name == "torch" else self.xp.array(x)

    def rounded(self, x: np.ndarray) -> Any:
        """The same in the decoder's dtype."""
        put = self.put(x)
        return put.to(getattr(self.xp, self.dtype)) if self.name == "torch" else put.astype(self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        if self.name == "torch":
            return self.xp.zeros(shape, dtype=getattr(self.xp, self.dtype), device=self.device)
        return self.xp.zeros(shape, self.dtype)

    def write(self, target: Any, x: np.ndarray) -> None:
        """Copies x into an array on the device, on the current stream."""
        target[...] = self.xp.from_numpy(x) if self.name == "torch" else self.xp.asarray(x)

    def read(self, x: Any) -> np.ndarray:
        """A copy in float32 on the host, behind all work on the current stream."""
        if self.name == "torch":
            return x.float().cpu().numpy().copy()
        return np.array(x.get() if self.cuda else x, np.float32)

    def normal(self, x: Any) -> Any:
        if self.name == "torch":
            return self.xp.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)
        return normal(x.astype("float32")).astype(self.dtype)

    def repeated(self, work: Callable[[], Any], graphs: bool) -> Callable[[], Any]:
        """``work`` to be called again and again: the replay of a CUDA graph for torch on a GPU, if ``graphs``, else itself."""
        if not (graphs and self.cuda and self.name == "torch"):
            return work
        cuda = self.xp.cuda
        beside = cuda.Stream()
        beside.wait_stream(cuda.current_stream())
        with cuda.stream(beside):
            for _ in range(2):
                work()
        cuda.current_stream().wait_stream(beside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            result = work()

        def replay():
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class Model:
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    positions: int
    vocabulary: int = 101

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def weights(self, seed: int, dtype: str) -> dict[str, np.ndarray]:
        """float32 arrays of values that the dtype has. Scores have a deviation of 3: few keys count, and one that is lost shows."""
        rng = np.random.default_rng(seed)

        def matrix(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(self.width))

        found = {"embedding": matrix(self.vocabulary, self.width) * math.sqrt(self.width), "head": matrix(self.width, self.vocabulary)}
        for n in range(self.layers):
            qkv = matrix(self.width, (self.heads + 2 * self.heads_kv) * self.head_dim)
            qkv[:, : self.width] *= 3
            found |= {f"{n}.qkv": qkv, f"{n}.out": matrix(self.width, self.width)}
        return {name: x.astype(dtype_of(dtype)).astype(np.float32) for name, x in found.items()}

    def rotary(self) -> tuple[np.ndarray, np.ndarray]:
        half = self.head_dim // 2
        angle = np.arange(self.positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def normal(x: Any) -> Any:
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5


def forward(model: Model, weights, x, attend, normal, rounded=lambda x: x) -> Any:
    """(T, width) of embeddings x, arrays of any library; ``attend(layer, q, k, v)`` knows the keys, and ``rounded`` is for
    arithmetic that is wider than the dtype."""
    for n in range(model.layers):
        qkv = rounded(normal(x) @ weights[f"{n}.qkv"]).reshape(len(x), -1, model.head_dim)
        q, k, v = qkv[:, : model.heads], qkv[:, model.heads : -model.heads_kv], qkv[:, -model.heads_kv :]
        x = rounded(x + rounded(attend(n, q, k, v).reshape(len(x), -1) @ weights[f"{n}.out"]))
    return normal(x)


def dense(model: Model, weights: dict[str, np.ndarray], tokens: list[int], dtype: str | None = None) -> np.ndarray:
    """(T, vocabulary) logits of one sequence without a cache: in float64, or in float32 with each result rounded to a dtype."""
    work = np.float64 if dtype is None else np.float32

    def rounded(x):
        return x if dtype is None else x.astype(dtype_of(dtype)).astype(work)

    cos, sin = (x.astype(work)[: len(tokens), None] for x in model.rotary())

    def turned(x):
        a, b = np.split(x, 2, axis=-1)
        return rounded(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))

    def attend(_, q, k, v):
        of = (x[None] for x in (turned(q), turned(k), v))
        if dtype is None:
            return reference.attention(*of, causal=True, layout="bshd")[0][0]
        return reference.plain(*of, causal=True, layout="bshd", dtype=dtype)[0][0].astype(work)

    wide = {name: x.astype(work) for name, x in weights.items()}
    hidden = forward(model, wide, wide["embedding"][tokens], attend, lambda x: rounded(normal(x)), rounded)
    return rounded(hidden @ wide["head"])


def deviations(model: Model, weights: dict[str, np.ndarray], tokens: list[int], logits: np.ndarray, dtype: str) -> tuple[float, float]:
    """Largest distances from the dense float64 run of all tokens but the last: of a request's logits, which chose its last
    tokens, and of a dense run in the dtype."""
    exact = dense(model, weights, tokens[:-1])[-len(logits) :]
    plain = dense(model, weights, tokens[:-1], dtype)[-len(logits) :]
    return float(np.abs(logits - exact).max()), float(np.abs(plain - exact).max())
