"""The methods that need more than gradients: feature maps alone, the head, second derivatives, several layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, SmallNet, classifier, heat_at, small_picture
from oracles import (
    OF_ACTIVATIONS,
    OF_SCORES,
    as_float64,
    eigengradcam,
    gradcam,
    gradcam_plus_plus,
    gradient_by_differences,
    heatmap_oracle,
    shapleycam,
)
from tiers import Extra
from torch import Tensor, nn

import camkit
from camkit.cli import main
from camkit.errors import MethodError, TargetError
from camkit.methods import METHODS, variant
from camkit.targets import finer

timm = Extra("timm")

CLASS = 2


def explained(model: nn.Module, method: str, layer: str | list[str] = "relu1", target: object = CLASS) -> np.ndarray:
    """Return the signed map (h, w) that camkit's public door gives."""
    return as_float64(camkit.explain(model, small_picture(), layer, method=method, target=target).raw)


def score_of_maps(model: SmallNet) -> Callable[[np.ndarray], float]:
    """Return the score of the class as a function of the feature maps, in float64."""
    exact = deepcopy(model).double()
    return lambda maps: float(exact.head(torch.from_numpy(maps)[None])[0, CLASS].detach())


def maps_of(model: SmallNet) -> Tensor:
    return deepcopy(model).double().trunk(small_picture().double())[0].detach()


def assert_equal(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# --- the formulas


@pytest.mark.parametrize("name", OF_SCORES)
def test_a_method_of_the_head_equals_its_formula(name: str) -> None:
    model = SmallNet(activation=nn.GELU)
    assert_equal(explained(model, name), OF_SCORES[name](maps_of(model), score_of_maps(model)))


@pytest.mark.parametrize("name", OF_ACTIVATIONS)
def test_a_method_of_the_maps_alone_equals_its_formula(name: str) -> None:
    model = SmallNet()
    assert_equal(explained(model, name, "conv1"), OF_ACTIVATIONS[name](model.conv1(small_picture())[0]), 1e-4)


@pytest.mark.parametrize("name", OF_ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 3, 6, 6), (1, 4, 7), (2, 5, 2, 3, 4), (2, 1, 3, 3)])
def test_methods_of_the_maps_take_grids_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    maps = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    weights = METHODS[name].weights(maps)
    found = weights if weights.dim() < maps.dim() else (weights * maps).sum(1)
    for one, of_picture in zip(found, maps, strict=True):
        expected = OF_ACTIVATIONS[name](of_picture)
        np.testing.assert_allclose(one, expected, rtol=0, atol=2e-4 * max(np.abs(expected).max(), 1e-6))


@pytest.mark.parametrize("name", [*OF_ACTIVATIONS, "eigengradcam"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_maps_that_are_not_finite_are_reported(name: str, value: float) -> None:
    model = SmallNet()
    with torch.no_grad():
        model.conv1.bias[0] = value
    pictures = torch.cat([small_picture(), small_picture()])
    for found in camkit.explain(model, pictures, "conv1", method=name):
        assert found.status == "non_finite"


def test_the_kernel_component_of_many_cells_equals_the_full_decomposition() -> None:
    generator = torch.Generator().manual_seed(5)
    maps = nn.functional.interpolate(torch.randn(2, 12, 4, 5, generator=generator), (16, 20), mode="bilinear").relu()
    maps = 3 * maps + 0.1 * torch.rand(maps.shape, generator=generator)
    found = METHODS["kpcacam"].weights(maps)
    for one, of_picture in zip(found, maps, strict=True):
        cells = of_picture.double().flatten(1).mT
        cells = cells - cells.mean(0)
        kernel = torch.tanh(cells @ cells.mT / 12 + 1)
        centring = torch.eye(320, dtype=torch.float64) - 1 / 320
        variances, vectors = torch.linalg.eigh(centring @ kernel @ centring)
        expected = vectors[:, -1] * variances[-1].sqrt()
        expected = expected * torch.sign(expected @ cells.sum(1))
        assert_equal(one.flatten().numpy(), expected.numpy(), 1e-4)


def test_equal_cells_have_no_kernel_component() -> None:
    for side in (7, 20):
        maps = torch.cat([torch.full((1, 3, side, side), 0.3), torch.full((1, 3, side, side), torch.nan)])
        equal, undefined = METHODS["kpcacam"].weights(maps)
        assert not equal.any()
        assert undefined.isnan().all()
    assert METHODS["kpcacam"].weights(torch.ones(1, 3, 1, 1)).tolist() == [[[0.0]]]


def test_eigengradcam_and_shapleycam_equal_their_formulas() -> None:
    model = SmallNet(activation=nn.GELU)
    exact, maps = deepcopy(model).double(), maps_of(model)

    def score(a: Tensor) -> Tensor:
        return exact.head(a[None])[0, CLASS]

    gradients = gradient_by_differences(score, maps)
    assert_equal(explained(model, "eigengradcam"), eigengradcam(maps, gradients), 1e-4)
    found, plain = explained(model, "shapleycam"), gradcam(maps, gradients)
    assert_equal(found, shapleycam(maps, score), 1e-4)
    assert np.abs(found - plain).max() > 1e-2 * np.abs(plain).max()  # the second derivatives matter
    linear = SmallNet(cam_head=True)
    np.testing.assert_array_equal(explained(linear, "shapleycam"), explained(linear, "gradcam"))


class Attending(SmallNet):
    """Attends over the cells with PyTorch's fused attention."""

    def head(self, features: Tensor) -> Tensor:
        tokens = features.flatten(2).mT
        tokens = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.fc(tokens.mean(1))


def test_shapleycam_differentiates_attention_twice() -> None:
    model = Attending(cam_head=True)
    exact, maps = deepcopy(model).double(), maps_of(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = shapleycam(maps, lambda a: exact.head(a[None])[0, CLASS])
    assert_equal(explained(model, "shapleycam"), expected, 1e-4)


class PoolsRegions(SmallNet):
    """Pools a region of the feature maps, as two-stage detectors do; torchvision differentiates that only once."""

    def head(self, features: Tensor) -> Tensor:
        region = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]]).repeat(len(features), 1)
        region[:, 0] = torch.arange(len(features))
        return super().head(torchvision.ops.roi_align(features.square(), region, features.shape[2:])).square()


def test_what_shapleycam_cannot_explain_is_refused() -> None:
    with pytest.raises(MethodError, match="no second derivative, which 'shapleycam' needs; use 'gradcam'"):
        explained(PoolsRegions(), "shapleycam")
    with pytest.raises(MethodError, match="explain one layer; name one, or use 'gradcam' or 'hirescam', which fuse"):
        explained(SmallNet(), "shapleycam", ["conv1", "conv2"])


# --- Finer-CAM


def nearest_to(logits: Tensor, index: int, count: int = 3) -> list[int]:
    distances = sorted((abs(float(logits[k] - logits[index])), k) for k in range(len(logits)) if k != index)
    return [k for _, k in distances[:count]]


def finer_of(logits: Tensor, index: int, weight: float = 0.6, nearest: int = 3) -> Callable[[Tensor], Tensor]:
    """Return a target function with the class and its nearest classes written down."""
    others = nearest_to(logits, index, nearest)
    return lambda output: output[:, index] - weight * output[:, others].mean(1)


@pytest.mark.parametrize(("weight", "nearest"), [(0.6, 3), (1.0, 1), (0.0, 2), (0.5, 9)])
@pytest.mark.parametrize("index", [0, 3])
def test_finer_compares_with_the_nearest_classes(index: int, weight: float, nearest: int) -> None:
    model = SmallNet()
    found = camkit.explain(model, small_picture(), "relu1", target=finer(index, weight, nearest))
    output = model(small_picture()).detach()
    assert found.score == pytest.approx(float(finer_of(output[0], index, weight, nearest)(output)[0]), rel=1e-5)
    assert found.target == index
    assert found.quantity == f"logit minus {weight:g} times the mean of its {min(nearest, 3)} nearest"


def test_finercam_is_gradcam_of_the_finer_target() -> None:
    model = SmallNet()
    np.testing.assert_array_equal(
        explained(model, "finercam"), explained(model, "gradcam", target=finer(CLASS, weight=0.6, nearest=3))
    )
    exact, maps = deepcopy(model).double(), maps_of(model)
    score = finer_of(model(small_picture())[0].detach(), CLASS)
    gradients = gradient_by_differences(lambda a: score(exact.head(a[None]))[0], maps, step=1e-6)
    assert_equal(explained(model, "finercam"), gradcam(maps, gradients))


def test_finercam_takes_labels_lists_and_each_picture_its_best() -> None:
    model, pictures = SmallNet(), torch.cat([small_picture(), -small_picture()])
    options = {"target_layer": "relu1", "labels": ["fox", "wolf", "dog", "cat"]}
    found = camkit.explain(model, pictures, method="finercam", target=[None, "dog"], **options)
    assert [row.label for row in found[1::2]] == ["dog", "dog"]
    assert [row.target for row in found[::2]] == model(pictures).argmax(1).tolist()
    single = camkit.explain(model, small_picture(), target=finer("dog"), **options)
    np.testing.assert_allclose(single.raw, found[1].raw, atol=1e-6)


def rival_net() -> nn.Module:
    """Return a network whose nearest classes change if the picture or its feature maps do."""
    torch.manual_seed(3)
    last = nn.Linear(32, 8)
    with torch.no_grad():
        last.weight *= 30
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), last).eval()


@pytest.mark.parametrize(
    "name", ["ablationcam", "feature-scorecam", "reciprocam", "scorecam", "sscam", "iscam", "rise", "shapleycam"]
)
@pytest.mark.parametrize("target", [1, None])
def test_the_classes_compared_stay_the_same_in_changed_pictures_and_maps(name: str, target: int | None) -> None:
    model, image = rival_net(), torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))
    logits = model(image[None])[0].detach()
    index = int(logits.argmax()) if target is None else target
    factors = torch.linspace(0, 1, 20)[:, None, None, None]
    assert any(nearest_to(row, index) != nearest_to(logits, index) for row in model(image * factors).detach())
    shorter = {"sscam": {"samples": 3}, "rise": {"masks": 60}}
    method = variant(name, **shorter[name]) if name in shorter else name
    by_hand, found, plain = (
        camkit.explain(model, image, None if name == "rise" else "1", method=method, target=given)
        for given in (finer_of(logits, index), finer(target), index)
    )
    assert_equal(found.raw, by_hand.raw)
    assert np.abs(found.raw - plain.raw).max() > 1e-2 * np.abs(plain.raw).max()
    assert found.score == pytest.approx(by_hand.score, rel=1e-5)
    assert found.target == index


@pytest.mark.extended
def test_legrad_of_the_finer_target_keeps_the_classes_of_each_picture() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=6, **options).eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.15)
    nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    found = camkit.explain(model, images, method="legrad", target=finer())
    for row, image, logits in zip(found, images, model(images).detach(), strict=True):
        function = finer_of(logits, int(logits.argmax()))
        assert_equal(row.raw, camkit.explain(model, image, method="legrad", target=function).raw, 1e-4)


def ending(activation: Callable[[Tensor], Tensor] = lambda logits: logits) -> Net:
    """Return a network with an activation after its logits, which changes the nearest classes of some classes."""
    torch.manual_seed(0)
    logits = classifier(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
    with torch.no_grad():
        logits[-1].weight *= 0.1
        logits[-1].bias.copy_(torch.tensor([-0.6, -2.4, 0.4, -1.4, 0.6]))
    return Net(lambda net, images: activation(net.logits(images)), logits=logits)


ENDINGS = {
    "softmax": (lambda logits: logits.softmax(1), "probability"),
    "log-softmax": (lambda logits: logits.log_softmax(1), "log-probability"),
    "sigmoid": (torch.sigmoid, "probability"),
    "log-sigmoid": (nn.functional.logsigmoid, "log-probability"),
}


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("name", ENDINGS)
def test_finer_compares_the_same_classes_if_the_model_returns_probabilities(name: str, index: int) -> None:
    activation, kind = ENDINGS[name]
    bare, model, target = ending(), ending(activation), finer(index, nearest=1)
    found, expected = (camkit.explain(net, small_picture(), "logits.1", target=target) for net in (model, bare))
    np.testing.assert_allclose(found.heatmap, expected.heatmap, atol=1e-4)
    assert found.quantity == f"{kind} minus 0.6 times the mean of its 1 nearest"
    logits, returned = (net(small_picture())[0].detach() for net in (bare, model))
    (nearest,) = nearest_to(logits, index, 1)
    assert found.score == pytest.approx(float(returned[index] - 0.6 * returned[nearest]), abs=1e-5)


def test_metrics_judge_a_finer_map_by_the_probability_of_its_class() -> None:
    pictures = torch.cat([small_picture(), small_picture() / 2])
    for model, probabilities in ((ending(), lambda out: out.softmax(1)), (ending(torch.sigmoid), lambda out: out)):
        scores = camkit.Explainer(model, "logits.1").scores_of(pictures[0], finer(1))
        assert scores.quantity == "probability"
        np.testing.assert_allclose(scores(pictures), probabilities(model(pictures)).detach()[:, 1], atol=1e-6)


def test_what_is_no_class_cannot_be_compared() -> None:
    with pytest.raises(TargetError, match=r"so it needs a classifier's class; .*'gradcam' or 'hirescam'"):
        explained(SmallNet(), "finercam", target=lambda output: output.sum(1))
    with pytest.raises(TargetError, match=r"the model has one output; .*'gradcam' or 'hirescam'"):
        camkit.explain(classifier(nn.Conv2d(3, 4, 3), classes=1), small_picture(), "0", method="finercam")
    for wrong in ({"weight": -1.0}, {"nearest": 0}):
        with pytest.raises(TargetError, match=r"the (weight|number) of (the )?nearest classes"):
            finer(CLASS, **wrong)


# --- RefineCAM


def stages() -> nn.Module:
    """Return a network with three grids."""
    torch.manual_seed(3)
    widths = [(3, 4, 1), (4, 6, 2), (6, 6, 2), (6, 6, 1)]
    layers = [nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.ReLU()) for before, after, stride in widths]
    return classifier(*layers, classes=3)


WIDE = torch.randn(1, 3, 16, 24, generator=torch.Generator().manual_seed(1))


def test_refinecam_multiplies_the_maps_of_the_last_layer_of_each_grid() -> None:
    model = stages()
    found = camkit.explain(model, WIDE, method="refinecam", target=1, spread="even")
    assert found.layer == "0+1+3"
    product, maps = np.ones((16, 24)), {}
    for layer in ("0", "1", "3"):
        model.get_submodule(layer).register_forward_hook(lambda *given, layer=layer: maps.update({layer: given[2]}))
    score = model(WIDE)[0, 1]
    for output in maps.values():
        (gradient,) = torch.autograd.grad(score, output, retain_graph=True)
        product *= heatmap_oracle(gradcam_plus_plus(output[0], gradient[0]), (16, 24))
    assert_equal(as_float64(found.heatmap), product / product.max(), 1e-4)


def test_refinecam_multiplies_through_every_door(tmp_path: Path) -> None:
    model, picture = camkit.load_model("demo-fair"), camkit.scenes.scene_paths()["plane-sky"]
    wanted = camkit.explain(model, picture, method="refinecam")
    assert "+" in wanted.layer
    assert wanted.maps.fuse == "product"
    gradcam = camkit.Explainer(model)
    (compared,) = camkit.compare(model, picture, ["refinecam"]).rows[0].maps
    assert main([str(picture), "--model", "demo-fair", "--method", "refinecam", "--no-pictures",
                 "--table", str(tmp_path / "t.csv")]) == 0  # fmt: skip
    (row,) = camkit.scale.read(tmp_path / "t.csv")
    for found in (gradcam.using("refinecam")(picture), compared.explanation, row):
        np.testing.assert_allclose(found.raw, wanted.raw, atol=1e-3)
    back = camkit.Explainer(model, method="refinecam").using("gradcam", ["features.1", "features.3"])(picture)
    assert back.maps.fuse == "mean"
    assert gradcam.using("refinecam", fuse="mean")(picture).maps.fuse == "mean"


def test_refinecam_takes_named_layers() -> None:
    found = camkit.explain(stages(), WIDE, ["1", "2"], method="refinecam", target=1)
    same = camkit.explain(stages(), WIDE, ["1", "2"], method="gradcam++", fuse="product", target=1)
    np.testing.assert_array_equal(found.heatmap, same.heatmap)


# --- a planted truth: where and what the network looks at is known by construction


def one_place(net: Net, images: Tensor) -> Tensor:
    """Return the scores from the mean colours of 4 x 4 pixels: class 1 reads a cell of green, class 2 one of blue."""
    maps = net.layer(images)
    return 4 * torch.stack([maps[:, 0, 0, 0] * 0, maps[:, 1, *READ], maps[:, 2, 0, 5]], 1)


READ, NOT_READ = (1, 1), (2, 4)

LOCAL = (
    *("hirescam", "layercam", "gradcam-elementwise", "eigengradcam", "reciprocam", "expected"),
    *("rise", "occlusion", "fullgrad", "guidedbackprop", "guidedgradcam"),
)
WHOLE_CHANNELS = (
    *("gradcam", "gradcam++", "xgradcam", "finercam", "shapleycam", "refinecam", "ablationcam"),
    *("feature-scorecam", "scorecam", "sscam", "iscam"),
)
BLIND_TO_CLASSES = ("eigencam", "fem", "kpcacam")


def heat_where_the_channel_is_active(method: str) -> tuple[float, float]:
    """Return the heat in the cell that the class reads, and in one that has the same colour and is not read."""
    picture = torch.full((3, 16, 24), 0.1)
    for row, column in (READ, NOT_READ):
        picture[1, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1
    given = variant("rise", masks=400) if method == "rise" else method
    layer = nn.Conv2d(3, 3, 4, 4, bias=False)
    layer.weight.data = torch.eye(3)[:, :, None, None].expand(3, 3, 4, 4) / 16
    model, named = Net(one_place, layer=nn.Sequential(layer, nn.ReLU())), "layer" if METHODS[method].layer else None
    found = camkit.explain(model, picture, named, method=given, target=1)
    return heat_at(found, (1, *READ)), heat_at(found, (1, *NOT_READ))


@pytest.mark.parametrize("method", LOCAL)
def test_a_local_method_tells_where_an_active_channel_is_read(method: str) -> None:
    read, other = heat_where_the_channel_is_active(method)
    assert other < read / 2


@pytest.mark.parametrize("method", WHOLE_CHANNELS)
def test_a_method_that_weights_channels_shows_every_place_where_a_read_channel_is_active(method: str) -> None:
    read, other = heat_where_the_channel_is_active(method)
    assert read > 0
    assert other == pytest.approx(read, rel=1e-3)


def test_the_docs_say_which_methods_are_local() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = {
        line.split("|")[1].strip(): set(re.findall(r"`([^`]+)`", line.split("|")[2]))
        for line in page.split("## Which methods can miss the place\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("| ")
    }
    assert rows["each cell for itself"] == set(LOCAL)
    assert rows["whole channels"] == {*WHOLE_CHANNELS, "cam"}
    assert rows["the feature maps alone"] == set(BLIND_TO_CLASSES)
    others = {name for name, method in METHODS.items() if method.reads_attention}
    assert {*LOCAL, *WHOLE_CHANNELS, *BLIND_TO_CLASSES, "cam"} == set(METHODS) - others


# --- Noise


@pytest.mark.extended
@pytest.mark.parametrize("layer", ["blocks.1", "blocks.2.norm1"])
def test_noise_does_not_decide_a_map_of_a_transformer(layer: str) -> None:
    generator, options = torch.Generator().manual_seed(1), {"embed_dim": 32, "depth": 3, "num_heads": 4}
    picture = nn.functional.interpolate(torch.randn(1, 3, 8, 8, generator=generator), (64, 64), mode="bicubic")[0]
    noise = 1e-3 * torch.randn(picture.shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    transformer = timm.models.vision_transformer.VisionTransformer
    model = transformer(img_size=64, patch_size=8, num_classes=5, **options).eval()
    methods = [method for method in METHODS.values() if method.needs not in {"head", "pictures", "parts", "guided"}]
    assert len(methods) >= 18  # the others are not for transformers, or slow
    for method in methods:
        target_layer = layer if method.layer and not method.stages else None
        first = camkit.explain(model, picture, target_layer, method=method.name)
        second = camkit.explain(model, picture + noise, target_layer, method=method.name, target=first.target)
        if np.ptp(first.raw) or np.ptp(second.raw):
            assert np.corrcoef(first.raw.ravel(), second.raw.ravel())[0, 1] >= 0.95, method.name
