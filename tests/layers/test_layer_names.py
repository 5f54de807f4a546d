"""The grammar of layer names: what each selector chooses, and what a selector that chooses nothing says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from camkit.errors import LayerError
from camkit.hooks import record
from camkit.layers.names import chooses_layers, find_layers, modules_by_name, select_layers
from camkit.types import LayerRef


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 1)
        self.conv2 = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()

    def forward(self, maps: Tensor) -> Tensor:
        return self.relu(self.conv2(self.relu(self.conv1(maps))) + maps)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Residual()
        self.layer2 = Residual()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(3, 2)
        self.head = self.fc  # one module with two names

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer2(self.layer1(images))).flatten(1))


IMAGES = torch.rand(2, 3, 4, 4)

CHOICES: dict[str, tuple[Any, list[str]]] = {
    "a name": ("layer1.relu", ["layer1.relu"]),
    "a call": ("layer1.relu#2", ["layer1.relu#2"]),
    "a second name of the same module": ("head", ["fc"]),
    "a pattern": ("layer?.conv1", ["layer1.conv1", "layer2.conv1"]),
    "a pattern across dots": ("layer*1", ["layer1", "layer1.conv1", "layer2.conv1"]),
    "a pattern with a call": ("*.relu#2", ["layer1.relu#2", "layer2.relu#2"]),
    "a type": (nn.ReLU, ["layer1.relu", "layer2.relu"]),
    "the name of a type": ("ReLU", ["layer1.relu", "layer2.relu"]),
    "the name of a type as in code": ("nn.ReLU", ["layer1.relu", "layer2.relu"]),
    "the full name of a type": ("torch.nn.Linear", ["fc"]),
    "the name of a type with a call": ("ReLU#2", ["layer1.relu#2", "layer2.relu#2"]),
    "the name of the user's own type": ("Residual", ["layer1", "layer2"]),
    "a base class": (nn.modules.conv._ConvNd, [f"layer{block}.conv{conv}" for block in (1, 2) for conv in (1, 2)]),
    "the name of a base class": ("_ConvNd", [f"layer{block}.conv{conv}" for block in (1, 2) for conv in (1, 2)]),
    "a function": (lambda name, module: name.endswith("conv2"), ["layer1.conv2", "layer2.conv2"]),
    "a value of camkit": (LayerRef("layer2.relu", 1), ["layer2.relu#1"]),
    "several layers as printed": ("layer1+layer2.relu#2", ["layer1", "layer2.relu#2"]),
    "a list": (["layer2", nn.Linear, "layer1"], ["layer2", "fc", "layer1"]),
    "a tuple": (("layer2", "layer1"), ["layer2", "layer1"]),
    "a generator": ((f"layer{number}" for number in (1, 2)), ["layer1", "layer2"]),
    "the same layer several times": (["layer1", "layer1", "layer?"], ["layer1", "layer2"]),
    "a layer and one of its calls": (["layer1.relu", "layer1.relu#2"], ["layer1.relu", "layer1.relu#2"]),
    "a name from a compiled model": ("_orig_mod.layer1.conv1", ["layer1.conv1"]),
    "a name from a compiled part": ("layer1._orig_mod.relu#2", ["layer1.relu#2"]),
    "the model as PyTorch names it": ("", [""]),
    "the model as camkit prints it": ("(the model)", [""]),
    "a call of the model": ("(the model)#1", ["#1"]),
    "the model as torch.compile names it": ("_orig_mod", [""]),
    "the type of the model": ("Network", [""]),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_each_selector_chooses_its_layers(kind: str) -> None:
    selector, names = CHOICES[kind]
    assert [str(ref) for ref in find_layers(Network(), selector)] == names


def test_a_module_is_one_layer_under_its_first_name() -> None:
    model = Network()
    model.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert find_layers(model, model.layer2) == (LayerRef("layer2"),)
    assert find_layers(model, model.layers) == (LayerRef("layers"),)
    assert find_layers(model, [model.head, model]) == (LayerRef("fc"), LayerRef(""))
    assert select_layers(model, ["layer2", "head#1"]) == {LayerRef("layer2"): model.layer2, LayerRef("fc", 1): model.fc}


def test_no_pattern_matches_the_model_itself() -> None:
    model = Network()
    assert {str(ref) for ref in find_layers(model, "*")} == {name for name, _ in model.named_modules() if name}


def test_a_name_comes_before_every_other_meaning() -> None:
    model = nn.Sequential()
    for name in ("ReLU", "a#2", "a", "a+b", "b", "c*", "cd", "(the model)"):
        model.add_module(name, nn.Linear(1, 1))
    model.add_module("relu", nn.ReLU())
    for name in ("ReLU", "a#2", "a+b", "c*", "(the model)"):
        assert find_layers(model, name) == (LayerRef(name),)
    assert find_layers(model, "a#2#1") == (LayerRef("a#2", 1),)
    assert find_layers(model, "a+b#1") == (LayerRef("a+b", 1),)
    assert find_layers(model, "nn.ReLU") == (LayerRef("relu"),)


@pytest.mark.parametrize("part", ["", "layer1", "layer1.conv1"])
def test_compiled_modules_keep_their_names(part: str) -> None:
    model = Network()
    names = [str(ref) for ref in find_layers(model, ["*", ""])]
    if part:
        wrapped = torch.compile(model.get_submodule(part), backend="eager")
        parent, _, child = part.rpartition(".")
        setattr(model.get_submodule(parent), child, wrapped)
        assert find_layers(model, wrapped) == (LayerRef(part),)
    else:
        model = torch.compile(model, backend="eager")
        assert find_layers(model, model) == (LayerRef(""),)
    assert [str(ref) for ref in find_layers(model, ["*", ""])] == names
    for printed, _ in model.named_modules():  # as PyTorch prints them, _orig_mod included
        assert len(find_layers(model, printed)) == 1


def test_every_name_a_recording_prints_is_accepted() -> None:
    model = Network()
    with record(model, ["*", ""]) as recording:
        model(IMAGES)
    assert "layer1.relu#2" in recording
    assert "" in recording
    for printed in [*recording, *map(str, recording.calls)]:
        find_layers(model, printed)
        assert recording[printed].name == find_layers(model, printed)[0].name
    assert recording["(the model)"] is recording[""]
    assert recording["_orig_mod.layer1"] is recording["layer1"]


UNKNOWN: dict[str, tuple[Any, str]] = {
    "a misspelt name": ("layer3", "the model has no layer 'layer3'; did you mean 'layer2' or 'layer1'?"),
    "a misspelt name with a call": ("fcc#1", "the model has no layer 'fcc'; did you mean 'fc'?"),
    "a misspelt type name": ("Residul", "no layer 'Residul'; did you mean 'Residual'?"),
    "a pattern": ("block*", r"no layer 'block\*'; its parts are layer1, layer2, pool, fc, head"),
    "far from every name": ("zzz", "no layer 'zzz'; its parts are layer1, layer2, pool, fc, head"),
    "one of several": ("layer1+poool", "no layer 'poool'; did you mean 'pool'"),
    "one of several left out": ("layer1+", r"no layer 'layer1\+'; did you mean 'layer1'"),
    "a value of camkit": (LayerRef("poool", 2), "no layer 'poool'; did you mean 'pool'"),
    "a type": (nn.Conv1d, "no layer of type Conv1d; did you mean 'Conv2d'?"),
    "a type far from every other": (
        nn.LSTM,
        "no layer of type LSTM; its types are AdaptiveAvgPool2d, Conv2d, Linear, Network, ReLU, Residual",
    ),
    "a function": (lambda name, module: False, "the function '<lambda>' chose no layer of the model"),
    "a foreign module": (nn.ReLU(), "the ReLU passed as a layer is not a part of the model"),
    **{
        f"the value {value!r}": (value, f"by a name, pattern, type, module or function, not by {value!r}")
        for value in (3, 0.5, b"fc")
    },
    "an empty list": ([], r"the list of layers is empty; name at least one layer \('\*' means all of them\)"),
    **{
        f"call {number!r}": (f"fc#{number}", f"layer 'fc#{number}': 'fc#2' means the second call of layer fc; numbers")
        for number in ("0", "x", "", "-1", "1.5")
    },
    "call 0 of the model": ("(the model)#0", r"'\(the model\)#2' means the second call of layer \(the model\)"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_selector_that_chooses_nothing_is_one_sentence(kind: str) -> None:
    selector, message = UNKNOWN[kind]
    with pytest.raises(LayerError, match=message):
        find_layers(Network(), selector)


def test_which_texts_choose_layers() -> None:
    modules = modules_by_name(Network())
    for text in ("fc", "fc#0", "fc#x", "layer*", "Linear", "(the model)", "layer1+fc"):
        assert chooses_layers(modules, text)
    for text in ("fc.weight", "*.bias", "layer1+fc.weight", "nothing"):
        assert not chooses_layers(modules, text)
