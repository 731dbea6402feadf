"""Arguments of FlashAttention's functions as those of ``attention``, and what there is no such thing as here."""

import numpy as np
import torch

from ._attention import attention


_VERSIONS = (2, 3, 4)
_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def refuse(**given):
    """Raises a NotImplementedError for the first argument that is not None."""
    for name, x in given.items():
        if x is not None:
            raise NotImplementedError(f"{name} is given, which fa_ext does not implement; accepted: None")


def refuse_chunk(attention_chunk):
    if attention_chunk:
        raise NotImplementedError(f"attention_chunk is {attention_chunk}, which fa_ext does not implement; accepted: 0")


def refuse_8_bits(**given):
    for name, x in given.items():
        if x is not None and x.dtype in _8_BITS:
            raise NotImplementedError(f"{name} has dtype {x.dtype}, which fa_ext does not implement; accepted: 16 bits or more")


def refuse_version(name, version):
    """One function answers to all versions of FlashAttention that there are."""
    if version not in _VERSIONS:
        raise ValueError(f"{name} is {version!r}; accepted: {', '.join(map(str, _VERSIONS))}")


def options(causal, window_size, softmax_scale, softcap, **others):
    """Keywords of ``attention``. ``others``: its arrays, of which those that are None are left out."""
    # FlashAttention's max_seqlen_q is not handed on: users' code may have it wrong, and here queries beyond it would be left out.
    given = {"causal": is_causal(causal), "window": window(window_size, causal)}
    if softmax_scale is not None:
        given["scale"] = softmax_scale
    if softcap is not None and not softcap <= 0:
        given["softcap"] = softcap
    for name, x in others.items():
        if x is not None:
            given[name] = x
    return given


def is_causal(causal):
    if causal is False or causal is True:
        return "bottom_right" if causal else False
    if not isinstance(causal, (bool, int, np.bool_)):
        raise TypeError(f"causal has type {type(causal).__name__}; accepted: True or False")
    return "bottom_right" if causal else False


def window(window_size, causal):
    """``window`` of attention: a bound below 0, or None, is no bound, and ``causal`` alone bounds the right."""
    if window_size is None or type(window_size) is tuple and window_size == (-1, -1) and type(window_size[0]) is type(window_size[1]) is int:
        return None
    if isinstance(window_size, (torch.Tensor, np.ndarray)):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; accepted: a pair (left, right), where -1 or None is no bound")
    for bound in window_size:
        if bound is not None and (isinstance(bound, bool) or not hasattr(bound, "__index__")):
            raise TypeError(f"window_size holds a {type(bound).__name__}; accepted: ints, where -1 is no bound, or None")
    left, right = (None if bound is None or bound < 0 else bound for bound in window_size)
    right = None if causal else right
    return None if left is right is None else (left, right)


def indices(name, x):
    """An index tensor as the core takes it."""
    if x is None or type(x) is torch.Tensor and x.dtype is torch.int32 and x.is_contiguous():
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} has type {type(x).__name__}; accepted: a torch.Tensor of int32 or int64, or None")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {x.dtype}; accepted: torch.int32, torch.int64")
    x = x.to(torch.int32)
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def run(q, k, v, given, *, dropout_p=0.0, deterministic=False, return_lse=False):
    """``attention`` of (B, S, H, D) or, packed, (T, H, D). ``given``: by ``options``. Without ``deterministic``, torch's switch says
    whether gradients have one order."""
    return attention(
        q, k, v, layout="bshd", dropout_p=dropout_p, deterministic=True if deterministic else None, return_lse=return_lse, **given
    )  # fmt: skip


def unpacked(name, x, axis, count):
    """The ``count`` tensors along an axis of x."""
    if not isinstance(x, torch.Tensor) or x.dim() <= axis or x.shape[axis] != count:
        found = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        before = "total, " if axis == 1 else "batch, seqlen, "
        raise ValueError(f"{name} is {found}; accepted: a tensor ({before}{count}, heads, head_dim)")
    return x.unbind(axis)


def heads_of(qkv, num_heads_q):
    """Heads of q, k and v in qkv (B, S, heads, D), where they lie behind one another."""
    if num_heads_q is None:
        raise ValueError("qkv of four axes needs num_heads_q")
    heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if heads_k <= 0 or odd:
        raise ValueError(f"num_heads_q is {num_heads_q}; accepted for {qkv.shape[2]} heads: so many that k and v share the others")
    return num_heads_q, heads_k, heads_k
