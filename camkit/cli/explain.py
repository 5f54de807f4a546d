"""``camkit PICTURES``: explains pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from camkit.cli.options import OUTPUT, Common, Ray, Source, actors_of, command, events_into
from camkit.cli.rows import Form, PassProgress, report
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import TALK, emit, say
from camkit.errors import InputError, OutputError, printable
from camkit.options import Explain

if TYPE_CHECKING:
    import torch

    from camkit.scale.folder import Result, Run
    from camkit.scale.job import Drawing


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where the results go besides the drawings, and how they are printed.

    Attributes:
        table: Write the results to this table, with a row per picture and target and the raw maps. Its name ends in
            .parquet (a folder of parts; needs pyarrow) or .csv.
        no_pictures: Write only the table or the bundle, and no drawings beside it.
        bundle: A folder for the evidence: the overlay, the figure and the raw map of each explanation, and a manifest
            with versions, checksums, layers, methods and scores.
        resume: Continue the table of an interrupted run, and skip the pictures that it has.
        json: Print one JSON object per picture and target instead of text.
        csv: Print a table as CSV instead of text, with a row per picture and target.
        raw: Add the raw maps, in the method's units, to the JSON.
        tensorboard: A folder for TensorBoard event files with the drawn pictures.
    """

    table: Annotated[Path | None, Parameter(metavar="FILE")] = None
    no_pictures: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    bundle: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    resume: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    csv: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    raw: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    tensorboard: Annotated[Path | None, Parameter(metavar="FOLDER")] = None

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            InputError: two exclude each other, or one needs another.
        """
        if self.json and self.csv:
            raise InputError("--json and --csv cannot be combined")
        if self.raw and not self.json:
            raise InputError("--raw adds the raw maps to the JSON, so it needs --json")
        if self.no_pictures and self.table is None and self.bundle is None:
            raise InputError("--no-pictures writes only the table, so it needs --table or --bundle")
        if self.resume and self.bundle is not None:
            raise InputError("--bundle cannot be resumed; leave out --resume")
        if self.resume and self.table is None:
            raise InputError("--resume continues a table, so it needs --table")


@command
def explain(
    *pictures: str,
    source: Source,
    targets: TargetOptions = TargetOptions(),
    how: Explain = Explain(),
    results: ResultOptions = ResultOptions(),
    ray: Ray = False,
    common: Common = Common(),
) -> int:
    """Explain pictures: what the model sees in each, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
    """
    common.begin()
    results.check()
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.images.files import refuse_input
    from camkit.images.listing import Pictures
    from camkit.methods import find_method
    from camkit.models import device_of
    from camkit.scale.folder import Run, explain_files
    from camkit.scale.job import Job

    if how.method is not None and ":" not in (source.name or ""):  # mine.py:build may register methods
        find_method(how.method)
    if how.style == "slide":
        _refuse_beside_slide(targets, how, results, ray=ray)
        return _slide(pictures, source, targets, how)
    if targets.true is not None:
        raise InputError("--true is for --style slide")
    drawn = _drawing(how)
    targets.check()
    for written in (how.out, results.table):
        if written is not None:
            refuse_input(written, [targets.mask, targets.similar_to, *source.files()])
    files = Pictures(pictures, skip=how.out, recursive=how.recursive)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        loaded = source.load()
        cluster = None if pool is None else source.on_cluster(pool, loaded)
        device = device_of(loaded.module) if pool is None else pool.device
        passes = PassProgress()
        job = Job(
            files,
            None if results.no_pictures else how.out,
            {**_how(how, device), "target": targets.targets(files.first(2), loaded.preprocess, detects=loaded.detects)},
            drawn,
            overwrite=how.overwrite,
            every=how.every,
            table=results.table,
            bundle=results.bundle,
            resume=results.resume,
            progress=passes,
        )
        rows = explain_files(loaded, job, elsewhere=None if cluster is None else cluster.explain)
        events = stack.enter_context(events_into(results.tensorboard))
        rows = rows if events is None else Run(_with_events(rows, events), rows.stills)
        form: Form = "json" if results.json else "csv" if results.csv else "text"
        code = report(rows, job, form, passes, with_raw=results.raw)
        if rows.stills.videos and (results.bundle or results.tensorboard):
            say("--bundle and --tensorboard leave out videos and animated pictures")
        return code


def _how(given: Explain, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``camkit.explain_many`` for a device, and say if it cannot compute with the precision."""
    from camkit.choices import Options
    from camkit.engine.passes import usable_precision

    precision, note = usable_precision(given.precision, device)
    if note:
        say(note)
    known = {*Options.__annotations__, "draft"}
    options = {name: value for name, value in vars(given).items() if name in known}
    return {**options, "target_layer": given.layer, "precision": precision}


def _drawing(given: Explain) -> Drawing:
    """Return how to draw.

    Raises:
        InputError: an option is wrong.
    """
    from camkit.scale.job import Drawing

    if given.max_side < 0:
        raise InputError(
            f"--max-side takes a number of pixels, or 0 to keep the size of the pictures, not {given.max_side}"
        )
    return Drawing(
        given.style,  # type: ignore[arg-type] # checked there
        given.colormap,
        given.alpha,
        given.scale or "shared",
        given.max_side or None,
        given.format,
        one_scale=given.scale == "shared",
    )


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
    import camkit
    from camkit.images.files import refuse_input, refuse_other_file
    from camkit.images.listing import Pictures
    from camkit.models import device_of
    from camkit.scale.job import free_file, slug, write_drawing

    files = Pictures(pictures, skip=how.out, recursive=how.recursive).first(2)
    if len(files) != 1:
        raise InputError("a slide shows one picture; name one file")
    is_page = how.out.suffix in (".pdf", ".svg")
    if is_page:
        file = how.out
        if file.exists() and not how.overwrite:
            raise OutputError(f"{file} exists already; name another file, or pass --overwrite")
    else:
        refuse_other_file(how.out)
        words = ["slide", *map(slug, [*([targets.true] if targets.true else []), *(targets.target or [])])]
        file = free_file(how.out, Path(files[0].stem), words, overwrite=how.overwrite)
    refuse_input(file, [*files, *source.files()])
    loaded = source.load()
    given = _how(how, device_of(loaded.module))
    options = {name: given[name] for name in ("method", "precision", "references")}
    made = camkit.slide(loaded, files[0], targets.true, target=targets.target, **options)
    if is_page:
        made.save(file)
    else:
        write_drawing(file, made.draw())
    if not TALK.quiet:
        emit(printable(made.sentence))
        emit(printable(f"  wrote {file}"))
    return 0


def _with_events(rows: Run, events: Any) -> Generator[Result, None, None]:
    """Pass the rows on and write each picture as an event too; a failure to write is raised after the last row."""
    from camkit.scale.folder import Written
    from camkit.tensorboard import write_explanation

    first_error: OutputError | None = None
    with rows:
        for row in rows:
            if first_error is None and isinstance(row, Written):
                try:
                    tag = f"explain/{row.name.with_suffix('').as_posix()}"
                    write_explanation(row.explanation, events, tag=tag, **row.drawing.options())
                except OutputError as error:
                    first_error = error
            yield row
    if first_error is not None:
        raise first_error
