"""``camkit check`` and ``camkit check init``, and the check's demonstration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from camkit.cli.options import CheckedSource, events_into
from camkit.cli.terminal import QuietConsole, printer, say, stages
from camkit.errors import InputError

if TYPE_CHECKING:
    from camkit.background.values import Stage

checks = App(
    name="check", help="Answer whether a classifier may ship, or looks at the background.", console=QuietConsole()
)


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
    inconclusive: Literal["pass", "fail"] = "pass",
    tensorboard: Path | None = None,
) -> int:
    """Answer whether a classifier may ship, or looks at the background.

    Exit codes: 0 may ship, 1 FAIL, 2 the call, the config or the data is wrong, 3 INCONCLUSIVE with
    --inconclusive=fail, 4 the model or the program failed.

    Args:
        data: A folder with a folder per class, a CSV of path and label, or pictures whose regions name classes.
        source: The model.
        config: A camkit.toml; the one of this folder, or pyproject.toml's [tool.camkit], if not given.
        regions: Where the objects' regions are; searched for beside the pictures if not given.
        class_map: A JSON file from the data's classes to the model's outputs.
        out: The folder for the reports.
        baseline: An earlier report.json to compare with.
        quick: A smaller sample.
        resume: Go on with an interrupted check.
        inconclusive: Whether INCONCLUSIVE ends with 0 or 3.
        tensorboard: A folder for event files with the measures and the worst pictures.
    """
    from camkit.background.config import Settings, find_config, read_config
    from camkit.background.cost import estimate_cost
    from camkit.background.journal import count_finished
    from camkit.background.report import console as check_console
    from camkit.background.report import markdown
    from camkit.background.run import JOURNAL, finish_check, plan_check
    from camkit.images.files import check_folder

    file = config or find_config(Path())
    settings = Settings() if file is None else read_config(file)
    check_folder(out)
    plan = plan_check(
        (source or CheckedSource()).settled(settings),
        data,
        regions=regions,
        class_map=class_map,
        config=settings,
        quick=quick,
        skip=out,
    )
    console = printer()
    console.print(check_console.understood(plan))
    console.print(check_console.announced(plan, estimate_cost(plan, count_finished(out / JOURNAL) if resume else None)))
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
    return result.exit_code(inconclusive)


@checks.command
def init(
    data: Path,
    *,
    model: str | None = None,
    regions: Path | None = None,
    class_map: Path | None = None,
    file: Path = Path("camkit.toml"),
) -> int:
    """Write a commented camkit.toml from what is found.

    Args:
        data: The pictures, as for the check.
        model: The model, as for the check.
        regions: Where the objects' regions are; searched for beside the pictures if not given.
        class_map: A JSON file from the data's classes to the model's outputs.
        file: The config to write; an older one is kept.
    """
    from camkit.background.classes import read_class_map
    from camkit.background.data import read_data
    from camkit.background.starter import starter_config
    from camkit.images.files import write_file

    if file.exists():
        raise InputError(f"{file} is there already; name another with --file, or remove it")
    only = None if class_map is None else set(read_class_map(class_map))
    found = read_data(data, regions=regions, only=only)
    beside = [None if path is None else _seen_from(file, path) for path in (regions, class_map)]
    text = starter_config(found, where=_seen_from(file, data), model=model, regions=beside[0], class_map=beside[1])
    write_file(file, text.encode())
    printer().print("\n".join(found.facts), markup=False)
    printer().print(f"wrote {file}", markup=False)
    return 0


def _seen_from(file: Path, path: Path) -> Path:
    """Return a path as a config means it: counted from where the config lies."""
    try:
        return Path(os.path.relpath(path, file.parent))
    except ValueError:  # on another drive
        return path.resolve()


def demo_check(out: Path) -> int:
    """Check both demo networks; the demonstration ends with 0 whatever the verdicts are."""
    from camkit.background.report import console as check_console
    from camkit.demo.checked import run
    from camkit.images.files import check_folder

    check_folder(out)
    with contextlib.ExitStack() as bars:

        def progress(name: str) -> Callable[[Stage, int, int], None]:
            bars.close()
            say(f"checking {name}")
            return bars.enter_context(stages())

        found = run(out, progress)
    for result in found.values():
        printer().print(check_console.verdict(result))
    return 0
