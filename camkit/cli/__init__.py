"""The command line: parses arguments and hands them on. PyTorch is imported by the commands that need it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

import camkit
from camkit.cli.check import checks, demo_check
from camkit.cli.diagnose import diagnose, features
from camkit.cli.options import Source, events_into, numbers
from camkit.cli.terminal import QuietConsole, fail, printer, say
from camkit.errors import CamkitError, InputError, OutputError

if TYPE_CHECKING:
    from camkit.scale.folder import Drawing, Written
    from camkit.types import Failure

_A_FEW = 3

app = App(
    name="camkit",
    version=camkit.__version__,
    help="Show which pixels a vision model used. Explains pictures, or runs one of the commands below.\n\n"
    "Example: camkit image.jpg --model resnet50",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    console=QuietConsole(),
)


app.command(checks)
app.command(diagnose)
app.command(features)


@app.default
def explain(
    *pictures: str,
    source: Source,
    method: str | None = None,
    layer: Annotated[list[str] | None, Parameter(negative=())] = None,
    fuse: Literal["mean", "max", "product"] = "mean",
    target: Annotated[list[str] | None, Parameter(negative=())] = None,
    top_k: int | None = None,
    above: float | None = None,
    versus: str | None = None,
    direction: Literal["up", "down"] | None = None,
    box: int | None = None,
    near: str | None = None,
    mask: Path | None = None,
    everywhere: Annotated[bool, Parameter(negative=())] = False,
    similar_to: Path | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    batch_size: int = 32,
    out: Path = Path("camkit-out"),
    style: str = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    json: Annotated[bool, Parameter(negative=())] = False,
    tensorboard: Path | None = None,
) -> int:
    """Explain pictures: what each shows to the model, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
        source: The model.
        method: How feature maps are weighted; "camkit methods" lists them. gradcam if not given, for boxes hirescam.
        layer: The layer to explain, chosen by itself if not given; several are fused. "camkit layers" lists them.
        fuse: How several layers become one map.
        target: The class to explain, by label or index; may be given several times. The best class if not given.
        top_k: Explain the K best classes, or boxes, of each picture.
        above: Explain every class whose probability (sigmoid) is above this, of a multi-label model.
        versus: Explain the target rather than this class.
        direction: Explain what raises or lowers one number of the output, of a one-logit model or a regression.
        box: Explain a detector's box by its number, from 0.
        near: Explain the box that overlaps most with left,top,right,bottom, in pixels of the model's input.
        mask: Explain the target of a segmentation network within this picture's white part.
        everywhere: Explain the target of a segmentation network everywhere, not only where it is predicted.
        similar_to: Explain how similar the embedding is to that of this picture.
        precision: Of the computation; bf16 and fp16 are faster on hardware made for them.
        batch_size: Pictures per pass; halved by itself when memory runs out.
        out: The folder for the drawn pictures.
        style: overlay, side-by-side or heatmap.
        colormap: One of OpenCV's: turbo, jet, viridis, inferno, ...
        alpha: Weight of the colours over the picture, 0 to 1.
        json: Print one JSON object per picture and target instead of text.
        tensorboard: A folder for event files with the drawn pictures.
    """
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.cli.targets import Asked
    from camkit.images.files import find_pictures
    from camkit.methods import find_method
    from camkit.scale.folder import Drawing, explain_files

    drawing = Drawing(style, colormap, alpha)
    if method is not None and ":" not in source.model:  # the file behind mine.py:build may register its own methods
        find_method(method)
    corners = None if near is None else numbers("near", near)
    if corners is not None and len(corners) != 4:
        raise InputError(f"--near takes left,top,right,bottom, not {near!r}")
    asked = Asked(tuple(target or ()), top_k, above, versus, direction, box, corners, mask, everywhere, similar_to)
    asked.check()
    found = find_pictures(pictures, skip=out)
    loaded = source.load()
    if loaded.note:
        say(loaded.note)
    rows = explain_files(
        loaded,
        found,
        out,
        drawing,
        method=method,
        layers=layer,
        targets=asked.targets(found, loaded.preprocess),
        precision=precision,
        batch_size=batch_size,
        fuse=fuse,
    )
    with events_into(tensorboard) as events:
        return _report(rows if events is None else _noted(rows, events, drawing), len(found), as_json=json)


def _noted(rows: Iterator[Written | Failure], events: Any, drawing: Drawing) -> Iterator[Written | Failure]:
    """Write each row's picture as an event, under the name of its file; what can't be written is raised in the end."""
    from camkit.tensorboard import write_explanation
    from camkit.types import Failure

    failed: OutputError | None = None
    for row in rows:
        if failed is None and not isinstance(row, Failure):
            try:
                write_explanation(row.explanation, events, tag=f"explain/{row.file.stem}", **vars(drawing))
            except OutputError as error:
                failed = error
        yield row
    if failed is not None:
        raise failed


def _report(rows: Iterator[Written | Failure], pictures: int, *, as_json: bool) -> int:
    """Print each row as it is finished, over a progress bar when there are many; return the exit code."""
    from rich.progress import Progress

    from camkit.cli import json_lines as lines
    from camkit.cli import text
    from camkit.types import Failure

    console = printer()
    code = 0
    finished: set[str | None] = set()
    bar = QuietConsole(stderr=True)
    with Progress(console=bar, transient=True, disable=pictures <= _A_FEW or not bar.is_terminal) as progress:
        task = progress.add_task("explaining", total=pictures)
        for row in rows:
            if isinstance(row, Failure):
                code = max(code, getattr(row.error, "exit_code", CamkitError.exit_code))
            finished.add(row.source if isinstance(row, Failure) else row.explanation.source)
            if as_json:
                print(lines.render(row), flush=True)  # noqa: T201
            elif isinstance(row, Failure):
                printer(stderr=True).print(text.failure(row))
            else:
                console.print(text.row(row))
            progress.update(task, completed=len(finished))
    return code


@app.command
def methods() -> int:
    """List the methods with their papers."""
    from camkit.cli import text
    from camkit.methods import METHODS

    console, table = printer(), text.methods(METHODS.values())
    if not console.is_terminal:
        console = text.wide(table, console)
    console.print(table, soft_wrap=False)
    return 0


@app.command
def layers(*, source: Source) -> int:
    """List a model's layers in execution order, what each costs, and which one would be explained, and why.

    Parameters, multiply-adds for one picture and the memory of what a layer returns are counted by torchinfo. The
    layers are the same with any weights, so none are loaded unless some are named.

    Args:
        source: The model.
    """
    from camkit.cli import text
    from camkit.cli.layers import decide_on, model_costs

    loaded = source.load(pretrained=source.weights is not None)
    found, counted = decide_on(loaded), model_costs(loaded)
    console, table = printer(), text.layers(found, counted)
    text.wide(table, console).print(table)
    console.print(text.total(counted))
    console.print(text.choice(found))
    return 0


@app.command
def demo(
    *, out: Path = Path("camkit-out"), check: Annotated[bool, Parameter(name="--check", negative=())] = False
) -> int:
    """Explain the same plane with a network that looks at the sky and one that looks at the plane.

    Args:
        out: The folder for the picture, or the reports.
        check: Ask instead of each network whether it may ship, with scenes drawn on the spot.
    """
    if check:
        return demo_check(out)
    from camkit.cli import text
    from camkit.demo.poster import run

    printer().print(text.demo(run(out)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 the call or a file is wrong, 4 something failed.

    As everywhere, 130 means interrupted, and 141 that what read the output went away before its end.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that the terminal's encoding lacks
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        result: Any = app(typed or ["--help"], exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return InputError.exit_code
    except CamkitError as error:
        fail(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        fail("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("CAMKIT_TRACEBACK"):
            raise
        what = (str(error).splitlines() or [""])[0]
        fail(f"the model or the program failed: {type(error).__name__}: {what} (CAMKIT_TRACEBACK=1 shows where)")
        return CamkitError.exit_code
    return result if isinstance(result, int) else 0
