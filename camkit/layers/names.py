"""Which layers and parameters are meant: names, patterns, types and functions turned into modules and tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from camkit.errors import LayerError, ModelError, did_you_mean
from camkit.types import LayerRef

Selector: TypeAlias = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
"""A layer's dotted name (``"layer4"``, ``"relu#2"``: its 2nd call), a pattern of names (``"layer*.conv?"``), a type
(``nn.ReLU``), a module of the model, or a function of name and module."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module by each of its names, in the model's order; the model itself is ``""``.

    What ``torch.compile`` wraps has the names it had before.
    """
    named = model.named_modules(remove_duplicate=False)
    return {plain_name(name): module for name, module in named if not hasattr(module, "_orig_mod")}


def plain_name(name: str) -> str:
    """Return the name that something had before ``torch.compile`` wrapped what it is in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def select(model: nn.Module, selectors: Selector | Sequence[Selector]) -> dict[LayerRef, nn.Module]:
    """Return the modules that are meant, in the order asked for, each under its first name.

    A pattern is one of the shell's, where ``*`` stands for dots too, and matches every layer but the model itself.

    Raises:
        LayerError: a selector matches nothing.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> select(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["1#2", nn.Linear])
    {LayerRef(name='1', call=2): ReLU(), LayerRef(name='0', call=None): Linear(...)}
    """
    layers = layers_of(model)
    asked = list(selectors) if isinstance(selectors, Sequence) and not isinstance(selectors, str) else [selectors]
    if not asked:
        raise LayerError("the list of layers is empty; '*' stands for all of them")
    first_names = first_name_by_module(layers)
    found: dict[LayerRef, nn.Module] = {}
    for selector in asked:
        for name, call in _matches(layers, selector):
            found[LayerRef(first_names[layers[name]], call)] = layers[name]
    _refuse_scripted(found)
    return found


def first_name_by_module(layers: dict[str, nn.Module]) -> dict[nn.Module, str]:
    """Return the name under which a module comes first."""
    return {module: name for name, module in reversed(layers.items())}


def _refuse_scripted(found: dict[LayerRef, nn.Module]) -> None:
    for ref, module in found.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"layer {str(ref)!r} is TorchScript, which has no hooks; pass the Python module it was made from"
            )


def _matches(layers: dict[str, nn.Module], selector: Any) -> list[tuple[str, int | None]]:
    if isinstance(selector, str):
        return _named(layers, selector)
    if isinstance(selector, nn.Module):
        wanted = getattr(selector, "_orig_mod", selector)
        names = [name for name, module in layers.items() if module is wanted][:1]
        complaint = f"the {type(selector).__name__} passed as a layer is not a part of the model"
    elif isinstance(selector, type):
        names = [name for name, module in layers.items() if isinstance(module, selector)]
        kinds = {type(module).__name__ for module in layers.values()}
        hint = did_you_mean(selector.__name__, kinds) or f"; its types are {', '.join(sorted(kinds))}"
        complaint = f"the model has no layer of type {selector.__name__}{hint}"
    elif callable(selector):
        names = [name for name, module in layers.items() if selector(name, module)]
        complaint = f"the function {getattr(selector, '__name__', selector)!r} chose no layer of the model"
    else:
        raise LayerError(
            f"layers are chosen by name, pattern, type, module or function, not by a value such as {selector!r}"
        )
    if not names:
        raise LayerError(complaint)
    return [(name, None) for name in names]


def _named(layers: dict[str, nn.Module], selector: str) -> list[tuple[str, int | None]]:
    pattern, digits = without_run(selector, layers)
    if digits is not None and not (digits.isdecimal() and int(digits) > 0):
        raise LayerError(f"layer {selector!r}: after '#' stands the number of the call, from 1")
    names = list(matching(layers, pattern))
    if not names:
        raise LayerError(f"the model has no layer {pattern!r}{_hint(pattern, layers)}")
    return [(name, None if digits is None else int(digits)) for name in names]


def without_run(typed: str, names: Container[str]) -> tuple[str, str | None]:
    """Return what stands before and behind the last ``#``, None where no run was typed; names may hold one too."""
    if typed in names or "#" not in typed:
        return typed, None
    name, _, run = typed.rpartition("#")
    return name, run


def matching(names: Iterable[str], pattern: str) -> Iterator[str]:
    """Return the name that was typed, or the names that fit the pattern; the model itself fits none."""
    names = list(names)
    if pattern in names:
        return iter([pattern])
    return (name for name in names if name and fnmatchcase(name, pattern))


def _hint(pattern: str, names: Iterable[str]) -> str:
    known = [name for name in names if name]
    parts = dict.fromkeys(name.partition(".")[0] for name in known)
    return did_you_mean(pattern, known) or (f"; its parts are {', '.join(parts)}" if parts else "")


def select_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters of this name, or that fit the pattern and are trained, each under its first name.

    Raises:
        LayerError: no layer or parameter is called so, or those that are aren't trained.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    found = {name: parameters[name] for name in matching(parameters, pattern)}
    if not found:
        hint = _hint(pattern, [*layers_of(model), *parameters])
        raise LayerError(f"the model has no layer or parameter {pattern!r}{hint}")
    trained = {name: parameter for name, parameter in found.items() if parameter.requires_grad}
    if not trained:
        raise LayerError(f"parameter {next(iter(found))!r} does not require gradients, so there are none to change")
    return trained
