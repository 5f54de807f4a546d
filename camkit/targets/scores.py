"""The base of all targets, and the scores they return."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from camkit.errors import TargetError
from camkit.targets.outputs import describe
from camkit.types import Activation


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
    cells: Bool[Tensor, "n h w"] | None = None
    rivals: tuple[tuple[int, ...], ...] | None = None
    activation: Any = None

    def of_image(self, place: int) -> Scores:
        """Return the score and the class of one image alone."""
        return Scores(
            self.values[place : place + 1],
            None if self.indices is None else self.indices[place : place + 1],
            classes=self.classes,
            boxes=None if self.boxes is None else self.boxes[place : place + 1],
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
        for_threads: True if scoring runs none of the user's code, so that several threads may score at the same time;
            camkit's own classes do not, unless they say otherwise.
    """

    for_threads: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Let several threads score by camkit's classes, or if the class itself says so; give copies to the user's."""
        is_own = cls.__module__.startswith("camkit.")
        cls.for_threads = vars(cls).get("for_threads", is_own)
        if "__call__" in vars(cls) and not is_own:
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


@dataclass(frozen=True, eq=False)
class OfClasses(Target):
    """A target on the scores of classes.

    Attributes:
        activation: what turns the scores into probabilities; filled in when the target is bound to a model.
    """

    activation: Activation | None = field(default=None, compare=False, repr=False, kw_only=True)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> Self:  # noqa: ARG002
        """Return the target for a model with this activation, if it has none of its own."""
        return replace(self, activation=self.activation or activation)


class Expands(Target):
    """A target that stands for several others; the model's output decides how many."""

    @abstractmethod
    def expand(self, output: Any, batch: int) -> Sequence[Target]:
        """Return the targets for this output."""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores of the first of them."""
        return self.expand(output, batch)[0](output, batch)


class OfPictures(Target):
    """A target that differs between the pictures of a call."""

    @abstractmethod
    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for the pictures with these numbers; the first picture of the call has number 1."""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores of the first pictures of the call."""
        return self.of_pictures(range(1, batch + 1))(output, batch)


ToInput: TypeAlias = Callable[[float, float], tuple[float, float]]
"""``to_input(x, y)`` returns where a point of a picture lies on the model's input, in pixels."""


class OnPicture(Target):
    """A target that names a place on the picture."""

    @abstractmethod
    def on_inputs(self, to_inputs: Sequence[ToInput], size: tuple[int, ...]) -> Target:
        """Return the target for a batch of inputs of this size; ``to_inputs`` has a function for each picture.

        A target that has its places on the inputs already is returned as it is. If it has one, it is for changed
        versions of one picture.
        """
