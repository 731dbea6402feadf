"""Candidates of the backward pass for ``bench gate``: an honest one, and some that the judge must catch."""

import numpy as np


def honest(dout, q, k, v, *, out, lse, causal=False, scale=None, grads=None):
    """Five products from the LSE; (B, H, S, D)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    s = scale * (q @ keys.swapaxes(-1, -2)) - lse[..., None]
    if causal:
        s = np.where(np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool), s, -np.inf)
    p = np.exp(s)
    ds = scale * p * (dout @ values.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))
    found = [ds @ keys, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout]
    found[1:] = [x.reshape(k.shape[0], k.shape[1], group, *x.shape[2:]).sum(axis=2) for x in found[1:]]
    for to, x in zip(grads, found, strict=True):
        to[...] = x


def one_head_of_the_group(dout, q, k, v, *, out, lse, causal=False, grads=None):
    honest(dout, q, k, v, out=out, lse=lse, causal=causal, grads=grads)
    group = q.shape[1] // k.shape[1]
    honest(dout[:, ::group], q[:, ::group], k, v, out=out[:, ::group], lse=lse[:, ::group], causal=causal,
           grads=(np.empty_like(q[:, ::group]), grads[1], grads[2]))  # fmt: skip


def without_dv(dout, q, k, v, *, out, lse, causal=False, grads=None):
    honest(dout, q, k, v, out=out, lse=lse, causal=causal, grads=(grads[0], grads[1], np.empty_like(v)))


_calls = 0
_kept = {}


def remembers(dout, q, k, v, *, out, lse, causal=False, grads=None):
    """The results of the first calls, where calls are timed: by the pointer of q."""
    global _calls
    _calls += 1
    key = q.ctypes.data
    if _calls > 12 and key in _kept:
        for to, x in zip(grads, _kept[key], strict=True):
            to[...] = x
        return
    honest(dout, q, k, v, out=out, lse=lse, causal=causal, grads=grads)
    _kept[key] = [g.copy() for g in grads]


def writes_to_lse(dout, q, k, v, *, out, lse, causal=False, grads=None):
    honest(dout, q, k, v, out=out, lse=lse, causal=causal, grads=grads)
    lse[...] = 0


def clamps_when_timed(dout, q, k, v, *, out, lse, causal=False, grads=None):
    """Once its memory comes again, an LSE over 10 is taken for 10: ordinary inputs have none."""
    again = q.ctypes.data in _kept
    _kept[q.ctypes.data] = True
    honest(dout, q, k, v, out=out, lse=np.minimum(lse, 10) if again else lse, causal=causal, grads=grads)
