"""Calls of attention_backward over sequences that are refused: each message names the argument, and nothing is written."""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from tests.contract.gradients import make

BACKWARD = {"operation": "backward", "dlse": True, "slack": 0}
PACKED = Case.sequences((3, 0, 5), (7, 4, 5), 4, 2, 8, 6, k="packed", **BACKWARD)
PADDED = PACKED.changed(q="padded", k="padded", layout="bshd")
ONE = Case.sequences((1, 1, 1), (4, 5, 6), 4, 2, 8, 6, q="one", k="padded", **BACKWARD)
T, TK, H, HK, D, DV = 8, 16, 4, 2, 8, 6


def refused(error, match, case, **change):
    given = {name: x for name, x in (make(case).inputs | change).items() if x is not ...}
    grads = given.pop("grads", None) or tuple(np.full(given[name].shape, 7, np.float32) if isinstance(given[name], np.ndarray) else None for name in "qkv")
    for call in (fa_ext.attention_backward, fa_ext.explain_backward, fa_ext.verify_backward):
        with pytest.raises(error, match=match):
            call(**given, grads=grads)
    assert all((g == 7).all() for g in grads if g is not None)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_pages():
    table = np.zeros((3, 2), np.int32)
    for case in (PACKED, PADDED):
        words = "page_table has no backward: gradients would go into pages that sequences share; gather the keys"
        refused(ValueError, words, case, page_table=table)


@pytest.mark.parametrize("case", [PACKED, PADDED, ONE], ids=["packed", "padded", "one"])
def test_options_of_no_sequence(case):
    refused(ValueError, 'causal=True.*causal="bottom_right".*causal="top_left"', case, causal=True)
    refused(TypeError, "k_range has type ndarray; accepted: None or a pair", case, k_range=zeros(3, dtype=np.int32))
    refused(ValueError, "k_range's end has shape", case, k_range=(None, zeros(2, dtype=np.int32)))
    refused(TypeError, "check has type int", case, check=1)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "positions"])
def test_an_index_array(name):
    case = next(x for x in (PACKED.changed(positions="same"), PADDED) if name in make(x).inputs)
    x = make(case).inputs[name]
    refused(TypeError, f"{name} has dtype int64; accepted: int32", case, **{name: x.astype("i8")})
    refused(TypeError, f"{name} has dtype float32; accepted: int32", case, **{name: x.astype("f4")})
    refused(ValueError, f"{name} has shape", case, **{name: x[None]})
    refused(ValueError, f"{name} has strides .*; accepted: 1 along its last axis", case, **{name: np.repeat(x, 2)[::2]})
    memory = zeros(4096, dtype=np.uint8)
    inside = memory[: x.nbytes].view(np.int32).reshape(x.shape)
    inside[...] = x
    shape = make(case).inputs["q"].shape
    dq = memory[x.nbytes - 4 :][: 4 * int(np.prod(shape))].view(np.float32).reshape(shape)
    with pytest.raises(ValueError, match=rf'grads\["q"\] overlaps {name} in memory'):
        fa_ext.attention_backward(**make(case).inputs | {name: inside}, grads=(dq, None, None))


def test_starts_that_are_missing():
    refused(ValueError, "k has shape .* and there is no cu_seqlens_k; accepted: .* packed k and v", PACKED, cu_seqlens_k=..., seqlens_k=...)
    refused(ValueError, "no cu_seqlens_q, which means one query a sequence, but cu_seqlens_k has 3", PACKED, cu_seqlens_q=...)
    refused(ValueError, "cu_seqlens_q is given, but q has shape", PADDED, cu_seqlens_q=zeros(4, dtype=np.int32))
    refused(ValueError, "cu_seqlens_k is given, but k has shape", PADDED, cu_seqlens_k=zeros(4, dtype=np.int32))
    refused(ValueError, "k has 3 sequences, but q has 2", PADDED, q=make(PADDED).inputs["q"][:2], seqlens_q=..., grads=(None, None, None))


def test_shapes_of_what_the_forward_found():
    refused(ValueError, r"dout has shape \(8, 4, 8\); accepted: \(8, 4, 6\)", PACKED, dout=zeros(T, H, D))
    refused(ValueError, r"dout has shape \(1, 8, 4, 6\); accepted: \(8, 4, 6\)", PACKED, dout=zeros(1, T, H, DV))
    refused(ValueError, r"out has shape \(4, 8, 6\); accepted: \(8, 4, 6\)", PACKED, out=zeros(H, T, DV))
    refused(ValueError, r"lse has shape \(8, 4\); accepted: \(4, 8\)", PACKED, lse=zeros(T, H))
    refused(ValueError, r"dlse has shape \(3, 4, 5\); accepted: \(4, 8\)", PACKED, dlse=zeros(3, H, 5))
    refused(ValueError, r"lse has shape \(4, 15\); accepted: \(3, 4, 5\)", PADDED, lse=zeros(H, 15))
    refused(ValueError, r"out has shape \(3, 4, 5, 6\); accepted: \(3, 5, 4, 6\)", PADDED, out=zeros(3, H, 5, DV))
    refused(ValueError, r"lse has shape \(3, 4, 1\); accepted: \(4, 3\)", ONE, lse=zeros(3, H, 1))
    refused(TypeError, "lse has dtype float64; accepted: float32", PACKED, lse=zeros(H, T, dtype=np.float64))
    refused(ValueError, "dout is None and dlse is not given", PACKED, dout=None, dlse=...)


def test_gradients():
    dq, dk, dv = zeros(T, H, D), zeros(TK, HK, D), zeros(TK, HK, DV)
    for grads, error, match in (
        ((dq, dv, None), ValueError, r'grads\["k"\] has shape \(16, 2, 6\); accepted: \(16, 2, 8\)'),
        ((dq[None], dk, dv), ValueError, r'grads\["q"\] has shape \(1, 8, 4, 8\); accepted: \(8, 4, 8\)'),
        ((dq.astype(np.float16), dk, dv), TypeError, r'grads\["q"\] has dtype float16'),
        ((np.broadcast_to(dq[0], dq.shape), dk, dv), BufferError, r'grads\["q"\].*overlaps itself'),
    ):
        with pytest.raises(error, match=match):
            fa_ext.attention_backward(**make(PACKED).inputs, grads=grads)
    with pytest.raises(ValueError, match='accumulate=True, but grads has no array for "v"'):
        fa_ext.attention_backward(**make(PACKED).inputs, grads=(dq, dk, None), accumulate=True)
    assert not dq.any() and not dk.any() and not dv.any()


def test_bias_and_mask_need_padded_arrays():
    for name, x in (("bias", zeros(1)), ("mask", np.ones(1, bool))):
        refused(ValueError, f"{name} is given, but q is packed", PACKED, **{name: x})
        refused(ValueError, f"{name} is given, but k is packed", PADDED.changed(k="packed"), **{name: x})
    with pytest.raises(ValueError, match='wrt names "bias", but no bias is given'):
        fa_ext.attention_backward(**make(PADDED).inputs, wrt=("bias",))


def test_a_thread_does_not_confuse_dense_calls_with_sequences():
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (3, 9))
    lengths = np.array([4, 9], np.int32)
    found = []
    for options in ({}, {"seqlens_k": lengths}) * 3:
        out, lse = fa_ext.attention(q, k, k, layout="bshd", return_lse=True, **options)
        found.append(fa_ext.attention_backward(out, q, k, k, out, lse, layout="bshd", **options))
    for n, name in enumerate("qkv"):
        assert all(np.array_equal(found[i][n], found[i % 2][n]) for i in range(6)), name
        assert not np.array_equal(found[0][n], found[1][n])
    lengths[0] = 2  # read by each call
    out, lse = fa_ext.attention(q, k, k, layout="bshd", return_lse=True, seqlens_k=lengths)
    assert not fa_ext.attention_backward(out, q, k, k, out, lse, layout="bshd", seqlens_k=lengths)[1][0, 2:].any()


def test_a_call_with_lengths_and_without_any_rows():
    packed = [PACKED.changed(n_q=n_q, n_k=n_k) for n_q, n_k in (((), ()), ((0,), (0,)))]
    for case in (*packed, PADDED.changed(n_q=(0, 0), n_k=(0, 3)), PACKED.changed(n_q=(2,), n_k=(0,), sinks=True)):
        assert fa_ext.verify_backward(**make(case).inputs, wrt=case.wrt()), case
