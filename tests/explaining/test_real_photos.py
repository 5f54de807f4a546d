"""Real weights on real photos: the right classes, heat on the object, and the same maps as grad-cam."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision import transforms

import camkit
from camkit.models import LoadedModel
from scripts.placement.measure_shift import padded
from scripts.weights import PHOTOS, WEIGHTS

CHICKADEE, SAMOYED = 19, 258


def plain_probabilities(name: str, weights: Path, photo: Path) -> Tensor:
    """Return the probabilities that torchvision gives without camkit."""
    net = torchvision.models.get_model(name, weights=None).eval()
    net.load_state_dict(torch.load(weights, weights_only=True))
    preset = torchvision.models.get_model_weights(name).IMAGENET1K_V1.transforms()
    with Image.open(photo) as picture, torch.no_grad():
        return net(preset(picture.convert("RGB"))[None]).softmax(1)[0]


def test_the_five_best_classes_of_every_photo_are_those_of_plain_torchvision(model, folder, test_data):
    rows = camkit.explain(model, [folder / photo for photo in PHOTOS], target=camkit.targets.top(5))
    assert len(rows) == 5 * len(PHOTOS)
    for number, photo in enumerate(PHOTOS):
        found = rows[5 * number : 5 * number + 5]
        plain = plain_probabilities(model.name, test_data / "weights" / WEIGHTS[model.name], folder / photo)
        assert [row.target for row in found] == plain.topk(5).indices.tolist(), photo
        assert [row.probability for row in found] == pytest.approx(plain.topk(5).values.tolist(), abs=1e-4), photo
        assert {row.source for row in found} == {str(folder / photo)}


def test_labels_are_true_names(model, folder):
    assert model.labels[CHICKADEE] == "chickadee"
    right = 0
    for entry in json.loads((folder / "LICENCES.json").read_text()):
        if entry["imagenet_labels"]:
            row = camkit.explain(model, folder / entry["file"])
            assert row.label == model.labels[row.target]
            right += row.target in entry["imagenet_labels"]
    assert right >= 6


def energy_inside(row: camkit.Explanation, region: np.ndarray) -> float:
    """Return the share of the heat, laid over the original picture, that falls into a region of it."""
    heat = row.heatmap_on_picture()
    return float(heat[region].sum() / heat.sum())


def with_its_own_padding(model: LoadedModel) -> LoadedModel:
    """Return MobileNetV2 with the padding of TensorFlow, where its weights come from, and another model as it is."""
    if model.name != "mobilenet_v2":
        return model
    return replace(model, module=padded(deepcopy(model.module), at_the_end=True))


def object_mask(folder: Path, photo: str) -> np.ndarray:
    """Return where the object is: value 3 of the bird's mask; all but the background, value 1, of the dog's."""
    name = photo.replace("segmentation", "segmentation_mask")
    with Image.open(folder / name) as picture:
        mask = np.asarray(picture)
    return mask == 3 if photo.startswith("bird") else mask != 1


@pytest.mark.parametrize(("photo", "lift"), [("bird_segmentation.png", 1.35), ("dog_segmentation_256.png", 1.2)])
def test_the_heat_lies_on_the_object_more_than_its_area_would_explain(model, folder, photo, lift):
    model, region = with_its_own_padding(model), object_mask(folder, photo)
    for method in ("gradcam", None):
        row = camkit.explain(model, folder / photo, method=method)
        assert region.shape == row.picture.shape[:2]
        assert row.status == "ok"
        seen = ~np.isnan(row.heatmap_on_picture(unseen=np.nan))
        assert energy_inside(row, region) > lift * region[seen].mean()


@pytest.mark.extended
@pytest.mark.parametrize(("method", "inside"), [("gradcam", 0.88), (None, 0.95)])
def test_the_samoyed_is_found_on_the_dog(models, folder, method, inside):
    """With torchvision's padding, which these weights were not trained with, heat lies a cell beside what causes it."""
    model = with_its_own_padding(models["mobilenet_v2"])
    row = camkit.explain(model, folder / "dog_segmentation_256.png", method=method)
    region = object_mask(folder, "dog_segmentation_256.png")
    x, y = row.peak
    assert row.target == SAMOYED
    assert region[int(y), int(x)]
    assert energy_inside(row, region) > inside


def as_stored(path: Path) -> Image.Image:
    """Return a picture with its colours as stored: without its profile."""
    picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    picture.info.pop("icc_profile", None)
    return picture


@pytest.mark.extended
def test_the_recorded_probabilities_of_squeezenet_on_every_picture(models, test_data):
    expected = json.loads((test_data / "expected_top5.json").read_text())
    # The record was made with pictures squashed to 227 x 227, not with torchvision's resize and crop, and with their
    # colours as stored, not converted by their profile.
    normalise = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    squash = transforms.Compose([transforms.Resize((227, 227)), transforms.ToTensor(), normalise])
    pictures = (as_stored(test_data / name) for name in expected)

    rows = list(camkit.explain_many(models["squeezenet1_1"], pictures, target=camkit.targets.top(5), preprocess=squash))

    assert len(rows) == 5 * len(expected) == 5 * 59
    for number, (name, truth) in enumerate(expected.items()):
        found, recorded = rows[5 * number : 5 * number + 5], truth[Path(WEIGHTS["squeezenet1_1"]).stem]
        assert [row.probability for row in found] == pytest.approx([share for _, share in recorded], abs=2e-3), name
        by_index = {row.target: row.probability for row in found}
        for index, share in recorded:
            assert by_index.get(index, found[-1].probability) == pytest.approx(share, abs=2e-3), name
        assert found[0].target == recorded[0][0], name


@pytest.mark.extended
def test_without_the_hottest_quarter_of_the_picture_the_score_falls_most(model, folder):
    """In the picture: a quarter of its cells grey. Two photos may differ: a grey patch is itself something to see."""
    assert model.preprocess is not None
    hot, cold = [], []
    for photo in PHOTOS:
        with Image.open(folder / photo) as picture:
            image = model.preprocess(picture.convert("RGB"))
        found = camkit.explain(model, image)
        order = torch.from_numpy(found.raw.ravel()).argsort()
        quarter = len(order) // 4
        for falls, cells in ((hot, order[-quarter:]), (cold, order[:quarter])):
            covered = torch.zeros(len(order)).index_fill(0, cells, 1).reshape(1, 1, *found.raw.shape)
            grey = nn.functional.interpolate(covered, size=image.shape[1:])[0]
            with torch.no_grad():
                falls.append(found.score - float(model.module((image * (1 - grey))[None])[0, found.target]))
    assert sum(hot) > 3 * sum(cold)
    assert sum(one > other for one, other in zip(hot, cold, strict=True)) >= len(PHOTOS) - 2
