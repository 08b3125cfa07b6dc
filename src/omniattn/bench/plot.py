"""Bar charts of benchmark reports (matplotlib, imported when called)."""

from __future__ import annotations

from pathlib import Path

from omniattn.bench.report import Report

#: Okabe-Ito: distinguishable with the common forms of colour blindness and in print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


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
    contenders = [key for key in report.contenders if any(_tflops(report, s.name, key) for s in report.shapes)]
    # Three digits must fit the width of a bar.
    label_size = 8 if len(contenders) <= 5 else 6
    panels = max(len(head_dims), 1)
    figure = Figure(figsize=(13.0, 1.2 + 3.4 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for panel, (axis, head_dim) in enumerate(zip(axes, head_dims, strict=False)):
        shapes = [shape for shape in report.shapes if shape.head_dim == head_dim]
        width = 0.84 / max(len(contenders), 1)
        for index, key in enumerate(contenders):
            heights = [_tflops(report, shape.name, key) for shape in shapes]
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
        axis.set_xticks(range(len(shapes)), [shape.name.split(" ", 1)[1] for shape in shapes])
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(0, 1.12 * report.matmul_tflops)
        axis.set_title(f"head_dim {head_dim}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if panel == 0:
            axis.legend(fontsize=8, ncols=min(4, len(contenders) + 1), loc="lower left", bbox_to_anchor=(0, 1.08))
    device, date = report.environment.get("device", "?"), report.environment.get("date", "?")
    figure.suptitle(f"Attention forward, bf16, 16k tokens, hidden size 2048 · {device} · {date}", fontsize=11)
    figure.savefig(path, dpi=150)


def _tflops(report: Report, shape_name: str, contender: str) -> float:
    for measurement in report.measurements:
        if measurement.shape.name == shape_name and measurement.contender == contender:
            return measurement.tflops or 0.0
    return 0.0
