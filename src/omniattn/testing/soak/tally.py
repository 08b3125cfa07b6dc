"""Counts of a soak, and how they are shown."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from omniattn.testing.soak.outcome import FAILED, REFUSED, Outcome

#: Failures that are kept with their texts.
_KEPT = 50


@dataclass
class Count:
    """Problems of one operation and precision."""

    problems: int = 0
    refused: int = 0
    failed: int = 0
    worst: float = 0.0


@dataclass
class Tally:
    """All problems so far.

    Attributes
    ----------
    counts : dict
        By operation and precision.
    reasons : Counter
        Why problems were refused.
    failures : list of Outcome
        The first ones.
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more problem."""
        count = self.counts.setdefault((outcome.operation, outcome.precision), Count())
        count.problems += 1
        if outcome.status == REFUSED:
            count.refused += 1
            self.reasons[outcome.text] += 1
            return
        if outcome.status == FAILED:
            count.failed += 1
            if len(self.failures) < _KEPT:
                self.failures.append(outcome)
        elif not count.worst >= outcome.worst:
            count.worst = outcome.worst

    def total(self, name: str) -> int:
        """Sum of ``problems``, ``refused`` or ``failed``."""
        return sum(getattr(count, name) for count in self.counts.values())

    @property
    def passed(self) -> int:
        """Problems that passed."""
        return self.total("problems") - self.total("refused") - self.total("failed")

    def line(self, seconds: float) -> str:
        """All counts in one line, failures first."""
        parts = [f"{operation} {precision} {count.problems}" for (operation, precision), count in self._sorted()]
        head = f"{int(seconds) // 60}:{int(seconds) % 60:02} {self.total('problems')} problems, "
        return f"{head}{self.total('failed')} failed, {self.total('refused')} refused: {', '.join(parts)}"

    def _sorted(self) -> list[tuple[tuple[str, str], Count]]:
        return sorted(self.counts.items())

    def rows(self) -> list[list[str]]:
        """Rows of a table: operation, precision, problems, refused, failed, worst error of those that passed."""
        return [
            [
                operation,
                precision,
                str(c.problems),
                str(c.refused),
                str(c.failed),
                f"{c.worst:.2f}" if c.problems > c.refused else "–",
            ]
            for (operation, precision), c in self._sorted()
        ]

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = [
            {"operation": operation, "precision": precision, "problems": c.problems, "refused": c.refused,
             "failed": c.failed, "worst": c.worst if math.isfinite(c.worst) else None}
            for (operation, precision), c in self._sorted()
        ]  # fmt: skip
        failures = [
            {"number": f.number, "operation": f.operation, "precision": f.precision, "text": f.text}
            for f in self.failures
        ]
        return {"counts": counts, "refused": dict(self.reasons), "failures": failures}
