"""Progress bars for commands; imported only by the commands that show them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import Progress, ProgressColumn

from camkit.cli.terminal import TALK, QuietConsole, say


class Bars(Progress):
    """Progress bars on stderr, which disappear at the end.

    Args:
        columns: what each bar shows; none for rich's usual columns.
        console: where to draw.
        shown: False to draw nothing.
    """

    def __init__(self, *columns: str | ProgressColumn, console: QuietConsole, shown: bool) -> None:
        super().__init__(*columns, console=console, transient=True, disable=not shown)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of a check: a bar per stage on a terminal, elsewhere one line per stage."""
    console = QuietConsole(stderr=True)
    tasks: dict[str, Any] = {}
    with Bars(console=console, shown=console.is_terminal and not TALK.quiet) as bars:

        def progress(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=of)
                if not console.is_terminal:
                    say(f"{stage}: {of - done} to do")
            bars.update(tasks[stage], completed=done)

        yield progress
