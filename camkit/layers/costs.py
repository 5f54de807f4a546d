"""What each layer costs: parameters, multiply-adds and memory, as torchinfo counts them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.randomness import same_randomness
from camkit.engine.record import ModelRecord
from camkit.engine.restore import eagerly, evaluating, same_requirements
from camkit.types import LayerRef


@dataclass(frozen=True)
class Cost:
    """Of one run of one layer, and what is within it: parameters, multiply-adds, and the bytes of its output."""

    parameters: int
    mult_adds: int
    memory: int


@dataclass(frozen=True)
class Costs:
    """What torchinfo says of a model and one picture.

    Attributes:
        by_run: a layer's name and the number of its run, from 1, to what it costs; empty where torchinfo failed.
        total: of the whole model: its parameters, multiply-adds, and the bytes of all outputs.
        remark: what should be known of the numbers, or why there are none.
    """

    by_run: Mapping[tuple[str, int], Cost] = field(default_factory=dict)
    total: Cost | None = None
    remark: str = ""

    def of(self, ref: LayerRef) -> Cost | None:
        """Return the cost of a layer's run; None where it isn't known."""
        return self.by_run.get((ref.name, ref.call or 1))


_TOKENS = (
    "torchinfo counts a linear layer's multiply-adds once per picture, however many tokens it is applied to, and none "
    "for attention: of this model there are more"
)


def costs(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> Costs:
    """Have torchinfo run the model on one picture and count.

    Args:
        model: left exactly as it was found.
        image: one input on the model's device.
    """
    try:
        infos = _infos(model, image)
    except Exception as error:  # noqa: BLE001 - whatever a model or torchinfo raises: counting is a courtesy
        cause = error.__cause__ or error
        what = (str(cause).splitlines() or [""])[0]
        return Costs(remark=f"torchinfo could not count this model: {type(cause).__name__}: {what}")
    names = {module: name for name, module in model.named_modules()}
    runs: Counter[nn.Module] = Counter()
    found: dict[tuple[str, int], Cost] = {}
    for info in infos:
        runs[info.module] += 1
        found[names[info.module], runs[info.module]] = Cost(info.num_params, _mult_adds(info), info.output_bytes)
    leaves = [info for info in infos if info.is_leaf_layer]
    total = Cost(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(info.macs for info in leaves),
        sum(info.output_bytes for info in leaves),
    )
    tokens = any(isinstance(info.module, nn.Linear) and len(info.output_size) > 2 for info in leaves)
    attends = any(isinstance(module, nn.MultiheadAttention) for module in names)
    return Costs(found, total, _TOKENS if tokens or attends else "")


def _infos(model: nn.Module, image: Tensor) -> list[Any]:
    import torchinfo  # noqa: PLC0415 - by the one command that counts

    with (
        eagerly(),
        same_randomness(ModelRecord.of_model(model).devices),
        same_requirements(model),
        evaluating(model),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        warnings.catch_warnings(),
        _nothing_kept(model),
    ):
        warnings.simplefilter("ignore")
        return list(torchinfo.summary(model, input_data=[image.clone()], verbose=0).summary_list)


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """Have torchinfo forget the model, which it would keep alive until another of this name comes."""
    from torchinfo import torchinfo as engine  # noqa: PLC0415 - as above

    kept, name = engine._cached_forward_pass, type(model).__name__
    before = kept.get(name)
    try:
        yield
    finally:
        kept.pop(name, None)
        if before is not None:
            kept[name] = before


def _mult_adds(info: Any) -> int:
    """Return a layer's multiply-adds; what torchinfo has of a layer with others inside is of no use, those' is."""
    if info.is_leaf_layer:
        return int(info.macs)
    return sum(int(child.macs) for child in info.children if child.is_leaf_layer)
