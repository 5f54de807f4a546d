"""Measures what methods cost, as ratios to something that the same run measures.

    python -m scripts.bench.bench_methods
    python -m scripts.bench.bench_methods --only scorecam --rounds 5 --device cuda
    python -m scripts.bench.bench_methods --busy

Each row compares two calls, which take turns, so that a slow moment of the machine affects both. A new row is an entry
of ``ROWS``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torchvision
from torch import Tensor, nn

import camkit
from camkit.engine.capture_pictures import at_once
from camkit.engine.passes import faster_format

Run: TypeAlias = Callable[[], object]
Prepare: TypeAlias = Callable[[torch.device], tuple[Run, Run]]

SIZE = 224

WINDOWS = 169
"""The places of occlusion's window on a picture of this size, by default."""

_MOST_ROUNDS = 40


@dataclass(frozen=True)
class Row:
    """Two calls to compare.

    Attributes:
        title: what is measured, and against what.
        prepare: builds both calls for a device.
        most: the ratio that the project promises; None if it promises none.
    """

    title: str
    prepare: Prepare
    most: float | None = None


def network(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a network of seeded weights, and a picture (3, H, W)."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval().to(device)
    return model, torch.randn(3, SIZE, SIZE, device=device)


def plain(model: nn.Module, pictures: Tensor, times: int = 1) -> Run:
    """Return a call that runs the model ``times`` times, in the format that camkit would choose."""
    pictures = pictures.contiguous(memory_format=faster_format(model, pictures, "fp32"))

    def run() -> None:
        with torch.inference_mode():
            for _ in range(times):
                model(pictures)

    return run


def score_cam(device: torch.device) -> tuple[Run, Run]:
    """Return Score-CAM at a layer of 128 channels, and as many forward passes in batches of the same size."""
    model, image = network("resnet18", device)
    batch = at_once(device)
    explainer = camkit.Explainer(model, "layer2", method="scorecam")
    return lambda: explainer(image, target=0), plain(
        model, torch.randn(batch, *image.shape, device=device), 128 // batch
    )


def occlusion(*, captums: bool) -> Prepare:
    """Return occlusion on SqueezeNet with its 169 windows, and captum's, or as many forward passes and the plain one.

    Args:
        captums: compare with captum's of the same windows, in batches of the same size.
    """

    def prepare(device: torch.device) -> tuple[Run, Run]:
        model, image = network("squeezenet1_1", device)
        batch = at_once(device)
        explainer = camkit.Explainer(model, method="occlusion")
        if not captums:
            full, rest = divmod(1 + WINDOWS, batch)
            parts = [plain(model, torch.randn(batch, *image.shape, device=device), full)]
            parts += [plain(model, torch.randn(rest, *image.shape, device=device))] if rest else []
            return lambda: explainer(image, target=0), lambda: [part() for part in parts]

        from captum.attr import Occlusion  # noqa: PLC0415 - optional

        window, stride = SIZE // 7, SIZE // 14
        shape, peer = {"sliding_window_shapes": (3, window, window), "strides": (3, stride, stride)}, Occlusion(model)

        def captum() -> None:
            with torch.no_grad():
                peer.attribute(image[None], target=0, perturbations_per_eval=batch, **shape)

        return lambda: explainer(image, target=0), captum

    return prepare


def exported(name: str) -> Prepare:
    """Return Grad-CAM on an ONNX file, and onnxruntime alone on the file, with as many threads as PyTorch."""

    def prepare(device: torch.device) -> tuple[Run, Run]:
        import onnxruntime  # noqa: PLC0415 - optional

        model, image = network(name, device)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = Path(folder) / f"{name}.onnx"
            torch.onnx.export(model, (image[None],), file, dynamo=False, opset_version=17)
            explainer = camkit.Explainer(camkit.load_model(str(file), device=device), method="gradcam")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: image[None].cpu().numpy()}
        return lambda: explainer(image, target=0), lambda: session.run(None, inputs)

    return prepare


def whole_model(method: str) -> Prepare:
    """Return a method that differentiates the whole model, and one plain pass."""

    def prepare(device: torch.device) -> tuple[Run, Run]:
        model, image = network("resnet18", device)
        explainer = camkit.Explainer(model, method=method)
        return lambda: explainer(image, target=0), plain(model, image[None])

    return prepare


def compared(*, first: bool) -> Prepare:
    """Return ``camkit.compare`` with its default methods on MobileNetV2, and one plain pass.

    Args:
        first: compare on a copy of the model that camkit has not seen.
    """

    def prepare(device: torch.device) -> tuple[Run, Run]:
        model, image = network("mobilenet_v2", device)
        copies = [copy.deepcopy(model) for _ in range(_MOST_ROUNDS + 1)] if first else []
        return lambda: camkit.compare(copies.pop() if first else model, image), plain(model, image[None])

    return prepare


ROWS = {
    "scorecam": Row("Score-CAM / its forward passes alone", score_cam, 1.05),
    "occlusion": Row("occlusion, SqueezeNet / its 170 forward passes alone", occlusion(captums=False)),
    "occlusion-captum": Row("occlusion, SqueezeNet / captum's", occlusion(captums=True)),
    "onnx-squeezenet": Row("Grad-CAM of a SqueezeNet as ONNX / onnxruntime alone", exported("squeezenet1_1")),
    "onnx-mobilenet": Row("Grad-CAM of a MobileNetV2 as ONNX / onnxruntime alone", exported("mobilenet_v2")),
    "fullgrad": Row("FullGrad / one plain pass", whole_model("fullgrad")),
    "guidedbackprop": Row("guided backpropagation / one plain pass", whole_model("guidedbackprop")),
    "guidedgradcam": Row("Guided Grad-CAM / one plain pass", whole_model("guidedgradcam")),
    "compare": Row("compare, MobileNetV2 / one plain pass", compared(first=False), 30),
    "compare-first": Row("compare on a fresh MobileNetV2 / one plain pass", compared(first=True), 30),
}


def measure(
    row: Row, device: torch.device, rounds: int, clock: Callable[[], float]
) -> tuple[float, float, list[float]]:
    """Return the median seconds of both calls, and their ratio in each round."""
    wait: Run = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = row.prepare(device)
    seconds: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        taken = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            wait()
            begin = clock()
            calls[which]()
            wait()
            taken[which] = clock() - begin
        seconds.append(tuple(taken))
    del seconds[0]  # the warm-up
    first, second = (statistics.median(column) for column in zip(*seconds, strict=True))
    return first, second, [one / other for one, other in seconds]


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, nargs="*", default=[], help="rows; all if none is named")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are measured, after one that is not")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--busy", action="store_true", help="count processor time on one thread, on a machine that does other work"
    )
    arguments = parser.parse_args()
    if arguments.busy:
        torch.set_num_threads(1)
    rounds = min(arguments.rounds, _MOST_ROUNDS)
    clock = time.process_time if arguments.busy else time.perf_counter
    for name in arguments.only or ROWS:
        row = ROWS[name]
        first, second, ratios = measure(row, torch.device(arguments.device), rounds, clock)
        promised = "" if row.most is None else f", promised {row.most:g}"
        print(
            f"{row.title}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}{promised}); "
            f"{1000 * first:.1f} ms / {1000 * second:.1f} ms"
        )


if __name__ == "__main__":
    main()
