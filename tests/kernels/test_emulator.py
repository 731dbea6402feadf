"""The emulator of CUDA (tests/emulator): what it runs is right, and what is wrong with a kernel shows.

Kernels are compiled at their smallest: one tile, one dtype. How to run all tests of a kernel on it: emulator/__init__.py.
"""

import ctypes
import dataclasses
import itertools
import platform
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import magnitudes
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from fa_ext import _build
from fa_ext.judge.merge import judge_merge
from tests import emulator
from tests.contract import gradients, lse_views, runner
from tests.contract.devices import DEVICES
from tests.emulator.emulated import on_the_cpu, replaced, seeds_that_fail

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(
        shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
        reason="the emulator is for g++ on x86-64 Linux",
    ),
]

SEEDS = (0, 1, 2)
SIMT = ("-DHEAD_DIM=64", "-DBLOCK_M=64", "-DBLOCK_N=32", "-DNUM_WARPS=4", "-DKEY_GROUPS=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def emulated(folder):
    """emulated(kernel, tag, **options): the name under which a build of it is loaded, once for each tag."""
    loaded = {}

    def get(kernel, tag="right", **options):
        if (kernel, tag) not in loaded:
            target = emulator.build(kernel, folder / f"{kernel}.{tag}.so", **options)
            loaded[kernel, tag] = emulator.load(target, kernel)
        return loaded[kernel, tag]

    with on_the_cpu(loaded.values):
        yield get


@pytest.fixture(params=SEEDS)
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))
    return request.param


# ---- the machine ----


@pytest.fixture(scope="module")
def selftest(folder):
    library = ctypes.CDLL(str(emulator.build(emulator.HERE / "selftest.cu", folder / "selftest.so")))

    def run(name):
        message = ctypes.create_string_buffer(8000)
        return library.emulator_selftest(name.encode(), message, len(message)), message.value.decode()

    return run


@pytest.mark.parametrize("name", ["shuffles", "barriers", "matrices", "products", "copies", "turns", "unwritten"])
def test_what_threads_do_together(selftest, seed, name):
    assert selftest(name) == (0, "no error")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unjoined", r"deadlock(.|\n)*threads 0-31: barrier 0, 32 of 64 threads there at emulator/selftest\.cu:\d+(.|\n)*32-63: ended"),
        ("diverged", "lanes of a warp meet in __syncwarp and __any_sync"),
        ("beyond", r"access to byte 1024 of the 1024 bytes of dynamic shared memory(.|\n)*thread 5 at emulator/selftest\.cu:\d+"),
        ("before", "wrote -4 bytes from the begin of its 1024 bytes of dynamic shared memory"),
        ("null_pointer", r"access to address (.|\n)*thread 0 at emulator/selftest\.cu:\d+"),
        ("beyond_the_window", r"dynamic byte 4096, 4 bytes aligned to 4: outside the block's shared memory"),
        ("misaligned_shared", r"byte 520 of the 1024 bytes of dynamic shared memory(.|\n)*: misaligned, of alignment 16(.|\n)*thread 3 at emulator/selftest\.cu:\d+"),
        ("misaligned_global", r"address 0x\w+4: misaligned, of alignment 8(.|\n)*thread 2 at emulator/selftest\.cu:\d+"),
        ("uninitialised", "was not initialised"),
        ("too_many_threads", "1 to 1024 threads"),
    ],
)  # fmt: skip
def test_faults_are_named(selftest, monkeypatch, name, words):
    monkeypatch.setenv("FA_EMULATOR_SEED", "0")
    failures, message = selftest(name)
    assert failures == -1 and re.search(words, message), message


def test_a_race_shows_under_every_seed(selftest, seed):
    failures, _ = selftest("race")
    assert failures > 0


@pytest.mark.parametrize("source", _build.cuda_files(), ids=lambda path: path.stem)
def test_every_instruction_of_every_kernel_is_known(source):
    """chaos is no kernel of its own for a device: it is left out."""
    if source.stem == "chaos":
        pytest.skip("not emulated")
    for unit in _build.units_of(source)[-2:]:
        text = emulator.preprocessed(unit.source, unit.flags, macro=unit.macro)
        assert not re.search(r"\basm volatile\b|<<<|\b__shared__\b", text)


def test_an_unknown_instruction_is_an_error_that_names_it(tmp_path):
    source = tmp_path / "unknown.cu"
    source.write_text('__global__ void kernel(float x) {\n    asm volatile("sin.approx.f32 %0, %0;" : "+f"(x));\n}\n')
    with pytest.raises(emulator.EmulationError, match=r"unknown\.cu:2: the emulator does not know sin\.approx\.f32"):
        emulator.preprocessed(source)


# ---- kernels that are right ----

FORWARD = {
    "minimal": {},
    "simt": dict(flags=SIMT, instances="^f16$"),
    "mma_sm80": dict(instances="^d64$"),
    "wgmma_sm90": dict(instances="^d64_masked_f16$"),
}
CASES = [
    "B1,H1,S3x5,D64,float16",
    "B1,H2/1,S113x130,D64,float16,causal=bottom_right",
    "B2,H2,S64x67,D56,float16,window=9:20,sinks=float32",
    "B1,H2/1,S66x75,D59,float16,bias=full,mask=rows,softcap=5.0",
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(emulated, seed, kernel, name):
    kernel = emulated(kernel, **FORWARD[kernel])
    try:
        report = runner.verdict(kernel, Case.parse(name))
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    assert report, report


@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
@pytest.mark.parametrize("name", ["B2,H4/2,S70x75,D64,float16,causal=bottom_right", "B2,H2/1,S3x1500,D64,float16,causal=bottom_right"])
@pytest.mark.parametrize("kernel", FORWARD)
def test_an_lse_has_any_strides(emulated, kernel, name, kind):
    lse_views.assert_written(emulated(kernel, **FORWARD[kernel]), Case.parse(name).host_inputs(), kind)


@pytest.fixture(scope="module")
def cublas(emulated, folder):
    """The cublas kernel with products by emulator/cublas.cpp."""
    library = folder / "libcublas.so"
    subprocess.run(["g++", "-std=gnu++20", "-O2", "-shared", "-fPIC", emulator.HERE / "cublas.cpp", "-o", library], check=True)
    opened = "launch.host->open_library(launch.context, FA_CUBLAS, &handle, launch.status)"
    return emulated("cublas", edit=replaced(opened, f'(handle = dlopen("{library}", 2)) ? FA_OK : FA_ECUDA'))


@pytest.mark.parametrize(
    "name",
    [
        *CASES,
        "B1,H2/1,S3x1500,D64,float32,mask=rows,softcap=5.0",  # four warps a row
        "B1,H2/1,S3x7000,D64,bfloat16,alibi=batch,causal=bottom_right",  # sixteen
        "B1,H2/1,S3x9000,D64,float16,bias=keys,causal=bottom_right",  # more than registers hold
        "B1,H1,S2x9000,D16,float32,alibi=heads",
    ],
)
def test_cublas(cublas, seed, name):
    assert (report := runner.verdict(cublas, Case.parse(name))), report


def test_an_lse_of_cublas_has_any_strides(cublas):
    for kind in lse_views.KINDS:
        for name in CASES:
            lse_views.assert_written(cublas, Case.parse(name).host_inputs(), kind)


def test_a_persistent_kernel_walks_over_several_tiles(emulated, seed, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SMS", "2")
    kernel = emulated("wgmma_sm90", **FORWARD["wgmma_sm90"])
    assert runner.verdict(kernel, Case.parse("B1,H3,S201x260,D64,float16,causal=top_left"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "options", "name"),
    [
        ("wgmma_sm90", dict(instances="^d128_full_f16$"), "B1,H2,S130x200,D128,float16"),
        ("wgmma_split_sm90", {}, "B1,H2,S5x700,D64,bfloat16,causal=bottom_right"),
        ("wmma", dict(instances="^d64$"), "B1,H2,S66x130,D64,bfloat16,mask=rows"),
        ("wmma", dict(instances="^d64$"), "B2,H4/2,S66x131,D56,float16,alibi=steep,bias=finfo_min,causal=bottom_right"),
    ],
)
def test_forward_of_what_takes_long_to_compile(emulated, seed, kernel, options, name):
    kernel = emulated(kernel, "slow", **options)
    assert runner.verdict(kernel, Case.parse(name))
    for kind in lse_views.KINDS:
        lse_views.assert_written(kernel, Case.parse(name).host_inputs(), kind)


#: The builds for scores of every magnitude: both 16-bit types, and float32 where the kernel has it.
LARGE = {
    "minimal": {},
    "simt": dict(flags=SIMT, instances="^(f16|f32)$"),
    "mma_sm80": dict(instances="^d64$"),
    "wmma": dict(instances="^d64$"),
    "cublas": {},
    "wgmma_sm90": dict(instances="^d64_(full_bf16|masked_f16)$"),
    "wgmma_split_sm90": {},
    "prefill_sm90": dict(instances="^d64_masked_"),
    "serve_sm90": dict(instances="^d64_"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", magnitudes.KINDS)
@pytest.mark.parametrize("kernel", LARGE)
def test_scores_of_every_magnitude(emulated, request, kernel, kind):
    row = request.getfixturevalue("cublas") if kernel == "cublas" else emulated(kernel, "large", **LARGE[kernel])
    wrong, judged = [], 0
    for n, exponent in enumerate(magnitudes.EXPONENTS):
        dtype = ("float16", "float32" if kernel in ("minimal", "simt", "cublas") else "bfloat16")[n % 2 or exponent > 31]
        base = Case(1, 2, 1, 20 if kernel != "serve_sm90" else 3, 1101, 64, dtype=dtype, seed=n)
        for sign, option in ((1, {}), (-1, {"causal": "bottom_right"}), (-1, {"sinks": "level"})):
            case = dataclasses.replace(base, logits=(kind, sign * exponent), **option)
            if not magnitudes.holds(kind, exponent, 64, dtype, 1 / 8):
                continue
            try:
                report = runner.verdict(row, case)
            except fa_ext.UnsupportedError:
                continue
            judged += 1
            wrong += [] if report else [f"{case}: {report.failures[0]}"]
    assert judged > 20 and not wrong, f"{len(wrong)} of {judged}\n" + "\n".join(wrong)


BACKWARD = {
    "simt_backward": dict(instances="^f32$"),
    "mma_backward_sm80": dict(instances="^d64(_general)?$"),
    "wgmma_backward_sm90": dict(instances="^(d64_(full|masked)|d192_full|d256_masked)_bf16$|^d256_capped_f16$"),
}
GRADIENTS = [
    ("simt_backward", "B1,H1,S3x5,D16,float32"),
    ("simt_backward", "B2,H4/2,S70x83,D64,float32,causal=bottom_right,sinks=float32"),
    ("simt_backward", "B1,H2/1,S33x71,D40/24,float32,bias=full,mask=rows,softcap=5.0"),
    ("simt_backward", "B2,H4/2,S33x71,D40,float32,alibi=batch,dropout=0.3:7,causal=bottom_right"),
    ("mma_backward_sm80", "B1,H2/1,S70x133,D64,bfloat16"),
    ("mma_backward_sm80", "B2,H2,S133,D64,bfloat16,causal=bottom_right,sinks=same"),
    ("mma_backward_sm80", "B1,H4/2,S40x90,D64,bfloat16,window=30:none,layout=bshd"),
    ("mma_backward_sm80", "B1,H2/1,S33x71,D60/44,bfloat16,bias=full,mask=rows,softcap=5.0,sinks=float32"),
    ("mma_backward_sm80", "B2,H4/2,S70x133,D64,float16,alibi=batch,dropout=0.3:7,causal=bottom_right,bias=keys"),
    ("wgmma_backward_sm90", "B1,H2/1,S70x133,D64,bfloat16"),
    ("wgmma_backward_sm90", "B2,H2,S133,D64,bfloat16,causal=bottom_right,sinks=same"),
    ("wgmma_backward_sm90", "B1,H4/2,S40x90,D64,bfloat16,window=30:none,layout=bshd"),
    ("wgmma_backward_sm90", "B1,H2/1,S133x230,D136,bfloat16"),
    ("wgmma_backward_sm90", "B1,H4/2,S140x290,D256,bfloat16,window=130:none,layout=bshd"),
    ("wgmma_backward_sm90", "B2,H2,S201x190,D200,bfloat16,causal=top_left,sinks=same"),
    ("wgmma_backward_sm90", "B1,H2/1,S70x133,D248,float16,softcap=5.0,causal=bottom_right"),
]


@pytest.mark.parametrize(("kernel", "name"), GRADIENTS)
def test_backward(emulated, monkeypatch, seed, kernel, name):
    monkeypatch.setenv("FA_EMULATOR_SMS", "2")
    report = gradients.verdict(emulated(kernel, **BACKWARD[kernel]), gradients.make(Case.parse(name)))
    assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("kind", magnitudes.KINDS)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_gradients_of_every_magnitude(emulated, kernel, kind):
    row, wrong, judged = emulated(kernel, **BACKWARD[kernel]), [], 0
    dtypes = ("float32",) if kernel == "simt_backward" else ("bfloat16",)
    for problem in gradients.large(row, kind, (*gradients.WITHIN[::5], *gradients.BEYOND[::3]), dtypes):
        try:
            got = gradients.run(row, problem)
        except (fa_ext.UnsupportedError, Unplaceable):
            continue
        judged += 1
        within = abs(problem.case.logits[1]) in gradients.WITHIN
        right = gradients.judged(row, problem, got) if within else all(np.isfinite(x.astype(float)).all() for x in got.values())
        wrong += [] if right else [str(problem.case)]
    assert judged > 6 and not wrong, f"{len(wrong)} of {judged}\n" + "\n".join(wrong)


@pytest.mark.parametrize(("kernel", "name"), [
    ("simt_backward", "B2,H4/2,S33x71,D40,float32,causal=bottom_right,bias=keys"),
    ("mma_backward_sm80", "B2,H4/2,S70x133,D64,float16,causal=bottom_right,bias=keys"),
])  # fmt: skip
@pytest.mark.parametrize("races", (False, True))
def test_backward_with_the_words_of_dropout_in_memory(emulated, monkeypatch, kernel, name, races):
    """Read there, they give the bits that they give as arguments."""
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    kernel = emulated(kernel, "races" if races else "right", races=races, **BACKWARD[kernel])
    for drawn in ((0.3, 0x123456789ABCDEF0, 7, (1, 2, 16, 32), 9), (0.3, 5, 1, (0, 0, 3, 5), 4)):
        problem = gradients.make(Case.parse(name))
        problem.inputs["dropout"] = drawn
        found = []
        for heads in (None, "", "0"):
            monkeypatch.delenv("FA_EMULATOR_STATE", raising=False)
            if heads is not None:
                monkeypatch.setenv("FA_EMULATOR_STATE", heads)
            found.append(gradients.run(kernel, problem))
        for gradient in problem.wrt:
            bits = [runner.bits(one[gradient]) for one in found]
            assert np.array_equal(bits[0], bits[1]) and np.array_equal(bits[0], bits[2]), gradient
            assert problem.inputs[gradient].size == 0 or np.asarray(found[0][gradient], np.float32).any()


def merged(kernel, parts=3, seed=0, in_place=False, level=None):
    """``level``: of the LSEs, which are it or one of its next neighbours."""
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((2, 3, 37, 40)).astype(np.float16) for _ in range(parts)]
    lses = [rng.standard_normal((2, 3, 37)).astype(np.float32) for _ in range(parts)]
    if level is not None:
        lses = [level + rng.integers(0, 3, x.shape).astype(np.float32) * np.spacing(level) for x in lses]
    copies = [x.copy() for x in outs], [x.copy() for x in lses]
    into = (outs[0], lses[0]) if in_place else (np.full_like(outs[0], np.nan), np.full_like(lses[0], np.nan))
    out, lse = fa_ext.merge(outs, lses, out=into, kernel=kernel)
    return judge_merge(out, lse, *copies, kernel=kernel)


@pytest.mark.parametrize("parts", (1, 3, 40))
@pytest.mark.parametrize("in_place", (False, True))
def test_merge(emulated, seed, parts, in_place):
    assert merged(emulated("merge"), parts, seed, in_place)


@pytest.mark.parametrize("device", ("h200", "a100"))
def test_documents(emulated, seed, device):
    """By a cluster, and by one block alone."""
    kernel = emulated("documents", device, device=DEVICES[device], races=True)
    for shape, dtype in (((1,), np.int32), ((2, 0), np.int64), ((3, 4001), np.int64), ((30_000,), np.int32), ((1500, 1), np.int32)):
        rng = np.random.default_rng([seed, *shape])
        ids = np.cumsum(rng.random(shape) < rng.choice((0.9, 0.01)), axis=-1).astype(dtype)
        for count in (None, 7, 9000):
            wanted = fa_ext.documents(ids, count=count, check=False, kernel="cpu_documents")
            np.testing.assert_array_equal(fa_ext.documents(ids, count=count, check=False, kernel=kernel), wanted)


def test_document_intervals(emulated, seed, monkeypatch):
    """By a block a row; some of the rows are several tiles."""
    kernel = emulated("documents", "h200", device=DEVICES["h200"], races=True)
    for shape, dtype in (((1, 1), np.int32), ((2, 0), np.int64), ((3, 1024), np.int32), ((2, 3001), np.int64), ((300, 7), np.int32)):
        rng = np.random.default_rng([seed, *shape])
        ids, spans = (np.cumsum(rng.random(shape) < rng.choice((0.9, 0.1, 0.001)), axis=-1).astype(dtype) % 3 for _ in range(2))
        for options in ({"ids": ids}, {"spans": spans}, {"ids": ids, "spans": spans, "window": 40}, {"ids": ids, "causal": False}):
            found = []
            for name in ("cpu_documents", kernel):
                monkeypatch.setenv("FA_EXT_KERNEL_DOCUMENTS", name)
                found.append(fa_ext.document_intervals(**options, out=np.full((shape[0], 1, shape[1], 2), -7, np.int32)))
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("exponent", magnitudes.EXPONENTS)
def test_merge_of_lses_of_every_magnitude(emulated, exponent):
    for parts, sign in itertools.product((2, 5, 40), (1.3, -1.3)):
        assert (report := merged(emulated("merge"), parts, exponent, level=np.float32(sign * 2.0**exponent))), report


# ---- races, by happens-before ----


@pytest.mark.parametrize(
    ("kernel", "options", "name"),
    [
        ("simt", FORWARD["simt"], "B1,H1,S66x75,D59,float16,mask=rows,softcap=5.0"),
        ("mma_sm80", FORWARD["mma_sm80"], "B1,H1,S66x130,D64,float16,causal=bottom_right"),
        ("wgmma_sm90", FORWARD["wgmma_sm90"], "B1,H2,S201x260,D64,float16,causal=top_left"),
    ],
)
def test_what_is_right_has_no_race(emulated, seed, kernel, options, name):
    assert runner.verdict(emulated(kernel, "races", races=True, **options), Case.parse(name))


@pytest.mark.parametrize(("kernel", "name"), [
    ("simt_backward", "B1,H2/1,S33x71,D40/24,float32,bias=full,mask=rows,sinks=float32"),
    ("mma_backward_sm80", "B1,H2/1,S70x133,D64,bfloat16"),
    ("wgmma_backward_sm90", "B1,H2/1,S70x133,D64,bfloat16"),
    ("wgmma_backward_sm90", "B1,H2/1,S133x230,D192,bfloat16"),
    ("wgmma_backward_sm90", "B1,H4/2,S140x290,D256,bfloat16,window=130:none,layout=bshd"),
])  # fmt: skip
def test_backward_has_no_race(emulated, monkeypatch, kernel, name):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    kernel = emulated(kernel, "races", races=True, **BACKWARD[kernel])
    assert gradients.verdict(kernel, gradients.make(Case.parse(name)))


def test_a_race_is_named_with_both_places(emulated, monkeypatch):
    """The last barrier of the key loop: the next keys are stored while some warps still read values."""
    monkeypatch.setenv("FA_EMULATOR_SEED", "0")
    kernel = emulated("simt", "race", races=True, edit=replaced("lane.sync_group();", ";", 3), **FORWARD["simt"])
    with pytest.raises(fa_ext.CudaError, match=r"race: byte \d+ of (.|\n)*simt/\w+\.cuh:\d+(.|\n)*simt/\w+\.cuh:\d+"):
        runner.verdict(kernel, Case.parse("B1,H1,S64x200,D64,float16"))


# ---- kernels that are wrong: each mutant fails under some seed, in the way it should ----


def fails_of(emulated, monkeypatch, kernel, tag, edit, name, **options):
    kernel = emulated(kernel, tag, edit=edit, **options)
    return seeds_that_fail(monkeypatch, lambda: runner.verdict(kernel, Case.parse(name)))


def test_mutant_last_key_is_not_seen(emulated, monkeypatch):
    edit = replaced("end = row + p.diagonal + p.right + 1;", "end = row + p.diagonal + p.right;")
    found = fails_of(emulated, monkeypatch, "minimal", "mask", edit, "B1,H1,S9x11,D16,float32,causal=top_left")
    assert found == ["wrong"] * 12


@pytest.mark.parametrize("barrier", range(4))
def test_mutant_simt_without_a_barrier(emulated, monkeypatch, barrier):
    """Of the key loop: Q and K are there, K is read, V and P are there, V is read."""
    edit = replaced("lane.sync_group();", ";", barrier)
    name = "B1,H1,S64x200,D64,float16"
    found = fails_of(emulated, monkeypatch, "simt", f"barrier{barrier}", edit, name, **FORWARD["simt"])
    assert "wrong" in found


def test_mutant_mma_without_a_wait_for_its_copies(emulated, monkeypatch):
    edit = replaced("cp_async_wait<C::kStages - 2>();", "")
    found = fails_of(emulated, monkeypatch, "mma_sm80", "wait", edit, "B1,H1,S64x200,D64,float16", **FORWARD["mma_sm80"])
    assert "wrong" in found


def test_mutant_wgmma_that_frees_stages_before_its_warps_are_joined(emulated, monkeypatch):
    """A waiter then falls two phases behind, the defect that sm90/forward/kernel.cuh is written against."""
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    edit = replaced("{ named_barrier_sync(1 + C::kConsumers + wg, 128); }", "{}")
    name = "B1,H1,S300x300,D64,float16,causal=top_left"
    found = fails_of(emulated, monkeypatch, "wgmma_sm90", "join", edit, name, **FORWARD["wgmma_sm90"])
    assert found and all("deadlock" in one and "forward/kernel.cuh" in one for one in found), found


def test_mutant_wgmma_that_frees_keys_before_they_are_read(emulated, monkeypatch):
    free = "free_keys(block + 1 == blocks.count);"
    early, removed = replaced("wgmma_wait<1>();", f"{free} wgmma_wait<1>();"), replaced(free, "", 0)
    name = "B1,H1,S200x900,D64,float16,causal=bottom_right"
    options = FORWARD["wgmma_sm90"] | {"races": True}
    found = fails_of(emulated, monkeypatch, "wgmma_sm90", "free", lambda text: early(removed(text)), name, **options)
    words = r"is read by a product of a warpgroup and written by a thread that nobody told of its end(.|\n)*common/tma\.cuh"
    assert len(found) == 12 and all(re.search(words, one) for one in found), found


def test_mutant_backward_without_a_barrier(emulated, monkeypatch):
    edit = replaced("if (wants_k && wants_v) __syncthreads();", "")
    kernel = emulated("simt_backward", "barrier", edit=edit, **BACKWARD["simt_backward"])
    problem = gradients.make(Case.parse("B1,H1,S70x70,D64,float32"))
    assert "wrong" in seeds_that_fail(monkeypatch, lambda: gradients.verdict(kernel, problem))


def test_mutant_merge_whose_lanes_do_not_share_weights(emulated, monkeypatch):
    kernel = emulated("merge", "own", edit=replaced("__shfl_sync(~0u, own[i], begin + r, a.lanes)", "own[i]"))
    assert "wrong" in seeds_that_fail(monkeypatch, lambda: merged(kernel, in_place=True))
