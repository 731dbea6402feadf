"""Array producers made by hand with ctypes: DLPack capsules, a type with the C exchange API, CUDA Array Interfaces.

They can lie in every field, which no real library does on purpose.
"""

import ctypes as c
import os
import subprocess
import sys

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY, IS_COPIED = 1, 2
CODES = {
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "complex64": (5, 64),
}


class DLTensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device_type", c.c_int32),
        ("device_id", c.c_int32),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


class Managed(c.Structure):
    _fields_ = [("tensor", DLTensor), ("context", c.c_void_p), ("deleter", c.c_void_p)]


class Versioned(c.Structure):
    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("context", c.c_void_p),
        ("deleter", c.c_void_p),
        ("flags", c.c_uint64),
        ("tensor", DLTensor),
    ]


_DELETER = c.PYFUNCTYPE(None, c.c_void_p)
_new = c.pythonapi.PyCapsule_New
_new.restype = c.py_object
_new.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
_name = c.pythonapi.PyCapsule_GetName
_name.restype = c.c_char_p
_name.argtypes = [c.py_object]


def _ints(values):
    return None if values is None else (c.c_int64 * max(len(values), 1))(*values)


def _fill(tensor, array, keep, **fields):
    code, bits = CODES[array.dtype.name]
    shape = _ints(fields.pop("shape", array.shape))
    strides = _ints(fields.pop("strides", [s // array.itemsize for s in array.strides]))
    keep += [array, shape, strides]
    tensor.data = array.ctypes.data
    tensor.device_type, tensor.device_id = CPU, 0
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = array.ndim, code, bits, 1
    tensor.shape = c.cast(shape, c.POINTER(c.c_int64)) if shape is not None else None
    tensor.strides = c.cast(strides, c.POINTER(c.c_int64)) if strides is not None else None
    tensor.byte_offset = 0
    for name, value in fields.items():
        setattr(tensor, name, value)


class Producer:
    """An object with ``__dlpack__`` over a NumPy array; keyword arguments overwrite fields of its tensor.

    ``deleted`` counts the deleter's calls; ``asked`` lists the keywords of the calls of ``__dlpack__``.
    """

    def __init__(
        self, array, *, versioned=True, version=(1, 0), flags=0, deleter=True, reuse=False, old=False, **fields
    ):
        self.array, self.versioned, self.version, self.flags = array, versioned, version, flags
        self.has_deleter, self.reuse, self.old, self.fields = deleter, reuse, old, fields
        self.deleted, self.asked, self.capsules, self._keep = 0, [], [], []
        self._deleter = _DELETER(self._delete)

    def _delete(self, _):
        self.deleted += 1

    def capsule(self):
        if self.reuse and self.capsules:
            return self.capsules[0]
        managed = Versioned() if self.versioned else Managed()
        if self.versioned:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        managed.deleter = c.cast(self._deleter, c.c_void_p) if self.has_deleter else None
        _fill(managed.tensor, self.array, self._keep, **self.fields)
        self._keep.append(managed)
        made = _new(c.addressof(managed), b"dltensor_versioned" if self.versioned else b"dltensor", None)
        self.capsules.append(made)
        return made

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        if self.old and "max_version" in keywords:
            raise TypeError("unexpected keyword max_version")
        return self.capsule()

    def __dlpack_device__(self):
        return (self.fields.get("device_type", CPU), self.fields.get("device_id", 0))


def name_of(capsule):
    """Name of a capsule, as text."""
    return _name(capsule).decode()


class Exchange(c.Structure):
    _fields_ = [
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("previous", c.c_void_p),
        ("allocate", c.c_void_p),
        ("managed_from_object", c.c_void_p),
        ("managed_to_object", c.c_void_p),
        ("tensor_from_object", c.c_void_p),
        ("current_stream", c.c_void_p),
    ]


def exchange_type(*, version=(1, 3), previous=None, borrowed=True, failing=False, flags=0, **attributes):
    """A class whose instances hold a NumPy array in ``.array`` and speak the C exchange API.

    ``calls`` of the class lists what was called. ``borrowed=False`` leaves the optional function out, so that tensors
    come with ``flags``; ``failing`` makes the allocator report an error.
    """
    calls, alive = [], {}

    class Array:
        def __init__(self, array):
            self.array = array

    for name, value in attributes.items():
        setattr(Array, name, value)

    def tensor_from_object(object, out):
        calls.append("tensor_from_object")
        _fill(out[0], object.array, alive.setdefault(id(object), []))
        return 0

    def managed(array):
        made, keep = Versioned(), []
        made.major, made.minor = version
        made.flags = flags
        _fill(made.tensor, array, keep)
        deleter = _DELETER(lambda address: alive.pop(address) and None)
        made.deleter = c.cast(deleter, c.c_void_p)
        alive[c.addressof(made)] = [made, deleter, array, *keep]
        return made

    def managed_from_object(object, out):
        calls.append("managed_from_object")
        out[0] = c.addressof(managed(object.array))
        return 0

    def allocate(prototype, out, context, set_error):
        calls.append("allocate")
        if failing:
            c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_char_p)(set_error)(context, b"MemoryError", b"none left")
            return -1
        tensor = prototype[0]
        dtype = next(name for name, known in CODES.items() if known == (tensor.code, tensor.bits))
        out[0] = c.addressof(managed(np.empty([tensor.shape[n] for n in range(tensor.ndim)], dtype)))
        return 0

    def managed_to_object(stolen, out):
        calls.append("managed_to_object")
        made = Array(alive.pop(stolen)[2])
        c.pythonapi.Py_IncRef(c.py_object(made))
        out[0] = id(made)
        return 0

    def current_stream(kind, index, out):
        calls.append("current_stream")
        out[0] = None
        return 0

    pointer = c.POINTER(c.c_void_p)
    kinds = {
        "allocate": (allocate, (c.POINTER(DLTensor), pointer, c.c_void_p, c.c_void_p)),
        "managed_from_object": (managed_from_object, (c.py_object, pointer)),
        "managed_to_object": (managed_to_object, (c.c_void_p, pointer)),
        "tensor_from_object": (tensor_from_object, (c.py_object, c.POINTER(DLTensor))),
        "current_stream": (current_stream, (c.c_int32, c.c_int32, pointer)),
    }
    table = Exchange(*version, previous)
    functions = {name: c.PYFUNCTYPE(c.c_int, *types)(function) for name, (function, types) in kinds.items()}
    for name, function in functions.items():
        setattr(table, name, c.cast(function, c.c_void_p))
    if not borrowed:
        table.tensor_from_object = None
    Array.table, Array.functions, Array.calls, Array.alive = table, functions, calls, alive
    Array.__dlpack_c_exchange_api__ = _new(c.addressof(table), b"dlpack_exchange_api", None)
    return Array


class Interface:
    """An object with a CUDA Array Interface of whatever content."""

    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def interface(**fields):
    """A well-formed interface of an array (1, 2, 4, 8) of float16 at an address that nobody owns, overwritten."""
    made = {"shape": (1, 2, 4, 8), "typestr": "<f2", "data": (0x7F1200000000, False), "version": 3}
    made.update(fields)
    return Interface({name: value for name, value in made.items() if value is not ...})


def ran_alone(request):
    """Runs the test in a process of its own, with threads, where JAX, torch or CuPy are loaded, whose threads a fork may deadlock
    on, and in a worker of pytest-xdist, whose calls have one thread.

    True if it did, and passed there; False where the test can run right here.
    """
    fit = "PYTEST_XDIST_WORKER" not in os.environ and not {"jax", "torch", "cupy"} & set(sys.modules)
    if "ALONE" in os.environ or fit:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", request.node.nodeid]
    environment = os.environ | {"ALONE": "1", "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        command, cwd=request.config.rootpath, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True
