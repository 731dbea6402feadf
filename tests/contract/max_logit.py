"""Calls with max_logit, and the checks that a kernel with it passes: shared by test_max_logit.py and the emulator's."""

import numpy as np

from bench.problems.case import Case
from fa_ext.judge.max_logit import failures
from tests.contract import runner

#: The kernels that take it.
TAKES = {"cpu_ref", "cpu_simd", "simt", "mma_sm80"}
#: More options of a call.
OPTIONS = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "top left, sinks": {"causal": "top_left", "sinks": "float32"},
    "window, bias": {"window": (20, 9), "bias": "full32"},
    "bias that hides": {"bias": "holes"},
    "mask, softcap": {"mask": "rows", "softcap": 3.0, "sinks": "same"},
    "intervals": {"intervals": "two"},
    "slopes": {"alibi": "heads", "causal": "bottom_right"},
    "dropout": {"dropout": (0.4, 7)},
    "layout, negative scale": {"layout": "bshd", "window": (None, 12), "scale": -0.3},
}
SIZES = ((13, 17, 40), (70, 133, 40), (1, 90, 64), (3, 700, 64))


def case_of(kernel, name, queries, keys, dim, dim_v=None, **more) -> Case:
    dtype = "float16" if "mma" in kernel else "float32"
    return Case(2, 4, 2, queries, keys, dim, dim_v, **{"dtype": dtype} | OPTIONS[name] | more)


def run(kernel, inputs, maxima, **more):
    """(out, lse) of a call that raises ``maxima``, a NumPy array, in place."""
    given = runner.on(kernel, inputs | {"max_logit": maxima})
    found = runner.attention(kernel, **given, return_lse=True, **more)
    if given["max_logit"] is not maxima:
        maxima[...] = runner.to_host(given["max_logit"])
    return found


def check_close(found, inputs):
    """A maximum that was -inf, against float64."""
    wrong = failures(found, np.full_like(found, -np.inf), **{name: x for name, x in inputs.items() if name != "v"})
    assert not wrong, wrong


def check(kernel, case: Case, inputs=None):
    """(H) and (B, H) from -inf, from what is larger, and from a stride; the bits of a call's other results stay."""
    inputs = inputs or case.host_inputs()
    own, shared = np.full((case.batch, case.heads), -np.inf, np.float32), np.full(case.heads, -np.inf, np.float32)
    results = [run(kernel, inputs, own), run(kernel, inputs, shared)]
    check_close(own, inputs)
    np.testing.assert_array_equal(shared, own.max(axis=0))
    memory = np.full((3 * case.batch, 2 * case.heads), 7, np.float32)
    apart = memory[::-3, ::2]
    apart[...] = np.where(np.arange(case.heads) % 2, 1e30, -1e30)
    results.append(run(kernel, inputs, apart))
    np.testing.assert_array_equal(apart[:, 1::2], np.float32(1e30))
    np.testing.assert_array_equal(apart[:, ::2], np.maximum(own, np.float32(-1e30))[:, ::2])
    assert (memory[1::3] == 7).all() and (memory[:, 1::2] == 7).all()
    for found in results[1:]:
        for x, y in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(runner.bits(x), runner.bits(y))
    return results[0]


def all_negative(kernel):
    """Maxima below 0, whose order as integers is the other way round."""
    case = case_of(kernel, "causal", 70, 133, 40)
    inputs = case.host_inputs()
    inputs["q"], inputs["k"] = np.abs(inputs["q"]), -np.abs(inputs["k"]) - np.asarray(0.25, inputs["k"].dtype)
    check(kernel, case, inputs)
    found = np.array([-1e30, -0.0, 0.0, np.nan], np.float32)
    run(kernel, inputs, found)
    assert -1e3 < found[0] < 0
    np.testing.assert_array_equal(runner.bits(found[1:3]), runner.bits(np.array([-0.0, 0.0], np.float32)))
    assert np.isnan(found[3])


def zeros(kernel):
    """A product of 0 is above all that is negative, and leaves a 0 of either sign."""
    inputs = case_of(kernel, "none", 9, 20, 40).host_inputs()
    inputs["k"] = np.zeros_like(inputs["k"])
    for scale in (0.5, -0.5, 0.0):
        found = np.array([-np.inf, -1e-38, -0.0, 3.0], np.float32)
        run(kernel, inputs | {"scale": scale}, found)
        np.testing.assert_array_equal(found, np.array([0, 0, 0, 3], np.float32))


def nan_raises_nothing(kernel):
    """NaN in rows that see each other is passed over; what hidden keys hold does not matter."""
    case = case_of(kernel, "none", 30, 50, 40)
    inputs = case.host_inputs()
    inputs["q"][:, 1, 3] = np.nan
    inputs["k"][:, 0, 7] = np.nan
    inputs["q"][:, 3] = np.nan
    check(kernel, case, inputs)
    for values, more in (("nan_outside", {"window": (20, 10)}), ("nan_tail", {"causal": "bottom_right"})):
        check(kernel, case_of(kernel, "none", 60, 300, 64, values=values, **more))


def largest_is_hidden(kernel):
    """The largest product of a row at keys that causal, window, mask, intervals or a bias of -inf hide raises nothing."""
    case = case_of(kernel, "none", 40, 90, 40)
    inputs = case.host_inputs()
    inputs["q"] = np.abs(inputs["q"])
    inputs["k"][:, :, 60:] = 8
    seen = np.ones((1, 1, 40, 90), bool)
    seen[..., 60:] = False
    for more in (
        {"causal": "top_left"}, {"window": (None, 9)}, {"mask": seen}, {"bias": np.where(seen, 0, -np.inf).astype(inputs["q"].dtype)},
        {"intervals": np.tile(np.array([0, 60], np.int32), (1, 1, 40, 1))},
        {"intervals": np.tile(np.array([[0, 20], [30, 60]], np.int32), (1, 1, 40, 1, 1))},
    ):  # fmt: skip
        check(kernel, case, inputs | more)


def empty(kernel):
    """No query, no key, no visible key: the old values stay."""
    dtype = np.float16 if "mma" in kernel else np.float32
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        q, k = np.ones((2, 4, queries, 64), dtype), np.ones((2, 2, keys, 64), dtype)
        found = np.array([-np.inf, 2, np.nan, -3], np.float32)
        run(kernel, {"q": q, "k": k, "v": k}, found)
        np.testing.assert_array_equal(found, np.array([-np.inf, 2, np.nan, -3], np.float32))
    inputs = case_of(kernel, "none", 20, 30, 40).host_inputs()
    mask = np.ones((2, 4, 20, 30), bool)
    mask[:, 2], mask[0, 1] = False, False
    found = np.full((2, 4), -np.inf, np.float32)
    run(kernel, inputs | {"mask": mask}, found)
    np.testing.assert_array_equal(np.isinf(found), [[False, True, True, False], [False, False, True, False]])


CHECKS = (all_negative, zeros, nan_raises_nothing, largest_is_hidden, empty)
