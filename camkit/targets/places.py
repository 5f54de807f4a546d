"""Targets on a place: a box of a detector, a class or a part of a map, what lies at a point of the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchvision.ops import box_iou

from camkit.errors import TargetError, whole_number
from camkit.targets.scores import (
    OfClasses,
    OnPicture,
    Points,
    ScoreReading,
    Scores,
    Target,
    check_indices,
    depth_of,
    describe,
    detections_of,
    direction_of,
    label_of,
    number_from_0,
    points,
    scores_in,
    takes_prompts,
)
from camkit.types import Activation

Detections = dict[str, Tensor]

Part: TypeAlias = Literal["left", "top", "right", "bottom", "objectness", "mask"]
"""What can be explained of a box besides the score of its class: where one side lies, that there is an object, or its
mask."""

_SIDES: Mapping[str, tuple[int, int]] = {"left": (0, -1), "top": (1, -1), "right": (2, 1), "bottom": (3, 1)}
"""The place of each side in a box, and the sign with which it moves outwards."""


def ranked_box(
    images: Sequence[Detections],
    rank: int = 1,
    eligible: Sequence[Bool[Tensor, " k"]] | None = None,
    what: str = "",
    part: Part | None = None,
    threshold: float = -torch.inf,
) -> Scores:
    """Return the score of each image's best eligible box (rank 1), second best (rank 2), and so on.

    ``eligible`` tells for each image which boxes count; without it, those whose score is above the threshold. ``what``
    says in the error which these are, such as "of class 'car'".
    """
    scores = [detections["scores"].detach() for detections in images]
    absence = "the detector found no box"
    if what:
        absence = f"no such box among the detections: the detector found none {what}"
    elif threshold > -torch.inf:
        if any(map(len, scores)):
            absence = f"the best box has a score of {float(torch.cat(scores).amax()):.2g}"
        absence = f"no box above the threshold of {threshold:g}: {absence}"
    elif rank > 1:
        absence = f"no such box among the detections: there are fewer than {rank}"
    candidates = []
    for each, counts in zip(scores, eligible or [each > threshold for each in scores], strict=True):
        numbers = torch.nonzero(counts).flatten()
        candidates.append(numbers[each[numbers].argsort(descending=True, stable=True)])
    return replace(box_scores(images, candidates, absence, part, rank), fewer=rank > 1)


def boxes_of_class(
    images: Sequence[Detections], index: int, labels: tuple[str, ...] | None, part: Part | None = None
) -> Scores:
    """Return the score of each image's best box of a class; ``labels`` has its label, for the error.

    Raises:
        TargetError: the detections have no labels.
    """
    if not all("labels" in detections for detections in images):
        raise TargetError("the detections have no labels; choose a box by its number or its position")
    name = label_of(index, labels)
    what = f"of class {index if name is None else repr(name)}"
    return ranked_box(images, eligible=[found["labels"].eq(index) for found in images], what=what, part=part)


def box_scores(
    images: Sequence[Detections],
    candidates: Sequence[Int[Tensor, " k"]],
    absence: str,
    part: Part | None = None,
    rank: int = 1,
) -> Scores:
    """Return the score of one box of each image: its first candidate (rank 1), its second, and so on.

    Args:
        images: the detections.
        candidates: the numbers of each image's boxes that may be meant, in order of preference.
        absence: the error for an image with fewer candidates.
        part: what is explained of the box.
        rank: which candidate is meant.
    """
    numbers = [int(order[rank - 1]) if len(order) >= rank else None for order in candidates]
    pairs = list(zip(images, numbers, strict=True))
    have_labels = all("labels" in detections for detections in images)
    quantity = f"{'logit' if all('logits' in detections for detections in images) else 'score'} of the box"
    if part is None and all("dense" in detections for detections in images):
        quantity = "mean logit of this box and those around it"
    if part is not None:
        kinds = {"objectness": "objectness of the box", "mask": "mean logit inside the mask of the box"}
        quantity = kinds.get(part, f"distance in pixels, outwards, of the {part} side of the box")
    return Scores(
        values=torch.stack([_explained(detections, number, part) for detections, number in pairs]),
        indices=tuple(-1 if number is None else int(found["labels"][number]) for found, number in pairs)
        if have_labels
        else None,
        probabilities=tuple(
            0.0 if number is None else float(found["scores"][number].detach()) for found, number in pairs
        ),
        present=tuple(number is not None for number in numbers),
        absence=absence,
        quantity=quantity,
        boxes=tuple(
            None if number is None else tuple(found["boxes"][number].detach().float().tolist())
            for found, number in pairs
        ),
    )


def _overlaps(detections: Detections, corners: Sequence[float]) -> Float[Tensor, " k"]:
    """Return the overlap of each box with a given one (intersection over union)."""
    boxes = detections["boxes"].float()
    return cast("Tensor", box_iou(boxes, torch.tensor([corners], device=boxes.device))[:, 0])


def _explained(detections: Detections, number: int | None, part: Part | None) -> Float[Tensor, ""]:
    """Return what is differentiated: a box's logit if the detector returns these too, else its score; 0 without a box.

    If each cell has boxes, many boxes are of one object, and suppression leaves one of them. Then it is the mean logit
    of all those that overlap this one, weighted by the probability of its class.

    Raises:
        TargetError: the detector does not return the part.
    """
    if part is None:
        each = detections.get("logits", detections["scores"])
    elif part in _SIDES:
        place, sign = _SIDES[part]
        each = detections["boxes"][:, place] * sign
    elif part in detections:
        each = detections[part]
    else:
        raise TargetError(f"the detector returns no {part}; explain the score of the box's class, or one of its sides")
    if number is None:
        return each.sum() * 0
    if part is None and "dense" in detections:
        label, corners, boxes = detections["labels"][number], detections["boxes"][number], detections["all_boxes"]
        of_object = _overlaps({"boxes": boxes.detach()}, corners.tolist()) >= _SAME_OBJECT
        of_object |= (boxes == corners).all(1)  # without an area, a box overlaps with none
        logits = detections["all_logits"][:, label]
        # The shares of the boxes in the sum of their probabilities; these may be too small for a division.
        shares = torch.nn.functional.logsigmoid(logits.detach()).masked_fill(~of_object, -torch.inf).softmax(0)
        return (logits * shares).sum()
    return each[number]


_SAME_OBJECT = 0.5
"""Boxes of a class that overlap by at least this are of one object: the usual limit (Everingham et al. 2010)."""


@dataclass(frozen=True)
class BoxTarget(OfClasses):
    """One box of a detector, chosen in one of three ways.

    Attributes:
        number: its position in the model's output, from 0.
        label: a class; the box of this class with the highest score is meant.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps most with it is meant.
        part: what is explained of the box; None for the score of its class.
    """

    number: int | None = None
    label: int | str | None = None
    near: tuple[float, float, float, float] | None = None
    part: Part | None = None

    @property
    def by_label(self) -> tuple[str, ...]:
        """The label, if the box is chosen by it."""
        return () if self.label is None else ("label",)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image."""
        images = boxes_in(output, batch)
        if self.label is not None:
            return boxes_of_class(images, int(self.label), self.labels, self.part)
        if self.near is not None:
            overlaps = [_overlaps(detections, self.near).detach() for detections in images]
            nearest = [each.argsort(descending=True, stable=True)[: int((each > 0).sum())] for each in overlaps]
            absence = f"no detection overlaps with the box {tuple(round(side, 1) for side in self.near)}"
            return box_scores(images, nearest, absence, self.part)
        number = self.number or 0
        counts = [len(detections["scores"]) for detections in images]
        most = max((count for count in counts if count <= number), default=0)
        absence = f"no box {number}: the detector found only {most} box{'' if most == 1 else 'es'}"
        absence += ", and numbers start at 0"
        return box_scores(images, [torch.arange(count) for count in counts], absence, self.part, number + 1)


@dataclass(frozen=True)
class BoxAtTarget(OnPicture, OfClasses):
    """The box with the highest score of those that contain a point; below the threshold, the best candidate there.

    Candidates are all boxes that the detector weighs, suppressed ones included, if it returns them.

    Attributes:
        part: what is explained of the box; None for the score of its class.
        label: the class whose boxes count. None for boxes of all classes.
        threshold: the score above which a box is found.
    """

    part: Part | None = None
    label: int | str | None = None
    threshold: float = 0.5

    by_label = BoxTarget.by_label

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image, and what keeps a candidate from being found."""
        rows, of_pictures = [], boxes_in(output, batch)
        for found, ((x, y),) in zip(of_pictures, self.on_input or (self.points,) * batch, strict=True):
            chosen, here = found, self._around(found, x, y)
            is_found = bool((found["scores"][here] > self.threshold).any())
            if not is_found and self.part is None:
                chosen = candidates(found, self.label)
                here = self._around(chosen, x, y)
            missed = None if is_found or not bool(here.any()) else self._held_back(chosen, here, found)
            rows.append((chosen, here, missed))
        images, around, reasons = zip(*rows, strict=True)
        what = "" if self.label is None else f"of {self._name(self.label)!r} "
        what += f"around the point {self.words}"
        if any("all_boxes" not in found for found in of_pictures):
            what += " (torchvision's detectors return none below their score_thresh; set it to 0)"
        return replace(ranked_box(images, eligible=around, what=what, part=self.part), missed=reasons)

    def _name(self, label: int | str) -> str:
        return label_of(int(label), self.labels) or f"class {label}"

    def _around(self, found: Detections, x: float, y: float) -> Bool[Tensor, " k"]:
        left, top, right, bottom = found["boxes"].detach().unbind(1)
        around = (left <= x) & (x < right) & (top <= y) & (y < bottom)
        return around if self.label is None else around & found.get("labels", torch.tensor(-1)).eq(int(self.label))

    def _held_back(self, chosen: Detections, here: Bool[Tensor, " k"], found: Detections) -> str:
        """Say what keeps the best candidate from being found: another class, another box, the objectness, its score."""
        number = int(chosen["scores"].where(here, -1).argmax())
        score, label = chosen["scores"][number].item(), int(chosen.get("labels", -here.long())[number])
        is_low, name = score <= self.threshold, "the best box" if label < 0 else self._name(label)
        said = f"not found: {name} scores {score:.3f} here, below the threshold of {self.threshold:g}"
        if chosen is found:
            return said
        # A score above the threshold is a surprise, and what follows is the reason.
        because = f"{said}; "
        if not is_low:
            because = f"not found, although {name} scores {score:.3f} here, above the threshold of {self.threshold:g}: "
        rivals, shares = found["all_scores"][number], found.get("all_objectness", torch.ones(number + 1))
        winner, share = int(rivals.argmax()), shares[number].item()
        overlaps = _overlaps(found, chosen["boxes"][number].tolist()) * found["labels"].eq(winner)
        if winner != label:
            # The candidate that wins may itself be suppressed by the box that is found.
            strengths = found["scores"][overlaps >= _SAME_OBJECT].tolist()
            return f"{because}{self._name(winner)} wins with {max([rivals[winner].item(), *strengths]):.3f}"
        if not is_low:
            other = int(overlaps.argmax())
            strength, overlap = found["scores"][other].item(), overlaps[other].item()
            return f"{because}a {name} box with {strength:.3f} suppresses it, as they overlap by {overlap:.0%}"
        if score > self.threshold * share:
            return f"{because}the class alone has {score / share:.3f}, objectness only {share:.3f}"
        return said


def candidates(found: Detections, label: int | str | None) -> Detections:
    """Return all boxes that a detector weighs, for their best class or for this one; the found ones if it hides others.

    Raises:
        TargetError: it does not have the class.
    """
    if "all_boxes" not in found:
        return found
    scores = found["all_scores"]
    labels = scores.argmax(1) if label is None else torch.full_like(scores[:, 0], int(label), dtype=torch.long)
    check_indices(scores.shape[1], [int(labels.amax())])
    return {
        **found,
        "boxes": found["all_boxes"],
        "labels": labels,
        "scores": scores.gather(1, labels[:, None])[:, 0],
        "logits": found["all_logits"].gather(1, labels[:, None])[:, 0],
    }


@dataclass(frozen=True)
class SameBoxTarget(Target):
    """How well a changed picture's boxes match one box of the picture (Petsiuk et al. 2021, D-RISE, arXiv:2006.03204).

    It is the largest product of a box's score and its overlap with that box, among the boxes of the same class. The
    paper compares the probabilities of all classes, of which a list of boxes has only the largest.

    Attributes:
        corners: that box (left, top, right, bottom) in pixels of the input.
        label: its class; None if the boxes have no classes.
        missed: whether the detector does not find the box; then all boxes that it weighs may match.
    """

    corners: tuple[float, ...]
    label: int | None
    missed: bool = False

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the match for each image; 0 if no box overlaps."""
        values: list[Tensor] = []
        for found in boxes_in(output, batch):
            detections = candidates(found, self.label) if self.missed else found
            alike = detections["scores"].float() * _overlaps(detections, self.corners)
            if self.label is not None:
                alike = alike * detections["labels"].eq(self.label)
            values.append(torch.cat([alike, alike.new_zeros(1)]).amax())
        return Scores(torch.stack(values), quantity="score of the best matching box, times its overlap")


def boxes_in(output: Any, batch: int) -> list[Detections]:
    """Return each image's detections.

    Raises:
        TargetError: there are none that camkit can read.
    """
    images = detections_of(output, batch)
    if images is None:
        raise TargetError(
            f"the model returned {describe(output)}, which camkit cannot read as boxes; pass a detector by its name "
            "or file (hf:NAME, yolo11n.pt), or a module that returns a list with a dictionary for each picture"
        )
    return images


def box(
    number: int | None = None,
    *,
    label: int | str | None = None,
    near: Sequence[float | int] | None = None,
    part: Part | None = None,
) -> BoxTarget:
    """Return a target for one box of a detector.

    Args:
        number: the position of the box in the model's output, from 0.
        label: the index or the label of a class; its box with the highest score is explained.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps it most is explained.
        part: explain where the "left", "top", "right" or "bottom" side of the box lies, so that heat moves it outwards,
            or the "objectness" or the "mask" (its mean logit inside), if the detector returns one; None explains the
            score of the box's class.

    Raises:
        TargetError: not exactly one of the three is given, or one is invalid.
    """
    if sum(value is not None for value in (number, label, near)) != 1:
        raise TargetError("choose a box by its number, its label, or a box near it: pass one of the three")
    chosen = None if number is None else whole_number(number, "the number of a box", 0, TargetError)
    corners = None if near is None else points("near", near, box=True)
    return BoxTarget(chosen, label, None if corners is None else (*corners[0], *corners[1]), _checked(part))


def best_box(label: int | str, *, part: Part | None = None) -> BoxTarget:
    """Return a target for the box of a class with the highest score.

    Args:
        label: the index or the label of the class.
        part: as for ``box``.

    Examples:
        >>> best_box("person").label
        'person'
    """
    return box(label=label, part=part)


def box_at(
    x: float | int,
    y: float | int,
    *,
    label: int | str | None = None,
    threshold: float = 0.5,
    part: Part | None = None,
) -> BoxAtTarget:
    """Return a target for the box around a point; of several boxes, that with the highest score.

    If no box there is above the threshold, it is the best candidate, and ``Explanation.missed`` says what keeps it from
    being found.

    Args:
        x, y: the point, in pixels of the picture.
        label: the index or the label of a class, to explain only its boxes.
        threshold: the score above which a box is found.
        part: as for ``box``.

    Raises:
        TargetError: the part is unknown, x or y is not a finite number, or the threshold is not from 0 to 1.

    Examples:
        >>> box_at(120, 80).points
        ((120.0, 80.0),)
    """
    threshold = number_from_0(threshold, "the threshold is a number from 0 to 1", 1)
    return BoxAtTarget(points("box_at", (x, y)), part=_checked(part), label=label, threshold=threshold)


def _checked(part: Part | None) -> Part | None:
    if part not in (None, *get_args(Part)):
        raise TargetError(f"part must be one of {', '.join(get_args(Part))}, not {part!r}")
    return part


_PREDICTED = 0.5
"""A network with one class predicts it where the probability is above this, that is, where the logit is positive."""

INSIDE_MASK = "inside the mask"
EVERYWHERE = "of all cells"


def class_on_map(
    maps: Float[Tensor, "n k h w"],
    indices: Int[Tensor, " n"],
    mask: Bool[Tensor, "*n height width"] | None,
    part: str = INSIDE_MASK,
    activation: Activation | None = None,
) -> Scores:
    """Return the mean logit of one class for each image, over a mask or over the cells where the class is predicted.

    If it is predicted nowhere, the mean goes over all cells. Vinogradova et al. 2020 sum the logits over the cells of
    interest; the mean differs by a factor. There is one mask for all images, or one for each. ``part`` says in words
    which cells it covers.

    Raises:
        TargetError: the mask covers nothing.
    """
    images = torch.arange(len(maps), device=maps.device)
    reading, apart = ScoreReading.of(maps), _are_apart(maps, activation)
    shares = reading.probabilities("sigmoid" if apart else "softmax")[images, indices]
    quantity: str | tuple[str, ...] = f"mean {reading.kind} {part}"
    if mask is None:
        inside = shares > _PREDICTED if apart else maps.detach().argmax(1) == indices[:, None, None]
        inside, predicted = _or_all(inside)
        nowhere = "of all cells, since the class is predicted nowhere"
        parts = ("where the class is predicted" if some else nowhere for some in predicted)
        quantity = tuple(f"mean {reading.kind} {where}" for where in parts)
    else:
        masks = mask.view(-1, 1, *mask.shape[-2:]).to(maps)
        covered = torch.nn.functional.interpolate(masks, size=maps.shape[2:], mode="area")[:, 0]
        if not bool(covered.any()):
            raise TargetError("the mask covers no part of the picture")
        # A share of the cell that the mask covers most, since a small mask may cover no cell fully.
        inside = (covered >= 0.5 * covered.amax((1, 2), keepdim=True)).expand(len(maps), -1, -1)
    return Scores(
        values=_means(maps[images, indices], inside),
        indices=tuple(indices.tolist()),
        probabilities=tuple(_means(shares, inside).tolist()),
        classes=maps.shape[1],
        quantity=quantity,
        cells=inside,
        activation=reading.activation,
    )


def _or_all(inside: Bool[Tensor, "n h w"]) -> tuple[Bool[Tensor, "n h w"], list[bool]]:
    """Return the cells inside, or all cells of a map that has none inside; and for each map whether it has any."""
    some = inside.any((1, 2), keepdim=True)
    return inside | ~some, some.flatten().tolist()


def _means(maps: Float[Tensor, "n h w"], inside: Bool[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """Return the mean of each map over the cells inside; in fp16 the sum would overflow."""
    cells = inside.to(torch.float32)
    return (maps.float() * cells).sum((1, 2)) / cells.sum((1, 2)).clamp_min(1)


def names_cells(quantity: str) -> bool:
    """Tell whether a score is the mean over cells that the caller named, from the words for it."""
    return quantity.endswith((INSIDE_MASK, EVERYWHERE))


def _are_apart(maps: Tensor, activation: Activation | None) -> bool:
    """Tell whether each class is predicted independently of the others; a single class always is."""
    return maps.shape[1] == 1 or activation == "sigmoid"


def by_area(
    maps: Float[Tensor, "n k h w"], rank: int, *, skip_first: bool, activation: Activation | None
) -> Int[Tensor, " n"]:
    """Return the class that covers the most cells of each image (rank 1), or fewer (higher ranks)."""
    if _are_apart(maps, activation):
        areas = (ScoreReading.of(maps).probabilities("sigmoid") > _PREDICTED).flatten(2).sum(2).float()
    else:
        best = maps.detach().argmax(1).flatten(1)
        areas = torch.stack([(best == index).sum(1) for index in range(maps.shape[1])], dim=1).float()
    # Less than one cell is added, which only ranks classes of equal area, above all those that cover nothing.
    areas += maps.detach().float().flatten(2).amax(2).softmax(1) * 0.5
    if skip_first and maps.shape[1] > 1:
        areas[:, 0] = -1
    return areas.topk(rank, dim=1).indices[:, -1]


@dataclass(frozen=True)
class RegionTarget(OnPicture):
    """The mean of a map of numbers in a part of the picture: the box of the points, or all of it.

    Attributes:
        sign: 1, or -1 for what lowers the mean.
        mirrored: whether the pictures are mirrored along their last axis.
    """

    sign: int = 1
    mirrored: bool = False

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean for each image, negated for a downward direction.

        Raises:
            TargetError: the output is not a map of numbers.
        """
        depth = depth_of(output)
        numbers = scores_in(output) if depth is None else depth
        if isinstance(numbers, Tensor) and numbers.dim() == 4 and numbers.shape[1] == 1:
            numbers = numbers[:, 0]
        is_float = isinstance(numbers, Tensor) and numbers.is_floating_point()
        if not is_float or numbers.dim() != 3 or len(numbers) != batch:
            raise TargetError(
                f"the model returned {describe(output)}, which is not a map of numbers (N, h, w), such as depth"
            )
        what = "output" if depth is None else "depth"
        inside = torch.stack([self._inside(numbers[0], box) for box in self.on_input or ((),)]).expand_as(numbers)
        inside = inside.flip(-1) if self.mirrored else inside
        where = f"in {self.words}" if self.points else "of the picture"
        return Scores(
            values=self.sign * _means(numbers, inside),
            description=f"{'+' if self.sign > 0 else '-'} mean {what} {where}",
            quantity=f"mean {what}, with this sign",
            present=tuple(inside.any((1, 2)).tolist()),
            absence="the region lies outside the part of the picture that the model sees",
        )

    def _inside(self, numbers: Float[Tensor, "h w"], box: Points) -> Bool[Tensor, "h w"]:
        """Return the cells of a map whose middles lie in a box on the input."""
        if not box:
            return torch.ones_like(numbers, dtype=torch.bool)
        (left, top), (right, bottom) = box
        height, width = self.size[-2:]
        down, across = ((torch.arange(side, device=numbers.device) + 0.5) / side for side in numbers.shape)
        rows = (top / height <= down) & (down < bottom / height)
        return rows[:, None] & ((left / width <= across) & (across < right / width))


def region(
    left: float | int | None = None,
    top: float | int | None = None,
    right: float | int | None = None,
    bottom: float | int | None = None,
    *,
    sign: Literal["+", "-"] = "+",
) -> RegionTarget:
    """Return a target for the mean of a map of numbers, such as depth, in a part of the picture.

    Args:
        left, top, right, bottom: the part, in pixels of the picture; without them, the whole picture.
        sign: "+" explains what raises the mean, "-" what lowers it.

    Raises:
        TargetError: the part is not four finite numbers with an area, or the sign is neither "+" nor "-".

    Examples:
        >>> region(10, 20, 50, 60, sign="-").points
        ((10.0, 20.0), (50.0, 60.0))
    """
    sides = (left, top, right, bottom)
    corners = () if sides == (None,) * 4 else points("region", sides, box=True)
    return RegionTarget(corners, direction_of(sign))


@dataclass(frozen=True)
class MaskTarget(OnPicture):
    """The mask of what is at a point or in a box; of several masks, the one that the network expects to be the best.

    The network returns ``image_embeddings``, and ``decode``: a function of these and of prompts, to masks (N, K, h, w)
    with logits and how good each is (N, K). Prompts are ``input_points`` (N, 1, P, 2) with ``input_labels`` (N, 1, P),
    or ``input_boxes`` (N, 1, 4), in pixels of the input.
    """

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean logit of each image's mask where it is positive; of all cells if it is nowhere.

        Raises:
            TargetError: the network takes no points or boxes.
        """
        given = torch.tensor(self.on_input or (self.points,), dtype=torch.float32).expand(batch, -1, -1)
        logits = best_masks(output, given)
        inside, found = _or_all(logits.detach() > 0)
        where = ("in the mask" if some else "of all cells, since the mask is empty" for some in found)
        return Scores(
            values=_means(logits, inside),
            description=f"mask {'at' if len(self.points) == 1 else 'in'} {self.words}",
            quantity=tuple(f"mean logit {part}" for part in where),
        )


def best_masks(output: Any, given: Float[Tensor, "n p 2"]) -> Float[Tensor, "n h w"]:
    """Return the logits of the mask at a point (P = 1) or in a box (P = 2, its corners) of each image.

    Raises:
        TargetError: the network takes no points or boxes.
    """
    if not takes_prompts(output):
        raise TargetError(
            f"the model returned {describe(output)}; points and boxes are for networks such as SAM, passed by name "
            "(hf:NAME)"
        )
    given = given.to(tree_leaves(output["image_embeddings"])[0].device)
    is_point = given.shape[1] == 1
    prompts = {"input_points": given[:, None]} if is_point else {"input_boxes": given.flatten(1)[:, None]}
    if is_point:
        prompts["input_labels"] = torch.ones_like(given[:, None, :, 0], dtype=torch.long)
    masks, quality = output["decode"](output["image_embeddings"], prompts)
    return cast("Tensor", masks[torch.arange(len(given), device=masks.device), quality.argmax(1)])


def mask_at(x: float | int, y: float | int) -> MaskTarget:
    """Return a target for the mask of what lies at a point, in pixels of the picture, for networks such as SAM.

    Raises:
        TargetError: x or y is not a finite number.

    Examples:
        >>> mask_at(120, 80).points
        ((120.0, 80.0),)
    """
    return MaskTarget(points("mask_at", (x, y)))


def mask_in(left: float | int, top: float | int, right: float | int, bottom: float | int) -> MaskTarget:
    """Return a target for the mask of what lies in a box, in pixels of the picture, for networks such as SAM.

    Raises:
        TargetError: the box is not four finite numbers with an area.

    Examples:
        >>> mask_in(10, 20, 50, 60).points
        ((10.0, 20.0), (50.0, 60.0))
    """
    return MaskTarget(points("mask_in", (left, top, right, bottom), box=True))
