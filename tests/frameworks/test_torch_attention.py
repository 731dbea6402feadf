"""fa_ext.torch.attention: values and gradients over all options, what needs a gradient, modes of autograd, strides."""

import inspect
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")

import fa_ext  # noqa: E402
import fa_ext.torch as ft  # noqa: E402
from fa_ext._operands import OPTIONS  # noqa: E402
from tests.frameworks.support.torch_calls import CALLS, DEVICES, gradients, make, math_attention, scalar  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
FIXED = ("mask", "alibi", "intervals")  # without a gradient
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def dtype_for(device):
    """The widest that its kernels take."""
    return torch.float64 if device == "cpu" else torch.float32


def attend(tensors, options, **more):
    tensors = dict(tensors)
    return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **options, return_lse=True, **more)


def agree(got, wanted, dtype):
    assert got.keys() == wanted.keys()
    for name in got:
        bound = CLOSE[dtype] * max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(got[name].double(), wanted[name].double(), rtol=0, atol=bound, msg=lambda m: f"d{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(device, name):
    dtype = dtype_for(device)
    tensors, options = make(name, device, dtype)
    out, lse = attend(tensors, options)
    wanted, wanted_lse = math_attention({n: x.double() for n, x in tensors.items() if n not in FIXED} | fixed(tensors), options)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=CLOSE[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=CLOSE[dtype])
    assert out.is_contiguous() and out.dtype == dtype and lse.dtype == dtype
    agree(gradients(scalar(out, lse), tensors), gradients(scalar(wanted, wanted_lse), tensors), dtype)


def fixed(tensors):
    return {n: x for n, x in tensors.items() if n in FIXED}


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(device, name):
    if device != "cpu":
        pytest.skip("float64 is the CPU's")
    tensors, options = make(name, SQ=3, SK=4, D=3, DV=2)
    names = [n for n in tensors if n not in FIXED]

    def call(*values):
        out, lse = attend(dict(zip(names, values, strict=True)) | fixed(tensors), options)
        return out, torch.where(torch.isfinite(lse), lse, 0)

    assert torch.autograd.gradcheck(call, [tensors[n] for n in names], eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "all", "bottom_right"])
def test_halves(device, name, dtype):
    tensors, options = make(name, device, dtype, SQ=33, SK=65, D=32, DV=16)
    out, lse = attend(tensors, options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    wide = {n: x.detach().double().requires_grad_() for n, x in tensors.items() if n not in FIXED}
    wanted, wanted_lse = math_attention(wide | fixed(tensors), options)
    got = gradients(scalar(out, lse), tensors)
    assert all(got[n].dtype == dtype for n in got)
    agree(got, gradients(scalar(wanted, wanted_lse), wide), dtype)


def test_every_subset_of_what_requires_grad(device):
    tensors, options = make("all", device, torch.float32)
    names = [n for n in tensors if n not in FIXED]
    whole = gradients(scalar(*attend(tensors, options)), tensors)
    for count in range(len(names) + 1):
        for subset in itertools.combinations(names, count):
            some = {n: x.detach().requires_grad_(n in subset) for n, x in tensors.items() if n not in FIXED}
            out, lse = attend(some | fixed(tensors), options)
            assert out.requires_grad == lse.requires_grad == bool(subset)
            if subset:
                got = gradients(scalar(out, lse), some)
                assert set(got) == set(subset)
                for n in subset:
                    torch.testing.assert_close(got[n], whole[n], rtol=1e-5, atol=1e-6)


def test_only_what_is_asked_for_is_computed(device, monkeypatch):
    asked = []

    def spy(*args, **keywords):
        asked.append(keywords["wrt"])
        return fa_ext.attention_backward(*args, **keywords)

    tensors, options = make("all", device, torch.float32)
    monkeypatch.setattr(fa_ext._core, "attention_backward", spy)
    for wanted in (("k",), ("bias",), ("q", "sinks")):
        some = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors.items() if n not in FIXED}
        out, lse = attend(some | fixed(tensors), options)
        scalar(out, lse).backward()
        assert asked.pop() == wanted and not asked


def test_an_output_that_is_not_used_stays_none(device, monkeypatch):
    seen = []

    def spy(dout, *args, **keywords):
        seen.append((dout is None, keywords.get("dlse") is None))
        return fa_ext.attention_backward(dout, *args, **keywords)

    monkeypatch.setattr(fa_ext._core, "attention_backward", spy)
    tensors, options = make("plain", device, torch.float32)
    out, lse = attend(tensors, options)
    out.sum().backward(retain_graph=True)
    lse.sum().backward(retain_graph=True)
    (out.sum() + lse.sum()).backward()
    assert seen == [(False, True), (True, False), (False, False)]


def test_through_the_lse_alone(device):
    tensors, options = make("sinks", device, torch.float32)
    got = torch.autograd.grad(attend(tensors, options)[1].square().sum(), [tensors[n] for n in ("q", "k", "sinks")])
    wanted = torch.autograd.grad(math_attention(tensors, options)[1].square().sum(), [tensors[n] for n in ("q", "k", "sinks")])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode):
    tensors, options = make("all", device, torch.float32)
    with mode():
        out, lse = attend(tensors, options)
        alone = ft.attention(*(tensors[n] for n in "qkv"), layout="bshd")
    assert not out.requires_grad and not lse.requires_grad and out.is_inference() == (mode is torch.inference_mode)
    wanted, _ = attend(tensors, options)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    assert isinstance(alone, torch.Tensor)


def test_the_core_refuses_what_requires_grad_while_grad_mode_is_on(device):
    tensors, _ = make("plain", device, torch.float32)
    qkv = [tensors[n] for n in "qkv"]
    with pytest.raises(ValueError, match=r"q requires grad.*fa_ext\.torch\.attention.*q\.detach\(\)"):
        fa_ext.attention(*qkv)
    with torch.no_grad():
        out = fa_ext.attention(*qkv)
    with torch.inference_mode():
        torch.testing.assert_close(fa_ext.attention(*qkv), out, rtol=0, atol=0)


def test_gradients_of_any_strides(device):
    tensors, options = make("plain", device, torch.float32)
    out, _ = attend(tensors, options)
    base = torch.randn(*out.shape[:3], 2 * out.shape[3], device=device)
    for dout in (base[..., ::2], torch.randn(out.shape[::-1], device=device).permute(3, 2, 1, 0), torch.ones(1, device=device).expand_as(out)):
        got = torch.autograd.grad(out, [tensors[n] for n in "qkv"], dout, retain_graph=True)
        wanted = torch.autograd.grad(out, [tensors[n] for n in "qkv"], dout.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_inputs_of_any_strides(device):
    tensors, options = make("plain", device, torch.float32)
    wanted = gradients(scalar(*attend(tensors, options)), tensors)
    leaves = {n: tensors[n].detach().permute(3, 1, 0, 2).contiguous().requires_grad_() for n in "qkv"}
    views = {n: x.permute(2, 1, 3, 0) for n, x in leaves.items()}
    scalar(*attend(views, options)).backward()
    for n in "qkv":
        torch.testing.assert_close(leaves[n].grad.permute(2, 1, 3, 0), wanted[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape, expanded", [((1, 4, 1, 7), (2, 4, 5, 7)), ((4, 1, 1), (2, 4, 5, 7)), ((1,), (5, 7)), ((2, 1, 5, 1), (2, 4, 5, 7))])  # fmt: skip
def test_an_expanded_bias_is_reduced_in_the_kernel(device, shape, expanded, monkeypatch):
    sizes = []

    def spy(*args, **keywords):
        sizes.append(keywords["bias"].numel())
        return fa_ext.attention_backward(*args, **keywords)

    tensors, options = make("plain", device, torch.float32)
    monkeypatch.setattr(fa_ext._core, "attention_backward", spy)
    bias = torch.randn(shape, device=device, requires_grad=True)
    scalar(*attend(tensors | {"bias": bias.expand(expanded)}, options)).backward()
    assert sizes == [bias.numel()]
    wanted = torch.autograd.grad(scalar(*math_attention(tensors | {"bias": bias}, options)), bias)[0]
    torch.testing.assert_close(bias.grad, wanted, rtol=1e-4, atol=1e-5)


def test_an_expanded_bias_whose_own_gradient_is_wanted(device):
    tensors, options = make("plain", device, torch.float32)
    bias = torch.randn(4, 1, 1, device=device, requires_grad=True)
    kept = bias.expand(2, 4, 5, 7)
    kept.retain_grad()
    scalar(*attend(tensors | {"bias": kept}, options)).backward()
    full = bias.detach().expand(2, 4, 5, 7).contiguous().requires_grad_()
    scalar(*math_attention(tensors | {"bias": full}, options)).backward()
    torch.testing.assert_close(kept.grad, full.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.grad, full.grad.sum((0, 2, 3))[:, None, None], rtol=1e-4, atol=1e-5)


class Reversed(torch.autograd.Function):
    """A view whose gradient has the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_what_lies_between_an_expanded_bias_and_its_memory_counts(device):
    tensors, options = make("plain", device, torch.float32)
    bias = torch.randn(4, 1, 7, device=device, requires_grad=True)

    def gradient(of, expanded):
        return torch.autograd.grad(scalar(*attend(tensors | {"bias": expanded}, options)), of, retain_graph=True)[0]

    wanted = gradient(bias, bias.expand(2, 4, 5, 7))
    torch.testing.assert_close(gradient(bias, Reversed.apply(bias).expand(2, 4, 5, 7)), -wanted)
    view = bias[None]
    torch.testing.assert_close(gradient(view, view.expand(2, 4, 5, 7)), wanted[None])
    view.register_hook(lambda g: 10 * g)
    torch.testing.assert_close(gradient(bias, view.expand(2, 4, 5, 7)), 10 * wanted)
    with torch.no_grad():
        leaf = bias[None]
    leaf.requires_grad_()
    torch.testing.assert_close(gradient(leaf, leaf.expand(2, 4, 5, 7)), wanted[None])


def test_an_expanded_mask_and_a_bias_without_gradient_are_narrow(device, monkeypatch):
    given = []

    def spy(*args, **keywords):
        given.append((keywords["bias"].shape, keywords["mask"].shape))
        return fa_ext.attention(*args, **keywords)

    tensors, options = make("mask", device, torch.float32)
    monkeypatch.setattr(fa_ext._core, "attention", spy)
    bias = torch.randn(4, 1, 1, device=device)
    out, _ = attend(tensors | {"bias": bias.expand(2, 4, 5, 7), "mask": tensors["mask"].expand(2, 4, 5, 7)}, options)
    assert given == [((1, 4, 1, 1), (2, 1, 5, 7))]
    wanted, _ = attend(tensors | {"bias": bias}, options)
    assert torch.equal(out, wanted)


def test_deterministic_follows_torch(device, monkeypatch):
    given = []

    def spy(*args, **keywords):
        given.append(keywords["deterministic"])
        return fa_ext.attention_backward(*args, **keywords)

    monkeypatch.setattr(fa_ext._core, "attention_backward", spy)
    tensors, options = make("plain", device, torch.float32)
    try:
        for flag, asked, wanted in ((False, None, False), (True, None, True), (True, False, False), (False, True, True)):
            torch.use_deterministic_algorithms(flag)
            attend(tensors, options, deterministic=asked)[0].sum().backward()
            assert given.pop() is wanted
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast(device):
    tensors, options = make("all", device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out, lse = attend(tensors, options)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        loss = scalar(out.float(), lse)
    got = gradients(loss, tensors)
    assert all(got[n].dtype == torch.float32 for n in got)
    low = {n: x.detach().bfloat16().requires_grad_() if n in "qkv" else x for n, x in tensors.items()}
    wanted, wanted_lse = attend(low, options)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    agree(got, gradients(scalar(wanted.float(), wanted_lse), low), torch.bfloat16)
    with torch.autocast(device, torch.bfloat16, enabled=False):
        assert attend(tensors, options)[0].dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):  # a bias of the other half type has no place in the call as it is
        half = ft.attention(*(tensors[n] for n in "qkv"), layout="bshd", bias=torch.zeros(5, 7, dtype=torch.float16, device=device))
        assert half.dtype == torch.bfloat16
    if device == "cpu":
        wide, _ = make("plain", device, torch.float64)
        with torch.autocast(device, torch.bfloat16):
            assert ft.attention(*(wide[n] for n in "qkv")).dtype == torch.float64


def test_backward_under_autocast(device):
    tensors, options = make("plain", device, torch.float32)
    wanted = gradients(scalar(*attend(tensors, options)), tensors)
    loss = scalar(*attend(tensors, options))
    with torch.autocast(device, torch.bfloat16):
        got = gradients(loss, tensors)
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)


def test_saved_tensors_hooks(device):
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    tensors, options = make("all", device, torch.float32)
    wanted = gradients(scalar(*attend(tensors, options)), tensors)
    for hooks in (torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)):
        with hooks:
            loss = scalar(*attend(tensors, options))
        got = gradients(loss, tensors)
        assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert packed


def test_saved_tensors_may_not_change(device):
    tensors, options = make("plain", device, torch.float32)
    q = tensors["q"] * 1
    out, _ = attend(tensors | {"q": q}, options)
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("seq", [64, 2048])
def test_torch_holds_the_workspace(device, seq):
    """Small or large, it is torch's, which may hold all of the device's memory that it does not use."""
    if device == "cpu":
        pytest.skip("memory of the CPU is not torch's")
    q, k, v, dout = (torch.randn((8, 16, seq, 64), device=device, dtype=torch.float16) for _ in range(4))
    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    grads = fa_ext.attention_backward(dout, q, k, v, out, lse)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fa_ext.attention_backward(dout, q, k, v, out, lse, grads=grads)
    rows = 2 * 4 * lse.numel()  # every kernel keeps an LSE and a delta, float32, of each query
    assert torch.cuda.max_memory_allocated() - before >= rows
    assert torch.cuda.memory_allocated() == before


def test_memory_is_freed_and_used_once(device):
    tensors, options = make("plain", device, torch.float32)
    out, _ = attend(tensors, options)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"causal": True}, ValueError, "top_left"),
        ({"causal": "lower"}, ValueError, "lower"),
        ({"window": (-1, 0)}, ValueError, "None"),
        ({"layout": "sbhd"}, ValueError, "sbhd"),
        ({"kernel": "nothing"}, ValueError, "nothing"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p is 1\.5; accepted: 0 to 1"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"bias": (1, 2)}, TypeError, r"bias has type tuple; accepted: torch\.Tensor or None"),
        ({"mask": [True]}, TypeError, "mask has type list"),
        ({"sinks": 0.5}, TypeError, "sinks has type float"),
        ({"alibi": "steep"}, TypeError, "alibi has type str"),
        ({"dropout_p": "half"}, TypeError, "dropout_p has type str; accepted: a number from 0 to 1"),
        ({"dropout_p": None}, TypeError, "dropout_p has type NoneType"),
        ({"dropout_p": True}, TypeError, "dropout_p has type bool"),
        ({"return_lse": "no"}, TypeError, "return_lse has type str; accepted: True or False"),
        ({"deterministic": 1}, TypeError, "deterministic has type int; accepted: True, False or None"),
    ],
)
def test_bad_arguments(device, options, error, match):
    tensors, _ = make("plain", device, torch.float32)
    with pytest.raises(error, match=match):
        ft.attention(*(tensors[n] for n in "qkv"), **options)


def test_what_is_no_tensor_is_named(device):
    q = torch.randn(1, 2, 4, 8, device=device)
    for given, name in (((None, q, q), "q"), ((q, q.cpu().numpy(), q), "k"), ((q, q, 3), "v")):
        for more in ({}, {"out": torch.empty_like(q)}):
            with pytest.raises(TypeError, match=rf"{name} has type \w+; accepted: torch\.Tensor$"):
                ft.attention(*given, **more)


def test_slopes_have_no_gradient(device):
    tensors, options = make("alibi", device, torch.float32)
    tensors["alibi"].requires_grad_()
    with pytest.raises(ValueError, match=r"alibi requires grad.*alibi\.detach\(\)"):
        attend(tensors, options)
    with torch.no_grad():
        attend(tensors, options)


def test_empty_sizes(device):
    for extents in ({"B": 0}, {"SQ": 0}, {"SK": 0}):
        tensors, options = make("sinks", device, torch.float32, **extents)
        out, lse = attend(tensors, options)
        (out.sum() + lse.sum()).backward()
        for x in tensors.values():
            assert x.grad.shape == x.shape and bool(torch.isfinite(x.grad).all())


def test_no_warning_is_given(device):
    tensors, options = make("all", device, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalar(*attend(tensors, options)).backward()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", ["jagged", "nested", "coo", "csr"])
def test_tensors_without_strides_are_refused_by_name(device, kind):
    q = torch.randn(2, 4, 5, 8, device=device)
    own = q.as_subclass(type("Own", (torch.Tensor,), {}))
    parts = [torch.randn(4, length, 8, device=device) for length in (5, 3)]
    if kind in ("jagged", "nested"):
        jagged = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts], layout=torch.jagged).transpose(1, 2)
        x = jagged if kind == "jagged" else torch.nested.nested_tensor(parts)
        words = r" is a nested tensor \(torch\.\w+\); accepted: strided tensors"
    else:
        x = torch.ones(5, 5, device=device)
        x = x.to_sparse() if kind == "coo" else x.to_sparse_csr()
        words = f" has layout torch.sparse_{kind}; accepted: torch.strided"
    lengths = torch.tensor([5, 5], dtype=torch.int32, device=device)
    for place, name in enumerate("qkv"):
        for first in (q, own):
            operands = [first, q, q]
            operands[place] = x
            for options in ({}, {"causal": "top_left", "out": torch.empty_like(q)}, {"seqlens_k": lengths}):
                with pytest.raises(TypeError, match=name + words):
                    ft.attention(*operands, **options)
    for name in ("bias", "mask", "sinks", "alibi", "intervals"):
        for first in (q, own, q.clone().requires_grad_()):
            with pytest.raises(TypeError, match=name + words):
                ft.attention(first, q, q, **{name: x})


def test_options_are_those_of_the_core(device):
    """Each array of operands.def that changes what attention means is a keyword, and an argument of the operators."""
    assert [*inspect.signature(ft.attention).parameters][-len(OPTIONS) :] == list(OPTIONS)
    for name in ("attention", "attention_backward", "attention_out"):
        arguments = getattr(torch.ops.fa_ext, name).default._schema.arguments
        assert [x.name for x in arguments][-len(OPTIONS) :] == list(OPTIONS)
        assert all(x.has_default_value() for x in arguments[-len(OPTIONS) :])


def test_intervals_that_are_expanded_and_of_other_dtypes(device):
    """Expanded axes stay what they mean, the last one too: its two ends are then the same, and hold no key."""
    tensors, options = make("intervals", device, torch.float32)
    for given in (tensors["intervals"][:1, :1].expand(2, 4, -1, -1), tensors["intervals"][:, :, :, None].expand(-1, -1, -1, 2, -1),
                  tensors["intervals"][..., :1].expand(-1, -1, -1, 2)):  # fmt: skip
        wanted = attend(tensors | {"intervals": given.contiguous()}, options)
        for call in (attend, torch.compile(attend, backend="eager")):
            for x, y in zip(call(tensors | {"intervals": given}, options), wanted, strict=True):
                assert torch.equal(x, y)
    with pytest.raises(TypeError, match="intervals has dtype int64; accepted: int32"):
        attend(tensors | {"intervals": tensors["intervals"].long()}, options)


@pytest.mark.parametrize("into", [False, True])
def test_unknown_keywords(device, into):
    q = torch.randn(1, 2, 3, 8, device=device)
    more = {"out": torch.empty_like(q)} if into else {}
    for call in (ft.attention, torch.compile(ft.attention, backend="eager")):
        with pytest.raises(TypeError, match="unknown argument slopes; accepted"):
            call(q, q, q, slopes=q, **more)
    assert torch.equal(ft.attention(q, q, q, bias=None, sinks=None, **more), ft.attention(q, q, q))
