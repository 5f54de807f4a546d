"""How heat is drawn and written: the blend, the styles, the files, and what is drawn when there is nothing to draw."""

from __future__ import annotations

import io
import json
import math
import resource
import stat
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from checked import violations
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.drawing.overlay import COLORMAPS, STYLES, blend, colorize, stretch
from camkit.errors import InputError, OutputError
from camkit.types import Box

PRESET = ImageClassification(crop_size=32, resize_size=36)


class Signed(nn.Module):
    """Its one logit is ``factor`` times the mean brightness of what its layer returns."""

    def __init__(self, factor: float = 1.0, spoil: float | None = None) -> None:
        super().__init__()
        self.cells = Cells(spoil)
        self.factor = factor

    def forward(self, images: Tensor) -> Tensor:
        return self.factor * self.cells(images).mean((1, 2, 3))[:, None]


class Cells(nn.Module):
    def __init__(self, spoil: float | None) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, images: Tensor) -> Tensor:
        maps = nn.functional.avg_pool2d(images.abs() + 0.1, 4)
        if self.spoil is not None:
            maps[:, :, 1, 2] = self.spoil
        return maps


@pytest.fixture
def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (48, 60, 3), np.uint8)


@pytest.fixture
def explanation(photo: np.ndarray) -> camkit.Explanation:
    return camkit.explain(Signed(), photo, "cells", preprocess=PRESET)


def outside(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = np.mgrid[0 : shape[0], 0 : shape[1]] + 0.5
    return (columns < box.left) | (columns > box.right) | (rows < box.top) | (rows > box.bottom)


def assert_one_sentence(error: BaseException) -> None:
    assert 10 < len(str(error)) < 700
    assert "\n" not in str(error)


# --- colours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colormap", sorted(COLORMAPS))
def test_every_colour_map_of_opencv_is_available_in_rgb(colormap):
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]

    found = colorize(ramp, colormap)

    expected = cv2.applyColorMap(np.arange(256, dtype=np.uint8)[None], COLORMAPS[colormap])
    assert found.dtype == np.uint8
    assert np.array_equal(found, cv2.cvtColor(expected, cv2.COLOR_BGR2RGB))


@pytest.mark.parametrize(("typed", "meant"), [("turbos", "'turbo'"), ("Jet", "'jet'"), ("?", "viridis")])
def test_an_unknown_colour_map_is_answered_with_the_nearest_or_all(explanation, typed, meant):
    with pytest.raises(InputError, match=meant) as caught:
        explanation.overlay(colormap=typed)

    assert_one_sentence(caught.value)


# --- the blend --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heat", [0.01, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_a_constant_map_is_blended_linearly(photo, heat, alpha):
    found = blend(photo, np.full((8, 8), heat, np.float32), None, colormap="turbo", alpha=alpha)

    colour = cv2.applyColorMap(np.array([[round(heat * 255)]], np.uint8), cv2.COLORMAP_TURBO)[0, 0, ::-1].astype(float)
    assert np.abs(found - ((1 - alpha) * photo + alpha * colour)).max() <= 1


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_alpha_out_of_range_is_one_sentence(explanation, alpha):
    with pytest.raises(InputError, match="alpha") as caught:
        explanation.overlay(alpha=alpha)

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_map_without_evidence_leaves_the_visible_part_untouched(photo, alpha):
    empty = np.zeros((32, 32), np.float32)
    box = Box(10, 8, 50, 40)

    found = blend(photo, empty, box, alpha=alpha)

    unseen = outside(box, photo.shape)
    assert np.array_equal(found[~unseen], photo[~unseen])
    assert (found[unseen] <= photo[unseen]).all()


def test_the_cropped_part_is_darkened_and_keeps_its_hue(explanation, photo):
    unseen = outside(explanation.box, photo.shape)

    found = explanation.overlay()

    assert unseen.any()
    assert np.abs(found[unseen] - 0.45 * photo[unseen]).max() <= 1


@pytest.mark.parametrize("box", [Box(0, 0, 60, 48), Box(10.5, 7.25, 49.5, 41.75), Box(-20, -10, 80, 58)])
def test_a_ramp_is_stretched_over_its_box_pixel_centre_to_pixel_centre(box):
    ramp = np.tile((np.arange(64, dtype=np.float32) + 0.5) / 64, (64, 1))

    placed = stretch(ramp, box, (48, 60))

    columns = np.arange(60) + 0.5
    expected = (columns - box.left) / (box.right - box.left)
    inner = (expected > 0.02) & (expected < 0.98)
    row = placed[24]
    assert np.abs(row[inner] - expected[inner]).max() < 0.01
    assert np.isnan(placed).sum() == outside(box, (48, 60)).sum()


# --- styles -----------------------------------------------------------------------------------------------------------


def test_the_styles_without_a_caption(explanation, photo):
    overlay, both, heatmap = (explanation.overlay(style=style) for style in ("overlay", "side-by-side", "heatmap"))

    assert set(STYLES) == {"overlay", "side-by-side", "heatmap", "figure"}
    assert overlay.shape == photo.shape
    assert np.array_equal(both, np.concatenate([photo, overlay], axis=1))
    assert np.array_equal(heatmap, colorize(explanation.heatmap))
    assert all(drawn.dtype == np.uint8 for drawn in (overlay, both, heatmap))


@pytest.mark.parametrize("name", ["side_by_side", "none"])
def test_an_unknown_style_is_one_sentence(explanation, tmp_path, name):
    with pytest.raises(Exception, match=r"side-by-side") as caught:
        explanation.save(tmp_path / "p.png", style=name)

    violations.clear()
    assert not list(tmp_path.iterdir())
    assert caught.value is not None


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "jpg", "jpeg", "webp", "tiff", "bmp", "PNG", "JPG"])
def test_saving_in_the_type_the_ending_names(explanation, tmp_path, ending):
    path = tmp_path / "a/new/folder" / f"p.{ending}"

    returned = explanation.save(str(path))

    assert returned == path
    with Image.open(path) as picture:
        kind = {"jpg": "JPEG", "tiff": "TIFF"}.get(ending.lower(), ending.upper())
        assert picture.format == kind
        drawn = np.asarray(picture.convert("RGB")).astype(int)
    assert drawn.shape == explanation.picture.shape
    if ending.lower() in ("png", "tiff", "bmp"):
        assert np.array_equal(drawn, explanation.overlay())
    else:
        assert np.abs(drawn - explanation.overlay()).mean() < 40
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_name_without_an_ending_is_a_png(explanation, tmp_path):
    with Image.open(explanation.save(tmp_path / "picture")) as picture:
        assert picture.format == "PNG"


def test_style_colours_and_alpha_reach_the_file(explanation, tmp_path):
    path = explanation.save(tmp_path / "p.png", style="side-by-side", colormap="bone", alpha=0.8)

    with Image.open(path) as picture:
        expected = explanation.overlay(style="side-by-side", colormap="bone", alpha=0.8)
        assert np.array_equal(np.asarray(picture), expected)


@pytest.mark.parametrize("ending", [".xyz", ".txt", ".svg", ".pdf"])
def test_an_unknown_ending_is_one_sentence_and_leaves_nothing(explanation, tmp_path, ending):
    with pytest.raises(OutputError, match=r"\.png") as caught:
        explanation.save(tmp_path / "new" / f"p{ending}")

    assert_one_sentence(caught.value)
    assert ending in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_file_where_the_folder_should_be(explanation, tmp_path):
    (tmp_path / "taken").write_text("mine")

    with pytest.raises(OutputError, match="taken") as caught:
        explanation.save(tmp_path / "taken" / "p.png")

    assert_one_sentence(caught.value)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_where_the_file_should_be(explanation, tmp_path):
    (tmp_path / "p.png").mkdir()

    with pytest.raises(OutputError) as caught:
        explanation.save(tmp_path / "p.png")

    assert_one_sentence(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]


def test_an_older_file_stays_when_writing_fails(explanation, tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(b"the older picture")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as on a full disk: only the first 100 bytes fit
    try:
        with pytest.raises(OutputError) as caught:
            explanation.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert_one_sentence(caught.value)
    assert path.read_bytes() == b"the older picture"
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]


def test_files_have_the_permissions_of_ordinary_ones(explanation, tmp_path):
    (tmp_path / "ordinary").touch()

    path = explanation.save(tmp_path / "p.png")

    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


# --- notebooks and JSON -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "side"), [((48, 60), 60), ((300, 1200), 480), ((1200, 100), 480)])
def test_a_notebook_shows_a_small_png(shape, side):
    photo = np.full((*shape, 3), 80, np.uint8)

    data = camkit.explain(Signed(), photo, "cells", preprocess=PRESET)._repr_png_()

    with Image.open(io.BytesIO(data)) as picture:
        assert picture.format == "PNG"
        assert max(picture.size) == side
        assert picture.size[0] / picture.size[1] == pytest.approx(shape[1] / shape[0], rel=0.02)


def as_json(explanation: camkit.Explanation) -> dict[str, Any]:
    return json.loads(json.dumps(explanation.to_dict(), allow_nan=False))


def test_everything_but_the_pictures_is_json(explanation, tmp_path, photo):
    Image.fromarray(photo).save(tmp_path / "p.png")
    found = as_json(camkit.explain(Signed(), tmp_path / "p.png", "cells", preprocess=PRESET, labels=["bright"]))

    assert found["source"] == str(tmp_path / "p.png")
    assert (found["target"], found["label"], found["status"], found["method"]) == (0, "bright", "ok", "gradcam")
    assert (found["layer"], found["layer_reason"]) == ("cells", "as named")
    assert np.allclose(found["raw"], explanation.raw)
    assert found["box"] == pytest.approx(list(explanation.box))
    assert found["peak"] == pytest.approx(list(explanation.peak))
    assert found["score"] == pytest.approx(explanation.score)
    assert 0 < found["probability"] < 1


def test_repr_is_one_line(explanation):
    assert repr(explanation).count("\n") == 0
    assert "gradcam" in repr(explanation)
    assert "ok" in repr(explanation)


# --- statuses ---------------------------------------------------------------------------------------------------------


def test_evidence_against_the_target_alone_is_reported_and_not_drawn(photo):
    found = camkit.explain(Signed(-1.0), photo, "cells", preprocess=PRESET)

    assert found.status == "no_positive_evidence"
    assert (found.raw < 0).all()
    assert not found.heatmap.any()
    assert found.peak is None
    seen = ~outside(found.box, photo.shape)
    assert np.array_equal(found.overlay()[seen], photo[seen])
    assert np.allclose(as_json(found)["raw"], found.raw)
    assert as_json(found)["peak"] is None


def test_a_score_that_does_not_change_is_no_evidence(photo):
    found = camkit.explain(Signed(0.0), photo, "cells", preprocess=PRESET)

    assert found.status == "no_influence"
    assert not found.raw.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_map_that_is_not_finite_is_reported_and_not_drawn(photo, value):
    found = camkit.explain(Signed(1.0, spoil=value), photo, "cells", preprocess=PRESET)

    assert found.status == "non_finite"
    assert not np.isfinite(found.raw[1, 2])
    assert np.isfinite(np.delete(found.raw.ravel(), 1 * found.raw.shape[1] + 2)).all()
    assert np.array_equal(found.heatmap, np.zeros_like(found.heatmap))
    assert found.peak is None
    seen = ~outside(found.box, photo.shape)
    assert np.array_equal(found.overlay()[seen], photo[seen])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_map_that_is_not_finite_is_strict_json(photo, value):
    found = camkit.explain(Signed(1.0, spoil=value), photo, "cells", preprocess=PRESET)

    row = as_json(found)

    assert row["raw"][1][2] is None
    assert row["score"] is None
    assert row["status"] == "non_finite"


def test_one_spoiled_picture_does_not_spoil_its_batch():
    bright = torch.ones(3, 3, 16, 16)
    net = Signed()
    with torch.no_grad():
        expected = camkit.explain(net, bright, "cells")
    bright[1] = 3e38

    found = camkit.explain(net, bright, "cells")

    assert [row.status for row in found] == ["ok", "non_finite", "ok"]
    assert np.allclose(found[0].raw, expected[0].raw)


def test_saving_an_empty_map_works(tmp_path: Path, photo):
    path = camkit.explain(Signed(-1.0), photo, "cells", preprocess=PRESET).save(tmp_path / "p.png")

    with Image.open(path) as picture:
        assert picture.size == (60, 48)
