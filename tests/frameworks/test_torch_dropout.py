"""Dropout through fa_ext.torch: its state is a tensor, drawn from torch's generator, the same in every pass."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import fa_ext  # noqa: E402
import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _eager, _sdpa  # noqa: E402


def operands(*shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*(shape or (2, 2, 9, 8)), generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def test_the_state_comes_from_torchs_generator():
    q, k, v = operands()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append([ft.attention(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1]) and not torch.equal(drawn[0][0], drawn[2][0])


def test_without_dropout_nothing_is_drawn():
    q, k, v = operands()
    before = torch.get_rng_state()
    ft.attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


def seeded(function):
    def call(*args):
        torch.manual_seed(0)
        return function(*args)

    return call


def test_gradients_and_second_ones_have_the_mask_of_the_forward(monkeypatch):
    monkeypatch.setattr(_eager, "_warned", True)
    call = seeded(lambda q, k, v: ft.attention(q, k, v, causal=True, dropout_p=0.3))
    assert torch.autograd.gradcheck(call, operands(1, 2, 4, 3), eps=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(call, operands(1, 2, 4, 3), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same(reentrant):
    def step(use):
        q, k, v = operands()
        torch.manual_seed(0)
        out = use(lambda q, k, v: ft.attention(q * 2, k, v, dropout_p=0.4), q, k, v)
        out.square().sum().backward()
        return [out, q.grad, k.grad, v.grad]

    plain = step(lambda function, *args: function(*args))
    for a, b in zip(step(lambda *args: checkpoint(*args, use_reentrant=reentrant)), plain, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled():
    torch._dynamo.reset()
    q, k, v = operands()
    compiled = torch.compile(lambda q, k, v: ft.attention(q, k, v, dropout_p=0.4).square().sum(), fullgraph=True, backend="aot_eager")
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(compiled(q, k, v))
    assert losses[0] == losses[1] != losses[2]
    wanted = torch.autograd.grad(seeded(lambda: ft.attention(q, k, v, dropout_p=0.4).square().sum())(), q)[0]
    torch.testing.assert_close(torch.autograd.grad(losses[0], q)[0], wanted)


@pytest.mark.parametrize("randomness, equal", [("same", True), ("different", False), ("error", None)])
def test_vmap(randomness, equal):
    q = operands()[0].detach()
    twins = torch.stack((q, q))
    mapped = torch.func.vmap(lambda x: ft.attention(x, x, x, dropout_p=0.5), randomness=randomness)
    with contextlib.nullcontext() if equal is not None else pytest.raises(RuntimeError, match="randomness"):
        first, second = mapped(twins)
        assert torch.equal(first, second) == equal


def test_scaled_dot_product_attention_takes_it(monkeypatch):
    monkeypatch.setattr(_sdpa, "_torchs", None)
    q, k, v = operands()
    out = ft.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.allclose(out, ft.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_bad_probabilities(p):
    with pytest.raises(ValueError, match=r"dropout_p is .*; accepted: 0 to 1"):
        ft.attention(*operands(), dropout_p=p)


def test_the_mask_is_that_of_dropout_keep():
    """With v the identity out holds the weights themselves: 0 exactly where dropped."""
    q, k, _ = (x.detach() for x in operands(2, 3, 9, 8))
    v = torch.eye(9, dtype=torch.float64).expand(2, 3, 9, 9)
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    torch.manual_seed(5)
    out = ft.attention(q, k, v, dropout_p=0.5)
    keep = fa_ext.dropout_keep(2, 3, 9, 9, (0.5, int(seed) % 2**64))
    assert torch.equal(out != 0, torch.from_numpy(keep))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_says_that_it_has_none():
    q, k, v = (x.detach().half().cuda() for x in operands())
    with pytest.raises(fa_ext.UnsupportedError, match="no kernel on cuda reads its state"):
        ft.attention(q, k, v, dropout_p=0.1)
    kernel, reasons = ft.explain(q, k, v, dropout_p=0.1)
    assert kernel is None and "dropout_p" in str(reasons)
