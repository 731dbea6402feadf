"""Every family of models that transformers ships, as small models of random weights: fa_ext against eager attention, with
padding on the left and on the right, without, and from a cache."""

import collections
import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

import fa_ext.torch as ft  # noqa: E402
from fa_ext.torch import _transformers  # noqa: E402
from tests.frameworks.support import transformers_families as families  # noqa: E402

#: Outputs of two right implementations differ by some 1e-6; a query that sees one key too many changes them by 1e-2 and more.
LIMIT = 1e-3
#: Models that are left out though they run; what does not run says why itself.
LEFT_OUT = {
    "grounding-dino": "gives attention a boolean mask, which eager adds to the scores as 0 and 1",
    "mm-grounding-dino": "gives attention a boolean mask, which eager adds to the scores as 0 and 1",
}
#: Families that were once wrong in silence, and those that most people run: none of them may drop out.
NEVER_LEFT_OUT = (
    "bart bert bigbird_pegasus clap_text_model clip deepseek_v3 gemma2 gemma3_text gemma4_text git gpt2 gpt_oss llama mistral "
    "mixtral modernbert nllb-moe phimoe qwen2 qwen2_vl qwen3 qwen3_moe roberta siglip t5 vit whisper"
).split()
#: The outcome of each model: compared, with attention of fa_ext or eager's alone, or left out.
outcomes = {}


@pytest.fixture(autouse=True)
def registered():
    """With one thread: what is small is not faster with more."""
    ft.register_transformers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """How often fa_ext computed attention."""
    counter = collections.Counter()

    def spy(*args, **keywords):
        counter["attention"] += 1
        return ft.attention(*args, **keywords)

    monkeypatch.setattr(_transformers, "attention", spy)
    return counter


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)


def continued(model, inputs):
    """Logits of the last tokens after a cache of those before, or None where a model takes no such cache."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = run(model, {"input_ids": ids[:, :8], "attention_mask": mask[:, :8], "use_cache": True})
    name = next((name for name in ("past_key_values", "cache") if getattr(first, name, None) is not None), None)
    return name and run(model, {"input_ids": ids[:, 8:], "attention_mask": mask, name: first[name]}).logits


def with_fa_ext(model):
    """The same model with attention of fa_ext."""
    try:
        ours = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="fa_ext").eval()
        ours.load_state_dict(model.state_dict())
    except Exception:  # noqa: BLE001  a model that picks a class by the implementation's name
        ours = copy.deepcopy(model)
        ours.set_attn_implementation("fa_ext")
    return ours


@pytest.mark.parametrize(("kind", "name"), families.all_models())
def test_every_family_is_what_eager_makes_it(kind, name, calls):
    def leave_out(reason):
        outcomes[kind, name] = None
        pytest.skip(reason)

    model, inputs, wanted = families.working_model(kind, name)
    if model is None:
        leave_out(inputs)
    if kind in LEFT_OUT:
        leave_out(LEFT_OUT[kind])
    bare = {key: x for key, x in inputs.items() if key not in ("attention_mask", "decoder_attention_mask")}
    bare |= {key: x.clamp_min(3) for key, x in bare.items() if key in ("input_ids", "decoder_input_ids")}
    cases = [(inputs, wanted, run)]
    if bare.keys() != inputs.keys():
        cases.append((bare, run(model, bare), run))
        try:
            cases.append((inputs, continued(model, inputs), continued))
        except Exception:  # noqa: BLE001  a model without such a cache
            pass
    ours, compared = with_fa_ext(model), 0
    for given, wanted, how in cases:
        if not all(x.isfinite().any() for _, x in families.tensors(wanted)):
            leave_out("eager gives numbers that are not finite")
        try:
            got = how(ours, given)
        except ValueError as error:
            if "does not know" not in str(error):
                raise
            leave_out(str(error))
        difference, count = families.difference(wanted, got, given)
        if difference > LIMIT and families.difference(wanted, how(model, given), given)[0] > LIMIT:
            leave_out("eager differs from eager")
        assert difference <= LIMIT, f"{how.__name__}({', '.join(given)}): {difference}"
        compared += count
    if not compared:
        leave_out("nothing in its output is of a token, or a number")
    outcomes[kind, name] = bool(calls)


def test_no_family_drops_out_unseen():
    if len(outcomes) < len(families.all_models()):
        pytest.skip("not all families ran")
    compared = [outcome for outcome in outcomes.values() if outcome is not None]
    assert len(compared) >= 560 and sum(compared) >= 480, (len(compared), sum(compared))
    assert {kind for kind in NEVER_LEFT_OUT if all(outcomes[key] is None for key in outcomes if key[0] == kind)} == set()


@pytest.mark.parametrize("kind", ["llama", "bert", "t5", "gpt_oss", "phimoe", "nllb-moe", "clap_text_model", "git", "modernbert"])
def test_gradients(kind):
    name = next(name for one, name in families.all_models() if one == kind)
    model, inputs, wanted = families.working_model(kind, name)
    ours = with_fa_ext(model)
    seen = inputs["decoder_attention_mask" if "decoder_attention_mask" in inputs else "attention_mask"].bool()
    cotangent = torch.randn(wanted[0][seen].shape, generator=torch.Generator().manual_seed(2))
    for one in (model, ours):
        (one(**inputs)[0][seen] * cotangent).sum().backward()
    largest = max(x.grad.abs().max().item() for x in model.parameters() if x.grad is not None)
    for (label, a), b in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), label
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5 * largest, msg=lambda m: f"{label}: {m}")  # noqa: B023


@pytest.mark.parametrize("kind", ["llama", "bert", "phimoe", "git"])
def test_a_mask_that_says_nothing_is_seen(kind, monkeypatch):
    """The comparison finds a fault."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = next(name for one, name in families.all_models() if one == kind)
    model, inputs, wanted = families.working_model(kind, name)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "fa_ext", lambda *args, **keywords: None)
    difference, count = families.difference(wanted, run(with_fa_ext(model), inputs), inputs)
    assert count and difference > 10 * LIMIT
