"""wgmma_split_sm90 over many keys: rows of a group's query heads in one tile, keys that two warpgroups share, tiles cut over a
cluster of every size, halves of tiles without rows."""

import pytest

import fa_ext
import rows
from case import Case

KERNEL = "wgmma_split_sm90"


@pytest.fixture(autouse=True)
def available():
    if KERNEL not in fa_ext.kernels():
        pytest.skip("this build has no wgmma_split_sm90 kernel")
    reason = rows.absent(KERNEL)
    if reason:
        pytest.skip(reason)


def accept(case):
    report = rows.verdict(KERNEL, case)
    assert report, report


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("causal, softcap", ((False, 0.0), ("bottom_right", 0.0), ("top_left", 20.0)))
@pytest.mark.parametrize("heads, heads_kv, seq_q", ((4, 1, 16), (7, 1, 19), (6, 2, 65), (2, 2, 129)))
def test_rows_of_a_group(heads, heads_kv, seq_q, causal, softcap, dtype):
    """64, 133, 195 and 129 rows a kv head."""
    accept(Case(1, heads, heads_kv, seq_q, 2100, 128, dtype=dtype, causal=causal, softcap=softcap, layout="bshd"))


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads", ((1, 1), (4, 4), (8, 4), (16, 4), (32, 4)))
@pytest.mark.parametrize("seq_k", (2048, 2500, 5000))
def test_clusters_of_every_size(batch, heads, seq_k):
    """16 tiles to 132 that a cluster of 8 blocks, 4, 2, 1 take."""
    accept(Case(batch, heads, heads, 100, seq_k, 104, dtype="bfloat16", causal="bottom_right", sinks="float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("window", ((0, 0), (700, None), (None, 90), (1300, 40)))
@pytest.mark.parametrize("values", ("sorted", "large"))
def test_rows_that_see_parts_of_the_keys(window, values):
    accept(Case(2, 6, 2, 90, 3000, 128, dtype="bfloat16", window=window, values=values, strides="odd"))
