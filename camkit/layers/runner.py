"""Runs a method on a model: at the layers that the caller named, or at those that the method takes of a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.engine.cut import RepeatedError
from camkit.engine.passes import Capture, NotRunError, Pass, ignoring_errors, is_overwriting, keeping_overwritten
from camkit.errors import LayerError, MethodError
from camkit.layers.choose import decide
from camkit.layers.decision import UNSURE, Decision, Levels
from camkit.layers.layouts import infer_layout
from camkit.layers.memory import ModelMemory, kind_of
from camkit.layers.trace import FramesFirstError
from camkit.methods import AUTO, METHODS, SHARPENED, Method
from camkit.methods.on_attention import check_cells
from camkit.methods.on_one_picture import at_once
from camkit.methods.registry import FINE, FROM_FILE, Way, sharpening
from camkit.targets.classes import EachFiner, TopTarget
from camkit.targets.scores import Target
from camkit.types import WHOLE_MODEL, TargetLayer

_AS_NAMED = "as named"


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


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs one model with one method.

    Attributes:
        memory: what is known about the model.
        selectors: the layers that the caller named; None if camkit chooses the layer.
        method: the method that is asked for.
        options: the other options of ``explain``. "references" returns the reference pictures for an input.
    """

    memory: ModelMemory
    selectors: tuple[Any, ...] | None
    method: Method
    options: Mapping[str, Any]

    def __call__(self, targets: tuple[Target, ...], inputs: Float[Tensor, "n c *size"]) -> Ran:
        """Run the model on a batch.

        Raises:
            OneByOneError: each picture of the batch needs a pass of its own.
            OneTargetError: the targets need different layers.
            LayerError: a layer that the caller named does not run, or none can be chosen.
            MethodError: the method needs something that the model does not have.
            Exception: whatever the model or a target raises.
        """
        method = self.method
        if method == AUTO and self.selectors is None and "eigen" in (self.options["smooth"] or ""):
            method = METHODS["gradcam"]  # the component is that of one layer's weighted maps
        if method.finer:
            targets = tuple(map(EachFiner, targets))
        if method.layer:
            return self._of_layers(method, targets, inputs)
        if inputs.dim() == 5:  # clips or volumes; a clip whose second axis is time passes for channels, and is refused
            self._decision_if_any(inputs[:1])
        if method.reads_attention:
            return self._of_tokens(method, targets, inputs)
        layer = replace(WHOLE_MODEL, reason="the file computes its heat itself") if method == FROM_FILE else WHOLE_MODEL
        return Ran(self._run(method, targets, inputs, ()), (layer,), method)

    def settled(self, inputs: Float[Tensor, "n c *size"]) -> tuple[Ran, Callable[[Tensor, Target], Capture]]:
        """Explain the best class of each picture; also return a function that uses the same method and layers.

        The errors are those of a call.
        """
        ran = self((TopTarget(),), inputs)
        method, layers = ran.method, ran.layers
        if method.reads_attention:
            method, layers = self._settled(method, (), inputs)
        memory, refs = self.memory, tuple(layer.ref for layer in layers)
        modules = memory.selected(refs) if refs else {}
        layouts = memory.placed([layer for layer in layers if layer.size], inputs[:1], self.options["spread"])

        def run(pictures: Tensor, target: Target) -> Capture:
            one_pass = Pass(memory.living, pictures, (target,), modules, layouts, afresh=isinstance(layers, Levels))
            return method.joined(method.run(one_pass), tuple(inputs.shape[2:]))

        return ran, run

    def _of_layers(self, method: Method, targets: tuple[Target, ...], inputs: Tensor) -> Ran:
        """Run the model with its layers; with all tokens if "auto" stands for a method that reads attention."""
        way = self._settled(method, targets, inputs, attends=kind_of(inputs) not in self.memory.not_all_tokens)
        if way[0].reads_attention:
            try:
                ran = self._of_tokens(way[0], targets, inputs)
            except MethodError:  # its attention runs in windows, for example
                self.memory.not_all_tokens.add(kind_of(inputs))
                way = self._settled(method, targets, inputs)
            else:
                (layer,) = ran.layers
                reason = f"auto: attention runs between all tokens; {layer.reason}"
                return replace(ran, layers=(replace(layer, reason=reason),))
        captured, layers, used = self._at_layers(method, targets, inputs, way)
        captured = used.joined(captured, tuple(inputs.shape[2:]))
        # Grad-CAM weights whole channels, which a detector's boxes share.
        for_boxes = METHODS["hirescam"] if self.method in (AUTO, SHARPENED) and not isinstance(way[1], Levels) else None
        return Ran(captured, layers, used, for_boxes)

    def _of_tokens(self, method: Method, targets: tuple[Target, ...], inputs: Tensor) -> Ran:
        """Run the model with a layer that has its tokens, which says how they form a grid."""
        kind, memory = kind_of(inputs), self.memory
        try:
            way = self._settled(method, (), inputs)
            captured, (tokens,), _ = self._at_layers(method, targets, inputs, way)
        except LayerError as error:
            raise MethodError(
                f"{method.name!r} needs tokens that form a grid, and camkit finds none in this model; use "
                "'gradcam' or 'hirescam' with a layer that you name"
            ) from error
        (layout,) = captured.layouts
        if (kind, layout) not in memory.checked_tokens:
            check_cells(memory.living, inputs[:1], layout, method.name, memory.record)
            memory.checked_tokens.add((kind, layout))
        reason = WHOLE_MODEL.reason + ("" if tokens.sure else UNSURE)
        return Ran(captured, (replace(WHOLE_MODEL, reason=reason, sure=tokens.sure),), method)

    def _at_layers(
        self, method: Method, targets: tuple[Target, ...], inputs: Tensor, way: Way
    ) -> tuple[Capture, tuple[TargetLayer, ...], Method]:
        """Run a method at layers; at others if what was remembered of the model no longer holds."""
        used, layers = way
        captured: Capture | None = None
        try:
            captured = self._run(used, targets, inputs, layers)
        except NotRunError:
            if self.selectors is not None:
                raise
        # The layers return grids of the decided size, or the maps have the input's size.
        if captured is None or not all(
            layer.layout is None or tuple(maps.activations.shape[2:]) in (layer.layout.grid, layer.size)
            for layer, maps in zip(layers, captured.features, strict=True)
        ):
            self.memory.forget()
            used, layers = self._settled(method, targets, inputs)
            captured = self._run(used, targets, inputs, layers)
        if self.selectors is None and _may_miss(captured, used):
            # This picture and this target may need another layer, for example if the best of several scales decides.
            if len(inputs) > 1:
                raise OneByOneError
            if len(targets) > 1:
                raise OneTargetError
            decision = decide(self.memory.living, inputs, self.memory.record, target=targets[0])
            if decision.layer is not None and decision.lasting and decision.layer.ref != layers[-1].ref:
                used, layers = method.at(decision)
                captured = self._run(used, targets, inputs, layers)
        return captured, layers, used

    def _settled(self, method: Method, targets: tuple[Target, ...], inputs: Tensor, *, attends: bool = False) -> Way:
        """Return the layers that the caller named, or that the decision gives; and what "auto" stands for there."""
        if self.selectors is not None:
            return self._at_named(method, inputs)
        first, *others = [method.at(self._decision(inputs, target), attends) for target in targets or (None,)]
        if any([layer.ref for layer in layers] != [layer.ref for layer in first[1]] for _, layers in others):
            raise OneTargetError
        return first

    def _at_named(self, method: Method, inputs: Tensor) -> Way:
        """Return the named layers, as the decision describes them unless the caller passed all that is known of them.

        At the deepest grid, and at coarse ones, "auto" is Grad-CAM. In earlier layers the mean gradient of a channel
        says next to nothing about a cell, so each cell has its own weight there. If the model cannot run on a single
        image, the layouts are read from shapes.
        """
        size, refs = tuple(inputs.shape[2:]), self.memory.selected(self.selectors or ())
        given = [layer for layer in self.selectors or () if isinstance(layer, TargetLayer)]
        known = {layer.ref: layer for layer in given if layer.size == size and layer.layout is not None}
        if known.keys() >= set(refs):
            layers = tuple(known[ref] for ref in refs)
        else:
            decision = self._decision_if_any(inputs)
            layers = tuple(
                TargetLayer(ref.name, ref.call, reason=_AS_NAMED + UNSURE, sure=False)
                if decision is None
                else decision.named(ref, _AS_NAMED)
                for ref in refs
            )
        if method == SHARPENED:
            return sharpening(layers) if len(layers) == 2 else (METHODS["gradcam"], layers)
        if method != AUTO:
            return method, layers
        grids = [layer.layout.grid for layer in layers if layer.layout is not None]
        if all(min(grid[-2:]) < FINE for grid in grids):
            return METHODS["gradcam"], layers
        decision = self._decision_if_any(inputs)
        deepest = None if decision is None or decision.layer is None else decision.layer.layout
        is_deep = deepest is not None and all(grid == deepest.grid for grid in grids)
        return METHODS["gradcam" if is_deep else "gradcam-elementwise"], layers

    def _decision(self, inputs: Tensor, target: Target | None = None) -> Decision:
        """Return the decision on the model's layers for a batch and a target.

        Raises:
            OneByOneError: each picture of the batch needs a decision of its own.
        """
        decision = self.memory.decision(inputs[:1], target)
        if decision.of_picture and len(inputs) > 1:
            raise OneByOneError
        return decision

    def _decision_if_any(self, inputs: Tensor) -> Decision | None:
        """Return the decision for a batch; None if the model cannot run on a single image, or for any other reason.

        Raises:
            OneByOneError, FramesFirstError: as for ``_decision``, and if the model reads clips as (N, T, C, H, W).
        """
        with ignoring_errors(OneByOneError, FramesFirstError):  # a model may be made for batches of another size
            return self._decision(inputs)
        return None

    def _run(
        self,
        method: Method,
        targets: tuple[Target, ...],
        inputs: Tensor,
        layers: Sequence[TargetLayer],
    ) -> Capture:
        memory = self.memory
        refs = tuple(layer.ref for layer in layers)
        modules = memory.selected(refs) if refs else {}
        in_a_pass = at_once(inputs.device) if method.one_by_one else len(inputs)
        apart = memory.keeps_pictures_apart(inputs, in_a_pass, modules)
        if len(inputs) > 1 and (method.one_by_one or not apart):
            raise OneByOneError
        one_pass = Pass(
            memory.living,
            inputs,
            targets,
            modules,
            memory.placed([layer for layer in layers if layer.size], inputs[:1], self.options["spread"]),
            infer_layout,
            precision=self.options["precision"],
            record=memory.record,
            progress=self.options["progress"],
            apart=apart,
            references=self.options["references"],
            afresh=isinstance(layers, Levels),
        )
        try:
            with keeping_overwritten() if memory.overwrites else nullcontext():
                return method.run(one_pass)
        except RepeatedError:
            if len(inputs) > 1:  # the model may take a few pictures at a time
                raise OneByOneError from None
            raise
        except RuntimeError as error:
            if memory.overwrites or not is_overwriting(error):
                raise
            memory.overwrites = True
            return self._run(method, targets, inputs, layers)


def _may_miss(captured: Capture, method: Method) -> bool:
    """Tell whether some score does not depend on the layers; a box may come from one of several grids."""
    if not method.reads_gradients:
        return False
    by_target = zip(*(features.by_target for features in captured.features), strict=True)
    influences = (torch.stack([each.flatten(1).any(1) for each in gradients]).any(0) for gradients in by_target)
    return not all(bool(influence.all()) for influence in influences)
