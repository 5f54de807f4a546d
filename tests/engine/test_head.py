"""The head run alone on changed feature maps gives what the whole model gives if a hook changes them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from heads import CASES, CLASS, SIZE, Chain, Unsteady, built, with_output
from networks import Net
from torch import Tensor, nn
from unchanged import unchanged

import camkit
from camkit.engine.head import Head, answering, recording
from camkit.engine.passes import Pass, from_grid, quiet_pass, to_grid
from camkit.errors import MethodError
from camkit.methods import METHODS
from camkit.types import LayerRef, Layout


def head_of(model: nn.Module, ref: LayerRef, layout: Layout, image: Tensor) -> Head:
    with recording(model, ref) as recorded:
        output = model(image.clone())
    options = Pass(model, image, ())
    return Head(options, ref, layout, recorded, lambda scores, _: scores[:, CLASS], float(output[0, CLASS]))


def by_hook(model: nn.Module, ref: LayerRef, layout: Layout, image: Tensor, maps: Tensor) -> float:
    """Return the score if a hook gives one call of the layer other feature maps; the definition."""

    def change(output: Tensor) -> Tensor:
        changed = output.clone()
        to_grid(changed, layout).copy_(maps)
        return changed

    return float(with_output(model, ref, image, change)[1][0, CLASS])


@pytest.mark.parametrize("name", CASES)
def test_the_head_alone_gives_what_the_whole_model_gives(name: str) -> None:
    model, ref, layout, image = built(name)
    with unchanged(model), quiet_pass(model, image.device, "fp32"):
        head = head_of(model, ref, layout, image)
        changes = torch.randn(5, *head.activations.shape[1:])
        expected = [by_hook(model, ref, layout, image, maps) for maps in changes]
        found = head(changes.clone()).tolist()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert max(found) - min(found) > 1e-3  # the changes matter
    assert head._trunk == CASES[name][3]


def test_many_maps_run_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ref, layout, image = built("skip")
    monkeypatch.setattr("camkit.engine.head._MOST_BYTES", 3 * 8 * 64 * 4)
    with quiet_pass(model, image.device, "fp32"):
        head = head_of(model, ref, layout, image)
        changes = torch.randn(7, *head.activations.shape[1:])
        expected = [by_hook(model, ref, layout, image, maps) for maps in changes]
        assert head.at_once == 3
        assert head(changes).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_head_with_other_scores_than_the_model_is_refused() -> None:
    model = Unsteady().eval()
    with pytest.raises(MethodError, match="cannot be run alone on changed feature maps; use a gradient method"):
        camkit.explain(model, torch.randn(3, SIZE, SIZE), "2", method="ablationcam", target=CLASS)


def test_modules_answer_in_one_thread_and_then_run_again() -> None:
    model = Chain().eval()
    image, answer = torch.randn(1, 3, SIZE, SIZE), torch.zeros(1, 3)
    expected = model(image)
    elsewhere: list[Tensor] = []
    with answering({model[6]: [None, answer]}):
        thread = threading.Thread(target=lambda: elsewhere.append(model(image)))
        thread.start()
        thread.join()
        outputs = [model(image) for _ in range(3)]
    assert torch.equal(elsewhere[0], expected)
    assert [torch.equal(output, expected) for output in outputs] == [True, False, True]
    assert torch.equal(outputs[1], answer)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "prefix", "shape"),
    [
        ("channels_first", 0, (1, 5, 3, 4)),
        ("channels_last", 0, (1, 3, 4, 5)),
        ("tokens", 2, (1, 14, 5)),
        ("tokens_last", 1, (1, 5, 13)),
        ("sequence_first", 1, (13, 1, 5)),
    ],
)
def test_from_grid_reverses_to_grid(kind: Any, prefix: int, shape: tuple[int, ...]) -> None:
    layout, output, maps = Layout(kind, (3, 4), prefix), torch.randn(shape), torch.randn(3, 5, 3, 4)
    assert torch.equal(to_grid(from_grid(maps, output, layout), layout), maps)
    assert torch.equal(from_grid(to_grid(output, layout), output, layout), output)


def test_recipro_cam_of_a_transformer_masks_patches_and_keeps_the_class_token() -> None:
    """The form for ViTs of Byun and Lee 2022: the class token goes to the head as it is, whichever patch is kept."""

    def layer(net: Net, images: Tensor) -> Tensor:
        return net.layer(torch.cat([net.token.expand(len(images), -1, -1), net.patches(images).flatten(2).mT], 1))

    def after(net: Net, tokens: Tensor) -> Tensor:
        attention = (tokens @ tokens.mT / 8**0.5).softmax(-1)
        return net.head((tokens + attention @ tokens)[:, 0])

    parts = {"patches": nn.Conv2d(3, 8, 8, 8), "layer": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    token = nn.Parameter(torch.randn(1, 1, 8))
    net, image = Net(lambda net, images: after(net, layer(net, images)), **parts, token=token), torch.randn(3, 32, 32)
    found = camkit.explain(net, image, "layer", method="reciprocam", target=1)
    with torch.no_grad():
        tokens = layer(net, image[None])

    def score(maps: np.ndarray) -> float:
        masked = torch.from_numpy(maps).float().flatten(1).mT[None]
        with torch.no_grad():
            return float(after(net, torch.cat([tokens[:, :1], masked], 1))[0, 1])

    expected = oracles.reciprocam(tokens[0, 1:].mT.reshape(8, 4, 4), score)
    np.testing.assert_allclose(found.raw, expected, atol=1e-5 * expected.max())


OF_THE_HEAD = [name for name, method in METHODS.items() if method.needs == "scores"]


@pytest.mark.parametrize("method", OF_THE_HEAD)
def test_operations_in_place_run_in_the_callers_inference_mode(method: str) -> None:
    model, ref, _, image = built("chain")
    expected = camkit.explain(model, image, str(ref), method=method, target=CLASS)
    with torch.inference_mode(), unchanged(model):
        found = camkit.explain(model, image, str(ref), method=method, target=CLASS)
    np.testing.assert_array_equal(found.raw, expected.raw)


def test_a_score_that_is_not_finite_is_reported() -> None:
    model, ref, _, image = built("chain")
    with torch.no_grad():
        model[6].bias[CLASS] = torch.nan
    assert camkit.explain(model, image, str(ref), method="ablationcam", target=CLASS).status == "non_finite"


def in_place(_: nn.Module, __: object, output: Tensor) -> None:
    output.mul_(2).add_(0.1)


def in_a_copy(_: nn.Module, __: object, output: Tensor) -> Tensor:
    return output * 2 + 0.1


@pytest.mark.parametrize("hook", [in_place, in_a_copy])
@pytest.mark.parametrize(("name", "edited"), [("chain", "2"), ("skip", "layer"), ("skip", "stem")])
def test_a_users_hook_changes_an_output_once(name: str, edited: str, hook: Callable[..., Tensor | None]) -> None:
    model, ref, _, image = built(name)
    as_modules = copy.deepcopy(model)
    edited_module = Net(lambda net, x: net.module(x) * 2 + 0.1, module=as_modules.get_submodule(edited))
    setattr(as_modules, edited, edited_module)
    expected = camkit.explain(as_modules, image, str(ref), method="ablationcam", target=CLASS)
    with model.get_submodule(edited).register_forward_hook(hook), unchanged(model):
        found = camkit.explain(model, image, str(ref), method="ablationcam", target=CLASS)
    np.testing.assert_allclose(found.raw, expected.raw, rtol=0, atol=1e-6 * np.abs(expected.raw).max())
    plain = camkit.explain(model, image, str(ref), method="ablationcam", target=CLASS)
    assert np.abs(found.raw - plain.raw).max() > 1e-2 * np.abs(plain.raw).max()  # the hook matters


class ReadsAHook(Chain):
    """The head reads what a hook of the model's own kept of the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self[2].register_forward_hook(lambda *called: setattr(self, "kept", called[-1]))

    def forward(self, images: Tensor) -> Tensor:
        maps = images
        for number, layer in enumerate(self):
            maps = layer(maps if number != 3 else self.kept.clone())
        return maps


def test_a_models_own_hooks_see_the_changed_maps() -> None:
    model = ReadsAHook().eval()
    plain, image = Chain().eval(), torch.randn(3, SIZE, SIZE)
    plain.load_state_dict(model.state_dict())
    expected, found = (
        camkit.explain(net, image, "2", method="ablationcam", target=CLASS).raw for net in (plain, model)
    )
    np.testing.assert_array_equal(found, expected)


def test_small_falls_of_a_score_in_float64_are_exact() -> None:
    model, ref, _, image = built("chain")
    model, image = model.double(), image.double()
    with torch.no_grad():
        model[6].weight *= 1e-4
        model[6].bias += 1.0  # a float32 next to 1 is 6e-8 away
    found = camkit.explain(model, image, str(ref), method="ablationcam", target=CLASS)
    with torch.no_grad():
        trunk, head = nn.Sequential(*list(model)[:3]), nn.Sequential(*list(model)[3:])
        expected = oracles.OF_SCORES["ablationcam"](
            trunk(image)[0], lambda maps: float(head(torch.tensor(maps)[None])[0, CLASS])
        )
        assert found.score == float(model(image)[0, CLASS])
    np.testing.assert_allclose(found.raw, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
