"""The backward operators of torch's scaled_dot_product_attention and varlen_attn, on tensors that their own forward saved once.

What autograd adds to them, for each call and each saved tensor, is not timed; the sum of a bias' gradient over the axes
along which it was broadcast, which autograd adds to the operator, is. A mask, alone or joined to a bias, is made an additive one before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from bench.implementations.dropped import Dropping
from bench.implementations.implementation import Thunk
from bench.implementations.peer import bhsd, bias_dtype, scale_of
from bench.problems import Case
from bench.problems.operands import Arrays


class TorchBackward(Dropping):
    """One of torch's backward operators: BACKENDS."""

    operations = frozenset({"backward"})
    causal = "square"

    def __init__(self, backend: str, name: str, deterministic: bool = False):
        super().__init__(name, "torch")
        self.bound_by, self.deterministic = BACKENDS[backend], deterministic
        self.over_sequences, self.packed_causal = VARLEN.get(backend, (None, None))
        if backend in ("EFFICIENT_ATTENTION", "CPU"):
            self.dtypes = frozenset({"float16", "bfloat16", "float32"})
        self.extras = EXTRAS[backend]
        self.grouped = backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION")

    def refuses(self, case: Case) -> str | None:
        if self.deterministic and not case.deterministic:
            return "sums in order, where any order is asked for"
        if case.heads != case.heads_kv and not self.grouped:
            return "no grouped heads"
        if (case.bias or case.mask) and case.seq_k % 16:
            return "no bias or mask of rows that are not whole 32 bytes"
        if case.storage and self.over_sequences and (case.storage.q, case.storage.k) != ("packed", "packed"):
            return "no gradients of padded sequences"
        why = super().refuses(case)
        if why is None and case.bias and bias_dtype(case) != case.dtype:
            return f"no {bias_dtype(case)} bias of {case.dtype} inputs"
        return why

    def bind(self, operands: Arrays) -> Thunk:
        if operands.case.lengths and self.over_sequences:
            return self._in_mode(self.over_sequences(operands, self.library))
        _, backward = self._bound(operands, bhsd(operands, "v", self.library))
        swap, backward = operands.case.layout == "bshd", self._in_mode(backward)

        def call():
            found = backward()
            return tuple(g.swapaxes(1, 2) for g in found[:3]) + found[3:] if swap else found

        return call

    def attended(self, operands: Arrays, v: Any) -> Any:
        return self._bound(operands, v)[0]

    def timing_of(self, case: Case) -> str:
        """The state of a forward's dropout lies on the host where no graph captured it, and there a captured backward cannot read it."""
        return "events" if case.dropout else super().timing_of(case)

    def _bound(self, operands: Arrays, v: Any) -> tuple[Any, Callable[[], tuple]]:
        """The output of the forward with this v, and the backward operator on what it saved."""
        case = operands.case
        dout, q, k = (bhsd(operands, name, self.library) for name in ("dout", "q", "k"))
        bias = operands.array("bias", self.library) if case.bias else None
        added = bias if not case.mask else additive(operands.array("mask", self.library), bias, q.dtype)
        if added is not None:
            added = added.expand(case.batch, case.heads, case.seq_q, case.seq_k)
        p = case.dropout[0] if case.dropout else 0.0
        return self.bound_by(dout, q, k, v, added, bias is not None and bias.shape, p, bool(case.causal), scale_of(case))

    def _in_mode(self, backward: Callable[[], tuple]) -> Callable[[], tuple]:
        if not self.deterministic:
            return backward

        def call():
            with _deterministic():
                return backward()

        return call


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic mode, without the filling of new memory that it brings along."""
    import torch

    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def additive(mask: Any, bias: Any, dtype: Any) -> Any:
    """A boolean mask, and a bias or None, as what is added to scores."""
    import torch

    bias = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask, bias, -math.inf)


# The forward's output and the backward operator bound to what it saved, of (dout, q, k, v, added, shape, p, causal, scale): `added` to
# scores, (B, H, Sq, Sk) or None; `shape` of the bias in it whose gradient is wanted, or False; dropout's p.


def _flash(dout: Any, q: Any, k: Any, v: Any, added: Any, shape: Any, p: float, causal: bool, scale: float) -> tuple[Any, Callable[[], tuple]]:
    import torch

    ops = torch.ops.aten
    out, lse, *lengths, seed, offset, _ = ops._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)
    backward = ops._scaled_dot_product_flash_attention_backward
    return out, lambda: backward(dout, q, k, v, out, lse, *lengths, p, causal, seed, offset, scale=scale)


def _cudnn(dout: Any, q: Any, k: Any, v: Any, added: Any, shape: Any, p: float, causal: bool, scale: float) -> tuple[Any, Callable[[], tuple]]:
    import torch

    ops = torch.ops.aten
    forward, backward = ops._scaled_dot_product_cudnn_attention, ops._scaled_dot_product_cudnn_attention_backward
    out, lse, *lengths, seed, offset, _ = forward(q, k, v, added, True, p, causal, False, scale=scale)
    return out, lambda: backward(dout, q, k, v, out, lse, seed, offset, added, *lengths, p, causal, scale=scale)


def _efficient(dout: Any, q: Any, k: Any, v: Any, added: Any, shape: Any, p: float, causal: bool, scale: float) -> tuple[Any, Callable[[], tuple]]:
    import torch

    ops, wanted = torch.ops.aten, [True, True, True, bool(shape)]
    forward, backward = ops._scaled_dot_product_efficient_attention, ops._scaled_dot_product_efficient_attention_backward
    out, lse, seed, offset = forward(q, k, v, added, True, p, causal, scale=scale)

    def call():
        *found, dbias = backward(dout, q, k, v, added, out, lse, seed, offset, p, wanted, causal, scale=scale)
        return (*found, dbias.sum_to_size(shape)) if shape else tuple(found)

    return out, call


def _cpu(dout: Any, q: Any, k: Any, v: Any, added: Any, shape: Any, p: float, causal: bool, scale: float) -> tuple[Any, Callable[[], tuple]]:
    import torch

    ops = torch.ops.aten
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward
    return out, lambda: backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)


def _lengths(operands: Arrays, library: str) -> tuple[Any, ...]:
    """cum_q, cum_k, max_q, max_k of packed sequences."""
    case = operands.case
    return operands.array("cu_seqlens_q", library), operands.array("cu_seqlens_k", library), max(case.n_q), max(case.n_k)


def _flash_varlen(operands: Arrays, library: str) -> Callable[[], tuple]:
    import torch

    ops, causal = torch.ops.aten, bool(operands.case.causal)
    dout, q, k, v = (operands.array(name, library) for name in ("dout", "q", "k", "v"))
    options, lengths = {"scale": scale_of(operands.case)}, _lengths(operands, library)
    out, lse, state, unused, _ = ops._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, **options)
    backward = ops._flash_attention_backward
    return lambda: tuple(backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, state, unused, **options))


def _cudnn_varlen(operands: Arrays, library: str) -> Callable[[], tuple]:
    import torch

    ops, causal = torch.ops.aten, bool(operands.case.causal)
    dout, q, k, v = (operands.array(name, library) for name in ("dout", "q", "k", "v"))
    options, lengths = {"scale": scale_of(operands.case)}, _lengths(operands, library)
    out, lse, *_, seed, offset, _ = ops._cudnn_attention_forward(q, k, v, None, *lengths, True, 0.0, causal, False, **options)
    backward = ops._cudnn_attention_backward
    return lambda: tuple(backward(dout, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, causal, **options))


# Of torch.nn.attention.SDPBackend, and the CPU's only fused one.
BACKENDS: dict[str, Callable[..., tuple[Any, Callable[[], tuple]]]] = {
    "FLASH_ATTENTION": _flash, "CUDNN_ATTENTION": _cudnn, "EFFICIENT_ATTENTION": _efficient, "CPU": _cpu,
}  # fmt: skip
# Options that they take: cuDNN's has no gradient of what is added to scores.
EXTRAS = {
    "FLASH_ATTENTION": frozenset({"dropout"}), "CUDNN_ATTENTION": frozenset({"dropout", "mask"}),
    "EFFICIENT_ATTENTION": frozenset({"dropout", "mask", "bias"}), "CPU": frozenset(),
}  # fmt: skip
# Those that have gradients of packed sequences, and their causal masks: cuDNN's begins at the first key.
VARLEN: dict[str, tuple[Callable[[Arrays, str], Callable[[], tuple]], str]] = {
    "FLASH_ATTENTION": (_flash_varlen, "last"), "CUDNN_ATTENTION": (_cudnn_varlen, "square"),
}  # fmt: skip
