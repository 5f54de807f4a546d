"""The command line: parses arguments and hands them on. PyTorch is imported by the commands that need it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.text import Text

import camkit
from camkit.errors import CamkitError, InputError

if TYPE_CHECKING:
    from camkit.background.config import Settings
    from camkit.background.values import Stage
    from camkit.runs import Written
    from camkit.values import Failure, LoadedModel

_A_FEW = 3


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the program by itself


app = App(
    name="camkit",
    version=camkit.__version__,
    help="Show which pixels a vision model used. Explains pictures, or runs one of the commands below.\n\n"
    "Example: camkit image.jpg --model resnet50",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    console=_Console(),
)


def _console(*, stderr: bool = False) -> Console:
    return _Console(stderr=stderr, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Where a model's weights are, and what to change in how its pictures are prepared.

    Attributes:
        weights: A local state dict (.pth, .pt, .safetensors), or a name such as IMAGENET1K_V1. Without it the published
            weights are used, and downloaded the first time.
        device: cpu, cuda, cuda:1, mps; the best there is if not given.
        size: Side of the model's input in pixels, or height x width: 224, 224x336.
        mean: Mean of each channel, of values 0..1: 0.485,0.456,0.406.
        std: Standard deviation of each channel: 0.229,0.224,0.225.
        labels: A file with the names of the classes: one a line, or JSON.
        text: A class of a CLIP-like model, as text; given once for each.
    """

    weights: str | None = None
    device: str | None = None
    size: str | None = None
    mean: str | None = None
    std: str | None = None
    labels: Path | None = None
    text: Annotated[list[str] | None, Parameter(negative=())] = None

    def load_named(self, name: str, *, pretrained: bool = True) -> LoadedModel:
        """Load a model."""
        from camkit.models import load_model, read_labels

        return load_model(
            name,
            self.weights,
            self.device,
            pretrained=pretrained,
            size=None if self.size is None else _size(self.size),
            mean=None if self.mean is None else _numbers("mean", self.mean),
            std=None if self.std is None else _numbers("std", self.std),
            labels=None if self.labels is None else read_labels(self.labels),
            text=self.text,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source(Preparing):
    """Which model, and what to change in how its pictures are prepared.

    Attributes:
        model: A network of torchvision (resnet50, vit_b_16, ...), timm:NAME, hf:NAME or a Hugging Face folder,
            file.py:factory or package.module:factory, demo-biased or demo-fair.
    """

    model: str

    def load(self, *, pretrained: bool = True) -> LoadedModel:
        """Load the model."""
        return self.load_named(self.model, pretrained=pretrained)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CheckedSource(Preparing):
    """Which model is checked; the config's where none is named.

    Attributes:
        model: As for explaining pictures; the config's if not given.
    """

    model: str | None = None

    def settled(self, settings: Settings) -> LoadedModel:
        """Load the model that is named here or, option by option, in the config."""
        part = settings.model
        name = self.model or part.name
        if name is None:
            raise InputError("name the model: camkit check DATA --model resnet50, or [model] name in camkit.toml")
        if self.model is not None and self.model != part.name:
            return self.load_named(name)
        size = part.size if isinstance(part.size, int) or part.size is None else "x".join(map(str, part.size))
        there = {
            "weights": part.weights,
            "device": part.device,
            "size": None if size is None else str(size),
            "mean": None if part.mean is None else ",".join(map(str, part.mean)),
            "std": None if part.std is None else ",".join(map(str, part.std)),
            "labels": part.labels,
            "text": part.text,
        }
        given = {key: value for key, value in vars(self).items() if key in there and value is not None}
        settled = CheckedSource(**{**there, **given})
        return settled.load_named(name)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--{name} takes numbers separated by commas, not {text!r}") from error


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise InputError(f"--size takes a side in pixels, or height x width as in 224x336, not {text!r}")
    return int(sides[0]), int(sides[-1])


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
    """
    if not pictures:
        raise InputError("name at least one picture: camkit image.jpg --model resnet50 (or try: camkit demo)")
    from camkit.images import find_pictures
    from camkit.methods import find_method
    from camkit.runs import Asked, Drawing, explain_files

    drawing = Drawing(style, colormap, alpha)
    if method is not None:
        find_method(method)
    corners = None if near is None else _numbers("near", near)
    if corners is not None and len(corners) != 4:
        raise InputError(f"--near takes left,top,right,bottom, not {near!r}")
    asked = Asked(tuple(target or ()), top_k, above, versus, direction, box, corners, mask, everywhere, similar_to)
    asked.check()
    found = find_pictures(pictures, skip=out)
    loaded = source.load()
    if loaded.note:
        _say(loaded.note)
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
    return _report(rows, len(found), as_json=json)


def _report(rows: Iterator[Written | Failure], pictures: int, *, as_json: bool) -> int:
    """Print each row as it is finished, over a progress bar when there are many; return the exit code."""
    from rich.progress import Progress

    from camkit.report import console as text
    from camkit.report import json as lines
    from camkit.values import Failure

    console = _console()
    code = 0
    finished: set[str | None] = set()
    bar = _Console(stderr=True)
    with Progress(console=bar, transient=True, disable=pictures <= _A_FEW or not bar.is_terminal) as progress:
        task = progress.add_task("explaining", total=pictures)
        for row in rows:
            if isinstance(row, Failure):
                code = max(code, getattr(row.error, "exit_code", CamkitError.exit_code))
            finished.add(row.source if isinstance(row, Failure) else row.explanation.source)
            if as_json:
                print(lines.render(row), flush=True)  # noqa: T201
            elif isinstance(row, Failure):
                _console(stderr=True).print(text.row(row))
            else:
                console.print(text.row(row))
            progress.update(task, completed=len(finished))
    return code


@app.command
def methods() -> int:
    """List the methods with their papers."""
    from camkit.methods import METHODS
    from camkit.report import console as text

    console, table = _console(), text.methods(METHODS.values())
    if not console.is_terminal:
        console = text.wide(table, console)
    console.print(table, soft_wrap=False)
    return 0


@app.command
def layers(*, source: Source) -> int:
    """List a model's layers in execution order, and which one would be explained, and why.

    The layers are the same with any weights, so none are loaded unless some are named.

    Args:
        source: The model.
    """
    from camkit.report import console as text
    from camkit.runs import probe_model

    found = probe_model(source.load(pretrained=source.weights is not None))
    console, table = _console(), text.layers(found)
    text.wide(table, console).print(table)
    console.print(text.choice(found))
    return 0


checks = App(name="check", help="Answer whether a classifier may ship, or looks at the background.", console=_Console())
app.command(checks)


@checks.default
def check(
    data: Path | None = None,
    *,
    source: CheckedSource | None = None,
    config: Path | None = None,
    regions: Path | None = None,
    class_map: Path | None = None,
    out: Path = Path("camkit-check"),
    baseline: Path | None = None,
    quick: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    inconclusive: Literal["pass", "fail"] = "pass",
) -> int:
    """Answer whether a classifier may ship, or looks at the background.

    Exit codes: 0 may ship, 1 FAIL, 2 the call, the config or the data is wrong, 3 INCONCLUSIVE with
    --inconclusive=fail, 4 the model or the program failed.

    Args:
        data: A folder with a folder per class, a CSV of path and label, or pictures whose regions name classes.
        source: The model.
        config: A camkit.toml; the one of this folder, or pyproject.toml's [tool.camkit], if not given.
        regions: Where the objects' regions are; searched for beside the pictures if not given.
        class_map: A JSON file from the data's classes to the model's outputs.
        out: The folder for the reports.
        baseline: An earlier report.json to compare with.
        quick: A smaller sample.
        resume: Go on with an interrupted check.
        inconclusive: Whether INCONCLUSIVE ends with 0 or 3.
    """
    from camkit.background.config import Settings, find_config, read_config
    from camkit.background.cost import estimate
    from camkit.checking import finish_check, plan_check
    from camkit.overlay import check_folder
    from camkit.report import check_console, markdown

    file = config or find_config(Path())
    settings = Settings() if file is None else read_config(file)
    check_folder(out)
    plan = plan_check(
        (source or CheckedSource()).settled(settings),
        data,
        regions=regions,
        class_map=class_map,
        config=settings,
        quick=quick,
        skip=out,
    )
    console = _console()
    console.print(check_console.understood(plan))
    console.print(check_console.announced(plan, estimate(plan)))
    with _stages() as progress:
        result = finish_check(plan, out, baseline=baseline, resume=resume, progress=progress)
    console.print(check_console.table(result), soft_wrap=False)
    console.print(check_console.verdict(result))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in markdown.workflow_commands(result):
            print(line)  # noqa: T201
    return result.exit_code(inconclusive)


@checks.command
def init(
    data: Path,
    *,
    model: str | None = None,
    regions: Path | None = None,
    class_map: Path | None = None,
    file: Path = Path("camkit.toml"),
) -> int:
    """Write a commented camkit.toml from what is found.

    Args:
        data: The pictures, as for the check.
        model: The model, as for the check.
        regions: Where the objects' regions are; searched for beside the pictures if not given.
        class_map: A JSON file from the data's classes to the model's outputs.
        file: The config to write; an older one is kept.
    """
    from camkit.background.classes import read_class_map
    from camkit.background.data import read_data
    from camkit.background.starter import starter
    from camkit.overlay import write

    if file.exists():
        raise InputError(f"{file} is there already; name another with --file, or remove it")
    only = None if class_map is None else set(read_class_map(class_map))
    found = read_data(data, regions=regions, only=only)
    write(file, starter(found, data, model, regions, class_map).encode())
    _console().print("\n".join(found.facts), markup=False)
    _console().print(f"wrote {file}", markup=False)
    return 0


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[Stage, int, int], None]]:
    """Show how far a check is, a bar per stage, on a terminal; elsewhere a line per stage."""
    from rich.progress import Progress

    bar = _Console(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=bar, transient=True, disable=not bar.is_terminal) as shown:

        def progress(stage: Stage, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=of)
                if not bar.is_terminal:
                    _say(f"{stage}: {of - done} to do")
            shown.update(tasks[stage], completed=done)

        yield progress


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
        return _demo_check(out)
    from camkit.demo import run
    from camkit.report import console as text

    _console().print(text.demo(run(out)))
    return 0


def _demo_check(out: Path) -> int:
    """Check both demo networks; the demonstration ends with 0 whatever the verdicts are."""
    from camkit.checked_demo import run
    from camkit.overlay import check_folder
    from camkit.report import check_console

    check_folder(out)
    with contextlib.ExitStack() as bars:

        def progress(name: str) -> Callable[[Stage, int, int], None]:
            bars.close()
            _say(f"checking {name}")
            return bars.enter_context(_stages())

        found = run(out, progress)
    for result in found.values():
        _console().print(check_console.verdict(result))
    return 0


def _say(message: str, style: str = "bold") -> None:
    _console(stderr=True).print(Text.assemble(("camkit: ", style), message))


def _fail(message: str) -> None:
    _say(message, "bold red")


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
        _fail(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("CAMKIT_TRACEBACK"):
            raise
        what = (str(error).splitlines() or [""])[0]
        _fail(f"the model or the program failed: {type(error).__name__}: {what} (CAMKIT_TRACEBACK=1 shows where)")
        return CamkitError.exit_code
    return result if isinstance(result, int) else 0
