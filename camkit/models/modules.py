"""Facts about a module: its device, the input it takes, and whether camkit can put hooks on it.

Models with several inputs or outputs, models of clips and functions are wrapped: they take one picture and return one
output.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from camkit.errors import (
    CamkitError,
    ImageError,
    InputError,
    LayerError,
    ModelError,
    RunError,
    advice,
    as_error,
    brief,
    did_you_mean,
    whole_number,
)
from camkit.models.loaded import Labels, LoadedModel, as_labels
from camkit.types import CellPositions, Pixels, Preprocess

ScoringFunction: TypeAlias = Callable[[Tensor], Any]
"""Takes pictures (N, C, H, W), float32 and on the CPU, and returns one row of scores (N, classes) for each of them, as
a tensor or as anything that NumPy makes an array of; or a list with a dictionary of each picture's boxes."""


_ROUNDING = 1e-3
"""How far rounding may take a probability out of 0..1."""


class BlackBox(nn.Module):
    """A module without layers and gradients that calls a function.

    Args:
        function: returns the scores of pictures.
        batch: how many pictures the function takes at a time; None for any number. The last pictures are filled up
            with copies.
        sigmoid: whether the scores are the results of a sigmoid.
        reason: why the model has neither layers nor gradients.
        way_out: what to do to have both; empty if nothing is known.

    Attributes:
        function: the function.
        usual_method: the method that "auto" stands for.
        explains_any: whether it returns the heat of any class itself.
    """

    usual_method, explains_any = "occlusion", False

    def __init__(
        self,
        function: ScoringFunction,
        batch: int | None = None,
        *,
        sigmoid: bool = False,
        reason: str = "a black box has neither layers nor gradients",
        way_out: str = "",
    ) -> None:
        super().__init__()
        self._reason, self._way_out = reason, way_out
        # A module is called, not registered: camkit would look for layers in it.
        self.function = function.__call__ if isinstance(function, nn.Module) else function
        self._batch, self._sigmoid = batch, sigmoid

    def lacks(self, instead: str = "") -> str:
        """Return a sentence: why there are neither layers nor gradients, and what to do, for example ``instead``."""
        ways = ", or ".join(way for way in (self._way_out, instead) if way)
        return f"{self._reason}; {ways}" if ways else self._reason

    def forward(self, images: Tensor) -> Any:
        """Return the scores of pictures (N, C, H, W), or their boxes, on the same device.

        Raises:
            RunError: the function returned something other than a row of numbers for each picture.
        """
        count = len(images)
        batch = self._batch or count
        pictures = images.detach().float().cpu()
        # A copy, because the function may write to its pictures.
        pictures = torch.cat([pictures, pictures[-1:].expand(-count % batch, *pictures.shape[1:])])
        with torch.no_grad():
            parts = [self._run(part) for part in pictures.split(batch)]
        if self._batch is None:
            joined = parts[0]
        elif isinstance(parts[0], list):  # the boxes of each picture
            joined = [boxes for part in parts for boxes in part][:count]
        else:
            joined = tree_map(lambda *values: torch.cat(values)[:count], *parts)
        scores = tree_map_only(Tensor, lambda value: value.to(images.device), joined)
        if not self._sigmoid or not isinstance(scores, Tensor):
            return scores
        if bool(((scores < -_ROUNDING) | (scores > 1 + _ROUNDING)).any()):
            raise RunError("the function returned scores below 0 or above 1, which are not the results of a sigmoid")
        # The graph of a sigmoid shows what they are.
        logits = scores.double().logit(torch.finfo(torch.float64).eps)
        return logits.requires_grad_(torch.is_grad_enabled()).sigmoid().to(scores.dtype)

    def _run(self, pictures: Tensor) -> Any:
        scores = self.function(pictures)
        if isinstance(scores, (list, tuple)) and scores and all(isinstance(each, dict) for each in scores):
            return _boxes(scores, len(pictures))
        with as_error(RunError, lambda _: f"the function returned {type(scores).__name__}, not an array of scores"):
            rows = scores.detach() if isinstance(scores, Tensor) else torch.from_numpy(np.array(scores, np.float32))
        if rows.dim() != 2 or len(rows) != len(pictures):
            raise RunError(
                f"the function returned scores of shape {tuple(rows.shape)} for {len(pictures)} pictures; it must "
                "return a row of scores for each picture"
            )
        return rows.to("cpu", torch.float32, copy=True)  # the function may use its array again


class FileBox(BlackBox):
    """A file that camkit can only run. It may return anything that a model may; targets find the scores in it.

    Raises:
        RunError: (when it is called) the file failed.
    """

    def _run(self, pictures: Tensor) -> Any:
        return self._returned(pictures)

    def _returned(self, pictures: Tensor, *classes: Tensor) -> Any:
        try:
            outputs = self.function(pictures, *classes)
        except Exception as error:  # what runs the file may raise anything
            lines = (str(error).strip() or type(error).__name__).splitlines()
            cause = lines[-1] if "TorchScript" in lines[0] else " ".join(lines)  # TorchScript begins with its trace
            raise RunError(f"the file failed on pictures of shape {tuple(pictures.shape)} ({brief(cause)})") from error
        return tree_map_only(
            Tensor, lambda each: (each.float() if each.is_floating_point() else each).detach(), outputs
        )


class HeatFile(FileBox):
    """A file of ``camkit.export``: it takes pictures and their classes, and returns scores (N, K) and heat (N, h, w).

    Attributes:
        places: where the cells of the heat look.
    """

    usual_method = "from-file"

    def __init__(
        self, function: Callable[[Tensor, Tensor], Any], places: CellPositions, *, explains_any: bool, **options: Any
    ) -> None:
        super().__init__(cast("ScoringFunction", function), **options)
        self.places, self.explains_any = places, explains_any

    def _run(self, pictures: Tensor) -> Any:
        return self._returned(pictures, torch.zeros(len(pictures), dtype=torch.long))[0]

    def heat(self, pictures: Tensor, classes: Sequence[int]) -> Float[Tensor, "n h w"]:
        """Return the heat of a class for each picture.

        Raises:
            RunError: the file failed, or its heat has another shape than its cells.
        """
        size = self._batch or len(pictures)
        parts = zip(pictures.float().cpu().split(size), torch.tensor(classes).split(size), strict=True)
        heat = torch.cat([self._returned(*part)[1] for part in parts])
        if heat.dim() != 3 or len(heat) != len(pictures) or tuple(map(len, self.places)) not in ((), heat.shape[1:]):
            raise RunError(f"the file returned heat of shape {tuple(heat.shape)}, which is not that of its cells")
        return heat.to(pictures.device)


def _boxes(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Tensor]]:
    """Return the boxes of each picture as tensors.

    Raises:
        RunError: they are not ``boxes`` (K, 4) and ``scores`` (K,), perhaps with ``labels`` (K,), for each picture.
    """
    wrong = "the function must return a dictionary for each picture, with boxes (K, 4) and scores (K,)"
    with as_error(RunError, lambda _: wrong):
        found = [
            {name: torch.as_tensor(row[name]).detach().cpu() for name in ("boxes", "scores", "labels") if name in row}
            for row in rows
        ]
        sizes = [(each["boxes"].reshape(-1, 4), *each.values()) for each in found]
    if len(found) != count or any(len({len(value) for value in values}) != 1 for values in sizes):
        raise RunError(wrong)
    return [
        {name: value.float() if name != "labels" else value.long() for name, value in each.items()} for each in found
    ]


def black_box(
    function: ScoringFunction,
    *,
    labels: Labels | None = None,
    preprocess: Preprocess | None = None,
    name: str | None = None,
    batch: int | None = None,
    sigmoid: bool = False,
) -> LoadedModel:
    """Return a function as a model, for ``camkit.explain``, ``camkit.check`` and everything else that takes models.

    camkit then knows only the scores. Methods that need layers or gradients are refused; "occlusion", the default, and
    "rise" run the function on changed pictures.

    Args:
        function: takes pictures (N, C, H, W) as a float32 tensor on the CPU, prepared by ``preprocess``, and returns
            their scores (N, classes): logits, or probabilities that add up to 1; or for a detector a list with a
            dictionary of ``boxes`` (K, 4), ``scores`` and ``labels`` (K,) for each. What it raises passes through.
        labels: the names of the classes.
        preprocess: prepares a PIL picture for the function.
        name: what reports call the model; the function's name if not given.
        batch: how many pictures the function takes at a time; None for any number.
        sigmoid: pass True if the scores are the results of a sigmoid: probabilities of classes that do not exclude each
            other. Otherwise camkit treats scores that do not add up to 1 as logits.

    Raises:
        ModelError: ``function`` cannot be called, or ``batch`` is below 1.

    Examples:
        >>> import camkit
        >>> brightness = camkit.black_box(lambda pictures: pictures.flatten(2).mean(2), labels=["red", "green", "blue"])
        >>> picture = camkit.scenes.scene_paths()["plane-sky"]
        >>> explanation = camkit.explain(brightness, picture, preprocess=camkit.load_model("demo-fair").preprocess)
        >>> explanation.method
        'occlusion'
    """
    if not callable(function):
        raise ModelError(f"a black box is a function from pictures to scores, not {function!r}")
    if batch is not None:
        batch = whole_number(batch, "batch", 1, ModelError)
    named = name or str(getattr(function, "__name__", type(function).__name__))
    return LoadedModel(BlackBox(function, batch, sigmoid=sigmoid).eval(), named, preprocess, as_labels(labels))


class Adapter(nn.Module):
    """A model as one that takes pictures alone, and returns what camkit reads.

    Args:
        model: the model.
        run: returns the output of the model for pictures (N, C, *size).
        held: what else ``run`` takes, by name; it moves with the model to another device.

    Attributes:
        spatial_axes: how many axes the input has after the channels, if the model's first convolution does not say it.
    """

    spatial_axes: int | None = None

    def __init__(self, model: nn.Module, run: Callable[..., Any], **held: Tensor) -> None:
        super().__init__()
        self.model = model
        self._run, self._held = run, tuple(held)
        for name, value in held.items():
            self.register_buffer(name, value)

    def forward(self, pictures: Tensor) -> Any:
        """Return the output for a batch of pictures."""
        return self._run(self.model, pictures, **{name: getattr(self, name) for name in self._held})


class Adapted(nn.Module):
    """Runs a model on pictures and on other inputs that are the same for each of them, and returns one of its outputs.

    Args:
        model: the model.
        others: its other arguments by name. A tensor whose first axis has one element is repeated for each picture of
            a batch, also inside lists and dictionaries; everything else is passed on as it is.
        picture: the name of the argument for the picture; None passes it first.
        output: the key, the attribute, or the index, from 0, of the output; None returns what the model returns.
    """

    def __init__(
        self, model: nn.Module, others: Mapping[str, Any], picture: str | None = None, output: str | int | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.others, self.picture, self.output = dict(others), picture, output

    def forward(self, pictures: Tensor) -> Any:
        """Return the output for a batch of pictures.

        Raises:
            ModelError: the model has no such output.
        """

        def beside(value: Tensor) -> Tensor:
            value = value.to(pictures.device)
            return value.expand(len(pictures), *value.shape[1:]) if value.shape[:1] == (1,) else value

        others: dict[str, Any] = tree_map_only(Tensor, beside, self.others)
        by_name = {} if self.picture is None else {self.picture: pictures}
        output: Any = self.model(**by_name, **others) if by_name else self.model(pictures, **others)
        if self.output is None:
            return output
        named = dict(output) if isinstance(output, Mapping) else {}
        if isinstance(output, (tuple, list)):
            named = {str(place): value for place, value in enumerate(output)}
            named |= output._asdict() if hasattr(output, "_asdict") else {}
        elif not named:
            named = dict(getattr(output, "__dict__", {}))
        keys = {str(key): key for key in named}
        if str(self.output) not in keys:
            has = f"; it has {', '.join(map(repr, keys))}" if keys else ""
            raise ModelError(
                f"the model has no output {str(self.output)!r}: it returned a {type(output).__name__}{has}"
            )
        return named[keys[str(self.output)]]


def adapted(model: nn.Module, others: Any = None, picture: Any = None, output: str | int | None = None) -> nn.Module:
    """Return a model that holds its other inputs and returns one of its outputs; the model itself if none is named.

    Raises:
        InputError: ``others`` is not a dictionary of names, ``picture`` is one of the others, or the model has no such
            argument.
    """
    names = [] if others is None else others
    if others is not None and not (isinstance(others, Mapping) and all(isinstance(name, str) for name in others)):
        raise InputError(
            f"inputs must be a dictionary of the model's other arguments by name, not {brief(repr(others))}"
        )
    if others is not None or picture is not None:
        parameters = inspect.signature(model.forward, follow_wrapped=False).parameters
        first = picture or next(iter(parameters), None)
        if first in names:
            raise InputError(
                f"{first!r} is the argument for the picture, but also among the other inputs; leave it out of inputs, "
                "or name the picture's argument with picture=..."
            )
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in () if takes_any else [*names, *([picture] if picture else [])]:
            if name not in parameters:
                near = did_you_mean(name, parameters)
                raise InputError(f"the model's forward has no argument {name!r}; it has {', '.join(parameters)}{near}")
    elif output is None:
        return model
    return Adapted(model, others or {}, picture, output)


def taking_clips(model: nn.Module, argument: str) -> Adapter:
    """Return a model that reads clips frame by frame, (N, T, C, H, W), as one that takes them as (N, C, T, H, W).

    Args:
        model: the model.
        argument: the name of its argument for the clips.
    """
    module = Adapter(model, functools.partial(_by_frames, argument=argument))
    module.spatial_axes = 3
    return module


def _by_frames(model: nn.Module, clips: Float[Tensor, "n c t h w"], *, argument: str) -> object:
    return model(**{argument: clips.transpose(1, 2)})


class ClipPreprocess(ABC):
    """Chooses frames of a video, and turns them into the input of a model."""

    @abstractmethod
    def chosen(self, count: int, rate: float) -> list[int]:
        """Return the numbers of the frames that the model sees, from 0.

        Args:
            count: how many frames the video has.
            rate: how many of them a second has.

        Raises:
            ImageError: the video is too short.
        """

    @abstractmethod
    def of_frames(self, frames: Sequence[Pixels]) -> Float[Tensor, "c t h w"]:
        """Return the model's input for these frames, (H, W, 3) each."""

    def __call__(self, picture: Image.Image) -> Tensor:  # noqa: ARG002
        """Refuse a single picture.

        Raises:
            ImageError: always.
        """
        raise ImageError("the model takes clips, and this is one picture; pass a video file, or a tensor (C, T, H, W)")


def refuse_short(count: int, needed: int) -> None:
    """Raise ImageError if a video has fewer frames than a model takes."""
    if count < needed:
        raise ImageError(f"the model takes {needed} frames, but the video has {count}")


BLACK_BOX = "camkit.black_box(model), which needs neither layers nor gradients"
"""The way out for models that camkit can only run."""

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "torch.nn.intrinsic.q")


def black_box_in(model: nn.Module) -> BlackBox | None:
    """Return the black box that a model is, or whose output it selects from; None if there is none."""
    while isinstance(model, (Adapted, Adapter)):
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
        ModelError: the module is TorchScript, which takes no hooks, or quantised, which has no gradients; or weights
            are not in memory.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            "some weights are not in memory, perhaps because Accelerate loads them layer by layer; load the model "
            f"without device_map and offloading, or pass {BLACK_BOX}"
        )
    parts = list(model.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ModelError(
            f"a TorchScript module takes no hooks; pass the Python module it was made from, or {BLACK_BOX}"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
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


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a model that makes its weights in its first pass.

    Raises:
        ModelError: some of its layers are lazy.
    """
    if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        raise ModelError("the model has lazy layers without weights; run it once before you explain it")


CLIPS = "camkit explains clips only if the model's first convolution is a Conv3d"


def about_failure(module: nn.Module, inputs: Tensor, error: Exception) -> InputError | None:
    """Return the error of a failed pass as a sentence, if the reason is known but unclear in PyTorch's own error."""
    first = _first_convolution(module)
    if not isinstance(error, CamkitError) and first is not None and first.in_channels != inputs.shape[1]:
        return ImageError(
            f"the picture has {inputs.shape[1]} channels, but the model's first convolution takes {first.in_channels}"
        )
    inner = module.model if isinstance(module, Adapted) else module
    has_inputs = isinstance(module, Adapted) and bool(module.others or module.picture)
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
        "more than 1 value per channel": "batch normalisation in training mode needs more than one picture; pass "
        "several",
        r"unpack \(expected 5, got 4\)": f"the model takes clips, of five axes, not pictures (N, C, H, W); {CLIPS}",
    }
    found = next((sentence for pattern, sentence in advices.items() if re.search(pattern, str(error))), None)
    parameters = list(inspect.signature(inner.forward).parameters)
    if (
        found is None and not has_inputs and "pixel_values" in parameters[1:]
    ):  # as in Hugging Face's models of pictures and text
        found = (
            f"camkit passes the picture first, but the model's forward takes {parameters[0]!r} first; "
            + advice("pass picture='pixel_values' and inputs={...} to camkit.explain or Explainer, or ", "")
            + "wrap the model in a module whose forward(self, picture) returns self.model(pixel_values=picture, ...)"
        )
    return None if found is None else ModelError(f"{found} ({brief(error)})")


@contextlib.contextmanager
def explained_failures(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Raise what ``about_failure`` says about an error in the block, if it knows the reason."""
    try:
        yield
    except Exception as error:
        explained = about_failure(module, inputs, error)
        if explained is None:
            raise
        raise explained from error


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
