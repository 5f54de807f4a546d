"""Write the tables and plots of scripts/results/validation.md: does the check tell biased models from clean ones?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from camkit.options import Limits
from scripts.lab.lab_run import Row, write_between

Rules = Mapping[str, tuple[Callable[[Row], float], float | None]]

BIASED, CLEAN = 0.15, 0.03
"""Accuracy lost when the shortcut is redrawn, above which a model is biased and below which it is clean."""

TUNED_SHORTCUTS, TUNED_ARCHITECTURES = ("background", "corner"), ("plain", "residual")
"""The models that were looked at while the limits were made; all others are held out."""


def loss(row: Row) -> float:
    """Return a model's truth: the accuracy it loses when the shortcut is redrawn."""
    return float(row["matched"] - row["redrawn"])


def kind(row: Row) -> str:
    """Return "biased", "clean" or "between", by the accuracy that a model loses."""
    return "biased" if loss(row) > BIASED else "clean" if loss(row) < CLEAN else "between"


def is_held_out(row: Row) -> bool:
    """Whether neither the architecture nor, if the model is biased, the shortcut was used for tuning."""
    if row["architecture"] in TUNED_ARCHITECTURES:
        return False
    return kind(row) == "clean" or row["shortcut"] not in TUNED_SHORTCUTS


NO_SCORE = -math.inf
"""The score if a rule has no figure, for example because all maps are empty: the model is not condemned."""


def _weakest(by_fill: Row) -> float:
    """Return the smallest effect over the fills."""
    return min((float(measured["effect"]["value"]) for measured in by_fill.values()), default=NO_SCORE)


def effect(row: Row, name: str) -> float:
    """Return the gap or sufficiency of all classes together."""
    return _weakest(row["overall"][name])


def evidence(row: Row) -> float:
    """Return the larger of gap and sufficiency, on which the verdict rests."""
    return max(effect(row, "gap"), effect(row, "sufficiency"))


def _low(name: str, over: str | None = None) -> Callable[[Row], float]:
    """Return a score that rises as a measure, or its ratio to the measure ``over``, falls."""

    def score(row: Row) -> float:
        value, divisor = row["overall"][name], 1.0 if over is None else row["overall"][over]
        if isinstance(value, dict):
            value = value["value"]
        return NO_SCORE if value is None or not divisor else -float(value) / float(divisor)

    return score


SCORES: dict[str, tuple[Callable[[Row], float], float | None]] = {
    "camkit: gap or sufficiency": (evidence, None),
    "background gap alone": (lambda row: effect(row, "gap"), None),
    "sufficiency alone": (lambda row: effect(row, "sufficiency"), None),
    "skill of the heat < 0": (_low("skill"), 0.0),
    "energy E < 0.5": (_low("energy"), -0.5),
    "E / A < 1": (_low("energy", over="area"), -1.0),
    "pointing game < 0.5": (_low("hits"), -0.5),
    "accuracy < 0.9": (_low("accuracy"), -0.9),
}
"""Each rule's score, which is higher the more likely a model is biased, and the limit at which people use the rule, if
there is one."""


def auroc(biased: Sequence[float], clean: Sequence[float]) -> float:
    """Return how often a biased model scores higher than a clean one; ties count half."""
    ranks = rankdata([*biased, *clean])
    return float((ranks[: len(biased)].sum() - len(biased) * (len(biased) + 1) / 2) / (len(biased) * len(clean)))


def interval(biased: Sequence[float], clean: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the AUROC's 95% bootstrap interval over models."""
    rng = np.random.default_rng(0)
    first, second = np.asarray(biased), np.asarray(clean)
    areas = [
        auroc(rng.choice(first, len(first)).tolist(), rng.choice(second, len(second)).tolist()) for _ in range(draws)
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    return float(low), float(high)


def detection(biased: NDArray[np.float64], clean: NDArray[np.float64], alarms: float = 0.05) -> float:
    """Return the share of biased models above the limit that at most a share ``alarms`` of the clean ones exceed."""
    return float((biased > np.quantile(clean, 1 - alarms, method="higher")).mean())


def page(rows: Sequence[Row], held_out: Callable[[Row], bool] = is_held_out, rules: Rules = SCORES) -> str:
    """Return the page, without the plots.

    Args:
        rows: the models, judged.
        held_out: whether a model was not looked at while the rule was made.
        rules: the rules that are compared: each with its score, and its limit if it has one.
    """
    parts = [
        _head(rows),
        _table("Held out: other architectures, other shortcuts", [row for row in rows if held_out(row)], rules),
        _table("All models", rows, rules),
    ]
    parts.append(_verdicts(rows))
    return "\n\n".join(parts) + "\n"


def _head(rows: Sequence[Row]) -> str:
    kinds = Counter(kind(row) for row in rows)
    return (
        f"{len(rows)} models: {kinds['biased']} biased (they lose more than {BIASED:g} of their accuracy when "
        f"the shortcut is redrawn), {kinds['clean']} clean (they lose less than {CLEAN:g}), and {kinds['between']} in "
        "between, which count as neither."
    )


def _table(title: str, rows: Sequence[Row], rules: Rules) -> str:
    biased, clean = ([row for row in rows if kind(row) == wanted] for wanted in ("biased", "clean"))
    lines = [
        f"### {title}",
        "",
        f"{len(biased)} biased, {len(clean)} clean.",
        "",
    ]
    if not biased or not clean:
        return "\n".join([*lines, "Rules can be compared only if there are both."])
    lines += [
        "| rule | AUROC | 95% interval | biased found at 5% false alarms | biased found at its limit "
        "| clean condemned at its limit |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (score, limit) in rules.items():
        biased_scores, clean_scores = (np.array([score(row) for row in group]) for group in (biased, clean))
        low, high = interval(biased_scores.tolist(), clean_scores.tolist())
        found, condemned = (
            _above_limit(name, limit, group, scores)
            for group, scores in ((biased, biased_scores), (clean, clean_scores))
        )
        area = auroc(biased_scores.tolist(), clean_scores.tolist())
        share = detection(biased_scores, clean_scores)
        lines.append(f"| {name} | {area:.3f} | {low:.3f} to {high:.3f} | {share:.0%} | {found} | {condemned} |")
    return "\n".join(lines)


def _above_limit(name: str, limit: float | None, rows: Sequence[Row], scores: NDArray[Any]) -> str:
    """Return how many models a rule condemns at its limit; "" if it has none. camkit condemns by the verdict FAIL."""
    if name.startswith("camkit"):
        return f"{sum(row['verdict'] == 'FAIL' for row in rows)} of {len(rows)}"
    return "" if limit is None else f"{int((scores > limit).sum())} of {len(rows)}"


def _counted(rows: Sequence[Row]) -> str:
    """Return the cells of a table row that count the verdicts."""
    counts = Counter(row["verdict"] for row in rows)
    return " | ".join(str(counts[verdict]) for verdict in ("FAIL", "WARN", "INCONCLUSIVE", "PASS"))


def _verdicts(rows: Sequence[Row]) -> str:
    lines = [
        "### Verdicts",
        "",
        "| truth | models | FAIL | WARN | INCONCLUSIVE | PASS |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for truth in ("biased", "between", "clean"):
        models = [row for row in rows if kind(row) == truth]
        lines.append(f"| {truth} | {len(models)} | {_counted(models)} |")
    lines += [
        "",
        "| shortcut | correlation | models | biased | largest loss | FAIL | WARN | INCONCLUSIVE | PASS |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    keys = sorted({(row["shortcut"], row["correlation"]) for row in rows})
    for shortcut, correlation in keys:
        models = [row for row in rows if (row["shortcut"], row["correlation"]) == (shortcut, correlation)]
        biased, largest = sum(kind(row) == "biased" for row in models), max(map(loss, models))
        name = "none" if correlation == 0 else shortcut
        lines.append(f"| {name} | {correlation:g} | {len(models)} | {biased} | {largest:.2f} | {_counted(models)} |")
    return "\n".join(lines)


def write_page(
    file: Path,
    mark: str,
    picture: str,
    rows: Sequence[Row],
    held_out: Callable[[Row], bool] = is_held_out,
    rules: Rules = SCORES,
) -> None:
    """Write the tables between the marks of a page, and the plots beside the page. The text around the marks stays."""
    plots(rows, file.parent / picture, held_out, rules)
    write_between(file, mark, page(rows, held_out, rules))


def plots(
    rows: Sequence[Row], file: Path, held_out: Callable[[Row], bool] = is_held_out, rules: Rules = SCORES
) -> None:
    """Draw each model's evidence over its truth, and the ROC curve of every rule on the held-out models."""
    from matplotlib import pyplot  # noqa: PLC0415 - only this function needs it

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.6), layout="constrained")
    _plot_evidence(rows, left, held_out)
    _plot_curves([row for row in rows if held_out(row)], right, rules)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


_COLOURS = {"FAIL": "#b3261e", "WARN": "#c98a00", "PASS": "#1b6b3a", "INCONCLUSIVE": "#6b7c93"}


def _plot_evidence(rows: Sequence[Row], left: Any, held_out: Callable[[Row], bool]) -> None:
    for unseen, mark in ((False, "o"), (True, "^")):
        models = [row for row in rows if held_out(row) is unseen]
        colours = [_COLOURS[row["verdict"]] for row in models]
        left.scatter(
            [loss(row) for row in models], [evidence(row) for row in models], c=colours, marker=mark, s=26, alpha=0.75
        )
    left.axhline(Limits().gap, color="grey", linewidth=0.8)
    left.axvspan(CLEAN, BIASED, color="grey", alpha=0.12)
    left.set_xlabel("accuracy lost when the shortcut is redrawn")
    left.set_ylabel("larger of gap and sufficiency")
    left.set_title("red FAIL, yellow WARN, green PASS, blue INCONCLUSIVE; triangles are held out", fontsize=9)


def _plot_curves(rows: Sequence[Row], right: Any, rules: Rules) -> None:
    for name, (score, _) in rules.items():
        biased, clean = (
            np.array([score(row) for row in rows if kind(row) == wanted]) for wanted in ("biased", "clean")
        )
        limits = np.sort(np.concatenate([biased, clean, [np.inf]]))[::-1]
        alarms, found = ([(scores >= limit).mean() for limit in limits] for scores in (clean, biased))
        area = auroc(biased.tolist(), clean.tolist())
        right.plot([*alarms, 1], [*found, 1], label=f"{name} ({area:.2f})", linewidth=1.6)
    right.set_xlabel("clean models condemned")
    right.set_ylabel("biased models found")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    right.set_title("held-out models", fontsize=9)
