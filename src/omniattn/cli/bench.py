"""``omniattn bench``: attention and its gradients, decoding beside other packages; append, quantizers, the host."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omniattn.bench import backward, beside_copy, decode, forward, host, options
from omniattn.bench.anchors import CONTENDERS
from omniattn.bench.backward_cases import filter_backward
from omniattn.bench.backward_contenders import FLEX, OTHERS
from omniattn.bench.backward_report import BackwardReport
from omniattn.bench.candidates import run_candidates
from omniattn.bench.decode_report import DecodeReport, filter_decode_shapes, label
from omniattn.bench.document import document, environment
from omniattn.bench.low_precision import PRECISIONS
from omniattn.bench.option_cases import chosen
from omniattn.bench.option_report import BELOW_BEST, LEAST_OF_BEST, LEAST_OF_PLAIN, OptionReport
from omniattn.bench.plot import plot_report
from omniattn.bench.report import EXACT, Report, markdown_table
from omniattn.bench.shape_cases import SHAPE_CASES, chosen_cases
from omniattn.bench.shape_report import BELOW_FA3, ShapeReport
from omniattn.bench.shape_runs import run_shapes
from omniattn.bench.shapes import LOW_PRECISION_SHAPES, filter_shapes
from omniattn.bench.sustained import DEFAULT_SECONDS, WARMUP, check_seconds
from omniattn.bench.timing import BenchError, require_torch
from omniattn.bench.way_cases import OPERATIONS, cases_of
from omniattn.cli import console
from omniattn.cli.bench_serve import leave_out, run_serve, written
from omniattn.errors import ArgumentError, CompileError, UnsupportedError

_DESCRIPTION = """\
forward (default): 16k tokens, hidden size 2048, bf16, head_dim 64/128/256, sequence length 1024/4096/16384, full and
causal; every attention package that is installed runs in the same rounds. Medians of CUDA event times with a cold L2;
±: half the distance of the 10th and the 90th percentile; (x.xx×): speed relative to the anchor.
--precision int8 or int4: this package's 16-bit attention, its low-precision attention end to end (from bf16 tensors,
quantization included) and the low-precision kernel alone (on operands quantized before) side by side, on these shapes
and on d128 b4 h32 s8192 and b1 h16 s32768. FLOPs are counted alike for all: 4·b·h·s²·d, half of it when causal.
backward: gradients alone, and forward and backward together by autograd, beside torch's cuDNN and FA2, and
FlashAttention-3 and 4 where they are installed, on the shapes of forward and on grouped heads, packed sequences, a
window, softcap; deterministic beside the default; on shapes named "generic" the kernels for every GPU. FLOPs are 2.5
times those of the forward, of visible pairs. SDPA gets two layouts, and the faster one counts. Gradients are checked
before they are timed.
options: each option of attention beside the plain call of its shape, in speed per pair of query and key that counts,
and beside the fastest of torch SDPA's backends and FlexAttention. Rows below 0.8 of the one or 0.95 of the other are
marked. Results are checked before they are timed.
few, short, packed, windows: few queries on many keys; short sequences, v of another head_dim, k and v with stride 0;
packed sequences; windows. Each case beside the fastest of torch's cuDNN and FA2, FlexAttention where no other takes it,
FlashAttention-4 where it is installed, and FA3's time scaled by cuDNN's in this run. Speed in TFLOP/s of visible pairs
where arithmetic decides, else in GB/s. Results are checked before they are timed.
candidates: every way of running a call that selection has (tile, heads that share it, split of the keys, mask), checked
and timed, and how much longer what it chooses takes than the fastest one; of attention, and of its backward, decode,
append and the quantizers, or of some (--op).
decode: one new token a sequence against caches in each format, beside torch's attention on the same tokens in bf16.
Microseconds and TB/s of the format's own bytes; (x.xx×): time relative to the anchor, below 1 is faster.
serve: decoding, prompts, both in one call, drafts and captured graphs on a caller's pages in bf16 and e4m3, beside own
caches, contiguous keys, and FlashAttention-3 where flash_attn_interface is installed. Results are checked first.
append, quantize: prompts and single tokens into 16, 8 and 4-bit caches, with and without rotary embedding; the
quantization of int8. Microseconds, and the share of a large copy's bandwidth in the same run, every input and output
counted once.
host: microseconds of a warm call of every operation from Python call to return, beside torch SDPA; import time, first
run-time compilation.
--sustained (forward, decode): one candidate at a time, back to back, as a server runs it, in two passes of opposite
order; in the first 60 % of each the clock settles, the rest is timed. SM clock and power of that time stand beside each
figure (–: no nvidia-smi). A GPU at its power limit gives each kernel another clock; interleaved calls share one.
Decoding goes around copies of the caches that do not fit in L2, in CUDA graphs. ±: from the two passes.
"""

#: Timed rounds a shape, where they are interleaved.
_ITERS = 20
_ANCHOR = "cudnn"


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time kernels against other packages", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    others = [contender.key for contender in CONTENDERS if contender.key != "omniattn"]
    parser.add_argument("what", nargs="?", choices=tuple(_RUNS), default="forward")
    parser.add_argument(
        "--shapes", action="append", default=[], metavar="WORDS",
        help='shapes whose name has all these words, e.g. "d128 causal" or "b1 h16"; may be repeated (default: all)',
    )  # fmt: skip
    parser.add_argument("--anchor", choices=others, help=f"what ratios are relative to (default: {_ANCHOR})")
    parser.add_argument(
        "--only", action="append", choices=others, metavar="NAME",
        help=f"run only omniattn, the anchor and these; may be repeated: {', '.join(others)}",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="exact",
        help="a low one is timed end to end and as a kernel alone, beside exact (default: exact)",
    )  # fmt: skip
    parser.add_argument(
        "--format", action="append", choices=tuple(decode.FORMATS), metavar="NAME",
        help=f"decode: only these caches; may be repeated: {', '.join(decode.FORMATS)} "
        f"(default: {', '.join(decode.DEFAULT_FORMATS)})",
    )  # fmt: skip
    parser.add_argument(
        "--case", action="append", default=[], metavar="TEXT",
        help=f"options, candidates, serve, {', '.join(SHAPE_CASES)}: only cases with this text in their name, "
        "e.g. softcap (options: beside the plain call); may be repeated",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="serve: one case of each kind")
    parser.add_argument(
        "--op", metavar="NAMES",
        help=f"candidates: only these operations, with commas between: {', '.join(OPERATIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--no-flex",
        action="store_true",
        help=f"options, backward, {', '.join(SHAPE_CASES)}: without FlexAttention, which gets compiled",
    )
    parser.add_argument(
        "--iters", type=int, help=f"timed rounds a shape (default: {_ITERS}; backward: {backward.DEFAULT_ITERS})"
    )
    parser.add_argument(
        "--sustained", nargs="?", const=str(DEFAULT_SECONDS), metavar="SECONDS",
        help="run each candidate alone under load, for so many seconds a shape; below 1 the clock may not settle, "
        f"which is then said (default: {DEFAULT_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, samples included")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file, whatever is printed")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="bar chart (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.sustained is not None:
        arguments.sustained = check_seconds(arguments.sustained, "--sustained")
        if arguments.iters is not None:
            raise ArgumentError("--iters", "to be used without --sustained, which has no rounds", arguments.iters)
    if arguments.out is not None and not arguments.out.resolve().parent.is_dir():
        raise ArgumentError("--out", "a file in an existing folder", repr(str(arguments.out)))
    if arguments.iters is not None and arguments.iters < 1:
        raise ArgumentError("--iters", "an integer >= 1", arguments.iters)
    if arguments.markdown and arguments.json:
        raise ArgumentError("--json", "to be used without --markdown", "both")
    if not (arguments.json or arguments.markdown):
        console.require_rich()
    try:
        if arguments.format and arguments.what != "decode":
            raise ArgumentError("--format", f"nothing: 'bench {arguments.what}' has no choice of caches", "a value")
        for option, given, of in (
            ("--case", arguments.case, ("options", *SHAPE_CASES, "candidates", "serve")),
            ("--quick", arguments.quick, ("serve",)),
            ("--no-flex", arguments.no_flex, ("options", "backward", *SHAPE_CASES)),
            ("--op", arguments.op is not None, ("candidates",)),
        ):
            if given and arguments.what not in of:
                raise ArgumentError(option, f"nothing: 'bench {arguments.what}' does not have it", "a value")
        if arguments.what != "host" and arguments.iters is None:
            arguments.iters = backward.DEFAULT_ITERS if arguments.what == "backward" else _ITERS
        return _RUNS[arguments.what](arguments)
    except BenchError as error:
        raise console.CannotRunError(str(error)) from error


def _run_forward(arguments: argparse.Namespace) -> int:
    arguments.anchor = arguments.anchor or _ANCHOR
    if arguments.precision == "exact":
        shapes = filter_shapes(arguments.shapes)
    else:
        shapes = filter_shapes(arguments.shapes, LOW_PRECISION_SHAPES)
    if arguments.plot is not None:
        console.require_matplotlib(arguments.plot)
    with console.progress(len(shapes) + 1, enabled=not arguments.json) as bar:
        report = forward.run_forward(
            shapes, anchor=arguments.anchor, iters=arguments.iters, contenders=arguments.only,
            precision=arguments.precision, sustained_s=arguments.sustained, command=arguments.command_line,
            progress=bar.step,
        )  # fmt: skip
    if arguments.plot is not None:
        plot_report(report, arguments.plot)
    if not written(arguments, report.to_dict()):
        show(report, as_markdown=arguments.markdown)
    return 1 if any(m.contender in report.own and m.reason for m in report.measurements) else 0


def _run_decode(arguments: argparse.Namespace) -> int:
    arguments.anchor = arguments.anchor or _ANCHOR
    for option in ("only", "plot"):
        if getattr(arguments, option):
            raise ArgumentError(f"--{option}", "nothing: 'bench decode' has formats and an anchor", "a value")
    if arguments.precision != "exact":
        raise ArgumentError("--precision", "'exact': 'bench decode' has --format", repr(arguments.precision))
    if arguments.anchor not in decode.ANCHORS:
        raise ArgumentError("--anchor", f"{' or '.join(decode.ANCHORS)} with 'bench decode'", repr(arguments.anchor))
    shapes = filter_decode_shapes(arguments.shapes)
    formats = tuple(dict.fromkeys(arguments.format or decode.DEFAULT_FORMATS))
    with console.progress(len(shapes) + 1, enabled=not arguments.json) as bar:
        report = decode.run_decode(
            shapes, anchor=arguments.anchor, formats=formats, iters=arguments.iters,
            sustained_s=arguments.sustained, command=arguments.command_line, progress=bar.step,
        )  # fmt: skip
    if not written(arguments, report.to_dict()):
        header, rows = report.table()
        facts = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
        facts.append(f"Ceiling in this run: copy {report.copy_tb_per_s:.2f} TB/s (read + written)")
        facts += report.slower_than_larger() + _load_facts(report)
        facts += [f"{label(m.key)}, {m.shape.name}: {m.reason}" for m in report.measurements if m.reason]
        if arguments.markdown:
            print(report.markdown() + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        else:
            what = f"µs ± spread, TB/s of the format's bytes (time relative to {label(report.anchor)})"
            title = f"Decode{_protocol(report)}, {what}"
            console.print_table(title, header, rows, numeric=range(1, len(header)))
            for fact in facts:
                console.print_line(fact)
    return 1 if any(m.key != report.anchor and m.reason for m in report.measurements) else 0


def show(report: Report, *, as_markdown: bool) -> None:
    """Print a report as a table."""
    header, rows = report.table()
    facts = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
    facts.append(
        f"Ceilings in this run: bf16 matrix product 8192³ {report.matmul_tflops:.0f} TFLOP/s, "
        f"copy {report.copy_tb_per_s:.2f} TB/s (read + written)"
    )
    for key in report.contenders:
        mean = report.mean_ratio(key)
        if key != report.anchor and mean is not None:
            facts.append(f"{report.label(key)} / {report.label(report.anchor)}: geometric mean {mean:.3f}×")
    if report.end_to_end is not None:
        facts += _low_precision_facts(report, report.end_to_end)
    for m in report.measurements:
        if m.reason:
            facts.append(f"{report.label(m.contender)}, {m.shape.name}: {m.reason}")
    facts += [f"not run: {reason}" for reason in report.missing.values()]
    facts += _load_facts(report)
    if as_markdown:
        print(report.markdown() + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        return
    what = "bf16" if report.end_to_end is None else f"bf16 and {report.precision}"
    title = f"Forward{_protocol(report)}, {what}, TFLOP/s ± spread (speed relative to {report.label(report.anchor)})"
    console.print_table(title, header, rows, numeric=range(1, len(header)))
    for fact in facts:
        console.print_line(fact)


def _protocol(report: Report | DecodeReport) -> str:
    return "" if report.sustained_s is None else " under load"


def _load_facts(report: Report | DecodeReport) -> list[str]:
    """How figures under load were found, and which of them to doubt."""
    if report.sustained_s is None:
        return []
    how = (
        f"Under load: each alone, back to back, {report.sustained_s:g} s in two passes, "
        f"the last {100 * (1 - WARMUP):.0f} % of each timed; mean SM clock and power of that time"
    )
    return [how, *report.doubts()]


def _low_precision_facts(report: Report, end_to_end: str) -> list[str]:
    """What a reader needs beside the table: what the columns pay for, the mean, the errors."""
    label, exact = report.label(end_to_end), report.label(EXACT)
    facts = [f"{label}: from bf16 tensors, quantization included; {label} kernel: on operands quantized before"]
    mean = report.mean_ratio(end_to_end, EXACT)
    if mean is not None:
        facts.append(f"{label} / {exact}: geometric mean {mean:.3f}×")
    errors = [(report.label(key), report.largest_error(key)) for key in report.own]
    shown = ", ".join(f"{name} {error:.3g}" for name, error in errors if error is not None)
    return [*facts, f"Largest relative L1 error of sampled rows against fp64: {shown}"] if shown else facts


def _run_options(arguments: argparse.Namespace) -> int:
    for option in ("anchor", "only", "plot", "sustained"):
        if getattr(arguments, option):
            expected = "to be left out: 'bench options' compares with the plain call and the best other"
            raise ArgumentError(f"--{option}", expected, "a value")
    cases = chosen(arguments.shapes, arguments.case)
    with console.progress(sum(map(len, cases.values())) + 1, enabled=not arguments.json) as bar:
        report = options.run_options(
            cases, precision=arguments.precision, iters=arguments.iters, use_flex=not arguments.no_flex,
            command=arguments.command_line, progress=bar.step,
        )  # fmt: skip
    if not written(arguments, report.to_dict()):
        _show_cases(report, f"Options of attention, {report.precision}, µs ± spread", [
            "pairs: of query and key that count, as a fraction of the plain call's; over plain: speed for each of them",
            f"mark: below {LEAST_OF_PLAIN} of the plain call's speed, below {LEAST_OF_BEST} of the best other's",
        ], as_markdown=arguments.markdown)  # fmt: skip
    return 1 if any(result.failed for result in report.results) else 0


def _show_cases(report: OptionReport | ShapeReport, title: str, legend: Sequence[str], *, as_markdown: bool) -> None:
    facts = [
        ", ".join(f"{name} {value}" for name, value in report.environment.items()),
        f"Ceilings in this run: bf16 matrix product 8192³ {report.matmul_tflops:.0f} TFLOP/s, "
        f"copy {report.copy_tb_per_s:.2f} TB/s (read + written)",
        *legend,
        *report.notes(),
    ]
    if as_markdown:
        print(report.markdown() + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        return
    header, rows = report.table()
    words = ("shape", "case", "kernel", "pairs", "best other", "mark")
    console.print_table(title, header, rows, numeric=[i for i, name in enumerate(header) if name not in words])
    for fact in facts:
        console.print_line(fact)


def _run_shapes(arguments: argparse.Namespace) -> int:
    for option in ("anchor", "only", "plot", "sustained"):
        if getattr(arguments, option):
            expected = f"to be left out: 'bench {arguments.what}' compares with the best other, interleaved"
            raise ArgumentError(f"--{option}", expected, "a value")
    if arguments.precision != "exact":
        raise ArgumentError("--precision", "'exact': each case has its own", repr(arguments.precision))
    cases = chosen_cases(SHAPE_CASES[arguments.what], arguments.shapes, arguments.case)
    with console.progress(len(cases) + 1, enabled=not arguments.json) as bar:
        report = run_shapes(
            arguments.what, cases, iters=arguments.iters, use_flex=not arguments.no_flex,
            command=arguments.command_line, progress=bar.step,
        )  # fmt: skip
    if not written(arguments, report.to_dict()):
        _show_cases(report, f"Attention, {arguments.what}, µs ± spread", [
            f"mark: below {LEAST_OF_BEST} of the best other's speed ({BELOW_BEST}), of FlashAttention-3's, scaled by "
            f"cuDNN's in this run ({BELOW_FA3})",
        ], as_markdown=arguments.markdown)  # fmt: skip
    return 1 if any(result.failed for result in report.results) else 0


def _run_backward(arguments: argparse.Namespace) -> int:
    for option in ("anchor", "plot", "sustained"):
        if getattr(arguments, option):
            expected = "to be left out: 'bench backward' compares with each library, interleaved"
            raise ArgumentError(f"--{option}", expected, "a value")
    if arguments.precision != "exact":
        raise ArgumentError("--precision", "'exact': low precisions have no gradient", repr(arguments.precision))
    only = tuple(arguments.only or ())
    known = [key for key in OTHERS if key != FLEX]
    if not {*only} <= {*known}:
        raise ArgumentError("--only", f"{', '.join(known)} with 'bench backward'", ", ".join(only))
    shapes = filter_backward(arguments.shapes)
    with console.progress(len(shapes) + 1, enabled=not arguments.json) as bar:
        report = backward.run_backward(
            shapes, iters=arguments.iters, only=only, use_flex=not arguments.no_flex, command=arguments.command_line,
            progress=bar.step,
        )  # fmt: skip
    if not written(arguments, report.to_dict()):
        _show_backward(report, as_markdown=arguments.markdown)
    return 1 if any(result.failed for result in report.results) else 0


def _show_backward(report: BackwardReport, *, as_markdown: bool) -> None:
    header, rows = report.table()
    facts = [
        ", ".join(f"{name} {value}" for name, value in report.environment.items()),
        f"Ceilings in this run: bf16 matrix product 8192³ {report.matmul_tflops:.0f} TFLOP/s, "
        f"copy {report.copy_tb_per_s:.2f} TB/s (read + written)",
        *report.notes(),
    ]
    if as_markdown:
        print(report.markdown() + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        return
    console.print_table("Gradients, bf16, TFLOP/s ± spread", header, rows, numeric=range(1, len(header)))
    for fact in facts:
        console.print_line(fact)


def _run_candidates(arguments: argparse.Namespace) -> int:
    for option in ("anchor", "only", "plot", "sustained"):
        if getattr(arguments, option):
            expected = "to be left out: 'bench candidates' compares the ways that this package has"
            raise ArgumentError(f"--{option}", expected, "a value")
    if arguments.precision != "exact":
        raise ArgumentError("--precision", "'exact': each call has its own", repr(arguments.precision))
    operations = OPERATIONS if arguments.op is None else tuple(arguments.op.split(","))
    if unknown := [name for name in operations if name not in OPERATIONS]:
        expected = f"names out of {', '.join(OPERATIONS)}, with commas between"
        raise ArgumentError("--op", expected, repr(unknown[0]))
    cases = chosen_cases(cases_of(operations), arguments.shapes, arguments.case)
    with console.progress(len(cases), enabled=not arguments.json) as bar:
        report = run_candidates(cases, iters=arguments.iters, command=arguments.command_line, progress=bar.step)
    if not written(arguments, report.to_dict()):
        header, rows = report.table()
        if arguments.markdown:
            print(markdown_table(header, rows) + "\n\n" + "\n".join(f"- {fact}" for fact in report.summary()))
        else:
            console.print_table("Ways of running a call, µs", header, rows, numeric=(1, 2, 4, 5))
            for fact in report.summary():
                console.print_line(fact)
    return 1 if any(way.reason for result in report.results for way in result.ways) else 0


def _run_beside_copy(arguments: argparse.Namespace) -> int:
    leave_out(arguments, "has shapes of its own, and a copy to compare with")
    run_one = {"append": beside_copy.run_append, "quantize": beside_copy.run_quantize}[arguments.what]
    shapes = {"append": beside_copy.APPEND_SHAPES, "quantize": beside_copy.QUANTIZE_SHAPES}[arguments.what]
    with console.progress(len(shapes) + 1, enabled=not arguments.json) as bar:
        report = run_one(iters=arguments.iters, command=arguments.command_line, progress=bar.step)
    if written(arguments, report.to_dict()):
        return 0
    header, rows = report.table()
    facts = [
        ", ".join(f"{name} {value}" for name, value in report.environment.items()),
        f"Copy in this run: {report.copy_tb_per_s:.2f} TB/s (read + written)",
    ]
    if arguments.markdown:
        print(markdown_table(header, rows) + "\n\n" + "\n".join(f"- {fact}" for fact in facts))
        return 0
    console.print_table("µs ± spread (share of a copy's bandwidth)", header, rows, numeric=range(1, len(header)))
    for fact in facts:
        console.print_line(fact)
    return 0


def _run_host(arguments: argparse.Namespace) -> int:
    leave_out(arguments, "times the host, which has no shapes, contenders, plot or load")
    if arguments.iters is not None:
        raise ArgumentError("--iters", "to be left out: 'bench host' has its own", arguments.iters)
    imports = host.import_time()
    jit_name, jit_s, jit_note = first_jit()
    try:
        calls, calls_note = host.warm_calls(), ""
    except BenchError as error:
        # Import and compilation need no GPU: on a machine without one those two are still worth having.
        calls, calls_note = [], str(error)
    data = document(
        "host", protocol="host", command=arguments.command_line,
        environment=environment(require_torch() if calls else None), rows=[call.row(calls) for call in calls],
        **{"import": dataclasses.asdict(imports)},
        first_jit={"kernel": jit_name, "seconds": jit_s, "note": jit_note}, warm_calls_note=calls_note,
    )  # fmt: skip
    if written(arguments, data):
        return 0
    header = ["call", "µs, median", "10 % – 90 %", "by Python", f"time relative to {host.ANCHOR}"]
    rows = []
    for row, python in host.beside_python(data["rows"]):
        span = f"{row['p10_us']:.1f} – {row['p90_us']:.1f}"
        slower = "" if python is None else f"{python['median_us']:.1f}"
        rows.append([row["name"], f"{row['median_us']:.1f}", span, slower, f"{row['ratio_to_sdpa']:.2f}×"])
    jit_text = jit_note if jit_s is None else f"{jit_s:.2f} s ({jit_name})"
    facts = [
        ", ".join(f"{name} {value}" for name, value in data["environment"].items()),
        f"Import: {imports.total_ms:.0f} ms, of which NumPy {imports.numpy_ms:.0f} ms",
        f"First run-time compilation of a kernel: {jit_text}",
    ]
    if calls_note:
        facts.append(f"Warm calls were not timed: {calls_note}")
    if arguments.markdown:
        print("\n\n".join([markdown_table(header, rows)] * bool(rows) + ["\n".join(f"- {fact}" for fact in facts)]))
        return 0
    if rows:
        console.print_table("Warm call, Python call to return", header, rows, numeric=(1, 3))
    for fact in facts:
        console.print_line(fact)
    return 0


def first_jit() -> tuple[str, float | None, str]:
    """Compile one attention kernel with NVRTC, past every cache.

    Returns
    -------
    (kernel, seconds or None, reason if None)
    """
    from omniattn.cli.kernels import compile_uncached, jit_sample

    spec = jit_sample()
    try:
        return spec.name, compile_uncached(spec), ""
    except (CompileError, UnsupportedError) as error:
        return spec.name, None, f"not possible here: {error}"


_RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "forward": _run_forward,
    "backward": _run_backward,
    "options": _run_options,
    **dict.fromkeys(SHAPE_CASES, _run_shapes),
    "decode": _run_decode,
    "append": _run_beside_copy,
    "quantize": _run_beside_copy,
    "serve": run_serve,
    "host": _run_host,
    "candidates": _run_candidates,
}
