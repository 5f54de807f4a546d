"""What a person is shown: pictures with their regions first, then the worst offenders, edit by edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from camkit.background.answers import answer_batch
from camkit.background.check import CheckResult
from camkit.background.experiment import Partners, Seen
from camkit.background.measures import ImageRow
from camkit.background.plan import Plan, load_seen
from camkit.background.sampling import stratified
from camkit.background.trial import edits_of, loader, partners_of
from camkit.background.values import Item
from camkit.drawing import overlay
from camkit.errors import CamkitError
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.targets import EachTarget
from camkit.types import Pixels

THUMBNAILS = 12
_SIDE = 224
_LINE = (255, 60, 160)


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture of a strip: what it is, and the probability the model gives the picture's class."""

    title: str
    pixels: Pixels
    probability: float | None = None
    answer: str | None = None


@dataclass(frozen=True, eq=False)
class Strip:
    """One picture and what the model says to its edits."""

    row: ImageRow
    panels: tuple[Panel, ...]
    sentence: str


def thumbnails(plan: Plan) -> list[Panel]:
    """Draw a few pictures of different classes with their regions, as the model sees them."""
    drawn = stratified(plan.data.items, THUMBNAILS, THUMBNAILS * len(plan.data.classes), plan.settings.check.seed)
    turns = Counter[str]()
    order = []
    for item in drawn:  # one of each class in turn, until there are enough
        turns[item.label] += 1
        order.append((turns[item.label], item.label, item))
    found: list[Panel] = []
    for _, _, item in sorted(order, key=lambda one: one[:2]):
        if len(found) == THUMBNAILS:
            break
        try:
            picture = load_seen(plan, item)
        except CamkitError:
            continue
        found.append(Panel(f"{item.label}: {item.name}", _annotated(picture)))
    return found


def strips(result: CheckResult, most: int = 12) -> list[Strip]:
    """Draw the worst offenders: those whose answer changed most with the background, of every class in turn."""
    plan = result.plan
    by_name = {item.name: item for item in plan.data.items}
    order = sorted((row for row in result.images if row.same), key=lambda row: (-_offence(row), row.name))
    chosen: list[ImageRow] = []
    for label in sorted(
        result.classes, key=lambda name: -max((_offence(row) for row in order if row.label == name), default=0)
    ):
        chosen += [row for row in order if row.label == label and _offence(row) > 0][
            : max(2, most // len(result.classes))
        ]
    items = [by_name[row.name] for row in chosen[:most]]
    load = loader(plan)
    partners = partners_of(plan)
    drawn = [_strip(plan, row, item, partners[item], load) for row, item in zip(chosen[:most], items, strict=True)]
    return [one for one in drawn if one is not None]


def _offence(row: ImageRow) -> float:
    """Return how much a picture speaks against the model: its gap, and whether it was right without the object."""
    gap = min((row.same[fill] - row.other[fill] for fill in row.same), default=0.0)
    return gap + 0.5 * all(row.removed.values()) * bool(row.removed)


def _strip(
    plan: Plan, row: ImageRow, item: Item, partners: Partners, load: Callable[[Item], Seen | None]
) -> Strip | None:
    edits = edits_of(plan, item, partners, 1, load)
    picture = load(item)
    if not edits or picture is None:
        return None
    labels = {one.name: one.label for one in (*partners.same, *partners.other)}
    made = {title: tensor for name, edit in edits if (title := _title(name, labels)) and (tensor := edit()) is not None}
    answers = answer_batch(plan, torch.stack(list(made.values())), [plan.matched.indices[item.label]] * len(made))
    panels = [Panel("picture and region", _annotated(picture), row.probability, row.answer), _heat(plan, item, picture)]
    for (title, tensor), answer in zip(made.items(), answers, strict=True):
        panels.append(
            Panel(title, _pixels(picture, tensor), float(answer["share"]), plan.name_of(int(answer["answer"])))
        )
    sentence = f"{item.name} is {item.label}; " + "; ".join(
        f"{panel.title}: {panel.answer} ({panel.probability:.0%} {item.label})" for panel in panels if panel.answer
    )
    return Strip(row, tuple(panels), sentence)


def _title(edit: str, labels: Mapping[str, str]) -> str:
    """Return what an edit is called in a strip; nothing where it is not shown. ``labels`` are the backgrounds'."""
    arm, fill, *rest = edit.split(".", 3)
    if arm == "removed" and fill != "blur":
        return "middle removed" if fill == "ring" else "object removed"
    if arm in ("same", "other") and fill != "blur":
        whose = labels[rest[1]]
        return f"in the ring of {whose}" if fill == "ring" else f"on a background of {whose}"
    return ""


def _heat(plan: Plan, item: Item, picture: Seen) -> Panel:
    check = plan.settings.check
    target = EachTarget((plan.matched.indices[item.label],))
    (found,) = explain_many(plan.model, [item.path], check.layer, method=check.method, target=target, on_error="yield")
    if not isinstance(found, Explanation):
        return Panel("no heat", np.full((_SIDE, _SIDE, 3), 128, np.uint8))
    drawn = overlay.render(_pixels(picture, picture.tensor), found.heatmap, None)
    return Panel(f"heat of {item.label}" + ("" if found.status == "ok" else ": none"), drawn)


def _pixels(picture: Seen, tensor: Float[Tensor, "c h w"]) -> Pixels:
    """Return a model's input as a picture."""
    levels = (picture.shades.pixels(tensor) * 255).round().to(torch.uint8)
    colours = levels[:3] if len(levels) >= 3 else levels[:1].expand(3, -1, -1)
    return colours.permute(1, 2, 0).numpy().copy()


def _annotated(picture: Seen) -> Pixels:
    """Draw the region's outline onto the picture, enlarged first where it is small."""
    pixels = _pixels(picture, picture.tensor)
    factor = max(1, round(_SIDE / max(pixels.shape[:2])))
    pixels = cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    if picture.region is None:
        return np.asarray(pixels)
    region = cv2.resize(
        (picture.region > 0.5).numpy().astype(np.uint8), pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST
    )
    edges, _ = cv2.findContours(region, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(pixels, edges, -1, _LINE, 2)
    return np.asarray(pixels)
