"""The common part of the training examples: their arguments, the text, the bound on the losses, and how results are shown."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

SIZES = {"layers": 2, "width": 64, "heads": 4, "seq": 64, "vocab": 128, "batch": 8, "steps": 40}


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description=description)
    for name, default in SIZES.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW, from step WARMUP on")
    made.add_argument("--warmup", type=int, default=5, help="steps over which the rate rises")
    made.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, help="products in bfloat16 (default: on a GPU)")
    made.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return made


def rate(args: argparse.Namespace, step: int) -> float:
    """The learning rate of a step, the first of which is 0. A large model that begins with the whole of it may learn nothing for
    hundreds of steps, with single losses far off, and then two runs differ for no reason in their attention."""
    return args.rate * min(1.0, (step + 1) / max(args.warmup, 1))


def text(batch: int, seq: int, vocab: int, step: int) -> np.ndarray:
    """(batch, seq + 1) of a chain, int64: a token follows from the one before it, but for one in ten."""
    draws, words = np.random.default_rng(1000 + step), min(vocab, 512)
    ids = draws.integers(words, size=(batch, seq + 1))
    free = draws.random(ids.shape) < 0.1
    for n in range(1, seq + 1):
        ids[:, n] = np.where(free[:, n], ids[:, n], (3 * ids[:, n - 1] + 7) % words)
    return ids


@functools.lru_cache(maxsize=1)
def matrices(layers: int, width: int, seq: int, vocab: int) -> dict[str, np.ndarray]:
    """The weights that both models begin with, float32, to be copied, by name: {"words", "places", and for layer n from 0 on "n.into", "n.out",
    "n.up", "n.down"}, each (inputs, outputs), to be multiplied from the right. Beside them a model has the gains of its norms, ones
    at first. Norms and products have no biases: with them the loss on this text jumps and stays near ln 512 for hundreds of steps,
    whatever the attention (``bench/log/training.md``)."""
    draws, w = np.random.default_rng(0), width
    shapes = {"words": (vocab, w), "places": (seq, w)}
    for n in range(layers):
        shapes |= {f"{n}.into": (w, 3 * w), f"{n}.out": (w, w), f"{n}.up": (w, 4 * w), f"{n}.down": (4 * w, w)}
    return {name: 0.02 * draws.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def take_rounds(
    args: argparse.Namespace, runs: dict[str, Callable[[int, Any], float]], put: Callable[[np.ndarray], Any]
) -> dict[str, tuple[list[float], float]]:
    """{name: (losses, median seconds a step)} of runs, functions of a step's number, 0 at first, and of what ``put`` makes of its
    text. All make a step before any makes the next, in an order that rotates: what drifts meanwhile, such as a GPU's clock, meets all alike.
    A run returns when its step is done."""
    names = list(runs)
    losses, seconds = ({name: [] for name in names} for _ in range(2))
    for n in range(args.steps):
        ids, first = put(text(args.batch, args.seq, args.vocab, n)), n % len(names)
        for name in names[first:] + names[:first]:
            begun = time.perf_counter()
            losses[name].append(runs[name](n, ids))
            seconds[name].append(time.perf_counter() - begun)
    return {name: (losses[name], statistics.median(seconds[name])) for name in names}


class Gap(NamedTuple):
    ratio: float  #: of the loss to the reference's, as a multiple of the largest between two backends so far
    step: int  #: the first of all is 1
    itself: float


def gaps(found: dict[str, tuple[list[float], float]], backends: list[str], reference: str) -> dict[str, Gap]:
    """{name of a run that is of no backend: its largest gap to the reference, a backend; infinite where a loss is no number}. The gap
    between backends counts as at least the spacing of float32 numbers there. ``found`` has losses and seconds a step of each run."""
    peers = [losses for name, (losses, _) in found.items() if name in backends]
    between = [max([2**-23 * at[0], *(abs(a - b) for a, b in itertools.combinations(at, 2))]) for at in zip(*peers, strict=True)]
    bound = list(itertools.accumulate(between, max))
    largest = {}
    for name, (losses, _) in found.items():
        if name not in backends:
            own = [math.inf if math.isnan(a) else abs(a - b) for a, b in zip(losses, found[reference][0], strict=True)]
            largest[name] = max(Gap(g / b, n + 1, g) for n, (g, b) in enumerate(zip(own, bound, strict=True)))
    return largest


def rise(losses: list[float]) -> float:
    """The most that a loss was above the lowest before it. Where it is large, the run says little of the attention."""
    return max(at - least for at, least in zip(losses, itertools.accumulate(losses, min), strict=True))


def show(args, found: dict[str, tuple[list[float], float]], largest: dict[str, Gap], **others) -> None:
    """The table, or with --json the document {"runs", "sizes", ...}."""
    if args.json:
        runs = {name: {"first": losses[0], "last": losses[-1], "rise": rise(losses), "milliseconds": 1e3 * seconds}
                for name, (losses, seconds) in found.items()}  # fmt: skip
        for name, gap in largest.items():
            runs[name] |= {"gap": gap.ratio, "gap_step": gap.step, "gap_itself": gap.itself}
        recipe = {"rate": args.rate, "warmup": args.warmup}
        print(json.dumps({"sizes": {name: getattr(args, name) for name in SIZES}, "recipe": recipe, "runs": runs, **others}))
        return
    print(f"{'run':18} {'first loss':>10} {'last loss':>10} {'rise':>6} {'ms a step':>10} {'gap / gap of backends':>22}")
    for name, (losses, seconds) in found.items():
        ratio = f"{largest[name].ratio:.2f}, step {largest[name].step}" if name in largest else ""
        print(f"{name:18} {losses[0]:10.4f} {losses[-1]:10.4f} {rise(losses):6.2f} {1e3 * seconds:10.2f} {ratio:>22}")
