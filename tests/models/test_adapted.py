"""Models that other libraries changed: quantised, with adapters, or spread over devices."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import camkit
from camkit.errors import MethodError, ModelError

IMAGE = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A small network with a linear layer behind its maps."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.features(pictures).mean((2, 3)))


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().eval()


def correlation(one: camkit.Explanation, other: camkit.Explanation) -> float:
    return float(np.corrcoef(one.raw.ravel(), other.raw.ravel())[0, 1])


def test_weights_that_torchao_quantised_are_explained(network: Network) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    before = camkit.explain(network, IMAGE, target=1, method="gradcam")
    quantised = copy.deepcopy(network)
    torchao.quantize_(quantised, torchao.Int8WeightOnlyConfig())

    after = camkit.explain(quantised, IMAGE, target=1, method="gradcam")

    assert after.layer == before.layer
    assert correlation(before, after) > 0.99


def test_an_adapter_of_peft_is_explained_as_the_merged_model(network: Network) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        network, peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
    ).eval()

    with_adapter = camkit.explain(adapted, IMAGE, target=1, method="gradcam")

    merged = camkit.explain(copy.deepcopy(adapted).merge_and_unload(), IMAGE, target=1, method="gradcam")
    assert np.allclose(with_adapter.raw, merged.raw, atol=1e-5)
    assert with_adapter.layer.endswith(merged.layer)


def test_linear_layers_of_bitsandbytes_are_explained(network: Network) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    quantised = copy.deepcopy(network)
    for name in ("0", "2"):
        linear = quantised.head.get_submodule(name)
        layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
        quantised.head[int(name)] = layer.to("cpu")
    before = camkit.explain(network, IMAGE, target=1, method="gradcam")

    after = camkit.explain(quantised, IMAGE, target=1, method="gradcam")

    assert after.layer == before.layer
    assert correlation(before, after) > 0.98


def test_a_model_that_accelerate_offloads_is_a_black_box(network: Network) -> None:
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(copy.deepcopy(network), execution_device=torch.device("cpu"))

    with pytest.raises((ModelError, MethodError), match="black_box"):
        camkit.explain(offloaded, IMAGE, target=1)

    explained = camkit.explain(camkit.black_box(offloaded), IMAGE, target=1, method="occlusion")
    assert explained.status == "ok"


def test_a_model_on_one_device_by_a_map_is_explained(network: Network) -> None:
    accelerate = pytest.importorskip("accelerate")
    before = camkit.explain(network, IMAGE, target=1, method="gradcam")
    spread = accelerate.dispatch_model(
        copy.deepcopy(network), device_map={"features": "cpu", "head": "cpu"}, force_hooks=True
    )

    after = camkit.explain(spread, IMAGE, target=1, method="gradcam")

    assert after.layer == before.layer
    assert np.allclose(after.raw, before.raw, atol=1e-6)
