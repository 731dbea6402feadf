"""Includes of the C and CUDA files: each file includes the standard headers whose names it uses, so that it compiles with any compiler
and library; no include runs back up."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
C_FILES = sorted(
    path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*") if path.suffix in {".c", ".h", ".cu", ".cuh"}
)

#: Headers by what they declare: names of std, and of the C library where a C file or a kernel's host part uses them.
STD = {
    "algorithm": "clamp copy copy_n count fill fill_n find find_if lower_bound max min sort swap_ranges upper_bound",
    "array": "array",
    "atomic": "atomic memory_order_acquire memory_order_relaxed memory_order_release",
    "bit": "bit_cast countl_zero countr_zero has_single_bit popcount",
    "cmath": "abs ceil copysign exp exp2 fabs floor fmax fmin isfinite isinf isnan log log2 pow sqrt",
    "cstdlib": "getenv strtol strtoul strtoull",
    "cstring": "memcmp memcpy memset strcmp strlen",
    "initializer_list": "initializer_list",
    "iterator": "begin end size",
    "limits": "numeric_limits",
    "mutex": "lock_guard mutex scoped_lock unique_lock",
    "numbers": "numbers",
    "numeric": "gcd lcm",
    "tuple": "tuple",
    "type_traits": "bool_constant conditional_t decay_t enable_if_t false_type integral_constant is_base_of_v is_same_v "
                   "is_trivially_copyable_v remove_cvref_t true_type",
    "utility": "exchange forward integer_sequence make_index_sequence move pair swap",
}  # fmt: skip
LIBC = {
    "limits.h": "INT_MAX INT_MIN LONG_MAX LONG_MIN UINT_MAX",
    "math.h": "copysign exp exp2 exp2f expf fabs fabsf fma fmax fmin frexp isfinite isinf isnan ldexp log log2 lrint nearbyint pow sqrt "
              "sqrtf tanh tanhf INFINITY NAN HUGE_VAL",
    "pthread.h": "pthread_atfork pthread_cond_t pthread_create pthread_mutex_lock pthread_mutex_t pthread_once pthread_setcancelstate",
    "stdarg.h": "va_list va_start va_end",
    "stdatomic.h": "atomic_int atomic_load atomic_store atomic_fetch_add atomic_fetch_sub atomic_ulong atomic_init",
    "stdio.h": "snprintf vsnprintf FILE",
    "stdlib.h": "abs aligned_alloc calloc free getenv llabs malloc realloc strtol strtoll strtoull",
    "string.h": "memchr memcmp memcpy memmove memset strchr strcmp strcpy strlen strncmp strrchr strstr",
    "time.h": "clock_gettime CLOCK_MONOTONIC",
}  # fmt: skip
#: Types and their limits: also a header of the project that the file includes, directly or not, may include these.
TYPES = {
    "stdbool.h": "bool",
    "stddef.h": "offsetof ptrdiff_t size_t",
    "stdint.h": "INT32_MAX INT32_MIN INT64_C INT64_MAX INT64_MIN SIZE_MAX UINT16_MAX UINT32_MAX UINT64_C UINTPTR_MAX int16_t int32_t "
                "int64_t int8_t intptr_t uint16_t uint32_t uint64_t uint8_t uintptr_t",
}  # fmt: skip


def name(path):
    return str(path.relative_to(ROOT))


def code_of(path):
    """A file without comments and string literals."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, " ", path.read_text(), flags=re.DOTALL)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def spellings(header):
    """<string.h> and <cstring> are one."""
    return {header, "c" + header.removesuffix(".h"), header.removeprefix("c") + ".h"}


def project_file(path, header):
    """The file of the project that an include names; None: a header of others."""
    for folder in (path.parent, ROOT / "csrc", ROOT / "kernels", ROOT / "fa_ext" / "include"):
        if (folder / header).is_file():
            return folder / header
    return None


@functools.cache
def closure(path):
    """Headers of others that a file includes, itself or by headers of the project."""
    found, seen, left = set(), {path}, [path]
    while left:
        here = left.pop()
        for header in includes(here):
            inside = project_file(here, header)
            if inside is None:
                found.add(header)
            elif inside not in seen:
                seen.add(inside)
                left.append(inside)
    return found


def missing(path, code):
    """{header: the names of it that a file uses} where the header is not included."""
    is_c = path.is_relative_to(ROOT / "csrc")
    plain = set(re.findall(r"(?<![\w.:>])(?:::)?(\w+)", code))
    types = {x for x in plain if re.search("^[A-Z]|_t$|^va_list$|^atomic_u?(int|long)$", x)}
    called = types | set(re.findall(r"(?<![\w.:>])(?:::)?(\w+)\s*\(", code))
    qualified = set(re.findall(r"\bstd::(\w+)", code))
    own = set(includes(path))
    libc = LIBC if is_c else {header: names for header, names in LIBC.items() if header != "math.h"}  # CUDA's own there
    wanted = {}
    for table, used, included in (STD, qualified, own), (libc, called, own), (TYPES, plain, closure(path)):
        for header, names in table.items():
            found = used & set(names.split())
            if found and not included & spellings(header) and not (header == "stdbool.h" and not is_c):
                wanted[header] = sorted(found)
    return wanted


def unknown(path, code):
    """Names of std that no table has."""
    return set(re.findall(r"\bstd::(\w+)", code)) - {name for names in STD.values() for name in names.split()}


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_a_file_includes_the_headers_of_the_names_it_uses(path):
    code = code_of(path)
    assert not (strange := unknown(path, code)), f"say in STD which header declares {strange}"
    assert not (wanted := missing(path, code)), f"{name(path)} needs {wanted}"


def test_a_missing_header_is_found(tmp_path):
    """The check itself, on a file without the header of std::size."""
    file = tmp_path / "kernel.cu"
    file.write_text("#include <vector>\nint n = std::size(x); // std::sort\n")
    assert missing(file, code_of(file)) == {"iterator": ["size"]}
    file.write_text("#include <iterator>\nint n = std::size(x);\n")
    assert missing(file, code_of(file)) == {}
    assert unknown(file, "std::nothing_of_this_name") == {"nothing_of_this_name"}


# ---- rooms ----

#: Rooms of kernels/ that another room may include, besides what is common to all, or to all of sm90.
SHARED = {"sm90/fused_backward": {"sm90/backward"}, "sm90/packed": {"sm90/prefill", "sm90/serve"}}
#: The files of csrc/ for authors of kernels: those at its top, and the faults that kernels count.
FOR_KERNELS = {path.name for path in (ROOT / "csrc").iterdir() if path.is_file()} | {"faults/faults.h"}


def arrows():
    """(file, the file of the project that it includes)"""
    for path in C_FILES:
        for header in includes(path):
            if (included := project_file(path, header)) is not None:
                yield path, included


def room_of(path):
    """The folder of kernels/ that a file is in, of sm90/ the one within; "" at the top."""
    folders = path.relative_to(ROOT / "kernels").parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("sm90",) else 1])


def test_a_kernel_includes_its_own_room_and_what_lies_below():
    """common/ lies below all others, and sm90/common/ and sm90/score/ below those of sm90/: none includes anything of a kernel."""
    inside = [(path, included) for path, included in arrows() if path.is_relative_to(ROOT / "kernels")]
    assert len(inside) > 300, "the includes are not found"
    for path, included in inside:
        if included.is_relative_to(ROOT / "csrc"):
            assert str(included.relative_to(ROOT / "csrc")) in FOR_KERNELS, f"{name(path)} includes {name(included)}"
            continue
        room = room_of(path)
        below = {room, "common", *SHARED.get(room, ())} | ({"sm90/common", "sm90/score"} if room.startswith("sm90/") else set())
        assert room_of(included) in below, f"{name(path)} includes {name(included)}, which does not lie below it"


def test_csrc_includes_no_kernel():
    csrc, kernels = ROOT / "csrc", ROOT / "kernels"
    assert not [name(a) for a, included in arrows() if a.is_relative_to(csrc) and included.is_relative_to(kernels)]


def test_no_include_leads_back():
    """Headers on a circle of includes are read in an order that depends on who comes first. A table that a file reads several
    times includes nothing."""
    below = {path: set() for path in C_FILES}
    for path, included in arrows():
        if included in below:
            below[path].add(included)
    while ground := [path for path, needed in below.items() if not needed & below.keys()]:
        for path in ground:
            del below[path]
    assert not below, f"these stand on a circle or above one: {sorted(map(name, below))}"
