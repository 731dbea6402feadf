"""Calls of fa_ext.torch for its tests: devices, options one by one and together, tensors that fit them."""

import math

import torch

import fa_ext

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and fa_ext._core.build_info()["cuda"] else [])]

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6

#: name: (options that are no tensors, names of the tensors beside q, k, v)
CALLS = {
    "plain": ({}, ()),
    "scale": ({"scale": 0.3}, ()),
    "top_left": ({"causal": "top_left"}, ()),
    "bottom_right": ({"causal": "bottom_right"}, ()),
    "window": ({"window": (2, 1)}, ()),
    "left window": ({"window": (1, None), "causal": "bottom_right"}, ()),
    "right window": ({"window": (None, 0)}, ()),
    "empty rows": ({"window": (0, 0), "causal": "top_left"}, ("mask",)),
    "softcap": ({"softcap": 0.7}, ()),
    "bias": ({}, ("bias",)),
    "bias of a head": ({}, ("bias_h",)),
    "bias of a key": ({}, ("bias_k",)),
    "mask": ({}, ("mask",)),
    "sinks": ({}, ("sinks",)),
    "alibi": ({"causal": "top_left"}, ("alibi",)),
    "alibi of a batch": ({"softcap": 0.8}, ("alibi_b",)),
    "intervals": ({}, ("intervals",)),
    "intervals of a batch": ({"causal": "bottom_right"}, ("intervals_b", "sinks")),
    "two intervals": ({"window": (4, None), "softcap": 0.9, "layout": "bshd"}, ("two_intervals", "bias", "mask")),
    "layout": ({"layout": "bshd"}, ()),
    "batch_invariant": ({"batch_invariant": True, "deterministic": True}, ()),
    "all": ({"causal": "bottom_right", "window": (4, None), "softcap": 0.9, "scale": 0.5, "layout": "bshd"},
            ("bias", "mask", "sinks", "alibi")),
}  # fmt: skip


def make(name, device="cpu", dtype=torch.float64, seed=0, **extents):
    """(tensors by name, options) of a call; what can have a gradient requires one."""
    options, extras = CALLS[name]
    sizes = {"B": B, "H": H, "HK": HK, "SQ": SQ, "SK": SK, "D": D, "DV": DV} | extents
    b, h, hk, sq, sk, d, dv = sizes.values()
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, kind=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, kind).requires_grad_()

    def packed(heads, rows, width):
        return draw(b, rows, heads, width) if options.get("layout") == "bshd" else draw(b, heads, rows, width)

    tensors = {"q": packed(h, sq, d), "k": packed(hk, sk, d), "v": packed(hk, sk, dv)}
    if "bias" in extras:
        tensors["bias"] = draw(b, h, sq, sk)
    if "bias_h" in extras:
        tensors["bias"] = draw(h, 1, 1)
    if "bias_k" in extras:
        tensors["bias"] = draw(b, 1, 1, sk)
    if "mask" in extras:
        mask = torch.rand(b, 1, sq, sk, generator=generator) < 0.7
        mask[:, :, 1] = False  # a query that sees nothing
        tensors["mask"] = mask.to(device)
    if "sinks" in extras:
        tensors["sinks"] = draw(h)
    if {"alibi", "alibi_b"} & set(extras):
        slopes = torch.rand(*((h,) if "alibi" in extras else (b, h)), generator=generator)
        tensors["alibi"] = slopes.to(device)
    for kind, shape in (("intervals", (b, h, sq, 2)), ("intervals_b", (b, 1, 1, 2)), ("two_intervals", (1, h, sq, 2, 2))):
        if kind in extras:
            tensors["intervals"] = torch.randint(-1, sk + 2, shape, generator=generator, dtype=torch.int32).to(device)
    return tensors, dict(options)


def math_attention(tensors, options):
    """(out, lse) by torch's plain operations, in the dtype of q: what the tests hold results against."""
    q, k, v = (tensors[name] for name in "qkv")
    packed = options.get("layout") == "bshd"
    if packed:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale") or 1 / math.sqrt(q.shape[3])
    scores = q @ k.transpose(2, 3) * scale
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if tensors.get("bias") is not None:
        scores = scores + tensors["bias"]
    if tensors.get("alibi") is not None:
        scores = scores - tensors["alibi"].to(scores.dtype)[..., None, None] * distances(*scores.shape[2:], options).abs().to(q.device)
    visible = seen(q.shape[2], k.shape[2], options).to(q.device)
    if tensors.get("mask") is not None:
        visible = visible & tensors["mask"]
    if tensors.get("intervals") is not None:
        visible = visible & held(tensors["intervals"], q.shape[2], k.shape[2]).to(q.device)
    visible = visible.expand(scores.shape)
    columns = [torch.where(visible, scores, -1e30)]
    if tensors.get("sinks") is not None:
        columns.append(tensors["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1))
    lse = torch.logsumexp(torch.cat(columns, -1), -1)
    out = torch.exp(torch.where(visible, scores - lse[..., None], -math.inf)) @ v
    lse = torch.where(lse < -1e29, -math.inf, lse)
    return out.transpose(1, 2) if packed else out, lse


def seen(seq_q, seq_k, options):
    """Boolean (Sq, Sk): what causal and window show, pair by pair."""
    causal, window, far = options.get("causal", False), options.get("window") or (None, None), distances(seq_q, seq_k, options)
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    for i in range(seq_q):
        for j in range(seq_k):
            distance = int(far[i, j])
            if (
                (causal and distance > 0)
                or (window[0] is not None and distance < -window[0])
                or (window[1] is not None and distance > window[1])
            ):
                visible[i, j] = False
    return visible


def held(intervals, seq_q, seq_k):
    """Boolean (B, H, Sq, Sk), of extents that may be 1 for batch and heads: what intervals show, key by key."""
    given = (intervals if intervals.dim() == 5 else intervals[:, :, :, None]).cpu()
    given = given.expand(*given.shape[:2], seq_q, *given.shape[3:]).tolist()
    return torch.tensor([[[[any(begin <= j < end for begin, end in row) for j in range(seq_k)] for row in head] for head in entry] for entry in given])


def distances(seq_q, seq_k, options):
    """(Sq, Sk): j - (i + d)."""
    shift = 0 if options.get("causal") in (True, "top_left") else seq_k - seq_q
    return torch.tensor([[j - (i + shift) for j in range(seq_k)] for i in range(seq_q)]).reshape(seq_q, seq_k)


def scalar(out, lse):
    """A loss that weighs every element of out and every finite one of lse differently."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.device, out.dtype)
    of_lse = torch.linspace(-1, 1, lse.numel(), dtype=torch.float64).reshape(lse.shape).to(lse.device, lse.dtype)
    return (out * weights).sum() + (torch.where(torch.isfinite(lse), lse, 0) * of_lse).sum()


def gradients(loss, tensors):
    """{name: gradient} of a loss."""
    names = [name for name, x in tensors.items() if x.requires_grad]
    return dict(zip(names, torch.autograd.grad(loss, [tensors[name] for name in names]), strict=True))
