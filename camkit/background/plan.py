"""A check that is ready to run: the model, what it answers, and the pictures, with the sample and hashes of all.

camkit reads a classifier's answer from its logits, and a detector's from its boxes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.ops import box_iou

from camkit.background.data import SEVERAL_CLASSES, Dataset, Item, Row, grouped
from camkit.background.edits import COMPRESSION, CUES
from camkit.background.probe import noted
from camkit.background.regions import boxes_on_input
from camkit.engine.guard import interruptible
from camkit.engine.passes import faster_format, quiet_pass
from camkit.errors import CamkitError, InputError, advice
from camkit.explaining.explainer import explain_many
from camkit.explaining.explanation import Explanation
from camkit.images.files import is_regular
from camkit.images.masks import MaskFile
from camkit.images.prepare import prepare
from camkit.images.read import jpeg_quality
from camkit.images.regions import ShadesBySize
from camkit.kit.statistics import seed_of
from camkit.kit.store import digest, digest_of_preprocessing, digest_of_weights
from camkit.layers.memory import ModelMemory
from camkit.methods import Method, MethodLike, find_method
from camkit.models import black_box_in, device_of, dtype_of, usual_batch_size
from camkit.models.loaded import LoadedModel
from camkit.options.settings import Settings
from camkit.targets import Target, logits_of
from camkit.targets.places import Detections
from camkit.targets.scores import ScoreReading, detections_of, probabilities, rows_that_sum_to
from camkit.types import Activation, Failure, ImageLike, Preprocess

_UNREADABLE = "unreadable"

WORSE = "worse"
"""The limit that a comparison with a baseline uses. It changes no measure, so runs may differ in it."""


class FileHashes(dict[Path | Row, str]):
    """The SHA-256 of files, "unreadable" for those that cannot be read; each file is read once. Rows bring theirs."""

    def __missing__(self, path: Any) -> str:
        """Return the hash of a file that was not read yet."""
        found = _UNREADABLE
        with contextlib.suppress(OSError):
            found = digest(path.read_bytes()) if is_regular(path) else _UNREADABLE
        return self.setdefault(path, found)


@dataclass(frozen=True)
class Plan:
    """A check that is ready to run.

    Attributes:
        model: the classifier or detector.
        data: the pictures and their objects.
        outputs: the model's outputs for each class.
        matched: how these were found.
        settings: the settings.
        drawn: the pictures drawn for the experiment, also of classes that may be recognised by anything.
        today: the day that decides whether waivers are in force.
        detects: whether the model is a detector.
        files: the hashes of the pictures and masks.
    """

    model: LoadedModel
    data: Dataset
    outputs: Mapping[str, tuple[int, ...]]
    matched: str
    settings: Settings
    drawn: tuple[Item, ...]
    today: dt.date
    detects: bool
    files: FileHashes

    @functools.cached_property
    def by_name(self) -> dict[str, Item]:
        """The pictures by their names."""
        return {item.name: item for item in self.data.items}

    @functools.cached_property
    def sample(self) -> tuple[Item, ...]:
        """The pictures of the experiment."""
        return tuple(item for item in self.drawn if not self.settings.expects_anything(item.label))

    @functools.cached_property
    def backgrounds(self) -> tuple[Item, ...]:
        """The pictures that lend their background: the sample, or all that are drawn if that has only one class."""
        return self.sample if len({item.label for item in self.sample}) > 1 else self.drawn

    @functools.cached_property
    def with_regions(self) -> bool:
        """Whether any object is annotated."""
        return any(item.objects for item in self.data.items)

    @property
    def preprocess(self) -> Preprocess:
        """The model's preprocessing, which a check cannot do without."""
        assert self.model.preprocess is not None
        return self.model.preprocess

    @property
    def draws_heat(self) -> bool:
        """Whether the heat of all pictures is measured: never for a detector."""
        return not self.detects and self.explains

    @property
    def method(self) -> Method:
        """The method that computes the heat."""
        return find_method(cast("MethodLike", self.settings.check.method))

    @property
    def explains(self) -> bool:
        """Whether pictures can be explained; a black box needs a method without layers, or the heat of any class."""
        box = black_box_in(self.model.module)
        return box is None or box.explains_any or self.method.for_black_boxes

    @functools.cached_property
    def memory(self) -> ModelMemory:
        """What the passes found out about the model."""
        return ModelMemory(self.model.module)

    @functools.cached_property
    def shades(self) -> ShadesBySize:
        """What the model's preprocessing makes of black and white, kept for the most recent picture sizes."""
        return ShadesBySize(self.preprocess)

    @functools.cached_property
    def batch_size(self) -> int:
        """The number of pictures in one forward pass."""
        return self.settings.check.batch_size or usual_batch_size(device_of(self.model.module))

    @property
    def most_edits(self) -> int:
        """The most edits of each sample picture that the model classifies."""
        pastes = self.settings.check.pastes
        return 2 * len(self.cues) + (2 * (2 * pastes + 1) if self.with_regions else 2 * pastes + 1)

    @functools.cached_property
    def cues(self) -> tuple[str, ...]:
        """The statistics of the whole picture that are exchanged: compression only if files differ in it."""
        differs = len({jpeg_quality(item.source) for item in self.sample if isinstance(item.source, Path)}) > 1
        return tuple(name for name in CUES if name != COMPRESSION or differs)

    def name_of(self, output: int) -> str:
        """Return the data's class for an output; if there is none, the model's label or the output's number."""
        if output < 0:
            return "no answer" if output == NO_ANSWER else "nothing found"
        label = next((name for name, indices in self.outputs.items() if output in indices), None)
        labels = self.model.labels
        return label or (labels[output] if labels and output < len(labels) else f"output {output}")

    @property
    def removed(self) -> str:
        """What the experiment removes from a picture to see whether the rest is enough."""
        return "object removed" if self.with_regions else "middle removed"

    def excuses(self, named: str, background: Item) -> bool:
        """Return whether an answer does not count, because the config lets anything pass for a background's class."""
        return named == background.label and self.settings.expects_anything(background.label)

    @property
    def forwards(self) -> tuple[int, int]:
        """The number of pictures that pass through the model for the heat, and for the experiment."""
        return len(self.data.items), len(self.sample) * self.most_edits

    def answer(self, batch: Float[Tensor, "n c h w"], items: Sequence[Item]) -> tuple[list[Answer], list[Tensor]]:
        """Classify a batch of edits, or detect the objects in it; ``items`` has the picture of each edit.

        With the answers come a classifier's pooled features of each edit (C,); they are empty if it has none.
        """
        module, precision = self.model.module, self.settings.check.precision
        device = device_of(module)
        inputs = batch.to(device, dtype_of(module))
        inputs = inputs.to(memory_format=faster_format(module, inputs, precision, self.memory.refreshed().record))
        scores, found = list[Tensor](), list[Tensor]()
        boxes: list[Detections] = []
        for part in inputs.split(len(inputs) if self.memory.keeps_pictures_apart(inputs[:1], len(inputs)) else 1):
            noting = contextlib.nullcontext() if self.detects else noted(module, found, len(part))
            with quiet_pass(module, device, precision, self.memory.record), interruptible(), noting:
                output = module(part)
                if self.detects:
                    boxes += _boxes_in(output, len(part))
                else:
                    scores.append(logits_of(output, len(part)).cpu())
        classes = [self.outputs[item.label] for item in items]
        if self.detects:
            wanted, threshold = [self.wanted(item) for item in items], self.settings.check.threshold
            of_pictures = zip(boxes, wanted, classes, strict=True)
            answers = [answer_of_boxes(*of_picture, threshold) for of_picture in of_pictures]
        else:
            reading = ScoreReading.of(torch.cat(scores), self.memory.final_activation(inputs[:1]))
            answers = answers_of(reading, classes, self.model.activation)
        features = [row for part in found for row in part]
        return answers, features if len(features) == len(answers) else [torch.empty(0)] * len(answers)

    def wanted(self, item: Item) -> Float[Tensor, "k 4"]:
        """Return the boxes of a picture's objects that a detector should find, in pixels of the input.

        Raises:
            CamkitError: the picture cannot be read, or its regions cannot be followed through the preprocessing.
        """
        if item.name not in self._wanted:
            size = item.open().size
            self._wanted[item.name] = boxes_on_input(item.objects, size, self.preprocess, self.shades.of(size))
        return self._wanted[item.name]

    @functools.cached_property
    def _wanted(self) -> dict[str, Float[Tensor, "k 4"]]:
        """The boxes that ``wanted`` has returned so far, by the picture's name."""
        return {}

    def explain(self, items: Sequence[Item], target: Target) -> Iterator[Explanation | Failure]:
        """Explain pictures at the check's layer."""
        check = self.settings.check
        failures = dict[str, Failure]()

        def opened(item: Item) -> ImageLike:
            try:
                return item.open() if isinstance(item.source, Row) else item.source
            except CamkitError as error:
                failures[item.name] = Failure(item.name, error)
                return np.empty(0)  # no picture, so that a failure comes in its place

        explanations = explain_many(
            self.model,
            map(opened, items),
            check.layer,
            target=target,
            method=cast("MethodLike", check.method),
            precision=check.precision,
            batch_size=self.batch_size,
            on_error="yield",
        )
        for item, explanation in zip(items, explanations, strict=True):
            yield failures.get(item.name, explanation)

    @property
    def reported_settings(self) -> dict[str, dict[str, Any]]:
        """The settings that a report holds, by table."""
        check = {**vars(self.settings.check), "method": self.method.name}
        del check["batch_size"]
        return {"check": check, "limits": dict(vars(self.settings.limits))}

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Hashes of the weights, of the settings that influence results, and of the pictures with regions."""
        pictures = (
            f"{item.name}\0{item.label}\0{item.group}\0{item.place}\0{_describe_regions(item, self.files)}\0"
            f"{self.files[item.source]}"
            for item in self.data.items
        )
        reported = self.reported_settings
        settings = {
            "check": reported["check"],
            "limits": {name: value for name, value in reported["limits"].items() if name != WORSE},
            "classes": {name: section.model_dump(mode="json") for name, section in self.settings.classes.items()},
            "outputs": self.outputs,
            "preprocessing": digest_of_preprocessing(self.model.preprocess),
        }
        return {
            "weights": digest_of_weights(self.model.module),
            "settings": digest(json.dumps(settings, sort_keys=True)),
            "data": digest(pictures),
        }


def _describe_regions(item: Item, files: FileHashes) -> str:
    """Return a text that changes if any annotation of a picture changes, or the file or meaning of a mask."""
    parts = []
    for own in (*item.objects, *item.others):
        drawn = own.outline
        outline = f"{files[drawn.path]}{drawn.reading}" if isinstance(drawn, MaskFile) else repr(drawn)
        parts.append(f"{own.category}{own.box}{own.shares}{own.crowd}{own.size}{outline}")
    return ";".join(parts)


def without_duplicates(data: Dataset, files: FileHashes) -> Dataset:
    """Leave out pictures with the same content as an earlier one; list copies in another class separately."""
    originals: dict[str, Item] = {}
    left_out = dict(data.left_out)
    for item in data.items:
        content = files[item.source]
        original = originals.setdefault(item.name if content == _UNREADABLE else content, item)
        if original is not item:
            of = "copies of another picture" if original.label == item.label else "copies of a picture of another class"
            left_out[of] = (*left_out.get(of, ()), item.name)
    return replace(data, items=tuple(originals.values()), left_out=left_out)


def _boxes_in(output: Any, batch: int) -> list[Detections]:
    """Return each picture's boxes.

    Raises:
        InputError: the output has no boxes, or the boxes have no labels.
    """
    boxes = detections_of(output, batch)
    if boxes is None or not all("labels" in of_picture for of_picture in boxes):
        raise InputError("the check of a detector needs boxes with labels; this model returns none")
    return boxes


def count_outputs(model: LoadedModel, items: Sequence[Item]) -> tuple[int, bool]:
    """Return how many outputs a model has and whether it is a detector, by running it on the first readable picture.

    Raises:
        InputError: no picture can be read, the model does not tell two or more classes apart, or it is a detector
            whose labels are unknown.
    """
    module, device = model.module, device_of(model.module)
    assert model.preprocess is not None
    failure: CamkitError | None = None
    for item in items:
        try:
            tensor = prepare(item.open(), model.preprocess, item.name).tensor
        except CamkitError as error:
            failure = error
            continue
        with quiet_pass(module, device, "fp32"), interruptible():
            output = module(tensor[None].to(device, dtype_of(module)))
        detects = detections_of(output, 1) is not None
        if detects:
            _boxes_in(output, 1)
        count = len(model.labels or ()) if detects else logits_of(output, 1).shape[1]
        if count < 2:
            labels = f"labels of two or more classes, in their order ({advice('labels=[...]', '--labels FILE')})"
            needed = f"detector with {labels}" if detects else "classifier with two or more outputs"
            raise InputError(f"the check needs a {needed}; this model has {count or 'none'}")
        return count, detects
    raise InputError(f"no picture could be read: {failure}")


def stratified(items: Sequence[Item], per_class: int, most: int, seed: int) -> list[Item]:
    """Draw at most ``per_class`` pictures of each class and about ``most`` in total, with equal shares.

    Each class keeps at least one picture, even if the total then exceeds ``most``. A picture's rank depends only on its
    name and the seed, so adding pictures does not reshuffle the others.
    """
    by_class = grouped(items, lambda item: item.label).values()
    share = max(1, min(per_class, most // max(1, len(by_class))))
    ranked = (sorted(of_class, key=lambda item: (seed_of(f"{seed} {item.name}"), item.name)) for of_class in by_class)
    return sorted((item for of_class in ranked for item in of_class[:share]), key=lambda item: (item.label, item.name))


SPARE_PICTURES = 10
"""How many pictures are drawn for each class beyond the least that must be tested, because some cannot be tested."""


def make_plan(
    model: LoadedModel,
    data: Dataset,
    outputs: Mapping[str, tuple[int, ...]],
    matched: str,
    settings: Settings,
    today: dt.date,
    *,
    detects: bool = False,
) -> Plan:
    """Leave out duplicates and, for a detector, pictures without objects; then draw the sample.

    Raises:
        InputError: the model is a detector, and no picture has an object.
    """
    files = FileHashes({item.source: item.source.content for item in data.items if isinstance(item.source, Row)})
    data = without_duplicates(data, files)
    with_regions = any(item.objects for item in data.items)
    if detects:
        if not with_regions:
            raise InputError(
                "the check of a detector needs the boxes or outlines of the objects; put them beside the pictures, or "
                f"name them with {advice('regions=...', '--regions')}"
            )
        items = tuple(item for item in data.items if item.objects)
        data = replace(data, items=items, facts=(*data.facts, found_if(settings.check.threshold)))
    elif SEVERAL_CLASSES in data.left_out and model.activation is None:
        model = replace(model, activation="sigmoid")
    check = settings.check
    usable = [item for item in data.items if item.objects or not with_regions]
    most = max(check.most, len(data.classes) * (settings.limits.least_pictures + SPARE_PICTURES))
    drawn = stratified(usable, check.per_class, most, check.seed)
    if settings.run.quick:
        bare = [item for item in data.items if with_regions and not item.objects]  # reported as untested
        kept = (*drawn, *stratified(bare, check.per_class, most, check.seed))
        facts = (*data.facts, f"the quick check takes {len(kept)} of these {len(data.items)} pictures")
        data = replace(data, items=kept, facts=facts)
    return Plan(model, data, outputs, matched, settings, tuple(drawn), today, detects, files)


class Answer(NamedTuple):
    """The model's answer to one picture.

    Attributes:
        output: the output with the highest logit, or the class of the box at the place of the picture's objects;
            NO_ANSWER for values with NaN or infinity, and NOTHING_FOUND if there is no such box.
        share: the probability of the picture's own class, or the mean score of the boxes of its objects; None if the
            model has no probabilities.
    """

    output: int
    share: float | None


NO_ANSWER = -1
"""The output that stands for values with NaN or infinity."""

NOTHING_FOUND = -2
"""The output that stands for no box at the place of the picture's objects."""

OVERLAP = 0.5
"""The intersection over union from which a box counts as the box of an object, as in Pascal VOC and COCO's AP50."""


def answers_of(scores: ScoreReading, classes: Sequence[tuple[int, ...]], activation: Activation | None) -> list[Answer]:
    """Turn class scores (N, outputs) into answers; NO_ANSWER for a row with NaN or infinity.

    Args:
        scores: the class scores.
        classes: for each row, the outputs of its picture's class.
        activation: what turns the model's scores into probabilities.
    """
    logits = scores.values.float()
    own = torch.zeros_like(logits, dtype=torch.bool)
    for row, indices in enumerate(classes):
        own[row, list(indices)] = True
    finite = logits.isfinite().all(1)
    named = logits.argmax(1).where(finite, NO_ANSWER)
    by_class = probabilities(scores, activation)
    shares: Sequence[float | None] = [None] * len(logits)
    if by_class is not None:  # the sum if the outputs exclude each other, else the largest
        of_class = by_class * own
        share = of_class.sum(1).where(rows_that_sum_to(1, by_class), of_class.amax(1))
        shares = share.where(finite, 0.0).tolist()
    return [Answer(*values) for values in zip(named.tolist(), shares, strict=True)]


def found_if(threshold: float | int) -> str:
    """Say when a picture counts as found."""
    return (
        "a picture counts as found if the detector finds at least half of its objects of its class: a box of the class "
        f"with a score above {threshold:g}, whose intersection over union with the annotated box is at least "
        f"{OVERLAP:g}"
    )


def answer_of_boxes(
    found: Detections, wanted: Float[Tensor, "k 4"], own: Sequence[int], threshold: float | int
) -> Answer:
    """Turn a detector's boxes for one picture into its answer.

    The answer is right if enough of the wanted boxes are found: each must overlap a box of the class with a score above
    the threshold. Otherwise, the answer is the class of the best other box there.

    Args:
        found: the boxes (n, 4), their scores and their labels (n,).
        wanted: the boxes of the picture's objects.
        own: the outputs of the picture's class.
        threshold: the score above which a box counts.
    """
    boxes, scores, labels = (found[name].detach().cpu() for name in ("boxes", "scores", "labels"))
    scores = scores.float()
    if not bool(boxes.isfinite().all() and scores.isfinite().all()):
        return Answer(NO_ANSWER, 0.0)
    if not len(wanted) or not len(boxes):
        return Answer(NOTHING_FOUND, 0.0)
    there = box_iou(boxes.float(), wanted) >= OVERLAP
    is_own = torch.isin(labels, torch.tensor(own))
    best_own = (scores[:, None] * (there & is_own[:, None])).amax(0)
    # The share of the objects of its class that a detector must find in a picture. If all had to be found, one missed
    # small object would make the picture wrong; if one were enough, a crowd would hide that the others are lost.
    is_right = bool((best_own > threshold).float().mean() >= 0.5)
    named = there.any(1) & (scores > threshold) & (is_own == is_right)
    output = int(labels[(scores * named).argmax()]) if bool(named.any()) else NOTHING_FOUND
    return Answer(output, float(best_own.mean()))
