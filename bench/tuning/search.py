"""kernel_tuner's search spaces and strategies over our own evaluation.

kernel_tuner's runners compile and launch kernels themselves; ours hands each configuration to a function instead. The
strategies see results in kernel_tuner's form: the parameters, "time", and "__error__" where a configuration failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from bench import report
from bench.tuning.spaces import Config, Space

# Configurations that are compiled side by side between looks at the budget.
STEP = 8
# Strategies that can begin at the hand-set configuration.
STARTED = ("genetic_algorithm", "greedy_ils", "mls", "simulated_annealing", "pso", "diff_evo", "firefly_algorithm",
           "greedy_mls", "ordered_greedy_mls")  # fmt: skip

Evaluate = Callable[[list[Config]], list[dict[str, Any]]]


def strategies() -> tuple[str, ...]:
    """Names that ``search`` takes: all of kernel_tuner's that need no further package."""
    return tuple(_interface().strategy_map)


def _interface() -> Any:
    try:
        from kernel_tuner import interface
    except ImportError as error:
        raise report.UsageError(f"tuning needs the package kernel_tuner (pip install kernel_tuner): {error}") from None
    return interface


def search(space: Space, configs: list[Config], strategy: str, evaluations: int, time_limit: float, evaluate: Evaluate,
           seed: int = 0, popsize: int = 12) -> list[dict[str, Any]]:  # fmt: skip
    """Runs one strategy over `configs` until so many were evaluated or the time is up; returns its results in order.

    `evaluate` takes the configurations of one step together, so that it can compile them side by side, and returns for
    each {"objective": number} or {"error": reason}.
    """
    interface = _interface()
    if strategy not in interface.strategy_map:
        raise report.UsageError(f"strategy is {strategy!r}; accepted: {', '.join(interface.strategy_map)}")
    from constraint import FunctionConstraint  # python-constraint2, which kernel_tuner installs
    from kernel_tuner import util
    from kernel_tuner.searchspace import Searchspace

    names = list(space.parameters)
    allowed = {tuple(config[name] for name in names) for config in configs}
    random.seed(seed)
    np.random.seed(seed)
    tune_params = {name: sorted({c[name] for c in configs}) for name in names}
    # A constraint object: kernel_tuner would take a bare function apart for its source text.
    built = FunctionConstraint(lambda *values: values in allowed, names)
    searchspace = Searchspace(tune_params, [built], 1 << 30)
    options: dict[str, Any] = {"max_fevals": min(evaluations, searchspace.size), "time_limit": time_limit}
    start = tuple(space.hand_set[name] for name in names)
    if start in allowed and strategy in STARTED:
        options["x0"] = list(start)
    if strategy == "genetic_algorithm":
        options["popsize"] = popsize
    budget = util.TuningBudget(time_limit, options["max_fevals"])
    if strategy == "brute_force":  # takes no options, not even a budget
        options = {}
    tuning = interface.Options(
        tune_params=tune_params,
        restrictions=searchspace._modified_restrictions,
        strategy_options=interface.Options(options),
        objective=["time"],
        objective_higher_is_better=[False],
        verbose=False,
        metrics=None,
        cache={},
        cachefile=None,
        simulated_time=0,
        budget=budget,
        max_fevals=budget.max_fevals,
        time_limit=time_limit,
        verify=None,
        observers=None,
    )
    runner = _runner(names, evaluate)
    try:
        interface.strategy_map[strategy].tune(searchspace, runner, tuning)
    except util.StopCriterionReached:
        pass  # the budget ended outside the strategy's own handler
    return list(runner.known.values())


def _runner(names: list[str], evaluate: Evaluate) -> Any:
    """A runner of kernel_tuner that evaluates through `evaluate`; an answer that is known is not evaluated again."""
    from kernel_tuner import util
    from kernel_tuner.runners.runner import Runner

    class OurRunner(Runner):
        def __init__(self):
            super().__init__()
            self.known: dict[tuple, dict[str, Any]] = {}

        def get_device_info(self):
            return util.SkippableFailure  # not asked for anything by the strategies

        def get_environment(self, tuning_options):
            return {}

        def run(self, parameter_space, tuning_options):
            elements = [tuple(element) for element in parameter_space]
            fresh = list(dict.fromkeys(e for e in elements if e not in self.known))
            fresh = fresh[: max(0, tuning_options.budget.get_evaluations_remaining())]
            for i in range(0, len(fresh), STEP):
                if tuning_options.budget.is_done():
                    break
                step = fresh[i : i + STEP]
                for element, found in zip(step, evaluate([dict(zip(names, e)) for e in step])):
                    self.known[element] = self._as_result(element, found)
                tuning_options.budget.add_evaluations(len(step))
            return [dict(self.known[e]) if e in self.known else None for e in elements]

        def _as_result(self, element, found):
            result = dict(zip(names, element), compile_time=0, verification_time=0, benchmark_time=0,
                          timestamp=str(datetime.now(UTC)))  # fmt: skip
            if "error" in found:
                return result | {"__error__": util.RuntimeFailedConfig(), "reason": found["error"]}
            return result | {"time": found["objective"]}

    return OurRunner()


def pareto(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that no other beats in time ratio, error and the objective's further factors at once, by rising ratio."""

    def costs(result: dict[str, Any]) -> tuple[float, ...]:
        return (result["ratio"]["ratio"], result["frobenius"], *result.get("factors", {}).values())

    good = sorted((r for r in results if "ratio" in r), key=costs)
    front: list[dict[str, Any]] = []
    for result in good:
        if not any(all(a <= b for a, b in zip(costs(kept), costs(result))) for kept in front):
            front.append(result)
    return front
