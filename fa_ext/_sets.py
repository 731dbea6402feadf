"""Which instances of the kernels a build has, and what they cost: FA_INSTANCES, the set ``core``, seconds.

Imports nothing of ``fa_ext``, so that it runs before anything is built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CORE, ALL = "core", "all"
ACCEPTED = "core, all, or a regular expression of instances such as 'wgmma_sm90.d128_masked_bf16'"


def holds(wanted: str, kernel: str, name: str, core: str) -> bool:
    """Whether the set ``wanted`` has an instance; ``core`` is what its kernel's @core says."""
    if wanted == ALL:
        return True
    return bool(re.fullmatch(core, name) if wanted == CORE else re.search(wanted, f"{kernel}.{name}"))


def object_of(name: str) -> str:
    """Which object of a kernel an instance goes to: one for each head_dim, such as d128 and serve_d64, and for each number
    of rows, such as d64_r8: where functions that are not inlined have other callers, the compiler makes other code."""
    found = re.match(r"(?:[a-z]+_)*?d\d+(?:v\d+)?(?:_r\d+)?(?=_|$)", name)
    return found[0] if found else name


def macro(kernel: str, instances: dict[str, tuple[str, ...]]) -> str:
    """FA_INSTANCES(X) of these instances and the words of each."""
    lines = [f"X({', '.join((f'{kernel}_{name}', *words))})" for name, words in instances.items()]
    return "#define FA_INSTANCES(X) \\\n    " + " \\\n    ".join(lines) + "\n"


def names(macro: str, kernel: str) -> list[str]:
    """The instances of such a macro."""
    return re.findall(rf"X\({kernel}_(\w+)", macro)


# ---- costs ----


@dataclass(frozen=True)
class Cost:
    """Of one instance of a kernel: the device's functions in it, CPU seconds for one architecture beside the headers, and
    those of the host's file."""

    functions: float
    seconds: float
    host: float = 3.0


#: CPU seconds to read the headers of a CUDA file, once for each pass of the front end; of a C file.
HEADERS, C_FILE = 2.4, 0.8
COSTS: dict[str, Cost] = {}


def seconds(kernel: str, instances: int, device: bool, archs: tuple[str, ...], pass_an_arch: bool, is_cuda: bool) -> float:
    """CPU seconds of one compilation, about."""
    if not is_cuda:
        return C_FILE
    cost = COSTS.get(kernel, Cost(1, 3))
    passes = len(archs) if pass_an_arch else 1
    machine = sum(arch.startswith("sm_") for arch in archs)
    return HEADERS * passes + (cost.seconds * instances * machine if device else cost.host * machine)
