"""What the CUDA kernels of the backward pass answer on devices that are only described."""

import numpy as np
import pytest

import fa_ext
import gradients
import rows
from case import Case
from devices import DEVICES, shapes_only

CUDA = [name for name in fa_ext.kernels("backward") if rows.device_of(name) == "cuda"]

pytestmark = pytest.mark.skipif(not CUDA, reason="no CUDA kernel of the backward pass is built")


def described(case, **changes):
    """Arguments of a call whose elements do not matter."""
    given = shapes_only(case)
    out = np.lib.stride_tricks.as_strided(given["q"], case.out_shape, given["q"].strides)
    lse = np.broadcast_to(np.zeros((), np.float32), (case.batch, case.heads, case.seq_q))
    return given | {"dout": out, "out": out, "lse": lse} | changes


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
    assert fa_ext.explain_backward(**given, device=groups)[0] in CUDA
    bias = np.zeros((512, 512), np.float16)
    chosen, reasons = fa_ext.explain_backward(**given, bias=bias, wrt=("bias",), device=groups, kernel="simt_backward")
    assert chosen is None and "FA_EXT_WORKSPACE_MB" in reasons["simt_backward"]
