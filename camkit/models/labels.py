"""The names of a model's classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeAlias

from camkit.errors import InputError, as_error, refuse_pipe

Labels: TypeAlias = "Sequence[str] | Mapping[int, str]"


def as_labels(labels: Labels | None) -> tuple[str, ...] | None:
    """Return the names of the classes in the order of their indices.

    Args:
        labels: the names in that order, or a mapping from index to name.

    Raises:
        InputError: labels is a single text, a mapping without every index from 0, or a name is neither text nor number.
    """
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        by_index = {str(index): name for index, name in labels.items()}
        if set(by_index) != {str(index) for index in range(len(by_index))}:
            raise InputError("a dictionary of labels needs every index from 0, as in {0: 'cat', 1: 'dog'}")
        labels = [by_index[str(index)] for index in range(len(by_index))]
    if isinstance(labels, (str, Set)) or not isinstance(labels, Iterable):
        raise InputError(f"labels must be a list of class names, as in ['cat', 'dog'], not {labels!r}")
    names = list(labels)
    wrong = [name for name in names if not isinstance(name, (str, int))]
    if wrong:
        raise InputError(f"labels must be a list of class names, as in ['cat', 'dog']; {wrong[0]!r} is not a name")
    return tuple(map(str, names)) or None


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the names of the classes from a file: one per line, or JSON (a list, or an object from index to name).

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    refuse_pipe(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the labels in {path} cannot be read: {error}") from error
    if path.suffix.lower() != ".json":
        names = [line.strip() for line in text.splitlines()]
        while names and not names[-1]:
            names.pop()
        if not names or not all(names):
            raise InputError(
                f"{path} must hold one class name per line, in the order of the indices, without empty lines"
            )
        return tuple(names)
    with as_error(InputError, lambda error: f"{path} is not JSON: {error}"):
        labels = as_labels(json.loads(text))
    if labels is None:
        raise InputError(f"{path} holds no class names")
    return labels
