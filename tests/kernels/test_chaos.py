"""Shapes where warps of one kernel run far apart, called again and again: the same bits, judged once.

They are the ones where a warpgroup of a specialised kernel skips key blocks: rows past seq_q, tiles of one block that a
warpgroup does not see, more tiles than multiprocessors so that barriers are used again. Of sequences: short and long ones in
turn, so that a block's next tile is told while it works on one block or on many, and such without keys. On an idle GPU they pass with a
wrong protocol too; `python -m bench chaos` runs them in a chaos build, `python -m bench soak` beside other work.
"""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests.contract import gradients, runner
from tests.kernels import chaos

REPEATS = 32
# Each has more tiles than a large GPU has multiprocessors, but for those of one tile a head.
CASES = [
    Case(1, 50, 50, 512, 512, 64, dtype="bfloat16", causal=True),
    Case(1, 25, 25, 1024, 1024, 64, dtype="bfloat16", causal=True),
    Case(1, 150, 150, 128, 128, 64, dtype="bfloat16", causal=True),
    Case(1, 18, 9, 900, 900, 256, dtype="bfloat16", causal=True),
    Case(1, 150, 50, 64, 64, 256, dtype="bfloat16", causal=True),
    Case(1, 24, 24, 700, 700, 128, dtype="bfloat16", causal=True),
    Case(1, 150, 150, 64, 128, 128, dtype="bfloat16", causal="bottom_right"),
    Case(1, 50, 50, 330, 330, 96, dtype="float16", causal=True, sinks="float32"),
    Case(1, 50, 50, 330, 330, 192, dtype="float16", causal=True),
    Case(2, 40, 20, 450, 300, 128, dtype="float16", causal="bottom_right", window=(130, None)),
    Case(2, 40, 20, 330, 500, 64, dtype="float16", window=(70, 3), softcap=20.0),
    Case(1, 40, 40, 400, 100, 256, dtype="bfloat16", causal="top_left", softcap=30.0),
    Case(1, 8, 8, 512, 512, 64, dtype="float16", causal=True),
    Case(1, 8, 2, 1000, 1000, 128, dtype="float16"),
    Case(1, 8, 4, 300, 1300, 128, dtype="float16", causal="bottom_right", bias="full", mask="keys"),
    Case(2, 4, 2, 300, 500, 64, dtype="float32", causal="bottom_right"),
    Case(1, 8, 1, 1, 3000, 128, dtype="bfloat16"),
    Case(1, 50, 50, 512, 512, 64, dtype="bfloat16", causal=True, dropout=(0.1, 3)),
    Case(1, 24, 24, 700, 700, 128, dtype="bfloat16", causal=True, dropout=(0.1, 3)),
]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_warps_far_apart(cuda_forward, case):
    try:
        first = runner.run(cuda_forward, case)
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    report = runner.judged(cuda_forward, case, *first)
    assert report, report
    for _ in range(REPEATS):
        for a, b in zip(runner.run(cuda_forward, case), first):
            np.testing.assert_array_equal(runner.bits(a), runner.bits(b), err_msg=str(case))


# Key tiles that some warpgroup does not see, ragged tiles, groups of heads, more tiles than multiprocessors.
GRADIENTS = [
    Case(1, 25, 25, 1024, 1024, 64, dtype="bfloat16", causal=True),
    Case(1, 18, 9, 900, 900, 128, dtype="bfloat16", causal=True),
    Case(1, 50, 50, 330, 330, 96, dtype="float16", causal=True, sinks="float32"),
    Case(2, 40, 20, 450, 300, 128, dtype="float16", causal="bottom_right", window=(130, None)),
    Case(2, 40, 20, 330, 500, 64, dtype="float16", window=(70, 3), softcap=20.0),
    Case(1, 150, 150, 64, 128, 128, dtype="bfloat16", causal="bottom_right"),
    Case(1, 40, 40, 400, 100, 64, dtype="bfloat16", causal="top_left"),
    Case(1, 25, 25, 1024, 1024, 64, dtype="bfloat16", causal=True, dropout=(0.1, 3)),
]


def sequences(n_q, n_k, heads, heads_kv, head_dim, dtype="bfloat16", **options):
    common = {"k": "packed", "causal": "bottom_right", "operation": "backward", "dlse": True}
    return Case.sequences(n_q, n_k, heads, heads_kv, head_dim, options.pop("head_dim_v", None), dtype, **common | options)


#: Beside the ends of tiles, among them a sequence without queries and one of several blocks; some 30 tiles a head.
LENGTHS = (1, 63, 700, 64, 65, 0, 127, 128, 300, 129) * 2
SEQUENCES = [
    sequences(LENGTHS, LENGTHS[::-1], 18, 9, 64),
    sequences(LENGTHS, LENGTHS, 6, 6, 128),
    sequences(LENGTHS, LENGTHS[3:] + LENGTHS[:3], 6, 2, 128, "float16", causal=False, window=(130, 40), softcap=20.0),
    sequences((64,) * 50, (64,) * 50, 6, 6, 128),
    sequences((129,) * 60, (0, 129) * 30, 6, 6, 64, "float16", causal=False),
    sequences(LENGTHS, LENGTHS, 6, 3, 256),
    sequences(LENGTHS[:10], LENGTHS[9::-1], 8, 8, 256, q="padded", k="padded", layout="bhsd", causal="top_left", softcap=30.0),
    sequences(LENGTHS, LENGTHS, 6, 6, 192, head_dim_v=128),
    sequences(LENGTHS[:10], LENGTHS[:10], 12, 12, 192, "float16"),
    sequences(LENGTHS, LENGTHS, 6, 6, 96, sinks=True),
    sequences(LENGTHS, LENGTHS, 6, 6, 64, dropout=(0.1, 3)),
]


@pytest.fixture(params=[name for name in gradients.KERNELS if runner.device_of(name) == "cuda"])
def kernel(request):
    return request.param


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GRADIENTS, *SEQUENCES], ids=str)
def test_gradients_of_warps_far_apart(kernel, case):
    if case.lengths and not gradients.takes_sequences(kernel, case.changed(deterministic=kernel not in gradients.UNORDERED)):
        pytest.skip(f"{kernel} does not take it")
    problem = gradients.make(case)
    if kernel in gradients.UNORDERED:
        for _ in range(REPEATS):
            report = gradients.verdict(kernel, problem, deterministic=False)
            assert report, report
    try:
        first = gradients.run(kernel, problem, deterministic=True)
    except Unplaceable as error:
        if kernel in gradients.UNORDERED:
            return
        pytest.skip(str(error))
    report = gradients.judged(kernel, problem, first)
    assert report, report
    for _ in range(REPEATS):
        for name, found in gradients.run(kernel, problem, deterministic=True).items():
            np.testing.assert_array_equal(runner.bits(found), runner.bits(first[name]), err_msg=f"{case}: d{name}")


@pytest.mark.gpu
def test_no_wait_has_ended():
    """Last in this file: a wait that ended has lost the context, and says where it stood."""
    assert chaos.hung() is None
