"""``camkit check``, ``camkit check init``, and the demonstration of the check."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from camkit.cli.options import (
    DATA,
    EXPERIMENT,
    LIMITS,
    OUTPUT,
    RUN,
    Common,
    OptionalSource,
    PrecisionName,
    Ray,
    Source,
    actors_of,
    events_into,
)
from camkit.cli.terminal import TALK, QuietConsole, emit, printer, say
from camkit.errors import InputError, printable

if TYPE_CHECKING:
    from camkit.config.settings import Settings

checks = App(
    name="check",
    help="Check whether a classifier or a detector may ship, or reads the background.",
    usage="Usage: camkit check DATA --model NAME [OPTIONS]\n       camkit check init DATA [OPTIONS]",
    console=QuietConsole(),
)


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The regions, groups and classes of the pictures.

    Attributes:
        regions: The file or folder with the objects' regions. Without it, camkit searches beside the pictures.
        class_map: A JSON file that maps the data's classes to the model's outputs; null leaves a class out.
        group: The column of the CSV that says which pictures belong together, such as those of one patient.
    """

    regions: Annotated[Path | None, Parameter(metavar="PATH")] = None
    class_map: Annotated[Path | None, Parameter(metavar="FILE")] = None
    group: Annotated[str | None, Parameter(metavar="COLUMN")] = None


@Parameter(name="*", group=EXPERIMENT)
@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """How the check is run; the config's table "check" explains each in full.

    Attributes:
        per_class: Use at most this many pictures of each class in the experiment. Default: 100.
        most: Use at most this many pictures in the experiment. Default: 2000.
        pastes: Paste each object on this many backgrounds of each kind. Default: 2.
        seed: The seed of the sample, the backgrounds and the bootstrap. Default: 0.
        batch_size: Pictures in one forward pass. Default: 32 on a GPU, 4 on a CPU.
        layer: The layer whose heat is measured. Default: camkit chooses.
        method: The method that computes the heat. Default: auto.
        precision: The number format of the computation. Default: fp32.
        ring: The width of the outer ring, as a share of the picture's sides. Default: 0.15.
        ring_is_background: Without regions, let the exchange of the outer ring fail a model; otherwise it only warns.
        threshold: The score above which a detector's box counts. Default: 0.5.
        shortcuts: If the model does not pass, find the shortcuts of at most this many classes. Default: 3.
    """

    per_class: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    most: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    pastes: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    seed: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    batch_size: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    layer: Annotated[str | None, Parameter(alias="-l", metavar="NAME")] = None
    method: Annotated[str | None, Parameter(metavar="NAME")] = None
    precision: PrecisionName | None = None
    ring: Annotated[float | None, Parameter(metavar="SHARE")] = None
    ring_is_background: Annotated[bool | None, Parameter(negative=())] = None
    threshold: Annotated[float | None, Parameter(metavar="SCORE")] = None
    shortcuts: Annotated[int | None, Parameter(metavar="NUMBER")] = None


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits of the verdict; the config's table "limits" explains each in full.

    Attributes:
        gap: The largest background gap with which a model may ship. Default: 0.1.
        sufficiency: The largest sufficiency of the background with which a model may ship. Default: 0.1.
        attraction: The largest attraction of a class's background with which a model may ship. Default: 0.1.
        skill: Warn if the skill of the heat is significantly below this. Default: 0.
        alpha: The significance level. Default: 0.05.
        least_pictures: The testable pictures that a class needs for a verdict. Default: 30.
        most_empty: The largest share of empty maps with which the heat still means something. Default: 0.2.
        least_room: The headroom below which no map can show which object it used. Default: 0.1.
        worse: How much worse than the baseline a measure may be. Default: 0.02.
        strict: PASS only if an effect above the limit is excluded for each class too, and not only for all together.
    """

    gap: Annotated[float | None, Parameter(metavar="SHARE")] = None
    sufficiency: Annotated[float | None, Parameter(metavar="SHARE")] = None
    attraction: Annotated[float | None, Parameter(metavar="SHARE")] = None
    skill: Annotated[float | None, Parameter(metavar="NUMBER")] = None
    alpha: Annotated[float | None, Parameter(metavar="SHARE")] = None
    least_pictures: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    most_empty: Annotated[float | None, Parameter(metavar="SHARE")] = None
    least_room: Annotated[float | None, Parameter(metavar="SHARE")] = None
    worse: Annotated[float | None, Parameter(metavar="SHARE")] = None
    strict: Annotated[bool | None, Parameter(negative=())] = None


@Parameter(name="*", group=RUN)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the check writes, and what it starts from.

    Attributes:
        out: The folder for the reports. Default: camkit-check.
        baseline: An earlier report.json to compare with.
        fail_on_worse: Exit with 1 if the model is significantly worse than the baseline, by more than --worse.
        quick: Use a smaller sample: 40 pictures of each class, or more if the limits need them, and one background of
            each kind.
        resume: Continue an interrupted check.
        inconclusive: Whether INCONCLUSIVE counts as a failure (exit code 3) or as a pass (exit code 0). Default: fail.
        tensorboard: A folder for TensorBoard event files with the measures and the worst offenders.
    """

    out: Annotated[Path | None, Parameter(alias="-o", metavar="FOLDER")] = None
    baseline: Annotated[Path | None, Parameter(metavar="FILE")] = None
    fail_on_worse: Annotated[bool | None, Parameter(negative=())] = None
    quick: Annotated[bool | None, Parameter(negative=())] = None
    resume: Annotated[bool | None, Parameter(negative=())] = None
    inconclusive: Literal["pass", "fail"] | None = None
    tensorboard: Annotated[Path | None, Parameter(metavar="FOLDER")] = None


@checks.default
def check(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Source,
    pictures: DataOptions = DataOptions(),
    experiment: ExperimentOptions = ExperimentOptions(),
    limits: LimitOptions = LimitOptions(),
    run: RunOptions = RunOptions(),
    ray: Ray = False,
    common: Common = Common(),
) -> int:
    """Check whether a classifier or a detector may ship, or reads the background.

    Exit codes: 0 the model may ship; 1 FAIL; 2 the call, the config or the data is wrong; 3 INCONCLUSIVE, or WARN if a
    class could not be tested; 4 the model or the program failed.

    Args:
        data: A folder with one folder per class, a CSV with the columns path and label, a folder of pictures whose
            regions name classes, or the data.yaml of a YOLO data set.
    """
    from camkit.background.check import JOURNAL, finish_check, plan_check
    from camkit.background.forecast import estimate_seconds
    from camkit.background.journal import count_finished
    from camkit.background.report import REPORTS, markdown
    from camkit.background.report import console as check_console
    from camkit.background.spread import spread
    from camkit.cli.bars import stages
    from camkit.cli.text import wide
    from camkit.images.files import check_folder, refuse_address, refuse_input

    common.begin()
    settings = settings_of(common.config, data, pictures, check=experiment, limits=limits, run=run)
    if settings.data.path is not None:
        refuse_address(str(settings.data.path))
    out = settings.run.out or Path("camkit-check")
    settings = settings.with_options(run={"out": out})
    check_folder(out)
    for name in REPORTS:
        refuse_input(out / name, [settings.data.regions, settings.data.class_map, *source.files()])
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        plan = plan_check(source.load(), config=settings)
        console = printer()
        if not TALK.quiet:
            console.print(check_console.data_summary(plan))
            console.print(check_console.power_notice(plan))
            workers = 1 if pool is None else pool.actors
            seconds = estimate_seconds(plan, count_finished(out / JOURNAL) if settings.run.resume else None, workers)
            console.print(check_console.cost_notice(plan, seconds))
        events = stack.enter_context(events_into(settings.run.tensorboard))
        rows_of = None if pool is None else spread(plan, source.on_cluster(pool, plan.model).map)
        with stages() as progress:
            command = shlex.join(["camkit", *sys.argv[1:]])
            result = finish_check(plan, progress=progress, command=command, rows_of=rows_of)
        if not TALK.quiet:
            table = check_console.table(result)
            wide(table, console).print(table)
        console.print(check_console.verdict(result))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in markdown.workflow_commands(result):
                emit(line)
        if events is not None:
            from camkit.tensorboard import write_check

            write_check(result, events)
    return result.exit_code()


def settings_of(config: Path | None, data: Path | None, pictures: DataOptions, **tables: Any) -> Settings:
    """Return the config's settings, or the defaults, with those that the options set.

    Raises:
        InputError: the config or an option is wrong.
    """
    from camkit.config.settings import as_settings

    options = {name: given if isinstance(given, dict) else vars(given) for name, given in tables.items()}
    options["data"] = {"path": data, **vars(pictures)}
    return as_settings(config).with_options(
        named=lambda setting: f"--{setting.rpartition('.')[2].replace('_', '-')}", **options
    )


@checks.command
def init(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: OptionalSource = OptionalSource(),
    pictures: DataOptions = DataOptions(),
    experiment: ExperimentOptions = ExperimentOptions(),
    limits: LimitOptions = LimitOptions(),
    run: RunOptions = RunOptions(),
    file: Annotated[Path, Parameter(alias="-f", group=OUTPUT, metavar="FILE")] = Path("camkit.toml"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Write a commented camkit.toml that fits the data and holds the values of the options.

    Args:
        data: The pictures, as for the check.
        file: The config file to write.
        overwrite: Replace the file if it exists.
    """
    from camkit.background.classes import read_class_map
    from camkit.background.data import read_data
    from camkit.background.starter import starter_config
    from camkit.config.files import PROJECT_FILE
    from camkit.images.files import refuse_input, write_file

    common.begin()
    if file.suffix != ".toml" or file.name == PROJECT_FILE:
        raise InputError(
            f"the config cannot be written to {file}; name another file that ends in .toml, such as camkit.toml"
        )
    if file.exists() and not overwrite:
        raise InputError(f"{file} exists already; name another file with --file, or pass --overwrite")
    model = source.as_settings()
    settings = settings_of(common.config, data, pictures, check=experiment, limits=limits, run=run, model=model)
    data_files = [settings.data.path, settings.data.regions, settings.data.class_map, settings.model.labels]
    refuse_input(file, [common.config, *data_files])
    if settings.data.path is None:
        raise InputError("name the pictures: camkit check init validation/ --model resnet50")
    table = settings.data.class_map
    class_map = None if table is None else read_class_map(table)
    dataset = read_data(
        settings.data.path, regions=settings.data.regions, group=settings.data.group, class_map=class_map
    )
    text = starter_config(dataset, settings.relative_to(file.parent))
    write_file(file, text.encode())
    if not TALK.quiet:
        printer().print("\n".join(map(printable, dataset.facts)), markup=False)
        printer().print(f"wrote {printable(str(file))}", markup=False)
    return 0


def demo_check(out: Path) -> int:
    """Check both demo networks on the same scenes. The exit code is 0 whatever the verdicts are."""
    from camkit.background.check import finish_check, plan_check
    from camkit.background.forecast import estimate_seconds
    from camkit.background.report import console as check_console
    from camkit.cli.bars import stages
    from camkit.demo.scenes import labelled_scenes
    from camkit.images.files import check_folder
    from camkit.kit.wording import in_words
    from camkit.models import DEMO_MODELS

    check_folder(out)
    pictures, few_pastes = labelled_scenes(), {"pastes": 1}  # to save time
    plans = [
        plan_check(name, pictures, config={"check": few_pastes, "run": {"out": out / name}}) for name in DEMO_MODELS
    ]
    say(f"checking both networks: {in_words(sum(map(estimate_seconds, plans)))}")
    results = []
    for plan in plans:
        say(f"checking {plan.model.name}")
        with stages() as progress:
            results.append(finish_check(plan, progress=progress))
    for result in results:
        printer().print(check_console.verdict(result))
    return 0
