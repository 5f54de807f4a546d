"""What a check returns: the verdict, and everything it rests on."""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from camkit.background.baseline import Change
from camkit.background.effects import OVERALL, Measures, measure_all
from camkit.background.kinds import Kinds
from camkit.background.pictures import ImageRow
from camkit.background.plan import Plan
from camkit.background.rule import Judgement, worst_first
from camkit.background.sanity import Sanity
from camkit.errors import printable
from camkit.images.files import write_file
from camkit.tables import Rows, Tabular, flat

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


@dataclass(frozen=True)
class Reports:
    """How a result becomes reports: these functions know the result, and the result does not know them.

    Attributes:
        all: returns the contents of every report, by file name.
        json: returns the report for programs.
        events: yields what TensorBoard shows, by tag: a text, a number, or a strip of pictures.
    """

    all: Callable[[CheckResult], Mapping[str, bytes]]
    json: Callable[[CheckResult], str | bytes]
    events: Callable[[CheckResult], Iterator[tuple[str, Any]]]


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult(Tabular):
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
        sanity: whether the heat can be trusted.
        method, layer, layer_reason: the method and the layer of the heat, and why camkit chose the layer.
        hashes: hashes of the weights, the settings and the pictures.
        warnings: what the reader should know about the data and the config.
        change: the change since the baseline; None without a baseline.
        fail_on_worse: whether a model that is worse than the baseline fails.
        report: the HTML report; None if none was written.
        run: when and how the check was run.
        inconclusive: whether INCONCLUSIVE counts as a failure ("fail") or as a "pass", also for the classes in
            the JUnit XML.
        kinds: the accuracy of each class on each place that the data names; None if it names none.
        reports: the functions that write the reports, ``save`` all of them and ``to_dict`` the JSON.
    """

    classes: dict[str, Measures]
    overall: Measures
    judged: dict[str, Judgement]
    images: tuple[ImageRow, ...]
    failures: dict[str, str]
    plan: Plan
    sanity: Sanity
    method: str
    layer: str
    layer_reason: str
    warnings: tuple[str, ...] = ()
    hashes: dict[str, str] = field(default_factory=dict)
    run: CheckRun | None = None
    report: Path | None = None
    untested: Mapping[str, str] = field(default_factory=dict)
    change: Change | None = None
    fail_on_worse: bool = False
    inconclusive: Inconclusive = "fail"
    kinds: Kinds | None = None
    reports: Reports | None = None

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
    def reasons(self) -> tuple[str, ...]:
        """Why, in words."""
        return tuple(reason.text for reason in self.judged[OVERALL].reasons)

    @functools.cached_property
    def excluded_for_rest(self) -> float | None:
        """The size above which effects are excluded, over the classes that could be tested.

        None if an effect is not excluded, or if no class could be tested.
        """
        rest = {name for name, own in self.judged.items() if own.effects and not (own.waived or own.findings.untested)}
        rows, settings = [row for row in self.images if row.label in rest], self.plan.settings
        effects = measure_all(rows, settings.limits, settings.check.seed)[OVERALL].counting if rows else []
        ends = [effect.excluded_above for effect in effects if effect.name != "sufficiency" and effect.mean is not None]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    @property
    def regressed(self) -> Sequence[str]:
        """What got worse than in the baseline, in words; empty unless the check was told to fail such a model."""
        return self.change.worse if self.fail_on_worse and self.change is not None else ()

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
        if self.regressed:
            raise AssertionError(f"worse than the baseline: {'; '.join(self.regressed)}{report}")
        why = "; ".join(reason.text for reason in self.judged[self.worst].reasons)
        worst = "" if self.worst == OVERALL else f"class {self.worst!r}: "
        raise AssertionError(f"{self.verdict}: {worst}{why}{report}")

    def exit_code(self, inconclusive: Inconclusive | None = None) -> int:
        """Return the command's exit code: 0 may ship, 1 FAIL, 3 INCONCLUSIVE, or WARN if a class could not be tested.

        A model that is worse than the baseline gives 1 too, if the check was told to fail it.
        0 stands for 3 if ``inconclusive`` is "pass"; None stands for the result's own setting.
        """
        if self.verdict == "FAIL" or self.regressed:
            return 1
        undecided = self.verdict == "INCONCLUSIVE" or self.judged[OVERALL].findings.untested
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
        for name, contents in self._reports.all(self).items():
            write_file(Path(folder) / name, contents)
        return Path(folder) / "report.html"

    def to_dict(self) -> dict[str, Any]:
        """Return what ``report.json`` has, as plain JSON values."""
        report: dict[str, Any] = json.loads(self._reports.json(self))
        return report

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield what TensorBoard shows, each with its tag: a text, a number, or a strip of pictures."""
        return self._reports.events(self)

    @property
    def _reports(self) -> Reports:
        assert self.reports is not None, "camkit.check() sets them"
        return self.reports

    @property
    def worst(self) -> str:
        """The class with the largest gap or attraction among those with the model's verdict, or OVERALL."""
        deciding = {
            name: self.judged[name]
            for name in self.classes
            if self.judged[name].verdict == self.verdict and not self.judged[name].waived
        }
        return next(iter(worst_first(deciding)), OVERALL)
