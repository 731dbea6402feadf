"""``fa_ext.DeviceArray``, the array of results whose library has no allocator, and of ``to_device``: what it is to others."""

import array as standard
import ctypes
import gc
import sys

import numpy as np
import pytest

import fa_ext
from tests.arrays import producers
from tests.arrays.producers import Producer

SHAPE = (2, 4, 9, 16)
FORMATS = {"float16": "e", "bfloat16": None, "float32": "f", "float64": "d"}


def operands(dtype="float32", shape=SHAPE):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for _ in range(3)]


def own(dtype="float32", shape=SHAPE):
    """(an array of ours on the CPU, the NumPy array with the same elements)."""
    q, k, v = operands(dtype, shape)
    return fa_ext.attention(Producer(q), k, v), fa_ext.attention(q, k, v)


def test_device_array_on_the_cpu():
    q, k, v = operands()
    out = fa_ext.attention(Producer(q), k, v)
    taken = np.from_dlpack(out)
    wanted = fa_ext.attention(q, k, v)
    assert out.__dlpack_device__() == (producers.CPU, 0)
    assert (out.dtype, out.ndim, out.nbytes, out.device) == ("float32", 4, wanted.nbytes, "cpu")
    assert repr(out) == "<fa_ext.DeviceArray float32 (2, 4, 9, 16) on cpu>"
    del out
    gc.collect()
    np.testing.assert_array_equal(taken, wanted)
    again = fa_ext.attention(Producer(q), k, v)
    assert isinstance(fa_ext.attention(again, k, v), fa_ext.DeviceArray)
    for keywords, error in [
        ({"stream": 1}, BufferError),
        ({"copy": True}, BufferError),
        ({"dl_device": (2, 0)}, BufferError),
        ({"max_version": "1.0"}, TypeError),
        ({"unknown": 1}, TypeError),
    ]:
        with pytest.raises(error):
            again.__dlpack__(**keywords)
    references = sys.getrefcount(again)
    for version in (None, (1, 0)):  # a capsule that nobody takes lets go of the array
        again.__dlpack__(max_version=version)
    assert sys.getrefcount(again) == references
    assert producers.name_of(again.__dlpack__()) == "dltensor"
    assert producers.name_of(again.__dlpack__(max_version=(1, 0))) == "dltensor_versioned"
    with pytest.raises(AttributeError):
        again.__cuda_array_interface__  # noqa: B018
    with pytest.raises(TypeError):
        fa_ext.DeviceArray()


# ---- NumPy and buffers ----


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", FORMATS)
def test_numpy_reads_it_without_a_copy(dtype):
    made, wanted = own(dtype)
    seen = np.asarray(made)
    assert type(seen) is np.ndarray and seen.shape == SHAPE and seen.dtype == wanted.dtype and seen.flags.c_contiguous
    assert address(seen) == address(np.asarray(made)) == address(made.__array__())
    copies = [np.array(made), np.array(made, copy=True), made.__array__(copy=True), made.__array__(None, True)]
    assert address(seen) not in map(address, copies)
    references = sys.getrefcount(made)
    more = [made.__array__(), made.__array__(wanted.dtype, copy=False), made.__array__(dtype=wanted.dtype)]
    assert sys.getrefcount(made) == references + 3 and all(address(x) == address(seen) for x in more)
    for array in (seen, *copies, *more):
        np.testing.assert_array_equal(array.astype(np.float64), wanted.astype(np.float64))
    more[0][0, 0, 0, 0] = 7
    assert seen[0, 0, 0, 0] == 7 and fa_ext.to_numpy(made)[0, 0, 0, 0] == 7
    del made, more
    gc.collect()
    assert seen[0, 0, 0, 0] == 7 and np.isfinite(seen.astype(np.float64)).all()


def test_numpy_converts_it():
    made, wanted = own()
    for seen in (np.asarray(made, dtype=np.float64), made.__array__(np.float64), np.array(made, "f8")):
        assert seen.dtype == np.float64
        np.testing.assert_array_equal(seen, wanted)
    for call in (lambda: made.__array__("f8", copy=False), lambda: np.asarray(made, dtype="f8", copy=False)):
        with pytest.raises(ValueError, match="copy"):
            call()
    with pytest.raises(TypeError):
        made.__array__("no such dtype")
    with pytest.raises(TypeError):
        made.__array__(other=1)


@pytest.mark.parametrize("dtype", FORMATS)
def test_buffers(dtype):
    made, wanted = own(dtype)
    if FORMATS[dtype] is None:
        with pytest.raises(BufferError, match="no format for bfloat16"):
            memoryview(made)
        assert np.asarray(made).tobytes() == wanted.tobytes()
        return
    view = memoryview(made)
    assert (view.format, view.shape, view.strides) == (FORMATS[dtype], SHAPE, wanted.strides)
    assert (view.itemsize, view.nbytes, view.readonly, view.c_contiguous) == (wanted.itemsize, made.nbytes, False, True)
    assert view.tobytes() == bytes(made) == wanted.tobytes()
    np.testing.assert_array_equal(np.frombuffer(made, dtype), wanted.reshape(-1))
    view.release()
    raw = (ctypes.c_char * made.nbytes).from_buffer(made)  # asks for no format, no shape
    assert bytes(raw) == wanted.tobytes()


def test_buffers_into_it():
    """Reading from a file descriptor, or copying bytes, writes into it as into any buffer."""
    made, wanted = own()
    memoryview(made).cast("B")[:] = np.full_like(wanted, 3).tobytes()
    assert (np.asarray(made) == 3).all()
    assert standard.array("f", bytes(made)).count(3.0) == wanted.size


def test_orders_of_axes():
    from_object = ctypes.pythonapi.PyObject_GetBuffer
    from_object.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    release = ctypes.pythonapi.PyBuffer_Release
    release.argtypes = [ctypes.c_void_p]
    space = ctypes.create_string_buffer(256)
    c_order, f_order, any_order = 0x38, 0x58, 0x98
    row, _ = own(shape=(1, 1, 1, 16))
    empty, _ = own(shape=(0, 2, 3, 16))
    for array, f_ordered in ((own()[0], False), (row, True), (empty, True)):
        references = sys.getrefcount(array)
        for flags, fits in ((0, True), (c_order, True), (any_order, True), (f_order, f_ordered)):
            if fits:
                from_object(array, space, flags)
                release(space)
                continue
            with pytest.raises(BufferError, match="not Fortran-contiguous"):
                from_object(array, space, flags)
        assert sys.getrefcount(array) == references


def test_an_empty_one():
    made, wanted = own(shape=(0, 2, 3, 16))
    assert np.asarray(made).shape == made.__array__().shape == wanted.shape and bytes(made) == b""
    assert memoryview(made).shape == wanted.shape


# ---- on a device ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FORMATS, "bool"])
def test_numpy_does_not_read_a_device(dtype):
    made = fa_ext.to_device(operands(dtype)[0])
    for call in (np.asarray, np.array, lambda x: x.__array__(), lambda x: x.__array__(copy=False)):
        with pytest.raises(TypeError, match=r"CUDA device 0; fa_ext\.to_numpy"):
            call(made)
    with pytest.raises(BufferError, match=r"CUDA device 0; fa_ext\.to_numpy"):
        memoryview(made)


@pytest.mark.gpu
def test_stream_0_is_the_legacy_stream():
    """The call waits for what the default stream holds, though no library of its arrays tells of that stream."""
    torch = pytest.importorskip("torch")
    host = operands("float16", (2, 4, 33, 64))
    sources = [torch.from_numpy(array).cuda() for array in host]
    arrays = [fa_ext.to_device(np.zeros_like(array)) for array in host]
    views = [torch.from_dlpack(array) for array in arrays]
    out = fa_ext.to_device(np.full(host[0].shape, np.nan, np.float16))
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 50 ms
    for view, source in zip(views, sources, strict=True):
        view.copy_(source)
    fa_ext.attention(*arrays, out=out, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    np.testing.assert_allclose(fa_ext.to_numpy(out).astype("f4"), fa_ext.attention(*host).astype("f4"), atol=2e-3)
