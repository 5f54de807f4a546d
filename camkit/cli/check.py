"""``camkit check``, ``camkit check init``, the demonstration of the check, and ``camkit mend``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from camkit.cli.options import (
    DATA,
    OUTPUT,
    Common,
    OptionalSource,
    Ray,
    Source,
    actors_of,
    command,
    events_into,
    refuse_existing,
)
from camkit.cli.terminal import TALK, QuietConsole, emit, print_table, printer, say, stages
from camkit.errors import InputError, printable
from camkit.options import Check, Data, Limits, Run

if TYPE_CHECKING:
    from camkit.options.settings import Settings


checks = App(
    name="check",
    help="Check whether a classifier or a detector may ship, or reads the background.",
    usage="Usage: camkit check DATA --model NAME [OPTIONS]\n       camkit check init DATA [OPTIONS]",
    console=QuietConsole(),
)


@checks.default
@command
def check(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Source,
    pictures: Data = Data(),
    experiment: Check = Check(),
    limits: Limits = Limits(),
    run: Run = Run(),
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
    from camkit.background import report
    from camkit.background.check import finish_check, plan_check, spread
    from camkit.images.files import check_folder, refuse_address, refuse_input

    common.begin()
    settings = settings_of(common.config, data, pictures, check=experiment, limits=limits, run=run)
    if settings.data.path is not None:
        refuse_address(str(settings.data.path))
    out = settings.run.out or Path("camkit-check")
    settings = settings.with_options(run={"out": out})
    check_folder(out)
    for name in report.REPORTS:
        refuse_input(out / name, [settings.data.regions, settings.data.class_map, *source.files()])
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        plan = plan_check(source.load(), config=settings)
        console = printer()
        if not TALK.quiet:
            console.print(report.data_summary(plan))
            console.print(report.cost_notice(plan))
        events = stack.enter_context(events_into(settings.run.tensorboard))
        rows_of = None if pool is None else spread(plan, source.on_cluster(pool, plan.model).map)
        with stages() as progress:
            command = shlex.join(["camkit", *sys.argv[1:]])
            result = finish_check(plan, progress=progress, command=command, rows_of=rows_of)
        if not TALK.quiet:
            print_table(report.table(result))
        console.print(report.verdict(result))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in report.workflow_commands(result):
                emit(line)
        if events is not None:
            from camkit.tensorboard import write_check

            write_check(result, events)
    return result.exit_code()


def settings_of(config: Path | None, data: Path | None, pictures: Data, **tables: Any) -> Settings:
    """Return the config's settings, or the defaults, with those of the options, which have the config's values.

    Raises:
        InputError: the config or an option is wrong.
    """
    from camkit.options.settings import as_settings

    given = {name: table if isinstance(table, dict) else vars(table) for name, table in tables.items()}
    given["data"] = {**vars(pictures), "path": data}
    return as_settings(config).with_options(
        named=lambda setting: f"--{setting.rpartition('.')[2].replace('_', '-')}", **given
    )


@checks.command
@command
def init(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: OptionalSource = OptionalSource(),
    pictures: Data = Data(),
    experiment: Check = Check(),
    limits: Limits = Limits(),
    run: Run = Run(),
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
    from camkit.background.check import starter_config
    from camkit.background.data import read_class_map, read_data
    from camkit.images.files import refuse_input, write_file
    from camkit.options.toml import PROJECT_FILE

    common.begin()
    if file.suffix != ".toml" or file.name == PROJECT_FILE:
        raise InputError(
            f"the config cannot be written to {file}; name another file that ends in .toml, such as camkit.toml"
        )
    refuse_existing(file, "--file", overwrite=overwrite)
    model = {name: value for name, value in vars(source).items() if name != "trust_remote_code"}
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
    from camkit.background import report
    from camkit.background.check import finish_check, plan_check
    from camkit.demo.scenes import labelled_scenes
    from camkit.images.files import check_folder
    from camkit.models import DEMO_MODELS

    check_folder(out)
    pictures, few_pastes = labelled_scenes(), {"pastes": 1}  # to save time
    plans = [
        plan_check(name, pictures, config={"check": few_pastes, "run": {"out": out / name}}) for name in DEMO_MODELS
    ]
    results = []
    for plan in plans:
        say(f"checking {plan.model.name}")
        with stages() as progress:
            results.append(finish_check(plan, progress=progress))
    for result in results:
        printer().print(report.verdict(result))
    return 0


@command
def mend(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Source,
    pictures: Data = Data(),
    experiment: Check = Check(),
    out: Annotated[Path | None, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = None,
    export: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    force: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Train the last linear layer of a classifier anew, so that it relies less on the background.

    Half of the groups of pictures mend, and the other half are checked before and after. Exit codes: 0 the weights are
    written; 1 nothing was gained, and no weights are written; 2 the call or the data is wrong; 4 the model or the
    program failed.

    Args:
        data: The pictures with the regions of their objects, as for the check.
        out: The file for the mended weights, a state dict such as --weights takes. Default: mended.pth.
        export: Instead of mending, write the pasted pictures into this folder, to train the model on them.
        overwrite: Replace the file if it exists.
        force: Write the weights even if nothing was gained.
    """
    from camkit.background.check import plan_check
    from camkit.background.mend import check_before, export_composites, mended, nothing_to_mend
    from camkit.background.report import sentence
    from camkit.background.rule import said
    from camkit.images.files import check_folder, refuse_input

    common.begin()
    file = Path("mended.pth") if out is None else out
    target = file if export is None else export / "labels.csv"
    if export is not None and out is not None:
        raise InputError("--export writes pictures and no weights; leave out --out")
    refuse_existing(target, "--out" if export is None else "--export", overwrite=overwrite)
    check_folder(target.parent)
    settings = settings_of(common.config, data, pictures, check=experiment, run={"out": export})
    refuse_input(target, [settings.data.regions, settings.data.class_map, *source.files()])
    plan = plan_check(source.load(), config=settings)
    if export is not None:
        with stages() as progress:
            count = export_composites(plan, export, progress)
        say(f"wrote {count} pictures and their table, {printable(str(target))}")
        return 0
    with stages() as progress:
        before = check_before(plan, progress)
    problem = nothing_to_mend(before)
    if force or not problem:
        say(printable(problem or f"to mend: {sentence(before)}"))
        with stages() as progress:
            found = mended(plan, progress, before)
        for line in said("mended", found).split("\n"):
            emit(line)
        problem = found.problem
    if problem and not force:
        say(f"no weights are written: {problem}; --force writes them, and --export writes pictures to train on")
        # The exit code if the weights are not written because the mended model is no better
        return 1
    found.save(file)
    say(f"wrote {printable(str(file))}")
    return 0
