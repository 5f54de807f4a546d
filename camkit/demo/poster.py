"""The demo: two networks call the same picture a plane, one of them because of the sky."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from camkit.demo.scenes import scene_mask, scene_paths
from camkit.drawing.encode import encode
from camkit.drawing.figure import Tile, contact_sheet
from camkit.drawing.text import GREY
from camkit.explaining.explainer import explain
from camkit.explaining.explanation import Explanation
from camkit.images.files import check_folder, write_file
from camkit.models import DEMO_MODELS
from camkit.types import Pixels

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
    tiles = []
    for scene, by_model in answers.items():
        picture = next(iter(by_model.values()))[0].picture
        assert picture is not None
        tiles.append(Tile(picture, scene.replace("-", " on "), _SCENES[scene], GREY))
        for model, (shown, on_object) in by_model.items():
            line = f"says {shown.name} ({shown.probability:.0%}), {on_object:.0%} of heat on plane"
            tiles.append(Tile(shown.overlay(), model, line, GREY))
    return contact_sheet(tiles, 1 + len(DEMO_MODELS), side=360, size=17)
