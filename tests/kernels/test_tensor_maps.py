"""The tensor maps that a thread keeps for kernels on Hopper, on the emulator: one for each map of a kernel, none of them stale, and
errors that name the operand."""

import ctypes
import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from tests import emulator
from tests.emulator.emulated import on_the_cpu

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

#: The instances that are built, the operands that have maps, and how many maps those are.
KERNELS = {
    "wgmma_sm90": ("^d64_full_f16$", ("q", "k", "v", "out"), 4),
    "wgmma_backward_sm90": ("^d64_full_f16$", ("q", "k", "v", "out", "dout"), 9),
    "wgmma_fused_backward_sm90": ("^d64_full_f16$", ("q", "k", "v", "dout"), 4),
}
SHAPE = (1, 2, 64, 64)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel): its name in this process, and the counter of maps that it had encoded."""
    folder, loaded = tmp_path_factory.mktemp("maps"), {}

    def get(kernel):
        if kernel not in loaded:
            target = emulator.build(kernel, folder / f"{kernel}.so", instances=KERNELS[kernel][0])
            loaded[kernel] = emulator.load(target, kernel), ctypes.c_uint64.in_dll(ctypes.CDLL(str(target)), "emulated_encodings")
        return loaded[kernel]

    with on_the_cpu(lambda: [name for name, _ in loaded.values()]):
        yield get


class Arrays:
    """Operands and results of both passes, each at a multiple of 256 bytes."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            setattr(self, name, self.aligned(np.float16, SHAPE))
            getattr(self, name)[:] = random.standard_normal(SHAPE)
        self.lse = self.aligned(np.float32, SHAPE[:3])
        fa_ext.attention(self.q, self.k, self.v, out=(self.out, self.lse), kernel="cpu_ref")

    @staticmethod
    def aligned(dtype, shape):
        memory = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 256, np.uint8)
        return memory[-memory.ctypes.data % 256 :][: memory.size - 256].view(dtype).reshape(shape)

    def call(self, kernel, name):
        """The results of a kernel, as bytes."""
        if "backward" not in kernel:
            return [fa_ext.attention(self.q, self.k, self.v, out=self.out, kernel=name).tobytes()]
        grads = fa_ext.attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, grads=(self.dq, self.dk, self.dv), deterministic=False, kernel=name
        )
        return [x.tobytes() for x in grads]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_map_is_encoded_once_for_calls_over_the_same_arrays(emulated, kernel):
    name, encodings = emulated(kernel)
    first, second = Arrays(0), Arrays(1)
    wanted = [arrays.call(kernel, name) for arrays in (first, second)]
    for arrays, results in ((second, wanted[1]), (first, wanted[0]), (first, wanted[0]), (second, wanted[1])):
        before = encodings.value
        arrays.call(kernel, name)
        changed = encodings.value - before
        before = encodings.value
        assert arrays.call(kernel, name) == results
        assert encodings.value == before, "a map of the call before was encoded again"
        assert changed in (0, KERNELS[kernel][2]), "not each of the kernel's maps has a place of its own"
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_error_names_the_operand_and_leaves_no_map_behind(emulated, kernel, monkeypatch):
    name, _ = emulated(kernel)
    arrays = Arrays(2)
    wanted = arrays.call(kernel, name)
    for operand in KERNELS[kernel][1]:
        fresh = Arrays(2)
        monkeypatch.setenv("FA_EMULATOR_REFUSES", str(getattr(fresh, operand).ctypes.data))
        for _ in range(2):
            with pytest.raises(fa_ext.CudaError, match=f"cuTensorMapEncodeTiled failed for {operand} with CUresult 1"):
                fresh.call(kernel, name)
        monkeypatch.delenv("FA_EMULATOR_REFUSES")
        assert fresh.call(kernel, name) == wanted
