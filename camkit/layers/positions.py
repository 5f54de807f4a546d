"""Where in the picture the elements of each tensor of a pass come from.

A ``Follower`` watches PyTorch's operations while a model runs, and repeats on positions what each operation does to
cells: it moves, joins, averages or drops them. So an exact answer needs no pass of its own, however
few cells a grid has and however wide the receptive fields are. It ends at operations that it does not know.

Positions are kept for each piece of memory and not for each tensor. So views need no attention, and what is written
into a part of a tensor is found in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Positions: TypeAlias = Float[Tensor, "coordinates ..."]
"""For each element of a tensor a weight, 1 if its position is known and else 0, and then its position along each axis
of the input, from -1 to 1, or 0 if it is not known."""

LOST: Final = None
"""The note on a tensor that was computed from the input in a way that does not show the positions."""

_COPYING = frozenset(
    [
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_reshape_copy", "_to_copy", "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "adaptive_avg_pool1d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat",
        "channel_shuffle", "clone", "col2im", "contiguous", "copy_", "cumsum", "flip", "gather",
        "grid_sampler_2d", "grid_sampler_3d", "im2col", "index", "index_add", "index_copy", "index_copy_",
        "index_put", "index_put_", "index_select", "mean", "native_channel_shuffle", "pixel_shuffle",
        "pixel_unshuffle", "repeat", "roll", "rot90", "scatter", "scatter_", "select_scatter", "slice_scatter",
        "stack", "sum", "take", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
    ]
)  # fmt: skip
"""Operations that copy or average elements, so they do the same to weighted positions."""

_KEEPING = frozenset(
    [
        "_fused_rms_norm", "_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
        "_safe_softmax", "_softmax", "cudnn_batch_norm", "log_softmax", "masked_fill", "masked_fill_",
        "native_batch_norm", "native_dropout", "native_group_norm", "native_layer_norm", "softmax", "tril",
        "triu",
    ]
)  # fmt: skip
"""Operations besides the pointwise ones that leave every element in its place."""

_AVERAGED: Mapping[str, Any] = {"amax": torch.ops.aten.mean.dim, "amin": torch.ops.aten.mean.dim}
"""Operations that choose among elements, and those that average the same elements."""

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Matrix products, and which of their arguments are the two matrices."""

_MANY = 256
"""How many notes may accumulate before those of freed memory are dropped: a few layers' worth."""

_COUNTS = 0.5
"""An operand whose positions lie at least this share as far apart as those of the other operand counts. In attention,
queries and keys lie equally far apart, and the queries come first; a product of values and weights, or of maps and a
gate, has one operand whose positions are all alike."""


class MemoryNotes:
    """Notes on pieces of memory, which all tensors that share them have."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, Any]] = {}
        self._most = _MANY

    def __contains__(self, tensor: Tensor) -> bool:
        """Tell whether there is a note on a tensor's memory."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._notes

    def get(self, tensor: Tensor) -> Any:
        """Return the note on a tensor's memory; None if there is none."""
        return self._notes[tensor.untyped_storage()._cdata][1] if tensor in self else None

    def set(self, tensor: Tensor, note: Any) -> None:
        """Replace the note on a tensor's memory."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        self._notes[storage._cdata] = StorageWeakRef(storage), note  # while it is held, the address is not used again
        if len(self._notes) > self._most:
            self._notes = {key: pair for key, pair in self._notes.items() if not pair[0].expired()}
            self._most = 2 * len(self._notes) + _MANY


def tensors_of(*values: Any) -> Iterator[Tensor]:
    """Yield all tensors in an operation's arguments or results, which are in lists and tuples at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(*value)


class Follower(TorchDispatchMode):
    """Follows the elements of a pass's tensors while it is active.

    Args:
        image: the input (N, C, *size), or a tensor that it is copied from. The pass must not build a graph.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = image.shape[2:]
        axes = torch.meshgrid(*((2 * torch.arange(side) + 1) / side - 1 for side in size), indexing="ij")
        self._input = torch.stack([torch.ones(size), *axes]).to(image.device)
        self._coordinates = len(self._input)
        self.begin(image)

    def begin(self, image: Tensor) -> None:
        """Start again with this input, and forget all else."""
        self._notes, self._vague = MemoryNotes(), MemoryNotes()
        self._write(image, self._input[:, None, None].expand(-1, *image.shape))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first operation, which takes seconds

    def is_certain(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's positions are certain; False if they come from attention alone.

        The results of attention have the positions of the queries, unless these come from another place than the
        values.
        """
        return not self._vague.get(tensor)

    def positions(self, tensor: Tensor) -> Positions | None:
        """Return the positions of a tensor's elements, which share memory; None if they are not known."""
        note: Positions | None = self._notes.get(tensor)
        if note is None or note.shape[1] * tensor.element_size() != tensor.untyped_storage().nbytes():
            return None
        strides = (note.shape[1], *tensor.stride())
        return note.as_strided((len(note), *tensor.shape), strides, tensor.storage_offset())

    def _write(self, tensor: Tensor, positions: Positions | None) -> None:
        """Set the positions of a tensor's elements."""
        if positions is None or not tensor.is_floating_point():
            self._notes.set(tensor, LOST)
            return
        if self.positions(tensor) is None:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._notes.set(tensor, torch.zeros(self._coordinates, elements, device=tensor.device))
        target = self.positions(tensor)
        if target is not None:
            target.copy_(positions)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and find the positions of its results."""
        kwargs = kwargs or {}
        derived = [tensor for tensor in tensors_of(*args, *kwargs.values()) if tensor in self._notes]
        results = func(*args, **kwargs)
        if derived:
            self._follow(func, args, kwargs, derived, list(tensors_of(results)))
        elif func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0] in self._notes:
            self._write(args[0], torch.zeros(self._coordinates, *args[0].shape, device=args[0].device))
        return results

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], derived: list[Tensor], results: list[Tensor]
    ) -> None:
        memory = {tensor.untyped_storage()._cdata for tensor in tensors_of(*args, *kwargs.values())}
        name = func._overloadpacket.__name__
        changes = func._schema.is_mutable
        if (
            not changes
            and results
            and all(result.layout is torch.strided and result.untyped_storage()._cdata in memory for result in results)
        ):
            return  # views
        content = any(not tensor.is_floating_point() for tensor in derived)
        followed = [tensor for tensor in derived if self.positions(tensor) is not None]
        attends = name.startswith("_scaled_dot_product") or (name in _PRODUCTS and len(followed) > 1)
        vague = attends or (bool(followed) and all(self._vague.get(tensor) for tensor in followed))
        for number, result in enumerate(results):
            positions = None
            if number == 0 and not content and result.is_floating_point():
                with suppress(Exception):  # a shape or an argument that is not expected here: not known
                    positions = self._result(name, func, args, kwargs, result)
            self._write(result, None if positions is None else _normalised(positions))
            self._vague.set(result, vague)

    def _result(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Positions | None:
        """Return the positions of an operation's first result; None if they are not known."""
        first = self.positions(args[0]) if isinstance(args[0], Tensor) else None
        found = None
        if name in ("fill_", "zero_"):
            found = torch.zeros(self._coordinates, *result.shape, device=result.device)
        elif name == "copy_":
            found = self._of(args[1])
            found = found.reshape(len(found), *[1] * (result.dim() - args[1].dim()), *found.shape[1:])
            found = found.expand(-1, *result.shape)
        elif name in _COPYING or name in _AVERAGED:
            found = self._copied(_AVERAGED.get(name, func), args, kwargs)
        elif name in _PRODUCTS:
            matrices = [self.positions(args[place]) for place in _PRODUCTS[name]]
            found = _product(matrices[0], matrices[1], result.shape)
        elif name in _KEEPING or torch.Tag.pointwise in func.tags:
            found = self._combined(args, result)
        elif first is None:
            found = None
        elif name.startswith("_scaled_dot_product"):
            found = first.mean(-1, keepdim=True).expand(-1, *result.shape)
        elif name == "convolution":
            found = _convolved(first, args[1], *args[3:8], channels=result.shape[1])
        elif name == "constant_pad_nd" or name.startswith(("reflection_pad", "replication_pad")):
            found = functional.pad(first, list(args[1]))
        elif name.startswith("max_pool") and name.endswith("with_indices"):
            found = _pooled(first, *args[1:])
        return found

    def _of(self, tensor: Tensor) -> Positions:
        """Return the positions of a tensor's elements; weights of 0 if they are not known."""
        positions = self.positions(tensor)
        return torch.zeros(self._coordinates, *tensor.shape, device=tensor.device) if positions is None else positions

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Positions | None:
        """Do to the weights and to each coordinate what an operation does to the values."""
        kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "layout", "device", "pin_memory")}
        if func._overloadpacket.__name__.startswith("grid_sampler"):
            args = (args[0], _Kept(args[1].float()), *args[2:])
        parts = [
            func(*tree_map(lambda value, at=at: self._part(value, at), args), **kwargs)
            for at in range(self._coordinates)
        ]
        return torch.stack([part[0] if isinstance(part, (tuple, list)) else part for part in parts])

    def _part(self, value: Any, coordinate: int) -> Any:
        if isinstance(value, _Kept):
            return value.tensor
        if isinstance(value, Tensor) and value.is_floating_point():
            return self._of(value)[coordinate].clone()
        return value

    def _combined(self, args: tuple[Any, ...], result: Tensor) -> Positions | None:
        """Return the mean positions of the operands of a pointwise operation that have as many elements."""
        operands = [value for value in tensors_of(*args) if self.positions(value) is not None]
        clear = [value for value in operands if not self._vague.get(value)]
        known = [positions for value in clear or operands if (positions := self.positions(value)) is not None]
        whole = [positions for positions in known if positions.shape[1:] == result.shape] or known
        if not whole:
            return None
        if len(whole) > 1:  # an operand that is nearly the same everywhere, such as a gate, says nothing of positions
            spreads = list(map(_spread, whole))
            whole = [part for part, spread in zip(whole, spreads, strict=True) if spread >= _COUNTS * max(spreads)]
        total = torch.zeros(self._coordinates, *result.shape, device=result.device)
        for positions in whole:
            total += positions.reshape(len(positions), *[1] * (total.dim() - positions.dim()), *positions.shape[1:])
        return total


class _Kept:
    """An argument that is passed on as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


_LEAST_WEIGHT = 1e-3
"""A position is known only if elements with a known position have at least this share in it: a smaller one is what
interpolation leaves at an edge."""


def _normalised(positions: Positions) -> Positions:
    """Return positions with weights of 0 and 1."""
    weights = positions[:1]
    known = weights > _LEAST_WEIGHT
    return torch.where(known, positions / weights.where(known, 1), 0)


def _product(first: Positions | None, second: Positions | None, shape: Sequence[int]) -> Positions | None:
    """Return the positions of a product of matrices: those of the first's rows, or of the second's columns."""
    rows = None if first is None else _normalised(first.mean(-1, keepdim=True)).expand(-1, *shape)
    columns = None if second is None else _normalised(second.mean(-2, keepdim=True)).expand(-1, *shape)
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows if _spread(rows) >= _COUNTS * _spread(columns) else columns


def _spread(positions: Positions) -> float:
    """Return how far apart the known positions are."""
    known = positions[1:].flatten(1)[:, positions[0].flatten() > 0]
    return float((known.amax(1) - known.amin(1)).amax()) if known.numel() else 0.0


def _convolved(
    positions: Positions,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    *,
    channels: int,
) -> Positions:
    """Return the positions of a convolution's results: those at the centre of the kernel.

    All of the kernel counts if kernels do not overlap. A transposed convolution leaves cells between the centres, so
    all of its kernel counts too, the centre most.
    """
    maps = positions.mean(2).flatten(0, 1)[:, None]
    kernel = torch.ones(1, 1, *weight.shape[2:], device=maps.device)
    for axis, side in enumerate(weight.shape[2:]):
        distances = (torch.arange(side, device=maps.device) - (side - 1) / 2).abs()
        line = (distances < 1).float() if stride[axis] < side else torch.ones(side, device=maps.device)
        line = side / 2 - distances if transposed else line
        kernel = kernel * line.reshape([-1 if place == axis else 1 for place in range(len(weight.shape) - 2)])
    found = torch.convolution(maps, kernel, None, stride, padding, dilation, transposed, output_padding, 1)
    found = found.reshape(*positions.shape[:2], 1, *found.shape[2:])
    return found.expand(-1, -1, channels, *found.shape[3:])


def _pooled(
    positions: Positions,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Positions | None:
    """Return the positions of the results of max pooling: the centres of the windows."""
    if max(dilation, default=1) > 1:
        return None
    pools: dict[int, Callable[..., Tensor]] = {
        1: functional.avg_pool1d,
        2: functional.avg_pool2d,
        3: functional.avg_pool3d,
    }
    maps = positions.flatten(0, positions.dim() - len(kernel) - 2)
    found = pools[len(kernel)](maps, kernel, list(stride) or kernel, padding, ceil_mode=ceil_mode)
    return found.reshape(*positions.shape[: positions.dim() - len(kernel)], *found.shape[-len(kernel) :])
