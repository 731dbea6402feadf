"""Attention composed of torch's own differentiable operations: what derivatives of derivatives are taken of.

Takes memory for every pair of query and key, several times. ``attention`` means what ``fa_ext.attention`` means; it adds
up in float32 (float64 for float64).
"""

import math

import torch

from ..dropout import dropout_keep


_TAKES = ("bias", "mask", "sinks", "alibi", "intervals")


def attention(q, k, v, others, keep, options):
    """(out, lse) of tensors as ``fa_ext.torch.attention`` takes them, ``others`` by name; ``keep``: boolean (B, H, Sq, Sk), or None."""
    packed = options["layout"] == "bshd"
    q, k, v = (x.transpose(1, 2) if packed else x for x in (q, k, v))
    far = distance(q.shape[2], k.shape[2], options["causal"], q.device)
    out, lse = over_pairs(q, k, v, others, far, band(far, options["causal"], options["window"]), keep, options)
    return out.transpose(1, 2) if packed else out, lse


def over_pairs(q, k, v, others, far, visible, keep, options):
    """(out, lse) of tensors (B, H, S, D). ``far``: (Sq, Sk), how far a key stands behind the diagonal of its query; ``visible``:
    boolean, of the same shape."""
    for name in others:
        if name not in _TAKES:
            raise NotImplementedError(f"{name} is given, with which fa_ext.torch.attention has no second derivative")
    bias, mask, sinks, alibi, intervals = map(others.get, _TAKES)
    dtype = q.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q, k, v = q.to(work), *(x.to(work).repeat_interleave(group, 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if options["scale"] is None else options["scale"]
    scores = scale * (q @ k.transpose(2, 3))
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if alibi is not None:
        scores = scores - alibi.to(work)[..., None, None] * far.abs()
    if mask is not None:
        visible = visible & mask
    if intervals is not None:
        visible = visible & _held(intervals, k.shape[2])
    if bias is not None:
        excluded = bias == -math.inf
        visible = visible & ~excluded
        scores = scores + bias.to(work).masked_fill(excluded, 0)
    sinks = None if sinks is None else sinks.to(work)[:, None, None]
    weights, lse = _softmax(scores, visible, sinks)
    if keep is not None:
        weights = torch.where(keep, weights, 0) / _keep_probability(options.dropout_p)
    return (weights @ v).to(dtype), lse


def dropped(shape, state, options, device):
    """The weights that dropout keeps: boolean (B, H, Sq, Sk), or None without dropout."""
    if state is None:
        return None
    return torch.from_numpy(dropout_keep(*shape, (options.dropout_p, state.cpu().numpy()))).to(device)


def pairs_of(q, k, options):
    """(B, H, Sq, Sk) of a dense call."""
    heads, queries = (2, 1) if options["layout"] == "bshd" else (1, 2)
    return q.shape[0], q.shape[heads], q.shape[queries], k.shape[queries]


def _keep_probability(p):
    """Of the core's 16-bit draws. Where nothing is kept, what it divides is 0."""
    return (65536 - math.floor(65536 * p + 0.5)) / 65536 or 1.0


def distance(seq_q, seq_k, causal, device):
    """(Sq, Sk): how far a key stands behind the diagonal of its query."""
    shift = 0 if causal is True or causal == "top_left" else seq_k - seq_q
    return torch.arange(seq_k, device=device) - torch.arange(seq_q, device=device)[:, None] - shift


def band(far, causal, window):
    """Boolean (Sq, Sk): what causal and window show."""
    left, right = (None, None) if window is None else window
    visible = torch.ones_like(far, dtype=torch.bool)
    if causal:
        visible = visible & (far <= 0)
    if left is not None:
        visible = visible & (far >= -left)
    if right is not None:
        visible = visible & (far <= right)
    return visible


def _held(intervals, keys):
    """Boolean (B, H, Sq, Sk), of extents that may be 1: what intervals show."""
    pairs = intervals if intervals.dim() == 5 else intervals.unsqueeze(3)
    at = torch.arange(keys, device=pairs.device)
    return ((pairs[..., :1] <= at) & (at < pairs[..., 1:])).any(-2)


def _softmax(scores, visible, sinks):
    """Weights, 0 where nothing is visible, and the LSE. What is not visible is selected away before each exponential, so
    that no derivative multiplies 0 by infinity."""
    hidden = ~visible
    shown = scores.detach().masked_fill(hidden, -math.inf)
    peak = shown.amax(-1, keepdim=True) if scores.shape[-1] else shown.new_full((*shown.shape[:-1], 1), -math.inf)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach())
    peak = torch.where(peak == -math.inf, 0, peak)
    exponentials = torch.exp((scores - peak).masked_fill(hidden, 0)).masked_fill(hidden, 0)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (peak + torch.log(total)).masked_fill(empty, -math.inf)
    return exponentials / total, lse.squeeze(-1)
