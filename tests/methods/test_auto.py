"""Method "auto": which method and layer it takes for each kind of network, and that their maps are the methods' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, means
from tiers import Extra, rows_represented
from torch import Tensor, nn

import camkit

timm = Extra("timm")


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    source, _, found = name.rpartition(":")
    model: nn.Module = timm.create_model(found) if source else torchvision.models.get_model(found)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    return model.eval()


def picture(side: int = 224) -> Tensor:
    return torch.randn(3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "side", "options", "method", "layer"),
    rows_represented(
        lambda name, side, options, *_: side == 64 or name == "squeezenet1_1" or "method" in options,
        [
            ("resnet18", 64, {}, "gradcam-sharpened", "layer2+layer4"),  # 8 x 8 instead of 2 x 2
            ("resnet18", 224, {}, "gradcam-sharpened", "layer3+layer4"),  # 14 x 14 cells instead of 7 x 7
            ("resnet18", 448, {}, "gradcam", "layer4"),  # 14 x 14
            ("resnet18", 224, {"smooth": "augment"}, "gradcam-sharpened", "layer3+layer4"),
            ("resnet18", 224, {"target": lambda output: output[:, 0] * 1e-38}, "gradcam-sharpened", "layer3+layer4"),
            # At a named layer, each cell has its own weight unless the grid is the deepest.
            ("resnet18", 224, {"target_layer": "layer4"}, "gradcam", "layer4"),
            ("resnet18", 224, {"target_layer": "layer4", "method": "gradcam-sharpened"}, "gradcam", "layer4"),
            ("resnet18", 224, {"target_layer": "layer3"}, "gradcam-elementwise", "layer3"),
            ("mobilenet_v2", 224, {}, "gradcam-sharpened", "features.13+features"),
            ("squeezenet1_1", 224, {}, "gradcam", "features"),
            ("timm:test_convnext", 224, {}, "gradcam", "stages"),  # a normalisation follows every finer block
            ("timm:test_vit", 160, {}, "chefer", "whole model"),
            ("timm:test_vit", 160, {"smooth": "eigen"}, "gradcam", None),  # which needs feature maps
            ("timm:swin_s3_tiny_224", 224, {}, "gradcam-sharpened", "layers.2+norm"),  # windows
        ],
    ),
)
def test_the_method_and_the_layer_depend_on_the_network(
    name: str, side: int, options: dict[str, Any], method: str, layer: str | None
) -> None:
    model, image = network(name), picture(side)
    found = camkit.explain(model, image, **{"target": 3, "method": "auto", **options})
    assert (found.method, found.layer, found.status) == (method, layer or found.layer, "ok")
    if not options:
        same = camkit.explain(model, image, None if method == "chefer" else layer.split("+"), target=3, method=method)
        np.testing.assert_allclose(found.raw, same.raw, rtol=1e-4, atol=1e-6 * np.abs(same.raw).max())


def test_a_finer_layer_that_carries_only_a_part_of_the_score_is_not_taken() -> None:
    def beside(net: Net, images: Tensor) -> Tensor:
        maps = net.both(net.coarse(net.fine(images).relu()) + net.other(images))
        return net.head(means(maps.relu()))

    torch.manual_seed(0)
    fine, other = nn.Conv2d(3, 8, 8, 8), nn.Conv2d(3, 8, 32, 32)
    parts = {"coarse": nn.Conv2d(8, 8, 4, 4), "both": nn.Conv2d(8, 8, 1), "head": nn.Linear(8, 4)}
    found = camkit.explain(Net(beside, fine=fine, other=other, **parts), picture(128), method="auto")
    assert (found.method, found.raw.shape) == ("gradcam", (4, 4))


def test_grad_cam_is_sharpened_by_the_share_of_the_largest_product_at_the_finer_layer() -> None:
    model, image = network("resnet18"), picture(200)
    explainer = camkit.Explainer(model)
    found, other = explainer.batch([image], [3, 7])
    coarse, fine = (
        camkit.explain(model, image, layer, target=3, method=method)
        for layer, method in (("layer4", "gradcam"), ("layer3", "gradcam-elementwise"))
    )
    rows, columns = (np.asarray(places) for places in fine.positions)
    at_columns = np.stack([np.interp(columns, coarse.positions[1], row) for row in coarse.raw])
    at_cells = np.stack([np.interp(rows, coarse.positions[0], column) for column in at_columns.T], 1)
    np.testing.assert_allclose(found.raw, at_cells * fine.raw / fine.raw.max(), rtol=1e-3, atol=1e-5 * found.raw.max())
    assert not np.allclose(found.raw, other.raw)


def test_the_layer_is_the_deepest_one_and_the_reason_names_both() -> None:
    explainer = camkit.Explainer(network("resnet18"))
    found = explainer(picture(), 3)
    assert (str(explainer.layer), list(map(str, explainer.layers))) == ("layer4", ["layer3", "layer4"])
    assert "deepest 7x7 grid" in found.layer_reason
    assert "sharpened by layer3: the deepest 14x14 grid" in found.layer_reason
    assert found.caption().lines[0] == "Grad-CAM at layer layer4, sharpened by layer3, 14x14 cells"


def test_attention_comes_first_if_convolutions_run_before_it() -> None:
    steps = [torchvision.models.vision_transformer.ConvStemConfig(width, 3, 2) for width in (16, 32, 32, 64)]
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(112, 16, 3, 4, 64, 128, num_classes=10, conv_stem_configs=steps).eval()
    nn.init.normal_(model.heads.head.weight, std=0.02)
    assert camkit.explain(model, picture(112), target=1).method == "chefer"
