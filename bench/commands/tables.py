"""The figures in README.md, FIGURES.md and the pages of bench/figures/, written from the committed evidence.

No page can drift from another: each block of a file between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by what the records under
bench/evidence/ hold now; what stands outside the blocks is left alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine, problems, report
from bench.commands import evidence
from bench.contenders import peers
from bench.recording import record

SUMMARY = "write the figures of README.md, bench/FIGURES.md and bench/figures/ from the committed evidence"
FILES = (machine.ROOT / "README.md", machine.ROOT / "bench" / "FIGURES.md", *sorted((machine.ROOT / "bench" / "figures").glob("*.md")))
EVIDENCE = machine.ROOT / "bench" / "evidence"
GPU_RECORD, CPU_RECORD = EVIDENCE / "nvidia-h200.json", EVIDENCE / "intel-r-xeon-r-processor.json"
H100_RECORD = EVIDENCE / "nvidia-h100-80gb-hbm3.json"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GPUS = {"gpu": "H200", "h100": "H100"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HOPPER, AMPERE, CUDNN, FLASH = "wgmma_sm90", "mma_sm80", "torch-cudnn", "torch-flash"
BACKWARD_PEERS = {CUDNN: "cuDNN", FLASH: "FlashAttention-2 (torch)", "flash-attn-3": "FlashAttention-3",
                  "torch-flash-ordered": "FlashAttention-2, ordered", "flash-attn-3-ordered": "FlashAttention-3, ordered"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, action="append", help="repeatable; default: README.md, bench/FIGURES.md and bench/figures/*.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file would change")


def run(args: argparse.Namespace) -> int:
    files = args.file or FILES
    fresh = {file: rendered(file.read_text()) for file in files}
    if not args.check:
        for file, text in fresh.items():
            file.write_text(text)
        return 0
    agrees = {str(file): text == file.read_text() for file, text in fresh.items()}

    def show(document: dict) -> None:
        for name, same in document["agrees"].items():
            print(f"{Path(name).name}: {'agrees' if same else 'differs from the records'}")

    report.deliver({"agrees": agrees}, args.json, show)
    return int(not all(agrees.values()))


def rendered(text: str) -> str:
    """`text` with its blocks as the records have them."""
    paths = {"gpu": GPU_RECORD, "h100": H100_RECORD, "cpu": CPU_RECORD}
    records = {name: json.loads(path.read_text()) for name, path in paths.items()}

    def fill(found: re.Match) -> str:
        if found[2] not in BLOCKS:
            raise report.UsageError(f"block {found[2]!r} is unknown; accepted: {', '.join(BLOCKS)}")
        return f"{found[1]}{BLOCKS[found[2]](records)}\n{found[3]}"

    return BLOCK.sub(fill, text)


# ---- reading a record ----


def _cell(document: dict, case: str, cache: str = "hot") -> list[dict]:
    """The runs of a problem, the newest last."""
    return document["cells"].get(f"{case} {cache}", [])


def _value(cell: list[dict], name: str, figure: str = "us") -> float | None:
    """The newest figure of a contender."""
    run = record.newest(cell, name)
    return run["contenders"][name].get(figure) if run else None


def _over(cell: list[dict], ours: str, peer: str) -> float | None:
    """How many times faster than `peer` in the newest run of `ours`; the peer's figure of another run would not do."""
    run = record.newest(cell, ours)
    return _value([run], peer) / _value([run], ours) if run and peer in run["contenders"] else None


def _gemm(document: dict) -> float | None:
    """TFLOP/s of a matrix product in bfloat16 beside the newest run."""
    ceilings = record.context_of(document, "measure").get("ceilings", {})
    return ceilings.get("gemm_tflops", {}).get("bfloat16")


def _paper_case(head_dim: int, mask: str, length: int) -> str:
    causal = ",causal=True" if mask == "causal" else ""
    return f"B{16384 // length},H{2048 // head_dim},S{length},D{head_dim},bfloat16{causal},layout=bshd"


def _mean(ratios: Iterable[float | None]) -> str:
    """Geometric mean."""
    known = [r for r in ratios if r]
    return f"{math.exp(sum(map(math.log, known)) / len(known)):.2f}" if known else "-"


def _microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 20 else f"{value:.1f}" if value < 200 else f"{value:,.0f}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# ---- the blocks ----


def _where(records: dict) -> str:
    context = record.context_of(records["gpu"], "measure")
    versions, gemm = context["versions"], _gemm(records["gpu"])
    nvcc = re.search(r"release ([\d.]+)", context["nvcc"])
    return (
        f"One {context['gpu']['name']} (driver {context['gpu']['driver']}, CUDA {nvcc[1] if nvcc else '?'}), torch"
        f" {versions['torch']} with cuDNN {versions['nvidia-cudnn-cu13']}, {context['date'][:10]}. A matrix product in"
        f" bfloat16 reaches {gemm:.0f} TFLOP/s there."
    )


def _paper_cells(records: dict, which: str = "gpu") -> dict[tuple, list[dict]]:
    """{(head_dim, mask, S): runs}."""
    return {
        (d, mask, s): _cell(records[which], _paper_case(d, mask, s))
        for d in (64, 128, 256) for mask in ("full", "causal") for s in LENGTHS
    }  # fmt: skip


def _means(records: dict) -> str:
    columns = ["GPU", "head_dim", "`wgmma_sm90` / cuDNN, full", "causal", "least cell", "/ FlashAttention-3, full", "causal", "least cell",
               "`mma_sm80` / FlashAttention-2", "least cell"]  # fmt: skip
    lines = []
    for which, gpu in GPUS.items():
        cells = _paper_cells(records, which)
        for d in (64, 128, 256):
            of_hopper = [text for peer in (CUDNN, "flash-attn-3") for text in (
                *(_mean(_over(cells[d, mask, s], HOPPER, peer) for s in LENGTHS) for mask in ("full", "causal")), _least(cells, d, HOPPER, peer))]  # fmt: skip
            of_ampere = _mean(_over(cells[d, mask, s], AMPERE, FLASH) for mask in ("full", "causal") for s in LENGTHS)
            lines.append([gpu, d, *of_hopper, of_ampere, _least(cells, d, AMPERE, FLASH)])
    return _markdown(columns, lines)


def _paper(records: dict, which: str = "gpu") -> str:
    cells = _paper_cells(records, which)

    def rate(cell: list[dict], name: str) -> str:
        value = _value(cell, name, "tflops")
        return f"{value:.0f}" if value else "-"

    def line(key: tuple) -> list:
        ratio = _over(cells[key], HOPPER, CUDNN)
        best = _over(cells[key], HOPPER, "flash-attn-3")
        rates = [rate(cells[key], name) for name in (HOPPER, AMPERE, CUDNN, "flash-attn-3", FLASH)]
        return [*key, *rates, *(f"{r:.2f}" if r else "-" for r in (ratio, best))]

    columns = ["D", "mask", "S", "`wgmma_sm90`", "`mma_sm80`", "cuDNN", "FlashAttention-3", "FlashAttention-2 (torch)", "ours / cuDNN", "/ FlashAttention-3"]
    return _markdown(columns, [line(key) for key in cells if key[2] in (512, 2048, 16384)])


def _least(cells: dict, head_dim: int, ours: str, peer: str) -> str:
    ratios = {key[1:]: _over(cell, ours, peer) for key, cell in cells.items() if key[0] == head_dim}
    known = {key: ratio for key, ratio in ratios.items() if ratio}
    if not known:
        return "-"
    mask, length = min(known, key=known.__getitem__)
    return f"{known[mask, length]:.2f} ({mask}, S {length})"


def _small(records: dict) -> str:
    lines = []
    for shape in (
        "1 8 512 64",
        "1 8 128 64",
        "1 8 1024 64",
        "2 8 512 64",
        "1 16 512 128",
        "8 16 512 64",
        "1 32 2048 128",
    ):
        b, h, s, d = shape.split()
        for mask, causal in (("full", ""), ("causal", ",causal=True")):
            cell = _cell(records["gpu"], f"B{b},H{h},S{s},D{d},float16{causal},layout=bshd")
            picked = cell[-1].get("picked") if cell else None
            peers = [_value(cell, f"torch-{name}") for name in ("cudnn", "flash", "efficient", "math")]
            lines.append([shape, mask, f"`{picked}`", *map(_microseconds, [_value(cell, picked or ""), *peers])])
    columns = ["B H S D, float16", "mask", "fa_ext takes", "us", "cuDNN", "FlashAttention-2", "efficient", "math"]
    return _markdown(columns, lines)


LADDER = (
    "minimal",
    "simt",
    "cublas",
    "wmma",
    AMPERE,
    HOPPER,
    "wgmma_split_sm90",
    "torch-math",
    "torch-efficient",
    FLASH,
    CUDNN,
)


def _ladder(records: dict) -> str:
    shapes = {
        "B1 H8 S512 D64 float16": "B1,H8,S512,D64,float16",
        "B8 H32 S2048 D64 bfloat16": _paper_case(64, "full", 2048),
        "B8 H16 S2048 D128 bfloat16": _paper_case(128, "full", 2048),
    }
    cells = {title: _cell(records["gpu"], case) for title, case in shapes.items()}
    gemm = _gemm(records["gpu"])
    last = list(shapes)[-1]

    def line(name: str) -> list:
        rate, error = _value(cells[last], name, "tflops"), _value(cells[last], name, "frobenius")
        shown = name.replace("torch-", "torch ") if name.startswith("torch") else f"`{name}`"
        return [
            shown, *(_microseconds(_value(cell, name)) for cell in cells.values()), f"{rate:.0f}" if rate else "-",
            f"{100 * rate / gemm:.0f}%" if rate and gemm else "-", f"{error:.1e}" if error else "-",
        ]  # fmt: skip

    columns = ["kernel", *(f"{title}, us" for title in shapes), "TFLOP/s (last shape)", "of the matrix product", "error"]
    return _markdown(columns, [line(name) for name in LADDER])


def _options(records: dict) -> str:
    def cell(head_dim: int, option: str) -> list[dict]:
        return _cell(records["gpu"], f"B4,H{2048 // head_dim},S4096,D{head_dim},bfloat16{option}")

    def line(head_dim: int) -> list:
        plain, causal = cell(head_dim, ""), cell(head_dim, ",causal=True")
        rates = [_value(c, HOPPER, "tflops") for c in (plain, causal, cell(head_dim, ",window=1024:0"))]
        costs = [_cost(cell(head_dim, ",softcap=30.0"), plain), _cost(cell(head_dim, ",sinks=same"), plain),
                 _cost(cell(head_dim, ",causal=True,sinks=same"), causal)]  # fmt: skip
        return [head_dim, *(f"{rate:.0f}" if rate else "-" for rate in rates), *costs]

    columns = ["head_dim", "full", "causal", "window of 1024 keys back", "softcap", "sinks", "sinks, causal"]
    return _markdown(columns, [line(d) for d in (64, 96, 128, 192, 256)])


def _extras(records: dict) -> str:
    lines = []
    for d, s in ((64, 2048), (128, 2048), (128, 4096)):
        for option in ("bias", "mask"):
            cell = _cell(records["gpu"], f"B4,H16,S{s},D{d},bfloat16,{option}=full")
            times = [_value(cell, name) for name in (AMPERE, "wmma", CUDNN, "torch-efficient")]
            lines.append([f"4 16 {s} {d}", option, *map(_microseconds, times)])
    return _markdown(["B H S D, bfloat16", "", "`mma_sm80` us", "`wmma`", "cuDNN", "efficient"], lines)


def _dropout(records: dict) -> str:
    """Of each kernel that takes a problem the time with dropout, and over that of the fastest without."""
    lines = []
    for which, gpu in GPUS.items():
        for case in (case for case in problems.preset("dropout") if case.dropout):
            cell, plain = (_cell(records[which], str(c)) for c in (case, dataclasses.replace(case, dropout=None)))
            kernels = sorted({name for run in cell for name in run["contenders"]}, key=lambda name: _value(cell, name))
            without = min((us for run in plain for name in run["contenders"] if (us := _value(plain, name))), default=None)
            for kernel in kernels[:2]:
                us = _value(cell, kernel)
                problem = f"{case.batch} {case.heads} {case.seq_q} {case.head_dim}", "causal" if case.causal else "full"
                lines.append([gpu, case.operation, *problem, f"`{kernel}`", _microseconds(us), f"{us / without:.2f}" if without else "-"])
    if not lines:
        return "The records hold no figures of dropout yet."
    return _markdown(["GPU", "pass", "B H S D, bfloat16", "mask", "kernel", "us", "/ without"], lines)


def _cost(cell: list[dict], plain: list[dict]) -> str:
    taken, without = _value(cell, HOPPER), _value(plain, HOPPER)
    return f"{100 * (taken / without - 1):+.0f}%" if taken and without else "-"


def _decode(records: dict) -> str:
    lines = []
    for b, s in ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 8192), (128, 2048)):
        for heads in ("32", "32/8"):
            cell = _cell(records["gpu"], f"B{b},H{heads},S1x{s},D128,bfloat16,layout=bshd", "cold")
            times = [_value(cell, name) for name in (AMPERE, CUDNN, FLASH)]
            lines.append([f"{b}, {heads}, {s}", *map(_microseconds, times)])
    return _markdown(["B, heads, keys", "`mma_sm80` us", "cuDNN", "FlashAttention-2"], lines)


CALLS = ("torch out=", "torch", "torch paged out=", "torch append", "torch SDPA", "torch empty", "cupy out=", "cupy", "bare launch",
         "torch forward", "autograd forward", "torch backward", "autograd backward", "gradients grads=", "gradients", "jax jit", "jax nothing")  # fmt: skip


def _overhead(records: dict) -> str:
    taken = {gpu: records[which]["parts"]["overhead"]["figures"]["microseconds"] for which, gpu in GPUS.items()}
    columns = [name for name in CALLS if any(name in one for one in taken.values())]
    return _markdown(["us a call", *columns], [[gpu, *(f"{one[name]:.1f}" if name in one else "-" for name in columns)] for gpu, one in taken.items()])


def _training(records: dict) -> str:
    """GPT-2 124M: losses, the most that one was above the lowest before it, time of a step, and the gap of the loss to the reference
    over that between backends (bound: 2)."""
    lines = []
    for which, gpu in GPUS.items():
        for what, piece in records[which]["parts"].get("training", {}).items():
            for name, run in piece.get("runs", {}).items():
                gap = f"{run['gap']:.2f}" if "gap" in run else ""
                recipe = "{rate:g} after {warmup}".format(**piece["recipe"])
                losses = (f"{run['first']:.3f}", f"{run['last']:.3f}", f"{run['rise']:.2f}")
                lines.append([f"{gpu}, {what}", name, piece["sizes"]["steps"], recipe, *losses, f"{run['milliseconds']:.1f}", gap])
    return _markdown(["", "attention", "steps", "learning rate", "first loss", "last loss", "rise", "ms a step", "gap"], lines)


def _backward(records: dict, which: str = "gpu") -> str:
    """The paper's grid and what else its preset has: TFLOP/s, and the fastest kernel over the fastest of all peers and over the
    fastest that keeps an order."""
    cells = {case: _cell(records[which], str(case)) for case in problems.preset("paper-backward")}
    measured = {name for cell in cells.values() for run in cell for name in run["contenders"]}
    kernels = sorted(measured - set(peers.PEERS))
    shown = [name for name in BACKWARD_PEERS if name in measured]
    if not kernels:
        return "The record holds no figures of the backward pass yet."

    def line(case: problems.Case, cell: list[dict]) -> list:
        rates = {name: _value(cell, name, "tflops") for name in (*kernels, *shown)}
        ours = max((name for name in kernels if rates[name]), key=lambda name: rates[name], default="")
        ordered = [name for name in shown if name.endswith("ordered")]
        ratios = [min((_over(cell, ours, name) for name in names if _over(cell, ours, name)), default=None) for names in (shown, ordered)]
        size = f"{case.batch} {case.heads} {case.seq_q} {case.head_dim}" + " float16" * (case.dtype == "float16")
        return [
            size, ("causal" if case.causal else "full") + ", any order" * (not case.deterministic), *(f"{rate:.0f}" if rate else "-" for rate in rates.values()),
            *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios),
        ]  # fmt: skip

    columns = ["B H S D", "mask", *(f"`{name}`" for name in kernels), *(BACKWARD_PEERS[name] for name in shown),
               "best of ours / best peer", "/ best ordered peer"]  # fmt: skip
    return _markdown(columns, [line(case, cell) for case, cell in cells.items() if cell])


SERVING_GROUPS = {
    "one query, dense keys": r"D\d\w?", "one query, pages of 16, 64 or 256 keys": r"P1 .*", "one query, pages of 1 or 3 keys": r"P2 .*",
    "one query, 512 to 65,536 keys": "R1", "one query, one sequence of 131,072 keys among 63 of 512": "R2",
    "one query, short sequences and half-empty batches": "R3", "one query, with cu_seqlens_q": r".* packed", "1, 4 or 8 queries": "S1",
    "one query, with options": "S2", "few queries, dense keys": "Q1", "prefill of equal lengths": r"V1( dense)?",
    "prefill of drawn lengths": "V2", "prefill of short or empty sequences": "V3", "prefill, paged": "V4",
    "a piece of a prompt": "C1", "a prompt beside single queries": "X1",
}  # fmt: skip
SERVING_PEERS = {CUDNN: "cuDNN, dense", "flash-attn-3": "FlashAttention-3", "vllm-flash-attn-3": "vLLM's", "flashinfer": "flashinfer"}


def _serving(records: dict) -> str:
    """The cases of the preset: microseconds, the fastest peer over the fastest kernel, and the rate of reading keys and values
    as a share of the best read rate of the run."""
    cells = [(case, _cell(records["gpu"], str(case), "cold")) for cases in problems.CELLS.values() for case in cases]
    if not any(cell for case, cell in cells if case.operation == "serving"):
        return "The record holds no figures over sequences yet."
    measured = {name for _, cell in cells for run in cell for name in run["contenders"]}
    shown = [name for name in SERVING_PEERS if name in measured]
    read = record.context_of(records["gpu"], "measure").get("ceilings", {}).get("read_gbs")

    def line(case: problems.Problem, cell: list[dict]) -> list:
        times, ours, ratio = _against_peers(cell)
        taken = times.get(ours)
        share = f"{100 * case.key_bytes() / (taken * 1e-6) / 1e9 / read:.0f}%" if taken and read else "-"
        return [f"`{_line(case)}`", f"`{ours}`" if ours else "-", _microseconds(taken), *(_microseconds(times.get(n)) for n in shown),
                f"{ratio:.2f}" if ratio else "-", share]  # fmt: skip

    columns = ["case", "kernel", "us", *(SERVING_PEERS[n] for n in shown), "best peer / ours", "K and V read, of the best rate"]
    return _markdown(columns, [line(*entry) for entry in cells if entry[1]])


def _line(case: problems.Problem) -> str:
    """The line of a case; of many lengths the first three."""
    words = str(case).split(",")
    words[2] = re.sub(r"^((?:[^+]+\+){3})(?:[^+]+\+){5,}.*", r"\1...", words[2])
    return ",".join(words)


def _serving_groups(records: dict) -> str:
    """For each group of cases of the preset the fastest peer over the fastest kernel on each GPU."""
    lines = []
    for group, named in SERVING_GROUPS.items():
        cases = [case for name, of in problems.CELLS.items() if re.fullmatch(named, name) for case in of]
        line = [group, len(cases)]
        for which in GPUS:
            ratios = [_against_peers(_cell(records[which], str(case), "cold"))[2] for case in cases]
            known = [ratio for ratio in ratios if ratio]
            line += [_mean(known), f"{min(known):.2f}" if known else "-"]
        lines.append(line)
    return _markdown(["cases", "how many", *(f"{gpu}: {what}" for gpu in GPUS.values() for what in ("mean", "least"))], lines)


def _against_peers(cell: list[dict]) -> tuple[dict[str, float | None], str, float | None]:
    """Microseconds of each contender, the fastest kernel, and the time of the fastest of SERVING_PEERS over that kernel's."""
    times = {n: _value(cell, n) for run in cell for n in run["contenders"]}
    ours = min((n for n in times if n not in peers.PEERS), key=lambda n: times[n] or math.inf, default="")
    return times, ours, min((r for n in SERVING_PEERS if ours and (r := _over(cell, ours, n))), default=None)


def _moves(records: dict) -> str:
    lines = []
    for case in problems.preset("moves"):
        cell = _cell(records["gpu"], str(case), "cold")
        ours = case.operation
        ratio = _over(cell, ours, "copy")
        tokens = case.seq_q if case.operation == "merge" else sum(case.n_q)
        if ratio:
            lines.append([case.operation, f"{tokens:,}", _microseconds(_value(cell, ours)), _microseconds(_value(cell, "copy")), f"{ratio:.2f}"])
    columns = ["", "tokens, 32/8 heads of 128", "us", "copy of as many bytes", "copy / ours"]
    return _markdown(columns, lines) if lines else "The record holds no figures of merging and appending yet."


def _cpu(records: dict) -> str:
    """Every problem of the record's preset, beside NumPy and the faster of torch's two ways."""
    lines = []
    for case in problems.preset("cpu"):
        cell = _cell(records["cpu"], str(case))
        if not cell:
            continue
        ours, numpy = _value(cell, "cpu_simd"), _value(cell, "numpy")
        torch = min((t for t in (_value(cell, name) for name in ("torch-flash", "torch-math")) if t), default=None)
        shown = ["-" if not t else f"{t / 1e3:.3g}" if t < 1e6 else f"{t / 1e3:,.0f}" for t in (ours, numpy, torch)]
        ratios = [f"{t / ours:.2f}" if t and ours else "-" for t in (numpy, torch)]
        rate = _value(cell, "cpu_simd", "tflops")
        lines.append([case, *shown, *ratios, f"{1e3 * rate:.0f}" if rate else "-"])
    columns = ["problem", "`cpu_simd` ms", "NumPy ms", "torch ms", "NumPy / ours", "torch / ours", "GFLOP/s"]
    return _markdown(columns, lines)


def _tested(records: dict) -> str:
    lines = (f"- {evidence.summary(document)}" for document in records.values())
    return "\n".join(textwrap.fill(line, 140, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


BLOCKS: dict[str, Callable[[dict], str]] = {
    "where": _where, "means": _means, "paper": _paper, "small": _small, "ladder": _ladder, "options": _options, "dropout": _dropout, "extras": _extras, "decode": _decode,
    "paper_h100": partial(_paper, which="h100"),
    "backward": _backward, "backward_h100": partial(_backward, which="h100"), "serving": _serving, "serving_groups": _serving_groups, "moves": _moves, "overhead": _overhead, "training": _training, "cpu": _cpu, "tested": _tested,
}  # fmt: skip
