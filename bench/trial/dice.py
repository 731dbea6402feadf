"""Where the draws of a gate come from: secrets of the system, or, for a run that repeats another, the seed of that one."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np


class Dice:
    """Numbers by purpose: each follows from the seed alone, and none tells of another, whoever has seen all the others."""

    def __init__(self, seed: int | None = None):
        self.given = seed is not None
        self.seed = secrets.randbits(63) if seed is None else seed
        self.drawn: dict[str, int] = {}

    def number(self, purpose: str) -> int:
        """The next number of 60 bits: small enough for the seed of any library, after small factors."""
        count = self.drawn[purpose] = self.drawn.get(purpose, 0) + 1
        found = hashlib.blake2b(f"{self.seed} {purpose} {count}".encode(), digest_size=8).digest()
        return int.from_bytes(found, "little") >> 4

    def numbers(self, purpose: str, count: int) -> list[int]:
        return [self.number(purpose) for _ in range(count)]

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator from the next number."""
        return np.random.default_rng(self.number(purpose))
