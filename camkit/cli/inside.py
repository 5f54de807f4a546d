"""``camkit diagnose``, ``features``, ``concepts`` and ``layers``: what happens inside a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from camkit.cli.options import METHOD, OUTPUT, Common, Source, command, events_into
from camkit.cli.terminal import TALK, emit, print_table, printer
from camkit.errors import CamkitError, InputError, LayerError, ModelError, printable
from camkit.options import Diagnose

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from camkit.layers.costs import Costs
    from camkit.layers.decision import Decision
    from camkit.models.loaded import LoadedModel
    from camkit.types import Layout, TargetLayer


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
    from camkit.images.files import refuse_input
    from camkit.images.listing import find_pictures
    from camkit.inspect import console as report
    from camkit.inspect.diagnosis import REPORTS, as_json, diagnose_files

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
                print_table(table, folds=not TALK.verbose)
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
    from camkit.images.files import refuse_address, write_picture
    from camkit.inspect.feature_maps import feature_maps
    from camkit.kit.picture_names import picture_name
    from camkit.scale.job import free_file, slug

    refuse_address(str(picture))
    _check_sheet(out, [picture])
    loaded = source.load()
    maps = feature_maps(loaded, picture, layer, top=top)
    words = ["features", slug(maps.layer)]
    file = free_file(out, Path(picture_name(picture)), words, overwrite=overwrite)
    write_picture(file, maps.sheet(scale=scale))
    if TALK.quiet:
        return 0
    printer().print(
        f"{printable(str(picture))}  layer {printable(maps.layer)}, {len(maps.channels)} of {maps.total} maps\n"
        f"  wrote {printable(str(file))}",
        markup=False,
    )
    return 0


def _check_sheet(out: Path, pictures: Sequence[Path]) -> None:
    """Refuse a place where the sheet of these pictures cannot be written, before the model is loaded."""
    from camkit.images.files import check_folder, names_file, refuse_input, refuse_other_file

    refuse_input(out, pictures if names_file(out) else [])
    refuse_other_file(out)
    check_folder(out.parent if names_file(out) else out)


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
    from camkit.images.files import write_picture
    from camkit.images.listing import find_pictures
    from camkit.inspect import factorise
    from camkit.kit.picture_names import picture_name
    from camkit.scale.job import free_file, slug

    files = find_pictures(pictures, skip=out, recursive=recursive)
    _check_sheet(out, files)
    loaded = source.load()
    found = factorise(loaded, files, count, layer, batch_size=batch_size)
    words = [f"{count}-concepts", slug(found.layer)]
    first, more = picture_name(files[0]), len(files) - 1
    file = free_file(out, Path(f"{first}-and-{more}-more" if more else first), words, overwrite=overwrite)
    write_picture(file, found.sheet())
    if TALK.quiet:
        return 0
    lines = [f"{printable(str(files[0]))}{f' and {more} more' if more else ''}  layer {printable(found.layer)}"]
    lines += [f"  {printable(name)}" for name in found.names]
    lines += [f"  wrote {printable(str(file))}"]
    printer().print("\n".join(lines), markup=False)
    return 0


@command
def layers(*, source: Source, common: Common = Common()) -> int:
    """List a model's layers in execution order, what each costs, and which ones camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --verbose, the table has more columns;
    with --quiet, camkit prints only the names of the layers that it would explain.
    """
    common.begin()
    from camkit.layers.costs import costs

    loaded = source.load(pretrained=source.weights is not None)
    decision = _decide_on(loaded)
    used = _used(loaded, decision)
    if TALK.quiet:
        printer().print(printable("+".join(map(str, used or (decision.chosen(),)))))
        return 0
    counted = costs(loaded.module, _example(loaded))
    print_table(_table(decision, used, counted, complete=TALK.verbose), folds=not TALK.verbose)
    console = printer()
    console.print(_total(counted))
    try:
        console.print(_choice(decision, used or (decision.chosen(),)))
    except LayerError as error:
        console.print(printable(str(error)), style="yellow", markup=False)
    return 0


def _used(model: LoadedModel, decision: Decision) -> tuple[TargetLayer, ...]:
    """Return the layers that ``explain`` uses for the scene; if it fails, those of the decision."""
    from camkit.explaining.explainer import Explainer

    explainer = Explainer(model)
    try:
        explainer(_scene())
    except CamkitError:
        return decision.levels or (() if decision.layer is None else (decision.layer,))
    return explainer.layers


def _decide_on(model: LoadedModel) -> Decision:
    """Choose the layer of a model that was loaded by name, with a drawn scene that its own preprocessing prepares."""
    from camkit.layers.choose import decide
    from camkit.models import about_channels

    inputs = _example(model)
    try:
        return decide(model.module, inputs, every=True)
    except RuntimeError as error:
        sentence = about_channels(model.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def _example(model: LoadedModel) -> torch.Tensor:
    from camkit.models import device_of

    if model.preprocess is None:
        raise ModelError(
            f"camkit does not know how to prepare pictures for {model.name}; pass --size, --mean and --std, or let the "
            "factory return the module and the function that prepares a PIL picture for it"
        )
    return model.preprocess(_scene())[None].to(device_of(model.module))


def _scene() -> Image.Image:
    from camkit.demo.scenes import scene_paths
    from camkit.images.read import open_picture

    return open_picture(next(iter(scene_paths().values())))


def _table(decision: Decision, used: Sequence[TargetLayer], costs: Costs, *, complete: bool = False) -> Table:
    """Return a table of every call of every module in execution order, with its costs and the chosen layers marked.

    Args:
        decision: the layers.
        used: the layers that camkit chooses.
        costs: what each costs.
        complete: whether to show the grid, the memory and why a layer is not chosen; the table then may be wider than
            80 columns.
    """
    chosen = [layer.ref for layer in used]
    headings = ["", "layer", "type", "output", "grid", "parameters", "mult-adds", "memory", "remark"]
    shown = [heading for heading in headings if complete or heading not in ("grid", "memory", "remark")]
    table = Table(box=None, pad_edge=False)
    for heading in shown:
        side: Literal["right", "left"] = "right" if heading in ("parameters", "mult-adds", "memory") else "left"
        folds = not complete and heading in ("layer", "type")
        table.add_column(heading, no_wrap=not folds, overflow="fold", justify=side)
    for line in decision.rows:
        is_chosen = line.ref in chosen
        cost = costs.of(line.ref)
        cells = {
            "": ">" if is_chosen else "",
            "layer": printable(str(line.ref)) if line.ref.name else "(the model)",
            "type": printable(line.kind),
            "output": "" if line.shape is None else "x".join(map(str, line.shape)),
            "grid": _grid(line.layout),
            "parameters": "" if cost is None else _amount(cost.parameters),
            "mult-adds": "" if cost is None else _amount(cost.mult_adds),
            "memory": "" if cost is None else _size(cost.memory),
            "remark": "chosen" if is_chosen else line.verdict,
        }
        table.add_row(
            *(Text(cells[heading]) for heading in shown),
            style="bold green" if is_chosen else "dim" if line.verdict else "",
        )
    return table


def _total(costs: Costs) -> Text:
    """Return what the whole model costs, with a remark on how far the numbers hold."""
    text = Text()
    if costs.total is not None:
        whole = costs.total
        text.append(
            f"{whole.parameters:,} parameters, {_amount(whole.mult_adds) or 0} multiply-adds and {_size(whole.memory)} "
            "of layer outputs for one picture"
        )
    if costs.remark:
        text.append(f"\n{printable(costs.remark)}" if text else printable(costs.remark), "yellow")
    return text


def _amount(number: int) -> str:
    """Return a number with three digits and its unit; an empty string for 0.

    >>> _amount(25_557_032), _amount(4_089_184_256), _amount(640), _amount(0)
    ('25.6M', '4.09G', '640', '')
    """
    return _in_units(number, {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3}) if number else ""


def _size(number: int) -> str:
    """Return bytes in KiB, MiB or GiB; an empty string for 0.

    >>> _size(3_211_264), _size(4000), _size(0)
    ('3.06 MiB', '3.91 KiB', '')
    """
    return _in_units(number, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10, " B": 1}) if number else ""


def _in_units(number: int, units: dict[str, int]) -> str:
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return str(number)


def _grid(layout: Layout | None) -> str:
    if layout is None:
        return ""
    grid = "x".join(map(str, layout.grid))
    kind = "" if layout.kind == "channels_first" else f" {layout.kind.replace('_', ' ')}"
    return f"{grid}{kind}" + (f", {layout.prefix} before" if layout.prefix else "")


def _choice(decision: Decision, used: Sequence[TargetLayer]) -> Text:
    """Return which layers ``explain`` uses, why, and which come next."""
    next_best = () if decision.layer is None else decision.layer.runners_up
    others = ", ".join(str(ref) for ref in next_best if ref not in [layer.ref for layer in used])
    return Text.assemble(
        "explain would use ",
        (printable("+".join(map(str, used))), "bold green"),
        printable(f": {used[-1].reason}"),
        f"\nnext best: {printable(others)}" if others else "",
    )
