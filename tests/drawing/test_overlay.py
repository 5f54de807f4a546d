"""How heat is drawn and written: the blend, the styles, the files, and what is drawn when there is nothing to draw."""

from __future__ import annotations

import io
import json
import math
import stat
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from disks import files_of_at_most
from networks import Net
from PIL import Image
from refusals import refused
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.drawing.overlay import COLORMAPS, STYLES, blend, colorize, stretch
from camkit.errors import InputError, OutputError
from camkit.types import Box

PRESET = ImageClassification(crop_size=32, resize_size=36)


def signed(factor: float = 1.0, spoil: float | None = None) -> Net:
    """Return a network whose one logit is ``factor`` times the mean brightness of what its layer returns."""

    def cells(_: Net, images: Tensor) -> Tensor:
        maps = nn.functional.avg_pool2d(images.abs() + 0.1, 4)
        if spoil is not None:
            maps[:, :, 1, 2] = spoil
        return maps

    return Net(lambda net, images: factor * net.cells(images).mean((1, 2, 3))[:, None], cells=Net(cells))


@pytest.fixture
def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (48, 60, 3), np.uint8)


@pytest.fixture
def explanation(photo: np.ndarray) -> camkit.Explanation:
    return camkit.explain(signed(), photo, "cells", preprocess=PRESET)


def outside(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = np.mgrid[0 : shape[0], 0 : shape[1]] + 0.5
    return (columns < box.left) | (columns > box.right) | (rows < box.top) | (rows > box.bottom)


# --- colours


def test_every_colour_map_of_opencv_is_available_in_rgb():
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    for colormap, number in COLORMAPS.items():
        found = colorize(ramp, colormap)
        expected = cv2.applyColorMap(np.arange(256, dtype=np.uint8)[None], number)
        assert found.dtype == np.uint8
        assert np.array_equal(found, cv2.cvtColor(expected, cv2.COLOR_BGR2RGB)), colormap


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("colormap", "turbos", "'turbo'"),
        ("colormap", "?", "viridis"),
        ("style", "side_by_side", "side-by-side"),
        ("opacity", "evn", "'even'"),
        ("scale", "both", "scale is 'shared', 'each' or a list"),
        *(("alpha", alpha, "alpha") for alpha in (-0.1, 1.1, math.nan)),
    ],
)
def test_an_unknown_option_is_one_sentence(explanation, option, value, meant):
    with refused(meant, InputError):
        explanation.overlay(**{option: value})


# --- the blend


@pytest.mark.parametrize("heat", [0.01, 0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("opacity", ["evidence", "even"])
def test_a_constant_map_is_blended_linearly(photo, heat, alpha, opacity):
    found = blend(photo, np.full((8, 8), heat, np.float32), None, colormap="turbo", alpha=alpha, opacity=opacity)
    level = round(heat * 255)
    if opacity == "evidence" and level < 51:
        alpha *= 3 * (level / 51) ** 2 - 2 * (level / 51) ** 3
    colour = cv2.applyColorMap(np.array([[level]], np.uint8), cv2.COLORMAP_TURBO)[0, 0, ::-1].astype(float)
    assert np.abs(found - ((1 - alpha) * photo + alpha * colour)).max() <= (1 if opacity == "even" else 1.5)


@pytest.mark.parametrize("colormap", ["turbo", "viridis", "bone"])
def test_the_colours_only_gain_weight_as_the_heat_rises(colormap):
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    white, black = (blend(np.full((1, 256, 3), level, np.uint8), ramp, None, colormap=colormap) for level in (255, 0))
    kept = white.astype(int) - black
    assert (np.diff(kept, axis=1) <= 0).all()
    assert (kept[:, 0] == 255).all()
    assert (np.abs(kept[:, 51:] - 127.5) < 1).all(), "the whole weight from 0.2 on"


def test_the_cropped_part_is_darkened_and_keeps_its_hue(explanation, photo):
    unseen = outside(explanation.box, photo.shape)
    assert unseen.any()
    assert np.abs(explanation.overlay()[unseen] - 0.45 * photo[unseen]).max() <= 1


@pytest.mark.parametrize("box", [Box(0, 0, 60, 48), Box(10.5, 7.25, 49.5, 41.75), Box(-20, -10, 80, 58)])
def test_a_ramp_is_stretched_over_its_box_pixel_centre_to_pixel_centre(box):
    ramp = np.tile((np.arange(64, dtype=np.float32) + 0.5) / 64, (64, 1))
    placed = stretch(ramp, box, (48, 60))
    expected = (np.arange(60) + 0.5 - box.left) / (box.right - box.left)
    inner = (expected > 0.02) & (expected < 0.98)
    assert np.abs(placed[24][inner] - expected[inner]).max() < 0.01
    assert np.isnan(placed).sum() == outside(box, (48, 60)).sum()


# --- styles


def test_the_styles_without_a_caption(explanation, photo):
    overlay, both, heatmap = (explanation.overlay(style=style) for style in ("overlay", "side-by-side", "heatmap"))
    assert set(STYLES) == {"overlay", "side-by-side", "heatmap", "figure"}
    assert overlay.shape == photo.shape
    assert np.array_equal(both, np.concatenate([photo, overlay], axis=1))
    assert np.array_equal(heatmap, colorize(explanation.heatmap))
    assert all(drawn.dtype == np.uint8 for drawn in (overlay, both, heatmap))


# --- files


@pytest.mark.parametrize("ending", [".png", ".jpg", ".jpeg", ".webp", ".tiff", ".bmp", ".PNG", ".JPG", ""])
def test_saving_in_the_type_the_ending_names(explanation, tmp_path, ending):
    path = tmp_path / "a/new/folder" / f"p{ending}"
    (tmp_path / "ordinary").touch()
    options = {"style": "side-by-side", "colormap": "bone", "alpha": 0.8}
    returned = explanation.save(str(path), **options)
    assert returned == path
    with Image.open(path) as picture:
        kind = ending.lower().removeprefix(".") or "png"
        assert picture.format == {"jpg": "JPEG", "tiff": "TIFF"}.get(kind, kind.upper())
        drawn = np.asarray(picture.convert("RGB")).astype(int)
    expected = explanation.overlay(**options)
    assert np.abs(drawn - expected).mean() < (0.01 if kind in ("png", "tiff", "bmp") else 40)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((f"new/p{ending}", rf"\{ending}.*\.png") for ending in (".xyz", ".txt", ".svg", ".pdf")),
        ("taken/p.png", "taken is a file, not a folder"),
        ("folder.png", r"folder\.png"),
        ("", "not a file name"),
    ],
)
def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(explanation, tmp_path, name, words):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    with refused(words, OutputError):
        explanation.save(tmp_path / name if name else "")
    assert {file.name for file in tmp_path.rglob("*")} == {"taken", "folder.png"}
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_older_file_stays_when_writing_fails(explanation, tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(b"the older picture")
    with files_of_at_most(100), refused(kind=OutputError):  # as on a full disk
        explanation.save(path)
    assert path.read_bytes() == b"the older picture"
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]


# --- notebooks and JSON


@pytest.mark.parametrize(("shape", "size"), [((48, 60), (60, 48)), ((300, 1200), (480, 120)), ((1200, 100), (40, 480))])
def test_a_notebook_shows_a_small_png(shape, size):
    data = camkit.explain(signed(), np.full((*shape, 3), 80, np.uint8), "cells", preprocess=PRESET)._repr_png_()
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, picture.size) == ("PNG", size)


def as_json(explanation: camkit.Explanation) -> dict[str, Any]:
    return json.loads(json.dumps(explanation.to_dict(), allow_nan=False))


# --- statuses


@pytest.mark.parametrize(
    ("factor", "spoil", "status"),
    [
        (-1.0, None, "no_positive_evidence"),
        (0.0, None, "no_influence"),
        *((1.0, value, "non_finite") for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_a_map_without_evidence_is_reported_and_not_drawn(photo, tmp_path, factor, spoil, status):
    found = camkit.explain(signed(factor, spoil), photo, "cells", preprocess=PRESET)
    assert found.status == status
    assert not found.heatmap.any()
    assert found.peak is None
    seen = ~outside(found.box, photo.shape)
    assert np.array_equal(found.overlay()[seen], photo[seen])
    with Image.open(found.save(tmp_path / "p.png")) as picture:
        assert np.array_equal(np.asarray(picture), found.overlay())
    row = as_json(found)
    assert row["peak"] is None
    if spoil is None:
        assert (np.sign(found.raw) == factor).all()
        assert np.allclose(row["raw"], found.raw)
    else:
        assert np.argwhere(~np.isfinite(found.raw)).tolist() == [[1, 2]]
        assert (row["raw"][1][2], row["score"], row["status"]) == (None, None, "non_finite")


def test_one_spoiled_picture_does_not_spoil_its_batch():
    bright = torch.ones(3, 3, 16, 16)
    expected = camkit.explain(signed(), bright, "cells")
    bright[1] = 3e38
    found = camkit.explain(signed(), bright, "cells")
    assert [row.status for row in found] == ["ok", "non_finite", "ok"]
    assert np.allclose(found[0].raw, expected[0].raw)
