"""The C interface (fa_ext/include/fa_ext.h): a client in C and in C++, its results against Python's, its errors."""

import ctypes
import os
import random
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from fa_ext import _core
from tests.contract import gradients, lse_views
from tests.library.support import c_interface
from tests.library.support.c_interface import BACKWARD, FORWARD, GRADIENTS, LANGUAGES, array_of, compiled

pytestmark = [pytest.mark.native, pytest.mark.skipif(c_interface.missing_compiler() is not None, reason=str(c_interface.missing_compiler()))]

OK, EVALUE, ETYPE, EBUFFER, EMEMORY, EUNSUPPORTED, ECUDA = range(7)
OPTIONS = ("causal", "scale", "window", "softcap", "layout", "dropout")


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    return {language: c_interface.Client(compiled(folder, language)) for language in LANGUAGES}


@pytest.fixture(scope="module")
def client(clients):
    return clients["c"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_uses_every_function(clients, language):
    line = clients[language].run()
    assert line == 0, f"client.c:{line}: the check failed"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_with_python_imports_the_table(tmp_path, language):
    library = ctypes.PyDLL(str(compiled(tmp_path, language, *c_interface.python_flags())))
    library.imported.restype = ctypes.c_void_p
    assert library.imported() == c_interface.table()


def test_a_program_that_embeds_python(tmp_path):
    """support/embed.c, with the interpreter as a library."""
    name, folder = sysconfig.get_config_var("LDLIBRARY"), sysconfig.get_config_var("LIBDIR")
    if not (sysconfig.get_config_var("Py_ENABLE_SHARED") and name and folder):
        pytest.skip("this Python has no shared library")
    target = tmp_path / "embed"
    version = f"-lpython{sysconfig.get_config_var('LDVERSION')}"
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{fa_ext.get_include()}", "-isystem", sysconfig.get_path("include"),
         str(c_interface.HERE / "embed.c"), "-o", str(target), f"-L{folder}", f"-Wl,-rpath,{folder}", version],
        check=True,
    )  # fmt: skip
    done = subprocess.run([str(target)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert (done.returncode, done.stdout) == (0, "1.5 2.5\n"), done.stderr


def test_threads_that_are_cancelled_leave_no_lock_behind(tmp_path):
    """support/cancel.c: a thread ends behind its calls, and the threads after it can call."""
    library = compiled(tmp_path, "c", "-pthread", source="cancel.c")
    code = f"import ctypes; from tests.library.support import c_interface; print(ctypes.CDLL({str(library)!r}).cancelled(ctypes.c_void_p(c_interface.table())))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stdout + done.stderr


def test_the_header_is_in_the_package():
    assert c_interface.Path(fa_ext.get_include(), "fa_ext.h").is_file()


# ---- the same bits as from Python ----


def forward_arrays(inputs, out, lse):
    held = {**inputs, "out": out, "lse": lse}
    return [array_of(held[name]) if held.get(name) is not None else None for name in FORWARD]


def options_in(inputs):
    return {name: inputs[name] for name in OPTIONS if name in inputs}


@pytest.mark.parametrize("case", [c for c in random.Random(5).sample(cases.contract(), 120)], ids=str)
def test_forward_has_the_bits_of_python(client, case):
    if case.seq_q * case.seq_k > 1 << 21:
        case = gradients.shrunk(case, 20)
    try:
        inputs = case.host_inputs()
    except Unplaceable as error:
        pytest.skip(str(error))
    wanted, wanted_lse = fa_ext.attention(**inputs, return_lse=True)
    out, lse = np.full_like(wanted, np.nan), np.full_like(wanted_lse, np.nan)
    assert client.call("forward", forward_arrays(inputs, out, lse), options=options_in(inputs)) == OK, client.said()
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()
    out[...] = np.nan
    assert client.call("forward", forward_arrays(inputs, out, None), options=options_in(inputs)) == OK, client.said()
    np.testing.assert_array_equal(out.astype(np.float64), fa_ext.attention(**inputs).astype(np.float64))
    kind = lse_views.KINDS[case.seed % len(lse_views.KINDS)]
    lse, memory = lse_views.poisoned(wanted_lse.shape, wanted_lse.dtype, kind)
    assert client.call("forward", forward_arrays(inputs, out, lse), options=options_in(inputs)) == OK, client.said()
    assert memory.tobytes() == lse_views.with_only(wanted_lse, kind)


@pytest.mark.parametrize("case", [c for c in random.Random(6).sample(gradients.contract("cpu_ref_backward"), 40)], ids=str)
def test_backward_has_the_bits_of_python(client, case):
    try:
        problem = gradients.make(case)
    except Unplaceable as error:
        pytest.skip(str(error))
    rng = random.Random(str(case))
    wrt = tuple(sorted(rng.sample(problem.wrt, rng.randint(1, len(problem.wrt))), key=gradients.NAMES.index))
    wanted = fa_ext.attention_backward(**problem.inputs, wrt=wrt)
    results = {f"d{name}": np.full_like(x, np.nan) for name, x in zip(wrt, wanted)}
    held = {**problem.inputs, **results}
    arrays = [array_of(held[name]) if held.get(name) is not None else None for name in BACKWARD]
    assert client.call("backward", arrays, options=options_in(problem.inputs)) == OK, client.said()
    for name, x in zip(wrt, wanted):
        assert results[f"d{name}"].tobytes() == x.tobytes(), name
    assert client.call("backward", arrays, extra=1, options=options_in(problem.inputs)) == OK, client.said()
    for name, x in zip(wrt, wanted):  # accumulated: twice as much
        double = results[f"d{name}"].astype(np.float64)
        known = np.isfinite(double)
        np.testing.assert_allclose(double[known], 2 * x.astype(np.float64)[known], rtol=1e-2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("parts", [1, 3, 130])
def test_merge_has_the_bits_of_python(client, layout, parts):
    rng = np.random.default_rng(parts)
    outs = [rng.standard_normal((2, 3, 5, 7)).astype(np.float32) for _ in range(parts)]
    lses = [rng.standard_normal((2, 3, 5) if layout == "bhsd" else (2, 5, 3)).astype(np.float32) for _ in range(parts)]
    sinks = rng.standard_normal(3 if layout == "bhsd" else 5).astype(np.float32)
    wanted, wanted_lse = fa_ext.merge(outs, lses, sinks=sinks, layout=layout)
    out, lse = np.full_like(wanted, np.nan), np.full_like(wanted_lse, np.nan)
    lists = [(c_interface.Array * parts)(*map(array_of, held)) for held in (outs, lses)]
    arrays = [*lists, array_of(sinks), array_of(out), array_of(lse)]
    assert client.call("merge", arrays, extra=parts, options={"layout": layout}) == OK, client.said()
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()
    needed = client.call("merge", arrays, extra=parts, options={"layout": layout}, asks=True)
    assert needed == 0  # on the CPU


# ---- workspace ----


@pytest.fixture
def simple():
    case = Case(2, 4, 2, 100, 133, 64, dtype="float32", causal="bottom_right")
    inputs = case.host_inputs()
    return inputs, np.full(case.out_shape, np.nan, np.float32), options_in(inputs)


@pytest.mark.parametrize("kernel", [None, *[k for k in fa_ext.kernels() if k.startswith("cpu")]])
@pytest.mark.parametrize("offset", [0, 1, 255])
def test_a_workspace_of_the_callers(client, simple, kernel, offset):
    inputs, out, options = simple
    arrays = forward_arrays(inputs, out, None)
    needed = client.call("forward", arrays, options=options, kernel=kernel, asks=True)
    plan = _core.answers(**inputs, kernel=kernel)[kernel or fa_ext.explain(**inputs)[0]][2]
    assert needed >= plan["workspace_bytes"] > 0
    memory = c_interface.aligned(needed + 256, offset)
    workspace = memory[:needed].ctypes.data, needed
    assert client.call("forward", arrays, options=options, kernel=kernel, workspace=workspace) == OK, client.said()
    np.testing.assert_array_equal(out, fa_ext.attention(**inputs, kernel=kernel))
    assert (memory[needed:] == 0xFF).all() and not (memory[:needed] == 0xFF).all()


def test_a_workspace_that_is_too_small(client, simple):
    inputs, out, options = simple
    arrays = forward_arrays(inputs, out, None)
    memory = np.zeros(64, np.uint8)
    assert client.call("forward", arrays, options=options, workspace=(memory.ctypes.data, 64)) == EVALUE
    assert client.said().startswith("workspace_bytes is 64, but kernel cpu_")
    assert np.isnan(out).all()


def test_workspace_is_asked_without_data(client, simple):
    inputs, out, options = simple
    with_data = client.call("forward", forward_arrays(inputs, out, None), options=options, asks=True)
    held = {**inputs, "out": out}
    arrays = [array_of(held[n], data=False) if n in held else None for n in FORWARD]
    assert client.call("forward", arrays, options=options, asks=True) == with_data
    assert client.call("forward", arrays, options=options) == EBUFFER
    assert client.said() == "q has a NULL data pointer, but it is not empty; accepted: an array that has memory"


def test_workspace_says_what_is_wrong(client, simple):
    inputs, out, options = simple
    wrong = inputs | {"k": inputs["k"][:1]}
    assert client.call("forward", forward_arrays(wrong, out, None), options=options, asks=True) == EVALUE
    assert "k has batch size 1" in client.said()


# ---- errors: nothing is written ----


@pytest.mark.parametrize(
    "field, value, code, text",
    [
        ("ndim", 17, EVALUE, "k.ndim is 17; accepted: 0 to 16"),
        ("ndim", -1, EVALUE, "k.ndim is -1; accepted: 0 to 16"),
        ("ndim", 3, EVALUE, "k has shape (2, 2, 133) and there is no cu_seqlens_k"),
        ("dtype", 0, ETYPE, "k.dtype is 0"),
        ("dtype", 6, ETYPE, "k has dtype int32"),
        ("dtype", 8, ETYPE, "k.dtype is 8"),
        ("dtype", 4, ETYPE, "k has dtype float64, but q has float32"),
        ("device", -1, EVALUE, "k.device is -1"),
        ("device", 3, EVALUE, "k is on CUDA device 2, but q is on the CPU"),
        ("reserved", 9, EVALUE, "k.reserved is 9"),
        ("shape", None, EVALUE, "k.shape is NULL"),
        ("data", None, EBUFFER, "k has a NULL data pointer"),
        ("data", 3, EBUFFER, "k is not aligned"),
    ],
)
def test_bad_arrays(client, simple, field, value, code, text):
    inputs, out, options = simple
    arrays = forward_arrays(inputs, out, None)
    setattr(arrays[1], field, value)
    assert client.call("forward", arrays, options=options) == code
    assert text in client.said()
    assert np.isnan(out).all()


def test_bad_shapes_name_the_axis(client, simple):
    inputs, out, options = simple
    for extents, text in (((2, 2, -1, 64), "k has a negative extent on axis 2"), ((2, 2, 1 << 60, 64), "too large")):
        arrays = forward_arrays(inputs, out, None)
        arrays[1].shape = (ctypes.c_int64 * 4)(*extents)
        assert client.call("forward", arrays, options=options) == EVALUE
        assert text in client.said()


@pytest.mark.parametrize(
    "field, value, code, text",
    [
        ("size", 4, EVALUE, "fa_ext_options.size is 4; accepted: sizeof(fa_ext_options), which is"),
        ("size", 1 << 40, EVALUE, "fa_ext_options.size is"),
        ("given", 16, EVALUE, "options.given is 0x10"),
        ("causal", 4, EVALUE, "options.causal is 4"),
        ("layout", 2, EVALUE, "options.layout is 2"),
        ("softcap", -1.0, EVALUE, "softcap is -1"),
    ],
)
def test_bad_options(client, simple, monkeypatch, field, value, code, text):
    inputs, out, _ = simple
    made = c_interface.options_of(causal="bottom_right")
    setattr(made, field, value)
    monkeypatch.setattr(c_interface, "options_of", lambda **_: made)
    assert client.call("forward", forward_arrays(inputs, out, None)) == code
    assert text in client.said()
    assert np.isnan(out).all()


def test_a_struct_of_a_later_version(client, simple, monkeypatch):
    """Fields that this version does not know: 0 means their default, anything else is refused."""

    class Later(ctypes.Structure):
        _fields_ = [("known", c_interface.Options), ("unknown", ctypes.c_int64)]

    inputs, out, _ = simple
    made = Later(c_interface.options_of(causal="bottom_right"), 0)
    made.known.size = ctypes.sizeof(Later)
    monkeypatch.setattr(c_interface, "options_of", lambda **_: made)
    assert client.call("forward", forward_arrays(inputs, out, None)) == OK, client.said()
    made.unknown = 1
    assert client.call("forward", forward_arrays(inputs, out, None)) == EUNSUPPORTED
    assert "this version of fa_ext does not know" in client.said()


def test_a_struct_of_the_version_before_the_state_of_dropout(client, simple, monkeypatch):
    inputs, out, _ = simple
    made = c_interface.options_of(causal="bottom_right", dropout=(0.5, 3))
    assert made.size == ctypes.sizeof(c_interface.Options) == 112
    made.size, made.state = c_interface.Options.state.offset, 12345  # which is not read
    monkeypatch.setattr(c_interface, "options_of", lambda **_: made)
    assert client.call("forward", forward_arrays(inputs, out, None)) == OK, client.said()
    np.testing.assert_array_equal(out, fa_ext.attention(**inputs, dropout=(0.5, 3)))


def words(*rest):
    made = np.array([0x9ABCDEF0, 0x12345678, 7, *rest], np.uint32)
    return made, ctypes.c_void_p(made.ctypes.data)


def test_the_state_of_dropout(client, simple):
    """It counts in place of the other fields, in both passes and for dropout_keep; heads 0: the call's own."""
    inputs, out, options = simple
    seed = 0x123456789ABCDEF0
    for rest, same in (((1, 2, 3, 4, 9), ((1, 2, 3, 4), 9)), ((0, 0, 0, 0, 0), ((0, 0, 0, 0), 4))):
        held, address = words(*rest)
        drawn = (0.5, seed, 7, *same)
        out[:] = np.nan
        assert client.call("forward", forward_arrays(inputs, out, None), options=options | {"dropout": (0.5, address)}) == OK
        np.testing.assert_array_equal(out, fa_ext.attention(**inputs, dropout=drawn))
        keep = np.zeros((2, 4, 100, 133), bool)
        assert client.dropout_keep(c_interface.array_of(keep), dropout=(0.5, address)) == OK
        np.testing.assert_array_equal(keep, fa_ext.dropout_keep(2, 4, 100, 133, drawn))
        held[0] += 1  # read at each call
        assert client.call("forward", forward_arrays(inputs, out, None), options=options | {"dropout": (0.5, address)}) == OK
        assert (out != fa_ext.attention(**inputs, dropout=drawn)).any()
    dout, (made, lse) = np.ones_like(out), fa_ext.attention(**inputs, return_lse=True)
    held, address = words(1, 2, 3, 4, 9)
    dv = np.full_like(inputs["v"], np.nan)
    arrays = {**inputs, "dout": dout, "out": made, "lse": lse, "dv": dv}
    given = [c_interface.array_of(arrays[n]) if n in arrays else None for n in c_interface.BACKWARD]
    assert client.call("backward", given, options=options | {"dropout": (0.5, address)}) == OK, client.said()
    wanted = fa_ext.attention_backward(dout, out=made, lse=lse, **inputs, wrt=("v",), dropout=(0.5, seed, 7, (1, 2, 3, 4), 9))
    np.testing.assert_array_equal(dv, wanted[0])


def test_a_bad_state_of_dropout(client, simple):
    inputs, out, options = simple
    for rest, offset, code, text in (
        ((0, 2, 0, 0, 5), 0, EVALUE, "dropout's heads is 5; accepted: at least origin's h0 and the call's heads, 6"),
        ((0, 0, 0, 1 << 31, 4), 0, EVALUE, "dropout's origin[3] is 2147483648"),
        ((0, 0, 0, 0, 4), 2, EBUFFER, "options.dropout_state is not aligned"),
    ):
        held, address = words(*rest)
        address = ctypes.c_void_p(address.value + offset)
        arrays = forward_arrays(inputs, out, None)
        assert client.call("forward", arrays, options=options | {"dropout": (0.5, address)}) == code
        assert text in client.said()
        assert client.call("forward", arrays, options=options | {"dropout": (0.5, ctypes.c_void_p(8))}, asks=True) >= 0  # not read
    assert np.isnan(out).all()


def test_kernels_by_name(client, simple):
    inputs, out, options = simple
    for kernel in fa_ext.kernels():
        code = client.call("forward", forward_arrays(inputs, out, None), options=options, kernel=kernel)
        assert code == (OK if kernel.startswith("cpu") else EUNSUPPORTED)
        if code:
            assert client.said().startswith(f'kernel "{kernel}" cannot take this call')
        else:
            np.testing.assert_array_equal(out, fa_ext.attention(**inputs, kernel=kernel))
    assert client.call("forward", forward_arrays(inputs, out, None), options=options, kernel="none") == EVALUE
    names = [k for k in fa_ext.kernels()]
    assert client.said() == f'kernel is "none", which names no kernel of this build; accepted: {", ".join(names)}'


def test_streams_are_for_devices(client, simple):
    inputs, out, options = simple
    assert client.call("forward", forward_arrays(inputs, out, None), options=options, stream=1) == EVALUE
    assert client.said() == "stream is given, but the arrays are on the CPU; accepted there: NULL"


def test_results_apart_from_inputs(client, simple):
    inputs, _, options = simple
    arrays = forward_arrays(inputs, inputs["q"], None)
    assert client.call("forward", arrays, options=options) == EVALUE
    assert "out" in client.said() and "overlap" in client.said() or "q" in client.said()


def test_needed_arrays(client, simple):
    inputs, out, options = simple
    for n, name in enumerate(FORWARD):
        arrays = forward_arrays(inputs, out, None)
        arrays[n] = None
        code = client.call("forward", arrays, options=options)
        if name in ("q", "k", "v", "out"):
            assert code == EVALUE and client.said() == f"{name} is NULL; accepted: an array"
        else:
            assert code == OK
    problem = gradients.make(Case(1, 1, 1, 3, 5, 8, dtype="float32"), dlse=False)
    held = {**problem.inputs, "dq": np.full_like(problem.inputs["q"], np.nan)}
    for name in ("q", "k", "v", "out", "lse", "dout", "dq"):
        arrays = [array_of(held[n]) if n in held and n != name else None for n in BACKWARD]
        assert client.call("backward", arrays) == EVALUE
        assert name in client.said()
    lists = [(c_interface.Array * 1)(array_of(held[name])) for name in ("out", "lse")]
    for absent in range(5):
        arrays = [*lists, None, array_of(np.empty_like(held["out"])), array_of(np.empty_like(held["lse"]))]
        if absent == 2:
            continue
        arrays[absent] = None
        assert client.call("merge", arrays, extra=1) == EVALUE
        assert client.said().startswith(f"{('outs', 'lses', '', 'out', 'lse')[absent]} is NULL")
    assert client.call("merge", [*lists, None, *arrays[3:]], extra=0) == EVALUE
    assert client.said().startswith("count is 0")


def test_the_other_device(client, simple):
    """Arrays said to be on a device that is not there: a code, no crash."""
    inputs, out, options = simple
    try:
        count = _core.device_count()
    except fa_ext.CudaError:
        count = 0
    arrays = forward_arrays(inputs, out, None)
    for array in filter(None, arrays):
        array.device = 1 + count
    assert client.call("forward", arrays, options=options) == (EVALUE if count else ECUDA)
    assert client.said()


def test_calls_take_no_gil_and_run_at_once(client):
    """ctypes.CDLL lets the GIL go: threads in the table at the same time, each with results of its own."""
    from concurrent.futures import ThreadPoolExecutor

    def one(seed):
        inputs = Case(1, 2, 1, 40, 50, 16, dtype="float32", seed=seed).host_inputs()
        wanted = fa_ext.attention(**inputs)
        mine = c_interface.Client(client.library._name)
        for _ in range(20):
            out = np.full_like(wanted, np.nan)
            assert mine.call("forward", forward_arrays(inputs, out, None)) == OK, mine.said()
            np.testing.assert_array_equal(out, wanted)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))


# ---- a device ----


def on_device(x):
    return fa_ext.to_device(np.ascontiguousarray(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_on_a_device(client, dtype):
    case = Case(2, 4, 2, 100, 133, 64, dtype=dtype, causal="bottom_right", sinks="same")
    problem = gradients.make(case)
    held = {n: on_device(x) if isinstance(x, np.ndarray) else x for n, x in problem.inputs.items()}
    options = options_in(problem.inputs)
    inputs = {n: held[n] for n in ("q", "k", "v", "sinks")}
    wanted, wanted_lse = fa_ext.attention(**inputs, **options, return_lse=True)
    made = {"out": on_device(np.full(case.out_shape, np.nan, dtype)), "lse": on_device(np.full(wanted_lse.shape, np.nan, "f4"))}
    arrays = [array_of({**inputs, **made}[n], device=1) if n in {**inputs, **made} else None for n in FORWARD]
    for with_workspace in (False, True):
        needed = client.call("forward", arrays, options=options, asks=True)
        scratch = on_device(np.full(needed + 1, 0xFF, np.uint8).view(bool))
        pointer = scratch.__cuda_array_interface__["data"][0]
        workspace = (pointer, needed) if with_workspace and needed else None
        assert client.call("forward", arrays, options=options, workspace=workspace) == OK, client.said()
        assert fa_ext.to_numpy(made["out"]).tobytes() == fa_ext.to_numpy(wanted).tobytes()
        assert fa_ext.to_numpy(made["lse"]).tobytes() == fa_ext.to_numpy(wanted_lse).tobytes()

    grads = fa_ext.attention_backward(**held, wrt=problem.wrt)
    results = {f"d{name}": on_device(np.full(held[name].shape, np.nan, held[name].dtype)) for name in problem.wrt}
    both = {**held, **results}
    arrays = [array_of(both[n], device=1) if both.get(n) is not None else None for n in BACKWARD]
    needed = client.call("backward", arrays, options=options, asks=True)
    scratch = on_device(np.zeros(needed + 1, bool))
    workspace = scratch.__cuda_array_interface__["data"][0], needed
    assert client.call("backward", arrays, options=options, workspace=workspace) == OK, client.said()
    for name, wanted_grad in zip(problem.wrt, grads):
        assert fa_ext.to_numpy(results[f"d{name}"]).tobytes() == fa_ext.to_numpy(wanted_grad).tobytes(), name
    if needed:
        assert client.call("backward", arrays, options=options, workspace=(workspace[0], 1)) == EVALUE
        assert "workspace_bytes is 1" in client.said()

    lists = [(c_interface.Array * 2)(*(array_of(made[n], device=1) for _ in range(2))) for n in ("out", "lse")]
    merged = {"out": on_device(np.zeros(case.out_shape, dtype)), "lse": on_device(np.zeros(wanted_lse.shape, "f4"))}
    arrays = [*lists, None, array_of(merged["out"], device=1), array_of(merged["lse"], device=1)]
    assert client.call("merge", arrays, extra=2) == OK, client.said()
    again = fa_ext.merge([made["out"]] * 2, [made["lse"]] * 2)
    assert fa_ext.to_numpy(merged["out"]).tobytes() == fa_ext.to_numpy(again[0]).tobytes()


@pytest.mark.gpu
def test_the_state_of_dropout_on_a_device(client):
    case = Case(2, 4, 2, 100, 133, 64)
    inputs = {n: on_device(x) for n, x in case.host_inputs().items()}
    out, state = on_device(np.full(case.out_shape, np.nan, "f2")), on_device(words(1, 2, 3, 4, 9)[0])
    arrays = [array_of({**inputs, "out": out}[n], device=1) if n in (*inputs, "out") else None for n in FORWARD]
    address = ctypes.c_void_p(state.__cuda_array_interface__["data"][0])
    assert client.call("forward", arrays, options={"dropout": (0.5, address)}) == OK, client.said()
    wanted = fa_ext.attention(**inputs, dropout=(0.5, 0x123456789ABCDEF0, 7, (1, 2, 3, 4), 9))
    assert fa_ext.to_numpy(out).tobytes() == fa_ext.to_numpy(wanted).tobytes()


@pytest.mark.gpu
def test_a_stream_that_is_none(client):
    case = Case(1, 1, 1, 16, 16, 64)
    held = {n: on_device(x) for n, x in case.host_inputs().items()}
    held["out"] = on_device(np.zeros(case.out_shape, "f2"))
    arrays = [array_of(held[n], device=1) if n in held else None for n in FORWARD]
    assert client.call("forward", arrays, stream=2) == OK, client.said()  # per thread
    fa_ext.to_numpy(held["out"])


def test_the_names_of_gradients():
    assert GRADIENTS == tuple(f"d{name}" for name in gradients.NAMES)
