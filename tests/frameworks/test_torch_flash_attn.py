"""fa_ext.torch.flash_attn: values and gradients of FlashAttention 2's functions against the math of each sequence."""

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from fa_ext.torch import flash_attn as fa  # noqa: E402
from tests.frameworks.support import flash_attn_math as math  # noqa: E402
from tests.frameworks.support.flash_attn_math import D, DV, HK, LENGTHS_K, LENGTHS_Q, H, close  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
#: name: (arguments of the functions, arguments of the math)
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.2}, {"scale": 0.2}),
    "left": ({"window_size": (2, -1)}, {"window_size": (2, -1)}),
    "both": ({"window_size": [1, 2]}, {"window_size": (1, 2)}),
    "both as a tensor": ({"window_size": torch.tensor([1, 2])}, {"window_size": (1, 2)}),
    "right": ({"window_size": (-1, 1)}, {"window_size": (-1, 1)}),
    "causal window": ({"causal": True, "window_size": (2, 3)}, {"causal": True, "window_size": (2, 3)}),
    "itself alone": ({"window_size": (0, 0)}, {"window_size": (0, 0)}),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
    "softcap off": ({"softcap": -1.0}, {}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    "alibi without causal": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "alibi of each": ({"alibi_slopes": SLOPES * torch.arange(1, 5)[:, None]}, {"slopes": SLOPES * torch.arange(1, 5)[:, None]}),
}  # fmt: skip
each_option = pytest.mark.parametrize("name", OPTIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def ends():
    return math.starts(LENGTHS_Q), math.starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)


def of(name, sequences=4):
    """Arguments of the call and of the math, slopes of each sequence for so many sequences."""
    call, right = (dict(x) for x in OPTIONS[name])
    if name == "alibi of each":
        call["alibi_slopes"], right["slopes"] = call["alibi_slopes"][:sequences], right["slopes"][:sequences]
    return call, right


@each_dtype
@each_option
def test_a_batch(name, dtype):
    q, k, v = math.padded(dtype=dtype)
    call, right = of(name, 2)
    out, lse, nothing = fa.flash_attn_func(q, k, v, return_attn_probs=True, **call)
    wanted, wanted_lse = math.batch(q, k, v, **right)
    close(out, wanted)
    close(lse, wanted_lse)
    assert nothing is None and out.dtype == dtype
    assert torch.equal(fa.flash_attn_func(q, k, v, **call), out)


@each_dtype
@each_option
def test_packed_sequences(name, dtype):
    q, k, v = math.packed(dtype=dtype)
    call, right = of(name)
    out, lse, nothing = fa.flash_attn_varlen_func(q, k, v, *ends(), return_attn_probs=True, **call)
    wanted, wanted_lse = math.each(q, k, v, LENGTHS_Q, LENGTHS_K, **right)
    close(out, wanted)
    close(lse, wanted_lse)
    assert nothing is None and lse.shape == (H, sum(LENGTHS_Q))


def test_rows_without_keys():
    """Queries before the first key, of a sequence without keys, and rows of no sequence."""
    q, k, v = math.draw((1, 5, H, D), (1, 2, HK, D), (1, 2, HK, DV))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -torch.inf).all() and torch.isfinite(lse[..., 3:]).all()
    q, k, v = math.draw((9, H, D), (8, HK, D), (8, HK, DV))
    q[6:] = torch.nan
    starts_q, starts_k = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 0, 8], dtype=torch.int32)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, 8, return_attn_probs=True)
    assert (out[:2] == 0).all() and (lse[:, :2] == -torch.inf).all()
    assert (out[6:] == 0).all() and (lse[:, 6:] == -torch.inf).all()
    close(out[2:6], math.attend(q[2:6], k, v)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_arguments_are_views(causal):
    """kv (B, S, 2, ..), qkv (B, S, 3, ..) and their packed forms: the bits of separate arguments."""
    (kv,), (q,) = math.draw((2, 7, 2, HK, D)), math.draw((2, 5, H, D))
    assert torch.equal(fa.flash_attn_kvpacked_func(q, kv, causal=causal), fa.flash_attn_func(q, *kv.unbind(2), causal=causal))
    (qkv,) = math.draw((2, 7, 3, H, D))
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, causal=causal), fa.flash_attn_func(*qkv.unbind(2), causal=causal))
    (q,), (kv,) = math.draw((sum(LENGTHS_Q), H, D)), math.draw((sum(LENGTHS_K), 2, HK, D))
    got = fa.flash_attn_varlen_kvpacked_func(q, kv, *ends(), causal=causal)
    assert torch.equal(got, fa.flash_attn_varlen_func(q, *kv.unbind(1), *ends(), causal=causal))
    (qkv,) = math.draw((sum(LENGTHS_Q), 3, H, D))
    starts, longest = math.starts(LENGTHS_Q), max(LENGTHS_Q)
    got = fa.flash_attn_varlen_qkvpacked_func(qkv, starts, longest, causal=causal)
    assert torch.equal(got, fa.flash_attn_varlen_func(*qkv.unbind(1), starts, starts, longest, longest, causal=causal))


def test_positional_order():
    """Each argument at its place, by position alone."""
    q, k, v = math.padded()
    got = fa.flash_attn_func(q, k, v, 0.0, 0.3, False, (3, 1), 0.9, SLOPES, True, True)
    wanted = math.batch(q, k, v, scale=0.3, window_size=(3, 1), softcap=0.9, slopes=SLOPES)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    q, k, v = math.packed()
    got = fa.flash_attn_varlen_func(q, k, v, *ends(), 0.0, 0.3, False, (3, 1), 0.9, SLOPES, True, True, None)
    close(got[0], math.each(q, k, v, LENGTHS_Q, LENGTHS_K, scale=0.3, window_size=(3, 1), softcap=0.9, slopes=SLOPES)[0])


def test_a_block_table():
    """Keys of sequence b are cu_seqlens_k[b + 1] - cu_seqlens_k[b] rows of its blocks."""
    q, k, v = math.packed()
    caches = [x.new_full((6, 4, *x.shape[1:]), torch.nan) for x in (k, v)]
    table = torch.tensor([[4, 1], [0, -1], [-1, -1], [5, -1]], dtype=torch.int32)
    for b, begin in enumerate(math.starts(LENGTHS_K)[:-1].tolist()):
        for j in range(LENGTHS_K[b]):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[b, j // 4], j % 4] = x[begin + j]
    got = fa.flash_attn_varlen_func(q, *caches, *ends(), causal=True, block_table=table)
    close(got, math.each(q, k, v, LENGTHS_Q, LENGTHS_K, causal=True)[0])


def test_indices_may_be_int64():
    q, k, v = math.packed()
    wide = [x.long() for x in ends()[:2]]
    assert torch.equal(fa.flash_attn_varlen_func(q, k, v, *wide, 8, 7), fa.flash_attn_varlen_func(q, k, v, *ends()))


def test_strides_are_free():
    q, k, v = math.draw((2, 5, H, 2 * D), (2, HK, 7, D), (2, 7, HK, DV))
    q, k = q[..., ::2], k.transpose(1, 2)
    close(fa.flash_attn_func(q, k, v), math.batch(q, k, v)[0])


# ---- gradients ----


def gradients(call, inputs, weights):
    """Of out and the LSE, by ``weights``; rows without keys apart."""
    out, lse = call()
    loss = (out * weights[0]).sum() + torch.where(torch.isfinite(lse), lse * weights[1], 0.0).sum()
    return torch.autograd.grad(loss, inputs)


@each_option
def test_gradients_of_a_batch(name):
    inputs = math.padded(grad=True)
    call, right = of(name, 2)
    weights = math.draw((2, 5, H, DV), (2, H, 5), seed=1)
    got = gradients(lambda: fa.flash_attn_func(*inputs, return_attn_probs=True, **call)[:2], inputs, weights)
    for x, y in zip(got, gradients(lambda: math.batch(*inputs, **right), inputs, weights), strict=True):
        close(x, y)


@each_option
def test_gradients_of_packed_sequences(name):
    inputs = math.packed(grad=True)
    call, right = of(name)
    weights = math.draw((sum(LENGTHS_Q), H, DV), (H, sum(LENGTHS_Q)), seed=1)
    got = gradients(lambda: fa.flash_attn_varlen_func(*inputs, *ends(), return_attn_probs=True, **call)[:2], inputs, weights)
    for x, y in zip(got, gradients(lambda: math.each(*inputs, LENGTHS_Q, LENGTHS_K, **right), inputs, weights), strict=True):
        close(x, y)


def test_gradients_of_qkv():
    """One gradient of the whole tensor, packed and in a batch; rows of no sequence have 0."""
    (qkv,), (weight,) = math.draw((2, 7, 3, H, D), grad=True), math.draw((2, 7, H, D), seed=1)
    (got,) = torch.autograd.grad((fa.flash_attn_qkvpacked_func(qkv, causal=True) * weight).sum(), qkv)
    (wanted,) = torch.autograd.grad((math.batch(*qkv.unbind(2), causal=True)[0] * weight).sum(), qkv)
    close(got, wanted)
    (qkv,), (weight,) = math.draw((17, 3, H, D), grad=True), math.draw((17, H, D), seed=1)
    starts = math.starts(LENGTHS_Q)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, starts, 8, causal=True)
    (got,) = torch.autograd.grad((out * weight).sum(), qkv)
    wanted, _ = math.each(*qkv[:14].unbind(1), LENGTHS_Q, LENGTHS_Q, causal=True)
    (wanted,) = torch.autograd.grad((wanted * weight[:14]).sum(), qkv)
    close(got, wanted)
    assert (got[14:] == 0).all()


def test_deterministic_says_so_to_the_core(monkeypatch):
    """True is an order whatever torch's switch says; False follows the switch."""
    seen = []
    monkeypatch.setattr(fa.flash_attn_interface.calls, "attention", lambda *args, **options: seen.append(options["deterministic"]))
    q, k, v = math.padded()
    for deterministic in (False, True):
        fa.flash_attn_func(q, k, v, deterministic=deterministic)
    assert seen == [None, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype, device):
    """16 bits, on every device: packed with gradients, and a step on a cache with rotary."""
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    given = math.packed(dtype=dtype)
    inputs, doubles = ([x.to(kind).requires_grad_() for x in given] for kind in (device, torch.float64))
    (weight,) = math.draw((sum(LENGTHS_Q), H, DV), dtype=dtype, seed=1)
    where = [x.to(device) for x in ends()[:2]]
    out, lse, _ = fa.flash_attn_varlen_func(*inputs, *where, 8, 7, causal=True, window_size=(4, 0), return_attn_probs=True)
    wanted, wanted_lse = math.each(*doubles, LENGTHS_Q, LENGTHS_K, causal=True, window_size=(4, 0))
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), wanted, **tolerance)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, **tolerance)
    got = torch.autograd.grad((out * weight.to(device)).sum(), inputs)
    for x, y in zip(got, torch.autograd.grad((wanted * weight).sum(), doubles), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, **tolerance)

    q, k, v = math.draw((2, 1, H, D), (2, 1, HK, D), (2, 1, HK, DV), dtype=dtype, seed=2)
    caches = math.draw((2, 9, HK, D), (2, 9, HK, DV), dtype=dtype, seed=3)
    angle = torch.arange(9)[:, None] * 10.0 ** (-torch.arange(3) / 3)
    cos, sin, lengths = angle.cos(), angle.sin(), [5, 2]
    there = [x.to(device) for x in (q, *caches, k, v, cos, sin, torch.tensor(lengths, dtype=torch.int32))]
    out = fa.flash_attn_with_kvcache(*there, causal=True)
    for b, length in enumerate(lengths):
        keys = torch.cat((caches[0][b, :length], math.rotate(k[b, 0], cos, sin, length, True)[None].to(dtype)))
        query = math.rotate(q[b, 0], cos, sin, length, True)[None].to(dtype)
        wanted, _ = math.attend(query, keys, torch.cat((caches[1][b, :length], v[b])))
        torch.testing.assert_close(out[b].cpu().double(), wanted, **tolerance)


# ---- dropout ----


def kept(call):
    """The weights that a call keeps: those of values that are the unit matrix, where they are not 0."""
    torch.manual_seed(7)
    return call() != 0


def test_dropout_of_a_batch():
    (q, k, v), (weight,) = math.draw((2, 5, H, D), (2, 7, H, D), (2, 7, H, DV), grad=True), math.draw((2, 5, H, DV), seed=1)
    units = torch.eye(7, dtype=q.dtype).expand(2, H, 7, 7).transpose(1, 2)
    keep = kept(lambda: fa.flash_attn_func(q, k, units, 0.25)).transpose(1, 2)
    assert 0.5 < keep.double().mean() < 0.9
    torch.manual_seed(7)
    out = fa.flash_attn_func(q, k, v, 0.25)
    wanted, _ = math.batch(q, k, v, keep=keep, p=0.25)
    close(out, wanted)
    for x, y in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, wanted)), strict=True):
        close(x, y)


def test_dropout_of_packed_sequences():
    lengths_k = (7, 3, 0, 7)
    q, k, v = math.draw((sum(LENGTHS_Q), H, D), (sum(lengths_k), H, D), (sum(lengths_k), H, DV), grad=True)
    (weight,) = math.draw((sum(LENGTHS_Q), H, DV), seed=1)
    where = math.starts(LENGTHS_Q), math.starts(lengths_k), 8, 7
    units = torch.cat([torch.eye(7, dtype=q.dtype)[:n] for n in lengths_k])[:, None].expand(-1, H, -1)
    keep = kept(lambda: fa.flash_attn_varlen_func(q, k, units, *where, 0.25)).transpose(0, 1).split(LENGTHS_Q, 1)
    keep = [x[..., :n] for x, n in zip(keep, lengths_k, strict=True)]
    torch.manual_seed(7)
    out = fa.flash_attn_varlen_func(q, k, v, *where, 0.25)
    wanted, _ = math.each(q, k, v, LENGTHS_Q, lengths_k, keep=keep, p=0.25)
    close(out, wanted)
    for x, y in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, wanted)), strict=True):
        close(x, y)


# ---- what is refused ----


def test_weights_of_dropout_are_refused():
    q, k, v = math.padded()
    before = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="return_attn_probs is True with dropout_p > 0.*dropout_keep"):
        fa.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_input():
    q, k, v = math.padded()
    for bad, error, match in (
        ({"window_size": 3}, ValueError, "window_size is 3; accepted: a pair"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size is"),
        ({"window_size": (1.5, 2)}, TypeError, "window_size holds a float"),
        ({"window_size": (-1.0, -1.0)}, TypeError, "window_size holds a float"),
        ({"window_size": torch.tensor([1.5, 2])}, TypeError, "window_size holds a float"),
        ({"window_size": torch.tensor(3)}, ValueError, "window_size is 3"),
        ({"causal": "top_left"}, TypeError, "causal has type str; accepted: True or False"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan"),
        ({"alibi_slopes": SLOPES[:3]}, ValueError, "alibi has shape"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5"),
    ):
        with pytest.raises(error, match=match):
            fa.flash_attn_func(q, k, v, **bad)
    with pytest.raises(ValueError, match=r"qkv is \(2, 5, 4, 8\); accepted: a tensor \(batch, seqlen, 3, heads, head_dim\)"):
        fa.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"kv is \(2, 7, 2, 8\); accepted: a tensor \(total, 2, heads, head_dim\)"):
        fa.flash_attn_varlen_kvpacked_func(q, k, *ends())
    q, k, v = math.packed()
    with pytest.raises(TypeError, match="cu_seqlens_k has dtype torch.float32; accepted: torch.int32, torch.int64"):
        fa.flash_attn_varlen_func(q, k, v, ends()[0], ends()[1].float(), 8, 7)
    with pytest.raises(TypeError, match="cu_seqlens_q has type list"):
        fa.flash_attn_varlen_func(q, k, v, [0, 14], ends()[1], 8, 7)


def test_compiled():
    """In whole graphs, packed without another compilation for other lengths."""
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=count, dynamic=True)
    def step(q, k, v, starts_q, starts_k):
        return fa.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 8, 8, causal=True)

    compiled = None
    for lengths_q, lengths_k in ((LENGTHS_Q, LENGTHS_K), ((3, 2, 2, 2), (3, 4, 0, 3)), ((1, 0, 0, 20), (4, 4, 4, 4))):
        q, k, v = math.draw((sum(lengths_q), H, D), (sum(lengths_k), HK, D), (sum(lengths_k), HK, DV))
        close(step(q, k, v, math.starts(lengths_q), math.starts(lengths_k)), math.each(q, k, v, lengths_q, lengths_k, causal=True)[0])
        compiled = compiled or count.frame_count
    assert compiled and count.frame_count == compiled
    q, k, v = math.padded()
    whole = torch.compile(fa.flash_attn_func, fullgraph=True, backend="aot_eager")
    close(whole(q, k, v, causal=True), math.batch(q, k, v, causal=True)[0])
