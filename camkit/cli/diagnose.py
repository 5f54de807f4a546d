"""``camkit diagnose`` and ``camkit features``: what happens inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from camkit.cli.options import METHOD, OUTPUT, Common, Source, command, events_into
from camkit.cli.terminal import TALK, emit, printer
from camkit.errors import InputError, printable
from camkit.options import Diagnose


@command
def diagnose(
    *pictures: str,
    source: Source,
    how: Diagnose = Diagnose(),
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    tensorboard: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    common: Common = Common(),
) -> int:
    """Measure each layer on a batch of pictures and report what is wrong: dead, saturated, vanishing, NaN, frozen.

    Writes diagnose.json and diagnose.png. With --verbose, the table has more columns. Exit codes: 0 done, whatever was
    found; 2 the call or a file is wrong; 4 the model or the program failed.

    Args:
        pictures: Files, folders or quoted glob patterns, used as one batch. It takes eight or more to tell dead
            channels from silent ones.
        recursive: Search subfolders too, which is the default, or leave them out.
        json: Print the JSON instead of the table.
        tensorboard: A folder for TensorBoard event files with the same results.
    """
    common.begin()
    if not pictures:
        raise InputError("name at least one picture: camkit diagnose image.jpg --model resnet50")
    from camkit.cli.text import narrow, wide
    from camkit.diagnosis import console as report
    from camkit.diagnosis.diagnosis import REPORTS, as_json, diagnose_files
    from camkit.images.files import refuse_input
    from camkit.images.listing import find_pictures

    out = how.out
    files = find_pictures(pictures, skip=out, recursive=recursive)
    for name in REPORTS:
        refuse_input(out / name, files)
    loaded = source.load(trainable=True)
    with events_into(tensorboard) as events:
        result = diagnose_files(loaded, files, out, training=how.train, precision=how.precision, limit=how.limit)
        if json:
            emit(as_json(result))
        else:
            console = printer()
            sparks = console.encoding.lower().startswith("utf")
            table = report.table(result, sparks=sparks, complete=TALK.verbose)
            if not TALK.quiet:
                (wide(table, console) if TALK.verbose else narrow(console)).print(table)
            console.print(report.findings(result))
            if not TALK.quiet:
                console.print(f"wrote {printable(' and '.join(str(out / name) for name in REPORTS))}", markup=False)
        if events is not None:
            from camkit.tensorboard import write_diagnosis

            write_diagnosis(result, events)
    return 0


@command
def features(
    picture: Path | None = None,
    *,
    source: Source,
    layer: Annotated[str | None, Parameter(alias="-l", group=METHOD, metavar="NAME")] = None,
    top: Annotated[int, Parameter(group=METHOD, metavar="NUMBER")] = 64,
    scale: Annotated[Literal["each", "together"], Parameter(group=OUTPUT)] = "each",
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="PATH")] = Path("camkit-out"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Draw a layer's feature maps for one picture as a sheet, the strongest first.

    Args:
        picture: The picture file.
        layer: The layer; by default the one that camkit would explain. "camkit layers" lists them.
        top: The number of maps.
        scale: each scales every map to its own range, to show its form; together scales all maps to one range, so that
            you can compare them.
        out: The folder for the sheet, or a file such as sheet.png.
        overwrite: Replace a file that camkit did not draw.
    """
    common.begin()
    if picture is None:
        raise InputError("name a picture: camkit features image.jpg --model resnet50 --layer layer4")
    from camkit.diagnosis.feature_maps import feature_maps
    from camkit.images.files import (
        check_folder,
        names_file,
        refuse_address,
        refuse_input,
        refuse_other_file,
    )
    from camkit.kit.picture_names import picture_name
    from camkit.scale.job import free_file, slug, write_drawing

    refuse_address(str(picture))
    refuse_input(out, [picture] if names_file(out) else [])
    loaded = source.load()
    refuse_other_file(out)
    check_folder(out.parent if names_file(out) else out)
    maps = feature_maps(loaded, picture, layer, top=top)
    words = ["features", slug(maps.layer)]
    file = free_file(out, Path(picture_name(picture)), words, overwrite=overwrite)
    write_drawing(file, maps.sheet(scale=scale))
    if TALK.quiet:
        return 0
    printer().print(
        f"{printable(str(picture))}  layer {printable(maps.layer)}, {len(maps.channels)} of {maps.total} maps\n"
        f"  wrote {printable(str(file))}",
        markup=False,
    )
    return 0
