"""The user's model and process are the same after an explanation as before, whatever happens in between."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
import subprocess
import sys
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, Parts, network
from PIL import Image
from tiers import PASSES, represented_by, rows_represented
from torch import Tensor, nn
from unchanged import in_the_middle_of_training, unchanged

import camkit
from camkit.engine.attach import tensors_in
from camkit.engine.guard import eagerly
from camkit.errors import ImageError, LayerError, MethodError
from camkit.targets import Scores, Target

REFUSED = {("cam", "vgg11"), *((name, "vit") for name in ("cam", "fullgrad", "guidedbackprop", "guidedgradcam"))}
WITHOUT_CAM = tuple(name for name in PASSES if name != "cam")
SIZE = 64


@functools.cache
def trained(name: str) -> nn.Module:
    """Return torchvision's own network, some made shallow, of random weights; copy it to change it."""
    torch.manual_seed(1)
    if name == "densenet":
        return torchvision.models.DenseNet(block_config=(1, 1, 1, 2), num_classes=10).eval()
    if name != "vit":
        return network(name)
    small = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    model = torchvision.models.VisionTransformer(SIZE, 16, **small, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts with a head of zeros
    return model.eval()


class Awkward(Parts):
    """A network with a forward pass of its own; its other functions compute the same without tricks."""

    def __init__(
        self,
        run: Callable[[Any, Tensor], Tensor],
        *,
        layer: nn.Module | None = None,
        trunk: Callable[..., Tensor] = Parts.trunk,
        features: Callable[..., Tensor] = Parts.features,
        tail: Callable[..., Tensor] = Parts.tail,
    ) -> None:
        super().__init__()
        self.conv, self.layer = self.layer, layer or self.layer
        self.run, self.pure = run, {"trunk": trunk, "features": features, "tail": tail}

    def trunk(self, x: Tensor) -> Tensor:
        return self.pure["trunk"](self, x)

    def features(self, x: Tensor) -> Tensor:
        return self.pure["features"](self, x)

    def tail(self, maps: Tensor, x: Tensor) -> Tensor:
        return self.pure["tail"](self, maps, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def added_to(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    maps = net.layer(x)
    maps += x
    return Parts.tail(net, maps, x)


def added_onto_its_input(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    x += net.layer(x)
    return Parts.tail(net, x, x)


def tail_with_sigmoids(net: Awkward, maps: Tensor, x: Tensor) -> Tensor:
    scores = Parts.tail(net, maps, x)
    first = scores[:, :2].sigmoid() * 2
    rest = scores[:, 2:].sigmoid() * first[:, :1]
    return torch.cat([first, rest * rest], 1)


def sigmoids_in_place(net: Awkward, x: Tensor) -> Tensor:
    """Overwrite sigmoids that the backward pass would need, as the heads of YOLOv5 and YOLOv7 do."""
    x = net.trunk(x)
    scores = Parts.tail(net, net.layer(x), x).clone()
    scores[:, :2] = scores[:, :2].sigmoid() * 2
    rest = scores[:, 2:].sigmoid()
    rest.mul_(scores[:, :1])
    scores[:, 2:] = rest * rest
    rest.sigmoid_()
    return scores


def result_not_taken(net: Awkward, x: Tensor) -> Tensor:
    """``self.relu(x)`` for its side effect alone."""
    maps = net.conv(net.trunk(x))
    net.layer(maps)
    return net.tail(maps, x)


def written_after(net: Awkward, x: Tensor, given: Callable[[Tensor], Any] = lambda maps: maps) -> Tensor:
    """The layer returns its input, which is doubled in place afterwards, so its output changes too."""
    maps = net.conv(net.trunk(x))
    kept = net.layer(given(maps))
    maps.mul_(2)
    return Parts.tail(net, kept, x)


def in_mode(mode: Callable[[], Any], net: Awkward, x: Tensor) -> Tensor:
    with mode():
        maps = net.layer(net.trunk(x))
    return net.tail(maps, x)


def input_written(mode: Callable[[], Any], net: Awkward, x: Tensor) -> Tensor:
    """Normalise the input in place."""
    with mode():
        maps = net.layer(Parts.trunk(net, x.sub_(0.5)))
    return net.tail(maps, x)


Pair = namedtuple("Pair", ["size", "maps"])
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda maps: (maps.shape, maps), lambda output: output[1]),
    "namedtuple": (lambda maps: Pair(maps.shape, maps), lambda output: output.maps),
    "dict": (lambda maps: {"size": maps.shape, "maps": [maps]}, lambda output: output["maps"][0]),
}
PASSED_ON = CONTAINERS | {
    "itself": (lambda maps: maps, lambda output: output),
    "two": (lambda maps: (maps, maps.mean((2, 3))), lambda output: output[0]),
    "view": (lambda maps: maps.flatten(2).unflatten(2, maps.shape[2:]), lambda output: output),
}


def layer_returns(kind: str) -> Awkward:
    pack, unpack = CONTAINERS[kind]
    layer = Net(lambda net, x: pack(net.conv(x)), conv=nn.Conv2d(8, 8, 3, padding=1))
    run = lambda net, x: net.tail(unpack(net.layer(net.trunk(x))), x)  # noqa: E731
    return Awkward(run, layer=layer, features=lambda net, x: net.layer.conv(x))


def shortcut(kind: str, *, later: bool = False) -> Awkward:
    """Return a network whose layer returns its input, which a convolution beside it takes too."""
    pack, unpack = PASSED_ON[kind]

    def run(net: Awkward, x: Tensor) -> Tensor:
        x = net.trunk(x)
        maps = unpack(net.layer(x))
        if later:
            maps.relu_()
            return Parts.tail(net, x, x)
        return net.tail(maps, x)

    def tail(net: Awkward, maps: Tensor, x: Tensor) -> Tensor:
        return Parts.tail(net, maps.relu() if later else maps + net.conv(x), x)

    return Awkward(run, layer=Net(lambda _, x: pack(x)), features=lambda _, x: x, tail=tail)


def one_of_a_list(_: Net, parts: list[Tensor]) -> Tensor:
    """Take a list, as DenseNet's layers do, and return a single item itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def in_a_list(maps: Tensor) -> list[Tensor]:
    return [maps]


def plus_input(net: Awkward, maps: Tensor, x: Tensor) -> Tensor:
    return Parts.tail(net, maps + x, x)


NETWORKS: dict[str, Callable[[], Parts]] = {
    "plain": Parts,
    "ReLU in place after": lambda: Awkward(lambda net, x: net.head(net.layer(net.trunk(x)).relu_().mean((2, 3)))),
    "added to in place": lambda: Awkward(added_to, tail=plus_input),
    "added onto its input": lambda: Awkward(added_onto_its_input, tail=plus_input),
    "sigmoids in place": lambda: Awkward(sigmoids_in_place, tail=tail_with_sigmoids),
    "layer in place": lambda: Awkward(
        lambda net, x: net.tail(net.layer(net.conv(net.trunk(x))), x),
        layer=nn.ReLU(inplace=True),
        features=lambda net, x: net.conv(x).relu(),
    ),
    "result not taken": lambda: Awkward(
        result_not_taken, layer=nn.ReLU(inplace=True), features=lambda net, x: net.conv(x).relu()
    ),
    "identity, then written": lambda: Awkward(
        written_after,
        layer=nn.Identity(),
        features=lambda net, x: net.conv(x),
        tail=lambda net, maps, x: Parts.tail(net, 2 * maps, x),
    ),
    "one of a list, then written": lambda: Awkward(
        functools.partial(written_after, given=in_a_list),
        layer=Net(one_of_a_list),
        features=lambda net, x: net.conv(x),
        tail=lambda net, maps, x: Parts.tail(net, 2 * maps, x),
    ),
    "trunk without gradients": lambda: Awkward(functools.partial(in_mode, torch.no_grad)),
    "inner enable_grad": lambda: Awkward(functools.partial(in_mode, torch.enable_grad)),
    **{
        f"input written, {mode.__name__}": functools.partial(
            Awkward,
            functools.partial(input_written, mode),  # with no_grad, a second pass is needed
            trunk=lambda net, x: Parts.trunk(net, x - 0.5),
        )
        for mode in (nullcontext, torch.no_grad)
    },
    **{f"layer returns {kind}": functools.partial(layer_returns, kind) for kind in CONTAINERS},
    **{f"shortcut {kind}": functools.partial(shortcut, kind) for kind in PASSED_ON},
    "shortcut, written later": functools.partial(shortcut, "itself", later=True),
}


class Counting(Parts):
    """Writes into one buffer and replaces another in every pass, in evaluation mode too; its logits depend on both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        maps = self.layer(self.trunk(x))
        self.average = 0.5 * self.average + maps.detach().mean((0, 2, 3))
        self.empty = self.average
        return self.tail(maps, x) + self.seen + self.average.sum()


class BuildsAtFirst(Parts):
    """Creates a buffer in its first pass, and another one for another number of images."""

    def __init__(self) -> None:
        super().__init__()
        self.built = False
        self.images = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.built:
            self.register_buffer("scale", torch.full((8, 1, 1), 0.5))
            self.built = True
        if self.images != len(x):
            self.shift = torch.full((len(x), 1, 1, 1), 0.1)
            self.images = len(x)
        return self.tail(self.layer(self.trunk(x) * self.scale + self.shift), x)


class Remembers(Parts):
    """Keeps a tensor that it computes in its first pass; ``train()`` clears what evaluation cached."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def train(self, mode: bool = True) -> Parts:
        self.cache = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.stem.bias[:, None, None] * 2
        return self.tail(self.layer(self.trunk(x)) + self.cache, x)


class Collects(Parts):
    """Sets hooks in its first pass that collect outputs, and a flag that they are there, as Hugging Face models do."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            self.stem.register_forward_pre_hook(lambda _, __, ___: None, with_kwargs=True)
            self.layer.register_forward_hook(self.collect)
            self.hooked = True
        self.collected: list[Tensor] = []
        scores = super().forward(x)
        (maps,) = self.collected  # with two hooks there would be two
        return scores + maps.mean((1, 2, 3))[:, None]

    def collect(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.collected.append(output)


class Drawing(Parts):
    """Draws from all three generators in every pass, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(()) + np.random.rand() + random.random()


class SwitchesItself(Parts):
    """Changes training flags in both directions."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.norm.train(not self.norm.training)
        self.drop.train()
        return logits


def made(network: Callable[[], Parts]) -> Parts:
    torch.manual_seed(3)
    return network().eval()


def reference(model: Parts, x: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, the feature maps and their gradients, computed with the network's pure functions."""
    trunk = model.trunk(x).detach()
    maps = model.features(trunk).detach().requires_grad_()
    scores = model.tail(maps, trunk)[:, target]
    return scores.detach(), maps.detach(), torch.autograd.grad(scores.sum(), maps)[0]


def hirescam_of(maps: Tensor, gradients: Tensor) -> np.ndarray:
    return (maps * gradients).sum(1).float().numpy()


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


# --- every method and architecture, in the middle of training, with the user's hooks


def watch(model: nn.Module, fired: dict[str, int]) -> None:
    """Set one user hook of every kind."""

    def note(kind: str) -> Callable[..., None]:
        def hook(*_: object, **__: object) -> None:
            fired[kind] = fired.get(kind, 0) + 1

        return hook

    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    for module in (model, last):
        module.register_forward_pre_hook(note("before"))
        module.register_forward_hook(note("after"))
        module.register_forward_hook(note("with arguments"), with_kwargs=True, always_call=True)
        module.register_state_dict_pre_hook(note("state dict"))
        module.register_load_state_dict_post_hook(note("load"))
    last.register_full_backward_hook(note("backward"))
    next(model.parameters()).register_hook(note("parameter"))
    next(model.parameters()).register_post_accumulate_grad_hook(note("accumulated"))


@pytest.mark.parametrize(
    ("name", "method"),
    rows_represented(
        lambda name, method: name == "densenet" and method in ("gradcam", "scorecam", "fullgrad", "guidedgradcam"),
        [*itertools.product(["densenet", "vit"], PASSES), ("vgg11", "cam")],
    ),
)
def test_a_model_in_the_middle_of_training_is_restored_exactly(name: str, method: str) -> None:
    model, fired = in_the_middle_of_training(trained(name)), {}
    watch(model, fired)
    with unchanged(model):
        if (method, name) in REFUSED:
            with pytest.raises(MethodError, match=r"use '(gradcam|hirescam)'"):
                camkit.explain(model, pictures(1), method=method)
        else:
            camkit.explain(model, pictures(1), method=method, target=[1, 2])
    assert {"before", "after", "with arguments"} <= fired.keys(), "the user's own hooks still fire"
    assert not {"parameter", "accumulated"} & fired.keys(), "no gradient reaches a parameter"


@pytest.mark.parametrize("name", ["densenet", "vit"])
def test_mode_and_frozen_weights_do_not_change_the_explanation(name: str) -> None:
    expected = camkit.explain(trained(name), pictures(1), target=3)
    frozen = copy.deepcopy(trained(name)).requires_grad_(requires_grad=False)
    for model in (in_the_middle_of_training(trained(name)), frozen):
        with unchanged(model):
            found = camkit.explain(model, pictures(1), target=3)
        assert np.array_equal(found.raw, expected.raw)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning", "ignore:Using a non-full:FutureWarning")
@pytest.mark.parametrize("place", ["layer", "trunk", "head", "whole"])
@pytest.mark.parametrize(
    "set_hook", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_a_users_backward_hook_anywhere_is_no_obstacle(place: str, set_hook: str) -> None:
    model = made(Parts)
    _, maps, gradients = reference(model, pictures(), 1)
    module = {"layer": model.layer, "trunk": model.stem, "head": model.head, "whole": model}[place]
    getattr(module, set_hook)(lambda *_: None)
    with unchanged(model):
        found = camkit.explain(model, pictures(), "layer", method="hirescam", target=1)
    np.testing.assert_allclose([e.raw for e in found], hirescam_of(maps, gradients), rtol=1e-4, atol=1e-7)


# --- errors


class MishapError(Exception):
    """An error class of the user."""


def fails_with(error: type[BaseException], _: Tensor) -> Tensor:
    raise error


FAULTS = (
    "before the layer",
    "in the layer",
    "after the layer",
    "in the target",
    "in the second target",
    "in preprocess",
)


def failing_call(model: Parts, fault: str, error: type[BaseException]) -> Callable[..., Any]:
    """Plan an error, and return ``explain`` with arguments that cause it."""

    def fail(*_: object) -> Tensor:
        raise error("as planned")

    place = {"before the layer": model.stem, "in the layer": model.layer, "after the layer": model.head}.get(fault)
    if place is not None:
        place.register_forward_hook(fail) if error is KeyboardInterrupt else setattr(place, "forward", fail)
    if fault == "in preprocess":
        picture = Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8))
        return functools.partial(camkit.explain, model, [picture, picture], preprocess=fail)
    target = {"in the target": fail, "in the second target": [0, fail]}.get(fault, 0)
    return functools.partial(camkit.explain, model, pictures(), target=target)


@pytest.mark.parametrize("layer", ["layer", None])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_passes_through_and_leaves_no_trace(
    fault: str, error: type[BaseException], layer: str | None
) -> None:
    model = in_the_middle_of_training(made(Parts))
    call = failing_call(model, fault, error)
    with unchanged(model), pytest.raises(error, match="as planned"):
        call(target_layer=layer)


@pytest.mark.parametrize("method", PASSES)
def test_no_method_leaves_a_trace_of_an_exception(method: str) -> None:
    model = in_the_middle_of_training(made(Parts))
    calls = itertools.count()
    failing = 1 if camkit.METHODS[method].layer else 0

    def fail_late(module: nn.Module, args: tuple[Tensor]) -> None:
        if next(calls) >= failing:  # the pass that chooses the layer succeeds, the ones that explain fail
            raise KeyboardInterrupt("as planned")

    model.head.register_forward_pre_hook(fail_late)
    with unchanged(model), pytest.raises(KeyboardInterrupt, match="as planned"):
        camkit.explain(model, pictures(), method=method)


# --- the caller's modes


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize(
    ("surroundings", "method"),
    [
        *(("inference_mode", method) for method in ("cam", "scorecam", "fullgrad", "guidedgradcam")),
        *((name, "gradcam") for name in SURROUNDINGS),
    ],
)
def test_the_callers_mode_changes_neither_result_nor_state(surroundings: str, method: str) -> None:
    model = in_the_middle_of_training(made(Parts))
    expected = camkit.explain(model, pictures(), method=method)
    outside = pictures()
    with SURROUNDINGS[surroundings](), unchanged(model):
        found = [camkit.explain(model, x, method=method) for x in (outside, pictures())]
    assert [[e.raw.tobytes() for e in each] for each in found] == 2 * [[e.raw.tobytes() for e in expected]]


@pytest.mark.parametrize("precision", ["fp32", "bf16-forced", "fp16"])
@pytest.mark.parametrize("method", ["gradcam", "cam"])
def test_weights_still_learn_after_an_explanation_inside_the_callers_autocast(method: str, precision: str) -> None:
    model = made(Parts)
    with torch.autocast("cpu", torch.bfloat16):
        camkit.explain(model, pictures(), method=method, precision=precision)
        model(pictures()).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_an_input_that_requires_grad_gets_no_gradient_and_no_graph() -> None:
    x = pictures().requires_grad_()
    camkit.explain(made(Parts), x, target=1)
    assert x.grad is None
    assert x.requires_grad
    assert x._version == 0


# --- difficult models


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 2) for name in NETWORKS), ("plain", 1), ("input written, nullcontext", 1)]
)
def test_an_awkward_network_is_explained_correctly(name: str, count: int) -> None:
    model, x = made(NETWORKS[name]), pictures(count)
    scores, maps, gradients = reference(model, x.clone(), 2)
    assert torch.allclose(model(x.clone())[:, 2], scores), "the reference and the network are the same function"
    for given in (x, [*x]):
        with unchanged(model):
            found = camkit.explain_many(model, given, target_layer="layer", method="hirescam", target=2)
            rows = list(found)
        assert torch.equal(x, pictures(count)), "the caller's pictures are as they were"
        np.testing.assert_allclose([row.score for row in rows], scores, rtol=1e-5)
        np.testing.assert_allclose([row.raw for row in rows], hirescam_of(maps, gradients), rtol=1e-4, atol=1e-8)


class InferenceForward(Parts):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("layer", ["layer", None])
def test_a_forward_in_inference_mode_is_a_clear_error(layer: str | None) -> None:
    model = in_the_middle_of_training(made(InferenceForward))
    with unchanged(model), pytest.raises(LayerError, match="inference_mode"):
        camkit.explain(model, pictures(), layer)


class Detached(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.tail(self.layer(x).detach(), x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_the_score_is_cut_off_from_is_an_error_and_not_a_blank_map(frozen: bool) -> None:
    model = made(Detached).requires_grad_(not frozen)
    with unchanged(model), pytest.raises(LayerError, match=r"does not depend on layer 'layer'.*detach"):
        camkit.explain(model, pictures(), "layer", target=1)


@pytest.mark.parametrize("method", WITHOUT_CAM)
def test_buffers_that_a_forward_pass_writes_are_restored(method: str) -> None:
    model = in_the_middle_of_training(made(Counting))
    with unchanged(model, except_for="'seen' version"):
        first, second = (camkit.explain(model, pictures(1), method=method) for _ in range(2))
    assert first.score == second.score


@pytest.mark.parametrize("layer", ["layer", None])
@pytest.mark.parametrize("network", [BuildsAtFirst, Remembers, Collects])
@pytest.mark.parametrize("warm", [False, True])
def test_caches_that_a_forward_pass_fills_are_restored(network: type[Parts], layer: str | None, warm: bool) -> None:
    model = made(network)
    if warm:
        model(pictures(2))
    with unchanged(model):
        found = [camkit.explain(model, pictures(count), layer, target=1) for count in (1, 4, 3)]
        for error in (MishapError, KeyboardInterrupt):
            with pytest.raises(error):
                camkit.explain(model, pictures(4), layer, target=functools.partial(fails_with, error))

    assert found[0].score == pytest.approx(model(pictures(1))[0, 1].item(), abs=1e-5)


def test_a_buffer_that_waits_for_a_backward_pass_is_not_written_to() -> None:
    model = made(Parts)
    model.register_buffer("odd", torch.tensor([1.0, np.nan]))
    weight = torch.ones(2, requires_grad=True)
    waiting = (weight * model.odd).sum()
    camkit.explain(model, pictures(1), "layer", target=1)
    waiting.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("layer", ["layer", None])
def test_random_generators_are_restored_after_a_forward_pass(layer: str | None) -> None:
    model = made(Drawing)
    with unchanged(model):
        found = camkit.explain(model, pictures(1), layer, target=1)
    assert found.score == pytest.approx(model(pictures(1))[0, 1].item()), "the pass saw the numbers a plain pass sees"


def test_training_flags_that_a_forward_pass_sets_are_restored() -> None:
    for model in (made(SwitchesItself), in_the_middle_of_training(made(SwitchesItself))):
        with unchanged(model):
            camkit.explain(model, pictures(1), "layer", target=1)


@pytest.mark.parametrize("method", represented_by("gradcam", among=["gradcam", "cam", "reciprocam", "fullgrad", "fem"]))
def test_weights_of_half_precision(method: str) -> None:
    model = copy.deepcopy(trained("resnet18")).bfloat16()
    layer = None if not camkit.METHODS[method].layer else "layer4" if method == "cam" else "layer2"
    with unchanged(model):
        found = camkit.explain(model, pictures(1), layer, method=method)
    expected = camkit.explain(trained("resnet18"), pictures(1), layer, method=method, target=found.target)
    # FEM compares each cell with a threshold, which rounding to bf16 moves past some cells; FullGrad adds the absolute
    # values of the rounding in every layer.
    agreement = 0.95 if method in ("fem", "fullgrad") else 0.99
    assert np.corrcoef(found.raw.ravel(), expected.raw.ravel())[0, 1] > agreement


# --- abandoned streams


def endless() -> Iterator[Tensor]:
    while True:
        yield from pictures()


@pytest.mark.parametrize("how", ["closed", "dropped", "dropped unstarted", "raised into"])
def test_an_abandoned_stream_leaves_no_trace(how: str, tmp_path: Path) -> None:
    model = in_the_middle_of_training(made(Parts))
    photo = tmp_path / "photo.png"
    Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8)).save(photo)
    with unchanged(model):
        stream = camkit.explain_many(model, itertools.repeat(photo), preprocess=lambda _: pictures()[0], batch_size=2)
        if how != "dropped unstarted":
            for _ in range(3):
                next(stream)
            assert threading.active_count() > 1, "pictures are read ahead"
        if how == "closed":
            stream.close()
        elif how == "raised into":
            with pytest.raises(MishapError):
                stream.throw(MishapError)
        del stream


def test_between_two_results_the_model_is_the_users() -> None:
    model = in_the_middle_of_training(made(Parts))
    stream = camkit.explain_many(model, endless(), batch_size=1)
    next(stream)
    with unchanged(model):
        next(stream)


# --- several threads


@contextmanager
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start at the same moment; return their results, or raise the first exception."""
    barrier = threading.Barrier(len(jobs))

    def started(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool, eager_switching():
        return [future.result(timeout=300) for future in [pool.submit(started, job) for job in jobs]]


def test_four_threads_explain_one_model_in_the_middle_of_training() -> None:
    model = in_the_middle_of_training(trained("resnet18"))
    calls = [
        ("gradcam", "layer4", 1),
        ("layercam", "layer2", 2),
        ("cam", "layer4", 3),
        ("hirescam", ["layer3", "layer4"], 4),
    ]

    def maps(number: int, times: int) -> list[bytes]:
        method, layer, target = calls[number]
        x = pictures(4)[number]
        return [camkit.explain(model, x, layer, method=method, target=target).raw.tobytes() for _ in range(times)]

    alone = [maps(number, 1) for number in range(4)]
    with unchanged(model):
        together = run_together(*(functools.partial(maps, number, 6) for number in range(4)))
    assert together == [6 * each for each in alone]


def overlapping(model: nn.Module) -> None:
    """Explain in two threads: the second starts during the first one's pass and finishes after it."""
    first_in, second_in, first_done = threading.Event(), threading.Event(), threading.Event()

    def of_first(logits: Tensor) -> Tensor:
        first_in.set()
        assert second_in.wait(60)
        return logits[:, 0]

    def of_second(logits: Tensor) -> Tensor:
        second_in.set()
        assert first_done.wait(60)
        return logits[:, 0]

    def first() -> None:
        camkit.explain(model, pictures(1), "layer", target=of_first)
        first_done.set()

    def second() -> None:
        assert first_in.wait(60)
        camkit.explain(model, pictures(1), "layer", target=of_second)

    run_together(first, second)


@pytest.mark.parametrize("network", [Parts, Drawing, Counting])
def test_overlapping_calls_leave_no_trace(network: type[Parts]) -> None:
    model = in_the_middle_of_training(made(network))
    with unchanged(model, except_for="'seen' version"):
        overlapping(model)


def test_a_plain_pass_survives_hooks_that_are_removed_while_it_is_in_the_layer() -> None:
    model, x = made(Parts), pictures(1)
    expected = model(x)
    explaining, go_on = threading.Event(), threading.Event()

    def target(logits: Tensor) -> Tensor:
        explaining.set()
        assert go_on.wait(60)
        return logits[:, 0]

    explainer = threading.Thread(target=camkit.explain, args=(model, x, "layer"), kwargs={"target": target})

    def users(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            go_on.set()
            explainer.join(60)

    model.layer.register_forward_hook(users)
    explainer.start()
    assert explaining.wait(60)
    assert torch.equal(model(x), expected)


VIEW_CHANGED_THROUGH_AN_ALIAS = """
import torch, camkit.hooks
from torch import nn

class Aliased(nn.Conv2d):
    def forward(self, x):
        maps = super().forward(x)
        view = maps.view(maps.shape)
        maps[:, :1].add_(1)
        return view

head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
net = nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1), Aliased(3, 4, 3, 1, 1), head).eval()
assert camkit.explain(net, torch.randn(3, 16, 16), ["0", "1"], target=1).raw.any()
with camkit.hooks.edit_gradients(net, {"1": lambda gradient: 0 * gradient}):
    net(torch.randn(1, 3, 16, 16))[0, 1].backward()
"""


@pytest.mark.extended
def test_a_hook_on_a_view_changed_through_an_alias_does_not_end_the_process() -> None:  # pytorch issue 196459
    subprocess.run([sys.executable, "-c", VIEW_CHANGED_THROUGH_AN_ALIAS], check=True)


# --- nothing stays in memory


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def followed(model: nn.Module) -> list[weakref.ref[Tensor]]:
    """Return a list that collects weak references to all tensors that modules receive or return."""
    found: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda _, args: found.extend(map(weakref.ref, args)))
        module.register_forward_hook(lambda _, args, output: found.append(weakref.ref(output)))
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("layer", ["layer4", None])
@pytest.mark.parametrize("method", represented_by("gradcam", among=["gradcam", "cam", "scorecam", "fullgrad"]))
def test_no_tensor_outlives_the_call(method: str, layer: str | None) -> None:
    layer = layer if camkit.METHODS[method].layer else None
    model = copy.deepcopy(trained("resnet18"))
    found, x = followed(model), pictures()
    found.append(weakref.ref(x))
    explained = camkit.explain(model, x, layer, method=method, target=[0, None])
    del x
    assert len(explained) == 4
    assert len(found) > 20
    assert not [reference for reference in found if reference() is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("layer", ["layer", None])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_tensor_outlives_an_exception(fault: str, layer: str | None) -> None:
    model = made(Parts)
    call = failing_call(model, fault, KeyboardInterrupt)
    found = followed(model)
    with suppress(KeyboardInterrupt):
        call(target_layer=layer)
    del call
    assert found or fault == "in preprocess"
    assert not [reference for reference in found if reference() is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("images", [["nowhere.jpg"], [torch.full((3, SIZE, SIZE), torch.nan)]])
def test_no_tensor_outlives_a_picture_that_cannot_be_read(images: list[Any]) -> None:
    model, x = made(Parts), pictures()
    found = followed(model)
    found.append(weakref.ref(x))
    try:
        for _ in camkit.explain_many(model, [x, *images], "layer", batch_size=1):
            pass
    except ImageError:
        pass
    del x
    assert not [reference for reference in found if reference() is not None]


class Preparation:
    """A preprocessing that owns a tensor, as a model's own preprocessing does."""

    def __init__(self) -> None:
        self.mean = torch.full((3, 1, 1), 0.5)

    def prepare(self, picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 - self.mean


@pytest.mark.usefixtures("no_collector")
def test_neither_the_model_nor_the_preprocessing_is_kept() -> None:
    model, preparation = made(Parts), Preparation()
    kept = [weakref.ref(model), weakref.ref(model.stem.weight), weakref.ref(preparation.mean)]
    camkit.explain(model, Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8)), preprocess=preparation.prepare)
    del model, preparation
    assert [reference() for reference in kept] == [None, None, None]


# --- the compiler, and what a forward pass writes in unusual ways


def test_two_threads_at_once_leave_the_compiler_as_it_was() -> None:
    import torch._dynamo  # noqa: PLC0415 - as when something has been compiled

    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def second() -> None:
        first_in.wait()
        with eagerly():
            second_in.set()
            first_out.wait()

    runs: list[str] = []

    @torch.compile(backend=lambda graph, _: lambda *args: (runs.append("compiled"), graph(*args))[1])
    def twice(x: Tensor) -> Tensor:
        return x * 2

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second)
        with eagerly():
            first_in.set()
            second_in.wait()
        twice(torch.ones(1))
        while_the_other_is_inside = list(runs)
        first_out.set()
        waiting.result()
    assert not while_the_other_is_inside
    twice(torch.ones(1))
    assert runs == ["compiled"]


class WritingEverything(nn.Module):
    """A network whose forward pass changes whatever it can."""

    def __init__(self, *, weights: bool = False) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.large = nn.Linear(4, 400)
        self.table = torch.zeros(3, 3)
        self.norm, self.empty = nn.BatchNorm2d(4), nn.Identity()
        self._weights = weights

    def forward(self, images: Tensor) -> Tensor:
        maps = self.conv(images)
        with torch.no_grad():
            self.table += 1
            if self._weights:
                self.large.weight.mul_(0.5)
        self.norm.momentum = 0.5
        self.empty.register_parameter("added", nn.Parameter(torch.ones(1)))
        self.head.bias.requires_grad_(not self.head.bias.requires_grad)
        self.head.weight = nn.Parameter(self.head.weight.detach() * 2)
        return self.head(maps.mean((2, 3)))


def test_everything_that_a_forward_pass_of_ones_own_writes_is_restored() -> None:
    model, image = WritingEverything(), pictures(1)[0]
    with unchanged(model):
        explanation = camkit.explain(model, image, "conv", target=0)
    assert not model.table.any()
    assert explanation.status != "no_influence"


def test_weights_that_a_forward_pass_writes_are_named() -> None:
    model = WritingEverything(weights=True)
    with pytest.warns(UserWarning, match=r"writes into its own parameters \(large.weight\), which camkit cannot undo"):
        camkit.explain(model, torch.randn(3, SIZE, SIZE), "conv", target=0)


# --- functions of the user that work in place


@pytest.mark.parametrize("name", ["gradcam", "scorecam", "reciprocam", "fullgrad", "expected", "legrad"])
def test_a_method_of_the_users_may_overwrite_what_it_gets(name: str) -> None:
    """A copy of each method, which then clears its arguments, gives the same maps for both targets."""
    method = camkit.METHODS[name]

    def clearing(*given: Any) -> Tensor:
        weights = method.weights(*given).clone()
        for tensor in tensors_in(given):
            tensor.zero_()
        return weights

    model, image = trained("vit") if method.reads_attention else made(Parts), pictures(1)[0]
    layer = "layer" if method.layer else None
    found, expected = (
        camkit.explain(model, image, layer, target=[1, 2], method=each)
        for each in (replace(method, weights=clearing), name)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.raw, other.raw)
        assert one.raw.any()


class Doubled(Target):
    """Doubles all scores in place, in a way that a user might write."""

    def __call__(self, output: Any, batch: int) -> Scores:
        output["logits"] *= 2
        return Scores(output["logits"][:, 1])


def doubled(output: Any) -> Tensor:
    output["logits"] *= 2
    score: Tensor = output["logits"][:, 1]
    return score


class InADictionary(Parts):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


@pytest.mark.parametrize("method", ["gradcam", "ablationcam", "rise", "eigencam"])
@pytest.mark.parametrize("target", [doubled, Doubled()])
def test_a_target_of_the_users_may_overwrite_the_output(target: Any, method: str) -> None:
    model, image = made(InADictionary), pictures(1)[0]
    own, *found = camkit.explain(model, image, target=[target, 1, 2], method=method)
    expected = camkit.explain(model, image, target=[1, 2], method=method)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.raw, other.raw)
        assert one.score == other.score
    assert own.score == pytest.approx(2 * found[0].score)


# --- models that overwrite what their backward passes need


@pytest.mark.parametrize("name", WITHOUT_CAM)
def test_every_method_explains_a_model_with_sigmoids_in_place(name: str) -> None:
    layer = "layer" if camkit.METHODS[name].layer else None
    model, image = made(NETWORKS["sigmoids in place"]), pictures(1)[0]
    elsewhere = made(lambda: Awkward(Parts.forward, tail=tail_with_sigmoids))
    expected = camkit.explain(elsewhere, image, layer, target=2, method=name)
    with unchanged(model):
        found = [camkit.explain(model, image, layer, target=2, method=name) for _ in range(2)]
    for one in found:
        np.testing.assert_allclose(one.raw, expected.raw, rtol=0, atol=1e-6 * np.abs(expected.raw).max())
    assert expected.raw.any()
