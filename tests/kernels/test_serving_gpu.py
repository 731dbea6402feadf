"""Sequences and append on a GPU beyond what test_serving.py and test_append.py hold every kernel to: graphs that are replayed
with other lengths, what faults() tells of them, check= under capture, and caches beyond 2^31 elements."""


import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.serving_cases import append_call
from bench.problems.stored import INT_MAX
from fa_ext import _core
from tests.contract import runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runner.has("torch") or not _core.build_info()["cuda"], reason="needs torch and a build with CUDA"),
]
CASE = Case.sequences((1, 3, 2, 7), (5, 33, 40, 17), dtype="float16", head_dim=64, causal="bottom_right", slack=6)


@pytest.fixture(scope="module", params=["simt", "mma_sm80", "prefill_sm90", "serve_sm90", None], ids=str)
def kernel(request):
    return request.param


def on_device(arguments):
    import torch

    return {name: torch.from_numpy(x.copy()).cuda() if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def captured(call):
    """A graph of a call, which has run once before."""
    import torch

    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph


def test_a_graph_serves_any_lengths(kernel):
    """Lengths, tables, starts and keys change between replays; each replay has the bits of a call."""
    import torch

    x = on_device(CASE.host_inputs())
    out, lse = torch.full_like(x["q"], float("nan")), torch.full((4, len(x["q"])), float("nan"), device="cuda")
    graph = captured(lambda: fa_ext.attention(**x, out=(out, lse), kernel=kernel))
    rng = np.random.default_rng(0)
    for n_k in ((0, 0, 0, 0), (48, 1, 33, 48), (1, 0, 48, 7), *rng.integers(0, 49, (40, 4))):
        n_q = rng.multinomial(13, np.ones(4) / 4)
        other = CASE.changed(n_q=tuple(map(int, n_q)), n_k=tuple(map(int, n_k)), seed=int(rng.integers(99)))
        starts = np.concatenate([[0], np.cumsum(n_q)]).astype(np.int32) + CASE.storage.slack // 2
        needed = -(-np.asarray(n_k) // CASE.storage.page_size)
        table = rng.integers(-9, 9, x["page_table"].shape).astype(np.int32)
        pages = rng.permutation(len(x["k"]))
        for b in range(4):  # pages may be shared
            table[b, : needed[b]] = pages[np.arange(needed[b]) * 3 % len(pages)]
        new = {"cu_seqlens_q": starts, "seqlens_k": np.asarray(n_k, np.int32), "page_table": table}
        for name, value in new.items():
            x[name].copy_(torch.from_numpy(value))
        for name in "qkv":
            x[name].copy_(torch.from_numpy(rng.standard_normal(tuple(x[name].shape)).astype(np.float16)))
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        wanted = fa_ext.attention(**x, return_lse=True, kernel=kernel)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]), other
        assert fa_ext.verify(**x, kernel=kernel)
    fa_ext.faults(0)


def test_a_graph_of_decode_steps_serves_any_lengths():
    """Chunks of keys and their parts follow from lengths that a graph does not know when it is captured."""
    import torch

    longest = 20000
    case = Case.sequences((1,) * 6, (longest,) * 6, 8, 2, 128, dtype="float16", q="one", causal="bottom_right", slack=0)
    x = on_device(case.host_inputs())
    out, lse = torch.full_like(x["q"], float("nan")), torch.full((8, 6), float("nan"), device="cuda")
    x["seqlens_k"].fill_(1)
    graph = captured(lambda: fa_ext.attention(**x, out=(out, lse), kernel="mma_sm80"))
    rng = np.random.default_rng(0)
    for n_k in ((0,) * 6, (1, 64, 65, 8128, 8129, longest), (longest,) * 6, *rng.integers(0, longest + 1, (20, 6))):
        x["seqlens_k"].copy_(torch.tensor([int(n) for n in n_k], dtype=torch.int32))
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        wanted = fa_ext.attention(**x, return_lse=True, kernel="mma_sm80")
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]), n_k
        alone = {**x, "q": x["q"][3:4], "page_table": x["page_table"][3:4], "seqlens_k": x["seqlens_k"][3:4]}
        assert torch.equal(fa_ext.attention(**alone, kernel="mma_sm80"), out[3:4]), n_k
    assert fa_ext.verify(**x, kernel="mma_sm80")


def test_faults_of_replays_are_counted(kernel):
    import torch

    x = on_device(CASE.host_inputs())
    out = torch.empty_like(x["q"])
    graph = captured(lambda: fa_ext.attention(**x, out=out, kernel=kernel))
    torch.cuda.synchronize()
    fa_ext.faults(0)
    graph.replay()
    torch.cuda.synchronize()
    assert fa_ext.faults(0) == []
    x["seqlens_k"][1] = -7
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert fa_ext.faults(0, clear=False) == [("length", 3, 1, 1, -7)]
    x["seqlens_k"][1], x["page_table"][2, 1] = 33, INT_MAX
    fa_ext.faults(0)
    graph.replay()
    torch.cuda.synchronize()
    assert fa_ext.faults(0) == [("page", 1, 2, 1, INT_MAX)] and fa_ext.faults(0) == []


def test_check_and_capture(kernel, monkeypatch):
    import torch

    x = on_device(CASE.host_inputs())
    out = torch.full_like(x["q"], 7)
    with pytest.raises(ValueError, match="check is True.*is being captured"):
        captured(lambda: fa_ext.attention(**x, out=out, kernel=kernel, check=torch.cuda.is_current_stream_capturing()))
    monkeypatch.setenv("FA_EXT_CHECK", "1")
    graph = captured(lambda: fa_ext.attention(**x, out=out, kernel=kernel))
    x["page_table"][0, 0] = -1
    graph.replay()  # a capture looks at nothing
    torch.cuda.synchronize()
    out.fill_(7)
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is -1"):
        fa_ext.attention(**x, out=out, kernel=kernel)
    assert (out == 7).all()
    fa_ext.attention(**x, out=out, kernel=kernel, check=False)
    monkeypatch.setenv("FA_EXT_CHECK", "yes")
    with pytest.raises(ValueError, match='FA_EXT_CHECK is "yes"; accepted: 0, 1'):
        fa_ext.attention(**x, out=out, kernel=kernel)
    torch.cuda.synchronize()
    fa_ext.faults(0)


def test_check_sees_any_strides(kernel):
    """The table is a slice, its rows may lie backwards or in one; what is beside it is no fault."""
    import torch

    x = on_device(CASE.host_inputs())
    wide = torch.full((2 * len(CASE.n_q), x["page_table"].shape[1] + 5), -1, dtype=torch.int32, device="cuda")
    narrow = wide[::2, 3 : 3 + x["page_table"].shape[1]]
    narrow.copy_(x["page_table"])
    x["page_table"] = narrow
    fa_ext.attention(**x, check=True, kernel=kernel)
    needed = -(-CASE.n_k[3] // CASE.storage.page_size)
    narrow[3, needed - 1] = INT_MAX
    with pytest.raises(ValueError, match=rf"page_table\[3, {needed - 1}\] is {INT_MAX}"):
        fa_ext.attention(**x, check=True, kernel=kernel)


def test_append_in_a_graph():
    import torch

    for rotary in (0, 8):
        x = append_call(CASE, rotary=rotary, q=bool(rotary))
        if rotary:
            x["rotary"] = tuple(torch.from_numpy(t).cuda() for t in x["rotary"])
        x = on_device(x)
        options = {"out": torch.empty_like(x["q"])} if rotary else {}
        graph = captured(lambda x=x, options=options: fa_ext.append(**x, **options))
        for n_k in ((5, 33, 40, 17), (1, 3, 2, 7), (40, 48, 3, 9)):
            x["seqlens_k"].copy_(torch.tensor(n_k, dtype=torch.int32))
            x["page_table"].fill_(-1)
            x["page_table"][:, :3] = torch.randperm(len(x["k_cache"]))[:12].view(4, 3)
            x["k"].normal_(), x["v"].normal_()
            before = x["k_cache"].clone(), x["v_cache"].clone()
            graph.replay()
            torch.cuda.synchronize()
            after = x["k_cache"].clone(), x["v_cache"].clone()
            x["k_cache"].copy_(before[0]), x["v_cache"].copy_(before[1])
            fa_ext.append(**x, **options)
            torch.cuda.synchronize()
            same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(after, (x["k_cache"], x["v_cache"]))]
            assert same == [True, True]
    fa_ext.faults(0)


def test_nothing_is_allocated_with_out(kernel):
    import torch

    x = on_device(CASE.host_inputs())
    assert fa_ext.workspace_size(**x, kernel=kernel) >= 0
    workspace = torch.empty(fa_ext.workspace_size(**x, kernel=kernel) + 256, dtype=torch.uint8, device="cuda")[:-256]
    out = torch.empty_like(x["q"])
    fa_ext.attention(**x, out=out, workspace=workspace, kernel=kernel)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fa_ext.attention(**x, out=out, workspace=workspace, kernel=kernel)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.slow
def test_pages_beyond_2_to_the_31_elements(kernel):
    import torch

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    size, heads, d, far = 4, 2, 64, (1 << 31) + 4096
    memory = torch.empty(far + 8192, dtype=torch.float16, device="cuda")
    caches = [memory[at:].as_strided((2, size, heads, d), (far, heads * d, d, 1)) for at in (0, 1024)]
    near = [torch.zeros(2, size, heads, d, dtype=torch.float16, device="cuda") for _ in "kv"]
    k, v = (torch.randn(8, heads, d, dtype=torch.float16, device="cuda") for _ in "kv")
    q = torch.randn(8, heads, d, dtype=torch.float16, device="cuda")
    common = {"layout": "bshd", "page_table": torch.tensor([[1, 0]], dtype=torch.int32, device="cuda"),
              "seqlens_k": torch.tensor([8], dtype=torch.int32, device="cuda"),
              "cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32, device="cuda")}  # fmt: skip
    found = []
    for pair in (caches, near):
        fa_ext.append(*pair, k, v, **common)
        found.append(fa_ext.attention(q, *pair, causal="bottom_right", **common, kernel=kernel))
    assert torch.equal(found[0], found[1]) and torch.equal(caches[0], near[0]) and torch.equal(caches[1], near[1])
