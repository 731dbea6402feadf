"""``python -m bench soak``: what it refuses, what it draws, the watchdog, and the load with kernels that misbehave."""

import json
import math
import threading

import pytest

from bench import problems, report
from bench.__main__ import main
from bench.commands import soak
from bench.load import streams
from bench.load.watchdog import Watchdog
from bench.trial import isolation
from tests.laboratory.support.command import command

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = "B1,H2,S65,D32,float32,causal=True"
LSE = "B2,H4/2,S33x70,D64,float16"
RUN = {"cases": [SMALL, LSE], "seconds": 1.0, "threads": 2, "streams": 2, "loads": streams.LOADS, "slowest": 60.0}


def soaked(kernel, backend="Numpy", patience=30.0, step=60.0, **options):
    options = RUN | {"watchdog": Watchdog(patience, step)} | options
    return soak.soak(kernel, backend=f"tests.laboratory.support.soak_fakes:{backend}", **options)


# ---- bad usage ----


def status_of(arguments):
    try:
        return main(["soak", *arguments])
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def device(monkeypatch):
    """A machine that has a GPU, torch and two CUDA kernels, as far as the checks can see."""
    import fa_ext

    monkeypatch.setattr(soak.devices, "has_gpu", lambda: True)
    monkeypatch.setattr(soak.importlib.util, "find_spec", lambda name: name)
    named = {"attention": ("wgmma_sm90", "simt", "cpu_simd"), "backward": ("cpu_ref_backward",)}
    monkeypatch.setattr(fa_ext, "kernels", lambda operation="attention": named[operation])


@pytest.mark.parametrize("arguments, words", [
    (["--minutes", "0"], "'0'; accepted: finite numbers over 0"),
    (["--minutes", "-1"], "'-1'; accepted"),
    (["--minutes", "nan"], "'nan'; accepted"),
    (["--threads", "0"], "whole numbers from 1 on"),
    (["--threads", "13"], "whole numbers from 1 to 12"),
    (["--kernel", "("], "'(' is no regular expression"),
    (["--preset", "nothing"], "invalid choice: 'nothing'"),
    (["--case", "B1,H2"], "accepted: lines such as"),
    (["--kernel", "zzz"], "no kernel matches 'zzz'; accepted: wgmma_sm90, simt"),
    (["--kernel", "cpu_simd"], "no kernel matches 'cpu_simd'"),
])  # fmt: skip
def test_bad_usage_is_named(arguments, words, capfd, device):
    assert status_of(arguments) == 3
    printed = capfd.readouterr()
    assert words in printed.err and printed.out == ""


def test_a_gpu_is_needed(monkeypatch, capfd):
    monkeypatch.setattr(soak.devices, "has_gpu", lambda: False)
    assert status_of([]) == 3
    assert capfd.readouterr().err.startswith("bench soak: needs a GPU")


def test_torch_is_needed(monkeypatch, capfd, device):
    monkeypatch.setattr(soak.importlib.util, "find_spec", lambda name: None)
    assert status_of([]) == 3
    assert "needs torch, which is not installed" in capfd.readouterr().err


def test_a_chaos_build_is_refused(monkeypatch, capfd, device):
    from fa_ext import _core

    monkeypatch.setattr(_core, "build_info", lambda: {"chaos": True})
    assert status_of([]) == 3
    assert capfd.readouterr().err.startswith("bench soak: this is a chaos build: ")


def test_a_device_that_is_too_small_is_bad_usage():
    with pytest.raises(report.UsageError, match="3.0 are free"):
        soaked("cpu_simd", "Unusable")


# ---- what is run ----


def test_the_cases_are_those_known_to_be_hard():
    parsed = [problems.parse(line) for line in soak.CASES]
    assert [str(case) for case in parsed] == list(soak.CASES) and len(set(parsed)) == len(parsed)
    assert set(soak.HANG) <= set(soak.CASES)
    assert {case.head_dim for case in parsed} >= {40, 64, 96, 128, 192, 256}
    for option in ("causal", "window", "softcap", "sinks", "mask", "bias"):
        assert any(getattr(case, option) for case in parsed), option
    assert any(case.heads != case.heads_kv for case in parsed) and any(case.seq_q == 1 for case in parsed)
    assert any(case.causal == "bottom_right" and case.seq_q > case.seq_k for case in parsed), "rows without keys"
    assert max(case.bytes() for case in parsed) < 300e6 and sum(case.bytes() for case in parsed) < 2.5e9


def test_each_pass_takes_its_sequences(device):
    of = {str(case): case.operation for case in (problems.parse(line, streams.OPERATIONS) for line in (*soak.SEQUENCES, *soak.GRADIENTS, SMALL))}
    assert list(of) == [*soak.SEQUENCES, *soak.GRADIENTS, SMALL]
    assert soak.taken_by("simt", of) == [*soak.SEQUENCES, SMALL]
    assert soak.taken_by("cpu_ref_backward", of) == [*soak.GRADIENTS, SMALL]


@pytest.mark.parametrize("line", [soak.GRADIENTS[0], *soak.GRADIENTS[4:]])
def test_gradients_of_sequences_have_the_shapes_of_their_space(line):
    """The backend of a GPU on the CPU."""
    torch = pytest.importorskip("torch")
    from bench.load.soak_torch import Backward
    from bench.machine.device import open_device

    backend, case = object.__new__(Backward), problems.parse(line, streams.OPERATIONS)
    backend.torch, backend.device, backend.any_order = torch, open_device("cpu"), False
    problem = backend.problem(case)
    first = backend.attend("cpu_simd_backward", problem, None, False)
    outputs = backend.outputs(case, False, torch.empty(backend.bytes_of(case), dtype=torch.uint8))
    backend.poison(outputs)
    again = backend.attend("cpu_simd_backward", problem, outputs, False)
    assert [(tuple(x.shape), x.dtype) for x in first] == backend.results(case)
    assert all(x is y for x, y in zip(again, outputs, strict=True)) and all(map(torch.equal, first, again))
    assert backend.written(again) and not backend.damage(problem)


@pytest.fixture
def plan(monkeypatch, device):
    """The parts that would be run, each answered by `answers` in turn (sound without)."""
    parts, answers = [], []

    def answer(**part):
        parts.append(part)
        found = {"kernel": part["kernel"], "seconds": part["seconds"]} | soak.summed({}, [], part["cases"])
        found |= {"calls": 100, "compared": 9, "memory_before": 1 << 30, "memory_after": 1 << 30}
        found |= answers.pop(0) if answers else {}
        return found | {"verdict": soak.verdict(found)}

    monkeypatch.setattr(soak, "soak", answer)
    return parts, answers


def test_five_minutes_are_dealt_over_all_kernels(plan, capfd):
    status, document = command(capfd, "soak")
    assert status == 0 and document["sound"] and document["options"]["minutes"] == 5
    assert [part["kernel"] for part in plan[0]] == ["wgmma_sm90", "simt"]
    for part in plan[0]:
        assert part["seconds"] == 150 and part["cases"] == [*soak.CASES, *soak.SEQUENCES] and part["slowest"] == soak.SLOWEST
        assert (part["threads"], part["streams"], part["loads"]) == (6, 2, streams.LOADS)


def test_the_hang_preset_gives_each_problem_its_minutes(plan, capfd):
    assert command(capfd, "soak", "--preset", "hang", "--minutes", "2")[0] == 0
    assert [(part["kernel"], part["cases"]) for part in plan[0]] == [("wgmma_sm90", [case]) for case in soak.HANG]
    assert all(part["seconds"] == 120 and part["threads"] == part["streams"] == 1 for part in plan[0])
    assert all(set(part["loads"]) == {"copies", "elementwise"} for part in plan[0])


def test_a_case_and_a_kernel_of_ones_own(plan, capfd):
    assert command(capfd, "soak", "--case", SMALL, "--kernel", "simt", "--minutes", "0.5", "--threads", "3")[0] == 0
    (part,) = plan[0]
    assert part["kernel"] == "simt" and part["cases"] == [SMALL] and part["seconds"] == 30 and part["threads"] == 3
    assert part["slowest"] == soak.SLOWEST_CHOSEN


def test_a_hang_goes_on_with_the_next_kernel_and_exits_with_1(plan, capfd):
    hung = {"kernel": "wgmma_sm90", "work": SMALL, "stream": "thread 1, stream 2", "calls": 600, "also": []}
    plan[1].extend([{"hung": hung}, {}, {"hung": hung}])
    assert main(["soak"]) == 1
    assert len(plan[0]) == 2
    printed = capfd.readouterr()
    assert f"HANG, 100 calls, 9 compared; hangs in {SMALL} on thread 1, stream 2 after 600 calls" in printed.out
    status, document = command(capfd, "soak")
    assert status == 1 and document["runs"][0]["hung"] == hung
    assert [found["verdict"] for found in document["runs"]] == ["HANG", "sound"] and not document["sound"]


def test_a_piece_of_the_record_is_the_document_without_its_context(plan):
    piece = soak.soak_piece("hang", 1.0)
    assert piece["sound"] and len(piece["runs"]) == 4 and "context" not in piece
    assert json.loads(json.dumps(report.plain(piece))) == report.plain(piece)


@pytest.mark.parametrize("change, verdict", [
    ({}, "sound"),
    ({"wrong": {SMALL: 1}}, "WRONG BITS"),
    ({"error": "crashed"}, "FAILED"),
    ({"compared": 0}, "FAILED"),
    ({"memory_after": None}, "FAILED"),
    ({"cases": {}, "compared": 0}, "took nothing"),
    ({"memory_after": (1 << 30) + soak.MAY_GROW_BYTES + 1}, "MEMORY GREW"),
    ({"hung": {"work": SMALL}, "wrong": {SMALL: 1}}, "HANG"),
])  # fmt: skip
def test_verdicts(change, verdict):
    found = soak.summed({}, [], [SMALL]) | {"compared": 5, "memory_before": 1 << 30, "memory_after": 1 << 30}
    assert soak.verdict(found | change) == verdict


def test_only_sound_kernels_are_sound():
    def of(*verdicts):
        return soak.all_sound([{"verdict": verdict} for verdict in verdicts])

    assert of("sound") and of("sound", "took nothing")
    assert not (of() or of("took nothing") or of("sound", "HANG") or of("sound", "MEMORY GREW") or of("sound", "FAILED"))


# ---- the watchdog ----


class Clock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


def stream(name, steps, **more):
    state = {"stream": name, "work": f"{name}'s", "load": False, "steps": steps, "calls": 7, "queued": 2, "ended": False}
    return state | more


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(clock):
    return Watchdog(10, 60, clock)


def test_a_lane_that_stands_still_is_named(dog, clock):
    for second in range(12):
        assert not dog.stalled()
        dog.hear({"streams": [stream("cache_ops", second), stream("stands", min(second, 1)), stream("done", 0, ended=True)]})
        clock.time += 1
    assert dog.stalled()
    hang = dog.hang()
    assert (hang["work"], hang["stream"], hang["calls"], hang["still_s"]) == ("stands's", "stands", 7, 11)
    assert hang["also"] == []


def test_the_kernels_lane_that_stopped_first_is_blamed_and_others_follow(dog, clock):
    for second in range(15):
        dog.hear({"streams": [stream("copies", min(second, 1), load=True), stream("second", min(second, 4)),
                            stream("first", min(second, 3)), stream("cache_ops", second)]})  # fmt: skip
        clock.time += 1
    hang = dog.hang()
    assert dog.stalled() and hang["stream"] == "first" and [x["stream"] for x in hang["also"]] == ["second", "copies"]


def test_a_load_that_alone_stands_still_is_named(dog, clock):
    for second in range(15):
        dog.hear({"streams": [stream("copies", 1, load=True), stream("cache_ops", second)]})
        clock.time += 1
    assert dog.stalled() and dog.hang()["stream"] == "copies"


def test_silence_under_load_is_a_hang_of_what_was_heard_last(dog, clock):
    dog.hear({"streams": [stream("a", 1)]})
    clock.time += 9
    assert not dog.stalled()
    clock.time += 2
    assert dog.stalled() and dog.hang()["stream"] == "a"


def test_steps_have_a_patience_of_their_own(dog, clock):
    clock.time += 59
    assert not dog.stalled()
    dog.hear({"step": "B1, alone"})
    clock.time += 59
    assert not dog.stalled()
    clock.time += 2
    assert dog.stalled() and dog.hang()["work"] == "B1, alone"


def test_lanes_start_anew_after_a_step(dog, clock):
    dog.hear({"streams": [stream("a", 5)]})
    dog.hear({"step": "memory"})
    clock.time += 30
    dog.hear({"streams": [stream("a", 5)]})
    assert not dog.stalled()


# ---- the load ----


def test_a_sound_kernel_is_sound():
    found = soaked("cpu_simd")
    assert found["verdict"] == "sound", found
    assert set(found["cases"]) == {SMALL, LSE} and all(calls > 50 for calls in found["cases"].values())
    assert sum(found["cases"].values()) == found["calls"] and found["wrong"] == {}
    assert found["calls"] / 40 < found["compared"] <= found["calls"] / 5
    assert set(found["loads"]) == {"copies", "elementwise", "products", "allocations"}
    assert all(times > 50 for times in found["loads"].values())
    assert found["memory_before"] == found["memory_after"] == 1 << 30


@pytest.mark.parametrize("kernel, stream", [("hangs", "thread 1, stream 2"), ("blocks", "thread 1, stream 1")])
def test_a_hang_is_named_and_the_next_kernel_runs(kernel, stream):
    """A stream that never ends, and a call that never returns."""
    found = soaked(kernel, patience=2.0)
    assert found["verdict"] == "HANG" and found["error"] is None
    hung = found["hung"]
    assert hung["kernel"] == kernel and hung["work"] in (SMALL, LSE) and hung["still_s"] >= 2.0
    assert stream in [hung["stream"], *(also["stream"] for also in hung["also"])]
    assert found["calls"] > 50 and found["memory_after"] is None
    assert soaked("cpu_simd", seconds=0.3)["verdict"] == "sound"


def test_a_hang_of_a_call_alone():
    found = soaked("hangs_alone", step=5.0)
    assert found["verdict"] == "HANG" and found["hung"]["work"] == f"{SMALL}, alone" and found["calls"] == 0


@pytest.mark.parametrize("kernel", ["wrong", "idle"])
def test_wrong_bits_under_load_are_found(kernel):
    """Other bits on one stream; a kernel that leaves what the call before has written."""
    found = soaked(kernel)
    assert found["verdict"] == "WRONG BITS" and set(found["wrong"]) <= {SMALL, LSE} and sum(found["wrong"].values()) > 3


@pytest.mark.parametrize("kernel", ["unwritten", "drifts"])
def test_wrong_results_alone_are_found(kernel):
    found = soaked(kernel, seconds=0.3)
    assert found["verdict"] == "WRONG BITS" and f"{SMALL}, alone" in found["wrong"]


def test_a_kernel_that_writes_into_its_inputs_is_found():
    found = soaked("cpu_simd", "Writing", seconds=0.3)
    assert found["verdict"] == "WRONG BITS" and f"{SMALL}, k changed" in found["wrong"]


def test_lost_memory_is_found():
    found = soaked("cpu_simd", "Leaking", seconds=0.3)
    assert found["verdict"] == "MEMORY GREW" and found["memory_after"] > found["memory_before"]


@pytest.mark.parametrize("kernel, words", [("dies", "crashed (under load): killed by SIGKILL"),
                                           ("raises", "): RuntimeError: an illegal memory access was")])  # fmt: skip
def test_a_kernel_that_fails_is_told(kernel, words):
    found = soaked(kernel)
    assert found["verdict"] == "FAILED" and words in found["error"] and found["hung"] is None


def test_a_kernel_that_takes_nothing():
    found = soaked("refuses")
    assert found["verdict"] == "took nothing" and found["left_out"] == dict.fromkeys(RUN["cases"], "takes nothing")
    assert found["cases"] == {} and found["calls"] == 0


def test_slow_problems_are_left_out():
    found = soaked("cpu_simd", slowest=1e-9)
    assert found["verdict"] == "took nothing" and "more than 1e-09 s" in found["left_out"][SMALL]


def test_bursts_are_short_enough_for_the_watchdog():
    """All streams together, each with its longest burst, stay far under the patience."""
    problem = streams.Problem(problems.parse(SMALL), None, False, None, soak.SLOWEST_CHOSEN)
    count = soak.MOST_THREADS * soak.STREAMS + len(streams.LOADS)
    assert problem.burst() == 1 and count * max(streams.BURST_SECONDS, streams.GRAPH_CALLS * soak.SLOWEST) < 4
    problem.seconds = 1e-6
    assert problem.burst() == streams.LONGEST_BURST
    assert count < 32, "torch gives 32 streams"


def test_a_crew_ends_what_it_has_queued():
    from tests.laboratory.support.soak_fakes import Numpy

    backend, over = Numpy(), threading.Event()
    made = [streams.Stream(f"stream {i}", [streams.Work("work", lambda: None, 5)], backend) for i in range(3)]
    thread = threading.Thread(target=streams.drive, args=(made, over))
    thread.start()
    backend.hung.add(made[1].handle)
    over.set()
    thread.join(0.3)
    assert thread.is_alive() and made[0].ended and not made[1].ended
    backend.hung.clear()
    thread.join(5)
    assert not thread.is_alive() and all(stream.ended and not stream.running and stream.queued == 0 for stream in made)


def test_the_worker_stays_for_calls_that_do_not_stall():
    asked = []
    with isolation.Worker() as worker:
        outcome = worker.call("json:loads", {}, 30, stalled=lambda: bool(asked.append(1)))
        assert outcome.status == "failed" and asked
        assert worker.call("json:loads", {}, 30, stalled=lambda: True).status == "stalled"


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.idle  # it looks at the memory of the whole device
def test_every_cuda_kernel_for_some_seconds(cuda_forward):
    pytest.importorskip("torch")
    found = soak.soak(cuda_forward, ["B2,H8,S512,D64,bfloat16", "B1,H4,S113x203,D128,float16", "B2,H4,S128,D64,float16"], 6.0,
                      4, soak.STREAMS, streams.LOADS, soak.SLOWEST_CHOSEN)  # fmt: skip
    assert found["verdict"] == "sound", soak.told(found)
    assert len(found["cases"]) == 3 and all(found["cases"].values()) and all(found["loads"].values())


@pytest.mark.gpu
def test_other_bits_are_found_on_the_gpu():
    """The counter of wrong results, against bits that were changed behind its back."""
    pytest.importorskip("torch")
    from bench.load.soak_torch import Torch

    backend, case = Torch(), problems.parse("B1,H2,S96,D64,bfloat16")
    problem, _, wrong = streams.alone("simt", case, True, backend, 60.0)
    assert problem and not wrong
    space = backend.space(backend.bytes_of(case))
    stream = streams.Stream("stream", [streams.into("simt", problem, backend, space)], backend)
    problem.expected[1][0] ^= 1
    stream.queue()
    backend.synchronize()
    assert stream.settle() and stream.compared > 0 and stream.wrong == {str(case): stream.compared}


def test_sums_in_any_order_may_differ_by_roundings_alone():
    """A comparison of dq where it is added up in any order: a rounding passes, what is wrong does not."""
    torch = pytest.importorskip("torch")
    from bench.load.soak_torch import beyond_order, words

    wanted = torch.randn(64, 16, dtype=torch.bfloat16)
    wanted[3, 3] = math.nan

    def differs(change) -> bool:
        got = wanted.clone()
        change(got)
        return bool(beyond_order(torch, got, words(torch, wanted)).any())

    assert not differs(lambda x: x.mul_(1 + 2**-7)) and not differs(lambda x: x.add_(2**-14))
    assert differs(lambda x: x[0].mul_(1 + 2**-5)) and differs(lambda x: x[5, 5].fill_(math.nan)) and differs(lambda x: x[3, 3].fill_(0))
    assert differs(lambda x: x[63].zero_())
