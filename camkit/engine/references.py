"""What a model returns for reference pictures, and what one of its layers does."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.nested import precise
from camkit.engine.record import WeightMarks
from camkit.targets.scores import Target

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
