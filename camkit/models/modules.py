"""What every module is asked: where it is, what its input must be, and whether it can be watched."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from camkit.errors import ModelError

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel and torch.compile wrappers.

    Raises:
        ModelError: a TorchScript module, whose layers cannot carry hooks.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("a TorchScript module's layers cannot be watched; pass the Python module it was made from")
    if isinstance(model, _WRAPPERS):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def about_channels(module: nn.Module, inputs: Tensor) -> str | None:
    """Return what is wrong with the number of channels, where that can explain why the model failed."""
    first = next((part for part in module.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if first is None or first.in_channels == inputs.shape[1]:
        return None
    return f"the picture has {inputs.shape[1]} channels and the model's first convolution takes {first.in_channels}"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU where it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of the module's first parameter, which its input must have."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)
