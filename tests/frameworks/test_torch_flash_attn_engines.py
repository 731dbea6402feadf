"""The calls of engines that serve models: vLLM's and SGLang's, argument by argument, on the modules that stand in for their copies
of FlashAttention."""

import pytest

torch = pytest.importorskip("torch")

from fa_ext.torch import flash_attn_interface as fa  # noqa: E402
from fa_ext.torch import sgl_flash_attn, vllm_flash_attn  # noqa: E402
from tests.frameworks.support import flash_attn_math as math  # noqa: E402
from tests.frameworks.support.flash_attn_math import D, DV, HK, LENGTHS_K, LENGTHS_Q, H, close  # noqa: E402


def engine_step():
    """The call of vLLM's attention backend: tokens padded to a graph's size, blocks of 16 rows, and arguments that it does not use."""
    lengths_q, lengths_k = [1, 5, 3], [9, 5, 33]
    query, output = math.draw((12, H, D), (12, H, D), dtype=torch.float32)
    key_cache, value_cache = math.draw((8, 16, HK, D), (8, 16, HK, D), dtype=torch.float32, seed=1)
    table = torch.tensor([[3, 0, 0], [1, 0, 0], [7, 2, 5]], dtype=torch.int32)
    (sinks,) = math.draw((H,), dtype=torch.float32, seed=4)
    scale = torch.ones(1).expand(3, HK)
    call = {
        "q": query, "k": key_cache, "v": value_cache, "out": output, "cu_seqlens_q": math.starts(lengths_q), "max_seqlen_q": 5,
        "seqused_k": torch.tensor(lengths_k, dtype=torch.int32), "max_seqlen_k": 33, "softmax_scale": 0.3, "causal": True,
        "alibi_slopes": None, "window_size": [7, 0], "block_table": table, "softcap": 0.9, "scheduler_metadata": None,
        "fa_version": 3, "q_descale": scale, "k_descale": scale, "v_descale": scale, "num_splits": 1, "s_aux": sinks,
        "mask_mod": None, "aux_tensors": None, "dynamic_causal": None,
    }  # fmt: skip
    keys = [[x[table[b].long()].flatten(0, 1)[: lengths_k[b]] for x in (key_cache, value_cache)] for b in range(3)]
    return call, lengths_q, keys


def test_vllms_call():
    call, lengths_q, keys = engine_step()
    got = vllm_flash_attn.flash_attn_varlen_func(**call)
    assert got is call["out"]
    again, lse = vllm_flash_attn.flash_attn_varlen_func(**call | {"out": None, "return_softmax_lse": True})
    assert torch.equal(again, got) and lse.shape == (H, 12)
    rows = call["q"][:9].split(lengths_q), got[:9].split(lengths_q), lse[:, :9].split(lengths_q, 1)
    for q, out, lse_b, (k, v) in zip(*rows, keys, strict=True):
        wanted, wanted_lse = math.attend(q, k, v, causal=True, window_size=(7, 0), softcap=0.9, scale=0.3, sinks=call["s_aux"])
        close(out, wanted)
        close(lse_b, wanted_lse)
    assert (got[9:] == 0).all() and (lse[:, 9:] == -torch.inf).all()


def test_vllms_cascade():
    """A prefix that all share, and what each has of its own: merged, the result over all keys."""
    call, lengths_q, keys = engine_step()
    table = call["block_table"].clone()
    table[:, 0] = 6
    call |= {"out": None, "s_aux": None, "window_size": [-1, -1], "softcap": 0, "return_softmax_lse": True}
    call["seqused_k"] = torch.tensor([18, 21, 40], dtype=torch.int32)
    whole, whole_lse = vllm_flash_attn.flash_attn_varlen_func(**call | {"block_table": table})
    prefix = {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32), "seqused_k": torch.tensor([16], dtype=torch.int32)}
    first = vllm_flash_attn.flash_attn_varlen_func(**call | prefix | {"block_table": table[:1], "causal": False})
    second = vllm_flash_attn.flash_attn_varlen_func(**call | {"block_table": table[:, 1:], "seqused_k": call["seqused_k"] - 16})
    outs, lses = ([x[None] for x in pair] for pair in zip(first, second, strict=True))
    out, lse = fa.flash_attn_combine(torch.stack(outs), torch.stack([x.transpose(1, 2) for x in lses]))
    close(out[0, :9], whole[:9])
    close(lse[0, :9].T, whole_lse[:, :9])


def test_vllms_encoder_call():
    q, k, v = math.packed(dtype=torch.float32)
    out = torch.full((sum(LENGTHS_Q), H, DV), torch.nan)
    got = vllm_flash_attn.flash_attn_varlen_func(
        q=q, k=k, v=v, out=out, cu_seqlens_q=math.starts(LENGTHS_Q), cu_seqlens_k=math.starts(LENGTHS_K), max_seqlen_q=8, max_seqlen_k=7,
        causal=False, window_size=(-1, -1), softcap=0, fa_version=2,
    )  # fmt: skip
    assert got is out
    close(out, math.each(q, k, v, LENGTHS_Q, LENGTHS_K)[0])


def test_what_vllm_may_not_ask():
    call, *_ = engine_step()
    for bad, error, match in (
        *(({name: call["q"]}, NotImplementedError, f"^{name} is given") for name in (
            "q_v", "output_scale", "mask_mod", "block_sparse_tensors", "aux_tensors", "aux_tensor_leading_dims", "dynamic_causal")),
        ({"cp_tot_seqused_k": call["seqused_k"]}, NotImplementedError, "cp_tot_seqused_k is given"),
        ({"cp_world_size": 2}, NotImplementedError, "cp_world_size is 2"),
        ({"return_attn_probs": True}, NotImplementedError, "return_attn_probs is True"),
        ({"k": call["k"].to(torch.float8_e4m3fn)}, NotImplementedError, "k has dtype torch.float8_e4m3fn"),
        ({"fa_version": 5}, ValueError, "fa_version is 5; accepted: 2, 3, 4"),
        ({"cu_seqlens_k": call["cu_seqlens_q"]}, ValueError, "cu_seqlens_k and seqused_k"),
        ({"seqused_k": None}, ValueError, "cu_seqlens_k and seqused_k"),
        ({"seqused_k": None, "cu_seqlens_k": call["cu_seqlens_q"]}, ValueError, "block_table needs seqused_k"),
    ):
        with pytest.raises(error, match=match):
            vllm_flash_attn.flash_attn_varlen_func(**call | bad)
    assert vllm_flash_attn.is_fa_version_supported(3) and vllm_flash_attn.fa_version_unsupported_reason(2) is None
    with pytest.raises(ValueError, match="fa_version is 1"):
        vllm_flash_attn.is_fa_version_supported(1)


# ---- SGLang ----


def sglang_step():
    """The call of SGLang's backend for tokens behind a cache: the new keys are in the cache already, and their starts are given."""
    call, lengths_q, keys = engine_step()
    mine = {
        "q": call["q"], "k_cache": call["k"], "v_cache": call["v"], "page_table": call["block_table"],
        "cache_seqlens": call["seqused_k"], "cu_seqlens_q": call["cu_seqlens_q"], "cu_seqlens_k_new": math.starts([9, 5, 33]),
        "max_seqlen_q": 5, "softmax_scale": 0.3, "causal": True, "window_size": (7, 0), "softcap": 0.9, "k_descale": None,
        "v_descale": None, "num_splits": 0, "sinks": call["s_aux"],
    }  # fmt: skip
    return mine, lengths_q, keys


def test_sglangs_call():
    call, lengths_q, keys = sglang_step()
    got, lse, *_ = sgl_flash_attn.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    for ver in (3, 4):
        assert torch.equal(sgl_flash_attn.flash_attn_with_kvcache(**call, ver=ver, scheduler_metadata=None, max_seqlen_k=33), got)
    place = torch.full_like(got, torch.nan)
    assert sgl_flash_attn.flash_attn_with_kvcache(**call, out=place) is place and torch.equal(place, got)
    assert got.shape == call["q"].shape and lse.shape == (H, 12)
    rows = call["q"][:9].split(lengths_q), got[:9].split(lengths_q), lse[:, :9].split(lengths_q, 1)
    for q, out, lse_b, (k, v) in zip(*rows, keys, strict=True):
        wanted, wanted_lse = math.attend(q, k, v, causal=True, window_size=(7, 0), softcap=0.9, scale=0.3, sinks=call["sinks"])
        close(out, wanted)
        close(lse_b, wanted_lse)


def test_sglangs_step_of_one_token():
    """Decoding: as many starts as sequences, one page a table's entry."""
    q, k, v = math.draw((3, H, D), (20, 1, HK, D), (20, 1, HK, DV), dtype=torch.float32)
    table, lengths = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:18].view(3, 6).int(), [6, 1, 4]
    got = sgl_flash_attn.flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, page_table=table, cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=math.starts([1, 1, 1]), cu_seqlens_k_new=math.starts(lengths), max_seqlen_q=1, softmax_scale=0.3, causal=True,
        window_size=(-1, -1), softcap=0.0, k_descale=None, v_descale=None, return_softmax_lse=False, num_splits=0,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        rows = table[b, :n].long()
        close(got[b : b + 1], math.attend(q[b : b + 1], k[rows, 0], v[rows, 0], scale=0.3)[0])


def test_sglangs_prefill_without_a_cache():
    """By position as far as the lengths, then by name; the sinks have a gradient here."""
    q, k, v = math.packed(grad=True)
    (sinks,) = math.draw((H,), grad=True, seed=2)
    out, lse = sgl_flash_attn.flash_attn_varlen_func(
        q, k, v, math.starts(LENGTHS_Q), math.starts(LENGTHS_K), 8, 7, softmax_scale=0.3, causal=True, return_softmax_lse=True,
        sinks=sinks, ver=3, num_splits=1,
    )  # fmt: skip
    wanted, wanted_lse = math.each(q, k, v, LENGTHS_Q, LENGTHS_K, causal=True, scale=0.3, sinks=sinks)
    close(out, wanted)
    close(lse, wanted_lse)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v, sinks)) for o in (out, wanted)), strict=True):
        close(x, y)
    place, plain = torch.empty_like(out), [x.detach() for x in (q, k, v)]
    got = sgl_flash_attn.flash_attn_varlen_func(
        *plain, math.starts(LENGTHS_Q), math.starts(LENGTHS_K), softmax_scale=0.3, causal=True, sinks=sinks.detach(), out=place
    )  # fmt: skip
    assert got is place and torch.equal(got, out)


def test_what_sglang_may_not_ask():
    call, *_ = sglang_step()
    packed = (*math.packed(), math.starts(LENGTHS_Q), math.starts(LENGTHS_K))
    for bad, error, match in (
        *(({name: call["q"]}, NotImplementedError, f"^{name} is given") for name in (
            "qv", "q_descale", "k_descale", "v_descale", "score_mod", "aux_tensors")),
        ({"attention_chunk": 64}, NotImplementedError, "^attention_chunk is 64"),
        ({"ver": 5}, ValueError, "ver is 5; accepted: 2, 3, 4"),
    ):
        with pytest.raises(error, match=match):
            sgl_flash_attn.flash_attn_with_kvcache(**call | bad)
        with pytest.raises(error, match=match):
            sgl_flash_attn.flash_attn_varlen_func(*packed, **bad)
    with pytest.raises(NotImplementedError, match="k_cache has dtype torch.float8_e4m3fn"):
        sgl_flash_attn.flash_attn_with_kvcache(**call | {"k_cache": call["k_cache"].to(torch.float8_e4m3fn)})
    assert sgl_flash_attn.is_fa3_supported()
