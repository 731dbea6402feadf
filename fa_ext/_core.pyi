import sys
from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, final, overload

import numpy as np

__version__: str

class UnsupportedError(RuntimeError): ...
class CudaError(RuntimeError): ...

@final
class DeviceArray:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def ndim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

_Array = TypeVar("_Array")
_Out = TypeVar("_Out")
_Lse = TypeVar("_Lse")
_Causal: TypeAlias = bool | np.bool_ | Literal["top_left", "bottom_right"]
_Window: TypeAlias = tuple[int | None, int | None] | list[int | None]
_Dropout: TypeAlias = tuple[Any, ...] | list[Any]
_Layout: TypeAlias = Literal["bhsd", "bshd"]

# An array is an object of any library, so that the result has the type of q.
# ---- from csrc/python/signature.def, by python -m tests.library.support.stub ----
@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: None = None,
    return_lse: Literal[False] = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> _Array: ...
@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: None = None,
    return_lse: Literal[True],
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> tuple[_Array, _Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: tuple[_Out, _Lse],
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> tuple[_Out, _Lse]: ...
@overload
def attention(
    q: _Array,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: _Out,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> _Out | tuple[_Out, _Array]: ...
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    device: dict[str, Any] | None = None,
) -> tuple[str | None, dict[str, str]]: ...
def answers(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    device: dict[str, Any] | None = None,
    features: int = 0,
) -> dict[str, tuple[str, str, dict[str, Any] | None]]: ...
def attention_backward(
    dout: Any,
    q: _Array,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: None = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    wrt: Sequence[Literal["q", "k", "v", "bias", "sinks"]] = ("q", "k", "v"),
    grads: Sequence[Any] | None = None,
    accumulate: bool = False,
    deterministic: bool = True,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> tuple[_Array, ...]: ...
def explain_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: None = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    wrt: Sequence[Literal["q", "k", "v", "bias", "sinks"]] = ("q", "k", "v"),
    grads: Sequence[Any] | None = None,
    accumulate: bool = False,
    deterministic: bool = True,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    device: dict[str, Any] | None = None,
) -> tuple[str | None, dict[str, str]]: ...
def merge(
    outs: Sequence[_Array],
    lses: Sequence[Any],
    *,
    sinks: Any = None,
    layout: _Layout | None = None,
    out: Any = None,
    stream: Any = None,
    kernel: str | None = None,
) -> tuple[_Array, _Array]: ...
def explain_merge(
    outs: Sequence[Any],
    lses: Sequence[Any],
    *,
    sinks: Any = None,
    layout: _Layout | None = None,
    out: Any = None,
    stream: Any = None,
    kernel: str | None = None,
) -> tuple[str | None, dict[str, str]]: ...
def append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    positions: Any = None,
    layout: _Layout | None = None,
    slots: Any = None,
    q: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    out: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
) -> Any: ...
def explain_append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    positions: Any = None,
    layout: _Layout | None = None,
    slots: Any = None,
    q: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    out: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
) -> tuple[str | None, dict[str, str]]: ...
@overload
def documents(
    ids: _Array,
    *,
    count: int | None = None,
    out: None = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
) -> _Array: ...
@overload
def documents(
    ids: Any,
    *,
    count: int | None = None,
    out: _Out,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
) -> _Out: ...
def explain_documents(
    ids: Any,
    *,
    count: int | None = None,
    out: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
) -> tuple[str | None, dict[str, str]]: ...
def workspace_size(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    alibi: Any = None,
    intervals: Any = None,
    max_logit: Any = None,
    cu_seqlens_q: Any = None,
    seqlens_q: Any = None,
    max_seqlen_q: SupportsIndex | None = None,
    cu_seqlens_k: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_range: tuple[Any, Any] | None = None,
    positions: Any = None,
    segments: tuple[Any, Any] | None = None,
    dropout: _Dropout | None = None,
    layout: _Layout | None = None,
    out: Any = None,
    return_lse: bool = False,
    workspace: Any = None,
    check: bool | None = None,
    stream: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> int: ...
def faults(
    device: int | None = 0,
    *,
    clear: bool = True,
) -> list[tuple[str, int, int, int, int]]: ...
def kernels(
    operation: Literal["attention", "backward", "merge", "append", "documents"] = "attention",
) -> tuple[str, ...]: ...
def to_device(
    array: np.ndarray[Any, Any],
    device: int = 0,
) -> DeviceArray: ...
def load(
    path: str | PathLike[str],
    kernel: str | None = None,
) -> str: ...
# ---- end ----
@overload
def document_intervals(
    ids: _Array, *, spans: Any = None, causal: bool = True, window: int | None = None, out: None = None, stream: Any = None,
) -> _Array: ...
@overload
def document_intervals(
    ids: None = None, *, spans: _Array, causal: bool = True, window: int | None = None, out: None = None, stream: Any = None,
) -> _Array: ...
@overload
def document_intervals(
    ids: Any = None, *, spans: Any = None, causal: bool = True, window: int | None = None, out: _Out, stream: Any = None,
) -> _Out: ...
def to_numpy(array: Any, /) -> np.ndarray[Any, Any]: ...
def time_launches(count: int, /, q: Any, k: Any, v: Any, **options: Any) -> float: ...
def xla_workspace(
    backward: bool, device: int, arrays: dict[str, tuple[str, tuple[int, ...]]],
    options: tuple[int, int, int, int, float, float, int, int, int, int, float], kernel: str, /,
) -> int: ...
xla_nothing: Any
def loaded() -> dict[str, tuple[str, str]]: ...

class _Operand(NamedTuple):
    number: int
    name: str
    role: Literal["data", "option", "state", "index", "memory"]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    gradient: bool
    dtypes: str
    axes: str

def operands() -> tuple[_Operand, ...]: ...
def build_info() -> dict[str, Any]: ...
def cpu_info() -> dict[str, Any]: ...
def device_count() -> int: ...
def device_info(index: int, /) -> dict[str, Any]: ...
