"""Networks whose layers lie differently in them, for what runs the part of a model behind a layer."""

import itertools
from collections.abc import Callable

import torch
from networks import Net, means
from torch import Tensor, nn

from camkit.engine.head import Trunk
from camkit.types import LayerRef, Layout

CLASS, SIZE = 1, 16


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


class WithLayer(Net):
    """A stem, the layer and a linear head of this width, which ``run`` joins."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor], width: int = 8, **parts: nn.Module) -> None:
        convolutions = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "layer": nn.Conv2d(8, 8, 3, 1, 1)}
        super().__init__(run, **convolutions, **parts, head=nn.Linear(width, 3))


class Skip(WithLayer):
    """A skip connection passes the layer, added in place."""

    def __init__(self) -> None:
        super().__init__(skip)


def skip(net: Net, images: Tensor) -> Tensor:
    stem = net.stem(images).relu_()
    maps = net.layer(stem)
    maps += stem
    return net.head(means(maps.tanh()))


def joined(net: Net, images: Tensor) -> Tensor:
    """A branch that passes the layer is concatenated, which needs as many pictures in both."""
    stem = net.stem(images)
    return net.head(means(torch.cat([stem, net.layer(stem)], 1).sigmoid()))


def from_the_picture(net: Net, images: Tensor) -> Tensor:
    """A function of the picture, which no module returns, passes the layer."""
    maps = means(net.layer(net.stem(images)).tanh())
    return net.head(torch.cat([means(images), maps], 1))


def shared(net: Net, images: Tensor) -> Tensor:
    """The layer is a ReLU that runs three times; the second call is explained."""
    maps = net.relu(net.layer(net.relu(net.stem(images))))
    return net.head(means(net.relu(net.last(maps))))


def tokens(*, batch_first: bool = True) -> Net:
    """Return patches behind a class token; attention after the layer."""

    def run(net: Net, images: Tensor) -> Tensor:
        tokens = net.patches(images).flatten(2).mT
        tokens = torch.cat([net.first.expand(len(tokens), -1, -1), tokens], 1)
        tokens = net.norm(net.blocks(tokens if batch_first else tokens.transpose(0, 1)))
        return net.head(tokens[:, 0] if batch_first else tokens[0])

    blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first) for _ in range(2)))
    parts = {"patches": nn.Conv2d(3, 8, 4, 4), "first": nn.Parameter(torch.randn(1, 1, 8)), "blocks": blocks}
    return Net(run, **parts, norm=nn.LayerNorm(8), head=nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], str, Layout, Trunk]] = {
    "chain": (Chain, "2", Layout("channels_first", (4, 4)), "kept"),
    "skip": (Skip, "layer", Layout("channels_first", (8, 8)), "kept"),
    "joined": (lambda: WithLayer(joined, 16), "layer", Layout("channels_first", (8, 8)), "repeated"),
    "picture": (lambda: WithLayer(from_the_picture, 11), "layer", Layout("channels_first", (8, 8)), "repeated"),
    "second call": (
        lambda: WithLayer(shared, relu=nn.ReLU(), last=nn.Conv2d(8, 8, 3, 1, 1)),
        "relu#2", Layout("channels_first", (8, 8)), "kept",
    ),
    "tokens": (tokens, "blocks.0", Layout("tokens", (4, 4), 1), "kept"),
    "inside a block": (tokens, "blocks.0.norm1", Layout("tokens", (4, 4), 1), "kept"),
    "sequence first": (
        lambda: tokens(batch_first=False), "blocks.0", Layout("sequence_first", (4, 4), 1), "kept",
    ),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, LayerRef, Layout, Tensor]:
    torch.manual_seed(0)
    make, layer, layout, _ = CASES[name]
    module, _, call = layer.partition("#")
    return make().eval(), LayerRef(module, int(call) if call else None), layout, torch.randn(1, 3, SIZE, SIZE)


def with_output(
    model: nn.Module, ref: LayerRef, image: Tensor, change: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return what one call of a layer and the model return, if a hook changes what this call returns."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor | None:
        seen.append(output.detach().clone())
        return change(output) if change is not None and len(seen) == (ref.call or 1) else None

    with model.get_submodule(ref.name).register_forward_hook(hook):
        answer = model(image.clone())
    return seen[(ref.call or 1) - 1], answer


class Unsteady(Chain):
    """Its scores grow from pass to pass, by a counter that camkit does not restore."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = super().forward(images) * next(self.counter)
        return output
