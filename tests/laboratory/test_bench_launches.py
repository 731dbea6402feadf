"""Times belong to what a call launches: how launches are read, and what a record does with them."""

import ctypes

import pytest

from bench import machine
from bench.machine import build
from bench.machine.device import Cpu
from bench.recording import record
from bench.timing import launches

WHERE = {"device": "cuda", "name": "A GPU"}
CASE = "B1,H1,S8,D8,float16"


class Driver:
    """The driver's answers about one captured graph: {node: (name, grid, block, shared memory, cluster)}; node 9 copies."""

    def __init__(self, nodes, chained=()):
        self.nodes, self.chained, self.calls = nodes, chained, []

    def __call__(self, name, *arguments):
        self.calls.append(name)
        getattr(self, name)(*(getattr(a, "_obj", a) for a in arguments))

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


def test_what_cannot_be_captured_has_no_launches(monkeypatch):
    monkeypatch.setattr(launches, "driver", Driver({}))
    calls = []

    def refuses():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not while a stream is captured")

    assert launches.of(refuses, Gpu()) is None and len(calls) == 2


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


NOW = ["code 1x1x1 32x1x1 0 1x1x1"]


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
