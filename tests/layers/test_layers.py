"""Which layer is explained: the layer camkit chooses, and the layers a caller names."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from tiers import represented_by, rows_represented
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.engine.heatmap import fuse, fuse_heatmaps
from camkit.errors import CamkitError, InputError, LayerError, TargetError
from camkit.layers.choose import decide
from camkit.layers.names import find_layers
from camkit.types import LayerRef


def explain(*arguments: Any, **options: Any) -> Any:
    """Explain by Grad-CAM, which takes the deepest grid; the layers of the default method have tests of their own."""
    return camkit.explain(*arguments, **{"method": "gradcam"} | options)


def Explainer(*arguments: Any, **options: Any) -> camkit.Explainer:  # noqa: N802 - stands for the class
    """Return an Explainer by Grad-CAM."""
    return camkit.Explainer(*arguments, **{"method": "gradcam"} | options)


def assert_one_sentence(error: BaseException) -> None:
    assert 10 < len(str(error)) < 600
    assert "\n" not in str(error)


# --- the layer camkit chooses -----------------------------------------------------------------------------------------

SQUARE, WIDE = (128, 128), (96, 160)

CHOICES: dict[str, tuple[str, tuple[int, int], tuple[int, int]]] = {
    "resnet18": ("layer4", (4, 4), (3, 5)),
    "resnet50": ("layer4", (4, 4), (3, 5)),
    "vgg11": ("features", (4, 4), (3, 5)),
    "alexnet": ("features", (3, 3), (2, 4)),
    "squeezenet1_1": ("features", (7, 7), (5, 9)),
    "densenet121": ("features", (4, 4), (3, 5)),
    "mobilenet_v2": ("features", (4, 4), (3, 5)),
    "mobilenet_v3_small": ("features", (4, 4), (3, 5)),
    "efficientnet_b0": ("features", (4, 4), (3, 5)),
    "shufflenet_v2_x0_5": ("conv5", (4, 4), (3, 5)),
    "mnasnet0_5": ("layers", (4, 4), (3, 5)),
    "regnet_y_400mf": ("trunk_output", (4, 4), (3, 5)),
    "convnext_tiny": ("features", (4, 4), (3, 5)),
    "swin_t": ("permute", (4, 4), (3, 5)),
    "googlenet": ("inception5b", (4, 4), (3, 5)),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3", "vgg11") else {}
    return torchvision.models.get_model(name, weights=None, **quick).eval()


def weight_the_channels(net: nn.Module) -> None:
    """Give the last layer larger weights, so that no map is empty because of the initialisation."""
    head = [module for module in net.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1]
    nn.init.uniform_(head.weight, 0.0, 0.1)


@pytest.mark.parametrize("name", represented_by("resnet18", "squeezenet1_1", among=CHOICES))
def test_the_choice_on_torchvisions_networks_and_its_grid_at_two_shapes(name):
    layer, square, wide = CHOICES[name]
    net = build(name)

    first = explain(net, torch.randn(3, *SQUARE), target=1)
    second = explain(net, torch.randn(3, *WIDE), target=1)

    assert first.layer == second.layer == layer
    assert first.raw.shape == square
    assert second.raw.shape == wide
    assert "x".join(map(str, square)) in first.layer_reason
    assert np.abs(first.raw).max() > 0


@pytest.mark.parametrize(
    "name", represented_by("mobilenet_v3_small", among=["resnet18", "mobilenet_v3_small", "squeezenet1_1", "swin_t"])
)
def test_the_choice_is_the_same_when_the_first_picture_is_not_square(name):
    layer, _, wide = CHOICES[name]

    found = explain(build(name), torch.randn(3, *WIDE), target=1)

    assert (found.layer, found.raw.shape) == (layer, wide)


@pytest.mark.extended
@pytest.mark.parametrize("size", [(299, 299), (128, 192)])
def test_inception_is_explained_at_its_own_size_and_at_another(size):
    found = explain(build("inception_v3"), torch.randn(3, *size), target=1)

    assert (found.layer, found.raw.shape) == ("Mixed_7c", (8, 8) if size[0] == 299 else (2, 4))


@pytest.mark.parametrize("head", represented_by("random", among=["zero, as initialised", "random"]))
def test_a_vit_is_explained_where_its_patches_still_reach_the_class_token(head):
    net = build("vit_b_32")
    if head == "random":
        nn.init.normal_(net.heads.head.weight, std=0.02)
    else:
        assert not net.heads.head.weight.any()

    found = explain(net, torch.randn(3, 224, 224), target=1)

    assert found.layer == "encoder.layers.encoder_layer_11.ln_1"
    assert found.raw.shape == (7, 7)
    assert found.heatmap.shape == (224, 224)
    assert ("zero" in found.layer_reason) == (head != "random")
    assert bool(found.raw.any()) == (head == "random")


class Attention(nn.Module):
    """One head over tokens, of which the first collects the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.mix(tokens).chunk(3, dim=-1)
        return tokens + (query @ key.mT / 3).softmax(-1) @ value


class TinyVit(nn.Module):
    def __init__(self, registers: int, pooled: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 8, stride=8)
        self.first = nn.Parameter(torch.randn(1, 1 + registers, 48))
        self.blocks = nn.Sequential(Attention(48), Attention(48), Attention(48))
        self.head = nn.Linear(48, 5)
        self.pooled = pooled

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).mT
        tokens = self.blocks(torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1))
        return self.head(tokens.mean(1) if self.pooled else tokens[:, 0])


@pytest.mark.parametrize("registers", [0, 1, 4])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_after_any_number_of_others_become_the_patch_grid(registers, size, pooled):
    found = explain(TinyVit(registers, pooled).eval(), torch.randn(3, *size), target=1)

    assert found.raw.shape == (size[0] // 8, size[1] // 8)
    assert found.layer == ("blocks" if pooled else "blocks.1")
    assert found.raw.any()


class Returning(nn.Module):
    """Two convolutions; the test chooses the type of the first stage's output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stage = Stage(kind)
        self.head = nn.Linear(23, 4)

    def forward(self, images: Tensor) -> Tensor:
        found = self.stage(images)
        maps = found["maps"] if self.kind == "dict" else found[1] if self.kind == "tuple" else found
        if self.kind == "channels last":
            maps = maps.movedim(-1, 1)
        if self.kind == "tokens last":
            return self.head(maps.mean(2))
        return self.head(maps.mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(3, 23, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Any:
        maps = self.conv(images)
        return {
            "dict": {"sum": maps.sum((2, 3)), "maps": maps},
            "tuple": (maps.sum((2, 3)), maps),
            "channels last": maps.movedim(1, -1),
            "tokens last": maps.flatten(2),
            "plain": maps,
        }[self.kind]


@pytest.mark.parametrize("kind", ["plain", "dict", "tuple", "channels last", "tokens last"])
@pytest.mark.parametrize("layer", ["stage", None])
def test_a_layer_may_return_its_maps_in_any_form(kind, layer):
    nets = []
    for kinds in (kind, "plain"):
        torch.manual_seed(0)
        nets.append(Returning(kinds).eval())
    picture = torch.randn(3, 16, 24)

    found, plain = (explain(net, picture, layer, target=1) for net in nets)

    # By default, a layer that returns more than its maps is not chosen: the rest may be computed from them.
    assert found.layer == ("stage.conv" if layer is None and kind in ("dict", "tuple") else "stage")
    assert found.raw.shape == (8, 12)
    assert np.allclose(found.raw, plain.raw, atol=1e-6)


class Pooling(nn.Module):
    """Returns its maps, and the head's input computed from them, like Hugging Face's networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.conv = nn.Conv2d(6, 23, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Any:
        maps = self.conv(self.stem(images).relu())
        return {"last_hidden_state": maps, "pooler_output": maps.relu().mean((2, 3))}


class Summarised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Pooling()
        self.head = nn.Linear(23, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images)["pooler_output"])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layer", ["body", "body.conv", None])
def test_what_a_layer_returns_beside_its_maps_may_be_computed_from_them(layer, frozen):
    torch.manual_seed(0)
    net, picture = Summarised().eval().requires_grad_(not frozen), torch.randn(3, 32, 48)

    maps = net.body.conv(net.body.stem(picture[None]).relu()).detach().requires_grad_()
    net.head(maps.relu().mean((2, 3)))[0, 1].backward()

    found = explain(net, picture, layer, target=1, method="hirescam")

    assert found.layer == (layer or "body.conv")
    assert np.allclose(found.raw, (maps * maps.grad).sum(1)[0].detach(), atol=1e-6)


@pytest.mark.parametrize("channels", [23, 64, 256])
def test_flattened_maps_are_never_read_with_their_axes_exchanged(channels):
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, channels, 8, stride=8)
            self.stage = nn.Sequential(self.conv, nn.Flatten(2))
            self.head = nn.Linear(channels, 4)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.stage(images).mean(2))

    net, picture = Flattening().eval(), torch.randn(3, 96, 96)
    expected = explain(net, picture, "conv", target=1)

    try:
        found = explain(net, picture, "stage", target=1)
    except LayerError as error:  # an honest answer, since (N, 256, 144) can be read both ways
        assert_one_sentence(error)
    else:
        assert np.allclose(found.raw, expected.raw, atol=1e-5)


def test_a_segmentation_networks_features_are_chosen_and_not_its_class_scores():
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
            self.classes = nn.Conv2d(8, 5, 1)

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"out": nn.functional.interpolate(self.classes(self.trunk(images)), scale_factor=2)}

    found = explain(Segmenter().eval(), torch.randn(3, 24, 32), target=lambda output: output["out"][:, 2].mean((1, 2)))

    assert (found.layer, found.raw.shape) == ("trunk", (12, 16))


@pytest.mark.parametrize(
    ("name", "layer", "grid"),
    rows_represented(
        lambda name, *_: name.startswith("lraspp"),
        [
            ("lraspp_mobilenet_v3_large", "backbone.16", (6, 8)),
            ("fasterrcnn_mobilenet_v3_large_320_fpn", "backbone.body.13", (10, 14)),
            ("retinanet_resnet50_fpn_v2", "backbone.fpn.inner_blocks.2", (25, 34)),
        ],
    ),
)
def test_networks_that_join_scales_are_explained_at_the_coarsest_common_source(name, layer, grid):
    torch.manual_seed(0)
    net = torchvision.models.get_model(name, weights=None, weights_backbone=None).eval()
    if name.startswith("lraspp"):
        with_statistics(net, 96)
    choice = decide(net, torch.randn(1, 3, 96, 128)).layer
    assert choice is not None
    assert str(choice) == layer
    assert choice.layout.grid == grid


class TwoBranches(nn.Module):
    """Two views of a picture that the head joins: equally deep, or the second one deeper."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU())
        self.deeper = nn.Identity() if alike else nn.Conv2d(6, 6, 3, 2, 1)
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.left(images), self.deeper(self.right(images.roll(1, 1)))
        return self.head(torch.cat([part.mean((2, 3)) for part in maps], dim=1))


def test_branches_that_are_equally_deep_are_listed_with_what_to_type():
    torch.manual_seed(0)
    net, image = TwoBranches(alike=True).eval(), torch.randn(3, 16, 24)

    both = r"left \(1, 6, 8, 12\), right \(1, 6, 8, 12\).*target_layer=\['left', 'right'\]"
    with pytest.raises(LayerError, match=both) as caught:
        explain(net, image)

    assert_one_sentence(caught.value)
    assert explain(net, image, ["left", "right"]).layer == "left+right"
    assert explain(TwoBranches(alike=False).eval(), image).layer == "deeper"


class Unpadded(nn.Module):
    """A small network without padding, like the first ones for digits: its grids are out of proportion to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 7)
        self.second = nn.Conv2d(4, 6, 5)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images).relu()).relu().mean((2, 3)))


@pytest.mark.parametrize("layer", ["first", "second", None])
def test_what_a_convolution_returns_is_a_grid_also_out_of_proportion(layer):
    torch.manual_seed(0)
    net, image = Unpadded().eval(), torch.randn(1, 16, 20)

    found = explain(net, image, layer)

    assert found.layer == (layer or "second")
    assert found.raw.shape == ((10, 14) if layer == "first" else (6, 10))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("layer", ["1", None])
def test_signals_and_volumes_have_maps_as_well(rank, layer):
    torch.manual_seed(0)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model = nn.Sequential(convolution(2, 4, 3, 2, 1), convolution(4, 6, 3, 2, 1), Mean(), nn.Linear(6, 3)).eval()
    item = torch.randn(2, *(16, 24, 32)[:rank])

    maps = model[1](model[0](item[None])).detach().requires_grad_()
    model[3](maps.flatten(2).mean(2))[0, 1].backward()

    single = explain(model, item, layer, target=1, method="hirescam")
    several = explain(model, torch.stack([item, item]), layer, target=1, method="hirescam")

    assert single.layer == "1"
    assert np.allclose(single.raw, (maps * maps.grad).sum(1)[0].detach(), atol=1e-6)
    assert single.heatmap.shape == item.shape[1:]
    assert len(several) == 2
    assert np.allclose(several[1].raw, single.raw, atol=1e-6)
    if rank == 3:  # a sheet of slices; see tests/test_figure.py
        assert single.overlay().ndim == 3
    else:
        with pytest.raises(InputError, match="cannot be drawn as a picture"):
            single.overlay()


class Mean(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(2).mean(2)


def test_a_network_without_any_grid_is_an_error_that_says_so():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10), nn.ReLU(), nn.Linear(10, 4))

    with pytest.raises(LayerError, match=r"occlusion.*rise.*need none") as caught:
        explain(net, torch.randn(3, 8, 8))

    assert_one_sentence(caught.value)


class Ungraded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps):
        return maps.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Ended(nn.Module):
    """Two branches; an operation at the end of both gives no gradient."""

    def __init__(self, end) -> None:
        super().__init__()
        self.end, self.one, self.two, self.head = end, nn.Conv2d(3, 8, 4, 4), nn.Conv2d(3, 8, 4, 4), nn.Linear(16, 5)

    def forward(self, images: Tensor, others: Tensor | None = None) -> Tensor:
        maps = [self.one(images), self.two(images if others is None else others)]
        return self.head(torch.cat([self.end(each.relu()).mean((2, 3)) for each in maps], 1))


@pytest.mark.parametrize(
    ("net", "more", "words"),
    [
        (Ended(torch.round), {}, "no layer .* gets a gradient from the score.*occlusion"),
        (Ended(Ungraded.apply), {"target_layer": "one"}, "functions that return no gradient.*occlusion"),
        (Ended(Ungraded.apply), {"method": "fullgrad"}, "gradient"),
        (
            Ended(nn.Identity()),
            {"target_layer": "model.two", "inputs": {"others": torch.randn(1, 3, 32, 32)}},
            "computed from another input of the model; .* or name that input with 'picture'",
        ),
        (
            torch.export.export(Ended(torch.relu), (torch.randn(1, 3, 32, 32),)).module(),
            {},
            "do not run as PyTorch modules.* pass the ExportedProgram itself.*occlusion",
        ),
    ],
)
def test_a_refused_layer_names_a_way_out(net, more, words):
    with pytest.raises(CamkitError, match=words) as caught:
        explain(net, torch.randn(3, 32, 32), target=1, **more)

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("layer", ["encoder.layers.encoder_layer_0", None])
def test_a_vit_as_wide_as_it_could_have_patches_is_not_read_with_its_axes_exchanged(layer):
    # 1024 channels, as in ViT-L, could also be 32 x 32 patches of 7 pixels; the 197 tokens are 14 x 14 and one more.
    net = torchvision.models.VisionTransformer(224, 16, 2, 4, 1024, 64, num_classes=5).eval()
    nn.init.normal_(net.heads.head.weight, std=0.02)

    found = explain(net, torch.randn(3, 224, 224), layer, target=1)

    assert found.raw.shape == (14, 14)
    assert found.layer == (layer or "encoder.layers.encoder_layer_1.ln_1")


def refused(net: nn.Module, picture: Tensor) -> None:
    with pytest.raises(TargetError):
        explain(net, picture, target=999)


def scored_by_nothing(net: nn.Module, picture: Tensor) -> None:
    explain(net, picture, target=lambda output: (output * 0).sum(1))


@pytest.mark.parametrize("first", [refused, scored_by_nothing])
def test_the_choice_does_not_depend_on_the_first_target(first):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(TinyVit(0, pooled=False).eval())
    picture = torch.randn(3, 64, 64)

    first(nets[0], picture)
    found, expected = (explain(net, picture, target=1) for net in nets)

    assert (found.layer, found.layer_reason) == (expected.layer, expected.layer_reason)
    assert np.array_equal(found.raw, expected.raw)


# --- the probe --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    count: int = 0


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.relu = nn.ReLU()
        self.deep = nn.Conv2d(6, 8, 3, padding=1)
        self.unused = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)
        self.tally = Tally()  # camkit would restore an attribute of the module itself

    @property
    def passes(self) -> int:
        return self.tally.count

    def forward(self, images: Tensor) -> Tensor:
        self.tally.count += 1
        maps = self.relu(self.deep(self.relu(self.stem(images))))
        return self.head(self.pool(maps).flatten(1))


@pytest.fixture
def net() -> Counted:
    torch.manual_seed(0)
    return Counted().eval()


@pytest.fixture
def picture() -> Tensor:
    return torch.randn(3, 16, 24)


TRACED = 1  # one pass over one image; all operations leave cells in their places, so no pass locates cells
APART = 4  # before the first batch, four passes find out whether each picture is treated as if it were alone


@pytest.mark.parametrize("layer", [None, "deep"])
def test_a_decision_is_remembered_for_the_module_and_size(net, picture, layer):
    explain(net, picture, layer, spread="even")
    assert net.passes == TRACED + 1

    explain(net, picture, layer, target=2, spread="even")
    explain(net, torch.randn(5, *picture.shape), layer, method="hirescam", batch_size=5, spread="even")
    assert net.passes == TRACED + 5 + APART  # two of them, of one image, try the memory format

    explain(net, torch.randn(3, 32, 32), layer, spread="even")
    assert net.passes == 2 * TRACED + 6 + APART


def test_a_decision_is_forgotten_with_the_module(picture):
    net = Counted().eval()
    explain(net, picture)
    gone = weakref.ref(net)

    del net
    gc.collect()

    assert gone() is None


def test_two_modules_of_one_class_are_decided_separately(picture):
    first, second = Counted().eval(), Counted().eval()

    explain(first, picture, spread="even")
    explain(second, picture, spread="even")

    assert (first.passes, second.passes) == (TRACED + 1, TRACED + 1)


def test_the_decision_lists_every_call_with_its_shape_and_verdict(net, picture):
    rows = {str(row.ref): row for row in decide(net, picture[None]).rows}

    assert list(rows) == ["stem", "relu#1", "deep", "relu#2", "pool", "head", ""]
    assert rows["stem"].shape == (1, 6, 8, 12)
    assert str(rows["stem"].layout) == "channels_first 8x12"
    assert rows["head"].verdict == "no spatial grid"
    assert rows["pool"].verdict
    assert "unused" not in rows


def test_the_runners_up_are_other_layers_that_can_be_named(net, picture):
    choice = decide(net, picture[None]).layer

    assert str(choice) == "relu#2"
    assert choice.runners_up
    for ref in choice.runners_up:
        assert ref != choice.ref
        assert explain(net, picture, str(ref), target=1).raw.shape == (8, 12)


# --- layers a caller names --------------------------------------------------------------------------------------------


def test_a_name_and_the_module_are_the_same_layer(net, picture):
    by_name, by_module = (explain(net, picture, layer, target=1) for layer in ("deep", net.deep))

    assert by_name.layer == by_module.layer == "deep"
    assert by_name.layer_reason == "as named"
    assert np.array_equal(by_name.raw, by_module.raw)


@pytest.mark.parametrize(("typed", "meant"), [("deeb", "'deep'"), ("Stem", "'stem'"), ("layer4", "stem, relu, deep")])
def test_an_error_for_an_unknown_name_lists_similar_names_or_all(net, picture, typed, meant):
    with pytest.raises(LayerError, match=meant) as caught:
        explain(net, picture, typed)

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("layer", ["", "deep.", ".deep", "#1", "deep#0", "deep#x", "deep#", "deep#-1", "deep#1.5"])
def test_an_impossible_name_is_one_sentence(net, picture, layer):
    with pytest.raises(LayerError) as caught:
        explain(net, picture, layer)

    assert_one_sentence(caught.value)


def test_another_models_module_is_one_sentence(net, picture):
    with pytest.raises(LayerError, match="Conv2d") as caught:
        explain(net, picture, Counted().deep)

    assert_one_sentence(caught.value)


def test_an_empty_list_of_layers_says_what_to_pass(net, picture):
    with pytest.raises(LayerError, match="None") as caught:
        explain(net, picture, [])

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("layer", ["unused", "deep#2"])
def test_a_layer_that_does_not_run_is_one_sentence(net, picture, layer):
    with pytest.raises(LayerError, match=f"'{layer}' did not run") as caught:
        explain(net, picture, layer)

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("layer", ["head", "pool"])
def test_a_layer_without_spatial_extent_is_one_sentence_with_its_shape(net, picture, layer):
    with pytest.raises(LayerError, match=r"spatial extent") as caught:
        explain(net, picture, layer)

    assert_one_sentence(caught.value)
    assert "(1, 4)" in str(caught.value) if layer == "head" else "(1, 8, 1, 1)" in str(caught.value)


@pytest.mark.parametrize("asked", ["relu", "module"])
def test_a_layer_that_runs_twice_says_how_to_choose_the_call(net, picture, asked):
    with pytest.raises(LayerError, match="'relu#1' or 'relu#2'") as caught:
        explain(net, picture, net.relu if asked == "module" else asked)

    assert_one_sentence(caught.value)


def test_each_call_of_a_layer_can_be_explained(net, picture):
    first, second = (explain(net, picture, f"relu#{call}", target=1) for call in (1, 2))

    expected = explain(nn.Sequential(*[net.stem, nn.ReLU(), net.deep, nn.ReLU(), Pooled(net)]), picture, "3", target=1)
    assert (first.layer, second.layer) == ("relu#1", "relu#2")
    assert np.allclose(second.raw, expected.raw, atol=1e-6)
    assert not np.allclose(first.raw, second.raw, atol=1e-3)


class Pooled(nn.Module):
    def __init__(self, net: Counted) -> None:
        super().__init__()
        self.head = net.head

    def forward(self, maps: Tensor) -> Tensor:
        return self.head(maps.mean((2, 3)))


def test_a_layer_under_two_names_may_be_named_by_either(picture):
    class Shared(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.deep

    net = Shared().eval()

    by_alias, by_name = (explain(net, picture, layer, target=1) for layer in ("alias", "deep"))
    both = explain(net, picture, ["alias", "deep"], target=1)

    assert np.array_equal(by_alias.raw, by_name.raw)
    assert np.allclose(both.heatmap, by_name.heatmap, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_the_score_does_not_depend_on_is_one_sentence(picture, frozen):
    class Aside(Counted):
        def forward(self, images: Tensor) -> Tensor:
            self.unused(self.deep(self.stem(images)))
            return super().forward(images)

    net = Aside().eval().requires_grad_(not frozen)

    with pytest.raises(LayerError, match="depend") as caught:
        explain(net, picture, "unused", target=1)

    assert_one_sentence(caught.value)


def test_several_layers_are_fused_by_the_mean_of_their_scaled_maps(net, picture):
    single = [explain(net, picture, layer, target=1, method="layercam", spread="even") for layer in ("stem", "deep")]

    fused = explain(net, picture, ["stem", net.deep], target=1, method="layercam", spread="even")

    assert fused.layer == "stem+deep"
    assert fused.raw.shape == (8, 12)
    mean = np.mean([row.heatmap for row in single], axis=0)
    assert np.allclose(fused.heatmap, mean / mean.max(), atol=1e-5)
    scaled = np.mean([row.raw / np.abs(row.raw).max() for row in single], axis=0)
    assert np.allclose(fused.raw, scaled, atol=1e-5)


def test_fused_layers_of_different_grids_lie_on_the_finest():
    net = build("resnet18")
    weight_the_channels(net)

    fused = explain(net, torch.randn(3, *WIDE), ["layer3", "layer4"], target=1)

    assert fused.layer == "layer3+layer4"
    assert fused.raw.shape == (6, 10)
    assert fused.heatmap.shape == WIDE
    assert 0 <= fused.heatmap.min() <= fused.heatmap.max() <= 1


def test_naming_a_layer_twice_is_naming_it_once(net, picture):
    once, twice = (explain(net, picture, layers, target=1) for layers in ("deep", ["deep", net.deep]))

    assert twice.layer == "deep"
    assert np.array_equal(once.raw, twice.raw)


def test_names_become_references():
    net = Counted()

    assert find_layers(net, ["deep", "relu#2"]) == (LayerRef("deep"), LayerRef("relu", 2))
    assert [str(ref) for ref in find_layers(net, ["deep", "relu#2"])] == ["deep", "relu#2"]


def test_several_layers_of_which_one_is_not_finite_have_no_heatmap():
    good, bad = torch.rand(2, 4, 4), torch.rand(2, 2, 2)
    bad[1, 0, 0] = float("nan")

    raw, heatmap = fuse([good, bad]), fuse_heatmaps([good, bad], (8, 8))

    assert torch.isfinite(raw[0]).all()
    assert heatmap[0].max() == 1
    assert not torch.isfinite(raw[1]).all()
    assert not heatmap[1].any()


class Patches(nn.Module):
    """Tokens whose shape could also be channels by tokens; only the convolution before them shows which."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 1024, 14, stride=14)
        self.norm = nn.LayerNorm(1024)
        self.head = nn.Linear(1024, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(images).flatten(2).mT).mean(1))


def test_a_named_layer_whose_axes_are_not_clear_is_read_as_the_pass_shows():
    found = explain(Patches().eval(), torch.randn(3, 224, 224), "norm", target=1)

    assert found.raw.shape == (16, 16)


class Tokens(nn.Module):
    """Patches flattened to tokens, with the channels last or first, and a layer that mixes the channels."""

    def __init__(self, channels: int, patch: int, stride: int, *, last: bool, beside: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, patch, stride)
        self.beside = nn.Conv2d(3, 5, 16, 16) if beside else None
        self.mix = nn.Conv1d(channels, channels, 1) if last else nn.Linear(channels, channels)
        self.head = nn.Linear(channels, 3)
        self.last = last

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2)
        aside = 0 if self.beside is None else self.beside(images).mean()
        mixed = self.mix(tokens) if self.last else self.mix(tokens.mT).mT
        return self.head(mixed.relu().mean(2)) + aside


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("channels", "patch", "stride", "size", "beside"),
    [
        (1024, 16, 12, 224, False),  # 18x18 overlapping patches; 1024 is 32x32
        (256, 16, 10, 224, False),  # 21x21; 256 is 16x16
        (64, 3, 2, 128, False),  # 62x62, which no whole stride gives; 64 is 8x8
        (64, 8, 8, 128, True),  # 16x16, beside a branch of 8x8
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_tokens_are_read_by_the_grid_they_were_computed_from(channels, patch, stride, size, beside, last, named):
    net, picture = Tokens(channels, patch, stride, last=last, beside=beside).eval(), torch.randn(3, size, size)
    side = (size - patch) // stride + 1

    found = explain(net, picture, "mix" if named else None, target=1)

    assert found.raw.shape == (side, side)
    assert "exchanged" not in found.layer_reason


class Weighing(nn.Module):
    """Attention whose softmax is the last module with a grid-like output: heads by tokens by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 16, 16)
        self.softmax = nn.Softmax(dim=-1)
        self.head = nn.Linear(32, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT.reshape(len(images), -1, 4, 8).transpose(1, 2)
        mixed = self.softmax(tokens @ tokens.mT) @ tokens
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


class PooledTokens(nn.Module):
    """A function, not a module, pools the patches to fewer tokens than there are channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 196, 16, 16)
        self.mix = nn.Linear(196, 196)
        self.head = nn.Linear(196, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = functional.avg_pool2d(self.patches(images), 2).flatten(2).mT
        return self.head(self.mix(tokens).relu().mean(1))


@pytest.mark.parametrize("layer", ["mix", None])
def test_tokens_are_read_by_the_grid_of_a_function_between_the_modules(layer):
    torch.manual_seed(0)
    model, images = PooledTokens().eval(), torch.randn(1, 3, 224, 224)

    tokens = model.mix(functional.avg_pool2d(model.patches(images), 2).flatten(2).mT).detach().requires_grad_()
    model.head(tokens.relu().mean(1))[0, 1].backward()
    expected = (tokens * tokens.grad).detach().sum(2).reshape(7, 7)

    found = explain(model, images[0], layer, target=1, method="hirescam")

    assert str(found.layer) == "mix"
    assert np.allclose(found.raw, expected, atol=1e-6)


class Positioned(nn.Module):
    """A picture's channels beside constants that say where each pixel lies, pooled by attention, as in a Perceiver."""

    def __init__(self, constants: int) -> None:
        super().__init__()
        channels = 3 + constants
        self.joined, self.key, self.value = nn.LayerNorm(channels), nn.Linear(channels, 8), nn.Linear(channels, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("places", torch.randn(1, 16 * 16, constants))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.joined(torch.cat([images.flatten(2).transpose(1, 2), self.places], 2))
        weights = self.key(tokens).sum(2, keepdim=True).softmax(1)
        return self.head((weights * self.value(tokens)).sum(1))


@pytest.mark.parametrize("constants", [1, 258])
def test_tokens_that_are_joined_with_many_constants_are_a_grid(constants):
    torch.manual_seed(0)
    found = explain(Positioned(constants).eval(), torch.randn(3, 16, 16))
    assert (found.layer, found.raw.shape) == ("joined", (16, 16))


class OneToken(nn.Module):
    """Only the class token goes on; there are as many channels as patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.token = nn.Linear(64, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT
        return self.head(self.token(tokens.relu().mean(1, keepdim=True)).relu()[:, 0])


def test_a_single_token_is_not_a_map():
    torch.manual_seed(0)
    model, image = OneToken().eval(), torch.randn(3, 64, 64)

    assert str(explain(model, image, target=1).layer) == "patches"
    with pytest.raises(LayerError, match=r"'token' returned shape \(1, 1, 64\)"):
        explain(model, image, "token", target=1)


def test_attention_between_tokens_is_not_a_grid_of_features():
    found = explain(Weighing().eval(), torch.randn(3, 128, 128), target=1)

    assert (found.layer, found.raw.shape) == ("patches", (8, 8))


def refused_or_unsure(net: nn.Module, picture: Tensor, layer: str) -> bool:
    """Tell whether a map whose cells lie nowhere is not drawn without a doubt."""
    try:
        return "not certain" in explain(net, picture, layer, target=1).layer_reason
    except LayerError as error:
        assert_one_sentence(error)
        return True


class Vectors(nn.Module):
    """A module that returns learned vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(1, count, 32))

    def forward(self, images: Tensor) -> Tensor:
        return self.values.expand(len(images), -1, -1)


class Latents(nn.Module):
    """A square number of learned vectors that attend to the patches, and a layer that mixes them (Perceiver)."""

    def __init__(self, attention: str, count: int, queries: str, *, vectors: bool = False) -> None:
        super().__init__()
        self.vectors = Vectors(count) if vectors else None
        self.patches = nn.Conv2d(3, 32, 16, 16)
        self.latents = nn.Parameter(torch.randn(1, count, 32))
        self.queries = queries
        self.attention = attention
        self.module = nn.MultiheadAttention(32, 2, batch_first=True)
        self.key = nn.Linear(32, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)

    def attend(self, query: Tensor, tokens: Tensor) -> Tensor:
        key = self.key(tokens)
        if self.attention == "module":
            return self.module(query, tokens, tokens)[0]
        if self.attention == "module without weights":
            return self.module(query, tokens, tokens, need_weights=False)[0]
        if self.attention == "fused":
            return functional.scaled_dot_product_attention(query, key, tokens)
        if self.attention == "einsum":
            scores = torch.einsum("bqd,bkd->bqk", query, key).softmax(-1)
            return torch.einsum("bqk,bkd->bqd", scores, tokens)
        return ((query @ key.mT) / 6).softmax(-1) @ tokens

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT
        latents = self.latents.expand(len(images), -1, -1) if self.vectors is None else self.vectors(images)
        if self.queries == "from the picture":
            latents = latents + tokens
        return self.head(self.mix(latents + self.attend(latents, tokens)).relu().mean(1))


ATTENTION = ["product", "einsum", "fused", "module", "module without weights"]


@pytest.mark.parametrize("attention", ATTENTION)
def test_learned_vectors_that_a_module_returns_are_not_a_grid(attention):
    torch.manual_seed(0)
    net = Latents(attention, 16, "learned", vectors=True).eval()

    found = explain(net, torch.randn(3, 128, 128), target=1)

    assert (found.layer, found.raw.shape) in {("patches", (8, 8)), ("key", (8, 8))}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("count", [16, 36, 64])  # 4x4, as after merging 8x8; 6x6; as many as patches
@pytest.mark.parametrize("attention", ATTENTION)
def test_learned_vectors_that_attend_to_the_patches_are_not_a_grid(attention, count, frozen):
    torch.manual_seed(0)
    net, picture = Latents(attention, count, "learned").eval(), torch.randn(3, 128, 128)
    net.requires_grad_(not frozen)

    found = explain(net, picture, target=1)
    assert (found.layer, found.raw.shape) in {("patches", (8, 8)), ("key", (8, 8))}

    assert refused_or_unsure(net, picture, "mix")


@pytest.mark.parametrize("attention", ATTENTION)
def test_patches_that_attend_to_each_other_stay_a_grid(attention):
    net, picture = Latents(attention, 64, "from the picture").eval(), torch.randn(3, 128, 128)

    found = explain(net, picture, target=1)

    assert (found.layer, found.raw.shape) == ("mix", (8, 8))


class Fewer(nn.Module):
    """A network that reduces its patches to fewer tokens and then mixes their channels."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 16, 16)
        self.way = way
        self.weigh = nn.Linear(32, 16)
        self.query = nn.Linear(32, 32)
        self.merge = nn.Linear(128, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)

    def reduced(self, tokens: Tensor) -> Tensor:
        n, _, c = tokens.shape
        cells = tokens.reshape(n, 8, 8, c)
        if self.way == "the first":
            return tokens[:, :36]
        if self.way == "the strongest":  # token pruning
            kept = tokens.norm(dim=2).topk(16).indices
            return tokens.gather(1, kept[..., None].expand(-1, -1, c))
        if self.way == "some":  # a masked autoencoder's encoder
            return tokens[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16]]
        if self.way == "weighed":  # TokenLearner
            return self.weigh(tokens).softmax(1).mT @ tokens
        if self.way == "merged":  # Swin
            return self.merge(torch.cat([cells[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)).flatten(1, 2)
        query = self.query(cells[:, ::2, ::2].flatten(1, 2))  # LeViT
        return (query @ tokens.mT).softmax(-1) @ tokens

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.mix(self.reduced(self.patches(images).flatten(2).mT)).relu().mean(1))


@pytest.mark.parametrize("way", ["the first", "the strongest", "some", "weighed"])
def test_tokens_without_a_certain_position_are_not_a_grid(way):
    torch.manual_seed(0)
    net, picture = Fewer(way).eval(), torch.randn(3, 128, 128)

    found = explain(net, picture, target=1)
    assert found.raw.shape == (8, 8) or "not certain" in found.layer_reason
    assert refused_or_unsure(net, picture, "mix")


@pytest.mark.parametrize("way", ["merged", "asked by a part of them"])
def test_merged_tokens_are_a_coarser_grid(way):
    torch.manual_seed(0)
    found = explain(Fewer(way).eval(), torch.randn(3, 128, 128), target=1)
    assert (found.layer, found.raw.shape) == ("mix", (4, 4))


# --- networks without a head ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "layer"),
    [
        ("resnet18", "fc", "layer4"),
        ("mobilenet_v2", "classifier", "features"),
        ("squeezenet1_1", "classifier", "features"),
        ("vgg11", "classifier", "features"),
    ],
)
def test_a_network_without_its_head_is_explained_at_its_last_features(name, head, layer):
    net = build(name)
    setattr(net, head, nn.Identity())
    assert str(decide(net, torch.randn(1, 3, 96, 96)).layer) == layer


class Sliced(nn.Module):
    """A block that returns a part of its maps, to which its input is then added in place (as in Han et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(16, 12, 3, 1, 1)
        self.part = Part()

    def forward(self, maps: Tensor) -> Tensor:
        part = self.part(self.wide(maps))
        part += maps
        return part


class Part(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([maps, maps.relu()], 1)[:, :16, :, :]


def test_a_part_that_is_added_to_in_place_is_one_branch():
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 8, 8), Sliced(), Sliced(), Sliced(), nn.Conv2d(16, 32, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)),
    )
    assert str(decide(net.eval(), torch.randn(1, 3, 64, 64)).layer) == "5"


def test_a_block_that_adds_in_place_is_one_branch():
    net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1]).eval()
    assert str(decide(net, torch.randn(1, 3, 96, 96)).layer) == "layer4"


class Gated(nn.Module):
    """Features, and a gate that runs last: computed from the stem, or from the features with one channel."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 8, 8)
        self.deep = nn.Conv2d(16, 16, 3, 1, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Linear(16, 16) if late else nn.Conv2d(16, 1, 1)
        self.head = nn.Linear(16, 5)
        self.late = late

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        deep = self.deep(stem).relu()
        if self.late:
            return self.head(deep.mean((2, 3)) * self.gate(self.pool(stem).flatten(1)).sigmoid())
        return self.head((deep * self.gate(deep).sigmoid()).mean((2, 3)))


@pytest.mark.parametrize("late", [True, False])
def test_gates_are_not_mistaken_for_features(late):
    torch.manual_seed(0)
    assert explain(Gated(late).eval(), torch.randn(3, 64, 64), target=0).layer == "deep"


# --- what camkit says of every layer ----------------------------------------------------------------------------------


class Aside(nn.Module):
    """A network with a layer that runs and is left out of the score."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.aside = nn.Conv2d(3, 8, 3, padding=1)
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        self.aside(images)
        return self.net(images)


def influencing_modules(net: nn.Module, image: Tensor) -> set[str]:
    """Return the modules whose output has a gradient, by a hook on each that does not change it."""
    with_gradient: set[str] = set()

    def watch(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: with_gradient.add(name) if gradient.any() else None)

    for name, module in net.named_modules():
        module.register_forward_hook(lambda module, _, output, name=name: watch(name, output))
        if hasattr(module, "inplace"):
            module.inplace = False
    net(image).max().backward()
    return with_gradient


@pytest.mark.parametrize("name", represented_by("mobilenet_v2", among=["mobilenet_v2", "resnet50", "densenet121"]))
def test_a_layer_is_said_to_have_no_influence_only_if_it_has_none(name):
    net, image = Aside(build(name)).eval(), torch.randn(1, 3, 64, 64)

    decision = decide(net, image, every=True)

    assert decision.layer == decide(net, image).layer
    verdicts = {row.ref.name: row.verdict for row in decision.rows if row.layout is not None}
    denied = {layer for layer, verdict in verdicts.items() if "influence" in verdict}
    influencing = influencing_modules(net, image)
    assert len(verdicts) > 40
    assert denied == {"aside"}
    assert {layer for layer, verdict in verdicts.items() if not verdict} <= influencing
    assert "aside" not in influencing


class Inline(nn.Module):
    """Ends in modules and functions that a forward pass calls one by one, in place or not."""

    def __init__(self, end: str, activation: type[nn.Module], *, inplace: bool, axes: int) -> None:
        super().__init__()
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[axes]
        self.end, self.inplace, self.axes = end, inplace, tuple(range(2, 2 + axes))
        self.stem, self.one, self.two = convolution(3, 8, 4, 4), convolution(8, 8, 3, 1, 1), convolution(8, 8, 1)
        self.act, self.drop = activation(inplace=inplace), nn.Dropout(inplace=inplace)
        self.head, self.beside = nn.LazyLinear(5), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        before = self.act(self.stem(images))
        maps, two = self.one(before), self.two(before)
        if self.end == "joined":
            maps = self.drop(torch.cat([maps, two], 1))
        elif self.end == "function":
            maps = functional.silu(maps, inplace=self.inplace)
        elif self.end == "part":
            maps = self.drop(self.act(torch.cat([maps, two], 1)[:, :8]))
        elif self.end == "+=" and self.inplace:
            maps += two
            maps = self.act(maps)
        else:
            maps = self.act(maps + two)
        scores = self.head(maps.mean(self.axes))
        return scores + self.beside(before.mean(self.axes)) if self.end in ("beside", "function") else scores


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("end", "activation", "axes", "layer"),
    [
        ("sum", nn.ReLU, 2, "act#2"),
        ("sum", nn.Hardswish, 3, "act#2"),
        ("+=", nn.LeakyReLU, 2, "act#2"),
        ("part", nn.ReLU6, 2, "drop"),
        ("joined", nn.ReLU, 2, "drop"),
        ("beside", nn.SiLU, 2, "act#2"),
        ("function", nn.SiLU, 2, "one"),
    ],
)
def test_what_works_in_place_is_explained_as_what_does_not(end, activation, axes, layer, traced):
    image, found = torch.randn(3, *[32] * axes), []
    for inplace in (False, True):
        torch.manual_seed(0)
        net = Inline(end, activation, inplace=inplace, axes=axes)
        net(image[None])
        explainer = Explainer(torch.fx.symbolic_trace(net).eval() if traced else net.eval(), method="gradcam")
        found.append(explainer(image, target=3))
        assert explainer.layer.sure

    plain, in_place = found
    assert in_place.layer == plain.layer == layer
    np.testing.assert_allclose(in_place.raw, plain.raw, rtol=1e-3, atol=1e-6)


def test_a_layer_that_was_not_measured_is_not_said_to_have_no_influence():
    verdicts = {row.ref.name: row.verdict for row in decide(build("mobilenet_v2"), torch.randn(1, 3, 64, 64)).rows}
    assert verdicts["features.10"] == "not measured, because deeper layers influence the score"


# --- the layer must carry the score -----------------------------------------------------------------------------------


def stage(channels: int, out: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, stride, kernel // 2), nn.BatchNorm2d(out), nn.ReLU())


def means(maps: Tensor) -> Tensor:
    return maps.mean((2, 3))


def chosen(net: nn.Module, side: int = 64) -> Any:
    torch.manual_seed(1)
    return decide(net.eval(), torch.randn(1, 3, side, side)).chosen()


def with_statistics(net: nn.Module, side: int) -> nn.Module:
    """Give batch norms the statistics of a batch, as training does: without them, signals fade in a deep network."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net.train()
    with torch.no_grad():
        net(torch.randn(4, 3, side, side))
    return net.eval()


class Members(nn.Module):
    """Two networks side by side; each has more modules than are measured first."""

    def __init__(self, weight: float, modules: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (
            nn.Sequential(
                nn.Sequential(stage(3, 8, 4), *(stage(8, 8, kernel=1) for _ in range(modules))),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 5),
            )
            for _ in range(2)
        )
        self.weight = weight
        with_statistics(self, 32)

    def forward(self, images: Tensor) -> Tensor:
        return self.weight * self.one(images) + (1 - self.weight) * self.two(images)


def test_long_members_that_are_equally_strong_are_listed():
    with pytest.raises(LayerError, match=r"2 branches that are equally deep: one\.0 .*, two\.0 "):
        explain(Members(0.5).eval(), torch.randn(3, 32, 32), target=1)


class Summarising(nn.Module):
    """Returns its maps and their mean; the head reads the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(stage(3, 8, 2), stage(8, 8, 2))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.inner(images)
        return {"maps": maps, "mean": means(maps)}


def test_the_layer_is_named_and_not_a_module_around_it_that_returns_more():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Summarising(), nn.Linear(8, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.body(images)["mean"])

    torch.manual_seed(0)
    layer = chosen(Classifier())
    assert (str(layer), layer.sure) == ("body.inner", True)


# --- the layer of the target that is asked ----------------------------------------------------------------------------


class Heads(nn.Module):
    """Two branches of different depth with a head each; ``join`` makes the output of their scores."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.fine, self.coarse = stage(3, 16, 2), stage(16, 24, 2), stage(16, 24, 4)
        self.colour, self.shape, self.join = nn.Linear(24, 5), nn.Linear(24, 3), join
        self.tally = Tally()

    def forward(self, images: Tensor) -> Any:
        self.tally.count += 1
        stem = self.stem(images)
        return self.join(self.colour(means(self.fine(stem))), self.shape(means(self.coarse(stem))))


class Exits(nn.Module):
    """A classifier after each of three stages, each computed from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList([stage(3, 16, 2), stage(16, 16, 2), stage(16, 16, 2)])
        self.exits = nn.ModuleList([nn.Linear(16, 5) for _ in range(3)])

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        scores = {}
        for number, (one, leave) in enumerate(zip(self.stages, self.exits, strict=True)):
            images = one(images)
            scores[f"exit{number}"] = leave(means(images))
        return scores


OUTPUTS = {
    "dictionary": (lambda one, two: {"colour": one, "shape": two}, lambda out: out["colour"], lambda out: out["shape"]),
    "logits": (lambda one, two: {"logits": two, "colour": one}, lambda out: out["colour"], lambda out: out["logits"]),
    "tuple": (lambda one, two: (one, two), lambda out: out[0], lambda out: out[1]),
    "joined": (lambda one, two: torch.cat([one, two], 1), lambda out: out[:, :5], lambda out: out[:, 5:]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_head_is_explained_where_its_own_branch_ends(kind, order, picture):
    join, colour, shape = OUTPUTS[kind]
    net = Heads(join).eval()
    targets = [lambda out: colour(out)[:, 1], lambda out: shape(out)[:, 1]]
    layers = ["fine", "coarse"]

    together = explain(net, picture, target=[targets[number] for number in order])
    apart = [explain(net, picture, target=targets[number]) for number in order]

    for found in (together, apart):
        assert [explanation.layer for explanation in found] == [layers[number] for number in order]
        assert {explanation.status for explanation in found} == {"ok"}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_exit_is_explained_at_the_stage_before_it(number, picture):
    found = explain(Exits().eval(), picture, target=lambda out: out[f"exit{number}"][:, 2])

    assert (found.layer, found.status != "no_influence") == (f"stages.{number}", True)


def test_the_decision_for_a_function_is_remembered_and_does_not_keep_the_model(picture):
    net = Heads(OUTPUTS["dictionary"][0]).eval()
    explainer = Explainer(net)

    def shape_of(number: int) -> Any:
        return lambda out: out["shape"][:, number]

    explainer(picture, shape_of(1))
    before = net.tally.count
    for _ in range(3):
        assert explainer(picture, shape_of(1)).layer == "coarse"
    assert net.tally.count == before + 3

    def weighted(weights: Tensor) -> Any:
        return lambda out: (out["shape"] * weights).sum(1)

    explainer(picture, weighted(torch.rand(3)))
    before = net.tally.count
    assert explainer(picture, weighted(torch.rand(3))).layer == "coarse"
    assert net.tally.count == before + 1
    assert explainer(picture, lambda out, key="colour": out[key][:, 1]).layer == "fine"

    whole = lambda out: out["shape"][:, 1] + 0 * sum(p.sum() for p in net.shape.parameters())  # noqa: E731
    explainer(picture, whole)
    before = net.tally.count
    assert explainer(picture, whole).layer == "coarse"
    assert net.tally.count == before + 1

    gone = weakref.ref(net)
    del net, explainer, whole
    gc.collect()
    assert gone() is None


def test_classes_share_one_decision_where_a_class_token_passes_the_patches(picture):
    class CountedVit(TinyVit):
        tally = Tally()

        def forward(self, images: Tensor) -> Tensor:
            self.tally.count += 1
            return super().forward(images)

    torch.manual_seed(0)
    net = CountedVit(0, pooled=False).eval()
    explainer = Explainer(net)
    explainer(torch.randn(3, 64, 64), 0)
    before = net.tally.count
    for target in (1, 2, camkit.targets.contrast(1, 2), camkit.targets.finer(1)):
        assert explainer(torch.randn(3, 64, 64), target).status != "no_influence"
    assert net.tally.count == before + 4
    explainer.using("finercam")(torch.randn(3, 64, 64), 3)
    assert net.tally.count == before + 5


def test_a_target_that_fails_for_one_picture_alone_is_explained_at_the_models_own_layer(picture):
    net = Heads(OUTPUTS["logits"][0]).eval()

    def of_three(out: Any) -> Tensor:
        assert len(out["logits"]) == 3
        return out["logits"][:, 1]

    found = explain(net, torch.randn(3, *picture.shape), target=of_three)
    assert {explanation.layer for explanation in found} == {"coarse"}


def test_a_class_of_another_branch_and_the_best_place_of_another_scale_are_explained_there(picture):
    joined = Heads(OUTPUTS["joined"][0]).eval()
    found = explain(joined, [picture, picture], target=[1, 6])
    assert [(explanation.layer, explanation.status) for explanation in found] == [("fine", "ok"), ("coarse", "ok")] * 2

    class BestPlace(nn.Module):
        """A bright picture has its best place on the coarse grid, a dark one on the fine grid."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fine, self.coarse = stage(3, 8, 2), stage(8, 8, 2)
            self.on_fine, self.on_coarse = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, images: Tensor) -> Tensor:
            fine = self.fine(images)
            bright = 20 * images.mean((1, 2, 3))[:, None, None]
            scores = self.on_fine(fine).flatten(2), self.on_coarse(self.coarse(fine)).flatten(2) + bright
            return torch.cat(scores, 2).amax(2)

    net = BestPlace().eval()
    dark, bright = picture - 1, picture + 1
    for pictures in ([bright, dark], [dark, bright]):
        found = explain(net, pictures, target=2)
        assert {explanation.status for explanation in found} == {"ok"}
        expected = {id(bright): "coarse", id(dark): "fine"}
        assert [explanation.layer for explanation in found] == [expected[id(one)] for one in pictures]


# --- strides that differ between axes ---------------------------------------------------------------------------------


def strided(convolution: type[nn.Module], strides: list[tuple[int, ...]], colours: int) -> nn.Sequential:
    torch.manual_seed(0)
    pool, norm = (
        (nn.AdaptiveAvgPool3d(1), nn.BatchNorm3d(8))
        if convolution is nn.Conv3d
        else (nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
    )
    steps = [
        nn.Sequential(convolution(8 if number else colours, 8, 3, step, 1), nn.ReLU())
        for number, step in enumerate(strides)
    ]
    return nn.Sequential(*steps, norm, pool, nn.Flatten(), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize(
    ("convolution", "strides", "size", "grid"),
    [
        (nn.Conv2d, [(2, 1), (2, 1), (2, 2), (2, 1)], (64, 100), (4, 50)),
        (nn.Conv2d, [(2, 1)] * 6, (64, 60), (1, 60)),
        (nn.Conv3d, [(1, 2, 2)] * 4, (8, 64, 64), (8, 4, 4)),
    ],
)
def test_each_axis_has_its_own_stride(convolution, strides, size, grid):
    net, picture = strided(convolution, strides, 1), torch.rand(1, *size)
    last = str(len(strides))  # the normalisation
    for layer in (None, last):
        explanation = explain(net, picture, layer)
        assert (explanation.layer, explanation.raw.shape, explanation.heatmap.shape) == (last, grid, size)


@pytest.mark.parametrize(("name", "layer", "grid"), [("mc3_18", "layer4", (8, 2, 2)), ("swin3d_t", "norm", (4, 2, 2))])
def test_video_networks_are_explained_at_their_last_grid(name, layer, grid):
    torch.manual_seed(0)
    net = torchvision.models.get_model(name, weights=None).eval()
    side = 32 if name == "mc3_18" else 64
    chosen = decide(net, torch.rand(1, 3, 8, side, side)).layer
    assert chosen is not None
    assert (chosen.name, chosen.layout.grid) == (layer, grid)


class Pieces(nn.Module):
    """Runs its first convolution on each patch alone, as TNT does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Conv2d(3, 4, 3, 2, 1)
        self.outer = nn.Linear(4 * 16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 8, stride=8).mT.reshape(-1, 3, 8, 8)
        cells = self.outer(self.inner(patches).reshape(len(x), -1, 64))
        return self.head(cells.relu().mean(1))


def test_convolutions_of_each_patch_alone_say_nothing_of_the_picture():
    explanation = explain(Pieces().eval(), torch.rand(3, 64, 64))
    assert (explanation.layer, explanation.raw.shape) == ("outer", (8, 8))


# --- clips whose second axis is time ----------------------------------------------------------------------------------


class Clips(nn.Module):
    def __init__(self, frames_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frames_first = frames_first
        self.body = nn.Sequential(nn.Conv3d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv3d(8, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, clip: Tensor) -> Tensor:
        clip = clip.transpose(1, 2) if self.frames_first else clip
        colours = (clip - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1, 1)) / 0.2
        return self.head(self.body(colours).mean((2, 3, 4)))


@pytest.mark.parametrize("frames", [3, 8])
@pytest.mark.parametrize("method", ["gradcam", "rise"])
def test_clips_with_their_frames_first_are_refused(frames, method):
    with pytest.raises(InputError, match=r"\(N, T, C, H, W\)") as refusal:
        explain(Clips(True).eval(), torch.rand(frames, 3, 32, 32), method=method)
    assert_one_sentence(refusal.value)
    colours_first = explain(Clips(False).eval(), torch.rand(3, frames, 32, 32), method=method)
    assert colours_first.heatmap.shape == (frames, 32, 32)


class EachFrame(nn.Module):
    """Runs a network of pictures on each frame, as TimeSformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, clips: Tensor) -> Tensor:
        clip, frames, _, _, _ = clips.shape
        return self.head(self.body(clips.flatten(0, 1)).mean((2, 3)).unflatten(0, (clip, frames)).mean(1))


@pytest.mark.parametrize("clip", [torch.rand(8, 3, 32, 32), torch.rand(1, 8, 3, 32, 32)])
@pytest.mark.parametrize("method", ["gradcam", "rise"])
def test_clips_for_networks_of_pictures_are_refused(clip, method):
    with pytest.raises(InputError, match="Conv3d") as refusal:
        explain(EachFrame().eval(), clip, method=method)
    assert_one_sentence(refusal.value)


# --- places that depend on the picture --------------------------------------------------------------------------------


class Sampled(nn.Module):
    """Samples its picture at places that the picture decides (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scales = (1 + x.mean((1, 2, 3)))[:, None, None]
        grid = functional.affine_grid(torch.eye(2, 3)[None].expand(len(x), 2, 3) * scales, list(x.shape), False)
        return self.head(self.body(functional.grid_sample(x, grid, align_corners=False)).mean((2, 3)))


def test_places_that_depend_on_the_picture_are_unsure():
    found = decide(Sampled().eval(), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert found.layer is not None
    assert not found.layer.sure
    assert not found.named(LayerRef("body"), "").sure
