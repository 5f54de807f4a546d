"""The pictures of the report: first some pictures with their regions, then the worst offenders with every edit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from camkit.background.answers import answer_batch
from camkit.background.check import CheckResult
from camkit.background.edits import BLUR, RING, TILE, paste
from camkit.background.experiment import OTHER, REMOVED, SAME, EditName, Partners, PreparedPicture
from camkit.background.kinds import Kind, WrongAnswer
from camkit.background.measures import ImageRow
from camkit.background.plan import Plan, load_prepared
from camkit.background.sampling import stratified
from camkit.background.shortcuts import Shortcut
from camkit.background.trial import Loader, list_edits, partners_of
from camkit.background.values import Item
from camkit.drawing import overlay
from camkit.errors import CamkitError
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.targets import EachTarget
from camkit.types import Box, Pixels

THUMBNAILS = 12
"""Pictures shown with their outline: enough to notice that the regions are shifted."""

OFFENDERS = 12
"""Worst offenders shown."""

_MIN_PER_CLASS = 2
"""Offenders of a class shown before the next class follows."""

_WITHOUT_OBJECT_WEIGHT = 0.5
"""How much a right answer without the object counts, compared with the gap, when offenders are ranked."""

_SIDE = 224
"""Pixels along the longer side to which small pictures are roughly enlarged, so that an outline is visible."""

_LINE = (255, 60, 160)
"""The outline's colour, RGB: a pink that stands out in most photographs."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture of a strip, with the model's answer and the probability it gives to the picture's own class."""

    title: str
    pixels: Pixels
    probability: float | None = None
    answer: str | None = None


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
    def sentence(self) -> str:
        """The answers in words."""
        answers = [
            f"{panel.title}: {panel.answer} ({panel.probability:.0%} {self.row.label})"
            for panel in self.panels
            if panel.answer
        ]
        return "; ".join([self.title, *answers])


def thumbnails(plan: Plan) -> list[Panel]:
    """Draw a few pictures of every class in turn with their regions, as the model sees them."""
    sample = stratified(plan.data.items, THUMBNAILS, THUMBNAILS * len(plan.data.classes), plan.settings.check.seed)
    panels: list[Panel] = []
    for item in _classes_in_turn(sample):
        if len(panels) == THUMBNAILS:
            break
        try:
            picture = load_prepared(plan, item)
        except CamkitError:
            continue
        panels.append(Panel(f"{item.label}: {item.name}", _with_outline(picture)))
    return panels


def shortcut_panels(result: CheckResult) -> list[tuple[Shortcut, list[Panel]]]:
    """Draw the pictures of each shortcut with a frame around the part that raises the class."""
    plan = result.plan
    items = {item.name: item for item in plan.data.items}
    return [
        (
            found,
            [Panel(crop.name, _with_frame(load_prepared(plan, items[crop.name]), crop.box)) for crop in found.crops],
        )
        for found in result.shortcuts
    ]


def kind_panels(result: CheckResult) -> tuple[list[tuple[Kind, list[Panel]]], list[Panel]]:
    """Draw the examples of each kind of background, and wrong answers of the worst pair as the model saw them."""
    found, items = result.kinds, {item.name: item for item in result.plan.data.items}
    if found is None:
        return [], []
    load = Loader(result.plan)
    kinds = [
        (
            kind,
            [Panel(name, _pixels(picture, picture.tensor)) for name in kind.examples if (picture := load(items[name]))],
        )
        for kind in found.kinds
    ]
    wrong = [] if found.worst is None else [_wrong_answer(answer, items, load) for answer in found.worst.wrong]
    return kinds, [panel for panel in wrong if panel is not None]


def _wrong_answer(answer: WrongAnswer, items: Mapping[str, Item], load: Loader) -> Panel | None:
    """Draw an object on the background on which the model named another class."""
    picture, background = load(items[answer.picture]), load(items[answer.background])
    if picture is None or picture.region is None or background is None:
        return None
    pasted = paste(picture.tensor, picture.region, background.as_background(TILE))
    title = f"{answer.picture} on the background of {answer.background}"
    return Panel(title, _pixels(picture, pasted), answer=answer.named)


def _with_frame(picture: PreparedPicture, box: Box) -> Pixels:
    """Draw a frame around a part of the picture. A small picture is enlarged first."""
    pixels, factor = _enlarged(picture)
    corners = [round(factor * side) for side in box]
    cv2.rectangle(pixels, (corners[0], corners[1]), (corners[2] - 1, corners[3] - 1), _LINE, 2)
    return pixels


def _classes_in_turn(items: Sequence[Item]) -> list[Item]:
    """Return the first picture of each class, then the second of each, and so on."""
    counts = Counter[str]()
    keyed = []
    for item in items:
        counts[item.label] += 1
        keyed.append((counts[item.label], item.label, item))
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]


def strips(result: CheckResult, most: int = OFFENDERS) -> list[Strip]:
    """Draw the worst offenders: the pictures whose answer changed most with the background, the worst classes first."""
    plan = result.plan
    items = {item.name: item for item in plan.data.items}
    load = Loader(plan)
    partners = partners_of(plan)
    rows = _offenders(result, most)
    drawn = [_strip(plan, row, items[row.name], partners[items[row.name]], load) for row in rows]
    return [strip for strip in drawn if strip is not None]


def _offenders(result: CheckResult, most: int) -> list[ImageRow]:
    """Return the worst offenders, a few of each class, the classes in the order of their worst one."""
    by_class: dict[str, list[ImageRow]] = defaultdict(list)
    for row in sorted((row for row in result.images if row.same), key=lambda row: (-_offence(row), row.name)):
        by_class[row.label].append(row)
    worst_first = sorted(result.classes, key=lambda name: -max((_offence(row) for row in by_class[name]), default=0))
    per_class = max(_MIN_PER_CLASS, most // len(result.classes))
    offenders: list[ImageRow] = []
    for name in worst_first:
        offenders += [row for row in by_class[name] if _offence(row) > 0][:per_class]
    return offenders[:most]


def _offence(row: ImageRow) -> float:
    """Return how much a picture speaks against the model: its gap, and whether it was right without the object."""
    gap = min((row.same[fill] - row.other[fill] for fill in row.same), default=0.0)
    right_without_object = bool(row.removed) and all(row.removed.values())
    return gap + _WITHOUT_OBJECT_WEIGHT * right_without_object


def _strip(plan: Plan, row: ImageRow, item: Item, partners: Partners, load: Loader) -> Strip | None:
    """Draw a picture, its heat and its edits, and ask the model about the edits; None if there are no edits."""
    edits = list_edits(plan, item, partners, 1, load)
    picture = load(item)
    if not edits or picture is None:
        return None
    labels = {item.name: item.label for candidates in (*partners.same, *partners.other) for item in candidates}
    shown = {
        title: tensor
        for name, make_edit in edits
        if (title := _title(name, labels)) and (tensor := make_edit()) is not None
    }
    answers = answer_batch(plan, torch.stack(list(shown.values())), [plan.matched.indices[item.label]] * len(shown))
    edited = [
        Panel(title, _pixels(picture, tensor), float(answer["share"]), plan.name_of(int(answer["answer"])))
        for (title, tensor), answer in zip(shown.items(), answers, strict=True)
    ]
    unedited = Panel("picture and region", _with_outline(picture), row.probability, row.answer)
    return Strip(row, (unedited, _heat_panel(plan, item, picture), *edited))


def _title(edit: str, labels: Mapping[str, str]) -> str:
    """Return the title of an edit in a strip; "" if it is not shown. ``labels`` are the classes of the backgrounds."""
    arm, fill, background = EditName.of(edit)
    if fill == BLUR:
        return ""
    if arm == REMOVED:
        return "middle removed" if fill == RING else "object removed"
    if arm in (SAME, OTHER):
        label = labels[background]
        return f"with the ring of a {label} picture" if fill == RING else f"on the background of a {label} picture"
    return ""


def _heat_panel(plan: Plan, item: Item, picture: PreparedPicture) -> Panel:
    check = plan.settings.check
    target = EachTarget((plan.matched.indices[item.label],))
    (explanation,) = explain_many(
        plan.model, [item.path], check.layer, method=check.method, target=target, on_error="yield"
    )
    if not isinstance(explanation, Explanation):
        return Panel("no heat", np.full((_SIDE, _SIDE, 3), 128, np.uint8))
    drawn = overlay.render(_pixels(picture, picture.tensor), explanation.heatmap, None)
    return Panel(f"heat for {item.label}" + ("" if explanation.status == "ok" else ": no evidence"), drawn)


def _pixels(picture: PreparedPicture, tensor: Float[Tensor, "c h w"]) -> Pixels:
    """Return a model's input as a picture."""
    levels = (picture.shades.pixels(tensor) * 255).round().to(torch.uint8)
    colours = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return colours.permute(1, 2, 0).numpy().copy()


def _with_outline(picture: PreparedPicture) -> Pixels:
    """Draw the region's outline onto the picture. A small picture is enlarged first."""
    pixels, _ = _enlarged(picture)
    if picture.region is None:
        return pixels
    region = cv2.resize(
        (picture.region > 0.5).numpy().astype(np.uint8), pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST
    )
    edges, _ = cv2.findContours(region, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(pixels, edges, -1, _LINE, 2)
    return pixels


def _enlarged(picture: PreparedPicture) -> tuple[Pixels, int]:
    """Return a picture as the model sees it, a small one enlarged, and the factor."""
    pixels = _pixels(picture, picture.tensor)
    factor = max(1, round(_SIDE / max(pixels.shape[:2])))
    return np.asarray(cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)), factor
