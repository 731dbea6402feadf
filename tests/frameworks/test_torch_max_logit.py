"""``return_max_logit`` of ``fa_ext.torch.attention``: the largest scaled product of each head beside the other results."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fa_ext.torch  # noqa: E402
from fa_ext import reference  # noqa: E402

STARTS = torch.tensor([0, 5, 5, 20], dtype=torch.int32)


def dense(*, grad=True, **more):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, rows, 32, generator=generator) for heads, rows in ((4, 33), (2, 40), (2, 40)))
    return {"q": q.requires_grad_(grad), "k": k.requires_grad_(grad), "v": v.requires_grad_(grad), "causal": "bottom_right"} | more


def packed(*, grad=True):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(20, heads, 32, generator=generator).requires_grad_(grad) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "causal": "bottom_right", "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}


CALLS = {
    "dense": dense,
    "bias, softcap": lambda **more: dense(bias=torch.randn(33, 40, generator=torch.Generator().manual_seed(5)), softcap=2.0, **more),
    "bshd": lambda **more: {n: x.transpose(1, 2) if n in "qkv" else x for n, x in dense(layout="bshd", **more).items()},
    "packed": packed,
}


def wanted(given):
    arrays = {n: x.detach().numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items() if n != "v"}
    return reference.max_logit(**arrays).max(axis=0)


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_call_without(name):
    given, other = CALLS[name](), CALLS[name]()
    out, lse, largest = fa_ext.torch.attention(**given, return_lse=True, return_max_logit=True)
    assert largest.dtype == torch.float32 and not largest.requires_grad
    np.testing.assert_allclose(largest.numpy(), wanted(given), rtol=1e-5)
    again, lse_again = fa_ext.torch.attention(**other, return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    found, made = (
        torch.autograd.grad(x.square().sum() + torch.where(y.isfinite(), y, 0).sum(), [call[n] for n in "qkv"])
        for call, x, y in ((given, out, lse), (other, again, lse_again))
    )
    for x, y in zip(found, made, strict=True):
        assert torch.equal(x, y)
    pair = fa_ext.torch.attention(**given, return_max_logit=True)
    assert len(pair) == 2 and torch.equal(pair[1], largest)


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    given = CALLS[name]()
    options = {n: x for n, x in given.items() if n not in "qkv"}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        return fa_ext.torch.attention(q, k, v, **options, return_lse=True, return_max_logit=True)

    found = call(*(given[n] for n in "qkv"))
    for x, y in zip(found, fa_ext.torch.attention(**given, return_lse=True, return_max_logit=True), strict=True):
        assert torch.equal(x, y)
    found[0].sum().backward()


def test_the_operator():
    given = dense()
    arguments = (given["q"], given["k"], given["v"], -1, 0, 1, None, 0.0, "bhsd", 0.0, None, False, False, None)
    torch.library.opcheck(torch.ops.fa_ext.logits.default, arguments)


def test_autocast_and_dropout():
    given = dense()
    with torch.autocast("cpu", torch.bfloat16):
        out, largest = fa_ext.torch.attention(**given, return_max_logit=True, dropout_p=0.3)
    assert out.dtype == torch.bfloat16 and largest.dtype == torch.float32
    np.testing.assert_allclose(largest.numpy(), wanted(given), rtol=0.05)
    out.float().sum().backward()
    assert given["q"].grad is not None


def test_heads_without_a_pair_are_minus_infinity():
    given = dense(grad=False, mask=torch.zeros(33, 40, dtype=torch.bool))
    assert (fa_ext.torch.attention(**given, return_max_logit=True)[1] == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_call_an_element():
    given = dense(grad=False)
    stacked = [torch.stack((given[n], 2 * given[n])) for n in "qkv"]

    def call(q, k, v):
        return fa_ext.torch.attention(q, k, v, causal="bottom_right", return_max_logit=True)

    for x, y in zip(torch.func.vmap(call)(*stacked), zip(*map(call, *stacked)), strict=True):
        assert torch.equal(x, torch.stack(y))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"return_max_logit": 1}, TypeError, "return_max_logit has type int; accepted: True or False"),
        ({"out": torch.empty(2, 4, 33, 32)}, ValueError, "return_max_logit is True; accepted with page_table, out or max_seqlen_q: False"),
        ({"q": np.zeros((2, 4, 33, 32), np.float32)}, TypeError, "q has type ndarray"),
    ],
)
def test_what_is_refused(change, error, words):
    with torch.no_grad(), pytest.raises(error, match=words):
        fa_ext.torch.attention(**{**dense(grad=False), "return_max_logit": True, **change})
