"""wgmma_sm90's kind with boolean masks, intervals and ALiBi, on the emulator: against float64 by masks, broadcasts, bands and schedules; blocks that
are left out, races, mutants. What it has to do on a GPU is in tests/contract, as for every kernel, and below."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from fa_ext import _build
from tests import emulator
from tests.contract import runner
from tests.emulator.emulated import on_the_cpu, replaced

KERNEL = "wgmma_sm90"
here = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Axes of a mask that are kept; the others have extent 1.
AXES = ["", "k", "q", "qk", "hk", "bk", "hq", "bhqk"]
CASES = [
    "B1,H1,S3x5,D64,bfloat16,mask=full",
    "B1,H2/1,S113x130,D64,bfloat16,causal=bottom_right,mask=rows",
    "B2,H2,S64x67,D56,bfloat16,window=9:20,sinks=float32,mask=batch",
    "B2,H4/2,S200x333,D64,bfloat16,causal=top_left,mask=heads",
    "B1,H2,S150x700,D64,bfloat16,window=300:130,mask=keys,layout=bshd",
    "B1,H3/1,S201x130,D40,bfloat16,mask=one",
    "B1,H2/1,S128x133,D64,bfloat16,mask=none,sinks=same",
    "B1,H1,S70x90,D64,bfloat16,mask=strided",
    "B1,H2/1,S113x130,D64,bfloat16,causal=bottom_right,alibi=heads",
    "B2,H2,S130x300,D64,bfloat16,alibi=batch",
    "B2,H2,S300x130,D64,bfloat16,alibi=steep,mask=full,window=200:90",
    "B1,H4/2,S200x333,D64,bfloat16,alibi=strided,causal=top_left,values=large",
    "B2,H2/1,S200x333,D64,bfloat16,intervals=full",
    "B1,H2,S150x333,D64,bfloat16,intervals=two,causal=bottom_right",
    "B2,H2,S113x130,D64,bfloat16,intervals=wild,sinks=same",
    "B1,H2,S300x290,D64,bfloat16,intervals=documents,window=200:90",
    "B2,H2/1,S140x333,D64,bfloat16,intervals=keys,alibi=heads",
    "B1,H2,S140x333,D64,bfloat16,intervals=heads,mask=keys",
    "B2,H2,S70x90,D64,bfloat16,intervals=none",
    "B2,H2,S140x333,D64,bfloat16,intervals=strided,mask=full",
]
#: Rows of a bias lie 16-byte aligned: keys are a multiple of 8.
BIASED = [
    "B1,H1,S3x8,D64,bfloat16,bias=full",
    "B2,H4/2,S113x136,D64,bfloat16,bias=full,causal=bottom_right",
    "B2,H2,S200x336,D56,bfloat16,bias=shared,mask=full",
    "B1,H2,S150x696,D64,bfloat16,bias=full,window=none:130,layout=bshd",
    "B1,H2,S140x264,D128,bfloat16,bias=holes,alibi=heads,sinks=same",
    "B1,H2/1,S140x264,D64,bfloat16,bias=finfo_min",
    "B1,H2,S70x264,D64,bfloat16,bias=finfo_max",
    "B1,H2,S70x264,D64,bfloat16,bias=full,intervals=documents",
    "B1,H2,S70x264,D128,bfloat16,bias=full,values=large",
]
WIDE = ["B1,H2/1,S113x330,D128,bfloat16,causal=bottom_right,mask=full,alibi=heads", "B1,H2,S150x200,D72,bfloat16,mask=rows",
        "B1,H2/1,S140x290,D256,bfloat16,mask=broadcast,alibi=heads", "B1,H2/1,S140x290,D128,bfloat16,intervals=two,alibi=heads"]  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(tag="", races=False, edit=None): the name under which the kernel is loaded, once a tag."""
    folder, loaded = tmp_path_factory.mktemp("light"), {}

    def get(tag="", instances="_(light|general)_bf16$", **options):
        if tag not in loaded:
            target = folder / f"{KERNEL}.{len(loaded)}.so"
            emulator.build(_build.kernel_files()[KERNEL], target, instances=instances, **options)
            loaded[tag] = emulator.load(target, KERNEL)
        return loaded[tag]

    with on_the_cpu(loaded.values):
        yield get


def schedule(monkeypatch, seed, blocks):
    for name, value in (("SEED", seed), ("SMS", blocks)):
        monkeypatch.setenv(f"FA_EMULATOR_{name}", str(value))


@here
@pytest.mark.emulated
@pytest.mark.parametrize("seed, blocks", [(0, 132), (5, 1)])
@pytest.mark.parametrize("case", CASES + WIDE + BIASED)
def test_against_float64(emulated, monkeypatch, case, seed, blocks):
    schedule(monkeypatch, seed, blocks)
    assert (report := runner.verdict(emulated(), Case.parse(case))), report


def masked(shape, mask, **options):
    """Arrays of a call with a mask."""
    batch, heads, seq_q, seq_k, head_dim = shape
    inputs = Case(batch, heads, heads, seq_q, seq_k, head_dim, dtype="bfloat16", **options).host_inputs()
    return {**inputs, "mask": mask}


def documents(seq, lengths):
    """Which pairs are of one document, (1, 1, seq, seq)."""
    ids = np.repeat(np.arange(len(lengths)), lengths)[:seq]
    return (ids[:, None] == ids[None, :])[None, None]


MASKS = {
    "density 1e-3": lambda rng, shape: rng.random(shape) < 1e-3,
    "density 1/2": lambda rng, shape: rng.random(shape) < 0.5,
    "all but one in 1000": lambda rng, shape: rng.random(shape) > 1e-3,
    "bytes": lambda rng, shape: (rng.integers(0, 2, shape) * rng.choice([1, 2, 128, 255], shape)).astype(np.uint8).view(np.bool_),
}


@here
@pytest.mark.emulated
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("kind", MASKS)
def test_broadcasts(emulated, kind, axes):
    rng = np.random.default_rng(len(axes))
    shape = tuple(n if axis in axes else 1 for axis, n in zip("bhqk", (2, 2, 150, 333)))
    report = fa_ext.verify(**runner.on(emulated(), masked((2, 2, 150, 333, 64), MASKS[kind](rng, shape))), kernel=emulated())
    assert report, report


@here
@pytest.mark.emulated
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("lengths", ([64] * 6, [100, 1, 29, 130, 124], [384], [63, 65, 128, 128], [1] * 384))
def test_documents_as_a_mask(emulated, monkeypatch, lengths, causal):
    schedule(monkeypatch, 3, 2)
    inputs = masked((1, 2, 384, 384, 64), documents(384, lengths))
    report = fa_ext.verify(**runner.on(emulated(), inputs), causal=causal, kernel=emulated())
    assert report, report


@here
@pytest.mark.emulated
def test_blocks_that_nobody_sees_are_not_read(emulated):
    """Far more keys than a word of a map has bits for, NaN in all that no query sees but for the block of 64 that each lies in."""
    mask = np.zeros((1, 1, 130, 5000), np.bool_)
    mask[..., :64, 70:75] = mask[..., 60:, 4480:4500] = mask[..., 40, 2047:2049] = True
    inputs = masked((1, 1, 130, 5000, 64), mask)
    read = np.zeros(5000, np.bool_)
    for key in np.flatnonzero(mask.any((0, 1, 2))):
        read[max(0, key // 64 * 64 - 64) : key // 64 * 64 + 128] = True
    inputs["k"][:, :, ~read] = inputs["v"][:, :, ~read] = np.nan
    report = fa_ext.verify(**runner.on(emulated(), inputs), kernel=emulated())
    assert report, report


@here
@pytest.mark.emulated
def test_no_race(emulated, monkeypatch):
    schedule(monkeypatch, 1, 1)
    name = emulated("races", instances="d64_light_bf16$", races=True)
    assert runner.verdict(name, Case.parse("B1,H2/1,S300x290,D64,bfloat16,causal=bottom_right,mask=full,alibi=heads"))
    assert fa_ext.verify(**runner.on(name, masked((1, 2, 384, 384, 64), documents(384, [100, 1, 29, 130, 124]))), kernel=name)


@here
@pytest.mark.emulated
@pytest.mark.parametrize("old, new", [
    ("(whole ? 0u : 8u)", "(sees && !whole ? 8u : 0u)"),
    ("first_key + place - 8 * r", "first_key + place"),
    ("first_key < row + p.diagonal + 63 ? slope : -slope", "true ? slope : -slope"),
    ("low, high, 0x7632", "low, high, 0x3276"),
    ("(x >> 6 & 0x000c000c)", "(x >> 8 & 0x000c000c)"),
    ("some |= map->seen[at] >> column % 32", "some |= map->seen[at] >> (column + 1) % 32"),
    ("words[n][r][2] = eight.z", "words[n][r][2] = eight.w"),
])  # fmt: skip
def test_mutants(emulated, old, new):
    kernel = emulated(old, instances="d64_(light|general)_bf16$", edit=replaced(old, new))

    def right():
        yield from (runner.verdict(kernel, Case.parse(case)) for case in CASES + BIASED[:3])
        yield fa_ext.verify(**runner.on(kernel, masked((1, 2, 384, 384, 64), documents(384, [100, 1, 29, 130, 124]))), kernel=kernel)
        lone = np.zeros((1, 1, 64, 2112), np.bool_)
        lone[..., 2030:2040] = True  # in the second half of the last block, whose first half has a word of bits of its own
        yield fa_ext.verify(**runner.on(kernel, masked((1, 1, 64, 2112, 64), lone)), kernel=kernel)
        gentle = masked((1, 1, 400, 400, 64), None) | {"alibi": np.array([2e-3], np.float32)}  # on the fast path, whatever its sign
        yield fa_ext.verify(**runner.on(kernel, gentle), kernel=kernel)

    try:
        assert not all(right())
    except fa_ext.CudaError:
        pass  # it never ends


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize("causal", (False, "bottom_right"))
@pytest.mark.parametrize("density", (0.0, 1e-4, 0.5, 0.9999, 1.0))
def test_densities(head_dim, causal, density):
    if reason := runner.absent(KERNEL):
        pytest.skip(reason)
    rng = np.random.default_rng(int(density * 10))
    inputs = masked((2, 4, 799, 1023, head_dim), rng.random((2, 1, 799, 1023)) < density)
    report = fa_ext.verify(**runner.on(KERNEL, inputs), causal=causal, kernel=KERNEL)
    assert report, report
