"""fa_ext.torch.varlen_attn: the signature of torch's own, and its meaning by torch's scaled_dot_product_attention of each sequence."""

import inspect
import types

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402
from tests.frameworks.support.torch_sequences import index  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
LSE = types.SimpleNamespace(lse=True)
OF_Q, OF_K = ((0, 3), (3, 4), (4, 9)), ((0, 5), (5, 7), (7, 12))


def make(device, heads_k=2):
    q, k, v = (torch.randn(*shape, 8, device=device, requires_grad=True) for shape in ((9, 4), (12, heads_k), (12, heads_k)))
    return q, k, v, index([0, 3, 4, 9], device), index([0, 5, 7, 12], device)


def test_the_signature_is_torchs(device):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs, ours = (inspect.signature(x).parameters for x in (varlen.varlen_attn, ft.varlen_attn))
    if "window_size" not in theirs:
        pytest.skip("an older torch has is_causal in the place of window_size")
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    q, k, v, *starts = make(device, 4)
    assert ft.varlen_attn(q, k, v, *starts, 5, 5, return_aux=varlen.AuxRequest(lse=True))[1].shape == (4, 9)
    assert isinstance(ft.varlen_attn(q, k, v, *starts, 5, 5, return_aux=varlen.AuxRequest()), torch.Tensor)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2), (-1, 1), (2, -1), [0, 0]])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_each_sequence_is_torchs_attention(device, window, heads_k):
    q, k, v, *starts = make(device, heads_k)
    out, lse = ft.varlen_attn(
        q, k, v, *starts, 1, 0, return_aux=LSE, window_size=window, enable_gqa=heads_k != 4, scale=0.3
    )  # fmt: skip
    wanted, wanted_lse = [], []
    for (a, b), (c, d) in zip(OF_Q, OF_K, strict=True):
        mine = [x.transpose(0, 1)[None].double() for x in (q[a:b], *(x[c:d].repeat_interleave(4 // heads_k, 1) for x in (k, v)))]
        far = torch.arange(d - c, device=device) - torch.arange(b - a, device=device)[:, None] - (d - c) + (b - a)
        seen = ((far >= -window[0]) | (window[0] == -1)) & ((far <= window[1]) | (window[1] == -1))
        wanted.append(F.scaled_dot_product_attention(*mine, attn_mask=seen, scale=0.3)[0].transpose(0, 1))
        wanted_lse.append(torch.logsumexp((0.3 * mine[0] @ mine[1].transpose(2, 3)).masked_fill(~seen, -torch.inf), -1)[0])
    wanted, wanted_lse = torch.cat(wanted), torch.cat(wanted_lse, 1)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-5)
    got, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_used_keys_and_pages(device):
    q, k, v, *starts = make(device, 4)
    used = index([4, 0, 5], device)
    out, lse = ft.varlen_attn(q, k, v, *starts, 5, 5, seqused_k=used, window_size=(-1, 0), return_aux=LSE)
    wanted, wanted_lse = ft.attention(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], seqlens_k=used, causal="bottom_right", return_lse=True
    )
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert torch.autograd.grad(out.sum(), k)[0].abs().sum((1, 2)).count_nonzero() == 9
    pages = [torch.zeros(6, 2, 4, 8, device=device) for _ in "kv"]
    table = index([[5, 0, 2], [1, 1, 1], [3, 4, 0]], device)
    for of, x in zip(pages, (k, v), strict=True):
        for (c, _), count, columns in zip(OF_K, (4, 0, 4), table.tolist(), strict=True):
            for j in range(count):
                of[columns[j // 2], j % 2] = x[c + j].detach()
    used = index([4, 0, 4], device)
    with torch.no_grad():
        got = ft.varlen_attn(q, *pages, starts[0], None, 5, 5, seqused_k=used, block_table=table, num_splits=1, window_size=(-1, 0))
        wanted = ft.varlen_attn(q, k, v, *starts, 5, 5, seqused_k=used, window_size=(-1, 0))
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="q requires grad, but attention with page_table, out= or max_seqlen_q has no derivative"):
        ft.varlen_attn(q, *pages, starts[0], None, 5, 5, seqused_k=used, block_table=table)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"enable_gqa": False}, "query has 4 heads and key 2; accepted: as many, or enable_gqa=True"),
        ({"cu_seq_k": None}, "cu_seq_k is None; accepted: where the sequences of key begin, or block_table"),
        ({"window_size": (1,)}, r"window_size is \(1,\); accepted: a pair"),
        ({"window_size": 3}, "window_size is 3; accepted: a pair"),
        ({"window_size": (-2, 0)}, "window"),
    ],
)
def test_errors(device, change, match):
    q, k, v, *starts = make(device)
    given = {"cu_seq_q": starts[0], "cu_seq_k": starts[1], "max_q": 5, "max_k": 5, "enable_gqa": True} | change
    with pytest.raises(ValueError, match=match):
        ft.varlen_attn(q, k, v, **given)


def test_compiled(device):
    torch._dynamo.reset()
    q, k, v, *starts = make(device)
    call = torch.compile(ft.varlen_attn, fullgraph=True, backend="aot_eager")
    for options in ({}, {"window_size": (-1, 0)}):
        got = call(q, k, v, *starts, 5, 5, enable_gqa=True, **options)
        wanted = ft.varlen_attn(q, k, v, *starts, 5, 5, enable_gqa=True, **options)
        assert torch.equal(got, wanted)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, wanted)), strict=True):
            torch.testing.assert_close(a, b)
