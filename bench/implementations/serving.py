"""Other libraries over sequences of any length: flashinfer, and torch's dense operators where all lengths are alike.

What they prepare on the host for given lengths (flashinfer's plan, the copy of pages into a dense array) is not timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.implementations.implementation import Thunk
from bench.implementations.peer import scale_of
from bench.problems import Case
from bench.problems.operands import Arrays

# The size that flashinfer recommends for the results of split keys.
WORKSPACE_BYTES = 128 << 20


# ---- torch, dense ----


def dense_refuses(case: Case) -> str | None:
    """Why a dense operator with torch's causal mask cannot compute a problem."""
    if len(set(case.n_q)) > 1 or len(set(case.n_k)) > 1:
        return "lengths that differ"
    if not case.n_q:
        return "no sequence"
    if case.causal and case.n_q[0] not in (1, case.n_k[0]) or case.causal == "top_left":
        return "no causal mask aligned to the last key"
    return None


def dense(operands: Arrays) -> tuple[Any, Any, Any, bool, Any]:
    """(q, k, v as (B, H, S, D), is_causal, what makes of the result one stored as q is), of torch tensors."""
    case: Any = operands.case
    batch, n, m = len(case.n_q), case.n_q[0], case.n_k[0]
    heads_first = case.layout == "bhsd"
    q = operands.array("q", "torch")
    stored = q.shape[:-1]
    q = q if case.storage.q == "padded" and heads_first else q.reshape(batch, n, case.heads, case.head_dim).transpose(1, 2)

    def keys(name: str) -> Any:
        x = operands.array(name, "torch")
        if case.storage.k == "paged":
            x = x[operands.array("page_table", "torch").long()]
            x = (x.transpose(2, 3) if heads_first else x).reshape(batch, -1, case.heads_kv, x.shape[-1])[:, :m]
        elif case.storage.k == "padded" and heads_first:
            return x
        return x.reshape(batch, m, case.heads_kv, x.shape[-1]).transpose(1, 2)

    def restore(out: Any) -> Any:
        return out if case.storage.q == "padded" and heads_first else out.transpose(1, 2).reshape(*stored, -1)

    return q, keys("k"), keys("v"), bool(case.causal) and n == m and n > 1, restore


# ---- flashinfer ----


def flashinfer_refuses(case: Case) -> str | None:
    if case.storage.q == "padded" or case.storage.k == "padded":
        return "no padded sequences"
    if case.causal == "top_left":
        return "no top_left causal mask"
    if case.head_dim != case.head_dim_v:
        return "no head_dim_v"
    if case.window and (case.window[0] is None or case.window[1] not in (0, None)):
        return "no window to the right"
    if case.window and case.window[1] is None and not case.causal and max(case.n_q) > 1:
        return "no window without its right side"
    return None


class Planned:
    """flashinfer's wrappers; one workspace for all of them, since they run one after another."""

    def __init__(self, flashinfer: Any):
        self.flashinfer = flashinfer
        self.workspace: Any = None

    def bind(self, operands: Arrays) -> Thunk:
        import torch

        case: Any = operands.case
        q, k, v = (operands.array(name, "torch") for name in "qkv")
        if self.workspace is None:
            self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        n_q, n_k = np.array(case.n_q), np.array(case.n_k)

        def index(x: Any) -> Any:
            return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(q.device)

        def starts(x: np.ndarray) -> Any:
            return index(np.concatenate([[0], np.cumsum(x)]))

        options = {
            "sm_scale": scale_of(case), "window_left": case.window[0] if case.window else -1, "logits_soft_cap": case.softcap or None,
            "q_data_type": q.dtype, "kv_data_type": k.dtype,
        }  # fmt: skip
        heads = (case.heads, case.heads_kv, case.head_dim)
        causal = bool(case.causal) or bool(case.window)
        if case.storage.k == "packed":
            wrapper = self.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD")
            wrapper.plan(starts(n_q), starts(n_k), *heads, causal=causal, **options)
            return lambda: wrapper.run(q, k, v)
        used = -(-n_k // case.storage.page_size)
        table = operands.array("page_table", "torch").cpu().numpy()
        pages = index(np.concatenate([row[:n] for row, n in zip(table, used, strict=True)]))
        last = index(np.where(n_k > 0, (n_k - 1) % case.storage.page_size + 1, 0))
        layout = "HND" if case.layout == "bhsd" else "NHD"
        if set(case.n_q) == {1}:
            grouped = case.heads > case.heads_kv  # where flashinfer's tensor cores pay
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, layout, use_tensor_cores=grouped)
            wrapper.plan(starts(used), pages, last, *heads, case.storage.page_size, **options)
        else:
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, layout)
            wrapper.plan(starts(n_q), starts(used), pages, last, *heads, case.storage.page_size, causal=causal, **options)
        return lambda: wrapper.run(q, (k, v))
