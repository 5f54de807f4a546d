"""Wrong returns of the user's own methods, metrics and targets end in one sentence; their own errors pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from folders import run_folder
from torch import nn

import camkit
from camkit import metrics
from camkit.errors import InputError, MethodError, TargetError
from camkit.methods import METHODS
from camkit.models import load_model
from camkit.targets import Scores, Target

PICTURE = camkit.scenes.scene_paths()["plane-sky"]
NEEDS = ("gradients", "curvature", "head", "activations", "scores", "pictures", "guided")
ATTENTION = ("attention", "attention-gradients", "attention-by-layer")


class MineError(Exception):
    pass


def fails(*_: Any) -> Any:
    raise MineError


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    METHODS.pop("own", None)
    metrics.METRICS.pop("own", None)


def explained(needs: Any, returned: Any) -> Any:
    if needs in ATTENTION:
        camkit.register_method("own", needs=needs, layer=False, replace=True)(
            lambda maps, *_: returned(maps[0].mean((1, 2)))
        )
        model = torchvision.models.VisionTransformer(32, 8, 1, 2, hidden_dim=16, mlp_dim=16, num_classes=3).eval()
        return camkit.explain(model, torch.ones(1, 3, 32, 32), method="own")
    camkit.register_method("own", needs=needs, replace=True)(lambda activations, *_: returned(activations))
    return camkit.explain("demo-fair", PICTURE, method="own")


@pytest.mark.parametrize("needs", NEEDS + ATTENTION)
def test_what_is_not_a_tensor_of_weights_is_named(needs: str) -> None:
    for returned, said in [
        (lambda _: None, "method 'own' must return a dense floating-point tensor of weights, not a NoneType"),
        (lambda _: np.ones(3), "not a ndarray"),
        (lambda activations: activations.to_sparse(), "must return a dense floating-point tensor of weights"),
        (lambda activations: activations.mean(), r"not a tensor of shape \(\)"),
        (lambda activations: activations.long(), r"'own' must return .*, not a tensor of shape .* of torch.int64"),
    ]:
        with pytest.raises(MethodError, match=said):
            explained(needs, returned)
    with pytest.raises(MineError):
        explained(needs, fails)


@pytest.mark.parametrize("needs", NEEDS[:-1] + ATTENTION)
def test_weights_with_a_gradient_are_taken_as_values(needs: str) -> None:
    assert np.isfinite(explained(needs, lambda activations: activations.clone().requires_grad_()).raw).all()


TINY = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
SCENES = list(camkit.scenes.scene_paths().values())

DOORS: dict[str, Callable[[Path], Any]] = {
    "stream": lambda _: list(camkit.Explainer("demo-fair", method="own").stream(SCENES, batch_size=4)),
    "folder": lambda out: list(run_folder(load_model("demo-fair"), SCENES, out, method="own")),
    "compare": lambda _: camkit.compare("demo-fair", PICTURE, ["own"]),
    "judge": lambda _: camkit.judge(TINY, SCENES, ["own"], preprocess=lambda _: torch.rand(3, 16, 16)),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_the_method(door: str, tmp_path: Path) -> None:
    camkit.register_method("own", replace=True)(lambda activations, _: activations[:, 1:])
    with pytest.raises(MethodError, match="method 'own' returned weights of shape"):
        DOORS[door](tmp_path)
    camkit.register_method("own", replace=True)(fails)
    with pytest.raises(MineError):
        DOORS[door](tmp_path)


@pytest.mark.parametrize(
    "returned", [None, "x", 1j, 10**400, np.ones(3), torch.ones(3), torch.ones((), device="meta")], ids=repr
)
def test_what_is_not_a_number_is_named(returned: Any) -> None:
    metrics.register_metric("own")(lambda *_: returned)
    with pytest.raises(InputError, match="metric 'own' must return a number, not a "):
        metrics.Evaluator("demo-fair", PICTURE)(np.eye(8), "own")
    metrics.register_metric("own", replace=True)(fails)
    with pytest.raises(MineError):
        metrics.Evaluator("demo-fair", PICTURE)(np.eye(8), "own")


@pytest.mark.parametrize(
    "returned", [3, True, np.float32(2), torch.ones(1), torch.ones((), requires_grad=True)], ids=repr
)
def test_numbers_of_other_types_are_taken(returned: Any) -> None:
    metrics.register_metric("own")(lambda *_: returned)
    assert metrics.Evaluator("demo-fair", PICTURE)(np.eye(8), "own")["own"].number in (1.0, 2.0, 3.0)


class Own(Target):
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, output: Any, batch: int) -> Scores:
        returned: Scores = self.returned(output[:, 0])
        return returned


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "scorecam"])
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda _: None, "a NoneType"),
        (lambda scores: scores.long(), r"a tensor of shape \(1,\) of torch.int64"),
        (lambda scores: scores.to("meta"), "a tensor"),
        (lambda scores: scores.detach().to_sparse(), "a tensor"),
    ],
)
def test_what_is_not_a_score_for_each_image_is_named(returned: Any, said: str, method: str) -> None:
    expected = rf"the target function returned {said}.*; it must return a floating-point tensor of shape \(1,\)"
    with pytest.raises(TargetError, match=expected):
        camkit.explain("demo-fair", PICTURE, target=lambda output: returned(output[:, 0]), method=method)
    with pytest.raises(TargetError, match=r"the target Own returned .*; it must return camkit.targets.Scores"):
        camkit.explain("demo-fair", PICTURE, target=Own(returned), method=method)
    with pytest.raises(TargetError, match="the target Own returned a tensor"):
        camkit.explain("demo-fair", PICTURE, target=Own(lambda scores: Scores(scores.to("meta"))), method=method)


@pytest.mark.parametrize("name", ["gradcam", "auto", "own"])
def test_a_function_may_not_have_the_name_of_another_method(name: str) -> None:
    """An explanation keeps the name of its method, so metrics would make its map again by the other method."""
    camkit.register_method("own")(lambda activations, gradients: gradients)

    def method(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        return -gradients

    method.__name__ = name
    with pytest.raises(MethodError, match=f"camkit already has another method '{name}'; rename your function"):
        camkit.explain("demo-fair", PICTURE, method=method)


def test_a_wrong_call_inside_the_users_function_passes_through() -> None:
    def method(activations: torch.Tensor, gradients: torch.Tensor) -> Any:
        return fails(activations, other=gradients)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        camkit.explain("demo-fair", PICTURE, method=method)
