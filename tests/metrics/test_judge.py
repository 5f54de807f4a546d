"""Judging methods over a sample of pictures: the statistics, the recommendation, the reports, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Flat
from PIL import Image
from torch import Tensor, nn

import camkit
from camkit.cli import main
from camkit.errors import InputError, MethodError
from camkit.metrics.judge import Figure, MethodJudgement, Recommendation, advantages, figures_of, recommend

SCENES = list(camkit.scenes.scene_paths().values())


# --- the statistics of one metric


def drawn(mean: float, spread: float = 0.1, pictures: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, spread, pictures)


def judged(values: dict[str, np.ndarray], better: Any = "higher") -> dict[str, Figure]:
    return figures_of(values, better, seed=0)


def test_a_clear_difference_is_found_and_none_is_not() -> None:
    shared = drawn(0, 0.3)  # pictures differ more than methods do, and comparisons are paired
    rows = {name: shared + drawn(mean, 0.02, seed=number) for number, (name, mean) in enumerate(
        {"best": 0.6, "twin": 0.6, "worse": 0.5, "blind": 0.2, "random": 0.2}.items())}  # fmt: skip
    found = judged(rows)
    assert [name for name, figure in found.items() if figure.beats_random] == ["best", "twin", "worse"]
    assert [name for name, figure in found.items() if figure.level_with_best] == ["best", "twin"]
    assert found["worse"].low < 0.5 + shared.mean() < found["worse"].high


def test_a_significant_difference_that_does_not_matter_is_none() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, (2, 50))
    values = {"best": 0.30 + noise[0], "near": 0.28 + noise[0] / 2, "far": 0.20 + noise[0] / 3, "random": noise[1]}
    found = judged(values)
    assert [name for name, figure in found.items() if figure.level_with_best] == ["best", "near"]


def test_lower_may_be_better() -> None:
    rows = {"good": drawn(0.1), "bad": drawn(0.5, seed=1), "random": drawn(0.5, seed=2)}
    found = judged(rows, "lower")
    assert found["good"].beats_random
    assert found["good"].level_with_best
    assert not found["bad"].beats_random
    assert not found["bad"].loses_to_random
    assert not found["bad"].level_with_best


def test_pictures_without_a_value_count_for_neither() -> None:
    values, chance = drawn(0.6), drawn(0.2, seed=1)
    values[::2] = chance[::2] = np.nan
    found = judged({"half": values, "none": np.full(40, np.nan), "random": chance})
    assert (found["half"].groups, found["half"].counted_like_random, found["half"].mark) == (20, 0, "*")
    none = found["none"]
    assert (none.groups, none.beats_random, none.loses_to_random, none.level_with_best) == (0, False, False, False)
    assert (str(none), none.span, none.mark) == ("-", "", "")


def test_without_a_value_a_method_counts_like_the_random_map() -> None:
    values, chance = drawn(0.6), drawn(0.2, seed=1)
    values[::4] = np.nan
    found = judged({"a": values, "random": chance})["a"]
    assert (found.groups, found.counted_like_random) == (40, 10)
    assert found.value == pytest.approx(np.where(np.isnan(values), chance, values).mean())


@pytest.mark.parametrize("methods", [1, pytest.param(5, marks=pytest.mark.extended)])
def test_chance_alone_seldom_beats_random(methods: int) -> None:
    false = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = {f"method {number}": rng.normal(0, 1, 30) for number in range(methods)} | {
            "random": rng.normal(0, 1, 30)
        }
        found = figures_of(rows, "higher", seed)
        false += any(found[name].beats_random for name in rows if name != "random")
    assert false <= 200 * 0.05 + 3 * (200 * 0.05 * 0.95) ** 0.5  # three standard errors


# --- the recommendation


BEST, SECOND, CHANCE, WORSE, NONE = 0.8, 0.6, 0.2, 0.0, np.nan
"""Means of values: as good as the best, clearly behind it, as good as the random map, worse than it, and no values."""


def recommended(
    means: dict[str, dict[str, float]],
    order: Sequence[str],
    costs: dict[str, float] | None = None,
    unmoved: Sequence[str] = (),
) -> Recommendation:
    """Recommend, from values of 30 pictures with these means in each metric."""
    values = {
        metric: {
            name: drawn(mean, 0.03, pictures=30, seed=number)
            for number, (name, mean) in enumerate({**rows, "random": CHANCE}.items())
        }
        for metric, rows in means.items()
    }
    costs = costs or dict.fromkeys(order, 1.0)
    return recommend(*higher(values), {name: costs[name] for name in order}, unmoved)


def higher(values: dict[str, dict[str, np.ndarray]], seed: int = 0) -> tuple[Any, Any]:
    """Return values and their figures, of metrics in which higher values are better."""
    return values, {metric: figures_of(rows, "higher", seed) for metric, rows in values.items()}


def test_of_the_methods_that_are_as_good_the_cheapest_is_recommended() -> None:
    rows = {"dear": BEST, "cheap": BEST, "worse": SECOND}
    found = recommended(
        {"srg": rows, "adcc": rows}, ["dear", "cheap", "worse"], {"dear": 9.2, "cheap": 1.1, "worse": 1.0}
    )
    assert found.row == "cheap"
    assert found.sentence == (
        "Use cheap: it beats a random map in SRG and ADCC, no method that can be recommended is clearly better over "
        "all metrics, and none that is as good is much cheaper (1.1 plain passes)."
    )


def test_of_equally_cheap_methods_the_first_is_recommended_whatever_the_clock_says() -> None:
    rows = {"first": BEST, "second": BEST}
    assert recommended({"srg": rows}, ["first", "second"], {"first": 1.7, "second": 1.1}).row == "first"


def test_what_is_worse_than_chance_is_found() -> None:
    found = judged({"bad": drawn(0.1), "blind": drawn(0.2, seed=1), "random": drawn(0.2, seed=2)})
    assert [name for name, figure in found.items() if figure.loses_to_random] == ["bad"]


def test_a_method_may_be_like_chance_in_one_of_three_metrics() -> None:
    found = recommended({"srg": {"a": BEST}, "adcc": {"a": CHANCE}, "insertion": {"a": BEST}}, ["a"])
    assert found.row == "a"
    assert found.sentence.startswith("Use a: it beats a random map in SRG and Insertion, no method")


def test_a_method_that_loses_to_chance_in_one_metric_is_not_recommended() -> None:
    found = recommended({"srg": {"a": BEST}, "adcc": {"a": WORSE}, "insertion": {"a": BEST}}, ["a"])
    assert found.row is None
    assert found.against == {"a": "worse than a random map in ADCC"}


def test_a_method_that_one_metric_of_two_finds_no_better_than_chance_is_not_recommended() -> None:
    assert recommended({"srg": {"a": BEST, "b": SECOND}, "adcc": {"a": CHANCE, "b": BEST}}, ["a", "b"]).row == "b"
    none = recommended({"srg": {"a": CHANCE}}, ["a"])
    assert none.row is None
    assert none.sentence == "On these 30 pictures no method can be recommended; judge more before you trust any map."
    assert none.against["a"].startswith("not significantly better than a random map")


def test_a_method_whose_maps_do_not_change_with_the_weights_is_not_recommended() -> None:
    found = recommended({"srg": {"edges": BEST, "a": SECOND}}, ["edges", "a"], unmoved=["edges"])
    assert found.row == "a"
    assert found.against == {"edges": "almost the same map if the weights are shuffled"}


def test_a_method_that_is_no_better_than_the_other_reference_maps_is_not_recommended() -> None:
    rows = {"a": SECOND, "centre": SECOND, "colour": CHANCE}
    found = recommended({"srg": rows, "adcc": rows}, ["a"])
    assert found.row is None
    assert found.against == {"a": "over all metrics no better than a centred blob"}
    with_better = recommended({"srg": {**rows, "b": BEST}, "adcc": {**rows, "b": SECOND}}, ["a", "b"])
    assert with_better.row == "b"


def test_a_metric_without_values_for_a_method_does_not_count_against_it() -> None:
    srg, feature = {"a": BEST, "b": SECOND}, {"a": NONE, "b": BEST}
    found = recommended({"srg": srg, "feature-srg": feature}, ["a", "b"])
    assert found.row == "a"


def test_a_metric_without_any_values_does_not_decide() -> None:
    found = recommended({"srg": {"a": BEST}, "feature-srg": {"a": NONE}}, ["a"])
    assert found.row == "a"
    assert found.sentence.startswith("Use a: it beats a random map in SRG, no method")


def test_an_advantage_is_a_share_of_the_best_methods_in_each_metric() -> None:
    srg = {"a": np.array([0.5, 0.7]), "b": np.array([0.3, 0.1]), "random": np.array([0.1, 0.1])}
    deletion = {"a": np.array([0.3, 0.1]), "b": np.array([0.2, np.nan]), "random": np.array([0.4, 0.5])}
    blind = {"a": np.zeros(2), "b": np.zeros(2), "random": np.ones(2)}  # no method is better than chance
    found = advantages([srg, {name: -values for name, values in deletion.items()}, blind], ["a", "b"])
    # SRG: 0.4 and 0.6 for a, mean 0.5; 0.2 and 0 for b. Deletion: 0.1 and 0.4 for a, mean 0.25; 0.2 for b.
    np.testing.assert_allclose(found["a"], [[0.4 / 0.5, 0.6 / 0.5], [0.1 / 0.25, 0.4 / 0.25]])
    np.testing.assert_allclose(found["b"], [[0.2 / 0.5, 0.0], [0.2 / 0.25, np.nan]])


def test_a_metric_that_tells_no_method_from_chance_does_not_decide() -> None:
    rows = {"a": BEST, "b": SECOND, "centre": CHANCE, "colour": CHANCE}
    blind = {"a": CHANCE + 0.002, "b": CHANCE, "centre": CHANCE + 0.05, "colour": CHANCE}
    assert recommended({"srg": rows, "adcc": blind, "insertion": rows}, ["a", "b"]).row == "a"


def test_rows_are_compared_on_the_metrics_that_both_have() -> None:
    both = {"a": 0.44, "centre": 0.47, "colour": CHANCE}
    cells = {"a": NONE, "centre": WORSE, "colour": CHANCE}
    found = recommended({"srg": both, "adcc": both, "feature-srg": cells}, ["a"])
    assert found.row is None
    assert found.against == {"a": "over all metrics no better than a centred blob"}


def test_the_sample_seldom_decides_between_methods_that_are_alike() -> None:
    chosen = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        pictures = random.normal(0.5, 0.3, 50)  # pictures differ more than methods do
        means = {"first": 0.30, "second": 0.31, "third": 0.31, "random": 0.0}
        values = {
            metric: {name: mean * pictures + random.normal(0, 0.05, 50) for name, mean in means.items()}
            for metric in ("srg", "adcc", "feature-srg")
        }
        order = ["first", "second", "third"]
        chosen.append(recommend(*higher(values, seed), dict.fromkeys(order, 1.0), seed=seed).row)
    assert chosen.count("first") >= 19


def test_a_method_that_is_clearly_better_over_all_metrics_is_recommended_though_it_costs_more() -> None:
    rows = {"cheap": SECOND, "good": BEST}
    assert recommended({"srg": rows}, ["cheap", "good"], {"cheap": 1.0, "good": 9.0}).row == "good"


# --- a network that was trained to look at the object, and a method that marks what speaks least for the class


def backwards(activations: Tensor, gradients: Tensor) -> Tensor:
    """Mark what speaks least for the class."""
    evidence = (activations * gradients).sum(1)
    return evidence.amax((1, 2), keepdim=True) - evidence


def seldom(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weight like Grad-CAM where the feature maps are strong, and not at all elsewhere."""
    weights = gradients.mean((2, 3), keepdim=True)
    return weights * (activations.mean() > 0.55)


def many_scenes() -> list[Image.Image]:
    """Return the shipped scenes, turned and cut in several ways."""
    pictures = [Image.open(scene).convert("RGB") for scene in SCENES]
    mirrored = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in pictures]
    cut = [picture.crop((4, 4, picture.width, picture.height)) for picture in pictures]
    return [*pictures, *mirrored, *cut]


@pytest.fixture(scope="session")  # a worker that takes tests from others comes back
def trained() -> MethodJudgement:
    return camkit.judge("demo-fair", many_scenes(), [backwards, "gradcam", seldom], pictures=7)


def test_the_true_method_is_recommended_and_the_wrong_one_is_last(trained: MethodJudgement) -> None:
    assert trained.recommendation.row == "gradcam"
    wrong, true, _, random = trained.rows[:4]
    assert random.name == "random"
    for metric in ("srg", "adcc", "feature-srg"):
        assert true.metrics[metric].beats_random
        assert not wrong.metrics[metric].beats_random
        assert not wrong.metrics[metric].value >= random.metrics[metric].value  # it may have none


@pytest.mark.extended
def test_another_seed_draws_other_pictures_and_recommends_the_same(trained: MethodJudgement) -> None:
    again = camkit.judge("demo-fair", many_scenes(), [backwards, "gradcam"], pictures=7, seed=1)
    assert set(again.pictures) != set(trained.pictures)
    assert len(again.pictures) == 7
    assert again.recommendation.row == trained.recommendation.row


# --- results and reports


def test_costs_and_layers_are_told(trained: MethodJudgement) -> None:
    by_name = {row.name: row for row in trained.rows}
    assert trained.layer == by_name["gradcam"].layer == "features"
    assert 0.3 < by_name["gradcam"].cost < 30
    assert by_name["gradcam"].unmoved is not None
    assert by_name["random"].method == ""
    assert repr(trained) == f"<MethodJudgement of 3 methods on 7 pictures: {trained.recommendation.row}>"


def test_the_reports_say_the_same(trained: MethodJudgement, tmp_path: Path) -> None:
    page = trained.save(tmp_path / "reports")
    text, markdown = page.read_text("utf-8"), (page.parent / "judge.md").read_text("utf-8")
    values = json.loads((page.parent / "judge.json").read_text("utf-8"))
    assert values == trained.to_dict()
    assert values["recommendation"]["sentence"] in markdown
    assert values["recommendation"]["sentence"] in text
    for row in values["rows"]:
        mean = f"{row['metrics']['srg']['mean']:.2f}"
        assert row["name"] in markdown
        assert mean in markdown
        assert mean in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<table>" in trained._repr_html_()
    assert trained.to_markdown() in markdown


def test_layers_that_print_the_same_have_rows_of_their_own() -> None:
    model = camkit.load_model("demo-fair")
    relus = [name for name, module in model.module.named_modules() if isinstance(module, nn.ReLU)][:2]
    layers = [model.module.get_submodule(name) for name in relus]
    assert repr(layers[0]) == repr(layers[1])
    rows = camkit.compare(model, SCENES[0], ["gradcam"], target_layer=layers).rows
    assert [row.layer for row in rows] == relus


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"images": SCENES[:4]}, "4 pictures can be used, but judging 1 map of each takes 5 or more$"),
        ({"methods": None}, "^6 pictures can be used, but judging 17 maps of each takes 9 or more$"),
        ({"methods": []}, "the list of methods is empty"),
        ({"methods": ["eigencm"]}, "did you mean 'eigencam'"),
        ({"pictures": 3}, "pictures must be a whole number from 5, not 3"),
        ({"seed": -1}, "seed must be a whole number from 0, not -1"),
        ({"images": "nowhere"}, "^there is no file nowhere$"),
        ({"images": SCENES[:1]}, "^1 picture can be used"),
        ({"target_layer": ["featurs"]}, "^the model has no layer 'featurs'"),
        ({"target": "plain"}, "did you mean 'plane'"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        camkit.judge("demo-fair", **{"images": SCENES, "methods": ["gradcam"], **arguments})


def test_where_a_map_is_empty_it_counts_like_the_random_one(trained: MethodJudgement) -> None:
    row, random = trained.rows[2:4]
    assert row.name == "seldom"
    assert 0 < row.empty < 7
    assert row.metrics["adcc"].groups == 0  # the map of the masked picture is empty for all: ADCC does not apply
    for metric in set(row.metrics) - {"adcc"}:
        figure, chance = row.metrics[metric], random.metrics[metric].values
        assert (figure.counted_like_random, figure.groups) == (row.empty, 7)
        both = zip(figure.values, chance, strict=True)
        assert figure.value == pytest.approx(np.mean([other if np.isnan(value) else value for value, other in both]))


class Overflowing(nn.Module):
    """Has no finite scores for bright pictures."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        bright = x.mean((1, 2, 3)) > 10
        return self.head(self.features(x).mean((2, 3))) + torch.where(bright, torch.nan, 0.0)[:, None]


def test_a_picture_without_a_finite_score_is_left_out_with_the_reason() -> None:
    pictures = [*torch.rand(6, 3, 16, 16), torch.full((3, 16, 16), 20.0)]
    found = camkit.judge(Overflowing().eval(), pictures, ["gradcam"], target=1)
    assert len(found.pictures) == 6
    assert list(found.unreadable) == ["picture 7"]
    assert "NaN or infinite" in found.unreadable["picture 7"]


@pytest.mark.extended
def test_feature_cells_are_those_of_the_layer_that_is_judged() -> None:
    explainer = camkit.Explainer("demo-fair")
    found = camkit.judge(explainer, SCENES, ["gradcam"], target_layer="features.1")
    assert found.layer == "features.1"
    for seed in (0, 1):
        source, value = found.pictures[seed], found.rows[0].metrics["feature-srg"].values[seed]
        evaluator = camkit.metrics.Evaluator(explainer, source, layer="features.1", fill="blur", steps=10, seed=seed)
        heat = evaluator.heat(explainer.using("gradcam", "features.1")(source))
        assert evaluator(heat, "feature-srg")["feature-srg"].number == pytest.approx(value, abs=1e-5)


def test_a_method_that_works_nowhere_is_refused() -> None:
    with pytest.raises(MethodError, match="no method works on these pictures: cam needs a head"):
        camkit.judge(Flat().eval(), list(torch.rand(5, 3, 8, 8)), ["cam"], target_layer=["layer"], target=1)


def test_what_keeps_the_model_from_taking_any_picture_is_not_blamed_on_one() -> None:
    with pytest.raises(InputError, match=r"^camkit does not know how to prepare pictures for this model; pass"):
        camkit.judge(Flat().eval(), SCENES, ["gradcam"])
    gray = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    with pytest.raises(InputError, match=r"^the picture has 3 channels, but the model's first convolution takes 1"):
        camkit.judge(gray, list(torch.rand(5, 3, 16, 16)), ["gradcam"])


def test_a_folder_without_pictures_is_one_sentence_without_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert main(["judge", str(folder), "--model", "demo-fair", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"camkit: {folder} is a folder; pass the picture files in it\n"
