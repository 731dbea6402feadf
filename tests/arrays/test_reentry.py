"""Producers of arrays and numbers that call fa_ext again, with themselves: an error, however deep Python lets them go."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fa_ext

CALLS = {
    "__dlpack__": "A.__dlpack_device__ = lambda self: (1, 0)\nA.__dlpack__ = lambda self, **_: call(self)",
    "__dlpack_device__": "A.__dlpack_device__ = lambda self: call(self)\nA.__dlpack__ = None",
    "__cuda_array_interface__": "A.__cuda_array_interface__ = property(call)",
    "attribute": "A.__getattr__ = lambda self, name: call(self)",
    "__index__": "x = np.ones((1, 1, 1, 8), 'f4')\ncall = lambda self: fa_ext.attention(x, x, x, window=(self, 0))\nA.__index__ = call",
    "__float__": "x = np.ones((1, 1, 1, 8), 'f4')\ncall = lambda self: fa_ext.attention(x, x, x, scale=self)\nA.__float__ = call",
    "__cuda_stream__": "x = np.ones((1, 1, 1, 8), 'f4')\ncall = lambda self: fa_ext.attention(x, x, x, stream=self)\nA.__cuda_stream__ = call",
    "device_info": "call = _core.device_info\nA.__index__ = lambda self: call(self)",
    "time_launches": "call = lambda self: _core.time_launches(self, 1)\nA.__index__ = call",
    "to_numpy": "call = fa_ext.to_numpy\nA.__dlpack_device__ = lambda self: (1, 0)\nA.__dlpack__ = lambda self, **_: call(self)",
    "merge": "call = lambda self: fa_ext.merge([self], [self])\nA.__dlpack_device__ = lambda self: call(self)\nA.__dlpack__ = None",
    "append": "call = lambda self: fa_ext.append(self, self, self, self)\nA.__cuda_array_interface__ = property(call)",
    "attention_backward": "call = lambda self: fa_ext.attention_backward(*[self] * 6)\nA.__cuda_array_interface__ = property(call)",
}  # fmt: skip


@pytest.mark.parametrize("way", CALLS)
def test_an_endless_way_back_ends_in_an_error(way):
    code = f"""
import sys, threading
import numpy as np
import fa_ext
from fa_ext import _core
class A: pass
call = lambda self: fa_ext.attention(self, self, self)
{CALLS[way]}
sys.setrecursionlimit(100000)
def go():
    for turn in range(3):
        try:
            call(A())
        except RecursionError as error:
            assert "fa_ext" in str(error), error
        else:
            raise AssertionError("no RecursionError")
    x = np.ones((1, 1, 1, 8), "f4")
    assert (fa_ext.attention(x, x, x) == 1).all()
    done.append(True)
done = []
go()
threading.stack_size(1 << 20)
thread = threading.Thread(target=go)
thread.start()
thread.join()
assert len(done) == 2
"""
    environment = os.environ | {"PYTHONPATH": str(Path(fa_ext.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_producer_may_call():
    """Ten calls within each other are none too many."""
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 8)).astype("f4")

    class Lazy:
        def __init__(self, depth):
            self.depth = depth

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            inner = Lazy(self.depth - 1) if self.depth else x
            return fa_ext.to_numpy(inner).__dlpack__(**options)

    np.testing.assert_array_equal(fa_ext.attention(Lazy(10), x, x), fa_ext.attention(x, x, x))
