"""The wgmma_sm90 kernel alone: the stale maximum, more tiles than multiprocessors, skipped key blocks, softcap, what it refuses."""

import pytest

import fa_ext
from bench.problems.case import Case
from tests.contract import runner

KERNEL = "wgmma_sm90"
HEAD_DIMS = (64, 96, 128, 192, 256)  # one configuration each; 40 and 136 run padded


@pytest.fixture(autouse=True)
def available():
    if KERNEL not in fa_ext.kernels():
        pytest.skip("this build has no wgmma_sm90 kernel")
    reason = runner.absent(KERNEL)
    if reason:
        pytest.skip(reason)


def accept(case):
    report = runner.verdict(KERNEL, case)
    assert report, report


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, "top_left"))
@pytest.mark.parametrize("values", ("sorted", "descending", "dominant", "large", "offset"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_outgrown_maximum(head_dim, values, causal):
    """Keys are met from the last to the first: some of these outgrow the first block's maximum in every block."""
    dtype = "bfloat16" if values == "large" else "float16"
    accept(Case(1, 2, 1, 601, 601, head_dim, dtype=dtype, values=values, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("causal, softcap", ((False, 0.0), ("top_left", 0.0), ("bottom_right", 20.0)))
@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 40, 136))
def test_more_tiles_than_multiprocessors(head_dim, causal, softcap, dtype):
    """Each CTA computes several tiles: rings of stages wrap; tiles of unequal length in the static order or from the counter."""
    accept(Case(2, 40, 20, 330, 290, head_dim, dtype=dtype, causal=causal, softcap=softcap, layout="bshd"))


@pytest.mark.gpu
@pytest.mark.parametrize("window", ((0, 0), (100, 0), (None, 90), (700, None), (257, 129)))
@pytest.mark.parametrize("seq_q, seq_k", ((900, 900), (200, 1100), (1100, 200)))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_blocks_that_a_warpgroup_skips(head_dim, seq_q, seq_k, window):
    """Windows leave a warpgroup's rows without keys in some of its tile's blocks, or in all of them."""
    accept(Case(1, 2, 1, seq_q, seq_k, head_dim, window=window, sinks="float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", (0.1, 2.0, 8.0))
@pytest.mark.parametrize("softcap", (1.0, 30.0, 1e4))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_softcap_of_small_and_large_scores(head_dim, softcap, scale):
    """A polynomial serves while all products of a block are small beside the cap: some tiles never leave it, some do."""
    dtype = "bfloat16" if softcap > 10 else "float16"
    accept(Case(1, 2, 1, 201, 700, head_dim, dtype=dtype, softcap=softcap, scale=scale / head_dim**0.5))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change, word",
    ((dict(strides="odd"), "16"), (dict(strides="column"), "contiguous"), (dict(head_dim=60), "multiple of 8"),
     (dict(scale=-1.0), "scale"), (dict(mask="full", softcap=9.0), "no softcap beside"), (dict(bias="full32"), "bias of q's dtype"),
     (dict(bias="full", seq_k=63), "bias"), (dict(bias="full", head_dim=136), "bias")),
)  # fmt: skip
def test_refusals_are_words(change, word):
    with pytest.raises(fa_ext.UnsupportedError, match=word):
        runner.verdict(KERNEL, Case(**{**dict(batch=1, heads=2, seq_q=64, head_dim=64), **change}))
