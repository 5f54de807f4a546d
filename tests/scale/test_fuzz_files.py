"""camkit reads damaged and odd files, made from a fixed seed, and gives the right answer or one sentence."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage

from camkit.background import regions as formats
from camkit.background.regions import object_region
from camkit.cli import main
from camkit.errors import CamkitError

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]  # warnings as errors would hide what follows

SEED = 17
SIZE = (48, 36)  # width, height


@contextmanager
def one_case(outcomes: Counter[str], name: str) -> Iterator[None]:
    """Count how a case ends; any end but an answer or one sentence of camkit's fails the test."""
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


def photo(mode: str = "RGB") -> Image.Image:
    rows, columns = np.mgrid[: SIZE[1], : SIZE[0]]
    pixels = np.stack([columns * 5, rows * 7, (rows * columns) % 256], 2).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


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
    for number in range(8):
        rng = random.Random(f"{SEED} {convention} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        truths = [ellipses(rng, 4) for _ in range(rng.randrange(1, 6))]
        for name, ids in enumerate(truths):
            CONVENTIONS[convention](ids).save(folder / f"{name}.png")
        with one_case(outcomes, f"{convention} {number}"):
            annotations = formats.read_masks(folder)
            for name, ids in enumerate(truths):
                assert (object_region(annotations.objects[str(name)], SIZE) == (ids > 0)).all(), (convention, number)
    assert outcomes["refused"] <= 1, outcomes


# --- regions ----------------------------------------------------------------------------------------------------------


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
    for number, name in enumerate(odd_names(rng, 24)):
        (tmp_path / f"{name}{number}.png").write_bytes(picture if number % 3 else b"damaged")
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(odd_names(rng, 4)))
    options = ["--model", "demo-fair", "--labels", str(labels), "--top-k", "4"]
    main([str(tmp_path), *options, "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert_harmless(captured.out)
    assert_harmless(captured.err)
    empty = tmp_path / "empty" / "empty"  # so that "." and ".." name folders without pictures
    empty.mkdir(parents=True)
    monkeypatch.chdir(empty)
    for name in odd_names(rng, 15):
        for call in (
            [name, "--model", "demo-fair"],
            ["a.png", "--model", name],
            ["check", name, "--model", "demo-fair"],
        ):
            assert main(call) != 0, ascii(call)
            captured = capsys.readouterr()
            assert_harmless(captured.out)
            assert_harmless(captured.err)
