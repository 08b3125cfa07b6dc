"""Cases of ``omniattn bench options`` beside the plain call and the best other: ratios and marks; no device needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.document import document, samples_of, timing_facts, to_json
from omniattn.bench.option_cases import ALL, PLAIN, Case, Extents, OptionShape
from omniattn.bench.option_contenders import OURS, PLAIN_CALL
from omniattn.bench.report import markdown_table
from omniattn.bench.timing import Timing

#: A case that is slower than so much of the plain call's speed, or of the best other's, is marked.
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.8, 0.95
BELOW_PLAIN, BELOW_BEST = "below plain", "below best"
#: Of a case that this package refuses; that it gets wrong.
UNSUPPORTED, ERROR = "not supported", "error"


@dataclass(frozen=True)
class Entry:
    """One contender on one case.

    Attributes
    ----------
    contender : str
        Key of the contender.
    timing : Timing or None
        None: it could not run or was wrong; ``reason`` says why.
    relative_l1, lse_error : float or None
        Errors of sampled rows against fp64.
    difference : float or None
        Relative L1 difference of all of o from this package's.
    reason : str
        Empty if it ran.
    unsupported : bool
        This package's call, which says so itself.
    """

    contender: str
    timing: Timing | None
    relative_l1: float | None = None
    lse_error: float | None = None
    difference: float | None = None
    reason: str = ""
    unsupported: bool = False


@dataclass(frozen=True)
class CaseResult:
    """All contenders on one case of one shape; the plain call of the shape ran in the same rounds.

    Attributes
    ----------
    shape : OptionShape
    case : Case
    entries : tuple of Entry
    """

    shape: OptionShape
    case: Case
    entries: tuple[Entry, ...]

    def us(self, contender: str) -> float | None:
        """Median of a contender."""
        found = (entry.timing for entry in self.entries if entry.contender == contender and entry.timing is not None)
        return next((timing.median_us for timing in found), None)

    @functools.cached_property
    def extents(self) -> Extents:
        """Sizes and pairs."""
        return Extents.of(self.case, self.shape)

    @functools.cached_property
    def plain_extents(self) -> Extents:
        """Those of the plain call."""
        return Extents.of(Case(PLAIN), self.shape)

    @property
    def share(self) -> float:
        """Pairs that count, as a fraction of the plain call's."""
        return self.extents.pairs / self.plain_extents.pairs

    def tflops(self, contender: str) -> float | None:
        """TFLOP/s of the pairs that count."""
        found = self.us(contender)
        of = self.plain_extents if contender == PLAIN_CALL else self.extents
        return None if found is None else of.flops / found * 1e-6

    @property
    def over_plain(self) -> float | None:
        """This package's speed per pair that counts, relative to the plain call's."""
        own, plain = self.us(OURS), self.us(OURS if self.case.name == PLAIN else PLAIN_CALL)
        return None if own is None or plain is None else plain * self.share / own

    @property
    def best(self) -> str | None:
        """Key of the fastest other contender."""
        times = {
            entry.contender: entry.timing.median_us
            for entry in self.entries
            if entry.contender not in (OURS, PLAIN_CALL) and entry.timing is not None
        }
        return min(times, key=lambda key: times[key], default=None)

    @property
    def over_best(self) -> float | None:
        """This package's speed relative to `best`."""
        own, best = self.us(OURS), None if self.best is None else self.us(self.best)
        return None if own is None or best is None else best / own

    @property
    def marks(self) -> list[str]:
        """What is to be said of it: no time and why, or what is slow about it."""
        own = self._own
        if own is not None and own.reason:
            return [UNSUPPORTED if own.unsupported else ERROR]
        found = []
        if self.over_plain is not None and self.over_plain < LEAST_OF_PLAIN:
            found.append(BELOW_PLAIN)
        if self.over_best is not None and self.over_best < LEAST_OF_BEST:
            found.append(BELOW_BEST)
        return found

    @property
    def failed(self) -> bool:
        """Whether this package was wrong, or refused it for another reason than that it is not supported."""
        return ERROR in self.marks

    @property
    def _own(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.contender == OURS), None)


@dataclass(frozen=True)
class OptionReport:
    """All cases of one run.

    Attributes
    ----------
    precision : {"exact", "int8", "int4", "fp8"}
        Of this package's calls, the plain one too.
    environment : dict
    matmul_tflops, copy_tb_per_s : float
        Ceilings measured in the same run.
    results : tuple of CaseResult
    labels : mapping
        Contender key to label.
    missing : mapping
        Contender key to the reason why it was not tried at all.
    command : str
        The command line.
    """

    precision: str
    environment: dict[str, str]
    matmul_tflops: float
    copy_tb_per_s: float
    results: tuple[CaseResult, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def label(self, contender: str) -> str:
        """Name of a contender in tables."""
        return self.labels.get(contender, contender)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: one row a case."""
        header = ["shape", "case", "µs", "TFLOP/s", "pairs", "over plain", "best other", "µs", "over it", "mark"]
        return header, [self._line(result) for result in self.results]

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(*self.table())

    def notes(self) -> list[str]:
        """Contenders that were not timed, with reasons."""
        found = [f"not run: {self.label(key)}: {reason}" for key, reason in self.missing.items()]
        return found + [
            f"{self.label(entry.contender)}, {result.case.name}, {result.shape.long_name}: {entry.reason}"
            for result in self.results
            for entry in result.entries
            if entry.reason
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON (`document`)."""
        entries = [(result, entry) for result in self.results for entry in result.entries]
        return document(
            "options",
            protocol="interleaved",
            command=self.command,
            environment=self.environment,
            rows=[self._row(result, entry) for result, entry in entries],
            precision=self.precision,
            ceilings={"bf16_matmul_8192_tflops": self.matmul_tflops, "copy_tb_per_s": self.copy_tb_per_s},
            limits={BELOW_PLAIN: LEAST_OF_PLAIN, BELOW_BEST: LEAST_OF_BEST},
            missing=dict(self.missing),
            labels=dict(self.labels),
            samples=[samples_of(entry.timing) for _, entry in entries],
        )

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return to_json(self.to_dict())

    def _line(self, result: CaseResult) -> list[str]:
        timing = next((entry.timing for entry in result.entries if entry.contender == OURS), None)
        best = result.best
        return [
            result.shape.long_name,
            result.case.name,
            "–" if timing is None else f"{timing.median_us:.1f} ±{100 * timing.spread:.1f}%",
            _number(result.tflops(OURS), "{:.0f}"),
            counted(result.case.counted, result.share),
            _number(result.over_plain, "{:.2f}×"),
            "–" if best is None else self.label(best),
            _number(None if best is None else result.us(best), "{:.1f}"),
            _number(result.over_best, "{:.2f}×"),
            ", ".join(result.marks),
        ]

    def _row(self, result: CaseResult, entry: Entry) -> dict[str, Any]:
        own, plain = entry.contender == OURS, entry.contender == PLAIN_CALL
        extents = result.plain_extents if plain else result.extents
        best = result.best if own else None
        return {
            "shape": result.shape.long_name,
            "case": result.case.name,
            "contender": entry.contender,
            "batch": result.shape.batch,
            "heads": result.shape.heads,
            "head_dim": result.shape.head_dim,
            "seqlen_q": extents.seqlen_q,
            "seqlen_k": extents.seqlen_k,
            **timing_facts(entry.timing),
            "tflops": result.tflops(entry.contender),
            "pairs": ALL if plain else result.case.counted,
            "share_of_plain_pairs": 1.0 if plain else result.share,
            "ratio_to_plain": result.over_plain if own else None,
            "best_other": best,
            "best_other_us": None if best is None else result.us(best),
            "ratio_to_best": result.over_best if own else None,
            "marks": ", ".join(result.marks) if own else "",
            "relative_l1": entry.relative_l1,
            "lse_error": entry.lse_error,
            "difference": entry.difference,
            "reason": entry.reason,
        }


def counted(pairs: str, share: float) -> str:
    """A cell: which pairs count, and how many of the plain call's they are."""
    return pairs if share == 1.0 else f"{pairs}, {share:.2f}"


def _number(value: float | None, template: str) -> str:
    return "–" if value is None else template.format(value)
