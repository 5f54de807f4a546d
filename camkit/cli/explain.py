"""``camkit PICTURES``: explains pictures, and prints each row when it is finished: as text, JSON lines or CSV."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from rich.text import Text

import camkit
from camkit.cli.options import (
    TARGET,
    Common,
    Ray,
    Source,
    actors_of,
    command,
    events_into,
    need_pictures,
    numbers,
    refuse_existing,
)
from camkit.cli.terminal import TALK, QuietConsole, emit, printer, say
from camkit.errors import CamkitError, InputError, OutputError, as_cell, printable
from camkit.options import Explain, Precision, Results

if TYPE_CHECKING:
    import numpy as np
    import torch

    from camkit.images.listing import Pictures
    from camkit.scale.folder import Result, Run
    from camkit.scale.job import Job, Written
    from camkit.targets import Target, TargetLike, TopTarget
    from camkit.types import Failure, Preprocess


Part: TypeAlias = Literal["left", "top", "right", "bottom", "objectness", "mask"]


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What to explain; without any option, each picture's best class.

    Attributes:
        target: The class to explain: its label, or its index if no label is that number; repeat the option for several.
            Default: the best class.
        top_k: Explain the K best classes, or boxes, of each picture.
        above: Explain every class of a multi-label model whose probability (sigmoid) is above this.
        true: The true class of the picture; for --style slide.
        versus: Explain the target rather than this class.
        direction: Explain what raises or lowers one number of the output (one-logit model, regression).
        threshold: Explain all boxes of a detector whose score is above this, from 0 to 1; the default for detectors
            loaded by name, with 0.5.
        box: Explain the detector's box with this number; numbers start at 0.
        box_at: Explain the detector's box around this point x,y, in pixels of the picture.
        near: Explain the box that overlaps most with left,top,right,bottom, in pixels of the model's input.
        region: Explain the mean of a map of numbers, such as depth, in left,top,right,bottom, in pixels of the picture;
            --direction down explains what lowers it.
        part: Explain where one side of the box lies, its objectness or its mask, in place of the score of its class.
        point: Explain the mask of what lies at this point x,y, in pixels of the picture, for networks such as SAM.
        box_prompt: Explain the mask of what lies in left,top,right,bottom, in pixels of the picture, for networks such
            as SAM.
        mask: Explain the target of a segmentation network inside the object of this mask picture.
        everywhere: Explain the target of a segmentation network everywhere, not only where it is predicted.
        similar_to: Explain what makes the embedding similar to that of this picture.
    """

    target: Annotated[list[str] | None, Parameter(alias="-t", negative=(), metavar="CLASS")] = None
    top_k: Annotated[int | None, Parameter(alias="-k", metavar="K")] = None
    above: Annotated[float | None, Parameter(metavar="SHARE")] = None
    true: Annotated[str | None, Parameter(metavar="CLASS")] = None
    versus: Annotated[str | None, Parameter(metavar="CLASS")] = None
    direction: Literal["up", "down"] | None = None
    threshold: Annotated[float | None, Parameter(metavar="SCORE")] = None
    box: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    box_at: Annotated[str | None, Parameter(metavar="X,Y")] = None
    near: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    region: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    part: Part | None = None
    point: Annotated[str | None, Parameter(metavar="X,Y")] = None
    box_prompt: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    mask: Annotated[Path | None, Parameter(metavar="FILE")] = None
    everywhere: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    similar_to: Annotated[Path | None, Parameter(metavar="FILE")] = None

    def targets(self, pictures: Sequence[Path] = (), preprocess: Preprocess | None = None) -> list[TargetLike] | None:
        """Return the targets; None for each picture's best class, or for all boxes of a detector.

        Args:
            pictures: the pictures to explain; a mask belongs to a single one. Without any, the mask is not read.
            preprocess: the model's preprocessing, which crops the mask as it crops the picture.

        Raises:
            InputError: an option is wrong, two exclude each other, one needs another, or the mask does not fit.
        """
        names = self.target or []
        kinds = [f"--{name.replace('_', '-')}" for name in _ALONE if getattr(self, name) is not None]
        if self.region is not None and self.direction is not None:
            kinds.remove("--direction")
        # Options that refine one --target
        refinements = [
            f"--{name}" for name in ("versus", "mask", "everywhere") if getattr(self, name) not in (None, False)
        ]
        directed = ["--direction"] * (self.direction is not None)
        of_class = ["--target"] * bool(names and kinds != directed)
        for together in ([*kinds, *of_class], [*refinements, *directed]):
            if len(together) > 1:
                raise InputError(f"{' and '.join(together)} cannot be combined")
        if self.part is not None and not names and not {"--box", "--box-at", "--near"} & set(kinds):
            raise InputError("--part is a part of one box; name the box with --box, --box-at, --near or --target")
        if refinements and len(names) != 1:
            raise InputError(f"{refinements[0]} needs one --target")
        for option, make in _ALONE.items():
            if getattr(self, option) is not None:
                made = make(self)
                return list(made) if isinstance(made, list) else [made]
        mask = _mask_on_input(self.mask, pictures, preprocess) if self.mask is not None and pictures else None
        return [self._class_target(name, mask) for name in names] or None

    def _numbers(self, name: str) -> tuple[float, ...]:
        """Return the numbers in an option; none if it is not given."""
        text, form, option = getattr(self, name), _FORMS[name], name.replace("_", "-")
        found = () if text is None else numbers(option, text)
        if len(found) not in (0, len(form.split(","))):
            raise InputError(f"--{option} takes {form}, not {text!r}")
        return found

    def _direction_target(self) -> Target:
        """Return a target for one number of the output, by default the first."""
        indices = self.target or ["0"]
        if len(indices) > 1 or not indices[0].isdecimal():
            raise InputError("--direction explains one number of the output, so --target takes one index")
        return camkit.targets.direction("+" if self.direction == "up" else "-", int(indices[0]))

    def _class_target(self, name: str, mask: np.ndarray | None) -> TargetLike:
        if self.part is not None:
            return camkit.targets.best_box(name, part=self.part)
        if self.versus is not None:
            return camkit.targets.contrast(name, self.versus)
        segments = mask is not None or self.everywhere
        return camkit.targets.segment(name, mask, everywhere=self.everywhere) if segments else name


_ALONE: dict[str, Callable[[TargetOptions], TargetLike | list[TopTarget]]] = {
    "top_k": lambda options: camkit.targets.top(options.top_k or 0),
    "above": lambda options: camkit.targets.above(options.above or 0),
    "region": lambda options: camkit.targets.region(
        *options._numbers("region"), sign="-" if options.direction == "down" else "+"
    ),
    "direction": TargetOptions._direction_target,
    "threshold": lambda options: camkit.targets.boxes(options.threshold or 0),
    "box": lambda options: camkit.targets.box(options.box, part=options.part),
    "box_at": lambda options: camkit.targets.box_at(*options._numbers("box_at"), part=options.part),
    "point": lambda options: camkit.targets.mask_at(*options._numbers("point")),
    "box_prompt": lambda options: camkit.targets.mask_in(*options._numbers("box_prompt")),
    "near": lambda options: camkit.targets.box(near=options._numbers("near"), part=options.part),
    "similar_to": lambda options: camkit.targets.similar_to(options.similar_to),
}
"""What each option that chooses another kind of target makes; they exclude each other."""

_FORMS = {
    **dict.fromkeys(("near", "region", "box_prompt"), "left,top,right,bottom"),
    **dict.fromkeys(("box_at", "point"), "x,y"),
}
"""The numbers in an option."""


def _mask_on_input(file: Path, pictures: Sequence[Path], preprocess: Preprocess | None) -> np.ndarray:
    """Return a mask (h, w) over the model's input, resized and cropped in the same way as its picture."""
    from camkit.images.masks import MaskFile, understand_masks
    from camkit.images.prepare import prepare
    from camkit.images.read import open_picture
    from camkit.images.regions import check_crop, preprocess_region

    if len(pictures) != 1 or preprocess is None:
        raise InputError("--mask is for one picture; explain that picture alone")
    picture = open_picture(pictures[0])
    mask = MaskFile(file, understand_masks([file])).region(picture.size)
    check_crop(preprocess, picture, prepare(picture, preprocess, str(pictures[0])).tensor)
    # A pixel of the model's input belongs to the mask if more than this share of it does
    inside = preprocess_region(mask, preprocess) > 0.5
    if not bool(inside.any()):
        raise InputError(f"the object in {file} lies outside the part of the picture that the model sees")
    return inside.numpy()


Form: TypeAlias = Literal["text", "json", "csv"]
"""How rows are printed."""

_MOST_WITHOUT_BAR = 3
"""Up to this many pictures are explained before a progress bar would be read."""


class _Tally:
    """What has been printed so far.

    Attributes:
        code: the exit code.
        pictures: how many are "explained" or have "failed", and how many maps are "empty". A picture
            with both explanations and errors counts as explained; "images" counts the frames of videos too.
        errors: how many pictures have the same error, without their names.
        first: the first picture with each error.
    """

    def __init__(self) -> None:
        self.code = 0
        self.pictures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self._picture, self._is_explained = "", False  # of the last row

    def add(self, row: Result) -> bool:
        """Count a row; return whether it is an error that an earlier picture had too."""
        from camkit.types import Failure

        if row.source != self._picture:  # the rows of a picture follow each other
            self._picture, self._is_explained = row.source, False
            self.pictures["failed"] += 1  # until one of its rows explains it
        if isinstance(row, Failure):
            self.code = max(self.code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
            error = _without_name(row)
            self.errors[error] += 1
            self.first.setdefault(error, row.source)
            return self.errors[error] > 1
        if not self._is_explained:
            self._is_explained = True
            frames = 1 if row.video is None else row.video["frames"]
            self.pictures.update(explained=1, failed=-1, images=frames)
        if row.video is not None and "error" in row.video:
            self.code = max(self.code, InputError.exit_code)
        self.pictures["empty"] += row.status != "ok"
        return False

    @property
    def finished(self) -> int:
        """The number of pictures that are finished."""
        return self.pictures["explained"] + self.pictures["failed"]


class Progress:
    """Shows how many pictures are finished and the time left: as a bar on a terminal, elsewhere as a line each minute.

    A thread counts the pictures meanwhile, since listing a large folder takes a while. A second bar shows the many
    passes that some methods need for one picture.
    """

    def __init__(self, pictures: Pictures, *, with_lines: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = QuietConsole(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        shown = console.is_terminal and not TALK.quiet
        self._bars = Bars(*columns, console=console, transient=True, disable=not shown)
        self._has_lines = with_lines and not shown and not TALK.quiet
        is_long = (shown or self._has_lines) and len(pictures.first(_MOST_WITHOUT_BAR + 1)) > _MOST_WITHOUT_BAR
        self._bar = self._bars.add_task("pictures", total=None, visible=is_long)
        self._passes = self._bars.add_task("changed pictures", total=None, visible=False)
        self._count = lambda: self._bars.update(self._bar, total=pictures.count())
        self._printed = time.perf_counter()

    def __enter__(self) -> Progress:
        """Begin to show it."""
        if self._bars.tasks[self._bar].visible:
            threading.Thread(target=self._count, daemon=True).start()
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bars."""
        self._bars.stop()

    def show_passes(self, done: int, of: int) -> None:
        """Show how many changed pictures the model has seen."""
        self._bars.start()
        if not done:
            self._bars.reset(self._passes, total=of)
        self._bars.update(self._passes, completed=done, visible=done < of, refresh=not done)

    def update(self, finished: int) -> None:
        """Show how many pictures are finished."""
        self._bars.update(self._bar, completed=finished)
        # Where there is no terminal for a bar, a line on the progress of a long run is printed this often
        if self._has_lines and time.perf_counter() - self._printed > 60.0:
            self._printed, total = time.perf_counter(), self._bars.tasks[self._bar].total
            say(f"{finished:,} pictures" + ("" if total is None else f" of {total:,.0f}"))


def report(rows: Run, job: Job, form: Form, progress: Progress, events: Any, *, with_raw: bool = False) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code.

    If the rows go into a table, only errors are printed as text. An error that several pictures have is printed once
    and counted below the rows. A summary follows.

    Args:
        rows: the rows of the job.
        job: the job.
        form: how rows are printed.
        progress: shows how far it is.
        events: the writer of TensorBoard's events, or None. A failure to write them is raised after the last row.
        with_raw: whether JSON has the raw maps.
    """
    from camkit.explaining.explanation import FIELDS
    from camkit.types import Failure

    tally, table, start = _Tally(), job.results.table, time.perf_counter()
    columns = [*(each.name for each in FIELDS), "scale", "file", "error"]
    if form == "csv":
        emit(",".join(columns))
    with_rows = TALK.verbose or (table is None and not TALK.quiet)
    unwritten: OutputError | None = None
    try:
        with rows, progress:
            for row in rows:
                is_repeated = tally.add(row)
                if events is not None and unwritten is None and not isinstance(row, Failure) and row.video is None:
                    unwritten = _event_of(row, events)
                if form == "json":
                    values = {name: value for name, value in row.to_dict().items() if with_raw or name != "raw"}
                    emit(json.dumps(values, allow_nan=False))  # in ASCII, so that any terminal and pipe can carry it
                elif form == "csv":
                    emit(_csv_line(row.to_dict(), columns))
                elif not isinstance(row, Failure):
                    if with_rows:
                        printer().print(_lines_of(row))
                elif TALK.verbose or not is_repeated:
                    said = (printable(f"error: {row.error}"), "red")
                    printer(stderr=True).print(Text.assemble((printable(row.source), "bold"), "  ", said))
                progress.update(tally.finished + rows.skipped)
    except KeyboardInterrupt as error:
        done = tally.finished + rows.skipped
        further = "--resume continues with the others" if table else "only a run with --table can be continued"
        raise KeyboardInterrupt(f"{done} picture{'s are' if done != 1 else ' is'} finished; {further}") from error
    line = _summary(tally, job, rows, time.perf_counter() - start, alike=form == "text" and not TALK.verbose)
    if form != "text":
        say(line)
    elif not TALK.quiet:
        printer().print(line, markup=False)
    if unwritten is not None:
        raise unwritten
    return tally.code


def _event_of(row: Written, events: Any) -> OutputError | None:
    """Write an explanation as an event; return the error if that fails."""
    from camkit.tensorboard import write_explanation

    try:
        write_explanation(row.explanation, events, tag=f"explain/{row.name.with_suffix('').as_posix()}", **row.drawing)
    except OutputError as error:
        return error
    return None


def _summary(tally: _Tally, job: Job, rows: Run, seconds: float, *, alike: bool) -> str:
    """Return the last line of a run, after notes on drawings and, if ``alike``, on errors that were printed once."""
    for failure, count in tally.errors.items():
        if count > 1 and alike:
            more = "1 more picture has" if count == 2 else f"{count - 1} more pictures have"
            first = printable(Path(tally.first[failure]).name)
            printer(stderr=True).print(Text(f"{more} the same error as {first}; --verbose lists them", "red"))
    found = tally.pictures
    line = f"{found['explained']} explained, {found['failed']} failed, {found['empty']} empty"
    if found["images"]:
        line += f"; {found['images'] / max(seconds, 1e-9):.3g} pictures a second"
    if rows.skipped:
        line += f"; {rows.skipped} finished in an earlier run"
    if rows.failed_before:
        line += f", {rows.failed_before} of them with an error (not tried again)"
    if job.results.table is not None:
        line += f"; wrote {printable(str(job.results.table))}"
    return line


def _without_name(failed: Failure) -> str:
    """Return an error without its picture's name, so that the same error of two pictures is the same text.

    A drawing that cannot be written has a name of its own in its error; the reason is the same for all on a full disk.
    """
    reason = failed.error.__cause__
    if isinstance(failed.error, OutputError) and isinstance(reason, OSError):
        return f"cannot write: {reason.strerror or reason}"
    error = str(failed.error)
    for name in (failed.source, Path(failed.source).name):
        error = error.replace(name, "")
    return error


def _csv_line(values: dict[str, Any], columns: Sequence[str]) -> str:
    """Return the values of a row as a CSV for people holds them; several numbers are separated by spaces."""
    from camkit.images.files import csv_line

    cells = (" ".join(map(str, value)) if isinstance(value, list) else value for value in map(values.get, columns))
    texts = (as_cell(printable(cell)) if isinstance(cell, str) else cell for cell in cells)
    return csv_line(texts).decode().removesuffix("\n")


_NOTES = {
    "no_positive_evidence": "no positive evidence: nothing in the picture speaks for this target at this layer",
    "no_influence": (
        "no influence: the target's gradient is zero at this layer. Either the target does not depend on the layer, or "
        "it is saturated (a probability very close to 0 or 1). Choose another layer, or a target that uses the logits"
    ),
    "non_finite": "the map contains NaN or infinity, so no heat is drawn",
}


_UNKNOWN_CROP = "drawn on the model's input: camkit cannot tell which part of the picture the preprocessing shows"


_MOST_LABELS = 3
"""Labels that the lines for a video name."""


def _lines_of(written: Written) -> Text:
    """Return the lines for one picture and target, or for one video."""
    from camkit.drawing.figure import percent
    from camkit.kit.wording import counted

    explanation, video = written.explanation, written.video
    if video is None:
        about, found = "  ", explanation.name
        found += "" if explanation.probability is None else f" {percent(explanation.probability)}"
    else:
        labels = [f"{label} in {count}" for label, count in list(video["labels"].items())[:_MOST_LABELS]]
        about = f"  {counted(video['frames'], 'frame')}, {video['rate']:.3g} per second: "
        found = ", ".join(labels) + (", ..." if len(video["labels"]) > _MOST_LABELS else "")
    layer = f"{explanation.layer} ({explanation.layer_reason})"
    text = Text.assemble(
        (printable(written.source), "bold"), about, (printable(found), "green"), f"  layer {printable(layer)}\n"
    )
    if video is None and explanation.box is None and explanation.heatmap.ndim == 2:
        text.append(f"  {_UNKNOWN_CROP}\n", "yellow")
    if video is None and explanation.doubt:
        text.append(f"  {explanation.doubt}\n", "yellow")
    if written.status in _NOTES:
        text.append(f"  {_NOTES[written.status]}\n", "yellow")
    elif written.file is not None:
        scale = "on each frame's own scale" if written.scale is None else f"from {written.scale}"
        text.append(f"  colours {scale}\n")
    if video is not None and "error" in video:
        text.append(f"  {printable(video['error'])}; the frames before that are drawn\n", "red")
    sheet = f" and {printable(video['sheet'])}" if video is not None and "sheet" in video else ""
    return text.append(f"  wrote {printable(str(written.file))}{sheet}" if written.file is not None else "  not drawn")


def _check(results: Results) -> None:
    """Check that the options fit together.

    Raises:
        InputError: two exclude each other, or one needs another.
    """
    tabled, bundled = results.table is not None, results.bundle is not None
    problems = {
        "--json and --csv cannot be combined": results.json and results.csv,
        "--raw adds the raw maps to the JSON, so it needs --json": results.raw and not results.json,
        "--no-pictures writes only the table, so it needs --table or --bundle": (
            results.no_pictures and not (tabled or bundled)
        ),
        "--bundle cannot be resumed; leave out --resume": results.resume and bundled,
        "--resume continues a table, so it needs --table": results.resume and not tabled,
    }
    for problem in filter(problems.get, problems):
        raise InputError(problem)


@command
def explain(
    *pictures: str,
    source: Source,
    targets: TargetOptions = TargetOptions(),
    how: Explain = Explain(),
    results: Results = Results(),
    ray: Ray = False,
    common: Common = Common(),
) -> int:
    """Explain pictures: what the model sees in each, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
    """
    common.begin()
    _check(results)
    need_pictures(pictures, "image.jpg")
    from camkit.images.files import refuse_input
    from camkit.images.listing import Pictures
    from camkit.methods import find_method
    from camkit.models import device_of
    from camkit.scale.folder import explain_files
    from camkit.scale.job import Job, check_drawing

    if how.method is not None and ":" not in (source.name or ""):  # mine.py:build may register methods
        find_method(how.method)
    if how.style == "slide":
        _refuse_beside_slide(targets, how, results, ray=ray)
        return _slide(pictures, source, targets, how)
    if targets.true is not None:
        raise InputError("--true is for --style slide")
    check_drawing(how)
    targets.targets()  # checks them before the model is loaded
    for written in (how.out, results.table):
        if written is not None:
            refuse_input(written, [targets.mask, targets.similar_to, *source.files()])
    files = Pictures(pictures, skip=how.out, recursive=how.recursive)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        loaded = source.load()
        cluster = None if pool is None else source.on_cluster(pool, loaded)
        device = device_of(loaded.module) if pool is None else pool.device
        progress = Progress(files, with_lines=results.table is not None and not TALK.verbose)
        boxes = [camkit.targets.boxes()] if loaded.detects else None
        target = targets.targets(files.first(2), loaded.preprocess) or boxes
        how = replace(how, precision=_precision(how, device))
        job = Job(files, how, results, target, progress.show_passes)
        rows = explain_files(loaded, job, elsewhere=None if cluster is None else cluster.explain)
        events = stack.enter_context(events_into(results.tensorboard))
        form: Form = "json" if results.json else "csv" if results.csv else "text"
        code = report(rows, job, form, progress, events, with_raw=results.raw)
        if rows.videos and (results.bundle or results.tensorboard):
            say("--bundle and --tensorboard leave out videos and animated pictures")
        return code


def _precision(given: Explain, device: torch.device) -> Precision:
    """Return the precision with which a device computes, and say if it is another one."""
    from camkit.engine.passes import usable_precision

    precision, note = usable_precision(given.precision, device)
    if note:
        say(note)
    return precision


_OF_SLIDES = {"true", "target", "method", "references", "precision", "recursive", "out", "overwrite", "style"}
"""The options for a slide, besides those of the model."""


def _refuse_beside_slide(*tables: Any, ray: bool | str) -> None:
    """Refuse the options that a slide does not use."""
    from camkit.kit.wording import listed

    names = [field.name for table in tables for field in fields(table) if getattr(table, field.name) != field.default]
    unused = [name for name in [*names, *(["ray"] if ray else [])] if name not in _OF_SLIDES]
    if unused:
        options = listed([f"--{name.replace('_', '-')}" for name in unused])
        raise InputError(f"--style slide does not use {options}; leave out what it does not use, in the config too")


def _slide(pictures: Sequence[str], source: Source, targets: TargetOptions, how: Explain) -> int:
    """Draw one slide of one picture."""
    from camkit.images.files import refuse_input, refuse_other_file, write_picture
    from camkit.images.listing import Pictures
    from camkit.models import device_of
    from camkit.scale.job import free_file, slug

    files = Pictures(pictures, skip=how.out, recursive=how.recursive).first(2)
    if len(files) != 1:
        raise InputError("a slide shows one picture; name one file")
    is_page = how.out.suffix in (".pdf", ".svg")
    if is_page:
        file = how.out
        refuse_existing(file, "--out", overwrite=how.overwrite)
    else:
        refuse_other_file(how.out)
        words = ["slide", *map(slug, [*([targets.true] if targets.true else []), *(targets.target or [])])]
        file = free_file(how.out, Path(files[0].stem), words, overwrite=how.overwrite)
    refuse_input(file, [*files, *source.files()])
    loaded = source.load()
    options = {"references": how.references, "precision": _precision(how, device_of(loaded.module))}
    made = camkit.slide(loaded, files[0], targets.true, target=targets.target, method=how.method, **options)
    if is_page:
        made.save(file)
    else:
        write_picture(file, made.draw())
    if not TALK.quiet:
        emit(printable(made.sentence))
        emit(printable(f"  wrote {file}"))
    return 0
