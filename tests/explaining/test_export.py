"""A file that returns scores and heat, against the model in PyTorch and the formula of Grad-CAM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import classifier
from PIL import Image
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import Compose, InterpolationMode, PILToTensor
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.cli import main
from camkit.errors import InputError, LayerError, MethodError, ModelError, RunError
from camkit.models import LoadedModel

pytest.importorskip("onnxscript")

import onnx
import onnxruntime

SCENE = camkit.scenes.scene_paths()["plane-sky"]
SIDE = 32
BOTH = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


def small(*last: nn.Module) -> nn.Module:
    """Return a classifier of 5 classes whose layer "2" has 16 x 16 cells."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
    return classifier(*first, nn.Conv2d(6, 8, 3, 1, 1, groups=2), nn.SiLU(), *last, classes=5).eval()


def pictures(count: int) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(count))


def returned(file: Path, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Run a file on its inputs, without camkit."""
    if file.suffix == ".pt2":
        scores, heat = torch.export.load(file).module()(*given)
        return scores.detach(), heat.detach()
    session = onnxruntime.InferenceSession(file)
    names = [each.name for each in session.get_inputs()]
    arrays = session.run(["scores", "heat"], dict(zip(names, map(Tensor.numpy, given), strict=True)))
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


def grad_cam(model: nn.Module, images: Tensor, layer: str, classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute scores and Grad-CAM by the formula: the sum of the maps, weighted by their mean gradients."""
    maps: list[Tensor] = []
    with model.get_submodule(layer).register_forward_hook(lambda _, __, output: maps.append(output)):
        scores = model(images)
    chosen = scores.argmax(1) if classes is None else classes
    (gradients,) = torch.autograd.grad(scores[range(len(images)), chosen].sum(), maps[0])
    return scores.detach(), (gradients.mean((2, 3), keepdim=True) * maps[0]).sum(1).detach()


@BOTH
@pytest.mark.parametrize("target", ["best", "input"])
def test_a_file_returns_scores_and_grad_cam_of_any_pictures(suffix: str, target: Any, tmp_path: Path) -> None:
    model, file = small(), tmp_path / f"heat{suffix}"
    facts = camkit.export(model, file, "2", img=pictures(1)[0], method="gradcam", target=target)
    assert (facts["method"], facts["layer"], json.loads(facts["grid"])) == ("gradcam", "2", [16, 16])
    for count in (1, 4):
        given = pictures(count), *([torch.arange(count)] if target == "input" else [])
        right = grad_cam(model, given[0], "2", given[1] if target == "input" else None)
        for found, expected in zip(returned(file, *given), right, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", ["gradcam++", "layercam", "hirescam", "auto", "gradcam-elementwise"])
def test_a_file_has_the_maps_of_other_methods(method: str, tmp_path: Path) -> None:
    model, image = small(), pictures(1)
    camkit.export(model, tmp_path / "heat.onnx", img=pictures(2)[1], method=method)
    right = camkit.explain(model, image[0], method=method)
    _, heat = returned(tmp_path / "heat.onnx", image)
    np.testing.assert_allclose(heat[0], right.raw, atol=1e-5 * np.abs(right.raw).max())


@pytest.mark.extended
def test_a_transformer_is_written_with_the_relevance_of_its_attention(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(SIDE, 8, 2, 4, 32, 64, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    facts = camkit.export(model, tmp_path / "heat.onnx", img=pictures(2)[1])
    right = camkit.explain(model, pictures(1)[0])
    assert facts["method"] == right.method == "chefer"
    _, heat = returned(tmp_path / "heat.onnx", pictures(1))
    np.testing.assert_allclose(heat[0], right.raw, atol=1e-5 * np.abs(right.raw).max())


@BOTH
def test_the_file_of_a_loaded_model_gives_the_same_explanation(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"heat{suffix}"
    camkit.export("demo-fair", file, target="input")
    model = camkit.load_model(str(file), trust_remote_code=True)
    assert "the file computes its heat itself (gradcam at features, written by camkit" in str(model.note)
    for target in (None, "ship"):
        right, found = camkit.explain("demo-fair", SCENE, target=target), camkit.explain(model, SCENE, target=target)
        assert isinstance(right, camkit.Explanation)
        assert isinstance(found, camkit.Explanation)
        assert (found.name, found.method) == (right.name, "from-file")
        assert found.box == pytest.approx(right.box, abs=0.5)  # one is read, the other is measured
        assert found.probability == pytest.approx(right.probability, abs=1e-6)
        np.testing.assert_allclose(found.heatmap, right.heatmap, atol=1e-5)


def test_a_file_that_normalises_takes_the_pixels(tmp_path: Path) -> None:
    model = LoadedModel(small(), "small", lambda picture: torch.tensor(np.array(picture)).movedim(2, 0) / 255 * 4 - 2)
    with pytest.warns(UserWarning, match="cannot say how to prepare pictures"):  # it does not resize them
        camkit.export(model, tmp_path / "heat.onnx", "2", img=np.zeros((SIDE, SIDE, 3), np.uint8), normalise=True)
    pixels = torch.randint(0, 256, (2, 3, SIDE, SIDE)).float()
    right = grad_cam(model.module, pixels / 255 * 4 - 2, "2", None)
    for found, expected in zip(returned(tmp_path / "heat.onnx", pixels), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_photo_is_prepared_as_the_model_prepares_it(interpolation: str, tmp_path: Path) -> None:
    options = {"crop_size": SIDE, "resize_size": 40, "interpolation": InterpolationMode(interpolation)}
    own = {"preprocess": ImageClassification(**options), "activation": "sigmoid"}
    model, photo = small(), Image.open(SCENE).resize((150, 99))
    facts = camkit.export(model, tmp_path / "heat.onnx", img=photo, **own)
    assert (facts["resize"], facts["interpolation"], facts["activation"]) == ("[40]", interpolation, "sigmoid")
    right, found = camkit.explain(model, photo, **own), camkit.explain(str(tmp_path / "heat.onnx"), photo)
    assert (found.target, found.box) == (right.target, right.box)
    assert found.probability == pytest.approx(right.probability, abs=1e-6)
    np.testing.assert_allclose(found.heatmap, right.heatmap, atol=1e-4)


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.Sigmoid(), nn.LogSoftmax(1)])
def test_scores_that_are_probabilities_are_read_as_such(end: nn.Module, tmp_path: Path) -> None:
    model, image = nn.Sequential(*small(), end), pictures(1)[0]
    camkit.export(model, tmp_path / "heat.onnx", img=image)
    right, found = camkit.explain(model, image), camkit.explain(str(tmp_path / "heat.onnx"), image)
    assert found.probability == pytest.approx(right.probability, abs=1e-6)


def test_colours_in_another_order_are_not_taken_for_rgb(tmp_path: Path) -> None:
    bgr = Compose([PILToTensor(), lambda pixels: pixels[[2, 1, 0]].float() / 255])
    with pytest.warns(UserWarning, match="cannot say how to prepare pictures"):
        facts = camkit.export(
            small(), tmp_path / "heat.onnx", img=Image.open(SCENE).resize((SIDE, SIDE)), preprocess=bgr
        )
    assert not {"mean", "std", "resize"} & facts.keys()


@pytest.mark.parametrize(("key", "value"), [("places", "[[1, 2], [1, 2]]"), ("places", "[[2, 1]]"), ("places", "no")])
def test_a_damaged_file_is_one_sentence(key: str, value: str, tmp_path: Path) -> None:
    camkit.export("demo-fair", tmp_path / "heat.onnx")
    graph = onnx.load(tmp_path / "heat.onnx")
    next(each for each in graph.metadata_props if each.key == key).value = value
    onnx.save(graph, tmp_path / "heat.onnx")
    with refused("its cells", (ModelError, RunError)):
        camkit.explain(str(tmp_path / "heat.onnx"), SCENE)


@pytest.mark.extended
def test_a_check_of_the_file_is_that_of_its_model(tmp_path: Path) -> None:
    config = {"check": {"per_class": 4, "pastes": 1}}
    results = []
    camkit.export("demo-biased", tmp_path / "any.onnx", target="input")
    camkit.export("demo-biased", tmp_path / "best.onnx")
    for model in ("demo-biased", tmp_path / "any.onnx", tmp_path / "best.onnx"):
        results.append(camkit.check(str(model), camkit.scenes.labelled_scenes(), config=config))
    own, found, best = (result.to_dict() for result in results)
    assert own["verdict"] == found["verdict"]
    energies = [[row["energy"] for row in each["images"]] for each in (own, found)]
    np.testing.assert_allclose(*energies, atol=1e-3)
    assert all(row["energy"] is None for row in best["images"])


class Decides(nn.Module):
    """Changes maps by a function."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, maps: Tensor) -> Tensor:
        return self.how(maps)


def test_a_model_that_makes_a_constant_of_the_number_of_pictures_gets_a_file_for_one(tmp_path: Path) -> None:
    file, model = tmp_path / "heat.onnx", small(Decides(lambda maps: maps.reshape(len(maps), -1).reshape(maps.shape)))
    facts = camkit.export(model, file, "2", img=pictures(1)[0], target="input", labels=list("abcde"))
    assert facts["batch"] == "1"
    images = pictures(3)
    loaded = camkit.load_model(str(file))
    for image, each in zip(images, camkit.Explainer(loaded).batch(images, 1), strict=True):
        _, right = grad_cam(model, image[None], "2", torch.tensor([1]))
        np.testing.assert_allclose(each.raw, right[0], atol=1e-5)


def operations(maps: Tensor) -> Tensor:
    """Use what is no operation of a file, or has a backward pass that is none: all that networks of the zoo needed."""
    maps = functional.avg_pool2d(functional.pad(maps, (0, 1, 0, 1)), 3, 2, 1, count_include_pad=False)
    tokens = maps.flatten(2).mT
    attended = functional.scaled_dot_product_attention(tokens, tokens, tokens).mT.reshape(maps.shape)
    mask = torch.zeros(maps.shape[2:])
    mask[1:] = 1
    return functional.adaptive_avg_pool2d((attended * mask).contiguous(memory_format=torch.channels_last), 1)


@BOTH
def test_operations_that_no_file_has_are_written_as_others(suffix: str, tmp_path: Path) -> None:
    file, model = tmp_path / f"heat{suffix}", small(nn.Conv2d(8, 8, 3, 1, 2, 2, groups=8), Decides(operations))
    facts = camkit.export(model, file, "2", img=pictures(1)[0], method="gradcam")
    assert facts["batch"] == "any"
    for found, expected in zip(returned(file, pictures(5)), grad_cam(model, pictures(5), "2", None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


calls: list[None] = []


def growing(maps: Tensor) -> Tensor:
    calls.append(None)
    return maps * (1 + len(calls) / 100)


class Growing(torch.autograd.Function):
    """Returns other gradients each time."""

    @staticmethod
    def forward(_: Any, maps: Tensor) -> Tensor:
        return maps.clone()

    @staticmethod
    def backward(_: Any, gradients: Tensor) -> Tensor:
        return growing(gradients)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Growing.apply, "the exported heat differs from camkit's by 0.0"),
        (lambda maps: maps * 2 if maps.mean() > 0 else maps, "branches on the values of a picture"),
        (lambda maps: maps * torch.linalg.svdvals(maps).amax((1, 2))[:, None, None, None], "operator aten._linalg_svd"),
        (growing, "heat.onnx: the exported scores differ from camkit's by 0.0"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence_and_no_file(
    how: Callable[[Tensor], Tensor], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "heat.onnx"
    with refused(said, ModelError):
        camkit.export(small(Decides(how)), file, "2", img=pictures(1)[0])
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"path": "heat.engine"}, InputError, "export writes .onnx and .pt2 files, not 'heat.engine'"),
        ({"target": 3}, InputError, "target must be 'best' or 'input', not 3"),
        ({"model": small().half(), "img": pictures(1)[0].half()}, InputError, "in float32, not of torch.float16"),
        ({"method": "scorecam"}, MethodError, "method 'scorecam' runs the model many times, but"),
        ({"smooth": "augment"}, InputError, "leave out smooth and precision"),
        ({"normalise": True}, InputError, "normalise needs the model's mean and standard deviation"),
        ({"target_layer": ["2", "4"]}, InputError, "name only one layer"),
        ({"model": camkit.black_box(lambda images: images.mean((2, 3)))}, LayerError, "neither layers nor gradients"),
    ],
)
def test_a_wrong_call_is_one_sentence(options: dict[str, Any], kind: type[InputError], said: str) -> None:
    with refused(said, kind):
        camkit.export(**{"model": small(), "path": "heat.onnx", "img": pictures(1)[0], **options})


def test_a_file_of_best_classes_explains_no_others_and_the_method_is_for_such_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "heat.onnx")
    assert main(["export", str(SCENE), "--model", "demo-fair", "--out", file]) == 0
    assert "its heat agrees with camkit's own on 6 of 6 versions of " in capsys.readouterr().err
    assert main(["export", "--model", "demo-fair", "--out", file]) == 2
    with refused("the file returns the heat of each picture's best class only", MethodError):
        camkit.explain(file, SCENE, target="ship")
    with refused("works only on files that camkit export wrote", MethodError):
        camkit.explain("demo-fair", SCENE, method="from-file")
    assert camkit.explain(file, SCENE, method="occlusion", target="ship").label == "ship"
