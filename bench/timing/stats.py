"""Ratios of paired timings with an interval that survives drift and autocorrelated noise.

All are sampled within each round, so whatever slows a whole round (clocks, temperature, neighbours) multiplies
both and cancels in the log-ratio of that round. What is left is autocorrelated; an i.i.d. bootstrap would be too sure
of itself. Here whole blocks of consecutive rounds are resampled, of a length that follows from the measured
autocorrelation.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
# Below this many rounds there is nothing to estimate an autocorrelation from.
MIN_ROUNDS = 24


class Verdict(enum.Enum):
    """The verdict of a gate; the value is the process's exit code."""

    PASS = 0
    FAIL = 1
    UNDECIDED = 2


@dataclass(frozen=True)
class Interval:
    """A ratio of times (candidate / baseline; below 1 the candidate is faster) and its confidence interval."""

    ratio: float
    low: float
    high: float
    rounds: int
    block: int

    def as_dict(self) -> dict:
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "rounds": self.rounds, "block": self.block}

    @property
    def width(self) -> float:
        """Full width relative to the ratio."""
        return (self.high - self.low) / self.ratio


def autocorrelation_time(series: np.ndarray) -> float:
    """Integrated autocorrelation time tau = 1 + 2 sum rho_k >= 1, on the safe side: rounds that count as one.

    The sum stops at the first lag k >= 4 tau (Sokal's window) or where two neighbouring lags sum to nothing (Geyer's
    initial positive sequence), since the tail of an estimated autocorrelation is noise.
    """
    x = np.asarray(series, dtype=np.float64) - np.mean(series)
    n = len(x)
    energy = float(x @ x)
    if n < 4 or energy == 0.0:
        return 1.0
    spectrum = np.fft.rfft(x, 2 * n)
    # Divided by n - k, not n: short series would otherwise understate every lag.
    rho = np.fft.irfft(spectrum * np.conj(spectrum))[: n // 2] / energy * (n / (n - np.arange(n // 2)))
    tau, k = 1.0, 0
    for k in range(1, n // 2 - 1):
        if rho[k] + rho[k + 1] <= 0.0 and k > 1:
            break
        tau += 2.0 * float(rho[k])
        if k >= 4.0 * tau:
            break
    # One standard error up (Madras and Sokal): an estimate that is too short makes an interval that is too narrow.
    return max(1.0, tau * (1.0 + math.sqrt((4 * k + 2) / n)))


def block_length(series: np.ndarray) -> int:
    """Rounds a resampled block: three autocorrelation times, at least the cube root, at most a tenth of the series."""
    n = len(series)
    wanted = max(math.ceil(3.0 * autocorrelation_time(series)), math.ceil(n ** (1 / 3)))
    return max(1, min(wanted, n // 10))


def block_bootstrap(series: np.ndarray, block: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Means of `resamples` resampled series (circular blocks of `block` consecutive values), shape (resamples,)."""
    x = np.asarray(series, dtype=np.float64)
    n = len(x)
    count = math.ceil(n / block)
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((x, x[: block - 1])))))
    sums = sums[block:] - sums[:-block]  # sums[i]: the block that starts at i, wrapping around
    starts = np.random.default_rng(seed).integers(0, n, size=(resamples, count))
    return sums[starts].sum(axis=1) / (count * block)


def ratio_interval(candidate: np.ndarray, baseline: np.ndarray, level: float = LEVEL, seed: int = 0) -> Interval:
    """Interval of the time ratio from paired samples: entry i of both was taken in round i.

    Resampled blocks see fewer effective observations than their number suggests; the deviations are widened by the two
    known corrections: the block's share of the series that the resampling cannot see, and Student's quantile for that
    many blocks.
    """
    candidate, baseline = np.asarray(candidate, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if candidate.shape != baseline.shape or candidate.ndim != 1:
        raise ValueError(f"samples must be paired: got shapes {candidate.shape} and {baseline.shape}")
    if len(candidate) < 2 or not (np.all(candidate > 0) and np.all(baseline > 0)):
        raise ValueError("samples must be positive times, at least two of them")
    logs = np.log(candidate) - np.log(baseline)
    n = len(logs)
    mean = float(logs.mean())
    block = block_length(logs)
    deviations = block_bootstrap(logs, block, seed=seed) - mean
    widen = math.sqrt(n / (n - block)) * student_over_normal(max(3.0, n / block - 1.0), level)
    low, high = np.quantile(deviations, [(1 - level) / 2, (1 + level) / 2]) * widen
    # The basic interval: what the resamples overshoot the mean by, the mean may overshoot the truth by.
    return Interval(math.exp(mean), math.exp(mean - high), math.exp(mean - low), n, block)


def student_over_normal(freedom: float, level: float = LEVEL) -> float:
    """Student's two-sided quantile over the normal one, by the Cornish-Fisher expansion (1% off at 4 degrees)."""
    z = _normal_quantile((1 + level) / 2)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return (z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3) / z


def _normal_quantile(p: float) -> float:
    """Inverse of the normal distribution function, by bisection of erf (exact to 1e-12)."""
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def decide(correct: bool, interval: Interval | None, limit: float) -> Verdict:
    """PASS: correct and surely under the limit. FAIL: incorrect, or surely not under it. Else UNDECIDED."""
    if not correct:
        return Verdict.FAIL
    if interval is None or interval.rounds < MIN_ROUNDS:
        return Verdict.UNDECIDED
    if interval.high < limit:
        return Verdict.PASS
    return Verdict.FAIL if interval.low >= limit else Verdict.UNDECIDED
