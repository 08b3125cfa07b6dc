"""Cases of ``omniattn bench few`` and its kin beside the best other and the marks: ratios; no device needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.document import document, samples_of, timing_facts, to_json
from omniattn.bench.option_contenders import OURS
from omniattn.bench.option_report import BELOW_BEST, ERROR, LEAST_OF_BEST, UNSUPPORTED, Entry
from omniattn.bench.report import markdown_table
from omniattn.bench.shape_cases import ShapeCase
from omniattn.bench.shape_contenders import CUDNN, WAYS
from omniattn.bench.timing import Timing

#: cuDNN on the shape that a mark is scaled by.
REFERENCE = "cudnn_reference"
BELOW_FA3 = "below FA3"
#: Contenders that others are not compared with.
_OWN = {OURS, REFERENCE, *WAYS}


@dataclass(frozen=True)
class ShapeResult:
    """All contenders on one case.

    Attributes
    ----------
    case : ShapeCase
    entries : tuple of Entry
    kernel : str
        What `explain` says of this package's call; empty where it refuses it.
    launches, why : tuple of str
        Kernels of the call in order; reasons of the choice.
    """

    case: ShapeCase
    entries: tuple[Entry, ...]
    kernel: str = ""
    launches: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    def timing(self, contender: str) -> Timing | None:
        """Times of a contender."""
        return next((entry.timing for entry in self.entries if entry.contender == contender), None)

    def us(self, contender: str) -> float | None:
        """Median of a contender."""
        timing = self.timing(contender)
        return None if timing is None else timing.median_us

    def tflops(self, contender: str) -> float | None:
        """TFLOP/s of visible pairs."""
        us = self.us(contender)
        return None if us is None or contender == REFERENCE else self.case.flops / us * 1e-6

    def gb_per_s(self, contender: str) -> float | None:
        """GB/s of the arrays of the call, each read or written once."""
        us = self.us(contender)
        return None if us is None or contender == REFERENCE else self.case.bytes / us * 1e-3

    @property
    def best(self) -> str | None:
        """Key of the fastest other contender."""
        times = {
            entry.contender: entry.timing.median_us
            for entry in self.entries
            if entry.contender not in _OWN and entry.timing is not None
        }
        return min(times, key=lambda key: times[key], default=None)

    @property
    def over_best(self) -> float | None:
        """This package's speed relative to `best`."""
        return self._over(None if self.best is None else self.us(self.best))

    @property
    def fa3_us(self) -> float | None:
        """FlashAttention-3's time, scaled by cuDNN's of this run."""
        mark = self.case.mark
        return (
            None if mark is None else mark.scaled_us(self.case.flops, self.us(REFERENCE if mark.reference else CUDNN))
        )

    @property
    def over_fa3(self) -> float | None:
        """This package's speed relative to `fa3_us`."""
        return self._over(self.fa3_us)

    def _over(self, other: float | None) -> float | None:
        own = self.us(OURS)
        return None if own is None or other is None else other / own

    @property
    def marks(self) -> list[str]:
        """What is to be said of it: no time and why, or beside what it is slow."""
        own = next((entry for entry in self.entries if entry.contender == OURS), None)
        if own is not None and own.reason:
            return [UNSUPPORTED if own.unsupported else ERROR]
        ratios = {BELOW_BEST: self.over_best, BELOW_FA3: self.over_fa3}
        return [text for text, found in ratios.items() if found is not None and found < LEAST_OF_BEST]

    @property
    def failed(self) -> bool:
        """Whether this package was wrong, or refused it for another reason than that it is not supported."""
        return ERROR in self.marks


@dataclass(frozen=True)
class ShapeReport:
    """All cases of one run.

    Attributes
    ----------
    bench : str
        Key of `shape_cases.SHAPE_CASES`.
    environment : dict
    matmul_tflops, copy_tb_per_s : float
        Ceilings measured in the same run.
    results : tuple of ShapeResult
    labels : mapping
        Contender key to label.
    missing : mapping
        Contender key to the reason why it was not tried at all.
    command : str
        The command line.
    """

    bench: str
    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    results: tuple[ShapeResult, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def label(self, contender: str) -> str:
        """Name of a contender in tables."""
        return self.labels.get(contender, contender)

    def decides(self, case: ShapeCase) -> str:
        """What a case's least time follows from, by the ceilings: ``"arithmetic"`` or ``"bytes"``."""
        arithmetic = case.flops / self.matmul_tflops > case.bytes / self.copy_tb_per_s
        return "arithmetic" if arithmetic else "bytes"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a case."""
        ways = [way for way in WAYS if any(result.timing(way) is not None for result in self.results)]
        header = ["case", "kernel", "µs", "speed", *(f"on {way}, µs" for way in ways), "best other", "µs", "over it",
                  "over FA3 (scaled)", "mark"]  # fmt: skip
        return header, [self._line(result, ways) for result in self.results]

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(*self.table())

    def notes(self) -> list[str]:
        """Contenders that were not timed, with reasons."""
        found = [f"not run: {self.label(key)}: {reason}" for key, reason in self.missing.items()]
        return found + [
            f"{self.label(entry.contender)}, {result.case.long_name}: {entry.reason}"
            for result in self.results
            for entry in result.entries
            if entry.reason
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        entries = [(result, entry) for result in self.results for entry in result.entries]
        return document(
            self.bench,
            protocol="interleaved",
            command=self.command,
            environment=self.environment,
            rows=[self._row(result, entry) for result, entry in entries],
            ceilings={"bf16_matmul_8192_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            limits={BELOW_BEST: LEAST_OF_BEST, BELOW_FA3: LEAST_OF_BEST},
            missing=dict(self.missing),
            labels=dict(self.labels),
            why={result.case.long_name: list(result.why) for result in self.results},
            samples=[samples_of(entry.timing) for _, entry in entries],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def _line(self, result: ShapeResult, ways: list[str]) -> list[str]:
        timing, best = result.timing(OURS), result.best
        return [
            result.case.long_name,
            result.kernel or "–",
            "–" if timing is None else f"{timing.median_us:.1f} ±{100 * timing.spread:.1f}%",
            self._speed(result),
            *(_number(result.us(way), "{:.1f}") for way in ways),
            "–" if best is None else self.label(best),
            _number(None if best is None else result.us(best), "{:.1f}"),
            _number(result.over_best, "{:.2f}×"),
            _number(result.over_fa3, "{:.2f}×"),
            ", ".join(result.marks),
        ]

    def _speed(self, result: ShapeResult) -> str:
        if self.decides(result.case) == "bytes":
            return _number(result.gb_per_s(OURS), "{:.0f} GB/s")
        return _number(result.tflops(OURS), "{:.0f} TFLOP/s")

    def _row(self, result: ShapeResult, entry: Entry) -> dict[str, Any]:
        own, case, best = entry.contender == OURS, result.case, result.best
        return {
            "shape": case.long_name,
            "contender": entry.contender,
            "batch": len(case.lengths_q),
            "heads": case.heads,
            "heads_kv": case.heads // case.group,
            "head_dim": case.head_dim,
            "head_dim_v": case.head_dim_v,
            "seqlen_q": max(case.lengths_q),
            "seqlen_k": max(case.lengths_k),
            "kernel": result.kernel if own else None,
            "launches": ", ".join(result.launches) if own else None,
            **timing_facts(entry.timing),
            "tflops": result.tflops(entry.contender),
            "gb_per_s": result.gb_per_s(entry.contender),
            "decides": self.decides(case),
            "best_other": best if own else None,
            "best_other_us": result.us(best) if own and best is not None else None,
            "ratio_to_best": result.over_best if own else None,
            "fa3_scaled_us": result.fa3_us if own else None,
            "ratio_to_fa3_scaled": result.over_fa3 if own else None,
            "marks": ", ".join(result.marks) if own else "",
            "relative_l1": entry.relative_l1,
            "difference": entry.difference,
            "reason": entry.reason,
        }


def _number(value: float | None, template: str) -> str:
    return "–" if value is None else template.format(value)
