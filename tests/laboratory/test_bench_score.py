"""``bench score`` and ``bench references``: what counts as correct and faster, and which backend is off."""

import json

import pytest

from bench import problems
from bench.__main__ import main
from bench.commands import references, score
from tests.laboratory.support.command import CHEATS, SMALL, command

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- score ----


def test_score_counts_strictly_and_refuses_zeros(tmp_path, capfd):
    lines = "S128,D64,float32$"
    common = ["--device", "cpu", "--baseline", "numpy", "--filter", lines, "--seconds", "0.3"]
    status, honest = command(capfd, "score", f"{CHEATS}:honest", *common, "--output", tmp_path / "score.json")
    assert status == 0 and honest["fast"]["fast_0"] == 1.0
    assert command(capfd, "score", f"{CHEATS}:honest", *common, "--output", tmp_path / "score.json")[1] == honest
    zeros = command(capfd, "score", f"{CHEATS}:zeros", *common)[1]
    assert set(zeros["fast"].values()) == {0.0}


def test_an_interrupted_score_keeps_what_it_has_and_carries_on(tmp_path, monkeypatch, capfd):
    """And scores the library's own choice of kernel."""
    output = tmp_path / "score.json"
    one = score.score_one
    begun = []

    def interrupted(candidate, case, *rest):
        begun.append(case)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return one(candidate, case, *rest)

    arguments = ["score", "fa_ext", "--device", "cpu", "--baseline", "numpy", "--filter", "S1[0-9]*,D64,float32",
                 "--seconds", "0.2", "--output", str(output)]  # fmt: skip
    monkeypatch.setattr(score, "score_one", interrupted)
    assert main(arguments) == 130
    kept = json.loads(output.read_text())
    assert list(kept["cells"]) == begun[:1] and kept["fast"]["fast_0"] == 1.0
    monkeypatch.undo()
    document = command(capfd, *arguments[:7], "S128,D64,float32", *arguments[8:])[1]
    assert len(document["cells"]) == 2 and document["cells"][begun[0]] == kept["cells"][begun[0]]
    assert all(cell["correct"] and cell["us"]["fa_ext"] > 0 for cell in document["cells"].values())


def test_fast_p_is_strict():
    scored = [
        {"correct": c, "speedup": s} for c, s in ((True, 1.0), (True, 1.5), (True, 3.0), (False, 9.0), (True, None))
    ]
    assert score.fast_p(scored) == {"fast_0": 0.8, "fast_0.5": 0.6, "fast_0.8": 0.6, "fast_1": 0.4, "fast_1.5": 0.2,
                                    "fast_2": 0.2}  # fmt: skip


def test_scored_problems():
    for kind in ("cpu", "cuda"):
        found = problems.scored(kind)
        assert len(set(found)) == len(found) >= 100
        assert sum(c.seq_q >= 1024 for c in found) >= 30
        # Queries that see no key are NaN in torch: a problem that has them has no baseline.
        assert all(c.seq_q <= c.seq_k for c in found if c.causal)
        assert {c.dtype for c in found} == {"float16", "bfloat16", "float32"} and {bool(c.causal) for c in found} == {
            False,
            True,
        }


@pytest.mark.parametrize("case", [str(c) for c in problems.scored("cpu")[::9]])
def test_no_scored_problem_accepts_a_trivial_answer(case):
    assert score.meaningless(case, 0) is None


# ---- references ----


def test_references_judges_every_backend(capfd):
    status, document = command(capfd, "references", "--device", "cpu", "--case", SMALL, "--kernels")
    entries = references.every_entry(document)
    found = {e["name"] for e in entries if e.get("within")}
    assert status == 0 and {"numpy", "cpu_ref", "cpu_simd"} <= found
    assert {e["values"] for e in entries} == {"normal", "large", "offset", "sorted"}
    short = {s["name"]: s for s in document["summary"]}
    assert short["cpu_simd"]["judged"] == 4 and short["cpu_simd"]["outside"] == 0 < short["cpu_simd"]["median"] < 2


def test_references_names_a_backend_that_is_off():
    case = "B1,H1,S8,D8,float16"
    entries = [{"case": case, "values": v, "name": n, "frobenius": f, "plain": 1e-4, "within": f < 3e-4}
               for v, n, f in (("normal", "good", 1e-4), ("large", "good", 2e-4), ("normal", "off", 9e-4))]  # fmt: skip
    good, off = references.summarize([*entries, {"case": case, "name": "absent", "refused": "no"}])
    assert (good["outside"], good["largest"], good["at"]) == (0, pytest.approx(2.0), f"{case}, large inputs")
    assert (off["judged"], off["outside"], off["median"]) == (1, 1, pytest.approx(9.0))
