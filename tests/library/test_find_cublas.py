"""Where cuBLAS is looked for: in wheels that are installed, not in folders that look like them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa_ext

PACKAGE = Path(fa_ext.__file__).resolve().parent


def wheel(folder, name, library, recorded=True):
    """A wheel with one library, as pip unpacks it; or only what a folder may look like."""
    (folder / library).parent.mkdir(parents=True)
    (folder / library).touch()
    if not recorded:
        return
    about = folder / f"{name.replace('-', '_')}-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
    (about / "RECORD").write_text(f"{library},,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")


def found(function, folder, *paths):
    """The path that a function of `_cublas` finds in a process that starts in a folder, with '' first among its paths."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    code = f"import sys; assert sys.path[0] == ''; sys.path.append({str(PACKAGE.parent)!r}); from fa_ext import _cublas; print(_cublas.{function}())"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("library", ["nvidia/cublas/lib/libcublas.so.12", "nvidia/cu13/lib/libcublas.so.13"])
def test_the_current_directory_is_not_where_it_is_installed(tmp_path, library, recorded):
    wheel(tmp_path, "nvidia-cublas", library, recorded)
    for function in ("find", "_wheels"):
        assert not found(function, tmp_path).startswith(str(tmp_path))
        assert not found(function, tmp_path, tmp_path).startswith(str(tmp_path))


def test_a_folder_without_a_wheel_is_none(tmp_path):
    wheel(tmp_path / "planted", "", "nvidia/cu13/lib/libcublas.so.13", recorded=False)
    assert not found("_wheels", "/", tmp_path / "planted").startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "library"),
    [("nvidia-cublas", "nvidia/cu13/lib/libcublas.so.13"), ("nvidia-cublas-cu12", "nvidia/cublas/lib/libcublas.so.12")],
)
def test_an_installed_wheel_is_found(tmp_path, name, library):
    wheel(tmp_path, name, library)
    got = found("_wheels", "/", tmp_path)
    assert got == str(tmp_path / library) or (name.endswith("cu12") and got.endswith("/libcublas.so.13"))


def test_the_newer_of_two_is_found(tmp_path):
    wheel(tmp_path / "a", "nvidia-cublas-cu12", "nvidia/cublas/lib/libcublas.so.12")
    wheel(tmp_path / "b", "nvidia-cublas", "nvidia/cu13/lib/libcublas.so.13")
    assert found("_wheels", "/", tmp_path / "a", tmp_path / "b") == str(tmp_path / "b/nvidia/cu13/lib/libcublas.so.13")
