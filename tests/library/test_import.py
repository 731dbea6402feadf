"""``import fa_ext``: what it costs and brings, what it says when nothing is compiled, and its types."""

import inspect
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fa_ext

PACKAGE = Path(fa_ext.__file__).resolve().parent
FRAMEWORKS = ("torch", "cupy", "jax", "numba", "ml_dtypes", "cuda", "scipy", "matplotlib")


def python(code, *, path=PACKAGE.parent, check=True):
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert not check or done.returncode == 0, done.stderr
    return done


def test_no_framework_is_imported():
    code = "import sys, numpy; before = set(sys.modules); import fa_ext; print(*sorted(set(sys.modules) - before))"
    brought = python(code).stdout.split()
    assert "fa_ext._core" in brought
    assert not [name for name in brought if name.split(".")[0] in FRAMEWORKS]
    assert "fa_ext.judge" not in brought and "fa_ext.reference" not in brought


def test_every_package_is_installed():
    root = Path(__file__).resolve().parents[2]
    said = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(root).parts) for path in (root / "fa_ext").rglob("__init__.py")}
    assert set(said) == found and len(said) == len(found)


def test_import_time():
    """Under 50 ms of a CPU beyond NumPy."""
    code = "import numpy, time; t = time.process_time(); import fa_ext; print(time.process_time() - t)"
    python(code)
    assert statistics.median(float(python(code).stdout) for _ in range(5)) < 0.050


def test_without_the_compiled_module(tmp_path):
    (tmp_path / "fa_ext").mkdir()
    for source in PACKAGE.glob("*.py"):
        shutil.copy(source, tmp_path / "fa_ext")
    done = python("import fa_ext", path=tmp_path, check=False)
    assert done.returncode and "ImportError" in done.stderr and "pip install -e ." in done.stderr
    assert "build_ext" not in done.stderr  # needs setuptools and NumPy, which a fresh environment has not
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("version, said", [(None, "which is not installed"), ("1.26.4", "found 1.26.4")])
def test_numpy_that_is_missing_or_old(version, said):
    numpy = f"types.SimpleNamespace(__version__={version!r})" if version else "None"
    done = python(f"import sys, types; sys.modules['numpy'] = {numpy}; import fa_ext", check=False)
    line = done.stderr.splitlines()[-1]
    assert line == f"ImportError: fa_ext needs NumPy 2.0 or newer, {said}; run: pip install 'numpy>=2.0'"
    assert "During handling" not in done.stderr


def test_the_directory_above_a_checkout(tmp_path):
    """A checkout named fa_ext has no __init__.py: what is installed comes before it."""

    def there(directory):
        code = "import fa_ext; print(fa_ext.attention)"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=directory)

    if there("/").returncode:
        pytest.skip("fa_ext is not installed here")
    (tmp_path / "fa_ext" / "fa_ext").mkdir(parents=True)
    done = there(tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("found", ["None", "types.SimpleNamespace(__version__='2.9.1')"])
def test_the_module_of_a_framework_that_is_not_there(found):
    prepare = f"import sys, types; sys.modules['torch'] = {found}"
    done = python(f"{prepare}; import fa_ext; fa_ext.attention; import fa_ext.torch", check=False)
    assert done.returncode and "ImportError: fa_ext.torch needs PyTorch 2.10 or newer" in done.stderr
    assert "pip install 'torch>=2.10'" in done.stderr and ("2.9.1" in done.stderr) == ("2.9.1" in found)
    assert "During handling" not in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import fa_ext; assert callable(fa_ext.verify)",
        "import fa_ext.judge; assert callable(fa_ext.verify)",
        "from fa_ext.judge import judge; import fa_ext; assert callable(fa_ext.verify)",
        "from fa_ext import verify; assert callable(verify)",
        "from fa_ext import *; assert callable(verify)",
        "import fa_ext; assert fa_ext.reference.__name__ == 'fa_ext.reference'",
    ],
)
def test_lazy_names(code):
    python(code)


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fa_ext.nothing  # noqa: B018


def test_public_names():
    assert set(fa_ext.__all__) <= set(dir(fa_ext))
    assert issubclass(fa_ext.UnsupportedError, RuntimeError) and issubclass(fa_ext.CudaError, RuntimeError)
    assert fa_ext.UnsupportedError.__module__ == "fa_ext"


def test_signatures():
    assert str(inspect.signature(fa_ext.attention)).startswith("(q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, ")
    assert str(inspect.signature(fa_ext.explain)) == str(inspect.signature(fa_ext.attention))[:-1] + ", device=None)"
    assert str(inspect.signature(fa_ext.explain_backward)) == str(inspect.signature(fa_ext.attention_backward))[:-1] + ", device=None)"
    for name in fa_ext.__all__:
        if name.startswith("__"):
            continue
        assert inspect.getdoc(getattr(fa_ext, name))
    for word in ("Parameters", "Returns", "Raises", "float16", "(B, H, Sq, D)", "natural logarithm"):
        assert word in fa_ext.attention.__doc__


def test_attention_is_the_c_function():
    assert inspect.isbuiltin(fa_ext.attention)


def test_build_info():
    info = fa_ext._core.build_info()
    assert info["version"] == fa_ext.__version__
    assert tuple(info["kernels"]) == fa_ext.kernels() + fa_ext.kernels("backward") + fa_ext.kernels("merge") + fa_ext.kernels("append") + fa_ext.kernels("documents")
    assert all(device in ("cpu", "cuda") and summary for device, summary in info["kernels"].values())
    if not info["cuda"]:
        assert {device for device, _ in info["kernels"].values()} == {"cpu"}
    assert info["instances"] and (info["instances"] != "all" or info["left_out"] == [])
    assert all(name.partition(".")[0] in info["kernels"] for name in info["left_out"])
    assert fa_ext._core.cpu_info()["threads"] >= 1


def test_stubs():
    """mypy's stubtest: the stubs say what the modules have."""
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "fa_ext", "--ignore-missing-stub", "--mypy-config-file", "pyproject.toml"],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
