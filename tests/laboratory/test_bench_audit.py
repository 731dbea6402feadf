"""``bench audit``: a choice that loses fails, in two of three processes; what is accepted, kept and asked first; three shapes of the CPU."""

import contextlib
import json
import types

import numpy as np
import pytest

from bench import report
from bench.commands import audit
from bench.problems import audited
from bench.problems.case import Case
from bench.problems.sequences import Sequences
from bench.machine import device
from tests.laboratory.support.command import command

CHOSEN, OTHER = "chosen_kernel", "other_kernel"
FORWARD = Case.parse("B1,H2,S64,D32,float16")
BACKWARD = Case.parse("B1,H2,S64,D32,float16,operation=backward")
PACKED = Case.parse("B3,H2,S1x40,D32,float16,q=packed,k=packed,slack=0")
PROMPTS = Case.parse("B2,H2,S40,D32,float16,q=packed,k=packed,slack=0")


class Fake:
    """Operands of a registry of two kernels; a call only returns its result."""

    device = types.SimpleNamespace(kind="cpu", default_arrays="numpy", synchronize=lambda: None, settle=lambda: 0.0, waited_for_cores=lambda: 0.0,
                                   working=contextlib.nullcontext, cache_bytes=1)  # fmt: skip
    wrong: frozenset[str] = frozenset()

    def __init__(self, case, target, guard):
        self.case = case

    def picked(self):
        return CHOSEN

    def poison(self):
        pass

    def bound(self, kernel, library):
        kernel = CHOSEN if kernel is None else kernel

        def call():
            return np.full(4, 2.0 if kernel in self.wrong else 1.0, np.float32)

        call.kernel, call.case = kernel, self.case
        return call

    def judge(self, result):
        right = bool((result == 1).all())
        return types.SimpleNamespace(passed=right, failures=() if right else ("far off",))


@pytest.fixture
def fake(monkeypatch):
    """Sets the seconds of a call by (kernel, its case), and whose results are wrong; returns what asks about a shape."""

    class Watch:
        device, launches = Fake.device, 1

        def __init__(self, slots, target, sample_seconds):
            self.call, self.rng = slots[0], np.random.default_rng(5)

        def sample(self):
            return times(self.call.kernel, self.call.case) * (1 + 0.002 * self.rng.standard_normal())

    def times(kernel, case):
        return state["times"](kernel, case)

    state = {}
    monkeypatch.setattr(audit, "operands_of", Fake)
    monkeypatch.setattr(audit, "_device", lambda name: Fake.device)
    monkeypatch.setattr(audit.timer, "Stopwatch", Watch)
    monkeypatch.setattr(audit.implementation, "compiled_kernels", lambda target, operation: (CHOSEN, OTHER))

    def ask(case, times, wrong=()):
        state["times"] = times
        monkeypatch.setattr(Fake, "wrong", frozenset(wrong))
        return audit.cell(str(case), "cpu", 0.01)

    return ask


# ---- claims ----


@pytest.mark.parametrize("chosen, other, fails", [(1.05e-4, 1e-4, True), (1.02e-4, 1e-4, False), (1e-4, 1.05e-4, False), (3e-4, 1e-4, True),
                                                  (2.2e-6, 2e-6, False), (3.2e-6, 2e-6, True)])  # fmt: skip
def test_a_choice_fails_that_loses_by_more_than_its_limit(fake, chosen, other, fails):
    found = fake(FORWARD, lambda kernel, case: chosen if kernel == CHOSEN else other)
    assert found["chosen"] == {"": CHOSEN} and set(found["us"]) == {CHOSEN, OTHER}
    assert audit.broken(found) == ["choice"] * fails
    if fails:
        (claim,) = found["claims"]
        assert claim["calls"] == [CHOSEN, OTHER] and claim["ratio"]["ratio"] == pytest.approx(chosen / other, rel=0.01)


@pytest.mark.parametrize("any_order, in_order, fails", [(1.03e-4, 1e-4, True), (1.005e-4, 1e-4, False), (1e-4, 1.2e-4, False)])
def test_any_order_must_not_be_slower_than_one(fake, any_order, in_order, fails):
    found = fake(BACKWARD, lambda kernel, case: (in_order if case.deterministic else any_order) * (1 if kernel == CHOSEN else 2))
    assert audit.broken(found) == ["any order"] * fails


def test_each_mode_of_the_backward_pass_has_a_choice(fake):
    found = fake(BACKWARD, lambda kernel, case: 1.2e-4 if kernel == CHOSEN and case.deterministic else 1.1e-4)
    assert audit.broken(found) == ["choice, in order"]


@pytest.mark.parametrize("packed, unpacked, fails", [(1.05e-4, 1e-4, True), (1.02e-4, 1e-4, False), (0.5e-4, 1e-4, False)])
def test_a_packed_call_must_not_lose_to_its_twin(fake, packed, unpacked, fails):
    found = fake(PACKED, lambda kernel, case: (packed if case.storage.q == "packed" else unpacked) * (1 if kernel == CHOSEN else 2))
    assert audit.broken(found) == ["packed"] * fails
    assert audited.twin(PROMPTS) is None and audited.twin(FORWARD) is None


def test_a_wrong_result_is_no_time(fake):
    found = fake(FORWARD, lambda kernel, case: 1e-4, wrong=[OTHER])
    assert found["error"] == f"WRONG: {OTHER}: far off" and audit.broken(found) == ["runs"]


# ---- processes and the record ----


def results(path=None):
    return report.Results(path, {"command": "audit"}, {"digest": "d"})


@pytest.mark.parametrize("fails, runs, failed", [([True, True, False], 2, True), ([True, False, True], 3, True), ([True, False, False], 3, False),
                                                 ([False, True, True], 1, False)])  # fmt: skip
def test_a_claim_fails_in_two_of_three_processes(fails, runs, failed):
    def ask(process, case, seed):
        return {"case": str(case), "us": {}, "claims": [{"claim": "choice", "broken": fails[process]}]}

    held = results()
    assert audit.audit([FORWARD], held, ask, 60, 0, True) == [str(FORWARD)]
    cell = held.cells[str(FORWARD)]
    assert len(cell["runs"]) == runs and bool(audit.failed(cell)) == failed and not audit.suspect(cell)


def test_a_crash_fails_at_once():
    held = results()
    audit.audit([FORWARD], held, lambda process, case, seed: {"case": str(case), "error": "crashed"}, 60, 0, True)
    assert audit.failed(held.cells[str(FORWARD)]) == ["runs"]


def test_shapes_that_failed_are_asked_first_and_seeds_join(tmp_path):
    path, broken = tmp_path / "record.json", {"claim": "choice", "broken": True}

    def audit_with(fails, cases):
        held = results(path)
        audit.audit(cases, held, lambda process, case, seed: {"us": {}, "claims": [broken] * (case == fails)}, 60, 0, True)
        return held.cells

    audit_with(FORWARD, [PROMPTS, FORWARD])
    cells = audit_with(None, [PACKED])
    assert set(cells) == set(map(str, (PROMPTS, FORWARD, PACKED)))
    first = audit.asked(cells, ["serving", "forward"], 4, 1, "cpu")
    assert first[0] == FORWARD and len(first) == 9
    assert FORWARD not in audit.asked(cells, ["serving"], 4, 1, "cpu")
    cells = audit_with(None, [FORWARD])  # mended
    assert FORWARD not in audit.asked(cells, ["forward"], 4, 1, "cpu")


def test_no_shape_is_begun_after_the_time():
    assert audit.audit([FORWARD, PACKED], results(), lambda *_: {}, 0.0, 0, True) == []


def test_accepted_cases_have_reasons(tmp_path):
    file = tmp_path / "accepted"
    assert audit.accepted(audit.ACCEPTED).keys() <= {str(Case.parse(line)) for line in audit.accepted(audit.ACCEPTED)}
    file.write_text(f"# of the file\n\n{FORWARD}  # a matter of luck\n")
    assert audit.accepted(file) == {str(FORWARD): "a matter of luck"}
    for text, words in ((f"{FORWARD}\n", "has no reason"), ("B1  # why\n", "is no case"),
                        ("".join(f"B{n},H1,S8,D8,float32  # why\n" for n in range(1, 12)), "at most 10")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(report.UsageError, match=words):
            audit.accepted(file)


# ---- shapes ----


@pytest.mark.parametrize("operation", audited.OPERATIONS)
def test_shapes_cover_what_choices_depend_on(operation):
    cases = audited.drawn(operation, 200, 3, "cuda")
    assert cases == audited.drawn(operation, 200, 3, "cuda") != audited.drawn(operation, 200, 4, "cuda")
    assert cases[:20] == audited.drawn(operation, 20, 3, "cuda") and all(Case.parse(str(case)) == case for case in cases)
    assert {case.head_dim for case in cases} == set(audited.HEAD_DIMS) and {3, 5, 7} <= {case.heads // case.heads_kv for case in cases}
    assert all(case.flops() <= audited.MOST["cuda"][0] for case in cases) and any(case.causal for case in cases) and any(case.window for case in cases)
    ragged = np.mean([case.seq_k % 64 > 0 for case in cases])
    assert 0.3 < ragged < 0.9
    if operation == "serving":
        assert {case.storage.page_size for case in cases} == set(audited.PAGES) and any(case.storage.slack for case in cases)
        assert any(audited.twin(case) for case in cases) and any(min(case.n_q) == 1 < max(case.n_q) for case in cases)
    assert all(case.operation == cases[0].operation for case in audited.first(operation, "cuda")) and not audited.first(operation, "cpu")


@pytest.mark.parametrize("k", ["paged", "packed"])
def test_unused_queries_and_columns_change_no_result(k):
    case = Case.sequences((1, 3), (5, 20), 2, 1, 16, dtype="float32", q="packed", k=k, page_size=4, slack=9)
    held = Sequences(case, device.Cpu())
    assert held.shapes["q"][0] == (13, 2, 16) and (k == "packed" or held.shapes["page_table"][0] == (2, 14))
    held.poison()
    result = held.bound(None, "numpy")()
    assert held.judge(result).passed and not result[4:].any()


def test_the_cpu_is_audited(capfd, tmp_path):
    output = tmp_path / "audit.json"
    status, document = command(capfd, "audit", "--device", "cpu", "--count", "1", "--seed", "5", "--seconds", "0.02", "--output", str(output))
    assert document["asked"] == 3 and len(document["cells"]) == 3 and all("us" in cell for cell in document["cells"])
    assert status == int(any(audit.failed(cell) for cell in document["cells"]))
    assert len(json.loads(output.read_text())["cells"]) == 3
