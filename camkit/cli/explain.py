"""The work of ``camkit PICTURES``, which prints each row when it is finished, and what other commands share with it."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

import camkit
from camkit.cli.options import TargetOptions
from camkit.cli.terminal import TALK, QuietConsole, emit, fail, printer, say, stages
from camkit.drawing import overlay
from camkit.drawing.figure import percent
from camkit.engine.passes import usable_precision
from camkit.errors import CamkitError, InputError, OutputError, as_cell, printable, refuse
from camkit.explaining.explainer import loading
from camkit.explaining.explanation import FIELDS
from camkit.images.files import check_folder, csv_line, refuse_input, refuse_other_file
from camkit.images.listing import Pictures
from camkit.images.masks import MaskFile, understand_masks
from camkit.images.prepare import prepare
from camkit.images.read import open_picture
from camkit.images.regions import check_crop, preprocess_region
from camkit.kit.picture_names import picture_name
from camkit.kit.store import fingerprint
from camkit.kit.wording import counted, listed, share
from camkit.methods import find_method
from camkit.models import device_of, load_model
from camkit.models.loaded import LoadedModel
from camkit.options import Against, Explain, Model, Precision, Results
from camkit.scale.cluster import Cluster, Pool, connected
from camkit.scale.folder import Result, Run
from camkit.scale.job import Job, Written, free_file, slug
from camkit.trackers import Log, find_tracker, opened
from camkit.types import Failure, Preprocess

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def load(source: Model, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
    """Load the model that the options name, and say what the user should know about it."""
    given = {**loading(source), "pretrained": pretrained, "trainable": trainable}
    loaded = load_model(source.name or "", device=source.device, **given)
    if loaded.note:
        say(loaded.note)
    if TALK.verbose:
        parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
        say(f"{loaded.name}: {parameters:,} parameters on {device_of(loaded.module)}", "dim")
    return loaded


@contextlib.contextmanager
def actors_of(ray: bool | str) -> Iterator[Pool | None]:
    """Connect to the cluster that ``--ray`` names, and yield the actors that it has room for; None without ``--ray``.

    Raises:
        InputError: Ray is not installed, no cluster answers, or it has no room.
    """
    if ray is False:
        yield None
        return
    with connected(None if ray is True else ray, quiet=not TALK.verbose):
        pool = Pool.of_cluster()
        say(str(pool))
        yield pool


def on_cluster(source: Model, pool: Pool, loaded: LoadedModel) -> Cluster:
    """Return actors that load the model; ``loaded`` is the same model in this process."""
    make = functools.partial(load_model, source.name or "", **loading(source))
    return Cluster(pool, make, fingerprint(loaded), source.device)


@contextlib.contextmanager
def events_into(folder: Path | None) -> Iterator[SummaryWriter | None]:
    """Open a writer of TensorBoard event files before anything is computed; yield None if there is no folder."""
    usual_hook = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        """Pass on all but what TensorBoard's own thread fails to write: closing the events reports that."""
        is_writer = type(failed.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(failed.exc_value, OSError)):
            usual_hook(failed)

    writer = contextlib.nullcontext() if folder is None else opened(folder)
    with mock.patch.object(threading, "excepthook", hook), writer as events:
        yield events


def need_pictures(pictures: Sequence[object], example: str) -> None:
    """Refuse a command without pictures.

    Raises:
        InputError: there is none.
    """
    if not pictures:
        raise InputError(f"name at least one picture: camkit {example} --model resnet50")


def refuse_existing(file: Path, another: str, *, overwrite: bool) -> None:
    """Refuse to replace a file without ``--overwrite``.

    Raises:
        OutputError: it exists, and may not be replaced.
    """
    if file.exists() and not overwrite:
        raise OutputError(f"{file} exists already; name another {another}, or pass --overwrite")


def mask_on_input(file: Path, pictures: Sequence[Path], preprocess: Preprocess | None) -> np.ndarray:
    """Return a mask (h, w) over the model's input, resized and cropped in the same way as its picture.

    Raises:
        InputError: there are several pictures, or the mask does not fit.
    """
    if len(pictures) != 1 or preprocess is None:
        raise InputError("--mask is for one picture; explain that picture alone")
    picture = open_picture(pictures[0])
    mask = MaskFile(file, understand_masks([file])).region(picture.size)
    check_crop(preprocess, picture, prepare(picture, preprocess, str(pictures[0])).tensor)
    # A pixel of the model's input belongs to the mask if more than this share of it does
    inside = preprocess_region(mask, preprocess) > 0.5
    if not inside.any():
        raise InputError(f"the object in {file} lies outside the part of the picture that the model sees")
    return inside.numpy()


class Progress:
    """Shows how many pictures are finished and the time left: as a bar on a terminal, elsewhere as a line each minute.

    A thread counts the pictures meanwhile, since listing a large folder takes a while. A second bar shows the many
    passes that some methods need for one picture.
    """

    def __init__(self, pictures: Pictures, *, with_lines: bool) -> None:
        console = QuietConsole(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        shown = console.is_terminal and not TALK.quiet
        self._bars = Bars(*columns, console=console, transient=True, disable=not shown)
        self._has_lines = with_lines and not shown and not TALK.quiet
        # Three pictures are explained before a progress bar would be read
        is_long = (shown or self._has_lines) and len(pictures.first(4)) > 3
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


def _report(rows: Run, job: Job, progress: Progress, events: Any, logged: list[tuple[str, dict[str, Any]]]) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code.

    With ``--log-to``, the first rows are added to ``logged``, each with its tag; those of videos are left out. If the
    rows go into a table, only errors are printed as text. An error that several pictures have is printed once and
    counted below the rows. A summary follows. A failure to write TensorBoard's events is raised after it.
    """
    results, start, code = job.results, time.perf_counter(), 0
    found: Counter[str] = Counter()  # "images" counts the frames of videos too
    errors: dict[str, tuple[str, int]] = {}  # for each error, the first picture with it, and how many have it
    last = explained = ""  # the rows of a picture follow each other
    unwritten: OutputError | None = None
    if results.csv:
        emit(",".join(_COLUMNS))
    try:
        with rows, progress:
            for row in rows:
                found["finished"] += row.source != last
                last, is_repeated = row.source, False
                if isinstance(row, Failure):
                    code = max(code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
                    error = _without_name(row)
                    first, count = errors.get(error, (row.source, 0))
                    errors[error], is_repeated = (first, count + 1), count > 0
                else:
                    if row.source != explained:
                        explained = row.source
                        found.update(explained=1, images=1 if row.video is None else row.video["frames"])
                    found["empty"] += row.status != "ok"
                    if row.video is None:
                        tag = f"explain/{row.name.with_suffix('').as_posix()}"
                        if results.log_to and len(logged) < 200:  # the help names this number
                            logged.append((tag, row.explanation.logged(**row.drawing)))
                        try:
                            if events is not None and unwritten is None:
                                camkit.tensorboard.write_explanation(row.explanation, events, tag=tag, **row.drawing)
                        except OutputError as error:
                            unwritten = error
                    elif "error" in row.video:
                        code = max(code, InputError.exit_code)
                _print(row, results, is_repeated=is_repeated)
                progress.update(found["finished"] + rows.skipped)
    except KeyboardInterrupt as error:
        further = "--resume continues with the others" if results.table else "only a run with --table can be continued"
        finished = found["finished"] + rows.skipped
        many = f"{finished} picture{'s are' if finished != 1 else ' is'} finished"
        raise KeyboardInterrupt(f"{many}; {further}") from error
    _summarise(found, errors, job, rows, time.perf_counter() - start)
    if unwritten is not None:
        raise unwritten
    return code


_COLUMNS = [*(each.name for each in FIELDS), "scale", "file", "error"]
"""The columns of a row that is printed as CSV."""


def _print(row: Result, results: Results, *, is_repeated: bool) -> None:
    if results.json:
        values = {name: value for name, value in row.to_dict().items() if results.raw or name != "raw"}
        emit(json.dumps(values, allow_nan=False))  # in ASCII, so that any terminal and pipe can carry it
    elif results.csv:
        # Several numbers are separated by spaces
        cells = map(row.to_dict().get, _COLUMNS)
        texts = (" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells)
        safe = (as_cell(printable(text)) if isinstance(text, str) else text for text in texts)
        emit(csv_line(safe).decode().removesuffix("\n"))
    elif not isinstance(row, Failure):
        if TALK.verbose or (results.table is None and not TALK.quiet):
            printer().print(_lines_of(row))
    elif TALK.verbose or not is_repeated:
        said = (printable(f"error: {row.error}"), "red")
        printer(stderr=True).print(Text.assemble((printable(row.source), "bold"), "  ", said))


def _summarise(found: Counter[str], errors: dict[str, tuple[str, int]], job: Job, rows: Run, seconds: float) -> None:
    is_text = not (job.results.json or job.results.csv)
    for first, count in errors.values():
        if count > 1 and is_text and not TALK.verbose:
            many = "1 more picture has" if count == 2 else f"{count - 1} more pictures have"
            note = f"{many} the same error as {printable(Path(first).name)}; --verbose lists them"
            printer(stderr=True).print(Text(note, "red"))
    more = {
        f"; {found['images'] / max(seconds, 1e-9):.3g} pictures a second": found["images"],
        f"; {rows.skipped} finished in an earlier run": rows.skipped,
        f", {rows.failed_before} of them with an error (not tried again)": rows.failed_before,
        f"; wrote {printable(str(job.results.table))}": job.results.table is not None,
    }
    line = f"{found['explained']} explained, {found['finished'] - found['explained']} failed, {found['empty']} empty"
    line += "".join(filter(more.get, more))
    if not is_text:
        say(line)
    elif not TALK.quiet:
        printer().print(line, markup=False)


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


_NOTES = {
    "no_positive_evidence": "no positive evidence: nothing in the picture speaks for this target at this layer",
    "no_influence": (
        "no influence: the target's gradient is zero at this layer. Either the target does not depend on the layer, or "
        "it is saturated (a probability very close to 0 or 1). Choose another layer, or a target that uses the logits"
    ),
    "non_finite": "the map contains NaN or infinity, so no heat is drawn",
}


def _lines_of(written: Written) -> Text:
    """Return the lines for one picture and target, or for one video."""
    explanation, video, file = written.explanation, written.video or {}, written.file
    if not video:
        about, found = "  ", explanation.name
        found += "" if explanation.probability is None else f" {percent(explanation.probability)}"
    else:
        labels = [f"{label} in {count}" for label, count in video["labels"].items()]
        about = f"  {counted(video['frames'], 'frame')}, {video['rate']:.3g} per second: "
        found = ", ".join(labels[:3]) + (", ..." if len(labels) > 3 else "")
    scale = "on each frame's own scale" if written.scale is None else f"from {written.scale}"
    is_on_input = not video and explanation.box is None and explanation.heatmap.ndim == 2
    cannot = "camkit cannot tell which part of the picture the preprocessing shows"
    note = _NOTES.get(written.status, "")
    sheet = f" and {printable(video['sheet'])}" if "sheet" in video else ""
    lines = [
        (f"drawn on the model's input: {cannot}" if is_on_input else "", "yellow"),
        ("" if video else explanation.doubt, "yellow"),
        ((not video and explanation.missed) or "", "yellow"),
        (note, "yellow"),
        (f"colours {scale}" if file is not None and not note else "", ""),
        (f"{printable(video['error'])}; the frames before that are drawn" if "error" in video else "", "red"),
        ("not drawn" if file is None else f"wrote {printable(str(file))}{sheet}", ""),
    ]
    layer = f"  layer {printable(f'{explanation.layer} ({explanation.layer_reason})')}"
    text = Text.assemble((printable(written.source), "bold"), about, (printable(found), "green"), layer)
    return text.append_tokens((f"\n  {line}", style) for line, style in lines if line)


def explain(
    *pictures: str,
    source: Model,
    second: Against,
    targets: TargetOptions,
    how: Explain,
    results: Results,
    ray: bool | str,
) -> int:
    """Explain pictures, and write and print the results."""
    tabled, bundled = results.table is not None, results.bundle is not None
    refuse(
        (results.json and results.csv, "--json and --csv cannot be combined"),
        (results.raw and not results.json, "--raw adds the raw maps to the JSON, so it needs --json"),
        (
            results.no_pictures and not (tabled or bundled),
            "--no-pictures writes only the table, so it needs --table or --bundle",
        ),
        (results.resume and bundled, "--bundle cannot be resumed; leave out --resume"),
        (results.resume and not tabled, "--resume continues a table, so it needs --table"),
    )
    need_pictures(pictures, "image.jpg")
    if how.method is not None and ":" not in (source.name or ""):  # mine.py:build may register methods
        find_method(how.method)
    if second != type(second)():
        used = "layer fuse smooth colormap alpha scale table"
        _refuse_unused("--against", used, targets, how, results, ray=ray)
        return _against(pictures, source, second, targets.target or [], how, results)
    if how.style == "slide":
        _refuse_unused("--style slide", "true style", targets, how, results, ray=ray)
        return _slide(pictures, source, targets, how)
    refuse(
        (targets.true is not None, "--true is for --style slide"),
        (
            how.max_side < 0,
            f"--max-side takes a number of pixels, or 0 to keep the size of the pictures, not {how.max_side}",
        ),
    )
    overlay.check(how.style, how.colormap, how.alpha, how.opacity)
    targets.targets()  # checks them before the model is loaded
    for written in filter(None, (how.out, results.table)):
        refuse_input(written, [targets.mask, targets.similar_to, *source.files()])
    files = Pictures(pictures, skip=how.out, recursive=how.recursive)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        loaded = load(source)
        cluster = None if pool is None else on_cluster(source, pool, loaded)
        device = device_of(loaded.module) if pool is None else pool.device
        progress = Progress(files, with_lines=tabled and not TALK.verbose)
        mask = None if targets.mask is None else mask_on_input(targets.mask, files.first(2), loaded.preprocess)
        boxes = [camkit.targets.boxes()] if loaded.detects else None
        how = replace(how, precision=_precision(how, device))
        job = Job(files, how, results, targets.targets(mask) or boxes, progress.show_passes)
        rows = Run(loaded, job, elsewhere=None if cluster is None else cluster.explain)
        events = stack.enter_context(events_into(results.tensorboard))
        log = None if results.log_to is None else find_tracker(results.log_to)
        logged: list[tuple[str, dict[str, Any]]] = []
        code = _report(rows, job, progress, events, logged)
        if log is not None:
            log(Log("explanations", pictures=logged), None)
        if rows.videos and (bundled or results.tensorboard):
            say("--bundle and --tensorboard leave out videos and animated pictures")
        return code


def _precision(given: Explain, device: torch.device) -> Precision:
    """Return the precision with which a device computes, and say if it is another one."""
    precision, note = usable_precision(given.precision, device)
    if note:
        say(note)
    return precision


def _refuse_unused(option: str, more: str, *tables: Any, ray: bool | str) -> None:
    """Refuse options that neither a slide nor a comparison uses, unless they are among the names in ``more``."""
    used = {"target", "method", "references", "precision", "recursive", "out", "overwrite", *more.split()}
    names = [field.name for table in tables for field in fields(table) if getattr(table, field.name) != field.default]
    unused = [f"--{name.replace('_', '-')}" for name in [*names, *(["ray"] if ray else [])] if name not in used]
    if unused:
        raise InputError(f"{option} does not use {listed(unused)}; leave out what it does not use, in the config too")


def _slide(pictures: Sequence[str], source: Model, targets: TargetOptions, how: Explain) -> int:
    """Draw one slide of one picture."""
    files = Pictures(pictures, skip=how.out, recursive=how.recursive).first(2)
    if len(files) != 1:
        raise InputError("a slide shows one picture; name one file")
    if how.out.suffix in (".pdf", ".svg"):
        file = how.out
        refuse_existing(file, "file with --out", overwrite=how.overwrite)
    else:
        refuse_other_file(how.out)
        words = ["slide", *map(slug, [*([targets.true] if targets.true else []), *(targets.target or [])])]
        file = free_file(how.out, Path(files[0].stem), words, overwrite=how.overwrite)
    refuse_input(file, [*files, *source.files()])
    loaded = load(source)
    options = {"references": how.references, "precision": _precision(how, device_of(loaded.module))}
    made = camkit.slide(loaded, files[0], targets.true, target=targets.target, method=how.method, **options)
    made.save(file)
    if not TALK.quiet:
        emit(printable(made.sentence))
        emit(printable(f"  wrote {file}"))
    return 0


def _against(
    pictures: Sequence[str], source: Model, second: Against, target: Sequence[str], how: Explain, results: Results
) -> int:
    """Compare two models, print the most different pictures, and write their sheet and the table of all."""
    places = {str(path): place for path, place in Pictures(pictures, skip=how.out, recursive=how.recursive)}
    both = source, replace(source, name=second.against or source.name, weights=second.against_weights)
    names = [str((both[0].name == both[1].name and each.weights) or each.name) for each in both]
    table = results.table
    refuse(
        (len(target) > 1, "--against takes only one --target"),
        (table and table.suffix != ".csv", f"with --against, --table takes a file that ends in .csv, not {table}"),
        (table and table.exists() and not how.overwrite, f"{table} exists already; pass --overwrite to replace it"),
    )
    refuse_other_file(how.out)
    words = [*([picture_name(*places.values())] if len(places) == 1 else []), "against", slug(names[1])]
    file = free_file(how.out, Path(words[0]), words[1:], overwrite=how.overwrite)
    refuse_input(file, [*map(Path, places), *source.files()])
    check_folder(file.parent)
    models = [load(each) for each in both]
    options = {name: value for name, value in how.of_maps().items() if name not in ("layer", "draft")}
    options |= {"target_layer": how.layer, "target": target[0] if target else None, "names": names}
    with stages() as progress:
        progress("comparing", 0, len(places))
        options["progress"] = functools.partial(progress, "comparing")
        found = camkit.compare_models(models[0], models[1], list(places), **options)
    if not TALK.quiet:
        emit(printable(f"{names[0][-28:]:<28}  {names[1][-28:]}"))
        for row in found.rows[:20]:
            said = [f"{row[of + 'answer']:<24.24}{share(row[of + 'probability']):>4}" for of in ("", "against_")]
            common = f"{share(row['heat_in_common']):>4} in common"
            emit(printable("  ".join([*said, common, str(places[row["picture"]])])))
        printer().print(printable(repr(found)), markup=False)
    for sentence in found.unreadable.values():
        fail(sentence)
    say(f"wrote {found.save(file, colormap=how.colormap, alpha=how.alpha, scale=how.scale or 'each')}")
    if table is not None:
        say(f"wrote {found.save(table)}")
    return InputError.exit_code if found.unreadable else 0
