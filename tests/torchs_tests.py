"""A plugin of pytest that runs PyTorch's own test/test_transformers.py inside ``fa_ext.torch.sdpa()``, and what fails there.

``python -m pytest -p torchs_tests FILE --failures LIST`` writes the failing tests to LIST; with ``--outside`` they run without fa_ext.
"""

import fnmatch

import pytest

#: Tests that fail inside, by pattern, and why: each asks what another backend of torch refuses, or what only its own kernels have.
REFUSALS: dict[str, str] = {}


def refusal(test):
    """The pattern of REFUSALS for a test's name, or None."""
    return next((pattern for pattern in REFUSALS if fnmatch.fnmatchcase(test, pattern)), None)


def pytest_addoption(parser):
    parser.addoption("--failures", help="file for the names of tests that fail")
    parser.addoption("--outside", action="store_true", help="run the tests without fa_ext")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if item.config.getoption("--outside"):
        return (yield)
    import fa_ext.torch

    with fa_ext.torch.sdpa():
        return (yield)


def pytest_configure(config):
    config.pluginmanager.register(Failures(config.getoption("--failures")))


class Failures:
    """Writes down the names of tests that fail, as they fail."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.failed and self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                print(report.nodeid.partition("::")[2], file=file)
