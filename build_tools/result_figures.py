"""Figures of the result files: speed over length beside other packages, and errors over speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from build_tools import charts, decode_tables, svg
from build_tools.charts import Axis, Curve, Look, Panel
from build_tools.page_parts import Figure, Part, Report, Row, conditions, provenance

FOLDER = Path("docs/performance/figures")
HEAD_DIMS = (64, 128, 256)

#: Contenders of a report, what a reader calls them, and how they are drawn.
Series = Sequence[tuple[str, str, Look]]
_EXACT: Series = (
    ("omniattn", "omniattn", Look(svg.BLUE)),
    ("cudnn", "cuDNN", Look(svg.GREY)),
    ("fa2", "FlashAttention-2", Look(svg.MAGENTA)),
)
_HOPPER: Series = (
    ("fa3", "FlashAttention-3", Look(svg.YELLOW)),
    ("fa4", "FlashAttention-4", Look(svg.GREEN)),
)
_FORWARD: Series = (*_EXACT, *_HOPPER, ("efficient", "torch's memory-efficient kernel", Look(svg.BROWN)))
_BACKWARD: Series = (
    _EXACT[0], ("deterministic", "omniattn, deterministic", Look(svg.BLUE, "dashed")), *_EXACT[1:], *_HOPPER,
)  # fmt: skip
PRECISIONS: Series = (
    ("cudnn", "cuDNN bf16", Look(svg.GREY)),
    ("omniattn", '"exact"', Look(svg.BLUE)),
    ("omniattn_int8", '"int8"', Look(svg.ORANGE)),
    ("omniattn_fp8", '"fp8"', Look(svg.GREEN)),
    ("omniattn_fp8_arrays", "e4m3 arrays", Look(svg.MAGENTA)),
)
_INT8_PEERS: Series = (
    ("omniattn_int8", 'omniattn "int8"', Look(svg.ORANGE)),
    ("omniattn", 'omniattn "exact"', Look(svg.BLUE)),
    ("cudnn", "cuDNN bf16", Look(svg.GREY)),
    ("fa3", "FlashAttention-3 bf16", Look(svg.YELLOW)),
    ("sageattention", "SageAttention 1 int8", Look(svg.MAGENTA)),
)
_CACHES: Series = (
    ("bf16", "bf16", Look(svg.BLUE)),
    ("fp8", "fp8", Look(svg.GREEN)),
    # As fast as fp8, mostly: both can be seen.
    ("int8", "int8", Look(svg.ORANGE, "dashed")),
    ("int4", "int4", Look(svg.BROWN)),
    ("int4g32", "int4, groups of 32", Look(svg.YELLOW)),
    ("cudnn", "cuDNN bf16, contiguous", Look(svg.GREY)),
)
_FA3 = "FlashAttention-3"
_PAGED: Series = (
    ("omniattn", "omniattn", Look(svg.BLUE)),
    (_FA3, _FA3, Look(svg.YELLOW)),
    ("contiguous", "omniattn bf16, contiguous", Look(svg.BLUE, "dashed", "ring")),
    ("each alone", "omniattn, prefixes not shared", Look(svg.GREY)),
)

_SHAPES: Series = (
    *_EXACT,
    ("flex", "FlexAttention", Look(svg.GREEN)),
    (_FA3, "FlashAttention-3, scaled", Look(svg.YELLOW, "dashed", "ring")),
)

Lines = Mapping[str, Mapping[float, float]]


def _lines(rows: Iterable[Row], key: str, x: str, y: str) -> Lines:
    """Values of each contender by what they are drawn over; what was not measured is left out."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row[y] is not None:
            found.setdefault(row[key], {})[row[x]] = row[y]
    return found


def _panel(
    title: str, found: Lines, series: Series, x: Callable[[Iterable[float]], Axis],
    y: Callable[[Iterable[float]], Axis],
) -> Panel:  # fmt: skip
    """Curves of the series that there are."""
    own = [(look, sorted(found[name].items())) for name, _, look in series if name in found]
    across = [point[0] for _, points in own for point in points]
    return Panel(
        title,
        x(across or [1]),
        y([point[1] for _, points in own for point in points]),
        tuple(Curve(look, tuple(points)) for look, points in own),
    )


def _legend(series: Series) -> list[tuple[str, Look]]:
    return [(label, look) for _, label, look in series]


def _tokens(values: Iterable[float]) -> Axis:
    return charts.tokens("tokens", values)


def _tflops(values: Iterable[float]) -> Axis:
    return charts.linear("TFLOP/s", values)


def by_length(
    title: str, report: Report, rows: Sequence[Row], series: Series, masks: Sequence[bool] = (True, False)
) -> str:
    """TFLOP/s over the length: a panel a head_dim, a row of them a mask."""
    panels = []
    for causal in masks:
        for head_dim in HEAD_DIMS:
            own = [row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)]
            name = f"head_dim {head_dim}, {'causal' if causal else 'full'}"
            panels.append(_panel(name, _lines(own, "contender", "seqlen", "tflops"), series, _tokens, _tflops))
    return charts.chart(title, _legend(measured(series, rows)), panels, conditions(report))


def measured(series: Series, rows: Sequence[Row]) -> Series:
    """Those that have a point."""
    there = {row["contender"] for row in rows if row["tflops"] is not None}
    return [one for one in series if one[0] in there]


def forward(report: Report) -> str:
    """Exact attention beside other packages."""
    return by_length("Attention, bf16: TFLOP/s", report, report["rows"], _FORWARD)


def backward(report: Report) -> str:
    """Gradients alone, of the faster layout of each contender."""
    rows = [row for row in report["rows"] if row["headline"] and row["best_layout"] and row["what"] == "backward"]
    return by_length("Gradients of q, k and v alone, bf16: TFLOP/s", report, rows, _BACKWARD)


def low_precision(report: Report) -> str:
    """Precisions with the quantization inside the call, and arrays that are in e4m3 already."""
    return by_length("Precisions, quantization included: TFLOP/s", report, report["rows"], PRECISIONS)


def int8_peers(report: Report) -> str:
    """int8, quantization included, beside 16 bits and beside SageAttention."""
    return by_length("int8 beside other packages: TFLOP/s", report, report["rows"], _INT8_PEERS)


def causal_precisions(report: Report) -> str:
    """The same of causal calls alone, for the guide."""
    title = "Causal attention, quantization included: TFLOP/s"
    return by_length(title, report, report["rows"], PRECISIONS, (True,))


def decode(report: Report) -> str:
    """Steps of decoding from caches of each format: over the number of sequences, and over the size of pages."""
    batches = [row for row in report["rows"] if decode_tables.is_first(row)]
    fast = [{**row, "speed": row["time_relative_to_anchor"] and 1 / row["time_relative_to_anchor"]} for row in batches]
    pages = [
        row
        for row in report["rows"]
        if row["block_size"] and not row["ragged"] and not row.get("prefix") and row["median_us"] is not None
    ]

    def sequences(values: Iterable[float]) -> Axis:
        return charts.tokens("sequences of 8192 tokens", values)

    panels = (
        _panel("time of a step, µs", _lines(batches, "format", "batch", "median_us"), _CACHES, sequences,
               lambda values: charts.powers("µs", values)),
        _panel("speed over cuDNN bf16", _lines(fast, "format", "batch", "speed"), _CACHES, sequences,
               lambda values: charts.linear("", values, unit="×")),
        _panel("128 sequences, paged: µs", _lines(pages, "format", "block_size", "median_us"), _CACHES,
               lambda values: charts.tokens("tokens of a page", values),
               lambda values: charts.linear("µs", values)),
    )  # fmt: skip
    title = "One new token a sequence, 8 query heads on one kv head, head_dim 128"
    return charts.chart(title, _legend(_CACHES), panels, conditions(report))


def shapes(few: Report, short: Report, windows: Report) -> str:
    """Few queries, short sequences and windows; FlashAttention-3's times of another run, scaled by cuDNN's."""
    queries = {f"d128 b1 h32/8 sq{n} sk32768 full": n for n in (1, 16, 64, 128, 512)}
    lengths = {f"d64 b{batch} h16 s{n} full": n for batch, n in ((2048, 16), (1024, 64), (256, 128))}
    widths = {f"d128 b1 h16 s16384 causal window{n}": n for n in (128, 1024, 4096)}

    def panel(title: str, report: Report, numbers: Mapping[str, int], x: str) -> Panel:
        rows = [{**row, "x": numbers[row["shape"]]} for row in report["rows"] if row["shape"] in numbers]
        scaled = [
            {**row, "contender": _FA3, "tflops": row["tflops"] * row["median_us"] / row["fa3_scaled_us"]}
            for row in rows
            if row["fa3_scaled_us"] is not None
        ]
        found = _lines([*rows, *scaled], "contender", "x", "tflops")
        return _panel(title, found, _SHAPES, lambda values: charts.tokens(x, values), _tflops)

    panels = (
        panel("few queries on 32768 keys", few, queries, "queries"),
        panel("short, head_dim 64, full", short, lengths, "tokens"),
        panel("windows, 16384 tokens", windows, widths, "tokens of the window"),
    )
    where = "; ".join(dict.fromkeys(map(conditions, (few, short, windows))))
    foot = f"{where}. FlashAttention-3 was measured in another run; its times are scaled by those of cuDNN."
    return charts.chart("Attention, bf16, other shapes: TFLOP/s", _legend(_SHAPES), panels, foot)


def _cases(report: Report, section: str, prefix: str, numbers: Mapping[str, int], e4m3: bool = False) -> list[Row]:
    """Rows of the cases of `omniattn.bench.serve` that begin so, with numbers of their names as ``x``."""
    return [
        {**row, "x": numbers[row["case"].removeprefix(prefix)]}
        for row in report["rows"]
        if (row["section"], row["e4m3"]) == (section, e4m3) and row["case"].removeprefix(prefix) in numbers
    ]


def serving(steps: Report, shared: Report) -> str:
    """Steps of an engine over a paged pool beside FlashAttention-3."""
    lengths = {f" t{n} p64": n for n in (100, 1024, 8192, 32768, 131072)}
    batches = {f"b{n} h32/8 t8192 p64": n for n in (1, 32, 128)}
    chunks = {f" t{32768 + n} p64 q{n}": n for n in (32, 128, 512, 2048)}
    pages = {f" t34816 p{n} q2048": n for n in (1, 16, 64, 256)}
    prefixes = {f" t{n + 512} p64 {n} of 128": n for n in (2048, 8192, 32768)}

    def panel(title: str, rows: Sequence[Row], x: str, y: str) -> Panel:
        axis = charts.powers if y == "median_us" else charts.linear
        unit = {"median_us": "µs", "tb_per_s": "TB/s", "tflops": "TFLOP/s"}[y]
        return _panel(f"{title}: {unit}", _lines(rows, "contender", "x", y), _PAGED,
                      lambda values: charts.tokens(x, values), lambda values: axis(unit, values))  # fmt: skip

    panels = (
        panel("decoding, 1 sequence", _cases(steps, "graph", "graph b1 h32/8", lengths), "tokens", "tb_per_s"),
        panel("decoding, 8192 tokens each", _cases(steps, "decode", "decode ", batches), "sequences", "tb_per_s"),
        panel("decoding, the same in e4m3", _cases(steps, "decode", "decode ", batches, True), "sequences", "tb_per_s"),
        panel("prompt, 2048 of 34816", _cases(steps, "prompts", "prompts b1 h32/8", pages), "tokens of a page",
              "tflops"),
        panel("chunk behind 32768, e4m3", _cases(steps, "prompts", "prompts b1 h32/8", chunks, True), "new tokens",
              "tflops"),
        panel("shared prefix, 128 sequences", _cases(shared, "shared", "shared b128 h32/8", prefixes), "shared tokens",
              "median_us"),
    )  # fmt: skip
    title = "An engine's steps on pages, 32 query heads on 8 kv heads, head_dim 128"
    where = "; ".join(dict.fromkeys(map(conditions, (steps, shared))))
    return charts.chart(title, _legend(_PAGED), panels, where)


def engine(report: Report) -> str:
    """An engine that one can read: tokens a second and latencies over the requests at once."""
    colours = (svg.BLUE, svg.MAGENTA, svg.GREEN, svg.ORANGE, svg.BROWN, svg.YELLOW, svg.GREY, svg.INK)
    names = dict.fromkeys(row["contender"] for row in report["rows"])
    series = [(name, name, Look(colour, mark="")) for name, colour in zip(names, colours, strict=False)]
    tails = [(name, name, Look(look.colour, "dashed", "")) for name, _, look in series]

    def requests(values: Iterable[float]) -> Axis:
        return charts.tokens("requests at once", values)

    def panel(title: str, key: str, tail: str = "") -> Panel:
        def axis(_: Iterable[float]) -> Axis:
            return charts.powers("", [row[name] for row in report["rows"] for name in filter(None, (key, tail))])

        made = _panel(title, _lines(report["rows"], "contender", "requests", key), series, requests, axis)
        if not tail:
            return made
        behind = _panel(title, _lines(report["rows"], "contender", "requests", tail), tails, requests, axis)
        return Panel(title, made.x, made.y, (*made.curves, *behind.curves))

    panels = (
        panel("tokens/s", "tokens_per_second"),
        panel("first token, ms; dashed: p99", "first_token_ms_p50", "first_token_ms_p99"),
        panel("time per token, ms; dashed: p99", "token_ms_p50", "token_ms_p99"),
    )
    title = "An engine with each attention: {num_layers} layers of {hidden} channels".format(**report["config"])
    return charts.chart(title, _legend(series), panels, conditions(report), height=240)


def training(report: Report) -> str:
    """Losses of trainings from the same seed; where two are equal both can be seen."""
    looks = [Look(colour, line, "") for line, colour in zip(("solid", "dashed"), (svg.ORANGE, svg.INK))]
    looks += [Look(colour, mark="") for colour in (svg.BLUE, svg.GREEN, svg.MAGENTA, svg.YELLOW)]
    names = {"omniattn": "omniattn.attention", "sdpa": "torch SDPA"}
    runs = list(zip(report["runs"], looks, strict=False))
    losses = [loss for run in report["runs"] for loss in run["losses"]]
    panel = Panel(
        "loss, nats a byte",
        charts.linear("step", [len(run["losses"]) for run in report["runs"]]),
        charts.linear("loss", losses, least=min(losses)),
        tuple(Curve(look, tuple(enumerate(run["losses"], 1))) for run, look in runs),
    )
    legend = [
        (f"{names.get(run['attention'], run['attention'])}, {run['tokens_per_second']:,.0f} tokens/s", look)
        for run, look in runs
    ]
    title = f"Training, {len(report['runs'][0]['losses'])} steps"
    return charts.chart(title, legend, [panel], conditions(report), columns=1, height=240)


def _mean(report: Report, table: str, variant: str) -> float | None:
    """Mean relative L1 of the layers of a model."""
    own = [
        row["rel_l1"]
        for row in report["rows"]
        if (row["table"], row["variant"]) == (table, variant) and "layer" in row["input"]
    ]
    return sum(own) / len(own) if own else None


def front(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The least error of points (speed, error) that are as fast, in steps from slow to fast."""
    steps: list[tuple[float, float]] = []
    for speed, error in sorted(points, key=lambda point: (-point[0], point[1])):
        if not steps:
            steps.append((speed, error))
        elif error < steps[-1][1]:
            steps += [(speed, steps[-1][1]), (speed, error)]
    return tuple(reversed(steps))


def pareto(speeds: Report, errors: Report, steps: Report, caches: Report) -> str:
    """Error over speed: precisions of attention on long sequences, formats of caches in large batches."""
    panels = []
    names = {"omniattn_int8": "int8", "omniattn_fp8": "fp8"}
    for head_dim in (128, 256):
        shape = (head_dim, 16384, True)
        cells = {
            row["contender"]: row
            for row in speeds["rows"]
            if (row["head_dim"], row["seqlen"], row["causal"]) == shape and row["tflops"] is not None
        }
        panels.append(
            _speeds(
                f"head_dim {head_dim}, causal, 16k tokens", "TFLOP/s", PRECISIONS,
                {name: (row["tflops"], row["relative_l1"]) for name, row in cells.items()},
                {name: _mean(errors, "rotated", names[name]) for name in cells if name in names},
            )
        )  # fmt: skip
    most = max((row["batch"] for row in steps["rows"] if decode_tables.is_first(row)), default=0)
    cells = {
        row["format"]: row
        for row in steps["rows"]
        if decode_tables.is_first(row) and row["batch"] == most and row["time_relative_to_anchor"] is not None
    }
    panels.append(
        _speeds(
            f"decoding, {most} sequences", "speed over cuDNN bf16", _CACHES,
            {name: (1 / row["time_relative_to_anchor"], row["relative_l1"]) for name, row in cells.items()},
            {name: _mean(caches, "caches", {"int4g32": "int4, groups of 32"}.get(name, name)) for name in cells
             if name not in ("bf16", "cudnn")},
        )
    )  # fmt: skip
    named = {
        svg.GREY: "cuDNN bf16", svg.BLUE: "exact, bf16", svg.ORANGE: "int8", svg.GREEN: "fp8",
        svg.MAGENTA: "e4m3 arrays", svg.BROWN: "int4", svg.YELLOW: "int4, groups of 32",
    }  # fmt: skip
    legend = [
        *((name, Look(colour, "")) for colour, name in named.items()),
        ("normal inputs, measured with the speed", Look(line="")),
        ("mean of layers of SmolLM2, CPU", Look(line="", mark="ring")),
        ("least error at a speed", Look(line="dashed", mark="")),
    ]
    where, layers = ("; ".join(dict.fromkeys(map(conditions, of))) for of in ((speeds, steps), (errors, caches)))
    foot = f"{where}. Layers: {layers}."
    return charts.chart("Relative L1 error over speed", legend, panels, foot, height=240)


def _speeds(
    title: str, unit: str, series: Series, measured: Mapping[str, tuple[float, float]],
    layers: Mapping[str, float | None],
) -> Panel:  # fmt: skip
    curves = [Curve(Look(line="dashed", mark=""), front(measured[name] for name, _, _ in series if name in measured))]
    for name, _, look in series:
        if name not in measured:
            continue
        speed, error = measured[name]
        curves.append(Curve(Look(look.colour, ""), ((speed, error),)))
        mean = layers.get(name)
        if mean is not None:
            curves.append(Curve(Look(look.colour, "", "ring"), ((speed, mean),)))
    drawn = [point for curve in curves for point in curve.points]
    least = min((speed for speed, _ in drawn), default=0.0)
    return Panel(
        title,
        charts.linear(unit, [speed for speed, _ in drawn], least=0.9 * least),
        charts.linear("relative L1", [error for _, error in drawn]),
        tuple(curves),
    )


#: Name, result files, how it is made, and what a page says in its place.
_FIGURES: tuple[tuple[str, tuple[str, ...], Callable[..., str], str], ...] = (
    ("forward", ("forward",), forward,
     "Attention, TFLOP/s over the length, beside other packages"),
    ("shapes", ("few", "short", "windows"), shapes,
     "Few queries, short sequences and windows, beside other packages"),
    ("backward", ("backward",), backward,
     "Gradients, TFLOP/s over the length, beside cuDNN, FlashAttention-2 and 4"),
    ("decode", ("decode",), decode,
     "Decoding, time of a step over the number of sequences, beside cuDNN"),
    ("serving", ("serve", "serve_shared"), serving,
     "Steps of an engine on pages, beside FlashAttention-3"),
    ("low_precision", ("fp8",), low_precision, "Precisions, TFLOP/s over the length, beside cuDNN"),
    ("int8_peers", ("int8",), int8_peers, "int8, TFLOP/s over the length, beside other packages"),
    ("pareto", ("fp8", "low_precision_accuracy", "decode", "kv_accuracy"), pareto,
     "Relative L1 over speed of precisions and formats of caches"),
)  # fmt: skip

FIGURES: tuple[Figure, ...] = (
    *(Figure(FOLDER / f"{name}.svg", sources, make) for name, sources, make, _ in _FIGURES),
    Figure(Path("docs/engine.svg"), ("engine",), engine),
    Figure(Path("docs/train_lm.svg"), ("train_lm",), training),
)


def _shown(name: str, text: str) -> Callable[..., str]:
    """What a page beside the folder shows: the figure, and how it was measured."""

    def make(*reports: Report) -> str:
        return f"![{text}](figures/{name}.svg)\n\n{provenance(*reports)}"

    return make


PARTS: dict[str, Part] = {f"figure_{name}": Part(sources, _shown(name, text)) for name, sources, _, text in _FIGURES}
