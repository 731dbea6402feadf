"""Calls with ids in no order, and the checks that a kernel with ``segments`` passes: shared by test_segments.py and the emulator's."""

import numpy as np

import fa_ext
from bench.problems.placement import Unplaceable
from tests.contract import gradients, runner

#: The kernels that take them, forward and backward.
TAKES = {"cpu_ref", "simt", "mma_sm80", "cpu_ref_backward", "simt_backward", "mma_backward_sm80"}
BATCH, HEADS, HEADS_KV = 2, 4, 2
#: More options of a call, made from its batch, queries and keys.
OPTIONS = {
    "none": lambda rng, b, n, m: {},
    "causal": lambda rng, b, n, m: {"causal": "bottom_right"},
    "top left, sinks": lambda rng, b, n, m: {"causal": "top_left", "sinks": rng.standard_normal(HEADS).astype(np.float32)},
    "window, bias": lambda rng, b, n, m: {"window": (20, 9), "bias": rng.standard_normal((1, HEADS, n, m)).astype(np.float32)},
    "mask, softcap": lambda rng, b, n, m: {"mask": rng.random((b, 1, n, m)) < 0.7, "softcap": 3.0},
    "slopes": lambda rng, b, n, m: {"alibi": rng.random(HEADS).astype(np.float32), "causal": "bottom_right"},
    "dropout": lambda rng, b, n, m: {"dropout": (0.4, 7)},
    "lengths": lambda rng, b, n, m: {"seqlens_q": np.array([n, n // 2], np.int32), "seqlens_k": np.array([m // 3, m], np.int32), "causal": "bottom_right"},
    "range": lambda rng, b, n, m: {"k_range": (np.array([2, 0], np.int32), np.array([m, m // 2], np.int32))},
    "positions": lambda rng, b, n, m: {"positions": rng.integers(0, m, (b, n)).astype(np.int32), "causal": "bottom_right"},
}  # fmt: skip


def width(kernel):
    return np.dtype(np.float16 if "mma" in kernel else np.float32)


def drawn(name, queries, keys, dim=16, dim_v=None, dtype=np.float32, seed=0, ordered=False):
    """The arguments of a call with ids in no order, or (``ordered``) of documents one behind the other, and the same arguments but a
    mask that says what they say."""
    rng = np.random.default_rng([seed, queries, keys, dim])
    shapes = {"q": (HEADS, queries, dim), "k": (HEADS_KV, keys, dim), "v": (HEADS_KV, keys, dim_v or dim)}
    given = {x: rng.standard_normal((BATCH, *shape)).astype(dtype) for x, shape in shapes.items()}
    given |= OPTIONS[name](rng, BATCH, queries, keys)
    names = np.array([-(2**31), -1, 0, 2**31 - 1], np.int32)
    q_ids, k_ids = (names[rng.integers(0, 4, (BATCH, n))] for n in (queries, keys))
    q_ids[:, -1] = 12345  # a document without keys
    if ordered:  # so that whole tiles see nothing of each other
        q_ids, k_ids = (np.sort(rng.integers(-5, 5, (BATCH, n)).astype(np.int32), axis=1) for n in (queries, keys))
    same = q_ids[:, None, :, None] == k_ids[:, None, None, :]
    masked = given | {"mask": same & given["mask"] if "mask" in given else same}
    if not {"seqlens_q", "k_range", "positions"} & set(given):
        masked["seqlens_q"] = np.full(BATCH, queries, np.int32)  # a call over sequences, as one with segments is
    return given | {"segments": (q_ids, k_ids)}, masked


def same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(runner.bits(runner.to_host(x)), runner.bits(runner.to_host(y)))


def forward(kernel, name, queries, keys, dim, **more):
    """Judged by float64, and the bits of a mask of all pairs."""
    given, masked = drawn(name, queries, keys, dim, dtype=width(kernel), **more)
    report = fa_ext.verify(**runner.on(kernel, given), kernel=kernel)
    assert report, report
    same_bits(runner.attention(kernel, **given, return_lse=True), runner.attention(kernel, **masked, return_lse=True))


def backward(kernel, name, queries, keys, dim, **more):
    """The same of gradients."""
    given, masked = drawn(name, queries, keys, dim, dtype=width(kernel), **more)
    out, lse = fa_ext.reference.attention(**given)
    rng = np.random.default_rng(1)
    made = {"dout": rng.standard_normal(out.shape).astype(given["q"].dtype), "dlse": rng.standard_normal(lse.shape).astype(np.float32)}
    made |= {"out": out.astype(given["q"].dtype), "lse": lse.astype(np.float32)}
    wrt = ("q", "k", "v", *(x for x in ("bias", "sinks") if x in given))
    placed, masked = runner.on(kernel, given | made), runner.on(kernel, masked | made)
    report = fa_ext.verify_backward(**placed, wrt=wrt, kernel=kernel)
    assert report, report
    same_bits(fa_ext.attention_backward(**placed, wrt=wrt, kernel=kernel), fa_ext.attention_backward(**masked, wrt=wrt, kernel=kernel))


def failures(kernel, cases):
    """The verdicts of float64 against random calls, in a dtype that the kernel takes; NaN lies in all rows of no sequence."""
    wrong = []
    for case in cases:
        case = case.changed(dtype=width(kernel).name)
        if "mma" in kernel and case.operation == "backward":
            case = case.changed(positions=None)
        try:
            if case.operation == "backward":
                report = gradients.verdict(kernel, gradients.make(case))
            else:
                report = fa_ext.verify(**runner.on(kernel, case.host_inputs()), kernel=kernel)
        except Unplaceable:
            continue
        wrong += [] if report else [f"{case}: {report}"]
    return wrong


def layouts_and_strides(kernel):
    """Ids whose rows lie apart, ids of one row for all of the batch, and arrays in the other layout."""
    given, _ = drawn("causal", 30, 44, dtype=width(kernel))
    wanted = runner.attention(kernel, **given)
    q_ids, k_ids = given["segments"]
    apart = tuple(np.concatenate([x, x[:, ::-1]], axis=1)[:, : x.shape[1]] for x in (q_ids, k_ids))
    same_bits([runner.attention(kernel, **given | {"segments": apart})], [wanted])
    other = given | {x: np.ascontiguousarray(given[x].swapaxes(1, 2)) for x in "qkv"} | {"layout": "bshd"}
    same_bits([runner.attention(kernel, **other).swapaxes(1, 2)], [wanted])
    shared = tuple(np.broadcast_to(x[:1], x.shape) for x in (q_ids, k_ids))
    same_bits([runner.attention(kernel, **given | {"segments": shared})], [runner.attention(kernel, **given | {"segments": tuple(map(np.ascontiguousarray, shared))})])


def causal_of_equal_lengths(kernel):
    """They need no side."""
    given, _ = drawn("none", 30, 30, dtype=width(kernel))
    same_bits([runner.attention(kernel, **given, causal=True)], [runner.attention(kernel, **given, causal="top_left")])


def runs_of_ids(kernel):
    """Where each id is one run, a row's documents are the sequences that documents() makes of it."""
    rng, dtype = np.random.default_rng(4), width(kernel)
    q, k, v = (rng.standard_normal((2, heads, 60, 32)).astype(dtype) for heads in (4, 2, 2))
    ids = np.sort(rng.integers(0, 6, (2, 60)), axis=1).astype(np.int32)
    out, lse = runner.attention(kernel, q, k, v, segments=(ids, ids), causal="bottom_right", return_lse=True)
    packed = {x: np.ascontiguousarray(a.swapaxes(1, 2)).reshape(120, -1, 32) for x, a in (("q", q), ("k", k), ("v", v))}
    starts = fa_ext.documents(ids, count=20)
    wanted, wanted_lse = fa_ext.reference.attention(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right")
    bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype.name] * 4
    np.testing.assert_allclose(out.swapaxes(1, 2).reshape(wanted.shape).astype(np.float64), wanted, atol=bound, rtol=bound)
    np.testing.assert_allclose(lse.swapaxes(0, 1).reshape(4, 120), wanted_lse, atol=5e-5, rtol=5e-5)


def empty_arrays(kernel):
    """Results without keys are 0."""
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        given, _ = drawn("none", queries or 1, keys or 1, dtype=width(kernel))
        given = {x: a[:, :, : queries if x == "q" else keys] for x, a in given.items() if x in "qkv"}
        ids = np.zeros((BATCH, queries), np.int32), np.zeros((BATCH, keys), np.int32)
        assert not runner.attention(kernel, **given, segments=ids).any()


CHECKS = (layouts_and_strides, causal_of_equal_lengths, runs_of_ids, empty_arrays)
