"""``omniattn demo``: real activations through every available precision, with errors and times."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import omniattn
from omniattn.cli import console
from omniattn.data import Activations, load_activations
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.reference import attention as reference_attention
from omniattn.testing import compare
from omniattn.testing.ahead import default_jobs, one_thread_each
from omniattn.testing.frameworks import Framework, NoGpuError, NumpyFramework, gpu_framework

_DESCRIPTION = """\
Runs the query, key and value tensors of several layers of SmolLM2-135M-Instruct, recorded on English text, through
omniattn.attention(causal=True) in every available precision, and compares with the same computation in fp64.
On a GPU it uses torch, else CuPy, else JAX, and draws errors and times as bars below the table; without one, NumPy on
the CPU, and then fewer layers unless --layers says how many.
"""

#: Layers without a GPU, where the reference takes seconds for each, unless ``--layers`` says otherwise.
_LAYERS_WITHOUT_GPU = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in one precision.

    Attributes
    ----------
    layer, precision, dtype, kernel : str
    cosine : float
        Cosine similarity with the fp64 result.
    relative_l1 : float
        Sum of absolute errors over the sum of absolute values.
    rmse, max_abs : float
    milliseconds : float
        Best wall time of a call, host included.
    """

    layer: str
    precision: str
    dtype: str
    kernel: str
    cosine: float
    relative_l1: float
    rmse: float
    max_abs: float
    milliseconds: float


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="real activations through every precision", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto (default): the GPU if one can be used"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N",
        help=f"recorded layers, evenly from the first to the last (default: all; without a GPU {_LAYERS_WITHOUT_GPU})",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="timed calls a row; the best counts (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="error and time bars (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.repeats < 1:
        raise ArgumentError("--repeats", "an integer >= 1", arguments.repeats)
    if not arguments.json:
        console.require_rich()
    if arguments.plot is not None:
        console.require_matplotlib(arguments.plot)
    recorded = load_activations()
    if arguments.layers is not None and not 1 <= arguments.layers <= len(recorded):
        raise ArgumentError("--layers", f"an integer from 1 to {len(recorded)}", arguments.layers)
    framework, note = choose_framework(arguments.device)
    most = _LAYERS_WITHOUT_GPU if framework.device == "CPU" else len(recorded)
    samples = spread(recorded, arguments.layers or most)
    dtypes = ("float32", "float16") if framework.device == "CPU" else ("bfloat16", "float16")
    precisions, missing = available(framework, samples[0], dtypes[0])
    note = "; ".join(filter(None, (note, *missing)))
    with console.progress(len(samples), enabled=not arguments.json) as bar:
        rows = run_samples(framework, samples, dtypes, precisions, arguments.repeats, bar)
    if arguments.plot is not None:
        plot_rows(rows, framework, arguments.plot)
    if arguments.json:
        console.print_json(
            {
                "omniattn": omniattn.__version__,
                "framework": framework.name,
                "device": framework.device,
                "note": note,
                "rows": [dataclasses.asdict(row) for row in rows],
            }
        )
        return 0
    _show(rows, samples, framework, note)
    if framework.device != "CPU" and rows:
        show_bars(rows, len(samples))
    if len(samples) < len(recorded):
        console.print_line(f"{len(samples)} of {len(recorded)} recorded layers; all of them: --layers {len(recorded)}.")
    return 0


def spread(samples: Sequence[Activations], count: int) -> list[Activations]:
    """As many layers, evenly from the first to the last."""
    return [samples[round(index)] for index in np.linspace(0, len(samples) - 1, count)]


def choose_framework(device: str) -> tuple[Framework, str]:
    """The framework for ``--device``, and a note if "auto" fell back to the CPU."""
    if device == "cpu":
        return NumpyFramework(), ""
    try:
        return gpu_framework(), ""
    except NoGpuError as error:
        if device == "gpu":
            raise
        return NumpyFramework(), f"ran on the CPU because {error}"


def available(framework: Framework, sample: Activations, dtype: str) -> tuple[list[str], list[str]]:
    """Precisions that have a kernel here, and for each of the others a sentence."""
    q, k, v = (framework.array(values, dtype) for values in (sample.q, sample.k, sample.v))
    found, missing = [], []
    for precision in omniattn.PRECISIONS:
        try:
            omniattn.explain(q, k, v, causal=True, precision=precision)
        except UnsupportedError as error:
            missing.append(f"without {precision}: {error}")
        else:
            found.append(precision)
    return found, missing


def run_samples(
    framework: Framework, samples: Sequence[Activations], dtypes: Sequence[str], precisions: Sequence[str],
    repeats: int, bar: console.Progress,
) -> list[Row]:  # fmt: skip
    """Every layer through every precision in every dtype. On the CPU in other processes, one for each core.

    Each has one thread: on cores that do something else besides, the threads of a BLAS mostly wait for each other.
    """
    rows = []
    if framework.device != "CPU":
        for sample in samples:
            bar.step(sample.name)
            rows += run_sample(framework, sample, dtypes, precisions, repeats)
        return rows
    # Spawned, so that they import NumPy with the variables set: a BLAS reads them once.
    with one_thread_each(), ProcessPoolExecutor(min(default_jobs(), len(samples)), get_context("spawn")) as pool:
        waiting = [pool.submit(run_sample, framework, sample, dtypes, precisions, repeats) for sample in samples]
        for sample, found in zip(samples, waiting):
            bar.step(sample.name)
            rows += found.result()
    return rows


def run_sample(
    framework: Framework, sample: Activations, dtypes: Sequence[str], precisions: Sequence[str], repeats: int
) -> list[Row]:
    """One layer through every precision in every dtype."""
    expected, _ = reference_attention(sample.q, sample.k, sample.v, causal=True, compute_dtype=np.float64)
    rows = []
    for dtype in dtypes:
        q, k, v = (framework.array(values, dtype) for values in (sample.q, sample.k, sample.v))
        for precision in precisions:
            choice = omniattn.explain(q, k, v, causal=True, precision=precision)
            call = functools.partial(omniattn.attention, q, k, v, causal=True, precision=precision)
            result, milliseconds = time_call(framework, call, repeats=repeats)
            report = compare(framework.to_numpy(result), expected)
            errors = (report.cosine, report.rel_l1, report.rmse, report.max_abs)
            rows.append(Row(sample.name, precision, dtype, choice.kernel, *errors, milliseconds))
    return rows


def _show(rows: Sequence[Row], samples: Sequence[Activations], framework: Framework, note: str) -> None:
    q, k = samples[0].q, samples[0].k
    title = (
        f"Real activations: {q.shape[1]} tokens, {q.shape[2]} query heads, {k.shape[2]} key/value heads, "
        f"head_dim {q.shape[3]}, causal. {framework.name} on {framework.device}"
    )
    header = ["layer", "precision", "dtype", "kernel", "1 − cosine", "relative L1", "RMSE", "max error", "ms"]
    cells = [
        [
            row.layer, row.precision, row.dtype, row.kernel,
            f"{max(0.0, 1.0 - row.cosine):.1e}", f"{row.relative_l1:.1e}",
            f"{row.rmse:.1e}", f"{row.max_abs:.1e}", f"{row.milliseconds:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    console.print_table(title, header, cells, numeric=range(4, 9))
    console.print_line("Errors are against fp64. ms: best wall time of one call, host included.")
    if note:
        console.print_line(f"Note: {note}.")


def _variants(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Precisions in every dtype."""
    return list(dict.fromkeys((row.precision, row.dtype) for row in rows))


def show_bars(rows: Sequence[Row], layers: int) -> None:
    """Draw relative L1 error and time of each precision into the terminal, both as means of the layers."""
    errors, times = [], []
    for variant in _variants(rows):
        own = [row for row in rows if (row.precision, row.dtype) == variant]
        errors.append(sum(row.relative_l1 for row in own) / len(own))
        times.append(sum(row.milliseconds for row in own) / len(own))
    # A decade below the least error, so that it has a bar too.
    low = min((error for error in errors if error > 0), default=1.0) / 10
    span = math.log10(max(*errors, 10 * low) / low)
    console.print_line()
    console.print_bars(
        f"Mean of {layers} layers" if layers > 1 else "The same as bars",
        ("relative L1, log scale", "time of one call"),
        [
            (
                f"{precision}, {dtype}",
                (
                    (math.log10(error / low) / span if error > 0 else 0.0, f"{error:.1e}"),
                    (milliseconds / max(times), f"{milliseconds:.3f} ms"),
                ),
            )
            for (precision, dtype), error, milliseconds in zip(_variants(rows), errors, times, strict=True)
        ],
    )


def plot_rows(rows: Sequence[Row], framework: Framework, path: Path) -> None:
    """Draw relative L1 error and time, one group of bars a layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from omniattn.bench.plot import COLOURS

    layers = list(dict.fromkeys(row.layer for row in rows))
    variants = _variants(rows)
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    width = 0.8 / max(len(variants), 1)
    for index, (precision, dtype) in enumerate(variants):
        chosen = {row.layer: row for row in rows if (row.precision, row.dtype) == (precision, dtype)}
        offset = (index - (len(variants) - 1) / 2) * width
        places = [position + offset for position in range(len(layers))]
        style: dict[str, Any] = {"label": f"{precision}, {dtype}", "color": COLOURS[index % len(COLOURS)]}
        panels[0].bar(places, [chosen[layer].relative_l1 for layer in layers], width, **style)
        panels[1].bar(places, [chosen[layer].milliseconds for layer in layers], width, **style)
    panels[0].set_yscale("log")
    panels[0].set_title("relative L1 error against fp64 (log scale)", fontsize=10)
    panels[1].set_title("time of one call, ms", fontsize=10)
    for panel in panels:
        panel.set_xticks(range(len(layers)), [layer.replace("SmolLM2 ", "") for layer in layers])
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"omniattn {omniattn.__version__} on real activations · {framework.name} on {framework.device}")
    figure.savefig(path, dpi=150)


def time_call(framework: Framework, call: Callable[[], Any], *, repeats: int) -> tuple[Any, float]:
    """Run ``call`` once to warm up, then ``repeats`` times; return its result and the best wall time in milliseconds.

    The best of several, host included: what a single call costs a user. ``omniattn bench`` times kernels.
    """
    result = call()
    framework.synchronize()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()
        framework.synchronize()
        best = min(best, time.perf_counter() - start)
    return result, best * 1e3
