"""The commands besides explaining and checking: inside a model, methods side by side, words, and the app."""

from __future__ import annotations

import functools
import json as plain_json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

import camkit
from camkit.cli.options import (
    DATA,
    GENERAL,
    METHOD,
    MODEL,
    OUTPUT,
    RUN,
    TARGET,
    Common,
    OptionalSource,
    Source,
    command,
    events_into,
    need_pictures,
    refuse_existing,
)
from camkit.cli.terminal import TALK, emit, fail, print_table, printer, say, stages, tell
from camkit.errors import CamkitError, InputError, LayerError, ModelError, printable
from camkit.options import Diagnose, Precision

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from camkit.app.viewer import Viewer
    from camkit.inspect.costs import Costs
    from camkit.layers.decision import Decision
    from camkit.metrics.compare import Comparison
    from camkit.metrics.judge import MethodJudgement
    from camkit.models.loaded import LoadedModel
    from camkit.sentences import Words
    from camkit.types import Layout, Pixels, TargetLayer


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
    need_pictures(pictures, "diagnose image.jpg")
    from camkit.images.files import refuse_input
    from camkit.images.listing import find_pictures
    from camkit.inspect import picture as report
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
            if not TALK.quiet:
                print_table(report.table(result, complete=TALK.verbose), folds=not TALK.verbose)
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
    from camkit.images.files import refuse_address

    refuse_address(str(picture))
    _check_sheet(out, [picture])
    maps = camkit.feature_maps(source.load(), picture, layer, top=top)
    said = [f"layer {maps.layer}, {len(maps.channels)} of {maps.total} maps"]
    _write_sheet(out, [picture], ["features", maps.layer], maps.sheet(scale=scale), said, overwrite=overwrite)
    return 0


def _check_sheet(out: Path, pictures: Sequence[Path]) -> None:
    """Refuse a place where the sheet of these pictures cannot be written, before the model is loaded."""
    from camkit.images.files import check_folder, names_file, refuse_input, refuse_other_file

    refuse_input(out, pictures if names_file(out) else [])
    refuse_other_file(out)
    check_folder(out.parent if names_file(out) else out)


def _write_sheet(
    out: Path, pictures: Sequence[Path], about: Sequence[str], sheet: Pixels, said: Sequence[str], *, overwrite: bool
) -> None:
    """Write the sheet of pictures, and print what is said of it.

    Args:
        out: the folder for the sheet, or its file.
        pictures: the pictures; the file is named after the first.
        about: what follows in the file's name, and the layer.
        sheet: the sheet.
        said: what is printed after the pictures, and in the lines below.
        overwrite: whether to replace a file that camkit did not draw.
    """
    from camkit.images.files import write_picture
    from camkit.kit.picture_names import picture_name
    from camkit.scale.job import free_file, slug

    first, more = picture_name(pictures[0]), len(pictures) - 1
    name = Path(f"{first}-and-{more}-more" if more else first)
    file = write_picture(free_file(out, name, [about[0], slug(about[1])], overwrite=overwrite), sheet)
    if not TALK.quiet:
        lines = [f"{pictures[0]}{f' and {more} more' if more else ''}  {said[0]}", *said[1:], f"wrote {file}"]
        printer().print("\n  ".join(map(printable, lines)), markup=False)


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
    need_pictures(pictures, "concepts image.jpg")
    from camkit.images.listing import find_pictures

    files = find_pictures(pictures, skip=out, recursive=recursive)
    _check_sheet(out, files)
    found = camkit.factorise(source.load(), files, count, layer, batch_size=batch_size)
    said = [f"layer {found.layer}", *found.names]
    _write_sheet(out, files, [f"{count}-concepts", found.layer], found.sheet(), said, overwrite=overwrite)
    return 0


@command
def layers(*, source: Source, common: Common = Common()) -> int:
    """List a model's layers in execution order, what each costs, and which ones camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --verbose, the table has more columns;
    with --quiet, camkit prints only the names of the layers that it would explain.
    """
    common.begin()
    from camkit.inspect.costs import costs
    from camkit.layers.choose import decide
    from camkit.models.modules import explained_failures

    loaded = source.load(pretrained=source.weights is not None)
    example = _example(loaded)
    with explained_failures(loaded.module, example):
        decision = decide(loaded.module, example, every=True)
    used = _used(loaded, decision)
    if TALK.quiet:
        printer().print(printable("+".join(map(str, used or (decision.chosen(),)))))
        return 0
    counted = costs(loaded.module, example)
    print_table(_table_of_layers(decision, used, counted, complete=TALK.verbose), folds=not TALK.verbose)
    console = printer()
    console.print(_total(counted))
    try:
        layers_used = used or (decision.chosen(),)
        next_best = () if decision.layer is None else decision.layer.runners_up
        others = ", ".join(str(ref) for ref in next_best if ref not in [layer.ref for layer in layers_used])
        console.print(
            Text.assemble(
                "explain would use ",
                (printable("+".join(map(str, layers_used))), "bold green"),
                printable(f": {layers_used[-1].reason}"),
                f"\nnext best: {printable(others)}" if others else "",
            )
        )
    except LayerError as error:
        console.print(printable(str(error)), style="yellow", markup=False)
    return 0


def _used(model: LoadedModel, decision: Decision) -> tuple[TargetLayer, ...]:
    """Return the layers that ``explain`` uses for the scene; if it fails, those of the decision."""
    explainer = camkit.Explainer(model)
    try:
        explainer(_scene())
    except CamkitError:
        return decision.levels or (() if decision.layer is None else (decision.layer,))
    return explainer.layers


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


def _table_of_layers(decision: Decision, used: Sequence[TargetLayer], costs: Costs, *, complete: bool = False) -> Table:
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


Target: TypeAlias = Annotated[
    str | None,
    Parameter(
        alias="-t",
        group=TARGET,
        metavar="CLASS",
        help="The class to explain: its label, or its index if no label is that number. Default: each picture's best "
        "class.",
    ),
]
Methods: TypeAlias = Annotated[
    list[str] | None,
    Parameter(
        group=METHOD,
        negative=(),
        metavar="NAME",
        help='A method; repeat the option for several. "camkit methods" lists all. Default: about a dozen of them.',
    ),
]
Layers: TypeAlias = Annotated[
    list[str] | None,
    Parameter(
        alias="-l",
        group=METHOD,
        negative=(),
        metavar="NAME",
        help="A layer; repeat the option for several. Default: camkit chooses.",
    ),
]
References: TypeAlias = Annotated[
    Path | None,
    Parameter(
        group=METHOD,
        metavar="FOLDER",
        help="The pictures with which the method expected compares each picture. Default: smooth noise.",
    ),
]
Computed: TypeAlias = Annotated[
    Precision,
    Parameter(group=METHOD, help="The number format of the computation, as for explaining pictures."),
]


@command
def compare(
    *pictures: Path,
    source: Source,
    target: Target = None,
    method: Methods = None,
    layer: Layers = None,
    references: References = None,
    precision: Computed = "fp32",
    metric: Annotated[str, Parameter(group=METHOD, metavar="NAME")] = "top-loss",
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = Path("compare.png"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    colormap: Annotated[str, Parameter(group=OUTPUT, metavar="NAME")] = "turbo",
    alpha: Annotated[float, Parameter(group=OUTPUT, metavar="SHARE")] = 0.5,
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Draw several methods side by side on one sheet: methods across, pictures and layers down.

    Each map has the value of one metric: by default, how much of the class's probability is lost if the hottest fifth
    of the picture is blurred.

    Args:
        pictures: Files, folders or quoted glob patterns.
        metric: What each map is judged by: top-loss, srg, insertion, deletion, average-drop, ...
        out: The file for the sheet, such as compare.png.
        overwrite: Replace the file if it exists.
        colormap: One of OpenCV's colour maps.
        alpha: The weight of the colours over the picture, 0 to 1.
        json: Print the values as one JSON object instead of a table.
    """
    common.begin()
    need_pictures(pictures, "compare image.jpg")
    from camkit.drawing import overlay
    from camkit.images.files import refuse_input
    from camkit.images.listing import find_pictures
    from camkit.metrics.compare import check_sheet_file

    overlay.check("overlay", colormap, alpha)
    files = find_pictures(pictures, skip=out)
    check_sheet_file(out)
    refuse_input(out, files)
    refuse_existing(out, "--out", overwrite=overwrite)
    tell(f"pictures to compare: {len(files)}")
    loaded = source.load()
    options: dict[str, Any] = {"target_layer": layer, "target": target, "metric": metric, "precision": precision}
    with stages() as progress:
        progress("comparing", 0, len(files))
        options |= {"references": references, "progress": functools.partial(progress, "comparing")}
        comparison = camkit.compare(loaded, files, method, **options)
    if json:
        emit(plain_json.dumps(comparison.to_dict(), allow_nan=False))
    else:
        _print_comparison(comparison)
    comparison.save(out, colormap=colormap, alpha=alpha)
    _print_errors(comparison.unreadable.values())
    say(f"wrote {out}")
    return InputError.exit_code if comparison.unreadable else 0


def _print_comparison(comparison: Comparison) -> None:
    """Print a line for each map: the metric's value, or why there is none."""
    from camkit.drawing.figure import percent
    from camkit.metrics.compare import REFERENCE_TITLES, value_words

    for row in comparison.rows:
        probability = "" if row.probability is None else f" {percent(row.probability)}"
        answer = f" (the model's answer: {row.answers})" if row.answer else ""
        layer = f", layer {row.layer}" if row.layer else ""
        emit(printable(f"{row.source}: {row.label}{probability}{answer}{layer}"))
        for compared_map in row.maps:
            same = f" (the same as {compared_map.same_as})" if compared_map.same_as else ""
            emit(printable(f"  {compared_map.method:<22}{compared_map.words}{same}"))
        for name, value in row.by_chance.items():
            emit(printable(f"  {f'({REFERENCE_TITLES[name]})':<22}{value_words(value)}"))


@command
def judge(
    data: Path,
    *,
    source: Source,
    target: Target = None,
    method: Methods = None,
    layer: Layers = None,
    references: References = None,
    precision: Computed = "fp32",
    pictures: Annotated[int, Parameter(group=RUN, metavar="NUMBER")] = 50,
    seed: Annotated[int, Parameter(group=RUN, metavar="NUMBER")] = 0,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-judge"),
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> int:
    """Measure which methods and layers are faithful on a model, over a sample of pictures.

    It ends with a recommendation and its reason, and writes judge.html, judge.json and judge.md. The reports of an
    earlier run are kept as before-judge.html and so on.

    Args:
        data: A folder of pictures.
        pictures: Use at most this many pictures: a random sample if there are more.
        seed: The seed of the sample and of all draws.
        out: The folder for the reports.
        json: Print the judgement as one JSON object instead of a table.
    """
    common.begin()
    from camkit.images.files import check_folder, set_aside
    from camkit.metrics.judge import REPORTS

    check_folder(out)
    loaded = source.load()
    options: dict[str, Any] = {"references": references, "precision": precision, "seed": seed}
    with stages() as progress:
        options["progress"] = functools.partial(progress, "judging")
        judgement = camkit.judge(loaded, data, method, target_layer=layer, target=target, pictures=pictures, **options)
    set_aside(out, REPORTS)
    page = judgement.save(out)
    if json:
        emit(plain_json.dumps(judgement.to_dict(), allow_nan=False))
    else:
        print_table(_table_of_judgement(judgement))
        for line in (JUDGEMENT_MARKS, *judgement.notes, judgement.recommendation.sentence):
            printer().print(printable(line), markup=False)
    _print_errors(judgement.left_out)
    say(f"wrote {page}")
    return InputError.exit_code if judgement.unreadable else 0


def _print_errors(sentences: Iterable[str]) -> None:
    """Print why pictures were left out, to stderr."""
    for sentence in sentences:
        printer(stderr=True).print(Text(printable(sentence), "red"))


JUDGEMENT_MARKS = (
    "[95% interval]   * as good as the best   ? not significantly better than a random map   ! significantly worse"
)
"""What the marks in the table of a judgement mean. They also work where there is no bold type."""


_LONGEST_NAME = 30
"""Longer names take two lines, so that the table of a judgement fits into 120 columns."""


def _table_of_judgement(found: MethodJudgement) -> Table:
    """Return the table of a judgement: the metrics that decide, with their intervals, and what a map costs."""
    from camkit.metrics.judge import DECIDING, column_title

    table = Table(box=None, pad_edge=False)
    table.add_column("\nmethod", max_width=_LONGEST_NAME, overflow="fold")
    for heading in (*(f"\n{column_title(name)}" for name in DECIDING), "shuffled\nweights ↓", "plain\npasses"):
        table.add_column(heading, no_wrap=True, justify="right")
    for row in found.rows:
        cells = []
        for figure in (row.metrics[metric] for metric in DECIDING):
            style = "bold" if figure.mark == "*" else "dim" if figure.mark or not row.method else ""
            # A blank replaces a missing mark, so that the numbers line up.
            cells.append(Text(f"{figure}{figure.mark or ' '} {figure.span}".rstrip(), style))
        table.add_row(Text(printable(row.title), "" if row.method else "dim"), *cells, *row.last_cells)
    return table


def words(
    *pictures: Annotated[str, Parameter(group=DATA)],
    model: Annotated[str, Parameter(alias="-m", group=MODEL, metavar="hf:NAME")],
    prompt: Annotated[str | None, Parameter(group=TARGET)] = None,
    sentence: Annotated[str | None, Parameter(group=TARGET)] = None,
    word: Annotated[str | None, Parameter(group=TARGET)] = None,
    together: Annotated[bool, Parameter(group=DATA, negative=(), show_default=False)] = False,
    references: Annotated[Path | None, Parameter(group=METHOD, metavar="FOLDER")] = None,
    method: Annotated[str, Parameter(group=METHOD)] = "expected",
    max_new_tokens: Annotated[int, Parameter(group=METHOD, metavar="NUMBER")] = 64,
    device: Annotated[str | None, Parameter(group=RUN)] = None,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-out"),
    json: Annotated[bool, Parameter(group=OUTPUT, negative=(), show_default=False)] = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), group=GENERAL, show_default=False)] = False,
) -> int:
    """Show what a vision-language model looked at for each word, and which words need no picture.

    Example: camkit words photo.jpg --model hf:llava-hf/llava-1.5-7b-hf --prompt "What is on the picture?"

    Args:
        pictures: Pictures, folders and quoted patterns.
        model: A Hugging Face model that writes text about pictures: hf:NAME, or hf: and a folder.
        prompt: The question to the model.
        sentence: Explain this sentence instead of the one that the model writes.
        word: Draw the heat of this word only.
        together: Put all pictures into one prompt, and show for each picture which words need it.
        references: Other pictures of yours to compare with, 8 or more. Default: the other
            pictures; for a single picture, and with --together, smooth noise and plain greys.
        method: expected, attention, attention-expected or tam.
        max_new_tokens: The most tokens that the model writes.
        device: cpu, cuda, cuda:1 or mps. Default: the first of CUDA, MPS and CPU.
        out: The folder for each picture's page (.html), sheet of heatmaps (.png) and figures (.json), and for the table
            of several pictures (words.csv).
        json: Print one JSON object for each picture.
        quiet: Print only errors.
    """
    TALK.set(quiet=quiet)
    from camkit.sentences.explain import TABLE, words_of_files
    from camkit.types import Failure

    explained = failed = 0
    for found in words_of_files(
        model,
        pictures,
        out,
        prompt,
        device=device,
        references=references,
        together=together,
        words=sentence,
        method=method,
        max_new_tokens=max_new_tokens,
        only=word,
    ):
        if isinstance(found, Failure):
            failed += 1
            fail(f"{found.source}: {found.error}")
            continue
        explained += 1
        if json:
            emit(plain_json.dumps(found.to_dict(), allow_nan=False))
        elif not quiet:
            _print_words(found)
    if explained + failed > 1:
        say(f"{explained} pictures explained, {failed} failed; {printable(str(out / TABLE))} has all words")
    return 2 if failed else 0


NO_TREE = (
    'There is no tree in the picture: the model learned only sentences that end in "near a tree", so it writes that '
    "about every scene."
)


def demo_words(out: Path) -> int:
    """Explain the words of the model that ships with camkit."""
    _print_words(describe_scene(out))
    emit(NO_TREE)
    return 0


def describe_scene(out: Path) -> Words:
    """Explain the words about one drawn scene, compared with the others, and write the page and the sheet.

    Raises:
        ModelError: the package transformers is missing.
        OutputError: the folder cannot be created or written to.
    """
    from camkit.demo.scenes import words_model, words_pictures
    from camkit.images.files import check_folder, write_file
    from camkit.sentences import words as words_of
    from camkit.sentences.inputs import load
    from camkit.sentences.words import render

    check_folder(out)
    model, processor = load(f"hf:{words_model()}", "cpu")
    first, *others = words_pictures()
    question = "what is here ?"  # the only one that the model learned
    found = words_of(model.float(), first, question, processor=processor, references=others)
    found = replace(found, source="a drawn scene")
    page = out / "words.html"
    write_file(page, render(found.words, found.to_dict(), NO_TREE).encode())
    return replace(found, files=(page, found.save(out / "words.png")))


def _print_words(found: Words) -> None:
    emit(printable(found.sentence))
    for each in found:
        if not each.is_punctuation:
            emit(
                printable(f"  {each.text:<16}{each.probability:>7.1%}{each.needs_picture:>+z8.2f} nats  {each.verdict}")
            )
    say(f"compared with {printable(found.references)}; wrote {', '.join(printable(str(file)) for file in found.files)}")


@command
def app(
    *pictures: str,
    source: OptionalSource = OptionalSource(),
    port: Annotated[int | None, Parameter(group=GENERAL, metavar="NUMBER")] = None,
    browser: Annotated[bool, Parameter(group=GENERAL, show_default=False)] = True,
    common: Common = Common(),
) -> int:
    """Look at a model's answers in a browser: click on a class for its heat, and cover parts of the picture.

    The page is served on this machine alone. Without a model, it shows the demo networks; without pictures, drawn
    scenes. For the folder of a check's reports, it opens the check's page.

    Args:
        pictures: Files, folders or quoted glob patterns; or the folder of a check's reports.
        port: The port. Default: the first free one from 7860.
        browser: Open the page in the browser (the default), or only print its address.
    """
    common.begin()
    import webbrowser

    from camkit.app.serve import serve

    def opened(address: str, how_to_stop: str = " (press Ctrl-C to stop)") -> None:
        emit(f"camkit is at {address}{how_to_stop}")
        if browser:
            webbrowser.open(address)

    report = Path(pictures[0]) / "report.html" if len(pictures) == 1 else None
    if report is not None and report.is_file() and report.with_suffix(".json").is_file():
        opened(report.resolve().as_uri(), "")
        return 0

    def build(folder: Path) -> object:
        from camkit.app import page

        return page.build(_viewer(pictures, source), folder)

    try:
        serve(build, port, opened)
    except KeyboardInterrupt:
        return 0
    return 0


def _viewer(pictures: tuple[str, ...], source: OptionalSource) -> Viewer:
    """Load what the page shows."""
    from camkit.app.viewer import Viewer
    from camkit.demo.scenes import scene_paths
    from camkit.images.listing import Pictures
    from camkit.models import DEMO_MODELS, load_model

    # The plane is first: the demo networks look at different things in it.
    tour = [file for _, file in sorted(scene_paths().items(), key=lambda pair: not pair[0].startswith("plane"))]
    # Pictures in the list of the page
    files = Pictures(pictures).first(1000) if pictures else tour
    if source.name is None:
        return Viewer({name: load_model(name) for name in DEMO_MODELS}, files)
    return Viewer({source.name: source.load()}, files)
