"""fa_ext.torch's serving calls: the core's results, torch's own checks of their operators, and a decoder compiled whole."""

import pytest

torch = pytest.importorskip("torch")

import functools  # noqa: E402
import shutil  # noqa: E402

import numpy as np  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import fa_ext  # noqa: E402
import fa_ext.torch as ft  # noqa: E402
from bench.problems.case import Case  # noqa: E402
from bench.problems.serving_cases import random_cases  # noqa: E402


def devices():
    """Where kernels take paged keys."""
    if torch.cuda.is_available() and fa_ext._core.build_info()["cuda"]:
        tiny = Case.sequences((1,), (2,), 1, 1, 16, dtype="float16").host_inputs()
        try:
            fa_ext.explain(**{name: place(x, "cuda") for name, x in tiny.items()})
        except fa_ext.UnsupportedError:
            return ["cpu"]
        return ["cpu", "cuda"]
    return ["cpu"]


def place(x, device):
    if isinstance(x, tuple):
        return tuple(place(y, device) for y in x)
    return torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x


pytestmark = pytest.mark.parametrize("device", devices())
#: Inductor compiles C++ for the CPU.
BACKENDS = ["eager", "aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def same(x, y):
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def calls(device, count=12):
    dtypes = ("float32", "float16") if device == "cuda" else ("float32", "float64", "float16")
    for n, case in enumerate(c for c in random_cases(60, seed=8) if c.n_q and c.dtype in dtypes):
        if n == count:
            return
        yield {name: place(x, device) for name, x in case.host_inputs().items()}


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
def test_attention_is_the_cores(device, backend):
    """Eager, and compiled: with new results, with out, and with out and lse."""
    call = ft.attention if backend == "none" else torch.compile(ft.attention, fullgraph=True, backend=backend, dynamic=True)
    for arguments in calls(device, 12 if backend == "none" else 3):
        torch._dynamo.reset()  # each is another graph: storage kinds, options and dtypes differ
        wanted, wanted_lse = fa_ext.attention(**arguments, return_lse=True)
        assert same(call(**arguments), wanted)
        for got, right in zip(call(**arguments, return_lse=True), (wanted, wanted_lse)):
            assert same(got, right)
        out, lse = torch.full_like(wanted, torch.nan), torch.full_like(wanted_lse, torch.nan)
        assert call(**arguments, out=out) is out and same(out, wanted)
        out.fill_(torch.nan)
        call(**arguments, out=(out, lse))
        assert same(out, wanted) and same(lse, wanted_lse)


def test_dense_attention_into_out(device):
    q, k, v = (torch.randn(2, heads, 5, 16, device=device) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 5, 5, device=device) < 0.8
    options = {"causal": True, "window": (3, None), "mask": mask, "softcap": 3.0, "scale": 0.4}
    wanted = fa_ext.attention(q, k, v, **options)
    for call in (ft.attention, torch.compile(ft.attention, fullgraph=True, backend="aot_eager")):
        out = torch.full_like(wanted, torch.nan)
        call(q, k, v, out=out, **options)
        assert same(out, wanted)


def promised(device):
    case = Case.sequences((1, 3, 0, 7), (5, 33, 4, 9), slack=0)
    return {name: place(x, device) for name, x in case.host_inputs().items()}


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_a_promise_of_the_longest_sequence(device, backend):
    """It changes no bit while it is kept; a graph depends on its size no more than on that of any int."""
    counter = CompileCounterWithBackend("eager" if backend == "none" else backend)
    call = ft.attention if backend == "none" else torch.compile(ft.attention, fullgraph=True, backend=counter)
    arguments = promised(device)
    wanted, wanted_lse = fa_ext.attention(**arguments, return_lse=True)
    for most in (7, 8, 9, 200, 5000):
        got, lse = call(**arguments, max_seqlen_q=most, return_lse=True)
        assert same(got, wanted) and same(lse, wanted_lse)
    assert counter.frame_count == (0 if backend == "none" else 2)  # with the first number, and with any
    cut, cut_lse = call(**arguments, max_seqlen_q=2, check=False, return_lse=True)
    assert same(cut[:3], wanted[:3]) and not cut[3].any() and not cut[6:].any() and (cut_lse[:, 6:] == -torch.inf).all()
    fa_ext.faults(0 if device == "cuda" else None)
    for most in (10**30, *([np.int64(8)] if backend == "none" else [])):  # NumPy's are tensors to the compiler
        assert same(call(**arguments, max_seqlen_q=most), wanted)
    with pytest.raises(Exception, match="max_seqlen_q is -1; accepted: an int >= 0"):
        call(**arguments, max_seqlen_q=-1)
    for most in (True, 2.5):
        with pytest.raises(Exception, match=f"max_seqlen_q has type {type(most).__name__}; accepted: an int >= 0, or None"):
            call(**arguments, max_seqlen_q=most)


def test_a_promise_goes_with_packed_queries_and_without_gradients(device):
    arguments = promised(device) | {"max_seqlen_q": 9}
    with pytest.raises(ValueError, match="dropout_p is 0.5; accepted with page_table, out or max_seqlen_q: 0.0"):
        ft.attention(**arguments, dropout_p=0.5)
    with pytest.raises(ValueError, match="q requires grad, but attention with .* max_seqlen_q has no derivative"):
        ft.attention(**arguments | {"q": arguments["q"].clone().requires_grad_()})
    x = arguments["q"][None]
    for q in (x, arguments["q"]):
        with pytest.raises(ValueError, match="max_seqlen_q is 9, but q has shape .* and there is no cu_seqlens_q"):
            ft.attention(q, x, x, max_seqlen_q=9)


def cache_call(device, *, slots=False, rotary=True, seed=0):
    rng = np.random.default_rng(seed)
    caches = [torch.full((6, 4, 2, 16), 7.0, device=device) for _ in "kv"]
    q, k, v = (place(rng.standard_normal((5, heads, 16), np.float32), device) for heads in (4, 2, 2))
    angle = np.arange(64)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    options = {"layout": "bshd"}
    if rotary:
        options |= {"q": q, "rotary": place((np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)), device)}
    if slots:
        options |= {"slots": place(np.array([3, -1, 9, 0, 23]), device)}
        if rotary:
            options |= {"positions": place(np.array([3, 9, 9, 0, 2], np.int32), device)}
    else:
        options |= {"cu_seqlens_q": place(np.array([0, 1, 5], np.int32), device), "seqlens_k": place(np.array([9, 4], np.int32), device),
                    "page_table": place(np.array([[5, 0, 2], [1, -1, -1]], np.int32), device)}  # fmt: skip
    return (*caches, k, v), options


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("backend", ["none", *BACKENDS])
def test_append_is_the_cores(device, backend, rotary, slots):
    call = ft.append if backend == "none" else torch.compile(ft.append, fullgraph=True, backend=backend)
    theirs, options = cache_call(device, slots=slots, rotary=rotary)
    ours, _ = cache_call(device, slots=slots, rotary=rotary)
    wanted, got = fa_ext.append(*theirs, **options), call(*ours, **options)
    assert all(same(x, y) for x, y in zip(ours, theirs)) and not (ours[0] == 7).all()
    assert got is None if wanted is None else same(got, wanted)
    if rotary:
        again, _ = cache_call(device, slots=slots)
        out = torch.full_like(wanted, torch.nan)
        assert call(*again, **options, out=out) is out and same(out, wanted)


def test_append_of_keys_alone_and_over_q_itself(device):
    call = torch.compile(ft.append, fullgraph=True, backend="aot_eager")
    (k_cache, _, k, _), options = cache_call(device)
    theirs = k_cache.clone()
    wanted = fa_ext.append(theirs, None, k, None, **options)
    call(k_cache, None, k, None, **options | {"out": options["q"]})
    assert same(k_cache, theirs) and same(options["q"], wanted)


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
def test_merge_is_the_cores(device, backend):
    call = ft.merge if backend == "none" else torch.compile(ft.merge, fullgraph=True, backend=backend, dynamic=True)
    for shape in ((2, 4, 5, 16), (7, 4, 16)):
        rows = shape[:3] if len(shape) == 4 else shape[1::-1]
        outs, lses = ([torch.randn(kind, device=device) for _ in range(3)] for kind in (shape, rows))
        sinks = torch.randn(4, device=device)
        for got, wanted in zip(call(outs, lses, sinks=sinks), fa_ext.merge(outs, lses, sinks=sinks)):
            assert same(got, wanted)


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
def test_documents_is_the_cores(device, backend):
    call = ft.documents if backend == "none" else torch.compile(ft.documents, fullgraph=True, backend=backend, dynamic=True)
    for shape, dtype in (((2, 9), torch.int64), ((17,), torch.int32), ((3, 30), torch.int32)):
        ids = torch.randint(-2, 2, shape, dtype=dtype, device=device)
        for count in (None, 95):
            assert same(call(ids, count=count), fa_ext.documents(ids, count=count))
    assert call(torch.zeros((2, 0), dtype=torch.int32, device=device)).tolist() == [0]
    with pytest.raises(TypeError, match="ids has dtype float32; accepted: int32, int64"):
        call(torch.zeros(3, device=device))


@pytest.mark.parametrize("backend", ["none", *BACKENDS])
def test_document_intervals_is_the_cores(device, backend):
    call = ft.document_intervals if backend == "none" else torch.compile(ft.document_intervals, fullgraph=True, backend=backend, dynamic=True)
    for shape, dtype in (((2, 9), torch.int64), ((3, 30), torch.int32)):
        ids, spans = (torch.randint(-1, 2, shape, dtype=dtype, device=device) for _ in range(2))
        for given in ({"ids": ids}, {"spans": spans, "window": 4}, {"ids": ids, "spans": spans}, {"ids": ids, "causal": False}):
            assert same(call(**given), fa_ext.document_intervals(**given))
        torch._dynamo.reset()  # of all that it has compiled for these
    with pytest.raises(TypeError, match="ids has dtype float32; accepted: int32, int64"):
        call(torch.zeros(2, 3, device=device))
    q = torch.randn(2, 4, 9, 8, device=device)
    intervals = ft.document_intervals(torch.arange(18, device=device).reshape(2, 9) // 4)
    assert same(ft.attention(q, q, q, intervals=intervals), fa_ext.attention(q, q, q, intervals=intervals))


# ---- the operators ----


def test_opchecks(device):
    (k_cache, v_cache, k, v), options = cache_call(device)
    rotary, q = options["rotary"], options["q"]
    table, lengths, starts = (options[n] for n in ("page_table", "seqlens_k", "cu_seqlens_q"))
    arguments = (k_cache, v_cache, k, v, q, torch.empty_like(q), *rotary, table, lengths, starts, None, None, None, "bshd", False, None, None)
    torch.library.opcheck(torch.ops.fa_ext.append.default, arguments)
    torch.library.opcheck(torch.ops.fa_ext.append.default, (k_cache, None, k, None, None, None, None, None, *arguments[8:]))
    for lse in (None, torch.empty(4, 5, device=device)):
        torch.library.opcheck(torch.ops.fa_ext.attention_out.default, (
            q, k_cache, v_cache, torch.empty_like(q), lse, "bottom_right", 3, None, None, 0.0, "bshd", None, None, False, None,
            starts, None, None, lengths, table,
        ))  # fmt: skip
    outs, lses = [torch.randn(2, 4, 5, 16, device=device)] * 2, [torch.randn(2, 4, 5, device=device)] * 2
    torch.library.opcheck(torch.ops.fa_ext.merge.default, (outs, lses, None, "bhsd", None))
    torch.library.opcheck(torch.ops.fa_ext.documents.default, (torch.arange(12, device=device) // 5, 12, None, None))
    ids = torch.arange(12, device=device).reshape(2, 6) // 4
    for given in ((ids, None, True, None), (None, ids, True, 3), (ids, ids, True, None)):
        torch.library.opcheck(torch.ops.fa_ext.document_intervals.default, given)


def test_mutation_is_declared(device):
    def written(name):
        schema = getattr(torch.ops.fa_ext, name).default._schema
        return [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]

    assert written("append") == ["k_cache", "v_cache", "out"]
    assert written("attention_out") == ["out", "lse"]
    assert written("merge") == []


@pytest.mark.parametrize("backend", ["none", "eager"])
def test_autograd_hears_of_what_is_written(device, backend):
    """A tensor that was kept for a backward pass and written in place since is refused."""
    compiled = (lambda call: call) if backend == "none" else functools.partial(torch.compile, fullgraph=True, backend=backend)
    (k_cache, v_cache, k, v), options = cache_call(device)
    out, lse = torch.empty_like(options["q"]), torch.empty(4, 5, device=device)
    weight = torch.ones(1, device=device, requires_grad=True)
    kept = [(x, (weight * x).sum()) for x in (k_cache, v_cache, out, lse)]
    written = {n: x for n, x in options.items() if n in ("page_table", "seqlens_k", "cu_seqlens_q", "layout")}
    compiled(ft.append)(k_cache, v_cache, k, v, **options)
    compiled(ft.attention)(options["q"], k_cache, v_cache, out=(out, lse), causal="bottom_right", **written)
    for x, loss in kept:
        assert x._version > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_fake_tensors_show_shapes(device):
    with FakeTensorMode():
        q, cache = torch.empty(9, 4, 16), torch.empty(6, 4, 2, 24)
        table, lengths, starts = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        out, lse = ft.attention(
            q, cache[..., :16], cache, page_table=table, seqlens_k=lengths, cu_seqlens_q=starts, layout="bshd", return_lse=True
        )
        assert out.shape == (9, 4, 24) and lse.shape == (4, 9) and lse.dtype == torch.float32
        out, lse = ft.merge([out.half()] * 2, [lse] * 2)
        assert out.shape == (9, 4, 24) and out.dtype == torch.float16 and lse.shape == (4, 9)
        rotated = ft.append(cache, cache, cache[0], cache[0], layout="bshd", slots=lengths, q=cache[0], rotary=(q, q), positions=lengths)
        assert rotated.shape == (4, 2, 24)


# ---- what is refused ----


def test_no_gradients(device):
    (k_cache, v_cache, k, v), options = cache_call(device)
    q = options["q"].requires_grad_()
    lengths = {n: x for n, x in options.items() if n in ("page_table", "seqlens_k", "cu_seqlens_q", "layout")}
    with pytest.raises(ValueError, match=r"q requires grad, but attention with page_table, out= or max_seqlen_q .* torch.no_grad"):
        ft.attention(q, k_cache, v_cache, **lengths)
    with pytest.raises(ValueError, match="q requires grad, but append has no derivative"):
        ft.append(k_cache, v_cache, k, v, **options)
    with pytest.raises(ValueError, match=r"lses\[1\] requires grad, but merge"):
        ft.merge([q.detach()] * 2, [torch.zeros(4, 5, device=device), torch.zeros(4, 5, device=device, requires_grad=True)])
    with torch.no_grad():
        ft.append(k_cache, v_cache, k, v, **options)
        ft.attention(q, k_cache, v_cache, **lengths)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_gradients_of_what_is_written_or_rotates(device, compiled):
    q, out = torch.randn(1, 2, 5, 8, device=device), torch.empty(1, 2, 5, 8, device=device)
    lse = torch.empty(1, 2, 5, device=device)
    weight = torch.ones((), device=device, requires_grad=True)

    def into(weight):
        return ft.attention(q, q, q, out=out * weight)

    def into_pair(weight):
        return ft.attention(q, q, q, out=(out, lse * weight))

    def rotate(weight):
        cache, cos = torch.zeros(2, 20, 2, 8, device=device), torch.ones(64, 4, device=device)
        lengths = torch.tensor([4, 5], dtype=torch.int32, device=device)
        new = torch.ones(2, 3, 2, 8, device=device)
        return ft.append(cache, cache.clone(), new, new, layout="bshd", q=new, rotary=(cos, cos * weight), seqlens_k=lengths)

    for call, name in ((into, "out"), (into_pair, r"out\[1\]"), (rotate, r"rotary\[1\]")):
        function = torch.compile(call, backend="eager") if compiled else call
        with pytest.raises(ValueError, match=rf"{name} requires grad"):
            function(weight)


def test_transforms_are_refused(device):
    q, lse = torch.randn(1, 2, 5, 8, device=device), torch.zeros(1, 2, 5, device=device)

    def into(q):
        return ft.attention(q, q, q, out=torch.empty_like(q))

    with pytest.raises(NotImplementedError, match=r"q is a transform's .*accepted: plain tensors"):
        torch.func.vmap(into)(q[None])
    with pytest.raises(NotImplementedError, match=r"outs\[0\] is a transform's"):
        torch.func.vmap(lambda q: ft.merge([q, q], [lse, lse]))(q[None])
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="q is a transform's"):
            into(torch.autograd.forward_ad.make_dual(q, q))
        into(q)


def test_plain_tensors_inside_transforms(device):
    """A call that a transform has nothing to do with is computed inside it."""
    (k_cache, v_cache, k, v), options = cache_call(device)
    lengths = {n: x for n, x in options.items() if n in ("page_table", "seqlens_k", "cu_seqlens_q", "layout")}
    out, lse = torch.randn(1, 2, 5, 8, device=device), torch.zeros(1, 2, 5, device=device)
    into = torch.empty_like(out)
    for call in (
        lambda: ft.attention(options["q"], k_cache, v_cache, **lengths),
        lambda: ft.attention(out, out, out, out=into),
        lambda: ft.append(k_cache, v_cache, k, v, **options),
        lambda: ft.merge([out, out], [lse, lse])[0],
    ):
        wanted = call().sum().expand(3)
        x = torch.ones(3, device=device)
        torch.testing.assert_close(torch.func.vmap(lambda x: x * call().sum())(x), wanted)  # noqa: B023, called at once
        torch.testing.assert_close(torch.func.grad(lambda x: (x * call().sum()).sum())(x), wanted)  # noqa: B023


def test_the_cores_errors(device):
    (k_cache, v_cache, _, _), options = cache_call(device)
    q, lengths = options["q"], options["seqlens_k"]
    with pytest.raises(ValueError, match="page_table needs layout"):
        ft.attention(q, k_cache, v_cache, page_table=options["page_table"], seqlens_k=lengths, cu_seqlens_q=options["cu_seqlens_q"])
    with pytest.raises(ValueError, match="q has shape .* there is no cu_seqlens_q"):
        ft.attention(q, k_cache, v_cache, page_table=options["page_table"], seqlens_k=lengths, layout="bshd")
    with pytest.raises(ValueError, match=r"dropout_p is 0.5; accepted with page_table, out or max_seqlen_q: 0.0"):
        ft.attention(q, k_cache, v_cache, page_table=options["page_table"], seqlens_k=lengths, layout="bshd", dropout_p=0.5)
    with pytest.raises(ValueError, match="causal=True"):
        ft.attention(q, k_cache, v_cache, page_table=options["page_table"], seqlens_k=lengths, layout="bshd", causal=True,
                     cu_seqlens_q=options["cu_seqlens_q"])  # fmt: skip


def test_autocast_leaves_a_cache_alone(device):
    (k_cache, v_cache, _, _), options = cache_call(device)
    lengths = {n: x for n, x in options.items() if n in ("page_table", "seqlens_k", "cu_seqlens_q", "layout")}
    wanted = fa_ext.attention(options["q"], k_cache, v_cache, **lengths)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert same(ft.attention(options["q"], k_cache, v_cache, **lengths), wanted)


# ---- a decoder ----

HEADS, HEADS_KV, DIM, LAYERS, VOCABULARY, PAGE, PAGES = 4, 2, 16, 2, 37, 4, 24


class Decoder(torch.nn.Module):
    """A decoder over paged caches; a step takes packed tokens of several sequences."""

    def __init__(self, device):
        super().__init__()
        width, generator = HEADS * DIM, torch.Generator().manual_seed(3)

        def weight(*shape):
            return torch.nn.Parameter((torch.randn(*shape, generator=generator) / shape[0] ** 0.5).to(device))

        self.embedding = weight(VOCABULARY, width)
        self.qkv = torch.nn.ParameterList(weight(width, (HEADS + 2 * HEADS_KV) * DIM) for _ in range(LAYERS))
        self.project = torch.nn.ParameterList(weight(width, width) for _ in range(LAYERS))
        angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
        self.register_buffer("cos", torch.cos(angle).float().to(device))
        self.register_buffer("sin", torch.sin(angle).float().to(device))
        self.register_buffer("cache", torch.full((LAYERS, 2, PAGES, PAGE, HEADS_KV, DIM), torch.nan, device=device))

    def forward(self, tokens, table, lengths, starts):
        where = {"layout": "bshd", "page_table": table, "seqlens_k": lengths, "cu_seqlens_q": starts}
        x = self.embedding[tokens]
        for n in range(LAYERS):
            q, k, v = (x @ self.qkv[n]).view(-1, HEADS + 2 * HEADS_KV, DIM).split((HEADS, HEADS_KV, HEADS_KV), 1)
            q = ft.append(self.cache[n, 0], self.cache[n, 1], k, v, q=q, rotary=(self.cos, self.sin), **where)
            near = ft.attention(q, self.cache[n, 0], self.cache[n, 1], causal="bottom_right", window=(2, None), return_lse=True, **where)
            far = ft.attention(q, self.cache[n, 0], self.cache[n, 1], causal="bottom_right", return_lse=True, **where)
            out, _ = ft.merge([near[0], far[0]], [near[1], far[1]])
            x = x + torch.nn.functional.silu(out.reshape(x.shape) @ self.project[n])
        return x @ self.embedding.T


def steps(device):
    """Arguments of the decoder: prompts of 5, 3 and 9 tokens, then one token each, then two for the second alone."""
    table = torch.tensor([[3, 9, 1, 20], [0, 2, 11, -1], [5, 4, 7, 23]], dtype=torch.int32, device=device)
    generator, lengths = torch.Generator().manual_seed(1), [0, 0, 0]
    for counts in ((5, 3, 9), (1, 1, 1), (1, 1, 1), (0, 2, 0), (1, 4, 3)):
        lengths = [a + b for a, b in zip(lengths, counts)]
        tokens = torch.randint(VOCABULARY, (sum(counts),), generator=generator).to(device)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
        yield tokens, table, torch.tensor(lengths, dtype=torch.int32, device=device), starts


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_decoder(device, backend):
    """Whole graphs, caches written in place, no compilation for another number of tokens."""
    eager, compiled = Decoder(device), Decoder(device)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(compiled, fullgraph=True, dynamic=True, backend=counter)
    cache = compiled.cache.data_ptr()
    with torch.no_grad():
        for arguments in steps(device):
            torch.testing.assert_close(step(*arguments), eager(*arguments), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(compiled.cache, eager.cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert compiled.cache.data_ptr() == cache
    names = [{str(node.target) for node in graph.graph.nodes if "fa_ext" in str(node.target)} for graph in counter.graphs]
    assert sum(map(bool, names)) == 1 and len(set.union(*names)) == 3, names


def test_the_decoder_against_a_dense_one(device):
    """The last logits of each sequence, from all of its tokens at once in float64."""
    decoder, told = Decoder(device), [[], [], []]
    with torch.no_grad():
        for tokens, table, lengths, starts in steps(device):
            logits = decoder(tokens, table, lengths, starts)
            for b in range(3):
                told[b] += tokens[starts[b] : starts[b + 1]].tolist()
        weights = {name: x.double().cpu().numpy() for name, x in decoder.state_dict().items() if name != "cache"}
        for b in range(3):
            want = dense(weights, told[b])
            np.testing.assert_allclose(logits[starts[b + 1] - 1].cpu().numpy(), want[-1], atol=2e-5, rtol=1e-4)


def dense(weights, tokens):
    cos, sin = (weights[name][: len(tokens), None] for name in ("cos", "sin"))
    x = weights["embedding"][tokens]

    def turned(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for n in range(LAYERS):
        q, k, v = np.split((x @ weights[f"qkv.{n}"]).reshape(len(x), -1, DIM), [HEADS, HEADS + HEADS_KV], axis=1)
        arguments = turned(q)[None], turned(k)[None], v[None]
        parts = [fa_ext.reference.attention(*arguments, causal=True, window=window, layout="bshd") for window in ((2, None), None)]
        weight = [np.exp(lse[0].T)[..., None] for _, lse in parts]
        out = sum(w * o[0] for w, (o, _) in zip(weight, parts)) / sum(weight)
        x = x + (lambda y: y / (1 + np.exp(-y)))(out.reshape(x.shape) @ weights[f"project.{n}"])
    return x @ weights["embedding"].T
