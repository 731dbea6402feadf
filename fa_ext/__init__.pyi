from . import judge as judge
from . import reference as reference
from ._core import CudaError as CudaError
from ._core import DeviceArray as DeviceArray
from ._core import UnsupportedError as UnsupportedError
from ._core import __version__ as __version__
from ._core import append as append
from ._core import attention as attention
from ._core import attention_backward as attention_backward
from ._core import explain as explain
from ._core import explain_append as explain_append
from ._core import explain_backward as explain_backward
from ._core import explain_merge as explain_merge
from ._core import faults as faults
from ._core import kernels as kernels
from ._core import merge as merge
from ._core import to_device as to_device
from ._core import to_numpy as to_numpy
from ._core import workspace_size as workspace_size
from .dropout import dropout_keep as dropout_keep
from .judge import verify as verify
from .judge.append import verify_append as verify_append
from .judge.backward import verify_backward as verify_backward
from .judge.merge import verify_merge as verify_merge

__all__ = [
    "CudaError",
    "DeviceArray",
    "UnsupportedError",
    "__version__",
    "append",
    "attention",
    "attention_backward",
    "dropout_keep",
    "explain",
    "explain_append",
    "explain_backward",
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

def get_include() -> str: ...
