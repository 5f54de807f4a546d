"""``check()``: from arguments to a verdict and its reports. The command line and tests call it."""

from __future__ import annotations

import datetime as dt
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from camkit.background.answers import count_outputs
from camkit.background.baseline import (
    BASELINE_FILE,
    check_comparable,
    check_layer,
    check_undamaged,
    compare,
    read_baseline,
)
from camkit.background.check import CheckResult, run_check
from camkit.background.classes import ClassMap, match_classes, parse_class_map, read_class_map, split_class_map
from camkit.background.data import read_data
from camkit.background.heat import Heat
from camkit.background.journal import Journal
from camkit.background.passes import Passes
from camkit.background.plan import SPARE_PICTURES, Plan, make_plan
from camkit.background.report import REPORTS, words
from camkit.background.values import Dataset, Inconclusive, Progress, Run, Stage
from camkit.config.model import configured_model
from camkit.config.settings import Settings, as_settings
from camkit.engine.passes import usable_precision
from camkit.errors import InputError, advice, refuse_unknown_options, refusing_exit
from camkit.images.files import set_aside, write_file
from camkit.kit import wording
from camkit.kit.fingerprint import CODE, digest_of_code
from camkit.models import Labels, as_model, device_of
from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess

JOURNAL = "unfinished.jsonl"
"""The file that holds the finished rows while a check runs, so that an interrupted check can be resumed."""

QUICK = {"per_class": 40, "pastes": 1}
"""The most pictures per class and backgrounds per picture of a quick check."""


class PlanOptions(TypedDict, total=False):
    """The options that ``check`` passes on to ``plan_check``; ``check`` explains them."""

    preprocess: Preprocess | None
    labels: Labels | None
    regions: str | Path | None
    class_map: Mapping[str, Any] | str | Path | None
    config: Settings | Mapping[str, Any] | str | Path | None
    quick: bool
    strict: bool | None


@refusing_exit()
def check(
    model: nn.Module | str | LoadedModel | None = None,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    inconclusive: Inconclusive | None = None,
    **options: Unpack[PlanOptions],
) -> CheckResult:
    """Check whether a classifier may ship, or reads the background.

    Args:
        model: as for ``camkit.explain``. None uses the config's model; a name is loaded as the config says, with its
            weights.
        data: a folder with one folder per class, a CSV with the columns path and label, or a folder of pictures whose
            regions name classes. None uses the path in the config.
        out: the folder for the reports. None uses the config's folder; if the config has none, no report is written.
        baseline: an earlier ``report.json`` of the same data and settings, to compare with. None uses the config's
            baseline.
        resume: continue an interrupted check from the rows it left in ``out``.
        progress: called with the stage, the number of steps done, and the number of steps in all.
        inconclusive: whether the result's ``exit_code``, ``assert_ok`` and JUnit XML count INCONCLUSIVE as a failure
            ("fail") or as a "pass". None uses the config's, which is "fail" by default.
        **options: all are optional.
            ``preprocess``, ``labels``: as for ``camkit.explain``.
            ``regions``: the file or folder with the objects' regions. None searches beside the pictures.
            ``class_map``: maps classes of the data to outputs of the model, by index or label: a mapping or a JSON
            file. None (null in JSON) leaves the pictures of a class out.
            ``config``: a ``camkit.toml``, or its tables as a mapping, in which ``method`` may also be a function, as
            for ``camkit.explain``.
            ``quick``: use a smaller sample.
            ``strict``: whether a PASS must exclude the effects of each class too, and not only the effects of all
            classes together. None uses ``[limits] strict`` of the config.

    Returns:
        The verdict, the measures of each class, one row per picture, and the path of the report.

    Raises:
        InputError: the call, the config or the data is wrong.
        OutputError: a file cannot be written.
        RunError: the model answers NaN or infinity to every picture, or calls ``sys.exit()``.

    Examples:
        >>> import camkit  # doctest: +SKIP
        >>> camkit.check("resnet50", "validation/").assert_ok()  # doctest: +SKIP
    """
    refuse_unknown_options(check, options, PlanOptions.__annotations__)
    _check_paths(out=out, baseline=baseline, **options)
    settings = options["config"] = as_settings(options.get("config"))
    folder = settings.run.out if out is None else Path(out)
    plan = plan_check(model, data, skip=folder, **options)
    earlier = settings.run.baseline if baseline is None else Path(baseline)
    return finish_check(
        plan,
        folder,
        baseline=earlier,
        resume=resume or settings.run.resume,
        progress=progress or _silent,
        inconclusive=inconclusive or settings.run.inconclusive,
    )


def _check_paths(**paths: Any) -> None:
    """Refuse null characters, and empty text: it comes from an unset variable and would mean the current folder.

    Raises:
        InputError: one of them is not a valid path.
    """
    for name, path in paths.items():
        if path == "":
            raise InputError(f"{name} is empty; name a file or a folder, or leave {name} out")
        if isinstance(path, (str, Path)) and "\0" in str(path):
            raise InputError(f"{name} is {str(path)!r}, but a path cannot contain a null character")


def _silent(stage: Stage, done: int, of: int) -> None:
    pass


def plan_check(
    model: nn.Module | str | LoadedModel | None = None,
    data: str | Path | None = None,
    *,
    skip: Path | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Read everything that a check needs, without computing anything. The arguments are those of ``check``.

    camkit looks for no pictures in the folder ``skip``, such as the one for the reports.
    """
    refuse_unknown_options(plan_check, options, PlanOptions.__annotations__)
    settings = _settings(options.get("config"), quick=options.get("quick", False), strict=options.get("strict"))
    loaded = as_model(
        configured_model(model, settings.model), preprocess=options.get("preprocess"), labels=options.get("labels")
    )
    if loaded.preprocess is None:
        raise InputError(
            "the preprocessing of this model is not known; pass "
            + advice("preprocess=...", "--size, --mean and --std, or let the factory return it with the module")
        )
    settings = _with_usable_precision(settings, device_of(loaded.module))
    folder = settings.data.path if data is None else Path(data)
    if folder is None or data == "":
        raise InputError(
            "no data is given; pass a folder with one folder per class, or a CSV with the columns path and label"
        )
    regions, table = options.get("regions"), _class_map(options.get("class_map"), settings)
    only, without = (None, ()) if table is None else split_class_map(table)
    dataset = read_data(
        folder,
        regions=settings.data.regions if regions is None else Path(regions),
        group=settings.data.group,
        skip=skip,
        only=only,
        without=without,
        also={name: settings.also_allowed(name) for name in settings.classes},
    )
    _refuse_unknown_classes(settings, dataset)
    outputs = count_outputs(loaded, dataset.items)
    counts = Counter(item.label for item in dataset.items)
    matched = match_classes(dataset.classes, loaded.labels, outputs, table, counts)
    return make_plan(loaded, dataset, matched, settings, dt.datetime.now(dt.UTC).date())


def _with_usable_precision(settings: Settings, device: torch.device) -> Settings:
    """Return the settings with a precision that is fast on the device, with a warning if it is not the one given."""
    precision, note = usable_precision(settings.check.precision, device)
    if note:
        warnings.warn(note, stacklevel=3)
    return settings.model_copy(update={"check": settings.check.model_copy(update={"precision": precision})})


def _refuse_unknown_classes(settings: Settings, data: Dataset) -> None:
    """Refuse a config that names a class without pictures in the data."""
    configured = (*settings.classes, *(waiver.name for waiver in settings.waivers))
    unknown = next((name for name in configured if name not in data.classes), None)
    if unknown is not None:
        raise InputError(f"the config names class {unknown!r}, but the data has no pictures of it")


def _settings(
    config: Settings | Mapping[str, Any] | str | Path | None, *, quick: bool, strict: bool | None
) -> Settings:
    """Read the config. A quick check takes a smaller sample, but no smaller than the limits need."""
    settings = as_settings(config)
    if strict is not None:
        settings = settings.model_copy(update={"limits": settings.limits.model_copy(update={"strict": strict})})
    if not (quick or settings.run.quick):
        return settings
    smaller = {name: min(most, getattr(settings.check, name)) for name, most in QUICK.items()}
    testable = settings.limits.least_pictures + SPARE_PICTURES
    smaller["per_class"] = min(settings.check.per_class, max(smaller["per_class"], testable))
    return settings.model_copy(update={"check": settings.check.model_copy(update=smaller)})


def _class_map(given: Mapping[str, Any] | str | Path | None, settings: Settings) -> ClassMap | None:
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
    inconclusive: Inconclusive = "fail",
    command: str = "",
    passes: Passes | None = None,
) -> CheckResult:
    """Run a planned check, and write its reports. The arguments and errors are those of ``check``.

    ``command`` is the command as it was typed, for the report. ``passes`` computes the heat and the experiment; None
    computes them in this process.
    """
    started, clock = dt.datetime.now(dt.UTC), time.perf_counter()
    hashes = plan.fingerprint()
    earlier = None
    if baseline is not None:
        earlier = read_baseline(_baseline_of_resumed(baseline, out) if resume else baseline)
        _refuse_other_run(plan, earlier, hashes, baseline)
    journal = None if out is None else out / JOURNAL
    made_with = {"version of camkit": wording.VERSION, **hashes, CODE: digest_of_code(plan.model)}
    with Journal(journal, made_with, resume=resume) as rows:
        if rows.damaged:
            warnings.warn(f"damaged lines in {journal}: {rows.damaged}; their rows are computed again", stacklevel=2)
        Heat(plan).check_same_answers(rows)
        if out is not None:
            set_aside(out, REPORTS)  # if this check is interrupted, no old verdict must look like its own
        result = run_check(plan, rows, progress, hashes, passes)
        ran = Run(started, time.perf_counter() - clock, command)
        result = replace(result, inconclusive=inconclusive, run=ran)
        if earlier is not None:
            contents = {item.name: plan.files.of(item.path) for item in plan.data.items}
            seed = plan.settings.check.seed
            change = compare(earlier, result.images, contents, result.layer, result.grids, seed)
            result = replace(result, change=change, warnings=(*result.warnings, *change.worse))
        if out is not None and journal is not None:
            result = replace(result, report=out / words.PAGE)
            write_reports(result, out)
            journal.unlink(missing_ok=True)
    return result


def _refuse_other_run(plan: Plan, earlier: Mapping[str, Any], hashes: Mapping[str, str], baseline: Path) -> None:
    """Refuse a damaged baseline, or one with other data, settings, layer or grid. This explains one picture.

    Raises:
        InputError: the baseline is damaged, or the two runs cannot be compared.
    """
    check_comparable(earlier, hashes, baseline)
    first = next(Heat(plan).rows(plan.data.items[:1]))
    if "layer" in first:
        check_layer(earlier, first["layer"], first.get("grid"))
    check_undamaged(earlier, baseline)


def _baseline_of_resumed(baseline: Path, out: Path | None) -> Path:
    """Return where a baseline is now: the interrupted check may have renamed it before it began."""
    if out is not None and baseline == out / BASELINE_FILE and not baseline.exists():
        return baseline.with_name(f"before-{baseline.name}")
    return baseline


def write_reports(result: CheckResult, out: Path) -> None:
    """Write the report in every format into a folder. An interrupted write leaves no partial file.

    Raises:
        OutputError: a file cannot be written.
    """
    texts = {name: render(result) for name, render in REPORTS.items()}
    for name, text in texts.items():
        write_file(out / name, text.encode(errors="backslashreplace"))
