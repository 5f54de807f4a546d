"""Where a layer's cells lie in the picture: their order, extra tokens, and the model's own padding."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from tiers import represented_by, rows_represented
from torch import Tensor, nn
from torch.nn import functional
from turned import answer, cases

import camkit
from camkit.errors import LayerError
from camkit.layers.choose import decide

# --- order ------------------------------------------------------------------------------------------------------------


class Arranged(nn.Module):
    """Patches that a network rearranges before it uses them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        channels = {"as wide as the grid": 16, "as wide as the patches": 256}.get(way, 24)
        self.patches = nn.Conv2d(3, channels, 4, 4)
        self.extra = nn.Parameter(torch.randn(1, {"four after": 4, "as wide as the patches": 5}.get(way, 1), channels))
        self.mix = nn.Sequential(nn.Linear(channels, channels), nn.GELU())
        self.head = nn.Linear(channels, 5)

    def arranged(self, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).mT
        extra = self.extra.expand(len(maps), -1, -1)
        windows = maps.unflatten(3, (4, -1)).unflatten(2, (4, -1)).permute(0, 2, 4, 3, 5, 1)
        ways = {
            "windows first": windows.flatten(1, 4),
            "backwards": tokens.flip(1),
            "columns": maps.mT.flatten(2).mT,
            "as wide as the grid": maps.permute(0, 2, 3, 1),
            "as wide as the patches": torch.cat([extra, tokens], 1),
            "coarse cells after": torch.cat([tokens, functional.avg_pool2d(maps, 4).flatten(2).mT], 1),
            "one after": torch.cat([tokens, extra], 1),
            "four after": torch.cat([tokens, extra], 1),
        }
        return ways[self.way]

    def forward(self, images: Tensor) -> Tensor:
        mixed = self.mix(self.arranged(self.patches(images)))
        return self.head(mixed.flatten(1, -2).relu().mean(1))


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
    torch.manual_seed(0)
    net, image = Arranged(way).eval(), torch.randn(3, 64, 64)

    found = camkit.explain(net, image, layer, target=0, method="hirescam")

    assert (found.layer, found.raw.shape) == ("mix", (16, 16))
    assert follows(net, "mix", image, found.raw)
    assert "could not" not in found.layer_reason


@pytest.mark.parametrize("way", ["backwards", "columns"])
def test_cells_in_another_order_are_refused(way):
    torch.manual_seed(0)
    net, image = Arranged(way).eval(), torch.randn(3, 64, 64)

    assert camkit.explain(net, image, target=0).layer == "patches"
    with pytest.raises(LayerError, match="lie elsewhere in the input") as caught:
        camkit.explain(net, image, "mix", target=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(-1),
        lambda x: x.mT,
        lambda x: functional.batch_norm(x, torch.zeros(3), torch.ones(3)).flip(-1),
    ],
)
def test_a_model_that_moves_its_picture_itself_is_refused_with_the_reason(change):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(change(images))

    with pytest.raises(LayerError, match="crops, mirrors or reorders") as caught:
        camkit.explain(Moving().eval(), torch.randn(3, 64, 64))
    assert "\n" not in str(caught.value)


def test_windows_one_after_the_other_leave_a_doubt():
    torch.manual_seed(0)
    net, image = Arranged("windows first").eval(), torch.randn(3, 64, 64)
    assert camkit.explain(net, image, "mix", target=0).layer_reason.endswith("its cells is not certain")


def test_memory_that_runs_out_while_cells_are_located_is_an_error():
    class Full(Arranged):
        def forward(self, images: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                raise torch.OutOfMemoryError
            return super().forward(images)

    with pytest.raises(torch.OutOfMemoryError):
        decide(Full("one after").eval(), torch.randn(1, 3, 64, 64))


class Signal(nn.Module):
    """A convolution over time and a recurrent layer, whose output is (N, time, channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 32, 4, 4)
        self.memory = nn.LSTM(32, channels, batch_first=True)
        self.head = nn.Linear(channels, 5)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.memory(self.conv(signals).mT)[0].mean(1))


@pytest.mark.parametrize(("length", "channels"), [(1024, 64), (1000, 48), (1024, 256), (300, 100)])
def test_time_is_not_mistaken_for_channels(length, channels):
    torch.manual_seed(0)
    found = camkit.explain(Signal(channels).eval(), torch.randn(1, length), target=0)
    assert (found.layer, found.raw.shape) == ("memory", (length // 4,))


def test_as_many_weighted_sums_as_there_are_patches_are_not_a_grid():
    torch.manual_seed(0)

    class Pooled(nn.Module):
        """As many weighted sums of the patches as there are patches."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 24, 8, 8)
            self.weigh = nn.Linear(24, 64)
            self.mix = nn.Linear(24, 24)
            self.head = nn.Linear(24, 5)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.patches(images).flatten(2).mT
            return self.head(self.mix(self.weigh(tokens).sigmoid().mT @ tokens).mean(1))

    assert camkit.explain(Pooled().eval(), torch.randn(3, 64, 64), target=0).layer in ("patches", "weigh")


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.extended)])
def test_no_map_of_moved_cells_is_drawn_without_a_doubt(count):
    """Turned, mirrored, rolled and shuffled cells, also few of them, by many operations; see ``turned.py``."""
    answers = [(case.words, answer(case)) for case in cases(count)]
    silent = [words for words, given in answers if given == "silent"]
    assert len(silent) <= count / 500, silent  # a measurement of few cells may be wrong by chance
    if count >= 1000:  # few cells leave some doubt, but most of those in their places are drawn
        in_place = [given for _, given in answers if given not in ("refused", "unsure", "silent")]
        assert in_place.count("right") > 0.6 * len(in_place)


# --- padding ----------------------------------------------------------------------------------------------------------


class Bright(nn.Module):
    """Cells that measure brightness without mixing; a model around it may pad its picture."""

    def __init__(self, stride: int = 8, own: int = 0) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, 4, 4, 4, own)
        self.cells = nn.Conv2d(4, 4, stride // 4, stride // 4)
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand_like(parameter) if parameter.dim() > 1 else torch.zeros_like(parameter))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.cells(self.fine(images)).mean((2, 3)))


class Padding(nn.Module):
    def __init__(self, inner: nn.Module, pad: tuple[int, ...], mode: str) -> None:
        super().__init__()
        self.inner, self.pad, self.mode = inner, pad, mode

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(functional.pad(images, self.pad, mode=self.mode))


def dark(size: tuple[int, int], top: int, left: int) -> Tensor:
    """Return a dark picture with a bright square of 16 x 16 pixels."""
    image = torch.rand(3, *size) * 0.01
    image[:, top : top + 16, left : left + 16] = 1
    return image


def heat_in(found: Any, top: int, left: int) -> float:
    return float(found.heatmap[top : top + 16, left : left + 16].sum() / found.heatmap.sum())


PADS = [
    ((0, 32, 0, 32), "constant"),
    ((16, 16, 16, 16), "constant"),
    ((32, 0, 24, 8), "constant"),
    ((0, 96, 0, 0), "constant"),
    ((0, 32, 0, 32), "reflect"),
    ((24, 24, 24, 24), "reflect"),
    ((16, 16, 16, 16), "replicate"),
]


@pytest.mark.parametrize(("pad", "mode"), PADS)
@pytest.mark.parametrize(("size", "layer"), [((96, 96), "inner.cells"), ((96, 128), None)])
def test_the_heat_of_a_model_that_pads_its_picture_lies_on_the_picture(pad, mode, size, layer):
    torch.manual_seed(0)
    net = Padding(Bright(), pad, mode).eval()

    found = camkit.explain(net, dark(size, 64, 56), layer, target=0)

    assert found.layer == "inner.cells"
    assert found.raw.shape == ((size[0] + sum(pad[2:])) // 8, (size[1] + sum(pad[:2])) // 8)
    assert found.heatmap.shape == size
    assert heat_in(found, 64, 56) > 0.6
    assert "could not" not in found.layer_reason


def test_a_picture_that_is_padded_by_the_model_is_explained_as_one_that_was_padded_before():
    torch.manual_seed(0)
    inner = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 16, 3, 4, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )
    image = torch.randn(3, 96, 128)

    found = camkit.explain(Padding(inner, (16, 16, 0, 32), "constant").eval(), image, target=0, spread="even")
    before = camkit.explain(inner.eval(), functional.pad(image, (16, 16, 0, 32)), target=0, spread="even")

    assert np.allclose(found.raw, before.raw, atol=1e-6)
    part = before.heatmap[:96, 16:144]
    assert np.allclose(found.heatmap, part / part.max(), atol=1e-5)
    assert before.extent == ()
    np.testing.assert_allclose(found.extent, ((0.0, 96 / 128), (16 / 160, 144 / 160)), atol=1e-12)


def test_the_first_convolutions_own_padding_counts_too():
    """As in Long et al. 2015, whose first convolution pads by 100."""
    torch.manual_seed(0)
    found = camkit.explain(Bright(8, own=48).eval(), dark((128, 128), 80, 32), target=0)
    assert heat_in(found, 80, 32) > 0.5


@pytest.mark.parametrize("kernel", [3, 7])
def test_the_edges_that_convolutions_add_are_not_taken_for_padding(kernel):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.ZeroPad2d(kernel // 2), nn.Conv2d(3, 16, kernel, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )
    choice = decide(net.eval(), torch.randn(1, 3, 64, 64)).layer
    assert choice is not None
    assert [choice.extent] == [()]


def test_a_grid_whose_padding_was_cropped_again_covers_the_picture():
    torch.manual_seed(0)

    class Cropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Conv2d(3, 8, 3, 1, 1)
            self.cells = nn.Conv2d(8, 8, 8, 8)
            self.crop = nn.ZeroPad2d((-2, -2, -2, -2))
            self.mix = nn.Conv2d(8, 8, 1)
            self.head = nn.Linear(8, 2)

        def forward(self, images: Tensor) -> Tensor:
            maps = self.cells(self.fine(functional.pad(images, (16, 16, 16, 16))))
            return self.head(self.mix(self.crop(maps)).relu().mean((2, 3)))

    choice = decide(Cropping().eval(), torch.randn(1, 3, 64, 64)).layer
    assert choice is not None
    assert [(str(choice), choice.layout.grid, choice.extent)] == [("mix", (8, 8), ())]


# --- the order of a sequence, and what holds the maps -----------------------------------------------------------------


@dataclass
class Encoded:
    hidden: Tensor
    steps: int = 1


class Encoding(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Encoded:
        return Encoded(self.encoder(tokens))


class SequenceFirst(nn.Module):
    """A transformer of PyTorch's own parts, whose tokens are (L, N, C) by default."""

    def __init__(self, batch_first: bool, wrapped: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.patch = nn.Conv2d(3, 32, 16, 16)
        self.first = nn.Parameter(torch.randn(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder = Encoding(encoder) if wrapped else encoder
        self.head = nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], dim=1)
        encoded = self.encoder(tokens if self.batch_first else tokens.transpose(0, 1))
        tokens = encoded.hidden if isinstance(encoded, Encoded) else encoded
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        return self.head(tokens[:, 1:].mean(1))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("precision", "count"),
    rows_represented(
        lambda precision, _: precision == "fp32",
        [("fp32", 1), ("fp32", 3), ("fp32", 17), ("fp16", 17)],  # 17: as many images as tokens
    ),
)
def test_a_sequence_first_transformer_is_explained_as_one_with_the_batch_first(precision, count, wrapped):
    torch.manual_seed(0)
    first, second = SequenceFirst(batch_first=False, wrapped=wrapped), SequenceFirst(batch_first=True, wrapped=wrapped)
    second.load_state_dict(first.state_dict())
    images = torch.randn(count, 3, 64, 64)

    found, expected = (
        list(camkit.explain_many(net.eval(), images, method="gradcam", target=1, precision=precision))
        for net in (first, second)
    )

    for one, other in zip(found, expected, strict=True):
        assert (one.layer, one.raw.shape) == (other.layer, (4, 4)) == ("encoder", (4, 4))
        tolerance = {"fp32": 1e-5, "fp16": 2e-3}[precision]
        assert np.abs(one.raw - other.raw).max() < tolerance * np.abs(other.raw).max()


def test_the_score_decides_that_is_called_so_and_not_what_comes_first():
    torch.manual_seed(0)

    class Restoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 4, 4)
            self.deep = nn.Conv2d(16, 16, 3, 2, 1)
            self.head = nn.Linear(16, 5)
            self.wide = nn.Conv2d(16, 16, 3, 1, 1)
            self.restore = nn.ConvTranspose2d(16, 3, 4, 4)

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            stem = self.stem(images).relu()
            logits = self.head(self.deep(stem).relu().mean((2, 3)))
            return {"restored": self.restore(self.wide(stem).relu()), "logits": logits}

    assert camkit.explain(Restoring().eval(), torch.randn(3, 64, 64), target=0).layer == "deep"


class Surrounded(nn.Module):
    """Patches among any number of other tokens, such as a detector's queries or a prompt."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.before = nn.Parameter(torch.randn(1, before, 32) * 0.3)
        self.after = nn.Parameter(torch.randn(1, after, 32) * 0.3)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.blocks = nn.Sequential(*(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(3)))
        self.head = nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).mT
        parts = [self.before.expand(len(images), -1, -1), patches, self.after.expand(len(images), -1, -1)]
        return self.head(self.blocks(torch.cat(parts, dim=1)).mean(1))


@pytest.mark.parametrize("side", represented_by(64, among=[64, 112]))
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (0, 3), (1, 14), (1, 100), (17, 0), (51, 2)])
def test_patches_are_found_between_any_number_of_other_tokens(before, after, side):
    torch.manual_seed(0)
    choice = decide(Surrounded(before, after).eval(), torch.randn(1, 3, side, side)).layer
    assert choice is not None
    assert [(str(choice), choice.layout.grid, choice.layout.prefix)] == [("blocks", (side // 8, side // 8), before)]
    assert "could not" not in choice.reason


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
    torch.manual_seed(0)
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
    assert layer.sure


# --- what a model does to its picture first ---------------------------------------------------------------------------


class Before(nn.Module):
    """A network that changes the picture before it passes it to another network."""

    def __init__(self, change: Any, inner: nn.Module) -> None:
        super().__init__()
        self.change, self.inner = change, inner

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(self.change(images))


@pytest.mark.parametrize(
    ("change", "top", "left"),
    [
        (lambda x: x[..., 32:-32, 32:-32], 40, 56),
        (lambda x: x[..., 16:-16, 16:-16], 24, 80),
        (lambda x: x[..., 48:, :], 56, 40),
        (lambda x: x[..., :96], 24, 64),
        (lambda x: x - x.mean((2, 3), keepdim=True), 24, 64),
    ],
)
def test_the_heat_of_a_model_that_crops_its_picture_lies_on_the_picture(change, top, left):
    torch.manual_seed(0)
    found = camkit.explain(Before(change, Bright()).eval(), dark((128, 128), top, left), target=0)
    assert found.heatmap.shape == (128, 128)
    assert heat_in(found, top, left) > 0.6
    assert "could not" not in found.layer_reason


@pytest.mark.parametrize("size", [(96, 224), (224, 96), (160, 160)])
@pytest.mark.parametrize("form", ["channels first", "channels last"])
def test_a_model_that_resizes_its_picture_is_explained_at_its_deepest_layer(size, form):
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, maps: Tensor) -> Tensor:
            return self.mix(maps.permute(0, 2, 3, 1)).relu()

    stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
    deep = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()) if form == "channels first" else Last()
    head = nn.Linear(16, 5)

    class Resizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.deep, self.head = stem, deep, head

        def forward(self, images: Tensor) -> Tensor:
            maps = self.deep(self.stem(functional.interpolate(images, (128, 128), mode="bilinear")))
            return self.head(maps.mean((2, 3) if form == "channels first" else (1, 2)))

    found = camkit.explain(Resizing().eval(), torch.randn(3, *size), target=0)

    assert (found.layer, found.raw.shape) == ("deep", (16, 16))
    assert "could not" not in found.layer_reason


class Unpadded(nn.Module):
    """Two levels of a U-Net of unpadded convolutions (Ronneberger et al. 2015): its maps show only the middle."""

    def __init__(self) -> None:
        super().__init__()

        def pair(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3), nn.ReLU(), nn.Conv2d(after, after, 3), nn.ReLU())

        self.down, self.deep, self.up = pair(3, 8), pair(8, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join, self.head = pair(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        maps = self.up(self.deep(functional.max_pool2d(fine, 2)))
        edge = (fine.shape[-1] - maps.shape[-1]) // 2
        return self.head(self.join(torch.cat([fine[..., edge:-edge, edge:-edge], maps], dim=1)))


def test_maps_that_lost_their_edges_leave_a_doubt():
    torch.manual_seed(0)
    assert not decide(Unpadded().eval(), torch.rand(1, 3, 60, 60)).chosen().sure


@pytest.mark.parametrize("function", [torch.log, torch.sqrt])
def test_the_noise_stays_within_the_pictures_range(function):
    torch.manual_seed(0)
    net = Before(lambda images: function(images + 1e-3), Bright())
    found = camkit.explain(net.eval(), torch.rand(3, 64, 64), target=0)
    assert found.layer == "inner.cells"
    assert "could not" not in found.layer_reason


@pytest.mark.parametrize("side", [8, 16, 24, 32])
def test_a_layer_that_reacts_to_few_places_is_not_said_to_lie_elsewhere(side):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
    )
    with torch.no_grad():  # the first layer reacts only to bright pixels
        net[0].weight.copy_((torch.rand(16, 3, 1, 1) + 0.5).expand(-1, -1, 8, 8) / 192)
        net[0].bias.fill_(-0.7)
        net[2].weight.zero_()
        net[2].bias.zero_()
        net[2].weight[range(16), range(16), 1, 1] = 1
        net[6].weight.copy_(torch.rand(3, 16))
    image = torch.rand(3, 64, 64) * 0.3
    image[:, 24 : 24 + side, 8 : 8 + side] = 1

    assert camkit.explain(net.eval(), image, target=0).layer == "3"


@pytest.mark.parametrize("break_", ["no_grad", "detach"])
def test_a_head_behind_a_frozen_trunk_is_explained(break_):
    torch.manual_seed(0)

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU())
            self.top = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
            self.head = nn.Linear(16, 5)

        def forward(self, images: Tensor) -> Tensor:
            with torch.set_grad_enabled(break_ != "no_grad" and torch.is_grad_enabled()):
                maps = self.trunk(images)
            return self.head(self.top(maps.detach() if break_ == "detach" else maps).mean((2, 3)))

    assert camkit.explain(Frozen().eval(), torch.randn(3, 64, 64), target=0).layer == "top"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_padding_is_found_in_any_precision(dtype):
    torch.manual_seed(0)
    net = Padding(Bright(), (0, 64, 0, 64), "constant").eval().to(dtype)
    choice = decide(net, torch.rand(1, 3, 64, 64).to(dtype)).layer
    assert choice is not None
    assert [choice.extent] == [((0.0, 0.5), (0.0, 0.5))]


# --- pooling by attention, and branches -------------------------------------------------------------------------------


class Trunk(nn.Module):
    """A few convolutions and the given head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.head = head

    def forward(self, images: Tensor) -> Any:
        return self.head(self.maps(images))


class AttentionPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.key, self.value, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).mT
        query = self.query.expand(len(maps), -1, -1)
        return self.head(functional.scaled_dot_product_attention(query, self.key(tokens), self.value(tokens))[:, 0])


class GatedPool(nn.Module):
    """Ilse et al. 2018, Attention-based Deep Multiple Instance Learning."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16), nn.Linear(32, 16)
        if layers:
            self.first, self.second = nn.Sequential(self.first, nn.Tanh()), nn.Sequential(self.second, nn.Sigmoid())
        self.weigh, self.head = nn.Linear(16, 1), nn.Linear(32, 5)

    def forward(self, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).mT
        weights = self.weigh(self.first(tokens).tanh() * self.second(tokens).sigmoid()).softmax(1)
        return self.head((weights * tokens).sum(1))


@pytest.mark.parametrize("pool", [AttentionPool(), GatedPool(layers=False), GatedPool(layers=True)])
def test_the_input_of_an_attention_pool_is_explained(pool):
    torch.manual_seed(0)
    assert camkit.explain(Trunk(pool).eval(), torch.randn(3, 64, 64), target=0).layer == "maps"


class Joined(nn.Module):
    def __init__(self, fine_last: bool) -> None:
        super().__init__()
        self.fine, self.coarse = (
            nn.Conv2d(3, 16, 8, 8),
            nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.Conv2d(16, 16, 3, 2, 1)),
        )
        self.head, self.fine_last = nn.Linear(32, 5), fine_last

    def forward(self, images: Tensor) -> Tensor:
        parts = {}
        for name in ("coarse", "fine") if self.fine_last else ("fine", "coarse"):
            parts[name] = getattr(self, name)(images).mean((2, 3))
        return self.head(torch.cat([parts["coarse"], parts["fine"]], dim=1))


@pytest.mark.parametrize("fine_last", [False, True])
def test_a_branch_of_another_grid_is_named_in_the_reason(fine_last):
    torch.manual_seed(0)
    found = camkit.explain(Joined(fine_last).eval(), torch.randn(3, 64, 64), target=0)
    other = {"fine": "coarse", "coarse": "fine"}[found.layer]
    assert found.layer_reason.endswith(f"the score also depends on {other}")


def test_one_influential_cell_per_class_is_enough():
    """The score is the maximum over a map of scores, as in multiple-instance learning."""
    torch.manual_seed(0)

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Conv2d(32, 5, 1)

        def forward(self, maps: Tensor) -> Tensor:
            return self.score(maps).amax((2, 3))

    found = camkit.explain(Trunk(Largest()).eval(), torch.randn(3, 64, 64), target=0)
    assert found.layer == "maps"
    assert "zero" not in found.layer_reason


@pytest.mark.parametrize("last", [nn.ConvTranspose2d(16, 5, 2, 2), nn.Conv2d(16, 5, 3, 1, 1), nn.Conv2d(16, 5, 1)])
def test_a_map_of_class_scores_is_never_explained(last):
    torch.manual_seed(0)
    net = Trunk(nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(), last))
    assert camkit.explain(net.eval(), torch.randn(3, 64, 64), target=1).layer == "head.1"


def test_a_decision_is_forgotten_when_a_switch_of_the_model_changes():
    torch.manual_seed(0)

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 8, 3, 2, 1)
            self.head, self.early = nn.Linear(8, 5), True

        def forward(self, images: Tensor) -> Tensor:
            maps = self.first(images)
            return self.head((maps if self.early else self.second(maps)).relu().mean((2, 3)))

    net, image = Exits().eval(), torch.randn(3, 64, 64)
    assert camkit.explain(net, image, target=0).layer == "first"
    net.early = False
    assert camkit.explain(net, image, target=0).layer == "first+second"


# --- signals ----------------------------------------------------------------------------------------------------------


class Reading(nn.Module):
    """A class token, followed by the tokens of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv1d(1, 32, 16, 16)
        self.first = nn.Parameter(torch.randn(1, 1, 32) * 0.3)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, signals: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(signals), -1, -1), self.patch(signals).mT], dim=1)
        return self.head(self.encoder(tokens).mean(1))


@pytest.mark.parametrize("length", [256, 640])
def test_the_class_token_of_a_signal_is_not_its_first_step(length):
    torch.manual_seed(0)
    found = camkit.explain(Reading().eval(), torch.randn(1, length), method="gradcam", target=0)
    assert (found.layer, found.raw.shape) == ("encoder", (length // 16,))


@pytest.mark.parametrize("layer", ["1", "2", "3"])
def test_outputs_of_signal_convolutions_and_pools_are_never_read_with_exchanged_axes(layer):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv1d(1, 128, 80, 4), nn.BatchNorm1d(128), nn.MaxPool1d(4), nn.Conv1d(128, 128, 3)),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5)),
    )
    found = camkit.explain(net.eval(), torch.randn(1, 8000), layer, target=0)
    assert found.raw.shape == ({"1": 1981, "2": 495, "3": 493}[layer],)


def test_the_rows_of_a_table_that_becomes_a_signal_inside_are_refused():
    torch.manual_seed(0)

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps, self.head = nn.Sequential(nn.Conv1d(6, 16, 3, 2, 1), nn.ReLU()), nn.Linear(16, 5)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.maps(rows.mT).mean(2))

    with pytest.raises(LayerError, match=r"camkit cannot choose a layer|lie elsewhere"):
        camkit.explain(Turning().eval(), torch.randn(100, 6), target=0)


class Halves(nn.Module):
    """Halves a grid as NASNet does: half of the channels come from every other cell, the rest from those beside."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.AvgPool2d(1, 2), nn.AvgPool2d(1, 2, count_include_pad=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.conv = nn.Conv2d(2 * channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat([self.first(x), self.second(self.shift(x))], 1)).relu()


@pytest.mark.parametrize("side", [64, 66, 70])
def test_a_shift_of_some_channels_by_a_pixel_leaves_cells_where_they_are(side: int) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), Halves(8, 12), Halves(12, 16), nn.Conv2d(16, 16, 3, 1, 1)
    )
    model = nn.Sequential(trunk, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()
    layer = decide(model, torch.randn(1, 3, side, side)).chosen()
    assert layer.name == "1"
    assert layer.sure


class Unfolded(nn.Module):
    """Cuts its picture into patches without a convolution."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Unfold(8, padding=padding, stride=8)
        self.embed, self.head = nn.Linear(3 * 64, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(self.cut(x).mT).relu().mean(1))


@pytest.mark.parametrize("layer", [None, "embed"])
def test_patches_that_a_model_cuts_without_a_convolution_are_a_grid(layer):
    explainer = camkit.Explainer(Unfolded(0).eval(), layer, method="hirescam")
    explainer(torch.rand(3, 64, 64))
    assert (explainer.layer.layout.grid, explainer.layer.sure) == ((8, 8), True)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["vit_b_32", "swin_t", "resnet18", "densenet121"])
def test_a_gpu_gives_the_layer_and_the_map_of_the_processor(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    image = torch.randn(3, 224, 224)
    for spread in ("even", "measured"):
        own = camkit.explain(model.cpu(), image, target=3, spread=spread)
        other = camkit.explain(model.cuda(), image, target=3, spread=spread)
        assert (own.layer, own.raw.shape) == (other.layer, other.raw.shape)
        assert np.corrcoef(own.raw.ravel(), other.raw.ravel())[0, 1] > 0.99
