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
