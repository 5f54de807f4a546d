"""What every command takes and does, as ``--help`` says it; the modules that are named here have the work.

This module imports neither PyTorch nor a product, so that the shell answers ``--help`` at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

from camkit.cli.options import (
    DATA,
    GENERAL,
    METHOD,
    MODEL,
    OUTPUT,
    RUN,
    TARGET,
    Common,
    Detector,
    OptionalModel,
    Ray,
    TargetOptions,
    command,
)
from camkit.options import (
    Against,
    Check,
    Data,
    Diagnose,
    Explain,
    Limits,
    Mend,
    Model,
    Opacity,
    Precision,
    Results,
    Run,
)


@command("explain")
def explain(
    *pictures: str,
    source: Model,
    second: Against = Against(),
    targets: TargetOptions = TargetOptions(),
    how: Explain = Explain(),
    results: Results = Results(),
    ray: Ray = False,
    common: Common = Common(),
) -> None:
    """Explain pictures: what the model sees in each, and which pixels it used.

    Args:
        pictures: Files, folders or quoted glob patterns.
    """


@command("check")
def check(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Model,
    pictures: Data = Data(),
    check: Check = Check(),
    limits: Limits = Limits(),
    run: Run = Run(),
    ray: Ray = False,
    common: Common = Common(),
) -> None:
    """Check whether a classifier or a detector may ship, or reads the background.

    Exit codes: 0 the model may ship; 1 FAIL; 2 the call, the config or the data is wrong; 3 INCONCLUSIVE, or WARN if a
    class could not be tested; 4 the model or the program failed.

    Args:
        data: A folder with one folder per class, a CSV with the columns path and label, a folder of pictures whose
            regions name classes, or the data.yaml of a YOLO data set.
    """


@command("check")
def init(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: OptionalModel = OptionalModel(),
    pictures: Data = Data(),
    check: Check = Check(),
    limits: Limits = Limits(),
    run: Run = Run(),
    file: Annotated[Path, Parameter(alias="-f", group=OUTPUT, metavar="FILE")] = Path("camkit.toml"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
    """Write a commented camkit.toml that fits the data and holds the values of the options.

    Args:
        data: The pictures, as for the check.
        file: The config file to write.
        overwrite: Replace the file if it exists.
    """


@command("check")
def regions(
    data: Annotated[Path, Parameter(group=DATA)],
    *,
    regions: Annotated[Path | None, Parameter(group=DATA, metavar="PATH")] = None,
    source: Detector = Detector(),
    threshold: Annotated[float, Parameter(group=MODEL, metavar="SCORE")] = 0.5,
    by: Annotated[str, Parameter(group=METHOD, metavar="NAME")] = "grabcut",
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-regions"),
    resume: Annotated[bool, Parameter(group=RUN, negative=(), show_default=False)] = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), group=GENERAL, show_default=False)] = False,
) -> None:
    """Outline the object in each box, for a check of pictures that have only boxes.

    Writes instances.json (COCO), which camkit check takes as --regions, and regions.html, a page on which you keep or
    reject each outline by keyboard, the most doubtful first. Earlier files are kept as before-instances.json and so on.

    Args:
        data: A folder of pictures, a table in such a folder, or the data.yaml of a YOLO data set.
        regions: The file or folder with the boxes. Without it, camkit searches beside the pictures.
        threshold: The score above which a box of the detector counts.
        by: grabcut, which needs no model, or a network that takes boxes, such as hf:facebook/sam-vit-base.
        out: The folder for both files.
        resume: Continue an interrupted run.
        quiet: Print only errors.
    """


@command("check")
def mend(
    data: Annotated[Path | None, Parameter(group=DATA)] = None,
    *,
    source: Model,
    pictures: Data = Data(),
    check: Check = Check(),
    mend: Mend = Mend(),
    out: Annotated[Path | None, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = None,
    export: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    force: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
    """Mend a classifier that reads the background: train its last linear layer anew.

    Half of the groups of pictures mend, and the other half are checked before and after. Exit codes: 0 the weights are
    written; 1 mending cannot help or did not help, and no weights are written; 2 the call or the data is wrong; 4 the
    model or the program failed.

    Args:
        data: The pictures with the regions of their objects, as for the check.
        out: The file for the mended weights, a state dict such as --weights takes. Default: mended.pth.
        export: Instead of mending, write the pasted pictures into this folder, to train the model on them.
        overwrite: Replace the file if it exists.
        force: Train and write the weights even if mending cannot help or did not help.
    """


@command("analyses")
def diagnose(
    *pictures: str,
    source: Model,
    how: Diagnose = Diagnose(),
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    tensorboard: Annotated[Path | None, Parameter(group=OUTPUT, metavar="FOLDER")] = None,
    common: Common = Common(),
) -> None:
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


@command("analyses")
def features(
    picture: Path | None = None,
    *,
    source: Model,
    layer: Annotated[str | None, Parameter(alias="-l", group=METHOD, metavar="NAME")] = None,
    top: Annotated[int, Parameter(group=METHOD, metavar="NUMBER")] = 64,
    scale: Annotated[Literal["each", "together"], Parameter(group=OUTPUT)] = "each",
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="PATH")] = Path("camkit-out"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
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


@command("analyses")
def concepts(
    *pictures: str,
    source: Model,
    count: Annotated[int, Parameter(alias="-n", group=METHOD, metavar="NUMBER")] = 5,
    layer: Annotated[str | None, Parameter(alias="-l", group=METHOD, metavar="NAME")] = None,
    batch_size: Annotated[int | None, Parameter(alias="-b", group=METHOD, metavar="NUMBER")] = None,
    recursive: Annotated[bool, Parameter(group=METHOD, show_default=False)] = True,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="PATH")] = Path("camkit-out"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
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


@command("analyses")
def layers(*, source: Model, common: Common = Common()) -> None:
    """List a model's layers in execution order, what each costs, and which ones camkit would explain and why.

    torchinfo counts the parameters, the multiply-adds for one picture, and the memory of each output. The layers are
    the same with any weights, so camkit loads none unless you name some. With --verbose, the table has more columns;
    with --quiet, camkit prints only the names of the layers that it would explain.
    """


@command("analyses")
def export(
    picture: Path | None = None,
    *,
    source: Model,
    method: Annotated[str | None, Parameter(group=METHOD, metavar="NAME")] = None,
    layer: Annotated[str | None, Parameter(alias="-l", group=METHOD, metavar="NAME")] = None,
    target: Annotated[Literal["best", "input"], Parameter(group=TARGET)] = "best",
    normalise: Annotated[bool, Parameter(negative=(), group=DATA, show_default=False)] = False,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FILE")] = Path("with_heat.onnx"),
    overwrite: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
    """Write a classifier as a file that returns its scores and its heat, for programs without Python.

    The file takes "image" (N, C, H, W) and returns "scores" (N, K) and "heat" (N, h, w), signed, in units of the score.
    Its metadata says how to prepare pictures, and where each cell of the heat looks. camkit compares both outputs with
    its own before it writes the file.

    Args:
        picture: The picture for the comparison. Default: a drawn one. The file takes inputs of the size that this
            picture has once it is prepared.
        method: The method. By default, camkit chooses it, as it does for a picture.
        layer: The layer. By default, camkit chooses it; "camkit layers" lists all layers.
        target: best explains each picture's best class. With input, the file also takes "target" (N,): a class number
            for each picture.
        normalise: Write a file that takes values from 0 to 255 and normalises them itself.
        out: The file to write: .onnx, or .pt2 for a program of torch.export.
        overwrite: Replace the file if it exists.
    """


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


@command("analyses")
def compare(
    *pictures: Path,
    source: Model,
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
    opacity: Annotated[Opacity, Parameter(group=OUTPUT)] = "evidence",
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, show_default=False)] = False,
    common: Common = Common(),
) -> None:
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
        opacity: evidence fades the colours out where the heat is low; even gives all the same weight.
        json: Print the values as one JSON object instead of a table.
    """


@command("analyses")
def judge(
    data: Path,
    *,
    source: Model,
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
) -> None:
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


@command("analyses")
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
) -> None:
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


@command("analyses")
def app(
    *pictures: str,
    source: OptionalModel = OptionalModel(),
    check: Annotated[Path | None, Parameter(group=GENERAL, metavar="FOLDER")] = None,
    port: Annotated[int | None, Parameter(group=GENERAL, metavar="NUMBER")] = None,
    browser: Annotated[bool, Parameter(group=GENERAL, show_default=False)] = True,
    common: Common = Common(),
) -> None:
    """Look at a model's answers in a browser: click on a class for its heat, and cover parts of the picture.

    The page is served on this machine alone. Without a model, it shows the demo networks; without pictures, drawn
    scenes. For the folder of a check's reports, it opens the check's page.

    Args:
        pictures: Files, folders or quoted glob patterns; or the folder of a check's reports.
        check: The folder of a check's reports; the page also shows its verdict.
        port: The port. Default: the first free one from 7860.
        browser: Open the page in the browser (the default), or only print its address.
    """


@command("analyses")
def demo(
    *,
    out: Annotated[Path, Parameter(alias="-o", metavar="FOLDER")] = Path("camkit-out"),
    check: Annotated[bool, Parameter(name="--check", negative=(), show_default=False)] = False,
    words: Annotated[bool, Parameter(name="--words", negative=(), show_default=False)] = False,
) -> None:
    """Explain one plane with two networks: one looks at the sky, the other at the plane.

    Args:
        out: The folder for the picture, or for the reports.
        check: Run the background check on both networks instead, with scenes that ship with camkit.
        words: Explain the words of a tiny vision-language model instead; it always adds a tree.
    """
