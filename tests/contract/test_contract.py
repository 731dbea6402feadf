"""The contract, clause by clause, for every kernel of the build on the devices that are here.

A kernel that rejects a case it must accept (``cases.must_accept``) fails; any other rejection skips with its reason.
A failure names a line that runs it again: ``python -m tests.contract CASE --kernel KERNEL --on LIBRARY``.
"""

import dataclasses
import itertools
import mmap
import threading

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable, place, strided
from fa_ext import reference
from tests.contract import runner
from tests.contract.shares import some_of


def judged(kernel, case, **extra):
    """The report of a case on a kernel; skips or fails when the kernel rejects it."""
    try:
        return runner.verdict(kernel, case, **extra)
    except Unplaceable as error:
        pytest.skip(str(error))
    except fa_ext.UnsupportedError as error:
        if cases.must_accept(runner.listed_name(kernel), case):
            pytest.fail(f"{kernel} must accept {case}, but: {error}")
        pytest.skip(str(error))


def repro(kernel, case):
    return f'python -m tests.contract "{case}" --kernel {kernel} --on {runner.library_for(kernel, case)}'


def taken(kernel, case):
    """Skips unless the kernel takes the case; returns its report, which must pass."""
    report = judged(kernel, case)
    assert report, f"{report}\n{repro(kernel, case)}"
    return report


# ---- clause 5, and through the grid all others ----


def _ids(case):
    return str(case)


def pytest_generate_tests(metafunc):
    # Cases outermost, so that all kernels of a case share one reference.
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", some_of(cases.contract(), 2), ids=_ids)


def test_case(forward, case):
    if runner.device_of(forward) == "cuda" and case.dtype == "float64":
        pytest.skip("float64 runs on the CPU alone")
    taken(forward, case)


def test_lists_of_must_accept_cases(forward):
    name = runner.listed_name(forward)
    assert sum(cases.must_accept(name, case) for case in cases.contract()) >= 20
    assert cases.must_accept(name, runner.SIMPLEST) or name.endswith("split_sm90")


def test_case_names_are_read_back():
    for case in (*cases.contract(), *cases.sanitize(), *cases.random_cases(5, 200)):
        assert Case.parse(str(case)) == case


def test_the_subset_for_the_sanitizer_is_small():
    subset = cases.sanitize()
    assert len(subset) <= 40 and max(max(case.seq_q, case.seq_k) for case in subset) <= 320


@pytest.mark.sanitize
@pytest.mark.parametrize("case_s", cases.sanitize(), ids=_ids)
def test_sanitizer_case(forward, case_s):
    taken(forward, case_s)


def test_random_cases(forward):
    for case in cases.random_cases(20, 60, limit=3e7):
        try:
            report = runner.verdict(forward, case)
        except Unplaceable:
            continue
        except fa_ext.UnsupportedError:
            assert not cases.must_accept(runner.listed_name(forward), case), f"{forward} must accept {case}"
            continue
        assert report, f"{report}\n{repro(forward, case)}"


@pytest.mark.slow
def test_long_sequences(forward):
    if runner.listed_name(forward) == "cpu_ref":
        pytest.skip("minutes on cpu_ref")
    for dtype, causal in (("float16", True), ("bfloat16", False), ("float32", "top_left")):
        case = Case(1, 1, 1, 4224, 4224, 64, dtype=dtype, causal=causal)
        try:
            report = runner.verdict(forward, case)
        except Unplaceable:
            continue
        except fa_ext.UnsupportedError:
            assert not cases.must_accept(runner.listed_name(forward), case)
            continue
        assert report, f"{report}\n{repro(forward, case)}"


# ---- clause 1 ----


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("sinks", [None, "float32", "same"])
def test_rows_without_a_key_are_zero_and_their_lse_is_the_sink(forward, dtype, sinks):
    case = Case(2, 4, 2, 130, 50, 64, dtype=dtype, causal="bottom_right", sinks=sinks)
    taken(forward, case)
    out, lse = runner.run(forward, case)
    empty = slice(0, 80)  # query i sees keys up to i - 80
    assert (out[:, :, empty] == 0).all() and (out[:, :, 80:] != 0).any()
    if sinks is None:
        assert (lse[:, :, empty] == -np.inf).all()
    else:
        want = case.host_inputs()["sinks"].astype(np.float64)[None, :, None]
        assert np.abs(lse[:, :, empty] - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("blind", [{"causal": "bottom_right"}, {"window": (0, 2)}, {"seq_k": 0}], ids=str)
def test_a_row_without_a_key_is_zero_whatever_its_sink(forward, dtype, blind):
    """-inf is no sink; infinity, NaN and the largest that counts are its LSE."""
    case = Case(**dict(batch=1, heads=5, heads_kv=5, seq_q=130, seq_k=50, head_dim=64, dtype=dtype) | blind)
    taken(forward, dataclasses.replace(case, sinks="float32"))
    sinks = np.array([-np.inf, np.inf, np.nan, 2, 3e38], np.float32)
    out, lse = runner.run(forward, case, sinks=place(sinks, runner.library_for(forward, case)))
    empty = slice(0, {"causal": 80, "window": 78, "seq_k": 130}[next(iter(blind))])
    assert (out[:, :, empty] == 0).all()
    wanted = np.where(np.isinf(sinks), sinks, np.minimum(sinks, np.float32(2.35865e38)))[:, None]
    np.testing.assert_allclose(lse[:, :, empty], np.broadcast_to(wanted, lse[:, :, empty].shape), rtol=1e-6)


# ---- clause 2 ----


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "band",
    [
        {"causal": "top_left"},
        {"window": (20, 10)},
        {"window": (0, 5), "causal": "bottom_right"},
        {"window": (None, 3), "causal": "top_left"},
    ],
    ids=str,
)
def test_what_nobody_sees_changes_nothing(forward, dtype, band):
    """The bits are those of the call on clean memory, whatever lies at keys that no query may see."""
    dirty = Case(1, 4, 2, 70, 300, 64, dtype=dtype, values="nan_outside", **band)
    clean = Case(1, 4, 2, 70, 300, 64, dtype=dtype, values="normal", **band)
    taken(forward, dirty)
    inputs = dirty.host_inputs()
    assert not np.isfinite(inputs["k"].astype(np.float32)).all(), "the case hides nothing"
    for a, b in zip(runner.run(forward, dirty), runner.run(forward, clean)):
        np.testing.assert_array_equal(runner.bits(a), runner.bits(b))


@pytest.mark.parametrize("dtype", (*cases.DTYPES, "float64"))
def test_cpu_ref_contains_nan_by_the_row(forward, dtype):
    if runner.listed_name(forward) != "cpu_ref":
        pytest.skip("other kernels may spread a visible NaN to queries of its tile")
    for option in ({"causal": "bottom_right"}, {"mask": "one"}, {"window": (9, 3)}):
        taken(forward, Case(1, 2, 1, 60, 90, 40, dtype=dtype, values="nan_tail", **option))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_visible_nan_is_not_hidden(forward, dtype):
    case = Case(1, 2, 1, 60, 90, 64, dtype=dtype, values="nan_tail")
    taken(forward, case)
    out, _ = runner.run(forward, case)
    assert np.isnan(out).all()


# ---- clause 3 ----


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_beyond_32_bits(forward, axis):
    """Each axis in turn has a stride of more than 2^31 elements. Memory in between is never touched."""
    shape = [1, 1, 1, 64]
    shape[axis] = 2
    shape[2] = max(shape[2], 2)
    far = (1 << 31) + 64
    strides = [0, 0, 64, 1]
    strides[axis] = far
    library = runner.library_for(forward, runner.SIMPLEST)
    if library != "numpy" and runner.free_bytes(library) < 9 << 30:
        pytest.skip("needs 9 GiB of free device memory")
    inputs, result = (_memory(library, far + 64 * 12) for _ in range(2))
    arrays, host = {}, {}
    rng = np.random.default_rng(axis)
    for i, name in enumerate("qkv"):  # side by side in one array
        host[name] = rng.standard_normal(shape).astype(np.float16)
        arrays[name] = _view(inputs, 64 * 3 * i, shape, strides)
        arrays[name][...] = _to(library, host[name])
    out = _view(result, 0, shape, strides)
    try:
        fa_ext.attention(**arrays, out=out, kernel=forward)
    except fa_ext.UnsupportedError as error:
        if runner.listed_name(forward) in ("simt", "minimal", "cpu_ref", "cpu_simd"):
            raise
        pytest.skip(str(error))
    want = reference.attention(**host)[0]
    assert np.abs(runner.to_host(out) - want).max() < 4e-3
    del arrays, inputs, result, out
    runner.free_memory(library)


def _memory(library, count):
    """``count`` float16 elements, of which the host gives only pages that are touched."""
    if library == "numpy":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return np.frombuffer(mmap.mmap(-1, 2 * count, flags), np.float16)
    return runner.filled(library, count, "float16", 0)


def _view(memory, offset, shape, strides):
    """A view with these strides and this offset, in elements."""
    if type(memory).__module__.startswith("torch"):
        import torch

        return torch.as_strided(memory, shape, strides, offset)
    if isinstance(memory, np.ndarray):
        return np.lib.stride_tricks.as_strided(memory[offset:], shape, [2 * s for s in strides])
    return type(memory)(shape, np.float16, memptr=memory.data + 2 * offset, strides=[2 * s for s in strides])


def _to(library, x):
    if library == "numpy":
        return x
    if library == "cupy":
        import cupy

        return cupy.asarray(x)
    import torch

    return torch.from_numpy(x).cuda()


@pytest.mark.gpu
@pytest.mark.slow
def test_arrays_of_more_than_2_31_elements(cuda_forward):
    cupy = pytest.importorskip("cupy")
    heads, seq_q, seq_k, dim = 16, (1 << 20) + 72, 80, 128
    if runner.free_bytes("cupy") < 10 << 30:
        pytest.skip("needs 10 GiB of free device memory")
    q, out = (cupy.zeros((1, heads, seq_q, dim), np.float16) for _ in range(2))
    assert q.size > 1 << 31
    rng = np.random.default_rng(0)
    blocks = [rng.standard_normal((seq_q // 8, dim), np.float32).astype(np.float16) for _ in range(3)]
    for h in range(heads):
        for i in range(8):  # no two neighbours hold the same rows
            q[0, h, i * (seq_q // 8) : (i + 1) * (seq_q // 8)].set(blocks[(h + i) % 3])
    host_k, host_v = (rng.standard_normal((1, heads, seq_k, dim), np.float32).astype(np.float16) for _ in "kv")
    k, v = cupy.asarray(host_k), cupy.asarray(host_v)
    try:
        fa_ext.attention(q, k, v, out=out, kernel=cuda_forward)
    except fa_ext.UnsupportedError as error:
        pytest.skip(str(error))
    for h, i in itertools.product((0, heads // 2, heads - 1), (0, 77, seq_q // 2, seq_q - 129, seq_q - 1)):
        want = reference.attention(q[:1, h : h + 1, i : i + 1].get(), host_k[:, h : h + 1], host_v[:, h : h + 1])[0]
        assert np.abs(out[0, h, i].get() - want[0, 0, 0]).max() < 3e-3, (h, i)
    del q, k, v, out
    runner.free_memory("cupy")


# ---- clause 4 ----

REPEATED = [
    Case(2, 8, 2, 300, 517, 64, causal="bottom_right"),
    Case(2, 4, 4, 257, 257, 128, dtype="bfloat16", causal=True),
    Case(1, 8, 1, 1, 900, 128),
    Case(1, 2, 2, 130, 200, 256, dtype="bfloat16"),
    Case(1, 4, 2, 130, 200, 64, dtype="float32", window=(60, 20)),
]


@pytest.mark.parametrize("case_r", REPEATED, ids=_ids)
def test_the_same_bits_from_run_to_run(forward, case_r, request):
    taken(forward, case_r)
    first = [runner.bits(x) for x in runner.run(forward, case_r)]
    for _ in range(request.config.getoption("--repeats") if runner.device_of(forward) == "cuda" else 4):
        for a, b in zip(runner.run(forward, case_r), first):
            np.testing.assert_array_equal(runner.bits(a), b, err_msg=repro(forward, case_r))


@pytest.mark.parametrize("case_r", REPEATED + [Case(3, 16, 2, 1, 3000, 128), Case(3, 2, 2, 64, 1500, 64)], ids=_ids)
def test_batch_invariant_entries_do_not_depend_on_the_others(forward, case_r):
    taken(forward, case_r)
    library = runner.library_for(forward, case_r)
    inputs = runner.prepared(case_r, library).inputs
    host = runner.known(case_r)[0]
    alone = {n: x[:1] if n in "qkv" else x for n, x in inputs.items()}
    # The first entry among so many others that tiles and splits would be chosen otherwise.
    others = 40 if runner.device_of(forward) == "cuda" else 5
    crowd = {n: np.concatenate([host[n][:1], *[host[n][-1:]] * others]) for n in "qkv"}
    crowd = inputs | {n: place(x, library) for n, x in crowd.items()}
    results = [
        fa_ext.attention(**call, kernel=forward, batch_invariant=True, return_lse=True) for call in (alone, inputs, crowd)
    ]
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_array_equal(runner.bits(a[:1]), runner.bits(b[:1]), err_msg=repro(forward, case_r))


@pytest.mark.parametrize("case_r", REPEATED + [Case(1, 2, 2, 64, 1500, 64)], ids=_ids)
def test_batch_invariance_is_not_inherited_from_the_call_before(forward, case_r):
    taken(forward, case_r)
    inputs = runner.prepared(case_r, runner.library_for(forward, case_r)).inputs
    results = {}

    def work(*options):
        for option in options:
            results[option, len(options)] = runner.bits(fa_ext.attention(**inputs, kernel=forward, batch_invariant=option))

    for options in ((True,), (False, True)):  # each thread remembers calls of its own
        thread = threading.Thread(target=work, args=options)
        thread.start()
        thread.join()
    np.testing.assert_array_equal(results[True, 1], results[True, 2], err_msg=repro(forward, case_r))


# ---- outputs ----


@pytest.mark.parametrize("kind", ["swapped", "negative", "sliced", "column", "odd"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_strided_out(forward, kind, dtype):
    """A result goes to any strides, and nothing is written between its elements."""
    case = Case(2, 2, 1, 70, 90, 64, dtype=dtype)
    taken(forward, case)
    library = runner.library_for(forward, case)
    view = strided(np.full(case.out_shape, 7, dtype), kind)
    memory = view
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    between = memory.size - view.size
    out = place(view, library) if library != "numpy" else view
    try:
        fa_ext.attention(**runner.prepared(case, library).inputs, out=out, kernel=forward)
    except fa_ext.UnsupportedError as error:
        if runner.listed_name(forward) in ("simt", "minimal", "cpu_ref", "cpu_simd"):
            raise
        pytest.skip(str(error))
    report = runner.judged(forward, case, runner.to_host(out), None)
    assert report, f"{report}\n{kind}"
    if library == "numpy":
        assert np.isnan(memory).sum() == between


# ---- clause 6 ----


def test_threads_give_the_same_bits(forward):
    problems = [Case(1, 2, 1, 64 + 16 * i, 150, 64, seed=i, causal="bottom_right") for i in range(6)]
    for case in problems:
        taken(forward, case)
    library = runner.library_for(forward, problems[0])
    inputs = [case.make_inputs(library) for case in problems]
    want = [runner.bits(fa_ext.attention(**x, kernel=forward)) for x in inputs]
    failures = []

    def work(start):
        try:
            for i in range(12):
                n = (start + i) % len(inputs)
                if not (runner.bits(fa_ext.attention(**inputs[n], kernel=forward)) == want[n]).all():
                    failures.append(f"thread {start}: other bits in problem {n}")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


GRAPHED = [
    Case(2, 4, 2, 130, 203, 64, causal="bottom_right"),
    Case(1, 8, 2, 1, 1500, 128, dtype="float16"),
    Case(1, 4, 4, 512, 512, 128, causal=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case_g", GRAPHED, ids=_ids)
def test_graph_replay_reads_fresh_data(cuda_forward, case_g):
    cupy = pytest.importorskip("cupy")
    taken(cuda_forward, case_g)
    inputs = case_g.make_inputs("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    outputs = runner.Outputs(case_g, "cupy")
    runner.synchronize()
    with stream:
        fa_ext.attention(**inputs, out=(outputs.out, outputs.lse), kernel=cuda_forward)  # first use, outside of capture
        stream.synchronize()
        stream.begin_capture()
        fa_ext.attention(**inputs, out=(outputs.out, outputs.lse), kernel=cuda_forward)
        graph = stream.end_capture()
    for seed in (1, 2, 3):
        fresh = Case(**{**case_g.__dict__, "seed": seed})
        fresh_inputs = runner.prepared(fresh, "cupy").inputs
        for name in "qkv":
            inputs[name][...] = fresh_inputs[name]
        outputs.poison()
        runner.synchronize()
        graph.launch(stream)
        stream.synchronize()
        report = runner.judged(cuda_forward, fresh, *outputs.on_host())
        assert report, f"replay with seed {seed}: {report}"


@pytest.mark.gpu
def test_the_call_runs_on_its_stream(cuda_forward):
    """Inputs are still being written on the stream when the call is made: only a call on that stream sees them."""
    cupy = pytest.importorskip("cupy")
    case = Case(2, 4, 2, 256, 256, 64, causal=True)
    taken(cuda_forward, case)
    known = runner.prepared(case, "cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.zeros((2, 1 << 29), np.uint8)
    for given in (None, stream, stream.ptr):
        inputs = dict(known.inputs, **{n: cupy.zeros_like(known.inputs[n]) for n in "qkv"})
        outputs = runner.Outputs(case, "cupy")
        runner.synchronize()
        with stream:
            for _ in range(8):  # milliseconds
                busy[0].data.copy_from_device_async(busy[1].data, busy[1].nbytes, stream)
            for name in "qkv":
                inputs[name][...] = known.inputs[name]
            fa_ext.attention(**inputs, out=(outputs.out, outputs.lse), stream=given, kernel=cuda_forward)
            copy = outputs.out.copy(), outputs.lse.copy()
        stream.synchronize()
        report = runner.judged(cuda_forward, case, *map(runner.to_host, copy))
        assert report, f"stream={given!r}: {report}"


@pytest.mark.gpu
def test_the_call_runs_on_the_device_of_q(cuda_forward):
    cupy = pytest.importorskip("cupy")
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two CUDA devices")
    case = Case(2, 4, 2, 130, 203, 64, causal="bottom_right")
    for device in (count - 1, 0, count - 1):
        with cupy.cuda.Device(device):
            inputs = case.make_inputs("cupy")
        out, lse = fa_ext.attention(**inputs, kernel=cuda_forward, return_lse=True)
        assert out.device.id == device and cupy.cuda.Device().id == 0
        assert runner.judged(cuda_forward, case, out.get(), lse.get())


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "fa_ext"])
def test_other_libraries(cuda_forward, library):
    for dtype in ("float16", "float32", "bfloat16"):
        case = Case(2, 4, 2, 113, 203, 64, dtype=dtype, causal="bottom_right")
        inputs = case.host_inputs()
        if library == "torch":
            pytest.importorskip("torch")
            inputs = case.make_inputs("torch")
        else:
            inputs = {n: fa_ext.to_device(x) if isinstance(x, np.ndarray) else x for n, x in inputs.items()}
        try:
            report = fa_ext.verify(**inputs, kernel=cuda_forward)
        except fa_ext.UnsupportedError:
            assert not cases.must_accept(runner.listed_name(cuda_forward), case)
            continue
        assert report, str(report)
