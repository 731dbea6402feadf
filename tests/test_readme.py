"""Every Python block of the README runs, in order, in one namespace."""

import importlib.util
import re
from pathlib import Path

import pytest

import fa_ext

README = Path(__file__).resolve().parent.parent / "README.md"
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
    from bench import tables

    text = tables.README.read_text()
    assert tables.rendered(text) == text, "python -m bench tables"
    missing = [name for name in tables.BLOCKS if f"<!-- figures: {name} -->" not in text]
    assert not missing
