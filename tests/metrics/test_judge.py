"""Judging methods over a sample of pictures: the statistics, the recommendation, the reports, and the command."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Flat, Net, classifier
from PIL import Image
from results import assert_is_a_result
from torch import Tensor, nn

import camkit
import camkit.metrics.judge
from camkit.cli import main
from camkit.errors import InputError
from camkit.metrics import METRICS
from camkit.metrics.judge import (
    DECIDING,
    REFERENCES,
    REPORTS,
    Figure,
    JudgedRow,
    MethodJudgement,
    Recommendation,
    figures_of,
    recommend,
)

SCENES = list(camkit.scenes.scene_paths().values())


# --- the statistics of one metric


def drawn(mean: float, spread: float = 0.1, pictures: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, spread, pictures)


def judged(values: dict[str, np.ndarray], better: Any = "higher") -> dict[str, Figure]:
    return figures_of(values, better, seed=0)


def test_a_clear_difference_is_found_and_none_is_not() -> None:
    shared = drawn(0, 0.3)  # pictures differ more than methods do, and comparisons are paired
    means = {"best": 0.6, "twin": 0.6, "worse": 0.5, "blind": 0.2, "random": 0.2}
    found = judged({name: shared + drawn(mean, 0.02, seed=number) for number, (name, mean) in enumerate(means.items())})
    assert [name for name, figure in found.items() if figure.beats_random] == ["best", "twin", "worse"]
    assert [name for name, figure in found.items() if figure.level_with_best] == ["best", "twin"]
    assert found["worse"].low < 0.5 + shared.mean() < found["worse"].high


def test_a_significant_difference_that_does_not_matter_is_none() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, (2, 50))
    values = {"best": 0.30 + noise[0], "near": 0.28 + noise[0] / 2, "far": 0.20 + noise[0] / 3, "random": noise[1]}
    found = judged(values)
    assert [name for name, figure in found.items() if figure.level_with_best] == ["best", "near"]


def test_lower_may_be_better_and_what_is_worse_than_chance_is_found() -> None:
    rows = {"good": drawn(0.1), "blind": drawn(0.5, seed=1), "bad": drawn(0.7, seed=3), "random": drawn(0.5, seed=2)}
    found = judged(rows, "lower")
    flags = {name: (each.beats_random, each.loses_to_random, each.level_with_best) for name, each in found.items()}
    assert flags == {"good": (True, False, True), "blind": (False,) * 3, "bad": (False, True, False),
                     "random": (False,) * 3}  # fmt: skip


def test_a_picture_without_a_value_counts_like_the_random_map_unless_that_has_none_either() -> None:
    values, chance = drawn(0.6), drawn(0.2, seed=1)
    values[::2] = chance[::4] = np.nan
    found = judged({"half": values, "none": np.full(40, np.nan), "random": chance})
    half, none = found["half"], found["none"]
    assert (half.groups, half.counted_like_random, half.mark) == (30, 10, "*")
    assert half.value == pytest.approx(np.nanmean(np.where(np.isnan(values), chance, values)))
    assert (none.groups, none.beats_random, none.loses_to_random, none.level_with_best) == (0, False, False, False)
    assert (str(none), none.span, none.mark) == ("-", "", "")


@pytest.mark.parametrize("methods", [1, pytest.param(5, marks=pytest.mark.extended)])
def test_chance_alone_seldom_beats_random(methods: int) -> None:
    false = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = {name: rng.normal(0, 1, 30) for name in (*map(str, range(methods)), "random")}
        false += any(figure.beats_random for figure in figures_of(rows, "higher", seed).values())
    assert false <= 200 * 0.05 + 3 * (200 * 0.05 * 0.95) ** 0.5  # three standard errors


# --- the recommendation


BEST, SECOND, CHANCE, WORSE, NONE = 0.8, 0.6, 0.2, 0.0, np.nan
"""Means of values: as good as the best, clearly behind it, as good as the random map, worse than it, and no values."""


def recommended_of(
    values: dict[str, dict[str, np.ndarray]], costs: dict[str, float], unmoved: str = "", seed: int = 0
) -> Recommendation:
    """Recommend, from the values of each row in some of the metrics that decide."""
    names = list(dict.fromkeys(name for rows in values.values() for name in rows))
    nothing = np.full(len(next(iter(values.values()))["random"]), np.nan)
    figures = {
        metric: figures_of({name: values.get(metric, {}).get(name, nothing) for name in names}, "higher", seed)
        for metric in DECIDING
    }
    rows = [
        JudgedRow(
            *(name, "" if name in REFERENCES else name, "", {metric: figures[metric][name] for metric in DECIDING}),
            *(costs.get(name, 1.0), 0.9 if name == unmoved else None, 0, (0, "")),
        )
        for name in names
    ]
    return recommend(rows, seed)


def recommended(means: dict[str, dict[str, float]], costs: dict[str, float], unmoved: str = "") -> Recommendation:
    """Recommend, from values of 30 pictures with these means in each metric."""
    values = {
        metric: {
            name: drawn(mean, 0.03, 30, seed) for seed, (name, mean) in enumerate((rows | {"random": CHANCE}).items())
        }
        for metric, rows in means.items()
    }
    return recommended_of(values, costs, unmoved)


def in_both(**rows: float) -> dict[str, dict[str, float]]:
    return {"srg": rows, "adcc": rows}


LIKE_CHANCE = "not significantly better than a random map in most of the metrics that decide"
NO_BETTER = "over all metrics no better than a centred blob"
RULE: dict[str, tuple[dict[str, dict[str, float]], dict[str, float], str | None, dict[str, str]]] = {
    "the cheapest of those that are as good": (
        in_both(dear=BEST, cheap=BEST, worse=SECOND), {"dear": 9.2, "cheap": 1.1}, "cheap", {}),
    "the first of those that cost the same, whatever the clock says": (
        in_both(first=BEST, second=BEST), {"first": 1.7, "second": 1.1}, "first", {}),
    "a clearly better one, though it costs more": (in_both(cheap=SECOND, good=BEST), {"good": 9.0}, "good", {}),
    "one like chance in one metric of three": (
        {"srg": {"a": BEST}, "adcc": {"a": CHANCE}, "feature-srg": {"a": BEST}}, {}, "a", {}),
    "none that loses to chance in a metric": (
        {"srg": {"a": BEST}, "adcc": {"a": WORSE}, "feature-srg": {"a": BEST}}, {}, None,
        {"a": "worse than a random map in ADCC"}),
    "none like chance in one metric of two": (
        {"srg": {"a": BEST, "b": SECOND}, "adcc": {"a": CHANCE, "b": BEST}}, {}, "b", {"a": LIKE_CHANCE}),
    "none like chance": ({"srg": {"a": CHANCE}}, {}, None, {"a": LIKE_CHANCE}),
    "none no better than a reference map": (
        in_both(a=SECOND, centre=SECOND, colour=CHANCE), {}, None, {"a": NO_BETTER}),
    "one better than a reference map": (
        in_both(a=SECOND, b=BEST, centre=SECOND, colour=CHANCE), {}, "b", {"a": NO_BETTER}),
    "a metric without values does not count against a method": (
        {"srg": {"a": BEST, "b": SECOND}, "feature-srg": {"a": NONE, "b": BEST}}, {}, "a", {}),
    "a metric without any values does not decide": ({"srg": {"a": BEST}, "feature-srg": {"a": NONE}}, {}, "a", {}),
    "a metric that tells no method from chance does not decide": (
        {
            "srg": {"a": BEST, "b": SECOND, "centre": CHANCE, "colour": CHANCE},
            "adcc": {"a": CHANCE + 0.002, "b": CHANCE, "centre": CHANCE + 0.05, "colour": CHANCE},
            "feature-srg": {"a": BEST, "b": SECOND, "centre": CHANCE, "colour": CHANCE},
        }, {}, "a", {}),
    "all metrics weigh the same": ({"srg": {"a": 0.3, "b": 0.4}, "adcc": {"a": 1.2, "b": 1.05}}, {}, "b", {}),
    "rows are compared on the metrics that both have": (
        in_both(a=0.44, centre=0.47, colour=CHANCE) | {"feature-srg": {"a": NONE, "centre": WORSE, "colour": CHANCE}},
        {}, None, {"a": NO_BETTER}),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE)
def test_the_rule_recommends(case: str) -> None:
    means, costs, row, against = RULE[case]
    found = recommended(means, costs)
    assert (found.row, found.against) == (row, against)


def test_the_recommendation_is_one_sentence_with_its_reason() -> None:
    assert recommended(in_both(dear=BEST, cheap=BEST), {"dear": 9.2, "cheap": 1.1}).sentence == (
        "Use cheap: it beats a random map in SRG and ADCC, no method that can be recommended is clearly better over "
        "all metrics, and none that is as good is much cheaper (1.1 plain passes)."
    )
    none = recommended({"srg": {"a": CHANCE}}, {})
    assert none.sentence == "On these 30 pictures no method can be recommended; judge more before you trust any map."
    found = recommended({"srg": {"edges": BEST, "a": SECOND}}, {}, unmoved="edges")
    assert (found.row, found.against) == ("a", {"edges": "almost the same map if the weights are shuffled"})


def test_the_sample_seldom_decides_between_methods_that_are_alike() -> None:
    chosen = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        pictures = random.normal(0.5, 0.3, 50)  # pictures differ more than methods do
        means = {"first": 0.30, "second": 0.31, "third": 0.31, "random": 0.0}
        values = {
            metric: {name: mean * pictures + random.normal(0, 0.05, 50) for name, mean in means.items()}
            for metric in DECIDING
        }
        chosen.append(recommended_of(values, {}, seed=seed).row)
    assert chosen.count("first") >= 19


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


def test_the_true_method_is_recommended_and_costs_and_layers_are_told(trained: MethodJudgement) -> None:
    assert repr(trained) == "<MethodJudgement of 3 methods on 7 pictures: gradcam>"
    wrong, true, _, random = trained.rows[:4]
    assert (random.name, random.method) == ("random", "")
    assert trained.layer == true.layer == "features"
    assert 0.3 < true.cost < 30 and true.unmoved is not None
    for metric in DECIDING:
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


def test_layers_that_print_the_same_have_rows_of_their_own() -> None:
    model = camkit.load_model("demo-fair")
    relus = [name for name, module in model.module.named_modules() if isinstance(module, nn.ReLU)][:2]
    layers = [model.module.get_submodule(name) for name in relus]
    assert repr(layers[0]) == repr(layers[1])
    rows = camkit.compare(model, SCENES[0], ["gradcam"], target_layer=layers).rows
    assert [row.layer for row in rows] == relus


GRAY = classifier(nn.Conv2d(1, 4, 3))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"images": SCENES[:4]}, "4 pictures can be used, but judging 1 map of each takes 5 or more$"),
        ({"methods": None}, "^6 pictures can be used, but judging 17 maps of each takes 9 or more$"),
        ({"pictures": 3}, "pictures must be a whole number from 5, not 3"),
        ({"seed": -1}, "seed must be a whole number from 0, not -1"),
        ({"images": "nowhere"}, "^there is no file nowhere$"),
        ({"images": Image.new("RGB", (8, 8))}, r"^judge takes a folder or a list of pictures, not Image; pass \[img\]"),
        ({"target": "plain", "images": "nowhere"}, "did you mean 'plane'"),
        # What keeps the model from taking any picture is not blamed on one.
        ({"model": Flat().eval()}, "^camkit does not know how to prepare pictures for this model; pass"),
        ({"model": GRAY, "images": list(torch.rand(5, 3, 9, 9))}, "^the picture has 3 channels, but the model's first"),
        ({"model": Flat().eval(), "images": list(torch.rand(5, 3, 8, 8)), "methods": ["cam"], "target_layer": "layer"},
         "^no method works on these pictures: cam needs a head"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_sentence(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        camkit.judge(**{"model": "demo-fair", "images": SCENES, "methods": ["gradcam"], **arguments})


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


def test_a_picture_without_a_finite_score_is_left_out_with_the_reason() -> None:
    def overflowing(net: Net, images: Tensor) -> Tensor:
        bright = images.mean((1, 2, 3)) > 10
        return net.parts(images) + torch.where(bright, torch.nan, 0.0)[:, None]

    pictures = [*torch.rand(6, 3, 16, 16), torch.full((3, 16, 16), 20.0)]
    parts = classifier(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU())
    found = camkit.judge(Net(overflowing, parts=parts), pictures, ["gradcam"], target=1)
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


def test_a_folder_without_pictures_is_one_sentence_without_progress(tmp_path: Path, capsys: Any) -> None:
    assert main(["judge", str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"camkit: {tmp_path} is a folder; pass the picture files in it\n"


# --- the reports


PICTURES = 12
GAINS = {"best": 0.5, "fair": 0.3, "blind": 0.1, "wrong": -0.3, "nowhere": np.nan, "random": 0.0, "centre": 0.2}
"""What each row gains over the random map: the best, one that beats it, one like it, a worse one, one without maps."""
MEASURED = (*DECIDING, "insertion", "deletion", "average-drop", "complexity")
LONG = "gradcam-elementwise at features.1.0"


def judgement(unreadable: dict[str, str] | None = None) -> MethodJudgement:
    """Return a judgement whose values are drawn, with a row for each mark, and one that works nowhere."""
    draws = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {name: gain + draws.normal(0, 0.02, PICTURES) for name, gain in GAINS.items()}
    values["blind"] = np.array([0.1, -0.1] * (PICTURES // 2))
    values["centre"][:2] = np.nan
    signs = {name: 1 if METRICS[name].better == "higher" else -1 for name in MEASURED}
    by_metric = {
        name: figures_of({row: sign * numbers for row, numbers in values.items()}, METRICS[name].better, 0)
        for name, sign in signs.items()
    }

    def row(
        name: str, shown: str = "", unmoved: float | None = None, empty: int = 0, failed: Any = (0, "")
    ) -> JudgedRow:
        method, layer = ("", "") if name in REFERENCES else (name, "features.1.0")
        figures = {metric: by_metric[metric][name] for metric in MEASURED}
        return JudgedRow(shown or name, method, layer, figures, 1.2, unmoved, empty, failed)

    rows = (
        row("best", LONG),
        row("fair", empty=2),
        row("blind", failed=(3, "out of memory")),
        row("wrong", unmoved=0.9),
        row("nowhere", "now|here", failed=(PICTURES, "needs attention")),
        row("random"),
        row("centre"),
    )
    names = tuple(f"{number}.png" for number in range(PICTURES))
    advice = Recommendation(LONG, f"Use {LONG}.", against={"wrong": "worse than a random map in SRG"})
    return MethodJudgement("a_model", rows, unreadable or {}, advice, names, "features.1.0", 0, 1.0)


BROKEN = {"mixed/trunc.jpg": "mixed/trunc.jpg cannot be read", "mixed/odd.png": "its class has no probability"}

NOTES = (
    "blind fails on 3 of 12 pictures: out of memory.",
    "now|here fails on 12 of 12 pictures: needs attention.",
    "fair: 2 of 12 maps are empty, and count like the random map.",
    "wrong is not recommended: worse than a random map in SRG.",
)


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_reports_mark_each_mean_alike_and_explain_the_marks() -> None:
    found = judgement()
    text = found.to_markdown()
    lines = [columns(line) for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    of_srg = {line[0].strip("`()"): re.sub(r"\d\.\d\d", "n", line[1]) for line in lines[2:]}
    assert of_srg == {
        LONG: "**n** [n, n]", "fair": "n [n, n]", "blind": "n? [-n, n]", "wrong": "-n! [-n, -n]", "now\\|here": "-",
        "random": "n [-n, n]", "centre": "n [n, n]",
    }  # fmt: skip
    legend = text.splitlines()[-1]
    for explained in ("Bold: ", "?: not significantly better", "!: significantly worse", "95% interval"):
        assert explained in legend
    in_markdown = [cell for line in lines[2:] for cell in line[1 : 1 + len(found.metrics)]]
    in_html = re.findall(r"<td[^>]*>(<b>)?(-?[\d.]*)(</b>)?([?!]?)<small>", found._repr_html_())
    assert [(bool(bold), doubt) for bold, *_, doubt in in_html] == [
        (cell.startswith("**"), "".join(re.findall(r"[?!]", cell))) for cell in in_markdown
    ]


@pytest.mark.parametrize("report", ["judge.md", "judge.html"])
def test_reports_say_on_how_many_pictures_a_value_rests_and_how_it_was_measured(report: str, tmp_path: Path) -> None:
    found = judgement(BROKEN)
    text = html.unescape((found.save(tmp_path).parent / report).read_text("utf-8")).replace("\\", "")
    assert json.loads((tmp_path / "judge.json").read_text("utf-8")) == found.to_dict()
    for row in found.rows:
        assert row.name.replace("|", "") in text.replace("|", "") and str(row.metrics["srg"]) in text
    for note in (f"Use {LONG}.", *NOTES, camkit.__version__):
        assert note in text
    assert "The fill of removed pixels is blur, and a curve has 10 steps." in text
    assert "SRG of feature cells removes cells of layer 'features.1.0', for all rows alike." in text
    assert "2 pictures could not be used: mixed/trunc.jpg cannot be read, mixed/odd.png: its class has no" in text
    assert "http" not in text.replace("http-equiv", "")


def test_json_names_directions_fill_steps_layer_and_version() -> None:
    found = judgement().to_dict()
    assert found["camkit"] == camkit.__version__
    assert (found["fill"], found["steps"], found["layer_of_feature_cells"]) == ("blur", 10, "features.1.0")
    better = {name: metric["better"] for name, metric in found["metrics"].items()}
    assert better == dict.fromkeys((*DECIDING, "insertion"), "higher") | dict.fromkeys(MEASURED[4:], "lower")
    assert found["rows"][1]["metrics"]["adcc"]["counted_like_random"] == 0
    assert found["recommendation"]["against"] == {"wrong": "worse than a random map in SRG"}


@pytest.mark.extended
def test_the_table_has_a_row_for_each_method_and_reference(tmp_path: Path) -> None:
    found = judgement()
    rows = assert_is_a_result(found, tmp_path)
    assert [row["name"] for row in rows] == [row.name for row in found.rows]
    assert rows[0]["srg_mean"] == found.rows[0].metrics["srg"].value
    assert not any(name.endswith("values") for name in rows[0])


def test_names_do_not_break_markdown(tmp_path: Path) -> None:
    found = replace(judgement(), model="a_model\n# *no* heading")
    text = (found.save(tmp_path).parent / "judge.md").read_text("utf-8")
    assert text.splitlines()[0] == r"# Which method to trust on a\_model\\n\# \*no\* heading"


# --- the command


def run(folder: Path, out: Path, *more: str) -> int:
    return main(["judge", str(folder), "--model", "demo-fair", "--out", str(out), *more])


@pytest.fixture
def judged_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command print the drawn judgement, without a run."""
    monkeypatch.setattr(camkit.metrics.judge, "judge", lambda *_, **__: judgement(BROKEN))


@pytest.mark.usefixtures("judged_already")
def test_the_printed_table_has_intervals_and_marks_that_survive_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    for name, mark in ((LONG.removesuffix(" features.1.0"), r"\*"), ("fair", " "), ("blind", r"\?"), ("wrong", "!")):
        assert len(re.findall(rf"-?\d\.\d\d{mark} \[-?\d\.\d\d, -?\d\.\d\d\]", lines[name])) == len(DECIDING)
    table, _, below = printed.partition("\n[95% interval]")
    assert max(map(len, table.splitlines())) <= 120
    explained = below.splitlines()[0]
    assert len("[95% interval]" + explained) <= 120
    for mark in "*?!":
        assert f" {mark} " in explained
    for note in NOTES:
        assert note in printed
    assert printed.splitlines()[-1] == f"Use {LONG}."


@pytest.mark.usefixtures("judged_already")
@pytest.mark.parametrize("more", [(), ("--json",), ("--quiet",)])
def test_skipped_pictures_are_told_and_end_with_2_and_earlier_reports_are_kept(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in REPORTS:
        (tmp_path / name).write_text(f"older {name}")
    assert run(tmp_path, tmp_path, *more) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors.count("mixed/trunc.jpg cannot be read") == 1
    assert errors.count("mixed/odd.png: its class has no probability") == 1
    assert {file.name for file in tmp_path.iterdir()} == {*REPORTS, *(f"before-{name}" for name in REPORTS)}
    assert [(tmp_path / f"before-{name}").read_text() for name in REPORTS] == [f"older {name}" for name in REPORTS]


def test_a_folder_that_cannot_be_written_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    assert main(["judge", str(tmp_path), "--model", "no-such-model", "--out", str(out)]) == 2
    assert f"cannot write into the folder {out}" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.extended
def test_a_real_run_with_broken_pictures_and_a_method_that_works_nowhere(
    scene_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = scene_folder, tmp_path / "out"
    (folder / "broken.png").write_bytes(b"nothing")
    (folder / "short.png").write_bytes((folder / "0.png").read_bytes()[:200])
    assert run(folder, out, "--method", "gradcam", "--method", "legrad") == 2
    printed = capsys.readouterr()
    assert f"\n{folder / 'broken.png'} is not a picture\n" in printed.err
    assert f"\n{folder / 'short.png'} cannot be read: " in printed.err
    assert "SRG of feature cells" in printed.out
    assert "Use gradcam: it beats a random map" in printed.out
    assert "legrad fails on 6 of 6 pictures: 'legrad' reads attention maps" in printed.out
    values = json.loads((out / "judge.json").read_text("utf-8"))
    assert len(values["unreadable"]) == 2
    assert values["layer_of_feature_cells"] == "features"
