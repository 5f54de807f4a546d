"""Models that overwrite tensors which their own backward pass needs, such as a detector's in-place sigmoids.

PyTorch refuses to differentiate them, unless it keeps a copy of each tensor that is overwritten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.autograd.graph import allow_mutation_on_saved_tensors

_lock = threading.RLock()
"""PyTorch has one such context for all threads."""


T = TypeVar("T")


def differentiated(run: Callable[[], T]) -> T:
    """Return the result of passes that are differentiated; they run again if they need overwritten tensors."""
    try:
        return run()
    except RuntimeError as error:
        if not is_overwriting(error):
            raise
    with keeping_overwritten():
        return run()


def is_overwriting(error: Exception) -> bool:
    """Tell whether a backward pass failed because the model has overwritten a tensor that it needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


@contextmanager
def keeping_overwritten() -> Iterator[None]:
    """Keep copies of overwritten tensors for the backward passes in the block."""
    with _lock, allow_mutation_on_saved_tensors():
        yield
