"""What camkit keeps about one model between calls: its record, and the decisions about its layers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.guard import ModelRecord, is_in_use, weight_marks
from camkit.engine.passes import Pass, ignoring_errors, keep_last, keeps_pictures_apart
from camkit.errors import LayerError, TargetError, advice
from camkit.layers.choose import decide
from camkit.layers.decision import Decision
from camkit.layers.names import select_layers
from camkit.layers.places import with_places
from camkit.models import spatial_rank
from camkit.targets.classes import FunctionTarget
from camkit.targets.scores import ScoreReading, Target, logits_of
from camkit.types import LayerRef, Layout, Spread, TargetLayer

_MOST_SIZES = 32
"""How many input sizes have their decisions kept: few models see more, and deciding again takes a second at most."""

InputKind: TypeAlias = tuple[object, ...]
"""The properties of an input that a decision depends on: its shape without the batch, and its type."""

_DecisionKey: TypeAlias = tuple[InputKind, Hashable]
"""The kind of input and, if the decision is that of one target, which one."""


class ModelMemory:
    """Remembers what was decided for one model, without keeping the model alive.

    ``refreshed`` forgets everything if the model's structure changed, such as a submodule, a hook or a switch.

    Attributes:
        not_all_tokens: the kinds of inputs for which attention does not run between all tokens, or cannot be read.
        checked_tokens: the kinds of inputs and the layouts for which all tokens of the grid are the picture's.
        overwrites: whether the model overwrites tensors that its backward pass needs.
        rank: the number of axes of the model's input after the channels.
        record: the model's record.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._start(model)

    def start_over(self) -> None:
        """Forget everything, also the record of the model."""
        model = self._model()
        if model is not None:
            self._start(model)

    def _start(self, model: nn.Module) -> None:
        record = ModelRecord.of_model(model)
        self.not_all_tokens: set[InputKind] = set()
        self.checked_tokens: set[tuple[InputKind, Layout]] = set()
        self.overwrites = False
        self.rank = spatial_rank(model)
        self._final_activation: str | None = None
        self._apart: dict[tuple[LayerRef, ...], tuple[int, bool | None]] = {}
        self._selected: dict[tuple[object, ...], Mapping[LayerRef, nn.Module]] = {}
        self._decisions: dict[_DecisionKey, tuple[Decision, list[int] | None]] = {}
        self._placed: dict[tuple[InputKind, LayerRef, Layout | None, Spread], Layout | None] = {}
        self._placed_with: list[int] = []
        self.record = record  # assigned last: if Ctrl-C comes earlier, the old record stays and is still out of date

    @property
    def living(self) -> nn.Module:
        """The model, which is alive during a call."""
        model = self._model()
        assert model is not None
        return model

    def refreshed(self) -> ModelMemory:
        """Return the memory, which first forgets everything if the model has changed since the last pass."""
        model = self._model()
        if model is not None and not is_in_use(self.record) and not self.record.is_current():
            self._start(model)
        return self

    def selected(self, selectors: tuple[object, ...]) -> Mapping[LayerRef, nn.Module]:
        """Return the layers that selectors match, with their modules.

        Raises:
            LayerError: a selector matches no layer, or the whole model.
        """
        selectors = tuple(item.ref if isinstance(item, TargetLayer) else item for item in selectors)
        modules = self._selected.get(selectors)
        if modules is None:
            modules = weakref.WeakValueDictionary(select_layers(self.living, cast("Any", selectors)))
            if LayerRef("") in modules:
                raise LayerError(
                    "the whole model is not a layer; name one of its submodules, or "
                    f"{advice('pass None', 'leave out --layer')} to let camkit choose"
                )
            if all(isinstance(item, (str, LayerRef)) for item in selectors):  # modules would keep the model alive
                self._selected[selectors] = modules
        return modules

    def decision(self, image: Float[Tensor, "1 c *size"], target: Target | None = None) -> Decision:
        """Return the decision for inputs like this image; the first call makes it.

        Classes share one decision. A target of the user's has its own, because it may read any output, unless all
        outputs are computed from the layer.
        """
        decision = self._decided(image, None, None)
        if target is None or decision.any_target:
            return decision
        if not isinstance(target, FunctionTarget) and type(target).__module__.startswith("camkit."):
            return decision  # camkit's own targets read the model's main scores
        with ignoring_errors():  # a target may be made for a larger batch
            return self._decided(image, target, _identity(target))
        return decision

    def placed(
        self, layers: Sequence[TargetLayer], image: Float[Tensor, "1 c *size"], spread: Spread
    ) -> Mapping[LayerRef, Layout | None]:
        """Return the layouts of layers, with the places of their cells unless these are spread evenly."""
        keys = {layer.ref: (kind_of(image), layer.ref, layer.layout, spread) for layer in layers}
        every = self.record.modules()
        # Convolutions show whether a network was trained further: looking at all weights takes longer.
        trained: list[nn.Module] = [module for module in every if isinstance(module, nn.Conv2d)] or every
        marks = weight_marks(trained)
        if marks != self._placed_with:
            self._placed.clear()
            self._placed_with = marks
        placed = {ref: self._placed[key] for ref, key in keys.items() if key in self._placed}
        new = [layer for layer in layers if layer.ref not in placed]
        if new:
            modules = self.selected(tuple(layer.ref for layer in new))
            unplaced = [(layer, modules[layer.ref]) for layer in new]
            for ref, layout in with_places(self.living, image, unplaced, spread, self.record).items():
                placed[ref] = layout
                keep_last(self._placed, keys[ref], layout, _MOST_SIZES)
        return {ref: placed[ref] for ref in keys}

    def _decided(self, image: Tensor, target: Target | None, identity: Hashable) -> Decision:
        key = kind_of(image), identity
        is_kept = target is None or identity is not None
        kept = self._decisions.get(key) if is_kept else None
        if kept is not None and (kept[1] is None or kept[1] == weight_marks(self.record.modules())):
            return kept[0]
        decision = decide(self.living, image, self.record, target=target)
        if is_kept and decision.lasting and not decision.of_picture:
            marks = weight_marks(self.record.modules()) if decision.of_weights else None
            keep_last(self._decisions, key, (decision, marks), _MOST_SIZES)
        return decision

    def keeps_pictures_apart(
        self,
        inputs: Float[Tensor, "n c *size"],
        at_once: int,
        layers: Mapping[LayerRef, nn.Module] = MappingProxyType({}),
    ) -> bool:
        """Tell whether this many pictures have the same maps and output together as alone; the first call tries it.

        Args:
            inputs: a batch; the trial uses its first picture.
            at_once: how many pictures the model will get at once.
            layers: the layers whose maps are compared.

        Raises:
            TargetError: ``inputs`` are several pictures, and the model gives one answer for all.
        """
        refs, count = tuple(layers), min(at_once, 3)  # what holds for three holds for more
        tried, apart = self._apart.get(refs, (1, True))
        if apart and tried < count:
            apart = keeps_pictures_apart(self.living, inputs[:1], layers, self.record, at_once)
            self._apart[refs] = count, apart
        if apart is None and len(inputs) > 1:
            raise TargetError(
                f"the model gives one answer for {len(inputs)} pictures; "
                f"{advice('pass batch_size=1', 'pass --batch-size 1')} to explain each alone; to explain one "
                "picture of a bag, wrap the model in a module whose forward(self, picture) adds the others, and use "
                "the method 'occlusion'"
            )
        return bool(apart)

    def final_activation(self, image: Float[Tensor, "1 c *size"]) -> str:
        """Return the name of the softmax or sigmoid in which the model ends, or ""; the first call looks for it.

        Raises:
            TargetError: there are no class scores.
        """
        if self._final_activation is None:
            with Pass(self.living, image, (), record=self.record).forward(leaf=True) as run:
                self._final_activation = ScoreReading.of(logits_of(run.output, 1)).final
        return self._final_activation

    def forget(self) -> None:
        """Forget all decisions, after a pass showed that they no longer hold."""
        self._decisions.clear()
        self._placed.clear()


SHARED: weakref.WeakKeyDictionary[nn.Module, ModelMemory] = weakref.WeakKeyDictionary()
"""The memory of each living model that ``explain`` was called with: later calls share it."""


def _identity(target: Target) -> Hashable:
    """Return a key that equal targets of the user's share; None if a target has none.

    Functions from the same place in a program are equal if they hold the same plain values and tensors of the same
    shapes, so a ``lambda`` in a loop is decided once. Any other target equals only itself. Its key is a weak reference,
    because the target may hold the model.
    """
    own = getattr(target, "function", target)
    if isinstance(own, FunctionType):
        cells = [cell.cell_contents for cell in own.__closure__ or ()]
        values = (*(own.__defaults__ or ()), *(own.__kwdefaults__ or {}).values(), *cells)
        kept = [value.shape if isinstance(value, (Tensor, np.ndarray)) else value for value in values]
        if all(isinstance(value, (int, float, str, tuple, type(None))) for value in kept):
            return own.__code__, repr(kept)
    try:
        reference = weakref.ref(own)
        hash(reference)
    except TypeError:
        return None
    return reference


def kind_of(image: Float[Tensor, "n c *size"]) -> InputKind:
    """Return the properties of an input that a decision depends on."""
    return tuple(image.shape[1:]), image.dtype, torch.get_default_dtype()
