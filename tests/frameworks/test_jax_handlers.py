"""The handlers of XLA's typed FFI by themselves: what they answer to call frames that are built here, without XLA; and what
``import fa_ext.jax`` says where JAX is not what it needs."""

import ctypes
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from fa_ext import _core
from tests.contract import runner
from tests.frameworks.support.jax_support import ROOT, alone

pytestmark = pytest.mark.native

EXECUTE, METADATA = 3, 1
PRED, U8, S32, S64, F16, F32, F64 = 1, 6, 4, 5, 10, 11, 12
BUFFER, SCALAR, STRING = 1, 3, 4
CODES = {np.dtype("f2"): F16, np.dtype("f4"): F32, np.dtype("f8"): F64, np.dtype(bool): PRED, np.dtype("u1"): U8,
         np.dtype("i4"): S32, np.dtype("i8"): S64}  # fmt: skip


class Base(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class Version(Base):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32), ("later", ctypes.c_uint8 * 64)]


class Extension(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p), ("metadata", ctypes.POINTER(Metadata))]


class Buffer(Base):
    _fields_ = [("dtype", ctypes.c_int), ("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64))]


class Buffers(Base):
    _fields_ = [("count", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)), ("items", ctypes.POINTER(ctypes.c_void_p))]


class Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.c_void_p)]


class Attributes(Base):
    _fields_ = [("count", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
                ("names", ctypes.POINTER(ctypes.POINTER(Span))), ("items", ctypes.POINTER(ctypes.c_void_p))]  # fmt: skip


class Error(Base):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


MAKE_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Error))


class Api(Base):
    _fields_ = [("version", Version), ("internal", ctypes.c_void_p), ("error_create", MAKE_ERROR),
                ("unused", ctypes.c_void_p * 3), ("stream_get", ctypes.c_void_p)]  # fmt: skip


class Frame(Base):
    _fields_ = [("api", ctypes.POINTER(Api)), ("context", ctypes.c_void_p), ("stage", ctypes.c_int), ("arguments", Buffers),
                ("results", Buffers), ("attributes", Attributes), ("future", ctypes.c_void_p)]  # fmt: skip


def handler(name):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = get(getattr(_core, name), b"xla._CUSTOM_CALL_TARGET")
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))(pointer)


HANDLERS = ["xla_nothing", *(f"xla_attention{kind}_{platform}" for kind in ("", "_backward") for platform in ("cpu", "cuda"))]


class Call:
    """A call frame over NumPy arrays. Keeps alive what it points to; ``errors`` collects (code, message)."""

    def __init__(self, arguments, results, attributes):
        self.errors, self.kept = [], []
        self.api = Api(size=ctypes.sizeof(Api), version=Version(24, None, 0, 3), error_create=MAKE_ERROR(self.fail))
        self.frame = Frame(size=168, api=ctypes.pointer(self.api), stage=EXECUTE, arguments=self.buffers(arguments),
                           results=self.buffers(results), attributes=self.attributes(attributes))  # fmt: skip

    def fail(self, error):
        self.errors.append((error.contents.code, error.contents.message.decode()))
        return 1  # an opaque pointer that is not NULL

    def keep(self, x):
        self.kept.append(x)
        return x

    def buffers(self, arrays):
        held = [self.keep(Buffer(48, None, CODES[x.dtype], x.ctypes.data, x.ndim, (ctypes.c_int64 * x.ndim)(*x.shape))) for x in arrays]
        types = (ctypes.c_int * len(held))(*[BUFFER] * len(held))
        items = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        return Buffers(40, None, len(held), types, items)

    def attributes(self, given):
        types, names, items = [], [], []
        for name, value in sorted(given.items()):
            text = name.encode()
            names.append(ctypes.pointer(self.keep(Span(text, len(text)))))
            if isinstance(value, str):
                types.append(STRING)
                items.append(ctypes.addressof(self.keep(Span(value.encode(), len(value)))))
            else:
                memory = self.keep(np.array(value))
                types.append(SCALAR)
                items.append(ctypes.addressof(self.keep(Scalar(CODES[memory.dtype], memory.ctypes.data))))
        n = len(types)
        return Attributes(48, None, n, (ctypes.c_int * n)(*types), (ctypes.POINTER(Span) * n)(*names), (ctypes.c_void_p * n)(*items))

    def run(self, name="xla_attention_cpu"):
        """None, or (code, message)."""
        returned = handler(name)(ctypes.byref(self.frame))
        assert bool(returned) == bool(self.errors)
        return self.errors.pop() if self.errors else None


def bits(*names):
    return np.int32(sum(1 << operand.number for operand in _core.operands() if operand.name in names))


def attributes(**changed):
    known = {"given": 0, "options_given": 0, "causal": 0, "layout": 0, "batch_invariant": 0}
    made = {n: np.int32(x) for n, x in known.items()}
    made |= {"scale": np.float64(0), "softcap": np.float64(0), "window_left": np.int64(0), "window_right": np.int64(0)}
    made |= {"max_seqlen_q": np.int64(0), "dropout": np.float64(0), "kernel": ""}
    return made | changed


def simple():
    inputs = Case(1, 2, 1, 5, 7, 8, dtype="float32").host_inputs()
    out, lse = (np.full_like(x, np.nan) for x in fa_ext.attention(**inputs, return_lse=True))
    return inputs, out, lse, np.empty(0, np.uint8)


# ---- the handshake ----


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize("running, answer", [(None, 1), (1, 1), (2, 2), (3, 3), (5, 5), (9, 5)])
def test_a_handler_says_which_api_it_was_written_for(name, running, answer):
    """The one that is running, as long as its fields are known to be where they are; writes nothing beyond what it knows."""
    metadata = Metadata(size=48, traits=7)
    ctypes.memset(metadata.later, 0xAB, 64)
    extension = Extension(24, METADATA, None, ctypes.pointer(metadata))
    frame = Frame(size=168, extension=ctypes.cast(ctypes.pointer(extension), ctypes.c_void_p))
    api = Api(version=Version(24, None, 0, running or 0))
    if running is not None:
        frame.api = ctypes.pointer(api)
    assert handler(name)(ctypes.byref(frame)) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, answer, 1)
    assert metadata.size == 48 and bytes(metadata.later) == b"\xab" * 64


def test_jax_refuses_a_version_in_these_words():
    """The message to a user of a JAX that fa_ext is too old, or too new, for: the reason for the handshake."""
    pytest.importorskip("jax")
    said = alone(
        """
        import ctypes, jax
        jax.devices()
        from tests.frameworks.test_jax_handlers import Extension, Frame
        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))
        def handler(frame):
            found = ctypes.cast(frame.contents.extension, ctypes.POINTER(Extension)).contents.metadata.contents
            found.version.major, found.version.minor = 0, 99
        try:
            jax.ffi.register_ffi_target("from_the_future", jax.ffi.pycapsule(handler), platform="cpu")
        except Exception as error:
            print(error)
        """.replace("\n        ", "\n")
    )
    assert "API version (0.99) is incompatible with the framework's API version" in said


# ---- call frames ----


def test_forward():
    inputs, out, lse, scratch = simple()
    call = Call([inputs[n] for n in "qkv"], [out, lse, scratch], attributes(causal=np.int32(3)))
    assert call.run() is None
    wanted, wanted_lse = fa_ext.attention(**inputs, causal="bottom_right", return_lse=True)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_do_nothing(stage):
    inputs, out, lse, scratch = simple()
    call = Call([inputs[n] for n in "qkv"], [out, lse, scratch], attributes())
    call.frame.stage = stage
    assert call.run() is None and np.isnan(out).all()


@pytest.mark.parametrize("name", sorted(attributes()))
def test_an_attribute_is_missing(name):
    inputs, out, lse, scratch = simple()
    given = {n: x for n, x in attributes().items() if n != name}
    code, text = Call([inputs[n] for n in "qkv"], [out, lse, scratch], given).run()
    assert code == 3 and text.startswith(f"fa_ext: attribute {name} is missing")
    if name != "kernel":
        wrong = given | {name: np.float32(0)}
        assert f"attribute {name} is missing, or not of" in Call([inputs[n] for n in "qkv"], [out, lse, scratch], wrong).run()[1]
    assert np.isnan(out).all()


def test_operands_and_results_are_missing():
    inputs, out, lse, scratch = simple()
    for count in range(3):
        assert Call([inputs[n] for n in "qkv"[:count]], [out, lse, scratch], attributes()).run() == (
            3, f"fa_ext: operand {count} is missing, or no array")  # fmt: skip
    assert Call([inputs[n] for n in "qkv"], [], attributes()).run() == (3, "fa_ext: result 0 is missing, or no array")
    said = attributes(given=bits("bias"))
    assert Call([inputs[n] for n in "qkv"], [out, scratch], said).run() == (3, "fa_ext: operand 3 is missing, or no array")
    assert np.isnan(out).all()


def test_the_words_and_codes_of_the_library():
    inputs, out, lse, scratch = simple()
    arrays = [inputs[n] for n in "qkv"]
    found = Call([arrays[0], arrays[1][:, :, :6].copy(), arrays[2]], [out, lse, scratch], attributes()).run()
    assert found == (3, "fa_ext: v has shape (1, 1, 7, 8), but k has shape (1, 1, 6, 8); batch, heads_kv and seq_k must be the same")
    code, text = Call([*arrays[:2], arrays[2].astype("i8")], [out, lse, scratch], attributes()).run()
    assert code == 3 and text.startswith("fa_ext: v.dtype is 0")
    code, text = Call(arrays, [out, lse, scratch], attributes(kernel="none")).run()
    assert code == 3 and text.startswith('fa_ext: kernel is "none", which names no kernel')
    code, text = Call(arrays, [out, lse, scratch], attributes(kernel="n" * 200)).run()
    assert code == 3 and "attribute kernel is missing or too long" in text
    for kernel in fa_ext.kernels():
        if runner.device_of(kernel) == "cuda":
            code, text = Call(arrays, [out, lse, scratch], attributes(kernel=kernel)).run()
            assert code == 12 and text.startswith(f'fa_ext: kernel "{kernel}" cannot take this call')
    assert np.isnan(out).all()


def test_backward():
    inputs, out, lse, scratch = simple()
    out, lse = fa_ext.attention(**inputs, return_lse=True)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype("f4")
    wanted = fa_ext.attention_backward(dout, **inputs, out=out, lse=lse, wrt=("q", "v"))
    results = [np.full_like(x, np.nan) for x in wanted]
    more = dict(given=bits("dout"), wants=np.int32(5), unordered=np.int32(0))
    arrays = [*(inputs[n] for n in "qkv"), out, lse, dout]
    assert Call(arrays, [*results, scratch], attributes(**more)).run("xla_attention_backward_cpu") is None
    for found, x in zip(results, wanted):
        np.testing.assert_array_equal(found, x)
    for name in ("wants", "unordered"):
        given = {n: x for n, x in attributes(**more).items() if n != name}
        assert f"attribute {name} is missing" in Call(arrays, [*results, scratch], given).run("xla_attention_backward_cpu")[1]
    none = attributes(**more | {"wants": np.int32(0)})
    assert "accepted: at least one array" in Call(arrays, [scratch], none).run("xla_attention_backward_cpu")[1]


def test_index_arrays_follow_in_the_order_of_their_lines():
    inputs = Case(1, 2, 1, 5, 5, 8, dtype="float32").host_inputs()
    q, k, v = (inputs[n][0].swapaxes(0, 1).copy() for n in "qkv")
    indices = {"cu_seqlens_q": np.array([0, 2, 5], "i4"), "seqlens_q": np.array([1, 3], "i4"), "cu_seqlens_k": np.array([0, 4, 5], "i4"),
               "seqlens_k": np.array([3, 1], "i4"), "positions": np.array([1, 0, 0, 1, 2], "i4")}  # fmt: skip
    k_range = np.array([1, 0], "i4"), np.array([3, 1], "i4")
    given = indices | {"k_range": k_range}
    in_order = [*list(indices.values())[:4], *k_range, indices["positions"]]
    names = bits(*indices, "k_range_begin", "k_range_end")
    wanted = fa_ext.attention(q, k, v, **given, return_lse=True)
    results = [np.full_like(x, np.nan) for x in wanted]
    scratch = np.empty(0, np.uint8)
    assert Call([q, k, v, *in_order], [*results, scratch], attributes(given=names)).run() is None
    dout = np.random.default_rng(1).standard_normal(q.shape).astype("f4")
    gradients = fa_ext.attention_backward(dout, q, k, v, *wanted, **given)
    found = [np.full_like(x, np.nan) for x in gradients]
    more = dict(given=names | bits("dout"), wants=np.int32(7), unordered=np.int32(0))
    assert Call([q, k, v, *wanted, dout, *in_order], [*found, scratch], attributes(**more)).run("xla_attention_backward_cpu") is None
    for a, b in zip([*results, *found], [*wanted, *gradients], strict=True):
        np.testing.assert_array_equal(a, b)
    wide, late = in_order[0].astype("i8"), np.array([0, 2, 6], "i4")
    for x, text in ((wide, "cu_seqlens_q.dtype is 0"), (late, "cu_seqlens_q[2] is 6, which is below an earlier one, or outside the rows")):
        results = [np.full_like(x, np.nan) for x in wanted]
        code, said = Call([q, k, v, x, *in_order[1:]], [*results, scratch], attributes(given=names)).run()
        assert code == 3 and said.startswith(f"fa_ext: {text}") and all(np.isnan(x).all() for x in results)


def test_an_error_of_the_stream_is_handed_on():
    """The handler for CUDA asks XLA for its stream first; an error of XLA's is returned as it is."""
    inputs, out, lse, scratch = simple()
    call = Call([inputs[n] for n in "qkv"], [out, lse, scratch], attributes())
    asked = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def stream(arguments):
        asked.append(arguments)
        return 77

    call.api.stream_get = ctypes.cast(stream, ctypes.c_void_p)
    assert handler("xla_attention_cuda")(ctypes.byref(call.frame)) == 77 and len(asked) == 1
    assert np.isnan(out).all() and not call.errors


def test_results_without_elements_need_no_device():
    inputs = Case(1, 2, 1, 0, 7, 8, dtype="float32").host_inputs()
    out, lse = fa_ext.attention(**inputs, return_lse=True)
    call = Call([inputs[n] for n in "qkv"], [out, lse, np.empty(0, np.uint8)], attributes())
    stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    call.api.stream_get = ctypes.cast(stream, ctypes.c_void_p)
    assert call.run("xla_attention_cuda") is None


def test_the_cuda_handler_on_host_memory():
    """A build without CUDA, or memory that CUDA does not know: an error in words."""
    inputs, out, lse, scratch = simple()
    call = Call([inputs[n] for n in "qkv"], [out, lse, scratch], attributes())
    stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    call.api.stream_get = ctypes.cast(stream, ctypes.c_void_p)
    code, text = call.run("xla_attention_cuda")
    assert code in (3, 13) and text.startswith("fa_ext: ")
    assert np.isnan(out).all()


def test_the_handler_that_does_nothing():
    inputs, out, lse, scratch = simple()
    assert Call([inputs[n] for n in "qkv"], [out, lse, scratch], {}).run("xla_nothing") is None
    assert np.isnan(out).all() and np.isnan(lse).all()


# ---- workspace at trace time ----


def test_workspace_of_the_cpu_is_what_the_plan_has():
    case = Case(2, 4, 2, 100, 133, 64, dtype="float32")
    inputs = case.host_inputs()
    arrays = {n: (x.dtype.name, x.shape) for n, x in inputs.items()} | {"out": ("float32", inputs["q"].shape)}
    options = (0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0)
    plan = _core.answers(**inputs)[fa_ext.explain(**inputs)[0]][2]
    assert _core.xla_workspace(False, -1, arrays, options, "") >= plan["workspace_bytes"] > 0
    with pytest.raises(ValueError, match="names no kernel of this build"):
        _core.xla_workspace(False, -1, arrays, options, "none")
    with pytest.raises(ValueError, match="arrays has 1 names that the operation does not know"):
        _core.xla_workspace(False, -1, arrays | {"dq": arrays["q"]}, options, "")
    with pytest.raises(TypeError, match="dtype int8 is not accepted"):
        _core.xla_workspace(False, -1, arrays | {"q": ("int8", (1, 1, 1, 1))}, options, "")
    with pytest.raises(TypeError, match="an item of arrays has type int; accepted: \\(dtype, shape\\)"):
        _core.xla_workspace(False, -1, arrays | {"q": 1}, options, "")
    if not _core.build_info()["cuda"]:
        with pytest.raises(fa_ext.CudaError):
            _core.xla_workspace(False, 0, arrays, options, "")


# ---- the import ----


def python(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)


def test_without_jax_the_module_says_what_to_install():
    done = python("""
        import sys
        sys.modules["jax"] = None
        import fa_ext
        try:
            import fa_ext.jax
        except ImportError as error:
            print(error, error.name)
    """)
    assert done.stdout == (
        "fa_ext.jax needs jax and jaxlib 0.5.0 or newer, and there is no jax here; run pip install 'fa_ext[jax]', or install jax "
        "with CUDA first (pip install 'jax[cuda13]') jax\n"
    ), done.stderr


def test_an_old_jax_is_named():
    done = python("""
        import sys, types
        sys.modules["jax"] = types.SimpleNamespace(__version__="0.4.35", __version_info__=(0, 4, 35))
        try:
            import fa_ext.jax
        except ImportError as error:
            print(error)
    """)
    assert "needs jax and jaxlib 0.5.0 or newer, but jax here is 0.4.35; run pip install" in done.stdout, done.stderr


def test_an_error_of_jax_itself_is_not_hidden(tmp_path):
    (tmp_path / "jax.py").write_text("import nothing_of_this_name")
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fa_ext.jax")
    assert "No module named 'nothing_of_this_name'" in done.stderr and "fa_ext.jax needs" not in done.stderr


def test_importing_fa_ext_imports_no_jax():
    done = python("import sys, fa_ext; print('jax' in sys.modules, 'fa_ext.jax' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr
