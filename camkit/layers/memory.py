"""What is known of one model, so that it is found out once: its record, and the decisions about its layers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.record import ModelRecord
from camkit.engine.restore import is_in_use
from camkit.errors import LayerError
from camkit.layers.choose import Decision, decide
from camkit.layers.names import select_layers
from camkit.layers.trace import OperationNames
from camkit.types import LayerRef, Precision, TargetLayer

_MOST_SIZES = 32
"""Sizes of inputs for which decisions are kept: few models see more, and a decision takes a second at most."""

InputKind: TypeAlias = tuple[object, ...]
"""What of an input a decision depends on: its shape without the batch, and its type."""


class ModelMemory:
    """What is known of one model. Nothing in it keeps the model alive.

    A change of the model's structure, such as another submodule, hook or switch, makes ``refresh`` forget everything.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._learn(model)

    def _learn(self, model: nn.Module) -> None:
        self.record = ModelRecord.of_model(model)
        self.answers_alike: dict[Precision, bool] = {}
        self.may_resize = True
        self._selected: dict[tuple[object, ...], Mapping[LayerRef, nn.Module]] = {}
        self._decisions: OrderedDict[InputKind, Decision] = OrderedDict()
        self._named: dict[tuple[InputKind, LayerRef], TargetLayer] = {}

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    def refresh(self) -> bool:
        """Forget everything if the model's structure has changed; return whether it has."""
        model = self.model
        if model is None or is_in_use(self.record) or self.record.is_current():
            return False
        self._learn(model)
        return True

    def selected(self, selectors: tuple[object, ...]) -> Mapping[LayerRef, nn.Module]:
        """Return the layers that selectors choose, with their modules.

        Raises:
            LayerError: a selector chooses no layer, or the model as a whole.
        """
        selectors = tuple(one.ref if isinstance(one, TargetLayer) else one for one in selectors)
        modules = self._selected.get(selectors)
        if modules is None:
            model = self.model
            assert model is not None
            modules = weakref.WeakValueDictionary(select_layers(model, cast("Any", selectors)))
            if LayerRef("") in modules:
                raise LayerError(
                    "the model as a whole is no layer; name one of its parts, or pass None to have it chosen"
                )
            if all(isinstance(one, (str, LayerRef)) for one in selectors):  # others could keep the model alive
                self._selected[selectors] = modules
        return modules

    def decision(self, image: Float[Tensor, "1 c *size"]) -> Decision:
        """Return what is known of the model's layers for inputs like this image; it is found out the first time."""
        kind = kind_of(image)
        decision = self._decisions.get(kind)
        if decision is None:
            model = self.model
            assert model is not None
            decision = decide(model, image, self.record)
            if decision.lasting:
                self._decisions[kind] = decision
                while len(self._decisions) > _MOST_SIZES:
                    self._decisions.popitem(last=False)
        return decision

    def known(self, ref: LayerRef, image: Float[Tensor, "n c *size"]) -> TargetLayer | None:
        """Return a layer that was named before, for inputs like this image."""
        return self._named.get((kind_of(image), ref))

    def remember(self, layer: TargetLayer, image: Float[Tensor, "n c *size"]) -> None:
        """Keep what is known of a layer that the caller named."""
        if len(self._named) >= _MOST_SIZES:
            self._named.clear()
        self._named[kind_of(image), layer.ref] = layer

    def forget(self) -> None:
        """Forget the decisions, since a pass showed that they no longer hold."""
        self._decisions.clear()
        self._named.clear()


def kind_of(image: Float[Tensor, "n c *size"]) -> InputKind:
    """Return what of an input a decision depends on."""
    return tuple(image.shape[1:]), image.dtype


@contextmanager
def watching_places(model: nn.Module, modules: Mapping[LayerRef, nn.Module]) -> Iterator[dict[nn.Module, bool]]:
    """Tell, for each of some modules that runs in a pass, whether all operations before it leave cells in their places.

    It is what makes a pass that locates cells unnecessary for a layer of an ordinary convolutional network.
    """
    operations = OperationNames()
    kept: dict[nn.Module, bool] = {}

    def begin(_: nn.Module) -> None:
        operations.others.clear()

    def end(module: nn.Module, _: list[Tensor], __: object) -> None:
        kept[module] = kept.get(module, True) and not operations.others

    with starts([model], begin), forward_hooks(dict.fromkeys(modules.values(), end)), operations:
        yield kept
