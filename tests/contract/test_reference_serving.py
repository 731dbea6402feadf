"""The judge of the serving keywords: sequences against a loop over single keys, and what bad contents mean."""

import math

import numpy as np
import pytest

from bench.problems import stored
from bench.problems.case import Case
from bench.problems.lengths import K_STORAGE
from bench.problems.serving_cases import grid, lengths, random_cases
from fa_ext import reference
from fa_ext.reference import serving
from fa_ext.reference.serving import Fault


def naive(case, values):
    """[(out, lse)] of each sequence, (n_q, H, Dv) and (n_q, H): a Python loop over the keys a query sees."""
    options, positions = case.options() | stored.extras(case), stored.query_positions(case)
    left, right = (math.inf if x is None else x for x in case.window or (None, None))
    right = min(right, 0) if case.causal else right
    begin, end = options.get("k_range", (None, None))
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)
    results = []
    for b, (q, k, v) in enumerate(values):
        q, k, v = (x.astype(float) for x in (q, k, v))
        n_q, n_k = len(q), len(k)
        out, lse = np.zeros((n_q, case.heads, case.head_dim_v)), np.full((n_q, case.heads), -np.inf)
        for i, h in np.ndindex(n_q, case.heads):
            at = i if case.causal == "top_left" else i + n_k - n_q
            at = int(positions[b][i]) if positions else at
            scores = {}
            for j in range(n_k):
                if not -left <= j - at <= right or (begin is not None and j < begin[b]) or (end is not None and j >= end[b]):
                    continue
                s = scale * float(q[i, h] @ k[j, h * case.heads_kv // case.heads])
                s = case.softcap * math.tanh(s / case.softcap) if case.softcap else s
                if case.alibi:
                    s -= float(np.broadcast_to(options["alibi"], (len(values), case.heads))[b, h]) * abs(at - j)
                scores[j] = s
            sink = float(options["sinks"][h]) if case.sinks else -math.inf
            top = max([sink, *scores.values()])
            if top == -math.inf:
                continue
            total = math.exp(sink - top) + sum(math.exp(s - top) for s in scores.values())
            lse[i, h] = top + math.log(total)
            for j, s in scores.items():
                out[i, h] += math.exp(s - top) / total * v[j, h * case.heads_kv // case.heads]
        results.append((out, lse))
    return results


def spread(case, results, arguments):
    """The results of single sequences where the call's storage has them; 0 and -inf elsewhere."""
    q = arguments["q"]
    out = np.zeros((*q.shape[:-1], case.head_dim_v))
    shape = (case.heads, len(q)) if q.ndim == 3 else (len(q), case.heads, q.shape[1 if case.layout == "bshd" else 2])
    lse = np.full(shape, -np.inf)
    for b, (some_out, some_lse) in enumerate(results):
        n = len(some_out)
        if q.ndim == 3:
            first = b if case.storage.q == "one" else int(arguments["cu_seqlens_q"][b])
            out[first : first + n], lse[:, first : first + n] = some_out, some_lse.T
        elif case.layout == "bshd":
            out[b, :n], lse[b, :, :n] = some_out, some_lse.T
        else:
            out[b, :, :n], lse[b, :, :n] = some_out.swapaxes(0, 1), some_lse.T
    return out, lse


def small(case):
    return sum(a * b for a, b in zip(case.n_q, case.n_k)) * case.heads < 12_000 and len(case.n_q) < 40


CASES = [c for c in (*grid()[::2], *lengths(), *random_cases(60)) if small(c)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_loop(case):
    values, arguments = stored.values_of(case), case.host_inputs()
    out, lse = serving.attention(**arguments)
    want_out, want_lse = spread(case, naive(case, values), arguments)
    np.testing.assert_allclose(out, want_out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-10, atol=1e-12)
    plain, _ = serving.plain(**arguments)
    assert np.abs(plain - want_out).max(initial=0) < 0.1


def test_dense_calls_are_the_dense_reference():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 4, 5, 8)), rng.standard_normal((2, 2, 7, 8)), rng.standard_normal((2, 2, 7, 3))
    bias, mask = rng.standard_normal((4, 5, 7)), rng.random((2, 1, 5, 7)) < 0.6
    options = {"bias": bias, "mask": mask, "causal": "bottom_right", "window": (4, None), "sinks": rng.standard_normal(4)}
    got = serving.attention(q, k, v, seqlens_k=np.array([7, 7]), **options)
    for x, want in zip(got, reference.attention(q, k, v, **options)):
        np.testing.assert_allclose(x, want, rtol=1e-12, atol=1e-14)


def resolve(**arguments):
    return serving.resolve(**({"rows_q": 10, "rows_k": 10} | {
        name: np.array(x) if isinstance(x, list) else x for name, x in arguments.items()}))  # fmt: skip


def test_lengths_outside_are_clamped():
    sequences, faults = resolve(batch=4, seqlens_q=[-1, 0, 10, 11], seqlens_k=[10, -(2**31), 2**31 - 1, 3])
    assert [s.seq_q for s in sequences] == [0, 0, 10, 10] and [s.seq_k for s in sequences] == [10, 0, 10, 3]
    assert faults == [Fault("length", 0, 0, -1), Fault("length", 1, 1, -(2**31)), Fault("length", 2, 1, 2**31 - 1),
                      Fault("length", 3, 0, 11)]  # fmt: skip


def test_falling_starts_are_their_running_maximum():
    sequences, faults = resolve(batch=5, cu_seqlens_q=[-3, 4, 2, 6, 99, 7], seqlens_k=[5] * 5)
    assert [(s.first_q, s.seq_q) for s in sequences] == [(0, 4), (4, 0), (4, 2), (6, 4), (10, 0)]
    assert faults == [Fault("cu_seqlens", n, 0, x) for n, x in ((0, -3), (2, 2), (4, 99), (5, 7))]


def test_a_bad_page_hides_its_keys_and_counts_if_seen():
    table = np.array([[1, 5, -1, 0, 9]])
    common = {"batch": 1, "page_table": table, "page_size": 2, "pages": 2, "seqlens_q": [1], "causal": "bottom_right"}
    sequences, faults = resolve(**common, seqlens_k=[8])
    assert faults == [Fault("page", 0, 1, 5), Fault("page", 0, 2, -1)] and list(sequences[0].pages) == [0, 1, 2, 3]
    assert resolve(**common, seqlens_k=[2])[1] == []  # past n_k
    assert resolve(**common, seqlens_k=[8], window=(1, None))[1] == []  # before the window
    assert resolve(**common, seqlens_k=[8], k_range=([6], None))[1] == []
    assert resolve(**common, seqlens_k=[8], positions=[1] * 10)[1] == []

    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 2, 4)), rng.standard_normal((2, 2, 1, 4))
    out, lse = serving.attention(q, k, k, page_table=table, seqlens_k=np.array([8]), layout="bshd")
    left = np.concatenate([k[1], k[0]])[None]
    want = reference.attention(q[None], left, left, layout="bshd")
    np.testing.assert_allclose(out, want[0][0], rtol=1e-12)
    np.testing.assert_allclose(lse, want[1][0], rtol=1e-12)


@pytest.mark.parametrize("k", K_STORAGE)
def test_nothing_elsewhere_reaches_a_sequence(k):
    """All that is no sequence's is NaN already; here one sequence is too."""
    case = Case.sequences(k=k)
    values = stored.values_of(case)
    clean = serving.attention(**case.host_inputs(values))
    for x in values[1]:
        x[:] = np.nan
    out, _ = serving.attention(**case.host_inputs(values))
    rows = slice(*case.host_inputs()["cu_seqlens_q"][1:3])
    assert np.isnan(out[rows]).all()
    kept = np.ones(len(out), bool)
    kept[rows] = False
    assert (out[kept] == clean[0][kept]).all()


# ---- append ----


def test_rotate_by_hand():
    angle = np.array([[0.0, 0.0], [0.3, 1.1]])
    rotary = np.cos(angle), np.sin(angle)
    x = np.arange(1.0, 7.0)  # R is 4, D is 6
    value, size = serving.rotate(x, rotary, 1)
    pairs = [(0, 2), (1, 3)]
    for interleaved in (False, True):
        value, size = serving.rotate(x, rotary, 1, interleaved)
        for n, (a, b) in enumerate([(0, 1), (2, 3)] if interleaved else pairs):
            turned = complex(x[a], x[b]) * np.exp(1j * angle[1, n])
            assert np.isclose(value[a], turned.real) and np.isclose(value[b], turned.imag)
            assert size[a] >= abs(value[a]) and size[b] >= abs(value[b])
        assert (value[4:] == x[4:]).all() and (size[4:] == 0).all()


def test_appended_keys_are_where_attention_looks():
    """append, then attention over (q, caches) of the same arrays, is attention over the sequences with the new keys."""
    case = Case.sequences(n_q=(1, 3, 0, 4), n_k=(6, 33, 4, 4), causal="bottom_right", dtype="float64")
    arguments, values = case.host_inputs(), stored.values_of(case)
    new_k, new_v = (np.full((len(arguments["q"]), 2, 32), np.nan) for _ in "kv")
    k, v = arguments["k"], arguments["v"]
    table, starts, lengths_k = (arguments[n] for n in ("page_table", "cu_seqlens_q", "seqlens_k"))
    for b, (q, some_k, some_v) in enumerate(values):
        for t in range(len(q)):
            j = case.n_k[b] - len(q) + t
            new_k[starts[b] + t], new_v[starts[b] + t] = some_k[j], some_v[j]
            k[table[b, j // 16], j % 16] = v[table[b, j // 16], j % 16] = np.nan
    got_k, got_v, _, written, faults = serving.append(
        k, v, new_k, new_v, layout="bshd", page_table=table, cu_seqlens_q=starts, seqlens_k=lengths_k)  # fmt: skip
    assert not faults and written.sum() == 8
    result = serving.attention(**(arguments | {"k": got_k, "v": got_v}))
    for x, want in zip(result, serving.attention(**case.host_inputs())):
        assert (x == want).all()


def test_append_skips_what_has_no_place():
    cache = np.zeros((3, 2, 1, 2))
    k = np.arange(1.0, 13).reshape(6, 1, 2)
    _, _, _, written, faults = serving.append(cache, cache, k, k, layout="bshd", slots=np.array([-1, 0, 6, 5, -9]))
    assert faults == [Fault("slot", -1, 2, 6)] and written.tolist() == [[True, False], [False, False], [False, True]]

    table, rotary = np.array([[2, -1], [0, 7]]), (np.ones((1, 1)), np.zeros((1, 1)))
    got, _, q, written, faults = serving.append(
        cache, None, k, None, layout="bshd", page_table=table, cu_seqlens_q=np.array([0, 4, 6]), seqlens_k=np.array([3, 5]),
        q=k, rotary=rotary)  # fmt: skip
    assert faults == [Fault("length", 0, 1, -1), Fault("position", 0, 2, 1), Fault("page", 0, 1, -1), Fault("page", 1, 1, 7),
                      Fault("length", 1, 1, 4)]  # fmt: skip
    assert written.tolist() == [[False, False], [False, False], [True, False]]
    assert (got[2, 0] == k[1]).all() and (q[1] == k[1]).all() and not q[[0, 2, 3, 4, 5]].any()
