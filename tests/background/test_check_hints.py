"""The hints of the heat without regions: pure functions on made-up maps, and a network that reads one corner."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import camkit
from camkit.background.answers import Answer
from camkit.background.data import Item
from camkit.background.hints import hints
from camkit.background.heat import HeatInRing, HeatRow
from camkit.background.sanity import MirrorTest, compare_mirrored
from camkit.demo.scenes import write_scenes

GREY = np.full(192, 0.5)


def rows_of(count, **more):
    items = [Item(f"cat/{number}.png", Path("cat.png"), "cat", f"cat/{number}.png") for number in range(count)]
    noise = np.random.default_rng(0)
    rows = {}
    for number, item in enumerate(items):
        random = {"share": 0.3, "area": 0.5, "hottest": (number % 7, number % 5), "patch": noise.random(192)}
        ring = HeatInRing(**{**random, **more})
        rows[item.name] = HeatRow(item.name, Answer(0, 1.0, 1.0), "ok", "gradcam", "layer", "", in_ring=ring)
    return items, rows


def test_evenly_spread_heat_gives_no_hint():
    assert hints(*rows_of(40), None, 0) == []


def test_heat_in_the_ring_gives_a_hint():
    (hint,) = hints(*rows_of(40, share=0.8), None, 0)

    assert "80% of the heat lies in the outer ring, which is 50%" in hint


def test_the_same_hottest_cell_gives_a_hint_only_with_the_same_pixels():
    (hint,) = hints(*rows_of(40, hottest=(0, 6), patch=GREY), None, 0)

    assert "cat: in 40 of 40 pictures" in hint
    assert "row 1, column 7" in hint
    assert hints(*rows_of(40, hottest=(0, 6)), None, 0) == []


def test_few_pictures_give_no_hint():
    assert hints(*rows_of(9, share=0.9, hottest=(0, 0), patch=GREY), None, 0) == []


def test_maps_give_a_hint_only_if_they_do_not_follow_mirrored_pictures():
    assert hints(*rows_of(40), MirrorTest(followed=0.9, stayed=0.1), 0) == []
    assert "stays put" in hints(*rows_of(40), MirrorTest(followed=0.1, stayed=0.9), 0)[0]


def test_maps_of_mirrored_pictures_are_compared_as_defined():
    maps = [np.random.default_rng(number).random((5, 7)) for number in range(8)]

    follows = compare_mirrored(maps, [heat[:, ::-1] for heat in maps])
    stays = compare_mirrored(maps, maps)

    assert follows.followed == pytest.approx(1)
    assert stays.stayed == pytest.approx(1)
    assert stays.followed == follows.stayed < 0.8
    assert compare_mirrored([heat + heat[:, ::-1] for heat in maps], maps) is None  # symmetrical maps cannot tell


class ReadsOneCorner(nn.Module):
    """Tells two classes apart by the colour of the top left corner."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 2, 8, stride=8, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        corner = torch.zeros(64, 64)
        corner[:8, :8] = 1
        self.register_buffer("corner", corner)
        with torch.no_grad():
            self.features.weight.zero_()
            self.features.weight[0, 0] = self.features.weight[1, 2] = 1 / 64  # red, blue
            self.head.weight.copy_(torch.tensor([[9.0, -9.0], [-9.0, 9.0]]))

    def forward(self, images):
        return self.head(self.features(images * self.corner).amax((2, 3)))


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marked")
    random = np.random.default_rng(0)
    for label, colour in (("blue", (0, 0, 250)), ("red", (250, 0, 0))):
        (folder / label).mkdir()
        for number in range(30):
            pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            pixels[:8, :8] = colour
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_a_network_that_reads_a_mark_in_the_corner_gets_every_hint(marked):
    preprocess = v2.Compose([v2.RGB(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    result = camkit.check(
        ReadsOneCorner().eval(), marked, preprocess=preprocess, labels=["red", "blue"],
        config={"check": {"layer": "features", "pastes": 1}},
    )  # fmt: skip

    reasons = " ".join(result.reasons)
    assert result.verdict == "WARN"
    assert "100% of the heat lies in the outer ring" in reasons
    assert all(f"{label}: in 30 of 30 pictures" in reasons for label in ("red", "blue"))
    assert "stays put" in reasons
    assert "of the pictures with outer rings of their own class and 0% with outer rings of other classes" in reasons


@pytest.mark.extended
def test_a_network_that_reads_the_objects_gets_no_hint(tmp_path):
    pictures = write_scenes(tmp_path, 12)
    result = camkit.check("demo-fair", pictures, config={"check": {"pastes": 1}, "data": {"regions": None}})

    assert not any("a hint" in reason for reason in result.reasons)
