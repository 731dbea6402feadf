"""The kernel on trial (kernels/trial) on the emulator: against float64, schedules, races, bits."""

import dataclasses
import itertools
import platform
import shutil
import sys

import numpy as np
import pytest

import emulator
import fa_ext
import lse_views
import rows
import serving_cases
from case import Case
from fa_ext import _build
from operands import place
from serving_calls import assert_counts_as_the_reference
from serving_cases import INT_MAX, INT_MIN, K_STORAGE, Q_STORAGE, ServingCase

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

TRIAL = _build.KERNELS / "trial"
INSTANCES = {"serve_sm90": "^d64_r(8|16)_bf16$"}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, **options): the name under which a build of it is loaded, once for each set of options."""
    folder, loaded, device_of = tmp_path_factory.mktemp("trial"), {}, rows.device_of

    def get(kernel, **options):
        key = kernel, *options.items()
        if key not in loaded:
            target = folder / f"{kernel}.{len(loaded)}.so"
            emulator.build(TRIAL / f"{kernel}.cu", target, **{"instances": INSTANCES[kernel]} | options)
            loaded[key] = emulator.load(target, kernel)
            get.library[loaded[key]] = target
        return loaded[key]

    get.library = {}
    rows.device_of = lambda kernel: "cpu" if kernel in loaded.values() else device_of(kernel)
    yield get
    rows.device_of = device_of


# ---- serving ----

FEW = dict(heads=4, heads_kv=2, head_dim=64, dtype="bfloat16")  # 8 rows a job
MORE = dict(heads=6, heads_kv=1, head_dim=64, dtype="bfloat16")  # 30, of 16 at once
SERVING = [
    ServingCase((1, 1, 0, 1), (5, 333, 4, 700), q="one", causal="bottom_right", sinks=True, **FEW),
    ServingCase((1, 3, 0, 2), (90, 333, 4, 129), page_size=3, alibi="batch", window=(70, None), positions="random", **FEW),
    ServingCase((2, 1, 0, 3), (64, 200, 70, 1), q="padded", k="padded", slack=1, k_range=True, softcap=2.0, scale=-0.3, seed=1, **FEW),
    ServingCase((5, 1, 4), (300, 64, 129), q="padded", k="packed", slack=0, causal="bottom_right", **MORE),
    ServingCase((1, 14, 0, 0), (65, 200, 9, 0), page_size=24, causal="bottom_right", alibi="heads", **MORE),  # 84 rows
]


@pytest.fixture
def serve(emulated):
    return emulated("serve_sm90")


def holds(kernel, case):
    report = fa_ext.verify(**case.arguments(), kernel=kernel, check=False)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("blocks, seed", [(132, 0), (16, 3), (2, 5)])  # many blocks a job, few, one
@pytest.mark.parametrize("case", SERVING, ids=str)
def test_serving(serve, monkeypatch, case, blocks, seed):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    holds(serve, case)


@pytest.mark.parametrize("blocks", [132, 2])  # many blocks a job; one
@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
@pytest.mark.parametrize("case", SERVING[:3], ids=str)
def test_an_lse_has_any_strides(serve, monkeypatch, case, kind, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    lse_views.assert_written(serve, case.arguments(), kind, check=False)


@pytest.mark.parametrize("blocks", [132, 10, 3])
@pytest.mark.parametrize("case", ["B1,H4/2,S2x700,D64,bfloat16,causal=bottom_right", "B50,H4/2,S1x200,D40,bfloat16,sinks=same"])
def test_serving_takes_dense_calls(serve, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    report = rows.verdict(serve, Case.parse(case))
    assert report, report


def sequences_of(case, arguments, out, lse):
    """Bytes of (out, lse) of each sequence."""
    found = []
    for b, n in enumerate(case.n_q):
        if arguments["q"].ndim == 3:
            first = b if case.q == "one" else int(arguments["cu_seqlens_q"][b])
            mine = out[first : first + n], lse[:, first : first + n].T
        else:
            mine = (out[b] if case.layout == "bshd" else out[b].swapaxes(0, 1))[:n], lse[b, :, :n].T
        found.append(tuple(x.tobytes() for x in mine))
    return found


def parts_of(kernel, case, values):
    arguments = case.arguments(values)
    out, lse = fa_ext.attention(**arguments, kernel=kernel, check=False, return_lse=True)
    return sequences_of(case, arguments, out, lse)


def test_serving_has_the_same_bits_in_every_form_batch_and_storage(serve, monkeypatch):
    base = ServingCase((1, 1, 1, 1), (5, 1330, 97, 600), causal="bottom_right", seed=3, **FEW)
    values = base.values()
    wanted = parts_of(serve, base, values)
    stores = [dict(q=q, k=k, layout=at) for (q, k), at in zip(itertools.product(Q_STORAGE, K_STORAGE), ("bshd", "bhsd") * 5)]
    stores += [dict(page_size=size, slack=n) for n, size in enumerate((1, 8, 24, 64, 100))]
    for store, blocks in zip(stores, itertools.cycle((2, 132, 7, 24))):
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        assert parts_of(serve, dataclasses.replace(base, **store), values) == wanted, (store, blocks)
    for order in ([2], [1, 0], [3, 1, 1], [0] * 20 + [1] * 14):  # other parts
        monkeypatch.setenv("FA_EMULATOR_SMS", "132")
        case = dataclasses.replace(base, q="one", n_q=(1,) * len(order), n_k=tuple(base.n_k[b] for b in order))
        assert parts_of(serve, case, [values[b] for b in order]) == [wanted[b] for b in order], order


def test_serving_looks_at_nothing_that_nobody_may_see(serve):
    case = ServingCase((1, 2), (100, 90), page_size=8, causal="bottom_right", window=(20, 0), **FEW)
    values = case.values()
    arguments = case.arguments(values)
    wanted = fa_ext.attention(**arguments, kernel=serve)
    table = arguments["page_table"] = arguments["page_table"].copy()
    table[0, : (100 - 1 - 20) // 8], table[0, 13:], table[1, : (90 - 2 - 20) // 8] = 99999, -7, np.iinfo("i4").min
    assert fa_ext.attention(**arguments, kernel=serve, check=True).tobytes() == wanted.tobytes()
    table[0, 11] = 10**6  # a page that somebody would see: its keys are hidden
    report = fa_ext.verify(**arguments, kernel=serve, check=False)
    assert report, report


PAGED = ServingCase((1, 3, 0, 2), (5, 33, 4, 7), slack=2, **FEW)
PACKED = ServingCase((2, 3, 1, 2), (20, 40, 9, 17), k="packed", slack=0, **FEW)
BROKEN = [
    (PAGED, "seqlens_k", 1, -5),
    (PAGED, "seqlens_k", 0, INT_MAX),
    (PAGED, "page_table", (1, 0), -1),
    (PAGED, "page_table", (1, 2), INT_MAX),
    (PAGED, "page_table", slice(None), INT_MIN),
    (PACKED, "cu_seqlens_q", 2, 1),
    (PACKED, "cu_seqlens_q", 0, -1),
    (PACKED, "cu_seqlens_k", 2, INT_MAX),
]


@pytest.mark.parametrize("blocks", [132, 3])
@pytest.mark.parametrize(("case", "name", "at", "value"), BROKEN, ids=[f"{x[1]} {x[3]}" for x in BROKEN])
def test_serving_counts_bad_contents(emulated, serve, monkeypatch, case, name, at, value, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    arguments = case.arguments()
    arguments[name][at] = value
    assert_counts_as_the_reference(serve, lambda: emulator.faults(emulated.library[serve]), arguments)


@pytest.mark.parametrize("case, blocks", [(SERVING[0], 132), (SERVING[0], 16), (SERVING[1], 1), (SERVING[3], 132), (SERVING[3], 1)], ids=str)
def test_serving_has_no_race(emulated, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    holds(emulated("serve_sm90", races=True), case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (128, "float16"), (200, "bfloat16")])
def test_serving_at_length(emulated, monkeypatch, head_dim, dtype):
    columns = (head_dim + 63) // 64 * 64
    kernel = emulated("serve_sm90", instances=f"^d{columns}_r.*_{'bf16' if dtype == 'bfloat16' else 'f16'}$")
    long = ServingCase((1, 1, 2), (8128, 8129, 20000), page_size=16, heads=3, heads_kv=1, head_dim=head_dim, dtype=dtype)
    parts = []
    for seed, blocks in enumerate((1, 3, 24, 132)):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        for case in serving_cases.random_cases(60, 300 + seed, longest=700):
            holds(kernel, dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
        parts.append(parts_of(kernel, long, long.values()))
        assert parts[-1] == parts[0]
    holds(kernel, long)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """serve_sm90 itself, compiled and loaded: its name."""
    options = _build.options_from_environment()
    if options.nvcc is None or not rows.has("torch"):
        pytest.skip("needs nvcc and torch")
    target = tmp_path_factory.mktemp("built") / "serve_sm90.so"
    return fa_ext._core.load(str(_build.build_kernel(TRIAL / "serve_sm90.cu", target, options)))


def on_device(arguments):
    def put(x):
        if isinstance(x, tuple):
            return tuple(put(y) for y in x)
        return place(x, "torch") if isinstance(x, np.ndarray) else x

    return {name: put(x) for name, x in arguments.items()}


def on_host(results):
    return [rows.to_host(x).tobytes() for x in results]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (64, "float16"), (128, "bfloat16"), (128, "float16"), (80, "float16"), (192, "bfloat16"), (256, "float16")])
def test_serving_on_a_gpu_against_float64(built, head_dim, dtype):
    cases = [dataclasses.replace(case, **FEW, page_size=size) for case in SERVING[:2] for size in (1, 3, 8, 16, 24, 64, 256)]
    cases += [*SERVING, ServingCase((1, 1, 2), (8128, 8129, 140000), **MORE), ServingCase((1,) * 300, (70,) * 300, q="one", **FEW)]
    cases += serving_cases.random_cases(200, 7, longest=3000)
    for case in cases:
        case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
        report = fa_ext.verify(**on_device(case.arguments()), kernel=built, check=False)
        assert report, f"{case}\n{report}"


@pytest.mark.gpu
@pytest.mark.slow
def test_serving_on_a_gpu_has_the_same_bits(built):
    base = ServingCase((1, 1, 1, 1), (5, 40000, 97, 9000), causal="bottom_right", seed=3, **FEW | {"head_dim": 128})
    values = base.values()

    def parts(case, values):
        results = fa_ext.attention(**on_device(case.arguments(values)), kernel=built, check=False, return_lse=True)
        return sequences_of(case, case.arguments(values), *map(rows.to_host, results))

    wanted = parts(base, values)
    for store in [dict(q=q, k=k) for q, k in itertools.product(Q_STORAGE, K_STORAGE)] + [dict(page_size=n) for n in (1, 3, 8, 64, 100)]:
        for _ in range(20):
            assert parts(dataclasses.replace(base, **store), values) == wanted, store
    for order in ([1], [1, 0], [3, 1, 1], [0] * 20 + [1] * 14, [2, 3] * 100):
        case = dataclasses.replace(base, q="one", n_q=(1,) * len(order), n_k=tuple(base.n_k[b] for b in order))
        assert parts(case, [values[b] for b in order]) == [wanted[b] for b in order], order


@pytest.mark.gpu
@pytest.mark.slow
def test_serving_on_a_gpu_replays_a_graph_with_other_lengths(built):
    import torch

    case = ServingCase((1,) * 8, (3000,) * 8, q="one", causal="bottom_right", **FEW | {"head_dim": 128})
    arguments = on_device(case.arguments())
    lengths, out = arguments["seqlens_k"], torch.empty_like(arguments["q"])

    def call():
        return fa_ext.attention(**arguments, kernel=built, out=out, check=False)

    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    rng = np.random.default_rng(0)
    for _ in range(1000):
        lengths.copy_(torch.from_numpy(rng.integers(0, 3001, 8).astype(np.int32)))
        out.fill_(float("nan"))
        graph.replay()
        replayed = on_host([out])
        call()
        assert on_host([out]) == replayed
    report = fa_ext.verify(**arguments, kernel=built, check=False)
    assert report, report


def test_every_one_is_described():
    text = (TRIAL / "README.md").read_text()
    kernels = sorted(path.stem for path in TRIAL.glob("*.cu"))
    assert kernels == sorted(INSTANCES) and all(f"| `{kernel}` |" in text for kernel in kernels)
    assert not set(kernels) & set(_build.kernel_names())
