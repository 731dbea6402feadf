"""The C interface as Python's ctypes sees it: client.c compiled, and arrays handed to it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np

import fa_ext
from fa_ext import _core

HERE = Path(__file__).resolve().parent
LANGUAGES = {"c": ("gcc", "-std=c11"), "c++": ("g++", "-std=c++17")}
OPERATIONS = {"forward": 0, "backward": 1, "merge": 2, "append": 3, "documents": 4}
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "bool": 5, "int32": 6, "int64": 7}
CAUSAL = {False: 0, True: 1, "top_left": 2, "bottom_right": 3}
INDICES = ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "k_range_begin", "k_range_end", "positions",
           "q_segments", "k_segments")  # fmt: skip
FORWARD = ("q", "k", "v", "bias", "mask", "sinks", "alibi", "out", "lse", *INDICES, "intervals", "max_logit")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
BACKWARD = ("dout", "q", "k", "v", "out", "lse", "dlse", "bias", "mask", "sinks", "alibi", *GRADIENTS,
            *(name for name in INDICES if name != "page_table"), "intervals")  # fmt: skip
APPEND = ("k_cache", "v_cache", "k", "v", "q", "out", "rotary_cos", "rotary_sin", "page_table", "seqlens_k", "cu_seqlens_q",
          "seqlens_q", "slots", "positions")  # fmt: skip
FAULTS = ("length", "cu_seqlens", "page", "slot", "position", "documents")


class Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64))]  # fmt: skip


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("given", ctypes.c_uint32), ("causal", ctypes.c_int32), ("layout", ctypes.c_int32),
                ("batch_invariant", ctypes.c_int32), ("scale", ctypes.c_double), ("softcap", ctypes.c_double),
                ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("dropout", ctypes.c_double),
                ("seed", ctypes.c_uint64), ("offset", ctypes.c_uint32), ("heads", ctypes.c_uint32), ("origin", ctypes.c_uint32 * 4),
                ("state", ctypes.c_void_p), ("max_seqlen_q", ctypes.c_int64)]  # fmt: skip


class Run(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("kernel", ctypes.c_char_p),
                ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t), ("message", ctypes.c_char_p),
                ("message_bytes", ctypes.c_size_t)]  # fmt: skip


def compiled(folder: Path, language: str, *flags: str, source="client.c") -> Path:
    """A shared object of a source file of this folder, with every warning an error."""
    compiler, standard = LANGUAGES[language]
    target = folder / f"{Path(source).stem}-{language}{len(flags)}.so"
    kind = ["-x", "c++"] if language == "c++" else []
    subprocess.run(
        [compiler, standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-shared", "-fPIC", "-fvisibility=hidden",
         f"-I{fa_ext.get_include()}", *flags, *kind, str(HERE / source), "-o", str(target), "-lm"],
        check=True,
    )  # fmt: skip
    return target


def missing_compiler() -> str | None:
    absent = [compiler for compiler, _ in LANGUAGES.values() if not shutil.which(compiler)]
    return f"{' and '.join(absent)} not installed" if absent else None


def python_flags() -> tuple[str, ...]:
    """The flags for a file that imports the capsule."""
    return "-DFA_EXT_IMPORT", "-isystem", sysconfig.get_path("include")


def table() -> int:
    """The address of the table."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(_core._C_API, b"fa_ext._core._C_API")


def array_of(x, *, device=0, data=True) -> Array:
    """A NumPy array, or one with __cuda_array_interface__ on the CUDA device ``device - 1``, that must outlive the result."""
    interface = x.__array_interface__ if device == 0 else x.__cuda_array_interface__
    shape, strides = interface["shape"], interface.get("strides")
    held = Array(interface["data"][0] if data else None, DTYPES[str(x.dtype)], device, len(shape))
    held.shape = (ctypes.c_int64 * len(shape))(*shape)
    if strides is not None:
        held.strides = (ctypes.c_int64 * len(shape))(*(s // np.dtype(interface["typestr"]).itemsize for s in strides))
    return held


def options_of(*, causal=False, scale=None, window=None, softcap=0.0, layout="bhsd", batch_invariant=False,
               dropout=None, max_seqlen_q=None) -> Options:  # fmt: skip
    """``dropout`` as for fa_ext.attention; of (p, state) the address of the words in place of an array."""
    dropout = tuple(dropout or (0, 0))
    state = dropout[1] if isinstance(dropout[1], ctypes.c_void_p) else None
    dropout = (dropout[0], 0) if state else dropout
    dropout += (0, (0, 0, 0, 0), 0)[len(dropout) - 2 :]
    left, right = window or (None, None)
    given = (scale is not None) + 2 * (left is not None) + 4 * (right is not None) + 8 * (max_seqlen_q is not None)
    return Options(ctypes.sizeof(Options), given, CAUSAL[causal], int(layout == "bshd"), batch_invariant, scale or 0, softcap,
                   left or 0, right or 0, *dropout[:3], dropout[4], (ctypes.c_uint32 * 4)(*dropout[3]), state, max_seqlen_q or 0)  # fmt: skip


class Client:
    """client.c, and the calls it makes."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.run.argtypes = [ctypes.c_void_p]
        self.library.call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
                                      ctypes.c_void_p, ctypes.c_void_p]  # fmt: skip
        self.message = ctypes.create_string_buffer(2048)

    def run(self) -> int:
        return self.library.run(table())

    def call(self, operation, arrays, *, extra=0, options=None, kernel=None, stream=None, workspace=None, asks=False):
        """The code; ``arrays`` are Array, or None where absent. ``workspace``: (address, bytes). With ``asks`` the bytes of
        workspace that the call needs, or the code where that fails."""
        pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else ctypes.addressof(x) for x in arrays))
        address, size = workspace or (None, 0)
        run = Run(ctypes.sizeof(Run), stream, kernel and kernel.encode(), address, size,
                  ctypes.cast(self.message, ctypes.c_char_p), len(self.message))  # fmt: skip
        options = options_of(**(options or {}))
        needed = ctypes.c_size_t(0)
        code = self.library.call(table(), OPERATIONS[operation], pointers, ctypes.byref(options), extra, ctypes.byref(run),
                                 ctypes.byref(needed) if asks else None)  # fmt: skip
        return needed.value if asks and code == 0 else code

    def _run(self) -> Run:
        return Run(ctypes.sizeof(Run), message=ctypes.cast(self.message, ctypes.c_char_p), message_bytes=len(self.message))

    def dropout_keep(self, out: Array | None, **options) -> int:
        made = options_of(**options)
        self.library.dropout_keep.argtypes = [ctypes.c_void_p] * 4
        return self.library.dropout_keep(table(), out and ctypes.byref(out), ctypes.byref(made), ctypes.byref(self._run()))

    def faults(self, device=0, keep=False):
        """As ``fa_ext.faults``; the code where that fails."""
        found = (ctypes.c_int64 * (4 * len(FAULTS)))(*[-1] * (4 * len(FAULTS)))
        self.library.faults.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        code = self.library.faults(table(), device, keep, found, len(FAULTS), ctypes.byref(self._run()))
        fours = [(name, *found[4 * n : 4 * n + 4]) for n, name in enumerate(FAULTS)]
        return code or [four for four in fours if four[1]]

    def said(self) -> str:
        return self.message.value.decode()


def aligned(count: int, offset=0) -> np.ndarray:
    """Bytes that begin ``offset`` after a multiple of 256, poisoned."""
    memory = np.full(count + 512, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 256 + offset
    return memory[begin : begin + count]
