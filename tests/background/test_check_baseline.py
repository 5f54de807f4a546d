"""The comparison with an earlier run: what fell by more than the limit and by more than chance."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from results import with_run

import camkit
from camkit.background.effects import ImageRow, Pasted
from camkit.background.report import REPORTS, workflow_commands
from camkit.background.result import Change, Flip, check_comparable, compare
from camkit.errors import InputError

COUNT = 60


def rows(*, right: float, on: dict[str, float]) -> list[ImageRow]:
    """Return pictures of class "a": the first share of them is right, and so are the first shares on each background.

    The backgrounds of the own class are always recognised.
    """
    made = []
    for number in range(COUNT):
        shares = {background: float(number < share * COUNT) for background, share in on.items()}
        others = (Pasted(name, "g", "a" if value else name) for name, value in shares.items())
        of_fill = {
            "same": 1.0,
            "other": float(np.mean(list(shares.values()))),
            "pasted": (Pasted("a", "g", "a"), *others),
        }
        by_fill: dict[str, Any] = {name: {"tile": value, "blur": value} for name, value in of_fill.items()}
        name, is_right = f"{number}.png", number < right * COUNT
        made.append(ImageRow(name, "a", name, is_right, "a" if is_right else "b", 0.5, "ok", **by_fill))
    return made


def changed(before: list[ImageRow], now: list[ImageRow], limit: float = 0.02) -> Change:
    contents = {row.name: f"hash of {row.name}" for row in now}
    report = {"images": [{**asdict(row), "sha256": contents[row.name]} for row in before]}
    return compare(report, now, contents, 0, limit)


def test_the_accuracy_comes_first_and_the_pictures_are_named() -> None:
    change = changed(rows(right=1, on={"b": 1, "c": 1}), rows(right=0.5, on={"b": 1, "c": 1}))
    assert change.accuracy is not None and change.gap is not None
    assert (change.pictures, change.accuracy.value, change.gap.value) == (COUNT, -0.5, 0)
    assert [flip.name for flip in change.flips] == [f"{number}.png" for number in range(COUNT // 2, COUNT)]
    assert {(flip.before, flip.now) for flip in change.flips} == {("a", "b")}
    assert (change.gained, changed(rows(right=0.5, on={"b": 1}), rows(right=1, on={"b": 1})).gained) == (0, COUNT // 2)
    (sentence,) = change.worse
    assert sentence.startswith("the accuracy on unedited pictures fell by 0.50 (at least 0.3")


def test_the_background_whose_accuracy_fell_most_is_named() -> None:
    change = changed(rows(right=1, on={"b": 1, "c": 1}), rows(right=1, on={"b": 0.4, "c": 0.9}))
    pair, gap = change.pair, change.gap
    assert pair is not None and gap is not None
    assert (pair.label, pair.background) == ("a", "b")
    assert (pair.accuracy, pair.change.value, gap.value) == pytest.approx((0.4, -0.6, 0.35))
    assert change.worse == [
        f"the background gap grew by 0.35 (at least {gap.low:.2f}) since the baseline",
        "the accuracy of a on backgrounds of b fell by 0.60 to 0.40 since the baseline",
    ]


def test_what_is_equal_better_or_within_the_limit_is_not_worse() -> None:
    before = rows(right=0.8, on={"b": 0.8, "c": 0.8})
    assert changed(before, before).worse == []
    assert changed(before, rows(right=0.9, on={"b": 1, "c": 1})).worse == []
    little = rows(right=0.7, on={"b": 0.7, "c": 0.7})
    assert changed(before, little, limit=0.2).worse == []
    assert len(changed(before, little, limit=0.0).worse) == 3


def test_chance_is_seldom_worse() -> None:
    """A model that answers at random is worse than its own repetition in few of 40 tries."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(40):
        before, now = (
            [replace(row, right=bool(right)) for row, right in zip(rows(right=1, on={"b": 1}), draws, strict=True)]
            for draws in rng.random((2, COUNT)) < 0.7
        )
        alarms += bool(changed(before, now).worse)
    assert alarms <= 4


def test_a_refusal_names_the_setting() -> None:
    now = {"check": {"seed": 1, "pastes": 2}, "limits": {"gap": 0.1, "worse": 0.5}}
    earlier: dict[str, Any] = {"hashes": {"data": "d", "settings": "s"}}
    hashes = {"data": "d", "settings": "other"}
    for settings, named in (
        ({"check": {"seed": 0, "pastes": 2}, "limits": {"gap": 0.1}}, "check.seed = 0 and not 1"),
        ({"check": {"seed": 1, "pastes": 2}, "limits": {"gap": 0.2}}, "limits.gap = 0.2 and not 0.1"),
        ({"check": {"seed": 1, "pastes": 2}, "limits": {"gap": 0.1, "worse": 0.02}}, "another class map"),
        (None, "another class map"),
    ):
        with pytest.raises(InputError, match=f"was made with {named}.*make a new baseline"):
            check_comparable({**earlier, "settings": settings}, hashes, now, Path("before.json"))


CONFIG = {"check": {"per_class": 8, "pastes": 1}, "limits": {"least_pictures": 8}}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return camkit.scenes.write_scenes(tmp_path_factory.mktemp("scenes"), 20)


@pytest.fixture(scope="module")
def fair(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> camkit.CheckResult:
    return camkit.check("demo-fair", scenes, config=CONFIG, out=tmp_path_factory.mktemp("fair"))


@pytest.mark.extended
def test_a_model_that_is_worse_fails_only_if_asked(fair: camkit.CheckResult, scenes: Path) -> None:
    change = replace(changed(rows(right=1, on={"b": 1}), rows(right=0.5, on={"b": 1})), flips=())
    worse = with_run(replace(fair, change=change), inconclusive="pass")
    failing = with_run(worse, fail_on_worse=True)
    assert (worse.exit_code(), failing.exit_code()) == (0, 1)
    worse.assert_ok()
    sentence = r"worse than the baseline: the accuracy on unedited pictures fell by 0\.50"
    with pytest.raises(AssertionError, match=sentence):
        failing.assert_ok()
    assert 'name="since the baseline"' in REPORTS["junit.xml"](failing)
    assert "change since the baseline" in REPORTS["report.html"](failing)
    worst, *_ = workflow_commands(failing)
    assert worst.startswith("::error title=camkit%3A worse than the baseline::the accuracy on unedited pictures fell")
    assert fair.report is not None
    biased = camkit.check("demo-biased", scenes, config=CONFIG, baseline=fair.report.with_name("report.json"))
    assert any(warning.startswith("the background gap grew by ") for warning in biased.warnings)


@pytest.mark.extended
def test_the_page_shows_the_pictures_whose_answers_flipped(fair: camkit.CheckResult) -> None:
    lost = [row for row in fair.images if row.label == "bird"][:15] + [row for row in fair.images if row.label == "car"]
    change = Change(len(fair.images), None, None, flips=tuple(Flip(row.name, row.label, "ship") for row in lost[:16]))
    page = REPORTS["report.html"](replace(fair, change=change))
    gallery = page.split('<details id="flips">')[1].split("</details>")[0]
    assert gallery.count("<img ") == 12
    assert gallery.count("car before, ship now") == 2  # in its picture's text and in the caption
    assert "And 4 more" in gallery
    few = REPORTS["report.html"](replace(fair, change=replace(change, flips=change.flips[:2])))
    assert few.split('<details id="flips" open>')[1].split("</details>")[0].count("<img ") == 2
    assert 'id="flips"' not in REPORTS["report.html"](fair)
