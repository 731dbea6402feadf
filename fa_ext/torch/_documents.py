"""Packed documents: what transformers says of them, as a mask."""

from typing import NamedTuple

import torch

from ._masks import within


class Documents(NamedTuple):
    """The document of each query and key, (B or 1, Sq) and (B or 1, Sk), and how far it is from the document's end, which is
    negative; None where that is the distance from the last query and key."""

    queries: torch.Tensor
    keys: torch.Tensor
    queries_from_end: torch.Tensor | None = None
    keys_from_end: torch.Tensor | None = None

    def seen(self, left, right):
        """(B or 1, 1, Sq, Sk): a query sees the keys of its document, within a band whose end is that of the document."""
        seen = self.queries[:, :, None] == self.keys[:, None, :]
        if left is not None or right is not None:
            ends = self.queries_from_end, self.keys_from_end
            if ends == (None, None):
                ends = (torch.arange(-ids.shape[1], 0, device=ids.device)[None] for ids in (self.queries, self.keys))
            queries, keys = ends
            seen = seen & within(keys[:, None, :] - queries[:, :, None], left, right)
        return seen[:, None]


def documents_of(mask, pattern, query, keys, cu_seq_lens_q, cu_seq_lens_k, seq_idx, position_ids):
    """The documents that keywords of transformers tell, or None."""
    batch, queries = query.shape[0], query.shape[2]
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        return _from_lengths(batch, queries, keys, cu_seq_lens_q, cu_seq_lens_k)
    if seq_idx is not None:
        if seq_idx.shape[-1] != queries or queries != keys:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, for {queries} queries and {keys} keys; accepted: one for each of both")
        return Documents(*(seq_idx.reshape(-1, queries),) * 2)
    # As transformers' flash implementations do it: eager looks at positions in the mask alone, and not where there is a cache.
    if position_ids is None or batch != 1 or queries != keys or queries == 1 or pattern.right != 0 or pattern.seen is not None:
        return None
    if position_ids.shape != (1, queries):
        return None
    return _from_positions(mask, position_ids)


def _from_lengths(batch, queries, keys, cu_seq_lens_q, cu_seq_lens_k):
    for name, given, size in (("q", cu_seq_lens_q, queries), ("k", cu_seq_lens_k, keys)):
        if given is None:
            raise ValueError(f"cu_seq_lens_{name} is None; accepted: cu_seq_lens_q and cu_seq_lens_k together")
        if given.dim() != 1 or given.is_floating_point():
            raise ValueError(f"cu_seq_lens_{name} has shape {tuple(given.shape)} and dtype {given.dtype}; accepted: (documents + 1,), integers")
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is given for a batch of {batch}; accepted: a batch of 1, the documents one after the other")
    sides = [_positions(cu, size) for cu, size in ((cu_seq_lens_q, queries), (cu_seq_lens_k, keys))]
    return Documents(sides[0][0], sides[1][0], sides[0][1], sides[1][1])


def _positions(cu_seq_lens, size):
    """The document of each of ``size`` tokens, and where it is from the document's end. What comes after the last document is
    one more."""
    at = torch.arange(size, device=cu_seq_lens.device)
    ends = torch.nn.functional.pad(cu_seq_lens[1:].long(), (0, 1), value=size)
    ids = torch.searchsorted(ends[:-1].contiguous(), at, right=True)
    return ids[None], (at - ends[ids])[None]


def _from_positions(mask, position_ids):
    """A document begins where a position is not above the one before. The layers of a model share a mask, and so what was
    found for the first of them."""
    from transformers.masking_utils import is_tracing

    if is_tracing(position_ids):
        return _starts(position_ids)
    known = getattr(mask, "fa_ext_documents", None)
    if known is None or known[0] is not position_ids:
        documents = _starts(position_ids)
        known = position_ids, documents if bool(documents.queries[0, -1]) else None
        if mask is not None:
            mask.fa_ext_documents = known
    return known[1]


def _starts(position_ids):
    again = torch.nn.functional.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0))
    return Documents(*(again.cumsum(1),) * 2)
