"""One pass returns the maps and gradients of the full graph, without a graph before the layer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, classifier, means, network
from tiers import PASSES, represented_by, rows_represented
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import camkit
from camkit.engine.passes import Capture, Pass, capture
from camkit.layers.layouts import infer_layout
from camkit.layers.names import select_layers
from camkit.targets import ClassTarget, top

METHODS = tuple(name for name, method in camkit.METHODS.items() if not method.reads_attention)
ON_PICTURES = tuple(name for name, method in camkit.METHODS.items() if method.needs == "pictures")
WHOLE = tuple(name for name, method in camkit.METHODS.items() if method.needs in ("parts", "guided"))
"""The methods that run the model on changed pictures, and those that differentiate the whole of it; they have tests of
their own."""
LAYERS = {
    "resnet18": ("relu", "layer2", "layer4"),
    "vgg11": ("features.0", "features.6", "features.18"),  # each is followed by an in-place ReLU
    "densenet121": ("features.conv0", "features.denseblock2", "features"),
    "swin_t": ("features.0", "features.3", "features.7"),
    "vit_b_32": ("conv_proj", "encoder.layers.encoder_layer_5", "encoder.layers.encoder_layer_11.ln_1"),
}
SINGLE = [(name, (layer,)) for name, layers in LAYERS.items() for layer in layers]
SEVERAL = list(LAYERS.items())


def pictures(size: int = 64) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(5))


def to_channels_first(name: str, maps: Tensor) -> Tensor:
    if name == "swin_t":
        return maps.permute(0, 3, 1, 2)
    if maps.dim() == 3:  # a class token, then two rows of two
        return maps[:, 1:].transpose(1, 2).reshape(len(maps), -1, 2, 2)
    return maps


def full_graph(
    model: nn.Module,
    images: Tensor,
    layers: Sequence[str],
    scores_of: Callable[[Tensor], Iterable[Tensor]],
    mode: Callable[[], Any] = nullcontext,
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Return feature maps, their gradients for each score, and the scores, from one ordinary graph."""
    maps: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> Tensor:
        if name not in maps:  # checkpoints run a layer again
            output.retain_grad()
            maps[name] = output
        return output.clone()  # later in-place operations must not change the saved maps

    with ExitStack() as stack:
        for name in layers:
            hook = lambda _, __, output, name=name: keep(name, output)  # noqa: E731
            stack.enter_context(model.get_submodule(name).register_forward_hook(hook))
        with mode():
            scores = list(scores_of(model(images.clone().requires_grad_())))
        gradients = []
        for score in scores:
            for kept in maps.values():
                kept.grad = None
            score.float().sum().backward(retain_graph=True)
            gradients.append([maps[name].grad.clone() for name in layers])
    model.zero_grad()
    return [maps[name].detach() for name in layers], gradients, [score.detach().float() for score in scores]


def captured(model: nn.Module, images: Tensor, targets: Any, layers: Any, **options: Any) -> Capture:
    return capture(Pass(model, images, targets, select_layers(model, layers), read_layout=infer_layout, **options))


@pytest.fixture
def one_attention() -> Iterator[None]:
    """Use one kernel: without gradients, PyTorch's attention uses another one, whose rounding differs."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("one_attention")
@pytest.mark.parametrize(
    ("name", "layers", "precision"),
    # In bf16 one network: many processors only emulate it, slowly.
    rows_represented(
        lambda name, layers, precision: (
            (name in ("resnet18", "vit_b_32") and len(layers) > 1) or (name, precision) == ("resnet18", "bf16")
        ),
        [*((*case, "fp32") for case in SINGLE + SEVERAL), ("resnet18", ("layer4",), "bf16")],
    ),
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_maps_and_gradients_are_those_of_the_full_graph(
    name: str, layers: tuple[str, ...], precision: Literal["fp32", "bf16"]
) -> None:
    model, count = network(name), 3 if len(layers) > 1 else 1
    mode = functools.partial(torch.autocast, "cpu", torch.bfloat16) if precision == "bf16" else nullcontext
    best = lambda output: output.topk(count, dim=1).values.unbind(1)  # noqa: E731
    maps, gradients, scores = full_graph(model, pictures(), layers, best, mode)
    found = captured(model, pictures(), top(count), layers, precision=precision)
    assert [torch.equal(one.values, two) for one, two in zip(found.scores, scores, strict=True)] == [True] * count
    for number, features in enumerate(found.features):
        assert gradients[0][number].any(), "the test compares more than zeros"
        assert torch.equal(features.activations, to_channels_first(name, maps[number]))
        for rank in range(count):
            assert torch.equal(features.by_target[rank], to_channels_first(name, gradients[rank][number]))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_attention_kernel_for_inference_changes_no_more_than_rounding() -> None:
    model, layer = network("vit_b_32"), LAYERS["vit_b_32"][1]
    maps, gradients, _ = full_graph(model, pictures(), [layer], lambda output: [output.amax(1)])
    found = captured(model, pictures(), top(1), layer).features[0]
    for one, two in ((found.activations, maps[0]), (found.by_target[0], gradients[0][0])):
        expected = to_channels_first("vit_b_32", two)
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("method", [name for name in PASSES if name not in ON_PICTURES + WHOLE])
def test_before_the_layer_there_is_no_graph(method: str) -> None:
    model, layer = copy.deepcopy(network("resnet18")), LAYERS["resnet18"][-1]
    places, counts, measuring = ["head"], {"trunk": 0, "head": 0}, False

    def pack(tensor: Tensor) -> Tensor:
        counts[places[-1]] += 1
        return tensor

    def check(module: nn.Module, args: Any, output: Tensor) -> None:
        if measuring and places[-1] == "trunk":
            assert output.grad_fn is None
            assert not torch.is_grad_enabled()

    for module in model.modules():
        module.register_forward_hook(check)
    model.register_forward_pre_hook(lambda *_: places.append("trunk"))
    model.get_submodule(layer).register_forward_hook(lambda *_: places.append("head"))
    camkit.explain(model, pictures(), layer, method=method)  # the first call looks at the layers, with a graph
    measuring = True
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        camkit.explain(model, pictures(), layer, method=method)
    assert counts["trunk"] == 0
    assert (counts["head"] > 0) == (camkit.METHODS[method].needs != "head")


SCALES = (1e-6, 1e6)


BY_SCALE = ("gradcam++", "refinecam", "feature-scorecam", "expected", *ON_PICTURES)
SCALED = [name for name in METHODS if name not in BY_SCALE]
"""The methods whose formulas do not depend on the scale of the logits: Eq. 19 adds 2 to them, Score-CAM takes their
softmax, and expected gradients those of the rivals."""


@pytest.mark.parametrize("method", represented_by(*set(PASSES).intersection(SCALED), among=SCALED))
def test_scaled_logits_do_not_change_the_heatmap(method: str) -> None:
    torch.manual_seed(2)
    plain = classifier(nn.Conv2d(3, 12, 3, stride=4), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1))
    heatmaps = []
    for factor in (1, *SCALES):
        model, layer = copy.deepcopy(plain), "2" if camkit.METHODS[method].layer else None
        with torch.no_grad():
            model[-1].weight *= factor
            model[-1].bias *= factor
        heatmaps.append(np.stack([e.heatmap for e in camkit.explain(model, pictures(), layer, method=method)]))
    assert all(picture.max() == 1 for picture in heatmaps[0]), "the map is empty on this network"
    for heatmap in heatmaps[1:]:
        np.testing.assert_allclose(heatmap, heatmaps[0], atol=1e-4)


@pytest.fixture(scope="module")
def photographed(test_data: Path) -> tuple[Any, list[Path]]:
    loaded = camkit.load_model("mobilenet_v2", test_data / "weights/mobilenet_v2-coral_qat.pth", device="cpu")
    return loaded, sorted((test_data / "coco").glob("*.jpg"))[:6]


@pytest.mark.parametrize(
    "method", represented_by("gradcam", among=["gradcam", "shapleycam", "expected", "fullgrad", "guidedgradcam"])
)
def test_bf16_maps_agree_with_fp32(method: str, photographed: tuple[Any, list[Path]]) -> None:
    model, photos = photographed
    target = camkit.explain(model, photos[0]).target
    layer = "features" if camkit.METHODS[method].layer else None
    full, half = (
        camkit.explain(model, photos, layer, method=method, target=target, precision=each, batch_size=len(photos))
        for each in ("fp32", "bf16-forced")
    )
    correlations = [np.corrcoef(one.raw.ravel(), two.raw.ravel())[0, 1] for one, two in zip(full, half, strict=True)]
    # Gradients at each pixel pass through every layer, and each of these rounds them.
    assert min(correlations) > (0.95 if method in WHOLE else 0.99), correlations


def assert_equals_the_full_graph(net: nn.Module, layers: list[str]) -> None:
    """Capture two layers for one class, which is asked for twice."""
    images = torch.randn(2, 3, 64, 64)
    maps, (gradients,), _ = full_graph(net, images, layers, lambda output: [output[:, 1]])
    found = captured(net, images, [ClassTarget(1)] * 2, layers)
    for features, activations, gradient in zip(found.features, maps, gradients, strict=True):
        torch.testing.assert_close(features.activations, activations)
        for own in features.by_target:
            torch.testing.assert_close(own, gradient)


@pytest.mark.parametrize("order", [1, -1])
def test_parallel_branches_get_the_gradients_of_the_full_graph(order):
    assert_equals_the_full_graph(network("resnet18"), ["layer4.0.bn2", "layer4.0.downsample"][::order])


@pytest.mark.parametrize("volume", [1e-5, 1.0, 1000.0])
def test_fp16_gradients_neither_vanish_nor_overflow(volume):
    parts = {"features": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 2)}
    net = Net(lambda net, images: net.head(net.features(images).amax((2, 3))) * volume, **parts)
    images = torch.randn(2, 3, 8, 8)
    exact, half = (
        captured(net, images, [ClassTarget(1)], "features", precision=precision) for precision in ("fp32", "fp16")
    )
    one, two = half.features[0].by_target[0].float(), exact.features[0].by_target[0]
    assert torch.isfinite(one).all()
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3 * float(two.abs().max()))


def test_activation_checkpointing_does_not_count_as_a_second_call():
    """The blocks' activations are dropped and computed again in the backward pass."""

    def run(net: Net, images: Tensor) -> Tensor:
        maps = checkpoint(net.first, images, use_reentrant=False)
        return net.head(means(checkpoint(net.second, maps, use_reentrant=False)))

    first, second = (nn.Sequential(nn.Conv2d(count, 4, 3, padding=1), nn.ReLU()) for count in (3, 4))
    net = Net(run, first=first, second=second, head=nn.Linear(4, 2))
    assert_equals_the_full_graph(net, ["first", "second.0"])


@pytest.mark.parametrize(
    "name",
    represented_by(
        "mobilenet_v3_small",
        among=["resnet18", "mobilenet_v3_small", "densenet121", "shufflenet_v2_x0_5", "swin_t"],
    ),
)
def test_channels_last_is_used_on_a_cpu_and_changes_nothing_but_rounding(name):
    net, images = torchvision.models.get_model(name, weights=None).eval(), torch.randn(4, 3, 96, 96)
    formats: list[bool] = []
    first = next(part for part in net.modules() if isinstance(part, nn.Conv2d))
    handle = first.register_forward_pre_hook(
        lambda _module, args: formats.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )

    found = camkit.explain(net, images, target=3, method="gradcam")
    handle.remove()

    assert formats[-1]
    for one, image in zip(found, images, strict=True):
        expected = camkit.explain(net, image, target=3, method="gradcam").raw  # of one picture, in the usual format
        np.testing.assert_allclose(one.raw, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda maps: maps.view(len(maps), -1),
        lambda maps: torch.as_strided(maps, (len(maps), 256), (256, 1)),  # returns other numbers without an error
    ],
    ids=["view", "as_strided"],
)
def test_a_model_that_relies_on_the_memory_format_gets_the_ordinary_one(flatten):
    parts = {"features": nn.Conv2d(3, 4, 3, padding=1), "head": nn.Linear(4 * 8 * 8, 2)}
    net = Net(lambda net, images: net.head(flatten(net.features(images))), **parts)
    images = torch.randn(5, 3, 8, 8)
    weights = net.head.weight[1].reshape(4, 8, 8).mean((1, 2))
    for _ in range(2):
        explained = camkit.explain(net, images, "features", method="gradcam", target=1, batch_size=5)
        for number, one in enumerate(explained):
            expected = (weights[:, None, None] * net.features(images[number])).sum(0)
            np.testing.assert_allclose(one.raw, expected.detach(), rtol=1e-4, atol=1e-6)
            assert one.score == pytest.approx(net(images)[number, 1].item(), rel=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_norm_before_tokens_is_differentiated_correctly_for_one_image_too(count):
    """The gradient of the tokens comes back in another memory order."""

    def tail(net: Net, normed: Tensor) -> Tensor:
        return net.head((normed.flatten(2).transpose(1, 2) * net.gain).mean(1))

    parts = {"features": nn.Conv2d(3, 8, 4, 4), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 3)}
    gain = nn.Parameter(torch.randn(36, 8))
    net = Net(lambda net, images: tail(net, net.norm(net.features(images))), **parts, gain=gain)
    with torch.no_grad():
        for values in (net.norm.weight, net.norm.bias, net.norm.running_mean):
            values.normal_()
        net.norm.running_var.uniform_(0.5, 2)
    images = torch.randn(count, 3, 24, 24)

    maps = net.features(images).detach().requires_grad_()
    scale = (net.norm.weight / (net.norm.running_var + net.norm.eps).sqrt())[:, None, None]
    normed = (maps - net.norm.running_mean[:, None, None]) * scale + net.norm.bias[:, None, None]
    tail(net, normed)[:, 1].sum().backward()
    raws = (maps * maps.grad).sum(1).detach()

    found = camkit.explain_many(net, images, target_layer="features", target=1, method="hirescam")
    for one, expected in zip(found, raws, strict=True):
        assert np.allclose(one.raw, expected, atol=1e-5)


def test_tiny_logits_of_a_half_precision_model_have_a_map() -> None:
    inner, image = classifier(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.rand(3, 32, 32)
    model = Net(lambda net, images: net.inner(images) * 1e-5, inner=inner)
    full = camkit.explain(copy.deepcopy(model), image, "inner.1", target=0)
    half = camkit.explain(model.half(), image.half(), "inner.1", target=0)
    assert half.status == full.status == "ok"
    assert np.abs(half.heatmap - full.heatmap).max() < 0.02
