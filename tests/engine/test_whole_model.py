"""Methods that run the model on changed pictures, or differentiate the whole of it, and read at most one layer.

Score-CAM, SS-CAM, IS-CAM, RISE, occlusion; FullGrad, guided backpropagation, Guided Grad-CAM: the formulas,
completeness, planted truth, targets, memory, the number of passes, other toolkits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracles_pictures as oracles
import pytest
import torch
import torchvision
from networks import Net, classifier, means, sizes_of_passes
from oracles import as_float64
from PIL import Image
from tiers import Extra, represented_by
from torch import Tensor, nn
from torch.nn import functional
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import MethodError
from camkit.methods import METHODS, Between, Method, Whole, variant
from camkit.targets import box, contrast, segment
from camkit.types import PartsOfScore

peer_toolkit = Extra("pytorch_grad_cam")

OF_GRADIENTS = ("fullgrad", "guidedbackprop", "guidedgradcam")
AS_PUBLISHED = dict(METHODS)
SAMPLES, STEPS, MASKS, CELLS, KEPT, WINDOW, STRIDE = 3, 4, 50, 3, 0.4, 5, 3
FEW: dict[str, Method] = {
    "scorecam": METHODS["scorecam"],
    "sscam": variant("sscam", samples=SAMPLES, sigma=0.5),
    "iscam": variant("iscam", steps=STEPS),
    "rise": variant("rise", masks=MASKS, cells=CELLS, kept=KEPT),
    "occlusion": variant("occlusion", window=WINDOW, stride=STRIDE),
}
PLACES = 4 * 5
"""How many places the window has on a picture of ``SIZE``; the last ones are cut off."""
CHANNELS, SIZE = 5, (12, 16)


def small() -> nn.Sequential:
    """Return a network with maps of half the picture's size, and a head that is not linear."""
    torch.manual_seed(0)
    trunk = nn.Conv2d(3, CHANNELS, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(CHANNELS, 6, 3, 1, 1), nn.Tanh()
    return nn.Sequential(*trunk, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)).eval()


def picture(seed: int = 1) -> Tensor:
    return torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(seed))


def drawn_masks() -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Return the grids of RISE's masks and their corners: the draws, in the order that the method's docstring gives."""
    grids, corners = [], []
    for number in range(MASKS):
        generator = torch.Generator().manual_seed(number)
        grids.append(as_float64((torch.rand(CELLS, CELLS, generator=generator) < KEPT).float()))
        down, across = (int(torch.randint(-(-side // CELLS), (), generator=generator)) for side in SIZE)
        corners.append((down, across))
    return grids, corners


def expected_map(name: str, model: nn.Module, image: Tensor, index: int) -> np.ndarray:
    exact = copy.deepcopy(model).double()

    def logit(array: np.ndarray) -> float:
        with torch.no_grad():
            return float(exact(torch.from_numpy(array)[None])[0, index])

    def probability(array: np.ndarray) -> float:
        with torch.no_grad():
            return float(exact(torch.from_numpy(array)[None]).softmax(1)[0, index])

    array = as_float64(image)
    with torch.no_grad():
        maps = as_float64(exact[:2](torch.from_numpy(array)[None])[0])
    if name == "rise":
        return oracles.rise(probability, array, *drawn_masks(), KEPT)
    if name == "occlusion":
        return oracles.occlusion(logit, array, WINDOW, STRIDE)
    if name == "sscam":

        def noise(number: int) -> np.ndarray:
            return 0.5 * as_float64(torch.randn(SIZE, generator=torch.Generator().manual_seed(number)))

        return oracles.sscam(logit, array, maps, noise, SAMPLES)
    if name == "iscam":
        return oracles.iscam(logit, array, maps, STEPS)
    return oracles.scorecam(logit, array, maps)


def layer_of(name: str) -> str | None:
    """Return the layer that a method reads: of ``normed()``, if it takes gradients, or else of ``small()``."""
    return "act2" if name == "guidedgradcam" else "1" if METHODS[name].layer else None


@pytest.mark.parametrize("name", FEW)
def test_the_map_equals_its_formula(name: str) -> None:
    model, image = small(), picture()
    found = camkit.explain(model, image, layer_of(name), method=FEW[name], target=2)
    expected = expected_map(name, model, image, 2)
    assert found.raw.shape == expected.shape
    np.testing.assert_allclose(found.raw, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert expected.std() > 0.01 * np.abs(expected).max()


def test_the_published_parameters_are_the_defaults() -> None:
    assert {name: AS_PUBLISHED[name].weights.__kwdefaults__ or {} for name in FEW} == {
        "scorecam": {},
        "sscam": {"samples": 35, "sigma": 2.0},
        "iscam": {"steps": 10},
        "rise": {"masks": 4000, "cells": 7, "kept": 0.5},
        "occlusion": {"window": None, "stride": None, "segments": None},
    }


def test_a_channel_that_is_the_same_everywhere_has_no_weight_and_no_pass() -> None:
    model = small()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 3
    batches = sizes_of_passes(model)
    camkit.explain(model, picture(), "1", method="scorecam", target=0)  # the first call finds the faster format
    batches.clear()
    found = camkit.explain(model, picture(), "1", method="scorecam", target=0)
    assert sum(batches) == 1 + CHANNELS - 1
    assert np.abs(found.raw).max() < 3  # the constant would show in every cell


@pytest.mark.parametrize("name", [name for name in FEW if METHODS[name].layer])
def test_without_any_channel_that_varies_there_is_no_map(name: str) -> None:
    model = small()
    with torch.no_grad():
        model[0].weight.zero_()
    found = camkit.explain(model, picture(), "1", method=FEW[name], target=0)
    assert found.status == "no_influence"


@pytest.mark.parametrize("name", [*FEW, *(name for name, method in METHODS.items() if method.needs == "scores")])
def test_maps_that_are_not_finite_are_reported_and_the_stream_goes_on(name: str) -> None:
    model = nn.Sequential(Net(lambda _, x: x.exp()), *small()).eval()  # an image of large values has infinite maps
    images = [picture(), picture() + 1000, picture()]
    rows = list(camkit.explain_many(model, images, layer_of(name), method=FEW.get(name, name), target=0))
    assert [row.status for row in rows] == ["ok", "non_finite", "ok"]
    np.testing.assert_array_equal(rows[0].raw, rows[2].raw)


@pytest.mark.parametrize("name", FEW)
def test_several_targets_share_the_passes(name: str) -> None:
    model, image = small(), picture()
    alone = [camkit.explain(model, image, layer_of(name), method=FEW[name], target=k) for k in (0, 3)]
    batches = sizes_of_passes(model)
    camkit.explain(model, image, layer_of(name), method=FEW[name], target=0)  # the first call finds the faster format
    batches.clear()
    together = camkit.explain(model, image, layer_of(name), method=FEW[name], target=[0, 3])
    passes = {"scorecam": CHANNELS, "sscam": SAMPLES * CHANNELS, "iscam": (STEPS - 1) * CHANNELS, "rise": MASKS}
    passes["occlusion"] = 1 + PLACES
    assert sum(batches) == 1 + passes[name]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.raw, other.raw, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FEW)
def test_only_the_first_pass_has_a_graph(name: str) -> None:
    model = small()
    graphs: list[object] = []
    model.register_forward_hook(lambda _, __, output: graphs.append(output.grad_fn))
    camkit.explain(model, picture(), layer_of(name), method=FEW[name], target=0)  # the first call chooses the layer
    graphs.clear()
    camkit.explain(model, picture(), layer_of(name), method=FEW[name], target=0)
    assert len(graphs) > 1
    assert not any(graphs[1:])  # the first one shows whether the model ends in a softmax or sigmoid


@pytest.mark.parametrize("target", [1, None, segment(1, everywhere=True)], ids=["class", "best", "everywhere"])
def test_segmentation_is_scored_where_the_class_was_predicted_in_the_picture(target: Any) -> None:
    layers = [nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU(), nn.Conv2d(5, 3, 1), nn.Upsample(scale_factor=2)]
    model, image = nn.Sequential(*layers).eval(), picture()
    found = camkit.explain(model, image, "1", method="scorecam", target=target)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = exact(image.double()[None])[0]
        inside = (
            logits.argmax(0) == found.target if not isinstance(target, type(segment(1))) else torch.ones(12, 16) > 0
        )
        maps = as_float64(exact[:2](image.double()[None])[0])

    def score(array: np.ndarray) -> float:
        with torch.no_grad():
            return float(exact(torch.from_numpy(array)[None])[0, found.target][inside].mean())

    expected = oracles.scorecam(score, as_float64(image), maps)
    np.testing.assert_allclose(found.raw, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def boxes() -> Net:
    def run(net: Net, images: Tensor) -> list[dict[str, Tensor]]:
        corners = torch.tensor([[1.0, 1.0, 8.0, 8.0]])
        scores = net.layer(images).mean((1, 2, 3)).sigmoid()
        return [{"boxes": corners, "labels": torch.ones(1).long(), "scores": score[None]} for score in scores]

    return Net(run, layer=nn.Conv2d(3, 4, 3, 2, 1))


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        *((name, box(0), "explain scores, not boxes; use 'gradcam' or 'hirescam'") for name in OF_GRADIENTS),
        *((name, box(0, part="left"), "the score of a box, not a part of it; use 'hirescam'") for name in FEW),
    ],
)
def test_boxes_or_a_part_of_them_are_refused(name: str, target: Any, said: str) -> None:
    model, layer = boxes(), "layer" if METHODS[name].layer else None
    with unchanged(model), pytest.raises(MethodError, match=said):
        camkit.explain(model, picture(), layer, method=FEW.get(name, name), target=target)


def moving(_: Net, images: Tensor) -> list[dict[str, Tensor]]:
    """Find three boxes, whose classes, sides and order depend on the picture."""
    found = []
    for image in images.sigmoid():
        left, right = image[:, :, :8].mean(), image[:, :, 8:].mean()
        scores = torch.stack([left, right, image[:, :6].mean()])
        corners = torch.tensor([[0.0, 0.0, 7.0, 9.0], [6.0, 1.0, 15.0, 11.0], [2.0, 0.0, 8.0, 6.0]])
        corners = corners + (left - right) * torch.tensor([[3.0, 2.0, 1.0, 2.0]])
        labels = torch.tensor([1, 1 if right > 0.5 else 2, 1])
        order = scores.argsort(descending=True)
        found.append({"boxes": corners[order], "labels": labels[order], "scores": scores[order]})
    return found


def best_match(detections: dict[str, Tensor], wanted: list[float], label: int) -> float:
    """D-RISE, Petsiuk et al. 2021, Eqs. 3 to 6: the largest overlap times score, of boxes of the same class."""
    best = 0.0
    rows = zip(detections["boxes"].tolist(), detections["scores"].tolist(), detections["labels"].tolist(), strict=True)
    for (left, upper, right, lower), score, own in rows:
        across = max(0.0, min(right, wanted[2]) - max(left, wanted[0]))
        down = max(0.0, min(lower, wanted[3]) - max(upper, wanted[1]))
        areas = (right - left) * (lower - upper) + (wanted[2] - wanted[0]) * (wanted[3] - wanted[1])
        best = max(best, score * across * down / (areas - across * down) * (own == label))
    return best


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", ["rise", "occlusion"])
def test_the_map_of_a_box_equals_d_rises_slow_reference(name: str, *, as_function: bool) -> None:
    detector, image = Net(moving), picture()
    model: Any = detector
    if as_function:

        def boxes(pictures: Tensor) -> list[dict[str, Any]]:
            return [{key: value.tolist() for key, value in each.items()} for each in detector(pictures)]

        model = camkit.black_box(boxes, batch=3)

    row = camkit.explain(model, image, method=FEW[name], target=box(1))

    found = detector(image[None])[0]
    wanted, label = found["boxes"][1].tolist(), int(found["labels"][1])

    def match(array: np.ndarray) -> float:
        return best_match(detector(torch.from_numpy(array).float()[None])[0], wanted, label)

    if name == "occlusion":
        expected = oracles.occlusion(match, as_float64(image), WINDOW, STRIDE)
    else:
        grids, corners = drawn_masks()
        expected = oracles.rise(match, as_float64(image), grids, corners, KEPT)
    assert list(row.detection) == pytest.approx(wanted, abs=1e-4)
    np.testing.assert_allclose(row.raw, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", [*FEW, *OF_GRADIENTS])
@pytest.mark.parametrize("axes", [1, 3])
def test_signals_and_volumes(axes: int, name: str) -> None:
    model = classifier(getattr(nn, f"Conv{axes}d")(2, 4, 3, 2, 1), nn.ReLU(), classes=3)
    nn.init.uniform_(model[-1].weight)  # all that the maps hold is evidence
    size = (16, 8, 12)[:axes]
    layer = "1" if METHODS[name].layer else None
    found = camkit.explain(model, torch.randn(2, *size), layer, method=FEW.get(name, name), target=0)
    assert found.heatmap.shape == size
    assert np.isfinite(found.raw).all()
    assert found.raw.any()


def little_memory(most: int) -> Net:
    """Return a network that fails for batches of more than ``most`` pictures, as a full device does."""

    def run(net: Net, images: Tensor) -> Tensor:
        if len(images) > most:
            raise torch.OutOfMemoryError("no memory left")
        return net.network(images)

    return Net(run, network=small())


@pytest.mark.parametrize("name", FEW)
def test_batches_are_halved_if_memory_runs_out(name: str) -> None:
    model, layer = little_memory(3), layer_of(name)
    batches = sizes_of_passes(model)
    found = camkit.explain(model, picture(), layer and f"network.{layer}", method=FEW[name], target=1)
    expected = camkit.explain(model.network, picture(), layer, method=FEW[name], target=1)
    assert max(batches) > 3
    assert max(batches[-2:]) <= 3
    np.testing.assert_allclose(found.raw, expected.raw, rtol=1e-4, atol=1e-6)


def test_a_picture_for_which_there_is_no_memory_is_an_error() -> None:
    model = little_memory(0)
    with unchanged(model), pytest.raises(torch.OutOfMemoryError):
        camkit.explain(model, picture(), method=FEW["rise"], target=1)


def test_progress_counts_the_pictures() -> None:
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"target": 1, "progress": lambda *numbers: told.append(numbers)}
    camkit.explain(small(), picture(), method=variant("rise", masks=70), **options)
    assert told == sorted(set(told))
    assert (told[0], told[-1], len(told) > 2) == ((0, 70), (70, 70), True)
    told.clear()
    camkit.explain(small(), picture(), "1", **options)
    assert told == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_a_bar_and_a_pipe_none(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    for quiet in ([], ["--quiet"]):
        plane = str(camkit.scenes.scene_paths()["plane-sky"])
        assert main([plane, "-m", "demo-fair", "--method", "scorecam", "--out", str(tmp_path), *quiet]) == 0
        printed = capsys.readouterr()
        assert ("changed pictures" in printed.err) == (terminal and not quiet)
        assert "changed pictures" not in printed.out


def test_occlusion_covers_regions_of_similar_colour() -> None:
    image = torch.zeros(3, 32, 32)
    image[0, 4:12, 4:14], image[1, 18:28, 15:29] = 1, 1  # two rectangles, of which the model reads one
    model = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * 16 * 16, 2)).eval()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].weight[1, : 16 * 16] = 1
    found = camkit.explain(model, image, method=variant("occlusion", segments=16), target=1)
    read = image[0].numpy() > 0
    hot = found.raw > 0.1 * found.raw.max()
    assert (hot == read).mean() > 0.98  # a few pixels at corners belong to the region beside them


def test_thin_pictures_have_regions_too_and_windows_in_clips_cover_several_frames() -> None:
    thin = camkit.explain(small(), torch.randn(3, 64, 4), method=variant("occlusion", segments=2), target=1)
    assert thin.raw.shape == (64, 4)
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten()).eval()
    clip = camkit.explain(model, torch.rand(1, 4, 8, 8), method=variant("occlusion", window=4), target=1)
    assert clip.raw.shape == (4, 8, 8)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("rise", {"mask": 3}, "method 'rise' has no parameter 'mask'; it has masks, cells, kept"),
        ("gradcam", {"samples": 3}, "method 'gradcam' has no parameter 'samples'; it has none"),
        ("raise", {"masks": 3}, "unknown method 'raise'"),
        ("rise", {"cells": 0}, "method 'rise': cells must be a whole number from 1, not 0"),
        ("rise", {"masks": 2.5}, "masks must be a whole number from 2, not 2.5"),
        ("rise", {"kept": float("nan")}, "kept must be a number between 0 and 1, not nan"),
        ("sscam", {"samples": 0}, "samples must be a whole number from 1, not 0"),
        ("sscam", {"sigma": -1}, "sigma must be a number above 0, not -1"),
    ],
)
def test_parameters_that_a_method_cannot_have(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MethodError, match=said):
        variant(name, **options)


def test_a_users_method_says_which_values_it_takes() -> None:
    @camkit.register_method("scaled-gradcam", values={"factor": Between(0.0, 10.0), "times": Whole(0)})
    def scaled(activations: Tensor, gradients: Tensor, *, factor: float = 1, times: int = 1, free: str = "") -> Tensor:
        return gradients.mean((2, 3), keepdim=True) * factor**times

    try:
        assert variant("scaled-gradcam", factor=2, times=0, free="anything").name == "scaled-gradcam"
        with pytest.raises(MethodError, match="factor must be a number between 0 and 10, not 10"):
            variant(variant("scaled-gradcam", times=2), factor=10)
    finally:
        del METHODS["scaled-gradcam"]


class Normed(nn.Module):
    """Two convolutions with batch norm; ``relu`` says how the ReLU is called."""

    def __init__(self, relu: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 5, 3, 2, 1), nn.BatchNorm2d(5)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(5, 3)
        self.function = relu

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm1(self.conv1(images))
        maps = self.act1(maps) if self.function is None else self.function(maps)
        maps = self.norm2(self.conv2(maps))
        maps = self.act2(maps) if self.function is None else self.function(maps)
        return self.head(maps.mean((2, 3)))


def normed(relu: Callable[[Tensor], Tensor] | None = None) -> Normed:
    torch.manual_seed(0)
    model = Normed(relu).eval()
    for norm in (model.norm1, model.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    return model


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_the_map_of_gradients_equals_its_formula(name: str, index: int) -> None:
    model, image = normed(), picture()
    found = camkit.explain(model, image, layer_of(name), method=name, target=index)
    by_hand, array = oracles.Network.of(model), as_float64(image)
    expected = {
        "fullgrad": lambda: by_hand.fullgrad(array, index)[0],
        "guidedbackprop": lambda: np.abs(by_hand.guided_backpropagation(array, index)).max(0),
        "guidedgradcam": lambda: by_hand.guided_gradcam(array, index),
    }[name]()
    assert found.raw.shape == SIZE
    np.testing.assert_allclose(found.raw, expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1e-3))


def parts_of(model: nn.Module, images: Tensor, **options: Any) -> list[PartsOfScore]:
    """Return the parts of each target's score."""
    found: list[PartsOfScore] = []

    def keep(inputs: Tensor, score: PartsOfScore) -> Tensor:
        found.append(score)
        return inputs.sum(1)

    camkit.explain(model, images, method=Method("parts", "", "", "", "parts", keep, layer=False), **options)
    return found


def total(score: PartsOfScore) -> Tensor:
    return torch.stack([part.double().flatten(1).sum(1) for part in (*score.parts, score.rest[:, None])]).sum(0)


@functools.cache
def of_torchvision(name: str) -> nn.Module:
    """Return torchvision's network in float64, with biases and statistics that are not those of a new network."""
    torch.manual_seed(0)
    if name == "frozen batch norm":
        model: nn.Module = torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d, num_classes=10)
    elif name.startswith("vgg"):
        model = torchvision.models.get_model(name, num_classes=10, init_weights=False)
        model.classifier = nn.Sequential(nn.Linear(512 * 49, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))
    else:
        model = torchvision.models.get_model(name, num_classes=10)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, torchvision.ops.FrozenBatchNorm2d)):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(getattr(module, "bias", None), Tensor):
            nn.init.normal_(module.bias, std=0.3)
    return model.double().eval()


COMPLETE = (
    *("resnet18", "vgg11_bn", "vgg11", "frozen batch norm"),
    *("mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "shufflenet_v2_x0_5", "regnet_y_400mf"),
)


@pytest.mark.parametrize("name", represented_by("resnet18", "vgg11_bn", "mobilenet_v3_small", among=COMPLETE))
def test_the_parts_add_up_to_the_score(name: str) -> None:
    model = of_torchvision(name)
    images = torch.randn(2, 3, 64, 64).double()
    with unchanged(model):
        found = parts_of(model, images, target=[3, contrast(1, 2)])
    with torch.no_grad():
        logits = model(images)
    for score, expected in zip(found, (logits[:, 3], logits[:, 1] - logits[:, 2]), strict=True):
        assert len(score.parts) > 8
        torch.testing.assert_close(total(score), expected, rtol=1e-6, atol=1e-6 * float(logits.abs().max()))


def test_without_biases_the_input_is_the_only_part() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (score,) = parts_of(model.eval(), picture()[None], target=0)
    assert len(score.parts) == 1
    found = camkit.explain(model, picture(), method="fullgrad", target=0)
    image = picture().requires_grad_()
    model(image[None])[0, 0].backward()
    np.testing.assert_allclose(found.raw, oracles.to_unit(as_float64(image * image.grad).__abs__()).sum(0), atol=1e-5)


def shifted(net: Net, images: Tensor) -> Tensor:
    """Normalise the input, add a constant, and join two branches."""
    maps = 1 + net.norm1(net.conv1((images - 0.5) / 0.25)).relu_()
    return net.head(net.norm2(net.conv2(maps + maps.flip(3))).clamp(min=0).amax((2, 3)) * 2 - 1)


def features(net: Net, images: Tensor) -> Tensor:
    """Use weights that are no layers: scales, gates and shifts of the channels."""
    scale, gate, shift = net.weights[:, :, None, None]
    return means((net.norm1(net.conv1(images)).relu_() * scale + shift * gate.sigmoid()).relu())


def baddbmm(net: Net, images: Tensor) -> Tensor:
    return torch.baddbmm(net.bias.view(1, 1, 3), features(net, images)[:, None], net.last[None])[:, 0]


def of_maps(net: Net, images: Tensor) -> Tensor:
    maps = features(net, images)
    return torch.addmm(maps, maps, net.last.new_ones(4, 4), beta=3)[:, :3]


def in_place(net: Net, images: Tensor) -> Tensor:
    return net.bias.repeat(len(images), 1).addmm_(features(net, images), net.last, beta=0.5)


BY_HAND: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "constants": shifted,
    "addmm": lambda net, images: torch.addmm(net.bias, features(net, images), net.last, alpha=2),
    "in place": in_place,
    "baddbmm": baddbmm,
    "of maps": of_maps,
    "product": lambda net, images: features(net, images) @ net.last + net.bias,
}


@pytest.mark.parametrize("run", BY_HAND)
def test_constants_are_biases_and_weights_that_are_no_layers_part_of_what_is_linear(run: str) -> None:
    weights = {"weights": torch.randn(3, 4), "last": torch.randn(4, 3), "bias": torch.randn(3)}
    parts = {**Normed()._modules, **{name: nn.Parameter(value) for name, value in weights.items()}}
    model, images = Net(BY_HAND[run], **parts).double(), picture().double()[None]
    (score,) = parts_of(model, images, target=1)
    torch.testing.assert_close(total(score), model(images)[:, 1].detach(), rtol=1e-9, atol=0)


def relu_and_one(maps: Tensor) -> Tensor:
    return maps.relu() + 1


def with_layer_norm() -> nn.Module:
    def run(net: Net, images: Tensor) -> Tensor:
        return net.head(net.norm(net.conv(images).relu().movedim(1, 3)).mean((1, 2)))

    return Net(run, conv=nn.Conv2d(3, 4, 3, 2, 1), norm=nn.LayerNorm(4), head=nn.Linear(4, 3))


def scripted() -> nn.Module:
    """Return a network in which a function is compiled, so that Python does not see what it adds."""
    return normed(torch.jit.script(relu_and_one))


def filtered() -> nn.Module:
    """Return a network that filters its maps in a Fourier transform, whose bias has no place in the picture."""

    def run(net: Net, images: Tensor) -> Tensor:
        maps = torch.fft.irfft2(torch.fft.rfft2(net.first(images)) + net.shift, s=SIZE)
        return means(net.second(maps).relu())

    shift = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex64))
    return Net(run, first=nn.Conv2d(3, 4, 3, 1, 1), second=nn.Conv2d(4, 3, 3, 1, 1), shift=shift)


def without_gradients() -> nn.Module:
    model = normed()
    model.conv1.forward = torch.no_grad()(model.conv1.forward)
    return model


NOT_THE_SCORE = r"add up to .*, but the score is .*use 'hirescam' or 'layercam'"
NO_RELU = "this model ran none; use 'gradcam', 'hirescam' or"


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (with_layer_norm, "fullgrad", NOT_THE_SCORE),
        (scripted, "fullgrad", NOT_THE_SCORE),
        (filtered, "fullgrad", "complex feature maps"),
        (lambda: normed(functional.gelu), "guidedbackprop", NO_RELU),
        (lambda: normed(functional.gelu), "guidedgradcam", NO_RELU),
        *((without_gradients, name, "does not depend on the picture in a differentiable way") for name in OF_GRADIENTS),
    ],
)
def test_what_a_method_cannot_explain_is_refused(make: Callable[[], nn.Module], name: str, said: str) -> None:
    model, layer = make(), "norm2" if name == "guidedgradcam" else None
    with unchanged(model), pytest.raises(MethodError, match=said):
        camkit.explain(model, picture(), layer, method=name, target=1)


def test_a_softmax_at_the_end_changes_nothing() -> None:
    plain = normed()
    ended = nn.Sequential(plain, nn.Softmax(1)).eval()
    for name in OF_GRADIENTS:
        one = camkit.explain(plain, picture(), layer_of(name), method=name, target=1)
        other = camkit.explain(ended, picture(), layer_of(name) and "0.act2", method=name, target=1)
        np.testing.assert_allclose(one.raw, other.raw, rtol=1e-4, atol=1e-7)


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": functional.relu,
    "torch": torch.relu,
    "method": lambda maps: maps.relu(),
    "in place": lambda maps: maps.relu_(),
    "function in place": lambda maps: functional.relu(maps, inplace=True),
    "clamp": lambda maps: maps.clamp(min=0),
    "clamp_min": lambda maps: maps.clamp_min(0),
    "six": lambda maps: functional.relu6(maps / 1000) * 1000,
}


@pytest.mark.parametrize("name", ["guidedbackprop", "guidedgradcam"])
@pytest.mark.parametrize("relu", RELUS)
def test_every_relu_is_guided(relu: str, name: str) -> None:
    layer = "norm2" if name == "guidedgradcam" else None
    expected = camkit.explain(normed(), picture(), layer, method=name, target=1)
    found = camkit.explain(normed(RELUS[relu]), picture(), layer, method=name, target=1)
    np.testing.assert_allclose(found.raw, expected.raw, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def photographed(test_data: Path) -> tuple[nn.Module, Tensor]:
    """Return a network of ReLU modules, trained, and a photo as its input."""
    model = camkit.load_model("squeezenet1_1", test_data / "weights/squeezenet1_1-winml_fp16.pth", device="cpu")
    assert model.preprocess is not None
    with Image.open(test_data / "open_photos/bird.png") as photo:
        return model.module, model.preprocess(photo.convert("RGB"))[None]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["guidedbackprop", "guidedgradcam"])
def test_guided_gradients_agree_with_grad_cam(name: str, photographed: tuple[nn.Module, Tensor]) -> None:
    model, image = photographed
    layer = "features" if name == "guidedgradcam" else None
    found = camkit.explain(model, image, layer, method=name)
    peer = peer_toolkit.GuidedBackpropReLUModel(copy.deepcopy(model), device="cpu")
    guided = np.abs(peer(image.clone(), target_category=found.target)).max(2)
    if layer:
        guided = (
            guided * camkit.explain(model, image, layer, method="gradcam", target=found.target, spread="even").heatmap
        )
    assert np.corrcoef(found.heatmap.ravel(), guided.ravel())[0, 1] > 0.999
