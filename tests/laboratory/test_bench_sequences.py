"""Sequences of any length in the laboratory: their lines, operands and judge, kernels and peers, the command."""

import re
import types

import numpy as np
import pytest

from bench import problems, report
from bench.commands import tables
from bench.implementations import flash3, named, peers
from bench.machine import device
from bench.problems import operands as operands_module
from bench.problems import sequences
from bench.problems.case import Case
from bench.problems.operands import WrongResult
from bench.problems.operations import operands_of
from bench.problems.placement import dtype_of
from bench.problems.presets import CELLS, PRESETS
from fa_ext import reference
from tests.laboratory.support import stand_ins
from tests.laboratory.support.command import command

CPU = device.Cpu()
SERVING = CELLS["serving"]
ONE, PACKED, PADDED = {"q": "one", "slack": 0}, {"q": "packed", "slack": 0}, {"q": "padded", "slack": 0}
CASES = [
    Case.sequences((1,) * 5, (33, 7, 64, 1, 90), dtype="bfloat16", head_dim=16, **ONE),
    Case.sequences((1, 1, 1), (48, 48, 48), dtype="float16", head_dim=16, page_size=3, layout="bhsd", window=(9, 0), **ONE),
    Case.sequences((3, 0, 20), (40, 9, 20), k="packed", causal="bottom_right", max_seqlen_q=20, **PACKED),
    Case.sequences((3, 5), (40, 30), layout="bhsd", page_size=7, causal="bottom_right", softcap=3.0, **PACKED),
    Case.sequences((3, 5), (40, 30), k="padded", layout="bhsd", sinks=True, alibi="batch", scale=0.4, **PADDED),
    Case.sequences((4, 4), (30, 30), k="padded", causal="bottom_right", head_dim_v=16, **PADDED),
    Case.sequences((16, 16), (16, 16), k="packed", causal="bottom_right", dtype="float16", **PACKED),
]


def of(case):
    return operands_of(case, CPU)


def exact(held):
    """The reference's result on the operands, which finds its sequences by itself."""
    given = held.arguments("numpy")
    out, _ = reference.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    return out.astype(dtype_of(held.case.dtype))


# ---- lines ----


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_line_says_how_sequences_are_stored(case):
    found = problems.parse(str(case), problems.OPERATIONS)
    assert found == case and found.operation == "serving" and found.changed(seed=3) != case


@pytest.mark.parametrize("line, words", [
    ("B3,H2,S1x5*2,D16,float16,q=one,k=paged,slack=0", "'S1x5[*]2' names 2 sequences, B3 says 3"),
    ("B2,H2,S1x5,D16,float16,q=none,k=paged,slack=0", "q is 'none'; accepted: padded, packed, one"),
    ("B2,H2,S1x5,D16,float16,q=one,k=paged,bias=full", "'bias' is no option of sequences"),
    ("B2,H2,S1x5,D16,float16,q=one,k=paged", "measured with slack=0"),
    ("B2,H2,S1x5,D16,float16,q=one,k=paged,slack=0,k_range=True", "measured with slack=0"),
])  # fmt: skip
def test_a_line_that_is_none_is_refused(line, words):
    with pytest.raises(report.UsageError, match=words):
        problems.parse(line, problems.OPERATIONS)
    with pytest.raises(report.UsageError, match="accepted here: attention|is no|names|accepted|slack"):
        problems.parse(line)


def test_work_is_that_of_the_sequences():
    case = Case.sequences((1, 8, 0), (100, 8, 50), 4, 2, 32, causal="bottom_right", dtype="float16", k="packed", **PACKED)
    assert case.flops() == 4 * 4 * 32 * (100 + 8 * 8 / 2)
    assert case.key_bytes() == 2 * 2 * 2 * 32 * (100 + 8)
    assert case.bytes() == case.key_bytes() + 2 * 2 * 4 * 32 * 9
    near = case.changed(window=(9, 0))
    assert near.key_bytes() == 2 * 2 * 2 * 32 * (10 + 8)


def test_the_serving_preset_has_every_cell_once():
    every = PRESETS["serving"]
    assert len(set(map(str, every))) == len(every) and {"D1", "P1 D6b", "P2 D5", "R1", "S1", "Q1", "V2", "X1"} <= set(SERVING)
    assert all(problems.parse(str(case), problems.OPERATIONS) == case for case in every)
    assert [sum(case.n_k) for case in SERVING["R1"] + SERVING["R2"]] == [1044480, 163328]
    packed = [case for name, of in SERVING.items() if "packed" in name for case in of]
    assert all(case.storage.q == "packed" and set(case.n_q) == {1} for case in packed)
    assert {case.storage.page_size for case in SERVING["D6b packed"]} == {1, 3, 16, 256} and SERVING["D3 packed dense"][0].storage.k == "packed"
    assert [(case.heads, case.heads_kv, case.seq_q) for case in SERVING["H1"] if case.head_dim == 256] == [
        (16, 8, 1), (16, 8, 4), (32, 4, 1), (32, 4, 4), (16, 1, 1), (16, 1, 4)]  # fmt: skip
    assert all(isinstance(case, Case) or case.operation == "serving" for case in PRESETS["cpu-serving"])


# ---- operands and the judge ----


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_judge_takes_the_reference_and_no_other(case):
    held = of(case)
    right = exact(held)
    assert held.judge(right).passed
    for b, n in enumerate(case.n_q):
        if n:  # another result of one sequence
            wrong = right.copy()
            held._queries(wrong, b)[...] *= 2
            failures = held.judge(wrong).failures
            assert failures and all(why.startswith(f"sequence {b}: ") for why in failures)
    with pytest.raises(WrongResult, match="the result has shape"):
        held.judge(right[:-1])
    if case.storage.q == "packed":
        right[-1, 0, 0] = np.nan
        with pytest.raises(WrongResult, match="NaN"):
            held.judge(right)


def test_large_problems_meet_the_reference_at_drawn_queries(monkeypatch):
    lengths = tuple(40 + n for n in range(12))
    held = of(Case.sequences(lengths, lengths, 2, 1, 16, k="packed", causal="bottom_right", **PACKED))
    monkeypatch.setattr(sequences, "CHECK_FLOPS_CPU", 1.0)
    right = exact(held)
    assert held.judge(right).passed
    judged = held._truth()
    assert len(judged) == sequences.JUDGED and {0, 11} <= {b for b, *_ in judged}
    assert all(16 <= len(rows) <= 18 and {0, lengths[b] - 1} <= set(rows) for b, rows, *_ in judged)
    wrong = right.copy()
    held._queries(wrong, 11)[:, -1] += 1
    assert held.judge(wrong).failures
    assert operands_module.CHECK_FLOPS_CPU > 1e9


def test_pages_lie_in_random_order_and_each_belongs_to_one_sequence():
    held = of(Case.sequences((1,) * 4, (33, 0, 64, 16), page_size=16, **ONE))
    table, used = held.array("page_table", "numpy"), [3, 0, 4, 1]
    pages = [page for row, n in zip(table, used, strict=True) for page in row[:n]]
    assert sorted(pages) == list(range(8)) and pages != sorted(pages) and held.shapes["k"][0] == (8, 16, 2, 32)


# ---- implementations ----


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", ["cpu_simd", "cpu_ref", "fa_ext"])
def test_kernels_are_right(kernel, case):
    held, one = of(case), named.open_implementation(kernel, CPU)
    assert one.refuses(case) is None and {"attention", "serving"} <= one.operations
    assert held.judge(one.bind(held)()).passed and not held.changed_inputs() and not held.broken_guards()
    assert held.picked() == "cpu_simd"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_computes_equal_lengths_densely(case):
    pytest.importorskip("torch")
    peer = named.open_implementation("torch-flash", CPU)
    why = peer.refuses(case)
    expected = {0: "lengths that differ", 1: "no window", 2: "lengths that differ", 3: "no softcap", 4: "no alibi, sinks",
                5: "no causal mask aligned to the last key", 6: None}  # fmt: skip
    assert why == expected[CASES.index(case)]
    equal = {"n_q": (1,) * 2, "n_k": (40,) * 2, "window": None, "softcap": 0.0, "sinks": False, "alibi": None, "head_dim_v": None}
    for same in (case, case.changed(**equal)):
        if peer.refuses(same) is None:
            held = of(same)
            judged = held.judge(peer.bind(held)())
            assert judged.passed, judged.failures


class Array(np.ndarray):
    """The part of a torch tensor that the adapter asks of sinks."""

    def to(self, dtype):
        return self.astype(dtype)


LIBRARIES = {
    "flash-attn-3": ("flash_attn_3", stand_ins.FA3_FORWARD, {"is_rotary_interleaved": False, "sm_margin": 0, "num_splits": 0, "attention_chunk": 0}),
    "vllm-flash-attn-3": ("_vllm_fa3_C", stand_ins.VLLM_FA3_FORWARD, {}),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_flash_attention_3_is_asked_for_what_the_problem_says(name, case, monkeypatch):
    namespace, names, defaults = LIBRARIES[name]
    ops = types.SimpleNamespace(**{namespace: types.SimpleNamespace(fwd=stand_ins.operator(stand_ins.fa3_forward, names, defaults))})
    stand_ins.stand_in(monkeypatch, "torch", ops=ops)
    peer = peers.PEERS[name][2](types.SimpleNamespace(kind="cuda"))
    monkeypatch.setattr(peer, "library", "numpy")
    case = case.changed(dtype="float16", alibi=case.alibi if namespace == "flash_attn_3" else None)
    assert peer.refuses(case) == ("no alibi, sinks" if case.alibi else None)
    assert peer.refuses(case.changed(dtype="float32")) == "no float32"
    if peer.refuses(case):
        return
    held = of(case)
    if case.sinks:
        held._views["sinks", "numpy"] = held.array("sinks", "numpy").view(Array)
    judged = held.judge(np.asarray(peer.bind(held)()))
    assert judged.passed, judged.failures


def test_a_library_of_vllm_is_looked_for(monkeypatch):
    stand_ins.stand_in(monkeypatch, "torch", ops=types.SimpleNamespace(_vllm_fa3_C=types.SimpleNamespace()))
    monkeypatch.setattr(flash3, "libraries", lambda namespace: iter(()))
    found, missing = peers.available(types.SimpleNamespace(kind="cuda"), ["vllm-flash-attn-3"])
    assert not found and "no file vllm_flash_attn/_vllm_fa3_C*.so in vllm" in missing["vllm-flash-attn-3"]


class Wrapper:
    """A wrapper of flashinfer 0.7.2, on tensors of the CPU."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        assert not float_workspace_buffer.any() and float_workspace_buffer.numel() == 128 << 20
        self.layout = {"NHD": "bshd", "HND": "bhsd"}[kv_layout]

    def keep(self, heads, dims, causal, options, **indices):
        assert set(options) == {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}
        left = options["window_left"]
        self.asked = {"causal": "bottom_right" if causal else False, "scale": options["sm_scale"], "softcap": options["logits_soft_cap"] or 0.0,
                      "window": None if left < 0 else (left, 0)} | {name: x.numpy() for name, x in indices.items()}  # fmt: skip

    def table(self, indptr, indices, last_page_len, page_size):
        counts = indptr.diff()
        table = np.zeros((len(counts), int(counts.max())), np.int32)
        for b, n in enumerate(counts):
            table[b, :n] = indices[indptr[b] : indptr[b + 1]]
        import torch

        lengths = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
        return {"page_table": torch.from_numpy(table), "seqlens_k": lengths.int()}

    def run(self, q, k, v=None):
        k, v = k if v is None else (k, v)
        import torch

        from bench.problems.memory import to_host

        out = reference.attention(*(to_host(x) for x in (q, k, v)), layout=self.layout, **self.asked)[0]
        return torch.from_numpy(out).to(q.dtype)


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options):
        self.keep((num_qo_heads, num_kv_heads), head_dim, False, options, **self.table(indptr, indices, last_page_len, page_size))


class Paged(Wrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
             page_size, head_dim_vo=None, causal=False, **options):  # fmt: skip
        table = self.table(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.keep((num_qo_heads, num_kv_heads), head_dim_qk, causal, options, cu_seqlens_q=qo_indptr, **table)


class Ragged(Wrapper):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False, **options):
        self.keep((num_qo_heads, num_kv_heads), head_dim_qk, causal, options, cu_seqlens_q=qo_indptr, cu_seqlens_k=kv_indptr)


@pytest.mark.parametrize("number, case", list(enumerate(CASES)), ids=str)
def test_flashinfer_is_asked_for_what_the_problem_says(number, case, monkeypatch):
    pytest.importorskip("torch")
    stand_ins.stand_in(
        monkeypatch, "flashinfer", single_prefill_with_kv_cache=None, BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Paged, BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    )  # fmt: skip
    peer = peers.PEERS["flashinfer"][2](CPU)
    case = case.changed(dtype="float16")
    expected = {4: "no sinks", 5: "no padded sequences"}
    assert peer.refuses(case) == expected.get(number)
    if peer.refuses(case) is None:
        held = of(case)
        judged = held.judge(peer.bind(held)())
        assert judged.passed, judged.failures


# ---- the table and the command ----


def test_the_table_of_sequences():
    assert tables._serving({"gpu": {"cells": {}, "contexts": {}, "parts": {}}}) == "The record holds no figures over sequences yet."

    def run(**us):
        figures = {name.replace("_p_", "-"): {"us": x} for name, x in us.items()}
        return [{"figures": figures, "date": "2026-01-01", "context": "here", "code": []}]

    cells = {
        f"{SERVING['D1'][0]} cold": run(mma_sm80=8.0, serve_sm90=4.0, torch_p_cudnn=6.0),
        f"{SERVING['P1 D1'][3]} cold": run(serve_sm90=4.0, torch_p_cudnn=6.0, flashinfer=5.0),
        f"{SERVING['R1'][0]} cold": run(serve_sm90=1000.0, flashinfer=900.0),
        f"{SERVING['S2'][2]} cold": run(simt=50.0),
    }
    contexts = {"here": {"ceilings": {"read_gbs": 4600.0}}}
    lines = tables._serving({"gpu": {"cells": cells, "contexts": contexts, "parts": {}}}).splitlines()
    assert lines[0].startswith("| case | kernel | us | cuDNN, dense | flashinfer |")
    assert lines[2:] == [
        f"| `{SERVING['D1'][0]}` | `serve_sm90` | 4.00 | 6.00 | - | 1.50 | 91% |",
        f"| `{SERVING['P1 D1'][3]}` | `serve_sm90` | 4.00 | 6.00 | 5.00 | 1.25 | 91% |",
        f"| `{SERVING['R1'][0]}` | `serve_sm90` | 1,000 | - | 900 | 0.90 | 93% |",
        f"| `{SERVING['S2'][2]}` | `simt` | 50.0 | - | - | - | 117% |",
    ]
    assert problems.shortened(str(SERVING["V2"][0])).startswith("B32,H32/8,S852+1057+2059+...,D128,")


def test_each_case_of_sequences_is_in_one_group_of_the_table():
    for name in SERVING:
        assert len([named for named in tables.SERVING_GROUPS.values() if re.fullmatch(named, name)]) == 1, name


def test_measure_times_sequences(capfd):
    case = "B3,H4/2,S1x40*2+1x7,D16,float32,q=one,k=paged,slack=0"
    line = ["measure", "--case", case, "--device", "cpu", "--seconds", "0.3", "--rounds", "5", "--cache", "cold", "--kernels", "simd"]
    status, document = command(capfd, *line)
    (cell,) = document["cells"].values()
    assert status == 0 and set(cell["figures"]) - {"torch-flash"} == {"cpu_simd"} and cell["slots"] > 1
    parsed = problems.parse(case, problems.OPERATIONS)
    figures = cell["figures"]["cpu_simd"]
    assert figures["gbs"] == pytest.approx(parsed.bytes() / figures["us"] * 1e-3) and cell["picked"] == "cpu_simd"
