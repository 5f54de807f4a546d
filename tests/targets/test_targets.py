"""What may be explained: classes, labels, functions, several at once, and every shape of output."""

from __future__ import annotations

import json
import math
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, means
from refusals import refused
from torch import Tensor, nn

import camkit
from camkit import targets as t
from camkit.errors import CamkitError, TargetError
from camkit.targets import ClassTarget, Scores, Target, logits_of, top

LABELS = ("cat", "dog", "hot dog", "Crane", "5")


def classifier(classes: int = 5, answer: Callable[[Tensor], Any] = lambda logits: logits) -> Net:
    """Return a network, always with the same weights; ``answer`` turns the logits into whatever it is to return."""
    torch.manual_seed(0)
    parts = {"features": nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()), "head": nn.Linear(6, classes)}
    return Net(lambda net, images: net.answer(net.head(means(net.features(images)))), **parts, answer=answer)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 12, 12)


@pytest.fixture
def net() -> Net:
    return classifier()


def explain(net: nn.Module, images: Any, target: Any = None, **options: Any) -> Any:
    return camkit.explain(net, images, "features", target=target, **options)


@torch.no_grad()
def logits(net: nn.Module, images: Tensor) -> Any:
    return net(images)


# --- one class --------------------------------------------------------------------------------------------------------


def test_none_is_each_pictures_own_best_class(net, images):
    expected = logits(net, images)

    found = explain(net, images)

    assert [row.target for row in found] == expected.argmax(1).tolist()
    assert [row.score for row in found] == pytest.approx(expected.amax(1).tolist(), abs=1e-5)
    assert [row.probability for row in found] == pytest.approx(expected.softmax(1).amax(1).tolist(), abs=1e-5)
    assert [row.label for row in found] == [None] * 3


@pytest.mark.parametrize("index", [2, np.int64(2), np.uint8(2), np.array(2), "2", torch.tensor(2)], ids=repr)
def test_an_index_of_any_integer_type(net, images, index):
    expected = logits(net, images)

    found = explain(net, images, index)

    assert [row.target for row in found] == [2, 2, 2]
    assert all(type(row.target) is int for row in found)
    assert [row.score for row in found] == pytest.approx(expected[:, 2].tolist(), abs=1e-5)
    assert [row.probability for row in found] == pytest.approx(expected.softmax(1)[:, 2].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "index", "labels"),
    [
        *((text, 1, LABELS) for text in ("dog", "DOG", " dog ")),
        *(("Hot Dog", 2, LABELS), ("crane", 3, LABELS), ("Crane", 3, LABELS), ("5", 4, LABELS), ("2", 2, LABELS)),
        ("Dog", 1, ("dog", "Dog", "DOG", "a", "b")),
    ],
)
def test_a_label_is_found_whatever_its_case_and_the_exact_one_first(net, images, text, index, labels):
    found = explain(net, images[0], text, labels=labels)

    assert (found.target, found.label) == (index, labels[index])


NO_CLASSES: list[Any] = [
    True, False, np.bool_(True), 1.0, np.float64(2), 1j, b"dog", object(), {"dog": 1}, {1, 2}, np.array([1, 2]),
    torch.tensor(2.0), torch.tensor([1, 2]), torch.tensor(True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "said", "labels"),
    [
        ("crane", "0 and 3", ("crane", "dog", "cat", "crane", "bird")),
        ("Dog", "0 and 1", ("dog", "DOG", "a", "b", "c")),
        ("dog", "labels=", None),
        ([], "empty", None),
        (lambda out: out[:, 0].detach(), "differentiated|depend", None),
        (top(6), "5 classes", None),
        *((value, "", LABELS) for value in NO_CLASSES),
    ],
)
def test_an_invalid_target_is_one_sentence(net, images, target, said, labels):
    with refused(said, CamkitError):
        explain(net, images, target, labels=labels)


@pytest.mark.parametrize("index", [5, 1000, -1, -5, np.int64(-1), "99"])
@pytest.mark.parametrize("layer", ["features", None])
def test_an_index_out_of_range_names_the_range(net, images, index, layer):
    with refused(f"target '?{index}.* 0 to 4", TargetError):
        camkit.explain(net, images, layer, target=index)


# --- functions --------------------------------------------------------------------------------------------------------


def margin(output: Tensor) -> Tensor:
    return output[:, 0] - output[:, 1]


def test_a_function_scores_the_output_and_its_map_is_that_of_its_formula(net, images):
    expected = logits(net, images)

    found = explain(net, images, margin, method="hirescam")

    assert [row.score for row in found] == pytest.approx((expected[:, 0] - expected[:, 1]).tolist(), abs=1e-5)
    assert [(row.target, row.label, row.probability) for row in found] == [(None, "margin", None)] * 3
    assert found[0].name == "margin"
    first, second = (explain(net, images[0], index, method="hirescam").raw for index in (0, 1))
    assert np.allclose(found[0].raw, first - second, atol=1e-6)


# --- several targets --------------------------------------------------------------------------------------------------


def test_a_list_of_targets_costs_one_forward_pass_and_comes_picture_by_picture(net, images):
    passes: list[Any] = []
    net.head.register_forward_hook(lambda *_: passes.append(1))
    alone = [[explain(net, image, target) for target in (4, 0)] for image in images]
    explain(net, images)  # the first batch also tries whether each picture is treated as if it were alone
    passes.clear()

    found = explain(net, images, [4, 0])

    assert len(passes) == 1
    assert [row.target for row in found] == [4, 0] * 3
    for row, expected in zip(found, [row for rows in alone for row in rows], strict=True):
        assert np.allclose(row.raw, expected.raw, atol=1e-6)
        assert row.score == pytest.approx(expected.score, abs=1e-5)
        assert row.probability == pytest.approx(expected.probability, abs=1e-6)


def test_every_kind_of_target_may_stand_in_one_list(net, images):
    found = explain(net, images[0], [0, "dog", margin, None, np.int64(2), top(2)], labels=LABELS)

    best = logits(net, images)[0].topk(2).indices.tolist()
    assert [row.target for row in found] == [0, 1, None, best[0], 2, *best]
    assert [row.target for row in explain(net, images[0], [3])] == [3]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_each_picture_may_have_a_class_of_its_own(net, images, batch_size):
    order = logits(net, images)[2].argsort().tolist()
    wanted = [4, "dog", (order[0], order[4])]  # the last two mean the same: the one with the higher score is explained

    found = camkit.explain(net, images, target=t.each(wanted), labels=LABELS, batch_size=batch_size)

    expected = [4, 1, order[4]]
    alone = [camkit.explain(net, image, target=target) for image, target in zip(images, expected, strict=True)]
    assert [row.target for row in found] == expected
    for row, single in zip(found, alone, strict=True):
        np.testing.assert_allclose(row.raw, single.raw, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ([1, 2], "each() has classes for 2 pictures, but there are 3 or more"),
        ([1, 2, 3, 4], "each() has classes for 4 pictures, but there are 3; pass one class for each picture"),
        (
            "bird",
            "each() takes a list with at least one class for each picture, as in each(['cat', 'dog']), not 'bird'",
        ),
        ([], "each() takes a list with at least one class for each picture, as in each(['cat', 'dog']), not []"),
        ([1, 2, 7], "target 7 is out of range: the model has classes 0 to 4"),
    ],
)
def test_classes_that_do_not_fit_the_pictures_are_one_sentence(net, images, classes, sentence):
    with refused(re.escape(sentence), TargetError):
        camkit.explain(net, images, target=t.each(classes), labels=LABELS)


def test_a_picture_that_cannot_be_read_does_not_shift_the_others_classes(net, tmp_path):
    good, bad = camkit.scenes.scene_paths()["plane-sky"], tmp_path / "bad.png"
    bad.write_bytes(b"")

    rows = camkit.explain_many("demo-fair", [good, bad, good], target=t.each([0, 1, 2]), on_error="yield")

    assert [getattr(row, "target", None) for row in rows] == [0, None, 2]


# --- targets of the user's own ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum(Target):
    """The sum of some classes' logits: a target as a newcomer would write one."""

    names: tuple[str, ...]
    indices: tuple[int, ...] = ()

    def bind(self, labels, activation):
        return Sum(self.names, tuple(labels.index(name) for name in self.names))

    def __call__(self, output, batch):
        return Scores(logits_of(output, batch)[:, list(self.indices)].sum(1), description=" and ".join(self.names))


def test_a_subclass_of_target_is_a_target_wherever_targets_are_taken(net, images):
    expected = logits(net, images)[:, [0, 1]].sum(1)

    alone = explain(net, images, Sum(("cat", "dog")), labels=LABELS)
    listed = explain(net, images, ["dog", Sum(("cat", "dog"))], labels=LABELS)
    held = camkit.Explainer(net, "features", labels=LABELS)(images[0], Sum(("cat", "dog")))

    assert [row.score for row in alone] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [row.label for row in listed] == ["dog", "cat and dog"] * 3
    assert held.score == pytest.approx(expected[0].item(), abs=1e-6)


@pytest.mark.parametrize("name", ["top", "box"])
def test_a_function_of_the_module_in_place_of_its_result_is_one_sentence(net, images, name):
    with refused(f"target is the function {name}; call it", TargetError):
        explain(net, images, getattr(camkit.targets, name))


# --- the output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("target", [None, 0])
def test_one_logit_has_the_sigmoid_as_its_probability(images, flat, target):
    net = classifier(1, (lambda out: out[:, 0]) if flat else (lambda out: out))
    value = logits(net, images)[0].reshape(())

    found = explain(net, images[0], target)

    assert found.target == 0
    assert found.score == pytest.approx(float(value), abs=1e-5)
    assert found.probability == pytest.approx(float(value.sigmoid()), abs=1e-6)


ENDINGS: dict[str, tuple[int, Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "softmax": (5, lambda out: out.softmax(1), lambda out: out.softmax(1)),
    "log-softmax": (5, nn.LogSoftmax(dim=1), lambda out: out.softmax(1)),
    "sigmoid": (5, nn.Sigmoid(), lambda out: out.sigmoid()),
    "clamped softmax": (5, lambda out: out.softmax(1).clamp(min=1e-7), lambda out: out.softmax(1)),
    "log-sigmoid": (5, nn.LogSigmoid(), lambda out: out.sigmoid()),
    "one sigmoid": (1, torch.sigmoid, lambda out: out.sigmoid()),
    "in a dict": (5, lambda out: {"logits": out.softmax(1).double()}, lambda out: out.softmax(1)),
}


@pytest.mark.parametrize(("layer", "saturated"), [(None, False), ("features", True)])
@pytest.mark.parametrize("case", ENDINGS)
def test_probabilities_are_shown_as_they_are_and_their_map_is_that_of_the_logits(images, case, saturated, layer):
    classes, ending, shares_of = ENDINGS[case]
    bare, net = classifier(classes), classifier(classes, ending)
    for each in (bare, net):
        each.head.bias.data[0] += 1000 * saturated
    shares = shares_of(logits(bare, images))

    explained = camkit.explain(net, images, layer)

    for row, expected, share in zip(explained, camkit.explain(bare, images, layer), shares, strict=True):
        assert row.probability == pytest.approx(float(share.max()), abs=1e-6)
        assert (row.target, row.status, row.layer) == (expected.target, expected.status, expected.layer)
        assert row.layer_reason == expected.layer_reason
        assert np.allclose(row.raw, expected.raw, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ending", "kind", "kinds"),
    [
        (lambda out: out.softmax(1), "probability", "probabilities"),
        (lambda out: out.log_softmax(1), "log-probability", "log-probabilities"),
        (torch.sigmoid, "probability", "probabilities"),
    ],
)
@pytest.mark.parametrize("method", ["gradcam", "ablationcam", "scorecam"])
def test_the_quantity_says_what_the_score_is(images, ending, kind, kinds, method):
    net = classifier(answer=ending)
    returned = logits(net, images[:1])[0]

    one, two = explain(net, images[0], [1, camkit.targets.contrast(1, 2)], method=method)

    assert one.quantity == f"{kind}, as the model returns it"
    assert one.score == pytest.approx(float(returned[1]), abs=1e-5)
    assert one.caption().lines[1].startswith(f"{one.quantity}: ")
    assert two.quantity == f"difference of the two {kinds}"
    assert two.score == pytest.approx(float(returned[1] - returned[2]), abs=1e-5)


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_quantity_says_what_the_maps_of_a_segmentation_hold(everywhere):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Softmax(1)).eval()
    image = torch.randn(3, 8, 8)

    found = camkit.explain(net, image, "0", target=camkit.targets.segment(1, everywhere=everywhere))

    assert found.quantity == f"mean probability {'of all cells' if everywhere else 'where the class is predicted'}"
    cells = net(image[None])[0].detach()
    where = torch.ones(8, 8, dtype=torch.bool) if everywhere else cells.argmax(0) == 1
    assert found.score == pytest.approx(float(cells[1][where].mean()), abs=1e-6)


def test_a_picture_with_nan_leaves_the_probabilities_of_the_others_in_its_batch(images):
    net = classifier(answer=lambda out: out.exp() / out.exp().sum(1, keepdim=True))
    explainer = camkit.Explainer(net)

    alone = explainer(images[0])
    beside, overflowing = explainer.batch([images[0], images[1] * 1e6])

    assert overflowing.status == "non_finite"
    assert beside.quantity == alone.quantity == "probability, as the model returns it"
    assert beside.probability == pytest.approx(alone.probability, abs=1e-6)


@pytest.mark.parametrize("values", [[0.2, 0.3, 0.1], [0.0, 0.0, 0.0], [-0.5, 1.0, 0.5], [3.0, 4.0, 5.0]])
def test_logits_are_not_taken_for_probabilities(values):
    scores = ClassTarget(1)(torch.tensor([values]), 1)

    assert scores.probabilities == pytest.approx((float(torch.tensor(values).softmax(0)[1]),))


def test_a_function_of_probabilities_is_differentiated_as_it_is_written(images):
    bare, net = classifier(), classifier(answer=lambda out: out.softmax(1))

    by_function, by_class, by_contrast = explain(net, images[0], [lambda out: out[:, 1], 1, t.contrast(1, 2)])

    expected = explain(bare, images[0], [lambda out: out.softmax(1)[:, 1], 1, t.contrast(1, 2)])
    assert np.allclose(by_function.raw, expected[0].raw, atol=1e-7)
    assert np.allclose(by_class.raw, expected[1].raw, atol=1e-6)
    assert np.allclose(by_contrast.raw, expected[2].raw, atol=1e-6)


class ModelOutput(dict):
    """A dictionary whose entries are attributes too, as Hugging Face returns."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        vars(self).update(entries)


Outputs = namedtuple("Outputs", ["logits", "aux_logits"])

ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "dict of logits": lambda out: {"logits": out, "hidden": out * 0},
    "ModelOutput": lambda out: ModelOutput(loss=None, logits=out),
    "object": lambda out: SimpleNamespace(logits=out),
    "tuple": lambda out: (out, torch.zeros(2)),
    "namedtuple": lambda out: Outputs(out, out * 0),
}


@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("layer", ["features", None])
def test_the_class_scores_are_found_in_what_models_return(images, case, layer):
    nets = classifier(5, ANSWERS[case]), classifier()

    found, expected = (camkit.explain(net, images, layer, target=top(2)) for net in nets)

    assert [row.target for row in found] == [row.target for row in expected]
    assert all(np.allclose(one.raw, other.raw, atol=1e-6) for one, other in zip(found, expected, strict=True))
    assert found[0].layer == expected[0].layer


WITHOUT_SCORES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a dict without scores": (lambda out: {"boxes": out, "all": None}, "dict with 'boxes'.*'all'.*NoneType.*output="),
    "no classes": (lambda out: out[:, :0], r"\(1, 0\).*target="),
    "integers": (lambda out: out.long(), r"\(3, 5\).*target="),
    "nothing": (lambda out: None, "NoneType.*target="),
    "an empty tuple": (lambda out: (), "tuple.*target="),
    "two tensors of scores": (lambda out: (out.repeat(1, 2), out), "several tensors that could hold.*output="),
    "text": (lambda out: "cat", "str.*target="),
}


@pytest.mark.parametrize("case", WITHOUT_SCORES)
@pytest.mark.parametrize("layer", ["features", None])
def test_an_output_without_class_scores_says_what_was_seen_and_what_to_pass(images, case, layer):
    answer, seen = WITHOUT_SCORES[case]

    with refused(seen, TargetError):
        camkit.explain(classifier(5, answer), images, layer)


def cells(answer: Callable[[Tensor], Any]) -> Net:
    """Return something made of maps with three channels, as detectors and segmentation networks do."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    return Net(lambda net, images: answer(net.features(images)), features=features)


def boxes_of(maps: Tensor, count: int) -> dict[str, Tensor]:
    """Return the best boxes of the first picture."""
    scores, places = maps[0, 0].sigmoid().flatten().topk(count)
    return {"boxes": scores[:, None] * torch.tensor([1.0, 2.0, 8.0, 9.0]), "scores": scores, "labels": places % 3}


def half(maps: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(maps, 2)


SEVERAL_READINGS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "boxes first": (lambda maps: tuple(boxes_of(maps, 7).values()), r"\(7, 4\) and \(7,\) and \(7,\)"),
    "scores and labels": (lambda maps: tuple(boxes_of(maps, 7).values())[1:], r"\(7,\) and \(7,\)"),
    "one box in a dict": (lambda maps: boxes_of(maps, 1), "list with a dictionary of boxes, scores and labels"),
    "the best classes": (lambda maps: maps.mean((2, 3)).topk(2), r"\(1, 2\) and \(1, 2\)"),
    "mask and edge": (lambda maps: (maps[:, :1], maps[:, 1:2]), r"\(1, 1, 6, 6\) and \(1, 1, 6, 6\).*output=1"),
    "levels": (lambda maps: [maps, half(maps)], r"\(1, 3, 6, 6\) and \(1, 3, 3, 3\).*output=1"),
    "nested levels": (lambda maps: ((maps, half(maps)), (maps, half(maps))), r"\(1, 3, 3, 3\).*target=FUNCTION"),
}


@pytest.mark.parametrize("target", [None, 1])
@pytest.mark.parametrize("case", SEVERAL_READINGS)
def test_an_output_that_may_be_read_in_several_ways_is_a_question(images, case, target):
    answer, seen = SEVERAL_READINGS[case]
    with refused(seen, TargetError):
        camkit.explain(cells(answer), images[0], target=target)


# --- the activation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gradcam", "occlusion"])
def test_each_class_of_a_head_trained_with_sigmoid_has_its_own_probability(net, images, method):
    expected = logits(net, images[:1])[0]
    targets = [0, t.each([1]), t.finer(2), None]

    called = [camkit.explain(net, images[0], target=each, activation="sigmoid", method=method) for each in targets]
    held = camkit.Explainer(net, method=method, activation="sigmoid")
    above = {row.target: row.probability for row in explain(net, images[:1], t.above(0.0))}

    for row in [*called, held(images[0], 3)]:
        assert row.probability == pytest.approx(float(expected[row.target].sigmoid()), abs=1e-6)
        assert row.probability == pytest.approx(above[row.target], abs=1e-6)
    assert held.scores_of(images[0], 3).confidence == pytest.approx(float(expected[3].sigmoid()), abs=1e-6)


def test_maps_of_classes_that_overlap_are_predicted_one_by_one(images):
    net = cells(lambda maps: maps + torch.tensor([2.0, 1.0, -9.0])[:, None, None])
    shares = net(images[:1])[0].detach().sigmoid()

    best, second, nowhere = (camkit.explain(net, images[0], target=k, activation="sigmoid") for k in (None, 1, 2))

    assert best.target == 0
    assert second.probability == pytest.approx(float(shares[1][shares[1] > 0.5].mean()), abs=1e-6)
    assert second.quantity == "mean logit where the class is predicted"
    assert nowhere.quantity.endswith("predicted nowhere")


@pytest.mark.parametrize(
    ("answer", "finite"),
    [(lambda out: out.bfloat16(), True), (lambda out: out * math.nan, False), (lambda out: out * math.inf, False)],
)
def test_logits_of_half_precision_and_those_that_are_not_finite_give_strict_json(images, answer, finite):
    found = explain(classifier(5, answer), images[0], 1)

    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    if finite:
        assert 0 < found.probability <= 1
    else:
        assert (found.status, written["score"]) == ("non_finite", None)


# --- arguments of a wrong kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [LABELS, list(LABELS), np.array(LABELS), dict(enumerate(LABELS))])
def test_labels_come_in_any_order_that_says_which_is_which(net, images, labels):
    assert explain(net, images, "hot dog", labels=labels)[0].target == 2
    assert explain(net, images, 1, labels=labels)[0].label == "dog"


def test_a_segment_is_inside_a_mask_or_everywhere():
    with pytest.raises(TargetError, match="pass a mask or everywhere=True, not both"):
        t.segment(0, np.ones((4, 4), bool), everywhere=True)


@pytest.fixture
def unchecked_types(request: pytest.FixtureRequest) -> None:
    """Skip a test of wrong types where ``--types`` refuses them before camkit does."""
    if request.config.option.types:
        pytest.skip("runs without --types, as users do")


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"labels": "cat"}, {"labels": {1: "cat", 2: "dog"}}, {"labels": {"cat": 0}},
    {"labels": 5}, {"method": 5}, {"method": ["gradcam"]}, {"fuse": "sum"}, {"batch_size": True}, {"batch_size": 2.0},
    {"precision": "fp64"}, {"preprocess": torchvision.models.ResNet18_Weights.DEFAULT.transforms},
    {"preprocess": 3}, {"target_layer": 3}, {"target_layer": [3]}, {"target_layer": 2.5}, {"target_layer": [None]},
    {"target": 1.5}, {"target": [[]]}, {"img": 3}, {"img": None}, {"model": 3}, {"device": "gpu"}, {"device": 2.5},
    {"activation": "relu"},
]  # fmt: skip
WRONG_KINDS: list[Callable[[], Any]] = [
    lambda: t.top("2"), lambda: t.top(2.0), lambda: t.top(True), lambda: t.top(0), lambda: t.top(-3),
    lambda: t.above("x"), lambda: t.box(0.5),
    lambda: t.above(False), lambda: t.segment((1, 2)),
    lambda: t.box(near=3), lambda: t.box(near="abcd"), lambda: t.box(near=(1, 2)), lambda: t.direction("+", "x"),
    lambda: t.contrast(1, None), lambda: t.contrast(1, 0.5), lambda: t.segment(2.5), lambda: t.top, lambda: t.box,
]  # fmt: skip
WRONG_MODELS: list[dict[str, Any]] = [
    {"size": "64"}, {"size": (64.5, 64)}, {"size": (1, 2, 3)}, {"mean": "a"}, {"std": [1, 2]}, {"name": None},
    {"activation": "relu"},
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_types")
def test_an_argument_of_a_wrong_kind_is_one_sentence():
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)).eval()
    usual = {"model": network, "img": torch.randn(3, 9, 9)}
    known = {"name": "resnet18", "pretrained": False}
    calls = [
        *(lambda options=options: camkit.explain(**{**usual, **options}) for options in WRONG_OPTIONS),
        *(lambda make=make: camkit.explain(**usual, target=make()) for make in WRONG_KINDS),
        *(lambda options=options: camkit.load_model(**{**known, **options}) for options in WRONG_MODELS),
    ]
    for call in calls:
        with refused(kind=CamkitError):
            call()
