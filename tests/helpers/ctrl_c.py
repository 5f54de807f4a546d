"""Whether anything is left of a Ctrl-C."""

from __future__ import annotations

import signal

from torch.overrides import _get_current_function_mode_stack

from camkit.engine import guard


def nothing_runs() -> bool:
    """Tell whether camkit believes that no pass is running, Ctrl-C has its usual handler, and no mode is left."""
    idle = not (guard._ctrl_c.blocks or guard._in_use)
    idle = idle and not _get_current_function_mode_stack()
    return idle and signal.getsignal(signal.SIGINT) is signal.default_int_handler
