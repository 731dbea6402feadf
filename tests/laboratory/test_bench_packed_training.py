"""Packed training in the laboratory: the cells of its preset, peers and our own dense call on the same rows, the command."""

import types

import numpy as np
import pytest

from bench import problems, report
from bench.commands import measure, tables
from bench.implementations import dense_rows, named, peers
from bench.machine import device
from bench.problems import packed_training
from bench.problems.case import Case
from bench.problems.operations import operands_of
from bench.problems.presets import CELLS, PRESETS
from fa_ext import reference
from fa_ext.reference.backward import attention_backward
from tests.laboratory.support import stand_ins
from tests.laboratory.support.command import command

CPU, GPU = device.Cpu(), types.SimpleNamespace(kind="cuda")
NAME = "sequences-backward"
OF_BACKWARD = {"operation": "backward", "slack": 0}
EQUAL = Case.sequences((9, 9, 9), (12, 12, 12), q="packed", k="packed", causal="bottom_right", dtype="float16", **OF_BACKWARD)
SQUARE = Case.sequences((3, 20, 7), (3, 20, 7), 4, 2, 16, q="packed", k="packed", causal="bottom_right", dtype="float16", **OF_BACKWARD)
MIXED = Case.sequences((3, 20), (40, 20), q="packed", k="packed", causal="bottom_right", window=(9, 0), softcap=2.0, scale=0.4, dtype="bfloat16",
                       **OF_BACKWARD)  # fmt: skip
PADDED = Case.sequences((3, 20), (40, 20), q="padded", k="padded", layout="bhsd", dtype="float16", **OF_BACKWARD)
ONE = Case.sequences((1, 0, 1), (33, 7, 64), q="one", k="packed", dtype="float16", **OF_BACKWARD)
CASES = [EQUAL, SQUARE, MIXED, PADDED, ONE]


# ---- the preset ----


def test_the_cells_are_of_the_sizes_that_they_name():
    cells = CELLS[NAME]
    assert [sum(packed_training.lognormal(seed)) for seed in range(5)] == [65536] * 5
    assert all(sum(case.n_q) == 65536 for name in ("V1", "V1f", "S1", "documents0", "equal4096", "long", "grouped") for case in cells[name])
    assert {case.deterministic for case in cells["V1"]} == {True} and {case.deterministic for case in cells["V1f"]} == {False}
    assert [case.changed(deterministic=False) for case in cells["V1"]] == cells["V1f"]
    used = [sum(case.n_q) / (len(case.n_q) * max(case.n_q)) for case in cells["U2"][6:]]
    assert [round(share, 2) for share in used] == [0.7] * 6
    assert [sum(case.n_k) for case in cells["cross"]] == [65536] * 4 and {case.seq_q for case in cells["cross"]} == {256}
    (sinks, plain) = cells["W1"]
    assert sinks.wrt()[-1] == "sinks" and sinks.changed(sinks=None) == plain


def test_each_cell_is_of_the_preset_and_each_line_there_once():
    assert set(PRESETS[NAME]) == {case for cells in CELLS[NAME].values() for case in cells} and len(set(PRESETS[NAME])) == len(PRESETS[NAME])


def test_cells_are_chosen_by_name():
    assert measure.chosen([NAME], [], "", "cuda", ["T1", "V2"]) == CELLS[NAME]["T1"] + CELLS[NAME]["V2"]
    with pytest.raises(report.UsageError, match="cells are X9; accepted: those of sequences-backward: U1, U2, "):
        measure.chosen([NAME], [], "", "cuda", ["T1", "X9"])
    with pytest.raises(report.UsageError, match="cells are T1; accepted: presets that have cells: serving, sequences-backward"):
        measure.chosen(["paper"], [], "", "cuda", ["T1"])


def test_the_table_of_packed_training():
    document: dict = {"cells": {}, "contexts": {}, "parts": {}}
    assert tables._packed_backward({"gpu": document}) == "The record holds no figures of packed training yet."

    def run(**us):
        figures = {name.replace("_p_", "-"): {"us": x, "tflops": 1000 / x} for name, x in us.items()}
        return [{"figures": figures, "date": "2026-01-01", "context": "here", "code": []}]

    u1, v1 = CELLS[NAME]["U1"][0], CELLS[NAME]["V1f"][0]
    document["cells"] = {f"{u1} hot": run(wgmma_backward_sm90=4.0, simt_backward=9.0, fa_ext_p_dense=3.9, flash_p_attn_p_3=5.0),
                         f"{v1} hot": run(wgmma_fused_backward_sm90=10.0, flash_p_attn_p_3=9.0, torch_p_flash=30.0)}  # fmt: skip
    lines = tables._packed_backward({"h100": document}, "h100").splitlines()
    assert lines[0].endswith("| of our dense rate | FlashAttention-2 (torch) / ours | FlashAttention-3 / ours |")
    assert lines[2:] == [
        "| U1 | 32 64 | 16 of 1024 | causal | `wgmma_backward_sm90` | 4.00 | 250 | 0.97 | - | 1.25 |",
        "| V1f | 32/8 128 | 70 of 499+619+1206+... | causal, any order | `wgmma_fused_backward_sm90` | 10.00 | 100 | - | 3.00 | 0.90 |",
    ]


# ---- our own dense call ----


@pytest.mark.parametrize("case", [EQUAL, EQUAL.changed(causal=False, deterministic=False, head_dim_v=16, sinks=True), EQUAL.changed(dlse=True)], ids=str)
def test_the_dense_call_has_the_gradients_of_the_sequences(case):
    held, one = operands_of(case, CPU), named.open_implementation(dense_rows.NAME, CPU)
    assert one.refuses(case) is None
    held.poison()
    judged = held.judge(one.bind(held)())
    assert judged.passed, judged.failures


def test_the_dense_call_says_what_it_is_not():
    one = named.open_implementation(dense_rows.NAME, CPU)
    assert [one.refuses(case) for case in CASES[1:4]] == ["not of one length", "not of one length", "no packed sequences"]
    assert one.refuses(Case(operation="backward")) == "no packed sequences"


def test_measure_tells_the_share_of_the_dense_rate(capfd):
    line = ["measure", "--case", EQUAL, "--device", "cpu", "--seconds", "0.1", "--rounds", "3", "--peers", dense_rows.NAME]
    status, document = command(capfd, *line)
    (cell,) = document["cells"].values()
    figures, dense = cell["figures"], cell["figures"][dense_rows.NAME]
    assert status == 0 and set(figures) == {"cpu_simd_backward", "cpu_ref_backward", dense_rows.NAME} and cell["baseline"] != dense_rows.NAME
    assert all(f["dense_share"] == pytest.approx(dense["us"] / f["us"]) for f in figures.values())
    measure.show(document)
    assert measure.DENSE in (shown := capfd.readouterr().out)
    for f in figures.values():
        f.pop("dense_share")
    measure.show(document)
    assert measure.DENSE not in capfd.readouterr().out and "fa_ext-dense" in shown


# ---- peers, on stand-ins ----

FWD = ("q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table softmax_scale "
       "is_causal window_size_left window_size_right softcap num_splits pack_gqa sm_margin").split()  # fmt: skip
BWD = ("dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k softmax_scale is_causal "
       "window_size_left window_size_right softcap deterministic sm_margin").split()  # fmt: skip


class FlashAttn3:
    """Its operators over sequences: the backward one leaves rows of no sequence as they are."""

    def __init__(self):
        self.asked = []
        self.fwd = stand_ins.operator(self.forward, FWD, {"num_splits": 0, "sm_margin": 0})
        self.bwd = stand_ins.operator(self.backward, BWD, {"deterministic": False, "sm_margin": 0})

    def forward(self, asked):
        assert asked["num_splits"] == 1
        out, lse = reference.attention(asked["q"], asked["k"], asked["v"], layout="bshd", **stand_ins.sequence_options(asked))
        self.saved = [out.astype(asked["q"].dtype), lse]
        return *self.saved, "out_accum", "lse_accum"

    def backward(self, asked):
        assert asked["out"] is self.saved[0] and asked["softmax_lse"] is self.saved[1]
        self.asked.append(asked["deterministic"])
        options = stand_ins.sequence_options(asked)
        found = attention_backward(asked["dout"], asked["q"], asked["k"], asked["v"], layout="bshd", **options)
        for name, grad in zip(("dq", "dk", "dv"), found):
            used = asked["seqused_q" if name == "dq" else "seqused_k"]
            if used is None:
                asked[name][...] = grad
            else:
                for b, n in enumerate(used):
                    asked[name][b, :n] = grad[b, :n]
        return "softmax_d", "lse_log2"


class Aten:
    """torch's operators over packed sequences, with the arguments that they have in torch 2.11 to 2.15."""

    def __init__(self):
        self.modes = []

    def _flash_attention_forward(self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None):
        assert dropout_p == 0 and not return_debug_mask
        return "out", "lse", "state", "unused", "debug"

    def _flash_attention_backward(self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                  rng_state, unused, *, scale=None):  # fmt: skip
        assert (out, logsumexp, dropout_p, rng_state, unused) == ("out", "lse", 0, "state", "unused")
        return self.gradients(grad_out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, "bottom_right" if is_causal else False, scale)

    def _cudnn_attention_forward(self, query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, dropout_p=0.0,
                                 is_causal=False, return_debug_mask=False, *, scale=None):  # fmt: skip
        assert attn_bias is None and compute_log_sumexp is True and dropout_p == 0
        return "out", "lse", cum_seq_q, cum_seq_k, max_q, max_k, "seed", "offset", "debug"

    def _cudnn_attention_backward(self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
                                  max_q, max_k, dropout_p, is_causal, *, scale=None):  # fmt: skip
        assert (out, logsumexp, philox_seed, philox_offset, attn_bias, dropout_p) == ("out", "lse", "seed", "offset", None, 0)
        return self.gradients(grad_out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, "top_left" if is_causal else False, scale)

    def gradients(self, dout, q, k, v, cum_q, cum_k, max_q, max_k, causal, scale):
        assert (max_q, max_k) == (np.diff(cum_q).max(), np.diff(cum_k).max())
        found = attention_backward(dout, q, k, v, cu_seqlens_q=cum_q, cu_seqlens_k=cum_k, causal=causal, scale=scale)
        return [g.astype(q.dtype) for g in found]


REFUSED = {
    "flash-attn-3": [None] * 5,
    "flash-attn-3-ordered": [None] * 5,
    "torch-flash": [None, None, "no softcap, window", "no gradients of padded sequences", "no gradients of padded sequences"],
    "torch-flash-ordered": [None, None, "no softcap, window", "no gradients of padded sequences", "no gradients of padded sequences"],
    "torch-cudnn": ["causal only for seq_q == seq_k", None, "causal only for seq_q == seq_k", "no gradients of padded sequences",
                    "no gradients of padded sequences"],
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("name", REFUSED)
def test_peers_are_asked_for_what_the_sequences_say(name, number, monkeypatch):
    aten, fa3, mode = Aten(), FlashAttn3(), types.SimpleNamespace(fill_uninitialized_memory=True)
    stand_ins.stand_in(monkeypatch, "torch", ops=types.SimpleNamespace(aten=aten, flash_attn_3=fa3), utils=types.SimpleNamespace(deterministic=mode),
                       use_deterministic_algorithms=aten.modes.append)  # fmt: skip
    peer, case = peers.PEERS[name][2](GPU), CASES[number]
    for part in (peer, getattr(peer, "backward", None)):
        if part:
            monkeypatch.setattr(part, "library", "numpy")
    assert "backward" in peer.operations and peer.refuses(case) == REFUSED[name][number]
    if peer.refuses(case):
        return
    held = operands_of(case, CPU)
    judged = held.judge([np.asarray(g) for g in peer.bind(held)()])
    assert judged.passed, judged.failures
    ordered = name.endswith("ordered")
    assert fa3.asked == ([ordered] if "3" in name else []) and aten.modes == ([True, False] if ordered and "torch" in name else [])


def test_peers_without_gradients_of_sequences_say_so(monkeypatch):
    stand_ins.stand_in(monkeypatch, "torch", ops=types.SimpleNamespace(aten=Aten()))
    assert peers.PEERS["torch-efficient"][2](GPU).refuses(SQUARE.changed(heads=2)) == "no backward pass of sequences"
    assert named.open_implementation("numpy", CPU).refuses(SQUARE.changed(dtype="float32")) == "no backward pass of sequences"


def test_a_long_line_is_shortened():
    line = str(CELLS[NAME]["V1"][0])
    assert problems.shortened(line).startswith("B70,H32/8,S499+619+1206+...,D128,") and problems.shortened(str(EQUAL)) == str(EQUAL)
