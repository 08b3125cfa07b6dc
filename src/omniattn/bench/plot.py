"""Bar charts of benchmark reports (matplotlib, imported when called)."""

from __future__ import annotations

from pathlib import Path

from omniattn.bench.report import Report
from omniattn.bench.shapes import ForwardShape

#: Okabe-Ito, then grey and wine: distinguishable with the common forms of colour blindness and in print.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#882255",
)  # fmt: skip


def plot_report(report: Report, path: str | Path) -> None:
    """Draw TFLOP/s of every contender, one panel a head_dim, one group of bars a shape.

    Parameters
    ----------
    report : Report
    path : str or Path
        Output file; the suffix chooses the format (.png, .svg, .pdf).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head_dims = sorted({shape.head_dim for shape in report.shapes})
    contenders = [key for key in report.contenders if any(_tflops(report, s, key) for s in report.shapes)]
    # Three digits must fit the width of a bar.
    label_size = 8 if len(contenders) <= 5 else 6
    panels = max(len(head_dims), 1)
    low = report.precision != "exact"
    # Low precision may be faster than the bf16 matrix product.
    top = max([report.matmul_tflops, *(m.tflops or 0.0 for m in report.measurements)])
    figure = Figure(figsize=(13.0, 1.2 + 3.4 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for panel, (axis, head_dim) in enumerate(zip(axes, head_dims, strict=False)):
        shapes = [shape for shape in report.shapes if shape.head_dim == head_dim]
        width = 0.84 / max(len(contenders), 1)
        for index, key in enumerate(contenders):
            heights = [_tflops(report, shape, key) for shape in shapes]
            offset = (index - (len(contenders) - 1) / 2) * width
            bars = axis.bar(
                [position + offset for position in range(len(shapes))],
                heights,
                width,
                label=report.label(key),
                color=COLOURS[index % len(COLOURS)],
            )
            axis.bar_label(bars, labels=[f"{h:.0f}" if h else "" for h in heights], fontsize=label_size, padding=1)
        axis.axhline(report.matmul_tflops, color="0.4", linestyle="--", linewidth=1, label="8192³ bf16 matrix product")
        names = [(shape.long_name if low else shape.name).split(" ", 1)[1] for shape in shapes]
        axis.set_xticks(range(len(shapes)), names, fontsize=7 if low else None)
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(0, 1.12 * top)
        axis.set_title(f"head_dim {head_dim}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if panel == 0:
            axis.legend(fontsize=8, ncols=min(4, len(contenders) + 1), loc="lower left", bbox_to_anchor=(0, 1.08))
    device, date = report.environment.get("device", "?"), report.environment.get("date", "?")
    what = f"bf16 and {report.precision}" if low else "bf16, 16k tokens, hidden size 2048"
    load = "" if report.sustained_s is None else ", under load"
    figure.suptitle(f"Attention forward, {what}{load} · {device} · {date}", fontsize=11)
    figure.savefig(path, dpi=150)


def _tflops(report: Report, shape: ForwardShape, contender: str) -> float:
    measurement = report.find(shape, contender)
    return 0.0 if measurement is None else measurement.tflops or 0.0
