"""Makes Ctrl-C wait while camkit changes a model for a pass, or restores it.

Python may raise KeyboardInterrupt between any two instructions, even in a ``finally`` block. So each pass runs
inside ``undisturbed``, where Ctrl-C waits, and its slow parts run inside ``interruptible``, where it is raised.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_PRESSES_UNTIL_FORCED = 3
"""The Ctrl-C with this number is always raised at once: the user has waited for something that hangs."""


class _Waiting:
    """The state of Ctrl-C. Python handles signals only in the main thread, so only this thread uses it."""

    def __init__(self) -> None:
        self.blocks = 0
        self.let_through = False
        self.presses = 0
        self.handler: Any = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: raise KeyboardInterrupt inside ``interruptible``, otherwise remember it."""
        self.presses += 1
        if self.let_through or self.presses >= _PRESSES_UNTIL_FORCED:
            self.presses = 0
            self.handler(number, frame)

    def deliver(self) -> None:
        """Raise the KeyboardInterrupt that has waited."""
        self.presses = 0
        self.handler(signal.SIGINT, None)


_waiting = _Waiting()
_RECEIVE = _waiting.receive


class undisturbed:  # noqa: N801 - used like a function
    """Hold Ctrl-C back in a block; it is raised at the block's end, or inside ``interruptible``.

    Blocks may be nested. In other threads, which Python never interrupts, the block does nothing.
    """

    def __enter__(self) -> None:
        """Begin to hold Ctrl-C back."""
        self._counted = False
        if threading.get_ident() != threading.main_thread().ident:
            return
        if _waiting.blocks:
            _waiting.blocks += 1
        else:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):  # the process ignores Ctrl-C, or ends at once
                return
            _waiting.handler, _waiting.let_through = handler, False
            try:
                _waiting.blocks = 1  # first, since Python's collector may run a whole block while the handler is set
                signal.signal(signal.SIGINT, _RECEIVE)  # from here on Ctrl-C waits
            except BaseException:  # Ctrl-C
                _waiting.blocks = 0
                raise
        self._let_through, _waiting.let_through = _waiting.let_through, False
        self._counted = True

    def __exit__(self, *_: object) -> None:
        """Raise the Ctrl-C that came in the block, if this is the outermost one."""
        if not self._counted:
            return
        if _waiting.blocks > 1:
            _waiting.blocks -= 1
            _waiting.let_through = self._let_through
            if _waiting.let_through and _waiting.presses:
                _waiting.deliver()
            return
        try:
            if signal.getsignal(signal.SIGINT) is _RECEIVE:  # the model may have set a handler of its own
                signal.signal(signal.SIGINT, _waiting.handler)
        finally:
            presses = _waiting.presses
            _waiting.presses = _waiting.blocks = 0  # last, since the collector may run a whole block before
        if presses:
            _waiting.handler(signal.SIGINT, None)


class interruptible:  # noqa: N801 - used like a function
    """Raise Ctrl-C at once in a block inside ``undisturbed``; outside of one, nothing changes."""

    def __enter__(self) -> None:
        """Raise the Ctrl-C that has waited, and let later ones through."""
        self._lets_through = bool(_waiting.blocks) and threading.get_ident() == threading.main_thread().ident
        if self._lets_through:
            self._before, _waiting.let_through = _waiting.let_through, True
            if _waiting.presses:
                _waiting.deliver()

    def __exit__(self, *_: object) -> None:
        """Hold Ctrl-C back again."""
        if self._lets_through:
            _waiting.let_through = self._before
