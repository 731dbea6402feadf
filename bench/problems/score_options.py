"""The problems of the options of a score, in cells that are named: each with an option, and plain, that is without it on the pairs that
it leaves (bias, alibi, dropout, softcap: causal or all) or on all of them (a mask drawn for each pair, key padding)."""

from __future__ import annotations

import dataclasses

from bench.problems.case import Case
from bench.problems.dense import document_lengths

# Queries, and head_dim, of bias, mask and key padding.
SIZES = ((2048, 64), (2048, 128), (4096, 128))
# Tokens of documents, and whose draws are measured.
TOKENS, DRAWS = 16384, (0, 1)


def _call(batch: int, heads: int, seq: int, head_dim: int, **options) -> Case:
    return Case(batch, heads, seq_q=seq, head_dim=head_dim, **{"dtype": "bfloat16", "layout": "bshd"} | options)


def _beside_plain(cases: list[Case], **plain) -> list[Case]:
    """Each case behind the call without its options; ``plain``: what that call has in their place."""
    without = {"bias": None, "mask": None, "alibi": None, "dropout": None, "softcap": 0.0} | plain
    return list(dict.fromkeys(one for case in cases for one in (dataclasses.replace(case, **without), case)))


def _documents() -> list[Case]:
    """As a mask; plain, as packed sequences."""
    found = []
    for number in DRAWS:
        lengths = document_lengths(number, TOKENS)
        for heads_kv, head_dim in ((8, 128), (32, 64)):
            found.append(Case.sequences(lengths, lengths, 32, heads_kv, head_dim, dtype="bfloat16", q="packed", k="packed", slack=0,
                                        causal="bottom_right"))  # fmt: skip
            found.append(_call(1, 32, TOKENS, head_dim, heads_kv=heads_kv, mask=f"documents{number}"))
    return found


def _pairs() -> list[Case]:
    """Attention between the pairs of a structure: a bias for the whole batch, and key padding."""
    return _beside_plain([_call(256, 4, 256, 32, bias="shared", mask="padding"), _call(384, 4, 384, 32, bias="shared32", mask="padding")])


def _forward() -> dict[str, list[Case]]:
    cells = {"bias": _beside_plain([_call(4, 16, s, d, bias=kind) for s, d in SIZES for kind in ("full", "shared")])}
    cells["bias-float32"] = _beside_plain([_call(4, 16, 4096, 128, bias="full32")])
    masks = [_call(4, 16, s, d, mask="pairs") for s, d in SIZES] + [_call(4, 16, 4096, 128, mask="full")]
    cells["mask"] = _beside_plain(masks)
    cells["padding"] = _beside_plain([_call(4, 16, s, d, mask="padding") for s, d in SIZES])
    cells["causal-mask"] = _beside_plain([_call(4, 16, 4096, d, mask="causal") for d in (64, 128)], causal=True)
    cells["alibi"] = _beside_plain([_call(16384 // s, 2048 // d, s, d, alibi="heads", causal=True) for s in (2048, 8192) for d in (64, 128)])
    cells["dropout"] = [one for causal in (False, True) for one in _beside_plain(
        [_call(4, 2048 // d, 4096, d, dropout=(0.1, 1), causal=causal) for d in (64, 128)])]  # fmt: skip
    cells["documents"] = _documents()
    cells["pair"] = _pairs()
    cells["softcap"] = _beside_plain([_call(4, 2048 // d, 4096, d, softcap=30.0) for d in (64, 128, 256)])
    cells["192/128"] = [_call(1, 128, s, 192, head_dim_v=128, causal=True) for s in (2048, 4096, 8192)]
    return cells


def _backward() -> dict[str, list[Case]]:
    """Gradients in order. That of a bias is always asked for."""
    cells = {"bias": _beside_plain([_call(4, 16, s, d, bias=kind) for s, d in ((2048, 64), (4096, 128)) for kind in ("full", "shared")])}
    cells["mask"] = _beside_plain([_call(4, 16, s, d, mask="pairs") for s, d in SIZES])
    cells["padding"] = _beside_plain([_call(4, 16, s, d, mask="padding") for s, d in SIZES])
    cells["causal-mask"] = _beside_plain([_call(4, 16, 4096, d, mask="causal") for d in (64, 128)], causal=True)
    cells["alibi"] = _beside_plain([_call(4, 2048 // d, 4096, d, alibi="heads", causal=True) for d in (64, 128)])
    dropped = [_call(4, 2048 // d, 4096, d, dropout=(0.1, 1), causal=causal) for d in (64, 128, 256) for causal in (False, True)]
    dropped.append(_call(1, 128, 2048, 192, head_dim_v=128, dropout=(0.1, 1), causal=True))
    cells["dropout"] = [one for case in dropped for one in _beside_plain([case])]
    cells["documents"] = _documents()
    cells["pair"] = _pairs()
    cells["softcap"] = _beside_plain([_call(4, 2048 // d, 4096, d, softcap=30.0) for d in (128, 256)])
    cells["192/128"] = [_call(1, 128, s, 192, head_dim_v=128, causal=True) for s in (2048, 4096)]
    return {name: [case.changed(operation="backward") for case in cases] for name, cases in cells.items()}


FORWARD, BACKWARD = _forward(), _backward()
