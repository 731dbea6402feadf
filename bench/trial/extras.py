"""Masks, biases, sinks, slopes and intervals of timed calls: every call has others, as it has other q, k and v.

A few variants of each are drawn; a call gets one of them, rolled by drawn steps along every axis. One is drawn anew now and
then, before each sample where that is cheap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.machine.device import Cpu, Cuda
from bench.problems import Case, dense
from bench.trial.dice import Dice

VARIANTS = 4
# Numbers that may be drawn before each sample; more are drawn the more seldom.
RENEWED = 1 << 18
# Kinds whose meaning lies in the order of their keys, which stays.
ORDERED = ("batch", "alibi", *(kind for kind in dense.MEASURED_MASKS if kind != "pairs"))
Drawn = tuple[int, tuple[int, ...]]


class Extra:
    """One array of a case beside q, k and v. `drawn`, here, is what ``draw`` returned for a call."""

    def __init__(self, case: Case, name: str, home: Cpu | Cuda, dice: Dice):
        self.case, self.name, self.home, self.dice = case, name, home, dice
        self.variants, self.images = [], []
        for _ in range(VARIANTS):
            self._make(len(self.variants))
        self.shape, self.dtype = self.variants[0].shape, self.variants[0].dtype.name
        kept = len(self.shape) - 3 if name == "intervals" else name in ("mask", "bias") and getattr(case, name) in ORDERED
        self.axes = tuple(range(len(self.shape) - kept))

    def renew(self, rng: np.random.Generator) -> None:
        """Perhaps draws a variant anew."""
        if rng.random() < RENEWED / max(1, self.variants[0].size):
            self._make(int(rng.integers(VARIANTS)))

    def draw(self, rng: np.random.Generator) -> Drawn:
        return int(rng.integers(VARIANTS)), tuple(int(rng.integers(max(1, self.shape[axis]))) for axis in self.axes)

    def put(self, drawn: Drawn, raw: Any) -> None:
        """Writes the array into bytes of the device's library."""
        variant, steps = drawn
        image = self.images[variant]
        raw.reshape(image.shape)[...] = (self.home.torch or self.home.cupy or np).roll(image, steps, self.axes)

    def of_head(self, drawn: Drawn, batch: int, head: int) -> np.ndarray:
        """The part that a head of a batch entry sees: (1, 1, queries or 1, keys or 1) of a mask and a bias, (1, 1, queries or 1, ...)
        of intervals, (1,) of others."""
        variant, steps = drawn
        array = self.variants[variant]
        axes = {"mask": 4, "bias": 4, "intervals": array.ndim}.get(self.name, 2)
        missing = axes - array.ndim
        array = array.reshape((1,) * missing + array.shape)
        every = [0] * axes
        for axis, step in zip(self.axes, steps, strict=True):
            every[missing + axis] = step
        lead = [(place - step) % n for place, step, n in zip((batch, head), every, array.shape)]  # of one entry the only one
        part = array[lead[0], lead[1]]
        return part.reshape(1) if axes == 2 else np.roll(part, every[2:], tuple(range(part.ndim)))[None, None]

    def _make(self, place: int) -> None:
        array = np.ascontiguousarray(dense.extra(self.case, self.name, self.dice.rng(self.name)))
        image: Any = array.view(np.uint8).reshape(*array.shape, array.itemsize) if array.ndim else array
        if self.home.kind == "cuda":
            image = self.home.torch.from_numpy(image).cuda() if self.home.torch else self.home.cupy.asarray(image)
        self.variants[place : place + 1], self.images[place : place + 1] = [array], [image]
