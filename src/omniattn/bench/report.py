"""From timings to TFLOP/s, ratios and percentages. Pure arithmetic: no device, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.document import document, samples_of, timing_facts, to_json
from omniattn.bench.shapes import ForwardShape
from omniattn.bench.timing import Timing

#: Key of this package's 16-bit attention.
EXACT = "omniattn"


@dataclass(frozen=True)
class Measurement:
    """One contender on one shape.

    Attributes
    ----------
    shape : ForwardShape
    contender : str
        Key of the contender.
    timing : Timing or None
        None: it could not run; ``reason`` says why.
    relative_l1 : float or None
        Error of sampled rows against fp64.
    reason : str
        Empty if it ran.
    """

    shape: ForwardShape
    contender: str
    timing: Timing | None
    relative_l1: float | None = None
    reason: str = ""

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the median, or None."""
        return None if self.timing is None else self.shape.flops / self.timing.median_us * 1e-6


@dataclass(frozen=True)
class Report:
    """All measurements of one run.

    Attributes
    ----------
    anchor : str
        Key of the contender that ratios are relative to.
    environment : dict
        Device, driver, versions, date.
    matmul_tflops, copy_tb_per_s : float
        Ceilings measured in the same run.
    measurements : tuple of Measurement
    labels : dict
        Contender key to label.
    missing : dict
        Contender key to the reason why it was not tried.
    precision : {"exact", "int8", "int4", "fp8"}
        Of this package's contender that the report is about.
    own : tuple of str
        Keys of this package's contenders.
    sustained_s : float or None
        Seconds of load a contender (`sustained`); None: interleaved.
    command : str
        The command line.
    """

    anchor: str
    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    measurements: tuple[Measurement, ...]
    labels: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    precision: str = "exact"
    own: tuple[str, ...] = (EXACT,)
    sustained_s: float | None = None
    command: str = ""

    @property
    def shapes(self) -> tuple[ForwardShape, ...]:
        """Shapes in the order in which they were measured."""
        return tuple(dict.fromkeys(m.shape for m in self.measurements))

    @property
    def contenders(self) -> tuple[str, ...]:
        """Contender keys in the order in which they were measured."""
        return tuple(dict.fromkeys(m.contender for m in self.measurements))

    @property
    def end_to_end(self) -> str | None:
        """Key of the low-precision attention from bf16 to bf16; None for an exact report."""
        return None if self.precision == "exact" else f"{EXACT}_{self.precision}"

    def label(self, contender: str) -> str:
        """Label of a contender in tables and plots."""
        return self.labels.get(contender, contender)

    def find(self, shape: ForwardShape, contender: str) -> Measurement | None:
        """The measurement of one cell, if it was made."""
        for measurement in self.measurements:
            if measurement.shape == shape and measurement.contender == contender:
                return measurement
        return None

    def ratio(self, measurement: Measurement, to: str | None = None) -> float | None:
        """Speed relative to ``to`` (default: the anchor) on the same shape: above 1 is faster.

        None if either did not run.
        """
        other = self.find(measurement.shape, self.anchor if to is None else to)
        if other is None or other.timing is None or measurement.timing is None:
            return None
        return other.timing.median_us / measurement.timing.median_us

    def share_of_ceiling(self, measurement: Measurement) -> float | None:
        """TFLOP/s as a fraction of the matrix product measured in the same run."""
        tflops = measurement.tflops
        return None if tflops is None else tflops / self.matmul_tflops

    def mean_ratio(self, contender: str, to: str | None = None) -> float | None:
        """Geometric mean of the ratios of a contender over all shapes where it and ``to`` (the anchor) ran."""
        return geometric_mean(
            ratio for m in self.measurements if m.contender == contender and (ratio := self.ratio(m, to)) is not None
        )

    def largest_error(self, contender: str) -> float | None:
        """Largest relative L1 error of a contender over all shapes where it was checked."""
        errors = [m.relative_l1 for m in self.measurements if m.contender == contender and m.relative_l1 is not None]
        return max(errors, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        return document(
            "forward" if self.precision == "exact" else self.precision,
            protocol="interleaved" if self.sustained_s is None else "sustained",
            command=self.command,
            environment=self.environment,
            rows=[self._row(m) for m in self.measurements],
            anchor=self.anchor,
            precision=self.precision,
            sustained_seconds=self.sustained_s,
            ceilings={"bf16_matmul_8192_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            missing=self.missing,
            labels={key: self.label(key) for key in self.contenders},
            geometric_mean_ratio={key: self.mean_ratio(key) for key in self.contenders},
            geometric_mean_ratio_to_exact={key: self.mean_ratio(key, EXACT) for key in self.own},
            samples=[samples_of(m.timing) for m in self.measurements],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a shape; per contender ``TFLOP/s ±spread% (ratio)``; under load clock and power too.

        The last column is what a reader would work out: of an exact report omniattn's share of the matrix product, of
        a low-precision one the speed end to end relative to the exact attention.
        """
        contenders, end_to_end = self.contenders, self.end_to_end
        header = ["shape", *(self.label(key) for key in contenders)]
        if end_to_end is not None:
            header.append(f"{self.label(end_to_end)} / exact")
        elif EXACT in contenders:
            header.append("omniattn, % of matmul")
        rows = []
        for shape in self.shapes:
            name = shape.name if end_to_end is None else shape.long_name
            row = [name, *(self._cell(self.find(shape, key)) for key in contenders)]
            if end_to_end is not None:
                ours = self.find(shape, end_to_end)
                ratio = None if ours is None else self.ratio(ours, EXACT)
                row.append("–" if ratio is None else f"{ratio:.2f}×")
            elif EXACT in contenders:
                ours = self.find(shape, EXACT)
                share = None if ours is None else self.share_of_ceiling(ours)
                row.append("–" if share is None else f"{100 * share:.0f} %")
            rows.append(row)
        return header, rows

    def markdown(self) -> str:
        """The table of :meth:`table` in Markdown, for pasting into documents."""
        return markdown_table(*self.table())

    def _cell(self, measurement: Measurement | None) -> str:
        if measurement is None or measurement.timing is None or measurement.tflops is None:
            return "–"
        text = f"{measurement.tflops:.0f} ±{100 * measurement.timing.spread:.1f}%"
        ratio = self.ratio(measurement)
        return with_load(text if ratio is None else f"{text} ({ratio:.2f}×)", measurement.timing)

    def doubts(self) -> list[str]:
        """What a reader should know before quoting a time: contender, shape, reason."""
        return [
            f"{self.label(m.contender)}, {m.shape.long_name}: {doubt}"
            for m in self.measurements
            for doubt in (m.timing.doubts() if m.timing else ())
        ]

    def _row(self, m: Measurement) -> dict[str, Any]:
        return {
            "shape": m.shape.name,
            "batch": m.shape.batch,
            "heads": m.shape.heads,
            "seqlen": m.shape.seqlen,
            "head_dim": m.shape.head_dim,
            "causal": m.shape.causal,
            "contender": m.contender,
            **timing_facts(m.timing),
            "tflops": m.tflops,
            "ratio_to_anchor": self.ratio(m),
            "ratio_to_exact": self.ratio(m, EXACT),
            "share_of_matmul": self.share_of_ceiling(m),
            "relative_l1": m.relative_l1,
            "reason": m.reason,
        }


def with_load(text: str, timing: Timing) -> str:
    """A table's cell; with clock and power if it was measured under load."""
    return f"{text} {timing.text}".rstrip()


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean of positive values; None if there are none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without a trailing newline."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" for _ in header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
