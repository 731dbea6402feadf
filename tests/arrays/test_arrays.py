"""Arrays in and out on the CPU: NumPy and its dtypes, DLPack of either version, the C exchange API, copies."""

import gc
import sys
import types

import numpy as np
import pytest

import fa_ext
from tests.arrays import producers
from tests.arrays.producers import Producer, exchange_type

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
SHAPE = (2, 4, 9, 16)


def operands(dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return [random.standard_normal(SHAPE).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_result(dtype):
    q, k, v = operands(dtype)
    out, lse = fa_ext.attention(q, k, v, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == dtype and out.shape == SHAPE and out.flags.c_contiguous
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32) and lse.shape == SHAPE[:3]
    assert type(fa_ext.attention(q, k, v)) is np.ndarray


def test_out_is_returned():
    q, k, v = operands()
    wanted, lse = fa_ext.attention(q, k, v, return_lse=True)
    out, into = np.full_like(wanted, np.nan), np.full_like(lse, np.nan)
    assert fa_ext.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    out[:] = np.nan
    pair = (out, into)
    assert fa_ext.attention(q, k, v, out=pair) is pair
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(into, lse)
    first, second = fa_ext.attention(q, k, v, out=out, return_lse=True)
    assert first is out and second is not into


def test_subclass_gives_plain_array():
    class Mine(np.ndarray):
        pass

    q, k, v = operands()
    assert type(fa_ext.attention(q.view(Mine), k, v)) is np.ndarray


def test_readonly_inputs():
    arrays = operands()
    for array in arrays:
        array.flags.writeable = False
    fa_ext.attention(*arrays)


def test_references_do_not_leak():
    q, k, v = operands()
    fa_ext.attention(q, k, v)
    gc.collect()
    before = sys.getrefcount(q), sys.getrefcount(q.dtype)
    for _ in range(100):
        fa_ext.attention(q, k, v, return_lse=True)
        with pytest.raises(ValueError):
            fa_ext.attention(q, k, v, out=q)
    gc.collect()
    assert (sys.getrefcount(q), sys.getrefcount(q.dtype)) == before


# ---- DLPack ----


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_input(dtype, versioned):
    arrays = operands(dtype)
    made = [Producer(array, versioned=versioned) for array in arrays]
    out = fa_ext.attention(*made)
    assert isinstance(out, fa_ext.DeviceArray) and out.device == "cpu" and out.shape == SHAPE
    np.testing.assert_array_equal(fa_ext.to_numpy(out), fa_ext.attention(*arrays))
    for producer in made:
        assert producer.deleted == 1
        assert producers.name_of(producer.capsules[0]) == ("used_dltensor_versioned" if versioned else "used_dltensor")
        assert producer.asked[0].get("stream") is None


def test_dlpack_before_1_0():
    q, k, v = operands()
    producer = Producer(q, versioned=False, old=True)
    np.testing.assert_array_equal(fa_ext.to_numpy(fa_ext.attention(producer, k, v)), fa_ext.attention(q, k, v))
    assert [sorted(keywords) for keywords in producer.asked] == [["max_version"], []]


def test_dlpack_without_deleter():
    q, k, v = operands()
    fa_ext.attention(Producer(q, deleter=False), Producer(k, versioned=False, deleter=False), v)


def test_dlpack_offset_and_strides():
    q, k, v = operands()
    wanted = fa_ext.attention(q[:, 1:3], k[:, 1:3], v[:, 1:3])
    offset = Producer(q, shape=(2, 2, 9, 16), byte_offset=q.strides[1])
    np.testing.assert_array_equal(fa_ext.to_numpy(fa_ext.attention(offset, k[:, 1:3], v[:, 1:3])), wanted)
    whole = Producer(q, strides=None)
    np.testing.assert_array_equal(fa_ext.to_numpy(fa_ext.attention(whole, k, v)), fa_ext.attention(q, k, v))
    back = q[::-1, :, ::2]
    np.testing.assert_array_equal(
        fa_ext.to_numpy(fa_ext.attention(Producer(back), k, v)), fa_ext.attention(np.ascontiguousarray(back), k, v)
    )


def test_dlpack_pinned_counts_as_cpu():
    q, k, v = operands()
    fa_ext.attention(Producer(q, device_type=producers.CUDA_HOST), k, v)


def test_dlpack_output():
    q, k, v = operands()
    out = np.full_like(q, np.nan)
    producer = Producer(out)
    assert fa_ext.attention(q, k, v, out=producer) is producer
    np.testing.assert_array_equal(out, fa_ext.attention(q, k, v))
    for flags in (producers.READ_ONLY, producers.IS_COPIED):
        with pytest.raises(ValueError, match="out is read-only"):
            fa_ext.attention(q, k, v, out=Producer(out, flags=flags))


class Resizes(Producer):
    """Its ``__dlpack__`` gives other arrays less memory, which frees or moves what they had."""

    def __init__(self, array, others, shape):
        super().__init__(array)
        self.others, self.shape = others, shape

    def __dlpack__(self, **keywords):
        for other in self.others:
            if isinstance(other, np.ndarray):
                other.resize(self.shape, refcheck=False)
            else:
                other.array = other.array[:, :, : self.shape[2]].copy()
        return super().__dlpack__(**keywords)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("place", ["q", "k", "v", "bias", "mask"])
def test_arrays_are_read_after_the_last_python_code_has_run(place, exchange):
    """Read before, the others would be used where their memory was: megabytes that are unmapped when they shrink."""
    large, small = (1, 2, 4096, 64), (1, 2, 5, 64)
    kind = exchange_type()

    def make():
        array = np.random.default_rng(3).standard_normal(large, np.float32)
        return array if not exchange else kind(array)

    arrays = {name: make() for name in ("q", "k", "v") if name != place}
    own = {"bias": np.zeros((5, 5), np.float32), "mask": np.ones((5, 5), bool)}
    given = own.get(place, np.random.default_rng(0).standard_normal(small, np.float32))
    out = fa_ext.attention(**arrays, **{place: Resizes(given, arrays.values(), small)})
    plain = {name: array.array if exchange else array for name, array in arrays.items()}
    wanted = fa_ext.attention(**plain, **{place: given})
    assert wanted.shape == small
    np.testing.assert_array_equal(out.array if isinstance(out, kind) else fa_ext.to_numpy(out), wanted)
    if place in "kv" and not exchange:  # what no longer fits is refused
        arrays["q"].resize(large, refcheck=False)
        other = arrays["v" if place == "k" else "k"]
        with pytest.raises(ValueError, match="must be the same"):
            fa_ext.attention(**arrays, **{place: Resizes(given, [other], (1, 2, 4, 64))})


def test_an_output_is_read_after_the_last_python_code_has_run():
    q, k, v = (np.ones((1, 2, 5, 64), np.float32) for _ in range(3))
    out = np.full((1, 2, 4096, 64), np.nan, np.float32)
    assert fa_ext.attention(Resizes(q, [out], q.shape), k, v, out=out) is out
    np.testing.assert_array_equal(out, fa_ext.attention(q, k, v))


# ---- scalars ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_are_arrays_without_axes(dtype):
    q, k, v = operands(dtype)
    everything, sinks = fa_ext.attention(q, k, v), np.zeros(4, np.float32)
    nothing, lse = fa_ext.attention(q, k, v, mask=np.zeros((), bool), return_lse=True)
    assert not nothing.astype(np.float32).any() and (lse == -np.inf).all()
    for truth in (True, np.True_):
        np.testing.assert_array_equal(fa_ext.attention(q, k, v, mask=truth), everything)
    for truth in (False, np.False_):
        np.testing.assert_array_equal(fa_ext.attention(q, k, v, mask=truth), nothing)
    wide = np.float64 if dtype is np.float64 else np.float32
    for value in (2, -3, 0.5, 0.1, -1e300, float("-inf"), float("nan")):
        with np.errstate(over="ignore"):
            array = np.array(max(value, -3.4e38) if wide is np.float32 and -np.inf < value else value, wide)
        wanted = fa_ext.attention(q, k, v, bias=array, sinks=sinks, return_lse=True)
        for given in (value, wide(array)):
            got = fa_ext.attention(q, k, v, bias=given, sinks=sinks, return_lse=True)
            for x, y in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
    own = np.dtype(dtype).type(0.25)
    np.testing.assert_array_equal(fa_ext.attention(q, k, v, bias=own), fa_ext.attention(q, k, v, bias=np.asarray(own)))
    assert fa_ext.explain(q, k, v, mask=True, bias=1)[0] == fa_ext.explain(q, k, v, mask=np.ones((), bool), bias=own)[0]
    producers_too = fa_ext.attention(Producer(q), k, v, bias=0.5, mask=np.True_)  # the dtype of q is read last
    np.testing.assert_array_equal(fa_ext.to_numpy(producers_too).astype(np.float64),
                                  fa_ext.attention(q, k, v, bias=0.5).astype(np.float64))  # fmt: skip


def test_scalars_that_are_refused():
    q, k, v = operands()
    for options, error, match in [
        ({"mask": 1}, TypeError, "mask has type int; accepted: a bool array, True or False"),
        ({"mask": 1.0}, TypeError, "mask has type float; accepted: a bool array, True or False"),
        ({"mask": np.uint8(1)}, TypeError, "mask has dtype uint8; accepted: bool"),
        ({"bias": True}, TypeError, "bias has dtype bool; accepted: q's dtype"),
        ({"bias": np.float64(1)}, TypeError, "bias has dtype float64; accepted: q's dtype"),
        ({"bias": np.int64(1)}, TypeError, "bias has dtype int64; accepted: q's dtype"),
        ({"bias": 10**400}, ValueError, "bias is too large"),
        ({"bias": 1j}, TypeError, "bias has type complex"),
        ({"bias": np.str_("x")}, TypeError, "bias has dtype <U1"),
        ({"sinks": 0.0}, TypeError, "sinks has type float"),
        ({"sinks": np.float32(0)}, TypeError, "sinks has type float32"),
        ({"out": np.float32(0)}, TypeError, "out has type float32"),
    ]:
        for call in (fa_ext.attention, fa_ext.explain):
            with pytest.raises(error, match=match):
                call(q, k, v, **options)
    for position in range(3):
        for scalar in (1.0, np.float32(1), True):
            arrays = [scalar if n == position else x for n, x in enumerate((q, k, v))]
            with pytest.raises(TypeError, match=f"{'qkv'[position]} has type .*an array"):
                fa_ext.attention(*arrays)
    for call in (fa_ext.to_numpy, fa_ext.to_device):
        with pytest.raises(TypeError, match="array has type float"):
            call(np.float32(1))


# ---- the C exchange API ----


@pytest.mark.parametrize("borrowed", [True, False])
def test_exchange(borrowed):
    arrays = operands()
    kind = exchange_type(borrowed=borrowed)
    out, lse = fa_ext.attention(*(kind(array) for array in arrays), return_lse=True)
    assert type(out) is kind and type(lse) is kind
    wanted, wanted_lse = fa_ext.attention(*arrays, return_lse=True)
    np.testing.assert_array_equal(out.array, wanted)
    np.testing.assert_array_equal(lse.array, wanted_lse)
    read = "tensor_from_object" if borrowed else "managed_from_object"
    assert kind.calls == [read] * 3 + ["allocate", "managed_to_object"] * 2
    into = kind(np.full_like(wanted, np.nan))
    assert fa_ext.attention(*map(kind, arrays), out=into) is into
    np.testing.assert_array_equal(into.array, wanted)


def test_exchange_of_what_is_read_only():
    arrays = operands()
    kind = exchange_type(borrowed=False, flags=producers.READ_ONLY)
    fa_ext.attention(*map(kind, arrays))
    out = np.zeros_like(arrays[0])
    with pytest.raises(ValueError, match="out is read-only"):
        fa_ext.attention(*arrays, out=kind(out))
    assert not out.any()


def test_exchange_through_an_older_table():
    inner = exchange_type()
    import ctypes

    kind = exchange_type(version=(2, 0), previous=ctypes.addressof(inner.table))
    arrays = operands()
    out = fa_ext.attention(*map(kind, arrays))
    assert type(out) is inner
    assert "tensor_from_object" in inner.calls and not kind.calls


def test_exchange_of_an_unknown_version_falls_back():
    q, k, v = operands()
    kind = exchange_type(version=(2, 0), __dlpack__=None)
    kind.__dlpack__ = lambda self, **keywords: self.array.__dlpack__(**keywords)
    kind.__dlpack_device__ = lambda self: (producers.CPU, 0)
    np.testing.assert_array_equal(fa_ext.to_numpy(fa_ext.attention(kind(q), k, v)), fa_ext.attention(q, k, v))


def test_exchange_allocator_fails():
    kind = exchange_type(failing=True)
    with pytest.raises(MemoryError, match="none left"):
        fa_ext.attention(*map(kind, operands()))


def test_requires_grad_neg_conj():
    q, k, v = operands()
    grad = exchange_type(requires_grad=True)
    with pytest.raises(ValueError, match=r"q requires grad.*q\.detach\(\)"):
        fa_ext.attention(grad(q), k, v)
    negative = exchange_type(requires_grad=False, is_neg=lambda self: True)
    with pytest.raises(ValueError, match=r"k is a negative view; pass k\.resolve_neg\(\)"):
        fa_ext.attention(q, negative(np.repeat(k, 2, -1)[..., ::2]), v)
    conjugate = exchange_type(requires_grad=False, is_neg=lambda self: False, is_conj=lambda self: True)
    with pytest.raises(ValueError, match=r"v is a conjugate view.*v\.resolve_conj\(\)"):
        fa_ext.attention(q, k, conjugate(v.astype(np.complex64)))
    plain = exchange_type(requires_grad=False, is_neg=lambda self: False, is_conj=lambda self: False)
    fa_ext.attention(plain(q), k, v)


def test_torch_without_the_exchange_api(monkeypatch):
    """An older torch, played by a module of the same name: results are made by torch.empty."""

    class Tensor(Producer):
        __module__ = "torch"
        requires_grad = False
        device, dtype = "cpu", "the dtype of q"

        def is_neg(self):
            return False

        def data_ptr(self):
            return self.array.ctypes.data

    def empty(shape, *, dtype, device):
        assert device == "cpu" and dtype in ("the dtype of q", "torch's float32")
        return Tensor(np.empty(shape, np.float16 if dtype == "the dtype of q" else np.float32))

    module = types.ModuleType("torch")
    module.empty, module.float32 = empty, "torch's float32"
    monkeypatch.setitem(sys.modules, "torch", module)
    arrays = operands(np.float16)
    out, lse = fa_ext.attention(*map(Tensor, arrays), return_lse=True)
    assert type(out) is Tensor and type(lse) is Tensor
    wanted, wanted_lse = fa_ext.attention(*arrays, return_lse=True)
    np.testing.assert_array_equal(out.array, wanted)
    np.testing.assert_array_equal(lse.array, wanted_lse)
    grad = Tensor(arrays[0])
    grad.requires_grad = True
    with pytest.raises(ValueError, match="q requires grad"):
        fa_ext.attention(grad, *arrays[1:])


def test_many_types():
    q, k, v = operands()
    wanted = fa_ext.attention(q, k, v)
    for _ in range(100):  # more than the cache of types holds
        kind = exchange_type(requires_grad=False, is_neg=lambda self: False)
        np.testing.assert_array_equal(fa_ext.attention(kind(q), k, v).array, wanted)


# ---- libraries that may be installed ----


def test_jax_on_the_cpu():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("JAX is not on the CPU")
    arrays = operands()
    wanted = fa_ext.attention(*arrays)
    made = [jax.numpy.asarray(array) for array in arrays]
    out = fa_ext.attention(*made)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), wanted)
    half = fa_ext.attention(*(array.astype("bfloat16") for array in made))
    assert isinstance(half, jax.Array) and half.dtype == "bfloat16"
    with pytest.raises(BufferError, match="out is a JAX array"):
        fa_ext.attention(*made, out=made[0])
    with pytest.raises(TypeError, match="q has type"):
        jax.jit(fa_ext.attention)(*made)


def test_array_api_namespace():
    strict = pytest.importorskip("array_api_strict")
    arrays = operands()
    out = fa_ext.attention(*(strict.asarray(array) for array in arrays))
    assert type(out) is type(strict.asarray(arrays[0]))
    np.testing.assert_array_equal(np.asarray(out), fa_ext.attention(*arrays))


def test_torch_on_the_cpu():
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(array) for array in operands()]
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert type(out) is torch.Tensor and out.device.type == "cpu" and lse.dtype == torch.float32
    np.testing.assert_array_equal(out.numpy(), fa_ext.attention(*operands()))
    taped = arrays[0].clone().requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        fa_ext.attention(taped, *arrays[1:])
    with torch.no_grad():
        np.testing.assert_array_equal(fa_ext.attention(taped, *arrays[1:]).numpy(), out.numpy())
    with pytest.raises(ValueError, match="resolve_neg"):
        fa_ext.attention(torch.randn(SHAPE, dtype=torch.complex64).conj().imag, *arrays[1:])


# ---- copies ----


@pytest.mark.parametrize("dtype", [*DTYPES, np.bool_])
def test_to_numpy_copies(dtype):
    source = np.random.default_rng(0).standard_normal((5, 6, 7)).astype(dtype)[::-1, ::2, 1:]
    for given in (source, Producer(source)):
        copy = fa_ext.to_numpy(given)
        assert copy.dtype == dtype and copy.flags.c_contiguous and not np.shares_memory(copy, source)
        np.testing.assert_array_equal(copy.astype(np.float64), source.astype(np.float64))
    assert fa_ext.to_numpy(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_to_device_arguments():
    for arguments, error in [((), TypeError), (([1.0],), TypeError), ((np.zeros(2, complex),), TypeError)]:
        with pytest.raises(error):
            fa_ext.to_device(*arguments)
    with pytest.raises(ValueError, match="device"):
        fa_ext.to_device(np.zeros(2, np.float32), device=-1)
    with pytest.raises(TypeError, match="device"):
        fa_ext.to_device(np.zeros(2, np.float32), device="cuda")
    with pytest.raises(TypeError, match="unknown argument other; accepted: array, device"):
        fa_ext.to_device(np.zeros(2, np.float32), other=1)


def test_without_a_device():
    try:
        if fa_ext._core.device_count():
            pytest.skip("there is a CUDA device")
    except fa_ext.CudaError as error:
        assert str(error)
    with pytest.raises(fa_ext.CudaError):
        fa_ext.to_device(np.zeros(2, np.float32))
    with pytest.raises(fa_ext.CudaError):
        fa_ext._core.device_info(0)
