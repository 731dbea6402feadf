"""varlen_attn(): torch's signature of attention over packed sequences."""

from ._attention import attention


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """Attention over packed sequences, with the signature and meaning of ``torch.nn.attention.varlen.varlen_attn``.

    Parameters
    ----------
    query, key, value : Tensor
        (T, H, D), (Tk, Hk, D) and (Tk, Hk, Dv); with ``block_table`` key and value are pages, (pages, page_size, Hk, D). Every dtype
        and head_dim of ``attention``, on the CPU too.
    cu_seq_q, cu_seq_k : Tensor of int32 or int64
        (N + 1,): sequence n has rows ``cu_seq_q[n]`` to ``cu_seq_q[n + 1]`` of query, and those of ``cu_seq_k`` of key and value.
        ``cu_seq_k`` is not read where ``block_table`` is given.
    max_q, max_k : int
        Not read.
    return_aux : AuxRequest
        With ``lse=True``, the LSE is returned too.
    scale : float
        1 / sqrt(D) by default.
    window_size : (int, int)
        Keys to the left and right of a query's own that it sees, where the last query of a sequence stands at its last key; -1 for
        no bound. (-1, 0) is causal attention.
    enable_gqa : bool
        Whether Hk may be less than H.
    seqused_k : Tensor of int32 or int64
        (N,): how many of its keys each sequence uses.
    block_table : Tensor of int32 or int64
        (N, columns): the pages of each sequence. It needs ``seqused_k``, and has no gradients.
    num_splits : int
        Not read: a sequence's result depends on that sequence alone.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with an LSE
        (T, H, Dv), and (H, T) in float32 (float64 for float64). Gradients pass through both. Rows of no sequence are 0 and -inf.

    Raises
    ------
    ValueError, TypeError, fa_ext.UnsupportedError
        As ``attention``; ValueError also for heads that differ without ``enable_gqa``.
    """
    if cu_seq_k is None and block_table is None:
        raise ValueError("cu_seq_k is None; accepted: where the sequences of key begin, or block_table and seqused_k")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; accepted: a pair (left, right), each an int, -1 for no bound")
    heads, heads_k = query.shape[1], key.shape[-2]
    if not enable_gqa and heads != heads_k:
        raise ValueError(f"query has {heads} heads and key {heads_k}; accepted: as many, or enable_gqa=True")
    left, right = (None if bound == -1 else bound for bound in window_size)
    causal = right == 0
    window = left, None if causal else right
    where = {"cu_seqlens_k": cu_seq_k} if block_table is None else {"page_table": block_table, "layout": "bshd"}
    return attention(
        query, key, value, causal="bottom_right" if causal else False, scale=scale, window=None if window == (None, None) else window,
        cu_seqlens_q=cu_seq_q, seqlens_k=seqused_k, return_lse=return_aux is not None and return_aux.lse, **where,
    )  # fmt: skip
