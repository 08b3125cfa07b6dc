"""The committed table of compiled rows, ``build_tools/compiled.csv``: what the compiler said of each for each target.

Compilation is reproducible, so a row whose digest (of everything that the compiler sees) stands in the table need not
be compiled to know its registers and spills, or that it compiles at all. An entry with another digest is stale.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from build_tools.jobs import ROOT, BuildError, Job
from build_tools.objects import Compiled, write_atomic

#: Where it lies in a checkout.
FILE = "build_tools/compiled.csv"
#: Hexadecimal digits of digests: enough to tell apart what nobody forges.
_DIGITS = 16


class Line(NamedTuple):
    """What the compiler said of one row for one target.

    Attributes
    ----------
    key : str
        How the digest of all that it saw begins.
    registers, smem_static_bytes, spill_bytes, size : int
        Per thread; per CTA; per thread; of the cubin, bytes.
    sha256 : str
        How that of the cubin begins.
    """

    key: str
    registers: int
    smem_static_bytes: int
    spill_bytes: int
    size: int
    sha256: str


class Table(dict[tuple[str, str], Line]):
    """Lines by (arch, name of the row)."""

    @classmethod
    def load(cls, root: Path = ROOT) -> Table:
        """Read the table of a checkout; empty where there is none. Raises BuildError if it is no such table."""
        table = cls()
        path = root / FILE
        if not path.exists():
            return table
        rows = csv.reader(io.StringIO(path.read_text(encoding="utf-8")))
        if next(rows, None) != ["arch", "name", *Line._fields]:
            raise BuildError(f"{path}: expected a first line arch,name,{','.join(Line._fields)}")
        for row in rows:
            try:
                arch, name, key, registers, static, spills, size, sha256 = row
                table[arch, name] = Line(key, int(registers), int(static), int(spills), int(size), sha256)
            except ValueError:
                raise BuildError(
                    f"{path}:{rows.line_num}: expected eight columns as in the first line, received {','.join(row)!r}; "
                    "of a conflict take either side, then run python -m build_tools.kernels --changed"
                ) from None
        return table

    def save(self, root: Path = ROOT) -> None:
        """Write it, sorted."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["arch", "name", *Line._fields])
        writer.writerows([*key, *line] for key, line in sorted(self.items()))
        write_atomic(root / FILE, text.getvalue().encode())

    def is_current(self, job: Job) -> bool:
        """Whether the row was compiled as it is today."""
        line = self.get((job.arch, job.spec.name))
        return line is not None and line.key == job.key[:_DIGITS]

    def note(self, job: Job, built: Compiled) -> None:
        """Take up what the compiler made."""
        self[job.arch, job.spec.name] = line_of(job, built.entry)

    def keep_only(self, jobs: Iterable[Job]) -> None:
        """Drop rows that no longer exist."""
        wanted = {(job.arch, job.spec.name) for job in jobs}
        for key in [key for key in self if key not in wanted]:
            del self[key]

    def spills_more(self, job: Job, spill_bytes: int) -> str:
        """How a row spills more registers than it did; empty if it does not. A row that is not there did not spill."""
        line = self.get((job.arch, job.spec.name))
        before = 0 if line is None else line.spill_bytes
        if spill_bytes <= before:
            return ""
        return (
            f"{job}: spills {spill_bytes} bytes of registers, {before} in {FILE}; use smaller tiles or fewer live "
            "values, or where that was measured and is harmless: python -m build_tools.kernels --changed "
            "--accept-spills (--table in place of --changed for all rows of all targets)"
        )

    def contradiction(self, job: Job, built: Compiled) -> str:
        """How a result differs from a current entry; empty if it does not."""
        told, found = self[job.arch, job.spec.name], line_of(job, built.entry)
        if told == found:
            return ""
        parts = [
            f"{field} {getattr(told, field)} in {FILE}, {getattr(found, field)} now"
            for field in Line._fields
            if getattr(told, field) != getattr(found, field)
        ]
        return (
            f"{job}: the same code compiles to something else: {'; '.join(parts)}; if its line in {FILE} is wrong, "
            "delete the line and run python -m build_tools.kernels --changed"
        )


def line_of(job: Job, entry: Mapping[str, Any]) -> Line:
    """The table's line for a result."""
    return Line(
        job.key[:_DIGITS], entry["registers"], entry["smem_static_bytes"], entry["spill_bytes"], entry["size"],
        entry["sha256"][:_DIGITS],
    )  # fmt: skip
