"""What the labs share: finished models as lines of a file, the run over the others, and the page with the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from camkit.background.report import plain
from camkit.background.result import CheckResult

Row = dict[str, Any]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the networks of the labs are trained."""


class Named(Protocol):
    """A description of a model to train and check."""

    @property
    def name(self) -> str:
        """The model's name in the state."""


Spec = TypeVar("Spec", bound=Named)


def finished(file: Path) -> dict[str, Row]:
    """Return the finished models of a state, by name. A line without its end comes from an interrupted write."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row["name"]: row for row in rows}


def run_models(
    file: Path,
    specs: Iterable[Spec],
    make: Callable[..., Row],
    arguments: tuple[Any, ...],
    workers: int,
    limit: int | None,
    told: Callable[[Row], str],
) -> list[Row]:
    """Make the row of every model that has none yet, at most ``limit`` of them, and return all rows.

    Args:
        file: holds a line for each finished model.
        specs: the models.
        make: ``make(spec, *arguments)`` returns a model's row; it runs in a process of its own.
        arguments: further arguments of ``make``.
        workers: processes.
        limit: the most models of this run; None means all.
        told: returns the line that is printed of a finished row.
    """
    rows = finished(file)
    todo = [spec for spec in specs if spec.name not in rows][:limit]
    print(f"{len(rows)} models are finished, {len(todo)} follow", flush=True)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool, file.open("a") as lines:
        running = [pool.submit(make, spec, *arguments) for spec in todo]
        for count, future in enumerate(as_completed(running), start=1):
            try:
                row = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            lines.write(f"{json.dumps(row)}\n")
            lines.flush()
            rows[row["name"]] = row
            print(f"{count}/{len(todo)} {told(row)}", flush=True)
    return list(rows.values())


def verdict_line(row: Row) -> str:
    """Return a line about a checked model: its accuracies with the shortcut and without, and the verdict."""
    return f"{row['name']}: {row['matched']:.2f} {row['redrawn']:.2f} {row['verdict']}"


def row_of(result: CheckResult) -> Row:
    """Return what a model's row stores of its check: the verdict and the measures."""
    return {
        "verdict": result.verdict,
        "reasons": list(result.reasons),
        "overall": json.loads(json.dumps(plain(result.overall))),
    }


def write_between(file: Path, mark: str, text: str) -> None:
    """Write a text between two marks of a page, or a new page. What is outside the marks stays."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    page = file.read_text("utf-8") if file.exists() else f"# Validation\n\n{begin}\n{end}\n"
    if begin not in page or end not in page:
        raise SystemExit(f"{file} has no line {begin} with a line {end} below it; add them where the tables belong")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    file.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", "utf-8")
