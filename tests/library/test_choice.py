"""The answers and plans of the CUDA kernels, and which one the library takes, on devices that are only described."""

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.recording import record
from fa_ext import _core
from tests.contract import runner
from tests.contract.devices import DEVICES, shapes_only

CUDA = [name for name in fa_ext.kernels() if runner.device_of(name) == "cuda"]
WITH_TENSOR_MAPS = {"wgmma_split_sm90", "wgmma_sm90", "wgmma_dropout_sm90", "prefill_sm90"}  # of dense calls
HOPPER = WITH_TENSOR_MAPS | {"serve_sm90", "packed_sm90"}

pytestmark = [pytest.mark.skipif(not CUDA, reason="no CUDA kernel is built"), runner.needs_every_instance]


def runs_on(kernel: str, device: str) -> bool:
    """Whether a kernel is made for a device."""
    return kernel not in HOPPER or DEVICES[device]["cc"] == 90


@pytest.fixture(scope="module")
def grid():
    """The contract's cases for a device, and the arguments of each; their elements do not matter here."""
    return [(case, case.host_inputs()) for case in cases.contract() if case.dtype != "float64"]


# ---- answers and plans over the whole grid ----


def check_plan(plan, device):
    """The rules for the plan of any kernel."""
    described = DEVICES[device]
    assert 32 <= plan["threads"] <= 1024 and plan["threads"] % 32 == 0 or plan["blocks"] == 0
    assert plan["smem_bytes"] <= described["smem_per_block"]
    assert plan["workspace_bytes"] <= described["workspace_limit"]
    assert plan["keep"]


@pytest.mark.parametrize("device", DEVICES)
def test_answers_and_plans(grid, device):
    """A kernel takes what it must; a plan fits the device; a reason is said; the first that takes is chosen."""
    wrong = []
    for case, inputs in grid:
        answers = _core.answers(**inputs, device=DEVICES[device])
        assert list(answers) == list(fa_ext.kernels())
        for kernel in CUDA:
            answer, reason, plan = answers[kernel]
            if not runs_on(kernel, device):
                expected = ("not here", "refuses")
            elif cases.must_accept(kernel, case):
                expected = ("takes", "declines")
            else:
                expected = ("takes", "declines", "refuses")
            if answer not in expected:
                wrong.append(f"{case}: {kernel} {answer}: {reason}")
            assert bool(reason) == (answer != "takes") and bool(plan) == (answer in ("takes", "declines"))
            if plan:
                check_plan(plan, device)
        takes = [kernel for kernel in CUDA if answers[kernel][0] == "takes"]
        declines = [kernel for kernel in CUDA if answers[kernel][0] == "declines"]
        chosen, reasons = fa_ext.explain(**inputs, device=DEVICES[device])
        assert chosen == next(iter(takes + declines), None), f"{case}: {chosen}"
        assert chosen or case.alibi or case.dropout or "simt" not in CUDA, f"no kernel takes {case}"
        for kernel in set(CUDA) - {chosen}:
            assert reasons[kernel] == (answers[kernel][1] or reasons[kernel]) and reasons[kernel]
        assert all("on a CUDA device" in reasons[name] for name in fa_ext.kernels() if name not in CUDA)
    assert not wrong, "\n".join(wrong[:20])


def elsewhere(x):
    """A copy of an array's strides at another address that is as well aligned."""
    if not isinstance(x, np.ndarray) or x.size == 0:
        return x
    low = sum(min(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True)) + x.itemsize
    memory = np.zeros(high - low + 4096, np.uint8)
    base = memory[(x.ctypes.data + low - memory.ctypes.data) % 1024 :]
    return np.ndarray(x.shape, x.dtype, base, -low, x.strides)


def test_a_plan_is_the_same_at_other_addresses_of_the_same_alignment():
    """The promise of ``keep``."""
    for case in (*cases.sanitize(), *list(cases.random_cases(7, 40))):
        inputs = case.host_inputs()
        moved = {name: elsewhere(x) for name, x in inputs.items()}
        for device in DEVICES.values():
            assert _core.answers(**inputs, device=device) == _core.answers(**moved, device=device), str(case)


# ---- what is missing on the machine ----


def test_what_a_device_lacks_is_not_here():
    inputs = shapes_only(Case(1, 8, 8, 512, 512, 64))
    older = DEVICES["a100"] | {"cc": 75}
    for kernel, (answer, reason, _) in _core.answers(**inputs, device=older).items():
        if kernel in CUDA:
            assert answer == "not here" and "compute capability" in reason and "7.5" in reason, (kernel, reason)
    bare = DEVICES["h200"] | {"tensor_maps": False, "cublas_error": "no such file"}
    answers = _core.answers(**inputs, device=bare)
    for kernel in {*WITH_TENSOR_MAPS, "cublas"} & set(CUDA):
        assert answers[kernel][0] == "not here", answers[kernel]
    small = DEVICES["a100"] | {"smem_per_block": 16 << 10, "smem_per_sm": 32 << 10}
    answers = _core.answers(**inputs, device=small)
    for kernel in {"simt", "mma_sm80"} & set(CUDA):
        assert answers[kernel][0] == "not here" and "shared memory" in answers[kernel][1]


def test_a_device_must_be_described():
    inputs = shapes_only(Case())
    for wrong, error, word in (
        ({}, ValueError, '"cc"'),
        (3, TypeError, "device"),
        ("h200", TypeError, "device"),
        (DEVICES["h200"] | {"sm_count": "132"}, TypeError, '"sm_count"'),
        (DEVICES["h200"] | {"cc": -1}, TypeError, '"cc"'),
    ):
        with pytest.raises(error, match=word):
            fa_ext.explain(**inputs, device=wrong)
    with pytest.raises(TypeError, match="device"):
        fa_ext.attention(**Case().host_inputs(), device=DEVICES["h200"])


# ---- the choice ----

PACKED = Case.sequences((1, 2, 1), (300, 40, 2000), 32, 8, 128, dtype="bfloat16", causal="bottom_right")

@pytest.mark.parametrize(
    "case, chosen",
    [
        (Case(1, 8, 8, 512, 512, 64), {"h": "wgmma_split_sm90", "a": "mma_sm80"}),
        (Case(8, 16, 16, 2048, 2048, 128, dtype="bfloat16"), {"h": "wgmma_sm90", "a": "mma_sm80"}),
        (Case(8, 16, 16, 2048, 2048, 128, softcap=30.0, sinks="same"), {"h": "wgmma_sm90", "a": "mma_sm80"}),
        (Case(1, 32, 8, 1, 4096, 128), {"h": "serve_sm90", "a": "mma_sm80"}),
        (Case(2, 28, 4, 1, 32768, 128, dtype="bfloat16"), {"h": "mma_sm80", "a": "mma_sm80"}),
        (Case(3, 28, 4, 1, 6000, 128, dtype="bfloat16"), {"h": "mma_sm80", "a": "mma_sm80"}),
        (Case(4, 16, 16, 2048, 2048, 128, bias="full"), {"h": "wgmma_sm90", "a": "mma_sm80"}),
        (Case(1, 16, 16, 1024, 1024, 128, mask="full"), {"h": "wgmma_sm90", "a": "mma_sm80"}),
        (Case(64, 4, 4, 256, 256, 64, mask="full"), {"h": "mma_sm80", "a": "mma_sm80"}),  # a map costs more than it saves
        (Case(1, 8, 8, 512, 512, 64, intervals="full"), {"h": "mma_sm80", "a": "mma_sm80"}),
        (Case(64, 4, 4, 256, 256, 64, bias="full"), {"h": "wgmma_sm90", "a": "mma_sm80"}),
        (Case(2, 8, 8, 64, 4096, 128, bias="full"), {"h": "mma_sm80", "a": "mma_sm80"}),  # few tiles of many keys
        (Case(4, 16, 16, 2048, 2048, 192, 128), {"h": "mma_sm80", "a": "mma_sm80"}),
        (Case(4, 16, 16, 2048, 2048, 64, dtype="float32"), {"h": "simt", "a": "simt"}),
        (Case(4, 16, 16, 2048, 2048, 128, dtype="float32"), {"h": "cublas", "a": "cublas"}),
        (Case(16, 32, 8, 1, 4096, 128, dtype="float32"), {"h": "simt", "a": "simt"}),
        (PACKED, {"h": "packed_sm90", "a": "mma_sm80"}),
        (PACKED.changed(k="packed", softcap=20.0), {"h": "packed_sm90", "a": "mma_sm80"}),
        (PACKED.changed(head_dim=256, head_dim_v=256), {"h": "packed_sm90", "a": "mma_sm80"}),
        (PACKED.changed(q="padded", slack=0), {"h": "serve_sm90", "a": "mma_sm80"}),
        (PACKED.changed(alibi="heads"), {"h": "mma_sm80", "a": "mma_sm80"}),  # the host cannot see how few the queries are
        (PACKED.changed(alibi="heads", max_seqlen_q=2), {"h": "packed_sm90", "a": "mma_sm80"}),
    ],
    ids=str,
)
def test_which_kernel_is_chosen(case, chosen):
    for device, described in DEVICES.items():
        wanted = chosen["h" if described["cc"] == 90 else "a"]
        if wanted in CUDA:
            inputs = case.host_inputs() if case.lengths else shapes_only(case)
            assert fa_ext.explain(**inputs, device=described)[0] == wanted, device


#: Dense calls of few queries on a Hopper GPU of 132 multiprocessors, on both sides of each limit of sm90/common/dense_choice.cuh.
FEW_DENSE = [
    # waves of tiles that prefill_sm90 saves: by the keys, by what the queries see of them, by head_dim
    ("B8,H28/4,S11x10326,D128,bfloat16", "mma_sm80"),
    ("B8,H28/4,S11x10327,D128,bfloat16", "prefill_sm90"),
    ("B8,H28/4,S17x10326,D128,float16", "wgmma_sm90"),
    ("B8,H28/4,S17x10327,D128,float16", "prefill_sm90"),
    ("B8,H28/4,S17x20652,D64,bfloat16", "wgmma_sm90"),
    ("B8,H28/4,S17x20653,D64,bfloat16", "prefill_sm90"),
    ("B8,H28/4,S17x5163,D256,bfloat16", "wgmma_sm90"),
    ("B8,H28/4,S17x5164,D256,bfloat16", "prefill_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,causal=top_left", "wgmma_sm90"),
    ("B8,H28/4,S24x19920,D128,bfloat16,causal=bottom_right", "prefill_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,window=10310:none", "prefill_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,window=10309:none", "wgmma_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,sinks=float32", "prefill_sm90"),
    # by rows of a kv head, by queries, by tiles of them
    ("B32,H64/8,S1x4096,D128,bfloat16", "mma_sm80"),
    ("B32,H64/8,S2x4096,D128,bfloat16", "prefill_sm90"),
    ("B8,H32/8,S8x8192,D128,bfloat16", "mma_sm80"),
    ("B16,H32/8,S8x8192,D128,bfloat16", "prefill_sm90"),
    ("B32,H64/8,S64x4096,D128,bfloat16", "prefill_sm90"),
    ("B32,H64/8,S65x4096,D128,bfloat16", "wgmma_sm90"),
    ("B32,H64/4,S9x4096,D128,bfloat16", "prefill_sm90"),
    ("B8,H32/16,S40x4096,D128,bfloat16", "wgmma_sm90"),
    ("B2,H24/3,S12x8192,D64,bfloat16", "mma_sm80"),
    ("B8,H64/1,S16x8192,D128,bfloat16", "prefill_sm90"),
    ("B8,H65/1,S16x8192,D128,bfloat16", "mma_sm80"),
    ("B64,H32,S32x2048,D128,bfloat16", "wgmma_sm90"),
    # few tiles are wgmma_split_sm90's
    ("B4,H32/4,S32x8192,D128,bfloat16", "wgmma_split_sm90"),
    # of head_dims that it does not take mma_sm80's, where keys are many
    ("B8,H2,S64x1024,D256,bfloat16", "mma_sm80"),
    ("B8,H2,S64x1023,D256,bfloat16", "wgmma_sm90"),
    ("B17,H1,S64x1024,D256,bfloat16", "wgmma_sm90"),
    ("B8,H2,S65x1024,D256,bfloat16", "wgmma_sm90"),
    ("B3,H2,S17x1024,D192,float16", "mma_sm80"),
    # what prefill_sm90 does not take, and softcap, which was not measured
    ("B8,H28/4,S17x19920,D128,bfloat16,softcap=30.0", "wgmma_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,dropout=0.1:7", "wgmma_dropout_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,bias=full", "wgmma_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,mask=full", "wgmma_sm90"),
    ("B8,H28/4,S17x19920,D128,bfloat16,alibi=heads", "wgmma_sm90"),
    # as few keys as queries, where tiles are narrow or fill one wave
    ("B64,H32/8,S64,D96,bfloat16", "mma_sm80"),
    ("B64,H32/8,S64,D128,bfloat16", "wgmma_sm90"),
    ("B4,H32,S48,D192,bfloat16", "mma_sm80"),
    ("B5,H32,S48,D192,bfloat16", "wgmma_sm90"),
    ("B64,H32/8,S64x65,D96,bfloat16", "wgmma_sm90"),
    ("B64,H32/8,S65x64,D96,bfloat16", "wgmma_sm90"),
    ("B64,H32/8,S17x64,D64,bfloat16,causal=bottom_right", "mma_sm80"),
    ("B64,H32/8,S17x2000,D64,bfloat16,window=47:none", "mma_sm80"),
    ("B64,H32/8,S17x2000,D64,bfloat16,window=48:none", "wgmma_sm90"),
    ("B64,H32/8,S64,D64,bfloat16,softcap=30.0", "wgmma_sm90"),
    ("B64,H32/8,S64,D64,bfloat16,dropout=0.1:7", "wgmma_dropout_sm90"),
]


@pytest.mark.parametrize("case, chosen", FEW_DENSE)
def test_which_kernel_is_chosen_for_few_queries_of_a_dense_call(case, chosen):
    if chosen not in CUDA:
        pytest.skip(f"this build has no {chosen}")
    assert fa_ext.explain(**shapes_only(Case.parse(case)), device=DEVICES["h200"])[0] == chosen


@pytest.mark.parametrize("case", [case for case, _ in FEW_DENSE if Case.parse(case).seq_q > 16])
def test_wgmma_sm90_leaves_to_prefill_sm90_what_that_takes_and_nothing_else(case):
    answers = _core.answers(**shapes_only(Case.parse(case)), device=DEVICES["h200"])
    if {"wgmma_sm90", "prefill_sm90"} <= set(CUDA) and answers["wgmma_sm90"][0] != "refuses":
        assert ("slower here than prefill_sm90" in answers["wgmma_sm90"][1]) == (answers["prefill_sm90"][0] == "takes")


@pytest.mark.parametrize(
    "case, chosen, reason",
    [
        ("B8,H28/4,S11x19920,D128,bfloat16", "mma_sm80", "slower here than mma_sm80"),  # one batch entry fills no wave
        ("B8,H28/4,S17x19920,D128,bfloat16", "wgmma_sm90", "slower here than wgmma_sm90"),
        ("B2,H448/28,S23x1088,D256,bfloat16", "wgmma_sm90", "batch_invariant"),
        ("B64,H32/8,S64,D64,bfloat16", "mma_sm80", "slower here than mma_sm80"),
        ("B4,H32,S48,D192,bfloat16", "wgmma_sm90", "slower here than wgmma_sm90"),
        ("B8,H2,S64x1024,D256,bfloat16", "wgmma_sm90", "slower here than wgmma_sm90"),
    ],
)
def test_with_batch_invariant_no_waves_are_counted(case, chosen, reason):
    got, why = fa_ext.explain(**shapes_only(Case.parse(case)), batch_invariant=True, device=DEVICES["h200"])
    if {chosen, "prefill_sm90"} <= set(CUDA):
        assert got == chosen and reason in why["prefill_sm90"], why


@pytest.mark.parametrize("queries, chosen", [(11, "mma_sm80"), (17, "wgmma_sm90")])
def test_q_with_one_head_for_all_stays_where_it_was(queries, chosen):
    """prefill_sm90 refuses it."""
    inputs = shapes_only(Case(8, 28, 4, queries, 19920, 128, dtype="bfloat16"))
    inputs["q"] = np.broadcast_to(inputs["q"][:, :1], inputs["q"].shape)
    if chosen in CUDA:
        assert fa_ext.explain(**inputs, device=DEVICES["h200"])[0] == chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["H8,S512,D64,float16", "H32/8,S1x4096,D128,bfloat16", "H16,S200x3000,D128,bfloat16,causal=bottom_right", "H28/4,S17x19920,D128,bfloat16", "H2,S64,D40,float32"])
def test_with_batch_invariant_the_batch_chooses_nothing(case, device):
    """Kernels differ in their bits."""
    found = {fa_ext.explain(**shapes_only(Case.parse(f"B{batch},{case}")), batch_invariant=True, device=DEVICES[device])[0] for batch in (1, 3, 16, 200)}
    assert len(found) == 1 and found != {None}, found


def _recorded():
    """{"<file> <problem> <cache>": {kernel: microseconds}} from the committed evidence."""
    cells = record.cells()
    return {key: {name: figures["us"] for name, figures in cell["figures"].items()} for key, cell in cells.items()}


def test_the_pick_is_within_5_percent_of_the_best_recorded_kernel():
    """Of the kernels of this build, in every dense cell of the forward that was recorded on an H200 with the kernel that is picked."""
    slow, seen = [], 0
    for name, times in _recorded().items():
        times = {kernel: us for kernel, us in times.items() if kernel in CUDA}
        if "operation=" in name or ",q=" in name or len(times) < 2 or "h200" not in name.split()[0]:
            continue
        case = Case.parse(name.split()[1])
        seen += 1
        pick, _ = fa_ext.explain(**shapes_only(case), device=DEVICES["h200"])
        if pick not in times:  # it takes the call since the record was made
            continue
        best = min(times, key=times.get)
        if times[pick] > 1.05 * times[best]:
            slow.append(f"{name}: {pick} ({times[pick]} us), {best} takes {times[best]} us")
    if not seen:
        pytest.skip("no evidence of two kernels is committed")
    assert not slow, "\n".join(slow)
