"""Our own dense call on the rows of sequences that are all as long: the rate that a call over sequences is held to."""

from __future__ import annotations

from typing import Any

from bench.implementations.implementation import Implementation, Thunk
from bench.problems import Case
from bench.problems.operands import Arrays

NAME = "fa_ext-dense"


class DenseRows(Implementation):
    """``fa_ext.attention_backward`` without lengths, by the kernel that the library takes."""

    operations = frozenset({"backward"})

    def __init__(self, library: str):
        super().__init__(NAME, library)

    def refuses(self, case: Case) -> str | None:
        if not case.storage or (case.storage.q, case.storage.k) != ("packed", "packed"):
            return "no packed sequences"
        return None if len(set(case.n_q)) == len(set(case.n_k)) == 1 else "not of one length"

    def bind(self, operands: Arrays) -> Thunk:
        import fa_ext

        case: Case = operands.case
        batch = len(case.n_q)

        def rows(name: str) -> Any:
            x = operands.array(name, self.library)
            return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])

        of_rows = ("dout", "q", "k", "v", "out")
        given = {name: x for name, x in operands.arguments(self.library).items() if name not in ("cu_seqlens_q", "cu_seqlens_k")}
        given |= {name: rows(name) for name in of_rows} | {"layout": "bshd"}
        for name in ("lse", "dlse"):  # (H, T)
            if name in given:
                given[name] = given[name].reshape(case.heads, batch, case.seq_q).swapaxes(0, 1)
        held = tuple(operands.array(f"d{name}", self.library) for name in case.wrt())
        into = tuple(rows(f"d{name}") if name in ("q", "k", "v") else x for name, x in zip(case.wrt(), held, strict=True))

        def call():
            fa_ext.attention_backward(**given, wrt=case.wrt(), grads=into)
            return held

        return call
