"""Reads every C file and the host part of every CUDA file with clang, as far as its errors and, in C, its warnings go.

    python .ci/clang.py     prints what clang says; exit status 1 on a finding

Clang reads CUDA files as C++ with the headers of tests/emulator in place of CUDA's, since distributions' clang does not know those of
CUDA 13: ``-x cuda --cuda-host-only`` ends in its own wrapper of texture headers that are gone.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ |= {"CC": "clang", "CXX": "clang++"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy  # noqa: E402

from fa_ext import _build  # noqa: E402
from tests import emulator  # noqa: E402

CPP = ["clang++", "-std=gnu++20", "-march=native", "-w", "-fsyntax-only", "-x", "c++-cpp-output", "-"]
#: For clang before 15, which has the type on Arm alone.
HALF = "-D_Float16=__fp16"


def read_c(unit, options):
    argv = _build.command(unit, Path(os.devnull), options)
    begin = argv.index("-MD")
    flags = argv[:begin] + argv[begin + 3 : argv.index("-c")]
    return subprocess.run([*flags, "-Werror", "-fsyntax-only", str(unit.source)], capture_output=True, text=True)


def read_cuda(unit):
    try:
        text = emulator.preprocessed(unit.source, (*unit.flags, HALF), 90, unit.macro)
    except emulator.EmulationError as error:
        return subprocess.CompletedProcess([], 1, stderr=str(error))
    return subprocess.run(CPP, input=text, capture_output=True, text=True)


def main():
    options = _build.options_from_environment()
    units, defines = _build.plan_units(options)
    options.defines = {**defines, "FA_VERSION": '""', "Py_LIMITED_API": "0x030B0000",
                       "NPY_NO_DEPRECATED_API": "NPY_2_0_API_VERSION", "NPY_TARGET_VERSION": "NPY_2_0_API_VERSION"}  # fmt: skip
    options.include_dirs = (numpy.get_include(),)
    hosts = [_build.units_of(file)[-1] for file in _build.cuda_files() if file.stem != "chaos"]
    found = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [(u.name, pool.submit(read_c, u, options)) for u in units if not u.is_cuda]
        tasks += [(u.name, pool.submit(read_cuda, u)) for u in hosts]
        for name, task in tasks:
            done = task.result()
            found += done.returncode != 0
            print(f"{name}:\n{done.stderr[:4000]}" if done.returncode else "", end="")
    print(f"clang: {len(tasks)} compilations, {found} with findings")
    return 1 if found or len(hosts) < 15 else 0


if __name__ == "__main__":
    sys.exit(main())
