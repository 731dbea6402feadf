"""The answers of the CUDA kernels of the backward pass on devices that are only described."""

import dataclasses

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.recording import record
from tests.contract import gradients, runner
from tests.contract.devices import DEVICES
from tests.contract.gradients import described

CUDA = [name for name in fa_ext.kernels("backward") if runner.device_of(name) == "cuda"]

pytestmark = [
    pytest.mark.skipif(not CUDA, reason="no CUDA kernel of the backward pass is built"),
    runner.needs_every_instance,
]


@pytest.mark.parametrize("device", DEVICES)
def test_simt_backward_takes_everything(device):
    for case in gradients.contract("simt_backward")[::7]:
        problem = gradients.make(gradients.shrunk(case, 5))
        chosen, reasons = fa_ext.explain_backward(**problem.inputs, wrt=problem.wrt, device=DEVICES[device], kernel="simt_backward")
        assert chosen == "simt_backward", (str(case), reasons)
        assert "on a CUDA device" in reasons["cpu_ref_backward"]


def test_its_reasons():
    given = described(Case(2, 8, 2, 512, 512, 64))
    small = DEVICES["h200"] | {"smem_per_block": 16 << 10}
    older = DEVICES["h200"] | {"cc": 75}
    tight = DEVICES["h200"] | {"workspace_limit": 8 * 4 * 512 - 1}
    for device, word in ((small, "shared memory"), (older, "compute capability"), (tight, "FA_EXT_WORKSPACE_MB")):
        chosen, reasons = fa_ext.explain_backward(**given, device=device, kernel="simt_backward")
        assert chosen is None and word in reasons["simt_backward"]
    # One group of heads at a time is enough, but for a bias whose gradient may add up over all heads.
    groups = DEVICES["h200"] | {"workspace_limit": 8 * 4 * 512}
    assert fa_ext.explain_backward(**given, device=groups, kernel="simt_backward")[0] == "simt_backward"
    bias = np.zeros((512, 512), np.float16)
    chosen, reasons = fa_ext.explain_backward(**given, bias=bias, wrt=("bias",), device=groups, kernel="simt_backward")
    assert chosen is None and "FA_EXT_WORKSPACE_MB" in reasons["simt_backward"]


@pytest.mark.parametrize(
    "device, case, kernel",
    [
        ("h200", "B4,H16,S4096,D128,bfloat16,causal=True", "wgmma_backward_sm90"),
        ("h100", "B2,H8/2,S900,D64,float16,window=128:0,sinks=same", "wgmma_backward_sm90"),
        ("h200", "B2,H4,S300,D64,float16,bias=full", "mma_backward_sm80"),
        ("h200", "B2,H4,S304,D64,float16,bias=full", "wgmma_fused_backward_sm90"),
        ("h200", "B1,H8,S2048,D256,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B1,H8/2,S700,D136,float16,causal=bottom_right,softcap=5.0", "wgmma_backward_sm90"),
        ("h200", "B1,H8,S2048,D192/128,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B1,H8,S2048,D128/64,bfloat16", "mma_backward_sm80"),
        ("h200", "B1,H8,S2048,D256/128,bfloat16", "mma_backward_sm80"),
        ("a100", "B1,H8,S2048,D192/128,bfloat16", "mma_backward_sm80"),
        ("a100", "B4,H16,S4096,D128,bfloat16,causal=True", "mma_backward_sm80"),
        ("rtx4090", "B1,H4,S1024,D192/128,float16,mask=rows", "mma_backward_sm80"),
        ("h200", "B1,H4,S512,D64,float32", "simt_backward"),
        ("h200", "B1,H8/2,S2048,D64,float16,causal=True", "wgmma_backward_sm90"),
        ("h200", "B1,H8,S4096,D64,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B8,H32,S1024,D64,float16,causal=True", "wgmma_fused_backward_sm90"),
        ("h100", "B16,H32,S256,D64,bfloat16", "wgmma_fused_backward_sm90"),
        ("h100", "B1,H32,S16384,D64,bfloat16", "wgmma_fused_backward_sm90"),
        ("h100", "B1,H32,S4096x16384,D64,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B1,H16,S16384,D128,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B1,H16,S8192,D128,bfloat16", "wgmma_backward_sm90"),
        ("h200", "B1,H16,S16384,D128,bfloat16,causal=True", "wgmma_backward_sm90"),
    ],
)
def test_which_kernel_is_chosen(device, case, kernel):
    given = described(Case.parse(case))
    wrt = tuple(name for name in gradients.NAMES if name in given)
    assert fa_ext.explain_backward(**given, wrt=wrt, device=DEVICES[device])[0] == kernel


@pytest.mark.parametrize(
    "case, wrt, kernel",
    [
        ("B4,H16,S4096,D128,bfloat16", "qkv", "wgmma_fused_backward_sm90"),
        ("B4,H16,S4096,D128,bfloat16,causal=True", "qkv", "wgmma_fused_backward_sm90"),
        ("B8,H16,S2048,D128,bfloat16,causal=True", "qkv", "wgmma_backward_sm90"),
        ("B4,H20,S4096,D96,bfloat16", "qkv", "wgmma_backward_sm90"),
        ("B4,H20,S4096,D96,bfloat16,causal=True", "qkv", "wgmma_backward_sm90"),
        ("B4,H20,S4096,D72,float16", "qkv", "wgmma_backward_sm90"),
        ("B4,H20,S4096,D104,float16", "qkv", "wgmma_fused_backward_sm90"),
        ("B2,H12/4,S3000,D64,bfloat16", "qkv", "wgmma_backward_sm90"),
        ("B4,H12/4,S3000,D64,bfloat16", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H32/8,S2048,D64,bfloat16", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H64/8,S8192,D64,bfloat16", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H28/4,S4096,D128,bfloat16,causal=True", "qkv", "wgmma_backward_sm90"),
        ("B1,H40/8,S6144,D128,bfloat16,causal=True", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H64/8,S8192,D128,bfloat16,causal=True", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H8/2,S2048,D64,float16", "qkv", "wgmma_backward_sm90"),
        ("B1,H8/2,S2048,D64,float16,causal=True", "qkv", "wgmma_backward_sm90"),
        ("B1,H8/2,S1024,D64,float16,causal=True", "qkv", "wgmma_backward_sm90"),
        ("B1,H8/2,S512,D64,float16", "qkv", "wgmma_backward_sm90"),
        ("B1,H8,S512,D64,float16", "qkv", "wgmma_fused_backward_sm90"),
        ("B4,H16,S512,D64,float16", "qkv", "wgmma_backward_sm90"),
        ("B16,H32,S512,D64,float16", "qkv", "wgmma_fused_backward_sm90"),
        ("B1,H8/2,S8192,D64,float16", "kv", "wgmma_backward_sm90"),
        ("B1,H8,S8192,D64,float16,window=256:0", "qkv", "wgmma_backward_sm90"),
        ("B1,H8,S256x8192,D64,float16", "qkv", "wgmma_backward_sm90"),
        ("B1,H8,S8192,D192,float16", "qkv", "wgmma_backward_sm90"),
        ("B1,H8,S8192,D192/128,float16", "qkv", "wgmma_backward_sm90"),
    ],
)
def test_which_is_chosen_for_sums_in_any_order(case, wrt, kernel):
    given = described(Case.parse(case))
    found, reasons = fa_ext.explain_backward(**given, wrt=tuple(wrt), deterministic=False, device=DEVICES["h200"])
    assert found == kernel, reasons


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("case", ["H8,S512,D64,float16", "H32,S1024,D64,bfloat16,causal=True", "H16,S256,D64,bfloat16", "H8/2,S2048,D128,float16"])
def test_with_batch_invariant_the_batch_decides_nothing(case, deterministic):
    """Kernels differ in their bits."""
    found = set()
    for batch in (1, 2, 5, 16, 64):
        given = described(Case.parse(f"B{batch},{case}"), batch_invariant=True)
        found.add(fa_ext.explain_backward(**given, deterministic=deterministic, device=DEVICES["h100"])[0])
    assert len(found) == 1, found


@pytest.mark.parametrize("case", ["B1,H2,S127x2000,D64,bfloat16", "B1,H2,S2000x127,D64,float16", "B1,H2,S0x200,D128,bfloat16"])
def test_few_queries_or_keys_go_elsewhere_unless_named(case):
    name, given = "wgmma_fused_backward_sm90", described(Case.parse(case))
    for kernel, chosen in ((None, False), (name, True)):
        found, reasons = fa_ext.explain_backward(**given, kernel=kernel, deterministic=False, device=DEVICES["h200"])
        assert (found == name) == chosen, reasons


def test_the_pick_is_within_5_percent_of_the_best_recorded_kernel():
    """Of the kernels of this build, in every cell of the backward pass that was recorded on a described GPU of their code."""
    slow, seen = [], 0
    for name, cell in record.cells(today=True).items():
        machine, line, _ = name.split()
        device = next((device for device in DEVICES if device in machine), None)
        times = {kernel: run["us"] for kernel, run in cell["figures"].items() if kernel in CUDA}
        if "operation=backward" not in line or device is None:
            continue
        case = Case.parse(line)
        given = described(dataclasses.replace(case, operation="attention", deterministic=True, accumulate=False, dlse=False))
        wrt = tuple(name for name in gradients.NAMES if name in given)
        given |= {"dlse": given["lse"]} if case.dlse else {}
        pick, _ = fa_ext.explain_backward(**given, wrt=wrt, deterministic=case.deterministic, device=DEVICES[device])
        seen += pick in times
        if pick in times and times[pick] > 1.05 * min(times.values()):
            slow.append(f"{name}: {pick} of {times}")
    if not seen:
        pytest.skip("no evidence of two kernels is committed")
    assert not slow, "\n".join(slow)
