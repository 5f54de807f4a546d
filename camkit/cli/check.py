"""``camkit check``, ``camkit check init``, and the demonstration of the check."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from camkit.cli.options import CheckedSource, events_into
from camkit.cli.terminal import QuietConsole, printer, say, stages
from camkit.errors import InputError, printable

if TYPE_CHECKING:
    from camkit.background.values import Stage

checks = App(name="check", help="Check whether a classifier may ship, or reads the background.", console=QuietConsole())


@checks.default
def check(
    data: Path | None = None,
    *,
    source: CheckedSource | None = None,
    config: Path | None = None,
    regions: Path | None = None,
    class_map: Path | None = None,
    out: Path = Path("camkit-check"),
    baseline: Path | None = None,
    quick: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    inconclusive: Literal["pass", "fail"] = "fail",
    tensorboard: Path | None = None,
) -> int:
    """Check whether a classifier may ship, or reads the background.

    Exit codes: 0 may ship; 1 FAIL; 2 the call, the config or the data is wrong; 3 INCONCLUSIVE; 4 the model or the
    program failed.

    Args:
        data: A folder with one folder per class, a CSV with the columns path and label, or a folder of pictures whose
            regions name classes.
        source: The model.
        config: A camkit.toml. Without it, camkit uses the camkit.toml of this folder, or [tool.camkit] in its
            pyproject.toml.
        regions: The file or folder with the objects' regions. Without it, camkit searches beside the pictures.
        class_map: A JSON file that maps the data's classes to the model's outputs.
        out: The folder for the reports.
        baseline: An earlier report.json to compare with.
        quick: Use a smaller sample.
        resume: Continue an interrupted check.
        inconclusive: Whether INCONCLUSIVE counts as a failure (exit code 3) or as a pass (exit code 0).
        tensorboard: A folder for TensorBoard event files with the measures and the worst offenders.
    """
    from camkit.background.cost import estimate_cost
    from camkit.background.journal import count_finished
    from camkit.background.report import console as check_console
    from camkit.background.report import markdown
    from camkit.background.run import JOURNAL, finish_check, plan_check
    from camkit.config.files import find_config
    from camkit.config.settings import Settings, read_config
    from camkit.images.files import check_folder

    config_file = config or find_config(Path())
    if config_file is not None:
        say(f"using the config {config_file}{'' if config else ' of this folder; to use another, pass --config FILE'}")
    settings = Settings() if config_file is None else read_config(config_file)
    check_folder(out)
    loaded = (source or CheckedSource()).settled(settings)
    if loaded.note:
        say(loaded.note)
    plan = plan_check(
        loaded,
        data,
        regions=regions,
        class_map=class_map,
        config=settings,
        quick=quick,
        skip=out,
    )
    console = printer()
    console.print(check_console.data_summary(plan))
    console.print(
        check_console.cost_notice(plan, estimate_cost(plan, count_finished(out / JOURNAL) if resume else None))
    )
    with events_into(tensorboard) as events:
        with stages() as progress:
            result = finish_check(
                plan, out, baseline=baseline, resume=resume, progress=progress, inconclusive=inconclusive
            )
        console.print(check_console.table(result), soft_wrap=False)
        console.print(check_console.verdict(result))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in markdown.workflow_commands(result):
                print(line)  # noqa: T201
        if events is not None:
            from camkit.tensorboard import write_check

            write_check(result, events)
    return result.exit_code()


@checks.command
def init(
    data: Path,
    *,
    model: str | None = None,
    regions: Path | None = None,
    class_map: Path | None = None,
    file: Path = Path("camkit.toml"),
) -> int:
    """Write a camkit.toml with comments that fits the data.

    Args:
        data: The pictures, as for the check.
        model: The model, as for the check.
        regions: The file or folder with the objects' regions. Without it, camkit searches beside the pictures.
        class_map: A JSON file that maps the data's classes to the model's outputs.
        file: The config to write. An existing file is not overwritten.
    """
    from camkit.background.classes import read_class_map
    from camkit.background.data import read_data
    from camkit.background.starter import starter_config
    from camkit.images.files import write_file

    if file.exists():
        raise InputError(f"{file} exists already; name another file with --file, or remove it")
    only = None if class_map is None else set(read_class_map(class_map))
    dataset = read_data(data, regions=regions, only=only)
    text = starter_config(
        dataset,
        where=_relative_to_config(file, data),
        model=model,
        regions=None if regions is None else _relative_to_config(file, regions),
        class_map=None if class_map is None else _relative_to_config(file, class_map),
    )
    write_file(file, text.encode())
    printer().print("\n".join(map(printable, dataset.facts)), markup=False)
    printer().print(f"wrote {printable(str(file))}", markup=False)
    return 0


def _relative_to_config(file: Path, path: Path) -> Path:
    """Return a path relative to the folder of the config, as a config gives it."""
    try:
        return Path(os.path.relpath(path, file.parent))
    except ValueError:  # on another drive
        return path.resolve()


def demo_check(out: Path) -> int:
    """Check both demo networks. The exit code is 0 whatever the verdicts are."""
    from camkit.background.report import console as check_console
    from camkit.demo.checked import run
    from camkit.images.files import check_folder

    check_folder(out)
    with contextlib.ExitStack() as bars:

        def progress(name: str) -> Callable[[Stage, int, int], None]:
            bars.close()
            say(f"checking {name}")
            return bars.enter_context(stages())

        results = run(out, progress)
    for result in results.values():
        printer().print(check_console.verdict(result))
    return 0
