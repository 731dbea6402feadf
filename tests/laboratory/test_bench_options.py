"""The options of a score in the laboratory: the cells of its presets, the masks that they alone have, and calls beside peers."""

import dataclasses

import numpy as np
import pytest

from bench import problems
from bench.commands import measure
from bench.machine import device
from bench.problems import dense, score_options
from bench.problems.case import Case
from bench.problems.operations import operands_of
from bench.problems.presets import CELLS, PRESETS
from fa_ext import reference

CPU = device.Cpu()
OPTIONS = ("bias", "mask", "alibi", "dropout", "softcap")
PRESET_OF = {"options": score_options.FORWARD, "options-backward": score_options.BACKWARD}
SMALL = Case(4, 2, 1, 32, head_dim=16, dtype="float32")


def has_option(case):
    return any(getattr(case, name) for name in OPTIONS)


# ---- the cells ----


@pytest.mark.parametrize("name", PRESET_OF)
def test_cells_are_in_the_preset_beside_what_was_there(name):
    assert CELLS[name] == {"costs": CELLS[name]["costs"]} | PRESET_OF[name] and CELLS[name]["costs"]
    assert set(PRESETS[name]) == {case for cases in CELLS[name].values() for case in cases} and len(set(PRESETS[name])) == len(PRESETS[name])
    assert all(problems.parse(str(case), problems.OPERATIONS) == case for case in PRESETS[name])


@pytest.mark.parametrize("cell", sorted({*score_options.FORWARD, *score_options.BACKWARD}))
def test_each_call_with_an_option_stands_beside_a_plain_one_of_its_shape(cell):
    for cells in PRESET_OF.values():
        cases = cells.get(cell, [])
        for case in filter(has_option, cases):
            sizes = ("heads", "heads_kv", "head_dim", "head_dim_v", "dtype")
            beside = [one for one in cases if not has_option(one) and all(getattr(one, n) == getattr(case, n) for n in sizes)]
            assert [one for one in beside if sum(one.n_q) == sum(case.n_q)], case
        assert len({case.operation == "backward" for case in cases}) <= 1
    assert all(not has_option(case) for case in score_options.FORWARD["192/128"])


def test_gradients_are_those_in_order_and_dropout_is_in_both_passes():
    for cases in score_options.BACKWARD.values():
        assert {(case.operation, case.deterministic, case.dtype) for case in cases} == {("backward", True, "bfloat16")}
    for cells in PRESET_OF.values():
        assert {64, 128} <= {case.head_dim for case in cells["dropout"] if case.dropout}
        assert {case.bias for case in cells["pair"] if case.bias} == {"shared", "shared32"}


def test_cells_are_chosen_by_name():
    chosen = measure.chosen(["options"], [], "", "cuda", ["alibi", "documents"])
    assert chosen == score_options.FORWARD["alibi"] + score_options.FORWARD["documents"]
    assert {case.operation for case in chosen} == {"attention", "serving"}


# ---- masks and biases ----


def mask_of(kind, **changes):
    return dataclasses.replace(SMALL, mask=kind, **changes).host_inputs()["mask"]


def test_masks_are_what_they_are_called():
    pairs = mask_of("pairs", seq_q=200, seq_k=300)
    assert pairs.shape == (4, 1, 200, 300) and abs(pairs.mean() - 0.5) < 0.01 and (pairs != mask_of("pairs", seq_q=200, seq_k=300, seed=1)).any()
    causal = mask_of("causal", seq_k=40)
    assert causal.shape == (1, 1, 32, 40) and (causal == reference.visible_keys(np.arange(32), 32, 40, "bottom_right")).all()
    padding = mask_of("padding")
    assert padding.shape == (4, 1, 1, 32) and padding.sum(axis=-1).ravel().tolist() == [32, 24, 24, 16] and padding[..., 0].all()


def test_documents_are_the_packed_sequences_beside_them():
    """The same draw whatever the seed, which the laboratory sets: the call beside it has its lengths by name."""
    case = dataclasses.replace(SMALL, batch=1, seq_q=320, seq_k=320, mask="documents1", layout="bshd")
    lengths = dense.document_lengths(1, 320)
    assert sum(lengths) == 320 and len(lengths) > 3 and lengths != dense.document_lengths(0, 320)
    given = case.host_inputs()
    mask = given.pop("mask")
    assert mask.shape == (1, 1, 320, 320) and (mask == mask_of("documents1", seq_q=320, seq_k=320, seed=9)).all()
    assert (mask[..., -32:, :] == mask_of("documents1", seq_k=320)).all()
    dense_out, _ = reference.attention(**given, mask=mask)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    packed, _ = reference.attention(*(given[n][0] for n in "qkv"), cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right")
    np.testing.assert_allclose(dense_out[0], packed.reshape(dense_out[0].shape), atol=1e-12)
    for plain, masked in zip(score_options.FORWARD["documents"][::2], score_options.FORWARD["documents"][1::2], strict=True):
        assert list(plain.n_q) == dense.document_lengths(int(masked.mask[-1]), masked.seq_k) and plain.n_q == plain.n_k


def test_biases_of_the_whole_batch():
    for kind, dtype in (("shared", "float16"), ("shared32", "float32")):
        bias = dataclasses.replace(SMALL, dtype="float16", bias=kind).host_inputs()["bias"]
        assert bias.shape == (1, 2, 32, 32) and bias.dtype == dtype


# ---- calls ----


def small(case):
    """The case at a size for the CPU."""
    heads = min(case.heads, 2)
    return dataclasses.replace(case, batch=min(case.batch, 2), heads=heads, heads_kv=heads * case.heads_kv // case.heads or 1, seq_q=64, seq_k=64,
                               head_dim=32, head_dim_v=16 if case.head_dim_v != case.head_dim else 32)  # fmt: skip


@pytest.mark.parametrize("case", sorted({str(small(case)) for cells in PRESET_OF.values() for cases in cells.values() for case in cases
                                         if not case.lengths}))  # fmt: skip
def test_every_kind_of_call_is_judged(case):
    """By the library, of whose result half of a head is turned round to be refused."""
    held = operands_of(problems.parse(case, problems.OPERATIONS), CPU)
    result = held.bound(None, "numpy")()
    assert held.judge(result).passed
    wrong = tuple(x.copy() for x in result) if isinstance(result, tuple) else (result.copy(),)
    wrong[0][0, :32, 0] = wrong[0][0, 31::-1, 0]
    assert not held.judge(wrong if isinstance(result, tuple) else wrong[0]).passed


def test_measure_takes_a_cell_of_options_beside_its_peers():
    pytest.importorskip("torch")
    how = {"device": "cpu", "candidates": ["cpu_simd"], "peers": ["torch-math"], "rounds": 3, "seconds": 0.2, "tight": 0.5}
    for option in ("mask=documents0", "bias=shared,mask=padding", "dropout=0.1:1,causal=True"):
        cell = measure.cell(f"B2,H2,S64,D16,float32,{option}", "hot", **how)
        assert set(cell["figures"]) == {"cpu_simd", "torch-math"} and not cell["refused"]
        assert all(0 < figures["frobenius"] < 1e-5 for figures in cell["figures"].values())
