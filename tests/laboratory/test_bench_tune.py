"""The tuner: its whole loop on cpu_simd, builds and measurements apart, strategies, limits."""

import dataclasses
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import report
from bench.__main__ import main
from bench.commands import tune
from bench.commands.evidence import FOLDER
from bench.trial import isolation
from bench.tuning import objective, search, spaces, variants
from tests.laboratory.support.command import command

pytestmark = pytest.mark.usefixtures("one_thread")


TUNE = [
    "tune",
    "cpu_simd",
    "--case",
    "B1,H1,S64,D32,float32",
    "--seconds",
    "0.2",
    "--final-seconds",
    "0.3",
    "--seed",
    "2",
]


def test_tuner_runs_its_whole_loop(tmp_path, capfd, monkeypatch):
    output, header = tmp_path / "tune.json", tmp_path / "simd_tuned.h"
    monkeypatch.setitem(spaces.SPACES, "cpu_simd", dataclasses.replace(spaces.CPU_SIMD, table=header))
    arguments = [*TUNE, "--evaluations", "3", "--output", output, "--write"]
    status, document = command(capfd, *arguments)
    assert status == 0 and document["evaluated"] == 3 and len(document["cells"]) == 3
    assert document["hand_set"] in [c["config"] for c in document["cells"].values()]
    assert document["final"]["ratio"]["low"] < 1.0 or document["winner"] == document["hand_set"]
    assert document["pareto"] and all(c["frobenius"] < 1e-5 for c in document["pareto"])
    text = header.read_text()
    for name, value in document["winner"].items():
        assert f"#define {name} {value}\n" in text or value == document["hand_set"][name]
    # Resumed: nothing is evaluated anew. The table of a finished run is the same.
    assert command(capfd, *arguments)[1]["cells"] == document["cells"]
    document = json.loads(output.read_text())
    assert main([*TUNE, "--from", str(output)]) == 0 and header.read_text() == variants.table(spaces.CPU_SIMD, document)


@pytest.mark.parametrize("tuned", spaces.SPACES)
def test_the_table_of_the_tree_is_that_of_the_recorded_run(tuned):
    """`python -m bench tune KERNEL --from bench/evidence/tune-KERNEL.json` changes nothing, and the winner is no worse than what
    was set by hand."""
    space = spaces.SPACES[tuned]
    document = json.loads((FOLDER / f"tune-{tuned}.json").read_text())
    assert space.table.read_text() == variants.table(space, document)
    assert space.excluded(document["winner"]) is None and document["hand_set"] == space.hand_set
    assert document["final"]["ratio"]["low"] < 1.0


def is_configured(folder, config):
    """Whether cpu_simd's tuned instance has this configuration when `folder` holds the table."""
    source = spaces.CPU_SIMD.source
    held = " && ".join(f"{'NR(FA_CPU_MR)' if name == 'FA_CPU_NR' else name} == {n}" for name, n in config.items())
    probe = folder / "probe.c"
    probe.write_text(f'#include "{source}"\n_Static_assert({held}, "another one");\n')
    flags = "-DFA_INSTANCE=x -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4 -fsyntax-only"
    command = ["gcc", f"-I{folder}", f"-I{source.parent.parent}", *flags.split(), str(probe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 or "another one" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="needs gcc for x86-64")
@pytest.mark.parametrize(
    "changed", [{}, {"FA_CPU_MR": 3}, {"FA_CPU_NR": 4, "FA_CPU_TILE_N": 64}, {"FA_CPU_TILE_M": 512}]
)
def test_the_table_holds_what_differs_from_the_source(tmp_path, changed):
    """With an empty table the source's own numbers are the hand-set configuration of the search."""
    table, hand_set = tmp_path / "cpu" / "simd_tuned.h", spaces.CPU_SIMD.hand_set
    table.parent.mkdir()
    winner = hand_set | changed
    document = json.loads((FOLDER / "tune-cpu_simd.json").read_text()) | {"winner": winner}
    table.write_text(variants.table(spaces.CPU_SIMD, document))
    given = set(re.findall("define (FA_CPU_[A-Z_]+) ", table.read_text()))
    assert given == changed.keys() | ({"FA_CPU_NR"} if "FA_CPU_MR" in changed else set())
    assert is_configured(tmp_path, winner)
    assert is_configured(tmp_path, hand_set) == (not changed)


def test_a_variant_does_not_see_the_table(tmp_path, monkeypatch):
    """The measurements still count after the winner was written."""
    before = variants.sources_digest(spaces.CPU_SIMD)
    assert spaces.CPU_SIMD.table.name in spaces.CPU_SIMD.source.read_text()
    table = spaces.CPU_SIMD.table
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"" if self == table else read(self))
    assert variants.sources_digest(spaces.CPU_SIMD) == before


# ---- objectives with figures of ncu ----


def test_objective_is_relative_to_the_hand_set_configuration():
    aim = objective.parse("time*registers_a_thread/tensor_pipe")
    assert aim.powers == {"registers_a_thread": 1, "tensor_pipe": -1} and not objective.parse("time")
    factors = aim.factors(
        {"registers a thread": 120, "tensor pipe": 80}, {"registers a thread": 240, "tensor pipe": 40}
    )
    assert factors == {"registers_a_thread": 0.5, "tensor_pipe": 0.5}
    cell = {"ratio": {"ratio": 1.2}, "frobenius": 1e-4, "factors": factors}
    assert objective.value(cell) == pytest.approx(0.3)
    with pytest.raises(report.UsageError, match="ncu gave no DRAM"):
        objective.parse("time*dram").factors({}, {"DRAM": 1.0})


@pytest.mark.parametrize(
    "text", ["", "registers_a_thread", "time*", "time+dram", "time*nothing", "time*dram*dram", "time dram"]
)
def test_bad_objectives_are_named(text):
    with pytest.raises(report.UsageError, match="accepted: time"):
        objective.parse(text)


def test_figures_of_ncu_belong_to_a_gpu(capfd):
    assert main([*TUNE, "--objective", "time*dram_traffic"]) == 3
    assert "cpu_simd runs on the CPU" in capfd.readouterr().err


def test_a_variant_is_profiled_for_its_objective(tmp_path, monkeypatch):
    """The whole loop with ncu replaced: the slower variant wins, since it moves a tenth of the bytes."""
    monkeypatch.setattr(tune, "SPACES", {"cpu_simd": dataclasses.replace(spaces.CPU_SIMD, device="cuda")})
    monkeypatch.setattr("bench.machine.device.has_gpu", lambda: True)
    profiled = []

    def profile(candidate, case, limit):
        profiled.append(candidate)
        return {"kernels": [{"figures": {"DRAM traffic": 10.0 if len(profiled) == 1 else 1.0}}]}

    call = isolation.Worker.call
    monkeypatch.setattr(tune.ncu, "profile", profile)
    monkeypatch.setattr(isolation.Worker, "call", lambda self, f, arguments, *rest: call(
        self, f, arguments | {"device": "cpu"}, *rest))  # fmt: skip
    output = tmp_path / "t.json"
    assert (
        main([*TUNE, "--objective", "time*dram_traffic", "--evaluations", "2", "--output", str(output), "--json"]) == 0
    )
    document = json.loads(output.read_text())
    assert document["identity"]["objective"] == "time*dram_traffic"
    assert document["winner"] != document["hand_set"] and document["final"]["factors"] == {"dram_traffic": 0.1}


def test_build_and_measure_apart(tmp_path, capfd, monkeypatch):
    status, manifest = command(capfd, "tune", "cpu_simd", "--build", tmp_path / "variants", "--sample", "2")
    assert status == 0 and manifest["variants"][0]["config"] == spaces.CPU_SIMD.hand_set
    assert all(v["library"] for v in manifest["variants"])
    document = command(capfd, *TUNE, "--measure", tmp_path / "variants", "--strategy", "brute_force", "--output",
                       tmp_path / "t.json")[1]  # fmt: skip
    assert document["evaluated"] == len(manifest["variants"]) and not document["failures"]
    monkeypatch.setattr("bench.tuning.variants.sources_digest", lambda space: "other")
    assert main([*TUNE, "--measure", str(tmp_path / "variants"), "--output", str(tmp_path / "t.json")]) == 3
    assert "built from other sources" in capfd.readouterr().err


@pytest.mark.parametrize("strategy", search.STRATEGIES)
def test_strategies_find_a_planted_optimum(strategy):
    space = spaces.CPU_SIMD
    seen = []

    def evaluate(configs):
        seen.extend(configs)
        assert all(space.excluded(c) is None for c in configs)
        return [{"error": "planted failure"} if c["FA_CPU_MR"] == 3 else
                {"objective": abs(c["FA_CPU_TILE_N"] - 64) / 64 + abs(c["FA_CPU_NR"] - 4) + abs(c["FA_CPU_MR"] - 4) + 1}
                for c in configs]  # fmt: skip

    budget = len(space.configs()) if strategy == "brute_force" else 250
    found = search.search(space, space.configs(), strategy, budget, 60.0, evaluate, seed=1)
    assert len(found) == len(seen) <= budget and len({tuple(c.values()) for c in seen}) == len(seen)
    assert min(r["objective"] for r in found if "objective" in r) < 1.6
    if strategy == "genetic_algorithm":
        assert space.hand_set in seen[:30]


def test_limits_rule_out_before_compilation():
    for space in spaces.SPACES.values():
        assert space.excluded(space.hand_set) is None and space.hand_set in space.configs()
        assert space.sample(10, 0)[0] == space.hand_set
    simt = spaces.SIMT
    base = {**simt.hand_set, "BLOCK_N": 32, "SYNC_POLICY": 0, "REDUCE": 0, "MIN_BLOCKS": 1}
    assert "BLOCK_M" in simt.excluded({**base, "BLOCK_M": 16, "NUM_WARPS": 8, "KEY_GROUPS": 1})
    assert "divides" in simt.excluded({**base, "NUM_WARPS": 2, "KEY_GROUPS": 4})
    large = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_WARPS": 16, "KEY_GROUPS": 4}
    assert "shared memory" in simt.excluded({**base, **large})
    assert "registers" in simt.excluded({**base, "BLOCK_M": 128, "BLOCK_N": 128, "NUM_WARPS": 2, "KEY_GROUPS": 1})


def test_variant_that_does_not_compile_is_a_result(tmp_path):
    from bench.tuning import variants

    built = variants.build(spaces.CPU_SIMD, {**spaces.CPU_SIMD.hand_set, "FA_CPU_MR": 9}, tmp_path)
    assert built.library is None and "FA_CPU_MR" in built.reason


def test_pareto():
    def result(ratio, error):
        return {"ratio": {"ratio": ratio}, "frobenius": error}

    def dear(ratio, error, factor):
        return result(ratio, error) | {"factors": {"dram": factor}}

    both = [dear(0.9, 1.0, 2.0), dear(0.95, 1.0, 1.0), dear(0.96, 1.0, 1.5)]
    assert search.pareto(both) == both[:2]
    points = [result(1.0, 3e-7), result(0.9, 5e-7), result(1.1, 4e-7), result(0.95, 5e-7), {"error": "x"}]
    assert search.pareto(points) == [points[1], points[0]]
