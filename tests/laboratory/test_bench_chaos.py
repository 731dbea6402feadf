"""``python -m bench chaos`` without a chaos build: what it refuses, what it plans, how it adds up what processes found."""

import json
import subprocess
import sys

import pytest

from bench import machine
from bench.__main__ import main
from bench.commands import chaos
from fa_ext import _core
from tests.kernels import chaos as tests_chaos


@pytest.fixture
def chaos_build(monkeypatch):
    info = _core.build_info()
    kernels = {"one_sm90": ("cuda", ""), "two_sm90": ("cuda", ""), "cpu_ref": ("cpu", "")}
    monkeypatch.setattr(_core, "build_info", lambda: info | {"chaos": True, "kernels": kernels})


@pytest.mark.skipif(tests_chaos.is_chaos(), reason="this is a chaos build")
def test_another_build_is_refused(capsys):
    assert main(["chaos"]) == 3
    assert "no chaos build: build with FA_CHAOS=1" in capsys.readouterr().err
    assert tests_chaos.hung() is None


def test_a_machine_without_a_gpu_is_refused(chaos_build, monkeypatch, capsys):
    monkeypatch.setattr(chaos.devices, "has_gpu", lambda: False)
    assert main(["chaos"]) == 3
    assert "there is no GPU here" in capsys.readouterr().err


def test_an_unknown_kernel_is_refused_with_the_names(chaos_build, monkeypatch, capsys):
    monkeypatch.setattr(chaos.devices, "has_gpu", lambda: True)
    assert main(["chaos", "--kernel", "three"]) == 3
    assert "'three'; accepted: one_sm90, two_sm90" in capsys.readouterr().err


def test_the_plan_deals_the_contract_and_a_kernels_own_file():
    batches = list(chaos.plan(["wgmma_sm90", "minimal"], "", 2, 3))
    assert len(set(batches)) == len(batches) == 2 * (2 * (3 + 3 + 1) + 3)
    assert ("wgmma_sm90", 2, "kernels/test_wgmma_sm90.py", 2, 3) in batches
    assert {batch[2] for batch in chaos.plan(["simt_backward"], "", 1, 1)} == set(chaos.BACKWARD_FILES)
    assert {batch[2] for batch in chaos.plan(["minimal"], "chaos", 1, 3)} == {"kernels/test_chaos.py"}
    assert all((machine.ROOT / "tests" / batch[2]).is_file() for batch in batches)


def test_a_process_that_never_ends_is_a_failure(monkeypatch):
    def never(*arguments, **options):
        raise subprocess.TimeoutExpired("pytest", options["timeout"])

    monkeypatch.setattr(subprocess, "run", never)
    found = chaos.run_batch("minimal", 1, "test_chaos.py", 0, 1, limit=5)
    assert found["failed"] == 1 and "not finished after 5 s" in found["failures"][0]


def test_a_process_counts_its_tests_and_gets_seed_kernel_and_shard(monkeypatch):
    began = []

    def run(argv, **options):
        began.append((argv, options["env"]))
        path = next(word for word in argv if word.startswith("--junitxml=")).partition("=")[2]
        options["env"]["FA_CHAOS_HUNG"] and open(options["env"]["FA_CHAOS_HUNG"], "w").write('{"site": 7}')
        open(path, "w").write('<testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c">'
                              '<failure message="lost"/></testcase></testsuite>')  # fmt: skip
        return subprocess.CompletedProcess(argv, 1, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    found = chaos.run_batch("minimal", 9, "test_chaos.py", 2, 5, limit=5)
    (argv, environment), = began
    assert (found["passed"], found["failed"], found["hung"]) == (1, 1, {"site": 7})
    assert environment["FA_CHAOS_SEED"] == "9" and argv[argv.index("--of") + 1] == "minimal" and "2/5" in argv
    piece = chaos.empty()
    chaos.add(piece, 9, found)
    chaos.add(piece, 9, found)
    assert (piece["passed"], piece["failed"], piece["seeds"], len(piece["hangs"])) == (2, 2, [9], 2)


def test_a_kernel_of_which_a_part_has_run_is_not_in_the_file(chaos_build, monkeypatch, tmp_path, capsys):
    now, began = [0.0], []

    def run_batch(kernel, *rest, limit):
        began.append(kernel)
        now[0] += 1
        return {"passed": 1, "failed": 0, "skipped": 0, "failures": [], "hung": None, "seconds": 1.0}

    monkeypatch.setattr(chaos.devices, "has_gpu", lambda: True)
    monkeypatch.setattr(chaos, "run_batch", run_batch)
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now[0])
    each = len(list(chaos.plan(["one_sm90"], "", 1, 2)))
    line = ["chaos", "--batches", "2", "--jobs", "1", "--output", str(tmp_path / "found.json")]
    assert main([*line, "--within", str(each + 0.5)]) == 1
    assert began == ["one_sm90"] * each + ["two_sm90"]
    assert list(json.loads((tmp_path / "found.json").read_text())["pieces"]) == ["one_sm90"]
    assert "not come to an end" in (said := capsys.readouterr().err) and "two_sm90" in said
    assert main(line) == 0 and len(json.loads((tmp_path / "found.json").read_text())["pieces"]) == 2


def test_shards_are_every_nth_test():
    def count(shard):
        argv = [sys.executable, "-m", "pytest", "--collect-only", "tests/laboratory/test_bench_chaos.py", "--shard", shard, "-m", ""]
        printed = subprocess.run(argv, cwd=machine.ROOT, capture_output=True, text=True).stdout
        return {line for line in printed.splitlines() if "::" in line}

    every, parts = count("0/1"), [count(f"{n}/3") for n in range(3)]
    assert set.union(*parts) == every and sum(map(len, parts)) == len(every) > 6
