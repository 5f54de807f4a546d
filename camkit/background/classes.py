"""Map each class of the data to outputs of the model."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from camkit.errors import InputError, advice, refuse_pipe
from camkit.kit.statistics import wilson
from camkit.kit.wording import first_of, listed
from camkit.options.settings import normalize_name

_WORDNET = re.compile(r"n\d{8}")

_MOST_NAMES = 5
"""The most classes that an error lists."""

_SIMILAR = 0.5
"""The least similarity (difflib's ratio) at which an error suggests a label for a misspelt name."""


ClassMap = Mapping[str, Sequence[int | str] | None]
"""Maps each class to indices or labels of the model; None leaves the pictures of a class out."""


@dataclass(frozen=True)
class ClassMatch:
    """The model's output indices for each class of the data, and a description of how they were found."""

    indices: Mapping[str, tuple[int, ...]]
    how: str


def match_classes(
    classes: Sequence[str],
    labels: Sequence[str] | None,
    outputs: int,
    class_map: ClassMap | None,
    counts: Mapping[str, int] | None = None,
) -> ClassMatch:
    """Find the model's outputs for each class of the data.

    Args:
        classes: the classes of the data, sorted by name.
        labels: the model's labels, in the order of its outputs.
        outputs: how many outputs the model has.
        class_map: maps classes to indices or labels; None if the caller has no map.
        counts: how many pictures each class has, for messages.

    Returns:
        The outputs by class map if there is one. Else by label, if each class is a label or a synonym in one ("tabby,
        tabby cat"). Else by number. Else by order, as torchvision's ImageFolder numbers its classes, if there are as
        many classes as outputs.

    Raises:
        InputError: none of these rules applies, or the class map is wrong.
    """
    if class_map is not None:
        indices = {name: _look_up(name, class_map, labels, outputs, counts or {}) for name in classes}
        return ClassMatch(_validated(indices, outputs), "by the class map")
    unknown = list(classes)
    if labels is not None:
        by_name = _outputs_by_name(labels)
        indices = {name: by_name.get(normalize_name(name), ()) for name in classes}
        unknown = [name for name in classes if not indices[name]]
        if not unknown:
            ambiguous = [
                f"{name!r} has the outputs {' and '.join(map(str, several))}"
                for name, several in indices.items()
                if len(several) > 1
            ]
            return ClassMatch(_validated(indices, outputs), "; ".join(["by label", *ambiguous]))
    if all(name.isdecimal() and int(name) < outputs for name in classes):
        return ClassMatch(_validated({name: (int(name),) for name in classes}, outputs), "by number")
    wordnet = all(_WORDNET.fullmatch(name) for name in classes)
    if len(classes) == outputs and (labels is None or wordnet):
        indices = {name: (number,) for number, name in enumerate(sorted(classes))}
        return ClassMatch(indices, "by order, as ImageFolder does")
    raise InputError(_no_match(unknown, labels, outputs, len(classes)))


def _validated(indices: dict[str, tuple[int, ...]], outputs: int) -> dict[str, tuple[int, ...]]:
    """Return the indices if no two classes share an output and no class has all outputs."""
    owners: dict[int, str] = {}
    for name, own in indices.items():
        for index in own:
            if index in owners:
                raise InputError(
                    f"output {index} of the model belongs to both {owners[index]!r} and {name!r}; merge these classes"
                )
            owners[index] = name
        if len(set(own)) == outputs:
            raise InputError(
                f"class {name!r} has every output of the model, so no answer can be wrong; change the class map"
            )
    return indices


def _no_match(unknown: Sequence[str], labels: Sequence[str] | None, outputs: int, classes: int) -> str:
    if labels is None:
        return (
            f"the model has {outputs} unnamed outputs and the data has {classes} classes; pass the model's labels "
            + advice(
                "(labels=[...]) or a class map (class_map={...})",
                "(--labels FILE) or a class map (--class-map FILE)",
            )
        )
    named = first_of(list(map(repr, unknown)), _MOST_NAMES)
    return (
        f"the model has no label {named}{_suggestion(unknown[0], labels)}; "
        f"rename the classes or pass a class map ({advice('class_map={...}', '--class-map FILE')})"
    )


def _suggestion(name: str, labels: Sequence[str]) -> str:
    by_name = _outputs_by_name(labels)
    similar = difflib.get_close_matches(normalize_name(name), [*by_name], n=1, cutoff=_SIMILAR)
    return f"; the nearest label to {name!r} is {labels[by_name[similar[0]][0]]!r}" if similar else ""


def _outputs_by_name(labels: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the outputs for each label and synonym; a complete label takes precedence over a synonym."""
    complete: dict[str, tuple[int, ...]] = {}
    synonyms: dict[str, tuple[int, ...]] = {}
    for number, label in enumerate(labels):
        name = normalize_name(label)
        complete[name] = (*complete.get(name, ()), number)
        for part in label.split(","):
            name = normalize_name(part)
            synonyms[name] = (*synonyms.get(name, ()), number)
    return {**synonyms, **complete}


def _look_up(
    name: str, class_map: ClassMap, labels: Sequence[str] | None, outputs: int, counts: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the outputs that the class map gives a class."""
    entries = class_map.get(name)
    if entries is None:
        pictures = f" ({counts[name]} picture{'' if counts[name] == 1 else 's'})" if name in counts else ""
        raise InputError(f"class map: no entry for {name!r}{pictures}; map it to null to leave it out")
    by_name = _outputs_by_name(labels or ())
    indices: list[int] = []
    for entry in entries:
        own = (entry,) if isinstance(entry, int) else by_name.get(normalize_name(entry), ())
        if isinstance(entry, str) and not own:
            hint = _suggestion(entry, labels or ())
            raise InputError(f"class map: {entry!r} for {name!r} is not one of the model's labels{hint}")
        if max(own) >= outputs or min(own) < 0:
            raise InputError(f"class map: {entry!r} for {name!r} is not one of the model's {outputs} outputs")
        indices.extend(own)
    return tuple(dict.fromkeys(indices))


def question_order(
    labels: Sequence[str], answers: Sequence[int], outputs: Mapping[str, Sequence[int]], names: Sequence[str] | None
) -> str | None:
    """Return a question about the order of the classes if another order fits the answers much better; else None.

    It does if, among the pictures whose class would move, significantly more than half get the answer of the new place.
    The best order maximises the accuracy (Kuhn 1955, 10.1002/nav.3800020109).

    Args:
        labels, answers: the class of each picture, and the output that the model named; below 0 if it named none.
        outputs: the model's outputs for each class.
        names: the model's labels.
    """
    classes = sorted(set(labels))
    own = {output: name for name in classes for output in outputs[name]}
    columns: list[str | int] = [*classes, *sorted({*answers} - own.keys())]
    places: dict[str | int, int] = {answer: place for place, answer in enumerate(columns)}
    counts = np.zeros((len(classes), len(columns)))
    for label, answer in zip(labels, answers, strict=True):
        counts[places[label], places[own.get(answer, answer)]] += answer >= 0
    ties = np.eye(*counts.shape) / (len(classes) + 1)  # a class keeps its place unless another is better
    best = linear_sum_assignment(counts + ties, maximize=True)[1]
    sizes, hits = Counter(labels), counts[np.arange(len(classes)), best]
    moved = np.flatnonzero(best != np.arange(len(classes)))
    if wilson(int(hits[moved].sum()), sum(sizes[classes[place]] for place in moved))[0] <= 0.5:
        return None
    clear = [place for place in moved if 2 * hits[place] > sizes[classes[place]]]
    verbs = ["were the model's", *["its"] * (_MOST_NAMES - 1)]
    shown = [
        f"{classes[place]!r} {verb} {_in_words(columns[best[place]], outputs, names)}"
        for place, verb in zip(clear, verbs, strict=False)
    ]
    if len(clear) > _MOST_NAMES:
        shown.append(f"{len(clear) - _MOST_NAMES} more changed places")
    return (
        f"accuracy is {counts.trace() / len(labels):.0%}, but would be {hits.sum() / len(labels):.0%} if "
        f"{listed(shown)}: are the labels in the model's order?"
    )


def _in_words(answer: str | int, outputs: Mapping[str, Sequence[int]], names: Sequence[str] | None) -> str:
    output = outputs[answer][0] if isinstance(answer, str) else answer
    label = f" ({names[output]})" if names is not None and output < len(names) else ""
    return f"class {output}{label}"


def read_class_map(source: Mapping[str, Any] | Path) -> dict[str, list[int | str] | None]:
    """Read a table, or a JSON file of it, from class to an index, a label or a list of them.

    None leaves the pictures of a class out. Keys that begin with "_" are comments.

    Raises:
        InputError: the file cannot be read, or a value is something else.
    """
    table: Any = source
    named = source if isinstance(source, Path) else "class_map"
    if isinstance(source, Path):
        refuse_pipe(source)
        try:
            table = json.loads(source.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"the class map {source} cannot be read: {error}") from error
        if not isinstance(table, dict):
            raise InputError(f"the class map {source} must be a JSON object from class to indices or labels")
    class_map: dict[str, list[int | str] | None] = {}
    for name, value in table.items():
        if str(name).startswith("_"):
            continue
        if value is None:
            class_map[str(name)] = None
            continue
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if not entries or not all(
            isinstance(entry, (Integral, str)) and not isinstance(entry, bool) for entry in entries
        ):
            raise InputError(
                f"{named}: {name!r} must have indices or labels of the model, or null to leave it out, not {value!r}"
            )
        class_map[str(name)] = [entry if isinstance(entry, str) else int(entry) for entry in entries]
    return class_map
