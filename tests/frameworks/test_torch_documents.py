"""fa_ext in transformers: packed documents, keywords, and heads that are too wide for it."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from transformers import Gemma2Config, GptOssConfig, LlamaConfig, ModernBertConfig  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _documents, _transformers  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)

SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)  # fmt: skip
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**SMALL | more),
    "gemma2": lambda **more: Gemma2Config(
        **SMALL | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=3, attn_logit_softcapping=3.0) | more
    ),
    "gpt-oss": lambda **more: GptOssConfig(
        **SMALL | dict(head_dim=8, sliding_window=3, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3) | more
    ),
}  # fmt: skip
LENGTHS = [5, 3, 6]


@pytest.fixture(autouse=True)
def registered():
    ft.register_transformers()
    _transformers._say_once.cache_clear()
    torch.manual_seed(0)


@pytest.fixture
def masks(monkeypatch):
    """The shapes of the masks that attention is given, or that it is given sequences."""
    shapes = []

    def spy(*args, **keywords):
        mask = keywords.get("mask")
        shapes.append("sequences" if "cu_seqlens_q" in keywords else None if mask is None else tuple(mask.shape))
        return ft.attention(*args, **keywords)

    monkeypatch.setattr(_transformers, "attention", spy)
    return shapes


def small_model(name, device, implementation="fa_ext", **more):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**more), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device).eval()


def packed(device, kind):
    """Tokens of all documents, their positions, and the keywords that tell the documents."""
    ids = torch.randint(2, 99, (1, sum(LENGTHS)), device=device)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].to(device, torch.int32)
    restarting = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    running = torch.arange(sum(LENGTHS), device=device)[None]
    more = {"lengths": lengths, "lengths and positions": lengths, "index": dict(seq_idx=index), "positions": {}}[kind]
    return ids, restarting if "positions" in kind else running, more


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "lengths and positions", "index", "positions"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_document_is_as_if_alone(device, name, kind, use_cache):
    model = small_model(name, device)
    ids, positions, more = packed(device, kind)
    cotangent = torch.randn(1, sum(LENGTHS), 99, device=device)
    parts = zip(ids.split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
    alone = [model(part, position_ids=at).logits for part, at in parts]
    (torch.cat(alone, 1) * cotangent).sum().backward()
    wanted = {label: parameter.grad.clone() for label, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    got = model(ids, position_ids=positions, use_cache=use_cache, **more).logits
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    (got * cotangent).sum().backward()
    for label, parameter in model.named_parameters():
        if parameter.grad is not None:
            limit = 1e-4 * wanted[label].abs().max().item()
            torch.testing.assert_close(parameter.grad, wanted[label], rtol=1e-3, atol=limit, msg=label)


@pytest.mark.parametrize("kind", ["lengths", "lengths and positions", "positions"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_have_no_mask(device, masks, name, kind):
    ids, positions, more = packed(device, kind)
    small_model(name, device)(ids, position_ids=positions, **more)
    assert masks == ["sequences"] * 2


def test_lengths_are_looked_at_once_for_all_layers(device, monkeypatch):
    """And again where they were written, or are those of other tokens."""
    model, found, looked = small_model("llama", device, num_hidden_layers=3), [], _documents._from_lengths
    monkeypatch.setattr(_documents, "_from_lengths", lambda *given: found.append(given) or looked(*given))
    ids, positions, more = packed(device, "lengths and positions")
    first = model(ids, position_ids=positions, **more).logits
    assert len(found) == 1
    assert torch.equal(model(ids, position_ids=positions, **more).logits, first) and len(found) == 1
    more["cu_seq_lens_q"][1] -= 1
    model(ids, position_ids=positions, **more)
    assert len(found) == 2
    model(ids, position_ids=positions, **more | {"cu_seq_lens_k": more["cu_seq_lens_k"].clone()})
    assert len(found) == 3
    model(torch.cat([ids, ids[:, :2]], 1), position_ids=torch.cat([positions, positions[:, :2]], 1), **more)
    assert len(found) == 4


def test_positions_that_go_on_are_one_document(device, masks):
    model = small_model("llama", device)
    ids = torch.randint(2, 99, (1, 9), device=device)
    positions = torch.arange(3, 12, device=device)[None]
    far = torch.tensor([[0, 1, 2, 30, 31, 32, 33, 34, 35]], device=device)
    for at in (positions, far):
        model(ids, position_ids=at)
        first = model(ids[:, :4], position_ids=at[:, :4])
        model(ids[:, 4:], position_ids=at[:, 4:], past_key_values=first.past_key_values)
    assert set(masks) == {None}
    assert masks.count(None) == 12


def test_documents_in_compiled_graphs(device, masks):
    torch._dynamo.reset()
    model = small_model("llama", device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("lengths", "positions"):
        ids, positions, more = packed(device, kind)
        wanted = model(ids, position_ids=positions, **more).logits
        torch.testing.assert_close(compiled(ids, position_ids=positions, **more).logits, wanted, rtol=1e-4, atol=1e-5)
    assert set(masks) == {"sequences"}


def test_an_encoder_takes_lengths(device):
    config = ModernBertConfig(**{n: x for n, x in SMALL.items() if n != "num_key_value_heads"}, local_attention=4,
                              global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=3)  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation="fa_ext").to(device).eval()
    ids, positions, more = packed(device, "lengths and positions")
    alone = [model(part).last_hidden_state for part in ids.split(LENGTHS, 1)]
    got = model(ids, position_ids=positions, **more).last_hidden_state
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_documents_of_fewer_queries_than_keys(device, window):
    """As flash implementations have it: the last query of a document stands at its last key."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    lengths_q, lengths_k = [1, 3, 2], [4, 3, 7]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(device) for lengths in (lengths_q, lengths_k))
    q, k, v = (torch.randn(1, 2, sum(n), 8, device=device) for n in (lengths_q, lengths_k, lengths_k))
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    mask = _transformers.make_mask(1, 6, 14, q_offset=8, mask_function=function, local_size=window, device=device)
    got, _ = _transformers._attend(None, q, k, v, mask, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    parts = zip(q.split(lengths_q, 2), k.split(lengths_k, 2), v.split(lengths_k, 2), strict=True)
    wanted = [ft.attention(*part, causal="bottom_right", window=window and (window - 1, None)) for part in parts]
    torch.testing.assert_close(got.transpose(1, 2), torch.cat(wanted, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("more", "message"), [
    (dict(cu_seq_lens_q=torch.tensor([0, 6])), "cu_seq_lens_k is None; accepted: cu_seq_lens_q and cu_seq_lens_k together"),
    (dict(cu_seq_lens_k=torch.tensor([0, 6])), "cu_seq_lens_q is None"),
    (dict(cu_seq_lens_q=torch.tensor([[0, 6]])), r"cu_seq_lens_q has shape \(1, 2\) and dtype torch.int64; accepted: \(documents"),
    (dict(cu_seq_lens_q=torch.tensor([0.0, 6.0])), "cu_seq_lens_q has shape .* and dtype torch.float32"),
    (dict(cu_seq_lens_q=torch.tensor([0, 6]), cu_seq_lens_k=torch.tensor([0, 6])), "given for a batch of 2; accepted: a batch of 1"),
    (dict(cu_seq_lens_q=torch.tensor([0, 6]), cu_seq_lens_k=torch.tensor([0, 1, 6])), "tells 1 documents and cu_seq_lens_k 2; accepted: as many"),
    (dict(seq_idx=torch.zeros(2, 5)), r"seq_idx has shape \(2, 5\), for 6 queries and 6 keys; accepted"),
    (dict(attention_mask=torch.ones(2, 6)), r"attention_mask has shape \(2, 6\); accepted"),
    (dict(output_attentions=True), "does not know output_attentions=True; accepted: None, or attn_implementation='eager'"),
    (dict(block_table=torch.zeros(2, 3)), r"does not know block_table=a tensor of shape \(2, 3\)"),
    (dict(cache="paged"), "does not know cache='paged'"),
])  # fmt: skip
def test_what_is_not_understood_says_so(device, more, message):
    q = torch.randn(2, 2, 6, 8, device=device)
    more = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    with pytest.raises(ValueError, match=message):
        _transformers._attend(None, q, q, q, **more)
    _transformers._attend(None, q, q, q, output_attentions=False, block_table=None, use_cache=True, max_length_q=6)


@pytest.mark.parametrize("lengths", [[1, 6], [0, 4, 3, 6], [0, 7]])
def test_lengths_that_are_none_are_refused_on_the_cpu(device, lengths):
    q, cu = torch.randn(1, 2, 6, 8, device=device), torch.tensor(lengths)
    with pytest.raises(ValueError, match="cu_seq_lens_q is .*; accepted: from 0 up to 6 at most, in order"):
        _transformers._attend(None, q, q, q, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_a_model_refuses_to_return_attentions(device):
    ids = torch.randint(2, 99, (1, 9), device=device)
    with pytest.raises(ValueError, match="output_attentions=True"):
        small_model("llama", device)(ids, output_attentions=True)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_wide_heads_are_computed_elsewhere(device, name, padding):
    """By transformers' sdpa or, with softcap or sinks, by the model's eager attention; a warning says so once."""
    ours = small_model(name, device, head_dim=320)
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    ids = torch.randint(2, 99, (2, 9), device=device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 1 - padding
    own = "transformers' sdpa" if name == "llama" else "the model's eager attention"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [model(ids, attention_mask=mask, labels=ids.where(mask.cumsum(1) > 1, -100)).loss for model in (ours, eager)]
    assert [str(one.message) for one in caught if "fa_ext" in str(one.message)] == [
        f"attn_implementation='fa_ext': head_dim is 320 and that of value 320; accepted: 1 to 256. {own} runs in fa_ext's place "
        "(this is said once)"
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    losses[0].backward()


def test_wide_heads_of_packed_documents(device):
    model = small_model("llama", device, head_dim=320)
    ids, positions, more = packed(device, "lengths and positions")
    alone = [model(part).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(model(ids, position_ids=positions, **more).logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_wide_heads_in_a_compiled_graph(device):
    torch._dynamo.reset()
    model = small_model("llama", device, head_dim=320)
    ids = torch.randint(2, 99, (2, 9), device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_wide_heads_without_another_attention(device):
    q = torch.randn(1, 2, 6, 320, device=device)
    with pytest.raises(NotImplementedError, match="head_dim is 320 and that of value 320, with softcap or sinks, in a Linear"):
        _transformers._attend(torch.nn.Linear(1, 1), q, q, q, softcap=3.0)
