"""Metrics: against their slow references, on planted networks, and for maps, models and inputs of every kind."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracles_metrics as oracles
import pytest
import torch
from networks import Maps, Net, Parts, classifier, means
from scipy.ndimage import gaussian_filter
from tiers import represented_by
from torch import Tensor, nn
from unchanged import in_the_middle_of_training, unchanged

import camkit
from camkit import metrics
from camkit.engine.heatmap import cell_means, enlarge
from camkit.errors import InputError, TargetError
from camkit.images.filling import fill_linearly, fill_smoothly
from camkit.methods import variant
from camkit.metrics import METRICS, Evaluator, Heat, evaluate, references
from camkit.metrics.evaluator import (
    BLUR,
    FILLS,
    ROAD_NOISE,
    curve_sets,
    even_shares,
    hot_sets,
    random_map,
)
from camkit.metrics.faithfulness import BINS, RADIUS, ROAD_SHARES, SAMPLES, SMOOTH_SAMPLES
from camkit.models.modules import shuffle_weights

SIZE = 16
STEPS = 6
ALL = tuple(METRICS)
FAITHFUL = tuple(name for name, metric in METRICS.items() if metric.faithful)
REMOVING = ("insertion", "deletion", "srg", "road")
FEATURES = ("feature-insertion", "feature-deletion", "feature-srg")


def small(channels: int = 3, classes: int = 4, seed: int = 0) -> nn.Sequential:
    """Return a network whose scores depend on places and channels in no simple way."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, 2, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, 2, 1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * (SIZE // 4) ** 2, classes),
    ).eval()


def scorer(model: nn.Module, index: int) -> oracles.Score:
    """Return the probability of a class in float64, one picture at a time."""
    exact = copy.deepcopy(model).double()

    def score(picture: np.ndarray) -> float:
        with torch.no_grad():
            return float(exact(torch.from_numpy(picture)[None])[0].softmax(0)[index])

    return score


def random_heat(seed: int = 0, levels: int = 0) -> Tensor:
    """Return a random map 0..1 with maximum 1; with ``levels``, one of few values and therefore many ties."""
    heat = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    heat = (heat * levels).floor() if levels else heat
    return heat / heat.max()


def as_array(values: Tensor) -> np.ndarray:
    return np.asarray(values.double().numpy())


MODEL, PICTURE = small(), torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
EVALUATOR, SCORE = Evaluator(MODEL, PICTURE, 1, steps=STEPS), scorer(MODEL, 1)


# --- every metric against its slow reference


@pytest.mark.parametrize("levels", [0, 3, 1], ids=["no ties", "ties", "two levels"])
@pytest.mark.parametrize("fill", ["blur", "mean", "noise"])
@pytest.mark.parametrize("name", ["insertion", "deletion", "srg", "top-loss"])
def test_areas_equal_the_slow_reference(name: str, fill: str, levels: int) -> None:
    heat = random_heat(levels=levels) if levels != 1 else (random_heat() > 0.7).float()
    evaluator = Evaluator(MODEL, PICTURE, 1, steps=STEPS, fill=fill)
    exact = as_array(PICTURE)
    filled = {
        "blur": lambda: oracles.blurred(exact, BLUR),
        "mean": lambda: np.broadcast_to(exact.mean((1, 2), keepdims=True), exact.shape),
        "noise": lambda: as_array(evaluator.emptied_picture("noise")),
    }[fill]()
    steps = () if name == "top-loss" else (STEPS,)
    expected = getattr(oracles, name.replace("-", "_"))(SCORE, exact, filled, as_array(heat), *steps)
    value = evaluator(heat, name)[name]
    assert value.number == pytest.approx(expected, abs=1e-5)
    assert value.fill == fill


@pytest.mark.parametrize("levels", [0, 3])
def test_road_equals_the_slow_reference(levels: int) -> None:
    heat, exact = random_heat(2, levels), as_array(PICTURE)
    noise = as_array(EVALUATOR.emptied_picture("linear")) - exact.mean((1, 2), keepdims=True)
    assert noise.std() == pytest.approx(ROAD_NOISE * exact.std(), rel=0.1)
    expected = oracles.road(SCORE, exact, as_array(heat), noise, ROAD_SHARES)
    assert EVALUATOR(heat, "road")["road"].number == pytest.approx(expected, abs=1e-5)


def test_the_noise_fill_has_the_mean_and_the_spread_of_each_channel() -> None:
    picture = torch.randn(3, 64, 64) * torch.tensor([1.0, 2.0, 3.0])[:, None, None] + 5
    filled = FILLS["noise"](picture, torch.ones(1, 64, 64, dtype=torch.bool), 0)[0]
    assert filled.flatten(1).mean(1).tolist() == pytest.approx(picture.flatten(1).mean(1).tolist(), rel=0.1)
    assert filled.flatten(1).std(1).tolist() == pytest.approx(picture.flatten(1).std(1).tolist(), rel=0.1)


def test_the_inpainting_is_that_of_the_check() -> None:
    picture, hole = torch.randn(3, SIZE, SIZE), torch.rand(2, SIZE, SIZE) > 0.6
    made = FILLS["inpaint"](picture, hole, 0)
    for filled, mask in zip(made, hole, strict=True):
        assert torch.equal(filled, fill_smoothly(picture, mask))
        assert torch.equal(filled[:, ~mask], picture[:, ~mask])


@pytest.mark.parametrize("shape", ["pixels", "blobs", "all but one", "islands"])
@pytest.mark.parametrize("size", [(37, 30), (200,), (9, 8, 10)])
def test_linear_imputation_solves_its_equations(size: tuple[int, ...], shape: str) -> None:
    torch.manual_seed(3)
    picture, hole = torch.randn(2, *size) + 5, torch.rand(size) > 0.3
    if shape == "blobs":
        smooth = gaussian_filter(np.random.default_rng(3).standard_normal(size), 3)
        hole = torch.from_numpy(smooth < np.quantile(smooth, 0.8))
    elif shape == "all but one":
        hole = torch.ones(size, dtype=torch.bool)
        hole.view(-1)[hole.numel() // 3] = False
    elif shape == "islands":  # the missing pixels are in several places that do not touch
        hole = torch.zeros(size, dtype=torch.bool)
        hole.view(-1)[:: max(3, hole.numel() // 5)] = True
    removed = set(map(tuple, np.argwhere(hole.numpy())))
    exact = oracles.linear_imputation(picture.double().numpy(), removed, np.zeros((2, *size)))
    assert np.abs(fill_linearly(picture, hole).numpy() - exact).max() < 5e-4
    assert np.abs(fill_linearly(picture.double(), hole, 1e-11).numpy() - exact).max() < 1e-9
    assert torch.equal(fill_linearly(torch.where(hole, torch.nan, picture), hole), fill_linearly(picture, hole))


def test_linear_imputation_of_a_long_signal_is_a_straight_line() -> None:
    ends, hole = torch.randn(1, 20_000), torch.ones(20_000, dtype=torch.bool)
    hole[[0, -1]] = False
    line = torch.linspace(float(ends[0, 0]), float(ends[0, -1]), 20_000)
    assert (fill_linearly(ends, hole) - line).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["average-drop", "increase", "complexity"])
def test_masking_equals_the_slow_reference(name: str) -> None:
    heat = random_heat()
    oracle = getattr(oracles, name.replace("-", "_"))
    expected = oracle(as_array(heat)) if name == "complexity" else oracle(SCORE, as_array(PICTURE), as_array(heat))
    assert EVALUATOR(heat, name)[name].number == pytest.approx(expected, abs=1e-6)


class Maker:
    """Makes a map of a picture and a model in a way that depends on both, and keeps what it made."""

    def __init__(self) -> None:
        self.pictures: list[Tensor] = []
        self.maps: list[np.ndarray] = []

    def __call__(self, pictures: Tensor, model: nn.Module | None) -> list[Tensor]:
        kernel = next((model or MODEL).parameters()).detach()[:1]
        made = [nn.functional.conv2d(picture[None], kernel, padding=1)[0, 0].relu() for picture in pictures]
        made = [heat / heat.max() for heat in made]
        self.pictures += list(pictures)
        self.maps += map(as_array, made)
        return made


def made_heat() -> tuple[Heat, Maker]:
    maker = Maker()
    return Heat(Maker()(PICTURE[None], None)[0], remake=maker), maker


def test_coherency_and_adcc_equal_the_slow_reference() -> None:
    heat, maker = made_heat()
    found = EVALUATOR(heat, ["coherency", "adcc"]).numbers()
    exact = as_array(heat.values)
    coherent = oracles.coherency(exact, maker.maps[0])
    drop = oracles.average_drop(SCORE, as_array(PICTURE), exact)
    assert found["coherency"] == pytest.approx(coherent, abs=1e-6)
    assert found["adcc"] == pytest.approx(oracles.adcc(coherent, oracles.complexity(exact), drop), abs=1e-5)
    assert torch.allclose(maker.pictures[0], PICTURE * heat.values)


def test_max_sensitivity_equals_the_slow_reference() -> None:
    heat, maker = made_heat()
    found = EVALUATOR(heat, "max-sensitivity")["max-sensitivity"].number
    assert found == pytest.approx(oracles.max_sensitivity(as_array(heat.values), maker.maps), rel=1e-5)
    changes = torch.stack(maker.pictures) - PICTURE
    radius = RADIUS * float(PICTURE.std(unbiased=False))
    assert len(changes) == SAMPLES
    assert 0.95 * radius < float(changes.abs().max()) <= radius * 1.0001


def test_mprt_and_its_forms_equal_the_slow_reference() -> None:
    heat, maker = made_heat()
    found = EVALUATOR(heat, "mprt")["mprt"].number
    assert len(maker.maps) == 3  # a step for each layer of weights
    assert found == pytest.approx(oracles.mprt(as_array(heat.values), maker.maps), abs=1e-5)
    assert np.array_equal(maker.maps[0], as_array(heat.values))  # the first layer is shuffled last
    assert not np.array_equal(maker.maps[2], as_array(heat.values))
    maker.maps.clear()
    found = EVALUATOR(heat, "smooth-mprt")["smooth-mprt"].number
    means = [np.mean(maker.maps[start : start + SMOOTH_SAMPLES], 0) for start in range(0, 4 * SMOOTH_SAMPLES, 8)]
    assert found == pytest.approx(oracles.mprt(means[0], means[1:]), abs=1e-4)
    maker.maps.clear()
    found = EVALUATOR(heat, "efficient-mprt")["efficient-mprt"].number
    assert found == pytest.approx(oracles.efficient_mprt(as_array(heat.values), maker.maps[0], BINS), abs=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("pointing", 0.5), ("energy", None)])
def test_localisation_equals_the_slow_reference(name: str, expected: float | None) -> None:
    region, heat = np.zeros((40, 40), bool), enlarge(random_heat(3)[None], (40, 40))[0]
    region[1:3, 1:6] = True
    heat[17, 20] = heat[18, 20] = 2  # the last pixel within 15 pixels of the region, and the one below it
    evaluator = Evaluator(classifier(nn.Conv2d(3, 4, 3)), torch.zeros(3, 40, 40), 1, region=region)
    oracle = functools.partial(oracles.pointing, tolerance=15) if name == "pointing" else oracles.energy
    number = evaluator(heat, name)[name].number
    assert number == pytest.approx(oracle(as_array(heat), region), abs=1e-6)
    assert expected in (number, None)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("levels", [0, 2])
def test_feature_metrics_equal_the_slow_reference(name: str, levels: int) -> None:
    exact = copy.deepcopy(MODEL).double()
    trunk, head = exact[:4], exact[4:]
    evaluator = Evaluator(MODEL, PICTURE, 1, steps=STEPS, layer="3")
    with torch.no_grad():
        maps = trunk(PICTURE.double()[None])[0].numpy()
        emptied = trunk(evaluator.emptied_picture("blur").double()[None])[0].numpy()
    cells = torch.rand(4, 4, generator=torch.Generator().manual_seed(5))
    cells = (cells * levels).floor() if levels else cells
    heat = Heat(nn.functional.interpolate(cells[None, None], size=(SIZE, SIZE))[0, 0], cells=cells)

    def score(changed: np.ndarray) -> float:
        with torch.no_grad():
            return float(head(torch.from_numpy(changed)[None])[0].softmax(0)[1])

    oracle = getattr(oracles, name.removeprefix("feature-"))
    expected = oracle(score, maps, emptied, as_array(cells), STEPS)
    assert evaluator(heat, name)[name].number == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_every_metric_has_a_slow_reference_and_a_complete_record(name: str) -> None:
    metric = METRICS[name]
    assert hasattr(oracles, name.removeprefix("feature-").replace("smooth-", "").replace("-", "_"))
    assert metric.title and metric.summary and metric.paper and metric.cost
    paper = re.search(r"\w+ et al\. \d{4}", metric.paper)
    assert paper is not None, "the paper is written as 'Name et al. YEAR'"
    for words in (f"{metric.better} is better", paper[0].lower(), "undefinederror: "):
        assert words in (metric.measure.__doc__ or "").lower()
    assert metric.fill in ("", *FILLS)
    assert (metric.space == "features") == name.startswith("feature-")


# --- the order of cells


def test_the_few_cells_of_a_sparse_map_are_judged_by_themselves() -> None:
    heat = torch.zeros(10, 10)
    heat[2, 3], heat[7, 1] = 1.0, 0.5
    assert curve_sets(heat, even_shares(10)).flatten(1).sum(1).tolist() == [2]
    assert hot_sets(heat, (0.2, 0.9)).flatten(1).sum(1).tolist() == [2, 100]
    assert hot_sets(torch.randperm(100).float(), (0.1, 0.3, 0.7)).sum(1).tolist() == [10, 30, 70]


def test_a_map_and_its_multiple_have_the_same_order() -> None:
    heat = random_heat()
    first, second = (EVALUATOR(heat * factor, REMOVING).numbers() for factor in (1, 1e-6))
    assert first == second


# --- planted truth: networks whose decision is known by construction


def planted(plus: list[tuple[int, int]], minus: list[tuple[int, int]]) -> Net:
    """Return a network that scores what one channel shows in some cells, less what it shows in others."""
    weights = torch.zeros(7, 7)
    for cells, weight in ((plus, 4.0 / len(plus)), (minus, -2.0)):
        for cell in cells:
            weights[cell] = weight

    def run(net: Net, pictures: Tensor) -> Tensor:
        score = (net.layer(pictures)[:, 0] * weights).sum((1, 2)) - 2
        return torch.stack([score, -score], 1)

    return Net(run, layer=nn.AvgPool2d(4))


BRIGHT = ((1, 4), (5, 1), (5, 5), (3, 2), (3, 6))
"""Cells of the picture that are bright in all channels; the network uses some of them."""


def planted_picture() -> Tensor:
    picture = 0.02 * torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(0))
    for row, column in BRIGHT:
        picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return picture


def blob(*cells: tuple[int, int]) -> Tensor:
    grid = torch.zeros(1, 7, 7)
    for row, column in cells:
        grid[0, row, column] = 1
    return enlarge(grid, (28, 28))[0]


WIDE_DECOY = blob((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
CASES = {
    "one place": (([(1, 4)], []), WIDE_DECOY + 0.9 * blob((1, 4))),
    "two places": (([(1, 4), (5, 1)], []), blob((1, 4))),
    "for and against": (([(1, 4)], [(5, 5)]), WIDE_DECOY + 0.9 * blob((1, 4))),
}


@functools.cache
def planted_table(case: str) -> dict[str, dict[str, float]]:
    """Return each faithful metric's values for the true map, for another, and for the mean of ten random maps."""
    places, half = CASES[case]
    evaluator = Evaluator(planted(*places), planted_picture(), 0, steps=14, layer="layer")
    explained = evaluator.explainer.using("hirescam", "layer")(planted_picture(), 0)
    makes = evaluator.heat(explained).remake
    maps = [blob(*places[0]), half, *(random_map((28, 28), seed) for seed in range(10))]
    rows = [evaluator(Heat(values, remake=makes), FAITHFUL).numbers() for values in maps]
    of_metric = {name: [row[name] for row in rows] for name in FAITHFUL}
    return {name: {"true": true, "half": other, "random": float(np.mean(random))}
            for name, (true, other, *random) in of_metric.items()}  # fmt: skip


@pytest.mark.parametrize("name", FAITHFUL)
@pytest.mark.parametrize("case", CASES)
def test_the_true_map_is_ranked_first_and_the_random_one_last(case: str, name: str) -> None:
    values = planted_table(case)[name]
    ranked = sorted(values, key=values.__getitem__, reverse=METRICS[name].better == "higher")
    if name == "increase" and case != "for and against":
        assert set(values.values()) == {0.0}  # nothing speaks against the class, so no mask can raise the score
    elif (case, name) == ("two places", "average-drop"):
        # A mask that is 0.5 at both places keeps more of a sum than one that is 1 at one of them; see docs/metrics.md.
        assert ranked == ["true", "random", "half"]
    else:
        assert (ranked[0], ranked[-1]) == ("true", "random"), values
        assert len(set(values.values())) > 1


# --- maps without a value


def test_an_explanation_without_evidence_has_a_status_and_no_number() -> None:
    model = Net(lambda net, images: -means(net.layer(images)), layer=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    value = evaluate(model, camkit.explain(model, PICTURE, "layer", target=0), PICTURE, "srg")["srg"]
    assert (value.status, value.number) == ("empty_map", None)
    assert "no_positive_evidence" in value.reason


@pytest.mark.parametrize(
    ("given", "names", "status"),
    [
        (torch.ones(1, 1), (*REMOVING, *FEATURES, "pointing"), "constant_map"),
        (torch.ones(SIZE, SIZE), ["complexity", "average-drop", "energy"], "ok"),
        (torch.zeros(SIZE, SIZE), ALL, "empty_map"),
        (Heat(torch.zeros(SIZE, SIZE)), ALL, "empty_map"),
        (torch.full((SIZE, SIZE), torch.nan), ALL, "non_finite"),
        (Heat(torch.eye(SIZE) * torch.nan), ALL, "non_finite"),
        (random_heat() - 2, ["average-drop", "complexity"], "empty_map"),  # it orders cells, but masks nothing
        (random_heat() - 2, REMOVING, "ok"),
        (random_heat(), [name for name in ALL if name.endswith("mprt")], "needs_method"),  # an array says not how
        (random_heat(), ["coherency", "adcc", "max-sensitivity"], "needs_method"),
        (random_heat(), ["pointing", "energy"], "needs_region"),
    ],
)
def test_a_map_without_a_value_has_a_status(given: Any, names: Any, status: str) -> None:
    region = None if status == "needs_region" else torch.ones(SIZE, SIZE)
    values = evaluate(MODEL, given, PICTURE, names, region=region)
    assert {name: value.status for name, value in values.items()} == dict.fromkeys(names, status)


def test_a_coarse_array_is_enlarged_as_heatmaps_are() -> None:
    cells = torch.rand(4, 4)
    first = EVALUATOR(cells, "srg").numbers()
    assert first == EVALUATOR(enlarge(cells[None], (SIZE, SIZE))[0], "srg").numbers()
    assert first == EVALUATOR(cells.numpy(), "srg").numbers()


def without_zeros(net: nn.Module, pictures: Tensor) -> Tensor:
    """Return NaN for pictures that are partly removed."""
    return torch.where((pictures == 0).any((1, 2, 3))[:, None], torch.nan, means(net.layer(pictures)))


def test_a_score_that_is_nan_has_a_status() -> None:
    picture, heat = torch.rand(3, SIZE, SIZE) + 0.5, random_heat()
    heat[0, 0] = 0
    always = classifier(nn.Conv2d(3, 2, 1))
    nn.init.constant_(always[-1].bias, torch.nan)
    broken = Net(without_zeros, layer=nn.Conv2d(3, 2, 1))
    found = [evaluate(model, heat, picture, ["srg", "increase", "complexity"], target=0) for model in (broken, always)]
    assert [[value.status for value in values.values()] for values in found] == [
        ["ok", "non_finite", "ok"],
        ["non_finite", "non_finite", "ok"],
    ]
    assert found[0]["increase"].number is None


# --- models and inputs of every kind


@pytest.mark.parametrize(("rank", "channels"), [(1, 1), (2, 5), (3, 3)])
def test_signals_pictures_and_volumes_of_any_channels(rank: int, channels: int) -> None:
    size = (20, 12, 9)[:rank]
    torch.manual_seed(0)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](channels, 5, 3, 2, 1)
    model, picture = classifier(convolution, nn.ReLU()), torch.randn(channels, *size)
    explained = camkit.explain(model, picture, "1", method="layercam")
    region = torch.zeros(size, dtype=torch.bool)
    region[tuple(slice(0, 6) for _ in size)] = True
    evaluator = Evaluator(model, picture, explained.target, region=region, steps=4, layer="1")
    values = evaluator(explained, ALL)
    assert {name: value.status for name, value in values.items()} == dict.fromkeys(ALL, "ok")
    for name, heat in evaluator.references().items():
        assert tuple(heat.values.shape) == size, name
    for fill in FILLS:
        if fill == "inpaint" and rank == 3:
            continue
        assert evaluate(model, explained, picture, "srg", fill=fill, steps=3)["srg"].status == "ok"


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Sigmoid()], ids=["softmax", "sigmoid"])
def test_models_that_return_probabilities_are_judged_by_these(last: nn.Module) -> None:
    probable = nn.Sequential(*MODEL, last)
    heat = random_heat()
    found = evaluate(probable, heat, PICTURE, ["srg", "average-drop"], target=1, steps=STEPS)
    plain = Evaluator(probable, PICTURE, 1)
    with torch.no_grad():
        assert plain.confidence == pytest.approx(float(probable(PICTURE[None])[0, 1]), abs=1e-6)
    assert plain.scores.quantity == "probability"
    if isinstance(last, nn.Softmax):  # else the classes are judged one by one
        expected = evaluate(MODEL, heat, PICTURE, ["srg", "average-drop"], target=1, steps=STEPS)
        assert found.numbers() == pytest.approx(expected.numbers(), abs=1e-5)


def test_a_target_without_probabilities_is_judged_by_its_score() -> None:

    def negative(output: Tensor) -> Tensor:
        return -output[:, 0].abs()

    evaluator = Evaluator(MODEL, PICTURE, negative)
    assert evaluator.scores.quantity == "value of the target function"
    values = evaluator(random_heat(), ["srg", "average-drop", "feature-srg"])
    assert [value.status for value in values.values()] == ["ok", "undefined", "ok"]
    assert "needs a positive score" in values["average-drop"].reason
    contrast = camkit.targets.contrast(0, 1)
    assert evaluate(MODEL, random_heat(), PICTURE, "srg", target=contrast)["srg"].status == "ok"


def test_half_precision_models_and_mixed_precision_give_nearly_the_same() -> None:
    names = ["srg", "insertion", "average-drop", "feature-srg", "road"]
    explained = camkit.explain(MODEL, PICTURE, "3", target=1, method="hirescam")
    expected = evaluate(camkit.Explainer(MODEL, "3"), explained, PICTURE, names, steps=STEPS).numbers()
    half = copy.deepcopy(MODEL).half()
    by_half = evaluate(camkit.Explainer(half, "3"), explained, PICTURE, names, steps=STEPS)
    assert by_half.numbers() == pytest.approx(expected, abs=5e-3)
    forced = camkit.Explainer(MODEL, "3", precision="bf16-forced")
    assert evaluate(forced, explained, PICTURE, names, steps=STEPS).numbers() == pytest.approx(expected, abs=5e-2)


def test_a_batch_is_halved_if_memory_runs_out_and_stays_small() -> None:
    def greedy(net: Net, images: Tensor) -> Tensor:
        if len(images) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return net.parts(images)

    model, picture = Net(greedy, parts=Parts()), torch.randn(3, SIZE, SIZE)
    evaluator = Evaluator(model, picture, 1, steps=10)
    with unchanged(model):
        values = evaluator(random_heat(), "srg")
    assert evaluator.scores.at_once in (2, 3)
    expected = evaluate(model, random_heat(), picture, "srg", target=1, steps=10, batch_size=1)
    assert values.numbers() == pytest.approx(expected.numbers(), abs=1e-5)


# --- explanations


WAYS: dict[str, dict[str, Any]] = {
    "layercam": {"method": "layercam"},
    "fused": {"target_layer": ["1", "3"], "fuse": "max"},
    "augment": {"smooth": "augment"},
    "eigen": {"smooth": "eigen"},
    "even": {"spread": "even"},
    "variant": {"method": variant("occlusion", window=3, stride=2), "target_layer": None},
    "references": {"method": "expected", "references": torch.rand(8, 3, SIZE, SIZE)},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_explanation_is_made_again_with_all_its_options(way: str) -> None:
    options = {"target_layer": "1", "method": "gradcam", **WAYS[way]}
    explained = camkit.explain(MODEL, PICTURE, target=1, **options)
    own, smoothed = (camkit.Explainer(MODEL, **options), camkit.Explainer(MODEL, smooth="augment+eigen", spread="even"))
    for judge in (MODEL, own, smoothed):
        heat = Evaluator(judge, PICTURE, 1).heat(explained)
        assert (heat.cells is None) == (way in ("fused", "variant"))
        assert torch.equal(heat.made_anew(PICTURE[None])[0], torch.from_numpy(explained.heatmap))


def test_an_explanation_is_made_again_by_any_judge_unless_it_comes_from_a_table() -> None:

    def sizes(activations: Tensor, gradients: Tensor) -> Tensor:
        return gradients.abs()

    namesake = replace(camkit.METHODS["gradcam"], name="sizes")
    explainer, other = (camkit.Explainer(MODEL, "3", method=method) for method in (sizes, namesake))
    explained = explainer(PICTURE, 1)
    values = [evaluate(judge, explained, PICTURE, "max-sensitivity") for judge in (explainer, MODEL, other)]
    assert values[0]["max-sensitivity"].status == "ok"
    assert values[0] == values[1] == values[2]
    stored = pickle.loads(pickle.dumps(explained))
    value = evaluate(explainer, stored, PICTURE, "max-sensitivity")["max-sensitivity"]
    assert value.status == "needs_method"
    assert "pass the explanation" in value.reason


def test_the_class_of_the_explanation_is_judged() -> None:
    explained = camkit.explain(MODEL, PICTURE, "3", target=2)
    assert evaluate(MODEL, explained, PICTURE, "srg") == evaluate(MODEL, explained, PICTURE, "srg", target=2)
    contrast = camkit.explain(MODEL, PICTURE, "3", target=camkit.targets.contrast(0, 1))
    with pytest.raises(InputError, match=r"of '0 rather than 1' .* is not of a single class; pass its target"):
        evaluate(MODEL, contrast, PICTURE)


OWN_TARGETS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "finer": lambda: (small(classes=8), camkit.targets.finer(2)),
    "mask": lambda: (Maps(factor=5).eval(), camkit.targets.segment(2, np.eye(SIZE))),
    "everywhere": lambda: (Maps(factor=5).eval(), camkit.targets.segment(2, everywhere=True)),
    "predicted": lambda: (Maps(factor=5).eval(), camkit.targets.segment(2)),
}


@pytest.mark.parametrize("kind", represented_by("finer", "mask", among=OWN_TARGETS))
def test_the_target_of_the_explanation_is_judged_and_not_its_class_alone(kind: str) -> None:
    model, target = OWN_TARGETS[kind]()
    picture, other = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    explainer = camkit.Explainer(model, method="gradcam", smooth="augment")
    _, explained = explainer.batch([other, picture], target)  # the second one has cells and rivals of its own
    names = ["srg", "coherency", "max-sensitivity", "mprt"]
    values = evaluate(model, explained, picture, names)
    assert values == evaluate(model, explained, picture, names, target=target)
    assert values["max-sensitivity"].status == "ok"
    for judged in (target, 2):
        heat = Evaluator(model, picture, judged).heat(explained)
        made = heat.made_anew(picture[None])[0]
        np.testing.assert_allclose(made.numpy(), explained.heatmap, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="the explanation is of class 2, and class 1 is judged"):
        Evaluator(model, picture, camkit.targets.finer(1) if kind == "finer" else 1).heat(explained)


@pytest.mark.parametrize("kind", ["mask", "everywhere"])
def test_the_cells_of_an_explanation_of_a_table_are_asked_for(kind: str) -> None:
    model, target = OWN_TARGETS[kind]()
    picture = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    explained = camkit.explain(model, picture, target=target)
    stored = pickle.loads(pickle.dumps(explained))
    with pytest.raises(InputError, match="is not of a single class; pass its target"):
        evaluate(model, stored, picture)
    found = [evaluate(model, each, picture, "srg", target=target) for each in (stored, explained)]
    assert found[0] == found[1]


def test_feature_metrics_use_the_layer_of_the_evaluator() -> None:
    explained = camkit.explain(MODEL, PICTURE, "1", target=1)
    by_layer = [evaluate(MODEL, explained, PICTURE, "feature-srg", layer=layer).numbers() for layer in ("1", "3")]
    assert by_layer[0] != by_layer[1]
    cells = cell_means(torch.from_numpy(explained.heatmap)[None], (4, 4))[0]
    same = Heat(torch.from_numpy(explained.heatmap), cells=cells)
    assert evaluate(MODEL, same, PICTURE, "feature-srg", target=1, layer="3").numbers() == by_layer[1]
    fused = camkit.Explainer(MODEL, ["1", "3"])
    value = evaluate(fused, explained, PICTURE, "feature-srg")["feature-srg"]
    assert value.status == "undefined"
    assert "2 layers are fused; pass layer to choose one" in value.reason


def test_a_head_that_cannot_be_run_alone_is_a_status() -> None:
    counter = itertools.count(1)
    unsteady = Net(lambda net, images: net.parts(images) * next(counter), parts=Parts())
    value = evaluate(unsteady, random_heat(), PICTURE, "feature-srg", layer="parts.layer")["feature-srg"]
    assert value.status == "undefined"
    assert "cannot be run alone" in value.reason


# --- reference maps


def test_every_table_has_the_reference_rows() -> None:
    explained = camkit.explain(MODEL, PICTURE, "3", target=1)
    table = EVALUATOR.table({"gradcam": explained, "random": random_heat()}, ["srg", "mprt", "complexity"])
    assert list(table.rows) == ["gradcam", "random", "random map", "centre", "colour"]
    assert table.references == ("random map", "centre", "colour")
    assert table.rows["gradcam"] == EVALUATOR(explained, ["srg", "mprt", "complexity"])
    lines = str(table).splitlines()
    assert lines[0] == "| map | srg ↑ | mprt ↓ | complexity ↓ |"
    assert "needs the method" in lines[3]
    assert lines[5].startswith("| (centre) | ")
    assert table.rows["centre"]["mprt"].number == pytest.approx(1)  # it does not depend on the weights
    assert table.to_dict()["rows"]["colour"]["srg"]["status"] == "ok"


def test_the_reference_maps_are_what_they_are_called() -> None:
    def redness(_: nn.Module, pictures: Tensor) -> Tensor:
        red, green, blue = pictures.unbind(1)
        score = 20 * (red - green - blue).relu().mean((1, 2)) - 1
        return torch.stack([score, -score], 1)

    picture = 0.1 * torch.rand(3, 28, 28)
    picture[0, 4:16, 8:20] = 1  # red
    picture[1, 16:28, 0:12] = 1
    evaluator = Evaluator(Net(redness), picture, 0)
    maps = evaluator.references()
    random, other = (references(Net(redness), picture, 0, seed=seed)["random"].values for seed in (0, 1))
    assert torch.equal(random, maps["random"].values) and not torch.equal(random, other)
    centre = maps["centre"].values
    assert float(centre[13:15, 13:15].min()) == float(centre.max()) > 0
    assert torch.allclose(centre, centre.flip(0)) and torch.allclose(centre, centre.mT)
    assert float(maps["colour"].values[6:14, 10:18].mean()) > 0.9
    assert evaluator(maps["colour"], "srg")["srg"].number > evaluator(maps["random"], "srg")["srg"].number


def test_a_table_of_a_model_without_scores_for_changed_pictures_has_reasons() -> None:
    def while_bright(_: nn.Module, pictures: Tensor) -> Tensor:
        return torch.where((pictures.amax((1, 2, 3)) > 2.5)[:, None], means(pictures), torch.nan)

    picture = torch.zeros(3, SIZE, SIZE)
    picture[:, 3, 3] = 3
    table = Evaluator(Net(while_bright), picture, 1).table({"mine": random_heat()}, ["complexity", "deletion"])
    assert table.rows["mine"]["complexity"].status == "ok"
    assert table.rows["mine"]["deletion"].status == "non_finite"
    assert table.rows["colour"]["complexity"].status == "non_finite"


# --- harmless


@pytest.mark.parametrize("name", ALL)
def test_the_model_and_the_process_come_back_as_they_were_and_equal_calls_are_equal(name: str) -> None:
    model, picture = in_the_middle_of_training(Parts()), torch.randn(3, SIZE, SIZE)
    explainer = camkit.Explainer(model, "layer")
    explained, region = explainer(picture, 1), np.ones((SIZE, SIZE), bool)
    with unchanged(model):
        first, second = (evaluate(explainer, explained, picture, name, steps=4, region=region) for _ in range(2))
    assert first[name].status in ("ok", "empty_map", "undefined")
    assert first == second


@pytest.mark.parametrize("press", [False, True], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("name", ["srg", "feature-srg", "mprt", "smooth-mprt", "max-sensitivity"])
def test_a_failure_in_any_pass_leaves_nothing_behind(name: str, press: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, forward = itertools.count(1), Parts.forward

    def failing(model: Parts, images: Tensor) -> Tensor:
        if next(passes) > 1:
            if not press:
                raise RuntimeError("the user's own failure")
            os.kill(os.getpid(), signal.SIGINT)
        return forward(model, images)

    model = in_the_middle_of_training(Parts())
    explainer = camkit.Explainer(model, "layer")
    explained, evaluator = explainer(PICTURE, 1), Evaluator(explainer, PICTURE, 1, steps=40)
    monkeypatch.setattr(Parts, "forward", failing)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with unchanged(model), pytest.raises(KeyboardInterrupt if press else RuntimeError):
        evaluator(explained, name)
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))


def test_shuffling_keeps_the_values_and_the_biases() -> None:
    model = small()
    shuffled = copy.deepcopy(model)
    assert shuffle_weights(shuffled.modules(), torch.Generator().manual_seed(0)) == 3
    for before, after in zip(model.parameters(), shuffled.parameters(), strict=True):
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
        assert torch.equal(before, after) == (before.dim() == 1)


# --- the doors


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m, p: evaluate(m, torch.rand(4), p), "the map has shape (4,), and the model's input has size 16x16"),
        (lambda m, p: evaluate(m, Heat(torch.rand(20, 20)), p),
         "the map is for an input of 20x20, but this picture's input is 16x16"),
        (lambda m, p: evaluate(m, "heat", p), "a map is an explanation or an array of real numbers, and a region is"),
        (lambda m, p: evaluate(m, np.array([[None]]), p), "not object"),
        (lambda m, p: evaluate(m, torch.ones(4, 4) * 1j, p), "not torch.complex64"),
        (lambda m, p: evaluate(m, torch.rand(4, 4), p, [p.mean]), "choose from insertion,"),
        (lambda m, p: evaluate(m, torch.rand(4, 4), p, "srgg"), "unknown metric 'srgg'; did you mean 'srg'"),
        (lambda m, p: evaluate(m, torch.rand(4, 4), p, "faith"), "unknown metric 'faith'; choose from insertion,"),
        (lambda m, p: Evaluator(m, p, fill="grey"), "fill must be one of blur, mean, noise, inpaint, linear"),
        (lambda m, p: Evaluator(m, p, steps=0), "steps must be a whole number from 1, not 0"),
        (lambda m, p: Evaluator(m, p, region=np.ones((3, 3))), "the region has shape (3, 3); it must have the size"),
        (lambda m, p: Evaluator(m, p, seed=-1), "seed must be a whole number from 0, not -1"),
        (lambda m, p: Evaluator(m, p, layer="nowhere"), "the model has no layer 'nowhere'"),
        (lambda m, p: Evaluator(m, p, batch_size=0), "batch_size must be a whole number from 1, not 0"),
        (lambda m, p: Evaluator(m, p, [0, 1]), "this call takes one target; explainer.batch([img], targets)"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_in_a_sentence(call: Callable[..., object], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        call(MODEL, PICTURE)
    assert sentence in str(caught.value)


def test_boxes_and_absent_targets_are_refused() -> None:
    def boxes(net: nn.Module, pictures: Tensor) -> list[dict[str, Tensor]]:
        box, labels = torch.tensor([[0.0, 0, 8, 8]]), torch.tensor([1])
        scores = means(net.layer(pictures)).sigmoid()
        return [{"boxes": box, "scores": score, "labels": labels} for score in scores]

    with pytest.raises(TargetError, match="a detector's box moves when the picture changes"):
        Evaluator(Net(boxes, layer=nn.Conv2d(3, 1, 1)), PICTURE)
    with pytest.raises(TargetError, match=r"no class above 0\.99"):
        Evaluator(MODEL, PICTURE, camkit.targets.above(0.99).expand(torch.zeros(1, 3), 1)[0])


def test_a_metric_of_the_users_own() -> None:
    @metrics.register_metric("half", title="Half", better="higher", space="input", cost="1")
    def half(evaluator: Evaluator, heat: Heat) -> float:
        return float(evaluator.scored((evaluator.picture / 2)[None])[0])

    try:
        found = EVALUATOR(random_heat(), "half")["half"]
        assert found.number == pytest.approx(SCORE(as_array(PICTURE) / 2), abs=1e-6)
        with pytest.raises(InputError, match="there is already a metric 'half'"):
            metrics.register_metric("half")(half)
        metrics.register_metric("half", replace=True)(half)
    finally:
        del METRICS["half"]
    with pytest.raises(InputError, match="consists of letters"):
        metrics.register_metric("two words")
    for wrong in ({"better": "bigger"}, {"space": "inputs"}):
        with pytest.raises(InputError, match=r"metric 'half': (better|space) must be one of .*, not '(bigger|inputs)'"):
            metrics.register_metric("half", **wrong)


def test_one_evaluator_shares_passes_between_metrics() -> None:
    evaluator = Evaluator(MODEL, PICTURE, 1, steps=10)
    evaluator(random_heat(), ["insertion", "srg"])
    assert evaluator.scores.passes == 1 + 1 + 2 * 9  # the picture, the filled picture, and both orders without ends
    evaluator(random_heat(1), "insertion")
    assert evaluator.scores.passes == 1 + 1 + 3 * 9


def test_scores_of_pictures_are_those_of_the_fixed_class() -> None:
    scores, changed = camkit.Explainer(MODEL).scores_of(PICTURE), torch.randn(7, 3, SIZE, SIZE)
    with torch.no_grad():
        best = int(MODEL(PICTURE[None]).argmax())
        assert torch.allclose(scores(changed), MODEL(changed).softmax(1)[:, best], atol=1e-6)
    assert scores.answer.indices == (best,)
    assert len(scores(changed[:0])) == 0
