"""Bad input at the boundary: a clear error that names the argument, nothing written, and never a crash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fa_ext

PACKAGE = Path(fa_ext.__file__).resolve().parent


def operands(dtype=np.float32, shape=(1, 2, 4, 8)):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for _ in range(3)]


def refused(error, match, *arguments, **options):
    """The call raises ``error`` with a message that matches, and leaves ``out`` alone."""
    out = options.get("out")
    before = out.copy() if isinstance(out, np.ndarray) else None
    for call in (fa_ext.attention, fa_ext.explain):
        with pytest.raises(error, match=match):
            call(*arguments, **options)
    if before is not None:
        np.testing.assert_array_equal(out, before)


# ---- arguments ----


def test_arguments():
    q, k, v = operands()
    refused(TypeError, "argument v is missing", q, k)
    refused(TypeError, "4 positional arguments", q, k, v, True)
    refused(TypeError, "unknown argument casual; accepted: .*causal", q, k, v, casual=True)
    refused(TypeError, "argument k was given twice", q, k, v=v, k=k)
    fa_ext.attention(q, v=v, k=k)
    fa_ext.attention(q, k, v, **{"cau" + "sal": True})  # a keyword that is not interned


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"causal": "left"}, ValueError, 'causal is "left".*top_left'),
        ({"causal": 1}, TypeError, "causal has type int"),
        ({"causal": None}, TypeError, "causal has type NoneType"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"scale": float("inf")}, ValueError, "scale is inf"),
        ({"scale": "big"}, TypeError, r"scale has type str; accepted: a finite number, or None for 1/sqrt\(head_dim\)"),
        ({"scale": 10**400}, ValueError, "scale is too large for a float; accepted: a finite number, or None"),
        ({"softcap": "big"}, TypeError, "softcap has type str; accepted: a finite number$"),
        ({"scale": True}, TypeError, "scale has type bool"),
        ({"scale": np.True_}, TypeError, "scale has type bool"),
        ({"softcap": False}, TypeError, "softcap has type bool"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan"),
        ({"softcap": None}, TypeError, "softcap has type NoneType"),
        ({"window": 3}, TypeError, "window has type int"),
        ({"window": (1,)}, ValueError, "window has 1 items"),
        ({"window": (1, 2, 3)}, ValueError, "window has 3 items"),
        ({"window": (-1, 0)}, ValueError, "window's left bound is -1.*None"),
        ({"window": (0, -5)}, ValueError, "window's right bound is -5.*None"),
        ({"window": (-(2**63) - 1, 0)}, ValueError, "window's left bound is -9223372036854775809;"),
        ({"window": (0, -(2**70))}, ValueError, "window's right bound is -1180591620717411303424;"),
        ({"window": (-(10**5000), 0)}, ValueError, "window's left bound is a negative number.*None"),
        ({"window": (0.5, 1)}, TypeError, "window's left bound has type float"),
        ({"window": (True, 1)}, TypeError, "window's left bound has type bool"),
        ({"window": "ab"}, TypeError, "window has type str"),
        ({"layout": "sbhd"}, ValueError, 'layout is "sbhd".*bhsd'),
        ({"layout": 3}, TypeError, "layout has type int"),
        ({"layout": "日" * 60}, ValueError, 'layout is "日.*accepted'),  # cut inside a character
        ({"日": 1}, TypeError, "日"),
        ({"return_lse": "yes"}, TypeError, "return_lse has type str"),
        ({"batch_invariant": 2}, TypeError, "batch_invariant has type int"),
        ({"kernel": "fastest"}, ValueError, r'kernel is "fastest".*cpu_ref'),
        ({"kernel": 3}, TypeError, "kernel has type int"),
        ({"kernel": "cpu_ref\0x"}, ValueError, r'kernel is "cpu_ref\\x00x".*accepted: .*cpu_ref'),
        ({"kernel": "\ud800"}, ValueError, r'kernel is "\\ud800".*accepted: .*cpu_ref'),
        ({"kernel": b"cpu_ref"}, TypeError, "kernel has type bytes"),
        ({"layout": "bhsd\0"}, ValueError, r'layout is "bhsd\\x00".*bshd'),
        ({"layout": "\ud800"}, ValueError, r'layout is "\\ud800".*bshd'),
        ({"causal": "top_left\0"}, ValueError, r'causal is "top_left\\x00".*bottom_right'),
        ({"cau\0sal": True}, TypeError, r"unknown argument cau\\x00sal; accepted"),
        ({"stream": 0}, ValueError, "stream is given, but q is on the CPU"),
        ({"stream": False}, TypeError, "stream has type bool"),
        ({"stream": 1}, ValueError, "stream is given, but q is on the CPU"),
        ({"stream": -1}, ValueError, "stream does not fit"),
        ({"stream": 2**70}, ValueError, "stream does not fit"),
        ({"stream": True}, TypeError, "stream has type bool"),
        ({"stream": "main"}, TypeError, "stream has type str"),
        ({"out": (1, 2, 3)}, ValueError, "out has 3 items"),
        ({"out": (None, None)}, TypeError, "out has type NoneType"),
        ({"out": 5}, TypeError, "out has type int"),
        ({"bias": "x"}, TypeError, "bias has type str"),
        ({"mask": np.ones((4, 4), np.uint8)}, TypeError, "mask has dtype uint8; accepted: bool [^,]*$"),
        ({"bias": np.ones((4, 4), np.int32)}, TypeError, r"bias has dtype int32; accepted: q's dtype \(float32\) or float32$"),
        ({"sinks": np.ones(2, int)}, TypeError, r"sinks has dtype int64; accepted: q's dtype \(float32\) or float32$"),
        ({"out": np.ones((1, 2, 4, 8), int)}, TypeError, "out has dtype int64; accepted: float32$"),
        ({"out": (np.ones((1, 2, 4, 8), "f4"), np.ones((1, 2, 4), int))}, TypeError, "lse has dtype int64; accepted: float32$"),
        ({"mask": np.ones((4, 4), np.float32)}, TypeError, "mask has dtype float32.*bool"),
        ({"mask": np.ones((3, 4), bool)}, ValueError, r"mask has shape \(3, 4\)"),
        ({"bias": np.ones((1, 1, 1, 4, 4), np.float32)}, ValueError, "bias has shape"),
        ({"bias": np.ones((4, 4), np.float64)}, TypeError, "bias has dtype float64"),
        ({"sinks": np.ones(3, np.float32)}, ValueError, r"sinks has shape \(3,\).*\(2,\)"),
        ({"sinks": np.ones((2, 1), np.float32)}, ValueError, "sinks has shape"),
    ],
)
def test_options(options, error, match):
    refused(error, match, *operands(), **options)


def test_stream_objects():
    q, k, v = operands()

    def stream(answer):
        return type("Stream", (), {"__cuda_stream__": lambda self: answer})()

    for answer in [(1, 5), (0, -1), (0, "x"), (0,), 5, None, (0, 2**70), ("0", 1)]:
        refused(ValueError, "ill-formed __cuda_stream__", q, k, v, stream=stream(answer))
    refused(ValueError, "q is on the CPU", q, k, v, stream=stream((0, 7)))

    class Broken:
        def __cuda_stream__(self):
            raise KeyError("mine")

    refused(KeyError, "mine", q, k, v, stream=Broken())


def test_numpy_booleans_and_numbers_are_accepted():
    q, k, v = operands()
    wanted = fa_ext.attention(q, k, v, causal=True, scale=0.5, window=(2, None))
    given = fa_ext.attention(q, k, v, causal=np.True_, scale=np.float32(0.5), window=[np.int64(2), None])
    np.testing.assert_array_equal(given, wanted)
    fa_ext.attention(q, k, v, window=(10**30, 2**63))


class Raises:
    """Its conversions to numbers raise ``error``."""

    def __init__(self, error):
        self.error = error

    def convert(self):
        raise self.error

    __float__ = __index__ = convert


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RuntimeError, ZeroDivisionError])
def test_what_a_conversion_raises_is_raised(error):
    q, k, v = operands()
    value = Raises(error("mine"))
    for options in ({"scale": value}, {"softcap": value}, {"window": (value, 0)}, {"window": (0, value)}):
        refused(error, "mine", q, k, v, **options)
    for call in (lambda: fa_ext.to_device(q, value), lambda: fa_ext._core.time_launches(value, q, k, v),
                 lambda: fa_ext._core.device_info(value)):  # fmt: skip
        with pytest.raises(error, match="mine"):
            call()
    refused(TypeError, "scale has type Raises", q, k, v, scale=Raises(TypeError()))
    refused(TypeError, "window's left bound has type Raises", q, k, v, window=(Raises(TypeError()), 0))


def test_indices():
    q, k, v = operands()
    for call, name in ((lambda x: fa_ext.to_device(q, x), "device"), (fa_ext._core.device_info, "index"),
                       (lambda x: fa_ext._core.time_launches(x, q, k, v), "count")):  # fmt: skip
        for value, shown in ((-1, "-1, out"), (2**70, "out"), (-(2**70), "out")):
            with pytest.raises(ValueError, match=f"{name} is {shown} of range; accepted"):
                call(value)
        for value in ("x", 1.0, None, True):
            with pytest.raises(TypeError, match=f"{name} has type {type(value).__name__}; accepted"):
                call(value)
    assert fa_ext._core.time_launches(np.int64(1), q, k, v) > 0


def test_shapes():
    q, k, v = operands()
    refused(ValueError, "q has 2 dimensions.*accepted: 4, .*or 3, ", q[0, 0], k, v)
    refused(ValueError, "k has 5 dimensions", q, k[None], v)
    refused(ValueError, "v has 0 dimensions", q, k, v[0, 0, 0, 0:1].reshape(()))
    refused(ValueError, "k has batch size 2", q, np.concatenate([k, k]), np.concatenate([v, v]))
    refused(ValueError, "v has shape", q, k, v[:, :, :3])
    refused(ValueError, "head_dim", q, k[..., :7], v)
    refused(ValueError, "q has head_dim 0", q[..., :0], k[..., :0], v)
    wide = np.zeros((1, 1, 2, 257), np.float32)
    refused(ValueError, "q has head_dim 257.*accepted: 1 to 256", wide, wide, wide)
    refused(ValueError, "v has head_dim 257.*accepted: 1 to 256", q, k, np.zeros((1, 2, 4, 257), np.float32))
    refused(ValueError, "v has head_dim 0.*accepted: 1 to 256", q, k, v[..., :0])
    refused(ValueError, "q has 0 heads and k has 2", q[:, :0], k, v)
    refused(ValueError, "q has 2 heads and k has 0", q, k[:, :0], v[:, :0])
    refused(ValueError, "q has 0 heads and k has 4", q[:, :, :0], k, v, layout="bshd")
    refused(ValueError, "q has 4 heads and k has 0", q, k[:, :, :0], v[:, :, :0], layout="bshd")
    assert fa_ext.attention(q[:, :0], k[:, :0], v[:, :0]).shape == (1, 0, 4, 8)
    three = np.zeros((1, 3, 4, 8), np.float32)
    refused(ValueError, "3 heads and k has 2", three, k, v)
    refused(ValueError, "causal=True with seq_q 3 and seq_k 4.*top_left.*bottom_right", q[:, :, :3], k, v, causal=True)


def test_what_has_no_batch_axis():
    q, k, v = operands()
    accepted = "accepted: 4 axes, the first of them batch, of 1 for a single entry"
    refused(ValueError, rf"q has shape \(2, 4, 8\) and there is no cu_seqlens_k; {accepted}", q[0], k[0], v[0])
    refused(ValueError, rf"k has shape \(2, 4, 8\) and there is no cu_seqlens_k; {accepted}", q, k[0], v[0])
    refused(ValueError, rf"q has shape \(2, 4, 8\) .* accepted: packed q with cu_seqlens_q, or {accepted[10:]}", q[0], k, v)
    lse = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=rf"q has shape \(2, 4, 8\) and there is no cu_seqlens_k; {accepted}"):
        fa_ext.attention_backward(q[0], q[0], k[0], v[0], q[0], lse)


class Matrix:
    """A sparse matrix, as SciPy's are to those who look: a shape and a dtype, but no protocol of arrays."""

    shape, dtype = (4, 4), np.dtype(bool)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "sinks", "alibi", "out", "seqlens_k", "page_table", "workspace"])
def test_what_is_no_array(name):
    given = dict(zip("qkv", operands())) | {name: Matrix()}
    refused(TypeError, f"^{name} has type Matrix; accepted: an array: NumPy, or an object with ", **given)


def test_dtypes():
    q, k, v = operands()
    for dtype in ("int32", "uint8", "complex64", "object", "S4", "M8[s]", "longdouble", "V2"):
        refused(TypeError, "q has dtype", np.zeros(q.shape, dtype), k, v)
    refused(TypeError, "k has dtype float64, but q has float32", q, k.astype(np.float64), v)
    refused(TypeError, "v has dtype float16, but q has float32", q, k, v.astype(np.float16))
    refused(TypeError, "q has dtype bool", q > 0, k, v)
    refused(TypeError, "v has dtype bool", q, k, v > 0)
    refused(BufferError, "q is big-endian", q.astype(">f4"), k, v)
    refused(TypeError, "v is a masked array", q, k, np.ma.masked_array(v))
    refused(TypeError, "q has type list", q.tolist(), k, v)
    refused(TypeError, "k has type NoneType", q, None, v)


def test_memory():
    q, k, v = operands()
    raw = np.zeros(q.nbytes + 1, np.uint8)
    refused(BufferError, "q is not aligned", raw[1:].view(np.float32).reshape(q.shape), k, v)
    record = np.zeros(q.shape, np.dtype([("a", "f4"), ("b", "u1")]))
    refused(BufferError, "q has a stride of 5 bytes", record["a"], k, v)


def test_outputs():
    q, k, v = operands()
    out = np.zeros_like(q)
    refused(ValueError, "out has shape", q, k, v, out=out[:, :, :2])
    refused(TypeError, "out has dtype float64; accepted: float32", q, k, v, out=out.astype(np.float64))
    for target, name in ((q, "q"), (k, "k"), (v, "v")):
        refused(ValueError, f"out overlaps {name}", q, k, v, out=target)
    both = np.zeros((2, *q.shape), np.float32)
    refused(ValueError, "out overlaps q", both[0], k, v, out=both.reshape(-1)[8:72].reshape(q.shape))
    out.flags.writeable = False
    refused(ValueError, "out is read-only", q, k, v, out=out)
    refused(ValueError, "read-only|distinct", q, k, v, out=np.broadcast_to(np.float32(0), q.shape))
    flat = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), q.shape, (0, 0, 0, 4))
    refused(ValueError, r"out has strides \(.*\); its elements must be distinct", q, k, v, out=flat)
    rows_that_meet = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), q.shape, (128, 64, 8, 4))
    refused(ValueError, r"out has strides \(32, 16, 2, 1\); its elements must be distinct", q, k, v, out=rows_that_meet)
    out = np.zeros_like(q)
    for lse, error, match in [
        (np.zeros((1, 2, 3), np.float32), ValueError, "lse has shape"),
        (np.zeros((1, 2, 4), np.float64), TypeError, "lse has dtype"),
        (flat[..., 0], ValueError, r"lse has strides \(0, 0, 0\); its elements must be distinct"),
        (out.reshape(-1)[:8].reshape(1, 2, 4), ValueError, "lse overlaps out"),
    ]:
        refused(error, match, q, k, v, out=(out, lse))


def bytes_of(out, count, dtype, at=0):
    """``count`` elements that lie in the memory of ``out``, from its byte ``at`` on."""
    size = np.dtype(dtype).itemsize
    return out.view(np.uint8).reshape(-1)[at : at + count * size].view(dtype)


def test_outputs_that_overlap_a_bias_a_mask_or_sinks():
    q, k, v = operands()
    out, lse = np.zeros_like(q), np.zeros((1, 2, 4), np.float32)
    for target, result, last in ((out, out, out.nbytes), (lse, (out, lse), lse.nbytes)):
        name = "out" if target is out else "lse"
        for at in (0, last - 4):  # the first bytes; the last alone
            bias = bytes_of(target, 1, np.float32, at).reshape(1, 1)
            mask = bytes_of(target, 4, bool, at).reshape(1, 4)
            sinks = np.lib.stride_tricks.as_strided(bytes_of(target, 1, np.float32, at), (2,), (0,))
            refused(ValueError, f"{name} overlaps bias", q, k, v, bias=bias, out=result)
            refused(ValueError, f"{name} overlaps mask", q, k, v, mask=mask, out=result)
            refused(ValueError, f"{name} overlaps sinks", q, k, v, sinks=sinks, out=result)
    whole = np.zeros(64 + 16, np.float32)  # side by side is apart
    fa_ext.attention(q, k, v, bias=whole[64:].reshape(4, 4), out=whole[:64].reshape(q.shape))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_outputs_that_overlap_an_input_with_negative_strides(name):
    """64 elements each in memory of 128; what is reversed begins at its end."""
    arrays = dict(zip("qkv", operands()))
    shape = arrays["q"].shape
    memory = np.zeros(128, np.float32)
    for target, given in [
        (memory[32:96], memory[127:63:-1]),
        (memory[:64], memory[126:62:-1]),  # one element
        (memory[95:31:-1], memory[64:]),
        (memory[64:0:-1], memory[63::-1]),
        (memory[64:0:-1], memory[64:]),  # one element
    ]:
        changed = arrays | {name: given.reshape(shape)}
        assert np.shares_memory(changed[name], memory)
        refused(ValueError, f"out overlaps {name}", **changed, out=target.reshape(shape))
    for target, given in [(memory[:64], memory[127:63:-1]), (memory[127:63:-1], memory[:64])]:  # apart
        arrays[name] = given.reshape(shape)
        fa_ext.attention(**arrays, out=target.reshape(shape))


def test_forced_kernel(monkeypatch):
    q, k, v = operands()
    name = "cpu_ref"
    monkeypatch.setenv("FA_EXT_KERNEL", name)
    assert fa_ext.explain(q, k, v)[0] == name
    monkeypatch.setenv("FA_EXT_KERNEL", "nothing")
    refused(ValueError, 'FA_EXT_KERNEL is "nothing"', q, k, v)
    assert fa_ext.explain(q, k, v, kernel=name)[0] == name  # the argument goes first
    monkeypatch.setenv("FA_EXT_KERNEL", "")
    fa_ext.attention(q, k, v)
    monkeypatch.delenv("FA_EXT_KERNEL")
    for kernel in fa_ext.kernels():
        if fa_ext._core.build_info()["kernels"][kernel][0] == "cuda":
            with pytest.raises(fa_ext.UnsupportedError, match=f'kernel "{kernel}".*on the CPU'):
                fa_ext.attention(q, k, v, kernel=kernel)


# ---- kernels loaded at run time ----


def test_load(tmp_path):
    core = fa_ext._core
    for missing in (tmp_path / "nowhere.so", "nowhere.so", "libm.so.6"):  # never what the library path has
        with pytest.raises(ValueError, match=f"path: {missing}: No such file"):
            core.load(missing)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ValueError, match="path"):
        core.load(os.fspath(tmp_path / "text.so"))
    with pytest.raises(ValueError, match="does not export fa_kernel__core"):
        core.load(core.__file__)
    for arguments in [(), (1,), (core.__file__, 3), (core.__file__, "a", "b")]:
        with pytest.raises(TypeError):
            core.load(*arguments)
    for kernel in ("cpu_ref\0x", "\ud800"):
        with pytest.raises(ValueError, match=r"does not export fa_kernel_(cpu_ref\\x00x|\\ud800)"):
            core.load(core.__file__, kernel=kernel)
    with pytest.raises(TypeError, match="unknown argument name; accepted: path, kernel"):
        core.load(core.__file__, name="x")


def test_load_a_kernel(tmp_path, monkeypatch):
    """A kernel that was built alone runs beside the build's own kernel of the same name, and only when it is forced."""
    if not (PACKAGE.parent / "csrc").is_dir() or not shutil.which("gcc"):
        pytest.skip("the sources, or a compiler, are not here")
    library = tmp_path / "cpu_ref.v1.so"
    script = [sys.executable, os.fspath(PACKAGE / "_build.py"), "cpu_ref", "-o", os.fspath(library)]
    built = subprocess.run(script, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    before = fa_ext.kernels()
    name = fa_ext._core.load(library)
    assert name.startswith("cpu_ref@") and fa_ext._core.load(library) == name
    assert fa_ext._core.load(library, kernel="cpu_ref") == name
    monkeypatch.chdir(tmp_path)
    assert fa_ext._core.load(library.name) == fa_ext._core.load(f"./{library.name}") == name
    assert fa_ext.kernels() == before and fa_ext._core.loaded()[name][0] == os.fspath(library)
    q, k, v = operands()
    np.testing.assert_array_equal(fa_ext.attention(q, k, v, kernel=name), fa_ext.attention(q, k, v, kernel="cpu_ref"))
    chosen, reasons = fa_ext.explain(q, k, v, kernel=name)
    assert chosen == name and set(reasons) == set(before)
    assert fa_ext.explain(q, k, v)[0] != name
    with pytest.raises(ValueError, match=name):
        fa_ext.attention(q, k, v, kernel="nothing")


# ---- the environment ----


@pytest.mark.parametrize("given", ["banana", "0", "-5", "+5", " 7", "12MB", "1e3", "16777217", "9" * 30])
def test_a_bad_bound_of_the_workspace(given):
    code = """
import numpy as np, fa_ext
q = np.zeros((1, 1, 4, 8), np.float32)
for call in (fa_ext.attention, fa_ext.explain, fa_ext.verify):
    try:
        call(q, q, q)
    except ValueError as error:
        print(error)
"""
    environment = os.environ | {"FA_EXT_WORKSPACE_MB": given, "PYTHONPATH": os.fspath(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    line = f'FA_EXT_WORKSPACE_MB was "{given}" when fa_ext was imported; accepted: megabytes, 1 to 16777216'
    assert done.stdout.splitlines() == [line] * 3, done.stderr
    shown = subprocess.run([sys.executable, "-m", "fa_ext"], capture_output=True, text=True, env=environment)
    assert shown.returncode == 1 and shown.stderr.splitlines() == [f"fa_ext: {line}"]


@pytest.mark.parametrize(("given", "megabytes"), [("", 512), ("1", 1), ("2048", 2048), ("16777216", 1 << 24)])
def test_the_bound_of_the_workspace(given, megabytes):
    code = "import fa_ext; print(fa_ext._core.cpu_info()['workspace_limit'])"
    environment = os.environ | {"FA_EXT_WORKSPACE_MB": given, "PYTHONPATH": os.fspath(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(megabytes << 20), done.stderr


def test_time_launches():
    q, k, v = operands()
    assert 0 < fa_ext._core.time_launches(3, q, k, v, causal=True) < 1
    for count in (0, -1):
        with pytest.raises(ValueError, match="count"):
            fa_ext._core.time_launches(count, q, k, v)
    with pytest.raises(TypeError):
        fa_ext._core.time_launches("x", q, k, v)
    with pytest.raises(ValueError, match="count"):
        fa_ext._core.time_launches()
