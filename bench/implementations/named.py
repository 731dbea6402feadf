"""Implementations by their names on the command line: a peer, a kernel, a callable of yours, the source of a kernel."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.implementations import implementation, peers
from bench.machine.device import Cpu, Cuda
from bench.problems import OPERATIONS

# Array libraries whose arrays reach the memory of a device.
ARRAYS = {"cpu": ("numpy", "torch", "jax"), "cuda": ("torch", "cupy", "jax")}


def open_implementation(text: str, device: Cpu | Cuda, arrays: str | None = None, role: str = "candidate") -> implementation.Implementation:
    """The implementation that `text` names: a peer, a kernel, fa_ext (the kernel it takes by itself), ``module:function``, ``file.py:function``,
    a .cu or .c source of a kernel (built here), or a shared library that exports a kernel. `role` is for messages."""
    library = arrays or device.default_arrays
    require_arrays(library, device)
    path, _, attribute = text.rpartition(":")
    if path:
        function = implementation.Function(_import_function(path, attribute), text, library)
        require_arrays(function.library, device)
        return function
    suffix = Path(text).suffix
    if suffix in (".cu", ".c", ".so"):
        if not Path(text).exists():
            raise report.UsageError(f"candidate {text}: there is no such file")
        shared = Path(text) if suffix == ".so" else implementation.build_kernel(Path(text))
        return implementation.Kernel(implementation.load_kernel(shared), library, shown=Path(text).name)
    if text in peers.PEERS:
        return peers.open_peer(text, device)
    kernels = list(dict.fromkeys(k for operation in OPERATIONS for k in implementation.compiled_kernels(device, operation)))
    if text in kernels:
        return implementation.Kernel(text, library)
    if text == "fa_ext" and kernels:
        return implementation.Kernel(None, library)
    raise report.UsageError(
        f"{role} is {text!r}; accepted: a kernel ({', '.join(kernels) or 'none compiled for this device'}), fa_ext (the kernel "
        "that it takes by itself), a peer "
        f"({', '.join(peers.PEERS)}), module:function, file.py:function, a .cu, .c or .so file"
    )


def require_arrays(library: str, device: Cpu | Cuda) -> None:
    """UsageError unless arrays of `library` can hold the operands on this device."""
    able = [name for name in ARRAYS[device.kind] if importlib.util.find_spec(name) is not None]
    if library not in able:
        raise report.UsageError(f"arrays are {library!r}; accepted on the {device.kind} here: {', '.join(able)}")


def _import_function(path: str, attribute: str) -> Callable:
    try:
        if path.endswith(".py"):
            name = f"candidate_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None or not Path(path).exists():
                raise report.UsageError(f"candidate {path}: there is no such file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise report.UsageError(f"candidate {path}:{attribute}: {error}") from error
