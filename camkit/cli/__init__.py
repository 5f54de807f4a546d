"""The command line: parses arguments and passes them on. Each command imports what it needs only when it runs."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

import camkit
from camkit.cli.check import checks, demo_check
from camkit.cli.diagnose import diagnose, features
from camkit.cli.options import Source, events_into
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import QuietConsole, discard_output, fail, plain_warnings, print_traceback, printer, say
from camkit.errors import CamkitError, InputError, OutputError, refusing_exit

if TYPE_CHECKING:
    from typing import TypeAlias

    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    Row: TypeAlias = Written | WrittenVideo | Failure

_MOST_WITHOUT_BAR = 3
"""Up to this many pictures are explained before a progress bar would be read."""

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""Exit codes of every shell: 128 plus the number of the signal (SIGINT, SIGPIPE)."""

app = App(
    name="camkit",
    version=camkit.__version__,
    help="Show which pixels a vision model used. Explains pictures, or runs one of the commands below.\n\n"
    "Example: camkit image.jpg --model resnet50",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    console=QuietConsole(),
    error_console=QuietConsole(stderr=True),
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
    targets: TargetOptions | None = None,
    precision: Literal["fp32", "bf16", "fp16", "bf16-forced"] = "fp32",
    batch_size: int = 32,
    out: Path = Path("camkit-out"),
    style: str = "figure",
    colormap: str = "turbo",
    alpha: float = 0.5,
    scale: Literal["shared", "each"] | None = None,
    every: int = 1,
    json: Annotated[bool, Parameter(negative=())] = False,
    tensorboard: Path | None = None,
) -> int:
    """Explain pictures: what the model sees in each, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
        source: The model.
        method: How to weight the feature maps; "camkit methods" lists all. Default: gradcam, and hirescam for boxes.
        layer: The layer to explain; several are fused. "camkit layers" lists all. Default: camkit chooses.
        fuse: How to combine several layers into one map.
        targets: What to explain.
        precision: The number format of the computation; bf16 and fp16 are faster on hardware made for them. On a CPU
            without units for bf16, bf16 runs in fp32; bf16-forced does not.
        batch_size: Pictures per pass; halved automatically if memory runs out.
        out: The folder for the drawn pictures.
        style: figure (with a caption and a colour bar), overlay, side-by-side or heatmap.
        colormap: One of OpenCV's colour maps: turbo, jet, viridis, inferno, ...
        alpha: The weight of the colours over the picture, 0 to 1.
        scale: shared draws all pictures on one scale of colours, so that they can be compared; it explains each twice.
            each draws every map on its own scale. Default: the targets of one picture share a scale.
        every: Draw every so many frames of a video.
        json: Print one JSON object per picture and target instead of text.
        tensorboard: A folder for TensorBoard event files with the drawn pictures.
    """
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.engine.passes import usable_precision
    from camkit.images.files import find_pictures
    from camkit.methods import find_method
    from camkit.models import device_of
    from camkit.scale.folder import Drawing, explain_files

    drawing = Drawing(style, colormap, alpha, scale or "shared")
    if method is not None and ":" not in source.model:  # mine.py:build may register methods
        find_method(method)
    targets = targets or TargetOptions()
    targets.check()
    files = find_pictures(pictures, skip=out)
    loaded = source.load()
    precision, precision_note = usable_precision(precision, device_of(loaded.module))
    for note in filter(None, (loaded.note, precision_note)):
        say(note)
    rows = explain_files(
        loaded,
        files,
        out,
        drawing,
        method=method,
        layers=layer,
        targets=targets.targets(files, loaded.preprocess),
        precision=precision,
        batch_size=batch_size,
        fuse=fuse,
        one_scale=scale == "shared",
        every=every,
    )
    with events_into(tensorboard) as events:
        return _report(rows if events is None else _with_events(rows, events), len(files), as_json=json)


def _with_events(rows: Iterator[Row], events: Any) -> Iterator[Row]:
    """Pass the rows on and write each picture as an event too; a failure to write is raised after the last row."""
    from camkit.scale.folder import Written
    from camkit.tensorboard import write_explanation

    first_error: OutputError | None = None
    for row in rows:
        if first_error is None and isinstance(row, Written):
            try:
                write_explanation(row.explanation, events, tag=f"explain/{row.file.stem}", **vars(row.drawing))
            except OutputError as error:
                first_error = error
        yield row
    if first_error is not None:
        raise first_error


def _report(rows: Iterator[Row], pictures: int, *, as_json: bool) -> int:
    """Print each row when it is finished, above a progress bar if there are many; return the exit code."""
    from rich.progress import Progress

    from camkit.cli import json_lines as lines
    from camkit.cli import text
    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    console = printer()
    code = 0
    finished: set[str | None] = set()
    bar = QuietConsole(stderr=True)
    with Progress(
        console=bar, transient=True, disable=pictures <= _MOST_WITHOUT_BAR or not bar.is_terminal
    ) as progress:
        task = progress.add_task("explaining", total=pictures)
        for row in rows:
            if isinstance(row, Failure):
                code = max(code, getattr(row.error, "exit_code", 0) or CamkitError.exit_code)
            finished.add(row.explanation.source if isinstance(row, Written) else row.source)
            if isinstance(row, WrittenVideo) and row.problem:
                code = max(code, InputError.exit_code)
            if as_json:
                print(lines.render(row), flush=True)  # noqa: T201
            elif isinstance(row, Failure):
                printer(stderr=True).print(text.failure(row))
            else:
                console.print(text.video(row) if isinstance(row, WrittenVideo) else text.row(row))
            progress.update(task, completed=len(finished))
    return code


@app.command
def methods() -> int:
    """List all methods with their papers."""
    from camkit.cli import text
    from camkit.methods import METHODS

    console, table = printer(), text.methods(METHODS.values())
    if not console.is_terminal:
        console = text.wide(table, console)
    console.print(table, soft_wrap=False)
    return 0


@app.command
def layers(*, source: Source) -> int:
    """List a model's layers in execution order, what each costs, and which one camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some.

    Args:
        source: The model.
    """
    from camkit.cli import text
    from camkit.cli.layers import decide_on, model_costs

    loaded = source.load(pretrained=source.weights is not None)
    decision, costs = decide_on(loaded), model_costs(loaded)
    console, table = printer(), text.layers(decision, costs)
    text.wide(table, console).print(table)
    console.print(text.total(costs))
    console.print(text.choice(decision))
    return 0


@app.command
def demo(
    *, out: Path = Path("camkit-out"), check: Annotated[bool, Parameter(name="--check", negative=())] = False
) -> int:
    """Explain one plane with two networks: one looks at the sky, the other at the plane.

    Args:
        out: The folder for the picture, or for the reports.
        check: Run the background check on both networks instead, with scenes drawn on the spot.
    """
    if check:
        return demo_check(out)
    from camkit.cli import text
    from camkit.demo.poster import run

    printer().print(text.demo(run(out)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 means done; ``check`` returns the code of its verdict. 2 means that the call or a file is wrong, and 4 that the
    model or the program failed or called ``sys.exit()``. As in every shell, 130 means interrupted, and 141 means that
    the reader of the output closed it early. ``os._exit()`` and signals end the process at once and cannot be caught.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack letters of a name
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with plain_warnings(), refusing_exit():
            _refuse_empty(typed)
            result: Any = app(typed or ["--help"], exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return InputError.exit_code
    except CamkitError as error:
        fail(str(error))
        return error.exit_code or CamkitError.exit_code  # a class of the user's may say 0
    except KeyboardInterrupt:
        fail("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return _BROKEN_PIPE
    except BaseException as error:  # uncaught, it would end the program with 1, which means FAIL
        if os.environ.get("CAMKIT_TRACEBACK"):
            print_traceback(error)
        first_line = _first_line(error)
        fail(f"the model or the program failed: {type(error).__name__}: {first_line} (CAMKIT_TRACEBACK=1 shows where)")
        return CamkitError.exit_code
    return result if isinstance(result, int) else 0


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message; nothing if the user's class fails to make one."""
    try:
        return (str(error).splitlines() or [""])[0]
    except BaseException:  # whatever it raises, the exit code must not depend on it
        return ""


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, such as an unset variable of the shell: as a path, it would mean the current folder.

    Raises:
        InputError: an argument is empty.
    """
    for number, argument in enumerate(arguments, start=1):
        if re.fullmatch(r"(--[\w-]+=)?", argument):
            where = argument[:-1] or f"argument {number}"
            raise InputError(f"{where} is empty; if it comes from a variable, set that variable")
