"""Arguments that a call over sequences refuses before anything is written: each array's dtype, rank, length, device, strides, and
arguments that contradict each other."""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case

PAGED = Case.sequences()
PADDED = Case.sequences(q="padded", k="padded")
PACKED = Case.sequences(q="packed", k="packed")
ONE = Case.sequences((1, 1, 1), (4, 5, 6), q="one")


def refused(error, match, arguments, **change):
    out = np.full((*arguments["q"].shape[:-1], arguments["v"].shape[-1]), 7, arguments["q"].dtype)
    given = {name: x for name, x in (arguments | {"out": out} | change).items() if x is not ...}
    with pytest.raises(error, match=match):
        fa_ext.attention(**given)
    assert (out == 7).all()
    with pytest.raises(error, match=match):
        fa_ext.explain(**given)


INDICES = [
    (PAGED, "cu_seqlens_q", r"\(batch \+ 1,\)"),
    (PADDED, "seqlens_q", r"\(batch,\)"),
    (PACKED, "cu_seqlens_k", r"\(batch \+ 1,\)"),
    (PAGED, "seqlens_k", r"\(batch,\)"),
    (PAGED, "page_table", r"\(batch, columns\)"),
]


@pytest.mark.parametrize(("case", "name", "shape"), INDICES, ids=[x[1] for x in INDICES])
def test_an_index_array(case, name, shape):
    arguments = case.host_inputs()
    x = arguments[name]
    refused(TypeError, rf'{name} has dtype int64; accepted: int32, such as {name}.astype\("int32"\)', arguments, **{name: x.astype("i8")})
    for dtype in ("f4", "?", "u1"):
        refused(TypeError, f"{name} has dtype .*; accepted: int32", arguments, **{name: x.astype(dtype)})
    refused(ValueError, f"{name} has shape .*; accepted: {shape}", arguments, **{name: x[None]})
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.int32)[..., ::2]
    refused(ValueError, f"{name} has strides .*; accepted: 1 along its last axis", arguments, **{name: wide})
    refused((TypeError, ValueError), name, arguments, **{name: object()})
    if x.ndim == 1:
        refused(ValueError, f"{name} has ", arguments, **{name: x[:-1]})
    out = np.frombuffer(bytearray(1 << 16), np.float32)[: arguments["q"].size].reshape(arguments["q"].shape)
    inside = out.reshape(-1).view(np.int32)[: x.size].reshape(x.shape)
    inside[...] = x
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
        fa_ext.attention(**arguments | {name: inside, "out": out})


def test_positions_and_ranges():
    for case, shape in ((PAGED, r"\(tokens,\)"), (PADDED, r"\(batch, seq_q\)")):
        arguments = case.host_inputs()
        rows = len(arguments["q"]) if case is PAGED else arguments["q"].shape[1]
        right = np.zeros(rows if case is PAGED else (4, rows), np.int32)
        fa_ext.attention(**arguments, positions=right)
        refused(TypeError, "positions has dtype int64", arguments, positions=right.astype("i8"))
        refused(ValueError, f"positions has shape .*; accepted: {shape}", arguments, positions=right[..., :-1])
        refused(ValueError, "positions and causal=.top_left. both", arguments, positions=right, causal="top_left")
    arguments, side = PAGED.host_inputs(), np.zeros(4, np.int32)
    for given in ((side, None), (None, side), [side, side], (None, None)):
        fa_ext.attention(**arguments, k_range=given)
    refused(TypeError, "k_range has type ndarray; accepted: None or a pair", arguments, k_range=side)
    refused(ValueError, "k_range has 3 items", arguments, k_range=(side, side, side))
    refused(TypeError, "k_range's begin has dtype int64", arguments, k_range=(side.astype("i8"), None))
    refused(ValueError, "k_range's end has shape", arguments, k_range=(None, side[:3]))


def test_contradictions():
    paged, padded, packed, one = (case.host_inputs() for case in (PAGED, PADDED, PACKED, ONE))
    for arguments in (paged, padded, packed, one):
        refused(ValueError, 'causal=True.*causal="bottom_right".*causal="top_left"', arguments, causal=True)
    refused(ValueError, "cu_seqlens_q is given, but q has shape", padded, cu_seqlens_q=np.zeros(5, np.int32))
    refused(ValueError, "cu_seqlens_k is given, but k has shape", padded, cu_seqlens_k=np.zeros(5, np.int32))
    refused(ValueError, "page_table and cu_seqlens_k are both given", paged, cu_seqlens_k=np.zeros(5, np.int32))
    refused(ValueError, "page_table is given, but k has shape", packed, cu_seqlens_k=..., page_table=paged["page_table"])
    refused(ValueError, "page_table needs seqlens_k", paged, seqlens_k=...)
    for layout in (..., None):
        refused(ValueError, 'page_table needs layout: "bshd".*"bhsd"', paged, layout=layout)
    refused(ValueError, "k has shape .* and there is no cu_seqlens_k; accepted: .* packed k and v", packed, cu_seqlens_k=...)
    refused(ValueError, "no cu_seqlens_q, which means one query a sequence, but page_table has 4", paged, cu_seqlens_q=...)
    refused(ValueError, "k has 4 sequences, but q has 3", padded, q=padded["q"][:3], seqlens_q=...)
    refused(ValueError, "page_table has 3 sequences, but cu_seqlens_q has 4", paged, page_table=paged["page_table"][:3])
    refused(ValueError, "v has shape .*; pages, heads_kv and page_size must be the same", paged, v=paged["v"][:2])
    refused(ValueError, "v has shape .*; tokens and heads_kv must be the same", packed, v=packed["v"][:2])
    refused(ValueError, "v has shape", packed, v=padded["v"])
    for name, extra in (("bias", np.zeros(1, np.float32)), ("mask", np.ones(1, bool))):
        refused(ValueError, f"{name} is given, but q is packed", paged, **{name: extra})
        mixed = {**padded, **{n: packed[n] for n in ("k", "v", "cu_seqlens_k", "seqlens_k")}}
        refused(ValueError, f"{name} is given, but k is packed", mixed, **{name: extra})
    empty = np.zeros((3, 0, 2, 32), np.float32)
    refused(ValueError, "page_size of 0", paged, k=empty, v=empty)


def test_check_and_workspace_are_read():
    arguments = PAGED.host_inputs()
    refused(TypeError, "check has type int", arguments, check=1)
    out = np.empty((*arguments["q"].shape[:-1], 32), np.float32)
    with pytest.raises(TypeError, match="workspace has dtype float32; accepted: uint8"):
        fa_ext.attention(**arguments, out=out, workspace=np.zeros(9, np.float32))
    with pytest.raises(ValueError, match="workspace is not C-contiguous"):
        fa_ext.attention(**arguments, workspace=np.zeros(9, np.uint8)[::2])
    with pytest.raises(ValueError, match="workspace overlaps out"):
        fa_ext.attention(**arguments, out=out, workspace=out.reshape(-1).view(np.uint8))
    memory = np.zeros(64, np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="workspace is read-only"):
        fa_ext.attention(**arguments, workspace=memory)
    assert fa_ext.workspace_size(**arguments) == 0
    given = fa_ext.attention(**arguments, workspace=np.zeros(0, np.uint8), check=False)
    np.testing.assert_array_equal(given, fa_ext.attention(**arguments))


def test_results_are_shaped_as_q():
    for case in (PAGED, PADDED, PACKED, ONE):
        arguments = case.host_inputs()
        q = arguments["q"]
        out, lse = fa_ext.attention(**arguments, return_lse=True)
        assert out.shape == q.shape and lse.shape == (q.shape[1::-1] if q.ndim == 3 else (4, 4, q.shape[1]))
        given = np.empty(q.shape, np.float32), np.empty(lse.shape, np.float32)
        assert fa_ext.attention(**arguments, out=given) is given
        np.testing.assert_array_equal(given[0], out)
        with pytest.raises(ValueError, match="out has shape"):
            fa_ext.attention(**arguments, out=np.empty((1, *q.shape), np.float32))
        with pytest.raises(TypeError, match="out has dtype float16; accepted: float32"):
            fa_ext.attention(**arguments, out=np.empty(q.shape, np.float16))


def test_a_thread_does_not_confuse_dense_calls_with_sequences():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (1, 9))
    dense = fa_ext.attention(q, k, k, layout="bshd")
    short = fa_ext.attention(q, k, k, layout="bshd", seqlens_k=np.array([4, 9], np.int32))
    one = fa_ext.attention(q[:, 0], k, k, layout="bshd")
    for _ in range(3):
        np.testing.assert_array_equal(fa_ext.attention(q, k, k, layout="bshd"), dense)
        np.testing.assert_array_equal(fa_ext.attention(q[:, 0], k, k, layout="bshd"), one)
        np.testing.assert_array_equal(fa_ext.attention(q, k, k, layout="bshd", seqlens_k=np.array([4, 9], np.int32)), short)
    np.testing.assert_array_equal(one, dense[:, 0])
    assert not np.array_equal(short, dense)


def test_pages_have_no_backward():
    arguments = PAGED.host_inputs()
    out, lse = fa_ext.attention(**arguments, return_lse=True)
    with pytest.raises(ValueError, match="page_table has no backward: .*; gather the keys"):
        fa_ext.attention_backward(out, out=out, lse=lse, **arguments)
