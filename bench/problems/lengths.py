"""The sequences of a case: how many queries and keys each has, and how they are stored."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

Q_STORAGE, K_STORAGE = ("padded", "packed", "one"), ("padded", "packed", "paged")
#: How paged keys and values lie in memory, relative to each other.
CACHES = ("two", "pair", "first", "heads", "twice", "swapped")


def lognormal(seed: int, median: float, tokens: int) -> list[int]:
    """Lengths of documents of so many tokens in all; the last one is cut."""
    draws, found, left = random.Random(seed), [], tokens
    while left:
        found.append(min(max(1, int(draws.lognormvariate(math.log(median), 1))), left))
        left -= found[-1]
    return found


def numbers(word: str, letter: str, mark: str | None) -> list[int]:
    """Of a word such as H8, or H8/2 where a second number may follow a mark."""
    found = word[1:].split(mark)
    if word[:1] != letter or len(found) > (2 if mark else 1) or not all(x.isdecimal() and x.isascii() for x in found):
        raise ValueError(f"{word!r} is not {letter} and a number{f', or two with {mark} between them' if mark else ''}")
    return [int(x) for x in found]


def pair(a, b, mark: str) -> str:
    return f"{a}" if a == b else f"{a}{mark}{b}"


@dataclass(frozen=True)
class Lengths:
    """Numbers of queries and of keys, one of each for a sequence."""

    q: tuple[int, ...]
    k: tuple[int, ...]

    def __post_init__(self):
        if len(self.q) != len(self.k):
            raise ValueError(f"lengths of {len(self.q)} sequences of queries and {len(self.k)} of keys")

    def __str__(self) -> str:
        """As runs, such as S1x512*8+1x64*2; without a count where all sequences are alike."""
        runs = [(lengths, len(list(same))) for lengths, same in itertools.groupby(zip(self.q, self.k))]
        return "S" + "+".join(pair(*x, "x") + (f"*{n}" if n > 1 and len(runs) > 1 else "") for x, n in runs)

    @classmethod
    def parse(cls, word: str, batch: int) -> Lengths:
        found: list[tuple[int, int]] = []
        for run in word.removeprefix("S").split("+") if word != "S" else ():
            one, mark, count = run.partition("*")
            some = numbers(f"S{one}", "S", "x")
            found += [(some[0], some[-1])] * (numbers(f"*{count}", "*", None)[0] if mark else 1)
        found = found * batch if len(found) == 1 else found
        if len(found) != batch:
            raise ValueError(f"{word!r} names {len(found)} sequences, B{batch} says {batch}")
        return cls(tuple(n for n, _ in found), tuple(n for _, n in found))


@dataclass(frozen=True)
class Storage:
    """How sequences are stored: queries and keys (Q_STORAGE, K_STORAGE), the caches of paged keys (CACHES), and slack, rows,
    pages and columns beyond those used."""

    q: str = "packed"
    k: str = "paged"
    page_size: int = 16
    cache: str = "two"
    slack: int = 3

    def words(self) -> list[str]:
        """As a case's name has them: q and k, and what differs from its default."""
        options = [f for f in dataclasses.fields(self)[2:] if getattr(self, f.name) != f.default]
        return [f"q={self.q}", f"k={self.k}", *(f"{f.name}={getattr(self, f.name)}" for f in options)]

    @classmethod
    def parse(cls, words: dict[str, str]) -> Storage | None:
        """Takes its own out of the options of a case's name; None where there are none."""
        mine = {f.name: words.pop(f.name) for f in dataclasses.fields(cls) if f.name in words}
        if not mine:
            return None
        if not {"q", "k"} <= mine.keys():
            raise ValueError(f"{', '.join(mine)} without q= and k=, which say how sequences are stored")
        for name, accepted in (("q", Q_STORAGE), ("k", K_STORAGE), ("cache", CACHES)):
            if mine.get(name, accepted[0]) not in accepted:
                raise ValueError(f"{name} is {mine[name]!r}; accepted: {', '.join(accepted)}")
        values: dict = dict(mine)
        for name in ("page_size", "slack"):
            if not mine.get(name, "0").isdecimal():
                raise ValueError(f"{name} is {mine[name]!r}; accepted: a whole number")
            if name in mine:
                values[name] = int(mine[name])
        return cls(**values)
