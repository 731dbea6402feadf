"""Digests of machine code: what they notice and what they do not, on small builds of copied sources."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fa_ext
from fa_ext import _build, _core, _digests

ROOT = Path(fa_ext.__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="the sources are not here")

DESCRIBE = """
import json, sys; sys.path.insert(0, "fa_ext"); import _build as b
options = b.options_from_environment()
units = [unit for name in sys.argv[1:] for unit in b.units_of(b.ROOT / name)]
objects = b.compile_all(units, b.ROOT / "objects", options)
print(json.dumps(b.digests.describe(b.groups_of(units, objects), b.ROOT, ("setup.py",))))
"""


class Tree:
    """A copy of the sources that can be edited and built in part."""

    def __init__(self, folder, cuda=False):
        self.root, self.cuda = folder, cuda
        for name in ("csrc", "kernels"):
            shutil.copytree(ROOT / name, folder / name)
        (folder / "fa_ext").mkdir()
        for name in (*_build.BUILD_FILES, "fa_ext/_digests.py", "fa_ext/_progress.py", "fa_ext/_count.py"):
            shutil.copy(ROOT / name, folder / name)

    def edit(self, name, *changes):
        path = self.root / name
        text = path.read_text()
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{name} has no {pattern}"
        path.write_text(text)

    def describe(self, *names):
        """{kernel or core: {"device", "host", "sources"}} of some source files."""
        environment = os.environ | {"FA_CUDA": str(int(self.cuda)), "FA_ARCHS": "sm_90", "MAX_JOBS": "2"}
        line = [sys.executable, "-c", DESCRIBE, *names]
        done = subprocess.run(line, cwd=self.root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def labels(found, kernel):
    """Those of the device functions of a kernel, whatever their names."""
    functions = found[kernel]["functions"].values()
    assert functions and all(set(of) == {"90"} for of in functions)
    return sorted(of["90"] for of in functions)


def code(found):
    return {name: (group["device"], group["host"]) for name, group in found.items()}


C = ("csrc/cpu/cpu_ref.c", "csrc/device/threads.c", "csrc/status.c", "csrc/problem/forward.c")


@pytest.fixture(scope="module")
def of_c(tmp_path_factory):
    """Digests of a few C files as they stand."""
    return Tree(tmp_path_factory.mktemp("plain") / "tree").describe(*C)


def test_groups_are_kernels_and_the_core(of_c):
    assert set(of_c) == {"core", "cpu_ref"} and not any(group["device"] for group in of_c.values())
    assert "csrc/device/threads.c" in of_c["cpu_ref"]["sources"] and "csrc/status.c" in of_c["core"]["sources"]
    assert all(name.startswith(("csrc/", "setup.py")) for group in of_c.values() for name in group["sources"])


def test_text_in_another_folder_with_comments_and_other_names_is_the_same_code(of_c, tmp_path):
    tree = Tree(tmp_path / "a longer name" / "of a folder")
    tree.edit("csrc/fa.h", (r"\A", "/* A comment\n * of lines. */\n"))
    tree.edit(C[0], (r"\A", "// another\n\n"), (r"\bvisible_score\b", "zz"), (r"\bmaximum\b", "a_renamed_local"))
    tree.edit("csrc/status.c", (r"\Z", "\n/* The end. */\n"))
    other = tree.describe(*C)
    assert code(other) == code(of_c)
    assert other["core"]["sources"]["csrc/fa.h"] != of_c["core"]["sources"]["csrc/fa.h"]


def test_a_constant_changes_its_kernel_alone(of_c, tmp_path):
    tree = Tree(tmp_path / "tree")
    tree.edit(C[0], (r"sum == 0 \? -INFINITY", "sum == 0 ? -1.0"))
    other = code(tree.describe(*C))
    assert other["cpu_ref"] != code(of_c)["cpu_ref"] and other["core"] == code(of_c)["core"]
    # A message is what a caller sees: it counts. So does a file that kernels share.
    tree = Tree(tmp_path / "words")
    tree.edit("csrc/status.c", ('"unknown"', '"no dtype"'))
    tree.edit("csrc/device/threads.c", (r"\Z", "\nint fa_one_more(void) { return 7; }\n"))
    other = code(tree.describe(*C))
    assert other["core"] != code(of_c)["core"] and other["cpu_ref"] != code(of_c)["cpu_ref"]


CUDA = ("kernels/minimal.cu", "csrc/status.c")


@pytest.mark.slow
@pytest.mark.skipif(_build.find_nvcc() is None, reason="nvcc is not installed")
def test_device_code_counts_and_names_do_not(tmp_path):
    described = Tree(tmp_path / "plain", cuda=True).describe(*CUDA)
    plain = code(described)
    assert all(plain["minimal"]) and plain["core"][0] is None
    tree = Tree(tmp_path / "a-longer-name" / "tree", cuda=True)
    tree.edit("kernels/minimal.cu", (r"\A", "// A comment.\n\n"), ("minimal_kernel", "zz_each_warp_a_row"), (r"\bhead_kv\b", "shared"))
    tree.edit("kernels/simt/simt.cu", (r"\Z", "\n__device__ int one_more;\n"))
    renamed = tree.describe(*CUDA)
    assert code(renamed) == plain and labels(renamed, "minimal") == labels(described, "minimal")
    text = (ROOT / "kernels/minimal.cu").read_text()
    warps = int(re.search(r"kWarps = (\d+)", text)[1])
    tree.edit("kernels/minimal.cu", (r"kWarps = \d+", f"kWarps = {warps // 2}"))
    halved = tree.describe(*CUDA)
    other = code(halved)
    assert other["minimal"][0] != plain["minimal"][0] and other["minimal"][1] != plain["minimal"][1]
    assert labels(halved, "minimal") != labels(described, "minimal")
    assert other["core"] == plain["core"]


def test_the_extension_carries_digests_of_all_that_is_built():
    found = _digests.read(Path(_core.__file__))
    kernels = _core.build_info()["kernels"]
    assert set(found["groups"]) == {*kernels, "core"}
    for name, group in found["groups"].items():
        assert "unreadable" not in group and group["host"] and group["compilers"] and group["sources"]
        assert bool(group["device"]) == (name != "core" and kernels[name][0] == "cuda")


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200, b"no ELF at all"])
def test_what_is_no_elf_is_said(tmp_path, content):
    path = tmp_path / "x.cubin"
    path.write_bytes(content)
    with pytest.raises(_digests.Unreadable, match="x.cubin"):
        _digests.Elf(path)
    assert "x.cubin" in _digests.device_labels([path])["unreadable"]
    assert _digests.read(path) is None and _digests.read(tmp_path / "absent") is None


def test_a_build_whose_device_code_cannot_be_read_has_no_digest(tmp_path):
    target = tmp_path / "k.o"
    target.with_suffix(".d").write_text("k.o: /usr/include/x.h")
    _digests.device_file(target).write_text('{"unreadable": "another format"}')
    found = _digests.describe({"k": [target]}, tmp_path, ())
    assert found == {"k": {"device": None, "host": None, "unreadable": "another format", "sources": {}}}
