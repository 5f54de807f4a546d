"""The decision table of the check, cell by cell, and that documentation, page and words agree with it."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from camkit.background.data import Item
from camkit.background.effects import LEVELS, OVERALL, WHOLE_PICTURE, Effect, MeasuredEffect, Measures
from camkit.background.forecast import CHANCE_TO_EXCLUDE, SPREAD, notice, pictures_needed
from camkit.background.reasons import reason_of
from camkit.background.rule import VERDICTS, Findings, judge
from camkit.config.settings import LimitsSection
from camkit.kit.statistics import Estimate

LIMIT = 0.10
LIMITS = LimitsSection()
DOCS = Path(__file__).parents[2] / "docs/check.md"


def measured(value, low, high, *, p=1.0, pictures=160, groups=None, accuracies=(0.9, 0.8)):
    return MeasuredEffect(Estimate(value, low, high, groups or pictures), p, accuracies, pictures)


def effect(*fills, significant=False, name="gap"):
    by_fill = {fill: measured(*figures) for fill, figures in zip(("blur", "tile"), fills, strict=False)}
    return Effect(name, by_fill, LIMIT, 0.01 if significant else 1.0, significant)


NOTHING_KNOWN = (0.05, math.nan, math.nan)

LEVEL_CELLS = {
    "significant": (effect((0.3, 0.2, 0.4), significant=True), "fail"),
    "significant, but overruled": (
        replace(effect((0.3, 0.2, 0.4), name="sufficiency", significant=True), overruled=True),
        "warn",
    ),
    "estimate above the limit": (effect((0.12, 0.07, 0.17)), "warn"),
    "estimate above the limit, interval around 0": (effect((0.12, -0.02, 0.26)), "warn"),
    "estimate exactly at the limit, interval around 0": (effect((0.10, -0.02, 0.22)), "open"),
    "estimate exactly at the limit, interval above 0": (effect((0.10, 0.01, 0.19)), "warn"),
    "estimate just above the limit": (effect((math.nextafter(LIMIT, 1), -0.1, 0.3)), "warn"),
    "interval above 0 with its end above the limit": (effect((0.07, 0.01, 0.13)), "warn"),
    "interval from exactly 0": (effect((0.07, 0.0, 0.13)), "open"),
    "interval above 0 that ends exactly at the limit": (effect((0.05, 0.01, 0.10)), "open"),
    "interval above 0 that ends below the limit": (effect((0.05, 0.01, 0.09)), "excluded"),
    "interval around 0 that ends exactly at the limit": (effect((0.02, -0.06, 0.10)), "open"),
    "interval around 0 that ends below the limit": (effect((0.02, -0.05, 0.09)), "excluded"),
    "interval around 0 that ends above the limit": (effect((0.02, -0.10, 0.14)), "open"),
    "negative effect": (effect((-0.2, -0.3, -0.1)), "excluded"),
    "no interval": (effect(NOTHING_KNOWN), "open"),
    "no interval, estimate above the limit": (effect((0.12, math.nan, math.nan)), "warn"),
    "two fills, both excluded": (effect((0.02, -0.05, 0.09), (0.03, -0.03, 0.08)), "excluded"),
    "two fills, one open": (effect((0.02, -0.05, 0.09), (0.03, -0.06, 0.12)), "open"),
    "two fills, one without an interval": (effect((0.02, -0.05, 0.09), NOTHING_KNOWN), "open"),
    "two fills, one above the limit": (effect((0.02, -0.05, 0.09), (0.12, 0.07, 0.17)), "warn"),
    "fills that point apart": (effect((-0.4, -0.5, -0.3), (0.6, 0.5, 0.7)), "warn"),
    "two fills, both above the limit": (effect((0.12, 0.07, 0.17), (0.14, 0.08, 0.20)), "warn"),
    "not measured": (effect(), "open"),
}


@pytest.mark.parametrize("cell", LEVEL_CELLS)
def test_every_cell_of_the_table_of_levels(cell):
    known, level = LEVEL_CELLS[cell]

    assert known.level == level


@pytest.mark.parametrize("level", [rule.level for rule in LEVELS])
def test_every_level_has_a_cell(level):
    assert level in {level for _, level in LEVEL_CELLS.values()}


def verdict_of_the_table(required, others, untested, warned):
    """The table of CHECK.md as a slow list of conditions."""
    levels = [*required, *others]
    if levels.count("fail"):
        return "FAIL"
    if untested:
        return "INCONCLUSIVE"
    if levels.count("warn") or warned:
        return "WARN"
    return "PASS" if required.count("excluded") == len(required) else "INCONCLUSIVE"


def test_every_cell_of_the_table_of_verdicts():
    levels = [rule.level for rule in LEVELS]
    seen = set()
    for required in itertools.product(levels, repeat=2):
        for others in [(), *itertools.product(levels, repeat=2)]:
            for flags in itertools.product([False, True], repeat=2):
                found = Findings(required, others, *flags).verdict

                assert found == verdict_of_the_table(required, others, *flags)
                seen.add(found)

    assert seen == {rule.verdict for rule in VERDICTS}


def tables_of(text):
    return [" ".join(row.strip("|").split()) for row in text.splitlines() if row.startswith("|")]


def test_the_documentation_prints_the_tables():
    rows = tables_of(DOCS.read_text())

    for number, rule in enumerate(LEVELS, start=1):
        assert f"{number} | {rule.level} | {rule.when}" in rows
    for number, rule in enumerate(VERDICTS, start=1):
        assert any(row.startswith(f"{number} | {rule.verdict} | {rule.when} |") for row in rows), rule


def measures_of(name, effects, *, pictures=160, accuracy=0.9):
    own = {"gap": {}, "sufficiency": {}, "attraction": {}, **effects}
    own |= {cue: {WHOLE_PICTURE: effect} for cue, effect in own.pop("cues", {}).items()}
    known = {effect: Effect(effect, by_fill, LIMIT) for effect, by_fill in own.items()}
    return Measures(name, pictures, pictures, Estimate(accuracy, 0.85, 0.95, pictures), 0.0, effects=known)


def both(value, low, high, p=1.0, accuracies=(0.9, 0.8), pictures=160):
    return {
        fill: measured(value, low, high, p=p, accuracies=accuracies, pictures=pictures) for fill in ("blur", "tile")
    }


CLEAN = {"gap": both(0.0, -0.03, 0.03), "attraction": both(0.0, -0.03, 0.03)}
CLEAN_OVERALL = {"gap": both(0.0, -0.03, 0.03), "sufficiency": both(0.0, -0.03, 0.03)}


def model(overall=CLEAN_OVERALL, strict=False, waived=(), exempt=(), **classes):
    """Judge a model with two clean classes and the given ones."""
    every = {"cat": CLEAN, "dog": CLEAN, **classes}
    measures = {name: measures_of(name, own) if isinstance(own, dict) else own for name, own in every.items()}
    return judge(
        {**measures, OVERALL: measures_of(OVERALL, overall)},
        LimitsSection(strict=strict),
        exempt=dict.fromkeys(exempt, "expect = any"),
        waived=dict.fromkeys(waived, "known"),
    )


def test_the_network_that_passed_although_its_estimates_lay_above_the_limits():
    overall = {
        "gap": both(0.12, 0.07, 0.17, p=0.031, accuracies=(0.90, 0.78)),
        "sufficiency": both(0.07, 0.00, 0.13, p=0.8, accuracies=(0.17, 0.10)),
    }
    found = model(overall, bird={"gap": CLEAN["gap"], "attraction": both(0.18, 0.11, 0.26, p=0.011)})

    texts = [reason.text for reason in found[OVERALL].reasons]
    assert found[OVERALL].verdict == "WARN"
    assert any("the gap is probably between 0.07 and 0.17; the limit is 0.10" in text for text in texts)
    assert any("the attraction is probably between 0.11 and 0.26; the limit is 0.10" in text for text in texts)
    assert found["bird"].verdict == "WARN"


def test_a_class_that_is_open_only_matters_to_a_strict_check():
    open_class = {"gap": both(0.02, -0.10, 0.14), "attraction": CLEAN["attraction"]}

    loose, strict = model(bird=open_class), model(bird=open_class, strict=True)

    assert (loose[OVERALL].verdict, loose["bird"].verdict) == ("PASS", "PASS")
    assert (strict[OVERALL].verdict, strict["bird"].verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert any("for 1 of 3 classes alone" in reason.text for reason in loose[OVERALL].reasons)
    assert any(reason.text.startswith("bird: a gap up to 0.14") for reason in strict[OVERALL].reasons)
    assert model(strict=True)[OVERALL].verdict == "PASS"


def test_an_overall_effect_that_cannot_be_excluded_is_inconclusive():
    found = model({**CLEAN_OVERALL, "sufficiency": both(0.05, -0.02, 0.12)})

    assert found[OVERALL].verdict == "INCONCLUSIVE"
    (text,) = [reason.text for reason in found[OVERALL].reasons]
    assert re.search(r"a sufficiency up to 0.12 cannot be excluded .* about 160 more pictures", text)


SUFFICIENT = both(0.25, 0.20, 0.30, p=1e-9, accuracies=(0.50, 0.25))


@pytest.mark.parametrize(
    "other",
    [
        {"cues": {"colour": measured(0.01, -0.03, 0.05)}},
        {"gap": both(0.07, 0.03, 0.12)},
        {"gap": {"blur": measured(0.05, 0.01, 0.09), "tile": measured(0.12, 0.07, 0.17)}},
    ],
    ids=["all others are excluded", "the gap is below its limit", "the gap is above its limit with one fill only"],
)
def test_sufficiency_alone_only_warns(other):
    found = model({**CLEAN_OVERALL, "sufficiency": SUFFICIENT, **other})

    assert found[OVERALL].verdict == "WARN"
    (text,) = [reason.text for reason in found[OVERALL].reasons if "sufficiency" in reason.text]
    assert "a sufficiency of 0.25; the sufficiency is probably between 0.20 and 0.30" in text
    assert "; no other effect of all classes together is above its limit with every fill" in text
    assert text.endswith(", so this only warns")


@pytest.mark.parametrize(
    "other",
    [
        {"gap": both(0.12, -0.01, 0.25)},
        {"gap": {}},
        {"cues": {"sharpness": measured(0.12, -0.01, 0.25)}},
    ],
    ids=["the gap is above its limit", "no gap was measured", "a statistic is above its limit"],
)
def test_sufficiency_fails_with_another_effect_above_its_limit(other):
    found = model({**CLEAN_OVERALL, "sufficiency": SUFFICIENT, **other})

    assert found[OVERALL].verdict == "FAIL"


def test_an_overall_effect_that_was_not_measured_is_inconclusive():
    assert model({"gap": CLEAN_OVERALL["gap"]})[OVERALL].verdict == "INCONCLUSIVE"


def test_a_warning_of_one_class_warns_also_if_all_together_are_open():
    found = model(
        {**CLEAN_OVERALL, "gap": both(0.02, -0.10, 0.14)}, bird={**CLEAN, "gap": both(0.15, 0.02, 0.28, p=0.2)}
    )

    assert found[OVERALL].verdict == "WARN"
    assert any("all classes together: a gap up to 0.14" in reason.text for reason in found[OVERALL].reasons)


def few(name="bird"):
    return replace(
        measures_of(name, {"gap": both(0.0, -0.1, 0.1, pictures=20)}, pictures=20),
        accuracy=Estimate(0.9, 0.7, 0.97, 20),
    )


def test_what_holds_for_all_classes_together_comes_first():
    above = {"gap": both(0.9, 0.8, 1.0, p=1e-12), "attraction": both(0.9, 0.8, 1.0, p=1e-12)}
    overall = {name: both(0.9, 0.8, 1.0, p=1e-12) for name in ("gap", "sufficiency")}

    texts = [reason.text for reason in model(overall, cat=above, dog=above, bird=above)[OVERALL].reasons]

    assert [text.partition(":")[0] for text in texts] == ["all classes together"] * 2 + ["cat", "dog", "bird"] * 2
    assert ["sufficiency" in text for text in texts[:2]] == [False, True]


def test_a_class_with_few_pictures_is_inconclusive_unless_it_is_waived():
    assert model(bird=few())[OVERALL].verdict == "INCONCLUSIVE"
    assert model(bird=few(), waived=["bird"])[OVERALL].verdict == "PASS"
    assert model(bird=few(), waived=["bird"])["bird"].verdict == "INCONCLUSIVE"


def test_a_waived_warning_does_not_count():
    warned = {**CLEAN, "gap": both(0.15, 0.02, 0.28, p=0.2)}

    assert model(bird=warned)[OVERALL].verdict == "WARN"
    assert model(bird=warned, waived=["bird"])[OVERALL].verdict == "PASS"


def test_no_class_that_can_be_tested_is_inconclusive():
    found = model(overall=CLEAN_OVERALL, cat=few("cat"), dog=few("dog"))

    assert found[OVERALL].verdict == "INCONCLUSIVE"


def test_a_clear_effect_on_all_classes_is_not_diluted_by_the_number_of_classes():
    clear = {**CLEAN_OVERALL, "gap": both(0.2, 0.12, 0.28, p=0.01)}
    classes = {f"class {number}": CLEAN for number in range(300)}

    assert model(clear, **classes)[OVERALL].verdict == "FAIL"
    assert model({**clear, "gap": both(0.2, 0.12, 0.28, p=0.013)}, **classes)[OVERALL].verdict == "WARN"


def test_the_classes_share_the_other_half_of_the_level_by_holm():
    above = {**CLEAN, "gap": both(0.3, 0.12, 0.4, p=0.004)}

    assert model(bird=above)["bird"].p("gap") == pytest.approx(
        2 * 6 * 0.004
    )  # two families; six tests of three classes
    assert model(bird=above)[OVERALL].verdict == "FAIL"
    assert model(bird={**above, "gap": both(0.3, 0.12, 0.4, p=0.005)})[OVERALL].verdict == "WARN"


def test_a_significant_effect_with_one_fill_only_warns():
    apart = {"blur": measured(0.6, 0.5, 0.7, p=1e-9), "tile": measured(0.0, -0.03, 0.03, p=1.0)}

    found = model({**CLEAN_OVERALL, "gap": apart})

    assert found[OVERALL].verdict == "WARN"
    assert "measured with each fill: blur 0.60, tile 0.00" in found[OVERALL].reasons[0].text


def test_without_regions_a_significant_effect_warns():
    measures = {
        "cat": measures_of("cat", {"gap": {"ring": measured(0.5, 0.4, 0.6, p=1e-9)}}),
        OVERALL: measures_of(OVERALL, {"gap": {"ring": measured(0.5, 0.4, 0.6, p=1e-9)}}),
    }
    options = {"exempt": {}, "waived": {}, "with_regions": False}

    assert judge(measures, LIMITS, may_fail=False, **options)[OVERALL].verdict == "WARN"
    assert judge(measures, LIMITS, may_fail=True, **options)[OVERALL].verdict == "FAIL"


@pytest.mark.parametrize(
    ("figures", "pictures", "more"),
    [
        ((0.0, -0.2, 0.2), 100, 300),  # twice as far as the limit: four times as many
        ((0.05, -0.05, 0.15), 160, 480),
        ((0.02, -0.06, 0.10), 160, 1),  # exactly at the limit
        ((0.02, -0.07, 0.11), 160, 43),
        ((0.09, -0.01, 0.19), 160, None),  # a hundred times as many
        ((0.10, -0.02, 0.22), 160, None),  # no number: the estimate is the limit
        (NOTHING_KNOWN, 160, None),
    ],
)
def test_the_number_of_pictures_follows_the_square_root_rule(figures, pictures, more):
    known = Effect("gap", {"blur": measured(*figures, pictures=pictures)}, LIMIT)

    assert known.level == "open"
    assert known.more_pictures == more
    words = reason_of(known).text
    assert ("about" in words) == (more is not None)
    if more is None and not math.isnan(figures[1]):
        assert "too near the limit for any number of pictures" in words


@pytest.mark.parametrize(
    ("known", "above", "more"),
    [
        (effect((0.02, -0.05, 0.09), (0.03, -0.03, 0.08)), 0.09, 0),
        (effect((-0.2, -0.3, -0.1)), 0.0, 0),
        (effect((0.02, -0.07, 0.11)), 0.11, 43),
        (effect((0.07, 0.01, 0.13)), 0.13, 480),  # a warning, but more pictures could still exclude it
        (effect((0.12, 0.07, 0.17)), 0.17, None),
        (effect((0.3, 0.2, 0.4), significant=True), 0.4, None),
        (effect(NOTHING_KNOWN), None, None),
        (effect(), None, None),
    ],
)
def test_an_effect_says_what_is_excluded_and_how_many_more_pictures_that_takes(known, above, more):
    assert (known.excluded_above, known.more_pictures) == (above, more)


def test_a_pass_says_what_it_excludes_for_all_classes_together_and_for_each():
    found = model(bird={"gap": both(0.02, -0.04, 0.085), "attraction": CLEAN["attraction"]})

    assert [reason.text for reason in found[OVERALL].reasons] == [
        "a gap above 0.03 is excluded at 95% (measured: 0.00, limit 0.10)",
        "a sufficiency above 0.03 is excluded at 95% (measured: 0.00, limit 0.10)",
        "for each class alone, a gap above 0.09 is excluded at 95% (the least certain class is bird)",
        "for each class alone, an attraction above 0.03 is excluded at 95% (the least certain class is cat)",
    ]
    assert found["bird"].reasons[0].text == "a gap above 0.09 is excluded at 95% (measured: 0.02, limit 0.10)"


def test_a_pass_says_how_many_more_pictures_a_strict_check_needs():
    reasons = model(bird={"gap": both(0.02, -0.07, 0.11), "attraction": CLEAN["attraction"]})[OVERALL].reasons

    assert (
        reasons[2].text == "for each class alone, a gap above 0.11 is excluded at 95% (the least certain class is bird)"
    )
    assert reasons[-1].text.endswith("--strict asks for that too, which takes about 43 more pictures of a class")


def test_the_pictures_needed_exclude_the_limit_with_the_stated_chance():
    rng, limit = np.random.default_rng(0), 0.1
    count = pictures_needed(limit)

    estimates = rng.normal(0, SPREAD / count**0.5, 4000)

    excluded = np.mean(estimates + 1.96 * SPREAD / count**0.5 < limit)
    assert excluded == pytest.approx(CHANCE_TO_EXCLUDE, abs=0.02)
    assert pictures_needed(1.0) >= 1
    assert pictures_needed(0.0) is None


def items(**counts):
    return [Item(f"{name}/{n}", Path(), name, f"{n}") for name, count in counts.items() for n in range(count)]


def test_the_notice_before_a_run_counts_pictures():
    assert notice(items(cat=100, dog=120), LIMITS).endswith("it has 220, and as many of each class, as --strict needs")
    few = (
        "it has 65, so the verdict may be INCONCLUSIVE; --strict needs as many of each class, and every class has fewer"
    )
    assert notice(items(cat=30, dog=35), LIMITS).endswith(f"{few} (cat 30, dog 35)")
    assert "1 of 2 classes have fewer (cat 30)" in notice(items(cat=30, dog=130), LIMITS)
    assert "limit of 0" in notice(items(cat=20), LimitsSection(gap=0))
    assert notice([], LIMITS) == "the experiment has no pictures"


def test_the_notice_names_classes_that_are_too_small_to_be_tested():
    text = notice(items(cat=20, dog=130), LIMITS)
    assert "it has 150, so the verdict may be INCONCLUSIVE; the check tests only classes with at least 30" in text
    assert text.endswith("pictures, and 1 of 2 classes have fewer (cat 20)")


def test_the_fill_that_needs_most_pictures_decides_how_many():
    known = effect((0.0, -0.2, 0.2), (0.05, -0.05, 0.15))

    assert known.more_pictures == 480
    assert replace(known, by_fill={**known.by_fill, "tile": measured(0.1, -0.1, 0.3)}).more_pictures is None


def test_figures_show_on_which_side_of_the_limit_they_lie():
    text = reason_of(effect((0.1004, 0.0501, 0.1507))).text

    assert "a gap of 0.1004" in text
    assert "up to 0.1001 cannot be excluded" in reason_of(effect((0.02, -0.05, 0.1001))).text


SEVERITY = {"PASS": 0, "INCONCLUSIVE": 1, "WARN": 2, "FAIL": 3}


@st.composite
def effects(draw):
    """Draw an effect with one or two fills, whose p-values follow from their estimates and intervals."""
    fills = draw(st.sampled_from([("blur",), ("blur", "tile")]))
    return {fill: (draw(st.floats(-0.3, 0.6)), draw(st.floats(0.001, 0.3))) for fill in fills}


def as_measured(figures, shift=0.0):
    return {
        fill: measured(
            value + shift,
            value + shift - 1.96 * error,
            value + shift + 1.96 * error,
            p=float(stats.norm.sf((value + shift - LIMIT) / error)),
        )
        for fill, (value, error) in figures.items()
    }


@st.composite
def models(draw):
    classes = draw(st.integers(1, 4))
    drawn = {(OVERALL, "gap"): draw(effects()), (OVERALL, "sufficiency"): draw(effects())}
    for number in range(classes):
        drawn |= {(f"class {number}", name): draw(effects()) for name in ("gap", "attraction")}
    return drawn, draw(st.sampled_from(sorted(drawn))), draw(st.floats(0, 0.5)), draw(st.booleans())


def verdict_on(drawn, strict, shifted=None, shift=0.0):
    by_name = {}
    for (name, which), figures in drawn.items():
        moved = shift if (name, which) == shifted else 0.0
        by_name.setdefault(name, {})[which] = as_measured(figures, moved)
    measures = {name: measures_of(name, own) for name, own in by_name.items()}
    return judge(measures, LimitsSection(strict=strict), exempt={}, waived={})[OVERALL]


@settings(max_examples=300, deadline=None)
@given(models())
def test_no_pass_while_an_estimate_lies_above_its_limit(drawn_model):
    drawn, _, _, strict = drawn_model
    judgement = verdict_on(drawn, strict)
    estimates = [value for figures in drawn.values() for value, _ in figures.values()]

    if judgement.verdict in ("PASS", "INCONCLUSIVE"):
        assert max(estimates) <= LIMIT
    if max(estimates) > LIMIT:
        assert SEVERITY[judgement.verdict] >= SEVERITY["WARN"]
        assert any("limit" in reason.text for reason in judgement.reasons)
    assert not any("no sign" in reason.text for reason in judgement.reasons)


@settings(max_examples=300, deadline=None)
@given(models())
def test_a_larger_effect_never_makes_the_verdict_milder(drawn_model):
    drawn, chosen, shift, strict = drawn_model

    before, after = verdict_on(drawn, strict), verdict_on(drawn, strict, chosen, shift)

    assert SEVERITY[after.verdict] >= SEVERITY[before.verdict]


@settings(max_examples=200, deadline=None)
@given(models())
def test_a_strict_check_is_never_milder(drawn_model):
    drawn = drawn_model[0]

    assert SEVERITY[verdict_on(drawn, strict=True).verdict] >= SEVERITY[verdict_on(drawn, strict=False).verdict]
