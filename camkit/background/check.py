"""The check: from a model and labelled pictures to a verdict. This module only calls the steps.

plan -> heat of every picture -> sanity -> the experiment on a sample -> rows -> measures -> verdict.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from camkit.background import deep
from camkit.background.baseline import Change
from camkit.background.classes import question_order
from camkit.background.deep.analysis import Finding, Material
from camkit.background.deep.kinds import Kinds
from camkit.background.deep.shortcuts import Shortcut, Shortcuts
from camkit.background.experiment import NO_ANSWER, Answers
from camkit.background.heat import Heat
from camkit.background.journal import EDITS, HEAT, Journal, Row
from camkit.background.measures import OVERALL, ImageRow, Measures
from camkit.background.measuring import measure_all
from camkit.background.passes import Passes
from camkit.background.plan import Plan
from camkit.background.reasons import Reason
from camkit.background.rows import image_rows
from camkit.background.sanity import Sanity, check_sanity
from camkit.background.trial import Trial, answers_in
from camkit.background.values import Inconclusive, Item, Progress, Run
from camkit.background.verdict import Judgement, judge, worst_first
from camkit.errors import InputError, RunError, printable


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult:
    """The verdict of a check, and everything it rests on.

    Attributes:
        verdict: "FAIL", "WARN", "PASS" or "INCONCLUSIVE".
        reasons: why, in words.
        classes: the measures of each class.
        overall: the measures of all classes together.
        judged: the verdict on each class, and why; the empty name stands for the model.
        images: one row per picture.
        failures: pictures that could not be used, and why.
        plan: what was checked, and how.
        sanity: whether the heat can be trusted.
        layer, layer_reason: the layer of the heat, and why it was chosen.
        hashes: hashes of the weights, the settings and the pictures.
        warnings: what the reader should know about the data and the config.
        change: the change since the baseline; None without a baseline.
        report: the HTML report; None if none was written.
        run: when and how the check was run.
        inconclusive: whether INCONCLUSIVE counts as a failure ("fail") or as a "pass", also for the classes in
            the JUnit XML.
        findings: what the optional analyses found, by name.
    """

    reasons: tuple[str, ...]
    classes: dict[str, Measures]
    overall: Measures
    judged: dict[str, Judgement]
    images: tuple[ImageRow, ...]
    failures: dict[str, str]
    plan: Plan
    sanity: Sanity
    layer: str
    layer_reason: str
    hashes: dict[str, str]
    warnings: tuple[str, ...] = field(default=())
    run: Run | None = None
    report: Path | None = None
    change: Change | None = None
    inconclusive: Inconclusive = "fail"
    findings: Mapping[str, Finding] = field(default_factory=dict)

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
    def grids(self) -> list[str]:
        """The sizes of the maps' grids, such as "7x7"."""
        return sorted({"x".join(map(str, row.grid)) for row in self.images if row.grid})

    @property
    def verdict(self) -> str:
        """The verdict on the model."""
        return self.judged[OVERALL].verdict

    @property
    def kinds(self) -> Kinds | None:
        """The accuracy of each class on each place that the data names; None if it names none."""
        found = self.findings.get("kinds")
        return found if isinstance(found, Kinds) else None

    @property
    def shortcuts(self) -> tuple[Shortcut, ...]:
        """What the model uses in the backgrounds of its worst classes, if the verdict is FAIL or WARN."""
        found = self.findings.get("shortcuts")
        return found.found if isinstance(found, Shortcuts) else ()

    def assert_ok(self, *, inconclusive: Inconclusive | None = None) -> None:
        """Do nothing if the model may ship, and raise otherwise; for tests.

        Raises:
            AssertionError: the verdict is FAIL, or it is INCONCLUSIVE and ``inconclusive`` (None: the result's own
                setting) is "fail". The message names the worst class, its numbers and the report.
        """
        if self.exit_code(inconclusive):
            why = "; ".join(reason.text for reason in self.judged[self.worst].reasons)
            report = "" if self.report is None else f"; see {self.report}"
            worst = "" if self.worst == OVERALL else f"class {self.worst!r}: "
            raise AssertionError(f"{self.verdict}: {worst}{why}{report}")

    def exit_code(self, inconclusive: Inconclusive | None = None) -> int:
        """Return the command's exit code: 0 may ship, 1 FAIL, 3 INCONCLUSIVE.

        INCONCLUSIVE gives 0 if ``inconclusive`` is "pass"; None stands for the result's own setting.
        """
        undecided = 3 if (inconclusive or self.inconclusive) == "fail" else 0
        codes = {"PASS": 0, "WARN": 0, "FAIL": 1, "INCONCLUSIVE": undecided}
        return codes[self.verdict]

    def table(self) -> list[dict[str, Any]]:
        """Return one flat row per picture: ``pandas.DataFrame(result.table())``."""
        rows = []
        for image in self.images:
            row: dict[str, Any] = {}
            for name, value in asdict(image).items():
                if isinstance(value, dict):
                    row |= {f"{name}_{fill}": fill_value for fill, fill_value in value.items()}
                else:
                    row[name] = value
            rows.append(row)
        return rows

    @property
    def worst(self) -> str:
        """The class with the largest gap or attraction among those with the model's verdict, or OVERALL."""
        deciding = {
            name: self.judged[name]
            for name in self.classes
            if self.judged[name].verdict == self.verdict and not self.judged[name].waived
        }
        return next(iter(worst_first(deciding)), OVERALL)


def run_check(
    plan: Plan, journal: Journal, progress: Progress, hashes: dict[str, str], passes: Passes | None = None
) -> CheckResult:
    """Run the check. Rows that the journal already holds are not computed again.

    ``passes`` computes the others; None computes them in this process.

    Raises:
        InputError: the preprocessing is not known, the model's output is not a classifier's, or no picture can be used.
        RunError: the model answers NaN or infinity to every picture.
        OutputError: the journal cannot be written.
    """
    if plan.model.preprocess is None:
        raise InputError("the preprocessing of this model is not known; pass preprocess=...")
    explainer, trial = Heat(plan), Trial(plan)
    passes = passes or Passes(explainer.rows, trial.rows)
    explainer.run(journal, progress, passes.heat)
    all_heat = _in_order(journal.rows(HEAT), plan.data.items)
    heat = _usable(all_heat)
    progress("sanity", 0, 1)
    sanity = check_sanity(plan, [item for item in plan.data.items if item.name in heat])
    trial.run(journal, progress, lambda item: item.name in heat, passes.edits)
    progress("measures", 0, 1)
    answers = {name: answers_in(row) for name, row in _in_order(journal.rows(EDITS), plan.sample).items()}
    rows = image_rows(plan, heat, answers)
    material = Material(trial, heat, answers, sanity.mirrored)
    warning = _found(deep.BEFORE_THE_VERDICT, material)
    measures, judged = _judge(plan, rows, sanity, warning.values())
    explaining = _found(deep.AFTER_THE_VERDICT, replace(material, suspects=_suspects(judged)))
    first = next(iter(heat.values()))
    return CheckResult(
        reasons=tuple(reason.text for reason in judged[OVERALL].reasons),
        classes={name: class_measures for name, class_measures in measures.items() if name != OVERALL},
        overall=measures[OVERALL],
        judged=judged,
        images=tuple(rows),
        failures={name: row["error"] for name, row in all_heat.items() if "error" in row},
        plan=plan,
        sanity=sanity,
        layer=first["layer"],
        layer_reason=first["layer_reason"],
        hashes=hashes,
        warnings=_warnings(plan, all_heat, answers, measures[OVERALL].room),
        findings={**explaining, **warning},
    )


def _found(analyses: Mapping[str, deep.Analysis], material: Material) -> dict[str, Finding]:
    """Return what analyses found."""
    found = {name: analyse(material) for name, analyse in analyses.items()}
    return {name: finding for name, finding in found.items() if finding is not None}


def _suspects(judged: Mapping[str, Judgement]) -> list[str]:
    """Return the classes that the model may recognise by their backgrounds, the largest effect first.

    If the model's verdict is FAIL or WARN, these are the classes with the same verdict, or all classes if no class has
    it. For any other verdict there are none.
    """
    verdict = judged[OVERALL].verdict
    if verdict not in ("FAIL", "WARN"):
        return []
    classes = {name: judgement for name, judgement in judged.items() if name != OVERALL and not judgement.waived}
    with_verdict = {name: judgement for name, judgement in classes.items() if judgement.verdict == verdict}
    return list(worst_first(with_verdict or classes))


def _in_order(rows: Mapping[str, Row], items: Sequence[Item]) -> dict[str, Row]:
    """Return rows in the order of their pictures; workers finish in any order."""
    return {item.name: rows[item.name] for item in items if item.name in rows}


def _usable(heat: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows of the pictures that the model answered.

    Raises:
        InputError, RunError: there is no such row.
    """
    usable = {name: row for name, row in heat.items() if "error" not in row}
    if usable:
        return usable
    if heat and all(row.get("broken") for row in heat.values()):
        raise RunError(f"the model answers NaN or infinity to every picture, such as {next(iter(heat))}")
    why = next((row["error"] for row in heat.values()), "there are none")
    raise InputError(f"no picture could be used: {why}")


def _judge(
    plan: Plan, rows: list[ImageRow], sanity: Sanity, findings: Iterable[Finding]
) -> tuple[dict[str, Measures], dict[str, Judgement]]:
    """Measure and judge every class and the model."""
    settings = plan.settings
    waivers = settings.waived(plan.today)
    waived = {name: f"{waiver.reason} (until {waiver.expires})" for name, waiver in waivers.items()}
    exempt = {name: "expect = any" for name in plan.data.classes if settings.expects_anything(name)}
    measures = measure_all(rows, settings.limits, settings.check.seed, {*waived, *exempt}, plan.data.classes)
    warnings: dict[str, list[Reason]] = defaultdict(list)
    for finding in findings:
        for name, reasons in finding.warnings.items():
            warnings[name] += reasons
    judged = judge(
        measures,
        settings.limits,
        exempt=exempt,
        waived=waived,
        heat_problems=sanity.problems if plan.with_regions else (),
        may_fail=plan.with_regions or settings.check.ring_is_background,
        with_regions=plan.with_regions,
        warnings=warnings,
    )
    return measures, judged


def _warnings(
    plan: Plan, heat: Mapping[str, Row], answers: Mapping[str, Answers], headroom: float | None
) -> tuple[str, ...]:
    """Return what the reader should know about the data and the config."""
    answered = [(item.label, heat[item.name]["answer"]) for item in plan.data.items if "answer" in heat[item.name]]
    question = question_order(
        [label for label, _ in answered], [answer for _, answer in answered], plan.matched.indices, plan.model.labels
    )
    warnings = [] if question is None else [question]
    warnings += [
        f"the waiver for class {waiver.name!r} expired on {waiver.expires} and no longer holds"
        for waiver in plan.settings.expired(plan.today)
    ]
    cropped = sum(bool(row.get("cropped")) for row in heat.values())
    if cropped:
        warnings.append(f"in {cropped} pictures the object lies outside the part that the model sees")
    named = [answer.output for of_picture in answers.values() for answer in of_picture.values()]
    broken = named.count(NO_ANSWER)
    if broken:
        warnings.append(
            f"the model answers NaN or infinity to {broken} of {len(named)} edits; these answers count as wrong, so "
            "an effect may come from them rather than from the backgrounds"
        )
    if headroom is not None and headroom < plan.settings.limits.least_room:
        warnings.append(
            "the objects lie in nearly the same place in all pictures, so the heat cannot show which object it follows "
            f"and the experiment decides alone (even perfect maps would have only {headroom:.2f} more of their heat on "
            "their own object than on others)"
        )
    only_boxes = sum(
        bool(item.objects) and all(annotation.kind == "box" for annotation in item.objects) for item in plan.data.items
    )
    if only_boxes:
        warnings.append(
            f"{only_boxes} pictures have boxes but no outlines: the check pastes the ellipse inside each box, which "
            "carries a little of its own background along, so the measured gap is smaller than the true one"
        )
    return tuple(warnings)
