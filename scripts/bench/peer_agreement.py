"""Compares camkit's maps with grad-cam's, method by method, and writes the table into scripts/results/agreement.md.

    .venv/bin/python -m scripts.bench.peer_agreement --data ../shared/data

Both get the same photos, weights, classes and layer. The numbers are Pearson's correlations of the signed maps on the
layer's grid, before anything is cut off or scaled. Where grad-cam computes something else than the paper, a second
column shows grad-cam's own code with that one step undone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytorch_grad_cam as peer
import torch
from PIL import Image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import Tensor, nn

import camkit
from camkit.models.loaded import LoadedModel
from scripts.weights import OF_TORCHVISION, PHOTOS, load_network

PAGE = Path(__file__).parents[1] / "results" / "agreement.md"
START, END = "<!-- agreement -->\n", "<!-- end of agreement -->\n"

LAYER = "features"

Maps = np.ndarray
"""Signed maps (N, h, w)."""


@dataclass(frozen=True)
class Comparison:
    """A method of camkit, and the same of grad-cam.

    Attributes:
        method: camkit's name of the method.
        kind: grad-cam's class.
        smooth: camkit's smoothing.
        options: the same for grad-cam.
        centres: whether grad-cam subtracts each channel's mean before it takes the first principal component.
        note: why the maps differ, or what else to know.
    """

    method: str
    kind: type[Any]
    smooth: str | None = None
    options: tuple[str, ...] = ()
    centres: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """The method, with its smoothing."""
        return f"`{self.method}`" + ("" if self.smooth is None else f', `smooth="{self.smooth}"`')


_CENTRED = "grad-cam subtracts each channel's mean, and leaves the sign to chance"
_OTHER_FEM = "grad-cam sums share(A_k > m_k + 2 s_k) A_k; the paper, and camkit, m_k [A_k > m_k + 2 s_k]"
_LINEAR = "these networks are piecewise linear after the layer, so ShapleyCAM is Grad-CAM"

COMPARISONS = (
    Comparison("eigencam", peer.EigenCAM, centres=True, note=_CENTRED),
    Comparison("eigengradcam", peer.EigenGradCAM, centres=True, note=_CENTRED),
    Comparison("gradcam", peer.GradCAM, "eigen", ("eigen_smooth",), centres=True, note=_CENTRED),
    Comparison("gradcam", peer.GradCAM, "augment", ("aug_smooth",)),
    Comparison("ablationcam", peer.AblationCAM),
    Comparison("shapleycam", peer.ShapleyCAM, note=_LINEAR),
    Comparison("kpcacam", peer.KPCA_CAM),
    Comparison("fem", peer.FEM, note=_OTHER_FEM),
)


def without_centring(maps: Maps) -> Maps:
    """Return grad-cam's projection (N, h, w) of maps (N, C, h, w), without the subtraction of each channel's mean.

    Cells and their negatives together have a mean of 0 and the same right singular vectors.
    """
    both = np.concatenate([maps, -maps], axis=2)
    return np.asarray(get_2d_projection(both))[:, : maps.shape[2]]


@contextmanager
def not_centring() -> Iterator[None]:
    """Let grad-cam's methods project without centring inside the block."""
    modules = ("base_cam", "eigen_cam", "eigen_grad_cam")
    patches = [mock.patch(f"pytorch_grad_cam.{name}.get_2d_projection", without_centring) for name in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def peers_maps(kind: Any, net: nn.Module, images: Tensor, targets: Sequence[int], options: Sequence[str] = ()) -> Maps:
    """Return grad-cam's signed maps (N, h, w) before it cuts and scales them; with ``aug_smooth``, their mean."""
    raws: list[Maps] = []

    class Listening(kind):  # type: ignore[misc]
        def get_cam_image(self, *arguments: Any, **named: Any) -> Maps:
            raws.append(np.asarray(super().get_cam_image(*arguments, **named), np.float32))
            return raws[-1]

    net.requires_grad_()  # grad-cam needs gradients of the parameters
    try:
        with Listening(net, [net.get_submodule(LAYER)]) as cam:
            cam(images, [ClassifierOutputTarget(target) for target in targets], **dict.fromkeys(options, True))
    finally:
        net.requires_grad_(requires_grad=False)
    half = len(raws) // 2  # grad-cam runs the mirrored pictures last
    unmirrored = raws[:half] + [raw[..., ::-1] for raw in raws[half:]] if half else raws
    return np.asarray(np.mean(unmirrored, axis=0))


def correlations(maps: Sequence[Maps], others: Sequence[Maps], *, signed: bool = True) -> list[float]:
    """Return the correlation of each pair of maps; without ``signed``, its absolute value."""
    found = [float(np.corrcoef(one.ravel(), other.ravel())[0, 1]) for one, other in zip(maps, others, strict=True)]
    return found if signed else [abs(value) for value in found]


@dataclass(frozen=True)
class Agreement:
    """How well the maps of all photos correlate: as grad-cam publishes them, and without its centring."""

    comparison: Comparison
    published: tuple[float, ...]
    undone: tuple[float, ...]


def load(data: Path, name: str) -> tuple[LoadedModel, Tensor]:
    """Return a network with its shared weights, and the photos as its input."""
    model = load_network(data, name)
    assert model.preprocess is not None
    pictures = [Image.open(data / "open_photos" / photo).convert("RGB") for photo in PHOTOS]
    return model, torch.stack([model.preprocess(picture) for picture in pictures])


def compare(model: LoadedModel, images: Tensor, comparison: Comparison) -> Agreement:
    """Compare one method on all photos."""
    net = model.module
    with torch.no_grad():
        classes = net(images).argmax(1).tolist()
    each: Callable[[list[int]], Any] = camkit.targets.each
    options: dict[str, Any] = {"method": comparison.method, "smooth": comparison.smooth, "target": each(classes)}
    found = [row.raw for row in camkit.explain_many(net, images, LAYER, spread="even", **options)]
    published = peers_maps(comparison.kind, net, images, classes, comparison.options)
    undone: list[float] = []
    if comparison.centres:
        with not_centring():
            maps = peers_maps(comparison.kind, net, images, classes, comparison.options)
        undone = correlations(found, list(maps), signed=False)
    return Agreement(comparison, tuple(correlations(found, list(published))), tuple(undone))


def table(agreements: Sequence[Agreement]) -> str:
    """Return the table, with the agreements of all networks of a method in one row."""
    lines = [
        f"camkit {camkit.__version__} and grad-cam {version('grad-cam')}, torch {torch.__version__.split('+')[0]}: "
        f"{len(PHOTOS)} photos, {' and '.join(OF_TORCHVISION)} at their layer `{LAYER}`. The correlation of the signed "
        "maps, from the lowest to the highest.",
        "",
        "| method | grad-cam as published | without its centring | remark |",
        "|---|---|---|---|",
    ]
    for comparison in dict.fromkeys(agreement.comparison for agreement in agreements):
        same = [agreement for agreement in agreements if agreement.comparison is comparison]
        columns = [_range([value for one in same for value in values(one)]) for values in (_published, _undone)]
        lines.append(f"| {comparison.name} | {' | '.join(columns)} | {comparison.note} |")
    return "\n".join(lines) + "\n"


def _published(agreement: Agreement) -> tuple[float, ...]:
    return agreement.published


def _undone(agreement: Agreement) -> tuple[float, ...]:
    return agreement.undone


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.4f}", f"{max(values):.4f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the folder with weights/ and open_photos/")
    options = parser.parse_args()
    agreements = []
    for name in OF_TORCHVISION:
        model, images = load(options.data, name)
        for comparison in COMPARISONS:
            agreements.append(compare(model, images, comparison))
            print(name, comparison.name, *map(_range, (agreements[-1].published, agreements[-1].undone)), flush=True)
    before, rest = PAGE.read_text("utf-8").split(START)
    after = rest.split(END)[1]
    PAGE.write_text(before + START + table(agreements) + END + after, "utf-8")


if __name__ == "__main__":
    main()
