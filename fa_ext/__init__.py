"""Attention for any array library: NumPy, CuPy, PyTorch, JAX, Numba, and whatever speaks DLPack.

``attention(q, k, v, ...)`` runs hand-written C and CUDA kernels on the arrays it is given and returns the result in the
caller's own kind; ``attention_backward(dout, q, k, v, out, lse, ...)`` its gradients. ``kernels()`` and ``explain()`` say which kernels there are and which one a call takes, ``verify()``
holds a call against float64, ``merge()`` joins results over parts of the keys, ``documents()`` makes sequences of ids, ``document_intervals()`` intervals,
``to_device()`` and ``to_numpy()`` copy.
"""

import importlib
from pathlib import Path

_NEEDS = "fa_ext needs NumPy 2.0 or newer, {}; run: pip install 'numpy>=2.0'"

try:
    from numpy import __version__ as _numpy
except ImportError as error:
    if error.name != "numpy":
        raise
    raise ImportError(_NEEDS.format("which is not installed"), name="numpy") from None

if int(_numpy.partition(".")[0]) < 2:
    raise ImportError(_NEEDS.format(f"found {_numpy}"), name="numpy")

try:
    from ._core import (
        CudaError,
        DeviceArray,
        UnsupportedError,
        __version__,
        append,
        attention,
        attention_backward,
        document_intervals,
        documents,
        explain,
        explain_append,
        explain_backward,
        explain_documents,
        explain_merge,
        faults,
        kernels,
        merge,
        to_device,
        to_numpy,
        workspace_size,
    )
except ImportError as error:
    if error.name != f"{__name__}._core":
        raise
    raise ImportError(
        "fa_ext is not compiled here; run 'pip install -e .' in the directory that holds setup.py "
        "('pip install .' serves programs that run elsewhere)",
        name=error.name,
    ) from None

__all__ = [
    "CudaError",
    "DeviceArray",
    "UnsupportedError",
    "__version__",
    "append",
    "attention",
    "attention_backward",
    "document_intervals",
    "documents",
    "dropout_keep",
    "explain",
    "explain_append",
    "explain_backward",
    "explain_documents",
    "explain_merge",
    "faults",
    "get_include",
    "kernels",
    "merge",
    "to_device",
    "to_numpy",
    "verify",
    "verify_append",
    "verify_backward",
    "verify_merge",
    "workspace_size",
]


# The module that has what loads on first use: a call needs none of it.
_LATER = {
    "dropout_keep": "dropout",
    "verify": "judge",
    "verify_append": "judge.append",
    "verify_backward": "judge.backward",
    "verify_merge": "judge.merge",
}


def get_include() -> str:
    """The directory of ``fa_ext.h``, the C interface, for a compiler's ``-I``."""
    return str(Path(__file__).with_name("include"))


def __getattr__(name: str):
    if name in ("judge", "reference"):
        return importlib.import_module(f".{name}", __name__)
    if name in _LATER:
        globals()[name] = found = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
