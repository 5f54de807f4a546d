"""Export networks with random weights, load the files, and compare layers and maps with the original networks'.

    python -m scripts.zoo.exported --state exported.jsonl --markdown scripts/results/exported.md

Each finished row is a line of the state file. Each network is exported with torch.export and as ONNX. A row says
whether the chosen layer is the same, how far the outputs and the Grad-CAM map at the deepest grid are from the
original's (as a share of the largest value), and how long loading takes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision
from torch import nn

import camkit
from scripts.lab.lab_run import finished, write_between

SIDE = 224

NETWORKS = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "densenet121", "efficientnet_b0"),
    *("regnet_y_400mf", "shufflenet_v2_x0_5", "convnext_tiny", "vit_b_32", "swin_t", "googlenet", "mnasnet0_5"),
    *("timm:resnet10t", "timm:tf_efficientnet_lite0", "timm:deit_tiny_patch16_224", "timm:mixer_s32_224"),
    *("timm:pit_ti_224", "timm:mobilevit_xxs"),
)


def built(name: str) -> nn.Module:
    """Build a network with random weights; heads of zeros get small ones."""
    torch.manual_seed(0)
    kind, _, rest = name.rpartition(":")
    options = {"init_weights": True, "aux_logits": False} if name == "googlenet" else {}
    module: nn.Module = timm.create_model(rest) if kind else torchvision.models.get_model(name, weights=None, **options)
    for part in module.modules():
        if isinstance(part, nn.Linear) and not part.weight.any():
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.BatchNorm2d):
            part.reset_parameters()
            part.momentum = None
            part.train()
    with torch.no_grad():
        module.eval()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.train()
        module(torch.randn(4, 3, SIDE, SIDE))
    return module.eval()


def export(module: nn.Module, file: Path) -> None:
    """Write a network as the suffix says, for any number of pictures."""
    example = torch.randn(2, 3, SIDE, SIDE)
    if file.suffix == ".pt2":
        program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("N")},))
        torch.export.save(program, file)
    else:
        torch.onnx.export(
            module, (example,), file, dynamo=True, dynamic_shapes=({0: "N"},), external_data=False, verbose=False
        )


def compared(name: str, suffix: str) -> list[str]:
    """Return a row of the table."""
    module = built(name)
    image = torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    expected = camkit.explain(module, image, method="gradcam", target=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{suffix}"
        try:
            export(module, file)
        except Exception as error:  # noqa: BLE001 - the exporter's own failures are rows
            return [name, suffix, "", "", "", "", f"cannot be exported: {type(error).__name__}"]
        begin = time.perf_counter()
        try:
            loaded = camkit.load_model(str(file), trust_remote_code=True)
            seconds = time.perf_counter() - begin
            with torch.no_grad():
                right, outputs = module(image[None]), loaded.module(image[None])
            differs = float((right - outputs).abs().max() / right.abs().max())
            found = camkit.explain(loaded, image, method="gradcam", target=1)
        except (camkit.CamkitError, RuntimeError) as error:
            return [name, suffix, "", "", "", "", " ".join(str(error).split())[:120]]
    assert isinstance(found, camkit.Explanation)
    assert isinstance(expected, camkit.Explanation)
    same = found.raw.shape == expected.raw.shape
    map_differs = float(np.abs(found.raw - expected.raw).max() / np.abs(expected.raw).max()) if same else None
    layer = "the same" if found.layer == expected.layer else f"`{found.layer}` for `{expected.layer}`"
    words = f"{map_differs:.0e}" if map_differs is not None else f"{found.raw.shape} for {expected.raw.shape}"
    return [name, suffix, layer, f"{differs:.0e}", words, f"{seconds:.1f}", said_by(loaded.note)]


def printed(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, and print each of its lines as soon as it is known."""
    lines = []
    for row in itertools.chain((heads, ["---"] * len(heads)), rows):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def kept(state: Path, jobs: Mapping[str, Callable[[], Sequence[str]]]) -> Iterator[Sequence[str]]:
    """Yield the rows of earlier runs, and those of the jobs without a row yet, which are added to the state file.

    Args:
        state: holds a line for each finished row.
        jobs: make the rows, by name.
    """
    known = {name: row["row"] for name, row in finished(state).items()}
    yield from (row for name, row in known.items() if name not in jobs)
    with state.open("a") as file:
        for name, make in jobs.items():
            if name not in known:
                known[name] = make()
                print(json.dumps({"name": name, "row": known[name]}), file=file, flush=True)
            yield known[name]


def said_by(note: str | None) -> str:
    """Return what a model's note says of the kind of file and how it runs."""
    return (note or "").partition(", SHA")[0].partition(", with gradients")[0]


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--state", type=Path, default=Path("exported.jsonl"), metavar="FILE", help="the rows so far")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    heads = ("network", "file", "layer", "outputs differ by", "maps differ by", "seconds to load", "remark")
    jobs = {
        f"{name} {suffix}": functools.partial(compared, name, suffix)
        for name in options.networks
        for suffix in (".pt2", ".onnx")
    }
    text = printed(heads, kept(options.state, jobs))
    if options.markdown:
        packages = ("camkit", "torch", "torchvision", "timm", "onnx", "onnxruntime", "onnx2pytorch", "onnxslim")
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        head = f"Results of `scripts/zoo/exported.py` with {versions}; random weights.\n\n"
        write_between(options.markdown, "networks", head + text)


if __name__ == "__main__":
    main()
