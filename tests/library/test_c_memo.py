"""What a thread remembers of its last call from C, where arrays for every result are given: all but their pointers."""

import numpy as np
import pytest

import fa_ext
from tests.library.support import c_interface
from tests.library.support.c_interface import BACKWARD, FORWARD, array_of, compiled

pytestmark = pytest.mark.skipif(c_interface.missing_compiler() is not None, reason=str(c_interface.missing_compiler()))


def test_calls_like_the_one_before_take_their_own_arrays(tmp_path):
    client = c_interface.Client(compiled(tmp_path, "c"))
    rng = np.random.default_rng(0)
    shapes = {"rows": (1, 2, 9), **dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), (1, 2, 9, 16))}

    def aligned(name):
        x = c_interface.aligned(4 * np.prod(shapes.get(name, shapes["rows"])), 0).view(np.float32)
        x[:] = rng.standard_normal(x.size)
        return x.reshape(shapes.get(name, shapes["rows"]))

    calls = [{name: aligned(name) for name in {*BACKWARD, *FORWARD} & {*shapes, "lse", "dlse"}} for _ in range(3)]
    for operation, names in (("forward", FORWARD), ("backward", BACKWARD)):
        for held in calls:
            assert client.call(operation, [array_of(held[name]) if name in held else None for name in names]) == 0, client.said()
    for held in calls:
        q, k, v, dout, dlse = (held[name] for name in ("q", "k", "v", "dout", "dlse"))
        out, lse = fa_ext.attention(q, k, v, return_lse=True)
        wanted = out, lse, *fa_ext.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
        for name, x in zip(("out", "lse", "dq", "dk", "dv"), wanted, strict=True):
            assert held[name].tobytes() == x.tobytes(), name
