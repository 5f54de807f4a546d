"""The words and columns that all reports of a judgement share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version

from camkit.comparison.judge import DECIDING, FILL, RANDOMISED, STEPS, JudgedRow, MethodJudgement
from camkit.comparison.ranking import PRACTICALLY_LEVEL, UNMOVED, Standing
from camkit.metrics import METRICS

VERSION = version("camkit")

NOT_BETTER, WORSE = "?", "!"
"""The marks after a mean that is not significantly better than the random map's, and after one that is worse."""

_FIRST_PICTURES = 5
"""A report names at most this many of the pictures that were left out; judge.json names all."""

HOW_TO_READ = (
    "Three metrics decide together, because they contradict each other: SRG removes pixels in the order of the heat, "
    "ADCC multiplies the picture by its map, and SRG of feature cells removes cells of the layer, not pixels. The "
    "other columns show the parts of these metrics.",
    f'The column "shuffled weights" is the rank correlation of a map with the maps of the same network with shuffled '
    f"weights. Above {UNMOVED:g}, the map shows the picture, and not what the network has learned.",
    "The last rows know nothing about the network: random cells, a blob in the middle, and the nearness to the best "
    "single colour. A method that is no better than these rows shows nothing about the network.",
)


def legend(best: str) -> str:
    """Return what the numbers and marks of a table mean.

    Args:
        best: how the report marks a mean that is as good as the best.
    """
    return (
        f"Each number is the mean over the pictures with its 95% interval. {best}: no method is clearly better in this "
        f"column, that is, significantly and by more than {PRACTICALLY_LEVEL:.0%} of its advantage over the random "
        f"map. {NOT_BETTER}: not significantly better than the random map on the same pictures. {WORSE}: significantly "
        "worse than the random map."
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
    """Return a mean with two digits; a hyphen if there is none."""
    return f"{standing.estimate.value:z.2f}" if standing.estimate.groups else "-"


def span(standing: Standing) -> str:
    """Return an interval with two digits; empty if there is none."""
    low, high = standing.estimate.low, standing.estimate.high
    return f"[{low:z.2f}, {high:z.2f}]" if math.isfinite(low) else ""


def is_best(row: JudgedRow, standing: Standing) -> bool:
    """Tell whether a mean is marked as good as the best: only if it also beats the random map."""
    return not row.is_reference and standing.level_with_best and standing.beats_random


def doubt(row: JudgedRow, standing: Standing) -> str:
    """Return the mark of a mean that does not beat the random map; empty for others and for reference maps."""
    if row.is_reference or standing.beats_random or not standing.estimate.groups:
        return ""
    return WORSE if standing.loses_to_random else NOT_BETTER


def cost(row: JudgedRow) -> str:
    """Return the time of one map in plain passes."""
    return f"{row.cost:.1f}" if math.isfinite(row.cost) and not row.is_reference else ""


def shuffled(row: JudgedRow) -> str:
    """Return the correlation with the maps of shuffled weights."""
    return "" if row.unmoved is None else f"{row.unmoved:.2f}"


def measured(found: MethodJudgement) -> str:
    """Return how the metrics were computed: the fill, the steps, and the layer of the feature cells."""
    removes = f"{METRICS['feature-srg'].title} removes cells of layer {found.layer!r}, for all rows alike"
    return (
        f"{len(found.pictures)} pictures, seed {found.seed}. The fill of removed pixels is {FILL}, and a curve has "
        f"{STEPS} steps.{f' {removes}.' if found.layer else ''}"
    )


def left_out(found: MethodJudgement) -> list[str]:
    """Return a sentence for each picture that could not be used: its name and the reason."""
    return [reason if name in reason else f"{name}: {reason}" for name, reason in found.unreadable.items()]


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
    most = {name: max(row.standings[name].estimate.groups for row in found.rows) for name in found.metrics}
    said += [
        f"No map has a value on {count} of {pictures} pictures in {titles}."
        for count, titles in _by_count({name: pictures - known for name, known in most.items()})
    ]
    for row in found.rows:
        failed, reason = row.failed
        if failed == pictures:
            said.append(f"{row.name} works on none of the {pictures} pictures: {reason}.")
            continue
        if failed:
            said.append(f"{row.name} fails on {failed} of {pictures} pictures: {reason}.")
        if row.empty:
            are = "is" if row.empty == 1 else "are"
            said.append(f"{row.name}: {row.empty} of {pictures} maps {are} empty or not finite.")
        if row.is_reference:
            missing = {name: known - row.standings[name].estimate.groups for name, known in most.items()}
            instead = "its mean leaves them out"
        else:
            missing = {name: row.missing.get(name, 0) for name in found.metrics}
            instead = "there it counts like the random map"
        said += [
            f"{row.name} has no value on {count} of {pictures} pictures in {titles}; {instead}."
            for count, titles in _by_count(missing)
        ]
    return said


def _by_count(counts: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return each count above 0 with the titles of the metrics that have it."""
    metrics_of: dict[int, list[str]] = {}
    for name, count in counts.items():
        if count:
            metrics_of.setdefault(count, []).append(METRICS[name].title)
    return [
        (count, "all metrics" if len(titles) == len(counts) else ", ".join(titles))
        for count, titles in sorted(metrics_of.items())
    ]


def pictures_left_out(found: MethodJudgement) -> list[str]:
    """Return a note about the pictures that could not be used, if there are any."""
    sentences = left_out(found)
    if not sentences:
        return []
    more = len(sentences) - _FIRST_PICTURES
    named = "; ".join(sentences[:_FIRST_PICTURES]) + (f"; and {more} more, which judge.json names" if more > 0 else "")
    return [f"{len(sentences)} picture{'s' * (len(sentences) > 1)} could not be used: {named}."]
