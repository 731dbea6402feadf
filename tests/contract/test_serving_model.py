"""A paged cache in use: sequences come, grow by appends, lose their first pages, share a prefix, end and leave their pages to
others, in any order; attention over it is held against a Python list of each sequence's keys."""

import math

import numpy as np
import pytest

import fa_ext

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
stateful = pytest.importorskip("hypothesis.stateful")

PAGES, SIZE, ROWS, WIDTH, HEADS, KV, D = 12, 3, 4, 6, 4, 2, 8


class Cache(stateful.RuleBasedStateMachine):
    """Row b of the table is sequence b; ``keys`` holds what its keys are, position by position, None where one is evicted."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.k, self.v = (np.full((PAGES, SIZE, KV, D), np.nan, np.float32) for _ in "kv")
        self.table = np.full((ROWS, WIDTH), -1, np.int32)
        self.users = np.zeros(PAGES, int)
        self.keys = [[] for _ in range(ROWS)]

    def own_page(self, b, column):
        """A page that sequence b alone has in this column."""
        page = self.table[b, column]
        if page >= 0 and self.users[page] == 1:
            return True
        free = np.flatnonzero(self.users == 0)
        if not len(free):
            return False
        fresh = int(self.rng.choice(free))
        if page >= 0:  # copy on write
            self.k[fresh], self.v[fresh] = self.k[page], self.v[page]
            self.users[page] -= 1
        self.users[fresh], self.table[b, column] = 1, fresh
        return True

    @stateful.rule(counts=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS))
    def append(self, counts):
        for b, count in enumerate(counts):
            end = len(self.keys[b]) + count
            columns = range(len(self.keys[b]) // SIZE, -(-end // SIZE))
            if end > WIDTH * SIZE or not all(self.own_page(b, column) for column in columns if count):
                counts[b] = 0
        total = sum(counts)
        k, v = (self.rng.standard_normal((total, KV, D)).astype(np.float32) for _ in "kv")
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lengths = np.array([len(keys) + n for keys, n in zip(self.keys, counts)], np.int32)
        fa_ext.append(self.k, self.v, k, v, layout="bshd", page_table=self.table, seqlens_k=lengths, cu_seqlens_q=starts)
        for b in range(ROWS):
            self.keys[b] += [(k[t], v[t]) for t in range(starts[b], starts[b + 1])]

    @stateful.rule(b=st.integers(0, ROWS - 1))
    def end(self, b):
        for page in self.table[b][self.table[b] >= 0]:
            self.users[page] -= 1
        self.table[b], self.keys[b] = -1, []
        for page in np.flatnonzero(self.users == 0):
            self.k[page] = self.v[page] = np.nan

    @stateful.rule(b=st.integers(0, ROWS - 1), columns=st.integers(1, 3))
    def evict(self, b, columns):
        for column in range(min(columns, len(self.keys[b]) // SIZE)):
            page = self.table[b, column]
            if page >= 0:
                self.users[page] -= 1
                self.table[b, column] = -1
            self.keys[b][column * SIZE : (column + 1) * SIZE] = [None] * SIZE

    @stateful.rule(a=st.integers(0, ROWS - 1), b=st.integers(0, ROWS - 1))
    def fork(self, a, b):
        if a != b and self.keys[a] and not self.keys[b]:
            self.table[b], self.keys[b] = self.table[a], list(self.keys[a])
            for page in self.table[b][self.table[b] >= 0]:
                self.users[page] += 1

    @stateful.rule(counts=st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), window=st.sampled_from((None, (4, 0))),
                   kernel=st.sampled_from(("cpu_ref", "cpu_simd")))  # fmt: skip
    def attend(self, counts, window, kernel):
        q = self.rng.standard_normal((sum(counts), HEADS, D)).astype(np.float32)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        kept = [sum(x is None for x in keys) for keys in self.keys]
        out, lse = fa_ext.attention(
            q, self.k, self.v, causal="bottom_right", window=window, layout="bshd", page_table=self.table, cu_seqlens_q=starts,
            seqlens_k=np.array([len(keys) for keys in self.keys], np.int32), k_range=(np.array(kept, np.int32), None),
            return_lse=True, kernel=kernel,
        )  # fmt: skip
        for b, keys in enumerate(self.keys):
            for i in range(counts[b]):
                at = i + len(keys) - counts[b]
                seen = [j for j, x in enumerate(keys) if x is not None and j <= at and (window is None or at - j <= window[0])]
                for h in range(HEADS):
                    wanted, total = self.softmax(q[starts[b] + i, h], [(keys[j][0][h // 2], keys[j][1][h // 2]) for j in seen])
                    np.testing.assert_allclose(out[starts[b] + i, h], wanted, atol=1e-5)
                    np.testing.assert_allclose(lse[h, starts[b] + i], total, atol=1e-5)

    @staticmethod
    def softmax(q, pairs):
        if not pairs:
            return np.zeros(D), -math.inf
        scores = np.array([float(q.astype(float) @ k) / math.sqrt(D) for k, _ in pairs])
        total = float(np.log(np.exp(scores).sum()))
        return sum(math.exp(s - total) * v for s, (_, v) in zip(scores, pairs)), total


Cache.TestCase.settings = hypothesis.settings(max_examples=25, stateful_step_count=30, deadline=None)
TestCache = Cache.TestCase
