"""One pass through a model: the layers that it saves, the hooks that it sets, and what it leaves for a method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from camkit.engine.attach import contiguous_gradients, forward_hooks
from camkit.engine.cut import EntangledError, Saved, Tape, cut, not_reached
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import precise
from camkit.engine.passes import faster_format, quiet_pass
from camkit.engine.record import ModelRecord
from camkit.engine.references import KeptReferences, ReferencesFor
from camkit.errors import LayerError, listing_layers
from camkit.targets.scores import Expands, Scores, Target
from camkit.types import EVEN, Extent, LayerRef, Layout, Placement, Precision, Progress, ReferenceScores

ReadLayout: TypeAlias = Callable[[tuple[int, ...], int, tuple[int, ...]], "Layout | None"]
"""``read(shape, batch, size)`` returns the layout of an output of this shape, or None if it has no grid."""


@dataclass(frozen=True, eq=False)
class Features:
    r"""One layer's feature maps (N, C, \*grid), and for each target the tensor that weights them.

    ``by_target`` holds the gradients (N, C, \*grid), the class weights (N, C) of a linear head, or the finished weights
    of a method that was called during the pass. ``placement`` says where the cells lie on the input.
    """

    activations: Float[Tensor, "n c *grid"]
    by_target: tuple[Tensor, ...]
    placement: Placement = EVEN


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one pass: features and layouts per layer, in the order given, and scores per target.

    ``resized`` is True if the model resized and padded its input itself. ``references`` has, for each target, what the
    picture was compared with; it is empty if it was not, and None stands for a target that does not exist.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
    resized: bool = False
    references: tuple[ReferenceScores | None, ...] = ()


class NotRunError(LayerError):
    """A layer did not run in the pass."""


@dataclass
class Resized:
    """How a model resized its input itself, as detectors do: the padded size, and the part of it that is the input."""

    padded: tuple[int, ...] = ()
    extent: Extent = ()


@contextmanager
def _resizing(model: nn.Module) -> Iterator[Resized]:
    """Detect a submodule that resizes and pads images into a batch, and returns an image list as torchvision's."""
    resized = Resized()

    def note(_: nn.Module, __: list[Tensor], output: Any) -> None:
        batch = output[0] if isinstance(output, tuple) and output else output
        if isinstance(batch, dict):  # some return a key's value for any attribute, or raise a KeyError
            return
        sizes, tensors = getattr(batch, "image_sizes", None), getattr(batch, "tensors", None)
        if sizes and isinstance(tensors, Tensor):
            resized.padded = tuple(tensors.shape[2:])
            resized.extent = tuple((0.0, side / whole) for side, whole in zip(sizes[0], resized.padded, strict=True))

    with forward_hooks(dict.fromkeys(model.children(), note)):
        yield resized


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass: what the model gets, what is explained, which layers are saved, and how it is run.

    Attributes:
        model: the model; it is restored exactly, also after an exception.
        inputs: a batch of N images on the model's device.
        targets: each returns one score per image.
        modules: the module of each layer to save.
        layouts: the layouts of the layers' outputs, None for an output without a grid. ``read_layout`` reads the layout
            of any other layer from the shape of its output.
        read_layout: reads a layout from a shape.
        precision: "bf16" and "fp16" run under autocast.
        answers_alike: for each precision, whether the model gives the same results in both memory formats. None keeps
            the format of the inputs.
        record: the model's record, if it is already prepared.
        users_code: True if functions of the user run in the pass, besides the model.
        progress: told how many pictures the model has seen, for methods that need many.
        may_resize: True if the model may resize and pad its input itself, as detectors do.
        apart: False if the model mixes the pictures of a batch, so that a pass takes one at a time.
        references: returns the reference pictures for an input, for methods that need them.
        kept_references: keeps what the model returned for them.
        afresh: True if a layer's gradient has no part that passes through another layer.
    """

    model: nn.Module
    inputs: Float[Tensor, "n c *size"]
    targets: Sequence[Target]
    modules: Mapping[LayerRef, nn.Module] = field(default_factory=dict)
    layouts: Mapping[LayerRef, Layout | None] = field(default_factory=dict)
    read_layout: ReadLayout | None = None
    precision: Precision = "fp32"
    answers_alike: dict[Precision, bool] | None = None
    record: ModelRecord | None = None
    may_resize: bool = True
    users_code: bool = True
    progress: Progress | None = None
    apart: bool = True
    references: ReferencesFor | None = None
    kept_references: KeptReferences = field(default_factory=KeptReferences)
    afresh: bool = False

    def quiet(self) -> AbstractContextManager[None]:
        """Prepare one pass that leaves the model as it was; ``quiet_pass`` explains it."""
        device, users_code = self.inputs.device, self.users_code
        return quiet_pass(self.model, device, self.precision, self.record, users_code=users_code)

    def memory_format(self, inputs: Tensor) -> torch.memory_format:
        """Return the format in which the model should receive a batch."""
        if self.answers_alike is None:
            return torch.preserve_format
        return faster_format(self.model, inputs, self.precision, self.answers_alike)

    @contextmanager
    def forward(
        self,
        *contexts: AbstractContextManager[Any],
        during: AbstractContextManager[Any] | None = None,
        gradients: bool = True,
        whole: bool = False,
        leaf: bool = False,
    ) -> Iterator[Forward]:
        """Run the model once; its graph, and the contexts, last until the end of the block.

        Ctrl-C waits in the block, so that none is lost on the way into it; slow parts of it are ``interruptible``.

        Args:
            contexts: entered before the model runs.
            during: entered while the model itself runs.
            gradients, whole: as for ``cut``.
            leaf: True for a graph from the input on, which is its leaf, whatever parameters are frozen.

        Raises:
            LayerError: a layer did not run, ran several times, or has no spatial extent.
            EntangledError: as for ``cut``.
            TargetError: a target does not fit the model's output.
        """
        memory_format, count = self.memory_format(self.inputs), len(self.inputs)
        with (
            self.quiet(),
            torch.set_grad_enabled(leaf),
            ExitStack() as stack,
            cut(self.modules, gradients=gradients, whole=whole, afresh=self.afresh) as tape,
            _resizing(self.model) if self.may_resize else nullcontext(Resized()) as resized,
        ):
            entered = [stack.enter_context(context) for context in contexts]
            images = self.inputs.detach().clone().requires_grad_() if leaf else self.inputs
            with interruptible():
                with during or nullcontext() as noted:
                    output = self.model(images.clone(memory_format=memory_format))
                tape.recording = False
                layouts = self._layouts(tape, resized.padded or tuple(self.inputs.shape[2:]))
                targets: list[Target] = []
                for target in self.targets:
                    targets += target.expand(output, count) if isinstance(target, Expands) else [target]
            yield Forward(images, output, tape, layouts, resized, targets, entered, noted)

    def _layouts(self, tape: Tape, size: tuple[int, ...]) -> dict[LayerRef, Layout]:
        """Return the layout of each layer's output."""
        layouts: dict[LayerRef, Layout] = {}
        for ref in self.modules:
            if ref not in tape.layers:
                raise NotRunError(f"layer {str(ref)!r} did not run in this pass; choose another ({listing_layers()})")
            shape = tuple(tape.layers[ref].output.shape)
            layout = self.layouts.get(ref)
            if ref not in self.layouts and self.read_layout is not None:
                layout = self.read_layout(shape, len(self.inputs), size)
            if layout is None:
                raise LayerError(
                    f"layer {str(ref)!r} returned shape {shape}, which has no spatial extent that fits the input's "
                    f"{'x'.join(map(str, size))}, or is computed from another input of the model; choose another layer "
                    f"({listing_layers()}), or name that input with 'picture'"
                )
            tape.layers[ref].images = int(layout.kind == "sequence_first")
            layouts[ref] = layout
        return layouts


@dataclass(frozen=True, eq=False)
class Forward:
    """What one pass left while its graph is there.

    Attributes:
        images: what the model got; with ``leaf``, the leaf of the graph.
        output: what the model returned.
        tape: the layers' outputs.
        layouts: their layouts.
        resized: how the model resized its input.
        targets: the targets, each for itself.
        entered: what the contexts returned.
        during: what the context of the model alone returned.
    """

    images: Tensor
    output: Any
    tape: Tape
    layouts: Mapping[LayerRef, Layout]
    resized: Resized
    targets: Sequence[Target]
    entered: Sequence[Any]
    during: Any

    def score(self, target: Target) -> Scores:
        """Return a target's scores with their graph."""
        return target(self.output, len(self.images))

    def scores(self) -> tuple[Scores, ...]:
        """Return the targets' scores without a graph."""
        return tuple(detached(self.score(target)) for target in self.targets)

    def features(self, saved: Mapping[LayerRef, Saved] | None = None) -> tuple[Features, ...]:
        """Return each layer's saved maps and gradients as grids."""
        saved, extent = self.tape.layers if saved is None else saved, self.resized.extent
        return tuple(
            Features(
                to_grid(saved[ref].output.detach(), layout),
                tuple(to_grid(gradient, layout) for gradient in saved[ref].gradients),
                Placement(extent or layout.extent, layout.positions),
            )
            for ref, layout in self.layouts.items()
        )

    def captured(self, features: Sequence[Features], scores: Sequence[Scores], **more: Any) -> Capture:
        """Return what the pass leaves without its graph."""
        layouts, resized = tuple(self.layouts.values()), bool(self.resized.padded)
        return Capture(tuple(features), tuple(scores), layouts, resized, **more)


def capture(options: Pass, *, whole: bool = False) -> Capture:
    """Run the model once and differentiate its head once per target.

    There are two possible reasons for a second pass, with a graph of the ``whole`` model. The model's own forward may
    run a layer inside a no_grad block, whose end turned gradients off again; if gradients are on from the start, the
    end of the block turns them on. Or a layer returned several tensors, and one of them may have been computed from the
    maps; the whole graph connects them.

    Raises:
        LayerError: a layer did not run, ran several times, has no spatial extent, or the score does not depend on it.
        TargetError: a target does not fit the model's output.
    """
    unreached: Sequence[LayerRef] = tuple(options.modules)
    with suppress(EntangledError), options.forward(whole=whole, leaf=whole) as run, interruptible():
        scores: list[Scores] = []
        for target in run.targets:
            scored = target(run.output, len(run.images))
            if not (scored.values.requires_grad or is_absent(scored)):
                break
            if len(run.images) == 1 and run.images.device.type == "cpu" and not scores:
                contiguous_gradients(scored.values)
            scores.append(detached(scored))
            run.tape.differentiate(scored, keep_graph=len(scores) < len(run.targets), fp16=options.precision == "fp16")
        else:
            unreached = [ref for ref in options.modules if not run.tape.layers[ref].reached]
            if not unreached or any(map(is_absent, scores)):
                return run.captured(run.features(), scores)
    if whole:
        raise not_reached(unreached)
    return capture(options, whole=True)


def is_absent(scored: Scores) -> bool:
    """Tell whether the target exists in no image."""
    return scored.present is not None and not any(scored.present)


def detached(scored: Scores) -> Scores:
    """Return a target's scores without their graph."""
    return replace(scored, values=precise(scored.values.detach()), activation=None)


def to_grid(tensor: Shaped[Tensor, "*shape"], layout: Layout) -> Shaped[Tensor, "n c *grid"]:
    r"""Return a layer's output as (N, C, \*grid) without a copy if its memory allows.

    Raises:
        LayerError: the output no longer has the shape that the layout was read from.

    """
    try:
        if layout.kind == "channels_first":
            return tensor
        if layout.kind == "channels_last":
            return tensor.movedim(-1, 1)
        if layout.kind == "sequence_first":
            tensor = tensor.movedim(0, 1)
        cells = tensor if layout.kind == "tokens_last" else tensor.movedim(-1, 1)
        return on_grid(cells, layout)
    except RuntimeError as error:
        raise LayerError(
            f"a layer's output of shape {tuple(tensor.shape)} does not match its layout {str(layout)!r}; "
            "the model may have changed"
        ) from error


def on_grid(tokens: Shaped[Tensor, "*before tokens"], layout: Layout) -> Shaped[Tensor, "*before *grid"]:
    """Return the tokens of a grid, in the last axis of a tensor, as that grid."""
    cells, before = tokens[..., layout.prefix :][..., : math.prod(layout.grid)], tokens.shape[:-1]
    if not layout.order:
        return cells.reshape(*before, *layout.grid)
    cells = cells.reshape(*before, *(layout.grid[axis] for axis in layout.order))
    return cells.permute(*range(len(before)), *(len(before) + place for place in inverse(layout.order)))


def inverse(order: Sequence[int]) -> list[int]:
    """Return the places of the axes 0, 1, ... in an order of axes.

    >>> inverse((1, 2, 0))
    [2, 0, 1]
    """
    return [order.index(axis) for axis in range(len(order))]


def from_grid(maps: Shaped[Tensor, "n c *grid"], output: Shaped[Tensor, "*shape"], layout: Layout) -> Tensor:
    r"""Return feature maps (N, C, \*grid) in the layout of a layer's output: the reverse of ``to_grid``.

    Args:
        maps: the feature maps of N pictures.
        output: the layer's output for one picture; what is no cell, such as a class token, is repeated from it.
        layout: its layout.
    """
    if layout.kind == "channels_first":
        return maps
    if layout.kind == "channels_last":
        return maps.movedim(1, -1)
    repeats = [1] * output.dim()
    repeats[1 if layout.kind == "sequence_first" else 0] = len(maps)
    wide = output.repeat(repeats)
    to_grid(wide, layout).copy_(maps)
    return wide
