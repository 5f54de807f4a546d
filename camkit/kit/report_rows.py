"""What the rows of a check's report say about one picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shares_right(image: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return how often the answer is right on backgrounds of the picture's own class, and on those of other classes.

    Args:
        image: a picture's row in ``report.json``; each share is the mean over the fills.

    >>> shares_right({"same": {"blur": 1.0, "mean": 0.5}, "other": {}})
    (0.75, None)
    """
    return _mean(image.get("same")), _mean(image.get("other"))


def _mean(by_fill: Mapping[str, float] | None) -> float | None:
    return round(sum(by_fill.values()) / len(by_fill), 3) if by_fill else None
