"""Metrics: how far a map can be trusted, as numbers with reference rows.

    >>> import camkit
    >>> explainer = camkit.Explainer("demo-fair")
    >>> plane = camkit.scenes.scene_paths()["plane-sky"]
    >>> values = camkit.metrics.evaluate(explainer, explainer(plane), plane, metrics="srg")
    >>> values["srg"].status
    'ok'

``METRICS`` has all of them with paper, direction and cost; docs/metrics.md has the formulas, and explains how to read
them. Each is a function under ``@register_metric`` in a module of this package, or in the user's own code.
``camkit.compare``, ``camkit.judge`` and ``camkit.slide`` show and weigh these numbers for several methods.
"""

from camkit.metrics import faithfulness  # noqa: F401 - it registers the metrics
from camkit.metrics.evaluator import (
    DEFAULTS,
    FILLS,
    METRICS,
    Evaluator,
    Heat,
    Metric,
    UndefinedError,
    Value,
    Values,
    ValueTable,
    evaluate,
    references,
    register_metric,
)

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
