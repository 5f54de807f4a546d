"""The pictures of the report: first some pictures with their regions, then the worst offenders with every edit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import cv2
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from camkit.background.data import Item
from camkit.background.edits import BLUR, RING, Arm, Edit, PreparedPicture
from camkit.background.effects import ImageRow, named_without_object
from camkit.background.experiment import Experiment
from camkit.background.plan import stratified
from camkit.drawing import overlay
from camkit.drawing.figure import Tile, contact_sheet
from camkit.explaining.explanation import Explanation
from camkit.images.regions import Shades
from camkit.targets import EachTarget, Scores, Target
from camkit.targets.places import ranked_box
from camkit.targets.scores import detections_of
from camkit.types import Failure, Pixels

if TYPE_CHECKING:
    from camkit.background.result import CheckResult

THUMBNAILS = 12
"""Pictures shown with their outline: enough to notice that the regions are shifted."""

TRIPTYCHS = 3
"""Pictures at the top of the page: each on its own background, on another one, and without its object."""

_SIDE = 224
"""Pixels along the longer side to which small pictures are roughly enlarged, so that an outline is visible."""

_LINE = (255, 60, 160)
"""The outline's colour, RGB: a pink that stands out in most photographs."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture of a strip, with the model's answer and the probability it gives to the picture's own class.

    ``arm`` is the edit's, and ``right`` says whether the answer is right; neither is set if the picture is no edit.
    """

    title: str
    pixels: Pixels
    probability: float | None = None
    answer: str | None = None
    arm: Arm | None = None
    right: bool = False

    @property
    def comment(self) -> tuple[str, str]:
        """The answer as a triptych states it, and the verdict in whose colour it is written; "" for grey."""
        if self.arm == "removed":  # either answer may be chance
            return f"{'still' if self.right else 'then'} {self.answer}", ""
        return (f"right: {self.answer}", "PASS") if self.right else (f"wrong: {self.answer}", "FAIL")


@dataclass(frozen=True, eq=False)
class Strip:
    """One picture, its heat and its edits, with what the model answers to each."""

    row: ImageRow
    panels: tuple[Panel, ...]

    @property
    def title(self) -> str:
        """The picture's name and class."""
        return f"{self.row.name}, class {self.row.label}"

    @property
    def triptych(self) -> tuple[Panel, ...]:
        """The object on its own background, on another one, and the picture without it, as far as there are edits."""
        by_arm = {panel.arm: panel for panel in reversed(self.panels) if panel.arm}
        return tuple(by_arm[arm] for arm in ("same", "other", "removed") if arm in by_arm)

    @property
    def persuasion(self) -> tuple[bool, ...]:
        """How much the triptych says: most if it is right on its own background and wrong on the other one.

        Among others, one that is wrong on its own background, or that lacks the third picture, says less.
        """
        right = {panel.arm: panel.right for panel in self.triptych}
        own = right.get("same", False)
        return own and not right.get("other", True), own, "removed" in right

    def sheet(self) -> Pixels:
        """Draw the panels side by side, with their answers."""
        tiles = []
        for panel in self.panels:
            unknown = panel.answer is None or panel.probability is None
            note = "" if unknown else f"{panel.answer} ({panel.probability:.0%})"
            tiles.append(Tile(panel.pixels, panel.title, note))
        return contact_sheet(tiles, columns=len(tiles), title=self.title)

    @property
    def sentence(self) -> str:
        """What the triptych shows, for pages without pictures, such as GitHub's job summaries."""
        return "; ".join([self.title, *(f"{panel.title}: {panel.comment[0]}" for panel in self.triptych)])


class Showcase:
    """Draws the pictures of a check. The model runs once more on the edits of the worst offenders.

    Args:
        result: the check.
    """

    def __init__(self, result: CheckResult) -> None:
        self._result = result
        self._plan = result.plan
        self._experiment = Experiment(result.plan)
        self._pasted = [row for row in result.images if row.same]
        self._named = functools.cache(functools.partial(named_without_object, result.images))

    @functools.cached_property
    def strips(self) -> list[Strip]:
        """The worst offenders: the answers that changed most with the background, of every class in turn."""
        offenders = sorted((row for row in self._pasted if self._offence(row)[0] > 0), key=lambda row: row.name)
        worst = _classes_in_turn(sorted(offenders, key=self._offence, reverse=True))
        return list(filter(None, map(self._strip, worst[:12])))

    @functools.cached_property
    def triptychs(self) -> list[Strip]:
        """The strips that persuade most, of other classes first; further pictures if there are too few.

        If nothing was found, the worst offenders would mislead, so these are typical pictures, of each class in turn.
        """
        strips = self.strips if self._result.verdict in ("FAIL", "WARN") else []
        shown = {strip.row.name for strip in strips}
        unseen = [row for row in self._pasted if row.name not in shown]
        accuracies = {label: measures.accuracy.value for label, measures in self._result.classes.items()}
        unseen.sort(
            key=lambda row: (
                bool(row.removed),  # has three panels
                self._is_typical(row),
                not any(row.removed.values()),
                min(*row.same.values(), *row.other.values()),
                accuracies.get(row.label, 0.0),
            ),
            reverse=True,
        )
        missing = _classes_in_turn(unseen)[: max(0, TRIPTYCHS - len(strips))]
        full = [strip for strip in (*strips, *map(self._strip, missing)) if strip and len(strip.triptych) > 1]
        if strips:
            full.sort(key=lambda strip: (strip.persuasion, self._is_typical(strip.row)), reverse=True)
            full = sorted(_classes_in_turn(full, attrgetter("row.label")), key=lambda strip: not strip.persuasion[0])
        return full[:TRIPTYCHS]

    def _is_typical(self, row: ImageRow) -> bool:
        """Return whether the model names the class without the object, or not, as on most pictures of the class."""
        named, pictures = self._named(row.label)
        return (row.label in row.named.values()) == (2 * named > pictures)

    def thumbnails(self) -> list[Panel]:
        """Draw a few pictures of every class in turn with their regions, as the model sees them."""
        data, seed = self._plan.data, self._plan.settings.check.seed
        sample = stratified(data.items, THUMBNAILS, THUMBNAILS * len(data.classes), seed)
        return self._outlined([(item, None) for item in sample])

    def flips(self) -> list[Panel]:
        """Draw pictures that the baseline's model recognised and this one does not."""
        flips = () if self._result.change is None else self._result.change.flips
        return self._outlined(
            [(self._plan.by_name[flip.name], f"{flip.before} before, {flip.now} now") for flip in flips]
        )

    def _outlined(self, shown: Sequence[tuple[Item, str | None]]) -> list[Panel]:
        """Draw the first pictures that can be read, of every class in turn, each with its region and an answer."""
        in_turn = _classes_in_turn(shown, lambda pair: pair[0].label)
        loaded = ((item, answer, self._experiment.load(item)) for item, answer in in_turn)
        panels = (
            Panel(f"{item.label}: {item.name}", _with_outline(picture), answer=answer)
            for item, answer, picture in loaded
            if picture is not None
        )
        return list(itertools.islice(panels, THUMBNAILS))

    def _offence(self, row: ImageRow) -> tuple[float, bool, float]:
        """Return how much a picture speaks against the model: its gap, then whether the third panel is typical.

        If these are equal, a larger object says more, because it is easier to see in a small picture.
        """
        return min(row.same[fill] - row.other[fill] for fill in row.same), self._is_typical(row), row.area or 0.0

    def _strip(self, row: ImageRow) -> Strip | None:
        """Draw a picture, its heat and its edits, and ask the model about the edits; None if there are no edits."""
        item = self._plan.by_name[row.name]
        edits, picture = self._experiment.edits(item, wanted=1), self._experiment.load(item)
        if not edits or picture is None:
            return None
        shown = {edit: make() for edit, make in edits.items() if self._title(edit, row)}
        answers, _ = self._plan.answer(torch.stack(list(shown.values())), [item] * len(shown))
        own = self._plan.outputs[item.label]
        edited = [
            Panel(
                self._title(edit, row),
                self._with_wanted(item, in_levels(picture.shades, tensor)),
                answer.share,
                self._plan.name_of(answer.output),
                edit.arm,
                answer.output in own,
            )
            for (edit, tensor), answer in zip(shown.items(), answers, strict=True)
        ]
        unedited = Panel("picture and region", _with_outline(picture), row.probability, row.answer)
        explanation, heat = self.explained(item), Panel("no heat", np.full((_SIDE, _SIDE, 3), 128, np.uint8))
        if isinstance(explanation, Explanation):
            drawn = overlay.render(in_levels(picture.shades, picture.tensor), explanation.heatmap, None)
            of = f"heat of the best {item.label} box" if self._plan.detects else f"heat for {item.label}"
            title = of + ("" if explanation.status == "ok" else ": no evidence")
            heat = Panel(title, self._with_wanted(item, drawn))
        return Strip(row, (unedited, heat, *edited))

    def _with_wanted(self, item: Item, pixels: Pixels) -> Pixels:
        """Draw the boxes that a detector should find; a classifier's picture stays as it is."""
        for box in self._plan.wanted(item).round().int().tolist() if self._plan.detects else []:
            cv2.rectangle(pixels, box[:2], [side - 1 for side in box[2:]], _LINE, max(1, min(pixels.shape[:2]) // 150))
        return pixels

    def _title(self, edit: Edit, row: ImageRow) -> str:
        """Return the title of an edit in a strip, with how often such edits are right; "" if it is not shown."""
        if edit.fill == BLUR:
            return ""
        if edit.arm == "removed":
            named, pictures = self._named(row.label)
            return f"{self._plan.removed} ({row.label} is named in {named} of {pictures} such pictures)"
        if edit.arm in ("same", "other"):
            on = "with a ring of class" if edit.fill == RING else "on a background of class"
            alike = [each for each in self._result.images if each.label == row.label]
            right = np.mean([share for each in alike for share in getattr(each, edit.arm).values()])
            return f"{on} {self._plan.by_name[edit.lender].label} (such pictures: {right:.0%} right)"
        return ""

    def explained(self, item: Item) -> Explanation | Failure | None:
        """Explain a picture's class, or a detector's best box of this class; None if the model cannot be explained."""
        plan, own = self._plan, self._plan.outputs[item.label]
        with contextlib.suppress(*[Exception] * plan.detects):  # it may have no layers, or code without gradients
            target = _BestBox(own) if plan.detects else EachTarget((own,))
            return next(plan.explain([item], target)) if plan.explains else None
        return None


@dataclass(frozen=True)
class _BestBox(Target):
    """The box with the highest score of those whose class is one of these outputs."""

    for_threads = True

    own_class: tuple[int, ...]

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image."""
        images = detections_of(output, batch)
        assert images is not None, "the check has found boxes in the model's output"
        labels = [found["labels"] for found in images]
        return ranked_box(images, eligible=[torch.isin(each, each.new_tensor(self.own_class)) for each in labels])


_T = TypeVar("_T")


def _classes_in_turn(entries: Sequence[_T], label_of: Callable[[_T], str] = attrgetter("label")) -> list[_T]:
    """Return the first entry of each class, then the second of each, and so on, each time in the given order."""
    counts = Counter[str]()

    def turn(entry: _T) -> int:
        counts[label_of(entry)] += 1
        return counts[label_of(entry)]

    return sorted(entries, key=turn)


def in_levels(shades: Shades, tensor: Float[Tensor, "c h w"]) -> Pixels:
    """Return a model's input as a picture."""
    levels = (shades.pixels(tensor) * 255).round().to(torch.uint8)
    colours = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return colours.permute(1, 2, 0).numpy().copy()


def _with_outline(picture: PreparedPicture) -> Pixels:
    """Draw the region's outline onto the picture. A small picture is enlarged first."""
    pixels = in_levels(picture.shades, picture.tensor)
    factor = max(1, round(_SIDE / max(pixels.shape[:2])))
    pixels = np.asarray(cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST))
    if picture.region is None:
        return pixels
    region = cv2.resize(
        (picture.region > 0.5).numpy().astype(np.uint8), pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST
    )
    edges, _ = cv2.findContours(region, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(pixels, edges, -1, _LINE, 2)
    return pixels
