"""Compare two models on the same pictures: their answers, and where their heat differs."""

from __future__ import annotations

import functools
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Float
from PIL import Image

from camkit.drawing import figure
from camkit.drawing.text import PAPER, Canvas, fitting
from camkit.errors import ImageError, TargetError, as_cell, printable
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation, finite_or_none
from camkit.images.files import csv_line, write_file, write_picture
from camkit.kit.wording import counted
from camkit.metrics.compare import for_each_picture
from camkit.metrics.evaluator import OfModel
from camkit.models.loaded import Loadable
from camkit.targets.scores import class_of
from camkit.types import ImageLike, Pixels, Progress, Scale

_SIDE, _BAND = 400, 34
"""The longer side of a picture on the sheet, at which heat is compared too, and the height of a name, in pixels."""
_BLUE, _RED = np.array([[28, 88, 214], [206, 32, 41]], np.uint8)
"""The colours of the first and of the second model."""


@dataclass(frozen=True, eq=False)
class HeatOfTwo:
    """The heat of two models for one class of one picture.

    Attributes:
        label: the class.
        maps: each model's explanation, on a copy of the picture of at most 400 pixels; None if it has no such class.
    """

    label: str
    maps: tuple[Explanation | None, Explanation | None]

    @functools.cached_property
    def heats(self) -> Float[np.ndarray, "2 h w"]:
        """Both heatmaps on the picture, 0..1, each divided by its maximum; zeros if there are not two on a picture."""
        first, second = self.maps
        if first is None or second is None or not np.array_equal(np.asarray(first.picture), np.asarray(second.picture)):
            return np.zeros((2, 1, 1), np.float32)
        return np.stack([first.heatmap_on_picture(), second.heatmap_on_picture()])

    @property
    def in_common(self) -> float | None:
        """The heat that both models have in the same places, as a share of the heat that either has, 0 to 1.

        It is the sum of the smaller of both values divided by the sum of the larger. None if there is no heat, or if
        there are not two maps on one picture.
        """
        smaller, larger = (heat.sum(dtype=np.float64) for heat in (self.heats.min(0), self.heats.max(0)))
        return float(smaller / larger) if larger else None

    def difference(self) -> Pixels:
        """Draw on the picture in grey, blue where the first model's heat is stronger, and red where the second's is.

        Each map is divided by its maximum before; from a difference of half of it on, the colour is full. Where the
        maps are equal, the picture stays grey.
        """
        picture = np.asarray(next(found.picture for found in self.maps if found is not None))
        grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)[..., None]
        more = (self.heats[1] - self.heats[0])[..., None]
        weight = 0.8 * np.minimum(2 * np.abs(more), 1)  # the picture shows through the full colour
        return np.asarray(np.rint(grey * (1 - weight) + np.where(more > 0, _RED, _BLUE) * weight), np.uint8)

    def draw(self, names: Sequence[str], colormap: str, alpha: float, scale: Scale) -> Pixels:
        """Draw both maps and their difference side by side, each with its caption below a name in its colour."""
        used: Any = [found for found in self.maps if found is not None] if scale == "shared" else "each"
        difference = figure.fitted(self.difference(), _SIDE)
        no_class = figure.Caption(self.label, ("", ""), ("The model has no such class.",))
        absent = figure.compose(difference, no_class, fixed=True)
        cells = [
            absent
            if found is None
            else found.captioned(colormap=colormap, alpha=alpha, scale=used, side=_SIDE, fixed=True)
            for found in self.maps
        ]
        common = "nothing to compare" if self.in_common is None else f"{self.in_common:.0%} of the heat in common"
        legend = f"Blue: more heat of {names[0]}.", f"Red: more heat of {names[1]}."
        caption = figure.Caption(
            common, legend, remarks=("Each map was divided by its maximum: two networks' values differ in scale.",)
        )
        cells.append(figure.compose(difference, caption, fixed=True))
        bands = zip((*names, "Difference"), (_BLUE, _RED, _BLUE), (_BLUE, _RED, _RED), cells, strict=True)
        return figure.sheet([_below(*band) for band in bands], columns=3)


def _below(name: str, start: Any, end: Any, drawn: Pixels) -> Pixels:
    """Return a figure below a name on a band from one colour to another."""
    width = drawn.shape[1]
    canvas = Canvas(width, _BAND)
    canvas.picture(0, 0, np.linspace(start, end, width)[None].repeat(_BAND, 0).astype(np.uint8))
    canvas.text(_BAND / 2, _BAND / 2, fitting(name, width - _BAND, 18), size=18, colour=PAPER)
    return np.concatenate([canvas.pixels(), drawn])


@dataclass(frozen=True, eq=False)
class ModelComparison(OfModel[Mapping[str, Any]]):
    """Two models on the same pictures: those with different answers first, then those with the least heat in common.

    Each row has the ``picture``, each model's ``answer`` and ``probability``, whether the ``answers_differ``, the
    ``target`` whose heat is compared, and the ``heat_in_common``, as ``HeatOfTwo.in_common``.

    Attributes:
        against: the second model's name.
        alike: whether both models have the same modules, so that the values of their maps have one unit.
        heats: of the most different pictures, the heat for the target and, if the answers differ, for the second
            model's answer.
    """

    against: str
    alike: bool
    heats: Mapping[str, Sequence[HeatOfTwo]] = field(repr=False)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each picture."""
        return list(map(dict, self.rows))

    def sheet(self, *, colormap: str = "turbo", alpha: float = 0.5, scale: Scale = "each") -> Pixels:
        """Draw the most different pictures: both maps, and where they differ.

        Args:
            colormap, alpha: as for ``Explanation.overlay``.
            scale: "each" draws each map on its own scale, as the difference compares them. "shared" draws the maps of
                models with the same modules on one scale, since their values have one unit.

        Returns:
            The sheet, height x width x 3 uint8 RGB.
        """
        names, scale = (self.model, self.against), scale if self.alike else "each"
        blocks = []
        for row in (row for row in self.rows if row["picture"] in self.heats):
            drawn = [heat.draw(names, colormap, alpha, scale) for heat in self.heats[row["picture"]]]
            said = f"{names[0]} says {row['answer']}, and {names[1]} says {row['against_answer']}"
            blocks.append(
                figure.compose(figure.sheet(drawn, columns=1), figure.Caption(f"{Path(row['picture']).name}: {said}"))
            )
        return figure.sheet(blocks, columns=1)

    def save(self, path: str | Path, *, colormap: str = "turbo", alpha: float = 0.5, scale: Scale = "each") -> Path:
        """Write the sheet, or the table if the file's name ends in .csv, completely or not at all.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path, lines = Path(path), [[*self.rows[0]], *([*row.values()] for row in self.rows)]
        if path.suffix != ".csv":
            return write_picture(path, self.sheet(colormap=colormap, alpha=alpha, scale=scale))
        texts = ([as_cell(printable(cell)) if isinstance(cell, str) else cell for cell in line] for line in lines)
        write_file(path, map(csv_line, texts))
        return path

    def __repr__(self) -> str:
        """Return in how many pictures the answers differ."""
        differ = sum(row["answers_differ"] for row in self.rows)
        return (
            f"{self.model} and {self.against}: {differ} of {counted(len(self.rows), 'picture')} with different answers"
        )


def compare_models(
    model: Explainer | Loadable,
    against: Explainer | Loadable,
    pictures: ImageLike | Sequence[ImageLike],
    *,
    target: int | str | None = None,
    names: Sequence[str] | None = None,
    most: int = 4,
    progress: Progress | None = None,
    **options: Any,
) -> ModelComparison:
    """Compare the answers and the heat of two models on the same pictures, to find where a new model went wrong.

    The heat is that of the first model's answer in both models and, if the answers differ, of the second's as well.
    A class is found in the other model by its label, up to the first comma; by its index if a model has no labels.

    Args:
        model, against: two Explainers, or what an Explainer takes as a model.
        pictures: one picture or a list, as ``camkit.explain`` takes them; memory does not grow with their number.
        target: the label or the index of a class of the first model to explain in both; None for their answers.
        names: what the results call the models; None for their own names.
        most: draw at most this many pictures, the most different ones.
        progress: ``progress(done, of)`` is called after each picture.
        **options: as for ``Explainer``, for both models.

    Raises:
        InputError: an argument or a model is wrong, or no picture can be read.

    Examples:
        >>> import camkit
        >>> plane = camkit.scenes.scene_paths()["plane-wood"]
        >>> camkit.compare_models("demo-fair", "demo-biased", plane)
        demo-fair and demo-biased: 1 of 1 picture with different answers
    """
    both = [each if isinstance(each, Explainer) else Explainer(each, **options) for each in (model, against)]
    first, second = names or (each.name for each in both)
    chosen: tuple[int, int | None] | None = None
    if target is not None:
        index = class_of(target, both[0].labels)
        chosen = index, _class_in(both[1].labels, both[0].labels, index)
        if chosen[1] is None:
            raise TargetError(f"{second} has no class {target!r}; name a class that both models have")
    rows: list[dict[str, Any]] = []
    heats: dict[str, Sequence[HeatOfTwo]] = {}

    def add(source: str, picture: Any) -> None:
        row, heats[source] = _compared(source, picture, both, chosen)
        insort(
            rows,
            row,
            key=lambda row: (not row["answers_differ"], 2 if row["heat_in_common"] is None else row["heat_in_common"]),
        )
        for less_different in heats.keys() - {row["picture"] for row in rows[:most]}:
            del heats[less_different]

    numbered = enumerate(pictures if isinstance(pictures, (list, tuple)) else [pictures], start=1)
    unreadable = for_each_picture([*numbered], add, progress)
    parts = [[(name, type(module)) for name, module in each.model.named_modules()] for each in both]
    return ModelComparison(first, tuple(rows), unreadable, second, parts[0] == parts[1], heats)


def _compared(
    source: str, picture: Any, both: Sequence[Explainer], chosen: tuple[int, int | None] | None
) -> tuple[dict[str, Any], list[HeatOfTwo]]:
    """Return the row of a picture, and its heat; ``chosen`` is the class to explain, as an index of each model."""
    found: list[Any] = [_explained(each, picture) for each in both]
    own, other = ((each.labels, answer.made.scored.classes) for each, answer in zip(both, found, strict=True))
    in_second = _class_in(other[0], own[0], found[0].target, other[1])
    differ = in_second != found[1].target
    classes = [chosen or (found[0].target, in_second)]
    if differ and chosen is None:
        classes.append((_class_in(own[0], other[0], found[1].target, own[1]), found[1].target))
    heats = []
    for indices in classes:
        maps = [
            best if index == best.target else None if index is None else _explained(each, picture, index)
            for each, best, index in zip(both, found, indices, strict=True)
        ]
        heats.append(HeatOfTwo(next(each.name for each in maps if each is not None), (maps[0], maps[1])))
    row = {
        "picture": source,
        "answer": found[0].name,
        "probability": finite_or_none(found[0].probability),
        "against_answer": found[1].name,
        "against_probability": finite_or_none(found[1].probability),
        "answers_differ": differ,
        "target": heats[0].label,
        "heat_in_common": heats[0].in_common,
    }
    return row, heats


def _explained(explainer: Explainer, picture: Any, target: int | None = None) -> Explanation:
    """Explain a class, or the best one, and return it on a small copy of the picture."""
    found = explainer(picture, target)
    if found.picture is None or found.heatmap.ndim != 2:
        raise ImageError("camkit compares two models only on grey or RGB pictures, and this input is neither")
    # Without a box, the picture is the model's input, which has the size of the heatmap
    small = figure.fitted(found.picture, _SIDE) if found.box else np.asarray(found.picture)
    box = found.box and figure.scaled_box(found.box, found.picture.shape[:2], small.shape[:2])
    return replace(found, shown=Image.fromarray(small), box=box)


def _class_in(
    labels: Sequence[str] | None, own: Sequence[str] | None, index: int, classes: int | None = None
) -> int | None:
    """Return the index of a class in another model with these labels; None if it has no such class, or several."""
    if not (labels and own) or index >= len(own):
        return index if classes is None or index < classes else None
    label, *others = (name.partition(",")[0].strip().casefold() for name in (own[index], *labels))
    if others[index : index + 1] == [label]:
        return index
    return others.index(label) if others.count(label) == 1 else None
