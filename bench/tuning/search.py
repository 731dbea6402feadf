"""Strategies over a tuner's configurations. What a configuration costs is the caller's business."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator
from typing import Any

from bench import report
from bench.tuning.spaces import Config, Space, label

# Configurations that are compiled side by side between looks at the budget.
STEP = 8
POPULATION = 12
Evaluate = Callable[[list[Config]], list[dict[str, Any]]]
# A strategy yields configurations whose costs it wants; it is sent them, infinite for one that failed.
Strategy = Generator[list[Config], list[float], None]


def _brute_force(space: Space, configs: list[Config], rng: random.Random) -> Strategy:
    yield configs


def _random_sample(space: Space, configs: list[Config], rng: random.Random) -> Strategy:
    yield rng.sample(configs, len(configs))


def _greedy(space: Space, configs: list[Config], rng: random.Random) -> Strategy:
    """To the best of the neighbours, which differ in one parameter, for as long as that is better; then anew from a drawn place."""
    here = space.hand_set if space.hand_set in configs else rng.choice(configs)
    while True:
        (cost,) = yield [here]
        while True:
            around = [c for c in configs if sum(c[name] != here[name] for name in c) == 1]
            costs = (yield around) if around else []
            if min(costs, default=math.inf) >= cost:
                break
            cost = min(costs)
            here = around[costs.index(cost)]
        here = rng.choice(configs)


def _genetic(space: Space, configs: list[Config], rng: random.Random) -> Strategy:
    """The better half of a population stays; pairs of it have children, which take each parameter from one of both or, of one
    in so many, draw it anew."""
    allowed = {label(c) for c in configs}
    people = [*([space.hand_set] if space.hand_set in configs else []), *rng.sample(configs, min(POPULATION, len(configs)))]
    while True:
        costs = yield people
        order = sorted(range(len(people)), key=costs.__getitem__)
        parents = [people[i] for i in order[: max(2, len(order) // 2)]]
        children: list[Config] = []
        for _ in range(50 * POPULATION):
            pair = rng.sample(parents, 2) if len(parents) > 1 else parents * 2
            child = {name: rng.choice(pair)[name] for name in space.parameters}
            changed = rng.choice(list(space.parameters))
            if rng.random() < 0.5:
                child[changed] = rng.choice(space.parameters[changed])
            if label(child) in allowed and child not in children and child not in parents:
                children.append(child)
            if len(children) == POPULATION - len(parents):
                break
        people = parents + children


STRATEGIES: dict[str, Callable[[Space, list[Config], random.Random], Strategy]] = {
    "genetic_algorithm": _genetic, "greedy": _greedy, "random_sample": _random_sample, "brute_force": _brute_force,
}  # fmt: skip


def search(space: Space, configs: list[Config], strategy: str, evaluations: int, time_limit: float, evaluate: Evaluate,
           seed: int = 0) -> list[dict[str, Any]]:  # fmt: skip
    """Runs one strategy over `configs` until so many were evaluated or the time is up; returns what `evaluate` said of each, in
    order. It takes the configurations of one step together, so that it can compile them side by side, and returns for each
    {"objective": number} or {"error": reason}. A strategy that brings nothing new is given drawn ones."""
    if strategy not in STRATEGIES:
        raise report.UsageError(f"strategy is {strategy!r}; accepted: {', '.join(STRATEGIES)}")
    known: dict[str, dict[str, Any]] = {}
    ends, most, rng = time.monotonic() + time_limit, min(evaluations, len(configs)), random.Random(seed)
    running = STRATEGIES[strategy](space, configs, rng)
    wanted = next(running)
    while True:
        fresh = [c for c in wanted if label(c) not in known]
        if not fresh:
            left = [c for c in configs if label(c) not in known]
            fresh = rng.sample(left, min(STEP, len(left)))
        for i in range(0, len(fresh), STEP):
            step = fresh[i : i + STEP][: most - len(known)]
            if not step or time.monotonic() > ends:
                return list(known.values())
            known |= {label(c): c | found for c, found in zip(step, evaluate(step), strict=True)}
        if len(known) >= most:
            return list(known.values())
        wanted = running.send([known[label(c)].get("objective", math.inf) for c in wanted])


def pareto(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that no other beats in time ratio, error and the objective's further factors at once, by rising ratio."""

    def costs(result: dict[str, Any]) -> tuple[float, ...]:
        return (result["ratio"]["ratio"], result["frobenius"], *result.get("factors", {}).values())

    front: list[dict[str, Any]] = []
    for result in sorted((r for r in results if "ratio" in r), key=costs):
        if not any(all(a <= b for a, b in zip(costs(kept), costs(result))) for kept in front):
            front.append(result)
    return front
