"""The names of a model's classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeAlias

from camkit.errors import InputError

Labels: TypeAlias = "Sequence[str] | Mapping[int, str]"


def as_labels(labels: Labels | None) -> tuple[str, ...] | None:
    """Return the classes' names in the order of their indices, given in that order or as a mapping from index to name.

    Raises:
        InputError: text, a mapping whose keys are not the indices from 0, or names that are neither text nor numbers.
    """
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        by_index = {str(index): name for index, name in labels.items()}
        if set(by_index) != {str(index) for index in range(len(by_index))}:
            raise InputError("labels given as a dictionary must name every class by its index: {0: 'cat', 1: 'dog'}")
        labels = [by_index[str(index)] for index in range(len(by_index))]
    if isinstance(labels, (str, Set)) or not isinstance(labels, Iterable):
        raise InputError(f"labels are the names of the classes, as in ['cat', 'dog'], not {labels!r}")
    names = list(labels)
    strange = [name for name in names if not isinstance(name, (str, int))]
    if strange:
        raise InputError(f"labels are the names of the classes, as in ['cat', 'dog'], and {strange[0]!r} is no name")
    return tuple(map(str, names)) or None


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the classes' names from a file: one a line, or JSON, a list or an object from index to name.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the labels in {path} cannot be read: {error}") from error
    if path.suffix.lower() != ".json":
        names = [line.strip() for line in text.splitlines()]
        while names and not names[-1]:
            names.pop()
        if not names or not all(names):
            raise InputError(f"{path} must name one class a line, in the order of their indices, without empty lines")
        return tuple(names)
    try:
        found = as_labels(json.loads(text))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if found is None:
        raise InputError(f"{path} names no class")
    return found
