"""Attention and its gradients under jax.jit: omniattn beside jax.nn's cuDNN and XLA implementations, on a GPU.

python examples/train_jax/bench.py
python examples/train_jax/bench.py --shapes s4096 --out times.json
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

from omniattn.bench.document import document, environment, write
from omniattn.bench.timing import percentile
from omniattn.jax import dot_product_attention

#: Implementations by name; ratios are to the others.
OURS, OTHERS = "omniattn", ("cudnn", "xla")
FORWARD, BOTH = "forward", "forward + backward"
#: Relative L1 error of outputs and gradients beside XLA's in the same type, at most.
LARGEST_ERROR = 5e-2
#: Seconds of one sample: many calls that follow each other, which hide the last one's wait.
_SAMPLE_S = 0.02


@dataclass(frozen=True)
class Shape:
    """A problem, bf16 and causal.

    Attributes
    ----------
    batch, seqlen, heads, kv_heads, head_dim : int
    calls : int
        Of attention in one compiled program, each on what the one before has made.
    with_xla : bool
        XLA has room for the scores.
    """

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    calls: int = 1
    with_xla: bool = True

    @property
    def name(self) -> str:
        """What a table calls it."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        chain = f", {self.calls} calls" if self.calls > 1 else ""
        return f"d{self.head_dim} b{self.batch} h{heads} s{self.seqlen}{chain}"


SHAPES = (
    Shape(16, 1024, 16, 16, 128),
    Shape(4, 4096, 16, 16, 128),
    Shape(1, 16384, 16, 16, 128, with_xla=False),
    Shape(4, 4096, 32, 32, 64),
    Shape(4, 4096, 32, 8, 128),
    Shape(1, 128, 8, 8, 64),
    Shape(1, 128, 8, 8, 64, calls=8),
)


def programs(shape: Shape, name: str) -> dict[str, Callable[..., Any]]:
    """The compiled programs of an implementation: (q, k, v, do) to o, or to (o, (dq, dk, dv))."""
    attention = functools.partial(dot_product_attention, is_causal=True, implementation=name)

    def forward(q: Any, k: Any, v: Any, do: Any) -> Any:
        for _ in range(shape.calls):
            q = attention(q, k, v)
        return q

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, pull = jax.vjp(lambda *x: forward(*x, do), q, k, v)
        return o, pull(do)

    return {FORWARD: jax.jit(forward), BOTH: jax.jit(both)}


def inputs(shape: Shape) -> list[jax.Array]:
    """q, k, v and the gradient of o."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [
        jax.random.normal(key, (shape.batch, shape.seqlen, n, shape.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def error(got: Any, want: Any) -> float:
    """The largest relative L1 error of two results."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = ((a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs)
    return max(float(jnp.abs(a - b).sum() / jnp.abs(b).sum()) for a, b in wide)


def measure(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of a call of each, in turn: ``repeats`` samples of many calls."""
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        jax.block_until_ready([call() for _ in range(3)])
        counts[name] = max(3, min(500, round(_SAMPLE_S / max(_seconds(call, 3), 1e-6))))
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(_seconds(call, counts[name]) * 1e6)
    return samples


def _seconds(call: Callable[[], Any], count: int) -> float:
    begin, made = time.perf_counter(), None
    for _ in range(count):
        made = call()
    jax.block_until_ready(made)
    return (time.perf_counter() - begin) / count


def rows_of(
    shape: Shape, what: str, samples: Mapping[str, Sequence[float]], wrong: float | None
) -> list[dict[str, Any]]:
    """Rows of the report from samples by implementation."""
    medians = {name: statistics.median(found) for name, found in samples.items()}
    rows = []
    for name, found in samples.items():
        ordered = sorted(found)
        rows.append(
            {
                "name": shape.name, "what": what, "contender": name, "median_us": medians[name],
                "spread": (percentile(ordered, 0.9) - percentile(ordered, 0.1)) / (2 * medians[name]),
                "error": wrong if name == OURS else None, "samples_us": list(found),
                **{f"speed_over_{other}": medians[other] / medians[name] for other in OTHERS if other in medians},
            }
        )  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The report as text."""
    lines = [f"{'':34}{'':20} {'us':>9} {'±':>5} {'/ cuDNN':>8} {'/ XLA':>8}"]
    for row in rows:
        if row["contender"] == OURS:
            ratios = [row.get(f"speed_over_{other}") for other in OTHERS]
            shown = " ".join(f"{'–' if x is None else f'{x:.2f}x':>8}" for x in ratios)
            spread = f"{100 * row['spread']:.0f} %"
            lines.append(f"{row['name']:34}{row['what']:20} {row['median_us']:9.1f} {spread:>5} {shown}")
    return "\n".join(lines)


def run(shapes: Sequence[Shape], repeats: int) -> list[dict[str, Any]]:
    """Measure shapes; rows of the report. Wrong results end the program."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        names = [OURS, *(name for name in OTHERS if shape.with_xla or name != "xla")]
        own, given = {name: programs(shape, name) for name in names}, inputs(shape)
        for what in (FORWARD, BOTH):
            wrong = error(own[OURS][what](*given), own[names[-1]][what](*given))
            if not wrong <= LARGEST_ERROR:
                raise SystemExit(f"{shape.name}, {what}: relative error {wrong:.3g}, above {LARGEST_ERROR}")
            calls = {name: functools.partial(own[name][what], *given) for name in names}
            made = rows_of(shape, what, measure(calls, repeats), wrong)
            rows += made
            print(table(made).splitlines()[1], flush=True)
    return rows


def facts() -> dict[str, str]:
    """Device, driver and versions, for the head of the report."""
    device = jax.devices("gpu")[0]
    return {**environment(None, ("jax", "jaxlib")), "device": str(device.device_kind)}


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help='names that have it, e.g. "s4096"')
    parser.add_argument("--repeats", type=int, default=9, help="samples of each, in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the times to this JSON file")
    given = parser.parse_args(words)
    if given.out is not None and not given.out.resolve().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, received {given.out}")
    chosen = [s for s in SHAPES if not given.shapes or any(text in s.name for text in given.shapes)]
    if not chosen:
        parser.error(f"--shapes: expected one of {', '.join(s.name for s in SHAPES)}, received {given.shapes}")
    if jax.default_backend() != "gpu":
        parser.error("these measurements need a GPU that JAX can use")
    rows = run(chosen, given.repeats)
    print(table(rows))
    if given.out is not None:
        options = [word for i, word in enumerate(words) if word != "--out" and words[i - 1 : i] != ["--out"]]
        report = document(
            "jax", protocol="wall", command=" ".join(["python examples/train_jax/bench.py", *options]),
            environment=facts(), rows=rows, repeats=given.repeats,
        )  # fmt: skip
        write(report, given.out)


if __name__ == "__main__":
    main()
