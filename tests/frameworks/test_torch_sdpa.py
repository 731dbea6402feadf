"""scaled_dot_product_attention beside torch's own, what it leaves to torch, and the mode."""

import itertools
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _sdpa  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)

LEADS = [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)]


@pytest.fixture
def ours(monkeypatch):
    """Torch's own would be an error: fa_ext has to take the call."""

    def unwanted(*args, **keywords):
        raise AssertionError("the call went to torch")

    monkeypatch.setattr(_sdpa, "_torchs", unwanted)


@pytest.fixture
def theirs(monkeypatch):
    """fa_ext's kernel would be an error: torch has to take the call."""

    def unwanted(*args, **keywords):
        raise AssertionError("the call went to fa_ext")

    monkeypatch.setattr(_sdpa, "attention", unwanted)


def draw(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def math_sdpa(*args, **keywords):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **keywords)


def same(tensors, **options):
    """Values and gradients are those of torch's math backend."""
    kept = [x for x in tensors if x is not None and x.requires_grad]
    out = ft.scaled_dot_product_attention(*tensors, **options)
    wanted = math_sdpa(*tensors, **options)
    assert out.shape == wanted.shape and out.dtype == wanted.dtype
    bound = 2e-2 if out.dtype in (torch.float16, torch.bfloat16) else 1e-5
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)
    dout = torch.randn_like(out)
    got, right = (torch.autograd.grad(x, kept, dout, allow_unused=True) for x in (out, wanted))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * bound, atol=10 * bound)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "inf", "empty row"])
def test_masks_over_leading_axes(device, lead, mask, ours):
    for seq_q, seq_k in ((5, 5), (3, 8), (8, 3), (1, 7)):
        q, k, v = draw(*lead, seq_q, 8, device=device), draw(*lead, seq_k, 8, device=device), draw(*lead, seq_k, 6, device=device)
        patterns = [(seq_q, seq_k), (*lead, seq_q, seq_k), (*(1 for _ in lead), seq_q, seq_k), (1, seq_k), (seq_q, 1)]
        if len(lead) > 1:
            patterns += [(*lead[:-1], 1, seq_q, seq_k), (lead[-1], seq_q, seq_k), (lead[0], *(1 for _ in lead[1:]), 1, seq_k)]
        if mask in ("none", "causal"):
            same((q, k, v), is_causal=mask == "causal")
            continue
        for pattern in patterns:
            given = torch.randn(pattern, device=device)
            if mask == "bool":
                given = given < 0.5
            elif mask == "inf":
                given = torch.where(given < 0.3, given, -math.inf)
            elif mask == "empty row" and pattern[-2] == seq_q:
                given[..., 0, :] = -math.inf
            if mask == "float":
                given.requires_grad_()
            same((q, k, v, given))


@pytest.mark.parametrize("heads, heads_k", [(6, 2), (6, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_grouped_heads(device, heads, heads_k, batch, ours):
    q, k, v = (draw(*batch, n, 7, 16, device=device) for n in (heads, heads_k, heads_k))
    same((q, k, v), enable_gqa=True)
    same((q, k, v), enable_gqa=True, is_causal=True)
    same((q, k, v, draw(*batch, heads, 7, 7, device=device)), enable_gqa=True, scale=0.2)


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3), (1, 3)), ((2, 3), (2, 1), (2, 3)), ((1, 3), (2, 3), (2, 1)), ((2, 2, 3), (3,), (1, 2, 3))])  # fmt: skip
def test_leading_axes_broadcast(device, shapes, ours):
    q, k, v = (draw(*lead, 5, 8, device=device) for lead in shapes)
    same((q, k, v))
    same((q, k, v), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(device, dtype, ours):
    if device != "cpu" and dtype == torch.float64:
        pytest.skip("float64 is the CPU's")
    q, k, v = (draw(2, 3, 33, 32, device=device, dtype=dtype) for _ in range(3))
    same((q, k, v), is_causal=True)
    same((q, k, v, draw(33, 33, device=device, dtype=dtype)))


def test_rows_that_see_nothing_are_zero(device, ours):
    q, k, v = (draw(1, 2, 4, 8, device=device) for _ in range(3))
    hidden = torch.ones(4, 4, dtype=torch.bool, device=device)
    hidden[2] = False
    out = ft.scaled_dot_product_attention(q, k, v, hidden)
    assert bool((out[:, :, 2] == 0).all())
    out.sum().backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (q, k, v)) and bool((q.grad[:, :, 2] == 0).all())


def test_empty_sizes(device):
    for sizes in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        batch, heads, seq_q, seq_k = sizes
        q, k, v = draw(batch, heads, seq_q, 8, device=device), draw(batch, heads, seq_k, 8, device=device), draw(batch, heads, seq_k, 8, device=device)
        same((q, k, v))


def test_positions_of_arguments(device, ours):
    q, k, v = (draw(1, 2, 4, 8, device=device) for _ in range(3))
    mask = torch.rand(4, 4, device=device) < 0.8
    torch.testing.assert_close(ft.scaled_dot_product_attention(q, k, v, mask, 0.0, False), math_sdpa(q, k, v, mask, 0.0, False))
    torch.testing.assert_close(ft.scaled_dot_product_attention(q, k, v, None, 0.0, True), math_sdpa(q, k, v, None, 0.0, True))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda c: c | {"query": c["query"].repeat(1, 1, 1, 40), "key": c["key"].repeat(1, 1, 1, 40)}, "head_dim is 320"),
        (lambda c: c | {"scale": math.inf}, "scale is inf"),
        (lambda c: c | {"dropout_p": -0.5}, r"dropout_p is -0\.5"),
        (lambda c: c | {"attn_mask": torch.ones(4, 4), "is_causal": True}, "both attn_mask and is_causal"),
        (lambda c: c | {"attn_mask": torch.ones(4, 4, dtype=torch.int32)}, "attn_mask is torch.int32"),
        (lambda c: c | {"attn_mask": torch.ones(3, 4)}, "does not broadcast"),
        (lambda c: c | {"key": c["key"].half()}, "dtypes are"),
        (lambda c: c | {"query": c["query"][:, :1].repeat(1, 3, 1, 1)}, "do not broadcast"),
        (lambda c: c | {"query": c["query"].repeat(1, 2, 1, 1)[:, :3], "enable_gqa": True}, "3 heads of query"),
        (lambda c: c | {"key": c["key"][..., :4]}, "shapes are"),
        (lambda c: c | {n: c[n].to(torch.complex64) for n in ("query", "key", "value")}, "complex64"),
        (lambda c: c | {"query": None}, "not all tensors"),
        (lambda c: c | {"scale": "small"}, "scale is small"),
        (lambda c: c | {"dropout_p": None}, "dropout_p is None"),
        (lambda c: c | {"is_causal": 1}, "is_causal is 1"),
        (lambda c: c | {"enable_gqa": 1}, "enable_gqa 1"),
        (lambda c: {n: x[0, 0] for n, x in c.items()} | {"enable_gqa": True}, "enable_gqa with 2, 2 and 2 axes"),
    ],
)  # fmt: skip
def test_what_goes_to_torch_and_why(device, change, reason, theirs):
    call = change({n: torch.randn(2, 2, 4, 8) for n in ("query", "key", "value")})
    call = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    kernel, reasons = ft.explain(**call)
    assert kernel is None and list(reasons) == ["fa_ext"]
    with pytest.raises(Exception, match=reason):
        raise ValueError(reasons["fa_ext"])
    try:
        wanted = F.scaled_dot_product_attention(**call)
    except Exception as error:
        with pytest.raises(type(error)):
            ft.scaled_dot_product_attention(**call)
    else:
        torch.testing.assert_close(ft.scaled_dot_product_attention(**call), wanted, equal_nan=True)


def test_sparse_tensors_are_refused_by_name(device):
    q, mask = torch.randn(2, 2, 4, 8, device=device), torch.ones(4, 4, dtype=torch.bool, device=device).to_sparse()
    with pytest.raises(TypeError, match="attn_mask has layout torch.sparse_coo; accepted: torch.strided"):
        ft.scaled_dot_product_attention(q, q, q, mask)
    with pytest.raises(TypeError, match="key has layout torch.sparse_coo; accepted: torch.strided"), ft.sdpa():
        F.scaled_dot_product_attention(q, q.to_sparse(), q)


def test_dropout(device):
    q, k, v = (torch.ones(1, 1, 64, 64, device=device) for _ in range(3))
    out = ft.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert out.std() > 0 and abs(float(out.mean()) - 1) < 0.1


def test_explain_names_the_kernel(device, ours):
    q, k, v = (draw(2, 4, 8, device=device) for _ in range(3))
    kernel, reasons = ft.explain(q, k, v, is_causal=True)
    assert isinstance(kernel, str) and kernel not in reasons


def test_the_mode(device, ours):
    q, k, v = (draw(2, 3, 8, 16, device=device) for _ in range(3))
    wanted = math_sdpa(q, k, v, is_causal=True)
    before = F.scaled_dot_product_attention
    with ft.sdpa():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert F.scaled_dot_product_attention is before
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_the_mode_reaches_modules(device, monkeypatch):
    calls = []

    def spy(*args, **keywords):
        calls.append(keywords)
        return ft.attention(*args, **keywords)

    monkeypatch.setattr(_sdpa, "attention", spy)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 9, 32, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9, device=device)
    wanted = layer(x, src_mask=mask)
    with ft.sdpa():
        out = layer(x, src_mask=mask)
    assert calls
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    with ft.sdpa():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, src_mask=mask)
    torch.testing.assert_close(compiled, wanted, rtol=1e-4, atol=1e-5)


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_a_block_of_math_alone_is_torchs(device, around, compiled, theirs):
    torch._dynamo.reset()
    q, k, v = (draw(2, 3, 8, 16, device=device) for _ in range(3))
    wanted = math_sdpa(q, k, v, is_causal=True)
    call = torch.compile(math_sdpa, fullgraph=True, backend="aot_eager") if compiled else math_sdpa
    if around:
        with sdpa_kernel(SDPBackend.MATH), ft.sdpa():
            out = call(q, k, v, is_causal=True)
    else:
        with ft.sdpa():
            out = call(q, k, v, is_causal=True)
    assert torch.equal(out, wanted)
    with sdpa_kernel(SDPBackend.MATH):
        kernel, reasons = ft.explain(q, k, v)
    assert kernel is None and "sdpa_kernel allows no fused backend" in reasons["fa_ext"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backends", [*([one] for one in FUSED), [SDPBackend.MATH, FUSED[0]], [SDPBackend.MATH, *FUSED]])
def test_fa_ext_stands_for_the_fused_backends(device, backends, compiled, ours):
    torch._dynamo.reset()

    def call(q, k, v):
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (draw(2, 3, 8, 16, device=device) for _ in range(3))
    with ft.sdpa():
        out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v)
    torch.testing.assert_close(out, math_sdpa(q, k, v), rtol=1e-5, atol=1e-5)


def encoder(device):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).to(device).eval()


def test_modules_of_torch_take_their_fast_path(device, monkeypatch):
    model, x = encoder(device), torch.randn(2, 9, 32, device=device)
    padding = torch.arange(9, device=device) >= torch.tensor([[9], [6]], device=device)
    taken, fast = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: taken.append(args[0].is_nested) or fast(*args))
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
        with ft.sdpa(), ft.sdpa():
            out = model(x, src_key_padding_mask=padding)
    assert taken == [True] * 4 and torch.equal(out, wanted)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_nested_tensors(device):
    parts = [torch.randn(length, 32, device=device) for length in (5, 3)]
    attend = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(device).eval()
    x = torch.nested.nested_tensor(parts)
    jagged = torch.nested.nested_tensor([part.view(-1, 4, 8) for part in parts], layout=torch.jagged).transpose(1, 2)
    with torch.no_grad():
        wanted = attend(x, x, x, need_weights=False)[0], F.scaled_dot_product_attention(jagged, jagged, jagged)
        with ft.sdpa():
            found = attend(x, x, x, need_weights=False)[0], F.scaled_dot_product_attention(jagged, jagged, jagged)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))


def test_a_compiler_that_is_first_used_in_a_block(device):
    """It looks up torch's functions then, once for all."""
    program = """if True:
        import sys, torch, torch.nn.functional as F, fa_ext.torch
        def call(model, x):
            return torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).to(sys.argv[1]).eval()
        x = torch.randn(2, 9, 32, device=sys.argv[1])
        with fa_ext.torch.sdpa():
            inside = call(model, x)
        torch.testing.assert_close(inside, call(model, x))
        torch.testing.assert_close(inside, model(x))
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, device], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_module_that_is_scripted_in_a_block(device):
    attend, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(device).eval(), torch.randn(2, 9, 32, device=device)
    with torch.no_grad():
        with ft.sdpa():
            out = torch.jit.script(attend)(x, x, x)[0]
        torch.testing.assert_close(out, attend(x, x, x)[0], rtol=1e-4, atol=1e-5)


def test_other_modes_and_subclasses_keep_modules_off_their_fast_path(device, monkeypatch):
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, x = encoder(device), torch.randn(2, 9, 32, device=device)
    own = x.as_subclass(type("Own", (torch.Tensor,), {}))

    def unwanted(*args):
        raise AssertionError("a fast path was taken")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", unwanted)
    with torch.no_grad():
        with ft.sdpa(), Other():
            model(x)
        with ft.sdpa():
            model(own)


def test_the_mode_is_of_its_thread(device, monkeypatch):
    def spy(*args, **keywords):
        asked.append(threading.get_ident())
        return ft.attention(*args, **keywords)

    asked, opened, leave = [], threading.Event(), threading.Event()
    monkeypatch.setattr(_sdpa, "attention", spy)
    before = torch.overrides.has_torch_function
    q = torch.randn(1, 2, 4, 8, device=device)

    def other():
        with ft.sdpa():
            opened.set()
            leave.wait(60)
            F.scaled_dot_product_attention(q, q, q)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(60)
    F.scaled_dot_product_attention(q, q, q)
    assert not torch.overrides.has_torch_function((q,))
    with ft.sdpa():
        leave.set()
        thread.join()
        assert torch.overrides.has_torch_function is not before
    assert asked == [thread.ident] and torch.overrides.has_torch_function is before


def test_a_graph_break_in_a_block(device, ours):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def call(q, k, v):
        with ft.sdpa():
            out = F.scaled_dot_product_attention(q, k, v)
            torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(out, k, v)

    q, k, v = (torch.randn(2, 3, 8, 16, device=device) for _ in range(3))
    torch.testing.assert_close(call(q, k, v), math_sdpa(math_sdpa(q, k, v), k, v), rtol=1e-5, atol=1e-5)
    assert not torch._C._len_torch_function_stack() and not isinstance(torch.overrides.has_torch_function, _sdpa._HasTorchFunction)


def test_negative_views(device, ours):
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.complex64, device=device).conj().imag for _ in range(3))
    assert q.is_neg()
    torch.testing.assert_close(ft.scaled_dot_product_attention(q, k, v), math_sdpa(q, k, v), rtol=1e-5, atol=1e-5)


def test_the_mode_ends_with_an_error(device, monkeypatch):
    q = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(ZeroDivisionError), ft.sdpa():
        raise ZeroDivisionError
    monkeypatch.setattr(_sdpa, "attention", None)
    F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("inside", [True, False])
def test_the_mode_compiled(device, inside):
    torch._dynamo.reset()
    q, k, v = (draw(2, 3, 8, 16, device=device) for _ in range(3))
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def within(q, k, v):
        with ft.sdpa():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if inside:
        out = torch.compile(within, fullgraph=True, backend=keep)(q, k, v)
    else:
        with ft.sdpa():
            out = torch.compile(call, fullgraph=True, backend=keep)(q, k, v)
    torch.testing.assert_close(out, math_sdpa(q, k, v, is_causal=True), rtol=1e-5, atol=1e-5)
    assert any("fa_ext.attention" in name for graph in graphs for name in graph)


def test_compiled_with_dynamic_shapes(device):
    torch._dynamo.reset()

    def step(q, k, v, mask):
        return ft.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq_q, seq_k, lead in itertools.product((5, 9), (7,), ((2,), (2, 3))):
        q, k, v = (draw(*lead, n, s, 8, device=device) for n, s in ((4, seq_q), (2, seq_k), (2, seq_k)))
        mask = torch.randn(seq_q, seq_k, device=device).requires_grad_()
        got = torch.autograd.grad(compiled(q, k, v, mask).square().sum(), (q, k, v, mask))
        wanted = torch.autograd.grad(math_sdpa(q, k, v, mask, enable_gqa=True).square().sum(), (q, k, v, mask))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_with_a_scale_of_a_size(device):
    q = draw(1, 2, 4, 8, device=device)

    def function(q):
        return ft.scaled_dot_product_attention(q, q, q, scale=q.shape[-1] ** -0.5 / 2)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), function(q))


def test_compiled_what_goes_to_torch(device):
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 4, 300, device=device) for _ in range(3))
    out = torch.compile(ft.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(device, strict):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            with ft.sdpa():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True) + ft.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(3))
    program = torch.export.export(Block(), (q, k, v), strict=strict)
    assert str(program.graph).count("torch.ops.fa_ext.attention") == 2
    torch.testing.assert_close(program.module()(q, k, v), Block()(q, k, v))
