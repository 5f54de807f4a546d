"""A Ctrl-C at any line, and whether anything is left of it."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from camkit.engine import guard, interrupts


def nothing_runs() -> bool:
    """Tell whether camkit believes that no pass is running, and Ctrl-C has its usual handler."""
    idle = not (interrupts._waiting.blocks or guard._in_use or guard._eager or guard._generators)
    return idle and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class CtrlC:
    """Sends this process a Ctrl-C when it reaches the n-th line of camkit's engine or of contextlib.

    Lines that hold ``with`` pass it on to the next line: Python also reports them on the way out of the block, before
    ``__exit__`` is called, where no signal is handled. So do lines of ``interrupts.py`` without a call: Python handles
    signals only where a function is called or a loop begins again.

    Args:
        line: n.
        files: parts of the names of the files whose lines count.
        events: what counts in them; "return" also counts the end of each function.
    """

    def __init__(
        self, line: int, files: Sequence[str] = ("/camkit/", "contextlib.py"), events: Sequence[str] = ("line",)
    ) -> None:
        self.line, self.files, self.events = line, files, events
        self.seen = 0
        self.sent = False

    def __call__(self, frame: FrameType, event: str, _: object) -> CtrlC | None:
        file = frame.f_code.co_filename
        if not any(part in file for part in self.files):
            return None
        if event in self.events:
            self.seen += 1
            text = linecache.getline(file, frame.f_lineno).lstrip()
            passes_on = text.startswith("with ") or (file.endswith("/interrupts.py") and "(" not in text)
            if self.seen >= self.line and not passes_on:
                sys.settrace(None)
                self.sent = True
                signal.raise_signal(signal.SIGINT)
        return self
