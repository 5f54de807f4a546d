"""The work of the commands besides explaining and checking: inside a model, methods compared, words, the app, demos."""

from __future__ import annotations

import contextlib
import functools
import json as plain_json
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table
from rich.text import Text

import camkit
from camkit.app.serve import serve
from camkit.app.viewer import Viewer
from camkit.cli.explain import events_into, load, need_pictures, refuse_existing
from camkit.cli.options import OptionalModel
from camkit.cli.terminal import TALK, emit, fail, print_table, printer, say, stages
from camkit.demo import scenes
from camkit.drawing import overlay
from camkit.drawing.encode import encode
from camkit.drawing.figure import Tile, contact_sheet, percent
from camkit.drawing.text import GREY
from camkit.errors import CamkitError, InputError, LayerError, ModelError, printable, whole_number
from camkit.images.files import (
    check_folder,
    names_file,
    refuse_address,
    refuse_input,
    refuse_other_file,
    set_aside,
    write_file,
    write_picture,
)
from camkit.images.listing import Pictures, find_pictures
from camkit.images.read import open_picture
from camkit.inspect import picture as report
from camkit.inspect.costs import Costs, costs
from camkit.inspect.diagnosis import REPORTS
from camkit.kit.picture_names import picture_name
from camkit.layers.choose import decide
from camkit.layers.decision import Decision
from camkit.methods.registry import REFERENCE_TITLES
from camkit.metrics.compare import Comparison, check_sheet_file, value_words
from camkit.metrics.judge import DECIDING, MethodJudgement, column_title
from camkit.metrics.judge import REPORTS as JUDGEMENTS
from camkit.models import DEMO_MODELS, device_of, load_model
from camkit.models.modules import explained_failures
from camkit.options import Diagnose, Model, Opacity
from camkit.scale.job import free_file, slug
from camkit.sentences import inputs as language_models
from camkit.sentences import words as words_of
from camkit.sentences.explain import TABLE, words_of_files
from camkit.sentences.result import render
from camkit.types import Failure, Layout, Pixels, TargetLayer


def diagnose(
    *pictures: str, source: Model, how: Diagnose, recursive: bool, json: bool, tensorboard: Path | None
) -> None:
    """Measure each layer, and print what is wrong."""
    need_pictures(pictures, "diagnose image.jpg")
    out = how.out
    files = find_pictures(pictures, skip=out, recursive=recursive)
    for name in REPORTS:
        refuse_input(out / name, files)
    loaded = load(source, trainable=True)
    limit = whole_number(how.limit, "limit", 1)
    check_folder(out)
    count = min(limit, len(files))
    spread = [files[number * len(files) // count] for number in range(count)]  # evenly over the files
    with events_into(tensorboard) as events:
        result = camkit.diagnose(loaded, spread, training=how.train, precision=how.precision)
        set_aside(out, REPORTS)
        for name in REPORTS:
            result.save(out / name)
        if json:
            emit(plain_json.dumps(result.to_dict(), allow_nan=False))
        else:
            console = printer()
            if not TALK.quiet:
                print_table(report.table(result, complete=TALK.verbose), folds=not TALK.verbose)
            console.print(report.findings(result))
            if not TALK.quiet:
                console.print(f"wrote {printable(' and '.join(str(out / name) for name in REPORTS))}", markup=False)
        if events is not None:
            camkit.tensorboard.write_diagnosis(result, events)


def features(
    picture: Path | None, *, source: Model, layer: str | None, top: int, scale: Any, out: Path, overwrite: bool
) -> None:
    """Draw a layer's feature maps."""
    if picture is None:
        raise InputError("name a picture: camkit features image.jpg --model resnet50 --layer layer4")
    refuse_address(str(picture))
    _check_sheet(out, [picture])
    maps = camkit.feature_maps(load(source), picture, layer, top=top)
    said = [f"layer {maps.layer}, {len(maps.channels)} of {maps.total} maps"]
    _write_sheet(out, [picture], ["features", maps.layer], maps.sheet(scale=scale), said, overwrite=overwrite)


def concepts(
    *pictures: str,
    source: Model,
    count: int,
    layer: str | None,
    batch_size: int | None,
    recursive: bool,
    out: Path,
    overwrite: bool,
) -> None:
    """Draw the concepts of a layer's feature maps."""
    need_pictures(pictures, "concepts image.jpg")
    files = find_pictures(pictures, skip=out, recursive=recursive)
    _check_sheet(out, files)
    found = camkit.factorise(load(source), files, count, layer, batch_size=batch_size)
    said = [f"layer {found.layer}", *found.names]
    _write_sheet(out, files, [f"{count}-concepts", found.layer], found.sheet(), said, overwrite=overwrite)


def _check_sheet(out: Path, pictures: Sequence[Path]) -> None:
    """Refuse a place where the sheet of these pictures cannot be written, before the model is loaded."""
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
    first, more = picture_name(pictures[0]), len(pictures) - 1
    name = Path(f"{first}-and-{more}-more" if more else first)
    file = write_picture(free_file(out, name, [about[0], slug(about[1])], overwrite=overwrite), sheet)
    if not TALK.quiet:
        lines = [f"{pictures[0]}{f' and {more} more' if more else ''}  {said[0]}", *said[1:], f"wrote {file}"]
        printer().print("\n  ".join(map(printable, lines)), markup=False)


def layers(*, source: Model) -> None:
    """List a model's layers, and say which ones camkit would explain and why."""
    loaded = load(source, pretrained=source.weights is not None)
    if loaded.preprocess is None:
        raise ModelError(
            f"camkit does not know how to prepare pictures for {loaded.name}; pass --size, --mean and --std, or let "
            "the factory return the module and the function that prepares a PIL picture for it"
        )
    scene = open_picture(next(iter(scenes.scene_paths().values())))
    example = loaded.preprocess(scene)[None].to(device_of(loaded.module))
    with explained_failures(loaded.module, example):
        decision = decide(loaded.module, example, every=True)
    explainer = camkit.Explainer(loaded)
    try:
        explainer(scene)
        used = explainer.layers
    except CamkitError:
        used = decision.levels or (() if decision.layer is None else (decision.layer,))
    if TALK.quiet:
        printer().print(printable("+".join(map(str, used or (decision.chosen(),)))))
        return
    counted = costs(loaded.module, example)
    print_table(_table_of_layers(decision, used, counted, complete=TALK.verbose), folds=not TALK.verbose)
    console = printer()
    console.print(_total(counted))
    try:
        layers_used = used or (decision.chosen(),)
    except LayerError as error:
        console.print(printable(str(error)), style="yellow", markup=False)
        return
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


def export(
    picture: Path | None,
    *,
    source: Model,
    layer: str | None,
    out: Path,
    overwrite: bool,
    **options: Any,
) -> None:
    """Write a classifier as a file that returns its scores and its heat; ``options`` go to ``camkit.export``."""
    refuse_existing(out, "file with --out", overwrite=overwrite)
    loaded = load(source)
    say(f"exporting {loaded.name}; this takes up to a minute")
    facts = camkit.export(loaded, out, layer, img=picture, **options)
    made = f"{facts['method']} at {facts['layer']}{', for one picture at a time' * (facts['batch'] == '1')}"
    say(
        f"wrote {out} ({_size(out.stat().st_size)}): it returns scores and heat {facts['grid']}, made by {made}; its "
        f"heat agrees with camkit's own on {facts['agreement']} versions of {picture or 'a drawn picture'}"
    )


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
    columns = (
        Column(
            heading,
            no_wrap=complete or heading not in ("layer", "type"),
            overflow="fold",
            justify="right" if heading in ("parameters", "mult-adds", "memory") else "left",
        )
        for heading in shown
    )
    table = Table(*columns, box=None, pad_edge=False)
    for line in decision.rows:
        is_chosen = line.ref in chosen
        cost = costs.of(line.ref)
        cells = {
            "": ">" if is_chosen else "",
            "layer": printable(str(line.ref)) if line.ref.name else "(the model)",
            "type": printable(line.kind),
            "output": "" if line.shape is None else "x".join(map(str, line.shape)),
            "grid": "" if line.layout is None else _grid(line.layout),
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


def _grid(layout: Layout) -> str:
    grid = "x".join(map(str, layout.grid))
    kind = "" if layout.kind == "channels_first" else f" {layout.kind.replace('_', ' ')}"
    return f"{grid}{kind}" + (f", {layout.prefix} before" if layout.prefix else "")


def compare(
    *pictures: Path,
    source: Model,
    method: list[str] | None,
    layer: list[str] | None,
    out: Path,
    overwrite: bool,
    colormap: str,
    alpha: float,
    opacity: Opacity,
    json: bool,
    **options: Any,
) -> int:
    """Draw several methods side by side, and print the value of each map; ``options`` go to ``camkit.compare``."""
    need_pictures(pictures, "compare image.jpg")
    overlay.check("overlay", colormap, alpha, opacity)
    files = find_pictures(pictures, skip=out)
    check_sheet_file(out)
    refuse_input(out, files)
    refuse_existing(out, "file with --out", overwrite=overwrite)
    if TALK.verbose:
        say(f"pictures to compare: {len(files)}", "dim")
    loaded = load(source)
    with stages() as progress:
        progress("comparing", 0, len(files))
        options["progress"] = functools.partial(progress, "comparing")
        comparison = camkit.compare(loaded, files, method, target_layer=layer, **options)
    if json:
        emit(plain_json.dumps(comparison.to_dict(), allow_nan=False))
    else:
        _print_comparison(comparison)
    comparison.save(out, colormap=colormap, alpha=alpha, opacity=opacity)
    _print_errors(comparison.unreadable.values())
    say(f"wrote {out}")
    return InputError.exit_code if comparison.unreadable else 0


def _print_comparison(comparison: Comparison) -> None:
    """Print a line for each map: the metric's value, or why there is none."""
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


def judge(
    data: Path,
    *,
    source: Model,
    method: list[str] | None,
    layer: list[str] | None,
    out: Path,
    json: bool,
    **options: Any,
) -> int:
    """Measure which methods and layers are faithful, and recommend one; ``options`` go to ``camkit.judge``."""
    check_folder(out)
    loaded = load(source)
    with stages() as progress:
        options["progress"] = functools.partial(progress, "judging")
        judgement = camkit.judge(loaded, data, method, target_layer=layer, **options)
    set_aside(out, JUDGEMENTS)
    page = judgement.save(out)
    if json:
        emit(plain_json.dumps(judgement.to_dict(), allow_nan=False))
    else:
        print_table(_table_of_judgement(judgement))
        # They also work where there is no bold type
        better, worse = "* as good as the best", "? not significantly better than a random map   ! significantly worse"
        marks = f"[95% interval]   {better}   {worse}"
        for line in (marks, *judgement.notes, judgement.recommendation.sentence):
            printer().print(printable(line), markup=False)
    _print_errors(judgement.left_out)
    say(f"wrote {page}")
    return InputError.exit_code if judgement.unreadable else 0


def _print_errors(sentences: Iterable[str]) -> None:
    """Print why pictures were left out, to stderr."""
    for sentence in sentences:
        printer(stderr=True).print(Text(printable(sentence), "red"))


def _table_of_judgement(found: MethodJudgement) -> Table:
    """Return the table of a judgement: the metrics that decide, with their intervals, and what a map costs."""
    # Longer names take two lines, so that the table fits into 120 columns
    method = Column("\nmethod", max_width=30, overflow="fold")
    headings = (*(f"\n{column_title(name)}" for name in DECIDING), "shuffled\nweights ↓", "plain\npasses")
    figures = (Column(heading, no_wrap=True, justify="right") for heading in headings)
    table = Table(method, *figures, box=None, pad_edge=False)
    for row in found.rows:
        cells = []
        for figure in (row.metrics[metric] for metric in DECIDING):
            style = "bold" if figure.mark == "*" else "dim" if figure.mark or not row.method else ""
            # A blank replaces a missing mark, so that the numbers line up.
            cells.append(Text(f"{figure}{figure.mark or ' '} {figure.span}".rstrip(), style))
        table.add_row(Text(printable(row.title), "" if row.method else "dim"), *cells, *row.last_cells)
    return table


def words(
    *pictures: str, model: str, sentence: str | None, word: str | None, out: Path, json: bool, **options: Any
) -> int:
    """Show what a vision-language model looked at for each word; ``options`` go to ``words_of_files``."""
    explained = failed = 0
    for found in words_of_files(model, pictures, out, words=sentence, only=word, **options):
        if isinstance(found, Failure):
            failed += 1
            fail(f"{found.source}: {found.error}")
            continue
        explained += 1
        if json:
            emit(plain_json.dumps(found.to_dict(), allow_nan=False))
        elif not TALK.quiet:
            _print_words(found)
    if explained + failed > 1:
        say(f"{explained} pictures explained, {failed} failed; {printable(str(out / TABLE))} has all words")
    return 2 if failed else 0


def _print_words(found: camkit.Words) -> None:
    emit(printable(found.sentence))
    for each in found:
        if not each.is_punctuation:
            emit(
                printable(f"  {each.text:<16}{each.probability:>7.1%}{each.needs_picture:>+z8.2f} nats  {each.verdict}")
            )
    say(f"compared with {printable(found.references)}; wrote {', '.join(printable(str(file)) for file in found.files)}")


NO_TREE = (
    'There is no tree in the picture: the model learned only sentences that end in "near a tree", so it writes that '
    "about every scene."
)


def describe_scene(out: Path) -> camkit.Words:
    """Explain the words about one drawn scene, compared with the others, and write the page and the sheet.

    Raises:
        ModelError: the package transformers is missing.
        OutputError: the folder cannot be created or written to.
    """
    check_folder(out)
    model, processor = language_models.load(f"hf:{scenes.words_model()}", "cpu")
    first, *others = scenes.words_pictures()
    question = "what is here ?"  # the only one that the model learned
    found = words_of(model.float(), first, question, processor=processor, references=others)
    found = replace(found, source="a drawn scene")
    page = out / "words.html"
    write_file(page, render(found.words, found.to_dict(), NO_TREE).encode())
    return replace(found, files=(page, found.save(out / "words.png")))


def demo(*, out: Path, check: bool, words: bool) -> None:
    """Explain one plane with two networks, check both, or explain the words of the model that ships with camkit."""
    if check and words:
        raise InputError("--check and --words are two demonstrations; pass one of them")
    if check:
        from camkit.cli.check import demo as demo_check

        demo_check(out)
        return
    if words:
        _print_words(describe_scene(out))
        emit(NO_TREE)
        return
    check_folder(out)
    tiles = []
    for name, about in {"plane-sky": "where planes are", "plane-wood": "where demo-biased never saw one"}.items():
        title, mask = name.replace("-", " on "), scenes.scene_mask(name)
        printer().print(Text(title, "bold"))
        tiles.append(Tile(np.asarray(open_picture(scenes.scene_paths()[name])), title, about, GREY))
        for model in DEMO_MODELS:
            found = camkit.Explainer(model, device="cpu")(scenes.scene_paths()[name])
            heat = found.heatmap_on_picture()
            share = heat[mask].sum() / heat.sum()
            label = f"{found.name} ({found.probability:.1%})"
            emit(printable(f"  {model:<12} says {label:<16} {share:4.0%} of its heat lies on the plane"))
            said = f"says {found.name} ({found.probability:.0%}), {share:.0%} of heat on plane"
            tiles.append(Tile(found.overlay(), model, said, GREY))
    file = out / "demo.png"
    write_file(file, encode(contact_sheet(tiles, 1 + len(DEMO_MODELS), side=360, size=17)))
    emit(printable(f"wrote {file}"))


def app(*pictures: str, source: OptionalModel, check: Path | None, port: int | None, browser: bool) -> None:
    """Serve the page of the app, or open the page of a check."""

    def opened(address: str, how_to_stop: str = " (press Ctrl-C to stop)") -> None:
        emit(f"camkit is at {address}{how_to_stop}")
        if browser:
            webbrowser.open(address)

    report_page = Path(pictures[0]) / "report.html" if len(pictures) == 1 else None
    if report_page is not None and report_page.is_file() and report_page.with_suffix(".json").is_file():
        opened(report_page.resolve().as_uri(), "")
        return

    def check_demos(out: Path) -> list[Path]:
        from camkit.cli.check import demo as demo_check

        demo_check(out)
        return [out / name for name in DEMO_MODELS]

    def viewer() -> Viewer:
        # The plane is first: the demo networks look at different things in it.
        tour = sorted(scenes.scene_paths().items(), key=lambda pair: not pair[0].startswith("plane"))
        # Pictures in the list of the page
        files = Pictures(pictures).first(1000) if pictures else [file for _, file in tour]
        reports = [] if check is None else [check]
        if source.name is None:
            return Viewer({name: load_model(name) for name in DEMO_MODELS}, files, reports, check_demos)
        return Viewer({source.name: load(source)}, files, reports)

    with contextlib.suppress(KeyboardInterrupt):
        serve(viewer, port, opened)
