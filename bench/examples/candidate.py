"""A candidate for the laboratory: attention by query blocks with an online softmax, in NumPy.

Judge it with ``python -m bench gate bench/examples/candidate.py:attention``. It computes the same as the three-line
version, but never holds more than one block of scores, so they stay in the cache.
"""

import math

import numpy as np

BLOCK_QUERIES, BLOCK_KEYS = 128, 256


def attention(q, k, v, *, causal=False, scale=None, out=None):
    """q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) -> (B, H, Sq, Dv); causal aligns the last query and key."""
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    diagonal = 0 if causal == "top_left" else seq_k - seq_q
    out = np.empty((batch, heads, seq_q, v.shape[3]), q.dtype) if out is None else out
    for b in range(batch):
        for h in range(heads):
            keys, values = (x[b, h // (heads // heads_kv)].astype(np.float32) for x in (k, v))
            for i in range(0, seq_q, BLOCK_QUERIES):
                queries = q[b, h, i : i + BLOCK_QUERIES].astype(np.float32) * np.float32(scale)
                positions = np.arange(i, i + len(queries))[:, None] + diagonal
                out[b, h, i : i + BLOCK_QUERIES] = _block(queries, keys, values, positions if causal else None)
    return out


def _block(queries, keys, values, positions):
    """One block of queries against the keys it sees; `positions` are the last visible keys, None without a mask."""
    peak = np.full((len(queries), 1), -np.inf, np.float32)
    total = np.zeros((len(queries), 1), np.float32)
    result = np.zeros((len(queries), values.shape[1]), np.float32)
    end = len(keys) if positions is None else min(len(keys), int(positions[-1, 0]) + 1)
    for j in range(0, end, BLOCK_KEYS):
        scores = queries @ keys[j : min(j + BLOCK_KEYS, end)].T
        if positions is not None:
            scores = np.where(np.arange(j, j + scores.shape[1]) <= positions, scores, -np.inf)
        largest = np.maximum(peak, scores.max(axis=1, keepdims=True))
        shift = np.where(np.isneginf(largest), 0, largest)
        weights, decay = np.exp(scores - shift), np.exp(peak - shift)
        total = total * decay + weights.sum(axis=1, keepdims=True)
        result = result * decay + weights @ values[j : j + scores.shape[1]]
        peak = largest
    return result / np.where(total == 0, 1, total)
