"""Rules of the source tree: who may know Python and CUDA, what a library may not do, how long a file may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_ext import _build

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 500

C_FILES = sorted(
    path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*") if path.suffix in {".c", ".h", ".cu", ".cuh"}
)
PYTHON_FILES = sorted(path for folder in ("fa_ext", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
FRAMEWORKS = {"torch", "cupy", "jax", "numba", "tensorflow"}


def name(path):
    return str(path.relative_to(ROOT))


def code_of(path):
    """A C or CUDA file without comments and string literals; line breaks stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''

    def blank(match):
        text = match.group()
        return "\n" * text.count("\n") if text.startswith("/") else '""'

    return re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_there_is_something_to_look_at():
    assert len(C_FILES) > 10 and len(PYTHON_FILES) > 5


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_only_the_front_end_knows_python(path):
    if path.is_relative_to(ROOT / "csrc" / "python"):
        return
    theirs = r"(^|/)(Python|numpy/|structmember|datetime|python/|state\.h|arrays\.h|call\.h)"
    known = [header for header in includes(path) if re.search(theirs, header)]
    assert not known, f"{name(path)} includes {known}; only csrc/python may"
    assert not re.search(r"\bPy(Object|Err|Arg|Long|Unicode|Array)_?\w*", code_of(path))


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_only_kernels_and_device_know_cuda(path):
    if path.is_relative_to(ROOT / "kernels") or path.name in ("device.c", "host_mapped.c"):
        return
    known = [header for header in includes(path) if re.match(r"(cuda|cublas|nv|mma\.h|cooperative_groups)", header)]
    assert not known, f"{name(path)} includes {known}; only kernels/, device.c and host_mapped.c of csrc/device may"
    assert not re.search(r"\bcuda[A-Z]\w+\s*\(|\bcu[A-Z][a-z]\w+\s*\(", code_of(path)), f"{name(path)} calls CUDA"


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_the_library_neither_prints_nor_exits(path):
    for number, line in enumerate(code_of(path).splitlines(), 1):
        found = re.search(r"\b(exit|_exit|abort|printf|fprintf|puts|fputs|putchar|perror|assert)\s*\(", line)
        assert not found or "static_assert" in line, f"{name(path)}:{number}: {line.strip()}"
    assert not any(header in ("stdio.h", "iostream", "assert.h", "cassert") and path.suffix in (".cu", ".cuh")
                   for header in includes(path))  # fmt: skip


@pytest.mark.parametrize("path", C_FILES + PYTHON_FILES, ids=name)
def test_no_file_is_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{name(path)} has {lines} lines; split what is over {LONGEST}"


def calls_between(files):
    """{file: the files whose functions and tables it names}, of the library's own names fa_..."""
    code = {path: code_of(path) for path in files}
    function = re.compile(r"^(?!static|extern|typedef|enum)\w[\w *]*?\b(fa_\w+)\s*\([^;{]*\)\s*\{", re.MULTILINE)
    table = re.compile(r"^(?:const )?\w+ \*?(fa_\w+)(?:\[\w*\])? = ", re.MULTILINE)
    homes = {name: path for path, text in code.items() for name in function.findall(text) + table.findall(text)}
    named = {path: set(re.findall(r"\bfa_\w+", text)) & homes.keys() for path, text in code.items()}
    return {path: {homes[name] for name in names} - {path} for path, names in named.items()}


def circle(below):
    """The nodes of a graph, {node: what it needs}, that stand on a circle or above one."""
    left = dict(below)
    while ground := [node for node, needed in left.items() if not needed & left.keys()]:
        for node in ground:
            del left[node]
    return sorted(map(name, left))


def test_no_circle_among_the_c_files():
    """Code that needs each other is one file; what is needed lies below."""
    below = calls_between([path for path in C_FILES if path.suffix == ".c" and path.is_relative_to(ROOT / "csrc")])
    assert sum(map(len, below.values())) > 50, "the calls are not found"
    assert not circle(below)


def imports_of(path, modules):
    """The modules of the package that a file imports, at its top or within a function; ``modules``: {dotted name: file}."""
    package = ".".join(("fa_ext", *path.relative_to(ROOT / "fa_ext").parent.parts))
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= inside if inside <= modules.keys() else {base} | inside
    return {modules[one] for one in found & modules.keys()} - {path}


def test_no_circle_among_the_modules():
    """Imports within functions count: they put a circle off, and do not break it."""
    files = sorted((ROOT / "fa_ext").rglob("*.py"))
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    below = {path: imports_of(path, {dotted[one]: one for one in files}) for path in files}
    assert sum(map(len, below.values())) > 20, "the imports are not found"
    assert not circle(below)


def test_no_kernel_takes_a_problem_by_value():
    """A kernel's parameters are its own, so that a problem gains a field without a change of machine code."""
    problem = r"fa_(?:problem|forward|backward|merge|append|documents|request)"
    signatures = structs = 0
    for path in C_FILES:
        if not path.is_relative_to(ROOT / "kernels"):
            continue
        code = code_of(path)
        for match in re.finditer(r"__global__[^{;]*", code):
            signatures += 1
            assert not re.search(rf"\b{problem}\b", match[0]), f"{name(path)}: {' '.join(match[0].split())}"
        for struct, body in re.findall(r"(?ms)^(?:template <[^{]*> )?struct (\w+)[^{;]*\{(.*?)^\};", code):
            structs += 1
            assert not re.search(rf"\b{problem} \w+;", body), f"{name(path)}: {struct} has a problem, not fields of its own"
    assert signatures > 30 and structs > 50, "the kernels and their parameters are not found"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*instance*.cu")), ids=name)
def test_templates_of_an_instance_file_are_its_own(path):
    """Two files of a family may name their templates alike; outside an unnamed namespace the linker would keep one."""
    body = code_of(path)
    shared = re.split(r"^namespace \{|^\} // namespace$", body, flags=re.MULTILINE)[0::2]
    found = [line for text in shared for line in text.splitlines() if re.match(r"(template|struct|static|inline|constexpr)\b", line)]
    assert not found, f"{name(path)} declares {found} outside its unnamed namespace"


def pieces(path):
    """("function", its name, its lines) of each function of a C or CUDA file, and ("variable", its declaration, 0) of what
    is declared in no function or is static in one."""
    code = re.sub(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda match: "\n" * match[0].count("\n"), code_of(path))
    scopes, begin = [], 0  # (kind, what stands before the brace, line) of each brace that is open
    for at in (match.start() for match in re.finditer(r"[;{}]", code)):
        head, in_body = " ".join(code[begin:at].split()), any(scope[0] == "body" for scope in scopes)
        if code[at] == "{":
            kind = "value"
            if re.search(r"\b(namespace|struct|class|enum|union)\b[^()=]*$|^extern \"\"$", head):
                kind = "scope"
            elif not in_body and re.search(r"\)( const| noexcept)*( ->.*)?$|\)\s*:.*[)}]$", head):
                kind = "value" if re.search(r"[^=!<>]= ?\S", head) else "body"
            scopes.append((kind, head, code.count("\n", 0, at)))
        elif code[at] == "}" and scopes:
            kind, head, line = scopes.pop()
            if kind == "body":
                bare = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", "", head)
                named = re.search(r"([\w:~]+)\s*\(", bare)
                yield "function", named[1] if named else bare, code.count("\n", 0, at) - line + 1
        elif code[at] == ";" and (head.startswith("static ") or all(scope[0] == "scope" for scope in scopes)):
            if not any(re.search(r"\b(struct|class|union|enum)\b", scope[1]) for scope in scopes):
                yield "variable", head, 0
        begin = at + 1


#: Functions that are longer than LONGEST_FUNCTION, and why they are still one.
LONG_FUNCTIONS = {
    "forward_consume": "a consumer warpgroup of wgmma_sm90: accumulators, softmax and phases of barriers live in registers across its walk over keys, and its steps are lambdas over them",
    "consume": "the same of prefill_sm90",
    "queries_consume": "the same of wgmma_backward_sm90, for dq",
    "keys_consume": "the same of wgmma_backward_sm90, for dk and dv",
}
LONGEST_FUNCTION = 80


def test_no_function_is_too_long():
    found = [(name(path), function, lines) for path in C_FILES for kind, function, lines in pieces(path) if kind == "function"]
    assert len(found) > 500, "the functions are not found"
    long = {function: f"{path}: {function} has {lines} lines" for path, function, lines in found if lines > LONGEST_FUNCTION}
    assert not long.keys() - LONG_FUNCTIONS.keys(), [long[function] for function in long.keys() - LONG_FUNCTIONS.keys()]
    assert not LONG_FUNCTIONS.keys() - long.keys(), "a function of the list is short, or gone"


#: Variables that change and outlive a call, by file: what a process, a thread or a device has one of.
GLOBALS = {
    "simd_isa.c": {"forced", "amx", "f16c"},  # FA_EXT_CPU_ISA when the library was loaded; what the processor has
    "threads.c": {"lock", "posted", "left", "loops", "sleepers", "workers", "news", "forked", "watched", "helps"},  # the threads that help with loops; this process is a fork's child; who stops a call
    "device.c": {"cuda_used", "fork_watch"},  # the same of CUDA
    "context.c": {"contexts"},  # how many there have been
    "plan_cache.c": {"recent"},  # a thread's last calls and their plans
    "launch.cuh": {"fa_smem_allowed", "fa_smem_lock"},  # what shared memory each kernel has been allowed
    "host.cuh": {"cached_maps"},  # a thread's last tensor maps, of the kernels that include it
    "prefill_sm90.cu": {"cached_maps"},  # the same of this kernel
    "serve_sm90.cu": {"cached_maps"},
    "wgmma_backward_sm90.cu": {"cached_maps"},
    "wgmma_split_sm90.cu": {"cached_maps"},
    "module.c": {"calls"},  # of a thread, within each other
    "chaos.cu": {"report", "lock", "given"},  # of a chaos build
    "chaos_delay.cuh": {"state", "host", "armed"},  # the same
}


def test_what_changes_and_outlives_a_call_is_listed():
    found = {}
    for path in C_FILES:
        for kind, declared, _ in pieces(path):
            unchanging = r"\b(const|constexpr|using|typedef|extern|template|friend|namespace)\b|^static_assert"
            if kind != "variable" or re.search(unchanging, declared) or re.fullmatch(r"static char \w+", declared):
                continue  # of a lone char the address alone is used
            left = declared.partition("=")[0]
            named = re.fullmatch(r"(?:[\w:]+(?:<[^<>]*>)?[ *]+)+(\w+)(?:\[.*\])?(?:, \w+)* ?", left)
            if named and not re.match(r"(xla_handler|struct|enum|union|class) ", left):
                found.setdefault(path.name, set()).add(named[1])
    assert found == GLOBALS


def test_kernels_include_nobody_elses_templates():
    for path in C_FILES:
        foreign = [h for h in includes(path) if re.match(r"(cutlass|cute|torch|ATen|c10|pybind11|nanobind|cudnn|flash)", h)]
        assert not foreign, f"{name(path)} includes {foreign}"


@pytest.mark.parametrize("path", sorted((ROOT / "fa_ext").glob("*.py")), ids=name)
def test_no_framework_is_imported_by_the_package(path):
    nodes = list(ast.parse(path.read_text()).body)
    for node in nodes:  # what importing the file runs: also what stands in a `try` or an `if`, but no function
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not FRAMEWORKS & {n.partition(".")[0] for n in names}, f"{name(path)} imports {names} at its top"


def test_importing_the_package_imports_no_framework():
    script = f"import sys, fa_ext; print(*({FRAMEWORKS!r} | {{'ml_dtypes', 'scipy'}}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_every_kernel_has_its_file_or_is_not_in_the_build():
    import fa_ext

    files = _build.kernel_files()
    listed = _build.kernel_names()
    assert len(listed) == len(set(listed))
    built = fa_ext.kernels() + fa_ext.kernels("backward") + fa_ext.kernels("merge") + fa_ext.kernels("append") + fa_ext.kernels("documents")
    assert [kernel for kernel in listed if kernel in built] == list(built), "kernels() is not in the order of kernels.def"
    for kernel in built:
        assert kernel in files, f"{kernel} is in the build, but there is no kernels/*/{kernel}.cu and no csrc/cpu/{kernel}.c"
        ends = rf"fa_kernel_{kernel}\b|FA_DEFINE_KERNEL\({kernel}\)"
        assert re.search(ends, files[kernel].read_text()), f"{name(files[kernel])} does not end in its kernel"


@pytest.mark.parametrize("path", _build.cuda_files() + sorted((ROOT / "csrc" / "cpu").glob("*.c")), ids=name)
def test_a_kernel_file_says_what_it_is_and_is_listed(path):
    text = path.read_text()
    if "FA_KERNEL_ABI" not in text:
        return
    assert text.lstrip().startswith(("/*", "//")), f"{name(path)} begins without a header comment"
    assert path.stem in _build.kernel_names(), f"{name(path)} defines a kernel that csrc/kernels.def does not list"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=name)
def test_no_test_file_imports_another(path):
    """A module beside tests holds what they share."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        assert not any(part.startswith("test_") for n in names for part in n.split(".")), f"{name(path)} imports {names}"


#: Rooms of the laboratory from the bottom up: each imports those below alone.
STAIRCASE = ("arguments", "report", "machine", "problems", "implementations", "timing", "trial", "load", "tuning", "recording",
             "commands", "__main__")  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=name)
def test_rooms_of_the_laboratory_import_those_below(path):
    room = path.relative_to(ROOT / "bench").parts[0].removesuffix(".py")
    if room in ("__init__", "examples"):
        return
    assert room in STAIRCASE, f"bench/{room} has no place in the staircase"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bench":
            rooms = [alias.name for alias in node.names] if node.module == "bench" else [node.module.split(".")[1]]
            above = [other for other in rooms if STAIRCASE.index(other) > STAIRCASE.index(room)]
            assert not above, f"{name(path)} imports {above}, which lie above bench/{room}"


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=name)
def test_the_laboratory_does_not_need_the_tests(path):
    """Cases are the laboratory's, and the tests import them from there."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(n.partition(".")[0] == "tests" for n in names), f"{name(path)} imports {names}"


def test_imports_begin_at_the_root():
    """The top of tests/ holds folders, the configuration of pytest and the page; no module changes where imports look."""
    assert sorted(path.name for path in (ROOT / "tests").glob("*.*")) == ["README.md", "__init__.py", "conftest.py"]
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        found = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not any(call.startswith(("sys.path.insert(", "sys.path.append(")) for call in found), name(path)
