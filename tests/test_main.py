"""``python -m fa_ext``: the table, the JSON, the exit status, and that a broken row is noticed."""

import json
import subprocess
import sys

import numpy as np
import pytest

import fa_ext
from fa_ext import __main__ as command


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-m", "fa_ext", "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_row_is_shown_with_every_stage(found):
    assert [row["row"] for row in found["rows"]] == list(fa_ext.kernels())
    for row in found["rows"]:
        assert list(row["stages"]) == ["build", "load", "launch", "sanity", "correctness", "time"]
        assert row["status"] in ("ok", "absent", "refuses") and (row["note"] or row["status"] == "ok")
        if row["status"] == "ok":
            assert row["us"] > 0 and 0 <= row["max_abs"] <= row["max_abs_bound"]


def test_cpu_rows_run_everywhere(found):
    cpu = [row for row in found["rows"] if row["device"] == "cpu"]
    assert cpu and all(row["status"] == "ok" for row in cpu)


def test_the_table_is_readable(found):
    text = command.table(found)
    for row in found["rows"]:
        assert any(line.startswith(row["row"]) for line in text.splitlines())
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
def test_a_broken_row_fails_at_its_stage(how, stage):
    row = fa_ext.kernels()[-1]
    result = command.check_row(row, "cpu", Package(broken(how)), None)
    assert result["status"] == "FAILED" and result["stages"][stage] == "FAILED" and result["note"]


def test_a_wrong_result_fails_at_correctness(monkeypatch):
    row = fa_ext.kernels()[-1]
    package = Package(fa_ext.attention)
    package.verify = lambda q, k, v, **options: fa_ext.verify(q, k, np.zeros_like(v), **options).__class__(
        **{**fa_ext.verify(q, k, v, **options).as_dict(), "passed": False, "failures": ("max |error| 1 is over 0.1",)}
    )
    result = command.check_row(row, "cpu", package, None)
    assert result["status"] == "FAILED" and result["stages"]["correctness"] == "FAILED"
    assert "over" in result["note"] and result["stages"]["time"] == "-"


def test_a_missing_device_is_no_failure():
    result = command.check_row("simt", "cuda", fa_ext, "no NVIDIA driver")
    assert result["status"] == "absent" and result["note"] == "no NVIDIA driver"


def test_exit_status_is_1_when_a_row_fails(found, monkeypatch, capsys):
    survey = json.loads(json.dumps(found))
    survey["rows"][0] |= {"status": "FAILED", "note": "because"}
    survey["passed"] = False
    monkeypatch.setattr(command, "survey", lambda: survey)
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "because" in printed
    assert command.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
