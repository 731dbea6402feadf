"""kernels/sm90/backward/keys_pair.cuh as a protocol model, site by site: protocol_backward.py's keys kernel with other
consumers, which take turns with dP and dV.
"""

from tests.kernels.models.protocol import Model
from tests.kernels.models.protocol_backward import CONSUMERS, Backward, _Keys, keys_model


def pair_model(shape: Backward) -> Model:
    """Mistakes: keys_model's, and "no turn" (a skipped step takes none)."""
    return keys_model(shape, _Pair)


class _Pair(_Keys):
    """keys_pair_consume."""

    def begin(self) -> None:
        super().begin()
        if self.shape.turns and self.g == CONSUMERS - 1:
            self.turn_pass()

    def skip(self, count: int) -> None:
        for _ in range(count):
            self.wait_full("step", self.ring)
            if "no turn" not in self.shape.mistakes:
                self.turn_wait()
                self.turn_pass()
            self.free("step", self.ring.use, self.shape.stages)
            self.ring.advance()

    def issue_scores(self) -> None:
        self.wait_full("step", self.ring)
        self.look("step", self.ring.use, "LSE")
        self.issue("S", True, self.ring.use)

    def steps(self, at: str, begin: int, end: int) -> None:
        shape, use = self.shape, 0
        self.at = f"{at} block {begin}"
        self.issue_scores()
        self.wgmma.issue([], f"{self.at}: an empty group")
        for block in range(begin, end):
            self.at = f"{at} block {block}"
            self.wgmma.wait(1, self.at)
            self.look("step", self.ring.use, "LSE")
            self.wgmma.wait(0, self.at)
            if block > begin:
                self.free("step", use, shape.stages)
            use = self.ring.use
            self.turn_wait()
            self.issue("dP and dV", True, use)
            self.wgmma.wait(0, self.at)
            self.turn_pass()
            self.look("step", use, "delta")
            self.ring.advance()
            if block + 1 == end:
                break
            self.issue_scores()
            self.issue("dK", False, use)
        self.issue("dK", False, use)
        if "step early" in shape.mistakes:
            self.free("step", use, shape.stages)
        self.wgmma.wait(0, self.at)
        if "step early" not in shape.mistakes:
            self.free("step", use, shape.stages)
