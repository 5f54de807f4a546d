"""``camkit compare`` and ``camkit judge``: methods side by side, and measured over a sample of pictures."""

from __future__ import annotations

import json as plain_json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from camkit.cli.terminal import emit, printer, say, tell
from camkit.comparison.compare import REFERENCE_TITLES, Comparison, check_sheet_file, value_words, words_of
from camkit.comparison.compare import compare as compared
from camkit.drawing import overlay
from camkit.drawing.figure import percent
from camkit.errors import InputError, OutputError, printable
from camkit.images.files import check_folder, refuse_input, set_aside
from camkit.images.listing import find_pictures

if TYPE_CHECKING:
    from camkit.cli.options import Source
    from camkit.types import Precision


def run(
    pictures: Sequence[Path],
    source: Source,
    target: str | None,
    methods: list[str] | None,
    layers: list[str] | None,
    precision: Precision,
    metric: str,
    out: Path,
    *,
    overwrite: bool,
    colours: tuple[str, float],
    json: bool,
) -> int:
    """Compare methods, write the sheet, and print the value of each map."""
    colormap, alpha = colours
    overlay.check("overlay", colormap, alpha)
    files = find_pictures(pictures, skip=out)
    check_sheet_file(out, len(files) * max(1, len(layers or ())))
    refuse_input(out, files)
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists already; name another file with --out, or pass --overwrite")
    tell(f"pictures to compare: {len(files)}")
    comparison = compared(
        source.load(), files, methods, target_layer=layers, target=target, precision=precision, metric=metric
    )
    if json:
        emit(plain_json.dumps(comparison.to_dict(), allow_nan=False))
    else:
        _print(comparison)
    comparison.save(out, colormap=colormap, alpha=alpha)
    _print_errors(comparison.unreadable.values())
    say(f"wrote {out}")
    return InputError.exit_code if comparison.unreadable else 0


def _print(comparison: Comparison) -> None:
    """Print a line for each map: the metric's value, or why there is none."""
    for row in comparison.rows:
        probability = "" if row.probability is None else f" {percent(row.probability)}"
        answer = f" (the model's answer: {row.answers})" if row.answer else ""
        layer = f", layer {row.layer}" if row.layer else ""
        emit(printable(f"{row.source}: {row.label}{probability}{answer}{layer}"))
        for compared_map in row.maps:
            emit(printable(f"  {compared_map.method:<22}{words_of(comparison.metric, compared_map)}"))
        for name, value in row.by_chance.items():
            emit(printable(f"  {f'({REFERENCE_TITLES[name]})':<22}{value_words(comparison.metric, value)}"))


def run_judge(
    data: Path,
    source: Source,
    target: str | None,
    methods: list[str] | None,
    layers: list[str] | None,
    precision: Precision,
    sample: tuple[int, int],
    out: Path,
    *,
    json: bool,
) -> int:
    """Judge methods, write the reports, and print the table, what the reader should know, and the recommendation."""
    from camkit.cli import text
    from camkit.cli.bars import stages
    from camkit.comparison.judge import judge
    from camkit.comparison.judgement import REPORTS

    check_folder(out)
    loaded = source.load()
    pictures, seed = sample
    with stages() as progress:
        judgement = judge(
            loaded,
            data,
            methods,
            target_layer=layers,
            target=target,
            pictures=pictures,
            seed=seed,
            precision=precision,
            progress=lambda done, of: progress("judging", done, of),
        )
    set_aside(out, REPORTS)
    page = judgement.save(out)
    if json:
        emit(plain_json.dumps(judgement.to_dict(), allow_nan=False))
    else:
        table = text.judgement(judgement)
        console = printer()
        text.wide(table, console).print(table)
        for line in (text.JUDGEMENT_MARKS, *judgement.notes, judgement.recommendation.sentence):
            console.print(printable(line), markup=False)
    _print_errors(judgement.left_out)
    say(f"wrote {page}")
    return InputError.exit_code if judgement.unreadable else 0


def _print_errors(sentences: Iterable[str]) -> None:
    """Print why pictures were left out, to stderr."""
    for sentence in sentences:
        printer(stderr=True).print(Text(printable(sentence), "red"))
