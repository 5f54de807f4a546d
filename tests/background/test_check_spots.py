"""Hot spots off the objects, on pictures with a mark that nobody names and a network that reads only the mark."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import camkit
from camkit.background.answers import Answer
from camkit.background.data import Item
from camkit.background.deep.spots import find_spots
from camkit.background.heat import HeatMeasures, HeatRow, MapInRegion
from camkit.types import EVEN

SIDE, PER_CLASS = 48, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Green discs on grey noise. 14 of the 20 pictures of class a have a red mark at the bottom left."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for label in "ab":
        for number in range(PER_CLASS):
            pixels = np.repeat(rng.integers(90, 160, (SIDE, SIDE, 1)), 3, 2).astype(np.uint8)
            disc = (rows - rng.integers(12, 20)) ** 2 + (columns - rng.integers(12, 36)) ** 2 < 25
            pixels[disc] = (60, 200, 60)
            if label == "a" and number < 14:
                pixels[38:46, 3:11] = (230, 20, 20)
            for kind, picture in (("images", pixels), ("masks", disc.astype(np.uint8) * 255)):
                file = root / kind / label / f"{number:02}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(file)
    return root


class ReadsRed(nn.Module):
    """Answers a if anything in the picture is red, by one convolution."""

    def __init__(self):
        super().__init__()
        self.cells = nn.Conv2d(3, 2, 6, stride=6)
        with torch.no_grad():
            self.cells.weight.zero_()
            self.cells.weight[0, 0] = 1 / 36
            self.cells.weight[0, 1] = -1 / 36
            self.cells.weight[1, 1] = 1 / 36
            self.cells.weight[1, 0] = -1 / 36
            self.cells.bias.copy_(torch.tensor([0.0, 0.0]))

    def forward(self, images):
        maps = torch.relu(self.cells(images))
        red, green = maps.mean((2, 3)).unbind(1)
        return torch.stack([20 * red, 2 * green], 1)


def tensor_of(picture):
    return torch.from_numpy(np.array(picture.convert("RGB")).transpose(2, 0, 1)).float() / 255


def test_a_mark_that_nobody_names_is_hinted_at_with_its_place_and_changes_no_verdict(folder, tmp_path):
    config = {"check": {"shortcuts": 0, "pastes": 1}, "limits": {"least_pictures": 8}}
    result = camkit.check(
        ReadsRed().eval(), folder / "images", regions=folder / "masks", preprocess=tensor_of, labels=["a", "b"],
        config=config, out=tmp_path,
    )  # fmt: skip
    (spot,) = result.hot_spots

    assert (spot.label, spot.place, spot.of) == ("a", "at the bottom left", PER_CLASS)
    assert {f"a/{number:02}.png" for number in range(14)} <= set(spot.pictures)
    assert "of 20 pictures of a share a hot spot at the bottom left, off the object" in spot.sentence
    assert not any("hot spot" in reason for own in result.judged.values() for reason in own.reasons)
    assert json.loads((tmp_path / "report.json").read_text())["hot_spots"][0]["sentence"] == spot.sentence
    assert "share a hot spot at the bottom left" in (tmp_path / "summary.md").read_text()
    section = result.report.read_text().split('id="hot-spots"')[1].split("</details>")[0]
    assert section.count("<img ") == 4


def rows_of(places, objects):
    """Return items and heat rows of maps with one hot cell on a 6 x 6 grid, and an object in one cell."""
    items = [Item(f"{label}{n}", Path(f"{label}{n}"), label, f"{label}{n}") for label, n in places]
    heat = {}
    for item, place, object_ in zip(items, places.values(), objects, strict=True):
        cells, within = np.zeros(36), np.zeros(36)
        cells[place], within[object_] = 1.0, 9.0
        own = MapInRegion(HeatMeasures(1.0, 1.0, 1.0, 0.1), (6, 6), (18, 18), EVEN, cells, within)
        heat[item.name] = HeatRow(item.name, Answer(0, 1.0, 1.0), "ok", "gradcam", "layer", "", in_region=own)
    return items, heat


def test_a_place_in_the_middle_is_compared_with_other_classes():
    middle = [14, 15, 20, 21]  # the four cells around the centre
    both = {(label, n): middle for label in "ab" for n in range(20)}
    assert find_spots(*rows_of(both, [35] * 40)) == []
    one = {(label, n): middle if label == "a" else 0 if n % 2 else 5 for label in "ab" for n in range(20)}
    (spot,) = find_spots(*rows_of(one, [35] * 40))
    assert (spot.label, spot.place, spot.compared) == ("a", "in the middle", "0 of 20 pictures of other classes do")


def test_heat_at_the_object_is_no_hot_spot():
    left = {("a", n): 0 for n in range(20)}
    assert len(find_spots(*rows_of(left, [35] * 20))) == 1
    assert find_spots(*rows_of(left, [0] * 20)) == []


def test_random_places_seldom_give_a_hint():
    rng, hints = np.random.default_rng(0), 0
    for _ in range(60):
        places = {(label, n): int(rng.integers(36)) for label in "abcd" for n in range(40)}
        hints += bool(find_spots(*rows_of(places, rng.integers(36, size=160).tolist())))
    assert hints <= 3


def test_pictures_of_one_group_count_once():
    items, heat = rows_of({("a", n): 0 for n in range(20)}, [35] * 20)
    assert find_spots([replace(item, group="one") for item in items], heat) == []
