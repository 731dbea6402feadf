"""fa_ext.torch.attention over sequences: values and gradients, bits of each sequence alone, dropout, saved index arrays."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import fa_ext  # noqa: E402
import fa_ext.torch as ft  # noqa: E402
from tests.frameworks.support.sequence_calls import CALLS, DENSE  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES, gradients, math_attention, scalar  # noqa: E402
from tests.frameworks.support.torch_sequences import by_sequences, index, make  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def dtype_for(device):
    """The widest that its kernels take."""
    return torch.float64 if device == "cpu" else torch.float32


def attend(tensors, indices, options, **more):
    tensors = dict(tensors)
    return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **indices, **options, return_lse=True, **more)


def dense(tensors, options):
    return attend(tensors, {}, options)


def agree(got, wanted, dtype):
    assert got.keys() == wanted.keys()
    for name in got:
        bound = CLOSE[dtype] * max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(got[name].double(), wanted[name].double(), rtol=0, atol=bound, msg=lambda m: f"d{name}: {m}")  # noqa: B023


def wide(tensors):
    """The tensors in float64, where they have a gradient."""
    return {n: x.detach().double().requires_grad_() if x.requires_grad else x for n, x in tensors.items()}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(device, name):
    dtype = dtype_for(device)
    tensors, indices, options = make(name, device, dtype)
    out, lse = attend(tensors, indices, options)
    exact = wide(tensors)
    wanted, wanted_lse = by_sequences(name, exact, indices, options, math_attention)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=CLOSE[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=CLOSE[dtype])
    assert out.is_contiguous() and out.dtype == lse.dtype == dtype
    agree(gradients(scalar(out, lse), tensors), gradients(scalar(wanted, wanted_lse), exact), dtype)


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(device, name):
    if device != "cpu":
        pytest.skip("float64 is the CPU's")
    tensors, indices, options = make(name, d=2, dv=1)
    names = [n for n, x in tensors.items() if x.requires_grad]

    def call(*values):
        out, lse = attend(tensors | dict(zip(names, values, strict=True)), indices, options)
        return out, torch.where(torch.isfinite(lse), lse, 0)

    assert torch.autograd.gradcheck(call, [tensors[n] for n in names], eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE)
def test_the_bits_are_those_of_each_sequence_alone(device, name, dtype, monkeypatch):
    tensors, indices, options = make(name, device, dtype, d=16, dv=16)
    out, lse = attend(tensors, indices, options)
    forward, backward = kernels(tensors, indices, options, out, lse)
    monkeypatch.setenv("FA_EXT_KERNEL_BACKWARD", backward)
    wanted, wanted_lse = by_sequences(name, tensors, indices, options | {"kernel": forward}, dense)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    got, right = gradients(scalar(out, lse), tensors), gradients(scalar(wanted, wanted_lse), tensors)
    for n in "qkv":
        assert torch.equal(got[n], right[n]), n


def kernels(tensors, indices, options, out, lse):
    """The names of the kernels that take a call."""
    given = {n: x.detach() for n, x in tensors.items()}
    q, k, v = (given.pop(n) for n in "qkv")
    more = given | indices | options
    return fa_ext.explain(q, k, v, **more)[0], fa_ext.explain_backward(out.detach(), q, k, v, out.detach(), lse.detach(), **more)[0]


@pytest.mark.parametrize("name", ["gaps", "padded", "packed queries"])
def test_rows_of_no_sequence_get_zeros_whatever_they_hold(device, name):
    tensors, indices, options = make(name, device, dtype_for(device))
    out, lse = attend(tensors, indices, options)
    free = {n: _free(name, n != "q", tensors[n])[..., None] for n in "qkv"}
    spoiled = tensors | {n: tensors[n].detach().masked_fill(free[n], torch.nan).requires_grad_() for n in free}
    again, again_lse = attend(spoiled, indices, options)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device).reshape(out.shape)
    wanted = torch.autograd.grad(out, [tensors[n] for n in free], cotangent)
    got = torch.autograd.grad(again, [spoiled[n] for n in free], cotangent.masked_fill(free["q"], torch.nan))
    for n, a, b in zip(free, got, wanted, strict=True):
        assert torch.equal(a, b) and free[n].any() and not a.masked_select(free[n]).any() and a.any(), n


def _free(name, side, x):
    """Boolean, of all axes of x but the last: the rows of no sequence."""
    free = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    for b, (begin, end) in enumerate(CALLS[name][side]):
        if x.dim() == 3:
            free[begin:end] = False
        elif CALLS[name][4].get("layout") == "bshd":
            free[b, begin:end] = False
        else:
            free[b, :, begin:end] = False
    return free


def test_every_subset_of_what_requires_grad(device):
    tensors, indices, options = make("packed queries", device, torch.float32)
    whole = gradients(scalar(*attend(tensors, indices, options)), tensors)
    for count in range(len(tensors) + 1):
        for subset in itertools.combinations(tensors, count):
            some = {n: x.detach().requires_grad_(n in subset) for n, x in tensors.items()}
            out, lse = attend(some, indices, options)
            assert out.requires_grad == lse.requires_grad == bool(subset)
            got = gradients(scalar(out, lse), some) if subset else {}
            assert set(got) == set(subset) and all(torch.equal(got[n], whole[n]) for n in got)


def test_through_the_lse_alone(device):
    tensors, indices, options = make("packed queries", device, dtype_for(device))
    exact = wide(tensors)
    got = torch.autograd.grad(attend(tensors, indices, options)[1].square().sum(), [tensors[n] for n in ("q", "k", "sinks")])
    right = by_sequences("packed queries", exact, indices, options, math_attention)[1].square().sum()
    for a, b in zip(got, torch.autograd.grad(right, [exact[n] for n in ("q", "k", "sinks")]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_packed_is_padded(device):
    """The same bits, also of what is dropped."""
    lengths, room = (3, 0, 5, 1), 6
    padded = [torch.randn(4, room, heads, 16, device=device, requires_grad=True) for heads in (4, 2, 2)]
    rows = torch.cat([b * room + torch.arange(n) for b, n in enumerate(lengths)]).to(device)
    packed = [x.detach().flatten(0, 1)[rows].requires_grad_() for x in padded]
    starts = index([0, 3, 3, 8, 9], device)
    cotangent = torch.randn(9, 4, 16, device=device)
    spread = torch.zeros(4 * room, 4, 16, device=device).index_copy(0, rows, cotangent).unflatten(0, (4, room))
    for p in (0.0, 0.4):
        torch.manual_seed(5)
        ours = ft.attention(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right", dropout_p=p)
        torch.manual_seed(5)
        used = index(lengths, device)
        theirs = ft.attention(*padded, seqlens_q=used, seqlens_k=used, causal="bottom_right", dropout_p=p, layout="bshd")
        assert torch.equal(ours, theirs.flatten(0, 1)[rows])
        for a, b in zip(torch.autograd.grad(ours, packed, cotangent), torch.autograd.grad(theirs, padded, spread), strict=True):
            assert torch.equal(a, b.flatten(0, 1)[rows])


def test_what_is_dropped_is_a_mask(device):
    """The mask of the seed that torch's generator gives, of each sequence, in both passes."""
    tensors, indices, options = make("cross", device, torch.float32)
    p, exact = 0.5, wide(tensors)
    torch.manual_seed(3)
    state = ft._ops.drawn(torch.device(device))
    torch.manual_seed(3)
    out, lse = attend(tensors, indices, options, dropout_p=p)
    keep = torch.from_numpy(fa_ext.dropout_keep(4, 4, 5, 5, (p, state.cpu().numpy()))).to(device)
    count = iter(range(4))

    def dropping(mine, own):
        queries, keys = mine["q"].shape[2], mine["k"].shape[2]
        b = next(n for n in count if CALLS["cross"][0][n][0] < CALLS["cross"][0][n][1])
        scores = mine["q"] @ mine["k"].repeat_interleave(2, 1).transpose(2, 3) / mine["q"].shape[3] ** 0.5
        weights = torch.softmax(scores, -1) * keep[b, :, :queries, :keys] / (1 - p)
        return weights @ mine["v"].repeat_interleave(2, 1), torch.logsumexp(scores, -1)

    wanted, wanted_lse = by_sequences("cross", exact, indices, options, dropping)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-5)
    agree(gradients(scalar(out, lse), tensors), gradients(scalar(wanted, wanted_lse), exact), torch.float32)


@pytest.mark.parametrize("name", ["packed", "padded", "gaps", "range", "positions"])
def test_int64_indices(device, name):
    tensors, indices, options = make(name, device, torch.float32)
    long = {n: tuple(y.long() for y in x) if isinstance(x, tuple) else x.long() for n, x in indices.items()}
    out, lse = attend(tensors, indices, options)
    got, got_lse = attend(tensors, long, options)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    wanted, found = gradients(scalar(out, lse), tensors), gradients(scalar(got, got_lse), tensors)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_one_tensor_of_int64_for_queries_and_keys(device):
    q, starts = torch.randn(7, 2, 8, device=device, requires_grad=True), index([0, 3, 7], device)
    out, got = (ft.attention(q, q, q, causal="bottom_right", cu_seqlens_q=x, cu_seqlens_k=x) for x in (starts, starts.long()))
    assert torch.equal(got, out)
    assert torch.equal(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (got, out)))


@pytest.mark.parametrize("name, changed", [("packed", "cu_seqlens_q"), ("padded", "seqlens_k"), ("range", "k_range"), ("positions", "positions")])
def test_indices_that_change_between_the_passes_are_refused(device, name, changed):
    tensors, indices, options = make(name, device, torch.float32)
    out, _ = attend(tensors, indices, options)
    (indices[changed][0] if changed == "k_range" else indices[changed]).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bad_contents_are_refused_by_name_before_anything_runs(device):
    q = torch.randn(5, 2, 8, device=device, requires_grad=True)
    starts = index([0, 3, 7], device)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        ft.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, check=True)
    out = ft.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, check=False)
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()
    fa_ext.faults(None if device == "cpu" else 0)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q has type list; accepted: torch.Tensor of int32 or int64"),
        ({"cu_seqlens_q": torch.tensor([0.0, 2.0, 5.0])}, TypeError, "cu_seqlens_q has dtype float32; accepted: int32"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, ValueError, "cu_seqlens_k has 2 sequences, but cu_seqlens_q has 1"),
        ({"cu_seqlens_q": None}, ValueError, "there is no cu_seqlens_q"),
        ({"cu_seqlens_k": None}, ValueError, "there is no cu_seqlens_k"),
        ({"k_range": torch.tensor([0, 1])}, TypeError, "k_range has type Tensor; accepted: None or a pair"),
        ({"k_range": (None,)}, ValueError, "k_range has 1 items; accepted: None or a pair"),
        ({"k_range": ([0, 0], None)}, TypeError, "k_range's begin has type list"),
        ({"causal": True}, ValueError, "causal=True"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5"),
        ({"dropout_p": "a"}, TypeError, "dropout_p has type str"),
    ],
)
@pytest.mark.parametrize("through_op", [False, True])
def test_errors(device, through_op, change, error, match):
    q = torch.randn(5, 2, 8, device=device, requires_grad=True)
    if through_op:
        q = q.as_subclass(type("Own", (torch.Tensor,), {}))
    given = {"cu_seqlens_q": index([0, 2, 5], device), "cu_seqlens_k": index([0, 2, 5], device)} | change
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    with pytest.raises(error, match=match):
        ft.attention(q, q, q, **given)


def test_no_range_is_a_dense_call(device):
    q = torch.randn(1, 2, 5, 8, device=device)
    wanted = ft.attention(q, q, q, causal=True)
    for x in (q, q.as_subclass(type("Own", (torch.Tensor,), {}))):
        assert torch.equal(ft.attention(x, q, q, causal=True, k_range=(None, None)).as_subclass(torch.Tensor), wanted)


@pytest.mark.parametrize("of", ["pages", "out"])
def test_pages_and_out_have_no_gradient(device, of):
    q = torch.randn(2, 4, 8, device=device, requires_grad=True)
    cache = torch.randn(3, 2, 2, 8, device=device)
    where = {"seqlens_k": index([2, 1], device), "layout": "bshd"}
    if of == "pages":
        where["page_table"] = index([[2], [0]], device)
    else:
        where["out"], cache = torch.empty(2, 4, 8, device=device), cache[:2]
    with pytest.raises(ValueError, match=r"q requires grad, but attention with page_table, out= or max_seqlen_q has no derivative; call it under torch.no_grad"):
        ft.attention(q, cache, cache, **where)
    with pytest.raises(ValueError, match=r"dropout_p is 0.5; accepted with page_table, out or max_seqlen_q: 0.0"):
        ft.attention(q.detach(), cache, cache, **where, dropout_p=0.5)
    with torch.no_grad():
        ft.attention(q, cache, cache, **where)


@pytest.mark.parametrize("name", ["packed", "padded", "bias", "bshd"])
def test_axes_in_any_order(device, name):
    """Tensors whose memory is in another order than their axes have the same results, and gradients in their order."""
    tensors, indices, options = make(name, device, torch.float32)
    out, lse = attend(tensors, indices, options)
    wanted = gradients(scalar(out, lse), tensors)
    turned = {n: x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() if n in "qkv" else x for n, x in tensors.items()}
    got, got_lse = attend(turned, indices, options)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    found = gradients(scalar(got, got_lse), turned)
    for n in "qkv":
        assert torch.equal(found[n], wanted[n]) and found[n].stride() == turned[n].stride(), n


def test_heads_of_one_tensor(device):
    """q, k and v as views of one product, as models of packed documents have them."""
    product = torch.randn(9, 8, 16, device=device, requires_grad=True)
    starts = index([0, 3, 9], device)

    def step(q, k, v):
        return ft.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right").square().sum()

    got = torch.autograd.grad(step(*product.split((4, 2, 2), 1)), product)[0]
    apart = [x.detach().contiguous().requires_grad_() for x in product.split((4, 2, 2), 1)]
    assert torch.equal(got, torch.cat(torch.autograd.grad(step(*apart), apart), 1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode):
    tensors, indices, options = make("all", device, torch.float32)
    out, lse = attend(tensors, indices, options)
    with mode():
        got, got_lse = attend(tensors, indices, options)
    assert torch.equal(got, out) and torch.equal(got_lse, lse) and not got.requires_grad


def test_deterministic_follows_torch(device, monkeypatch):
    asked = []

    def spy(*args, **keywords):
        asked.append(keywords["deterministic"])
        return fa_ext.attention_backward(*args, **keywords)

    monkeypatch.setattr(fa_ext._core, "attention_backward", spy)
    tensors, indices, options = make("packed", device, torch.float32)
    for given, torchs in ((None, False), (None, True), (True, False), (False, True)):
        torch.use_deterministic_algorithms(torchs)
        try:
            out, lse = attend(tensors, indices, options, deterministic=given)
        finally:
            torch.use_deterministic_algorithms(False)
        scalar(out, lse).backward()
    assert asked == [False, True, True, False]


@pytest.mark.parametrize("compiled", [False, True])
def test_segments_are_a_mask_of_ids(device, compiled):
    """Values, gradients and, eagerly, second derivatives: those of a mask of all pairs."""
    torch.manual_seed(0)
    dtype = dtype_for(device)
    q, k, v = (torch.randn(2, heads, rows, 8, dtype=dtype, device=device, requires_grad=True) for heads, rows in ((4, 7), (2, 9), (2, 9)))
    q_ids, k_ids = (torch.randint(0, 3, (2, rows), device=device) for rows in (7, 9))
    mask = (q_ids[:, :, None] == k_ids[:, None, :])[:, None]
    call = torch.compile(ft.attention, fullgraph=True, backend="aot_eager") if compiled else ft.attention
    found = []
    for given in ({"segments": (q_ids, k_ids)}, {"mask": mask}):
        out, lse = call(q, k, v, causal="bottom_right", return_lse=True, **given)
        first = torch.autograd.grad(scalar(out, lse), (q, k, v), create_graph=not compiled)
        again = () if compiled else torch.autograd.grad(sum((x**2).sum() for x in first), (q, k, v))
        found.append((out, torch.where(torch.isfinite(lse), lse, 0), *first, *again))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE[dtype] * max(1.0, float(wanted.detach().abs().max())))


@pytest.mark.parametrize(
    ("segments", "error", "match"),
    [
        (torch.zeros(2, 3), TypeError, "segments has type Tensor; accepted: None or a pair of tensors"),
        ((torch.zeros(2, 3),), ValueError, "segments has 1 items"),
        ((torch.zeros(2, 3, dtype=torch.int32), None), TypeError, "segments has an item of None"),
        (([0], [1]), TypeError, "segments' q_ids has type list"),
    ],
)  # fmt: skip
def test_bad_segments(device, segments, error, match):
    q = torch.randn(2, 1, 3, 8, device=device)
    with pytest.raises(error, match=match):
        ft.attention(q, q, q, segments=segments)
