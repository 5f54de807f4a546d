"""Targets on class scores (N, K): one class, the best, all above a threshold, a contrast; and on embeddings (N, D)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity

from camkit.errors import TargetError, refusing_other_arguments
from camkit.targets.boxes import boxes_in, boxes_of_class, ranked_box
from camkit.targets.maps import class_by_area, class_on_map
from camkit.targets.names import check_index, class_of, direction_of, label_of, number_from_0, whole_number
from camkit.targets.outputs import depth_of, detections_of, embedding_of, logits_of, maps_of
from camkit.targets.probabilities import PLURAL, ScoreReading, final_activation, probabilities
from camkit.targets.regions import RegionTarget
from camkit.targets.scores import Expands, OfClasses, OfPictures, Scores, Target, check_values, copied
from camkit.types import Activation

FINER_WEIGHT, FINER_NEAREST = 0.6, 3
"""The share of the nearest classes' mean that is subtracted, and how many classes that are: those of the paper."""

TargetFunction: TypeAlias = Callable[[Any], Tensor]


def class_scores(logits: Float[Tensor, "n k"], indices: Tensor, activation: Activation | None) -> Scores:
    """Return the logit of one class for each image."""
    reading = ScoreReading.of(logits)
    by_class, kind = probabilities(reading, activation), reading.kind
    return Scores(
        values=logits.gather(1, indices[:, None])[:, 0],
        indices=tuple(indices.tolist()),
        probabilities=None if by_class is None else tuple(by_class.gather(1, indices[:, None])[:, 0].tolist()),
        classes=logits.shape[1],
        quantity=kind + ", as the model returns it" * (kind != "logit"),
        activation=reading.activation,
    )


@dataclass(frozen=True)
class ClassTarget(OfClasses):
    """The logit of one class.

    For a segmentation network, the class where it is predicted; for a detector, the best box of the class.

    Attributes:
        index: the class, or that of each picture of a pass.
        name: its label, for errors; filled in when the target is bound to a model.
        cells: for a segmentation network, the cells of each picture over which the score is the mean; None means where
            the class is predicted.
    """

    index: int | str | tuple[int, ...]
    name: str | None = field(default=None, compare=False, repr=False)
    cells: Bool[Tensor, "n h w"] | None = field(default=None, compare=False, repr=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> ClassTarget:
        """Return the target for a model with this activation, and with the index and the label of the class."""
        bound = super().bind(labels, activation)
        if isinstance(self.index, tuple):
            return bound
        index = class_of(self.index, labels)
        return replace(bound, index=index, name=label_of(index, labels))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class for each image, with its probability."""
        images = detections_of(output, batch)
        if images is not None and not isinstance(self.index, tuple):
            return boxes_of_class(images, int(self.index), self.name)
        indices = self.index if isinstance(self.index, tuple) else (int(self.index),)
        maps = maps_of(output, batch)
        scores = logits_of(output, batch) if maps is None else maps
        for index in {*indices}:
            check_index(index, scores.shape[1])
        chosen = torch.tensor(indices, device=scores.device).expand(batch)
        if maps is None:
            return class_scores(scores, chosen, self.activation)
        cells = None if self.cells is None else self.cells.to(maps.device)
        return class_on_map(maps, chosen, cells, activation=self.activation)


@dataclass(frozen=True)
class TopTarget(OfClasses):
    """The logit of each image's own best class (rank 1), second best (rank 2), and so on.

    For a segmentation network, classes are ranked by the area they cover, and class 0 comes last if it is the
    background. For a detector, boxes are ranked by their scores. For a depth network, it is the mean depth.

    Attributes:
        rank: which of them, from 1.
        of: how many the caller asked for, for the error.
        background: whether class 0 is the background; filled in when the target is bound to a model.
        threshold: the class or box is absent if its probability or score is not above this.
    """

    rank: int = 1
    of: int | None = field(default=None, compare=False)
    background: bool = field(default=False, compare=False)
    threshold: float | None = None

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> TopTarget:
        """Return the target for a model with these labels and this activation."""
        background = bool(labels) and "background" in str(labels and labels[0]).casefold()
        return replace(self, activation=self.activation or activation, background=background)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class at this rank for each image."""
        images = detections_of(output, batch)
        if images is not None:
            return ranked_box(images, self.rank, threshold=self.threshold)
        maps = maps_of(output, batch)
        if maps is not None:
            return class_by_area(maps, self.rank, skip_first=self.background, activation=self.activation)
        try:
            logits = logits_of(output, batch)
        except TargetError:
            if depth_of(output) is None:
                raise
            return RegionTarget()(output, batch)
        if self.rank > logits.shape[1]:
            raise TargetError(
                f"there are no {self.of or self.rank} best classes: the model has only {logits.shape[1]} classes"
            )
        scores = class_scores(logits, logits.detach().topk(self.rank, dim=1).indices[:, -1], self.activation)
        if self.threshold is None:
            return scores
        present = tuple(probability > self.threshold for probability in scores.probabilities or ())
        return replace(scores, present=present, absence=f"no class above {self.threshold:g}", fewer=self.rank > 1)


@dataclass(frozen=True)
class AboveTarget(Expands):
    """Every class whose probability is above a threshold, best first; a picture may have several or none.

    For multi-label models: the probability of a class is the sigmoid of its logit, or what the model returns if that
    is a probability already.
    """

    threshold: float = 0.5

    def expand(self, output: Any, batch: int) -> list[TopTarget]:
        """Return one target for each rank that some image reaches; at least one."""
        ranks = range(1, max(self._most(output, batch), 1) + 1)
        return [TopTarget(rank, threshold=self.threshold, activation="sigmoid") for rank in ranks]

    def _most(self, output: Any, batch: int) -> int:
        by_class = probabilities(ScoreReading.of(logits_of(output, batch)), "sigmoid")
        assert by_class is not None
        return int((by_class > self.threshold).sum(1).amax())


@dataclass(frozen=True)
class BoxesTarget(AboveTarget):
    """Every box whose score is above a threshold, best first; a picture may have several or none."""

    def _most(self, output: Any, batch: int) -> int:
        return max(int((each["scores"] > self.threshold).sum()) for each in boxes_in(output, batch))


@dataclass(frozen=True)
class EachTarget(OfClasses, OfPictures):
    """A class of its own for each picture of a call, for example the picture's label.

    Several classes of one picture mean the same; the one with the highest logit is explained.
    """

    classes: tuple[Any, ...]

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> EachTarget:
        """Return the target with all labels looked up."""
        indices: dict[Any, tuple[int, ...]] = {}
        for entry in dict.fromkeys(self.classes):
            indices[entry] = tuple(class_of(name, labels) for name in (entry if isinstance(entry, tuple) else (entry,)))
        return replace(super().bind(labels, activation), classes=tuple(indices[entry] for entry in self.classes))

    def of_pictures(self, numbers: Sequence[int]) -> EachTarget:
        """Return the target for the pictures with these numbers, which start at 1."""
        if max(numbers) > len(self.classes):
            raise TargetError(
                f"each() has classes for {len(self.classes)} pictures, but there are {max(numbers)} or more"
            )
        return replace(self, classes=tuple(self.classes[number - 1] for number in numbers))

    def check_count(self, pictures: int) -> None:
        """Check, after the last picture of the call, that no class is left over.

        Raises:
            TargetError: there were fewer pictures than classes.
        """
        if pictures < len(self.classes):
            raise TargetError(
                f"each() has classes for {len(self.classes)} pictures, but there are {pictures}; pass one class for "
                "each picture"
            )

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the best of each image's classes, for the first images of the call."""
        logits = logits_of(output, batch)
        classes = self.of_pictures(range(1, batch + 1)).classes
        for index in {index for indices in classes for index in indices}:
            check_index(index, logits.shape[1])
        rows = zip(classes, logits.detach(), strict=True)
        best = [max(indices, key=lambda index: float(row[index])) for indices, row in rows]
        return class_scores(logits, torch.tensor(best, device=logits.device), self.activation)


@dataclass(frozen=True)
class DirectionTarget(Target):
    """One number of the output, up or down: either class of a one-logit classifier, or a regression."""

    sign: int = 1
    index: int = 0

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the number, negated for a downward direction: the score then rises as the number falls."""
        logits = logits_of(output, batch)
        check_index(self.index, logits.shape[1])
        sign = "+" if self.sign > 0 else "-"
        name = f"output {self.index}" if logits.shape[1] > 1 else "output"
        return Scores(
            values=self.sign * logits[:, self.index],
            description=f"{sign} {name}",
            quantity="output, with this sign",
            activation=final_activation(logits),
        )


@dataclass(frozen=True)
class ContrastTarget(Target):
    """One class rather than another: the difference of their logits."""

    index: int | str
    rather_than: int | str
    names: tuple[str, str] | None = field(default=None, compare=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> ContrastTarget:  # noqa: ARG002
        """Return the target with both labels looked up."""
        first, second = (class_of(name, labels) for name in (self.index, self.rather_than))
        if first == second:
            raise TargetError(
                f"a contrast needs two classes, but {self.index!r} and {self.rather_than!r} are the same class"
            )
        both = (first, second)
        names = (labels[first], labels[second]) if labels and max(both) < len(labels) else (str(first), str(second))
        return ContrastTarget(first, second, names)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the first class minus that of the second."""
        logits = logits_of(output, batch)
        first, second = int(self.index), int(self.rather_than)
        for index in (first, second):
            check_index(index, logits.shape[1])
        name, other = self.names or (str(first), str(second))
        difference = logits[:, first] - logits[:, second]
        reading = ScoreReading.of(logits)
        return Scores(
            values=difference,
            classes=logits.shape[1],
            description=f"{name} rather than {other}",
            quantity=f"difference of the two {PLURAL[reading.kind]}",
            activation=reading.activation,
        )


@dataclass(frozen=True)
class FinerTarget(Target):
    """What tells a class from its nearest ones: its logit minus a share of the mean of theirs (Finer-CAM).

    The nearest classes of a picture are those whose logits differ least from that of the class.

    Attributes:
        of: the class.
        weight: the share of the nearest classes' mean that is subtracted.
        nearest: how many nearest classes there are.
        rivals: these classes, for each picture of a pass or one list for all, if they do not depend on the output.
    """

    for_threads = False

    of: Target
    weight: float = FINER_WEIGHT
    nearest: int = FINER_NEAREST
    rivals: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> FinerTarget:
        """Return the target with the labels of its class looked up."""
        return replace(self, of=self.of.bind(labels, activation))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of each image's class less the weighted mean of its nearest classes."""
        scored = self.of(output, batch)
        instead = "explain this target without finer, for example by 'gradcam' or 'hirescam'"
        if scored.indices is None or scored.boxes is not None or maps_of(output, batch) is not None:
            raise TargetError(
                f"finer compares a class with its nearest ones, so it needs a classifier's class; {instead}"
            )
        logits = logits_of(output, batch)
        if logits.shape[1] < 2:
            raise TargetError(f"finer compares a class with its nearest ones, but the model has one output; {instead}")
        if self.rivals is None:
            rivals = self._nearest(logits, scored)
        else:
            rivals = torch.tensor(self.rivals, device=logits.device).expand(batch, -1)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the difference is small in 16 bits
        own = torch.tensor(scored.indices, device=logits.device)[:, None]
        # A model may return probabilities; their gradients pass through the softmax for all classes alike.
        kind = ScoreReading.of(logits).kind
        return replace(
            scored,
            values=precise.gather(1, own)[:, 0] - self.weight * precise.gather(1, rivals).mean(1),
            quantity=f"{kind} minus {self.weight:g} times the mean of its {rivals.shape[1]} nearest",
            rivals=tuple(map(tuple, rivals.tolist())),
        )

    def _nearest(self, logits: Float[Tensor, "n k"], scored: Scores) -> Int[Tensor, "n count"]:
        """Return the classes whose logits differ least from that of each image's class."""
        own = torch.tensor(scored.indices, device=logits.device)[:, None]
        values = ScoreReading.of(logits).logits
        distance = (values - values.gather(1, own)).abs().scatter(1, own, torch.inf)
        return distance.topk(min(self.nearest, logits.shape[1] - 1), largest=False).indices


@dataclass(frozen=True)
class EachFiner(Expands):
    """Compares each class that a target stands for with its nearest ones, if the target does not do so itself."""

    for_threads = False

    of: Target

    def expand(self, output: Any, batch: int) -> list[FinerTarget]:
        """Return one target for each class."""
        single = self.of.expand(output, batch) if isinstance(self.of, Expands) else [self.of]
        return [target if isinstance(target, FinerTarget) else FinerTarget(target) for target in single]


@dataclass(frozen=True)
class FunctionTarget(Target):
    """Any score that the caller computes from the model's output."""

    for_threads = False

    function: TargetFunction

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the function's scores; there must be one per image."""
        with refusing_other_arguments(self.function, 1, TargetError, "the target function"):
            values = self.function(copied(output))
        check_values(values, batch, "the target function")
        return Scores(
            values=values,
            description=getattr(self.function, "__name__", None) or repr(self.function),
            quantity="value of the target function",
        )


def _scaled(embeddings: Tensor) -> Tensor:
    """Scale each embedding to a largest absolute value of 1, so that the epsilon of the cosine never decides."""
    largest = embeddings.detach().abs().amax(1, keepdim=True)
    return embeddings / torch.where(largest > 0, largest, 1)


@dataclass(frozen=True, eq=False)
class SimilarTarget(Target):
    """The cosine similarity of a picture's embedding and a reference, which is a picture or an embedding (D,).

    Shows what two pictures have in common (Stylianou et al. 2019, Chen et al. 2020).
    """

    reference: Any

    @property
    def embedding(self) -> Tensor | None:
        """The embedding (D,) of the reference; None while the reference is still a picture."""
        is_embedding = isinstance(self.reference, Tensor) and self.reference.dim() == 1
        return self.reference.detach() if is_embedding else None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the cosine similarity of each image."""
        embeddings = embedding_of(output, batch)
        reference = self.embedding
        assert reference is not None  # the Explainer has run the reference picture
        if len(reference) != embeddings.shape[1]:
            raise TargetError(
                f"the reference has {len(reference)} numbers, but the model's embedding has {embeddings.shape[1]}"
            )
        values = cosine_similarity(_scaled(embeddings), _scaled(reference.to(embeddings)[None]), dim=1)
        return Scores(values=values, description="similarity to the reference", quantity="cosine similarity")

    def embedded(self, output: Any) -> SimilarTarget:
        """Return the target for the reference's embedding, given the model's output for the reference picture."""
        return SimilarTarget(torch.clone(embedding_of(output, 1)[0].detach()))


def top(count: int) -> list[TopTarget]:
    """Return targets for the ``count`` best classes of each image, as in ``explain(..., target=top(5))``.

    Raises:
        TargetError: ``count`` is not a whole number of at least 1.
    """
    count = whole_number(count, "the number of best classes", 1)
    return [TopTarget(rank, of=count) for rank in range(1, count + 1)]


def above(threshold: float = 0.5) -> AboveTarget:
    """Return a target for every class whose probability is above a threshold, for multi-label models.

    The probability of a class is the sigmoid of its logit, or what the model returns if that is a probability already.

    Raises:
        TargetError: the threshold is not a probability below 1.
    """
    return AboveTarget(number_from_0(threshold, "the threshold must be a probability from 0 to below 1", 1))


def boxes(threshold: float = 0.5) -> BoxesTarget:
    """Return a target for every box of a detector whose score is above a threshold, best first.

    Raises:
        TargetError: the threshold is not between 0 and 1.

    Examples:
        >>> boxes(0.3).threshold
        0.3
    """
    return BoxesTarget(number_from_0(threshold, "the threshold is the score above which a box counts, from 0 to 1", 1))


def each(classes: Iterable[int | str | Sequence[int | str]]) -> EachTarget:
    """Return a target with a class of its own for each picture of a call, for example the picture's label.

    Args:
        classes: an index or a label for each picture, in their order. In place of one class, a list or tuple may name
            several that mean the same; the one with the highest score is explained.

    Raises:
        TargetError: there are no classes, or none for one of the pictures. The number of pictures is checked when
            they are explained.
    """
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise TargetError(
            f"each() takes a list with a class for each picture, as in each(['cat', 'dog']), not {classes!r}"
        )
    by_picture = tuple(tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in classes)
    if not by_picture or any(entry == () for entry in by_picture):
        raise TargetError("each() needs at least one class for each picture")
    return EachTarget(by_picture)


def direction(sign: Literal["+", "-"], index: int = 0) -> DirectionTarget:
    """Return a target for what raises ("+") or lowers ("-") one number of the output.

    Use it for regressions, and for classifiers with one logit, where "-" is the second class.

    Raises:
        TargetError: the sign is neither "+" nor "-", or the index is not a whole number.
    """
    return DirectionTarget(direction_of(sign), whole_number(index, "the index of an output"))


def contrast(target: int | str, rather_than: int | str) -> ContrastTarget:
    """Return a target for one class rather than another: the difference of their logits (Prabhushankar et al. 2020)."""
    return ContrastTarget(target, rather_than)


def finer(target: int | str | None = None, weight: float = FINER_WEIGHT, nearest: int = FINER_NEAREST) -> FinerTarget:
    """Return a target for what tells a class from its nearest ones (Zhang et al. 2025, Finer-CAM, arXiv:2501.11309).

    The score is the class's logit minus ``weight`` times the mean logit of the ``nearest`` classes whose logits differ
    least from it. The map loses what the classes share, and keeps what only this class has. In changed versions of a
    picture, which some methods need, the nearest classes stay those of the picture itself. Metrics judge the map by the
    probability of the class alone.

    Args:
        target: an index or a label; None for each picture's best class.
        weight: 0 explains the class alone, 1 what it has beyond its neighbours.
        nearest: how many classes; all others if the model has fewer.

    Raises:
        TargetError: ``weight`` is not a number of at least 0, or ``nearest`` is not a whole number of at least 1.
    """
    weight = number_from_0(weight, "the weight of the nearest classes must be a number of at least 0", math.inf)
    nearest = whole_number(nearest, "the number of nearest classes", 1)
    return FinerTarget(TopTarget() if target is None else ClassTarget(target), weight, nearest)


def similar_to(reference: Any) -> SimilarTarget:
    """Return a target for the similarity to a reference: a picture as ``explain`` takes it, or an embedding (D,)."""
    return SimilarTarget(Path(reference) if isinstance(reference, str) else reference)
