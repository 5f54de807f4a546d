"""What the app shows, without the page: answers, heat and covered pictures, for any number of visitors at once."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.ops import box_area, box_iou

import camkit
from camkit.drawing.encode import shrink
from camkit.drawing.figure import percent
from camkit.errors import ImageError, InputError, TargetError, as_error
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.read import open_picture
from camkit.kit.wording import number
from camkit.layers.names import modules_by_name
from camkit.methods import METHODS
from camkit.models.loaded import LoadedModel
from camkit.targets import TargetLike, TopTarget, boxes, contrast, top
from camkit.types import Box, Pixels

ANSWERS = 5
"""The classes that are shown as bars."""

THRESHOLD = 0.5
"""The score that a box needs, and the overlap from which a box of the covered picture counts as the same one, as in
the evaluation of COCO."""

FILL_NAMES = ("blur", "mean", "inpaint")
"""What may cover a part of a picture."""

CHOSEN = "camkit's choice"
"""The first entry of the lists of methods and layers."""


class FoundBox(NamedTuple):
    """A detector's box in pixels of the picture, and its class."""

    box: Box
    label: int | None

    def same_as(self, other: FoundBox) -> float:
        """Return the overlap with another box (intersection over union); 0 if it is of another class."""
        overlap = box_iou(torch.tensor([self.box]), torch.tensor([other.box]))
        return overlap.item() if self.label == other.label else 0.0


@dataclass(frozen=True)
class Look:
    """What a visitor looks at; a value, so that a click makes a new one.

    Attributes:
        model: the name of the model.
        picture: the file.
        target: the index of a class; None for the best.
        box: for a detector, the box; None for the best of the uncovered picture.
        rather_than: the class that the target is contrasted with.
        method, layer: the names, or None for camkit's choice.
        cover: the covered rectangle: left, top, right, bottom in pixels of the shown picture.
        fill: what covers it.
    """

    model: str
    picture: str
    target: int | None = None
    box: FoundBox | None = None
    rather_than: int | None = None
    method: str | None = None
    layer: str | None = None
    cover: tuple[int, int, int, int] | None = None
    fill: str = "blur"

    @property
    def uncovered(self) -> Look:
        """The same without the cover."""
        return replace(self, cover=None)


class Viewer:
    """Explains pictures for the page, and keeps what it computed. Several threads may use it.

    Args:
        models: the models by name.
        pictures: the files that visitors may choose.
        reports: folders of finished checks.
        check: checks the models and returns the folders of the reports, which it writes into a folder; None if there is
            no data for it.
    """

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        pictures: Sequence[Path],
        reports: Sequence[Path] = (),
        check: Callable[[Path], Sequence[Path]] | None = None,
    ) -> None:
        self.reports = reports
        self.check: Any = check
        self.models, self.pictures = dict(models), [str(file) for file in pictures]
        self._detectors = {name for name, model in self.models.items() if model.detects}
        keep = functools.lru_cache(64)  # so that going back to a class or another opacity computes nothing
        self._opened = keep(self._read)
        self._explainer = keep(lambda model, method, layer: Explainer(self.models[model], layer, method=method))
        self._explained = keep(
            lambda look, target: self._explainer(look.model, look.method, look.layer)(self.picture(look), target)
        )
        self._found = keep(self._answers)

    def named(self, file: str) -> str:
        """Return a file if visitors may choose it: a request may name any.

        Raises:
            InputError: it was not named in the command.
        """
        if file not in self.pictures:
            raise InputError("this picture was not named in the command")
        return file

    def first_readable(self) -> str:
        """Return the first file that is a picture.

        Raises:
            ImageError: no file is a picture; the message is about the last one.
        """
        for file in self.pictures[:-1]:
            with contextlib.suppress(ImageError):
                self._opened(file)
                return file
        self._opened(self.pictures[-1])
        return self.pictures[-1]

    def picture(self, look: Look) -> Image.Image:
        """Return the picture as the model gets it: reduced if it is large, and covered.

        Raises:
            ImageError: the file is not a picture, is damaged, or is too large.
        """
        opened = self._opened(look.picture)
        return opened if look.cover is None else covered(opened, look.cover, look.fill)

    def _read(self, file: str) -> Image.Image:
        upload = Path(file)
        # The error about an upload shows no temporary folder.
        opened = open_picture(file) if file in self.pictures else open_picture(upload.name, upload.read_bytes())
        most = 1600  # larger pictures are reduced to this on the longer side, so that a click answers at once
        return opened if max(opened.size) <= most else Image.fromarray(shrink(np.asarray(opened), most))

    def detects(self, model: str) -> bool:
        """Tell whether a model returned boxes; known from its first answers."""
        return model in self._detectors

    def answers(self, look: Look) -> list[Explanation]:
        """Return the best answers with their heat: up to five classes, or the boxes of a detector, perhaps none."""
        return self._found(Look(look.model, look.picture, cover=look.cover, fill=look.fill))

    def _answers(self, look: Look) -> list[Explanation]:
        explainer, picture = self._explainer(look.model, None, None), self.picture(look)
        if not self.detects(look.model):
            rows = self._classes(explainer, picture, self.models[look.model].labels)
            if rows[0].detection is None:
                return rows
            self._detectors.add(look.model)
        with contextlib.suppress(TargetError):  # no box
            return list(explainer.batch([picture], target=[boxes(THRESHOLD)]))[:20]
        return []

    @staticmethod
    def _classes(explainer: Explainer, picture: Image.Image, labels: Sequence[str] | None) -> list[Explanation]:
        """Return the best classes: five, or all if the model has fewer."""
        for count in range(ANSWERS if labels is None else min(ANSWERS, len(labels)), 1, -1):
            with contextlib.suppress(TargetError):
                return list(explainer.batch([picture], target=top(count)))
        return list(explainer.batch([picture], target=top(1)))

    def heat(self, look: Look) -> Explanation | None:
        """Return the heat of the target, or of the best answer; None if a detector finds no such box.

        Raises:
            InputError: the method or the layer does not fit the model.
        """
        answers, is_usual = self.answers(look), (look.method, look.layer) == (None, None)
        if self.detects(look.model):
            number = self._number(look)
            if number is None or is_usual:
                return None if number is None else answers[number]
            return self._explained(look, TopTarget(number + 1, threshold=THRESHOLD))
        explained = replace(look, target=self.target(look))
        known = next((row for row in answers if row.target == explained.target), None)
        if known is not None and is_usual and look.rather_than is None:
            return known
        return self._explained(explained, self._contrasted(explained))

    def target(self, look: Look) -> int | None:
        """Return the class that is looked at: the chosen one, or that of the best answer."""
        answers = self.answers(look)
        return answers[0].target if answers and look.target is None else look.target

    def box(self, look: Look) -> FoundBox | None:
        """Return the box that is looked at: the chosen one, or the best of the uncovered picture, if there is one."""
        if look.box is not None:
            return look.box
        return next(map(found_box, self.answers(look.uncovered)), None)

    def box_at(self, look: Look, place: tuple[int, int]) -> FoundBox:
        """Return the smallest box around a point of the picture.

        Raises:
            InputError: there is none.
        """
        boxes_there = [
            found
            for found in map(found_box, self.answers(look))
            if found.box.left <= place[0] < found.box.right and found.box.top <= place[1] < found.box.bottom
        ]
        if not boxes_there:
            raise InputError("there is no box there; click inside one")
        areas = box_area(torch.tensor([found.box for found in boxes_there]))
        return boxes_there[int(areas.argmin())]

    def _number(self, look: Look) -> int | None:
        """Return the index, among the answers, of the box that is looked at; None if it is no longer found."""
        wanted = self.box(look)
        if wanted is None:
            return None
        overlaps = [wanted.same_as(found_box(row)) for row in self.answers(look)]
        best = max(overlaps, default=0.0)
        return overlaps.index(best) if best >= THRESHOLD else None

    def _contrasted(self, look: Look) -> TargetLike | None:
        """Return the class that is looked at, rather than the other one if there is one."""
        target = self.target(look)
        if look.rather_than is None or look.rather_than == target or target is None:
            return target
        return contrast(target, look.rather_than)

    def covering(self, look: Look) -> tuple[str, str, str, str] | None:
        """Return what covering did: the answer before, its old and new share, and the answer now, "" if it is the same.

        None if a detector found no box before.
        """
        asked = Look(look.model, look.picture, look.target, look.box, fill=look.fill)
        asked = replace(asked, target=self.target(asked))
        before, after, answers = self.heat(asked), self.heat(replace(asked, cover=look.cover)), self.answers(look)
        if before is None:
            return None
        is_other = not self.detects(look.model) and answers[0].target != asked.target
        now = f"{answers[0].name} {share_of(answers[0])}" if is_other else ""
        return before.name, share_of(before), "not found" if after is None else share_of(after), now

    def verdicts(self) -> list[Any]:
        """Return the contents of the checks' reports.

        Raises:
            InputError: a folder has no report of a check.
        """
        needs = "--check needs the folder of a check's reports, such as camkit-check"
        with as_error(InputError, lambda error: f"{needs}: {error}"):
            return [json.loads((folder / "report.json").read_text()) for folder in self.reports]

    def comparison(self, look: Look) -> Pixels:
        """Draw a dozen methods side by side for the target, at the layer that was chosen.

        Raises:
            InputError: the model is a detector, whose boxes move when parts of the picture are hidden.
        """
        if self.detects(look.model):
            raise InputError(
                "methods cannot be compared on a detector: its boxes move if parts of the picture are hidden"
            )
        explainer, target = self._explainer(look.model, None, None), self._contrasted(look)
        return camkit.compare(explainer, self.picture(look), target_layer=look.layer, target=target).sheet()

    def methods(self) -> list[str]:
        """Return the names of the methods."""
        return [CHOSEN, *METHODS]

    def layers(self, model: str) -> list[str]:
        """Return the names of a model's layers."""
        return [CHOSEN, *(name for name in modules_by_name(self.models[model].module) if name)]


def covered(picture: Image.Image, cover: tuple[int, int, int, int], fill: str) -> Image.Image:
    """Return a picture whose rectangle is filled: blurred, with the mean colour, or from its surroundings."""
    left, top_, right, bottom = cover
    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    hole = torch.zeros(values.shape[1:], dtype=torch.bool)
    hole[top_:bottom, left:right] = True
    filled = camkit.metrics.FILLS[fill](values, hole[None], 0)[0]
    levels = (filled.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def share_of(row: Explanation) -> str:
    """Return the probability of an answer in percent; its score if it has none."""
    return number(row.score) if row.probability is None else percent(row.probability)


def found_box(row: Explanation) -> FoundBox:
    """Return the box of a detector's answer."""
    assert row.detection is not None
    return FoundBox(row.detection, row.target)
