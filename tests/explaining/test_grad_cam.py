"""On real photos, camkit's maps are those of grad-cam, or differ as the docs say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import camkit
from camkit.engine.heatmap import fuse_heatmaps

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


def peers_maps(kind: Any, net: nn.Module, images: Tensor, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return grad-cam's signed maps (N, h, w) before it scales each to 0..1, and the heatmaps it hands to its users."""
    raw: list[np.ndarray] = []

    class Listening(kind):
        def get_cam_image(self, *arguments: Any, **options: Any) -> np.ndarray:
            raw.append(super().get_cam_image(*arguments, **options))
            return raw[-1]

    net.requires_grad_()  # grad-cam needs gradients of the parameters
    try:
        with Listening(net, [net.features]) as cam:
            scaled = cam(images, [ClassifierOutputTarget(target) for target in targets])
    finally:
        net.requires_grad_(requires_grad=False)
    return np.asarray(raw[0], np.float32), scaled


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.parametrize("method", PEERS)
def test_maps_agree_with_grad_cam_on_every_photo(model, folder, method):
    paths = [folder / photo for photo in PHOTOS]
    found = camkit.explain(model, paths, "features", method=method, spread="even")
    images = torch.stack([model.preprocess(Image.open(path).convert("RGB")) for path in paths])

    raws, scaled = peers_maps(PEERS[method], model.module, images, [row.target for row in found])

    heatmaps = fuse_heatmaps([torch.from_numpy(raws)], images.shape[2:]).numpy()
    for photo, row, raw, heatmap, handed in zip(PHOTOS, found, raws, heatmaps, scaled, strict=True):
        assert correlation(row.raw, raw) > 0.999, photo
        assert correlation(row.heatmap, heatmap) > 0.999, photo
        assert correlation(row.heatmap, handed) > 0.999, photo
        assert np.allclose(row.raw, raw, rtol=0, atol=1e-4 * np.abs(raw).max()), photo


def test_grad_cams_epsilon_changes_real_maps_and_camkits_have_none(model, folder):
    path = folder / "bird.png"
    row = camkit.explain(model, path, "features", method="gradcam++")
    with Image.open(path) as picture:
        images = model.preprocess(picture.convert("RGB"))[None]

    plain, _ = peers_maps(GradCAMPlusPlus, model.module, images, [row.target])
    without, _ = peers_maps(WithoutEpsilon, model.module, images, [row.target])

    assert np.abs(row.raw - plain[0]).max() > 0.1 * np.abs(plain[0]).max()
    assert np.allclose(row.raw, without[0], rtol=0, atol=1e-4 * np.abs(without[0]).max())


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


def test_grad_cams_fem_is_what_the_docs_say(test_data):
    model, images = peer_agreement.load(test_data, "mobilenet_v2")
    maps = model.module.features(images).detach().numpy()
    exceeds = maps > maps.mean((2, 3), keepdims=True) + 2 * maps.std((2, 3), keepdims=True)
    expected = (exceeds.mean((2, 3), keepdims=True) * maps).sum(1)

    found = peer_agreement.peers_maps(peer_agreement.peer.FEM, model.module, images, [0] * len(images))

    assert np.allclose(found, expected, rtol=1e-4)


def test_heatmaps_that_are_smoothed_agree_with_the_ones_that_grad_cam_hands_out(model, folder):
    paths = [folder / photo for photo in PHOTOS]
    found = camkit.explain(model, paths, "features", method="gradcam", smooth="augment", spread="even")
    images = torch.stack([model.preprocess(Image.open(path).convert("RGB")) for path in paths])
    targets = [ClassifierOutputTarget(row.target) for row in found]
    model.module.requires_grad_()
    with GradCAM(model.module, [model.module.features]) as cam:
        handed = cam(images, targets, aug_smooth=True)
    model.module.requires_grad_(requires_grad=False)

    for photo, row, heatmap in zip(PHOTOS, found, handed, strict=True):
        assert correlation(row.heatmap, heatmap) > 0.99, photo


def test_the_docs_have_the_agreement_of_every_comparison():
    page = peer_agreement.PAGE.read_text("utf-8").split(peer_agreement.START)[1].split(peer_agreement.END)[0]
    for comparison in peer_agreement.COMPARISONS:
        assert f"| {comparison.name} | " in page
        assert f" | {comparison.note} |" in page
