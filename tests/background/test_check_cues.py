"""Statistics of the whole picture: measured, imposed, and exchanged between classes."""

import io

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import camkit
from camkit.background.edits import CUES, beside, impose_compression
from camkit.background.effects import OVERALL
from camkit.images.read import LOSSLESS, jpeg_quality

SIDE = 64
EVERYWHERE = np.ones((SIDE, SIDE), bool)


def cues_of(result):
    return {name: effect.mean for name, effect in result.overall.effects.items() if name in CUES}


def scene(seed=0):
    """Return a picture with edges, gradients and a little noise."""
    rng = np.random.default_rng(seed)
    picture = np.full((SIDE, SIDE, 3), 0.4, np.float32)
    picture += np.linspace(0, 0.2, SIDE, dtype=np.float32)[:, None, None]
    for _ in range(12):
        left, top = rng.integers(0, SIDE - 20, 2).tolist()
        cv2.rectangle(picture, (left, top), (left + 15, top + 12), rng.uniform(0.1, 0.9, 3).tolist(), -1)
    return (picture + 0.01 * rng.standard_normal((SIDE, SIDE, 1), np.float32)).clip(0, 1)


def changed(kind, picture):
    """Return a picture on which a camera or an editor left a cue."""
    if kind == "sharpness":
        return cv2.GaussianBlur(picture, (0, 0), 0.6)
    if kind == "noise":
        return (picture + 0.05 * np.random.default_rng(5).standard_normal((SIDE, SIDE, 1), np.float32)).clip(0, 1)
    return (picture * np.array([1.3, 1.0, 0.7], np.float32)).clip(0, 1)


MEASURED = [name for name, cue in CUES.items() if cue.measure is not None]


@pytest.mark.parametrize("name", MEASURED)
def test_a_picture_takes_on_the_value_of_another_and_its_own_hardly_changes_it(name):
    cue = CUES[name]
    plain, other = scene(0), changed(name, scene(1))

    assert np.abs(cue.impose(plain, EVERYWHERE, cue.measure(plain, EVERYWHERE)) - plain).mean() < 0.01
    for picture, lender in ((plain, other), (other, plain)):
        before, wanted = cue.measure(picture, EVERYWHERE), cue.measure(lender, EVERYWHERE)
        imposed = cue.impose(picture, EVERYWHERE, wanted)
        after = cue.measure(imposed, EVERYWHERE)

        assert imposed.shape == picture.shape
        assert 0 <= imposed.min() <= imposed.max() <= 1
        assert np.abs(after - wanted).max() < 0.25 * np.abs(before - wanted).max()


def test_each_statistic_is_measured_beside_the_objects():
    picture, hole = scene(), np.zeros((SIDE, SIDE), bool)
    hole[16:48, 16:48] = True
    covered = picture.copy()
    covered[18:46, 18:46] = np.random.default_rng(0).random((28, 28, 3))
    where = beside(hole, EVERYWHERE)

    for name in MEASURED:
        measure = CUES[name].measure
        assert measure(covered, where) == pytest.approx(measure(picture, where), rel=0.1)
    assert beside(EVERYWHERE, EVERYWHERE).all()


def test_the_quality_of_a_jpeg_is_read_from_its_table_and_other_files_count_as_lossless(tmp_path):
    picture = Image.fromarray((scene() * 255).astype(np.uint8))
    for quality in (30, 50, 75, 90, 98):
        picture.save(tmp_path / "a.jpg", quality=quality)
        assert jpeg_quality(tmp_path / "a.jpg") == pytest.approx(quality, abs=1.5)
    picture.save(tmp_path / "a.png")
    (tmp_path / "b.jpg").write_text("no picture")

    assert jpeg_quality(tmp_path / "a.png") == jpeg_quality(tmp_path / "b.jpg") == LOSSLESS


def test_compression_changes_a_picture_as_a_file_of_that_quality_does():
    picture, file = scene(), io.BytesIO()
    Image.fromarray((picture * 255).round().astype(np.uint8)).save(file, "jpeg", quality=20)
    imposed = impose_compression(picture, EVERYWHERE, np.array([20.0]))

    assert np.abs(imposed - np.asarray(Image.open(file)) / 255).mean() < 0.01
    assert np.abs(imposed - picture).mean() > 0.01
    assert impose_compression(picture, EVERYWHERE, np.array([LOSSLESS])) is picture


class Sharp(nn.Module):
    """Names the class by the picture's sharpness alone, as four blurs have it."""

    def __init__(self, levels):
        super().__init__()
        self.body = nn.Conv2d(3, 1, 3, padding=1, bias=False)
        with torch.no_grad():
            self.body.weight[:] = torch.tensor([[1.0, -2, 1], [-2, 4, -2], [1, -2, 1]]) / 3
        self.levels = nn.Parameter(torch.tensor(levels))

    def forward(self, images):
        detail = self.body(images).abs().mean((1, 2, 3)).log()
        return -(detail[:, None] - self.levels).square()


CLASSES = ("bird", "car", "plane", "ship")


def blurred_by_class(folder):
    """Blur every picture of a folder as its class demands, objects included; return the logarithms of their detail."""
    levels = []
    for number, name in enumerate(CLASSES):
        details = []
        for file in sorted((folder / name).iterdir()):
            pixels = cv2.GaussianBlur(cv2.imread(str(file)), (0, 0), 0.3 + 0.9 * number)
            cv2.imwrite(str(file), pixels)
            image = torch.from_numpy(pixels[..., ::-1].copy()).permute(2, 0, 1)[None] / 255
            details.append(float(Sharp([0.0] * 4).body(image).detach().abs().mean().log()))
        levels.append(float(np.mean(details)))
    return levels


def as_tensor(picture):
    return torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32) / 255).permute(2, 0, 1)


CONFIG = {"check": {"pastes": 1}, "limits": {"least_pictures": 10}}


@pytest.mark.extended
def test_a_cue_that_covers_the_object_is_found_although_pasting_carries_it_along(tmp_path):
    data = camkit.scenes.write_scenes(tmp_path, 20)
    net = Sharp(blurred_by_class(data)).eval()

    result = camkit.check(net, data, preprocess=as_tensor, labels=CLASSES, config=CONFIG)

    sharpness = result.judged[OVERALL].effects["sharpness"]
    assert sharpness.mean.effect.value > 0.3
    assert result.verdict == "FAIL"
    assert any("reads the sharpness" in reason.kind for reason in result.judged[OVERALL].reasons)
    assert any("of the pictures with the sharpness of their own class" in reason for reason in result.reasons)


@pytest.mark.extended
def test_a_network_that_reads_its_objects_shows_no_such_cue(tmp_path):
    result = camkit.check("demo-fair", camkit.scenes.write_scenes(tmp_path, 20), config=CONFIG)

    measured = cues_of(result)
    assert set(measured) == {"sharpness", "noise", "colour"}  # all files are PNG, so none is compressed
    assert all(abs(effect.effect.value) < 0.06 for effect in measured.values())


@pytest.mark.extended
def test_compression_is_exchanged_if_the_files_differ_in_it(tmp_path):
    data = camkit.scenes.write_scenes(tmp_path, 6)
    for file in data.glob("car/*.jpg"):
        Image.open(file).copy().save(file, quality=30)

    result = camkit.check("demo-fair", data, config=CONFIG)

    assert set(cues_of(result)) == {"sharpness", "noise", "colour", "compression"}
