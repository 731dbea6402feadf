"""The spaces that the tuner searches: each kernel's macros, their values, and what rules a combination out before it is compiled."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import ROOT

Config = dict[str, int]


@dataclass(frozen=True)
class Space:
    """The search space of one kernel, whose file says what may vary, one macro a line::

        @tune BLOCK_M=32 of 16 32 64 128    (set by hand for `case`: where the search begins and what it must beat; its values)

    `limits` are {what it says: what must hold}."""

    kernel: str
    source: Path
    device: str
    case: str
    table: Path  # the header that holds the winner, which the kernel's configuration includes
    render: Callable[[Config], list[str]]  # a configuration as that header's lines
    fixed: Config = field(default_factory=dict)
    limits: dict[str, Callable[[Config], bool]] = field(default_factory=dict)

    @functools.cached_property
    def _declared(self) -> list[tuple[str, str, str]]:
        return re.findall(r"@tune (\w+)=(\d+) of ([\d ]+)", self.source.read_text())

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(map(int, values.split())) for name, _, values in self._declared}

    @property
    def hand_set(self) -> Config:
        return {name: int(value) for name, value, _ in self._declared}

    def excluded(self, config: Config) -> str | None:
        """Which limit a configuration breaks; None when it may be compiled."""
        return next((text for text, holds in self.limits.items() if not holds({**self.fixed, **config})), None)

    def configs(self) -> list[Config]:
        """Every configuration within the limits."""
        every = (dict(zip(self.parameters, values)) for values in itertools.product(*self.parameters.values()))
        return [config for config in every if self.excluded(config) is None]

    def sample(self, count: int, seed: int) -> list[Config]:
        """The hand-set configuration, those that differ from it in one parameter, and random others, `count` in all."""
        every = self.configs()
        random.Random(seed).shuffle(every)
        every.sort(key=lambda c: min(2, sum(c[name] != self.hand_set[name] for name in c)))  # stable
        return every[:count]

    def flags(self, config: Config) -> tuple[str, ...]:
        return tuple(f"-D{name}={value}" for name, value in {**self.fixed, **config}.items())


def label(config: Config) -> str:
    """``BLOCK_M=64 BLOCK_N=32``."""
    return " ".join(f"{name}={value}" for name, value in config.items())


# ---- simt ----


def _simt_shared_bytes(c: Config) -> int:
    row = c["HEAD_DIM"] + 4
    group = (2 if c["SYNC_POLICY"] & 1 else 1) * c["BLOCK_N"] * row + c["BLOCK_M"] * (c["BLOCK_N"] + 4)
    group += c["BLOCK_M"] * 8 if c["REDUCE"] else 0
    return 4 * (c["BLOCK_M"] * row + c["KEY_GROUPS"] * group)


def _simt_lane(c: Config) -> tuple[int, int, int]:
    """Query rows, keys and groups of four output columns that one lane holds."""
    return c["BLOCK_M"] // (c["NUM_WARPS"] // c["KEY_GROUPS"]) // 4, c["BLOCK_N"] // 8, c["HEAD_DIM"] // 32


def _simt_registers(c: Config) -> int:
    """Accumulators of a lane, and about 60 for addresses, state and operands."""
    rows, keys, quads = _simt_lane(c)
    return rows * keys + 4 * rows * quads + 2 * rows + 60


def _simt_table(c: Config) -> list[str]:
    names = ("HEAD_DIM", "BLOCK_M", "BLOCK_N", "NUM_WARPS", "KEY_GROUPS", "SYNC_POLICY", "MIN_BLOCKS", "VEC_WIDTH", "REDUCE")
    return [
        '#include "simt/tile.cuh" // Tile',
        "",
        "namespace fa::simt {",
        "",
        f"// {', '.join(names)}",
        f"constexpr Tile kTuned{c['HEAD_DIM']} = {{{', '.join(str(c[name]) for name in names)}}};",
        "",
        "} // namespace fa::simt",
    ]


SIMT = Space(
    kernel="simt", device="cuda", case="B1,H8,S512,D64,float16", fixed={"HEAD_DIM": 64},
    source=ROOT / "kernels" / "simt" / "simt.cu", table=ROOT / "kernels" / "simt" / "tuned.cuh", render=_simt_table,
    limits={
        "KEY_GROUPS divides NUM_WARPS": lambda c: c["NUM_WARPS"] % c["KEY_GROUPS"] == 0,
        "BLOCK_M is a multiple of 4 NUM_WARPS / KEY_GROUPS": lambda c: c["BLOCK_M"] % (4 * c["NUM_WARPS"] // c["KEY_GROUPS"]) == 0,
        "at most 1024 threads": lambda c: c["NUM_WARPS"] * 32 <= 1024,
        "at most 227 KB of shared memory": lambda c: _simt_shared_bytes(c) <= 227 * 1024,
        "registers of MIN_BLOCKS thread blocks fit a multiprocessor, at most 255 a thread":
            lambda c: _simt_registers(c) <= min(255, 65536 // (32 * c["NUM_WARPS"] * c["MIN_BLOCKS"])),
        "shared memory of MIN_BLOCKS thread blocks fits": lambda c: c["MIN_BLOCKS"] * _simt_shared_bytes(c) <= 227 * 1024,
        "at least two rows a lane": lambda c: _simt_lane(c)[0] >= 2,
    },
)  # fmt: skip

# ---- cpu_simd ----


def _cpu_table(c: Config) -> list[str]:
    """The differences from the kernel's own configuration, so that no number stands twice."""
    differs = {name for name, value in c.items() if value != CPU_SIMD.hand_set[name]}
    if not differs:
        return ["/* Nothing differs from the configuration set by hand, in cpu_simd.c. */"]
    if "FA_CPU_MR" in differs:
        differs.add("FA_CPU_NR")  # by default what fits beside FA_CPU_MR
    lines = ["#if FA_CPU_VECTOR_BYTES == 64 && FA_CPU_REAL_BYTES == 4"]
    for name in (name for name in c if name in differs):
        lines += [f"#ifndef {name}", f"#define {name} {c[name]}", "#endif"]
    return [*lines, "#endif"]


CPU_SIMD = Space(
    kernel="cpu_simd", device="cpu", case="B1,H8,S512,D64,float32",
    source=ROOT / "csrc" / "cpu" / "cpu_simd.c", table=ROOT / "csrc" / "cpu" / "simd_tuned.h", render=_cpu_table,
    limits={
        "a register block fits 32 vector registers": lambda c: c["FA_CPU_MR"] * (c["FA_CPU_NR"] + 1) + 1 <= 32,
        "scores of a block and a tile of keys share 48 KB (float32, head_dim 64)":
            lambda c: 4 * c["FA_CPU_TILE_N"] * (16 * c["FA_CPU_MR"] + 64) <= 2 * 48 * 1024,
    },
)  # fmt: skip

SPACES = {space.kernel: space for space in (SIMT, CPU_SIMD)}
