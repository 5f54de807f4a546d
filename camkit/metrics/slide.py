"""One picture for a colleague: what the model saw, what speaks for its answer and for the true class, as a slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from camkit.drawing.encode import as_html, as_pdf
from camkit.drawing.figure import percent
from camkit.drawing.text import GREY, INK, Canvas, SvgCanvas, wrapped
from camkit.errors import ImageError, InputError, advice
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.files import write_file, write_picture
from camkit.images.prepare import as_pixels
from camkit.images.read import open_picture
from camkit.kit.wording import listed
from camkit.methods.registry import MethodLike
from camkit.metrics.compare import prepared
from camkit.metrics.evaluator import Evaluator, hot_sets
from camkit.metrics.faithfulness import HOTTEST
from camkit.models.loaded import Loadable
from camkit.targets import TargetLike, contrast
from camkit.types import ImageLike, Pixels

_WIDTH, _HEIGHT = 1920, 1080
"""The size of a slide in pixels, 16:9."""
_MARGIN, _GAP = 60, 30
_TITLE, _TEXT, _SENTENCE = 30, 24, 38
_LEADING = 1.35


@dataclass(frozen=True, eq=False)
class Slide:
    """What a slide shows.

    Attributes:
        panels: the pictures, each with its title and what its colours mean.
        sentence: what the slide says.
        explanations: the maps that are drawn: of the answer and, if there is one, of the true class and the contrast.
        before, after: the answer's score, a probability if the model has one, for the picture and without its hottest
            part; of a slide of targets, the first target's score, and None.
    """

    panels: tuple[tuple[str, Pixels, str], ...] = field(repr=False)
    sentence: str
    explanations: tuple[Explanation, ...] = field(repr=False)
    before: float
    after: float | None

    def draw(self) -> Pixels:
        """Return the slide, 1080 x 1920 x 3 uint8 RGB."""
        canvas = Canvas(_WIDTH, _HEIGHT)
        self._draw_on(canvas)
        return canvas.pixels()

    def _draw_on(self, canvas: Canvas | SvgCanvas) -> None:
        top = _lines(canvas, (_MARGIN, _MARGIN), self.sentence, _WIDTH - 2 * _MARGIN, _SENTENCE, INK, 2) + _GAP
        above, below = round(_TITLE * _LEADING), round(2 * _TEXT * _LEADING) + _GAP
        columns, width, height = self._places(_HEIGHT - _MARGIN - top, above + below)
        for number, (title, pixels, words) in enumerate(self.panels):
            row, column = divmod(number, columns)
            left, upper = _MARGIN + column * (width + _GAP), round(top + row * height)
            _lines(canvas, (left, upper), title, width, _TITLE, INK, 1)
            ratio = _ratio(pixels, width, int(height - above - below))
            size = (max(1, int(pixels.shape[1] * ratio)), max(1, int(pixels.shape[0] * ratio)))
            way = cv2.INTER_AREA if ratio < 1 else cv2.INTER_CUBIC
            drawn = np.asarray(cv2.resize(np.ascontiguousarray(pixels), size, interpolation=way))
            canvas.picture(left, upper + above, drawn)
            _lines(canvas, (left, upper + above + drawn.shape[0] + 6), words, width, _TEXT, GREY, 2)

    def _places(self, space: float, text: int) -> tuple[int, int, float]:
        """Return how many panels stand in a row, and a panel's width and height, so that the pictures are largest."""
        places: list[tuple[int, int, float]] = []
        # More than 4 pictures beside each other would be too small to see from the back of a room
        for columns in range(1, min(len(self.panels), 4) + 1):
            width = (_WIDTH - 2 * _MARGIN - _GAP * (columns - 1)) // columns
            places.append((columns, width, space / -(-len(self.panels) // columns)))
        return max(
            places, key=lambda place: min(_ratio(pixels, place[1], place[2] - text) for _, pixels, _ in self.panels)
        )

    def save(self, path: str | Path) -> Path:
        """Write the slide; the suffix decides the type: .svg, .pdf with one page, or any picture type.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if path.suffix == ".svg":
            canvas = SvgCanvas(_WIDTH, _HEIGHT)
            self._draw_on(canvas)
            contents = canvas.svg().encode()
        elif path.suffix == ".pdf":
            # Pixels of an inch in a PDF: the page is then 13.3 x 7.5 inches, the usual size of a wide slide
            contents = as_pdf(self.draw(), 144)
        else:
            return write_picture(path, self.draw())
        write_file(path, contents)
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return the sentence, the scores and the explanations as JSON values."""
        rows = [explanation.to_dict() for explanation in self.explanations]
        return {"sentence": self.sentence, "before": self.before, "after": self.after, "explanations": rows}

    def _repr_html_(self) -> str:
        """Show the slide in a notebook."""
        return as_html(self.draw(), self.sentence)


def slide(
    model: Explainer | Loadable,
    picture: ImageLike,
    true: str | int | None = None,
    *,
    target: TargetLike | Sequence[TargetLike] | None = None,
    method: MethodLike | None = None,
    **options: Any,
) -> Slide:
    """Return a slide about a model's answer to one picture.

    It shows the picture, the heat of the answer, the heat of the true class and the contrast of the two, and the
    picture whose hottest fifth is blurred, with the answer's score there. If pixels of equal heat leave no such fifth,
    the part next to it in size is blurred, and the slide says how large it is. With ``target``, it shows the picture
    and the heat of each target instead.

    Args:
        model: an ``Explainer``, or what it takes as a model.
        picture: one picture, as ``camkit.explain`` takes it.
        true: the true class, as a label or an index; None leaves its heat and the contrast out.
        target: one target or up to five, as for ``camkit.explain``.
        method: the method; None for "auto", whatever the method of an ``Explainer``. A layer of its own is kept.
        **options: ``preprocess``, ``labels``, ``device``, ``precision`` and ``references`` as for ``Explainer``.

    Raises:
        InputError: an argument, the picture or the model is wrong.

    Examples:
        >>> import camkit
        >>> camkit.slide("demo-biased", camkit.scenes.scene_paths()["plane-wood"], "plane").sentence
        'demo-biased says bird (...), but the true class is plane. Without the hottest fifth, bird stays at ...'
    """
    explainer, chosen = prepared(model, "auto" if method is None else method, (), options)
    explainer = explainer.using(chosen[0], None)
    opened = open_picture(picture) if isinstance(picture, (str, Path)) else picture
    if target is not None:
        if true is not None:
            raise InputError(f"a slide compares the answer with {advice('true', '--true')}, or shows targets; not both")
        targets: list[Any] = list(target) if isinstance(target, (list, tuple)) else [target]
        return _of_targets(explainer, opened, targets)
    answer = explainer(opened)
    found = [answer]
    if true is not None:
        of_true = explainer(opened, true)
        if of_true.target != answer.target:
            found += [of_true, explainer(opened, contrast(answer.target or 0, of_true.target or 0))]
    evaluator = Evaluator(explainer, opened, answer.target)
    blurred, hottest = evaluator.picture.clone(), ""
    if answer.status == "ok":
        # The share of the metric top-loss. A slide shows a picture, so nothing is interpolated between sets.
        hot = hot_sets(evaluator.heat(answer).values, [HOTTEST])[0]
        blurred[:, hot] = evaluator.emptied_picture("blur")[:, hot].to(blurred)
        share = float(hot.double().mean())
        hottest = "hottest fifth" if round(share, 2) == HOTTEST else f"hottest {percent(share)}"
    before, after = (float(score) for score in evaluator.scored(torch.stack([evaluator.picture, blurred])))
    titles = ("What speaks for the answer", "What speaks for the true class", "Answer rather than true class")
    panels = _panels(found, titles)
    pixels = as_pixels(blurred[None])
    if pixels is not None and answer.status == "ok":
        words = f"Blurred where most speaks for {answer.name}: {_value(answer, after)}."
        panels.append((f"Without the {hottest}", pixels[0], words))
    sentence = _sentence(explainer.name, found, before, after, hottest)
    return Slide(tuple(panels), sentence, tuple(found), before, after)


def _of_targets(explainer: Explainer, picture: ImageLike, targets: list[TargetLike]) -> Slide:
    found = explainer.batch([picture], target=targets)
    if not 1 <= len(found) <= 5:  # with the picture, six panels in two rows; more would be too small
        raise InputError(f"a slide shows 1 to 5 targets, not {len(found)}")
    shares = ["" if row.probability is None else f" ({percent(row.probability)})" for row in found]
    panels = _panels(found, [f"{row.name}{share}" for row, share in zip(found, shares, strict=True)])
    score = float(found[0].score if found[0].probability is None else found[0].probability)
    sentence = f"{explainer.name}: what speaks for {listed([row.name for row in found])}."
    return Slide(tuple(panels), sentence, tuple(found), score, None)


def _panels(found: Sequence[Explanation], titles: Sequence[str]) -> list[tuple[str, Pixels, str]]:
    """Return the picture, and the heat of each explanation under its title."""
    if found[0].picture is None or found[0].heatmap.ndim != 2:
        raise ImageError("a slide shows pictures, grey or RGB; this input is not one")
    panels = [("The picture", found[0].picture, Path(found[0].source).name)]
    for row, title in zip(found, titles, strict=False):
        words = row.meaning() if row.status == "ok" else f"Nothing speaks for {row.name}."
        panels.append((title, row.overlay(scale="each"), words))
    return panels


def _value(answer: Explanation, score: float) -> str:
    return f"score {score:.3g}" if answer.probability is None else percent(score)


def _sentence(model: str, found: Sequence[Explanation], before: float, after: float, hottest: str) -> str:
    answer = found[0]
    said = f"{model} says {answer.name} ({_value(answer, before)})"
    said += f", but the true class is {found[1].name}." if len(found) > 1 else "."
    if answer.status != "ok":
        return f"{said} No place in the picture speaks for {answer.name}."
    then = _value(answer, after)
    verb = "stays at" if then == _value(answer, before) else "falls to" if after < before else "rises to"
    return f"{said} Without the {hottest}, {answer.name} {verb} {then}."


def _ratio(pixels: Pixels, width: int, height: float | int) -> float:
    """Return by how much a picture is enlarged to fit into a place."""
    return float(min(width / pixels.shape[1], height / pixels.shape[0]))


def _lines(
    canvas: Canvas | SvgCanvas,
    corner: tuple[float | int, float | int],
    words: str,
    width: int,
    size: int,
    colour: Any,
    most: int,
) -> float:
    """Write words below a corner, in at most this many lines; return where they end."""
    left, top = corner[0], float(corner[1])
    for line in wrapped(words, width, size, most):
        canvas.text(left, top + size * _LEADING / 2, line, size=size, colour=colour)
        top += size * _LEADING
    return top
