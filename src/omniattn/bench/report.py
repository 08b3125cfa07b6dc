"""From timings to TFLOP/s, ratios and percentages. Pure arithmetic: no device, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.shapes import ForwardShape
from omniattn.bench.timing import Timing


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
    """

    anchor: str
    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    measurements: tuple[Measurement, ...]
    labels: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[ForwardShape, ...]:
        """Shapes in the order in which they were measured."""
        return tuple(dict.fromkeys(m.shape for m in self.measurements))

    @property
    def contenders(self) -> tuple[str, ...]:
        """Contender keys in the order in which they were measured."""
        return tuple(dict.fromkeys(m.contender for m in self.measurements))

    def label(self, contender: str) -> str:
        """Label of a contender in tables and plots."""
        return self.labels.get(contender, contender)

    def find(self, shape: ForwardShape, contender: str) -> Measurement | None:
        """The measurement of one cell, if it was made."""
        for measurement in self.measurements:
            if measurement.shape == shape and measurement.contender == contender:
                return measurement
        return None

    def ratio(self, measurement: Measurement) -> float | None:
        """Speed relative to the anchor on the same shape: above 1 is faster. None if either did not run."""
        anchor = self.find(measurement.shape, self.anchor)
        if anchor is None or anchor.timing is None or measurement.timing is None:
            return None
        return anchor.timing.median_us / measurement.timing.median_us

    def share_of_ceiling(self, measurement: Measurement) -> float | None:
        """TFLOP/s as a fraction of the matrix product measured in the same run."""
        tflops = measurement.tflops
        return None if tflops is None else tflops / self.matmul_tflops

    def mean_ratio(self, contender: str) -> float | None:
        """Geometric mean of the ratios of a contender over all shapes where it and the anchor ran."""
        return geometric_mean(
            ratio for m in self.measurements if m.contender == contender and (ratio := self.ratio(m)) is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "anchor": self.anchor,
            "environment": self.environment,
            "ceilings": {"bf16_matmul_8192_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            "missing": self.missing,
            "geometric_mean_ratio": {key: self.mean_ratio(key) for key in self.contenders},
            "measurements": [self._measurement_dict(m) for m in self.measurements],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a shape; per contender ``TFLOP/s ±spread% (ratio)``."""
        contenders = self.contenders
        header = ["shape", *(self.label(key) for key in contenders)]
        if "omniattn" in contenders:
            header.append("omniattn, % of matmul")
        rows = []
        for shape in self.shapes:
            row = [shape.name, *(self._cell(self.find(shape, key)) for key in contenders)]
            if "omniattn" in contenders:
                ours = self.find(shape, "omniattn")
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
        return text if ratio is None else f"{text} ({ratio:.2f}×)"

    def _measurement_dict(self, m: Measurement) -> dict[str, Any]:
        return {
            "shape": m.shape.name,
            "batch": m.shape.batch,
            "heads": m.shape.heads,
            "seqlen": m.shape.seqlen,
            "head_dim": m.shape.head_dim,
            "causal": m.shape.causal,
            "contender": m.contender,
            "median_us": None if m.timing is None else m.timing.median_us,
            "spread": None if m.timing is None else m.timing.spread,
            "samples_us": None if m.timing is None else list(m.timing.samples_us),
            "tflops": m.tflops,
            "ratio_to_anchor": self.ratio(m),
            "share_of_matmul": self.share_of_ceiling(m),
            "relative_l1": m.relative_l1,
            "reason": m.reason,
        }


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean of positive values; None if there are none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without a trailing newline."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" for _ in header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
