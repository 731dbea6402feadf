"""torch.func.vmap: the mapped axis joins the batch, or the call is made once an element where it cannot."""

import torch


def map_forward(call, info, in_dims, *args):
    """``call(q, k, v, bias, mask, sinks, alibi, state, *rest)`` -> (out, lse), mapped.

    Sinks have no batch, and one state of dropout would draw other weights for each element of a longer batch: those
    calls are made one by one.
    """
    if in_dims[5] is not None or args[7] is not None:
        return _each(call, info, in_dims, args)
    size, batch = info.batch_size, _batch(args[0], in_dims[0])
    q, k, v = (_fold(x, dim, size) for x, dim in zip(args[:3], in_dims, strict=False))
    bias, mask = (_fold_broadcast(x, dim, size, batch) for x, dim in zip(args[3:5], in_dims[3:5], strict=True))
    alibi = _fold_slopes(args[6], in_dims[6], size, batch)
    out, lse = call(q, k, v, bias, mask, args[5], alibi, *args[7:])
    return (_unfold(out, size, batch), _unfold(lse, size, batch)), (0, 0)


def map_backward(call, info, in_dims, *args, sums):
    """``call(dout, dlse, q, k, v, out, lse, bias, mask, sinks, alibi, state, *rest)`` -> gradients, mapped. ``sums``: a gradient
    that is a sum over the batch, of bias or sinks, is asked for; those calls are made one by one too."""
    if sums or in_dims[9] is not None or args[11] is not None:
        return _each(call, info, in_dims, args)
    size, batch = info.batch_size, _batch(args[2], in_dims[2])
    folded = (_fold(x, dim, size) for x, dim in zip(args[:7], in_dims, strict=False))
    bias, mask = (_fold_broadcast(x, dim, size, batch) for x, dim in zip(args[7:9], in_dims[7:9], strict=True))
    alibi = _fold_slopes(args[10], in_dims[10], size, batch)
    grads = call(*folded, bias, mask, args[9], alibi, *args[11:])
    return type(grads)(_unfold(grad, size, batch) for grad in grads), type(grads)(0 for _ in grads)


def _batch(x, dim):
    return x.shape[0 if dim is None or dim > 0 else 1]


def _each(call, info, in_dims, args):
    results = []
    for n in range(info.batch_size):
        chosen = (x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True))
        results.append(call(*chosen))
    kind = type(results[0])
    stacked = kind(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, kind(0 for _ in stacked)


def _fold(x, dim, size):
    """The mapped axis and the batch as one first axis."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _fold_broadcast(x, dim, size, batch):
    """As ``_fold`` for what broadcasts to (B, H, Sq, Sk); what is the same for all elements stays as it is."""
    if x is None or (dim is None and (x.dim() < 4 or x.shape[0] == 1)):
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x = x.reshape(size, *(1,) * (5 - x.dim()), *x.shape[1:])
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _fold_slopes(x, dim, size, batch):
    """As ``_fold_broadcast`` for slopes (H,) or (B, H)."""
    if x is None or (dim is None and x.dim() == 1):
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x = x[:, None].expand(size, batch, x.shape[1]) if x.dim() == 2 else x
    return x.flatten(0, 1)


def _unfold(x, size, batch):
    return x.unflatten(0, (size, batch))
