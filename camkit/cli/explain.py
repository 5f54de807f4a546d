"""``camkit PICTURES``: explains pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from camkit.cli.options import METHOD, OUTPUT, Common, PrecisionName, Ray, Source, actors_of, events_into
from camkit.cli.rows import Form, PassProgress, report
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import TALK, emit, say
from camkit.errors import InputError, OutputError, printable

if TYPE_CHECKING:
    import torch

    from camkit.scale.folder import Result, Run
    from camkit.scale.job import Drawing, How
    from camkit.targets import TargetLike


@Parameter(name="*", group=METHOD)
@dataclass(frozen=True, kw_only=True)
class HowOptions:
    """How to explain.

    Attributes:
        method: How to weight the feature maps; "camkit methods" lists all. Default: auto, with which camkit chooses
            the method and the layer together.
        layer: The layer to explain; repeat the option to fuse several. "camkit layers" lists all. Default: camkit
            chooses.
        fuse: How to combine several layers into one map. Default: product for refinecam, else mean.
        smooth: augment averages the maps of the picture and its mirror image, each with 0.9, 1 and 1.1 times its
            contrast, in six passes; eigen keeps the first principal component of the weighted feature maps.
        references: The pictures with which the method expected compares each picture; 8 to 16 are enough. Default:
            smooth noise that camkit makes.
        precision: The number format of the computation; bf16 and fp16 are faster on hardware made for them. On a CPU
            without units for bf16, bf16 runs in fp32; bf16-forced uses bf16 anyway.
        batch_size: Pictures per pass; halved automatically if memory runs out. Default: 32 on a GPU, 4 on a CPU.
        draft: Read large JPEG files at a half, a quarter or an eighth of their size. This is faster and changes the
            maps a little.
        recursive: Search subfolders too, which is the default, or leave them out.
    """

    method: Annotated[str | None, Parameter(metavar="NAME")] = None
    layer: Annotated[list[str] | None, Parameter(alias="-l", negative=(), metavar="NAME")] = None
    fuse: Literal["mean", "max", "product"] | None = None
    smooth: Literal["augment", "eigen", "augment+eigen"] | None = None
    references: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    precision: PrecisionName = "fp32"
    batch_size: Annotated[int | None, Parameter(alias="-b", metavar="NUMBER")] = None
    draft: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    recursive: Annotated[bool, Parameter(show_default=False)] = True

    def on(self, device: torch.device, targets: Sequence[TargetLike] | None) -> How:
        """Return the settings for a device, and say if it cannot compute with the precision."""
        from camkit.engine.passes import usable_precision
        from camkit.models import usual_batch_size
        from camkit.scale.job import How

        precision, note = usable_precision(self.precision, device)
        if note:
            say(note)
        given = vars(self) | {"layers": self.layer, "targets": targets, "precision": precision}
        if self.batch_size is None:
            given["batch_size"] = usual_batch_size(device)
        return How(**{field.name: given[field.name] for field in fields(How)})


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, kw_only=True)
class DrawingOptions:
    """What is drawn.

    Attributes:
        out: The folder for the drawings, with the same subfolders as the pictures; or, for one picture, a file such as
            heat.png.
        overwrite: Replace files that camkit did not draw, and the table.
        style: figure (with a caption and a colour bar), overlay, side-by-side, heatmap, or slide: one slide of a single
            picture (.png, .pdf or .svg), with the heat of the answer and of the class in --true, or of each --target.
        colormap: One of OpenCV's colour maps: turbo, jet, viridis, inferno, ...
        alpha: The weight of the colours over the picture, 0 to 1.
        scale: shared draws all pictures on one scale of colours, so that they can be compared; it explains each twice.
            each draws every map on its own scale. Default: the targets of one picture share a scale, but each box of a
            detector has its own.
        max_side: Draw overlays of larger pictures with this many pixels on their longer side; 0 keeps their size.
        format: The type of the drawings. Default: jpg for overlays of a JPEG, otherwise png.
        every: Draw every n-th frame of a video.
    """

    out: Annotated[Path, Parameter(alias="-o", metavar="PATH")] = Path("camkit-out")
    overwrite: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    style: Annotated[str, Parameter(alias="-s", metavar="NAME")] = "figure"
    colormap: Annotated[str, Parameter(metavar="NAME")] = "turbo"
    alpha: Annotated[float, Parameter(metavar="SHARE")] = 0.5
    scale: Literal["shared", "each"] | None = None
    max_side: Annotated[int, Parameter(metavar="PIXELS")] = 2048
    format: Literal["jpg", "png"] | None = None
    every: Annotated[int, Parameter(metavar="FRAMES")] = 1

    def drawing(self) -> Drawing:
        """Return how to draw.

        Raises:
            InputError: an option is wrong.
        """
        from camkit.scale.job import Drawing

        if self.max_side < 0:
            raise InputError(
                f"--max-side takes a number of pixels, or 0 to keep the size of the pictures, not {self.max_side}"
            )
        given = vars(self) | {"scale": self.scale or "shared", "max_side": self.max_side or None}
        given["one_scale"] = self.scale == "shared"
        return Drawing(**{field.name: given[field.name] for field in fields(Drawing)})


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


def explain(
    *pictures: str,
    source: Source,
    targets: TargetOptions = TargetOptions(),
    how: HowOptions = HowOptions(),
    drawing: DrawingOptions = DrawingOptions(),
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

    if how.method is not None and ":" not in source.model:  # mine.py:build may register methods
        find_method(how.method)
    if drawing.style == "slide":
        _refuse_beside_slide(targets, how, drawing, results, ray=ray)
        return _slide(pictures, source, targets, how, drawing)
    if targets.true is not None:
        raise InputError("--true is for --style slide")
    drawn = drawing.drawing()
    targets.check()
    for written in (drawing.out, results.table):
        if written is not None:
            refuse_input(written, [targets.mask, targets.similar_to, *source.files()])
    files = Pictures(pictures, skip=drawing.out, recursive=how.recursive)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        loaded = source.load()
        cluster = None if pool is None else source.on_cluster(pool, loaded)
        device = device_of(loaded.module) if pool is None else pool.device
        passes = PassProgress()
        job = Job(
            files,
            None if results.no_pictures else drawing.out,
            how.on(device, targets.targets(files.first(2), loaded.preprocess, detects=loaded.detects)),
            drawn,
            overwrite=drawing.overwrite,
            every=drawing.every,
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


def _slide(
    pictures: Sequence[str], source: Source, targets: TargetOptions, how: HowOptions, drawing: DrawingOptions
) -> int:
    """Draw one slide of one picture."""
    import camkit
    from camkit.images.files import refuse_input, refuse_other_file
    from camkit.images.listing import Pictures
    from camkit.models import device_of
    from camkit.scale.job import free_file, slug, write_drawing

    files = Pictures(pictures, skip=drawing.out, recursive=how.recursive).first(2)
    if len(files) != 1:
        raise InputError("a slide shows one picture; name one file")
    is_page = drawing.out.suffix in (".pdf", ".svg")
    if is_page:
        file = drawing.out
        if file.exists() and not drawing.overwrite:
            raise OutputError(f"{file} exists already; name another file, or pass --overwrite")
    else:
        refuse_other_file(drawing.out)
        words = ["slide", *map(slug, [*([targets.true] if targets.true else []), *(targets.target or [])])]
        file = free_file(drawing.out, Path(files[0].stem), words, overwrite=drawing.overwrite)
    refuse_input(file, [*files, *source.files()])
    loaded = source.load()
    asked = how.on(device_of(loaded.module), None)
    options = {"precision": asked.precision, "references": asked.references}
    made = camkit.slide(loaded, files[0], targets.true, target=targets.target, method=how.method, **options)
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
