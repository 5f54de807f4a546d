"""Other outputs than class scores: maps, boxes, several labels, one number, embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, classifier
from PIL import Image
from refusals import refused
from tasks import Detecting, Padding, Segmenting, beside, scene
from tiers import represented_by
from tiny_models import gradient_times_activation
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.demo import scenes
from camkit.errors import InputError, LayerError, TargetError
from camkit.targets import above, box, contrast, direction, segment, similar_to, top

NAMES = ("__background__", *camkit.scenes.LABELS)
SEGMENTING, DETECTING = Segmenting().eval(), Detecting().eval()


def grown(mask: np.ndarray, by: int = 12) -> np.ndarray:
    return functional.max_pool2d(torch.from_numpy(mask)[None].float(), 2 * by + 1, 1, by)[0].bool().numpy()


def share(heatmap: np.ndarray, mask: np.ndarray) -> float:
    return float(heatmap[grown(mask)].sum() / heatmap.sum())


def test_the_score_of_a_segmentation_is_the_mean_logit_over_its_cells():
    net = SEGMENTING
    image, (_, car) = beside(("plane", "sea", 1), ("car", "wood", 2))
    features = net.features(image[None]).detach().requires_grad_()
    maps = functional.interpolate(
        torch.cat([torch.full((1, 1, 16, 32), 6.0), net.head(features)], dim=1), size=image.shape[1:], mode="bilinear"
    )
    index = NAMES.index("plane")
    for target, where, words in (
        (index, maps[0].argmax(0) == index, "where the class is predicted"),
        (segment(index, car), torch.from_numpy(car), "inside the mask"),
        (segment(index, everywhere=True), torch.ones(image.shape[1:], dtype=torch.bool), "of all cells"),
    ):
        score = maps[0, index][where].mean()
        (gradient,) = torch.autograd.grad(score, features, retain_graph=True)
        found = camkit.explain(net, image, target=target, method="hirescam")

        assert found.quantity == f"mean logit {words}"
        assert found.score == pytest.approx(score.item(), rel=1e-4)
        expected = (features * gradient).sum(1)[0].detach().numpy()
        assert np.allclose(found.raw, expected, atol=1e-4 * np.abs(expected).max())


def test_the_logits_of_many_cells_add_up_in_fp16():
    maps = torch.full((1, 2, 256, 256), 100.0, dtype=torch.float16)
    maps[:, 1] = 200
    assert segment(1)(maps, 1).values.tolist() == [200.0]


def test_one_map_of_logits_is_one_class_or_not():
    maps = torch.full((1, 1, 8, 8), -3.0)
    maps[..., :4] = 1.0
    scores = segment(0)(maps, 1)
    assert scores.values.tolist() == [1.0]
    assert scores.probabilities == pytest.approx((1 / (1 + np.exp(-1)),))


@pytest.mark.parametrize(("classes", "ending"), [(3, nn.Softmax(1)), (3, nn.LogSoftmax(1)), (1, nn.Sigmoid())])
def test_maps_of_probabilities_are_explained_as_maps_of_logits(classes, ending):
    torch.manual_seed(3)
    bare = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, classes, 1)).eval()
    image = torch.randn(3, 12, 12)
    for target in (None, 0):
        expected = camkit.explain(bare, image, "1", target=target)
        found = camkit.explain(nn.Sequential(*bare, ending).eval(), image, "1", target=target)
        assert found.target == expected.target
        assert found.probability == pytest.approx(expected.probability, abs=1e-6)
        assert np.allclose(found.raw, expected.raw, atol=1e-6)


def test_without_a_target_the_class_that_covers_most_is_explained_and_not_the_background():
    image, _ = beside(("ship", "road", 4))
    assert camkit.explain(SEGMENTING, image, labels=NAMES).label == "ship"
    assert camkit.explain(SEGMENTING, image).target == 0  # without labels, class 0 is a class as any other
    for mask in (np.zeros((8, 8), bool), np.ones(4), "mask.png"):
        with refused("mask", TargetError):
            camkit.explain(SEGMENTING, image, target=segment(1, mask))


def test_each_boxs_heat_lies_on_it_and_differs_from_the_others():
    net = DETECTING
    image, masks = beside(("plane", "sea", 1), ("car", "wood", 2))
    both = net(image[None])[0]

    found = camkit.explain(net, image, target=[box(0), box(1)], labels=NAMES)

    assert {row.label for row in found} == {"plane", "car"}
    for number, row in enumerate(found):
        mask = masks[0] if row.label == "plane" else masks[1]
        assert row.method == "hirescam"
        assert row.score == pytest.approx(both["scores"][number].item(), abs=1e-5)
        assert list(row.detection) == pytest.approx(both["boxes"][number].tolist())
        assert share(row.heatmap, mask) > 0.7
    assert np.corrcoef(found[0].heatmap.ravel(), found[1].heatmap.ravel())[0, 1] < 0.2


def test_a_box_is_found_by_label_by_position_and_as_the_best():
    net = DETECTING
    image, _ = beside(("plane", "sea", 1), ("car", "wood", 2))
    both = camkit.explain(net, image, target=top(2), labels=NAMES)
    by_label = {row.label: row for row in both}
    car = by_label["car"]
    near = tuple(side + 9 for side in car.detection)
    for target in ("car", box(label="car"), box(near=near)):
        row = camkit.explain(net, image, target=target, labels=NAMES)
        assert (row.label, row.detection) == ("car", car.detection)
        assert np.array_equal(row.raw, car.raw)
    assert camkit.explain(net, image, labels=NAMES).detection == both[0].detection


def test_pictures_without_the_box_are_reported_and_the_others_explained():
    net = DETECTING
    with_car, _ = beside(("car", "wood", 2))
    without, _ = beside(("ship", "sea", 3))

    rows = list(camkit.explain_many(net, [without, with_car, without], target="car", labels=NAMES, on_error="yield"))

    assert [isinstance(row, camkit.Failure) for row in rows] == [True, False, True]
    assert str(rows[0].error).endswith("no such box among the detections: the detector found none of class 'car'")
    with pytest.raises(TargetError, match=f"the detector found none of class {NAMES.index('car')}"):
        camkit.explain(net, without, target=box(label=NAMES.index("car")))
    both = list(camkit.explain_many(net, [with_car], target=[box(0), box(3)], labels=NAMES, on_error="yield"))
    assert [isinstance(row, camkit.Failure) for row in both] == [False, True]
    assert len(camkit.explain(net, with_car, target=top(3), labels=NAMES)) == 1  # the best, as many as there are
    with pytest.raises(TargetError, match="no box 3: the detector found only 1 box,"):
        camkit.explain(net, without, target=box(3))
    with pytest.raises(InputError, match="3 labels were given, but the model found class"):
        camkit.explain(net, with_car, labels=["a", "b", "c"])
    with pytest.raises(TargetError, match="no detection overlaps"):
        camkit.explain(net, with_car, target=box(near=(0, 0, 2, 2)))


def test_a_class_of_a_detector_without_labels_is_one_sentence():
    class Unlabelled(Detecting):
        def boxes(self, maps: Tensor) -> dict[str, Tensor]:
            found = super().boxes(maps)
            return {name: found[name] for name in ("boxes", "scores")}

    net = Unlabelled().eval()
    image, _ = beside(("car", "wood", 2))
    for target in (1, "car", box(label=1)):
        with pytest.raises(TargetError, match="the detections have no labels; choose a box by its number"):
            camkit.explain(net, image, target=target, labels=NAMES)
    assert camkit.explain(net, image, target=box(0)).target is None


def test_a_box_on_the_original_picture(tmp_path):
    picture, _ = scene("car", "wood", 2)
    Image.fromarray(picture).resize((256, 256)).save(tmp_path / "car.png")
    row = camkit.explain(DETECTING, tmp_path / "car.png", preprocess=scenes.preprocess, labels=NAMES)
    on_input = camkit.explain(DETECTING, scenes.preprocess(Image.open(tmp_path / "car.png")), labels=NAMES)
    assert list(row.detection) == pytest.approx([2 * side for side in on_input.detection], abs=1.5)
    assert row.to_dict()["detection"] == list(row.detection)
    assert row.quantity == "score of the box"
    left, top_, right, bottom = (round(side) for side in row.detection)
    for line in (top_, min(bottom, 256) - 1):
        assert (row.overlay()[line, left + 3 : right - 3] == 255).all()


@pytest.mark.parametrize(
    "name",
    represented_by(
        "ssdlite320_mobilenet_v3_large",
        among=["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"],
    ),
)
@pytest.mark.parametrize("size", represented_by((160, 280), among=[(160, 280), (224, 336)]))
def test_torchvisions_detectors_are_explained_where_all_boxes_come_from(name, size):
    torch.manual_seed(0)
    options = {"box_score_thresh": 0.0} if "rcnn" in name else {"score_thresh": 0.0}
    net = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options).eval()
    with torch.no_grad():
        for module in net.modules():  # weights that tell boxes apart
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.1)
    image = torch.rand(3, *size)

    first, second = camkit.explain(net, image, target=[box(0), box(1)])

    assert first.layer.startswith("backbone")
    assert first.heatmap.shape == size
    one, other = (row.raw / np.abs(row.raw).max() for row in (first, second))
    assert not np.allclose(one, other, atol=1e-3)
    grid = np.array(first.raw.shape)
    assert abs(grid[1] / grid[0] - (size[1] / size[0] if "rcnn" in name else 1)) < 0.15


def test_heat_on_the_padding_a_model_adds_is_not_stretched_over_the_picture():
    torch.manual_seed(0)
    net, image = Padding().eval(), torch.rand(3, 16, 16)
    found, again = (camkit.explain(net, image, "patches", target=1) for _ in range(2))
    np.testing.assert_array_equal(again.heatmap, found.heatmap)
    assert found.raw.shape == (4, 8)
    enlarged = functional.interpolate(torch.from_numpy(found.raw)[None, None].relu(), size=(16, 32), mode="bilinear")
    expected = enlarged[0, 0, :, :16]
    assert np.allclose(found.heatmap, expected / expected.max(), atol=1e-6)


def made(outputs: int = 4, bias: list[float] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    net = classifier(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), classes=outputs)
    if bias is not None:
        with torch.no_grad():
            net[4].weight.mul_(0.1)
            net[4].bias.copy_(torch.tensor(bias))
    return net


def raw_of(net: nn.Sequential, image: Tensor, score: Any) -> np.ndarray:
    return gradient_times_activation(net, "1", lambda: score(net(image[None])).sum()).sum(1)[0].numpy()


def test_every_class_above_a_threshold_is_explained_best_first():
    net, image = made(bias=[1.0, -3.0, 3.0, -0.5]), torch.randn(3, 12, 12)
    shares = net(image[None])[0].sigmoid().tolist()
    found = camkit.explain(net, [image, image], target=above(0.5), method="hirescam")
    assert [row.target for row in found] == [2, 0, 2, 0]
    assert [row.probability for row in found[:2]] == pytest.approx([shares[2], shares[0]], abs=1e-6)
    assert np.allclose(found[1].raw, raw_of(net, image, lambda out: out[:, 0]), atol=1e-6)
    with pytest.raises(TargetError, match=r"no class above 0\.99"):
        camkit.explain(net, image, target=above(0.99))


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_number_may_go_up_or_down(outputs):
    net, image = made(outputs), torch.randn(3, 12, 12)
    up, down = camkit.explain(net, image, target=[direction("+"), direction("-")], method="hirescam")
    assert up.score == pytest.approx(-down.score)
    assert np.allclose(up.raw, -down.raw)
    assert np.allclose(down.raw, raw_of(net, image, lambda out: -out[:, 0]), atol=1e-6)
    assert up.probability is None
    assert up.quantity == "output, with this sign"
    with pytest.raises(TargetError, match="out of range"):
        camkit.explain(net, image, target=direction("+", outputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("logit", [17.0, -40.0])
def test_a_direction_explains_the_logit_behind_a_sigmoid(sign, logit, dtype):
    """Also where the sigmoid is 1 or 0 in this type, so that its gradient is zero."""
    net, image = made(1, bias=[logit]).to(dtype), torch.randn(3, 12, 12)
    expected = camkit.explain(net, image, target=direction(sign), method="hirescam")
    found = camkit.explain(
        nn.Sequential(net, nn.Sigmoid()), image, "0." + expected.layer, target=direction(sign), method="hirescam"
    )
    assert found.status in ("ok", "no_positive_evidence")
    np.testing.assert_array_equal(found.raw, expected.raw)
    assert found.raw.any()
    assert abs(found.score) == pytest.approx(torch.tensor(logit).sigmoid().item(), abs=0.02)


def test_one_class_rather_than_another_is_the_difference_of_their_logits():
    net, image = made(), torch.randn(3, 12, 12)
    found = camkit.explain(net, image, target=contrast("b", 3), labels=list("abcd"), method="hirescam")
    assert found.label == found.caption().title == "b rather than d"
    assert np.allclose(found.raw, raw_of(net, image, lambda out: out[:, 1] - out[:, 3]), atol=1e-6)
    for wrong, said in ((contrast("z", "a"), "no label"), (contrast(0, 9), "range")):
        with pytest.raises(TargetError, match=said):
            camkit.explain(net, image, target=wrong, labels=list("abcd"))


def test_similarity_to_a_reference_is_the_cosine_of_the_embeddings():
    net = made(8)
    image, reference = torch.randn(3, 12, 12), torch.randn(3, 12, 12)
    embedding = net(reference[None])[0].detach()

    by_picture = camkit.explain(net, image, target=similar_to(reference), method="hirescam")
    by_embedding = camkit.explain(net, image, target=similar_to(embedding), method="hirescam")

    expected = raw_of(net, image, lambda out: functional.cosine_similarity(out, embedding[None]))
    assert by_picture.score == pytest.approx(functional.cosine_similarity(net(image[None])[0], embedding, dim=0).item())
    for found in (by_picture, by_embedding):
        assert np.allclose(found.raw, expected, atol=1e-6)
    with pytest.raises(TargetError, match="3 numbers"):
        camkit.explain(net, image, target=similar_to(torch.zeros(3)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: 9, "out of range"),
        (lambda: box(0), "cannot read as boxes; pass a detector by its name"),
        (lambda: segment(1), "no maps"),
        (lambda: box(0, label=1), "one of the three"),
        (lambda: box(near=(5, 5, 5, 9)), "left < right"),
        (lambda: above(1.5), "probability"),
    ],
)
def test_a_target_for_another_kind_of_model_is_one_sentence(make, said):
    with refused(said, TargetError):
        camkit.explain(made(), torch.randn(3, 12, 12), target=make(), labels=list("abcd"))


def test_a_detector_without_a_grid_is_refused():
    empty = Net(lambda _, images: [{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0)} for _ in images])
    with pytest.raises(LayerError, match="no module inside the model returned feature maps"):
        camkit.explain(empty, torch.randn(3, 12, 12))
