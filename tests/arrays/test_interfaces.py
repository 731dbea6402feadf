"""Interface objects that lie: DLPack capsules, exchange tables, CUDA Array Interfaces. An exception, never a crash."""

import re
import sys

import numpy as np
import pytest

import fa_ext
from tests.arrays import producers
from tests.arrays.producers import Producer, exchange_type, interface

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXPECTED = (ValueError, TypeError, BufferError, MemoryError, fa_ext.CudaError, fa_ext.UnsupportedError)


def operands(dtype=np.float32, shape=(1, 2, 4, 8)):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for _ in range(3)]


# ---- DLPack ----


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "fields, error, match",
    [
        ({"shape": (1, 2, -4, 8)}, ValueError, "extent -4"),
        ({"shape": (1, 2**40, 2**40, 8)}, ValueError, "overflow"),
        ({"shape": (2**62, 2, 4, 8)}, ValueError, "overflow"),
        ({"strides": (2**62, 2**62, 2**62, 2**62)}, ValueError, "strides that overflow"),
        ({"strides": (-(2**63), -(2**63), 1, 1)}, ValueError, "strides that overflow"),
        ({"ndim": -1}, BufferError, "dimensions is negative"),
        ({"ndim": 17}, ValueError, "17 dimensions"),
        ({"shape": None}, BufferError, "shape is NULL"),
        ({"data": None}, BufferError, "NULL data"),
        ({"byte_offset": 1}, BufferError, "not aligned"),
        ({"code": 0, "bits": 16}, TypeError, "dtype int16"),
        ({"code": 1, "bits": 16}, TypeError, "dtype uint16"),
        ({"code": 5, "bits": 64}, TypeError, "dtype complex64"),
        ({"code": 2, "bits": 8}, TypeError, "dtype float8"),
        ({"code": 77}, TypeError, "unknown kind"),
        ({"lanes": 4}, TypeError, "in vectors"),
        ({"device_type": 10}, BufferError, "device of DLPack type 10"),
        ({"device_type": 2, "device_id": -1}, BufferError, "device id is negative"),
    ],
)
def test_dlpack_fields(fields, error, match, versioned):
    q, k, v = operands()
    producer = Producer(q, versioned=versioned, **fields)
    with pytest.raises(error, match=match):
        fa_ext.attention(producer, k, v)
    # A capsule that was asked for was consumed, and its deleter ran once.
    assert producer.deleted == len(producer.capsules)
    with pytest.raises(error):
        fa_ext.to_numpy(Producer(q, versioned=versioned, **fields))


@pytest.mark.parametrize("name, accepted", [("mask", "bool [^,]*$"), ("bias", "q's dtype or float32$")])
def test_a_dtype_that_an_extra_cannot_have(name, accepted):
    q, k, v = operands()
    for given in (Producer(np.ones((4, 4), np.float16), code=1), interface(typestr="<u2"),
                  interface(typestr="<V2")):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} has .*; accepted( dtypes)?: {accepted}"):
            fa_ext.attention(q, k, v, **{name: given})


def test_dlpack_capsule_used_twice():
    q, k, v = operands()
    for versioned in (True, False):
        producer = Producer(q, versioned=versioned, reuse=True)
        fa_ext.attention(producer, k, v)
        for _ in range(2):
            with pytest.raises(BufferError, match="consumed before"):
                fa_ext.attention(producer, k, v)
        assert producer.deleted == 1


def test_dlpack_of_a_later_major_version():
    q, k, v = operands()
    producer = Producer(q, version=(2, 0))
    with pytest.raises(BufferError, match=r"q is exported as DLPack 2\.0"):
        fa_ext.attention(producer, k, v)
    assert producer.deleted == 1
    fa_ext.attention(Producer(q, version=(1, 99)), k, v)


def test_dlpack_methods_that_misbehave():
    q, k, v = operands()

    class Odd:
        device, capsule = (1, 0), None

        def __dlpack__(self, **keywords):
            if isinstance(self.capsule, BaseException):
                raise self.capsule
            return self.capsule

        def __dlpack_device__(self):
            if isinstance(self.device, BaseException):
                raise self.device
            return self.device

    odd = Odd()
    for device in (None, 1, (1,), (1, 0, 0), ("cpu", 0), (2**70, 0), (1.5, 0), [1, 0]):
        odd.device = device
        with pytest.raises(BufferError, match="ill-formed.*__dlpack_device__"):
            fa_ext.attention(odd, k, v)
    odd.device = KeyError("device")
    with pytest.raises(KeyError):
        fa_ext.attention(odd, k, v)
    for error in (KeyboardInterrupt, SystemExit, MemoryError):
        kind = type("Index", (), {"__index__": lambda self, error=error: (_ for _ in ()).throw(error)})
        for odd.device in ((kind(), 0), (1, kind())):
            with pytest.raises(error):
                fa_ext.attention(odd, k, v)
    odd.device = (1, 0)
    for capsule in (None, 5, "dltensor", sys.version_info, np.float32(1)):
        odd.capsule = capsule
        with pytest.raises(BufferError, match="ill-formed"):
            fa_ext.attention(odd, k, v)
    for error in (KeyError("x"), RuntimeError("y"), TypeError("z")):
        odd.capsule = error
        with pytest.raises(type(error)):
            fa_ext.attention(odd, k, v)
    other = Producer(q)
    other.__dlpack_device__ = lambda: (1, 0)
    with pytest.raises(BufferError, match="not that of __dlpack_device__|has no CUDA|no NVIDIA|CUDA"):
        fa_ext.attention(type("Lies", (Producer,), {"__dlpack_device__": lambda self: (1, 0)})(q, device_type=2), k, v)


def test_an_interrupt_while_a_library_is_looked_up_is_raised(monkeypatch):
    class Interrupts:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "numba":
                raise KeyboardInterrupt

    q, k, v = operands()
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(KeyboardInterrupt):
        fa_ext.attention(type("Array", (Producer,), {"__module__": "numba.cuda"})(q), k, v)


def test_exchange_tables_that_misbehave():
    q, k, v = operands()
    for capsule in (None, 5, producers._new(8, b"other", None)):
        kind = type("Wrong", (), {"__dlpack_c_exchange_api__": capsule})
        with pytest.raises(TypeError, match="__dlpack_c_exchange_api__"):
            fa_ext.attention(kind(), k, v)
    kind = exchange_type()
    for name in ("allocate", "managed_from_object", "managed_to_object", "current_stream"):
        saved = getattr(kind.table, name)
        setattr(kind.table, name, None)
        derived = type("Derived", (kind,), {})  # a type that has not been seen
        with pytest.raises(TypeError, match="q has type Derived"):
            fa_ext.attention(derived(q), k, v)
        setattr(kind.table, name, saved)
    fa_ext.attention(type("Whole", (kind,), {})(q), k, v)


# ---- the CUDA Array Interface ----

ILL_FORMED = [
    ({"shape": ...}, "'shape' must be"),
    ({"shape": [1, 2, 4, 8]}, "'shape' must be"),
    ({"shape": (1, 2, 4, 8.0)}, "'shape' must be"),
    ({"shape": (1, 2, 4, 2**70)}, "'shape' must be"),
    ({"shape": (1, 2, -4, 8)}, "extent -4"),
    ({"shape": (2**30, 2**30, 2**30, 8)}, "overflow"),
    ({"shape": (1,) * 17}, "17 dimensions"),
    ({"typestr": ...}, "'typestr' must be"),
    ({"typestr": 5}, "'typestr' must be"),
    ({"typestr": ""}, "ill-formed typestr"),
    ({"typestr": "f"}, "ill-formed typestr"),
    ({"typestr": "<f2" * 50}, "typestr"),
    ({"typestr": ">f2"}, "big-endian"),
    ({"typestr": "<i2"}, "typestr"),
    ({"typestr": "<V2"}, "two-byte void"),
    ({"typestr": "\ud800"}, "'typestr' must be"),
    ({"data": ...}, "'data' must be"),
    ({"data": None}, "'data' must be"),
    ({"data": 5}, "'data' must be"),
    ({"data": (5,)}, "'data' must be"),
    ({"data": ("x", False)}, "pointer in 'data'"),
    ({"data": (-1, False)}, "pointer in 'data'"),
    ({"data": (2**70, False)}, "pointer in 'data'"),
    ({"data": (0, False)}, "NULL data pointer"),
    ({"data": (0x7F1200000001, False)}, "not aligned"),
    ({"version": ...}, "'version' must be"),
    ({"version": "3"}, "'version' must be"),
    ({"version": 0}, "'version' must be"),
    ({"version": 2**70}, "'version' must be"),
    ({"strides": (1, 2)}, "differ in length"),
    ({"strides": [1, 2, 4, 8]}, "'strides' must be"),
    ({"strides": (64, 32, 16, 3)}, "stride of 3 bytes"),
    ({"strides": (0, 2**62, 2**62, 2)}, "strides that overflow"),
    ({"strides": (0, -(2**63), 0, 2)}, "strides that overflow"),
    ({"mask": object()}, "masked array"),
    ({"stream": 0}, "interface stream is 0"),
    ({"stream": -1}, "interface stream does not fit"),
    ({"stream": "x"}, "interface stream has type str"),
]


@pytest.mark.parametrize("fields, match", ILL_FORMED)
@pytest.mark.parametrize("place", ["q", "mask", "out"])
def test_interface_fields(fields, match, place):
    q, k, v = operands(np.float16)
    arguments = {"q": q, "k": k, "v": v, place: interface(**fields)}
    with pytest.raises((ValueError, TypeError, BufferError), match=re.escape(match)):
        fa_ext.attention(**arguments)
    with pytest.raises((ValueError, TypeError, BufferError), match=re.escape(match)):
        fa_ext.to_numpy(interface(**fields))


def test_interface_of_memory_that_cuda_does_not_know():
    q, k, v = operands(np.float16)
    with pytest.raises((BufferError, fa_ext.CudaError), match="CUDA|NVIDIA"):
        fa_ext.attention(interface(), k, v)
    host = interface(data=(q.ctypes.data, False))
    with pytest.raises((BufferError, fa_ext.CudaError), match="CUDA|NVIDIA"):
        fa_ext.attention(host, host, host)


def test_interface_is_no_dict():
    q, k, v = operands(np.float16)
    for content in (5, [], "x", (1, 2)):
        with pytest.raises(BufferError, match="must be a dict"):
            fa_ext.attention(producers.Interface(content), k, v)

    class Raises:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fa_ext.attention(Raises(), k, v)


# ---- fuzz ----

numbers = st.one_of(st.integers(-(2**65), 2**65), st.integers(-3, 20), st.sampled_from([0, 1, 2**31, 2**63, -(2**63)]))
junk = st.one_of(st.none(), numbers, st.floats(), st.text(max_size=4), st.binary(max_size=4), st.booleans())
tuples = st.lists(st.one_of(numbers, junk), max_size=18).map(tuple)
#: Shapes and pointers of arrays that are not there: 0 or an address that CUDA does not know, never readable host memory.
interfaces = st.fixed_dictionaries(
    {},
    optional={
        "shape": st.one_of(tuples, junk),
        "typestr": st.one_of(st.sampled_from(["<f2", "<f4", "|b1", "<V2", ">f4", "<c8", "=f2"]), junk),
        "data": st.one_of(st.tuples(st.sampled_from([0, 8, 0x7F1200000000, -1, 2**64]), st.booleans()), tuples, junk),
        "version": st.one_of(st.integers(0, 4), junk),
        "strides": st.one_of(tuples, junk),
        "mask": junk,
        "stream": junk,
        "descr": junk,
    },
)
places = st.sampled_from(["q", "k", "v", "bias", "mask", "sinks", "out"])


@given(content=st.one_of(interfaces, junk), place=places)
def test_fuzz_interface(content, place):
    q, k, v = operands(np.float16)
    with pytest.raises(EXPECTED):
        fa_ext.attention(**{"q": q, "k": k, "v": v, place: producers.Interface(content)})


int64 = st.integers(-(2**63), 2**63 - 1)


@given(
    versioned=st.booleans(),
    shape=st.lists(st.one_of(st.integers(-2, 9), int64), min_size=4, max_size=6),
    strides=st.one_of(st.none(), st.lists(int64, min_size=6, max_size=6)),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "ndim": st.integers(-(2**31), 2**31 - 1),
            "code": st.integers(0, 255),
            "bits": st.integers(0, 255),
            "lanes": st.integers(0, 65535),
            "device_type": st.integers(0, 20).filter(lambda kind: kind not in (1, 3)),
            "device_id": st.integers(-(2**31), 2**31 - 1),
        },
    ),
    place=places,
)
def test_fuzz_dlpack(versioned, shape, strides, fields, place):
    q, k, v = operands()
    if "ndim" in fields and 0 <= fields["ndim"] <= 16:
        fields["ndim"] = min(fields["ndim"], len(shape))
    producer = Producer(q, versioned=versioned, shape=shape, strides=strides, **fields)
    # Memory that exists is described only where nothing can be read of it: by an empty or a refused array.
    producer.fields["data"] = None
    arguments = {"q": q, "k": k, "v": v, place: producer}
    try:
        fa_ext.attention(**arguments)
    except EXPECTED:
        pass
    assert producer.deleted == len(producer.capsules)


@given(options=st.dictionaries(st.sampled_from(["causal", "scale", "window", "softcap", "bias", "mask", "sinks", "layout",
       "out", "return_lse", "stream", "kernel", "batch_invariant", "unknown"]), st.one_of(junk, tuples, st.lists(junk))))  # fmt: skip
def test_fuzz_options(options):
    q, k, v = operands()
    try:
        out = fa_ext.attention(q, k, v, **options)
    except EXPECTED:
        return
    assert np.isfinite(out[0] if isinstance(out, tuple) else out).all() or {"scale", "bias"} & options.keys()
