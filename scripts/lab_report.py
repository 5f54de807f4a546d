"""From the lab's models to ``docs/validation.md`` and its plots: does the check tell biased models from clean ones?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from camkit.background.config import LimitsSection
from camkit.background.measures import Measures, Tested
from camkit.background.statistics import Estimate
from camkit.background.verdict import judge

Row = dict[str, Any]

BIASED, CLEAN = 0.15, 0.03
"""Accuracy lost when the shortcut is redrawn, above which a model is biased and below which it is clean."""

TUNED_SHORTCUTS, TUNED_ARCHITECTURES = ("background", "corner"), ("plain", "residual")
"""What the limits were looked at with; all else is held out."""


def loss(row: Row) -> float:
    """Return a model's truth: the accuracy it loses when the shortcut is redrawn."""
    return float(row["matched"] - row["redrawn"])


def kind(row: Row) -> str:
    """Return what a model is by its own behaviour."""
    return "biased" if loss(row) > BIASED else "clean" if loss(row) < CLEAN else "between"


def is_held_out(row: Row) -> bool:
    """Whether neither the architecture nor, of a biased model, the shortcut was used for tuning."""
    if row["architecture"] in TUNED_ARCHITECTURES:
        return False
    return kind(row) == "clean" or row["shortcut"] not in TUNED_SHORTCUTS


NOTHING = -math.inf
"""The score of a model of which a rule has no figure, such as of one whose maps are all empty: not condemned."""


def _least(by_fill: Row) -> float:
    """Return an effect by the fill that shows less."""
    return min((float(one["effect"]["value"]) for one in by_fill.values()), default=NOTHING)


def effect(row: Row, what: str) -> float:
    """Return the gap or sufficiency of all classes together."""
    return _least(row["overall"][what])


def attraction(row: Row) -> float:
    """Return the largest attraction of a class."""
    return max(_least(one["attraction"]) for one in row["classes"].values())


def evidence(row: Row) -> float:
    """Return what the verdict rests on: the larger of gap and sufficiency."""
    return max(effect(row, "gap"), effect(row, "sufficiency"))


def _low(name: str, over: str | None = None) -> Callable[[Row], float]:
    """Return a score that is higher the lower a measure is, or its ratio to another."""

    def score(row: Row) -> float:
        value, by = row["overall"][name], 1.0 if over is None else row["overall"][over]
        if isinstance(value, dict):
            value = value["value"]
        return NOTHING if value is None or not by else -float(value) / float(by)

    return score


SCORES: dict[str, tuple[Callable[[Row], float], float | None]] = {
    "camkit: gap or sufficiency": (evidence, None),
    "background gap alone": (lambda row: effect(row, "gap"), None),
    "sufficiency alone": (lambda row: effect(row, "sufficiency"), None),
    "largest attraction of a class": (attraction, None),
    "skill of the heat < 0": (_low("skill"), 0.0),
    "energy E < 0.5": (_low("energy"), -0.5),
    "E / A < 1": (_low("energy", over="area"), -1.0),
    "pointing game < 0.5": (_low("hits"), -0.5),
    "accuracy < 0.9": (_low("accuracy"), -0.9),
}
"""What tells a biased model: the higher the likelier; and the limit at which it is used today, where it is a rule."""


def judged_again(row: Row, limits: LimitsSection) -> Row:
    """Return a model's row with the verdict of the present rule on its stored measures."""
    measures = {name: _measures(one) for name, one in (*row["classes"].items(), ("", row["overall"]))}
    judged = judge(measures, limits, exempt={}, waived={}, insane=row["sanity"]["problems"])
    return {**row, "verdict": judged[""].verdict, "reasons": [reason.text for reason in judged[""].reasons]}


def _measures(stored: Row) -> Measures:
    def tested(by_fill: Row) -> dict[str, Tested]:
        return {
            fill: Tested(Estimate(**one["effect"]), one["p"], tuple(one["accuracies"]), one["pictures"])
            for fill, one in by_fill.items()
        }

    known = {name: value for name, value in stored.items() if name != "verdict"}
    known["accuracy"] = Estimate(**known["accuracy"])
    known["skill"] = known["skill"] and Estimate(**known["skill"])
    return Measures(**{**known, **{what: tested(known[what]) for what in ("gap", "sufficiency", "attraction")}})


def auroc(biased: Sequence[float], clean: Sequence[float]) -> float:
    """Return how often a biased model has a higher score than a clean one; ties count half."""
    ranks = rankdata([*biased, *clean])
    return float((ranks[: len(biased)].sum() - len(biased) * (len(biased) + 1) / 2) / (len(biased) * len(clean)))


def interval(biased: Sequence[float], clean: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bootstrap interval of the AUROC, over models."""
    rng = np.random.default_rng(0)
    first, second = np.asarray(biased), np.asarray(clean)
    found = [
        auroc(rng.choice(first, len(first)).tolist(), rng.choice(second, len(second)).tolist()) for _ in range(draws)
    ]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def detection(biased: NDArray[np.float64], clean: NDArray[np.float64], alarms: float = 0.05) -> float:
    """Return the share of biased models above the limit that so many clean ones exceed at most."""
    return float((biased > np.quantile(clean, 1 - alarms, method="higher")).mean())


def page(rows: Sequence[Row]) -> str:
    """Return the page, without the plots."""
    parts = [
        _head(rows),
        _table("Held out: other architectures, other shortcuts", [row for row in rows if is_held_out(row)]),
    ]
    parts.append(_table("All models", rows))
    parts.append(_verdicts(rows))
    parts.append(_clean(rows))
    return "\n\n".join(parts) + "\n"


def _head(rows: Sequence[Row]) -> str:
    kinds = Counter(kind(row) for row in rows)
    return (
        f"{len(rows)} models: {kinds['biased']} biased (they lose more than {BIASED:g} of their accuracy when "
        f"the shortcut is redrawn), {kinds['clean']} clean (less than {CLEAN:g}), {kinds['between']} in between, which "
        "count neither way below."
    )


def _table(title: str, rows: Sequence[Row]) -> str:
    biased, clean = ([row for row in rows if kind(row) == one] for one in ("biased", "clean"))
    lines = [
        f"### {title}",
        "",
        f"{len(biased)} biased, {len(clean)} clean.",
        "",
        "| | AUROC | interval | found at 5 % false alarms | biased found at its limit | clean condemned at it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (score, limit) in SCORES.items():
        first, second = (np.array([score(row) for row in of]) for of in (biased, clean))
        low, high = interval(first.tolist(), second.tolist())
        found, condemned = _at_limit(name, limit, (biased, clean), (first, second))
        area, share = auroc(first.tolist(), second.tolist()), detection(first, second)
        lines.append(f"| {name} | {area:.3f} | {low:.3f} to {high:.3f} | {share:.0%} | {found} | {condemned} |")
    return "\n".join(lines)


def _at_limit(
    name: str, limit: float | None, rows: tuple[list[Row], list[Row]], scores: tuple[NDArray[Any], NDArray[Any]]
) -> tuple[str, str]:
    if name.startswith("camkit"):
        counts = [sum(row["verdict"] == "FAIL" for row in of) for of in rows]
    elif limit is None:
        return "", ""
    else:
        counts = [int((one > limit).sum()) for one in scores]
    return f"{counts[0]} of {len(rows[0])}", f"{counts[1]} of {len(rows[1])}"


def _counted(rows: Sequence[Row]) -> str:
    """Return the cells that count verdicts."""
    counts = Counter(row["verdict"] for row in rows)
    return " | ".join(str(counts[one]) for one in ("FAIL", "WARN", "INCONCLUSIVE", "PASS"))


def _verdicts(rows: Sequence[Row]) -> str:
    lines = [
        "### Verdicts",
        "",
        "| shortcut | correlation | models | biased | lost at most | FAIL | WARN | INCONCLUSIVE | PASS |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    keys = sorted({(row["shortcut"], row["correlation"]) for row in rows})
    for shortcut, correlation in keys:
        of = [row for row in rows if (row["shortcut"], row["correlation"]) == (shortcut, correlation)]
        biased, cells = sum(kind(row) == "biased" for row in of), _counted(of)
        name = "none" if correlation == 0 else shortcut
        lines.append(f"| {name} | {correlation:g} | {len(of)} | {biased} | {max(map(loss, of)):.2f} | {cells} |")
    return "\n".join(lines)


def _clean(rows: Sequence[Row]) -> str:
    lines = [
        "### Clean models, hard ones included",
        "",
        "Gap and sufficiency are the largest of the models; accuracy and skill their means.",
        "",
        "| objects | folder | models | accuracy | gap | sufficiency | skill | FAIL | WARN | INCONCLUSIVE | PASS |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    clean = [row for row in rows if kind(row) == "clean"]
    for layout, folder in sorted({(row["layout"], row["folder_correlation"]) for row in clean}):
        of = [row for row in clean if (row["layout"], row["folder_correlation"]) == (layout, folder)]
        cells = _counted(of)
        accuracy = np.mean([row["overall"]["accuracy"]["value"] for row in of])
        gap, left = (max(effect(row, what) for row in of) for what in ("gap", "sufficiency"))
        skill = np.mean([row["overall"]["skill"]["value"] for row in of if row["overall"]["skill"]])
        lines.append(
            f"| {layout} | {folder:g} | {len(of)} | {accuracy:.2f} | {gap:.2f} | {left:.2f} | {skill:.2f} | {cells} |"
        )
    return "\n".join(lines)


def plots(rows: Sequence[Row], folder: Path) -> None:
    """Draw each model's evidence over its truth, and the curves of every rule on the held-out models."""
    from matplotlib import pyplot  # noqa: PLC0415 - only this needs it

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for held, mark in ((False, "o"), (True, "^")):
        of = [row for row in rows if is_held_out(row) is held]
        colours = [
            {"FAIL": "#b3261e", "WARN": "#c98a00", "PASS": "#1b6b3a"}.get(row["verdict"], "#6b7c93") for row in of
        ]
        left.scatter([loss(row) for row in of], [evidence(row) for row in of], c=colours, marker=mark, s=26, alpha=0.75)
    left.axhline(0.10, color="grey", linewidth=0.8)
    left.axvspan(CLEAN, BIASED, color="grey", alpha=0.12)
    left.set_xlabel("accuracy lost when the shortcut is redrawn")
    left.set_ylabel("gap or sufficiency, the larger")
    left.set_title("red FAIL, yellow WARN, green PASS, blue INCONCLUSIVE; triangles held out", fontsize=9)
    held_out = [row for row in rows if is_held_out(row)]
    for name, (score, _) in SCORES.items():
        biased, clean = (np.array([score(row) for row in held_out if kind(row) == one]) for one in ("biased", "clean"))
        steps = np.sort(np.concatenate([biased, clean, [np.inf]]))[::-1]
        alarms, found = ([(of >= step).mean() for step in steps] for of in (clean, biased))
        right.plot(
            [*alarms, 1], [*found, 1], label=f"{name} ({auroc(biased.tolist(), clean.tolist()):.2f})", linewidth=1.6
        )
    right.set_xlabel("clean models condemned")
    right.set_ylabel("biased models found")
    right.legend(fontsize=8, loc="lower right")
    right.set_title("held-out models", fontsize=9)
    figure.savefig(folder / "validation.png", dpi=110)
    pyplot.close(figure)
