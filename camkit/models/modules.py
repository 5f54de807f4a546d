"""Facts about a module: its device, the input it takes, and whether camkit can put hooks on it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from camkit.errors import ModelError

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "torch.nn.intrinsic.q")


def refuse_exported(model: object) -> None:
    """Refuse an exported program.

    Raises:
        ModelError: ``model`` is an exported program.
    """
    if isinstance(model, torch.export.ExportedProgram):
        raise ModelError("an exported program has no layers for hooks; pass the Python module it was exported from")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: DataParallel, torch.compile, Lightning's Fabric.

    Raises:
        ModelError: the module is TorchScript, which takes no hooks, or quantised, which has no gradients.
    """
    parts = list(model.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ModelError("a TorchScript module takes no hooks; pass the Python module it was made from")
    if isinstance(model, _WRAPPERS):
        return unwrapped(model.module)
    for name in ("_orig_mod", "_forward_module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    quantised = next((part for part in parts if type(part).__module__.startswith(_QUANTISED)), None)
    if quantised is not None:
        raise ModelError(
            f"the model is quantised (it has a {type(quantised).__module__}.{type(quantised).__name__}), and integers "
            "have no gradients; explain the floating-point model it was made from"
        )
    return model


_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def spatial_rank(module: nn.Module) -> int:
    """Return the number of spatial axes of the module's input, read from its first convolution; 2 if it has none."""
    first = next((part for part in module.modules() if isinstance(part, tuple(_CONVOLUTIONS))), None)
    return next((rank for kind, rank in _CONVOLUTIONS.items() if isinstance(first, kind)), 2)


def about_channels(module: nn.Module, inputs: Tensor) -> str | None:
    """Return a sentence about a wrong number of channels; None if the input has the right number."""
    first = next((part for part in module.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if first is None or first.in_channels == inputs.shape[1]:
        return None
    return f"the picture has {inputs.shape[1]} channels, but the model's first convolution takes {first.in_channels}"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of the module's first parameter, which its input must have."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)
