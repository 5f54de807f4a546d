"""Real weights on real photos: the right classes, heat on the object, and the same maps as grad-cam."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageDraw, ImageFilter, ImageOps
from torch import Tensor, nn
from torchvision import transforms

import camkit
from camkit.drawing.overlay import stretch
from camkit.models import LoadedModel
from scripts.placement.measure_shift import padded
from scripts.weights import PHOTOS, WEIGHTS

CHICKADEE, SAMOYED = 19, 258


# --- the classes ------------------------------------------------------------------------------------------------------


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


def as_stored(path: Path) -> Image.Image:
    """Return a picture with its colours as stored: without its profile."""
    picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    picture.info.pop("icc_profile", None)
    return picture


@pytest.mark.extended
def test_the_recorded_probabilities_of_squeezenet_on_every_picture(models, test_data, expected):
    # The record was made with pictures squashed to 227 x 227, not with torchvision's resize and crop, and with their
    # colours as stored, not converted by their profile.
    squash = transforms.Compose(
        [
            transforms.Resize((227, 227)),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
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


def test_labels_are_true_names(model, folder):
    labels = json.loads((folder / "LICENCES.json").read_text())
    right = 0
    for entry in labels:
        if entry["imagenet_labels"]:
            row = camkit.explain(model, folder / entry["file"])
            assert row.label == model.labels[row.target]
            right += row.target in entry["imagenet_labels"]

    assert right >= 6


# --- the heat ---------------------------------------------------------------------------------------------------------


def seen(row: camkit.Explanation) -> np.ndarray:
    height, width = row.picture.shape[:2]
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    return (columns > row.box.left) & (columns < row.box.right) & (rows > row.box.top) & (rows < row.box.bottom)


def energy_inside(row: camkit.Explanation, region: np.ndarray) -> float:
    """Return the share of the heat, laid over the original picture, that falls into a region of it."""
    heat = np.nan_to_num(stretch(row.heatmap, row.box, row.picture.shape[:2]))
    return float(heat[region].sum() / heat.sum())


def birds_region(reach: int) -> np.ndarray:
    """Return where the bird of bird.png is, and what lies within ``reach`` pixels of it."""
    outline = [(37, 110), (65, 90), (95, 78), (130, 85), (160, 115), (215, 125), (265, 150), (345, 185), (483, 208)]
    outline += [
        (480, 222),
        (345, 212),
        (275, 200),
        (270, 240),
        (215, 262),
        (170, 258),
        (110, 218),
        (88, 180),
        (70, 130),
    ]
    picture = Image.new("L", (512, 343))
    ImageDraw.Draw(picture).polygon(outline, fill=255)
    return np.asarray(picture.filter(ImageFilter.MaxFilter(2 * reach + 1))) > 0


def test_a_chickadee_is_called_one_because_of_the_bird(models, folder):
    row = camkit.explain(models["mobilenet_v2"], folder / "bird.png")

    x, y = row.peak
    assert row.target == CHICKADEE
    assert row.label == "chickadee"
    assert birds_region(0)[int(y), int(x)]
    # A cell of the 7 x 7 grid is 43 pixels wide here: heat within half a cell of the bird is heat on it.
    assert energy_inside(row, birds_region(21)) > 0.7 > 1.4 * birds_region(21)[seen(row)].mean()
    assert energy_inside(row, birds_region(0)) > 1.6 * birds_region(0)[seen(row)].mean()


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
    row = camkit.explain(with_its_own_padding(model), folder / photo, method="gradcam")

    region = object_mask(folder, photo)
    assert region.shape == row.picture.shape[:2]
    assert row.status == "ok"
    assert energy_inside(row, region) > lift * region[seen(row)].mean()


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


# --- the heat is about what changes the score -------------------------------------------------------------------------


@pytest.mark.extended
def test_without_the_hottest_cell_the_score_falls_by_more_than_without_the_coldest(model, folder):
    """On the grid: the features of one cell are taken away, and the rest of the network runs on what is left."""
    assert model.preprocess is not None
    for photo in PHOTOS:
        with Image.open(folder / photo) as picture:
            image = model.preprocess(picture.convert("RGB"))
        found = camkit.explain(model, image, method="gradcam")
        falls = []
        for cell in (found.raw.argmax(), found.raw.argmin()):
            row, column = np.unravel_index(cell, found.raw.shape)

            def without(_: nn.Module, __: Any, maps: Tensor, row: int = int(row), column: int = int(column)) -> Tensor:
                maps = maps.clone()
                maps[:, :, row, column] = 0
                return maps

            handle = model.module.get_submodule(found.layer).register_forward_hook(without)
            with torch.no_grad():
                falls.append(found.score - float(model.module(image[None])[0, found.target]))
            handle.remove()
        assert falls[0] > max(falls[1], 0), photo


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
