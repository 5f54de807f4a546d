"""What the app shows, without the page: answers, heat and covered pictures, for any number of visitors at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from camkit.comparison.compare import compare
from camkit.drawing.encode import shrink
from camkit.errors import InputError, TargetError
from camkit.explainer import Explainer
from camkit.explanation import Explanation
from camkit.images.read import open_picture
from camkit.layers.names import modules_by_name
from camkit.methods import METHODS
from camkit.metrics import FILLS
from camkit.models.loaded import LoadedModel
from camkit.targets import boxes, contrast, top
from camkit.types import Pixels

ANSWERS = 5
"""The answers that are shown as bars."""

FILL_NAMES = ("blur", "mean", "inpaint")
"""What may cover a part of a picture."""

CHOSEN = "camkit's choice"
"""The first entry of the lists of methods and layers."""

_MOST_SIDE = 1600
"""Larger pictures are reduced to this many pixels on the longer side, so that a click answers at once."""
_KEPT = 64
"""Maps that are kept, so that going back to a class or another opacity computes nothing."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Look:
    """What a visitor looks at; a value, so that a click makes a new one.

    Attributes:
        model: the name of the model.
        picture: the file.
        target: the number of an answer's class, or of a box; None for the best.
        rather_than: the class that the target is contrasted with.
        method, layer: the names, or None for camkit's choice.
        cover: the covered rectangle: left, top, right, bottom in pixels of the shown picture.
        fill: what covers it.
    """

    model: str
    picture: str
    target: int | None = None
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
    """

    def __init__(self, models: Mapping[str, LoadedModel], pictures: Sequence[Path]) -> None:
        self.models, self.pictures = dict(models), [str(file) for file in pictures]
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def named(self, file: str) -> str:
        """Return a file if visitors may choose it: a request may name any.

        Raises:
            InputError: it was not named in the command.
        """
        if file not in self.pictures:
            raise InputError("this picture was not named in the command")
        return file

    def picture(self, look: Look) -> Image.Image:
        """Return the picture as the model gets it: reduced if it is large, and covered.

        Raises:
            ImageError: the file is not a picture, is damaged, or is too large.
        """
        opened = self._once(("picture", look.picture), lambda: _reduced(open_picture(look.picture)))
        return opened if look.cover is None else covered(opened, look.cover, look.fill)

    def answers(self, look: Look) -> list[Explanation]:
        """Return the best answers with their heat: up to five classes, or the boxes of a detector."""
        key = ("answers", look.model, look.picture, look.cover, look.fill)
        return self._once(key, lambda: self._answers(look))

    def _answers(self, look: Look) -> list[Explanation]:
        model, picture = self.models[look.model], self.picture(look)
        explainer = self._explainer(look.model, None, None)
        if model.detects:
            return list(explainer.batch([picture], target=[boxes()]))[:ANSWERS]
        most = ANSWERS if model.labels is None else min(ANSWERS, len(model.labels))
        for count in range(most, 0, -1):
            try:
                return list(explainer.batch([picture], target=top(count)))
            except TargetError:
                if count == 1:
                    raise
        return []

    def heat(self, look: Look) -> Explanation:
        """Return the heat of the target, or of the best answer.

        Raises:
            InputError: the method or the layer does not fit the model.
        """
        answers = self.answers(look)
        if self.models[look.model].detects:
            return answers[min(look.target or 0, len(answers) - 1)]
        target = answers[0].target if look.target is None else look.target
        known = next((row for row in answers if row.target == target), None)
        if known is not None and (look.method, look.layer, look.rather_than) == (None, None, None):
            return known
        return self._once(("heat", replace(look, target=target)), lambda: self._heat(look, target))

    def _heat(self, look: Look, target: int | None) -> Explanation:
        explainer = self._explainer(look.model, look.method, look.layer)
        if look.rather_than is None or look.rather_than == target or target is None:
            return explainer(self.picture(look), target)
        return explainer(self.picture(look), contrast(target, look.rather_than))

    def comparison(self, look: Look) -> Pixels:
        """Draw a dozen methods side by side for the target."""
        target = self.heat(look).target
        explainer = self._explainer(look.model, None, None)
        return compare(explainer, self.picture(look), target=target).sheet()

    def methods(self) -> list[str]:
        """Return the names of the methods."""
        return [CHOSEN, *METHODS]

    def layers(self, model: str) -> list[str]:
        """Return the names of a model's layers."""
        return [CHOSEN, *(name for name in modules_by_name(self.models[model].module) if name)]

    def _explainer(self, model: str, method: str | None, layer: str | None) -> Explainer:
        def made() -> Explainer:
            return Explainer(self.models[model], target_layer=layer, method=method)

        return self._once(("explainer", model, method, layer), made)

    def _once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what was made for a key, or make it; the oldest entry is dropped."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                found: _T = self._kept[key]
                return found
        made = make()  # outside of the lock: another visitor need not wait for it
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


def covered(picture: Image.Image, cover: tuple[int, int, int, int], fill: str) -> Image.Image:
    """Return a picture whose rectangle is filled: blurred, with the mean colour, or from its surroundings.

    Raises:
        InputError: the fill is unknown, or the rectangle is not inside the picture.
    """
    if fill not in FILL_NAMES:
        raise InputError(f"cover a part with one of {', '.join(FILL_NAMES)}, not {fill!r}")
    left, top_, right, bottom = cover
    if not (0 <= left < right <= picture.width and 0 <= top_ < bottom <= picture.height):
        raise InputError(f"the rectangle {cover} is not inside a picture of {picture.width} x {picture.height} pixels")
    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    hole = torch.zeros(values.shape[1:], dtype=torch.bool)
    hole[top_:bottom, left:right] = True
    filled = FILLS[fill](values, 0)(hole[None])[0]
    levels = (filled.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def _reduced(picture: Image.Image) -> Image.Image:
    if max(picture.size) <= _MOST_SIDE:
        return picture
    return Image.fromarray(shrink(np.asarray(picture), _MOST_SIDE))
