"""Gradients of sequences by wgmma_backward_sm90 on the emulator at the widths that have other kernels or tiles than the 64 columns of
test_emulated_gradients.py; there one block walks over all tiles of a launch."""

import platform
import shutil
import sys

import pytest

import fa_ext
from bench.problems.case import Case
from tests import emulator
from tests.contract.gradients import Problem, make, run, verdict
from tests.contract.sequence_gradients import arguments_of, as_dense, elsewhere, parts_of, values_of
from tests.emulator.emulated import on_the_cpu

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

NAME = "wgmma_backward_sm90"
INSTANCES = "^(d256_masked_bf16|sequences_(d256_(masked|capped)_bf16|d192v128_masked_bf16|d96_masked_f16|d128_masked_bf16))$"
RACES = "^sequences_(d256|d192v128)_masked_bf16$"
#: Beside the ends of tiles of 64 and of 128 rows, and those that have a tile.
LENGTHS = (1, 63, 64, 65, 127, 128, 129)
WRT = ("q", "k", "v")
WIDTHS = {
    "256": dict(head_dim=256),
    "256, capped": dict(head_dim=256, softcap=4.0),
    "192 and 128": dict(head_dim=192, head_dim_v=128),
    "160 and 96": dict(head_dim=160, head_dim_v=96),
    "128": dict(head_dim=128),
    "96": dict(head_dim=96, dtype="float16"),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(races=False): the name under which the kernel is loaded."""
    folder, loaded = tmp_path_factory.mktemp("gradient_widths"), {}

    def get(races=False):
        if races not in loaded:
            target = emulator.build(NAME, folder / f"{NAME}.{races}.so", instances=RACES if races else INSTANCES, races=races)
            loaded[races] = emulator.load(target, NAME)
        return loaded[races]

    with on_the_cpu(loaded.values):
        yield get


@pytest.fixture(autouse=True)
def one_block(monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")


def sequences(n_q, n_k, heads=2, heads_kv=1, **options) -> Case:
    common = {"operation": "backward", "dlse": True, "dtype": "bfloat16", "k": "packed", "causal": "bottom_right"}
    return Case.sequences(n_q, n_k, heads, heads_kv, **common | options)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("seed, options", [
    (0, {"heads": 1, "sinks": True}),
    (1, {"heads": 2, "causal": False, "window": (60, 3)}),
    (2, {"heads": 1, "q": "padded", "k": "padded", "layout": "bhsd", "causal": "top_left", "accumulate": True}),
])  # fmt: skip
def test_lengths_beside_those_of_tiles(emulated, monkeypatch, width, seed, options):
    """Each with as many keys, more, fewer or none, so that some tiles see nothing."""
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    n_q, n_k = (*LENGTHS, 0, 70), (LENGTHS, LENGTHS[::-1], (*LENGTHS[3:], *LENGTHS[:3]))[seed] + (64, 0)
    report = verdict(emulated(), make(sequences(n_q, n_k, **width | options)))
    assert report, report


@pytest.mark.parametrize("width", ["256", "192 and 128", "96"])
def test_heads_in_groups(emulated, monkeypatch, width):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    report = verdict(emulated(), make(sequences((65, 1, 130), (129, 64, 70), 6, 2, **WIDTHS[width])))
    assert report, report


def test_the_bits_of_a_dense_call(emulated, monkeypatch):
    """At 256 columns, in two storages and orders of threads."""
    base = sequences(LENGTHS, LENGTHS[2:] + LENGTHS[:2], 4, 2, **WIDTHS["256"])
    values = values_of(base)
    wanted = [fa_ext.attention_backward(**as_dense(base, x, b), kernel=emulated()) for b, x in enumerate(values)]
    for seed, store in enumerate(({}, {"q": "padded", "k": "padded", "layout": "bhsd", "slack": 70})):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        case = base.changed(**store)
        inputs = arguments_of(case, values)
        got = run(emulated(), Problem(case, inputs, WRT))
        for b, part in enumerate(parts_of(case, inputs, got)):
            assert [part[name].tobytes() for name in WRT] == [g[0].swapaxes(0, 1).tobytes() for g in wanted[b]], (store, b)
        for name in WRT:
            assert (elsewhere(case, inputs, name, got[name]) == 0).all()


@pytest.mark.parametrize("width", ["256", "192 and 128"])
def test_no_race(emulated, monkeypatch, width):
    """Among tiles without keys and of several sequences, each stage of the ring of tiles used more than once."""
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    assert verdict(emulated(races=True), make(sequences((3, 70, 0, 130), (50, 90, 64, 0), **WIDTHS[width])))
