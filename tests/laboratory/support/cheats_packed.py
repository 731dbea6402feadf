"""Candidates of the backward pass over packed sequences for ``bench gate``: an honest one, and some that the judge must catch."""

import numpy as np

from tests.laboratory.support import cheats_backward


def honest(dout, q, k, v, *, out, lse, cu_seqlens_q, cu_seqlens_k, causal=False, layout="bshd", grads=None):
    """Each sequence as a dense problem; all other rows are 0."""
    for grad in grads:
        grad[...] = 0
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        queries, keys = slice(a, b), slice(c, d)
        of = [x[rows].swapaxes(0, 1)[None] for x, rows in ((dout, queries), (q, queries), (k, keys), (v, keys), (out, queries))]
        found = [np.empty_like(x) for x in of[1:4]]
        cheats_backward.honest(*of[:4], out=of[4], lse=lse[None, :, queries], causal=causal, grads=found)
        for grad, x, rows in zip(grads, found, (queries, keys, keys), strict=True):
            grad[rows] = x[0].swapaxes(0, 1)


_lists, _last, _bound = {}, [], []


def list_by_pointer(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, **others):
    """Its list of sequences is kept by the pointer of the starts."""
    kept = _lists.setdefault(cu_seqlens_q.ctypes.data, (cu_seqlens_q.copy(), cu_seqlens_k.copy()))
    honest(dout, q, k, v, cu_seqlens_q=kept[0], cu_seqlens_k=kept[1], **others)


def last_lengths(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, **others):
    """Where calls are timed, the lengths are those of the call before."""
    _last.append((cu_seqlens_q.copy(), cu_seqlens_k.copy()))
    honest(dout, q, k, v, cu_seqlens_q=_last[-2 if len(_last) > 12 else -1][0], cu_seqlens_k=_last[-2 if len(_last) > 12 else -1][1], **others)


def frozen_bound(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, grads, **others):
    """Its grid is as large as the longest sequence of the first call asked for: later keys get nothing."""
    honest(dout, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, grads=grads, **others)
    _bound[1:] = []
    _bound.append(np.diff(cu_seqlens_k).max())
    for first, end in zip(cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        for grad in grads[1:]:
            grad[first + _bound[0] : max(end, first + _bound[0])] = 0


def leaves_gaps(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, grads, **others):
    """Rows of no sequence stay as they are."""
    kept = [grad.copy() for grad in grads]
    honest(dout, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, grads=grads, **others)
    for grad, was, at in zip(grads, kept, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k), strict=True):
        grad[: at[0]], grad[at[-1] :] = was[: at[0]], was[at[-1] :]


def fills_gaps(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, grads, **others):
    """Rows behind the last sequence get a number."""
    honest(dout, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, grads=grads, **others)
    grads[0][cu_seqlens_q[-1] :] = 1


def sees_the_neighbour(dout, q, k, v, *, cu_seqlens_q, cu_seqlens_k, **others):
    """Keys of the first sequence reach one further."""
    further = cu_seqlens_k.copy()
    if 1 < len(further) - 1 and further[1] < further[-1]:
        further[1] += 1
    honest(dout, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=further, **others)
