"""Measure how many pictures a second camkit explains, beside plain inference, on a GPU or a CPU.

    python -m scripts.bench.bench_stream --markdown stream.md
    python -m scripts.bench.bench_stream --device cpu --batches 1 8 --pictures 16 --rounds 3

"Tensors" are inputs in memory, so only computing counts. "Files" are JPEG files, which both sides decode and prepare in
threads while the network runs. Plain inference and camkit take turns. The networks have random weights: the cost does
not depend on them. bf16 is left out on processors that do not compute in it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import camkit
from camkit.engine.passes import usable_precision
from camkit.models.loaded import LoadedModel
from camkit.types import Precision
from scripts.bench.bench_folder import plain_batches, write_photos
from scripts.bench.timing import processor, quartiles, ready, table, take_turns

NETWORKS = {"resnet50": "layer4", "vit_b_16": "encoder.layers.encoder_layer_11.ln_1"}
"""The networks, and the layer to explain in each."""

PHOTO = (500, 375)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Rate:
    """What the rounds gave for one network, precision, batch size and kind of input; rates are pictures a second."""

    network: str
    precision: str
    batch: int
    inputs: str
    plain: float
    camkit: float
    ratio: float


class Bench:
    """A network on a device, with everything the variants need."""

    def __init__(self, name: str, device: torch.device, precision: Precision, batch: int) -> None:
        torch.manual_seed(0)
        weights = torchvision.models.get_model_weights(name).DEFAULT
        self.preprocess = weights.transforms()
        self.layout = torch.channels_last if name.startswith("resnet") else torch.contiguous_format
        self.module: nn.Module = torchvision.models.get_model(name).eval().to(device, memory_format=self.layout)
        self.device, self.precision, self.batch = device, precision, batch
        loaded = LoadedModel(self.module, name, self.preprocess, None)
        self.explainer = camkit.Explainer(loaded, NETWORKS[name], method="gradcam", precision=precision)

    def _precise(self) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def classify(self, inputs: list[Tensor]) -> list[int]:
        """Return the best class of each input; ``plain_batches`` calls this."""
        with torch.inference_mode(), self._precise():
            batch = torch.stack(inputs).to(self.device, memory_format=self.layout)
            classes: list[int] = self.module(batch).argmax(1).tolist()
            return classes

    def plain_tensors(self, inputs: Sequence[Tensor]) -> None:
        """Classify tensors in batches."""
        for start in range(0, len(inputs), self.batch):
            self.classify(list(inputs[start : start + self.batch]))

    def plain_files(self, files: Sequence[Path]) -> None:
        """Classify files; threads decode and prepare the next ones."""
        plain_batches(self, list(files), None, batch=self.batch)

    def explain(self, pictures: Iterable[Tensor | Path]) -> None:
        """Explain pictures, and take their maps."""
        for explanation in self.explainer.stream(pictures, batch_size=self.batch):
            explanation.raw  # noqa: B018 - the map comes to the CPU


def measure(bench: Bench, network: str, files: Sequence[Path], rounds: int) -> Iterator[Rate]:
    """Yield the rates with tensors and with files."""
    tensors = [torch.randn(3, 224, 224) for _ in files]
    kinds: dict[str, dict[str, Callable[[], None]]] = {
        "tensors": {"plain": lambda: bench.plain_tensors(tensors), "camkit": lambda: bench.explain(tensors)},
        "files": {"plain": lambda: bench.plain_files(files), "camkit": lambda: bench.explain(files)},
    }
    for inputs, variants in kinds.items():
        seconds = take_turns({name: ready(run) for name, run in variants.items()}, rounds)
        plain, explained = (len(files) / statistics.median(seconds[name]) for name in ("plain", "camkit"))
        _, ratio, _ = quartiles(seconds["plain"], seconds["camkit"])
        yield Rate(network, bench.precision, bench.batch, inputs, plain, explained, ratio)


def main() -> None:
    """Measure each network, precision and batch size, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rates: list[Rate] = []
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), options.pictures, PHOTO)
        files = sorted(Path(folder).glob("*.jpg"))
        for network, precision, batch in itertools.product(options.networks, PRECISIONS, options.batches):
            if usable_precision(precision, device)[0] != precision:
                continue
            bench = Bench(network, device, precision, batch)
            for rate in measure(bench, network, files, options.rounds):
                rates.append(rate)
                print(rate, flush=True)
    heads = ("network", "precision", "batch", "inputs", "plain, pictures a second", "camkit", "camkit / plain")
    cells = [
        (of.network, of.precision, f"{of.batch}", of.inputs, f"{of.plain:.1f}", f"{of.camkit:.1f}", f"{of.ratio:.2f}")
        for of in rates
    ]
    title = f"{processor(options.device)[0]}, torch {torch.__version__}, {options.pictures} pictures"
    text = f"{title}, {options.rounds} rounds\n\n{table(heads, cells)}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
