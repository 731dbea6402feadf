"""The directives of a kernel's file for its own build. They stand in its comments, one a line::

    @arch sm_90a                      (CUDA: default is FA_ARCHS, else cubins for sm_80 and sm_90 and PTX for compute_80)
    @flags -fopenmp                   (added to every compilation of the file)
    @instance d128 -DFA_HEAD_DIM=128  (one more compilation, with FA_INSTANCE=d128 and these flags)
    @instance d{64,96}_{f16,f32} -DFA_HEAD_DIM={1} -DTYPE={2:__half,float}
                                      (four: every choice of each list; {1} is what was chosen of the first list, and
                                      {2:...} stands for its place in the second. Flags may go on in lines of their own)
    @beside simd_isa.c                (files of its folder that kernels share: a library of the kernel alone holds them)

A file with instances is compiled once for each and once without FA_INSTANCE (its host part).

Imports nothing of ``fa_ext``, so that it runs before anything is built.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

_DIRECTIVE = re.compile(r"@(arch|flags|instance)[ \t]+([^\n*]+(?:\n[ \t]*\*[ \t]+-\w[^\n*]+)*)")
_BESIDE = re.compile(r"@beside[ \t]+([^\n*]+)")


def directives(source: Path) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(archs, flags, {instance: flags}) that a source file asks for."""
    archs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    instances: dict[str, tuple[str, ...]] = {}
    for kind, text in _DIRECTIVE.findall(source.read_text()):
        words = tuple(shlex.split(re.sub(r"\n[ \t]*\*", " ", text)))
        if kind == "arch":
            archs += words
        elif kind == "flags":
            flags += words
        else:
            instances |= _products(*words)
    return archs, flags, instances


def _products(name: str, *flags: str) -> dict[str, tuple[str, ...]]:
    """{instance: flags} of one ``@instance`` line, whose name may have lists in braces."""
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
        found[instance] = tuple(re.sub(r"\{(\d+)(?::([^{}]*))?\}", chosen, flag) for flag in flags)
    return found


def shared_files(source: Path) -> list[Path]:
    """The files beside a kernel's that it shares with others."""
    return [source.with_name(name) for names in _BESIDE.findall(source.read_text()) for name in names.split()]
