"""Charts: which problems make a series, which implementations a ladder, and that both are drawn."""

from pathlib import Path

import pytest

from bench import report
from bench.__main__ import main
from bench.commands import plot
from tests.laboratory.support.command import command


@pytest.mark.parametrize("kind", plot.KINDS)
def test_plots_are_drawn(kind, tmp_path, capfd):
    pytest.importorskip("matplotlib")

    def cell(seq, causal):
        case = f"B1,H4,S{seq},D64,float16" + (",causal=True" if causal else "")
        figures = {
            n: {"us": 10.0 * i, "tflops": 5.0 / i, "frobenius": 2e-4 * i}
            for i, n in enumerate(("simt", "torch-cudnn"), 1)
        }
        return {"case": case, "cache": "hot", "figures": figures}

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
    cells = [{"case": case, "cache": "hot", "figures": {"simt": {"tflops": 1.0}}} for case in [*others, *paper]]
    found = plot.series(cells)
    assert [[cell["case"] for _, cell in sorted(lengths.items())] for lengths in found.values()] == [others[-3:], paper]
    assert [key[1:] for key in found] == [("H8, D64, float16, hot", "batch 1", "full"),
                                          ("H16, D128, bfloat16, layout=bshd, hot", "16384 tokens", "full")]  # fmt: skip
    assert plot.series(cells[:6]) == {}
    packed = [f"B2,H4,S{s},D64,float16,q=packed,k=packed,slack=0,operation=backward" for s in (128, 512, 2048)]
    assert plot.series([{"case": case, "cache": "hot", "figures": {"simt": {"tflops": 1.0}}} for case in packed]) == {}
    assert plot._length_ticks([4096, 4000, 512, 16384]) == {512: "512", 4000: "4000", 16384: "16k"}


def test_a_ladder_of_a_problem_that_others_are_filtered_out_of(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    one, two = ("B8,H16,S2048,D128,bfloat16,layout=bshd", "B8,H16,S2048,D128,bfloat16,causal=True,layout=bshd")
    figures = {"us": 10.0, "tflops": 5.0, "frobenius": 2e-4}
    cells = {one: {"case": one, "cache": "hot", "figures": {"wmma": figures, "torch-math": figures}},
             two: {"case": two, "cache": "hot", "figures": {"simt": figures}}}  # fmt: skip
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
