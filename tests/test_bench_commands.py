"""Every command of the laboratory runs for real on the CPU, resumes, and says clearly what it cannot do."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bench import (
    ceiling,
    device,
    evidence,
    gate,
    machine,
    measure,
    memory,
    ncu,
    operands,
    peers,
    plot,
    problems,
    report,
    rounds,
    timer,
)
from bench.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
CHEATS = Path(__file__).with_name("cheats.py")
EXAMPLE = ROOT / "bench" / "examples" / "candidate.py"
SMALL = "B1,H2,S96,D32,float32"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tiny problems: threads of the workers' libraries would only wait for each other."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    for name in ("OTHERS", "WAITING"):  # whatever else the machine does while it tests
        monkeypatch.setattr(gate, name, float("inf"))


def command(capfd, *arguments):
    """(exit status, JSON that the command printed)."""
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capfd.readouterr().out)


# ---- measure ----


def test_measure_times_rows_and_peers_and_resumes(tmp_path, capfd):
    output = tmp_path / "measure.json"
    arguments = [
        "measure",
        "--device",
        "cpu",
        "--case",
        SMALL,
        "--rows",
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
        row, peer = cell["contenders"]["cpu_simd"], cell["contenders"]["numpy"]
        assert cell["baseline"] == "numpy" and row["clock"] == "host clock" and row["rounds"] >= 3
        assert 0 < row["frobenius"] < 1e-5 and row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
        flops = problems.parse(SMALL).flops()
        assert row["tflops"] == pytest.approx(flops / row["us"] / 1e6) and peer["us"] > 0
        assert cell["picked"] == "cpu_simd"
    assert document["cells"][f"{SMALL} cold"]["slots"] > 1
    before = output.read_text()
    assert command(capfd, *arguments)[1]["cells"] == document["cells"] and output.read_text() == before
    # Another set of rows is another run.
    again = command(capfd, *[a if a != "cpu_simd" else "cpu_ref" for a in arguments])[1]
    assert "cpu_simd" not in again["cells"][f"{SMALL} hot"]["contenders"]


def test_measure_does_not_time_what_is_wrong(capfd):
    document = command(
        capfd,
        "measure",
        "--device",
        "cpu",
        "--case",
        SMALL,
        "--rows",
        "none",
        "--peers",
        "numpy",
        "--seconds",
        "0.2",
        "--candidate",
        f"{CHEATS}:zeros",
    )[1]
    cell = document["cells"][f"{SMALL} hot"]
    assert list(cell["contenders"]) == ["numpy"] and cell["refused"][f"{CHEATS}:zeros"].startswith("WRONG")


def test_measure_survives_a_crash(capfd):
    document = command(
        capfd,
        "measure",
        "--device",
        "cpu",
        "--case",
        SMALL,
        "--case",
        "B1,H1,S64,D32,float32",
        "--rows",
        "none",
        "--peers",
        "numpy",
        "--seconds",
        "0.2",
        "--candidate",
        f"{CHEATS}:crashes",
    )[1]
    assert len(document["cells"]) == 2
    assert all("SIGSEGV" in cell["error"] for cell in document["cells"].values())


def test_an_interrupted_measure_leaves_a_valid_file(tmp_path, monkeypatch, capfd):
    output = tmp_path / "measure.json"
    call = measure.isolation.Worker.call
    calls = []

    def interrupt(self, function, *args, **options):
        calls.append(function)
        if calls.count("bench.measure:cell") == 2:
            raise KeyboardInterrupt
        return call(self, function, *args, **options)

    arguments = [
        "measure",
        "--device",
        "cpu",
        "--case",
        SMALL,
        "--case",
        "B1,H1,S64,D32,float32",
        "--rows",
        "none",
        "--peers",
        "numpy",
        "--seconds",
        "0.2",
        "--output",
        str(output),
    ]
    monkeypatch.setattr(measure.isolation.Worker, "call", interrupt)
    assert main(arguments) == 130
    assert list(json.loads(output.read_text())["cells"]) == [f"{SMALL} hot"]
    monkeypatch.undo()
    assert main(arguments) == 0 and len(json.loads(output.read_text())["cells"]) == 2
    capfd.readouterr()


def test_a_sample_waits_for_threads_that_still_run(monkeypatch):
    """A pool's workers go on spinning after a call has returned; the next contender begins when they have stopped."""
    monkeypatch.setattr(device.Cpu, "SETTLE_SECONDS", 60.0)
    load, done = bytes(1 << 27), threading.Event()
    spinning = threading.Thread(target=lambda: (hashlib.sha256(load).digest(), done.set()))  # outside the GIL
    cpu = device.Cpu()
    spinning.start()
    waited = cpu.settle()
    assert done.is_set() and waited > 0.003
    spinning.join()
    assert cpu.settle() < waited


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_threads_that_wait_for_a_core_are_seen():
    """Two threads outside the GIL on one core: each waits for half of the time."""
    load, cores, cpu = bytes(1 << 27), os.sched_getaffinity(0), device.Cpu()
    hashed, measured = threading.Barrier(3), threading.Event()

    def work():
        hashlib.sha256(load).digest()
        hashed.wait(60)
        measured.wait(60)  # a thread that has ended is not counted any more

    try:
        os.sched_setaffinity(0, {min(cores)})
        threads = [threading.Thread(target=work) for _ in range(2)]
        before = cpu.waited_for_cores()
        for thread in threads:
            thread.start()
        hashed.wait(60)
        assert cpu.waited_for_cores() - before > 0.01
    finally:
        measured.set()
        os.sched_setaffinity(0, cores)


def test_settling_has_a_bound(monkeypatch):
    monkeypatch.setattr(device, "others_run", lambda: True)
    monkeypatch.setattr(device.Cpu, "SETTLE_SECONDS", 0.05)
    assert 0.05 <= device.Cpu().settle() < 1.0


def test_every_sample_of_every_contender_settles_first(monkeypatch):
    events = []
    cpu = device.Cpu()
    monkeypatch.setattr(cpu, "settle", lambda: events.append("settle") or 0.25)
    watches = {n: timer.Stopwatch([lambda n=n: events.append(n)], cpu, sample_seconds=1e-9) for n in ("a", "b")}
    events.clear()
    found = rounds.take_turns(watches, rounds=30, seconds=10.0)
    assert events[::2] == ["settle"] * 60 and set(events[1::2]) == {"a", "b"}
    conditions = found.conditions_summary()
    assert conditions["settling_ms"] == {"a": 250.0, "b": 250.0}
    assert (
        set(conditions["waiting"]) == {"a", "b"}
        and 0 <= (conditions["others"] or 0.0) <= 1
        and conditions["load_average"] >= 0
    )


def test_measure_does_not_begin_what_would_take_too_long(capfd, monkeypatch):
    case = "B1,H8,S16384,D64,float32"
    assert case in map(str, problems.preset("cpu"))
    monkeypatch.setattr(measure, "LARGE_FLOPS", 1e6)
    cpu, slow = device.Cpu(), "B1,H2,S2048,D32,float32"
    entrant = measure._opened("cpu_ref", cpu)
    assert "a call would take about" in measure._too_slow(entrant, problems.parse(slow), cpu, seconds=1e-6)
    assert measure._too_slow(entrant, problems.parse(slow), cpu, seconds=1e6) is None
    assert "GB of scores" in peers.NumPy().refuses(problems.parse(case.replace("H8", "H800")))


def test_the_ceiling_is_the_fastest_of_several_products(monkeypatch):
    seconds = {32: 4e-6, 64: 5e-6, 48: 5e-6}
    monkeypatch.setattr(ceiling, "sizes", lambda device, dtype: tuple(seconds))
    monkeypatch.setattr(ceiling, "_best", lambda work, device: seconds.get(len(np.atleast_1d(work())), 1.0))
    found = ceiling.measure("cpu", ["float32", "bfloat16"])
    assert found["gemm_tflops"] == {"float32": pytest.approx(2 * 64**3 / 5e-6 / 1e12)}
    assert found["gemm_size"] == {"float32": 64} and found["read_gbs"] > 0 and found["copy_gbs"] > 0
    monkeypatch.undo()
    assert all(len(ceiling.sizes(kind, dtype)) >= 2 for kind in ("cpu", "cuda") for dtype in ("float16", "float32"))


def test_the_ceiling_of_a_slow_machine_takes_three_samples(monkeypatch):
    calls = []
    monkeypatch.setattr(ceiling, "SECONDS", 0.0)
    monkeypatch.setattr(timer.Stopwatch, "sample", lambda watch: calls.append(1) or 1.0 / len(calls))
    assert ceiling._best(lambda: None, device.Cpu()) == pytest.approx(1 / 3) and len(calls) == 3


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


# ---- plot ----


@pytest.mark.parametrize("kind", plot.KINDS)
def test_plots_are_drawn(kind, tmp_path, capfd):
    pytest.importorskip("matplotlib")

    def cell(seq, causal):
        case = f"B1,H4,S{seq},D64,float16" + (",causal=True" if causal else "")
        figures = {
            n: {"us": 10.0 * i, "tflops": 5.0 / i, "frobenius": 2e-4 * i}
            for i, n in enumerate(("simt", "torch-cudnn"), 1)
        }
        return {"case": case, "cache": "hot", "contenders": figures}

    document = {"context": {"cpu": "test", "ceilings": {"gemm_tflops": {"float16": 9.0}}},
                "cells": {f"{s}{c}": cell(s, c) for s in (512, 1024, 2048) for c in (False, True)}}  # fmt: skip
    source = tmp_path / "m.json"
    report.write_json(source, document)
    status, written = command(capfd, "plot", source, "--kind", kind, "--output", tmp_path / "chart")
    assert status == 0
    png, svg = map(Path, written["written"])
    assert png.read_bytes().startswith(b"\x89PNG") and "</svg>" in svg.read_text()
    assert "simt" in svg.read_text() and "torch-cudnn" in svg.read_text()


def test_a_grid_draws_series_of_lengths_and_nothing_else():
    """The longest series that a problem fits into, with one cell a length; other heads, options or one length apart."""
    paper = [f"B{16384 // s},H16,S{s},D128,bfloat16,layout=bshd" for s in (512, 1024, 2048, 4096)]
    others = ["B4,H16,S4000,D128,bfloat16,layout=bshd", "B4,H32,S512,D64,bfloat16", "B4,H32/8,S1024,D64,bfloat16",
              "B1,H16,S1x4096,D128,bfloat16,layout=bshd", *(f"B1,H8,S{s},D64,float16" for s in (128, 512, 2048))]  # fmt: skip
    cells = [{"case": case, "cache": "hot", "contenders": {"simt": {"tflops": 1.0}}} for case in [*others, *paper]]
    found = plot.series(cells)
    assert [[cell["case"] for _, cell in sorted(lengths.items())] for lengths in found.values()] == [others[-3:], paper]
    assert [key[1:] for key in found] == [("H8, D64, float16, hot", "batch 1", "full"),
                                          ("H16, D128, bfloat16, layout=bshd, hot", "16384 tokens", "full")]  # fmt: skip
    assert plot.series(cells[:6]) == {}
    assert plot._length_ticks([4096, 4000, 512, 16384]) == {512: "512", 4000: "4000", 16384: "16k"}


def test_a_ladder_of_a_problem_that_others_are_filtered_out_of(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    one, two = ("B8,H16,S2048,D128,bfloat16,layout=bshd", "B8,H16,S2048,D128,bfloat16,causal=True,layout=bshd")
    figures = {"us": 10.0, "tflops": 5.0, "frobenius": 2e-4}
    cells = {one: {"case": one, "cache": "hot", "contenders": {"wmma": figures, "torch-math": figures}},
             two: {"case": two, "cache": "hot", "contenders": {"simt": figures}}}  # fmt: skip
    source = tmp_path / "m.json"
    report.write_json(source, {"context": {"cpu": "test"}, "cells": cells})
    common = ["plot", str(source), "--kind", "ladder", "--output", str(tmp_path / "ladder"), "--filter",
              "B8,H16,S2048,D128,bfloat16", "--only"]  # fmt: skip
    assert main([*common, "wmma|torch"]) == 0
    assert one in (tmp_path / "ladder.svg").read_text()
    assert main([*common, "nobody"]) == 3 and "no measured problem" in capfd.readouterr().err


def test_errors_of_references_are_drawn_from_its_file_and_from_a_record():
    cells = {"x": {"errors": [{"name": "numpy"}]}, "y": {"errors": [{"name": "simt"}]}}
    entries = [{"name": "numpy"}, {"name": "simt"}]
    assert plot._reference_errors({"cells": cells}) == entries
    assert plot._reference_errors({"parts": {"references": {"errors": {"cells": cells}}}}) == entries
    assert plot._reference_errors({"parts": {"measure": {"cells": {}}}}) == []


def test_plot_of_nothing_is_an_error(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    report.write_json(tmp_path / "m.json", {"cells": {}})
    assert main(["plot", str(tmp_path / "m.json"), "--output", str(tmp_path / "c")]) == 3
    assert main(["plot", str(tmp_path / "absent.json")]) == 3
    assert "no measured problem" in capfd.readouterr().err


# ---- evidence ----


def test_evidence_is_fresh_until_a_source_changes(tmp_path, monkeypatch, capfd):
    output = tmp_path / "machine.json"
    arguments = [
        "evidence",
        "--device",
        "cpu",
        "--parts",
        "tests,sanitizer,overhead,measure",
        "--filter",
        r"test_import|S512,D64,float32$",
        "--rows",
        "cpu_simd",
        "--seconds",
        "0.3",
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    document = json.loads(output.read_text())
    assert document["parts"]["tests"]["test_import.py"]["passed"] > 5
    assert "B1,H8,S512,D64,float32 hot" in document["parts"]["measure"]["cells"]
    capfd.readouterr()
    assert evidence.check(strict=True, folder=tmp_path) == 0
    assert capfd.readouterr().out.startswith("evidence machine.json: fresh: ")
    assert list(evidence.cells(tmp_path)) == ["machine B1,H8,S512,D64,float32 hot"]
    hashes = machine.source_hashes()
    hashes["csrc/cpu/cpu_simd.c"] = "changed"
    monkeypatch.setattr(machine, "source_hashes", lambda root=ROOT: hashes)
    assert evidence.check(strict=True, folder=tmp_path) == 1 and evidence.check(strict=False, folder=tmp_path) == 0
    assert "stale: changed since: csrc/cpu/cpu_simd.c" in capfd.readouterr().out


def test_the_pick_is_close_to_the_best_recorded_row():
    """In every committed cell the row that the library takes is within 5% of the fastest one measured there."""
    found = {key: cell for key, cell in evidence.cells().items() if cell.get("picked")}
    if not found:
        pytest.skip("no committed measurement")
    late = {}
    for key, cell in found.items():
        rows = {n: f["us"] for n, f in cell["contenders"].items() if n not in peers.PEERS}
        if cell["picked"] in rows and rows[cell["picked"]] > 1.05 * min(rows.values()):
            late[key] = (cell["picked"], {n: round(us, 2) for n, us in rows.items()})
    assert not late


def test_a_sweep_adds_up_its_processes_and_counts_a_dead_one_as_failed():
    whole = 'a mismatch\n  python tests/cases.py "X" --kernel simt --on cupy\nsimt: 7 judged, 1 failed, 2 not taken\n  2 why\n'
    found = evidence.sweep_result([whole, "simt: 5 judged, 0 failed, 0 not taken\n", "Segmentation"])
    assert (found["judged"], found["failed"], found["not_taken"]) == (12, 2, 2)
    assert found["failures"] == ['python tests/cases.py "X" --kernel simt --on cupy', "ended early: Segmentation"]


def test_evidence_without_files_is_stale(tmp_path, capfd):
    assert evidence.check(strict=True, folder=tmp_path) == 1
    assert "stale: no file" in capfd.readouterr().out


def test_junit_is_counted():
    text = """<testsuites><testsuite><testcase classname="t" name="a"/>
    <testcase classname="t" name="b"><failure message="boom
    more"/></testcase><testcase classname="t" name="c"><skipped message="no GPU"/></testcase>
    <testcase classname="t" name="d"><error message="setup"/></testcase></testsuite></testsuites>"""
    found = evidence.parse_junit(text)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"][0].startswith("t.b: boom") and found["reasons"] == {"no GPU": 1}


def test_sanitizer_summary():
    assert evidence.sanitizer_result("x\n========= ERROR SUMMARY: 0 errors\n") == "0 errors"
    assert evidence.sanitizer_result("RACECHECK SUMMARY: 2 hazards displayed") == "2 hazards displayed"
    assert evidence.sanitizer_result("") == "no summary printed"


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
def test_example_candidate_is_right(case, capfd):
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
        "0.5",
        "--limit",
        "100",
    )
    assert document["gates"][0]["correct"], document["gates"][0]["failures"]
    assert status == 0


def test_candidate_from_source_and_from_a_library(capfd):
    """A row's source file is compiled and loaded; so is the shared library that came of it."""
    from bench import contender

    source = ROOT / "csrc" / "cpu" / "cpu_ref.c"
    library = contender.build_row(source)
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


def test_negating_values_flips_exactly_the_sign():
    cpu = device.Cpu()
    for dtype in ("float16", "bfloat16", "float32"):
        held = operands.Operands(problems.parse(f"B1,H2,S17,D8,{dtype}"), cpu)
        before = held.array("v", "numpy").copy()
        held.negate_values()
        assert (held.array("v", "numpy") == -before).all() and held.changed_inputs() == []


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
