"""Accuracy by kind of background, on networks whose use of a colour in the background is known by construction."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import write_masked
from torch import nn

import camkit
from camkit.background.data import Item
from camkit.background.kinds import Kind, PastedAnswer, measure_kinds

SIDE, PER_KIND = 32, 12
PATCH = (slice(0, 6), slice(0, 32))
"""The rows and the columns of a coloured stripe at the top: the kind of background."""

COLOURS = {"red": (230, 20, 20), "blue": (20, 20, 230)}
SHADES = {"a": 60, "b": 200}
"""The grey of the disc: the object of each class."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Grey discs below a red or a blue stripe; both classes have both colours equally often."""
    root = tmp_path_factory.mktemp("pictures")
    (root / "pictures").mkdir()
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    with (root / "pictures" / "pictures.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("path", "label", "place"))
        for label, shade in SHADES.items():
            for colour, values in COLOURS.items():
                for number in range(PER_KIND):
                    pixels = np.repeat(rng.integers(110, 140, (SIDE, SIDE, 1)), 3, 2).astype(np.uint8)
                    pixels[PATCH] = values
                    disc = (rows - rng.integers(14, 24)) ** 2 + (columns - rng.integers(8, 24)) ** 2 < 25
                    pixels[disc] = shade
                    write_masked(root, f"{label}/{colour}{number}.png", pixels, disc)
                    table.writerow((f"{label}/{colour}{number}.png", label, colour))
    return root


class ReadsDisc(nn.Module):
    """Answers by the disc's grey; with ``misled``, it answers b whenever it sees a dark disc below a red stripe."""

    def __init__(self, *, misled: bool) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 3, 1, bias=False)
        self.features.weight.data = torch.eye(3)[:, :, None, None]
        self.misled = misled

    def forward(self, images):
        maps = self.features(images)
        grey = maps[:, :, PATCH[0].stop :].mean(1)
        darkness, lightness = 0.35 - grey.flatten(1).amin(1), grey.flatten(1).amax(1) - 0.65
        red, _, blue = maps[:, :, *PATCH].mean((2, 3)).unbind(1)
        return torch.stack([10 * darkness - 100 * self.misled * (red - blue).relu(), 10 * lightness], 1)


def tensor_of(picture):
    return torch.from_numpy(np.array(picture.convert("RGB")).transpose(2, 0, 1)).float() / 255


def checked(folder, model, **options):
    limits = {"least_pictures": 20, "most_empty": 1.0}  # the network is too simple for good maps
    table, labels = folder / "pictures" / options.pop("table", "pictures.csv"), ["a", "b"]
    options |= {"config": {"check": {"pastes": 1}, "limits": limits}, "regions": folder / "masks"}
    return camkit.check(model.eval(), table, preprocess=tensor_of, labels=labels, **options)


@pytest.fixture(scope="module")
def misled(folder, tmp_path_factory):
    return checked(folder, ReadsDisc(misled=True), out=tmp_path_factory.mktemp("report"))


class BreaksWithoutDisc(ReadsDisc):
    """Answers NaN to pictures in which it sees no disc."""

    def forward(self, images):
        logits = super().forward(images)
        return logits.where(logits.amax(1, keepdim=True) > 0, float("nan"))


@pytest.mark.extended
def test_answers_of_nan_to_edits_are_counted_in_a_warning(folder):
    result = checked(folder, BreaksWithoutDisc(misled=False))
    (warning,) = [text for text in result.warnings if "NaN or infinity" in text]
    broken, edits = map(int, re.search(r"to (\d+) of (\d+) edits; these answers count as wrong", warning).groups())
    assert 0 < broken < edits


def test_the_worst_pair_is_the_one_that_was_built_in(misled):
    worst = misled.kinds.worst

    assert (worst.label, worst.kind, worst.right) == ("a", "red", 0)
    assert worst.elsewhere == 1
    assert misled.kinds.bad
    assert {pair.accuracy.value for pair in misled.kinds.pairs if pair != worst} == {1.0}


def test_the_gap_does_not_see_it_and_the_reasons_of_the_class_do(misled):
    assert all(abs(measured.effect.value) < 0.2 for measured in misled.overall.gap.by_fill.values())
    assert misled.judged["a"].verdict != "PASS"
    assert "the model recognises 0% of the a objects on backgrounds from red" in " ".join(
        reason.text for reason in misled.judged["a"].reasons
    )
    assert misled.verdict != "FAIL"
    assert all("from red" not in reason.text for reason in misled.judged["b"].reasons)


@pytest.mark.extended
def test_a_model_that_does_not_use_backgrounds_gets_no_warning(folder):
    result = checked(folder, ReadsDisc(misled=False))

    assert not result.kinds.bad
    assert result.kinds.warnings == {}
    assert {pair.accuracy.value for pair in result.kinds.pairs} == {1.0}


def test_every_report_says_it(misled):
    out = misled.report.parent
    stored = json.loads((out / "report.json").read_text())["kinds"]
    page, summary = misled.report.read_text(), (out / "summary.md").read_text()

    assert stored["worst"]["label"] == "a"
    assert [kind["name"] for kind in stored["kinds"]] == ["blue", "red"]
    for sentence in stored["sentences"]:
        assert sentence in page
    assert "the model recognises 0% of the a objects on backgrounds from red" in summary


@pytest.mark.extended
def test_one_kind_is_said_in_one_sentence(folder, tmp_path):
    lines = (folder / "pictures" / "pictures.csv").read_text().splitlines()
    one_place = folder / "pictures" / "one-place.csv"
    one_place.write_text("\n".join([lines[0], *(line.rpartition(",")[0] + ",red" for line in lines[1:])]))
    result = checked(folder, ReadsDisc(misled=True), table="one-place.csv", out=tmp_path)

    assert result.kinds.kinds == result.kinds.pairs == ()
    assert result.report.read_text().count("Fewer than two places have") == 1
    assert 'id="pairs"' not in result.report.read_text()


# Measures


def answers_of(rate, *, objects=40, seed=0):
    """Return answers of two classes on two kinds, right at the rate of ``rate[label, kind]``."""
    rng = np.random.default_rng(seed)
    return [
        PastedAnswer(Item(object_, Path(), label, object_), Item(behind, Path(), "", behind, place=kind), right)
        for label in "ab"
        for n in range(objects)
        for kind in ("x", "y")
        for object_, behind, right in [(f"{label}{n}", f"{kind}{n}", bool(rng.random() < rate.get((label, kind), 0.9)))]
    ]  # fmt: skip


KINDS = [Kind(name, label, 1.0, 40) for name, label in (("x", "a"), ("y", "b"))]


def test_a_pair_is_compared_with_the_same_class_on_the_other_kinds():
    found = measure_kinds(KINDS, answers_of({("b", "x"): 0.5}), 0.1, 0.05, 0)

    assert (found.worst.label, found.worst.kind) == ("b", "x")
    assert found.bad
    assert found.worst.loss.low > 0
    easy_class = next(pair for pair in found.pairs if (pair.label, pair.kind) == ("a", "x"))
    assert easy_class.p > 0.05


def test_every_class_that_is_bad_on_a_place_warns():
    found = measure_kinds(KINDS, answers_of({("a", "y"): 0.5, ("b", "x"): 0.3}), 0.1, 0.05, 0)

    assert [(pair.label, pair.kind) for pair in found.bad] == [("b", "x"), ("a", "y")]
    assert found.worst == found.bad[0]
    assert found.warnings.keys() == {"a", "b"}
    assert "of the a objects on backgrounds from y" in found.warnings["a"][0].text


def test_what_is_hard_everywhere_or_a_small_loss_or_waived_or_rare_does_not_warn():
    hard = answers_of({("b", "x"): 0.5, ("b", "y"): 0.5})
    sure = answers_of({("b", "x"): 0.95, ("b", "y"): 1.0}, objects=3000)
    bad = {("b", "x"): 0.2}

    assert not measure_kinds(KINDS, hard, 0.1, 0.05, 0).bad
    assert not measure_kinds(KINDS, sure, 0.1, 0.05, 0, resamples=500).bad
    assert not measure_kinds(KINDS, answers_of(bad), 0.1, 0.05, 0, without=["b"]).bad
    few = measure_kinds(KINDS, answers_of(bad, objects=14), 0.1, 0.05, 0)
    assert few.worst is None
    assert few.pairs
