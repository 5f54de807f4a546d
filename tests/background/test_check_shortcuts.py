"""What of the backgrounds a model uses, on networks whose use is known by construction."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camkit.background.check import plan_check
from camkit.background.deep.shortcuts import find_shortcut, place_of
from camkit.background.experiment import Experiment

SIDE, PER_CLASS = 48, 14
MARK = (slice(2, 8), slice(38, 44))
"""The rows and columns of a mark at the top right: in red on pictures of class a, and in blue on those of class b."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Discs on grey noise, in two classes that differ in the colour of a mark and in stripes at the bottom."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for label, colour in (("a", (220, 30, 30)), ("b", (30, 30, 220))):
        for number in range(PER_CLASS):
            pixels = np.repeat(rng.integers(90, 160, (SIDE, SIDE, 1)), 3, 2).astype(np.uint8)
            if label == "a":
                pixels[32:, ::4] = 250
                pixels[32:, 2::4] = 5
            disc = (rows - rng.integers(18, 26)) ** 2 + (columns - rng.integers(16, 26)) ** 2 < 25
            pixels[disc] = (60, 200, 60)
            pixels[MARK] = colour
            for kind, picture in (("images", pixels), ("masks", disc.astype(np.uint8) * 255)):
                file = root / kind / label / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(file)
    return root


class ReadsMark(nn.Module):
    """Answers a if the mark's place is much redder than blue."""

    def forward(self, images):
        red, _, blue = images[:, :, *MARK].mean((2, 3)).unbind(1)
        return torch.stack([10 * (red - blue) - 2, torch.zeros_like(red)], 1)


class ReadsStripes(nn.Module):
    """Answers a if neighbouring columns differ in brightness, wherever in the picture they are."""

    def forward(self, images):
        change = images.mean(1).diff(dim=2).abs().mean((1, 2))
        return torch.stack([20 * (change - 0.12), torch.zeros_like(change)], 1)


class ReadsRed(nn.Module):
    """Answers a if the picture as a whole is a little redder than blue."""

    def forward(self, images):
        red, _, blue = images.mean((2, 3)).unbind(1)
        return torch.stack([1000 * (red - blue) - 2, torch.zeros_like(red)], 1)


class ReadsNothing(nn.Module):
    """Answers b whatever it sees."""

    def forward(self, images):
        return images.mean((1, 2, 3))[:, None] * torch.zeros(2) + torch.tensor([0.0, 1.0])


def tensor_of(picture):
    return torch.from_numpy(np.array(picture.convert("RGB")).transpose(2, 0, 1)).float() / 255


def shortcut_of(model: nn.Module, folder: Path, label: str):
    plan = plan_check(
        model.eval(), folder / "images", regions=folder / "masks", preprocess=tensor_of, labels=["a", "b"]
    )
    return find_shortcut(Experiment(plan), label)


def test_a_mark_is_found_with_its_place_and_its_colour(folder):
    shortcut = shortcut_of(ReadsMark(), folder, "a")

    assert shortcut is not None
    assert (shortcut.before, shortcut.after) == (0, shortcut.pasted)
    assert shortcut.place == "at the top right"
    for crop in shortcut.crops:
        assert crop.box.top <= MARK[0].start
        assert crop.box.right >= MARK[1].stop
        assert crop.box.right - crop.box.left <= SIDE / 3
    assert len({crop.name for crop in shortcut.crops}) == 3
    assert shortcut.grey == 0
    assert "without such parts" in " ".join(shortcut.sentences)


def test_the_parts_that_are_shown_come_from_different_groups(folder):
    table = folder / "grouped.csv"
    lines = [
        f"images/{label}/{number}.png,{label},{label}{max(0, number - 11)}" for label in "ab" for number in range(14)
    ]
    table.write_text("\n".join(["path,label,group", *lines]))
    plan = plan_check(ReadsMark().eval(), table, preprocess=tensor_of, labels=["a", "b"])
    shortcut = find_shortcut(Experiment(plan), "a")

    assert shortcut is not None
    groups = {item.name: item.group for item in plan.sample}
    assert sorted(groups[crop.name] for crop in shortcut.crops) == ["a0", "a1", "a2"]


def test_stripes_are_found_and_not_for_their_colour(folder):
    shortcut = shortcut_of(ReadsStripes(), folder, "a")

    assert shortcut is not None
    assert shortcut.after == shortcut.grey > shortcut.before
    assert shortcut.place == "mostly at the bottom"


def test_a_colour_is_found_that_needs_no_shape(folder):
    shortcut = shortcut_of(ReadsRed(), folder, "a")

    assert shortcut is not None
    assert shortcut.after == shortcut.shuffled > shortcut.before == shortcut.grey
    assert shortcut.look == "their colours suffice without texture and shape"


@pytest.mark.parametrize("label", ["a", "b"])
def test_a_model_that_does_not_use_backgrounds_has_no_shortcut(folder, label):
    assert shortcut_of(ReadsNothing(), folder, label) is None


@pytest.mark.parametrize(
    ("window", "place"),
    [
        ((slice(0, 3), slice(0, 3)), "at the top left"),
        ((slice(3, 6), slice(3, 6)), "in the middle"),
        ((slice(3, 6), slice(6, 9)), "at the right"),
        ((slice(0, 9), slice(0, 3)), "mostly at the left"),
        ((slice(3, 6), slice(0, 9)), "mostly in the middle"),
        ((slice(0, 9), slice(0, 9)), "all over the frame"),
    ],
)
def test_a_place_has_a_name(window, place):
    heat = torch.zeros(9, 9)
    heat[window] = 1

    assert place_of(heat) == place
