"""The arrays of attention by name, as ``csrc/operands.def`` lists them: what the front ends that carry arrays go by."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from . import _core

OPERANDS = {operand.name: operand for operand in _core.operands()}

#: Arrays that change what attention means: each is a keyword of ``attention`` in every front end.
OPTIONS = tuple(name for name, operand in OPERANDS.items() if operand.role == "option" and "attention" in operand.reads)
_OPTIONS = frozenset(OPTIONS)
#: Arrays that say what the sequences of attention are.
INDICES = tuple(name for name, operand in OPERANDS.items() if operand.role == "index" and "attention" in operand.reads)
#: Those of them that calls with gradients know, too.
SEQUENCES = tuple(name for name in INDICES if "backward" in OPERANDS[name].reads)
#: Arrays that have gradients, in the order of their bits.
DIFFERENTIABLE = tuple(name for name, operand in OPERANDS.items() if operand.gradient)
#: Dropout's words, which travel beside the options.
STATE = "dropout_state"
#: Ids of documents, of which fa_ext.jax makes sequences: no array of the core.
IDS = "segment_ids"


def operand_pair(keyword, pair, names, accepted):
    """The two operands behind a keyword that takes a pair of arrays, by name."""
    if not isinstance(pair, (tuple, list)):
        raise TypeError(f"{keyword} has type {type(pair).__name__}; accepted: {accepted}")
    if len(pair) != 2:
        raise ValueError(f"{keyword} has {len(pair)} items; accepted: {accepted}")
    if keyword == "segments" and any(x is None for x in pair):
        raise TypeError(f"segments has an item of None; accepted: {accepted}")
    return dict(zip(names, pair, strict=True))


class Axis(NamedTuple):
    name: str
    one: bool  #: its extent may be 1 in place of its own
    optional: bool  #: it may be left out


AXES = {
    name: tuple(Axis(word.strip("[]?"), "?" in word, "[" in word) for word in operand.axes.split())
    for name, operand in OPERANDS.items()
}
AXES[IDS] = (Axis("B", one=False, optional=False), Axis("Sq", one=False, optional=False))


def axes_of(name: str, ndim: int) -> tuple[Axis, ...]:
    """The axes of an operand that has ``ndim`` of them."""
    left_out = [axis for axis in AXES[name] if axis.optional][: max(len(AXES[name]) - ndim, 0)]
    return tuple(axis for axis in AXES[name] if axis not in left_out)


def filled(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with all axes of the operand: 1 where one is left out."""
    extents = dict(zip(axes_of(name, len(shape)), shape))
    return tuple(extents.get(axis, 1) for axis in AXES[name])


def has_batch(name: str) -> bool:
    return AXES[name][0].name == "B"


def batch_is_shared(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an operand of this shape is one for all of the batch: it has no such axis, or one of extent 1 in its place."""
    axes = axes_of(name, len(shape))
    return not axes or axes[0].name != "B" or (axes[0].one and shape[0] == 1)


def broadcasts(name: str) -> bool:
    """Whether the operand means the same with its left-out axes filled in."""
    return all(axis.one for axis in AXES[name] if axis.optional)


def given_options(arrays: dict) -> dict:
    """Those that are given of ``**arrays`` of ``attention``, whose names are to be ``OPTIONS``."""
    absent = False
    for name, x in arrays.items():
        if name not in _OPTIONS:
            raise TypeError(f"unknown argument {name}; accepted: those of the signature, of arrays {', '.join(OPTIONS)}")
        absent = absent or x is None
    return {name: x for name, x in arrays.items() if x is not None} if absent else arrays


def takes_options(function):
    """Gives a function whose last parameter is ``**arrays`` a signature that names the ``OPTIONS`` in its place."""
    own = inspect.signature(function)
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS]
    function.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:-1], *keywords])
    return function
