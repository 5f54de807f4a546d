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
from contextlib import contextmanager, nullcontext
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
from tiny_models import gradient_times_activation
from torch import Tensor, nn
from unchanged import compiler_switch, in_the_middle_of_training, unchanged

import camkit
from camkit.engine.attach import tensors_in
from camkit.errors import ImageError, LayerError, MethodError
from camkit.targets import Scores, Target, top

ATTENTION = tuple(name for name, method in camkit.METHODS.items() if method.reads_attention)
REFUSED = {("cam", "vgg11"), *((name, "vit") for name in ("cam", "fullgrad", "guidedbackprop", "guidedgradcam"))}
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


def made(network: Callable[[], Parts]) -> Parts:
    torch.manual_seed(3)
    return network().eval()


def for_method(name: str) -> nn.Module:
    """Return a network that a method can explain, in the middle of training."""
    return in_the_middle_of_training(trained("vit") if name in ATTENTION else made(Parts))


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


class Awkward(Parts):
    """A network with a convolution, a layer and a forward pass of its own."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.layer = self.layer, layer or self.layer
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def added(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    return net.tail(net.layer(x) + x, x)


def added_to(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    maps = net.layer(x)
    maps += x
    return net.tail(maps, x)


def added_onto_its_input(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    x += net.layer(x)
    return net.tail(x, x)


def sigmoids(net: Awkward, x: Tensor) -> Tensor:
    scores = Parts.forward(net, x)
    first = scores[:, :2].sigmoid() * 2
    rest = scores[:, 2:].sigmoid() * first[:, :1]
    return torch.cat([first, rest * rest], 1)


def sigmoids_in_place(net: Awkward, x: Tensor) -> Tensor:
    """Overwrite sigmoids that the backward pass would need, as the heads of YOLOv5 and YOLOv7 do."""
    scores = Parts.forward(net, x).clone()
    scores[:, :2] = scores[:, :2].sigmoid() * 2
    rest = scores[:, 2:].sigmoid()
    rest.mul_(scores[:, :1])
    scores[:, 2:] = rest * rest
    rest.sigmoid_()
    return scores


def after_a_convolution(net: Awkward, x: Tensor) -> Tensor:
    return net.tail(net.layer(net.conv(net.trunk(x))), x)


def result_not_taken(net: Awkward, x: Tensor) -> Tensor:
    """``self.relu(x)`` for its side effect alone."""
    maps = net.conv(net.trunk(x))
    net.layer(maps)
    return net.tail(maps, x)


def doubled_after(net: Awkward, x: Tensor) -> Tensor:
    return net.tail(2 * net.layer(net.conv(net.trunk(x))), x)


def written_after(net: Awkward, x: Tensor, given: Callable[[Tensor], Any] = lambda maps: maps) -> Tensor:
    """The layer returns its input, which is doubled in place afterwards, so its output changes too."""
    maps = net.conv(net.trunk(x))
    kept = net.layer(given(maps))
    maps.mul_(2)
    return net.tail(kept, x)


def in_mode(mode: Callable[[], Any], net: Awkward, x: Tensor) -> Tensor:
    with mode():
        maps = net.layer(net.trunk(x))
    return net.tail(maps, x)


def input_written(mode: Callable[[], Any], net: Awkward, x: Tensor) -> Tensor:
    """Normalise the input in place."""
    with mode():
        maps = net.layer(net.trunk(x.sub_(0.5)))
    return net.tail(maps, x)


def input_changed(net: Awkward, x: Tensor) -> Tensor:
    return net.tail(net.layer(net.trunk(x - 0.5)), x)


Pair = namedtuple("Pair", ["size", "maps"])
PASSED_ON: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda maps: maps, lambda output: output),
    "tuple": (lambda maps: (maps.shape, maps), lambda output: output[1]),
    "namedtuple": (lambda maps: Pair(maps.shape, maps), lambda output: output.maps),
    "dict": (lambda maps: {"size": maps.shape, "maps": [maps]}, lambda output: output["maps"][0]),
    "two": (lambda maps: (maps, maps.mean((2, 3))), lambda output: output[0]),
    "view": (lambda maps: maps.flatten(2).unflatten(2, maps.shape[2:]), lambda output: output),
}


def shortcut(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Awkward:
    """Return a network whose layer returns its input, which a convolution beside it takes too."""

    def run(net: Awkward, x: Tensor) -> Tensor:
        x = net.trunk(x)
        maps = unpack(net.layer(x))
        return net.tail(maps + net.conv(x), x)

    return Awkward(run, Net(lambda _, x: pack(x)))


def shortcut_written_later(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    net.layer(x).relu_()
    return net.tail(x, x)


def one_of_a_list(_: Net, parts: list[Tensor]) -> Tensor:
    """Take a list, as DenseNet's layers do, and return a single item itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


in_a_list = functools.partial(written_after, given=lambda maps: [maps])
NETWORKS: dict[str, tuple[Callable[[], Parts], Callable[[], Parts]]] = {
    "plain": (Parts, Parts),
    "ReLU in place after": (
        lambda: Awkward(lambda net, x: net.head(net.layer(net.trunk(x)).relu_().mean((2, 3)))),
        Parts,
    ),
    "added to in place": (lambda: Awkward(added_to), lambda: Awkward(added)),
    "added onto its input": (lambda: Awkward(added_onto_its_input), lambda: Awkward(added)),
    "sigmoids in place": (lambda: Awkward(sigmoids_in_place), lambda: Awkward(sigmoids)),
    "layer in place": (
        lambda: Awkward(after_a_convolution, nn.ReLU(inplace=True)),
        lambda: Awkward(after_a_convolution, nn.ReLU()),
    ),
    "result not taken": (
        lambda: Awkward(result_not_taken, nn.ReLU(inplace=True)),
        lambda: Awkward(after_a_convolution, nn.ReLU()),
    ),
    "identity, then written": (
        lambda: Awkward(written_after, nn.Identity()),
        lambda: Awkward(doubled_after, nn.Identity()),
    ),
    "one of a list, then written": (
        lambda: Awkward(in_a_list, Net(one_of_a_list)),
        lambda: Awkward(doubled_after, nn.Identity()),
    ),
    "trunk without gradients": (lambda: Awkward(functools.partial(in_mode, torch.no_grad)), Parts),
    "inner enable_grad": (lambda: Awkward(functools.partial(in_mode, torch.enable_grad)), Parts),
    **{
        f"input written, {mode.__name__}": (  # with no_grad, a second pass is needed
            functools.partial(Awkward, functools.partial(input_written, mode)),
            lambda: Awkward(input_changed),
        )
        for mode in (nullcontext, torch.no_grad)
    },
    **{
        f"shortcut {kind}": (functools.partial(shortcut, *way), functools.partial(shortcut, *PASSED_ON["itself"]))
        for kind, way in PASSED_ON.items()
    },
    "shortcut, written later": (
        lambda: Awkward(shortcut_written_later, nn.Identity()),
        lambda: Awkward(Parts.forward, nn.Identity()),
    ),
}


class Writing(Parts):
    """A network whose forward pass changes whatever it can, in evaluation mode too; its scores depend on most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("empty", None)
        self.cache: Tensor | None = None
        self.table = torch.zeros(3, 3)
        self.built, self.images = False, 0

    def train(self, mode: bool = True) -> Parts:
        """Clear what evaluation cached."""
        self.cache = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if not self.built:  # as Hugging Face's models, which set hooks that collect outputs
            self.register_buffer("scale", torch.full((8, 1, 1), 0.5))
            self.stem.register_forward_pre_hook(lambda _, __, ___: None, with_kwargs=True)
            self.layer.register_forward_hook(lambda *called: self.collected.append(called[-1]))
            self.built = True
        if self.images != len(x):
            self.shift = torch.full((len(x), 1, 1, 1), 0.1)
            self.images = len(x)
        if self.cache is None:
            self.cache = self.stem.bias[:, None, None] * 2
        self.collected: list[Tensor] = []
        maps = self.layer(self.trunk(x) * self.scale + self.shift) + self.cache
        (collected,) = self.collected  # with two hooks there would be two
        return self.tail(maps, x) + collected.mean((1, 2, 3))[:, None] + self.written(maps)

    def written(self, maps: Tensor) -> Tensor:
        """Write into buffers and attributes, switch flags, and draw from all three generators."""
        with torch.no_grad():
            self.seen += 1
            self.table += 1
        self.average = 0.5 * self.average + maps.detach().mean((0, 2, 3))
        self.empty = self.average
        self.norm.momentum = 0.5
        self.drop.train()
        self.drop.register_parameter("added", nn.Parameter(torch.ones(1)))
        self.head.bias.requires_grad_(not self.head.bias.requires_grad)
        self.head.weight = nn.Parameter(self.head.weight.detach() * 2)
        drawn = torch.rand(()) + np.random.rand() + random.random()
        return self.seen + self.average.sum() + self.table.sum() + drawn


def reference(model: Parts, x: Tensor, target: int) -> tuple[Tensor, np.ndarray]:
    """Return the scores and the map of HiResCAM, from autograd."""

    def score() -> Tensor:
        return model(x.clone())[:, target]

    raw = gradient_times_activation(model, "layer", lambda: score().sum()).sum(1).numpy()
    model.zero_grad()
    return score().detach(), raw


def watch(model: nn.Module, fired: set[str]) -> None:
    """Set one user hook of every kind."""

    def note(kind: str) -> Callable[..., None]:
        return lambda *_, **__: fired.add(kind)

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
        lambda name, method: (
            (name == "densenet" and method in ("gradcam", "scorecam", "fullgrad", "guidedgradcam"))
            or method in ("rollout", "legrad")
        ),
        [
            *itertools.product(["densenet", "vit"], PASSES),
            ("vgg11", "cam"),
            *itertools.product(["vit"], ATTENTION),
        ],
    ),
)
def test_a_model_in_the_middle_of_training_is_restored_exactly(name: str, method: str) -> None:
    model, fired = in_the_middle_of_training(trained(name)), set()
    watch(model, fired)
    with unchanged(model):
        if (method, name) in REFUSED:
            with pytest.raises(MethodError, match=r"use '(gradcam|hirescam)'"):
                camkit.explain(model, pictures(1), method=method)
        else:
            camkit.explain(model, pictures(1), method=method, target=[1, 2])
    assert {"before", "after", "with arguments"} <= fired, "the user's own hooks still fire"
    assert not {"parameter", "accumulated"} & fired, "no gradient reaches a parameter"


@pytest.mark.parametrize(
    ("name", "method"), [("densenet", "gradcam"), ("vit", "gradcam"), ("vit", "rollout"), ("vit", "legrad")]
)
def test_mode_and_frozen_weights_do_not_change_the_explanation(name: str, method: str) -> None:
    expected = camkit.explain(trained(name), pictures(1), method=method, target=3)
    frozen = copy.deepcopy(trained(name)).requires_grad_(requires_grad=False)
    for model in (in_the_middle_of_training(trained(name)), frozen):
        with unchanged(model):
            found = camkit.explain(model, pictures(1), method=method, target=3)
        assert np.array_equal(found.raw, expected.raw)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning", "ignore:Using a non-full:FutureWarning")
@pytest.mark.parametrize("place", ["layer", "stem", "head", ""])
@pytest.mark.parametrize(
    "set_hook", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_a_users_backward_hook_anywhere_is_no_obstacle(place: str, set_hook: str) -> None:
    model = made(Parts)
    _, expected = reference(model, pictures(), 1)
    getattr(model.get_submodule(place), set_hook)(lambda *_: None)
    with unchanged(model):
        found = camkit.explain(model, pictures(), "layer", method="hirescam", target=1)
    np.testing.assert_allclose([e.raw for e in found], expected, rtol=1e-4, atol=1e-7)


def tensors_alive() -> set[int]:
    """Return the identities of all tensors in the process."""
    return {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor)}


@contextmanager
def no_tensor_stays() -> Iterator[None]:
    """Assert that all tensors made in the block are gone after it; those in a cycle would wait for the collector."""
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        yield
        assert len(tensors_alive() - before) == 0
    finally:
        gc.enable()


def failing_call(model: Parts, fault: str, error: type[BaseException]) -> Callable[..., Any]:
    """Plan an error, and return ``explain`` with arguments that cause it."""

    def fail(*_: object) -> Tensor:
        raise error("as planned")

    if fault in ("stem", "layer", "head"):
        place = model.get_submodule(fault)
        place.register_forward_hook(fail) if error is KeyboardInterrupt else setattr(place, "forward", fail)
    if fault == "preprocess":
        picture = Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8))
        return functools.partial(camkit.explain, model, [picture, picture], preprocess=fail)
    target = {"target": fail, "second target": [0, fail]}.get(fault, 0)
    return functools.partial(camkit.explain, model, pictures(), target=target)


@pytest.mark.parametrize("layer", ["layer", None])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("fault", ["stem", "layer", "head", "target", "second target", "preprocess"])
def test_an_exception_passes_through_and_leaves_no_trace(
    fault: str, error: type[BaseException], layer: str | None
) -> None:
    model = in_the_middle_of_training(made(Parts))
    call = failing_call(model, fault, error)
    with no_tensor_stays(), unchanged(model), pytest.raises(error, match="as planned"):
        call(target_layer=layer)


@pytest.mark.parametrize("method", [*PASSES, *ATTENTION])
def test_no_method_leaves_a_trace_of_an_exception(method: str) -> None:
    model, calls = for_method(method), itertools.count()
    # The pass that chooses the layer succeeds, the ones that explain fail; LeGrad runs the head once for each layer.
    failing = 2 if method == "legrad" else int(method in ATTENTION or camkit.METHODS[method].layer)

    def fail_late(module: nn.Module, args: tuple[Tensor]) -> None:
        if next(calls) >= failing:
            raise KeyboardInterrupt("as planned")

    getattr(model, "head" if isinstance(model, Parts) else "heads").register_forward_pre_hook(fail_late)
    with unchanged(model), pytest.raises(KeyboardInterrupt, match="as planned"):
        camkit.explain(model, pictures(), method=method)


class OwnMode(torch.overrides.TorchFunctionMode):
    """A mode of the caller's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a mode of one's own": OwnMode,
}


@pytest.mark.parametrize(
    ("surroundings", "method"),
    [
        *(("inference_mode", method) for method in ("cam", "scorecam", "ablationcam", "fullgrad", "guidedgradcam")),
        *itertools.product(SURROUNDINGS, ["gradcam", "chefer"]),
    ],
)
def test_the_callers_mode_changes_neither_result_nor_state(surroundings: str, method: str) -> None:
    model, outside = for_method(method), pictures()
    expected = camkit.explain(model, pictures(), method=method)
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
    assert (x.grad, x.requires_grad, x._version) == (None, True, 0)


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 2) for name in NETWORKS), ("plain", 1), ("input written, nullcontext", 1)]
)
def test_an_awkward_network_is_explained_correctly(name: str, count: int) -> None:
    model, plain = map(made, NETWORKS[name])
    x = pictures(count)
    scores, expected = reference(plain, x, 2)
    assert torch.allclose(model(x.clone())[:, 2], scores), "the reference and the network are the same function"
    for given in (x, [*x]):
        with unchanged(model):
            rows = list(camkit.explain_many(model, given, target_layer="layer", method="hirescam", target=2))
        assert torch.equal(x, pictures(count)), "the caller's pictures are as they were"
        np.testing.assert_allclose([row.score for row in rows], scores, rtol=1e-5)
        np.testing.assert_allclose([row.raw for row in rows], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in PASSES if name != "cam"])
def test_every_method_explains_a_model_with_sigmoids_in_place(name: str) -> None:
    layer = "layer" if camkit.METHODS[name].layer else None
    model, plain = map(made, NETWORKS["sigmoids in place"])
    image = pictures(1)[0]
    expected = camkit.explain(plain, image, layer, target=2, method=name)
    with unchanged(model):
        found = [camkit.explain(model, image, layer, target=2, method=name) for _ in range(2)]
    for one in found:
        np.testing.assert_allclose(one.raw, expected.raw, rtol=0, atol=1e-6 * np.abs(expected.raw).max())
    assert expected.raw.any()


def detached(net: Awkward, x: Tensor) -> Tensor:
    x = net.trunk(x)
    return net.tail(net.layer(x).detach(), x)


@pytest.mark.parametrize(
    ("run", "layer", "frozen", "said"),
    [
        (torch.inference_mode()(Parts.forward), "layer", False, "inference_mode"),
        (torch.inference_mode()(Parts.forward), None, False, "inference_mode"),
        (detached, "layer", False, r"does not depend on layer 'layer'.*detach"),
        (detached, "layer", True, r"does not depend on layer 'layer'.*detach"),
    ],
)
def test_a_layer_the_score_is_cut_off_from_is_an_error_and_not_a_blank_map(
    run: Callable[[Awkward, Tensor], Tensor], layer: str | None, frozen: bool, said: str
) -> None:
    model = in_the_middle_of_training(made(lambda: Awkward(run))).requires_grad_(not frozen)
    with unchanged(model), pytest.raises(LayerError, match=said):
        camkit.explain(model, pictures(), layer, target=1)


@pytest.mark.parametrize("method", [*(name for name in PASSES if name != "cam"), *ATTENTION])
def test_a_batch_of_several_targets_equals_its_pictures_one_by_one(method: str) -> None:
    model, targets = for_method(method), [0, top(2), lambda logits: logits[:, 1] / 2]
    together = camkit.explain(model, pictures(), method=method, target=targets)
    alone = [row for image in pictures() for row in camkit.explain(model, image, method=method, target=targets)]
    assert len(together) == len(alone) == 8
    close = 0 if camkit.METHODS[method].one_by_one else 1e-6
    for one, other in zip(together, alone, strict=True):
        assert one.target == other.target
        np.testing.assert_allclose(one.raw, other.raw, rtol=100 * close, atol=close * np.abs(other.raw).max())


WRITTEN = "'seen' version"
"""camkit writes the old values back into a buffer, which counts as a change to PyTorch."""


@pytest.mark.parametrize("method", [name for name in PASSES if name != "cam"])
def test_everything_that_a_forward_pass_writes_is_restored(method: str) -> None:
    model = in_the_middle_of_training(made(Writing))
    with unchanged(model, except_for=WRITTEN):
        first, second = (camkit.explain(model, pictures(1), method=method) for _ in range(2))
    assert first.score == second.score


class MishapError(Exception):
    """An error class of the user."""


@pytest.mark.parametrize("layer", ["layer", None])
@pytest.mark.parametrize("warm", [False, True])
def test_caches_that_a_forward_pass_fills_are_restored_after_errors_too(layer: str | None, warm: bool) -> None:
    model = made(Writing)
    if warm:
        model(pictures(2))

    def fails_with(error: type[BaseException], _: Tensor) -> Tensor:
        raise error

    with unchanged(model, except_for=WRITTEN):
        found = [camkit.explain(model, pictures(count), layer, target=1) for count in (1, 4, 3)]
        for error in (MishapError, KeyboardInterrupt):
            with pytest.raises(error):
                camkit.explain(model, pictures(4), layer, target=functools.partial(fails_with, error))
    model.eval()
    expected = model(pictures(1))[0, 1].item()
    assert found[0].score == pytest.approx(expected, abs=1e-5), "the pass saw what a plain pass sees"


def test_weights_that_a_forward_pass_writes_are_named() -> None:
    def run(net: Awkward, x: Tensor) -> Tensor:
        net.head.weight.data.mul_(1)
        with torch.no_grad():
            net.head.weight.mul_(0.5)
        return Parts.forward(net, x)

    with pytest.warns(UserWarning, match=r"writes into its own parameters \(head.weight\), which camkit cannot undo"):
        camkit.explain(made(lambda: Awkward(run)), pictures(1)[0], "layer", target=0)


def test_a_buffer_that_waits_for_a_backward_pass_is_not_written_to() -> None:
    model = made(Parts)
    model.register_buffer("odd", torch.tensor([1.0, np.nan]))
    weight = torch.ones(2, requires_grad=True)
    waiting = (weight * model.odd).sum()
    camkit.explain(model, pictures(1), "layer", target=1)
    waiting.backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    "method",
    represented_by("gradcam", *ATTENTION, among=["gradcam", "cam", "reciprocam", "fullgrad", "fem", *ATTENTION]),
)
def test_weights_of_half_precision(method: str) -> None:
    whole = trained("vit" if method in ATTENTION else "resnet18")
    model = copy.deepcopy(whole).bfloat16()
    layer = None if not camkit.METHODS[method].layer else "layer4" if method == "cam" else "layer2"
    with unchanged(model):
        found = camkit.explain(model, pictures(1), layer, method=method)
    expected = camkit.explain(whole, pictures(1), layer, method=method, target=found.target)
    # FEM compares each cell with a threshold, which rounding to bf16 moves past some cells; FullGrad adds the absolute
    # values of the rounding in every layer.
    agreement = 0.95 if method in ("fem", "fullgrad") else 0.97 if method in ATTENTION else 0.99
    assert np.corrcoef(found.raw.ravel(), expected.raw.ravel())[0, 1] > agreement
    assert found.raw.dtype == np.float32


@pytest.mark.parametrize("precision", ["bf16-forced", "fp16"])
@pytest.mark.parametrize("method", ["scorecam", "fullgrad", "rollout", "legrad"])
def test_passes_of_half_precision(method: str, precision: Any) -> None:
    """The parts of FullGrad add up to rounding."""
    model = for_method(method)
    full, half = (
        camkit.explain(model, pictures(1)[0], method=method, target=3, precision=each) for each in ("fp32", precision)
    )
    assert np.corrcoef(full.raw.ravel(), half.raw.ravel())[0, 1] > 0.99
    assert not np.array_equal(full.raw, half.raw)


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
    stream = camkit.explain_many(model, itertools.cycle(pictures()), batch_size=1)
    next(stream)
    with unchanged(model):
        next(stream)


def run_together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start at the same moment; return their results, or raise the first exception."""
    barrier, before = threading.Barrier(len(jobs)), sys.getswitchinterval()

    def started(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [future.result(timeout=300) for future in [pool.submit(started, job) for job in jobs]]
    finally:
        sys.setswitchinterval(before)


CALLS = {
    "resnet18": [("gradcam", "layer4"), ("layercam", "layer2"), ("cam", "layer4"), ("hirescam", ["layer3", "layer4"])],
    "vit": [(name, None) for name in ATTENTION],
}


@pytest.mark.parametrize("name", CALLS)
def test_four_threads_explain_one_model_in_the_middle_of_training(name: str) -> None:
    model = in_the_middle_of_training(trained(name))

    def maps(number: int, times: int) -> list[bytes]:
        method, layer = CALLS[name][number]
        x = pictures(4)[number]
        return [camkit.explain(model, x, layer, method=method, target=number).raw.tobytes() for _ in range(times)]

    alone = [maps(number, 1) for number in range(4)]
    with unchanged(model):
        together = run_together(*(functools.partial(maps, number, 6) for number in range(4)))
    assert together == [6 * each for each in alone]


@pytest.mark.parametrize("network", [Parts, Writing])
def test_overlapping_calls_leave_no_trace(network: type[Parts]) -> None:
    """The second call starts during the first one's pass and finishes after it."""
    pytest.importorskip("torch._dynamo")  # as when something has been compiled
    model = in_the_middle_of_training(made(network))
    first_in, second_in, first_done = threading.Event(), threading.Event(), threading.Event()

    def of_first(logits: Tensor) -> Tensor:
        first_in.set()
        assert second_in.wait(60)
        return logits[:, 0]

    def of_second(logits: Tensor) -> Tensor:
        second_in.set()
        assert first_done.wait(60)
        assert compiler_switch() == "force_eager", "compiled code would ignore camkit's hooks"
        return logits[:, 0]

    def first() -> None:
        camkit.explain(model, pictures(1), "layer", target=of_first)
        first_done.set()

    def second() -> None:
        assert first_in.wait(60)
        camkit.explain(model, pictures(1), "layer", target=of_second)

    with unchanged(model, except_for=WRITTEN):
        run_together(first, second)


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


@pytest.mark.parametrize("layer", ["layer4", None])
@pytest.mark.parametrize(
    "method", represented_by("gradcam", *ATTENTION, among=["gradcam", "cam", "scorecam", "fullgrad", *ATTENTION])
)
def test_no_tensor_outlives_the_call(method: str, layer: str | None) -> None:
    layer = layer if camkit.METHODS[method].layer else None
    model = copy.deepcopy(trained("vit" if method in ATTENTION else "resnet18"))
    explain = functools.partial(camkit.explain, model, target_layer=layer, method=method, target=[0, None])
    explain(pictures())  # the first call reads the scenes that show where cells look
    returned: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *called: returned.extend(map(weakref.ref, tensors_in(called[-1]))))
    with no_tensor_stays():
        found = explain(pictures())
        assert (len(found), len(returned) > 10) == (4, True)
        assert not [reference for reference in returned if reference() is not None]
        del found


@pytest.mark.parametrize("images", [["nowhere.jpg"], [torch.full((3, SIZE, SIZE), torch.nan)]])
def test_no_tensor_outlives_a_picture_that_cannot_be_read(images: list[Any]) -> None:
    model = made(Parts)
    with no_tensor_stays(), pytest.raises(ImageError):
        list(camkit.explain_many(model, [pictures(), *images], "layer", batch_size=1))


@pytest.mark.parametrize("name", ["gradcam", "scorecam", "reciprocam", "fullgrad", "expected", "legrad"])
def test_a_method_of_the_users_may_overwrite_what_it_gets(name: str) -> None:
    """A copy of each method, which then clears its arguments, gives the same maps for both targets."""
    method = camkit.METHODS[name]

    def clearing(*given: Any) -> Tensor:
        weights = method.weights(*given).clone()
        for tensor in tensors_in(given):
            tensor.zero_()
        return weights

    model, layer = for_method(name), "layer" if method.layer else None
    found, expected = (
        camkit.explain(model, pictures(1)[0], layer, target=[1, 2], method=each)
        for each in (replace(method, weights=clearing), name)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.raw, other.raw)
        assert one.raw.any()


def doubled(output: Any) -> Tensor:
    """Double all scores in place, in a way that a user might write."""
    output["logits"] *= 2
    return output["logits"][:, 1]


class Doubled(Target):
    def __call__(self, output: Any, batch: int) -> Scores:
        return Scores(doubled(output))


@pytest.mark.parametrize("method", ["gradcam", "ablationcam", "rise", "eigencam"])
@pytest.mark.parametrize("target", [doubled, Doubled()])
def test_a_target_of_the_users_may_overwrite_the_output(target: Any, method: str) -> None:
    model, image = made(lambda: Awkward(lambda net, x: {"logits": Parts.forward(net, x)})), pictures(1)[0]
    own, *found = camkit.explain(model, image, target=[target, 1, 2], method=method)
    expected = camkit.explain(model, image, target=[1, 2], method=method)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.raw, other.raw)
        assert one.score == other.score
    assert own.score == pytest.approx(2 * found[0].score)
