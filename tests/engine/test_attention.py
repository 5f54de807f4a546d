"""The attention methods against their slow references, on the transformers of three libraries and on users' own."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import attention_oracles as oracles
import numpy as np
import pytest
import torch
import torchvision
from networks import Net
from refusals import refused
from tiers import Extra, represented_by, rows_represented
from torch import Tensor, nn
from torch.nn import functional
from unchanged import unchanged

import camkit
from camkit.errors import MethodError
from camkit.methods import METHODS

timm, transformers = Extra("timm"), Extra("transformers")

NAMES = tuple(name for name, method in METHODS.items() if method.reads_attention)
OF_THE_CLASS = tuple(name for name in NAMES if name != "rollout")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}


def alive(model: nn.Module) -> nn.Module:
    """Give a model weights with which attention and scores differ from picture to picture, as training would."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        with torch.no_grad():
            scale = 0.25 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def of_torchvision(**options: Any) -> nn.Module:
    model = torchvision.models.VisionTransformer(32, 8, 3, 4, hidden_dim=32, mlp_dim=64, num_classes=10, **options)
    return alive(model)


def of_timm(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 10}
    return alive(timm.create_model(name, **small | options))


def of_huggingface(name: str = "ViT", head: str = "ForImageClassification", **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=3, num_labels=10, **SMALL | options)
    return alive(getattr(transformers, name + head)(config))


def siglip(**options: Any) -> nn.Module:
    """Return a model that ends in an attention pool with one query."""
    return of_timm("vit_base_patch16_siglip_224", mlp_ratio=2.0, **options)


LIBRARIES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], oracles.SlowViT]]] = {
    "torchvision": (of_torchvision, oracles.from_torchvision),
    "timm": (of_timm, oracles.from_timm),
    "timm, average": (lambda: of_timm(global_pool="avg"), oracles.from_timm),
    "timm, no class token": (lambda: of_timm(global_pool="avg", class_token=False), oracles.from_timm),
    "timm, attention pool": (siglip, oracles.from_timm),
    "Hugging Face": (of_huggingface, oracles.from_huggingface),
    "Hugging Face, eager": (lambda: of_huggingface(attn_implementation="eager"), oracles.from_huggingface),
}


@functools.cache
def library(name: str) -> tuple[nn.Module, oracles.SlowViT]:
    make, read = LIBRARIES[name]
    model = make()
    return model, read(model)


def pictures(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(5))


def rows_read(slow: oracles.SlowViT, tokens: int) -> np.ndarray:
    """Return the weights of the queries that the head reads: the class token, all patches, or the query of a pool."""
    if slow.pool is not None:
        return np.ones(1)
    rows = np.zeros(tokens)
    rows[len(slow.prefix) if slow.averages else 0 : None if slow.averages else 1] = 1
    return rows / rows.sum()


def expected_map(slow: oracles.SlowViT, method: str, image: Tensor, target: int, given: Any = None) -> np.ndarray:
    if method == "legrad":
        relevance = slow.legrad(image, target)
    else:
        maps, gradients = given or slow.maps_and_gradients(image, target)
        relevance = oracles.FORMULAS[method](maps, gradients, rows_read(slow, maps[0].shape[1]))
    return relevance[len(slow.prefix) :].reshape(4, 4)


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@functools.cache
def computed(name: str, number: int, target: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the maps of a picture and their gradients, by the slow reference."""
    return library(name)[1].maps_and_gradients(pictures()[number], target)


@pytest.mark.parametrize(
    ("method", "name"),
    rows_represented(
        lambda _, name: name == "torchvision",
        [*((method, "torchvision") for method in NAMES), *itertools.product(("chefer", "legrad"), [*LIBRARIES][1:])],
    ),
)
def test_the_map_equals_the_slow_reference(method: str, name: str) -> None:
    model, slow = library(name)
    images = pictures()
    with unchanged(model):
        found = camkit.explain(model, images, method=method, target=[3, 7])
    for number, target in ((0, 7), (1, 3)):
        explanation = found[2 * number + (target == 7)]
        assert_same(explanation.raw, expected_map(slow, method, images[number], target, computed(name, number, target)))
        assert (explanation.method, explanation.layer, explanation.target) == (method, "whole model", target)
        assert explanation.status == "ok"


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("rows", ["one", "several"])
@pytest.mark.parametrize("method", oracles.FORMULAS)
def test_the_function_equals_its_formula(method: str, rows: str, pools: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, 5, 5), (2, 1, 5, 5), (2, 4, 5, 5)] + [(2, 2, 3, 5)] * pools
    maps = [torch.randn(shape, generator=generator).softmax(-1) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    read = torch.zeros(2, shapes[-1][2])
    read[:, : 1 if rows == "one" else 3] = 1 if rows == "one" else 1 / 3
    given = (maps, read) if method == "rollout" else (maps, gradients, read)
    found = METHODS[method].weights(*given)
    for picture in range(2):
        one = [[layer[picture].double().numpy() for layer in each] for each in (maps, gradients)]
        assert_same(found[picture].numpy(), oracles.FORMULAS[method](*one, read[picture].double().numpy()))


@pytest.mark.parametrize("scale", [1e-8, 1e6])
@pytest.mark.parametrize("name", represented_by("torchvision", among=["torchvision", "timm, average"]))
@pytest.mark.parametrize("method", OF_THE_CLASS)
def test_the_size_of_the_logits_loses_no_digits(method: str, name: str, scale: float) -> None:
    """Chefer's formula adds the identity to gradients. As they go to zero, what remains is the sum of the layers, which
    float32 must not lose beside the identity.
    """
    model = copy.deepcopy(library(name)[0])
    head = model.heads.head if name == "torchvision" else model.head
    with torch.no_grad():
        head.weight *= scale
        head.bias *= scale
    found = camkit.explain(model, pictures(1), method=method, target=3)
    assert_same(found.raw, expected_map(LIBRARIES[name][1](model), method, pictures(1)[0], 3))


HUGGING_FACE: dict[str, tuple[str, int, int, list[int], dict[str, Any]]] = {
    "Beit": ("ForImageClassification", 1, 17, [*range(1, 17)], {"use_relative_position_bias": True}),
    "DeiT": ("ForImageClassificationWithTeacher", 2, 18, [0, 1], {}),
    "Dinov2": ("ForImageClassification", 1, 17, [0], {}),
    "Dinov2WithRegisters": ("ForImageClassification", 5, 21, [0], {}),
    "CLIPVision": ("ModelWithProjection", 1, 17, [0], {"projection_dim": 10}),
    "Yolos": ("ForObjectDetection", 1, 22, [19], {"num_detection_tokens": 5, "image_size": [32, 32]}),
}
"""The class of each model, its tokens before the patches, all its tokens, and which of them its head reads: Beit
averages the patches, and of Yolos, a detection token after the patches is explained."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "method"), [*((name, "chefer") for name in HUGGING_FACE), ("Yolos", "rollout"), ("Yolos", "gradrollout")]
)
def test_models_of_hugging_face_by_the_maps_that_they_return_themselves(name: str, method: str) -> None:
    head, prefix, tokens, read, options = HUGGING_FACE[name]
    eager = of_huggingface(name, head, attn_implementation="eager", **options)
    sdpa = of_huggingface(name, head, attn_implementation="sdpa", **options)
    sdpa.load_state_dict(eager.state_dict())
    image = pictures(1)

    def score(output: Any) -> Tensor:
        logits = output.image_embeds if name == "CLIPVision" else output.logits
        return logits[:, 2, 1] if name == "Yolos" else logits[:, 3]

    output = eager(image, output_attentions=True)
    gradients = torch.autograd.grad(score(output).sum(), output.attentions)
    both = [[layer[0].detach().double().numpy() for layer in each] for each in (output.attentions, gradients)]
    relevance = oracles.FORMULAS[method](*both, np.eye(tokens)[read].mean(0))
    expected = relevance[prefix : prefix + 16].reshape(4, 4)
    for model in (eager, sdpa):
        with unchanged(model):
            assert_same(camkit.explain(model, image, method=method, target=score).raw, expected, 1e-4)


def in_turn(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    for block in blocks:
        tokens = block(tokens)
    return tokens


def sequence_first(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    return in_turn(blocks, tokens.transpose(0, 1)).transpose(0, 1)


class Plain(nn.Module):
    """A class token, patches of 8 pixels, and blocks, which ``body`` runs."""

    def __init__(self, *blocks: nn.Module, body: Callable[..., Tensor] = in_turn) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.zeros(1, 17, 16))
        self.blocks, self.body = nn.ModuleList(blocks), body
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def tokens(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.norm(self.body(self.blocks, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x)[:, 0])


def pytorchs(count: int = 2, **options: Any) -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, **options) for _ in range(count)]


class OneHead(nn.Module):
    """An attention of one head without an axis of heads, and a perceptron."""

    def __init__(self, softmax: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1)) -> None:
        super().__init__()
        self.softmax = softmax
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(self.softmax(q @ k.mT / 4) @ v)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    "softmax",
    [
        lambda logits: logits.softmax(axis=-1),
        lambda logits: logits.softmax(dim=2),
        lambda logits: torch.softmax(logits, axis=-1),
        lambda logits: functional.softmax(input=logits, dim=-1),
        lambda logits: logits.softmax(axis=-1) * torch.softmax(logits, axis=0).detach().ne(2),  # another axis too
    ],
)
def test_the_axis_of_a_softmax_has_several_names(softmax: Callable[[Tensor], Tensor]) -> None:
    plain, model = Plain(OneHead(), OneHead()), Plain(OneHead(softmax), OneHead(softmax))
    model.load_state_dict(plain.state_dict())
    expected, found = (camkit.explain(alive(net), pictures(1), method="legrad", target=3) for net in (plain, model))
    np.testing.assert_array_equal(found.raw, expected.raw)
    assert found.status == "ok"


def with_weights() -> Net:
    """Return a block that asks PyTorch's attention for its maps, as ``nn.MultiheadAttention`` does by default."""

    def run(net: Net, x: Tensor) -> Tensor:
        normal = net.norm(x)
        attended, weights = net.attention(normal, normal, normal)
        assert weights.shape == (len(x), 17, 17)
        return x + attended

    return Net(run, norm=nn.LayerNorm(16), attention=nn.MultiheadAttention(16, 2, batch_first=True))


OWN: dict[str, Callable[[], nn.Module]] = {
    "PyTorch's blocks": lambda: Plain(*pytorchs(batch_first=True)),
    "PyTorch's blocks, sequence first": lambda: Plain(*pytorchs(batch_first=False), body=sequence_first),
    "PyTorch's encoder": lambda: Plain(
        nn.TransformerEncoder(pytorchs(1, batch_first=True)[0], 2, enable_nested_tensor=False)
    ),
    "one head": lambda: Plain(OneHead(), OneHead()),
    "one block": lambda: Plain(OneHead()),
    "returns its weights": lambda: Plain(with_weights(), with_weights()),
}


def attended(model: nn.Module, image: Tensor) -> list[Tensor]:
    """Return the attention maps of a model of ``OWN``, from the queries and keys that its modules compute."""
    maps: list[Tensor] = []

    def of_pytorch(module: Any, arguments: tuple[Any, ...], named: Any) -> None:
        tokens = arguments[0] if module.batch_first else arguments[0].transpose(0, 1)
        q, k, _ = functional.linear(tokens, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        q, k = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k))
        maps.append((q @ k.mT / 8**0.5).softmax(-1))

    def of_one_head(module: Any, arguments: tuple[Any, ...]) -> None:
        q, k, _ = module.qkv(module.norm1(arguments[0])).chunk(3, -1)
        maps.append((q @ k.mT / 4).softmax(-1)[:, None])

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(of_pytorch, with_kwargs=True)
        if isinstance(module, OneHead):
            module.register_forward_pre_hook(of_one_head)
    model(image)
    return maps


@pytest.mark.parametrize("name", OWN)
def test_attention_of_a_users_own_model_is_seen(name: str) -> None:
    model = alive(OWN[name]())
    found = camkit.explain(model, pictures(), method="rollout")
    watched = attended(copy.deepcopy(model), pictures())
    for number in range(2):
        maps = [layer[number].detach().double().numpy() for layer in watched]
        expected = oracles.rollout(maps, maps, np.eye(17)[0])[1:].reshape(4, 4)
        assert_same(found[number].raw, expected)
    for method in OF_THE_CLASS:
        assert camkit.explain(model, pictures(1), method=method).status == "ok"


def test_legrad_does_not_depend_on_the_order_of_the_axes() -> None:
    both = []
    for name in ("PyTorch's blocks, sequence first", "PyTorch's blocks"):
        torch.manual_seed(3)
        both.append(alive(OWN[name]()))
    images = pictures(17)  # as many pictures as tokens, so that shapes do not tell the axes apart
    one, other = (camkit.explain(model, images, method="legrad", target=2) for model in both)
    assert all(np.allclose(a.raw, b.raw, rtol=1e-4, atol=1e-7) for a, b in zip(one, other, strict=True))


def without_gradients(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return in_turn(blocks, tokens)


def second_last(blocks: nn.ModuleList, tokens: Tensor) -> Tensor:
    """Leave out what the last block returns."""
    tokens = in_turn(blocks[:-1], tokens)
    blocks[-1](tokens)
    return tokens


def checkpointed(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    for block in blocks:
        tokens = torch.utils.checkpoint.checkpoint(block, tokens, use_reentrant=False)
    return tokens


def alike(body: Callable[..., Tensor] = in_turn, blocks: int = 2, kind: type[Plain] = Plain) -> Plain:
    torch.manual_seed(3)
    return alive(kind(*(OneHead() for _ in range(blocks)), body=body))


@pytest.mark.parametrize("body", [without_gradients, checkpointed])
@pytest.mark.parametrize("method", ["chefer", "legrad"])
def test_a_backbone_that_keeps_no_graph_of_its_own(method: str, body: Callable[..., Tensor]) -> None:
    expected = camkit.explain(alike(), pictures(), method=method, target=[1, 2])
    found = camkit.explain(alike(body), pictures(), method=method, target=[1, 2])
    assert all(np.allclose(a.raw, b.raw, rtol=1e-4, atol=1e-7) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("method", oracles.FORMULAS)
def test_layers_after_the_tokens_that_the_head_reads_are_left_out(method: str) -> None:
    longer, shorter = alike(second_last, 3), alike()
    shorter.load_state_dict({key: value for key, value in longer.state_dict().items() if "blocks.2" not in key})
    found = camkit.explain(longer, pictures(1), method=method)
    assert np.allclose(found.raw, camkit.explain(shorter, pictures(1), method=method).raw, rtol=1e-5)


@pytest.mark.parametrize("method", NAMES)
def test_a_head_of_zeros_has_no_influence(method: str) -> None:
    model = alike()
    with torch.no_grad():
        model.head.weight.zero_()
    assert camkit.explain(model, pictures(1), method=method, target=1).status == "no_influence"


@pytest.mark.parametrize("method", ["rollout", "legrad"])
def test_targets_of_every_kind(method: str) -> None:
    model, _ = library("torchvision")
    explainer = camkit.Explainer(model, method=method)
    by_class = [[explainer(image, target=c).raw for c in range(10)] for image in pictures()]
    logits = model(pictures()).detach()
    for number, best in enumerate(logits.argmax(1).tolist()):
        assert_same(explainer.batch(pictures())[number].raw, by_class[number][best])
    second = camkit.targets.top(2)
    assert_same(explainer.batch(pictures(), second)[1].raw, by_class[0][int(logits[0].topk(2).indices[1])])
    each = explainer.batch(pictures(), camkit.targets.each([4, 5]))
    assert_same(each[0].raw, by_class[0][4])
    assert_same(each[1].raw, by_class[1][5])
    doubled = explainer.batch(pictures(1), lambda output: 2 * output[:, 4])[0].raw
    assert_same(doubled, by_class[0][4] * (1 if method == "rollout" else 2))
    contrast = explainer.batch(pictures(1), camkit.targets.contrast(4, 5))[0]
    assert contrast.status == "ok"
    if method != "rollout":
        assert not np.allclose(contrast.raw, by_class[0][4])


def inlined(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    """Add what the attention returns outside of any block."""
    for block in blocks:
        tokens = tokens + block(tokens)
    return tokens


class Maps(Plain):
    """A segmentation network."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x)[:, 1:]).mT.unflatten(2, (4, 4))


class Hidden(torch.autograd.Function):
    """An attention in a kernel of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        weights = torch.exp(x @ x.mT / 40)
        return weights / weights.sum(-1, keepdim=True) @ x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def own_kernel() -> Net:
    return Net(lambda _, x: x + Hidden.apply(x))


def detached(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
    return in_turn(blocks, tokens).detach()


class WithoutGraph(OneHead):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def column_by_column() -> Plain:
    """Return a network that lists its patches in another order than a grid's."""
    model = Plain(OneHead(), OneHead())
    model.patches = nn.Sequential(model.patches, Net(lambda _, maps: maps.mT))
    model.places = nn.Parameter(torch.zeros(1, 65, 16))
    return model


INSTEAD = ".*; use 'gradcam' or 'hirescam'$"
WITHOUT_GRADIENTS = r"remove inference_mode, detach\(\)"
REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "rollout, resnet": (lambda: torchvision.models.resnet18(num_classes=10), 64, "saw none" + INSTEAD),
    "rollout, maxvit": (
        lambda: timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=10, img_size=64),
        64,
        "in windows" + INSTEAD,
    ),
    "rollout, mobilevit": (lambda: timm.create_model("mobilevit_xxs", num_classes=10), 64, "several stages" + INSTEAD),
    "rollout, pvt": (lambda: timm.create_model("pvt_v2_b0", num_classes=10), 64, "pooled tokens" + INSTEAD),
    "rollout, swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [7, 7], num_classes=10),
        64,
        r"between all \d+ tokens, .* or in a decoder \(a map of 49x49\)" + INSTEAD,
    ),
    "rollout, own kernel": (lambda: Plain(own_kernel(), own_kernel()), 32, "kernel that does not show them" + INSTEAD),
    "rollout, no grid": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)),
        32,
        "needs tokens that form a grid",
    ),
    **{f"{method}, another order": (column_by_column, 64, "needs tokens that form a grid") for method in NAMES},
    "rollout, detached": (lambda: alike(detached), 32, WITHOUT_GRADIENTS),
    "legrad, a block without gradients": (lambda: Plain(WithoutGraph(), OneHead()), 32, WITHOUT_GRADIENTS),
    "legrad, attention outside of blocks": (
        lambda: alike(inlined),
        32,
        "chain of blocks .*; use 'chefer' or 'gradcam'",
    ),
    "legrad, maps": (lambda: alike(kind=Maps), 32, "not boxes or maps; use 'chefer'"),
}


@pytest.mark.parametrize(
    "name", represented_by(*(name for name in REFUSED if "vit" not in name and "pvt" not in name), among=REFUSED)
)
def test_a_model_without_maps_over_all_tokens_is_refused_in_a_sentence(name: str) -> None:
    (make, size, says), (method, _) = REFUSED[name], name.split(", ")
    torch.manual_seed(3)
    model = alive(make())
    with unchanged(model), refused(f"'{method}'.*{says}", MethodError):
        camkit.explain(model, pictures(2, size), method=method)
    if "use 'chefer'" in says:
        assert camkit.explain(model, pictures(1), method="chefer").status == "ok"


def rearranged(at: int, registers: int) -> nn.Module:
    """Return a transformer with so many patches before its class token, and learned tokens at the end."""
    torch.manual_seed(2)
    learned = torch.randn(1, registers, 16)

    def body(blocks: Iterable[nn.Module], tokens: Tensor) -> Tensor:
        cls, patches = tokens.split([1, 16], 1)
        parts = [patches[:, :at], cls, patches[:, at:], learned.expand(len(tokens), -1, -1)]
        tokens = in_turn(blocks, torch.cat(parts, 1))
        return torch.cat([tokens[:, at : at + 1], tokens], 1)

    return alive(Plain(*pytorchs(3, batch_first=True), body=body))


@pytest.mark.parametrize(
    ("at", "registers", "method"), [(16, 0, "chefer"), (3, 0, "chefer"), (8, 0, "legrad"), (0, 4, "chefer")]
)
def test_other_tokens_may_stand_anywhere_or_are_refused(at: int, registers: int, method: str) -> None:
    try:
        found = camkit.explain(rearranged(at, registers), pictures(1)[0], method=method, target=3)
    except MethodError as error:
        assert any(words in str(error) for words in ("needs the picture's tokens", "a chain of blocks", "form a grid"))
    else:
        assert at not in (3, 8)
        expected = camkit.explain(rearranged(0, registers), pictures(1)[0], method=method, target=3)
        assert_same(found.raw, expected.raw)


def test_a_target_takes_one_backward_pass_for_all_maps() -> None:
    model, seen = of_torchvision(), []

    def watch(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(seen.append)

    model.heads.register_forward_hook(watch)
    explainer = camkit.Explainer(model, method="chefer")
    explainer(pictures(1)[0], 3)
    seen.clear()
    explainer(pictures(1)[0], 3)
    assert len(seen) == 1


def test_a_method_of_the_users_own() -> None:
    @camkit.register_method("last-attention", needs="attention", layer=False)
    def last_attention(maps: list[Tensor], rows: Tensor) -> Tensor:
        return (rows[:, None] @ maps[-1].mean(1))[:, 0]

    try:
        model = library("torchvision")[0]
        found = camkit.explain(model, pictures(1), method="last-attention")
        maps, _ = library("torchvision")[1].maps_and_gradients(pictures(1)[0], 0)
        assert_same(found.raw, maps[-1].mean(0)[0, 1:].reshape(4, 4))
    finally:
        del METHODS["last-attention"]
