"""Options, the ``forward`` parameter, the markers of tiers and hypothesis profiles.

``--kernels REGEX`` restricts tests to some kernels; ``--load FILE.so`` adds a kernel that was built alone
(``python fa_ext/_build.py KERNEL -o FILE.so``); ``--repeats N`` sets how often bitwise tests repeat; ``--of KERNEL`` runs the
tests of one kernel, of any operation, alone, and ``--of core`` those of no kernel: together they are all tests, each once; ``--shard I/N`` runs every
N-th test, from the I-th on.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

# Before NumPy and fa_ext read them: the references multiply many small matrices, at which a library's threads spend most of their time
# waiting for each other, and workers of pytest-xdist share the cores already.
for _name in ["OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"] + ["OMP_NUM_THREADS"] * ("PYTEST_XDIST_WORKER" in os.environ):
    os.environ.setdefault(_name, "1")

from bench.problems.placement import Unplaceable

#: Folders whose tests have a marker: of a tier of their own, or of the run under sanitizers.
FOLDERS = {"laboratory": "laboratory", "kernels/models": "models", "arrays": "native", "contract": "native", "kernels": "native"}
#: Workers of `-n auto` that share a GPU: each holds a context and memory of its own.
WORKERS_ON_A_GPU = 4


def pytest_addoption(parser):
    parser.addoption("--kernels", default="", help="regular expression of the kernels to test (default: all)")
    parser.addoption("--of", default="", help="only the tests of this kernel, or only those of no kernel: core")
    parser.addoption("--load", action="append", default=[], help="shared library of one kernel to test as well")
    parser.addoption("--shard", default="0/1", help="I/N: every N-th test, from the I-th (0 to N - 1) on")
    parser.addoption("--repeats", type=int, default=20, help="repeats of the bitwise tests")


def pytest_configure(config):
    if "FA_EMULATOR_OBJECTS" not in os.environ:  # workers of pytest-xdist inherit it
        os.environ["FA_EMULATOR_OBJECTS"] = folder = tempfile.mkdtemp(prefix="fa_emulator_")
        config.add_cleanup(lambda: (os.environ.pop("FA_EMULATOR_OBJECTS"), shutil.rmtree(folder, ignore_errors=True)))
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("dev", deadline=10_000, max_examples=40, print_blob=True)
    settings.register_profile("ci", deadline=10_000, max_examples=60, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """None: as many as there are cores."""
    if not Path("/dev/nvidiactl").exists():
        return None
    return min(len(os.sched_getaffinity(0)), WORKERS_ON_A_GPU)


def _dense(kernels):
    """Those that take dense calls, which tests of "forward" and "cuda_forward" make."""
    from bench.problems import cases

    return [kernel for kernel in kernels if kernel not in cases.OF_PACKED_QUERIES]


def pytest_generate_tests(metafunc):
    if "forward" in metafunc.fixturenames:
        metafunc.parametrize("forward", _dense(_kernels(metafunc.config)))
    if "cuda_forward" in metafunc.fixturenames:
        from tests.contract import runner

        names = [kernel for kernel in _dense(_kernels(metafunc.config)) if runner.device_of(kernel) == "cuda"]
        metafunc.parametrize("cuda_forward", names or [pytest.param(None, marks=pytest.mark.skip("no CUDA kernel is built"))])


def pytest_collection_modifyitems(config, items):
    folder = Path(__file__).parent
    for item in items:
        for within, marker in FOLDERS.items():
            if item.path.is_relative_to(folder / within):
                item.add_marker(marker)
        if "emulated" in getattr(item, "fixturenames", ()):
            item.add_marker("emulated")
        if hasattr(item, "callspec") and item.callspec.params.get("device") == "cpu":
            item.add_marker("on_cpu")
    wanted = config.getoption("--of")
    if wanted:
        if wanted not in (*_all_kernels(), *_kernels(config), "core"):
            raise pytest.UsageError(f"--of is {wanted!r}; accepted: core, {', '.join(_all_kernels())}")
        left_out = [item for item in items if _tested(item) != wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _tested(item) == wanted]
    first, count = map(int, config.getoption("--shard").split("/"))
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % count != first])
    items[:] = items[first::count]


def _kernel_of(item):
    """The kernel that a test is given, or None."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return params.get("forward") or params.get("cuda_forward")


def _tested(item):
    """The kernel whose test this is, by its parameter or by the name of its file; core for all others."""
    callspec = getattr(item, "callspec", None)
    of_contract = item.path.parent.name == "contract" or item.path.stem == "test_chaos"
    given = callspec.params.get("kernel") if callspec and of_contract else None
    for name in (_kernel_of(item), given, item.path.stem.removeprefix("test_")):
        if name in (*_kernels(item.config), *_all_kernels()):
            return name
    return "core"


def _all_kernels():
    """Of every operation."""
    from fa_ext import _core

    return tuple(_core.build_info()["kernels"])


def pytest_sessionfinish():
    """Tells `bench chaos`, which started this process, of a wait that ended."""
    if path := os.environ.get("FA_CHAOS_HUNG"):
        from tests.kernels import chaos

        if found := chaos.hung():
            Path(path).write_text(json.dumps(found))


def _kernels(config):
    if not hasattr(config, "fa_kernels"):
        from fa_ext import _core, kernels

        loaded = [_core.load(path) for path in config.getoption("--load")]
        wanted = [config.getoption("--kernels")]
        if config.getoption("--of") not in ("", "core"):
            wanted.append(f"^{re.escape(config.getoption('--of'))}$")
        config.fa_kernels = [kernel for kernel in (*kernels(), *loaded) if all(re.search(one, kernel) for one in wanted)]
    return config.fa_kernels


def pytest_runtest_setup(item):
    """Skips what this machine cannot run, with the reason."""
    from tests.contract import runner

    runner.first_device()
    kernel = _kernel_of(item)
    reason = runner.absent(kernel) if kernel else None
    if item.get_closest_marker("gpu"):
        reason = runner.no_device() or reason
    if item.get_closest_marker("idle") and "PYTEST_XDIST_WORKER" in os.environ:
        reason = "needs a machine with nothing else to do: -m idle, without -n"
    if reason:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skips a test whose arrays or calls are not for this machine or kernel, or whose instance the build leaves out, with the reason."""
    from fa_ext import UnsupportedError
    from tests.contract import runner

    try:
        return (yield)
    except Unplaceable as error:
        pytest.skip(str(error))
    except UnsupportedError as error:
        if not runner.is_left_out(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def one_thread(monkeypatch):
    """For tiny problems: threads of the laboratory's workers would only wait for each other."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def any_load(monkeypatch):
    """Verdicts on times, whatever else the machine does while it tests."""
    from bench.timing import conditions

    for name in ("OTHERS", "WAITING", "SLOWED"):
        monkeypatch.setattr(conditions, name, float("inf"))
