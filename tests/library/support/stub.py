"""The functions of the stub ``fa_ext/_core.pyi`` that csrc/python/signature.def describes, and the arrays of csrc/operands.def in
the structs of ``fa_ext/include/fa_ext.h``: tests compare them, and ::

    python -m tests.library.support.stub

writes the functions anew, and new arrays at the ends of the structs.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "csrc" / "python" / "signature.def"
SETS = TABLE.with_name("signature.h")
STUB = ROOT / "fa_ext" / "_core.pyi"
OPERANDS = ROOT / "csrc" / "operands.def"
FEATURES = ROOT / "csrc" / "features.def"
REASONS = ROOT / "csrc" / "why.def"
HEADER = ROOT / "fa_ext" / "include" / "fa_ext.h"
BEGIN = "# ---- from csrc/python/signature.def, by python -m tests.library.support.stub ----"
END = "# ---- end ----"

#: The type of a result, and the arguments of an overload that differ from the table's.
RESULTS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "attention": [
        ("_Array", {"out": "None = None", "return_lse": "Literal[False] = False"}),
        ("tuple[_Array, _Array]", {"out": "None = None", "return_lse": "Literal[True]"}),
        ("tuple[_Out, _Lse]", {"q": "Any", "out": "tuple[_Out, _Lse]"}),
        ("_Out | tuple[_Out, _Array]", {"out": "_Out"}),
    ],
    "explain": [("tuple[str | None, dict[str, str]]", {"q": "Any"})],
    "answers": [("dict[str, tuple[str, str, dict[str, Any] | None]]", {"q": "Any"})],
    "attention_backward": [("tuple[_Array, ...]", {})],
    "explain_backward": [("tuple[str | None, dict[str, str]]", {"q": "Any"})],
    "merge": [("tuple[_Array, _Array]", {})],
    "explain_merge": [("tuple[str | None, dict[str, str]]", {"outs": "Sequence[Any]"})],
    "append": [("Any", {})],
    "explain_append": [("tuple[str | None, dict[str, str]]", {})],
    "documents": [("_Array", {"out": "None = None"}), ("_Out", {"ids": "Any", "out": "_Out"})],
    "explain_documents": [("tuple[str | None, dict[str, str]]", {"ids": "Any"})],
    "workspace_size": [("int", {"q": "Any"})],
    "faults": [("list[tuple[str, int, int, int, int]]", {})],
    "kernels": [("tuple[str, ...]", {})],
    "to_device": [("DeviceArray", {})],
    "load": [("str", {})],
}


@dataclass(frozen=True)
class Parameter:
    """A line of the table; ``functions`` are names of the module, ``default`` is Python's text or None."""

    argument: str
    name: str
    keyword: bool
    functions: frozenset[str]
    kind: str
    default: str | None
    type: str
    doc: str


def parameters() -> list[Parameter]:
    """The table, in its order."""
    text = re.sub(r"/\*.*?\*/", "", TABLE.read_text(), flags=re.DOTALL)
    string = r'(?:"(?:\\.|[^"\\])*"\s*)+'
    columns = rf"\s*(\w+),\s*({string}),\s*(\w+),\s*([\w\s|]+),\s*(\w+),\s*([\w()]+),\s*({string}|REQUIRED),\s*({string}),\s*({string})"
    found = []
    for line in re.finditer(rf"FA_PARAMETER\({columns}\)", text):
        argument, name, passing, functions, kind, _, default, of_type, doc = line.groups()
        found.append(
            Parameter(
                argument, literal(name), passing == "KEYWORD", named(functions), kind,
                None if default == "REQUIRED" else literal(default), literal(of_type), literal(doc),
            )  # fmt: skip
        )
    assert len(found) == text.count("FA_PARAMETER("), "a line of the table has another form"
    return found


def literal(text: str) -> str:
    """A C string literal in pieces."""
    return "".join(ast.literal_eval(piece) for piece in re.findall(r'"(?:\\.|[^"\\])*"', text))


def named(text: str) -> frozenset[str]:
    """The functions that ``IN_A | IN_B`` stands for, as signature.h defines the sets."""
    sets = dict(re.findall(r"^ +(IN_\w+) = ([^,]+),", SETS.read_text(), re.MULTILINE))
    found: set[str] = set()
    for word in re.findall(r"FA_FN_\w+|IN_\w+", text):
        found |= {word.removeprefix("FA_FN_")} if word.startswith("FA_FN_") else named(sets[word])
    return frozenset(found)


def functions() -> str:
    """The generated part of the stub."""
    table, lines = parameters(), []
    for function, overloads in RESULTS.items():
        mine = [p for p in table if function in p.functions]
        for result, other in overloads:
            lines += ["@overload"] if len(overloads) > 1 else []
            lines.append(f"def {function}(")
            keywords = False
            for p in mine:
                if p.keyword and not keywords:
                    keywords = True
                    lines.append("    *,")
                default = "" if p.default is None else " = " + p.default.replace("'", '"')
                lines.append(f"    {p.name}: {other.get(p.name, p.type + default)},")
            lines.append(f") -> {result}: ...")
    return "\n".join(lines) + "\n"


def stub(text: str) -> str:
    """The whole stub with the generated part anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{functions()}{END}{after}"


def operands() -> list[dict[str, str]]:
    """The lines of operands.def: {column: text}."""
    text = re.sub(r"/\*.*?\*/", "", OPERANDS.read_text(), flags=re.DOTALL)
    columns = ("name", "words", "role", "forward", "backward", "merge", "append", "gradient", "feature", "dtypes", "axes")
    one = r'"[^"]*"|\w+\([^)]*\)|\w+'
    found = [dict(zip(columns, re.findall(one, line), strict=True)) for line in re.findall(r"FA_OPERAND\((.*?)\)\n(?=FA_|$)", text, re.DOTALL)]
    assert len(found) == text.count("FA_OPERAND("), "a line of the list has another form"
    return found


def features() -> dict[str, str]:
    """The features of features.def with their words, in the order of their bits."""
    text = re.sub(r"/\*.*?\*/", "", FEATURES.read_text(), flags=re.DOTALL)
    arrays = "".join(line["feature"] for line in operands())
    text = text.replace('#include "operands.def"', re.sub(r"FEATURE\((\w+), \w+, ", r"\nFA_FEATURE(\1, ", arrays))
    return {name: literal(words) for name, words in re.findall(r'^FA_FEATURE\((\w+), ("[^"]*")\)', text, re.MULTILINE)}


def reasons() -> dict[str, str]:
    """The reasons of why.def, with their words; those that a macro has a part of are left out."""
    found = re.findall(r'^FA_WHY\((\w+),((?:\s*"(?:\\.|[^"\\])*")+)\)', REASONS.read_text(), re.MULTILINE)
    return {name: literal(words) for name, words in found}


def header(text: str) -> str:
    """The header with the arrays that its structs of arguments lack at their ends, where a struct may grow."""
    for operation in ("forward", "backward", "merge", "append"):
        begin, end = text.index(f"typedef struct fa_ext_{operation} {{"), text.index(f"}} fa_ext_{operation};")
        known = [line for line in operands() if line[operation] != "NO" and line["role"] in ("DATA", "OPTION", "INDEX")]
        arrays = {line["name"]: f"axes {literal(line['axes'])}; {literal(line['dtypes']) or 'floats'}" for line in known}
        if operation == "backward":
            arrays |= {f"d{line['name']}": f"result: gradient of {line['name']}" for line in known if line["gradient"] != "NO_GRADIENT"}
        new = [name for name in arrays if not re.search(rf"\*{name}\b", text[begin:end])]
        text = text[:end] + "".join(f"    /* {arrays[name]} */\n    const fa_ext_array *{name};\n" for name in new) + text[end:]
    return text


if __name__ == "__main__":
    STUB.write_text(stub(STUB.read_text()))
    HEADER.write_text(header(HEADER.read_text()))
