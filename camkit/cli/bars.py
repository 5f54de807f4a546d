"""Progress bars for commands; imported only by the commands that show them."""

from __future__ import annotations

from rich.progress import Progress, ProgressColumn

from camkit.cli.terminal import QuietConsole
from camkit.engine.interrupts import undisturbed


class Bars(Progress):
    """Progress bars on stderr, which disappear at the end.

    Ctrl-C waits while the thread that draws them starts or ends. Otherwise it could leave a lock of the thread taken.

    Args:
        columns: what each bar shows; none for rich's usual columns.
        console: where to draw.
        shown: False to draw nothing.
    """

    def __init__(self, *columns: str | ProgressColumn, console: QuietConsole, shown: bool) -> None:
        super().__init__(*columns, console=console, transient=True, disable=not shown)

    def start(self) -> None:
        """Begin to draw."""
        with undisturbed():
            super().start()

    def stop(self) -> None:
        """Remove the bars."""
        with undisturbed():
            super().stop()
