"""The shapes of ``bench audit``: drawn over everything that a choice of kernel depends on, and those that lost before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from bench.problems.case import Case

OPERATIONS = ("forward", "serving", "backward")
# FLOPs and bytes of one call at most, by kind of device.
MOST = {"cuda": (1e12, 1.5e9), "cpu": (1e8, 1e8)}
# Bytes of a call whose operands are filled on the host, as those beside masks and sinks are, at most.
MOST_ON_HOST = 3e7
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PAGES = (1, 3, 16, 256)
# Asked before any that is drawn: choices that lost once.
FIRST = {
    "forward": ("B3,H28/4,S1x6000,D128,bfloat16,layout=bshd",),
    "serving": (
        "B1,H32/8,S1x4096,D128,bfloat16,q=packed,k=paged,slack=0",
        "B16,H32/8,S1x4096,D128,bfloat16,q=packed,k=paged,page_size=1,slack=0",
        "B32,H32/8,S4x8192,D128,bfloat16,q=packed,k=paged,slack=0,causal=bottom_right",
    ),
    "backward": (
        "B4,H20,S4096,D96,bfloat16,layout=bshd,operation=backward",
        "B2,H12/4,S3000,D64,bfloat16,layout=bshd,operation=backward",
        "B1,H40/8,S6144,D128,bfloat16,causal=True,layout=bshd,operation=backward",
    ),
}


def first(operation: str, device: str) -> list[Case]:
    """Of a GPU: on the CPU they would take too long."""
    return [Case.parse(line) for line in FIRST[operation]] if device == "cuda" else []


def drawn(operation: str, count: int, seed: int, device: str) -> list[Case]:
    """`count` cases of one operation; case i depends on (operation, seed, i) alone."""
    draw: Callable[[random.Random], Case] = {"forward": _forward, "serving": _serving, "backward": _backward}[operation]
    flops, size = MOST[device]
    found = []
    for i in range(count):
        rng = random.Random(f"audit:{operation}:{seed}:{i}")
        case = draw(rng)
        while case.flops() > flops or _stored(case) > size:
            case = draw(rng)
        found.append(case)
    return found


def twin(case: Case) -> Case | None:
    """The same call without cu_seqlens_q, of a packed call of one query each."""
    if case.operation == "serving" and case.storage.q == "packed" and set(case.n_q) == {1}:
        return case.changed(q="one")
    return None


def _stored(case: Case) -> float:
    """Bytes of keys and values in memory, seen or not, and of queries and results."""
    keys = case.batch * max(case.n_k) if case.storage and case.storage.k == "padded" else sum(case.n_k)
    return 4.0 * (keys * case.heads_kv + sum(case.n_q) * case.heads) * case.head_dim


def _log(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _length(rng: random.Random, least: int, most: int) -> int:
    """Log-uniform; half of those over 64 are no multiple of it."""
    drawn = _log(rng, least, most)
    if drawn < 64:
        return drawn
    return 64 * round(drawn / 64) + (rng.randint(1, 63) if rng.random() < 0.5 else 0)


def _common(rng: random.Random) -> dict:
    heads_kv = _log(rng, 1, 32)
    group = rng.choice(GROUPS)
    return {"heads": heads_kv * group, "heads_kv": heads_kv, "head_dim": rng.choice(HEAD_DIMS), "dtype": rng.choice(("bfloat16", "bfloat16", "float16")),
            "seed": rng.randint(0, 999)}  # fmt: skip


def _seen(rng: random.Random, causal: bool | str) -> dict:
    """The mask of queries, and a softcap."""
    found: dict = {"causal": rng.choice((False, causal))}
    if rng.random() < 0.15:
        found["window"] = (_log(rng, 16, 4096), rng.choice((0, None)))
    if rng.random() < 0.1:
        found["softcap"] = 30.0
    return found


def _forward(rng: random.Random) -> Case:
    if rng.random() < 0.4:  # few queries on many keys
        seq_q, seq_k = rng.choice((1, 1, rng.randint(2, 16), _log(rng, 17, 256))), _length(rng, 64, 65536)
    else:
        seq_q = _length(rng, 16, 16384)
        seq_k = seq_q if rng.random() < 0.7 else _length(rng, 16, 16384)
    sinks = {"sinks": "float32"} if rng.random() < 0.1 else {}
    mask = {"mask": "rows"} if rng.random() < 0.05 and seq_q * seq_k < 1 << 22 else {}
    causal = True if seq_q == seq_k else "bottom_right"
    case = Case(batch=_log(rng, 1, 64), seq_q=seq_q, seq_k=seq_k, layout=rng.choice(("bshd", "bhsd")), **_common(rng), **_seen(rng, causal))
    return case.changed(**sinks, **mask) if _stored(case) <= MOST_ON_HOST else case


def _lengths(rng: random.Random) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence: decoding, few queries each, prompts, or prompts beside decoding."""
    batch, typical = _log(rng, 1, 256), _length(rng, 64, 32768)
    spread = rng.choice((0.0, 0.0, 0.5, 1.5))
    n_k = [typical if not spread else max(1, min(131072, int(rng.lognormvariate(math.log(typical), spread)))) for _ in range(batch)]
    kind = rng.choice(("decode", "decode", "few", "prompts", "mixed"))
    if kind == "few":
        return [(rng.randint(2, 16), n) for n in n_k] if spread else [(min(_log(rng, 2, 64), typical), n) for n in n_k[:1]] * batch
    if kind == "prompts":
        return [(n, n) for n in n_k] if rng.random() < 0.6 else [(max(1, n // 8), n) for n in n_k]
    prompts = rng.randint(1, 3) if kind == "mixed" else 0
    return [(n if i < prompts else 1, n) for i, n in enumerate(n_k)]


def _serving(rng: random.Random) -> Case:
    n_q, n_k = zip(*_lengths(rng))
    one = set(n_q) == {1}
    storage = {"q": rng.choice(("packed", "packed", "one" if one else "packed")), "k": rng.choice(("paged", "paged", "packed")),
               "page_size": rng.choice(PAGES)}  # fmt: skip
    storage["slack"] = _log(rng, 64, 4096) if rng.random() < 0.25 else 0  # queries and columns of the table that nobody uses
    if storage["k"] == "packed":
        storage |= {"page_size": 16}
    options = {"sinks": True} if rng.random() < 0.1 else {}
    return Case.sequences(n_q, n_k, **_common(rng), **_seen(rng, False if one else "bottom_right"), **storage, **options)


def _backward(rng: random.Random) -> Case:
    common = _common(rng)
    if rng.random() < 0.3:
        lengths = [_length(rng, 16, 4096)] * _log(rng, 1, 64) if rng.random() < 0.5 else [_length(rng, 16, 4096) for _ in range(_log(rng, 1, 64))]
        return Case.sequences(lengths, lengths, q="packed", k="packed", slack=0, operation="backward", **common, **_seen(rng, "bottom_right"))
    seq_q = _length(rng, 64, 16384)
    seq_k = seq_q if rng.random() < 0.85 else _length(rng, 64, 16384)
    return Case(batch=_log(rng, 1, 32), seq_q=seq_q, seq_k=seq_k, layout=rng.choice(("bshd", "bhsd")), operation="backward", **common,
                **_seen(rng, True if seq_q == seq_k else "bottom_right"))  # fmt: skip
