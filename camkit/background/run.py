"""check(): from arguments to a verdict and its reports; what the command line and a test call."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from camkit.background.answers import count_outputs
from camkit.background.baseline import check_comparable, check_layer, compare, read_baseline
from camkit.background.check import CheckResult, run_check
from camkit.background.classes import match_classes, parse_class_map, read_class_map
from camkit.background.config import Settings, read_config, settings_from
from camkit.background.data import read_data
from camkit.background.heat import heat_rows
from camkit.background.journal import Journal
from camkit.background.plan import SPARE_PICTURES, Plan, content_hash, fingerprint, make_plan
from camkit.background.report import html, json, junit, markdown, words
from camkit.background.showcase import strips, thumbnails
from camkit.background.values import Progress, Stage
from camkit.errors import InputError, OutputError
from camkit.images.files import write_file
from camkit.models import Labels, as_model
from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess

JOURNAL = "unfinished.jsonl"
REPORTS = ("report.html", "report.json", "junit.xml", "summary.md")
QUICK = {"per_class": 40, "pastes": 1}
"""What a smaller sample has at most."""


def check(
    model: nn.Module | str | LoadedModel,
    data: str | Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    regions: str | Path | None = None,
    class_map: Mapping[str, Any] | str | Path | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    quick: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> CheckResult:
    """Answer whether a classifier may ship, or looks at the background.

    Args:
        model, preprocess, labels: as for ``camkit.explain``.
        data: a folder with a folder per class, a CSV of path and label, or a folder of pictures whose regions name
            classes; the config's if None.
        regions: where the regions are; searched for beside the pictures if None.
        class_map: from a class of the data to outputs of the model, by index or label; a file of JSON, or a mapping.
        config: a ``camkit.toml``, or its tables as a mapping.
        out: the folder for the reports; None writes none.
        baseline: an earlier ``report.json`` of the same data and settings, to compare with.
        quick: a smaller sample.
        resume: go on with what an interrupted run left in ``out``.
        progress: told the stage, how many of its steps are done, and how many there are.

    Returns:
        The verdict, the measures of each class, a row per picture, and the files written.

    Raises:
        InputError: something in the call, the config or the data is wrong.

    Example:
        >>> import camkit  # doctest: +SKIP
        >>> camkit.check("resnet50", "validation/").assert_ok()  # doctest: +SKIP
    """
    folder = None if out is None else Path(out)
    plan = plan_check(
        model,
        data,
        preprocess=preprocess,
        labels=labels,
        regions=regions,
        class_map=class_map,
        config=config,
        quick=quick,
        skip=folder,
    )
    earlier = None if baseline is None else Path(baseline)
    return finish_check(plan, folder, baseline=earlier, resume=resume, progress=progress or _silent)


def _silent(stage: Stage, done: int, of: int) -> None:
    pass


def plan_check(
    model: nn.Module | str | LoadedModel,
    data: str | Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    regions: str | Path | None = None,
    class_map: Mapping[str, Any] | str | Path | None = None,
    config: Settings | Mapping[str, Any] | str | Path | None = None,
    quick: bool = False,
    skip: Path | None = None,
) -> Plan:
    """Read everything a check needs, and compute nothing yet; the arguments are those of ``check``."""
    settings = _settings(config, quick=quick)
    loaded = as_model(model, preprocess=preprocess, labels=labels)
    if loaded.preprocess is None:
        raise InputError("it is not known how pictures are prepared for this model; pass preprocess=...")
    where = Path(data) if data is not None else settings.data.path
    if where is None:
        raise InputError("name the data: a folder with a folder per class, or a CSV of path and label")
    table = _class_map(class_map, settings)
    named = None if regions is None else Path(regions)
    found = read_data(
        where,
        regions=named or settings.data.regions,
        group=settings.data.group,
        skip=skip,
        only=None if table is None else set(table),
        also={name: settings.also_allowed(name) for name in settings.classes},
    )
    unknown = [
        name for name in (*settings.classes, *(one.name for one in settings.waivers)) if name not in found.classes
    ]
    if unknown:
        raise InputError(f"the config speaks of the class {unknown[0]!r}, of which there are no pictures")
    outputs = count_outputs(loaded, found.items)
    matched = match_classes(found.classes, loaded.labels, outputs, table)
    return make_plan(loaded, found, matched, settings, dt.datetime.now(dt.UTC).date())


def _settings(config: Settings | Mapping[str, Any] | str | Path | None, *, quick: bool) -> Settings:
    if config is None:
        settings = Settings()
    elif isinstance(config, Settings):
        settings = config
    elif isinstance(config, Mapping):
        settings = settings_from(config, "config")
    else:
        settings = read_config(Path(config))
    if not quick:
        return settings
    fewer = {name: min(most, getattr(settings.check, name)) for name, most in QUICK.items()}
    fewer["per_class"] = min(
        settings.check.per_class, max(fewer["per_class"], settings.limits.least_pictures + SPARE_PICTURES)
    )
    return settings.model_copy(update={"check": settings.check.model_copy(update=fewer)})


def _class_map(given: Mapping[str, Any] | str | Path | None, settings: Settings) -> Mapping[str, Any] | None:
    if isinstance(given, Mapping):
        return parse_class_map(given, "class_map")
    file = settings.data.class_map if given is None else Path(given)
    return None if file is None else read_class_map(file)


def finish_check(
    plan: Plan,
    out: Path | None,
    *,
    baseline: Path | None = None,
    resume: bool = False,
    progress: Progress = _silent,
    inconclusive: Literal["pass", "fail"] = "pass",
) -> CheckResult:
    """Make a planned check, and write its reports."""
    hashes = fingerprint(plan)
    earlier = None if baseline is None else read_baseline(_found_again(baseline, out) if resume else baseline)
    if earlier is not None and baseline is not None:
        check_comparable(earlier, hashes, baseline)
        first = next(heat_rows(plan, plan.data.items[:1]))
        if "layer" in first:
            check_layer(earlier, first["layer"], first.get("grid"))
    journal = None if out is None else out / JOURNAL
    with Journal(journal, " ".join([words.VERSION, *hashes.values()]), resume=resume) as rows:
        if out is not None:
            _put_aside(out)
        result = run_check(plan, rows, progress, hashes)
        if earlier is not None:
            contents = {item.name: content_hash(item.path) for item in plan.data.items}
            seed = plan.settings.check.seed
            change = compare(earlier, result.images, contents, result.layer, result.grids, seed)
            result = replace(result, change=change, warnings=(*result.warnings, *change.worse))
        if out is not None and journal is not None:
            result = replace(result, report=out / "report.html")
            write_reports(result, out, inconclusive)
            journal.unlink(missing_ok=True)
    return result


def _found_again(baseline: Path, out: Path | None) -> Path:
    """Return where a baseline is that the interrupted check put aside before it began."""
    aside = baseline.with_name(f"before-{baseline.name}")
    return aside if out is not None and baseline == out / REPORTS[1] and not baseline.exists() else baseline


def _put_aside(out: Path) -> None:
    """Rename the reports of an earlier check: where this one breaks off, no old verdict must pass for its own."""
    try:
        for name in REPORTS:
            if (out / name).exists():
                (out / name).replace(out / f"before-{name}")
    except OSError as error:
        raise OutputError(f"cannot write into {out}: {error.strerror or error}") from error


def write_reports(result: CheckResult, out: Path, inconclusive: Literal["pass", "fail"] = "pass") -> None:
    """Write every form of the report into a folder, each whole or not at all.

    ``inconclusive`` says whether such a verdict is a failure in the JUnit XML.

    Raises:
        OutputError: a file cannot be written.
    """
    page = html.render(result, thumbnails(result.plan), strips(result))
    texts = (page, json.render(result), junit.render(result, inconclusive), markdown.render(result))
    for name, text in zip(REPORTS, texts, strict=True):
        write_file(out / name, text.encode(errors="backslashreplace"))
