"""Terminal output of the commands: tables and progress with rich, which is imported when the first one is drawn."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from omniattn.errors import ArgumentError, OmniattnError

#: Of a terminal of unknown width, which is a pipe mostly.
_PIPE_COLUMNS: ContextVar[int] = ContextVar("_PIPE_COLUMNS", default=160)
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class CannotRunError(OmniattnError):
    """The command cannot run in this environment; the message says what is missing. Exit code 2."""


def require_rich() -> None:
    """Raise :class:`CannotRunError` unless rich can be imported."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise CannotRunError(
            'tables and progress need rich, which is not installed: pip install "omniattn[cli]" '
            "(with --json the command runs without it)"
        ) from error


def require_matplotlib(path: Path) -> None:
    """Raise :class:`CannotRunError` unless matplotlib can be imported, :class:`ArgumentError` for an unknown suffix.

    Called before the work starts, so that a long benchmark does not end in an error that could have come first.
    """
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ArgumentError("--plot", f"a file name ending in {', '.join(_PLOT_SUFFIXES)}", repr(str(path)))
    if not path.resolve().parent.is_dir():
        raise ArgumentError("--plot", "a file in an existing folder", repr(str(path)))
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CannotRunError('--plot needs matplotlib, which is not installed: pip install "omniattn[cli]"') from error


def print_json(data: Any) -> None:
    """Write ``data`` to standard output as indented JSON."""
    print(json.dumps(data, indent=2))


def _console() -> Any:
    require_rich()
    from rich.console import Console

    # Into a pipe rich assumes 80 columns and cuts cells off; broad tables are then better than wrong ones.
    width = None if sys.stdout.isatty() else shutil.get_terminal_size(fallback=(_PIPE_COLUMNS.get(), 50)).columns
    return Console(width=width, highlight=False)


@contextmanager
def pipe_columns(columns: int) -> Iterator[None]:
    """Within the block, tables that go into a pipe are as wide."""
    token = _PIPE_COLUMNS.set(columns)
    try:
        yield
    finally:
        _PIPE_COLUMNS.reset(token)


def width() -> int:
    """Columns of the terminal."""
    return int(_console().width)


def print_paragraph(text: str) -> None:
    """Write text that is wrapped at the terminal's width, behind its first line indented."""
    print_line(textwrap.fill(text, width(), subsequent_indent="  ", break_on_hyphens=False))


def print_line(text: str = "") -> None:
    """Write one line; square brackets are text, not markup."""
    _console().print(text, markup=False, soft_wrap=True)


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    wrapped: bool = False,
) -> None:
    """Draw a table.

    Parameters
    ----------
    title : str
    header : sequence of str
        All empty: the table has none.
    rows : sequence of sequence of str
    numeric : sequence of int
        Columns that are aligned to the right.
    wrapped : bool
        Every column may take several lines, with rules between the rows. Otherwise the first one keeps to one line.
    """
    console = _console()
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title), title_justify="left", header_style="bold", show_header=any(header), show_lines=wrapped
    )
    for index, name in enumerate(header):
        table.add_column(
            Text(name),
            justify="right" if index in numeric else "left",
            overflow="fold",
            no_wrap=index == 0 and bool(name) and not wrapped,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


#: Eighths of a block, from one on.
_EIGHTHS = "▏▎▍▌▋▊▉"
_BAR_COLUMNS = 36
_BAR_STYLES = ("yellow", "cyan", "green", "magenta")


def bar(share: float, columns: int, *, blocks: bool = True) -> str:
    """A bar of text for a share from 0 to 1 of so many columns; of signs that every encoding has without ``blocks``."""
    share = min(max(share, 0.0), 1.0)
    if not blocks:
        return "#" * max(1, round(share * columns))
    whole, rest = divmod(max(1, round(share * columns * 8)), 8)
    return "█" * whole + (_EIGHTHS[rest - 1] if rest else "")


def print_bars(
    title: str, measures: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str]]]]
) -> None:  # fmt: skip
    """Draw a picture of horizontal bars, one for each measure beside each other.

    Parameters
    ----------
    title : str
    measures : sequence of str
        What the bars of a row show.
    rows : sequence of (str, sequence of (float, str))
        A name, and for each measure the bar's share of the longest one and the number that stands behind it.
    """
    console = _console()
    from rich.table import Table
    from rich.text import Text

    names = max(len(name) for name, _ in rows)
    numbers = max(len(number) for _, bars in rows for _, number in bars)
    room = (int(console.width) - names - 2) // len(measures) - numbers - 6
    columns = max(1, min(_BAR_COLUMNS, room))
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in measures:
        table.add_column(Text(name), min_width=columns + numbers + 1, no_wrap=True)
    blocks = str(console.encoding).lower().startswith("utf")
    for name, bars in rows:
        cells = [
            Text.assemble((bar(share, columns, blocks=blocks), _BAR_STYLES[i % len(_BAR_STYLES)]), " ", number)
            for i, (share, number) in enumerate(bars)
        ]
        table.add_row(Text(name), *cells)
    console.print(table)


class Progress(Protocol):
    """What a command may do with a running progress display."""

    def step(self, text: str) -> None:
        """One more item begins; ``text`` says which."""


class _Silent:
    def step(self, text: str) -> None:
        return


class _Bar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task
        self._started = False

    def step(self, text: str) -> None:
        self._progress.update(self._task, description=text, advance=1 if self._started else 0)
        self._started = True


@contextmanager
def progress(total: int, *, enabled: bool) -> Iterator[Progress]:
    """Show a progress bar on standard error while the block runs.

    Parameters
    ----------
    total : int
        Number of steps.
    enabled : bool
        False, or a standard error that is no terminal: nothing is shown.
    """
    if not enabled or not sys.stderr.isatty():
        yield _Silent()
        return
    require_rich()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as display:
        yield _Bar(display, display.add_task("", total=total))
