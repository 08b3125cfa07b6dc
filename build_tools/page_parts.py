"""What generated parts of the documents are made with: result files, Markdown tables, the line below a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
Row = Mapping[str, Any]


#: Of prose in the documents.
COLUMNS = 100
#: What fills a part that nothing has measured.
NOT_MEASURED = "*Not measured yet.*"


class PageError(Exception):
    """A page or a result file is not as it has to be; the text says which and how."""


@dataclass(frozen=True)
class Source:
    """A result file.

    Attributes
    ----------
    command : str
        What measures it.
    bench : str
        The report's own name for what it is.
    required : bool
        Other result files must not be committed without this one.
    """

    command: str
    bench: str
    required: bool = True


@dataclass(frozen=True)
class Part:
    """A generated part of a page: the result files it needs, in the order of ``make``'s arguments."""

    sources: tuple[str, ...]
    make: Callable[..., str]


@dataclass(frozen=True)
class Figure:
    """A generated SVG file.

    Attributes
    ----------
    path : Path
        Below the checkout.
    sources : tuple of str
        The result files it needs, in the order of ``make``'s arguments.
    make : callable
    """

    path: Path
    sources: tuple[str, ...]
    make: Callable[..., str]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float | None, digits: int) -> str:
    """A cell; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    """A cell: how many times as fast."""
    return "–" if value is None else f"{value:.2f}×"


def anchor(report: Report) -> str:
    """Name of what ratios are relative to."""
    key = report["anchor"]
    return {"cudnn": "cuDNN", "fa2": "FlashAttention-2"}.get(key, str(report.get("labels", {}).get(key, key)))


def value_of(row: Row | None, key: str) -> float | None:
    """A number of a row, None where there is no row."""
    return None if row is None else row[key]


def below(table: str, report: Report, *notes: str) -> str:
    """A table, notes, and what they were measured with."""
    return "\n\n".join([table, *notes, provenance(report)])


def provenance(*reports: Report) -> str:
    """What stands below a table: device, software, date, protocol and commands; a sentence each different run."""
    commands: dict[str, list[str]] = {}
    for report in reports:
        commands.setdefault(conditions(report), []).append(f"`{report['command']}`")
    text = " ".join(f"{conditions}. Measured by {', '.join(names)}." for conditions, names in commands.items())
    return textwrap.fill(f"<sub>{text}</sub>", COLUMNS, break_long_words=False, break_on_hyphens=False)


def conditions(report: Report) -> str:
    """Device, software, date and protocol of a run."""
    facts = report["environment"]
    versions = {"driver": "driver", "cuda": "CUDA", "torch": "torch", "cudnn": "cuDNN"}
    if "driver" not in facts:  # no GPU takes part
        versions = {"numpy": "NumPy", "python": "Python"}
    known = [
        f"{text} {_version(facts[key])}" for key, text in versions.items() if facts.get(key, "unknown") != "unknown"
    ]
    how = {
        "interleaved": "cold L2, contenders interleaved, medians",
        "sustained": f"each contender alone under load, {report.get('sustained_seconds')} s",
        "accuracy": "errors against double precision",
        "perplexity": "perplexity of SmolLM2-135M",
        "training": "one training after the other, from the same seed",
        "context_parallel": "contenders in turn, the longest time of all GPUs, medians",
        "engine": "bursts of requests, one after the other",
        "wall": "wall time of whole calls, medians",
    }.get(report["protocol"], "medians")
    return f"{', '.join([facts['device'], *known])}; {report['date']}; {how}"


def _version(text: str) -> str:
    """cuDNN's number as it is written: 91900 is 9.19.0."""
    if not text.isdigit() or len(text) < 4:
        return text
    whole, size = int(text), 10000 if len(text) > 4 else 1000
    return f"{whole // size}.{whole % size // 100}.{whole % 100}"
