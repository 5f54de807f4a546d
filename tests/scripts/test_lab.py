"""The validation of the check: pictures have the shortcut they should have, and figures equal their formulas."""

import itertools

import numpy as np
import pytest
import torch

from scripts.lab.lab_photos import LOOKED_AT_WORLDS, PARTS, WORLDS, Composed, compose, photos_of
from scripts.lab.lab_report import auroc, detection, interval, is_held_out, kind
from scripts.lab.lab_scenes import LAYOUTS, ONE_CLASS, SHORTCUTS, SIDE, Parts, Recipe, draw
from scripts.lab.simulate_check import SCENARIOS, Scenario, draw_rows, simulate_all
from scripts.lab.validate_check import model_specs
from scripts.lab.validate_photos import Part, folder_rows, true_behaviour
from scripts.lab.validate_photos import model_specs as photo_specs

COUNT = 400


@pytest.fixture(scope="module")
def parts():
    """Return discs with one brightness per class, and backgrounds with one colour per kind."""
    across = (torch.arange(48) - 23.5) ** 2
    disc = (across[:, None] + across < 20**2).to(torch.uint8)
    shades = torch.arange(4).repeat(8)[:, None, None, None]
    sprites = torch.cat(
        [(60 + 60 * shades).to(torch.uint8).expand(32, 3, 48, 48) * disc, (255 * disc).expand(32, 1, 48, 48)], 1
    )
    grain = torch.randint(0, 100, (32, 3, 48, 48), generator=torch.Generator().manual_seed(0))
    backdrops = (60 + 25 * shades * torch.ones(32, 3, 48, 48) + grain / 2).to(torch.uint8)
    return Parts(sprites.contiguous(), backdrops)


def drawn(parts, shortcut, correlation, layout="usual"):
    recipe = Recipe(shortcut, correlation, layout)
    return draw(parts, recipe, COUNT, torch.Generator().manual_seed(0), measuring=False)


def looks(shortcut, images):
    """Return the number in which a shortcut shows."""
    if shortcut == "corner":
        return images[:, 0, 3:7, 3:7].mean((1, 2)) - images[:, 2, 3:7, 3:7].mean((1, 2))
    if shortcut == "frame":
        return images[:, 0, :2].mean((1, 2)) - images[:, 2, :2].mean((1, 2))
    if shortcut == "tint":
        return images[:, 0].mean((1, 2)) / images[:, 2].mean((1, 2))
    if shortcut == "blur":
        return images[:, :, :5].diff(dim=3).square().mean((1, 2, 3)).log()
    return images[:, :, :3].mean((1, 2, 3))


def share_by_class(values, labels):
    """Return the share of the variance between classes (eta squared)."""
    means = torch.stack([values[labels == label].mean() for label in range(4)])
    return float(means.var(unbiased=False) / values.var(unbiased=False))


@pytest.mark.extended
@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_a_shortcut_goes_with_the_class_at_the_given_rate(parts, shortcut):
    shares = []
    for correlation in (0.0, 0.5, 1.0):
        found = drawn(parts, shortcut, correlation)
        shares.append(share_by_class(looks(shortcut, found.images), found.labels))
    assert shares[0] < 0.05 < shares[1] < shares[2]
    assert shares[2] > 0.6


def test_the_watermark_is_on_the_first_class_only(parts):
    found = drawn(parts, ONE_CLASS, 1.0)
    mark = torch.tensor([0.9, 0.15, 0.1])[:, None, None]
    marked = (found.images[:, :, 2:8, 2:8] - mark).abs().amax((1, 2, 3)) < 0.01
    assert torch.equal(marked, found.labels == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_covers_are_where_the_objects_are(parts, layout):
    found = drawn(parts, "background", 0.0, layout)
    share = found.opacities.mean((1, 2))
    assert found.images.shape == (COUNT, 3, SIDE, SIDE)
    assert bool((share > 0.01).all())
    assert bool((found.opacities.amax((1, 2)) > 0.9).all())
    assert float(share.mean()) < 0.06 if layout == "tiny" else float(share.mean()) > 0.06


@pytest.mark.parametrize(("specs", "least", "kept"), [
    (model_specs, 120, lambda spec: spec.correlation == 0), (photo_specs, 100, lambda spec: spec.held_out)
])  # fmt: skip
def test_there_are_enough_models_with_unique_names(specs, least, kept):
    found = list(specs())
    assert len({spec.name for spec in found}) == len(found) >= least
    assert sum(map(kept, found)) >= 40


def test_the_auroc_is_the_share_of_pairs_in_order():
    random = np.random.default_rng(0)
    biased, clean = random.integers(0, 9, 40).tolist(), random.integers(-4, 6, 30).tolist()
    pairs = [(one > other) + 0.5 * (one == other) for one, other in itertools.product(biased, clean)]
    assert auroc(biased, clean) == pytest.approx(np.mean(pairs))
    low, high = interval(biased, clean)
    assert low < auroc(biased, clean) < high


def test_detection_keeps_the_share_of_false_alarms():
    clean = np.arange(100.0)
    assert detection(np.array([93.0, 96.0, 200.0, 300.0]), clean) == 0.75


def test_models_used_for_tuning_are_not_held_out():
    row = {"matched": 0.9, "redrawn": 0.4, "architecture": "separable", "shortcut": "tint"}
    assert kind(row) == "biased"
    assert is_held_out(row)
    assert not is_held_out({**row, "shortcut": "corner"})
    assert not is_held_out({**row, "architecture": "plain"})
    assert is_held_out({**row, "redrawn": 0.9, "shortcut": "background"})


@pytest.mark.extended
def test_simulated_checks_make_few_wrong_statements():
    at_limit = next(scenario for scenario in SCENARIOS if scenario.name == "at the limit")
    (summary,) = simulate_all([at_limit], checks=60, workers=1)
    assert summary.wrongly_excluded <= 0.10  # 5 % of 60 checks are 3; more than 6 have a probability of 3 %
    assert summary.verdicts("FAIL") <= 0.10
    assert summary.covered > 0.90


def test_the_simulated_answers_have_the_effects_they_should_have():
    scenario = Scenario("large", gap=0.2, marked=0.4, sufficiency=0.1, per_class=200)
    rows = [row for seed in range(10) for row in draw_rows(scenario, seed)]
    gap = np.mean([row.same["blur"] - row.other["blur"] for row in rows])
    assert gap == pytest.approx(scenario.truth("gap", ""), abs=0.02)
    assert np.mean([row.removed["tile"] for row in rows]) == pytest.approx(0.25 + 0.1, abs=0.02)
    first = [row for row in rows if row.label == "class 0"]
    assert np.mean([row.same["tile"] - row.other["tile"] for row in first]) == pytest.approx(0.2, abs=0.03)
    pasted = [pasted for row in rows if row.label != "class 0" for pasted in row.pasted["blur"]]
    on_first, elsewhere = (
        [answer == "class 0" for label, _, answer in pasted if (label == "class 0") == is_first]
        for is_first in (True, False)
    )
    assert np.mean(on_first) - np.mean(elsewhere) == pytest.approx(scenario.truth("attraction", "class 0"), abs=0.02)


def test_held_out_worlds_share_no_animal_and_no_place_with_the_others():
    looked_at = [world for world in WORLDS.values() if world.name in LOOKED_AT_WORLDS]
    for spec in photo_specs():
        world = WORLDS[spec.world]
        if spec.held_out and not world.mark:
            assert all(set(world.classes).isdisjoint(other.classes) for other in looked_at)
            assert all(set(world.cues).isdisjoint(other.cues) for other in looked_at)


@pytest.mark.parametrize("name", ["small", "two places", "logo"])
@pytest.mark.parametrize("tie", [0.0, 0.6, 1.0])
def test_a_cue_goes_with_its_class_as_often_as_the_tie_says(name, tie):
    world = WORLDS[name]
    shares = world.shares(tie)
    assert shares.sum(1) == pytest.approx(np.ones(len(world.classes)))
    own = shares[np.arange(len(world.classes)), world.own_cues]
    assert own == pytest.approx(tie + (1 - tie) / len(world.cues))


def _part(classes, cues, each):
    labels, kinds = (axis.ravel().repeat(each) for axis in np.mgrid[:classes, :cues])
    photos = [f"{number % 3}" for number in range(len(labels))]
    return Part(labels, kinds, photos, np.zeros((len(labels), 1, 1, 1), np.float16))


@pytest.mark.parametrize(("photos", "left"), [({}, {"0", "1", "2"}), ({"photos": 2}, {"0", "1"})])
def test_the_weights_of_pictures_sum_to_the_shares_of_their_cells(photos, left):
    shares = WORLDS["places"].shares(0.6)
    part = _part(4, 4, each=6)
    weights = part.weights(shares, **photos)
    assert weights.sum() == pytest.approx(1)
    for label, cue in itertools.product(range(4), range(4)):
        assert weights[(part.labels == label) & (part.cues == cue)].sum() == pytest.approx(shares[label, cue] / 4)
    assert {photo for photo, weight in zip(part.photos, weights, strict=True) if weight} == left


def test_the_folder_has_each_cue_by_its_share_and_no_picture_twice():
    world = WORLDS["two places"]
    part = _part(4, 2, each=75)
    rows = folder_rows(part, world.shares(1.0), seed=0)
    assert len(set(rows.tolist())) == len(rows) == 300
    assert (part.cues[rows] == world.own_cues[part.labels[rows]]).all()


def test_a_network_that_reads_only_the_place_loses_what_the_tie_gives():
    world = WORLDS["places"]
    part = _part(4, 4, each=3)
    part.maps[:, 0, 0, 0] = part.cues

    class ReadsPlace(torch.nn.Module):
        def forward(self, maps):
            return torch.nn.functional.one_hot(maps[:, 0, 0, 0].long(), 4).float()

    measured = true_behaviour(ReadsPlace(), part, world, 0.8)
    assert measured["matched"] == pytest.approx(0.85)
    assert measured["redrawn"] == pytest.approx(0.25)
    assert (measured["own"], measured["others"], measured["worst_group"]) == (1, 0, 0)


def test_no_photo_of_an_animal_is_in_two_parts(test_data):
    for name in ("elephant", "emu"):
        parts = [set(photos_of(test_data, name, part)) for part in PARTS]
        assert all(parts)
        assert all(first.isdisjoint(second) for first, second in itertools.combinations(parts, 2))


def test_a_composed_picture_shows_the_animal_where_its_cover_says(test_data):
    scenes = list(itertools.islice(compose(test_data, WORLDS["places"], "validate"), 8))
    again = next(compose(test_data, WORLDS["places"], "validate"))
    assert np.array_equal(scenes[0].picture, again.picture)
    for scene in scenes:
        assert isinstance(scene, Composed)
        assert scene.picture.shape == (224, 224, 3)
        assert (scene.label, scene.cue) == (0, 0)
        assert 0.01 < scene.cover.mean() < 0.6
