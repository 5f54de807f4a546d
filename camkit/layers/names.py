"""The grammar of layer names, the same for explain, hooks, feature maps and the command line.

A layer is chosen by

- its dotted name, ``"layer4.2.relu"``, or ``"layer4.2.relu#3"`` for its third call in a pass,
- a shell pattern, ``"layer*.conv?"``, where ``*`` matches dots too,
- a type, ``nn.ReLU`` or its name ``"ReLU"``,
- a module of the model,
- a function of name and module that returns whether to take the layer.

Every name that camkit prints is accepted too: ``"(the model)"``, several layers as ``"layer3+layer4"``, and names
that ``torch.compile`` prefixed with ``_orig_mod``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from camkit.errors import LayerError, ModelError, did_you_mean, nearest_numbers
from camkit.models import refuse_black_box
from camkit.types import LayerRef, TargetLayer

Selector: TypeAlias = str | LayerRef | TargetLayer | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
"""One way to choose layers; the module's docstring lists them."""

Layers: TypeAlias = "Selector | Iterable[Selector]"
"""What ``target_layer`` takes; several layers are fused."""

THE_MODEL = "(the model)"
"""How camkit prints the model itself, whose name in PyTorch is empty."""

_COMPILED = "_orig_mod"
"""The attribute in which ``torch.compile`` keeps the module it wraps, and so a part of the names inside."""


def find_layers(model: nn.Module, layers: Layers) -> tuple[LayerRef, ...]:
    """Return the layers that one or several selectors choose, in the order of the selectors, each layer once.

    A pattern or a type may choose several layers. A module with several names is returned under its first.

    Raises:
        LayerError: the model is a black box, a selector matches no layer, or a call number is not 1 or more; the
            message suggests near names.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> find_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["1#2", nn.Linear])
    (LayerRef(name='1', call=2), LayerRef(name='0', call=None))
    """
    return tuple(select_layers(model, layers))


def select_layers(model: nn.Module, layers: Layers) -> dict[LayerRef, nn.Module]:
    """Return what ``find_layers`` returns, with the module of each layer."""
    refuse_black_box(model)
    modules = modules_by_name(model)
    first_names = first_name_by_module(modules)
    selected: dict[LayerRef, nn.Module] = {}
    nothing = "the list of layers is empty; name at least one layer ('*' means all of them)"
    for selector in selectors_in(layers, nothing):
        for name, call in _matches(modules, selector):
            selected[LayerRef(first_names[modules[name]], call)] = modules[name]
    for ref, module in selected.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"layer {str(ref)!r} is TorchScript, which has no hooks; pass the Python module it was made from"
            )
    return selected


def named_layers(model: nn.Module, layers: Layers) -> Layers:
    """Return the names of layers, joined by ``+``, if they were not chosen by name: two modules may print the same."""
    if isinstance(layers, (str, LayerRef, TargetLayer)):
        return layers
    return "+".join(str(ref) or THE_MODEL for ref in find_layers(model, layers))


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module under each of its names, in the model's order; the model itself is ``""``.

    Modules inside ``torch.compile`` have the names they had before.
    """
    named = model.named_modules(remove_duplicate=False)
    return {plain_name(name): module for name, module in named if not hasattr(module, _COMPILED)}


def first_name_by_module(modules: dict[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the first name of each module."""
    return {module: name for name, module in reversed(modules.items())}


def plain_name(name: str) -> str:
    """Return the name that a module or parameter had before ``torch.compile`` wrapped a module around it.

    >>> plain_name("_orig_mod.layer4._orig_mod.conv1")
    'layer4.conv1'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def split_call(text: str, names: Container[str]) -> tuple[str, str | None]:
    """Split ``"relu#2"`` into the layer's name and the digits of the call, None if there is no ``#``.

    A text that is a name as a whole is not split: a module's own name may contain ``#``.

    >>> split_call("relu#2", ["relu"]), split_call("relu", ["relu"]), split_call("(the model)#1", [""])
    (('relu', '2'), ('relu', None), ('', '1'))
    """
    name, digits = text, None
    if "#" in text and text not in names:
        name, _, digits = text.rpartition("#")
    if name not in names:
        name = "" if name == THE_MODEL else plain_name(name)
    return name, digits


def names_matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the name that equals the pattern, or else all that match it; no pattern matches the model itself."""
    names = list(names)
    if pattern in names:
        return [pattern]
    return [name for name in names if name and fnmatchcase(name, pattern)]


def chooses_layers(modules: dict[str, nn.Module], text: str) -> bool:
    """Return whether a text chooses layers, whatever call number follows its ``#``."""
    return all(_lookup(modules, part)[2] for part in _parts(modules, text))


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under its name in each module that has it; if a module has two names, the first counts."""
    return {
        plain_name(f"{module_name}.{name}" if module_name else name): parameter
        for module_name, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def select_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the trainable parameters with this name or matching this pattern, each under its first name that matches.

    Raises:
        LayerError: no layer or parameter matches, or none of the matching parameters requires gradients.
    """
    parameters = {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    names = names_matching(parameters, pattern) or names_matching(parameters, plain_name(pattern))
    if not names:
        modules = modules_by_name(model)
        hint = _hint(pattern, [*modules, *parameters], modules)
        raise LayerError(f"the model has no layer or parameter {pattern!r}{hint}")
    trainable = {name: parameters[name] for name in names if parameters[name].requires_grad}
    if not trainable:
        raise LayerError(f"parameter {names[0]!r} does not require gradients, so there are none to change")
    first_names = {parameter: name for name, parameter in reversed(trainable.items())}
    return {name: parameter for name, parameter in trainable.items() if first_names[parameter] == name}


def selectors_in(layers: Any, nothing: str) -> tuple[Any, ...]:
    """Return the selectors; a container of modules, such as ``nn.Sequential``, is one selector.

    Raises:
        LayerError: there is none; ``nothing`` says so.
    """
    if isinstance(layers, (str, bytes, nn.Module, LayerRef, TargetLayer)) or not isinstance(layers, Iterable):
        return (layers,)
    selectors = tuple(layers)
    if not selectors:
        raise LayerError(nothing)
    return selectors


def _matches(modules: dict[str, nn.Module], selector: Any) -> list[tuple[str, int | None]]:
    """Return the name of each layer that a selector chooses, and the number of the call, None for every call."""
    if isinstance(selector, str):
        return [match for part in _parts(modules, selector) for match in _named(modules, part)]
    if isinstance(selector, LayerRef):
        name = plain_name(selector.name)
        if name not in modules:
            raise LayerError(f"the model has no layer {name!r}{_hint(name, modules, modules)}")
        return [(name, selector.call)]
    if isinstance(selector, TargetLayer):
        return _matches(modules, selector.ref)
    if isinstance(selector, nn.Module):
        wanted = getattr(selector, _COMPILED, selector)
        names = [name for name, module in modules.items() if module is wanted][:1]
        complaint = f"the {type(selector).__name__} passed as a layer is not a part of the model"
    elif isinstance(selector, type):
        names = [name for name, module in modules.items() if isinstance(module, selector)]
        types = _type_names(modules)
        hint = did_you_mean(selector.__name__, types) or f"; its types are {', '.join(types)}"
        complaint = f"the model has no layer of type {selector.__name__}{hint}"
    elif callable(selector):
        names = [name for name, module in modules.items() if selector(name, module)]
        complaint = f"the function {getattr(selector, '__name__', selector)!r} chose no layer of the model"
    else:
        raise LayerError(f"a layer is chosen by a name, pattern, type, module or function, not by {selector!r}")
    if not names:
        raise LayerError(complaint)
    return [(name, None) for name in names]


def _parts(modules: dict[str, nn.Module], text: str) -> list[str]:
    """Return a text as a whole or, if it chooses no layer, the texts that ``+`` joins in it."""
    parts = text.split("+")
    return [text] if _lookup(modules, text)[2] or not all(parts) else parts


def _lookup(modules: dict[str, nn.Module], text: str) -> tuple[str, str | None, list[str]]:
    """Return the name and the digits of the call in a text, and the layers with that name, pattern or type."""
    name, digits = split_call(text, modules)
    names = names_matching(modules, name)
    if not names:
        wanted = name.removeprefix("torch.").removeprefix("nn.")
        names = [each for each, module in modules.items() if wanted in _types_of(module)]
    return name, digits, names


def _types_of(module: nn.Module) -> list[str]:
    """Return the names of a module's class and of those it inherits from."""
    return [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)]


def _named(modules: dict[str, nn.Module], text: str) -> list[tuple[str, int | None]]:
    """Return the layers that a name, pattern or type chooses, with the number of the call.

    Raises:
        LayerError: there is no such layer, or the call number is wrong.
    """
    name, digits, names = _lookup(modules, text)
    if not names:
        raise LayerError(f"the model has no layer {name!r}{_hint(name, modules, modules)}")
    if digits is not None and not (digits.isdecimal() and int(digits) > 0):
        printed = name or THE_MODEL
        raise LayerError(
            f"layer {text!r}: {printed + '#2'!r} means the second call of layer {printed}; numbers start at 1"
        )
    return [(match, None if digits is None else int(digits)) for match in names]


def _type_names(modules: dict[str, nn.Module]) -> list[str]:
    return sorted({type(module).__name__ for module in modules.values()})


def _hint(text: str, names: Iterable[str], modules: dict[str, nn.Module]) -> str:
    """Suggest the nearest number or names, or the nearest types, or list the model's parts."""
    names = [name for name in names if name]
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    types = [] if any(sign in text for sign in "*?[") else _type_names(modules)
    near = nearest_numbers(text, names) or did_you_mean(text, names) or did_you_mean(text, types)
    return near or (f"; its parts are {', '.join(parts)}" if parts else "")
