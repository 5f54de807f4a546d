"""Print the rows of explained pictures as text, as JSON lines or as CSV, each when it is finished."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.text import Text

from camkit.cli import json_lines, text
from camkit.cli.terminal import TALK, QuietConsole, emit, printer, say
from camkit.errors import CamkitError, InputError, printable

if TYPE_CHECKING:
    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    Row: TypeAlias = Written | WrittenVideo | Failure

Form: TypeAlias = Literal["text", "json", "csv"]
"""How rows are printed."""

_MOST_WITHOUT_BAR = 3
"""Up to this many pictures are explained before a progress bar would be read."""

_COLUMNS = (
    *("source", "status", "target", "label", "score", "probability", "layer", "method", "peak", "box", "detection"),
    *("scale", "file", "error"),
)
"""The columns of the CSV."""


@dataclass
class _Tally:
    """What has been printed so far.

    Attributes:
        code: the exit code.
        explained, failed: the pictures with an explanation, and those with an error.
        images: how many pictures and frames of videos have an explanation.
        empty: the number of maps without heat.
        errors: how many pictures have the same error, without their names.
        first: the first picture with each error.
    """

    code: int = 0
    explained: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    images: int = 0
    empty: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, row: Row) -> bool:
        """Count a row; return whether it is an error that an earlier picture had too."""
        from camkit.scale.video import WrittenVideo
        from camkit.types import Failure

        if isinstance(row, WrittenVideo):
            self.code = max(self.code, InputError.exit_code if row.problem else 0)
            self.explained.add(row.source)
            self.images += row.frames
            return False
        if not isinstance(row, Failure):
            self.images += row.explanation.source not in self.explained
            self.explained.add(row.explanation.source)
            self.empty += row.explanation.status != "ok"
            return False
        self.code = max(self.code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
        self.failed.add(row.source)
        error = _without_name(row)
        self.errors[error] += 1
        self.first.setdefault(error, row.source)
        return self.errors[error] > 1

    @property
    def finished(self) -> int:
        """The number of pictures that are finished."""
        return len(self.explained | self.failed)


class _Lines:
    """A file for the writer of CSV rows, which writes each row at once."""

    def write(self, row: str) -> None:
        """Print a row."""
        emit(row)


def report(rows: Iterator[Row], pictures: int, form: Form, *, with_raw: bool = False) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code.

    As text, an error that several pictures have is printed once and counted below the rows. A summary follows.
    """
    from rich.progress import Progress

    tally, started = _Tally(), time.perf_counter()
    bar = QuietConsole(stderr=True)
    without_bar = pictures <= _MOST_WITHOUT_BAR or TALK.quiet or not bar.is_terminal
    table = csv.DictWriter(_Lines(), _COLUMNS, extrasaction="ignore", lineterminator="")
    if form == "csv":
        table.writeheader()
    with Progress(console=bar, transient=True, disable=without_bar) as progress:
        task = progress.add_task("explaining", total=pictures)
        for row in rows:
            is_repeated = tally.add(row)
            if form == "json":
                emit(json_lines.render(row, with_raw=with_raw))
            elif form == "csv":
                table.writerow(_cells(row.to_dict()))
            elif TALK.verbose or not is_repeated:
                _print_row(row)
            progress.update(task, completed=tally.finished)
    if form == "text" and not TALK.verbose:
        _print_repeated(tally)
    _print_summary(tally, time.perf_counter() - started, form)
    return tally.code


def _print_row(row: Row) -> None:
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    if isinstance(row, Failure):
        printer(stderr=True).print(text.failure(row))
    elif not TALK.quiet:
        printer().print(text.video(row) if isinstance(row, WrittenVideo) else text.row(row))


def _print_repeated(tally: _Tally) -> None:
    """Say how many pictures had an error that was printed for the first of them only."""
    for error, count in tally.errors.items():
        if count > 1:
            more = "1 more picture has" if count == 2 else f"{count - 1} more pictures have"
            first = printable(Path(tally.first[error]).name)
            printer(stderr=True).print(Text(f"{more} the same error as {first}; --verbose lists them", "red"))


def _print_summary(tally: _Tally, seconds: float, form: Form) -> None:
    """Print the last line: below the rows if they are text, else apart from them."""
    failed = len(tally.failed - tally.explained)
    line = f"{len(tally.explained)} explained, {failed} failed, {tally.empty} empty"
    if tally.images:
        line += f"; {tally.images / max(seconds, 1e-9):.3g} pictures a second"
    if form != "text":
        say(line)
    elif not TALK.quiet:
        printer().print(line)


def _without_name(failed: Failure) -> str:
    """Return an error without its picture's name, so that the same error of two pictures is the same text."""
    error = str(failed.error)
    for name in (failed.source, Path(failed.source).name):
        error = error.replace(name, "")
    return error


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a row as a CSV holds them; several numbers are separated by spaces."""
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
