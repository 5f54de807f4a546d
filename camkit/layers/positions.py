"""Where in the picture the elements of each tensor of a pass come from.

A ``Follower`` watches PyTorch's operations while a model runs, and does to positions what each operation does to cells:
it moves, joins, averages or drops them. A convolution's cell lies at the centre of its kernel. So the answer is exact
however few cells a grid has and however wide the receptive fields are. It ends at operations that the follower does not
know.

The positions of a tensor have the tensor's shape, but along axes on which they do not change, such as the channels,
they are expanded from one element (stride 0). So following costs little beside the pass itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "channel_shuffle", "col2im", "cumsum",
        "flip", "gather", "grid_sampler_2d", "grid_sampler_3d", "im2col", "index", "index_add", "index_copy",
        "index_copy_", "index_put", "index_put_", "index_select", "mean", "native_channel_shuffle", "pixel_shuffle",
        "pixel_unshuffle", "repeat", "roll", "rot90", "scatter", "scatter_", "select_scatter", "slice_scatter", "stack",
        "sum", "take",
    ]
)  # fmt: skip
"""Operations that copy or average elements, so they do the same to weighted positions."""

_KEEPING = frozenset(
    [
        "_fused_rms_norm", "_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
        "_prelu_kernel", "_safe_softmax", "_softmax", "_to_copy", "celu_", "clone", "contiguous", "cudnn_batch_norm",
        "elu_", "gelu_", "hardsigmoid_", "hardswish", "hardswish_", "hardtanh_", "leaky_relu", "leaky_relu_",
        "log_sigmoid_forward", "log_softmax", "masked_fill", "masked_fill_", "mish_", "native_batch_norm",
        "native_dropout", "native_group_norm", "native_layer_norm", "selu_", "softmax",
        "threshold_", "tril", "triu",
    ]
)  # fmt: skip
"""Operations that leave every element in its place, besides those that PyTorch marks as pointwise; it marks some
activations only in late releases."""

_AVERAGED: Mapping[str, Any] = dict.fromkeys(("amax", "amin", "max", "min"), torch.ops.aten.mean.dim)
"""Operations that choose among elements, and those that average the same elements."""

_RESHAPING = frozenset(["view", "_unsafe_view", "_reshape_alias", "_reshape_copy", "reshape"])
"""Operations that divide the same elements into axes of other lengths."""

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Matrix products, and which of their arguments are the two matrices."""

_RECURRENT = frozenset(["mkldnn_rnn_layer", "_cudnn_rnn"])
"""Recurrent layers, whose results have the order of their first argument."""

_ATTENTION = ("_scaled_dot_product", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
"""The beginnings of attention operations, whose results have the order of the queries, their first argument."""

_CHOOSING = frozenset(["index", "index_select", "gather", "take"])
"""Operations that choose elements by numbers. If these depend on the picture and leave some out, no place is known."""

_MANY = 256
"""How many notes may accumulate before those of freed memory are dropped: a few layers' worth."""

_COUNTS = 0.5
"""An operand whose positions lie at least this share as far apart as those of the other operand counts. In attention,
queries and keys lie equally far apart, and the queries come first; a product of values and weights, or of maps and a
gate, has one operand whose positions are all alike."""

_LEAST_WEIGHT = 1e-3
"""A position is known only if elements with a known position have at least this share in it: a smaller one is what
interpolation leaves at an edge."""


class MemoryNotes:
    """Notes on pieces of memory, which all tensors that share them have."""

    def __init__(self) -> None:
        self._notes: dict[int | None, tuple[StorageWeakRef, Any]] = {}
        self._most = _MANY

    def __contains__(self, tensor: Tensor) -> bool:
        """Tell whether there is a note on a tensor's memory."""
        return address(tensor) in self._notes

    def get(self, tensor: Tensor) -> Any:
        """Return the note on a tensor's memory; None if there is none."""
        return self._notes.get(address(tensor), (None, None))[1]

    def set(self, tensor: Tensor, note: Any) -> None:
        """Replace the note on a tensor's memory."""
        place = address(tensor)
        if place is None:
            return
        # While the reference is held, the address is not used again.
        self._notes[place] = StorageWeakRef(tensor.untyped_storage()), note
        if len(self._notes) > self._most:
            self._notes = {key: pair for key, pair in self._notes.items() if not pair[0].expired()}
            self._most = 2 * len(self._notes) + _MANY


def address(tensor: Tensor) -> int | None:
    """Return what tells a tensor's memory from others'; None if it has none, as in ``torch.func.vmap``."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def tensors_of(*values: Any) -> Iterator[Tensor]:
    """Yield all tensors in an operation's arguments or results, which are in lists and tuples at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(*value)


@dataclass(eq=False)
class _Note:
    """What is known of the tensors that share a piece of memory.

    Attributes:
        places: the positions of each of these tensors, by which elements it shows; or of each element of the memory; or
            LOST.
        vague: True if they come from attention alone.
    """

    places: dict[Any, Positions] | Positions | None
    vague: bool = False


def _positions_in(note: _Note, tensor: Tensor) -> Positions | None:
    """Return the positions of a tensor's elements; None if they are not known."""
    if isinstance(note.places, dict):
        return note.places.get(_geometry(tensor))
    if note.places is LOST:
        return None
    strides = (note.places.shape[1], *tensor.stride())
    return note.places.as_strided((len(note.places), *tensor.shape), strides, tensor.storage_offset())


@functools.cache
def _kind_of(func: Any) -> tuple[str, bool, bool]:
    """Return an operation's name, whether it changes its operands, and whether it leaves each element in its place."""
    name = func._overloadpacket.__name__
    return name, func._schema.is_mutable, name in _KEEPING or torch.Tag.pointwise in func.tags


class Follower(TorchDispatchMode):
    """Follows the elements of a pass's tensors while it is active.

    Args:
        image: the input (N, C, *size), or a tensor that it is copied from. The pass must not build a graph.
    """

    def __init__(self, image: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = image.shape[2:]
        axes = torch.meshgrid(*((2 * torch.arange(side) + 1) / side - 1 for side in size), indexing="ij")
        self._coordinates = 1 + len(size)
        self._notes = MemoryNotes()
        pixels = torch.stack([torch.ones(size), *axes]).to(image.device)
        self._write(image, pixels[:, None, None].expand(-1, *image.shape))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first operation, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and find the positions of its results."""
        results = func(*args, **(kwargs or {}))
        self._follow(func, args, kwargs or {}, results)
        return results

    def is_computed(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was computed from the input."""
        return tensor in self._notes

    def is_certain(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's positions are certain; False if they come from attention alone.

        The results of attention have the positions of the queries, unless these come from another place than the
        values.
        """
        note = self._notes.get(tensor)
        return note is None or not note.vague

    def positions(self, tensor: Tensor) -> Positions | None:
        """Return the positions of a tensor's elements; None if they are not known."""
        note = self._notes.get(tensor)
        return None if note is None else _positions_in(note, tensor)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        operands = list(tensors_of(*args, *kwargs.values()))
        noted = [(tensor, note) for tensor in operands if (note := self._notes.get(tensor)) is not None]
        if not noted:
            return
        found, (name, changes, keeps) = list(tensors_of(results)), _kind_of(func)
        if keeps and len(noted) == 1 and found and found[0].shape == noted[0][0].shape and not changes:
            self._keep(*noted[0], found)
            return
        memory = {address(tensor) for tensor in operands} - {None}
        if not changes and found and all(address(result) in memory for result in found):
            self._view(func, name, args, kwargs, found)
            return
        followed = [note for tensor, note in noted if _positions_in(note, tensor) is not None]
        attends = name.startswith(_ATTENTION) or (name in _PRODUCTS and len(followed) > 1)
        vague = attends or (bool(followed) and all(note.vague for note in followed))
        positions = None
        if found and found[0].is_floating_point():
            if not all(tensor.is_floating_point() for tensor, _ in noted):
                chooses = name in _CHOOSING and found[0].numel() < noted[0][0].numel()
                positions = self._nowhere(found[0]) if chooses else None
            elif not name.endswith("_backward"):
                with suppress(Exception):  # a shape or an argument that is not expected here: not known
                    positions = self._result(name, func, args, kwargs, found[0])
            positions = None if positions is None else positions.expand(-1, *found[0].shape)
        for number, result in enumerate(found):
            self._write(result, positions if number == 0 else None, vague=vague, changed=changes)

    def _keep(self, tensor: Tensor, note: _Note, results: list[Tensor]) -> None:
        """Give the first result the positions of the only operand."""
        positions = _positions_in(note, tensor)
        if positions is None or not (tensor.is_floating_point() and results[0].is_floating_point()):
            self._notes.set(results[0], _Note(LOST, note.vague))
        else:
            self._notes.set(results[0], _Note({_geometry(results[0]): positions}, note.vague))
        for result in results[1:]:
            self._notes.set(result, _Note(LOST, note.vague))

    def _view(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        """Give the views of a tensor their part of its positions."""
        note = self._notes.get(args[0])
        positions = None if note is None else _positions_in(note, args[0])
        if note is None or not isinstance(note.places, dict) or positions is None:
            return
        with suppress(Exception):  # an operation on the memory itself, such as as_strided: not known
            if name in _RESHAPING:
                views = [_reshaped(positions, results[0].shape)]
            else:
                by_coordinate = [list(tensors_of(func(part, *args[1:], **kwargs))) for part in positions]
                views = [_stacked(parts) for parts in zip(*by_coordinate, strict=True)]
            for result, view in zip(results, views, strict=True):
                note.places[_geometry(result)] = view

    def _write(
        self, tensor: Tensor, positions: Positions | None, *, vague: bool = False, changed: bool = False
    ) -> None:
        """Set the positions of a tensor's elements. ``changed`` says that the tensor was there before."""
        if positions is None or not tensor.is_floating_point():
            self._notes.set(tensor, _Note(LOST, vague))
            return
        note = self._notes.get(tensor) or _Note(LOST, vague)
        before, note.vague = _positions_in(note, tensor), vague
        if before is not None and _are_equal(before, positions):
            return
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        # A tensor that was there before may be a view of one whose positions are not known yet.
        alone = not changed if note.places is LOST else isinstance(note.places, dict) and len(note.places) == 1
        if tensor.numel() == elements and alone:
            self._notes.set(tensor, _Note({_geometry(tensor): positions}, vague))
            return
        if not isinstance(note.places, Tensor):  # other views of the memory have positions too
            note.places = self._of_memory(tensor, note.places or {}, elements)
            self._notes.set(tensor, note)
        target = _positions_in(note, tensor)
        assert target is not None
        target.copy_(positions)

    def _of_memory(self, tensor: Tensor, note: dict[Any, Positions], elements: int) -> Positions:
        """Return the positions of each element of the memory that a tensor shares with others."""
        flat = torch.zeros(self._coordinates, elements, device=tensor.device)
        for (offset, shape, strides), positions in note.items():
            if math.prod(shape) == elements:
                flat.as_strided((len(flat), *shape), (elements, *strides), offset).copy_(positions)
                break
        return flat

    def _result(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Positions | None:
        """Return the positions of an operation's first result; None if they are not known."""
        first = self.positions(args[0]) if isinstance(args[0], Tensor) else None
        found = None
        if name in ("fill_", "zero_") or (name.startswith(_ATTENTION) and args[0] not in self._notes):
            found = self._nowhere(result)
        elif name == "copy_":
            found = _broadcast(self._of(args[1]), result.dim())
        elif name == "cat":
            found = self._joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif name in _COPYING or name in _AVERAGED:
            found = self._copied(_AVERAGED.get(name, func), args, kwargs)
        elif name in _PRODUCTS:
            matrices = [self.positions(args[place]) for place in _PRODUCTS[name]]
            found = _product(matrices[0], matrices[1], result.shape)
        elif _kind_of(func)[2]:
            found = self._combined(args, result)
        elif first is not None:
            found = _of_first(name, first, args, result.shape)
        return found

    def _of(self, tensor: Tensor) -> Positions:
        """Return the positions of a tensor's elements; weights of 0 if they are not known."""
        positions = self.positions(tensor)
        if positions is not None:
            return positions
        return self._nowhere(tensor)

    def _nowhere(self, tensor: Tensor) -> Positions:
        """Return positions of which none is known."""
        nowhere = torch.zeros(self._coordinates, *[1] * tensor.dim(), device=tensor.device)
        return nowhere.expand(-1, *tensor.shape)

    def _joined(self, tensors: Sequence[Tensor], axis: int) -> Positions:
        """Return the positions of joined tensors."""
        parts = [self._of(tensor) for tensor in tensors if tensor.numel()]
        axis = axis % (parts[0].dim() - 1) + 1
        alike = all(_are_equal(part.narrow(axis, 0, 1), parts[0].narrow(axis, 0, 1)) for part in parts)
        if alike and all(_is_same(part, axis) for part in parts):
            return parts[0].narrow(axis, 0, 1)
        for other in range(1, parts[0].dim()):
            if other != axis and all(_is_same(part, other) for part in parts):
                parts = [part.narrow(other, 0, 1) for part in parts]
        return _shrunk(torch.cat(parts, axis))

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Positions | None:
        """Do to the weights and to each coordinate what an operation does to the values."""
        name = func._overloadpacket.__name__.strip("_")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "layout", "device", "pin_memory")}
        if name.startswith("grid_sampler"):
            args = (args[0], _Kept(args[1].float()), *args[2:])
        axes: Sequence[int] | None = ()
        if name.startswith("adaptive"):
            axes = (1, 2)
        elif name in ("mean", "sum"):
            axes = None
        parts = [
            func(*tree_map(lambda value, at=at: self._part(value, at, axes), args), **kwargs)
            for at in range(self._coordinates)
        ]
        return _normalised(_shrunk(_stacked([part[0] if isinstance(part, (tuple, list)) else part for part in parts])))

    def _part(self, value: Any, coordinate: int, axes: Sequence[int] | None) -> Any:
        if isinstance(value, _Kept):
            return value.tensor
        if isinstance(value, Tensor) and value.is_floating_point():
            return _compact(self._of(value), axes)[coordinate].clone()
        return value

    def _combined(self, args: tuple[Any, ...], result: Tensor) -> Positions | None:
        """Return the mean positions of the operands of a pointwise operation that have as many elements."""
        noted = [(note, value) for value in tensors_of(*args) if (note := self._notes.get(value)) is not None]
        operands = [(note, positions) for note, value in noted if (positions := _positions_in(note, value)) is not None]
        known = [positions for note, positions in operands if not note.vague] or [part for _, part in operands]
        whole = [positions for positions in known if positions.shape[1:] == result.shape] or known
        if not whole:
            return None
        if all(_are_equal(part, whole[0]) for part in whole):
            return _broadcast(whole[0], result.dim())
        # An operand that is nearly the same everywhere, such as a gate, says nothing of positions.
        spreads = list(map(_spread, whole))
        whole = [part for part, spread in zip(whole, spreads, strict=True) if spread >= _COUNTS * max(spreads)]
        parts = (_compact(_broadcast(part, result.dim())) for part in whole)
        return _normalised(functools.reduce(torch.add, parts))


class _Kept:
    """An argument that is passed on as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _geometry(tensor: Tensor) -> tuple[Any, torch.Size, tuple[int, ...]]:
    """Return which elements of its memory a tensor shows, and how."""
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_same(positions: Positions, axis: int) -> bool:
    """Tell whether positions do not change along an axis."""
    return positions.shape[axis] == 1 or positions.stride(axis) == 0


def _compact(positions: Positions, axes: Sequence[int] | None = None) -> Positions:
    """Return positions with a length of 1 along those of the axes along which they do not change."""
    for axis in range(1, positions.dim()) if axes is None else axes:
        if axis < positions.dim() and positions.stride(axis) == 0 and positions.shape[axis] > 1:
            positions = positions.narrow(axis, 0, 1)
    return positions


def _shrunk(positions: Positions) -> Positions:
    """Return positions that one element stands for along each axis along which all are equal."""
    shape = positions.shape
    for axis in range(1, positions.dim()):
        first = positions.narrow(axis, 0, 1)
        if positions.shape[axis] > 1 and (_is_same(positions, axis) or bool((positions == first).all())):
            positions = first
    return positions.expand(shape)


def _stacked(parts: Sequence[Tensor]) -> Positions:
    """Stack coordinates, and keep axes along which none changes."""
    shape = parts[0].shape
    axes = [axis for axis in range(len(shape)) if shape[axis] > 1 and all(part.stride(axis) == 0 for part in parts)]
    for axis in axes:
        parts = [part.narrow(axis, 0, 1) for part in parts]
    return torch.stack(tuple(parts)).expand(-1, *shape)


def _broadcast(positions: Positions, dimensions: int) -> Positions:
    """Return positions with more axes, in front of the others."""
    return positions[(slice(None), *[None] * (dimensions + 1 - positions.dim()))]


def _are_equal(one: Positions, other: Positions) -> bool:
    if one is other:
        return True
    return one.shape == other.shape and torch.equal(*torch.broadcast_tensors(_compact(one), _compact(other)))


def _normalised(positions: Positions) -> Positions:
    """Return positions with weights of 0 and 1."""
    shape, positions = positions.shape, _compact(positions)
    weights = positions[:1]
    known = weights > _LEAST_WEIGHT
    return torch.where(known, positions / weights.where(known, 1), 0).expand(shape)


def _mean(positions: Positions, axis: int) -> Positions:
    """Return the mean positions along an axis, which keeps a length of 1."""
    if _is_same(positions, axis):
        return positions.narrow(axis, 0, 1)
    return _normalised(_compact(positions).mean(axis, keepdim=True))


def _spread(positions: Positions) -> float:
    """Return how far apart the known positions are."""
    positions = _compact(positions)
    known = positions[1:].flatten(1)[:, positions[0].flatten() > 0]
    return float((known.amax(1) - known.amin(1)).amax()) if known.numel() else 0.0


def _reshaped(positions: Positions, shape: Sequence[int]) -> Positions:
    """Return positions with other axes; those along which nothing changes stay short if they do not join others."""
    before, lengths = positions.shape[1:], list(shape)
    small: list[int] = []
    place = 0
    for first, count, after in _groups(before, lengths):
        same = all(_is_same(positions, axis + 1) for axis in range(first, first + count))
        for axis in range(first, first + count):
            positions = positions.narrow(axis + 1, 0, 1) if same else positions
        small += [1] * after if same else lengths[place : place + after]
        place += after
    return positions.reshape(len(positions), *small).expand(-1, *shape)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Divide two shapes into the shortest parts with equally many elements.

    Yields:
        The first axis before, and the number of axes before and after.
    """
    start = end = taken = 0
    while start < len(before) or taken < len(after):
        end = min(start + 1, len(before))
        count = min(taken + 1, len(after))
        while math.prod(before[start:end]) != math.prod(after[taken:count]):
            if count < len(after) and math.prod(before[start:end]) > math.prod(after[taken:count]):
                count += 1
            elif end < len(before):
                end += 1
            else:
                count += 1
        yield start, end - start, count - taken
        start, taken = end, count


def _of_first(name: str, first: Positions, args: tuple[Any, ...], shape: torch.Size) -> Positions | None:
    """Return the positions of a result of this shape that depend on the first argument's alone."""
    if name in _RESHAPING:
        return _reshaped(first, shape)
    if name.startswith(_ATTENTION) or name in _RECURRENT:
        return _mean(first, -1)
    found = None
    if name == "convolution":
        found = _convolved(_mean(first, 2), args[1].shape[2:], *args[3:8], size=shape[2:])
    elif "upsample" in name:
        found = _resized(first, shape, aligned="nearest" not in name and args[2] is True)
    elif name == "constant_pad_nd" or name.startswith(("reflection_pad", "replication_pad")):
        found = _padded(first, list(args[1]))
    elif name.startswith(("max_pool", "avg_pool")):
        found = _pooled(first, *args[1:], dilated=name.startswith("max_pool"), size=shape)
    return found


def _product(first: Positions | None, second: Positions | None, shape: Sequence[int]) -> Positions | None:
    """Return the positions of a product of matrices: those of the first's rows, or of the second's columns."""
    rows = None if first is None else _mean(first, -1).expand(-1, *shape)
    columns = None if second is None else _mean(second, -2).expand(-1, *shape)
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows if _spread(rows) >= _COUNTS * _spread(columns) else columns


def _convolved(
    positions: Positions,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Sequence[int],
    *,
    size: Sequence[int],
) -> Positions:
    """Return the positions of a convolution's results, from its channels' mean positions.

    A transposed convolution puts its results between the centres of its kernels.
    """
    positions = _compact(positions, (1, 2))
    if not transposed:
        return _windowed(positions, kernel, stride, padding, dilation, size)
    for axis, cells in enumerate(size):
        start = padding[axis] - dilation[axis] * (kernel[axis] - 1) / 2
        positions = _at(positions, 3 + axis, start / stride[axis], 1 / stride[axis], cells)
    return positions


def _resized(positions: Positions, shape: Sequence[int], *, aligned: bool) -> Positions:
    """Return the positions of resized maps (N, C, *size).

    ``aligned`` says that the middles of the outermost cells stay in place, instead of their edges.
    """
    positions = _compact(positions, (1, 2))
    for axis, (before, after) in enumerate(zip(positions.shape[3:], shape[2:], strict=True), start=3):
        step = (before - 1) / max(1, after - 1) if aligned else before / after
        positions = _at(positions, axis, 0.0 if aligned else step / 2 - 0.5, step, after)
    return positions


def _pooled(
    positions: Positions,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Any = (1,),
    *_: Any,
    dilated: bool,
    size: Sequence[int],
) -> Positions:
    """Return the positions of the results of pooling."""
    steps = dilation if dilated else (1,)
    return _windowed(_compact(positions, (1, 2)), kernel, stride or kernel, padding, steps, size[-len(kernel) :])


def _windowed(
    positions: Positions,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Positions:
    """Return the positions of windows along the last axes: those at their centres, or their means if none overlap."""
    rank = len(kernel)
    first = positions.dim() - rank
    strides, paddings, dilations = (
        tuple(part) * (rank if len(part) == 1 else 1) for part in (stride, padding, dilation)
    )
    whole = [(cells - 1) * step + side for cells, step, side in zip(size, strides, kernel, strict=True)]
    fit = all(end <= length for end, length in zip(whole, positions.shape[first:], strict=True))
    if fit and not any(paddings) and all(step >= side for step, side in zip(strides, kernel, strict=True)):
        for axis, side in enumerate(kernel):
            positions = positions.unfold(first + axis, side, strides[axis]).mean(-1)
        return _normalised(positions)
    for axis, cells in enumerate(size):
        start = dilations[axis] * (kernel[axis] - 1) / 2 - paddings[axis]
        positions = _at(positions, first + axis, float(start), float(strides[axis]), cells)
    return positions


def _at(positions: Positions, axis: int, start: float, step: float, cells: int) -> Positions:
    """Interpolate positions along an axis at evenly spaced places.

    The result is not known beside the ends, and beside elements that are not known.
    """
    side = positions.shape[axis]
    if (start, step, cells) == (0, 1, side):
        return positions
    places = start + step * torch.arange(cells, device=positions.device)
    before, after = places.floor(), places.ceil()
    inside = ((before >= 0) & (after < side)).to(positions.dtype)
    low, high = (positions.index_select(axis, ends.clamp(0, side - 1).long()) for ends in (before, after))
    shape = [-1 if place == axis else 1 for place in range(positions.dim())]
    known = low[:1] * high[:1] * inside.reshape(shape)
    return torch.where(known > 0, torch.lerp(low, high, (places - before).reshape(shape)), 0)


def _padded(positions: Positions, amounts: Sequence[int]) -> Positions:
    """Return the positions of a padded tensor; those of the padding are not known."""
    kept = positions.dim() - len(amounts) // 2
    return functional.pad(_compact(positions, range(1, kept)), list(amounts))
