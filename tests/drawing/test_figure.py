"""The captioned form of a drawing: its layout, its words, its colour bar, and the scales that maps share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from networks import shown_in
from PIL import Image, ImageDraw, ImageFont
from tiers import rows_represented
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.cli import main
from camkit.drawing import text
from camkit.errors import InputError, OutputError
from camkit.explaining.explanation import Explanations

PRESET = ImageClassification(crop_size=32, resize_size=32)
INK, GREY, AMBER = (32, 33, 36), (110, 114, 120), (176, 92, 0)
NAMES = ["bright", "pale", "dark"]


class Brightness(nn.Module):
    """Its logits are the mean brightness of the picture, a tenth of it, and its negative."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(4)

    def forward(self, images: Tensor) -> Tensor:
        brightness = (self.cells(images) + 3).mean((1, 2, 3))
        return brightness[:, None] * torch.tensor([1.0, 0.1, -1.0])


def explained(photo: Any, target: Any = 0, net: nn.Module | None = None, **options: Any) -> Any:
    settings = {"preprocess": PRESET, "labels": NAMES, "spread": "even", **options}
    return camkit.explain(net or Brightness(), photo, "cells", target=target, **settings)


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


def place_of(figure: np.ndarray, panel: np.ndarray) -> tuple[int, int]:
    """Return where a picture stands in a figure, as (x, y)."""
    place = find(figure, panel)
    assert place is not None
    return place


def bar_of(figure: np.ndarray, colormap: int = cv2.COLORMAP_TURBO) -> np.ndarray:
    """Return the rows of the colour bar: those that begin with the colour of 0 and end with that of 1."""
    ends = cv2.cvtColor(cv2.applyColorMap(np.array([[0, 255]], np.uint8), colormap), cv2.COLOR_BGR2RGB)[0]
    rows = [
        row
        for row in figure
        if (ink := np.nonzero((row != 255).any(1))[0]).size
        and np.array_equal(row[ink[0]], ends[0])
        and np.array_equal(row[ink[-1]], ends[1])
    ]
    assert rows
    return np.array(rows)


# --- layout -----------------------------------------------------------------------------------------------------------

SIZES = [(32, 32), (1, 1), (200, 300), (3000, 4000), (4000, 50), (50, 4000), (1, 700)]


LABELS = ["cat", "prairie chicken, prairie grouse, prairie fowl " * 4, "x" * 500, "エジプトの猫"]


@pytest.mark.parametrize(
    ("size", "label"),
    rows_represented(
        lambda size, label: label == LABELS[1] if size == (200, 300) else label == "cat" and size != (3000, 4000),
        [*((size, "cat") for size in SIZES), *(((200, 300), label) for label in LABELS[1:])],
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
    standing = [
        top
        for top in range(drawn.shape[0] - panel[0])
        if is_drawn_from(drawn[top : top + panel[0], left : left + panel[1]], resized)
    ]
    assert len(standing) == 1, "the picture itself stands there, undisturbed"
    assert (drawn[standing[0] - 6 : standing[0]] == 255).all(), "no letter touches the picture"
    assert (drawn[standing[0] + panel[0] :][:6] == 255).all()


def is_drawn_from(drawn: np.ndarray, picture: np.ndarray) -> bool:
    """Tell whether this is a picture, darkened where the model did not see it."""
    dark = (picture * 0.45).astype(np.uint8)
    return bool(((drawn == picture) | (np.abs(drawn.astype(int) - dark) <= 1)).all())


def squashed(picture: Image.Image) -> Tensor:
    return (
        torch.from_numpy(np.asarray(picture.resize((32, 32), Image.Resampling.BILINEAR)).copy()).permute(2, 0, 1) / 255
    )


def test_the_heat_in_a_figure_is_that_of_the_overlay_of_the_same_size():
    found = explained(noise(480, 640))

    figure = found.overlay(style="figure", colormap="viridis", alpha=0.7)

    x, y = place_of(figure, found.overlay(colormap="viridis", alpha=0.7))
    assert (x, y) == ((figure.shape[1] - 640) // 2, y)


def test_a_saved_figure_is_what_is_drawn(tmp_path):
    found = explained(noise(40, 60))

    with Image.open(found.save(tmp_path / "p.png", style="figure")) as picture:
        assert np.array_equal(np.asarray(picture), found.overlay(style="figure"))
    with pytest.raises(OutputError, match="not a file name"):
        found.save("", style="figure")


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_figure_says_what_was_explained_and_how(tmp_path):
    Image.fromarray(noise(480, 640)).save(tmp_path / "photo.png")
    found = explained(tmp_path / "photo.png")
    figure = found.overlay(style="figure")

    title = places(figure, f"bright: {found.probability:.1%}", INK)
    method = places(figure, "Grad-CAM at layer cells, 8x8 cells")
    value = places(figure, f"logit: {found.score:.3g} \N{MIDDLE DOT} photo.png")
    panel = place_of(figure, found.overlay())
    assert len(title) == len(method) == len(value) == 1
    assert title[0][1] < method[0][1] < value[0][1] < panel[1]
    assert title[0][2] > method[0][2] == value[0][2]


def test_the_colour_bar_has_the_colours_and_the_numbers_of_the_map():
    found = explained(noise(480, 640))
    figure = found.overlay(style="figure", colormap="jet")
    largest = functional.interpolate(
        torch.from_numpy(found.raw).relu()[None, None], size=(32, 32), mode="bilinear", align_corners=False
    ).max()

    bar = bar_of(figure, cv2.COLORMAP_JET)
    ink = np.nonzero((bar[0] != 255).any(1))[0]
    steps = np.rint(np.linspace(0, 1, len(ink)) * 255).astype(np.uint8)
    ramp = cv2.cvtColor(cv2.applyColorMap(steps[None], cv2.COLORMAP_JET), cv2.COLOR_BGR2RGB)[0]
    assert np.abs(bar[0][ink].astype(int) - ramp).max() <= 4
    (zero,) = places(figure, "0", INK)[:1]
    (half,) = places(figure, f"{float(largest) / 2:.3g}", INK)
    (end,) = places(figure, f"{float(largest):.3g}", INK)
    assert zero[0] < half[0] < end[0]
    assert abs(zero[0] - ink[0]) < 6
    assert end[0] < ink[-1]
    assert places(figure, "Evidence in units of the score. Scaled to this picture.")


@pytest.mark.parametrize("method", ["eigencam", "gradcam++", "reciprocam"])
def test_the_colour_bar_says_what_the_values_of_a_method_are(method):
    figure = explained(noise(480, 640), method=method).overlay(style="figure")
    assert camkit.METHODS[method].unit != camkit.METHODS["gradcam"].unit
    assert places(figure, f"{camkit.METHODS[method].unit}. Scaled to this picture.")


def test_a_method_of_the_users_own_claims_no_units():
    figure = explained(noise(480, 640), method=lambda activations, gradients: gradients).overlay(style="figure")
    assert places(figure, "Weighted feature maps. Scaled to this picture.")


def empty(photo: np.ndarray) -> camkit.Explanation:
    return explained(photo, target=2)


class Constant(Brightness):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 0


class Spoiled(Brightness):
    def forward(self, images: Tensor) -> Tensor:
        cells = self.cells(images)
        return (cells * math.inf).mean((1, 2, 3))[:, None] * torch.tensor([1.0, 0.1, -1.0])


@pytest.mark.parametrize(
    ("net", "target", "said"),
    [
        (Brightness(), 2, "Empty map: nothing in the picture speaks for this target at this layer."),
        (Constant(), 0, "Empty map: the target's gradient is zero at this layer."),
        (Spoiled(), 0, "No map: it contains NaN or infinity."),
    ],
)
def test_an_empty_map_says_why_and_has_no_colour_bar(net, target, said):
    found = explained(noise(480, 640), target, net)
    figure = found.overlay(style="figure")

    assert places(figure, said, AMBER)
    with pytest.raises(AssertionError):
        bar_of(figure)


def test_the_part_that_the_model_did_not_see_is_explained():
    photo = noise(480, 640)
    said = "Dark edge: cut off, so the model did not see it."

    assert places(explained(photo).overlay(style="figure"), said)
    assert not places(explained(photo, preprocess=squashed).overlay(style="figure"), said)


def test_a_crop_that_cannot_be_followed_is_a_warning():
    def turned(picture: Image.Image) -> Tensor:
        return squashed(picture.rotate(30))

    figure = explained(noise(480, 640), preprocess=turned).overlay(style="figure")

    assert places(figure, "Drawn on the model's input: camkit cannot tell which", AMBER)


def test_a_layer_whose_cells_could_not_be_located_is_a_warning():
    found = explained(noise(480, 640))
    unsure = camkit.Explanation(**{**vars(found), "layer_reason": "as named; the position of its cells is not certain"})

    assert places(
        unsure.overlay(style="figure"),
        "Unsure: camkit could not measure where in the picture the layer's cells lie.",
        AMBER,
    )


class Detector(nn.Module):
    """Finds two boxes; their scores are shares of the brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(4)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        boxes = torch.tensor([[4.0, 8, 16, 24], [1, 1, 30, 30]])
        scores = torch.sigmoid((self.cells(images) + 3).mean((1, 2, 3)))
        return [
            {"boxes": boxes, "labels": torch.tensor([0, 1]), "scores": score * torch.tensor([0.9, 0.5])}
            for score in scores
        ]


def test_a_detection_has_its_score_and_its_box():
    found = explained(noise(320, 320), camkit.targets.box(0), Detector())
    figure = found.overlay(style="figure")

    assert found.detection == (40, 80, 160, 240)
    assert places(figure, f"bright: {found.probability:.1%}", INK)
    assert places(figure, f"score of the box: {found.score:.3g} \N{MIDDLE DOT} picture 1")
    assert places(figure, "Outlined: the detected box (left, top, right,")
    assert found.caption().remarks[0].endswith("right, bottom: 40, 80, 160, 240).")


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(4)

    def forward(self, images: Tensor) -> Tensor:
        left = torch.linspace(1, -1, 8)
        maps = (self.cells(images).mean(1, keepdim=True) + 3) * torch.stack([left, -left, left * 0 - 1])[:, None]
        return functional.interpolate(maps, size=images.shape[2:])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (camkit.targets.segment(0), "mean logit where the class is predicted"),
        (camkit.targets.segment(2), "mean logit of all cells, since the class is predicted nowhere"),
        (camkit.targets.segment(0, np.eye(32)), "mean logit inside the mask"),
        (camkit.targets.segment(0, everywhere=True), "mean logit of all cells"),
        (camkit.targets.contrast(0, 1), "difference of the two logits"),
        (camkit.targets.direction("-", 1), "output, with this sign"),
        (0, "logit"),
        (lambda output: output[:, 0], "value of the target function"),
    ],
)
def test_what_the_score_is(target, said):
    is_segment = isinstance(target, camkit.targets.SegmentTarget)
    found = explained(noise(480, 640), target, Segmenter() if is_segment else Brightness())

    assert found.quantity == said
    assert places(found.overlay(style="figure"), f"{said}: {found.score:.3g} \N{MIDDLE DOT} picture 1")
    if isinstance(target, camkit.targets.ContrastTarget):
        assert found.caption().title == "bright rather than pale"


def test_a_probability_is_called_one():
    class Probabilities(Brightness):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images).softmax(1)

    found = explained(noise(40, 60), 0, Probabilities())

    assert found.caption().lines[1].startswith(f"probability, as the model returns it: {found.score:.3g}")


@pytest.mark.parametrize(
    ("probability", "said"), [(0.731, "73.1%"), (0.0, "0%"), (2e-5, "<0.1%"), (0.99999, ">99.9%"), (1.0, "100%")]
)
def test_a_probability_is_not_rounded_to_certainty(probability, said):
    found = camkit.Explanation(**{**vars(explained(noise(40, 60))), "probability": probability})

    assert found.caption().title == f"bright: {said}"


# --- text in any script -----------------------------------------------------------------------------------------------

WORDS = ["Käfer", "Œuf à la coque", "Египетская кошка", "エジプトの猫", "埃及猫", "이집트 고양이", "Ωμέγα → ∞"]


@pytest.mark.skipif(not hasattr(cv2, "FontFace"), reason="only OpenCV 5 brings fonts for all scripts")
def test_labels_in_other_scripts_are_drawn_with_their_own_letters():
    drawn = []
    for words in WORDS:
        assert text.legible(words) == words
        drawn.append(title_of(words))
        reverse = title_of(words[::-1])
        assert not np.array_equal(drawn[-1], reverse), "a box for each missing letter would look the same"
    assert len({picture.tobytes() for picture in drawn}) == len(WORDS)


def title_of(label: str) -> np.ndarray:
    return np.asarray(explained(noise(40, 60), labels=[label, "b", "c"]).overlay(style="figure"))[:50]


def test_letters_that_no_font_has_are_escaped():
    assert text.legible("cat\U0001f431\n") == "cat\\U0001f431\\n"
    assert places(
        explained(noise(480, 640), labels=["\U0001f431 cat", "b", "c"]).overlay(style="figure"),
        "\\U0001f431 cat: 0.0%"[:15],
        INK,
    )


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


# --- scales -----------------------------------------------------------------------------------------------------------


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
    bar = bar_of(figure)
    ink = np.nonzero((bar[0] != 255).any(1))[0]
    mark = np.nonzero((bar[0] == INK).all(1))[0]
    assert mark.mean() == pytest.approx(ink[0] + 0.1 * (ink[-1] - ink[0]), abs=2)
    assert not (bar_of(weak.overlay(style="figure", scale="each"))[0] == INK).all(1).any()


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
    assert np.array_equal(found.sheet(style="heatmap", scale="each"), found.sheet(style="heatmap"))


def test_maps_of_another_layer_do_not_count():
    photo = noise(32, 32)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    first, second = (camkit.explain(net, photo, layer, preprocess=PRESET) for layer in ("1", "3"))

    assert first.colour_scale([first, second]).limits == first.maps.maxima
    assert second.colour_scale([first, second]).maps == 1


def test_targets_of_one_picture_at_different_layers_have_scales_of_their_own():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.first, self.second = (nn.Conv2d(3, 4, 3, 2), nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, 2))
            self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

        def forward(self, picture: Tensor) -> Tensor:
            maps = self.one(picture).relu(), self.second(self.first(picture).relu()).relu()
            return torch.cat([head(each.mean((2, 3))) for head, each in zip(self.heads, maps, strict=True)], 1)

    for method in ("gradcam", "refinecam"):
        rows = camkit.explain(Branches().eval(), torch.rand(3, 33, 33), target=[0, 1], method=method)
        assert rows[0].layer != rows[1].layer
        for row in rows:
            assert row.colour_scale().limits == row.maps.maxima
            row.overlay()  # the layers of RefineCAM are not as many


@pytest.mark.parametrize("wrong", ["both", "picture", ""])
def test_an_unknown_scale_is_one_sentence(wrong):
    with pytest.raises(InputError, match="scale is 'shared', 'each' or a list"):
        explained(noise(32, 32)).overlay(scale=wrong)


# --- the map on the picture -------------------------------------------------------------------------------------------


def test_the_map_is_aligned_with_the_original_picture():
    photo = noise(100, 200)
    found = explained(photo)

    placed = found.heatmap_on_picture()

    assert placed.shape == (100, 200)
    assert placed.dtype == np.float32
    assert (placed.min(), placed.max()) == (0, pytest.approx(1, abs=0.02))
    assert not placed[:, :50].any(), "the preprocessing cut this off"
    assert not placed[:, 150:].any()
    middle = functional.interpolate(
        torch.from_numpy(found.heatmap)[None, None], size=(100, 100), mode="bilinear", align_corners=False
    )[0, 0].numpy()
    assert np.abs(placed[:, 50:150] - middle).max() < 0.02
    unseen = np.isnan(found.heatmap_on_picture(unseen=math.nan))
    assert np.array_equal(np.nonzero(unseen.all(0))[0], np.r_[:50, 150:200])
    assert unseen.sum() == 100 * 100


def test_the_map_of_a_tensor_is_its_heatmap():
    found = camkit.explain(Brightness(), torch.rand(3, 32, 32), "cells")

    assert np.array_equal(found.heatmap_on_picture(), found.heatmap)


def test_an_empty_map_on_the_picture_is_zero():
    assert not explained(noise(100, 200), 2).heatmap_on_picture().any()


# --- volumes ----------------------------------------------------------------------------------------------------------


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv3d(1, 2, 3, padding=1)
        nn.init.constant_(self.cells.weight, 0.1)
        nn.init.zeros_(self.cells.bias)

    def forward(self, volumes: Tensor) -> Tensor:
        return self.cells(volumes).relu().mean((2, 3, 4))


def test_a_volume_is_a_sheet_of_slices():
    volume = torch.zeros(1, 40, 16, 20)
    volume[0, 21, 4:8, 4:8] = 1
    found = camkit.explain(Volume(), volume, "cells", target=0)

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
    row, column = np.unravel_index((tile[..., 0] - tile[..., 2]).argmax(), (160, 200))
    assert 40 <= row < 80
    assert 40 <= column < 80
    first = sheet[:160, :200]
    assert (first == first[0, 0]).all(), "the slices without heat stay as they are"
    figure = found.overlay(style="figure")
    place_of(figure, sheet)
    assert places(figure, "Grad-CAM at layer cells, 40x16x20 cells")
    assert "<img" in found._repr_html_()


def test_a_signal_is_refused_and_shown_as_text():
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    found = camkit.explain(net, torch.rand(1, 32), "1")

    with pytest.raises(InputError, match="one axis"):
        found.overlay()
    assert found._repr_html_() is None
    assert Explanations([found])._repr_html_() is None


# --- lists and notebooks ----------------------------------------------------------------------------------------------


def test_several_explanations_are_a_list_that_can_be_drawn(tmp_path):
    found = explained([noise(40, 60), noise(60, 40, 1)], [0, 1])

    assert isinstance(found, list)
    assert type(found[1:]) is Explanations
    assert isinstance(found[-1], camkit.Explanation)
    assert type(found) is Explanations
    assert len(found) == 4
    assert (
        repr(found)
        == "<4 Explanations: " + ", ".join(f"{row.name!r} {row.probability:.1%}" for row in found[:3]) + ", ...>"
    )
    sheet = found.sheet()
    figures = [row.captioned(side=360) for row in found]
    for figure in figures:
        place_of(sheet, figure)
    assert np.array_equal(shown_in(found._repr_html_()), sheet)
    with Image.open(found.save(tmp_path / "new" / "sheet.png")) as picture:
        assert np.array_equal(np.asarray(picture), sheet)
    assert isinstance(camkit.Explainer(Brightness(), "cells").batch(torch.rand(2, 3, 32, 32)), Explanations)


def test_a_long_list_shows_its_beginning():
    found = explained([noise(32, 32, seed) for seed in range(14)])

    html = found._repr_html_()
    assert "and 2 more" in html
    assert np.array_equal(shown_in(html), Explanations(found[:12]).sheet())
    with pytest.raises(InputError, match="empty"):
        Explanations().sheet()
    assert repr(Explanations()) == "<0 Explanations>"
    assert repr(found[:1]).startswith("<1 Explanation: ")
    assert Explanations()._repr_html_() is None


def test_one_explanation_shows_its_figure():
    found = explained(noise(40, 60), labels=['<b>"', "b", "c"])

    html = found._repr_html_()
    assert np.array_equal(shown_in(html), found.captioned(side=480))
    assert "<b>" not in html


# --- in a shell -------------------------------------------------------------------------------------------------------


def test_a_shell_writes_figures(tmp_path, capsys):
    plane = camkit.scenes.scene_paths()["plane-sky"]

    assert (
        main([str(plane), "--model", "demo-fair", "--out", str(tmp_path), "--target", "plane", "--target", "car"]) == 0
    )

    found = camkit.explain("demo-fair", plane, target=["plane", "car"])
    for row, name in zip(found, ("1-plane", "2-car"), strict=True):
        with Image.open(tmp_path / f"plane-sky.gradcam.{name}.png") as picture:
            assert np.array_equal(np.asarray(picture), row.overlay(style="figure"))
    printed = capsys.readouterr().out
    assert printed.count(f"colours from {found[0].colour_scale()}\n") == 2 - (found[1].status != "ok")


@pytest.mark.parametrize("scale", ["each", "shared"])
def test_the_scale_in_a_shell(tmp_path, capsys, scale):
    names = ("plane-sky", "car-sea", "bird-wood")
    files = [str(camkit.scenes.scene_paths()[name]) for name in names]

    assert main([*files, "--model", "demo-fair", "--out", str(tmp_path), "--scale", scale, "--style", "heatmap"]) == 0

    rows = camkit.explain("demo-fair", files)
    for row, name in zip(rows, names, strict=True):
        with Image.open(tmp_path / f"{name}.gradcam.png") as picture:
            assert np.array_equal(
                np.asarray(picture), row.overlay(style="heatmap", scale=rows if scale == "shared" else scale)
            )
    printed = capsys.readouterr().out
    assert printed.count("one scale for 3 maps" if scale == "shared" else "scaled to this picture") == 3


def test_a_wrong_scale_is_exit_code_2(capsys):
    assert main(["x.png", "--model", "demo-fair", "--scale", "both"]) == 2
    assert "both" in capsys.readouterr().err
