"""The base class of targets, the scores that they return, and functions that find scores in a model's output.

Functions at the beginning look up classes by index or by label, and check the numbers in targets.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from camkit.errors import TargetError, advice, did_you_mean, whole_number
from camkit.types import Activation


def number_from_0(value: Any, what: str, below: float | int) -> float:
    """Return a number from 0 to below a limit.

    Raises:
        TargetError: it is another value.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        raise TargetError(f"{what}, not {value!r}")
    return float(value)


def direction_of(sign: Any) -> int:
    """Return 1 for "+", and -1 for "-".

    Raises:
        TargetError: the sign is neither.
    """
    if sign not in ("+", "-"):
        raise TargetError(f"the direction must be '+' or '-', not {sign!r}")
    return 1 if sign == "+" else -1


Points: TypeAlias = tuple[tuple[float, float], ...]
"""A point (x, y), or two opposite corners of a box: left and top, right and bottom."""


def points(name: str, numbers: Any, *, box: bool = False) -> Points:
    """Return numbers as a point, or as the corners of a box; ``name`` is what takes them, for the error.

    Raises:
        TargetError: they are not two finite numbers, or not four that make a box with an area.
    """
    try:
        sides = [float(number) for number in numbers]
    except (TypeError, ValueError):
        sides = []
    is_box = len(sides) == 4 and sides[0] < sides[2] and sides[1] < sides[3]
    if not all(map(math.isfinite, sides)) or not (is_box if box else len(sides) == 2):
        wanted = "left, top, right and bottom with left < right and top < bottom" if box else "x and y"
        raise TargetError(f"{name} takes {wanted}, finite numbers, not {numbers!r}")
    return tuple(zip(sides[::2], sides[1::2], strict=True))


def class_of(value: Any, labels: tuple[str, ...] | None) -> int:
    """Return the index of a class given by index, by label or, if no class has this label, by its index as text.

    Labels may be numbers that are not the indices, such as the digits from 1 to 10.

    Raises:
        TargetError: the label is unknown or ambiguous, or the value is neither an index nor a label.
    """
    if not isinstance(value, str):
        return whole_number(value, "a class that is not a label", kind=TargetError)
    folded, names = value.strip().casefold(), list(enumerate(labels or ()))
    indices = [index for index, name in names if name == value]
    indices = indices or [index for index, name in names if name.strip().casefold() == folded]
    if len(indices) == 1:
        return indices[0]
    if not indices and value.isdecimal():
        return int(value)
    if labels is None:
        raise TargetError(
            f"target {value!r} is a label, but this model comes without labels; pass "
            f"{advice('labels=[...]', '--labels FILE')} or a class index"
        )
    if indices:
        raise TargetError(
            f"classes {' and '.join(map(str, indices))} are all called {value!r}; pass one of these indices"
        )
    raise TargetError(f"the model has no label {value!r}{did_you_mean(value, labels)}")


def label_of(index: int, labels: tuple[str, ...] | None) -> str | None:
    """Return the label of a class; None if the model has none for it."""
    return labels[index] if labels is not None and 0 <= index < len(labels) else None


def check_indices(classes: int, indices: Iterable[int]) -> None:
    """Refuse classes that the model does not have.

    Raises:
        TargetError: an index is out of range.
    """
    for index in indices:
        if not 0 <= index < classes:
            raise TargetError(f"target {index} is out of range: the model has classes 0 to {classes - 1}")


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of one target for a batch of N images.

    Attributes:
        values: the scores (N,), with their graph.
        indices: the class of each image, if the target is a class.
        probabilities: the probability of that class.
        classes: how many classes the model has.
        description: the name of a target that is not a class.
        quantity: what the scores are, as a phrase such as "logit"; one phrase for all images, or one for each.
        present: True for images in which the target exists; None if it exists in all.
        absence: the error for images in which it does not exist.
        fewer: True if an image without the target is not an error: not every image has a second best box.
        boxes: the detected box (left, top, right, bottom) of each image, in pixels of the model's input.
        missed: what keeps the box of each image from being found; None for a box that is found.
        cells: where each image's class is scored on the map of a segmentation network.
        rivals: the classes that each image's class is compared with.
        activation: the softmax or sigmoid that gave the scores, as a node of the autograd graph. Gradients pass
            through it unchanged, so the map explains the logits.
    """

    values: Float[Tensor, " n"]
    indices: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] | None = None
    classes: int | None = None
    description: str | None = None
    quantity: str | tuple[str, ...] = "score"
    present: tuple[bool, ...] | None = None
    absence: str = ""
    fewer: bool = False
    boxes: tuple[tuple[float, ...] | None, ...] | None = None
    missed: tuple[str | None, ...] | None = None
    cells: Bool[Tensor, "n h w"] | None = None
    rivals: tuple[tuple[int, ...], ...] | None = None
    activation: Any = None

    @property
    def final(self) -> str:
        """The name of ``activation``, the softmax or sigmoid; empty if there is none."""
        return "" if self.activation is None else self.activation.name()

    def of_image(self, place: int) -> Scores:
        """Return the score and the class of one image alone."""
        return Scores(
            self.values[place : place + 1],
            None if self.indices is None else self.indices[place : place + 1],
            classes=self.classes,
            boxes=None if self.boxes is None else self.boxes[place : place + 1],
            missed=None if self.missed is None else self.missed[place : place + 1],
            cells=None if self.cells is None else self.cells[place : place + 1].to("cpu", copy=True),
            rivals=None if self.rivals is None else self.rivals[place : place + 1],
        )


def copied(output: Any) -> Any:
    """Return a copy of a model's output, for the user's functions, which may work in place."""
    return tree_map_only(Tensor, Tensor.clone, output)


def check_values(values: Any, batch: int, who: str) -> None:
    """Refuse what cannot be the scores of a batch, from a target or a function of the user's.

    Raises:
        TargetError: it is not a dense floating-point tensor (N,).
    """
    is_dense = isinstance(values, Tensor) and values.layout is torch.strided and not values.is_meta
    if not is_dense or values.shape != (batch,) or not values.is_floating_point():
        kind = f" of {values.dtype}" if isinstance(values, Tensor) else ""
        raise TargetError(
            f"{who} returned {describe(values)}{kind}; it must return a floating-point tensor of shape ({batch},), one "
            "score per image"
        )


def _of_copies(call: Callable[..., Scores]) -> Callable[..., Scores]:
    @functools.wraps(call)
    def called(target: Target, output: Any, batch: int) -> Scores:
        scored: Any = call(target, copied(output), batch)
        if not isinstance(scored, Scores):
            name = type(target).__name__
            raise TargetError(f"the target {name} returned {describe(scored)}; it must return camkit.targets.Scores")
        check_values(scored.values, batch, f"the target {type(target).__name__}")
        return scored

    return called


class Target(ABC):
    """What to explain: turns a model's output into one score per image.

    Attributes:
        for_threads: True if scoring runs none of the user's code, so that several threads may score at the same time. A
            class of your own counts as the user's code, unless it says otherwise.
    """

    for_threads: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Let several threads score by the user's class only if it says so, and give it copies of the output."""
        if not cls.__module__.startswith("camkit."):
            cls.for_threads = vars(cls).get("for_threads", False)
            if "__call__" in vars(cls):
                cls.__call__ = _of_copies(vars(cls)["__call__"])  # type: ignore[method-assign]

    @abstractmethod
    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores for a model's output and the number of images.

        The scores keep their graph, so that they can be differentiated.

        Raises:
            TargetError: the output does not have what the target explains.
        """

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> Target:  # noqa: ARG002
        """Return the target for a model with these labels and this activation; by default the target itself.

        Raises:
            TargetError: a label is unknown or ambiguous.
        """
        return self

    def of_pictures(self, numbers: Sequence[int]) -> Target:  # noqa: ARG002
        """Return the target for the pictures with these numbers, from 1, of a call; by default the target itself."""
        return self


@dataclass(frozen=True, eq=False)
class OfClasses(Target):
    """A target on the scores of classes. They may be given as labels; ``bind`` replaces labels by indices.

    Attributes:
        activation: what turns the scores into probabilities; filled in when the target is bound to a model.
        labels: the labels of the model; ``bind`` fills them in, too.
    """

    activation: Activation | None = field(default=None, compare=False, repr=False, kw_only=True)
    labels: tuple[str, ...] | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def by_label(self) -> tuple[str, ...]:
        """The names of the fields that hold a class, or tuples of classes."""
        return ()

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> Self:
        """Return the target for a model with these labels and this activation, if it has none of its own."""
        of_label = functools.cache(functools.partial(class_of, labels=labels))

        def found(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(found, value))
            return of_label(value) if isinstance(value, str) else class_of(value, labels)

        indices = {name: found(getattr(self, name)) for name in self.by_label}
        return replace(self, activation=self.activation or activation, labels=labels, **indices)


@dataclass(frozen=True)
class OfTarget(Target):
    """A target that computes its scores from another target's.

    Attributes:
        of: the other target, which may be the user's.
    """

    for_threads = False

    of: Target


class Expands(Target):
    """A target that stands for several others; the model's output decides how many."""

    @abstractmethod
    def expand(self, output: Any, batch: int) -> Sequence[Target]:
        """Return the targets for this output."""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores of the first of them."""
        return self.expand(output, batch)[0](output, batch)


ToInput: TypeAlias = Callable[[float, float], tuple[float, float]]
"""``to_input(x, y)`` returns where a point of a picture lies on the model's input, in pixels."""


@dataclass(frozen=True)
class OnPicture(Target):
    """A target that names a place on the picture.

    Attributes:
        points: a point, or two corners of a box, in pixels of the picture.
        on_input: these in pixels of the input of each image; filled in for each batch.
        size: the size of the inputs.
    """

    points: Points = ()
    on_input: tuple[Points, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    size: tuple[int, ...] = field(default=(), compare=False, repr=False, kw_only=True)

    @property
    def words(self) -> str:
        """The numbers of the points, as they are typed."""
        return ",".join(f"{number:g}" for point in self.points for number in point)

    def on_inputs(self, to_inputs: Sequence[ToInput], size: tuple[int, ...]) -> Self:
        """Return the target for a batch of inputs of this size; ``to_inputs`` has a function for each picture.

        A target that has its places on the inputs already is returned as it is. If it has one, it is for changed
        versions of one picture.
        """
        placed = tuple(tuple(to_input(*point) for point in self.points) for to_input in to_inputs)
        return self if self.on_input else replace(self, on_input=placed, size=size)


_BY_YOURSELF = (
    "pass target=FUNCTION, which takes this output and returns one score per image",
    "wrap it in a factory whose module returns them (--model file.py:factory)",
)
"""What to do with an output that camkit cannot read by itself, in Python and in a shell."""


def describe(output: Any) -> str:
    """Describe in a few words what a model returned.

    >>> import torch
    >>> describe({"out": torch.zeros(2, 21, 8, 8), "aux": None})
    "a dict with 'out': a tensor of shape (2, 21, 8, 8), 'aux': a NoneType"
    """
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with " + ", ".join(f"{key!r}: {describe(v)}" for key, v in output.items())
    if isinstance(output, (tuple, list)):
        first = f", first {describe(output[0])}" if output else ""
        return f"a {type(output).__name__} of {len(output)} items{first}"
    return f"a {type(output).__name__}"


def logits_of(output: Any, batch: int) -> Float[Tensor, "n k"]:
    """Find the class scores (N, K) in a model's output.

    The output may be a tensor, a dictionary or object with ``logits`` (or ``out``), or a tuple or list that begins with
    one of these. An output (N,) counts as one logit, and (N, K, 1, 1) as (N, K).

    Raises:
        TargetError: there are no class scores, or several tensors that could hold them; the message describes what the
            model returned.
    """
    scores = output if isinstance(output, Tensor) else scores_in(output)
    if not isinstance(output, Tensor):
        _refuse_boxes(output, batch)
    if isinstance(scores, Tensor) and scores.is_floating_point():
        if batch == 1 and scores.dim() < 2 and scores.numel() > 0:  # the model dropped the batch axis
            scores = scores.reshape(1, -1)
        if scores.shape[:1] == (batch,) and scores.dim() == 1:
            return scores[:, None]
        if scores.shape[:1] == (batch,) and scores.dim() >= 2 and scores.numel() == batch * scores.shape[1] > 0:
            return scores.flatten(1)
    named = [
        str(key)
        for key, value in (output.items() if isinstance(output, dict) else ())
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 4) and len(value) == batch
    ]
    way_out = advice(*_BY_YOURSELF)
    if takes_prompts(output):
        way_out = "it segments the object at a point or in a box, so pass " + advice(
            "target=targets.mask_at(x, y) or targets.mask_in(...)", "--point x,y or --box-prompt l,t,r,b"
        )
    elif named:
        way_out = f"choose them by name, such as {advice(f'output={named[0]!r}', f'--output {named[0]}')}"
    elif type(output).__module__.startswith("transformers."):
        way_out = f"pass its name (hf:NAME) or folder, so that camkit can read its boxes, masks and maps, or {way_out}"
    raise TargetError(
        f"the model returned {describe(output)}, but no class scores of shape ({batch}, classes); {way_out}"
    )


def _refuse_boxes(output: Any, batch: int) -> None:
    """Refuse the scores of boxes, or of the best classes: in another picture, they belong to others."""
    is_named = isinstance(output, dict) and any(key in output for key in _SCORE_KEYS)
    tensors = [] if is_named else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    of_boxes = any(one.dim() > 0 and other.shape == (*one.shape, 4) for one in floats for other in floats)
    numbers = [tensor for tensor in tensors if tensor.dtype in (torch.int32, torch.int64) and tensor.numel() > batch]
    of_some = any(one.shape == other.shape for one in floats[:1] for other in numbers)
    if of_boxes or of_some:
        raise TargetError(
            f"the model returned tensors of shapes {_shapes(tensors)}, which may be the scores of boxes or of the best "
            "classes; wrap it in a module that returns a list with a dictionary of boxes, scores and labels for each "
            "picture; if one tensor has a score for each class, choose that, for example with "
            + advice("output=0", "--output 0")
        )


def scores_in(output: Any) -> Any:
    """Return what ``main_tensor`` finds, if nothing else in the output could hold the scores.

    Raises:
        TargetError: several tensors could hold the scores.
    """
    candidates = rivals(output)
    if candidates:
        raise TargetError(
            f"the model returned several tensors that could hold class scores, of shapes {_shapes(candidates)}; choose "
            f"one by its index, for example the second with {advice('output=1', '--output 1')}, or "
            + advice(*_BY_YOURSELF)
        )
    return main_tensor(output)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def takes_prompts(output: Any) -> bool:
    """Tell whether a model returned what its decoder needs to segment the object at a point or in a box."""
    return isinstance(output, dict) and "decode" in output


def maps_of(output: Any, batch: int) -> Float[Tensor, "n k h w"] | None:
    """Return the maps of class scores (N, K, h, w) in a segmentation network's output; None if there are none."""
    maps = main_tensor(output)
    are_maps = isinstance(maps, Tensor) and maps.dim() == 4 and _are_maps(maps) and len(maps) == batch
    return scores_in(output) if are_maps else None


def _are_maps(maps: Any) -> bool:
    """Tell whether a value can be maps (N, K, h, w) of class scores: more than one cell for each class."""
    is_float = isinstance(maps, Tensor) and maps.is_floating_point()
    return is_float and maps.dim() == 4 and maps.shape[1] > 0 and maps.shape[2] * maps.shape[3] > 1


def depth_of(output: Any) -> Tensor | None:
    """Return the depth of each pixel (N, h, w) in the output of a network of Hugging Face; None if there is none."""
    return _named(output, "predicted_depth")


def _named(output: Any, *names: str) -> Tensor | None:
    """Return the first tensor under one of these names in a dictionary or an object."""
    values = (output.get(name) if isinstance(output, dict) else getattr(output, name, None) for name in names)
    return next((value for value in values if isinstance(value, Tensor)), None)


def detections_of(output: Any, batch: int) -> list[dict[str, Tensor]] | None:
    """Return each image's detections: ``boxes`` (K, 4), ``scores`` (K,) and perhaps ``labels``.

    This is what torchvision's detectors return: a list with one dictionary per image. For any other output, None.
    """
    images = output[0] if isinstance(output, tuple) and output and isinstance(output[0], list) else output
    if not isinstance(images, (list, tuple)) or len(images) != batch:
        return None
    are_detections = all(
        isinstance(item, dict) and isinstance(item.get("boxes"), Tensor) and isinstance(item.get("scores"), Tensor)
        for item in images
    )
    return list(images) if are_detections else None


def embedding_of(output: Any, batch: int) -> Float[Tensor, "n d"]:
    """Return the embedding (N, D) in a model's output: ``image_embeds``, ``pooler_output``, or the tensor itself.

    Raises:
        TargetError: there is no embedding.
    """
    value = _named(output, "image_embeds", "pooler_output")
    if value is None:
        return logits_of(output, batch)
    return value.reshape(batch, -1) if value.dim() > 2 else value


_SCORE_KEYS = ("logits", "out", "last_hidden_state")
"""Keys under which dictionaries hold class scores; one Hugging Face network uses ``last_hidden_state`` for (N, K)."""


def main_tensor(output: Any) -> Any:
    """Follow dictionaries, objects with ``logits``, and tuples and lists to the tensor that holds the scores."""
    held = [output[key] for key in _SCORE_KEYS if key in output] if isinstance(output, dict) else []
    if not held and isinstance(getattr(output, "logits", None), Tensor):
        held = [output.logits]
    elif not held and isinstance(output, (tuple, list)):
        held = list(output)
    return main_tensor(held[0]) if held else output


def rivals(output: Any) -> list[Tensor]:
    """Return the tensors of a tuple or list, also a nested one, if more than one could hold scores; else an empty list.

    These are class scores (N, K), and maps (N, K, h, w) if the first tensor is one. Maps after class scores are the
    features that the scores are computed from.
    """
    if not isinstance(output, (tuple, list)) or isinstance(getattr(output, "logits", None), Tensor):
        return []
    leaves = tree_leaves(output, is_leaf=lambda item: isinstance(item, dict))
    tensors = [item for item in leaves if isinstance(item, Tensor) and item.is_floating_point()]
    maps = [item for item in tensors if _are_maps(item)] if tensors and _are_maps(tensors[0]) else []
    candidates = [*maps, *(item for item in tensors if item.dim() == 2 and item.shape[1] > 0)]
    candidates = [item for item in candidates if len(item) == len(candidates[0])]
    return candidates if len(candidates) > 1 else []


_ACTIVATIONS = ("SoftmaxBackward0", "SigmoidBackward0", "LogSoftmaxBackward0", "LogSigmoidBackward0")
_RESHAPING = (
    "AliasBackward0",
    "ClampBackward0",
    "ClampBackward1",
    "ClampMaxBackward0",
    "ClampMinBackward0",
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)
"""The operations in PyTorch's graph that give probabilities, and those that leave the values as they are.

Probabilities are often clamped to keep their logarithm finite."""

_ROUNDING, _ROUNDING_16_BITS = 1e-3, 2e-2
"""How far a sum of probabilities may differ from 1: more than the rounding errors of 1,000 classes add up to, in fp32
and in 16 bits."""


def final_activation(scores: Tensor) -> Any:
    """Return the softmax, sigmoid or logarithm of one of them that gave these scores, as a node of the autograd graph.

    It may be a module or a function. None if the scores come from something else, or have no graph.
    """
    node: Any = scores.grad_fn
    while node is not None and node.name() in _RESHAPING:
        node = node.next_functions[0][0]
    return node if node is not None and node.name() in _ACTIVATIONS else None


ScoreKind: TypeAlias = Literal["logit", "probability", "log-probability"]
PLURAL: dict[ScoreKind, str] = {
    "logit": "logits",
    "probability": "probabilities",
    "log-probability": "log-probabilities",
}


@dataclass(frozen=True, eq=False)
class ScoreReading:
    r"""What kind of numbers class scores are.

    Attributes:
        values: the scores (N, K, \*cells), without a graph.
        activation: what ``final_activation`` finds.
        final: its name; empty if there is none.
    """

    values: Float[Tensor, "n k *cells"]
    activation: Any
    final: str

    @classmethod
    def of(cls, scores: Float[Tensor, "n k *cells"], final: str = "") -> ScoreReading:
        """Read class scores: by what computed them, and by their sums over the classes.

        ``final`` is the name of the softmax or sigmoid in which the model ends, for scores without a graph.
        """
        values, node = scores.detach(), final_activation(scores)
        return cls(values, node, final if node is None else node.name())

    @functools.cached_property
    def are_shares(self) -> bool:
        """Whether no score is negative, and the scores of all classes sum to 1 everywhere.

        A picture with NaN or infinity does not count: it would change how the others are read.
        """
        scores = self.values
        if scores.shape[1] < 2 or not scores.numel():
            return False
        are_finite = scores.sum(1, dtype=torch.float32).isfinite().reshape(len(scores), -1).all(1)
        finite = scores if bool(are_finite.all()) else scores[are_finite]
        return len(finite) > 0 and bool(rows_that_sum_to(1, finite).all())

    @functools.cached_property
    def kind(self) -> ScoreKind:
        """The kind of number."""
        if self.final.startswith("Log"):
            return "log-probability"
        return "probability" if self.final or self.are_shares else "logit"

    def probabilities(self, function: Activation) -> Float[Tensor, "n k *cells"]:
        """Return the scores as probabilities: by a function of logits, unless they or their logarithms are given."""
        values = self.values.float()
        if self.kind == "logit":
            return values.sigmoid() if function == "sigmoid" else values.softmax(dim=1)
        return values.exp() if self.kind == "log-probability" else values

    @property
    def logits(self) -> Float[Tensor, "n k *cells"]:
        """Logits that give these scores, without the constant that a softmax drops.

        Probabilities that rounding made 0 or 1 have the logits of the nearest numbers that are neither.
        """
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        limits = torch.finfo(values.dtype)
        if self.final.startswith("LogSigmoid"):
            return values - (-values.clamp(max=-limits.tiny).expm1()).log()
        if self.final.startswith("Sigmoid"):
            return values.clamp(limits.tiny, 1 - limits.eps / 2).logit()
        if not self.are_shares and not self.final.startswith("Softmax"):
            return values
        return values.clamp(min=limits.tiny).log()


def probabilities(scores: ScoreReading, activation: Activation | None) -> Float[Tensor, "n k"] | None:
    """Return the probabilities of the classes; None if the activation is "none".

    Scores that are probabilities already are returned as they are.
    """
    function = activation or ("sigmoid" if scores.values.shape[1] == 1 else "softmax")
    return None if function == "none" else scores.probabilities(function)


def rows_that_sum_to(whole: int, scores: Float[Tensor, "n k *cells"]) -> Bool[Tensor, "n *cells"]:
    """Tell for each row whether none of its scores is negative, and they sum to ``whole``."""
    tolerance = _ROUNDING_16_BITS if scores.dtype in (torch.float16, torch.bfloat16) else _ROUNDING
    return (scores >= 0).all(1) & ((scores.sum(1, dtype=torch.float32) / whole - 1).abs() <= tolerance)


@contextmanager
def passing_through(node: Any) -> Iterator[None]:
    """Let gradients pass through a softmax or sigmoid unchanged in the block, as if the model returned the logits.

    So a class has the same map with and without this last step, also if its probability is so close to 1 that the
    gradient of the probability is zero. If ``node`` is None, nothing happens.
    """
    if node is None:
        yield
        return

    def unchanged(before: tuple[Tensor | None, ...], after: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return (None if before[0] is None else after[0].to(before[0].dtype), *before[1:])

    handle = node.register_hook(unchanged)
    try:
        yield
    finally:
        handle.remove()
