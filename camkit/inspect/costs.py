"""The cost of each layer: parameters, multiply-adds and memory, counted by torchinfo."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.guard import guarded, interruptible, same_requirements
from camkit.types import LayerRef


@dataclass(frozen=True)
class Cost:
    """The cost of one call of a layer, inner layers included; ``memory`` is the bytes of its output."""

    parameters: int
    mult_adds: int
    memory: int


@dataclass(frozen=True)
class Costs:
    """The costs of a model for one picture, counted by torchinfo.

    Attributes:
        by_call: the cost by layer name and call number, from 1; empty if torchinfo failed.
        total: the cost of the whole model: its parameters, multiply-adds, and the bytes of all outputs.
        remark: what to know when reading the numbers, or why there are none.
    """

    by_call: Mapping[tuple[str, int], Cost] = field(default_factory=dict)
    total: Cost | None = None
    remark: str = ""

    def of(self, ref: LayerRef) -> Cost | None:
        """Return the cost of a layer's call; None if it is unknown."""
        return self.by_call.get((ref.name, ref.call or 1))


_TOKENS = (
    "this model has more multiply-adds than shown: torchinfo counts a linear layer once per picture, however many "
    "tokens it is applied to, and does not count attention"
)


def costs(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> Costs:
    """Run the model on one picture and count with torchinfo.

    Args:
        model: left exactly as it was found.
        image: one input on the model's device.
    """
    try:
        from torchinfo import torchinfo  # noqa: PLC0415 - only one command counts

        with (
            same_requirements(model),
            guarded(model),
            torch.inference_mode(mode=False),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
            mock.patch.dict(torchinfo._cached_forward_pass),  # which would keep the model alive
            interruptible(),
        ):
            infos = torchinfo.summary(model, input_data=[image.clone()], verbose=0).summary_list
    except Exception as error:  # noqa: BLE001 - counting is optional, whatever the model or torchinfo raises
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or [""])[0]
        return Costs(remark=f"torchinfo could not count this model: {type(cause).__name__}: {reason}")
    names = {module: name for name, module in model.named_modules()}
    call_counts: Counter[nn.Module] = Counter()
    by_call: dict[tuple[str, int], Cost] = {}
    for info in infos:
        call_counts[info.module] += 1
        # torchinfo counts correctly only for layers without inner ones.
        counted = [info] if info.is_leaf_layer else [child for child in info.children if child.is_leaf_layer]
        cost = Cost(info.num_params, sum(int(each.macs) for each in counted), info.output_bytes)
        by_call[names[info.module], call_counts[info.module]] = cost
    leaves = [info for info in infos if info.is_leaf_layer]
    total = Cost(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(info.macs for info in leaves),
        sum(info.output_bytes for info in leaves),
    )
    tokens = any(isinstance(info.module, nn.Linear) and len(info.output_size) > 2 for info in leaves)
    attends = any(isinstance(module, nn.MultiheadAttention) for module in names)
    return Costs(by_call, total, _TOKENS if tokens or attends else "")
