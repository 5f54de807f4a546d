"""Facts about a module: its device, the input it takes, and whether camkit can put hooks on it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.errors import LayerError, ModelError, advice, brief
from camkit.models.black_box import BlackBox
from camkit.models.inputs import HeldInputs, OneOutput

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


BLACK_BOX = "camkit.black_box(model), which needs neither layers nor gradients"
"""The way out for models that camkit can only run."""

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "torch.nn.intrinsic.q")


def black_box_in(model: nn.Module) -> BlackBox | None:
    """Return the black box that a model is, or whose output it selects from; None if there is none."""
    while isinstance(model, OneOutput):
        model = model.model
    return model if isinstance(model, BlackBox) else None


def refuse_black_box(model: nn.Module) -> None:
    """Refuse a black box where layers are needed.

    Raises:
        LayerError: the model is one.
    """
    box = black_box_in(model)
    if box is not None:
        raise LayerError(box.lacks())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: DataParallel, torch.compile, Lightning's Fabric.

    Raises:
        ModelError: the module is TorchScript, which takes no hooks, or quantised, which has no gradients.
    """
    parts = list(model.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ModelError(
            f"a TorchScript module takes no hooks; pass the Python module it was made from, or {BLACK_BOX}"
        )
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
            f"have no gradients; explain the floating-point model it was made from, or {BLACK_BOX}"
        )
    return model


def check_tensors(module: nn.Module) -> None:
    """Check that a model's parameters and buffers have values with which gradients can be computed.

    Raises:
        ModelError: some are lazy, or made in inference mode.
    """
    modules = list(module.modules())  # walked once: each of PyTorch's iterators walks again
    parameters = [tensor for part in modules for tensor in part._parameters.values() if tensor is not None]
    tensors = [*parameters, *(buffer for part in modules for buffer in part._buffers.values() if buffer is not None)]
    if any(map(is_lazy, tensors)):
        raise ModelError("the model has lazy layers without weights; run it once before you explain it")
    if any(map(torch.Tensor.is_inference, tensors)):
        raise ModelError(
            "the model was built inside torch.inference_mode(), so it can never have gradients; build it outside"
        )


CLIPS = "camkit explains clips only if the model's first convolution is a Conv3d"


def about_failure(module: nn.Module, error: Exception) -> str | None:
    """Return a sentence about a failed pass if the reason is known but unclear in PyTorch's own error; else None."""
    holder = module.model if isinstance(module, OneOutput) else module
    inner = holder.model if isinstance(holder, HeldInputs) else holder
    own = getattr(inner.forward, "__qualname__", "forward")
    advices = {
        "use_reentrant": "the model uses reentrant activation checkpointing, which hides the gradients of its layers; "
        "pass use_reentrant=False to its torch.utils.checkpoint.checkpoint",
        rf"^{re.escape(own)}\(\) missing": "the model's forward needs more than the picture; "
        + advice("pass inputs={...} to camkit.explain or Explainer, or ", "")
        + "wrap the model in a module whose forward takes the picture alone",
        # what belongs to torch.func, or to a backward pass inside the forward pass
        "BatchedTensorImpl|TensorWrapper|functorch transform|backward through the graph a second time": "the model "
        "runs layers inside torch.func, such as vmap or grad, and their outputs cannot be saved; name a layer outside "
        "torch.func, or use 'rise', a method that reads no layer",
        r"unpack \(expected 5, got 4\)": f"the model takes clips, of five axes, not pictures (N, C, H, W); {CLIPS}",
    }
    found = next((sentence for pattern, sentence in advices.items() if re.search(pattern, str(error))), None)
    parameters = list(inspect.signature(holder.forward).parameters)
    if found is None and "pixel_values" in parameters[1:]:  # as in Hugging Face's models of pictures and text
        found = (
            f"camkit passes the picture first, but the model's forward takes {parameters[0]!r} first; "
            + advice("pass picture='pixel_values' and inputs={...} to camkit.explain or Explainer, or ", "")
            + "wrap the model in a module whose forward(self, picture) returns self.model(pixel_values=picture, ...)"
        )
    return None if found is None else f"{found} ({brief(error)})"


@contextlib.contextmanager
def explained_failures(module: nn.Module) -> Iterator[None]:
    """Raise ModelError in the block in place of an error that ``about_failure`` has a sentence for."""
    try:
        yield
    except Exception as error:
        sentence = about_failure(module, error)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def _first_convolution(module: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return next((part for part in module.modules() if isinstance(part, kinds)), None)


def spatial_rank(module: nn.Module) -> int:
    """Return the number of axes of the module's input after the channels.

    It is read from the module's ``spatial_axes`` or else from its first convolution; 2 if it has neither.
    """
    named = getattr(module, "spatial_axes", None)
    if isinstance(named, int):
        return named
    first = _first_convolution(module)
    return 2 if first is None else len(first.kernel_size)  # lazy layers have no weights yet


def about_channels(module: nn.Module, inputs: Tensor) -> str | None:
    """Return a sentence about a wrong number of channels; None if the input has the right number."""
    first = _first_convolution(module)
    if first is None or first.in_channels == inputs.shape[1]:
        return None
    return f"the picture has {inputs.shape[1]} channels, but the model's first convolution takes {first.in_channels}"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


_BATCH_ON_GPU, _BATCH_ON_CPU = 32, 4
"""Pictures per pass if the caller names no number. On a CPU, the C library reuses the memory of feature maps only
if they are small: in batches of 4, 8, 16 and 32, a picture took MobileNetV2 13, 19, 23
and 25 ms on two cores, and ViT-B/16 286, 382, 470 and 432 ms; ResNet-18 took 30 ms in each."""


def usual_batch_size(device: torch.device) -> int:
    """Return how many pictures pass through a model on this device at a time, if the caller names no number."""
    return _BATCH_ON_CPU if device.type == "cpu" else _BATCH_ON_GPU


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of the module's first parameter, which its input must have."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)


def shuffle_weights(modules: Iterable[nn.Module], generator: torch.Generator) -> int:
    """Shuffle the entries of the weights that modules hold themselves, in place, and return how many were shuffled.

    Tensors with one axis, such as biases and the scales of normalisations, stay: a channel without meaning gives them
    none. So the values keep their sizes, and the model its range of outputs. Call it on a copy of a model.

    Args:
        modules: the modules; those inside them are not visited.
        generator: a generator on the CPU.
    """
    shuffled = 0
    with torch.no_grad():
        for module in modules:
            for weight in module.parameters(recurse=False):  # includes those from which a parametrisation computes one
                if weight.dim() > 1 and weight.numel() > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.detach().flatten()[order].reshape(weight.shape))
                    shuffled += 1
    return shuffled
