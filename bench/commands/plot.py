"""Charts from any JSON of the laboratory, as PNG and SVG.

grid    TFLOP/s by sequence length, kernels beside peers, the ceiling drawn in: a panel for each series of at least three
        lengths at the same heads, head_dim, options and tokens (or batch); other problems are left out
ladder  the kernels from slowest to fastest on one problem, beside the fastest peer
errors  relative Frobenius errors of kernels and peers against float64

python -m bench plot bench/evidence/nvidia-h200.json --kind grid --output bench/evidence/grid
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import arguments, problems, report
from bench.recording import record

SUMMARY = "PNG and SVG charts from any JSON of the laboratory"
KINDS = ("grid", "ladder", "errors")
# Okabe and Ito's palette: distinct for every common kind of colour blindness. Markers differ as well.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vP*X"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, nargs="+", help="JSON of measure, evidence, gate, references or tune")
    parser.add_argument("--kind", choices=KINDS, default="grid", help="which chart (grid)")
    parser.add_argument("--only", type=arguments.pattern, default="", help="regular expression of kernels and peers to draw")
    parser.add_argument("--output", type=Path, default=Path("chart"), help="name without suffix (chart.png, chart.svg)")
    arguments.common(parser, "filter")


def run(args: argparse.Namespace) -> int:
    documents = [report.read_json(path) for path in args.source]
    written = draw(documents, args.kind, args.output, args.filter, args.only)
    report.deliver({"written": written}, args.json, lambda document: print("\n".join(document["written"])))
    return 0


def draw(documents: list[dict], kind: str, output: Path, pattern: str = "", only: str = "") -> list[str]:
    """Draws one chart into `output`.png and .svg and returns both paths."""
    try:
        import matplotlib
    except ImportError as error:
        raise report.UsageError(f"plotting needs matplotlib (pip install matplotlib): {error}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "fa"})
    cells = [c for d in documents for c in measured(d) if re.search(pattern, c["case"])]
    for cell in cells:
        cell["figures"] = {n: f for n, f in cell["figures"].items() if re.search(only, n)}
    where = _where(documents[0])
    figure = {"grid": _grid, "ladder": _ladder, "errors": _errors}[kind](plt, cells, documents, where)
    output.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in (".png", ".svg"):
        path = output.parent / (output.name + suffix)
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Date": None} if suffix == ".svg" else None)
        written.append(str(path))
    plt.close(figure)
    return written


def measured(document: dict) -> list[dict[str, Any]]:
    """Cells of a measure or evidence document that hold timings."""
    found = document.get("cells", {})
    if document.get("format") == record.FORMAT:
        found = {key: record.cell(key, runs) for key, runs in found.items()}
    cells = found.values() if isinstance(found, dict) else found
    return [dict(cell) for cell in cells if cell.get("figures")]


def _where(document: dict) -> str:
    if "machine" in document:
        return document["machine"]["name"]
    context = document.get("context", {})
    return (context.get("gpu") or {}).get("name") or context.get("cpu", "")


def _ceilings(documents: list[dict]) -> dict[str, float]:
    found: dict[str, float] = {}
    for document in documents:
        for context in (document.get("context", {}), *document.get("contexts", {}).values()):
            found |= context.get("ceilings", {}).get("gemm_tflops", {})
    return found


def _is_kernel(name: str) -> bool:
    from bench.implementations import peers

    return name not in peers.PEERS


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Kernels solid and in front, peers dashed."""
    ordered = sorted(names, key=lambda n: (not _is_kernel(n), n))
    return {
        name: {"color": PALETTE[i % len(PALETTE)], "markersize": 4,
               "marker": MARKERS[(i + i // len(PALETTE)) % len(MARKERS)],
               "linestyle": "-" if _is_kernel(name) else "--", "linewidth": 1.8 if _is_kernel(name) else 1.1}
        for i, name in enumerate(ordered)
    }  # fmt: skip


def series(cells: list[dict]) -> dict[tuple, dict[int, dict]]:
    """{(head_dim, what its problems share, size, mask): {sequence length: cell}}, each of at least three lengths.

    The problems of a series differ in the length and, where the tokens stay the same, in the batch. A cell belongs to
    the longest series that it fits into.
    """
    found: dict[tuple, dict[int, dict]] = defaultdict(dict)
    for cell in cells:
        case = problems.parse(cell["case"], problems.OPERATIONS)
        if case.lengths or case.operation not in ("attention", "backward") or case.seq_q != case.seq_k or not cell["figures"]:
            continue
        one = dataclasses.replace(case, batch=1, seq_q=1, seq_k=1, causal=False)
        _, heads, _, *others = str(one).split(",")
        shared = ", ".join([heads, *others, cell["cache"]])
        for size in (f"{case.batch * case.seq_q} tokens", f"batch {case.batch}"):
            found[case.head_dim, shared, size, "causal" if case.causal else "full"][case.seq_q] = cell
    kept: dict[tuple, dict[int, dict]] = {}
    drawn: set[int] = set()
    for key, lengths in sorted(found.items(), key=lambda item: -len(item[1])):
        left = {length: cell for length, cell in lengths.items() if id(cell) not in drawn}
        if len(left) >= 3:
            kept[key] = left
            drawn |= {id(cell) for cell in left.values()}
    return dict(sorted(kept.items(), key=lambda item: (*item[0][:3], item[0][3] == "causal")))


def _length_ticks(lengths: Iterable[int]) -> dict[int, str]:
    """{length: label}; of lengths within a fifth of each other the first one alone, so that labels do not touch."""
    ticks: dict[int, str] = {}
    for length in sorted(lengths):
        if not ticks or length > 1.2 * max(ticks):
            ticks[length] = f"{length // 1024}k" if length % 1024 == 0 else str(length)
    return ticks


def _grid(plt, cells, documents, where):
    panels = series(cells)
    if not panels:
        raise report.UsageError("no measured problem fits this chart: it needs three lengths of one problem")
    names = sorted({name for panel in panels.values() for cell in panel.values() for name in cell["figures"]})
    styles, ceilings = _styles(names), _ceilings(documents)
    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 3.0 * lines), squeeze=False)
    for axis, ((_, shared, size, mask), panel) in zip(axes.flat, panels.items()):
        for name in names:
            points = [(s, c["figures"][name]["tflops"]) for s, c in sorted(panel.items()) if name in c["figures"]]
            if points:
                axis.plot(*zip(*points), label=name, **styles[name])
        dtype = problems.parse(next(iter(panel.values()))["case"], problems.OPERATIONS).dtype
        if dtype in ceilings:
            axis.axhline(ceilings[dtype], color="0.4", linewidth=1, linestyle=":")
            axis.annotate(f"matrix product {ceilings[dtype]:.3g}", (0.02, ceilings[dtype]), fontsize=7, color="0.3",
                          xycoords=("axes fraction", "data"), va="bottom")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])  # room for the line's label
        ticks = _length_ticks(panel)
        axis.set_xticks(list(ticks), list(ticks.values()))
        axis.minorticks_off()
        axis.set_title(f"{mask}, {shared}, {size}", fontsize=9)
        axis.set_xlabel("sequence length (tokens)")
        axis.set_ylabel("TFLOP/s")
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    handles = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=min(5, len(handles)), fontsize=8,
                  bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip
    figure.text(0.01, -0.01, f"{where}; FLOPs count 4 B H S S D, 10 B H S S D backward, half of it when causal", fontsize=7, color="0.3")
    figure.tight_layout()
    return figure


def _ladder(plt, cells, documents, where):
    cells = [cell for cell in cells if cell["figures"]]
    if not cells:
        raise report.UsageError("no measured problem fits this chart")
    cell = max(cells, key=lambda c: (sum(_is_kernel(n) for n in c["figures"]), problems.parse(c["case"], problems.OPERATIONS).flops()))
    steps = sorted(cell["figures"].items(), key=lambda item: -item[1]["us"])
    figure, axis = plt.subplots(figsize=(7, 0.42 * len(steps) + 1.3))
    colours = [PALETTE[0] if _is_kernel(name) else "#999999" for name, _ in steps]
    bars = axis.barh([name for name, _ in steps], [f["tflops"] for _, f in steps], color=colours, height=0.65)
    for bar, (_, figures) in zip(bars, steps):
        axis.annotate(
            f" {_time(figures['us'])}, {figures['tflops']:.3g} TFLOP/s",
            (bar.get_width(), bar.get_y() + 0.33),
            va="center",
            fontsize=8,
        )
    axis.set_xlim(0, 1.45 * max(f["tflops"] for _, f in steps))
    axis.set_xlabel("TFLOP/s (kernels of fa_ext in blue, peers in grey)")
    axis.set_title(f"{cell['case']}, {cell['cache']}; {where}", fontsize=9)
    axis.grid(axis="y", visible=False)
    figure.tight_layout()
    return figure


def _time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1000:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def _reference_errors(document: dict) -> list[dict]:
    """Entries of bench references, from its own file or from a record."""
    part = document.get("parts", {}).get("references", {}).get("errors", document)
    cells = part.get("cells", {})
    listed = [cell.get("errors", []) for cell in (cells.values() if isinstance(cells, dict) else cells)]
    return part.get("errors") or [entry for errors in listed for entry in errors]


def _errors(plt, cells, documents, where):
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cell in cells:
        dtype = problems.parse(cell["case"], problems.OPERATIONS).dtype
        for name, figures in cell["figures"].items():
            found[dtype, name].append(figures.get("frobenius"))
    for document in documents:
        for entry in _reference_errors(document):
            if "frobenius" in entry:
                found[problems.parse(entry["case"], problems.OPERATIONS).dtype, entry["name"]].append(entry["frobenius"])
    found = {key: [v for v in values if isinstance(v, float) and v > 0] for key, values in found.items()}
    found = {key: values for key, values in found.items() if values}
    if not found:
        raise report.UsageError("no errors in these files")
    dtypes = sorted({dtype for dtype, _ in found})
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.2 * len(dtypes), 3.4), squeeze=False)
    for axis, dtype in zip(axes.flat, dtypes):
        names = sorted({n for d, n in found if d == dtype}, key=lambda n: (not _is_kernel(n), n))
        axis.boxplot([found[dtype, n] for n in names], tick_labels=names, widths=0.5, whis=(0, 100), medianprops={"color": PALETTE[1]})
        for i, name in enumerate(names, 1):
            axis.plot([i] * len(found[dtype, name]), found[dtype, name], ".", color=PALETTE[0], markersize=3, alpha=0.6)
        axis.set_yscale("log")
        axis.set_title(dtype, fontsize=9)
        axis.set_ylabel("relative error against float64")
        for label in axis.get_xticklabels():
            label.set(rotation=50, ha="right", rotation_mode="anchor")
    figure.suptitle(f"Frobenius norm of the error over that of the reference; {where}", fontsize=8)
    figure.tight_layout()
    return figure
