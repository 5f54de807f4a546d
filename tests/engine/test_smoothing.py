"""Smoothed maps: the mean over changed versions of a picture, and the first principal component."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Maps, Net, SmallNet, classifier, small_picture
from oracles import (
    as_float64,
    eigengradcam,
    gradcam,
    gradient_by_differences,
    layercam,
    mean_over_versions,
    principal_map,
)
from refusals import refused
from tasks import Detecting, Padding, Segmenting, beside
from tiers import PASSES
from torch import Tensor, nn
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import CamkitError, LayerError, MethodError, TargetError
from camkit.methods import METHODS
from camkit.types import Smoothing

CLASS = 2


def explained(model: nn.Module, smooth: Smoothing | None, image: Tensor | None = None, **options) -> camkit.Explanation:
    image = small_picture() if image is None else image
    layer = options.pop("layer", "relu1")
    return camkit.explain(model, image, layer, smooth=smooth, **{"target": CLASS, **options})


def assert_equal(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def weighted_maps(model: SmallNet, image: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return one picture's maps (C, h, w) and gradients, in float64 and without autograd."""
    exact = deepcopy(model).double()
    maps = exact.trunk(image.double()[None])[0].detach()
    return as_float64(maps), gradient_by_differences(lambda a: exact.head(a[None])[0, CLASS], maps, step=1e-6)


@pytest.mark.parametrize(("method", "oracle"), [("gradcam", gradcam), ("layercam", layercam)])
def test_augment_is_the_mean_over_the_mirrored_and_multiplied_pictures(method, oracle) -> None:
    model, picture = SmallNet(activation=nn.GELU), small_picture()[0]
    places = explained(model, None, method=method).positions[-1].tolist()
    expected = mean_over_versions(lambda image: oracle(*weighted_maps(model, image)), picture, places)
    found = explained(model, "augment", method=method)
    assert_equal(found.raw, expected, 1e-4)
    plain = explained(model, None, method=method)
    assert np.abs(found.raw - plain.raw).max() > 1e-2 * np.abs(plain.raw).max()  # the versions matter
    assert (found.score, found.probability) == (plain.score, plain.probability)  # of the picture itself


def test_each_picture_keeps_its_class_in_all_versions() -> None:
    """Class 0 is the left half of the picture, class 1 the right half: a mirror image has the other class."""

    def run(net: Net, x: Tensor) -> Tensor:
        left, right = net.layer(x).sum(1).chunk(2, 2)
        return torch.stack([left.mean((1, 2)), right.mean((1, 2))], 1)

    model = Net(run, layer=nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()))
    picture = torch.randn(1, 3, 4, 8)
    pictures = torch.cat([picture, picture.flip(-1)])
    best = model(pictures).argmax(1).tolist()
    assert sorted(best) == [0, 1]
    found = camkit.explain(model, pictures, "layer", smooth="augment", method="hirescam")
    assert [row.target for row in found] == best
    for row, image in zip(found, pictures, strict=True):
        single = explained(model, "augment", image[None], layer="layer", method="hirescam", target=row.target)
        np.testing.assert_allclose(row.raw, single.raw, atol=1e-6)
    np.testing.assert_allclose(found[0].raw, found[1].raw[:, ::-1], atol=1e-6)
    assert found[0].raw.all()  # the best class of each version would put no heat on the other half


@pytest.mark.parametrize("method", ["gradcam", "finercam"])
def test_targets_that_stand_for_several_are_smoothed_as_the_classes_they_stand_for(method) -> None:
    model = SmallNet()
    picture = small_picture()
    found = camkit.explain(
        model, picture, "relu1", smooth="augment", method=method, target=[camkit.targets.above(0.3), 0]
    )
    assert len(found) > 2
    for row in found:
        single = explained(model, "augment", target=row.target, method=method)
        np.testing.assert_allclose(row.raw, single.raw, atol=1e-6)


def test_targets_that_are_no_class_are_the_same_in_all_versions() -> None:
    both, one, other = (
        explained(SmallNet(), "augment", target=target).raw for target in (lambda output: output[:, :2].sum(1), 0, 1)
    )
    np.testing.assert_allclose(both, one + other, atol=1e-5)


def test_segmentations_are_smoothed_and_their_mask_is_mirrored() -> None:
    model = Segmenting().eval()
    image, (plane, _) = beside(("plane", "sea", 1), ("car", "wood", 2))
    best = camkit.explain(model, image, smooth="augment")
    for smooth, target in (("augment", best.target), (None, None)):
        same = camkit.explain(model, image, smooth=smooth, target=target)
        assert same.target == best.target
    maps = []
    for factor in (0.9, 1.0, 1.1):
        of_picture = camkit.explain(model, image * factor, target=camkit.targets.segment(3, plane), spread="even")
        mirrored = camkit.targets.segment(3, plane[:, ::-1].copy())
        of_mirror_image = camkit.explain(model, image.flip(-1) * factor, target=mirrored, spread="even")
        maps += [of_picture.raw, of_mirror_image.raw[:, ::-1]]
    found = camkit.explain(model, image, target=camkit.targets.segment(3, plane), smooth="augment", spread="even")
    assert_equal(found.raw, np.mean(maps, 0))


@pytest.mark.parametrize("target", [1, camkit.targets.segment(1)])
def test_a_class_on_a_map_is_scored_at_the_cells_of_the_picture_itself(target) -> None:
    """A comparison, which fixes the cells for all methods, draws the same map."""
    model, image = Maps().eval(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    cells = model(image)["out"][0].argmax(0) == 1
    assert 0 < cells.sum() < cells.numel()
    explainer = camkit.Explainer(model, "layer", method="gradcam", smooth="augment")
    found, fixed = explainer(image, target), explainer(image, camkit.targets.segment(1, cells))
    assert_equal(found.raw, fixed.raw)
    compared = camkit.compare(explainer, image, ["gradcam"], target=target).rows[0].maps[0].explanation
    assert compared is not None
    assert_equal(compared.raw, fixed.raw)


@pytest.mark.parametrize("way", ["target", "method"])
def test_a_class_is_compared_with_those_nearest_in_the_picture_itself(way: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 8)
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    distances = (model(image)[0] - model(image)[0, 0]).abs()
    nearest = distances.argsort()[1:4].tolist()
    mirrored = (model(image.flip(-1))[0] - model(image.flip(-1))[0, 0]).abs()
    assert sorted(mirrored.argsort()[1:4].tolist()) != sorted(nearest)

    def finer(output: Tensor) -> Tensor:
        return output[:, 0] - 0.6 * output[:, nearest].mean(1)

    options = {"target": camkit.targets.finer(0)} if way == "target" else {"target": 0, "method": "finercam"}
    found = explained(model, "augment", image, layer="3", **{"method": "gradcam", **options})
    assert_equal(found.raw, explained(model, "augment", image, layer="3", method="gradcam", target=finer).raw)


@pytest.mark.parametrize("axes", [1, 3])
def test_signals_and_volumes_are_mirrored_along_the_last_axis(axes: int) -> None:
    torch.manual_seed(1)
    convolution = getattr(nn, f"Conv{axes}d")
    model = classifier(convolution(1, 4, 3, 2, 1), nn.GELU(), convolution(4, 4, 3, padding=1), nn.ReLU(), classes=3)
    image, layer = torch.randn(1, 1, *[8] * axes), "1"
    expected = mean_over_versions(
        lambda version: as_float64(explained(model, None, version[None], layer=layer).raw), image[0]
    )
    assert_equal(explained(model, "augment", image, layer=layer).raw, expected)


@pytest.mark.parametrize("method", PASSES)
def test_every_method_can_be_averaged_and_leaves_the_model_unchanged(method: str) -> None:
    model = SmallNet(cam_head=True)
    with unchanged(model):
        found = explained(model, "augment", method=method, layer="relu1" if METHODS[method].layer else None)
    assert found.smooth == "augment"
    assert np.isfinite(found.raw).all()


@pytest.mark.parametrize("fuse", ["product", "mean", "max"])
def test_each_layers_map_is_averaged_before_the_layers_are_fused(fuse: str) -> None:
    model, layers = SmallNet(activation=nn.GELU), ["conv1", "relu1"]
    found = explained(model, "augment", layer=layers, fuse=fuse)
    heatmaps = [explained(model, "augment", layer=layer).heatmap for layer in layers]
    expected = {"product": np.prod, "mean": np.mean, "max": np.max}[fuse](heatmaps, axis=0)
    assert_equal(found.heatmap, expected / expected.max())


def test_eigen_is_the_first_principal_component_of_the_weighted_maps() -> None:
    model = SmallNet(activation=nn.GELU)
    maps, gradients = weighted_maps(model, small_picture()[0])
    weighted = gradients.mean((1, 2), keepdims=True) * maps
    assert_equal(explained(model, "eigen").raw, principal_map(weighted), 1e-4)
    of_cells = explained(model, "eigen", method="hirescam").raw
    assert_equal(of_cells, principal_map(gradients * maps), 1e-4)
    peer = eigengradcam(maps, gradients)  # the same but for the sign
    assert_equal(of_cells, peer if (of_cells * peer).sum() > 0 else -peer, 1e-4)


def test_both_are_the_mean_of_principal_components() -> None:
    model = SmallNet(activation=nn.GELU)

    def component(image: Tensor) -> np.ndarray:
        maps, gradients = weighted_maps(model, image)
        return principal_map(gradients.mean((1, 2), keepdims=True) * maps)

    expected = mean_over_versions(component, small_picture()[0])
    assert_equal(explained(model, "augment+eigen", spread="even").raw, expected, 1e-4)


def test_a_map_that_is_not_finite_is_reported_and_no_error() -> None:
    model = SmallNet()
    with torch.no_grad():
        model.conv1.bias[0] = torch.inf
    assert explained(model, "eigen").status == "non_finite"


def test_caption_and_json_say_it() -> None:
    model = SmallNet()
    found = explained(model, "augment+eigen")
    assert found.to_dict()["smooth"] == "augment+eigen"
    assert found.caption().lines[0] == (
        "Grad-CAM at layer relu1, 3x5 cells, first principal component, mean over 6 versions of the picture"
    )
    plain = explained(model, None)
    assert plain.to_dict()["smooth"] is None
    assert plain.colour_scale([plain, found]).maps == 1  # maps of another smoothing have another scale


def test_the_shell_and_the_config_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = str(camkit.scenes.scene_paths()["plane-sky"])
    for options, smooth in ((["--smooth", "eigen"], "eigen"), ([], None)):
        assert main([photo, "--model", "demo-fair", *options, "--out", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["smooth"] == smooth
    in_python = camkit.explain("demo-fair", photo, config={"explain": {"smooth": "eigen"}})
    assert in_python.smooth == "eigen"


@pytest.mark.parametrize(
    ("model", "image", "options", "error", "said"),
    [
        *(
            (SmallNet(), small_picture(), {"target_layer": "relu1", "smooth": "eigen", "method": method}, MethodError,
             f"'{method}' returns a map and no weights.* use smooth='augment', or")
            for method in ("fem", "kpcacam", "reciprocam")
        ),
        (Detecting().eval(), beside(("plane", "sea", 1))[0], {}, TargetError,
         "other boxes in a changed picture, so smooth='augment' explains no boxes"),
        (Padding().eval(), torch.rand(3, 16, 16), {"target_layer": "patches", "target": 1}, LayerError,
         r"pads the picture on one side only.* use smooth='eigen', or another layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_smoothed_is_refused(
    model: nn.Module, image: Tensor, options: dict[str, Any], error: type[CamkitError], said: str
) -> None:
    with refused(said, error):
        camkit.explain(model, image, **{"smooth": "augment"} | options)
    if error is TargetError:
        assert camkit.explain(model, image, smooth="eigen").status == "ok"
