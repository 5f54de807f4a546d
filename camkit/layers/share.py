"""How much of the score a layer carries, measured by running the part of the model after it on other feature maps."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.engine.capture import from_grid, to_grid
from camkit.engine.cut import cut
from camkit.engine.guard import switch_off_training
from camkit.engine.head import HeadRecording, modules_beside, returning
from camkit.engine.interrupts import interruptible, undisturbed
from camkit.engine.nested import feature_tensor, precise, tensors_in
from camkit.layers.names import modules_by_name
from camkit.layers.trace import LivePass, Trace, TracedCall, mixture, scored_tensor
from camkit.types import LayerRef, Layout

_SAME = 1e-3
"""How far two changes of the score may differ, as a share of them, and still count as equal: more than rounding."""

_LEAST, _SMALL, WHOLE = 0.003, 0.1, 0.95
"""Below the first share a layer is not chosen, and below the second one if a layer beside it carries the third, which
counts as the whole score. In the zoo, with random weights, the last tokens of transformers carry 0.03 to 0.4, and those
of a very small one 0.006; no tokens beside them carry the whole score."""

_BALANCED = 0.01
"""The share of the products of activations and gradients that their sum reaches in a cell if it is 0 by the formula: in
ConvNeXt, what the normalisation adds to the variance leaves less than 0.001."""

_NOT_DIFFERENTIABLE = "; its gradients differ from how the score changes, as if the model detached or reversed them"

_STEP, _STEPS = 0.01, 3
"""How far the feature maps are moved to check their gradient, as a share of each value, and in how many random
directions: with so small a step the head is nearly linear, and three directions rarely all miss a part of the
gradient."""

_LEAST_CHANGE, _LEAST_CHANGE_16_BITS = 256, 0.03
"""A change of the score below this many times the type's precision may be rounding, as a share of the score; and the
change that counts in every type, since 256 times the precision of 16 bits would be the whole score."""

_MOST_DEVIATION = 0.06
"""How far the change of the score may be from what the gradient predicts, squared, as a share of the change: networks
of the zoo reach 0.04, a gradient without half of its channels about 0.5, a reversed one 4."""


_SEED = 5821934
"""The seed of the noise; any fixed number will do, so that the same model and picture always give the
same result."""


@dataclass(frozen=True)
class Carried:
    """What a layer's cells carry.

    Attributes:
        share: the share of the score that passes through the layer's cells; None if it could not be measured.
        everything: True if the model returns one tensor that is computed from the cells alone, as any target then is.
        differentiable: False if the gradients at the layer differ from how the score changes.
    """

    share: float | None = None
    everything: bool = False
    differentiable: bool = True

    @property
    def is_weak(self) -> bool:
        """True if the layer carries next to nothing of the score."""
        return self.share is not None and self.share < _LEAST

    @property
    def is_small(self) -> bool:
        """True if the layer carries so little that another one that carries the whole score is better."""
        return self.share is not None and self.share < _SMALL

    def is_negligible_beside(self, other: Carried) -> bool:
        """Tell whether the layer carries too little to be explained in place of another one."""
        return self.is_weak or (self.is_small and other.share is not None and other.share > WHOLE)

    @property
    def is_sound(self) -> bool:
        """True if nothing speaks against explaining the layer."""
        return self.differentiable and not self.is_weak

    @property
    def remark(self) -> str:
        """A remark on the layer, to be appended to the reason for it; empty if it carries the whole score."""
        share = "" if self.share is None or self.share > WHOLE else f"; they carry {100 * self.share:.2g}% of it"
        return share + _NOT_DIFFERENTIABLE * (not self.differentiable)


def carried(live: LivePass, call: TracedCall, layout: Layout, *, constant: bool = False) -> Carried:
    """Find out how much of the score a layer's cells carry, and whether their gradients can be trusted.

    The share says how far the score moves if the layer's cells are those of another picture, while everything that was
    computed beside them stays, compared with how far it moves if the whole picture is the other one:
    ``|f(x, cells of x') - f(x)| / |f(x') - f(x)|``, where ``f`` is all class scores, or the score of one target. The
    other picture x' is noise in the range of this one. So biases cancel, and the maps are maps that a picture has,
    unlike zeros. The share is 1 if all paths from the picture to the score lead through the cells. In most networks
    the graph shows that, and nothing is measured. Nor is it if the score is ``constant``, as after a head of zeros.
    """
    if _is_on_all_paths(live.trace, call, to_grid(live.tensors[_number(call)].detach(), layout)):
        return Carried(1.0, _returns_one_tensor(live))
    if constant:
        return Carried()
    head = _Head(live, call, layout)
    try:
        share, everything = head.share()
        return Carried(share, everything, head.deviation() <= _MOST_DEVIATION)
    except Exception:  # noqa: BLE001 - a model may raise anything if a part of it runs alone
        return Carried()


def is_balanced(live: LivePass, call: TracedCall, layout: Layout) -> bool:
    """Tell whether activations times gradients add up to 0 in each cell, so that single products say little.

    They do if only a normalisation of each cell follows, as at the end of ConvNeXt's stages.
    """
    products = live.products(_number(call))
    if products is None:
        return False
    cells = to_grid(products, layout)
    return bool(cells.sum(1).abs().amax() <= _BALANCED * cells.abs().sum(1).amax())


def takes_one_cell(live: LivePass, call: TracedCall, layout: Layout) -> bool:
    """Tell whether the best box's score is computed from one cell of a layer alone."""
    gradient = live.of_best_box(_number(call))
    return gradient is not None and int(to_grid(gradient, layout).bool().any(1).sum()) == 1


def _is_on_all_paths(trace: Trace, call: TracedCall, cells: Tensor) -> bool:
    """Tell whether the graph shows that the score is computed from the cells alone, as the layer returned them."""
    if trace.hides or trace.end is None or call.operation is None:
        return False
    if not call.alone or cells.numel() < math.prod(call.shape):  # other tensors or tokens may carry some of it
        return False
    return not trace.graph.before(trace.end, 1 << call.operation) & trace.graph.inputs


def _number(call: TracedCall) -> int:
    assert call.output is not None
    return call.output


def _returns_one_tensor(live: LivePass) -> bool:
    return len(list(tensors_in(live.output))) == 1


class _Head:
    """The part of a model after one call of a layer."""

    def __init__(self, live: LivePass, call: TracedCall, layout: Layout) -> None:
        self._live, self._layout, self._number = live, layout, _number(call)
        self._ref, self._recorded = LayerRef(*call.key), HeadRecording(live.returned[call.key].value)
        modules, beside = modules_by_name(live.model), set(modules_beside(live.model, call.name))
        for other in live.trace.calls:
            if other.finished < call.finished and modules[other.name] in beside:
                returned = live.returned[other.key]
                self._recorded.before[modules[other.name]].append(returned.value if returned.unchanged else None)
        maps = feature_tensor(self._recorded.output)
        assert maps is not None
        is_kept = live.returned[call.key].unchanged  # otherwise the cells are no longer those that the layer returned
        self._maps = maps[1].detach() if is_kept else self._of_picture(live.leaf.detach().clone())[1]
        self._cells = to_grid(self._maps, layout)

    @functools.cached_property
    def _unchanged(self) -> Any:
        """What the head returns for the picture's own cells."""
        return self._run(self._cells)

    def share(self) -> tuple[float | None, bool]:
        """Return the share of the score that the cells carry, and whether they carry all that the model returns."""
        with torch.no_grad():
            own, (other, maps) = self._score(self._unchanged), self._of_picture(_noise(self._live.leaf.detach()))
            change = (other - own).norm()
            if not change > self._rounding(own.norm()):  # "not >" holds for NaN
                return None, False
            moved = self._score(self._run(to_grid(maps, self._layout))) - own
            is_whole = bool((moved - (other - own)).norm() <= _SAME * change)
            return float(moved.norm() / change), is_whole and _returns_one_tensor(self._live)

    def deviation(self) -> float:
        """Move the cells a little in random directions, and return how far the change is from what gradients predict.

        It is the squared difference as a share of the squared change, or of the prediction if that is larger; 0 if
        neither can be measured.
        """
        gradient = self._gradient() if self._maps.dtype in (torch.float32, torch.float64) else None
        if gradient is None:
            return 0.0
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            noise = torch.randn((_STEPS, *self._cells.shape), generator=generator).to(self._cells)
            steps = _STEP * noise * self._cells
            own = self._scalar(self._unchanged)
            changes = torch.stack([self._scalar(self._run(self._cells + step)) - own for step in steps])
            predicted = (gradient * steps).flatten(1).sum(1)
            largest = torch.maximum(changes.norm(), predicted.norm())
            if not largest > self._rounding(own.abs()):
                return 0.0
            return float(((changes - predicted).norm() / largest) ** 2)

    def _rounding(self, size: Tensor) -> Tensor:
        return min(_LEAST_CHANGE * torch.finfo(self._maps.dtype).eps, _LEAST_CHANGE_16_BITS) * size

    def _gradient(self) -> Tensor | None:
        gradient = self._live.differentiate(self._scalar(self._live.output), [self._number]).get(self._number)
        return None if gradient is None else to_grid(gradient, self._layout)

    def _score(self, output: Any) -> Tensor:
        """Return what the share compares, as a vector."""
        return precise(self._scored(output).detach()).flatten()

    def _scalar(self, output: Any) -> Tensor:
        """Return one number whose gradient is compared with its changes."""
        return mixture(self._scored(output))

    def _scored(self, output: Any) -> Tensor:
        scored = scored_tensor(output) if self._live.target is None else self._live.target(output)
        assert scored is not None
        return scored

    def _run(self, cells: Float[Tensor, "1 c *grid"]) -> Any:
        """Run the head on other cells; everything beside them is as the picture gave it."""
        model = self._live.model
        switch_off_training(model)
        output = from_grid(cells, self._maps, self._layout).clone()
        with undisturbed(), returning(model, self._ref, self._recorded, output), interruptible():
            return model(self._live.leaf.detach().clone())

    def _of_picture(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        """Return the score of a picture, and the layer's output."""
        model = self._live.model
        layer = {self._ref: model.get_submodule(self._ref.name)}
        switch_off_training(model)
        with torch.no_grad(), undisturbed(), cut(layer, gradients=False) as tape, interruptible():
            score = self._score(model(picture))
        return score, tape.layers[self._ref].output


def _noise(image: Tensor) -> Tensor:
    """Return uniform noise within two standard deviations of the image's mean, and within its range."""
    values = image.float()
    mean, deviation = values.mean(), values.std(correction=0)
    low, high = torch.maximum(values.min(), mean - 2 * deviation), torch.minimum(values.max(), mean + 2 * deviation)
    if not high > low:  # all pixels are equal
        low, high = (low.clamp(max=0), high.clamp(min=0)) if low != 0 else (low, low + 1)
    drawn = torch.rand(image.shape, generator=torch.Generator().manual_seed(_SEED)).to(image.device)
    return (low + drawn * (high - low)).to(image)
