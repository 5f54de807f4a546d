"""Targets on class scores (N, K): a class, the best ones, all above a threshold, one logit's direction, a contrast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.errors import TargetError
from camkit.targets.boxes import best_box
from camkit.targets.maps import biggest_class, class_on_map
from camkit.targets.names import check_index, class_of
from camkit.targets.outputs import describe, detections_of, logits_of, maps_of
from camkit.targets.scores import Scores, Target
from camkit.types import Activation

TargetFunction: TypeAlias = Callable[[Any], Tensor]


def probabilities(logits: Float[Tensor, "n k"], activation: Activation | None) -> Float[Tensor, "n k"] | None:
    """Return what the logits say as probabilities; None where they have none."""
    how = activation or ("sigmoid" if logits.shape[1] == 1 else "softmax")
    if how == "none":
        return None
    values = logits.detach().float()
    return values.sigmoid() if how == "sigmoid" else values.softmax(dim=1)


def class_scores(logits: Float[Tensor, "n k"], indices: Tensor, activation: Activation | None) -> Scores:
    """Return the logits of one class for each image."""
    shares = probabilities(logits, activation)
    return Scores(
        values=logits.gather(1, indices[:, None])[:, 0],
        indices=tuple(indices.tolist()),
        probabilities=None if shares is None else tuple(shares.gather(1, indices[:, None])[:, 0].tolist()),
        classes=logits.shape[1],
    )


@dataclass(frozen=True)
class ClassTarget:
    """The logit of one class; of a segmentation network the class where it is predicted, of a detector its best box."""

    index: int
    activation: Activation | None = field(default=None, compare=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> ClassTarget:  # noqa: ARG002
        """Return the target for a model whose logits mean this."""
        return replace(self, activation=activation)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the class's logit for each image; its probability is the softmax's, or the sigmoid's of one logit."""
        found = detections_of(output, batch)
        if found is not None:
            return best_box(found, lambda item: item["labels"].eq(self.index))
        maps = maps_of(output, batch)
        if maps is not None:
            check_index(self.index, maps.shape[1])
            return class_on_map(maps, torch.full((batch,), self.index, device=maps.device), None)
        logits = logits_of(output, batch)
        check_index(self.index, logits.shape[1])
        return class_scores(logits, torch.full((batch,), self.index, device=logits.device), self.activation)


@dataclass(frozen=True)
class TopTarget:
    """The logit of each image's own best class (rank 1), second best (rank 2), and so on.

    Of a segmentation network the class that covers most, second most, apart from class 0 where that is the background;
    of a detector the box with the highest score.
    """

    rank: int = 1
    of: int | None = field(default=None, compare=False)
    activation: Activation | None = field(default=None, compare=False)
    background: bool = field(default=False, compare=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> TopTarget:
        """Return the target for a model whose logits mean this."""
        background = bool(labels) and "background" in str(labels and labels[0]).casefold()
        return replace(self, activation=activation, background=background)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class at this rank for each image."""
        found = detections_of(output, batch)
        if found is not None:
            return best_box(found, lambda item: torch.ones_like(item["scores"], dtype=torch.bool), self.rank)
        maps = maps_of(output, batch)
        if maps is not None:
            return biggest_class(maps, self.rank, skip_first=self.background)
        logits = logits_of(output, batch)
        if self.rank > logits.shape[1]:
            raise TargetError(f"the model has {logits.shape[1]} classes, so there are no {self.of or self.rank} best")
        return class_scores(logits, logits.detach().topk(self.rank, dim=1).indices[:, -1], self.activation)


@dataclass(frozen=True)
class AboveTarget:
    """Every class whose probability is above a threshold, best first; a picture may have several, or none.

    For models that tell several things of one picture (multi-label): each class's probability is its logit's sigmoid.
    """

    threshold: float = 0.5

    def expand(self, output: Any, batch: int) -> list[RankAboveTarget]:
        """Return one target for each rank that some image reaches; at least one."""
        shares = logits_of(output, batch).detach().float().sigmoid()
        most = int((shares > self.threshold).sum(1).amax())
        return [RankAboveTarget(rank, self.threshold) for rank in range(1, max(most, 1) + 1)]

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the best class of each image, where it is above the threshold."""
        return RankAboveTarget(1, self.threshold)(output, batch)


@dataclass(frozen=True)
class RankAboveTarget:
    """The class at this rank of each image, present where its sigmoid is above the threshold."""

    rank: int
    threshold: float

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logits, and for which images they count."""
        logits = logits_of(output, batch)
        best = logits.detach().topk(self.rank, dim=1).indices[:, -1]
        scores = class_scores(logits, best, "sigmoid")
        shares = scores.probabilities or ()
        what = f"no class above {self.threshold:g}"
        present = tuple(share > self.threshold for share in shares)
        return replace(scores, present=present, absence=what, fewer=self.rank > 1)


@dataclass(frozen=True)
class EachTarget:
    """A class for each picture of a call, in their order: its own label, say.

    A picture's class may be several outputs that mean the same; the best of them is explained.
    """

    classes: tuple[Any, ...]
    activation: Activation | None = field(default=None, compare=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> EachTarget:
        """Look labels up."""
        known: dict[Any, tuple[int, ...]] = {}
        for one in dict.fromkeys(self.classes):
            known[one] = tuple(class_of(part, labels) for part in (one if isinstance(one, tuple) else (one,)))
        return EachTarget(tuple(known[one] for one in self.classes), activation)

    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for a batch of the call's pictures."""
        if max(numbers) > len(self.classes):
            raise TargetError(f"there are {len(self.classes)} targets for at least {max(numbers)} pictures")
        return functools.partial(_best_of, [self.classes[number - 1] for number in numbers], self.activation)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the first pictures."""
        return self.of_pictures(range(1, batch + 1))(output, batch)


def _best_of(classes: Sequence[tuple[int, ...]], activation: Activation | None, output: Any, batch: int) -> Scores:
    """Return for each image the logit of the best of its classes."""
    logits = logits_of(output, batch)
    for index in {index for indices in classes for index in indices}:
        check_index(index, logits.shape[1])
    values = logits.detach()
    best = [max(indices, key=lambda index: float(row[index])) for indices, row in zip(classes, values, strict=True)]
    return class_scores(logits, torch.tensor(best, device=logits.device), activation)


@dataclass(frozen=True)
class DirectionTarget:
    """One number of the output, upwards or downwards: a one-logit classifier's two answers, or a regression."""

    sign: int = 1
    index: int = 0

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the number, negated for downwards: what raises the score then speaks for a lower number."""
        logits = logits_of(output, batch)
        check_index(self.index, logits.shape[1])
        of = f" {self.index}" if logits.shape[1] > 1 else ""
        return Scores(
            values=self.sign * logits[:, self.index], description=f"{'+' if self.sign > 0 else '-'} output{of}"
        )


@dataclass(frozen=True)
class ContrastTarget:
    """One class rather than another: the difference of their logits."""

    index: int | str
    rather_than: int | str
    names: tuple[str, str] | None = field(default=None, compare=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> ContrastTarget:  # noqa: ARG002
        """Look labels up."""
        first, second = (class_of(one, labels) for one in (self.index, self.rather_than))
        if first == second:
            raise TargetError(f"a contrast needs two classes, and {self.index!r} and {self.rather_than!r} are the same")
        both = (first, second)
        names = (labels[first], labels[second]) if labels and max(both) < len(labels) else (str(first), str(second))
        return ContrastTarget(first, second, names)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the first class's logit less the second's."""
        logits = logits_of(output, batch)
        first, second = int(self.index), int(self.rather_than)
        for index in (first, second):
            check_index(index, logits.shape[1])
        one, other = self.names or (str(first), str(second))
        difference = logits[:, first] - logits[:, second]
        return Scores(values=difference, classes=logits.shape[1], description=f"{one} rather than {other}")


@dataclass(frozen=True)
class FunctionTarget:
    """Any score the caller computes from the model's output."""

    function: TargetFunction

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the function's scores, after checking that there is one per image."""
        values = self.function(output)
        if not isinstance(values, Tensor) or values.shape != (batch,) or not values.is_floating_point():
            raise TargetError(
                f"the target function returned {describe(values)}; it must return a floating-point tensor of shape "
                f"({batch},), one score per image"
            )
        return Scores(values=values, description=getattr(self.function, "__name__", None) or repr(self.function))
