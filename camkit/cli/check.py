"""The work of ``camkit check``, of ``camkit check init``, of ``camkit mend``, and of the demonstration of the check."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import camkit
from camkit.background import report
from camkit.background.check import finish_check, plan_check, spread, starter_config
from camkit.background.data import read_class_map, read_data
from camkit.background.mend import STRENGTHS, Mending, nothing_to_mend
from camkit.background.outlines import GRABCUT, PAGE
from camkit.background.rule import said
from camkit.cli.explain import actors_of, events_into, load, on_cluster, refuse_existing
from camkit.cli.options import Detector, OptionalModel
from camkit.cli.terminal import TALK, emit, fail, print_table, printer, say, stages
from camkit.demo.scenes import labelled_scenes
from camkit.errors import InputError, OutputError, printable
from camkit.images.files import check_folder, refuse_address, refuse_input, write_file
from camkit.models import DEMO_MODELS, load_model
from camkit.options import Data, Model
from camkit.options.settings import Settings, as_settings
from camkit.options.toml import PROJECT_FILE
from camkit.trackers import find_tracker


def check(data: Path | None, *, source: Model, ray: bool | str, **tables: Any) -> int:
    """Check a model, print the verdict, and write the reports; ``tables`` are those of the config."""
    settings = _settings(data, **tables)
    if settings.data.path is not None:
        refuse_address(str(settings.data.path))
    out = settings.run.out or Path("camkit-check")
    settings = settings.with_options(run={"out": out})
    check_folder(out)
    for name in report.REPORTS:
        refuse_input(out / name, [settings.data.regions, settings.data.class_map, *source.files()])
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        plan = plan_check(load(source), config=settings)
        log = None if settings.run.log_to is None else find_tracker(settings.run.log_to)
        console = printer()
        if not TALK.quiet:
            console.print(report.data_summary(plan))
            console.print(report.cost_notice(plan))
        events = stack.enter_context(events_into(settings.run.tensorboard))
        rows_of = None if pool is None else spread(plan, on_cluster(source, pool, plan.model).map)
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
            camkit.tensorboard.write_check(result, events)
        if settings.run.card is not None:
            say(f"wrote {printable(str(settings.run.card))}")
        if log is not None:
            try:
                log(result.to_log(), None)
            except OutputError as error:
                if not result.exit_code():
                    raise
                fail(str(error))  # the verdict's own exit code stays
    return result.exit_code()


def _settings(data: Path | None, pictures: Data, **tables: Any) -> Settings:
    """Return the config's settings, or the defaults, with those of the options, which have the config's values."""
    given = {name: table if isinstance(table, dict) else vars(table) for name, table in tables.items()}
    given["data"] = {**vars(pictures), "path": data}
    return as_settings(TALK.config).with_options(
        named=lambda setting: f"--{setting.rpartition('.')[2].replace('_', '-')}", **given
    )


def init(data: Path | None, *, source: OptionalModel, file: Path, overwrite: bool, **tables: Any) -> None:
    """Write a config that fits the data."""
    if file.suffix != ".toml" or file.name == PROJECT_FILE:
        raise InputError(
            f"the config cannot be written to {file}; name another file that ends in .toml, such as camkit.toml"
        )
    refuse_existing(file, "file with --file", overwrite=overwrite)
    model = {name: value for name, value in vars(source).items() if name != "trust_remote_code"}
    settings = _settings(data, model=model, **tables)
    path, table = settings.data.path, settings.data.class_map
    refuse_input(file, [TALK.config, path, settings.data.regions, table, settings.model.labels])
    if path is None:
        raise InputError("name the pictures: camkit check init validation/ --model resnet50")
    class_map = None if table is None else read_class_map(table)
    dataset = read_data(path, regions=settings.data.regions, group=settings.data.group, class_map=class_map)
    write_file(file, starter_config(dataset, settings.relative_to(file.parent)).encode())
    if not TALK.quiet:
        lines = [*dataset.facts, f"wrote {file}"]
        printer().print("\n".join(map(printable, lines)), markup=False)


def regions(data: Path, *, source: Detector, by: str, **given: Any) -> None:
    """Outline the objects in boxes; ``given`` goes to ``camkit.regions``."""
    detector = None if source.name is None else load(source)
    outliner = by if by == GRABCUT else load_model(by, device=source.device, trust_remote_code=source.trust_remote_code)
    with stages() as progress:
        told = functools.partial(progress, "outlines")
        file = camkit.regions(data, boxes_of=detector, by=outliner, progress=told, **given)
    made_by = [made.get("from_box") for made in json.loads(file.read_text())["annotations"]]
    cut, ellipses = made_by.count("cut"), made_by.count("ellipse")
    say(f"outlined the object in {cut} of {cut + ellipses} boxes" + "; the others get their ellipse" * (ellipses > 0))
    say(f"wrote {printable(str(file))}; judge the outlines in {printable(str(file.with_name(PAGE)))}")


def demo(out: Path) -> None:
    """Check both demo networks on the same scenes. The exit code is 0 whatever the verdicts are."""
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


def mend(
    data: Path | None,
    *,
    source: Model,
    out: Path | None,
    export: Path | None,
    overwrite: bool,
    force: bool,
    **tables: Any,
) -> int:
    """Train the last layer anew, or export the pictures to train on."""
    file = Path("mended.pth") if out is None else out
    target = file if export is None else export / "labels.csv"
    refuse_existing(target, "file with --out" if export is None else "folder with --export", overwrite=overwrite)
    check_folder(target.parent)
    settings = _settings(data, run={"out": export}, **tables)
    refuse_input(target, [settings.data.regions, settings.data.class_map, *source.files()])
    mending = Mending(plan_check(load(source), config=settings))
    if export is not None:
        with stages() as progress:
            count = mending.export(export, progress)
        say(f"wrote {count} pictures and their table, {printable(str(target))}")
        return 0
    with stages() as progress:
        before = mending.check_before(progress)
    problem, advice = nothing_to_mend(before), "--force trains anyway"
    if force or not problem:
        say(printable(problem or f"to mend: {report.sentence(before)}"))
        with stages() as progress:
            examples, problem = mending.examples(progress)
        kept = [word for both in itertools.pairwise(sys.argv) if not {"--out", "-o"} & {*both} for word in both[1:]]
        words = [word for word in kept if not word.startswith(("--out=", "-o=", "--overwrite"))]
        command = shlex.join(["camkit", *words, "--export", "pasted"])
        advice = f"{advice}, and this command writes pictures to train the whole network on: {printable(command)}"
    if force or not problem:
        with stages() as progress:
            found = mending.mended(progress, before, examples, problem)
        for line in said("mended", found, found.strength > STRENGTHS[-1]).split("\n"):
            emit(line)
        problem, advice = found.problem, "--force writes them, and --export writes pictures to train on"
    if problem and not force:
        say(f"no weights are written: {printable(problem)}; {advice}")
        # The exit code if the weights are not written because the mended model is no better
        return 1
    found.save(file)
    say(printable(f"wrote {file}" + f", although {problem}" * bool(problem)))
    return 0
