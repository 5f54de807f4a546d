"""Targets on classes: one, the best, all above a threshold, a contrast; and on embeddings (N, D)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.errors import TargetError, advice, whole_number
from camkit.targets.places import (
    EVERYWHERE,
    INSIDE_MASK,
    RegionTarget,
    SameBoxTarget,
    boxes_in,
    boxes_of_class,
    by_area,
    class_on_map,
    ranked_box,
)
from camkit.targets.scores import (
    PLURAL,
    Expands,
    OfClasses,
    OfTarget,
    OnPicture,
    ScoreReading,
    Scores,
    Target,
    check_indices,
    check_values,
    copied,
    depth_of,
    describe,
    detections_of,
    direction_of,
    embedding_of,
    final_activation,
    label_of,
    logits_of,
    main_tensor,
    maps_of,
    number_from_0,
    probabilities,
)
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
        index: the class's index, or one index for each picture of a pass. Until ``bind``, it may also be a label.
        mask: for a segmentation network, the part of the input (H, W), or of each picture's map (N, h, w), over which
            the score is the mean; None means where the class is predicted.
        part: what the mask covers, in words.
    """

    by_label = ("index",)

    index: int | str | tuple[int, ...]
    mask: Bool[Tensor, "*n height width"] | None = field(default=None, compare=False, repr=False)
    part: str = INSIDE_MASK

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class for each image, with its probability."""
        indices = self.index if isinstance(self.index, tuple) else (int(self.index),)
        images = detections_of(output, batch)
        if images is not None and not isinstance(self.index, tuple):
            return boxes_of_class(images, indices[0], self.labels)
        maps = maps_of(output, batch)
        scores = logits_of(output, batch) if maps is None else maps
        check_indices(scores.shape[1], {*indices})
        chosen = torch.tensor(indices, device=scores.device).expand(batch)
        if maps is None:
            return class_scores(scores, chosen, self.activation)
        return class_on_map(maps, chosen, self.mask, self.part, self.activation)


class SegmentTarget(ClassTarget):
    """One class of a segmentation network: where it is predicted, everywhere, or inside a mask over the input."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # masks are tensors

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean logit of the class for each image."""
        if maps_of(output, batch) is None:
            raise TargetError(
                f"the model returned {describe(output)}, which holds no maps (N, classes, h, w) of class scores; "
                "pass a segmentation network, those of Hugging Face by name (hf:NAME)"
            )
        return super().__call__(output, batch)


@dataclass(frozen=True)
class TopTarget(OfClasses):
    """The logit of each image's own best class (rank 1), second best (rank 2), and so on.

    For a segmentation network, classes are ranked by the area they cover, and class 0 comes last if it is the
    background. For a detector, boxes are ranked by their scores. For a depth network, it is the mean depth.

    Attributes:
        rank: which of them, from 1.
        of: how many the caller asked for, for the error.
        threshold: the class or box is absent if its probability or score is not above this.
    """

    rank: int = 1
    of: int | None = field(default=None, compare=False)
    threshold: float | None = None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class at this rank for each image."""
        images = detections_of(output, batch)
        if images is not None:
            return ranked_box(images, self.rank, threshold=-torch.inf if self.threshold is None else self.threshold)
        if (
            not isinstance(output, Tensor)
            and depth_of(output) is not None
            and not isinstance(main_tensor(output), Tensor)
        ):
            return RegionTarget()(output, batch)
        maps = maps_of(output, batch)
        logits = logits_of(output, batch) if maps is None else maps
        if self.rank > logits.shape[1]:
            asked = self.of or self.rank
            raise TargetError(f"there are no {asked} best classes: the model has only {logits.shape[1]} classes")
        if maps is not None:
            has_background = "background" in (self.labels or ("",))[0].casefold()
            largest = by_area(maps, self.rank, skip_first=has_background, activation=self.activation)
            return class_on_map(maps, largest, None, activation=self.activation)
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
        by_class = ScoreReading.of(logits_of(output, batch)).probabilities("sigmoid")
        return int((by_class > self.threshold).sum(1).amax())


class BoxesTarget(AboveTarget):
    """Every box whose score is above a threshold, best first; a picture may have several or none."""

    def _most(self, output: Any, batch: int) -> int:
        return max(int((each["scores"] > self.threshold).sum()) for each in boxes_in(output, batch))


@dataclass(frozen=True)
class EachTarget(OfClasses):
    """A class of its own for each picture of a call, for example the picture's label.

    Several classes of one picture mean the same; the one with the highest logit is explained.
    """

    by_label = ("classes",)

    classes: tuple[tuple[Any, ...], ...]

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
        check_indices(logits.shape[1], {index for indices in classes for index in indices})
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
        check_indices(logits.shape[1], [self.index])
        sign = "+" if self.sign > 0 else "-"
        name = f"output {self.index}" if logits.shape[1] > 1 else "output"
        return Scores(
            values=self.sign * logits[:, self.index],
            description=f"{sign} {name}",
            quantity="output, with this sign",
            activation=final_activation(logits),
        )


@dataclass(frozen=True)
class ContrastTarget(OfClasses):
    """One class rather than another: the difference of their logits."""

    by_label = ("index", "rather_than")

    index: int | str
    rather_than: int | str

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the first class minus that of the second."""
        logits = logits_of(output, batch)
        first, second = int(self.index), int(self.rather_than)
        check_indices(logits.shape[1], (first, second))
        name, other = (label_of(index, self.labels) or index for index in (first, second))
        reading = ScoreReading.of(logits)
        return Scores(
            values=logits[:, first] - logits[:, second],
            classes=logits.shape[1],
            description=f"{name} rather than {other}",
            quantity=f"difference of the two {PLURAL[reading.kind]}",
            activation=reading.activation,
        )


@dataclass(frozen=True)
class FinerTarget(OfTarget):
    """What tells a class from its nearest ones: its logit minus a share of the mean of theirs (Finer-CAM).

    The nearest classes of a picture are those whose logits differ least from that of the class.

    Attributes:
        weight: the share of the nearest classes' mean that is subtracted.
        nearest: how many nearest classes there are.
        rivals: these classes, for each picture of a pass or one list for all, if they do not depend on the output.
    """

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
        reading, own = ScoreReading.of(logits), torch.tensor(scored.indices, device=logits.device)[:, None]
        if self.rivals is None:  # those whose logits differ least from the class's
            values = reading.logits
            distance = (values - values.gather(1, own)).abs().scatter(1, own, torch.inf)
            rivals = distance.topk(min(self.nearest, logits.shape[1] - 1), largest=False).indices
        else:
            rivals = torch.tensor(self.rivals, device=logits.device).expand(batch, -1)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the difference is small in 16 bits
        # A model may return probabilities; their gradients pass through the softmax for all classes alike.
        return replace(
            scored,
            values=precise.gather(1, own)[:, 0] - self.weight * precise.gather(1, rivals).mean(1),
            quantity=f"{reading.kind} minus {self.weight:g} times the mean of its {rivals.shape[1]} nearest",
            rivals=tuple(map(tuple, rivals.tolist())),
        )


class EachFiner(OfTarget, Expands):
    """Compares each class that a target stands for with its nearest ones, if the target does not do so itself."""

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
        values = torch.cosine_similarity(_scaled(embeddings), _scaled(reference.to(embeddings)[None]), dim=1)
        return Scores(values=values, description="similarity to the reference", quantity="cosine similarity")

    def embedded(self, output: Any) -> SimilarTarget:
        """Return the target for the reference's embedding, given the model's output for the reference picture."""
        return SimilarTarget(torch.clone(embedding_of(output, 1)[0].detach()))


def top(count: int) -> list[TopTarget]:
    """Return targets for the ``count`` best classes of each image, as in ``explain(..., target=top(5))``.

    Raises:
        TargetError: ``count`` is not a whole number of at least 1.
    """
    count = whole_number(count, "the number of best classes", 1, TargetError)
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


def segment(target: int | str, mask: Any = None, *, everywhere: bool = False) -> SegmentTarget:
    """Return a target for a class of a segmentation network.

    Args:
        target: the index or the label of the class.
        mask: truth values (H, W) over the model's input; only the masked part of the output is explained.
        everywhere: explain the whole output and ignore the mask. Without ``mask`` and ``everywhere``, the part where
            the class is predicted is explained.

    Raises:
        TargetError: the mask is not an array (H, W).
    """
    if everywhere:
        return SegmentTarget(target, torch.ones(1, 1, dtype=torch.bool), EVERYWHERE)
    if mask is None:
        return SegmentTarget(target)
    array = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        raise TargetError(f"the mask must be an array (H, W) of truth values, not {describe(mask)}")
    return SegmentTarget(target, torch.from_numpy(np.nan_to_num(array).astype(bool)))


def each(classes: Iterable[int | str | Sequence[int | str]]) -> EachTarget:
    """Return a target with a class of its own for each picture of a call, for example the picture's label.

    Args:
        classes: an index or a label for each picture, in their order. In place of one class, a list or tuple may name
            several that mean the same; the one with the highest score is explained.

    Raises:
        TargetError: there are no classes, or none for one of the pictures. The number of pictures is checked when
            they are explained.
    """
    listed = [] if isinstance(classes, str) or not isinstance(classes, Iterable) else list(classes)
    by_picture = tuple(tuple(entry) if isinstance(entry, (list, tuple)) else (entry,) for entry in listed)
    if not by_picture or () in by_picture:
        raise TargetError(
            f"each() takes a list with at least one class for each picture, as in each(['cat', 'dog']), not {classes!r}"
        )
    return EachTarget(by_picture)


def direction(sign: Literal["+", "-"], index: int = 0) -> DirectionTarget:
    """Return a target for what raises ("+") or lowers ("-") one number of the output.

    Use it for regressions, and for classifiers with one logit, where "-" is the second class.

    Raises:
        TargetError: the sign is neither "+" nor "-", or the index is not a whole number.
    """
    return DirectionTarget(direction_of(sign), whole_number(index, "the index of an output", kind=TargetError))


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
    nearest = whole_number(nearest, "the number of nearest classes", 1, TargetError)
    return FinerTarget(TopTarget() if target is None else ClassTarget(target), weight, nearest)


def similar_to(reference: Any) -> SimilarTarget:
    """Return a target for the similarity to a reference: a picture as ``explain`` takes it, or an embedding (D,)."""
    return SimilarTarget(Path(reference) if isinstance(reference, str) else reference)


def fixed_target(target: Target, scored: Scores) -> Target:
    """Return the target that scores the class of each picture, whatever a change of the pictures does to other classes.

    A box may move in a changed picture; the box that matches it best is scored. On a map, the cells stay those where
    the class is predicted in the unchanged picture. The classes that a class is compared with stay the same too.

    Args:
        target: a target for one picture or several; for one if it is a box.
        scored: its scores of the pictures.
    """
    if scored.boxes is not None:
        (corners,) = scored.boxes
        assert corners is not None
        label = None if scored.indices is None else scored.indices[0]
        return SameBoxTarget(corners, label, missed=scored.missed not in (None, (None,)))
    if scored.indices is None or (isinstance(target, SegmentTarget) and target.mask is not None):
        return target
    if scored.rivals is not None:
        finer = target if isinstance(target, FinerTarget) else FinerTarget(target)
        return replace(finer, of=fixed_target(finer.of, replace(scored, rivals=None)), rivals=scored.rivals)
    return ClassTarget(scored.indices, scored.cells, activation=getattr(target, "activation", None))


def of_changed_picture(target: Target, scored: Scores, *, mirrored: bool) -> Target:
    """Return the target that explains, in changed versions of the pictures, the class explained in the pictures.

    Args:
        target: the target of the pictures.
        scored: its scores for them.
        mirrored: whether the pictures are mirrored along their last axis.

    Raises:
        TargetError: the target is a box, which another picture need not have, or what lies at a point or in a box.
    """
    used, instead = advice("smooth='augment'", "--smooth augment"), advice("smooth='eigen'", "--smooth eigen")
    if scored.boxes is not None:
        raise TargetError(
            f"a detector finds other boxes in a changed picture, so {used} explains no boxes; use {instead}"
        )
    if mirrored and isinstance(target, OnPicture) and not isinstance(target, RegionTarget):
        raise TargetError(f"{used} cannot mirror the place that the target names; use {instead}")
    fixed = fixed_target(target, scored)
    return _mirrored(fixed) if mirrored else fixed


def _mirrored(target: Target) -> Target:
    """Return a fixed target for pictures that are mirrored along their last axis."""
    if isinstance(target, FinerTarget):
        return replace(target, of=_mirrored(target.of))
    if isinstance(target, RegionTarget):
        return replace(target, mirrored=True)
    if isinstance(target, ClassTarget) and target.mask is not None:
        return replace(target, mask=target.mask.flip(-1))
    return target


@dataclass(frozen=True)
class ConfidenceTarget(OfTarget):
    """The probability of a target's class; for a target without probabilities, its own score. It has no gradients.

    A class that is compared with its nearest ones has no probability.

    Attributes:
        final: the softmax or sigmoid in which the model ends, as ``Scores.final`` of a pass with a graph; without one,
            the results of a sigmoid look like logits. Those of a softmax are known by their sum in every pass.
    """

    final: str = ""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the probability for each image."""
        scored = self.of(output, batch)
        if isinstance(self.of, FinerTarget):
            scored = replace(scored, probabilities=None)
        values = scored.values.detach().float()
        if scored.probabilities is not None and self.final.startswith("Log"):
            values = values.exp()
        elif scored.probabilities is not None and not self.final.startswith("Sigmoid"):
            values = torch.tensor(scored.probabilities, dtype=torch.float32, device=values.device)
        quantity = scored.quantity if scored.probabilities is None else "probability"
        return replace(scored, values=values, indices=None, probabilities=None, quantity=quantity, activation=None)


def against_rivals(target: Target, scored: Scores) -> Target:
    """Return the log-odds of a class; for any other target, its score as the model returns it.

    Args:
        target: a target that scores one class or something else, as ``fixed_target`` returns it.
        scored: its scores of a picture, with their graph.
    """
    if not isinstance(target, ClassTarget) or not isinstance(target.index, tuple) or target.mask is not None:
        return AsReturned(target)
    return LogOddsTarget(target.index[0], scored.final, activation=target.activation)


@dataclass(frozen=True)
class LogOddsTarget(OfClasses):
    """The logit of one class minus the logarithm of the summed exponentials of all others: log p / (1 - p).

    If the classes do not exclude each other (sigmoid), or if there is one, these are the logit itself.

    Attributes:
        number: the index of the class.
        final: the softmax or sigmoid in which the model ends, by the name of its node in the autograd graph.
    """

    number: int
    final: str

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the log-odds for each image.

        The gradient is that of logits, to which the gradients of probabilities are passed through unchanged
        (``passing_through``): log p / (1 - p) has no gradient where rounding made p 1.
        """
        scores = logits_of(output, batch)
        check_indices(scores.shape[1], [self.number])
        reading = ScoreReading.of(scores, self.final)
        logits = reading.logits
        rows = scores.to(logits.dtype)
        if not self.final and reading.are_shares:  # probabilities, by operations of the model's own
            rows = rows.clamp(min=torch.finfo(rows.dtype).tiny).log()
        value, slope = logits[:, self.number], rows[:, self.number]
        if logits.shape[1] > 1 and self.activation not in ("sigmoid", "none") and "Sigmoid" not in self.final:
            others = logits.clone()
            others[:, self.number] = -torch.inf
            value = value - others.logsumexp(1)
            slope = slope - (others.softmax(1) * rows).sum(1)
        return Scores(value + (slope - slope.detach()), quantity="log-odds", activation=reading.activation)


class AsReturned(OfTarget):
    """The score of a target, with its own gradient: gradients do not pass through a final softmax unchanged."""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score for each image."""
        return replace(self.of(output, batch), activation=None)
