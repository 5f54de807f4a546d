"""Compare two models on the same pictures: their answers, and where their heat differs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from camkit.drawing.encode import as_html
from camkit.drawing.figure import Caption, compose, fitted, percent, scaled_box
from camkit.drawing.figure import sheet as stacked
from camkit.drawing.text import Canvas, fitting, wrapped
from camkit.errors import ImageError, TargetError, as_cell, printable
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation, finite_or_none
from camkit.images.files import csv_line, write_file, write_picture
from camkit.kit.wording import counted
from camkit.metrics.evaluator import OfModel
from camkit.tables import Rows
from camkit.types import Failure, ImageLike, Pixels, Progress, Scale

if TYPE_CHECKING:
    from camkit.models.loaded import Loadable
    from camkit.targets import TargetLike

_SIDE, _LETTERS, _LEADING = 400, 20, 29
"""The longer side of a picture on the sheet, at which heat is compared too, and the height of its sentences and of
their lines, in pixels."""
_AT_ONCE = 64
"""Pictures between two turns of the models: some passes of each, and some ten megabytes of small copies."""
_BLUE, _RED = np.array([[28, 88, 214], [206, 32, 41]], np.uint8)
"""The colours of the first and of the second model."""


@dataclass(frozen=True, eq=False)
class HeatOfTwo:
    """The heat of two models for one class of one picture.

    Attributes:
        label: the class.
        maps: each model's explanation, on a copy of the picture of at most 400 pixels; or why there is none.
    """

    label: str
    maps: tuple[Explanation | str, Explanation | str]

    @property
    def heats(self) -> Float[np.ndarray, "2 h w"] | None:
        """Both heatmaps on the picture, 0..1, each divided by its maximum; None if there are not two on one picture."""
        first, second = self.maps
        if isinstance(first, str) or isinstance(second, str) or not np.array_equal(first.picture, second.picture):
            return None
        return np.stack([first.heatmap_on_picture(), second.heatmap_on_picture()])

    @property
    def in_common(self) -> float | None:
        """The heat that both models have in the same places, as a share of the heat that either has, 0 to 1.

        It is the sum of the smaller of both values divided by the sum of the larger. None if there is no heat, or if
        there are not two maps on one picture.
        """
        if self.heats is None or not self.heats.any():
            return None
        smaller, larger = (heat.sum(dtype=np.float64) for heat in (self.heats.min(0), self.heats.max(0)))
        return float(smaller / larger)

    def difference(self) -> Pixels:
        """Draw where the second model's heat is stronger in red, and where the first's is in blue.

        Each map is divided by its maximum before. Equal maps leave the picture as it is.
        """
        found = next(each for each in self.maps if isinstance(each, Explanation))
        heats, picture = self.heats, found.picture
        if picture is None:
            picture = np.full((*found.heatmap.shape, 3), 255, np.uint8)
        if heats is None:
            return picture
        more = (heats[1] - heats[0])[..., None]
        weight = 0.8 * np.abs(more)  # the picture shows through the full colour
        return np.asarray(np.rint(picture * (1 - weight) + np.where(more > 0, _RED, _BLUE) * weight), np.uint8)

    def draw(self, names: Sequence[str], colormap: str, alpha: float, scale: Scale | None) -> Pixels:
        """Draw both maps and their difference side by side; with None for models whose values have different units."""
        explained = [each for each in self.maps if isinstance(each, Explanation)]
        used: Any = explained if scale == "shared" else "each"
        cells = []
        for name, colour, found in zip(names, (_BLUE, _RED), self.maps, strict=True):
            title, how, limits, warnings, pixels = self.label, "no map", "no heat", (str(found),), self.difference()
            if isinstance(found, Explanation):
                pixels = found.overlay(colormap=colormap, alpha=alpha, scale=used)
                title += "" if found.probability is None else f": {percent(found.probability)}"
                caption = found.caption(found.colour_scale(used))
                how, warnings = caption.lines[0], caption.warnings
                if found.status == "ok":
                    limits = "red: its own maximum" if scale is None else f"heat {found.colour_scale(used)}"
            cells.append(_cell(pixels, title, (name, how, limits), warnings, (colour, colour)))
        common = "nothing to compare" if self.in_common is None else f"{percent(self.in_common)} of the heat in common"
        lines = (f"blue: more heat of {names[0]}", f"red: more heat of {names[1]}", "each divided by its maximum")
        cells.append(_cell(self.difference(), common, lines, (), (_BLUE, _RED)))
        return stacked(cells, columns=3)


def _cell(
    pixels: Pixels, title: str, lines: Sequence[str], warnings: tuple[str, ...], ends: tuple[np.ndarray, np.ndarray]
) -> Pixels:
    """Return a picture below a band from one colour to another, a title and lines, each of which stays one line."""
    width = pixels.shape[1]
    caption = Caption(fitting(title, width, 21), tuple(fitting(line, width, 14) for line in lines), warnings)
    cell = compose(pixels, caption)
    band = np.linspace(*ends, cell.shape[1])[None].repeat(6, 0).astype(np.uint8)
    return np.concatenate([band, cell])


@dataclass(frozen=True, eq=False)
class AnswersOfTwo:
    """What two models say of one picture.

    Attributes:
        source: the picture's file, or its number in the call.
        answers: each model's best class.
        probabilities: their probabilities; None where a model has none.
        differ: whether these are two classes.
        label: the class whose heat is compared.
        in_common: ``HeatOfTwo.in_common`` for this class.
        heats: the heat for this class and, if the answers differ, for the second model's answer; empty for a picture
            that is not among the most different ones.
    """

    source: str
    answers: tuple[str, str]
    probabilities: tuple[float | None, float | None]
    differ: bool
    label: str
    in_common: float | None
    heats: tuple[HeatOfTwo, ...] = field(default=(), repr=False)

    @property
    def said(self) -> list[str]:
        """Each model's answer with its probability."""
        pairs = zip(self.answers, self.probabilities, strict=True)
        return [answer if share is None else f"{answer} {percent(share)}" for answer, share in pairs]

    def sentence(self, names: Sequence[str]) -> str:
        """Return what the models say of the picture."""
        one, other = self.said
        return f"{Path(self.source).name}: {names[0]} says {one}, {names[1]} says {other}."


@dataclass(frozen=True, eq=False)
class ModelComparison(OfModel[AnswersOfTwo]):
    """Two models on the same pictures: those with different answers first, then those with the least heat in common.

    Attributes:
        against: the second model's name.
        shared: whether both models have the same modules, so that the values of their maps have one scale.
    """

    against: str
    shared: bool

    @property
    def names(self) -> tuple[str, str]:
        """The names of both models."""
        return self.model, self.against

    @property
    def sentence(self) -> str:
        """In how many pictures the answers differ."""
        differ = sum(row.differ for row in self.rows)
        return (
            f"{self.model} and {self.against}: the answers differ in {differ} of {counted(len(self.rows), 'picture')}."
        )

    def table(self) -> Rows:
        """Return a row for each picture."""
        return [
            {
                "picture": row.source,
                "answer": row.answers[0],
                "probability": finite_or_none(row.probabilities[0]),
                "against_answer": row.answers[1],
                "against_probability": finite_or_none(row.probabilities[1]),
                "answers_differ": row.differ,
                "target": row.label,
                "heat_in_common": row.in_common,
            }
            for row in self.rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, without the maps."""
        return {"model": self.model, "against": self.against, "unreadable": self.unreadable, "rows": self.table()}

    def sheet(self, *, colormap: str = "turbo", alpha: float = 0.5, scale: Scale = "each") -> Pixels:
        """Draw the most different pictures: both maps, and where they differ.

        Args:
            colormap, alpha: as for ``Explanation.overlay``.
            scale: "each" draws each map on its own scale, as the difference compares them. "shared" draws the maps of
                models with the same modules on one scale, since their values have one unit.

        Returns:
            The sheet, height x width x 3 uint8 RGB.
        """
        blocks: list[Pixels] = []
        for row in self.rows:
            drawn = [heat.draw(self.names, colormap, alpha, scale if self.shared else None) for heat in row.heats]
            if drawn:
                width = drawn[0].shape[1]
                said = [self.sentence] if not blocks and len(self.rows) > 1 else []
                said.append(row.sentence(self.names))
                lines = [line for words in said for line in wrapped(words, width - 32, _LETTERS, 3)]
                canvas = Canvas(width, round(_LEADING * (len(lines) + 1)))
                for place, line in enumerate(lines, start=1):
                    canvas.text(16, _LEADING * place, line, size=_LETTERS)
                blocks.append(np.concatenate([canvas.pixels(), stacked(drawn, columns=1)]))
        return stacked(blocks, columns=1)

    def save(self, path: str | Path, *, colormap: str = "turbo", alpha: float = 0.5, scale: Scale = "each") -> Path:
        """Write the sheet, or the table if the file's name ends in .csv, completely or not at all.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if path.suffix != ".csv":
            return write_picture(path, self.sheet(colormap=colormap, alpha=alpha, scale=scale))
        rows = self.table()
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        texts = ([as_cell(printable(cell)) if isinstance(cell, str) else cell for cell in line] for line in lines)
        write_file(path, map(csv_line, texts))
        return path

    def __repr__(self) -> str:
        """Return how many answers differ."""
        return f"<ModelComparison of {self.sentence[:-1]}>"

    def _repr_html_(self) -> str:
        """Show the sheet in a notebook."""
        return as_html(self.sheet(), repr(self))


def compare_models(
    model: Explainer | Loadable,
    against: Explainer | Loadable,
    pictures: ImageLike | Iterable[ImageLike],
    *,
    target: TargetLike | None = None,
    names: tuple[str, str] | None = None,
    most: int = 12,
    progress: Progress | None = None,
    **options: Any,
) -> ModelComparison:
    """Compare the answers and the heat of two models on the same pictures, to find where a new model went wrong.

    The heat is that of the first model's answer in both models and, if the answers differ, of the second's as well.
    A class is found in the other model by its label, up to the first comma; by its index if a model has no labels.

    Args:
        model, against: two Explainers, or what an Explainer takes as a model.
        pictures: one picture, or any number of them as ``Explainer.stream`` takes them; memory does not grow with them.
        target: what is explained in both models; None for their answers.
        names: what the sheet calls the models; None for their own names.
        most: keep the heat of at most this many pictures, the most different ones.
        progress: ``progress(done, of)`` is called after some pictures; ``of`` is 0 if their number is not known.
        **options: as for ``Explainer``, for both models.

    Raises:
        InputError: an argument or a model is wrong, or no picture can be read.

    Examples:
        >>> import camkit
        >>> plane = camkit.scenes.scene_paths()["plane-wood"]
        >>> camkit.compare_models("demo-fair", "demo-biased", plane)
        <ModelComparison of demo-fair and demo-biased: the answers differ in 1 of 1 picture>
    """
    both = [each if isinstance(each, Explainer) else Explainer(each, **options) for each in (model, against)]
    first, second = both
    if names is None:
        own = first.name, second.name
        names = own if own[0] != own[1] else (f"first {own[0]}", f"second {own[1]}")
    is_one = isinstance(pictures, (str, Path)) or hasattr(pictures, "shape") or isinstance(pictures, Image.Image)
    several: Any = [pictures] if is_one else pictures
    total = len(several) if hasattr(several, "__len__") else 0
    waiting, done = iter(several), 0
    kept: list[AnswersOfTwo] = []
    rest: list[AnswersOfTwo] = []
    unreadable: dict[str, str] = {}
    while chunk := list(itertools.islice(waiting, _AT_ONCE)):
        for picture, *found in zip(chunk, *(_answers(each, chunk) for each in both), strict=True):
            done += 1
            source = str(picture) if isinstance(picture, (str, Path)) else f"picture {done}"
            failed = next((each for each in found if isinstance(each, Failure)), None)
            if failed is not None:
                unreadable[source] = str(failed.error)
                continue
            kept.append(_row(source, picture, both, names, found, target))
        kept.sort(key=_order)
        rest += [replace(row, heats=()) for row in kept[most:]]
        del kept[most:]
        if progress is not None:
            progress(done, total)
    if not kept:
        raise ImageError(next(iter(unreadable.values()), "there are no pictures to compare"))
    rows = (*kept, *sorted(rest, key=_order))
    parts = [[(name, type(module)) for name, module in each.model.named_modules()] for each in both]
    return ModelComparison(names[0], rows, unreadable, names[1], parts[0] == parts[1])


def _order(row: AnswersOfTwo) -> tuple[bool, float]:
    return not row.differ, 2 if row.in_common is None else row.in_common


def _answers(explainer: Explainer, pictures: Sequence[ImageLike]) -> list[Any]:
    rows = explainer.stream(pictures, on_error="yield")
    return [row if isinstance(row, Failure) else _small(row) for row in rows]


def _small(found: Explanation) -> Explanation:
    """Return an explanation on a small copy of its picture."""
    if found.heatmap.ndim != 2:
        raise ImageError("two models are compared on pictures; this input is not one")
    if found.picture is None:
        return found
    small, size = fitted(found.picture, _SIDE), found.picture.shape[:2]
    boxes = {name: getattr(found, name) for name in ("box", "detection")}
    scaled = {name: None if box is None else scaled_box(box, size, small.shape[:2]) for name, box in boxes.items()}
    return replace(found, shown=Image.fromarray(small), **scaled)


def _row(
    source: str,
    picture: Any,
    both: Sequence[Explainer],
    names: Sequence[str],
    found: Sequence[Explanation],
    target: TargetLike | None,
) -> AnswersOfTwo:
    first, second = found
    index = _class_in(both[1], both[0], first.target)
    differ = index != second.target
    if target is None:
        heats = [HeatOfTwo(first.name, (first, _of_class(both[1], picture, second, index)))]
        if differ:
            other = _of_class(both[0], picture, first, _class_in(both[0], both[1], second.target))
            heats.append(HeatOfTwo(second.name, (other, second)))
    else:
        one, wanted = both[0](picture, target), target
        if isinstance(target, (int, str)):
            place = _class_in(both[1], both[0], one.target)
            if place is None:
                raise TargetError(f"{names[1]} has no class {one.name!r}; name a class that both models have")
            wanted = place
        heats = [HeatOfTwo(one.name, (_small(one), _small(both[1](picture, wanted))))]
    answers, shares = (first.name, second.name), (first.probability, second.probability)
    return AnswersOfTwo(source, answers, shares, differ, heats[0].label, heats[0].in_common, tuple(heats))


def _of_class(explainer: Explainer, picture: Any, best: Explanation, index: int | None) -> Explanation | str:
    """Return the explanation of a class, or why there is none."""
    if index is None:
        return "it has no such class"
    if index == best.target:
        return best
    try:
        return _small(explainer(picture, index))
    except TargetError as error:
        return str(error)


def _class_in(other: Explainer, own: Explainer, index: int | None) -> int | None:
    """Return the index of a class in another model; None if it has no such class, or several."""
    if index is None or not (own.labels and other.labels):
        return index
    label, *labels = (name.partition(",")[0].strip().casefold() for name in (own.labels[index], *other.labels))
    if labels[index : index + 1] == [label]:
        return index
    return labels.index(label) if labels.count(label) == 1 else None
