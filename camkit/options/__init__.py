"""Every option once: its type, its default, what it means, and where it can be given.

``Options`` has the keywords of ``explain`` in Python; each table below it is a table of ``camkit.toml`` and a group of
options of the shell. To add an option, declare it here, and use it. This module imports neither PyTorch nor pydantic,
so that the shell answers ``--help`` at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    get_args,
    get_type_hints,
)
from typing import runtime_checkable as checkable

from annotated_types import Ge, Gt, Interval, Len, Lt

if TYPE_CHECKING:
    import torch

    from camkit.methods.registry import MethodLike
    from camkit.models import Labels
    from camkit.options.settings import Settings
    from camkit.targets import TargetLike
    from camkit.types import Preprocess, Progress, ReferencesLike

Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "bf16-forced"]
Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
Boxes: TypeAlias = Literal["nanodet", "yolo", "yolox"]
"""The detectors whose raw outputs camkit decodes."""
Fusion: TypeAlias = Literal["mean", "max", "product"]
Smoothing: TypeAlias = Literal["augment", "eigen", "augment+eigen"]
"""How a map is smoothed: the mean over changed versions of the picture, the first principal component, or both."""
Spread: TypeAlias = Literal["measured", "even"]
"""How a grid is spread over the picture: each cell where a measurement found it to look, or evenly."""
Scale: TypeAlias = Literal["shared", "each"]
"""Whether maps are drawn on one scale, or each on its own."""
Opacity: TypeAlias = Literal["evidence", "even"]
"""Whether the colours over a picture fade out where there is no evidence, or have the same weight everywhere."""


Targets: TypeAlias = "TargetLike | Sequence[TargetLike] | None"
Config: TypeAlias = "Settings | Mapping[str, Any] | str | Path"
"""What ``config`` takes: a file, or its tables as a mapping."""


class ExplainerOptions(TypedDict, total=False):
    """The options of an ``Explainer``, which explains each; None stands for the usual."""

    method: MethodLike | None
    preprocess: Preprocess | None
    labels: Labels | None
    device: str | torch.device | None
    precision: Precision | None
    fuse: Fusion | None
    smooth: Smoothing | None
    spread: Spread | None
    config: Config | None
    progress: Progress | None
    references: ReferencesLike | None
    inputs: Mapping[str, Any] | None
    picture: str | None
    output: str | int | None
    boxes: Boxes | None
    activation: Activation | None


class Options(ExplainerOptions, total=False):
    """The options of ``explain`` and ``explain_many``."""

    target: Targets
    batch_size: int | None


USUAL: dict[str, Any] = {
    "precision": "fp32",
    "fuse": None,
    "smooth": None,
    "spread": "measured",
    "progress": None,
    "references": None,
    "batch_size": None,
}
"""The options of each explanation besides the method and the layer, with what is usual."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "fuse": get_args(Fusion),
    "precision": get_args(Precision),
    "smooth": get_args(Smoothing),
    "spread": get_args(Spread),
}
"""The allowed values of the options of each explanation that have only a few."""


@dataclass(frozen=True)
class Option:
    """What the shell says about an option.

    Attributes:
        help: what it means.
        metavar: what its value is called.
        short: its one-letter name.
        name: its long name, if it differs from the key in the config.
        shell: the type of what is typed, if it differs from the config's.
        in_config: whether ``camkit.toml`` has it.
        in_shell: whether the shell's table has it; the folder of pictures is an argument there.
        is_output: whether it is about files and drawings; otherwise it is listed with the others of its table.
        of_maps: whether it changes the maps. Then it is an argument of ``explain_many`` too, and a table is continued
            only with the same value.
    """

    help: str
    metavar: str | None = None
    short: str | None = None
    name: str | None = None
    shell: Any = None
    in_config: bool = True
    in_shell: bool = True
    is_output: bool = False
    of_maps: bool = False


def options_of(table: type) -> dict[str, Option]:
    """Return the options of a table, by their keys in the config."""
    hints = get_type_hints(table, include_extras=True)
    return {
        field.name: next(part for part in hints[field.name].__metadata__ if isinstance(part, Option))
        for field in fields(table)
    }


def given_in(table: Any) -> dict[str, Any]:
    """Return the values of a table that differ from their defaults."""
    usual = {field.name: field.default for field in fields(table)}
    return {name: value for name, value in vars(table).items() if value != usual[name]}


@checkable
class Named(Protocol):
    """What has a name, as an entry of ``camkit.METHODS``."""

    name: str


class _Table:
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "arbitrary_types_allowed": True,
    }


_Whole: TypeAlias = Annotated[int, Ge(1)]
_Share: TypeAlias = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Model(_Table):
    """The model of every command, and changes to its preprocessing."""

    name: Annotated[
        str | None,
        Option(
            "A torchvision network (resnet50, vit_b_16, ...), timm:NAME, hf:NAME or a Hugging Face folder, "
            "file.py:factory or package.module:factory, an exported file (.onnx, .pt2, .ts), demo-biased or demo-fair. "
            "Not needed if a config names it.",
            "NAME",
            "-m",
            name="model",
        ),
    ] = None
    weights: Annotated[
        str | None,
        Option(
            "A local state dict (.pth, .pt, .safetensors), or a name such as IMAGENET1K_V1. Default: the published "
            "weights, downloaded the first time.",
            "FILE",
            "-w",
        ),
    ] = None
    device: Annotated[
        str | None,
        Option("cpu, cuda, cuda:1, mps. Default: the first available of cuda, mps and cpu.", "NAME", "-d"),
    ] = None
    size: Annotated[
        _Whole | Annotated[list[_Whole], Len(2, 2)] | None,
        Option("The side of the model's input in pixels, or height x width: 224, 224x336.", "PIXELS", shell=str),
    ] = None
    mean: Annotated[
        list[float] | None,
        Option("The mean of each channel, for values from 0 to 1: 0.485,0.456,0.406.", "R,G,B", shell=str),
    ] = None
    std: Annotated[
        list[Annotated[float, Gt(0)]] | None,
        Option("The standard deviation of each channel: 0.229,0.224,0.225.", "R,G,B", shell=str),
    ] = None
    labels: Annotated[Path | None, Option("A file with the names of the classes: one per line, or JSON.", "FILE")] = (
        None
    )
    text: Annotated[
        list[str] | None,
        Option("A class of a CLIP-like model, as text; repeat the option for each class.", "TEXT"),
    ] = None
    output: Annotated[
        str | int | None,
        Option("Which of several outputs holds the scores: its name, or its index, from 0.", "NAME", shell=str | None),
    ] = None
    boxes: Annotated[
        Boxes | None,
        Option("Decode the raw outputs of a detector, such as an ONNX file of NanoDet, YOLO (v5 and later) or YOLOX."),
    ] = None
    activation: Annotated[
        Activation | None,
        Option(
            "What turns the scores into probabilities; sigmoid if classes do not exclude each other. Default: what the "
            "model says; otherwise softmax, or sigmoid for a single score."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option(
            "Run the code that comes with a model: in a Hugging Face folder, in TorchScript, or in an ultralytics "
            "file. By default, it is refused.",
            in_config=False,
        ),
    ] = False

    def describes(self, name: str) -> bool:
        """Return whether these settings apply to the model with this name: they name this model, or none."""
        return self.name is None or _absolute(self.name) == _absolute(name)

    def files(self) -> list[Path | None]:
        """Return the files that the options name."""
        return [self.labels, None if self.weights is None else Path(self.weights)]


@dataclass(frozen=True, kw_only=True)
class Against(_Table):
    """The second of two models to compare; only in the shell."""

    against: Annotated[
        str | None,
        Option(
            "Compare with this second model, named as for --model. All options but --weights apply to both models.",
            "NAME",
        ),
    ] = None
    against_weights: Annotated[
        str | None,
        Option("The weights of the second model; without --against, it is the network of --model.", "FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Explain(_Table):
    """How pictures are explained and drawn.

    What concerns drawings and files changes nothing in Python. ``references`` hold for the methods that use reference
    pictures; a config's are ignored by other methods.
    """

    method: Annotated[
        str | None,
        Option(
            'How to weight the feature maps; "camkit methods" lists all. Default: auto, with which camkit chooses the '
            "method and the layer together.",
            "NAME",
            of_maps=True,
        ),
    ] = None
    layer: Annotated[
        str | list[str] | None,
        Option(
            'The layer to explain; repeat the option to fuse several. "camkit layers" lists all. Default: camkit '
            "chooses.",
            "NAME",
            "-l",
            shell=list[str] | None,
            of_maps=True,
        ),
    ] = None
    fuse: Annotated[
        Fusion | None,
        Option("How to combine several layers into one map. Default: product for refinecam, else mean.", of_maps=True),
    ] = None
    smooth: Annotated[
        Smoothing | None,
        Option(
            "augment averages the maps of the picture and its mirror image, each with 0.9, 1 and 1.1 times its "
            "contrast, in six passes; eigen keeps the first principal component of the weighted feature maps.",
            of_maps=True,
        ),
    ] = None
    references: Annotated[
        Path | None,
        Option(
            "The pictures with which the method expected compares each picture; 8 to 16 are enough. Default: smooth "
            "noise that camkit makes.",
            "FOLDER",
            of_maps=True,
        ),
    ] = None
    precision: Annotated[
        Precision,
        Option(
            "The number format of the computation; bf16 and fp16 are faster on hardware made for them. On a CPU "
            "without units for bf16, bf16 runs in fp32; bf16-forced uses bf16 anyway.",
            of_maps=True,
        ),
    ] = "fp32"
    batch_size: Annotated[
        int | None,
        Ge(1),
        Option(
            "Pictures per pass; halved automatically if memory runs out. Default: 32 on a GPU, 4 on a CPU.",
            "NUMBER",
            "-b",
        ),
    ] = None
    draft: Annotated[
        bool,
        Option(
            "Read large JPEG files at a half, a quarter or an eighth of their size. This is faster and changes the "
            "maps a little.",
            of_maps=True,
        ),
    ] = False
    recursive: Annotated[
        bool, Option("Search subfolders too, which is the default, or leave them out.", in_config=False)
    ] = True
    out: Annotated[
        Path,
        Option(
            "The folder for the drawings, with the same subfolders as the pictures; or, for one picture, a file such "
            "as heat.png.",
            "PATH",
            "-o",
            is_output=True,
        ),
    ] = Path("camkit-out")
    overwrite: Annotated[
        bool, Option("Replace files that camkit did not draw, and the table.", in_config=False, is_output=True)
    ] = False
    style: Annotated[
        str,
        Option(
            "figure (with a caption and a colour bar), overlay, side-by-side, heatmap, or slide: one slide of a single "
            "picture (.png, .pdf or .svg), with the heat of the answer and of the class in --true, or of each "
            "--target.",
            "NAME",
            "-s",
            is_output=True,
        ),
    ] = "figure"
    colormap: Annotated[
        str, Option("One of OpenCV's colour maps: turbo, jet, viridis, inferno, ...", "NAME", is_output=True)
    ] = "turbo"
    alpha: Annotated[_Share, Option("The weight of the colours over the picture, 0 to 1.", "SHARE", is_output=True)] = (
        0.5
    )
    opacity: Annotated[
        Opacity,
        Option(
            "evidence fades the colours out where the heat is low, so that the picture stays as it is where there is "
            "none. even gives all colours the same weight.",
            is_output=True,
        ),
    ] = "evidence"
    scale: Annotated[
        Scale | None,
        Option(
            "shared draws all pictures on one scale of colours, so that they can be compared; it explains each twice. "
            "each draws every map on its own scale. Default: the targets of one picture share a scale, but each box of "
            "a detector has its own.",
            is_output=True,
        ),
    ] = None
    max_side: Annotated[
        int,
        Ge(0),
        Option(
            "Draw overlays of larger pictures with this many pixels on their longer side; 0 keeps their size.",
            "PIXELS",
            is_output=True,
        ),
    ] = 2048
    format: Annotated[
        Literal["jpg", "png"] | None,
        Option("The type of the drawings. Default: jpg for overlays of a JPEG, otherwise png.", is_output=True),
    ] = None
    every: Annotated[int, Option("Draw every n-th frame of a video.", "FRAMES", in_config=False, is_output=True)] = 1

    def of_maps(self) -> dict[str, Any]:
        """Return the values of the options that change the maps."""
        return {name: getattr(self, name) for name, option in options_of(Explain).items() if option.of_maps}


@dataclass(frozen=True, kw_only=True)
class Results(_Table):
    """Where the results go besides the drawings, and how they are printed; in the shell alone."""

    table: Annotated[
        Path | None,
        Option(
            "Write the results to this table, with a row per picture and target and the raw maps. Its name ends in "
            ".parquet (a folder of parts; needs pyarrow) or .csv.",
            "FILE",
        ),
    ] = None
    no_pictures: Annotated[bool, Option("Write only the table or the bundle, and no drawings beside it.")] = False
    bundle: Annotated[
        Path | None,
        Option(
            "A folder for the evidence: the overlay, the figure and the raw map of each explanation, and a manifest "
            "with versions, checksums, layers, methods and scores.",
            "FOLDER",
        ),
    ] = None
    resume: Annotated[bool, Option("Continue the table of an interrupted run, and skip the pictures that it has.")] = (
        False
    )
    json: Annotated[bool, Option("Print one JSON object per picture and target instead of text.")] = False
    csv: Annotated[bool, Option("Print a table as CSV instead of text, with a row per picture and target.")] = False
    raw: Annotated[bool, Option("Add the raw maps, in the method's units, to the JSON.")] = False
    tensorboard: Annotated[
        Path | None, Option("A folder for TensorBoard event files with the drawn pictures.", "FOLDER")
    ] = None
    log_to: Annotated[
        str | None,
        Option(
            "Log a table of pictures with mlflow, wandb, trackio or tensorboard: the first 200 explanations.", "NAME"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Diagnose(_Table):
    """How a model is diagnosed; ``limit`` and ``out`` belong to the command and change nothing in Python."""

    train: Annotated[bool, Option("Run the model as in a training step instead of in evaluation mode.")] = False
    precision: Annotated[
        Precision,
        Option("The number format of the computation; bf16 and fp16 show what overflows in mixed precision."),
    ] = "fp32"
    limit: Annotated[int, Ge(1), Option("Use at most this many pictures, spread evenly.", "NUMBER")] = 32
    out: Annotated[Path, Option("The folder for the reports.", "FOLDER", "-o", is_output=True)] = Path("camkit-out")


@dataclass(frozen=True, kw_only=True)
class Data(_Table):
    """The pictures of a check, their regions and their groups, and the class map."""

    path: Annotated[
        Path | None,
        Option(
            "A folder with one folder per class, a CSV with the columns path and label, a folder of pictures whose "
            "regions name classes, or the data.yaml of a YOLO data set.",
            name="data",
            in_shell=False,
        ),
    ] = None
    regions: Annotated[
        Path | None,
        Option(
            "The file or folder with the objects' regions. Without it, camkit searches beside the pictures.", "PATH"
        ),
    ] = None
    class_map: Annotated[
        Path | None,
        Option("A JSON file that maps the data's classes to the model's outputs; null leaves a class out.", "FILE"),
    ] = None
    group: Annotated[
        str | None,
        Option(
            "The column of the CSV that says which pictures belong together, such as those of one patient.", "COLUMN"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Check(_Table):
    """How the check is run.

    ``most`` leaves each class enough for ``least_pictures``, and ``batch_size`` does not change the result. ``method``
    may also be a function ``(activations, gradients) -> weights`` or an entry of ``METHODS``, in Python; reports and
    the hash of the settings identify a function by its name.
    """

    per_class: Annotated[
        int, Ge(2), Option("Use at most this many pictures of each class in the experiment.", "NUMBER")
    ] = 100
    most: Annotated[int, Ge(4), Option("Use at most this many pictures in the experiment.", "NUMBER")] = 2000
    pastes: Annotated[
        int, Interval(ge=1, le=1000), Option("Paste each object on this many backgrounds of each kind.", "NUMBER")
    ] = 2
    seed: Annotated[
        int,
        Interval(ge=0, lt=1 << 63),
        Option("The seed of the sample, the backgrounds and the bootstrap.", "NUMBER"),
    ] = 0
    batch_size: Annotated[
        int | None, Ge(1), Option("Pictures in one forward pass. Default: 32 on a GPU, 4 on a CPU.", "NUMBER")
    ] = None
    layer: Annotated[str | None, Option("The layer whose heat is measured. Default: camkit chooses.", "NAME", "-l")] = (
        None
    )
    method: Annotated[
        str | Callable[..., Any] | Named, Option("The method that computes the heat.", "NAME", shell=str)
    ] = "auto"
    precision: Annotated[Precision, Option("The number format of the computation.")] = "fp32"
    ring: Annotated[
        float, Gt(0), Lt(0.5), Option("The width of the outer ring, as a share of the picture's sides.", "SHARE")
    ] = 0.15
    ring_is_background: Annotated[
        bool,
        Option("Without regions, let the exchange of the outer ring fail a model; otherwise it only warns."),
    ] = False
    threshold: Annotated[float, Ge(0), Lt(1), Option("The score above which a detector's box counts.", "SCORE")] = 0.5


@dataclass(frozen=True, kw_only=True)
class Limits(_Table):
    """The limits of the verdict.

    The limits of gap and sufficiency were set before networks with known shortcuts were measured with them. For
    comparison, the gap of a ResNet-50 on ImageNet-9 is 0.07, and 0.002 if it was trained on mixed backgrounds (Xiao et
    al. 2020). At a skill of 0 a map is no better than the map of another picture.
    """

    gap: Annotated[_Share, Option("The largest background gap with which a model may ship.", "SHARE")] = 0.10
    sufficiency: Annotated[
        _Share, Option("The largest sufficiency of the background with which a model may ship.", "SHARE")
    ] = 0.10
    attraction: Annotated[
        _Share, Option("The largest attraction of a class's background with which a model may ship.", "SHARE")
    ] = 0.10
    skill: Annotated[
        float,
        Interval(ge=-1, le=1),
        Option("Warn if the skill of the heat is significantly below this.", "NUMBER"),
    ] = 0.0
    alpha: Annotated[float, Gt(0), Lt(1), Option("The significance level.", "SHARE")] = 0.05
    least_pictures: Annotated[
        int, Ge(2), Option("The testable pictures that a class needs for a verdict.", "NUMBER")
    ] = 30
    most_empty: Annotated[
        _Share, Option("The largest share of empty maps with which the heat still means something.", "SHARE")
    ] = 0.20
    least_room: Annotated[_Share, Option("The headroom below which no map can show which object it used.", "SHARE")] = (
        0.10
    )
    worse: Annotated[_Share, Option("How much worse than the baseline a measure may be.", "SHARE")] = 0.02
    strict: Annotated[
        bool,
        Option("PASS only if an effect above the limit is excluded for each class too, and not only for all together."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Run(_Table):
    """Where a check writes, and what it starts from; ``tensorboard`` and ``log_to`` change nothing in Python."""

    out: Annotated[Path | None, Option("The folder for the reports. Default: camkit-check.", "FOLDER", "-o")] = None
    baseline: Annotated[Path | None, Option("An earlier report.json to compare with.", "FILE")] = None
    fail_on_worse: Annotated[
        bool, Option("Exit with 1 if the model is significantly worse than the baseline, by more than --worse.")
    ] = False
    quick: Annotated[
        bool,
        Option(
            "Use a smaller sample: 40 pictures of each class, or more if the limits need them, and one background of "
            "each kind."
        ),
    ] = False
    resume: Annotated[bool, Option("Continue an interrupted check.")] = False
    inconclusive: Annotated[
        Literal["pass", "fail"],
        Option("Whether INCONCLUSIVE counts as a failure (exit code 3) or as a pass (exit code 0)."),
    ] = "fail"
    tensorboard: Annotated[
        Path | None,
        Option("A folder for TensorBoard event files with the measures and the worst offenders.", "FOLDER"),
    ] = None
    log_to: Annotated[
        str | None,
        Option("Log the verdict, the effects and the reports with mlflow, wandb, trackio or tensorboard.", "NAME"),
    ] = None
    card: Annotated[
        Path | None,
        Option("Write the verdict and the effects into this model card, such as README.md.", "FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Mend(_Table):
    """How far mending may go."""

    most_lost: Annotated[
        _Share, Option("The share of unedited pictures that mending may lose, at 95 % confidence.", "SHARE")
    ] = 0.05


def _absolute(name: str) -> str:
    """Return the name of a model with its file's absolute path, so that ``./net.py:make`` equals ``net.py:make``."""
    file, separator, attribute = name.rpartition(":")
    absolute = os.path.abspath(file if separator else name)  # noqa: PTH100 - it may be no file at all
    return f"{absolute}{separator}{attribute}" if separator else absolute
