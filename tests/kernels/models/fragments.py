"""mma_backward_sm80 lane by lane in NumPy: which thread copies what, what ldmatrix delivers, which lane owns which element.

Elements are float64 and nothing is rounded: what is wrong is an index. ``ldmatrix`` and ``mma`` follow the PTX ISA (fragments
of ldmatrix .m8n8 and of mma.m16n8k16 with 16-bit operands); ``Layout``, ``addresses`` and ``copied`` follow
kernels/sm80/tile.cuh and kernels/sm80/mma_backward_tile.cuh; ``Warp`` follows kernels/sm80/mma_backward.cuh.
"""

import numpy as np

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4 * 2  # of an accumulator: its row and its first column


class Layout:
    """Where 16-byte chunk ``chunk`` of a row lies, in elements from the tile's begin."""

    def __init__(self, columns):
        self.columns, self.period = columns, 8 if columns % 64 == 0 else 4

    def key(self, row):
        return row & 7 if self.period == 8 else row >> 1 & 3

    def offset(self, row, chunk):
        return row * self.columns + ((chunk ^ self.key(row)) << 3)


def copied(columns, rows, threads):
    """(thread, row, chunk) of every 16-byte copy of a tile, in the order of the loops of RowCopy."""
    layout = Layout(columns)
    step, groups = threads // layout.period, columns // (layout.period * 8)
    for thread in range(threads):
        row, chunk = divmod(thread, layout.period)
        if rows < step and row >= rows:
            continue
        for r in range(0, rows, step):
            for g in range(groups):
                yield thread, row + r, chunk + g * layout.period, layout.offset(row, chunk) + r * columns + g * layout.period * 8


def tile(matrix, threads):
    """A tile in shared memory, as a block's copies leave it."""
    rows, columns = matrix.shape
    memory = np.full(rows * columns, np.nan)
    for _, row, chunk, at in copied(columns, rows, threads):
        memory[at : at + 8] = matrix[row, chunk * 8 : chunk * 8 + 8]
    return memory


def addresses(columns, block, rows_first):
    """The address that each lane gives to ldmatrix for the 16x16 block of columns [16 block, 16 block + 16): BlockAddress."""
    layout = Layout(columns)
    low, high = LANES >> 3 & 1, LANES >> 4
    row, chunk = ((LANES & 7) + low * 8, high) if rows_first else ((LANES & 7) + high * 8, low)
    base = layout.offset(row, chunk) * 2  # bytes
    period = layout.period // 2
    return ((base ^ (block % period * 32)) + block // period * (period * 32)) // 2


def ldmatrix(memory, at, transposed):
    """(4, 32, 2): registers of ldmatrix.x4; at: elements where the rows of the four 8x8 matrices begin, a lane each."""
    matrices = memory[at[:, None] + np.arange(8)].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    return np.stack((matrices[:, G, T], matrices[:, G, T + 1]), -1)


def bank_groups(at):
    """How many different 16-byte columns of the 128 bytes of banks each of the four phases of ldmatrix.x4 touches."""
    return [len(set((phase * 2 % 128 // 16).tolist())) for phase in at.reshape(4, 8)]


def mma(d, a, b0, b1):
    """d (32, 4) += a (4, 32, 2) times b0, b1 (32, 2 each): mma.m16n8k16."""
    left, right, out = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for n, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        for e in (0, 1):
            left[G + row, T + column + e] = a[n][:, e]
    for row, b in ((0, b0), (8, b1)):
        for e in (0, 1):
            right[T + row + e, G] = b[:, e]
    out = left @ right
    for e in range(4):
        d[:, e] += out[G + e // 2 * 8, T + e % 2]


class Warp:
    """16 own rows: what one warp does with steps of other rows. s-operands make scores, p-operands dP."""

    def __init__(self, columns, step, own_s, own_p, first_row):
        self.columns, self.step_rows, self.own = columns, step, (own_s, own_p)
        self.first_row = first_row
        self.first, self.second = (np.zeros((columns // 8, 32, 4)) for _ in range(2))
        self.conflicts = []

    def load(self, memory, at, transposed):
        self.conflicts += bank_groups(at)
        return ldmatrix(memory, at, transposed)

    def product(self, own, other, first):
        """(step / 8, 32, 4): accumulators of own rows times other rows [first, first + step)."""
        s = np.zeros((self.step_rows // 8, 32, 4))
        for k in range(self.columns // 16):
            a = self.load(own, addresses(self.columns, k, True) + self.first_row * self.columns, False)
            for n in range(self.step_rows // 16):
                b = self.load(other, addresses(self.columns, k, False) + (first + 16 * n) * self.columns, False)
                mma(s[2 * n], a, b[0], b[1])
                mma(s[2 * n + 1], a, b[2], b[3])
        return s

    def add(self, gradient, weights, other, first):
        """gradient += weights times other rows: the accumulators of the weights are operand a as they are."""
        for n in range(self.step_rows // 16):
            low, high = weights[2 * n], weights[2 * n + 1]
            a = np.stack((low[:, :2], low[:, 2:], high[:, :2], high[:, 2:]))
            for k in range(self.columns // 16):
                b = self.load(other, addresses(self.columns, k, True) + (first + 16 * n) * self.columns, True)
                mma(gradient[2 * k], a, b[0], b[1])
                mma(gradient[2 * k + 1], a, b[2], b[3])

    def step(self, other_s, other_p, first, weigh):
        """weigh(score, dp, own, other) -> (P, dT), with the rows of the lane's element."""
        s, g = self.product(self.own[0], other_s, first), self.product(self.own[1], other_p, first)
        for j in range(self.step_rows // 8):
            for e in range(4):
                own, other = self.first_row + G + e // 2 * 8, first + 8 * j + T + e % 2
                s[j][:, e], g[j][:, e] = weigh(s[j][:, e], g[j][:, e], own, other)
        self.add(self.second, s, other_p, first)
        self.add(self.first, g, other_s, first)

    def rows(self, gradient):
        """(16, columns): a gradient as write_rows stores it."""
        found = np.zeros((16, self.columns))
        for j in range(self.columns // 8):
            for e in range(4):
                found[G + e // 2 * 8, 8 * j + T + e % 2] = gradient[j][:, e]
        return found
