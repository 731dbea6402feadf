"""Packed documents: what transformers says of them, as sequences or as a mask."""

import weakref
from typing import NamedTuple

import torch

from ._masks import within
from ._serving import documents


class Documents(NamedTuple):
    """The document of each query (1 or B, Sq) and key (1 or B, Sk), and the distance to the query or key behind the last one
    that the document has, or that there is."""

    queries: torch.Tensor
    keys: torch.Tensor
    queries_to_end: torch.Tensor
    keys_to_end: torch.Tensor

    def seen(self, left, right):
        """(1 or B, 1, Sq, Sk): a query sees the keys of its own document, within a band of distances that begin at the ends."""
        same = self.queries[:, :, None] == self.keys[:, None, :]
        return (same & within(self.queries_to_end[:, :, None] - self.keys_to_end[:, None, :], left, right))[:, None]


class Packed(NamedTuple):
    """Documents of a batch of 1, one behind the other: where each begins among the queries and the keys, and where the last ends,
    int32 (documents + 1,), and how many queries and keys there are."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    queries: int
    keys: int

    def seen(self, left, right):
        """As ``Documents.seen``."""
        (ids_q, ends_q), (ids_k, ends_k) = _positions(self.starts_q, self.queries), _positions(self.starts_k, self.keys)
        return Documents(ids_q, ids_k, ends_q, ends_k).seen(left, right)


def documents_of(mask, pattern, query, keys, cu_seq_lens_q, cu_seq_lens_k, seq_idx, position_ids):
    """The documents that keywords of transformers tell, or None."""
    batch, queries = query.shape[0], query.shape[2]
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        return _of_layers(batch, queries, keys, cu_seq_lens_q, cu_seq_lens_k)
    if seq_idx is not None:
        if seq_idx.dim() != 2 or seq_idx.shape[1] != queries or queries != keys:
            raise ValueError(
                f"seq_idx has shape {tuple(seq_idx.shape)}, for {queries} queries and {keys} keys; accepted: (batch, queries), "
                "and as many keys"
            )
        return _of_both(seq_idx)
    # As transformers' flash implementations do it; eager looks at positions only where there is no cache.
    if position_ids is None or queries == 1 or queries != keys or batch != 1 or tuple(position_ids.shape) != (1, queries):
        return None
    return _from_positions(mask, position_ids) if pattern.right == 0 and pattern.seen is None else None


def _of_layers(batch, queries, keys, cu_seq_lens_q, cu_seq_lens_k):
    """``_from_lengths``, once for all layers of a model, which are given the same two tensors: the first keeps what was found as long as
    nobody writes into them."""
    tensors = cu_seq_lens_q, cu_seq_lens_k
    if torch.compiler.is_compiling() or any(x is None or x.is_inference() for x in tensors):
        return _from_lengths(batch, queries, keys, *tensors)
    asked = batch, queries, keys, *[x._version for x in tensors]
    known = getattr(cu_seq_lens_q, "fa_ext_documents", None)
    if known is None or known[0] != asked or known[1]() is not cu_seq_lens_k:
        known = asked, weakref.ref(cu_seq_lens_k), _from_lengths(batch, queries, keys, *tensors)
        cu_seq_lens_q.fa_ext_documents = known
    return known[2]


def _from_lengths(batch, queries, keys, cu_seq_lens_q, cu_seq_lens_k):
    for name, given, size in (("q", cu_seq_lens_q, queries), ("k", cu_seq_lens_k, keys)):
        if given is None:
            raise ValueError(f"cu_seq_lens_{name} is None; accepted: cu_seq_lens_q and cu_seq_lens_k together")
        if given.dim() != 1 or given.is_floating_point():
            raise ValueError(
                f"cu_seq_lens_{name} has shape {tuple(given.shape)} and dtype {given.dtype}; accepted: (documents + 1,), whole "
                "numbers"
            )
        # On a GPU the look would wait for all that is queued there.
        if given.is_cpu and not torch.compiler.is_compiling():
            if given[0] != 0 or given[-1] > size or bool((given.diff() < 0).any()):
                raise ValueError(f"cu_seq_lens_{name} is {given.tolist()}; accepted: from 0 up to {size} at most, in order")
    if len(cu_seq_lens_q) != len(cu_seq_lens_k):
        raise ValueError(
            f"cu_seq_lens_q tells {len(cu_seq_lens_q) - 1} documents and cu_seq_lens_k {len(cu_seq_lens_k) - 1}; accepted: as many"
        )
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is given for a batch of {batch}; accepted: a batch of 1, one document behind the other")
    # Tokens behind the last document are one more.
    starts = (torch.nn.functional.pad(x.int(), (0, 1), value=n) for x, n in ((cu_seq_lens_q, queries), (cu_seq_lens_k, keys)))
    return Packed(*starts, queries, keys)


def _positions(starts, size):
    """The document of each of ``size`` tokens, and the distance to its end."""
    at = torch.arange(size, device=starts.device)
    ends = starts[1:].long()
    ids = torch.searchsorted(ends[:-1].contiguous(), at, right=True)
    return ids[None], (ends[ids] - at)[None]


def _of_both(ids):
    """The documents of as many queries as keys."""
    to_end = torch.arange(ids.shape[1], 0, -1, device=ids.device)[None]
    return Documents(ids, ids, to_end, to_end)


def _from_positions(mask, position_ids):
    """A document begins where a position is not above the one before, or None where all is one document. The layers of a model
    share a mask, and so what the first of them found."""
    from transformers.masking_utils import is_tracing

    again, queries = position_ids[:, 1:] <= position_ids[:, :-1], position_ids.shape[1]
    if is_tracing(position_ids):
        starts = documents(torch.nn.functional.pad(again, (1, 0)).cumsum(1))
        return Packed(starts, starts, queries, queries)
    known = getattr(mask, "fa_ext_documents", None)
    if known is None or known[0] is not position_ids:
        begin = again[0].nonzero()[:, 0].int() + 1
        starts = torch.nn.functional.pad(begin, (1, 0))
        starts = torch.nn.functional.pad(starts, (0, 1), value=queries)
        known = position_ids, Packed(starts, starts, queries, queries) if len(begin) else None
        if mask is not None:
            mask.fa_ext_documents = known
    return known[1]
