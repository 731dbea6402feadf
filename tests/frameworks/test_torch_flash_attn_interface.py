"""fa_ext.torch.flash_attn_interface, and the signatures of all modules that stand in for FlashAttention's."""

import importlib
import inspect

import pytest

torch = pytest.importorskip("torch")

from fa_ext.torch import flash_attn, sgl_flash_attn, vllm_flash_attn  # noqa: E402
from fa_ext.torch import flash_attn_interface as fa  # noqa: E402
from fa_ext.torch.flash_attn import bert_padding  # noqa: E402
from fa_ext.torch.flash_attn.layers import rotary  # noqa: E402
from tests.frameworks.support import flash_attn_math as math  # noqa: E402
from tests.frameworks.support import flash_attn_signatures as signatures  # noqa: E402
from tests.frameworks.support.flash_attn_math import D, DV, HK, LENGTHS_K, LENGTHS_Q, H, close  # noqa: E402

#: The module here, the stored signatures, the module that has them.
MODULES = [
    (flash_attn.flash_attn_interface, signatures.FlashAttention2, "flash_attn.flash_attn_interface"),
    (bert_padding, signatures.BertPadding, "flash_attn.bert_padding"),
    (rotary, signatures.Rotary, "flash_attn.layers.rotary"),
    (fa, signatures.FlashAttention3, "flash_attn_interface"),
    (vllm_flash_attn, signatures.VllmFlashAttention, "vllm.vllm_flash_attn"),
    (sgl_flash_attn, signatures.SglFlashAttention, "sglang.jit_kernel.flash_attention"),
]
FUNCTIONS = [
    pytest.param(module, stored, theirs, name, id=f"{theirs}.{name}")
    for module, stored, theirs in MODULES for name in vars(stored) if not name.startswith("__")
]  # fmt: skip
#: Arguments that need not be given here: FlashAttention 4 leaves them out.
OPTIONAL = {("flash_attn_interface", "flash_attn_varlen_func"): {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}}


def by_position(function):
    """(name, default) of the arguments that may be given by position, in order."""
    return [(x.name, x.default) for x in inspect.signature(function).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]


def compare(ours, theirs, optional=()):
    for (name, default), (wanted, right) in zip(by_position(ours), by_position(theirs), strict=True):
        assert name == wanted
        assert default is None if name in optional else default == right, name
    others = [x for x in inspect.signature(ours).parameters.values() if x.kind is not x.POSITIONAL_OR_KEYWORD]
    assert all(x.kind is x.KEYWORD_ONLY and x.default is not x.empty for x in others)


@pytest.mark.parametrize(("module", "stored", "theirs", "name"), FUNCTIONS)
def test_signatures(module, stored, theirs, name):
    """Names, order and defaults; what is more goes by keyword alone."""
    compare(getattr(module, name), getattr(stored, name), OPTIONAL.get((theirs, name), ()))


@pytest.mark.parametrize(("module", "stored", "theirs", "name"), FUNCTIONS)
def test_signatures_of_what_is_installed(module, stored, theirs, name):
    installed = pytest.importorskip(theirs)
    if hasattr(installed, name):
        compare(getattr(module, name), getattr(installed, name), OPTIONAL.get((theirs, name), ()))


def test_everything_is_exported():
    for module, stored, _ in MODULES:
        assert {name for name in vars(stored) if not name.startswith("__")} <= set(module.__all__)
    package = importlib.import_module("fa_ext.torch.flash_attn")
    assert set(flash_attn.flash_attn_interface.__all__) | {"install", "uninstall"} == set(package.__all__)


# ---- FlashAttention 3 ----

OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, 1)}, {"window_size": (2, 1)}),
    "no bounds": ({"window_size": (None, None)}, {}),
    "one bound": ({"window_size": (None, 1)}, {"window_size": (-1, 1)}),
    "softcap": ({"softcap": 0.8, "softmax_scale": 0.3}, {"softcap": 0.8, "scale": 0.3}),
    "hints": ({"num_splits": 4, "pack_gqa": True, "sm_margin": 8}, {}),
}  # fmt: skip
each_option = pytest.mark.parametrize("name", OPTIONS)


@each_option
def test_a_batch(name):
    (q, k, v), (call, right) = math.padded(), OPTIONS[name]
    wanted, wanted_lse = math.batch(q, k, v, **right)
    out = fa.flash_attn_func(q, k, v, **call)
    close(out, wanted)
    for asked in ("return_attn_probs", "return_lse"):
        again, lse = fa.flash_attn_func(q, k, v, **call, **{asked: True})
        assert torch.equal(again, out)
        close(lse, wanted_lse)


@each_option
def test_packed_sequences(name):
    (q, k, v), (call, right) = math.packed(), OPTIONS[name]
    out, lse = fa.flash_attn_varlen_func(q, k, v, math.starts(LENGTHS_Q), math.starts(LENGTHS_K), 8, 7, return_attn_probs=True, **call)
    wanted, wanted_lse = math.each(q, k, v, LENGTHS_Q, LENGTHS_K, **right)
    close(out, wanted)
    close(lse, wanted_lse)


def test_used_rows():
    """seqused_q and seqused_k of packed and of padded sequences: the rows that are used, and zeros behind them."""
    used_q, used_k = [3, 0, 1, 5], [7, 2, 0, 1]
    q, k, v = math.packed()
    starts_q, starts_k = math.starts(LENGTHS_Q), math.starts(LENGTHS_K)
    use = {"seqused_q": torch.tensor(used_q), "seqused_k": torch.tensor(used_k), "causal": True}
    out = fa.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 8, 7, **use)
    parts = [list(x.split(lengths)) for x, lengths in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))]
    for b, rows in enumerate(out.split(LENGTHS_Q)):
        wanted, _ = math.attend(parts[0][b][: used_q[b]], *(x[b][: used_k[b]] for x in parts[1:]), causal=True)
        close(rows[: used_q[b]], wanted)
        assert (rows[used_q[b] :] == 0).all()
    q, k, v = math.draw((4, 8, H, D), (4, 7, HK, D), (4, 7, HK, DV))
    out, lse = fa.flash_attn_varlen_func(q, k, v, return_lse=True, **use)
    assert lse.shape == (4, H, 8)
    for b in range(4):
        close(out[b, : used_q[b]], math.attend(q[b, : used_q[b]], k[b, : used_k[b]], v[b, : used_k[b]], causal=True)[0])


def test_pages():
    (q,), (k, v) = math.draw((14, H, D)), math.draw((5, 4, HK, D), (5, 4, HK, DV), seed=1)
    table, lengths = torch.tensor([[2, 0], [4, 1], [3, 3], [1, 2]], dtype=torch.int32), [7, 4, 0, 8]
    use = {"seqused_k": torch.tensor(lengths, dtype=torch.int32), "page_table": table, "causal": True}
    out = fa.flash_attn_varlen_func(q, k, v, math.starts(LENGTHS_Q), max_seqlen_q=8, **use)
    assert torch.equal(fa.flash_attn_varlen_func(q, k, v, math.starts(LENGTHS_Q), max_seqlen_q=1, **use), out)  # it is not read
    for b, (rows, queries) in enumerate(zip(out.split(LENGTHS_Q), q.split(LENGTHS_Q), strict=True)):
        keys, values = (x[table[b].long()].flatten(0, 1)[: lengths[b]] for x in (k, v))
        close(rows, math.attend(queries, keys, values, causal=True)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_have_a_gradient(packed):
    inputs = math.packed(grad=True) if packed else math.padded(grad=True)
    (sinks,) = math.draw((H,), grad=True, seed=2)
    if packed:
        out = fa.flash_attn_varlen_func(*inputs, math.starts(LENGTHS_Q), math.starts(LENGTHS_K), 8, 7, learnable_sink=sinks)
        wanted, _ = math.each(*inputs, LENGTHS_Q, LENGTHS_K, sinks=sinks)
    else:
        out, (wanted, _) = fa.flash_attn_func(*inputs, learnable_sink=sinks), math.batch(*inputs, sinks=sinks)
    close(out, wanted)
    (weight,) = math.draw(out.shape, seed=3)
    for x, y in zip(*(torch.autograd.grad((o * weight).sum(), (*inputs, sinks)) for o in (out, wanted)), strict=True):
        close(x, y)


def test_packed_heads():
    """qkv (B, S, 3, H, D), and heads of q, k and v behind one another."""
    (qkv,) = math.draw((2, 7, 3, H, D))
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, causal=True), fa.flash_attn_func(*qkv.unbind(2), causal=True))
    (qkv,) = math.draw((2, 7, H + 2 * HK, D), grad=True)
    out, lse = fa.flash_attn_qkvpacked_func(qkv, softcap=0.9, num_heads_q=H, return_attn_probs=True)
    wanted, wanted_lse = math.batch(qkv[:, :, :H], qkv[:, :, H : H + HK], qkv[:, :, H + HK :], softcap=0.9)
    close(out, wanted)
    close(lse, wanted_lse)
    close(*(torch.autograd.grad(x.square().sum(), qkv)[0] for x in (out, wanted)))
    with pytest.raises(ValueError, match="qkv of four axes needs num_heads_q"):
        fa.flash_attn_qkvpacked_func(qkv)
    with pytest.raises(ValueError, match="num_heads_q is 5; accepted for 8 heads"):
        fa.flash_attn_qkvpacked_func(qkv, num_heads_q=5)


@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16])
def test_combine(out):
    """Results over parts of the keys, one of them empty, to the result over all."""
    q, k, v = math.padded(dtype=torch.float32)
    whole, whole_lse = math.batch(q, k, v)
    parts = [fa.flash_attn_func(q, k[:, b:e], v[:, b:e], return_attn_probs=True) for b, e in ((0, 3), (3, 3), (3, 7))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    outs[1] = torch.nan
    place = None if out is None else torch.empty(whole.shape, dtype=out)
    got, lse = fa.flash_attn_combine(outs, lses.transpose(2, 3), place, out)
    assert got.dtype == (out or torch.float32) and (place is None or got is place)
    tolerance = 1e-2 if out is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), whole, rtol=tolerance, atol=tolerance)
    close(lse, whole_lse.transpose(1, 2))
    assert fa.flash_attn_combine(outs, lses.transpose(2, 3), out_dtype=torch.float16)[0].dtype == torch.float16


def test_combine_of_wide_heads():
    """More columns than attention takes, of parts that are no contiguous tensors, of which one has no keys."""
    (outs,), (lses,) = math.draw((6, 2, H, 3, 600), dtype=torch.float32), math.draw((3, 2, 2 * H, 3), dtype=torch.float32, seed=1)
    outs, lses = outs.transpose(2, 3)[::2], lses.transpose(2, 3)[..., :H]
    lses[1] = -torch.inf
    got, lse = fa.flash_attn_combine(outs, lses)
    close(got, (lses.softmax(0)[..., None] * outs).sum(0))
    close(lse, lses.logsumexp(0))


def test_there_is_no_scheduler_metadata():
    lengths = torch.tensor([3], dtype=torch.int32)
    for module in (fa, vllm_flash_attn):
        assert module.get_scheduler_metadata(1, 1, 3, 8, 2, 64, lengths, causal=True, num_splits=4) is None


REFUSED = {
    "flash_attn_func": ("qv", "q_descale", "k_descale", "v_descale", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
                        "block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices"),
    "flash_attn_varlen_func": ("qv", "q_descale", "k_descale", "v_descale", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors",
                               "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd", "gather_kv_indices"),
    "flash_attn_qkvpacked_func": ("q_descale", "k_descale", "v_descale"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, names in REFUSED.items() for name in names])
def test_what_is_not_there(function, name, monkeypatch):
    """By the argument's name, before anything is computed."""
    monkeypatch.setattr(fa.calls, "attention", lambda *args, **options: pytest.fail("it computed"))
    qkv = math.draw((2, 3, 3, H, D))[0]
    arguments = (qkv,) if function == "flash_attn_qkvpacked_func" else qkv.unbind(2)
    with pytest.raises(NotImplementedError, match=f"^{name} is given"):
        getattr(fa, function)(*arguments, **{name: torch.ones(1)})
    with pytest.raises(NotImplementedError, match="^attention_chunk is 128"):
        getattr(fa, function)(*arguments, attention_chunk=128)
