"""Runs the project's tests on emulated kernels.

    python -m pytest -p tests.emulator.plugin --emulated /tmp/simt.so tests/contract/test_contract.py -k D64

Each library of ``python -m tests.emulator`` becomes a kernel of its operation, for arrays of the CPU. Of the tests that take every
kernel of an operation those of this one run, and no others. ``--largest N`` skips cases with more than N scores; a case that
needs an instance which was not compiled is skipped too, and so is float64.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

OPERATIONS = ("attention", "backward", "merge", "append", "documents")  # by fa_op


def pytest_addoption(parser):
    parser.addoption("--emulated", action="append", default=[], help="library of an emulated kernel to test")
    parser.addoption("--largest", type=float, default=float("inf"), help="scores of the largest case to run")


def pytest_configure(config):
    paths = [Path(path).resolve() for path in config.getoption("--emulated")]
    if paths:
        config.emulated, config.restore_kernels = adopt([(path, path.name.partition(".")[0]) for path in paths])


def pytest_collection_modifyitems(config, items):
    """Keeps the tests that are given an emulated kernel."""
    if hasattr(config, "emulated"):
        kept, others = [], []
        for item in items:
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            (others if config.emulated.isdisjoint(map(str, values)) else kept).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept
        config.restore_kernels()


def adopt(libraries):
    """Loads (path, kernel) pairs and makes them what fa_ext.kernels() answers for their operation; returns their
    names, and a function that undoes the latter."""
    import fa_ext
    from tests.contract import runner

    from . import load

    emulated: dict[str, list[str]] = {}
    for path, kernel in libraries:
        head = (ctypes.c_int * 2).in_dll(ctypes.CDLL(str(path)), f"fa_kernel_{kernel}")  # abi, op
        emulated.setdefault(OPERATIONS[head[1]], []).append(load(path, kernel))
    listed, device_of = fa_ext.kernels, runner.device_of
    loaded = {name for of_one in emulated.values() for name in of_one}

    def kernels(operation="attention"):
        return tuple(emulated.get(operation, ())) or listed(operation)

    def restore():
        fa_ext.kernels = listed

    fa_ext.kernels = kernels
    runner.device_of = lambda kernel: "cpu" if kernel in loaded else device_of(kernel)
    return loaded, restore


def _scores(case):
    """Of a ``Case``; 0 of anything else."""
    return case.heads * sum(a * b for a, b in zip(case.n_q, case.n_k)) if hasattr(case, "n_q") else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    if _scores(case) > item.config.getoption("--largest"):
        pytest.skip("too large for the emulator")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Skips what an emulated kernel cannot be held to: instances that were not compiled, and float64."""
    from tests.contract import runner

    report = (yield).get_result()
    for words in (runner.lacks_instance(), "not float64"):
        if report.failed and hasattr(item.config, "emulated") and words in str(report.longrepr):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1], words)
