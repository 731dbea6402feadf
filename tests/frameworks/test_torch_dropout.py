"""Dropout through fa_ext.torch: its state is a tensor, drawn from torch's generator, the same in every pass."""

import contextlib
import functools
import shutil

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import fa_ext  # noqa: E402
import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _attention, _eager, _sdpa  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


def linear(q, k, v):
    """Two calls whose result is linear in v, so that <out, dout> is <v, dv> where all passes drop the same weights."""
    inner = ft.attention(q, k.cos(), 2 * v, dropout_p=0.3)
    return ft.attention(q.sin(), k, inner, causal=True, dropout_p=0.5)


def one_mask(call, shape=(2, 3, 6, 8), device="cpu"):
    """Whether every pass of a call, and of two whose backward passes come in the other order, drops the same weights."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v = (x.detach().to(device, dtype).requires_grad_() for x in operands(*shape))
    found = [call(q, k, v) for _ in range(2)]
    assert not torch.equal(*found)
    for out in reversed(found):
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        torch.testing.assert_close((out * dout).double().sum(), (v * dv).double().sum(), rtol=1e-4, atol=1e-3)
    return True


INDUCTOR = ["inductor"] if shutil.which("g++") or shutil.which("clang++") else []
COMPILERS = ["aot_eager", "aot_eager_decomp_partition", *INDUCTOR]


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("budget", [1.0, 0.9, 0.5, 0.0])
def test_a_memory_budget_computes_no_other_mask(backend, budget):
    """Whatever a compiler computes again in the backward pass, the generator gives the seed of the forward pass."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert one_mask(torch.compile(linear, fullgraph=True, backend=backend))


@pytest.mark.parametrize("changes", [{"aggressive_recomputation": True}, {"ban_recompute_not_in_allowlist": False}])
def test_eager_recomputation_computes_no_other_mask(changes):
    torch._dynamo.reset()
    with torch._functorch.config.patch(**changes):
        assert one_mask(torch.compile(linear, fullgraph=True, backend="aot_eager_decomp_partition"))


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="needs budgets of regions")
def test_a_memory_budget_of_a_region():
    def step(q, k, v):
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return linear(q, k, v)

    torch._dynamo.reset()
    assert one_mask(torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition"))


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_graphs_without_a_backward_graph_draw_under_a_memory_budget(budget):
    """Of results without gradients, of no gradients at all, and of a graph that takes them itself."""
    q, k, v = operands()
    apart = [x.detach() for x in (q, k, v)]
    calls = [(linear, apart), (torch.func.grad(lambda q, k, v: linear(q, k, v).square().sum()), apart)]
    if budget == 1:  # else torch refuses what a checkpoint of the draw is in such a graph
        calls.append((lambda q, k, v: linear(q, k, v).detach(), (q, k, v)))
    for function, tensors in calls:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            assert torch.equal(seeded(compiled)(*tensors), seeded(compiled)(*tensors))


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_memory_budget_under_vmap(randomness, budget):
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        mapped = torch.func.vmap(linear, randomness=randomness)
        assert one_mask(torch.compile(mapped, fullgraph=True, backend="aot_eager_decomp_partition"), (3, 2, 3, 6, 8))


DRAW, ATTENTION = torch.ops.fa_ext.draw.default, torch.ops.fa_ext.attention.default


@pytest.mark.parametrize("backend", [None, *COMPILERS])
@pytest.mark.parametrize(
    "saved", [(), (DRAW,), (ATTENTION,), (DRAW, ATTENTION), None], ids=["none", "draw", "attention", "both", "all"]
)
def test_selective_checkpoints_have_one_mask(backend, saved):
    torch._dynamo.reset()

    def policy(context, op, *args, **keywords):
        return CheckpointPolicy.MUST_SAVE if saved is None or op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def step(q, k, v):
        return checkpoint(linear, q, k, v, use_reentrant=False, context_fn=contexts)

    assert one_mask(torch.compile(step, fullgraph=True, backend=backend) if backend else step)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("backend", COMPILERS)
def test_checkpoints_in_a_compiled_graph_have_one_mask(backend, budget):
    torch._dynamo.reset()

    def step(q, k, v):
        return checkpoint(linear, q * 2, k, v, use_reentrant=False)

    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert one_mask(torch.compile(step, fullgraph=True, backend=backend))


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_calls_have_the_bits_of_eager_ones(backend, grad):
    torch._dynamo.reset()
    q, k, v = operands()
    with torch.set_grad_enabled(grad):
        compiled = torch.compile(lambda q, k, v: ft.attention(q, k, v, dropout_p=0.4), fullgraph=True, backend=backend)
        assert torch.equal(seeded(compiled)(q, k, v), seeded(lambda: ft.attention(q, k, v, dropout_p=0.4))())


def test_exported_programs_draw():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return ft.attention(q, k, v, dropout_p=0.4)

    q, k, v = (x.detach() for x in operands())
    for strict in (False, True):
        program = torch.export.export(Block(), (q, k, v), strict=strict)
        assert [node.target for node in program.graph.nodes if node.op == "call_function"][0] == DRAW
        assert torch.equal(seeded(program.module())(q, k, v), seeded(Block())(q, k, v))


def test_opcheck_of_the_draw():
    torch.library.opcheck(DRAW, (), {"device": torch.device("cpu")}, test_utils=("test_schema", "test_faketensor"))


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
@pytest.mark.parametrize("compiled", [False, True])
def test_vmap(randomness, equal, compiled):
    torch._dynamo.reset()
    q = operands()[0].detach()
    twins = torch.stack((q, q))
    mapped = torch.func.vmap(lambda x: ft.attention(x, x, x, dropout_p=0.5), randomness=randomness)
    mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped
    with contextlib.nullcontext() if equal is not None else pytest.raises(RuntimeError, match="randomness"):
        first, second = mapped(twins)
        assert torch.equal(first, second) == equal


def test_explain_asks_with_it(monkeypatch):
    asked = []
    monkeypatch.setattr(_sdpa._core, "explain", lambda *args, **options: asked.append(options) or ("a kernel", {}))
    ft.explain(*operands(), dropout_p=0.5)
    ft.explain(*operands())
    assert asked == [{"dropout": (0.5, 0)}, {}]


def test_a_state_of_torch_on_the_host():
    """Tensors of both forms, with any strides."""
    q, k, v = (x.detach() for x in operands())
    wanted = fa_ext.attention(q, k, v, dropout=(0.4, 3 + (9 << 32), 7, (0, 1, 2, 3), 5))
    words = torch.tensor([3, 9, 7, 0, 1, 2, 3, 5], dtype=torch.int32)
    for state in (words, words.view(torch.int64), words.view(torch.uint32), words.repeat_interleave(2)[::2]):
        assert torch.equal(fa_ext.attention(q, k, v, dropout=(0.4, state)), wanted)
        assert fa_ext.verify(q, k, v, dropout=(0.4, state))


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


# ---- on a GPU, where kernels read the state ----


def halves(*shape, grad=True):
    return [x.detach().half().cuda().requires_grad_(grad) for x in operands(*shape)]


def drawn(seed):
    """The seed that attention() draws after manual_seed(seed), as an int."""
    torch.manual_seed(seed)
    return int(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device="cuda")) % 2**64


def step(seed, attend=ft.attention, **options):
    """out, dq, dk, dv after manual_seed(seed)."""
    q, k, v = halves(2, 2, 75, 40)
    torch.manual_seed(seed)
    out = attend(q, k, v, dropout_p=0.4, **options)
    (out.float() ** 2).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def same_bits(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@needs_gpu
def test_gpu_the_bits_are_those_of_the_seed():
    q, k, v = halves(2, 2, 75, 40, grad=False)
    seed = drawn(3)
    found = step(3, causal=True)
    wanted = fa_ext.attention(q, k, v, causal=True, dropout=(0.4, seed))
    assert torch.equal(found[0], wanted)
    out, lse = fa_ext.attention(q, k, v, causal=True, dropout=(0.4, seed), return_lse=True)
    dout = (2 * out.float()).half()
    assert same_bits(found[1:], fa_ext.attention_backward(dout, q, k, v, out, lse, causal=True, dropout=(0.4, seed)))
    assert fa_ext.verify_backward(dout, q, k, v, out, lse, causal=True, dropout=(0.4, torch.tensor([seed - (seed >> 63 << 64), 0, 0, 0]).cuda()))


@needs_gpu
def test_gpu_the_mask_is_that_of_dropout_keep():
    q, k, _ = halves(2, 3, 9, 8, grad=False)
    v = torch.eye(9, dtype=torch.float16, device="cuda").expand(2, 3, 9, 9)
    keep = fa_ext.dropout_keep(2, 3, 9, 9, (0.5, drawn(5)))
    torch.manual_seed(5)
    assert torch.equal((ft.attention(q, k, v, dropout_p=0.5) != 0).cpu(), torch.from_numpy(keep))


@needs_gpu
def test_gpu_seeds_repeat():
    first, again, other = step(0), step(0), step(1)
    assert same_bits(first, again) and not torch.equal(first[0], other[0])


@needs_gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_gpu_a_checkpoint_draws_the_same(reentrant):
    def recomputed(q, k, v, **options):
        return checkpoint(lambda *args: ft.attention(*args, **options), q, k, v, use_reentrant=reentrant)

    assert same_bits(step(0, recomputed), step(0))


@needs_gpu
def test_gpu_compiled():
    torch._dynamo.reset()

    def compiled(q, k, v, **options):
        return torch.compile(lambda *args: ft.attention(*args, **options), fullgraph=True, backend="aot_eager")(q, k, v)

    assert same_bits(step(0, compiled), step(0))


@needs_gpu
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_gpu_a_memory_budget_computes_no_other_mask(backend, budget):
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert one_mask(torch.compile(linear, fullgraph=True, backend=backend), device="cuda")


@needs_gpu
def test_gpu_second_derivatives(monkeypatch):
    monkeypatch.setattr(_eager, "_warned", True)
    found = []
    for device in ("cuda", "cpu"):
        q, k, v = (x.detach().float().to(device).requires_grad_() for x in operands(1, 2, 9, 8))
        state = torch.tensor([7, 0, 0, 0], device=device)
        monkeypatch.setattr(_attention, "_dropout_state", lambda *args, state=state: state)
        out = ft.attention(q, k, v, causal=True, dropout_p=0.3)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append([out, first, *torch.autograd.grad(first.square().sum(), (q, k, v))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4)


@needs_gpu
@pytest.mark.parametrize("kernel", ["mma_sm80", "simt"])
def test_gpu_a_graph_reads_the_state_at_each_replay(kernel):
    q, k, v = halves(2, 2, 75, 40, grad=False)
    state = torch.zeros(4, dtype=torch.int64, device="cuda")
    dout, out = torch.ones_like(q), torch.empty_like(q)
    _, lse = fa_ext.attention(q, k, v, return_lse=True)
    backward = {"mma_sm80": "mma_backward_sm80", "simt": "simt_backward"}[kernel]

    def both(drawn, out=None):
        made = fa_ext.attention(q, k, v, dropout=(0.4, drawn), kernel=kernel, out=out)
        return [made, *fa_ext.attention_backward(dout, q, k, v, made, lse, dropout=(0.4, drawn), kernel=backward)]

    both(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(state, out)
    for seed in (0, 5, 0, 1 << 40):
        state[0] = seed
        graph.replay()
        assert same_bits(found, both(seed))


@needs_gpu
def test_gpu_a_graph_draws_anew_at_each_replay():
    q, k, v = halves(2, 2, 75, 40, grad=False)
    ft.attention(q, k, v, dropout_p=0.4)
    graph, replays = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = ft.attention(q, k, v, dropout_p=0.4)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
    assert torch.equal(replays[0], replays[2]) and torch.equal(replays[1], replays[3])
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[0], replays[4])


@needs_gpu
def test_gpu_scaled_dot_product_attention_takes_it(monkeypatch):
    monkeypatch.setattr(_sdpa, "_torchs", None)
    q, k, v = halves()
    out = ft.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.allclose(out, ft.scaled_dot_product_attention(q, k, v))
    assert ft.explain(q, k, v, dropout_p=0.5)[0] == "mma_sm80"


@needs_gpu
def test_gpu_a_state_elsewhere_is_refused():
    q, k, v = halves(grad=False)
    state = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="dropout's state is on CUDA device 0, but q is on the CPU"):
        fa_ext.attention(q.cpu().float(), k.cpu().float(), v.cpu().float(), dropout=(0.1, state))
    with pytest.raises(ValueError, match=r"dropout's state has strides \(2,\)"):
        fa_ext.attention(q, k, v, dropout=(0.1, torch.zeros(16, dtype=torch.int32, device="cuda")[::2]))
    with pytest.raises(ValueError, match=r"dropout's state has shape \(7,\) and dtype int32; accepted: \(8,\) of uint32"):
        fa_ext.attention(q, k, v, dropout=(0.1, state[:7]))
    with pytest.raises(TypeError, match="dropout's state has dtype int16; accepted: uint32, int32 or int64"):
        fa_ext.attention(q, k, v, dropout=(0.1, state.short()))
    host = fa_ext.attention(q, k, v, dropout=(0.1, state.cpu()))  # on the host it is read there
    assert torch.equal(host, fa_ext.attention(q, k, v, dropout=(0.1, state)))
