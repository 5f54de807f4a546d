"""Every method against its slow reference, and the properties its formula promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_oracles import ORACLES as ATTENTION_ORACLES
from checked import unchecked, violations
from jaxtyping import TypeCheckError
from networks import SmallNet, small_picture
from oracles import (
    ALL_ORACLES,
    ORACLES,
    as_float64,
    gradcam_plus_plus,
    gradcam_plus_plus_by_derivatives,
    gradient_by_differences,
    heatmap_oracle,
)
from oracles_pictures import OF_PICTURES
from torch import Tensor, nn

import camkit
from camkit.cli import main
from camkit.engine.heatmap import fuse_heatmaps, weighted_sum
from camkit.errors import MethodError
from camkit.methods import METHODS, WEIGHTED, find_method
from camkit.methods.runs import check_weights

NAMES = tuple(ORACLES)
GRADIENT_NAMES = tuple(name for name in NAMES if name != "cam")
SIZE = (17, 23)


def random_pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return activations with both signs and gradients (N, C, *grid)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make_cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Return activations and gradients for every kind of input a network can produce."""
    cases: dict[str, tuple[Tensor, Tensor]] = {}

    def add(name: str, shape: tuple[int, ...], seed: int, relu: bool = True) -> tuple[Tensor, Tensor]:
        activations, gradients = random_pair(shape, seed)
        cases[name] = (activations.relu() if relu else activations, gradients)
        return cases[name]

    add("after a ReLU", (3, 6, 5, 5), 1)
    # The seeds of signed cases keep clear of XGrad-CAM's pole, sum(A) = 0, where float32 loses digits.
    add("signed", (3, 6, 5, 5), 332, relu=False)
    activations, _ = add("channels that are zero", (3, 6, 4, 4), 3)
    activations[0, 0] = activations[1, 2:5] = activations[2] = 0
    _, gradients = add("gradients that are zero", (3, 6, 4, 4), 4)
    gradients[0] = gradients[1, 3] = gradients[2, :, 1:3] = 0
    _, gradients = add("no positive gradient", (2, 5, 4, 4), 5)
    gradients.abs_().neg_()
    add("one cell", (2, 6, 1, 1), 6)
    add("one cell, signed", (2, 6, 1, 1), 386, relu=False)
    add("wide grid", (2, 5, 2, 7), 8)
    add("one channel of a tall grid", (2, 1, 7, 3), 10)
    add("sequence", (2, 5, 9), 11)
    add("volume", (2, 5, 3, 2, 4), 12)
    add("volume, signed", (2, 5, 2, 4, 3), 359, relu=False)
    activations, _ = add("channels of very different size", (2, 6, 5, 5), 14)
    activations *= torch.logspace(-4, 4, 6)[:, None, None]
    activations, gradients = add("small integers", (2, 8, 3, 3), 15)
    activations.copy_(activations.mul(1.5).round())
    gradients.copy_(gradients.round())
    # 2 + g * sum(A) is exactly 0 in the first channel, under a gradient that the ReLU of the weights removes.
    activations[:, 0] = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    gradients[:, 0] = -1.0
    gradients[:, 0, 1, 2] = 1.0
    pair = add("channels_last memory", (2, 6, 4, 3), 16)
    cases["channels_last memory"] = tuple(tensor.to(memory_format=torch.channels_last) for tensor in pair)
    return cases


CASES = make_cases()


def second_argument(name: str, gradients: Tensor) -> Tensor:
    """Return what the method weighs by: the gradients, or for CAM one class weight per channel."""
    return gradients.flatten(2)[:, :, 0].contiguous() if name == "cam" else gradients


def signed_map(name: str, activations: Tensor, second: Tensor) -> Tensor:
    return weighted_sum(METHODS[name].weights(activations, second), activations)


def oracle_maps(name: str, activations: Tensor, second: Tensor) -> np.ndarray:
    return np.stack([ORACLES[name](a, s) for a, s in zip(activations, second, strict=True)])


def assert_close_to(found: Tensor | np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Assert that maps (N, ...) differ from the expected ones by at most a share of each map's largest value."""
    found = as_float64(found)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        off = np.abs(ours - theirs).max()
        allowed = tolerance * np.abs(theirs).max()
        assert off <= allowed, f"map {index} is off by {off:.3g}, allowed are {allowed:.3g}"


def test_every_method_has_an_oracle_and_says_what_it_is_and_what_its_values_are() -> None:
    missing = set(METHODS) - {*ALL_ORACLES, *OF_PICTURES, *ATTENTION_ORACLES}
    assert not missing, "write the slow reference into tests/helpers/oracles.py and list it there"
    for name, method in METHODS.items():
        assert method.name == name and method.title and method.summary and method.paper, name
        assert method.unit != WEIGHTED, f"{name}: register_method needs unit=..., what the values of the raw map are"


@pytest.mark.usefixtures("checks_types")
@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_shapes_are_checked_although_the_methods_do_not_import_torch(name: str) -> None:
    with pytest.raises(TypeCheckError):
        METHODS[name].weights(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4))
    violations.clear()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_method_equals_its_formula(name: str, case: str) -> None:
    activations, gradients = CASES[case]
    second = second_argument(name, gradients)
    found = signed_map(name, activations, second)
    assert found.dtype == torch.float32
    assert_close_to(found, oracle_maps(name, activations, second))


@pytest.mark.parametrize("case", ["signed", "channels that are zero", "volume"])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_equals_its_images_one_by_one_and_inputs_are_not_written_to(name: str, case: str) -> None:
    activations, gradients = CASES[case]
    second = second_argument(name, gradients)
    kept = activations.clone(), second.clone()
    together = signed_map(name, activations, second)
    assert torch.equal(activations, kept[0])
    assert torch.equal(second, kept[1])
    alone = torch.cat([signed_map(name, activations[i : i + 1], second[i : i + 1]) for i in range(len(activations))])
    assert_close_to(together, as_float64(alone), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_features_lose_nothing_more(name: str, dtype: torch.dtype) -> None:
    # The channel sums, about 80,000, overflow fp16, and the squared gradients, about 1e-8, underflow it.
    activations, gradients = random_pair((2, 4, 14, 14), seed=20)
    activations, gradients = (activations.relu() * 1000).to(dtype), (gradients * 1e-4).to(dtype)
    second = second_argument(name, gradients)
    found = signed_map(name, activations, second)
    assert found.dtype == torch.float32
    assert_close_to(found, oracle_maps(name, activations, second))


@pytest.mark.parametrize("name", ["xgradcam", "gradcam++"])
def test_a_channel_without_a_defined_weight_keeps_the_map_finite(name: str) -> None:
    # The first channel sums to 0, where XGrad-CAM has no value. Under the gradient 1 the second makes 2 + g * sum(A)
    # zero, where Grad-CAM++ would have none if it summed negative values.
    activations = torch.tensor([[[[1.0, -1.0]], [[-3.0, 1.0]], [[1.0, 2.0]]]])
    gradients = torch.tensor([[[[1.0, 2.0]], [[1.0, 0.5]], [[3.0, 1.0]]]])
    assert torch.isfinite(signed_map(name, activations, gradients)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_channel_that_sums_to_rounding_does_not_drown_the_others(dtype: torch.dtype) -> None:
    # Instance normalisation makes every channel sum to 0 and the precision of the pass leaves a remainder; XGrad-CAM
    # would divide by that.
    activations, gradients = random_pair((1, 4, 14, 14), seed=21)
    centred = activations[:, :3] - activations[:, :3].mean((2, 3), keepdim=True)
    activations = torch.cat([centred, activations[:, 3:].relu()], 1).to(dtype)
    found = signed_map("xgradcam", activations, gradients)
    assert_close_to(found, oracle_maps("xgradcam", activations[:, 3:], gradients[:, 3:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_hirescam_of_cells_that_only_a_layer_norm_reads_is_zero(dtype: torch.dtype, seed: int) -> None:
    # A layer norm makes all cells of equal direction equal, so the gradient is orthogonal to each cell.
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randn(2, 25, 48, generator=generator)
    cells = (cells - cells.mean(-1, keepdim=True)).to(dtype).requires_grad_()
    reader = torch.randn(25, 48, generator=generator).to(dtype)
    (nn.functional.layer_norm(cells, (48,), eps=1e-6) * reader).tanh().sum().backward()
    maps, gradients = (given.detach().mT.reshape(2, 48, 5, 5) for given in (cells, cells.grad))
    assert not signed_map("hirescam", maps, gradients).any()
    other = maps.clone()
    other[1, :, 2, 3] = gradients[1, :, 2, 3]  # this picture has a cell with evidence
    found = signed_map("hirescam", other, gradients)
    assert not found[0].any()
    assert found[1].argmax() == 2 * 5 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "axes"), [("kpcacam", (1,)), ("eigencam", (2, 3))])
def test_a_component_of_normalised_maps_is_positive_where_few_cells_stand_out(
    name: str, axes: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    # A layer norm makes each cell's sum 0, and an instance norm each channel's, so the sums do not show the sign.
    generator, inside = torch.Generator().manual_seed(seed), torch.zeros(8, 8, dtype=torch.bool)
    inside[2:5, 3:6] = True
    noise, direction = (torch.randn(1, 24, *size, generator=generator).to(dtype) for size in ((8, 8), (1, 1)))
    maps = noise + 3 * direction * inside
    maps = (maps - maps.mean(axes, keepdim=True)) / maps.std(axes, keepdim=True)
    found = weighted_sum(METHODS[name].weights(maps), maps)[0]
    assert found[inside].mean() > 0 > found[~inside].mean()


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e-3, 1e3, 1e6, 1e20])
@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_float32_equals_the_formula_for_logits_of_any_size(name: str, scale: float) -> None:
    activations, gradients = CASES["after a ReLU"]
    gradients = gradients * scale
    raw = signed_map(name, activations, gradients)
    expected = oracle_maps(name, activations, gradients)
    assert_close_to(raw, expected)
    pictures = np.stack([heatmap_oracle(one, SIZE) for one in expected])
    assert_close_to(fuse_heatmaps([raw], size=SIZE), pictures, 1e-4)


@pytest.mark.parametrize(
    ("grid", "size"),
    [((7, 7), (56, 56)), ((3, 5), (17, 23)), ((1, 1), (6, 4)), ((1, 4), (9, 9)), ((6, 6), (6, 6)), ((8, 9), (5, 4))],
)
def test_heatmap_equals_its_formula(grid: tuple[int, int], size: tuple[int, int]) -> None:
    raw = torch.randn(3, *grid, generator=torch.Generator().manual_seed(30))
    raw[0, 0, 0] = 1.0
    found = fuse_heatmaps([raw], size=size)
    assert found.dtype == torch.float32
    assert_close_to(found, np.stack([heatmap_oracle(one, size) for one in raw]))


def test_each_map_is_scaled_by_itself_and_one_without_positive_evidence_is_zero() -> None:
    raw = torch.rand(3, 3, generator=torch.Generator().manual_seed(31))
    found = fuse_heatmaps([torch.stack([-raw, raw * 0, raw * 1e-30, raw])], size=(6, 6))
    assert not found[:2].any()
    assert torch.allclose(found[2], found[3], rtol=0, atol=1e-6)


def explained(model: nn.Module, x: Tensor, layer: str, method: str = "gradcam", target: int = 0) -> np.ndarray:
    """Return the signed map (h, w) that camkit's public door gives."""
    return as_float64(camkit.explain(model, x, target_layer=layer, method=method, target=target).raw)


@pytest.mark.parametrize(
    ("layer", "added", "expected"),
    [
        ("0", 0.0, [[11.25, 13.5], [20.25, 22.5]]),
        ("1", 0.0, [[0.0, 4.0], [28.0, 32.5]]),
        ("0", 1.0, [[14.5, 19.0], [32.5, 37.0]]),
    ],
)
def test_gradcam_has_the_published_values(layer: str, added: float, expected: list[list[float]]) -> None:
    """Captum publishes them for its network BasicModel_ConvNet_One_Conv (tests/attr/layer/test_grad_cam.py)."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.ReLU())
    weights = {"0.weight": torch.ones(2, 1, 3, 3), "0.bias": torch.tensor([-50.0, -75.0]), "3.bias": torch.zeros(4)}
    model.load_state_dict(weights | {"3.weight": torch.tensor([1.0] * 5 + [-1.0] * 3).expand(4, 8)})
    found = explained(model, torch.arange(16.0).view(1, 1, 4, 4) + added, layer)
    assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_explanation_equals_the_oracle_on_finite_differences(name: str) -> None:
    model, x = SmallNet(), small_picture()
    exact = deepcopy(model).double()
    features = exact.trunk(x.double())[0].detach()
    gradients = gradient_by_differences(lambda a: exact.head(a[None])[0, 2], features, step=1e-6)
    expected = ORACLES[name](features, gradients)
    assert expected.max() > 0
    assert_close_to(explained(model, x, "relu1", name, target=2)[None], expected[None])


def test_cam_uses_the_row_of_the_class() -> None:
    model, x = SmallNet(cam_head=True), small_picture()
    expected = ORACLES["cam"](model.trunk(x)[0], model.fc.weight[2])
    assert_close_to(explained(model, x, "relu1", "cam", target=2)[None], expected[None])


def test_the_closed_form_of_gradcam_plus_plus_equals_the_derivatives_on_a_piecewise_linear_head() -> None:
    for activation, differs in ((nn.ReLU, False), (nn.Softplus, True)):  # a smooth head has second derivatives
        model = SmallNet(activation=activation).double()
        features = model.trunk(small_picture().double())[0].detach()

        def score(a: Tensor, model: SmallNet = model) -> Tensor:
            return model.head(a[None])[0, 2]

        literal = gradcam_plus_plus_by_derivatives(score, features) / math.exp(float(score(features).detach()))
        closed = gradcam_plus_plus(features, gradient_by_differences(score, features, step=1e-6))
        off = np.abs(literal - closed).max() / np.abs(closed).max()
        assert off > 1e-4 if differs else off < 1e-8


def gradient_size(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weight each channel by the mean size of its gradient."""
    return gradients.abs().mean((2, 3), keepdim=True)


@pytest.fixture
def registered() -> Iterator[str]:
    camkit.register_method("gradient-size", summary="how much each channel matters")(gradient_size)
    yield "gradient-size"
    del METHODS["gradient-size"]


def test_a_registered_method_is_used_listed_and_typed(
    registered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = camkit.scenes.scene_paths()["plane-sky"]
    found, plain = (camkit.explain("demo-fair", picture, method=name) for name in (registered, "gradcam"))
    assert (found.method, found.status) == (registered, "ok")
    assert not np.array_equal(found.raw, plain.raw)
    assert main(["methods"]) == 0
    assert "how much each channel matters" in capsys.readouterr().out
    assert main([str(picture), "--model", "demo-fair", "--method", registered, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "plane-sky.gradient-size.png").is_file()


def test_a_file_of_the_user_may_bring_model_and_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import camkit\n"
        "def build():\n"
        "    model = camkit.load_model('demo-fair')\n"
        "    return model.module, model.preprocess\n"
        "@camkit.register_method('gradient-size')\n"
        "def gradient_size(activations, gradients):\n"
        "    return gradients.abs().mean((2, 3), keepdim=True)\n"
    )
    picture = str(camkit.scenes.scene_paths()["plane-sky"])
    assert main([picture, "--model", f"{file}:build", "--method", "gradient-size", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "plane-sky.gradient-size.png").is_file()
    del METHODS["gradient-size"]


def test_a_function_is_a_method_named_after_itself_or_the_registered_one() -> None:
    method = find_method(gradient_size)
    assert (method.name, method.title, method.needs) == ("gradient_size", "gradient_size", "gradients")
    assert method.weights is gradient_size
    assert "gradient_size" not in METHODS
    for registered in (METHODS["layercam"], METHODS["cam"]):
        assert find_method(registered.weights) is find_method(registered) is registered


def test_a_taken_name_must_be_replaced_on_purpose(registered: str) -> None:
    with pytest.raises(MethodError, match=r"already a method 'gradient-size'.*replace=True"):
        camkit.register_method(registered)
    camkit.register_method(registered, summary="again", replace=True)(gradient_size)
    assert METHODS[registered].summary == "again"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *((lambda name=name: unchecked(camkit.register_method)(name), "letters, digits")
          for name in ("", "a/b", "two words", ".hidden", 7)),
        *((lambda name=name: camkit.register_method(name), f"'{name}' is the name of a reference map")
          for name in ("random", "centre", "colour")),
        (lambda: camkit.judge("demo-fair", [], replace(find_method(gradient_size), name="random")),
         "method cannot be called 'random', because judge has a row"),
        (lambda: camkit.register_method("auto"), "there is already a method 'auto'"),
        (lambda: camkit.register_method("new", needs="all"),
         "needs must be one of gradients, curvature, head, activations, scores, references, "),
        (lambda: unchecked(find_method)(7), "unknown method 7; choose from .*, or pass a function"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_sentence(call: Callable[[], object], said: str) -> None:
    with pytest.raises(MethodError, match=said):
        call()


@pytest.mark.parametrize("shape", [(2, 3), (3,), (), (2, 4, 1, 1), (2, 3, 5, 4), (1, 2, 3, 4, 5)])
def test_only_weights_that_broadcast_are_accepted(shape: tuple[int, ...]) -> None:
    for fitting in ((2, 3, 1, 1), (2, 3, 4, 5), (1, 3, 1, 1), (2, 3, 4, 1), (2, 4, 5)):
        check_weights(find_method(gradient_size), torch.full(fitting, math.nan), torch.zeros(2, 3, 4, 5))
    with pytest.raises(MethodError, match=r"'gradient_size' returned weights of shape .* keepdim=True"):
        check_weights(find_method(gradient_size), torch.zeros(shape), torch.zeros(2, 3, 4, 5))
