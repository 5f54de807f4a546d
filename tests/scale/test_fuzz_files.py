"""Damaged and odd files, from a fixed seed: each gives the right answer or one sentence, in bounded time and memory."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageDraw
from pycocotools import mask as rle
from scipy import ndimage

from camkit.background.data import read_data
from camkit.background.regions import boxes, coco, masks, read_regions, voc, yolo
from camkit.background.regions.annotations import Annotations
from camkit.background.render import in_pixels, object_region, widened_boxes
from camkit.cli import main
from camkit.errors import CamkitError
from camkit.images.read import open_picture

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]  # warnings as errors would hide what follows

SEED = 17
SIZE = (48, 36)  # width, height
SECONDS, MEGABYTES = 10, 700
"""What one case may take and add: a damaged header may declare a picture of 89 megapixels, which Pillow still opens."""


@contextmanager
def one_case(outcomes: Counter[str], name: str) -> Iterator[None]:
    """Count how a case ends; any end but an answer or one sentence of camkit's fails the test."""
    started, before = time.process_time(), resident("VmRSS")
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # the peak counts from here, not from the tests that ran before
    try:
        yield
    except CamkitError as error:
        text = str(error)
        assert 10 < len(text) < 700, f"{name}: {text[:1000]}"
        assert "\n" not in text, f"{name}: {text}"
        assert "object at 0x" not in text, f"{name}: {text}"
        assert error.exit_code == 2, f"{name}: {text}"
        outcomes["refused"] += 1
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    else:
        outcomes["answered"] += 1
    assert time.process_time() - started < SECONDS, name
    assert resident("VmHWM") - before < MEGABYTES, name


def resident(field: str) -> int:
    """Return a figure of this process's memory in MiB: VmRSS, now, or VmHWM, at its peak; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) >> 10 if found else 0


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return data with a few bytes changed, cut, repeated or inserted; headers are hit more often than the rest."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        end = rng.choice((16, 64, len(broken), len(broken)))
        start = rng.randrange(max(1, min(end, len(broken))))
        if rng.random() < 0.3:  # the directories of TIFF lie at the end
            start = len(broken) - 1 - start if start < len(broken) else 0
        action = rng.random()
        if action < 0.6:
            broken[start] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif action < 0.7:
            broken[start : start + 4] = rng.randrange(1 << 32).to_bytes(4, rng.choice(("big", "little")))
        elif action < 0.8:
            del broken[start:]
        elif action < 0.9:
            del broken[start : start + rng.randrange(1, 9)]
        else:
            broken[start:start] = broken[start : start + rng.randrange(1, 99)]
        broken = broken or bytearray(b"\0")
    return bytes(broken)


def photo(mode: str = "RGB") -> Image.Image:
    rows, columns = np.mgrid[: SIZE[1], : SIZE[0]]
    pixels = np.stack([columns * 5, rows * 7, (rows * columns) % 256], 2).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def picture_files() -> dict[str, bytes]:
    """Return a file of every usual kind and mode."""
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    deep = np.arange(SIZE[0] * SIZE[1]).reshape(SIZE[::-1])
    files = {f"{mode}.png": encoded(photo(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1")}
    files |= {f"{mode}.tif": encoded(photo(mode), "TIFF") for mode in ("RGB", "RGBA", "L", "CMYK", "LAB", "YCbCr")}
    files |= {
        f"{name}.tif": encoded(photo(), "TIFF", compression=name)
        for name in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")
    }
    files |= {f"{mode}.jpg": encoded(photo(mode), "JPEG") for mode in ("RGB", "L", "CMYK")}
    files |= {
        "camera.jpg": encoded(photo(), "JPEG", exif=exif, icc_profile=profile),
        "profile.png": encoded(photo(), "PNG", icc_profile=profile, exif=exif),
        "progressive.jpg": encoded(photo(), "JPEG", progressive=True),
        "deep.png": encoded(Image.fromarray((deep * 30).astype(np.uint16)), "PNG"),
        "deep.tif": encoded(Image.fromarray((deep * 30).astype(np.int32)), "TIFF"),
        "float.tif": encoded(Image.fromarray((deep / deep.max()).astype(np.float32)), "TIFF"),
        "fax.tif": encoded(photo("1"), "TIFF", compression="group4"),
        "p.webp": encoded(photo(), "WEBP"),
        "lossless.webp": encoded(photo("RGBA"), "WEBP", lossless=True),
        "p.gif": encoded(photo(), "GIF"),
        "moving.gif": encoded(photo("L"), "GIF", save_all=True, append_images=[photo("1")]),
        "p.bmp": encoded(photo(), "BMP"),
        "p.ppm": encoded(photo(), "PPM"),
        "p.tga": encoded(photo(), "TGA"),
        "p.jp2": encoded(photo(), "JPEG2000"),
        "p.avif": encoded(photo(), "AVIF"),
    }
    return files


@pytest.mark.filterwarnings("ignore:.* holds several pictures, and camkit uses the first")
def test_damaged_pictures(tmp_path: Path) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    files = picture_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert sorted(open_picture(tmp_path / name).size) == sorted(SIZE)
    for number in range(25 * len(files)):
        name, data = list(files.items())[number % len(files)]
        (tmp_path / name).write_bytes(damaged(data, rng))
        with one_case(outcomes, f"picture {number}, {name}"):
            picture = open_picture(tmp_path / name)
            assert picture.mode == "RGB"
            assert picture.load() is not None
    assert outcomes.total() >= 700
    assert min(outcomes.values()) > 100, outcomes


# --- masks ------------------------------------------------------------------------------------------------------------


def ellipses(rng: random.Random, count: int) -> np.ndarray:
    """Return objects that do not touch, with ids from 1; between them lies background."""
    ids = np.zeros(SIZE[::-1], int)
    for number in range(count):
        drawn = Image.new("1", SIZE)
        left, top = rng.randrange(1, SIZE[0] - 14), rng.randrange(1, SIZE[1] - 12)
        corners = [left, top, left + rng.randrange(8, 13), top + rng.randrange(8, 11)]
        ImageDraw.Draw(drawn).ellipse(corners, fill=1)
        shape = np.asarray(drawn)
        if not ids[ndimage.binary_dilation(shape, iterations=4)].any():
            ids[shape] = number + 1
    return ids


def border_of(ids: np.ndarray) -> np.ndarray:
    return ndimage.binary_dilation(ids > 0, iterations=2) & (ids == 0)


def grey(values: np.ndarray, dtype: Any = np.uint8) -> Image.Image:
    return Image.fromarray(values.astype(dtype))


def colours(ids: np.ndarray) -> np.ndarray:
    return np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]], np.uint8)[ids]


def indexed(values: np.ndarray) -> Image.Image:
    picture = grey(values)
    picture.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [9, 9, 9] * 252 + [224, 224, 192])
    return picture


def cut_out(ids: np.ndarray) -> Image.Image:
    picture = photo("RGBA")
    picture.putalpha(grey((ids > 0) * 255))
    return picture


CONVENTIONS: dict[str, Callable[[np.ndarray], Image.Image]] = {
    "0 and 1": lambda ids: grey(ids > 0),
    "0 and 255": lambda ids: grey((ids > 0) * 255),
    "1 bit": lambda ids: grey((ids > 0) * 255).convert("1"),
    "ids": grey,
    "spread ids": lambda ids: grey(ids * 50),
    "ids of 16 bits": lambda ids: grey(ids * 9000, np.uint16),
    "ids to 255": lambda ids: grey(np.where(ids == 0, 0, 256 - ids)),
    "trimap": lambda ids: grey(np.select([ids > 0, border_of(ids)], [1, 3], 2)),
    "matting": lambda ids: grey(np.select([ids > 0, border_of(ids)], [255, 128], 0)),
    "VOC": lambda ids: indexed(np.where(border_of(ids), 255, ids)),
    "VOC in grey": lambda ids: grey(np.where(border_of(ids), 255, ids)),
    "VOC in colour": lambda ids: indexed(np.where(border_of(ids), 255, ids)).convert("RGB"),
    "colours": lambda ids: grey(colours(ids)),
    "opaque colours": lambda ids: grey(np.dstack([colours(ids), np.full(ids.shape, 255)])),
    "alpha": cut_out,
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_masks_of_every_convention_are_read_rightly(tmp_path: Path, convention: str) -> None:
    outcomes = Counter[str]()
    for number in range(20):
        rng = random.Random(f"{SEED} {convention} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        truths = [ellipses(rng, 4) for _ in range(rng.randrange(1, 6))]
        for name, ids in enumerate(truths):
            CONVENTIONS[convention](ids).save(folder / f"{name}.png")
        with one_case(outcomes, f"{convention} {number}"):
            annotations = masks.read(folder)
            for name, ids in enumerate(truths):
                assert (object_region(annotations.objects[str(name)], SIZE) == (ids > 0)).all(), (convention, number)
    assert outcomes["refused"] <= 2, outcomes


def test_damaged_masks(tmp_path: Path) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    for number in range(300):
        ids = ellipses(rng, 4)
        name = list(CONVENTIONS)[number % len(CONVENTIONS)]
        file = tmp_path / f"a.{rng.choice(('png', 'tif'))}"
        CONVENTIONS[name](ids).save(file)
        file.write_bytes(damaged(file.read_bytes(), rng))
        with one_case(outcomes, f"mask {number}, {name}"):
            for annotation in masks.read(tmp_path).objects["a"]:
                assert object_region([annotation], SIZE).shape == SIZE[::-1]
        file.unlink()
    assert outcomes.total() >= 300


# --- regions ----------------------------------------------------------------------------------------------------------

ODD_VALUES = [
    *(None, True, -1, 0, 0.5, 1 << 70, 10**400, float("nan"), float("inf"), 1e300, "", "x", "1", "\n", "\0", "é" * 300),
    *([], {}, [[]], [1, 2, 3], [[1, 2], [3]], [[0.0, 0.0] * 3], [[1e6, 5.0] * 4], "../../a", "a" * 5000),
    {"size": [9, 9], "counts": "oooo"},
    {"size": [1 << 20, 1 << 20], "counts": []},
    {"size": [36, 48], "counts": [5, -3, 1726]},
]


def coco_content(rng: random.Random) -> dict[str, Any]:
    ids = ellipses(rng, 3)
    packed = rle.encode(np.asfortranarray((ids == 1).astype(np.uint8)))
    counts = packed["counts"].decode()
    annotations = [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [3, 4, 20, 11], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 1, "segmentation": [[5.0, 4.0, 25.0, 4.0, 25.0, 20.0]], "bbox": []},
        {"id": 3, "image_id": 1, "category_id": 2, "segmentation": {"size": [36, 48], "counts": counts}},
        {"id": 4, "image_id": 2, "category_id": 2, "segmentation": {"size": [36, 48], "counts": [9, 40, 1679]}},
    ]
    return {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 48, "height": 36} for number in (1, 2)],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": annotations,
    }


def mutated(content: Any, rng: random.Random) -> Any:
    """Return a copy in which one value, key or entry is replaced."""
    content = copy.deepcopy(content)
    node, parent, key = content, None, None
    while isinstance(node, (list, dict)) and node and (parent is None or rng.random() < 0.8):
        parent = node
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = parent[key]
    action = rng.random()
    if action < 0.15:
        del parent[key]
    elif action < 0.25 and isinstance(parent, list):
        parent.extend(copy.deepcopy(parent))
    elif action < 0.35 and isinstance(node, str) and node:
        parent[key] = node[: rng.randrange(len(node))] + chr(rng.randrange(1, 0x300)) + node[rng.randrange(len(node)) :]
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return content


def draw_all(annotations: Annotations) -> None:
    """Draw every object as the check does; one that does not fit its picture is an error of that picture."""
    for objects in annotations.objects.values():
        fitting = [in_pixels(annotation, SIZE) for annotation in objects]
        assert object_region(fitting, SIZE, round_boxes=True).shape == SIZE[::-1]
        assert widened_boxes(fitting, SIZE).shape == SIZE[::-1]


def test_odd_coco_files(tmp_path: Path) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    file = tmp_path / "instances.json"
    for number in range(400):
        content = coco_content(rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            content = mutated(content, rng)
        text = json.dumps(content).encode()
        file.write_bytes(damaged(text, rng) if rng.random() < 0.2 else text)
        with one_case(outcomes, f"COCO {number}"):
            draw_all(coco.read(file))
    assert min(outcomes.values()) > 50, outcomes


TEXTS: dict[str, tuple[str, Callable[[Path], Annotations]]] = {
    "a.xml": (
        "<annotation><filename>a.png</filename><size><width>48</width><height>36</height><depth>3</depth></size>"
        "<object><name>cat</name><bndbox><xmin>3</xmin><ymin>4</ymin><xmax>20</xmax><ymax>18</ymax></bndbox></object>"
        "<object><name>dog</name><bndbox><xmin>9</xmin><ymin>9</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object>"
        "</annotation>",
        voc.read,
    ),
    "a.csv": (
        "path,label,xmin,ymin,xmax,ymax\na.png,cat,3,4,20,18\na.png,dog,9,9,40,30\nb.png,cat,1,1,9,9\n",
        boxes.read,
    ),
    "a.txt": ("0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.9 0.1 0.5 0.9\n", lambda file: yolo.read(file.parent)),
    "data.yaml": ("names:\n  0: cat\n  1: dog\nnc: 2\n", lambda file: yolo.read(file.parent)),
}
TOKENS = [
    *("0", "-1", "1e999", "nan", "inf", "9" * 400, "", " ", "<", "&", ">", ",", '"', "\n", "\0", ":", "- ", "[", "{"),
    *("*a", "&a ", "!!python/name:os.system ", "<x>" * 50, "&lol;", "é", "a" * 3000, "0.5", "3", "\t", "\r"),
]


@pytest.mark.parametrize("name", TEXTS)
def test_odd_text_files(tmp_path: Path, name: str) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    text, read = TEXTS[name]
    (tmp_path / "a.txt").write_text(TEXTS["a.txt"][0])
    for number in range(125):
        changed = text
        for _ in range(rng.choice((1, 1, 2, 4))):
            start, end = rng.choice([word.span() for word in re.finditer(r"[\w.]+", changed)])
            if rng.random() < 0.3:
                start = rng.randrange(len(changed) + 1)
                end = start + rng.choice((0, 0, 1, 3))
            changed = changed[:start] + rng.choice(TOKENS) + changed[end:]
        data = changed.encode()
        (tmp_path / name).write_bytes(damaged(data, rng) if rng.random() < 0.3 else data)
        with one_case(outcomes, f"{name} {number}: {changed[:300]!r}"):
            draw_all(read(tmp_path / name))
            draw_all(next(iter(read_regions(tmp_path if name in ("a.txt", "data.yaml") else tmp_path / name))))
    assert min(outcomes.values()) > 5, outcomes


def test_folders_of_damaged_pictures_and_regions(tmp_path: Path) -> None:
    """Everything that the check reads before the model's first pass, at once."""
    rng, outcomes = random.Random(SEED), Counter[str]()
    (tmp_path / "images").mkdir()
    for number in range(60):
        for picture in ("1.png", "2.png"):
            data = encoded(photo(), "PNG")
            (tmp_path / "images" / picture).write_bytes(damaged(data, rng) if rng.random() < 0.3 else data)
        content = coco_content(rng)
        (tmp_path / "instances.json").write_text(json.dumps(mutated(content, rng) if rng.random() < 0.8 else content))
        with one_case(outcomes, f"folder {number}"):
            data = read_data(tmp_path)
            assert data.classes
            assert all(item.objects or item.others or item.name for item in data.items)
    assert outcomes["answered"] > 10, outcomes


PIECES = (
    "\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\r", "\n", "\t", "\x7f", "\u202e", "\u2066", "\u2028", "\ufeff", "\udcff",
    "::error::", "##[error]", "##vso[task]", "[red]", "%0A", "a", "ö", "🐞", " ", "-", ".",
)  # fmt: skip
"""What odd names are made of: terminal controls, directions of reading, commands of CI logs, markup, and letters."""

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def odd_names(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(count)]


def assert_harmless(text: str) -> None:
    assert not CONTROLS.search(text), ascii(CONTROLS.search(text))
    for line in text.splitlines():
        assert not line.lstrip().startswith("::"), ascii(line)
        assert "##[" not in line, ascii(line)
        assert "##vso[" not in line, ascii(line)


def test_odd_names_of_files_labels_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(SEED + 9)
    picture = encoded(photo().resize((32, 32)), "PNG")
    for number, name in enumerate(odd_names(rng, 150)):
        (tmp_path / f"{name}{number}.png").write_bytes(picture if number % 3 else b"damaged")
    labels = tmp_path / "labels.json"
    for _ in range(4):
        labels.write_text(json.dumps(odd_names(rng, 4)))
        call = [
            str(tmp_path),
            "--model",
            "demo-fair",
            "--labels",
            str(labels),
            "--top-k",
            "4",
            "--out",
            str(tmp_path / "out"),
        ]
        main(call)
        captured = capsys.readouterr()
        assert_harmless(captured.out)
        assert_harmless(captured.err)
    empty = tmp_path / "empty" / "empty"  # so that "." and ".." name folders without pictures
    empty.mkdir(parents=True)
    monkeypatch.chdir(empty)
    for name in odd_names(rng, 150):
        for call in (
            [name, "--model", "demo-fair"],
            ["a.png", "--model", name],
            ["check", name, "--model", "demo-fair"],
        ):
            assert main(call) != 0, ascii(call)
            captured = capsys.readouterr()
            assert_harmless(captured.out)
            assert_harmless(captured.err)
