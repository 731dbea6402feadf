"""The cublas kernel alone: one tile of Q K^T first, then chunks of bounded workspace and heads that share keys."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from tests.contract import runner

KERNEL = "cublas"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def available():
    if KERNEL not in fa_ext.kernels():
        pytest.skip("this build has no cublas kernel")
    reason = runner.absent(KERNEL)
    if reason:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (16, 64, 96))
def test_one_tile_of_scores(head_dim):
    """With the identity as V the output is the weights, and log(weights) + LSE is the tile of scaled products."""
    rng = np.random.default_rng(head_dim)
    q = rng.standard_normal((1, 1, 32, head_dim), np.float32)
    k = rng.standard_normal((1, 1, 64, head_dim), np.float32)
    v = np.eye(64, dtype=np.float32)[None, None]
    arrays = (fa_ext.to_device(x) for x in (q, k, v))
    weights, lse = (fa_ext.to_numpy(x) for x in fa_ext.attention(*arrays, scale=0.125, return_lse=True, kernel=KERNEL))
    scores = np.log(weights.astype(np.float64)) + lse[..., None]
    expected = 0.125 * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2))
    assert scores.shape == (1, 1, 32, 64)
    assert np.abs(scores - expected).max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("seq_q", (1, 50))
@pytest.mark.parametrize("heads, heads_kv", ((6, 6), (6, 3), (6, 2), (6, 1)))
def test_heads_that_share_keys(heads, heads_kv, seq_q, layout):
    """As rows of one product where the strides allow it, as products of their own elsewhere."""
    case = Case(3, heads, heads_kv, seq_q, 70, 64, 48, layout=layout, causal="bottom_right")
    report = runner.verdict(KERNEL, case)
    assert report, report


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("seq_k", (100, 1500, 7000, 9000))
def test_slopes_in_every_softmax(seq_k, dtype):
    """A warp, 128 and 512 threads a row, and a row that registers do not hold."""
    for options in ({"alibi": "batch"}, {"alibi": "steep", "bias": "finfo_min"}, {"alibi": "strided", "mask": "rows", "softcap": 5.0}):
        case = Case(2, 4, 2, 33, seq_k, 64, dtype=dtype, causal="bottom_right", window=(None, 3), **options)
        report = runner.verdict(KERNEL, case)
        assert report, f"{report}\n{case}"


# Scores of one head are 1 to 4 MB: whole heads and parts of heads, on devices whose cuBLAS gets 4 MiB and on those
# where it gets 32.
CHUNKED = (
    Case(2, 12, 4, 512, 512, 64, causal="bottom_right"),
    Case(2, 12, 4, 512, 512, 64, layout="bshd", mask="rows", sinks="float32"),
    Case(3, 4, 4, 200, 999, 40, dtype="float32", window=(100, 7)),
    Case(2, 6, 1, 1500, 700, 64, dtype="bfloat16", bias="keys"),
)


def in_a_process(megabytes, code):
    environment = {**os.environ, "FA_EXT_WORKSPACE_MB": str(megabytes)}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("megabytes", (6, 9, 33, 35, 40))
def test_workspace_in_chunks(megabytes):
    """Whatever fits the limit at a time, the result stands. A device too new for the limit says so."""
    names = [str(case) for case in CHUNKED]
    code = f"""
import fa_ext
from tests.contract import runner
from bench.problems.case import Case
for name in {names!r}:
    try:
        report = runner.verdict({KERNEL!r}, Case.parse(name))
    except fa_ext.UnsupportedError as error:
        assert "FA_EXT_WORKSPACE_MB" in str(error), error
        print("refused", error)
        continue
    assert report, f"{{name}}: {{report}}"
    print("passed", name)
"""
    done = in_a_process(megabytes, code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("^passed", done.stdout, re.MULTILINE)) == len(CHUNKED) or megabytes < 33


@pytest.mark.gpu
def test_too_little_workspace_is_said():
    done = in_a_process(1, f"from tests.contract import runner; print(runner.verdict({KERNEL!r}, runner.SIMPLEST))")
    assert "FA_EXT_WORKSPACE_MB" in done.stderr, done.stdout + done.stderr


@pytest.mark.gpu
def test_an_interrupted_search_is_made_again():
    script = """
import sys, types
import fa_ext
def find():
    asked.append(1)
    if len(asked) == 1:
        raise KeyboardInterrupt
    return None
asked, module = [], types.ModuleType("fa_ext._cublas")
module.find = find
sys.modules["fa_ext._cublas"] = module
try:
    fa_ext._core.device_info(0)
except KeyboardInterrupt:
    print("interrupted")
for _ in range(2):
    fa_ext._core.device_info(0)
print(len(asked))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "interrupted\n2\n", done.stderr
