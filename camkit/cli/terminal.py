"""What every command says on a terminal, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from camkit.background.values import Stage


class QuietConsole(Console):
    """A console that leaves what to do about a closed pipe to the program."""

    def on_broken_pipe(self) -> None:
        """Raise what an ordinary write would."""
        raise BrokenPipeError  # rich would end the program by itself


def printer(*, stderr: bool = False) -> Console:
    """Return a console that neither colours words by itself nor breaks lines."""
    return QuietConsole(stderr=stderr, highlight=False, soft_wrap=True)


def say(message: str, style: str = "bold") -> None:
    """Tell the person, beside the results."""
    printer(stderr=True).print(Text.assemble(("camkit: ", style), message))


def fail(message: str) -> None:
    """Tell the person what went wrong."""
    say(message, "bold red")


@contextlib.contextmanager
def stages() -> Iterator[Callable[[Stage, int, int], None]]:
    """Show how far a check is, a bar per stage, on a terminal; elsewhere a line per stage."""
    from rich.progress import Progress

    bar = QuietConsole(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=bar, transient=True, disable=not bar.is_terminal) as shown:

        def progress(stage: Stage, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=of)
                if not bar.is_terminal:
                    say(f"{stage}: {of - done} to do")
            shown.update(tasks[stage], completed=done)

        yield progress
