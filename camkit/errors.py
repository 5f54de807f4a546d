"""Every error camkit raises by itself.

::

    CamkitError
    ├── InputError          the call or a file is wrong (exit code 2); also a ValueError
    │   ├── ImageError      a picture cannot be read or has the wrong form
    │   ├── ModelError      an unknown model, weights that do not fit, a kind of module that cannot be explained
    │   ├── LayerError      no such layer, no spatial extent, several calls, nothing to choose from
    │   ├── MethodError     an unknown method, or one this model's head does not allow
    │   ├── TargetError     a class, label or score that the output does not have
    │   └── OutputError     a file that cannot be written
    └── RunError            the model or the program failed (exit code 4); also a RuntimeError

An exception raised by the user's own model, preprocessing or target passes through unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CamkitError(Exception):
    """Base of all errors below; the message is one sentence meant for the person who typed the call."""

    exit_code = 4


class InputError(CamkitError, ValueError):
    """The call or a file is wrong; nothing was computed."""

    exit_code = 2


class ImageError(InputError):
    """A picture cannot be read, or its form does not fit the model."""


class ModelError(InputError):
    """The model is unknown, its weights do not fit, or it is of a kind that cannot be explained."""


class LayerError(InputError):
    """The target layer does not exist, has no spatial extent, or could not be chosen."""


class MethodError(InputError):
    """The method is unknown, or the model's head does not allow it."""


class TargetError(InputError):
    """The class, label or score asked for is not in the model's output."""


class OutputError(InputError):
    """A result cannot be written."""


class RunError(CamkitError, RuntimeError):
    """The model or the program failed while running."""


def did_you_mean(word: str, choices: Iterable[str], limit: int = 3) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` with the nearest choices, or an empty string when none is near.

    >>> did_you_mean("resnet5", ["resnet50", "vgg16"])
    "; did you mean 'resnet50'?"
    """
    by_folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), list(by_folded), n=limit, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(by_folded[name]) for name in near)}?" if near else ""
