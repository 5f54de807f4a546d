"""``camkit PICTURES``: explains pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camkit.cli.options import Common, Ray, Source, actors_of, command, events_into
from camkit.cli.rows import Form, Progress, report
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import TALK, emit, say
from camkit.errors import InputError, OutputError, printable
from camkit.options import Explain, Precision, Results

if TYPE_CHECKING:
    import torch

    from camkit.scale.folder import Result, Run


def _check(results: Results) -> None:
    """Check that the options fit together.

    Raises:
        InputError: two exclude each other, or one needs another.
    """
    if results.json and results.csv:
        raise InputError("--json and --csv cannot be combined")
    if results.raw and not results.json:
        raise InputError("--raw adds the raw maps to the JSON, so it needs --json")
    if results.no_pictures and results.table is None and results.bundle is None:
        raise InputError("--no-pictures writes only the table, so it needs --table or --bundle")
    if results.resume and results.bundle is not None:
        raise InputError("--bundle cannot be resumed; leave out --resume")
    if results.resume and results.table is None:
        raise InputError("--resume continues a table, so it needs --table")


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
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.images.files import refuse_input
    from camkit.images.listing import Pictures
    from camkit.methods import find_method
    from camkit.models import device_of
    from camkit.scale.folder import Run, explain_files
    from camkit.scale.job import Job, check_drawing

    if how.method is not None and ":" not in (source.name or ""):  # mine.py:build may register methods
        find_method(how.method)
    if how.style == "slide":
        _refuse_beside_slide(targets, how, results, ray=ray)
        return _slide(pictures, source, targets, how)
    if targets.true is not None:
        raise InputError("--true is for --style slide")
    check_drawing(how)
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
        progress = Progress(files, with_lines=results.table is not None and not TALK.verbose)
        target = targets.targets(files.first(2), loaded.preprocess, detects=loaded.detects)
        how = replace(how, precision=_precision(how, device))
        job = Job(files, how, results, target, progress.show_passes)
        rows = explain_files(loaded, job, elsewhere=None if cluster is None else cluster.explain)
        events = stack.enter_context(events_into(results.tensorboard))
        rows = rows if events is None else Run(_with_events(rows, events), rows.stills)
        form: Form = "json" if results.json else "csv" if results.csv else "text"
        code = report(rows, job, form, progress, with_raw=results.raw)
        if rows.stills.videos and (results.bundle or results.tensorboard):
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
    import camkit
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
        if file.exists() and not how.overwrite:
            raise OutputError(f"{file} exists already; name another file, or pass --overwrite")
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


def _with_events(rows: Run, events: Any) -> Generator[Result, None, None]:
    """Pass the rows on and write each picture as an event too; a failure to write is raised after the last row."""
    from camkit.scale.job import Written
    from camkit.tensorboard import write_explanation

    first_error: OutputError | None = None
    with rows:
        for row in rows:
            if first_error is None and isinstance(row, Written) and row.video is None:
                try:
                    tag = f"explain/{row.name.with_suffix('').as_posix()}"
                    write_explanation(row.explanation, events, tag=tag, **row.drawing)
                except OutputError as error:
                    first_error = error
            yield row
    if first_error is not None:
        raise first_error
