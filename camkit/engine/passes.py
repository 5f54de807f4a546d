"""One forward pass that leaves no trace, and the memory format in which it is fastest."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.nested import tensors_in
from camkit.engine.randomness import same_randomness
from camkit.engine.record import ModelRecord
from camkit.engine.restore import eagerly, evaluating
from camkit.types import Precision

DTYPES = {"bf16": torch.bfloat16, "bf16-forced": torch.bfloat16, "fp16": torch.float16}

_NO_BF16 = (
    "this CPU has no units for bf16, which would take several times as long as fp32, so fp32 is used; precision "
    "'bf16-forced' uses bf16 all the same"
)

_FEW_IMAGES = 4
"""Images in a batch from which the channels-last format saves more time than the conversion costs."""

_SAME_FP32, _SAME_AUTOCAST = 1e-3, 5e-2
"""How far a model's answers in the two formats may differ, as a share of the largest: a little more than rounding."""


def usable_precision(precision: Precision, device: torch.device) -> tuple[Precision, str]:
    """Return the precision to run in, and what to tell the user if it is not the given one.

    Args:
        precision: as the user gave it.
        device: where the model is.
    """
    if precision == "bf16-forced":
        return "bf16", ""
    if precision == "bf16" and device.type == "cpu" and not _cpu_has_bf16():
        return "fp32", _NO_BF16
    return precision, ""


def _cpu_has_bf16() -> bool:
    """Tell whether the CPU computes in bf16; older versions of PyTorch tell it of x86 alone."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64":
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return bool(capabilities.get("bf16", True))


@contextmanager
def quiet_pass(
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    record: ModelRecord | None = None,
    *,
    users_code: bool = True,
) -> Iterator[None]:
    """Set the stage for one pass: evaluation mode, no graph, the given precision; all of it is undone at the end.

    Works inside a caller's ``no_grad``, ``inference_mode`` and ``autocast``, whose cache of weights is not shared.

    Args:
        model: left exactly as it was found.
        device: where the model is.
        precision: "fp32", or "bf16" or "fp16" under autocast.
        record: of the model, if one is prepared; preparing it anew walks through all modules.
        users_code: whether functions of the user run inside, besides the model.
    """
    record = record or ModelRecord.of_model(model)
    with (
        eagerly(),
        same_randomness(record.devices, others=users_code or record.draws_elsewhere),
        evaluating(model, record),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES, cache_enabled=False),
    ):
        yield


def faster_format(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    precision: Precision,
    remembered: dict[Precision, bool] | None = None,
) -> torch.memory_format:
    """Return the memory format in which a batch should be given to a model.

    Convolutions on a CPU are faster with the channels last, without any change to the model; ``docs/benchmarks.md`` has
    the figures. Small batches gain little. A model that relies on the ordinary format, and so answers differently in
    the other, gets the ordinary one.

    Args:
        model: as in ``quiet_pass``.
        inputs: the batch.
        precision: of the pass.
        remembered: the caller's memory of whether the model answers alike, which one image decides; filled here.
    """
    if inputs.dim() != 4 or inputs.device.type != "cpu" or len(inputs) < _FEW_IMAGES:
        return torch.preserve_format
    remembered = {} if remembered is None else remembered
    if precision not in remembered:
        convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
        remembered[precision] = convolves and _same_in_both_formats(model, inputs[:1], precision)
    return torch.channels_last if remembered[precision] else torch.preserve_format


def _same_in_both_formats(model: nn.Module, image: Tensor, precision: Precision) -> bool:
    tolerance = _SAME_FP32 if precision == "fp32" else _SAME_AUTOCAST
    with quiet_pass(model, image.device, precision):
        try:
            plain = [tensor.double() for tensor in tensors_in(model(image.clone()))]
            other = list(tensors_in(model(image.clone(memory_format=torch.channels_last))))
        except Exception:  # any error of a model that finds its input in an order it does not expect
            return False
        return len(plain) == len(other) and all(
            _same(one, two, tolerance) for one, two in zip(plain, other, strict=True)
        )


def _same(one: Tensor, two: Tensor, tolerance: float) -> bool:
    if one.shape != two.shape:
        return False
    largest = float(one.nan_to_num(0, 0, 0).abs().amax()) if one.numel() else 0.0
    return torch.allclose(one, two.double(), rtol=0, atol=tolerance * largest, equal_nan=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that the batch was too large for the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
