"""What a check returns: the verdict, and everything it rests on."""

from __future__ import annotations

import functools
import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from camkit.background.card import write_card
from camkit.background.effects import IMAGES, OVERALL, ImageRow, Measures, Pair, all_excluded_above, measure_all
from camkit.background.kinds import Kinds
from camkit.background.plan import WORSE, Plan
from camkit.background.probe import Shortcut
from camkit.background.report import BASELINE_FILE, PAGE, SCHEMA, checksum, logged, render_json, rendered
from camkit.background.rule import Judgement, said, worst_first
from camkit.errors import InputError, as_error, printable, refuse_pipe
from camkit.images.files import write_file
from camkit.kit.statistics import (
    MIN_GROUPS,
    Estimate,
    bootstrap_sums,
    group_numbers,
    holm,
    interval,
    mean_over_groups,
    p_above,
)
from camkit.tables import Rows, Tabular, flat
from camkit.trackers import Log, Loggable

Inconclusive: TypeAlias = Literal["pass", "fail"]
"""Whether the verdict INCONCLUSIVE counts as a pass or as a failure."""


@dataclass(frozen=True)
class CheckRun:
    """When and how a check was run, which the reports for people state beside the results.

    Attributes:
        started: when the check began, with its time zone.
        seconds: how long it took, without the reports.
        command: the command as it was typed; "" if the check was called from Python.
    """

    started: datetime
    seconds: float
    command: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult(Tabular, Loggable):
    """The verdict of a check, and everything it rests on.

    Attributes:
        verdict: "FAIL", "WARN", "PASS" or "INCONCLUSIVE".
        classes: the measures of each class.
        overall: the measures of all classes together.
        judged: the verdict on each class, and why; the empty name stands for the model.
        images: one row per picture.
        failures: pictures that could not be used, and why.
        untested: pictures that could be used but not be shown on other backgrounds, and why.
        plan: what was checked, and how.
        method, layer, layer_reason: the method and the layer of the heat, and why camkit chose the layer.
        warnings: what the reader should know about the data and the config.
        change: the change since the baseline; None without a baseline.
        report: the HTML report; None if none was written.
        run: when and how the check was run.
        kinds: the accuracy of each class on each place that the data names; None if it names none.
        shortcut: what a linear layer on the model's features finds in the pictures without their objects; None if the
            model has no such features, or if there are too few groups.
    """

    classes: dict[str, Measures]
    overall: Measures
    judged: dict[str, Judgement]
    images: tuple[ImageRow, ...]
    failures: dict[str, str]
    plan: Plan
    method: str
    layer: str
    layer_reason: str
    warnings: tuple[str, ...] = ()
    run: CheckRun | None = None
    report: Path | None = None
    untested: Mapping[str, str] = field(default_factory=dict)
    change: Change | None = None
    kinds: Kinds | None = None
    shortcut: Shortcut | None = None

    def __repr__(self) -> str:
        """Return one line with the verdict and the first reason."""
        why = f": {self.reasons[0]}" if self.reasons else ""
        return f"<CheckResult {self.verdict} of {self.plan.model.name}{why}>"

    def _repr_html_(self) -> str:
        """Show the verdict, its reasons and where the report is in a notebook."""
        reasons = "".join(f"<li>{html.escape(printable(reason))}</li>" for reason in self.reasons)
        report = "" if self.report is None else f"<p>report: {html.escape(printable(str(self.report)))}</p>"
        title = html.escape(printable(f"{self.verdict}: {self.plan.model.name}"))
        return f"<h4>{title}</h4><ul>{reasons}</ul>{report}"

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the weights, the settings and the pictures."""
        return self.plan.hashes

    @property
    def inconclusive(self) -> Inconclusive:
        """Whether INCONCLUSIVE is a failure ("fail") or a "pass", also for the classes in the JUnit XML."""
        return self.plan.settings.run.inconclusive

    @property
    def grids(self) -> list[str]:
        """The sizes of the maps' grids, such as "7x7"."""
        return sorted({"x".join(map(str, row.grid)) for row in self.images if row.grid})

    @property
    def verdict(self) -> str:
        """The verdict on the model."""
        return self.judged[OVERALL].verdict

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in words."""
        return tuple(reason.text for reason in self.judged[OVERALL].reasons)

    @functools.cached_property
    def excluded_for_rest(self) -> float | None:
        """The size above which effects are excluded, over the classes that could be tested.

        None if an effect is not excluded, or if no class could be tested.
        """
        rest = {name for name, own in self.judged.items() if own.effects and not (own.waived or own.untested)}
        rows, settings = [row for row in self.images if row.label in rest], self.plan.settings
        effects = measure_all(rows, settings.limits, settings.check.seed)[OVERALL].counting
        return all_excluded_above(each for each in effects if each.name != "sufficiency" and each.mean is not None)

    @property
    def regressed(self) -> Sequence[str]:
        """What got worse than in the baseline, in words; empty unless the check was told to fail such a model."""
        return self.change.worse if self.plan.settings.run.fail_on_worse and self.change is not None else ()

    def assert_ok(self, *, inconclusive: Inconclusive | None = None) -> None:
        """Do nothing if the model may ship, and raise otherwise; for tests.

        Raises:
            AssertionError: the exit code is not 0: the verdict is FAIL, the model is worse than the baseline and that
                counts, or something could not be decided and ``inconclusive`` (None: the result's own setting) is
                "fail". The message names the worst class, its numbers and the report.
        """
        if self.exit_code(inconclusive) == 0:
            return
        report = "" if self.report is None else f"; see {self.report}"
        worst = "" if self.worst == OVERALL else f"class {self.worst!r}: "
        said = [f"{self.verdict}: {worst}{self.judged[self.worst].why}"]
        if self.regressed:
            worse = f"worse than the baseline: {'; '.join(self.regressed)}"
            said = [*said, worse] if self.verdict == "FAIL" else [worse]
        raise AssertionError(f"{'; '.join(said)}{report}")

    def exit_code(self, inconclusive: Inconclusive | None = None) -> int:
        """Return the command's exit code: 0 may ship, 1 FAIL, 3 INCONCLUSIVE, or WARN if a class could not be tested.

        A model that is worse than the baseline gives 1 too, if the check was told to fail it.
        0 stands for 3 if ``inconclusive`` is "pass"; None stands for the result's own setting.
        """
        if self.verdict == "FAIL" or self.regressed:
            return 1
        undecided = self.verdict == "INCONCLUSIVE" or self.judged[OVERALL].untested
        return 3 if undecided and (inconclusive or self.inconclusive) == "fail" else 0

    def table(self) -> Rows:
        """Return a row for each picture, with all that was measured on it."""
        rows = [flat(asdict(image)) for image in self.images]
        names = dict.fromkeys(name for row in rows for name in row)  # an untested picture has no answers to edits
        return [{name: row.get(name) for name in names} for row in rows]

    def save(self, folder: str | Path) -> Path:
        """Write the reports into a folder, and return the page.

        Raises:
            OutputError: a file cannot be written.
        """
        for name, contents in rendered(self).items():
            write_file(Path(folder) / name, contents)
        return Path(folder) / PAGE

    def write_card(self, path: str | Path) -> Path:
        """Write the verdict and the effects into a model card of Hugging Face, which is created if it does not exist.

        They go into the metadata (``model-index``) and into a section of the text, and replace those of an earlier
        check. All else stays as it is.

        Raises:
            InputError: the card cannot be read, or its metadata is not valid YAML.
            OutputError: the file cannot be written.
        """
        return write_card(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Return what ``report.json`` has, as plain JSON values."""
        return dict(json.loads(render_json(self)))

    def to_log(self) -> Log:
        """Return what trackers of experiments show: verdict, figures and reports, and the worst pictures."""
        return logged(self)

    @property
    def worst(self) -> str:
        """The class with the largest gap or attraction among those with the model's verdict, or OVERALL."""
        deciding = {
            name: self.judged[name]
            for name in self.classes
            if self.judged[name].verdict == self.verdict and not self.judged[name].waived
        }
        return next(iter(worst_first(deciding)), OVERALL)


@dataclass(frozen=True)
class Flip:
    """A picture that the earlier model recognised and this one does not, with the class that each names."""

    name: str
    before: str
    now: str


@dataclass(frozen=True)
class PairChange(Pair):
    """A class on a background, and how its accuracy changed.

    ``p`` is the p-value of a fall above the limit, with Holm's correction over all pairs.
    """

    change: Estimate
    p: float


@dataclass(frozen=True)
class Change:
    """What changed since an earlier run, on the pictures that both runs measured.

    Attributes:
        pictures: how many these are.
        gap: the change of the background gap, the mean over the fills.
        skill: the change of the skill of the heat.
        accuracy: the change of the accuracy on unedited pictures.
        pair: the class and background whose accuracy fell most.
        flips: the pictures that were recognised before and are not now.
        gained: how many were not recognised before and are now.
        limit: how much worse than the baseline a measure may be.
    """

    pictures: int
    gap: Estimate | None
    skill: Estimate | None
    accuracy: Estimate | None = None
    pair: PairChange | None = None
    flips: tuple[Flip, ...] = ()
    gained: int = 0
    limit: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the report, where the accuracy of the pair is called ``now``."""
        named = {"label": "label", "background": "background", "now": "accuracy", "change": "change", "p": "p"}
        found = asdict(self)
        pair = found["pair"]
        return {**found, "pair": pair and {key: pair[name] for key, name in named.items()}}

    @property
    def worse(self) -> list[str]:
        """What got worse by more than the limit and by more than chance, in words; the accuracy comes first."""
        return [sentence for sentence in said("worse", self).split("\n") if sentence]


def read_baseline(file: Path) -> dict[str, Any]:
    """Read an earlier ``report.json``.

    Raises:
        InputError: the file cannot be read, is not a report of the check, or changed since it was written.
    """
    refuse_pipe(file)
    with as_error(InputError, lambda error: f"the baseline {file} cannot be read: {error}"):
        report: dict[str, Any] = {**json.loads(file.read_text(encoding="utf-8"))}
    if report.get("schema") != SCHEMA or not {"hashes", "images", "layer", "grids"} <= report.keys():
        raise InputError(f"{file} is not a {BASELINE_FILE} of camkit check with schema {SCHEMA}")
    if report.get("checksum") != checksum(report):
        raise InputError(
            f"the baseline {file} is damaged: its checksum does not match its contents; make a new baseline"
        )
    return report


def check_comparable(
    baseline: Mapping[str, Any], hashes: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]], source: Path
) -> None:
    """Refuse a baseline with other data or settings; ``settings`` are this run's, as the report holds them.

    Raises:
        InputError: the two runs cannot be compared.
    """
    if baseline["hashes"].get("data") == hashes["data"] and baseline["hashes"].get("settings") == hashes["settings"]:
        return
    before = baseline.get("settings") or settings
    differ = [
        f"{table}.{name} = {json.dumps(before.get(table, values).get(name))} and not {json.dumps(value)}"
        for table, values in settings.items()
        for name, value in values.items()
        if name != WORSE and before.get(table, values).get(name) != value
    ]
    what = differ[0] if differ else "another class map, preprocessing or table of classes"
    if baseline["hashes"].get("data") != hashes["data"]:
        what = "other pictures or regions"
    raise InputError(f"{source} was made with {what} and cannot be compared; make a new baseline")


def check_heat(baseline: Mapping[str, Any], layer: str, grids: Sequence[str]) -> None:
    """Refuse a baseline whose heat was measured at another layer, or never on one of these grids.

    Raises:
        InputError: the two runs cannot be compared.
    """
    earlier = {"layer": [baseline["layer"]], "grid": baseline["grids"] or grids}
    for what, now in (("layer", [layer]), ("grid", grids)):
        if not set(now) <= set(earlier[what]):
            raise InputError(
                f"the baseline's heat is from {what} {', '.join(earlier[what])}, this run's from {', '.join(now)}; set "
                "the layer in the config ([check] layer), or make a new baseline"
            )


def compare(
    baseline: Mapping[str, Any], rows: Sequence[ImageRow], contents: Mapping[str, str], seed: int, limit: float
) -> Change:
    """Compare with an earlier run. Pictures are paired by the content of their files.

    Args:
        baseline: the earlier report, from ``read_baseline``.
        rows: the pictures of this run.
        contents: the hash of each picture's file, by name.
        seed: seeds the bootstrap, which resamples groups of pairs.
        limit: how much worse a measure may be.
    """
    before = {image["sha256"]: IMAGES.validate_python(image) for image in baseline["images"]}
    pairs = [(row, before[contents[row.name]]) for row in rows if contents[row.name] in before]
    skills = [(row.group, *own, *earlier) for row, old in pairs if (own := row.skill) and (earlier := old.skill)]
    return Change(
        len(pairs),
        gap_change(pairs, seed),
        _change(skills, [seed, 2])[0] if skills else None,
        mean_over_groups(
            [float(row.right) - float(old.right) for row, old in pairs], [row.group for row, _ in pairs], [seed, 3]
        )[0]
        if pairs
        else None,
        _pair_change(pairs, seed, limit),
        tuple(Flip(row.name, old.answer, row.answer) for row, old in pairs if old.right and not row.right),
        sum(row.right and not old.right for row, old in pairs),
        limit,
    )


_Pairs = Sequence[tuple[ImageRow, ImageRow]]
"""The row of each picture in this run, and in the earlier one."""


def gap_change(pairs: _Pairs, seed: int) -> Estimate | None:
    """Return the mean change of the gap over fills and pictures; None if no picture was pasted in both runs."""
    both = [(row, old) for row, old in pairs if row.same and old.same]
    changes = [_mean_gap(row) - _mean_gap(old) for row, old in both]
    return mean_over_groups(changes, [row.group for row, _ in both], [seed, 1])[0] if changes else None


def _change(
    parts: Sequence[tuple[str, float, float, float, float]], seed: Sequence[int]
) -> tuple[Estimate, Float[np.ndarray, " b"]]:
    """Return the change of a ratio of sums with its interval, and its bootstrap draws.

    ``parts`` has each picture's group, and what it adds to the numerator and the denominator now, and before.
    """
    groups, terms = group_numbers([group for group, *_ in parts]), np.array([terms for _, *terms in parts])
    sums = np.vstack([bootstrap_sums(terms, groups, seed), terms.sum(0)])
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
    return interval(changes[:-1], float(changes[-1]), int(groups.max()) + 1), changes[:-1]


def _pair_change(pairs: _Pairs, seed: int, limit: float) -> PairChange | None:
    """Return the class and background whose accuracy fell most; None if no pair has enough groups."""
    found: dict[tuple[str, str], list[tuple[ImageRow, ImageRow]]] = defaultdict(list)
    for row, old in pairs:
        for background in row.by_background.keys() & old.by_background.keys():
            found[row.label, background].append((row, old))
    enough = {pair: of for pair, of in sorted(found.items()) if len({row.group for row, _ in of}) >= MIN_GROUPS}
    changes: list[PairChange] = []
    for number, ((label, background), of) in enumerate(enough.items()):
        shares = np.array([[np.mean(row.by_background[background]) for row in pair] for pair in of])
        change, draws = mean_over_groups(
            (shares[:, 0] - shares[:, 1]).tolist(), [row.group for row, _ in of], [seed, 4, number]
        )
        p = p_above(-draws, limit, change.groups)
        changes.append(PairChange(label, background, float(shares[:, 0].mean()), len(of), change, p))
    adjusted = zip(changes, holm([change.p for change in changes]), strict=True)
    changes = [replace(change, p=p) for change, p in adjusted]
    return min(changes, key=lambda change: (change.p, change.change.value), default=None)


def _mean_gap(row: ImageRow) -> float:
    return float(np.mean([row.same[fill] - row.other[fill] for fill in row.same]))
