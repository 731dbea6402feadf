"""``kernel=None``: the row that the library takes by itself, held against what was measured."""

import math

import numpy as np
import pytest

import fa_ext
import rows
from bench import record
from case import Case


def _recorded():
    """{"<file> <problem> <cache>": {row: microseconds}} from the committed evidence."""
    cells = record.cells()
    return {key: {row: figures["us"] for row, figures in cell["contenders"].items()} for key, cell in cells.items()}


@pytest.mark.gpu
def test_the_pick_is_within_5_percent_of_the_best_recorded_row():
    """Of the rows of this build, in every cell that was recorded on a GPU."""
    slow, seen = [], 0
    for name, times in _recorded().items():
        case = Case.parse(name.split()[1])
        times = {row: us for row, us in times.items() if row in fa_ext.kernels() and rows.device_of(row) == "cuda"}
        if len(times) < 2:
            continue
        seen += 1
        pick, _ = fa_ext.explain(**_shapes_only(case))
        best = min(times, key=times.get)
        if times.get(pick, np.inf) > 1.05 * times[best]:
            slow.append(f"{name}: {pick} ({times.get(pick)} us), {best} takes {times[best]} us")
    if not seen:
        pytest.skip("no evidence of two rows is committed")
    assert not slow, "\n".join(slow)


def _shapes_only(case):
    """A case's arguments with device memory that holds nothing in particular; k and v share it."""
    library = "torch" if case.dtype == "bfloat16" and rows.has("torch") else "cupy"
    largest = max(map(math.prod, (case.q_shape, case.k_shape, case.v_shape)))
    memory = rows.filled(library, largest, case.dtype, 0)
    shapes = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape}
    arrays = {n: memory[: math.prod(s)].reshape(s) for n, s in shapes.items()}
    scores = (case.batch, case.heads, case.seq_q, case.seq_k)
    for name, dtype in (("bias", case.dtype), ("mask", "bool")):
        if getattr(case, name):
            arrays[name] = rows.filled(library, math.prod(scores), dtype, 0).reshape(scores)
    return arrays | case.options()
