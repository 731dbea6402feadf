"""How often a kernel leaves the bounds where scores are large, over many seeds: ``python -m tests.contract.large_logits --kernels simt``.

Large scores are where the order of float32 sums shows: few keys decide a row, and what rounding does to their scores
goes straight into the result. A kernel whose sums are in plain's order (``fa_ext/reference/__init__.py``) is never over; the counts of
one whose order is a library's are what this prints.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass

import numpy as np

import fa_ext
from bench.problems.placement import dtype_of
from fa_ext import reference
from fa_ext.judge import judge
from tests.contract import runner

AMPLITUDES = (1, 5, 10, 20, 40)
HEAD_DIMS = (16, 64, 128, 256)


@dataclass
class Count:
    """The results of some seeds for one kernel, head_dim and amplitude."""

    seeds: int = 0
    over: int = 0  #: results outside of any bound
    worst: float = 0.0  #: largest max |error| over its bound
    worst_lse: float = 0.0  #: largest |LSE error| over its bound


def problem(seed: int, head_dim: int, amplitude: float, dtype: str = "float32") -> list[np.ndarray]:
    """q, k and v of (1, 4, 16, head_dim), normal; q and k times ``amplitude``."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 4, 16, head_dim), dtype=np.float32) for _ in range(3))
    return [x.astype(dtype_of(dtype)) for x in (q * np.float32(amplitude), k * np.float32(amplitude), v)]


def count(names: list[str], seeds: range, head_dim: int, amplitude: float, dtype: str = "float32") -> dict[str, Count]:
    """The counts of each kernel. Raises what a kernel raises that does not take these calls."""
    found = {name: Count() for name in names}
    for seed in seeds:
        given = problem(seed, head_dim, amplitude, dtype)
        truth, plain = reference.attention(*given), reference.plain(*given)
        for name, counted in found.items():
            arrays = given if runner.device_of(name) == "cpu" else [fa_ext.to_device(x) for x in given]
            out, lse = (fa_ext.to_numpy(x) for x in fa_ext.attention(*arrays, return_lse=True, kernel=name))
            report = judge(out, lse, truth, plain, dtype)
            bound = 2e-3 + 1e-5 * np.abs(truth[1])
            counted.seeds += 1
            counted.over += not report
            counted.worst = max(counted.worst, report.max_abs / report.max_abs_bound)
            counted.worst_lse = max(counted.worst_lse, float((np.abs(lse - truth[1]) / bound).max()))
    return found


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", help="names with commas; default: all that this machine runs")
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args(arguments)
    here = [name for name in fa_ext.kernels() if not runner.absent(name)]
    names = given.kernels.split(",") if given.kernels else here
    over = 0
    for head_dim, amplitude in itertools.product(HEAD_DIMS, AMPLITUDES):
        for name in names:
            try:
                found = count([name], range(given.seeds), head_dim, amplitude, given.dtype)[name]
            except fa_ext.UnsupportedError as error:
                print(f"{name:<18} head_dim {head_dim:<4} amplitude {amplitude:<3} {error}", flush=True)
                continue
            over += found.over
            print(
                f"{name:<18} head_dim {head_dim:<4} amplitude {amplitude:<3} {found.over:>4} of {found.seeds} over the"
                f" bounds, worst {found.worst:.2f}, LSE {found.worst_lse:.2f}",
                flush=True,
            )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
