"""Write assets/figures.jpg, 20 pictures as the command writes them, and assets/figures.md, the commands.

    .venv/bin/python -m scripts.docs.contact_sheet

Every picture comes from a run of the ``camkit`` command on drawn scenes, with networks that ship with camkit.
"""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from camkit.cli import main
from camkit.demo.scenes import scene_paths
from camkit.drawing.figure import sheet
from camkit.models.scene_net import LABELS

ROOT = Path(__file__).parents[2]
TILE = 480
"""The width of each picture on the sheet, in pixels."""
COLUMNS = 5
MODELS = ROOT / "scripts" / "docs" / "gallery_models.py"
FAIR, BIASED = ("--model", "demo-fair"), ("--model", "demo-biased")


@dataclass(frozen=True)
class Run:
    """One run of the command: the picture, the options, and how many drawings go on the sheet."""

    picture: str
    options: tuple[str, ...] = FAIR
    drawings: int = 1


def runs() -> list[Run]:
    """Return the runs, 20 drawings in all."""
    labels = ("--labels", "labels.txt")
    detector, segmenter, trimming = (
        ("--model", f"{MODELS}:{name}", *labels) for name in ("detector", "segmenter", "trimming")
    )
    return [
        Run("plane-wood.jpg", (*FAIR, "--target", "plane", "--target", "bird"), 2),
        Run("plane-wood.jpg", (*BIASED, "--top-k", "2"), 2),
        Run("plane-sky.jpg", (*BIASED, "--target", "car")),
        Run("ship-sea.jpg", (*FAIR, "--method", "layercam", "--layer", "features.2")),
        Run("car-road.jpg", (*FAIR, "--method", "hirescam", "--colormap", "inferno")),
        Run("bird-wood.jpg", (*FAIR, "--layer", "features.2", "--layer", "features.4")),
        Run("car-sea.jpg", (*BIASED, "--target", "ship", "--versus", "car")),
        Run("car-sea.jpg"),
        Run("four.jpg", (*detector, "--target", "car")),
        Run("four.jpg", (*segmenter, "--target", "ship")),
        Run("four.jpg", (*segmenter, "--target", "bird")),
        Run("wide.jpg"),
        Run("plane-sky.jpg", (*BIASED, "--labels", "labels-ja.txt")),
        Run("tall.jpg"),
        Run("four.jpg", (*detector, "--target", "ship")),
        Run("large.jpg"),
        Run("tiny.png"),
        Run("bordered.png", trimming),
    ]


def write_inputs(folder: Path) -> None:
    """Write the pictures of the runs, and lists of labels."""
    scenes = {name: Image.open(path).convert("RGB") for name, path in scene_paths().items()}
    for name, scene in scenes.items():
        scene.save(folder / f"{name}.jpg", quality=95)
    names = {"plane": "飛行機", "car": "自動車", "ship": "船", "bird": "鳥"}
    (folder / "labels.txt").write_text("\n".join(LABELS))
    (folder / "labels-ja.txt").write_text("\n".join(names[label] for label in LABELS), "utf-8")
    side = scenes["car-road"].width
    four = Image.new("RGB", (2 * side, 2 * side))
    for place, name in enumerate(("car-road", "ship-sea", "bird-wood", "plane-sky")):
        four.paste(scenes[name], (place % 2 * side, place // 2 * side))
    four.save(folder / "four.jpg", quality=95)
    wide = Image.new("RGB", (4 * side, side // 2))
    for place, name in enumerate(("plane-sky", "bird-wood", "ship-sea", "car-road")):
        wide.paste(scenes[name].crop((0, side // 4, side, side // 4 * 3)), (place * side, 0))
    wide.save(folder / "wide.jpg", quality=95)
    wide.rotate(90, expand=True).save(folder / "tall.jpg", quality=95)
    scenes["bird-wood"].resize((2400, 2400), Image.Resampling.LANCZOS).save(folder / "large.jpg", quality=95)
    scenes["car-road"].resize((32, 32), Image.Resampling.LANCZOS).save(folder / "tiny.png")
    bordered = Image.new("RGB", (side + 200, side + 100))
    bordered.paste(scenes["bird-wood"], (150, 30))
    bordered.save(folder / "bordered.png")


def write() -> None:
    """Run the command for each row, and write the sheet and its list."""
    tiles: list[np.ndarray] = []
    lines = ["# The pictures on the contact sheet", ""]
    lines += [
        "Left to right, top to bottom; [contact_sheet.py](../scripts/docs/contact_sheet.py) writes the sheet.",
        "",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for number, run in enumerate(runs()):
            out = folder / f"out-{number}"
            options = [f"{folder / option}" if (folder / option).is_file() else option for option in run.options]
            code = main([str(folder / run.picture), *options, "--out", str(out)])
            files = sorted(out.glob("*.png"))
            assert code == 0, run
            assert len(files) == run.drawings, run
            command = shlex.join(option.replace(f"{ROOT}/", "") for option in run.options)
            for file in files:
                tiles.append(_narrowed(np.asarray(Image.open(file).convert("RGB"))))
                lines.append(f"{len(tiles)}. `camkit {run.picture} {command}`")
    assert len(tiles) == 20, len(tiles)
    (ROOT / "assets").mkdir(exist_ok=True)
    Image.fromarray(sheet(tiles, COLUMNS)).save(ROOT / "assets/figures.jpg", quality=85)
    (ROOT / "assets/figures.md").write_text("\n".join(lines) + "\n", "utf-8")


def _narrowed(pixels: np.ndarray) -> np.ndarray:
    """Return a figure at the width of a tile."""
    height = round(pixels.shape[0] * TILE / pixels.shape[1])
    return np.asarray(cv2.resize(pixels, (TILE, height), interpolation=cv2.INTER_AREA))


if __name__ == "__main__":
    write()
