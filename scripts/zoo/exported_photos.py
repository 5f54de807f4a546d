"""Check and explain two ImageNet networks and their exported files on photos: the same verdict, figures and maps?

    python -m scripts.zoo.exported_photos --data ../shared/data --markdown scripts/results/exported.md

The check has 12 outlined photos of each of four animals of Caltech-101. Maps are drawn for the first photo of each
animal: by Grad-CAM at the deepest grid, or by occlusion if the file runs without gradients. Times are the processor's,
for one picture and one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from torch import nn

import camkit
from scripts.lab.lab_run import write_between

NETWORKS = {"squeezenet1_1": "squeezenet1_1-winml_fp16.pth", "mobilenet_v2": "mobilenet_v2-coral_qat.pth"}

FILES = {
    "model.pt2": "torch.export",
    "dynamo.onnx": "ONNX, opset 20",
    "traced.onnx": "ONNX, opset 17, older exporter",
    "model.ts": "TorchScript",
}

ANIMALS = ("dragonfly", "elephant", "flamingo", "panda")
PER_ANIMAL = 12

CONFIG = {"check": {"shortcuts": 0}, "limits": {"least_pictures": PER_ANIMAL}}

OCCLUSION = camkit.methods.variant("occlusion", window=56, stride=28)

MARK = "photos"
HEADS = (
    *("network", "file", "verdict", "gap, blur", "gap, tile", "answers that differ", "maps differ by"),
    *("forward pass, ms", "onnxruntime alone, ms", "explaining, ms", "method"),
)


def choose_photos(data: Path, folder: Path) -> Path:
    """Copy the first photos of each animal and their outlines to a folder."""
    outlines = json.loads((data / "caltech" / "instances.json").read_text("utf-8"))
    chosen = [
        image
        for animal in ANIMALS
        for image in [each for each in outlines["images"] if each["file_name"].startswith(f"{animal}/")][:PER_ANIMAL]
    ]
    for image in chosen:
        (folder / image["file_name"]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data / "caltech" / image["file_name"], folder / image["file_name"])
    numbers = {image["id"] for image in chosen}
    kept = [each for each in outlines["annotations"] if each["image_id"] in numbers]
    (folder / "instances.json").write_text(json.dumps({**outlines, "images": chosen, "annotations": kept}), "utf-8")
    return folder


def export(module: nn.Module, file: Path) -> None:
    """Write a network as the name of the file says, for any number of pictures."""
    example = torch.randn(2, 3, 224, 224)
    if file.name == "model.pt2":
        program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("N")},))
        torch.export.save(program, file)
    elif file.name == "model.ts":
        torch.jit.trace(module, example).save(file)
    elif file.name == "dynamo.onnx":
        torch.onnx.export(
            module, (example,), file, dynamo=True, dynamic_shapes=({0: "N"},), external_data=False, verbose=False
        )
    else:
        names: dict[str, Any] = {"input_names": ["images"], "dynamic_axes": {"images": {0: "N"}}}
        torch.onnx.export(module, (example,), file, dynamo=False, opset_version=17, **names)


def median_ms(function: Callable[[], object], rounds: int = 15) -> float:
    """Return the median time of a call on the processor in milliseconds, after a call that does not count."""
    times = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return 1000 * statistics.median(times[1:])


def onnxruntime_ms(file: Path, image: torch.Tensor) -> float:
    """Return how long onnxruntime takes for one picture and one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: image.numpy()}
    return median_ms(lambda: session.run(None, inputs))


def explained(explainer: camkit.Explainer, picture: torch.Tensor, target: Any = None) -> camkit.Explanation:
    """Return the explanation of one picture."""
    found = explainer(picture, target=target)
    assert isinstance(found, camkit.Explanation)
    return found


def rows_of(name: str, data: Path, photos: Path, folder: Path) -> list[list[str]]:
    """Return the rows of a network and of its files."""
    plain = camkit.load_model(name, weights=data / "weights" / NETWORKS[name])
    prepare: Any = plain.preprocess
    class_map = {
        animal: indices
        for animal, indices in json.loads((data / "caltech" / "to_imagenet.json").read_text("utf-8")).items()
        if animal in ANIMALS
    }
    pictures = [prepare(Image.open(min((photos / animal).iterdir())).convert("RGB")) for animal in ANIMALS]

    def check(model: camkit.LoadedModel) -> camkit.CheckResult:
        return camkit.check(
            model, photos, preprocess=prepare, labels=plain.labels, class_map=class_map, config=CONFIG
        )  # fmt: skip

    expected = check(plain)
    answers = {row.name: row.answer for row in expected.images}
    rows = []
    for file, kind in {"": "PyTorch", **FILES}.items():
        model, result = plain, expected
        if file:
            export(plain.module, folder / file)
            model = camkit.load_model(str(folder / file), trust_remote_code=True)
            result = check(model)
        method: Any = OCCLUSION if "without gradients" in (model.note or "") else "gradcam"
        explainer = camkit.Explainer(model, method=method)
        differs = max(
            float(np.abs(explained(explainer, picture, right.target).raw - right.raw).max() / np.abs(right.raw).max())
            for picture in pictures
            for right in [explained(camkit.Explainer(plain, method=method), picture)]
        )
        with torch.no_grad():
            forward = median_ms(functools.partial(model.module, pictures[0][None]))
        alone = f"{onnxruntime_ms(folder / file, pictures[0][None]):.0f}" if file.endswith(".onnx") else ""
        explaining = median_ms(functools.partial(explainer, pictures[0]), 15 if method == "gradcam" else 1)
        gaps = [f"{result.overall.gap.by_fill[fill].effect.value:.4f}" for fill in ("blur", "tile")]
        others = sum(row.answer != answers[row.name] for row in result.images)
        drawn = "gradcam" if method == "gradcam" else "occlusion, 49 windows"
        figures = [f"{differs:.0e}", f"{forward:.0f}", alone, f"{explaining:.0f}", drawn]
        rows.append([name, kind, result.verdict, *gaps, f"{others} of {len(answers)}", *figures])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEADS, ["---"] * len(HEADS), *rows)) + "\n"


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page to write the table into")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        photos = choose_photos(options.data, Path(folder) / "photos")
        rows = [row for name in NETWORKS for row in rows_of(name, options.data, photos, Path(folder))]
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
