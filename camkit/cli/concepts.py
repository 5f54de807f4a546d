"""``camkit concepts``: the concepts that a layer's feature maps are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from camkit.cli.options import METHOD, OUTPUT, Common, Source, command
from camkit.cli.terminal import TALK, printer
from camkit.errors import InputError, printable


@command
def concepts(
    *pictures: str,
    source: Source,
    count: Annotated[int, Parameter(alias="-n", group=METHOD, metavar="NUMBER")] = 5,
    layer: Annotated[str | None, Parameter(alias="-l", group=METHOD, metavar="NAME")] = None,
    batch_size: Annotated[int | None, Parameter(alias="-b", group=METHOD, metavar="NUMBER")] = None,
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="PATH")] = Path("camkit-out"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Draw the concepts that a layer's feature maps are made of, as coloured regions in one picture or several.

    Deep feature factorisation: each cell becomes a sum of a few concepts, which all pictures share. If the rest of the
    model can be run alone, each concept is named by the class that it stands for.

    Args:
        pictures: Files, folders or quoted glob patterns.
        count: The number of concepts.
        layer: The layer; by default the one that camkit would explain. "camkit layers" lists them.
        batch_size: Pictures per pass; halved automatically if memory runs out. Default: 32 on a GPU, 4 on a CPU.
        recursive: Search subfolders too, which is the default, or leave them out.
        out: The folder for the sheet, or a file such as concepts.png.
        overwrite: Replace a file that camkit did not draw.
    """
    common.begin()
    if not pictures:
        raise InputError("name at least one picture: camkit concepts image.jpg --model resnet50")
    from camkit.concepts import factorise
    from camkit.images.files import check_folder, names_file, refuse_input, refuse_other_file
    from camkit.images.listing import find_pictures
    from camkit.kit.picture_names import picture_name
    from camkit.scale.job import free_file, slug, write_drawing

    files = find_pictures(pictures, skip=out, recursive=recursive)
    refuse_input(out, files if names_file(out) else [])
    loaded = source.load()
    refuse_other_file(out)
    check_folder(out.parent if names_file(out) else out)
    found = factorise(loaded, files, count, layer, batch_size=batch_size)
    words = [f"{count}-concepts", slug(found.layer)]
    first, more = picture_name(files[0]), len(files) - 1
    file = free_file(out, Path(f"{first}-and-{more}-more" if more else first), words, overwrite=overwrite)
    write_drawing(file, found.sheet())
    if TALK.quiet:
        return 0
    lines = [f"{printable(str(files[0]))}{f' and {more} more' if more else ''}  layer {printable(found.layer)}"]
    lines += [f"  {printable(name)}" for name in found.names]
    lines += [f"  wrote {printable(str(file))}"]
    printer().print("\n".join(lines), markup=False)
    return 0
