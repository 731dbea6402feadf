"""The build's answer to a variable of the environment that it cannot honour: one line, never a traceback; and what goes
into a kernel built alone and into a source distribution."""

import contextlib
import ctypes
import importlib.metadata
import os
import pty
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import fa_ext
from fa_ext import _build

ROOT = Path(fa_ext.__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="the sources are not here")

BAD = [
    ("FA_CUDA", "2", "accepted: 0 (without CUDA), 1 (with CUDA), unset"),
    ("FA_CUDA", "yes", "accepted: 0 (without CUDA), 1 (with CUDA), unset"),
    ("FA_ARCHS", "foo", "accepted: architectures of nvcc such as 'sm_80"),
    ("FA_ARCHS", "sm_90;sm90", "accepted: architectures of nvcc such as 'sm_80"),
    ("FA_ARCHS", "sm_70", "from sm_80 on, or wheel (sm_80 sm_86 sm_89 sm_90 compute_80)"),
    ("FA_INSTANCES", "(", "accepted: core, all, or a regular expression of instances such as 'wgmma_sm90.d128_masked_bf16'"),
    ("FA_ONLY", "(", "accepted: a regular expression of kernel names"),
    ("FA_DEBUG", "on", "accepted: 0 (optimised), 1 (for a debugger)"),
    ("FA_CHAOS", "yes", "accepted: 0 (as it is), 1 (random delays where kernels synchronise)"),
    ("MAX_JOBS", "x", "accepted: a number of compilations at a time >= 1"),
    ("MAX_JOBS", "0", "accepted: a number of compilations at a time >= 1"),
    ("MAX_JOBS", "-2", "accepted: a number of compilations at a time >= 1"),
]
BAD_COMPILERS = [
    ("CC", "nogcc", "'nogcc' was not found; accepted: a compiler that is installed"),
    ("CC", "/dev/null -O1", "'/dev/null' does not run"),
    ("CC", 'gcc "', "accepted: a compiler's command"),
    ("CXX", "nog++", "'nog++' was not found; accepted: a compiler that is installed"),
]


def has_setuptools():
    """Whether setup.py runs outside of pip, which brings its own: a fresh environment has none, or one that is too old."""
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def said(arguments, variable, given):
    """The last line of standard error of a build that must fail."""
    environment = os.environ | {"FA_CUDA": "0", variable: given}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("variable", "given", "accepted"), BAD + BAD_COMPILERS)
def test_one_kernel_alone(variable, given, accepted, tmp_path):
    line = said(["fa_ext/_build.py", "cpu_ref", "-o", str(tmp_path / "kernel.so")], variable, given)
    assert line.startswith(f"fa_ext: {variable} is {given!r}") and accepted in line


@pytest.mark.skipif(not has_setuptools(), reason="setuptools 77 or newer is not installed")
@pytest.mark.parametrize(("variable", "given", "accepted"), BAD)
def test_the_extension(variable, given, accepted, tmp_path):
    folders = ["--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    line = said(["setup.py", "-q", "build_ext", *folders], variable, given)
    assert line.startswith(f"fa_ext: {variable} is {given!r}") and accepted in line


@pytest.mark.parametrize("given", ["sm_90", "sm_80 sm_90a, compute_80", "sm_100f;sm_120", "wheel", ""])
def test_architectures(given, monkeypatch):
    from fa_ext import _build

    monkeypatch.setenv("FA_ARCHS", given)
    monkeypatch.setenv("FA_CUDA", "0")
    assert len(_build.options_from_environment().archs) == {"sm_90": 1, "": 0, "sm_100f;sm_120": 2, "wheel": 5}.get(given, 3)


@pytest.mark.parametrize("kernel", ["cpu_ref", "cpu_ref_backward", "cpu_merge", "cpu_append"])
def test_a_kernel_alone_lacks_nothing(monkeypatch, tmp_path, kernel):
    """Loaded at once and not when it is called; the vector kernels, which compile for longer, are loaded by the tuner's tests."""
    from fa_ext import _build

    monkeypatch.setenv("FA_CUDA", "0")
    target = _build.build_kernel(ROOT / f"csrc/cpu/{kernel}.c", tmp_path / f"{kernel}.so", _build.options_from_environment())
    assert ctypes.CDLL(str(target), os.RTLD_NOW | os.RTLD_LOCAL)[f"fa_kernel_{kernel}"]


@pytest.mark.parametrize(
    "source, beside",
    [
        ("csrc/cpu/cpu_simd.c", {"simd_isa.c"}),
        ("csrc/cpu/cpu_simd_backward.c", {"simd_isa.c", "gradient.c"}),
        ("kernels/minimal.cu", set()),
    ],
)
def test_a_kernel_alone_links_nothing_of_the_library(monkeypatch, tmp_path, source, beside):
    """It reaches the library through the functions that a launch hands to it, and holds what kernels share."""
    from fa_ext import _build

    compiled = []
    monkeypatch.setattr(_build, "compile_all", lambda units, *_: compiled.extend(units) or [])
    monkeypatch.setattr(_build, "link_shared", lambda objects, target, options: target)
    monkeypatch.setenv("FA_CUDA", "0")
    _build.build_kernel(ROOT / source, tmp_path / "kernel.so", _build.options_from_environment())
    assert compiled and {unit.source for unit in compiled} == {ROOT / source, *((ROOT / source).with_name(n) for n in beside)}


SLOW_BUILD = """
import os, sys, time
sys.path.insert(0, {root!r})
from fa_ext import _build
_build.progress_of.LOG_EVERY = 1
_build.compile_unit = lambda unit, folder, options: time.sleep(unit) or {fails}
print(_build.compile_all([0, 0, 1.6, 1.6], None, _build.Options(jobs=1), {progress}))
"""


def slow_build(log, leave=None, fails="unit", progress=True):
    """(what a slow build shows on its terminal, what it prints); ``leave`` takes it out of the terminal's foreground."""
    script = SLOW_BUILD.format(root=str(ROOT), fails=fails, progress=progress)
    child, master = pty.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if leave and os.fork():  # a process that leads its session cannot leave
                os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
            if leave:
                leave()
            os.execv(sys.executable, [sys.executable, "-c", script])
        finally:
            os._exit(99)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(master, 4096):
            shown += piece
    os.close(master)
    os.waitpid(child, 0)
    return shown.decode(), Path(log).read_text()


def test_progress_goes_to_the_terminal_though_the_output_is_kept(tmp_path):
    shown, printed = slow_build(tmp_path / "log")
    assert re.fullmatch(r"(\rfa_ext: [0-3] of 4 files compiled, \d+ s)+\r\x1b\[K", shown)
    assert printed == "[0, 0, 1.6, 1.6]\n"


@pytest.mark.parametrize("leave", [os.setsid, os.setpgrp])
def test_progress_without_a_terminal_or_in_its_background_is_printed(leave, tmp_path):
    shown, printed = slow_build(tmp_path / "log", leave)
    assert shown == ""
    assert re.fullmatch(r"(fa_ext: [0-3] of 4 files compiled, \d+ s\n)+\[0, 0, 1.6, 1.6\]\n", printed)


def test_progress_of_what_fails_and_of_what_is_quiet(tmp_path):
    shown, printed = slow_build(tmp_path / "log", fails="1 / unit")
    assert shown in ("", "\r\x1b[K") and printed.splitlines()[-1].startswith("ZeroDivisionError")
    assert slow_build(tmp_path / "log", progress=False) == ("", "[0, 0, 1.6, 1.6]\n")


@pytest.mark.skipif(not has_setuptools(), reason="setuptools 77 or newer is not installed")
def test_a_source_distribution_holds_the_sources(tmp_path):
    # Of a copy: it makes a folder beside the sources, in which other tests would find files that come and go.
    folders = ("csrc", "kernels", "fa_ext", "tests", "bench", ".ci")
    for name in folders:
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    metadata = ["egg_info", "--egg-base", str(tmp_path)]
    command = [sys.executable, "setup.py", "-q", *metadata, "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "copy", env=os.environ | {"FA_CUDA": "0"}, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        top = held.getnames()[0].partition("/")[0]
        names = {name.removeprefix(f"{top}/") for name in held.getnames()}
        information = held.extractfile(f"{top}/PKG-INFO").read().decode().splitlines()
    files = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    wanted = {path.as_posix() for path in files if path.suffix not in (".pyc", ".so")}
    wanted |= {"pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE"}
    assert len(wanted) > 100 and wanted <= names, sorted(wanted - names)
    assert not {name for name in names if name.endswith((".pyc", ".so"))}
    assert "Author: The fa_ext authors" in information and "License-Expression: Apache-2.0" in information


def test_an_old_setuptools_is_named(tmp_path):
    """Debian's, which a fresh environment gets: it would call the licence in pyproject.toml invalid."""
    (tmp_path / "setuptools.py").write_text("__version__ = '66.1.1'\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "setup.py", "build_ext"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fa_ext: setuptools 66.1.1 is too old for setup.py; accepted: 77 or newer") and "pip install -e ." in line


@pytest.mark.parametrize("nvcc", (None, "nvcc"))
def test_every_object_has_a_name_of_its_own(nvcc):
    units, _ = _build.plan_units(_build.Options(nvcc=nvcc))
    names = [unit.name for unit in units]
    assert len(names) == len(set(names)) > 20


def test_a_product_of_instances(tmp_path):
    source = tmp_path / "x.cu"
    source.write_text("""/* A kernel.
 *
 * @instance d{64,128}_{full,capped} -DDIM={1} -DKIND={2:FULL,CAPPED}
 *           -DNAME=k{1}{2}
 * @instance all -DALL
 * - a line that is none
 */
""")
    said = _build.directives(source)
    assert {name: instance.words for name, instance in said.instances.items()} == {
        "d64_full": ("-DDIM=64", "-DKIND=FULL", "-DNAME=k64full"),
        "d64_capped": ("-DDIM=64", "-DKIND=CAPPED", "-DNAME=k64capped"),
        "d128_full": ("-DDIM=128", "-DKIND=FULL", "-DNAME=k128full"),
        "d128_capped": ("-DDIM=128", "-DKIND=CAPPED", "-DNAME=k128capped"),
        "all": ("-DALL",),
    }


# ---- which instances, for which GPUs, at what cost ----


def options(**given):
    return _build.Options(nvcc="nvcc", **given)


def instances_of(units):
    return {f"{u.kernel}.{name}" for u in units if u.host for name in _build.sets.names(u.macro, u.kernel)}


def test_sets_of_instances():
    everything, _ = _build.plan_units(options(instances="all"))
    core, _ = _build.plan_units(options())
    assert _build.left_out(everything) == []
    assert instances_of(core) < instances_of(everything)
    assert instances_of(core) | set(_build.left_out(core)) == instances_of(everything)
    assert "wgmma_sm90.d128_masked_bf16" in instances_of(core) and "wgmma_sm90.d96_full_f16" in _build.left_out(core)
    one, _ = _build.plan_units(options(instances="d128_masked_bf16", only="^wgmma_sm90$"))
    assert instances_of(one) == {"wgmma_sm90.d128_masked_bf16"}


def test_instances_that_match_nothing_are_named_with_those_that_exist():
    with pytest.raises(_build.OptionError, match=r"FA_INSTANCES is 'd100', which no instance matches; .*: wgmma_sm90\.d\{256,192"):
        _build.plan_units(options(instances="d100", only="^wgmma_sm90$"))


def test_the_host_knows_of_every_instance_and_an_object_of_its_own():
    units = _build.units_of(_build.kernel_files()["wgmma_sm90"], lambda name: name.startswith("d64_"))
    assert [unit.name for unit in units] == ["wgmma_sm90.d64", "wgmma_sm90"]
    assert units[0].count == 10 and units[0].macro.count("X(wgmma_sm90_d64_") == 10 and "d128" not in units[0].macro
    assert "X(wgmma_sm90_d128_full_f16, 128, kFull, __half)" in units[1].macro
    apart = _build.units_of(_build.kernel_files()["wgmma_sm90"], lambda name: name.startswith("d64_"), apart=True)
    assert [unit.count for unit in apart] == [1] * 10 + [0]


@pytest.mark.parametrize(
    ("own", "archs", "built"),
    [
        ((), ("sm_90", "compute_80"), ("sm_90", "compute_80")),
        ((), ("sm_90a", "sm_90", "compute_80"), ("sm_90", "compute_80")),
        (("sm_90a",), ("sm_90", "compute_80"), ("sm_90a",)),
        (("sm_90a",), ("sm_90a",), ("sm_90a",)),
        (("sm_90a",), ("sm_80", "compute_80"), ()),
        (("sm_90a",), _build.architectures.WHEEL, ("sm_90a",)),
    ],
)
def test_architectures_of_a_file(own, archs, built):
    assert _build.architectures.of_file(own, archs) == built


def test_a_pass_of_the_front_end():
    gencode = _build.architectures.gencode
    assert gencode(("sm_90", "compute_80"), False) == ["-gencode", "arch=compute_80,code=[sm_90,compute_80]"]
    assert gencode(("sm_90a",), False) == ["-gencode", "arch=compute_90a,code=sm_90a"]
    both = ["-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_80,code=compute_80"]
    assert gencode(("sm_90", "compute_80"), True) == both


def test_hopper_is_left_out_where_no_gpu_is_one(monkeypatch):
    known = ["sm_80", "sm_86", "sm_90", "compute_80", "compute_90"]
    for gpus, archs in ([[], _build.architectures.DEFAULT], [[86], ("sm_86", "compute_80")], [[103], ("compute_80",)]):
        monkeypatch.setattr(_build.architectures, "in_sight", lambda gpus=gpus: gpus)
        assert _build.architectures.for_machine(known) == archs
    units, defines = _build.plan_units(options(archs=("sm_86", "compute_80")))
    assert defines["FA_HAVE_wgmma_sm90"] == "0" and defines["FA_HAVE_mma_sm80"] == "1"
    assert not any(unit.archs for unit in units)


def test_an_architecture_that_nvcc_does_not_know_is_named_with_those_that_it_does():
    with pytest.raises(ValueError, match=r"FA_ARCHS is 'sm_95'; accepted: sm_80, sm_90, compute_80"):
        _build.architectures.parsed("sm_95", ["sm_80", "sm_90", "compute_80"])


def included(path, seen):
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
        for place in (ROOT / "kernels" / name, ROOT / "csrc" / name, path.parent / name):
            if place.is_file() and place not in seen:
                seen.add(place)
                included(place, seen)
    return seen


@pytest.mark.parametrize("source", [f for f in _build.cuda_files() if f.stem != "chaos"], ids=lambda path: path.stem)
def test_code_that_asks_for_its_architecture_takes_a_pass_for_each(source):
    said = _build.directives(source)
    files = {source, *(instance.source for instance in said.instances.values())}
    read = set().union(*(included(file, {file}) for file in files))
    asks = any(re.search(r"__CUDA_ARCH__\s*[<>=!]", path.read_text()) for path in read)  # not only whether it is a device's
    assert said.archs or asks == said.pass_an_arch


def test_the_budget_of_the_build():
    """Kernels that cost more than this table says are a decision: it stands there."""
    budget, rows = _build.sets.BUDGET, {}
    for name in ("core", "all"):
        rows[name] = _build.count.expected(_build, options(instances=name, jobs=2))
    assert set(budget) == set(rows["all"]) - {"C"} == set(_build.sets.COSTS)
    for kernel, row in budget.items():
        found = [rows[name][kernel].instances for name in ("core", "all")]
        assert found == [row.core, row.all], f"{kernel} has {found} instances in core and all: name them in BUDGET"
    assert sum(row.seconds for row in rows["core"].values()) <= _build.sets.CORE_SECONDS


@pytest.mark.skipif(_build.find_nvcc() is None, reason="nvcc is not installed")
def test_what_a_build_says_of_itself(monkeypatch):
    for name in ("FA_ARCHS", "FA_INSTANCES", "FA_CUDA"):
        monkeypatch.delenv(name, raising=False)
    given = _build.options_from_environment()
    units, _ = _build.plan_units(given)
    first = _build.count.first_line(_build, units, given)
    for word in ("instances core", "CPU minutes", "FA_CUDA=0", "FA_ARCHS", "FA_INSTANCES=all"):
        assert word in first
    last = _build.count.last_line(_build.left_out(units), given)
    assert last.startswith("fa_ext: FA_INSTANCES=core leaves out") and "19 of wgmma_sm90" in last
    assert _build.count.last_line([], given) is None


def test_the_table_of_the_build(tmp_path):
    (tmp_path / "simt.f16.log").write_text("Compiling entry function '_Z1av' for 'sm_90'\nCompiling entry function '_Z1bv' for 'sm_90'\n")
    (tmp_path / "simt.f16.device.json").write_text("{}")
    (tmp_path / "simt.f16.seconds").write_text("12.5")
    environment = os.environ | {"FA_CUDA": "0"}
    line = [sys.executable, "fa_ext/_build.py", "--count", str(tmp_path)]
    printed = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^core: \d+ objects, \d+ CPU seconds; limit of core: 900$", printed, re.MULTILINE)
    made = _build.count.made(tmp_path)["simt"]
    assert made.seconds == 12.5 and made.functions["sm_90"] == {"_Z1av", "_Z1bv"}
