"""Calls of fa_ext.torch over sequences for its tests, and each of their sequences by itself."""

import math

import torch

from tests.frameworks.support.sequence_calls import CALLS, DV, HK, D, H
from tests.frameworks.support.torch_calls import distances


def index(values, device="cpu", dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def make(name, device="cpu", dtype=torch.float64, seed=0, d=D, dv=DV):
    """(tensors by name, index arrays by name, options) of a call. A tensor that can have a gradient requires one."""
    rows_q, rows_k, storage_q, storage_k, options, extras = CALLS[name]
    generator, batch = torch.Generator().manual_seed(seed), len(rows_q)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    def stored(rows, storage, heads, width):
        room = rows[-1][1] + 2 if storage.startswith("packed") else batch if storage == "single" else max(end for _, end in rows) + 1
        if storage != "padded":
            return draw(room, heads, width)
        return draw(batch, room, heads, width) if options.get("layout") == "bshd" else draw(batch, heads, room, width)

    tensors = {"q": stored(rows_q, storage_q, H, d)}
    tensors |= {"k": stored(rows_k, storage_k, HK, d), "v": stored(rows_k, storage_k, HK, dv)}
    indices = {}
    for side, rows, storage in (("q", rows_q, storage_q), ("k", rows_k, storage_k)):
        if storage.startswith("packed"):
            # Rooms touch; of those of "packed used" the last rows are not used.
            indices[f"cu_seqlens_{side}"] = index([rows[0][0], *(begin for begin, _ in rows[1:]), rows[-1][1] + storage.count("used")], device)
        if storage in ("padded", "packed used"):
            indices[f"seqlens_{side}"] = index([end - begin for begin, end in rows], device)
    sq, sk = (tensors[n].shape[1 if options.get("layout") == "bshd" else 2] for n in "qk")
    if "bias" in extras:
        tensors["bias"] = draw(batch, H, sq, sk)
    if "bias of a head" in extras:
        tensors["bias"] = draw(H, 1, 1)
    if "mask" in extras:
        tensors["mask"] = (torch.rand(batch, 1, sq, sk, generator=generator) < 0.7).to(device)
    if "sinks" in extras:
        tensors["sinks"] = draw(H)
    if {"alibi", "alibi of each"} & set(extras):
        tensors["alibi"] = torch.rand(*((H,) if "alibi" in extras else (batch, H)), generator=generator).to(device)
    if "k_range" in extras:
        indices["k_range"] = index([1, 0], device), index([4, 2], device)
    if "positions" in extras:
        indices["positions"] = index([3, 0, 4, 4, 1, 9, -1] + [0] * (tensors["q"].shape[0] - 7), device)
    return tensors, indices, dict(options)


def leaves(tensors):
    return {name: x for name, x in tensors.items() if x.requires_grad}


def by_sequences(name, tensors, indices, options, attend):
    """(out, lse) of a call, whose sequences go by themselves through ``attend(tensors, options)``, which takes a dense call."""
    rows_q, rows_k, storage_q, storage_k, _, _ = CALLS[name]
    swapped = options.get("layout") == "bshd"
    q, v = tensors["q"], tensors["v"]
    packed = q.dim() == 3
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    heads_first = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]) if swapped else q.shape[:3]
    lse = torch.full(heads_first, -math.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    for b, (of_q, of_k) in enumerate(zip(rows_q, rows_k, strict=True)):
        if of_q[0] == of_q[1]:
            continue
        mine = dict(tensors) | {n: _rows_of(tensors[n], b, *(of_q if n == "q" else of_k), swapped) for n in "qkv"}
        for n in {"bias", "mask"} & set(tensors):
            if mine[n].dim() == 4:
                mine[n] = mine[n][b : b + 1, :, : of_q[1] - of_q[0], : of_k[1] - of_k[0]]
        if "alibi" in tensors and tensors["alibi"].dim() == 2:
            mine["alibi"] = tensors["alibi"][b : b + 1]
        mine, own = _placed(mine, indices, options, b, of_q, of_k)
        own.pop("layout", None)
        got, got_lse = attend(mine, own)
        if packed:
            out[of_q[0] : of_q[1]], lse[:, of_q[0] : of_q[1]] = got[0].transpose(0, 1), got_lse[0]
        else:
            (out[b].transpose(0, 1) if swapped else out[b])[:, of_q[0] : of_q[1]] = got[0]
            lse[b, :, of_q[0] : of_q[1]] = got_lse[0]
    return out, lse


def _rows_of(x, b, begin, end, swapped):
    """(1, heads, rows, width) of a sequence."""
    if x.dim() == 3:
        return x[begin:end].transpose(0, 1)[None]
    return (x.transpose(1, 2) if swapped else x)[b : b + 1, :, begin:end]


def _placed(tensors, indices, options, b, of_q, of_k):
    """The tensors and options of a sequence whose ``k_range`` and ``positions`` are a mask and a bias, pair by pair."""
    if not {"k_range", "positions"} & set(indices):
        return tensors, dict(options)
    n_q, n_k, own = of_q[1] - of_q[0], of_k[1] - of_k[0], dict(options)
    far = distances(n_q, n_k, {})
    if "positions" in indices:
        places = indices["positions"][of_q[0] : of_q[1]].tolist()
        far = torch.tensor([[j - place for j in range(n_k)] for place in places])
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    if own.pop("causal", None):
        mask &= far <= 0
    window = own.pop("window", None)
    if window is not None:
        mask &= far >= -window[0]
    if "k_range" in indices:
        begin, end = (int(x[b]) for x in indices["k_range"])
        mask &= (torch.arange(n_k) >= begin) & (torch.arange(n_k) < end)
    mine = {n: x for n, x in tensors.items() if n != "alibi"} | {"mask": mask[None, None].to(tensors["q"].device)}
    if "alibi" in tensors:
        mine["bias"] = -(tensors["alibi"].to(tensors["q"].dtype)[:, None, None] * far.abs().to(tensors["q"].device))[None]
    return mine, own
