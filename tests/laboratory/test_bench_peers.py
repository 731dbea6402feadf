"""The adapters of libraries that are not installed here: each is given a stand-in with the library's own signature and
conventions, computed by the float64 reference, and must make of a problem what the library understands."""

import contextlib
import sys
import types

import numpy as np
import pytest

from bench import problems
from bench.implementations import dropped, peers
from bench.machine import device
from bench.problems import operands
from fa_ext import reference
from tests.laboratory.support import stand_ins
from tests.laboratory.support.stand_ins import attend, stand_in, window_of

CPU = device.Cpu()


def flash_attn_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                 alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return attend(q, k, v, scale=softmax_scale, causal="bottom_right" if causal else False,
                  window=window_of(window_size, -1), softcap=softcap)  # fmt: skip


def flash_attn_4(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
                 learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None):  # fmt: skip
    return attend(q, k, v, scale=softmax_scale, causal="bottom_right" if causal else False,
                  window=window_of(window_size, None), softcap=softcap), "lse"  # fmt: skip


def single_prefill(q, k, v, custom_mask=None, packed_custom_mask=None, causal=False, kv_layout="NHD",
                   pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
                   logits_soft_cap=None, return_lse=False):  # fmt: skip
    assert q.ndim == k.ndim == v.ndim == 3 and kv_layout == "NHD"
    return attend(q[None], k[None], v[None], scale=sm_scale, causal="bottom_right" if causal else False,
                  softcap=logits_soft_cap or 0.0)[0]  # fmt: skip


class LowerTriangularMask:
    """Aligned to the top left, as xformers has it."""


def memory_efficient(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    assert query.shape[2] == key.shape[2], "xformers takes no grouped heads in four dimensions"
    assert attn_bias is None or isinstance(attn_bias, LowerTriangularMask)
    return attend(query, key, value, scale=scale, causal="top_left" if attn_bias else False)


# peer: (module, its functions)
STAND_INS = {
    "flash-attn-2": ("flash_attn", {"flash_attn_func": flash_attn_2}),
    "flash-attn-3": ("torch", {"ops": types.SimpleNamespace(flash_attn_3=stand_ins.FlashAttn3())}),
    "flash-attn-4": ("flash_attn.cute", {"flash_attn_func": flash_attn_4}),
    "flashinfer": ("flashinfer", {"single_prefill_with_kv_cache": single_prefill}),
    "xformers": ("xformers.ops", {"memory_efficient_attention": memory_efficient,
                                  "LowerTriangularMask": LowerTriangularMask}),
}  # fmt: skip
PLAIN = "B1,H2,S40,D16,float16"
CASES = [PLAIN, f"{PLAIN},causal=True", f"{PLAIN},layout=bshd,causal=True", "B2,H2,S40,D16,bfloat16,scale=0.3",
         "B1,H4/2,S40,D16,float16", "B1,H4/2,S24x40,D16,float16,causal=bottom_right,layout=bshd",
         "B1,H2,S24x40,D16,float16,causal=top_left", f"{PLAIN},softcap=2.0", f"{PLAIN},window=5:none,causal=True",
         "B1,H2,S24x40,D16,float16,window=5:7", f"{PLAIN},mask=keys", "B1,H2,S40,D16,float32"]  # fmt: skip


def opened(monkeypatch, name):
    """The peer on its stand-in, computing on NumPy arrays."""
    module, functions = STAND_INS[name]
    stand_in(monkeypatch, module, **functions)
    peer = peers.PEERS[name][2](CPU)
    monkeypatch.setattr(peer, "library", "numpy")
    return peer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STAND_INS)
def test_adapter_asks_for_what_the_problem_says(name, case, monkeypatch):
    peer, problem = opened(monkeypatch, name), problems.parse(case)
    refusal = peer.refuses(problem)
    if refusal:
        return
    held = operands.Operands(problem, CPU)
    judged = held.judge(peer.bind(held)())
    assert judged.passed, judged.failures


def test_refusals(monkeypatch):
    """Which of the cases above each library cannot be asked, and why; all others ran."""
    refused = {name: {case: why for case in CASES if (why := opened(monkeypatch, name).refuses(problems.parse(case)))}
               for name in STAND_INS}  # fmt: skip
    everywhere = {f"{PLAIN},mask=keys": "no mask", "B1,H2,S40,D16,float32": "no float32"}
    top_left = {"B1,H2,S24x40,D16,float16,causal=top_left": "no top_left causal mask"}
    for name in ("flash-attn-2", "flash-attn-3", "flash-attn-4"):
        assert refused[name] == everywhere | top_left
    windows = {case: "no window" for case in CASES if "window" in case}
    batches = {"B2,H2,S40,D16,bfloat16,scale=0.3": "single-request kernel: batch 1 only"}
    assert refused["flashinfer"] == everywhere | top_left | windows | batches
    assert set(refused["xformers"]) == {case for case in CASES if "4/2" in case or "x40" in case and "causal" in case
                                        or "softcap" in case or "window" in case or "mask" in case}  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
def test_what_is_installed_is_found_and_what_breaks_is_named(name, monkeypatch):
    gpu = types.SimpleNamespace(kind="cuda")
    module, functions = STAND_INS[name]
    stand_in(monkeypatch, module, **functions)
    found, missing = peers.available(gpu, [name])
    assert [p.name for p in found] == [name] and not missing and found[0].library == "torch"
    stand_in(monkeypatch, module)  # a release without the function
    found, missing = peers.available(gpu, [name])
    assert name == "xformers" or (not found and "does not load" in missing[name])


# ---- torch ----


class Tensor(np.ndarray):
    """The part of a torch tensor that the adapter asks for beyond NumPy's arrays."""

    def to(self, device):
        return self


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                 enable_gqa=False):  # fmt: skip
    """Aligned to the top left, a mask of booleans or of the queries' dtype, and never both."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert attn_mask is None or not is_causal
    options = {"scale": scale, "causal": "top_left" if is_causal else False}
    if attn_mask is not None and attn_mask.dtype != bool:
        assert attn_mask.dtype == query.dtype and attn_mask.ndim == 4 and attn_mask.strides[3] == attn_mask.itemsize
        options["bias"] = attn_mask
    elif attn_mask is not None:
        options["mask"] = attn_mask
    return reference.attention(query, key, value, **options)[0].astype(query.dtype)


def torch_peer(monkeypatch, backend):
    """TorchSdpa on a stand-in for torch, computing on NumPy arrays."""
    names = types.SimpleNamespace(MATH=1, FLASH_ATTENTION=2, EFFICIENT_ATTENTION=3, CUDNN_ATTENTION=4)
    stand_in(monkeypatch, "torch.nn.attention", SDPBackend=names, sdpa_kernel=lambda backend: contextlib.nullcontext())
    functional = types.SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention)
    sys.modules["torch"].nn = types.SimpleNamespace(functional=functional)
    vars(sys.modules["torch"]).update(
        from_numpy=lambda array: array.view(Tensor), where=np.where, broadcast_to=np.broadcast_to,
        no_grad=contextlib.nullcontext,
    )  # fmt: skip
    peer = peers.TorchSdpa(backend, "torch", CPU)
    monkeypatch.setattr(peer, "library", "numpy")
    return peer


# Patterns of pairs and scores; the lengths differ where a mask ends at the last key.
PATTERNS = [f"B2,H4/2,S33x48,D16,float16,{options}" for options in (
    "mask=pairs", "mask=causal", "mask=padding", "mask=documents0", "mask=full,bias=shared", "bias=shared,mask=padding", "bias=shared32",
    "causal=bottom_right,alibi=heads", "window=9:4,alibi=batch,softcap=3.0", "causal=top_left,mask=keys,bias=queries,layout=bshd",
)]  # fmt: skip
BIASED = [f"B2,H4/2,S24x40,D16,float16,{options}" for options in (
    "bias=full", "bias=keys", "bias=queries", "bias=alibi", "causal=bottom_right,bias=full",
    "causal=top_left,bias=queries", "window=5:7,bias=keys", "bias=full,mask=keys",
    "causal=bottom_right,window=9:none,bias=alibi,mask=batch,layout=bshd",
)]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *BIASED, "B1,H2,S40,D16,float32,bias=full32"])
def test_torch_is_asked_for_what_the_problem_says(case, monkeypatch):
    peer, problem = torch_peer(monkeypatch, "MATH"), problems.parse(case)
    if "softcap" in case:
        assert peer.refuses(problem) == "no softcap"
        return
    assert peer.refuses(problem) is None
    held = operands.Operands(problem, CPU)
    judged = held.judge(peer.bind(held)())
    assert judged.passed, judged.failures


def test_torch_refuses_biases_it_cannot_take(monkeypatch):
    case = "B2,H4,S24,D16,float16,bias="
    assert torch_peer(monkeypatch, "FLASH_ATTENTION").refuses(problems.parse(f"{case}full")) == "no bias"
    for kind in ("full32", "finfo_min"):
        why = torch_peer(monkeypatch, "MATH").refuses(problems.parse(case + kind))
        assert why == "no float32 bias of float16 inputs"


@pytest.mark.parametrize("case", [*BIASED, "B1,H2,S40,D16,bfloat16,bias=full"])
@pytest.mark.parametrize("backend", ["MATH", None])
def test_bias_on_torch_itself(backend, case):
    pytest.importorskip("torch")
    held = operands.Operands(problems.parse(case), CPU)
    judged = held.judge(peers.TorchSdpa(backend, "torch", CPU).bind(held)())
    assert judged.passed, judged.failures


def test_torch_itself_is_measured_once():
    """torch's own choice is one of the backends beside it: only on request."""
    _, missing = peers.available(types.SimpleNamespace(kind="cuda"))
    assert "torch-sdpa" in peers.PEERS and "torch-sdpa" not in missing
    _, missing = peers.available(CPU, ["torch-sdpa", "numpy"])
    assert set(missing) <= {"torch-sdpa"}
    assert np.dtype("float32").name in peers.TorchSdpa(None, "torch-sdpa", CPU).dtypes


# ---- FlexAttention ----


@pytest.mark.parametrize("case", PATTERNS)
def test_flex_attention_computes_the_pattern(case):
    pytest.importorskip("torch")
    peer, problem = peers.FlexAttention(CPU), problems.parse(case)
    assert peer.refuses(problem) is None
    held = operands.Operands(problem, CPU)
    judged = peer.judged_on(held)
    assert judged.passed, judged.failures
    assert peer.bind(held) is peer.bind(held)  # its block mask is made once


def test_flex_attention_says_what_it_has_not():
    pytest.importorskip("torch")
    peer = peers.FlexAttention(CPU)
    assert peer.refuses(problems.parse(f"{PLAIN},dropout=0.1:1,sinks=same")) == "no dropout, sinks"
    assert peer.refuses(problems.parse(f"{PLAIN},causal=True")) == "no option that it is taken for"  # it is compiled for each problem
    assert "torch-flex" in peers.PEERS and peer.operations == {"attention"}  # uncompiled it has no gradients


# ---- dropout ----


@pytest.mark.parametrize("case", ["B2,H4/2,S33x48,D16,float32,dropout=0.2:1", "B2,H4/2,S40,D16/8,bfloat16,causal=True,dropout=0.5:1,layout=bshd",
                                  "B2,H4,S33x48,D16,float16,bias=shared,mask=pairs,dropout=0.2:1"])  # fmt: skip
def test_dropout_is_judged_with_the_mask_that_was_drawn(case):
    pytest.importorskip("torch")
    peer, held = peers.TorchSdpa("MATH", "torch-math", CPU), operands.Operands(problems.parse(case), CPU)
    assert peer.refuses(held.case) is None
    judged = peer.judged_on(held)
    assert judged.passed, judged.failures
    result = peer.bind(held)()
    assert not held.judge(result).passed  # the problem's own mask is another
    kept = dropped.kept_weights(held, lambda v: peer.attended(held, v), "torch")
    with held.dropping(dropped.found(held.case.dropout[0], kept)):
        assert not held.judge(result).passed  # and so is that of a later draw


def test_the_mask_that_is_read_off_keeps_the_share_that_it_should():
    pytest.importorskip("torch")
    held = operands.Operands(problems.parse("B2,H4,S128,D16,float32,causal=True,dropout=0.25:1"), CPU)
    peer = peers.TorchSdpa("MATH", "torch-math", CPU)
    kept = dropped.kept_weights(held, lambda v: peer.attended(held, v), "torch")
    seen = np.tri(128, dtype=bool)
    assert kept.shape == (2, 4, 128, 128) and not kept[..., ~seen].any() and abs(kept[..., seen].mean() - 0.75) < 0.01


def test_dropout_of_sequences_is_refused():
    pytest.importorskip("torch")
    case = problems.parse("B2,H2,S16,D16,bfloat16,q=packed,k=packed,slack=0,dropout=0.1:1,operation=backward", problems.OPERATIONS)
    assert peers.TorchSdpa("MATH", "torch-math", types.SimpleNamespace(kind="cuda")).refuses(case) == "no dropout of sequences"
