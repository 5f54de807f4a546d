"""Measure what a call costs beside another call in the same run: Explainers, methods, metrics and comparisons.

    python -m scripts.bench.bench_calls --markdown calls.md
    python -m scripts.bench.bench_calls --only "Explainer" "first call" --threads 1 --rounds 16
    python -m scripts.bench.bench_calls --only "pictures" --pictures 1 4 16 64
    python -m scripts.bench.bench_calls --busy

Each row compares two calls, which take turns. The networks have random weights, since the cost does not depend on them.
A new row is one more that ``rows`` yields.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import camkit
from camkit.methods.on_one_picture import at_once
from camkit.metrics import Evaluator, Heat
from camkit.metrics.evaluator import random_map
from scripts.bench.timing import Opener, Run, network, plain, processor, quartiles, ready, table, take_turns

SIZE = 224

WINDOWS = 169
"""The places of occlusion's window on a picture of this size, by default."""

STEPS = 10
"""Steps of the metrics' curves: half as many as by default, so that what is done once for a picture weighs more."""

LAYERS = {
    "mobilenet_v3_small": "features.12",
    "mobilenet_v2": "features.18",
    "resnet18": "layer4",
    "resnet50": "layer4",
    "vit_b_16": "encoder.layers.encoder_layer_11.ln_1",
}
"""The networks that explain one picture at a time, and the layer to explain in each."""

DEFAULTS = ("resnet50", "mobilenet_v2", "timm:vit_small_patch16_224", "timm:swin_tiny_patch4_window7_224")
"""The networks whose default method is compared."""

SCORING = ("srg", "insertion", "deletion", "average-drop", "road", "feature-srg")
"""The metrics that score changed pictures."""


@dataclass(frozen=True)
class Row:
    """Two calls to compare.

    Attributes:
        name: what is measured.
        against: what it is divided by.
        prepare: builds both calls.
    """

    name: str
    against: str
    prepare: Callable[[], tuple[Opener, Opener]]


def pictures(count: int, device: str) -> Tensor:
    """Return seeded pictures of noise (N, 3, 224, 224)."""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(count)).to(device)


def one_picture(name: str, device: str) -> tuple[Opener, Opener]:
    """Return an Explainer with a named layer, and one plain pass."""
    model, image = network(name, device), pictures(1, device)
    explainer = camkit.Explainer(model, LAYERS[name], method="gradcam")
    return ready(lambda: explainer(image)), ready(plain(model, image))


def beside_torchcam(name: str, device: str) -> tuple[Opener, Opener]:
    """Return an Explainer with a named layer, and torchcam's Grad-CAM of the same picture at the same layer."""
    from torchcam.methods import GradCAM  # noqa: PLC0415 - optional

    image = pictures(1, device)
    own = copy.deepcopy(network(name, device))
    extractor = GradCAM(own, LAYERS[name])

    def run() -> None:
        scores = own(image.clone().requires_grad_())
        extractor(scores.argmax(1).tolist(), scores)

    return one_picture(name, device)[0], ready(run)


def first_call(name: str, device: str) -> tuple[Opener, Opener]:
    """Return the making of an Explainer for a fresh model and its first call, and a later call."""
    model, image = network(name, device), pictures(1, device)
    explainer = camkit.Explainer(model, method="gradcam")

    @contextmanager
    def fresh() -> Iterator[Run]:
        own = copy.deepcopy(model)
        yield lambda: camkit.Explainer(own, method="gradcam")(image)

    return fresh, ready(lambda: explainer(image))


def several(name: str, method: str, count: int, device: str) -> tuple[Opener, Opener]:
    """Return a method on several pictures in one call, and one plain pass of them.

    Expected gradients compare with 16 pictures; after the first call, they keep what the network returns for them.
    """
    model, images = network(name, device), pictures(count, device)
    references = pictures(16, device) if method == "expected" else None
    explainer = camkit.Explainer(model, method=method, references=references)
    return ready(lambda: explainer.batch(images, batch_size=count)), ready(plain(model, images))


def of_method(name: str, method: str, layer: str | None, device: str) -> tuple[Opener, Opener]:
    """Return a method on one picture, and one plain pass."""
    model, image = network(name, device), pictures(1, device)
    explainer = camkit.Explainer(model, layer, method=method)
    return ready(lambda: explainer(image, 0)), ready(plain(model, image))


def score_cam(device: str) -> tuple[Opener, Opener]:
    """Return Score-CAM at a layer of 128 channels, and as many forward passes in batches of the same size."""
    model, image, batch = network("resnet18", device), pictures(1, device), at_once(torch.device(device))
    explainer = camkit.Explainer(model, "layer2", method="scorecam")
    return ready(lambda: explainer(image, 0)), ready(plain(model, pictures(batch, device), 128 // batch))


def occlusion(device: str) -> tuple[Opener, Opener]:
    """Return occlusion, and as many forward passes, with the plain one, in batches of the same size."""
    model, image, batch = network("squeezenet1_1", device), pictures(1, device), at_once(torch.device(device))
    explainer = camkit.Explainer(model, method="occlusion")
    full, rest = divmod(1 + WINDOWS, batch)
    parts = [plain(model, pictures(batch, device), full)] + [plain(model, pictures(rest, device))] * bool(rest)
    return ready(lambda: explainer(image, 0)), ready(lambda: [part() for part in parts])


def exported(name: str, device: str) -> tuple[Opener, Opener]:
    """Return Grad-CAM on an ONNX file, and onnxruntime alone on the file, with as many threads as PyTorch."""
    import onnxruntime  # noqa: PLC0415 - optional

    image = pictures(1, device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / f"{name}.onnx"
        torch.onnx.export(network(name, device), (image,), file, dynamo=False, opset_version=17)
        explainer = camkit.Explainer(camkit.load_model(str(file), device=device), method="gradcam")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: image.cpu().numpy()}
    return ready(lambda: explainer(image, 0)), ready(lambda: session.run(None, inputs))


def compared(device: str) -> tuple[Opener, Opener]:
    """Return ``camkit.compare`` with its default methods, and one plain pass."""
    model, image = network("mobilenet_v2", device), pictures(1, device)
    return ready(lambda: camkit.compare(model, image[0])), ready(plain(model, image))


def of_metric(name: str, metric: str, device: str) -> tuple[Opener, Opener]:
    """Return a metric of one map, with preparing the picture, and one plain pass."""
    model, image = network(name, device), pictures(1, device)
    explainer = camkit.Explainer(model, LAYERS[name], method="gradcam")

    def run() -> None:
        Evaluator(explainer, image[0], 0, steps=STEPS)(Heat(random_map((SIZE, SIZE))), metric)

    return ready(run), ready(plain(model, image))


def rows(counts: Sequence[int] = (1, 16), device: str = "cpu") -> Iterator[Row]:
    """Yield the rows."""
    for name in LAYERS:
        yield Row(f"Explainer, {name}", "a plain pass", partial(one_picture, name, device))
        if find_spec("torchcam") and not name.startswith("vit"):  # torchcam does not explain it
            yield Row(f"Explainer beside torchcam, {name}", "torchcam", partial(beside_torchcam, name, device))
        yield Row(f"first call, {name}", "a later call", partial(first_call, name, device))
    for name in DEFAULTS:
        for count in counts:
            for method in ("gradcam", "auto", "expected"):
                title = f"{method}, {name}, pictures: {count}"
                yield Row(title, "a plain pass", partial(several, name, method, count, device))
    heads = {"ablationcam": "all 512 channels", "reciprocam": "all 49 cells"}
    for method, what in heads.items():
        yield Row(
            f"{method}, resnet18, {what}", "a plain pass", partial(of_method, "resnet18", method, "layer4", device)
        )
    for method in ("fullgrad", "guidedbackprop", "guidedgradcam"):
        yield Row(f"{method}, resnet18", "a plain pass", partial(of_method, "resnet18", method, None, device))
    yield Row("scorecam, resnet18", "its forward passes alone", partial(score_cam, device))
    yield Row("occlusion, squeezenet1_1", "its 170 forward passes alone", partial(occlusion, device))
    for name in ("squeezenet1_1", "mobilenet_v2"):
        yield Row(f"Grad-CAM of an ONNX file, {name}", "onnxruntime alone", partial(exported, name, device))
    yield Row("compare, mobilenet_v2", "a plain pass", partial(compared, device))
    for name in ("resnet18", "mobilenet_v2"):
        for metric in SCORING:
            yield Row(f"metric {metric}, {name}", "a plain pass", partial(of_metric, name, metric, device))


def main() -> None:
    """Measure the rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--pictures", type=int, nargs="+", default=[1, 16], help="pictures in a call of the defaults")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are measured, after two that are not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--busy", action="store_true", help="count processor time on one thread, on a machine that does other work"
    )
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1 if given.busy else given.threads)
    clock = time.process_time if given.busy else time.perf_counter
    lines = []
    for row in rows(given.pictures, given.device):
        if not any(text in row.name for text in given.only):
            continue
        work, base = row.prepare()
        seconds = take_turns({"work": work, "base": base}, given.rounds, clock=clock)
        ratios = [f"{ratio:.2f}" for ratio in quartiles(seconds["work"], seconds["base"])]
        ms = [f"{1000 * statistics.median(seconds[which]):.1f}" for which in ("work", "base")]
        lines.append((row.name, row.against, ratios[1], ratios[0], ratios[2], *ms))
        print(*lines[-1], sep=" | ", flush=True)
    text = table(("", "divided by", "ratio", "from", "to", "ms", "by ms"), lines)
    print(f"{processor(given.device)[0]}, torch {torch.__version__}\n\n{text}")
    if given.markdown:
        given.markdown.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
