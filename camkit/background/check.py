"""``check()``: from a model and labelled pictures to a verdict and its reports. The command line and tests call it.

data -> heat of every picture -> experiment on a sample -> a row a picture -> effects -> rule -> reports.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
from markupsafe import Markup

from camkit.background import kinds
from camkit.background.card import read_card
from camkit.background.data import Dataset, Item, match_classes, question_order, read_class_map, read_data
from camkit.background.effects import OVERALL, ImageRow, Measures, image_rows, measure_all, named_without_object
from camkit.background.experiment import (
    EDITS,
    HEAT,
    Answers,
    Experiment,
    HeatRow,
    heat_rows,
    remark_on_heat,
)
from camkit.background.plan import NO_ANSWER, SPARE_PICTURES, Plan, count_outputs, make_plan
from camkit.background.probe import find_shortcut
from camkit.background.report import BASELINE_FILE, PAGE, REPORTS
from camkit.background.result import (
    CheckResult,
    CheckRun,
    Inconclusive,
    check_comparable,
    check_heat,
    compare,
    read_baseline,
)
from camkit.background.rows import Rows, read_rows
from camkit.background.rule import judge, said
from camkit.engine.passes import usable_precision
from camkit.errors import InputError, RunError, advice, refuse_unknown_options, refusing_exit
from camkit.explaining.explainer import configured_model
from camkit.images.files import set_aside
from camkit.kit import wording
from camkit.kit.pages import templates
from camkit.kit.store import Journal, PictureRow, RowsOf
from camkit.models import Labels, as_model, device_of
from camkit.models.loaded import Loadable, LoadedModel
from camkit.options import Check, given_in
from camkit.options.settings import Settings, as_settings
from camkit.types import Preprocess

Stage: TypeAlias = Literal["heat", "experiment", "measures"]
CheckProgress: TypeAlias = Callable[[Stage, int, int], None]
"""Called with the stage, the number of finished steps and the number of all steps."""


class PlanOptions(TypedDict, total=False):
    """The options that ``check`` passes on to ``plan_check``; ``check`` explains them."""

    preprocess: Preprocess | None
    labels: Labels | None
    regions: str | Path | None
    class_map: Mapping[str, Any] | str | Path | None
    config: Settings | Mapping[str, Any] | str | Path | None
    quick: bool | None
    strict: bool | None


@refusing_exit()
def check(
    model: Loadable | None = None,
    data: Any = None,
    *,
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    fail_on_worse: bool | None = None,
    resume: bool | None = None,
    progress: CheckProgress | None = None,
    inconclusive: Inconclusive | None = None,
    card: str | Path | None = None,
    **options: Unpack[PlanOptions],
) -> CheckResult:
    """Check whether a classifier or a detector may ship, or reads the background.

    Args:
        model: as for ``camkit.explain``. None uses the config's model; a name is loaded as the config says, with its
            weights.
        data: a folder with one folder per class, a CSV with the columns path and label, or a folder of pictures whose
            regions name classes. None uses the path in the config. Or a dataset of PyTorch, or a loader of one, whose
            rows are (image, label), (image, label, mask or boxes) or torchvision's (image, {"boxes", "labels",
            "masks"}); or a table of Hugging Face ``datasets`` with the columns image, label, mask and objects. An image
            is a PIL picture, bytes, or floating-point numbers from 0 to 1 or normalised, channels first or last.
        out: the folder for the reports. None uses the config's folder; if the config has none, no report is written.
        baseline: an earlier ``report.json`` of the same data and settings, to compare with. None uses the config's
            baseline.
        fail_on_worse: whether a model that is significantly worse than the baseline, by more than ``[limits] worse``,
            fails, whatever its verdict. None uses the config's, which is False by default.
        resume: continue an interrupted check from the rows it left in ``out``. None uses the config's, which is False
            by default.
        progress: called with the stage, the number of steps done, and the number of steps in all.
        inconclusive: whether the result's ``exit_code``, ``assert_ok`` and JUnit XML count INCONCLUSIVE as a failure
            ("fail") or as a "pass". None uses the config's, which is "fail" by default.
        card: a model card of Hugging Face, such as README.md, that gets the verdict and the effects, as by
            ``CheckResult.write_card``. None uses the config's, if it names one.
        **options: all are optional.
            ``preprocess``, ``labels``: as for ``camkit.explain``.
            ``regions``: the file or folder with the objects' regions. None searches beside the pictures.
            ``class_map``: maps classes of the data to outputs of the model, by index or label: a mapping or a JSON
            file. None (null in JSON) leaves the pictures of a class out.
            ``config``: a ``camkit.toml``, or its tables as a mapping, in which ``method`` may also be a function, as
            for ``camkit.explain``.
            ``quick``: use a smaller sample. None uses the config's, which is False by default.
            ``strict``: whether a PASS must exclude the effects of each class too, and not only the effects of all
            classes together. None uses ``[limits] strict`` of the config.

    Returns:
        The verdict, the measures of each class, one row per picture, and the path of the report.

    Raises:
        InputError: the call, the config or the data is wrong.
        OutputError: a file cannot be written.
        RunError: the model answers NaN or infinity to every picture, or calls ``sys.exit()``.

    Examples:
        >>> import camkit
        >>> camkit.check("resnet50", "validation/").assert_ok()  # doctest: +SKIP

        >>> from torch.utils.data import Subset
        >>> from torchvision.datasets import ImageFolder
        >>> few = Subset(ImageFolder(camkit.scenes.labelled_scenes()), range(0, 160, 10))
        >>> camkit.check("demo-fair", few).verdict  # too few, and without regions
        'INCONCLUSIVE'
    """
    refuse_unknown_options(check, options, PlanOptions.__annotations__)
    for name, path in {"out": out, "baseline": baseline, "card": card, **options}.items():
        if path == "":  # from an unset variable; it would mean the current folder
            raise InputError(f"{name} is empty; name a file or a folder, or leave {name} out")
    run = {"out": out, "baseline": baseline, "fail_on_worse": fail_on_worse, "inconclusive": inconclusive}
    options["config"] = as_settings(options.get("config")).with_options(
        named=_argument, run={**run, "resume": resume, "card": card}
    )
    return finish_check(plan_check(model, data, **options), progress=progress)


def _argument(setting: str) -> str:
    """Return the argument of ``check`` for a setting such as "run.out"."""
    return "data" if setting == "data.path" else setting.rpartition(".")[2]


def plan_check(
    model: Loadable | None = None,
    data: Any = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Read everything that a check needs, without computing anything. The arguments are those of ``check``."""
    in_memory = data is not None and not isinstance(data, (str, os.PathLike))
    settings = as_settings(options.get("config")).with_options(
        named=_argument,
        data={"path": None if in_memory else data, "regions": options.get("regions")},
        limits={"strict": options.get("strict")},
        run={"quick": options.get("quick")},
    )
    loaded = as_model(
        configured_model(model, settings.model), preprocess=options.get("preprocess"), labels=options.get("labels")
    )
    rows = Rows(data, settings.data.group) if in_memory else None
    loaded = loaded if rows is None else rows.fitted(loaded)
    if loaded.preprocess is None:
        raise InputError(
            "the preprocessing of this model is not known; pass "
            + advice("preprocess=...", "--size, --mean and --std, or let the factory return it with the module")
        )
    settings = settings.model_copy(update={"check": _feasible(settings, loaded)})
    given = options.get("class_map")
    given = settings.data.class_map if given is None else given
    table = None if given is None else read_class_map(given if isinstance(given, Mapping) else Path(given))
    also = {name: settings.also_allowed(name) for name in settings.classes}
    if rows is not None:
        dataset = read_rows(rows, loaded.labels, settings.data.regions, table, also)
    elif settings.data.path is None or data == "":
        raise InputError(
            "no data is given; pass a folder with one folder per class, or a CSV with the columns path and label"
        )
    else:
        dataset = read_data(
            settings.data.path,
            regions=settings.data.regions,
            group=settings.data.group,
            skip=settings.run.out,
            class_map=table,
            also=also,
        )
    configured = (*settings.classes, *(waiver.name for waiver in settings.waivers))
    unknown = next((name for name in configured if name not in dataset.classes), None)
    if unknown is not None:
        raise InputError(f"the config names class {unknown!r}, but the data has no pictures of it")
    outputs, detects = count_outputs(loaded, dataset.items)
    if rows is not None and loaded.labels is None and len(rows.names or ()) == outputs:
        loaded = replace(loaded, labels=rows.names)
    pictures = Counter(item.label for item in dataset.items)
    matched = match_classes(dataset.classes, loaded.labels, outputs, table, pictures)
    return make_plan(loaded, dataset, *matched, settings, dt.datetime.now(dt.UTC).date(), detects=detects)


def _feasible(settings: Settings, model: LoadedModel) -> Check:
    """Return how the check is run on a device.

    A quick check takes a smaller sample, but no smaller than the limits need. A precision that is slow on the device is
    replaced, with a warning.
    """
    check = settings.check
    precision, note = usable_precision(check.precision, device_of(model.module))
    if note:
        warnings.warn(note, stacklevel=3)
    check = replace(check, precision=precision)
    if not settings.run.quick:
        return check
    # The most pictures per class of a quick check; each of them gets one background of either kind
    most = max(40, settings.limits.least_pictures + SPARE_PICTURES)
    return replace(check, per_class=min(check.per_class, most), pastes=1)


def finish_check(
    plan: Plan,
    *,
    progress: CheckProgress | None = None,
    command: str = "",
    rows_of: Mapping[str, RowsOf[Any]] | None = None,
) -> CheckResult:
    """Run a planned check, and write its reports. The errors are those of ``check``.

    ``command`` is the command as it was typed, for the report. ``rows_of`` computes the rows of each kind; None
    computes them in this process.
    """
    settings = plan.settings.run
    out, baseline = settings.out, settings.baseline
    if settings.fail_on_worse and baseline is None:
        raise InputError(f"{advice('fail_on_worse', '--fail-on-worse')} needs a baseline to compare with")
    if settings.card is not None:
        read_card(settings.card)  # refuses metadata that cannot be read, before anything is computed
    started, clock = dt.datetime.now(dt.UTC), time.perf_counter()
    experiment, earlier = Experiment(plan), None
    if baseline is not None:
        renamed = baseline.with_name(f"before-{baseline.name}")  # by this check, before it was interrupted
        own = out is not None and baseline.resolve() == (out / BASELINE_FILE).resolve()
        earlier = read_baseline(renamed if settings.resume and own and not baseline.exists() else baseline)
        check_comparable(earlier, plan.hashes, plan.reported_settings, baseline)
        first = next(heat_rows(plan, plan.data.items[:1]))
        if not first.error:
            grids = [] if first.in_region is None else ["x".join(map(str, first.in_region.grid))]
            check_heat(earlier, first.layer, grids)
    journal = None if out is None else out / "unfinished.jsonl"  # the finished rows, to resume from
    made_with = {"version of camkit": wording.VERSION, **plan.hashes}
    instead = advice(
        "start again without resume=True, or choose another out folder",
        "start again without --resume, or choose another --out",
    )
    with Journal(journal, made_with, resume=settings.resume, instead=instead) as rows:
        if rows.damaged:
            warnings.warn(f"damaged lines in {journal}: {rows.damaged}; their rows are computed again", stacklevel=2)
        if out is not None:
            set_aside(out, REPORTS)  # if this check is interrupted, no old verdict must look like its own
        computed = rows_of or {HEAT.name: functools.partial(heat_rows, plan), EDITS.name: experiment.rows}
        result = _run(experiment, rows, progress or (lambda *_: None), computed)
        result = replace(result, run=CheckRun(started, time.perf_counter() - clock, command))
        if earlier is not None:
            check_heat(earlier, result.layer, result.grids)
            contents = {item.name: plan.files[item.source] for item in plan.data.items}
            change = compare(earlier, result.images, contents, plan.settings.check.seed, plan.settings.limits.worse)
            result = replace(result, change=change, warnings=(*result.warnings, *change.worse))
        if out is not None:
            result = replace(result, report=out / PAGE)
            result.save(out)
            rows.delete()
        if settings.card is not None:
            result.write_card(settings.card)
    return result


def _run(
    experiment: Experiment, journal: Journal, progress: CheckProgress, rows_of: Mapping[str, RowsOf[Any]]
) -> CheckResult:
    """Compute the rows that the journal does not hold, and measure and judge them.

    Raises:
        InputError: the model's output is not a classifier's, or no picture can be used.
        RunError: the model answers NaN or infinity to every picture.
        OutputError: the journal cannot be written.
    """
    plan = experiment.plan
    all_heat = journal.complete(HEAT, plan.data.items, rows_of[HEAT.name], functools.partial(progress, "heat"))
    heat, failures = _usable(all_heat)
    sample = [item for item in plan.sample if item.name in heat]
    edited = journal.complete(EDITS, sample, rows_of[EDITS.name], functools.partial(progress, "experiment"))
    progress("measures", 0, 1)
    answers = {name: dict(row.answers) for name, row in edited.items()}
    rows = image_rows(plan, heat, answers)
    by_kind = kinds.find(plan, answers)
    settings, waivers = plan.settings, plan.settings.waived(plan.today)
    waived = {name: f"{waiver.reason} (until {waiver.expires})" for name, waiver in waivers.items()}
    exempt = {name: "expect = any" for name in plan.data.classes if settings.expects_anything(name)}
    measures = measure_all(rows, settings.limits, settings.check.seed, {*waived, *exempt}, plan.data.classes)
    judged = judge(
        measures,
        settings.limits,
        exempt=exempt,
        waived=waived,
        of_detector=plan.detects,
        may_fail=plan.with_regions or settings.check.ring_is_background,
        with_regions=plan.with_regions,
        warnings={} if by_kind is None else by_kind.warnings,
    )
    # The effects that were judged know their levels.
    measures = {name: replace(own, effects={**own.effects, **judged[name].effects}) for name, own in measures.items()}
    alone = [
        (item.label, item.group, row.alone, row.box)
        for item, row in ((item, edited[item.name]) for item in sample)
        if any(edit.arm == "removed" for edit, _ in row.answers) and np.isfinite(row.alone).all()
    ]
    first = next(iter(heat.values()))
    bare = [item.name for item in plan.data.items if plan.with_regions and not item.objects]
    return CheckResult(
        classes={name: of_class for name, of_class in measures.items() if name != OVERALL},
        overall=measures[OVERALL],
        judged=judged,
        images=tuple(rows),
        failures=failures,
        untested={
            **dict.fromkeys(bare, "it has no region of its class"),
            **{name: row.why for name, row in edited.items() if row.why},
        },
        plan=plan,
        method=first.method,
        layer=first.layer,
        layer_reason=first.layer_reason,
        warnings=(
            *_warnings(plan, heat, answers, measures[OVERALL].room),
            *_still_named(plan, rows, measures),
            *filter(None, [remark_on_heat(plan)]),
        ),
        kinds=by_kind,
        shortcut=None if plan.detects else find_shortcut(alone, settings.check.seed),
    )


def _usable(heat: Mapping[str, HeatRow]) -> tuple[dict[str, HeatRow], dict[str, str]]:
    """Return the rows of the pictures that the model answered, and why the others cannot be used.

    Raises:
        InputError, RunError: there is no such row.
    """
    usable = {name: row for name, row in heat.items() if not row.error and row.answer.output != NO_ANSWER}
    failures = {
        name: row.error or f"{name}: the model's output holds NaN or infinity"
        for name, row in heat.items()
        if name not in usable
    }
    if heat and not usable and not any(row.error for row in heat.values()):
        raise RunError(f"the model answers NaN or infinity to every picture, such as {next(iter(heat))}")
    if not usable:
        raise InputError(f"no picture could be used: {next(iter(failures.values()), 'there are none')}")
    return usable, failures


def _still_named(plan: Plan, rows: Sequence[ImageRow], measures: Mapping[str, Measures]) -> list[str]:
    """Name the classes that the model still names without their object, more often than by chance."""
    by_size = sorted(measures, key=lambda name: -measures[name].sufficiency.value)
    above = [name for name in by_size if name != OVERALL and measures[name].sufficiency.low > 0]
    if not (above and plan.with_regions):
        return []
    counts = {name: [named_without_object(rows, name, own=own) for own in (True, False)] for name in above}
    named = [
        f"{name} in {right} of {own} pictures (and in {wrong / others:.0%} of the others)"
        for name, ((right, own), (wrong, others)) in counts.items()
    ]
    example = next(row.name for row in rows if row.label == above[0] and above[0] in row.named.values())
    return [
        f"with the object removed, the model still names {wording.first_of(named, 3)}: look at these "
        f"pictures, such as {example}; they may show another object without an outline, or a background typical of the "
        "class"
    ]


def _warnings(
    plan: Plan, heat: Mapping[str, HeatRow], answers: Mapping[str, Answers], headroom: float | None
) -> tuple[str, ...]:
    """Return what the reader should know about the data and the config."""
    answered = [(item.label, heat[item.name].answer.output) for item in plan.data.items if item.name in heat]
    question = question_order(answered, plan.outputs, plan.model.labels)
    outputs = [answer.output for of_picture in answers.values() for answer in of_picture.values()]
    boxes = [{annotation.kind for annotation in item.objects} == {"box"} for item in plan.data.items]
    sentences = said(
        "warnings",
        expired=plan.settings.expired(plan.today),
        cropped=sum(row.cropped for row in heat.values()),
        broken=outputs.count(NO_ANSWER),
        edits=len(outputs),
        headroom=headroom if headroom is not None and headroom < plan.settings.limits.least_room else None,
        only_boxes=sum(boxes),
    )
    return *([] if question is None else [question]), *filter(None, sentences.split("\n"))


SpreadPieces: TypeAlias = Callable[[Callable[[LoadedModel], Any], Sequence[str], int], Iterator[list[Any]]]
"""Lets other processes compute the rows of pieces.

It gets what makes, from such a process's model, the function from names to rows; the names of the pictures; and how
many of them fill a pass. It yields the rows of each piece when they are finished.
"""


def spread(plan: Plan, spread_pieces: SpreadPieces) -> Mapping[str, RowsOf[Any]]:
    """Return, for each kind of rows, a function that lets other processes compute them."""
    parts = {part.name: getattr(plan, part.name) for part in fields(plan) if part.name != "model"}
    with_model = functools.partial(Plan, **parts)

    def rows(kind: str, items: Sequence[Item]) -> Iterator[Any]:
        per_pass = plan.batch_size if kind == HEAT.name else max(1, plan.batch_size // plan.most_edits)
        names = [item.name for item in items]
        for of_piece in spread_pieces(functools.partial(_worker, kind, with_model), names, per_pass):
            yield from of_piece

    return {kind: functools.partial(rows, kind) for kind in (HEAT.name, EDITS.name)}


def _worker(
    kind: str, with_model: Callable[[LoadedModel], Plan], model: LoadedModel
) -> Callable[[Sequence[str]], list[PictureRow]]:
    """Return what computes rows from names with a model of its own; it keeps loaded pictures from piece to piece."""
    plan = with_model(model)
    list(heat_rows(plan, plan.data.items[:1]))  # all of them choose the layer by the same picture
    rows_of: RowsOf[Any] = functools.partial(heat_rows, plan) if kind == HEAT.name else Experiment(plan).rows
    return lambda names: list(rows_of([plan.by_name[name] for name in names]))


def starter_config(data: Dataset, settings: Settings) -> str:
    """Return the text of a config for these pictures.

    The lines of ``settings`` that are set are active; the others are commented and show the defaults. The paths are
    relative to the folder of the config.
    """

    def toml(value: Any) -> Markup:
        # A JSON value is a TOML value too, except that TOML escapes DEL and cannot hold bytes of a file name that are
        # not characters
        text = json.dumps(value, ensure_ascii=False, default=Path.as_posix).replace("\x7f", "\\u007f")
        return Markup(re.sub("[\ud800-\udfff]", lambda byte: f"\\\\u{ord(byte[0]):x}", text))  # is not escaped again

    environment = templates("camkit.background.report")
    environment.filters["toml"] = toml
    tables = {name: getattr(settings, name) for name in ("model", "data", "check", "limits", "run")}
    given = {name: dict(sorted(given_in(table).items())) for name, table in tables.items()}
    return str(environment.get_template("camkit.toml").render(data=data, settings=settings, given=given))
