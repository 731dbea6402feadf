"""Which instances of the kernels a build has, and what they cost: FA_INSTANCES, the set ``core``, seconds.

The set core leaves out instances whose calls others take: head_dim 96 and 192, which the next wider instance takes (but 96
with masks, and all of mma_sm80, whose wider ones take 1.3 times as long); full masks in the backward from head_dim 192 on,
for which the masked kind serves; softcap in float16, as models that have one are trained in bfloat16; kGeneral of
mma_backward_sm80 but at head_dim 64 and 128, where kExtended takes 1.05 to 1.12 times as long with a bias, a mask or softcap;
float16 and bfloat16 of simt and simt_backward, whose calls mma_sm80 and mma_backward_sm80 take, but for gradients of sequences
with positions; wmma, whose calls mma_sm80 takes in less time; gradients of sequences on Hopper but those of
wgmma_backward_sm90 without softcap at head_dim 64 and 128, and in bfloat16 at 96 and 256.

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
    """Which object of a kernel an instance goes to: one for each head_dim, such as d128 and serve_d64."""
    found = re.match(r"(?:[a-z]+_)*?d\d+(?:v\d+)?(?=_|$)", name)
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
    """CPU seconds of a kernel, on one core of a busy 16-core machine: of an instance for one architecture, beside the
    headers; of the host's file."""

    instance: float
    host: float = 1.0


#: CPU seconds to read the headers of a CUDA file, once for each pass of the front end; of a C file.
HEADERS, C_FILE = 2.5, 0.5
COSTS = {
    "wgmma_sm90": Cost(2.4),
    "wgmma_dropout_sm90": Cost(2.5),
    "prefill_sm90": Cost(4.0),
    "packed_sm90": Cost(0, 0.2),
    "serve_sm90": Cost(7.6),
    "wgmma_split_sm90": Cost(0, 17.8),
    "wgmma_backward_sm90": Cost(3.9),
    "wgmma_fused_backward_sm90": Cost(2.4),
    "wgmma_dropout_backward_sm90": Cost(4.9),
    "mma_sm80": Cost(9.9),
    "mma_backward_sm80": Cost(22.6),
    "simt": Cost(10.4),
    "simt_backward": Cost(18.0),
    "wmma": Cost(7.2),
    "merge": Cost(0, 7.9),
    "append": Cost(0, 3.8),
    "documents": Cost(0, 1.0),
    "cublas": Cost(0, 4.3),
    "minimal": Cost(0, 1.1),
}


def seconds(kernel: str, instances: int, archs: tuple[str, ...], pass_an_arch: bool, is_cuda: bool) -> float:
    """CPU seconds of one compilation, about; ``instances`` 0: of the host's file."""
    if not is_cuda:
        return C_FILE
    cost = COSTS.get(kernel, Cost(3))
    machine = sum(arch.startswith("sm_") for arch in archs)
    return HEADERS * (len(archs) if pass_an_arch else 1) + (cost.instance * instances or cost.host) * max(machine, 1)


@dataclass(frozen=True)
class Budget:
    """The most that a kernel may cost for one architecture: instances in ``core`` and in ``all``, the device's functions in ``all``."""

    core: int
    all: int
    functions: int


#: A landing that adds instances names them here, and keeps the sum of ``core`` below CORE_SECONDS.
CORE_SECONDS = 900
BUDGET = {
    "wgmma_sm90": Budget(21, 40, 42),
    "wgmma_dropout_sm90": Budget(4, 4, 6),
    "prefill_sm90": Budget(9, 20, 21),
    "packed_sm90": Budget(0, 0, 0),
    "serve_sm90": Budget(5, 6, 36),
    "wgmma_split_sm90": Budget(0, 0, 16),
    "wgmma_backward_sm90": Budget(17, 54, 111),
    "wgmma_fused_backward_sm90": Budget(17, 28, 58),
    "wgmma_dropout_backward_sm90": Budget(3, 8, 30),
    "mma_sm80": Budget(12, 12, 98),
    "mma_backward_sm80": Budget(9, 17, 261),
    "simt": Budget(2, 6, 51),
    "simt_backward": Budget(2, 6, 100),
    "wmma": Budget(0, 2, 16),
    "merge": Budget(0, 0, 13),
    "append": Budget(0, 0, 6),
    "documents": Budget(0, 0, 4),
    "cublas": Budget(0, 0, 15),
    "minimal": Budget(0, 0, 6),
}
