"""torch.func.vmap: the mapped axis joins the batch, or the call is made once an element where it cannot."""

import torch

from .._operands import INDICES, STATE, batch_is_shared, filled, has_batch

#: Arrays with which a call is made once an element: one state of dropout would draw other weights for each element of a longer batch,
#: and those of sequences count them.
_APART = {STATE, *INDICES}


def mapped(call, info, in_dims, args, names, sums=False):
    """``call(*args)``, mapped. ``names``: which operand each argument is, or None for one that is not mapped.

    ``_APART``, packed sequences and what has no axis for the batch make one call an element; and so do ``sums``, gradients that are
    sums over the batch.
    """
    known = [(name, x, dim) for name, x, dim in zip(names, args, in_dims, strict=True) if name is not None and x is not None]
    packed = any(name in ("q", "k") and x.dim() - (dim is not None) == 3 for name, x, dim in known)
    if sums or packed or any(name in _APART or (dim is not None and not has_batch(name)) for name, _, dim in known):
        return _each(call, info, in_dims, args, names)
    size = info.batch_size
    batch = next(x.shape[0 if dim is None or dim > 0 else 1] for name, x, dim in known if name == "q")
    folded = [
        x if name is None or x is None else _fold(name, x, dim, size, batch)
        for name, x, dim in zip(names, args, in_dims, strict=True)
    ]
    results = call(*folded)
    kind = type(results)
    return kind(x.unflatten(0, (size, batch)) for x in results), kind(0 for _ in results)


def _each(call, info, in_dims, args, names):
    dims = [None if name is None else dim for name, dim in zip(names, in_dims, strict=True)]
    results = []
    for n in range(info.batch_size):
        results.append(call(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, dims, strict=True))))
    kind = type(results[0])
    stacked = kind(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, kind(0 for _ in stacked)


def _fold(name, x, dim, size, batch):
    """The mapped axis and the batch as one first axis; what is the same for all elements stays as it is."""
    if dim is None and batch_is_shared(name, x.shape):
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x = x.reshape(size, *filled(name, x.shape[1:]))
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
