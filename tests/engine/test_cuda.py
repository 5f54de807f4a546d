"""On a GPU, camkit gives the same maps as on the CPU, restores the model, and frees its memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from networks import network
from torch import Tensor, nn

import camkit

DEVICE = "cuda"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def pictures(count: int, side: int = 96) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        *(("resnet18", method, {}) for method in ("gradcam", "gradcam++", "layercam", "eigencam", "ablationcam")),
        *(("resnet18", method, {}) for method in ("fullgrad", "auto", "expected")),
        *((name, "auto", {}) for name in ("vit_b_32", "swin_t", "densenet121")),
        ("densenet121", "auto", {"spread": "even"}),
        ("vit_b_32", "expected", {"target_layer": "encoder.layers.encoder_layer_5"}),
    ],
)
def test_a_method_gives_the_same_layer_and_map_as_on_the_cpu(name: str, method: str, options: dict[str, Any]) -> None:
    model, images = network(name), pictures(2, 64)
    own = camkit.explain(model, images, target=3, method=method, **options)
    others = camkit.explain(copy.deepcopy(model).to(DEVICE), images, target=3, method=method, **options)
    for one, other in zip(own, others, strict=True):
        assert one.layer == other.layer
        assert np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1] > (
            0.99 if name != "resnet18" and method == "auto" else 0.999
        )


def test_a_batch_gives_the_same_maps_as_single_pictures() -> None:
    explainer, images = camkit.Explainer(copy.deepcopy(network("resnet18")).to(DEVICE), method="gradcam"), pictures(16)
    together = explainer.batch(images, batch_size=16)
    for one, image in zip(together, images, strict=True):
        np.testing.assert_allclose(one.heatmap, explainer(image, one.target).heatmap, atol=1e-3)


def test_the_model_and_the_generators_are_restored() -> None:
    model = nn.Sequential(copy.deepcopy(network("resnet18")), nn.Dropout(0.5)).train().to(DEVICE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = (torch.get_rng_state(), torch.cuda.get_rng_state())
    camkit.explain(model, pictures(2), method="gradcam")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for state, kept in zip(generators, (torch.get_rng_state(), torch.cuda.get_rng_state()), strict=True):
        assert torch.equal(state, kept)


def test_memory_is_freed() -> None:
    explainer, images = camkit.Explainer(copy.deepcopy(network("resnet18")).to(DEVICE), method="gradcam"), pictures(8)
    explainer.batch(images)
    held = torch.cuda.memory_allocated()
    for _ in range(5):
        explainer.batch(images)
    assert torch.cuda.memory_allocated() == held


def test_a_batch_that_does_not_fit_is_explained_in_parts() -> None:
    explainer, images = camkit.Explainer(copy.deepcopy(network("resnet18")).to(DEVICE), method="gradcam"), pictures(256)
    explainer(images[0])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        assert len(explainer.batch(images, batch_size=256)) == 256
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
