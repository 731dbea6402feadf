"""``append``: new keys and values into caches, held against float64 with all other bytes as they were, and what it refuses."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.lengths import CACHES
from bench.problems.placement import BFLOAT16, dtype_of, place
from bench.problems.serving_cases import angles, append_call
from bench.problems.stored import INT_MAX, INT_MIN
from fa_ext.reference.serving import rotate
from tests.contract import runner
from tests.contract.runner import library_of as library
from tests.contract.runner import on

KERNELS = fa_ext.kernels("append")
DTYPES = ("float32", "float16", "bfloat16", "float64")


@pytest.fixture(params=KERNELS)
def kernel(request):
    if runner.device_of(request.param) == "cuda" and runner.no_device():
        pytest.skip(runner.no_device())
    return request.param


def judged(kernel, call, **options):
    report = fa_ext.verify_append(**on(kernel, call), kernel=kernel, **options)
    assert report, report
    return report


# ---- what it writes ----


@pytest.mark.parametrize(("cache", "layout"), [*itertools.product(CACHES, ("bshd", "bhsd"))])
@pytest.mark.parametrize("q", ["packed", "padded", "one"])
def test_pages_of_any_strides(cache, layout, q, kernel):
    n_q = (1, 1, 1, 1) if q == "one" else (1, 3, 0, 7)
    for seed, size in enumerate((1, 3, 16)):
        case = Case.sequences(n_q, (5, 33, 4, 7), q=q, cache=cache, layout=layout, page_size=size, dtype=DTYPES[seed])
        if case.dtype == "bfloat16" and BFLOAT16 is None:
            continue
        judged(kernel, append_call(case, seed=seed))
        judged(kernel, append_call(case, seed=seed, rotary=8, q=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dense_caches(layout, kernel):
    case = Case.sequences((1, 3, 0, 7), (5, 33, 4, 7), k="padded", layout=layout)
    judged(kernel, append_call(case, dense=True))
    judged(kernel, append_call(case, dense=True, rotary=16, q=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(dtype, interleaved, kernel):
    if dtype == "bfloat16" and BFLOAT16 is None:
        pytest.skip("bfloat16 needs ml_dtypes")
    if dtype == "float64" and not runner.has_float64(kernel):
        pytest.skip("float64 runs on the CPU")
    for half, positions, d in ((1, False, 5), (3, True, 7), (16, True, 32), (20, False, 64)):
        case = Case.sequences(head_dim=d, head_dim_v=d + 3, dtype=dtype)
        judged(kernel, append_call(case, rotary=half, q=True, positions=positions, interleaved=interleaved))
        judged(kernel, append_call(case, rotary=half, q=False, values=False, interleaved=interleaved))
        own = append_call(case, rotary=half, q=True, interleaved=interleaved)
        own["rotary"] = tuple(x.astype(dtype_of(dtype)) for x in own["rotary"])
        judged(kernel, own)
        own = append_call(case, rotary=half, q=True, interleaved=interleaved)
        judged(kernel, own, out=own["q"]) if library(kernel) == "numpy" else None


@pytest.mark.parametrize("position", [0, 1, 40959, 131071])
def test_far_positions_are_as_exact_as_near_ones(position, kernel):
    case = Case.sequences((1,), (9,), 1, 1, 64, q="one")
    call = append_call(case, rotary=32, q=True)
    cos, sin = angles(131072, 32)
    call |= {"rotary": (cos, sin), "positions": np.array([position], np.int32)}
    judged(kernel, call)
    want, _ = rotate(call["q"][0], (cos, sin), position)
    got = runner.to_host(fa_ext.append(**on(kernel, call), kernel=kernel))
    np.testing.assert_allclose(got[0], want, atol=1e-6)


@pytest.mark.sanitize
def test_slots(kernel):
    case = Case.sequences(page_size=4, slack=6)
    for dtype in (np.int32, np.int64):
        call = append_call(case, rotary=4, q=True, positions=True)
        pages, size = call["k_cache"].shape[:2]
        rng = np.random.default_rng(0)
        slots = rng.permutation(pages * size)[: len(call["k"]) - 2].astype(dtype)
        slots[::4] = -1 - np.arange(len(slots[::4]))
        for name in ("page_table", "seqlens_k", "cu_seqlens_q"):
            del call[name]
        judged(kernel, call | {"slots": slots})
        plain = {name: x for name, x in call.items() if name not in ("rotary", "interleaved", "positions", "q")}
        assert fa_ext.append(**on(kernel, plain | {"slots": slots}), kernel=kernel) is None
        judged(kernel, plain | {"slots": slots[:0]})
        judged(kernel, plain | {"slots": np.full(len(slots), 5, dtype)})  # one of them, whole


def test_nothing_to_append(kernel):
    for case in (Case.sequences((0, 0), (3, 4)), Case.sequences((), ()), Case.sequences((0, 2, 0), (0, 2, 9), slack=0)):
        judged(kernel, append_call(case))
        judged(kernel, append_call(case, rotary=4, q=True))


def test_values_that_are_not_finite(kernel):
    case = Case.sequences((4,), (9,), dtype="float16")
    call = append_call(case, rotary=8, q=True)
    call["k"][1:3], call["k"][3:4], call["v"][2:4], call["q"][2:3] = np.nan, np.inf, -np.inf, 60000
    judged(kernel, call)


def test_append_then_attend_is_attention_with_the_new_keys(kernel):
    """A cache that grows by chunks and single tokens, against attention over all keys at once."""
    heads, kv, d, size, steps = 4, 2, 32, 3, (5, 1, 1, 4, 1)
    rng = np.random.default_rng(0)
    total = sum(steps)
    q, k, v = (rng.standard_normal((total, h, d)).astype(np.float32) for h in (heads, kv, kv))
    pages = -(-total // size)
    k_cache, v_cache = (place(np.full((pages + 3, size, kv, d), np.nan, np.float32), library(kernel)) for _ in "kv")
    table = place(rng.permutation(pages + 3)[None, :pages].astype(np.int32), library(kernel))
    got, done = [], 0
    for count in steps:
        new = [place(np.ascontiguousarray(x[done : done + count]), library(kernel)) for x in (q, k, v)]
        done += count
        common = {"layout": "bshd", "page_table": table, "seqlens_k": place(np.array([done], np.int32), library(kernel)),
                  "cu_seqlens_q": place(np.array([0, count], np.int32), library(kernel))}  # fmt: skip
        fa_ext.append(k_cache, v_cache, new[1], new[2], **common, kernel=kernel)
        got.append(runner.to_host(fa_ext.attention(new[0], k_cache, v_cache, causal="bottom_right", **common)))
    want, _ = fa_ext.reference.attention(q[None], k[None], v[None], causal=True, layout="bshd")
    np.testing.assert_allclose(np.concatenate(got), want[0], atol=2e-6)


# ---- bad contents ----


@pytest.mark.sanitize
def test_what_has_no_place_is_counted_and_not_written(kernel):
    device = None if library(kernel) == "numpy" else 0
    case = Case.sequences((2, 3, 1, 4), (20, 40, 9, 17), slack=1)

    def changed(**change):
        call = append_call(case, rotary=4, q=True, positions=True)
        for name, (at, value) in change.items():
            call[name][at] = value
        return call

    slotted = {n: x for n, x in append_call(case).items() if n not in ("page_table", "seqlens_k", "cu_seqlens_q")}
    rooms = slotted["k_cache"].shape[0] * case.storage.page_size
    bad = [
        (changed(seqlens_k=(0, 1)), [("length", 1, 0, 1, -1)]),
        (changed(seqlens_k=(1, INT_MAX)), [("length", 3, 1, 1, INT_MAX - 3)]),
        (changed(seqlens_k=(2, INT_MIN)), [("length", 1, 2, 1, INT_MIN - 1)]),
        (changed(cu_seqlens_q=(1, -5)), [("cu_seqlens", 1, 1, 0, -5)]),
        (changed(page_table=((1, 2), -1)), [("page", 1, 1, 2, -1)]),
        (changed(page_table=((3, 0), INT_MAX), positions=(0, 0)), [("page", 1, 3, 0, INT_MAX)]),
        (changed(positions=(1, 2048)), [("position", 1, 0, 1, 2048)]),
        (changed(positions=(3, -1)), [("position", 1, 1, 3, -1)]),
        (slotted | {"slots": np.array([3, rooms, -2, INT_MAX], np.int64)}, [("slot", 2, -1, 1, rooms)]),
        (slotted | {"slots": np.array([2**62, 2], np.int64)}, [("slot", 1, -1, 0, 2**62)]),
    ]
    for n, (call, faults) in enumerate(bad):
        before = call["k_cache"].copy()
        with pytest.raises(ValueError, match="such in all"):
            fa_ext.append(**on(kernel, call), check=True, kernel=kernel)
        assert before.tobytes() == call["k_cache"].copy().tobytes()
        fa_ext.faults(device)
        judged(kernel, call, check=False)
        met = fa_ext.faults(device)
        if n == 3:  # the tokens before now belong to the next sequence
            met = [x for x in met if x[0] == "cu_seqlens"]
        if runner.device_of(kernel) == "cuda":  # any of several may be the first there
            met, faults = ([x[:3] for x in found] for found in (met, faults))
        assert met == faults, n


@pytest.mark.parametrize("seed", range(3))
def test_any_contents_at_all(seed, kernel):
    rng = np.random.default_rng(seed)
    for n in range(40):
        case = Case.sequences(tuple(rng.integers(0, 6, 4)), tuple(rng.integers(6, 40, 4)), page_size=int(rng.integers(1, 9)))
        call = append_call(case, rotary=4, q=True, positions=bool(n % 2))
        for name in ("page_table", "seqlens_k", "cu_seqlens_q", "positions"):
            if name in call:
                x = call[name]
                noise = rng.choice([-1, 0, 1, 5, 30, INT_MIN, INT_MAX, 2**30], x.shape)
                call[name] = np.where(rng.random(x.shape) < 0.3, noise, x).astype(np.int32)
        if not runner.has_float64(kernel):  # sequences with one page mix their tokens there
            flat = call["page_table"].reshape(-1)
            flat[np.setdiff1d(np.arange(flat.size), np.unique(flat, return_index=True)[1])] = -1
        judged(kernel, call, check=False)
    fa_ext.faults(None)


# ---- what it refuses ----


def refused(error, match, call, **change):
    given = {name: x for name, x in (call | change).items() if x is not ...}
    before = call["k_cache"].copy()
    with pytest.raises(error, match=match):
        fa_ext.append(**given)
    assert before.tobytes() == call["k_cache"].copy().tobytes()
    with pytest.raises(error, match=match):
        fa_ext.explain_append(**given)


def test_what_it_refuses():
    case = Case.sequences()
    call, rotary = append_call(case), angles(64, 8)
    turned = append_call(case, rotary=8, q=True)
    slots = np.zeros(3, np.int32)
    for layout in (..., None):
        refused(ValueError, 'layout must be said: "bshd".*"bhsd"', call, layout=layout)
    refused(ValueError, "v_cache is None, but v is not", call, v_cache=None)
    refused(ValueError, "v is None, but v_cache is not", call, v=None)
    refused(ValueError, "seqlens_k and slots are both absent", call, seqlens_k=...)
    refused(ValueError, "seqlens_k and slots are both given", call, slots=slots)
    for name in ("page_table", "cu_seqlens_q"):
        others = {n: ... for n in ("page_table", "cu_seqlens_q", "seqlens_k") if n != name}
        refused(ValueError, f"{name} is given, but slots say", call, slots=slots, **others)
    bare = {n: x for n, x in call.items() if n not in ("page_table", "cu_seqlens_q", "seqlens_k")}
    refused(ValueError, "rotary with slots needs positions", bare, slots=slots, rotary=rotary)
    refused(TypeError, "slots has dtype uint8; accepted: int32, int64", bare, slots=slots.astype("u1"))
    refused(ValueError, "slots has shape .*at most one for each", bare, slots=np.zeros(99, np.int32))
    refused(ValueError, "q is given, but rotary is not", turned, rotary=..., interleaved=...)
    refused(ValueError, "positions is given, but rotary is not", call, positions=np.zeros(len(call["k"]), np.int32))
    refused(ValueError, "interleaved is given, but rotary is not", call, interleaved=True)
    refused(ValueError, "out is given, but q", call, out=call["k"].copy())
    refused(TypeError, "k has dtype float16, but k_cache has float32", call, k=call["k"].astype("f2"))
    refused(TypeError, "k_cache has dtype int32; accepted: float16", call, k_cache=np.zeros(call["k_cache"].shape, "i4"))
    refused(TypeError, "seqlens_k has dtype int64; accepted: int32", call, seqlens_k=call["seqlens_k"].astype("i8"))
    refused(ValueError, "k has shape .*heads_kv and head_dim must be the same", call, k=call["k"][:, :1])
    refused(ValueError, "v has shape .*all but head_dim must be the same", call, v=call["v"][1:])
    refused(ValueError, "v_cache has shape .*pages, heads_kv and page_size", call, v_cache=call["v_cache"][1:])
    refused(ValueError, "q has shape .*all but the heads", turned, q=turned["q"][1:])
    refused(ValueError, "unless it holds one token a sequence", call, cu_seqlens_q=...)
    refused(ValueError, "pages need page_table", call, page_table=...)
    refused(ValueError, "page_table has shape", call, page_table=call["page_table"][1:])
    refused(ValueError, "rotary has 3 items", call, rotary=(*rotary, rotary[0]))
    refused(TypeError, "rotary has type ndarray", call, rotary=rotary[0])
    refused(ValueError, "rotary's cos has shape .*n from 1 to head_dim / 2 = 16", call, rotary=angles(8, 17))
    refused(ValueError, "rotary's sin has shape", call, rotary=(rotary[0], rotary[1][1:]))
    refused(TypeError, "rotary's cos has dtype float16", call, rotary=tuple(x.astype("f2") for x in rotary))
    refused(ValueError, "out has shape", turned, out=turned["q"][1:].copy())
    refused(ValueError, "out overlaps q in memory", turned, q=turned["q"][:, ::-1], out=turned["q"])
    fixed = call["k_cache"].copy()
    fixed.flags.writeable = False
    refused(ValueError, "k_cache is read-only", call, k_cache=fixed)
    one_page = np.lib.stride_tricks.as_strided(call["k_cache"], call["k_cache"].shape, (0, *call["k_cache"].strides[1:]))
    refused(ValueError, "k_cache has strides .*distinct", call, k_cache=one_page)
    size = call["k"].size
    inside = call["k_cache"].reshape(-1)[:size].reshape(call["k"].shape)
    refused(ValueError, "k_cache overlaps k in memory", call, k=inside)


def test_names_of_kernels():
    assert fa_ext.kernels("append") == fa_ext.kernels(operation="append") and "cpu_append" in KERNELS
    call = append_call(Case.sequences())
    assert fa_ext.explain_append(**call)[0] == "cpu_append"
    with pytest.raises(ValueError, match="cpu_append"):
        fa_ext.append(**call, kernel="cpu_ref")
    with pytest.raises(ValueError, match="cpu_ref"):
        fa_ext.attention(**Case.sequences().host_inputs(), kernel="cpu_append")
