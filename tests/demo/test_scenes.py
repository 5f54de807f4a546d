from __future__ import annotations

from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import camkit
from camkit.demo.poster import run
from camkit.demo.scenes import (
    INPUT_SIZE,
    labelled_scenes,
    preprocess,
    scene_mask,
    scene_paths,
    words_model,
    write_scenes,
)
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


def look(name: str, scenes: list[Scene]) -> tuple[list[str | None], list[np.ndarray]]:
    """Return what a demo network calls the scenes, and its heat."""
    found = camkit.explain_many(name, [Image.fromarray(each.image) for each in scenes], device="cpu")
    rows = [row for row in found if isinstance(row, camkit.Explanation)]
    return [row.label for row in rows], [row.heatmap_on_picture() for row in rows]


def share_right(labels: list[str | None], scenes: list[Scene]) -> float:
    return float(np.mean([label == s.thing for label, s in zip(labels, scenes, strict=True)]))


def share_of_peaks_inside(maps: list[np.ndarray], scenes: list[Scene]) -> float:
    """How often the hottest pixel is in the object, or at most half a grid cell from it."""
    near = [cv2.dilate(s.mask.astype(np.uint8), np.ones((9, 9), np.uint8)).ravel() for s in scenes]
    return float(np.mean([region[heat.argmax()] for heat, region in zip(maps, near, strict=True)]))


def test_a_seed_draws_the_same_scene_and_a_generator_a_new_one_each_time():
    rng = np.random.default_rng(5)
    first, second, third = draw(rng, "plane", "sky"), draw(rng, "plane", "sky"), scene(5)
    assert np.array_equal(first.image, third.image)
    assert np.array_equal(first.mask, third.mask)
    assert not np.array_equal(first.mask, second.mask)


@pytest.mark.parametrize(("thing", "background"), list(product(THINGS, BACKGROUNDS)))
def test_mask_is_exact(thing: str, background: str):
    s = scene(3, thing, background)
    bare = draw_background(np.random.default_rng(3), background)
    assert s.image.shape == (128, 128, 3)
    assert s.image.dtype == np.uint8
    assert s.mask.dtype == np.bool_
    assert (s.thing, s.background) == (thing, background)
    changed = (s.image != bare).any(axis=2)
    assert not (changed & ~s.mask).any()
    assert changed[s.mask].mean() > 0.9


def test_preprocess_crops_the_middle():
    wide = np.zeros((256, 512, 3), np.uint8)
    wide[:, 128:384] = 255
    tensor = preprocess(Image.fromarray(wide))
    assert tensor.shape == (3, INPUT_SIZE, INPUT_SIZE)
    assert tensor[:, :, 2:-2].min() > 2
    assert preprocess(Image.new("L", (40, 30))).shape == (3, INPUT_SIZE, INPUT_SIZE)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "at_home", "elsewhere", "looks_at_it"),
    [("demo-biased", (0.97, 1), (0, 0.25), (0, 0.15)), ("demo-fair", (0.97, 1), (0.92, 1), (0.85, 1))],
)
def test_only_the_fair_network_looks_at_objects_and_knows_them_elsewhere(
    home: list[Scene], strange: list[Scene], name: str, at_home: tuple, elsewhere: tuple, looks_at_it: tuple
):
    labels, maps = look(name, home)
    assert at_home[0] < share_right(labels, home) <= at_home[1]
    assert looks_at_it[0] <= share_of_peaks_inside(maps, home) <= looks_at_it[1]
    labels, _ = look(name, strange)
    assert elsewhere[0] <= share_right(labels, strange) <= elsewhere[1]
    if name == "demo-biased":
        backgrounds = [BACKGROUNDS[THINGS.index(label)] for label in labels]
        assert np.mean([b == s.background for b, s in zip(backgrounds, strange, strict=True)]) > 0.75


def test_shipped_scenes_are_small_pictures_of_what_they_say():
    paths = scene_paths()
    assert set(paths) == SHIPPED
    for name, path in paths.items():
        mask = scene_mask(name)
        assert mask.shape == (384, 384)
        assert mask.dtype == np.bool_
        assert 0.02 < mask.mean() < 0.2
        assert path.stat().st_size < 60_000
        with Image.open(path) as picture:
            assert picture.size == (384, 384)
            assert picture.mode == "RGB"


def decoded(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_the_shipped_pictures_are_those_that_the_script_draws():
    name, drawn = "plane-sky", scene_to_explain("plane-sky")
    assert np.abs(decoded(scene_paths()[name]).astype(float) - drawn.image).mean() < 4
    assert (scene_mask(name) != drawn.mask).mean() < 1e-3
    for thing, number in (("plane", 0), ("ship", 13), ("car", 26), ("bird", 39)):
        drawn, picture = scene_to_check(thing, number), labelled_scenes() / thing / f"{number:03d}.jpg"
        assert np.abs(decoded(picture).astype(float) - drawn.image).mean() < 9
        assert (decoded(labelled_scenes().parent / "masks" / thing / f"{number:03d}.png") != drawn.mask).mean() < 1e-3


def test_the_scenes_take_less_than_a_megabyte_and_the_model_of_words_less_than_two():
    files = [path for path in labelled_scenes().parents[1].rglob("*") if path.is_file()]
    of_words = [path for path in files if words_model().parent in path.parents]
    scenes = [path for path in files if path not in of_words]
    assert len(scenes) == 2 * (len(SHIPPED) + 4 * 40)
    assert sum(path.stat().st_size for path in scenes) < 1_000_000
    assert sum(path.stat().st_size for path in of_words) < 2_000_000
    for weights in (Path(camkit.__file__).parent / "models/files").glob("demo-*"):
        assert weights.stat().st_size < 1_000_000


def test_some_of_the_labelled_scenes_can_be_copied(tmp_path: Path):
    pictures = write_scenes(tmp_path, 2)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert pictures == tmp_path / "pictures"
    assert names == {
        f"{kind}/{thing}/00{number}.{ending}"
        for kind, ending in (("pictures", "jpg"), ("masks", "png"))
        for thing, number in product(THINGS, range(2))
    }


def test_the_demo_story_holds_for_the_shipped_planes(tmp_path: Path):
    answers, file = run(tmp_path)
    assert file.is_file()
    found = {scene: {model: row.label for model, (row, _) in told.items()} for scene, told in answers.items()}
    assert found == {
        "plane-sky": {"demo-biased": "plane", "demo-fair": "plane"},
        "plane-wood": {"demo-biased": "bird", "demo-fair": "plane"},
    }
    for told in answers.values():
        shares = [on_plane for _, on_plane in told.values()]
        assert shares[0] < 0.1, "the share of the heat on the plane"
        assert shares[1] > 0.3
