"""The order of axes in memory: results have that of q, gradients that of what they are gradients of, as torch's own have."""

import shutil

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
#: Where the axes (B, H, S, D) of an operand lie in memory, the outermost first.
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3), (0, 1, 3, 2)]
COMPILERS = [None, "aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]


def placed(order, device, *shape):
    """Random numbers of a shape whose axes lie in an order."""
    x = torch.randn([shape[axis] for axis in order], device=device)
    return x.permute([order.index(axis) for axis in range(4)]).requires_grad_()


def operands(order, device, width=6):
    return [placed(order, device, 2, heads, seq, size) for heads, seq, size in ((4, 5, 8), (2, 7, 8), (2, 7, width))]


def order_of(x):
    """The order of axes of a tensor without gaps."""
    order = sorted(range(4), key=x.stride().__getitem__, reverse=True)
    assert x.permute(order).is_contiguous()
    return tuple(order)


def gradients(out, operands):
    return torch.autograd.grad(out.square().sum(), operands)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_attention_keeps_the_order(device, order, dynamic, backend):
    torch._dynamo.reset()
    q, k, v = operands(order, device)
    call = torch.compile(ft.attention, fullgraph=True, backend=backend, dynamic=dynamic) if backend else ft.attention
    out = call(q, k, v)
    kept = order if order[3] == 3 else (0, 1, 2, 3)  # head_dim is the innermost axis of every result
    assert [order_of(x) for x in (out, *gradients(out, (q, k, v)))] == [kept] * 4
    torch.testing.assert_close(out, ft.attention(*(x.detach().contiguous() for x in (q, k, v))))
    with torch.no_grad():
        assert order_of(call(q, k, v)) == kept


@pytest.mark.parametrize("order", ORDERS)
def test_fake_and_meta_tensors_have_the_strides(device, order):
    q, k, v = operands(order, device)
    out = ft.attention(q, k, v)
    meta = [torch.empty_strided(x.shape, x.stride(), device="meta", requires_grad=True) for x in (q, k, v)]
    assert ft.attention(*meta).stride() == out.stride()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        made = ft.attention(*fakes)
        found = made, *gradients(made, fakes)
    assert [x.stride() for x in found] == [x.stride() for x in (out, *gradients(out, (q, k, v)))]


def test_options_keep_the_order(device):
    q, k, v = operands((0, 2, 1, 3), device)
    mask = torch.rand(5, 7, device=device) < 0.8
    changes = {"mask": mask}, {"bias": mask.float()}, {"dropout_p": 0.5}, {"scale": 0.3, "softcap": 2.0}, {"return_lse": True}
    for options in changes:
        out = ft.attention(q, k, v, **options)
        out = out[0] if "return_lse" in options else out
        assert [order_of(x) for x in (out, *gradients(out, (q, k, v)))] == [(0, 2, 1, 3)] * 4


def test_slices_of_a_projection_make_results_without_gaps(device):
    q, k, v = torch.randn(2, 5, 3, 4, 8, device=device).permute(2, 0, 3, 1, 4).requires_grad_()
    out = ft.attention(q, k, v)
    assert order_of(out) == (0, 2, 1, 3) and out.transpose(1, 2).reshape(2, 5, 32).data_ptr() == out.data_ptr()


def test_bshd_is_contiguous(device):
    q, k, v = (x.transpose(1, 2) for x in operands((0, 1, 2, 3), device))
    assert ft.attention(q, k, v, layout="bshd").is_contiguous()


def test_sizes_that_depend_on_data(device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x, chosen):
        q = x[:, :, chosen.nonzero()[:, 0]].transpose(1, 2)
        return ft.attention(q, q, q)

    chosen = torch.tensor([True, True, False, True], device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = call(torch.randn(2, 5, 4, 8, device=device), chosen)
    assert order_of(out) == (0, 2, 1, 3)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("order", [one for one in ORDERS if one[3] == 3])
def test_scaled_dot_product_attention_has_the_strides_of_torchs(device, order, inside):
    q, k, v = (placed(order, device, 2, 4, 6, 8) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v)
    if inside:
        with ft.sdpa():
            out = F.scaled_dot_product_attention(q, k, v)
    else:
        out = ft.scaled_dot_product_attention(q, k, v)
    assert out.stride() == wanted.stride()


def test_three_axes(device):
    """As torch.nn.functional.multi_head_attention_forward has them."""
    q, k, v = (torch.randn(6, 4, 8, device=device).transpose(0, 1) for _ in range(3))
    assert ft.scaled_dot_product_attention(q, k, v).transpose(0, 1).is_contiguous()


def test_operands_of_few_axes_are_refused_as_ever(device):
    q, k, v = (x.detach() for x in operands((0, 2, 1, 3), device))
    for bad in ((q[0, 0].t(), k, v), (q, k, v[0, 0]), (q, k[0, 0], v)):
        with pytest.raises(ValueError, match="has shape|dimensions, shape"):
            ft.attention(*bad)
