"""What the training examples share: their arguments, the text, the bound on the losses, and how results are shown."""

from __future__ import annotations

import argparse
import functools
import itertools
import json

import numpy as np

SIZES = {"layers": 2, "width": 64, "heads": 4, "seq": 64, "vocab": 128, "batch": 8, "steps": 40}


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description=description)
    for name, default in SIZES.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW")
    made.add_argument("--float32", dest="bfloat16", action="store_false", help="nothing in bfloat16")
    made.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return made


@functools.lru_cache(maxsize=1024)
def text(batch: int, seq: int, vocab: int, step: int) -> np.ndarray:
    """(batch, seq + 1) of a chain, int64: a token follows from the one before it, but for one in ten."""
    draws, words = np.random.default_rng(1000 + step), min(vocab, 512)
    ids = draws.integers(words, size=(batch, seq + 1))
    free = draws.random(ids.shape) < 0.1
    for n in range(1, seq + 1):
        ids[:, n] = np.where(free[:, n], ids[:, n], (3 * ids[:, n - 1] + 7) % words)
    return ids


def gaps(found: dict[str, tuple[list[float], float]], backends: list[str], reference: str) -> dict[str, float]:
    """{name of a run that is of no backend: its largest gap to the reference, a backend, as a multiple of the largest between any
    two backends so far, which is at least the spacing of float32 numbers there}. ``found`` has losses and seconds a step of each run."""
    peers = [losses for name, (losses, _) in found.items() if name in backends]
    between = [max([2**-23 * at[0], *(abs(a - b) for a, b in itertools.combinations(at, 2))]) for at in zip(*peers, strict=True)]
    bound = list(itertools.accumulate(between, max))
    ratios = {}
    for name, (losses, _) in found.items():
        if name not in backends:
            gap = [abs(a - b) for a, b in zip(losses, found[reference][0], strict=True)]
            ratios[name] = max(g / b for g, b in zip(gap, bound, strict=True))
    return ratios


def show(args, found: dict[str, tuple[list[float], float]], ratios: dict[str, float], **others) -> None:
    """The table, or with --json the document {"runs", "sizes", ...}."""
    if args.json:
        runs = {name: {"first": losses[0], "last": losses[-1], "milliseconds": 1e3 * seconds} for name, (losses, seconds) in found.items()}
        for name, ratio in ratios.items():
            runs[name]["gap"] = ratio
        print(json.dumps({"sizes": {name: getattr(args, name) for name in SIZES}, "runs": runs, **others}))
        return
    print(f"{'run':18} {'first loss':>10} {'last loss':>10} {'ms a step':>10} {'gap / gap of backends':>22}")
    for name, (losses, seconds) in found.items():
        ratio = f"{ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:18} {losses[0]:10.4f} {losses[-1]:10.4f} {1e3 * seconds:10.2f} {ratio:>22}")
