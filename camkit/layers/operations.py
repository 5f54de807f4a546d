"""What the operations of a pass tell about where the cells of its tensors lie."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.interrupts import undisturbed
from camkit.layers.positions import MemoryNotes, tensors_of

_KEEPING = frozenset(
    [
        "_adaptive_avg_pool2d", "_native_batch_norm_legit_no_training", "_prelu_kernel", "_to_copy", "add",
        "add_", "alias", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat", "clamp", "clamp_", "clamp_min",
        "clamp_min_", "clone", "convolution", "copy_", "cudnn_batch_norm", "detach", "div", "div_", "elu",
        "elu_", "empty", "empty_like", "exp", "gelu", "hardsigmoid", "hardsigmoid_", "hardswish", "hardswish_",
        "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "max_pool2d_with_indices",
        "max_pool3d_with_indices", "mean", "mish", "mkldnn_convolution", "mul", "mul_", "native_batch_norm",
        "native_dropout", "native_group_norm", "native_layer_norm", "ones", "ones_like", "pow", "prelu", "relu",
        "relu_", "rsqrt", "sigmoid", "sigmoid_", "silu", "silu_", "softplus", "sqrt", "sub", "sub_", "tanh",
        "tanh_", "zeros", "zeros_like",
    ]
)  # fmt: skip
"""PyTorch's operations that leave every cell of a feature map in its place. After any other operation, the location
stage measures where the cells lie."""

_READING = frozenset(["_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"])
"""Operations that show a tensor's values to Python, as a number or in the shape of their result."""

_TO_PYTHON = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__])
"""Methods that give a tensor's values to Python without an operation of PyTorch."""

_CHOOSING = frozenset(["index", "index_select", "gather", "take", "where", "index_put_", "scatter_", "index_copy_"])
"""Operations that choose elements by the values of another tensor."""

_SAMPLING = frozenset(
    ["grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler", "roi_align", "roi_pool", "deform_conv2d", "gather",
     "index", "index_select", "take"]
)  # fmt: skip
"""Operations that take elements from the places that another tensor names."""

_SHIFTING = frozenset(["flip", "roll", "rot90", "slice"])
"""Operations that move, mirror or crop by numbers that Python gives them."""


class OperationWatch(TorchDispatchMode):
    """Notes what the operations of a pass do to the places of cells, and whether values decide it.

    Args:
        image: the input of the model, or a tensor that it is copied from.

    Attributes:
        kept: False after the first operation that may move cells.
        reads: "picture" if Python read values that were computed from the input, so that another picture may take
            another way through the model; "weights" if it read other values, or if these chose among cells.
        detached: True if an operation used values that were computed from the input but have no gradient.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = True
        self.reads: set[str] = set()
        self.detached = False
        self._derived = MemoryNotes()
        self._derived.set(image, False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first operation, which takes seconds

    def note_read(self, tensor: Tensor) -> None:
        """Note that Python reads a tensor's values."""
        self.reads.add("picture" if tensor in self._derived else "weights")

    def is_moved(self, tensor: Tensor) -> bool:
        """Tell whether the values of the picture decided from which places a tensor's cells come."""
        return bool(self._derived.get(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        name = func._overloadpacket.__name__
        self.kept &= name in _KEEPING and not (name == "convolution" and _widens(*args[1:7]))
        operands = list(tensors_of(*args, *(kwargs or {}).values()))
        derived = any(operand in self._derived for operand in operands)
        if name in _READING:
            self.reads.add("picture" if derived else "weights")
        elif derived and name in _CHOOSING and not all(operand in self._derived for operand in operands):
            self.reads.add("weights")
        results = func(*args, **(kwargs or {}))
        if derived and not name.startswith("new_") and not name.endswith("_like"):  # these use only the shape
            self.detached |= torch.is_grad_enabled() and any(
                operand in self._derived and operand.is_floating_point() and not operand.requires_grad
                for operand in operands
            )
            moved = any(map(self.is_moved, operands)) or self._moves(name, args, results)
            for result in tensors_of(results):
                self._derived.set(result, moved)
        return results

    def _moves(self, name: str, args: tuple[Any, ...], results: Any) -> bool:
        """Tell whether values computed from the picture decide where an operation takes its elements from."""
        if name in _SAMPLING:
            return args[0] in self._derived and any(place in self._derived for place in tensors_of(*args[1:]))
        if name == "where":
            return args[0] in self._derived and any(map(_is_shifted, tensors_of(*args[1:])))
        shifts = name in _SHIFTING and "picture" in self.reads and args[0].is_floating_point()
        return shifts and (name != "slice" or results.shape != args[0].shape)


class MethodWatch(TorchFunctionMode):
    """Tells a watch of operations about the methods in the block that give values to Python."""

    def __init__(self, watch: OperationWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the method."""
        if func in _TO_PYTHON:
            self._watch.note_read(args[0])
        return func(*args, **(kwargs or {}))

    def __exit__(self, *failure: Any) -> None:
        """Leave the block. If Ctrl-C came while PyTorch had taken the mode off for a call, the mode may be off still.

        A generator in that call puts it back as soon as the call's frame is cleared, which may be long after the block.
        """
        if not self._is_on():
            traceback.clear_frames(failure[2])
        if self._is_on():
            super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def _is_on(self) -> bool:
        return any(mode is self for mode in _get_current_function_mode_stack())


def _is_shifted(tensor: Tensor) -> bool:
    return type(tensor.grad_fn).__name__ in ("FlipBackward0", "RollBackward0", "Rot90Backward0")


def _widens(weight: Tensor, _: Any, __: Any, padding: Sequence[int], dilation: Sequence[int], transposed: bool) -> bool:
    """Tell whether a convolution may move cells: it is transposed, or pads more cells than its kernel uses up."""
    used = (step * (side - 1) for step, side in zip(dilation, weight.shape[2:], strict=False))
    return transposed or any(2 * added > cells for added, cells in zip(padding, used, strict=False))


@contextmanager
def watching_places(model: nn.Module, modules: Iterable[nn.Module], inputs: Tensor) -> Iterator[dict[nn.Module, bool]]:
    """Record for each module that runs in the block whether all operations before its end leave cells in their places.

    So a layer of an ordinary convolutional network needs no extra passes that locate its cells. Nothing is recorded if
    the model looks at the values of the batch to choose its way, since one picture alone may take another way.
    """
    watch = OperationWatch(inputs)
    kept: dict[nn.Module, bool] = {}

    def begin(_: nn.Module) -> None:
        watch.kept = True
        watch.reads.clear()  # camkit's own tests of a batch read values, too

    def end(module: nn.Module, _: list[Tensor], __: object) -> None:
        kept[module] = kept.get(module, True) and watch.kept

    def end_model(*_: object) -> None:
        if "picture" in watch.reads:
            kept.clear()

    ends: dict[nn.Module, Callable[..., None]] = {**dict.fromkeys(modules, end), model: end_model}
    with undisturbed(), starts([model], begin), forward_hooks(ends), watch:
        yield kept
