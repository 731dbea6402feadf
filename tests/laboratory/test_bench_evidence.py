"""The record of tests and figures: what a change makes stale, what is redone then, how records are read and merged."""

import argparse
import copy
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import machine, problems, report
from bench.__main__ import main
from bench.commands import evidence
from bench.implementations import peers
from bench.machine import build
from bench.recording import record, suites

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

ROOT = Path(__file__).resolve().parents[2]
WHERE = {"device": "cuda", "name": "A GPU"}


# ---- machine code ----


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Sources of two kernels that share a header."""
    monkeypatch.setattr(build.rules, "kernel_names", lambda: ["wmma", "simt", "cpu_ref"])
    for name in ("kernels/simt.cu", "kernels/wmma.cu", "kernels/both.cuh", "csrc/status.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def codes_of(root, **digests):
    """Codes as a build in `root` has them: simt, wmma and core, with the device digests that are given."""
    sources = {"simt": ("kernels/simt.cu", "kernels/both.cuh"), "wmma": ("kernels/wmma.cu", "kernels/both.cuh"),
               "core": ("csrc/status.c",)}  # fmt: skip
    found = {}
    for kernel, names in sources.items():
        code = {"kernel": kernel, "scheme": 1, "device": digests.get(kernel, "d"), "host": "h"}
        texts = {name: build.rules.digests.text_hash(root / name) for name in names}
        found[kernel] = code | {"id": machine.short_hash(code), "compilers": "nvcc 13", "sources": texts}
    return found


def test_the_same_text_is_fresh_without_a_build(tree):
    for code in codes_of(tree).values():
        assert record.freshness(code, {}, tree) == ("fresh", "the same sources")


def test_an_edit_without_a_build_is_unknown_and_named(tree):
    then = codes_of(tree)
    (tree / "kernels/simt.cu").write_text("// a comment")
    state, why = record.freshness(then["simt"], {}, tree)
    assert state == "unknown" and "kernels/simt.cu" in why and "no build" in why
    assert record.freshness(then["wmma"], {}, tree)[0] == record.freshness(then["core"], {}, tree)[0] == "fresh"
    # Nor does a build of the text before the edit tell.
    state, why = record.freshness(then["simt"], then, tree)
    assert state == "unknown" and "older than kernels/simt.cu" in why


def test_a_build_tells_a_comment_from_another_constant(tree):
    then = codes_of(tree)
    (tree / "kernels/both.cuh").write_text("// a comment")
    now = codes_of(tree)
    assert all(record.freshness(then[name], now, tree)[0] == "fresh" for name in then)
    now = codes_of(tree, simt="another")
    state, why = record.freshness(then["simt"], now, tree)
    assert (state, why) == ("stale", "other device code; changed: kernels/both.cuh")
    assert record.freshness(then["wmma"], now, tree)[0] == "fresh"


def test_another_compiler_or_scheme_is_unknown(tree):
    then = codes_of(tree)
    (tree / "kernels/simt.cu").write_text("x")
    for name, value in (("compilers", "nvcc 14"), ("scheme", 2)):
        now = codes_of(tree, simt="another")
        now["simt"][name] = value
        state, why = record.freshness(then["simt"], now, tree)
        assert state == "unknown" and str(value) in why


def test_a_kernel_that_is_gone_is_stale(tree):
    gone = codes_of(tree)["simt"] | {"kernel": "of_old", "sources": {"kernels/of_old.cu": "12345678"}}
    assert record.freshness(gone, {}, tree) == ("stale", "no kernel of that name is left")


# ---- a record ----


def piece(of, kernels, date="2026-01-01 00:00 UTC", **fields):
    return {"code": of.of_kernels(kernels), "context": of.context({"gpu": "x"}), "date": date} | fields


def ran(of, kernels, us, date="2026-01-01 00:00 UTC"):
    """A run of kernels beside a peer."""
    figures = {name: {"us": us} for name in (*kernels, "torch-flash")}
    return piece(of, kernels, date, figures=figures, refused={})


@pytest.fixture
def empty(tree, tmp_path):
    return record.Record(tmp_path / "a-gpu.json", WHERE, codes_of(tree), tree)


KEY = "B1,H1,S8,D8,float16 hot"


def test_one_kernel_is_refreshed_alone_beside_the_peers_of_its_own_run(empty):
    empty.put_run(KEY, ran(empty, ["simt", "wmma"], 10.0))
    empty.put_run(KEY, ran(empty, ["simt"], 5.0, "2026-01-02 00:00 UTC"))
    older, newer = empty.cells[KEY]
    assert set(older["figures"]) == {"wmma", "torch-flash"} and len(older["code"]) == 1
    assert record.newest(empty.cells[KEY], "wmma") is older and record.newest(empty.cells[KEY], "simt") is newer
    cell = record.cell(KEY, empty.cells[KEY])
    assert (cell["case"], cell["cache"]) == tuple(KEY.split())
    assert {n: f["us"] for n, f in cell["figures"].items()} == {"simt": 5.0, "wmma": 10.0, "torch-flash": 5.0}
    # The last kernel takes the run with it, peers and all.
    empty.put_run(KEY, ran(empty, ["wmma"], 4.0, "2026-01-03 00:00 UTC"))
    assert [run["date"][:10] for run in empty.cells[KEY]] == ["2026-01-02", "2026-01-03"]


def test_a_whole_piece_ends_those_of_some_files_before_it(empty):
    empty.put("tests", "core test_x", piece(empty, ["core"], "2026-01-01 00:00 UTC", files="test_x", passed=1))
    empty.put("tests", "core test_y", piece(empty, ["core"], "2026-01-03 00:00 UTC", files="test_y", passed=1))
    empty.put("tests", "simt", piece(empty, ["simt"], "2026-01-02 00:00 UTC", passed=3))
    assert len(empty.part("tests")) == 3
    said = evidence.summary(empty.document)
    assert "3 passed, 0 failed, 0 skipped; 1 passed, 0 failed, 0 skipped of test_x; 1 passed" in said
    empty.put("tests", "core", piece(empty, ["core"], "2026-01-02 00:00 UTC", passed=9))
    assert set(empty.part("tests")) == {"core", "core test_y", "simt"}


def test_merging_brings_no_piece_of_some_files_back(empty, tree, tmp_path):
    empty.put("tests", "core", piece(empty, ["core"], "2026-01-02 00:00 UTC", passed=9))
    other = record.Record(tmp_path / "other.json", WHERE, codes_of(tree), tree)
    for day, name in ((1, "core test_x"), (3, "core test_y")):
        other.put("tests", name, piece(other, ["core"], f"2026-01-0{day} 00:00 UTC", files=name[5:], passed=1))
    assert record.merge(empty, other.document) == [] and set(empty.part("tests")) == {"core", "core test_y"}


def test_runs_of_training_stand_beside_each_other(empty, tree, tmp_path):
    for key in ("torch", "jax"):
        empty.put("training", key, piece(empty, ["simt", "wmma"], runs={}))
    assert set(empty.part("training")) == {"torch", "jax"}
    other = record.Record(tmp_path / "other.json", WHERE, codes_of(tree), tree)
    other.put("training", "torch, dropout 0.1", piece(other, ["simt", "wmma"], runs={}))
    assert record.merge(empty, other.document) == [] and len(empty.part("training")) == 3
    assert not any("training" in parts for parts in record.gaps(empty.document).values())


def test_a_record_survives_its_file_and_keeps_only_what_is_used(empty, tree):
    empty.put("sweep", "simt", piece(empty, ["simt"], judged=3, share=1 / 3, failures=["x", "ü"]))
    empty.put_run(KEY, ran(empty, ["wmma"], 1 / 3))
    empty.of_kernels(["core"])
    empty.context({"never": "used"})
    empty.save()
    text = empty.path.read_text()
    again = record.Record(empty.path, WHERE, codes_of(tree), tree)
    assert sorted(c["kernel"] for c in again.document["codes"].values()) == ["simt", "wmma"]
    assert list(again.document["contexts"].values()) == [{"gpu": "x"}]
    assert again.part("sweep")["simt"]["share"] == 0.3333333 and again.cells == empty.cells
    again.save()
    assert empty.path.read_text() == text
    assert "ü" in text and text.count("\n") > 10 and max(map(len, text.splitlines())) < 300
    with pytest.raises(report.UsageError, match="no record of format"):
        record.Record(empty.path, {"device": "cpu", "name": "A GPU"}, {})


def test_json_is_written_as_it_was(tmp_path):
    random.seed(5)
    leaves = (1, 2.5, "text", None, True, [], {}, [1, 2], [[1], [2]])

    def value(depth):
        if depth == 0 or random.random() < 0.2:
            return random.choice(leaves)
        if random.random() < 0.3:
            return [value(depth - 1) for _ in range(random.randint(0, 3))]
        return {f"k{i}" * random.randint(1, 30): value(depth - 1) for i in range(random.randint(0, 4))}

    for _ in range(300):
        document = value(5)
        assert json.loads(record.written(document)) == document


def test_the_states_of_kernels_are_those_of_their_worst_pieces(empty, tree):
    for kernel in ("simt", "wmma"):
        empty.put("sweep", kernel, piece(empty, [kernel]))
    empty.put_run(KEY, ran(empty, ["simt", "wmma"], 1.0))
    assert record.states(empty.document, {}, tree)["simt"]["state"] == "fresh"
    empty.put("overhead", "figures", piece(empty, ["core"]))
    (tree / "kernels/both.cuh").write_text("x")
    now = codes_of(tree, simt="another")
    found = record.states(empty.document, now, tree)
    of = {name: entry["state"] for name, entry in found.items() if name not in record.other_kernels("cuda")}
    assert of == {"core": "fresh", "simt": "stale", "wmma": "fresh"}
    assert found["simt"]["parts"] == {"sweep": 1, "measure": 1}
    # A new sweep of simt leaves its cell stale.
    empty.built = now
    empty.put("sweep", "simt", piece(empty, ["simt"]))
    found = record.states(empty.document, now, tree)
    assert found["simt"]["state"] == "stale" and found["simt"]["parts"] == {"measure": 1}


def test_a_kernel_without_a_part_that_others_have_is_stale(empty, tree):
    empty.put("sweep", "simt", piece(empty, ["simt"]))
    empty.put("tests", "simt", piece(empty, ["simt"]))
    empty.put("tests", "wmma", piece(empty, ["wmma"]))
    found = record.states(empty.document, empty.built, tree)
    assert {name: (entry["state"], entry["why"]) for name, entry in found.items()} == {
        "core": ("stale", "without tests"), "simt": ("fresh", "the same sources"), "wmma": ("stale", "without sweep"),
        **{name: ("stale", "without " + ", ".join(part for part in ("tests", "sweep") if part in parts))
           for name, parts in record.other_kernels("cuda").items()}}  # fmt: skip


def test_nothing_is_recorded_of_code_without_a_digest(empty):
    with pytest.raises(report.UsageError, match="no digests of minimal"):
        empty.of_kernels(["simt", "minimal"])


def test_sources_are_renewed_beside_unchanged_machine_code(empty, tree):
    for kernel in ("simt", "wmma"):
        empty.put("sweep", kernel, piece(empty, [kernel]))
    (tree / "kernels/both.cuh").write_text("// a comment")
    assert empty.renew_sources() == []  # the build is older than the text
    empty.built = codes_of(tree, simt="another")
    assert empty.renew_sources() == ["wmma"]
    found = record.states(empty.document, {}, tree)
    assert found["wmma"]["why"] == "the same sources" and found["simt"]["state"] == "unknown"


# ---- merging ----


def test_records_merge_in_any_order(tree, tmp_path):
    parts = []
    for day, kernels in enumerate([["simt", "wmma"], ["simt"], ["simt", "wmma"], ["wmma"]], 1):
        one = record.Record(tmp_path / f"{day}.json", WHERE, codes_of(tree), tree)
        date = f"2026-01-0{day} 00:00 UTC"
        one.put("sweep", kernels[0], piece(one, kernels[:1], date, judged=day))
        one.put_run(KEY, ran(one, kernels, float(day), date))
        parts.append(one.document)
    found = []
    for order in itertools.permutations(parts):
        merged = record.Record(tmp_path / "merged.json", WHERE, codes_of(tree), tree)
        assert [why for other in order for why in record.merge(merged, copy.deepcopy(other))] == []
        merged.save()
        found.append(merged.path.read_text())
        merged.path.unlink()
    assert len(set(found)) == 1
    document = json.loads(found[0])
    assert {k: p["judged"] for k, p in document["parts"]["sweep"].items()} == {"simt": 3, "wmma": 4}
    assert {n: f["us"] for n, f in record.cell(KEY, document["cells"][KEY])["figures"].items()} == {
        "simt": 3.0, "wmma": 4.0, "torch-flash": 4.0}  # fmt: skip


def test_pieces_of_other_machine_code_are_not_merged(empty, tree, tmp_path):
    other = record.Record(tmp_path / "other.json", WHERE, codes_of(tree, simt="of another build"))
    other.put("sweep", "simt", piece(other, ["simt"]))
    other.put("sweep", "wmma", piece(other, ["wmma"]))
    for code in other.document["codes"].values():
        code["sources"] = {name: "other" for name in code["sources"]}
    refused = record.merge(empty, other.document)
    assert refused == ["sweep simt: of other machine code than is here"] and list(empty.part("sweep")) == ["wmma"]


def test_pieces_of_another_build_of_the_same_sources_are_merged(tmp_path, capfd):
    codes = machine.built_codes()
    kernel = next(name for name in codes if name != "core")
    output, file = tmp_path / "machine.json", tmp_path / "chaos.json"
    document = {"part": "chaos", "machine": WHERE, "date": "2026-01-01 00:00 UTC", "sources": machine.source_hashes(),
                "pieces": {kernel: {"cases": 30, "hangs": [], "seeds": [1, 2]}}}  # fmt: skip
    report.write_json(file, document)
    arguments = ["evidence", "--merge", str(file), "--output", str(output)]
    assert main(arguments) == 0 and "chaos: 1 kernels" in capfd.readouterr().out
    held = json.loads(output.read_text())
    assert held["parts"]["chaos"][kernel]["cases"] == 30 and held["parts"]["chaos"][kernel]["code"] == [codes[kernel]["id"]]
    document["sources"] |= {next(iter(codes[kernel]["sources"])): "other"}
    report.write_json(file, document)
    output.unlink()
    assert main(arguments) == 1 and f"not merged: chaos.json: chaos {kernel}: of other sources" in capfd.readouterr().err
    report.write_json(file, {"cells": {}})
    assert main(arguments) == 3 and "holds neither a record nor pieces" in capfd.readouterr().err


# ---- the command ----


def test_evidence_is_made_kept_and_redone_for_one_kernel(tmp_path, monkeypatch, capfd):
    output = tmp_path / "machine.json"
    line = ["evidence", "--device", "cpu", "--parts", "tests,sanitizer,overhead,measure", "--filter",
            r"test_import|S512,D64,float32$", "--kernels", "cpu|core", "--seconds", "0.3", "--output", str(output)]  # fmt: skip
    assert main(line) == 0
    document = json.loads(output.read_text())
    (key,) = (key for key in document["parts"]["tests"] if key.startswith("core "))
    assert document["parts"]["tests"][key]["passed"] > 5 and document["parts"]["tests"][key]["files"]
    tests, key = key, "B1,H8,S512,D64,float32 hot"
    assert {"cpu_simd", "numpy"} <= set(document["cells"][key][0]["figures"])
    assert evidence.check(strict=True, folder=tmp_path) == 0
    printed = capfd.readouterr().out
    assert "evidence machine.json: fresh: " in printed and "  cpu_simd: fresh: the same sources" in printed
    assert list(record.cells(tmp_path)) == [f"machine {key}"]
    # The same line again finds all there.
    assert main(line) == 0 and json.loads(output.read_text()) == document
    # A change of cpu_simd's machine code makes it stale, and nothing else; the same line redoes its pieces alone.
    for code in document["codes"].values():
        if code["kernel"] == "cpu_simd":
            code["host"], code["sources"]["csrc/cpu/cpu_simd.c"] = "other", "12345678"
    output.write_text(json.dumps(document))
    capfd.readouterr()
    assert evidence.check(strict=True, folder=tmp_path) == 1 and evidence.check(strict=False, folder=tmp_path) == 0
    printed = capfd.readouterr().out
    assert "  cpu_simd: stale: other host code; changed: csrc/cpu/cpu_simd.c (1 measure, 1 tests)" in printed
    assert "  cpu_ref: fresh" in printed and "  core: fresh" in printed
    assert main([*line, "--refresh"]) == 0
    again = json.loads(output.read_text())
    assert evidence.check(strict=True, folder=tmp_path) == 0
    assert again["parts"]["tests"][tests] == document["parts"]["tests"][tests]
    timed = set(again["cells"][key][-1]["figures"])  # and such peers as are installed
    assert timed - peers.PEERS.keys() == {"cpu_simd"} and "numpy" in timed


def test_tests_that_stand_nothing_beside_them_are_a_part(tmp_path, monkeypatch):
    output = tmp_path / "machine.json"
    line = ["evidence", "--device", "cpu", "--parts", "alone", "--kernels", "core", "--filter", "test_device_arrays", "--output"]
    assert main([*line, str(output)]) == 0
    document = json.loads(output.read_text())
    assert list(document["parts"]) == ["alone"] and "alone of test_device_arrays" in evidence.summary(document)
    (found,) = document["parts"]["alone"].values()
    assert found["passed"] + found["skipped"] == 1 and found["failed"] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-4")
    run = argparse.Namespace(device="cuda", args=argparse.Namespace(filter="test_bench_gpu"))
    assert evidence.Run._gpus(run) == ["3", "GPU-4"] and evidence.Run._gpus(argparse.Namespace(device="cpu")) == []
    *files, of, repeats, _, marks = evidence.Run._pytest(run, "core", "not idle")
    assert [Path(file).name for file in files] == ["test_bench_gpu.py"] and (of, repeats) == ("--of=core", "--repeats=250")
    assert marks == "not emulated and not on_cpu and not idle"


def test_the_check_without_a_build_cannot_tell(tmp_path, monkeypatch, capfd):
    """Of the committed records: all that is changed is unknown, and stale only what was never run."""
    monkeypatch.setattr(machine, "built_codes", lambda: {})
    assert evidence.check(strict=False, as_json=True) == 0
    found = [kernel for entry in json.loads(capfd.readouterr().out) for kernel in entry["kernels"].values()]
    assert found and all(k["state"] in ("fresh", "unknown") or "without " in k["why"] for k in found)


def test_evidence_without_files_is_stale(tmp_path, capfd):
    assert evidence.check(strict=True, folder=tmp_path) == 1
    assert "stale: no file" in capfd.readouterr().out


def test_a_file_that_is_no_json_is_stale(tmp_path, capfd):
    (tmp_path / "half.json").write_text("{ half a")
    assert evidence.check(strict=True, folder=tmp_path) == 1
    assert "evidence half.json: stale: not JSON" in capfd.readouterr().out


def test_chaos_and_soak_say_what_they_need(tmp_path, capfd):
    assert main(["evidence", "--device", "cpu", "--parts", "chaos", "--output", str(tmp_path / "r.json")]) == 3
    assert "--merge FILE" in capfd.readouterr().err


def test_each_test_is_of_one_kernel_or_of_the_core():
    """--of parts the tests: what the pieces count is each of them once."""

    def collected(*options):
        line = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *options, "tests/library/test_import.py",
                "tests/contract/test_contract.py", "tests/kernels/test_cpu_simd.py", "tests/kernels/test_wmma.py",
                "tests/contract/test_serving.py"]  # fmt: skip
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode in (0, 5), done.stderr
        return sum(int(text.rpartition(": ")[2]) for text in done.stdout.splitlines() if text.startswith("tests/"))

    import fa_ext

    counts = {name: collected("--of", name) for name in (*fa_ext.kernels(), "core")}
    assert all(counts.values()) and sum(counts.values()) == collected()


def test_what_is_measured_without_peers_is_measured_only_so():
    """A run without peers would take the place of one beside them."""
    alone = {name: evidence.alone(name) for name in evidence.GPU_PRESETS}
    assert {name for name, cases in alone.items() if cases} == set(evidence.ALONE)
    for name, cases in alone.items():
        assert not cases & {case for other in alone if other != name for case in problems.preset(other)}, name
    assert len(alone["options"]) == 35 < len(problems.preset("options"))


def test_the_pick_is_close_to_the_best_recorded_kernel():
    """In every committed cell the kernel that the library took is within 5% of the fastest one measured there; dense cells are
    test_choice.py's and test_backward_choice.py's, which ask for today's pick. Packed queries are never `serve_sm90`'s unless it
    is named: shapes do not say how few they are, and a sequence has one kernel in every batch."""
    of_others = (",q=", "operation=merge", "operation=append")
    found = {key: cell for key, cell in record.cells().items() if cell.get("picked") and any(mark in key for mark in of_others)}
    if not found:
        pytest.skip("no committed measurement")
    late = {}
    for key, cell in found.items():
        others = {*peers.PEERS, *(["serve_sm90"] if ",q=packed" in key else [])}
        kernels = {n: f["us"] for n, f in cell["figures"].items() if n not in others}
        if cell["picked"] in kernels and kernels[cell["picked"]] > 1.05 * min(kernels.values()):
            late[key] = (cell["picked"], {n: round(us, 2) for n, us in kernels.items()})
    assert not late


# ---- what tests and sweeps print ----


def test_a_sweep_adds_up_its_processes_and_counts_a_dead_one_as_failed():
    whole = 'a mismatch\n  python -m tests.contract "X" --kernel simt --on cupy\nsimt: 7 judged, 1 failed, 2 not taken\n  2 why\n'
    found = suites.sweep_result([whole, "simt: 5 judged, 0 failed, 0 not taken\n", "Segmentation"])
    assert (found["judged"], found["failed"], found["not_taken"]) == (12, 2, 2)
    assert found["failures"] == ['python -m tests.contract "X" --kernel simt --on cupy', "ended early: Segmentation"]


def test_the_record_keeps_why_a_process_died():
    words = suites._last_words("." * 5000 + "Fatal Python error: Segmentation fault\n  File x" + "\nmodule" * 5000)
    assert words.startswith("Fatal Python error: Segmentation fault") and len(words) == 2000
    assert suites._last_words("." * 5000 + "usage: pytest") == "." * 487 + "usage: pytest"


def test_junit_is_counted():
    text = """<testsuites><testsuite><testcase classname="t" name="a"/>
    <testcase classname="t" name="b"><failure message="boom
    more"/></testcase><testcase classname="t" name="c"><skipped message="no GPU"/></testcase>
    <testcase classname="t" name="d"><error message="setup"/></testcase></testsuite></testsuites>"""
    found = suites.parse_junit(text)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"][0].startswith("t.b: boom") and found["reasons"] == {"no GPU": 1}


def test_shards_count_as_one_run(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--shard', default='0/1')\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    first, count = map(int, config.getoption('--shard').split('/'))\n"
        "    items[:] = items[first::count]\n"
    )
    for n in range(5):
        (tmp_path / f"test_{n}.py").write_text(f"def test_right(): pass\ndef test_wrong(): assert {n}\n")
    (tmp_path / "test_gpu.py").write_text(
        "import os, pytest\n"
        "def test_sees_one(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '1'\n"
        "@pytest.mark.skip(reason='why')\ndef test_skipped(): pass\n"
        "@pytest.mark.slow\ndef test_that_the_default_leaves_out(): pass\n"
    )
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    files = [str(tmp_path / f"test_{n}.py") for n in range(5)]
    wanted = {"many": [([*files, *options, f"--shard={n}/3"], None) for n in range(3)],
              "pinned": [([str(tmp_path / "test_gpu.py"), *options], "1")]}  # fmt: skip
    found = dict(suites.run_shards(wanted, 2, time.monotonic() + 60))
    many, pinned = found["many"], found["pinned"]
    assert (many["passed"], many["failed"], many["skipped"]) == (9, 1, 0)
    assert len(many["failures"]) == 1 and "test_0" in many["failures"][0]
    assert (pinned["passed"], pinned["failed"], pinned["reasons"]) == (2, 0, {"why": 1})
    died = suites.merged([many, {"error": "died", "seconds": 1.0}])
    assert (died["passed"], died["failed"], died["skipped"]) == (9, 2, 0) and died["failures"][1] == "died"
    assert list(suites.run_shards(wanted, 2, time.monotonic())) == []  # none has begun in time


def test_sanitizer_summary():
    assert suites.sanitizer_result("x\n========= ERROR SUMMARY: 0 errors\n") == "0 errors"
    assert suites.sanitizer_result("RACECHECK SUMMARY: 2 hazards displayed") == "2 hazards displayed"
    assert suites.sanitizer_result("") == "no summary printed"
