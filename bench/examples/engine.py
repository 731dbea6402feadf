"""Continuous batching over a paged cache, as ``bench.examples.serving`` runs it: pages, requests, and the steps of an engine.

A step packs what every running sequence brings, one token or a piece of a prompt, into one call of ``append`` and one of
``attention`` a layer. Shapes do not change from step to step, and lengths and tables are read from device memory alone, so that two
CUDA graphs serve all steps: one where each sequence has one token, and one for a budget of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import fa_ext
from bench.examples.decoder import Library, Model, forward
from bench.implementations import flash3


class Pages:
    """The pages of a cache by number: a list of those that are free, of which the last is taken first."""

    def __init__(self, count: int):
        self.count, self.free, self.used = count, list(range(count)), set[int]()

    def take(self, count: int) -> list[int]:
        """Pages that nobody has. MemoryError where there are too few."""
        if count > len(self.free):
            raise MemoryError(f"{count} pages are asked for, {len(self.free)} of {self.count} are free")
        rest = len(self.free) - count
        taken, self.free = self.free[rest:], self.free[:rest]
        self.used.update(taken)
        return taken

    def give(self, pages: list[int]) -> None:
        """Takes back what ``take`` gave."""
        if len(set(pages) & self.used) < len(pages):
            raise ValueError(f"pages are {pages}; accepted: pages in use, each once")
        self.used.difference_update(pages)
        self.free += pages


@dataclass
class Request:
    arrives: float  # seconds after the beginning
    tokens: list[int]  # the prompt, then what was generated
    new: int  # how many tokens to generate
    cached: int = 0  # tokens whose keys lie in the cache
    pages: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # from which each new token was chosen
    times: list[float] = field(default_factory=list)  # when each new token was there


class Step(NamedTuple):
    """Index arrays of a step on the device, and the bound on a sequence's queries."""

    page_table: Any
    seqlens_k: Any
    cu_seqlens_q: Any
    max_seqlen_q: int


#: q (T, H, D), keys and values (pages, page_size, Hk, D), the step -> (T, H, D)
Attend = Callable[[Any, Any, Any, Step], Any]


def by_fa_ext(q: Any, keys: Any, values: Any, step: Step) -> Any:
    return fa_ext.attention(q, keys, values, causal="bottom_right", layout="bshd", **step._asdict())


def by_flash_attention(operator: Any) -> Attend:
    """The same by an operator ``fwd`` of FlashAttention-3, whose keywords vLLM's engine uses."""

    def attend(q: Any, keys: Any, values: Any, step: Step) -> Any:
        asked = {"q": q, "k": keys, "v": values, "page_table": step.page_table, "seqused_k": step.seqlens_k, "is_causal": True,
                 "cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q, "softmax_scale": q.shape[-1] ** -0.5,
                 "window_size_left": -1, "window_size_right": -1, "num_splits": 0, "softcap": 0.0}  # fmt: skip
        return operator(*flash3.arguments_for(operator, asked))[0]

    return attend


class Engine:
    """Runs requests, at most ``batch`` at a time and ``budget`` tokens a step, on ``pages`` pages of ``page_size`` keys a layer.

    Row b of a step is the b-th of ``running``; rows behind those are empty sequences.
    """

    def __init__(
        self, model: Model, weights: dict[str, np.ndarray], library: Library, attend: Attend, *,
        batch: int, budget: int, pages: int, page_size: int, graphs: bool = True,
    ):  # fmt: skip
        if budget < batch:
            raise ValueError(f"budget is {budget}; accepted: at least batch, {batch}, as each running sequence may bring a token")
        self.model, self.attend, self.library = model, attend, library
        self.batch, self.budget, self.page_size, self.graphs = batch, budget, page_size, graphs
        self.pages = Pages(pages)
        self.running: list[Request] = []
        self.spent: tuple[list[float], list[float]] = ([], [])  # seconds of each pass with prompts, and of each where all decode
        self.weights = {name: library.rounded(x) for name, x in weights.items()}
        self.rotary = tuple(library.put(x) for x in model.rotary())
        self.cache = library.zeros((model.layers, 2, pages, page_size, model.heads_kv, model.head_dim))
        width = self.pages_of(model.positions)
        self.host = np.zeros(batch * width + 2 * batch + 1 + budget, np.int32)  # all that a step says, so that one copy takes it over
        self.there = library.put(self.host)
        self.table, self.lengths, self.starts, self.tokens = self.parts(self.host)
        self.passes = {longest: self.one_pass(longest) for longest in sorted({1, budget})}

    def pages_of(self, keys: int) -> int:
        return -(-keys // self.page_size)

    def parts(self, index: Any) -> tuple[Any, Any, Any, Any]:
        """Views: (batch, width) table, lengths, starts, tokens."""
        batch, width = self.batch, self.pages_of(self.model.positions)
        ends = np.cumsum([batch * width, batch, batch + 1])
        return (index[: ends[0]].reshape(batch, width), index[ends[0] : ends[1]], index[ends[1] : ends[2]], index[ends[2] :])

    def one_pass(self, longest: int) -> Callable[[], Any]:
        """The model over what the index arrays say, where no sequence brings more than ``longest`` tokens: (batch, vocabulary)
        logits behind each sequence's last token."""
        table, lengths, starts, tokens = self.parts(self.there)
        step = Step(table, lengths, starts, longest)
        where = {"layout": "bshd", "page_table": table, "seqlens_k": lengths, "cu_seqlens_q": starts}
        tokens = tokens[: self.batch if longest == 1 else self.budget]

        def attend(layer, q, k, v):
            keys, values = self.cache[layer, 0], self.cache[layer, 1]
            q = fa_ext.append(keys, values, k, v, q=q, rotary=self.rotary, **where)
            return self.attend(q, keys, values, step)

        def work():
            x = forward(self.model, self.weights, self.weights["embedding"][tokens], attend, self.library.normal)
            return x[starts[1:] - 1] @ self.weights["head"]

        return self.library.repeated(work, self.graphs)

    def admit(self, waiting: list[Request], now: float) -> None:
        """Requests that are there begin, in order, while the batch has a row and the cache the pages for all of their keys."""
        while waiting and waiting[0].arrives <= now and len(self.running) < self.batch:
            needed = self.needed(waiting[0])
            if needed > len(self.pages.free):
                return
            request = waiting.pop(0)
            request.pages = self.pages.take(needed)
            self.table[len(self.running), :needed] = request.pages
            self.running.append(request)

    def needed(self, request: Request) -> int:
        """Pages of a request: its last token has no key."""
        return self.pages_of(len(request.tokens) + request.new - 1)

    def shares(self) -> list[int]:
        """How many tokens each running request brings: one that it generated, or a piece of its prompt. Prompts share what those
        leave of the budget, in order."""
        left = [len(r.tokens) - r.cached for r in self.running]
        rest = self.budget - sum(bool(r.logits) for r in self.running)
        counts = []
        for request, n in zip(self.running, left, strict=True):
            counts.append(n if request.logits else min(n, rest))
            rest -= 0 if request.logits else counts[-1]
        return counts

    def step(self) -> list[Request]:
        """One pass over what every running request brings next; returns those that have a new token."""
        counts, brought = self.shares(), []
        for request, n in zip(self.running, counts, strict=True):
            brought += request.tokens[request.cached : request.cached + n]
            request.cached += n
        rows = len(counts)
        self.tokens[: len(brought)], self.lengths[rows:], self.starts[rows + 1 :] = brought, 0, len(brought)
        self.lengths[:rows], self.starts[1 : rows + 1] = [request.cached for request in self.running], np.cumsum(counts)
        decodes = max(counts) == 1
        began = time.perf_counter()
        self.library.write(self.there, self.host)
        logits = self.library.read(self.passes[1 if decodes else self.budget]())
        self.spent[decodes].append(time.perf_counter() - began)
        chosen = logits.argmax(-1).tolist()
        fresh = [b for b, request in enumerate(self.running) if request.cached == len(request.tokens)]
        found = [self.running[b] for b in fresh]
        for b, request in zip(fresh, found, strict=True):
            request.logits.append(logits[b])
            request.tokens.append(chosen[b])
        for b in reversed(fresh):  # rows before b stay where they are
            if len(self.running[b].logits) == self.running[b].new:
                self.end(b)
        return found

    def end(self, b: int) -> None:
        """A request gives its pages back; those behind it move up."""
        self.pages.give(self.running.pop(b).pages)
        self.table[b:-1] = self.table[b + 1 :]

    def run(self, requests: list[Request], clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Seconds from the first arrival to the last token, and those of them in which something ran. The time to the next arrival, where
        nothing runs, is counted and not waited for."""
        for request in requests:
            if not request.tokens or request.new < 1 or len(request.tokens) + request.new > self.model.positions:
                raise ValueError(f"a request has {len(request.tokens)} + {request.new} tokens; accepted: 1 + 1 to {self.model.positions} in all")
            if self.needed(request) > self.pages.count:
                raise MemoryError(f"a request of {len(request.tokens)} + {request.new} tokens needs more pages than there are, {self.pages.count}")
        waiting = sorted(requests, key=lambda request: request.arrives)
        first = now = waiting[0].arrives
        start, idle = clock() - first, 0.0
        while waiting or self.running:
            now = clock() - start
            if not self.running and waiting[0].arrives > now:
                idle += waiting[0].arrives - now
                start -= waiting[0].arrives - now
                now = waiting[0].arrives
            self.admit(waiting, now)
            fresh = self.step()
            now = clock() - start
            for request in fresh:
                request.times.append(now)
        return now - first, now - first - idle
