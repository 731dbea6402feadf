"""Rules of pages beside their own (test_readme.py): the log's form, and the pages and comments of sources."""

import re
from pathlib import Path

import pytest

from tests.library.support import pages

LOG = pages.ROOT / "bench" / "log"
SOURCES = [
    file for folder in ("bench", "csrc", "fa_ext", "kernels", "tests") for file in sorted((pages.ROOT / folder).rglob("*"))
    if file.suffix in (".c", ".cpp", ".h", ".cu", ".cuh", ".def", ".py")
]  # fmt: skip


@pytest.mark.parametrize("page", sorted(set(LOG.glob("*.md")) - {LOG / "README.md"}), ids=lambda page: page.stem)
def test_a_page_of_the_log_begins_with_what_won_what_lost_and_what_is_open(page):
    lines = [line for line in page.read_text().splitlines() if line.strip()]
    assert lines[0].startswith("# ")
    assert re.findall(r"^- \*\*(\w+):\*\* \S", "\n".join(lines[1:12]), re.MULTILINE) == ["Won", "Lost", "Open"], page.name


def test_the_log_lists_its_pages():
    listed = set(re.findall(r"\]\((\w+\.md)\)", (LOG / "README.md").read_text()))
    assert listed == {page.name for page in LOG.glob("*.md")} - {"README.md"}


def test_pages_that_sources_name_exist():
    missing = [
        f"{file.relative_to(pages.ROOT)}: {named}" for file in SOURCES
        for named in re.findall(r"\b(?:bench|csrc|fa_ext|kernels|tests)/[\w/]+\.md\b", file.read_text()) if not (pages.ROOT / named).exists()
    ]  # fmt: skip
    assert not missing


#: The beginnings of comments and docstrings.
BEGUN = {True: r'(?:#:?|""") ?', False: r"(?:/\*|//) ?"}


def test_no_comment_begins_with_a_pronoun():
    """Its subject stands first: `/* The state of a warp. */` and not `/* What a warp keeps. */`."""
    found = [
        f"{file.relative_to(pages.ROOT)}: {begun}" for file in SOURCES
        for begun in re.findall(BEGUN[file.suffix == ".py"] + r"((?:What|Who|Whose|Whoever)\b.*)", file.read_text())
    ]  # fmt: skip
    assert not found


def test_the_commands_of_the_laboratory_are_listed():
    from bench.__main__ import COMMANDS

    listed = re.findall(r"^\| `python -m bench (\w+)", (pages.ROOT / "bench" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_variables_of_the_environment_are_listed():
    """Those that the library and its build read, by their names as strings."""
    sources = [*(pages.ROOT / "csrc").rglob("*.[ch]"), *(pages.ROOT / "fa_ext").glob("*.py")]
    read = {variable for file in sources for variable in re.findall(r'"(FA_(?!HAVE_)[A-Z_]+|MAX_JOBS)"', file.read_text())}
    chapter = (pages.ROOT / "fa_ext" / "README.md").read_text().partition("## 8. Environment")[2]
    assert len(read) > 10
    assert not read - set(re.findall(r"\w+", chapter))


def rooms(page):
    """{room: its row} of a page's table of rooms, counted from the top."""
    table = (pages.ROOT / page).read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)/?`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    return {room: number for number, row in enumerate(rows) for room in row}


def used_in_c(file):
    """The files of csrc/ that one includes, seen from csrc/ or from its own folder."""
    named = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
    places = [(pages.ROOT / "csrc" / header, file.parent / header) for header in named]
    return [next(place for place in both if place.is_file()) for both in places if any(map(Path.is_file, both))]


def test_the_rooms_of_csrc_include_what_stands_below_them():
    base, listed = pages.ROOT / "csrc", rooms("csrc/README.md")

    def row(file):
        return listed[file.relative_to(base).parts[0]] if file.parent != base else len(listed)

    assert listed.keys() == {folder.name for folder in base.iterdir() if folder.is_dir()}
    arrows = [(file, used) for file in sorted(base.rglob("*.[ch]")) for used in used_in_c(file)]
    assert len(arrows) > 100
    assert not [f"{file.relative_to(base)} includes {used.relative_to(base)}" for file, used in arrows if row(used) < row(file)]


def test_the_rooms_of_bench_import_what_stands_above_them():
    base, listed = pages.ROOT / "bench", rooms("bench/README.md")
    folders = {folder.name for folder in base.iterdir() if (folder / "__init__.py").exists()}
    assert folders <= listed.keys()
    found = []
    for file in sorted(base.rglob("*.py")):
        own = listed.get(file.relative_to(base).with_suffix("").parts[0], len(listed))
        for package, names in re.findall(r"^ *from bench(?:\.(\w+))?[\w.]* import \(?([\w, ]+)", file.read_text(), re.MULTILINE):
            used = [package] if package else re.findall(r"\w+", names)
            found += [f"{file.relative_to(base)} imports {room}" for room in used if listed.get(room, 0) > own]
    assert not found
