"""CUDA C++ after the preprocessor as C++ for the host: launches, shared memory and inline PTX become calls of the emulator.

Only the project's own text is touched; line markers stay, so that compilers and debuggers name its lines.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import ptx

INCLUDE = Path(__file__).resolve().parent / "include"


class TranslationError(Exception):
    """Source that the emulator cannot take; the message begins with FILE:LINE."""


_MARKER = re.compile(r'^# (\d+) "([^"]*)"((?: \d)*)$', re.MULTILINE)
#: The expansion of a system header's macro, which the preprocessor puts between markers in the middle of a line.
_EXPANSION = re.compile(r'\n# (\d+) "((?!/usr/|<)[^"\n]*)" 3(?: 4)?\n([^\n]*)\n# \1 "\2"(?: \d)*(?:\n|$)')
_SHARED = re.compile(
    r"(?P<dynamic>\bextern\s+)?__shared__\s+(?P<align>alignas\((?P<bytes>\d+)\)\s*)?(?P<type>[\w:<>, ]+?)\s*"
    r"(?P<name>\b\w+)\s*(?P<dims>(?:\[[^\]]*\])*)\s*;"
)
_ASM = re.compile(r"\basm\s*(?:volatile\b)?\s*\(")
_LITERALS = re.compile(r'\s*((?:"(?:\\.|[^"\\])*"\s*)*)')


def translate(text: str) -> str:
    """The whole output of the preprocessor."""
    while (joined := _EXPANSION.sub(r" \3 ", text)) != text:
        text = joined
    parts, own = [], False
    place = ("?", 1)
    markers = list(_MARKER.finditer(text))
    starts = [m.start() for m in markers] + [len(text)]
    parts.append(text[: starts[0]])
    pending: list[tuple[str, tuple[str, int]]] = []  # own text; statements do not span files, but may span markers

    def flush():
        if pending:
            parts.append(_own("".join(t for t, _ in pending), pending[0][1]))
            pending.clear()

    for n, marker in enumerate(markers):
        place = (marker[2], int(marker[1]))
        own = not marker[2].startswith(("<", "/usr/")) and not Path(marker[2]).is_relative_to(INCLUDE)
        piece = text[starts[n] : starts[n + 1]]
        if own:
            pending.append((piece, place))
        else:
            flush()
            parts.append(piece)
    flush()
    return "".join(parts)


def _where(text: str, at: int, place: tuple[str, int]) -> str:
    """FILE:LINE of a position."""
    file, line = place
    begin = 0
    for marker in _MARKER.finditer(text, 0, at):
        file, line, begin = marker[2], int(marker[1]), marker.end() + 1
    return f"{file}:{line + text.count(chr(10), begin, at)}"


def _own(text: str, place: tuple[str, int]) -> str:
    text = text.replace("__noinline__", "__attribute__((noinline))")
    text = _SHARED.sub(_shared, text)
    text = _launches(text, place)
    return _assembly(text, place)


def _same_lines(new: str, old: str) -> str:
    """`new` with as many line breaks as `old`, so that later lines keep their numbers."""
    return new + "\n" * (old.count("\n") - new.count("\n"))


def _shared(found: re.Match) -> str:
    """A __shared__ declaration as a reference, or for dynamic memory a pointer."""
    kind, name, dims = found["type"].strip(), found["name"], found["dims"]
    if found["dynamic"]:
        new = f"{kind} *const {name} = static_cast<{kind} *>(::emu::dynamic_shared({found['bytes'] or f'alignof({kind})'}));"
    else:
        align = f"alignas({found['bytes']}) " if found["align"] else ""
        new = (f"struct {name}_shared {{ {align}{kind} value{dims}; }}; static const char {name}_key = 0; "
               f"auto &{name} = ::emu::static_shared<{name}_shared>(&{name}_key).value;")  # fmt: skip
    return _same_lines(new, found[0])


def _closing(text: str, at: int) -> int:
    """The position of the bracket that closes the one at `at`; strings are skipped."""
    depth = 0
    while at < len(text):
        c = text[at]
        if c == '"':
            at = _LITERALS.match(text, at).end() - 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise ValueError("unbalanced")


def _launches(text: str, place: tuple[str, int]) -> str:
    """kernel<<<...>>>(...) becomes ::emu::launcher(kernel, ...)(...)."""
    while (at := text.find("<<<")) >= 0:
        end = text.find(">>>", at)
        begin = at
        while begin and (text[begin - 1].isalnum() or text[begin - 1] in "_:>"):
            if text[begin - 1] == ">":  # template arguments
                depth = 0
                while True:
                    begin -= 1
                    depth += (text[begin] == ">") - (text[begin] == "<")
                    if depth == 0:
                        break
            else:
                begin -= 1
        if end < 0 or begin == at:
            raise TranslationError(f"{_where(text, at, place)}: a launch that the emulator cannot read")
        text = f"{text[:begin]}::emu::launcher({text[begin:at]}, {text[at + 3 : end]}){text[end + 3 :]}"
    return text


def _assembly(text: str, place: tuple[str, int]) -> str:
    parts, last = [], 0
    for found in _ASM.finditer(text):
        if found.start() < last:
            continue
        opening = found.end() - 1
        closing = _closing(text, opening)
        inside = re.sub(r'^# \d+ "[^"]*"[ \d]*$', "", text[opening + 1 : closing], flags=re.MULTILINE)
        end = text.index(";", closing) + 1
        literals = _LITERALS.match(inside)
        code = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', literals[1])).replace("\\n", "\n").replace("\\t", " ")
        sections = _sections(inside[literals.end() :])
        operands = [_expression(part) for section in sections[:2] for part in ptx.split_outside_brackets(section)]
        try:
            new = ptx.translate(code, operands)
        except (ptx.UnknownInstruction, ValueError, IndexError) as error:
            where = _where(text, found.start(), place)
            raise TranslationError(f"{where}: the emulator does not know {error} (tests/emulator/ptx.py)") from None
        old = text[found.start() : end]
        parts += [text[last : found.start()], _same_lines(new.replace("\n", " "), old)]
        last = end
    return "".join(parts) + text[last:]


def _sections(text: str) -> list[str]:
    """The lists between the colons of an asm: outputs, inputs, clobbers."""
    sections, depth, start = [], 0, None
    at = 0
    while at < len(text):
        c = text[at]
        depth += (c in "([{") - (c in ")]}")
        if c == ":" and depth == 0:
            if start is not None:
                sections.append(text[start:at])
            start = at + 1
        at += 1
    if start is not None:
        sections.append(text[start:])
    return [s.strip() for s in sections]


def _expression(operand: str) -> str:
    """`"=r"(x)` -> `x`; an output is an lvalue, an input is used as a value of its constraint's type."""
    found = re.fullmatch(r'(?:\[\w+\]\s*)?"([^"]*)"\s*\((.*)\)', operand, re.DOTALL)
    if not found:
        raise ValueError(f"operand {operand!r}")
    return re.sub(r"\s+", " ", found[2].strip())
