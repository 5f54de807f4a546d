"""Results as events: an explanation, a diagnosis, a check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camkit.diagnosis import Diagnosis
from camkit.diagnosis.report import picture as diagnosis_picture
from camkit.explanation import Explanation
from camkit.tensorboard.events import add_histogram, add_picture, grid, opened, told
from camkit.types import Style

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit.background.check import CheckResult
    from camkit.background.measures import Measures


def write_explanation(
    found: Explanation,
    writer: SummaryWriter | str | Path,
    step: int = 0,
    *,
    tag: str | None = None,
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
) -> None:
    """Write an explanation's picture.

    Args:
        found: the explanation; one whose map has not two axes has no picture, and nothing is written.
        writer: a SummaryWriter, or a folder, in which each call then makes a file of its own.
        step: under which it is kept.
        tag: under which it is shown; ``explain/SOURCE/TARGET`` if None.
        style, colormap, alpha: as for ``Explanation.overlay``.

    Raises:
        InputError: TensorBoard is not installed, or an unknown style or colormap, or alpha out of range.
        OutputError: the folder cannot be written.
    """
    if found.heatmap.ndim != 2:
        return
    with _filled(writer) as events:
        drawn = found.overlay(style=style, colormap=colormap, alpha=alpha)
        add_picture(events, tag or f"explain/{found.source}/{found.name}", drawn, step)


def write_diagnosis(found: Diagnosis, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a diagnosis: histograms and scalars of each layer, the picture, and the findings as text.

    The tags of layers are those of ``TrainingWatch``; the arguments and errors those of ``write_explanation``.
    """
    with _filled(writer) as events:
        for row in found.rows:
            add_histogram(events, f"activations/{row.name}", row.activations, step)
            if row.gradients is not None:
                add_histogram(events, f"gradients/{row.name}", row.gradients, step)
            if row.parameter_gradient is not None:
                _add_scalar(events, f"gradient_norm/{row.name}", row.parameter_gradient, step)
            if row.dead is not None and row.channels:
                _add_scalar(events, f"dead_share/{row.name}", len(row.dead) / row.channels, step)
        add_picture(events, "diagnosis", diagnosis_picture.draw(found), step)
        said = [*(one.text for one in found.findings), *found.remarks]
        events.add_text("findings", "\n".join(f"- {one}" for one in said) or "Nothing wrong was found.", step)


def write_check(result: CheckResult, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a check: its summary as text, the measures of each class as scalars, the worst pictures with their edits.

    Of an effect with several fills the scalar is that of the weakest, which decides. The arguments and errors are those
    of ``write_explanation``.
    """
    from camkit.background.report import markdown  # noqa: PLC0415
    from camkit.background.showcase import strips  # noqa: PLC0415 - a training that is watched needs nothing of the check

    with _filled(writer) as events:
        events.add_text("check", markdown.render(result), step)
        for name, one in [("all classes", result.overall), *result.classes.items()]:
            for what, value in _figures(one).items():
                _add_scalar(events, f"check/{what}/{name}", value, step)
        for strip in strips(result):
            drawn = grid([panel.pixels for panel in strip.panels], columns=len(strip.panels))
            add_picture(events, f"worst/{strip.row.name}", drawn, step)
            events.add_text(f"worst/{strip.row.name}", strip.sentence, step)


@contextmanager
def _filled(writer: SummaryWriter | str | Path) -> Iterator[SummaryWriter]:
    with opened(writer) as events, told(events):
        yield events


def _figures(one: Measures) -> dict[str, float]:
    from camkit.background.measures import weakest  # noqa: PLC0415

    tested = {"gap": one.gap, "attraction": one.attraction, "sufficiency": one.sufficiency}
    found = {what: least.effect.value for what, by_fill in tested.items() if (least := weakest(by_fill)) is not None}
    skill = {} if one.skill is None else {"skill": one.skill.value}
    return {"accuracy": one.accuracy.value, **found, **skill}


def _add_scalar(events: Any, tag: str, value: float, step: int) -> None:
    if math.isfinite(value):
        events.add_scalar(tag, value, step)
