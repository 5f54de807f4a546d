"""Metrics: how far a map can be trusted, as numbers with reference rows.

    >>> import camkit
    >>> explainer = camkit.Explainer("demo-fair")
    >>> plane = camkit.scenes.scene_paths()["plane-sky"]
    >>> values = camkit.metrics.evaluate(explainer, explainer(plane), plane, metrics="srg")
    >>> values["srg"].status
    'ok'

``METRICS`` has all of them with formula, paper, direction and cost; docs/metrics.md explains how to read them. Each is
a function under ``@register_metric`` in a module of this package, or in the user's own code. ``camkit.compare``,
``camkit.judge`` and ``camkit.slide`` show and weigh these numbers for several methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from camkit.errors import InputError
from camkit.explaining.explanation import Explanation
from camkit.metrics import faithfulness, whole_map  # noqa: F401 - they register the metrics, in this order
from camkit.metrics.evaluator import DEFAULTS, FILLS, Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.registry import METRICS, Metric, UndefinedError, Value, Values, ValueTable, register_metric
from camkit.targets.maps import names_cells

if TYPE_CHECKING:
    from camkit.metrics.evaluator import ModelLike
    from camkit.metrics.heat import MapLike
    from camkit.targets import TargetLike
    from camkit.types import ImageLike

__all__ = [
    "DEFAULTS",
    "FILLS",
    "METRICS",
    "Evaluator",
    "Heat",
    "Metric",
    "UndefinedError",
    "Value",
    "ValueTable",
    "Values",
    "evaluate",
    "references",
    "register_metric",
]


def evaluate(
    model: ModelLike,
    given: MapLike,
    picture: ImageLike,
    metrics: str | Iterable[str] | None = None,
    *,
    target: TargetLike | None = None,
    **options: Any,
) -> Values:
    """Judge one map of one picture. For several maps, an ``Evaluator`` prepares the picture once.

    Args:
        model: an ``Explainer``, or what it takes as a model.
        given: an explanation of this picture, or an array: at the size of the model's input, or coarser, which is
            enlarged bilinearly.
        picture: what was explained.
        metrics: names from ``METRICS``; None for ``DEFAULTS``.
        target: what the map is for; None for the class of the explanation, or for the picture's best class if the map
            is an array.
        **options: ``region``, ``fill``, ``steps``, ``layer``, ``seed`` and ``batch_size`` as for ``Evaluator``.

    Returns:
        A ``Value`` for each metric: a number, or the reason why there is none.

    Raises:
        InputError: an argument, the model, the picture or the map is wrong.

    Examples:
        >>> import camkit
        >>> plane = camkit.scenes.scene_paths()["plane-sky"]
        >>> camkit.metrics.evaluate("demo-fair", camkit.explain("demo-fair", plane), plane, ["complexity"])
        <complexity 0...>
    """
    if isinstance(given, Explanation) and target is None:
        if given.target is None:
            raise InputError(f"the explanation is of {given.name!r} and not of a class; pass its target")
        if given.made is None and names_cells(given.quantity):
            raise InputError(
                f"the explanation is of the {given.quantity}, which a table does not keep; pass its target"
            )
        kept = None if given.made is None else given.made.target
        target = given.target if kept is None else kept
    return Evaluator(model, picture, target, **options)(given, metrics)


def references(
    model: ModelLike, picture: ImageLike, target: TargetLike | None = None, **options: Any
) -> dict[str, Heat]:
    """Return the maps that every table has for comparison: "random", "centre" and "colour".

    A random map of 7 x 7 cells; a Gaussian in the middle; and how near the cells are to a single colour, for the best
    of the corners of the picture's colour cube. The best is the colour whose hotter half of the picture keeps the score
    highest and loses it most when it is removed. None of them knows the model otherwise.

    Args:
        model, picture, target: as for ``evaluate``.
        **options: as for ``evaluate``; ``seed`` is that of the random map.

    Returns:
        A ``Heat`` for each, which ``Evaluator`` judges like an explanation; ``.values`` is the map at the size of the
        model's input.

    Raises:
        InputError: an argument, the model or the picture is wrong.
    """
    return Evaluator(model, picture, target, **options).references()
