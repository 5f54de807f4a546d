"""The reports of a check: an HTML file, Markdown for a pull request, a picture for its comments; JSON and JUnit XML.

The words that all reports share come first. The HTML file loads nothing else: no fonts, no scripts, nothing from the
network. The same input and seed give the same JSON file, byte for byte. Numbers have six digits after the point,
because the last bits of sums depend on the number of threads and the size of batches. The JSON file holds no time, path
or host.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from camkit.background.data import grouped
from camkit.background.effects import (
    CUE_NAMES,
    IMAGES,
    LEVELS,
    OVERALL,
    Effect,
    EffectName,
    Level,
    Measures,
    all_excluded_above,
)
from camkit.background.plan import Plan, found_if
from camkit.background.rule import SHARES, VERDICTS, Judgement, said, worst_first
from camkit.background.showcase import Showcase
from camkit.drawing.encode import as_address, encode
from camkit.drawing.figure import Tile, contact_sheet
from camkit.drawing.text import GREY, Colour, wrapped
from camkit.errors import as_markdown, printable
from camkit.kit.pages import allowed_script, templates
from camkit.kit.store import digest
from camkit.kit.wording import NONE, VERSION, counted, first_of, number, share
from camkit.trackers import Log

if TYPE_CHECKING:
    from camkit.background.result import CheckResult

PAGE = "report.html"
"""The file name of the report that people open."""

BASELINE_FILE = "report.json"
"""The file name of the report that later runs can be compared with."""

SCHEMA = 1
"""The schema of the report that this version writes and reads."""

MOST_REASONS = 10
"""Reasons at the top of a report; the page lists the others below."""

_MAX_CLASSES = 5
"""Classes that the headline lists."""

LABS: Mapping[str, Mapping[str, int]] = {
        "lose more than 15 points without their shortcut": {"FAIL": 107, "WARN": 0, "INCONCLUSIVE": 0, "PASS": 0},
        "lose 3 to 15 points": {"FAIL": 12, "WARN": 37, "INCONCLUSIVE": 5, "PASS": 1},
        "lose less than 3 points": {"FAIL": 1, "WARN": 19, "INCONCLUSIVE": 15, "PASS": 77},
        "lose less than 3 points without their mark, but 8 to 15 on natural backgrounds of other classes": {
            "FAIL": 2, "WARN": 10, "INCONCLUSIVE": 0, "PASS": 6,
        },
    }  # fmt: skip
"""The verdicts on networks whose truth is known, by what they lose; docs/results.md explains them."""


def sentence(result: CheckResult) -> str:
    """Return the verdict as a sentence for somebody who has never heard of the check, without the word itself."""
    level: Level = "fail" if result.verdict == "FAIL" else "warn"
    counted_ones = {name: own for name, own in worst_first(result.judged).items() if not own.waived}
    above = [name for name, own in counted_ones.items() if own.any_above_limit]  # although the model passes
    untested = [name for name in result.judged if name in counted_ones and counted_ones[name].untested]
    of_all = [effect for effect in result.judged[OVERALL].effects.values() if effect.level == level]
    largest = max(of_all or _effects_at(result, level), key=lambda effect: effect.value, default=None)
    # The evidence is the gap of all classes, or the largest finding of a class
    return said("sentence", result, _what(result, level), of_all[0] if of_all else largest, above, untested)


def _what(result: CheckResult, level: Level) -> str:
    """Return what the model relies on, by the effects at a level."""
    names = [effect.name for effect in _effects_at(result, level)]
    only_cues = names and set(names) <= set(CUE_NAMES)
    return f"the {' and the '.join(names)} of the whole picture" if only_cues else "the background"


def _effects_at(result: CheckResult, level: Level) -> list[Effect]:
    """List the effects at a level, of all classes together and of classes that are not waived."""
    counted = [own for own in result.judged.values() if not own.waived]
    return [effect for own in counted for effect in own.effects.values() if effect.level == level]


def why_undecided(result: CheckResult) -> str:
    """Say in one sentence, with numbers, why the check is undecided; "" if it is not."""
    if result.exit_code("fail") != 3:
        return ""
    counting = {name: own for name in result.classes if (own := result.judged[name]).effects and not own.waived}
    untested = {name: own.reasons[-1].text for name, own in counting.items() if own.untested}
    if not untested:
        return f"{result.reasons[0]}; do not ship on this evidence"
    alike = grouped(untested, lambda name: untested[name])
    return said("why_undecided", alike, len(untested), len(counting), result.excluded_for_rest)


def reliability(verdict: str) -> str:
    """Say how many networks whose truth is known got a verdict, and how many of these lose little."""
    return said("reliability", verdict, [*LABS.values()], sum(sum(counts.values()) for counts in LABS.values()))


def next_steps(result: CheckResult) -> list[str]:
    """Return what to do now, also to decide what could not be decided; nothing if the model may ship."""
    if result.exit_code("fail") != 3:
        found = result.verdict in ("FAIL", "WARN")
        return [said("next_step", result, _what(result, "fail"), _named(result))] if found else []
    lacking = {  # for all classes that have too few pictures, one step
        name: reason.lacks
        for name, own in worst_first(result.judged).items()
        if name != OVERALL and not own.waived
        for reason in own.reasons
        if reason.lacks
    }
    named = first_of([f"{lacks} of {name}" for name, lacks in lacking.items()], _MAX_CLASSES)
    gather = [f"add pictures with regions, at least {named}"] if lacking else []
    reasons = [reason for reason in result.judged[OVERALL].reasons if reason.step and not (gather and reason.lacks)]
    most = dict(sorted(reason.more for reason in reasons if reason.more))  # settles what fewer pictures would settle
    kept = [reason.step for reason in reasons if not reason.more or reason.more in most.items()]
    steps = [*gather, *dict.fromkeys(kept)]
    plan = result.plan
    left = sum(bool(item.objects) for item in plan.data.items) - len(plan.sample)
    others = [step for step in steps if not step.startswith("add ")]
    size = max(Counter(item.label for item in plan.data.items).values())
    if others != steps and plan.settings.run.quick and size >= plan.settings.check.per_class:
        steps = ["use all pictures: leave out --quick and --per-class", *others]
    elif others != steps and left > 0:
        steps.insert(0, f"use {left} more pictures of this data: --per-class {size} (--most limits all classes)")
    return steps[:3] or [f"read the reasons in {PAGE}"]


def _named(result: CheckResult) -> str:
    """Name the classes with the verdict on the whole model, the worst first; all classes if none has it.

    For a warning, these are all classes with an estimate above its limit: which of them is significant depends on the
    backgrounds that were drawn.
    """
    own = {name: judgement for name, judgement in result.judged.items() if name != OVERALL and not judgement.waived}
    named = [
        name
        for name, judgement in worst_first(own).items()
        if judgement.verdict == result.verdict or (result.verdict == "WARN" and judgement.any_above_limit)
    ]
    return first_of(named or [*own], _MAX_CLASSES)


def untested(result: CheckResult) -> list[str]:
    """Return for each cause how many pictures it kept from being tested, the most frequent first, with an example."""
    named = grouped(result.untested, lambda name: result.untested[name])
    causes = sorted(named.items(), key=lambda cause: -len(cause[1]))
    return [f"{counted(len(names), 'picture')} could not be tested, such as {names[0]}: {why}" for why, names in causes]


def more_pictures(judgement: Judgement) -> str:
    """Return how many more pictures would exclude all effects above their limits, such as "0" or "43 to 240".

    A dash stands for effects that no number of pictures would exclude, and for a class that could not be tested.
    """
    more = [effect.more_pictures for effect in judgement.effects.values() if effect.name != "sufficiency"]
    known = [numbers for numbers in more if numbers is not None]
    if not more or len(known) < len(more) or judgement.untested:
        return NONE
    fewest, most = map(max, zip(*known, strict=True))
    return f"{fewest} to {most}" if most else "0"


def figures(measures: Measures, judgement: Judgement) -> dict[str, str]:
    """Return the figures of a class, or of all classes together, as the tables in text show them."""
    effects: tuple[EffectName, ...] = ("gap", "attraction", "sufficiency")
    effect_of = {name: measures.effects[name].mean if name in measures.effects else None for name in effects}
    return {
        "class": measures.name or "all classes",
        "verdict": judgement.shown + (" (waived)" if judgement.waived else ""),
        "accuracy": share(measures.accuracy.value),
        **{name: NONE if effect is None else number(effect.effect.value) for name, effect in effect_of.items()},
        "skill": NONE if measures.skill is None else number(measures.skill.value),
        "excluded above": number(all_excluded_above(judgement.effects.values())),
        "more pictures": more_pictures(judgement),
    }


def change_since_baseline(result: CheckResult) -> str:
    """Return what changed since the baseline; "" without a baseline."""
    return "" if result.change is None else said("change_since_baseline", result.change, bool(result.regressed))


def shortcut(result: CheckResult) -> str:
    """Say whether there is a shortcut to learn in the data, whatever the model does; "" if that was not measured."""
    return "" if result.shortcut is None else said("shortcut", result.shortcut, result.plan.removed)


def provenance(result: CheckResult) -> list[tuple[str, str]]:
    """Return what a reader needs to repeat the check: the date, the command, the weights and the versions."""
    run, hashes, model = result.run, result.hashes, result.plan.model
    file = Path(model.weights or "")
    weights = f"{file.name} (SHA-256 {result.plan.files[file]})" if file.is_file() else model.weights
    return [
        ("date", "unknown" if run is None else f"{run.started:%Y-%m-%d %H:%M} UTC, {run.seconds:.0f} s"),
        ("command", (run.command if run else "") or "camkit.check(...), called from Python"),
        *([] if model.note is None else [("how the model was loaded", model.note)]),
        *([] if weights is None else [("weights", weights)]),
        ("hash of the weights in the model", hashes.get("weights", "")),
        ("hash of the pictures and regions", hashes.get("data", "")),
        ("hash of the settings", hashes.get("settings", "")),
        ("versions", f"camkit {VERSION}, torch {version('torch')}, Python {platform.python_version()}"),
    ]


_STYLES = {"FAIL": "bold red", "WARN": "yellow", "PASS": "bold green", "INCONCLUSIVE": "cyan", "not decided": "cyan"}


def data_summary(plan: Plan) -> Text:
    """Return what was found: pictures, regions, classes, what is left out, and how far the pictures are enough."""
    classes = sorted(Counter(item.label for item in plan.sample).items(), key=lambda of_class: of_class[1])
    sample = said("sample", len(plan.sample), plan.settings.limits.least_pictures, classes)
    lines = [*plan.data.facts, f"classes matched {plan.matched}", *plan.data.left_out_in_words, sample]
    return Text("\n".join(map(printable, lines)))


def cost_notice(plan: Plan) -> Text:
    """Return how many pictures the model will see."""
    heat, edits = plan.forwards
    why = "for the heat" if plan.draws_heat else "as they are"
    return Text(f"the model will see {heat} pictures {why} and up to {edits} edits")


def verdict(result: CheckResult) -> Text:
    """Return the verdict, the reasons, and the path of the report."""
    more, unusable = len(result.reasons) - MOST_REASONS, [*result.failures]
    lines = [
        (why_undecided(result), ""),
        *((f"next: {step}", "bold") for step in next_steps(result)),
        *((reason, "") for reason in result.reasons[:MOST_REASONS]),
        (f"and {more} more" if more > 0 else "", ""),
        *((f"note: {warning}", "yellow") for warning in result.warnings),
        (f"{len(unusable)} pictures could not be used, such as {unusable[0]}" if unusable else "", "yellow"),
        *((line, "yellow") for line in untested(result)[:3]),  # the most frequent causes
        (change_since_baseline(result), ""),
        (shortcut(result), ""),
    ]
    text = Text.assemble((result.verdict, _STYLES[result.verdict]), f": {printable(sentence(result))}\n")
    for line, style in lines:
        text.append(f"  {printable(line)}\n" if line else "", style)
    return text if result.report is None else text.append(f"  wrote {printable(str(result.report))}")


def table(result: CheckResult) -> Table:
    """Return a table with one row per class, and one for all classes."""
    columns = Table(box=None, pad_edge=False)
    numeric = ("n", "acc.", "gap", "attr.", result.plan.removed, "skill", "excluded above", "more pictures")
    for heading in ("class", "verdict", *numeric):
        columns.add_column(heading, no_wrap=" " not in heading, justify="right" if heading in numeric else "left")
    for name, measures in [*result.classes.items(), (OVERALL, result.overall)]:
        title, verdict, *numbers, more = figures(measures, result.judged[name]).values()
        columns.add_row(
            Text(printable(title)),
            Text(verdict, _STYLES[result.judged[name].shown]),
            str(measures.pictures),
            *numbers,
            more,
        )
    return columns


_MOST_LISTED = 100
"""Classes whose reasons are listed, and unusable pictures, to keep the page readable."""


def filled(template: str, **values: Any) -> str:
    """Return a report whose template is filled with values."""
    environment = templates("camkit.background.report")
    environment.filters |= {
        "address": functools.partial(as_address, kind="jpeg"),
        "share": share,
        "markdown": lambda text: Markup(as_markdown(text)),  # is not escaped again
    }
    return str(environment.get_template(template).render(values))


def render_html(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the page. The model runs once more on the pictures that the page shows with their edits.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    script = filled("check.js")
    plan, showcase = result.plan, showcase or Showcase(result)
    flips, (heat, edits) = showcase.flips(), plan.forwards
    return filled(
        "check.html",
        **allowed_script(script),
        verdict=result.verdict,
        model=plan.model.name,
        data=plan.data.root.name,
        sentence=sentence(result),
        why=why_undecided(result),
        steps=next_steps(result),
        reliability=reliability(result.verdict),
        labs=LABS,
        triptychs=showcase.triptychs,
        chart=_chart(result),
        chance="" if (known := result.overall.sufficiency.mean) is None else share(known.accuracies[1]),
        found_if=found_if(plan.settings.check.threshold) if plan.detects else "",
        untested=untested(result),
        reasons=result.reasons,
        change=change_since_baseline(result),
        flips=flips,
        flips_left=0 if result.change is None else len(result.change.flips) - len(flips),
        outlined=plan.with_regions,
        reasons_by_class=[
            (name, [reason.text for reason in judgement.reasons])
            for name, judgement in result.judged.items()
            if name != OVERALL and judgement.shown != "PASS"
        ][:_MOST_LISTED],
        thumbnails=showcase.thumbnails(),
        facts=[*plan.data.facts, f"classes were matched {plan.matched}", *plan.data.left_out_in_words],
        warnings=result.warnings,
        removed=plan.removed,
        classes=result.classes,
        overall=result.overall,
        judged=result.judged,
        number=number,
        share=share,
        said=said,
        levels=LEVELS,
        verdicts=VERDICTS,
        settings=plan.settings,
        shares=SHARES,
        kinds=result.kinds,
        shortcut=shortcut(result),
        strips=showcase.strips,
        references=said("references").split("\n"),
        caveat=said("caveat", result.verdict),
        details=[
            *provenance(result),
            ("layer of the heat", f"{result.layer} ({result.layer_reason})"),
            ("method", result.method),
            ("pictures shown to the model", f"{heat} as they are, up to {edits} for the experiment"),
            ("seed", str(plan.settings.check.seed)),
        ],
        failures=list(result.failures.items())[:_MOST_LISTED],
        failures_left=max(0, len(result.failures) - _MOST_LISTED),
    )


def _chart(result: CheckResult) -> dict[str, Any]:
    """Return the effects of all classes and of each class, and what places a value on the axis, in percent of it."""
    names = [OVERALL, *worst_first({name: result.judged[name] for name in result.classes})][: _MOST_LISTED + 1]
    rows = {name: [effect for effect in result.judged[name].effects.values() if effect.mean] for name in names}
    effects = [effect for of_row in rows.values() for effect in of_row]
    ends = [end for effect in effects for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    left, right = min([*ends, -0.2]), max([*ends, 0.4])  # so wide at least that small effects look small
    return {"rows": rows, "place": lambda value: round(100 * (value - left) / (right - left), 2)}


def render_markdown(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the summary: the verdict, the reasons, the picture and its answers in words, and a row per class.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    return filled(
        "summary.md",
        result=result,
        triptychs=(showcase or Showcase(result)).triptychs,
        words=sys.modules[__name__],
        number=number,
    )


def workflow_commands(result: CheckResult) -> list[str]:
    """Return GitHub's workflow commands: an error for each FAIL, a warning for each other verdict but PASS."""
    texts = [("error", "worse than the baseline", text) for text in result.regressed]
    texts += [
        ("error" if own.verdict == "FAIL" and not own.waived else "warning", f"{own.verdict} {name}".rstrip(), own.why)
        for name, own in result.judged.items()
        if own.verdict != "PASS"
    ]
    in_title = {ord(sign): f"%{ord(sign):02X}" for sign in "%:,"}  # what ends a title in a workflow command
    return [
        f"::{level} title=camkit%3A {printable(title).translate(in_title)}::{printable(why).replace('%', '%25')}"
        for level, title, why in texts
    ]


_ACROSS, _SIDE, _SIZE = 3, 260, 14
"""Three pictures are about as wide as a comment on GitHub, so that nothing is reduced there."""

_COLOURS: Mapping[str, Colour] = {"FAIL": (179, 38, 30), "PASS": (27, 107, 58), "": GREY}


def render_picture(result: CheckResult, showcase: Showcase | None = None) -> bytes:
    """Return the picture as a PNG: the verdict, and up to three triptychs, on white.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    texts = [
        f"{result.verdict}: {sentence(result)}",
        why_undecided(result),
        *result.regressed,
        f"camkit check of {result.plan.model.name} on {result.plan.data.root.name}",
    ]
    title = [line for text in texts for line in wrapped(text, _ACROSS * _SIDE, _SIZE + 1, 5)]
    tiles: list[Tile] = []
    for strip in (showcase or Showcase(result)).triptychs:
        for panel in strip.triptych:
            answer, verdict = panel.comment
            line = f"{strip.row.label}: {panel.title.partition(' (')[0]}"
            tiles.append(Tile(panel.pixels, line, answer, _COLOURS[verdict]))
        tiles += [Tile(np.full((1, 1, 3), 255, np.uint8))] * (_ACROSS - len(strip.triptych))  # if there are fewer edits
    return encode(contact_sheet(tiles, _ACROSS, "\n".join(title), side=_SIDE, size=_SIZE))


_OF_BACKGROUND: tuple[EffectName, ...] = ("gap", "sufficiency", "attraction")
"""The effects that the report has for each fill."""


def render_json(result: CheckResult) -> str:
    """Return the report."""
    plan, kinds = result.plan, result.kinds
    hashes = {item.name: plan.files[item.source] for item in plan.data.items}
    report = {
        "schema": SCHEMA,
        "camkit": VERSION,
        "verdict": result.verdict,
        "sentence": sentence(result),
        "why_undecided": why_undecided(result),
        "reasons": list(result.reasons),
        "next_steps": next_steps(result),
        "worst": result.worst,
        "model": plan.model.name,
        "loaded": plan.model.note,
        "method": result.method,
        "layer": result.layer,
        "grids": result.grids,
        "hashes": result.hashes,
        "settings": plan.reported_settings,
        "data": {
            "facts": list(plan.data.facts),
            "classes_matched": plan.matched,
            "left_out": {kind: list(names) for kind, names in plan.data.left_out.items()},
            "failures": result.failures,
            "untested": dict(result.untested),
        },
        "warnings": list(result.warnings),
        "overall": _measures(result.overall, result.judged[OVERALL]),
        "classes": {name: _measures(measures, result.judged[name]) for name, measures in result.classes.items()},
        "kinds": kinds and {"source": "place", **asdict(kinds), "sentences": list(kinds.sentences)},
        "shortcut": result.shortcut and {**asdict(result.shortcut), "sentence": shortcut(result)},
        "change": result.change and result.change.to_dict(),
        "images": [{**IMAGES.dump_python(row), "sha256": hashes[row.name]} for row in result.images],
        "caveat": said("caveat", result.verdict),
    }
    # JSON has no NaN and no infinity, so they become null; adding 0.0 turns -0.0 into 0.0
    rounded = json.loads(
        json.dumps(report),
        parse_float=lambda text: round(float(text), 6) + 0.0,
        parse_constant=lambda _: None,
    )
    return json.dumps({**rounded, "checksum": checksum(rounded)}, indent=1, allow_nan=False) + "\n"


def _measures(measures: Measures, judgement: Judgement) -> dict[str, Any]:
    return {
        "verdict": judgement.shown,
        "reasons": [reason.text for reason in judgement.reasons],
        **{f"{name}_p": judgement.effects[name].p if name in judgement.effects else None for name in _OF_BACKGROUND},
        "levels": {name: effect.level for name, effect in judgement.effects.items()},
        "excluded_above": {name: effect.excluded_above for name, effect in judgement.effects.items()},
        "more_pictures": {name: effect.more_pictures for name, effect in judgement.effects.items()},
        "waived": judgement.waived,
        **plain(measures),
    }


def checksum(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a report without its own checksum; the order and spacing of the JSON do not matter."""
    contents = {name: value for name, value in report.items() if name != "checksum"}
    return digest(json.dumps(contents, sort_keys=True))


def plain(measures: Measures) -> dict[str, Any]:
    """Return the measures of a class, or of all classes together, as plain values."""
    figures = asdict(measures)
    effects = figures.pop("effects")
    del figures["name"]
    means = {name: effect["mean"] for name, effect in effects.items() if effect["mean"] is not None}
    figures |= {name: effects[name]["by_fill"] if name in effects else {} for name in _OF_BACKGROUND}
    figures["mean"] = {name: means[name] for name in _OF_BACKGROUND if name in means}
    figures["cues"] = {name: means[name] for name in sorted(CUE_NAMES) if name in means}
    return figures


def render_junit(result: CheckResult) -> str:
    """Return the XML. WARN passes, with its reasons as output. Waived classes are skipped.

    INCONCLUSIVE of a class, or a WARN of one that could not be tested, fails, or is skipped if ``result.inconclusive``
    is "pass". A class that is not decided is skipped too. INCONCLUSIVE of all classes together is always skipped:
    nothing was found, and the exit code says that the model may not ship. The time of a class is its share of the
    check's duration, by the number of its pictures: the pictures of all classes pass through the model together.
    """
    each = 0.0 if result.run is None else result.run.seconds / max(1, len(result.images))
    return filled("junit.xml", result=result, each=each, change=change_since_baseline(result))


_DRAWN: Mapping[str, Callable[..., str | bytes]] = {
    PAGE: render_html,
    "evidence.png": render_picture,
    "summary.md": render_markdown,
}
"""The reports with pictures: they also take the ``Showcase``, which asks the model once for all of them."""

REPORTS: Mapping[str, Callable[..., str | bytes]] = {**_DRAWN, BASELINE_FILE: render_json, "junit.xml": render_junit}
"""The function that renders each report, by file name."""


def rendered(result: CheckResult, showcase: Showcase | None = None) -> dict[str, bytes]:
    """Return the contents of every report, by file name."""
    showcase = showcase or Showcase(result)
    contents: dict[str, Any] = {
        name: render(result, showcase) if name in _DRAWN else render(result) for name, render in REPORTS.items()
    }
    return {
        name: content.encode(errors="backslashreplace") if isinstance(content, str) else content
        for name, content in contents.items()
    }


def logged(result: CheckResult) -> Log:
    """Return what trackers of experiments show: the verdict, the figures of each class, the worst pictures."""
    showcase = Showcase(result)
    figures = {}
    for name, measures in [("all classes", result.overall), *result.classes.items()]:
        figures[f"accuracy/{name}"] = measures.accuracy.value
        for effect in _OF_BACKGROUND:
            figures[f"{effect}/{name}"] = measures.effects[effect].value if effect in measures.effects else math.nan
        figures[f"skill/{name}"] = math.nan if measures.skill is None else measures.skill.value
    values: dict[str, float | str] = {
        "verdict": result.verdict,
        "sentence": sentence(result),
        "model": result.plan.model.name,
        "data": result.plan.data.root.name,
        "exit_code": result.exit_code(),
        **{name: value for name, value in figures.items() if math.isfinite(value)},
    }
    return Log(
        "check",
        {f"check/{name}": value for name, value in values.items()},
        {f"check/limits/{name}": value for name, value in vars(result.plan.settings.limits).items()},
        rendered(result, showcase),
        [
            (
                f"worst/{strip.row.name}",
                {"picture": strip.row.name, "edits": strip.sheet(), "sentence": strip.sentence},
            )
            for strip in showcase.strips
        ],
    )
