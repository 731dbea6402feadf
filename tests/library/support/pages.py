"""The pages of the project, and the blocks of them that are generated.

    python -m tests.library.support.pages

writes anew what stands between ``<!-- kernels: NAME -->`` and ``<!-- end -->``: which GPU runs what, and what each kernel
takes, as the kernels' own tables say (``cc_from``, ``cc_to``, ``dtypes``, ``takes``). A test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fa_ext import _build
from tests.library.support import stub

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"(<!-- kernels: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: The columns of the support table: a name, compute capabilities (None: the CPU), and where these kernels have run. Columns that
#: would say the same are one.
GENERATIONS = (
    ("CPU", None, "x86-64"),
    ("Hopper (9.0)", 90, "H200, H100"),
    ("Ampere (8.0", 80, "these kernels: on Hopper"),
    ("8.6)", 86, "these kernels: on Hopper"),
    ("Ada (8.9)", 89, "these kernels: on Hopper"),
    ("Blackwell (10.0", 100, "these kernels: on Hopper"),
    ("12.0)", 120, "these kernels: on Hopper"),
)
#: Its rows: an operation, and what a call of it asks for.
ASKED = {
    "forward": ("FORWARD", ()),
    "window, softcap, sinks": ("FORWARD", ("WINDOW", "SOFTCAP", "SINKS")),
    "bias, mask, ALiBi": ("FORWARD", ("BIAS", "MASK", "ALIBI")),
    "dropout": ("FORWARD", ("DROPOUT",)),
    "sequences, pages": ("FORWARD", ("LENGTHS", "PAGES", "RANGES", "POSITIONS")),
    "gradients": ("BACKWARD", ("ORDERED",)),
    "gradients with bias, mask, ALiBi, dropout": ("BACKWARD", ("BIAS", "MASK", "ALIBI", "DROPOUT", "DBIAS")),
    "gradients of sequences": ("BACKWARD", ("LENGTHS", "RANGES")),
    "append": ("APPEND", ("LENGTHS", "PAGES", "ROTARY")),
}


@dataclass(frozen=True)
class Kernel:
    """The row of a kernel in its table."""

    name: str
    operation: str
    on_cpu: bool
    cc_from: int
    cc_to: int
    dtypes: frozenset[str]
    takes: frozenset[str]

    def runs_on(self, cc: int | None) -> bool:
        if cc is None or self.on_cpu:
            return self.on_cpu and cc is None
        return self.cc_from <= cc and (not self.cc_to or cc <= self.cc_to)


def kernels() -> list[Kernel]:
    """Those of kernels.def, in order of preference."""
    files = _build.kernel_files()
    return [_read(name, operation, files[name]) for operation, name in _build.listed_kernels()]


def _read(name: str, operation: str, file: Path) -> Kernel:
    found = re.search(r"^(FA_DEFINE_KERNEL\(|FA_EXPORT const fa_kernel )\w+\)? = \{.*?^\};", file.read_text(), re.DOTALL | re.MULTILINE)
    if not found:
        raise ValueError(f"{file} has no table of {name}")

    def field(of: str, default: str = "") -> str:
        given = re.search(rf"\.{of} = (.*?),\n", found[0], re.DOTALL)
        return given[1] if given else default

    if field("op") != f"FA_{operation}":
        raise ValueError(f"{name} has the operation {field('op')}; kernels.def says {operation}")
    on_cpu = field("device", "FA_CPU") == "FA_CPU"
    return Kernel(name, operation, on_cpu, int(field("cc_from", "0")), int(field("cc_to", "0")),
                  _bits(field("dtypes"), file), frozenset(bit.removeprefix("WITH_") for bit in _bits(field("takes"), file)))  # fmt: skip


def _bits(expression: str, file: Path) -> frozenset[str]:
    """The names after FA_ in an expression, and in the constants that it names, of the kernel's family or of common/."""
    family = next((folder for folder in file.parents if folder.parent in (_build.KERNELS, _build.CSRC)), None)
    bits = set(re.findall(r"\bFA_(\w+)", expression))
    for constant in re.findall(r"\bk[A-Z]\w*", expression):
        folders = [family, _build.KERNELS / "common"] if family else [_build.KERNELS / "common"]
        files = [file, *(one for folder in folders for one in sorted(folder.rglob("*.cu*")))]
        texts = [one.read_text() for one in files]
        found = [given[1] for text in texts if (given := re.search(rf"\b{constant} =([^;,]*)[;,]", text))]
        if not found:
            raise ValueError(f"{file} names {constant}, which neither it nor a file of its family or of common/ defines")
        bits |= _bits(found[0], file)
    return frozenset(bits)


def _markdown(columns, rows) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (columns, ["---"] * len(columns), *rows))


def dtype_words(dtypes: frozenset[str]) -> str:
    words = ["16-bit"] if {"F16", "BF16"} <= dtypes else []
    return ", ".join(words + [word for of, word in (("F32", "float32"), ("F64", "float64")) if of in dtypes]) or "-"


def support() -> str:
    """A cell names the dtypes that some kernel takes there, those in bold that a kernel of this generation alone takes."""
    table = kernels()

    def cell(cc: int | None, operation: str, features: tuple[str, ...]) -> str:
        taken = [k for k in table if k.operation == operation and k.runs_on(cc) and k.takes >= set(features)]
        words = dtype_words(frozenset().union(*(k.dtypes for k in taken)))
        own = frozenset().union(*(k.dtypes for k in taken if cc and k.cc_to == cc))
        return words.replace("16-bit", "**16-bit**") if {"F16", "BF16"} <= own else words

    columns: list[list[str]] = []
    for name, cc, run in GENERATIONS:
        cells = [*(cell(cc, *asked) for asked in ASKED.values()), "-", run]
        if columns and columns[-1][1:] == cells:
            columns[-1][0] += f", {name}"
        else:
            columns.append([name, *cells])
    rows = list(zip(["", *ASKED, "fp8", "tested on"], *columns, strict=True))
    return _markdown(rows[0], rows[1:])


def features() -> str:
    """A table an operation: which kernel takes which of features.def, in the order of kernels.def."""
    listed = list(stub.features())
    parts = []
    for operation in ("FORWARD", "BACKWARD", "MERGE", "APPEND"):
        of = [k for k in kernels() if k.operation == operation]
        columns = [name for name in listed if any(name in k.takes for k in of)]
        rows = [[f"`{k.name}`", dtype_words(k.dtypes), *("x" if name in k.takes else "" for name in columns)] for k in of]
        parts.append(_markdown([operation.lower(), "dtypes", *columns], rows))
    return "\n\n".join(parts)


BLOCKS = {"support": support, "features": features}


def rendered(text: str) -> str:
    """`text` with its blocks as the kernels' tables have them."""

    def fill(found: re.Match) -> str:
        if found[2] not in BLOCKS:
            raise ValueError(f"block {found[2]!r} is unknown; accepted: {', '.join(BLOCKS)}")
        return f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}"

    return BLOCK.sub(fill, text)


def pages() -> list[Path]:
    """Every page of the checkout, the front page first."""
    folders = [ROOT / name for name in ("fa_ext", "csrc", "kernels", "tests", "bench")]
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))]


def readmes() -> list[Path]:
    """Those that guide through a folder, and so run and keep to the glossary."""
    return [page for page in pages() if page.name == "README.md"]


if __name__ == "__main__":
    for page in readmes():
        page.write_text(rendered(page.read_text()))
