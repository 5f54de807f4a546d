"""Which outputs of a model mean which class of the data."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from camkit.errors import InputError

_WORDNET = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Matched:
    """The model's indices of each class of the data, and how they were found, as a sentence."""

    indices: Mapping[str, tuple[int, ...]]
    how: str


def match_classes(
    classes: Sequence[str], labels: Sequence[str] | None, outputs: int, given: Mapping[str, Sequence[int | str]] | None
) -> Matched:
    """Find the model's outputs for each class of the data.

    Args:
        classes: of the data, in order of name.
        labels: of the model, in the order of its outputs.
        outputs: of the model.
        given: the caller's own table, from class to indices or labels.

    Returns:
        By the table where one is given; else by label, where every class's name is a label or one of its synonyms
        ("tabby, tabby cat"); else by number; else by order, where there are as many classes as outputs, as
        torchvision's ImageFolder numbers them.

    Raises:
        InputError: none of these fits.
    """
    if given is not None:
        table = {name: _given(name, given, labels, outputs) for name in classes}
        return Matched(_apart(table, outputs), "by the table that was given")
    unknown = list(classes)
    if labels is not None:
        by_name = _by_name(labels)
        found = {name: by_name.get(plain(name), ()) for name in classes}
        unknown = [name for name, indices in found.items() if not indices]
        if not unknown:
            several = [
                f"{name!r} is outputs {' and '.join(map(str, one))}" for name, one in found.items() if len(one) > 1
            ]
            return Matched(_apart(found, outputs), "; ".join(["by label", *several]))
    if all(name.isdecimal() and int(name) < outputs for name in classes):
        return Matched(_apart({name: (int(name),) for name in classes}, outputs), "by number")
    wordnet = all(_WORDNET.fullmatch(name) for name in classes)
    if len(classes) == outputs and (labels is None or wordnet):
        return Matched(
            {name: (number,) for number, name in enumerate(sorted(classes))}, "by order, as ImageFolder does"
        )
    raise InputError(_unmatched(unknown, labels, outputs, len(classes)))


def _apart(table: dict[str, tuple[int, ...]], outputs: int) -> dict[str, tuple[int, ...]]:
    """Return a table in which no output is of two classes, and no class has all outputs."""
    of: dict[int, str] = {}
    for name, indices in table.items():
        for index in indices:
            if index in of:
                raise InputError(f"output {index} of the model is both {of[index]!r} and {name!r}: make them one class")
            of[index] = name
        if len(set(indices)) == outputs:
            raise InputError(f"every output of the model is {name!r}, so no answer can be wrong")
    return table


def _unmatched(unknown: Sequence[str], labels: Sequence[str] | None, outputs: int, classes: int) -> str:
    if labels is None:
        return (
            f"the model has {outputs} outputs without names and the data {classes} classes; name the model's labels "
            "(--labels FILE) or give a table from class to output ([data] class_map)"
        )
    hint = _nearest(unknown[0], labels)
    listed = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    return f"the model has no label {listed}{hint}; a table from class to labels can be given ([data] class_map)"


def _nearest(name: str, labels: Sequence[str]) -> str:
    near = difflib.get_close_matches(plain(name), [*_by_name(labels)], n=1, cutoff=0.5)
    return f"; the nearest to {name!r} is {labels[_by_name(labels)[near[0]][0]]!r}" if near else ""


def plain(name: str) -> str:
    """Return a name without what people write in different ways: case, underscores, hyphens, spaces."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _by_name(labels: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the outputs of each name; a whole label counts before one of its synonyms."""
    whole: dict[str, tuple[int, ...]] = {}
    parts: dict[str, tuple[int, ...]] = {}
    for number, label in enumerate(labels):
        whole[plain(label)] = (*whole.get(plain(label), ()), number)
        for part in label.split(","):
            parts[plain(part)] = (*parts.get(plain(part), ()), number)
    return {**parts, **whole}


def _given(
    name: str, table: Mapping[str, Sequence[int | str]], labels: Sequence[str] | None, outputs: int
) -> tuple[int, ...]:
    if name not in table:
        raise InputError(f"the table of classes says nothing of {name!r}, of which there are pictures")
    by_name = _by_name(labels or ())
    found: list[int] = []
    for one in table[name]:
        indices = (one,) if isinstance(one, int) else by_name.get(plain(one), ())
        if not indices or max(indices) >= outputs or min(indices) < 0:
            hint = _nearest(one, labels or ()) if isinstance(one, str) else ""
            raise InputError(f"the table of classes gives {one!r} for {name!r}, which the model has not{hint}")
        found.extend(indices)
    return tuple(dict.fromkeys(found))


def read_class_map(path: Path) -> dict[str, list[int | str]]:
    """Read a table from class to indices or labels, of JSON; keys that begin with "_" are remarks.

    Raises:
        InputError: the file cannot be read, or is no such table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the table of classes in {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no table from class to labels: an object of JSON is expected")
    return class_map_of(found, str(path))


def class_map_of(found: Mapping[str, Any], source: str) -> dict[str, list[int | str]]:
    """Check a table from class to an index, a label, or a list of these; keys that begin with "_" are remarks.

    Raises:
        InputError: it is no such table.
    """
    table: dict[str, list[int | str]] = {}
    for name, value in found.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if str(name).startswith("_"):
            continue
        if not values or not all(isinstance(one, (Integral, str)) and not isinstance(one, bool) for one in values):
            raise InputError(f"{source}: {name!r} must have indices or labels of the model, not {value!r}")
        table[str(name)] = [one if isinstance(one, str) else int(one) for one in values]
    return table
