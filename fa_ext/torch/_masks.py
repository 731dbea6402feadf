"""The masks that transformers' models get under attn_implementation="fa_ext": eager's, made when they are read."""

import types
from typing import NamedTuple

import torch


class Pattern(NamedTuple):
    """The pairs that a mask of B times Sq queries and Sk keys allows; the last query stands at the last key."""

    #: Which keys or pairs, boolean, broadcasts to (B, 1, Sq, Sk); None: all.
    seen: torch.Tensor | None
    #: How many keys before and after its own a query sees; None: all.
    left: int | None
    right: int | None
    #: The keys of each query, int32 (1, 1, Sq, 2), [begin, end); None: all.
    intervals: torch.Tensor | None = None

    def allowed(self, queries, keys, device):
        """The same as a boolean tensor that broadcasts to (B, 1, Sq, Sk), or None where everything is allowed."""
        seen = self.seen
        if self.left is not None or self.right is not None:
            distance = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
            seen = both(seen, within(distance, self.left, self.right))
        if self.intervals is not None:
            at, (begin, end) = torch.arange(keys, device=device), self.intervals.split(1, dim=3)
            seen = both(seen, (at >= begin) & (at < end))
        return seen

    def added_to(self, bias, query, key):
        """The same as a tensor to add to scores, beside a bias, or None where nothing is to be added."""
        allowed = self.allowed(query.shape[2], key.shape[2], query.device)
        if allowed is None:
            return bias
        bias = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        return torch.where(allowed, bias, torch.finfo(bias.dtype).min)


def both(one, other):
    """The pairs that both masks allow; None allows everything."""
    return other if one is None else one if other is None else one & other


def within(distance, left, right):
    """Which distances from a query to a key are within a band."""
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        allowed = allowed & (distance >= -left)
    if right is not None:
        allowed = allowed & (distance <= right)
    return allowed


class Mask(torch.Tensor):
    """The mask that eager attention gets, (B, 1, Sq, Sk), 0 where a query sees a key and the lowest number elsewhere.

    Whatever a model does to it, it does to eager's mask, which is made then. A mask that nothing has read says in
    ``fa_ext_pattern`` what it allows; afterwards that is None, since a view of what was read may have been written to.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, anchor, shape, pattern):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=anchor.dtype, device=anchor.device)

    def __init__(self, anchor, shape, pattern):
        #: An empty tensor that has the mask's dtype and device.
        self.anchor = anchor
        self.seen, self.intervals = pattern.seen, pattern.intervals
        self.fa_ext_pattern = pattern
        self._full = None

    def full(self):
        if self._full is None:
            pattern, self.fa_ext_pattern = self.fa_ext_pattern, None
            allowed = pattern.allowed(self.shape[2], self.shape[3], self.device)
            self._full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            if allowed is not None:
                self._full.masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return self._full

    def __repr__(self):
        return f"Mask({self.full()!r})"

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.full, (args, kwargs or {}))
        return function(*args, **kwargs)

    # A compiler that meets a mask among the arguments of what it compiles takes it apart by these.
    def __tensor_flatten__(self):
        held = ["anchor", *(name for name in ("seen", "intervals") if getattr(self, name) is not None)]
        return held, (self.fa_ext_pattern.left, self.fa_ext_pattern.right)

    @classmethod
    def __tensor_unflatten__(cls, inner, window, shape, strides):
        return cls(inner["anchor"], shape, Pattern(inner.get("seen"), *window, inner.get("intervals")))


def make_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, local_size=None,
    allow_is_causal_skip=True, allow_is_bidirectional_skip=False, dtype=torch.float32, device="cpu", **rest,
):  # fmt: skip
    """transformers' mask function: None where eager has none, else a ``Mask``.

    A pattern is a band where it is shown to be one, in a static cache the interval of each query, else the mask of all pairs.
    In a graph that is being traced the result is eager's mask itself with the attribute ``fa_ext_pattern``: what nothing reads,
    the compiler leaves out. There a model must not write into it in place, which none of transformers does.
    """
    # From the module itself: torch 2.11's compiler takes no import out of `transformers`, whose modules are made on demand.
    from transformers.masking_utils import causal_mask_function, eager_mask, is_tracing, prepare_padding_mask, sdpa_mask

    mask_function = mask_function or causal_mask_function
    arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, device=device, **rest,
    )  # fmt: skip
    window = _window(mask_function, local_size)
    # A static cache has keys beyond the last query, and a tensor as its offset, which is not read here.
    ends_together = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    is_band = window == (None, None) or ends_together
    if window is not None:
        seen = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if seen is not None:
            seen = seen[:, None, None, kv_offset : kv_offset + kv_length]
            if is_band and not is_tracing(seen) and bool(seen.all()):  # a static cache has keys that nobody sees yet
                seen = None
        if seen is None and window == (None, None) and allow_is_bidirectional_skip:
            return None
        if is_band:
            pattern = Pattern(seen, *window)
        else:
            pattern = Pattern(seen, None, None, _intervals(q_length, kv_length, q_offset - kv_offset, *window, device))
    else:
        pattern = Pattern(sdpa_mask(**arguments, allow_is_causal_skip=False), None, None)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        mask = eager_mask(**arguments, dtype=dtype)
        mask.fa_ext_pattern = pattern
        return mask
    return Mask(torch.empty(0, dtype=dtype, device=device), (batch_size, 1, q_length, kv_length), pattern)


def _intervals(queries, keys, first, left, right, device):
    """int32 (1, 1, Sq, 2): the keys of queries of which the first stands at key ``first``, a number or a tensor of one."""
    at = torch.arange(queries, device=device) + first
    begin = torch.zeros_like(at) if left is None else (at - left).clamp(min=0)
    end = torch.full_like(at, keys) if right is None else at + right + 1
    return torch.stack((begin, end), dim=-1).int()[None, None]


def _window(mask_function, size):
    """(left, right) of a pattern of transformers that is a band around the query's own key, else None."""
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )

    if mask_function is causal_mask_function:
        return None, 0
    if mask_function is bidirectional_mask_function:
        return None, None
    if size is not None and _is_same(mask_function, sliding_window_causal_mask_function(size)):
        return size - 1, 0
    if size is not None and _is_same(mask_function, sliding_window_bidirectional_mask_function(size)):
        return size, size
    return None


def _is_same(one, other):
    """Whether two values are the same: functions by their code and what they have closed over, tuples by their items."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        held = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
        return one.__code__ is other.__code__ and _is_same(*held)
    return type(one) is type(other) is int and one == other
