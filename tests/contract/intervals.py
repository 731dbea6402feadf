"""Calls with intervals, and the checks that a kernel with them passes: shared by test_intervals.py and the emulator's."""

import numpy as np

import fa_ext
from bench.problems.case import Case
from bench.problems.dense import INTERVALS
from tests.contract import gradients, runner

#: The kernels that take them, forward and backward.
TAKES = {"cpu_ref", "cpu_simd", "simt", "mma_sm80", "cpu_ref_backward", "cpu_simd_backward", "simt_backward", "mma_backward_sm80"}
#: Those that take them beside some options alone; tests/kernels/test_light_sm90.py and test_light_backward_sm90.py have their calls.
TAKES_SOME = {"wgmma_sm90", "wgmma_fused_backward_sm90", "wgmma_dropout_backward_sm90"}
#: More options of a call.
OPTIONS = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "top left, sinks": {"causal": "top_left", "sinks": "float32"},
    "window, bias": {"window": (20, 9), "bias": "full32"},
    "mask, softcap": {"mask": "rows", "softcap": 3.0, "sinks": "same"},
    "slopes": {"alibi": "heads", "causal": "bottom_right"},
    "dropout": {"dropout": (0.4, 7)},
    "layout": {"layout": "bshd", "window": (None, 12)},
}


def width(kernel):
    return "float16" if "mma" in kernel else "float32"


def case_of(kernel, kind, name, queries, keys, dim, dim_v=None, **more) -> Case:
    return Case(2, 4, 2, queries, keys, dim, dim_v, **{"dtype": width(kernel), "intervals": kind} | OPTIONS[name] | more)


def as_mask(intervals, batch, heads, queries, keys):
    """Boolean (B, H, Sq, Sk): the pairs that intervals leave, key by key."""
    given = intervals if intervals.ndim == 5 else intervals[:, :, :, None]
    given = np.broadcast_to(given, (batch, heads, queries, *given.shape[3:]))
    seen = np.zeros((batch, heads, queries, keys), bool)
    for at in np.ndindex(batch, heads, queries):
        for begin, end in given[at].tolist():
            seen[at][max(begin, 0) : max(min(end, keys), 0)] = True
    return seen


def masked(case: Case, inputs: dict) -> dict:
    """The same call by a mask in place of intervals."""
    mask = as_mask(inputs["intervals"], case.batch, case.heads, case.seq_q, case.seq_k)
    rest = {name: x for name, x in inputs.items() if name != "intervals"}
    return rest | {"mask": mask & inputs["mask"] if "mask" in inputs else mask}


def same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(runner.bits(runner.to_host(x)), runner.bits(runner.to_host(y)))


def forward(kernel, case: Case):
    """Judged by float64."""
    report = fa_ext.verify(**runner.on(kernel, case.host_inputs()), kernel=kernel)
    assert report, f"{case}\n{report}"


def backward(kernel, case: Case):
    """The same of gradients; out and LSE are the reference's."""
    report = gradients.verdict(kernel, gradients.make(case))
    assert report, f"{case}\n{report}"


def check(kernel, case: Case):
    (backward if "backward" in kernel else forward)(kernel, case)


def as_one_mask(kernel, case: Case, tile: dict):
    """The bits of a mask of all pairs, by the same instance: `tile` says how the call with a mask is made to take it."""
    inputs = case.host_inputs()
    found = runner.attention(kernel, **inputs, return_lse=True)
    same_bits(found, runner.attention(kernel, **masked(case, inputs) | tile, return_lse=True))


def every_broadcast(kernel):
    """Each axis of extent 1 or its own, one interval or two, and strides of any sign and 0."""
    base = case_of(kernel, "two", "causal", 19, 37, 16)
    whole = base.host_inputs()["intervals"]
    rest = {name: x for name, x in base.host_inputs().items() if name != "intervals"}
    for axes in np.ndindex(2, 2, 2, 2):
        part = whole[tuple(slice(None, 1) if one else slice(None) for one in axes[:3])]
        part = part[:, :, :, 0] if axes[3] else part
        full = np.ascontiguousarray(np.broadcast_to(part, (*whole.shape[:3], *part.shape[3:])))
        memory = np.full((*(2 * n for n in full.shape[:-1]), 4), 12345, np.int32)
        apart = memory[tuple(slice(None, None, -2) for _ in full.shape)]
        apart[...] = full
        wanted = runner.attention(kernel, **rest, intervals=full, return_lse=True)
        for given in (part, np.broadcast_to(part, full.shape), apart):
            same_bits(runner.attention(kernel, **rest, intervals=given, return_lse=True), wanted)


def hidden_pairs_reach_nothing(kernel):
    """NaN at keys that no query of the call may see, by causal and window, reaches nothing; at keys that intervals alone hide it may
    spread to queries of the same heads, and cpu_ref lets none through."""
    for kind in INTERVALS:
        forward(kernel, case_of(kernel, kind, "none", 60, 300, 64, values="nan_outside", window=(20, 10)))
        forward(kernel, case_of(kernel, kind, "none", 60, 300, 64, values="nan_tail", causal="bottom_right"))


def as_documents(kernel):
    """Documents as intervals, as segments (where a kernel takes them), and as sequences of their own agree within the bound."""
    case = case_of(kernel, "documents", "none", 200, 200, 32)
    inputs = case.host_inputs()
    q, k, v, intervals = (inputs[name] for name in ("q", "k", "v", "intervals"))
    wanted, wanted_lse = fa_ext.reference.attention(q, k, v, intervals=intervals)
    starts = np.unique(np.append(intervals[0, 0, :, 0], 200)).astype(np.int32)
    packed = {name: np.ascontiguousarray(x[:1].swapaxes(1, 2)[0]) for name, x in (("q", q), ("k", k), ("v", v))}
    apart, apart_lse = fa_ext.reference.attention(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts)
    np.testing.assert_allclose(apart, wanted[0].swapaxes(0, 1), atol=1e-9)
    np.testing.assert_allclose(apart_lse, wanted_lse[0], atol=1e-9)
    forward(kernel, case)


def empty_arrays(kernel):
    """Results without keys are 0, and sizes of 0 are legal."""
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        q, k = np.zeros((2, 4, queries, 64), width(kernel)), np.zeros((2, 2, keys, 64), width(kernel))
        out, lse = runner.attention(kernel, q, k, k, intervals=np.zeros((2, 4, queries, 2), np.int32), return_lse=True)
        assert not out.any() and (lse == -np.inf).all()


CHECKS = (every_broadcast, hidden_pairs_reach_nothing, as_documents, empty_arrays)
