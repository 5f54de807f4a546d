"""Runs the model with the layers to explain: the layers that the caller named, or the layer that camkit chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import NotRunError, Pass
from camkit.engine.capture_attention import NoAttentionError, check_cells
from camkit.engine.capture_pictures import at_once
from camkit.engine.cut import RepeatedError
from camkit.engine.features import Capture
from camkit.engine.passes import faster_format, is_overwriting, keeping_overwritten
from camkit.engine.references import ReferencesFor
from camkit.errors import LayerError, MethodError
from camkit.layers.decision import UNSURE, Decision, Levels
from camkit.layers.layouts import TOKENS, infer_layout, plain_layout
from camkit.layers.memory import ModelMemory, kind_of
from camkit.layers.names import Layers
from camkit.layers.operations import watching_places
from camkit.layers.trace import FramesFirstError
from camkit.methods import METHODS, ODAM, SHARPENED, Method
from camkit.methods.joined import pooled, sharpened
from camkit.methods.registry import FINE
from camkit.methods.runs import run as run_for
from camkit.targets.classes import EachFiner
from camkit.targets.scores import Target
from camkit.types import WHOLE_MODEL, LayerRef, Layout, Precision, Progress, Spread, TargetLayer

_AS_NAMED = "as named"

_Run: TypeAlias = Callable[..., Capture]
"""Runs the model with some layers, ``run(layers)``; ``read_layout`` reads the layout of those that have none yet."""


class OneByOneError(Exception):
    """The model does not treat each picture of a batch as if it were alone, so camkit explains them one by one."""


class OneTargetError(Exception):
    """The targets need different layers, so camkit explains them one by one."""


@dataclass(frozen=True, eq=False)
class Ran:
    """What a pass left for the maps, the layers it was run with, and the methods for the maps and those of boxes."""

    captured: Capture
    layers: tuple[TargetLayer, ...]
    method: Method
    for_boxes: Method | None = None


class _NotPlainError(Exception):
    """A layer's shape alone does not say where its cells lie."""


class LayerPasses:
    """Runs one model with one method, and with the layers that the caller named or that camkit chooses.

    Args:
        module: the model.
        memory: what is known about the model.
        target_layer: None lets camkit choose the layer.
        method: the method that is asked for.
        weights_maps: True if the method must weight feature maps.
        precision: of the passes.
        spread: how the cells are spread over the picture.
        progress: called while a method runs the model on many pictures.
        references: returns the reference pictures for an input, for methods that need them.

    Raises:
        LayerError: there is no such layer.

    Attributes:
        selectors: what the caller named; None if camkit chooses the layer.
    """

    def __init__(
        self,
        module: nn.Module,
        memory: ModelMemory,
        target_layer: Layers | None,
        method: Method,
        precision: Precision,
        spread: Spread,
        progress: Progress | None,
        references: ReferencesFor | None = None,
        *,
        weights_maps: bool = False,
    ) -> None:
        self.memory = memory
        self.method = method
        self.selectors = None if target_layer is None else _selectors(target_layer)
        self._module = module
        self._precision: Precision = precision
        self._spread = spread
        self._progress = progress
        self._references = references
        self._weights_maps = weights_maps
        self._adds_levels = method.pools or (method.automatic and not weights_maps)
        self._given = {layer.ref: layer for layer in self.selectors or () if isinstance(layer, TargetLayer)}
        self._modules: Mapping[LayerRef, nn.Module] = {}
        self._modules_of: object = None
        self.named()

    def named(self) -> Mapping[LayerRef, nn.Module]:
        """Return the layers that the caller named, with their modules; empty if camkit chooses the layer."""
        if self.selectors is not None and self._modules_of is not self.memory.record:
            self._modules = self.memory.selected(self.selectors)
            self._modules_of = self.memory.record
        return self._modules

    def captured(self, targets: tuple[Target, ...], inputs: Float[Tensor, "n c *size"]) -> Ran:
        """Run the model on a batch.

        Raises:
            OneByOneError: each picture of the batch needs a decision of its own.
            OneTargetError: the targets need different layers.
            LayerError: a layer that the caller named does not run, or none can be chosen.
            MethodError: the method needs something that the model does not have.
            Exception: whatever the model or a target raises.
        """
        if not self.memory.overwrites:
            try:
                return self._ran(targets, inputs)
            except RuntimeError as error:
                if not is_overwriting(error):
                    raise
        with keeping_overwritten():
            ran = self._ran(targets, inputs)
        self.memory.overwrites = True
        return ran

    def _ran(self, targets: tuple[Target, ...], inputs: Tensor) -> Ran:
        if self.method.automatic and not self._weights_maps and self._may_attend(targets, inputs):
            try:
                captured, layers = self._by_attention._captured(targets, inputs)
            except MethodError:  # its attention runs in windows, for example
                self.memory.not_all_tokens.add(kind_of(inputs))
            else:
                reason = "auto: attention runs between all tokens"
                layers = tuple(replace(layer, reason=f"{reason}; {layer.reason}") for layer in layers)
                return Ran(captured, layers, self._by_attention.method)
        captured, layers = self._captured(targets, inputs)
        if not self.method.varies:
            return Ran(captured, layers, self.method)
        if self.method.pools or isinstance(layers, Levels):
            return Ran(pooled(captured, tuple(inputs.shape[2:])), layers, ODAM)
        for_boxes = METHODS["hirescam"]  # Grad-CAM weights whole channels, which a detector's boxes share.
        if self.method.automatic and self.selectors is not None:
            return Ran(captured, layers, self._method_at(layers, inputs), for_boxes)
        if len(layers) != 2:
            return Ran(captured, layers, METHODS["gradcam"], for_boxes)
        finer, deepest = layers
        reason = f"{deepest.reason}; sharpened by {finer}: {finer.reason}"
        layers = finer, replace(deepest, reason=reason)
        return Ran(sharpened(captured, tuple(inputs.shape[2:])), layers, SHARPENED)

    def _method_at(self, layers: Sequence[TargetLayer], inputs: Tensor) -> Method:
        """Return what "auto" stands for at layers that the caller named.

        At the deepest grid, and at coarse ones, it is Grad-CAM. In earlier layers the mean gradient of a channel says
        next to nothing about a cell, so each cell has its own weight there.
        """
        grids = [layer.layout.grid for layer in layers if layer.layout is not None]
        if all(min(grid[-2:]) < FINE for grid in grids):
            return METHODS["gradcam"]
        decision = self._decision_if_any(inputs)
        deepest = None if decision is None else decision.layer
        own = None if deepest is None or deepest.layout is None else deepest.layout.grid
        return METHODS["gradcam" if all(grid == own for grid in grids) else "gradcam-elementwise"]

    def _may_attend(self, targets: tuple[Target, ...], inputs: Tensor) -> bool:
        """Tell whether the layer is camkit's choice and has tokens, and nothing is known against attention methods."""
        if self.selectors is not None or kind_of(inputs) in self.memory.not_all_tokens:
            return False
        layouts = [self._decision(inputs, target).chosen().layout for target in targets or (None,)]
        return all(layout is not None and layout.kind in TOKENS for layout in layouts)

    @functools.cached_property
    def _by_attention(self) -> LayerPasses:
        """Runs the same model with the method for attention between all tokens."""
        method = METHODS["chefer"]
        return LayerPasses(self._module, self.memory, None, method, self._precision, self._spread, self._progress)

    def _captured(self, targets: tuple[Target, ...], inputs: Tensor) -> tuple[Capture, tuple[TargetLayer, ...]]:
        if self.method.finer:
            targets = tuple(map(EachFiner, targets))
        run = functools.partial(self._run, targets, inputs)
        if self.method.layer:
            return self._captured_at_layers(self.named(), inputs, targets, run)
        if inputs.dim() == _CLIP:
            self._decision_if_any(inputs[:1])  # refuses clips whose second axis is time; it would pass for channels
        return self._captured_of_tokens(inputs, run) if self.method.need.attention else (run(()), (WHOLE_MODEL,))

    def _captured_of_tokens(self, inputs: Tensor, run: _Run) -> tuple[Capture, tuple[TargetLayer, ...]]:
        """Run the model with a layer that has its tokens, which says how they form a grid."""
        kind, name = kind_of(inputs), self.method.name
        if kind in self.memory.without_attention:
            raise NoAttentionError(name)
        try:
            captured, (tokens,) = self._captured_at_layers({}, inputs, (), run)
        except LayerError as error:
            raise MethodError(
                f"{name!r} needs tokens that form a grid, and camkit finds none in this model; use "
                "'gradcam' or 'hirescam' with a layer that you name"
            ) from error
        (layout,) = captured.layouts
        if (kind, layout) not in self.memory.checked_tokens:
            check_cells(self._module, inputs[:1], layout, name, self.memory.record)
            self.memory.checked_tokens.add((kind, layout))
        doubt = "" if tokens.sure else UNSURE
        return captured, (replace(WHOLE_MODEL, reason=WHOLE_MODEL.reason + doubt, sure=tokens.sure),)

    def _captured_at_layers(
        self, modules: Mapping[LayerRef, nn.Module], inputs: Tensor, targets: tuple[Target, ...], run: _Run
    ) -> tuple[Capture, tuple[TargetLayer, ...]]:
        """Run the model with the layers that the caller named, or else with the layer that camkit chooses."""
        layers = self._known(modules, inputs) if modules else None
        if layers is None and modules and not self.memory.has_decided(inputs):
            first = self._first_look(modules, inputs, run)
            if first is not None:
                return first
        if layers is None:
            layers = self._decided(modules, inputs, targets)
        captured: Capture | None = None
        try:
            captured = run(layers)
        except NotRunError:
            if modules:  # the caller named the layer
                raise
        if captured is None or not _fits(captured, layers):
            self.memory.forget()
            layers = self._decided(modules, inputs, targets)
            captured = run(layers)
        if not modules and self._may_miss(captured, layers):
            return self._captured_anew(inputs, targets, run, captured, layers)
        return captured, layers

    def _may_miss(self, captured: Capture, layers: Sequence[TargetLayer]) -> bool:
        """Tell whether the layer is known to carry only a part of the score, and some score does not depend on it."""
        is_partial = any(layer.share not in (None, 1.0) for layer in layers)
        if not is_partial or not self.method.need.gradients:
            return False
        gradients = (gradient for features in captured.features for gradient in features.by_target)
        return not all(bool(gradient.flatten(1).any(1).all()) for gradient in gradients)

    def _captured_anew(
        self,
        inputs: Tensor,
        targets: tuple[Target, ...],
        run: _Run,
        captured: Capture,
        layers: tuple[TargetLayer, ...],
    ) -> tuple[Capture, tuple[TargetLayer, ...]]:
        """Choose the layer for this picture and this target, for example if the best of several scales decides.

        Raises:
            OneByOneError, OneTargetError: there are several pictures or targets.
        """
        if len(inputs) > 1:
            raise OneByOneError
        if len(targets) > 1:
            raise OneTargetError
        decision = self.memory.decision_for(inputs, targets[0])
        if decision.layer is None or decision.layer.ref == layers[-1].ref:
            return captured, layers
        layers = self._chosen(decision)
        return run(layers), layers

    def _known(self, modules: Mapping[LayerRef, nn.Module], inputs: Tensor) -> tuple[TargetLayer, ...] | None:
        """Return the layers that the caller named if all of them are known for inputs of this size."""
        size, memory = tuple(inputs.shape[2:]), self.memory
        given = [self._given.get(ref) for ref in modules]
        known = [
            layer
            if layer is not None and layer.layout is not None and layer.size == size
            else memory.known(ref, inputs)
            for ref, layer in zip(modules, given, strict=True)
        ]
        layers = tuple(layer for layer in known if layer is not None)
        return layers if len(layers) == len(known) else None

    def _first_look(
        self, modules: Mapping[LayerRef, nn.Module], inputs: Tensor, run: _Run
    ) -> tuple[Capture, tuple[TargetLayer, ...]] | None:
        """Run the model with named layers about which nothing is known yet; None if they need a decision first.

        They need none if each returns (N, C, *grid) in proportion to the input, and all operations before it leave
        cells in their places.
        """
        unknown = tuple(TargetLayer(ref.name, ref.call, reason=_AS_NAMED) for ref in modules)
        try:
            with watching_places(self._module, modules.values(), inputs) as kept:
                captured = run(unknown, read_layout=_plain_or_not)
        except _NotPlainError:
            return None
        if not all(kept.get(module, False) for module in modules.values()):
            return None
        size = tuple(inputs.shape[2:])
        both = zip(unknown, captured.layouts, strict=True)
        layers = tuple(replace(layer, layout=layout, size=size) for layer, layout in both)
        for layer in layers:
            self.memory.remember(layer, inputs)
        placed = self.memory.placed(layers, inputs[:1], self._spread)
        if all(placed.get(layer.ref) is layer.layout for layer in layers):
            return captured, layers
        return run(layers), layers

    def _decided(
        self, modules: Mapping[LayerRef, nn.Module], inputs: Tensor, targets: tuple[Target, ...]
    ) -> tuple[TargetLayer, ...]:
        """Return the layers that the caller named, as the decision describes them; or the layer that it chose.

        If the model cannot run on a single image, the layouts of named layers are read from their shapes.
        """
        if not modules:
            choices = [self._chosen(self._decision(inputs, target)) for target in targets or (None,)]
            if any([layer.ref for layer in other] != [layer.ref for layer in choices[0]] for other in choices[1:]):
                raise OneTargetError
            return choices[0]
        decision = self._decision_if_any(inputs)
        if decision is None:
            return tuple(TargetLayer(ref.name, ref.call, None, (), _AS_NAMED + UNSURE, sure=False) for ref in modules)
        layers = tuple(decision.named(ref, _AS_NAMED) for ref in modules)
        for layer in layers if decision.holds_for == "model" else ():
            self.memory.remember(layer, inputs)
        return layers

    def _chosen(self, decision: Decision) -> tuple[TargetLayer, ...]:
        """Return the layers that a decision chose for the method."""
        if self.method.stages:
            return decision.stages()
        if decision.levels and self._adds_levels:
            return decision.levels
        if self.method.need.attention:
            return (decision.of_tokens(),)
        chosen = decision.chosen()
        sharpens = (self.method.automatic and not self._weights_maps) or self.method.sharpens
        return (decision.finer, chosen) if sharpens and decision.finer is not None else (chosen,)

    def _decision(self, inputs: Tensor, target: Target | None = None) -> Decision:
        """Return the decision on the model's layers for a batch and a target.

        Raises:
            OneByOneError: each picture of the batch needs a decision of its own.
        """
        decision = self.memory.decision(inputs[:1], target)
        if decision.holds_for == "picture" and len(inputs) > 1:
            raise OneByOneError
        return decision

    def _decision_if_any(self, inputs: Tensor) -> Decision | None:
        """Return the decision for a batch; None if the model cannot run on a single image, or for any other reason.

        Raises:
            OneByOneError, FramesFirstError: as for ``_decision``.
        """
        try:
            return self._decision(inputs)
        except (OneByOneError, FramesFirstError):
            raise
        except Exception:  # a model made for batches of another size may raise anything
            return None

    def _run(
        self,
        targets: tuple[Target, ...],
        inputs: Tensor,
        layers: Sequence[TargetLayer],
        read_layout: Any = infer_layout,
    ) -> Capture:
        module, memory = self._module, self.memory
        refs, method = tuple(layer.ref for layer in layers), self.method
        modules = memory.selected(refs) if refs else {}
        in_a_pass = at_once(inputs.device) if method.need.one_by_one else len(inputs)
        apart = memory.keeps_pictures_apart(inputs, in_a_pass, modules)
        if not apart and len(inputs) > 1:
            raise OneByOneError
        layouts = memory.placed([layer for layer in layers if layer.size], inputs[:1], self._spread)
        batch = inputs.expand(at_once(inputs.device), *inputs.shape[1:]) if method.need.pictures else inputs
        options = Pass(
            modules,
            layouts,
            read_layout,
            precision=self._precision,
            memory_format=faster_format(module, batch, self._precision, memory.answers_alike),
            record=memory.record,
            may_resize=memory.may_resize,
            users_code=not all(target.for_threads for target in targets),
            progress=self._progress,
            apart=apart,
            references=self._references,
            kept_references=memory.kept_references,
            afresh=isinstance(layers, Levels),
        )
        try:
            captured = run_for(method, module, inputs, targets, options)
        except NoAttentionError:
            memory.without_attention.add(kind_of(inputs))
            raise
        except RepeatedError:
            if len(inputs) > 1:  # the model may take a few pictures at a time
                raise OneByOneError from None
            raise
        memory.may_resize = captured.resized
        return captured


_CLIP = 5
"""The axes of a batch of clips or volumes, (N, C, D, H, W)."""


def _selectors(target_layer: Layers) -> tuple[Any, ...]:
    """Return what the caller passed as target layers as a tuple."""
    if isinstance(target_layer, (str, nn.Module, LayerRef, TargetLayer, type)) or not isinstance(
        target_layer, Iterable
    ):
        return (target_layer,)
    selectors = tuple(target_layer)
    if not selectors:
        raise LayerError("the list of target layers is empty; pass None to let camkit choose the layer")
    return selectors


def _plain_or_not(shape: tuple[int, ...], batch: int, size: tuple[int, ...]) -> Layout:
    layout = plain_layout(shape, batch, size)
    if layout is None:
        raise _NotPlainError
    return layout


def _fits(captured: Capture, layers: Sequence[TargetLayer]) -> bool:
    """Tell whether the layers returned grids of the decided size, or the maps have the input's size."""
    return all(
        layer.layout is None or tuple(maps.activations.shape[2:]) in (layer.layout.grid, layer.size)
        for layer, maps in zip(layers, captured.features, strict=True)
    )
