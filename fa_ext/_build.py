"""How the sources become objects: shared by ``setup.py`` and by the laboratory, which compiles single variants.

A kernel file says in its comments how it is built: ``_directives.py``. Imports nothing of
``fa_ext``, so that it runs before anything is built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
KERNELS = ROOT / "kernels"
INCLUDE = ROOT / "fa_ext" / "include"
#: Files of the build itself, among the sources of every digest.
BUILD_FILES = ("setup.py", "fa_ext/_build.py", "fa_ext/_directives.py", "fa_ext/_archs.py", "fa_ext/_sets.py")


def _load(stem: str):
    """A file beside this one, by its path: this one is also run as a script and loaded where ``fa_ext`` cannot be imported."""
    name = f"fa_ext{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


digests, directives, architectures = _load("_digests"), _load("_directives").directives, _load("_archs")
sets, progress_of, count = _load("_sets"), _load("_progress"), _load("_count")


class BuildError(RuntimeError):
    """A compiler failed; the message holds the command and what it printed."""


class OptionError(BuildError):
    """A variable of the environment cannot be honoured; one line names it, what was given and what is accepted."""


@dataclass(frozen=True)
class Unit:
    """One compilation: a source file, an instance of it or its host part, or the instances of a kernel in one object."""

    source: Path
    name: str
    flags: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()  # of @arch
    pass_an_arch: bool = False
    host: Path | None = None  # the kernel's file, where ``source`` is that of its instances
    macro: str = ""  # FA_INSTANCES(X), for a kernel whose instances have a file of their own
    count: int = 0  # instances in the object

    @property
    def home(self) -> Path:
        return self.host or self.source

    @property
    def kernel(self) -> str:
        return self.home.stem

    @property
    def is_cuda(self) -> bool:
        return self.source.suffix == ".cu"


@dataclass
class Options:
    """The environment's options of a build. See ``options_from_environment``."""

    nvcc: str | None = None
    nvcc_release: tuple[int, int] = (0, 0)
    archs: tuple[str, ...] = ()
    only: str | None = None
    instances: str = sets.CORE
    debug: bool = False
    sanitize: str = ""
    chaos: bool = False
    jobs: int = 1
    defines: dict[str, str] = field(default_factory=dict)
    include_dirs: tuple[str, ...] = ()


def find_nvcc() -> str | None:
    """Path of nvcc: CUDA_HOME or CUDA_PATH, then PATH, then the default prefix."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    found = shutil.which("nvcc")
    if found:
        return found
    default = Path("/usr/local/cuda/bin/nvcc")
    return str(default) if default.exists() else None


def nvcc_release(nvcc: str) -> tuple[int, int]:
    """(major, minor) of a compiler, such as (13, 0)."""
    printed = _run([nvcc, "--version"], "CUDA_HOME").stdout
    found = re.search(r"release (\d+)\.(\d+)", printed)
    if not found:
        raise BuildError(f"{nvcc} --version printed no release: {printed!r}")
    return int(found[1]), int(found[2])


def _switch(name: str, meanings: str) -> bool | None:
    """True for 1, False for 0, None where the variable is unset or empty."""
    given = os.environ.get(name, "")
    if given not in ("", "0", "1"):
        raise OptionError(f"{name} is {given!r}; accepted: {meanings}")
    return None if given == "" else given == "1"


def _archs(nvcc: str | None) -> tuple[str, ...]:
    printed = _run([nvcc, "--list-gpu-code", "--list-gpu-arch"], "CUDA_HOME").stdout if nvcc else ""
    known = re.findall(r"\b(?:sm|compute)_\d+", printed)
    try:
        given = architectures.parsed(os.environ.get("FA_ARCHS", ""), known)
    except ValueError as error:
        raise OptionError(str(error)) from None
    return given or (architectures.for_machine(known) if nvcc else ())


def _pattern(name: str, accepted: str) -> str:
    given = os.environ.get(name, "")
    try:
        re.compile(given)
    except re.error as error:
        raise OptionError(f"{name} is {given!r} ({error}); accepted: {accepted}") from None
    return given


def _jobs() -> int:
    given = os.environ.get("MAX_JOBS", "")
    if given and not (given.isdecimal() and int(given) > 0):
        raise OptionError(
            f"MAX_JOBS is {given!r}; accepted: a number of compilations at a time >= 1, unset (one a core)"
        )
    return int(given) if given else len(os.sched_getaffinity(0))


def options_from_environment() -> Options:
    """FA_CUDA=0|1, FA_ARCHS="sm_90 compute_80"|wheel, FA_INSTANCES=core|all|<regex of instances>, FA_ONLY=<regex of
    kernels>, FA_DEBUG=1, FA_SANITIZE=address,undefined, FA_CHAOS=1, MAX_JOBS. Raises OptionError for what none of them
    means."""
    cuda = _switch("FA_CUDA", "0 (without CUDA), 1 (with CUDA), unset (with CUDA if nvcc is found)")
    nvcc = None if cuda is False else find_nvcc()
    if cuda and nvcc is None:
        raise OptionError("FA_CUDA is '1', but nvcc was not found: set CUDA_HOME, or put nvcc on PATH")
    return Options(
        nvcc=nvcc,
        nvcc_release=nvcc_release(nvcc) if nvcc else (0, 0),
        archs=_archs(nvcc),
        only=_pattern("FA_ONLY", "a regular expression of kernel names") or None,
        instances=_pattern("FA_INSTANCES", sets.ACCEPTED) or sets.CORE,
        debug=bool(_switch("FA_DEBUG", "0 (optimised), 1 (for a debugger)")),
        sanitize=os.environ.get("FA_SANITIZE", ""),
        chaos=bool(_switch("FA_CHAOS", "0 (as it is), 1 (random delays where kernels synchronise)")),
        jobs=_jobs(),
    )


def _compiler(variable: str, default: str) -> list[str]:
    """The words of CC or CXX, or the default."""
    given = os.environ.get(variable, "").strip()
    try:
        return shlex.split(given) or [default]
    except ValueError as error:
        raise OptionError(f"{variable} is {given!r} ({error}); accepted: a compiler's command") from None


def _run(argv: list[str], variable: str) -> subprocess.CompletedProcess[str]:
    """Runs a compiler that ``variable`` can name."""
    try:
        return subprocess.run(argv, capture_output=True, text=True)
    except OSError as error:
        given = os.environ.get(variable)
        source = f"{variable} is {given!r}" if given else f"{variable} is unset"
        why = "was not found" if isinstance(error, FileNotFoundError) else f"does not run ({error.strerror})"
        raise OptionError(f"{source}, but {argv[0]!r} {why}; accepted: a compiler that is installed") from None


def kernel_names() -> list[str]:
    """Kernels of ``csrc/kernels.def`` in order of preference."""
    return [name for _, name in listed_kernels()]


def listed_kernels() -> list[tuple[str, str]]:
    """(operation, name) of each kernel of ``csrc/kernels.def`` in order of preference."""
    return re.findall(r"^FA_KERNEL\((\w+), (\w+)\)", (CSRC / "kernels.def").read_text(), re.MULTILINE)


def cuda_files() -> list[Path]:
    """The .cu files of the library, in whichever folder of ``kernels/`` they lie, but for those of instances."""
    files = sorted(KERNELS.rglob("*.cu"), key=lambda f: f.name)
    return [f for f in files if f not in {i.source for host in files for i in directives(host).instances.values()}]


def kernel_files() -> dict[str, Path]:
    """{name: its file} of each kernel of ``kernels.def`` that has one."""
    files = {f.stem: f for f in (*(CSRC / "cpu").glob("*.c"), *cuda_files())}
    return {name: files[name] for name in kernel_names() if name in files}


def units_of(source: Path, keep: Callable[[str], object] = bool, apart: bool = False) -> list[Unit]:
    """The compilations of one source file, the host part last; of instances in a file of their own those that ``keep``
    holds to be wanted, in one object for each head_dim or, with ``apart``, each in one."""
    said = directives(source)
    # A kernel, and the parts of its operation in other folders, may share a name; all objects lie in one folder.
    place = source.relative_to(CSRC).parts[:-1] if source.is_relative_to(CSRC) else ()
    own = "-".join((*(part for part in place if part != "cpu"), source.stem))
    units: list[Unit] = []
    objects: dict[tuple[Path, str], list[str]] = {}
    for name, instance in said.instances.items():
        if instance.source is None:
            flags = (*said.flags, f"-DFA_INSTANCE={name}", *instance.words)
            units.append(Unit(source, f"{own}.{name}", flags, said.archs, said.pass_an_arch))
        elif keep(name):
            objects.setdefault((instance.source, name if apart else sets.object_of(name)), []).append(name)
    common = {"flags": said.flags, "archs": said.archs, "pass_an_arch": said.pass_an_arch}
    for (file, name), held in objects.items():
        macro = sets.macro(source.stem, {n: said.instances[n].words for n in held})
        units.append(Unit(file, f"{own}.{name}", **common, host=source, macro=macro, count=len(held)))
    all_of_it = {name: instance.words for name, instance in said.instances.items() if instance.source}
    return [*units, Unit(source, own, **common, macro=sets.macro(source.stem, all_of_it) if all_of_it else "")]


def plan_units(options: Options) -> tuple[list[Unit], dict[str, str]]:
    """All compilations of a build and the FA_HAVE_<kernel> defines for ``kernels.def``."""
    kernels = kernel_names()
    files = sorted((CSRC / "cpu").glob("*.c"))
    if options.nvcc:
        files += [f for f in cuda_files() if (options.chaos or f.stem != "chaos") and archs_of(directives(f).archs, options)]
    if options.only:
        files = [f for f in files if f.stem not in kernels or re.search(options.only, f.stem)]
    compiled = {f.stem for f in files}
    defines = {f"FA_HAVE_{kernel}": str(int(kernel in compiled)) for kernel in kernels}
    if options.nvcc:
        defines["FA_HAVE_CUDA"] = "1"
    if options.chaos:
        defines["FA_HAVE_CHAOS"] = "1"
    chosen = chosen_instances(files, options)
    units = [u for f in files for u in units_of(f, chosen.get(f, set()).__contains__)]
    units += [u for f in sorted(CSRC.rglob("*.c")) if f.parent != CSRC / "cpu" for u in units_of(f)]
    # The longest compilations first, so that the last of them does not run alone.
    units.sort(key=lambda u: -seconds_of(u, options))
    return units, defines


def chosen_instances(files: list[Path], options: Options) -> dict[Path, set[str]]:
    """{kernel file: its instances in the set that FA_INSTANCES asks for}. Raises OptionError where there is none."""
    said = {f: directives(f) for f in files if f.suffix == ".cu"}
    asked = {f: {n for n, i in d.instances.items() if i.source} for f, d in said.items()}
    chosen = {f: {n for n in names if sets.holds(options.instances, f.stem, n, said[f].core)} for f, names in asked.items()}
    if any(asked.values()) and not any(chosen.values()):
        exist = ", ".join(f"{f.stem}.{pattern}" for f, names in asked.items() if names for pattern in said[f].patterns)
        raise OptionError(f"FA_INSTANCES is {options.instances!r}, which no instance matches; accepted: {sets.ACCEPTED}: {exist}")
    return chosen


def left_out(units: list[Unit]) -> list[str]:
    """Instances of the kernels of a build that it does not have, such as wgmma_sm90.d96_full_f16."""
    built = {f"{u.kernel}_{name}" for u in units if u.host for name in sets.names(u.macro, u.kernel)}
    hosts = [u for u in units if u.macro and not u.host]
    return [f"{u.kernel}.{name}" for u in hosts for name in sets.names(u.macro, u.kernel) if f"{u.kernel}_{name}" not in built]


def archs_of(own: tuple[str, ...], options: Options) -> tuple[str, ...]:
    return architectures.of_file(own, options.archs or architectures.DEFAULT)


def seconds_of(unit: Unit, options: Options) -> float:
    """CPU seconds that a compilation takes, about."""
    archs = archs_of(unit.archs, options) if unit.is_cuda else ()
    return sets.seconds(unit.kernel, unit.count, archs, unit.pass_an_arch, unit.is_cuda)


def command(unit: Unit, target: Path, options: Options) -> list[str]:
    """The compiler command for one unit. CUDA commands print ptxas' resource report (``-v``) on stderr."""
    known = {name: value for name, value in options.defines.items() if not (unit.is_cuda and name.startswith("FA_HAVE_"))}
    defines = [f"-D{name}={value}" if value else f"-D{name}" for name, value in sorted(known.items())]
    includes = [f"-I{CSRC}", f"-I{KERNELS}"]
    dependencies = ["-MD", "-MF", str(target.with_suffix(".d"))]
    if unit.is_cuda:
        assert options.nvcc
        archs = architectures.gencode(archs_of(unit.archs, options), unit.pass_an_arch)
        mode = ["-G", "-g"] if options.debug else ["-O3"]
        if options.chaos:
            mode += ["-DFA_CHAOS=1", "-include", str(KERNELS / "common" / "chaos.cuh")]
        if options.nvcc_release >= (12, 8):
            mode.append("--compress-mode=size")  # a third of the size and less
        return [options.nvcc, "-std=c++20", *mode, "--expt-relaxed-constexpr", "-Xptxas", "-v", *archs,
                "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", *defines, *includes, *unit.flags,
                *(["-include", str(macro_file(target))] if unit.macro else []), *dependencies,
                "-c", str(unit.source), "-o", str(target)]  # fmt: skip
    compiler = _compiler("CC", "gcc")
    mode = ["-O0", "-g"] if options.debug else ["-O2", "-g1"]
    sanitize = [f"-fsanitize={options.sanitize}", "-fno-omit-frame-pointer"] if options.sanitize else []
    python = [f"-I{sysconfig.get_path('include')}", *(f"-I{d}" for d in options.include_dirs)]
    cuda = [f"-I{Path(options.nvcc).resolve().parent.parent / 'include'}"] if options.nvcc else []
    return [*compiler, "-std=c11", "-D_GNU_SOURCE", *mode, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
            *sanitize, *defines, *includes, f"-I{INCLUDE}", *python, *cuda, *unit.flags, *dependencies,
            "-c", str(unit.source), "-o", str(target)]  # fmt: skip


def macro_file(target: Path) -> Path:
    """The header with FA_INSTANCES(X) of an object, beside it."""
    return target.with_suffix(".instances.h")


def _is_current(target: Path, stamp: Path, digest: str) -> bool:
    if not (target.exists() and stamp.exists() and stamp.read_text() == digest):
        return False
    made = target.stat().st_mtime_ns
    try:
        return all(os.stat(name).st_mtime_ns <= made for name in digests.dependencies(target))
    except OSError:
        return False


def compile_unit(unit: Unit, folder: Path, options: Options) -> Path:
    """Compiles one unit unless it is up to date; keeps what the compiler printed in ``<object>.log``."""
    target = folder / f"{unit.name}.o"
    argv = command(unit, target, options)
    digest = hashlib.sha256("\0".join((*argv, unit.macro)).encode()).hexdigest()
    stamp = target.with_suffix(".cmd")
    if _is_current(target, stamp, digest) and (not unit.is_cuda or digests.device_file(target).exists()):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if unit.macro:
        macro_file(target).write_text(unit.macro)
    failed, printed = _compile_cuda(argv, target) if unit.is_cuda else _timed(argv, "CC", target)
    if failed:
        target.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(argv)}\n{printed}")
    shown = [line for line in printed.splitlines() if "warning" in line.lower() or "C75" in line]
    if shown and not unit.is_cuda:
        print("\n".join(printed.splitlines()), file=sys.stderr)
    stamp.write_text(digest)
    return target


def _timed(argv: list[str], variable: str, target: Path) -> tuple[int, str]:
    """Runs a compiler: (how it ended, what it printed). Keeps that in ``<object>.log``, its CPU seconds in ``.seconds``."""
    with target.with_suffix(".log").open("w+") as log:
        try:
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        except OSError:
            _run(argv, variable)  # says why
            raise
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        printed = log.read()
    target.with_suffix(".seconds").write_text(f"{used.ru_utime + used.ru_stime:.1f}")
    return process.returncode, printed


def _compile_cuda(argv: list[str], target: Path) -> tuple[int, str]:
    """Runs nvcc and writes the labels of the device code beside the object, which holds that code compressed."""
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}.", dir=target.parent) as kept:
        failed, printed = _timed([*argv, "--keep", "--keep-dir", kept], "CUDA_HOME", target)
        if not failed:
            found = digests.device_labels(sorted(Path(kept).glob("*.cubin")))
            digests.device_file(target).write_text(json.dumps(found))
    return failed, printed


def compile_all(units: list[Unit], folder: Path, options: Options, progress: bool = False) -> list[Path]:
    """Compiles the units, ``options.jobs`` at a time; with ``progress`` a line says how far it is."""
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        futures = [pool.submit(compile_unit, unit, folder, options) for unit in units]
        try:
            if progress:
                progress_of.show(futures)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def groups_of(units: list[Unit], objects: list[Path]) -> dict[str, list[Path]]:
    """{kernel: its objects}, and the rest as ``core``. A file beside kernels that is none belongs to each of them, and so do
    the threads that kernels of the CPU run on."""
    kernels = {u.home for u in units} & set(kernel_files().values())
    groups: dict[str, list[Path]] = {digests.CORE: [], **{source.stem: [] for source in kernels}}
    for unit, target in zip(units, objects, strict=True):
        folder = ROOT / "csrc" / "cpu" if unit.source == ROOT / "csrc" / "device" / "threads.c" else unit.home.parent
        beside = [source.stem for source in kernels if source.parent == folder]
        for name in [unit.kernel] if unit.home in kernels else beside or [digests.CORE]:
            groups[name].append(target)
    return groups


def digests_object(units: list[Unit], objects: list[Path], folder: Path, options: Options) -> Path:
    """An object that carries the digests of all the others into the extension, for ``digests.read``."""
    c_compiler = _release(_compiler("CC", "gcc"))
    cuda = _release([options.nvcc]) if options.nvcc else ""
    for_core = (c_compiler, "with CUDA" if cuda else "", f"FA_ONLY={options.only}" if options.only else "")
    for_cuda = (c_compiler, cuda, f"FA_ARCHS={' '.join(options.archs)}" if options.archs != architectures.DEFAULT else "")
    groups = groups_of(units, objects)
    described = digests.describe(groups, ROOT, BUILD_FILES)
    for name in groups:
        made = for_core if name == digests.CORE else for_cuda if described[name]["device"] else (c_compiler,)
        described[name]["compilers"] = ", ".join(filter(None, made))
    document = {"format": digests.FORMAT, "debug": options.debug, "chaos": options.chaos,
                "sanitize": options.sanitize, "left_out": left_out(units), "groups": described}  # fmt: skip
    facts = {"fa_instance_set": options.instances, "fa_left_out": " ".join(document["left_out"])}
    lines = [f"extern const char {name}[];\nconst char {name}[] = {json.dumps(said)};\n" for name, said in facts.items()]
    source, text = folder / "digests.c", digests.as_c(document) + "".join(lines)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return compile_unit(Unit(source, "digests"), folder, options)


def _release(argv: list[str]) -> str:
    """The line of ``<compiler> --version`` that names its release."""
    lines = _run([*argv, "--version"], "CC").stdout.strip().splitlines() or [argv[0]]
    return next((line for line in lines if "release" in line), lines[0])


def link_flags(options: Options) -> list[str]:
    """Libraries of the extension. libcuda and cuBLAS are never linked: they are found at run time."""
    flags = ["-lm", "-fopenmp"]
    if options.nvcc:
        home = Path(options.nvcc).resolve().parent.parent
        libraries = next((d for d in (home / "lib64", home / "targets/x86_64-linux/lib") if d.exists()), home / "lib64")
        flags += [f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    if options.sanitize:
        flags.append(f"-fsanitize={options.sanitize}")
    return flags


def link_shared(objects: list[Path], target: Path, options: Options) -> Path:
    """Links objects into a shared library with g++ (nvcc's host objects need its runtime)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = [*_compiler("CXX", "g++"), "-shared", *map(str, objects), "-o", str(target),
            *link_flags(options)]  # fmt: skip
    done = _run(argv, "CXX")
    if done.returncode:
        raise BuildError(f"{shlex.join(argv)}\n{done.stdout}{done.stderr}")
    return target


def build_kernel(
    source: Path, target: Path, options: Options, extra: tuple[str, ...] = (), progress: bool = False
) -> Path:
    """Builds one kernel alone as a shared library that exports ``fa_kernel_<name>``; ``fa_ext._core.load`` takes it.

    ``source`` is a kernel file (.c or .cu) and ``extra`` are flags such as ``-DBLOCK_M=32`` for all its compilations.
    """
    files = [source, *directives(source).beside]
    chosen = chosen_instances(files, options)
    units = [u for file in files for u in units_of(file, chosen.get(file, set()).__contains__)]
    units = [replace(unit, flags=(*unit.flags, *extra)) for unit in units]
    objects = compile_all(units, target.with_suffix(".objects"), options, progress)
    return link_shared(objects, target, options)


def main() -> None:
    """``python fa_ext/_build.py KERNEL|FILE [-o TARGET] [-DNAME=VALUE ...]``: one kernel as a shared library;
    ``--count [FOLDER]``: what the sets of instances cost, and what the objects in a folder took."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    if sys.argv[1:2] == ["--count"]:
        return count.show(sys.modules[__name__], Path(sys.argv[2]) if sys.argv[2:] else None)
    parser.add_argument("kernel", help="a kernel of kernels.def, or the path of a kernel file")
    parser.add_argument("-o", dest="target", type=Path, help="shared library to write (default build/kernels/<kernel>.so)")
    parsed, extra = parser.parse_known_args()
    given = Path(parsed.kernel)
    source = given if given.is_file() else kernel_files().get(parsed.kernel)
    if source is None:
        parser.error(f"no kernel file for {parsed.kernel!r}")
    target = parsed.target or ROOT / "build" / "kernels" / f"{source.stem}.so"
    try:
        build_kernel(source.resolve(), target.resolve(), options_from_environment(), tuple(extra), progress=True)
    except BuildError as error:
        raise SystemExit(f"fa_ext: {error}") from None
    for log in sorted(target.resolve().with_suffix(".objects").glob("*.log")):
        sys.stdout.write(log.read_text())
    print(target)


if __name__ == "__main__":
    main()
