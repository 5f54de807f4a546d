"""``camkit compare`` and ``camkit judge``: methods side by side, and measured over a sample of pictures."""

from __future__ import annotations

import functools
import json as plain_json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from camkit.cli.options import METHOD, OUTPUT, RUN, TARGET, Common, Source, command
from camkit.cli.terminal import emit, print_table, printer, say, stages, tell
from camkit.errors import InputError, OutputError, printable
from camkit.options import Precision

if TYPE_CHECKING:
    from camkit.metrics.compare import Comparison
    from camkit.metrics.judge import MethodJudgement


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
    if not pictures:
        raise InputError("name at least one picture: camkit compare image.jpg --model resnet50")
    import camkit
    from camkit.drawing import overlay
    from camkit.images.files import refuse_input
    from camkit.images.listing import find_pictures
    from camkit.metrics.compare import check_sheet_file

    overlay.check("overlay", colormap, alpha)
    files = find_pictures(pictures, skip=out)
    check_sheet_file(out)
    refuse_input(out, files)
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists already; name another file with --out, or pass --overwrite")
    tell(f"pictures to compare: {len(files)}")
    loaded = source.load()
    options: dict[str, Any] = {"references": references, "precision": precision, "progress": _foretelling(len(files))}
    comparison = camkit.compare(loaded, files, method, target_layer=layer, target=target, metric=metric, **options)
    if json:
        emit(plain_json.dumps(comparison.to_dict(), allow_nan=False))
    else:
        _print(comparison)
    comparison.save(out, colormap=colormap, alpha=alpha)
    _print_errors(comparison.unreadable.values())
    say(f"wrote {out}")
    return InputError.exit_code if comparison.unreadable else 0


def _foretelling(pictures: int) -> Callable[[int, int], None]:
    """Return a function of the progress that says, after the first picture, how long all pictures will take."""
    from camkit.kit.wording import counted

    if pictures > 1:
        say(f"comparing {counted(pictures, 'picture')}; the first one shows how long it takes")
    return functools.partial(_foretell, "comparing", time.perf_counter())


def _foretell(what: str, start: float, done: int, of: int) -> None:
    from camkit.kit.wording import counted, in_words

    if done == 1 < of:
        say(f"{what} {counted(of, 'picture')} will take {in_words(of * (time.perf_counter() - start))}")


def _print(comparison: Comparison) -> None:
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
    import camkit
    from camkit.images.files import check_folder, set_aside
    from camkit.metrics.judge import REPORTS

    check_folder(out)
    loaded = source.load()
    start = time.perf_counter()
    with stages() as progress:

        def show(done: int, of: int) -> None:
            _foretell("judging", start, done, of)
            progress("judging", done, of)

        options: dict[str, Any] = {"references": references, "precision": precision, "progress": show, "seed": seed}
        judgement = camkit.judge(loaded, data, method, target_layer=layer, target=target, pictures=pictures, **options)
    set_aside(out, REPORTS)
    page = judgement.save(out)
    if json:
        emit(plain_json.dumps(judgement.to_dict(), allow_nan=False))
    else:
        print_table(_table(judgement))
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


def _table(found: MethodJudgement) -> Table:
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
