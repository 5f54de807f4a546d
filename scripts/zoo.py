"""Explains one model of every kind there is, with random weights, and compares the grid with an independent truth.

    python scripts/zoo.py --state zoo.jsonl --markdown docs/zoo.md
    python scripts/zoo.py --state zoo.jsonl --only timm:vit

Every finished model is a line of the state file; a run that was interrupted goes on where it stopped. The truth never
comes from camkit: of torchvision's models it is the stage that their papers call the last, of timm's what
``forward_features`` returns and ``feature_info`` says of it, of Hugging Face's the configuration. A model is

right     where the map has the truth's grid at each size, the layer chosen lies in the second half of the pass, has as
          many channels as the truth where that is known, and the map isn't blank;
refused   where camkit said that it can't choose, and listed the candidates;
wrong     where it is neither: camkit was wrong without a word;
unusable  where the model itself runs at none of the sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import camkit
from camkit.errors import LayerError
from camkit.layers import probe

SOURCES = ("torchvision", "timm", "huggingface")
SECONDS = 300


@dataclass
class Seen:
    """What camkit did with a model at one size."""

    size: tuple[int, int]
    status: str
    grid: tuple[int, ...] = ()
    truth: tuple[int, ...] = ()
    layer: str = ""
    layout: str = ""
    depth: float = 0.0
    said: str = ""


@dataclass
class Row:
    """One model's line."""

    source: str
    family: str
    model: str
    status: str
    seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)


class TruthError(Exception):
    """The model does not run at this size, or its own description does not say what its grid is."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how to build it for a size, and how to find out its grid without camkit."""

    source: str
    family: str
    model: str
    build: Callable[[tuple[int, int]], nn.Module]
    truth: Callable[[nn.Module, Tensor], tuple[tuple[int, ...], int | None]]
    sizes: Sequence[tuple[int, int]]


# --- torchvision ------------------------------------------------------------------------------------------------------

LAST_STAGES = {
    "alexnet": "features", "convnext": "features", "densenet": "features", "efficientnet": "features",
    "googlenet": "inception5b", "inception": "Mixed_7c", "maxvit": "blocks", "mnasnet": "layers",
    "mobilenet": "features", "regnet": "trunk_output", "resnet": "layer4", "resnext": "layer4",
    "shufflenet": "conv5", "squeezenet": "features", "swin": "features", "vgg": "features", "vit": "encoder",
    "wide": "layer4", "deeplabv3_mobilenet": "backbone", "deeplabv3_resnet": "backbone.layer4",
    "fcn": "backbone.layer4", "lraspp": "backbone",
    "fasterrcnn_mobilenet": "backbone.body", "fasterrcnn_resnet": "backbone.body.layer4",
    "fcos": "backbone.body.layer4", "keypointrcnn": "backbone.body.layer4", "maskrcnn": "backbone.body.layer4",
    "retinanet": "backbone.body.layer4", "ssd300": "backbone.features", "ssdlite": "backbone.features.0",
}  # fmt: skip
"""The module whose output is the last stage of features, by the longest beginning of the builder's name."""


def _torchvision() -> Iterator[Entry]:
    import torchvision

    for name in torchvision.models.list_models():
        if "quantized" in name or any(kind in name for kind in ("raft", "r3d", "mc3", "r2plus1d", "mvit", "s3d")):
            continue
        if "swin3d" in name:
            continue
        begin = max((key for key in LAST_STAGES if name.startswith(key)), key=len)
        yield Entry("torchvision", name, name, _torchvision_builder(name), _stage(LAST_STAGES[begin], name), _sizes(name))


def _sizes(name: str) -> Sequence[tuple[int, int]]:
    if name.startswith("vit"):
        return ((224, 224), (224, 336)) if "14" not in name else ((224, 224), (224, 336))
    if name == "inception_v3":
        return ((299, 299), (299, 395))
    if name.startswith("maxvit"):
        return ((224, 224),)
    return ((224, 224), (224, 336))


def _torchvision_builder(name: str) -> Callable[[tuple[int, int]], nn.Module]:
    def build(size: tuple[int, int]) -> nn.Module:
        import torchvision

        options: dict[str, Any] = {}
        builder = torchvision.models.get_model_builder(name)
        if "vit_" in name and "max" not in name:
            if size[0] != size[1]:
                raise TruthError("takes square pictures only")
            options["image_size"] = size[0]
        if name.startswith(("googlenet", "inception")):
            options |= {"init_weights": False}
        if "weights_backbone" in str(builder.__doc__) or "rcnn" in name:
            options["weights_backbone"] = None
        return torchvision.models.get_model(name, weights=None, **options)

    return build


def _stage(stage: str, name: str) -> Callable[[nn.Module, Tensor], tuple[tuple[int, ...], int | None]]:
    def truth(model: nn.Module, images: Tensor) -> tuple[tuple[int, ...], int | None]:
        found: list[Any] = []
        handle = model.get_submodule(stage).register_forward_hook(lambda _m, _a, output: found.append(output))
        try:
            with torch.no_grad():
                model(images)
        finally:
            handle.remove()
        output = found[0]
        while isinstance(output, dict):
            output = output.get("out", output.get("high", output.get("1", next(iter(output.values())))))
        shape = tuple(output.shape)
        if len(shape) == 3:
            patch = model.patch_size
            return (images.shape[2] // patch, images.shape[3] // patch), shape[2]
        return (shape[1:3], shape[3]) if name.startswith("swin") else (shape[2:], shape[1])

    return truth


# --- timm -------------------------------------------------------------------------------------------------------------


def _smallest(family: str) -> str:
    import timm

    counts = {}
    for name in timm.list_models(module=family):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                counts[name] = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
            except Exception:  # noqa: S112 - some can't be built without memory; others of the family can
                continue
    return min(counts, key=lambda name: counts[name]) if counts else timm.list_models(module=family)[0]


def _timm(names: dict[str, str]) -> Iterator[Entry]:
    import timm

    for family in timm.list_modules():
        name = names.get(family) or _smallest(family)
        names[family] = name
        size = timm.create_model(name, pretrained=False).default_cfg["input_size"][1:] if False else None
        yield Entry("timm", family, name, _timm_builder(name), _timm_truth, _timm_sizes(name, size))


def _timm_sizes(name: str, _: Any) -> Sequence[tuple[int, int]]:
    from timm.models import get_pretrained_cfg

    found = get_pretrained_cfg(name)
    side = 224 if found is None else int(found.input_size[1])
    return ((side, side), (side, side * 3 // 2))


def _timm_builder(name: str) -> Callable[[tuple[int, int]], nn.Module]:
    def build(size: tuple[int, int]) -> nn.Module:
        import timm

        torch.manual_seed(0)
        if size[0] == size[1]:
            model = timm.create_model(name)
        else:
            try:
                model = timm.create_model(name, img_size=size)
            except TypeError:
                model = timm.create_model(name)
        return model

    return build


def _timm_truth(model: nn.Module, images: Tensor) -> tuple[tuple[int, ...], int | None]:
    with torch.no_grad():
        try:
            features = model.forward_features(images)
        except Exception as error:
            raise TruthError(f"does not run at this size: {str(error)[:80]}") from error
    while isinstance(features, (tuple, list)):
        features = features[0]
    if isinstance(features, dict):
        features = features.get("patches", next(iter(features.values())))
    shape = tuple(features.shape)
    width = getattr(model, "num_features", None)
    if len(shape) == 4:
        if shape[1] == width or shape[3] != width:
            return shape[2:], shape[1]
        return shape[1:3], shape[3]
    info = getattr(model, "feature_info", None)
    if info is None:
        raise TruthError(f"feature_info says nothing, forward_features returned {shape}")
    last = list(info)[-1] if not hasattr(info, "info") else info.info[-1]
    reduction = last["reduction"]
    grid = tuple(int(math.ceil(side / reduction)) for side in images.shape[2:])
    if not 0 <= shape[1] - math.prod(grid) <= 16:
        raise TruthError(f"feature_info says {grid}, forward_features returned {shape}")
    return grid, shape[2]


# --- one model --------------------------------------------------------------------------------------------------------


def trained_like(model: nn.Module) -> None:
    """Give every linear layer or bias that is all zero, as heads before training are, small random weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(weight, Tensor) and not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)


def look_at(entry: Entry, size: tuple[int, int]) -> Seen:
    """Explain a random picture with the model and compare the grid."""
    model = entry.build(size).eval()
    trained_like(model)
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
    try:
        truth, channels = entry.truth(model, images)
    except TruthError as error:
        return Seen(size, "unusable", said=str(error))
    except Exception as error:
        return Seen(size, "unusable", said=f"{type(error).__name__}: {str(error)[:120]}")
    try:
        found = camkit.explain(model, images[0])
    except LayerError as error:
        return Seen(size, "refused", truth=truth, said=str(error))
    except Exception as error:  # a table of everything must hold every failure
        traceback.print_exc()
        return Seen(size, "failed", truth=truth, said=f"{type(error).__name__}: {str(error)[:200]}")
    rows = probe(model, images).rows
    place = next(n for n, row in enumerate(rows) if str(row.ref) == found.layer)
    layout, shape = rows[place].layout, rows[place].shape
    seen = Seen(size, "right", found.raw.shape, truth, found.layer, str(layout), round((place + 1) / len(rows), 2))
    if found.raw.shape != truth:
        seen.status, seen.said = "wrong", f"grid {found.raw.shape} is not {truth}"
    elif seen.depth < 0.5:
        seen.status, seen.said = "wrong", "an early layer"
    elif channels is not None and layout is not None and channels not in shape:
        seen.said = f"shape {shape}, expected {channels} channels"
    if not np.abs(found.raw).max() > 0:
        seen.status, seen.said = "wrong", "a blank map"
    return seen


def visit(entry: Entry) -> Row:
    """Look at a model at each size."""
    begin = time.perf_counter()
    row = Row(entry.source, entry.family, entry.model, "unusable")

    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    for size in entry.sizes:
        signal.alarm(SECONDS)
        try:
            row.seen.append(look_at(entry, size))
        except Exception as error:
            row.seen.append(Seen(size, "failed", said=f"{type(error).__name__}: {str(error)[:200]}"))
        finally:
            signal.alarm(0)
            gc.collect()
    order = ("wrong", "failed", "refused", "right", "unusable")
    row.status = min((seen.status for seen in row.seen), key=order.index)
    row.seconds = round(time.perf_counter() - begin, 1)
    return row


def main() -> int:
    """Run the zoo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--names", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES))
    parser.add_argument("--redo", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    done = {}
    if options.state.exists():
        for line in options.state.read_text().splitlines():
            row = json.loads(line)
            done[row["source"], row["family"]] = row
    names = json.loads(options.names.read_text()) if options.names else {}
    entries: list[Entry] = []
    if "torchvision" in options.sources:
        entries += _torchvision()
    if "timm" in options.sources:
        entries += _timm(names)
    for entry in entries:
        key = (entry.source, entry.family)
        if options.only and not f"{entry.source}:{entry.family}".startswith(options.only):
            continue
        if key in done and done[key]["status"] not in options.redo:
            continue
        row = visit(entry)
        done[key] = asdict(row)
        with options.state.open("a") as file:
            file.write(json.dumps(done[key]) + "\n")
        print(row.status, entry.source, entry.family, entry.model, row.seconds, "s")
        for seen in row.seen:
            print("    ", seen.size, seen.status, seen.grid, seen.truth, seen.layer, seen.layout, seen.depth, seen.said)
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
