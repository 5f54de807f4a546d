"""The methods and layers of a comparison or a judgement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from camkit.errors import InputError, MethodError
from camkit.explainer import Explainer
from camkit.layers.names import Layers, find_layers, named_layers
from camkit.methods import Method, find_method, known_method
from camkit.methods.registry import NAMES_OF_REFERENCES, MethodLike
from camkit.models import black_box_in

if TYPE_CHECKING:
    from camkit.models.loaded import Loadable


def chosen_explainer(model: Explainer | Loadable, methods: Sequence[Method], options: Mapping[str, Any]) -> Explainer:
    """Return the Explainer to use for these methods: the model itself if it is one, else a new one with these options.

    Raises:
        InputError: the model is an Explainer, which has options of its own; or an option is wrong.
    """
    if not isinstance(model, Explainer):
        # Reference pictures are refused with a method that uses none, so one of those that use them takes them.
        uses = next((method for method in methods if method.need.references), None)
        return Explainer(model, method=None if options.get("references") is None else uses, **options)
    if options:
        raise InputError(f"the Explainer has its {', '.join(options)} already; pass the model instead")
    return model


def chosen_methods(methods: MethodLike | Iterable[MethodLike] | None, usual: Sequence[str]) -> list[Method]:
    """Return the methods to use, each of them once; the usual ones for None.

    Raises:
        InputError: the list is empty.
        MethodError: a method is unknown, or two different ones have the same name, such as two variants of "rise".
    """
    if methods is None:
        return [method for name in usual if (method := known_method(name)) is not None]
    several: Iterable[Any] = (
        [methods] if isinstance(methods, (str, Method)) or not isinstance(methods, Iterable) else methods
    )
    chosen: list[Method] = []
    for given in several:
        method = find_method(given)
        if method in chosen:
            continue
        if method.name in NAMES_OF_REFERENCES:
            raise MethodError(
                f"a method cannot be called {method.name!r}, because judge has a row of that name; give it another name"
            )
        if any(other.name == method.name for other in chosen):
            raise MethodError(
                f"two different methods are named {method.name!r}; give one of them another name with "
                "camkit.register_method"
            )
        chosen.append(method)
    if not chosen:
        raise InputError("the list of methods is empty; pass None for the usual ones")
    return chosen


def fitting_methods(chosen: list[Method], explainer: Explainer, *, named: bool) -> list[Method]:
    """Return the methods; those of a black box instead of the usual ones, unless the caller named some."""
    return chosen if named or not black_box_in(explainer.model) else chosen_methods(_OF_BLACK_BOXES, ())


_OF_BLACK_BOXES = ("occlusion", "rise")
"""The methods that need neither layers nor gradients."""


def chosen_layers(explainer: Explainer, layers: Layers | Sequence[Layers | None] | None) -> list[Layers | None]:
    """Return the layers to explain; each None among them keeps the layer of the Explainer, if it has one.

    Raises:
        LayerError: the model has no such layer.
    """
    chosen: list[Any] = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    for layer in chosen:
        if layer is not None:
            find_layers(explainer.model, layer)
    return [None if layer is None else named_layers(explainer.model, layer) for layer in chosen] or [None]
