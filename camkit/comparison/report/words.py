"""The words and columns that all reports of a judgement share."""

from __future__ import annotations

import math

from camkit.comparison.judge import DECIDING, RANDOMISED, JudgedRow, MethodJudgement
from camkit.comparison.ranking import PRACTICALLY_LEVEL, UNMOVED, Standing
from camkit.metrics import METRICS

HOW_TO_READ = (
    "Each number is the mean over the pictures with its 95% interval. Bold: no method is clearly better in this "
    f"column, that is, significantly and by more than {PRACTICALLY_LEVEL:.0%} of its advantage over the random map. "
    "Grey: not significantly better than the random map on the same pictures.",
    "Three metrics decide together, because they contradict each other: SRG removes pixels in the order of the heat, "
    "ADCC multiplies the picture by its map, and SRG of feature cells removes cells of the layer, not pixels. The "
    "other columns show the parts of these metrics.",
    f'The column "shuffled weights" is the rank correlation of a map with the maps of the same network with shuffled '
    f"weights. Above {UNMOVED:g}, the map shows the picture, and not what the network has learned.",
    "The last rows know nothing about the network: random cells, a blob in the middle, and the nearness to the best "
    "single colour. A method that is no better than these rows shows nothing about the network.",
)


def title(metric: str) -> str:
    """Return the heading of a metric's column: its title and which direction is better."""
    return f"{METRICS[metric].title} {'↑' if METRICS[metric].better == 'higher' else '↓'}"


def space(metric: str) -> str:
    """Return what the metric changes, for the second line of the heading."""
    changed = {"input": "pixels", "features": "feature cells", "map": "nothing", "model": "weights"}
    decides = ", decides" if metric in DECIDING else ""
    return f"changes {changed[METRICS[metric].space]}{decides}"


def number(standing: Standing) -> str:
    """Return a mean with two digits."""
    return "" if not standing.estimate.groups else f"{standing.estimate.value:.2f}"


def span(standing: Standing) -> str:
    """Return an interval with two digits; empty if there is none."""
    low, high = standing.estimate.low, standing.estimate.high
    return f"{low:.2f} to {high:.2f}" if math.isfinite(low) else ""


def cost(row: JudgedRow) -> str:
    """Return the time of one map in plain passes."""
    return f"{row.cost:.1f}" if math.isfinite(row.cost) and not row.is_reference else ""


def shuffled(row: JudgedRow) -> str:
    """Return the correlation with the maps of shuffled weights."""
    return "" if row.unmoved is None else f"{row.unmoved:.2f}"


def notes(found: MethodJudgement) -> list[str]:
    """Return what else the reader should know about the rows."""
    said = []
    unmoved = [row.name for row in found.rows if row.hardly_changes]
    if unmoved:
        said.append(
            f"The maps of {', '.join(unmoved)} hardly change when the weights are shuffled "
            f"({METRICS[RANDOMISED].title}): they show the picture, and not what the network has learned."
        )
    pictures = len(found.pictures)
    for row in found.rows:
        if row.empty:
            said.append(f"{row.name}: {row.empty} of {pictures} maps are empty or not finite and have no values.")
        if row.failed[0]:
            said.append(f"{row.name}: failed on {row.failed[0]} of {pictures} pictures: {row.failed[1]}.")
    if found.unreadable:
        name, reason = next(iter(found.unreadable.items()))
        said.append(f"{len(found.unreadable)} pictures could not be used; the first: {name}: {reason}.")
    return said
