"""Tables of gradients: reports of ``omniattn bench backward``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table, value_of

SOURCES: dict[str, Source] = {
    "backward": Source("omniattn bench backward --no-flex --json", "backward", False),
    "backward_flex": Source("omniattn bench backward --shapes window1024 --shapes softcap50 --json", "backward", False),
    "train_lm": Source("python examples/train_lm/train.py --plot docs/train_lm.svg", "train_lm", False),
    "train_lm_speed": Source(
        "python examples/train_lm/speed.py --attention omniattn sdpa fa4 --compile", "train_lm_speed", False
    ),
    "train_lm_precisions": Source(
        "python examples/train_lm/precisions.py --small --plot docs/train_lm_precisions.svg", "train_lm", False
    ),
}

#: Speed over cuDNN that is asked for, by head_dim and length: full, causal.
GOALS: dict[tuple[int, int], tuple[float, float]] = {
    (64, 1024): (1.26, 1.35),
    (64, 4096): (1.28, 1.42),
    (64, 16384): (1.30, 1.43),
    (128, 1024): (1.18, 1.22),
    (128, 4096): (1.20, 1.27),
    (128, 16384): (1.24, 1.28),
    **{(256, seqlen): (1.30, 1.30) for seqlen in (1024, 4096, 16384)},
}
#: Deterministic over not; packed over dense; the kernels for every GPU over FlashAttention-2, by head_dim.
DETERMINISTIC, PACKED = 0.85, 0.85
GENERIC = {64: 1.05, 128: 1.05, 256: 1.15}

#: Ratios this near to 1 say nothing.
NOISE = 0.005

#: Steps of a mean of differences of losses, and what such a mean is called apart from.
MEAN_STEPS, ABOVE = 50, 0.02

_ALONE, _BOTH = "backward", "forward + backward"
Cells = dict[tuple[str, str], Row]


def _shapes(report: Report) -> Iterator[tuple[str, Cells]]:
    """Each shape with the rows of the faster layouts, by contender and what was timed."""
    shapes: dict[str, Cells] = {}
    for row in report["rows"]:
        cells = shapes.setdefault(row["shape"], {})
        if row["best_layout"] or (row["contender"], row["what"]) not in cells:
            cells[row["contender"], row["what"]] = row
    yield from shapes.items()


def _peers(report: Report) -> list[tuple[str, str]]:
    """Other libraries that were timed, and what a reader calls them."""
    names = {"cudnn": "cuDNN", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "flex": "FlexAttention"}
    keys = {row["contender"] for row in report["rows"] if row["median_us"] is not None}
    return [(key, name) for key, name in names.items() if key in keys]


def _asked(value: float | None, goal: float) -> str:
    """A ratio beside what is asked for."""
    return "–" if value is None else f"{value:.2f}× ({goal:.2f})"


def headline(report: Report) -> str:
    """Gradients alone on the 18 shapes: speed, over cuDNN and FlashAttention-2, deterministic over not."""
    lines = []
    for shape, cells in _shapes(report):
        own = cells["omniattn", _ALONE]
        if not own["headline"]:
            continue
        goal = GOALS[own["head_dim"], own["seqlen"]][own["causal"]]
        lines.append(
            [
                shape,
                number(own["tflops"], 0),
                _asked(own["over_cudnn"], goal),
                *(ratio(own[f"over_{key}"]) for key, _ in _peers(report)[1:]),
                number(value_of(cells.get(("deterministic", _ALONE)), "tflops"), 0),
                _asked(value_of(cells.get(("deterministic", _ALONE)), "over_omniattn"), DETERMINISTIC),
            ]
        )
    peers = [f"over {name}" for _, name in _peers(report)[1:]]
    header = ["TFLOP/s", "backward", "over cuDNN (goal)", *peers, "deterministic", "of backward (goal)"]
    mean = report["geometric_mean_ratio"].get("cudnn")
    return below(table(header, lines), report, f"Geometric mean of the ratios to cuDNN: {ratio(mean)}.")


def together(report: Report) -> str:
    """Forward and backward by autograd on the same shapes."""
    lines = []
    for shape, cells in _shapes(report):
        own = cells.get(("omniattn", _BOTH))
        if own is not None and own["headline"]:
            lines.append([shape, number(own["tflops"], 0), *(ratio(own[f"over_{key}"]) for key, _ in _peers(report))])
    return below(table(["TFLOP/s", _BOTH, *(f"over {name}" for _, name in _peers(report))], lines), report)


def slower(report: Report) -> str:
    """Calls that another library runs faster: a row each."""
    lines = []
    for shape, cells in _shapes(report):
        cols = []
        for what in (_ALONE, _BOTH):
            own = cells.get(("omniattn", what), {})
            found = [(own.get(f"over_{key}"), name) for key, name in _peers(report)]
            less = sorted((value, name) for value, name in found if value is not None and value < 1 - NOISE)
            cols.append(", ".join(f"{name} {ratio(value)}" for value, name in less) or "–")
        if not cells["omniattn", _ALONE]["generic"] and cols != ["–", "–"]:
            lines.append([shape, *cols])
    return below(table(["shape", _ALONE, _BOTH], lines), report)


def options(report: Report) -> str:
    """Gradients alone with grouped heads, packed sequences, a window, softcap."""
    lines = []
    for shape, cells in _shapes(report):
        own = cells["omniattn", _ALONE]
        if own["headline"] or own["generic"]:
            continue
        dense = own["over_dense"]
        lines.append(
            [
                shape,
                number(own["median_us"], 0),
                number(own["tflops"], 0),
                *(ratio(own[f"over_{key}"]) for key, _ in _peers(report)),
                "–" if dense is None else _asked(dense, PACKED),
                _asked(value_of(cells.get(("deterministic", _ALONE)), "over_omniattn"), DETERMINISTIC),
            ]
        )
    peers = [f"over {name}" for _, name in _peers(report)]
    header = ["shape", "µs", "TFLOP/s", *peers, "over dense (goal)", "deterministic over it (goal)"]
    return below(table(header, lines), report)


def flex(report: Report) -> str:
    """Gradients alone beside FlexAttention's."""
    lines = []
    for shape, cells in _shapes(report):
        own = cells["omniattn", _ALONE]
        lines.append([shape, number(own["median_us"], 0), number(own["tflops"], 0), ratio(own["over_flex"])])
    return below(table(["shape", "µs", "TFLOP/s", "over FlexAttention"], lines), report)


def generic(report: Report) -> str:
    """The kernels for every GPU beside FlashAttention-2."""
    lines = []
    for shape, cells in _shapes(report):
        own, both = cells["omniattn", _ALONE], cells.get(("omniattn", _BOTH))
        if own["generic"]:
            speeds = [number(own["tflops"], 0), _asked(own["over_fa2"], GENERIC[own["head_dim"]])]
            lines.append([shape, *speeds, number(value_of(both, "tflops"), 0), ratio(value_of(both, "over_fa2"))])
    return below(table(["TFLOP/s", _ALONE, "over FA2 (goal)", _BOTH, "over FA2"], lines), report)


def training(report: Report) -> str:
    """The losses of examples/train_lm and its speed, with both attentions."""
    names = {"omniattn": "`omniattn.attention`", "sdpa": "torch SDPA"}
    lines = [
        [
            names[row["attention"]],
            number(row["first_loss"], 4),
            number(row["last_loss"], 4),
            f"{row['tokens_per_second']:,.0f}",
            ratio(row["tokens_per_second"] / report["rows"][-1]["tokens_per_second"]),
        ]
        for row in report["rows"]
    ]
    apart = [abs(a - b) for a, b in zip(*(run["losses"] for run in report["runs"]), strict=True)]
    last = len(apart) // 10 or 1
    note = (
        f"Losses differ by {sum(apart[-last:]) / last:.4f} in the last tenth of {len(apart)} steps, "
        f"by {max(apart):.4f} at most."
    )
    return below(table(["attention", "first loss", "last loss", "tokens/s", "over SDPA"], lines), report, note)


def training_speed(report: Report) -> str:
    """Tokens per second and memory of trainings by length, with each attention."""
    rows: dict[int, dict[str, Row]] = {}
    for row in report["rows"]:
        rows.setdefault(row["context"], {})[row["attention"]] = row
    lines = []
    for context, by_name in rows.items():
        own = by_name["omniattn"]["tokens_per_second"]
        speeds = [f"{by_name[name]['tokens_per_second']:,.0f}" for name in ("omniattn", "sdpa", "fa4")]
        over = [ratio(own / by_name[name]["tokens_per_second"]) for name in ("sdpa", "fa4")]
        memory = [number(by_name[name]["peak_gib"], 1) for name in ("omniattn", "sdpa", "fa4")]
        lines.append([f"{context}", *speeds, *over, " ".join(memory)])
    config = report["config"]
    note = (
        f"{config['layers']} layers, {config['heads']} heads of {config['head_dim']}, {report['tokens']} tokens a step"
        f"{', the model by torch.compile' if report['compiled'] else ''}."
    )
    header = ["length", "omniattn, tokens/s", "torch SDPA", "FlashAttention-4", "over SDPA", "over FlashAttention-4",
              "GiB of the three"]  # fmt: skip
    return below(table(header, lines), report, note)


def training_figure(_: Report) -> str:
    """The figure, as a page shows it."""
    return "![Loss of both trainings over 300 steps](train_lm.svg)"


def precisions(report: Report) -> str:
    """What forwards in 8 bits cost in loss, by examples/train_lm/precisions.py."""
    names = {"omniattn": "exact", "sdpa": "exact, torch SDPA", "int8": '`precision="int8"`', "fp8": '`precision="fp8"`',
             "fp8_smooth_k": "`precision=Fp8(smooth_k=True)`",
             "fp8_exact_gradients": '`precision="fp8"`, gradients of an exact forward'}  # fmt: skip
    losses = {run["attention"]: run["losses"] for run in report["runs"]}
    lines = []
    for row in report["rows"]:
        line = [names[row["attention"]], number(row["first_loss"], 4), number(row["last_tenth_loss"], 4)]
        if row["attention"] == "omniattn":
            lines.append([*line, "–", "–", "–"])
            continue
        apart = [a - b for a, b in zip(losses[row["attention"]], losses["omniattn"], strict=True)]
        sums = [0.0, *itertools.accumulate(apart)]
        means = [(b - a) / MEAN_STEPS for a, b in zip(sums, sums[MEAN_STEPS:], strict=False)]
        above = next((i for i in range(len(means)) if min(means[i:]) > ABOVE), None)
        lines.append(
            [
                *line,
                f"{row['cost']:+.4f}",
                f"{max(means, key=abs):+.4f}" if means else "–",
                "–" if above is None else str(above + MEAN_STEPS),
            ]
        )
    config = report["config"]
    by = ", by the NumPy reference" if report["environment"]["device"] == "CPU" else ""
    note = (
        f"{config['layers']} layers, {config['heads']} heads of {config['head_dim']}, context {config['context']}, "
        f"batch {report['batch']}, {report['rows'][0]['steps']} steps{by}."
    )
    header = ["forward", "first loss", "loss, last tenth", "beside exact", f"at most, mean of {MEAN_STEPS} steps",
              f"more than {ABOVE} above from step"]  # fmt: skip
    return below(table(header, lines), report, note)


def precisions_figure(_: Report) -> str:
    """The figure that the program draws beside its results."""
    return "![How far the losses are from exact attention's](train_lm_precisions.svg)"


PARTS: dict[str, Part] = {
    "backward": Part(("backward",), headline),
    "backward_together": Part(("backward",), together),
    "backward_slower": Part(("backward",), slower),
    "backward_options": Part(("backward",), options),
    "backward_flex": Part(("backward_flex",), flex),
    "backward_generic": Part(("backward",), generic),
    "train_lm": Part(("train_lm",), training),
    "train_lm_figure": Part(("train_lm",), training_figure),
    "train_lm_speed": Part(("train_lm_speed",), training_speed),
    "train_lm_precisions": Part(("train_lm_precisions",), precisions),
    "train_lm_precisions_figure": Part(("train_lm_precisions",), precisions_figure),
}
