"""Gradients of every shape beside other libraries: TFLOP/s and ratios; no device needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.backward_cases import BACKWARD_PRODUCTS, BackwardShape
from omniattn.bench.backward_contenders import DENSE, DETERMINISTIC, FLEX, OTHERS, OURS
from omniattn.bench.document import document, samples_of, timing_facts, to_json
from omniattn.bench.report import geometric_mean, markdown_table
from omniattn.bench.timing import Timing

#: What is timed.
BACKWARD, BOTH = "backward", "forward + backward"
#: Contenders of this package: their faults fail the command.
OWN = (OURS, DETERMINISTIC, DENSE)
#: What a row is compared with; other libraries with a mean over the headline shapes, all of which they serve.
_COMPARED = (OURS, *OTHERS, DENSE)
_WITH_MEANS = tuple(key for key in OTHERS if key != FLEX)


@dataclass(frozen=True)
class BackwardEntry:
    """One contender on one shape.

    Attributes
    ----------
    contender : str
        Key of the contender.
    layout : {"NHD", "HND"}
        Of the memory that it was handed.
    what : str
        `BACKWARD` or `BOTH`.
    timing : Timing or None
        None: it could not run or was wrong; ``reason`` says why.
    relative_l1, rows_l1 : float or None
        Errors of all elements and of 64 rows against fp32, the largest of dq, dk and dv.
    reason : str
        Empty if it ran.
    """

    contender: str
    layout: str
    what: str
    timing: Timing | None
    relative_l1: float | None = None
    rows_l1: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class BackwardResult:
    """All contenders on one shape.

    Attributes
    ----------
    shape : BackwardShape
    entries : tuple of BackwardEntry
    """

    shape: BackwardShape
    entries: tuple[BackwardEntry, ...]

    def best(self, contender: str, what: str = BACKWARD) -> BackwardEntry | None:
        """A contender's faster layout; None if it has no time."""
        found = [e for e in self.entries if (e.contender, e.what) == (contender, what) and e.timing is not None]
        return min(found, key=lambda e: e.timing.median_us if e.timing else 0.0, default=None)

    def us(self, contender: str, what: str = BACKWARD) -> float | None:
        """Median of it."""
        entry = self.best(contender, what)
        return None if entry is None or entry.timing is None else entry.timing.median_us

    def flops(self, contender: str, what: str) -> float:
        """What a contender computes."""
        shape = self.shape.dense_twin() if contender == DENSE else self.shape
        return shape.flops if what == BACKWARD else (1 + BACKWARD_PRODUCTS) * shape.forward_flops

    def tflops(self, contender: str, what: str = BACKWARD) -> float | None:
        """TFLOP/s of it, for visible pairs."""
        us = self.us(contender, what)
        return None if us is None else self.flops(contender, what) / us * 1e-6

    def over(self, other: str, what: str = BACKWARD, contender: str = OURS) -> float | None:
        """TFLOP/s of a contender relative to another one's."""
        own, theirs = self.tflops(contender, what), self.tflops(other, what)
        return None if own is None or theirs is None else own / theirs

    @property
    def failed(self) -> bool:
        """Whether a call of this package has no time."""
        return any(entry.contender in OWN and entry.reason for entry in self.entries)


@dataclass(frozen=True)
class BackwardReport:
    """All shapes of one run.

    Attributes
    ----------
    environment : dict
    matmul_tflops, copy_tb_per_s : float
        Ceilings measured in the same run.
    results : tuple of BackwardResult
    labels : mapping
        Contender key to label.
    missing : mapping
        Contender key to the reason why it was not tried at all.
    command : str
        The command line.
    """

    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    results: tuple[BackwardResult, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def label(self, contender: str) -> str:
        """Name of a contender in tables."""
        return self.labels.get(contender, contender)

    def mean_over(self, other: str, what: str = BACKWARD, contender: str = OURS) -> float | None:
        """Geometric mean of ratios over the headline shapes."""
        ratios = (result.over(other, what, contender) for result in self.results if result.shape.plain)
        return geometric_mean(ratio for ratio in ratios if ratio is not None)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a shape."""
        others = [key for key in OTHERS if key not in self.missing]
        over = [f"over {self.label(key)}" for key in others]
        packed = any(result.shape.packed for result in self.results)
        header = ["shape", "backward", *over, "deterministic", "of backward", *["over dense"] * packed, BOTH, *over]
        return header, [self._line(result, others, packed=packed) for result in self.results]

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(*self.table())

    def notes(self) -> list[str]:
        """Means, and contenders that were not timed, with reasons."""
        found = []
        for key in _WITH_MEANS:
            mean = self.mean_over(key)
            if mean is not None:
                found.append(f"backward / {self.label(key)}: geometric mean {mean:.3f}×")
        found += [f"not run: {self.label(key)}: {reason}" for key, reason in self.missing.items()]
        return found + [
            f"{self.label(e.contender)}, {e.layout}, {e.what}, {result.shape.long_name}: {e.reason}"
            for result in self.results
            for e in result.entries
            if e.reason
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        entries = [(result, entry) for result in self.results for entry in result.entries]
        return document(
            "backward",
            protocol="interleaved",
            command=self.command,
            environment=self.environment,
            rows=[self._row(result, entry) for result, entry in entries],
            ceilings={"bf16_matmul_8192_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            missing=dict(self.missing),
            labels=dict(self.labels),
            geometric_mean_ratio={key: self.mean_over(key) for key in _WITH_MEANS},
            samples=[samples_of(entry.timing) for _, entry in entries],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def _line(self, result: BackwardResult, others: list[str], *, packed: bool) -> list[str]:
        return [
            result.shape.long_name,
            _speed(result, OURS, BACKWARD),
            *(_ratio(result.over(key)) for key in others),
            _speed(result, DETERMINISTIC, BACKWARD),
            _ratio(result.over(OURS, contender=DETERMINISTIC)),
            *[_ratio(result.over(DENSE))] * packed,
            _speed(result, OURS, BOTH),
            *(_ratio(result.over(key, BOTH)) for key in others),
        ]

    def _row(self, result: BackwardResult, entry: BackwardEntry) -> dict[str, Any]:
        shape = result.shape.dense_twin() if entry.contender == DENSE else result.shape
        us = None if entry.timing is None else entry.timing.median_us
        best = entry.timing is not None and entry is result.best(entry.contender, entry.what)
        ratios = {f"over_{key}": result.over(key, entry.what, entry.contender) for key in _COMPARED} if best else {}
        return {
            "shape": result.shape.long_name,
            "contender": entry.contender,
            "layout": entry.layout,
            "what": entry.what,
            "batch": shape.batch,
            "heads": shape.heads,
            "heads_kv": shape.heads_kv,
            "head_dim": shape.head_dim,
            "seqlen": shape.seqlen,
            "tokens": shape.tokens,
            "causal": shape.causal,
            "window": shape.window,
            "softcap": shape.softcap,
            "packed": shape.packed,
            "generic": shape.generic,
            "headline": shape.plain,
            **timing_facts(entry.timing),
            "tflops": None if us is None else result.flops(entry.contender, entry.what) / us * 1e-6,
            "best_layout": best,
            **dict.fromkeys(f"over_{key}" for key in _COMPARED),
            **ratios,
            "relative_l1": entry.relative_l1,
            "rows_l1": entry.rows_l1,
            "reason": entry.reason,
        }


def _speed(result: BackwardResult, contender: str, what: str) -> str:
    entry, tflops = result.best(contender, what), result.tflops(contender, what)
    if entry is None or entry.timing is None or tflops is None:
        return "–"
    return f"{tflops:.0f} ±{100 * entry.timing.spread:.1f}%"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"
