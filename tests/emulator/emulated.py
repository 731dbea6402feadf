"""The common part of tests on the emulator: emulated kernels in the place of a CPU's, mutants of a kernel's source, and the orders of threads
that show one."""

import contextlib

import fa_ext
from tests import emulator
from tests.contract import runner


@contextlib.contextmanager
def on_the_cpu(names):
    """Meanwhile the kernels that ``names()`` lists take arrays of the CPU from what tests share (``rows``, ``gradients``)."""
    device_of = runner.device_of
    runner.device_of = lambda kernel: "cpu" if kernel in names() else device_of(kernel)
    try:
        yield
    finally:
        runner.device_of = device_of


@contextlib.contextmanager
def builds(folder, instances):
    """get(kernel, tag, **options): the name under which a build of ``instances[kernel]`` is loaded, once for each tag."""
    loaded = {}

    def get(kernel, tag="right", **options):
        if (kernel, tag) not in loaded:
            target = emulator.build(kernel, folder / f"{kernel}.{tag}.so", instances=instances[kernel], **options)
            loaded[kernel, tag] = emulator.load(target, kernel)
        return loaded[kernel, tag]

    with on_the_cpu(loaded.values):
        yield get


def seeds_that_fail(monkeypatch, run, count=12):
    """The fault under each of the first seeds: the error's text, or "wrong" for a wrong result."""
    found = []
    for seed in range(count):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        try:
            if not run():
                found.append("wrong")
        except fa_ext.CudaError as error:
            found.append(str(error))
    return found


def replaced(old, new, at=None):
    """An edit that replaces the only occurrence of a text, or occurrence `at`; where there is none, the unit stays."""

    def edit(text):
        count = text.count(old)
        if not count:
            return text
        assert at is not None or count == 1, f"{count} times {old!r}"
        pieces = text.split(old)
        n = at or 0
        return old.join(pieces[: n + 1]) + new + old.join(pieces[n + 1 :])

    return edit
