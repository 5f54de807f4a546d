"""A few models of the zoo, tested with its script's functions, and proof that its checks can fail."""

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")  # from the models themselves


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    return import_module("scripts.zoo.zoo")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "model"),
    [
        *(("torchvision", "mobilenet_v3_small"), ("torchvision", "squeezenet1_1")),
        *(("timm", "test_vit"), ("timm", "test_convnext"), ("huggingface", "PvtV2ForImageClassification")),
    ],
)
def test_models_of_each_source_are_right(zoo: ModuleType, source: str, model: str) -> None:
    pytest.importorskip("transformers" if source == "huggingface" else source)
    if source == "timm":
        entry = import_module("scripts.zoo.zoo_models").timm_entry(model)
    else:
        entry = next(entry for entry in zoo.SOURCES[source]({}) if entry.model == model)
    row = zoo.visit(entry)
    assert [seen["status"] for seen in row["seen"]] == ["right", "right"], row
    assert row["seen"][1]["place"] > 0.9
    assert all(seen["place"] > 0.9 for seen in row["seen"] if seen["place"] is not None), row


class Patches(nn.Module):
    """64 tokens of 64 channels, with an optional extra token: the shape does not distinguish the two axes."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 16, 16)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, 5)
        self.extra = extra

    def forward(self, images: Tensor) -> Tensor:
        cells = self.embed(images).flatten(2).transpose(1, 2)
        token = cells.new_zeros(len(cells), 1, 64)
        first, last = ([token] if self.extra == side else [] for side in ("first", "last"))
        return self.head(self.mix(torch.cat([*first, cells, *last], 1)).mean(1))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(1, 3, 128, 128)


def claimed(zoo: ModuleType, **changes: Any) -> Any:
    """Return the true claim about ``Patches``, with changes."""
    middles = np.arange(8) * 16 + 7.5
    truth = zoo.Claim(
        "mix", "tokens", 0, layout=(8, 8), grid=(8, 8), blank=False, positions=(middles, middles), auto=""
    )
    return truth._replace(**changes)


def test_a_true_claim_is_right(zoo: ModuleType, images: Tensor) -> None:
    seen = zoo.judge(Patches(), images, [(8, 8)], claimed(zoo))
    assert seen.status == "right", seen
    assert seen.place > 0.99
    assert seen.offset < 0.1
    assert zoo.judge(Patches("first"), images, [(8, 8)], claimed(zoo, prefix=1)).status == "right"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "tokens_last"}, "cells lie elsewhere"),
        ({"kind": "channels_last"}, "does not have this layout"),
        ({"prefix": 1}, "does not have this layout"),
        ({"grid": (4, 16), "layout": (4, 16)}, "the grid is 8x8"),
        ({"layout": (4, 16)}, "the grid is 8x8"),
        ({"layer": "embed", "kind": "channels_first"}, "an early layer"),
        ({"blank": True}, "a blank map"),
    ],
)
def test_a_false_claim_is_wrong(zoo: ModuleType, images: Tensor, changes: dict[str, Any], said: str) -> None:
    seen = zoo.judge(Patches(), images, [(8, 8)], claimed(zoo, **changes))
    assert seen.status == "wrong"
    assert said in seen.said
    assert zoo.judge(Patches(), images, [(8, 8)], claimed(zoo, sure=False, **changes)).status == "doubted"


def test_a_suffix_token_claimed_as_a_prefix_token_is_wrong(zoo: ModuleType, images: Tensor) -> None:
    seen = zoo.judge(Patches("last"), images, [(8, 8)], claimed(zoo, prefix=1))
    assert seen.status == "wrong"
    assert "cells lie elsewhere" in seen.said
