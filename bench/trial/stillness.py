"""Whether what should stand still does, by what the kernel counts of it."""

from __future__ import annotations

from bench.problems.operands import WrongResult

# Seconds by which the kernel's count of what a stopped process ran may be late, and how often more is taken for bad luck: so
# many times, and in this share of all looks.
LATE_SECONDS = 5e-6
LATE_TIMES = 3
LATE_SHARE = 0.02


class Stillness:
    """The kernel's counts of processes that should have stood still, over many looks. `when` they should."""

    def __init__(self, when: str):
        self.when, self.looks, self.late = when, 0, 0

    def add(self, seconds: float) -> None:
        """Seconds that they ran all the same. WrongResult when they do too often."""
        self.looks += 1
        self.late += seconds > LATE_SECONDS
        if self.late > LATE_TIMES + LATE_SHARE * self.looks:
            raise WrongResult(f"it ran {self.when}, while it should have stood still: {self.late} of {self.looks} times, "
                              f"{seconds:.2g} s at last")  # fmt: skip
