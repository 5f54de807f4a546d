from importlib.resources import files
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from camkit import scenes as shipped
from scripts.demo.draw_scenes import scene_to_check, scene_to_explain
from scripts.demo.drawn_scenes import BACKGROUNDS, HOME, THINGS, Scene, draw, draw_background

SHIPPED = {"plane-sky", "ship-sea", "car-road", "bird-wood", "plane-wood", "car-sea"}
FRESH_SEED = 2_000_000


def scene(seed: int, thing: str = "plane", background: str = "sky", size: int = 128) -> Scene:
    return draw(np.random.default_rng(seed), thing, background, size)


@pytest.fixture(scope="module")
def home() -> list[Scene]:
    things = [THINGS[i % 4] for i in range(120)]
    return [scene(FRESH_SEED + i, thing, HOME[thing]) for i, thing in enumerate(things)]


@pytest.fixture(scope="module")
def strange() -> list[Scene]:
    pairs = [pair for pair in product(THINGS, BACKGROUNDS) if HOME[pair[0]] != pair[1]]
    return [scene(FRESH_SEED + 1000 + i, *pairs[i % 12]) for i in range(120)]


def look(name: str, scenes: list[Scene]) -> tuple[list[str], torch.Tensor]:
    """Predicted labels and ReLU'd Grad-CAM maps at the last feature map, (N, H, W)."""
    network = shipped.load_scene_net(name)
    images = torch.stack([shipped.preprocess(Image.fromarray(s.image)) for s in scenes])
    features = network.features(images).detach().requires_grad_()
    logits = network.head(network.pool(features).flatten(1))
    logits.max(1).values.sum().backward()
    assert features.grad is not None
    weights = features.grad.mean((2, 3), keepdim=True)
    grid = (weights * features.detach()).sum(1, keepdim=True).relu()
    maps = functional.interpolate(grid, images.shape[-2:], mode="bilinear")[:, 0]
    return [shipped.LABELS[int(i)] for i in logits.argmax(1)], maps


def share_right(labels: list[str], scenes: list[Scene]) -> float:
    return float(np.mean([label == s.thing for label, s in zip(labels, scenes, strict=True)]))


def share_of_peaks_inside(maps: torch.Tensor, scenes: list[Scene]) -> float:
    """How often the hottest pixel is in the object, or at most half a grid cell from it."""
    hits = []
    for heat, s in zip(maps.numpy(), scenes, strict=True):
        near = cv2.dilate(s.mask.astype(np.uint8), np.ones((9, 9), np.uint8))
        hits.append(near.ravel()[heat.argmax()] == 1)
    return float(np.mean(hits))


@pytest.mark.parametrize(("thing", "background"), list(product(THINGS, BACKGROUNDS)))
def test_mask_is_exact(thing: str, background: str):
    s = scene(3, thing, background)
    bare = draw_background(np.random.default_rng(3), background)
    assert s.image.shape == (128, 128, 3)
    assert (s.image.dtype, s.mask.dtype) == (np.uint8, np.bool_)
    assert (s.thing, s.background) == (thing, background)
    changed = (s.image != bare).any(axis=2)
    assert not (changed & ~s.mask).any()
    assert changed[s.mask].mean() > 0.9


def test_preprocess_crops_the_middle():
    wide = np.zeros((256, 512, 3), np.uint8)
    wide[:, 128:384] = 255
    tensor = shipped.preprocess(Image.fromarray(wide))
    assert tensor.shape == (3, shipped.INPUT_SIZE, shipped.INPUT_SIZE)
    assert tensor.dtype == torch.float32
    assert tensor[:, :, 2:-2].min() > 2
    assert shipped.preprocess(Image.new("L", (40, 30))).shape == (3, shipped.INPUT_SIZE, shipped.INPUT_SIZE)


@pytest.mark.parametrize("name", ["demo-biased", "demo-fair"])
def test_shipped_weights_are_small_and_ready(name: str):
    assert len(files("camkit.models").joinpath("files", f"{name}.safetensors").read_bytes()) < 1_000_000
    network = shipped.load_scene_net(name)
    assert not any(module.training for module in network.modules())
    assert all(value.dtype == torch.float32 for value in network.parameters())


@pytest.mark.extended
def test_both_networks_know_objects_at_home(home: list[Scene]):
    for name in ("demo-biased", "demo-fair"):
        assert share_right(look(name, home)[0], home) > 0.97, name


@pytest.mark.extended
def test_only_the_fair_network_knows_objects_elsewhere(strange: list[Scene]):
    fair, biased = look("demo-fair", strange)[0], look("demo-biased", strange)[0]
    assert share_right(fair, strange) > 0.92
    assert share_right(biased, strange) < 0.25
    backgrounds = [BACKGROUNDS[THINGS.index(label)] for label in biased]
    assert np.mean([b == s.background for b, s in zip(backgrounds, strange, strict=True)]) > 0.75


@pytest.mark.extended
def test_fair_looks_at_the_object_and_biased_does_not(home: list[Scene]):
    assert share_of_peaks_inside(look("demo-fair", home)[1], home) > 0.85
    assert share_of_peaks_inside(look("demo-biased", home)[1], home) < 0.15


def test_shipped_scenes_are_small_pictures_of_what_they_say():
    paths = shipped.scene_paths()
    assert set(paths) == SHIPPED
    for name, path in paths.items():
        mask = shipped.scene_mask(name)
        assert (mask.shape, mask.dtype) == ((384, 384), np.bool_)
        assert 0.02 < mask.mean() < 0.2
        assert path.stat().st_size < 60_000
        with Image.open(path) as picture:
            assert (picture.size, picture.mode) == ((384, 384), "RGB")


def decoded(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_the_shipped_pictures_are_those_that_the_script_draws():
    name, drawn = "plane-sky", scene_to_explain("plane-sky")
    assert np.abs(decoded(shipped.scene_paths()[name]).astype(float) - drawn.image).mean() < 4
    assert (shipped.scene_mask(name) != drawn.mask).mean() < 1e-3
    for thing, number in (("plane", 0), ("ship", 13), ("car", 26), ("bird", 39)):
        drawn, picture = scene_to_check(thing, number), shipped.labelled_scenes() / thing / f"{number:03d}.jpg"
        assert np.abs(decoded(picture).astype(float) - drawn.image).mean() < 9
        assert (
            decoded(shipped.labelled_scenes().parent / "masks" / thing / f"{number:03d}.png") != drawn.mask
        ).mean() < 1e-3


def test_the_scenes_take_less_than_a_megabyte_and_the_model_of_words_less_than_two():
    files = [path for path in shipped.labelled_scenes().parents[1].rglob("*") if path.is_file()]
    of_words = [path for path in files if shipped.words_model().parent in path.parents]
    scenes = [path for path in files if path not in of_words]
    assert len(scenes) == 2 * (len(SHIPPED) + 4 * 40)
    assert sum(path.stat().st_size for path in scenes) < 1_000_000
    assert sum(path.stat().st_size for path in of_words) < 2_000_000


def test_some_of_the_labelled_scenes_can_be_copied(tmp_path: Path):
    pictures = shipped.write_scenes(tmp_path, 2)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert pictures == tmp_path / "pictures"
    assert names == {
        f"{kind}/{thing}/00{number}.{ending}"
        for kind, ending in (("pictures", "jpg"), ("masks", "png"))
        for thing, number in product(THINGS, range(2))
    }


def test_the_demo_story_holds_for_the_shipped_planes():
    answers = {}
    for name in ("plane-sky", "plane-wood"):
        with Image.open(shipped.scene_paths()[name]) as picture:
            image = np.asarray(picture.resize((shipped.INPUT_SIZE, shipped.INPUT_SIZE), Image.Resampling.BOX))
        mask = (
            cv2.resize(
                shipped.scene_mask(name).astype(np.uint8),
                (shipped.INPUT_SIZE, shipped.INPUT_SIZE),
                interpolation=cv2.INTER_AREA,
            )
            > 0
        )
        shown = [Scene(image, mask, *name.split("-"))]
        for network in ("demo-biased", "demo-fair"):
            labels, maps = look(network, shown)
            answers[name, network] = (labels[0], share_of_peaks_inside(maps, shown))
    assert answers == {
        ("plane-sky", "demo-biased"): ("plane", 0.0),
        ("plane-sky", "demo-fair"): ("plane", 1.0),
        ("plane-wood", "demo-biased"): ("bird", 0.0),
        ("plane-wood", "demo-fair"): ("plane", 1.0),
    }
