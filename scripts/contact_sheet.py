"""Write assets/figures.jpg, 20 pictures as the command writes them, and assets/figures.md, the commands and credits.

    CAMKIT_TEST_DATA=../shared/data .venv/bin/python scripts/contact_sheet.py

Every picture comes from a run of the ``camkit`` command on a photo that is free to use.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from gallery_models import data_folder
from PIL import Image

from camkit.cli import main
from camkit.demo.scenes import scene_paths
from camkit.drawing.figure import sheet
from camkit.models import load_model

ROOT = Path(__file__).parents[1]
TILE = 480
"""The width of each picture on the sheet, in pixels."""
COLUMNS = 5
MOBILENET = ("--model", "mobilenet_v2", "--weights", "weights/mobilenet_v2-coral_qat.pth")
SQUEEZENET = ("--model", "squeezenet1_1", "--weights", "weights/squeezenet1_1-winml_fp16.pth")
EMPTY = "water buffalo"
"""A class for which nothing in the photo of the cat speaks."""
MODELS = ROOT / "scripts" / "gallery_models.py"


@dataclass(frozen=True)
class Run:
    """One run of the command: the photo, the options, and which of its pictures go on the sheet."""

    photo: str
    options: tuple[str, ...] = MOBILENET
    pictures: int = 1


def runs() -> list[Run]:
    """Return the runs, 20 pictures in all."""
    labels = ("--labels", "labels.txt")
    detector, segmenter, trimming = (
        ("--model", f"{MODELS}:{name}", *labels) for name in ("detector", "segmenter", "trimming")
    )
    return [
        Run("open_photos/cat.png", (*MOBILENET, "--target", "Egyptian cat", "--target", "traffic light"), 2),
        Run("open_photos/hot_dog.jpg", (*MOBILENET, "--top-k", "2"), 2),
        Run("open_photos/cat.png", (*MOBILENET, "--target", EMPTY)),
        Run("open_photos/coffee.png", (*MOBILENET, "--method", "layercam", "--layer", "features.13")),
        Run("open_photos/dragonfly.png", (*MOBILENET, "--method", "hirescam", "--colormap", "inferno")),
        Run("open_photos/bird.png", (*SQUEEZENET, "--layer", "features.7", "--layer", "features.12")),
        Run("coco/000000062554.jpg", (*MOBILENET, "--target", "broccoli", "--versus", "cauliflower")),
        Run("coco/000000519208.jpg"),
        Run("coco/000000516008.jpg", (*detector, "--target", "mouse")),
        Run("coco/000000525891.jpg", (*segmenter, "--target", "street sign")),
        Run("open_photos/chelsea.png", (*segmenter, "--target", "submarine")),
        Run("wide.png"),
        Run("plane.jpg", ("--model", "demo-biased", "--labels", "labels-ja.txt")),
        Run("open_photos/parrot.jpg"),
        Run("open_photos/parrot.jpg", (*detector, "--target", "macaw")),
        Run("tall.png"),
        Run("tiny.png"),
        Run("bordered.png", trimming),
    ]


def write_inputs(folder: Path) -> None:
    """Write what the runs need beside the photos: pictures of odd sizes, and lists of labels."""
    for name in ("open_photos", "coco", "weights"):
        (folder / name).symlink_to(data_folder() / name)
    labels = load_model("mobilenet_v2", pretrained=False).labels
    assert labels is not None
    (folder / "labels.txt").write_text("\n".join(labels))
    names = {"plane": "飛行機", "car": "自動車", "ship": "船", "bird": "鳥"}
    known = load_model("demo-biased").labels or ()
    (folder / "labels-ja.txt").write_text("\n".join(names.get(label, label) for label in known), "utf-8")
    (folder / "plane.jpg").write_bytes(scene_paths()["plane-sky"].read_bytes())
    cat = Image.open(data_folder() / "open_photos/chelsea.png").convert("RGB")
    cat.resize((32, 32), Image.Resampling.LANCZOS).save(folder / "tiny.png")
    laptop = Image.open(data_folder() / "coco/000000553664.jpg").convert("RGB")
    laptop.resize((1920, 1242)).crop((0, 500, 1920, 740)).save(folder / "wide.png")
    parrot = Image.open(data_folder() / "open_photos/parrot.jpg").convert("RGB")
    parrot.crop((int(parrot.width * 0.45), 0, int(parrot.width * 0.6), parrot.height)).save(folder / "tall.png")
    bordered = Image.new("RGB", (cat.width + 200, cat.height + 100))
    bordered.paste(cat, (150, 30))
    bordered.save(folder / "bordered.png")


def credit(photo: str) -> str:
    """Return the source and the licence of a photo."""
    name = Path(photo).name
    if photo.startswith("coco/"):
        known = json.loads((data_folder() / "coco/instances.json").read_text())
        licences = {row["id"]: row["url"] for row in known["licenses"]}
        row = next(row for row in known["images"] if row["file_name"] == name)
        return f"COCO 2017, {row['flickr_url']}, {licences[row['license']]}"
    rows = json.loads((data_folder() / "open_photos/LICENCES.json").read_text())
    return next((f"{row['licence']}, {row['repo']}" for row in rows if row["file"] == name), "drawn by camkit")


SOURCES = {
    "bordered.png": "open_photos/chelsea.png",
    "tiny.png": "open_photos/chelsea.png",
    "wide.png": "coco/000000553664.jpg",
    "tall.png": "open_photos/parrot.jpg",
}
"""The photos from which pictures of odd sizes are made."""


def write() -> None:
    """Run the command for each row, and write the sheet and its list."""
    tiles: list[np.ndarray] = []
    lines = ["# The pictures on the contact sheet", ""]
    lines += [
        "Left to right, top to bottom; [scripts/contact_sheet.py](../scripts/contact_sheet.py) writes the sheet.",
        "",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for number, run in enumerate(runs()):
            out = folder / f"out-{number}"
            options = [f"{folder / option}" if (folder / option).is_file() else option for option in run.options]
            code = main([str(folder / run.photo), *options, "--out", str(out)])
            files = sorted(out.glob("*.png"))
            assert code == 0, run
            assert len(files) == run.pictures, run
            command = shlex.join(option.replace(f"{ROOT}/", "") for option in run.options)
            for file in files:
                tiles.append(_narrowed(np.asarray(Image.open(file).convert("RGB"))))
                photo = SOURCES.get(run.photo, run.photo)
                lines.append(f"{len(tiles)}. `camkit {Path(run.photo).name} {command}` ({credit(photo)})")
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
