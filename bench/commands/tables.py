"""The figures in README.md, FIGURES.md and the pages of bench/figures/, written from the committed evidence.

No page can drift from another: each block of a file between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by what the records under
bench/evidence/ hold now; what stands outside the blocks is left alone. A block is a function of the records; most of them are
the problems of a preset, a line each, with the columns that belong to that preset.
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
from bench.implementations import dense_rows, peers
from bench.problems.lengths import pair
from bench.recording import check, record

SUMMARY = "write the figures of README.md, bench/FIGURES.md and bench/figures/ from the committed evidence"
FILES = (machine.ROOT / "README.md", machine.ROOT / "bench" / "FIGURES.md", *sorted((machine.ROOT / "bench" / "figures").glob("*.md")))
RECORDS = {"gpu": "nvidia-h200", "h100": "nvidia-h100-80gb-hbm3", "cpu": "intel-r-xeon-r-processor"}
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GPUS = {"gpu": "H200", "h100": "H100"}
HOPPER, AMPERE, CUDNN, FLASH, FLASH3 = "wgmma_sm90", "mma_sm80", "torch-cudnn", "torch-flash", "flash-attn-3"
BACKWARD_PEERS = {CUDNN: "cuDNN", FLASH: "FlashAttention-2 (torch)", FLASH3: "FlashAttention-3",
                  "torch-flash-ordered": "FlashAttention-2, ordered", "flash-attn-3-ordered": "FlashAttention-3, ordered"}  # fmt: skip
SERVING_PEERS = {CUDNN: "cuDNN, dense", FLASH3: "FlashAttention-3", "vllm-flash-attn-3": "vLLM's", "flashinfer": "flashinfer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, action="append", help="repeatable; default: README.md, bench/FIGURES.md and bench/figures/*.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file would change")


def run(args: argparse.Namespace) -> int:
    fresh = {file: rendered(file.read_text()) for file in args.file or FILES}
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
    records = {name: json.loads((record.FOLDER / f"{file}.json").read_text()) for name, file in RECORDS.items()}

    def fill(found: re.Match) -> str:
        if found[2] not in BLOCKS:
            raise report.UsageError(f"block {found[2]!r} is unknown; accepted: {', '.join(BLOCKS)}")
        return f"{found[1]}{BLOCKS[found[2]](records)}\n{found[3]}"

    return BLOCK.sub(fill, text)


# ---- a cell, and how its figures are written ----


class Cell:
    """The runs of a problem in a record, the newest last."""

    def __init__(self, document: dict, case: Any, cache: str = "hot"):
        self.case, self.runs = case, document["cells"].get(f"{case} {cache}", [])

    def get(self, name: str, figure: str = "us") -> float | None:
        """The newest figure of a kernel or peer."""
        run = record.newest(self.runs, name)
        return run["figures"][name].get(figure) if run else None

    def over(self, ours: str, peer: str) -> float | None:
        """How many times faster than `peer` in the newest run of `ours`; the peer's figure of another run would not do."""
        run = record.newest(self.runs, ours)
        return run["figures"][peer]["us"] / run["figures"][ours]["us"] if run and peer in run["figures"] else None

    def least_over(self, ours: str, names: Iterable[str]) -> float | None:
        return min((ratio for name in names if ours and (ratio := self.over(ours, name))), default=None)

    def names(self, kernels: bool | None = None) -> set[str]:
        """Those that were timed: all, kernels alone, or peers alone."""
        return {name for run in self.runs for name in run["figures"] if kernels is None or kernels == (name not in peers.PEERS)}

    def fastest(self) -> str:
        """The fastest kernel; "" where none was timed."""
        return min(sorted(self.names(kernels=True)), key=lambda name: self.get(name) or math.inf, default="")

    # ---- as text ----

    def us(self, name: str) -> str:
        return _us(self.get(name))

    def rate(self, name: str) -> str:
        return _or_dash("{:.0f}", self.get(name, "tflops"))

    def ratio(self, ours: str, peer: str) -> str:
        return _or_dash("{:.2f}", self.over(ours, peer))


def _or_dash(form: str, value: float | None) -> str:
    return form.format(value) if value else "-"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 20 else f"{value:.1f}" if value < 200 else f"{value:,.0f}"


def _mean(ratios: Iterable[float | None]) -> str:
    """Geometric mean."""
    known = [r for r in ratios if r]
    return f"{math.exp(sum(map(math.log, known)) / len(known)):.2f}" if known else "-"


def _shape(case: Any) -> str:
    return f"{case.batch} {case.heads} {case.seq_q} {case.head_dim}"


def _mask(case: Any) -> str:
    return "causal" if case.causal else "full"


def _markdown(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    columns = list(columns)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (columns, ["---"] * len(columns), *rows))


def _gemm(document: dict) -> float | None:
    """TFLOP/s of a matrix product in bfloat16 beside the newest run."""
    return record.context_of(document, "measure").get("ceilings", {}).get("gemm_tflops", {}).get("bfloat16")


# ---- presets whose problems are lines: {title of a column: what it says of a cell} ----

Columns = dict[str, Callable[[Cell], Any]]


def _of_preset(columns: Columns, preset: str, records: dict, which: str = "gpu", cache: str = "hot",
               only: Callable[[Any], bool] = lambda case: True, missing: str = "") -> str:  # fmt: skip
    """A table of the cells of a preset; with `missing`, what is said where no cell was measured, of those alone that were."""
    cells = [Cell(records[which], case, cache) for case in problems.preset(preset) if only(case)]
    cells = [cell for cell in cells if cell.runs] if missing else cells
    return _markdown(columns, [[say(cell) for say in columns.values()] for cell in cells]) if cells else missing


PAPER: Columns = {
    "D": lambda c: c.case.head_dim, "mask": lambda c: _mask(c.case), "S": lambda c: c.case.seq_q, "`wgmma_sm90`": lambda c: c.rate(HOPPER),
    "`mma_sm80`": lambda c: c.rate(AMPERE), "cuDNN": lambda c: c.rate(CUDNN), "FlashAttention-3": lambda c: c.rate(FLASH3),
    "FlashAttention-2 (torch)": lambda c: c.rate(FLASH), "ours / cuDNN": lambda c: c.ratio(HOPPER, CUDNN),
    "/ FlashAttention-3": lambda c: c.ratio(HOPPER, FLASH3),
}  # fmt: skip
SMALL: Columns = {
    "B H S D, float16": lambda c: _shape(c.case), "mask": lambda c: _mask(c.case), "fa_ext takes": lambda c: f"`{_picked(c)}`",
    "us": lambda c: c.us(_picked(c) or ""),
} | {title: partial(lambda c, name: c.us(name), name=f"torch-{name}")
     for title, name in (("cuDNN", "cudnn"), ("FlashAttention-2", "flash"), ("efficient", "efficient"), ("math", "math"))}  # fmt: skip
EXTRAS: Columns = {
    "B H S D, bfloat16": lambda c: _shape(c.case), "": lambda c: "bias" if c.case.bias else "mask", "`mma_sm80` us": lambda c: c.us(AMPERE),
    "`wmma`": lambda c: c.us("wmma"), "cuDNN": lambda c: c.us(CUDNN), "efficient": lambda c: c.us("torch-efficient"),
}  # fmt: skip
DECODE: Columns = {
    "B, heads, keys": lambda c: f"{c.case.batch}, {c.case.heads}{f'/{c.case.heads_kv}' * (c.case.heads != c.case.heads_kv)}, {c.case.seq_k}",
    "`mma_sm80` us": lambda c: c.us(AMPERE), "cuDNN": lambda c: c.us(CUDNN), "FlashAttention-2": lambda c: c.us(FLASH),
}  # fmt: skip
CACHE_OPS: Columns = {
    "": lambda c: c.case.operation,
    "tokens, 32/8 heads of 128": lambda c: f"{c.case.seq_q if c.case.operation == 'merge' else sum(c.case.n_q):,}",
    "us": lambda c: c.us(c.case.operation), "copy of as many bytes": lambda c: c.us("copy"),
    "copy / ours": lambda c: c.ratio(c.case.operation, "copy"),
}  # fmt: skip
CPU: Columns = {
    "problem": lambda c: c.case, "`cpu_simd` ms": lambda c: _ms(c.get("cpu_simd")), "NumPy ms": lambda c: _ms(c.get("numpy")),
    "torch ms": lambda c: _ms(_torch(c)), "NumPy / ours": lambda c: c.ratio("cpu_simd", "numpy") if c.get("numpy") else "-",
    "torch / ours": lambda c: f"{_torch(c) / c.get('cpu_simd'):.2f}" if _torch(c) and c.get("cpu_simd") else "-",
    "GFLOP/s": lambda c: _or_dash("{:.0f}", 1e3 * (c.get("cpu_simd", "tflops") or 0)),
}  # fmt: skip


def _picked(cell: Cell) -> str | None:
    return cell.runs[-1].get("picked") if cell.runs else None


def _torch(cell: Cell) -> float | None:
    """The faster of torch's two ways."""
    return min((us for name in ("torch-flash", "torch-math") if (us := cell.get(name))), default=None)


def _ms(us: float | None) -> str:
    return "-" if not us else f"{us / 1e3:.3g}" if us < 1e6 else f"{us / 1e3:,.0f}"


# ---- other tables ----


def _where(records: dict) -> str:
    context = record.context_of(records["gpu"], "measure")
    versions, nvcc = context["versions"], re.search(r"release ([\d.]+)", context["nvcc"])
    return (
        f"One {context['gpu']['name']} (driver {context['gpu']['driver']}, CUDA {nvcc[1] if nvcc else '?'}), torch"
        f" {versions['torch']} with cuDNN {versions['nvidia-cudnn-cu13']}, {context['date'][:10]}. A matrix product in"
        f" bfloat16 reaches {_gemm(records['gpu']):.0f} TFLOP/s there."
    )


def _means(records: dict) -> str:
    columns = ["GPU", "head_dim", "`wgmma_sm90` / cuDNN, full", "causal", "least cell", "/ FlashAttention-3, full", "causal", "least cell",
               "`mma_sm80` / FlashAttention-2", "least cell"]  # fmt: skip
    lines = []
    for which, gpu in GPUS.items():
        cells = [Cell(records[which], case) for case in problems.preset("paper")]
        for d in (64, 128, 256):
            of = [cell for cell in cells if cell.case.head_dim == d]
            means = [text for peer in (CUDNN, FLASH3) for text in (
                *(_mean(c.over(HOPPER, peer) for c in of if bool(c.case.causal) == causal) for causal in (False, True)), _least(of, HOPPER, peer))]  # fmt: skip
            lines.append([gpu, d, *means, _mean(c.over(AMPERE, FLASH) for c in of), _least(of, AMPERE, FLASH)])
    return _markdown(columns, lines)


def _least(cells: list[Cell], ours: str, peer: str) -> str:
    known = [(ratio, cell.case) for cell in cells if (ratio := cell.over(ours, peer))]
    ratio, case = min(known, key=lambda one: one[0], default=(None, None))
    return f"{ratio:.2f} ({_mask(case)}, S {case.seq_q})" if case else "-"


LADDER = ("minimal", "simt", "cublas", "wmma", AMPERE, HOPPER, "wgmma_split_sm90", "torch-math", "torch-efficient", FLASH, CUDNN)


def _ladder(records: dict) -> str:
    shapes = {"B1 H8 S512 D64 float16": "", "B8 H32 S2048 D64 bfloat16": ",layout=bshd", "B8 H16 S2048 D128 bfloat16": ",layout=bshd"}
    cells = [Cell(records["gpu"], shape.replace(" ", ",") + more) for shape, more in shapes.items()]
    gemm = _gemm(records["gpu"])

    def line(name: str) -> list:
        rate = cells[-1].get(name, "tflops")
        shown = name.replace("torch-", "torch ") if name.startswith("torch") else f"`{name}`"
        return [shown, *(cell.us(name) for cell in cells), _or_dash("{:.0f}", rate), f"{100 * rate / gemm:.0f}%" if rate and gemm else "-",
                _or_dash("{:.1e}", cells[-1].get(name, "frobenius"))]  # fmt: skip

    return _markdown(["kernel", *(f"{title}, us" for title in shapes), "TFLOP/s (last shape)", "of the matrix product", "error"], map(line, LADDER))


def _options(records: dict) -> str:
    def line(head_dim: int) -> list:
        def cell(option: str) -> Cell:
            return Cell(records["gpu"], f"B4,H{2048 // head_dim},S4096,D{head_dim},bfloat16{option}")

        def cost(option: str, without: str) -> str:
            taken, plain = cell(option).get(HOPPER), cell(without).get(HOPPER)
            return f"{100 * (taken / plain - 1):+.0f}%" if taken and plain else "-"

        return [head_dim, *(cell(option).rate(HOPPER) for option in ("", ",causal=True", ",window=1024:0")), cost(",softcap=30.0", ""),
                cost(",sinks=same", ""), cost(",causal=True,sinks=same", ",causal=True")]  # fmt: skip

    columns = ["head_dim", "full", "causal", "window of 1024 keys back", "softcap", "sinks", "sinks, causal"]
    return _markdown(columns, [line(d) for d in (64, 96, 128, 192, 256)])


def _dropout(records: dict) -> str:
    """Of each kernel that takes a problem the time with dropout, and over that of the fastest without."""
    lines = []
    for which, gpu in GPUS.items():
        for case in (case for case in problems.preset("dropout") if case.dropout):
            cell, plain = (Cell(records[which], c) for c in (case, dataclasses.replace(case, dropout=None)))
            without = plain.get(plain.fastest())
            for kernel in sorted(sorted(cell.names()), key=cell.get)[:2]:
                share = f"{cell.get(kernel) / without:.2f}" if without else "-"
                lines.append([gpu, case.operation, _shape(case), _mask(case), f"`{kernel}`", cell.us(kernel), share])
    columns = ["GPU", "pass", "B H S D, bfloat16", "mask", "kernel", "us", "/ without"]
    return _markdown(columns, lines) if lines else "The records hold no figures of dropout yet."


CALLS = ("torch out=", "torch", "torch paged out=", "torch append", "torch SDPA", "torch empty", "cupy out=", "cupy", "bare launch",
         "torch forward", "autograd forward", "torch backward", "autograd backward", "gradients grads=", "gradients", "torch step", "torch packed step",
         "jax jit", "jax nothing")  # fmt: skip


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
                recipe = "{rate:g} after {warmup}".format(**piece["recipe"])
                losses = (f"{run['first']:.3f}", f"{run['last']:.3f}", f"{run['rise']:.2f}")
                gap = f"{run['gap']:.2f}" if "gap" in run else ""
                lines.append([f"{gpu}, {what}", name, piece["sizes"]["steps"], recipe, *losses, f"{run['milliseconds']:.1f}", gap])
    return _markdown(["", "attention", "steps", "learning rate", "first loss", "last loss", "rise", "ms a step", "gap"], lines)


def _backward(records: dict, which: str = "gpu") -> str:
    """The paper's grid and what else its preset has: TFLOP/s, and the fastest kernel over the fastest of all peers and over the
    fastest that keeps an order."""
    cells = [Cell(records[which], case) for case in problems.preset("paper-backward")]
    kernels = sorted(set().union(*(cell.names(kernels=True) for cell in cells)))
    shown = [name for name in BACKWARD_PEERS if any(name in cell.names() for cell in cells)]
    if not kernels:
        return "The record holds no figures of the backward pass yet."

    def line(cell: Cell) -> list:
        case, ours = cell.case, max((k for k in kernels if cell.get(k)), key=lambda k: cell.get(k, "tflops"), default="")
        ratios = [cell.least_over(ours, names) for names in (shown, [name for name in shown if name.endswith("ordered")])]
        return [_shape(case) + " float16" * (case.dtype == "float16"), _mask(case) + ", any order" * (not case.deterministic),
                *(cell.rate(name) for name in (*kernels, *shown)), *(_or_dash("{:.2f}", ratio) for ratio in ratios)]  # fmt: skip

    columns = ["B H S D", "mask", *(f"`{name}`" for name in kernels), *(BACKWARD_PEERS[name] for name in shown),
               "best of ours / best peer", "/ best ordered peer"]  # fmt: skip
    return _markdown(columns, [line(cell) for cell in cells if cell.runs])


def _packed_backward(records: dict, which: str = "gpu") -> str:
    """The cases of packed training, each in the first of its cells: microseconds and TFLOP/s of the fastest kernel, its rate as a share
    of the dense call's, and how many times faster than each peer it is."""
    cells: dict[Any, tuple[str, Cell]] = {}
    for name, cases in problems.CELLS["sequences-backward"].items():
        for case in cases:
            cells.setdefault(case, (name, Cell(records[which], case)))
    timed = {name for _, cell in cells.values() for name in cell.names()}
    if not timed:
        return "The record holds no figures of packed training yet."
    shown = [name for name in BACKWARD_PEERS if name in timed]

    def line(name: str, cell: Cell) -> list:
        ours, case = cell.fastest(), cell.case
        how = [_mask(case), *(["any order"] if not case.deterministic else []), *(["sinks"] if case.sinks else []), *(["window"] if case.window else [])]
        lengths = problems.shortened(str(case)).split(",")[2]
        return [name, f"{pair(case.heads, case.heads_kv, '/')} {pair(case.head_dim, case.head_dim_v, '/')}", f"{case.batch} of {lengths[1:]}",
                ", ".join(how), f"`{ours}`" if ours else "-", cell.us(ours), cell.rate(ours), cell.ratio(ours, dense_rows.NAME),
                *(cell.ratio(ours, peer) for peer in shown)]  # fmt: skip

    columns = ["cell", "H D", "sequences", "mask", "kernel", "us", "TFLOP/s", "of our dense rate", *(f"{BACKWARD_PEERS[n]} / ours" for n in shown)]
    return _markdown(columns, [line(name, cell) for name, cell in cells.values() if cell.runs])


SERVING_GROUPS = {
    "one query, dense keys": r"D\d\w?", "one query, pages of 16, 64 or 256 keys": r"P1 .*", "one query, pages of 1 or 3 keys": r"P2 .*",
    "one query, 512 to 65,536 keys": "R1", "one query, one sequence of 131,072 keys among 63 of 512": "R2",
    "one query, short sequences and half-empty batches": "R3", "one query, with cu_seqlens_q": r".* packed( dense)?", "1, 4 or 8 queries": "S1",
    "one query, with options": "S2", "1 or 4 queries, head_dim 256": "H1", "few queries, dense keys": "Q1", "prefill of equal lengths": r"V1( dense)?",
    "prefill of drawn lengths": "V2", "prefill of short or empty sequences": "V3", "prefill, paged": "V4",
    "a piece of a prompt": "C1", "a prompt beside single queries": "X1", "256 queries on 4,096 keys": "E1",
}  # fmt: skip


def _serving(records: dict) -> str:
    """The cases of the preset: microseconds, the fastest peer over the fastest kernel, and the rate of reading keys and values
    as a share of the best read rate of the run."""
    cells = [Cell(records["gpu"], case, "cold") for case in problems.preset("serving")]
    if not any(cell.runs for cell in cells if cell.case.operation == "serving"):
        return "The record holds no figures over sequences yet."
    shown = [name for name in SERVING_PEERS if any(name in cell.names() for cell in cells)]
    read = record.context_of(records["gpu"], "measure").get("ceilings", {}).get("read_gbs")

    def line(cell: Cell) -> list:
        ours = cell.fastest()
        taken = cell.get(ours)
        share = f"{100 * cell.case.key_bytes() / (taken * 1e-6) / 1e9 / read:.0f}%" if taken and read else "-"
        return [f"`{problems.shortened(str(cell.case))}`", f"`{ours}`" if ours else "-", _us(taken), *(cell.us(n) for n in shown),
                _or_dash("{:.2f}", cell.least_over(ours, SERVING_PEERS)), share]  # fmt: skip

    columns = ["case", "kernel", "us", *(SERVING_PEERS[n] for n in shown), "best peer / ours", "K and V read, of the best rate"]
    return _markdown(columns, [line(cell) for cell in cells if cell.runs])


def _serving_groups(records: dict) -> str:
    """For each group of cases of the preset that records hold the fastest peer over the fastest kernel on each GPU."""
    lines = []
    for group, named in SERVING_GROUPS.items():
        cases = [case for name, of in problems.CELLS["serving"].items() if re.fullmatch(named, name) for case in of]
        held = {which: [cell for case in cases if (cell := Cell(records[which], case, "cold")).runs] for which in GPUS}
        if not any(held.values()):
            continue
        line = [group, max(map(len, held.values()))]
        for cells in held.values():
            known = [ratio for cell in cells if (ratio := cell.least_over(cell.fastest(), SERVING_PEERS))]
            line += [_mean(known), f"{min(known):.2f}" if known else "-"]
        lines.append(line)
    return _markdown(["cases", "how many", *(f"{gpu}: {what}" for gpu in GPUS.values() for what in ("mean", "least"))], lines)


def _tested(records: dict) -> str:
    lines = (f"- {check.summary(document)}" for document in records.values())
    return "\n".join(textwrap.fill(line, 140, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


BLOCKS: dict[str, Callable[[dict], str]] = {
    "where": _where, "means": _means, "ladder": _ladder, "options": _options, "dropout": _dropout, "overhead": _overhead, "training": _training,
    "backward": _backward, "backward_h100": partial(_backward, which="h100"),
    "packed_backward": _packed_backward, "packed_backward_h100": partial(_packed_backward, which="h100"),
    "serving": _serving, "serving_groups": _serving_groups,
    "paper": partial(_of_preset, PAPER, "paper", only=lambda case: case.seq_q in (512, 2048, 16384)),
    "paper_h100": partial(_of_preset, PAPER, "paper", which="h100", only=lambda case: case.seq_q in (512, 2048, 16384)),
    "small": partial(_of_preset, SMALL, "small"), "extras": partial(_of_preset, EXTRAS, "extras"),
    "decode": partial(_of_preset, DECODE, "decode", cache="cold"), "cpu": partial(_of_preset, CPU, "cpu", which="cpu", missing="-"),
    "cache_ops": partial(_of_preset, CACHE_OPS, "cache_ops", cache="cold", missing="The record holds no figures of merging and appending yet."),
    "tested": _tested,
}  # fmt: skip
