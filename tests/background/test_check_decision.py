"""The decision table of the check, cell by cell, and that documentation, page and words agree with it."""

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camkit.background.effects import LEVELS, OVERALL, Effect, MeasuredEffect, Measures
from camkit.background.rule import VERDICTS, Judgement, judge, reason_of
from camkit.kit.statistics import Estimate
from camkit.options import Limits

LIMIT = 0.10
LIMITS = Limits()
DOCS = Path(__file__).parents[2] / "docs/check.md"


def measured(
    value, low=math.nan, high=math.nan, *, p=1.0, p_zero=1.0, pictures=160, groups=None, accuracies=(0.9, 0.8)
):
    return MeasuredEffect(Estimate(value, low, high, groups or pictures), p, p_zero, accuracies, pictures)


def effect(value=None, low=math.nan, high=math.nan, *, name="gap", label=OVERALL, fills=None, groups=160, **known):
    """Return an effect whose mean has an estimate and an interval; the fills have the same estimate by default."""
    if value is None:
        return Effect(name, {}, LIMIT, label=label, **known)
    by_fill = {fill: measured(of_fill) for fill, of_fill in zip(("blur", "tile"), fills or (value, value), strict=True)}
    return Effect(name, by_fill, LIMIT, measured(value, low, high, groups=groups), label, **known)


class_effect = functools.partial(effect, label="cat")
sufficiency = functools.partial(effect, name="sufficiency")
ABOVE, BELOW = math.nextafter(LIMIT, 1), math.nextafter(LIMIT, 0)

LEVEL_CELLS = {
    "all: significant": (effect(0.3, 0.2, 0.4, significant=True), "fail"),
    "all: significant, one fill at the limit": (effect(0.2, 0.11, 0.3, significant=True, fills=(0.3, 0.1)), "warn"),
    "all: a cue is significant": (effect(0.3, 0.2, 0.4, name="noise", significant=True), "fail"),
    "all: interval ends below the limit": (effect(0.02, -0.05, BELOW), "excluded"),
    "all: excluded, though one fill is above the limit": (effect(0.03, -0.02, 0.08, fills=(0.11, -0.05)), "excluded"),
    "all: interval around 0 that ends exactly at the limit": (effect(0.02, -0.06, LIMIT), "open"),
    "all: interval from exactly 0": (effect(0.07, 0.0, 0.13), "open"),
    "all: interval above 0 that ends exactly at the limit": (effect(0.05, 0.01, LIMIT), "warn"),
    "all: interval above 0 that ends above the limit": (effect(0.07, 0.01, 0.13), "warn"),
    "all: estimate at the limit, interval around 0": (effect(LIMIT, -0.02, 0.22), "open"),
    "all: estimate above the limit, interval around 0": (effect(ABOVE, -0.1, 0.3), "warn"),
    "all: no interval": (effect(0.05), "open"),
    "all: no interval, estimate above the limit": (effect(0.12), "warn"),
    "all: few groups": (effect(0.6, 0.3, 0.9, groups=5, least_groups=6), "open"),
    "all: few pictures": (effect(0.6, 0.3, 0.9, enough=False), "open"),
    "all: not measured": (effect(), "open"),
    "class: significant": (class_effect(0.3, 0.2, 0.4, significant=True, present=True), "fail"),
    "class: significant, one fill at the limit": (
        class_effect(0.2, 0.11, 0.3, significant=True, present=True, fills=(0.3, 0.1)),
        "open",
    ),
    "class: above 0, estimates above the limit": (class_effect(0.15, 0.02, 0.28, present=True), "warn"),
    "class: above 0, one fill at the limit": (class_effect(0.15, 0.02, 0.28, present=True, fills=(0.2, 0.1)), "open"),
    "class: estimates above the limit, not above 0": (class_effect(0.15, 0.02, 0.28), "open"),
    "class: excluded": (class_effect(0.0, -0.05, BELOW), "excluded"),
    "class: few groups": (class_effect(0.9, 0.6, 1.0, present=True, groups=8, least_groups=10), "open"),
    "class: not measured": (class_effect(), "open"),
    "sufficiency: interval above the limit": (sufficiency(0.25, ABOVE, 0.3), "warn"),
    "sufficiency: interval above the limit, gap excluded": (sufficiency(0.25, 0.2, 0.3, counts=False), "open"),
    "sufficiency: interval from exactly the limit": (sufficiency(0.2, LIMIT, 0.3), "open"),
    "sufficiency: few pictures": (sufficiency(0.5, 0.4, 0.6, enough=False), "open"),
    "sufficiency: excluded": (sufficiency(0.01, -0.02, 0.04), "excluded"),
    "sufficiency: not measured": (sufficiency(), "open"),
}


@pytest.mark.parametrize("cell", LEVEL_CELLS)
def test_every_cell_of_the_table_of_levels(cell):
    known, level = LEVEL_CELLS[cell]

    assert known.level == level


@pytest.mark.parametrize(("scope", "level"), [(scope, rule.then) for scope, rules in LEVELS.items() for rule in rules])
def test_every_level_has_a_cell(scope, level):
    assert (scope, level) in {(known.scope, level) for known, level in LEVEL_CELLS.values()}


def verdict_of_the_table(required, others, untested, warned):
    """The table of CHECK.md as a slow list of conditions."""
    levels = [*required, *others]
    if levels.count("fail"):
        return "FAIL"
    if levels.count("warn") or warned:
        return "WARN"
    return "PASS" if required.count("excluded") == len(required) and not untested else "INCONCLUSIVE"


def test_every_cell_of_the_table_of_verdicts():
    levels = ["fail", "excluded", "warn", "open"]
    pairs = list(itertools.product(levels, repeat=2))
    seen = set()
    for cell in itertools.product(pairs, [(), *pairs], [False, True], [False, True]):
        found = Judgement(*cell).verdict
        assert found == verdict_of_the_table(*cell)
        seen.add(found)
    assert seen == {rule.then for rule in VERDICTS}


def test_the_documentation_prints_the_tables():
    rows = [" ".join(row.strip("|").split()) for row in DOCS.read_text().splitlines() if row.startswith("|")]
    for scope, rules in LEVELS.items():
        for rule in rules:
            (row,) = [row for row in rows if row.startswith(f"{rule.then} | ")]
            assert row.split(" | ")[1 + [*LEVELS].index(scope)] == rule.when
    for rule in VERDICTS:
        assert any(row.startswith(f"{rule.then} | {rule.when} |") for row in rows), rule


def measures_of(name, effects, *, pictures=160):
    own = {"gap": None, "sufficiency": None, "attraction": None, **effects}
    own |= own.pop("cues", {})
    known = {
        effect: Effect(effect, {}, LIMIT, label=name)
        if of_effect is None
        else Effect(effect, {"blur": of_effect, "tile": of_effect}, LIMIT, of_effect, name)
        for effect, of_effect in own.items()
    }
    return Measures(name, pictures, pictures, Estimate(0.9, 0.85, 0.95, pictures), 0.0, effects=known)


CLEAN = {"gap": measured(0.0, -0.03, 0.03), "attraction": measured(0.0, -0.03, 0.03)}
CLEAN_OVERALL = {"gap": measured(0.0, -0.03, 0.03), "sufficiency": measured(0.0, -0.03, 0.03)}


def model(overall=CLEAN_OVERALL, strict=False, waived=(), exempt=(), **classes):
    """Judge a model with two clean classes and the given ones."""
    every = {"cat": CLEAN, "dog": CLEAN, **classes}
    measures = {name: measures_of(name, own) if isinstance(own, dict) else own for name, own in every.items()}
    return judge(
        {**measures, OVERALL: measures_of(OVERALL, overall)},
        Limits(strict=strict),
        exempt=dict.fromkeys(exempt, "expect = any"),
        waived=dict.fromkeys(waived, "known"),
    )


def test_a_class_that_is_open_only_matters_to_a_strict_check():
    open_class = {"gap": measured(0.02, -0.10, 0.14), "attraction": CLEAN["attraction"]}

    loose, strict = model(bird=open_class), model(bird=open_class, strict=True)

    assert (loose[OVERALL].verdict, loose["bird"].verdict) == ("PASS", "PASS")
    assert (strict[OVERALL].verdict, strict["bird"].verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert any("for 1 of 3 classes alone" in reason.text for reason in loose[OVERALL].reasons)
    assert any(reason.text.startswith("bird: a gap up to 0.14") for reason in strict[OVERALL].reasons)
    assert model(strict=True)[OVERALL].verdict == "PASS"


SUFFICIENT = measured(0.25, 0.20, 0.30, p=1e-9, accuracies=(0.50, 0.25))


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (measured(0.05, 0.01, BELOW), "PASS"),
        (measured(0.02, -0.06, 0.10), "WARN"),
        (None, "WARN"),
        (measured(0.2, 0.11, 0.29, p=0.02), "FAIL"),
    ],
    ids=["the gap is excluded", "the gap is open", "no gap was measured", "the gap fails"],
)
def test_sufficiency_counts_only_while_the_gap_is_not_excluded(gap, verdict):
    found = model({**CLEAN_OVERALL, "sufficiency": SUFFICIENT, "gap": gap})

    assert found[OVERALL].verdict == verdict
    (text,) = [reason.text for reason in found[OVERALL].reasons if "a sufficiency of 0.25" in reason.text]
    assert text.endswith("it does not count, because the gap of all classes is excluded") == (verdict == "PASS")
    assert found[OVERALL].effects["sufficiency"].level == ("open" if verdict == "PASS" else "warn")


def test_a_warning_beside_a_class_that_could_not_be_tested_names_measured():
    bird = {**CLEAN, "gap": measured(0.15, 0.02, 0.28, p_zero=0.001)}

    found = model(bird=bird, wolf=few("wolf"))[OVERALL]

    assert (found.verdict, found.untested) == ("WARN", True)
    assert any(reason.text.startswith("bird: ") for reason in found.reasons)
    (untested,) = [reason for reason in found.reasons if reason.text.startswith("wolf: only 20 pictures")]
    assert untested.step == "add at least 10 pictures of wolf, with regions"


def few(name="bird"):
    return measures_of(name, {"gap": measured(0.0, -0.1, 0.1, pictures=20)}, pictures=20)


def gap(*figures, **known):
    return {"gap": measured(*figures, **known)}


MANY = {f"class {number}": CLEAN for number in range(300)}
CUES = dict.fromkeys(("sharpness", "colour"), measured(0.0, -0.03, 0.03))
VERDICT_CELLS = [
    ({"sufficiency": measured(0.15, 0.05, 0.25)}, {}, "PASS"),  # an open sufficiency does not prevent a PASS
    ({"noise": measured(0.02, -0.02, 0.06)}, {}, "PASS"),
    ({"noise": measured(0.02, -0.06, 0.12)}, {}, "INCONCLUSIVE"),  # an open cue does
    ({"noise": measured(0.07, 0.01, 0.12)}, {}, "WARN"),
    ({"noise": measured(0.2, 0.12, 0.28, p=0.0049)}, {}, "FAIL"),
    ({"noise": measured(0.2, 0.12, 0.28, p=0.0051)}, {}, "WARN"),
    ({"noise": measured(0.2, 0.12, 0.28, p=0.002)}, {}, "FAIL"),
    ({**CUES, "noise": measured(0.2, 0.12, 0.28, p=0.002)}, {}, "WARN"),  # by Holm, 3 x 0.002 is above 0.005
    ({}, {"bird": {**CLEAN, **gap(0.15, 0.02, 0.28, p_zero=0.016)}}, "WARN"),  # six effects share 10 %
    ({}, {"bird": {**CLEAN, **gap(0.15, 0.02, 0.28, p_zero=0.017)}}, "PASS"),
    ({}, {"bird": {**CLEAN, **gap(0.3, 0.12, 0.4, p=0.0025, p_zero=1e-6)}}, "FAIL"),  # six share 0.3 of the level
    ({}, {"bird": {**CLEAN, **gap(0.3, 0.12, 0.4, p=0.0026, p_zero=1e-6)}}, "WARN"),
    ({}, {"bird": few()}, "INCONCLUSIVE"),
    ({}, {"bird": few(), "waived": ["bird"]}, "PASS"),
    ({}, {"cat": few("cat"), "dog": few("dog")}, "INCONCLUSIVE"),
    (gap(0.2, 0.12, 0.28, p=0.03), MANY, "FAIL"),  # what all show together is not diluted by the number of classes
    (gap(0.2, 0.12, 0.28, p=0.031), MANY, "WARN"),
]


@pytest.mark.parametrize(("overall", "classes", "verdict"), VERDICT_CELLS, ids=range(len(VERDICT_CELLS)))
def test_the_verdict_on_measures(overall, classes, verdict):
    assert model({**CLEAN_OVERALL, **overall}, **classes)[OVERALL].verdict == verdict


def gap_of(pictures, *figures):
    return Effect("gap", {}, LIMIT, measured(*figures, pictures=pictures))


@pytest.mark.parametrize(
    ("known", "above", "more"),
    [
        (gap_of(100, 0.0, -0.2, 0.2), 0.2, (300, 700)),  # twice as far as the limit: four times as many
        (gap_of(160, 0.05, -0.05, 0.15), 0.15, (480, 1200)),
        (gap_of(160, 0.02, -0.06, 0.10), 0.10, (1, 160)),  # exactly at the limit
        (gap_of(160, 0.02, -0.07, 0.11), 0.11, (43, 250)),
        (gap_of(160, 0.09, -0.01, 0.19), 0.19, None),  # a hundred times as many
        (gap_of(160, 0.10, -0.02, 0.22), 0.22, None),  # no number: the estimate is the limit
        (gap_of(160, 0.05), None, None),
        (gap_of(6, 0.0, -0.39, 0.39), 0.39, (29, 64)),  # as far as Wilson's interval reaches: 35 groups, not 15 times 6
        (effect(0.02, -0.05, 0.09), 0.09, (0, 0)),
        (effect(-0.2, -0.3, -0.1), 0.0, (0, 0)),
        (effect(0.07, 0.01, 0.13), 0.13, (480, 1200)),  # a warning, but more pictures could still exclude it
        (effect(0.12, 0.07, 0.17), 0.17, None),
        (effect(0.3, 0.2, 0.4, significant=True), 0.4, None),
        (effect(), None, None),
    ],
)
def test_the_number_of_pictures_that_excludes_an_effect_follows_the_square_root_rule(known, above, more):
    assert (known.excluded_above, known.more_pictures) == (above, more)
    if known.level == "open":
        reason = reason_of(known)
        assert reason.step
        assert more is None or reason.step.startswith(f"add about {more[0]} to {more[1]} pictures with regions, of new")
        assert reason.more == (more and (OVERALL, more[1]))
        assert more is None or f"about {more[0]} to {more[1]} more pictures" in reason.text
        assert more or above is None or "too near the limit for any number of pictures" in reason.text


def test_the_second_number_of_pictures_settles_four_of_five_checks():
    rng, error, value = np.random.default_rng(0), 0.06, 0.02
    known = Effect("gap", {}, LIMIT, measured(value, value - 1.96 * error, value + 1.96 * error, pictures=100))
    for number, share in zip(known.more_pictures, (0.5, 0.8), strict=True):
        narrow = error * (100 / (100 + number)) ** 0.5
        settled = np.mean(rng.normal(value, narrow, 4000) + 1.96 * narrow < LIMIT)

        assert settled == pytest.approx(share, abs=0.03)


def test_a_pass_says_what_it_excludes_for_all_classes_together_and_for_each():
    found = model(bird={"gap": measured(0.02, -0.04, 0.085), "attraction": CLEAN["attraction"]})

    assert [reason.text for reason in found[OVERALL].reasons] == [
        "a gap above 0.03 is excluded at 95% (measured: 0.00 (blur 0.00, tile 0.00), limit 0.10)",
        "a sufficiency above 0.03 is excluded at 95% (measured: 0.00 (blur 0.00, tile 0.00), limit 0.10)",
        "for each class alone, a gap above 0.09 is excluded at 95% (the least certain class is bird)",
        "for each class alone, an attraction above 0.03 is excluded at 95% (the least certain class is cat)",
    ]
    assert found["bird"].reasons[0].text.startswith("a gap above 0.09 is excluded at 95% (measured: 0.02 (blur 0.02")


SEVERITY = {"PASS": 0, "INCONCLUSIVE": 1, "WARN": 2, "FAIL": 3}


@st.composite
def effects(draw):
    """Draw the estimate and the standard error of an effect with either fill."""
    return {fill: (draw(st.floats(-0.3, 0.6)), draw(st.floats(0.001, 0.3))) for fill in ("blur", "tile")}


def as_measured(value, error):
    p, p_zero = (0.5 * math.erfc((value - bound) / error / 2**0.5) for bound in (LIMIT, 0.0))
    return measured(value, value - 1.96 * error, value + 1.96 * error, p=p, p_zero=p_zero)


def as_effect(label, name, figures, shift=0.0):
    """Return an effect whose p-values follow from its estimates; the errors of the fills go together entirely."""
    by_fill = {fill: as_measured(value + shift, error) for fill, (value, error) in figures.items()}
    mean = as_measured(*np.mean([(value + shift, error) for value, error in figures.values()], axis=0).tolist())
    return Effect(name, by_fill, LIMIT, mean, label)


@st.composite
def models(draw):
    classes = draw(st.integers(1, 4))
    drawn = {(OVERALL, "gap"): draw(effects()), (OVERALL, "sufficiency"): draw(effects())}
    for number in range(classes):
        drawn |= {(f"class {number}", name): draw(effects()) for name in ("gap", "attraction")}
    return drawn, draw(st.sampled_from(sorted(drawn))), draw(st.floats(0, 0.5)), draw(st.booleans())


def judged_model(drawn, strict, shifted=None, shift=0.0):
    by_label = {}
    for (label, name), figures in drawn.items():
        moved = shift if (label, name) == shifted else 0.0
        by_label.setdefault(label, {})[name] = as_effect(label, name, figures, moved)
    measures = {
        label: replace(base, effects={**base.effects, **own})
        for label, own in by_label.items()
        for base in [measures_of(label, {})]
    }
    return judge(measures, Limits(strict=strict), exempt={}, waived={})


def verdict_on(*drawn_model):
    return judged_model(*drawn_model)[OVERALL].verdict


@settings(max_examples=200, deadline=None)
@given(models())
def test_no_pass_hides_an_estimate_above_its_limit(drawn_model):
    drawn, _, _, strict = drawn_model
    found = judged_model(drawn, strict)
    above = [effect for own in found.values() for effect in own.effects.values() if effect.value > LIMIT]

    if found[OVERALL].verdict == "PASS":
        assert all(effect.label != OVERALL or effect.name == "sufficiency" for effect in above)
        doubts = ("may be chance", "not with each way of filling holes")
        uncertain = [reason.text for reason in found[OVERALL].reasons if reason.text.endswith(doubts)]
        named = {effect.label for effect in above if effect.label != OVERALL}
        assert named == {text.partition(":")[0] for text in uncertain}
    if found[OVERALL].effects["gap"].value > LIMIT:
        assert found[OVERALL].verdict in ("WARN", "FAIL")


@settings(max_examples=200, deadline=None)
@given(models(), st.floats(0.11, 0.5), st.floats(0.11, 0.5))
def test_a_gap_of_all_classes_fails_if_its_intervals_with_both_fills_lie_above_the_limit(drawn_model, first, second):
    drawn, _, _, strict = drawn_model
    (_, blur), (_, tile) = drawn[OVERALL, "gap"].values()
    drawn[OVERALL, "gap"] = {"blur": (first + 1.96 * blur, blur), "tile": (second + 1.96 * tile, tile)}

    assert verdict_on(drawn, strict) == "FAIL"


@settings(max_examples=200, deadline=None)
@given(models())
def test_neither_a_larger_effect_nor_a_strict_check_makes_the_verdict_milder(drawn_model):
    drawn, chosen, shift, strict = drawn_model

    before, after = verdict_on(drawn, strict), verdict_on(drawn, strict, chosen, shift)

    assert SEVERITY[after] >= SEVERITY[before]
    assert SEVERITY[verdict_on(drawn, True)] >= SEVERITY[verdict_on(drawn, False)]
