"""A plugin of pytest that runs PyTorch's own test/test_transformers.py inside ``fa_ext.torch.sdpa()``, and what fails there.

``python -m pytest -p tests.frameworks.support.torchs_tests FILE --failures LIST`` writes the names of failing tests to LIST; with ``--outside`` they run
without fa_ext; ``--every N`` runs every N-th.
"""

import fnmatch

import pytest

#: Tests that fail inside, by pattern, and why: they ask for what another backend of torch refuses, or for its very numbers.
REFUSALS = {
    "TestTransformers*::test_transformerencoderlayer_subclass*": (
        "TorchScript calls torch's own attention, whose dropout drops other weights than fa_ext's from the same seed"
    ),
}


def refusal(test):
    """The pattern of REFUSALS for a test's name, or None."""
    return next((pattern for pattern in REFUSALS if fnmatch.fnmatchcase(test, pattern)), None)


def pytest_addoption(parser):
    parser.addoption("--failures", help="file for the names of tests that fail")
    parser.addoption("--outside", action="store_true", help="run the tests without fa_ext")
    parser.addoption("--every", type=int, default=1, help="run every N-th test")


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--every")
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % every])
    items[:] = items[::every]


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
