"""Print the rows of explained pictures as text, as JSON lines or as CSV, each when it is finished."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.text import Text

from camkit.cli import text
from camkit.cli.terminal import TALK, QuietConsole, emit, printer, say
from camkit.errors import CamkitError, InputError, OutputError, as_cell, printable

if TYPE_CHECKING:
    from camkit.images.listing import Pictures
    from camkit.scale.folder import Result, Run
    from camkit.scale.job import Job
    from camkit.types import Failure

Form: TypeAlias = Literal["text", "json", "csv"]
"""How rows are printed."""

_MOST_WITHOUT_BAR = 3
"""Up to this many pictures are explained before a progress bar would be read."""


@dataclass
class _Tally:
    """What has been printed so far.

    Attributes:
        code: the exit code.
        explained, failed: how many pictures have an explanation, and how many have only errors.
        images: how many pictures and frames of videos have an explanation.
        empty: the number of maps without heat.
        reduced: the number of drawings that are smaller than their pictures.
        errors: how many pictures have the same error, without their names.
        first: the first picture with each error.
    """

    code: int = 0
    explained: int = 0
    failed: int = 0
    images: int = 0
    empty: int = 0
    reduced: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    _source: str | None = None
    _is_explained: bool = False

    def add(self, row: Result) -> bool:
        """Count a row; return whether it is an error that an earlier picture had too.

        The rows of a picture follow each other. One that has both explanations and errors counts as explained.
        """
        from camkit.scale.video import WrittenVideo
        from camkit.types import Failure

        if row.source != self._source:
            self._source, self._is_explained = row.source, False
            self.failed += 1  # until it has an explanation
        if not isinstance(row, Failure):
            if not self._is_explained:
                self._is_explained = True
                self.failed, self.explained = self.failed - 1, self.explained + 1
                self.images += row.frames if isinstance(row, WrittenVideo) else 1
            if isinstance(row, WrittenVideo):
                self.code = max(self.code, InputError.exit_code if row.problem else 0)
                self.empty += row.status != "ok"
            else:
                self.empty += row.explanation.status != "ok"
                self.reduced += row.is_reduced
            return False
        self.code = max(self.code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
        error = _without_name(row)
        self.errors[error] += 1
        self.first.setdefault(error, row.source)
        return self.errors[error] > 1

    @property
    def finished(self) -> int:
        """The number of pictures that are finished."""
        return self.explained + self.failed


class PassProgress:
    """Passes on how many changed pictures the model has seen, for methods of many passes, while a bar can show it."""

    def __init__(self) -> None:
        self.show: Callable[[int, int], None] | None = None

    def __call__(self, done: int, of: int) -> None:
        """Show it, if there is a bar."""
        if self.show is not None:
            self.show(done, of)


def report(rows: Run, job: Job, form: Form, passes: PassProgress, *, with_raw: bool = False) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code.

    If the rows go into a table, only errors are printed as text. An error that several pictures have is printed once
    and counted below the rows. A summary follows.

    Args:
        rows: the rows of the job.
        job: the job; its pictures are counted while they are explained.
        form: how rows are printed.
        passes: gets a bar meanwhile.
        with_raw: whether JSON has the raw maps.
    """
    from camkit.explanation import FIELDS

    tally = _Tally()
    columns = [*(each.name for each in FIELDS), "scale", "file", "error"]
    if form == "csv":
        emit(",".join(columns))
    with_rows = job.table is None or TALK.verbose
    with (
        _saying_what_is_done(tally, rows, job),
        rows,
        _Progress(rows, job.pictures, passes, with_lines=not with_rows) as progress,
    ):
        for row in rows:
            is_repeated = tally.add(row)
            if form == "json":
                values = {name: value for name, value in row.to_dict().items() if with_raw or name != "raw"}
                emit(json.dumps(values, allow_nan=False))  # in ASCII, so that any terminal and pipe can carry it
            elif form == "csv":
                emit(_csv_line(row.to_dict(), columns))
            elif TALK.verbose or not is_repeated:
                _print_row(row, with_rows=with_rows)
            progress.update(tally.finished)
    if form == "text" and not TALK.verbose:
        _print_repeated(tally)
    if tally.reduced:
        drawings = "1 drawing was" if tally.reduced == 1 else f"{tally.reduced} drawings were"
        most = job.drawing.max_side
        side = f"{most} pixel{'s' * (most != 1)}"
        say(f"{drawings} made from pictures reduced to {side} on the longer side; --max-side 0 keeps their size")
    line = summary(tally, progress.seconds, rows, job.table)
    if form != "text":
        say(line)
    elif not TALK.quiet:
        printer().print(line, markup=False)
    return tally.code


@contextmanager
def _saying_what_is_done(tally: _Tally, rows: Run, job: Job) -> Iterator[None]:
    """If Ctrl-C ends the block, say how many pictures are finished, and how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        done = tally.finished + rows.stills.skipped
        further = "--resume continues with the others" if job.table else "only a run with --table can be continued"
        raise KeyboardInterrupt(f"{done} picture{'s are' if done != 1 else ' is'} finished; {further}") from error


SECONDS_BETWEEN_LINES = 60.0
"""Where there is no terminal for a bar, a line on the progress of a long run is printed this often."""


class _Progress:
    """Shows how many pictures are finished, how many a second, and the time left.

    A thread counts the pictures meanwhile, since listing a large folder takes a while. A second bar shows the many
    passes that some methods need for one picture.
    """

    def __init__(self, rows: Run, pictures: Pictures, passes: PassProgress, *, with_lines: bool) -> None:
        from rich.progress import BarColumn, TextColumn

        from camkit.cli.bars import Bars

        console = QuietConsole(stderr=True)
        is_long = len(pictures.first(_MOST_WITHOUT_BAR + 1)) > _MOST_WITHOUT_BAR
        may_have_bars = console.is_terminal and not TALK.quiet
        self._has_bar = is_long and may_have_bars
        self._has_lines = is_long and with_lines and not self._has_bar and not TALK.quiet
        self._stills, self._of_passes = rows.stills, passes
        self._total: int | None = None
        self._count = threading.Thread(target=self._count_pictures, args=(pictures,), daemon=True)
        self._started = self._printed = self._passes_began = time.perf_counter()
        self._bars = Bars(
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            shown=may_have_bars,
        )
        self._bar = self._bars.add_task("", total=None, visible=self._has_bar, title="explaining")
        self._passes = self._bars.add_task("", total=None, visible=False, title="changed pictures")

    def _count_pictures(self, pictures: Pictures) -> None:
        self._total = pictures.count()

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._started

    def __enter__(self) -> _Progress:
        """Begin to show it."""
        if self._has_bar or self._has_lines:
            self._count.start()
        if self._has_bar:
            self._bars.start()
        self._of_passes.show = self._show_passes
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._of_passes.show = None
        self._bars.stop()

    def _show_passes(self, done: int, of: int) -> None:
        self._bars.start()
        if not done:
            self._passes_began = time.perf_counter()
        words = progress_words(done, 0, of, time.perf_counter() - self._passes_began)
        self._bars.update(
            self._passes, completed=done, total=of, description=words, visible=done < of, refresh=not done
        )

    def update(self, finished: int) -> None:
        """Show how many pictures are finished."""
        if self._has_bar:
            words = progress_words(finished, self._stills.skipped, self._total, self.seconds)
            done = finished + self._stills.skipped
            self._bars.update(self._bar, completed=done, total=self._total, description=words)
        elif self._has_lines and time.perf_counter() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = time.perf_counter()
            say(progress_words(finished, self._stills.skipped, self._total, self.seconds))


def progress_words(finished: int, skipped: int, total: int | None, seconds: float) -> str:
    """Return how far a run is, as words.

    >>> progress_words(1200, 0, 2_000_000, 30.0), progress_words(3, 2, None, 1.5)
    ('1,200 of 2,000,000, 40 a second, 13:52:50 left', '5, 2 a second')
    """
    rate = finished / max(seconds, 1e-9)
    words = f"{finished + skipped:,}" + ("" if total is None else f" of {total:,}") + f", {rate:.3g} a second"
    if total is None or not finished:
        return words
    left = timedelta(seconds=math.ceil(max(total - finished - skipped, 0) / rate))
    return f"{words}, {left} left"


def _print_row(row: Result, *, with_rows: bool) -> None:
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    if isinstance(row, Failure):
        printer(stderr=True).print(text.failure(row))
    elif with_rows and not TALK.quiet:
        printer().print(text.video(row) if isinstance(row, WrittenVideo) else text.row(row))


def _print_repeated(tally: _Tally) -> None:
    """Say how many pictures had an error that was printed for the first of them only."""
    for error, count in tally.errors.items():
        if count > 1:
            more = "1 more picture has" if count == 2 else f"{count - 1} more pictures have"
            first = printable(Path(tally.first[error]).name)
            printer(stderr=True).print(Text(f"{more} the same error as {first}; --verbose lists them", "red"))


def summary(tally: _Tally, seconds: float, rows: Run, table: Path | None) -> str:
    """Return the last line of a run."""
    line = f"{tally.explained} explained, {tally.failed} failed, {tally.empty} empty"
    if tally.images:
        line += f"; {tally.images / max(seconds, 1e-9):.3g} pictures a second"
    if rows.stills.skipped:
        line += f"; {rows.stills.skipped} finished in an earlier run"
    if rows.stills.failed_before:
        line += f", {rows.stills.failed_before} of them with an error (not tried again)"
    if table is not None:
        line += f"; wrote {printable(str(table))}"
    return line


def _without_name(failed: Failure) -> str:
    """Return an error without its picture's name, so that the same error of two pictures is the same text.

    A drawing that cannot be written has a name of its own in its error; the reason is the same for all on a full disk.
    """
    reason = failed.error.__cause__
    if isinstance(failed.error, OutputError) and isinstance(reason, OSError):
        return f"cannot write: {reason.strerror or reason}"
    error = str(failed.error)
    for name in (failed.source, Path(failed.source).name):
        error = error.replace(name, "")
    return error


def _csv_line(values: dict[str, Any], columns: Sequence[str]) -> str:
    """Return the values of a row as a CSV for people holds them; several numbers are separated by spaces."""
    from camkit.images.files import csv_line

    cells = (" ".join(map(str, value)) if isinstance(value, list) else value for value in map(values.get, columns))
    texts = (as_cell(printable(cell)) if isinstance(cell, str) else cell for cell in cells)
    return csv_line(texts).decode().removesuffix("\n")
