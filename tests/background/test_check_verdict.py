from dataclasses import replace

import numpy as np
import pytest

from camkit.background.effects import OVERALL, ImageRow, Pasted, measure_all
from camkit.background.rule import Reason, judge, worst_first
from camkit.options import Limits

LIMITS = Limits()


def rows_of(label, count, *, gap=0.0, kept=0.0, energy=0.5, seed=0, **more):
    """Return pictures of a class: right on own backgrounds, wrong on others at the rate ``gap``.

    With the object removed they are right at the rate ``kept``.
    """
    rng = np.random.default_rng([seed, len(label), *label.encode(errors="surrogateescape")])
    rows = []
    for number in range(count):
        other = float(rng.random() >= gap)
        stays = bool(rng.random() < kept)
        fills = ("blur", "tile")
        rows.append(
            ImageRow(
                name=f"{label}/{number}.png",
                label=label,
                group=f"{label}/{number}",
                right=True,
                answer=label,
                probability=0.9,
                status="ok",
                energy=energy + 0.01 * float(rng.standard_normal()),
                shuffled=0.1,
                ceiling=0.8,
                room=0.4,
                same=dict.fromkeys(fills, 1.0),
                other=dict.fromkeys(fills, other),
                removed=dict.fromkeys(fills, stays),
                named=dict.fromkeys(fills, label if stays else "none of them"),
            )
        )
    return [replace(row, **more) for row in rows]


def judged(rows, *, exempt=None, waived=None, excluded=(), classes=(), **more):
    measures = measure_all(rows, LIMITS, 0, excluded, classes)
    return judge(measures, LIMITS, exempt=exempt or {}, waived=waived or {}, **more)


def clean(count=50):
    return [row for label in ("cat", "dog", "fox") for row in rows_of(label, count)]


def test_a_bad_kind_of_background_warns_of_its_class_and_never_fails():
    sentence = "the model recognises 40% of the dog objects on backgrounds from sand and 90% elsewhere"
    warning = {"dog": [Reason("less accurate on one place", sentence)]}
    found, without = judged(clean(), warnings=warning), judged(clean())

    assert [found[name].verdict for name in ("cat", "dog", "fox", OVERALL)] == ["PASS", "WARN", "PASS", "WARN"]
    assert [reason.text for reason in found["dog"].reasons] == [sentence]
    assert [reason.text for reason in found[OVERALL].reasons] == [f"dog: {sentence}"]
    assert {name: one.effects for name, one in found.items()} == {name: one.effects for name, one in without.items()}
    failing = judged([*clean(), *rows_of("wolf", 50, gap=0.6)], warnings=warning)
    assert failing[OVERALL].verdict == "FAIL"
    assert judged(clean(), warnings=warning, exempt={"dog": "any"})[OVERALL].verdict == "PASS"


def test_what_decides_comes_first_and_the_worst_class_before_the_others():
    rows = [*clean(), *rows_of("ape", 50, gap=0.5), *rows_of("wolf", 50, gap=0.9), *rows_of("yak", 50, gap=0.2)]
    found = judged(rows, warnings={OVERALL: [Reason("a hint", "the heat stays put")]})

    some = {name: found[name] for name in ("ape", "cat", "wolf", "yak")}
    assert list(worst_first(some)) == ["wolf", "ape", "yak", "cat"]
    fails = [reason.fails for reason in found[OVERALL].reasons]
    assert fails == sorted(fails, reverse=True)
    assert fails[-1] is False  # the hint only warns
    classes = [reason.text.partition(":")[0] for reason in found[OVERALL].reasons if reason.fails]
    assert [name for name in classes if name in ("ape", "wolf")] == ["wolf", "ape"]


def with_pasted(row, share, *pasted):
    """Return a picture with its answers on backgrounds, and the share that is right on those of other classes."""
    return replace(row, other=dict.fromkeys(row.same, share), pasted=dict.fromkeys(row.same, pasted))


def marked(classes, attraction):
    """Return pictures pasted on two other classes each; on "wolf" backgrounds they are named wolf at the given rate."""
    rng = np.random.default_rng(3)
    rows = []
    for row in (row for label in classes for row in rows_of(label, 50)):
        others = [one for one in classes if one != row.label]
        backgrounds = [others[int(rng.integers(len(others)))] for _ in range(2)]
        named = ["wolf" if one == "wolf" and rng.random() < attraction else row.label for one in backgrounds]
        whose = [f"{one}/{int(rng.integers(50))}" for one in backgrounds]
        own = Pasted(row.label, f"{row.label}/{int(rng.integers(50))}", row.label)
        share = np.mean([one == row.label for one in named])
        rows.append(with_pasted(row, float(share), own, *map(Pasted, backgrounds, whose, named)))
    return rows


NAMES = ("cat", "dog", "fox", "wolf", "bear", "hare", "lynx", "mole", "newt", "owl", "pug", "rat")


def test_a_mark_on_one_class_of_many_fails_that_class():
    found = judged(marked(NAMES, 0.9))

    assert found["wolf"].verdict == "FAIL"
    assert found["wolf"].effects["attraction"].p < 0.001
    assert found[OVERALL].verdict == "FAIL"
    others = {name: found[name] for name in NAMES if name != "wolf"}
    assert {judgement.verdict for judgement in others.values()} <= {"PASS", "WARN"}  # some of them are on wolves
    assert {judgement.effects["attraction"].level for judgement in others.values()} <= {"excluded", "open"}
    assert found[OVERALL].effects["gap"].p > 0.05  # too few answers change over all classes


def test_a_gap_from_a_single_background_fails_nothing():
    rows = []
    for row in clean():  # wrong on the one background, right on all others
        on_ships = Pasted("ship", "ship/0", "none"), Pasted("ship", f"{row.name}s", row.label)
        rows.append(with_pasted(row, 0.5, Pasted(row.label, row.group, row.label), *on_ships))

    found = judged(rows)

    assert found["cat"].effects["gap"].p > 0.05  # though every picture of the class has a gap of one half
    assert all(row.same["tile"] - row.other["tile"] == 0.5 for row in rows)


def test_a_waived_class_does_not_fail_another_by_its_objects():
    rows = []
    for label, other, share in (("cat", "dog", 0.0), ("dog", "cat", 1.0)):
        for number, row in enumerate(rows_of(label, 50)):  # all are named dog on the other's backgrounds
            own = Pasted(label, f"{label}/{number}x", label)
            rows.append(with_pasted(row, share, own, Pasted(other, f"{other}/{number}x", "dog")))

    plain, waived = judged(rows), judged(rows, waived={"cat": "known"}, excluded=("cat",))

    assert plain[OVERALL].verdict == "FAIL"
    assert (waived["cat"].verdict, waived["dog"].verdict, waived[OVERALL].verdict) == ("FAIL", "PASS", "PASS")


def test_attraction_equals_a_slow_count():
    rows = marked(NAMES, 0.5)

    found = measure_all(rows, LIMITS, 0)

    pairs = [(row.label, on, named) for row in rows for on, _, named in row.pasted["tile"]]
    on_wolf = [named == "wolf" for label, on, named in pairs if label != "wolf" and on == "wolf"]
    elsewhere = [named == "wolf" for label, on, named in pairs if label != "wolf" and on != "wolf"]
    measured = found["wolf"].attraction.by_fill["tile"]
    assert measured.accuracies == pytest.approx((np.mean(on_wolf), np.mean(elsewhere)))
    assert measured.effect.value == pytest.approx(np.mean(on_wolf) - np.mean(elsewhere))
    assert 0.3 < measured.effect.low < measured.effect.value < measured.effect.high < 0.7
    assert not found[OVERALL].attraction.by_fill


def test_always_naming_one_class_without_an_object_is_not_above_chance():
    rows = [
        replace(row, removed=dict.fromkeys(row.same, row.label == "cat"), named=dict.fromkeys(row.same, "cat"))
        for row in clean()
    ]

    found = measure_all(rows, LIMITS, 0)

    assert found["cat"].sufficiency.by_fill["blur"].effect.value == 0
    assert found[OVERALL].sufficiency.by_fill["blur"].accuracies == pytest.approx((1 / 3, 1 / 3))
    assert judged(rows)[OVERALL].verdict == "PASS"


@pytest.mark.extended
def test_many_clean_classes_do_not_alarm():
    """100 classes with a true gap of half the limit: the correction for many tests must prevent false alarms."""
    alarms = 0
    for seed in range(3):
        rows = [row for n in range(100) for row in rows_of(f"class {n}", 40, gap=0.05, seed=seed)]
        alarms += judged(rows)[OVERALL].verdict == "FAIL"

    assert alarms == 0


@pytest.mark.parametrize("groups", range(2, 12))
def test_a_model_that_reads_only_the_background_is_inconclusive_with_too_few_groups_and_never_warns(groups):
    """A sign test over n groups has no p-value below 0.5^n. The gap of all classes has 0.6 of the 5 %."""
    rows = [*rows_of("cat", 60, gap=1.0, kept=1.0), *rows_of("dog", 60, gap=1.0, kept=1.0)]
    rows = [replace(row, group=f"patient {n % groups}") for n, row in enumerate(rows)]

    overall = judged(rows)[OVERALL]

    assert overall.verdict == ("FAIL" if groups >= 6 else "INCONCLUSIVE")
    if overall.verdict == "INCONCLUSIVE":
        text = f"the pictures come from {groups} groups (uneven groups count as fewer), too few for a gap"
        reason = next(reason for reason in overall.reasons if text in reason.text)
        assert reason.text.endswith("to be significant; the check needs 6")
        assert f"from at least {6 - groups} more group" in reason.step


def test_uneven_groups_count_by_their_effective_number():
    sizes = [40, 2, 2, 2, 2, 1, 1]
    patients = [f"patient {n}" for n, size in enumerate(sizes) for _ in range(size)]
    rows = [replace(row, group=group) for row, group in zip(rows_of("wolf", 50, gap=1.0), patients, strict=True)]

    gap = measure_all([*clean(), *rows], LIMITS, 0)["wolf"].gap

    assert gap.groups == round(50**2 / sum(size**2 for size in sizes)) == 2
    assert judged([*clean(), *rows])["wolf"].verdict == "INCONCLUSIVE"


def test_few_groups_do_not_prevent_a_pass_if_they_exclude_the_limit():
    rows = [replace(row, group=f"{row.label} {n % 6}") for n, row in enumerate(clean())]
    measures = measure_all(rows, Limits(gap=0.5, sufficiency=0.5, attraction=0.5), 0)

    assert judge(measures, Limits(gap=0.5, sufficiency=0.5), exempt={}, waived={})[OVERALL].verdict == "PASS"


def with_backgrounds(rows, changed):
    """Return the rows with the backgrounds of each object as a function of the row and of the backgrounds says."""
    return [replace(row, pasted={fill: changed(row, pairs) for fill, pairs in row.pasted.items()}) for row in rows]


def on_one_wolf(row, pairs):
    return tuple(pair._replace(group="wolf/0") if pair.background == "wolf" else pair for pair in pairs)


def on_few_wolves(row, pairs):
    return tuple(pair for pair in pairs if pair.background != "wolf" or row.name.endswith("/1.png"))


def in_groups(rows, groups):
    return [replace(row, group=f"{row.label} {n % groups}") for n, row in enumerate(rows)]


ODD = b"wolf \xe9".decode(errors="surrogateescape")
"""The name of a class as a folder's name may be."""

WOLVES = {"cat": "PASS", "wolf": "FAIL", OVERALL: "FAIL"}
SAID = {
    "a hint beside a class of few pictures": ("a hint: one corner", "wolf: only 12 pictures"),
    "the heat lies beside": ("the heat lies on the objects less",),
    "one fill does not show the gap": ("but not with each way of filling holes",),
    "only the background, in five groups": ("too few for a gap to be significant; the check needs 6",),
}
"""What the reasons of the model say in some of these cases."""

CASES = {
    "the objects are needed": (clean(), {}, dict.fromkeys(("cat", "dog", "fox", OVERALL), "PASS")),
    "one class has a gap": ([*clean(), *rows_of("wolf", 50, gap=0.6)], {}, WOLVES),
    "an undecodable class has a gap": ([*clean(), *rows_of(ODD, 50, gap=0.6)], {}, {ODD: "FAIL"}),
    "backgrounds attract no answers": (marked(NAMES, 0.0), {}, {"wolf": "PASS", OVERALL: "PASS"}),
    "the heat lies beside": (
        [row for label in ("cat", "dog", "fox") for row in rows_of(label, 50, energy=0.05)], {}, {OVERALL: "WARN"}
    ),
    "one fill does not show the gap": (
        [*clean(), *(replace(row, other={**row.other, "tile": 1.0}) for row in rows_of("wolf", 50, gap=0.6))],
        {},
        {"wolf": "PASS", OVERALL: "PASS"},
    ),
    "only the background, in five groups": (  # sufficiency is above its limit then, since the chance of four is low
        [
            replace(row, group=f"patient {n % 5}")
            for label in ("cat", "dog", "fox", "wolf")
            for n, row in enumerate(rows_of(label, 60, gap=1.0, kept=0.95))
        ],
        {},
        {OVERALL: "INCONCLUSIVE"},
    ),
    "heat without headroom": (
        [row for label in ("cat", "dog", "fox") for row in rows_of(label, 50, energy=0.05, room=0.03)],
        {},
        {OVERALL: "PASS"},
    ),
    "under 30 pictures in all, whatever they show": (
        [row for label in ("cat", "dog") for row in rows_of(label, 10, gap=1.0, kept=1.0)],
        {},
        {OVERALL: "INCONCLUSIVE"},
    ),
    "a class has no usable picture": (
        clean(), {"classes": ["cat", "dog", "fox", "wolf"]}, {"wolf": "INCONCLUSIVE", OVERALL: "INCONCLUSIVE"}
    ),
    "a quarter of the maps is empty": (
        [replace(row, status="no_influence", energy=None) if n % 4 == 0 else row for n, row in enumerate(clean())],
        {},
        {OVERALL: "INCONCLUSIVE"},
    ),
    "an exempt class has a gap": (
        [*clean(), *rows_of("beach", 50, gap=1.0)],
        {"exempt": {"beach": "expect = any"}, "excluded": {"beach"}},
        {"beach": "PASS", OVERALL: "PASS"},
    ),
    "all classes are waived or exempt": (
        [*rows_of("cat", 50, gap=1.0), *rows_of("dog", 50)],
        {"waived": {"cat": "known"}, "exempt": {"dog": "expect = any"}, "excluded": ("cat", "dog")},
        {OVERALL: "PASS"},
    ),
    "a hint beside a class of few pictures": (
        [*clean(), *rows_of("wolf", 12)],
        {"warnings": {OVERALL: [Reason("a hint", "a hint: one corner")]}},
        {"wolf": "INCONCLUSIVE", OVERALL: "WARN"},
    ),
    "few objects were shown on a class's backgrounds": (
        with_backgrounds(marked(NAMES, 0.0), on_few_wolves), {}, {"wolf": "INCONCLUSIVE"}
    ),
    "one picture is behind many objects": (
        with_backgrounds(marked(NAMES, 0.9), on_one_wolf), {}, {"wolf": "INCONCLUSIVE", OVERALL: "INCONCLUSIVE"}
    ),
    "a class of six groups beside classes of many": (
        [*clean(200), *in_groups(rows_of("wolf", 60), 6)], {}, {OVERALL: "PASS"}
    ),
    "edits that may touch the object, in six groups": (
        [*in_groups(rows_of("wolf", 60, gap=0.9), 6), *rows_of("cat", 60)], {"may_fail": False}, {"wolf": "WARN"}
    ),
    "the answers are always wrong": (
        [replace(row, same=dict.fromkeys(row.same, 0.05), other=dict.fromkeys(row.other, 0.0)) for row in clean()],
        {},
        {OVERALL: "INCONCLUSIVE"},
    ),
    **{  # four classes have four gaps to test, so 0.5^n must not exceed 0.015 / 4 if all have as many groups
        f"four classes of {groups} groups": (
            in_groups([*clean(60), *rows_of("wolf", 60, gap=1.0)], groups), {}, {"wolf": verdict}
        )
        for groups, verdict in ((7, "INCONCLUSIVE"), (8, "INCONCLUSIVE"), (9, "FAIL"))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_on_pictures(case):
    rows, options, expected = CASES[case]
    found = judged(rows, **options)

    assert {name: found[name].verdict for name in expected} == expected
    texts = " ".join(reason.text for reason in found[OVERALL].reasons)
    assert all(words in texts for words in SAID.get(case, ()))
