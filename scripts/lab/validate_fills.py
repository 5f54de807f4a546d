"""Measure what is lost when objects are pasted on photos: by the fill, by the seam, and by the missing context.

    pip install scikit-image
    python -m scripts.lab.validate_fills --data ../shared/data --markdown scripts/results/validation.md

Each picture of Caltech-101 whose class ImageNet has is shown to a network with its ImageNet weights, unedited and
edited in many ways. All edits use the same pictures, the same partners and the same outlines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from skimage.restoration import inpaint_biharmonic
from torch import Tensor

from camkit.background.edits import fill_with_texture
from camkit.background.experiment import LITTLE_MORE, MOST_CANDIDATES
from camkit.images.filling import dilated, fill_smoothly
from camkit.images.imputation import fill_linearly
from scripts.lab.lab_photos import cover_of, read_photo
from scripts.lab.lab_photos import outlines as outlines_of
from scripts.lab.lab_run import write_between
from scripts.lab.real_models import NETWORKS

MARK = "validate_fills"
"""The name of the marks between which a page has the table."""

SIDE = 224
PER_CLASS = 25
WIDENED = 0.035
"""By how much holes are widened, as a share of the side: as much as in the check."""

BATCH = 32
Pixels = NDArray[np.float32]
Hole = NDArray[np.bool_]
Fill = Callable[[Pixels, Hole], Pixels]


@dataclass(frozen=True)
class Photo:
    """A photo as the network sees it: pixels (224, 224, 3) from 0 to 255, how much of each is the animal, its class."""

    pixels: Pixels
    cover: Pixels
    label: str

    @property
    def outline(self) -> Hole:
        """The widened outline."""
        return _widened(self.cover > 0)

    @property
    def box(self) -> Hole:
        """The widened box."""
        rows, columns = np.flatnonzero((self.cover > 0).any(1)), np.flatnonzero((self.cover > 0).any(0))
        box = np.zeros(self.cover.shape, bool)
        box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
        return _widened(box)


Seam = Callable[[Photo, Pixels], Pixels]


def _widened(region: Hole) -> Hole:
    return np.asarray(dilated(torch.from_numpy(region), max(1, round(WIDENED * SIDE))).numpy())


def _of_tensors(fill: Callable[[Tensor, Tensor], Tensor | None]) -> Fill:
    def filled(pixels: Pixels, hole: Hole) -> Pixels:
        picture, where = torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), torch.from_numpy(hole)
        result = fill(picture, where)
        result = fill_smoothly(picture, where) if result is None else result
        return np.asarray(result.permute(1, 2, 0).contiguous().numpy())

    return filled


def _of_opencv(method: int) -> Fill:
    def filled(pixels: Pixels, hole: Hole) -> Pixels:
        return np.asarray(cv2.inpaint(pixels.round().astype(np.uint8), hole.astype(np.uint8), 5, method), np.float32)

    return filled


def _biharmonic(pixels: Pixels, hole: Hole) -> Pixels:
    """Fill at half size: the time grows with the square of the hole. A picture that is all hole is filled smoothly."""
    if hole[::2, ::2].all():
        return FILLS[SMOOTHLY](pixels, hole)
    half, small_hole = cv2.resize(pixels, (SIDE // 2, SIDE // 2), interpolation=cv2.INTER_AREA), hole[::2, ::2]
    filled = np.clip(inpaint_biharmonic(half / 255, small_hole, channel_axis=-1), 0, 1).astype(np.float32) * 255
    enlarged = cv2.resize(filled, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return np.where(hole[..., None], enlarged, pixels).astype(np.float32)


SMOOTHLY, TEXTURE = "smoothly (camkit's blur)", "with texture (camkit's tile)"
FILLS: Mapping[str, Fill] = {
    SMOOTHLY: _of_tensors(fill_smoothly),
    TEXTURE: _of_tensors(fill_with_texture),
    "linearly (ROAD)": _of_tensors(fill_linearly),
    "Telea (OpenCV)": _of_opencv(cv2.INPAINT_TELEA),
    "Navier-Stokes (OpenCV)": _of_opencv(cv2.INPAINT_NS),
    "biharmonic (scikit-image)": _biharmonic,
}


def load_photos(data: Path) -> list[Photo]:
    """Return up to PER_CLASS photos of each class that ImageNet has, scaled and cropped for the network."""
    indices = json.loads((data / "caltech" / "to_imagenet.json").read_text())
    photos = []
    for label in (name for name, of_class in indices.items() if of_class):
        files = sorted(photo for photo in outlines_of(data) if photo.startswith(f"{label}/"))
        for photo in files[:PER_CLASS]:
            pixels = read_photo(data / "caltech" / photo).astype(np.float32)
            cover = cover_of(data, photo, pixels.shape[:2])
            square = _central_square(np.dstack([pixels, cover]))
            if (square[..., 3] > 0).any():
                photos.append(Photo(square[..., :3].copy(), square[..., 3].copy(), label))
    return photos


def load_places(data: Path, count: int) -> list[Pixels]:
    """Return photos of places, for pictures without any fill."""
    files = sorted((data / "scenes").glob("*/*.jpg"))
    chosen = np.random.default_rng(1).choice(len(files), count, replace=False)
    return [_central_square(read_photo(files[number]).astype(np.float32)) for number in chosen]


def _central_square(pixels: Pixels) -> Pixels:
    """Return the central square of a picture whose shorter side would be 256 pixels."""
    scale = 256 / min(pixels.shape[:2])
    size = (round(pixels.shape[1] * scale), round(pixels.shape[0] * scale))
    resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    top, left = ((length - SIDE) // 2 for length in resized.shape[:2])
    return np.asarray(np.clip(resized[top : top + SIDE, left : left + SIDE], 0, 255), np.float32)


def pasted(photo: Photo, background: Pixels) -> Pixels:
    """Put the animal on a background, at the same place and size, as the check does."""
    cover = photo.cover[..., None]
    return np.asarray(photo.pixels * cover + background * (1 - cover), np.float32)


def feathered(photo: Photo, background: Pixels) -> Pixels:
    """Put the animal on a background with an edge that is softened inwards over about four pixels."""
    soft = np.clip(2 * cv2.GaussianBlur(photo.cover, (0, 0), 2) - 1, 0, 1)[..., None]
    return np.asarray(photo.pixels * soft + background * (1 - soft), np.float32)


def poisson(photo: Photo, background: Pixels) -> Pixels:
    """Put the animal on a background by its gradients (Perez et al. 2003), which leaves no seam but changes colours."""
    mask = (255 * (photo.cover > 0.5)).astype(np.uint8)
    mask[[0, -1]] = mask[:, [0, -1]] = 0  # OpenCV cannot paste at the frame
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    centre = (int(columns[0] + columns[-1]) // 2, int(rows[0] + rows[-1]) // 2)
    animal, place = (pixels.round().astype(np.uint8) for pixels in (photo.pixels, background))
    return np.asarray(cv2.seamlessClone(animal, place, mask, centre, cv2.NORMAL_CLONE), np.float32)


SEAMS: Mapping[str, Seam] = {"edge softened": feathered, "pasted by gradients (Poisson)": poisson}
HOLES: Mapping[str, Callable[[Photo], Hole]] = {"box": lambda photo: photo.box, "outline": lambda photo: photo.outline}


@dataclass(frozen=True)
class Answers:
    """Which answers of a network are right, with one edit.

    Attributes:
        edit: what was done to the pictures.
        alone: for each picture if it needs no partner: unedited, without any background, or with its own, filled.
        own: for each picture on the background of another picture of its class.
        other: for each picture on the background of a picture of another class.
        milliseconds: of a core that filling a picture takes.
    """

    edit: str
    alone: NDArray[np.bool_] | None = None
    own: NDArray[np.bool_] | None = None
    other: NDArray[np.bool_] | None = None
    milliseconds: float | None = None


def partners_of(photos: Sequence[Photo]) -> list[tuple[list[int], list[int]]]:
    """Return, for each photo, the photos of its own class and of other classes whose backgrounds serve it."""
    partners = []
    for number, photo in enumerate(photos):
        random = np.random.default_rng([2, number])
        order = [int(other) for other in random.permutation(len(photos)) if other != number]
        own = [other for other in order if photos[other].label == photo.label][:MOST_CANDIDATES]
        others = [other for other in order if photos[other].label != photo.label][:MOST_CANDIDATES]
        partners.append((own, others))
    return partners


def experiment(
    photos: Sequence[Photo], places: Sequence[Pixels], right: Callable[[Sequence[Pixels]], NDArray[np.bool_]]
) -> list[Answers]:
    """Show each edit of the photos to a network; ``right(pictures)`` says for which of them its answer is right."""
    partners = partners_of(photos)
    first = [(own[0], other[0]) for own, other in partners]
    outlines = [photo.outline for photo in photos]

    def with_most_room(photo: Photo, numbers: Sequence[int]) -> int:
        """Return the background that the check would choose."""
        in_sight = [float((outlines[number] * (1 - photo.cover)).mean()) for number in numbers]
        return next(n for n, filled in zip(numbers, in_sight, strict=True) if filled <= min(in_sight) + LITTLE_MORE)

    roomy = [
        (with_most_room(photo, own), with_most_room(photo, other))
        for photo, (own, other) in zip(photos, partners, strict=True)
    ]

    def on_partners(
        backgrounds: Sequence[Pixels], numbers: Sequence[tuple[int, int]], seam: Seam
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        own = [backgrounds[number] for number, _ in numbers]
        other = [backgrounds[number] for _, number in numbers]
        return right(list(map(seam, photos, own))), right(list(map(seam, photos, other)))

    grey = np.full((SIDE, SIDE, 3), 128, np.float32)
    results = [
        Answers("none", right([photo.pixels for photo in photos])),
        Answers("on grey", right([pasted(photo, grey) for photo in photos])),
        Answers("on photos of other places, nothing filled", right(list(map(pasted, photos, places)))),
    ]
    for (shape, hole), (name, fill) in itertools.product(HOLES.items(), FILLS.items()):
        start = time.process_time()
        backgrounds = [fill(photo.pixels, hole(photo)) for photo in photos]
        spent = (time.process_time() - start) / len(photos) * 1000
        alone = right(list(map(pasted, photos, backgrounds)))
        results.append(Answers(f"{shape} filled {name}", alone, *on_partners(backgrounds, first, pasted), spent))
    backgrounds = [FILLS[SMOOTHLY](photo.pixels, photo.outline) for photo in photos]
    name = f"outline filled {SMOOTHLY}"
    for seam_name, seam in SEAMS.items():
        alone = right(list(map(seam, photos, backgrounds)))
        results.append(Answers(f"{name}, {seam_name}", alone, *on_partners(backgrounds, first, seam)))
    for name in (SMOOTHLY, TEXTURE):
        backgrounds = [FILLS[name](photo.pixels, photo.outline) for photo in photos]
        edit = f"outline filled {name}, of {MOST_CANDIDATES} backgrounds one with little fill in sight"
        results.append(Answers(edit, None, *on_partners(backgrounds, roomy, pasted)))
    return results


def table(results: Sequence[Answers]) -> str:
    """Return the table. Each accuracy but the first has its difference from the first, with the standard error."""
    original = results[0].alone
    assert original is not None
    lines = [
        "| edit | on its own background, or none | on own class's | on other classes' | ms of a core |",
        "|---|---:|---:|---:|---:|",
    ]
    for answers in results:
        cells = []
        for right in (answers.alone, answers.own, answers.other):
            difference = None if right is None or right is original else right.astype(float) - original
            error = (
                ""
                if difference is None
                else f" ({difference.mean():+.3f} \u00b1 {difference.std() / len(original) ** 0.5:.3f})"
            )
            cells.append("" if right is None else f"{right.mean():.3f}{error}")
        spent = "" if answers.milliseconds is None else f"{answers.milliseconds:.0f}"
        lines.append(f"| {answers.edit} | {' | '.join(cells)} | {spent} |")
    return "\n".join(lines)


def main() -> None:
    """Run the experiment for one network, then write its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--network", choices=NETWORKS, default="EfficientNet-Lite0")
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    network, preprocess = NETWORKS[options.network](options.data)
    normalise = preprocess.transforms[-1]
    indices = json.loads((options.data / "caltech" / "to_imagenet.json").read_text())
    photos = load_photos(options.data)

    @torch.inference_mode()
    def right(pictures: Sequence[Pixels]) -> NDArray[np.bool_]:
        batches = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).split(BATCH)
        named = torch.cat([network(normalise(batch / 255)).argmax(1) for batch in batches]).tolist()
        return np.array([index in indices[photo.label] for index, photo in zip(named, photos, strict=True)])

    places = load_places(options.data, len(photos))
    text = f"{options.network}, {len(photos)} photos of {len({photo.label for photo in photos})} classes.\n\n"
    text += table(experiment(photos, places, right))
    print(text)
    if options.markdown is not None:
        write_between(options.markdown, MARK, text)


if __name__ == "__main__":
    main()
