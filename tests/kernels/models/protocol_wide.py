"""kernels/sm90/backward/keys_wide.cuh as a protocol model, site by site: see protocol_backward.py.

Warpgroup 0 has the role of the weights, warpgroup 1 that of the slopes. Warp w of the one sends P to warp w of the other.
"""

from itertools import product

from tests.kernels.models.protocol import Model, Ring
from tests.kernels.models.protocol_backward import Backward, KeyTile, _Consumer, _Machine

WEIGHT_STAGES = 2


def wide_model(shape: Backward) -> Model:
    """Every warp sees all blocks of a tile: KeyTile's `own` counts for nothing. Mistakes: "no q_empty", "no dout_empty",
    "no k_empty" (the producer does not wait), "q early" (a stage is freed before its dK is waited for), "no
    weights_empty" (P is sent without a wait), "delta late" (read after its stage is freed), "tile by one"."""
    weights = {f"weights{w}": WEIGHT_STAGES for w in range(shape.warps)}
    machine = _Machine(shape, {"q": shape.stages, "dout": shape.dout_stages, "k": 1, "v": 1} | weights)
    machine.ring("q", shape.stages, 2)
    machine.ring("dout", shape.dout_stages, 2)
    machine.ring("k", 1, 1)
    machine.ring("v", 1, 1)
    for name, s in product(weights, range(WEIGHT_STAGES)):
        machine.model.barrier(f"{name}_full[{s}]", 1, parity=True)
        machine.model.barrier(f"{name}_empty[{s}]", 1, parity=True)
    rings = {"q": Ring(shape.stages), "dout": Ring(shape.dout_stages), "k": Ring(1), "v": Ring(1)}

    def load(kind: str, site: str) -> None:
        machine.load(kind, rings[kind], f"{site} {kind}")
        rings[kind].advance()

    def load_tile(tile: KeyTile, at: str, announce_next) -> None:
        if tile.count == 0:
            return announce_next()
        steps = tile.count * tile.members
        for kind in ("k", "q", "v"):
            load(kind, at)
        announce_next()
        for step in range(steps):
            load("dout", f"{at} step {step}")
            if step + 1 < steps:
                load("q", f"{at} step {step + 1}")

    machine.produce(load_tile)
    return machine.consumers(_Role)


class _Role(_Consumer):
    """wide_keys_consume: WeightsRole in warpgroup 0, SlopesRole in warpgroup 1."""

    def begin(self) -> None:
        self.rings = {"q": Ring(self.shape.stages), "dout": Ring(self.shape.dout_stages), "k": Ring(1), "v": Ring(1)}
        self.weights, self.weights_name = Ring(WEIGHT_STAGES), f"weights{self.actor.name[-1]}"

    def release(self, kind: str) -> None:
        ring = self.rings[kind]
        self.free(kind, ring.use, ring.stages)
        ring.advance()

    def issue(self, what: str, *kinds: str) -> None:
        """A product, once the operand that comes last is there."""
        self.wait_full(kinds[0], self.rings[kinds[0]])
        self.wgmma.issue([(kind, self.rings[kind].use) for kind in kinds], f"{self.at}: {what}")

    def work(self, tile: KeyTile) -> None:
        steps = tile.count * tile.members
        if steps:
            (self.weigh if self.g == 0 else self.differentiate)(self.at, steps)

    def send(self) -> None:
        name, ring = self.weights_name, self.weights
        if "no weights_empty" not in self.shape.mistakes:
            self.actor.wait(f"{name}_empty[{ring.stage}]", ring.phase - 1, f"{self.at}: wait to send")
        begins = self.actor.step(f"{self.at}: write P")
        there = self.actor.arrive(f"{name}_full[{ring.stage}]", ring.phase, f"{self.at}: P is there")
        self.buffers.fill(name, ring.use, begins, there)
        ring.advance()

    def receive(self) -> None:
        name, ring = self.weights_name, self.weights
        self.actor.wait(f"{name}_full[{ring.stage}]", ring.phase, f"{self.at}: wait for P")
        self.look(name, ring.use, "P")
        self.actor.arrive(f"{name}_empty[{ring.stage}]", ring.phase, f"{self.at}: P is read")
        ring.advance()

    def weigh(self, at: str, steps: int) -> None:
        self.wait_full("k", self.rings["k"])
        self.issue("S", "q", "k")
        for step in range(steps):
            self.at = f"{at} step {step}"
            self.wgmma.wait(0, self.at)
            if step + 1 == steps:
                self.release("k")
            self.look("q", self.rings["q"].use, "LSE")
            self.release("q")
            self.send()
            self.issue("dV", "dout")
            if step + 1 < steps:
                self.issue("S", "q", "k")
                self.wgmma.wait(1, self.at)
            else:
                self.wgmma.wait(0, self.at)
            self.release("dout")

    def differentiate(self, at: str, steps: int) -> None:
        early, late = ("q early" in self.shape.mistakes, "delta late" in self.shape.mistakes)
        self.wait_full("v", self.rings["v"])
        self.issue("dP", "dout", "v")
        for step in range(steps):
            self.at = f"{at} step {step}"
            if not late:
                self.look("dout", self.rings["dout"].use, "delta")
            self.wgmma.wait(0, self.at)
            if step + 1 == steps:
                self.release("v")
            use = self.rings["dout"].use
            self.release("dout")
            self.receive()
            if late:
                self.look("dout", use, "delta")
            self.issue("dK", "q")
            if early:
                self.release("q")
            if step + 1 < steps:
                self.issue("dP", "dout", "v")
                self.wgmma.wait(1, self.at)
            else:
                self.wgmma.wait(0, self.at)
            if not early:
                self.release("q")
