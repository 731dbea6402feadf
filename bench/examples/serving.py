"""Continuous batching as inference engines do it, with its speed and latencies, checked against a dense float64 run.

    python -m bench.examples.serving                          # small sizes on the CPU; those of an 8B model's layers on a GPU
    python -m bench.examples.serving --requests 8 --new 32

Requests come at random times and share one pool of pages. Each step packs one token of every sequence that generates, and within a
budget pieces of prompts that wait, into one call of ``attention`` a layer; a sequence that is done gives its pages back. On a GPU
through torch, steps are CUDA graphs, and the same engine runs on FlashAttention-3, where it is found, in turns with fa_ext.

Time to first token counts from a request's arrival. Times are the host's, with all that the engine does beside its passes. Logits of
some requests meet a dense float64 run of each alone: they may be off by twice as much as a dense run in the same dtype is.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import dataclass, field

import numpy as np

from bench.examples.decoder import Library, Model, deviations
from bench.examples.engine import Attend, Engine, Request, by_fa_ext, by_flash_attention
from bench.implementations import peers
from bench.implementations.flash3 import FlashAttention3, VllmFlashAttention3
from bench.machine.device import Cuda

#: Names of options with their defaults on the CPU and on a GPU.
SIZES = {
    "requests": (32, 256), "rate": (50.0, 200.0), "prompt": (96, 1024), "new": (24, 192), "batch": (8, 64), "budget": (64, 1024),
    "pages": (96, 8192), "page-size": (16, 16), "layers": (4, 4), "heads": (8, 32), "heads-kv": (2, 8), "head-dim": (64, 128),
    "rounds": (1, 3), "checked": (6, 2), "seed": (0, 0),
}  # fmt: skip
MEANINGS = {
    "rate": "requests a second that arrive, on average; inf: all at once", "prompt": "median of the prompts' lengths",
    "new": "median of the tokens to generate", "batch": "requests that run at a time", "pages": "pages of the cache",
    "budget": "tokens a step, of prompts and of what is generated", "rounds": "runs of the whole stream",
    "checked": "requests that meet float64, from the shortest to the median",
}  # fmt: skip
PEERS = ("flash-attn-3", "vllm-flash-attn-3")


@dataclass
class Figures:
    """Of all rounds of an engine."""

    seconds: float = 0.0  # from the first arrival to the last token
    busy: float = 0.0  # those in which something ran
    new: int = 0
    prompt: int = 0
    first: list[float] = field(default_factory=list)  # seconds from arrival to first token
    between: list[float] = field(default_factory=list)  # seconds between tokens
    mixed: list[float] = field(default_factory=list)  # seconds of the passes with prompts
    decoding: list[float] = field(default_factory=list)  # of those without
    deviation: float = 0.0  # from float64
    plain: float = 0.0  # the same of a dense run in the dtype

    def add(self, requests: list[Request], seconds: float, busy: float, spent: tuple[list[float], list[float]]) -> None:
        self.seconds, self.busy = self.seconds + seconds, self.busy + busy
        self.mixed += spent[False]
        self.decoding += spent[True]
        for request in requests:
            self.new += request.new
            self.prompt += len(request.tokens) - request.new
            self.first.append(request.times[0] - request.arrives)
            self.between += np.diff(request.times).tolist()

    def rows(self) -> dict[str, str]:
        def milliseconds(found: list[float]) -> str:
            return " / ".join(f"{1e3 * x:.2f}" for x in np.quantile(found, (0.5, 0.99))) if found else "-"

        return {
            "new tokens a second": f"{self.new / self.seconds:.0f}",
            "tokens a second, with the prompts": f"{(self.new + self.prompt) / self.seconds:.0f}",
            "ms to the first token, median / p99": milliseconds(self.first),
            "ms between tokens, median / p99": milliseconds(self.between),
            "ms a pass, one token each, median / p99": milliseconds(self.decoding),
            "ms a pass with prompts, median / p99": milliseconds(self.mixed),
            "share of the time in which it ran": f"{self.busy / self.seconds:.0%}",
            "share of that in passes": f"{sum(self.mixed + self.decoding) / self.busy:.0%}",
            "off float64 by (a dense run is by)": f"{self.deviation:.2g} ({self.plain:.2g})",
        }


def drawn(args: argparse.Namespace, vocabulary: int) -> list[Request]:
    """The stream: exponential gaps, lengths that are lognormal and at most four times their median."""
    rng = np.random.default_rng(args.seed)
    arrivals = np.cumsum(rng.exponential(1 / args.rate, args.requests))

    def lengths(median: int) -> np.ndarray:
        return np.clip(median * rng.lognormal(0, 0.6, args.requests), 1, 4 * median).astype(int)

    prompts, new = lengths(args.prompt), lengths(args.new)
    return [Request(float(at), rng.integers(0, vocabulary, n).tolist(), int(m)) for at, n, m in zip(arrivals, prompts, new)]


def anew(requests: list[Request]) -> list[Request]:
    return [Request(request.arrives, list(request.tokens), request.new) for request in requests]


def attentions(library: Library) -> tuple[dict[str, Attend], dict[str, str]]:
    """({name: attention}, {name of a peer: why it is not there})."""
    found: dict[str, Attend] = {"fa_ext": by_fa_ext}
    if not (library.cuda and library.name == "torch"):
        return found, dict.fromkeys(PEERS, "it takes tensors of torch on a GPU")
    loaded, missing = peers.available(Cuda(), list(PEERS))
    flash = [peer for peer in loaded if isinstance(peer, (FlashAttention3, VllmFlashAttention3))]
    return found | {peer.name: by_flash_attention(peer.ops.fwd) for peer in flash}, missing


def measured(engines: dict[str, Engine], requests: list[Request], rounds: int) -> tuple[dict[str, Figures], dict[str, list[Request]]]:
    """Figures of each engine, and the requests of its last round. All run a round before any runs the next."""
    figures, done = {name: Figures() for name in engines}, {}
    for _ in range(rounds):
        for name, engine in engines.items():
            done[name], engine.spent = anew(requests), ([], [])
            figures[name].add(done[name], *engine.run(done[name]), engine.spent)
    return figures, done


def options(argv: list[str] | None) -> tuple[argparse.Namespace, Library]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (small, large) in SIZES.items():
        told = f"{MEANINGS.get(name, '')} ({small}; on a GPU {large})".strip()
        parser.add_argument(f"--{name}", type=type(small), help=told)
    parser.add_argument("--on", choices=("numpy", "torch", "cupy"), help="whose arrays; default: torch where it sees a GPU, else numpy")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args(argv)
    library = Library(args.on or "numpy")
    if args.on is None and importlib.util.find_spec("torch") and (torch := Library("torch")).cuda:
        library = torch
    for name, defaults in SIZES.items():
        name = name.replace("-", "_")
        if getattr(args, name) is None:
            setattr(args, name, defaults[library.cuda])
        if not getattr(args, name) > 0 and name != "seed":
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; accepted: numbers over 0")
    return args, library


def main(argv: list[str] | None = None) -> dict[str, Figures]:
    args, library = options(argv)
    sizes = {"layers": args.layers, "heads": args.heads, "heads_kv": args.heads_kv, "head_dim": args.head_dim}
    requests = drawn(args, Model.vocabulary)
    model = Model(**sizes, positions=max(len(r.tokens) + r.new for r in requests))
    weights = model.weights(args.seed, library.dtype)
    found, missing = attentions(library)
    engines = {
        name: Engine(model, weights, library, attend, batch=args.batch, budget=args.budget, pages=args.pages, page_size=args.page_size, graphs=not args.eager)
        for name, attend in found.items()
    }  # fmt: skip
    figures, done = measured(engines, requests, args.rounds)
    prompts, new = ([f(r) for r in requests] for f in (lambda r: len(r.tokens), lambda r: r.new))
    print(f"{args.requests} requests, {args.rate:g} a second, prompts of {min(prompts)} to {max(prompts)} tokens, {min(new)} to {max(new)} new ones each")
    print(f"at most {args.batch} at a time and {args.budget} tokens a step, on {args.pages} pages of {args.page_size} keys")
    print(f"{args.layers} layers, {args.heads} heads over {args.heads_kv}, head_dim {args.head_dim}, {library.dtype}; {library.name} on {library.place()}")
    for name, requests in done.items():
        by_length = sorted(requests, key=lambda request: len(request.tokens))
        for n in np.linspace(0, len(requests) // 2, args.checked, dtype=int):
            request = by_length[n]
            own, plain = deviations(model, weights, request.tokens, np.stack(request.logits), library.dtype)
            figures[name].deviation, figures[name].plain = max(figures[name].deviation, own), max(figures[name].plain, plain)
    report(figures, missing)
    wrong = [name for name, x in figures.items() if not x.deviation <= 2 * x.plain]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: that is too far from float64; accepted: twice a dense run's distance")
    return figures


def report(figures: dict[str, Figures], missing: dict[str, str]) -> None:
    columns = {name: x.rows() for name, x in figures.items()}
    print(f"{'':40}" + "".join(f"{name:>20}" for name in columns))
    for row in columns["fa_ext"]:
        print(f"{row:40}" + "".join(f"{column[row]:>20}" for column in columns.values()))
    if missing:
        print("not here: " + "; ".join(f"{name} ({why})" for name, why in missing.items()))


if __name__ == "__main__":
    main()
