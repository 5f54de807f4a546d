"""A Ctrl-C at any line, and whether anything is left of it."""

from __future__ import annotations

import functools
import linecache
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.overrides import _get_current_function_mode_stack

import camkit
from camkit.engine import guard, interrupts

PACKAGE = f"{Path(camkit.__file__).parent}/"  # not the folder of a clone, which may be called camkit too

TraceFunction = Callable[[FrameType, str, Any], Any]


def nothing_runs() -> bool:
    """Tell whether camkit believes that no pass is running, Ctrl-C has its usual handler, and no mode is left."""
    idle = not (interrupts._waiting.blocks or guard._in_use or guard._eager or guard._generators)
    idle = idle and not _get_current_function_mode_stack()
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
        self, line: int, files: Sequence[str] = (PACKAGE, "contextlib.py"), events: Sequence[str] = ("line",)
    ) -> None:
        self.line, self.files, self.events = line, tuple(files), events
        self.seen = 0
        self.sent = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        """Follow a function that is called if its file counts."""
        return self.follow if _counts(frame.f_code.co_filename, self.files) else None

    def follow(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        if event in self.events:
            self.seen += 1
            if self.seen >= self.line and not _passes_on(frame):
                sys.settrace(None)
                self.sent = True
                signal.raise_signal(signal.SIGINT)
        return self.follow


@functools.cache
def _counts(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def _passes_on(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    text = linecache.getline(file, frame.f_lineno).lstrip()
    return text.startswith("with ") or (file.endswith("/interrupts.py") and "(" not in text)
