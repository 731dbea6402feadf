"""csrc/geometry.h against the float64 reference's own resolution: every entry, every visible range, in C and in C++."""

import ctypes
import math
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fa_ext.reference import serving

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FAR = 1 << 60  # FA_UNBOUNDED

SOURCE = """
#include "geometry.h"
#ifdef __cplusplus
extern "C"
#endif
/* Of each entry: seq_q, seq_k, first_q, first_k, key_begin, key_end, seen begin, seen end; of each query: the keys it sees;
 * of all queries of an entry: the keys that every one sees. */
void resolve(const fa_sequences *s, int64_t batch, int64_t left, int64_t right, int64_t *entries, int64_t *rows,
             int64_t *common, int64_t *pages) {
    int64_t before_q = 0, before_k = 0;
    for (int64_t b = 0; b < batch; b++) {
        const fa_span q = fa_rows_of(&s->q, b, before_q, s->packed_q), k = fa_rows_of(&s->k, b, before_k, s->packed_k);
        before_q = q.end, before_k = k.end;
        const fa_entry e = fa_entry_of(s, b, q, k);
        const fa_span seen = fa_entry_keys(&e, left, right);
        const int64_t found[8] = {e.seq_q, e.seq_k, e.first_q, e.first_k, e.key_begin, e.key_end, seen.begin, seen.end};
        for (int n = 0; n < 8; n++) *entries++ = found[n];
        int64_t low = e.seq_q ? fa_position(&e, 0) : 0, high = low;
        for (int64_t i = 0; i < e.seq_q; i++) {
            const int64_t at = fa_position(&e, i);
            const fa_span row = fa_row_keys(&e, left, right, at);
            *rows++ = row.begin, *rows++ = row.end;
            if (at < low) low = at;
            if (at > high) high = at;
        }
        const fa_span all = fa_common_keys(&e, left, right, low, high);
        *common++ = all.begin, *common++ = all.end;
        for (int64_t n = 0; s->pages.table && n < s->pages.width; n++) *pages++ = fa_page(&s->pages, b, n);
    }
}
"""


class Lengths(ctypes.Structure):
    _fields_ = [("starts", ctypes.c_void_p), ("used", ctypes.c_void_p), ("rows", ctypes.c_int64)]


class Pages(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("stride", "width", "count", "size"))]


class Sequences(ctypes.Structure):
    _fields_ = [("q", Lengths), ("k", Lengths), ("pages", Pages), ("begin", ctypes.c_void_p), ("end", ctypes.c_void_p),
                ("positions", ctypes.c_void_p), ("positions_stride", ctypes.c_int64), ("most_q", ctypes.c_int64),
                *((n, ctypes.c_bool) for n in ("given", "packed_q", "packed_k", "top_left"))]  # fmt: skip


@pytest.fixture(scope="module", params=["c", "c++"])
def resolve(request, tmp_path_factory):
    compiler = shutil.which("cc" if request.param == "c" else "c++")
    if not compiler:
        pytest.skip(f"no compiler of {request.param}")
    folder = tmp_path_factory.mktemp("geometry")
    source, library = folder / f"resolve.{request.param}", folder / "resolve.so"
    source.write_text(SOURCE)
    standard = "c11" if request.param == "c" else "c++20"
    subprocess.run([compiler, f"-std={standard}", "-x", request.param, "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared",
                    f"-I{CSRC}", source, "-o", library], check=True)  # fmt: skip
    return ctypes.CDLL(str(library)).resolve


def wild(rng, count, low, high):
    """Lengths, some of them nonsense."""
    return np.array([rng.choice((-1, -(2**31), 2**31 - 1, high + 1)) if rng.random() < 0.15 else rng.randint(low, high)
                     for _ in range(count)], np.int32)  # fmt: skip


def problem(seed):
    """(arguments of the reference's resolve, fields of Sequences)"""
    rng = random.Random(seed)
    batch, rows_q, rows_k = rng.randint(0, 7), rng.randint(0, 20), rng.randint(0, 30)
    causal = rng.choice((False, "bottom_right", "top_left"))
    window = rng.choice((None, (rng.randint(0, 9), None), (None, rng.randint(0, 9)), (rng.randint(0, 5), rng.randint(0, 5))))
    storage_q, storage_k = rng.choice(("padded", "packed", "one")), rng.choice(("padded", "packed", "paged"))
    rows_q = batch if storage_q == "one" else rows_q
    given = {"causal": causal, "window": window, "one_each": storage_q == "one"}
    size, pages = rng.randint(1, 5), rng.randint(0, 6)

    def starts(rows):
        steady = np.sort([rng.randint(0, rows) for _ in range(batch + 1)]).astype(np.int32)
        return steady if rng.random() < 0.6 else wild(rng, batch + 1, 0, rows)

    if storage_q == "packed":
        given["cu_seqlens_q"] = starts(rows_q)
        if rng.random() < 0.3:
            given["max_seqlen_q"] = rng.randint(0, rows_q + 1)
    if storage_k == "packed":
        given["cu_seqlens_k"] = starts(rows_k)
    if storage_k == "paged":
        width = rng.randint(0, 6)
        rows_k = width * size
        table = np.array([[rng.choice((-1, 2**31 - 1, -(2**31), *range(pages))) for _ in range(width)] for _ in range(batch)], np.int32)
        given |= {"page_table": table.reshape(batch, width), "page_size": size, "pages": pages}
    if rng.random() < 0.5:
        given["seqlens_q"] = wild(rng, batch, 0, max(rows_q, 1))
    if storage_k == "paged" or rng.random() < 0.5:
        given["seqlens_k"] = wild(rng, batch, 0, max(rows_k, 1))
    if rng.random() < 0.4:
        ranges = wild(rng, batch, -3, 30), wild(rng, batch, -3, 40)
        given["k_range"] = rng.choice((ranges, (ranges[0], None), (None, ranges[1])))
    if causal != "top_left" and rng.random() < 0.4:
        shape = (batch, rows_q) if storage_q == "padded" else (rows_q,)
        values = [rng.choice((-(2**31), 2**31 - 1, *range(-5, 40))) for _ in range(math.prod(shape))]
        given["positions"] = np.array(values, np.int32).reshape(shape)
    return {"batch": batch, "rows_q": rows_q, "rows_k": rows_k, **given}


def sequences_of(given):
    def at(x):
        return None if x is None else x.ctypes.data

    get = given.get
    begin, end = get("k_range", (None, None))
    table, positions = get("page_table"), get("positions")
    pages = Pages() if table is None else Pages(at(table), table.shape[1], table.shape[1], given["pages"], given["page_size"])
    return Sequences(
        Lengths(at(get("cu_seqlens_q")), at(get("seqlens_q")), given["rows_q"]),
        Lengths(at(get("cu_seqlens_k")), at(get("seqlens_k")), given["rows_k"]), pages, at(begin), at(end), at(positions),
        given["rows_q"] if positions is not None and positions.ndim == 2 else 0, get("max_seqlen_q", FAR), True,
        given["one_each"] or "cu_seqlens_q" in given, "cu_seqlens_k" in given, given["causal"] == "top_left",
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_entries_and_ranges_are_the_references(resolve, seed):
    for n in range(60):
        given = problem(seed * 1000 + n)
        batch, table = given["batch"], given.get("page_table")
        want, _ = serving.resolve(**given)
        left, right = (FAR if x is None else x for x in given["window"] or (None, None))
        right = min(right, 0) if given["causal"] else right
        queries = sum(s.seq_q for s in want)
        entries, rows, common = (np.full(shape, 77, np.int64) for shape in ((batch, 8), (queries, 2), (batch, 2)))
        pages = np.full((batch, 0 if table is None else table.shape[1]), 77, np.int64)
        arguments = (ctypes.byref(sequences_of(given)), *map(ctypes.c_int64, (batch, left, right)))
        resolve(*arguments, *(ctypes.c_void_p(x.ctypes.data) for x in (entries, rows, common, pages)))
        row = 0
        for b, s in enumerate(want):
            first_q = s.first_q
            assert entries[b, :4].tolist() == [s.seq_q, s.seq_k, first_q, s.first_k], given
            held = np.arange(s.key_begin, s.key_end)
            assert held.tolist() == list(range(*entries[b, 4:6])) and entries[b, 6:].tolist() == [s.seen_begin, s.seen_end]
            seen_by_all = set(held.tolist())
            for position in s.positions.tolist():
                keys = [j for j in held.tolist() if -left <= j - position <= right]
                assert keys == list(range(*rows[row])), given
                seen_by_all &= set(keys)
                row += 1
            if s.seq_q:
                assert seen_by_all == set(range(*common[b]))
        if table is not None:
            assert (pages == np.where((table >= 0) & (table < given["pages"]), table, -1)).all()
