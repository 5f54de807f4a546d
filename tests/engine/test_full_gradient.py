"""FullGrad, guided backpropagation and Guided Grad-CAM: the formulas, completeness, planted truth, other toolkits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import A, B, C, Net, Planted, blobs, heat_at, means
from oracles import as_float64
from oracles_pictures import Network, to_unit
from PIL import Image
from tiers import Extra, represented_by
from torch import Tensor, nn
from torch.nn import functional
from unchanged import unchanged

import camkit
from camkit.errors import MethodError
from camkit.methods import Method
from camkit.targets import contrast, top
from camkit.types import PartsOfScore

peer_toolkit = Extra("pytorch_grad_cam")

NAMES = ("fullgrad", "guidedbackprop", "guidedgradcam")
SIZE = (10, 14)


class Small(nn.Module):
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


def small(relu: Callable[[Tensor], Tensor] | None = None) -> Small:
    torch.manual_seed(0)
    model = Small(relu).eval()
    for norm in (model.norm1, model.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    return model


def picture(seed: int = 1) -> Tensor:
    return torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(seed))


def layer_of(name: str) -> str | None:
    return "act2" if name == "guidedgradcam" else None


# --- the formulas


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_map_equals_its_formula(name: str, index: int) -> None:
    model, image = small(), picture()
    found = camkit.explain(model, image, layer_of(name), method=name, target=index)
    by_hand, array = Network.of(model), as_float64(image)
    expected = {
        "fullgrad": lambda: by_hand.fullgrad(array, index)[0],
        "guidedbackprop": lambda: np.abs(by_hand.guided_backpropagation(array, index)).max(0),
        "guidedgradcam": lambda: by_hand.guided_gradcam(array, index),
    }[name]()
    assert found.raw.shape == SIZE
    np.testing.assert_allclose(found.raw, expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1e-3))


def test_the_network_by_hand_is_the_network() -> None:
    model, image = small().double(), picture().double()
    by_hand = Network.of(model)
    logits = model(image.requires_grad_()[None])[0]
    np.testing.assert_allclose(by_hand.logits(as_float64(image)), as_float64(logits))
    logits[1].backward()
    np.testing.assert_allclose(by_hand.backward(1, guided=False)[0], as_float64(image.grad), atol=1e-12)
    assert by_hand.fullgrad(as_float64(image), 1)[1] == pytest.approx(float(logits[1].detach()))


# --- FullGrad: completeness


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
def network(name: str) -> nn.Module:
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
    model = network(name)
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
    np.testing.assert_allclose(found.raw, to_unit(as_float64(image * image.grad).__abs__()).sum(0), atol=1e-5)


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
    parts = {**Small()._modules, **{name: nn.Parameter(value) for name, value in weights.items()}}
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
    return small(torch.jit.script(relu_and_one))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("make", [with_layer_norm, scripted])
def test_a_network_whose_parts_do_not_add_up_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(MethodError, match=r"add up to .*, but the score is .*use 'hirescam' or 'layercam'"):
        camkit.explain(model, picture(), method="fullgrad", target=1)


@pytest.mark.parametrize("precision", ["bf16-forced", "fp16"])
def test_in_sixteen_bits_the_parts_add_up_to_rounding(precision: Any) -> None:
    model = small()
    full = camkit.explain(model, picture(), method="fullgrad", target=1)
    half = camkit.explain(model, picture(), method="fullgrad", target=1, precision=precision)
    assert np.corrcoef(full.raw.ravel(), half.raw.ravel())[0, 1] > 0.99


def test_a_softmax_at_the_end_changes_nothing() -> None:
    plain = small()
    ended = nn.Sequential(plain, nn.Softmax(1)).eval()
    for name in NAMES:
        one = camkit.explain(plain, picture(), layer_of(name), method=name, target=1)
        other = camkit.explain(ended, picture(), layer_of(name) and "0.act2", method=name, target=1)
        np.testing.assert_allclose(one.raw, other.raw, rtol=1e-4, atol=1e-7)


# --- guided backpropagation: every kind of ReLU


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
    expected = camkit.explain(small(), picture(), layer, method=name, target=1)
    found = camkit.explain(small(RELUS[relu]), picture(), layer, method=name, target=1)
    np.testing.assert_allclose(found.raw, expected.raw, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["guidedbackprop", "guidedgradcam"])
def test_without_a_relu_there_is_nothing_to_guide(name: str) -> None:
    model = small(functional.gelu)
    layer = "norm2" if name == "guidedgradcam" else None
    with unchanged(model), pytest.raises(MethodError, match="this model ran none; use 'gradcam', 'hirescam' or"):
        camkit.explain(model, picture(), layer, method=name, target=1)


# --- planted truth


class PlantedWithRelu(Planted):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.relu())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("places", [[A], [A, B]], ids=["one place", "two places"])
def test_the_heat_is_where_the_decision_is_made(places: list[tuple[int, int, int]], name: str) -> None:
    layer = "layer" if name == "guidedgradcam" else None
    found = camkit.explain(PlantedWithRelu(places).eval(), blobs(), layer, method=name, target=0)
    inside = [heat_at(found, place) for place in places]
    outside = [heat_at(found, place) for place in (A, B, C) if place not in places]
    assert min(inside) > 0.5
    assert max(outside) == 0


# --- targets, batches, memory, modes


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_several_targets_equals_its_pictures_and_targets_one_by_one(name: str) -> None:
    model, layer = small(), layer_of(name)
    images, target = torch.stack([picture(1), picture(2)]), [0, top(2), lambda logits: logits[:, 1] / 2]
    together = camkit.explain(model, images, layer, method=name, target=target)
    alone = [row for image in images for row in camkit.explain(model, image, layer, method=name, target=target)]
    assert len(together) == len(alone) == 8
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.raw, other.raw, rtol=1e-3, atol=1e-5 * np.abs(other.raw).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_trunk_without_gradients_is_refused(name: str) -> None:
    model = small()
    forward = model.conv1.forward
    model.conv1.forward = torch.no_grad()(forward)
    with pytest.raises(MethodError, match="does not depend on the picture in a differentiable way"):
        camkit.explain(model, picture(), layer_of(name), method=name, target=1)


def test_several_layers_are_fused() -> None:
    found = camkit.explain(small(), picture(), ["act1", "act2"], method="guidedgradcam", target=1, fuse="product")
    assert found.raw.shape == SIZE
    assert found.layer == "act1+act2"


# --- other toolkits


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


def test_a_bias_in_a_spectrum_has_no_place_in_the_picture() -> None:
    """Feature maps are filtered in a Fourier transform, between two convolutions."""

    def run(net: Net, images: Tensor) -> Tensor:
        maps = torch.fft.irfft2(torch.fft.rfft2(net.first(images)) + net.shift, s=SIZE)
        return means(net.second(maps).relu())

    shift = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex64))
    model = Net(run, first=nn.Conv2d(3, 4, 3, 1, 1), second=nn.Conv2d(4, 3, 3, 1, 1), shift=shift)
    with unchanged(model), pytest.raises(MethodError, match="complex feature maps"):
        camkit.explain(model, picture(), method="fullgrad")
