"""Inline PTX as calls of ``include/ptx.h``: one C++ statement for each instruction of an ``asm``.

``translate(text, operands)`` takes the assembly's text and its operands as C++ expressions, in the order of their
numbers. An instruction that the table lacks is an error that names it: add a line here and a function there.
"""

from __future__ import annotations

import re

#: Instruction -> call; \1 ... are groups of the pattern. Operands follow in the instruction's order.
_FLAGS = {"f16": "false", "bf16": "true", "row": "false", "col": "true"}
INSTRUCTIONS = {
    # registers and predicates
    r"mov\.[usbf]\d+": "mov",
    r"cvt\.rn\.(f16|bf16)x2\.f32": r"cvt_x2<\1>",
    r"ex2\.approx\.ftz\.f32": "=::emu::ex2",
    r"rcp\.approx\.ftz\.f32": "=::emu::rcp",
    r"tanh\.approx\.f32": "=::emu::tanh_approx",
    r"mul\.rn\.(f16|bf16)x2": r"mul_x2<\1>",
    r"max\.NaN\.f32": "=::emu::max_nan",
    r"min\.NaN\.f32": "=::emu::min_nan",
    r"bmsk\.clamp\.b32": "=::emu::bit_mask",
    r"prmt\.b32": "=::__byte_perm",
    # memory
    r"st\.shared(?:\.v[24])?\.[bfu](16|32|64)": r"st_shared<uint\1_t>",
    r"ld\.shared(?:\.v[24])?\.[bfu](16|32|64)": r"ld_shared<uint\1_t>",
    r"ld\.relaxed\.cta\.global\.s(?:32|64)": "ld_global",
    r"red\.relaxed\.gpu\.global\.add\.v4\.f32": "red_global",
    r"ld\.acquire\.gpu\.global\.u32": "ld_awaited",
    r"st\.release\.gpu\.global\.u32": "st_awaited",
    r"cp\.async\.c[ag]\.shared\.global": "cp_async",
    r"cp\.async\.commit_group": "::emu::copy_commit",
    r"cp\.async\.wait_group": "::emu::copy_wait",
    r"cp\.async\.wait_all": "::emu::copy_wait_all",
    r"cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64": "::emu::copy_arrive",
    # a warp's matrices
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.trans\.shared\.b16": r"ldmatrix<\1, true>",
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16": r"ldmatrix<\1, false>",
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])\.trans\.shared\.b16": r"stmatrix<\1, true>",
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16": r"stmatrix<\1, false>",
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": "movmatrix_trans",
    r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16)\.\2\.f32": r"mma<\1, \2>",
    r"wmma\.load\.[ab]\.sync\.aligned\.(row|col)\.m16n16k16\.shared\.b?f16": r"wmma_load<\1>",
    # barriers
    r"bar\.sync": "::emu::barrier_sync",
    r"bar\.arrive": "::emu::barrier_arrive",
    r"mbarrier\.init\.shared(?:::cta)?\.b64": "::emu::mbarrier_init",
    r"mbarrier\.inval\.shared(?:::cta)?\.b64": "::emu::mbarrier_invalidate",
    r"mbarrier\.arrive\.shared(?:::cta)?\.b64": "mbarrier_arrive",
    r"mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64": "mbarrier_arrive_expect",
    r"mbarrier\.(?:try|test)_wait\.parity\.shared(?:::cta)?\.b64": "mbarrier_try_wait",
    r"fence\.proxy\.tensormap::generic\.acquire\.(?:gpu|sys)": "::emu::tensor_map_acquire",
    r"fence\..*": "nothing",
    r"elect\.sync": "elect",
    r"setmaxnreg\..*": "nothing",
    # clusters and dependent launches, which here run one after another
    r"mapa\.shared::cluster\.u32": "mapa",
    r"barrier\.cluster\.arrive(?:\.relaxed|\.release)?\.aligned": "::emu::cluster_arrive",
    r"barrier\.cluster\.wait(?:\.acquire)?\.aligned": "::emu::cluster_wait",
    r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v[24]\.[fbu]32": "st_async",
    r"st\.shared::cluster\.u32": r"st_shared<uint32_t>",
    r"griddepcontrol\..*": "nothing",
    # tensor maps and copies
    r"tensormap\.replace\.tile\.global_address\.shared::cta\.b1024\.b64": "::emu::tensor_map_replace_address",
    r"tensormap\.replace\.tile\.global_dim\.shared::cta\.b1024\.b32": "::emu::tensor_map_replace_extent",
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(?:gpu|sys)\.sync\.aligned":
        "::emu::tensor_map_publish",
    r"prefetch\.tensormap": "nothing",
    r"prefetch\.global\.L2": "nothing",
    r"cp\.async\.bulk\.prefetch\.tensor\.[1-5]d\.L2\.global(?:\.tile)?": "tensor_prefetch",
    r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cluster\.global(?:\.tile)?\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?":
        "tensor_load",
    r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group(?:\.L2::cache_hint)?": "tensor_store",
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes": "::emu::bulk_load",
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32": "::emu::bulk_add",
    r"cp\.async\.bulk\.global\.shared::cta\.bulk_group": "::emu::bulk_store",
    r"cp\.async\.bulk\.commit_group": "::emu::bulk_commit",
    r"cp\.async\.bulk\.wait_group(?:\.read)?": "::emu::bulk_wait",
    # wgmma
    r"wgmma\.fence\.sync\.aligned": "::emu::wgmma_fence",
    r"wgmma\.commit_group\.sync\.aligned": "::emu::wgmma_commit",
    r"wgmma\.wait_group\.sync\.aligned": "::emu::wgmma_wait",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2": r"wgmma<\1, \2>",
}  # fmt: skip

SPECIAL = {
    **{f"%%ctaid.{axis}": f"::emu::self->block.{axis}" for axis in "xyz"},
    **{f"%%tid.{axis}": f"::emu::self->thread.{axis}" for axis in "xyz"},
    **{f"%%nctaid.{axis}": f"::emu::grid_dim.{axis}" for axis in "xyz"},
    "%%laneid": "::emu::self->lane",
    "%%cluster_ctarank": "::emu::ptx::cluster_rank()",
    "%%clusterid.x": "::emu::ptx::cluster_index_x()",
}
_REGISTER_TYPES = {"pred": "bool", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t", "u32": "uint32_t", "s32": "int32_t",
                   "u64": "uint64_t", "f32": "float"}  # fmt: skip


class UnknownInstruction(Exception):
    """Inline PTX that the emulator cannot run."""


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """The parts of a list, commas in brackets left alone."""
    parts, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text[start:].strip() or parts else []


def _register(name: str) -> str:
    """A name that no variable around the assembly has."""
    return f"ptx_{name}"


def _operand(text: str, operands: list[str]) -> str:
    text = text.strip()
    if text.startswith("{"):
        inner = ", ".join(_operand(part, operands) for part in split_outside_brackets(text[1:-1]))
        return f"::emu::ptx::list({inner})"
    if text.startswith("["):
        parts = split_outside_brackets(text[1:-1])
        if len(parts) == 2:
            return f"::emu::ptx::box({', '.join(_operand(part, operands) for part in parts)})"
        return _operand(parts[0], operands)
    if text in SPECIAL:
        return SPECIAL[text]
    if numbered := re.fullmatch(r"%(\d+)", text):
        return f"({operands[int(numbered[1])]})"
    if bits := re.fullmatch(r"0f([0-9a-fA-F]{8})", text):
        return f"::std::bit_cast<float>(0x{bits[1]}u)"
    if text == "_":
        return "::emu::ptx::ignored"
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return text
    if re.fullmatch(r"[A-Za-z]\w*", text):
        return _register(text)
    raise UnknownInstruction(f"operand {text!r}")


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _instruction(text: str, operands: list[str]) -> str:
    predicate = ""
    if guarded := re.match(r"@(!?)(\w+)\s+", text):
        predicate, text = f"if ({guarded[1]}{_register(guarded[2])}) ", text[guarded.end() :]
    name, _, rest = text.partition(" ")
    if name == ".reg":
        kind, _, names = rest.partition(" ")
        if kind[1:] not in _REGISTER_TYPES:
            raise UnknownInstruction(text)
        names = ", ".join(_register(one.strip()) for one in names.split(","))
        return f"[[maybe_unused]] {_REGISTER_TYPES[kind[1:]]} {names};"
    arguments = [_operand(part, operands) for part in split_outside_brackets(rest.replace("|", ","))]
    if compared := re.fullmatch(r"setp\.(\w+)\.[usbf]\d+", name):
        to, a, b = arguments
        return f"{to} = {a} {_COMPARISONS[compared[1]]} {b};"
    if re.fullmatch(r"selp\.[usbf]\d+", name):
        to, a, b, which = arguments
        return f"{to} = {which} ? {a} : {b};"
    for pattern, call in INSTRUCTIONS.items():
        if found := re.fullmatch(pattern, name):
            call = re.sub(r"\\(\d)", lambda n: _FLAGS.get(found[int(n[1])], found[int(n[1])]), call)
            if call.startswith("="):
                return f"{predicate}{arguments[0]} = {call[1:]}({', '.join(arguments[1:])});"
            return f"{predicate}{call if call.startswith('::') else '::emu::ptx::' + call}({', '.join(arguments)});"
    raise UnknownInstruction(name)


def translate(text: str, operands: list[str]) -> str:
    """C++ statements, in braces, that do what the assembly does."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    calls = [_instruction(re.sub(r"\s+", " ", part.strip()), operands) for part in text.split(";") if part.strip()]
    if not calls:
        calls = [f"::emu::ptx::nothing({', '.join(f'({x})' for x in operands)});"]
    return "{ " + " ".join(calls) + " }"
