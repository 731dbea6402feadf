"""Candidates for ``bench gate`` on a GPU, on torch tensors (B, H, S, D): one honest, the others must be refused."""

import json
import math
import os
import sys

import torch

_state = {"stream": None, "by_pointer": {}, "patched": False, "calls": 0}


def honest(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return (torch.softmax(s, -1) @ v.float()).to(q.dtype)


def zeros(q, k, v, *, out):
    out.zero_()


def other_stream(q, k, v, *, out):
    """Returns at once; the work runs where the timed stream does not wait for it."""
    if _state["stream"] is None:
        _state["stream"] = torch.cuda.Stream()
    with torch.cuda.stream(_state["stream"]):
        torch.cuda._sleep(2_000_000)
        out.copy_(honest(q, k, v))


def caches_by_pointer(q, k, v, *, out):
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
    if key not in _state["by_pointer"]:
        _state["by_pointer"][key] = honest(q, k, v)
    out.copy_(_state["by_pointer"][key])


def writes_past_out(q, k, v, *, out):
    out.copy_(honest(q, k, v))
    flat = torch.as_strided(out, (8,), (1,), out.storage_offset() + out.numel())
    flat.zero_()


def patches_clock(q, k, v, *, out):
    """Halves what the worker's clock reads."""
    if not _state["patched"]:
        from bench.trial import calls

        now, begun = calls._now, calls._now()
        calls._now = lambda: begun + (now() - begun) / 2
        _state["patched"] = True
    out.copy_(honest(q, k, v))


def makes_inputs_easy_when_timed(q, k, v, *, out):
    """Makes V zero in the judge's memory, which is not protected on a GPU, so that zeros are right."""
    _state["calls"] += 1
    if _state["calls"] <= 8:
        out.copy_(honest(q, k, v))
    else:
        v.zero_()
        out.zero_()


def writes_to_inputs(q, k, v, *, out):
    out.copy_(honest(q, k, v))
    q.mul_(0.5)


def returns_unless_poisoned(q, k, v, *, out):
    """Asks the device on each call, so it cannot be captured."""
    if bool(out.flatten()[0].isnan()):
        out.copy_(honest(q, k, v))


def half_precision_inside(q, k, v, *, out):
    """Eight bits of the queries, once it is timed."""
    _state["calls"] += 1
    out.copy_(honest(q if _state["calls"] <= 8 else q.to(torch.float8_e4m3fn).to(q.dtype), k, v))


def without_maximum_when_timed(q, k, v, *, out):
    """Timed inputs were never larger than what exp() takes."""
    _state["calls"] += 1
    if _state["calls"] <= 8:
        out.copy_(honest(q, k, v))
    else:
        p = torch.exp(q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1]))
        out.copy_((p / p.sum(-1, keepdim=True)) @ v.float())


def keeps_the_mask(q, k, v, *, mask, out):
    """The result for a mask is kept by its pointer."""
    key = mask.data_ptr()
    if key not in _state["by_pointer"]:
        _state["by_pointer"][key] = torch.where(mask, 0.0, -math.inf)
    s = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1]) + _state["by_pointer"][key]
    out.copy_(torch.softmax(s, -1) @ v.float())


class _Promise:
    def __init__(self, *arguments):
        self.arguments, self.shape, self.dtype = arguments, arguments[0].shape, arguments[0].dtype


def lazy_object(q, k, v):
    return _Promise(q, k, v)


def forges_with_token(q, k, v, *, out):
    """The reply of a finished call, with its token, from inside the call."""
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("request"), dict):
        frame = frame.f_back
    reply = json.dumps({"kind": "done", "value": 1e-6, "token": frame.f_locals["request"]["token"]}).encode()
    frame.f_locals["channel"].sendall(reply + b"\n")
    os._exit(0)
