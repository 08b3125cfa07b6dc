"""Measured tables and figures of the documents, from committed results: ``python -m build_tools.pages [--write]``.

``--measure NAME ...`` runs the commands of result files, on the machine with the GPU, and writes the files.

Result files are what ``omniattn bench ... --json`` prints, kept as ``docs/performance/results/NAME.json``. A page says
where a table stands, and this module fills it::

    <!-- table: forward -->
    <!-- end -->

A single number within a sentence is ``<!-- value: forward_mean -->1.22<!-- end -->``. What was measured once and is no
result file is a table of a dated record (`build_tools.tuning_records`), the first one of the record "Result" by::

    <!-- record: index_topk "Result" 1 -->
    <!-- end -->

Without ``--write`` nothing is
changed, and the exit code is 1 where a page or a figure is not what its results give.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from build_tools import guide_figures, tuning_records
from build_tools.page_parts import NOT_MEASURED, PageError, Report
from build_tools.page_tables import FIGURES, PARTS, SOURCES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("docs/performance/results")
SCHEMA = 1

_MARKED = re.compile(
    r"""(?P<begin><!--\ (?P<kind>table|value|record):\ (?P<name>\w+)(?:\ "(?P<title>[^"\n]+)"\ (?P<number>\d+))?\ -->)
    .*?<!--\ end\ -->""",
    re.DOTALL | re.VERBOSE,
)


def results(root: Path = ROOT) -> dict[str, Report]:
    """Committed reports by name.

    Raises
    ------
    PageError
        A file that no source is known for, or that is of another bench or schema.
    """
    found: dict[str, Report] = {}
    for path in sorted((root / RESULTS).glob("*")):
        if path.name == "README.md":
            continue
        if path.suffix != ".json" or path.stem not in SOURCES:
            raise PageError(f"{path.name}: not one of {', '.join(SOURCES)} with .json")
        report = json.loads(path.read_text(encoding="utf-8"))
        expected = SOURCES[path.stem].bench
        if (report.get("schema"), report.get("bench")) != (SCHEMA, expected):
            raise PageError(f"{path.name}: schema {SCHEMA} of {expected!r} expected, {report.get('schema')} of "
                            f"{report.get('bench')!r} found")  # fmt: skip
        found[path.stem] = report
    missing = [name for name, source in SOURCES.items() if source.required and name not in found]
    if found and missing:
        raise PageError(f"results of {', '.join(found)} without those of {', '.join(missing)}")
    return found


def filled(text: str, reports: Mapping[str, Report], root: Path = ROOT) -> str:
    """``text`` with every marked part made from the reports, or from the records below ``root``.

    Raises
    ------
    PageError
        A marker names nothing that is known, or has no end.
    """
    if len(re.findall(r"<!-- (?:table|value|record): ", text)) != len(_MARKED.findall(text)):
        raise PageError("a marker that is not complete, or without its end")

    def put(match: re.Match[str]) -> str:
        begin, kind, name = match["begin"], match["kind"], match["name"]
        if (kind == "record") != (match["title"] is not None):
            raise PageError(f'{begin}: expected <!-- record: NAME "TITLE" N -->, or a name alone')
        if kind == "record":
            try:
                made = tuning_records.result(name, match["title"], int(match["number"]), root)
            except tuning_records.RecordError as error:
                raise PageError(str(error)) from error
        elif name not in PARTS:
            raise PageError(f"no table or value {name!r}: {', '.join(PARTS)}")
        elif all(source in reports for source in PARTS[name].sources):
            made = PARTS[name].make(*(reports[source] for source in PARTS[name].sources))
        else:
            made = "–" if kind == "value" else NOT_MEASURED
        return f"{begin}{made}<!-- end -->" if kind == "value" else f"{begin}\n{made}\n<!-- end -->"

    return _MARKED.sub(put, text)


def expected(root: Path = ROOT) -> dict[Path, str]:
    """What every page with markers, and every figure, has to be: path below ``root`` to text."""
    reports = results(root)
    made: dict[Path, str] = {}
    for path in [root / "README.md", root / "CHANGELOG.md", *sorted(root.glob("docs/**/*.md")),
                 *sorted(root.glob("examples/**/*.md"))]:  # fmt: skip
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        try:
            made[path.relative_to(root)] = filled(text, reports, root)
        except PageError as error:
            raise PageError(f"{path.relative_to(root).as_posix()}: {error}") from error
    for figure in FIGURES:
        if all(source in reports for source in figure.sources):
            made[figure.path] = figure.make(*(reports[source] for source in figure.sources))
    if (root / guide_figures.CHOICE.parent).exists():
        made[guide_figures.CHOICE] = guide_figures.choice()
    return made


def differences(root: Path = ROOT) -> list[str]:
    """Pages and figures that are not what their results give."""
    wrong = []
    for path, text in expected(root).items():
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text:
            wrong.append(path.as_posix())
    return wrong


def write(root: Path = ROOT) -> list[str]:
    """Renew pages and figures; return what has changed."""
    changed = differences(root)
    for path, text in expected(root).items():
        if path.as_posix() in changed:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    return changed


def command_of(name: str, path: Path) -> tuple[list[str], dict[str, str]]:
    """What writes a result file to ``path``: program with arguments, and variables of the environment."""
    words = shlex.split(SOURCES[name].command)
    variables = {}
    while "=" in words[0]:
        key, _, value = words.pop(0).partition("=")
        variables[key] = value
    program = {"omniattn": [sys.executable, "-m", "omniattn.cli"], "python": [sys.executable]}[words[0]]
    # What a table shows of a run is the command without the file, so that the file may lie anywhere.
    return [*program, *(word for word in words[1:] if word != "--json"), "--out", str(path)], variables


def measure(names: Sequence[str], folder: Path) -> list[str]:
    """Run the commands of result files one after the other; return the names of those that failed."""
    failed = []
    for name in names:
        begin = time.monotonic()
        made = folder / f"{name}.json.new"
        command, variables = command_of(name, made)
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        print(f"{name}: exit code {done.returncode}, {time.monotonic() - begin:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
            made.unlink(missing_ok=True)  # a run that failed may have written what it had
            print(done.stdout[-2000:], flush=True)
        else:
            made.replace(folder / f"{name}.json")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Renew or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew pages and figures")
    parser.add_argument("--measure", nargs="+", choices=tuple(SOURCES), metavar="NAME", help="write these result files")
    parser.add_argument("--folder", type=Path, help=f"where --measure writes them (default: {RESULTS.as_posix()})")
    options = parser.parse_args(arguments)
    if options.folder is not None and not options.measure:
        parser.error("--folder: expected with --measure only")
    if options.measure and measure(options.measure, (options.folder or ROOT / RESULTS).resolve()):
        return 1
    try:
        names = write() if options.write else differences()
        absent = [name for name in SOURCES if name not in results()]
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    for name in names:
        print(f"{name}: {'renewed' if options.write else 'out of date (python -m build_tools.pages --write)'}")
    for name in absent:
        path = (RESULTS / f"{name}.json").as_posix()
        print(f"{path} is not there: {SOURCES[name].command} --out {path}")
    return 1 if names and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
