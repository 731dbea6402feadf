"""Every command of the laboratory runs for real on the CPU, resumes, and says clearly what it cannot do."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import problems, report
from bench.__main__ import main
from bench.commands import measure
from bench.implementations import peers
from bench.machine import device
from bench.problems import memory
from bench.tuning import ncu
from tests.laboratory.support.command import CHEATS, SMALL, command

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "bench" / "examples" / "candidate.py"
SMALLER = "B1,H1,S64,D32,float32"
BESIDE_NUMPY = ["measure", "--device", "cpu", "--kernels", "none", "--peers", "numpy", "--seconds", "0.2"]


# ---- measure ----


def test_measure_times_kernels_and_peers_and_resumes(tmp_path, capfd):
    output = tmp_path / "measure.json"
    arguments = [
        "measure",
        "--device",
        "cpu",
        "--case",
        SMALL,
        "--kernels",
        "cpu_simd",
        "--peers",
        "numpy",
        "--cache",
        "both",
        "--seconds",
        "0.3",
        "--output",
        output,
    ]
    status, document = command(capfd, *arguments)
    assert status == 0 and set(document["cells"]) == {f"{SMALL} hot", f"{SMALL} cold"}
    for cell in document["cells"].values():
        row, peer = cell["figures"]["cpu_simd"], cell["figures"]["numpy"]
        assert cell["baseline"] == "numpy" and row["clock"] == "host clock" and row["rounds"] >= 3
        assert 0 < row["frobenius"] < 1e-5 and row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
        flops = problems.parse(SMALL).flops()
        assert row["tflops"] == pytest.approx(flops / row["us"] / 1e6) and peer["us"] > 0
        assert cell["picked"] == "cpu_simd"
    assert document["cells"][f"{SMALL} cold"]["slots"] > 1
    before = output.read_text()
    assert command(capfd, *arguments)[1]["cells"] == document["cells"] and output.read_text() == before
    # Another set of kernels is another run.
    again = command(capfd, *[a if a != "cpu_simd" else "cpu_ref" for a in arguments])[1]
    assert "cpu_simd" not in again["cells"][f"{SMALL} hot"]["figures"]


def test_measure_does_not_time_what_is_wrong(capfd):
    document = command(capfd, *BESIDE_NUMPY, "--case", SMALL, "--candidate", f"{CHEATS}:zeros")[1]
    cell = document["cells"][f"{SMALL} hot"]
    assert list(cell["figures"]) == ["numpy"] and cell["refused"][f"{CHEATS}:zeros"].startswith("WRONG")


def test_measure_survives_a_crash(capfd):
    document = command(capfd, *BESIDE_NUMPY, "--case", SMALL, "--case", SMALLER, "--candidate", f"{CHEATS}:crashes")[1]
    assert len(document["cells"]) == 2
    assert all("SIGSEGV" in cell["error"] for cell in document["cells"].values())


def test_an_interrupted_measure_leaves_a_valid_file(tmp_path, monkeypatch, capfd):
    output = tmp_path / "measure.json"
    call = measure.isolation.Worker.call
    calls = []

    def interrupt(self, function, *args, **options):
        calls.append(function)
        if calls.count("bench.commands.measure:cell") == 2:
            raise KeyboardInterrupt
        return call(self, function, *args, **options)

    arguments = [*BESIDE_NUMPY, "--case", SMALL, "--case", SMALLER, "--output", str(output)]
    monkeypatch.setattr(measure.isolation.Worker, "call", interrupt)
    assert main(arguments) == 130
    assert list(json.loads(output.read_text())["cells"]) == [f"{SMALL} hot"]
    monkeypatch.setattr(measure.isolation.Worker, "call", call)
    assert main(arguments) == 0 and len(json.loads(output.read_text())["cells"]) == 2
    capfd.readouterr()


def test_measure_does_not_begin_what_would_take_too_long(capfd, monkeypatch):
    case = "B1,H8,S16384,D64,float32"
    assert case in map(str, problems.preset("cpu"))
    monkeypatch.setattr(measure, "LARGE_FLOPS", 1e6)
    cpu, slow = device.Cpu(), "B1,H2,S2048,D32,float32"
    one = measure._opened("cpu_ref", cpu)
    assert "a call would take about" in measure._too_slow(one, problems.parse(slow), cpu, seconds=1e-6)
    assert measure._too_slow(one, problems.parse(slow), cpu, seconds=1e6) is None
    assert "GB of scores" in peers.NumPy().refuses(problems.parse(case.replace("H8", "H800")))


# ---- profile ----

RAW = '''==PROF== Connected
"ID","Process ID","Process Name","Host Name","Kernel Name","gpu__time_duration.sum","smsp__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","launch__registers_per_thread","smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","launch__waves_per_multiprocessor"
"","","","","","ns","%","register/thread","inst","inst",""
"0","1","python","h","fill","1,500","0","16","0","1","1"
"1","1","python","h","attend","120,000","71.5","240","3.25","1.5","8.0"
'''  # fmt: skip


def test_profile_reads_ncu_reports():
    long, short = ncu.parse(RAW)
    assert (long["name"], short["name"]) == ("attend", "fill")
    assert long["figures"]["time"] == pytest.approx(120.0) and long["figures"]["registers a thread"] == 240
    assert list(long["stalls"]) == ["gmma", "wait"]
    assert long["reading"] == "limited by tensor pipe (72% of its peak); warps wait most on gmma (3.2 a slot)"
    assert ncu.parse("no csv") == []


@pytest.mark.parametrize("figures, words", [
    ({"tensor pipe": 20.0, "issue slots": 30.0, "waves": 4.0}, "limited by latency"),
    ({"tensor pipe": 20.0, "waves": 0.3}, "too few blocks"),
    ({}, "no utilisation"),
])  # fmt: skip
def test_profile_reading(figures, words):
    assert words in ncu.reading(figures, {})


def test_profile_without_ncu_says_so(capfd):
    assert main(["profile", "simt", "--ncu", "no-such-profiler"]) == 3
    assert "no-such-profiler is not installed" in capfd.readouterr().err
    assert "administrator rights" in ncu.refusal("==ERROR== ERR_NVGPUCTRPERM - no permission\n")


# ---- without a build ----


@pytest.mark.parametrize("arguments", [["--help"], ["gate", "--help"], ["tune", "--help"], ["evidence", "--check"]])
def test_help_and_check_need_no_compiled_module(arguments):
    """As on a fresh clone: fa_ext._core cannot be imported."""
    code = (
        f"import sys; sys.modules['fa_ext._core'] = None; from bench.__main__ import main; sys.exit(main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


# ---- the example and the parts ----


@pytest.mark.parametrize("case", ["B2,H4/2,S200,D64,float32", "B1,H2,S130x300,D40,float16,causal=bottom_right",
                                  "B1,H2,S300,D64,bfloat16,causal=True"])  # fmt: skip
def test_example_candidate_is_right(case, capfd, any_load):
    status, document = command(
        capfd,
        "gate",
        f"{EXAMPLE}:attention",
        "--case",
        case,
        "--device",
        "cpu",
        "--baseline",
        "numpy",
        "--rounds",
        "24",
        "--seconds",
        "60",
        "--limit",
        "100",
    )
    assert document["gates"][0]["correct"], document["gates"][0]["failures"]
    assert status == 0


def test_candidate_from_source_and_from_a_library(capfd):
    """A kernel's source file is compiled and loaded; so is the shared library that came of it."""
    from bench.implementations import implementation

    source = ROOT / "csrc" / "cpu" / "cpu_ref.c"
    library = implementation.build_kernel(source)
    for text in (source, library):
        document = command(
            capfd,
            "gate",
            text,
            "--case",
            SMALL,
            "--device",
            "cpu",
            "--baseline",
            "numpy",
            "--rounds",
            "24",
            "--seconds",
            "1",
        )[1]
        assert document["gates"][0]["correct"], document["gates"][0]["failures"]


def test_guard_zones_notice_writes_and_poison_is_nan():
    cpu = device.Cpu()
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        block = memory.Block(64 * 8, cpu)
        array = block.view((64 * 8 // memory.numpy_dtype(dtype).itemsize,), dtype, "numpy")
        block.poison()
        assert np.isnan(array.astype(np.float64)).all() and array.ctypes.data % memory.ALIGNMENT == 0
        array[:] = 1
        assert block.guards_intact()
        block.raw[block.end + 3] = 0
        assert not block.guards_intact()


def test_tables_are_plain_when_not_a_terminal(capsys):
    report.table("title", ("name", "value"), [["a", 1.5], ["long name", 1e-9], ["none", None]])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["title", "  name          value", "  a             1.500", "  long name  1.00e-09", "  none"]


def test_results_of_another_identity_are_not_resumed(tmp_path):
    path = tmp_path / "r.json"
    report.Results(path, {"digest": "a"}, {}).add("k", {"v": np.float32(1.5), "bad": float("nan")})
    assert report.Results(path, {"digest": "a"}, {}).cells == {"k": {"v": 1.5, "bad": "nan"}}
    assert report.Results(path, {"digest": "b"}, {}).cells == {}
    path.write_text("{ half a")
    assert report.Results(path, {"digest": "a"}, {}).cells == {}
