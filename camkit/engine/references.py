"""What a model returns for reference pictures, and what one of its layers does."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.cut import cut
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import mapped, precise
from camkit.engine.passes import in_parts
from camkit.engine.record import WeightMarks
from camkit.errors import MethodError
from camkit.models.modules import usual_batch_size
from camkit.targets.scores import Target
from camkit.types import LayerRef

_MOST_KEPT = 4
"""How many layers or sizes of input have their references' maps kept. Those of 16 pictures take 50 MB at ResNet-50's
first stage, and 2 MB at its last."""


@dataclass(frozen=True, eq=False)
class ReferencePictures:
    """Reference pictures as a model receives them, and what they are, as a phrase."""

    inputs: Float[Tensor, "m c *size"]
    words: str

    @functools.cached_property
    def key(self) -> str:
        """A checksum of the pictures."""
        return hashlib.blake2b(self.inputs.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


ReferencesFor: TypeAlias = Callable[[Tensor], ReferencePictures]
"""``references(image)`` returns the reference pictures for a model's input (1, c, *size)."""


@dataclass(frozen=True, eq=False)
class ReferenceMaps:
    """The layer's whole outputs for M reference pictures, joined; and the model's outputs, pass by pass."""

    outputs: Tensor
    answers: tuple[tuple[Any, int], ...]

    def __len__(self) -> int:
        """Return how many reference pictures there are."""
        return sum(count for _, count in self.answers)

    def scores(self, target: Target) -> Float[Tensor, " m"]:
        """Return the score of each reference picture."""
        return torch.cat([precise(target(output, count).values.detach()) for output, count in self.answers])


class KeptReferences:
    """Keeps the maps of the last reference pictures, layers and sizes, while the model's weights are the same."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[WeightMarks, ReferenceMaps]] = OrderedDict()

    def maps(self, key: Hashable, modules: Sequence[nn.Module], run: Callable[[], ReferenceMaps]) -> ReferenceMaps:
        """Return what is kept under a key, or else what ``run`` returns."""
        kept = self._kept.pop(key, None)
        if kept is None or not kept[0].still_hold(modules):
            kept = WeightMarks(modules), run()
        self._kept[key] = kept
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return kept[1]


def run_references(
    model: nn.Module,
    ref: LayerRef,
    images_axis: int,
    inputs: Float[Tensor, "m c *size"],
    each_pass: Callable[[], AbstractContextManager[None]],
    *,
    apart: bool,
) -> ReferenceMaps:
    """Run the model on reference pictures.

    Args:
        model: the model; it is restored exactly.
        ref: the layer.
        images_axis: the axis of the layer's output that the pictures lie along.
        inputs: the pictures, on the model's device.
        each_pass: returns the context in which one pass is run.
        apart: False if the model mixes the pictures of a batch.

    Raises:
        MethodError: the layer's outputs differ in shape.
    """
    outputs: list[Tensor] = []
    answers: list[tuple[Any, int]] = []

    def run(part: range) -> None:
        with each_pass(), cut({ref: model.get_submodule(ref.name)}, gradients=False) as tape, interruptible():
            output = model(inputs[part.start : part.stop].clone())
            outputs.append(tape.layers[ref].output)
            answers.append((mapped(output, _detached), len(part)))

    in_parts(len(inputs), usual_batch_size(inputs.device) if apart else 1, run)
    shapes = {tuple(output.movedim(images_axis, 0).shape[1:]) for output in outputs}
    if len(shapes) > 1:
        raise MethodError(
            f"layer {str(ref)!r} returns outputs of different shapes for the reference pictures; choose another layer, "
            "or use 'gradcam'"
        )
    return ReferenceMaps(torch.cat(outputs, images_axis), tuple(answers))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
