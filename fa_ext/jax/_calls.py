"""The custom calls: what identifies one, the shapes of its results, its attributes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import numpy as np

from .. import CudaError, UnsupportedError, _core
from .._operands import DIFFERENTIABLE, IDS, OPERANDS, SEQUENCES, STATE
from ._documents import packed, unpacked


#: An operand of the forward whose place the result of this name takes.
LOGITS = "max_logit"


def _order(operation):
    carried = (o.name for o in OPERANDS.values() if o.role in ("data", "option") or o.name in SEQUENCES)
    return (*(name for name in carried if operation in OPERANDS[name].reads or (name == LOGITS and operation == "attention")), IDS, STATE)


#: Operands and results in the order of the handlers (csrc/xla/ffi.h), which do not know of ids: ``Call.over_sequences``.
FORWARD = _order("attention")
BACKWARD = _order("backward")
GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)

_CAUSAL = {False: 0, True: 1, "top_left": 2, "bottom_right": 3}
_LAYOUTS = {"bhsd": 0, "bshd": 1}
_TARGETS = {False: "fa_ext_attention", True: "fa_ext_attention_backward"}
_CPU = -1

for _backward, _target in _TARGETS.items():
    _name = "xla_attention_backward" if _backward else "xla_attention"
    for _platform in ("cpu", "cuda"):
        _handler = getattr(_core, f"{_name}_{_platform}")
        jax.ffi.register_ffi_target(_target, _handler, platform={"cpu": "cpu", "cuda": "CUDA"}[_platform])


@dataclass(frozen=True)
class Options:
    """The options of a call that are not arrays, as ``attention`` takes them."""

    causal: bool | str = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    layout: str = "bhsd"
    deterministic: bool = True
    kernel: str | None = None
    kernel_backward: str | None = None
    batch_invariant: bool = False
    dropout: float = 0.0  #: its p; the state is an operand
    max_seqlen_q: int | None = None

    def fields(self) -> tuple:
        """As ``_core.xla_workspace`` takes them."""
        left, right = self.window or (None, None)
        most = self.max_seqlen_q
        given = (self.scale is not None) + 2 * (left is not None) + 4 * (right is not None) + 8 * (most is not None)
        return (given, _CAUSAL[self.causal], _LAYOUTS[self.layout], int(self.batch_invariant), self.scale or 0.0,
                self.softcap, left or 0, right or 0, most or 0, int(not self.deterministic), self.dropout)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One operation with the names of its operands and results; ``operands`` are in the order of ``names``."""

    options: Options
    names: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def backward(self) -> bool:
        return "lse" in self.names

    def heads_axis(self, ndim: int) -> int:
        """Of q, k and v; packed ones have three axes."""
        return 1 if ndim == 3 or self.options.layout == "bhsd" else 2

    def of_rows(self, of_q) -> tuple:
        """The axes of the LSE, of those of q: their extents, or names, in order."""
        heads = self.heads_axis(len(of_q))
        return (of_q[1], of_q[0]) if len(of_q) == 3 else (of_q[0], of_q[heads], of_q[3 - heads])

    @property
    def kernel(self) -> str:
        return (self.options.kernel_backward if self.backward else self.options.kernel) or ""

    def shapes(self, operands) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """(shape, dtype) of each result."""
        named = dict(zip(self.names, operands, strict=True))
        q, v = named["q"], named["v"]
        made = {"out": ((*q.shape[:-1], v.shape[-1]), q.dtype),
                "lse": (self.of_rows(q.shape), np.dtype(np.float64 if q.dtype == np.float64 else np.float32))}  # fmt: skip
        if LOGITS in named:
            made[LOGITS] = named[LOGITS].shape, np.dtype(np.float32)
        made |= {f"d{name}": (named[name].shape, named[name].dtype) for name in named}
        return {name: made[name] for name in self.results}

    def over_sequences(self) -> Call:
        """The call over packed sequences that a call with ids is."""
        names = {*self.names, "cu_seqlens_q", "cu_seqlens_k"} - {IDS}
        return replace(self, names=tuple(name for name in (BACKWARD if self.backward else FORWARD) if name in names))

    def workspace(self, operands, device: int) -> int:
        """Bytes on a CUDA device, or of the CPU where ``device`` is -1. Raises what the call would raise."""
        known = {n: (x.dtype.name, tuple(x.shape)) for n, x in zip(self.names, operands, strict=True)}
        known |= {n: (dtype.name, tuple(shape)) for n, (shape, dtype) in self.shapes(operands).items()}
        known.pop(STATE, None)
        return _core.xla_workspace(self.backward, device, known, self.options.fields(), self.kernel)

    def attributes(self) -> dict:
        given, causal, layout, invariant, scale, softcap, left, right, most, unordered, dropout = self.options.fields()
        made = {"given": np.int32(sum(1 << OPERANDS[name].number for name in self.names)),
                "options_given": np.int32(given), "causal": np.int32(causal), "layout": np.int32(layout),
                "batch_invariant": np.int32(invariant), "scale": np.float64(scale), "softcap": np.float64(softcap),
                "window_left": np.int64(left), "window_right": np.int64(right), "max_seqlen_q": np.int64(most),
                "dropout": np.float64(dropout), "kernel": self.kernel}  # fmt: skip
        if self.backward:
            made["wants"] = np.int32(sum(1 << GRADIENTS.index(name) for name in self.results))
            made["unordered"] = np.int32(unordered)
        return made


def check(options: Options, names, operands) -> None:
    """Raises what the forward call of these operands would raise, before anything is traced."""
    any_kernel = replace(options, kernel=None)  # whose device is only known when it runs
    call = Call(any_kernel, tuple(names), ("out",))
    if IDS in call.names:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]  # without what shards they are of
        operands = jax.eval_shape(functools.partial(_operands_over_sequences, call), *shapes)
        call = call.over_sequences()
    call.workspace(operands, _CPU)


def _operands_over_sequences(call, *operands):
    made = packed(dict(zip(call.names, operands, strict=True)), call.options.layout)
    return tuple(made[name] for name in call.over_sequences().names)


@functools.cache
def _cuda_ordinal() -> int | None:
    """The CUDA device whose workspace counts: the first of JAX's, if this build has CUDA kernels."""
    if not _core.build_info()["cuda"]:
        return None
    try:
        return int(jax.local_devices(backend="cuda")[0].local_hardware_id)
    except RuntimeError:  # JAX has no such backend here
        return None


def _workspace(call: Call, operands) -> int:
    ordinal = _cuda_ordinal()
    if ordinal is None:
        return 0
    try:
        return call.workspace(operands, ordinal)
    except (CudaError, UnsupportedError):  # the call may be for the CPU; on the device it says why
        return 0


def varying(x) -> frozenset[str]:
    """The manual mesh axes that an array varies over, as shard_map checks them; none where JAX does not know of them."""
    found = jax.typeof(x) if hasattr(jax, "typeof") else None
    kind = getattr(found, "manual_axis_type", None)  # 0.10; `vma` before
    return frozenset(kind.varying if kind is not None else getattr(found, "vma", ()))


def _like(x, shape, dtype):
    """The type of a result that varies over the mesh axes that ``x`` varies over."""
    if varying(x):
        return jax.typeof(x).update(shape=shape, dtype=np.dtype(dtype), weak_type=False)
    return jax.ShapeDtypeStruct(shape, dtype)


def run(call: Call, *operands):
    """The custom call itself: the results in the order of ``call.results``."""
    if IDS in call.names:
        made = run(call.over_sequences(), *_operands_over_sequences(call, *operands))
        return tuple(unpacked(x, shape, call.options.layout) for x, (shape, _) in zip(made, call.shapes(operands).values(), strict=True))
    q = operands[0]
    types = [_like(q, shape, dtype) for shape, dtype in call.shapes(operands).values()]
    types.append(_like(q, (_workspace(call, operands),), np.uint8))
    aliases = {call.names.index(LOGITS): call.results.index(LOGITS)} if LOGITS in call.results else {}
    made = jax.ffi.ffi_call(_TARGETS[call.backward], types, input_output_aliases=aliases)(*operands, **call.attributes())
    return tuple(made[:-1])
