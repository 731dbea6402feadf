"""Every Python block of the README runs, in order, in one namespace."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import fa_ext

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"(?:<!-- needs: ([\w ]+) -->\n)?```python\n(.*?)```", re.DOTALL)


def missing(needs):
    """What the machine lacks of the words behind ``needs:``."""
    for need in needs.split():
        if need == "gpu":
            try:
                fa_ext.to_device(__import__("numpy").zeros(1, "f4"))
            except fa_ext.CudaError as error:
                return str(error)
        elif importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return None


def test_readme_examples_run(monkeypatch):
    monkeypatch.delenv("FA_EXT_KERNEL", raising=False)
    blocks = BLOCK.findall(README.read_text())
    assert len(blocks) >= 8
    namespace, ran = {}, 0
    for needs, code in blocks:
        if not missing(needs):
            exec(compile(code, "README.md", "exec"), namespace)
            ran += 1
    assert ran >= 5


@pytest.mark.parametrize("name", ["install", "test"])
def test_readme_marks_the_commands_of_ci(name):
    assert re.search(rf"<!-- ci: {name} -->\n```sh\n\.?\S", README.read_text())


def test_the_figures_are_those_of_the_records():
    from bench.commands import tables

    texts = [file.read_text() for file in tables.FILES]
    for file, text in zip(tables.FILES, texts):
        assert tables.rendered(text) == text, f"{file.name}: python -m bench tables"
    missing = [name for name in tables.BLOCKS if f"<!-- figures: {name} -->" not in "".join(texts)]
    assert not missing


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_bias_and_sink_that_count_are_those_that_it_names(dtype):
    found = re.search(r"beyond ±([\d.e]+) \(±([\d.e]+) in a float64 call\) count as that", README.read_text())
    limit = float(found[2] if dtype == "float64" else found[1])
    wide = "f8" if dtype == "float64" else "f4"
    q, keys, values = np.zeros((1, 1, 2, 8), dtype), np.zeros((1, 1, 3, 8), dtype), np.ones((1, 1, 3, 8), dtype)
    values[0, 0, 1] = 4
    for kernel in fa_ext.kernels():
        if fa_ext._core.build_info()["kernels"][kernel][0] == "cuda":
            continue
        for given in (np.finfo(wide).min, np.finfo(wide).max, -limit * 1.01, limit * 0.5):
            counts = np.clip(given, -limit, limit)
            given = np.array([[given]], wide)
            out, lse = fa_ext.attention(q, keys, values, bias=given, kernel=kernel, return_lse=True)
            np.testing.assert_allclose(lse, counts, rtol=1e-5)
            np.testing.assert_allclose(out, 2, rtol=1e-3)
            lse = fa_ext.attention(q, keys[:, :, :0], values[:, :, :0], sinks=given[0], kernel=kernel, return_lse=True)[1]
            np.testing.assert_allclose(lse, counts, rtol=1e-5)
