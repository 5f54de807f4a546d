"""On real photos, camkit's maps are those of grad-cam, or differ as the docs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import camkit
from camkit.models import LoadedModel

pytestmark = pytest.mark.extended

pytest.importorskip("pytorch_grad_cam")

from pytorch_grad_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

from scripts.bench import peer_agreement
from scripts.weights import OF_TORCHVISION, PHOTOS

ENLARGED = 1e5


class WithoutEpsilon(GradCAMPlusPlus):
    """grad-cam's own Eq. 19, with the 1e-6 it adds to the denominator made too small to matter.

    That sum is 2 g^2 + g^3 sum(A) + 1e-6. With k g and A / k in place of g and A it is k^2 times the same sum with
    1e-6 / k^2, and the weights come out k times as large. Gradients of real networks are near 1e-4, where the plain
    1e-6 outweighs 2 g^2.
    """

    def get_cam_weights(self, images: Any, layer: Any, targets: Any, activations: Any, gradients: Any) -> np.ndarray:
        smaller, larger = activations.astype(np.float64) / ENLARGED, gradients.astype(np.float64) * ENLARGED
        return super().get_cam_weights(images, layer, targets, smaller, larger) / ENLARGED


PEERS = {
    "gradcam": GradCAM,
    "gradcam++": WithoutEpsilon,
    "hirescam": HiResCAM,
    "xgradcam": XGradCAM,
    "layercam": LayerCAM,
}


@pytest.fixture
def images(model: LoadedModel, folder: Path) -> Tensor:
    return torch.stack([model.preprocess(Image.open(folder / photo).convert("RGB")) for photo in PHOTOS])


@pytest.mark.parametrize("method", PEERS)
def test_maps_agree_with_grad_cam_on_every_photo(model, images, method):
    found = camkit.explain(model, images, "features", method=method)
    raws = peer_agreement.peers_maps(PEERS[method], model.module, images, [row.target for row in found])
    for photo, row, raw in zip(PHOTOS, found, raws, strict=True):
        assert np.corrcoef(row.raw.ravel(), raw.ravel())[0, 1] > 0.999, photo
        assert np.allclose(row.raw, raw, rtol=0, atol=1e-4 * np.abs(raw).max()), photo


@pytest.mark.parametrize("comparison", peer_agreement.COMPARISONS, ids=lambda comparison: comparison.name)
@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_the_newer_methods_agree_with_grad_cam_or_differ_as_documented(test_data, name, comparison):
    model, images = peer_agreement.load(test_data, name)
    found = peer_agreement.compare(model, images[1:4:2], comparison)  # two photos that differ; the script takes all
    if comparison.centres:
        assert min(found.undone) > 0.999
        assert min(found.published) < 0.95
    elif comparison.method == "fem":
        assert 0.85 < min(found.published) < 0.99
    else:
        assert min(found.published) > 0.999


@pytest.mark.parametrize(("smooth", "likeness"), [(None, 0.999), ("augment", 0.99)])
def test_heatmaps_agree_with_the_ones_that_grad_cam_hands_out(model, images, smooth, likeness):
    found = camkit.explain(model, images, "features", method="gradcam", smooth=smooth, spread="even")
    targets = [ClassifierOutputTarget(row.target) for row in found]
    model.module.requires_grad_()
    with GradCAM(model.module, [model.module.features]) as cam:
        handed = cam(images, targets, aug_smooth=smooth is not None)
    model.module.requires_grad_(requires_grad=False)
    for photo, row, heatmap in zip(PHOTOS, found, handed, strict=True):
        assert np.corrcoef(row.heatmap.ravel(), heatmap.ravel())[0, 1] > likeness, photo


def test_the_docs_have_the_agreement_of_every_comparison():
    page = peer_agreement.PAGE.read_text("utf-8").split(peer_agreement.START)[1].split(peer_agreement.END)[0]
    for comparison in peer_agreement.COMPARISONS:
        assert f"| {comparison.name} | " in page
        assert f" | {comparison.note} |" in page
