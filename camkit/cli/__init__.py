"""The command line: parses arguments and passes them on. Each command imports what it needs only when it runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, RepeatArgumentError

import camkit
from camkit.cli.check import checks, demo_check
from camkit.cli.concepts import concepts
from camkit.cli.configured import fill_in
from camkit.cli.diagnose import diagnose, features
from camkit.cli.options import METHOD, OUTPUT, RUN, TARGET, Common, Source, actors_of, events_into, refuse_fractions
from camkit.cli.rows import Form, PassProgress, report
from camkit.cli.targets import TargetOptions
from camkit.cli.terminal import (
    TALK,
    OutputClosedError,
    QuietConsole,
    discard_output,
    fail,
    plain_warnings,
    print_traceback,
    printer,
    say,
)
from camkit.engine.allocator import reuse_large_blocks
from camkit.errors import CamkitError, InputError, OutputError, advising_shell, did_you_mean, refusing_exit

if TYPE_CHECKING:
    from typing import TypeAlias

    from camkit.scale.folder import Run, Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure

    Row: TypeAlias = Written | WrittenVideo | Failure
_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""Exit codes of every shell: 128 plus the number of the signal (SIGINT, SIGPIPE)."""

app = App(
    name="camkit",
    version=camkit.__version__,
    help="Show which pixels a vision model used. camkit explains pictures, or runs one of the commands below.\n\n"
    "Example: camkit image.jpg --model resnet50",
    help_format="markdown",  # joins the lines of a docstring again
    usage="Usage: camkit PICTURES --model NAME [OPTIONS]\n       camkit COMMAND --help",
    suppress_keyboard_interrupt=False,
    console=QuietConsole(),
    error_console=QuietConsole(stderr=True),
    config=[refuse_fractions, fill_in],
)


app.command(checks)
app.command(diagnose)
app.command(features)
app.command(concepts)


@app.default
def explain(
    *pictures: str,
    source: Source,
    targets: TargetOptions | None = None,
    method: Annotated[str | None, Parameter(group=METHOD, metavar="NAME")] = None,
    layer: Annotated[list[str] | None, Parameter(alias="-l", negative=(), group=METHOD, metavar="NAME")] = None,
    fuse: Annotated[Literal["mean", "max", "product"], Parameter(group=METHOD)] = "mean",
    smooth: Annotated[Literal["augment", "eigen", "augment+eigen"] | None, Parameter(group=METHOD)] = None,
    references: Annotated[Path | None, Parameter(group=METHOD, metavar="FOLDER")] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "bf16-forced"], Parameter(group=METHOD)] = "fp32",
    batch_size: Annotated[int | None, Parameter(alias="-b", group=METHOD, metavar="NUMBER")] = None,
    draft: Annotated[bool, Parameter(negative=(), group=METHOD, show_default=False)] = False,
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="PATH")] = Path("camkit-out"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    style: Annotated[str, Parameter(alias="-s", group=OUTPUT, metavar="NAME")] = "figure",
    colormap: Annotated[str, Parameter(group=OUTPUT, metavar="NAME")] = "turbo",
    alpha: Annotated[float, Parameter(group=OUTPUT, metavar="SHARE")] = 0.5,
    scale: Annotated[Literal["shared", "each"] | None, Parameter(group=OUTPUT)] = None,
    max_side: Annotated[int, Parameter(group=OUTPUT, metavar="PIXELS")] = 2048,
    format: Annotated[Literal["jpg", "png"] | None, Parameter(group=OUTPUT)] = None,  # noqa: A002 - the option's name
    every: Annotated[int, Parameter(group=OUTPUT, metavar="FRAMES")] = 1,
    table: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FILE")] = None,
    no_pictures: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    resume: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    csv: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    raw: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    tensorboard: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    ray: Annotated[bool | str, Parameter(group=RUN, negative=(), metavar="[ADDRESS]", show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Explain pictures: what the model sees in each, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
        source: The model.
        targets: What to explain.
        method: How to weight the feature maps; "camkit methods" lists all. Default: auto, with which camkit chooses
            the method and the layer together.
        layer: The layer to explain; repeat the option to fuse several. "camkit layers" lists all. Default: camkit
            chooses.
        fuse: How to combine several layers into one map.
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
        out: The folder for the drawings, with the same subfolders as the pictures; or, for one picture, a file such as
            heat.png.
        overwrite: Replace files that show something else, and the table. Without it, camkit adds what differs to the
            name of the drawing.
        style: figure (with a caption and a colour bar), overlay, side-by-side or heatmap.
        colormap: One of OpenCV's colour maps: turbo, jet, viridis, inferno, ...
        alpha: The weight of the colours over the picture, 0 to 1.
        scale: shared draws all pictures on one scale of colours, so that they can be compared; it explains each twice.
            each draws every map on its own scale. Default: the targets of one picture share a scale.
        max_side: Draw overlays of larger pictures with this many pixels on their longer side; 0 keeps their size.
        format: The type of the drawings. Default: jpg for overlays of a JPEG, otherwise png.
        every: Draw every n-th frame of a video.
        table: Write the results to this table, with a row per picture and target and the raw maps. Its name ends in
            .parquet (a folder of parts; needs pyarrow) or .csv.
        no_pictures: Write only the table, and draw nothing.
        resume: Continue the table of an interrupted run, and skip the pictures that it has.
        json: Print one JSON object per picture and target instead of text.
        csv: Print a table as CSV instead of text, with a row per picture and target.
        raw: Add the raw maps, in the method's units, to the JSON.
        tensorboard: A folder for TensorBoard event files with the drawn pictures.
        ray: Compute on a Ray cluster (extra camkit[ray]): auto, host:port or ray://host:port. Without an address, the
            one in RAY_ADDRESS or on this machine; if there is none, one is started with all cores of this machine.
        common: The config, and how much is printed.
    """
    (common or Common()).begin()
    if json and csv:
        raise InputError("--json and --csv cannot be combined")
    if raw and not json:
        raise InputError("--raw adds the raw maps to the JSON, so it needs --json")
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.engine.passes import usable_precision
    from camkit.images.files import refuse_input
    from camkit.images.listing import Pictures
    from camkit.methods import find_method
    from camkit.models import device_of, usual_batch_size
    from camkit.scale.folder import Drawing, Run, explain_files

    if max_side < 0:
        raise InputError(f"--max-side takes a number of pixels, or 0 to keep the size of the pictures, not {max_side}")
    if no_pictures and table is None:
        raise InputError("--no-pictures writes only the table, so it needs --table")
    if resume and table is None:
        raise InputError("--resume continues a table, so it needs --table")
    drawing = Drawing(style, colormap, alpha, scale or "shared", max_side or None, format)
    if method is not None and ":" not in source.model:  # mine.py:build may register methods
        find_method(method)
    targets = targets or TargetOptions()
    targets.check()
    for written in (out, table):
        if written is not None:
            refuse_input(written, [targets.mask, targets.similar_to, *source.files()])
    files = Pictures(pictures, skip=out, recursive=recursive)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(actors_of(ray))
        loaded = source.load()
        cluster = None if pool is None else source.on_cluster(pool, loaded)
        device = device_of(loaded.module) if pool is None else pool.device
        precision, precision_note = usable_precision(precision, device)
        if precision_note:
            say(precision_note)
        passes = PassProgress()
        rows = explain_files(
            loaded,
            files,
            None if no_pictures else out,
            drawing,
            method=method,
            layers=layer,
            targets=targets.targets(files.first(2), loaded.preprocess),
            precision=precision,
            batch_size=usual_batch_size(device) if batch_size is None else batch_size,
            fuse=fuse,
            smooth=smooth,
            references=references,
            about={
                **source.about(),
                **targets.about(),
                "precision": precision,
                "fuse": fuse,
                "smooth": smooth or "",
                "references": "" if references is None else references.name,
            },
            overwrite=overwrite,
            one_scale=scale == "shared",
            every=every,
            progress=passes,
            table=table,
            resume=resume,
            draft=draft,
            elsewhere=None if cluster is None else cluster.explain,
        )
        form: Form = "json" if json else "csv" if csv else "text"
        events = stack.enter_context(events_into(tensorboard))
        rows = rows if events is None else Run(_with_events(rows, events), rows.stills, rows.max_side)
        return report(rows, files, form, passes, with_raw=raw, table=table)


def _with_events(rows: Run, events: Any) -> Generator[Row, None, None]:
    """Pass the rows on and write each picture as an event too; a failure to write is raised after the last row."""
    from camkit.scale.folder import Written
    from camkit.tensorboard import write_explanation

    first_error: OutputError | None = None
    with rows:
        for row in rows:
            if first_error is None and isinstance(row, Written):
                try:
                    name = Path(row.explanation.source) if row.file is None else row.file
                    write_explanation(row.explanation, events, tag=f"explain/{name.stem}", **row.drawing.options())
                except OutputError as error:
                    first_error = error
            yield row
    if first_error is not None:
        raise first_error


@app.command
def methods() -> int:
    """List all methods with their papers."""
    from camkit.cli import text
    from camkit.methods import METHODS

    console, table = printer(), text.methods(METHODS.values())
    if not console.is_terminal:
        console = text.wide(table, console)
    console.print(table, soft_wrap=False)
    console.print(
        "auto, the default, takes chefer, gradcam-sharpened or gradcam, as the model needs, and hirescam for boxes"
    )
    return 0


@app.command
def layers(*, source: Source, common: Common | None = None) -> int:
    """List a model's layers in execution order, what each costs, and which one camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --quiet, it prints only the name of the
    layer that camkit would explain.

    Args:
        source: The model.
        common: The config, and how much is printed.
    """
    (common or Common()).begin()
    from camkit.cli import text
    from camkit.cli.layers import decide_on, model_costs

    loaded = source.load(pretrained=source.weights is not None)
    decision = decide_on(loaded)
    if TALK.quiet:
        printer().print(text.layer_name(decision))
        return 0
    costs = model_costs(loaded)
    console, table = printer(), text.layers(decision, costs)
    text.wide(table, console).print(table)
    console.print(text.total(costs))
    console.print(text.choice(decision))
    return 0


@app.command
def compare(
    *pictures: Path,
    source: Source,
    target: Annotated[str | None, Parameter(alias="-t", group=TARGET, metavar="CLASS")] = None,
    method: Annotated[list[str] | None, Parameter(negative=(), group=METHOD, metavar="NAME")] = None,
    layer: Annotated[list[str] | None, Parameter(alias="-l", negative=(), group=METHOD, metavar="NAME")] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "bf16-forced"], Parameter(group=METHOD)] = "fp32",
    metric: Annotated[str, Parameter(group=METHOD, metavar="NAME")] = "top-loss",
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = Path("compare.png"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    colormap: Annotated[str, Parameter(group=OUTPUT, metavar="NAME")] = "turbo",
    alpha: Annotated[float, Parameter(group=OUTPUT, metavar="SHARE")] = 0.5,
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Draw several methods side by side on one sheet: methods across, pictures and layers down.

    Each map has the value of one metric: by default, how much of the class's probability is lost if the hottest fifth
    of the picture is blurred.

    Args:
        pictures: Files, folders or quoted glob patterns.
        source: The model.
        target: The class to explain: its label, or its index if no label is that number. Default: each picture's best
            class.
        method: A method; repeat the option for several. "camkit methods" lists all. Default: about a dozen of them.
        layer: A layer; repeat the option for several, each of which gets a row. Default: camkit chooses.
        precision: The number format of the computation, as for explaining pictures.
        metric: What each map is judged by: top-loss, srg, insertion, deletion, average-drop, ...
        out: The file for the sheet, such as compare.png.
        overwrite: Replace the file if it exists.
        colormap: One of OpenCV's colour maps.
        alpha: The weight of the colours over the picture, 0 to 1.
        json: Print the values as one JSON object instead of a table.
        common: The config, and how much is printed.
    """
    (common or Common()).begin()
    if not pictures:
        raise InputError("name at least one picture: camkit compare image.jpg --model resnet50")
    from camkit.cli.compare import run

    return run(
        pictures,
        source,
        target,
        method,
        layer,
        precision,
        metric,
        out,
        overwrite=overwrite,
        colours=(colormap, alpha),
        json=json,
    )


@app.command
def judge(
    data: Path,
    *,
    source: Source,
    target: Annotated[str | None, Parameter(alias="-t", group=TARGET, metavar="CLASS")] = None,
    method: Annotated[list[str] | None, Parameter(negative=(), group=METHOD, metavar="NAME")] = None,
    layer: Annotated[list[str] | None, Parameter(alias="-l", negative=(), group=METHOD, metavar="NAME")] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "bf16-forced"], Parameter(group=METHOD)] = "fp32",
    pictures: Annotated[int, Parameter(group=RUN, metavar="NUMBER")] = 50,
    seed: Annotated[int, Parameter(group=RUN, metavar="NUMBER")] = 0,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-judge"),
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common | None = None,
) -> int:
    """Measure which methods and layers are faithful on a model, over a sample of pictures.

    It ends with a recommendation and its reason, and writes judge.html, judge.json and judge.md. The reports of an
    earlier run are kept as before-judge.html and so on.

    Args:
        data: A folder of pictures.
        source: The model.
        target: The class to explain: its label, or its index if no label is that number. Default: each picture's best
            class.
        method: A method; repeat the option for several. "camkit methods" lists all. Default: about a dozen of them.
        layer: A layer; repeat the option for several. Default: camkit chooses.
        precision: The number format of the computation, as for explaining pictures.
        pictures: Use at most this many pictures: a random sample if there are more.
        seed: The seed of the sample and of all draws.
        out: The folder for the reports.
        json: Print the judgement as one JSON object instead of a table.
        common: The config, and how much is printed.
    """
    (common or Common()).begin()
    from camkit.cli.compare import run_judge

    return run_judge(data, source, target, method, layer, precision, (pictures, seed), out, json=json)


@app.command
def demo(
    *,
    out: Annotated[Path, Parameter(alias="-o", metavar="FOLDER")] = Path("camkit-out"),
    check: Annotated[bool, Parameter(name="--check", negative=(), show_default=False)] = False,
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


@app.command(name="--install-completion")
def install_completion(shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> int:
    """Install the completion of commands and options for your shell.

    Args:
        shell: The shell. Default: the one that runs camkit.
    """
    from cyclopts.completion import ShellDetectionError

    try:
        file = app.install_completion(shell=shell)
    except ShellDetectionError as error:
        raise InputError("camkit cannot tell which shell this is; name it: camkit --install-completion bash") from error
    except OSError as error:
        raise OutputError(f"the completion cannot be written: {error}") from error
    printer().print(f"wrote {file}; start a new shell to use it", markup=False)
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
    reuse_large_blocks()
    TALK.set()
    try:
        with plain_warnings(), refusing_exit(), advising_shell():
            _refuse_empty(typed)
            _refuse_mistyped_command(typed)
            try:
                command, bound, _ = app.parse_args(typed or ["--help"], exit_on_error=False, print_error=False)
            except CycloptsError as error:  # one that the user's code raises later is not a mistake in the call
                fail(_about_call(error, typed))
                return InputError.exit_code
            result: Any = command(*bound.args, **bound.kwargs)
    except CamkitError as error:
        if TALK.verbose:
            print_traceback(error)
        fail(str(error))
        return error.exit_code or CamkitError.exit_code  # a class of the user's may say 0
    except KeyboardInterrupt:
        fail("interrupted")
        return _INTERRUPTED
    except OutputClosedError:
        discard_output()
        return _BROKEN_PIPE
    except BaseException as error:  # uncaught, it would end the program with 1, which means FAIL
        if TALK.verbose or os.environ.get("CAMKIT_TRACEBACK"):
            print_traceback(error)
        if isinstance(error.__cause__, StopIteration):  # raised in a generator, it becomes a RuntimeError
            error = error.__cause__
        first_line = _first_line(error)
        fail(f"the model or the program failed: {type(error).__name__}: {first_line} (CAMKIT_TRACEBACK=1 shows where)")
        return CamkitError.exit_code
    return result if isinstance(result, int) else 0


def _about_call(error: CycloptsError, typed: Sequence[str]) -> str:
    """Return one sentence about a call that does not fit the command's options."""
    if "-" in typed:
        return "camkit does not read pictures from standard input; save the picture to a file and pass the file"
    argument = getattr(error, "argument", None)
    is_missing = isinstance(error, MissingArgumentError) and argument is not None and "--model" in argument.names
    if is_missing and not {"--model", "-m"} & set(typed):
        return (
            "name the model: --model resnet50 (camkit --help lists the kinds), or name in camkit.toml's [model] table"
        )
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword or error.token.value} was given twice, but it takes one value"
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message; nothing if the user's class fails to make one."""
    try:
        return (str(error).splitlines() or [""])[0]
    except BaseException:  # whatever it raises, the exit code must not depend on it
        return ""


def _refuse_mistyped_command(typed: Sequence[str]) -> None:
    """Refuse a first word that is neither a command nor a file but looks like a mistyped command.

    A name with a suffix, a folder or a wildcard is a picture's.

    Raises:
        InputError: the word is mistyped.
    """
    parent, words = (checks, typed[1:]) if typed[:1] == ["check"] else (app, typed)
    commands = [name for name in parent if not name.startswith("-")]
    word = words[0] if words else ""
    if word == "help" and not os.path.lexists(word):
        raise InputError("'help' is neither a command nor a file; did you mean '--help'?")
    if word not in commands and re.fullmatch(r"[\w-]*\w", word) and word[0] != "-" and not os.path.lexists(word):
        hint = did_you_mean(word, commands)
        if hint:
            raise InputError(f"{word!r} is neither a command nor a file{hint}")


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, such as an unset variable of the shell: as a path, it would mean the current folder.

    Raises:
        InputError: an argument is empty.
    """
    for number, argument in enumerate(arguments, start=1):
        if re.fullmatch(r"(--[\w-]+=)?", argument):
            where = argument[:-1] or f"argument {number}"
            raise InputError(f"{where} is empty; if it comes from a variable, set that variable")
