"""Other implementations, each only where it imports: what the kernels are compared with."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from bench import report
from bench.implementations import dense_rows, serving
from bench.implementations.dropped import Dropping
from bench.implementations.flex import FlexAttention
from bench.implementations.implementation import Implementation, Thunk
from bench.implementations.flash3 import FlashAttention3, VllmFlashAttention3
from bench.implementations.peer import Dense, Peer, bhsd, bias_dtype, bshd, scale_of
from bench.implementations.torch_backward import BACKENDS, TorchBackward
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.memory import empty_bytes
from bench.problems.operands import Arrays, Operands


class NumPy(Peer):
    """matmul, softmax, matmul in the inputs' dtype (half types in float32), as one writes it without a library; backward from
    the LSE and the output, in five products."""

    operations = frozenset({"attention", "backward"})
    dtypes = frozenset({"float16", "bfloat16", "float32", "float64"})

    def __init__(self):
        super().__init__("numpy", "numpy", "wall")

    def refuses(self, case: Case) -> str | None:
        scores = 4 * case.batch * case.heads * case.seq_q * case.seq_k
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 3 * scores > free:  # the scores, a temporary of theirs, and room
            return f"{scores / 1e9:.3g} GB of scores do not fit {free / 1e9:.3g} GB of free memory three times"
        return super().refuses(case)

    def bind(self, operands: Operands) -> Thunk:
        case = operands.case
        q, k, v = (bhsd(operands, name, self.library) for name in "qkv")
        work = np.float64 if case.dtype == "float64" else np.float32
        seen = None if not case.causal else _band(case)
        group, scale = case.heads // case.heads_kv, work(scale_of(case))
        if case.operation == "backward":
            dout, out = (bhsd(operands, name, self.library) for name in ("dout", "out"))
            return functools.partial(_differentiate, dout, q, k, v, out, operands.array("lse", self.library), seen, scale, work,
                                     case.layout == "bshd")  # fmt: skip

        def call():
            keys, values = (np.repeat(x, group, axis=1) if group > 1 else x for x in (k, v))
            s = np.matmul(q.astype(work, copy=False), keys.astype(work, copy=False).swapaxes(-1, -2)) * scale
            if seen is not None:
                s = np.where(seen, s, -np.inf)
            s -= s.max(axis=-1, keepdims=True)
            np.exp(s, out=s)
            s /= s.sum(axis=-1, keepdims=True)
            out = np.matmul(s, values.astype(work, copy=False)).astype(q.dtype, copy=False)
            return out.swapaxes(1, 2) if case.layout == "bshd" else out

        return call


class TorchSdpa(Dropping):
    """``torch.nn.functional.scaled_dot_product_attention`` held to one backend, or (None) left to its choice; of the fused
    backends also their backward operators."""

    def __init__(self, backend: str | None, name: str, device: Cpu | Cuda):
        super().__init__(name, "torch", "graph" if device.kind == "cuda" else "wall")
        self.backend = backend
        fused = "CPU" if device.kind == "cpu" and backend == "FLASH_ATTENTION" else backend
        self.backward = TorchBackward(fused, name) if fused in BACKENDS and fused else None
        self.operations = frozenset({"attention"} | ({"backward", "serving"} if self.backward else set()))
        if backend in (None, "MATH", "EFFICIENT_ATTENTION") or device.kind == "cpu":
            self.dtypes = frozenset({"float16", "bfloat16", "float32"})
        self.extras = frozenset() if backend == "FLASH_ATTENTION" else frozenset({"window", "mask", "bias"})
        if device.kind == "cuda" or backend == "MATH":
            self.extras |= {"dropout"}

    def refuses(self, case: Case) -> str | None:
        if case.operation == "backward" and self.backward:
            return self.backward.refuses(case)
        why = super().refuses(case)
        if case.operation == "serving":
            return why or ("no window" if case.window else serving.dense_refuses(case))
        if why is None and case.bias and bias_dtype(case) != case.dtype:
            return f"no {bias_dtype(case)} bias of {case.dtype} inputs"
        return why

    def bind(self, operands: Arrays) -> Thunk:
        if operands.case.operation == "backward" and self.backward:
            return self.backward.bind(operands)
        return self._call(operands)

    def attended(self, operands: Arrays, v: Any) -> Any:
        if operands.case.operation == "backward" and self.backward:
            return self.backward.attended(operands, v)
        out = self._call(operands, v)()
        return out.swapaxes(1, 2) if operands.case.layout == "bshd" else out

    def timing_of(self, case: Case) -> str:
        return self.backward.timing_of(case) if case.operation == "backward" and self.backward else super().timing_of(case)

    def _call(self, operands: Arrays, other_v: Any = None) -> Thunk:
        """The forward on the operands, or on another v, (B, Hk, Sk, Dv)."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        case = operands.case
        choose = functools.partial(sdpa_kernel, getattr(SDPBackend, self.backend)) if self.backend else nullcontext
        mask, swap = None, case.layout == "bshd"
        if case.operation == "serving":  # of one length, as a dense call on a dense copy of what the pages hold
            q, k, v, is_causal, restore = serving.dense(operands)
        else:
            q, k, v = (bhsd(operands, name, self.library) for name in "qkv")
            v = v if other_v is None else other_v
            square = case.seq_q == case.seq_k or case.causal == "top_left"
            is_causal = bool(case.causal) and square and not (case.window or case.mask or case.bias)
            mask = self._mask(operands, q.device, is_causal)

            def restore(out: Any) -> Any:
                return out.swapaxes(1, 2) if swap else out

        options = {"attn_mask": mask, "is_causal": is_causal, "scale": case.scale, "enable_gqa": case.heads != case.heads_kv}
        if case.dropout:
            options["dropout_p"] = case.dropout[0]
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options)

        def call():
            with choose(), torch.no_grad():
                return restore(attend())

        return call

    def _mask(self, operands: Arrays, device: Any, is_causal: bool) -> Any:
        """The mask that torch is given, of what it is not told otherwise; None: none."""
        import torch

        case, mask = operands.case, None
        if (case.causal or case.window) and not is_causal:
            mask = torch.from_numpy(_band(case)).to(device)
        if case.mask:
            given = operands.array("mask", self.library)
            mask = given if mask is None else mask & given
        if case.bias:
            bias = operands.array("bias", self.library)
            if mask is None and bias.shape[-1] != case.seq_k:  # fused backends want the keys' stride to be 1
                mask = torch.from_numpy(np.ones(case.seq_k, bool)).to(device)
            mask = bias if mask is None else torch.where(mask, bias, -math.inf)
            mask = torch.broadcast_to(mask, (case.batch, case.heads, case.seq_q, case.seq_k))
        return mask


class FlashAttention(Dense):
    """FlashAttention-2 (package flash_attn) or -4 (flash_attn.cute). `unbounded` is what they take for a side of the
    window that has no end."""

    extras = frozenset({"window", "softcap"})
    causal = "last"

    def __init__(self, name: str, module: str, unbounded: int | None = -1):
        super().__init__(name, "torch")
        self.unbounded = unbounded
        self.function = importlib.import_module(module).flash_attn_func

    def attend(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        options: dict[str, Any] = {"softmax_scale": case.scale, "causal": bool(case.causal)}
        if case.window:
            options["window_size"] = tuple(self.unbounded if side is None else side for side in case.window)
        if case.softcap:
            options["softcap"] = case.softcap
        function = self.function

        def attend(q, k, v):
            out = function(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return attend


class FlashInfer(Dense):
    """flashinfer's single-request prefill (batch 1), and its wrappers for decode and prefill over sequences."""

    extras = frozenset({"softcap"})
    operations = frozenset({"attention", "serving"})
    causal = "last"

    def __init__(self):
        super().__init__("flashinfer", "torch")
        flashinfer = importlib.import_module("flashinfer")
        self.function, self.planned = flashinfer.single_prefill_with_kv_cache, serving.Planned(flashinfer)

    def refuses(self, case: Case) -> str | None:
        if case.operation == "serving":
            missing = [f"no {name}" for name in case.arrays()]
            return f"no {case.dtype}" if case.dtype not in self.dtypes else next(iter(missing), serving.flashinfer_refuses(case))
        return "single-request kernel: batch 1 only" if case.batch != 1 else super().refuses(case)

    def bind(self, operands: Operands) -> Thunk:
        return self.planned.bind(operands) if operands.case.operation == "serving" else super().bind(operands)

    def attend(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        function = self.function
        options = {"causal": bool(case.causal), "sm_scale": scale_of(case), "logits_soft_cap": case.softcap or None}
        return lambda q, k, v: function(q[0], k[0], v[0], **options)[None]


class Jax(Dense):
    """``jax.nn.dot_product_attention``, jitted: cuDNN on a GPU, XLA's own on the CPU. Timed by the host's clock."""

    causal = "square"

    def __init__(self, device: Cpu | Cuda):
        # By default JAX takes three quarters of the GPU's memory, and others then lack what they need.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        super().__init__("jax", "jax", "wall")
        self.dtypes = frozenset({"float16", "bfloat16"} | ({"float32"} if device.kind == "cpu" else set()))
        self.implementation = "cudnn" if device.kind == "cuda" else "xla"
        # A stopwatch waits for the whole GPU, JAX's streams included; on the CPU nothing else waits for JAX.
        self.waits = device.kind == "cpu"
        self.compiled: dict[tuple, Any] = {}

    def bind(self, operands: Operands) -> Thunk:
        import jax

        case = operands.case
        q, k, v = (bshd(operands, name, self.library) for name in "qkv")
        key = (case.scale, bool(case.causal), case.layout)
        if key not in self.compiled:
            attend = functools.partial(jax.nn.dot_product_attention, scale=case.scale, is_causal=bool(case.causal),
                                       implementation=self.implementation)  # fmt: skip
            self.compiled[key] = jax.jit(attend if case.layout == "bshd" else lambda q, k, v: attend(q, k, v).swapaxes(1, 2))
        compiled, waits = self.compiled[key], self.waits

        def call():
            out = compiled(q, k, v)
            return out.block_until_ready() if waits else out

        return call


class Xformers(Dense):
    """``xformers.ops.memory_efficient_attention`` with its own choice of operator."""

    dtypes = frozenset({"float16", "bfloat16", "float32"})
    causal = "square"

    def __init__(self):
        super().__init__("xformers", "torch")
        self.ops = importlib.import_module("xformers.ops")

    def refuses(self, case: Case) -> str | None:
        return "no grouped heads through this call" if case.heads != case.heads_kv else super().refuses(case)

    def attend(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        bias = self.ops.LowerTriangularMask() if case.causal else None
        return functools.partial(self.ops.memory_efficient_attention, attn_bias=bias, scale=case.scale)


class Copy(Implementation):
    """A copy from one half of as many bytes as a problem moves to the other: what the device does without computing."""

    operations = frozenset({"merge", "append"})
    judged = False

    def __init__(self, device: Cpu | Cuda):
        super().__init__("copy", device.default_arrays)
        self.device = device

    def refuses(self, case: Case) -> str | None:
        return None

    def bind(self, operands: Operands) -> Thunk:
        source, target = (empty_bytes(operands.case.bytes() // 2, self.device) for _ in range(2))
        source[:] = 1
        if self.device.torch:
            return lambda: target.copy_(source)
        return functools.partial((self.device.cupy or np).copyto, target, source)


def _differentiate(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seen: Any, scale: Any, work: Any, swap: bool) -> tuple:
    """dq, dk, dv of (B, H, S, D) arrays in NumPy."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    dout, q, out = (x.astype(work, copy=False) for x in (dout, q, out))
    k, v = (np.repeat(x.astype(work, copy=False), group, axis=1) if group > 1 else x.astype(work, copy=False) for x in (k, v))
    p = np.matmul(q, k.swapaxes(-1, -2)) * scale - lse[..., None]
    if seen is not None:
        p = np.where(seen, p, -np.inf)
    np.exp(p, out=p)
    ds = np.matmul(dout, v.swapaxes(-1, -2)) - (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= scale
    found = [np.matmul(ds, k), np.matmul(ds.swapaxes(-1, -2), q), np.matmul(p.swapaxes(-1, -2), dout)]
    if group > 1:
        shared = (k.shape[0], k.shape[1] // group, group)
        found[1:] = [x.reshape(*shared, *x.shape[2:]).sum(axis=2) for x in found[1:]]
    return tuple((x.swapaxes(1, 2) if swap else x).astype(dtype, copy=False) for x in found)


def _band(case: Case) -> np.ndarray:
    """(Sq, Sk) boolean: what causal and window leave visible."""
    left, right, diagonal = case.band()
    offset = np.arange(case.seq_k)[None, :] - (np.arange(case.seq_q)[:, None] + diagonal)
    return (offset >= -left) & (offset <= right)


# name: (devices, module that must import, how it is made)
PEERS: dict[str, tuple[tuple[str, ...], str, Callable[[Cpu | Cuda], Implementation]]] = {
    "torch-flash": (("cpu", "cuda"), "torch", lambda d: TorchSdpa("FLASH_ATTENTION", "torch-flash", d)),
    "torch-cudnn": (("cuda",), "torch", lambda d: TorchSdpa("CUDNN_ATTENTION", "torch-cudnn", d)),
    "torch-efficient": (("cuda",), "torch", lambda d: TorchSdpa("EFFICIENT_ATTENTION", "torch-efficient", d)),
    "torch-math": (("cpu", "cuda"), "torch", lambda d: TorchSdpa("MATH", "torch-math", d)),
    "torch-sdpa": (("cpu", "cuda"), "torch", lambda d: TorchSdpa(None, "torch-sdpa", d)),
    "torch-flex": (("cuda",), "torch", FlexAttention),
    "torch-flash-ordered": (("cuda",), "torch", lambda d: TorchBackward("FLASH_ATTENTION", "torch-flash-ordered", deterministic=True)),
    "flash-attn-2": (("cuda",), "flash_attn", lambda d: FlashAttention("flash-attn-2", "flash_attn")),
    "flash-attn-3": (("cuda",), "torch", lambda d: FlashAttention3("flash-attn-3")),
    "flash-attn-3-ordered": (("cuda",), "torch", lambda d: FlashAttention3("flash-attn-3-ordered", deterministic=True)),
    "vllm-flash-attn-3": (("cuda",), "torch", lambda d: VllmFlashAttention3("vllm-flash-attn-3")),
    "flash-attn-4": (("cuda",), "flash_attn", lambda d: FlashAttention("flash-attn-4", "flash_attn.cute", None)),
    "flashinfer": (("cuda",), "flashinfer", lambda d: FlashInfer()),
    "jax": (("cpu", "cuda"), "jax", Jax),
    "xformers": (("cuda",), "xformers", lambda d: Xformers()),
    dense_rows.NAME: (("cpu", "cuda"), "fa_ext", lambda d: dense_rows.DenseRows(d.default_arrays)),
    "copy": (("cpu", "cuda"), "numpy", Copy),
    "numpy": (("cpu",), "numpy", lambda d: NumPy()),
}
# One of the others under another name: only where it is asked for.
REPEATED = ("torch-sdpa",)
SDPA = ("torch-flash", "torch-cudnn", "torch-efficient", "torch-math")


def open_peer(name: str, device: Cpu | Cuda) -> Implementation:
    devices, module, make = PEERS[name]
    if device.kind not in devices:
        raise report.UsageError(f"{name} does not run on the {device.kind}")
    if importlib.util.find_spec(module) is None:
        raise report.UsageError(f"{name} needs the package {module}, which is not installed")
    try:
        return make(device)
    except Exception as error:  # an installed peer that fails to load is a peer that is not there
        raise report.UsageError(f"{name} does not load: {type(error).__name__}: {error}") from error


def available(device: Cpu | Cuda, wanted: list[str] | None = None) -> tuple[list[Implementation], dict[str, str]]:
    """(peers that load, {peer: why not}) for a device; `wanted` names are taken instead of all that fit the device."""
    found, missing = [], {}
    fitting = [name for name, (devices, _, _) in PEERS.items() if device.kind in devices and name not in REPEATED]
    for name in fitting if wanted is None else wanted:
        try:
            found.append(open_peer(name, device))
        except report.UsageError as error:
            missing[name] = str(error)
    return found, missing
