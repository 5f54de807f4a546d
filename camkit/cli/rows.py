"""Print the rows of explained pictures as text, as JSON lines or as CSV, each when it is finished."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.text import Text

from camkit.cli.terminal import TALK, QuietConsole, emit, printer, say
from camkit.errors import CamkitError, InputError, OutputError, as_cell, printable

if TYPE_CHECKING:
    from camkit.images.listing import Pictures
    from camkit.scale.folder import Result, Run, Stills
    from camkit.scale.job import Job, Written
    from camkit.types import Failure

Form: TypeAlias = Literal["text", "json", "csv"]
"""How rows are printed."""

_MOST_WITHOUT_BAR = 3
"""Up to this many pictures are explained before a progress bar would be read."""


class _Tally:
    """What has been printed so far.

    Attributes:
        code: the exit code.
        pictures: how many are "explained" or have "failed", and how many drawings are "empty" or "reduced". A picture
            with both explanations and errors counts as explained; "images" counts the frames of videos too.
        errors: how many pictures have the same error, without their names.
        first: the first picture with each error.
    """

    def __init__(self) -> None:
        self.code = 0
        self.pictures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self._last: tuple[str, bool] | None = None

    def add(self, row: Result) -> bool:
        """Count a row; return whether it is an error that an earlier picture had too."""
        from camkit.types import Failure

        counted, is_explained = self.pictures, not isinstance(row, Failure)
        before = None if self._last is None or self._last[0] != row.source else self._last[1]
        if before is None or (is_explained and not before):
            counted["failed"] -= before is False  # it was counted so, until it had an explanation
            counted["explained" if is_explained else "failed"] += 1
            self._last = row.source, is_explained
            if not isinstance(row, Failure):
                counted["images"] += 1 if row.video is None else row.video["frames"]
        if not isinstance(row, Failure):
            if row.video is not None and "error" in row.video:
                self.code = max(self.code, InputError.exit_code)
            counted.update(empty=row.status != "ok", reduced=row.is_reduced)
            return False
        self.code = max(self.code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
        error = _without_name(row)
        self.errors[error] += 1
        self.first.setdefault(error, row.source)
        return self.errors[error] > 1

    @property
    def finished(self) -> int:
        """The number of pictures that are finished."""
        return self.pictures["explained"] + self.pictures["failed"]


SECONDS_BETWEEN_LINES = 60.0
"""Where there is no terminal for a bar, a line on the progress of a long run is printed this often."""


class Progress:
    """Shows how many pictures are finished and the time left: as a bar on a terminal, elsewhere as a line each minute.

    A thread counts the pictures meanwhile, since listing a large folder takes a while. A second bar shows the many
    passes that some methods need for one picture.
    """

    def __init__(self, pictures: Pictures, *, with_lines: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = QuietConsole(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        shown = console.is_terminal and not TALK.quiet
        self._bars = Bars(*columns, console=console, transient=True, disable=not shown)
        is_long = not TALK.quiet and len(pictures.first(_MOST_WITHOUT_BAR + 1)) > _MOST_WITHOUT_BAR
        self._has_bar, self._has_lines = is_long and shown, is_long and with_lines and not shown
        self._bar = self._bars.add_task("pictures", total=None, visible=self._has_bar)
        self._passes = self._bars.add_task("changed pictures", total=None, visible=False)
        self._count = lambda: self._bars.update(self._bar, total=pictures.count())
        self._printed = time.perf_counter()

    def __enter__(self) -> Progress:
        """Begin to show it."""
        if self._has_bar or self._has_lines:
            threading.Thread(target=self._count, daemon=True).start()
        if self._has_bar:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._bars.stop()

    def show_passes(self, done: int, of: int) -> None:
        """Show how many changed pictures the model has seen."""
        self._bars.start()
        if not done:
            self._bars.reset(self._passes, total=of)
        self._bars.update(self._passes, completed=done, visible=done < of, refresh=not done)

    def update(self, finished: int) -> None:
        """Show how many pictures are finished."""
        self._bars.update(self._bar, completed=finished)
        if self._has_lines and time.perf_counter() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed, total = time.perf_counter(), self._bars.tasks[self._bar].total
            say(f"{finished:,} pictures" + ("" if total is None else f" of {total:,.0f}"))


def report(rows: Run, job: Job, form: Form, progress: Progress, *, with_raw: bool = False) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code.

    If the rows go into a table, only errors are printed as text. An error that several pictures have is printed once
    and counted below the rows. A summary follows.

    Args:
        rows: the rows of the job.
        job: the job.
        form: how rows are printed.
        progress: shows how far it is.
        with_raw: whether JSON has the raw maps.
    """
    from camkit.explaining.explanation import FIELDS
    from camkit.types import Failure

    tally, stills, table, start = _Tally(), rows.stills, job.results.table, time.perf_counter()
    columns = [*(each.name for each in FIELDS), "scale", "file", "error"]
    if form == "csv":
        emit(",".join(columns))
    with_rows = TALK.verbose or (table is None and not TALK.quiet)
    try:
        with rows, progress:
            for row in rows:
                is_repeated = tally.add(row)
                if form == "json":
                    values = {name: value for name, value in row.to_dict().items() if with_raw or name != "raw"}
                    emit(json.dumps(values, allow_nan=False))  # in ASCII, so that any terminal and pipe can carry it
                elif form == "csv":
                    emit(_csv_line(row.to_dict(), columns))
                elif not isinstance(row, Failure):
                    if with_rows:
                        printer().print(_lines_of(row))
                elif TALK.verbose or not is_repeated:
                    said = (printable(f"error: {row.error}"), "red")
                    printer(stderr=True).print(Text.assemble((printable(row.source), "bold"), "  ", said))
                progress.update(tally.finished + stills.skipped)
    except KeyboardInterrupt as error:
        done = tally.finished + stills.skipped
        further = "--resume continues with the others" if table else "only a run with --table can be continued"
        raise KeyboardInterrupt(f"{done} picture{'s are' if done != 1 else ' is'} finished; {further}") from error
    line = _summary(tally, job, stills, time.perf_counter() - start, alike=form == "text" and not TALK.verbose)
    if form != "text":
        say(line)
    elif not TALK.quiet:
        printer().print(line, markup=False)
    return tally.code


def _summary(tally: _Tally, job: Job, stills: Stills, seconds: float, *, alike: bool) -> str:
    """Return the last line of a run, after notes on drawings and, if ``alike``, on errors that were printed once."""
    for failure, count in tally.errors.items():
        if count > 1 and alike:
            more = "1 more picture has" if count == 2 else f"{count - 1} more pictures have"
            first = printable(Path(tally.first[failure]).name)
            printer(stderr=True).print(Text(f"{more} the same error as {first}; --verbose lists them", "red"))
    found = tally.pictures
    if found["reduced"]:
        drawings = "1 drawing was" if found["reduced"] == 1 else f"{found['reduced']} drawings were"
        side = f"{job.how.max_side} pixel{'s' * (job.how.max_side != 1)}"
        say(f"{drawings} made from pictures reduced to {side} on the longer side; --max-side 0 keeps their size")
    line = f"{found['explained']} explained, {found['failed']} failed, {found['empty']} empty"
    if found["images"]:
        line += f"; {found['images'] / max(seconds, 1e-9):.3g} pictures a second"
    if stills.skipped:
        line += f"; {stills.skipped} finished in an earlier run"
    if stills.failed_before:
        line += f", {stills.failed_before} of them with an error (not tried again)"
    if job.results.table is not None:
        line += f"; wrote {printable(str(job.results.table))}"
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


_NOTES = {
    "no_positive_evidence": "no positive evidence: nothing in the picture speaks for this target at this layer",
    "no_influence": (
        "no influence: the target's gradient is zero at this layer. Either the target does not depend on the layer, or "
        "it is saturated (a probability very close to 0 or 1). Choose another layer, or a target that uses the logits"
    ),
    "non_finite": "the map contains NaN or infinity, so no heat is drawn",
}


_UNKNOWN_CROP = "drawn on the model's input: camkit cannot tell which part of the picture the preprocessing shows"


_MOST_LABELS = 3
"""Labels that the lines for a video name."""


def _lines_of(written: Written) -> Text:
    """Return the lines for one picture and target, or for one video."""
    from camkit.drawing.figure import percent
    from camkit.kit.wording import counted

    explanation, video = written.explanation, written.video
    if video is None:
        about, found = "  ", explanation.name
        found += "" if explanation.probability is None else f" {percent(explanation.probability)}"
    else:
        labels = [f"{label} in {count}" for label, count in list(video["labels"].items())[:_MOST_LABELS]]
        about = f"  {counted(video['frames'], 'frame')}, {video['rate']:.3g} per second: "
        found = ", ".join(labels) + (", ..." if len(video["labels"]) > _MOST_LABELS else "")
    layer = f"{explanation.layer} ({explanation.layer_reason})"
    text = Text.assemble(
        (printable(written.source), "bold"), about, (printable(found), "green"), f"  layer {printable(layer)}\n"
    )
    if video is None and explanation.box is None and explanation.heatmap.ndim == 2:
        text.append(f"  {_UNKNOWN_CROP}\n", "yellow")
    if video is None and explanation.doubt:
        text.append(f"  {explanation.doubt}\n", "yellow")
    if written.status in _NOTES:
        text.append(f"  {_NOTES[written.status]}\n", "yellow")
    elif written.file is not None:
        scale = "on each frame's own scale" if written.scale is None else f"from {written.scale}"
        text.append(f"  colours {scale}\n")
    if video is not None and "error" in video:
        text.append(f"  {printable(video['error'])}; the frames before that are drawn\n", "red")
    sheet = f" and {printable(video['sheet'])}" if video is not None and "sheet" in video else ""
    return text.append(f"  wrote {printable(str(written.file))}{sheet}" if written.file is not None else "  not drawn")
