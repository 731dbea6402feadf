"""Beside FlashAttention's functions: bert_padding, layers.rotary, and install(), which gives them their own names."""

import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from fa_ext.torch import flash_attn  # noqa: E402
from fa_ext.torch.flash_attn import bert_padding  # noqa: E402
from fa_ext.torch.flash_attn.layers import rotary  # noqa: E402
from tests.frameworks.support import flash_attn_math as math  # noqa: E402
from tests.frameworks.support.flash_attn_math import D, H, close, rotate  # noqa: E402

# ---- bert_padding ----

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_round_trip(dtype):
    (x,) = math.draw((3, 4, 2, 5), grad=True)
    mask = MASK.to(dtype)
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[MASK.bool()]) and indices.tolist() == [0, 1, 3, 8, 9, 10, 11]
    assert starts.tolist() == [0, 3, 3, 7] and starts.dtype == torch.int32 and longest == 4 and type(longest) is int
    assert used.tolist() == [3, 0, 4] and used.dtype == torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 4)
    kept = MASK.bool()[..., None, None]
    assert torch.equal(back, torch.where(kept, x, 0.0))
    (weight,) = math.draw((3, 4, 2, 5), seed=1)
    (gradient,) = torch.autograd.grad((back * weight).sum(), x)
    assert torch.equal(gradient, torch.where(kept, weight, 0.0))


def test_rows_that_are_there_and_not_used():
    (x,) = math.draw((3, 4, 2))
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert torch.equal(rows, x[(MASK + unused).bool()]) and len(indices) == 9
    assert starts.tolist() == [0, 4, 5, 9] and longest == 4 and used.tolist() == [3, 0, 4]


def test_concatenated_sequences():
    """A row of several sequences: each begins where the one before it ends."""
    (x,) = math.draw((3, 6, 2))
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :5], x[2]))) and starts.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)] and starts.dtype == torch.int32


def test_rows_by_index():
    (x,), indices = math.draw((6, 3), grad=True), torch.tensor([4, 0, 5])
    rows, rest = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and rest is x and torch.equal(bert_padding.index_first_axis(x, indices), rows)
    put = bert_padding.index_put_first_axis(rows, indices, 7)
    assert put.shape == (7, 3) and torch.equal(put[indices], rows) and (put[[1, 2, 3, 6]] == 0).all()
    (gradient,) = torch.autograd.grad(put.sum() * 2, x)
    assert gradient[:, 0].tolist() == [2, 0, 0, 0, 2, 2]


def test_what_others_import_from_it():
    """einops' functions, where it is installed; other names are no attributes."""
    einops = pytest.importorskip("einops")
    assert bert_padding.rearrange is einops.rearrange


def test_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'reduce'"):
        bert_padding.reduce  # noqa: B018


# ---- layers.rotary ----

COS, SIN = (f(torch.arange(20)[:, None] * 10.0 ** (-torch.arange(3) / 3)).double() for f in (torch.cos, torch.sin))
each_pairing = pytest.mark.parametrize("interleaved", [False, True])


def right(x, positions, interleaved, cos=COS, sin=SIN):
    """x (B, S, H, D), token by token."""
    tokens = [rotate(row, cos, sin, position, interleaved) for row, position in zip(x.flatten(0, 1), positions, strict=True)]
    return torch.stack(tokens).view(x.shape)


@each_pairing
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([2, 7])], ids=str)
def test_rotary(interleaved, inplace, offsets):
    (x,) = math.draw((2, 5, H, D))
    firsts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
    wanted, before = right(x, [first + i for first in firsts for i in range(5)], interleaved), x.clone()
    got = rotary.apply_rotary_emb(x, COS, SIN, interleaved, inplace, offsets)
    close(got, wanted)
    assert (got is x) == inplace and torch.equal(x, got if inplace else before)


@each_pairing
@pytest.mark.parametrize("offsets", [0, torch.tensor([2, 7, 17])], ids=str)
def test_rotary_of_packed_tokens(interleaved, offsets):
    """Tokens of no sequence, and beyond the tables, stay as they are."""
    (x,) = math.draw((10, H, D))
    firsts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 3
    got = rotary.apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=offsets, cu_seqlens=torch.tensor([1, 3, 3, 8]), max_seqlen=5)
    places = [firsts[0], firsts[0] + 1, *(firsts[2] + i for i in range(5))]
    for token, place in zip(range(1, 8), places, strict=True):
        close(got[token], rotate(x[token], COS, SIN, place, interleaved) if place < 20 else x[token])
    assert torch.equal(got[[0, 8, 9]], x[[0, 8, 9]])


@each_pairing
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_rotary(interleaved, inplace):
    """In place too, of a view."""

    def call(x):
        x = x.clone()
        part = x[:, :, 1:]
        turned = rotary.apply_rotary_emb(part, COS, SIN, interleaved, inplace, torch.tensor([2, 7]))
        return x if inplace else turned

    assert torch.autograd.gradcheck(call, math.draw((2, 3, 2, D), grad=True))


@each_pairing
@pytest.mark.parametrize("shape", [(2, 3, 3, 2, D), (2, 3, 4, D), (2, 3, 2, 2, D)], ids=["qkv", "heads", "kv"])
def test_gradients_of_rotary_in_place(interleaved, shape):
    def call(x):
        x = x.clone()
        if shape[2] == 2:
            return rotary.apply_rotary_emb_kv_(x, COS, SIN, interleaved, 1)
        return rotary.apply_rotary_emb_qkv_(x, COS, SIN, COS / 2, SIN / 2, interleaved, 1, None if len(shape) == 5 else 2)

    assert torch.autograd.gradcheck(call, math.draw(shape, grad=True))


@each_pairing
def test_the_forms_of_rotary_agree(interleaved):
    (x,) = math.draw((2, 5, H, D))
    wanted = rotary.apply_rotary_emb(x, COS, SIN, interleaved)
    assert torch.equal(rotary.apply_rotary_emb_torch(x, COS[:5], SIN[:5], interleaved), wanted)
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    columns = x[..., :6]
    wide = [torch.repeat_interleave(t[:5], 2, -1) if interleaved else torch.cat((t[:5],) * 2, -1) for t in (COS, SIN)]
    cos, sin = (t[:, None] for t in wide)
    close(columns * cos + rotary.rotate_half(columns, interleaved) * sin, wanted[..., :6])


@each_pairing
@pytest.mark.parametrize("of_k", [None, (COS / 2, SIN * 3)], ids=["one table", "two tables"])
def test_rotary_of_qkv_in_place(interleaved, of_k):
    cos_k, sin_k = of_k or (None, None)
    (qkv,) = math.draw((2, 5, 3, H, D))
    before, positions = qkv.clone(), [i + 2 for _ in range(2) for i in range(5)]
    tables = {} if of_k is None else {"cos": cos_k, "sin": sin_k}
    assert rotary.apply_rotary_emb_qkv_(qkv, COS, SIN, cos_k, sin_k, interleaved, 2) is qkv
    close(qkv[:, :, 0], right(before[:, :, 0], positions, interleaved))
    close(qkv[:, :, 1], right(before[:, :, 1], positions, interleaved, **tables))
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    (heads,) = math.draw((2, 5, 8, D))
    before = heads.clone()
    assert rotary.apply_rotary_emb_qkv_(heads, COS, SIN, cos_k, sin_k, interleaved, torch.tensor([2, 2]), num_heads_q=4) is heads
    close(heads[:, :, :4], right(before[:, :, :4], positions, interleaved))
    close(heads[:, :, 4:6], right(before[:, :, 4:6], positions, interleaved, **tables))
    assert torch.equal(heads[:, :, 6:], before[:, :, 6:])
    (kv,) = math.draw((2, 5, 2, H, D))
    before = kv.clone()
    assert rotary.apply_rotary_emb_kv_(kv, COS, SIN, interleaved, 2) is kv
    close(kv[:, :, 0], right(before[:, :, 0], positions, interleaved))
    assert torch.equal(kv[:, :, 1], before[:, :, 1])


def test_half_types_round_once():
    (x,) = math.draw((2, 5, H, D), dtype=torch.bfloat16)
    cos, sin = COS.float(), SIN.float()
    got = rotary.apply_rotary_emb(x, cos, sin)
    wanted = rotary.apply_rotary_emb(x.float(), cos, sin).bfloat16()
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)


@pytest.mark.parametrize("scale_base", [None, 16])
def test_the_module(scale_base):
    """Tables are for the longest sequence so far; with scale_base q and k have tables of their own."""
    module = rotary.RotaryEmbedding(6, base=100.0, scale_base=scale_base, pos_idx_in_fp32=False)
    assert not module.state_dict()
    (qkv,) = math.draw((2, 5, 3, H, D))
    before = qkv.clone()
    angle = torch.arange(9)[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    places = torch.arange(9)[:, None]
    ratio = torch.ones(3) if scale_base is None else (torch.arange(0, 6, 2) + 2.4) / 8.4
    scale = ratio ** ((places - 9 // 2) / (scale_base or 1))
    tables = (angle.cos() * scale, angle.sin() * scale), (angle.cos() / scale, angle.sin() / scale)
    positions = [i + 4 for _ in range(2) for i in range(5)]
    assert module(qkv, seqlen_offset=4) is qkv
    q, k = (right(before[:, :, n], positions, False, *table) for n, table in enumerate(tables))
    torch.testing.assert_close(qkv[:, :, 0], q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(qkv[:, :, 1], k, rtol=1e-5, atol=1e-5)
    queries, kv = before[:, :, 0].clone(), before[:, :, 1:].clone()
    got = module(queries, kv, seqlen_offset=torch.tensor([4, 4]), max_seqlen=9)
    assert got[0] is queries and got[1] is kv
    torch.testing.assert_close(queries, q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv[:, :, 0], k, rtol=1e-5, atol=1e-5)
    kept = module._cos_cached
    module(before[:, :2].clone())
    assert module._cos_cached is kept
    module(before[:, :2].float())
    assert module._cos_cached.dtype == torch.float32


def test_bad_input_of_rotary():
    (x,), (qkv,) = math.draw((2, 5, H, D)), math.draw((2, 5, 7, D))
    for call, match in (
        (lambda: rotary.apply_rotary_emb(x, COS, SIN, seqlen_offsets=16), "cos has 20 rows for 5 tokens and seqlen_offsets 16"),
        (lambda: rotary.apply_rotary_emb(x[..., :4], COS, SIN), "cos has 3 columns; accepted: 1 to 2"),
        (lambda: rotary.apply_rotary_emb_qkv_(qkv, COS, SIN), "needs num_heads_q"),
        (lambda: rotary.apply_rotary_emb_qkv_(qkv, COS, SIN, num_heads_q=4), "num_heads_q is 4; accepted for 7 heads"),
        (lambda: rotary.apply_rotary_emb_kv_(qkv, COS, SIN), r"kv has shape \(2, 5, 7, 8\)"),
        (lambda: rotary.RotaryEmbedding(6)(x, seqlen_offset=torch.tensor([1, 2])), "accepted: with max_seqlen"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


# ---- install ----


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_install_and_uninstall():
    """In a process of its own: every way to import, what find_spec says, a second call, and the way back."""
    python("""
import importlib.util, sys, torch
import fa_ext.torch
assert not any("flash" in name and name.startswith("fa_ext") for name in sys.modules)
import fa_ext.torch.flash_attn as ours
ours.install()
before = dict(sys.modules)
ours.install()
assert dict(sys.modules) == before

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, __version__
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb, RotaryEmbedding
import flash_attn.layers.rotary as rotary
import flash_attn_interface
assert flash_attn is ours and flash_attn.bert_padding.pad_input is pad_input and rotary.RotaryEmbedding is RotaryEmbedding
assert __version__ == "2.8.4" and flash_attn_interface.flash_attn_combine
for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary", "flash_attn_interface"):
    assert importlib.util.find_spec(name) is not None
try:
    import flash_attn.losses
except ModuleNotFoundError as error:
    assert error.name == "flash_attn.losses"
else:
    raise AssertionError

x, mask = torch.randn(2, 4, 3, 2, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
rows, indices, starts, longest, _ = unpad_input(x, mask)
out = pad_input(flash_attn_varlen_qkvpacked_func(rows, starts, longest, causal=True), indices, 2, 4)
right = [flash_attn_func(*x[b : b + 1, :n].unbind(2), causal=True)[0] for b, n in ((0, 3), (1, 2))]
torch.testing.assert_close(out[0, :3], right[0])
torch.testing.assert_close(out[1, :2], right[1])

ours.uninstall()
ours.uninstall()
assert not any(name.partition(".")[0] in ("flash_attn", "flash_attn_interface") for name in sys.modules)
assert importlib.util.find_spec("flash_attn") is None or "fa_ext" not in importlib.util.find_spec("flash_attn").origin
ours.install()
import flash_attn
assert flash_attn is ours
""")


def test_install_refuses_where_flash_attn_is_imported(monkeypatch):
    theirs = [types.ModuleType(name) for name in ("flash_attn", "flash_attn.ops")]
    for module in theirs:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match=r"flash_attn, flash_attn.ops.* of FlashAttention itself is imported; accepted: install\(\) before"):
        flash_attn.install()
    assert "flash_attn.bert_padding" not in sys.modules
    flash_attn.uninstall()
    assert [sys.modules[module.__name__] for module in theirs] == theirs


def test_install_in_a_child_of_a_loader():
    python("""
import torch
from fa_ext.torch.flash_attn import install

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, n):
        install()
        from flash_attn.bert_padding import unpad_input
        return unpad_input(torch.ones(1, 3, 2), torch.tensor([[1, n, 0]]))[2]

if __name__ == "__main__":
    install()
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, batch_size=None, multiprocessing_context="fork")
    assert [x.tolist() for x in loader] == [[0, 1], [0, 2]]
""")
