"""How pictures are explained: the options of a call, merged with those of a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import InputError, LayerError, MethodError, advice
from camkit.images.references import References
from camkit.layers.names import Layers
from camkit.methods import AUTO, METHODS, Method, find_method
from camkit.models import black_box_in, load_model, read_labels
from camkit.models.inputs import adapted
from camkit.models.loaded import Loadable, LoadedModel
from camkit.options import USUAL, Config, ExplainerOptions, Fusion, Model, Precision, Smoothing, Spread
from camkit.targets import Target
from camkit.targets.fixed import fixed_target
from camkit.targets.scores import Scores

if TYPE_CHECKING:
    from camkit.options.settings import Settings


_Function = TypeVar("_Function", bound=Callable[..., Any])


def showing(options: type[ExplainerOptions]) -> Callable[[_Function], _Function]:
    """Let ``inspect.signature`` and ``help`` show the options of a function instead of its ``**options``."""
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
        for name, kind in options.__annotations__.items()
    ]

    def shown(function: _Function) -> _Function:
        signature = inspect.signature(function)
        others = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *named])  # type: ignore[attr-defined]
        return function

    return shown


def config_settings(config: Config) -> Settings:
    """Return the settings of a config."""
    from camkit.options.settings import as_settings  # noqa: PLC0415 - few calls have a config

    return as_settings(config)


def configured_model(
    model: Loadable | None,
    section: Model,
    *,
    device: str | torch.device | None = None,
    trainable: bool = False,
) -> nn.Module | LoadedModel | ExportedProgram:
    """Return a model, loaded as the config says if it is given by name; None stands for the config's own model.

    The config's other settings apply to the model that it names, and to every model if it names none.

    Raises:
        InputError: neither the call nor the config names a model, or the model cannot be loaded.
    """
    if isinstance(model, (nn.Module, LoadedModel, ExportedProgram)):
        return model
    name = section.name if model is None else model
    if name is None:
        raise InputError(
            f"no model is named; {advice('pass one', 'pass --model')}, or set name in the config's [model] table"
        )
    section = section if section.describes(name) else Model()
    return load_model(name, device=device or section.device, trainable=trainable, **loading(section))


def loading(section: Model) -> dict[str, Any]:
    """Return the arguments of ``load_model`` that a table gives, without the name and the device."""
    given = {name: value for name, value in vars(section).items() if name not in ("name", "device")}
    return {**given, "labels": None if section.labels is None else read_labels(section.labels)}


def with_inputs(loaded: LoadedModel, options: ExplainerOptions) -> LoadedModel:
    """Return a model that takes the picture, and gives the scores, as the options of a call say."""
    module = adapted(loaded.module, options.get("inputs"), options.get("picture"), options.get("output"))
    return replace(loaded, module=module, activation=options.get("activation") or loaded.activation)


@dataclass(frozen=True, eq=False)
class Choices:
    """How pictures are explained: what the caller gave, else what the config says, else what is usual.

    Attributes:
        method: the method.
        target_layer: the layers that are named; None lets camkit choose.
        options: the other options, by name.

    Raises:
        InputError: a choice is unknown, or the method cannot use it.
    """

    method: Method
    target_layer: Layers | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, target_layer: Layers | None, given: Mapping[str, Any], settings: Settings | None) -> Choices:
        """Merge the options of a call with a config; those that are None were not given."""
        asked = {**given, "layer": target_layer}
        usual = {} if settings is None else vars(settings.explain)
        names = ("method", "layer", *USUAL)
        merged = {name: each[name] for each in (USUAL, usual, asked) for name in names if each.get(name) is not None}
        method = find_method(merged.pop("method", AUTO))
        if asked.get("references") is None and not method.compares:
            merged.pop("references", None)
        layer = merged.pop("layer", None)
        if asked.get("method") is not None and target_layer is None and not method.layer:
            layer = None  # the config's
        return cls(method, layer, USUAL | merged)

    def but(self, **options: Any) -> Choices:
        """Return the same with other options."""
        return replace(self, options={**self.options, **options})

    def __post_init__(self) -> None:
        for name, kind in (("fuse", Fusion), ("precision", Precision), ("smooth", Smoothing), ("spread", Spread)):
            value = self.options[name]
            if value is not None and value not in get_args(kind):
                raise InputError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        if self.target_layer is not None and not self.method.layer:
            rest = advice("pass no target_layer", "leave out --layer")
            raise MethodError(f"method {self.method.name!r} reads the whole model and no layer; {rest}")
        references = self.options["references"]
        if references is not None and not isinstance(references, References) and not self.method.compares:
            rest = advice("leave out references", "leave out --references")
            raise MethodError(f"method {self.method.name!r} uses no reference pictures; use 'expected', or {rest}")


@dataclass(frozen=True, eq=False)
class Made:
    """How an explanation was made, so that metrics make the same map of other pictures.

    A table and another process do not get it: a method may be any function.

    Attributes:
        choices: those of its Explainer, without the layer, which may hold the model.
        method: the method that was used.
        asked: the target as it was asked for.
        scored: its score of the picture.
    """

    choices: Choices
    method: Method
    asked: Target
    scored: Scores

    @property
    def target(self) -> Target | None:
        """The class, fixed for changed versions of the picture; None for a box, or for what is not a class."""
        is_class = self.scored.indices is not None and self.scored.boxes is None
        return fixed_target(self.asked, self.scored) if is_class else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None in a copy for another process."""
        return type(None), ()


WITHOUT = "use 'occlusion' or 'rise'"
"""What to do without layers and gradients."""


def for_model(choices: Choices, module: nn.Module) -> Method:
    """Return the method; "auto" is "occlusion" for a black box.

    Raises:
        LayerError: a layer was named, and the model is a black box.
        MethodError: the method needs layers or gradients, and the model is a black box.
    """
    method = choices.method
    box = black_box_in(module)
    if box is None:
        return method
    if choices.target_layer is not None:
        raise LayerError(box.lacks(advice("pass no target_layer", "leave out --layer")))
    if method == AUTO:
        return METHODS["occlusion"]
    if not method.for_black_boxes:
        raise MethodError(f"method {method.name!r} cannot be used: {box.lacks(WITHOUT)}")
    return method
