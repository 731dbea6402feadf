"""Sequences of any length in padded, packed and paged storage, on every kernel that takes them: against float64, bit for bit
between storages and batches, with garbage wherever nobody may look, and with bad contents of the index arrays."""

import contextlib
import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems import magnitudes, serving_cases, stored
from bench.problems.case import Case
from bench.problems.lengths import CACHES, K_STORAGE, Q_STORAGE
from bench.problems.placement import BFLOAT16, Unplaceable, place
from bench.problems.stored import INT_MAX, INT_MIN
from fa_ext import reference
from fa_ext.reference import serving
from tests.contract import lse_views, runner
from tests.contract.runner import library_of as library
from tests.contract.runner import on
from tests.contract.serving_calls import adapted, attend, exact_verdict, parts_of, same_bits, verify

SLOWEST = {"cpu_ref": 3e6}  # multiplications of a case that it is held to
PLAIN = Case.sequences()


SIMPLE = Case.sequences(dtype="float16", head_dim=64, head_dim_v=64).host_inputs()
KERNELS = [kernel for kernel in fa_ext.kernels() if runner.takes(kernel, **SIMPLE)]


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def skip_slow(case, kernel):
    if case.dtype == "bfloat16" and BFLOAT16 is None:
        pytest.skip("bfloat16 needs ml_dtypes")
    if case.dtype == "float64" and not runner.has_float64(kernel):
        pytest.skip("float64 runs on the CPU")
    work = sum(a * b for a, b in zip(case.n_q, case.n_k)) * case.heads * case.head_dim
    if work > SLOWEST.get(kernel, 1e12):
        pytest.skip("slow here; smaller cases hold it")


# ---- what is computed ----


@pytest.mark.parametrize("case", [*serving_cases.grid(), *serving_cases.lengths()], ids=serving_cases.short)
def test_against_float64(case, kernel):
    case = adapted(kernel, case)
    skip_slow(case, kernel)
    report = verify(kernel, case.host_inputs())
    assert report, report


@pytest.mark.parametrize("seed", range(8))
def test_random_sequences(seed, kernel):
    for case in serving_cases.random_cases(25, seed + 100):
        if case.dtype == "float64" and not runner.has_float64(kernel):
            continue
        case = adapted(kernel, case)
        with contextlib.suppress(Unplaceable):
            report = verify(kernel, case.host_inputs())
            assert report, f"{case}\n{report}"


@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_scores_of_every_magnitude(kind, kernel):
    """In every storage; some sequences are long enough to be split."""
    wrong, judged = [], 0
    for case in serving_cases.magnitude(kind):
        case = case.changed(dtype=adapted(kernel, case).dtype)
        if not magnitudes.holds(*case.logits, case.head_dim, case.dtype, 1 / 16) or kernel == "cpu_ref" and max(case.n_k) > 999:
            continue
        with contextlib.suppress(Unplaceable):
            report = exact_verdict(kernel, case)
            judged += 1
            wrong += [] if report else [f"{case}: {'; '.join(report.failures)}"]
    assert not wrong, f"{len(wrong)} of {judged}\n" + "\n".join(wrong[:12])
    if not judged:
        pytest.skip("takes none of these calls")


@pytest.mark.parametrize("storage", ["padded", "paged"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_bias_and_mask_with_padded_queries(storage, layout, kernel):
    case = adapted(kernel, Case.sequences(q="padded", k=storage, layout=layout, causal="bottom_right"))
    arguments = case.host_inputs()
    q, k = arguments["q"], arguments["k"]
    axis = 1 if layout == "bshd" else 2
    keys = k.shape[axis] * (arguments["page_table"].shape[1] if storage == "paged" else 1)
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((len(case.n_q), 1, q.shape[axis], keys)).astype(np.float32)
    for extra in ({"bias": bias}, {"mask": bias > -0.5}, {"bias": bias, "mask": bias > -0.5}):
        report = verify(kernel, arguments | extra)
        assert report, report


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_out_is_not_rounded(dtype, kernel):
    case = Case.sequences(dtype=dtype, head_dim=64, head_dim_v=64)
    skip_slow(case, kernel)
    dense = {"q": np.stack([stored.values_of(case)[1][1]] * 2), "k": np.stack([stored.values_of(case)[1][1]] * 2), "v": np.stack([stored.values_of(case)[1][2]] * 2)}
    for arguments in (case.host_inputs(), dense | {"layout": "bshd"}):
        out = place(np.full((*arguments["q"].shape[:-1], 64), np.nan, np.float32), library(kernel))
        report = verify(kernel, arguments, out=out, return_lse=False)
        assert report, report
        wide = runner.to_host(out)
        narrow = runner.to_host(fa_ext.attention(**on(kernel, arguments), kernel=kernel))
        # Another instance may add up in another order, by which a value near the middle is rounded to the other side.
        ulp = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
        np.testing.assert_allclose(wide, narrow.astype(np.float32), rtol=0, atol=ulp * np.abs(wide).max())
        assert (wide != narrow.astype(np.float32)).any()


@pytest.mark.parametrize("kind", lse_views.KINDS)
@pytest.mark.parametrize("storage", Q_STORAGE)
def test_an_lse_has_any_strides(storage, kind, kernel):
    """(H, T) of packed queries too; rows of no sequence get -inf there, and what lies between the elements nothing."""
    n_q = (1, 1, 0, 1) if storage == "one" else (1, 7, 0, 17)
    cases = [Case.sequences(n_q, (5, 900, 4, 90), q=storage, causal="bottom_right", sinks=True),
             Case.sequences(tuple(10 * n for n in n_q) if storage != "one" else n_q, (50, 90, 4, 200), q=storage, k="packed", heads_kv=1)]  # fmt: skip
    for case in (adapted(kernel, case) for case in cases):
        try:
            lse_views.assert_written(kernel, on(kernel, case.host_inputs()), kind, library(kernel))
        except Unplaceable as error:
            pytest.skip(str(error))


# ---- bits ----


STORES = [c for c in itertools.product(Q_STORAGE, K_STORAGE) if c[0] != "one"]


def test_a_sequence_has_the_same_bits_in_every_storage(kernel):
    base = Case.sequences((1, 3, 0, 70, 17), (5, 133, 4, 97, 300), 4, 2, 64, dtype="float16", causal="bottom_right", seed=3)
    values, wanted = stored.values_of(base), None
    stores = [dict(q=q, k=k, layout=layout) for (q, k), layout in itertools.product(STORES, ("bshd", "bhsd"))]
    stores += [dict(page_size=size) for size in (1, 2, 3, 5, 7, 8, 24, 64, 100, 128, 256, 544)]
    stores += [dict(cache=cache, layout=layout) for cache, layout in itertools.product(CACHES, ("bshd", "bhsd"))]
    stores += [dict(slack=slack) for slack in (0, 1, 40)]
    for store in stores:
        case = base.changed(**store)
        arguments = case.host_inputs(values)
        parts = [x for pair in parts_of(case, arguments, *attend(kernel, arguments)) for x in pair]
        wanted = wanted or parts
        assert same_bits(parts, wanted), case


def test_a_sequence_has_the_same_bits_in_every_batch(kernel):
    rng = np.random.default_rng(5)
    base = Case.sequences((2, 9, 1, 40), (50, 9, 200, 333), 4, 1, 64, dtype="bfloat16" if BFLOAT16 else "float16", causal="bottom_right")
    values = stored.values_of(base)
    alone = []
    for b in range(4):
        case = base.changed(n_q=base.n_q[b : b + 1], n_k=base.n_k[b : b + 1])
        arguments = case.host_inputs(values[b : b + 1])
        alone.append(parts_of(case, arguments, *attend(kernel, arguments))[0])
    for _ in range(20):
        order = rng.integers(0, 4, rng.integers(1, 9))
        case = base.changed(n_q=tuple(base.n_q[b] for b in order), n_k=tuple(base.n_k[b] for b in order))
        arguments = case.host_inputs([values[b] for b in order])
        parts = parts_of(case, arguments, *attend(kernel, arguments))
        assert all(same_bits(parts[n], alone[b]) for n, b in enumerate(order))


def test_batch_invariant_is_accepted_and_changes_nothing(kernel):
    arguments = adapted(kernel, PLAIN).host_inputs()
    assert same_bits(attend(kernel, arguments), attend(kernel, arguments, batch_invariant=True))


def test_parts_of_the_keys_merge_to_the_whole(kernel):
    case = adapted(kernel, Case.sequences((1, 3, 2, 7), (90, 33, 64, 7), causal="bottom_right", alibi="heads", window=(40, None)))
    arguments = case.host_inputs()
    cut = np.array([50, 0, 64, 3], np.int32)
    halves = [attend(kernel, arguments | {"k_range": side}) for side in ((None, cut), (cut, None))]
    out, lse = reference.merge([x[0] for x in halves], [x[1] for x in halves])
    whole = attend(kernel, arguments)
    atol = 1e-5 if case.dtype == "float32" else 3e-3
    np.testing.assert_allclose(out, whole[0], atol=atol)
    np.testing.assert_allclose(lse, whole[1], atol=1e-5)


# ---- what nobody may look at ----


def test_garbage_around_the_sequences_changes_no_bit(kernel):
    case = adapted(kernel, Case.sequences((1, 3, 0, 7), (5, 33, 0, 20), causal="bottom_right", slack=5))
    clean = case.host_inputs()
    for name in ("k", "v"):
        clean[name] = np.nan_to_num(clean[name], nan=0.25)
    wanted = attend(kernel, clean)
    rng = np.random.default_rng(0)
    for fill in (np.nan, np.inf, -np.inf, 1e30 if case.dtype == "float32" else 6e4):
        arguments = case.host_inputs()
        for name in ("k", "v"):
            arguments[name][np.isnan(arguments[name])] = fill
        needed = -(-np.array(case.n_k) // case.storage.page_size)
        tail = np.arange(arguments["page_table"].shape[1])[None] >= needed[:, None]
        arguments["page_table"][tail] = rng.choice([INT_MIN, INT_MAX, -1, 0], tail.sum())
        assert same_bits(attend(kernel, arguments, check=True if library(kernel) == "numpy" else None), wanted)


def test_pages_before_the_window_and_outside_the_range_are_not_looked_up(kernel):
    case = adapted(kernel, Case.sequences((2, 1), (100, 90), page_size=8, causal="bottom_right", window=(20, 0), slack=0))
    wanted = attend(kernel, case.host_inputs())
    arguments = case.host_inputs()
    arguments["page_table"][0, : (100 - 2 - 20) // 8] = INT_MAX
    arguments["page_table"][1, : (90 - 1 - 20) // 8] = -1
    options = {"check": True} if library(kernel) == "numpy" else {}
    assert same_bits(attend(kernel, arguments, **options), wanted)
    begin, end = np.array([40, 24], np.int32), np.array([56, 60], np.int32)
    case = case.changed(window=None)
    wanted = attend(kernel, case.host_inputs() | {"k_range": (begin, end)})
    arguments = case.host_inputs() | {"k_range": (begin, end)}
    arguments["page_table"][0, :5], arguments["page_table"][0, 7:] = INT_MIN, 99999
    arguments["page_table"][1, :3], arguments["page_table"][1, 8:] = -7, 12345678
    assert same_bits(attend(kernel, arguments, **options), wanted)


def test_the_table_may_be_a_slice_of_a_wider_one(kernel):
    arguments = adapted(kernel, PLAIN).host_inputs()
    wanted = attend(kernel, arguments)
    wide = np.full((len(PLAIN.n_q), arguments["page_table"].shape[1] + 9), INT_MIN, np.int32)
    wide[:, 4 : 4 + arguments["page_table"].shape[1]] = arguments["page_table"]
    narrow = place(wide, library(kernel))[:, 4 : 4 + arguments["page_table"].shape[1]]
    got = fa_ext.attention(**on(kernel, arguments) | {"page_table": narrow}, return_lse=True, kernel=kernel)
    assert same_bits([runner.to_host(x) for x in got], wanted)


def test_nan_stays_in_its_sequence(kernel):
    case = adapted(kernel, Case.sequences((3, 4, 5), (30, 40, 50)))
    values = stored.values_of(case)
    wanted = parts_of(case, case.host_inputs(values), *attend(kernel, case.host_inputs(values)))
    values[1][1][:] = np.nan
    values[1][2][:] = np.inf
    got = parts_of(case, case.host_inputs(values), *attend(kernel, case.host_inputs(values)))
    assert np.isnan(got[1][0]).all() and same_bits(got[0], wanted[0]) and same_bits(got[2], wanted[2])


# ---- bad contents ----


def broken_ones():
    """(name, arguments' change, [(kind, count, sequence, index, value)])"""
    packed = Case.sequences((2, 3, 1, 4), (20, 40, 9, 17), k="packed", slack=0)

    def change(name, at, value):
        def apply(arguments):
            arguments[name] = arguments[name].copy()
            arguments[name][at] = value

        return apply

    yield "length below", PLAIN, change("seqlens_k", 1, -5), [("length", 1, 1, 1, -5)]
    yield "length above", PLAIN, change("seqlens_k", 0, INT_MAX), None
    yield "queries above", PLAIN.changed(q="padded"), change("seqlens_q", 3, 99), [("length", 1, 3, 0, 99)]
    yield "starts fall", packed, change("cu_seqlens_q", 2, 1), [("cu_seqlens", 1, 2, 0, 1)]
    yield "starts below 0", packed, change("cu_seqlens_q", 0, -1), [("cu_seqlens", 1, 0, 0, -1)]
    yield "starts of keys above", packed, change("cu_seqlens_k", 2, INT_MAX), None
    yield "page below", PLAIN, change("page_table", (1, 0), -1), [("page", 1, 1, 0, -1)]
    yield "page above", PLAIN, change("page_table", (1, 2), INT_MAX), [("page", 1, 1, 2, INT_MAX)]
    yield "all pages", PLAIN, change("page_table", slice(None), INT_MIN), None


BROKEN = list(broken_ones())


@pytest.mark.sanitize
@pytest.mark.parametrize(("name", "case", "change", "faults"), BROKEN, ids=[x[0] for x in BROKEN])
def test_bad_contents_are_counted_and_hide_what_they_reach(name, case, change, faults, kernel):
    case = adapted(kernel, case)
    arguments = case.host_inputs()
    wanted = parts_of(case, arguments, *attend(kernel, arguments))
    change(arguments)
    device = None if library(kernel) == "numpy" else 0
    q, v = arguments["q"], arguments["v"]
    out = place(np.full((*q.shape[:-1], v.shape[-1]), 7, q.dtype), library(kernel))
    with pytest.raises(ValueError, match="such in all"):
        fa_ext.attention(**on(kernel, arguments), out=out, check=True, kernel=kernel)
    assert (runner.to_host(out) == 7).all()
    fa_ext.faults(device)
    report = verify(kernel, arguments, check=False)
    assert report, report
    met = fa_ext.faults(device, clear=False)
    assert met == fa_ext.faults(device) and fa_ext.faults(device) == [] and len(met) >= 1
    if faults:
        assert met == faults
    if name in ("length below", "page below", "page above"):
        got = parts_of(case, arguments, *attend(kernel, arguments, check=False))
        assert all(same_bits(a, b) for n, (a, b) in enumerate(zip(got, wanted)) if n != 1)
    fa_ext.faults(device)


@pytest.mark.parametrize("seed", range(4))
def test_any_contents_at_all(seed, kernel):
    """Index arrays of noise: what the reference makes of them, and never a crash."""
    rng = np.random.default_rng(seed)
    for case in serving_cases.random_cases(40, seed + 50, longest=60):
        if case.dtype in ("float64", "bfloat16"):
            case = case.changed(dtype="float16")
        arguments = adapted(kernel, case).host_inputs()
        for name in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table"):
            if name in arguments:
                x = arguments[name]
                noise = rng.choice([-1, 0, 1, 5, 30, INT_MIN, INT_MAX, 2**30], x.shape).astype(np.int32)
                arguments[name] = np.where(rng.random(x.shape) < 0.3, noise, x).astype(np.int32)
        for name in "qkv":
            arguments[name] = np.nan_to_num(arguments[name], nan=0.5)
        with contextlib.suppress(Unplaceable):
            report = verify(kernel, arguments, check=False)
            assert report, f"{case}\n{report}"
    fa_ext.faults(None)


def test_faults_are_the_references(kernel):
    if runner.device_of(kernel) == "cuda":
        pytest.skip("a device may count a fault more than once")
    rng = np.random.default_rng(1)
    fa_ext.faults(None)
    for case in serving_cases.random_cases(60, 9, longest=60):
        if not case.n_q:
            continue
        case = adapted(kernel, case)
        arguments = case.host_inputs()
        for name in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table"):
            if name in arguments:
                x = arguments[name]
                arguments[name] = np.where(rng.random(x.shape) < 0.2, rng.choice([-3, 40, INT_MAX], x.shape), x).astype(np.int32)
        q, k = arguments["q"], arguments["k"]
        given = {n: arguments.get(n) for n in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "k_range", "positions", "causal", "window")}
        rows_of = lambda x: x.shape[0] if x.ndim == 3 else x.shape[1 if case.layout == "bshd" else 2]  # noqa: E731
        _, faults = serving.resolve(
            len(case.n_q), rows_of(q), rows_of(k), **given | {"causal": given["causal"] or False}, page_size=rows_of(k),
            pages=len(k), one_each=case.storage.q == "one",
        )  # fmt: skip
        if case.dtype == "float64" and not runner.has_float64(kernel):
            continue
        fa_ext.attention(**arguments, check=False, kernel=kernel)
        wanted = {}
        for fault in faults:
            count, first = wanted.get(fault.kind, (0, fault))
            wanted[fault.kind] = count + 1, first
        met = {kind: (count, where) for kind, count, *where in fa_ext.faults(None)}
        assert {kind: count for kind, (count, _) in met.items()} == {kind: count for kind, (count, _) in wanted.items()}, case
        for kind, (_, first) in wanted.items():
            if kind != "cu_seqlens":  # q's and k's are met in another order
                assert met[kind][1] == [first.sequence, first.index, first.value], case


def test_faults_arguments():
    with pytest.raises(TypeError, match="device has type str"):
        fa_ext.faults("cpu")
    with pytest.raises(TypeError, match="clear has type int"):
        fa_ext.faults(None, clear=1)
    assert fa_ext.faults(device=None) == []
