"""Results in the trackers of experiments: MLflow, Weights & Biases, Trackio and TensorBoard.

A result says as a ``Log`` what a tracker gets. For each tracker, a function writes it with the tracker's own library:
into the active run if there is one, else into a new run, which it ends. An entry of ``TRACKERS`` adds a tracker:

    >>> TRACKERS["print"] = Tracker(lambda library, log, step: print(log.name, dict(log.values)), "json", "nothing")
    >>> find_tracker("print")(Log("check", {"check/verdict": "PASS"}), None)
    check {'check/verdict': 'PASS'}
    >>> del TRACKERS["print"]
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from camkit.errors import InputError, OutputError, as_error, as_markdown, brief, did_you_mean, optional
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


def to_mlflow(mlflow: Any, log: Log, step: int | None) -> None:
    """Log with MLflow: texts as tags."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder_of(log))
        if mlflow.active_run() is None:
            stack.enter_context(mlflow.start_run(run_name=f"camkit {log.name}"))
        mlflow.log_params(log.settings)
        values = {plain_name(name): value for name, value in log.values.items()}
        mlflow.set_tags({name: value for name, value in values.items() if isinstance(value, str)})
        mlflow.log_metrics({name: value for name, value in values.items() if not isinstance(value, str)}, step)
        mlflow.log_artifacts(folder, log.name)
        if log.pictures:
            mlflow.log_table(log.columns(mlflow.Image), f"{log.name}/pictures.json")


def to_wandb(wandb: Any, log: Log, step: int | None) -> None:
    """Log with Weights & Biases."""
    _to_run(wandb, wandb.run, log, step)


def to_trackio(trackio: Any, log: Log, step: int | None) -> None:
    """Log with Trackio, whose functions are those of Weights & Biases."""
    _to_run(trackio, trackio.context_vars.current_run.get(), log, step)


def _to_run(library: Any, run: Any, log: Log, step: int | None) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder_of(log))
        if run is None:
            run = library.init(project=os.environ.get(f"{library.__name__.upper()}_PROJECT", "camkit"))
            stack.callback(library.finish)
        run.config.update(log.settings)
        values: dict[str, Any] = dict(log.values)
        shown = {".html": library.Html, ".png": library.Image}
        values |= {
            f"{log.name}/{name}": shown[Path(name).suffix](str(Path(folder, name)))
            for name in log.files
            if Path(name).suffix in shown
        }
        if log.pictures:
            columns = log.columns(library.Image)
            rows = list(map(list, zip(*columns.values(), strict=True)))
            values[f"{log.name}/pictures"] = library.Table(columns=list(columns), data=rows)
        run.log(values, step=step)
        if log.files:
            artifact = library.Artifact(f"camkit-{log.name}", "report")
            artifact.add_dir(folder)
            run.log_artifact(artifact)


@contextlib.contextmanager
def _folder_of(log: Log) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, contents in log.files.items():
            Path(folder, name).write_bytes(contents)
        yield folder


def to_tensorboard(_: Any, log: Log, step: int | None, writer: SummaryWriter | str | Path | None = None) -> None:
    """Log with TensorBoard, which holds no files: it gets the Markdown as text, and the pictures."""
    folder = f"runs/camkit-{log.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with opened(folder if writer is None else writer) as events, naming_the_folder(events):
        for tag, value in log.values.items():
            if isinstance(value, str):
                events.add_text(tag, value, step)
            else:
                events.add_scalar(tag, value, step)
        if log.settings:
            events.add_text(f"{log.name}/settings", markdown_of(log.settings), step)
        for name, contents in log.files.items():
            if name.endswith(".md"):
                events.add_text(log.name, contents.decode(), step)
            elif name.endswith(".png"):
                add_picture(events, f"{log.name}/{name}", np.asarray(Image.open(io.BytesIO(contents))), step)
        for tag, row in log.pictures:
            drawn = {name: cell for name, cell in row.items() if isinstance(cell, np.ndarray)}
            for name, pixels in drawn.items():
                add_picture(events, f"{tag}/{name}" if len(drawn) > 1 else tag, pixels, step)
            events.add_text(tag, markdown_of({name: cell for name, cell in row.items() if name not in drawn}), step)


def markdown_of(fields: Mapping[str, Any]) -> str:
    """Return names and values as a table in Markdown."""
    lines = [f"| {name} | {as_markdown(str(value))} |" for name, value in fields.items()]
    return "\n".join(["| field | value |", "| --- | --- |", *lines])


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


class Tracker(NamedTuple):
    """A tracker: the function that logs, the module that it gets, and the package that has the module."""

    log: Callable[[Any, Log, int | None], None]
    module: str
    package: str


TRACKERS: dict[str, Tracker] = {
    "mlflow": Tracker(to_mlflow, "mlflow", "mlflow"),
    "wandb": Tracker(to_wandb, "wandb", "wandb"),
    "trackio": Tracker(to_trackio, "trackio", "trackio"),
    "tensorboard": Tracker(to_tensorboard, "torch.utils.tensorboard", "tensorboard"),
}
"""Every tracker, by the name that ``log_to`` takes."""


def find_tracker(name: str) -> Callable[[Log, int | None], None]:
    """Return the function that logs with a tracker, whose library it imports.

    Raises:
        InputError: the tracker is unknown, or its library is not installed.
    """
    if name not in TRACKERS:
        known = f"the trackers are {', '.join(TRACKERS)}"
        raise InputError(f"camkit cannot log to {name!r}; {known}{did_you_mean(name, TRACKERS)}")
    log, module, package = TRACKERS[name]
    library = optional(module, f"logging to {name} needs the package {package}: pip install {package}")

    def write(result: Log, step: int | None) -> None:
        refused = as_error(OutputError, lambda error: f"{name} did not take the results: {brief(error)}")
        with refused, contextlib.redirect_stdout(sys.stderr):  # what libraries print is no result
            log(library, result, step)

    return write
