"""The centres of the kernels behind a map's cells, and heat drawn there.

The truth is the gradient of one cell at the picture, in networks whose weights are all equal: its centre of mass is the
middle of what the cell reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from tiers import represented_by, rows_represented
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.engine.heatmap import enlarge, fuse
from camkit.types import Placement

SIZES = [(224, 224), (225, 225), (200, 264)]


class Same(nn.Conv2d):
    """A convolution that pads as TensorFlow does, more at the end than at the start."""

    def forward(self, maps: Tensor) -> Tensor:
        amounts: list[int] = []
        for side, kernel, stride in zip(maps.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            amounts += [missing // 2, missing - missing // 2]
        return super().forward(functional.pad(maps, amounts))


class Windows(nn.Module):
    """Mixes the cells of shifted windows of 2 x 2, as tokens, and puts them back."""

    def forward(self, maps: Tensor) -> Tensor:
        batch, channels, height, width = maps.shape
        maps = functional.pad(maps, (0, width % 2, 0, height % 2)).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
        rows, columns = maps.shape[1] // 2, maps.shape[2] // 2
        windows = maps.reshape(batch, rows, 2, columns, 2, channels).permute(0, 1, 3, 2, 4, 5)
        tokens = windows.reshape(-1, 4, channels)
        tokens = tokens + 0.1 * torch.softmax(tokens @ tokens.mT, -1) @ tokens
        windows = tokens.reshape(batch, rows, columns, 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        maps = windows.reshape(batch, 2 * rows, 2 * columns, channels).roll((1, 1), (1, 2))
        return maps[:, :height, :width].permute(0, 3, 1, 2)


class Tokens(nn.Module):
    """Reads patches as tokens behind a class token, and drops the class token again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, 1, 4))

    def forward(self, maps: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(maps), -1, -1), maps.flatten(2).mT], 1)
        return functional.layer_norm(tokens, (4,))[:, 1:].mT.unflatten(2, maps.shape[2:]) + maps


class Written(nn.Module):
    """Writes its input into the middle of larger zeros, in place."""

    def forward(self, maps: Tensor) -> Tensor:
        height, width = maps.shape[2:]
        larger = maps.new_zeros(*maps.shape[:2], height + 3, width + 5)
        larger[:, :, 1 : 1 + height, 2 : 2 + width] = maps
        return larger.relu_()


class Collected(nn.Module):
    """Copies pictures one by one into a batch, as detectors do."""

    def forward(self, images: Tensor) -> Tensor:
        batch = images.new_full(images.shape, 0)
        for number, image in enumerate(images):
            batch[number, :, : image.shape[1], : image.shape[2]].copy_(image)
        return batch


def halving(stride: int, kind: type[nn.Conv2d] = nn.Conv2d, **options: Any) -> list[nn.Module]:
    """Return convolutions with kernels of 3 and strides of 2 that together have a stride."""
    steps = stride.bit_length() - 1
    return [kind(3 if step == 0 else 4, 4, 3, 2, **options) for step in range(steps)]


def pooled(stride: int, pool: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3, 1, 1), *[pool] * (stride.bit_length() - 1)]


NETWORKS: dict[str, Any] = {
    **{f"padded, {stride}": lambda stride=stride: halving(stride, padding=1) for stride in (4, 8, 16, 32)},
    **{f"not padded, {stride}": lambda stride=stride: halving(stride) for stride in (4, 8, 16, 32)},
    **{f"padded as TensorFlow, {stride}": lambda stride=stride: halving(stride, Same) for stride in (4, 8, 16, 32)},
    **{f"patches, {stride}": lambda stride=stride: [nn.Conv2d(3, 4, stride, stride)] for stride in (4, 16, 32)},
    "dilated": lambda: [*halving(8, padding=1), nn.Conv2d(4, 4, 3, 1, 4, 4), nn.Conv2d(4, 4, 3, 1, 2, 2)],
    "even kernels": lambda: [nn.Conv2d(3, 4, 4, 2, 1), nn.Conv2d(4, 4, 2, 2, 1), nn.Conv2d(4, 4, 6, 2, 2)],
    "uneven": lambda: [nn.Conv2d(3, 4, (3, 7), (2, 4), (1, 0)), nn.Conv2d(4, 4, (5, 2), (4, 2), (0, 1))],
    "average pooling": lambda: pooled(16, nn.AvgPool2d(2)),
    "average pooling that counts no padding": lambda: pooled(16, nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "average pooling, rounded up": lambda: pooled(16, nn.AvgPool2d(2, ceil_mode=True)),
    "padded before": lambda: [nn.ZeroPad2d((5, 0, 8, 3)), *halving(16, padding=1)],
    "mirrored at the edges": lambda: [nn.ReflectionPad2d(3), nn.Conv2d(3, 4, 7, 4), *halving(4, padding=1)[1:]],
    "cropped": lambda: [*halving(4, padding=1), nn.ZeroPad2d((-2, -1, -3, 0)), nn.Conv2d(4, 4, 3, 2, 1)],
    "transposed": lambda: [*halving(32, padding=1), nn.ConvTranspose2d(4, 4, 4, 2, 1)],
    "transposed, odd": lambda: [*halving(32, padding=1), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)],
    "transposed, not overlapping": lambda: [
        *halving(32, padding=1),
        nn.ConvTranspose2d(4, 4, 2, 2),
        nn.Conv2d(4, 4, 3),
    ],
    "enlarged": lambda: [*halving(32, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3)],
    "repeated": lambda: [*halving(32, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, 1, 1)],
    "resized first": lambda: [nn.Upsample(size=(160, 192), mode="bilinear"), *halving(16, padding=1)],
    "windows": lambda: [nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 2, 2), Windows(), nn.Conv2d(4, 4, 2, 2), Windows()],
    "tokens": lambda: [nn.Conv2d(3, 4, 8, 8), Tokens(), nn.Conv2d(4, 4, 3, 2, 1), Tokens()],
    "written in place": lambda: [nn.Conv2d(3, 4, 4, 4), Written(), nn.Conv2d(4, 4, 3, 2, 1)],
    "collected": lambda: [Collected(), *halving(16, padding=1)],
}


class OneCell(nn.Module):
    """All weights of a kernel are equal, so a cell's gradient at the picture is symmetrical about the cell's middle."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1 / parameter[0].numel() if parameter.dim() > 1 else 0.0)
        for layer in self.layers:
            if isinstance(layer, nn.ConvTranspose2d):  # interpolates linearly, as trained ones nearly do
                side = layer.kernel_size[0]
                line = side / 2 - (torch.arange(side) - (side - 1) / 2).abs()
                layer.weight.data.copy_(line * line[:, None] / 16)

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


@pytest.mark.parametrize(
    ("size", "name"), rows_represented(lambda size, _: size == (200, 264), [(s, n) for s in SIZES for n in NETWORKS])
)
def test_the_hottest_pixel_is_where_the_cell_looks(size, name):
    torch.manual_seed(0)
    model = OneCell(NETWORKS[name]()).eval()
    rows, columns = model(torch.rand(1, 3, *size)).shape[2:]
    for row, column in ((rows // 2, columns // 2), (rows // 3 + 1, columns // 2 - 1)):
        found = camkit.explain(
            model,
            torch.rand(3, *size),
            "layers",
            method="hirescam",
            spread="centres",
            target=lambda output, row=row, column=column: output[:, 0, row, column],
        )
        heatmap = found.heatmap
        hottest = np.argwhere(heatmap >= heatmap.max() - 1e-6).mean(0)
        cell = [np.ptp(places) / (len(places) - 1) for places in found.positions]
        assert np.abs(hottest - truth_of(model, size, row, column)).max() <= max(0.5, max(cell) / 4), found.positions
        assert found.placement.positions


ACTIVATIONS: dict[str, Any] = {
    **{
        name: lambda kind=kind, **options: kind(**options)
        for name, kind in {
            "ReLU": nn.ReLU,
            "ReLU6": nn.ReLU6,
            "LeakyReLU": nn.LeakyReLU,
            "ELU": nn.ELU,
            "CELU": nn.CELU,
            "SELU": nn.SELU,
            "SiLU": nn.SiLU,
            "Mish": nn.Mish,
            "Hardswish": nn.Hardswish,
            "Hardsigmoid": nn.Hardsigmoid,
            "Hardtanh": nn.Hardtanh,
        }.items()
    },
    "GELU": lambda inplace: nn.GELU(),
    "PReLU": lambda inplace: nn.PReLU(),
    "LogSigmoid": lambda inplace: nn.LogSigmoid(),
    "Softplus": lambda inplace: nn.Softplus(),
    "Threshold": lambda inplace: nn.Threshold(-1.0, 0.0, inplace),
}


@pytest.mark.parametrize("inplace", represented_by(True, among=[False, True]))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_cells_are_followed_through_every_activation(name, inplace):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), ACTIVATIONS[name](inplace=inplace)).eval()
    layers = nn.Sequential(model, nn.Conv2d(4, 4, 3, 2, 1))
    score = lambda output: output.square().sum((1, 2, 3))  # noqa: E731
    explanation = camkit.explain(layers, torch.rand(3, 17, 21), "1", spread="centres", target=score)
    assert explanation.positions[1].tolist() == [4.0 * cell for cell in range(6)]


def test_the_maps_are_the_same_and_only_their_places_differ():
    torch.manual_seed(0)
    model, image = OneCell(NETWORKS["padded, 32"]()).eval(), torch.rand(3, 225, 225)
    even, centres = (
        camkit.explain(model, image, "layers", spread=spread, target=lambda output: output.square().sum((1, 2, 3)))
        for spread in ("even", "centres")
    )
    assert np.array_equal(even.raw, centres.raw)
    rows, columns = centres.positions
    assert rows.tolist() == columns.tolist() == [32.0 * cell for cell in range(8)]
    assert np.allclose(even.positions[0], (np.arange(8) + 0.5) * 225 / 8 - 0.5)
    raw = torch.from_numpy(np.maximum(even.raw, 0))[None, None]
    expected = functional.interpolate(raw, size=(225, 225), mode="bilinear", align_corners=False)[0, 0].numpy()
    assert np.allclose(even.heatmap, expected / expected.max(), atol=1e-6)
    between = np.stack([np.interp(np.arange(225), columns, row) for row in np.maximum(centres.raw, 0)])
    expected = np.stack([np.interp(np.arange(225), rows, column) for column in between.T], 1)
    assert np.allclose(centres.heatmap, expected / expected.max(), atol=1e-6)


@pytest.mark.parametrize(
    "name", ["padded, 32", "padded, 8", "not padded, 16", "padded as TensorFlow, 16", "patches, 32", "even kernels"]
)
@pytest.mark.parametrize(("size", "usual"), [((224, 224), (224, 224)), ((225, 209), (224, 192))])
def test_cells_lie_in_the_middle_of_their_strides(name, size, usual):
    """In pictures of the usual size, the middle of the cells is the picture's; in others, they lie beside it as far."""
    torch.manual_seed(0)
    model = OneCell(NETWORKS[name]()).eval()
    score = lambda output: output.square().sum((1, 2, 3))  # noqa: E731
    found = camkit.explain(model, torch.rand(3, *size), "layers", target=score).positions
    rows, columns = model(torch.rand(1, 3, *usual)).shape[2:]
    outer = [truth_of(model, usual, *cell) for cell in ((2, 2), (rows - 3, columns - 3))]
    beside = (np.array(usual) - 1) / 2 - np.mean(outer, 0)
    for row, column in ((2, 2), (3, 2)):
        place = np.array([found[0][row], found[1][column]])
        assert np.abs(place - truth_of(model, size, row, column) - beside).max() <= 0.5, found


def test_cells_that_fill_the_picture_are_drawn_as_other_toolkits_do():
    torch.manual_seed(0)
    model, image = OneCell(NETWORKS["padded, 32"]()).eval(), torch.rand(3, 224, 160)
    score = lambda output: output.square().sum((1, 2, 3))  # noqa: E731
    maps = [camkit.explain(model, image, "layers", target=score, spread=spread) for spread in (None, "even")]
    assert np.array_equal(*(explanation.heatmap for explanation in maps))
    assert all(not explanation.placement.positions for explanation in maps)


def test_inception_is_placed_as_at_the_size_it_was_trained_on():
    torch.manual_seed(0)
    model = torchvision.models.inception_v3(weights=None, init_weights=False).eval()
    found = camkit.explain(model, torch.randn(3, 299, 299), "Mixed_7c", method="gradcam", target=1)
    assert found.positions[0].mean() == pytest.approx(149, abs=0.5)
    assert np.diff(found.positions[0]).tolist() == [32.0] * 7


def test_a_model_that_takes_one_size_has_its_cells_spread_evenly():
    class OneSize(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            assert images.shape[2:] == (225, 225)
            return super().forward(images).mean((2, 3))

    torch.manual_seed(0)
    model = OneSize(*halving(32, padding=1)).eval()
    maps = [camkit.explain(model, torch.rand(3, 225, 225), target=1, spread=spread) for spread in (None, "even")]
    assert np.array_equal(*(explanation.positions for explanation in maps))


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
