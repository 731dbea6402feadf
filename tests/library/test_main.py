"""``python -m fa_ext``: the table, the JSON, the exit status, and that a broken kernel is noticed."""

import ctypes
import io
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import fa_ext
from fa_ext import __main__ as command
from fa_ext import _core


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-m", "fa_ext", "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_kernel_is_shown_with_every_stage(found):
    assert [kernel["kernel"] for kernel in found["kernels"]] == list(fa_ext.kernels())
    for kernel in found["kernels"]:
        assert list(kernel["stages"]) == ["build", "load", "launch", "sanity", "correctness", "time"]
        assert kernel["status"] in ("ok", "absent") and (kernel["note"] or kernel["status"] == "ok")
        if kernel["status"] == "ok":
            assert kernel["us"] > 0 and 0 <= kernel["max_abs"] <= kernel["max_abs_bound"]


def test_cpu_kernels_run_everywhere(found):
    cpu = [kernel for kernel in found["kernels"] if kernel["device"] == "cpu"]
    assert cpu and all(kernel["status"] == "ok" for kernel in cpu)


def test_a_chaos_build_says_so(found):
    assert "A chaos build" in command.table(found | {"chaos": True})
    assert "A chaos build" not in command.table(found | {"chaos": False})


def test_the_table_is_readable(found):
    text = command.table(found)
    for kernel in found["kernels"]:
        assert any(line.startswith(kernel["kernel"]) for line in text.splitlines())
    assert max(map(len, text.splitlines())) < 200


def broken(how):
    def attention(q, k, v, **options):
        result = fa_ext.attention(q, k, v, **options)
        how(options["out"])
        return result

    return attention


class Package:
    """fa_ext with an attention of its own."""

    def __init__(self, attention):
        self.attention = attention

    def __getattr__(self, name):
        return getattr(fa_ext, name)


def raises(out):
    raise fa_ext.CudaError("an illegal address")


def leaves_nan(out):
    out = out[0] if isinstance(out, tuple) else out
    out[0, 0, 3, 5] = np.nan


@pytest.mark.parametrize(("how", "stage"), [(raises, "launch"), (leaves_nan, "sanity")])
def test_a_broken_kernel_fails_at_its_stage(how, stage):
    kernel = fa_ext.kernels()[-1]
    result = command.check_kernel(kernel, "cpu", Package(broken(how)), None)
    assert result["status"] == "FAILED" and result["stages"][stage] == "FAILED" and result["note"]


@pytest.mark.parametrize(("seconds", "size"), [(0, command.TIMED), (2 * command.SLOW, command.SMALL)])
def test_a_slow_kernel_is_checked_on_a_smaller_problem(seconds, size, monkeypatch):
    def attention(q, k, v, **options):
        seen.append(q.shape)
        time.sleep(seconds)
        return fa_ext.attention(q, k, v, **options)

    seen, shown = [], []
    monkeypatch.setattr(command, "SLOW", command.SLOW if seconds else 60)
    result = command.check_kernel("cpu_simd", "cpu", Package(attention), None, shown.append)
    assert result["status"] == "ok" and result["input"] == command.name_of(size)
    assert ("at S128" in result["stages"]["time"]) is (size is command.SMALL)
    assert seen[0][2] == 128 and {shape[2] for shape in seen[3:]} == {size["seq_q"]}
    assert shown == ["load", "launch", "sanity", "correctness", "time"]


def test_timing_ends_after_a_second():
    calls = []
    assert command.time_call(lambda: (calls.append(1), time.sleep(0.3)), lambda: None) > 0
    assert len(calls) <= 9


def test_progress_is_one_line_of_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(command, "check_kernel", lambda kernel, *_: _[-1]("launch") or {"kernel": kernel, "status": "ok"})
    monkeypatch.setattr(sys, "stderr", terminal)
    command.survey()
    names = fa_ext.kernels()
    lines = [f"fa_ext: {kernel}, {number} of {len(names)} kernels: launch" for number, kernel in enumerate(names, 1)]
    assert terminal.getvalue() == "".join(f"\r\x1b[K{line}" for line in [*lines, ""])
    monkeypatch.setattr(sys, "stderr", pipe)
    command.survey()
    assert pipe.getvalue() == ""


def test_a_wrong_result_fails_at_correctness(monkeypatch):
    kernel = fa_ext.kernels()[-1]
    package = Package(fa_ext.attention)
    package.verify = lambda q, k, v, **options: fa_ext.verify(q, k, np.zeros_like(v), **options).__class__(
        **{**fa_ext.verify(q, k, v, **options).as_dict(), "passed": False, "failures": ("max |error| 1 is over 0.1",)}
    )
    result = command.check_kernel(kernel, "cpu", package, None)
    assert result["status"] == "FAILED" and result["stages"]["correctness"] == "FAILED"
    assert "over" in result["note"] and result["stages"]["time"] == "-"


def test_a_missing_device_is_no_failure():
    result = command.check_kernel("simt", "cuda", fa_ext, "no NVIDIA driver")
    assert result["status"] == "absent" and result["note"] == "no NVIDIA driver"


@pytest.mark.parametrize(("answer", "status"), [("not here", "absent"), ("refuses", "refuses")])
def test_what_a_refusal_is_about(answer, status):
    package = Package(fa_ext.attention)
    package.to_device = lambda x: x
    package._core = SimpleNamespace(answers=lambda *arrays, **options: {"simt": (answer, "because", None)})
    result = command.check_kernel("simt", "cuda", package, None)
    assert result["status"] == status and result["note"] == "because"


def outcome(*states):
    return command.passes([{"kernel": "simt", "status": state} for state in states])


def test_a_kernel_that_refuses_fails_and_so_does_a_build_that_can_run_none():
    assert outcome("ok") and outcome("absent", "ok")
    assert not outcome("ok", "refuses") and not outcome("ok", "FAILED")
    assert not outcome() and not outcome("absent")


def test_a_build_without_kernels_says_so(found, monkeypatch, capsys):
    monkeypatch.setattr(fa_ext, "kernels", lambda: ())
    assert command.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: this build has no kernel"
    absent = found | {"kernels": [found["kernels"][-1] | {"status": "absent"}], "passed": False}
    assert command.table(absent).splitlines()[-1] == "FAILED: no kernel of this build can run here"


def test_the_cpu_is_named(found):
    assert found["cpu"]["name"] not in ("", "CPU")
    line = next(line for line in command.table(found).splitlines() if line.startswith("CPU: "))
    assert found["cpu"]["name"] in line
    if "cpu_simd" in fa_ext.kernels():
        assert re.search(r"cpu_simd with (amxbf16|avx512bf16|avx512|avx2|generic)$", line)


def test_the_instruction_set_is_the_one_that_runs():
    if "cpu_simd" not in fa_ext.kernels():
        pytest.skip("this build has no cpu_simd")
    q, k, v = command.inputs(command.RAGGED)
    arrays = [x.astype(np.float32) for x in (q, k, v)]
    chosen = fa_ext.attention(*arrays, causal="bottom_right", kernel="cpu_simd")
    force = ctypes.CDLL(_core.__file__).fa_cpu_simd_force
    try:
        force(_core.cpu_info()["cpu_simd"].encode())
        np.testing.assert_array_equal(fa_ext.attention(*arrays, causal="bottom_right", kernel="cpu_simd"), chosen)
    finally:
        force((os.environ.get("FA_EXT_CPU_ISA") or "").encode())


def test_the_cpu_has_a_name_without_proc(monkeypatch):
    def unreadable(self, **options):
        raise OSError

    monkeypatch.setattr(command.Path, "read_text", unreadable)
    assert command.cpu_model()


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "survey", interrupted)
    assert command.main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_exit_status_is_1_when_a_row_fails(found, monkeypatch, capsys):
    survey = json.loads(json.dumps(found))
    survey["kernels"][0] |= {"status": "FAILED", "note": "because"}
    survey["passed"] = False
    monkeypatch.setattr(command, "survey", lambda: survey)
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "because" in printed
    assert command.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
