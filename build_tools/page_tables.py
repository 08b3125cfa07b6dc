"""What the generated parts of the documents show: reports of ``omniattn bench`` to Markdown and SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from build_tools import (
    accuracy_tables,
    backward_tables,
    context_parallel_tables,
    decode_tables,
    engine_tables,
    figures,
    guide_figures,
    jax_tables,
    model_tables,
    option_tables,
    perplexity_tables,
    result_figures,
    serve_tables,
    shape_tables,
    sparse_tables,
)
from build_tools.page_parts import (
    Figure,
    Part,
    Report,
    Row,
    Source,
    anchor,
    below,
    conditions,
    number,
    provenance,
    ratio,
    table,
    value_of,
)
from omniattn.bench.host import beside_python

#: Below the checkout.
FIGURE = Path("docs/performance/attention.svg")

HEAD_DIMS = (64, 128, 256)
LENGTHS = (1024, 4096, 16384)


def _generic(head_dim: int) -> Source:
    name = f"attn_fwd_sm80_bf16_d{head_dim}" + "_n48" * (head_dim == 128)
    return Source(
        f"OMNIATTN_FORCE_KERNEL={name} omniattn bench --shapes d{head_dim} --anchor fa2 --json", "forward", False
    )


#: Formats of caches and options of `decode` that are no headline, each beside the plain one.
_OPTIONS = ("bf16", "bf16det", "int4", "int4det", "int4w128", "fbgemm", "int4g32", "fbgemm4")

SOURCES: dict[str, Source] = {
    "forward": Source("omniattn bench --json", "forward"),
    "int8": Source("omniattn bench --precision int8 --json", "int8"),
    "decode": Source("omniattn bench decode --json", "decode"),
    "host": Source("omniattn bench host --json", "host"),
    "append": Source("omniattn bench append --json", "append", False),
    "quantize": Source("omniattn bench quantize --json", "quantize", False),
    "decode_options": Source(
        "omniattn bench decode --shapes 'h8/1 contiguous' "
        + " ".join(f"--format {name}" for name in _OPTIONS)
        + " --json",
        "decode",
        False,
    ),
    "decode_corners": Source(
        "omniattn bench decode --shapes q16 --shapes h71/1 --shapes d96 --shapes t128 --format bf16 --anchor fa2 "
        "--json",
        "decode",
        False,
    ),
    "int8_sm80": Source(
        "OMNIATTN_FORCE_KERNEL=attn_fwd_sm80_bf16_d128_n48,attn_int8_mbarrier_sm90_bf16_d128 omniattn bench "
        "--precision int8 --shapes d128 --only cudnn --json",
        "int8",
        False,
    ),
    "fp8": Source("omniattn bench --precision fp8 --only cudnn --json", "fp8", False),
    "int8_sustained": Source("omniattn bench --sustained 0.6 --precision int8 --only cudnn --json", "int8", False),
    "decode_sustained": Source("omniattn bench decode --sustained --json", "decode", False),
    **{f"forward_sm80_d{head_dim}": _generic(head_dim) for head_dim in HEAD_DIMS},
    # What selection is fitted to and judged by (docs/performance/selection.md).
    **{
        f"candidates-{gpu}": Source("omniattn bench candidates --json", "candidates", False) for gpu in ("h100", "h200")
    },
    **option_tables.SOURCES,
    **shape_tables.SOURCES,
    **backward_tables.SOURCES,
    **context_parallel_tables.SOURCES,
    **jax_tables.SOURCES,
    **model_tables.SOURCES,
    **accuracy_tables.SOURCES,
    **sparse_tables.SOURCES,
    **perplexity_tables.SOURCES,
    **serve_tables.SOURCES,
    **engine_tables.SOURCES,
}


def _cells(report: Report) -> dict[tuple[int, int, bool, str], Row]:
    """Rows of a forward report by head_dim, length, causal and contender: of 16384 tokens, hidden size 2048."""
    return {
        (row["head_dim"], row["seqlen"], row["causal"], row["contender"]): row
        for row in report["rows"]
        if row["batch"] * row["seqlen"] == 16384 and row["heads"] * row["head_dim"] == 2048
    }


#: Other libraries whose ratios stand beside the anchor's, where a report has them.
_ALSO = {"fa3": "over FA3", "fa4": "over FA4"}


def _over(cells: dict[tuple[int, int, bool, str], Row], of: tuple[int, int, bool], other: str) -> float | None:
    """Speed of exact attention over another library's."""
    own, theirs = (value_of(cells.get((*of, name)), "median_us") for name in ("omniattn", other))
    return None if own is None or theirs is None else theirs / own


def forward(*reports: Report) -> str:
    """TFLOP/s and the ratio to the anchor, and to newer libraries, of exact attention, full and causal."""
    timed = {row["contender"] for report in reports for row in report["rows"] if row["median_us"] is not None}
    also = [key for key in _ALSO if key in timed]
    over = [f"over {anchor(reports[0])}", *(_ALSO[key] for key in also)]
    rows = []
    for report in reports:
        cells = _cells(report)
        for head_dim, seqlen in sorted({key[:2] for key in cells}):
            row = [f"d{head_dim} s{seqlen}"]
            for causal in (False, True):
                cell = cells.get((head_dim, seqlen, causal, "omniattn"))
                row += [number(value_of(cell, "tflops"), 0), ratio(value_of(cell, "ratio_to_anchor"))]
                row += [ratio(_over(cells, (head_dim, seqlen, causal), key)) for key in also]
            rows.append(row)
    made = table(["TFLOP/s", "full", *over, "causal", *over], rows)
    means = [report["geometric_mean_ratio"].get("omniattn") for report in reports]
    notes = () if len(means) > 1 else (f"Geometric mean of the ratios to {anchor(reports[0])}: {ratio(means[0])}.",)
    return below(made, reports[0], *notes)


def int8(report: Report) -> str:
    """Exact attention, int8 end to end and its kernel alone, beside the anchor."""
    lines = []
    for shape, cells in _by_shape(report).items():
        exact, whole, kernel = (cells.get(name) for name in ("omniattn", "omniattn_int8", "omniattn_int8_kernel"))
        lines.append(
            [
                shape,
                *_speed(exact, "ratio_to_anchor"),
                *_speed(whole, "ratio_to_anchor", "ratio_to_exact"),
                *_speed(kernel, "ratio_to_anchor"),
            ]
        )
    over = f"over {anchor(report)}"
    header = ["TFLOP/s", "exact", over, "int8, end to end", over, "over exact", "int8 kernel", over]
    return below(table(header, lines), report)


def fp8(report: Report) -> str:
    """Exact attention, fp8 and int8 end to end, and fp8 on e4m3 arrays: whole calls, the kernel alone."""
    lines = []
    for shape, cells in _by_shape(report).items():
        whole, arrays, kernel, mean, int8_whole = (
            cells.get(f"omniattn_{name}") for name in ("fp8", "fp8_arrays", "fp8_kernel", "fp8_kernel_mean", "int8")
        )
        lines.append(
            [
                shape,
                *_speed(cells.get("omniattn"), "ratio_to_anchor"),
                *_speed(int8_whole),
                *_speed(whole, "ratio_to_exact"),
                *_speed(arrays, "ratio_to_exact"),
                *_speed(kernel, "ratio_to_anchor"),
                *_speed(mean),
            ]
        )
    over = f"over {anchor(report)}"
    header = [
        "TFLOP/s", "exact", over, "int8, end to end", "fp8, end to end", "over exact", "e4m3 arrays", "over exact",
        "fp8 kernel", over, "with a mean in V",
    ]  # fmt: skip
    return below(table(header, lines), report)


def _by_shape(report: Report) -> dict[str, dict[str, Row]]:
    """Rows of a forward report by the shape's long name and contender; shapes by head_dim and length."""
    names = ("head_dim", "seqlen", "batch", "heads", "causal")
    shapes: dict[str, dict[str, Row]] = {}
    for row in sorted(report["rows"], key=lambda row: tuple(row[name] for name in names)):
        head_dim, seqlen, batch, heads, causal = (row[name] for name in names)
        shape = f"d{head_dim} b{batch} h{heads} s{seqlen} {'causal' if causal else 'full'}"
        shapes.setdefault(shape, {})[row["contender"]] = row
    return shapes


def _speed(row: Row | None, *ratios: str) -> list[str]:
    return [number(value_of(row, "tflops"), 0), *(ratio(value_of(row, name)) for name in ratios)]


def int8_load(report: Report) -> str:
    """The same under load, with SM clocks: each contender alone."""
    names = ("omniattn", "omniattn_int8", "omniattn_int8_kernel", report["anchor"])
    lines = []
    for shape, cells in _by_shape(report).items():
        line = [shape]
        for name in names:
            row = cells.get(name)
            line.append(f"{number(value_of(row, 'tflops'), 0)} at {number(value_of(row, 'sm_mhz'), 0)}")
        line.append(ratio(value_of(cells.get("omniattn_int8"), "ratio_to_exact")))
        lines.append(line)
    header = ["TFLOP/s at MHz", "exact", "int8, end to end", "int8 kernel", anchor(report), "end to end over exact"]
    return below(table(header, lines), report)


def host(report: Report) -> str:
    """Microseconds of a warm call on the host."""
    pairs = beside_python(report["rows"])
    both = any(python is not None for _, python in pairs)  # with the C module
    lines = []
    for row, python in pairs:
        slower = [number(None if python is None else python["median_us"], 1)] if both else []
        span = f"{number(row['p10_us'], 1)}–{number(row['p90_us'], 1)}"
        lines.append([row["name"], number(row["median_us"], 1), span, *slower, number(row["ratio_to_sdpa"], 2)])
    header = ["warm call", "µs", "p10–p90", *(["µs by Python"] if both else []), "time relative to torch SDPA"]
    made = table(header, lines)
    jit, spent = report["first_jit"], report["import"]
    compiled = "" if jit["seconds"] is None else f" First compilation of `{jit['kernel']}`: {jit['seconds']:.2f} s."
    note = f"Import: {spent['total_ms']:.0f} ms, {spent['numpy_ms']:.0f} of them NumPy.{compiled}"
    return below(made, report, note)


def readme(low: Report, caches: Report) -> str:
    """The small table of the README: speed relative to cuDNN."""
    cells = _cells(low)
    lengths = f"causal, {' / '.join(f'{seqlen // 1024}k' for seqlen in LENGTHS)} tokens"
    lines = []
    for label, contender, head_dims in (
        ("`attention`", "omniattn", HEAD_DIMS),
        ('`attention`, `precision="int8"`', "omniattn_int8", HEAD_DIMS[1:]),
    ):
        for head_dim in head_dims:
            rows = (cells.get((head_dim, seqlen, True, contender)) for seqlen in LENGTHS)
            speeds = " / ".join(ratio(value_of(row, "ratio_to_anchor")) for row in rows)
            lines.append([label, f"head_dim {head_dim}, {lengths}", speeds])
    steps = {
        (row["format"], row["batch"]): row["time_relative_to_anchor"]
        for row in caches["rows"]
        if decode_tables.is_first(row)
    }
    batches = sorted({batch for _, batch in steps})
    shape = f"8192 tokens, 8 query heads on 1, batch {' / '.join(map(str, batches))}"
    for name in ("bf16", "fp8", "int8", "int4"):
        times = (steps.get((name, batch)) for batch in batches)
        speeds = " / ".join(ratio(None if time is None else 1 / time) for time in times)
        lines.append([f"`decode`, {name} cache", shape, speeds])
    made = table(["call", "shapes", f"speed over {anchor(low)} bf16"], lines)
    return f"{made}\n\n{provenance(low, caches)}"


def readme_figure(report: Report) -> str:
    """The figure, as a page shows it."""
    text = f"Speed of attention relative to {anchor(report)} on one {report['environment']['device']}"
    return f"![{text}]({FIGURE.as_posix()})"


def figure(report: Report) -> str:
    """The SVG of the README's first screen: ratios to the anchor by shape, exact and int8, full and causal."""
    cells = _cells(report)
    groups = [(head_dim, seqlen) for head_dim in HEAD_DIMS for seqlen in LENGTHS]
    panels = []
    for causal in (False, True):
        bars = [
            figures.Group(
                (f"d{head_dim}", f"{seqlen // 1024}k"),
                tuple(
                    value_of(cells.get((head_dim, seqlen, causal, name)), "ratio_to_anchor")
                    for name in ("omniattn", "omniattn_int8")
                ),
            )
            for head_dim, seqlen in groups
        ]
        panels.append(figures.Panel("causal" if causal else "full", tuple(bars)))
    title = f"Speed over {anchor(report)} bf16, by head_dim and tokens"
    return figures.bars(title, ("exact attention", "int8, quantization included"), panels, conditions(report))


def int8_choice(report: Report) -> str:
    """Time of exact attention over that of int8, end to end: one row a head_dim."""
    found = {
        (row["head_dim"], row["seqlen"], row["causal"]): row["ratio_to_exact"]
        for row in report["rows"]
        if row["contender"] == "omniattn_int8"
    }
    columns = sorted({key[1:] for key in found})
    lines = [
        [f"d{head_dim}", *(ratio(found.get((head_dim, *column))) for column in columns)]
        for head_dim in sorted({key[0] for key in found})
    ]
    header = ["int8 over exact", *(f"s{seqlen} {'causal' if causal else 'full'}" for seqlen, causal in columns)]
    return below(table(header, lines), report)


def sources() -> str:
    """The result files and what measures them."""
    lines = [
        [f"`{name}.json`", f"`{source.command}`", "yes" if source.required else "no"]
        for name, source in SOURCES.items()
    ]
    return table(["file", "command", "required"], lines)


def _mean(report: Report) -> str:
    return number(report["geometric_mean_ratio"].get("omniattn"), 2)


def _least(report: Report) -> str:
    return number(min(row["ratio_to_anchor"] for row in _cells(report).values() if row["contender"] == "omniattn"), 2)


def _device(report: Report) -> str:
    return f"{report['environment']['device']}, {report['date']}"


def _int8_over_exact(head_dim: int) -> Callable[[Report], str]:
    def text(report: Report) -> str:
        cells = _cells(report)
        found = [cells[head_dim, 16384, causal, "omniattn_int8"]["ratio_to_exact"] for causal in (False, True)]
        return f"{min(found):.2f} to {max(found):.2f}"

    return text


def _call(name: str) -> Callable[[Report], str]:
    def text(report: Report) -> str:
        (row,) = (row for row in report["rows"] if row["name"] == name)
        return number(row["median_us"], 0)

    return text


#: What the markers of the pages name.
PARTS: dict[str, Part] = {
    "forward": Part(("forward",), forward),
    "forward_sm80": Part(tuple(f"forward_sm80_d{head_dim}" for head_dim in HEAD_DIMS), forward),
    "int8": Part(("int8",), int8),
    "int8_sm80": Part(("int8_sm80",), int8),
    "fp8": Part(("fp8",), fp8),
    "int8_sustained": Part(("int8_sustained",), int8_load),
    "decode": Part(("decode",), decode_tables.decode),
    "decode_others": Part(("decode",), decode_tables.decode_others),
    "decode_corners": Part(("decode_corners",), decode_tables.decode_others),
    "decode_shared": Part(("decode",), decode_tables.decode_shared),
    "decode_options": Part(("decode_options",), decode_tables.decode),
    "append": Part(("append",), decode_tables.beside_copy),
    "quantize": Part(("quantize",), decode_tables.beside_copy),
    "decode_sustained": Part(("decode_sustained",), decode_tables.decode),
    "host": Part(("host",), host),
    "int8_choice": Part(("int8",), int8_choice),
    "int8_choice_sustained": Part(("int8_sustained",), int8_choice),
    "sources": Part((), sources),
    "readme": Part(("int8", "decode"), readme),
    "figure": Part(("int8",), readme_figure),
    "forward_mean": Part(("forward",), _mean),
    "forward_least": Part(("forward",), _least),
    "forward_device": Part(("forward",), _device),
    "int8_d128": Part(("int8",), _int8_over_exact(128)),
    "int8_d256": Part(("int8",), _int8_over_exact(256)),
    "host_attention": Part(("host",), _call("attention")),
    "host_sdpa": Part(("host",), _call("torch SDPA")),
    **option_tables.PARTS,
    **shape_tables.PARTS,
    **backward_tables.PARTS,
    **context_parallel_tables.PARTS,
    **jax_tables.PARTS,
    **model_tables.PARTS,
    **accuracy_tables.PARTS,
    **sparse_tables.PARTS,
    **perplexity_tables.PARTS,
    **serve_tables.PARTS,
    **engine_tables.PARTS,
    **guide_figures.PARTS,
    **result_figures.PARTS,
}

#: Generated files that pages show.
FIGURES: tuple[Figure, ...] = (
    Figure(FIGURE, ("int8",), figure),
    *guide_figures.FIGURES,
    *result_figures.FIGURES,
    *sparse_tables.FIGURES,
)
