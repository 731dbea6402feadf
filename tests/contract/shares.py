"""Which parameters of a test run by default."""

from collections.abc import Iterable

import pytest


def some_of(values: Iterable, every: int = 3) -> list:
    """``values``, tuples or single ones, as parameters: one of ``every`` runs by default, the others are marked slow."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if n % every else ())
        for n, value in enumerate(values)
    ]
