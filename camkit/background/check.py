"""The check: from a model and labelled pictures to a verdict. Joins the steps of this room, and takes none itself.

plan -> heat of every picture -> sanity -> the experiment on a sample -> rows -> measures -> verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from camkit.background.baseline import Change
from camkit.background.heat import heat_pass
from camkit.background.hints import hints
from camkit.background.journal import Journal, Row
from camkit.background.measures import OVERALL, ImageRow, Limits, Measures, measure_all, weakest
from camkit.background.plan import Plan
from camkit.background.rows import image_rows
from camkit.background.sanity import Sanity, sane
from camkit.background.trial import run_trial
from camkit.background.values import Progress
from camkit.background.verdict import Judged, judge
from camkit.errors import InputError, RunError


@dataclass(frozen=True, eq=False)
class CheckResult:
    """The answer, and all it rests on.

    Attributes:
        verdict: "FAIL", "WARN", "PASS" or "INCONCLUSIVE".
        reasons: why, in words.
        classes: the measures of each class.
        overall: those of all together.
        judged: the verdict of each class, and why.
        images: one row per picture.
        failures: pictures that could not be used, and why.
        plan: what was checked, and how.
        sanity: whether the heat can be trusted.
        layer, layer_reason: where the heat was measured.
        hashes: of the weights, the settings and the pictures.
        warnings: what the reader should know of the data and the config.
        change: since an earlier run; None without one.
        report: the page that was written; None where none was.
    """

    reasons: tuple[str, ...]
    classes: dict[str, Measures]
    overall: Measures
    judged: dict[str, Judged]
    images: tuple[ImageRow, ...]
    failures: dict[str, str]
    plan: Plan
    sanity: Sanity
    layer: str
    layer_reason: str
    hashes: dict[str, str]
    warnings: tuple[str, ...] = field(default=())
    report: Path | None = None
    change: Change | None = None

    @property
    def grids(self) -> list[str]:
        """The grids of the maps, as text."""
        return sorted({"x".join(map(str, row.grid)) for row in self.images if row.grid})

    @property
    def verdict(self) -> str:
        """The model's verdict."""
        return self.judged[OVERALL].verdict

    def assert_ok(self, *, inconclusive: Literal["pass", "fail"] = "pass") -> None:
        """Do nothing where the model may ship; for tests.

        Raises:
            AssertionError: the verdict is FAIL, or INCONCLUSIVE and that was asked to fail; the message names the worst
                class, its numbers and the report.
        """
        if self.exit_code(inconclusive):
            why = "; ".join(reason.text for reason in self.judged[self.worst].reasons)
            where = "" if self.report is None else f"; see {self.report}"
            worst = "" if self.worst == OVERALL else f"class {self.worst!r}: "
            raise AssertionError(f"{self.verdict}: {worst}{why}{where}")

    def exit_code(self, inconclusive: Literal["pass", "fail"] = "pass") -> int:
        """Return what the command ends with: 0 may ship, 1 FAIL, 3 INCONCLUSIVE where that is to fail."""
        if self.verdict == "INCONCLUSIVE":
            return 3 if inconclusive == "fail" else 0
        return int(self.verdict == "FAIL")

    def table(self) -> list[dict[str, Any]]:
        """Return a flat row per picture: ``pandas.DataFrame(result.table())``."""
        found = []
        for row in self.images:
            flat: dict[str, Any] = {}
            for name, value in asdict(row).items():
                flat |= (
                    {f"{name}_{fill}": one for fill, one in value.items()} if isinstance(value, dict) else {name: value}
                )
            found.append(flat)
        return found

    @property
    def worst(self) -> str:
        """The class that speaks most against the model, of those with its verdict; OVERALL where none alone does."""

        def largest(name: str) -> float:
            one = self.classes[name]
            shown = [weakest(by_fill) for by_fill in (one.gap, one.attraction)]
            return max((least.effect.value for least in shown if least is not None), default=-1.0)

        deciding = [name for name in self.classes if self.judged[name].verdict == self.verdict]
        return max((name for name in deciding if not self.judged[name].waived), key=largest, default=OVERALL)


def run_check(plan: Plan, journal: Journal, progress: Progress, hashes: dict[str, str]) -> CheckResult:
    """Make the check; rows that the journal holds already are not computed again.

    Raises:
        InputError: the model's output is no classifier's, or no picture can be used.
        OutputError: the journal cannot be written.
    """
    if plan.model.preprocess is None:
        raise InputError("it is not known how pictures are prepared for this model; pass preprocess=...")
    heat_pass(plan, journal, progress)
    heat = journal.rows("heat")
    failures = {name: row["error"] for name, row in heat.items() if "error" in row}
    good = {name: row for name, row in heat.items() if "error" not in row}
    if not good:
        if heat and all(row.get("broken") for row in heat.values()):
            raise RunError(f"the model answers NaN or infinity to every picture, such as {next(iter(heat))}")
        raise InputError(f"no picture could be used: {next(iter(failures.values()), 'there is none')}")
    progress("sanity", 0, 1)
    sanity = sane(
        plan.model,
        [item for item in plan.data.items if item.name in good],
        plan.matched,
        plan.settings,
        turning=not plan.with_regions,
    )
    run_trial(plan, journal, progress, lambda item: item.name in good)
    progress("measures", 0, 1)
    rows = image_rows(plan, good, journal.rows("edits"))
    limits = plan.settings.limits
    waived = {name: f"{one.reason} (until {one.expires})" for name, one in plan.settings.waived(plan.today).items()}
    exempt = {name: "expect = any" for name in plan.data.classes if plan.settings.expects_anything(name)}
    counted = Limits(limits.gap, limits.sufficiency, limits.attraction)
    measures = measure_all(rows, counted, plan.settings.check.seed, {*waived, *exempt}, plan.data.classes)
    judged = judge(
        measures,
        limits,
        exempt=exempt,
        waived=waived,
        insane=sanity.problems if plan.with_regions else (),
        may_fail=plan.with_regions or plan.settings.check.ring_is_background,
        heat=plan.with_regions,
        hints=[] if plan.with_regions else hints(plan.data.items, good, sanity.turned, plan.settings.check.seed),
    )
    first = next(iter(good.values()))
    return CheckResult(
        reasons=tuple(reason.text for reason in judged[OVERALL].reasons),
        classes={name: one for name, one in measures.items() if name != OVERALL},
        overall=measures[OVERALL],
        judged=judged,
        images=tuple(rows),
        failures=failures,
        plan=plan,
        sanity=sanity,
        layer=first["layer"],
        layer_reason=first["layer_reason"],
        hashes=hashes,
        warnings=_warnings(plan, heat, measures[OVERALL].room),
    )


def _warnings(plan: Plan, heat: Mapping[str, Row], room: float | None) -> tuple[str, ...]:
    found = [
        f"the waiver of {one.name!r} expired on {one.expires} and no longer holds"
        for one in plan.settings.expired(plan.today)
    ]
    cropped = [name for name, row in heat.items() if row.get("cropped")]
    if cropped:
        found.append(f"of {len(cropped)} pictures the objects lie outside the part that the model sees")
    if room is not None and room < plan.settings.limits.least_room:
        found.append(
            f"the heat cannot tell whose object it lies on, since objects lie alike in all pictures (perfect maps have "
            f"{room:.2f} more heat on their own than on others'): the experiment decides alone"
        )
    boxes_alone = [item for item in plan.data.items if item.objects and all(one.kind == "box" for one in item.objects)]
    if boxes_alone:
        found.append(
            f"{len(boxes_alone)} pictures have boxes alone: what is pasted, the ellipse in each box, carries a little "
            "of its own background, so a gap is found smaller than it is"
        )
    return tuple(found)
