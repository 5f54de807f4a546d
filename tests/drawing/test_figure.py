"""The captioned form of a drawing: its layout, its words, its colour bar, and the scales that maps share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from networks import Net, means, shown_in
from PIL import Image, ImageDraw, ImageFont
from refusals import refused
from tiers import rows_represented
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import to_tensor

import camkit
from camkit.cli import main
from camkit.drawing import text
from camkit.drawing.figure import ColourScale
from camkit.errors import InputError
from camkit.explaining.explanation import Explanations
from camkit.types import Box

PRESET = ImageClassification(crop_size=32, resize_size=32)
INK, GREY, AMBER, LINE = (32, 33, 36), (110, 114, 120), (176, 92, 0), (222, 224, 228)
NAMES = ["bright", "pale", "dark"]


def brightness() -> Net:
    """Return a network whose logits are the mean brightness of the picture, a tenth of it, and its negative."""

    def run(net: Net, images: Tensor) -> Tensor:
        return (net.cells(images) + 3).mean((1, 2, 3))[:, None] * torch.tensor([1.0, 0.1, -1.0])

    return Net(run, cells=nn.AvgPool2d(4))


def explained(photo: Any, target: Any = 0, **options: Any) -> Any:
    settings = {"preprocess": PRESET, "labels": NAMES, "spread": "even", **options}
    return camkit.explain(brightness(), photo, "cells", target=target, **settings)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def find(figure: np.ndarray, part: np.ndarray) -> tuple[int, int] | None:
    """Return the first place where a part stands in a figure exactly, as (x, y), by its most colourful row."""
    height, width = part.shape[:2]
    number = int(part.std((1, 2)).argmax())
    pixels, row = figure.tobytes(), part[number].tobytes()
    start = pixels.find(row)
    while start >= 0:
        y, x = divmod(start // 3, figure.shape[1])
        top = y - number
        if start % 3 == 0 and top >= 0 and np.array_equal(figure[top : top + height, x : x + width], part):
            return x, top
        start = pixels.find(row, start + 1)
    return None


def places(
    figure: np.ndarray, words: str, colour: tuple[int, int, int] = GREY, sizes: Sequence[int] = range(11, 30)
) -> list[tuple[int, int, int]]:
    """Return where exactly these words stand in a figure, as (x, y, font size); drawn here with Pillow alone."""
    found = []
    for size in sizes:
        font = ImageFont.load_default(size)
        sheet = Image.new("RGB", (round(font.getlength(words)) + 20, 60), "white")
        ImageDraw.Draw(sheet).text((10, 30), words, fill=colour, font=font, anchor="lm")
        rows, columns = np.nonzero((np.asarray(sheet) != 255).any(2))
        ink = np.asarray(sheet)[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        place = find(figure, ink)
        if place is not None:
            found.append((*place, size))
    return found


def bar_of(figure: np.ndarray, colormap: int = cv2.COLORMAP_TURBO) -> np.ndarray:
    """Return the rows of the colour bar: in a thin frame, from the paper to the colour of 1."""
    end = cv2.cvtColor(cv2.applyColorMap(np.array([[255]], np.uint8), colormap), cv2.COLOR_BGR2RGB)[0, 0]
    rows = [
        row
        for row in figure
        if (ink := np.nonzero((row != 255).any(1))[0]).size
        and all(np.array_equal(row[place], LINE) for place in (ink[0], ink[-1]))
        and np.array_equal(row[ink[-1] - 1], end)
    ]
    return np.array(rows)


# --- layout

SIZES = [(32, 32), (1, 1), (200, 300), (3000, 4000), (4000, 50), (50, 4000), (1, 700)]
FOWL = "prairie chicken, prairie grouse, prairie fowl " * 4


@pytest.mark.parametrize(
    ("size", "label"),
    rows_represented(
        lambda size, label: label == FOWL if size == (200, 300) else size != (3000, 4000),
        [*((size, "cat") for size in SIZES), *(((200, 300), label) for label in (FOWL, "x" * 500, "エジプトの猫"))],
    ),
)
def test_nothing_overlaps_or_leaves_the_figure_at_any_size(size, label):
    found = explained(noise(*size), labels=[label, "b", "c"], preprocess=PRESET if min(size) > 20 else squashed)
    figure = found.overlay(style="figure")
    picture = found.picture  # the original, or the model's input if the crop of so small a picture cannot be measured
    height, width = picture.shape[:2]
    ratio = min(max(height, width, 320), 960) / max(height, width)
    panel = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    text_width = max(panel[1], 320)
    margin = (figure.shape[1] - text_width) // 2
    assert 16 <= margin <= 24
    assert figure.shape[0] < panel[0] + 380
    for edge in (figure[:, : margin - 1], figure[:, 1 - margin :], figure[: margin - 1], figure[-8:]):
        assert (edge == 255).all()
    resized = cv2.resize(picture, panel[::-1], interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_NEAREST)
    drawn = found.captioned(alpha=0.0)
    left = margin + (text_width - panel[1]) // 2
    dark = (resized * 0.45).astype(int)  # where the model did not see it
    standing = []
    for top in range(drawn.shape[0] - panel[0]):
        part = drawn[top : top + panel[0], left : left + panel[1]]
        if ((part == resized) | (np.abs(part - dark) <= 1)).all():
            standing.append(top)
    assert len(standing) == 1, "the picture itself stands there, undisturbed"
    assert (drawn[standing[0] - 6 : standing[0]] == 255).all(), "no letter touches the picture"
    assert (drawn[standing[0] + panel[0] :][:6] == 255).all()


def squashed(picture: Image.Image) -> Tensor:
    return to_tensor(picture.resize((32, 32), Image.Resampling.BILINEAR))


# --- words


def test_the_figure_says_what_was_explained_and_how(tmp_path):
    Image.fromarray(noise(480, 640)).save(tmp_path / "photo.png")
    found = explained(tmp_path / "photo.png")
    drawn = {"colormap": "viridis", "alpha": 0.7}
    figure = found.overlay(style="figure", **drawn)
    (title,) = places(figure, f"bright: {found.probability:.1%}", INK)
    (method,) = places(figure, "Grad-CAM at layer cells, 8x8 cells")
    (value,) = places(figure, f"logit: {found.score:.3g} \N{MIDDLE DOT} photo.png")
    (meaning,) = places(figure, "Right end of the bar: most evidence for bright; no colour: none.", INK)
    left, top = find(figure, found.overlay(**drawn))
    assert left == (figure.shape[1] - 640) // 2
    assert title[1] < meaning[1] < top < method[1] < value[1]
    assert title[2] > meaning[2] > method[2] == value[2]


@pytest.mark.parametrize(
    ("colormap", "opacity", "said"),
    [
        ("turbo", "evidence", "Red: most evidence for bright; blue: little; no colour: none."),
        ("jet", "even", "Red: most evidence for bright; blue: none."),
        ("bone", "evidence", "Right end of the bar: most evidence for bright; no colour: none."),
        ("bone", "even", "Right end of the bar: most evidence for bright; left end: none."),
    ],
)
def test_the_meaning_is_that_of_the_colours_drawn(colormap, opacity, said):
    figure = explained(noise(480, 640)).overlay(style="figure", colormap=colormap, opacity=opacity)
    assert places(figure, said, INK)


def test_the_colour_bar_has_the_colours_and_the_numbers_of_the_map():
    found = explained(noise(480, 640))
    figure = found.overlay(style="figure", colormap="jet")
    largest = float(enlarged(found).max())
    bar = bar_of(figure, cv2.COLORMAP_JET)
    ink = np.nonzero((bar[0] != 255).any(1))[0]
    ink = np.arange(ink[0] + 1, ink[-1])
    steps = np.rint(np.linspace(0, 1, len(ink)) * 255).astype(np.uint8)
    ramp = cv2.cvtColor(cv2.applyColorMap(steps[None], cv2.COLORMAP_JET), cv2.COLOR_BGR2RGB)[0]
    share = np.minimum(steps / 255 / 0.2, 1)[:, None]
    share = share**2 * (3 - 2 * share)
    assert np.abs(bar[0][ink] - (255 * (1 - share) + ramp * share)).max() <= 4
    even = bar_of(found.overlay(style="figure", colormap="jet", opacity="even"), cv2.COLORMAP_JET)
    assert np.abs(even[0][ink].astype(int) - ramp).max() <= 4
    (zero,) = places(figure, "0", INK)[:1]
    (half,) = places(figure, f"{largest / 2:.3g}", INK)
    (end,) = places(figure, f"{largest:.3g}", INK)
    assert zero[0] < half[0] < end[0]
    assert abs(zero[0] - ink[0]) < 6
    assert end[0] < ink[-1]


@pytest.mark.parametrize(
    ("method", "unit"),
    [
        *((name, camkit.METHODS[name].unit) for name in ("gradcam", "eigencam", "gradcam++", "reciprocam")),
        (lambda activations, gradients: gradients, "Weighted feature maps"),
    ],
)
def test_the_colour_bar_says_what_the_values_of_a_method_are(method, unit):
    figure = explained(noise(480, 640), method=method).overlay(style="figure")
    assert places(figure, f"{unit}. Scaled to this picture.")


def turned(picture: Image.Image) -> Tensor:
    return squashed(picture.rotate(30))


UNSURE = {"layer_reason": "as named; the position of its cells is not certain"}
BOX = {"detection": Box(40, 80, 160, 240)}
EMPTY = {
    "no_positive_evidence": "Empty map: nothing in the picture speaks for this target at this layer.",
    "no_influence": "Empty map: the target's gradient is zero at this layer.",
    "non_finite": "No map: it contains NaN or infinity.",
}


@pytest.mark.parametrize(
    ("preprocess", "changes", "said", "colour"),
    [
        (PRESET, {}, "Dark edge: cut off, so the model did not see it.", GREY),
        (turned, {}, "Drawn on the model's input: camkit cannot tell which", AMBER),
        (squashed, UNSURE, "Unsure: camkit could not measure where in the picture the layer's cells lie.", AMBER),
        (squashed, BOX, "Outlined: the box (left, top, right, bottom: 40, 80, 160, 240).", GREY),
        *((squashed, {"status": status}, said, AMBER) for status, said in EMPTY.items()),
    ],
)
def test_what_the_reader_must_know_is_said_where_it_is_so(preprocess, changes, said, colour):
    found, plain = (explained(noise(480, 640), preprocess=each) for each in (preprocess, squashed))
    figure = replace(found, **changes).overlay(style="figure")
    assert places(figure, said, colour)
    assert not places(plain.overlay(style="figure"), said, colour)
    assert bool(bar_of(figure).size) == ("status" not in changes)


# --- text in any script

WORDS = ["Käfer", "Œuf à la coque", "Египетская кошка", "エジプトの猫", "埃及猫", "이집트 고양이", "Ωμέγα → ∞"]


@pytest.mark.skipif(not hasattr(cv2, "FontFace"), reason="only OpenCV 5 brings fonts for all scripts")
def test_labels_in_other_scripts_are_drawn_with_their_own_letters():
    assert [text.legible(words) for words in WORDS] == WORDS
    labels = [[each, "b", "c"] for words in WORDS for each in (words, words[::-1])]
    titles = {explained(noise(40, 60), labels=each).overlay(style="figure")[:50].tobytes() for each in labels}
    assert len(titles) == 2 * len(WORDS), "a box for each missing letter would look the same"


def test_letters_that_no_font_has_are_escaped():
    assert text.legible("cat\U0001f431\n") == "cat\\U0001f431\\n"
    figure = explained(noise(480, 640), labels=["\U0001f431 cat", "b", "c"]).overlay(style="figure")
    assert places(figure, "\\U0001f431 cat:", INK)


@pytest.mark.parametrize(
    "words", ["a b c d e f g " * 20, "x" * 300, "features.denseblock4.denselayer16.conv1" * 5, "", " "]
)
@pytest.mark.parametrize("width", [30, 150, 400])
def test_wrapped_lines_fit_and_lose_nothing_but_what_is_shortened(words, width):
    lines = text.wrapped(words, width, 13, 3)
    assert len(lines) <= 3
    assert all(text.width_of(line, 13) <= width or line == "..." for line in lines)
    if not any("..." in line for line in lines):
        assert "".join(lines).replace(" ", "") == words.replace(" ", "")


# --- scales


def enlarged(found: camkit.Explanation) -> np.ndarray:
    maps = torch.from_numpy(found.raw).relu()[None, None]
    return functional.interpolate(maps, size=(32, 32), mode="bilinear", align_corners=False)[0, 0].numpy()


def test_targets_of_one_picture_share_a_scale_unless_each_has_its_own():
    strong, weak = explained(noise(32, 32), [0, 1])
    alone = explained(noise(32, 32), 1)
    largest = enlarged(strong).max()
    assert enlarged(weak).max() == pytest.approx(largest / 10, rel=1e-4)
    for found in (strong, weak):
        expected = cv2.applyColorMap(np.rint(enlarged(found) / largest * 255).astype(np.uint8), cv2.COLORMAP_TURBO)
        drawn = found.overlay(style="heatmap")
        assert np.abs(drawn.astype(int) - expected[..., ::-1]).max() <= 8
        assert found.heatmap.max() == 1, "the map itself keeps its own maximum"
    assert np.array_equal(weak.overlay(style="heatmap", scale="each"), alone.overlay(style="heatmap"))
    assert np.array_equal(weak.raw, alone.raw)
    assert strong.colour_scale().limits == weak.colour_scale().limits == pytest.approx((largest,))
    assert str(weak.colour_scale()) == f"0 to {largest:.3g}, one scale for 2 maps"
    assert str(alone.colour_scale()) == f"0 to {largest / 10:.3g}, scaled to this picture"


def test_the_shared_scale_is_drawn():
    strong, weak = explained(noise(480, 640), [0, 1])
    largest, own = enlarged(strong).max(), enlarged(weak).max()
    figure = weak.overlay(style="figure")
    assert places(figure, f"{largest:.3g}", INK)
    assert places(figure, f"Evidence in units of the score. One scale for 2 maps; this one reaches {own:.3g}.")
    bar = bar_of(figure)[0]
    ink, mark = np.nonzero((bar != 255).any(1))[0], np.nonzero((bar == INK).all(1))[0]
    assert mark.mean() == pytest.approx(ink[0] + 0.1 * (ink[-1] - ink[0]), abs=2)
    assert not (bar_of(weak.overlay(style="figure", scale="each"))[0] == INK).all(1).any()


@pytest.mark.parametrize("times", [19, 21])
def test_a_map_below_a_twentieth_of_the_scale_is_said_to_be_invisible(times):
    found = explained(noise(40, 60))
    warnings = found.caption(ColourScale((found.maps.maxima[0] * times,), 2)).warnings
    assert ("The map is too weak to be visible on this scale." in warnings) == (times > 20)


def test_pictures_share_a_scale_on_request(tmp_path):
    photos = [np.full((32, 32, 3), level, np.uint8) for level in (250, 170)]
    found = explained(photos)
    bright, dim = (row.overlay(style="heatmap", scale=found) for row in found)
    assert np.abs(bright[16, 16].astype(int) - [122, 4, 3]).max() <= 1, "the last colour of turbo"
    share = enlarged(found[1]).max() / enlarged(found[0]).max()
    assert share < 0.9
    expected = cv2.applyColorMap(np.array([[round(share * 255)]], np.uint8), cv2.COLORMAP_TURBO)[0, 0, ::-1]
    assert np.abs(dim[16, 16].astype(int) - expected).max() <= 8
    assert np.array_equal(found[1].overlay(style="heatmap"), bright), "by default each picture has its own scale"
    shared = found.sheet(style="heatmap", scale="shared")
    assert not np.array_equal(shared, found.sheet(style="heatmap"))


def test_maps_of_another_layer_do_not_count():
    def branches(net: Net, images: Tensor) -> Tensor:
        maps = net.one(images).relu(), net.second(net.first(images).relu()).relu()
        return torch.cat([head(means(each)) for head, each in zip(net.heads, maps, strict=True)], 1)

    one, first, second = (nn.Conv2d(channels, 4, 3, 2) for channels in (3, 3, 4))
    net = Net(branches, one=one, first=first, second=second, heads=nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]))
    for method in ("gradcam", "refinecam"):
        rows = camkit.explain(net, torch.rand(3, 33, 33), target=[0, 1], method=method)
        assert rows[0].layer != rows[1].layer
        for row in rows:
            assert row.colour_scale().limits == row.colour_scale(rows).limits == row.maps.maxima
            assert row.colour_scale(rows).maps == 1
            row.overlay()  # the layers of RefineCAM are not as many


# --- the map on the picture


def test_the_map_is_aligned_with_the_original_picture():
    found = explained(noise(100, 200))
    placed = found.heatmap_on_picture()
    assert placed.shape == (100, 200)
    assert placed.dtype == np.float32
    assert (placed.min(), placed.max()) == (0, pytest.approx(1, abs=0.02))
    assert not placed[:, np.r_[:50, 150:200]].any(), "the preprocessing cut this off"
    heatmap = torch.from_numpy(found.heatmap)[None, None]
    middle = functional.interpolate(heatmap, size=(100, 100), mode="bilinear", align_corners=False)[0, 0].numpy()
    assert np.abs(placed[:, 50:150] - middle).max() < 0.02
    unseen = np.isnan(found.heatmap_on_picture(unseen=math.nan))
    assert np.array_equal(np.nonzero(unseen.all(0))[0], np.r_[:50, 150:200])
    assert unseen.sum() == 100 * 100
    of_tensor = camkit.explain(brightness(), torch.rand(3, 32, 32), "cells")
    assert np.array_equal(of_tensor.heatmap_on_picture(), of_tensor.heatmap)
    assert not explained(noise(100, 200), 2).heatmap_on_picture().any(), "an empty map is zero everywhere"


# --- volumes


def test_a_volume_is_a_sheet_of_slices():
    volume, cells = torch.zeros(1, 40, 16, 20), nn.Conv3d(1, 2, 3, padding=1, bias=False)
    volume[0, 21, 4:8, 4:8] = 1
    nn.init.constant_(cells.weight, 0.1)
    model = nn.Sequential(cells, nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    found = camkit.explain(model, volume, "0", target=0)
    sheet = found.overlay()
    assert found.heatmap.shape == (40, 16, 20)
    assert sheet.shape == (4 * (160 + 20 + 8) - 8, 4 * 208 - 8, 3)
    numbers = [number for number in range(1, 41) if places(sheet, f"slice {number} of 40", sizes=[13])]
    assert len(numbers) == 16
    depth = 1 + int(found.heatmap.max((1, 2)).argmax())
    assert {1, depth, 40} <= set(numbers), "the ends, and the slice with the strongest heat"
    strongest = numbers.index(depth)
    top, left = strongest // 4 * 188, strongest % 4 * 208
    tile = sheet[top : top + 160, left : left + 200].astype(int)
    hottest = np.unravel_index((tile[..., 0] - tile[..., 2]).argmax(), (160, 200))
    assert all(40 <= place < 80 for place in hottest)
    first = sheet[:160, :200]
    assert (first == first[0, 0]).all(), "the slices without heat stay as they are"
    figure = found.overlay(style="figure")
    assert find(figure, sheet)
    assert places(figure, "Grad-CAM at layer 0, 40x16x20 cells")
    assert "<img" in found._repr_html_()


def test_a_signal_is_refused_and_shown_as_text():
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    found = camkit.explain(net, torch.rand(1, 32), "1")
    with pytest.raises(InputError, match="one axis"):
        found.overlay()
    assert found._repr_html_() is None
    assert Explanations([found])._repr_html_() is None


# --- lists and notebooks


def test_several_explanations_are_a_list_that_can_be_drawn(tmp_path):
    found = explained([noise(40, 60), noise(60, 40, 1)], [0, 1])
    assert isinstance(found, list)
    assert type(found) is type(found[1:]) is Explanations
    assert len(found) == 4
    named = ", ".join(f"{row.name!r} {row.probability:.1%}" for row in found[:3])
    assert repr(found) == f"<4 Explanations: {named}, ...>"
    sheet = found.sheet()
    for row in found:
        assert find(sheet, row.captioned(side=360))
    assert np.array_equal(shown_in(found._repr_html_()), sheet)
    with Image.open(found.save(tmp_path / "new" / "sheet.png")) as picture:
        assert np.array_equal(np.asarray(picture), sheet)
    assert isinstance(camkit.Explainer(brightness(), "cells").batch(torch.rand(2, 3, 32, 32)), Explanations)


def test_a_long_list_shows_its_beginning_and_an_empty_one_nothing():
    found = explained([noise(32, 32, seed) for seed in range(14)])
    html = found._repr_html_()
    assert "and 2 more" in html
    assert np.array_equal(shown_in(html), found[:12].sheet())
    assert repr(found[:1]).startswith("<1 Explanation: ")
    with refused("empty", InputError):
        Explanations().sheet()
    assert repr(Explanations()) == "<0 Explanations>"
    assert Explanations()._repr_html_() is None


def test_one_explanation_shows_its_figure():
    found = explained(noise(40, 60), labels=['<b>"', "b", "c"])
    html = found._repr_html_()
    assert np.array_equal(shown_in(html), found.captioned(side=480))
    assert "<b>" not in html


# --- in a shell


PLANE, CAR, BIRD = (str(camkit.scenes.scene_paths()[name]) for name in ("plane-sky", "car-sea", "bird-wood"))


@pytest.mark.parametrize("scale", ["each", "shared"])
def test_the_scale_in_a_shell(tmp_path, capsys, scale):
    options = ["--model", "demo-fair", "--out", str(tmp_path), "--style", "heatmap", "--scale"]
    assert main([PLANE, CAR, BIRD, *options, scale]) == 0
    rows = camkit.explain("demo-fair", [PLANE, CAR, BIRD])
    for row in rows:
        expected = row.overlay(style="heatmap", scale=rows if scale == "shared" else scale)
        with Image.open(tmp_path / f"{Path(row.source).stem}.gradcam.png") as picture:
            assert np.array_equal(np.asarray(picture), expected)
    printed = capsys.readouterr().out
    assert printed.count("one scale for 3 maps" if scale == "shared" else "scaled to this picture") == 3
    assert main([PLANE, *options, "both"]) == 2
    assert "both" in capsys.readouterr().err
