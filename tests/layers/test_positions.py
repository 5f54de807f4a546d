"""Where the cells of a network look, and heat drawn there.

The truth is the gradient of one cell at the picture, in networks whose weights are all equal: its centre of mass is the
middle of what the cell reads. In a trained network, it is the object whose class is explained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.engine.heatmap import enlarge, fuse
from camkit.types import Placement


class Same(nn.Conv2d):
    """A convolution that pads as TensorFlow does, more at the end than at the start."""

    def forward(self, maps: Tensor) -> Tensor:
        amounts: list[int] = []
        for side, kernel, stride in zip(maps.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            amounts += [missing // 2, missing - missing // 2]
        return super().forward(functional.pad(maps, amounts))


def halving(stride: int, kind: type[nn.Conv2d] = nn.Conv2d, **options: Any) -> list[nn.Module]:
    """Return convolutions with kernels of 3 and strides of 2 that together have a stride."""
    steps = stride.bit_length() - 1
    return [kind(3 if step == 0 else 4, 4, 3, 2, **options) for step in range(steps)]


def pooled(stride: int, pool: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3, 1, 1), *[pool] * (stride.bit_length() - 1)]


NETWORKS: dict[str, Any] = {
    **{f"padded, {stride}": lambda stride=stride: halving(stride, padding=1) for stride in (4, 8, 16, 32)},
    **{f"not padded, {stride}": lambda stride=stride: halving(stride) for stride in (4, 8, 16)},
    **{f"padded as TensorFlow, {stride}": lambda stride=stride: halving(stride, Same) for stride in (4, 8, 16, 32)},
    "even kernels": lambda: [nn.Conv2d(3, 4, 4, 2, 1), nn.Conv2d(4, 4, 2, 2, 1), nn.Conv2d(4, 4, 6, 2, 2)],
    "strides of 3": lambda: [nn.Conv2d(3, 4, 5, 3, 2), nn.Conv2d(4, 4, 3, 1, 1)],
    "average pooling": lambda: pooled(16, nn.AvgPool2d(2)),
    "average pooling, rounded up": lambda: pooled(16, nn.AvgPool2d(2, ceil_mode=True)),
}


class OneCell(nn.Module):
    """All weights of a kernel are equal, so a cell's gradient at the picture is symmetrical about the cell's middle."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1 / parameter[0].numel() if parameter.dim() > 1 else 0.0)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layers(images)
        return maps.sum(1, keepdim=True) * 1.0


def truth_of(model: nn.Module, size: tuple[int, int], row: int, column: int) -> np.ndarray:
    """Return the middle of the pixels that a cell reads."""
    image = torch.rand(1, 3, *size, requires_grad=True)
    model(image)[0, 0, row, column].backward()
    assert image.grad is not None
    weights = image.grad[0].sum(0).abs().double().numpy()
    return np.array([(weights.sum(1 - axis) * np.arange(size[axis])).sum() / weights.sum() for axis in (0, 1)])


def explained(model: nn.Module, picture: Tensor, **options: Any) -> camkit.Explanation:
    options = {"target_layer": "layers", "target": lambda output: output.square().sum((1, 2, 3)), **options}
    return camkit.explain(model, picture, **options)


@pytest.mark.parametrize("size", [(96, 96), (97, 113), (224, 160), (225, 256)])
@pytest.mark.parametrize("name", NETWORKS)
def test_cells_are_placed_where_they_look(name, size):
    """Also in pictures larger than those with which cells are measured."""
    if name == "strides of 3" and size != (96, 96):
        pytest.skip("34 cells of 3 pixels are more than 100 pixels, and a stride of 3 is not usual")
    torch.manual_seed(0)
    model = OneCell(NETWORKS[name]()).eval()
    places = explained(model, torch.rand(3, *size)).positions
    rows, columns = (len(axis) // 2 for axis in places)
    stride = places[0][1] - places[0][0]
    error = np.array([places[0][rows], places[1][columns]]) - truth_of(model, size, rows, columns)
    assert np.abs(error).max() <= max(1.0, 0.15 * stride), (error / stride, stride)


@pytest.mark.parametrize("scale", [(1.0, 0.0), (255.0, 0.0), (4.0, -2.0)], ids=["0 to 1", "0 to 255", "normalised"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_cells_are_measured_in_the_models_own_values(channels, scale):
    """A last activation that saturates shows nothing of pictures with other values."""
    factor, start = scale
    torch.manual_seed(0)
    model = OneCell([nn.Conv2d(channels, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)]).eval()
    model.layers.append(nn.Hardtanh(start, start + factor))
    places = explained(model, torch.rand(channels, 64, 64) * factor + start).positions[0]
    assert np.abs(places - 4.0 * np.arange(16)).max() < 0.6


def test_the_maps_are_the_same_and_only_their_places_differ():
    torch.manual_seed(0)
    model, image = OneCell(NETWORKS["padded, 32"]()).eval(), torch.rand(3, 225, 225)
    even, measured = (explained(model, image, spread=spread) for spread in ("even", None))
    assert np.array_equal(even.raw, measured.raw)
    rows, columns = measured.positions
    assert np.allclose(even.positions[0], (np.arange(8) + 0.5) * 225 / 8 - 0.5)
    raw = torch.from_numpy(np.maximum(even.raw, 0))[None, None]
    expected = functional.interpolate(raw, size=(225, 225), mode="bilinear", align_corners=False)[0, 0].numpy()
    assert np.allclose(even.heatmap, expected / expected.max(), atol=1e-6)
    between = np.stack([np.interp(np.arange(225), columns, row) for row in np.maximum(measured.raw, 0)])
    expected = np.stack([np.interp(np.arange(225), rows, column) for column in between.T], 1)
    assert np.allclose(measured.heatmap, expected / expected.max(), atol=1e-6)


def only(shape: tuple[int, ...]) -> Net:
    """Return a module that takes inputs of this shape alone."""

    def checked(_: Net, images: Tensor) -> Tensor:
        assert images.shape == shape
        return images

    return Net(checked)


@pytest.mark.parametrize("first", [only((1, 3, 96, 96)), Net(lambda _, images: images.flip(0))], ids=["one", "flipped"])
def test_cells_of_models_for_single_pictures_are_measured_too(first):
    layers, image = halving(16, padding=1), torch.rand(3, 96, 96)
    expected, found = (explained(OneCell(each).eval(), image).positions for each in (layers, [first, *layers]))
    assert np.array_equal(expected, found)
    assert not np.allclose(expected[0], (np.arange(6) + 0.5) * 16 - 0.5)


@pytest.mark.parametrize(
    "model",
    [
        OneCell([only((1, 3, 225, 225)), *halving(32, padding=1)]),
        OneCell([*halving(32, padding=1), Net(lambda _, maps: maps + 10 * torch.randn_like(maps))]),
        OneCell([nn.Conv2d(3, 4, 16, 16), nn.Conv2d(4, 4, 3, 1, 1)]),
    ],
    ids=["takes one size", "noise", "patches"],
)
def test_other_cells_are_spread_evenly(model):
    maps = [explained(model.eval(), torch.rand(3, 225, 225), spread=spread) for spread in (None, "even")]
    assert np.array_equal(*(explanation.positions for explanation in maps))


def object_and_scene(number: int, side: int, random: torch.Generator) -> tuple[Tensor, Tensor, NDArray[np.float64]]:
    """Return pictures with a striped, barred or hollow square, which kind each has, and the squares' middles."""
    kinds = torch.randint(3, (number,), generator=random)
    pictures, middles = torch.rand(number, 3, side, side, generator=random) * 0.3 + 0.3, []
    for picture, kind in zip(pictures, kinds, strict=True):
        top, left = torch.randint(2, side - 20, (2,), generator=random).tolist()
        square = torch.zeros(3, 18, 18)
        square[0] = 1
        (square[:, 6:12], square[:, :, 6:12], square[:, 5:13, 5:13])[int(kind)].zero_()
        picture[:, top : top + 18, left : left + 18] = square
        middles.append((top + 8.5, left + 8.5))
    return pictures, kinds, np.array(middles)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "side"), [(nn.Conv2d, 96), (nn.Conv2d, 97), (Same, 96)])
def test_the_heat_of_a_trained_network_lies_on_the_object(kind, side):
    """With an even spread, the heat lies 0.3 to 0.45 cells beside the object."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 24), (24, 32), (32, 32)):
        layers += [kind(inputs, outputs, 3, 2, 0 if kind is Same else 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
    optimiser = torch.optim.Adam(net.parameters(), 4e-3)
    for _ in range(260):
        pictures, kinds, _ = object_and_scene(32, side, random)
        optimiser.zero_grad()
        functional.cross_entropy(net(pictures), kinds).backward()
        optimiser.step()
    pictures, kinds, middles = object_and_scene(100, side, random)
    beside = []
    for found, middle in zip(
        camkit.Explainer(net.eval(), method="hirescam").batch(list(pictures)), middles, strict=True
    ):
        heat = found.heatmap * (found.heatmap > 0.3)
        beside.append([(heat.sum(1 - axis) * np.arange(side)).sum() / heat.sum() - middle[axis] for axis in (0, 1)])
    assert np.abs(np.median(beside, 0)).max() < 0.15 * 16


def test_cells_at_the_same_place_are_drawn_as_their_mean():
    cells = torch.tensor([[1.0, 3.0, 8.0]])
    placement = Placement(positions=((2.0, 2.0, 6.0),))
    assert enlarge(cells, (9,), placement).tolist() == [[2, 2, 2, 3.5, 5, 6.5, 8, 8, 8]]


def test_fused_layers_are_moved_to_the_places_of_the_finest_cells():
    fine, coarse = torch.rand(2, 6), torch.rand(2, 3)
    placements = [Placement(positions=((0.0, 2.0, 4.0, 6.0, 8.0, 10.0),)), Placement(positions=((0.0, 4.0, 8.0),))]
    moved = np.stack([np.interp([0, 2, 4, 6, 8, 10], [0, 4, 8], row) for row in (coarse / coarse.amax(1)[:, None])])
    expected = ((fine / fine.amax(1)[:, None]).numpy() + moved) / 2
    assert np.allclose(fuse([fine, coarse], "mean", placements), expected, atol=1e-6)
