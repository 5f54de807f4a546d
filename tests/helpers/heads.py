"""Networks whose layers lie differently in them, for what runs the part of a model behind a layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from camkit.engine.head import Trunk
from camkit.types import LayerRef, Layout

CLASS = 1


SIZE = 16


class Chain(nn.Sequential):
    """A plain chain with in-place operations before and after the layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


class Skip(nn.Module):
    """A skip connection passes the layer, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.layer = nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images).relu_()
        maps = self.layer(stem)
        maps += stem
        return self.head(maps.tanh().mean((2, 3)))


class Joined(Skip):
    """A branch that passes the layer is concatenated, which needs as many pictures in both."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        return self.head(torch.cat([stem, self.layer(stem)], 1).sigmoid().mean((2, 3)))


class FromThePicture(Skip):
    """A function of the picture, which no module returns, passes the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(11, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layer(self.stem(images)).tanh().mean((2, 3))
        return self.head(torch.cat([images.mean((2, 3)), maps], 1))


class Shared(Skip):
    """The layer is a ReLU that runs three times; the second call is explained."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.relu(self.layer(self.relu(self.stem(images))))
        return self.head(self.relu(self.last(maps)).mean((2, 3)))


class Tokens(nn.Module):
    """Patches behind a class token; attention after the layer."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1)
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return self.head(tokens[:, 0] if self.batch_first else tokens[0])


CASES: dict[str, tuple[Callable[[], nn.Module], str, Layout, Trunk]] = {
    "chain": (Chain, "2", Layout("channels_first", (4, 4)), "kept"),
    "skip": (Skip, "layer", Layout("channels_first", (8, 8)), "kept"),
    "joined": (Joined, "layer", Layout("channels_first", (8, 8)), "repeated"),
    "picture": (FromThePicture, "layer", Layout("channels_first", (8, 8)), "repeated"),
    "second call": (Shared, "relu#2", Layout("channels_first", (8, 8)), "kept"),
    "tokens": (Tokens, "blocks.0", Layout("tokens", (4, 4), 1), "kept"),
    "inside a block": (Tokens, "blocks.0.norm1", Layout("tokens", (4, 4), 1), "kept"),
    "sequence first": (
        lambda: Tokens(batch_first=False), "blocks.0", Layout("sequence_first", (4, 4), 1), "kept",
    ),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, LayerRef, Layout, Tensor]:
    torch.manual_seed(0)
    make, layer, layout, _ = CASES[name]
    module, _, call = layer.partition("#")
    return make().eval(), LayerRef(module, int(call) if call else None), layout, torch.randn(1, 3, SIZE, SIZE)


class Unsteady(Chain):
    """Its scores grow from pass to pass, by a counter that camkit does not restore."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = super().forward(images) * next(self.counter)
        return output
