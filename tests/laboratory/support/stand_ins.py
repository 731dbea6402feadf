"""Stand-ins for libraries that are not installed: modules where an import finds them, computing by the float64 reference."""

import sys
import types

from fa_ext import reference
from fa_ext.reference.backward import attention_backward


def attend(q, k, v, **options):
    """(B, S, H, D) -> (B, S, H, D), in the dtype of q."""
    assert q.shape[2] % k.shape[2] == 0 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    return reference.attention(q, k, v, layout="bshd", **options)[0].astype(q.dtype)


def stand_in(monkeypatch, name, **functions):
    """Puts a module of that name, and the packages above it, where an import finds them."""
    for end in [i for i, c in enumerate(f"{name}.") if c == "."]:
        module = types.ModuleType(name[:end])
        module.__spec__ = types.SimpleNamespace(name=name[:end])
        monkeypatch.setitem(sys.modules, name[:end], module)
    vars(sys.modules[name]).update(functions)


def window_of(window, unbounded):
    assert len(window) == 2 and all(side == unbounded or side >= 0 for side in window)
    sides = tuple(None if side == unbounded else side for side in window)
    return None if sides == (None, None) else sides


class FlashAttn3:
    """``torch.ops.flash_attn_3`` of xformers 0.0.34; ``asked``: what each backward call was given beside the tensors."""

    def __init__(self):
        self.asked, self.saved = [], []

    def _options(self, softmax_scale, is_causal, window_size_left, window_size_right, softcap):
        return {"scale": softmax_scale, "causal": "bottom_right" if is_causal else False, "softcap": softcap,
                "window": window_of((window_size_left, window_size_right), -1)}  # fmt: skip

    def fwd(self, q, k, v, *, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
            num_splits=0):  # fmt: skip
        options = self._options(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        out, lse = reference.attention(q, k, v, layout="bshd", **options)
        self.saved.append((out.astype(q.dtype), lse))
        return *self.saved[-1], "accumulators", "of splits"

    def bwd(self, dout, q, k, v, out, softmax_lse, *, softmax_scale=None, is_causal=False, window_size_left=-1,
            window_size_right=-1, softcap=0.0, deterministic=False):  # fmt: skip
        assert out is self.saved[-1][0] and softmax_lse is self.saved[-1][1]
        self.asked.append(deterministic)
        options = self._options(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        found = attention_backward(dout, q, k, v, layout="bshd", **options)
        return *(g.astype(q.dtype) for g in found), "softmax_d", "lse_log2", "dq_accum", "dk_accum", "dv_accum"


def operator(work, names, defaults):
    """An operator of torch with arguments of these names, in this order, and a schema that says so: ``work`` gets them by name."""

    def call(*given):
        return work(dict(zip(names, given, strict=True)))

    def argument(name):
        has = name in defaults
        return types.SimpleNamespace(name=name, has_default_value=lambda: has, default_value=defaults.get(name))

    call.default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=[argument(name) for name in names]))
    return call


def sequence_options(asked):
    """The options of a call over sequences, by arguments of FlashAttention-3."""
    options = {"causal": "bottom_right" if asked["is_causal"] else False, "scale": asked["softmax_scale"], "softcap": asked["softcap"],
               "window": window_of((asked["window_size_left"], asked["window_size_right"]), -1)}  # fmt: skip
    for ours, theirs in (("cu_seqlens_q", "cu_seqlens_q"), ("seqlens_q", "seqused_q"), ("cu_seqlens_k", "cu_seqlens_k"),
                         ("seqlens_k", "seqused_k"), ("page_table", "page_table")):  # fmt: skip
        if asked.get(theirs) is not None:
            options[ours] = asked[theirs]
    for side in "qk":
        packed = asked[side].ndim == 3
        assert (asked[f"max_seqlen_{side}"] is not None) == (asked[f"cu_seqlens_{side}"] is not None) == packed
    return options


#: Arguments of ``fwd`` of FlashAttention-3, in the order of xformers 0.0.34 and of vLLM 0.25.1.
FA3_FORWARD = ("q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table "
               "kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale is_causal "
               "window_size_left window_size_right attention_chunk softcap is_rotary_interleaved scheduler_metadata num_splits pack_gqa "
               "sm_margin").split()  # fmt: skip
VLLM_FA3_FORWARD = [name for name in FA3_FORWARD if name != "attention_chunk"] + ["s_aux", "cp_world_size", "cp_rank", "cp_tot_seqused_k"]


def fa3_forward(asked):
    """``fwd`` of FlashAttention-3, by the float64 reference."""
    assert asked["is_rotary_interleaved"] in (True, False) and asked["sm_margin"] == 0 and asked["softmax_scale"] > 0
    if "cp_rank" in asked:
        assert (asked["cp_world_size"], asked["cp_rank"], asked["cp_tot_seqused_k"]) == (1, 0, None)
    q, options = asked["q"], sequence_options(asked)
    if asked.get("s_aux") is not None:
        assert asked["s_aux"].dtype == q.dtype
        options["sinks"] = asked["s_aux"]
    return [reference.attention(q, asked["k"], asked["v"], layout="bshd", **options)[0].astype(q.dtype), "lse"]
