"""Times belong to what a call launches: how launches are read, and what a record does with them."""

import ctypes

import pytest

from bench import machine
from bench.commands import evidence, measure
from bench.machine import build
from bench.machine.device import Cpu, DriverError
from bench.recording import record
from bench.timing import launches
from bench.trial import isolation
from fa_ext import UnsupportedError

WHERE = {"device": "cuda", "name": "A GPU"}
CASE = "B1,H1,S8,D8,float16"
NOW = ["code 1x1x1 32x1x1 0 1x1x1"]


class Driver:
    """The driver's answers about one captured graph: {node: (name, grid, block, shared memory, cluster)}; node 9 copies.
    `fails`: {function: what it fails with after it has done its work}."""

    def __init__(self, nodes, chained=(), fails=()):
        self.nodes, self.chained, self.fails, self.calls = nodes, chained, dict(fails), []

    def __call__(self, name, *arguments):
        self.calls.append(name)
        getattr(self, name)(*(getattr(a, "_obj", a) for a in arguments))
        if name in self.fails:
            raise self.fails[name]

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert mode.value == 1

    def cuStreamEndCapture(self, stream, graph):
        graph.value = 77

    def cuGraphDestroy(self, graph):
        assert graph.value == 77

    def cuGraphGetNodes(self, graph, nodes, count):
        count.value = len(self.nodes)
        if nodes is not None:
            nodes[:] = list(self.nodes)

    def cuGraphNodeGetType(self, node, kind):
        kind.value = int(node.value == 9)

    def cuGraphGetEdges_v2(self, graph, ahead, behind, edges, count):
        assert edges is None or self.chained, "the driver refuses places for no edge"
        count.value = len(self.chained)
        for i, node in enumerate(self.chained if edges is not None else ()):
            behind[i], edges[i].type = node, 1

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        _, grid, block, shared, _ = self.nodes[node.value]
        found.kernel, found.grid[:], found.block[:], found.shared = node.value, grid, block, shared

    def cuKernelGetFunction(self, function, kernel):
        function.value = kernel.value

    def cuFuncGetName(self, name, function):
        name.value = self.nodes[function.value][0].encode()

    def cuFuncGetAttribute(self, value, attribute, function):
        assert attribute.value == 6
        value.value = 90

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        assert attribute.value == 4
        value[:3] = self.nodes[node.value][4]


class Gpu(Cpu):
    kind, pointer = "cuda", 5


OURS, THEIRS = ("_Z7forwardv", (132, 1, 1), (384, 1, 1), 229376, (2, 1, 1)), ("cublas_gemm", (4, 2, 1), (128, 1, 1), 0, (0, 0, 0))


def read(monkeypatch, nodes, chained=(), functions=None):
    driver = Driver(nodes, chained)
    key = build.rules.digests.function_key("_Z7forwardv")
    monkeypatch.setattr(launches, "driver", driver)
    monkeypatch.setattr(launches, "_functions", lambda: functions or {key: {"80": "old", "90": "code"}})
    calls = []
    return launches.of(lambda: calls.append(1), Gpu()), driver, len(calls)


def test_launches_are_those_of_a_captured_call(monkeypatch):
    found, driver, calls = read(monkeypatch, {3: OURS, 9: None, 4: THEIRS}, chained=[4])
    key = build.rules.digests.function_key("cublas_gemm")
    assert found == ["code 132x1x1 384x1x1 229376 2x1x1", f"named:{key} 4x2x1 128x1x1 0 0x0x0 programmatic"]
    assert calls == 2 and driver.calls[-1] == "cuGraphDestroy"


def test_one_kernel_alone_has_no_edges(monkeypatch):
    assert read(monkeypatch, {3: OURS})[0] == ["code 132x1x1 384x1x1 229376 2x1x1"]


def call_that_fails(at, error):
    """A call whose `at`-th time raises."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) == at:
            raise error

    return call


@pytest.mark.parametrize("call, fails", [
    (call_that_fails(2, RuntimeError("not while a stream is captured")), {}),
    (lambda: None, {"cuStreamEndCapture": DriverError("cuStreamEndCapture", 901)}),
    (call_that_fails(2, OSError("operation not permitted")), {"cuStreamEndCapture": DriverError("cuStreamEndCapture", 900)}),
], ids=["the call says so", "the driver says so", "both say so"])  # fmt: skip
def test_what_cannot_be_captured_has_no_launches(monkeypatch, call, fails):
    driver = Driver({3: OURS}, fails=fails)
    monkeypatch.setattr(launches, "driver", driver)
    assert launches.of(call, Gpu()) is None
    assert driver.calls == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]


@pytest.mark.parametrize("name, error", [
    ("cuStreamBeginCapture_v2", DriverError("cuStreamBeginCapture_v2", 1)),
    ("cuStreamEndCapture", DriverError("cuStreamEndCapture", 700)),
    ("cuGraphGetEdges_v2", DriverError("cuGraphGetEdges_v2", 1)),
    ("cuGraphKernelNodeGetParams_v2", AttributeError("a fault of the reader")),
])  # fmt: skip
def test_other_failures_are_raised(monkeypatch, name, error):
    """A refusal of the driver, such as of an argument, and a fault of the reader are no launches that are not known."""
    driver = Driver({3: OURS, 4: THEIRS}, chained=[4], fails={name: error})
    monkeypatch.setattr(launches, "driver", driver)
    monkeypatch.setattr(launches, "_functions", dict)
    with pytest.raises(type(error)) as raised:
        launches.of(lambda: None, Gpu())
    assert raised.value is error and (driver.calls[-1] == "cuGraphDestroy") == (name != "cuStreamBeginCapture_v2")


def test_a_fault_behind_the_count_of_edges_is_raised(monkeypatch):
    """A driver that lacks the function says so when it is asked for the count."""
    class Faulty(Driver):
        def cuGraphGetEdges_v2(self, graph, ahead, behind, edges, count):
            super().cuGraphGetEdges_v2(graph, ahead, behind, edges, count)
            if edges is not None:
                raise AttributeError("a fault of the reader")

    monkeypatch.setattr(launches, "driver", Faulty({3: OURS, 4: THEIRS}, chained=[4]))
    with pytest.raises(AttributeError, match="a fault of the reader"):
        launches.of(lambda: None, Gpu())


def test_a_driver_without_edges_tells_of_no_chain(monkeypatch):
    missing = {"cuGraphGetEdges_v2": AttributeError("undefined symbol: cuGraphGetEdges_v2")}
    monkeypatch.setattr(launches, "driver", Driver({4: THEIRS}, chained=[4], fails=missing))
    monkeypatch.setattr(launches, "_functions", dict)
    (found,) = launches.of(lambda: None, Gpu())
    assert found.endswith(" 4x2x1 128x1x1 0 0x0x0")


def test_a_call_that_fails_by_itself_is_raised(monkeypatch):
    monkeypatch.setattr(launches, "driver", driver := Driver({}))
    with pytest.raises(ValueError, match="q has no rows"):
        launches.of(call_that_fails(1, ValueError("q has no rows")), Gpu())
    assert not driver.calls


@pytest.fixture
def answered(monkeypatch):
    """The answer about each kernel inside the worker: its launches, None, or an exception that is raised."""
    answers = {"simt": UnsupportedError('kernel "simt" cannot take this call'), "mma_sm80": NOW, "wmma": None}

    def launched(name, operands):
        if isinstance(answers[name], Exception):
            raise answers[name]
        return {"launches": answers[name]} if answers[name] else {}

    monkeypatch.setattr(measure, "_device", lambda name: Gpu())
    monkeypatch.setattr(measure, "operands_of", lambda case, device, guard: None)
    monkeypatch.setattr(measure, "_launched", launched)
    return answers


def test_a_kernel_that_refuses_the_problem_leaves_the_others_their_launches(answered):
    assert measure.launched(CASE, "cuda", [*answered]) == {"simt": None, "mma_sm80": NOW, "wmma": None}
    answered["mma_sm80"] = DriverError("cuGraphGetNodes", 1)
    with pytest.raises(DriverError, match="cuGraphGetNodes failed with CUDA error 1"):
        measure.launched(CASE, "cuda", [*answered])


def test_renewing_says_whose_launches_are_not_known(monkeypatch, capsys):
    class Worker(isolation.Worker):
        def call(self, function, arguments, limit, **options):
            assert function == "bench.commands.measure:launched" and arguments["case"] == CASE
            return isolation.Outcome("failed", reason="DriverError: cuGraphGetNodes failed with CUDA error 1")

    class Target:
        def renew_times(self, launched):
            assert launched(CASE, ["simt"]) == {}
            return 0, 0

    monkeypatch.setattr(isolation, "Worker", Worker)
    assert evidence.renew_times(Target(), "cuda") == (0, 0)
    assert capsys.readouterr().err == f"{CASE}: its launches are not known: failed: DriverError: cuGraphGetNodes failed with CUDA error 1\n"


def test_the_structures_are_those_of_the_driver():
    assert ctypes.sizeof(launches._Kernel) == 72 and launches._Kernel.parameters.offset == 40
    assert ctypes.sizeof(launches._Edge) == 8 and launches._Edge.type.offset == 2


# ---- the record ----


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(build.rules, "kernel_names", lambda: ["simt"])
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/simt.cu").write_text("simt")
    return tmp_path


def built(root, device="d", host="h"):
    code = {"kernel": "simt", "scheme": 1, "device": device, "host": host}
    text = {"kernels/simt.cu": build.rules.digests.text_hash(root / "kernels/simt.cu")}
    return {"simt": code | {"id": machine.short_hash(code), "compilers": "nvcc", "sources": text}}


def measured(root, **figures):
    """A record of a test and a time of simt, whose source was edited since."""
    found = record.Record(root / "a-gpu.json", WHERE, built(root), root)
    about = {"code": found.of_kernels(["simt"]), "context": found.context({}), "date": "2026-01-01 00:00 UTC"}
    found.put("tests", "simt", about | {"passed": 1})
    found.put_run(f"{CASE} hot", about | {"figures": {"simt": {"us": 1.0} | figures, "torch-flash": {"us": 2.0}}, "refused": {}})
    (root / "kernels/simt.cu").write_text("edited")
    found._known.clear()
    return found


@pytest.mark.parametrize("change", [{"host": "other"}, {"device": "other"}, {"host": "other", "device": "other"}])
def test_equal_launches_renew_times_and_nothing_else(tree, change):
    held = measured(tree, launches=machine.short_hash(NOW))
    held.built = built(tree, **change)
    before = record.states(held.document, held.built, tree)["simt"]
    assert before["state"] == "stale" and before["parts"] == {"tests": 1}
    assert before["times"][0] == "unknown" and "--renew" in before["times"][1] and before["times"][2] == 1
    asked = []
    assert held.renew_times(lambda case, kernels: asked.append((case, kernels)) or {"simt": NOW}) == (1, 0)
    assert asked == [(CASE, ["simt"])]
    after = record.states(held.document, held.built, tree)["simt"]
    assert after["state"] == "stale" and after["parts"] == {"tests": 1} and after["times"][0] == "fresh"
    assert held.covers(held.cells[f"{CASE} hot"][0], "simt") and not held.covers(held.part("tests")["simt"], "simt")


@pytest.mark.parametrize("now", [["code 2x1x1 32x1x1 0 1x1x1"], None])
def test_other_launches_renew_nothing(tree, now):
    held = measured(tree, launches=machine.short_hash(NOW))
    held.built = built(tree, host="other")
    assert held.renew_times(lambda case, kernels: {"simt": now}) == (0, 0)
    assert not held.covers(held.cells[f"{CASE} hot"][0], "simt")


@pytest.mark.parametrize(("change", "state"), [({"host": "other"}, "unknown"), ({"device": "other"}, "stale")])
def test_times_that_noted_no_launches_are_never_called_current(tree, change, state):
    held = measured(tree)
    held.built = built(tree, **change)
    assert held.renew_times(lambda case, kernels: {"simt": NOW}) == (0, 0)
    entry = record.states(held.document, held.built, tree)["simt"]
    assert entry.get("times", (entry["state"],))[0] == state


def test_launches_are_noted_beside_times_of_the_code_that_is_built(tree):
    held = measured(tree)
    held.built = built(tree)
    assert held.renew_times(lambda case, kernels: {"simt": NOW}) == (0, 1)
    assert held.cells[f"{CASE} hot"][0]["figures"]["simt"]["launches"] == machine.short_hash(NOW)
    assert held.renew_times(lambda case, kernels: pytest.fail("all is noted")) == (0, 0)
