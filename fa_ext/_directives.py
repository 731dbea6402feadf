r"""The directives of a kernel's file for its own build. They stand in its comments, one a line::

    @arch sm_90a                      (CUDA: its one architecture; default is what FA_ARCHS or the GPUs in sight ask for)
    @pass-an-arch                     (CUDA: code that reads __CUDA_ARCH__ takes a pass of the front end an architecture)
    @flags -fopenmp                   (added to every compilation of the file)
    @instances instance.cu            (a file beside this one, from which the instances named below are compiled)
    @instance d{64,128}_{f16,f32} {1} {2:__half,float}
                                      (four: every choice of each list; {1} is what was chosen of the first list, and
                                      {2:...} stands for its place in the second. Words may go on in lines of their own)
    @core d(64|128)_\w+ d256          (regular expressions of the instances in the set `core`; default: all of them,
                                      `(?!)`: none)
    @beside simd_isa.c                (files that it needs, by their path from its own: a library of the kernel alone holds them)

``@instances`` makes two programs of a kernel: this file is the host's, and knows of every instance; the other holds the
device's code, and is compiled once for all instances of one head_dim. Both are given the macro ``FA_INSTANCES(X)``, one
``X(kernel_d64_f16, 64, __half)`` an instance that they are concerned with: the words of ``@instance`` are what follows the
name.

Without ``@instances`` the words are flags: the file itself is compiled once for each instance with these and
``-DFA_INSTANCE=<its name>``, and once without (its host part).

``@tune`` lines are for the tuner alone (bench/tuning/spaces.py).

Imports nothing of ``fa_ext``, so that it runs before anything is built.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_DIRECTIVE = re.compile(r"@(arch|pass-an-arch|flags|instances|instance|core|beside)\b(?!-)[ \t]*([^\n*]*(?:\n[ \t]*\*[ \t]{3,}[^\s@*][^\n*]*)*)")


@dataclass(frozen=True)
class Instance:
    """One instance of a kernel: the file that it is compiled from, None for the kernel's own, and its words."""

    source: Path | None
    words: tuple[str, ...]


@dataclass
class Directives:
    """The requests of one file."""

    archs: tuple[str, ...] = ()
    pass_an_arch: bool = False
    flags: tuple[str, ...] = ()
    instances: dict[str, Instance] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)  # the names of `instances`, as they are written
    core: str = ".*"
    beside: tuple[Path, ...] = ()


def directives(source: Path) -> Directives:
    """The requests of a source file."""
    found = Directives()
    file = None
    for kind, text in _DIRECTIVE.findall(source.read_text()):
        if kind == "core":
            found.core = "|".join(re.sub(r"\n[ \t]*\*", " ", text).split())
            continue
        words = tuple(shlex.split(re.sub(r"\n[ \t]*\*", " ", text)))
        if kind == "arch":
            found.archs += words
        elif kind == "pass-an-arch":
            found.pass_an_arch = True
        elif kind == "flags":
            found.flags += words
        elif kind == "beside":
            found.beside += tuple((source.parent / name).resolve() for name in words)
        elif kind == "instances":
            file = source.with_name(words[0])
        else:
            found.patterns.append(words[0])
            found.instances |= {name: Instance(file, own) for name, own in _products(*words).items()}
    return found


def _products(name: str, *words: str) -> dict[str, tuple[str, ...]]:
    """{instance: words} of one ``@instance`` line, whose name may have lists in braces."""
    lists = [found.split(",") for found in re.findall(r"\{([^{}]*)\}", name)]
    found = {}
    for places in itertools.product(*(range(len(choices)) for choices in lists)):
        own = [choices[place] for choices, place in zip(lists, places, strict=True)]

        def chosen(match: re.Match[str], own: list[str] = own, places: tuple[int, ...] = places) -> str:
            number = int(match[1]) - 1
            return match[2].split(",")[places[number]] if match[2] else own[number]

        instance = name
        for choice in own:
            instance = re.sub(r"\{[^{}]*\}", choice, instance, count=1)
        found[instance] = tuple(re.sub(r"\{(\d+)(?::([^{}]*))?\}", chosen, word) for word in words)
    return found
