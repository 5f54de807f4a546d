"""Export networks, and compare the files with the networks that they were made of.

    python -m scripts.zoo.exported networks|heat --state rows.jsonl --markdown scripts/results/exported.md [NETWORK ...]
    python -m scripts.zoo.exported graphs --state rows.jsonl --markdown scripts/results/exported.md [FILE ...]

Each finished row is a line of the state file, and an interrupted run continues where it stopped. Differences are shares
of the largest value. "networks" loads files of torch.export and ONNX files, and compares the layer that camkit chooses,
outputs and Grad-CAM at the deepest grid. "graphs" loads files of PyTorch's newer and older exporter, and further FILES,
and compares outputs with onnxruntime's on other noise than camkit does. "heat" writes files by ``camkit.export``. It
compares scores and maps of three photos, in one batch, with those of an ``Explainer`` that gets each photo alone; and
time and size with the plain ONNX file's: median of the ratios of alternating runs of one picture, on one thread.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import timm
import torch
import torchvision
import transformers
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision import transforms

import camkit
from scripts.bench.timing import quartiles, ready, take_turns
from scripts.lab.lab_run import finished, write_between
from scripts.weights import WEIGHTS, load_network
from scripts.zoo.zoo import trained_like

SIDE = 224
DATA = Path(os.environ.get("CAMKIT_TEST_DATA", "../shared/data"))
PHOTOS = ("parrot.jpg", "chelsea.png", "dragonfly.png")
OPTIONS: Mapping[str, dict[str, Any]] = {
    "googlenet": {"init_weights": True, "aux_logits": False},
    "inception_v3": {"init_weights": True, "aux_logits": False},
    "timm:vit_small_patch14_reg4_dinov2": {"img_size": SIDE},
    "hf:ViT": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768},
    "hf:ConvNext": {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2]},
    "hf:ResNet": {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    "hf:Swin": {"embed_dim": 48, "depths": [2, 2, 2, 2], "num_heads": [2, 4, 8, 16], "attn_implementation": "eager"},
}
GRAPHS = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "densenet121", "efficientnet_b0"),
    *("shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny", "googlenet", "vit_b_32", "swin_t"),
)
NETWORKS = (
    *(*GRAPHS, "resnet50", "mnasnet0_5", "timm:resnet10t", "timm:tf_efficientnet_lite0", "timm:mixer_s32_224"),
    *("timm:deit_tiny_patch16_224", "timm:pit_ti_224", "timm:mobilevit_xxs"),
)
FURTHER = (
    *("inception_v3", "vgg11", "alexnet", "timm:vit_small_patch14_reg4_dinov2", "timm:eva02_tiny_patch14_224"),
    *("timm:convnextv2_atto", "hf:ViT", "hf:ConvNext", "hf:ResNet", "hf:Swin"),
)

EXPORTERS = {"newer exporter, opset 18": 18, "older exporter, opset 17": 17}

HEADS: Mapping[str, Sequence[str]] = {
    "networks": ("network", "file", "layer", "outputs differ by", "maps differ by", "seconds to load", "remark"),
    "graphs": ("file", "exported by", "what camkit does", "outputs differ by"),
    "heat": (
        *("network", "method", "layer", "grid", "agrees on", "scores differ by", "maps differ by", "time", "size"),
        *("opset", "seconds to export", ".pt2 agrees on", ".pt2: scores", ".pt2: maps"),
    ),
}


def built(name: str) -> nn.Module:
    """Build a network with random weights; heads of zeros get small ones, and statistics are those of noise."""
    torch.manual_seed(0)
    kind, _, rest = name.rpartition(":")
    options = OPTIONS.get(name, {})
    if kind == "hf":
        config = getattr(transformers, f"{rest}Config")(num_labels=1000, **options)
        module: nn.Module = getattr(transformers, f"{rest}ForImageClassification")(config)
    else:
        make = timm.create_model if kind else functools.partial(torchvision.models.get_model, weights=None)
        module = make(rest, **options)
    return trained_like(module, torch.randn(4, 3, SIDE, SIDE))


def export(module: nn.Module, file: Path, opset: int | None = None) -> None:
    """Write a network as the suffix says, for any number of pictures; opset 17 is the older exporter's."""
    example = (torch.randn(2, 3, SIDE, SIDE),)
    if file.suffix == ".pt2":
        torch.export.save(torch.export.export(module, example, dynamic_shapes=({0: torch.export.Dim("N")},)), file)
    elif opset == EXPORTERS["older exporter, opset 17"]:
        names: dict[str, Any] = {"input_names": ["images"], "dynamic_axes": {"images": {0: "N"}}}
        torch.onnx.export(module, example, file, dynamo=False, opset_version=opset, **names)
    else:
        shapes: dict[str, Any] = {"dynamic_shapes": ({0: "N"},), "external_data": False}
        torch.onnx.export(module, example, file, dynamo=True, opset_version=opset, verbose=False, **shapes)


def compared(name: str, suffix: str) -> list[str]:
    """Return a row of "networks"."""
    module = built(name)
    image = torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    expected = camkit.Explainer(module, method="gradcam")(image, target=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{suffix}"
        try:
            export(module, file)
            begin = time.perf_counter()
            loaded = camkit.load_model(str(file), trust_remote_code=True)
            seconds = time.perf_counter() - begin
            with torch.no_grad():
                differs = share(module(image[None]), loaded.module(image[None]))
            found = camkit.Explainer(loaded, method="gradcam")(image, target=1)
        except Exception as error:  # noqa: BLE001 - the exporter's own failures are rows
            return [name, suffix, "", "", "", "", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"]
    same = found.raw.shape == expected.raw.shape
    layer = "the same" if found.layer == expected.layer else f"`{found.layer}` for `{expected.layer}`"
    words = share(expected.raw, found.raw) if same else f"{found.raw.shape} for {expected.raw.shape}"
    return [name, suffix, layer, differs, words, f"{seconds:.1f}", said_by(loaded.note)]


def share(right: Any, found: Any) -> str:
    """Return how far numbers are from the right ones, as a share of the largest of these."""
    return f"{np.abs(np.asarray(found) - np.asarray(right)).max() / np.abs(np.asarray(right)).max():.0e}"


def graph_row(file: Path, name: str, how: str) -> list[str]:
    """Return the row of a file in "graphs"."""
    try:
        loaded = camkit.load_model(str(file))
    except camkit.CamkitError as error:
        return [name, how, str(error).replace(str(file), "the file")[:300], ""]
    said = said_by(loaded.note)
    if "as a PyTorch module" not in said:
        return [name, how, said, ""]
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    usual = (1, 3, SIDE, SIDE)
    shape = [length if isinstance(length, int) else other for length, other in zip(taken.shape, usual, strict=True)]
    pictures = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found = tree_leaves(loaded.module(pictures))
    pairs = zip(session.run(None, {taken.name: pictures.numpy()}), found, strict=True)
    return [name, how, said, max((share(*pair) for pair in pairs), key=float)]


def exported_graph(name: str, how: str) -> list[str]:
    """Export a network, and return its row in "graphs"."""
    with tempfile.TemporaryDirectory() as folder:
        export(built(name), file := Path(folder) / "model.onnx", EXPORTERS[how])
        return graph_row(file, name, how)


def with_heat(name: str) -> list[str]:
    """Return a row of "heat"."""
    steps = transforms.Resize(256), transforms.CenterCrop(SIDE), transforms.ToTensor()
    preprocess: Any = transforms.Compose([*steps, transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    if name in WEIGHTS:
        loaded = load_network(DATA, name)
        module, preprocess = loaded.module, loaded.preprocess
    else:
        module = built(name)
    explainer = camkit.Explainer(module, preprocess=preprocess)
    pictures = [preprocess(Image.open(DATA / "open_photos" / photo).convert("RGB")) for photo in PHOTOS]
    batch = torch.stack(pictures)
    explanations = [explainer(picture) for picture in pictures]
    maps = np.stack([each.raw for each in explanations])
    with torch.no_grad():
        (scores,) = tree_leaves(module(batch))
    row = [f"{name}, ImageNet" if name in WEIGHTS else name, explanations[0].method, f"`{explanations[0].layer}`"]
    row.append("x".join(map(str, maps.shape[1:])))
    with tempfile.TemporaryDirectory() as folder:
        file, plain, program = (Path(folder) / each for each in ("heat.onnx", "plain.onnx", "heat.pt2"))
        begin = time.perf_counter()
        row.append(written(module, file, preprocess))
        seconds = f"{time.perf_counter() - begin:.0f}"
        if file.exists():
            export(module, plain)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            sessions = [onnxruntime.InferenceSession(each, options) for each in (file, plain)]
            picture = batch[:1].numpy()
            runs = [functools.partial(each.run, None, {each.get_inputs()[0].name: picture}) for each in sessions]
            times = take_turns({"heat": ready(runs[0]), "plain": ready(runs[1])}, 25)
            row += [*map(share, (scores, maps), sessions[0].run(None, {"image": batch.numpy()}))]
            row += [f"{quartiles(*times.values())[1]:.2f}", f"{file.stat().st_size / plain.stat().st_size:.3f}"]
            row.append(str(onnx.load(file).opset_import[0].version))
        else:
            row += [""] * 5
        row.append(seconds)
        row.append(written(module, program, preprocess))
        found = ["", ""]
        if program.exists():
            with torch.no_grad():
                found = [*map(share, (scores, maps), torch.export.load(program).module()(batch))]
    return [*row, *found]


def written(module: nn.Module, file: Path, preprocess: Any) -> str:
    """Export a network with its heat; return on how many versions of a picture it agrees, or why it is refused."""
    try:
        return camkit.export(module, file, preprocess=preprocess)["agreement"]
    except camkit.CamkitError as error:
        return str(error).replace(str(file), file.suffix)


def printed(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, and print each of its lines as soon as it is known."""
    lines = []
    for row in itertools.chain((heads, ["---"] * len(heads)), rows):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def kept(state: Path, jobs: Mapping[str, Callable[[], Sequence[str]]]) -> Iterator[Sequence[str]]:
    """Yield the rows that a state file holds a line each of, and those of the other jobs, which are added to it."""
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


def jobs_of(table: str, named: Sequence[str]) -> Mapping[str, Callable[[], Sequence[str]]]:
    """Return what makes the rows of a table, by name."""
    if table == "heat":
        return {name: functools.partial(with_heat, name) for name in named or (*NETWORKS, *FURTHER)}
    if table == "networks":
        pairs = itertools.product(named or NETWORKS, (".pt2", ".onnx"))
        return {" ".join(pair): functools.partial(compared, *pair) for pair in pairs}
    files = {f"{Path(file).name} ()": functools.partial(graph_row, Path(file), Path(file).name, "") for file in named}
    pairs = itertools.product(GRAPHS, EXPORTERS)
    return files | {f"{name} ({how})": functools.partial(exported_graph, name, how) for name, how in pairs}


def main() -> None:
    """Print a table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("table", choices=HEADS)
    parser.add_argument("named", nargs="*", metavar="NETWORK|FILE")
    parser.add_argument("--state", type=Path, default=Path("exported.jsonl"), metavar="FILE", help="the rows so far")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = printed(HEADS[options.table], kept(options.state, jobs_of(options.table, options.named)))
    if options.markdown:
        packages = ("camkit", "torch", "torchvision", "timm", "transformers", "onnx", "onnxruntime", "onnxslim")
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        write_between(options.markdown, options.table, f"`scripts/zoo/exported.py` with {versions}.\n\n{text}")


if __name__ == "__main__":
    main()
