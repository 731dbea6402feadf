"""The laboratory on a GPU: graph replay, cold operands, work on another stream."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CHEATS = Path(__file__).with_name("cheats_gpu.py")
CASE = "B1,H4,S256,D64,float16"


def judge(name, **options):
    pytest.importorskip("torch")
    from bench import gate

    options = {"rounds": 24, "seconds": 1.0, **options}
    return gate.judge_one(f"{CHEATS}:{name}", CASE, "cuda", ["torch-math"], **options)


@pytest.mark.parametrize("cold", [False, True])
def test_honest_is_correct(cold):
    found = judge("honest", cold=cold)
    assert found["correct"], found["failures"]
    assert found["clock"]["torch-math"] == "graph" and found["ratios"]["torch-math"]["rounds"] > 0


@pytest.mark.parametrize(
    "name, words",
    [
        ("other_stream", "stream"),
        ("caches_by_pointer", "pointers|before timing|seed"),
        ("zeros", "Frobenius"),
        ("writes_past_out", "wrote outside its memory"),
        ("patches_events", "tampered with torch.cuda.Event"),
    ],
)
def test_caught(name, words):
    found = judge(name)
    assert found["verdict"] == "FAIL"
    assert re.search(words, " ".join(found["failures"])), found["failures"]


def test_measure_replays_graphs_of_rows(capfd):
    from bench.__main__ import main

    assert main(["measure", "--case", CASE, "--cache", "both", "--peers", "none", "--seconds", "1", "--json"]) == 0
    cells = json.loads(capfd.readouterr().out)["cells"]
    hot, cold = (cells[f"{CASE} {kind}"]["contenders"]["simt"] for kind in ("hot", "cold"))
    assert hot["clock"] == cold["clock"] == "graph" and hot["frobenius"] < 1e-3
    assert hot["us"] < 1.1 * cold["us"]


def test_score_runs_against_the_backend_that_torch_chooses(capfd):
    pytest.importorskip("torch")
    from bench.__main__ import main

    assert main(["score", "fa_ext", "--filter", "S(128|1024),D64,float16$", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert len(document["cells"]) == 2 and document["fast"]["fast_0"] == 1.0
    assert all(cell["baseline"] == "torch-sdpa" and cell["speedup"] > 0.2 for cell in document["cells"].values())


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
    from bench import device, operands, problems

    held = operands.Operands(problems.parse(f"B1,H1,S33,D3,{dtype}"), device.open_device("cuda"))
    held.negate_values()
    assert held.changed_inputs() == []
    held.blocks["k"].raw[held.blocks["k"].end - 1] ^= 1
    assert held.changed_inputs() == ["k"] and held.broken_guards() == []
