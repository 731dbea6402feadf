"""Dropout of other libraries, whose draws are their own: which weights a call dropped is read off the same draw with identities in
the place of V, and float64 judges the call with that mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.implementations.implementation import Thunk
from bench.implementations.peer import Peer
from bench.problems import Case
from bench.problems.operands import Arrays, Judged, Operands

if TYPE_CHECKING:
    from fa_ext.dropout import Dropout

# torch's generators begin here before each call that is judged.
SEED = 20260101


def found(p: float, kept: Any) -> Dropout:
    """Dropout, as the reference takes it, of a mask that was found: ``kept``, boolean (B, H, Sq, Sk) of NumPy or CuPy, and the
    probability p that a weight is dropped."""
    from fa_ext.dropout import Dropout

    class Found(Dropout):
        @property
        def scale(self) -> float:
            return 1 / (1 - p)

        def keeps(self, xp, b, h, i, j):
            return kept[b, h, i, j]

    return Found(round(65536 * p), 0, 0, (0, 0, 0, 0), kept.shape[1])


class Dropping(Peer):
    """A peer on torch whose problems may have dropout."""

    def attended(self, operands: Arrays, v: Any) -> Any:
        """The output (B, H, Sq, Dv) of its forward on the operands with another v, (B, Hk, Sk, Dv)."""
        raise NotImplementedError

    def bind(self, operands: Arrays) -> Thunk:
        raise NotImplementedError

    def refuses(self, case: Case) -> str | None:
        return "no dropout of sequences" if case.lengths and case.dropout else super().refuses(case)

    def refuses_trials(self, case: Case) -> str | None:
        return "draws of its own" if case.dropout else None

    def judged_on(self, operands: Operands) -> Judged:
        if not operands.case.dropout:
            return super().judged_on(operands)
        kept = kept_weights(operands, lambda v: self.attended(operands, v), self.library)
        operands.poison()
        operands.device.synchronize()
        _seed()
        result = self.bind(operands)()
        operands.device.synchronize()
        with operands.dropping(found(operands.case.dropout[0], kept)):
            return operands.judge(result)


def kept_weights(operands: Operands, attend: Callable[[Any], Any], library: str) -> Any:
    """(B, H, Sq, Sk) boolean, True where the draw that SEED begins kept a weight; of weights that are 0 it says no. ``attend`` is called
    with columns of an identity as each head's v."""
    case = operands.case
    v = operands.array("v", library)
    v = v.swapaxes(1, 2) if case.layout == "bshd" else v
    columns_of = []
    for first in range(0, case.seq_k, case.head_dim_v):
        columns = np.arange(min(case.head_dim_v, case.seq_k - first))
        chosen = v * 0
        chosen[:, :, first + columns, columns] = 1
        _seed()
        columns_of.append(operands.values_of(attend(chosen)[..., : len(columns)]) != 0)
    return np.concatenate(columns_of, axis=-1)


def _seed() -> None:
    import torch

    torch.manual_seed(SEED)
