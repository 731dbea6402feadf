"""Every family of models that transformers ships: a small model of each, found in transformers' own tables, and what it is
called with. A family that a later release adds is here by itself."""

import copy
import dataclasses
import importlib
import inspect
import math
import re

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

BATCH, TOKENS, VOCABULARY = 3, 12, 99
#: More parameters than this is no small model.
LARGEST = 4_000_000

#: The settings that a family needs beside small numbers.
HINTS = {
    "bamba": {"attn_layer_indices": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 64},
    "nemotron_h": {"layer_types": ["mamba", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
KV_HEADS = re.compile(r"kv_heads|key_value_heads|multi_query_group_num|^n_head_kv$")
TOKENS_OF = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "pad_index": 0, "pad_idx": 0}
#: The new value of a whole number in a configuration, by its name: the first that matches; None leaves it.
SIZES = [
    (re.compile(name), size)
    for name, size in (
        (r"^audio_channels$|num_feat_extract_layers|^expand$|mamba_expand", None),
        (r"token_id$|token_index$|_id$", 95),
        (r"window_size$|^sliding_window$|chunk_size$|^local_attention$|^window_size$", 4),
        (r"chunk_size_feed_forward", 0),
        (KV_HEADS.pattern, 2),
        (r"mamba_d_head|mamba_head_dim", 16),
        (r"rope_head_dim|^rotary_dim$", 4),
        (r"^qk_head_dim$", 12),
        (r"head_dim|^d_kv$|^d_head$|attention_head_size|^kv_channels$", 8),
        (r"heads?$", 4),
        (r"first_k_dense_replace|num_dense_layers|layer_step$|layer_(period|offset)$|sparse_step$|first_full_attention_layers|"
         r"last_full_attention_layers|shared_layers", 1),
        (r"layers?$|^depth$|_depth$", 2),
        (r"vocab_size|^n_vocab|embeddings_size$", VOCABULARY),
        (r"codebook_size", 64),
        (r"^(mamba_)?n_?groups$", 2),
        (r"topk_group|^n_group$|num_nextn_predict_layers|num_mtp_layers", 1),
        (r"experts_per_tok|^top_k$|topk$|moe_k$|router_topk", 2),
        (r"experts$|num_hash|num_centroids", 4),
        (r"position_embeddings$|_positions$|max_seq_len|^n_ctx$|seq_length|position_embedding_size|^max_length$|max_text_len|"
         r"context_length", 64),
        (r"image_size|^input_size$|pretrain_image_size|max_img_size|resolution", 16),
        (r"temporal_patch_size|tubelet_size|merge_size", 2),
        (r"patch_size", 4),
        (r"num_frames|frames_per_clip", 2),
        (r"num_mel_bins|n_mels?$|mel_bins|input_feat_per_channel", 16),
        (r"lora_rank|_rank$", 16),
        (r"num_queries|num_query_tokens|num_latents|num_detection_tokens|num_image_tokens|num_prompts", 6),
        (r"num_position_embeddings", 64),
        (r"intermediate|ffn|_inner$|mlp_dim|^d_ff$|dim_ff|dim_feedforward|feed_?forward_(size|dim|hidden)|^dff$", 48),
        (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|project(ion|or)_\w*(dim|size)|^dim$|hidden_dim|hidden_channels|"
         r"_width$|embedding_dim|emb_dim|^d_latents$|out_hidden|_channels$|conv_dim|feature_size|latent_dim", 32),
    )
]  # fmt: skip
#: The new value of each number of a list, where every one is positive.
LISTS = [
    (re.compile(name), size)
    for name, size in (
        (r"^depths$|stage_numb_of_layers|^num_layers$|num_block_repeats|_layers$", 1),
        (r"heads$", 4),
        (r"hidden_sizes|embed_dims|_channels$|conv_dim$|tdnn_dim|dims$", 32),
        (r"^image_size$|^input_size$", 16),
        (r"^patch_size$", 4),
    )
]


def all_models():
    """(model type, name of its class): with a head for causal language models and for pairs of texts, and the bare model, which
    is an encoder where there is one. None is the class of a part of larger models that no table holds."""
    tables = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    found = []
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        names = [names for table in tables if (names := table.get(kind))]
        found += [(kind, name) for one in names or [None] for name in (one if isinstance(one, tuple | list) else [one])]
    return list(dict.fromkeys(found))


def _model_class(kind, name):
    if name is not None:
        return getattr(transformers, name)
    config = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[kind])
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel) and one.config_class is config:
            if "forward" in vars(one):
                return one
    raise LookupError(f"no model of {config.__name__} in {module.__name__}")


def shrunk(values, windows, groups):
    """The dictionary of a configuration with small numbers in it, also in the configurations inside. ``windows``: with sliding
    windows where there may be some; ``groups``: several heads have one of keys and values."""
    layers, kept = values.get("num_hidden_layers"), None
    lists = (x for x in values.values() if type(x) is list and len(x) == layers)
    kinds = next((x for x in lists if all(type(one) is str for one in x)), None)
    if kinds:  # one layer of each kind, two at least
        kept = sorted({kinds.index(kind) for kind in kinds})
        kept += list(range(kept[-1] + 1, layers))[: max(0, 2 - len(kept))]
    small = {}
    for name, value in values.items():
        if name in ("id2label", "label2id"):
            continue
        if name == "per_layer_config" and value:
            small[name] = {kept.index(int(k)): shrunk(x, windows, groups) for k, x in value.items() if int(k) in kept}
        elif isinstance(value, dict):
            small[name] = {int(k) if k.isdigit() else k: x for k, x in shrunk(value, windows, groups).items()}
        elif kept and isinstance(value, list) and len(value) == layers:
            small[name] = [value[i] for i in kept]
        elif name == "mrope_section" and value:
            small[name] = [2, 1, 1]
        elif name in TOKENS_OF:
            small[name] = value if value is None else TOKENS_OF[name]
        elif type(value) is int and value > 0:
            small[name] = next((size or value for rule, size in SIZES if rule.search(name)), value)
            if not groups and KV_HEADS.search(name):
                small[name] = 4
        elif type(value) in (list, tuple) and value and all(type(x) is int and x > 0 for x in value):
            small[name] = [next((size for rule, size in LISTS if rule.search(name)), x) for x in value]
        else:
            small[name] = value
    if kept:
        small["num_hidden_layers"] = len(kept)
    if windows and "sliding_window" in small and small["sliding_window"] is None:
        small["sliding_window"] = 4
        if "use_sliding_window" in small:
            small["use_sliding_window"] = True
            if isinstance(small.get("layer_types"), list):
                small |= {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    return small


def small_configs(kind):
    """Small configurations of a model type, one of which may make a model: out of all that a configuration holds, and out of
    what its class declares, from which it finds the rest itself."""
    cls = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[kind])
    for whole, windows, groups, filled in ((1, 1, 1, 0), (0, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 1)):
        values = cls().to_dict() if whole else _declared(cls())
        values = shrunk(_filled(values) if filled else values, windows, groups)
        yield lambda: cls.from_dict(values | HINTS.get(kind, {}))  # noqa: B023


def _filled(values):
    """With a value for what has to be said and is None, and for what is right only beside the sizes of a large model."""
    new = {name: _filled(x) if isinstance(x, dict) else x for name, x in values.items()}
    sizes = dict(num_key_value_heads=4, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, head_dim=8)
    for name, size in sizes.items():
        if name in new and new[name] is None:
            new[name] = size
    if "rope_parameters" in new:
        new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return new


def _declared(config):
    values = {"model_type": config.model_type}
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        inner = vars(config).get(field.name)
        if isinstance(inner, transformers.PreTrainedConfig):
            values[field.name] = _declared(inner)
        elif default is not dataclasses.MISSING:
            values[field.name] = default
    return values


def small_model(cls, config):
    """A small model of random weights for eager attention."""
    with torch.device("meta"):
        size = sum(x.numel() for x in cls._from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def working_model(kind, name):
    """(model, inputs, output) of the first small model of a family that eager attention runs; or (None, why not, None)."""
    reasons = []
    try:
        cls = _model_class(kind, name)
        for make in small_configs(kind):
            try:
                config = make()
                if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
                    config.is_decoder = True
                model = small_model(cls, config)
            except Exception as error:  # noqa: BLE001
                reasons.append(_first_line(error))
                continue
            for inputs in inputs_of(model):
                try:
                    with torch.no_grad():
                        return model, inputs, model(**inputs)
                except Exception as error:  # noqa: BLE001
                    reasons.append(_first_line(error))
    except Exception as error:  # noqa: BLE001
        reasons.append(_first_line(error))
    return None, reasons[0] if reasons else "nothing that it takes is known here", None


def inputs_of(model):
    """The inputs that a model might be called with: text, also with a decoder's text, pictures, sounds, and both, as far as it takes them."""
    takes = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(1)
    ids, decoder_ids = torch.randint(3, 90, (2, BATCH, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, -5:] = 0
    decoder_mask = mask.flip(0)
    text = {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask} if "input_ids" in takes else {}
    if text and "decoder_input_ids" in takes:
        text |= {"decoder_input_ids": decoder_ids.where(decoder_mask == 1, 0)}
        if "decoder_attention_mask" in takes:
            text |= {"decoder_attention_mask": decoder_mask}
    if text and "bbox" in takes:
        text |= {"bbox": torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)}
    others = [(name, shape) for name, shapes in _others(model.config) if name in takes for shape in shapes]
    pictures = [{name: torch.randn(shape, generator=generator)} for name, shape in others]
    if text and "token_type_ids" in takes:
        yield text | {"token_type_ids": torch.zeros_like(ids)}
    if text:
        yield text
    if "grid_thw" in takes:
        sizes = ("in_channels", 3), ("temporal_patch_size", 1), ("patch_size", 4), ("patch_size", 4)
        pixels = math.prod(getattr(model.config, name, default) for name, default in sizes)
        first = next(iter(inspect.signature(model.forward).parameters))
        yield {first: torch.randn(32, pixels, generator=generator), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    yield from pictures
    for picture in pictures:
        if "decoder_input_ids" in takes:
            yield picture | {"decoder_input_ids": decoder_ids}
        if text:
            yield text | picture


def _others(config):
    sizes = [config, *(getattr(config, name, None) for name in ("vision_config", "audio_config", "backbone_config", "encoder"))]

    def find(*names, default):
        for one in sizes:
            for name in names:
                value = getattr(one, name, None)
                if value is not None:
                    return value[0] if isinstance(value, list | tuple) else value
        return default

    size, channels = find("image_size", "input_size", default=16), find("num_channels", "in_channels", "in_chans", default=3)
    frames = find("num_frames", "frames_per_clip", default=2)
    yield "pixel_values", [(BATCH, channels, size, size), (BATCH, frames, channels, size, size), (BATCH, channels, 32, 32)]
    yield "pixel_values_videos", [(BATCH, frames, channels, size, size)]
    mels = find("num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size", default=16)
    length = 2 * find("max_source_positions", default=16)
    yield "input_features", [(BATCH, mels, length), (BATCH, 64, mels), (BATCH, 1, 64, mels)]
    yield "input_values", [(BATCH, 1600), (BATCH, 64, mels), (BATCH, mels)]


def tensors(output, name=""):
    """(name, tensor) of all that a model's output holds of numbers, caches left out."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(output, list | tuple):
        for index, value in enumerate(output):
            yield from tensors(value, f"{name}[{index}]")


def difference(wanted, got, inputs):
    """The largest difference of two outputs, as a part of the largest number: where a token is padding, or where what is
    padding does not show, nothing is compared."""
    masks = [inputs[name] for name in ("attention_mask", "decoder_attention_mask") if name in inputs]
    padded = any(not bool(mask.all()) for mask in masks)
    if "decoder_input_ids" in inputs:
        masks = masks[::-1]
    worst, compared = 0.0, 0
    for (name, one), (_, other) in zip(tensors(wanted), tensors(got), strict=True):
        assert one.shape == other.shape, name
        if padded:
            if one.shape[:2] != (BATCH, TOKENS):
                continue
            of_encoder = "encoder" in name and "decoder" not in name
            seen = (masks[-1] if of_encoder else masks[0]).bool()
            one, other = one[seen], other[seen]
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return math.inf, compared + 1
        if finite.any():
            worst = max(worst, ((one - other)[finite].abs().max() / one[finite].abs().max().clamp_min(1e-30)).item())
            compared += 1
    return worst, compared


def _first_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"
