"""cpu_simd_backward alone: its instances on this CPU, sizes beyond one chunk of keys, threads, workspace, containment."""

import ctypes
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from fa_ext import _core
from tests.contract import gradients, runner
from tests.contract.gradients import make, run, verdict

KERNEL = "cpu_simd_backward"
pytestmark = pytest.mark.skipif(KERNEL not in fa_ext.kernels("backward"), reason="this build has no cpu_simd_backward")

ISAS = ("amxbf16", "avx512bf16", "avx512", "avx2", "generic")


@pytest.fixture(params=ISAS)
def isa(request):
    """Calls take that instance; skips where this CPU lacks it."""
    library = ctypes.CDLL(_core.__file__)
    library.fa_cpu_simd_apply.restype, x = ctypes.c_bool, (ctypes.c_float * 16)()
    if not library.fa_cpu_simd_apply(request.param.encode(), b"exp2", False, x, x, ctypes.c_size_t(16)):
        pytest.skip(f"this CPU has no {request.param}")
    library.fa_cpu_simd_force(request.param.encode())
    yield request.param
    library.fa_cpu_simd_force((os.environ.get("FA_EXT_CPU_ISA") or "").encode())


CASES = [
    Case(1, 2, 1, 1, 1, 1, dtype="float32"),
    Case(1, 4, 2, 239, 511, 64, dtype="float32", causal="bottom_right", sinks="same"),
    Case(2, 3, 3, 113, 130, 80, 40, dtype="float16", mask="full", bias="full"),
    Case(1, 8, 1, 70, 799, 33, dtype="bfloat16", window=(40, 9), softcap=5.0, layout="bshd"),
    Case(1, 2, 2, 300, 260, 256, dtype="float32", causal="top_left", mask="rows"),
    Case(1, 6, 2, 129, 193, 24, 7, dtype="float64", bias="alibi", sinks="same", window=(50, 60)),
    Case(3, 2, 2, 3, 1023, 17, dtype="float32", mask="keys"),
    Case(1, 2, 2, 1023, 3, 128, dtype="float32", causal="top_left"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_instance(isa, case):
    report = verdict(KERNEL, make(case))
    assert report, report


def test_it_is_preferred():
    problem = make(Case(1, 2, 1, 9, 11, 16, dtype="float32"))
    assert fa_ext.explain_backward(**problem.inputs)[0] == KERNEL
    chosen, reasons = fa_ext.explain_backward(**problem.inputs, scale=1e31)
    assert chosen == "cpu_ref_backward" and "1e30" in reasons[KERNEL]


@pytest.mark.parametrize("case", [
    Case(1, 1, 1, 333, 900, 32, dtype="float32", causal="bottom_right"),
    Case(1, 6, 3, 200, 300, 64, dtype="bfloat16", bias="keys", sinks="same"),
    Case(2, 5, 5, 140, 260, 16, dtype="float64", window=(90, 10)),
    Case(4, 2, 2, 65, 129, 40, dtype="float16", mask="full", bias="full"),
], ids=str)  # fmt: skip
def test_threads_change_no_bit(isa, case):
    """By heads, chunk by chunk, and any mixture: dq adds the chunks up in the same order."""
    problem = make(case)
    omp = ctypes.CDLL("libgomp.so.1")
    before, found = omp.omp_get_max_threads(), []
    for threads in (1, 2, 3, 7, 16):
        omp.omp_set_num_threads(threads)
        try:
            found.append(run(KERNEL, problem))
        finally:
            omp.omp_set_num_threads(before)
    for name in found[0]:
        for other in found[1:]:
            np.testing.assert_array_equal(runner.bits(found[0][name]), runner.bits(other[name]), name)


SCRIPT = """
    import hashlib, sys
    import numpy as np
    import fa_ext
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal({shape}, dtype=np.float32) for _ in range(4))
    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    chosen, reasons = fa_ext.explain_backward(dout, q, k, v, out, lse)
    found = fa_ext.attention_backward(dout, q, k, v, out, lse) if chosen == "cpu_simd_backward" else ()
    print(chosen, hashlib.sha256(b"".join(x.tobytes() for x in found)).hexdigest())
"""


def limited(shape, megabytes, threads):
    path = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"PYTHONPATH": path, "FA_EXT_WORKSPACE_MB": str(megabytes), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    source = textwrap.dedent(SCRIPT.format(shape=shape))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_workspace_limit_changes_no_bit():
    """Rounds of fewer chunks, then fewer threads, and where no thread has room for dq another kernel."""
    shape = (1, 2, 500, 256)  # 0.5 MB of sums a head, and 0.9 MB a thread
    chosen, bits = limited(shape, 512, 4)
    assert chosen == KERNEL
    for megabytes, threads in ((6, 4), (4, 4), (3, 3), (2, 2), (2, 5)):
        assert limited(shape, megabytes, threads) == [KERNEL, bits], megabytes
    assert limited(shape, 1, 2)[0] == "cpu_ref_backward"


def test_pairs_that_are_not_seen_may_hold_anything(isa):
    """NaN and Inf of a key or a query reach the pairs that see it, and no other of their tiles."""
    for extra in (dict(mask="full"), dict(causal="bottom_right"), dict(bias="holes")):
        case = Case(1, 2, 1, 150, 170, 24, dtype="float32", **extra)
        problem = make(case, wrt=("q", "k", "v"))
        want = run(KERNEL, problem)
        seen = seen_pairs(problem)
        for value in (np.nan, np.inf):
            i, j = 77, 140
            for name, at in (("k", (0, 0, j, 3)), ("v", (0, 0, j, 3)), ("q", (0, 1, i, 3)), ("dout", (0, 1, i, 3))):
                broken = problem.inputs[name].copy()
                broken[at] = value
                got = run(KERNEL, gradients.Problem(case, problem.inputs | {name: broken}, problem.wrt))
                for n, kept in unreached(name, seen, i, j).items():
                    np.testing.assert_array_equal(runner.bits(got[n])[kept], runner.bits(want[n])[kept], f"{extra} {name} d{n}")


def seen_pairs(problem):
    """(H, Sq, Sk) of batch entry 0."""
    from fa_ext import reference

    case, inputs = problem.case, problem.inputs
    seen = reference.visible_keys(np.arange(case.seq_q), case.seq_q, case.seq_k, case.causal, case.window)
    seen = np.broadcast_to(seen, (1, case.heads, case.seq_q, case.seq_k))
    if "mask" in inputs:
        seen = seen & inputs["mask"]
    return (seen & (inputs["bias"] != -np.inf))[0] if "bias" in inputs else seen[0]


def unreached(name, seen, i, j):
    """Where gradients may not change when key j, or query i of head 1, is broken: {name: boolean array (1, H, S)}."""
    if name in "kv":
        keys = np.ones((1, 1, seen.shape[2]), bool)
        keys[0, 0, j] = False
        return {"q": ~seen[None, :, :, j], "k": keys, "v": keys}
    queries = np.ones((1, *seen.shape[:2]), bool)
    queries[0, 1, i] = False
    keys = ~seen[None, 1:, i]
    return {"q": queries, "k": keys, "v": keys}


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("bias",), ("q", "v")])
def test_some_gradients_alone_have_the_same_bits(isa, wrt):
    problem = make(Case(1, 4, 2, 150, 300, 48, dtype="float32", bias="full", causal="bottom_right", softcap=3.0))
    whole, some = run(KERNEL, problem), run(KERNEL, gradients.Problem(problem.case, problem.inputs, wrt))
    for name in wrt:
        np.testing.assert_array_equal(runner.bits(some[name]), runner.bits(whole[name]), name)
