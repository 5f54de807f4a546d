"""Recording, editing and clipping do exactly what they say, and leave no trace."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from networks import Net, means
from tiers import represented_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from camkit.errors import InputError, LayerError, ModelError
from camkit.hooks import TensorHooks, clip_norm, clip_value, edit, edit_gradients, noise, record, scale


def thrice(net: Net, x: Tensor) -> Tensor:
    """One convolution and one ReLU in place run three times, around a skip connection."""
    first = net.relu(net.conv(net.stem(x)))
    second = net.relu(net.conv(first)) + first
    return net.head(means(net.relu(net.conv(second))))


def skip(net: Net, x: Tensor) -> Tensor:
    """A layer's output is used twice, once after something was added to it in place."""
    maps = net.layer(x)
    branch = net.side(2 * maps)  # a step whose gradient does not need the maps
    maps += branch.sigmoid()
    return net.head(means(maps * branch.tanh()))


def convolution(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 3, padding=1)


def transformer() -> nn.Module:
    model = torchvision.models.VisionTransformer(
        64, 16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5
    )
    nn.init.normal_(model.heads.head.weight)  # torchvision initialises the head with zeros
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
    "densenet": lambda: torchvision.models.DenseNet(block_config=(1, 1, 1, 2), num_classes=5),
    "transformer": transformer,
    "thrice": lambda: Net(
        thrice, stem=convolution(3), conv=convolution(4), relu=nn.ReLU(inplace=True), head=nn.Linear(4, 5)
    ),
    "skip": lambda: Net(skip, layer=convolution(3), side=convolution(4), head=nn.Linear(4, 5)),
}


def network(name: str) -> nn.Module:
    """Return a network in training mode, the same at each call."""
    torch.manual_seed(1)
    return NETWORKS[name]().train()


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(5))


def loss_of(output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)))


def small() -> nn.Sequential:
    torch.manual_seed(36)  # each unit is positive for some of the inputs and negative for others
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def assert_same(one: dict[str, Tensor | None], two: dict[str, Tensor | None]) -> None:
    assert one.keys() == two.keys()
    for name, found in one.items():
        assert torch.equal(found, two[name]), name


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def hooks_in(model: nn.Module) -> list[Any]:
    """Return every hook there is on a model, its modules and its parameters."""
    of_modules = [
        hook
        for module in model.modules()
        for key, hooks in vars(module).items()
        if "hooks" in key and isinstance(hooks, dict)
        for hook in hooks.values()
    ]
    return of_modules + [hook for one in model.parameters() for hook in (one._backward_hooks or {}).values()]


def kept_by_hand(model: nn.Module, inputs: Tensor) -> dict[str, list[tuple[list[Tensor], Tensor, Tensor]]]:
    """Return inputs, outputs and gradients by layer, from ``retain_grad`` on outputs that nothing changes in place."""
    given: dict[str, list[list[Tensor]]] = {}
    kept: dict[str, list[Tensor]] = {}

    def before(name: str, module: nn.Module, args: Any) -> None:
        several = args[0] if isinstance(args[0], list) else args[:1]  # a layer of DenseNet takes a list
        given.setdefault(name, []).append([one.detach().clone() for one in several])

    def after(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.retain_grad()
        kept.setdefault(name, []).append(tensor)
        going_on = tensor.clone()
        return (going_on, *output[1:]) if isinstance(output, tuple) else going_on

    for name, module in model.named_modules():
        module.register_forward_pre_hook(functools.partial(before, name))
        module.register_forward_hook(functools.partial(after, name))
    loss_of(model(inputs)).backward()
    return {
        name: [(one, two.detach(), two.grad) for one, two in zip(given[name], kept[name], strict=True)] for name in kept
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_recorded_is_what_retain_grad_keeps(name: str) -> None:
    expected = kept_by_hand(network(name), pictures())
    model = network(name)
    with record(model, lambda *_: True, inputs=True, gradients=True) as recording:
        loss_of(model(pictures())).backward()
    assert len(recording) == sum(len(calls) for calls in expected.values()) == len(recording.calls)
    assert {call.name for call in recording.calls} == expected.keys()
    for layer, calls in expected.items():
        for number, (given, returned, gradient) in enumerate(calls, start=1):
            call = recording[f"{layer}#{number}"]
            output, found = call.output, call.gradient
            if isinstance(output, tuple):  # attention, which returns no weights
                assert output[1:] == found[1:] == (None,)
                output, found = output[0], found[0]
            taken = call.inputs[0] if isinstance(call.inputs[0], list) else call.inputs[:1]
            assert [torch.equal(*pair) for pair in zip(taken, given, strict=True)] == [True] * len(given), layer
            assert torch.equal(output, returned), layer
            assert torch.equal(found, gradient), layer
            assert not output.requires_grad
            assert not found.requires_grad
    assert sum(bool(calls[0][2].any()) for calls in expected.values()) > len(expected) / 2, "more than zeros"


@pytest.mark.parametrize("casts", represented_by(False, among=[False, True]))
@pytest.mark.parametrize("reduce", [None, torch.linalg.vector_norm])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_step_is_the_same_while_it_is_recorded(name: str, reduce: Any, casts: bool) -> None:
    model, other = network(name), network(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        with record(model, "*", inputs=True, gradients=True, reduce=reduce) as recording:
            found = loss_of(model(pictures()).float())
            found.backward()
        expected = loss_of(other(pictures()).float())
        expected.backward()
    assert torch.equal(found, expected)
    assert_same(gradients_of(model), gradients_of(other))
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))
    assert len(recording) >= 3
    assert not hooks_in(model)


def test_gradients_come_without_a_graph_and_in_the_precision_of_the_output() -> None:
    net = small()
    with record(net, "0", gradients=True) as recording, torch.autocast("cpu", torch.bfloat16):
        inputs = torch.ones(1, 4, requires_grad=True)
        (first,) = torch.autograd.grad(net(inputs).float().square().sum(), inputs, create_graph=True)
        assert first.requires_grad
    assert recording["0"].output.dtype == recording["0"].gradient.dtype == torch.bfloat16
    assert not recording["0"].gradient.requires_grad


def test_a_statistic_is_that_of_the_whole_tensor_and_integers_have_none() -> None:
    def largest(tensor: Tensor) -> float:
        return tensor.abs().max().item()

    found = []
    for reduce in (None, largest):
        model = network("thrice")
        with record(model, nn.Conv2d, inputs=True, gradients=True, reduce=reduce) as recording:
            loss_of(model(pictures())).backward()
        found.append(recording)
    for whole, reduced in zip(found[0].calls, found[1].calls, strict=True):
        assert str(whole) == str(reduced)
        assert reduced.inputs == (largest(whole.inputs[0]),)
        assert reduced.output == largest(whole.output)
        assert reduced.gradient == largest(whole.gradient) > 0
    table = nn.Embedding(5, 2)
    with record(table, "", inputs=True, reduce=largest) as recording:
        table(torch.tensor([1, 2]))
    assert recording[""].inputs == (None,)
    assert recording[""].output > 0


@pytest.mark.parametrize("reduce", [lambda tensor: tensor, lambda tensor: (tensor[0], tensor.mean())])
def test_a_statistic_that_is_a_view_survives_in_place_changes(reduce: Callable) -> None:
    net, inputs = small(), torch.randn(5, 4)
    expected = reduce(net[0](inputs).detach())
    with record(net, "0", reduce=reduce) as recording:
        net(inputs)
    assert min(map(Tensor.min, expected)) < 0, "a ReLU would show"
    assert all(map(torch.equal, recording["0"].output, expected))


@pytest.mark.parametrize("view", [nn.Flatten(), nn.Unflatten(1, (2, 2))])
def test_a_view_that_is_changed_in_place_has_no_gradient_and_says_so(view: nn.Module) -> None:
    inputs = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), view, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    plain = nn.Sequential(*net[:2], nn.ReLU(), *net[3:])
    recordings, weights = [], []
    for one in (net, plain):
        one.zero_grad()
        with record(one, "*", gradients=True) as recording:
            one(inputs).square().sum().backward()
        recordings.append(recording)
        weights.append(one[0].weight.grad.clone())
    in_place, whole = recordings
    assert whole["1"].gradient.shape == whole["1"].output.shape
    with pytest.raises(LayerError, match=r"no backward pass.*returns a view.*inplace=False"):
        _ = in_place["1"].gradient
    assert torch.equal(in_place["2"].gradient, whole["2"].gradient)
    assert torch.equal(*weights)
    assert not hooks_in(net)


class Returning(nn.Module):
    """A layer with a function for its body."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def beside(layer: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> Net:
    """Return a network that uses a tensor in a layer and beside it."""
    return Net(lambda net, x: use(net.layer, net.stem(x)), stem=nn.Conv2d(3, 4, 3), layer=layer)


@dataclass
class Held:
    maps: Tensor
    note: Any = None


def product(first: Tensor, second: Tensor) -> Tensor:
    return first * second.cos()


def added(layer: nn.Module, x: Tensor) -> Tensor:
    return 3 * layer(x) + x.sin()


RETURNING: dict[str, Callable[[], Net]] = {
    "Identity": lambda: beside(nn.Identity(), added),
    "Flatten": lambda: beside(nn.Flatten(), lambda layer, x: 3 * layer(x).sum() + x.sin()),
    "a tuple": lambda: beside(Returning(lambda x: (2 * x, x)), lambda layer, x: product(*layer(x)) + x.sin()),
    "a dictionary": lambda: beside(
        Returning(lambda x: {"maps": [x]}), lambda layer, x: 3 * layer(x)["maps"][0] + x.sin()
    ),
    "a dataclass": lambda: beside(Returning(Held), lambda layer, x: 3 * layer(x).maps + x.sin()),
    "a parameter": lambda: beside(
        Net(lambda net, _: net.token, token=nn.Parameter(torch.linspace(-1, 1, 4)[:, None, None])),
        lambda layer, x: layer(x) * x.sin() + layer.token,
    ),
    "called twice": lambda: beside(nn.Identity(), lambda layer, x: 3 * layer(x) + layer(x).sin()),
}


def by_copies(net: Net, inputs: Tensor, factor: float = 1.0) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Return the gradients of copies of what the layer returns, multiplied, and those of the parameters."""
    copies: list[list[Tensor]] = []

    def copied(item: Tensor) -> Tensor:
        clone = item.clone()
        clone.register_hook(lambda gradient: factor * gradient)
        clone.retain_grad()
        copies[-1].append(clone)
        return clone

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        copies.append([])
        return map_tensors(output, copied)

    handle = net.layer.register_forward_hook(hook)
    net.zero_grad()
    net(inputs).sum().backward()
    handle.remove()
    return [[clone.grad for clone in call] for call in copies], gradients_of(net)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Held):
        return Held(function(value.maps))
    return torch.utils._pytree.tree_map(function, value)


@pytest.mark.parametrize("name", RETURNING)
def test_the_gradient_of_a_layer_that_returns_its_input_is_that_of_its_own_uses(name: str) -> None:
    torch.manual_seed(2)
    net, inputs = RETURNING[name](), pictures()
    output = net(inputs)
    expected, plain = by_copies(net, inputs)
    _, without = by_copies(net, inputs, 0.0)
    net.zero_grad()
    with record(net, "layer", gradients=True) as recording:
        found = net(inputs)
        found.sum().backward()
    assert torch.equal(found, output)
    assert_same(gradients_of(net), plain)
    for call, gradients in zip(recording.calls, expected, strict=True):
        kept: list[Tensor] = []
        map_tensors(call.gradient, kept.append)
        torch.testing.assert_close(kept, gradients)
    net.zero_grad()
    with edit_gradients(net, {"layer": scale(0.0)}):
        net(inputs).sum().backward()
    edited = gradients_of(net)
    assert bool(edited["stem.weight"].any()) == (name != "called twice")
    for key, gradient in without.items():
        if gradient is not None:
            torch.testing.assert_close(edited[key], gradient)


IN_PLACE_LATER: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a ReLU after the layer": lambda layer, x: layer(x).relu_(),
    "the input is read afterwards": lambda layer, x: layer(x).mul_(2) * x,
    "the input is changed": lambda layer, x: torch.add(layer(x), x.mul_(2)),
    "a sum onto the layer": lambda layer, x: layer(x).add_(2 * x),
}


@pytest.mark.parametrize("name", IN_PLACE_LATER)
@pytest.mark.parametrize("nested", [False, True])
def test_the_output_of_a_layer_that_returns_its_input_can_be_changed_in_place(name: str, nested: bool) -> None:
    torch.manual_seed(2)
    net, inputs = beside(nn.Dropout(0.5), IN_PLACE_LATER[name]), pictures()
    output = net(inputs)
    output.sum().backward()
    plain = gradients_of(net)
    kept = net.stem(inputs)
    kept.retain_grad()
    IN_PLACE_LATER[name](nn.Identity(), kept * 1).sum().backward()
    net.zero_grad()
    outer = record(net, "layer", gradients=True) if nested else nullcontext()
    with outer, record(net, "layer", gradients=True) as recording:
        found = net(inputs)
        found.sum().backward()
    assert torch.equal(found, output)
    assert_same(gradients_of(net), plain)
    if name == "a sum onto the layer":  # the doubling is a use beside the layer that PyTorch cannot tell from it
        return
    torch.testing.assert_close(recording["layer"].gradient, kept.grad)
    net.zero_grad()
    with edit_gradients(net, {"layer": scale(0.0)}):
        net(inputs).sum().backward()
    assert not net.stem.weight.grad.any()


def test_a_layer_that_runs_three_times_gives_three_entries() -> None:
    model = network("thrice")
    with record(model, ["stem", "conv"]) as recording:
        model(pictures())
    assert list(recording) == ["stem", "conv#1", "conv#2", "conv#3"]
    assert [call.number for call in recording.calls] == [1, 1, 2, 3]
    assert not torch.equal(recording["conv#1"].output, recording["conv#2"].output)
    assert recording["stem#1"] is recording["stem"]
    for key in ("conv", "conv#4"):
        said = f"'conv' ran 3 times .*'{key}' must be one of its recorded calls: 'conv#1', 'conv#2', 'conv#3'"
        with pytest.raises(LayerError, match=said):
            recording[key]
    assert "conv#3" in recording
    assert "conv" not in recording
    assert recording.get("conv") is None
    with record(model, "conv#2") as one:
        model(pictures())
    assert list(one) == ["conv#2"]
    assert torch.equal(one["conv#2"].output, recording["conv#2"].output)


def test_a_module_with_two_names_is_found_under_both() -> None:
    net = small()
    net.again = net[0]
    for asked in ("0", "again", ["again", "0"], net.again):
        with record(net[:3], "0") if asked == "0" else nullcontext(), record(net, asked) as recording:
            net[:3](torch.ones(1, 4))
        assert list(recording) == ["0"]
        assert recording["again"] is recording["0"]


class Pair(NamedTuple):
    maps: Tensor
    other: Any


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tuple": (lambda maps, best: (best, maps), lambda found: found[1]),
    "a named tuple": (Pair, lambda found: found.maps),
    "PyTorch's tuple": (lambda maps, best: maps.max(1), lambda found: found.values),
    "a list": (lambda maps, best: ["a word", None, maps], lambda found: found[2]),
    "a dictionary": (lambda maps, best: {"in": {"maps": maps}, "number": 3}, lambda found: found["in"]["maps"]),
    "a dataclass": (lambda maps, best: Held(maps, object()), lambda found: found.maps),
    "nothing": (lambda maps, best: None, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_structures_are_kept(form: str) -> None:
    wrap, pick = FORMS[form]
    layer = Returning(lambda x, *, factor: wrap(x * factor, x.detach().argmax(1)))
    inputs, factor = torch.randn(3, 4, requires_grad=True), torch.tensor(2.0)
    seen = []
    with record(layer, "", inputs=True, gradients=True) as recording, edit(layer, {"": lambda x: seen.append(x) or x}):
        output = layer(inputs, factor=factor)
        call = recording[""]
        assert type(call.output) is type(output) is type(seen[0])
        assert torch.equal(call.inputs[0], inputs)
        assert torch.equal(call.keywords["factor"], factor)
        if pick is None:
            return
        pick(output).square().sum().backward()
    assert type(call.gradient) is type(output)
    assert torch.equal(pick(call.output), pick(output))
    assert torch.equal(pick(call.gradient), 2 * pick(output).detach())
    assert not pick(call.output).requires_grad


def test_each_backward_pass_gives_one_gradient() -> None:
    net = small()
    with record(net, ["0", "2"], gradients=True) as recording:
        output = net(torch.randn(5, 4))
        assert recording["2"].gradients == ()
        for factor in (1.0, 3.0):
            (factor * output).sum().backward(retain_graph=True)
        torch.autograd.grad(output[:, 0].sum(), net[2].weight)
    found = recording["2"].gradients
    expected = [torch.tensor(row).expand(5, 2) for row in ([1.0, 1.0], [3.0, 3.0], [1.0, 0.0])]
    assert [*map(torch.equal, found, expected)] == [True] * 3
    assert len(found) == 3
    assert len(recording["0"].gradients) == 2, "the third pass did not reach it"
    with pytest.raises(LayerError, match="3 backward passes have reached layer '2#1'"):
        _ = recording["2"].gradient


def test_a_gradient_is_not_what_a_later_pass_adds_to_grad() -> None:
    weight, factors = nn.Parameter(torch.arange(4.0)), torch.arange(4.0).view(2, 2)
    layer = nn.Identity()
    with record(layer, "", gradients=True) as recording:
        loss = (layer(weight.view(2, 2)) * factors).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [torch.equal(one, factors) for one in recording[""].gradients] == [True, True]


def test_a_call_without_a_gradient_says_why() -> None:
    net = small()
    for off, options, read, said in (
        (nullcontext, {"outputs": False}, "gradient", "gradients were not requested; use record.*gradients=True"),
        (nullcontext, {"outputs": False}, "output", "outputs .* were not recorded; use record.*outputs=True"),
        (nullcontext, {}, "inputs", "inputs .* were not recorded; use record.*inputs=True"),
        (torch.no_grad, {"gradients": True}, "gradient", "gradients are off, as under no_grad, inference_mode or"),
        (torch.inference_mode, {"gradients": True}, "gradient", "gradients are off, as under no_grad, inference_mode"),
    ):
        with record(net, "0", **options) as recording, off():
            net(torch.ones(1, 4))
        with pytest.raises(LayerError, match=said):
            getattr(recording["0"], read)
    with record(net, "0", gradients=True) as recording:
        output = net(torch.ones(1, 4))
        with pytest.raises(LayerError, match="no backward pass has reached layer '0#1'; call backward"):
            _ = recording["0"].gradient
    output.sum().backward()
    with pytest.raises(LayerError, match="inside the with block"):
        _ = recording["0"].gradient
    net.requires_grad_(False)
    with record(net, "0", gradients=True) as recording:
        net(torch.ones(1, 4))
    with pytest.raises(LayerError, match="depends on nothing that requires gradients"):
        _ = recording["0"].gradients


def test_reading_a_layer_that_did_not_run_or_was_not_selected() -> None:
    net = small()
    with record(net, ["0", "1"]) as recording:
        with pytest.raises(LayerError, match=r"layer '0' ran 0 times while it was recorded, in the thread"):
            recording["0"]
        with pytest.raises(LayerError, match="layer '2' is not among those recorded"):
            recording["2"]
    with record(net, "0") as recording:
        in_a_thread(lambda: net(torch.ones(1, 4)))
    with pytest.raises(LayerError, match="in the thread that opened the recording"):
        recording["0"]


def checkpointed(use_reentrant: bool | None) -> Net:
    """Return a network that runs a block again in the backward pass, unless ``use_reentrant`` is None."""
    torch.manual_seed(0)

    def run(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        return net.head(
            net.block(x) if use_reentrant is None else checkpoint(net.block, x, use_reentrant=use_reentrant)
        )

    return Net(run, stem=nn.Linear(4, 4), block=small(), head=nn.Linear(2, 1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_calls_repeated_by_checkpointing_are_edited_and_not_counted(use_reentrant: bool) -> None:
    found, inputs = [], torch.linspace(-1, 1, 8).view(2, 4)
    for mode in (None, use_reentrant):
        model = checkpointed(mode)
        with (
            record(model, "*", inputs=True, gradients=True) as recording,
            edit(model, {"block.0": lambda maps: 3 * maps.tanh()}),
            edit_gradients(model, {"block.1": scale(0.5)}),
        ):
            model(inputs).square().sum().backward()
        found.append((recording, gradients_of(model)))
    (plain, gradients), (again, other) = found
    assert list(plain) == list(again)
    assert_same(gradients, other)
    for key, call in plain.items():
        assert torch.equal(call.output, again[key].output)
        if key.startswith("block") and use_reentrant:
            with pytest.raises(LayerError, match="use_reentrant=True; False works"):
                _ = again[key].gradient
        else:
            assert torch.equal(call.gradient, again[key].gradient)
    unedited = checkpointed(None)
    unedited(inputs).square().sum().backward()
    assert not torch.equal(gradients["block.0.weight"], unedited.block[0].weight.grad)
    model = checkpointed(use_reentrant)
    with edit(model, {"block.0#1": scale(2.0)}), pytest.raises(LayerError, match="runs again in the backward pass"):
        model(torch.ones(1, 4)).sum().backward()


def test_one_call_is_edited_in_every_pass() -> None:
    model = network("thrice")
    inputs = pictures()

    def by_hand(zeroed: int) -> Tensor:
        keep = [0.0 if run == zeroed else 1.0 for run in (1, 2, 3)]
        first = (model.conv(model.stem(inputs)) * keep[0]).relu()
        second = (model.conv(first) * keep[1]).relu() + first
        return model.head((model.conv(second) * keep[2]).relu().mean((2, 3)))

    for run in (1, 2, 3):
        with edit(model, {f"conv#{run}": scale(0.0)}):
            for _ in range(2):
                torch.testing.assert_close(model(inputs), by_hand(run), rtol=0, atol=0)
            with suppress(KeyboardInterrupt), record(model, "conv", reduce=interrupting):
                model(inputs)
            torch.testing.assert_close(model(inputs), by_hand(run), rtol=0, atol=0)


def interrupting(tensor: Tensor) -> Any:
    raise KeyboardInterrupt


def test_hooks_are_called_in_the_order_they_were_set() -> None:
    net, inputs = small(), torch.randn(5, 4)
    with (
        record(net, "0", gradients=True) as outer,
        edit(net, {"0": scale(2.0)}),
        record(net, "0", gradients=True) as between,
        edit_gradients(net, {"0": scale(5.0)}),
        record(net, "0", gradients=True) as edited,
        edit(net, {nn.Linear: lambda maps: maps + 1, "0": scale(3.0)}),
        record(net, "0", gradients=True) as inner,
    ):
        net(inputs).sum().backward()
    plain = net[0](inputs).detach()
    assert torch.equal(outer["0"].output, plain)
    assert torch.equal(between["0"].output, plain * 2.0)
    assert torch.equal(inner["0"].output, (plain * 2.0 + 1) * 3.0)
    assert torch.equal(between["0"].gradient, inner["0"].gradient * 3.0)
    assert torch.equal(edited["0"].gradient, between["0"].gradient * 5.0)
    assert torch.equal(outer["0"].gradient, edited["0"].gradient * 2.0)
    assert inner["0"].gradient.any()


def partly(net: Net, x: Tensor) -> Tensor:
    """Some layers do not run although their weights are used."""
    x = nn.functional.linear(net.attention(x, x, x)[0], net.linear.weight)
    net.aside(x)
    return net.head(net.relu(net.flat(2 * net.relu(net.forwarded.forward(x)))))


def unused() -> Net:
    parts = {name: nn.Linear(4, 4) for name in ("linear", "forwarded", "aside")}
    parts |= {"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 2)}
    return Net(partly, **parts, relu=nn.ReLU(inplace=True), flat=nn.Flatten())


NOT_RUN = {
    "attention.out_proj": "did not run.*out_proj",
    "forwarded": r"did not run.*forward\(\) is called directly",
    "linear": "did not run.*only its weights are used",
    "relu#3": "layer 'relu' ran fewer than 3 times in a pass",
    "*.out_proj": "layer 'attention.out_proj' was not edited",
    "[fl]*[dr]": r"^layer '\w+' \(and 1 more\) was not edited: it did not run",
}


@pytest.mark.parametrize("enter", [edit, edit_gradients])
@pytest.mark.parametrize("layer", NOT_RUN)
def test_an_edit_of_a_layer_that_does_not_run_is_an_error_at_the_end(layer: str, enter: Any) -> None:
    net = unused()
    several = {nn.Linear: scale(1.0)}  # only one of them needs to run
    with pytest.raises(LayerError, match=NOT_RUN[layer]), enter(net, {layer: scale(0.0), **several}):
        net(torch.randn(3, 4)).sum().backward()
    with pytest.raises(KeyError, match="another"), enter(net, {layer: scale(0.0)}):
        net(torch.randn(3, 4))
        raise KeyError("another error")
    assert not hooks_in(net)
    other_thread = "did not run inside the block, in this thread"
    with pytest.raises(LayerError, match=other_thread), enter(net, {"head": scale(0.0)}):
        in_a_thread(lambda: net(torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("aside", "no backward pass reached it; call backward"),
        ("aside.weight", "no backward pass reached it; call backward"),
        ("flat", "returns a view"),
    ],
)
def test_an_edit_of_a_gradient_that_does_not_come_is_an_error(key: str, reason: str) -> None:
    net = unused()
    if key == "flat":
        net.flat = nn.Unflatten(1, (2, 2))
        net.head = nn.Sequential(nn.Flatten(), net.head)
    with pytest.raises(LayerError, match=reason), edit_gradients(net, {key: scale(0.0)}):
        net(torch.randn(3, 4)).sum().backward()
    off = pytest.raises(LayerError, match="gradients are off")
    with off, torch.no_grad(), edit_gradients(net, {"aside": scale(0.0)}):
        net(torch.randn(3, 4))


def test_an_edited_gradient_changes_all_gradients_before_it() -> None:
    inputs = torch.randn(5, 4)
    noisy = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    changes: dict[str, tuple[Callable, Callable[[Tensor], Tensor]]] = {
        "scale": (scale(0.25), lambda gradient: gradient * 0.25),
        "value": (clip_value(0.1), lambda gradient: gradient.sign() * gradient.abs().minimum(torch.tensor(0.1))),
        "norm": (clip_norm(0.5), lambda gradient: gradient * (0.5 / gradient.square().sum().sqrt())),
        "long enough": (clip_norm(1e9), lambda gradient: gradient),
        "noise": (noise(0.3, torch.Generator().manual_seed(3)), lambda gradient: gradient + 0.3 * noisy),
        "own": (torch.sign, torch.sign),
    }
    for name, (change, by_hand) in changes.items():
        net, plain = small(), small()
        with edit_gradients(net, {"0": change}):
            (10 * net(inputs)).square().sum().backward()
        maps = plain[0](inputs)
        (gradient,) = torch.autograd.grad((10 * plain[2](maps.relu())).square().sum(), maps, retain_graph=True)
        expected = by_hand(gradient)
        assert torch.equal(expected, gradient) == (name == "long enough"), name
        torch.testing.assert_close(net[0].weight.grad, expected.T @ inputs)
        torch.testing.assert_close(net[0].bias.grad, expected.sum(0))
        (10 * plain(inputs)).square().sum().backward()
        assert torch.equal(net[2].weight.grad, plain[2].weight.grad), "what comes after is as it was"


def test_a_parameters_gradient_is_edited_before_it_is_added() -> None:
    inputs = torch.randn(5, 4)
    net, plain = small(), small()
    with edit_gradients(net, {"0.weight": clip_value(0.05), "*.bias": scale(2.0), "2.weight": clip_norm(0.1)}):
        for _ in range(2):
            (10 * net(inputs)).square().sum().backward()
    (10 * plain(inputs)).square().sum().backward()
    found, whole = gradients_of(net), gradients_of(plain)
    assert torch.equal(found["0.weight"], 2 * whole["0.weight"].clamp(-0.05, 0.05))
    assert torch.equal(found["0.bias"], 4 * whole["0.bias"])
    assert torch.equal(found["2.bias"], 4 * whole["2.bias"])
    weight = whole["2.weight"]
    torch.testing.assert_close(found["2.weight"], 2 * weight * 0.1 / weight.norm())
    assert weight.norm() > 0.1
    assert (whole["0.weight"].abs() > 0.05).any()


def test_a_frozen_parameter_has_no_gradient_to_edit() -> None:
    net = small()
    net[0].weight.requires_grad_(False)
    for key, said in (
        ("weight", "'0.weight' does not require"),
        ("wait", "no layer or parameter '0.wait'.*'0.weight'"),
    ):
        with pytest.raises(LayerError, match=said), edit_gradients(net, {f"0.{key}": scale(2.0)}):
            pass
    with edit_gradients(net, {"*.weight": scale(0.0)}):
        net(torch.ones(1, 4)).sum().backward()
    assert not net[2].weight.grad.any()


@pytest.mark.parametrize(
    ("enter", "place", "wrong", "said"),
    [
        (edit, "1", lambda maps: None, "edits layer '1' returned None"),
        *(
            (edit_gradients, place, wrong, f"'{place}' returned .*must return a tensor")
            for place in ("0", "0.weight")
            for wrong in (lambda gradient: None, lambda gradient: gradient[:1], lambda gradient: 3.0)
        ),
    ],
)
def test_an_edit_that_returns_something_else_is_an_error(enter: Any, place: str, wrong: Callable, said: str) -> None:
    net = small()
    with enter(net, {place: wrong}), pytest.raises(LayerError, match=said):
        net(torch.ones(2, 4)).sum().backward()
    assert not hooks_in(net)


def test_changes_refuse_senseless_numbers() -> None:
    for make in (clip_value, clip_norm, noise):
        for number in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InputError, match="must be a positive number"):
                make(number)


def test_a_sparse_gradient_is_scaled_as_if_it_were_dense() -> None:
    words = torch.tensor([1, 1, 3])  # the row of a word that appears twice is stored twice
    tables = [nn.Embedding(6, 4, sparse=sparse) for sparse in (True, False)]
    for table in tables:
        table.weight.data.copy_(torch.arange(24).reshape(6, 4) / 10)
        with edit_gradients(table, {"weight": scale(0.5)}):
            table(words).square().sum().backward()
    sparse, dense = (table.weight.grad for table in tables)
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert dense.any()


def test_the_norm_of_half_precision_does_not_overflow() -> None:
    gradient = torch.full((1000,), 1000.0, dtype=torch.float16)
    found = clip_norm(1.0)(gradient)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float().norm(), torch.tensor(1.0), rtol=1e-2, atol=0)
    assert torch.equal(clip_norm(1.0)(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", [scale(0.5), clip_value(0.7), clip_norm(0.7), noise(0.1)])
def test_a_gradient_without_axes_keeps_its_type(change: Callable, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.tensor(0.0, dtype=dtype))
    net = nn.Module()
    net.weight = weight
    with edit_gradients(net, {"weight": change}):
        (3 * weight).backward()
    assert weight.grad.dtype == dtype


def test_a_parameter_that_two_layers_share_is_edited_once_under_either_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    net(torch.ones(1, 2)).sum().backward()
    plain = net[0].weight.grad.clone()
    for key in ("0.weight", "1.weight", "*.weight"):
        net.zero_grad()
        with edit_gradients(net, {key: scale(0.5)}):
            net(torch.ones(1, 2)).sum().backward()
        assert torch.equal(net[0].weight.grad, 0.5 * plain)


@contextmanager
def everything(model: nn.Module) -> Iterator[Any]:
    with (
        record(model, "*", inputs=True, gradients=True) as recording,
        edit(model, {"*": lambda output: output}),
        edit_gradients(model, {nn.Linear: scale(1.0), "*.weight": scale(1.0)}),
    ):
        assert hooks_in(model)
        yield recording


def failing(error: type[BaseException] | None, when: str, seen: list[weakref.ref[Any]]) -> Net:
    """Return a network that fails in one of its passes, and notes its outputs."""

    def fail(*_: Any) -> None:
        assert error
        raise error

    def run(net: Net, x: Tensor) -> Tensor:
        x = net.body(x)
        seen.append(weakref.ref(x))
        if error and when == "forward":
            fail()
        if error:
            x.register_hook(fail)
        return x

    return Net(run, body=small())


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_no_hook_is_left_and_no_tensor_is_kept_alive(error: type[BaseException] | None, when: str) -> None:
    seen: list[weakref.ref[Any]] = []
    model = failing(error, when, seen)
    gc.collect()
    gc.disable()  # whatever needs the cycle collector is kept too long
    try:
        with suppress(error or ()), everything(model) as recording:
            model(torch.randn(2, 4)).square().sum().backward()
        assert not hooks_in(model)
        assert [call.name for call in recording.calls][:3] == ["body.0", "body.1", "body.2"]
        seen += [weakref.ref(call.output) for call in recording.calls]
        seen += [weakref.ref(one) for call in recording.calls for one in call.gradients]
        seen.append(weakref.ref(recording))
        del recording
        assert len(seen) > 4
        assert [one() for one in seen] == [None] * len(seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("key", ["0", "*.weight"])
def test_a_backward_pass_after_the_block_or_in_another_thread_is_left_alone(key: str) -> None:
    net, plain, inputs = small(), small(), torch.randn(5, 4)
    unreached = pytest.raises(LayerError, match="was not edited: no backward pass reached it")
    with unreached, edit_gradients(net, {key: scale(0.0)}), record(net, "*", gradients=True) as recording:
        output = net(inputs)
        if key == "*.weight":
            in_a_thread(output.sum().backward)
    if key == "0":
        output.sum().backward()
        assert recording["0"].gradients == ()
    plain(inputs).sum().backward()
    assert_same(gradients_of(net), gradients_of(plain))


def test_long_trainings_accumulate_nothing() -> None:
    hooks = TensorHooks()
    for _ in range(2000):
        hooks.add(torch.ones(1, requires_grad=True) * 2, lambda gradient: None)
    living = [torch.ones(1, requires_grad=True) * 2 for _ in range(300)]
    for tensor in living:
        hooks.add(tensor, lambda gradient: None)
    assert 300 <= len(hooks._handles) < 1000
    hooks.remove()
    assert not any(tensor._backward_hooks for tensor in living)


def test_two_threads_record_and_edit_the_same_model() -> None:
    net, barrier = small(), threading.Barrier(2, timeout=30)

    def work(factor: float) -> None:
        inputs = torch.full((1, 4), factor)
        with edit(net, {"0": scale(factor)}), record(net, ["0", "2"], gradients=True) as recording:
            barrier.wait()
            for _ in range(20):
                torch.autograd.grad(net(inputs).sum(), list(net.parameters()))
            barrier.wait()
        assert len(recording) == 40
        expected = net[0](inputs).detach() * factor
        assert all(torch.equal(recording[f"0#{run}"].output, expected) for run in range(1, 21))
        assert all(len(call.gradients) == 1 for call in recording.calls)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (1.0, 2.0))) == [None, None]
    assert not hooks_in(net)


COMPILED: dict[str, Callable[[nn.Sequential, str], Any]] = {
    "wrapped": lambda net, backend: torch.compile(net, backend=backend),
    "in place": lambda net, backend: net.compile(backend=backend) or net,
    "a part": lambda net, backend: nn.Sequential(torch.compile(net[0], backend=backend), net[1]),
}


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_compiled_modules_run_uncompiled(way: str, backend: str) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(small(), nn.Linear(2, 1))
    plain, inputs = copy.deepcopy(net), torch.randn(5, 4)
    model = COMPILED[way](net, backend)
    model(inputs).sum().backward()  # from now on, PyTorch uses the compiled code, which has no hooks
    net.zero_grad()
    found = []
    for one in (model, plain):
        with (
            edit(one, {"0.1": scale(3.0)}),
            edit_gradients(one, {"0.2": scale(0.5), "0.0.bias": scale(2.0)}),
            record(one, ["0", "0.0", "0.1"], gradients=True) as recording,
        ):
            one(inputs).sum().backward()
        found.append(recording)
    assert list(found[0]) == list(found[1]) == ["0.0", "0.1", "0"]
    for key, call in found[1].items():
        torch.testing.assert_close(found[0][key].output, call.output)
        torch.testing.assert_close(found[0][key].gradient, call.gradient)
    torch.testing.assert_close(gradients_of(net), gradients_of(plain))


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(small())
    with pytest.raises(ModelError, match="layer '0' is TorchScript, which has no hooks"), record(scripted, "*"):
        pass


def test_a_recording_shows_itself_on_one_line_and_in_a_notebook():
    net = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    net.add_module("<b>", nn.Identity())
    with (
        record(net, "*", gradients=True) as recording,
        record(net, "0", reduce=lambda tensor: float(tensor.mean())) as statistics,
        record(net, "0", outputs=False) as nothing,
    ):
        assert repr(recording) == "<Recording of 0 calls>"
        net(torch.ones(2, 5, 3))[0].sum().backward()
        net(torch.ones(2, 5, 3))

    assert repr(recording) == "<Recording of 4 calls: '0#1', '<b>#1', '0#2', ...>"
    assert repr(recording["0#1"]) == "<Call 0#1 with output (2, 5, 4), (1, 2, 4), (1, 2, 4)>"
    assert recording.table()[2] == {"call": "0#2", "output": "(2, 5, 4), (1, 2, 4), (1, 2, 4)", "backward passes": 0}
    assert recording.table()[0]["backward passes"] == 1
    assert "<td>&lt;b&gt;#1</td>" in recording._repr_html_()
    assert "<b>" not in recording._repr_html_()
    assert "\n" not in repr(statistics["0#1"])
    assert repr(nothing["0#1"]) == "<Call 0#1 with output not recorded>"
