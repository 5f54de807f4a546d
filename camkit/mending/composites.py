"""The pictures that mend a model: the originals, and their objects pasted on the backgrounds of all classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
from jaxtyping import Float
from torch import Tensor

from camkit.background.experiment import Experiment
from camkit.background.plan import Plan
from camkit.background.showcase import in_levels
from camkit.images.files import write_file

ORIGINAL = "original"
"""Stands in place of a fill's name for a picture that is not edited."""

_MOST_BACKGROUNDS = 6
"""The most backgrounds of other classes on which an object is pasted, and the most of its own class."""


@dataclass(frozen=True, eq=False)
class Composite:
    """A picture for mending.

    Attributes:
        tensor: the model's input (C, H, W).
        name: the name of the picture that has the object.
        label: the object's class.
        group: the object's group.
        background: the class of the picture behind the object.
        fill: how the background's own object was filled in; ORIGINAL for an unedited picture.
        lender: the name of the picture behind the object.
    """

    tensor: Float[Tensor, "c h w"]
    name: str
    label: str
    group: str
    background: str
    fill: str
    lender: str


def composites(plan: Plan, progress: Callable[[int, int], None]) -> Iterator[Composite]:
    """Yield each picture of a plan's sample, and its object on backgrounds of its own class and of other classes."""
    others = max(1, len(plan.data.classes) - 1)
    wanted = min(_MOST_BACKGROUNDS, max(others, plan.settings.check.pastes))
    check = plan.settings.check.model_copy(update={"pastes": wanted})
    experiment = Experiment(replace(plan, settings=plan.settings.model_copy(update={"check": check})))
    labels = {item.name: item.label for item in plan.data.items}
    for number, item in enumerate(plan.sample):
        progress(number, len(plan.sample))
        picture = experiment.load(item)
        if picture is None:
            continue
        own = (item.name, item.label, item.group)
        yield Composite(picture.tensor, *own, item.label, ORIGINAL, item.name)
        for edit, make in experiment.edits(item, wanted).items():
            if edit.arm in ("same", "other"):
                yield Composite(make(), *own, labels[edit.lender], edit.fill, edit.lender)


def export(plan: Plan, folder: Path, progress: Callable[[int, int], None]) -> int:
    """Write the composites of a plan as PNG files, with a table of their classes; return how many there are.

    ``labels.csv`` has the columns path, label, group, background and fill.

    Raises:
        OutputError: a file cannot be written.
    """
    lines = ["path,label,group,background,fill"]
    shades = Experiment(plan)
    for number, composite in enumerate(composites(plan, progress), start=1):
        item = next(item for item in plan.sample if item.name == composite.name)
        picture = shades.load(item)
        assert picture is not None
        path = Path(composite.label) / f"{number:06d}.png"
        pixels = in_levels(picture, composite.tensor)
        write_file(folder / path, cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())
        lines.append(f"{path},{composite.label},{composite.group},{composite.background},{composite.fill}")
    write_file(folder / "labels.csv", "\n".join(lines).encode())
    return len(lines) - 1
