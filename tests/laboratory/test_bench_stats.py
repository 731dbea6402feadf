"""Synthetic timings with a known ratio give the known verdict, whatever the drift and the autocorrelation."""

import numpy as np
import pytest

from bench.timing import stats
from bench.timing.stats import Interval, Verdict

LIMIT = 0.95
ROUNDS = 240  # what `bench gate` takes
RUNS = 1000


def timings(rng, ratio, rho, spread, drift=0.2, rounds=ROUNDS):
    """(candidate, baseline): common linear and random-walk drift, and AR(1) noise of its own for each."""

    def noise():
        x = np.empty(rounds)
        x[0] = rng.standard_normal()
        steps = rng.standard_normal(rounds) * np.sqrt(1 - rho**2)
        for i in range(1, rounds):
            x[i] = rho * x[i - 1] + steps[i]
        return x * spread

    common = np.linspace(0, drift * rng.standard_normal(), rounds) + np.cumsum(rng.standard_normal(rounds)) * 0.01
    return ratio * np.exp(common + noise()), np.exp(common + noise())


def share_passing(ratio, rho, spread):
    rng = np.random.default_rng([RUNS, int(rho * 100), int(spread * 1000)])
    verdicts = [
        stats.decide(True, stats.ratio_interval(*timings(rng, ratio, rho, spread), seed=run), LIMIT)
        for run in range(RUNS)
    ]
    return verdicts.count(Verdict.PASS) / RUNS


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.5, 0.7])
def test_at_the_limit_at_most_one_in_twenty_passes(rho):
    assert share_passing(LIMIT, rho, 0.05) <= 0.05


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_a_true_improvement_passes(rho):
    assert share_passing(0.90, rho, 0.05) >= 0.95


def test_a_slower_candidate_fails():
    rng = np.random.default_rng(1)
    assert stats.decide(True, stats.ratio_interval(*timings(rng, 1.1, 0.5, 0.02)), LIMIT) is Verdict.FAIL


def test_interval_covers_the_truth_and_drift_cancels():
    rng = np.random.default_rng(2)
    covered = 0
    for run in range(200):
        interval = stats.ratio_interval(*timings(rng, 0.8, 0.6, 0.03, drift=2.0), seed=run)
        covered += interval.low <= 0.8 <= interval.high
        assert interval.width < 0.1
    assert covered >= 180


def test_block_length_follows_the_autocorrelation():
    rng = np.random.default_rng(3)

    def typical(rho):
        logs = [np.log(np.divide(*timings(rng, 1.0, rho, 0.05))) for _ in range(20)]
        return np.median([stats.block_length(x) for x in logs])

    assert 1 <= typical(0.0) < typical(0.5) < typical(0.7) <= ROUNDS // 10


def test_autocorrelation_time_of_ar1():
    """tau = (1 + rho) / (1 - rho), estimated on the safe side."""
    rng = np.random.default_rng(4)
    x = np.zeros(20000)
    for i in range(1, len(x)):
        x[i] = 0.6 * x[i - 1] + rng.standard_normal()
    assert stats.autocorrelation_time(x) == pytest.approx(4.0, rel=0.15)
    assert stats.autocorrelation_time(rng.standard_normal(20000)) == pytest.approx(1.0, abs=0.1)
    assert stats.autocorrelation_time(np.ones(100)) == 1.0


def test_bootstrap_of_blocks_keeps_the_mean():
    x = np.arange(50.0)
    means = stats.block_bootstrap(x, 7)
    assert means.shape == (stats.RESAMPLES,) and means.mean() == pytest.approx(x.mean(), rel=0.02)
    # 50 blocks of 50 values that start anywhere on a circle all hold every value once.
    assert np.allclose(stats.block_bootstrap(x, 50), x.mean())


def test_decision_table():
    def interval(low, high, rounds=ROUNDS):
        return Interval((low + high) / 2, low, high, rounds, 5)

    assert stats.decide(True, interval(0.8, 0.94), LIMIT) is Verdict.PASS
    assert stats.decide(True, interval(0.8, 0.96), LIMIT) is Verdict.UNDECIDED
    assert stats.decide(True, interval(0.95, 1.1), LIMIT) is Verdict.FAIL
    assert stats.decide(False, interval(0.1, 0.2), LIMIT) is Verdict.FAIL
    assert stats.decide(True, None, LIMIT) is Verdict.UNDECIDED
    assert stats.decide(True, interval(0.1, 0.2, rounds=5), LIMIT) is Verdict.UNDECIDED
    assert [v.value for v in (Verdict.PASS, Verdict.FAIL, Verdict.UNDECIDED)] == [0, 1, 2]


def test_student_quantiles():
    """By the printed tables of both distributions, at 0.975."""
    for freedom, quantile in ((4, 2.776445), (8, 2.306004), (20, 2.085963), (100, 1.983972)):
        assert stats.student_over_normal(freedom) == pytest.approx(quantile / 1.959964, rel=0.01)


@pytest.mark.parametrize(
    "bad", [([1.0, 2.0], [1.0]), ([1.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, np.nan], [1, 1])]
)
def test_bad_samples_are_refused(bad):
    with pytest.raises(ValueError, match="samples"):
        stats.ratio_interval(np.array(bad[0]), np.array(bad[1]))
