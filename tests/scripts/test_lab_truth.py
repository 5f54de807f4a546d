"""The planted-truth lab: its truths are the pixels that make the class, and its figures equal their definitions."""

import itertools
import json

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.extended

pytest.importorskip("timm")

from scripts.truth.truth_measures import auroc, measured_rows, removed_and_kept, right_of_two, share_of_maxima, subject
from scripts.truth.truth_networks import Training, train
from scripts.truth.truth_scenes import CAUSES, PALETTE, SIDE, draw, has_pairs

COUNT = 200
PAIRS = [cause for cause in CAUSES if has_pairs(cause)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mean_inside(scenes, mask):
    """Return the mean colour (N, 3) of the pixels of a mask (N, 64, 64)."""
    return (scenes.images.float() * mask[:, None]).sum((2, 3)) / mask.sum((1, 2))[:, None]


def nearest(colours):
    """Return the class whose colour is nearest, whatever the brightness, and the cosine of the angle to it."""
    palette = torch.nn.functional.normalize(torch.tensor(PALETTE), dim=1)
    cosines = torch.nn.functional.normalize(colours, dim=1) @ palette.T
    return cosines.argmax(1), cosines.amax(1)


@pytest.mark.parametrize("cause", CAUSES)
def test_scenes_have_every_class_and_a_truth_of_the_right_size(cause):
    scenes = draw(cause, COUNT, generator())
    shares = scenes.truths.double().mean((2, 3))
    least, most = {"background": (0.7, 0.97), "mark": (0.002, 0.009), "relation": (0.04, 0.14)}.get(cause, (0.01, 0.07))
    assert scenes.images.shape == (COUNT, 3, SIDE, SIDE)
    assert scenes.labels.unique().tolist() == list(range(CAUSES[cause]))
    assert least < shares.min() <= shares.max() < most
    assert torch.equal(draw(cause, COUNT, generator()).images, scenes.images)


@pytest.mark.parametrize("cause", ["colour", "mark"])
@pytest.mark.parametrize("pair", [False, True])
def test_the_truth_has_the_class_s_colour(cause, pair):
    scenes = draw(cause, COUNT, generator(), pair=pair)
    for number in range(scenes.labels.shape[1]):
        named, _ = nearest(mean_inside(scenes, scenes.truths[:, number]))
        assert torch.equal(named, scenes.labels[:, number])


@pytest.mark.parametrize("cause", ["colour", "mark"])
def test_nothing_outside_the_truth_has_the_class_s_colour(cause):
    scenes = draw(cause, COUNT, generator())
    pixels = scenes.images.float().permute(0, 2, 3, 1)
    vivid = pixels.amax(3) - pixels.amin(3) > 90
    named, _ = nearest(pixels.reshape(-1, 3))
    like_class = vivid & (named.reshape(COUNT, SIDE, SIDE) == scenes.labels[:, :, None])
    assert (like_class & ~scenes.truths[:, 0]).double().mean() < 2e-4
    assert (like_class & scenes.truths[:, 0]).sum() > 0.9 * scenes.truths.sum()


def test_the_relation_is_that_of_the_ball_to_the_square():
    scenes = draw("relation", COUNT, generator())
    pixels, truth = scenes.images.float(), scenes.truths[:, 0]
    along = torch.arange(SIDE)
    ball, square = truth & (pixels[:, 0] > pixels[:, 1] + 30), truth & (pixels[:, 1] > pixels[:, 0] + 30)
    (ball_column, ball_row), (square_column, square_row) = (
        ((mask * along).sum((1, 2)) / mask.sum((1, 2)), (mask * along[:, None]).sum((1, 2)) / mask.sum((1, 2)))
        for mask in (ball, square)
    )
    right, below = ball_column - square_column, ball_row - square_row
    assert torch.equal(torch.stack([-right, right, -below, below], 1).argmax(1), scenes.labels[:, 0])
    assert (truth == ball | square).double().mean() > 0.999


def test_a_texture_is_only_inside_the_truth():
    scenes = draw("texture", COUNT, generator())
    bright = scenes.images.float().amax(1)
    within = [bright[number][scenes.truths[number, 0]].std() for number in range(COUNT)]
    assert min(within) > 25
    # Rows differ between neighbours above each other, columns between neighbours beside each other.
    inside_down = scenes.truths[:, 0, 1:] & scenes.truths[:, 0, :-1]
    inside_across = scenes.truths[:, 0, :, 1:] & scenes.truths[:, 0, :, :-1]
    down = (bright.diff(dim=1).abs() * inside_down).sum((1, 2)) / inside_down.sum((1, 2))
    across = (bright.diff(dim=2).abs() * inside_across).sum((1, 2)) / inside_across.sum((1, 2))
    assert (down > across)[scenes.labels[:, 0] == 0].all()
    assert (across > down)[scenes.labels[:, 0] == 1].all()


def test_the_background_has_the_tint_of_its_class_and_the_objects_do_not_belong_to_it():
    scenes = draw("background", COUNT, generator())
    tinted = scenes.labels[:, 0] < 3
    mean = mean_inside(scenes, scenes.truths[:, 0])
    pixels = scenes.images.float()
    vivid = pixels.amax(1) - pixels.amin(1) > 130
    assert torch.equal(mean[tinted].argmax(1), scenes.labels[tinted, 0])
    assert (vivid & scenes.truths[:, 0]).double().mean() < 1e-3
    assert (vivid & ~scenes.truths[:, 0]).sum() > 0.5 * (~scenes.truths).sum()


@pytest.mark.parametrize("cause", PAIRS)
def test_a_pair_shows_two_classes_apart(cause):
    scenes = draw(cause, COUNT, generator(), pair=True)
    assert (scenes.labels[:, 0] != scenes.labels[:, 1]).all()
    assert scenes.truths.any(2).any(2).all()
    assert not (scenes.truths[:, 0] & scenes.truths[:, 1]).any()


def test_auroc_counts_pairs_of_pixels():
    heat = torch.randint(4, (6, 5, 5), generator=generator()).float()
    truths = torch.rand(6, 5, 5, generator=generator(1)) < 0.4
    for number in range(6):
        inside, outside = heat[number][truths[number]].tolist(), heat[number][~truths[number]].tolist()
        pairs = [(one > two) + 0.5 * (one == two) for one, two in itertools.product(inside, outside)]
        assert auroc(heat, truths)[number] == pytest.approx(np.mean(pairs))
    assert auroc(heat, torch.zeros_like(truths)).isnan().all()


def test_the_other_figures_equal_their_definitions():
    truths = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    truths[0, 0, 0], truths[0, 1, 3] = True, True
    heat = torch.zeros(1, 4, 4)
    heat[0, 0, 1] = heat[0, 2, 2] = 1.0
    assert share_of_maxima(heat, truths[:, 0]).tolist() == [0.5]
    assert right_of_two([heat, heat], truths).tolist() == [1.0, 0.0]
    assert right_of_two([0 * heat, heat], truths).tolist() == [0.5, 0.0]


def test_removing_what_a_network_reads_changes_its_answer():
    class Red(torch.nn.Module):
        def forward(self, inputs):
            red = inputs[:, 0].amax((1, 2))
            return torch.stack([5 * red, 5 - 5 * red], 1)

    inputs = torch.zeros(2, 3, SIDE, SIDE)
    inputs[:, 0, 10:14, 10:14] = 1.0
    heat = inputs[:, 0]
    labels = torch.zeros(2, dtype=torch.long)
    deletion, insertion = removed_and_kept(Red(), inputs, labels, heat)
    assert deletion.max() < 0.01
    assert insertion.min() > 0.99
    deletion, _ = removed_and_kept(Red(), inputs, labels, -heat)
    assert deletion.min() > 0.99


@pytest.mark.parametrize("kind", ["ViT, 4 registers", "ResNet, last grid 2 x 2"])
def test_a_network_trains_and_is_measured(kind):
    cause = "colour"
    network, reached = train(kind, cause, torch.device("cpu"), Training((2,), 8, 32, 40), width=32)
    judged = subject(network, cause, 2, generator())
    rows = measured_rows(judged, 1)
    by_method = {row["method"]: row for row in rows}
    assert 0 <= reached <= 1
    assert not network.training
    assert {"random", "gradcam", "eigencam", "scorecam"} <= set(by_method)
    assert "refusal" not in by_method["expected"]
    assert ("refusal" in by_method["chefer"]) == kind.startswith("ResNet")
    assert 0 <= by_method["gradcam"]["auroc"] <= 1
    assert json.loads(json.dumps(rows))
