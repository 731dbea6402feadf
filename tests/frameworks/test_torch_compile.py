"""torch.ops.fa_ext: the operators by torch's own checks, whole graphs with dynamic shapes, checkpoints, dispatch modes."""

import pytest

torch = pytest.importorskip("torch")

import functools  # noqa: E402
import shutil  # noqa: E402

import numpy as np  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from tests.frameworks.support.torch_calls import CALLS, DEVICES, gradients, make, scalar  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
#: Inductor compiles C++ for the CPU.
BACKENDS = ["eager", "aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def attend(tensors, options, **more):
    tensors = dict(tensors)
    return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **options, return_lse=True, **more)


def operands(name, device):
    """The arguments of the operator for a call."""
    tensors, options = make(name, device, torch.float32)
    window = options.get("window") or (None, None)
    left, right = (-1 if bound is None else bound for bound in window)
    causal = options.get("causal", False)
    return (
        *(tensors[n] for n in "qkv"), left, 0 if causal else right, int(causal != "top_left"), options.get("scale"),
        options.get("softcap", 0.0), options.get("layout", "bhsd"), 0.0, None, options.get("batch_invariant", False), True,
        *map(tensors.get, ("dropout_state", "bias", "mask", "sinks", "alibi", "intervals")),
    )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_the_forward(device, name):
    torch.library.opcheck(torch.ops.fa_ext.attention.default, operands(name, device))


@pytest.mark.parametrize("wrt", [0b00111, 0b00010, 0b11111, 0b11000])
def test_opcheck_of_the_backward(device, wrt):
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in operands("all", device))
    out, lse = torch.ops.fa_ext.attention(q, k, v, *rest)
    tensors = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse
    torch.library.opcheck(torch.ops.fa_ext.attention_backward.default, (*tensors, *rest[:7], *rest[8:10], wrt, *rest[10:]))


def test_the_operator_is_the_call(device):
    for name in CALLS:
        tensors, options = make(name, device, torch.float32)
        out, lse = attend(tensors, options)
        got, got_lse = torch.ops.fa_ext.attention(*operands(name, device))
        assert torch.equal(got, out) and torch.equal(got_lse, lse), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "all", "bias of a key", "sinks", "two intervals"])
def test_whole_graphs_of_dynamic_shapes(device, backend, name):
    compiled = torch.compile(lambda tensors, options: scalar(*attend(tensors, options)), fullgraph=True, dynamic=True, backend=backend)
    for seq_q, seq_k, batch in ((5, 7, 2), (9, 6, 3), (17, 33, 4)):
        tensors, options = make(name, device, torch.float32, SQ=seq_q, SK=seq_k, B=batch)
        loss = compiled(tensors, options)
        wanted = scalar(*attend(tensors, options))
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
        got, right = gradients(loss, tensors), gradients(wanted, tensors)
        for n in right:
            torch.testing.assert_close(got[n], right[n], rtol=1e-4, atol=1e-5)


def test_shapes_do_not_compile_again(device):
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v):
        return ft.attention(q, k, v, causal=True, window=(3, None)).square().sum()

    compiled, counts = torch.compile(step, fullgraph=True, dynamic=True, backend=counter), []
    for seq in (5, 8, 13, 21):
        q, k, v = (torch.randn(2, 2, seq, 8, device=device, requires_grad=True) for _ in range(3))
        compiled(q, k, v).backward()
        got = q.grad.clone()
        q.grad = None
        step(q, k, v).backward()
        torch.testing.assert_close(q.grad, got)
        counts.append(sum(any("fa_ext" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs))
    assert counts == [1, 1, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_gradients_and_under_autocast(device, backend):
    @functools.partial(torch.compile, fullgraph=True, backend=backend)
    def call(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            return ft.attention(q, k, v, causal="bottom_right")

    tensors, _ = make("plain", device, torch.float32)
    q, k, v = (tensors[n] for n in "qkv")
    with torch.no_grad():
        out = call(q, k, v)
    with torch.inference_mode():
        also = call(q, k, v)
    wanted = ft.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal="bottom_right")
    assert torch.equal(out, wanted) and torch.equal(also, wanted)
    dq = torch.autograd.grad(call(q, k, v).float().sum(), q)[0]
    torch.testing.assert_close(dq, torch.autograd.grad(wanted.float().sum(), q)[0], rtol=1e-2, atol=1e-2)


def test_an_expanded_bias_compiled(device):
    tensors, options = make("plain", device, torch.float32)
    bias = torch.randn(4, 1, 1, device=device, requires_grad=True)

    def step(bias):
        return scalar(*attend(tensors | {"bias": bias.expand(2, 4, 5, 7)}, options))

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(bias), bias)[0]
    torch.testing.assert_close(got, torch.autograd.grad(step(bias), bias)[0], rtol=1e-4, atol=1e-5)
    torch.compile(step, fullgraph=True, backend=keep)(bias)
    place = [argument.name for argument in torch.ops.fa_ext.attention.default._schema.arguments].index("bias")
    given = [n.args[place].meta["example_value"].shape for n in graphs[0].graph.nodes if "fa_ext.attention" in str(n.target)]
    assert given == [(1, 4, 1, 1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_derivatives_of_a_graph_are_refused(device, backend):
    tensors, options = make("plain", device, torch.float32)
    q = tensors["q"]
    out = torch.compile(lambda q: attend(tensors | {"q": q}, options)[0].square().sum(), fullgraph=True, backend=backend)(q)
    with pytest.raises(RuntimeError, match="double backward|attention_backward has no derivative"):
        torch.autograd.grad(torch.autograd.grad(out, q, create_graph=True)[0].sum(), q)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoint(device, reentrant, compiled):
    if reentrant and compiled:
        pytest.skip("torch.compile has no reentrant checkpoints")
    tensors, options = make("all", device, torch.float32)

    def block(q, k, v, bias, sinks):
        return attend(tensors | {"q": q * 1.5, "k": k, "v": v, "bias": bias, "sinks": sinks}, options)

    def step(*leaves):
        return scalar(*checkpoint(block, *leaves, use_reentrant=reentrant))

    leaves = [x for x in tensors.values() if x.requires_grad]
    loss = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(*leaves)
    got = torch.autograd.grad(loss, leaves) if not reentrant else leaf_gradients(loss, leaves)
    for a, b in zip(got, torch.autograd.grad(scalar(*block(*leaves)), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def leaf_gradients(loss, leaves):
    """Reentrant checkpoints know backward() alone."""
    loss.backward()
    return [x.grad for x in leaves]


def test_selective_checkpoint_keeps_the_operator(device):
    """A dispatch mode sees the operator, so that a policy can keep its results and nothing is computed again."""
    calls = []

    def policy(context, op, *args, **keywords):
        if op == torch.ops.fa_ext.attention.default:
            calls.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    tensors, options = make("plain", device, torch.float32)
    leaves = [tensors[n] for n in "qkv"]

    def block(q, k, v):
        return attend({"q": q * 1.5, "k": k, "v": v}, options)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    loss = scalar(*checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts))
    got = torch.autograd.grad(loss, leaves)
    assert calls and not calls[0]
    for a, b in zip(got, torch.autograd.grad(scalar(*block(*leaves)), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_dispatch_mode_sees_the_operator_without_gradients(device):
    """Its kernel for autograd goes past the dispatcher only where nobody is in between."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    seen, (arguments, op) = [], (operands("plain", device), torch.ops.fa_ext.attention.default)
    wanted = op(*arguments)
    with torch.no_grad(), Seen():
        got = op(*arguments)
    assert seen.count(op) == 1
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) and not a.requires_grad


def test_fake_and_meta_tensors(device):
    tensors, options = make("all", device, torch.float32)
    out, lse = attend(tensors, options)
    meta = {n: x.detach().to("meta") for n, x in tensors.items()}
    for got in (attend(meta, options), torch.ops.fa_ext.attention(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in operands("all", device)))):
        assert [(x.shape, x.dtype, x.stride()) for x in got] == [(x.shape, x.dtype, x.stride()) for x in (out, lse)]
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) for n, x in tensors.items()}
        fake_out, fake_lse = attend(fakes, options)
        assert fake_out.shape == out.shape and fake_lse.shape == lse.shape and fake_out.device == out.device
        scalar(fake_out, fake_lse).backward()
        assert all(fakes[n].grad.shape == tensors[n].shape for n in tensors if tensors[n].requires_grad)


def test_export(device):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return ft.attention(q, k, v, causal=True)

    seq = torch.export.Dim("seq", min=2, max=64)
    q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(3))
    with torch.no_grad():
        program = torch.export.export(Block(), (q, k, v), dynamic_shapes=({2: seq},) * 3)
        q, k, v = (torch.randn(1, 2, 19, 16, device=device) for _ in range(3))
        assert torch.equal(program.module()(q, k, v), ft.attention(q, k, v, causal=True))


def test_compiled_calls_refuse_what_eager_ones_refuse(device):
    tensors, _ = make("plain", device, torch.float32)
    q, k, v = (tensors[n].detach() for n in "qkv")
    for options, match in (({"causal": True}, "top_left"), ({"window": (-2, None)}, "None"), ({"causal": "lower"}, "lower")):
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in (q, k, v)]
            with pytest.raises(ValueError, match=match):
                ft.attention(*fakes, **options)


BAD = [
    ({"window": 3}, TypeError, "window has type int"),
    ({"window": (1, 2, 3)}, ValueError, "window has 3 items"),
    ({"window": ("a", None)}, TypeError, "window's left"),
    ({"window": (None, 1.5)}, TypeError, "window's right"),
    ({"window": (True, None)}, TypeError, "window's left"),
    ({"causal": 1}, TypeError, "causal has type int"),
    ({"causal": None}, TypeError, "causal has type NoneType"),
    ({"return_lse": "no"}, TypeError, "return_lse has type str"),
]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": np.True_},
        {"window": (np.int64(2), None)},
        {"window": [torch.tensor(2), 0]},
        {"window": (2**70, 0)},
        {"window": (2**63, 2**63 - 1)},
        {"dropout_p": 0},
        {"dropout_p": np.int64(0)},
        {"dropout_p": np.float32(0)},
    ],
)
def test_the_operator_takes_what_the_core_takes(device, options):
    q, k, v = (torch.randn(1, 2, 5, 8, device=device) for _ in range(3))
    own = q.as_subclass(type("Own", (torch.Tensor,), {}))
    wanted = ft.attention(q, k, v, **options)
    torch.testing.assert_close(ft.attention(own, k, v, **options).as_subclass(torch.Tensor), wanted)
    torch.testing.assert_close(ft.attention(own, k, v, **options, out=torch.empty_like(q)).as_subclass(torch.Tensor), wanted)


@pytest.mark.parametrize("options, error, match", BAD)
def test_the_operator_is_refused_what_the_core_refuses(device, options, error, match):
    q, k, v = (torch.randn(1, 2, 5, 8, device=device) for _ in range(3))
    for of_mode in (torch.Tensor, type("Own", (torch.Tensor,), {})):  # straight to the core, and by the operator
        for more in ({}, {"out": torch.empty_like(q)}):
            with pytest.raises(error, match=match):
                ft.attention(q.as_subclass(of_mode), k, v, **options, **more)


@pytest.mark.parametrize(
    "shapes, match",
    [
        (((2, 4, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8)), "heads of q"),
        (((2, 4, 9, 8), (2, 0, 9, 8), (2, 0, 9, 8)), "heads of q"),
        (((2, 4, 9, 8), (2, 4, 9, 7), (2, 4, 9, 8)), "one head_dim"),
        (((2, 4, 9, 8), (3, 4, 9, 8), (3, 4, 9, 8)), "one batch"),
        (((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 8, 8)), "share all axes"),
        (((2, 4, 9, 8), (2, 4, 9, 8), (4, 9, 8)), "v has 3 axes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_anything_runs(device, shapes, match):
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    with pytest.raises(ValueError, match=match):
        ft.attention(q, k, v)
    with pytest.raises(ValueError, match="accepted: one dtype and one device"):
        ft.attention(q, q.half(), q)
    with pytest.raises(ValueError, match="accepted: one dtype and one device"):
        ft.attention(q, torch.empty(q.shape, device=device), q)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, chosen, where: ft.attention(q[:, chosen], k[:, :1], v[:, :1]),
        lambda q, k, v, chosen, where: ft.attention(q[where], k[:3], v[:3]),
        lambda q, k, v, chosen, where: ft.attention(q, k[:, :, where], v[:, :, chosen.clone()]),
        lambda q, k, v, chosen, where: ft.attention(q[:, :2], k[:, where[:2]], v[:, where[:2]]),
    ],
    ids=["heads", "batch", "keys", "heads of keys"],
)
def test_sizes_that_depend_on_data(device, call):
    q, k, v = (torch.randn(4, 4, 4, 8, device=device) for _ in range(3))
    chosen = torch.tensor([True, True, False, True], device=device)

    def function(q, k, v, chosen):
        return call(q, k, v, chosen, chosen.nonzero()[:, 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v, chosen)
    torch.testing.assert_close(got, function(q, k, v, chosen))


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_torchs_tracer_sees_the_operator(device):
    def block(q):
        return q + ft.attention(q, q, q)

    q, other = (torch.randn(1, 2, 5, 8, device=device) for _ in range(2))
    traced = torch.jit.trace(block, (q,))
    assert "fa_ext" in str(traced.graph)
    torch.testing.assert_close(traced(other), block(other))


def test_a_subclass_in_any_place_comes_to_the_operator(device):
    from torch.testing._internal.two_tensor import TwoTensor

    tensors, options = make("all", device, torch.float32)
    tensors = {n: x.detach() for n, x in tensors.items()}
    wanted = attend(tensors, options)
    for name in ("bias", "mask", "sinks", "alibi"):
        got = attend(tensors | {name: TwoTensor(tensors[name], tensors[name])}, options)
        for x, y in zip(got, wanted, strict=True):
            assert isinstance(x, TwoTensor) and torch.equal(x.a, y) and torch.equal(x.b, y)
