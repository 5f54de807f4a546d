"""The pictures that mend a model: the originals, and their objects pasted on the backgrounds of all classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
from jaxtyping import Float
from torch import Tensor

from camkit.background.data import Item
from camkit.background.experiment import Experiment
from camkit.background.plan import Plan
from camkit.background.showcase import in_levels
from camkit.errors import as_cell, text_of
from camkit.images.files import csv_line, write_file
from camkit.images.regions import Shades

ORIGINAL = "original"
"""Stands in place of a fill's name for a picture that is not edited."""

_MOST_BACKGROUNDS = 6
"""The most backgrounds of other classes on which an object is pasted, and the most of its own class."""


@dataclass(frozen=True, eq=False)
class Composite:
    """A picture for mending.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: what the preprocessing makes of black and white.
        item: the object's picture.
        background: the class of the picture behind the object.
        fill: how the background's own object was filled in; ORIGINAL for an unedited picture.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    item: Item
    background: str
    fill: str


def composites(plan: Plan, progress: Callable[[int, int], None]) -> Iterator[Composite]:
    """Yield each picture of a plan's sample, and its object on backgrounds of its own class and of other classes."""
    others = max(1, len(plan.data.classes) - 1)
    wanted = min(_MOST_BACKGROUNDS, max(others, plan.settings.check.pastes))
    check = replace(plan.settings.check, pastes=wanted)
    experiment = Experiment(replace(plan, settings=plan.settings.model_copy(update={"check": check})))
    labels = {item.name: item.label for item in plan.data.items}
    for number, item in enumerate(plan.sample):
        progress(number, len(plan.sample))
        picture = experiment.load(item)
        if picture is None:
            continue
        yield Composite(picture.tensor, picture.shades, item, item.label, ORIGINAL)
        for edit, make in experiment.edits(item, wanted).items():
            if edit.arm in ("same", "other"):
                yield Composite(make(), picture.shades, item, labels[edit.lender], edit.fill)


def export(plan: Plan, folder: Path, progress: Callable[[int, int], None]) -> int:
    """Write the composites of a plan as PNG files, with a table of their classes; return how many there are.

    ``labels.csv`` has the columns path, label, group, background and fill.

    Raises:
        OutputError: a file cannot be written.
    """
    lines = [csv_line(("path", "label", "group", "background", "fill"))]
    for number, made in enumerate(composites(plan, progress), start=1):
        path = Path(made.item.label) / f"{number:06d}.png"
        pixels = in_levels(made.shades, made.tensor)
        # Without the mark of a drawing, by which camkit would leave these pictures out of a folder.
        write_file(folder / path, cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())
        cells = path, made.item.label, made.item.group, made.background, made.fill
        lines.append(csv_line(as_cell(text_of(cell)) for cell in cells))
    write_file(folder / "labels.csv", lines)
    return len(lines) - 1
