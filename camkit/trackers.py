"""Results in the trackers of experiments: MLflow, Weights & Biases, Trackio and TensorBoard.

A result's ``to_log`` returns what a tracker gets. For each tracker, a function writes this with the tracker's library:
into the active run if there is one, else into a new run, which it ends. An entry of ``TRACKERS`` adds a tracker:

    >>> logged = []
    >>> TRACKERS["mine"] = lambda json, log, files, step: logged.append(json.dumps(log.values)), "json", "nothing"
    >>> find_tracker("mine")(Log("check", {"check/verdict": "PASS"}), None)
    >>> logged, TRACKERS.pop("mine")[1:]
    (['{"check/verdict": "PASS"}'], ('json', 'nothing'))
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camkit.errors import InputError, OutputError, as_error, as_markdown, did_you_mean, optional
from camkit.types import Pixels

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class Log:
    """What a tracker gets of a result.

    Attributes:
        name: what kind of result it is, such as "check".
        values: what was found: numbers, and texts such as the verdict.
        settings: what was set before, such as the limits.
        files: the contents of the reports, by file name.
        pictures: the rows of a table, each with its tag; a cell that is an array (H, W, 3) uint8 is a picture.
    """

    name: str
    values: Mapping[str, float | str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    pictures: Sequence[tuple[str, Mapping[str, Any]]] = ()

    def columns(self, image: Callable[[Pixels], Any]) -> dict[str, list[Any]]:
        """Return the table of pictures by column; ``image`` makes what the tracker takes of a picture."""
        rows = [row for _, row in self.pictures]
        return {
            name: [image(row[name]) if isinstance(row[name], np.ndarray) else row[name] for row in rows]
            for name in (rows[0] if rows else ())
        }


class Loggable:
    """A result that trackers of experiments take."""

    def to_log(self) -> Log:
        """Return what a tracker gets."""
        raise NotImplementedError

    def log_to(self, tracker: str, step: int | None = None) -> None:
        """Log the result with a tracker of experiments, into the active run if there is one, else into a new one.

        Args:
            tracker: "mlflow", "wandb", "trackio" or "tensorboard", which writes into a new folder in ``runs``.
            step: the step of the training; None leaves it to the tracker.

        Raises:
            InputError: the tracker is unknown, or not installed.
            OutputError: the tracker refuses the result, or cannot be reached.

        Examples:
            >>> camkit.check("resnet50", "validation/").log_to("mlflow")  # doctest: +SKIP
        """
        find_tracker(tracker)(self.to_log(), step)


def plain_name(name: str) -> str:
    """Return a name of a value that every tracker takes.

    >>> plain_name("check/gap/it's #2")
    'check/gap/it_s _2'
    """
    return re.sub(r"[^\w/. -]", "_", name)


def to_mlflow(mlflow: Any, log: Log, files: str, step: int | None) -> None:
    """Log with MLflow: texts as tags. Names that become equal are numbered."""
    values: dict[str, float | str] = {}
    for name, value in log.values.items():
        plain, number = plain_name(name), 1
        while plain in values:
            plain, number = f"{plain_name(name)} {number + 1}", number + 1
        values[plain] = value
    with contextlib.nullcontext() if mlflow.active_run() else mlflow.start_run(run_name=f"camkit {log.name}"):
        mlflow.set_tags({name: value for name, value in values.items() if isinstance(value, str)})
        mlflow.log_metrics({name: value for name, value in values.items() if not isinstance(value, str)}, step)
        mlflow.log_artifacts(files, log.name)
        if log.pictures:
            mlflow.log_table(log.columns(mlflow.Image), f"{log.name}/pictures.json")
        mlflow.log_params(log.settings)  # last, since MLflow refuses other settings than those of an earlier result


def to_wandb(wandb: Any, log: Log, files: str, step: int | None) -> None:
    """Log with Weights & Biases.

    Raises:
        InputError: the run is further than ``step``.
    """
    if wandb.run and step is not None and step < wandb.run.step:
        raise InputError(
            f"W&B drops results of earlier steps: the run is at step {wandb.run.step}, not {step}; log at a later step"
        )
    _to_run(wandb, wandb.run, log, files, step)


def to_trackio(trackio: Any, log: Log, files: str, step: int | None) -> None:
    """Log with Trackio, whose functions are those of Weights & Biases."""
    _to_run(trackio, trackio.context_vars.current_run.get(), log, files, step)


def _to_run(library: Any, run: Any, log: Log, files: str, step: int | None) -> None:
    values: dict[str, Any] = dict(log.values)
    for kind, show in ((".html", library.Html), (".png", library.Image)):
        values |= {f"{log.name}/{name}": show(str(Path(files, name))) for name in log.files if name.endswith(kind)}
    if log.pictures:
        columns = log.columns(library.Image)
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        values[f"{log.name}/pictures"] = library.Table(columns=list(columns), data=rows)
    with contextlib.ExitStack() as stack:
        if run is None:
            run = library.init(project=os.environ.get(f"{library.__name__.upper()}_PROJECT", "camkit"))
            stack.callback(library.finish)
        run.config.update(log.settings)
        run.log(values, step=step)
        if log.files:
            artifact = library.Artifact(f"camkit-{log.name}", "report")
            artifact.add_dir(files)
            run.log_artifact(artifact)


def to_tensorboard(_: Any, log: Log, __: str, step: int | None) -> None:
    """Log with TensorBoard, in a new folder."""
    write_events(log, f"runs/camkit-{log.name}-{time.strftime('%Y%m%d-%H%M%S')}", step)


def write_events(log: Log, writer: SummaryWriter | str | Path, step: int | None) -> None:
    """Write TensorBoard's events: values, tables of pictures, and the Markdown summary."""
    with opened(writer) as events, naming_the_folder(events):
        for name, contents in log.files.items():
            if name.endswith(".md"):
                events.add_text(log.name, contents.decode(), step)
        for tag, value in log.values.items():
            if isinstance(value, str):
                events.add_text(tag, value, step)
            else:
                events.add_scalar(tag, value, step)
        for tag, row in [*log.pictures, *([(f"{log.name}/settings", log.settings)] if log.settings else [])]:
            drawn = {name: cell for name, cell in row.items() if isinstance(cell, np.ndarray)}
            for name, pixels in drawn.items():
                add_picture(events, f"{tag}/{name}" if len(drawn) > 1 else tag, pixels, step)
            lines = [f"| {name} | {as_markdown(str(cell))} |" for name, cell in row.items() if name not in drawn]
            events.add_text(tag, "\n".join(["| field | value |", "| --- | --- |", *lines]), step)


def add_picture(events: Any, tag: str, pixels: Pixels, step: int | None) -> None:
    """Write a picture, H x W x 3, as an event."""
    events.add_image(tag, np.ascontiguousarray(pixels), step, dataformats="HWC")


@contextlib.contextmanager
def opened(writer: SummaryWriter | str | Path) -> Iterator[SummaryWriter]:
    """Open a SummaryWriter for a folder and close it at the end; an existing writer is only flushed.

    Raises:
        InputError: TensorBoard is not installed, or this is neither a writer nor a folder.
        OutputError: the folder cannot be written.
    """
    events: Any = writer
    if isinstance(writer, (str, Path)):
        needs = "TensorBoard needs the package tensorboard: pip install 'camkit[tensorboard]'"
        package = optional("torch.utils.tensorboard", needs)
        with naming_the_folder(writer):
            events = package.SummaryWriter(str(writer))
    elif not all(hasattr(writer, name) for name in ("add_scalar", "add_image", "add_histogram_raw")):
        raise InputError(f"writer must be a SummaryWriter or a folder, not a {type(writer).__name__}")
    try:
        yield events
    finally:
        with naming_the_folder(events):
            if isinstance(writer, (str, Path)):
                events.close()
            else:
                writer.flush()


@contextlib.contextmanager
def naming_the_folder(writer: Any) -> Iterator[None]:
    """Turn an error of the operating system, such as a full disk, into a sentence that names the folder.

    Raises:
        OutputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        folder = getattr(writer, "log_dir", writer)
        raise OutputError(f"cannot write events into {folder}: {error.strerror or error}") from error


TRACKERS: dict[str, tuple[Callable[[Any, Log, str, int | None], None], str, str]] = {
    "mlflow": (to_mlflow, "mlflow", "mlflow"),
    "wandb": (to_wandb, "wandb", "wandb"),
    "trackio": (to_trackio, "trackio", "trackio"),
    "tensorboard": (to_tensorboard, "torch.utils.tensorboard", "tensorboard"),
}
"""Every tracker, by the name that ``log_to`` takes: its function, the module that it gets, and the package to install.

The function gets the module, the ``Log``, a folder with the files, and the step.
"""


def find_tracker(name: str) -> Callable[[Log, int | None], None]:
    """Import the library of a tracker, and return the function that logs with it.

    Raises:
        InputError: the tracker is unknown, or its library is not installed.
    """
    if name not in TRACKERS:
        known = f"the trackers are {', '.join(TRACKERS)}"
        raise InputError(f"camkit cannot log to {name!r}; {known}{did_you_mean(name, TRACKERS)}")
    write, module, package = TRACKERS[name]
    library = optional(module, f"logging to {name} needs the package {package}: pip install {package}")

    def log(result: Log, step: int | None) -> None:
        # The end of the library's message, such as MLflow's, may say what to do
        refused = as_error(
            OutputError, lambda error: f"{name} did not take the results: {' '.join(str(error).split())}"
        )
        # What the libraries print does not belong to the results
        with refused, contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
            for file, contents in result.files.items():
                Path(folder, file).write_bytes(contents)
            write(library, result, folder, step)

    return log
