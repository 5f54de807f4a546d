"""The linear layer on pooled features."""

import json

import numpy as np
import pytest
import torch
from folders import write_masked
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.transforms import v2

import camkit
from camkit.background.probe import PULL, cross_validated, find_shortcut, noted
from camkit.background.report import verdict


def slow_layer(features, labels, shown):
    """Predict the class of rows by least squares over the weights and the biases at once."""
    counts = np.bincount(labels)
    weights = 1 / counts[labels] / np.count_nonzero(counts)
    ones, size = np.ones((len(features), 1)), features.shape[1]
    rows = np.sqrt(weights)[:, None] * np.hstack([features / size**0.5, ones])
    pulled = PULL**0.5 * np.eye(size, size + 1)
    targets = np.vstack([np.sqrt(weights)[:, None] * np.eye(3)[labels], np.zeros((size, 3))])
    layer = np.linalg.lstsq(np.vstack([rows, pulled]), targets, rcond=None)[0]
    return (np.hstack([shown / size**0.5, np.ones((len(shown), 1))]) @ layer).argmax(1)


@pytest.mark.parametrize("size", [3, 40, 100])
def test_each_row_is_predicted_by_the_layer_of_least_loss_on_the_other_groups(size):
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 60, p=[0.6, 0.25, 0.15])
    features = rng.normal(7, 2, (60, size)) + rng.normal(0, 1.5, (3, size))[labels]
    groups = rng.integers(5, size=60)
    expected, units = np.empty(60, int), features / features.std(0)
    for group in range(5):
        own = groups == group
        expected[own] = slow_layer(units[~own], labels[~own], units[own])

    predicted = cross_validated(torch.from_numpy(features), torch.from_numpy(labels), [*map(str, groups)], 0)

    assert predicted.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_class_of_two_groups_is_in_two_parts(seed):
    labels = torch.arange(10).repeat_interleave(4)
    groups = [str(row // 2) for row in range(40)]

    assert cross_validated(torch.nn.functional.one_hot(labels).float(), labels, groups, seed).equal(labels)


@pytest.mark.parametrize("by_box", [True, False])
def test_what_the_box_tells_is_no_gain(by_box):
    rng, labels = np.random.default_rng(0), np.arange(40) % 2
    noise, tells = rng.normal(size=(2, 40, 600)), labels[:, None] + rng.normal(0, 0.1, (40, 5))
    features, boxes = noise[0], tells if by_box else noise[1, :, :5]
    pictures = [(str(label), str(row), features[row], boxes[row]) for row, label in enumerate(labels)]

    found = find_shortcut(pictures, 0)

    assert found.chance == 0.5
    assert (found.box, found.all) == (1, 1) if by_box else found.box < 0.8
    assert found.gain.low < 0 < found.gain.high < 0.5
    assert find_shortcut([*pictures, ("0", "other", features[0][:9], boxes[0])], 0) is None


def test_the_features_of_a_transformer_are_what_its_last_layer_gets():
    model, found, given = VisionTransformer(32, 16, 1, 2, 24, 48).eval(), [], []
    model.heads[0].register_forward_pre_hook(lambda _, args: given.append(args[0].clone()))

    with noted(model, found, 2):
        model(torch.rand(2, 3, 32, 32))

    assert found[0].equal(given[0])


class Sees(nn.Module):
    """Sees how light, how dark, how red and how blue a picture is, and answers by its light and dark pixels alone."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head, self.sees = head, nn.Conv2d(3, 4, 1)
        self.unused = nn.Parameter(torch.zeros(1))
        self.answers = nn.Conv2d(4, 2, 1) if head == "convolution" else nn.Linear(4, 2)
        with torch.no_grad():
            rows = [[1, 1, 1], [-1, -1, -1], [1, 0, -1], [-1, 0, 1]]
            self.sees.weight.copy_(torch.tensor(rows, dtype=torch.float32)[..., None, None])
            self.sees.bias.copy_(torch.tensor([-2.2, 0.6, -0.3, -0.3]))
            weight = torch.tensor([[0.0, 20, 0, 0], [20, 0, 0, 0]])
            self.answers.weight.copy_(weight.view_as(self.answers.weight))

    def forward(self, pictures):
        """Return the logits."""
        maps = self.sees(pictures).relu()
        if self.head == "convolution":
            return self.answers(maps).mean((2, 3))
        tokens = maps.flatten(2).mT
        if self.head == "tokens":
            return self.answers(tokens).mean(1)
        features = tokens.mean(1)
        second = self.head == "pictures second, at times" and pictures[0, 0, 0, 0] > pictures[0, 0, 0, 1]
        answers = self.answers(features[None])[0] if second else self.answers(features)
        features.zero_()
        return answers


@pytest.fixture(scope="module", params=["background", "place", "object alone"])
def folder(request, tmp_path_factory):
    """Return what names the class, and a folder of black and of white discs on red and on blue."""
    path, rng = tmp_path_factory.mktemp("discs"), np.random.default_rng(0)
    rows, columns = np.indices((32, 32))
    for number in range(40):
        name, behind = ("dark", "light")[number % 2], (number if request.param == "background" else number // 2) % 2
        top, left = rng.integers(9, 23, 2)
        left = 8 + number % 2 * 16 if request.param == "place" else left
        inside = (rows - top) ** 2 + (columns - left) ** 2 < 40
        picture = np.clip([(40, 40, 210), (210, 40, 40)][behind] + rng.normal(0, 12, (32, 32, 3)), 0, 255)
        picture[inside] = (10, 245)[number % 2]
        write_masked(path, f"{name}/{number}.png", picture, inside)
    return request.param, path / "pictures"


def checked(model, pictures, batch=32, **options):
    preprocess = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    config = {"limits": {"least_pictures": 8}, "check": {"pastes": 1, "batch_size": batch}}
    return camkit.check(model, pictures, preprocess=preprocess, labels=["dark", "light"], config=config, **options)


@pytest.mark.parametrize("head", ["linear", "tokens", "convolution"])
def test_the_check_tells_of_a_shortcut_that_the_model_does_not_use(folder, head, tmp_path):
    tells, pictures = folder

    result = checked(Sees(head).eval(), pictures, out=tmp_path)

    assert result.overall.accuracy.value == 1
    assert result.overall.gap.value == pytest.approx(0)
    found = result.shortcut
    assert found.box == 1 if tells == "place" else 0.2 < found.box < 0.8
    assert 0.2 < found.all < 0.8 if tells == "object alone" else found.all == 1
    assert (found.gain.low > 0) is (tells == "background")
    assert found.gain.value == pytest.approx(found.all - found.box)
    said = "says that the data has a shortcut to learn" if found.gain.low > 0 else "shows no shortcut in the data"
    assert f"by chance; the gain of {found.gain.value:.2f}" in verdict(result).plain
    assert said in json.loads((tmp_path / "report.json").read_text())["shortcut"]["sentence"]
    for name in ("report.html", "summary.md"):
        assert said in (tmp_path / name).read_text("utf-8")


def test_a_function_has_no_features(folder):
    model = Sees("linear").eval()

    result = checked(camkit.black_box(lambda batch: model(batch).detach().numpy()), folder[1])

    assert result.shortcut is None


def test_features_in_some_passes_only_are_none(folder):
    assert checked(Sees("pictures second, at times").eval(), folder[1], batch=7).shortcut is None
