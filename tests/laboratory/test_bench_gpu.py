"""The laboratory on a GPU: graph replay, cold operands, work on another stream."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CHEATS = Path(__file__).parent / "support" / "cheats_gpu.py"
CASE = "B1,H4,S256,D64,float16"


def judge(name, case=CASE, **options):
    pytest.importorskip("torch")
    from bench.commands import gate

    options = {"rounds": 24, "seconds": 1.0, **options}
    return gate.judge_one(f"{CHEATS}:{name}", case, "cuda", ["torch-math"], **options)


@pytest.mark.parametrize("cold", [False, True])
def test_honest_is_correct(cold):
    found = judge("honest", cold=cold)
    assert found["correct"], found["failures"]
    assert found["clock"]["torch-math"] == "graph" and found["ratios"]["torch-math"]["rounds"] > 0


@pytest.mark.parametrize(
    "name, words",
    [
        ("other_stream", "NaN"),
        ("caches_by_pointer", "timed sample .* off by"),
        ("zeros", "Frobenius"),
        ("writes_past_out", "wrote outside its memory"),
        ("writes_to_inputs", "wrote to its inputs: q"),
        ("makes_inputs_easy_when_timed", "timed sample .* off by"),
        ("returns_unless_poisoned", "timed sample .* (unwritten|off by)"),
        ("half_precision_inside", "timed sample .* off by"),
        ("without_maximum_when_timed", "timed sample .* inputs in a head"),
        ("keeps_the_mask", "timed sample .* (off by|NaN)"),
        pytest.param("patches_clock", "by the judge's clock", marks=pytest.mark.idle),
        ("lazy_object", "not an array of torch"),
        ("forges_with_token", "NaN|crashed"),
    ],
)
def test_caught(name, words):
    found = judge(name, f"{CASE},mask=full" if name == "keeps_the_mask" else CASE)
    assert found["verdict"] == "FAIL"
    assert re.search(words, " ".join(found["failures"])), found["failures"]


HONEST = Path(__file__).parent / "support" / "honest.py"
LARGE = "B2,H16,S2048,D64,float16"  # so that JAX's dispatch is little beside it


def judge_honest(name, baseline, **options):
    from bench.commands import gate

    options = {"rounds": 60, "seconds": 5.0, **options}
    found = gate.judge_one(f"{HONEST}:{name}", LARGE, "cuda", [f"{HONEST}:{baseline}"], **options)
    found.pop("samples", None)
    return found


@pytest.mark.idle
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_honest_of_each_library_passes_when_faster_and_fails_when_slower(library, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if library == "jax":
        jax = pytest.importorskip("jax")
        if not any(d.platform == "gpu" for d in jax.devices()):
            pytest.skip("this jax has no GPU")
    faster = judge_honest(f"{library}_", f"twice_{library}")
    assert faster["verdict"] == "PASS", faster
    slower = judge_honest(f"twice_{library}", f"{library}_")
    assert slower["correct"] and slower["verdict"] == "FAIL", slower
    tenth = judge_honest(f"tenth_{library}", f"{library}_", rounds=240)
    assert tenth["correct"] and tenth["verdict"] == "FAIL", tenth


def test_device_memory_is_shared_or_the_table_says_otherwise():
    """Whether results are read by the judge itself; where not, workers copy them, and gates must still hold."""
    from bench.trial import duel

    with duel.Table("cuda") as table:
        assert table.on_device, "CUDA's interprocess handles do not work here: see bench/trial/README.md"


@pytest.mark.parametrize("name, words", [("honest", None), ("zeros", "Frobenius"), ("caches_by_pointer", "off by")])
def test_without_shared_device_memory(name, words, monkeypatch):
    from bench.trial import duel

    monkeypatch.setattr(duel.Table, "_shares", lambda table: False)
    found = judge(name)
    assert found["correct"] == (words is None)
    assert words is None or re.search(words, " ".join(found["failures"])), found["failures"]


@pytest.mark.idle
def test_measure_replays_graphs_of_kernels(capfd):
    from bench.__main__ import main

    assert main(["measure", "--case", CASE, "--cache", "both", "--peers", "none", "--seconds", "1", "--json"]) == 0
    cells = json.loads(capfd.readouterr().out)["cells"]
    hot, cold = (cells[f"{CASE} {kind}"]["figures"]["simt"] for kind in ("hot", "cold"))
    assert hot["clock"] == cold["clock"] == "graph" and hot["frobenius"] < 1e-3
    assert hot["us"] < 1.1 * cold["us"]


@pytest.mark.idle
def test_score_runs_against_the_backend_that_torch_chooses(capfd):
    pytest.importorskip("torch")
    from bench.__main__ import main

    assert main(["score", "fa_ext", "--filter", "S(128|1024),D64,float16$", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert len(document["cells"]) == 2 and document["fast"]["fast_0"] == 1.0
    assert all(cell["baseline"] == "torch-sdpa" and cell["speedup"] > 0.2 for cell in document["cells"].values())


@pytest.mark.idle
def test_profile_reads_what_limits_a_kernel_of_matrix_products(capfd):
    from bench.__main__ import main

    if main(["profile", "mma_sm80", "--case", "B4,H16,S2048,D128,float16", "--json"]) == 3:
        pytest.skip(capfd.readouterr().err)
    (kernel,) = json.loads(capfd.readouterr().out)["kernels"]
    figures = kernel["figures"]
    assert 20 < figures["tensor pipe"] <= 100 and figures["time"] > 50 and figures["registers a thread"] > 64
    assert "tensor pipe" in kernel["reading"] and len(kernel["stalls"]) == 4


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hash_of_device_memory(dtype):
    from bench import problems
    from bench.machine import device
    from bench.problems import operands

    held = operands.Operands(problems.parse(f"B1,H1,S33,D3,{dtype}"), device.open_device("cuda"))
    assert held.changed_inputs() == []
    held.blocks["k"].raw[held.blocks["k"].end - 1] ^= 1
    assert held.changed_inputs() == ["k"] and held.broken_guards() == []


@pytest.mark.parametrize("case, peers", [
    ("B2,H8,S512,D64,bfloat16,causal=True,layout=bshd,operation=backward", "torch-cudnn,torch-flash,torch-flash-ordered,torch-efficient"),
    ("B2,H8/2,S512,D128,bfloat16,operation=backward", "torch-flash"),
    ("B2,H4,S256,D64,bfloat16,bias=shared,operation=backward", "torch-efficient"),
    ("B2,H4,S256,D64,float32,sinks=float32,operation=backward,dlse=True,accumulate=True", ""),
])  # fmt: skip
def test_gradients_of_kernels_and_peers_are_right_and_replayed(case, peers, tmp_path):
    pytest.importorskip("torch")
    from bench.__main__ import main

    output = tmp_path / "figures.json"
    assert main(["measure", "--case", case, "--peers", peers or "none", "--seconds", "0.3", "--output", str(output)]) == 0
    (cell,) = json.loads(output.read_text())["cells"].values()
    named = [name for name in peers.split(",") if name]
    assert {"simt_backward", *named} <= set(cell["figures"]), cell["refused"]
    assert all(cell["figures"][name]["clock"] == "graph" for name in ("simt_backward", *named)), cell


@pytest.mark.idle
def test_flash_attention_3_is_right_where_it_is_installed(tmp_path):
    pytest.importorskip("torch")
    from bench.__main__ import main
    from bench.implementations import peers
    from bench.machine import device

    wanted = ["flash-attn-3", "flash-attn-3-ordered"]
    found, missing = peers.available(device.open_device("cuda"), wanted)
    if missing:
        pytest.skip(str(missing))
    output = tmp_path / "figures.json"
    cases = ["B2,H8/2,S512,D128,bfloat16,causal=True,operation=backward", "B1,H8/2,S1x2048,D128,bfloat16,layout=bshd"]
    line = [word for case in cases for word in ("--case", case)]
    assert main(["measure", *line, "--peers", ",".join(wanted), "--seconds", "0.3", "--output", str(output)]) == 0
    backward, decode = json.loads(output.read_text())["cells"].values()
    assert set(wanted) <= set(backward["figures"]), backward["refused"]
    assert "flash-attn-3" in decode["figures"], decode["refused"]


@pytest.mark.idle
@pytest.mark.parametrize("case, peers", [
    ("B4,H8/2,S1x500,D128,bfloat16,q=one,k=paged,page_size=16,slack=0", "torch-cudnn"),
    ("B3,H8/2,S1x500+1x7+1x90,D64,float16,q=one,k=paged,page_size=3,layout=bhsd,slack=0", "flashinfer,flash-attn-3,vllm-flash-attn-3"),
    ("B2,H8/2,S64,D128,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right", "torch-cudnn,flash-attn-3,flashinfer"),
    ("B3,H8/2,S40x300+1x70*2,D128,bfloat16,q=packed,k=paged,slack=0,causal=bottom_right", "flash-attn-3,vllm-flash-attn-3,flashinfer"),
])  # fmt: skip
def test_sequences_of_kernels_and_peers_are_right(case, peers, tmp_path):
    """Of the peers those that are installed; each that answers is right."""
    pytest.importorskip("torch")
    from bench.__main__ import main

    output = tmp_path / "figures.json"
    line = ["measure", "--case", case, "--peers", peers, "--cache", "cold", "--seconds", "1", "--output", str(output)]
    assert main(line) == 0
    (cell,) = json.loads(output.read_text())["cells"].values()
    assert "simt" in cell["figures"] and cell["figures"]["simt"]["clock"] == "graph", cell
    assert not [why for why in cell["refused"].values() if "WRONG" in why], cell["refused"]
    assert "torch-cudnn" not in peers or "torch-cudnn" in cell["figures"], cell["refused"]


@pytest.mark.idle
def test_merging_and_appending_are_timed_beside_a_copy(tmp_path):
    pytest.importorskip("torch")
    from bench.__main__ import main

    output = tmp_path / "figures.json"
    cases = ["B1,H8,S512,D128,bfloat16,layout=bshd,operation=merge", "B4,H8/2,S1x40,D128,bfloat16,q=packed,k=paged,slack=0,operation=append"]
    line = [word for case in cases for word in ("--case", case)]
    assert main(["measure", *line, "--cache", "cold", "--seconds", "1", "--output", str(output)]) == 0
    for cell, kernel in zip(json.loads(output.read_text())["cells"].values(), ("merge", "append"), strict=True):
        assert {"copy", kernel} == set(cell["figures"]), cell["refused"]
        assert {figures["clock"] for figures in cell["figures"].values()} == {"graph"}


def test_gradients_are_judged():
    pytest.importorskip("torch")
    from bench.commands import gate

    case = "B1,H4/2,S256,D64,float16,causal=True,operation=backward"
    found = gate.judge_one("simt_backward", case, "cuda", ["torch-flash"], rounds=24, seconds=1.0)
    assert found["correct"], found["failures"]
    assert found["clock"]["simt_backward"] == "graph" and found["ratios"]["torch-flash"]["rounds"] > 0


def test_what_a_kernel_launches_is_read_from_a_graph():
    """Two readings agree; a problem of twice the batch launches another grid of the same function."""
    from bench.commands import measure

    found = [measure.launched(case, "cuda", ["mma_sm80"])["mma_sm80"] for case in (CASE, CASE, CASE.replace("B1", "B2"))]
    assert found[0] == found[1] and found[0] != found[2]
    for launch in found[0]:
        function, grid, block, *_ = launch.split(" ")
        assert not function.startswith("named:") and "x" in grid and "x" in block
    assert [launch.split()[0] for launch in found[0]] == [launch.split()[0] for launch in found[2]]
