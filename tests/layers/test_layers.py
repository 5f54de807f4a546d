"""Which layer is explained: the layer camkit chooses, and the layers a caller names."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, Tally, classifier, means, stage
from refusals import refused
from tiers import represented_by, rows_represented
from tiny_models import gradient_times_activation
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.engine.heatmap import fuse, fuse_heatmaps
from camkit.errors import CamkitError, InputError, LayerError, TargetError
from camkit.layers.choose import decide
from camkit.types import LayerRef


def explain(*arguments: Any, **options: Any) -> Any:
    """Explain by Grad-CAM, which takes the deepest grid; the layers of the default method have tests of their own."""
    return camkit.explain(*arguments, **{"method": "gradcam"} | options)


@pytest.fixture
def picture() -> Tensor:
    return torch.randn(3, 16, 24)


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
    "inception_v3": ("Mixed_7c", (2, 2), (1, 3)),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3", "vgg11") else {}
    return torchvision.models.get_model(name, weights=None, **quick).eval()


@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize("name", represented_by("resnet18", "mobilenet_v3_small", "squeezenet1_1", among=CHOICES))
def test_the_choice_on_torchvisions_networks_and_its_grid_at_two_shapes(name, wide_first):
    layer, square, wide = CHOICES[name]
    net, shapes = build(name), [(SQUARE, square), (WIDE, wide)]
    for size, grid in reversed(shapes) if wide_first else shapes:
        found = explain(net, torch.randn(3, *size), target=1)
        assert (found.layer, found.raw.shape) == (layer, grid)
        assert "x".join(map(str, grid)) in found.layer_reason
        assert found.raw.any()


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


def attending(net: Net, tokens: Tensor) -> Tensor:
    query, key, value = net.mix(tokens).chunk(3, dim=-1)
    return tokens + (query @ key.mT / 3).softmax(-1) @ value


def tiny_vit(registers: int = 0, *, pooled: bool = False) -> Net:
    def run(net: Net, images: Tensor) -> Tensor:
        tokens = torch.cat([net.first.expand(len(images), -1, -1), net.patch(images).flatten(2).mT], dim=1)
        tokens = net.blocks(tokens)
        return net.head(tokens.mean(1) if pooled else tokens[:, 0])

    first = nn.Parameter(torch.randn(1, 1 + registers, 48))
    blocks = nn.Sequential(*(Net(attending, mix=nn.Linear(48, 144)) for _ in range(3)))
    return Net(run, patch=nn.Conv2d(3, 48, 8, 8), first=first, blocks=blocks, head=nn.Linear(48, 5))


FORMS = {
    "plain": (lambda maps: maps, lambda output: output),
    "dict": (lambda maps: {"sum": maps.sum((2, 3)), "maps": maps}, lambda output: output["maps"]),
    "tuple": (lambda maps: (maps.sum((2, 3)), maps), lambda output: output[1]),
    "channels last": (lambda maps: maps.movedim(1, -1), lambda output: output.movedim(-1, 1)),
    "tokens last": (lambda maps: maps.flatten(2), lambda output: output[..., None]),
}


def returning(kind: str) -> Net:
    torch.manual_seed(0)
    pack, unpack = FORMS[kind]
    inner = Net(lambda net, images: pack(net.conv(images)), conv=nn.Conv2d(3, 23, 3, 2, 1))
    return Net(lambda net, images: net.head(means(unpack(net.stage(images)))), stage=inner, head=nn.Linear(23, 4))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("layer", ["stage", None])
def test_a_layer_may_return_its_maps_in_any_form(kind, layer):
    image = torch.randn(3, 16, 24)
    found, plain = (explain(returning(each), image, layer, target=1) for each in (kind, "plain"))
    # By default, a layer that returns more than its maps is not chosen: the rest may be computed from them.
    assert found.layer == ("stage.conv" if layer is None and kind in ("dict", "tuple") else "stage")
    assert found.raw.shape == (8, 12)
    assert np.allclose(found.raw, plain.raw, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layer", ["body", "body.conv", None])
def test_what_a_layer_returns_beside_its_maps_may_be_computed_from_them(layer, frozen):
    """As in Hugging Face's networks."""

    def with_pooled(net: Net, images: Tensor) -> dict[str, Tensor]:
        maps = net.conv(net.stem(images).relu())
        return {"last_hidden_state": maps, "pooler_output": means(maps.relu())}

    body = Net(with_pooled, stem=nn.Conv2d(3, 6, 3, 2, 1), conv=nn.Conv2d(6, 23, 3, 2, 1))
    net = Net(lambda net, images: net.head(net.body(images)["pooler_output"]), body=body, head=nn.Linear(23, 4))
    image = torch.randn(3, 32, 48)
    expected = gradient_times_activation(net, "body.conv", lambda: net(image[None])[0, 1]).sum(1)[0]

    found = explain(net.requires_grad_(not frozen), image, layer, target=1, method="hirescam")

    assert found.layer == (layer or "body.conv")
    assert np.allclose(found.raw, expected, atol=1e-6)


def with_statistics(net: nn.Module, side: int) -> nn.Module:
    """Give batch norms the statistics of a batch, as training does: without them, signals fade in a deep network."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net.train()
    with torch.no_grad():
        net(torch.randn(4, 3, side, side))
    return net.eval()


def joining(name: str) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, weights_backbone=None).eval()


def headless(name: str, head: str) -> nn.Module:
    net = build(name)
    setattr(net, head, nn.Identity())
    return net


@pytest.mark.parametrize(
    ("net", "size", "layer", "grid"),
    rows_represented(
        lambda _, __, layer, ___: layer not in ("backbone.body.13", "backbone.fpn.inner_blocks.2"),
        [
            # Networks that join scales are explained at the coarsest common source.
            (lambda: with_statistics(joining("lraspp_mobilenet_v3_large"), 96), (96, 128), "backbone.16", (6, 8)),
            (lambda: joining("fasterrcnn_mobilenet_v3_large_320_fpn"), (96, 128), "backbone.body.13", (10, 14)),
            (lambda: joining("retinanet_resnet50_fpn_v2"), (96, 128), "backbone.fpn.inner_blocks.2", (25, 34)),
            # Networks of clips
            (lambda: build("mc3_18"), (8, 32, 32), "layer4", (8, 2, 2)),
            (lambda: build("swin3d_t"), (8, 64, 64), "norm", (4, 2, 2)),
            # Networks without their heads are explained at their last features.
            (lambda: headless("resnet18", "fc"), (96, 96), "layer4", (3, 3)),
            (lambda: headless("mobilenet_v2", "classifier"), (96, 96), "features", (3, 3)),
            (lambda: headless("squeezenet1_1", "classifier"), (96, 96), "features", (5, 5)),
            (lambda: headless("vgg11", "classifier"), (96, 96), "features", (3, 3)),
        ],
    ),
)
def test_the_choice_on_networks_of_other_kinds(net, size, layer, grid):
    choice = decide(net(), torch.randn(1, 3, *size)).chosen()
    assert (str(choice), choice.layout.grid) == (layer, grid)


def test_branches_that_are_equally_deep_are_listed_with_what_to_type(picture):
    def run(net: Net, images: Tensor) -> Tensor:
        maps = net.left(images), net.deeper(net.right(images.roll(1, 1)))
        return net.head(torch.cat([means(part) for part in maps], dim=1))

    parts = {"left": stage(3, 6, 2), "right": stage(3, 6, 2), "head": nn.Linear(12, 3)}
    net = Net(run, **parts, deeper=nn.Identity())
    with refused(r"left \(1, 6, 8, 12\), right \(1, 6, 8, 12\).*target_layer=\['left', 'right'\]", LayerError):
        explain(net, picture)

    assert explain(net, picture, ["left", "right"]).layer == "left+right"
    assert explain(Net(run, **parts, deeper=nn.Conv2d(6, 6, 3, 2, 1)), picture).layer == "deeper"


def test_long_members_that_are_equally_strong_are_listed():
    """Each has more modules than are measured first."""
    one, two = (classifier(nn.Sequential(stage(3, 8, 4), *(stage(8, 8, kernel=1) for _ in range(20)))) for _ in "12")
    net = with_statistics(Net(lambda net, images: net.one(images) + net.two(images), one=one, two=two), 32)
    with refused(r"2 branches that are equally deep: one\.0 .*, two\.0 ", LayerError):
        explain(net, torch.randn(3, 32, 32), target=1)


@pytest.mark.parametrize("layer", ["0", "2", None])
def test_what_a_convolution_returns_is_a_grid_also_out_of_proportion(layer):
    """Small networks without padding, like the first ones for digits."""
    net = classifier(nn.Conv2d(1, 4, 7), nn.ReLU(), nn.Conv2d(4, 6, 5), nn.ReLU())
    found = explain(net, torch.randn(1, 16, 20), layer)
    assert found.layer == (layer or "3")
    assert found.raw.shape == ((10, 14) if layer == "0" else (6, 10))


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("layer", ["1", None])
def test_signals_and_volumes_have_maps_as_well(rank, layer):
    convolution = getattr(nn, f"Conv{rank}d")
    model = classifier(convolution(2, 4, 3, 2, 1), convolution(4, 6, 3, 2, 1))
    item = torch.randn(2, *(16, 24, 32)[:rank])
    expected = gradient_times_activation(model, "1", lambda: model(item[None])[0, 1]).sum(1)[0]

    single = explain(model, item, layer, target=1, method="hirescam")
    several = explain(model, torch.stack([item, item]), layer, target=1, method="hirescam")

    assert single.layer == "1"
    assert np.allclose(single.raw, expected, atol=1e-6)
    assert single.heatmap.shape == item.shape[1:]
    assert len(several) == 2
    assert np.allclose(several[1].raw, single.raw, atol=1e-6)
    if rank == 3:  # a sheet of slices; see tests/test_figure.py
        assert single.overlay().ndim == 3
    else:
        with refused("cannot be drawn as a picture", InputError):
            single.overlay()


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
        return self.head(torch.cat([means(self.end(each.relu())) for each in maps], 1))


@pytest.mark.parametrize(
    ("net", "more", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.ReLU()), {}, r"occlusion.*rise.*need none"),
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
    with refused(words, CamkitError):
        explain(net, torch.randn(3, 32, 32), target=1, **more)


def counted(net: Net, images: Tensor) -> Tensor:
    net.tally.count += 1
    maps = net.deep(net.relu(net.stem(images)))
    net.aside(maps)
    return net.head(net.pool(net.relu(maps)).flatten(1))


@pytest.fixture
def net() -> Net:
    parts = {"stem": nn.Conv2d(3, 6, 3, 2, 1), "relu": nn.ReLU(), "deep": nn.Conv2d(6, 8, 3, 1, 1)}
    parts |= {"aside": nn.Conv2d(8, 8, 1), "unused": nn.Conv2d(8, 8, 1), "pool": nn.AdaptiveAvgPool2d(1)}
    return Net(counted, **parts, head=nn.Linear(8, 4), tally=Tally())


TRACED = 1  # one pass over one image; all operations leave cells in their places, so no pass locates cells
APART = 4  # before the first batch, four passes find out whether each picture is treated as if it were alone


@pytest.mark.parametrize("layer", [None, "deep"])
def test_a_decision_is_remembered_for_the_module_and_size(net, picture, layer):
    explain(net, picture, layer, spread="even")
    assert net.tally.count == TRACED + 1
    explain(net, picture, layer, target=2, spread="even")
    explain(net, torch.randn(5, *picture.shape), layer, method="hirescam", batch_size=5, spread="even")
    assert net.tally.count == TRACED + 5 + APART  # two of them, of one image, try the memory format
    explain(net, torch.randn(3, 32, 32), layer, spread="even")
    assert net.tally.count == 2 * TRACED + 6 + APART
    explain(net, picture, layer, spread="even")
    assert net.tally.count == 2 * TRACED + 7 + APART


def test_the_decision_lists_every_call_with_its_shape_and_verdict(net, picture):
    decision = decide(net, picture[None])
    rows = {str(row.ref): row for row in decision.rows}

    assert list(rows) == ["stem", "relu#1", "deep", "aside", "relu#2", "pool", "head", ""]
    assert rows["stem"].shape == (1, 6, 8, 12)
    assert str(rows["stem"].layout) == "channels_first 8x12"
    assert rows["head"].verdict == "no spatial grid"
    assert rows["pool"].verdict
    assert str(decision.layer) == "relu#2"
    assert decision.layer.runners_up
    for ref in decision.layer.runners_up:
        assert ref != decision.layer.ref
        assert explain(net, picture, str(ref), target=1).raw.shape == (8, 12)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("deeb", "'deep'"),
        ("layer4", "stem, relu, deep"),
        ("unused", "'unused' did not run"),
        ("deep#2", "'deep#2' did not run"),
        ("head", r"\(1, 4\).*spatial extent"),
        ("pool", r"\(1, 8, 1, 1\).*spatial extent"),
        ("relu", "'relu#1' or 'relu#2'"),
        (nn.ReLU(), "ReLU"),
        ("aside", "depend"),
    ],
)
def test_a_layer_that_cannot_be_explained_is_one_sentence(net, picture, typed, words):
    with refused(words, LayerError):
        explain(net, picture, typed, target=1)


def test_each_call_of_a_layer_can_be_explained(net, picture):
    first, second = (explain(net, picture, f"relu#{call}", target=1) for call in (1, 2))
    in_a_row = nn.Sequential(net.stem, nn.ReLU(), net.deep, nn.ReLU(), net.pool, nn.Flatten(), net.head)
    expected = explain(in_a_row, picture, "3", target=1)
    assert (first.layer, second.layer) == ("relu#1", "relu#2")
    assert np.allclose(second.raw, expected.raw, atol=1e-6)
    assert not np.allclose(first.raw, second.raw, atol=1e-3)


def test_the_raw_maps_of_several_layers_are_scaled_before_they_are_fused(net, picture):
    single = [explain(net, picture, layer, target=1, method="layercam", spread="even") for layer in ("stem", "deep")]
    fused = explain(net, picture, ["stem", net.deep], target=1, method="layercam", spread="even")
    assert (fused.layer, fused.raw.shape) == ("stem+deep", (8, 12))
    scaled = np.mean([row.raw / np.abs(row.raw).max() for row in single], axis=0)
    assert np.allclose(fused.raw, scaled, atol=1e-5)


def test_several_layers_of_which_one_is_not_finite_have_no_heatmap():
    good, bad = torch.rand(2, 4, 4), torch.rand(2, 2, 2)
    bad[1, 0, 0] = float("nan")
    raw, heatmap = fuse([good, bad]), fuse_heatmaps([good, bad], (8, 8))
    assert torch.isfinite(raw[0]).all()
    assert heatmap[0].max() == 1
    assert not torch.isfinite(raw[1]).all()
    assert not heatmap[1].any()


def tokens_of(net: Net, images: Tensor) -> Tensor:
    return net.patches(images).flatten(2).mT


@pytest.mark.parametrize("constants", [1, 258])
def test_tokens_that_are_joined_with_many_constants_are_a_grid(constants):
    """A picture's channels beside constants that say where each pixel lies, pooled by attention, as in a Perceiver."""

    def run(net: Net, images: Tensor) -> Tensor:
        tokens = net.joined(torch.cat([images.flatten(2).mT, net.places], 2))
        weights = net.key(tokens).sum(2, keepdim=True).softmax(1)
        return net.head((weights * net.value(tokens)).sum(1))

    channels = 3 + constants
    parts = {"joined": nn.LayerNorm(channels), "key": nn.Linear(channels, 8), "value": nn.Linear(channels, 8)}
    net = Net(run, **parts, places=torch.randn(1, 16 * 16, constants), head=nn.Linear(8, 3))
    found = explain(net, torch.randn(3, 16, 16))
    assert (found.layer, found.raw.shape) == ("joined", (16, 16))


def test_a_single_token_is_not_a_map():
    """Only the class token goes on; there are as many channels as patches."""

    def run(net: Net, images: Tensor) -> Tensor:
        return net.head(net.token(tokens_of(net, images).relu().mean(1, keepdim=True)).relu()[:, 0])

    net = Net(run, patches=nn.Conv2d(3, 64, 8, 8), token=nn.Linear(64, 64), head=nn.Linear(64, 5))
    image = torch.randn(3, 64, 64)

    assert explain(net, image, target=1).layer == "patches"
    with refused(r"'token' returned shape \(1, 1, 64\)", LayerError):
        explain(net, image, "token", target=1)


def test_attention_between_tokens_is_not_a_grid_of_features():
    """The softmax is the last module with a grid-like output: heads by tokens by tokens."""

    def run(net: Net, images: Tensor) -> Tensor:
        tokens = tokens_of(net, images).reshape(len(images), -1, 4, 8).transpose(1, 2)
        mixed = net.softmax(tokens @ tokens.mT) @ tokens
        return net.head(mixed.transpose(1, 2).flatten(2).mean(1))

    net = Net(run, patches=nn.Conv2d(3, 32, 16, 16), softmax=nn.Softmax(dim=-1), head=nn.Linear(32, 3))
    found = explain(net, torch.randn(3, 128, 128), target=1)

    assert (found.layer, found.raw.shape) == ("patches", (8, 8))


def refused_or_unsure(net: nn.Module, image: Tensor, layer: str) -> bool:
    """Tell whether a map whose cells lie nowhere is not drawn without a doubt."""
    try:
        return "not certain" in explain(net, image, layer, target=1).layer_reason
    except LayerError:
        return True


ATTENTION = {
    "product": lambda net, query, tokens: (query @ net.key(tokens).mT / 6).softmax(-1) @ tokens,
    "fused": lambda net, query, tokens: functional.scaled_dot_product_attention(query, net.key(tokens), tokens),
    "module": lambda net, query, tokens: net.module(query, tokens, tokens)[0],
}


def latents(attention: str, count: int, queries: str) -> Net:
    """Return a network whose learned vectors attend to the patches, and a layer that mixes them (Perceiver)."""

    def run(net: Net, images: Tensor) -> Tensor:
        tokens = tokens_of(net, images)
        vectors = net.vectors(images) if queries == "of a module" else net.vectors.values.expand(len(images), -1, -1)
        vectors = vectors + tokens if queries == "from the picture" else vectors
        return net.head(net.mix(vectors + ATTENTION[attention](net, vectors, tokens)).relu().mean(1))

    vectors = Net(
        lambda net, images: net.values.expand(len(images), -1, -1), values=nn.Parameter(torch.randn(1, count, 32))
    )
    parts = {"module": nn.MultiheadAttention(32, 2, batch_first=True), "key": nn.Linear(32, 32)}
    parts |= {"mix": nn.Linear(32, 32), "head": nn.Linear(32, 5)}
    return Net(run, vectors=vectors, patches=nn.Conv2d(3, 32, 16, 16), **parts)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("count", "queries"),  # 4x4, as after merging 8x8; 6x6; as many as patches
    [(16, "learned"), (36, "learned"), (64, "learned"), (16, "of a module")],
)
@pytest.mark.parametrize("attention", ATTENTION)
def test_learned_vectors_that_attend_to_the_patches_are_not_a_grid(attention, count, queries, frozen):
    net, image = latents(attention, count, queries), torch.randn(3, 128, 128)
    net.requires_grad_(not frozen)
    found = explain(net, image, target=1)
    assert (found.layer, found.raw.shape) in {("patches", (8, 8)), ("key", (8, 8))}
    assert queries == "from the picture" or "show no place" in found.layer_reason
    assert refused_or_unsure(net, image, "mix")


@pytest.mark.parametrize("attention", ATTENTION)
def test_patches_that_attend_to_each_other_stay_a_grid(attention):
    found = explain(latents(attention, 64, "from the picture"), torch.randn(3, 128, 128), target=1)
    assert (found.layer, found.raw.shape) == ("mix", (8, 8))


def merged(net: Net, tokens: Tensor) -> Tensor:
    cells = tokens.unflatten(1, (8, 8))
    return net.merge(torch.cat([cells[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)).flatten(1, 2)


def asked_by_a_part(net: Net, tokens: Tensor) -> Tensor:
    query = net.query(tokens.unflatten(1, (8, 8))[:, ::2, ::2].flatten(1, 2))
    return (query @ tokens.mT).softmax(-1) @ tokens


FEWER = {
    "the first": lambda net, tokens: tokens[:, :36],
    "the strongest": lambda net, tokens: tokens.gather(  # token pruning
        1, tokens.norm(dim=2).topk(16).indices[..., None].expand(-1, -1, 32)
    ),
    "weighed": lambda net, tokens: net.weigh(tokens).softmax(1).mT @ tokens,  # TokenLearner
    "as many weighted sums": lambda net, tokens: net.weigh_all(tokens).sigmoid().mT @ tokens,
    "merged": merged,  # Swin
    "asked by a part of them": asked_by_a_part,  # LeViT
}


@pytest.mark.parametrize("way", FEWER)
def test_fewer_tokens_are_a_coarser_grid_or_none(way):
    """A network reduces its patches to fewer tokens and then mixes their channels."""

    def run(net: Net, images: Tensor) -> Tensor:
        return net.head(net.mix(FEWER[way](net, tokens_of(net, images))).relu().mean(1))

    parts = {"weigh": nn.Linear(32, 16), "query": nn.Linear(32, 32), "merge": nn.Linear(128, 32)}
    parts |= {"weigh_all": nn.Linear(32, 64), "mix": nn.Linear(32, 32), "head": nn.Linear(32, 5)}
    net, image = Net(run, patches=nn.Conv2d(3, 32, 16, 16), **parts), torch.randn(3, 128, 128)
    found = explain(net, image, target=1)

    if way in ("merged", "asked by a part of them"):
        assert (found.layer, found.raw.shape) == ("mix", (4, 4))
    else:
        assert found.raw.shape == (8, 8) or "not certain" in found.layer_reason
        assert refused_or_unsure(net, image, "mix")


def test_a_part_that_is_added_to_in_place_is_one_branch():
    """Blocks return a part of their maps, to which their input is then added in place (as in Han et al. 2020)."""

    def run(net: Net, maps: Tensor) -> Tensor:
        part = net.part(net.wide(maps))
        part += maps
        return part

    part = Net(lambda net, maps: torch.cat([maps, maps.relu()], 1)[:, :16, :, :])
    sliced = [Net(run, wide=nn.Conv2d(16, 12, 3, 1, 1), part=part) for _ in range(3)]
    net = classifier(nn.Conv2d(3, 16, 8, 8), *sliced, nn.Conv2d(16, 32, 1), nn.ReLU())
    assert str(decide(net, torch.randn(1, 3, 64, 64)).layer) == "5"


@pytest.mark.parametrize("late", [True, False])
def test_gates_are_not_mistaken_for_features(late):
    """A gate runs last: computed from the stem, or from the features with one channel."""

    def run(net: Net, images: Tensor) -> Tensor:
        stem = net.stem(images)
        deep = net.deep(stem).relu()
        if late:
            return net.head(means(deep) * net.gate(net.pool(stem).flatten(1)).sigmoid())
        return net.head(means(deep * net.gate(deep).sigmoid()))

    gate = nn.Linear(16, 16) if late else nn.Conv2d(16, 1, 1)
    parts = {"stem": nn.Conv2d(3, 16, 8, 8), "deep": nn.Conv2d(16, 16, 3, 1, 1), "pool": nn.AdaptiveAvgPool2d(1)}
    net = Net(run, **parts, gate=gate, head=nn.Linear(16, 5))
    assert explain(net, torch.randn(3, 64, 64), target=0).layer == "deep"


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
    """One layer runs and is left out of the score."""

    def run(net: Net, images: Tensor) -> Tensor:
        net.aside(images)
        return net.inner(images)

    net, image = Net(run, aside=nn.Conv2d(3, 8, 3, padding=1), inner=build(name)), torch.randn(1, 3, 64, 64)

    usual, decision = decide(net, image), decide(net, image, every=True)

    assert decision.layer == usual.layer
    assert "not measured, because deeper layers influence the score" in {row.verdict for row in usual.rows}
    verdicts = {row.ref.name: row.verdict for row in decision.rows if row.layout is not None}
    denied = {layer for layer, verdict in verdicts.items() if "influence" in verdict}
    influencing = influencing_modules(net, image)
    assert len(verdicts) > 40
    assert denied == {"aside"}
    assert {layer for layer, verdict in verdicts.items() if not verdict} <= influencing
    assert "aside" not in influencing


def inline(end: str, activation: type[nn.Module], *, inplace: bool, axes: int) -> Net:
    """Return a network that ends in modules and functions that its forward pass calls one by one, in place or not."""
    cells = tuple(range(2, 2 + axes))

    def run(net: Net, images: Tensor) -> Tensor:
        before = net.act(net.stem(images))
        maps, two = net.one(before), net.two(before)
        if end == "joined":
            maps = net.drop(torch.cat([maps, two], 1))
        elif end == "function":
            maps = functional.silu(maps, inplace=inplace)
        elif end == "part":
            maps = net.drop(net.act(torch.cat([maps, two], 1)[:, :8]))
        elif end == "+=" and inplace:
            maps += two
            maps = net.act(maps)
        else:
            maps = net.act(maps + two)
        scores = net.head(maps.mean(cells))
        return scores + net.beside(before.mean(cells)) if end in ("beside", "function") else scores

    torch.manual_seed(0)
    convolution = getattr(nn, f"Conv{axes}d")
    parts = {"stem": convolution(3, 8, 4, 4), "one": convolution(8, 8, 3, 1, 1), "two": convolution(8, 8, 1)}
    parts |= {"act": activation(inplace=inplace), "drop": nn.Dropout(inplace=inplace)}
    return Net(run, **parts, head=nn.Linear(16 if end == "joined" else 8, 5), beside=nn.Linear(8, 5))


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
        net = inline(end, activation, inplace=inplace, axes=axes)
        explainer = camkit.Explainer(torch.fx.symbolic_trace(net).eval() if traced else net, method="gradcam")
        found.append(explainer(image, target=3))
        assert explainer.layer.sure
    plain, in_place = found
    assert in_place.layer == plain.layer == layer
    np.testing.assert_allclose(in_place.raw, plain.raw, rtol=1e-3, atol=1e-6)


def two_heads(join: Any) -> Net:
    """Return two branches of different depth with a head each; ``join`` makes the output of their scores."""

    def run(net: Net, images: Tensor) -> Any:
        net.tally.count += 1
        stem = net.stem(images)
        return join(net.colour(means(net.fine(stem))), net.shape(means(net.coarse(stem))))

    torch.manual_seed(0)
    parts = {"stem": stage(3, 16, 2), "fine": stage(16, 24, 2), "coarse": stage(16, 24, 4)}
    return Net(run, **parts, colour=nn.Linear(24, 5), shape=nn.Linear(24, 3), tally=Tally())


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
    net = two_heads(join)
    targets = [lambda out: colour(out)[:, 1], lambda out: shape(out)[:, 1]]
    layers = ["fine", "coarse"]
    together = explain(net, picture, target=[targets[number] for number in order])
    apart = [explain(net, picture, target=targets[number]) for number in order]
    for found in (together, apart):
        assert [explanation.layer for explanation in found] == [layers[number] for number in order]
        assert {explanation.status for explanation in found} == {"ok"}


def test_the_decision_for_a_function_is_remembered_and_does_not_keep_the_model(picture):
    net = two_heads(OUTPUTS["dictionary"][0])
    explainer = camkit.Explainer(net, method="gradcam")

    def shape_of(number: int) -> Any:
        return lambda out: out["shape"][:, number]

    def weighted(weights: Tensor) -> Any:
        return lambda out: (out["shape"] * weights).sum(1)

    whole = lambda out: out["shape"][:, 1] + 0 * sum(p.sum() for p in net.shape.parameters())  # noqa: E731
    for first, again in (
        (shape_of(1), shape_of(1)),
        (weighted(torch.rand(3)), weighted(torch.rand(3))),
        (whole, whole),
    ):
        explainer(picture, first)
        before = net.tally.count
        assert explainer(picture, again).layer == "coarse"
        assert net.tally.count == before + 1
    assert explainer(picture, lambda out, key="colour": out[key][:, 1]).layer == "fine"

    gone = weakref.ref(net)
    del net, explainer, whole, first, again
    gc.collect()
    assert gone() is None


def test_classes_share_one_decision_where_a_class_token_passes_the_patches():
    net, passes = tiny_vit(), []
    net.patch.register_forward_hook(lambda *_: passes.append(1))
    explainer = camkit.Explainer(net, method="gradcam")
    explainer(torch.randn(3, 64, 64), 0)
    passes.clear()
    for target in (1, 2, camkit.targets.contrast(1, 2), camkit.targets.finer(1)):
        assert explainer(torch.randn(3, 64, 64), target).status != "no_influence"
    assert len(passes) == 4
    explainer.using("finercam")(torch.randn(3, 64, 64), 3)
    assert len(passes) == 5


def test_a_target_that_fails_for_one_picture_alone_is_explained_at_the_models_own_layer(picture):
    def of_three(out: Any) -> Tensor:
        assert len(out["logits"]) == 3
        return out["logits"][:, 1]

    found = explain(two_heads(OUTPUTS["logits"][0]), torch.randn(3, *picture.shape), target=of_three)
    assert {explanation.layer for explanation in found} == {"coarse"}


def test_a_class_of_another_branch_and_the_best_place_of_another_scale_are_explained_there(picture):
    found = explain(two_heads(OUTPUTS["joined"][0]), [picture, picture], target=[1, 6])
    assert [(explanation.layer, explanation.status) for explanation in found] == [("fine", "ok"), ("coarse", "ok")] * 2

    def best_place(net: Net, images: Tensor) -> Tensor:
        """A bright picture has its best place on the coarse grid, a dark one on the fine grid."""
        fine = net.fine(images)
        brightness = 20 * images.mean((1, 2, 3))[:, None, None]
        scores = net.on_fine(fine).flatten(2), net.on_coarse(net.coarse(fine)).flatten(2) + brightness
        return torch.cat(scores, 2).amax(2)

    parts = {"fine": stage(3, 8, 2), "coarse": stage(8, 8, 2)}
    net = Net(best_place, **parts, on_fine=nn.Conv2d(8, 4, 1), on_coarse=nn.Conv2d(8, 4, 1))
    dark, bright = picture - 1, picture + 1
    for pictures, layers in (([bright, dark], ["coarse", "fine"]), ([dark, bright], ["fine", "coarse"])):
        found = explain(net, pictures, target=2)
        assert {explanation.status for explanation in found} == {"ok"}
        assert [explanation.layer for explanation in found] == layers


@pytest.mark.parametrize(
    ("axes", "strides", "size", "grid"),
    [
        (2, [(2, 1), (2, 1), (2, 2), (2, 1)], (64, 100), (4, 50)),
        (2, [(2, 1)] * 6, (64, 60), (1, 60)),
        (3, [(1, 2, 2)] * 4, (8, 64, 64), (8, 4, 4)),
    ],
)
def test_each_axis_has_its_own_stride(axes, strides, size, grid):
    convolution, norm = getattr(nn, f"Conv{axes}d"), getattr(nn, f"BatchNorm{axes}d")(8)
    steps = [nn.Sequential(convolution(8 if at else 1, 8, 3, step, 1), nn.ReLU()) for at, step in enumerate(strides)]
    net, last = classifier(*steps, norm), str(len(strides))
    for layer in (None, last):
        explanation = explain(net, torch.rand(1, *size), layer)
        assert (explanation.layer, explanation.raw.shape, explanation.heatmap.shape) == (last, grid, size)


def test_convolutions_of_each_patch_alone_say_nothing_of_the_picture():
    """As in TNT."""

    def run(net: Net, images: Tensor) -> Tensor:
        patches = functional.unfold(images, 8, stride=8).mT.reshape(-1, 3, 8, 8)
        return net.head(net.outer(net.inner(patches).reshape(len(images), -1, 64)).relu().mean(1))

    net = Net(run, inner=nn.Conv2d(3, 4, 3, 2, 1), outer=nn.Linear(64, 16), head=nn.Linear(16, 4))
    explanation = explain(net, torch.rand(3, 64, 64))
    assert (explanation.layer, explanation.raw.shape) == ("outer", (8, 8))


@pytest.mark.parametrize("frames", [3, 8])
@pytest.mark.parametrize("method", ["gradcam", "rise"])
def test_clips_with_their_frames_first_are_refused(frames, method):
    def run(net: Net, clip: Tensor) -> Tensor:
        return net.inner((clip - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1, 1)) / 0.2)

    inner = classifier(nn.Conv3d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv3d(8, 8, 3, 2, 1), nn.ReLU())
    frames_first = Net(lambda net, clip: run(net, clip.transpose(1, 2)), inner=inner)
    with refused(r"\(N, T, C, H, W\)", InputError):
        explain(frames_first, torch.rand(frames, 3, 32, 32), method=method)
    found = explain(Net(run, inner=inner), torch.rand(3, frames, 32, 32), method=method)
    assert found.heatmap.shape == (frames, 32, 32)


@pytest.mark.parametrize("clip", [torch.rand(8, 3, 32, 32), torch.rand(1, 8, 3, 32, 32)])
@pytest.mark.parametrize("method", ["gradcam", "rise"])
def test_clips_for_networks_of_pictures_are_refused(clip, method):
    """A network of pictures runs on each frame, as in TimeSformer."""

    def run(net: Net, clips: Tensor) -> Tensor:
        clip, frames, _, _, _ = clips.shape
        return net.head(means(net.body(clips.flatten(0, 1))).unflatten(0, (clip, frames)).mean(1))

    with refused("Conv3d", InputError):
        explain(Net(run, body=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)), clip, method=method)


def test_places_that_depend_on_the_picture_are_unsure():
    """A network samples its picture at places that the picture decides (Jaderberg et al. 2015)."""

    def run(net: Net, images: Tensor) -> Tensor:
        scales = (1 + images.mean((1, 2, 3)))[:, None, None]
        affine = torch.eye(2, 3)[None].expand(len(images), 2, 3) * scales
        grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
        return net.inner(functional.grid_sample(images, grid, align_corners=False))

    inner = classifier(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    found = decide(Net(run, inner=inner), torch.rand(1, 3, 64, 64))
    assert not found.chosen().sure
    assert not found.named(LayerRef("inner.3"), "").sure


def refuses(net: nn.Module, image: Tensor) -> None:
    with pytest.raises(TargetError):
        explain(net, image, target=999)


def scores_by_nothing(net: nn.Module, image: Tensor) -> None:
    explain(net, image, target=lambda output: (output * 0).sum(1))


@pytest.mark.parametrize("first", [refuses, scores_by_nothing])
def test_the_choice_does_not_depend_on_the_first_target(first):
    image, net = torch.randn(3, 64, 64), tiny_vit()
    expected = explain(copy.deepcopy(net), image, target=1)

    first(net, image)
    found = explain(net, image, target=1)

    assert (found.layer, found.layer_reason) == (expected.layer, expected.layer_reason)
    assert np.array_equal(found.raw, expected.raw)
