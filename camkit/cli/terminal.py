"""Consoles, messages and progress bars for all commands."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from camkit.background.values import Stage


class QuietConsole(Console):
    """A console that raises BrokenPipeError if the reader of its output goes away."""

    def on_broken_pipe(self) -> None:
        """Raise what an ordinary write would raise."""
        raise BrokenPipeError  # rich would exit the program here


def printer(*, stderr: bool = False) -> Console:
    """Return a console that neither highlights words nor breaks lines."""
    return QuietConsole(stderr=stderr, highlight=False, soft_wrap=True)


def say(message: str, style: str = "bold") -> None:
    """Print a message to stderr, apart from the results."""
    printer(stderr=True).print(Text.assemble(("camkit: ", style), message))


def fail(message: str) -> None:
    """Print an error to stderr."""
    say(message, "bold red")


@contextlib.contextmanager
def without_library_paths() -> Iterator[None]:
    """Print warnings as lines of camkit's own, not with the source line of a library, and keep libtiff silent.

    libtiff prints what it finds in a damaged file to stderr itself; camkit's error about the file is enough.
    """
    from PIL import _imaging

    with contextlib.suppress(OSError, AttributeError):  # Pillow without libtiff, or with a libtiff inside it
        for setter in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            getattr(ctypes.CDLL(_imaging.__file__), setter)(None)
    with warnings.catch_warnings():
        warnings.showwarning = _say_warning
        yield


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"note: {' '.join(str(message).split())}", "yellow")


@contextlib.contextmanager
def stages() -> Iterator[Callable[[Stage, int, int], None]]:
    """Show the progress of a check: a bar per stage on a terminal, elsewhere one line per stage."""
    from rich.progress import Progress

    console = QuietConsole(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:

        def progress(stage: Stage, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=of)
                if not console.is_terminal:
                    say(f"{stage}: {of - done} to do")
            bars.update(tasks[stage], completed=done)

        yield progress
