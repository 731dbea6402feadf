"""The common part of the tests of Hopper's kernels for sequences: emulated builds, bits of every storage and batch, the same on a GPU."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases, stored
from bench.problems.placement import place
from fa_ext import _build
from tests import emulator
from tests.contract import runner, serving_calls

emulates = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)


def emulated_builds(kernel, instances):
    """A fixture: get(**options) is the name under which a build of the kernel is loaded, once for each set of options, and
    get.library[name] its file."""

    @pytest.fixture(scope="module")
    def emulated(tmp_path_factory):
        folder, loaded, device_of = tmp_path_factory.mktemp(kernel), {}, runner.device_of

        def get(**options):
            key = tuple(options.items())
            if key not in loaded:
                target = folder / f"{kernel}.{len(loaded)}.so"
                emulator.build(_build.kernel_files()[kernel], target, **{"instances": instances} | options)
                loaded[key] = emulator.load(target, kernel)
                get.library[loaded[key]] = target
            return loaded[key]

        get.library = {}
        runner.device_of = lambda name: "cpu" if name in loaded.values() else device_of(name)
        yield get
        runner.device_of = device_of

    return emulated


def unchanged(arguments):
    return arguments


def holds(kernel, case, put=unchanged):
    try:
        report = fa_ext.verify(**put(case.host_inputs()), kernel=kernel, check=False)
    except fa_ext.UnsupportedError as error:
        if runner.is_left_out(error):
            pytest.skip(str(error))
        raise
    assert report, f"{case}\n{report}"


def parts_of(kernel, case, values, put=unchanged):
    """Bytes of (out, lse) of each sequence."""
    arguments = case.host_inputs(values)
    results = fa_ext.attention(**put(arguments), kernel=kernel, check=False, return_lse=True)
    return [(out.tobytes(), lse.tobytes()) for out, lse in serving_calls.parts_of(case, arguments, *map(runner.to_host, results))]


def assert_same_bits(kernel, base, stores, orders, before=lambda n: None, put=unchanged, **batch):
    """Of each sequence in every storage, and in batches of the sequences that each order names, which are stored as
    ``batch`` says. before(n) is called before the n-th call."""
    values = stored.values_of(base)
    wanted = parts_of(kernel, base, values, put)
    for n, store in enumerate(stores):
        before(n)
        assert parts_of(kernel, base.changed(**store), values, put) == wanted, (n, store)
    for n, order in enumerate(orders):
        before(n)
        lengths = dict(n_q=tuple(base.n_q[b] for b in order), n_k=tuple(base.n_k[b] for b in order))
        case = base.changed(**lengths, **batch)
        assert parts_of(kernel, case, [values[b] for b in order], put) == [wanted[b] for b in order], (n, order)


def random_cases(count, seed, head_dim, dtype, longest, **replaced):
    for case in serving_cases.random_cases(count, seed, longest=longest):
        yield case.changed(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **replaced)


# ---- on a GPU ----

#: head_dim and dtype of the cases that are held against float64 there.
ON_A_GPU = [(64, "bfloat16"), (64, "float16"), (128, "bfloat16"), (128, "float16"), (80, "float16"), (192, "bfloat16"), (256, "float16")]


def on_gpu(kernel):
    """Marks a test that runs the kernel itself."""
    needs = not runner.has("torch") or kernel not in fa_ext.kernels()
    skipped = pytest.mark.skipif(needs, reason="needs torch and a build with the kernel")
    return lambda test: pytest.mark.gpu(pytest.mark.slow(skipped(test)))


def on_device(arguments):
    def put(x):
        if isinstance(x, tuple):
            return tuple(put(y) for y in x)
        return place(x, "torch") if isinstance(x, np.ndarray) else x

    return {name: put(x) for name, x in arguments.items()}


def assert_graph_takes_other_lengths(kernel, case, change, replays):
    """A graph of the call has the bits of a call after each ``change(arguments, generator)``, and is right."""
    import torch

    arguments = on_device(case.host_inputs())
    for name in "qkv":
        arguments[name].nan_to_num_(0.5)  # other lengths may let see what the case hides
    out = torch.empty_like(arguments["q"])

    def call():
        return fa_ext.attention(**arguments, kernel=kernel, out=out, check=False)

    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    rng = np.random.default_rng(0)
    for n in range(replays):
        change(arguments, rng)
        out.fill_(float("nan"))
        graph.replay()
        replayed = runner.to_host(out).tobytes()
        call()
        assert runner.to_host(out).tobytes() == replayed
        if n % 60 == 0:
            report = fa_ext.verify(**arguments, kernel=kernel, check=False)
            assert report, report
