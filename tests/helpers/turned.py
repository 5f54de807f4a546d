"""Small networks that turn, mirror, roll or shuffle their cells, and the places where each layer's cells really lie.

The truth is by construction: a picture of coordinates goes through the same moves, and each coarser cell gets the
median of its parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.errors import LayerError

SEED = 20260

Move = Callable[[Tensor], Tensor]

_HALF_A_CELL = 0.5
"""A cell that lies at most half a cell beside the place where it is drawn still covers most of that place."""


def _by_index(order: Tensor) -> Move:
    def shuffled(maps: Tensor) -> Tensor:
        return maps.flatten(2)[:, :, order].view_as(maps)

    return shuffled


def _by_gather(order: Tensor) -> Move:
    def shuffled(maps: Tensor) -> Tensor:
        cells = maps.flatten(2)
        return cells.gather(2, order.expand_as(cells)).view_as(maps)

    return shuffled


def _by_matrix(order: Tensor) -> Move:
    def shuffled(maps: Tensor) -> Tensor:
        return (maps.flatten(2) @ torch.eye(len(order))[:, order].to(maps)).view_as(maps)

    return shuffled


def _by_copies(order: Tensor) -> Move:
    def shuffled(maps: Tensor) -> Tensor:
        cells, moved = maps.flatten(2), torch.zeros_like(maps).flatten(2)
        for place, source in enumerate(order.tolist()):
            moved[:, :, place] = cells[:, :, source]
        return moved.view_as(maps)

    return shuffled


def _warped(factors: tuple[float, float], *, swapped: bool) -> Move:
    """Return a move that samples the cells with an affine grid."""

    def warped(maps: Tensor) -> Tensor:
        down, across = factors
        rows = [[0.0, across, 0.0], [down, 0.0, 0.0]] if swapped else [[across, 0.0, 0.0], [0.0, down, 0.0]]
        size = [len(maps), maps.shape[1], *(maps.mT.shape[2:] if swapped else maps.shape[2:])]
        grid = functional.affine_grid(torch.tensor([rows] * len(maps)), size, align_corners=False)
        return functional.grid_sample(maps, grid.to(maps), align_corners=False, mode="nearest")

    return warped


def moves_of(size: tuple[int, int], draw: random.Random) -> dict[str, tuple[Move, Move]]:
    """Return, by name, the moves for maps of this size, each with the move that undoes it."""
    cells = size[0] * size[1]
    order = torch.tensor(draw.sample(range(cells), cells))
    back = order.argsort()
    down, across = draw.randrange(1, max(2, size[0])), draw.randrange(1, max(2, size[1]))
    turned = {
        f"turn {90 * k}": (lambda x, k=k: x.rot90(k, (2, 3)), lambda x, k=k: x.rot90(-k, (2, 3))) for k in (1, 2, 3)
    }
    halves = [_exchanged(axis) for axis in (2, 3)]
    moves: dict[str, tuple[Move, Move]] = {
        **turned,
        "transpose": (lambda x: x.mT, lambda x: x.mT),
        "transpose, contiguous": (lambda x: x.mT.contiguous(), lambda x: x.mT.contiguous()),
        "transpose, other diagonal": (lambda x: x.rot90(1, (2, 3)).flip(2), lambda x: x.flip(2).rot90(-1, (2, 3))),
        "transpose by sampling": (_warped((1, 1), swapped=True), _warped((1, 1), swapped=True)),
        "mirror h": (lambda x: x.flip(3), lambda x: x.flip(3)),
        "mirror v": (lambda x: x.flip(2), lambda x: x.flip(2)),
        "mirror both": (lambda x: x.flip(2, 3), lambda x: x.flip(2, 3)),
        "mirror h by stacking": (_stacked(3), _stacked(3)),
        "mirror v by slices": (lambda x: x[:, :, _downwards(x)], lambda x: x[:, :, _downwards(x)]),
        "mirror h by sampling": (_warped((1, -1), swapped=False), _warped((1, -1), swapped=False)),
        "mirror the order": (lambda x: x.flatten(2).flip(2).view_as(x), lambda x: x.flatten(2).flip(2).view_as(x)),
        "roll down": (lambda x: x.roll(down, 2), lambda x: x.roll(-down, 2)),
        "roll across": (lambda x: x.roll(across, 3), lambda x: x.roll(-across, 3)),
        "roll both": (lambda x: x.roll((down, across), (2, 3)), lambda x: x.roll((-down, -across), (2, 3))),
        "roll the order": (
            lambda x: x.flatten(2).roll(across, 2).view_as(x),
            lambda x: x.flatten(2).roll(-across, 2).view_as(x),
        ),
        "shuffle by index": (_by_index(order), _by_index(back)),
        "shuffle by gather": (_by_gather(order), _by_gather(back)),
        "shuffle by matrix": (_by_matrix(order), _by_matrix(back)),
        "shuffle by copies": (_by_copies(order), _by_copies(back)),
        "none": (lambda x: x, lambda x: x),
        "none, by reshaping": (lambda x: x.flatten(2).mT.mT.view_as(x), lambda x: x),
    }
    if size[0] % 2 == 0 and size[1] % 2 == 0:
        moves["exchange halves, down"], moves["exchange halves, across"] = ((half, half) for half in halves)
        moves["windows"] = (_windows, _windows_undone)
    return moves


def _exchanged(axis: int) -> Move:
    return lambda x: torch.cat(x.chunk(2, axis)[::-1], axis)


def _stacked(axis: int) -> Move:
    return lambda x: torch.stack(x.unbind(axis)[::-1], axis)


def _downwards(maps: Tensor) -> Tensor:
    return torch.arange(maps.shape[2] - 1, -1, -1, device=maps.device)


def _windows(maps: Tensor) -> Tensor:
    """Put the cells of each 2 x 2 window one after the other."""
    return maps.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4).flatten(2).view_as(maps)


def _windows_undone(maps: Tensor) -> Tensor:
    height, width = maps.shape[2:]
    return maps.flatten(2).unflatten(2, (height // 2, width // 2, 2, 2)).transpose(3, 4).reshape(maps.shape)


class _Attending(nn.Module):
    """A block of a vision transformer: attention between all cells, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.all, self.back = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        queries, keys, values = self.all(self.norm(tokens)).chunk(3, -1)
        weights = (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(-1)
        tokens = tokens + self.back(weights @ values)
        return tokens + self.mix(tokens)


class _Mixing(nn.Module):
    """A block of an MLP-Mixer: a perceptron over the cells, and one over the channels."""

    def __init__(self, width: int, cells: int) -> None:
        super().__init__()
        self.norm, self.cells, self.channels = nn.LayerNorm(width), nn.Linear(cells, cells), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.cells(self.norm(tokens).mT).mT
        return tokens + self.channels(tokens).relu()


class _OnTokens(nn.Module):
    """Runs a block of tokens on maps, and may return tokens as the layer's output."""

    def __init__(self, block: nn.Module, *, channels_last: bool) -> None:
        super().__init__()
        self.block, self.channels_last = block, channels_last

    def forward(self, maps: Tensor) -> Tensor:
        tokens = self.block(maps.flatten(2).mT)
        return tokens.view(len(maps), *maps.shape[2:], -1) if self.channels_last else tokens


@dataclass(frozen=True)
class Case:
    """One network, one picture and one layer.

    Attributes:
        model, image: the network, and its input (C, H, W).
        move: the name of the move.
        layer: the layer that is named; None if it is chosen.
        places: for each layer, the places of its cells (2, h, w), in pixels.
        words: everything drawn, for messages.
    """

    model: nn.Module
    image: Tensor
    move: str
    layer: str | None
    places: dict[str, Tensor]
    words: str


class Turning(nn.Module):
    """Three layers; before one of them the cells move, and before a later one they may move back."""

    def __init__(self, layers: list[nn.Module], moves: dict[int, Move], width: int) -> None:
        super().__init__()
        self.layers, self.head, self.moves = nn.ModuleList(layers), nn.Linear(width, 5), moves

    def forward(self, maps: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.moves:
                maps = self.moves[number](maps)
            height, width = maps.shape[2:]
            maps = layer(maps)
            if isinstance(layer, _OnTokens):
                maps = maps.reshape(len(maps), height, width, -1).permute(0, 3, 1, 2)
        return self.head(maps.mean((2, 3)))


def drawn(number: int) -> Case:
    """Draw a case; the same number always gives the same one."""
    draw = random.Random(SEED * 100_000 + number)
    torch.manual_seed(number)
    kind = draw.choice(["small kernels", "wide kernels", "transformer", "mixer", "strided"])
    grid = (draw.randint(1, 8), draw.randint(1, 8)) if draw.random() < 0.6 else (draw.randint(1, 8),) * 2
    stride = draw.choice([4, 8])
    coarse = 2 if kind == "strided" else 1
    size = (grid[0] * stride * coarse, grid[1] * stride * coarse)
    moved_at = draw.choice([0, 1, 1, 2, 2])
    undone_at = draw.choice([None, None, 2]) if moved_at < 2 else None
    channels, last = draw.choice([8, 16, 24]), draw.random() < 0.5

    places = torch.stack(torch.meshgrid(*(torch.arange(side) + 0.5 for side in size), indexing="ij"))[None]
    layers: list[nn.Module] = []
    moves: dict[int, Move] = {}
    truth: dict[str, Tensor] = {}
    name, undo = "none", None
    for at in range(3):
        if at == moved_at:
            options = moves_of(tuple(places.shape[2:]), draw)
            name = draw.choice(list(options))
            moves[at], undo = options[name]
        elif at == undone_at and undo is not None:
            # Between the two moves the maps may have become coarser; then shuffles cannot be undone.
            fine = tuple(places.shape[2:])
            if name.startswith(("turn", "mirror", "transpose", "none")) or fine == tuple(truth["moved"].shape[1:]):
                moves[at] = undo
        if at in moves:
            places = moves[at](places)
            truth["moved"] = places[0]
        pooled = stride if at == 0 else coarse if at == 1 else 1
        before = 3 if at == 0 else channels
        places = places.unfold(2, pooled, pooled).unfold(3, pooled, pooled).flatten(-2).median(-1).values
        layers.append(_layer(kind, at, before, channels, pooled, tuple(places.shape[2:]), last))
        truth[f"layers.{at}"] = places[0]
    del truth["moved"]
    layer = draw.choice([None, "layers.0", "layers.1", "layers.2", "layers.2"])
    model = Turning(layers, moves, channels).eval()
    words = f"case {number}: {kind}, {name} at {moved_at}, back at {undone_at}, input {size}, layer {layer}"
    picture = torch.randn(3, *size) if draw.random() < 0.5 else torch.rand(3, *size)
    return Case(model, picture, name, layer, truth, words)


def _layer(kind: str, at: int, before: int, channels: int, pooled: int, grid: tuple[int, int], last: bool) -> nn.Module:
    if at == 0:
        wide = kind == "wide kernels"
        stem = (
            nn.Conv2d(before, channels, 2 * pooled - 1, pooled, pooled - 1)
            if wide
            else nn.Conv2d(3, channels, pooled, pooled)
        )
        return nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU())
    if kind == "transformer":
        return _OnTokens(_Attending(channels), channels_last=last)
    if kind == "mixer":
        return _OnTokens(_Mixing(channels, grid[0] * grid[1]), channels_last=last)
    kernel = {"small kernels": 1 if last else 3, "wide kernels": 7, "strided": 3}[kind]
    steps = [nn.Conv2d(channels, channels, kernel, 1, kernel // 2), nn.ReLU()]
    return nn.Sequential(*([nn.AvgPool2d(pooled)] if pooled > 1 else []), *steps)


def displacement(places: Tensor, size: tuple[int, ...]) -> float:
    """Return how far the cells of a layer lie from where a map of its shape is drawn: the farthest one, in cells."""
    sides = [whole / cells for whole, cells in zip(size, places.shape[1:], strict=True)]
    middles = [(torch.arange(cells) + 0.5) * side for cells, side in zip(places.shape[1:], sides, strict=True)]
    return beside(places, middles, size)


def beside(places: Tensor, drawn_at: Sequence[Tensor], size: tuple[int, ...]) -> float:
    """Return how far cells lie from the rows and columns at which they are drawn: the farthest one, in cells."""
    sides = [whole / cells for whole, cells in zip(size, places.shape[1:], strict=True)]
    grid = torch.meshgrid(*drawn_at, indexing="ij")
    return max(float((place - at).abs().max()) / side for place, at, side in zip(places, grid, sides, strict=True))


def answer(case: Case) -> str:
    """Explain a case, and return whether the answer is "right", "refused", "unsure", "silent" and so on.

    "refused" and "unsure" are answers on cells that lie elsewhere; "needlessly refused" and "needlessly unsure" on
    cells in their places. "silent" is a map whose cells lie elsewhere, without any doubt.
    """
    explainer = camkit.Explainer(case.model, case.layer, method="gradcam", spread="even")
    try:
        found = explainer(case.image, target=0)
    except LayerError:
        places = case.places[case.layer or "layers.2"]
        return "refused" if displacement(places, case.image.shape[1:]) > _HALF_A_CELL else "needlessly refused"
    layer = explainer.layer
    places = next(places for name, places in case.places.items() if layer.name.startswith(name))
    if places[0].numel() != found.raw.size:
        return "unsure" if not layer.sure else "silent"
    drawn_at = [torch.from_numpy(axis) + 0.5 for axis in found.positions]
    moved = beside(places.reshape(-1, *found.raw.shape), drawn_at, case.image.shape[1:]) > _HALF_A_CELL
    if layer.sure:
        return "silent" if moved else "right"
    return "unsure" if moved else "needlessly unsure"


def cases(count: int) -> Iterator[Case]:
    """Draw the first cases."""
    return map(drawn, range(count))
