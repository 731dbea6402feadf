"""fa_ext as an attention implementation of transformers: tiny models of random weights against eager."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, ModernBertConfig, masking_utils  # noqa: E402

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _masks, _transformers  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)

SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=3.0),
    "gpt-oss": lambda: GptOssConfig(**SMALL, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
                                    initializer_range=0.3),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=4),
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    ft.register_transformers()
    torch.manual_seed(0)


def models(name, device):
    """(eager, ours) of the same weights, away from their initial values."""
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("fa_ext")
    assert ours.config._attn_implementation == "fa_ext" and eager.config._attn_implementation == "eager"
    return eager, ours


def batch(padding, device):
    ids = torch.randint(2, 99, (3, 13), device=device)
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 4, 9)):
        if padding == "left":
            mask[row, :count] = 0
        elif padding == "right":
            mask[row, 13 - count :] = 0
    # The prediction of a token of padding is nobody's: it sees nothing here, and a mean of everything in eager.
    before = torch.cat((mask[:, :1], mask[:, :-1]), 1)
    labels = torch.where((mask == 1) & (before == 1), ids, -100)
    return {"input_ids": ids, "labels": labels} | ({"attention_mask": mask} if padding != "absent" else {})


@pytest.fixture
def masks(monkeypatch):
    """The shapes of the masks that attention is given."""
    shapes = []

    def spy(*args, **keywords):
        mask = keywords["mask"]
        shapes.append(None if mask is None else tuple(mask.shape))
        return ft.attention(*args, **keywords)

    monkeypatch.setattr(_transformers, "attention", spy)
    return shapes


@pytest.mark.parametrize("padding", ["absent", "none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_eager(device, name, padding, masks):
    eager, ours = models(name, device)
    inputs = batch(padding, device)
    wanted, got = eager(**inputs).loss, ours(**inputs).loss
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    wanted.backward(), got.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), label
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=2e-5, msg=lambda m: f"{label}: {m}")  # noqa: B023
    assert set(masks) == {None if padding in ("absent", "none") else (3, 1, 1, 13)}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", CONFIGS)
def test_generates_the_same_tokens(device, name, cache, padding, masks):
    eager, ours = models(name, device)
    inputs = {n: x for n, x in batch(padding, device).items() if n != "labels"}
    options = dict(max_new_tokens=12, do_sample=False, use_cache=cache is not None, disable_compile=True)
    if cache:
        options["cache_implementation"] = cache
    wanted, got = (model.eval().generate(**inputs, **options) for model in (eager, ours))
    assert torch.equal(got, wanted) and got.shape[1] == 25
    assert {shape[2] for shape in masks if shape} <= {1}  # none of all pairs


def test_packed_sequences(device, masks):
    eager, ours = models("llama", device)
    ids = torch.randint(2, 99, (2, 12), device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], list(range(12))], device=device)
    wanted, got = (model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in (eager, ours))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert set(masks) == {(2, 1, 12, 12)}


@pytest.mark.parametrize("floating", [False, True])
def test_a_mask_of_the_user(device, floating):
    eager, ours = models("llama", device)
    ids = torch.randint(2, 99, (2, 9), device=device)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=device).tril().clone()
    mask[:, :, 5:, 1] = False
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    wanted = eager(input_ids=ids, attention_mask=additive).logits
    got = ours(input_ids=ids, attention_mask=additive if floating else mask).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_bidirectional_windows(device):
    config = ModernBertConfig(**{n: x for n, x in SMALL.items() if n != "num_key_value_heads"}, local_attention=4,
                              global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=3)  # fmt: skip
    eager = transformers.AutoModel.from_config(config, attn_implementation="eager").to(device).eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("fa_ext")
    for padding in ("none", "left", "right"):
        inputs = {n: x for n, x in batch(padding, device).items() if n != "labels"}
        wanted, got = (model(**inputs).last_hidden_state for model in (eager, ours))
        seen = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[seen], wanted[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_compiled(device, name):
    torch._dynamo.reset()
    eager, ours = models(name, device)
    if name == "gpt-oss":  # its experts of the CPU cannot be traced whole
        eager, ours = eager.model.layers[0].self_attn, ours.model.layers[0].self_attn
        x, cos = torch.randn(2, 9, 32, device=device), torch.randn(2, 9, 4, device=device)
        inputs = dict(hidden_states=x, position_embeddings=(cos, cos.flip(1)), attention_mask=None)
        ours.config._attn_implementation = "fa_ext"
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")(**inputs)[0]
        torch.testing.assert_close(compiled, ours(**inputs)[0], rtol=1e-4, atol=1e-4)
        return
    for padding in ("none", "left"):
        inputs = batch(padding, device)
        loss = torch.compile(ours, fullgraph=True, backend="aot_eager")(**inputs).loss
        torch.testing.assert_close(loss, eager(**inputs).loss, rtol=1e-4, atol=1e-4)
        loss.backward()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_static_cache_in_a_compiled_model(device, name):
    torch._dynamo.reset()
    eager, ours = models(name, device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, seen = batch("left", device)["input_ids"], batch("left", device)["attention_mask"]
    found = []
    for model in (eager, compiled):
        cache, step = transformers.StaticCache(config=eager.config, max_cache_len=20), []
        for tokens in (ids, ids[:, 3:4], ids[:, 5:6]):
            told = torch.cat((seen, seen.new_ones(len(seen), len(step))), dim=1)
            with torch.no_grad():
                step.append(model(input_ids=tokens, attention_mask=told, past_key_values=cache).logits[:, -1])
        found.append(torch.stack(step))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_half_models(device):
    _, ours = models("gpt-oss", device)
    loss = ours.bfloat16()(**batch("left", device)).loss
    loss.backward()
    sinks = ours.model.layers[0].self_attn.sinks
    assert loss.isfinite() and sinks.grad.isfinite().all() and bool(sinks.grad.any())


#: Of a mask in which each query has an interval of keys: a static cache's, whose last query does not stand at the last key.
IN_INTERVALS = "intervals"


def mask_arguments():
    causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function
    both, around = masking_utils.bidirectional_mask_function, masking_utils.sliding_window_bidirectional_mask_function
    padded = torch.ones(2, 6, dtype=torch.bool)
    padded[1, :2] = False
    longer = torch.ones(2, 8, dtype=torch.bool)
    # what is asked for, and the window where the mask is no mask of all pairs
    return [
        (dict(mask_function=causal), (None, 0)),
        (dict(mask_function=causal, attention_mask=padded), (None, 0)),
        (dict(mask_function=causal, attention_mask=torch.ones_like(padded)), (None, 0)),
        (dict(mask_function=causal, allow_is_causal_skip=False), (None, 0)),
        (dict(mask_function=causal, kv_length=9, q_offset=3), (None, 0)),
        (dict(mask_function=causal, kv_length=9), IN_INTERVALS),
        (dict(mask_function=causal, q_offset=torch.tensor(0)), IN_INTERVALS),
        (dict(mask_function=causal, q_offset=torch.tensor(3), kv_length=12, attention_mask=longer), IN_INTERVALS),
        (dict(mask_function=sliding(3), local_size=3, q_offset=torch.tensor(2), kv_length=9), IN_INTERVALS),
        (dict(mask_function=sliding(3), local_size=3, q_offset=torch.tensor(6), kv_length=7, kv_offset=4), IN_INTERVALS),
        (dict(mask_function=around(2), local_size=2, kv_length=9), IN_INTERVALS),
        (dict(mask_function=sliding(3), local_size=3, attention_mask=padded), (2, 0)),
        (dict(mask_function=sliding(3), local_size=4), None),  # not the window that is said
        (dict(mask_function=sliding(3)), None),
        (dict(mask_function=sliding(4), local_size=4, q_length=1, q_offset=7, kv_length=4, kv_offset=4, attention_mask=longer),
         (3, 0)),
        (dict(mask_function=masking_utils.and_masks(causal, lambda b, h, i, j: j != 1)), None),
        (dict(mask_function=both), (None, None)),
        (dict(mask_function=both, attention_mask=padded, allow_is_bidirectional_skip=True), (None, None)),
        (dict(mask_function=both, kv_length=8, attention_mask=longer), (None, None)),
        (dict(mask_function=around(2), local_size=2), (2, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(20))
def test_a_mask_says_what_eagers_holds(device, case, dtype):
    more, window = mask_arguments()[case]
    more = dict(batch_size=2, q_length=6, kv_length=6, device=device, dtype=dtype) | {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()
    }
    mask, wanted = _masks.make_mask(**more), masking_utils.eager_mask(**more)
    pattern = mask.fa_ext_pattern
    assert pattern.seen is None or window is None or pattern.seen.shape == (2, 1, 1, more["kv_length"])
    assert (pattern.intervals is None) == (window is not IN_INTERVALS) and (window or pattern.seen.shape == wanted.shape)
    assert (pattern.left, pattern.right) == ((None, None) if window in (None, IN_INTERVALS) else window)
    allowed = pattern.allowed(*wanted.shape[2:], wanted.device)
    assert torch.equal((wanted == 0) if allowed is None else allowed.expand(wanted.shape), wanted == 0)
    assert isinstance(mask, torch.Tensor) and (mask.shape, mask.dtype, mask.device) == (wanted.shape, dtype, wanted.device)
    assert mask.fa_ext_pattern is not None and mask.to(dtype) is mask
    assert torch.equal(mask + 1, wanted + 1) and mask.fa_ext_pattern is None


def test_the_mask_of_a_static_cache_reads_nothing(device, monkeypatch):
    """A look at the padding or at the offset would wait for a device at every token."""
    seen, offset = torch.ones(2, 12, dtype=torch.bool, device=device), torch.tensor(3, device=device)
    for name in ("__bool__", "__int__", "__index__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor was read"))
    assert _masks.make_mask(2, 6, 12, q_offset=offset, attention_mask=seen, device=device).fa_ext_pattern.intervals is not None


def test_there_is_no_mask_where_eager_has_none(device):
    more = dict(batch_size=2, q_length=6, kv_length=6, mask_function=masking_utils.bidirectional_mask_function, device=device)
    for given in (None, torch.ones(2, 6, dtype=torch.bool, device=device)):
        assert _masks.make_mask(**more, attention_mask=given, allow_is_bidirectional_skip=True) is None
        assert masking_utils.eager_mask(**more, attention_mask=given, allow_is_bidirectional_skip=True) is None


@pytest.mark.parametrize("change", [
    lambda mask: mask[:, :, :, :].add_(0),
    lambda mask: mask.masked_fill_(mask == 0, -1.0),
    lambda mask: mask[..., 2:3].fill_(-3e38),
    lambda mask: mask * 0.5,
    lambda mask: mask.expand(-1, 4, -1, -1),
    lambda mask: torch.where(mask == 0, 0.25, mask),
])  # fmt: skip
def test_what_a_model_makes_of_a_mask_counts(device, change):
    """Attention under a mask that a model has changed, in place or not, is eager's under eager's mask with the same change."""
    more = dict(batch_size=2, q_length=6, kv_length=6, device=device)
    q, k, v = torch.randn(3, 2, 4, 6, 8, device=device)
    outs = []
    for mask in (_masks.make_mask(**more), masking_utils.eager_mask(**more)):
        changed = change(mask)
        for one in (mask, changed):  # a change in place is one of both
            outs.append(_transformers._attend(None, q, k, v, one)[0])
        weights = torch.softmax(q @ k.mT / 8**0.5 + changed, -1)
        torch.testing.assert_close(outs[-1], (weights @ v).transpose(1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[:2], outs[2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("said", [None, False, True])
def test_is_causal_counts_where_a_caller_says_it_and_there_is_no_mask(device, said):
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 2, 4, 6, 8, device=device)
    got, _ = _transformers._attend(module, q, k, v, None, is_causal=said)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(said)).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    none = _masks.make_mask(2, 6, 6, mask_function=masking_utils.bidirectional_mask_function, device=device)
    got, _ = _transformers._attend(module, q, k, v, none, is_causal=said)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if said:
        with pytest.raises(ValueError, match="is_causal is True without attention_mask, for 5 queries and 6 keys"):
            _transformers._attend(module, q[:, :, :5], k, v, None, is_causal=True)
        assert _transformers._attend(module, q[:, :, :1], k, v, None, is_causal=True)[0].shape == (2, 1, 4, 8)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_layers(device, name, padding, masks):
    """Masks go into graphs that are compiled layer by layer, and keep what they say."""
    torch._dynamo.reset()
    eager, ours = models(name, device)
    for i, layer in enumerate(ours.model.layers):
        ours.model.layers[i] = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = batch(padding, device)
    loss, wanted = ours(**inputs).loss, eager(**inputs).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert set(masks) == {None if padding == "none" else (3, 1, 1, 13)}


def test_a_compiled_model_has_no_mask_of_all_pairs(device, masks):
    torch._dynamo.reset()
    eager, ours = models("mistral", device)
    for padding in ("none", "left"):
        inputs = batch(padding, device)
        loss = torch.compile(ours, fullgraph=True, backend="aot_eager")(**inputs).loss
        torch.testing.assert_close(loss, eager(**inputs).loss, rtol=1e-4, atol=1e-4)
    assert {shape and shape[2:] for shape in masks} == {(1, 13)}  # a graph reads no mask, and so knows of none that says nothing


def test_without_transformers(device, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers>=5"):
        ft.register_transformers()
