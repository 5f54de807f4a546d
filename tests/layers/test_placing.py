"""Where a layer's cells lie in the picture: their order, extra tokens, and the model's own padding."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net, classifier, means
from tiers import represented_by, rows_represented
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.engine.heatmap import enlarge, fuse
from camkit.errors import LayerError
from camkit.layers.choose import decide
from camkit.types import Placement


def chosen(net: nn.Module, *size: int) -> Any:
    return decide(net, torch.rand(1, *size)).chosen()


def windows_first(maps: Tensor, _: Tensor) -> Tensor:
    windows = maps.unflatten(3, (4, -1)).unflatten(2, (4, -1)).permute(0, 2, 4, 3, 5, 1)
    return windows.flatten(1, 4)


def coarse_cells_after(maps: Tensor, _: Tensor) -> Tensor:
    return torch.cat([maps.flatten(2).mT, functional.avg_pool2d(maps, 4).flatten(2).mT], 1)


def extra_after(maps: Tensor, extra: Tensor) -> Tensor:
    return torch.cat([maps.flatten(2).mT, extra], 1)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "windows first": (windows_first, 24, 1),
    "backwards": (lambda maps, _: maps.flatten(2).mT.flip(1), 24, 1),
    "columns": (lambda maps, _: maps.mT.flatten(2).mT, 24, 1),
    "as wide as the grid": (lambda maps, _: maps.permute(0, 2, 3, 1), 16, 1),
    "as wide as the patches": (lambda maps, extra: torch.cat([extra, maps.flatten(2).mT], 1), 256, 5),
    "coarse cells after": (coarse_cells_after, 24, 1),
    "one after": (extra_after, 24, 1),
    "four after": (extra_after, 24, 4),
}
"""How a network rearranges its 16 x 16 patches before it uses them, its channels, and its learned tokens."""


def arranged(way: str) -> Net:
    arrange, channels, count = WAYS[way]

    def run(net: Net, images: Tensor) -> Tensor:
        mixed = net.mix(arrange(net.patches(images), net.extra.expand(len(images), -1, -1)))
        return net.head(mixed.flatten(1, -2).relu().mean(1))

    parts = {"patches": nn.Conv2d(3, channels, 4, 4), "extra": nn.Parameter(torch.randn(1, count, channels))}
    mix = nn.Sequential(nn.Linear(channels, channels), nn.GELU())
    return Net(run, **parts, mix=mix, head=nn.Linear(channels, 5))


def follows(net: nn.Module, layer: str, image: Tensor, raw: Any) -> bool:
    """Change one corner of the picture, and tell whether the map of a score that reads only this corner lies there."""
    corner = image.clone()
    corner[:, :16, :16] += 1
    change = camkit.explain(net, corner, layer, target=0, method="hirescam").raw - raw
    return bool(np.abs(change)[:4, :4].sum() > 0.9 * np.abs(change).sum())


@pytest.mark.parametrize("layer", [None, "mix"])
@pytest.mark.parametrize(
    "way", ["as wide as the grid", "as wide as the patches", "one after", "four after", "coarse cells after"]
)
def test_cells_are_drawn_where_they_lie_however_they_are_arranged(way, layer):
    net, image = arranged(way), torch.randn(3, 64, 64)
    found = camkit.explain(net, image, layer, target=0, method="hirescam")
    assert (found.layer, found.raw.shape) == ("mix", (16, 16))
    assert follows(net, "mix", image, found.raw)
    assert "not certain" not in found.layer_reason


@pytest.mark.parametrize("way", ["backwards", "columns"])
def test_cells_in_another_order_are_refused(way):
    net, image = arranged(way), torch.randn(3, 64, 64)
    assert camkit.explain(net, image, target=0).layer == "patches"
    with pytest.raises(LayerError, match="lie elsewhere in the input"):
        camkit.explain(net, image, "mix", target=0)


def test_memory_that_runs_out_while_cells_are_located_is_an_error():
    def run(net: Net, images: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return net.inner(images)

    with pytest.raises(torch.OutOfMemoryError):
        decide(Net(run, inner=arranged("one after")), torch.randn(1, 3, 64, 64))


Move = Callable[[Tensor], Tensor]


def windows(x: Tensor) -> Tensor:
    """Put the cells of each 2 x 2 window one after the other."""
    return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4).flatten(2).view_as(x)


def moves_of(size: tuple[int, int], draw: random.Random) -> dict[str, Move]:
    """Return, by name, moves of the cells of maps of this size."""
    cells = size[0] * size[1]
    order = torch.tensor(draw.sample(range(cells), cells))
    down, across = draw.randrange(1, max(2, size[0])), draw.randrange(1, max(2, size[1]))
    moves: dict[str, Move] = {
        **{f"turn {90 * n}": functools.partial(torch.rot90, k=n, dims=(2, 3)) for n in (1, 2, 3)},
        "transpose": lambda x: x.mT,
        "turn and mirror": lambda x: x.rot90(1, (2, 3)).flip(2),
        "mirror": lambda x: x.flip(3),
        "mirror the order": lambda x: x.flatten(2).flip(2).view_as(x),
        "roll down": lambda x: x.roll(down, 2),
        "roll both": lambda x: x.roll((down, across), (2, 3)),
        "shuffle": lambda x: x.flatten(2)[:, :, order].view_as(x),
        "none": lambda x: x,
        "none, by reshaping": lambda x: x.flatten(2).mT.mT.view_as(x),
    }
    if size[0] % 2 == 0 and size[1] % 2 == 0:
        moves["exchange halves, down"] = lambda x: torch.cat(x.chunk(2, 2)[::-1], 2)
        moves["exchange halves, across"] = lambda x: torch.cat(x.chunk(2, 3)[::-1], 3)
        moves["windows"] = windows
    return moves


def block_of(kind: str, channels: int, cells: int, pooled: int, last: bool) -> nn.Module:
    """Return a layer on maps; ``last`` returns tokens with the channels last, or convolves single cells."""
    if kind in ("transformer", "mixer"):
        attending = nn.TransformerEncoderLayer(channels, 1, 2 * channels, batch_first=True, norm_first=True)
        parts = {"norm": nn.LayerNorm(channels), "cells": nn.Linear(cells, cells), "mix": nn.Linear(channels, channels)}
        mixing = Net(lambda net, tokens: tokens + net.mix(tokens + net.cells(net.norm(tokens).mT).mT).relu(), **parts)

        def on_tokens(net: Net, maps: Tensor) -> Tensor:
            tokens = net.block(maps.flatten(2).mT)
            return tokens.unflatten(1, maps.shape[2:]) if last else tokens

        return Net(on_tokens, block=attending if kind == "transformer" else mixing)
    kernel = {"small kernels": 1 if last else 3, "wide kernels": 7, "strided": 3}[kind]
    steps = [nn.Conv2d(channels, channels, kernel, 1, kernel // 2), nn.ReLU()]
    return nn.Sequential(*([nn.AvgPool2d(pooled)] if pooled > 1 else []), *steps)


@dataclass(frozen=True)
class Case:
    """A network that moves its cells, its input (C, H, W), the layer that is named (None if it is chosen), for each
    layer the places (2, h, w) of its cells in pixels, and everything drawn, for messages.
    """

    model: nn.Module
    image: Tensor
    layer: str | None
    places: dict[str, Tensor]
    words: str


def drawn(number: int) -> Case:
    """Draw a network of three layers, before one of which the cells move.

    The truth is by construction: a picture of coordinates goes through the same moves, and each coarser cell gets the
    median of its parts. The same number always gives the same case.
    """
    draw = random.Random(20260 * 100_000 + number)
    torch.manual_seed(number)
    kind = draw.choice(["small kernels", "wide kernels", "transformer", "mixer", "strided"])
    grid = (draw.randint(1, 8), draw.randint(1, 8)) if draw.random() < 0.6 else (draw.randint(1, 8),) * 2
    stride, coarse = draw.choice([4, 8]), 2 if kind == "strided" else 1
    size = (grid[0] * stride * coarse, grid[1] * stride * coarse)
    moved_at = draw.choice([0, 1, 1, 2, 2])
    channels, last = draw.choice([8, 16, 24]), draw.random() < 0.5

    places = torch.stack(torch.meshgrid(*(torch.arange(side) + 0.5 for side in size), indexing="ij"))[None]
    layers, truth = nn.ModuleList(), {}
    for at in range(3):
        if at == moved_at:
            name, move = draw.choice(list(moves_of(tuple(places.shape[2:]), draw).items()))
            places = move(places)
        pooled = (stride, coarse, 1)[at]
        places = places.unfold(2, pooled, pooled).unfold(3, pooled, pooled).flatten(-2).median(-1).values
        truth[f"layers.{at}"] = places[0]
        if at == 0:
            kernel, padding = (2 * pooled - 1, pooled - 1) if kind == "wide kernels" else (pooled, 0)
            stem = nn.Conv2d(3, channels, kernel, pooled, padding), nn.BatchNorm2d(channels), nn.ReLU()
            layers.append(nn.Sequential(*stem))
        else:
            layers.append(block_of(kind, channels, places[0, 0].numel(), pooled, last))

    def run(net: Net, maps: Tensor) -> Tensor:
        for at, layer in enumerate(net.layers):
            maps = move(maps) if at == moved_at else maps
            grid = maps.shape[2:]
            maps = layer(maps)
            if kind in ("transformer", "mixer") and at > 0:
                maps = maps.reshape(len(maps), *grid, -1).movedim(-1, 1)
        return net.head(maps.mean((2, 3)))

    layer = draw.choice([None, "layers.0", "layers.1", "layers.2", "layers.2"])
    picture = torch.randn(3, *size) if draw.random() < 0.5 else torch.rand(3, *size)
    words = f"case {number}: {kind}, {name} at {moved_at}, input {size}, layer {layer}"
    return Case(Net(run, layers=layers, head=nn.Linear(channels, 5)), picture, layer, truth, words)


def are_beside(places: Tensor, size: tuple[int, ...], drawn_at: Sequence[Tensor] | None = None) -> bool:
    """Tell whether a cell lies more than half a cell beside the row or column at which it is drawn.

    By default, cells are drawn as an even grid. At most half a cell beside it, a cell still covers most of the place.
    """
    sides = [whole / cells for whole, cells in zip(size, places.shape[1:], strict=True)]
    even = [(torch.arange(cells) + 0.5) * side for cells, side in zip(places.shape[1:], sides, strict=True)]
    grid = torch.meshgrid(*(even if drawn_at is None else drawn_at), indexing="ij")
    return any(
        float((place - at).abs().max()) / side > 0.5 for place, at, side in zip(places, grid, sides, strict=True)
    )


def answer(case: Case) -> str:
    """Explain a case, and return whether the answer is "right", "refused", "unsure", "silent" and so on.

    "refused" and "unsure" are answers on cells that lie elsewhere; "needlessly refused" and "needlessly unsure" on
    cells in their places. "silent" is a map whose cells lie elsewhere, without any doubt.
    """
    explainer, size = camkit.Explainer(case.model, case.layer, method="gradcam", spread="even"), case.image.shape[1:]
    try:
        found = explainer(case.image, target=0)
    except LayerError:
        return "refused" if are_beside(case.places[case.layer or "layers.2"], size) else "needlessly refused"
    layer = explainer.layer
    places = next(places for name, places in case.places.items() if layer.name.startswith(name))
    drawn_at = [torch.from_numpy(axis) + 0.5 for axis in found.positions]
    moved = places[0].numel() != found.raw.size
    moved = moved or are_beside(places.reshape(-1, *found.raw.shape), size, drawn_at)
    if layer.sure:
        return "silent" if moved else "right"
    return "unsure" if moved else "needlessly unsure"


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.extended)])
def test_no_map_of_moved_cells_is_drawn_without_a_doubt(count):
    """Turned, mirrored, rolled and shuffled cells, also few of them."""
    answers = [(case.words, answer(case)) for case in map(drawn, range(count))]
    silent = [words for words, given in answers if given == "silent"]
    assert len(silent) <= count / 500, silent  # a measurement of few cells may be wrong by chance
    if count >= 1000:  # few cells leave some doubt, but most of those in their places are drawn
        in_place = [given for _, given in answers if given not in ("refused", "unsure", "silent")]
        assert in_place.count("right") > 0.6 * len(in_place)


def after(change: Callable[[Tensor], Tensor], inner: nn.Module) -> Net:
    """Return a network that changes the picture before it passes it to another network."""
    return Net(lambda net, images: net.inner(change(images)), inner=inner)


def bright(own: int = 0) -> nn.Sequential:
    """Return a network whose cells of 8 pixels, the layer "1", measure brightness without mixing."""
    net = classifier(nn.Conv2d(3, 4, 4, 4, own), nn.Conv2d(4, 4, 2, 2), classes=2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand_like(parameter) if parameter.dim() > 1 else torch.zeros_like(parameter))
    return net


def heat_of_a_square(found: Callable[[Tensor], Any], size: tuple[int, int], top: int, left: int) -> float:
    """Explain a dark picture with a bright square of 16 x 16 pixels; return the share of the heat on it."""
    image = torch.rand(3, *size) * 0.001
    image[:, top : top + 16, left : left + 16] = 1
    heatmap = found(image).heatmap
    assert heatmap.shape == size
    return float(heatmap[top : top + 16, left : left + 16].sum() / heatmap.sum())


PADS = [
    ((0, 32, 0, 32), "constant"),
    ((16, 16, 16, 16), "constant"),
    ((32, 0, 24, 8), "constant"),
    ((0, 96, 0, 0), "constant"),
    ((0, 32, 0, 32), "reflect"),
    ((24, 24, 24, 24), "reflect"),
    ((16, 16, 16, 16), "replicate"),
]
CHANGES: list[Callable[[Tensor], Tensor]] = [
    *(functools.partial(functional.pad, pad=pad, mode=mode) for pad, mode in PADS),
    lambda x: x[..., 32:-32, 32:-32],
    lambda x: x[..., 16:-16, 16:-16],
    lambda x: x[..., 48:, :],
    lambda x: x[..., :96],
    lambda x: x - x.mean((2, 3), keepdim=True),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("size", "layer"), [((128, 128), "inner.1"), ((128, 160), None)])
def test_the_heat_of_a_model_that_pads_or_crops_its_picture_lies_on_the_picture(change, size, layer):
    explainer = camkit.Explainer(after(change, bright()), layer, method="gradcam")
    assert heat_of_a_square(lambda image: explainer(image, 0), size, 56, 64) > 0.6
    assert (explainer.layer.name, explainer.layer.sure) == ("inner.1", True)
    assert explainer.layer.layout.grid == tuple(side // 8 for side in change(torch.zeros(1, 3, *size)).shape[2:])


def test_a_picture_that_is_padded_by_the_model_is_explained_as_one_that_was_padded_before():
    inner = classifier(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 16, 3, 4, 1), nn.ReLU())
    image, pad = torch.randn(3, 96, 128), (16, 16, 0, 32)
    found = camkit.explain(after(lambda x: functional.pad(x, pad), inner), image, target=0, spread="even")
    before = camkit.explain(inner, functional.pad(image, pad), target=0, spread="even")
    assert np.allclose(found.raw, before.raw, atol=1e-6)
    part = before.heatmap[:96, 16:144]
    assert np.allclose(found.heatmap, part / part.max(), atol=1e-5)
    assert before.extent == ()
    np.testing.assert_allclose(found.extent, ((0.0, 96 / 128), (16 / 160, 144 / 160)), atol=1e-12)


def test_the_first_convolutions_own_padding_counts_too():
    """As in Long et al. 2015, whose first convolution pads by 100."""
    net = bright(own=48)
    assert heat_of_a_square(lambda image: camkit.explain(net, image, target=0), (128, 128), 80, 32) > 0.5


@pytest.mark.parametrize("kernel", [3, 7])
def test_the_edges_that_convolutions_add_are_not_taken_for_padding(kernel):
    first = nn.ZeroPad2d(kernel // 2), nn.Conv2d(3, 16, kernel, 2), nn.ReLU()
    assert chosen(classifier(*first, nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()), 3, 64, 64).extent == ()


def test_a_grid_whose_padding_was_cropped_again_covers_the_picture():
    inner = classifier(
        nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 8, 8), nn.ZeroPad2d((-2, -2, -2, -2)), nn.Conv2d(8, 8, 1), nn.ReLU()
    )
    choice = chosen(after(lambda x: functional.pad(x, (16, 16, 16, 16)), inner), 3, 64, 64)
    assert (str(choice), choice.layout.grid, choice.extent) == ("inner.4", (8, 8), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_padding_is_found_in_any_precision(dtype):
    net = after(lambda x: functional.pad(x, (0, 64, 0, 64)), bright()).to(dtype)
    assert decide(net, torch.rand(1, 3, 64, 64).to(dtype)).chosen().extent == ((0.0, 0.5), (0.0, 0.5))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(-1),
        lambda x: x.mT,
        lambda x: functional.batch_norm(x, torch.zeros(3), torch.ones(3)).flip(-1),
    ],
)
def test_a_model_that_moves_its_picture_itself_is_refused_with_the_reason(change):
    with pytest.raises(LayerError, match="crops, mirrors or reorders"):
        camkit.explain(after(change, classifier(nn.Conv2d(3, 16, 8, 8), nn.ReLU())), torch.randn(3, 64, 64))


@pytest.mark.parametrize("function", [torch.log, torch.sqrt])
def test_the_noise_stays_within_the_pictures_range(function):
    choice = chosen(after(lambda images: function(images + 1e-3), bright()), 3, 64, 64)
    assert (choice.name, choice.sure) == ("inner.1", True)


@pytest.mark.parametrize("size", [(96, 224), (224, 96), (160, 160)])
@pytest.mark.parametrize("form", ["channels first", "channels last"])
def test_a_model_that_resizes_its_picture_is_explained_at_its_deepest_layer(size, form):
    def run(net: Net, images: Tensor) -> Tensor:
        maps = net.deep(net.stem(functional.interpolate(images, (128, 128), mode="bilinear")))
        return net.head(maps.mean((2, 3) if form == "channels first" else (1, 2)))

    stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
    last = Net(lambda net, maps: net.mix(maps.permute(0, 2, 3, 1)).relu(), mix=nn.Linear(16, 16))
    deep = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()) if form == "channels first" else last
    choice = chosen(Net(run, stem=stem, deep=deep, head=nn.Linear(16, 5)), 3, *size)
    assert (choice.name, choice.layout.grid, choice.sure) == ("deep", (16, 16), True)


def test_maps_that_lost_their_edges_leave_a_doubt():
    """Two levels of a U-Net of unpadded convolutions (Ronneberger et al. 2015): its maps show only the middle."""

    def pair(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3), nn.ReLU(), nn.Conv2d(after, after, 3), nn.ReLU())

    def run(net: Net, images: Tensor) -> Tensor:
        fine = net.down(images)
        maps = net.up(net.deep(functional.max_pool2d(fine, 2)))
        edge = (fine.shape[-1] - maps.shape[-1]) // 2
        return net.head(net.join(torch.cat([fine[..., edge:-edge, edge:-edge], maps], dim=1)))

    parts = {"down": pair(3, 8), "deep": pair(8, 16), "up": nn.ConvTranspose2d(16, 8, 2, 2), "join": pair(16, 8)}
    assert not chosen(Net(run, **parts, head=nn.Conv2d(8, 3, 1)), 3, 60, 60).sure


@pytest.mark.parametrize("layer", [None, "embed"])
def test_patches_that_a_model_cuts_without_a_convolution_are_a_grid(layer):
    parts = {"cut": nn.Unfold(8, stride=8), "embed": nn.Linear(3 * 64, 16), "head": nn.Linear(16, 4)}
    net = Net(lambda net, images: net.head(net.embed(net.cut(images).mT).relu().mean(1)), **parts)
    explainer = camkit.Explainer(net, layer, method="hirescam")
    explainer(torch.rand(3, 64, 64))
    assert (explainer.layer.layout.grid, explainer.layer.sure) == ((8, 8), True)


@dataclass
class Encoded:
    hidden: Tensor
    steps: int = 1


def encoder(width: int = 32, layers: int = 2, *, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=batch_first, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def sequence(batch_first: bool, wrapped: bool) -> Net:
    """Return a transformer of PyTorch's own parts, whose tokens are (L, N, C) by default."""

    def run(net: Net, images: Tensor) -> Tensor:
        tokens = net.patch(images).flatten(2).mT
        tokens = torch.cat([net.first.expand(len(images), -1, -1), tokens], dim=1)
        encoded = net.encoder(tokens if batch_first else tokens.transpose(0, 1))
        tokens = encoded.hidden if wrapped else encoded
        tokens = tokens if batch_first else tokens.transpose(0, 1)
        return net.head(tokens[:, 1:].mean(1))

    inner = encoder(batch_first=batch_first)
    outer = Net(lambda net, tokens: Encoded(net.encoder(tokens)), encoder=inner) if wrapped else inner
    first = nn.Parameter(torch.randn(1, 1, 32))
    return Net(run, patch=nn.Conv2d(3, 32, 16, 16), first=first, encoder=outer, head=nn.Linear(32, 5))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("precision", "count"),
    rows_represented(
        lambda precision, _: precision == "fp32",
        [("fp32", 1), ("fp32", 3), ("fp32", 17), ("fp16", 17)],  # 17: as many images as tokens
    ),
)
def test_a_sequence_first_transformer_is_explained_as_one_with_the_batch_first(precision, count, wrapped):
    first, second = (sequence(batch_first, wrapped) for batch_first in (False, True))
    second.load_state_dict(first.state_dict())
    images = torch.randn(count, 3, 64, 64)

    found, expected = (
        list(camkit.explain_many(net, images, method="gradcam", target=1, precision=precision))
        for net in (first, second)
    )

    for one, other in zip(found, expected, strict=True):
        assert (one.layer, one.raw.shape) == (other.layer, (4, 4)) == ("encoder", (4, 4))
        tolerance = {"fp32": 1e-5, "fp16": 2e-3}[precision]
        assert np.abs(one.raw - other.raw).max() < tolerance * np.abs(other.raw).max()


@pytest.mark.parametrize("size", represented_by((64, 64), (48, 80), among=[(64, 64), (48, 80), (112, 112)]))
@pytest.mark.parametrize(("before", "behind"), [(1, 1), (1, 4), (0, 3), (1, 14), (1, 100), (17, 0), (51, 2)])
def test_patches_are_found_between_any_number_of_other_tokens(before, behind, size):
    """Such as a detector's queries or a prompt."""

    def run(net: Net, images: Tensor) -> Tensor:
        first, last = (tokens.expand(len(images), -1, -1) for tokens in (net.before, net.behind))
        return net.head(net.blocks(torch.cat([first, net.patch(images).flatten(2).mT, last], dim=1)).mean(1))

    parts = {"patch": nn.Conv2d(3, 32, 8, 8), "head": nn.Linear(32, 5)}
    parts["blocks"] = nn.Sequential(*(encoder(layers=1) for _ in range(3)))
    first, last = (nn.Parameter(torch.randn(1, count, 32) * 0.3) for count in (before, behind))
    choice = chosen(Net(run, **parts, before=first, behind=last), 3, *size)
    grid = tuple(side // 8 for side in size)
    assert (str(choice), choice.layout.grid, choice.layout.prefix) == ("blocks", grid, before)
    assert choice.sure


def test_the_score_decides_that_is_called_so_and_not_what_comes_first():
    def run(net: Net, images: Tensor) -> dict[str, Tensor]:
        stem = net.stem(images).relu()
        logits = net.head(means(net.deep(stem).relu()))
        return {"restored": net.restore(net.wide(stem).relu()), "logits": logits}

    parts = {"stem": nn.Conv2d(3, 16, 4, 4), "deep": nn.Conv2d(16, 16, 3, 2, 1), "head": nn.Linear(16, 5)}
    net = Net(run, **parts, wide=nn.Conv2d(16, 16, 3, 1, 1), restore=nn.ConvTranspose2d(16, 3, 4, 4))
    assert chosen(net, 3, 64, 64).name == "deep"


@pytest.mark.parametrize("side", [8, 16, 24, 32])
def test_a_layer_that_reacts_to_few_places_is_not_said_to_lie_elsewhere(side):
    net = classifier(nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), classes=3)
    with torch.no_grad():  # the first layer reacts only to bright pixels
        net[0].weight.copy_((torch.rand(16, 3, 1, 1) + 0.5).expand(-1, -1, 8, 8) / 192)
        net[0].bias.fill_(-0.7)
        net[2].weight.zero_()
        net[2].bias.zero_()
        net[2].weight[range(16), range(16), 1, 1] = 1
        net[6].weight.copy_(torch.rand(3, 16))
    image = torch.rand(3, 64, 64) * 0.3
    image[:, 24 : 24 + side, 8 : 8 + side] = 1
    assert camkit.explain(net, image, target=0).layer == "3"


@pytest.mark.parametrize("break_", ["no_grad", "detach"])
def test_a_head_behind_a_frozen_trunk_is_explained(break_):
    def run(net: Net, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(break_ != "no_grad" and torch.is_grad_enabled()):
            maps = net.trunk(images)
        return net.top(maps.detach() if break_ == "detach" else maps)

    top = classifier(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
    net = Net(run, trunk=nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU()), top=top)
    assert camkit.explain(net, torch.randn(3, 64, 64), target=0).layer == "top.3"


def trunk_and(head: nn.Module) -> Net:
    maps = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
    return Net(lambda net, images: net.head(net.maps(images)), maps=maps, head=head)


def attention_pool() -> Net:
    def run(net: Net, maps: Tensor) -> Tensor:
        tokens, query = maps.flatten(2).mT, net.query.expand(len(maps), -1, -1)
        return net.head(functional.scaled_dot_product_attention(query, net.key(tokens), net.value(tokens))[:, 0])

    parts = {"key": nn.Linear(32, 32), "value": nn.Linear(32, 32), "head": nn.Linear(32, 5)}
    return Net(run, query=nn.Parameter(torch.randn(1, 1, 32)), **parts)


def gated_pool() -> Net:
    """Ilse et al. 2018, Attention-based Deep Multiple Instance Learning."""

    def run(net: Net, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).mT
        weights = net.weigh(net.first(tokens).tanh() * net.second(tokens).sigmoid()).softmax(1)
        return net.head((weights * tokens).sum(1))

    gates = {"first": nn.Linear(32, 16), "second": nn.Linear(32, 16)}
    return Net(run, **gates, weigh=nn.Linear(16, 1), head=nn.Linear(32, 5))


@pytest.mark.parametrize(
    ("head", "layer"),
    [
        (attention_pool(), "maps"),
        (gated_pool(), "maps"),
        # One influential cell for each class is enough: the maximum over a map, as in multiple-instance learning.
        (Net(lambda net, maps: net.score(maps).amax((2, 3)), score=nn.Conv2d(32, 5, 1)), "maps"),
        # A map of class scores is never explained.
        *(
            (nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(), last), "head.1")
            for last in (
                nn.ConvTranspose2d(16, 5, 2, 2),
                nn.Conv2d(16, 5, 3, 1, 1),
                nn.Conv2d(16, 5, 1),
                nn.Sequential(nn.Conv2d(16, 5, 1), nn.Upsample(scale_factor=2)),
            )
        ),
    ],
)
def test_the_input_of_a_head_is_explained_and_not_its_scores(head, layer):
    found = camkit.explain(trunk_and(head), torch.randn(3, 64, 64), target=1)
    assert found.layer == layer
    assert "zero" not in found.layer_reason


@pytest.mark.parametrize("fine_last", [False, True])
def test_a_branch_of_another_grid_is_named_in_the_reason(fine_last):
    def run(net: Net, images: Tensor) -> Tensor:
        parts = {}
        for name in ("coarse", "fine") if fine_last else ("fine", "coarse"):
            parts[name] = means(getattr(net, name)(images))
        return net.head(torch.cat([parts["coarse"], parts["fine"]], dim=1))

    coarse = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.Conv2d(16, 16, 3, 2, 1))
    net = Net(run, fine=nn.Conv2d(3, 16, 8, 8), coarse=coarse, head=nn.Linear(32, 5))
    layer = decide(net, torch.randn(1, 3, 64, 64)).chosen()
    other = {"fine": "coarse", "coarse": "fine"}[layer.name]
    assert layer.reason.endswith(f"the score also depends on {other}")
    assert not layer.sure


@pytest.mark.parametrize("side", [64, 66, 70])
def test_a_shift_of_some_channels_by_a_pixel_leaves_cells_where_they_are(side: int) -> None:
    """NASNet halves a grid so: half of the channels come from every other cell, the rest from those beside."""

    def halving(net: Net, maps: Tensor) -> Tensor:
        return net.conv(torch.cat([net.first(maps), net.second(net.shift(maps))], 1)).relu()

    pools = {"first": nn.AvgPool2d(1, 2), "second": nn.AvgPool2d(1, 2, count_include_pad=False)}
    halves = [
        Net(halving, **pools, shift=nn.ZeroPad2d((-1, 1, -1, 1)), conv=nn.Conv2d(2 * channels, out, 1))
        for channels, out in ((8, 12), (12, 16))
    ]
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), *halves, nn.Conv2d(16, 16, 3, 1, 1))
    layer = chosen(classifier(trunk, nn.ReLU()), 3, side, side)
    assert (layer.name, layer.sure) == ("1", True)


# The truth is the gradient of one cell at the picture, in networks whose weights are all equal: its centre of mass is
# the middle of what the cell reads. In a trained network, it is the object whose class is explained.


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


HALVING: dict[str, Any] = {
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


def at_layers(model: nn.Module, picture: Tensor, **options: Any) -> camkit.Explanation:
    options = {"target_layer": "layers", "target": lambda output: output.square().sum((1, 2, 3)), **options}
    return camkit.explain(model, picture, **options)


@pytest.mark.parametrize("size", [(96, 96), (97, 113), (224, 160), (225, 256)])
@pytest.mark.parametrize("name", HALVING)
def test_cells_are_placed_where_they_look(name, size):
    """Also in pictures larger than those with which cells are measured."""
    if name == "strides of 3" and size != (96, 96):
        pytest.skip("34 cells of 3 pixels are more than 100 pixels, and a stride of 3 is not usual")
    torch.manual_seed(0)
    model = OneCell(HALVING[name]()).eval()
    places = at_layers(model, torch.rand(3, *size)).positions
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
    places = at_layers(model, torch.rand(channels, 64, 64) * factor + start).positions[0]
    assert np.abs(places - 4.0 * np.arange(16)).max() < 0.6


def test_the_maps_are_the_same_and_only_their_places_differ():
    torch.manual_seed(0)
    model, image = OneCell(HALVING["padded, 32"]()).eval(), torch.rand(3, 225, 225)
    even, measured = (at_layers(model, image, spread=spread) for spread in ("even", None))
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
    expected, found = (at_layers(OneCell(each).eval(), image).positions for each in (layers, [first, *layers]))
    assert np.array_equal(expected, found)
    assert not np.allclose(expected[0], (np.arange(6) + 0.5) * 16 - 0.5)


@pytest.mark.parametrize("number", range(4))
def test_cells_are_measured_again_after_any_convolution_was_trained(number):
    model, image = OneCell(halving(16, padding=1)).eval(), torch.rand(3, 96, 96)
    explainer = camkit.Explainer(model, "layers")
    target = lambda output: output.square().sum((1, 2, 3))  # noqa: E731
    before = explainer(image, target).positions
    with torch.no_grad():
        model.layers[number].weight[..., 1:, 1:] = 0  # it looks above and to the left
    after = explainer(image, target).positions
    assert all((new < old - 0.5).all() for new, old in zip(after, before, strict=True))


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
    maps = [at_layers(model.eval(), torch.rand(3, 225, 225), spread=spread) for spread in (None, "even")]
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


@pytest.mark.parametrize(("length", "channels"), [(1024, 64), (1000, 48), (1024, 256), (300, 100)])
def test_time_is_not_mistaken_for_channels(length, channels):
    """A convolution over time and a recurrent layer, whose output is (N, time, channels)."""
    parts = {"memory": nn.LSTM(32, channels, batch_first=True), "head": nn.Linear(channels, 5)}
    net = Net(lambda net, x: net.head(net.memory(net.conv(x).mT)[0].mean(1)), conv=nn.Conv1d(1, 32, 4, 4), **parts)
    found = camkit.explain(net, torch.randn(1, length), target=0)
    assert (found.layer, found.raw.shape) == ("memory", (length // 4,))


@pytest.mark.parametrize("length", [256, 640])
def test_the_class_token_of_a_signal_is_not_its_first_step(length):
    def run(net: Net, signals: Tensor) -> Tensor:
        tokens = torch.cat([net.first.expand(len(signals), -1, -1), net.patch(signals).mT], dim=1)
        return net.head(net.encoder(tokens).mean(1))

    parts = {"patch": nn.Conv1d(1, 32, 16, 16), "encoder": encoder(), "head": nn.Linear(32, 5)}
    net = Net(run, **parts, first=nn.Parameter(torch.randn(1, 1, 32) * 0.3))
    found = camkit.explain(net, torch.randn(1, length), method="gradcam", target=0)
    assert (found.layer, found.raw.shape) == ("encoder", (length // 16,))


@pytest.mark.parametrize(("layer", "length"), [("1", 1981), ("2", 495), ("3", 493)])
def test_outputs_of_signal_convolutions_and_pools_are_never_read_with_exchanged_axes(layer, length):
    net = classifier(nn.Conv1d(1, 128, 80, 4), nn.BatchNorm1d(128), nn.MaxPool1d(4), nn.Conv1d(128, 128, 3))
    assert camkit.explain(net, torch.randn(1, 8000), layer, target=0).raw.shape == (length,)


def test_the_rows_of_a_table_that_becomes_a_signal_inside_are_refused():
    net = after(lambda rows: rows.mT, classifier(nn.Conv1d(6, 16, 3, 2, 1), nn.ReLU()))
    with pytest.raises(LayerError, match=r"camkit cannot choose a layer|lie elsewhere"):
        camkit.explain(net, torch.randn(100, 6), target=0)


def of_the_first_box(output: Any) -> Tensor:
    return output.logits[:, 0, 1]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("size", "queries"),
    rows_represented(
        lambda size, queries: (size, queries) in (((64, 64), 16), ((32, 64), 5), ((64, 96), 100)),
        itertools.product([(64, 96), (64, 64), (32, 64)], [5, 10, 16, 100]),
    ),
)
def test_the_detection_tokens_after_the_patches_are_not_taken_for_patches(size, queries):
    """Selected from all tokens, or counted among them, they are as many as another grid has cells."""
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=list(size),
        patch_size=16, num_detection_tokens=queries, num_labels=5, use_mid_position_embeddings=False,
    )  # fmt: skip
    explainer = camkit.Explainer(transformers.YolosForObjectDetection(config).eval(), method="gradcam")
    found = explainer(torch.randn(3, *size), of_the_first_box)
    layer = explainer.layer
    rows, columns = size[0] // 16, size[1] // 16
    if not layer.sure:
        assert math.prod(size) // 16**2 < 16, "too few cells to see where they lie"
        return
    assert (found.status, layer.name.startswith("vit.encoder.layer.")) == ("ok", True)
    assert (layer.layout.kind, layer.layout.grid, layer.layout.prefix) == ("tokens", (rows, columns), 1)


def test_windows_one_after_the_other_leave_a_doubt():
    found = camkit.explain(arranged("windows first"), torch.randn(3, 64, 64), "mix", target=0)
    assert found.layer_reason.endswith("its cells is not certain")
