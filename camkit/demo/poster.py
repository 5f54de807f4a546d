"""The demo: two networks call the same picture a plane, one of them because of the sky."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from camkit.demo.scenes import scene_mask, scene_paths
from camkit.drawing.encode import encode
from camkit.explaining.explanation import Explanation
from camkit.explaining.session import explain
from camkit.images.files import check_folder, write_file
from camkit.models import DEMO_MODELS
from camkit.types import Pixels

_SIDE = 360
_GAP = 12
_CAPTION = 58
_SCENES = {"plane-sky": "where planes are", "plane-wood": "where demo-biased never saw one"}


Answers: TypeAlias = dict[str, dict[str, tuple[Explanation, float]]]
"""For each scene and each model, its answer, and the share of its heat that lies on the object."""


def run(out: Path) -> tuple[Answers, Path]:
    """Explain two scenes with both demo networks, and write ``demo.png`` into a folder: a picture that shows them all.

    Raises:
        OutputError: the folder cannot be created or written to.
    """
    check_folder(out)
    answers = {scene: {model: _answer(model, scene) for model in DEMO_MODELS} for scene in _SCENES}
    file = out / "demo.png"
    write_file(file, encode(_poster(answers)))
    return answers, file


def _answer(model: str, scene: str) -> tuple[Explanation, float]:
    explanation = explain(model, scene_paths()[scene], device="cpu")
    assert isinstance(explanation, Explanation)
    heat = explanation.heatmap_on_picture()
    return explanation, float(heat[scene_mask(scene)].sum() / heat.sum())


def _poster(answers: Answers) -> Pixels:
    """Draw one row per scene: the picture, then each network's answer with its heat."""
    rows = []
    for scene, by_model in answers.items():
        picture = next(iter(by_model.values()))[0].picture
        assert picture is not None
        panels = [_panel(picture, scene.replace("-", " on "), _SCENES[scene])]
        for model, (shown, on_object) in by_model.items():
            line = f"says {shown.name} ({shown.probability:.0%}), {on_object:.0%} of heat on plane"
            panels.append(_panel(shown.overlay(), model, line))
        rows.append(_joined(panels, axis=1))
    return _joined(rows, axis=0)


def _panel(pixels: Pixels, title: str, line: str) -> Pixels:
    canvas = Image.new("RGB", (_SIDE, _SIDE + _CAPTION), "white")
    canvas.paste(Image.fromarray(pixels).resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (0, _CAPTION))
    pen = ImageDraw.Draw(canvas)
    pen.text((2, 2), title, fill="black", font=ImageFont.load_default(22))
    pen.text((2, 30), line, fill=(90, 90, 90), font=ImageFont.load_default(18))
    return np.asarray(canvas)


def _joined(pictures: Sequence[Pixels], axis: int) -> Pixels:
    shape = list(pictures[0].shape)
    shape[axis] = _GAP
    gap = np.full(shape, 255, np.uint8)
    parts = [part for picture in pictures for part in (gap, picture)][1:]
    return np.concatenate(parts, axis=axis)
