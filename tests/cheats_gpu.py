"""Candidates for ``bench gate`` on a GPU, on torch tensors (B, H, S, D): one honest, the others must be refused."""

import math

import torch

_state = {"stream": None, "by_pointer": {}, "patched": False}


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


def patches_events(q, k, v, *, out):
    """Halves what an event reads."""
    if not _state["patched"]:
        elapsed = torch.cuda.Event.elapsed_time
        torch.cuda.Event.elapsed_time = lambda self, other: elapsed(self, other) / 2
        _state["patched"] = True
    out.copy_(honest(q, k, v))
