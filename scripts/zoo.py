"""Explains one model of every kind there is, with random weights, and compares the map with two independent truths.

    python scripts/zoo.py --state zoo.jsonl --markdown docs/zoo.md
    python scripts/zoo.py --state zoo.jsonl --only timm:vit --redo wrong refused

Every finished model is a line of the state file; a run that was interrupted goes on where it stopped. Each model meets
a square picture and a wider one. Neither truth comes from camkit. The grid: of torchvision's models the output of the
stage that their papers call the last, of timm's what ``forward_features`` returns and ``feature_info`` says, of Hugging
Face's the hidden states and the configuration. The place: cells of the claimed layer, read as claimed, are
differentiated to the picture, and where they are moved from must go along with where they lie on the grid. A model is

right     where its map has the truth's grid and isn't blank, its cells lie where they are drawn, and the layer isn't
          among the first third of the calls;
refused   where camkit said that it can't choose a layer, or can't tell how its output is laid out;
wrong     where it is neither: camkit was wrong without a word;
unusable  where the model itself can't be built or run, or takes no pictures;
failed    where anything else went wrong.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import camkit
from camkit.errors import LayerError
from camkit.layers import resolve

Size: TypeAlias = tuple[int, int]
Grid: TypeAlias = tuple[int, ...]

STATUSES = ("wrong", "failed", "refused", "right", "unusable")
"""The worst first; a model has the worst of its sizes'."""

LEAST_PLACE = 0.6
"""How well the place that moves a cell goes along with where it lies. Chance gives both axes that much in 1 of 100
models; most have 0.97 and more, the most blurred, with random global attention, 0.78."""

LEAST_CONTRAST = 1e-4
"""Share of a cell's gradients that lie elsewhere than the other cells'; less is within reach of rounding."""

MOST_OFFSET = 0.75
"""In cells. Strided convolutions shift by up to half a cell, a token too many before the grid by a whole one."""

MOST_PREFIX = 16
"""Tokens before a grid."""

CELLS = ((0, 1, 2, 3, 4, 5), (2, 4, 0, 5, 1, 3))
"""Rows and columns of the cells that are differentiated, in fifths; not correlated, so that exchanged axes show."""

STAGES = {
    "features": ("alexnet", "convnext", "densenet", "efficientnet", "mobilenet", "squeezenet", "swin", "vgg"),
    "layer4": ("resnet", "resnext", "wide"), "trunk_output": ("regnet",), "blocks.3": ("maxvit",),
    "inception5b": ("googlenet",), "Mixed_7c": ("inception",), "layers": ("mnasnet",), "conv5": ("shufflenet",),
    "encoder": ("vit",), "backbone": ("deeplabv3", "fcn", "lraspp"),
    "backbone.features": ("ssd300",), "backbone.features.0": ("ssdlite",),
    "backbone.body": ("fasterrcnn", "fcos_", "keypointrcnn", "maskrcnn", "retinanet"),
}  # fmt: skip
"""The module of torchvision's models whose output is the last stage of features, and how their names begin."""

SMALLER = {"deepseek_vit": 224, "gemma4_vit": 288, "qwen3_vit": 256}
"""The square side for families of timm whose own takes minutes."""

BLURRED = {"gemma4_vit_167m": "where its cells lie can't be measured: with random weights all move each"}
"""Models of which only the grid is compared: that their cells lie where they are drawn was not shown."""

NO_PICTURES = {
    "dinat": "needs the natten package",
    "imagegpt": "takes colour indices, not a picture",
    "shieldgemma2": "takes text beside the picture",
    "siglip2": "takes flattened patches, not a picture",
}
"""Architectures of Hugging Face that no picture alone can be given to."""

PERCEIVERS: dict[str, tuple[int, dict[str, int]]] = {
    "PerceiverForImageClassificationLearned": (1, {}),
    "PerceiverForImageClassificationFourier": (1, {"d_model": 261, "num_cross_attention_heads": 1}),
    "PerceiverForImageClassificationConvProcessing": (4, {"d_model": 322, "num_cross_attention_heads": 1}),
}
"""The stride of what each Perceiver attends to, and what its configuration needs."""


class TruthError(Exception):
    """The model's own description does not say what its grid is."""


class Claim(NamedTuple):
    """What camkit said of a model: the layer, how its output is laid out, the map's grid and whether it is blank."""

    layer: str
    kind: str
    prefix: int
    layout: Grid
    grid: Grid
    blank: bool


@dataclass
class Seen:
    """What camkit did with a model at one size; ``place`` and ``offset`` as the function ``place`` returns them."""

    size: Size
    status: str = "unusable"
    said: str = ""
    layer: str = ""
    layout: str = ""
    grid: Grid = ()
    truth: Sequence[Grid] = ()
    depth: float | None = None
    place: float | None = None
    offset: float | None = None


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    ``build`` may get the size to make the model for as ``img_size``. ``truth`` returns the grids that a map of these
    images may have. ``target`` is what to explain where there are no classes. ``unusable`` says why nothing can be.
    """

    source: str
    model: str
    side: int
    build: Callable[..., nn.Module]
    truth: Callable[[Any, Tensor], list[Grid]]
    target: Any = None
    unusable: str = ""


def named(grid: Sequence[int]) -> str:
    """Return, for example, "7x10"."""
    return "x".join(map(str, grid))


def strided(images: Tensor, stride: int) -> Grid:
    """Return the grid that patches, or strided layers with padding, make of images (N, 3, H, W)."""
    return tuple(math.ceil(side / stride) for side in images.shape[2:])


def tokens(count: int, grid: Grid) -> list[Grid]:
    """Return the grid if so many tokens can be its cells with a few before them."""
    if not 0 <= count - math.prod(grid) <= MOST_PREFIX:
        raise TruthError(f"{count} tokens do not make {named(grid)} cells")
    return [grid]


def _torchvision() -> Iterator[Entry]:
    models, targets = import_module("torchvision.models"), camkit.targets
    stages = {begin: stage for stage, begins in STAGES.items() for begin in begins}
    parts = (
        (models, None),
        (models.segmentation, targets.segment(0, everywhere=True)),
        (models.detection, targets.box(0)),
    )
    for part, target in parts:
        for name in models.list_models(module=part):
            known = inspect.signature(models.get_model_builder(name)).parameters
            options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in known else {}
            if name in ("googlenet", "inception_v3"):
                options["init_weights"] = False
            if part is models.detection and "ssd" not in name:  # whose inner pictures are smaller already
                options |= {"min_size": 320, "max_size": 640}
            truth = partial(_torchvision_truth, next(stages[begin] for begin in stages if name.startswith(begin)))
            side = 299 if name == "inception_v3" else 224
            yield Entry("torchvision", name, side, partial(models.get_model, name, **options), truth, target)


def _torchvision_truth(stage: str, model: Any, images: Tensor) -> list[Grid]:
    outputs: list[Any] = []
    with model.get_submodule(stage).register_forward_hook(lambda _m, _a, output: outputs.append(output)):
        model(images)
    output = list(outputs[0].values())[-1] if isinstance(outputs[0], dict) else outputs[0]
    if output.dim() == 3:
        return tokens(output.shape[1], strided(images, model.patch_size))
    return [tuple(output.shape[1:3] if type(model).__name__ == "SwinTransformer" else output.shape[2:])]


def _smallest(family: str) -> str:
    timm = import_module("timm")
    counts = {}
    for name in timm.list_models(module=family):
        with torch.device("meta"):
            try:
                counts[name] = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
            except Exception:  # noqa: BLE001 - some can't be built without memory; others of the family can
                continue
    return min(counts, key=lambda name: counts[name]) if counts else str(timm.list_models(module=family)[0])


def timm_entry(name: str, side: int | None = None) -> Entry:
    """Return the entry of one of timm's models, at its own size if none is given."""
    timm = import_module("timm")
    found = timm.get_pretrained_cfg(name)
    side = side or (int(found.input_size[1]) if found else 224)
    return Entry("timm", name, side, partial(timm.create_model, name), _timm_truth)


def _timm(smallest: dict[str, str]) -> Iterator[Entry]:
    for family in import_module("timm").list_modules():
        name = smallest.get(family) or smallest.setdefault(family, _smallest(family))
        yield timm_entry(name, SMALLER.get(family))


def _timm_truth(model: Any, images: Tensor) -> list[Grid]:
    features = model.forward_features(images)
    if hasattr(model, "img_size_scaled"):  # CrossViT resizes its input for each branch; either's patches will do
        pairs = zip(model.img_size_scaled, model.patch_embed, strict=True)
        return [tuple(s // p for s, p in zip(size, embed.patch_size, strict=True)) for size, embed in pairs]
    if isinstance(features, (list, dict)):  # stages; NaFlexViT's patches
        features = features["patches"] if isinstance(features, dict) else features[-1]
    shape = tuple(features.shape)
    if len(shape) == 4:
        width = model.num_features
        return [shape[2:] if shape[1] == width or shape[3] != width else shape[1:3]]
    if not hasattr(model, "feature_info"):
        raise TruthError(f"feature_info says nothing, forward_features returned {shape}")
    grid = strided(images, list(model.feature_info)[-1]["reduction"])
    if shape[1] == 1 or shape[2] == math.prod(grid):  # the class token alone; tokens last
        return [grid]
    return tokens(shape[1], grid)


def _huggingface() -> Iterator[Entry]:
    listed = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    for family, names in listed.items():
        for name in (names,) if isinstance(names, str) else names:
            build, truth = partial(_build_huggingface, family, name), partial(_huggingface_truth, name)
            yield Entry("huggingface", name, 224, build, truth, unusable=NO_PICTURES.get(family, ""))


def _build_huggingface(family: str, name: str, img_size: Size | int = 224) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[family]()
    parts = (getattr(config, part, None) for part in ("vision_config", "text_config"))
    for part in filter(None, (config, *parts)):
        for key in ("num_hidden_layers", "num_layers"):
            if isinstance(getattr(part, key, None), int) and not hasattr(part, "depths"):
                setattr(part, key, min(getattr(part, key), 3))
        if hasattr(part, "depths"):
            part.depths = [min(depth, 2) for depth in part.depths]
        if getattr(part, "image_size", None):
            part.image_size = img_size
    for key, value in PERCEIVERS.get(name, (0, {}))[1].items():
        setattr(config, key, value)
    config.num_labels = 10
    built: nn.Module = getattr(transformers, name)(config)
    return built


def _huggingface_truth(name: str, model: Any, images: Tensor) -> list[Grid]:
    output = model(images, output_hidden_states=True)
    if name in PERCEIVERS:
        return [strided(images, PERCEIVERS[name][0])]
    last = output.hidden_states[-1]
    if "reshaped_hidden_states" in output:
        shape = tuple(output.reshaped_hidden_states[-1].shape)
        return [shape[2:] if shape[1] == last.shape[-1] else shape[1:3]]
    if last.dim() == 4:
        return [tuple(last.shape[2:])]
    config = getattr(model.config, "vision_config", model.config)
    later = [down[5] for down in getattr(config, "down_ops", ()) if len(down) > 5]
    return tokens(last.shape[1], strided(images, math.prod(getattr(config, "strides", [config.patch_size, *later]))))


SOURCES: dict[str, Callable[[dict[str, str]], Iterator[Entry]]] = {
    "torchvision": lambda _: _torchvision(),
    "timm": _timm,
    "huggingface": lambda _: _huggingface(),
}
"""Given the smallest model of each timm family, as far as known, which timm completes."""


def trained_like(model: nn.Module, images: Tensor) -> nn.Module:
    """Make a new model carry signals as a trained one does, without changing what it computes with what.

    Batch norms scale by these images' statistics and weights of one, since otherwise the activations of many fade;
    layers whose weights are all zero get small random ones; and a detector keeps boxes of low scores.
    """
    detector: Any = getattr(model, "roi_heads", model)
    if hasattr(detector, "score_thresh"):
        detector.score_thresh = 0.0
    generator = torch.Generator().manual_seed(1)
    for module in model.eval().modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(weight, Tensor) and not weight.any():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_parameters()
            module.momentum = None  # the plain mean
            module.train()
    with torch.no_grad():
        model(images)
    return model.eval()


def claim(model: nn.Module, images: Tensor, target: Any = None) -> Claim:
    """Ask camkit."""
    found = camkit.explain(model, images[0], target=target)
    assert isinstance(found, camkit.Explanation)
    choice = resolve(model, images)
    layout = choice.layouts[choice.layers[0]]
    return Claim(found.layer, layout.kind, layout.prefix, layout.grid, found.raw.shape, not np.abs(found.raw).max() > 0)


def _feature_maps(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.dim() > 2 and output.is_floating_point() else None
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((found for part in parts if (found := _feature_maps(part)) is not None), None)


def capture(model: nn.Module, images: Tensor, layer: str) -> tuple[Tensor, float]:
    """Run the model; return a layer's output ("name#2": of its second call) and the share of all calls then ended."""
    name, _, call = layer.partition("#")
    wanted = model.get_submodule(name)
    ended: list[nn.Module] = []
    found: list[tuple[Tensor, int]] = []

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        ended.append(module)
        maps = _feature_maps(output) if module is wanted and ended.count(module) == int(call or 1) else None
        if maps is not None:
            found.append((maps.clone(), len(ended)))

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    model(images)
    for handle in handles:
        handle.remove()
    return found[0][0], found[0][1] / len(ended)


def as_cells(output: Tensor, claimed: Claim) -> Tensor:
    """Return a layer's output (1, ...) as cells (C, h, w), read as claimed."""
    if claimed.kind in ("channels_last", "tokens"):
        output = output.movedim(-1, 1)
    cells = output[0]
    if claimed.kind.startswith("tokens"):
        cells = cells[:, claimed.prefix :].unflatten(1, claimed.layout)
    if tuple(cells.shape[1:]) != claimed.layout:
        raise ValueError(f"cells of shape {named(cells.shape)} are not a grid of {named(claimed.layout)}")
    return cells


def place(images: Tensor, cells: Tensor) -> tuple[float, float] | None:
    """Return how well cells lie where they are drawn: the axes' least correlation, and their largest offset in cells.

    A few cells' channels, randomly weighted, are differentiated to the images. In deep random networks every cell is
    moved from almost everywhere, so what counts is where a cell's gradients are larger than the cells' mean. None where
    all are alike to ``LEAST_CONTRAST``, as after attention that random weights leave uniform.
    """
    weights = torch.randn(len(cells), generator=torch.Generator().manual_seed(3))
    sides, extent = torch.tensor(cells.shape[1:]), torch.tensor(images.shape[2:])
    spots = (torch.tensor(CELLS) / 5 * (sides[:, None] - 1)).round().long()
    maps = []
    for row, column in spots.T.tolist():
        (gradient,) = torch.autograd.grad((cells[:, row, column] * weights).sum(), images, retain_graph=True)
        maps.append(gradient[0].abs().double().sum(0) / gradient.abs().double().sum())
    stacked = torch.stack(maps)
    if (stacked - stacked.mean(0)).abs().sum((1, 2)).max() < LEAST_CONTRAST:
        return None
    kernel = [max(1, step // 2 * 2 + 1) for step in (extent // sides).tolist()]
    smooth = avg_pool2d(stacked[None], kernel, 1, [step // 2 for step in kernel])[0]
    above = (smooth - smooth.mean(0)).clamp(min=0)
    above = above / above.sum((1, 2), keepdim=True)
    centres = [(above.sum(2 - axis) * (torch.arange(above.shape[axis + 1]) + 0.5)).sum(1) for axis in (0, 1)]
    found = torch.stack(centres) * (sides / extent)[:, None] - 0.5
    pairs = [torch.stack([found[axis], spots[axis].double()]) for axis in (0, 1) if sides[axis] > 1]
    return min(float(torch.corrcoef(pair)[0, 1]) for pair in pairs), float((found - spots).mean(1).abs().max())


def judge(model: nn.Module, images: Tensor, truth: Sequence[Grid], claimed: Claim, *, placed: bool = False) -> Seen:
    """Compare what camkit said with the grids it may have, and with where the picture moves the cells.

    The latter takes most of the time: where another size has been ``placed``, it is left to tokens, whose axes could be
    confused at one size and not at another.
    """
    layout = claimed.kind + (f" after {claimed.prefix}" if claimed.prefix else "")
    size = (images.shape[2], images.shape[3])
    seen = Seen(size, "wrong", layer=claimed.layer, layout=layout, grid=claimed.grid, truth=list(truth))
    if claimed.grid not in truth or claimed.layout != claimed.grid:
        seen.said = f"the grid is {' or '.join(map(named, truth))}, not {named(claimed.grid)}"
        return seen
    model.requires_grad_(requires_grad=False)  # no graph for the weights
    placing = not placed or claimed.kind.startswith("tokens")
    for copies in (1, 2):  # of one image alone PyTorch 2.15 gives wrong gradients from tokens back to a batch norm
        leaf = images.repeat(copies, 1, 1, 1).requires_grad_(placing)
        with torch.set_grad_enabled(placing):
            output, depth = capture(model, leaf, claimed.layer)
        seen.depth = round(depth, 2)
        try:
            cells = as_cells(output, claimed)
        except (RuntimeError, ValueError) as error:
            seen.said = f"the layer's output is not laid out so: {error}"
            return seen
        if not placing:
            break
        found = place(leaf, cells)
        if found is None:
            break
        seen.place, seen.offset = found
        if found[0] > LEAST_PLACE and found[1] < MOST_OFFSET:
            break
    if claimed.blank:
        seen.said = "a blank map"
    elif depth < 1 / 3:
        seen.said = "an early layer"
    elif seen.place is not None and not (seen.place > LEAST_PLACE and (seen.offset or 0) < MOST_OFFSET):
        seen.said = f"cells lie elsewhere: correlation {seen.place:.2f}, {seen.offset:.2f} cells off"
    else:
        seen.status = "right"
    return seen


def look(entry: Entry, size: Size, known: dict[Size | None, nn.Module], *, placed: bool) -> Seen:
    """Explain a random picture of one size with the model, made for this size or else as its authors made it."""
    reason = entry.unusable
    for fitted in () if reason else (None, size) if size[0] == size[1] else (size, None):
        try:
            torch.manual_seed(0)
            images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
            model = known.get(fitted)
            if model is None:
                model = trained_like(entry.build(**({"img_size": fitted} if fitted else {})), torch.randn(4, 3, *size))
            known |= {} if fitted else {None: model}
            with torch.no_grad():
                truth = entry.truth(model, images)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model raises is its reason
            reason = f"{type(error).__name__}: {error}" if fitted is None or not reason else reason
            continue
        model.requires_grad_()
        try:
            seen = judge(model, images, truth, claim(model, images, entry.target), placed=placed)
            if entry.model in BLURRED and seen.place is not None and seen.status == "wrong":
                seen.status, seen.said, seen.place = "right", BLURRED[entry.model], None
        except LayerError as error:
            return Seen(size, "refused", str(error), truth=truth)
        return seen
    return Seen(size, said=reason)


def visit(entry: Entry, seconds: int = 300) -> dict[str, Any]:
    """Look at a model at the first wider size that it can take and at a square one, each in so many seconds."""

    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    begin, side, known = time.perf_counter(), entry.side, dict[Size | None, nn.Module]()
    sizes: list[Seen] = []
    signal.signal(signal.SIGALRM, too_slow)
    for widths in ((side * 3 // 2, side * 2, side * 3 // 2 // 28 * 28), (side,)):  # also whole windows; patches of 14
        tries: list[Seen] = []
        for width in widths[:1] if entry.unusable else widths:
            signal.alarm(seconds)
            try:
                tries.append(look(entry, (side, width), known, placed=any(seen.place for seen in sizes)))
            except Exception as error:  # noqa: BLE001 - a table of everything must hold every failure
                tries.append(Seen((side, width), "failed", f"{type(error).__name__}: {error}"))
            finally:
                signal.alarm(0)
                gc.collect()
            if tries[-1].status != "unusable":
                break
        sizes.insert(0, min(tries, key=lambda seen: STATUSES.index(seen.status)))
    return {
        "source": entry.source,
        "model": entry.model,
        "status": min((seen.status for seen in sizes), key=STATUSES.index),
        "seconds": round(time.perf_counter() - begin, 1),
        "seen": [asdict(seen) for seen in sizes],
    }


PAGE = """# The zoo

What `scripts/zoo.py` saw on {date} with {versions}: models with random weights, each with a square and a wider picture.

{summary}

*Right*: the map has the grid that the model's own description gives, isn't blank, and its cells lie where they are \
drawn. *Refused*: camkit said that it can't choose. *Wrong*: neither. *Unusable*: the model can't be built or run, or \
takes no pictures; where only the wider size is, the other counts. *Place* is the least correlation between where a \
cell lies and where in the picture it is moved from. Left out: torchvision's video, optical flow and quantized models, \
all but the smallest of each timm family, and of Hugging Face all but image classification, which is made shallow.

{table}
"""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def _line(row: dict[str, Any]) -> list[str]:
    seen = row["seen"]
    layers = dict.fromkeys(f"`{one['layer']}`" for one in seen if one["layer"])
    grids = (f"{named(one['size'])}: {named(one['grid'])}" for one in seen if one["grid"])
    places = [one["place"] for one in seen if one["place"] is not None]
    said = {one["said"].partition("\n")[0][:160].replace("|", "/"): named(one["size"]) for one in seen if one["said"]}
    return [
        row["model"],
        ", ".join(layers),
        ", ".join(dict.fromkeys(one["layout"] for one in seen if one["layout"])),
        "; ".join(grids),
        f"{min(places):.2f}" if places else "",
        "; ".join([row["status"], *(f"{size}: {reason}" for reason, size in said.items())]),
    ]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a page of Markdown."""
    packages = ("camkit", "torch", "torchvision", "timm", "transformers")
    counts = {source: Counter(row["status"] for row in rows if row["source"] == source) for source in SOURCES}
    shown = ("right", "refused", "wrong", "unusable", "failed")
    summary = [[source, count.total(), *(count[status] for status in shown)] for source, count in counts.items()]
    lines = [_line(row) for source in SOURCES for row in rows if row["source"] == source]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    heads = ("", "models", *shown), ("model", "layer", "layout", "grid", "place", "status")
    tables = {"summary": table(heads[0], summary), "table": table(heads[1], lines)}
    return PAGE.format(date=f"{datetime.now(UTC):%Y-%m-%d}", versions=versions, **tables)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("zoo.jsonl"), metavar="FILE", help="what is done so far")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="leave the others out")
    parser.add_argument("--only", default="", metavar="PREFIX", help="of SOURCE:MODEL, for example timm:vit")
    parser.add_argument("--redo", nargs="+", choices=STATUSES, default=[], help="look again at models of this status")
    parser.add_argument("--seconds", type=int, default=300, help="that a model may take for each size")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page to write")
    return parser.parse_args()


def main() -> None:
    """Visit the models that are not done yet, and write the page."""
    given = options()
    warnings.simplefilter("ignore")
    lines = [json.loads(line) for line in given.state.read_text().splitlines()] if given.state.exists() else []
    rows = {(line["source"], line["model"]): line for line in lines if "model" in line}
    smallest: dict[str, str] = next((line["smallest"] for line in reversed(lines) if "smallest" in line), {})
    with given.state.open("a") as file:
        for source in given.sources:
            entries = list(SOURCES[source](smallest))
            print(json.dumps({"smallest": smallest}), file=file, flush=True)
            for entry in entries:
                before = rows.get((source, entry.model), {"status": None})["status"]
                if not f"{source}:{entry.model}".startswith(given.only) or (before and before not in given.redo):
                    continue
                row = rows[source, entry.model] = visit(entry, given.seconds)
                print(json.dumps(row), file=file, flush=True)
                print(f"{row['status']:8}  {source}:{entry.model}  {row['seconds']} s", flush=True)
    if given.markdown:
        given.markdown.write_text(page(list(rows.values())))


if __name__ == "__main__":
    main()
