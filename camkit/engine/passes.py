"""Run a model once without changing it: the precision and memory format, the layers to save, and the result.

And how many pictures run at once: ``in_parts`` halves the passes of methods that need many, and
``BatchExplainer`` halves batches. In some models, the pictures of a batch affect each other: a loop over the
pictures calls a layer once for each, a normalisation without running statistics mixes the pictures, and a model that
sorts its batch returns feature maps in another order.
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from camkit.engine.attach import contiguous_gradients, forward_hooks, precise, tensors_in
from camkit.engine.cut import EntangledError, Saved, Tape, cut, not_reached
from camkit.engine.guard import PACKAGES, ModelRecord, guarded, interruptible, weight_marks
from camkit.errors import LayerError, listing_layers
from camkit.targets.scores import Expands, Scores, Target, main_tensor
from camkit.types import EVEN, Extent, LayerRef, Layout, Placement, Precision, Progress, ReferenceScores

T = TypeVar("T")


def keep_last(kept: dict[Any, T], key: Hashable, value: T, most: int) -> T:
    """Keep a value under a key, drop the oldest ones if there are more than ``most``, and return the value."""
    kept[key] = value
    while len(kept) > most:
        kept.pop(next(iter(kept), None), None)  # another thread may remove it at the same time
    return value


@dataclass(frozen=True, eq=False)
class ReferencePictures:
    """Reference pictures as a model receives them, and what they are, as a phrase."""

    inputs: Float[Tensor, "m c *size"]
    words: str

    @functools.cached_property
    def key(self) -> str:
        """A checksum of the pictures."""
        return hashlib.blake2b(self.inputs.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


ReferencesFor: TypeAlias = Callable[[Tensor], ReferencePictures]
"""``references(image)`` returns the reference pictures for a model's input (1, c, *size)."""


@dataclass(frozen=True, eq=False)
class ReferenceMaps:
    """The layer's whole outputs for M reference pictures, joined; and the model's outputs, pass by pass."""

    outputs: Tensor
    answers: tuple[tuple[Any, int], ...]

    def __len__(self) -> int:
        """Return how many reference pictures there are."""
        return sum(count for _, count in self.answers)

    def scores(self, target: Target) -> Float[Tensor, " m"]:
        """Return the score of each reference picture."""
        return torch.cat([precise(target(output, count).values.detach()) for output, count in self.answers])


def kept_reference_maps(record: ModelRecord, key: Hashable, run: Callable[[], ReferenceMaps]) -> ReferenceMaps:
    """Return the maps that are kept under a key while the model's weights are the same, or else what ``run`` returns.

    Those of the last reference pictures, layers and sizes are kept.
    """
    marks, kept = weight_marks(record.modules()), record.reference_maps.pop(key, None)
    if kept is None or kept[0] != marks:
        kept = marks, run()
    # Those of 16 pictures take 50 MB at ResNet-50's first stage, and 2 MB at its last.
    maps: ReferenceMaps = keep_last(record.reference_maps, key, kept, 4)[1]
    return maps


DTYPES = {"bf16": torch.bfloat16, "bf16-forced": torch.bfloat16, "fp16": torch.float16}

SAME, SAME_16_BITS = 1e-3, 5e-2
"""How much results may differ between memory formats and batch sizes, as a share of the largest value: a little more
than rounding. The second is for precisions of 16 bits."""


def usable_precision(precision: Precision, device: torch.device) -> tuple[Precision, str]:
    """Return the precision to run in, and a message for the user if it differs from the given one.

    Args:
        precision: the user's choice.
        device: the model's device.
    """
    if precision == "bf16" and device.type == "cpu" and not _cpu_has_bf16():
        return "fp32", (
            "this CPU has no units for bf16, so bf16 would take several times as long as fp32; camkit uses fp32 "
            "instead (precision 'bf16-forced' uses bf16 anyway)"
        )
    return precision, ""


def _cpu_has_bf16() -> bool:
    """Tell whether the CPU computes in bf16; older versions of PyTorch report this for x86 only."""
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
    """Prepare one pass: evaluation mode, no graph, the given precision. Everything is undone at the end.

    It works inside the caller's ``no_grad``, ``inference_mode`` and ``autocast``, and does not share autocast's weight
    cache. Ctrl-C waits in the block; run the model inside ``interruptible``.

    Args:
        model: the model; it is restored exactly.
        device: the model's device.
        precision: "fp32", or "bf16" or "fp16" under autocast.
        record: the model's record, if it is already prepared; a new one walks through all modules.
        users_code: True if functions of the user run inside, besides the model.
    """
    with (
        guarded(model, record, users_code=users_code),
        torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch.no_grad(),
        autocasting(device, precision),
    ):
        yield


def autocasting(device: torch.device, precision: Precision = "fp32") -> AbstractContextManager[None]:
    """Return a context in this precision, whatever the caller's ``autocast`` is, and without sharing its cache."""
    if precision not in DTYPES and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES, cache_enabled=False)


def faster_format(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    precision: Precision,
    record: ModelRecord | None,
) -> torch.memory_format:
    """Return the memory format in which the model should receive a batch.

    Convolutions on a CPU are faster with the channels last, without any change to the model: on ResNet-50, 2 pictures
    take 0.96 of the processor time and 4 take 0.90; on MobileNetV2, 0.90 and 0.82. For one picture, the two passes that
    compare the formats cost more than it saves. A model that gives different results in this format gets the ordinary
    one.

    Args:
        model: the model; it is restored exactly.
        inputs: the batch.
        precision: the precision of the pass.
        record: the model's record, which remembers whether the model gives the same results in both formats; one image
            decides this. None keeps the format of the inputs.
    """
    if record is None or inputs.dim() != 4 or inputs.device.type != "cpu" or len(inputs) < 2:
        return torch.preserve_format
    if precision not in record.answers_alike:
        convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
        record.answers_alike[precision] = convolves and _same_in_both_formats(model, inputs[:1], precision, record)
    return torch.channels_last if record.answers_alike[precision] else torch.preserve_format


def _same_in_both_formats(model: nn.Module, image: Tensor, precision: Precision, record: ModelRecord) -> bool:
    """Tell whether the model's outputs for one image are equal in both formats, up to rounding."""
    tolerance = SAME if precision == "fp32" else SAME_16_BITS
    with quiet_pass(model, image.device, precision, record), interruptible():
        try:
            ordinary = [tensor.double() for tensor in tensors_in(model(image.clone()))]
            channels_last = tensors_in(model(image.clone(memory_format=torch.channels_last)))
        except Exception:  # a model may raise anything if it does not expect this memory order
            return False
        return len(ordinary) == len(channels_last) and all(
            are_alike(*pair, tolerance) for pair in zip(ordinary, channels_last, strict=True)
        )


def are_alike(expected: Tensor, values: Tensor, tolerance: float) -> bool:
    """Tell whether two tensors differ by at most a share of the largest expected value."""
    if expected.shape != values.shape:
        return False
    largest = float(expected.nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(expected.double(), values.double(), rtol=0, atol=tolerance * largest, equal_nan=True)


def differentiated(run: Callable[[], T]) -> T:
    """Return what ``run`` returns. If a backward pass in it needs overwritten tensors, run it again with copies.

    A detector may overwrite the results of its sigmoids, for example. PyTorch refuses to differentiate such a model,
    unless it keeps copies of the tensors.
    """
    try:
        return run()
    except RuntimeError as error:
        if not is_overwriting(error):
            raise
    with keeping_overwritten():
        return run()


def is_overwriting(error: Exception) -> bool:
    """Tell whether a backward pass failed because the model has overwritten a tensor that it needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def keeping_overwritten() -> AbstractContextManager[None]:
    """Return a context in which each operation keeps a copy of what its backward pass needs.

    PyTorch's ``allow_mutation_on_saved_tensors`` copies less, but has one switch for all threads.
    """
    return cast("AbstractContextManager[None]", saved_tensors_hooks(_kept, lambda kept: kept))


def _kept(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


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

    ``references`` has, for each target, what the picture was compared with; it is empty if it was not, and None stands
    for a target that does not exist.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
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
        record: the model's record, if it is already prepared.
        progress: told how many pictures the model has seen, for methods that need many.
        apart: False if the model mixes the pictures of a batch, so that a pass takes one at a time.
        references: returns the reference pictures for an input, for methods that need them.
        afresh: True if a layer's gradient has no part that passes through another layer.
    """

    model: nn.Module
    inputs: Float[Tensor, "n c *size"]
    targets: Sequence[Target]
    modules: Mapping[LayerRef, nn.Module] = field(default_factory=dict)
    layouts: Mapping[LayerRef, Layout | None] = field(default_factory=dict)
    read_layout: ReadLayout | None = None
    precision: Precision = "fp32"
    record: ModelRecord | None = None
    progress: Progress | None = None
    apart: bool = True
    references: ReferencesFor | None = None
    afresh: bool = False

    def quiet(self) -> AbstractContextManager[None]:
        """Prepare one pass that leaves the model as it was; ``quiet_pass`` explains it."""
        users_code = not self.targets or not all(target.for_threads for target in self.targets)
        return quiet_pass(self.model, self.inputs.device, self.precision, self.record, users_code=users_code)

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
        count = self.inputs.shape[0]
        memory_format = faster_format(self.model, self.inputs, self.precision, self.record)
        may_resize = self.record is None or self.record.may_resize
        with (
            self.quiet(),
            torch.set_grad_enabled(leaf),
            ExitStack() as stack,
            cut(self.modules, gradients=gradients, whole=whole, afresh=self.afresh) as tape,
            _resizing(self.model) if may_resize else nullcontext(Resized()) as resized,
        ):
            entered = [stack.enter_context(context) for context in contexts]
            images = self.inputs.detach().clone().requires_grad_() if leaf else self.inputs
            with interruptible():
                with during or nullcontext() as noted:
                    output = self.model(images.clone(memory_format=memory_format))
                tape.recording = False
                if self.record is not None:
                    self.record.may_resize = bool(resized.padded)
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
                layout = self.read_layout(shape, self.inputs.shape[0], size)
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
        return target(self.output, self.images.shape[0])

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
        return Capture(tuple(features), tuple(scores), tuple(self.layouts.values()), **more)


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
            scored = target(run.output, run.images.shape[0])
            if not (scored.values.requires_grad or is_absent(scored)):
                break
            if run.images.shape[0] == 1 and run.images.device.type == "cpu" and not scores:
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
    places = (len(before) + layout.order.index(axis) for axis in range(len(layout.order)))
    return cells.permute(*range(len(before)), *places)


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


_AXES = (1, 2, 3, -1)
"""The axes over which a softmax or flattening leaves pictures apart, whatever its input."""


_STEPS = (1, 3, 0, 2)
"""How many steps of a ramp each version of a picture gets: neither in rising nor in falling order, since a model may
sort its pictures by brightness."""


def unlike(values: Float[Tensor, "*shape"], steps: int = 1) -> Float[Tensor, "*shape"]:
    """Return the values plus a ramp over all elements, from 0 to ``steps`` times the largest absolute value."""
    largest = values.detach().abs().amax()
    ramp = torch.linspace(0, steps, values.numel(), device=values.device).view(values.shape).to(values)
    return values + ramp * torch.where(largest > 0, largest, 1)


def versions(values: Float[Tensor, "1 *shape"]) -> list[Float[Tensor, "1 *shape"]]:
    """Return four different versions of a picture or of its feature maps; one of them is unchanged."""
    return [unlike(values, steps) for steps in _STEPS]


def keeps_pictures_apart(
    model: nn.Module,
    image: Float[Tensor, "1 c *size"],
    layers: Mapping[LayerRef, nn.Module],
    record: ModelRecord,
    at_once: int = len(_STEPS),
) -> bool | None:
    """Tell whether a picture has the same feature maps and output alone as in a batch, wherever it is in the batch.

    None also means no: the model gives one answer for a whole batch, for example for the pictures of one patient.

    This runs at most four passes over seven pictures, and none if all modules are of packages that are known to keep
    pictures apart.

    Args:
        model: the model; it is restored exactly.
        image: one picture.
        layers: the layers whose feature maps are compared.
        record: the model's record.
        at_once: how many pictures the model will get at once. If it is two, the trial batch has two as well, in both
            orders, because more may not fit into memory.
    """
    if not record.runs_own_code and not any(map(_mixes, record.modules())):
        return True
    pictures = versions(image)[: 2 if at_once == 2 else None]
    count = len(pictures)
    # A model that sorts may leave two in their places, but not three of four.
    orders = [range(2), range(2)[::-1]] if count == 2 else [range(count)]

    def run(batch: Tensor) -> tuple[list[Tensor], list[Tensor], Any]:
        with quiet_pass(model, image.device, "fp32", record), cut(layers, gradients=False) as tape, interruptible():
            output = model(batch.clone())
        shape = getattr(main_tensor(output), "shape", ())
        return [tape.layers[ref].output for ref in layers], list(tensors_in(output)), shape

    try:
        alone = [run(picture) for picture in pictures[:-1]]
    except Exception:  # a model made for batches of another size may raise anything
        return True
    try:
        together = [run(torch.cat([pictures[number] for number in order])) for order in orders]
    except Exception as error:  # so may one made for single pictures
        return is_out_of_memory(error)
    tolerance = SAME_16_BITS if record.placement[1] in (torch.float16, torch.bfloat16) else SAME
    for order, (all_maps, all_outputs, all_shape) in zip(orders, together, strict=True):
        for number, (maps, outputs, shape) in enumerate(alone):
            if shape and shape == all_shape and len(outputs) == len(all_outputs):
                return None
            place = order.index(number)
            # Some of what a model returns need not have one row for each picture, such as a loss.
            pairs = [*zip(outputs, all_outputs, strict=False)] if len(outputs) == len(all_outputs) else []
            rows = [pair for pair in pairs if _axis(count, *pair) is not None]
            compared = [*zip(maps, all_maps, strict=True), *rows]
            if (pairs and not rows) or not all(_is_at(place, count, *pair, tolerance) for pair in compared):
                return False
    return True


def _mixes(module: nn.Module) -> bool:
    """Tell whether a module may mix the pictures of a batch."""
    kind = type(module).__module__
    if isinstance(module, _BatchNorm):
        return module.running_mean is None
    if kind.startswith("torch.nn.modules."):
        axes = [getattr(module, name, 1) for name in ("dim", "start_dim")]
        return not getattr(module, "batch_first", True) or any(axis not in _AXES for axis in axes)
    return not kind.startswith(PACKAGES)


def _axis(count: int, alone: Tensor, together: Tensor) -> int | None:
    """Return the axis along which the values of ``count`` pictures are longer than those of one, or None."""
    for axis, length in enumerate(alone.shape):
        if together.shape == (*alone.shape[:axis], count * length, *alone.shape[axis + 1 :]) and alone.numel():
            return axis
    return None


def _is_at(place: int, count: int, alone: Tensor, together: Tensor, tolerance: float) -> bool:
    """Tell whether one picture's values are at its place in those of ``count`` pictures."""
    axis = _axis(count, alone, together)
    if axis is None:
        return False
    own = together.narrow(axis, place * alone.shape[axis], alone.shape[axis])
    return are_alike(alone, own, tolerance)


_MOST_AT_ONCE = 4
"""At most this many passes run at the same time on a CPU; more cores work together on each."""


def passes_at_once(record: ModelRecord) -> int:
    """Return how many passes through a model may run at the same time; each gets a part of the cores.

    On a CPU, two passes on a core each take less time than one after the other on both. A model with code or hooks of
    the user's own may be unable to run in two threads.
    """
    if record.placement[0].type != "cpu" or record.runs_own_code:
        return 1
    return min(torch.get_num_threads(), _MOST_AT_ONCE)


def cores_of_a_pass() -> int:
    """Return how many cores each of several passes gets that run at the same time."""
    return torch.get_num_threads() // min(torch.get_num_threads(), _MOST_AT_ONCE)


def in_parts(count: int, at_once: int, run: Callable[[range], None]) -> int:
    """Run ``count`` pictures through the model, ``at_once`` per pass, and half as many whenever memory runs out.

    Args:
        count: how many pictures there are.
        at_once: the most pictures of one pass.
        run: runs the pictures with these numbers.

    Returns:
        The most pictures of one pass from now on.
    """
    done = 0
    while done < count:
        part = range(done, min(done + at_once, count))
        try:
            run(part)
        except RuntimeError as error:
            if len(part) == 1 or not is_out_of_memory(error):
                raise
            at_once = len(part) // 2
            continue
        done = part.stop
    return at_once


@contextmanager
def ignoring_errors(*but: type[Exception]) -> Iterator[None]:
    """Ignore the errors of a block, since models and targets may raise anything, but not these and lack of memory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, but) or is_out_of_memory(error):
            raise


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that the batch was too large for the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
