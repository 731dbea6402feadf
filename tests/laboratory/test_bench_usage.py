"""Bad usage of the laboratory exits with 3 and says what is accepted, failed work with 1; Ctrl-C tells what it kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.commands import references
from bench.trial import duel, isolation
from tests.laboratory.support.command import CHEATS, SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


def status_of(arguments):
    """The exit status, whether the command returns it or argparse raises it."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("arguments, words", [
    (["measure", "--preset", "nothing"], "preset is 'nothing'; accepted: history"),
    (["measure", "--case", "B1,H2"], "accepted: lines such as"),
    (["measure", "--case", "B1,H2,S96,D32,float99"], "dtype float99; accepted: float16, bfloat16, float32"),
    (["gate", "cpu_ref", "--case", "junk=1"], "case is 'junk=1' (batch, heads, sequence, head_dim and dtype are needed)"),
    (["gate", "cpu_ref", "--case", f"{SMALL},junk=1"], "('junk' is no option; accepted: causal, window, softcap,"),
    (["gate", "cpu_ref", "--case", f"{SMALL},batch=1"], "('batch' is no option; accepted: causal, window, softcap,"),
    (["gate", "cpu_ref", "--case", f"{SMALL},mask"], "(mask is ''; accepted: full, rows,"),
    (["gate", "cpu_ref", "--case", f"{SMALL},causal=yes"], "(causal is 'yes'; accepted: True, False, top_left,"),
    (["gate", "cpu_ref", "--case", f"{SMALL},window=3"], "(window is '3'; accepted: left:right, each a number or none)"),
    (["gate", "cpu_ref", "--case", f"{SMALL},scale=big"], "(scale is 'big'; accepted: a number)"),
    (["gate", "cpu_ref", "--case", "B1,H2,Sx,D8,float32"], "('Sx' is not S and a number, or two with x between them)"),
    (["gate", "cpu_ref", "--case", "1,H2,S8,D8,float32"], "('1' is not B and a number)"),
    (["gate", "cpu_ref", "--case", "B1,H2/1/1,S8,D8,float32"], "('H2/1/1' is not H and a number, or two with /"),
    (["measure", "--case", SMALL, "--peers", "nobody"], "peers are nobody"),
    (["measure", "--case", SMALL, "--filter", "D999"], "no problem matches"),
    (["measure", "--case", SMALL, "--filter", "("], "'(' is no regular expression"),
    (["measure", "--case", SMALL, "--rounds", "0"], "--rounds: '0'; accepted: whole numbers from 1 on"),
    (["measure", "--case", SMALL, "--rounds", "-1"], "'-1'; accepted"),
    (["measure", "--case", SMALL, "--seconds", "nan"], "'nan'; accepted: finite numbers over 0"),
    (["measure", "--case", SMALL, "--kernels", "zzz", "--peers", "none"], "no kernel matches 'zzz'"),
    (["score", "cpu_ref", "--filter", "D999"], "no problem matches"),
    (["score", "cpu_ref", "--every", "0"], "whole numbers from 1 on"),
    (["score", "cpu_ref", "--filter", "S128,D64,float32$", "--baseline", "nope"], "baseline is 'nope'; accepted"),
    (["evidence", "--parts", "nothing"], "parts are nothing"),
    (["gate"], "arguments are required: candidate"),
    (["gate", "cpu_ref", "--bogus"], "unrecognized arguments: --bogus"),
    (["gate", "cpu_ref", "--case", SMALL, "--baseline", "nope"], "baseline is 'nope'; accepted: a kernel (cpu_simd"),
    (["gate", "cpu_ref", "--case", SMALL, "--baseline", "cpu_ref"], "baseline is 'cpu_ref', which is the candidate"),
    (["gate", "cpu_ref", "--case", SMALL, "--arrays", "cupy"], "arrays are 'cupy'; accepted on the cpu here: numpy"),
])  # fmt: skip
def test_bad_usage_is_named(arguments, words, capfd):
    assert status_of([*arguments, "--device", "cpu"]) == 3
    printed = capfd.readouterr()
    assert words in printed.err and printed.out == ""


def test_an_array_library_that_is_not_installed_is_bad_usage(capfd, tmp_path):
    """Whether the option names it or the function itself."""
    candidate = tmp_path / "wants.py"
    candidate.write_text("def attend(q, k, v):\n    return q\nattend.arrays = 'no_such_library'\n")
    assert status_of(["gate", f"{candidate}:attend", "--case", SMALL, "--device", "cpu", "--baseline", "numpy"]) == 3
    assert "arrays are 'no_such_library'" in capfd.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["tune", "cpu_simd", "--measure", "no-such-folder"], "no-such-folder/manifest.json"),
    (["tune", "cpu_simd", "--evaluations", "0"], "whole numbers from 1 on"),
    (["plot", "x.json", "--only", "["], "'[' is no regular expression"),
    (["nothing"], "invalid choice: 'nothing'"),
])  # fmt: skip
def test_bad_usage_without_a_device(arguments, words, capfd):
    assert status_of(arguments) == 3
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("arguments, status", [(["--help"], 3), (["measure"], 3), (["evidence", "--check"], 0)])
def test_without_numpy_one_line_says_so(arguments, status):
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
sys.meta_path.insert(0, Absent())
from bench.__main__ import main
sys.exit(main({arguments}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    if status:
        assert "needs NumPy" in done.stderr and done.stderr.count("\n") == 1


def test_a_measurement_that_failed_exits_with_1(capfd):
    """Heads that do not divide are an error of the cell; a lone candidate that is wrong leaves nothing timed."""
    common = ["measure", "--device", "cpu", "--peers", "none", "--seconds", "0.2", "--case"]
    assert main([*common, "B1,H3/2,S64,D32,float32", "--kernels", "cpu_simd"]) == 1
    assert "multiple" in capfd.readouterr().out
    assert main([*common, SMALL, "--kernels", "none", "--candidate", f"{CHEATS}:zeros"]) == 1


def test_tables_check_as_json(capfd, tmp_path):
    file = tmp_path / "text.md"
    file.write_text("no figures\n")
    assert main(["tables", "--check", "--json", "--file", str(file)]) == 0
    assert json.loads(capfd.readouterr().out) == {"agrees": {str(file): True}}


# ---- Ctrl-C ----


def interrupt_at(monkeypatch, function, turn=None):
    """Ctrl-C at the given call of `function` in a worker, or at none; returns the calls so far."""
    call, calls = isolation.Worker.call, []

    def interrupted(self, name, *args, **options):
        calls.append(name)
        if calls.count(function) == turn:
            raise KeyboardInterrupt
        return call(self, name, *args, **options)

    monkeypatch.setattr(isolation.Worker, "call", interrupted)
    return calls


def interrupt_duel(monkeypatch, turn=None):
    """The same at the given duel of a gate or a score."""
    fought, calls = duel.duel, []

    def interrupted(candidate, *args, **options):
        calls.append(candidate)
        if len(calls) == turn:
            raise KeyboardInterrupt
        return fought(candidate, *args, **options)

    monkeypatch.setattr(duel, "duel", interrupted)
    return calls


def test_interrupted_references_carry_on(tmp_path, monkeypatch, capfd):
    output, other = tmp_path / "references.json", "B1,H1,S64,D32,float32"
    arguments = ["references", "--device", "cpu", "--case", SMALL, "--case", other, "--kernels", "--output", str(output)]
    interrupt_at(monkeypatch, "bench.commands.references:errors", 2)
    assert main(arguments) == 130
    assert f"is in {output}, and the same line carries on" in capfd.readouterr().err
    kept = json.loads(output.read_text())["cells"]
    assert list(kept) == [SMALL]
    monkeypatch.undo()
    calls = interrupt_at(monkeypatch, "bench.commands.references:errors")
    assert main(arguments) == 0 and calls == ["bench.commands.references:errors"]
    document = json.loads(output.read_text())
    assert list(document["cells"]) == [SMALL, other] and document["cells"][SMALL] == kept[SMALL]
    assert {s["judged"] for s in document["summary"] if s["name"] == "cpu_ref"} == {2 * len(references.VALUES)}


def test_an_interrupted_gate_says_what_is_lost(tmp_path, monkeypatch, capfd):
    output = tmp_path / "gate.json"
    arguments = ["gate", f"{CHEATS}:zeros", "--device", "cpu", "--baseline", "numpy", "--output", str(output)]
    interrupt_duel(monkeypatch, 2)
    assert main([*arguments, "--case", SMALL, "--case", "B1,H1,S64,D32,float32"]) == 130
    printed = capfd.readouterr()
    assert f"have a verdict are in {output}; the one under way is lost" in printed.err and "FAIL" in printed.out
    assert [gate["case"] for gate in json.loads(output.read_text())["gates"]] == [SMALL]


def test_what_is_said_to_be_kept_without_a_file(monkeypatch, capfd):
    interrupt_at(monkeypatch, "bench.commands.references:errors", 1)
    assert main(["references", "--device", "cpu", "--case", SMALL]) == 130
    assert "without --output nothing is kept" in capfd.readouterr().err


# ---- resuming ----


@pytest.mark.parametrize("changed", [["--seed", "1"], ["--rounds", "25"], ["--seconds", "0.3"], ["--tight", "0.5"]])
def test_measure_does_not_resume_under_other_options(changed, tmp_path, monkeypatch, capfd):
    arguments = ["measure", "--device", "cpu", "--case", SMALL, "--kernels", "cpu_simd", "--peers", "none", "--seconds",
                 "0.2", "--output", str(tmp_path / "measure.json")]  # fmt: skip
    calls = interrupt_at(monkeypatch, "bench.commands.measure:cell")
    for line in (arguments, arguments, [*arguments, *changed]):
        assert main(line) == 0
    assert calls.count("bench.commands.measure:cell") == 2


@pytest.mark.parametrize("changed", [["--seconds", "0.3"], ["--arrays", "numpy"]])
def test_score_does_not_resume_under_other_options(changed, tmp_path, monkeypatch, capfd):
    arguments = ["score", "cpu_ref", "--device", "cpu", "--baseline", "numpy", "--filter", "S128,D64,float32$",
                 "--seconds", "0.2", "--output", str(tmp_path / "score.json")]  # fmt: skip
    calls = interrupt_duel(monkeypatch)
    for line in (arguments, arguments, [*arguments, *changed]):
        assert main(line) == 0
    assert len(calls) == 2
