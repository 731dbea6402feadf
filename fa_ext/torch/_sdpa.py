"""scaled_dot_product_attention() with torch's meaning, the mode that puts it in torch's place, and what it leaves to torch."""

import functools
import math
import threading
import types

import torch
import torch.nn.functional as F
from torch.jit._builtins import _register_builtin
from torch.overrides import TorchFunctionMode

from .. import UnsupportedError, _core
from ._attention import attention
from ._serving import PLAIN, is_compiling

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_torchs = F.scaled_dot_product_attention


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    """``torch.nn.functional.scaled_dot_product_attention``, computed by fa_ext where it can be and by torch elsewhere.

    Parameters
    ----------
    query, key, value : Tensor
        (..., Hq, L, E), (..., H, S, E), (..., H, S, Ev); leading axes broadcast.
    attn_mask : Tensor or None
        Broadcasts to (..., Hq, L, S): boolean, True takes part; or floating, added to the scores, with a gradient.
    dropout_p : float
        Probability that a weight is dropped.
    is_causal : bool
        Query i sees the keys 0 to i (the diagonal starts top left, also where L is not S).
    scale : float or None
        Default 1/sqrt(E).
    enable_gqa : bool
        Hq is a multiple of H: query head h uses head h // (Hq // H) of key and value.

    Returns
    -------
    Tensor
        (..., Hq, L, Ev), query's dtype, with its axes in memory in the order of query's. A query that sees no key gets zeros.

    Raises
    ------
    RuntimeError
        Torch's own errors: calls that do not fit go to torch. ``explain`` says why a call went there.
    TypeError
        For sparse tensors, which neither takes.
    """
    call = _prepared(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(call, str):
        _refuse_sparse(query=query, key=key, value=value, attn_mask=attn_mask)
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    arrays, options, shape = call
    try:
        out = attention(*(x.resolve_neg() for x in arrays), **options)
    except UnsupportedError:
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out if shape is None else out.reshape(shape)


def explain(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The kernel that runs a call of ``scaled_dot_product_attention`` with these arguments: (kernel, reasons).

    ``kernel`` is the name of fa_ext's kernel, and ``reasons`` says of each that stands before it why it refused; or
    ``kernel`` is None, torch's own runs, and ``reasons["fa_ext"]`` says why.

    Raises
    ------
    BufferError
        For tensors without memory: on the meta device, or inside a transform.
    """
    call = _prepared(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(call, str):
        return None, {"fa_ext": call}
    arrays, options, _ = call
    options = {name: x for name, x in options.items() if name != "dropout_p"} | ({"dropout": (dropout_p, 0)} if dropout_p else {})
    tensors = {name: options[name] for name in ("bias", "mask") if name in options}
    with torch.no_grad():
        kernel, reasons = _core.explain(*arrays, **options | {name: x.detach() for name, x in tensors.items()})
    return kernel, reasons if kernel else {"fa_ext": f"no kernel takes the call: {reasons}"}


class sdpa(TorchFunctionMode):  # noqa: N801
    """``with fa_ext.torch.sdpa():`` calls of ``torch.nn.functional.scaled_dot_product_attention`` inside, also those in
    torch's modules, are calls of ``fa_ext.torch.scaled_dot_product_attention``.

    It holds for the thread that is inside. A block of ``torch.nn.attention.sdpa_kernel`` that allows none of torch's fused
    backends (``SDPBackend.MATH`` alone, say) is torch's; any other selection is of kernels that fa_ext stands for. The modules of
    ``torch.nn`` that have a fast path in evaluation (``TransformerEncoder``, ``MultiheadAttention``) take it as outside, with
    torch's own attention; so do scripted modules. Every call of a function of torch takes about a microsecond longer inside.
    """

    def __enter__(self):
        if not is_compiling():
            _open_blocks(1)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        if not is_compiling():
            _open_blocks(-1)

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            func = scaled_dot_product_attention
        elif func is F.multi_head_attention_forward:
            func = _multi_head_attention_forward
        return func(*args, **(kwargs or {}))


_length, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_torchs_has_torch_function = torch.overrides.has_torch_function


class _HasTorchFunction:
    """``torch.overrides.has_torch_function``, to which a block of ``sdpa`` is no reason: torch's modules would leave their fast
    path, and refuse nested tensors. It is equal to torch's, so that Dynamo, which looks functions up, takes one for the other."""

    def __call__(self, tensors):
        modes = [] if is_compiling() else [_mode_at(n) for n in range(_length())]
        if not modes or any(type(mode) is not sdpa for mode in modes):
            return _torchs_has_torch_function(tensors)
        for _ in modes:
            torch.overrides._pop_mode()
        try:
            return _torchs_has_torch_function(tensors)
        finally:
            for mode in modes:
                torch.overrides._push_mode(mode)

    def __eq__(self, other):
        return other is self or other is _torchs_has_torch_function

    def __hash__(self):
        return hash(_torchs_has_torch_function)


_has_torch_function, _lock, _blocks = _HasTorchFunction(), threading.Lock(), 0
_register_builtin(_has_torch_function, "aten::has_torch_function")  # TorchScript, too, looks functions up


def _open_blocks(change):
    """Counts the open blocks of ``sdpa``, of all threads. While there are any, torch's modules ask ``_has_torch_function``."""
    global _blocks
    with _lock:
        _blocks += change
        torch.overrides.has_torch_function = _has_torch_function if _blocks else _torchs_has_torch_function


#: Of torch's functions that a mode sees as one call, with no mode inside, this one calls scaled_dot_product_attention, by
#: its name in torch.nn.functional: a copy of the function, whose name stands for ours.
_multi_head_attention_forward = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"scaled_dot_product_attention": scaled_dot_product_attention},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _prepared(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """(q, k, v), options and the shape of the result (None: as it is) of ``attention``; or why torch's own is to run."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    reason = _unfit(tensors, attn_mask is not None, dropout_p, is_causal, scale, enable_gqa)
    if reason:
        return reason
    options = {"causal": "top_left"} if is_causal else {}
    if scale is not None:
        options["scale"] = scale
    if dropout_p:
        options["dropout_p"] = dropout_p
    heads, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    grouped = enable_gqa and not heads == heads_k == heads_v
    if grouped and (heads_k != heads_v or heads_k == 0 or heads % heads_k):
        return f"{heads} heads of query, {heads_k} of key, {heads_v} of value; accepted: as many of key as of value, dividing query's"
    arrays, shape = (query, key, value), None
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
            and (grouped or heads == heads_k == heads_v)):  # fmt: skip
        arrays, shape = _flattened(query, key, value, grouped)
        if arrays is None:
            return shape
    if attn_mask is not None:
        rows = (query.shape if shape is None else shape)[:-1]
        if not _broadcasts(attn_mask.shape, (*rows, key.shape[-2])):
            return f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {(*rows, key.shape[-2])}"
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = _flattened_mask(attn_mask.resolve_neg(), rows)
    return arrays, options, shape


def _refuse_sparse(**tensors):
    """Raises a TypeError for a sparse tensor, of which torch's own errors do not speak."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.layout is not torch.strided and not x.is_nested:
            raise TypeError(f"{name} has layout {x.layout}; accepted: torch.strided, and nested tensors")


def _unfit(tensors, masked, dropout_p, is_causal, scale, enable_gqa):
    """Why torch's own is to run, as far as it shows before shapes are matched; or None."""
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return "query, key, value and attn_mask are not all tensors"
    query, key, value = tensors[:3]
    for x in tensors:
        if type(x) not in PLAIN and type(x).__torch_function__ is not torch._C._disabled_torch_function_impl:
            return f"a tensor is a {type(x).__name__}, which has functions of its own; accepted: torch.Tensor"
    if any(x.layout != torch.strided or x.is_nested for x in tensors):
        return "a tensor is sparse or nested; accepted: strided tensors"
    if any(x.device != query.device for x in tensors):
        return f"tensors are on {', '.join(sorted({str(x.device) for x in tensors}))}; accepted: one device"
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"dtypes are {query.dtype}, {key.dtype} and {value.dtype}; accepted: one of float16, bfloat16, float32, float64"
    if masked and is_causal:
        return "both attn_mask and is_causal are given; accepted: one of them"
    if masked and tensors[3].dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask is {tensors[3].dtype}; accepted: bool, float32 or query's dtype"
    if enable_gqa and any(x.dim() < 3 for x in (query, key, value)):
        return f"enable_gqa with {query.dim()}, {key.dim()} and {value.dim()} axes; accepted: 3 or more"
    if any(x.dim() < 2 for x in (query, key, value)) or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return f"shapes are {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; accepted: (..., L, E), (..., S, E), (..., S, Ev)"
    if not (1 <= query.shape[-1] <= 256 and 1 <= value.shape[-1] <= 256):
        return f"head_dim is {query.shape[-1]} and that of value {value.shape[-1]}; accepted: 1 to 256"
    if scale is not None and not (isinstance(scale, _NUMBERS) and abs(scale) < math.inf):
        return f"scale is {scale}; accepted: finite numbers"
    if not (isinstance(dropout_p, _NUMBERS) and 0 <= dropout_p <= 1):
        return f"dropout_p is {dropout_p}; accepted: 0 to 1"
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        return f"is_causal is {is_causal} and enable_gqa {enable_gqa}; accepted: True or False"
    if _no_fused():
        return "torch.nn.attention.sdpa_kernel allows no fused backend; accepted: FLASH, EFFICIENT or CUDNN_ATTENTION among them"
    return _no_device(query.device.type, query.device.index, query.dtype == torch.float64)


@torch.compiler.assume_constant_result
def _no_fused():
    """Whether ``sdpa_kernel`` allows none of torch's fused backends. A compiler asks while it traces, as for torch's own."""
    cuda = torch.backends.cuda
    return not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


def _no_device(kind, index, double):
    """Why no kernel runs on a device, or None."""
    if kind in ("cpu", "meta"):
        return None
    if kind != "cuda":
        return f"the device is {kind}; accepted: cpu, cuda"
    if double:
        return "float64 on a GPU; accepted: float16, bfloat16, float32"
    return _no_gpu(index)


@torch.compiler.assume_constant_result
def _no_gpu(index):
    """`_gpu_lacks`, which a compiler must not look into: torch 2.11's does where the cache is the outermost."""
    return _gpu_lacks(index)


@functools.cache
def _gpu_lacks(index):
    if not _core.build_info()["cuda"]:
        return "this build of fa_ext has no CUDA kernels"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}; accepted: 8.0 and later"


def _flattened(query, key, value, grouped):
    """Tensors of 4 axes, the leading ones broadcast and flattened into one, and the shape of the result; or None and why
    not. Without groups the heads are one of the leading axes."""
    skip = 3 if grouped else 2
    leads = [x.shape[:-skip] for x in (query, key, value)]
    try:
        lead = tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        return None, f"leading axes {', '.join(str(tuple(one)) for one in leads)} do not broadcast"
    arrays = []
    for x in (query, key, value):
        x = x.expand(*lead, *x.shape[-skip:])
        x = x.unsqueeze(0) if x.dim() == 2 else x
        arrays.append(x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]))
    return tuple(arrays), (*lead, *query.shape[-skip:-1], value.shape[-1])


def _broadcasts(shape, wanted):
    """Whether a shape broadcasts to another without making it larger."""
    if len(shape) > len(wanted):
        return False
    return all(size == 1 or size == full for size, full in zip(reversed(shape), reversed(wanted), strict=False))


def _flattened_mask(mask, rows):
    """A mask whose queries are ``rows`` = (..., Hq, L), with leading axes flattened; where each of them broadcasts, the
    flattened one does."""
    if mask.dim() <= 3 or len(rows) <= 3:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(mask.shape[-3:])
    mask = mask.expand(*rows[:-2], *mask.shape[-3:])
    return mask.reshape(math.prod(rows[:-2]), *mask.shape[-3:])
