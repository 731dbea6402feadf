"""fa_ext.torch.attention under torch.func, and derivatives of its derivatives."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _eager  # noqa: E402
from tests.frameworks.support.torch_calls import CALLS, DEVICES, gradients, make, math_attention, scalar  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
CLOSE = {"cpu": 1e-9, "cuda": 2e-4}


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """The warning about memory has been given."""
    monkeypatch.setattr(_eager, "_warned", True)


def wide(device):
    return torch.float64 if device == "cpu" else torch.float32


def attend(tensors, options):
    tensors = dict(tensors)
    return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **options, return_lse=True)


def close(got, wanted, device):
    bound = CLOSE[device]
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * max(1.0, float(wanted.detach().abs().max()) if wanted.numel() else 1.0))


def second(function, tensors, options):
    """Gradients of a function of the gradients."""
    first = gradients_of(scalar(*function(tensors, options)), tensors)
    loss = sum((g.square() * (n + 1)).sum() for n, g in enumerate(first.values()))
    return gradients(loss, tensors)


def gradients_of(loss, tensors):
    names = [n for n, x in tensors.items() if x.requires_grad]
    return dict(zip(names, torch.autograd.grad(loss, [tensors[n] for n in names], create_graph=True), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_double_backward_is_that_of_math(device, name):
    tensors, options = make(name, device, wide(device))
    got, wanted = second(attend, tensors, options), second(math_attention, tensors, options)
    for n in wanted:
        close(got[n], wanted[n], device)


@pytest.mark.parametrize("name", ["plain", "softcap", "bias", "sinks", "mask", "intervals"])
def test_gradgradcheck(device, name):
    if device != "cpu":
        pytest.skip("float64 is the CPU's")
    tensors, options = make(name, SQ=2, SK=3, D=3, DV=2, B=1, H=2, HK=1)
    names = [n for n in tensors if n not in ("mask", "alibi", "intervals")]

    def call(*values):
        given = dict(zip(names, values, strict=True))
        out, lse = attend(given | {n: x for n, x in tensors.items() if n in ("mask", "intervals")}, options)
        return out, torch.where(torch.isfinite(lse), lse, 0)

    assert torch.autograd.gradgradcheck(call, [tensors[n] for n in names], eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_a_result_alone_is_differentiated_as_beside_the_lse(device, name):
    tensors, options = make(name, device, wide(device))

    def alone(tensors, options):
        tensors = dict(tensors)
        return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **options)

    def first_and_second(out):
        first = gradients_of(scalar(out, out.new_empty(0)), tensors)
        return first, gradients(sum(g.square().sum() for g in first.values()), tensors)

    got, wanted = first_and_second(alone(tensors, options)), first_and_second(attend(tensors, options)[0])
    assert all(torch.equal(got[order][n], wanted[order][n]) for order in range(2) for n in wanted[order])


def test_tensors_of_transforms_that_have_ended(device):
    """torch unwraps them for an operation with gradients, so that ours takes them too."""
    kept = []

    def keep(x):
        kept.extend((x * 2, x[..., :5] > 0))
        return x.sum()

    given = torch.randn(2, 3, 5, 8, device=device)
    torch.func.grad(keep)(given)
    q = torch.randn_like(given, requires_grad=True)
    for lse in (False, True):
        got, wanted = (ft.attention(q, x, x, return_lse=lse) for x in (kept[0], given * 2))
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    got, wanted = (ft.attention(q, given, given, mask=mask) for mask in (kept[1], given[..., :5] > 0))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), q) for x in (got, wanted)), rtol=0, atol=0)


def test_third_derivatives(device):
    def third(function):
        tensors, options = make("softcap", device, wide(device), SQ=2, SK=3)
        loss = scalar(*function(tensors, options))
        for _ in range(3):
            (g,) = torch.autograd.grad(loss, tensors["q"], create_graph=True)
            loss = (g * g.detach().sign()).sum() + g.square().sum()
        return g

    close(third(attend), third(math_attention), device)


def test_only_a_second_derivative_takes_the_composition(device, monkeypatch):
    """create_graph=True alone runs the kernel: the composition waits for what differentiates it."""
    monkeypatch.setattr(_eager, "_warned", False)
    tensors, options = make("plain", device, wide(device))
    wanted = gradients(scalar(*attend(tensors, options)), tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = gradients_of(scalar(*attend(tensors, options)), tensors)
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    with pytest.warns(UserWarning, match="every pair of query and key"):
        got["q"].square().sum().backward(retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got["q"].square().sum().backward()


def test_second_derivative_in_halves_and_under_autocast(device):
    tensors, options = make("plain", device, torch.bfloat16)
    exact = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
    with torch.autocast(device, torch.float16):
        first = torch.autograd.grad(attend({n: x.float() for n, x in tensors.items()}, options)[0].sum(), tensors["q"], create_graph=True)
        got = torch.autograd.grad(first[0].sum(), tensors["k"])[0]
    (first,) = torch.autograd.grad(math_attention(exact, options)[0].sum(), exact["q"], create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), exact["k"])
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=3e-2 * float(wanted.abs().max()))


# ---- torch.func ----


def leaves_of(name, device, elements=3, mapped=("q", "k", "v", "bias", "mask", "sinks", "alibi", "intervals")):
    """Tensors with a mapped axis for those in ``mapped``, at different places; and in_dims."""
    tensors, options = make(name, device, wide(device))
    made, dims = {}, {}
    for place, (n, x) in enumerate(tensors.items()):
        x = x.detach()
        if n not in mapped:
            made[n], dims[n] = x, None
            continue
        others = [make(name, device, wide(device), seed=7 + m)[0][n].detach() for m in range(elements)]
        dims[n] = place % (x.dim() + 1)
        made[n] = torch.stack(others, dims[n])
    return made, dims, options


def one_by_one(function, tensors, dims, elements=3):
    results = [function({n: x if dims[n] is None else x.select(dims[n], m) for n, x in tensors.items()}) for m in range(elements)]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mapped", [("q", "k", "v", "bias", "mask", "sinks", "alibi", "intervals"), ("q",), ("k", "mask"), ("bias",), ("sinks", "v"), ("intervals",)])
def test_vmap(device, name, mapped):
    tensors, dims, options = leaves_of(name, device, mapped=mapped)
    if all(dim is None for dim in dims.values()):
        pytest.skip("nothing of this call is mapped")

    def function(tensors):
        return attend(tensors, options)

    got = torch.func.vmap(function, in_dims=(dims,))(tensors)
    for a, b in zip(got, one_by_one(function, tensors, dims), strict=True):
        close(a, b, device)


@pytest.mark.parametrize("name", ["plain", "all", "bias of a key", "sinks", "two intervals"])
@pytest.mark.parametrize("mapped", [("q", "k", "v", "bias", "mask", "sinks", "alibi", "intervals"), ("q",), ("bias",)])
def test_vmap_of_grad_and_grad_of_vmap(device, name, mapped):
    tensors, dims, options = leaves_of(name, device, mapped=mapped)
    if all(dim is None for dim in dims.values()):
        pytest.skip("nothing of this call is mapped")
    floating = [n for n in tensors if n not in ("mask", "alibi", "intervals")]

    def inner(tensors):
        rest = {n: x for n, x in tensors.items() if n not in floating}
        grads = torch.func.grad(lambda some: scalar(*attend(some | rest, options)))({n: tensors[n] for n in floating})
        return tuple(grads[n] for n in floating)

    got = torch.func.vmap(inner, in_dims=(dims,))(tensors)
    wanted = one_by_one(inner, tensors, dims)
    for a, b in zip(got, wanted, strict=True):
        close(a, b, device)

    def whole(some):
        rest = {n: x for n, x in tensors.items() if n not in floating}
        out, lse = torch.func.vmap(lambda one: attend(one, options), in_dims=(dims,))({n: (some | rest)[n] for n in tensors})
        return sum(scalar(a, b) for a, b in zip(out, lse, strict=True))

    total = torch.func.grad(whole)({n: tensors[n] for n in floating})
    for n, each in zip(floating, wanted, strict=True):
        close(total[n], each.sum(0) if dims[n] is None else each.movedim(0, dims[n]), device)


def test_plain_autograd_through_vmap(device):
    tensors, dims, options = leaves_of("plain", device)
    for x in tensors.values():
        x.requires_grad_()

    def function(tensors):
        return attend(tensors, options)

    out, lse = torch.func.vmap(function, in_dims=(dims,))(tensors)
    got = gradients(out.sum() + lse.square().sum(), tensors)
    out, lse = one_by_one(function, tensors, dims)
    wanted = gradients(out.sum() + lse.square().sum(), tensors)
    for n in wanted:
        close(got[n], wanted[n], device)


def test_nested_vmap(device):
    q, k, v = (torch.randn(2, 3, 1, 2, 4, 8, device=device, dtype=wide(device)) for _ in range(3))
    twice = torch.func.vmap(torch.func.vmap(ft.attention))(q, k, v)
    flat = ft.attention(*(x.flatten(0, 2) for x in (q, k, v))).reshape(2, 3, 1, 2, 4, 8)
    close(twice, flat, device)


def test_jacrev_and_hessian_of_vjp(device):
    q, k, v = (torch.randn(1, 1, 2, 3, device=device, dtype=wide(device)) for _ in range(3))

    def own(q):
        return ft.attention(q, k, v)

    def plain(q):
        return math_attention({"q": q, "k": k, "v": v}, {})[0]

    close(torch.func.jacrev(own)(q), torch.func.jacrev(plain)(q), device)
    close(torch.func.jacrev(torch.func.jacrev(own))(q), torch.func.jacrev(torch.func.jacrev(plain))(q), device)


def test_vmap_compiled(device):
    tensors, dims, options = leaves_of("bias", device)

    def function(tensors):
        return torch.func.vmap(lambda one: attend(one, options)[0], in_dims=(dims,))(tensors)

    close(torch.compile(function, fullgraph=True, backend="aot_eager")(tensors), function(tensors), device)


def test_vmap_of_the_operators(device):
    def forward(q, k, v):
        return torch.ops.fa_ext.attention(q, k, v, -1, -1, 1, None, 0.0, "bhsd", 0.0, None, False, True)

    def backward(dout, q, k, v, out, lse):
        rest = -1, -1, 1, None, 0.0, "bhsd", 0.0, False, True, 0b101
        return torch.ops.fa_ext.attention_backward(dout, None, q, k, v, out, lse, *rest)

    q, k, v = (torch.randn(3, 2, 4, 5, 8, device=device, dtype=wide(device)) for _ in range(3))
    out, lse = torch.func.vmap(forward)(q, k, v)
    dq, dv = torch.func.vmap(backward)(torch.ones_like(out), q, k, v, out, lse)
    for n in range(3):
        wanted = forward(q[n], k[n], v[n])
        close(out[n], wanted[0], device)
        close(lse[n], wanted[1], device)
        found = backward(torch.ones_like(wanted[0]), q[n], k[n], v[n], *wanted)
        close(dq[n], found[0], device)
        close(dv[n], found[1], device)


def counted(function):
    """The function where a dispatch mode sees its operators."""

    def call(*args):
        with FlopCounterMode(display=False):
            return function(*args)

    return call


#: The ways to make a call the operator ``torch.ops.fa_ext.attention``, inside which transforms go on.
WAYS = {
    "compiled": lambda function: torch.compile(function, fullgraph=True, backend="aot_eager"),
    "dispatch mode": counted,
    "make_fx": lambda function: lambda *args: make_fx(function)(*args)(*args),
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms_of_the_operator(device, way):
    tensors, options = make("bias", device, wide(device))
    tensors["sinks"] = torch.randn(4, device=device, dtype=wide(device))
    tensors = {n: x.detach() for n, x in tensors.items()}

    def loss(tensors):
        return scalar(*attend(tensors, options))

    def of_q(q):
        return loss(tensors | {"q": q})

    qs = torch.stack([tensors["q"], 2 * tensors["q"]])
    for function, given in (
        (torch.func.grad(loss), tensors),
        (torch.func.vmap(torch.func.grad(of_q)), qs),
        (torch.func.grad(lambda qs: torch.func.vmap(of_q)(qs).sum()), qs),
        (torch.func.jacrev(lambda q: attend(tensors | {"q": q}, options)[0][0, 0]), tensors["q"]),
        (torch.func.grad(lambda q: torch.func.grad(lambda scale: of_q(q) * scale.square())(q.sum())), tensors["q"]),
    ):
        got, wanted = WAYS[way](function)(given), function(given)
        for n in wanted if isinstance(wanted, dict) else [...]:
            close(got[n], wanted[n], device)


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_of_the_operator_are_refused(device, way):
    q, k, v = (torch.randn(1, 2, 3, 4, device=device, dtype=wide(device)) for _ in range(3))

    def first(q):
        return torch.func.grad(lambda q: ft.attention(q, k, v).sin().sum())(q).cos().sum()

    def mixed(q):
        return torch.func.grad(lambda k: torch.func.grad(lambda v: ft.attention(q, k, v).sin().sum())(v).sum())(k).sum()

    for function in (torch.func.grad(first), mixed):
        with pytest.raises(RuntimeError, match="attention_backward has no derivative|Observed exception"):
            WAYS[way](function)(q)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_cotangents_at_once(device, name):
    tensors, options = make(name, device, wide(device))
    out, lse = attend(tensors, options)
    asked = [x for x in tensors.values() if x.requires_grad]
    dout, dlse = (torch.randn(3, *x.shape, device=device, dtype=x.dtype) for x in (out, lse))
    got = torch.autograd.grad((out, lse), asked, (dout, dlse), is_grads_batched=True, retain_graph=True)
    for n in range(3):
        wanted = torch.autograd.grad((out, lse), asked, (dout[n], dlse[n]), retain_graph=True)
        for x, y in zip(got, wanted, strict=True):
            close(x[n], y, device)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vectorized_jacobian_and_hessian(device):
    q = torch.randn(1, 1, 3, 4, device=device, dtype=wide(device))

    def function(q):
        return ft.attention(q, q, q, causal=True)

    for of, call in ((function, torch.autograd.functional.jacobian), (lambda q: function(q).sin().sum(), torch.autograd.functional.hessian)):
        close(call(of, q, vectorize=True), call(of, q), device)


def test_forward_mode_says_that_it_is_not_there(device):
    q, k, v = (torch.randn(1, 1, 2, 4, device=device) for _ in range(3))
    with pytest.raises(NotImplementedError, match=r"fa_ext\.torch\.attention has no forward-mode derivative"):
        torch.func.jvp(lambda q: ft.attention(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"fa_ext\.torch\.attention has no forward-mode derivative"):
            ft.attention(dual, k, v)
        ft.attention(q, k, v)


@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_of_the_operator_says_that_it_is_not_there(device, way):
    q, k, v = (torch.randn(1, 1, 2, 4, device=device) for _ in range(3))

    def tangent(q):
        return torch.func.jvp(lambda q: ft.attention(q, k, v), (q,), (q,))[1]

    with pytest.raises(Exception, match=r"fa_ext\.attention has no forward-mode derivative|NotImplementedError"):
        WAYS[way](tangent)(q)

    def beside(x):
        return torch.func.jvp(lambda x: x * ft.attention(q, k, v).sum(), (x,), (x,))[1]

    torch.testing.assert_close(WAYS[way](beside)(q), beside(q))
