"""A CPU emulator of CUDA for this project's kernels: their sources as they are, compiled by g++ in place of nvcc.

    python -m tests.emulator simt -o /tmp/simt.so -DHEAD_DIM=64
    python -m pytest -p tests.emulator.plugin --emulated /tmp/simt.so tests/contract/test_contract.py -k D64

What is emulated: threads (a fiber each), barriers, warps' collectives, shared memory, atomics, cp.async, ldmatrix,
mma.sync; of Hopper mbarriers, TMA, wgmma, clusters. ``include/`` stands in for CUDA's headers, ``ptx.py`` for inline PTX,
``runtime/`` is the machine. What shows:

- a deadlock, with the place of every thread; lanes or threads that meet in different operations;
- accesses beside shared memory, at addresses that do not exist and, in shared and global memory, at such as are no
  multiple of what is read or written; more shared memory or threads than a launch may have;
- reads of shared memory and workspace that nobody wrote: they are NaN;
- races, by schedule: ``FA_EMULATOR_SEED`` other than 0 holds warps up and moves asynchronous copies and products to other
  moments. The order of the same seed is the same. Threads change at synchronisation alone, so that two accesses without
  any between them always run in one piece;
- copies by a tensor map in global memory that the device has not published or the thread has not acquired since, and a map
  that is published anew while a copy uses it;
- with ``--races``, races in shared memory by the order that barriers give, whatever the schedule, those of copies by TMA and
  of products by wgmma included: both places are named.

What does not: blocks that wait for each other (those of a cluster apart, one block runs after another, in an order of the
seed, or as many as ``FA_EMULATOR_TOGETHER`` says at a time; a loop that only ends when another block goes on is stopped
after 30 s), times, bank conflicts, registers, memory models (fences do nothing but acquire tensor maps), the
approximations of the hardware's mathematics (but for tanh.approx), accumulation order inside a tensor core. Products and
sums are contracted where nvcc contracts them, if the host has FMA. Only x86-64.

Environment of a call: ``FA_EMULATOR_SEED``; ``FA_EMULATOR_SMS``, multiprocessors in place of the described device's: with 1
or 2, a persistent kernel walks over several tiles a block; ``FA_EMULATOR_TOGETHER``, how many blocks of a kernel without
clusters run at a time, 16 at most; ``FA_EMULATOR_REFUSES``, an address of which no tensor map is encoded;
``FA_EMULATOR_STATE``, the words of dropout lie in memory, as a state on a device does, with "0" as the state's heads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import translate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC, KERNELS = ROOT / "csrc", ROOT / "kernels"

_FLAGS = ("-std=gnu++20", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-omit-frame-pointer", "-march=native",
          "-g1", "-w")  # fmt: skip
#: Products and sums are contracted as nvcc does (which GCC counts among the expensive optimisations).
_KERNEL_FLAGS = ("-O1", "-fexpensive-optimizations", "-ffp-contract=fast", "-fno-threadsafe-statics")
_ALIGNMENT_FLAGS = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")  # what finds one: runtime/launch.cpp
_RACE_FLAGS = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
_RUNTIME_FLAGS = ("-O3",)


class EmulationError(RuntimeError):
    """A kernel could not be translated or compiled; the message says where."""


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _run(argv: list[str], text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{shlex.join(argv)}\n{done.stderr[:8000]}")
    return done.stdout


def _defines(device: dict) -> list[str]:
    """The facts of the emulated device that the plan is told, an entry of devices.json."""
    planned = ("cc", "sm_count", "smem_per_block", "smem_per_sm", "l2_bytes", "tensor_maps")
    return [f"-DFA_EMULATED_{key.upper()}={int(device[key])}" for key in planned]


def preprocessed(source: Path, flags: tuple[str, ...] = (), cc: int = 90, macro: str = "") -> str:
    """A kernel file as C++ for the host; ``macro`` is read before it."""
    includes = [f"-I{HERE / 'include'}", f"-I{CSRC}", f"-I{KERNELS}", f"-I{source.parent}"]
    stem = source.stem
    argv = [*_compiler(), "-E", "-std=gnu++20", "-march=native", f"-DFA_EMULATED_ARCH={cc}0",
            f"-Dfa_kernel_{stem}=fa_emulated_{stem}", "-include", "cuda_runtime.h", "-include", "ptx.h",
            *includes, *flags, "-x", "c++", "-"]  # fmt: skip
    try:
        return translate.translate(_run(argv, f'{macro}#include "{source}"\n'))
    except translate.TranslationError as error:
        raise EmulationError(str(error)) from None


def _compile(folder: Path, stem: str, argv: list[str], text: str | None) -> Path:
    """The object of a text, compiled unless it is in the folder already; `text` None: argv ends in a file."""
    read = text if text is not None else Path(argv[-1]).read_text()
    if text is None:
        headers = [*sorted((HERE / "include").iterdir()), HERE / "runtime" / "machine.h", CSRC / "fa.h"]
        read += "".join(path.read_text() for path in headers)
    digest = hashlib.sha256("\0".join([*argv, read]).encode()).hexdigest()
    target = folder / f"{stem}.{digest[:24]}.o"
    if not target.exists():
        fresh = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}")  # others may compile the same beside this
        _run([*argv[:-1], "-o", str(fresh), argv[-1]], text)
        fresh.replace(target)
    return target


def build(
    kernel: str | Path,
    target: Path,
    flags: tuple[str, ...] = (),
    instances: str = "",
    device: dict | None = None,
    races: bool = False,
    edit=None,
    jobs: int = 2,
) -> Path:
    """Compiles an emulated kernel as a library that ``fa_ext._core.load`` takes, as a kernel for arrays of the CPU.

    kernel: a name of kernels/ or the path of a .cu file. instances: a regular expression; instances that it does not match
    are left out (a call that needs one raises UnsupportedError). device: an entry of devices.json, the H200 by default.
    races: a race in shared memory is an error that names both places; several times slower.
    edit: called with the text of each compilation after translation, returns what to compile instead: for mutants. One
    that changes no text is an error: the line that a mutant was made of is gone.
    Objects are kept by their content, in FA_EMULATOR_OBJECTS or beside the target: what an edit leaves alone is compiled once.
    A source without a kernel of the table becomes a library that exports what it exports. Raises EmulationError.
    """
    from fa_ext import _build

    source = Path(kernel) if str(kernel).endswith(".cu") else _build.kernel_files()[str(kernel)]
    if device is None:
        from tests.contract.devices import DEVICES

        device = DEVICES["h200"]
    folder = Path(os.environ.get("FA_EMULATOR_OBJECTS") or target.parent / "emulator.objects")
    folder.mkdir(parents=True, exist_ok=True)
    files = (source, *(path for path in _build.directives(source).beside if path.suffix == ".cu"))
    units = [u for file in files for u in _build.units_of(file, lambda name: re.search(instances, name), apart=True)]
    units = [u for u in units if "." not in u.name or re.search(instances, u.name.partition(".")[2])]

    def translated(unit):
        text = preprocessed(unit.source, (*unit.flags, *flags), device["cc"], unit.macro)
        return unit, text, edit(text) if edit else text

    def compile_unit(unit, text):
        checks = _RACE_FLAGS if races else ()
        argv = [*_compiler(), *_FLAGS, *_KERNEL_FLAGS, *_ALIGNMENT_FLAGS, *checks, "-x", "c++", "-fpreprocessed", "-c", "-"]
        return _compile(folder, unit.name, argv, text)

    def compile_runtime(path):
        # The machine is the same for all kernels; what describes the kernel is not.
        own = (f"-DFA_EMULATED_NAME={source.stem}",) if path.stem == "kernel" else ()
        argv = [*_compiler(), *_FLAGS, *_RUNTIME_FLAGS, f"-I{HERE / 'include'}", f"-I{CSRC}", *_defines(device),
                f"-DFA_EMULATED_ARCH={device['cc']}0", *own, "-c", str(path)]  # fmt: skip
        return _compile(folder, f"runtime-{path.stem}", argv, None)

    with ThreadPoolExecutor(jobs) as pool:
        texts = list(pool.map(translated, units))
        if edit and all(before == after for _, before, after in texts):
            raise EmulationError(f"the edit changes nothing in {source.name}, of its instances {instances!r}")
        objects = list(pool.map(lambda one: compile_unit(one[0], one[2]), texts))
        runtime = sorted((HERE / "runtime").glob("*.cpp"))
        listed = "FA_KERNEL_ABI" in source.read_text()
        objects += pool.map(compile_runtime, [path for path in runtime if listed or path.stem != "kernel"])
    libraries = ("-ldl", "-lm", "-lpthread")
    _run([*_compiler(), "-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined", *map(str, objects), "-o", str(target), *libraries])
    return target


def load(path: Path, kernel: str) -> str:
    """Loads a library of build(); returns the kernel's name in this process."""
    from fa_ext import _core

    return _core.load(str(path), kernel)


class _Fault(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint64), ("where", ctypes.c_int64 * 3), ("owner", ctypes.c_uint32)]


class _Board(ctypes.Structure):
    _fields_ = [("epoch", ctypes.c_uint32), ("of", _Fault * 5)]


def faults(path: Path) -> list[tuple]:
    """The counts of an emulated kernel since the last call, as fa_ext.faults() tells of a device."""
    board = _Board.in_dll(ctypes.CDLL(str(path)), "emulated_faults")
    kinds = ("length", "cu_seqlens", "page", "slot", "position")
    found = [(kind, of.count, *of.where) for kind, of in zip(kinds, board.of) if of.count]
    for of in board.of:
        assert not of.count or of.owner == board.epoch, "a fault without the first of its epoch"
        of.count = 0
    board.epoch += 1
    return found


def main() -> None:
    """``python -m tests.emulator KERNEL|FILE -o TARGET [--instances REGEX] [--device NAME] [--races] [-DNAME=VALUE ...]``"""
    import argparse
    import time

    parser = argparse.ArgumentParser(prog="python -m tests.emulator", description="Compiles a CUDA kernel for the emulator.")
    parser.add_argument("kernel", help="a kernel of kernels/ or the path of a .cu file")
    parser.add_argument("-o", dest="target", type=Path, required=True, help="shared library to write")
    parser.add_argument("--races", action="store_true", help="check shared memory for races")
    parser.add_argument("--device", default="h200", help="the described device, a name of devices.json (default h200)")
    parser.add_argument("--instances", default="", help="regular expression: which @instance of the file to compile")
    parsed, flags = parser.parse_known_args()
    from tests.contract.devices import DEVICES

    if parsed.device not in DEVICES:
        parser.error(f"--device is {parsed.device!r}; accepted: {', '.join(DEVICES)}")
    begun = time.monotonic()
    try:
        device = DEVICES[parsed.device]
        target = build(parsed.kernel, parsed.target.resolve(), tuple(flags), parsed.instances, device, parsed.races)
    except EmulationError as error:
        raise SystemExit(f"emulator: {error}") from None
    print(f"{target}: {time.monotonic() - begun:.0f} s")
