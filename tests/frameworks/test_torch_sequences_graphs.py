"""torch.ops.fa_ext.varlen: torch's own checks, whole graphs of any lengths, checkpoints, autocast, transforms, second derivatives."""

import functools
import shutil
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch._options import ARRAYS, OTHERS, SEQUENCES  # noqa: E402
from tests.frameworks.support.sequence_calls import CALLS  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES, gradients, math_attention, scalar  # noqa: E402
from tests.frameworks.support.torch_sequences import by_sequences, index, make  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
#: Inductor compiles C++ for the CPU.
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]
#: Lengths of the queries and of the keys of sequences, and how many rows behind them are nobody's. The sizes of the first differ all:
#: torch takes sizes that are equal at first for one.
LENGTHS = (((3, 1, 4, 1), (5, 1, 4, 1), 0), ((5, 0, 2), (4, 6, 0), 3), ((1, 1, 1, 2, 9), (9, 2, 1, 1, 1), 1), ((0, 7), (2, 2), 0))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def attend(tensors, indices, options, **more):
    tensors = dict(tensors)
    return ft.attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, **indices, **options, return_lse=True, **more)


def operands(name, device):
    """The arguments of the operator for a call."""
    tensors, indices, options = make(name, device, torch.float32)
    left, right = (-1 if bound is None else bound for bound in options.get("window") or (None, None))
    causal = options.get("causal", False)
    indices["k_range_begin"], indices["k_range_end"] = indices.pop("k_range", (None, None))
    return (
        *(tensors[n] for n in "qkv"), left, 0 if causal else right, int(causal != "top_left"), options.get("scale"),
        options.get("softcap", 0.0), options.get("layout", "bhsd"), 0.0, None, False, True, None,
        *map((tensors | indices).get, ARRAYS),
    )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_the_forward(device, name):
    torch.library.opcheck(torch.ops.fa_ext.varlen.default, operands(name, device))


@pytest.mark.parametrize("name, wrt", [("all", 0b10111), ("packed queries", 0b00010), ("bias", 0b01001)])
def test_opcheck_of_the_backward(device, name, wrt):
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in operands(name, device))
    out, lse = torch.ops.fa_ext.varlen(q, k, v, *rest)
    tensors = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse
    torch.library.opcheck(torch.ops.fa_ext.varlen_backward.default, (*tensors, *rest[:7], *rest[8:11], wrt, *rest[11:]))


def test_the_operator_is_the_call(device):
    for name in CALLS:
        out, lse = attend(*make(name, device, torch.float32))
        got, got_lse = torch.ops.fa_ext.varlen(*operands(name, device))
        assert torch.equal(got, out) and torch.equal(got_lse, lse), name


def test_dense_operators_have_no_index_arrays(device):
    assert SEQUENCES and ARRAYS == (*OTHERS, *SEQUENCES) and "page_table" not in ARRAYS
    for name, arrays in (("attention", OTHERS), ("attention_backward", OTHERS), ("varlen", ARRAYS), ("varlen_backward", ARRAYS)):
        arguments = [x.name for x in getattr(torch.ops.fa_ext, name).default._schema.arguments]
        assert arguments[-len(arrays) :] == list(arrays) and not set(arguments[: -len(arrays)]) & set(ARRAYS)


def packed(device, of_q, of_k, spare, dtype=torch.float32):
    """(q, k, v, starts of q, starts of k)."""

    def starts(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)

    rows = sum(of_q) + spare, sum(of_k) + spare, sum(of_k) + spare
    q, k, v = (torch.randn(count, heads, 16, device=device, dtype=dtype, requires_grad=True) for count, heads in zip(rows, (4, 2, 2), strict=True))
    return q, k, v, starts(of_q), starts(of_k)


def step(q, k, v, starts_q, starts_k, **options):
    out, lse = ft.attention(
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, causal="bottom_right", window=(4, None), return_lse=True, **options
    )
    return out.square().sum() + torch.where(lse > -torch.inf, lse, 0).square().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_do_not_compile_again(device, backend):
    """One whole graph for any lengths and any number of rows."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for lengths in LENGTHS:
        given = packed(device, *lengths)
        loss, wanted = compiled(*given), step(*given)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(loss, given[:3]), torch.autograd.grad(wanted, given[:3]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    targets = [[str(node.target) for node in graph.graph.nodes if "fa_ext" in str(node.target)] for graph in counter.graphs]
    assert [names for names in targets if names] == [["fa_ext.varlen.default"]]


def test_rows_that_depend_on_data(device):
    """The number of rows may be known to the device alone."""

    def chosen(q, k, v, keep_q, keep_k, starts_q, starts_k):
        at_q, at_k = keep_q.nonzero()[:, 0], keep_k.nonzero()[:, 0]
        return step(q[at_q], k[at_k], v[at_k], starts_q, starts_k)

    q, k, v, starts_q, starts_k = packed(device, (4, 2), (3, 6), 0)
    keep_q, keep_k = torch.arange(6, device=device) != 1, torch.arange(9, device=device) > 1
    given = q, k, v, keep_q, keep_k, starts_q - (starts_q > 1).int(), index([0, 1, 7], device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        loss = torch.compile(chosen, fullgraph=True, backend="aot_eager")(*given)
    wanted = chosen(*given)
    torch.testing.assert_close(loss, wanted)
    for a, b in zip(torch.autograd.grad(loss, given[:3]), torch.autograd.grad(wanted, given[:3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gaps", "bshd", "single", "bias", "range", "positions", "all"])
def test_whole_graphs(device, name):
    tensors, indices, options = make(name, device, torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for given in (indices, {n: tuple(y.long() for y in x) if isinstance(x, tuple) else x.long() for n, x in indices.items()}):
        got, wanted = compiled(tensors, given, options), attend(tensors, indices, options)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        found, right = gradients(scalar(*got), tensors), gradients(scalar(*wanted), tensors)
        for n in right:
            torch.testing.assert_close(found[n], right[n], rtol=1e-4, atol=1e-5)


def test_compiled_dropout_has_one_mask(device):
    given = packed(device, *LENGTHS[0])
    call = torch.compile(functools.partial(step, dropout_p=0.4), fullgraph=True, backend="aot_eager")
    torch.manual_seed(7)
    loss = call(*given)
    torch.manual_seed(7)
    wanted = step(*given, dropout_p=0.4)
    torch.testing.assert_close(loss, wanted)
    for a, b in zip(torch.autograd.grad(loss, given[:3]), torch.autograd.grad(wanted, given[:3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpoint(device, reentrant, compiled, p):
    if reentrant and compiled:
        pytest.skip("torch.compile has no reentrant checkpoints")
    q, k, v, *starts = packed(device, *LENGTHS[1])

    def block(q, k, v):
        return step(q * 1.5, k, v, *starts, dropout_p=p)

    def kept(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=reentrant)

    torch.manual_seed(2)
    loss = (torch.compile(kept, fullgraph=True, backend="aot_eager") if compiled else kept)(q, k, v)
    loss.backward()
    torch.manual_seed(2)
    if compiled and p:  # the graph may draw after another draw of torch's
        return
    for a, b in zip((q, k, v), torch.autograd.grad(block(q, k, v), (q, k, v)), strict=True):
        torch.testing.assert_close(a.grad, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_passes_of_a_graph_have_one_mask(device, backend, kept):
    """A sum of outputs is linear in v: with one mask its gradient times v is the sum."""
    q, k, v, *starts = packed(device, *LENGTHS[1])

    def block(q, k, v):
        options = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": "bottom_right", "dropout_p": 0.4}
        return ft.attention(q * 1.5, k, v, **options).sum()

    def whole(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=False) if kept else block(q, k, v)

    loss = torch.compile(whole, fullgraph=True, backend=backend)(q, k, v)
    loss.backward()
    torch.testing.assert_close((v.grad.double() * v.double()).sum(), loss.double(), rtol=1e-4, atol=1e-4)


def test_selective_checkpoint_keeps_the_operator(device):
    calls = []

    def policy(context, op, *args, **keywords):
        if op == torch.ops.fa_ext.varlen.default:
            calls.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v, *starts = packed(device, *LENGTHS[1])
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(lambda q, k, v: step(q * 1.5, k, v, *starts), q, k, v, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(loss, (q, k, v))
    assert calls and not calls[0]
    for a, b in zip(got, torch.autograd.grad(step(q * 1.5, k, v, *starts), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(device, compiled):
    q, k, v, *starts = packed(device, *LENGTHS[1])
    where = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))

    def call(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            return ft.attention(q, k, v, **where)

    out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v)
    wanted = ft.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **where)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted)
    got, right = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (out, wanted))
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(got, right, strict=True))


def test_fake_and_meta_tensors(device):
    for name in CALLS:
        tensors, indices, options = make(name, device, torch.float32)
        wanted = attend(tensors, indices, options)
        shapes = [(x.shape, x.dtype, x.stride()) for x in wanted]
        meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in operands(name, device)]
        assert [(x.shape, x.dtype, x.stride()) for x in torch.ops.fa_ext.varlen(*meta)] == shapes, name
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(x) for n, x in tensors.items()}
            of_indices = {n: tuple(map(mode.from_tensor, x)) if isinstance(x, tuple) else mode.from_tensor(x) for n, x in indices.items()}
            got = attend(fakes, of_indices, options)
            assert [(x.shape, x.dtype, x.stride()) for x in got] == shapes, name
            scalar(*got).backward()
            assert all(fakes[n].grad.shape == x.shape for n, x in tensors.items() if x.requires_grad)


@pytest.mark.parametrize(
    "shapes, match",
    [
        (((9, 4, 8), (9, 3, 8), (9, 3, 8)), "heads of q"),
        (((9, 4, 8), (9, 4, 7), (9, 4, 8)), "one head_dim"),
        (((9, 4, 8), (9, 4, 8), (8, 4, 8)), "share all axes"),
        (((9, 4, 8), (9, 4, 8), (2, 9, 4, 8)), "share all axes"),
        (((4, 8), (9, 4, 8), (9, 4, 8)), "q has 2 axes; accepted: 3 or 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_anything_runs(device, shapes, match):
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=match):
        ft.attention(*(torch.empty(shape, device="meta") for shape in shapes), cu_seqlens_q=starts, cu_seqlens_k=starts)


# ---- transforms, and derivatives of derivatives ----


def test_vmap_is_a_call_an_element(device):
    q, k, v, *starts = packed(device, *LENGTHS[1])
    more = [torch.randn(3, *x.shape, device=device) for x in (q, k, v)]
    for dims in ((0, 0, 0), (None, 0, 0), (0, None, None)):
        given = [x if dim == 0 else x[0] for x, dim in zip(more, dims, strict=True)]
        mapped = torch.func.vmap(torch.func.grad(step, (0, 1, 2)), (*dims, None, None))
        got = mapped(*given, *starts)
        for a, b in zip(torch.compile(mapped, fullgraph=True, backend="aot_eager")(*given, *starts), got, strict=True):
            torch.testing.assert_close(a, b)
        for n in range(3):
            mine = [(x if dim is None else x[n]).clone().requires_grad_() for x, dim in zip(given, dims, strict=True)]
            for a, b in zip(got, torch.autograd.grad(step(*mine, *starts), mine), strict=True):
                torch.testing.assert_close(a[n], b)


def test_vmap_over_lengths(device):
    q, k, v, *_ = packed(device, (4, 4), (4, 4), 0)
    starts = index([[0, 4, 8], [0, 1, 8], [2, 3, 3]], device)
    got = torch.func.vmap(lambda s: ft.attention(q, k, v, cu_seqlens_q=s, cu_seqlens_k=s))(starts)
    for n in range(3):
        assert torch.equal(got[n], ft.attention(q, k, v, cu_seqlens_q=starts[n], cu_seqlens_k=starts[n]))


def test_forward_mode_says_that_it_is_not_there(device):
    q, k, v, *starts = packed(device, *LENGTHS[0])
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: step(q, k.detach(), v.detach(), *starts), (q.detach(),), (torch.ones_like(q),))


@pytest.mark.filterwarnings("ignore:.*differentiated twice")
@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(device, name):
    """Those of torch's operations for each sequence."""
    if device != "cpu":
        pytest.skip("float64 is the CPU's")
    tensors, indices, options = make(name)
    names = [n for n, x in tensors.items() if x.requires_grad]

    def second(out, lse):
        first = torch.autograd.grad(scalar(out, lse), [tensors[n] for n in names], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), [tensors[n] for n in names], allow_unused=True)

    got, wanted = second(*attend(tensors, indices, options)), second(*by_sequences(name, tensors, indices, options, math_attention))
    for n, a, b in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(torch.zeros_like(tensors[n]) if a is None else a, torch.zeros_like(tensors[n]) if b is None else b, rtol=1e-8, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*differentiated twice")
def test_second_derivatives_under_transforms(device):
    q, k, v, *starts = (x.detach() for x in packed(device, *LENGTHS[1]))

    def first(q, starts_q):
        return torch.func.grad(step)(q, k, v, starts_q, starts[1]).square().sum()

    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(step(leaf, k, v, *starts), leaf, create_graph=True)[0].square().sum()
    wanted = torch.autograd.grad(wanted, leaf)[0]
    torch.testing.assert_close(torch.func.grad(first)(q, starts[0]), wanted)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(first), (0, None))(q[None], starts[0])[0], wanted)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q is mapped by vmap, over which attention has no second derivative"):
        torch.func.vmap(torch.func.grad(first), (None, 0))(q, starts[0][None])


@pytest.mark.filterwarnings("ignore:.*differentiated twice")
def test_gradgradcheck_with_dropout(device):
    if device != "cpu":
        pytest.skip("float64 is the CPU's")
    q, k, v, *starts = packed(device, (2, 0, 3), (2, 1, 2), 1, torch.float64)

    def call(q, k, v):
        torch.manual_seed(4)
        return ft.attention(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], dropout_p=0.4)

    assert torch.autograd.gradgradcheck(call, tuple(x.detach()[..., :2].requires_grad_() for x in (q, k, v)), fast_mode=True)


def test_gradients_of_several_cotangents(device):
    tensors, indices, options = make("gaps", device, torch.float32)
    out, _ = attend(tensors, indices, options)
    cotangents, leaves = torch.randn(3, *out.shape, device=device), [tensors[n] for n in "qkv"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        for a, b in zip(got, torch.autograd.grad(out, leaves, cotangents[n], retain_graph=True), strict=True):
            torch.testing.assert_close(a[n], b, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_a_graph_are_refused(device):
    q, k, v, *starts = packed(device, *LENGTHS[0])
    loss = torch.compile(step, fullgraph=True, backend="eager")(q, k, v, *starts)
    with pytest.raises(RuntimeError, match="torch.ops.fa_ext.varlen_backward has no derivative"):
        torch.autograd.grad(torch.autograd.grad(loss, q, create_graph=True)[0].sum(), q)
