"""Models that overwrite tensors which their own backward pass needs, such as a detector's in-place sigmoids.

PyTorch refuses to differentiate them, unless it keeps copies of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def differentiated(run: Callable[[], T]) -> T:
    """Return what ``run`` returns. If a backward pass in it needs overwritten tensors, run it again with copies."""
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


def keeping_overwritten() -> AbstractContextManager[None]:
    """Return a context in which each operation keeps a copy of what its backward pass needs.

    PyTorch's ``allow_mutation_on_saved_tensors`` copies less, but has one switch for all threads.
    """
    return cast("AbstractContextManager[None]", saved_tensors_hooks(_kept, lambda kept: kept))


def _kept(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
