"""Digests of the machine code that a build made, a kernel and one for the core: what a measured figure belongs to.

A digest covers what runs and nothing else: the bytes of code and data sections, the sizes of those without bytes, what
each relocation points to, and a kernel's registers and limits. It does not cover names: a section stands for its contents
and for the contents of what it points to, so a renamed function, template or file changes nothing; nor debug
information, line tables, or the order in which sections lie. Sections are labelled by their bytes and then, ``ROUNDS``
times, by their label and the labels that their relocations lead to (the refinement of Weisfeiler and Lehman, "A reduction
of a graph to a canonical form and an algebra arising during this reduction", 1968); the digest is a hash of the sorted labels.

* device: the cubins of all architectures. PTX is left out: it is the text from which the sm_80 cubin is made, and it
  holds names and lines.
* host: the object that the C compiler or nvcc made, without the fat binary inside it, which holds the cubins again
  (compressed) and the PTX. A string counts by its characters wherever it lies; one that names a device function counts as
  that function's code.

The host's functions within one section keep their order, so moving one within a file changes the digest, though not what
it computes. So does another version of a compiler, which is why the compilers stand beside the digests.

``setup.py`` links the digests into the extension, as JSON in the section ``SECTION``: they cannot come apart from the
code they describe. Imports nothing but Python's own library, so that it runs before anything is built.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECTION = ".fa_digests"
FORMAT = 1
ROUNDS = 4
CORE = "core"
# Where sources lie; the compilers also read headers of the system, of Python and of NumPy.
SOURCES = ("csrc/", "kernels/", "fa_ext/")

_NOBITS, _SYMTAB, _RELA, _NOTE, _REL = 8, 2, 4, 7, 9
_ALLOC, _STRINGS = 0x2, 0x20
_UNDEFINED, _RESERVED = 0, 0xFF00
# Sections that hold device code again, or that only describe the host's: unwinding follows from the code.
_NOT_HOST = (".nv_fatbin", ".nvFatBinSegment", "__nv_module_id", ".eh_frame", ".note", ".comment")
_DEVICE = (".text", ".nv.constant", ".nv.shared", ".nv.local", ".nv.global")
# Attributes of .nv.info that hold indices of symbols: PARAM_CBANK and EXTERNS.
_SYMBOLIC = (0x0A, 0x0F)
# x86-64 relocations relative to the end of a four-byte field: the addend is short of the target by 4.
_RELATIVE = (2, 4, 9, 41, 42)


class Unreadable(ValueError):
    """A file is not the 64-bit little-endian ELF that this module reads."""


@dataclass(frozen=True)
class Section:
    name: str
    type: int
    flags: int
    link: int
    info: int
    size: int
    body: bytes


@dataclass(frozen=True)
class Symbol:
    name: str
    is_local: bool
    section: int
    value: int


@dataclass(frozen=True)
class Relocation:
    offset: int
    type: int
    symbol: int
    addend: int


class Elf:
    """Sections, symbols and relocations ({section: [...]}) of a file."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        try:
            self._read(data)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise Unreadable(f"{path}: {error}") from None

    def _read(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        *_, table, self.flags, _, _, _, each, count, names = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        # Of a cubin, such as 90: in another place of the flags from CUDA 13 on.
        self.architecture = (self.flags >> 8 if data[8] >= 8 else self.flags) & 0xFF
        raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + each * i) for i in range(count)]

        def text(start: int) -> str:
            return data[start : data.index(b"\0", start)].decode()

        self.sections = [
            Section(text(raw[names][4] + name), kind, flags, link, info, size, b"" if kind == _NOBITS else data[at : at + size])
            for name, kind, flags, _, at, size, link, info, _, _ in raw
        ]  # fmt: skip
        self.symbols: list[Symbol] = []
        for section in self.sections:
            if section.type == _SYMTAB:
                for name, info, _, where, value, _ in struct.iter_unpack("<IBBHQQ", section.body):
                    self.symbols.append(Symbol(text(raw[section.link][4] + name), info >> 4 == 0, where, value))
        self.relocations: dict[int, list[Relocation]] = {}
        for section in self.sections:
            if section.type in (_RELA, _REL):
                entries = struct.iter_unpack("<QQq" if section.type == _RELA else "<QQ", section.body)
                self.relocations.setdefault(section.info, []).extend(
                    Relocation(offset, info & 0xFFFFFFFF, info >> 32, *(addend or (0,))) for offset, info, *addend in entries
                )

    def section(self, name: str) -> bytes | None:
        return next((s.body for s in self.sections if s.name == name), None)


def _hash(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        piece = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(piece).to_bytes(8, "little") + piece)
    return found.hexdigest()[:16]


Node = tuple[int, int]  # which file, which section of it
Edge = tuple[str, Node | None]  # what is said of the target, and the target


def _refined(labels: dict[Node, str], edges: dict[Node, list[Edge]]) -> dict[Node, str]:
    """Labels that also stand for what the sections point to, ``ROUNDS`` steps away."""
    for _ in range(ROUNDS):
        labels = {
            node: _hash(label, *(f"{said} {labels[to] if to else ''}" for said, to in edges.get(node, ())))
            for node, label in labels.items()
        }
    return labels


# ---- device code ----


def _attributes(section: Section) -> Iterable[tuple[int, bytes]]:
    """(attribute, its value) of a .nv.info section."""
    at = 0
    while at < section.size:
        layout, attribute, value = struct.unpack_from("<BBH", section.body, at)
        at += 4
        if layout == 4:  # `value` bytes follow
            yield attribute, section.body[at : at + value]
            at += value
        else:
            yield attribute, section.body[at - 2 : at]


def _limits(elf: Elf) -> dict[int, list[str]]:
    """{section of a device function: its registers, stack, parameters, launch bounds...}."""
    found: dict[int, list[str]] = {}
    for section in elf.sections:
        if section.name == ".nv.info":
            for attribute, value in _attributes(section):
                if attribute not in _SYMBOLIC and len(value) == 8:
                    symbol, figure = struct.unpack("<II", value)
                    found.setdefault(elf.symbols[symbol].section, []).append(f"{attribute}={figure}")
        elif section.name.startswith(".nv.info."):
            said = [f"{attribute}={value.hex()}" for attribute, value in _attributes(section) if attribute not in _SYMBOLIC]
            found.setdefault(section.info, []).extend(said)
    return found


def of_cubins(cubins: Iterable[Path]) -> dict[str, Any]:
    """{"sections": sorted labels of all cubins, "symbols": {name of a device function or variable: label}, "functions":
    {name of a device function: {architecture: label of its machine code}}}."""
    sections: list[str] = []
    symbols: dict[str, list[str]] = {}
    functions: dict[str, dict[str, str]] = {}
    for path in cubins:
        elf = Elf(path)
        try:
            limits = _limits(elf)
        except (struct.error, IndexError) as error:
            raise Unreadable(f"{path}: {error}") from None
        kept = {i: s for i, s in enumerate(elf.sections) if s.name.startswith(_DEVICE)}
        labels: dict[Node, str] = {}
        edges: dict[Node, list[Edge]] = {}
        for i, section in kept.items():
            kind = re.match(r"\.nv\.[a-z]+\d*|\.[a-z]+", section.name)
            size = section.size if section.type == _NOBITS else ""
            labels[0, i] = _hash(elf.flags, kind and kind[0], size, section.body, *sorted(limits.get(i, [])))
            if section.info in kept and section.name.startswith(".nv."):
                edges.setdefault((0, section.info), []).append((f"its {kind and kind[0]}", (0, i)))
        for i in kept:
            for found in elf.relocations.get(i, ()):
                symbol = elf.symbols[found.symbol]
                where = f"{found.offset} {found.type} {found.addend} {symbol.value}"
                to = (0, symbol.section) if symbol.section in kept else None
                edges.setdefault((0, i), []).append((where if to else f"{where} {symbol.name}", to))
        labels = _refined(labels, edges)
        sections += labels.values()
        for symbol in elf.symbols:
            if symbol.name and symbol.section in kept:
                symbols.setdefault(symbol.name, []).append(f"{labels[0, symbol.section]}+{symbol.value}")
                if kept[symbol.section].name == f".text.{symbol.name}":
                    functions.setdefault(symbol.name, {})[str(elf.architecture)] = labels[0, symbol.section]
    return {"sections": sorted(sections), "symbols": {name: _hash(*sorted(found)) for name, found in symbols.items()},
            "functions": functions}  # fmt: skip


def function_key(name: str) -> str:
    """How a group's ``functions`` name a device function."""
    return _hash(name)[:10]


def device_labels(cubins: Iterable[Path]) -> dict[str, Any]:
    """The result of ``of_cubins``, or {"unreadable": why}: a toolkit that writes other files is no reason not to build."""
    try:
        return of_cubins(cubins)
    except Unreadable as error:
        return {"unreadable": str(error)}


# ---- host code ----


def of_objects(objects: Iterable[Path], device_names: dict[str, str]) -> str:
    """One digest of objects that belong together; a string in ``device_names`` counts as what it names."""
    elves = [Elf(path) for path in objects]
    labels: dict[Node, str] = {}
    for number, elf in enumerate(elves):
        for i, section in enumerate(elf.sections):
            if section.flags & _ALLOC and not section.flags & _STRINGS and not section.name.startswith(_NOT_HOST):
                size = section.size if section.type == _NOBITS else ""
                labels[number, i] = _hash(section.type, section.flags, size, section.body)
    defined = {
        symbol.name: ((number, symbol.section), symbol.value)
        for number, elf in reversed(list(enumerate(elves)))
        for symbol in elf.symbols
        if not symbol.is_local and (number, symbol.section) in labels
    }
    edges = {
        (number, i): [_host_edge(elves[number], number, found, labels, defined, device_names)
                      for found in elves[number].relocations.get(i, ())]
        for number, i in labels
    }  # fmt: skip
    return _hash(*sorted(_refined(labels, edges).values()))


def _host_edge(
    elf: Elf, number: int, found: Relocation, labels: dict, defined: dict[str, tuple[Node, int]], device_names: dict
) -> Edge:
    symbol = elf.symbols[found.symbol]
    node, value = (number, symbol.section), symbol.value
    if symbol.section == _UNDEFINED and symbol.name in defined:
        node, value = defined[symbol.name]
    target = value + found.addend + (4 if found.type in _RELATIVE else 0)
    where = f"{found.offset} {found.type}"
    if node in labels:
        return f"{where} {target}", node
    if _UNDEFINED < symbol.section < _RESERVED:
        section = elf.sections[symbol.section]
        if section.flags & _STRINGS:
            text = section.body[max(target, 0) :].partition(b"\0")[0].decode(errors="backslashreplace")
            return f"{where} text {device_names.get(text, text)}", None
        return f"{where} {section.name}", None
    return f"{where} {target} {symbol.name}", None


# ---- a build ----


def device_file(target: Path) -> Path:
    """Where the labels of an object's device code lie, beside the object."""
    return target.with_suffix(".device.json")


def describe(groups: dict[str, list[Path]], root: Path, always: Iterable[str]) -> dict[str, dict]:
    """{group: {"device": digest or None, "host": digest, "functions", "sources": {path: hash of its text}}} of a build's objects.

    ``functions``, {``function_key`` of a device function: {architecture: label of its machine code}}, tell whether what a call
    launched is what it launches now, whatever else its group holds. ``sources`` are the files under ``root`` that the compilers read, and ``always``: without a build they still tell
    whether a group can have changed.
    """
    found = {}
    for name, objects in sorted(groups.items()):
        units = [json.loads(device_file(target).read_text()) for target in objects if device_file(target).exists()]
        read = {os.path.normpath(path) for target in objects for path in dependencies(target)}
        texts = {os.path.relpath(path, root) for path in read if path.startswith(f"{root}{os.sep}")}
        kept = sorted({text for text in texts if text.startswith(SOURCES)} | set(always))
        found[name] = _of_group(objects, units) | {"sources": {text: text_hash(root / text) for text in kept}}
    return found


def _of_group(objects: list[Path], units: list[dict]) -> dict[str, Any]:
    try:
        if why := next((unit["unreadable"] for unit in units if "unreadable" in unit), None):
            raise Unreadable(why)
        names = {symbol: label for unit in units for symbol, label in unit["symbols"].items()}
        host = of_objects(objects, names)
    except Unreadable as error:  # no reason not to build
        return {"device": None, "host": None, "unreadable": str(error)}
    sections = sorted(label for unit in units for label in unit["sections"])
    return {"device": _hash(*sections) if sections else None, "host": host, "functions": _functions_of(units)}


def _functions_of(units: list[dict]) -> dict[str, dict[str, str]]:
    """The device functions of all units; units that have one of the same name and other code count together."""
    found: dict[str, dict[str, set[str]]] = {}
    for unit in units:
        for name, labels in unit.get("functions", {}).items():
            for architecture, label in labels.items():
                found.setdefault(function_key(name), {}).setdefault(architecture, set()).add(label)
    return {key: {architecture: _hash(*sorted(labels))[:12] for architecture, labels in of.items()} for key, of in found.items()}


def text_hash(path: Path) -> str | None:
    """Hash of a file's text; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path.is_file() else None


def dependencies(target: Path) -> list[str]:
    """Files that a compiler read for an object, from what it wrote with -MD."""
    names = target.with_suffix(".d").read_text().replace("\\\n", " ").partition(": ")[2]
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", names.strip())]


def as_c(document: dict) -> str:
    """A C file that puts a document into ``SECTION`` of the extension."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    literal = "\n".join(json.dumps(text[i : i + 2000]) for i in range(0, len(text), 2000))
    return f'__attribute__((section("{SECTION}"), used)) static const char fa_digests[] =\n{literal};\n'


def read(extension: Path) -> dict | None:
    """The digests inside a built extension; None where it has none."""
    try:
        body = Elf(extension).section(SECTION)
        return json.loads(body.rstrip(b"\0")) if body else None
    except (OSError, ValueError):
        return None
