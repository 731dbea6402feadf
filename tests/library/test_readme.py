"""The pages: their Python blocks run, their links lead somewhere, their generated blocks are true, and their prose keeps the
rules of kernels/README.md: lines that fit a screen, and words of the project that are linked where they first appear."""

import fnmatch
import functools
import importlib.util
import re

import numpy as np
import pytest

import fa_ext
from tests.library.support import pages

README = pages.ROOT / "README.md"
GLOSSARY = pages.ROOT / "kernels" / "README.md"
BLOCK = re.compile(r"(?:<!-- needs: ([\w ]+) -->\n)?```python\n(.*?)```", re.DOTALL)
LONGEST = 160
#: Lines that a page has at most.
MOST = {"README.md": 200, "bench/FIGURES.md": 200, "fa_ext/torch/README.md": 150, "fa_ext/jax/README.md": 150, "fa_ext/include/README.md": 150}
#: How many Python blocks a page has at least that has any.
LEAST = {"README.md": 3, "fa_ext/README.md": 12, "fa_ext/torch/README.md": 4, "fa_ext/jax/README.md": 2}


def name(page):
    return page.relative_to(pages.ROOT).as_posix()


each_guide = pytest.mark.parametrize("page", pages.readmes(), ids=name)
each_page = pytest.mark.parametrize("page", pages.pages(), ids=name)


def missing(needs):
    """The first lack of the machine among the words behind ``needs:``, in words; None where it has all."""
    for need in needs.split():
        if need == "gpu":
            try:
                fa_ext.to_device(__import__("numpy").zeros(1, "f4"))
            except fa_ext.CudaError as error:
                return str(error)
        elif importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return None


@each_guide
def test_examples_run(page, monkeypatch):
    """In order, in one namespace; what a block needs and the machine lacks leaves it out."""
    monkeypatch.delenv("FA_EXT_KERNEL", raising=False)
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) >= LEAST.get(name(page), 0)
    namespace, left_out = {"__name__": name(page)}, []
    for needs, code in blocks:
        if lacks := missing(needs):
            left_out.append(lacks)
        else:
            exec(compile(code, name(page), "exec"), namespace)
    if blocks and len(left_out) == len(blocks):
        pytest.skip("; ".join(dict.fromkeys(left_out)))


@each_guide
def test_generated_blocks_are_what_the_kernels_say(page):
    assert pages.rendered(page.read_text()) == page.read_text(), "run: python -m tests.library.support.pages"


def test_every_generated_block_has_its_place():
    found = [block for page in pages.readmes() for _, block, _ in pages.BLOCK.findall(page.read_text())]
    assert sorted(found) == sorted(pages.BLOCKS)


# ---- prose ----


def prose(text):
    """(number, line) of a page outside code, tables and comments; inline code is blanked."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and not line.lstrip().startswith(("|", "<!--")):
            yield number, re.sub(r"`[^`]*`", lambda code: "`" * len(code[0]), line)


@functools.cache
def anchors(page):
    """Of its headings as GitHub makes them, and those that it sets itself."""
    found, inside = set(re.findall(r'<a id="([\w-]+)">', page.read_text())), False
    for line in page.read_text().splitlines():
        inside ^= line.lstrip().startswith("```")
        if not inside and (heading := re.match(r"#+ (.*)", line)):
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug, count = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"), 0
            while (one := f"{slug}-{count}" if count else slug) in found:
                count += 1
            found.add(one)
    return found


def links(text):
    """Targets of the links and images of a page, code apart."""
    return [target for _, line in prose(re.sub(r"^\|", " ", text, flags=re.MULTILINE)) for target in re.findall(r"\]\(([^)\s]+)\)", line)]


@each_page
def test_links_lead_somewhere(page):
    for target in links(page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}: there is no {path}"
        if anchor:
            assert file.is_file() and anchor in anchors(file), f"{name(page)} links to {target}: there is no such heading"


@functools.cache
def files():
    """All files that a page may name, with a slash before."""
    folders = [pages.ROOT / folder for folder in ("fa_ext", "csrc", "kernels", "tests", "bench", ".ci")]
    found = [*pages.ROOT.glob("*"), *(file for folder in folders for file in folder.rglob("*"))]
    return [f"/{name(file)}" for file in found if file.is_file()]


@each_guide
def test_files_that_it_names_exist(page):
    """Paths in inline code, by their ends; ``*`` stands for anything."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w./*]+\.(?:c|h|cu|cuh|py|def|md|ipynb|json))`", text)) - {"Python.h"}
    missed = [path for path in named if not fnmatch.filter(files(), f"*/{path}")]
    assert not missed, f"{name(page)} names files that there are not"


@each_guide
def test_functions_that_it_names_beside_a_file_are_there(page):
    """As in `file`: `function`, `function`."""
    for path, names in re.findall(r"`([\w./]+\.\w+)`: ((?:`\w+`(?:, )?)+)", page.read_text()):
        (file,) = fnmatch.filter(files(), f"*/{path}")
        words = set(re.findall(r"\w+", (pages.ROOT / file[1:]).read_text()))
        assert not set(re.findall(r"\w+", names)) - words, f"{name(page)} names what {path} has not"


@each_page
def test_lines_of_prose_fit(page):
    long = [f"{name(page)}:{number} has {len(line)}" for number, line in prose(page.read_text()) if len(line) > LONGEST]
    assert not long, f"{long} characters; accepted: up to {LONGEST}"


@pytest.mark.parametrize(("page", "most"), MOST.items())
def test_a_page_is_short(page, most):
    assert len((pages.ROOT / page).read_text().splitlines()) <= most


def glossary():
    """{anchor: the words of an entry} of kernels/README.md."""
    found = re.findall(r'^- <a id="([\w-]+)"></a>\*\*([^*]+)\*\*: ', GLOSSARY.read_text(), re.MULTILINE)
    return {anchor: words.split(", ") for anchor, words in found}


def test_the_glossary_has_entries():
    entries = glossary()
    assert len(entries) >= 12
    words = [word for words in entries.values() for word in words]
    assert len(words) == len(set(words))


def unlinked(text, entries):
    """The entries of a glossary whose words a page uses before it links to them, with the line of the first use."""
    found = []
    for anchor, words in entries.items():
        pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, words))})(?![\w-])", re.IGNORECASE)
        for number, line in prose(text):
            if line.startswith("#"):
                continue
            bare = re.sub(rf"\[[^]]*\]\([^)]*#{anchor}\)", "", line)
            if bare != line:
                break
            if pattern.search(re.sub(r"\]\([^)]*\)", "]", line)):
                found.append(f"{number}: {words[0]}")
                break
    return found


@each_guide
def test_words_of_the_project_are_linked_where_they_first_appear(page):
    if page != GLOSSARY:
        assert not unlinked(page.read_text(), glossary()), f"{name(page)} does not link to kernels/README.md#..."


def test_what_the_rules_of_prose_notice():
    entries = {"chunk": ["chunk", "chunks"]}
    assert unlinked("# a\nA chunk is\n[chunk](x.md#chunk)", entries) == ["2: chunk"]
    assert not unlinked("`chunk`\n```c\nchunk\n```\n| chunk |\nA [chunk](x.md#chunk) and chunks.", entries)
    assert not unlinked("A [chunk](#chunk) of many chunks\nof chunks", entries)
    assert links("a [b](c.md#d) `[x](y)`\n| [e](f) |\n```sh\n[g](h)\n```") == ["c.md#d", "f"]
    assert [number for number, _ in prose("a\n```\nb\n```\n| c |\nd")] == [1, 6]
    with pytest.raises(ValueError, match="block 'nothing' is unknown; accepted: support"):
        pages.rendered("<!-- kernels: nothing -->\n<!-- end -->")


# ---- what the pages say ----


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
    found = re.search(r"beyond ±([\d.e]+) \(±([\d.e]+) in a float64 call\) count as that", (pages.ROOT / "fa_ext" / "README.md").read_text())
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
