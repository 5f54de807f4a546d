"""Consoles and messages for all commands."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from camkit.errors import OutputError, printable

if TYPE_CHECKING:
    from rich.table import Table


class OutputClosedError(BrokenPipeError):
    """The reader of the output closed it. A BrokenPipeError of any other class comes from the user's own code."""


class QuietConsole(Console):
    """A console that raises OutputClosedError if the reader of its output goes away.

    It passes all text through ``printable``, line by line. Pass names through ``printable`` before you join lines:
    here, a line feed in a name looks like the end of a line.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as usual, but escape every control character that is not the console's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_printable_lines(segment.text))

    def on_broken_pipe(self) -> None:
        """Raise an error that ends the command; rich would exit the program here."""
        raise OutputClosedError


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def printer(*, stderr: bool = False) -> Console:
    """Return a console that neither highlights words nor breaks lines."""
    return QuietConsole(stderr=stderr, highlight=False, soft_wrap=True)


TALK = SimpleNamespace(config=None, quiet=False, verbose=False)
"""The common options of the running command; with ``quiet``, it prints nothing but errors."""


def emit(line: str) -> None:
    """Print a line of results for another program to stdout, as it is.

    Raises:
        OutputClosedError: nobody reads it.
        OutputError: it cannot be written, for example because the disk is full.
    """
    try:
        print(line, flush=True)  # noqa: T201
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        discard_output(sys.stdout)
        raise OutputError(f"the output cannot be written: {error.strerror}; earlier rows are kept") from error


def say(message: str, style: str = "bold") -> None:
    """Print a message to stderr, apart from the results; nothing with --quiet."""
    if not TALK.quiet:
        _say(message, style)


def _say(message: str, style: str) -> None:
    printer(stderr=True).print(Text.assemble(("camkit: ", style), printable(message)))


def fail(message: str) -> None:
    """Print an error to stderr. Ignore a failure to write, because the exit code must not depend on it."""
    try:
        _say(message, "bold red")
    except (OSError, ValueError):
        discard_output(sys.stderr)


def print_traceback(error: BaseException) -> None:
    """Print to stderr where an error was raised."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(_printable_lines("".join(traceback.format_exception(error))))


def discard_output(stream: TextIO) -> None:
    """Discard what is still buffered for a stream that cannot be written; Python would exit with another code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings without the source line of a library, and silence libtiff.

    libtiff itself prints messages about damaged files to stderr; camkit's error about the file is enough.
    """
    from PIL import _imaging

    with contextlib.suppress(OSError, AttributeError):  # Pillow without libtiff, or with a libtiff inside it
        for setter in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            getattr(ctypes.CDLL(_imaging.__file__), setter)(None)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"note: {' '.join(str(message).split())}", "yellow")
        yield


def print_table(table: Table, *, folds: bool = False) -> None:
    """Print a table at its whole width, so that no cell is cut off.

    With ``folds``, it is as wide as the terminal, or has 80 columns if there is none; long names are folded.
    """
    console = printer()
    width = console.width if console.is_terminal else 80
    if not folds:
        whole = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        width = max(whole, console.width)
    QuietConsole(file=console.file, highlight=False, width=width).print(table)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of a check on stderr: a bar per stage on a terminal, elsewhere one line per stage."""
    from rich.progress import Progress

    console = QuietConsole(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=TALK.quiet or not console.is_terminal) as bars:

        def progress(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=of)
                if not console.is_terminal:
                    say(f"{stage}: {of - done} to do")
            bars.update(tasks[stage], completed=done)

        yield progress
