"""Deep feature factorisation: the concepts that a layer's feature maps are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from heads import Skip, Unsteady
from networks import Net, classifier, means
from PIL import Image
from scipy.optimize import linear_sum_assignment
from tasks import Detecting, Segmenting, beside
from tiers import Extra
from torch import Tensor, nn
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import ImageError, InputError, LayerError, OutputError
from camkit.inspect.feature_maps import colours_of
from scripts.weights import OF_TORCHVISION

FACTORISATION = "pytorch_grad_cam.feature_factorization.deep_feature_factorization"


def one_channel_each(gain: float = 9.0) -> Net:
    """Return a network whose class k is the mean of channel k of a layer, which returns the picture's own channels."""
    net = Net(lambda net, x: net.head(means(net.layer(x))), layer=nn.Conv2d(3, 3, 1, bias=False), head=nn.Linear(3, 3))
    with torch.no_grad():
        net.layer.weight.copy_(torch.eye(3)[:, :, None, None])
        net.head.weight.copy_(gain * torch.eye(3))
        net.head.bias.zero_()
    return net


def two_blobs() -> tuple[Tensor, np.ndarray]:
    """Return a picture of two disjoint blobs, one in channel 0 and a weaker one in channel 2, and the two blobs."""
    rows, columns = np.mgrid[0:16, 0:24]
    blobs = np.stack([np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 4) for row, column in ((4, 5), (11, 18))])
    blobs[blobs < 0.05] = 0
    picture = torch.zeros(1, 3, 16, 24)
    picture[0, 0], picture[0, 2] = (torch.from_numpy(blob) for blob in (3 * blobs[0], blobs[1]))
    return picture, blobs


def test_two_planted_blobs_are_the_two_concepts() -> None:
    picture, blobs = two_blobs()
    model = one_channel_each()
    with unchanged(model):
        found = camkit.factorise(model, picture, 2, "layer", labels=["red", "green", "blue"])
    np.testing.assert_allclose(found.maps[0], blobs, atol=1e-3)
    np.testing.assert_allclose(found.vectors, [[3, 0, 0], [0, 0, 1]], atol=1e-2)
    assert found.unexplained == pytest.approx(0, abs=1e-4)
    assert found.classes == (0, 2)
    assert found.labels == ("red", "blue")
    expected = [torch.tensor([27.0, 0, 0]).softmax(0)[0], torch.tensor([0, 0, 9.0]).softmax(0)[2]]
    assert found.probabilities == pytest.approx([float(value) for value in expected], abs=1e-3)
    assert found.names == ("1: red 100%", "2: blue >99.9%")


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.LogSigmoid()])
def test_a_model_that_ends_in_a_sigmoid_gives_its_own_probabilities(last: nn.Module) -> None:
    found = camkit.factorise(nn.Sequential(one_channel_each(0.9), last), two_blobs()[0], 2, "0.layer")
    expected = torch.tensor([2.7, 0.9]).sigmoid()
    assert found.probabilities == pytest.approx(expected.tolist(), abs=1e-3)


def test_pictures_share_their_concepts() -> None:
    picture, blobs = two_blobs()
    pictures = [picture[0], picture[0].flip(2), picture[0, :, :, :16]]  # the last has another size
    found = camkit.factorise(one_channel_each(), pictures, 2, "layer")
    for maps, expected in zip(found.maps, (blobs, blobs[..., ::-1], blobs[..., :16]), strict=True):
        np.testing.assert_allclose(maps, expected, atol=1e-3)
    as_batch = camkit.factorise(one_channel_each(), torch.cat([picture, picture.flip(3)]), 2, "layer")
    np.testing.assert_allclose(as_batch.maps[1], blobs[..., ::-1], atol=1e-3)


def test_negative_feature_maps_count_as_zero_and_any_scale_will_do() -> None:
    picture, blobs = two_blobs()
    found = camkit.factorise(one_channel_each(), picture - 5 * (picture == 0).float(), 2, "layer")
    np.testing.assert_allclose(found.maps[0], blobs, atol=1e-3)
    noisy = picture + 0.1 * torch.rand(picture.shape)
    usual, tiny, again = (camkit.factorise(one_channel_each(), noisy * by, 2, "layer") for by in (1, 1e-30, 1e-30))
    np.testing.assert_allclose(tiny.maps[0], usual.maps[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(tiny.vectors * 1e30, usual.vectors, rtol=1e-3, atol=1e-3)
    assert np.array_equal(tiny.maps[0], again.maps[0])
    nothing = camkit.factorise(one_channel_each(), 0 * picture, 2, "layer")
    assert not nothing.maps[0].any()
    assert nothing.unexplained == 0


def test_a_skip_connection_has_classes_and_a_head_that_cannot_be_run_alone_numbers() -> None:
    torch.manual_seed(0)
    assert camkit.factorise(Skip().eval(), torch.randn(1, 3, 16, 16), 2, "layer").classes is not None
    scene, _ = beside(("plane", "sea", 1))
    for model, image, layer in (
        (Segmenting(), scene, "features"),
        (Detecting(), scene, "maps.features"),
        (Unsteady(), torch.randn(1, 3, 16, 16), "2"),
    ):
        found = camkit.factorise(model.eval(), image, 2, layer)
        assert (found.classes, found.probabilities, found.labels) == (None, None, None)
        assert found.names == ("concept 1", "concept 2")


def test_volumes_have_maps_and_no_drawing() -> None:
    torch.manual_seed(0)
    model = classifier(nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), classes=2)
    found = camkit.factorise(model, torch.randn(1, 1, 8, 8, 8), 2, "1")
    assert found.maps[0].shape == (2, 4, 4, 4)
    assert found.heatmaps().shape == (2, 8, 8, 8)
    assert found._repr_html_() is None
    with pytest.raises(InputError, match=r"only maps with two axes can be drawn, and these have 3; see \.maps"):
        found.overlay()


def test_each_pixel_has_the_colour_of_its_strongest_concept() -> None:
    picture, blobs = two_blobs()
    found = camkit.factorise(one_channel_each(), picture, 2, "layer")
    plain, drawn = (found.overlay(alpha=alpha).astype(int) for alpha in (0.0, 1.0))
    scale = drawn.shape[0] / 16
    for blob, colour in zip(blobs, colours_of(2), strict=True):
        row, column = np.unravel_index(blob.argmax(), blob.shape)
        beside_mark = int((row + 0.5) * scale), int((column + 0.5) * scale) + 13  # the number covers the middle
        grey = np.abs(plain[beside_mark] - colour).max()
        assert np.abs(drawn[beside_mark] - colour).max() < 0.5 * grey
    nowhere = int(1.5 * scale), int(20 * scale)
    assert np.array_equal(drawn[nowhere], plain[nowhere])
    assert [len(set(colours_of(count))) for count in (1, 7, 8, 20)] == [1, 7, 8, 20]


def test_it_is_saved_and_shown(tmp_path: Path) -> None:
    planes = camkit.factorise("demo-fair", [camkit.scenes.scene_paths()["plane-sky"]] * 2, concepts=3)
    file = planes.save(tmp_path / "new" / "concepts.png")
    with Image.open(file) as drawn:
        assert drawn.size[0] > 2 * planes.overlay().shape[1]
        assert drawn.size[::-1] == planes.sheet().shape[:2]
    assert "<img" in str(planes._repr_html_())
    assert repr(planes).startswith("<Concepts of layer 'features' of demo-fair: 3 concepts in 2 pictures (1: plane ")
    assert "\n" not in repr(planes)
    with pytest.raises(OutputError):
        planes.save(tmp_path / "concepts.xyz")


def test_the_shell_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = str(camkit.scenes.scene_paths()["plane-sky"])
    call = ["concepts", photo, "--model", "demo-fair", "--count", "3", "--out", str(tmp_path)]
    assert main(call) == 0
    printed = capsys.readouterr().out
    assert "layer features" in printed
    assert "1: plane" in printed
    (file,) = tmp_path.iterdir()
    assert file.name == "plane-sky.3-concepts.features.png"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"concepts": 4}, InputError, "4 concepts are too many: layer 'layer' has 3 channels, and 384 cells"),
        ({"images": []}, InputError, "the batch is empty; pass at least one picture"),
        ({"images": "nowhere.png"}, ImageError, "nowhere.png"),
        ({"target_layer": "lay"}, LayerError, "did you mean 'layer'"),
        ({"labels": ["a", "b", "c", "d"]}, InputError, "4 labels were given, but the model has 3 classes"),
    ],
)
def test_bad_input_is_one_sentence(options: dict, kind: type[Exception], words: str) -> None:
    given = {"images": two_blobs()[0], "concepts": 2, "target_layer": "layer", **options}
    with pytest.raises(kind, match=words) as caught:
        camkit.factorise(one_channel_each(), given.pop("images"), **given, preprocess=lambda _: two_blobs()[0][0])
    assert "\n" not in str(caught.value)


def test_several_layers_and_a_wrong_weight_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(LayerError, match="feature maps are those of one layer, but these are several: layer, stem"):
        camkit.factorise(Skip().eval(), torch.randn(1, 3, 16, 16), 2, "[sl][ta]*e[mr]")
    model = one_channel_each()
    with torch.no_grad():
        model.layer.weight[0, 0] = torch.inf
    with pytest.raises(LayerError, match="the feature maps of layer 'layer' hold NaN or infinite values"):
        camkit.factorise(model, two_blobs()[0] + 1, 2, "layer")
    found = camkit.factorise(one_channel_each(), two_blobs()[0], 2, "layer")
    with pytest.raises(InputError, match="alpha must be a weight between 0 and 1, not 2"):
        found.overlay(alpha=2.0)


@pytest.mark.extended
@pytest.mark.parametrize("name", OF_TORCHVISION)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_concepts_agree_with_grad_cams(test_data: Path, name: str, count: int) -> None:
    """Both factorise the same ReLU's maps, whose least value is 0, so that grad-cam's offset changes nothing."""
    model, images = Extra("scripts.bench.peer_agreement").load(test_data, name)
    with torch.no_grad():
        maps = model.module.features(images[:1])
    assert float(maps.amin(3).amin(2).amax()) == 0 or count < 5
    found = camkit.factorise(model.module, images[:1], count, "features")
    concepts, explanations = Extra(FACTORISATION).dff(maps.numpy().copy(), count)

    theirs = explanations[0].reshape(count, -1)
    correlations = np.corrcoef(found.maps[0].reshape(count, -1), theirs)[:count, count:]
    assert correlations[linear_sum_assignment(-correlations)].min() > 0.98
    cells = maps[0].flatten(1).numpy()
    left_out = np.square(cells - concepts @ theirs).sum() / np.square(cells).sum()
    assert found.unexplained < 1.005 * left_out
