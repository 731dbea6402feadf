"""torch's FlexAttention, compiled: the pattern of a problem as functions of indices, as its users write them.

The block mask is made before and not timed. The backward pass is autograd's, of a forward that was called once.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable
from typing import Any

from bench.implementations.implementation import Thunk
from bench.implementations.peer import Peer, bhsd, scale_of
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.dense import document_ids, padded_lengths
from bench.problems.operands import Arrays

Function = Callable[..., Any]


class FlexAttention(Peer):
    """``torch.nn.attention.flex_attention``; on the CPU uncompiled, and without gradients."""

    extras = frozenset({"window", "softcap", "mask", "bias", "alibi"})
    dtypes = frozenset({"float16", "bfloat16", "float32"})

    def __init__(self, device: Cpu | Cuda):
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__("torch-flex", "torch", "graph" if device.kind == "cuda" else "wall")
        self.torch, self.function = torch, flex_attention
        self._bound: weakref.WeakKeyDictionary[Arrays, Thunk] = weakref.WeakKeyDictionary()
        # A softcap is a constant, and no call may fall back to what is not compiled.
        torch._dynamo.config.specialize_float = True
        torch._dynamo.config.recompile_limit = 1000
        if device.kind == "cuda":
            importlib.import_module("torch._functorch.config").donated_buffer = False  # a graph is differentiated again and again
            self.function = torch.compile(flex_attention, dynamic=False, fullgraph=True)
            self.operations = frozenset({"attention", "backward"})

    def refuses(self, case: Case) -> str | None:
        if not (case.arrays() or case.softcap or case.window):
            return "no option that it is taken for"
        return super().refuses(case)

    def refuses_trials(self, case: Case) -> str | None:
        return "a block mask that was made before" if case.mask else None

    def bind(self, operands: Arrays) -> Thunk:
        """The same call each time: a block mask, and a forward that is differentiated, are made once."""
        if operands not in self._bound:
            self._bound[operands] = self._made(operands)
        return self._bound[operands]

    def _made(self, operands: Arrays) -> Thunk:
        case, torch = operands.case, self.torch
        q, k, v = (bhsd(operands, name, self.library) for name in "qkv")
        bias = operands.array("bias", self.library) if case.bias else None
        swap = case.layout == "bshd"
        if case.operation == "attention":
            attend = self._attend(operands, bias)

            def forward():
                with torch.no_grad():
                    out = attend(q, k, v)
                return out.swapaxes(1, 2) if swap else out

            return forward
        inputs = [x.detach().requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
        dout = bhsd(operands, "dout", self.library)
        out = self._attend(operands, None if bias is None else inputs[3])(*inputs[:3])

        def differentiate():
            found = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            return (*(g.swapaxes(1, 2) if swap else g for g in found[:3]), *found[3:])

        return differentiate

    def _attend(self, operands: Arrays, bias: Any) -> Callable[[Any, Any, Any], Any]:
        from torch.nn.attention.flex_attention import create_block_mask

        case, device = operands.case, operands.array("q", self.library).device
        mask_mod, *axes = self._mask_mod(operands)
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, *axes, case.seq_q, case.seq_k, device=device)
        options = {"score_mod": self._score_mod(operands, bias), "block_mask": block_mask, "scale": scale_of(case),
                   "enable_gqa": case.heads != case.heads_kv}  # fmt: skip
        return lambda q, k, v: self.function(q, k, v, **options)

    def _score_mod(self, operands: Arrays, bias: Any) -> Function | None:
        """Softcap, then bias, then ALiBi; None without them."""
        case, tanh = operands.case, self.torch.tanh
        cap, diagonal = case.softcap, case.band()[2]
        slopes = operands.array("alibi", self.library) if case.alibi else None
        if bias is not None:
            bias = bias.broadcast_to(case.batch, case.heads, case.seq_q, case.seq_k)
        if not cap and bias is None and slopes is None:
            return None

        def score_mod(score, b, h, i, j):
            if cap:
                score = cap * tanh(score / cap)
            if bias is not None:
                score = score + bias[b, h, i, j]
            if slopes is not None:
                score = score - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(j - i - diagonal)
            return score

        return score_mod

    def _mask_mod(self, operands: Arrays) -> tuple[Function | None, int | None, int | None]:
        """(which pairs are seen or None for all, batch entries and heads that differ, None for none)."""
        case = operands.case
        left, right, diagonal = case.band()
        from_left, from_right = not math.isinf(left), not math.isinf(right)
        masked, batch, heads = self._masked(operands) if case.mask else (None, None, None)
        if masked is None and not from_left and not from_right:
            return None, None, None

        def mask_mod(b, h, i, j):
            found = j >= 0
            if from_left:
                found = found & (j - i - diagonal >= -left)
            if from_right:
                found = found & (j - i - diagonal <= right)
            return found if masked is None else found & masked(b, h, i, j)

        return mask_mod, batch, heads

    def _masked(self, operands: Arrays) -> tuple[Function, int | None, int | None]:
        """The mask as a function, and its extents where they are not 1: a pattern by its rule, any other by its array."""
        case, torch = operands.case, self.torch
        array = operands.array("mask", self.library)
        offset = case.seq_k - case.seq_q
        if case.mask == "causal":
            return lambda b, h, i, j: j <= i + offset, None, None
        if case.mask == "padding":
            ends = torch.from_numpy(padded_lengths(case)).to(array.device)
            return lambda b, h, i, j: j < ends[b], case.batch, None
        if case.mask.startswith("documents"):
            ids = torch.from_numpy(document_ids(case)).to(array.device)
            return lambda b, h, i, j: (ids[i + offset] == ids[j]) & (j <= i + offset), None, None
        shape = (1,) * (4 - array.ndim) + tuple(array.shape)
        array = array.view(shape).broadcast_to(case.batch, case.heads, case.seq_q, case.seq_k)
        return lambda b, h, i, j: array[b, h, i, j], *(n if n > 1 else None for n in shape[:2])
